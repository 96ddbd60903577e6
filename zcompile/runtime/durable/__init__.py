"""The durable package lets a training survive its process: commits, their index, and recovery."""
