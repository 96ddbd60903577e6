"""A disk tier whose content outlives the run."""
