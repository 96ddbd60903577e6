"""Plans a whole step: placement, windows, simulation, lower bounds, the report."""
