"""The benchmark of the data stages; `python -m benchmarks.data` runs it.

The modules of this package import heavy libraries within functions only. A measurement runs in a process of its own,
which imports the module of the measured function: its memory then counts only the libraries that the function uses.
"""
