"""A training on several nodes, which are this machine; tests/fake_slurm/srun starts torchrun on each of them."""

import os
import re
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.base.errors import StageError
from stages.base.params_file import load_params
from stages.launching.runtime import TrainRuntime
from stages.ranks import process_group, torchrun
from stages.ranks.signals import INTERRUPTED
from tests.faults import environment
from tests.project import BIN, LAUNCH, REPO, Project, ranks_of, wait_for
from tests.ranks import Ranks
from tests.trainings import Given, names, published, result, weights
from tests.two_nodes import ALLOCATION, CAN_UNSHARE, ON_TWO_NODES

STARTS = r"run \w+ starts at step 0: there is no checkpoint to continue from\n"
"""What the first launch prints before anything else."""


SLOW = "delay rank 1 at step 5\ndelay rank 1 at step 6\ndelay rank 1 at step 7"
"""Two seconds more in each of these steps, so that it still runs when it is interrupted."""
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]


@pytest.fixture
def nodes(fresh: Given) -> Given:
    """A project that trains with one rank on each node, and the result that two ranks of one machine have."""
    fresh[0].set(runtime={"nproc_per_node": 1, "launcher": "auto"})
    return fresh


def torchruns(process: "subprocess.Popen[str]") -> dict[str, psutil.Process]:
    """The processes of torchrun, by the name of their node."""
    return {rank.parent().environ()["SLURMD_NODENAME"]: rank.parent() for rank in ranks_of(process)}


def start(project: Project, faults: str, allocation: dict[str, str] = ALLOCATION) -> "subprocess.Popen[str]":
    """Launch on two nodes, and wait until the second checkpoint is published."""
    process = project.popen(*LAUNCH, **allocation, **environment(faults))
    wait_for(lambda: list(project.path.glob("outputs/test/checkpoints/*/step-00000004")) or process.poll() is not None)
    return process


def end(process: "subprocess.Popen[str]", status: int) -> str:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == status, output
    assert "Traceback" not in output
    return output


@pytest.mark.slow
@pytest.mark.skipif(not CAN_UNSHARE, reason="this machine allows no network namespaces")
@pytest.mark.parametrize("hosts", ["", "127.0.1.1 n1\n127.0.1.1 n2\n"], ids=["unknown", "of loopback, as on Debian"])
def test_no_name_of_a_node_has_to_resolve(nodes: Given, tmp_path: Path, hosts: str) -> None:
    project, reference = nodes
    project.set(runtime={"timeout_minutes": 0.5})
    file = tmp_path / "hosts"
    file.write_text(f"127.0.0.1 localhost\n{hosts}")
    output = project.run(*ON_TWO_NODES, str(file), *LAUNCH, **ALLOCATION)
    assert "training with 2 ranks on 2 nodes (CPU, network cable1)" in output
    assert result(project) == reference


@pytest.mark.parametrize(
    ("allocated", "values", "expected"),
    [
        (None, {}, None),
        ("1", {}, None),
        ("2", {}, 2),
        ("4", {"num_nodes": 3}, 3),
        ("4", {"num_nodes": 1}, None),
        ("1", {"launcher": "srun"}, 1),
        ("1", {"launcher": "sbatch"}, None),
        ("2", {"launcher": "sbatch"}, 2),
        ("2", {"launcher": "torchrun"}, None),
        ("2", {"launcher": "torchrun", "num_nodes": 2}, "launcher torchrun starts the ranks of one machine"),
        ("2", {"num_nodes": 3}, r"need 3 nodes, but this is in an allocation of 2: .* `sbatch --nodes=3`"),
        (None, {"launcher": "srun"}, "runtime.num_nodes null need 1 node, but this is in no allocation of Slurm"),
        (None, {"num_nodes": 2}, "this is in no allocation of Slurm"),
    ],
)
def test_what_starts_the_ranks_follows_from_the_allocation(
    monkeypatch: pytest.MonkeyPatch, allocated: str | None, values: dict[str, Any], expected: int | str | None
) -> None:
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)
    if allocated is None:
        monkeypatch.delenv("SLURM_JOB_ID")
    else:
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", allocated)
    runtime = replace(load_params(TrainRuntime, "runtime", path=REPO / "params.yaml"), **values)
    if isinstance(expected, str):
        with pytest.raises(StageError, match=expected):
            torchrun.count_srun_nodes(runtime.launcher, runtime.num_nodes)
    else:
        assert torchrun.count_srun_nodes(runtime.launcher, runtime.num_nodes) == expected


def test_where_the_nodes_find_the_first_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    for given, expected in (("", r"127\.0\.0\.1:\d+"), ("head", r"head:\d+"), ("head:29500", "head:29500")):
        (directory := tmp_path / (given or "none")).mkdir()
        with ThreadPoolExecutor(3) as nodes:
            find = partial(torchrun.find_endpoint, directory, given, num_nodes=3)
            endpoints = {*nodes.map(find, range(3))}
        assert len(endpoints) == 1  # the port that the first node has found free, not the launcher
        assert re.fullmatch(expected, endpoints.pop())


def test_a_first_node_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torchrun, "_START_SECONDS", 0.1)
    with pytest.raises(SystemExit, match="RendezvousTimeoutError: the first node has not started"):
        torchrun.find_endpoint(tmp_path, "head", 1, num_nodes=2)


