"""From the bytes of raw files to strings: a module per format, and what all of them write to."""
