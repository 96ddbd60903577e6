"""Saves, loads and resumes; commits of durable runs."""
