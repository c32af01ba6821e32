"""Context parallelism: ranks that share rows compute what one rank computes, with documents apart; and what is refused.

On CPUs, with gloo. In tests/gpu, two ranks share a GPU.
"""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.models.llama import modeling_llama

from stages import plan
from stages.base import history
from stages.base.errors import StageError
from stages.base.packed import TRAIN, VALIDATION
from stages.base.params_file import load_params
from stages.building import sharded_model
from stages.checkpointing import decision
from stages.checkpointing.run import describe
from stages.forward.attention_choice import choose_attention, refusal
from stages.forward.batch import count_labels, make_batch
from stages.forward.context import RankContext, RowContext, cut
from stages.forward.loss import logits, training_losses
from stages.forward.rope import fix_tables
from stages.forward.rows import TokenRows
from stages.forward.small_copy import small_config
from stages.launching.remedies import remedies
from stages.launching.runtime import TrainRuntime
from stages.planning import memory_plan, peak_memory
from stages.ranks.process_group import context_group, device_mesh
from stages.training.loader import BatchLoader
from stages.training.params import TrainParams
from tests.models import MIXTRAL, full_value, manifest_of
from tests.project import Project, run_here
from tests.ranks import Ranks
from tests.trainings import each_rank, newest_checkpoint, result

VOCAB_SIZE, SHAPE, KILLED = 211, (4, 96), -9
EIGHT_HEADS = transformers.LlamaConfig(
    vocab_size=101, hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=8,
    num_key_value_heads=2,
)  # fmt: skip
TOLERANCE = 1e-6
ENDS = ((0, 31), (0, 32), (0, 70), (1, 5), (1, 80), (2, 95), (3, 47), (3, 48))
"""Of documents, two of which are one token; slices begin inside others."""
DOCUMENTS = ((0, 0, 31), (0, 33, 70), (0, 71, 96), (1, 6, 80), (2, 0, 95), (3, 49, 96))
"""Those that are perturbed: row, start and end, without the token that ends them."""


class Case(NamedTuple):
    """What ranks compute with the model `kv`, which has so many key-value heads, or a window."""

    cp: int
    model: str
    fsdp: dict[str, Any] = {}  # noqa: RUF012
    kind: str = "none"
    loss: str = "fused"
    perturbs: bool = False
    """Whether documents are changed, too. The logits of all cases are those of a rank alone, bit for bit."""


CASES: dict[int, dict[str, Case]] = {
    1: {**{name: Case(1, name) for name in ("kv 1", "kv 2", "kv 3", "kv 4", "window", "longrope")},
        "plain": Case(1, "kv 2", loss="plain")},
    2: {
        **{name: Case(2, name) for name in ("kv 1", "kv 3", "kv 4", "longrope")},
        "window": Case(2, "window", perturbs=True),
        "selective_op": Case(2, "kv 2", kind="selective_op"),
        "plain": Case(2, "kv 2", loss="plain"),
    },
    4: {
        "2 x 2": Case(2, "kv 2"),
        "ddp": Case(2, "kv 2", {"strategy": "ddp"}),
        "across copies": Case(4, "kv 2", {"sharding_strategy": "HYBRID_SHARD", "size": 2}, "full", perturbs=True),
    },
}  # fmt: skip
"""By the number of ranks."""


def packed_rows(document: tuple[int, int, int] | None = None) -> Tensor:
    """(B, T), with other tokens in one document."""
    tokens = torch.randint(1, VOCAB_SIZE, SHAPE, generator=torch.Generator().manual_seed(3))
    for row, position in ENDS:
        tokens[row, position] = 0
    if document:
        row, start, end = document
        tokens[row, start:end] = tokens[row, start:end] % (VOCAB_SIZE - 1) + 1
    return tokens


