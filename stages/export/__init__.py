"""From a sharded checkpoint to a directory that others can read, and to a report."""
