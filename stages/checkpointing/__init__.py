"""What remembers a training: the run, its checkpoints on the disk, who may write, and which ones stay."""