def test_the_interface_is_the_one_that_reaches_the_first_node() -> None:
    loopback = process_group.loopback_interface()
    assert process_group.interface_towards("127.0.0.1") == process_group.interface_towards("localhost") == loopback
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:  # of this machine, which others reach under the same address
                assert process_group.interface_towards(address.address) == name
    assert process_group.interface_towards("no such host") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allocation", "victim", "numbers"),
    [
        *((ALLOCATION, victim, [number]) for victim in ("launcher", "torchrun", "rank") for number in SIGNALS),
        ({}, "launcher", [signal.SIGTERM, signal.SIGHUP]),
    ],
)
def test_16_17_a_signal_to_any_process_saves_on_all(
    nodes: Given, ranks: Ranks, allocation: dict[str, str], victim: str, numbers: list[signal.Signals]
) -> None:
    project, reference = nodes
    project.set(runtime={"nproc_per_node": 1 if allocation else 2})
    process = start(project, SLOW, allocation)
    second = ranks_of(process)[1]
    processes = {"launcher": process, "torchrun": second.parent(), "rank": second}
    for number in numbers:
        processes[victim].send_signal(number)
    output = end(process, INTERRUPTED)
    assert ("training with 2 ranks on 2 nodes (CPU, network lo)" in output) == bool(allocation)
    saved = re.search(r"interrupted: step-0000000([567]) is saved; the next launch continues from its newest", output)
    assert saved and published(project)[-1:] == names(int(saved[1]))
    # Two ranks of one machine compute what those of two nodes do.
    assert f"resuming from step {saved[1]} of 12" in ranks.run(project)
    assert result(project) == reference


HANGS = (
    r"rank 1 on node n2 made no progress for \d+ s: step \d, \w+ \(the process is stopped, as by SIGSTOP, or its node "
    r"is lost\); waiting for it: rank 0 on node n1 in step 6, agreeing with the other ranks\n[^$]*restart 1 "
)
OUT_OF_MEMORY = (
    r"error: rank 1 is out of memory \(DefaultCPUAllocator: can't allocate memory: you tried to allocate .*"
    r"use batch_size 1 \(total_batch_size 8 stays, and so do the steps\), activation_checkpointing full"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "runtime", "status", "message"),
    [
        ("stop rank 1 at step 5", {"timeout_minutes": 0.05, "max_restarts": 1}, 0, HANGS),
        ("kill rank 1 at step 5", {}, 1, r"rank +: 1 \(local_rank: 0\)\n +exitcode +: -9 "),
        ("memory rank 1 at step 5", {"max_restarts": 3}, 2, OUT_OF_MEMORY),  # the user's to fix: no restart
        (SLOW, {"max_restarts": 1}, 0,
         r"error: node n2 was lost: torchrun has ended there without a word\n[^$]*restart 1 of 1"),
    ],
    ids=["a rank that hangs", "a killed rank", "out of memory", "a lost node"],
)  # fmt: skip
def test_what_ends_the_training_is_named_with_its_node_and_restarted(
    nodes: Given, ranks: Ranks, faults: str, runtime: dict[str, Any], status: int, message: str
) -> None:
    project, reference = nodes
    project.set(runtime=runtime)
    process = start(project, faults)
    if faults == SLOW:  # of a node that is lost meanwhile
        torchruns(process)["n2"].kill()
    output = end(process, status)
    assert re.search(message, output), output
    assert ("\nrestart 1 " in output) == (status == 0)
    if status:
        assert "resuming from step 4" in ranks.run(project)
    assert result(project) == reference


@pytest.mark.slow
def test_hybrid_shard_keeps_a_copy_of_the_model_on_each_node(nodes: Given, ranks: Ranks, tmp_path: Path) -> None:
    project, _ = nodes
    project.set(batch_size=1, runtime={"nproc_per_node": 2}, fsdp={"sharding_strategy": "HYBRID_SHARD"})
    local = project.copy(tmp_path / "local")
    local.set(fsdp={"size": 2})
    ranks.run(local, world_size=4)
    assert "4 ranks on 2 nodes (CPU, network lo)" in (output := project.run(*LAUNCH, **ALLOCATION))
    assert "strategy fsdp HYBRID_SHARD in groups of 2" in output
    assert weights(project) == weights(local)


@pytest.mark.slow
def test_a_node_with_other_files_is_refused(nodes: Given, tmp_path: Path) -> None:
    project, _ = nodes
    other = project.copy(tmp_path / "other")
    model = other / "data/model.json"
    model.write_text(model.read_text() + "\n")
    values = {**ALLOCATION, "FAKE_DIRECTORY_1": str(other.path)}
    shared = {"CHECKPOINT_ROOT": str(tmp_path / "shared")}
    output = project.run(*LAUNCH, status=2, **values, **shared)
    changed = r"error: model: '\w+' at the launch, '\w+' now\n"
    found = f"error: the files have changed since the launch: launch the training again\n{changed}"
    assert re.fullmatch(STARTS + found, output), output
    model.unlink()
    output = project.run(*LAUNCH, status=2, **values, **shared)
    assert re.fullmatch(f"{STARTS}error: data/model.json: No such file or directory\n", output), output
    output = project.run(*LAUNCH, status=1, **values)  # nor the checkpoints of the first node
    missing = r"error: node n2 does not see outputs/test/checkpoints/\S+ of .* \(set CHECKPOINT_ROOT\)\n"
    assert re.match(STARTS + missing, output), output
    assert "was lost" not in output  # slurm/job.sh would start the job again


@pytest.mark.slow
def test_nodes_that_do_not_start_are_one_clear_error(nodes: Given, tmp_path: Path) -> None:
    project, _ = nodes
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\necho 'srun: error: no node' >&2\nexit 3\n")
    srun.chmod(0o755)
    path = {**ALLOCATION, "PATH": f"{BIN}:{tmp_path}:{os.environ['PATH']}"}
    output = project.run(*LAUNCH, status=1, **path)
    failed = "srun: error: no node\nerror: the training failed as shown above; the next launch continues"
    assert re.match(STARTS + failed, output), output
