"""Ranks that another launcher has started, such as torchrun on several nodes, with the environment that it sets."""

import os
import re
import signal
import socket

import psutil
import pytest

from stages.base.errors import StageError
from stages.checkpointing.lock import writer_lock
from stages.ranks.handoff import DIRECTORY
from stages.ranks.signals import INTERRUPTED
from tests.faults import environment
from tests.project import Project, is_alive, wait_for
from tests.ranks import Ranks
from tests.trainings import Given, result


def nodes() -> dict[str, str | None]:
    """The environment of ranks that are on a node each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "1", DIRECTORY: None}


def wait_for_checkpoint(project: Project) -> None:
    wait_for(lambda: list(project.path.glob("outputs/test/checkpoints/*/step-00000004")))


def test_a_second_training_is_refused_and_a_signal_to_one_node_saves_on_all(fresh: Given, ranks: Ranks) -> None:
    project, reference = fresh
    pids = ranks.start(project, "delay rank 1 at step 5", **nodes())
    wait_for_checkpoint(project)
    with pytest.raises(StageError, match=f"another training writes into .*process {pids[0]} on"):
        writer_lock(project.checkpoints(), print).__enter__()
    os.kill(pids[1], signal.SIGUSR1)
    assert ranks.wait()[0] == [INTERRUPTED] * 2
    with writer_lock(project.checkpoints(), print):
        assert "error: another training writes into" in ranks.run(project, status=2, **nodes())
    assert re.search("resuming from step [567] of 12", ranks.run(project, **nodes()))
    assert result(project) == reference


@pytest.mark.slow
def test_rank_0_names_a_rank_that_hangs_and_ends_all(fresh: Given, ranks: Ranks) -> None:
    project, reference = fresh
    project.set(runtime={"timeout_minutes": 0.05})
    pids = ranks.start(project, "stop rank 1 at step 5", **nodes())
    wait_for(lambda: not psutil.pid_exists(pids[0]))
    os.kill(pids[1], signal.SIGKILL)  # it cannot end itself; the other launcher does it
    statuses, output = ranks.wait()
    assert statuses in ([-signal.SIGKILL] * 2, [1, -signal.SIGKILL])  # or it loses the connection first
    hangs = r"error: rank 1 on node n2 made no progress for \d+ s: step \d, \w+ \(the process is stopped, "
    waits = r"as by SIGSTOP, or its node is lost\); waiting for it: rank 0 on node n1 in step 6, agreeing with the "
    assert re.search(hangs + waits, output), output
    assert "resuming from step 4 of 12" in ranks.run(project, **nodes())
    assert result(project) == reference


def test_a_rank_without_the_environment_is_one_clear_error(training: Project, ranks: Ranks) -> None:
    missing = dict.fromkeys(["LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", DIRECTORY])
    assert ranks.run(training, status=2, world_size=1, **missing) == (
        "error: LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set, as torchrun does: "
        "`python -m stages.launch` starts the ranks, also on several nodes of Slurm\n"
    )


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_save_and_end(fresh: Given, ranks: Ranks) -> None:
    project, reference = fresh
    launcher = "for rank in 0 1; do RANK=$rank LOCAL_RANK=0 WORLD_SIZE=2 python -m stages.train & done; wait; exit"
    variables = {name: value for name, value in nodes().items() if value is not None}
    process = project.popen("bash", "-c", launcher, **variables, **environment("delay rank 1 at step 5"))
    wait_for_checkpoint(project)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) == 2
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(is_alive, started)))
    assert re.search("resuming from step [567] of 12", ranks.run(project))
    assert result(project) == reference
