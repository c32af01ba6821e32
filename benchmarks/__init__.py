"""Measurements compared with the usual way to do the same, and with what the hardware allows."""

from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
