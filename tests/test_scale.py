"""What is predicted of many ranks, compared with what two and four real ones do."""

import pickle
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import LlamaConfig

from stages import scale
from stages.artifacts.errors import StageError
from stages.training.many_ranks import fake_group, measure, measure_rates, plan_of, reports_of
from stages.training.params import TrainParams
from stages.training.save_plan import Planner, make_metadata
from tests.project import Project
from tests.ranks import Ranks

KILLED = -9


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_predictions_are_what_real_ranks_do(
    training: Project, ranks: Ranks, params: TrainParams, num_ranks: int
) -> None:
    training.set(runtime={"async_checkpoint": False, "ckpt_freq": 6})
    count = f"count rank 0 at {training / 'collectives'}"
    ranks.run(training, f"kill rank 1 at step 9\n{count}", KILLED, world_size=num_ranks)
    collectives = [line.split() for line in (training / "collectives").read_text().splitlines()]
    config = LlamaConfig.from_pretrained(training / "models/nano")
    costs = measure(config, params, measure_rates(), num_ranks)

    sums = [n for n, (name, _) in enumerate(collectives) if name == "all_reduce"]
    agreements = [n for n in sums if int(collectives[n][1]) == costs.step_bytes]
    assert len(agreements) == 10 + 2  # one before each step, and one before each validation
    gather = next(n for n, (name, _) in enumerate(collectives) if name == "gather")
    save = collectives[max(n for n in sums if n < gather) + 1 : min(n for n in sums if n > gather)]
    assert len(save) == costs.save_collectives[0]
    # Rank 0 receives from each rank as many bytes as the longest message has, and gives one itself.
    gathered = [int(size) // (num_ranks + 1) for name, size in save if name == "gather"]
    reports = reports_of(plan_of(config, params, num_ranks)[0].items, num_ranks)
    assert gathered[0] < 200  # no plan
    assert gathered[1] == max(len(pickle.dumps(report)) for report in reports)
    assert gathered[2] == pytest.approx(costs.rng_bytes / num_ranks, rel=0.1)  # with the digest of its file

    [checkpoint] = training.checkpoints().glob("step-*")
    assert len(list(checkpoint.iterdir())) == costs.files
    assert len([path for path in checkpoint.glob("*_model_0.distcp") if path.stat().st_size]) == costs.model_files
    real, predicted = pickle.loads((checkpoint / ".metadata").read_bytes()), predict(config, params, num_ranks)
    assert real.state_dict_metadata == predicted.state_dict_metadata
    assert {index: place.relative_path for index, place in real.storage_data.items()} == {
        index: place.relative_path for index, place in predicted.storage_data.items()
    }

    if num_ranks == 4:
        return
    (training / "collectives").unlink()
    assert "resuming from step 6" in ranks.run(training, count, world_size=num_ranks)
    resumed = [line.split()[0] for line in (training / "collectives").read_text().splitlines()]
    assert resumed.count("scatter") == 2  # of the last save: to load, no plan is sent


def predict(config: LlamaConfig, params: TrainParams, num_ranks: int) -> Any:
    items = plan_of(config, params, num_ranks)[0].items
    return make_metadata(items, reports_of(items, num_ranks))


def test_ranks_share_equal_rows_by_bytes_and_write_each_once() -> None:
    shapes = {"matrix": (7, 5), "same": (7, 5), "wide": (2, 300), "norm": (3,)}
    written: list[dict[tuple[str, Any], int]] = []
    for rank in range(6):  # three copies of a model on two ranks each
        with fake_group(6, rank):
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


def test_rows_that_no_rank_or_two_have_written_are_an_error(params: TrainParams) -> None:
    config = LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    items = plan_of(config, params, 2)[0].items
    first, second = reports_of(items, 2)
    metadata, name = make_metadata(items, [first, second]), items[0].index.fqn
    assert metadata.storage_data[MetadataIndex(name, [5, 0])].relative_path == "__1_model_0.distcp"
    for wrong in ([first, second[1:]], [first, np.concatenate([second, second[:1]])], [first, first]):
        with pytest.raises(ValueError, match=f"have not written each row of {re.escape(name)} exactly once"):
            make_metadata(items, wrong)


def test_the_table_has_a_column_for_each_number_of_ranks(
    training: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(training.path)
    monkeypatch.setattr(sys, "argv", ["scale", "--ranks", "4", "1024", "--params", "1.2e8"])
    scale.main()
    printed = capsys.readouterr().out
    assert "parameters, with optimizer" in printed and "ranks" in printed
    [files] = [line.split() for line in printed.splitlines() if line.strip().startswith("files ")]
    assert files == ["files", "14", "2,054"]
    for option, value in (("--ranks", "1"), ("--ranks", "99999"), ("--params", "7")):
        monkeypatch.setattr(sys, "argv", ["scale", option, value])
        with pytest.raises(StageError, match=option):
            scale.main()
