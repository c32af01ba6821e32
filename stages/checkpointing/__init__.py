"""Checkpoints on the disk: their layout, who may write, which ones stay, and the pointer to the result."""
