"""The network: trunk, weights, features of an image, and what their confidence means."""
