"""The tests here run in the guest of `python -m tests.nfs`, and are skipped elsewhere."""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.skipif("NFS_GUEST" not in os.environ, reason="needs NFS: `make nfs-test`"))
