"""Data: where images and annotated pairs come from, in their public layouts."""
