"""The eager package gives tiered tensors their meaning outside of compiled graphs."""
