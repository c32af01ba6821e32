"""The model that a run starts from: its files, what they hold, and the manifest that says so."""
