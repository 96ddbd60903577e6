"""Decide how a graph runs, one decision a pass, and lower it to a schedule."""
