"""The systems that the paper compares itself with, and later ones, written anew as rows."""
