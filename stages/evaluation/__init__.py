"""What a finished model has learned: its losses on held-out rows, and the text that it writes."""
