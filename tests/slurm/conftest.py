"""A Slurm cluster for all tests here, which are skipped where there can be none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import Project
from tests.slurm.cluster import Cluster, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this directory where there can be no cluster; the summary of pytest names the reason."""
    reason = missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skipif(bool(reason), reason=reason))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster of this worker of pytest-xdist."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def reproduced(reproduced: Project, cluster: Cluster) -> Iterator[Project]:
    """The project of all tests, in which no job of a failed test runs when it is deleted."""
    yield reproduced
    cluster.cancel_all()
