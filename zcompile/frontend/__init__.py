"""The frontend package holds what a user calls (offload, the backend of torch.compile, dry runs),
and joins passes, planner and runtime behind it."""
