"""A training step without bytes, for `zcompile.plan`."""
