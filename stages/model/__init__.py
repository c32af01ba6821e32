"""The model that a run starts from: its files, the tensors in them, and the manifest that lists both."""
