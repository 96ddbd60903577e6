"""Bytes that are alive, and static addresses for them."""
