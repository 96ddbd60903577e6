"""What a card does: itself, kernels of our own, steps of a GPT, a Llama of 7 B parameters."""
