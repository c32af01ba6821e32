"""Documents as padded sequences: the same tokens, labels and losses as those of packed rows."""

import itertools
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from stages.base import history
from stages.base.errors import StageError
from stages.base.packed import TRAIN, VALIDATION
from stages.base.params_file import load_params
from stages.forward import attention_choice
from stages.forward.attention import activate_kernels
from stages.forward.attention_choice import choose_attention
from stages.forward.batch import Marks, make_batch
from stages.forward.loss import loss_sum, summed_loss
from stages.forward.padded import count_tokens, padded_batches
from stages.forward.rows import TokenRows
from stages.forward.small_copy import random_model, small_config
from stages.model.manifest import ModelManifest
from stages.planning import memory_plan, peak_memory
from stages.training.loader import BatchLoader, Padding
from stages.training.params import TrainParams
from tests.artifacts import describe, write_model
from tests.models import CONFIGS, MIXTRAL
from tests.project import Project
from tests.ranks import Ranks
from tests.trainings import each_rank, result

# A state space that has nothing to keep documents apart by, in a few thousand parameters.
MAMBA2 = {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "vocab_size": 4096, "hidden_size": 16,
          "num_heads": 2, "head_dim": 16, "state_size": 8, "num_hidden_layers": 2, "n_groups": 1, "chunk_size": 8,
          "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0}  # fmt: skip


def rows_of(lengths: list[int], length: int, vocab_size: int = 101) -> Tensor:
    """Packed rows of random documents of these lengths, each of which ends with 0."""
    generator = np.random.default_rng(0)
    tokens = np.concatenate([np.append(generator.integers(1, vocab_size, size - 1), 0) for size in lengths])
    tokens = tokens[: len(tokens) // length * length].astype(np.int32)
    return torch.from_numpy(tokens).view(-1, length)


def predictions(batch: dict[str, Tensor]) -> list[tuple[list[int], int]]:
    """What each label is predicted from: all tokens of its document that stand before it, and the label."""
    found = []
    for row, (tokens, labels) in enumerate(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True)):
        for place, label in enumerate(labels):
            first = place - int(batch["position_ids"][row, place]) if "position_ids" in batch else 0
            if label != -100:
                found.append((tokens[first : place + 1], label))
    return sorted(found)


def same(batch: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two batches are equal in all that they have."""
    return batch.keys() == other.keys() and all(torch.equal(batch[name], other[name]) for name in batch)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("document_mask", [True, False])
def test_each_label_is_predicted_from_the_same_tokens_as_in_packed_rows(num_ranks: int, document_mask: bool) -> None:
    rows = rows_of([1, 1, 300, 5, 90, 64, 2, 64, 17, 31, 7, 1, 33, 40, 150, 9, 61] * 2, length=64)
    batch = make_batch(rows, 0, document_mask)
    batches = padded_batches(batch, max_tokens=128, num_ranks=num_ranks)
    assert sorted(itertools.chain(*map(predictions, batches))) == predictions(batch)
    assert len(batches) % num_ranks == 0
    assert max(each["input_ids"].numel() for each in batches) <= 128
    assert [each["input_ids"].tolist() for each in batches] == [
        each["input_ids"].tolist() for each in padded_batches(batch, 128, num_ranks)
    ]
    for rank in range(num_ranks):
        own = padded_batches(batch, 128, num_ranks, rank=rank)
        assert all(itertools.starmap(same, zip(own, batches[rank::num_ranks], strict=True)))


def test_documents_of_similar_lengths_share_a_forward_pass() -> None:
    batch = make_batch(rows_of([500] * 147, length=4096), 0, document_mask=True)
    batches = padded_batches(batch, max_tokens=8192, num_ranks=2)
    computed = sum(each["input_ids"].numel() for each in batches)
    assert 1 - count_tokens(batch) / computed < 0.07
    assert computed < 1.07 * batch["input_ids"].numel()
    # Both ranks make as many passes as for packed rows and one more, all of about the same size.
    sizes = [each["input_ids"].numel() for each in batches]
    assert len(sizes) == 2 * (17 // 4 + 1)
    assert max(sizes) - min(sizes) < 0.2 * max(sizes)


def test_many_short_sequences_count_as_longer_ones() -> None:
    """Layers with a state need as much memory for each as for a chunk of tokens."""
    batch = make_batch(rows_of([8] * 1024, length=1024), 0, document_mask=True)
    assert max(len(each["input_ids"]) for each in padded_batches(batch, max_tokens=4096)) == 4096 // 64


def test_rows_without_a_label_are_a_forward_pass_too() -> None:
    batch = make_batch(torch.zeros(2, 8, dtype=torch.int32), 0, document_mask=True)
    batches = padded_batches(batch, max_tokens=16, num_ranks=3)
    assert [each["labels"].tolist() for each in batches] == [[[-100]]] * 3


@pytest.mark.parametrize("length", [49, 18])
def test_the_length_is_a_multiple_and_padding_is_marked(length: int) -> None:
    batch = make_batch(rows_of([20, 7, 30, 90], length), 0, document_mask=True)
    for each in padded_batches(batch, max_tokens=64, multiple=16, mask=True):
        assert each["input_ids"].shape[1] % 16 == 0
        assert each["input_ids"].numel() <= 64
        assert (each["attention_mask"].sum(1) == (each["labels"] != -100).sum(1)).all()
        assert (each["attention_mask"].diff(dim=1) <= 0).all()  # on the right


def conversations() -> tuple[Tensor, Marks]:
    """Rows of random tokens, EOS among them, of which a third is trained; one document and one row are not at all."""
    random = np.random.default_rng(0)
    rows = torch.from_numpy(random.integers(0, 101, (6, 64), dtype=np.int32))
    is_trained, is_start = (torch.from_numpy(random.random((6, 64)) < share) for share in (0.3, 0.05))
    is_start[:, 0] = is_start[0, 10] = is_start[0, 30] = True
    is_trained[0, 10:30] = is_trained[3] = False
    return rows, Marks(is_trained, is_start)


@pytest.mark.parametrize("document_mask", [True, False])
def test_of_conversations_what_is_trained_is_predicted(document_mask: bool) -> None:
    rows, marks = conversations()
    batch = make_batch(rows, 0, document_mask, marks=marks)
    batches = padded_batches(batch, max_tokens=128, num_ranks=2)
    assert sorted(itertools.chain(*map(predictions, batches))) == predictions(batch)
    if document_mask:
        trained = (marks.is_trained & ~marks.is_start).sum()
        assert sum(int((each["labels"] != -100).sum()) for each in batches) == trained > 50


def losses_alone(model: Any, rows: Tensor, marks: Marks | None) -> Tensor:
    """The loss of the documents, one at a time, without labels of this code."""
    found = []
    for number, row in enumerate(rows):
        starts = marks.is_start[number] if marks else torch.cat([torch.tensor([True]), row[:-1] == 0])
        labels = torch.where(marks.is_trained[number], row, -100) if marks else row
        bounds = starts.nonzero().flatten()[1:]
        for tokens, expected in zip(row.tensor_split(bounds), labels.tensor_split(bounds), strict=True):
            if len(tokens) > 1:
                output = model(tokens[None, :-1].long(), use_cache=False)
                found.append(summed_loss(output.logits[0], expected[1:].long()))
    return torch.stack(found).sum()


@pytest.mark.parametrize("marked", [False, True], ids=["texts", "conversations"])
@pytest.mark.parametrize(
    ("name", "attention"), [("llama", "sdpa"), ("llama", "varlen"), ("gemma2", "eager"), ("mistral", "eager")]
)
def test_packed_and_padded_documents_have_the_loss_and_gradient_of_each_alone(
    name: str, attention: str, marked: bool
) -> None:
    activate_kernels()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager").eval()
    rows, marks = conversations() if marked else (rows_of([30, 5, 90, 64, 2, 17, 31, 7, 1, 33], length=64), None)
    batch = make_batch(rows, 0, document_mask=True, lengths=attention == "varlen", marks=marks)
    parts = padded_batches(batch, max_tokens=128)
    assert len(parts) > 1
    losses = [losses_alone(model, rows, marks), torch.stack([loss_sum(model, part) for part in parts]).sum()]
    model.set_attn_implementation(attention)
    losses.append(loss_sum(model, batch))
    gradients = [torch.autograd.grad(loss, [*model.parameters()]) for loss in losses]
    for loss, found in zip(losses[1:], gradients[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(found, gradients[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "qwen3_5_text", "nemotron_h"])
def test_padded_documents_of_a_state_space_have_the_loss_that_each_has_alone(name: str) -> None:
    """In layers that have no mask."""
    config = small_config(transformers.AutoConfig.for_model(**(MAMBA2 if name == "mamba2" else {"model_type": name})))
    assert config is not None
    model = random_model(config, None, torch.float32, "cpu")
    rows = rows_of([30, 5, 64, 2, 17, 10], length=64, vocab_size=60)
    batch = make_batch(rows, 0, document_mask=True)
    found = torch.stack([loss_sum(model, part) for part in padded_batches(batch, max_tokens=128)]).sum()
    torch.testing.assert_close(found, losses_alone(model, rows, None), rtol=1e-6, atol=0)
    assert abs(loss_sum(model, batch) - found) > 1e-3 * found  # in packed rows they see each other


def test_the_router_loss_sees_no_padding() -> None:
    """It is a mean over tokens, so padding would change it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MIXTRAL, experts_implementation="eager").eval()
    batch = make_batch(rows_of([5, 27], length=32), 0, document_mask=True)
    (with_mask,) = padded_batches(batch, max_tokens=64, mask=True)
    other = with_mask["input_ids"].where(with_mask["attention_mask"].bool(), 77)
    losses = [
        model(input_ids=tokens, attention_mask=with_mask["attention_mask"], output_router_logits=True).aux_loss
        for tokens in (with_mask["input_ids"], other)
    ]
    assert torch.equal(*losses)
    assert not torch.equal(losses[0], model(input_ids=other, output_router_logits=True).aux_loss)


def save(directory: Path, config: dict[str, Any]) -> Path:
    return write_model(directory, transformers.AutoConfig.for_model(**config), dtype=None)


def choose(directory: Path) -> attention_choice.AttentionChoice:
    return choose_attention("auto", directory, True, 1024, torch.float32, "cpu")


def test_auto_pads_where_nothing_else_keeps_documents_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, reason, _ = choose(save(tmp_path, MAMBA2))
    assert name == "padded" and reason is not None
    assert "varlen, eager lets tokens attend to other documents; sdpa fails (ValueError" in reason
    # A model of which no small copy computes.
    monkeypatch.setattr(attention_choice, "small_config", lambda config: None)
    assert choose(write_model(tmp_path, dtype=None))[:2] == (
        "padded", "varlen, sdpa, eager cannot be tested, as no small copy of the model computes",
    )  # fmt: skip


CPMANT = {"model_type": "cpmant", "hidden_size": 16, "num_attention_heads": 2, "dim_head": 8, "dim_ff": 16,
          "num_hidden_layers": 1, "vocab_size": 101}  # fmt: skip


def test_a_model_that_sees_what_stands_behind_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def on_the_left(*args: Any, **kwargs: Any) -> list[dict[str, Tensor]]:
        return [{name: value.flip(1) for name, value in part.items()} for part in padded_batches(*args, **kwargs)]

    with pytest.raises(StageError, match="padded lets tokens attend to what stands behind them: use an"):
        choose(save(tmp_path, CPMANT))
    monkeypatch.setattr(attention_choice, "padded_batches", on_the_left)  # such padding would be seen
    with pytest.raises(StageError, match="padded lets tokens attend to what stands behind them"):
        choose(save(tmp_path, MAMBA2))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_make_as_many_passes_over_the_same_rows_and_no_pass_of_another(
    here: Project, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    made = mock.Mock(wraps=padded_batches)
    monkeypatch.setattr("stages.training.loader.padded_batches", made)
    here.set(batch_size=2, total_batch_size=12, attention="padded", eval_rows=7)
    for directory in (TRAIN, VALIDATION):
        rows = TokenRows(directory)
        loader = BatchLoader(rows, load_params(TrainParams), eos_token_id=0)
        batches, numbers = [], set()
        for _ in each_rank(monkeypatch, world_size):
            if directory == TRAIN:
                own, indices = loader._make(3).batches, loader.order.step(3)
            else:
                own, indices = [batch for _, batch in loader.validation_batches()], loader.validation_rows[""]
            numbers.add(len(own))
            batches += own
        expected = predictions(make_batch(torch.from_numpy(rows.rows(indices)), 0, document_mask=True))
        assert sorted(itertools.chain(*map(predictions, batches))) == expected
        assert len(numbers) == 1
        loader.close()
    assert {call.args[-1] for call in made.call_args_list} == {*range(world_size)}  # of its own rank alone


def test_a_training_with_padded_documents_is_that_with_packed_ones(training: Project, ranks: Ranks) -> None:
    """The same losses up to rounding, on another number of ranks too."""
    losses = {}
    for name, attention, world_size in (("packed", "sdpa", 2), ("padded", "padded", 2), ("alone", "padded", 1)):
        project = training.copy(training.path.with_name(name))
        project.set(attention=attention, max_steps=2, eval_freq=2)
        output = ranks.run(project, world_size=world_size)
        assert ("attention: padded; " in output) == (attention == "padded")
        rows = history.read(project.checkpoints() / "step-00000002/history.tsv")
        losses[name] = [history.series(rows, column)[1] for column in ("loss", "validation_loss", "grad_norm")]
    for name in ("padded", "alone"):
        for found, expected in zip(losses[name], losses["packed"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5)


def test_a_router_loss_has_the_same_forward_passes_on_any_number_of_ranks() -> None:
    batch = make_batch(rows_of([1, 300, 5, 90, 64, 2, 64, 17, 31, 7, 1, 33, 40, 150, 9, 61] * 2, length=64), 0, True)

    def passes(num_ranks: int) -> list[dict[str, Tensor]]:
        made = padded_batches(batch, max_tokens=512, num_ranks=num_ranks, mask=True)
        return [each for each in made if (each["labels"] != -100).any()]

    for num_ranks in (2, 3, 8):
        assert all(itertools.starmap(same, zip(passes(num_ranks), passes(1), strict=True)))


@pytest.fixture
def mamba2(here: Project) -> Project:
    """A project whose model needs padding."""
    save(here / "models/nano", MAMBA2)
    describe("models/nano").write()
    return here


@pytest.mark.slow
def test_a_killed_training_of_a_state_space_ends_with_the_same_result(mamba2: Project, ranks: Ranks) -> None:
    undisturbed = mamba2.copy(mamba2.path.with_name("undisturbed"))
    output = ranks.run(undisturbed)
    assert "attention: padded, because sdpa fails" in output
    assert "batch 8 rows in passes of up to 2 rows" in output
    ranks.run(mamba2, "kill rank 1 at step 5", -9)
    assert "resuming from step 4 of 12" in ranks.run(mamba2)
    assert result(mamba2) == result(undisturbed)


def test_plan_prints_what_share_is_padding_and_warns(
    mamba2: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    params, model = load_params(TrainParams), ModelManifest.read()
    peak, _, step = memory_plan.measure_memory(model, params, 2, 32, limit=None)
    assert peak is not None
    assert peak.is_upper_bound  # a GPU may have a kernel that gets the lengths
    output = capsys.readouterr().out
    assert step == ""  # a pass has no fixed number of rows
    assert re.search(r"^note: attention padded, because .*; 0% of the tokens that are computed are padding\n", output)
    assert "warning" not in output
    monkeypatch.setattr(peak_memory, "padding", lambda *_: Padding(share=0.31, most_sequences=(2, 32)))
    monkeypatch.setattr(peak_memory, "measure", lambda *_, **__: peak)
    memory_plan.measure_memory(model, params, 2, 32, limit=None)
    output = capsys.readouterr().out
    assert "; 31% of the tokens that are computed are padding\nwarning: 31% is much padding. Of more" in output
    assert "raise total_batch_size 8, batch_size 2 or seq_length 32\n" in output


def test_plan_counts_the_memory_of_many_short_sequences(mamba2: Project) -> None:
    params, model = load_params(TrainParams), ModelManifest.read()
    chosen = peak_memory.choose(model, params)
    alone = peak_memory.measure(model, chosen, 2, 32).total
    rows = TokenRows(TRAIN)
    assert peak_memory.padding(model, chosen, 2, rows).most_sequences == (2, 20)
    assert peak_memory.measure(model, chosen, 2, 32, rows=rows).total == alone
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak_memory, "padding", lambda *_: Padding(share=0, most_sequences=(16, 4)))
        assert peak_memory.measure(model, chosen, 2, 32, rows=rows).total > alone
