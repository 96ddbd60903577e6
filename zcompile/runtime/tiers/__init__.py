"""Where entries rest: device, host, disk."""
