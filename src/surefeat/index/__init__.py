"""An index of photos: their cells on disk, shard by shard, made by one machine or by many."""
