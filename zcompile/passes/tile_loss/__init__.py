"""A loss over a large vocabulary, in tiles."""
