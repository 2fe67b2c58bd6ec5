"""Coordinates, images, files and rankings: what every other room stands on."""
