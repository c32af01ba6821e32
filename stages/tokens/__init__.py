"""Packed rows of tokens: where they are, in which order a training uses them, and the loss of a model on them."""
