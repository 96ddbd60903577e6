"""Which saved values are kept, made again, or kept elsewhere."""
