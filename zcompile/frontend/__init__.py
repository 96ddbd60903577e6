"""What a user calls: offload, the backend of torch.compile, hooks of optimizers, plans."""
