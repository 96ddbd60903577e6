"""Runs a training step without memory, bytes or compute, to plan a model for a machine."""
