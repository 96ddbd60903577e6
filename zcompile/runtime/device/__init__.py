"""Compute devices and their memory."""
