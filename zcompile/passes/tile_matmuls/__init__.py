"""Weights larger than their share of the device, in tiles."""
