"""What `python -m stages.doctor` checks: each module has checks of one kind, which yield findings."""
