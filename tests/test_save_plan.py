"""What the ranks tell each other in a step and in a save, and who writes what."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stages.training.save_plan import Planner, make_metadata, make_report
from tests.project import Project
from tests.ranks import Ranks

KILLED = -9


def test_a_step_has_one_collective_of_numbers_and_a_save_sends_no_plan(training: Project, ranks: Ranks) -> None:
    training.set(runtime={"async_checkpoint": False, "ckpt_freq": 6})
    count = f"count rank 0 at {training / 'collectives'}"
    ranks.run(training, f"kill rank 1 at step 9\n{count}", KILLED)
    collectives = [line.split() for line in (training / "collectives").read_text().splitlines()]
    sums = [n for n, (name, _) in enumerate(collectives) if name == "all_reduce"]
    assert sum(collectives[n][1] == "40" for n in sums) == 10 + 2  # before each step, and before each validation
    gather = next(n for n, (name, _) in enumerate(collectives) if name == "gather")
    save = collectives[max(n for n in sums if n < gather) + 1 : min(n for n in sums if n > gather)]
    # Rank 0 receives from each rank as many bytes as the longest message has, and gives one itself.
    assert next(int(size) // 3 for name, size in save if name == "gather") < 200
    (training / "collectives").unlink()
    assert "resuming from step 6" in ranks.run(training, count)
    resumed = [line.split()[0] for line in (training / "collectives").read_text().splitlines()]
    assert resumed.count("scatter") == 2  # of the last save: to load, no plan is sent


@contextmanager
def fake_rank(rank: int, num_ranks: int) -> Iterator[None]:
    """A process group of which this process is one rank, and the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_ranks_share_equal_rows_by_bytes_and_write_each_once() -> None:
    shapes = {"matrix": (7, 5), "same": (7, 5), "wide": (2, 300), "norm": (3,)}
    written: list[dict[tuple[str, Any], int]] = []
    for rank in range(6):  # three copies of a model on two ranks each
        with fake_rank(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2))
            tensors: dict[str, Any] = {
                name: DTensor.from_local(
                    torch.zeros(size_of(shape[0], rank % 2), *shape[1:]), mesh, [Replicate(), Shard(0)],
                    run_check=False, shape=torch.Size(shape), stride=torch.zeros(shape).stride(),
                )
                for name, shape in shapes.items()
            }  # fmt: skip
            planner = Planner()
            planner.set_up_planner({**tensors, "buffer": torch.zeros(4), "step": torch.zeros(())}, None, rank == 0)
            sent = planner.create_local_plan()
            own = planner.finish_plan(sent)
            assert not sent.items
            written.append({(item.index.fqn, item.index.offset): numel(item) for item in own.items})
    for coordinate in (0, 1):
        copies = written[coordinate::2]
        names = [index for copy in copies for index in copy if index[0] in shapes]
        assert sorted(name for name, _ in names) == sorted(shapes)
        # The largest alone; the others fill up.
        assert [copy[index] for copy in copies for index in copy if index[0] == "wide"] == [300]
    all_written = [index for part in written for index in part]
    assert len(all_written) == len(set(all_written)) == 2 * len(shapes) + 2


def size_of(rows: int, coordinate: int) -> int:
    part = -(-rows // 2)
    return part if coordinate == 0 else rows - part


def numel(item: Any) -> int:
    return int(item.tensor_data.chunk.sizes.numel())


def test_rows_that_no_rank_or_two_have_written_are_an_error() -> None:
    reports = []
    for rank in range(2):
        with fake_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            weight = DTensor.from_local(torch.zeros(size_of(9, rank), 8), mesh, [Shard(0)], run_check=False,
                                        shape=torch.Size((9, 8)), stride=(8, 1))  # fmt: skip
            planner = Planner()
            planner.set_up_planner({"model": {"weight": weight}}, None, rank == 0)
            own = planner.finish_plan(planner.create_local_plan()).items
            place: Any = SimpleNamespace(offset=0, length=160)
            results: list[Any] = [SimpleNamespace(index=item.index, storage_data=place) for item in own]
            reports.append(make_report(planner.items, results))
    first, second = reports
    metadata = make_metadata(planner.items, [first, second])
    assert metadata.storage_data[MetadataIndex("model.weight", [5, 0])].relative_path == "__1_model_0.distcp"
    for wrong in ([first, second[1:]], [first, np.concatenate([second, second[:1]])], [first, first]):
        with pytest.raises(ValueError, match=r"have not written each row of model\.weight exactly once"):
            make_metadata(planner.items, wrong)
