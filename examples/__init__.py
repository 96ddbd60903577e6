"""Programs to start from: each is a plain PyTorch training loop whose states rest elsewhere."""
