"""What a training will need: its memory, measured without a GPU, and what its rows look like."""
