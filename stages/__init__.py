"""The stages of the pipeline: each module here is one DVC stage and runs alone, `python -m stages.<name>`."""
