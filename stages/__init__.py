"""The stages of the pipeline, and commands beside them: each module here runs alone, `python -m stages.<name>`."""
