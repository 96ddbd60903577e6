"""Regions that are row-wise in tokens, in slices."""
