"""The ir package defines the words that compiler and runtime share: ops, graphs, schedules, steps,
and how they are printed."""
