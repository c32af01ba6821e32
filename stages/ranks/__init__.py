"""Starts, watches and stops processes that compute together: by torchrun, on one machine or on several."""
