"""What a user calls: offload, the backend of torch.compile, optimizer hooks, re-planning, dry
runs."""
