"""Saves, loads and resumes the state of a training; commits durable steps."""
