"""Nouns of the train stage: its parameters, its run, the model spread over the ranks, the order of the data."""
