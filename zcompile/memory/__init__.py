"""Counts live bytes of the device, and assigns addresses."""
