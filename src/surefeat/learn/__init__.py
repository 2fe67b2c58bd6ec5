"""Features from a folder of photos: warps, loss, the one loop and its run folder."""
