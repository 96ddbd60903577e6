"""Plans a whole step, pure: placement, windows, simulation, lower bounds, the report."""
