"""The raw files: which there are, in which split each belongs, and the manifests that list them."""
