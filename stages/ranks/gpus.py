"""The GPUs of this machine, as its driver lists them. Imports no torch."""

from pathlib import Path

DEVICES = Path("/dev")


def num_devices(devices: Path = DEVICES) -> int:
    """The NVIDIA GPUs of this machine, whether torch can use them or not."""
    return len(list(devices.glob("nvidia[0-9]*")))
