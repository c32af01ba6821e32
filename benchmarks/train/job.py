"""What the programs have in common: the optimizer, and the description of what one of them runs."""

from dataclasses import dataclass

LR, BETAS, EPS, WEIGHT_DECAY, MAX_GRAD_NORM, SEED = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0, 0


@dataclass(frozen=True)
class Job:
    """What a program runs. The batches, the optimizer and the precision are the same in all of them."""

    program: str
    """stage | bare | ddp | trainer."""
    model: str
    """A directory with weights."""
    batch_size: int
    """Rows per rank and step."""
    steps: int
    """0: only load the weights."""
    precision: str
    """fp32 | bf16."""
    compile: bool
    log_freq: int = 1
    """Steps between two lines."""
    save_freq: int | None = None
    """Steps between two checkpoints of the Trainer."""
    resume: bool = False
    """Whether the Trainer resumes from its newest checkpoint."""
    cpu_ram_efficient_loading: bool = False
    """Whether rank 0 of the Trainer reads the weights for all ranks."""
