"""Measurements against the usual way to do the same, and against what the hardware allows."""
