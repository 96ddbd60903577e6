"""Transfers between tiers: what was promised, in which order, through which staging memory."""
