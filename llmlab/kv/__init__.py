"""The `kv` axis: one pool of blocks, and how sequences take their share of it."""
