"""Packed rows of tokens: where they are, their order in a training, and the loss and attention of a model on them."""
