"""Rows of the results tables: anything that gives an image feature maps can be measured."""
