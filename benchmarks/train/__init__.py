"""The benchmark of the training; `python -m benchmarks.train` runs it."""
