"""Many small gradients packed into one buffer, in one launch."""
