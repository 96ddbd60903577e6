"""The device package makes the CPU and CUDA look alike as compute devices, and manages their
memory."""
