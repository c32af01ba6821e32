"""Which rank writes which tensors of a checkpoint, decided without talking, and the `.metadata` of all of them.

By default torch.distributed.checkpoint has each rank send its plan to rank 0, which merges the plans and sends each
back: for a model of 723 parameters 0.8 MB of pickled objects per rank. That is 15 s of rank 0's time with 64 ranks, and
would be four minutes with 1 024. But all ranks run the same program: each knows who else has the same rows, and so does
its share alone. Rank 0 only learns where the rows are in the files, five numbers per tensor and rank, which is all that
`.metadata` needs. The file itself remains one that torch reads.
"""

import dataclasses
import os
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from stages.artifacts.garbage import paused_collector
from stages.checkpointing.layout import METADATA

Report = NDArray[np.int64]
"""(tensors that a rank wrote, 5): the tensor's number in the plan, its first row, rows, place in the file, bytes."""


PARTS = ("model", "optimizer")
"""What a rank writes into files of their own: an export needs to read and verify only those of the model."""


def file_name(rank: int, part: str) -> str:
    """The file of a rank that has a part of the state."""
    return f"__{rank}_{part}_0.distcp"


def _part(name: str) -> str:
    return name.partition(".")[0]


class Planner(dcp.DefaultSavePlanner):
    """Plans what this rank writes, of tensors that are sharded on their first dim, or that all ranks have."""

    def create_local_plan(self) -> SavePlan:
        """What is sent to rank 0: nothing."""
        self.items = super().create_local_plan().items
        """Of all tensors, which are the same ones on all ranks, in the same order."""
        self._own = own_items(self.items, self.state_dict)
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """What rank 0 sends to each: only the prefix of its file, which the writer adds."""
        return all_plans, Metadata({})  # torch broadcasts this one, so `Writer.finish` makes another

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What this rank writes."""
        self.plan = dataclasses.replace(new_plan, items=self._own)
        return self.plan

    def transform_object(self, write_item: WriteItem, object: Tensor) -> Tensor:
        """Contiguous, so that its bytes in the file are in the order of its elements."""
        return object.contiguous()


def own_items(items: Iterable[WriteItem], tensors: Mapping[str, Any]) -> list[WriteItem]:
    """Those of `items` that this rank writes: of rows that several ranks have, each writes a share, by bytes."""
    rank, everyone = dist.get_rank(), tuple(range(dist.get_world_size()))
    loads: dict[tuple[int, ...], dict[int, int]] = {}
    own = []
    for item in items:
        assert item.tensor_data is not None
        num_bytes = item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize
        if num_bytes == 0:  # the tensor has fewer rows than there are ranks
            continue
        holders = _holders(tensors[item.index.fqn], everyone)
        load = loads.setdefault(holders, dict.fromkeys(holders, 0))
        writer = min(load, key=load.__getitem__)  # all holders find the same one: they have the same items
        load[writer] += num_bytes
        if writer == rank:
            own.append(item)
    return own


def _holders(tensor: Tensor, everyone: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that have the same rows of a tensor as this one."""
    if not isinstance(tensor, DTensor):
        return everyone
    mesh = tensor.device_mesh
    place = [
        slice(None) if placement.is_replicate() else mesh.get_local_rank(axis)
        for axis, placement in enumerate(tensor.placements)
    ]
    return tuple(mesh.mesh[tuple(place)].flatten().tolist())


