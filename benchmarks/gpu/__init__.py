"""All that only GPUs can show; `make gpu` or `python -m benchmarks.gpu` runs it."""
