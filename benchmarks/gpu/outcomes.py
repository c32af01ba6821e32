"""A plugin of pytest that prints the outcome of each test at once. It needs no other plugin to be installed."""

import json
import os
import sys
from typing import Any

from benchmarks.gpu.results import RESULT, Row


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test that ends in no other line has not ended."""
    _print(nodeid, {"started": True})


def pytest_runtest_logreport(report: Any) -> None:
    """One for each of set-up, call and tear-down."""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _print(report.nodeid, {"error": (crash.message if crash else report.longreprtext)[:300]})
    elif report.skipped or report.when == "call":
        _print(report.nodeid, {"skipped" if report.skipped else "passed": 1, "seconds": round(report.duration)})


def _print(nodeid: str, outcome: Row) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # they report to the process that started them
        # pytest may have begun a line.
        print("\n" + RESULT + json.dumps({"name": nodeid, **outcome}), file=sys.__stdout__, flush=True)
