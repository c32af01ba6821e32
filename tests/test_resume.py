"""Whatever happens to a training, it ends with the same weights and losses.

The numbers are those of docs/reliability.md.
The ranks are started without torchrun, by tests/ranks.py; tests/test_faults.py starts them as users do.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.device_mesh import DeviceMesh

from stages.base.errors import StageError
from stages.base.files import DamagedFile
from stages.checkpointing.layout import list_checkpoints, step_name
from stages.checkpointing.state import STATE, TrainMetrics, TrainState
from stages.launching.agreement import check_once, check_together
from stages.training.loop import dropout_seed
from tests.project import Project, flip_bit
from tests.ranks import Ranks
from tests.trainings import Given, names, published, result

KILLED, REFUSED, STOPPED = -9, 2, 75


def test_10_11_12_a_training_killed_many_times_ends_with_the_same_result(fresh: Given, ranks: Ranks) -> None:
    """All within one epoch, with synchronous and asynchronous saves."""
    project, reference = fresh
    project.set(runtime={"async_checkpoint": True})
    ranks.run(project, "kill rank 0 at os.mkdir:.*step-00000002.tmp$", KILLED)
    assert published(project) == []
    project.set(runtime={"async_checkpoint": False})
    ranks.run(project, "kill rank 0 in update 5", KILLED)
    ranks.run(project, "kill rank 1 in write of step-00000006.tmp/optimizer/__1_0", -signal.SIGXFSZ)
    assert published(project) == names(2, 4)
    project.set(runtime={"async_checkpoint": True})
    assert "resuming from step 4 of 12" in ranks.run(project, "kill rank 0 at os.rename:.*step-00000006.tmp$", KILLED)
    assert published(project) == names(2, 4)
    assert (project.checkpoints() / "step-00000006.tmp").is_dir()
    ranks.run(project, "kill rank 0 at os.rename:.*step-00000002$", KILLED)  # which is deleted, as 6 is published
    assert published(project) == names(2, 4, 6)
    assert "resuming from step 6 of 12" in ranks.run(project)
    assert result(project) == reference
    assert sorted(path.name for path in project.checkpoints().glob("step-*")) == names(10, 12)
    last = project.checkpoints() / step_name(12)
    cost = TrainMetrics.of(last).cost
    assert (cost.launches, cost.steps) == (3, 12)  # those that have published 2 and 4, 6, and the last


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("where", ["at step", "in update"])
def test_10_12_a_training_killed_at_every_step_ends_with_the_same_result(
    undisturbed: Callable[[str], Given], ranks: Ranks, tmp_path: Path, precision: str, where: str
) -> None:
    finished, reference = undisturbed(precision)
    project = finished.copy(tmp_path / "project")
    shutil.rmtree(project / "outputs")
    for step in range(12):
        for rank in (0, 1):
            project.set(runtime={"async_checkpoint": bool(rank)})
            ranks.run(project, f"kill rank {rank} {where} {step}", KILLED)
    ranks.run(project)
    assert result(project) == reference


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("save", [2, 6])
def test_11_a_kill_at_any_point_of_a_save_leaves_valid_checkpoints(
    fresh: Given, ranks: Ranks, save: int, rank: int, asynchronous: bool
) -> None:
    """At each access to a file of a checkpoint; without an earlier checkpoint, and with two."""
    project, reference = fresh
    project.set(runtime={"async_checkpoint": asynchronous})
    ranks.run(project, f"kill rank 0 at os.mkdir:.*{step_name(save)}.tmp$", KILLED)
    before = published(project)
    assert before == names(*range(2, save, 2))
    start = project.copy(project.path.with_name("start"))
    log = ranks.directory / "touched"
    for number in range(1, 100):
        log.write_text("")
        ranks.run(project, f"kill rank {rank} at file {number}\nlog rank {rank} at {log}", KILLED)
        if step_name(save + 2) in log.read_text():
            break  # that was the next save
        found = published(project)
        assert found[: len(before)] == before or found == names(4, 6)
        if found != before:  # it was published: the run resumes from it, and the next one from the state before it
            ranks.run(project)
            assert result(project) == reference
            shutil.rmtree(project.path)
            start.copy(project.path)
    assert number > (25 if rank == 0 else 1)  # rank 1 has one file
    ranks.run(project)
    assert result(project) == reference


MINE, THEIRS = "model/__0_0.distcp", "model/__1_0.distcp"
SMALL_FILES = ("manifest.json", "model/.metadata", "state.json", "history.tsv")
FAILED_SAVES = [
    *(("full", name, asynchronous) for name in (MINE, THEIRS, *SMALL_FILES) for asynchronous in (True, False)),
    *(("limit", name, False) for name in (MINE, THEIRS)),
]
"""What goes wrong at which file, and whether the save is asynchronous."""


@pytest.mark.parametrize(
    "faults",
    [
        [("full", THEIRS, True), ("limit", THEIRS, False), ("full", "manifest.json", False)],
        pytest.param(FAILED_SAVES, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_18_19_20_a_failed_save_ends_the_training_and_damages_no_checkpoint(
    finished: Given, ranks: Ranks, faults: list[tuple[str, str, bool]]
) -> None:
    project, reference = finished
    shutil.rmtree(project.checkpoints() / "step-00000012")
    for fault, name, asynchronous in faults:
        # torch does not say which of its files it was.
        full = rf"step-00000012.tmp/{Path(name).parts[0]}\S*: No space .*: free some space"
        message = full if fault == "full" else r"File too large|a limit of the file size reached\?"
        project.set(runtime={"async_checkpoint": asynchronous})  # the last save: no later step could detect the failure
        ranks.start(project, f"{fault} rank {int(name == THEIRS)} at step-00000012.tmp/{re.escape(name)}")
        statuses, output = ranks.wait()
        assert statuses == [REFUSED, REFUSED], output
        assert re.search(message, output) and "Traceback" not in output, output
        assert published(project) == names(10)
        assert not [*project.checkpoints().glob("*.tmp")]  # which may be what fills the disk
    ranks.run(project)
    assert result(project) == reference


def test_20_a_failed_save_is_detected_at_one_of_the_next_steps(fresh: Given, ranks: Ranks) -> None:
    project, _ = fresh
    project.set(num_epochs=20, runtime={"async_checkpoint": True, "ckpt_freq": 2, "log_freq": 1})
    ranks.start(project, "full rank 0 at step-00000002.tmp/state.json")
    statuses, output = ranks.wait()
    assert statuses == [REFUSED, REFUSED], output
    assert int(re.findall(r"step (\d+)/240", output)[-1]) < 30
    assert published(project) == []


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flip": lambda path: flip_bit(path, path.stat().st_size // 2),
    "truncate": lambda path: os.truncate(path, path.stat().st_size - 2),
}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(name, damage, marks=() if (name, damage) == ("model/__1_0.distcp", "flip") else pytest.mark.slow)
        for name in (
            "manifest.json",
            "model/.metadata",
            "model/__1_0.distcp",
            "optimizer/__0_0.distcp",
            "state.json",
            "history.tsv",
        )
        for damage in DAMAGES
    ],
)
def test_21_a_damaged_checkpoint_is_detected_and_the_previous_one_is_used(
    finished: Given, ranks: Ranks, name: str, damage: str
) -> None:
    project, reference = finished
    project.set(runtime={"debug": True})
    DAMAGES[damage](project.checkpoints() / "step-00000012" / name)
    output = ranks.run(project)
    assert "skipping a damaged checkpoint" in output
    assert "resuming from step 10 of 12" in output
    assert result(project) == reference
    assert (project.checkpoints() / "step-00000012.damaged").is_dir()
    for rank in (0, 1):
        (log,) = (project / "outputs/test/logs").glob(f"*/rank-{rank}.log")
        assert "verifying step-00000010" in log.read_text()


def test_dropout_has_other_masks_for_each_seed_step_and_rank() -> None:
    seeds = {dropout_seed(*parts) for parts in product(range(5), range(200), range(8))}
    assert len({seed % 2**32 for seed in seeds}) == 5 * 200 * 8  # of which torch's generator for CPUs uses 32 bits


@pytest.mark.slow
def test_29_tokens_that_changed_after_a_kill_are_refused(fresh: Given, ranks: Ranks) -> None:
    project, reference = fresh
    ranks.run(project, "kill rank 0 at step 5", KILLED)
    for name in ("validation", "train"):
        (file,) = (project / f"data/tokens/{name}").glob("*.arrow")
        content = file.read_bytes()
        flip_bit(file, len(content) // 2)
        output = ranks.run(project, status=REFUSED)
        assert f"data/tokens/{name}/{file.name} is damaged" in output and "run `dvc repro -f -s pack`" in output
        file.write_bytes(content)
    ranks.run(project)
    assert result(project) == reference


def test_30_a_verification_longer_than_the_watchdogs_limit_notes_progress(mesh: DeviceMesh, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    os.mkfifo(slow)

    def write() -> None:
        with slow.open("wb", buffering=0) as file:
            for _ in range(10):
                time.sleep(0.01)
                file.write(bytes(1 << 20))

    notes: list[float] = []
    with ThreadPoolExecutor(1) as thread:
        thread.submit(write)
        digest = hashlib.sha256(bytes(10 << 20)).hexdigest()
        check_together({slow: digest}, "", lambda: notes.append(time.monotonic()), round_bytes=1 << 20)
    assert len(notes) >= 10


def test_tokens_are_read_once_unless_their_size_or_times_change(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    open_file = Path.open

    def watch(path: Path, *given: Any, **named: Any) -> Any:
        read.extend([path.name] * (path.suffix == ".arrow"))
        return open_file(path, *given, **named)

    paths = [tmp_path / "0.arrow", tmp_path / "1.arrow"]
    for path in paths:
        path.write_bytes(path.name.encode())
    files = {path: hashlib.sha256(path.name.encode()).hexdigest() for path in paths}
    monkeypatch.setattr(Path, "open", watch)
    for _ in range(3):  # launches
        check_once(files, tmp_path / "record", "pack again", lambda: None)
    assert sorted(read) == ["0.arrow", "1.arrow"]
    times = paths[0].stat()
    paths[0].write_bytes(b"0.Arrow")
    os.utime(paths[0], ns=(times.st_atime_ns, times.st_mtime_ns))  # as `cp -p` would
    for _ in range(2):
        with pytest.raises(DamagedFile, match=r"0.arrow is damaged or was changed: .*: pack again"):
            check_once(files, tmp_path / "record", "pack again", lambda: None)
    (tmp_path / "record").write_text("{")
    paths[0].write_bytes(b"0.arrow")
    read.clear()
    check_once(files, tmp_path / "record", "pack again", lambda: None)
    assert sorted(read) == ["0.arrow", "1.arrow"]


def test_30_a_file_with_an_unreadable_block_counts_as_damaged(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shard"
    path.touch()
    for number in (errno.EIO, errno.EACCES):

        def fail(*_: Any, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(Path, "open", fail)
        # Permission may be there a moment later: nothing is put in quarantine.
        problem = "shard is damaged" if number == errno.EIO else "Permission denied"
        with pytest.raises(StageError, match=problem) as error:
            check_together({path: ""}, "", lambda: None)
        assert isinstance(error.value, DamagedFile) == (number == errno.EIO)


def test_22_without_a_valid_checkpoint_the_training_does_not_start_over(finished: Given, ranks: Ranks) -> None:
    project, _ = finished
    for name in ("step-00000010/model/__1_0.distcp", "step-00000012/manifest.json"):
        DAMAGES["truncate"](project.checkpoints() / name)
    output = ranks.run(project, status=REFUSED)
    assert output.count("skipping a damaged checkpoint") == 2
    assert "no checkpoint in" in output and "is valid; to start over, set runtime.resume=never" in output
    assert "Traceback" not in output
    assert [path.name for path in list_checkpoints(project.checkpoints())] == names(12, 10)


def test_23_another_number_of_ranks_trains_on_the_same_rows(training: Project, ranks: Ranks) -> None:
    """2 ranks, then 1, then 2; without dropout, whose masks depend on the number of ranks."""
    project = training
    project.set(precision="fp32", max_steps=7, runtime={"async_checkpoint": False})
    ranks.run(project)
    history = project.checkpoints() / "step-00000007/history.tsv"
    two = np.genfromtxt(history, delimiter="\t", names=True)
    shutil.rmtree(project / "outputs")
    ranks.run(project, "kill rank 1 at step 3", KILLED)
    resumed = ranks.run(project, "kill rank 0 at step 5", KILLED, world_size=1)
    assert "resuming from step 2" in resumed
    assert resumed.count("may not be those of a training without interruption: ranks: 2 there, 1 here") == 1
    assert "resuming from step 4" in ranks.run(project)
    mixed = np.genfromtxt(history, delimiter="\t", names=True)
    assert np.array_equal(mixed["step"], two["step"])
    np.testing.assert_allclose(mixed["loss"][1:], two["loss"][1:], atol=1e-4)
    np.testing.assert_allclose(mixed["grad_norm"][1:], two["grad_norm"][1:], rtol=1e-3)


def test_a_resumed_training_has_the_threads_with_which_it_began(fresh: Given, ranks: Ranks) -> None:
    """As sums on a CPU depend on their number, and a job may get another number of CPUs than the one before."""
    project, _ = fresh
    project.set(max_steps=4)
    ranks.run(project, "kill rank 0 at step 3", KILLED, OMP_NUM_THREADS="3")
    output = ranks.run(project, OMP_NUM_THREADS="1", MKL_CBWR="COMPATIBLE")
    assert "without interruption: variables.MKL_CBWR: nothing there, 'COMPATIBLE' here\n" in output
    place = TrainState.read(project.checkpoints() / step_name(4) / STATE).place
    assert place and (place.threads, place.attention) == (3, "sdpa")
    assert place.since == 2 and re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", place.date)
    assert output.count("each rank computes with 3 threads, as until now, and not with 1\n") == 1


def test_25_a_loss_that_is_not_finite_on_one_rank_stops_all(fresh: Given, ranks: Ranks) -> None:
    project, _ = fresh
    project.set(runtime={"async_checkpoint": True})
    ranks.start(project, "nan rank 1 at step 4")
    statuses, output = ranks.wait()
    assert statuses == [REFUSED, REFUSED]
    assert output.count("step 5: the gradient norm is nan") == 1
    assert "the newest checkpoint is of step 4" in output
    assert "Traceback" not in output
    assert published(project) == names(2, 4)  # including the one that was being written


@pytest.mark.slow
def test_checkpoints_are_saved_by_the_clock_of_the_first_rank(fresh: Given, ranks: Ranks) -> None:
    project, reference = fresh
    project.set(runtime={"ckpt_freq": None, "ckpt_minutes": 1e-6, "keep_checkpoints": 100})
    ranks.run(project)
    assert published(project) == names(*range(1, 13))
    assert result(project) == reference
    project.set(runtime={"ckpt_minutes": 60})
    shutil.rmtree(project / "outputs")
    ranks.run(project)
    assert published(project) == names(12)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(25))
def test_16_17_a_signal_to_one_rank_at_any_moment_saves_the_same_step_on_all(
    fresh: Given, ranks: Ranks, number: int
) -> None:
    """At random moments: start, validation, steps, saves; one signal or two, to one rank or to both.

    Before the first step there is nothing to save: the rank ends at once. A launcher, which is not here, would end the
    other; now it loses the connection, or the watchdog kills it.
    """
    project, reference = fresh
    random = np.random.default_rng(number)
    project.set(runtime={"async_checkpoint": bool(number % 2)})
    for _ in range(3):
        before = sorted(project.path.glob("outputs/test/checkpoints/*/step-*[0-9]"))
        pids = ranks.start(project)
        time.sleep(random.uniform(0.2, 3.0))
        for _ in range(random.integers(1, 3)):
            victim = pids[random.integers(2)]
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(victim, random.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP]))
        statuses, output = ranks.wait()
        if statuses not in ([STOPPED, STOPPED], [0, 0]):
            assert set(statuses) in ({STOPPED, 1}, {STOPPED, KILLED}), output
            assert sorted(project.path.glob("outputs/test/checkpoints/*/step-*[0-9]")) == before, output
    ranks.run(project)
    assert result(project) == reference
    published(project)
