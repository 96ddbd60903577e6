"""Counts live bytes of the device, assigns addresses, and solves linear programs over bytes."""