def compute(case: Case, directory: Path, params: TrainParams) -> dict[str, Any]:
    """Loss and gradients of all rows, the logits, and how many change within and outside of a document that does."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    params = dataclasses.replace(
        params, fsdp=dataclasses.replace(params.fsdp, **case.fsdp), activation_checkpointing=case.kind, loss=case.loss,
        attention="varlen", context_parallel=case.cp,
    )  # type: ignore[arg-type]  # fmt: skip
    mesh = device_mesh(params.fsdp.mesh_shape(num_ranks, num_ranks), timeout_minutes=5)
    manifest = manifest_of(directory / case.model, with_weights=True)
    model = sharded_model.build(manifest, params, mesh, initialize=True)
    fix_tables(model, SHAPE[1])
    group = context_group(case.cp, timeout_minutes=5)
    assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 300

    def batch(document: tuple[int, int, int] | None = None) -> dict[str, Any]:
        own = packed_rows(document).chunk(num_ranks // case.cp)[rank // case.cp]
        made = make_batch(own, 0, document_mask=True, lengths=True)
        return cut(made, rank % case.cp, RankContext(group)) if case.cp > 1 else made

    def all_logits(document: tuple[int, int, int] | None = None) -> Tensor:
        own = logits(model, batch(document)).reshape(-1, VOCAB_SIZE).contiguous()
        parts = [torch.empty_like(own) for _ in range(num_ranks)]
        dist.all_gather(parts, own)
        return torch.cat(parts)

    model.train()
    given = batch()
    loss, _ = training_losses(model, given)
    loss.backward()
    sums = torch.stack([loss.detach().double(), torch.tensor(count_labels(given), dtype=torch.float64)])
    dist.all_reduce(sums)
    gradients = {name: full_value(param.grad) for name, param in model.named_parameters() if param.grad is not None}
    model.eval()
    changes = []
    with torch.no_grad():
        found = all_logits()
        for row, start, end in DOCUMENTS if case.perturbs else ():
            is_own = torch.zeros(SHAPE, dtype=torch.bool)
            is_own[row, start : end + 1] = True
            differ = (all_logits((row, start, end)) != found).any(dim=1)
            changes.append((int((differ & is_own.flatten()).sum()), int((differ & ~is_own.flatten()).sum())))
    return {"sums": sums, "gradients": gradients, "logits": found, "changes": changes}


def rank_main(rank: int, num_ranks: int, directory: Path, params: TrainParams) -> None:
    store = dist.FileStore(str(directory / f"store-{num_ranks}"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    found = {name: compute(case, directory, params) for name, case in CASES[num_ranks].items()}
    dist.destroy_process_group()
    if rank == 0:
        torch.save(found, directory / f"results-{num_ranks}.pt")


@pytest.fixture(scope="module")
def results(params: TrainParams, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What each number of ranks has found."""
    directory = tmp_path_factory.mktemp("context")
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 12, "tie_word_embeddings": False, "eos_token_id": 0, "bos_token_id": None,
    }  # fmt: skip
    # Two tables of positions: slices have short documents, beside long ones in others.
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
            "factor": 4.0, "original_max_position_embeddings": 48}  # fmt: skip
    configs: dict[str, transformers.PreTrainedConfig] = {
        **{f"kv {heads}": transformers.LlamaConfig(**common, num_key_value_heads=heads) for heads in (1, 2, 3, 4)},
        "longrope": transformers.LlamaConfig(**common, num_key_value_heads=2, rope_parameters=rope),
        "window": transformers.MistralConfig(**common, num_key_value_heads=2, sliding_window=20),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param) * 0.05)
        model.save_pretrained(directory / name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have: other numbers round differently
    rank_main(0, 1, directory, params)
    torch.set_num_threads(threads)
    for num_ranks in (2, 4):
        ranks.call(rank_main, num_ranks, directory, params, world_size=num_ranks)
    return {number: torch.load(directory / f"results-{number}.pt") for number in CASES}


OF_SEVERAL = [(number, name) for number in (2, 4) for name in CASES[number]]


@pytest.mark.parametrize(("num_ranks", "name"), OF_SEVERAL)
def test_ranks_that_share_rows_compute_what_one_rank_computes(
    results: dict[int, dict[str, Any]], num_ranks: int, name: str
) -> None:
    case, found = CASES[num_ranks][name], results[num_ranks][name]
    expected = results[1]["plain" if case.loss == "plain" else case.model]
    assert torch.equal(found["logits"], expected["logits"])
    (loss, labels), (expected_loss, expected_labels) = found["sums"].tolist(), expected["sums"].tolist()
    assert labels == expected_labels
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for key, gradient in expected["gradients"].items():
        assert (found["gradients"][key] - gradient).norm() <= TOLERANCE * gradient.norm(), key


@pytest.mark.parametrize(
    ("num_ranks", "name"), [(number, name) for number, name in OF_SEVERAL if CASES[number][name].perturbs]
)
def test_no_logit_of_another_document_changes(results: dict[int, dict[str, Any]], num_ranks: int, name: str) -> None:
    for (row, start, end), (own, others) in zip(DOCUMENTS, results[num_ranks][name]["changes"], strict=True):
        assert others == 0
        # The token that ends it sees it, too.
        assert own == min(end + 1, SHAPE[1]) - start, row


def test_the_slices_of_a_row_have_its_labels(here: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training and validation, and together they are the tokens of the whole rows."""
    found = {}
    for size in (1, 2, 4):
        here.set(context_parallel=size, attention="varlen", total_batch_size=16, eval_batch_size=3)
        made: dict[str, list[int]] = {"training": [], "validation": []}
        for _ in each_rank(monkeypatch, 4):
            context = RowContext(size) if size > 1 else None
            training, validation = (
                BatchLoader(TokenRows(rows), load_params(TrainParams), 0, False, context)
                for rows in (TRAIN, VALIDATION)
            )
            step = training.step_batches(2)
            assert step.num_labels == sum(map(count_labels, step.batches))
            validated = [batch for _, batch in validation.validation_batches()]
            for name, batches in (("training", step.batches), ("validation", validated)):
                assert ("context" in batches[0]) == (size > 1)
                for batch in batches:
                    assert int(batch["cu_seq_lens"][-1]) == size * batch["labels"].numel()
                    is_label = batch["labels"].flatten() != -100
                    made[name] += batch["input_ids"].flatten()[is_label].tolist()
            training.close()
        found[size] = {name: sorted(tokens) for name, tokens in made.items()}
    assert found[1] == found[2] == found[4]
    assert all(found[1].values())


def test_a_killed_training_ends_with_the_same_result_and_goes_on_without_sharing(
    training: Project, ranks: Ranks
) -> None:
    training.set(context_parallel=2, max_steps=4, eval_freq=2, runtime={"async_checkpoint": False})
    undisturbed = training.copy(training.path.with_name("undisturbed"))
    output = ranks.run(undisturbed)
    assert "batch 8 = 2 ranks / context_parallel 2 x 2 rows x 4 accumulation steps" in output
    assert "attention varlen" in output
    ranks.run(training, "kill rank 1 at step 3", KILLED)
    shorter = training.copy(training.path.with_name("shorter"))
    assert "resuming from step 2 of 4" in ranks.run(training)
    assert result(training, 4) == result(undisturbed, 4)
    shorter.set(context_parallel=1)
    assert "continuing from" in ranks.run(shorter, world_size=1)
    found, expected = (history.read(newest_checkpoint(each, 4) / "history.tsv") for each in (shorter, undisturbed))
    # Steps of AdamW add up what the first ones round differently.
    for column, tolerance in (("loss", TOLERANCE), ("validation_loss", TOLERANCE), ("grad_norm", 10 * TOLERANCE)):
        values = history.series(found, column)[1]
        assert values == pytest.approx(history.series(expected, column)[1], rel=tolerance)
    assert history.series(found, "loss")[1] != history.series(expected, "loss")[1]  # two steps are computed otherwise


def test_a_run_with_another_number_is_adopted(here: Project) -> None:
    params = load_params(TrainParams)
    one, two, four = (describe(dataclasses.replace(params, context_parallel=size)).identity for size in (1, 2, 4))
    older = dataclasses.replace(one, params={**one.params})
    del older.params["context_parallel"]  # of before there was another number
    for there, now in ((one, two), (two, one), (two, four), (older, two)):
        assert decision._obstacles(there, now, decision._NEUTRAL) == []


HEADS = "the 2 attention heads of LlamaForCausalLM"
TOKENS = "the 64 tokens of a forward pass (batch_size 2 x seq_length 32)"
REFUSED: list[tuple[str, int, int | None, dict[str, Any]]] = [
    (f"3 does not divide {HEADS}, nor {TOKENS}: use 1 or 2", 3, None, {}),
    (
        "64 does not divide the 2 attention heads of LlamaForCausalLM, nor the 32 tokens of a forward pass "
        f"(eval_batch_size 1 x seq_length 32): use 1 or 2, which also divide {TOKENS}",
        64,
        None,
        {"eval_batch_size": 1},
    ),
    (f"4 does not divide {HEADS}, nor the 6 ranks of a node: use 1 or 2, which also divide {TOKENS}", 4, 6, {}),
    ("2 does not divide the 3 ranks of a node: use 1", 2, 3, {}),
    ("2 needs attention varlen, not sdpa: use attention auto, or context_parallel 1", 2, None, {"attention": "sdpa"}),
    ("2 and compile true cannot be used together", 2, None, {"compile": True}),
]


def test_what_cannot_be_is_refused_before_the_training(here: Project) -> None:
    given, of_here = load_params(TrainParams), load_params(TrainRuntime, "runtime")
    for message, size, ranks_of_node, changes in REFUSED:
        params = dataclasses.replace(given, context_parallel=size, total_batch_size=2, **changes)
        runtime = dataclasses.replace(of_here, nproc_per_node=ranks_of_node)
        with pytest.raises(StageError, match=re.escape(f"context_parallel {message}")):
            plan.check(params, runtime, size, None)
        if ranks_of_node is None:
            plan.check(dataclasses.replace(params, context_parallel=1), runtime, 1, None)


def test_a_launch_refuses_ranks_that_cannot_share_rows(here: Project) -> None:
    here.set(context_parallel=2, runtime={"nproc_per_node": 3, "resume": "never"})
    checkpoint = describe(load_params(TrainParams)).directory / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    output = run_here("launch", status=2)
    assert "context_parallel 2 does not divide the 3 ranks of a node: use 1" in output
    assert "starts at step 0" not in output
    assert checkpoint.exists()
    here.set(context_parallel=1, total_batch_size=2, runtime={"nproc_per_node": 3})
    output = run_here("launch", status=2)
    assert "total_batch_size 2 is not a multiple" in output
    assert "starts at step 0" not in output


def test_total_batch_size_is_shared_by_groups_of_ranks(params: TrainParams) -> None:
    shared = dataclasses.replace(params, context_parallel=2, batch_size=2, total_batch_size=8)
    assert [shared.grad_accum_steps(number) for number in (2, 4, 8)] == [4, 2, 1]
    with pytest.raises(
        StageError, match="batch_size 2 x 6 ranks / context_parallel 2: use total_batch_size 6 or 12 or 4"
    ):
        shared.grad_accum_steps(6)
    with pytest.raises(StageError, match="context_parallel 2 does not divide 3 ranks: use a divisor of 3"):
        shared.grad_accum_steps(3)
    assert memory_plan.batch_sizes(shared, 8) == [1, 2]
    full = dataclasses.replace(shared, activation_checkpointing="full", batch_size=1)
    assert "context_parallel 4, if `plan` accepts it" in remedies(full, 4)
    assert "context_parallel" not in remedies(full, 2)


def test_a_router_loss_and_fp32_on_gpus_are_refused(params: TrainParams, tmp_path: Path) -> None:
    MIXTRAL.save_pretrained(tmp_path)
    model, shared = manifest_of(tmp_path, with_weights=False), dataclasses.replace(params, context_parallel=2)
    with pytest.raises(StageError, match="2 is not possible with the router loss of MixtralForCausalLM"):
        shared.check_context_parallel(model, 32)
    EIGHT_HEADS.save_pretrained(tmp_path)
    model = manifest_of(tmp_path, with_weights=False)
    with pytest.raises(StageError, match="has no kernel for fp32 on GPUs: use precision bf16"):
        memory_plan.measure_memory(model, shared, 2, 32, limit=2**30)
    peak, *_ = memory_plan.measure_memory(model, shared, 2, 32, limit=None)
    assert peak


def choose(config: transformers.PreTrainedConfig, directory: Path, size: int) -> str:
    config.save_pretrained(directory)
    return choose_attention("auto", directory, True, 32, torch.float32, "cpu", size).name


def test_heads_that_ranks_cannot_share_are_refused(params: TrainParams, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(num_attention_heads=6, num_key_value_heads=2, hidden_size=48, vocab_size=64)
    assert [choose(config, tmp_path, size) for size in (1, 2, 3, 6)] == ["sdpa", "varlen", "varlen", "varlen"]
    shared, model = dataclasses.replace(params, context_parallel=4), manifest_of(tmp_path, with_weights=False)
    with pytest.raises(
        StageError, match="4 does not divide the 6 attention heads of LlamaForCausalLM: use 1, 2, 3 or 6"
    ):
        shared.check_context_parallel(model, 96)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.Gemma2Config(), "has soft caps"),
        (transformers.GptOssConfig(), "has attention sinks"),
        (transformers.FalconConfig(), "varlen is not among the attention functions that the model's code in transfor"),
        (transformers.MambaConfig(), "lets tokens attend to other documents|fails"),
        (transformers.LlamaConfig(attention_dropout=0.1), "has dropout"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_models_without_lengths_are_refused(config: transformers.PreTrainedConfig, reason: str, tmp_path: Path) -> None:
    with pytest.raises(
        StageError, match=rf"context_parallel 2 does not work with .*({reason}).*: use context_parallel 1"
    ):
        choose(config, tmp_path, 2)


def test_a_model_that_looks_across_tokens_outside_of_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token shift stays within documents, so a rank alone computes it right. A slice lacks the token before it."""
    forward = modeling_llama.LlamaDecoderLayer.forward

    def shifted(self: Any, hidden: Tensor, *args: Any, position_ids: Tensor, **kwargs: Any) -> Any:
        before = torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1] * (position_ids > 0)[..., None]
        return forward(self, hidden + before, *args, position_ids=position_ids, **kwargs)

    small = small_config(transformers.LlamaConfig())
    found = [refusal(small, "varlen", True, torch.float32, "cpu", is_cut=is_cut) for is_cut in (False, True)]
    assert found == [None, None]
    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", shifted)
    alone, shared = (refusal(small, "varlen", True, torch.float32, "cpu", is_cut=is_cut) for is_cut in (False, True))
    assert alone is None
    assert shared and "differ by" in shared


def test_plan_counts_the_tokens_of_a_slice_and_names_it_where_no_row_fits(
    params: TrainParams, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    EIGHT_HEADS.save_pretrained(tmp_path)
    model = manifest_of(tmp_path, with_weights=False)
    params = dataclasses.replace(params, batch_size=1, total_batch_size=4, precision="bf16", attention="varlen")
    full = dataclasses.replace(params, activation_checkpointing="full")
    peaks = {}
    for size in (1, 2, 4):
        chosen = peak_memory.choose(model, dataclasses.replace(full, context_parallel=size))
        peaks[size] = peak_memory.measure(model, chosen, 4, 1024)
    for before, after in itertools.pairwise(peak.activations + peak.temporaries for peak in peaks.values()):
        assert 0.4 < after / before < 0.7
    memory_plan.measure_memory(model, params, 4, 1024, limit=int(peaks[2].total / 0.92))
    assert "note: with context_parallel 2, batch_size 1 and activation_checkpointing full" in capsys.readouterr().out
    memory_plan.measure_memory(model, params, 4, 1024, limit=2 * peaks[1].total)
    assert "context_parallel" not in capsys.readouterr().out
