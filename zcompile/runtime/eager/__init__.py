"""Tensors without storage of their own, and what each op means on them."""
