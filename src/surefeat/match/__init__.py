"""Two photos: points, regions and every pixel."""
