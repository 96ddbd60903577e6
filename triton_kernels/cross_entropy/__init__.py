"""Cross-entropy over tiles of a vocabulary."""
