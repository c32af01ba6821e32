"""From rows of tokens to their loss: batches, attention, and the loss of a model."""
