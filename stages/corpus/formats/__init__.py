"""Formats of raw files: a module each, the suffixes of all in `suffixes.py`, their readers in `readers.py`."""
