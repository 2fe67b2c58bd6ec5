"""Parts of objects from a handful of labels."""
