"""Python runs this at its start if its directory is on PYTHONPATH: see tests/faults.py."""

import os
import sys

if "FAULT" in os.environ and "RANK" in os.environ:
    sys.path[:0] = [os.getcwd(), os.environ["FAULT_REPO"]]
    from tests import faults

    faults.inject(os.environ["FAULT"])