class Writer(dcp.FileSystemWriter):
    """Writes a file per rank, and `.metadata`, which it makes again only when what the ranks report has changed."""

    results: list[WriteResult]
    """Of this rank."""
    _reports: list[Report] | None = None
    _content = b""
    """Of `.metadata`, on rank 0."""

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        # With two threads, torch reports a failed write as a success.
        super().__init__(path, single_file_per_rank=True, thread_count=1, **options)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the files of this rank, and report to rank 0 what is where in them."""
        assert isinstance(planner, Planner)
        self._planner, self.results = planner, []
        for part in PARTS:
            items = [item for item in plan.items if _part(item.index.fqn) == part]
            prefix = _StoragePrefix(f"{plan.storage_data.prefix}{part}_")
            part_plan = dataclasses.replace(plan, items=items, storage_data=prefix)
            self.results += super().write_data(part_plan, planner).wait()
        report: Future[Any] = Future()
        report.set_result(make_report(planner.items, self.results))
        return report

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Write `.metadata`, on rank 0 with what all ranks have reported."""
        if self._reports is None or not all(map(np.array_equal, self._reports, results)):
            with paused_collector():
                made = make_metadata(self._planner.items, results)
                made.planner_data, made.storage_meta = self._planner.mappings, self.storage_meta()
                self._reports, self._content = results, pickle.dumps(made)
        with self.fs.create_stream(self.fs.concat_path(self.path, METADATA), "wb") as file:
            file.write(self._content)
            if self.sync_files:
                file.flush()
                os.fsync(file.fileno())


def make_report(items: list[WriteItem], results: list[WriteResult]) -> Report:
    """What `make_metadata` must know of the file of a rank."""
    chunks = {item.index: (number, item.tensor_data) for number, item in enumerate(items)}
    report = np.empty((len(results), 5), np.int64)
    for row, result in enumerate(results):
        number, data = chunks[result.index]
        assert data is not None
        chunk, place = data.chunk, result.storage_data
        assert not any(chunk.offsets[1:]) and chunk.sizes[1:] == data.size[1:], f"{result.index.fqn} is not in rows"
        first, rows = (chunk.offsets[0], chunk.sizes[0]) if chunk.sizes else (0, 1)
        report[row] = number, first, rows, place.offset, place.length
    return report


def make_metadata(items: list[WriteItem], reports: list[Report]) -> Metadata:
    """What `.metadata` contains of the files of all ranks.

    Equal parts are one object, which pickle then writes once: with 1 024 ranks it is half as large, and read in a
    fraction of the time.

    Raises:
        ValueError: the ranks have not written each row of each tensor exactly once.
    """
    ranks = np.repeat(np.arange(len(reports)), [len(report) for report in reports])
    table = np.concatenate(reports)
    order = np.lexsort((table[:, 1], table[:, 0]))
    table, ranks = table[order], ranks[order]
    bounds = np.searchsorted(table[:, 0], np.arange(len(items) + 1))
    names = {part: [file_name(rank, part) for rank in range(len(reports))] for part in PARTS}
    known: dict[Any, list[ChunkStorageMetadata]] = {}
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for number, item in enumerate(items):
        name, data = item.index.fqn, item.tensor_data
        assert data is not None
        own = slice(bounds[number], bounds[number + 1])
        first, rows = table[own, 1], table[own, 2]
        ends = np.concatenate([[0], first + rows])
        num_rows = data.size[0] if data.size else 1
        if data.size.numel() and (ends[-1] != num_rows or not np.array_equal(first, ends[:-1])):
            raise ValueError(f"the ranks have not written each row of {name} exactly once")
        key = (data.size, first.tobytes())
        if key not in known:
            known[key] = [_chunk(data.size, *part) for part in zip(first.tolist(), rows.tolist(), strict=True)]
        tensors[name] = TensorStorageMetadata(data.properties, data.size, known[key])
        found = zip(known[key], ranks[own].tolist(), table[own, 3].tolist(), table[own, 4].tolist(), strict=True)
        for chunk, rank, offset, length in found:
            index = MetadataIndex(name)
            object.__setattr__(index, "offset", chunk.offsets)  # frozen, and its __init__ would make a copy
            places[index] = _StorageInfo(names[_part(name)][rank], offset, length)
    return Metadata(tensors, storage_data=places, version=CURRENT_DCP_VERSION)


def _chunk(size: torch.Size, first: int, rows: int) -> ChunkStorageMetadata:
    if not size:
        return ChunkStorageMetadata(torch.Size(), size)
    return ChunkStorageMetadata(torch.Size((first, *[0] * (len(size) - 1))), torch.Size((rows, *size[1:])))
