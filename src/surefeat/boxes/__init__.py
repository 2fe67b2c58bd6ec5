"""Objects from image labels alone."""
