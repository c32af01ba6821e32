"""Which attention functions keep documents apart, and compute what the model should: tested on tiny random models."""

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AttentionInterface, AutoConfig, PreTrainedConfig, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stages.base.errors import StageError
from stages.forward import attention, attention_choice
from stages.forward.attention import activate_kernels, deactivate_kernels, varlen_attention
from stages.forward.attention_choice import choose_attention
from stages.forward.batch import make_batch
from stages.forward.isolated import isolated
from stages.forward.loss import logits, loss_sum
from stages.forward.rope import fix_tables
from stages.forward.small_copy import random_model, rounding, small_config
from tests.artifacts import write_model
from tests.models import CONFIGS, CountedGraphs

SMALL: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64,
    "vocab_size": 101, "pad_token_id": None,
}  # fmt: skip
WINDOW: dict[str, Any] = {**SMALL, "sliding_window": 64}
NO_DROPOUT = {"attn_pdrop": 0.0, "attention_dropout": 0.0}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SMALL, "gpt2": NO_DROPOUT, "qwen2": SMALL, "qwen3": SMALL, "mistral": WINDOW,
    "ministral": {**WINDOW, **ROPE, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma": SMALL, "gemma3_text": WINDOW, "phi": {**SMALL, "num_key_value_heads": 4}, "phi3": WINDOW,
    "gpt_neox": {**SMALL, "attention_dropout": 0.0}, "olmo2": SMALL, "olmo3": WINDOW, "granite": SMALL,
    "smollm3": SMALL, "starcoder2": WINDOW, "cohere": SMALL, "cohere2": WINDOW, "glm4": SMALL, "mixtral": WINDOW,
    "exaone4": WINDOW, "qwen3_moe": SMALL,
}  # fmt: skip


def config_of(name: str) -> PreTrainedConfig:
    if name == "gemma2":
        return AutoConfig.for_model("gemma2", **WINDOW)
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return AutoConfig.for_model(name, **ARCHITECTURES.get(name, {}))


def refusal(name: str, attention: Any = "varlen", mask: bool = True, dtype: torch.dtype = torch.float32) -> str | None:
    return attention_choice.refusal(small_config(config_of(name)), attention, mask, dtype, "cpu")


@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_documents_are_computed_as_if_each_were_alone(name: str, attention: str) -> None:
    assert refusal(name, attention) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    assert refusal("gemma3_text", dtype=dtype) is None
    assert refusal("llama", mask=False, dtype=dtype) is None


class Tf32(TorchDispatchMode):
    """Round what is multiplied to 10 bits after the point, as a GPU does in TF32."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ("mm", "attention")):
            args = [
                rounded(arg) if isinstance(arg, torch.Tensor) and arg.dtype == torch.float32 else arg for arg in args
            ]
        return func(*args, **kwargs or {})


def rounded(values: torch.Tensor) -> torch.Tensor:
    """To the next float32 whose last 13 bits are 0."""
    return ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_tf32_is_no_difference(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As on a GPU, whose matrix products these are here."""
    with Tf32():
        assert "differ by" in str(refusal(name, "sdpa"))  # as rounding in fp32 it would be an error
        monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "high")
        monkeypatch.setattr(attention_choice, "rounding", lambda dtype, device: rounding(dtype, "cuda"))
        assert refusal(name, "sdpa") is None


def given(**changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """`varlen_attention`, which is given other arguments."""

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **others: Any) -> Any:
        named = {"key": key, "value": value, **others}
        named |= {name: change(named.get(name)) for name, change in changes.items()}
        return varlen_attention(module, query, named.pop("key"), named.pop("value"), *args, **named)

    return attend


def leaking(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """A thousandth of the first token of all rows."""
    output, _ = varlen_attention(module, query, key, value, *args, **kwargs)
    return output + 1e-3 * value[:, :1, :1].transpose(1, 2), None


LOGITS = "computes logits that differ by"


def dropped(argument: Any) -> None:
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "function", "reason"),
    [
        ("mistral", given(sliding_window=dropped), LOGITS),
        ("gemma3_text", given(sliding_window=dropped), LOGITS),
        ("olmo3", given(sliding_window=lambda window: window and window + 1), LOGITS),
        ("gemma2", given(softcap=dropped), LOGITS),
        ("gpt_oss", given(s_aux=dropped), LOGITS),
        ("flint", given(s_aux=dropped), LOGITS),
        ("llama", given(scaling=lambda scale: scale / 2), LOGITS),
        ("llama", given(key=lambda key: key.flip(1)), LOGITS),  # of other heads
        ("llama", given(value=lambda value: value.flip(1)), LOGITS),
        ("llama", leaking, "lets tokens attend to other documents"),
        ("llama", given(key=torch.Tensor.detach), "computes gradients that differ by"),
        ("gemma2", varlen_attention, "the model's attention has soft caps"),
        ("gpt_oss", varlen_attention, "the model's attention has attention sinks"),
    ],
)
def test_what_an_attention_function_leaves_out_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any], reason: str, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "varlen", function)
    assert reason in str(refusal(name, dtype=dtype))


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("llama", {"cu_seq_lens": lambda lengths: lengths[[0, -1]]}, "lets tokens attend to other documents"),
        ("llama", {"cu_seq_lens": lambda lengths: lengths + (lengths == 13).int()}, "lets tokens attend to other"),
        ("llama", {"cu_seq_lens": lambda lengths: lengths - (lengths == 13).int()}, LOGITS),
        ("gpt2", {"position_ids": lambda ids: torch.arange(32).repeat(len(ids), 1)}, LOGITS),
    ],
)
def test_a_wrong_mask_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, changed: dict[str, Callable[..., Any]], reason: str
) -> None:
    """No mask, a mask that is shifted by a token to either side, positions that do not restart."""

    def change(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        batch = make_batch(*args, **kwargs)
        return batch | {key: function(batch[key]) for key, function in changed.items()}

    monkeypatch.setattr(attention_choice, "make_batch", change)
    assert reason in str(refusal(name))


def test_dropout_of_the_attention_is_not_dropped() -> None:
    config = small_config(AutoConfig.for_model("gpt2"))
    reason = attention_choice.refusal(config, "varlen", True, torch.float32, "cpu")
    assert "dropout (set that of the attention to 0" in str(reason)
    assert attention_choice.refusal(config, "sdpa", True, torch.float32, "cpu") is None


@pytest.mark.parametrize("window", [0, 70, 700])
def test_varlen_on_cpus_is_exact_and_makes_no_large_mask(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Documents longer than a block, windows smaller and larger than one, heads that share keys."""
    length, bounds = 1500, [0, 1, 1201, 1500, 1500]
    masks = []
    blocks = attention._blocks

    def watch(*args: Any) -> Any:
        for block in blocks(*args):
            masks.append(block[2])
            yield block

    monkeypatch.setattr(attention, "_blocks", watch)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, length, 8, requires_grad=True) for heads in (4, 2, 2))
    document = torch.bucketize(torch.arange(length), torch.tensor(bounds), right=True)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    allowed = (document[:, None] == document) & (distance >= 0) & (distance < (window or length))
    expected = scaled_dot_product_attention(query, key, value, attn_mask=allowed, enable_gqa=True).transpose(1, 2)
    found, _ = varlen_attention(
        torch.nn.Module(), query, key, value, None, sliding_window=window or None,
        cu_seq_lens_q=torch.tensor(bounds, dtype=torch.int32), max_length_q=length,
    )  # fmt: skip
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    factors = torch.randn_like(expected)
    gradients = [torch.autograd.grad(output, (query, key, value), factors) for output in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert max(0 if mask is None else mask.numel() for mask in masks) <= 512 * (512 + window)
    assert len(masks) == (6 if window == 0 else 2 * (1 + 3 + 1))


def test_varlen_needs_no_value_of_a_tensor() -> None:
    """So that nothing is waited for on a GPU, and a training can be measured with fake tensors."""
    config = AutoConfig.for_model("mistral", **WINDOW, num_hidden_layers=1)
    batch = make_batch(torch.randint(0, 101, (2, 128)), 0, document_mask=True, lengths=True)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="varlen")
        fake = {name: mode.from_tensor(value) for name, value in batch.items() if name != "max_length"}
        loss_sum(model, fake | {"max_length": batch["max_length"]}).backward()
        assert all(param.grad is not None for param in model.parameters())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at it
def test_a_compiled_layer_with_varlen_is_not_compiled_again_for_other_documents() -> None:
    graphs, losses = CountedGraphs(), []
    config = transformers.MistralConfig(**{**CONFIGS["mistral"].to_dict(), "num_hidden_layers": 1})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="varlen")
    for compiles in (False, True):
        for layer in model.model.layers if compiles else ():
            layer.compile(fullgraph=True, backend=graphs)
        model.zero_grad()
        for number, num_documents in enumerate((3, 60, 5, 9, 60, 20, 1)):
            rows = torch.randint(1, 101, (2, 512), generator=torch.Generator().manual_seed(number))
            rows[:, torch.arange(num_documents) * (512 // num_documents)] = 0
            # By the third batch the number of documents and their greatest length are known to vary.
            with torch.compiler.set_stance("fail_on_recompile" if number > 1 else "default"):
                loss = loss_sum(model, make_batch(rows, 0, document_mask=True, lengths=True))
            loss.backward()
            losses.append(loss.item())
    assert losses[7:] == pytest.approx(losses[:7], rel=1e-6)
    # Once for a certain number of documents, once for any.
    name = "stages.document_attention"
    assert graphs.forward[f"{name}.default"] == graphs.backward[f"{name}_backward.default"] == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, in its own code
def test_flex_inside_a_compiled_layer_is_a_part_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    make_mask = masking_utils.create_block_mask  # is compiled too, which takes ten seconds
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda **sizes: make_mask(**{**sizes, "_compile": False}))
    config = transformers.LlamaConfig(**{**CONFIGS["llama"].to_dict(), "head_dim": 16, "num_hidden_layers": 1})
    losses = []
    for name in ("eager", "flex_attention"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
        if name == "flex_attention":
            model.model.layers[0].compile(fullgraph=True, backend="eager")
        for number in range(4):
            rows = torch.randint(1, 101, (2, 128), generator=torch.Generator().manual_seed(number))
            rows[:, 17 * number + 9] = 0
            stance = "fail_on_recompile" if number else "default"
            with torch.no_grad(), torch.compiler.set_stance(stance):  # torch has no backward pass of it for CPUs
                losses.append(loss_sum(model, make_batch(rows, 0, document_mask=True)).item())
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-6)


def save(directory: Path, name: str, **sizes: Any) -> Path:
    return write_model(directory, AutoConfig.for_model(name, architectures=[f"{name}ForCausalLM"], **sizes), dtype=None)


def choose(directory: Path, name: Any = "auto", mask: bool = True, length: int = 256) -> str:
    return choose_attention(name, directory, mask, length, torch.float32, "cpu").name


def choose_long(directory: Path, dtype: torch.dtype = torch.bfloat16, device: str = "cuda", mask: bool = True) -> Any:
    return choose_attention("auto", directory, mask, 1024, dtype, device)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_model(tmp_path, dtype=None)


def test_auto_is_the_fastest_that_works(llama: Path) -> None:
    assert choose(llama) == "sdpa"
    assert choose(llama, length=1024) == "varlen"
    assert choose(llama, length=1024, mask=False) == "sdpa"
    assert choose(llama, name="eager") == "eager"
    gemma2 = write_model(llama, "gemma2", dtype=None)
    assert choose(gemma2, length=1024) == choose(gemma2, mask=False) == "eager"
    opt = save(llama, "opt", hidden_size=24, num_attention_heads=3, vocab_size=101)
    assert choose(opt) == "varlen"  # it ignores positions, but not lengths


def test_auto_is_tested_without_document_mask_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_mask(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value, None, **kwargs)

    def only(*works: str) -> None:
        monkeypatch.setattr(attention_choice, "refusal", lambda _, name, *args: None if name in works else "fails")

    write_model(tmp_path, "mistral", dtype=None)
    assert choose(tmp_path, mask=False, length=1024) == "sdpa"
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", without_mask)  # and so without the window
    assert choose(tmp_path, mask=False, length=1024) == "varlen"
    only("flex", "sdpa")
    assert choose_long(tmp_path).name == "flex"
    assert choose_long(tmp_path, torch.float32).name == "sdpa"
    only("flex")
    assert choose_long(tmp_path, mask=False).name == "flex"
    only()
    assert choose(tmp_path, mask=False) == "eager"


def test_a_kernel_that_breaks_its_process_breaks_no_other(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a sticky error of CUDA does: all that the process computes later fails with it."""
    broken: list[str] = []

    def find_fault(small: Any, name: str, *_: Any) -> None:
        if name == "varlen":
            broken.append("CUDA error: misaligned address")
        if broken:
            raise RuntimeError(broken[0])

    def in_another_process(device: str, function: Callable[..., Any], *args: Any) -> Any:
        assert device == "cuda"
        broken.clear()
        return function(*args)

    monkeypatch.setattr(attention_choice, "_find_fault", find_fault)
    monkeypatch.setattr(attention_choice, "isolated", in_another_process, raising=False)
    assert choose_long(llama) == ("flex", None, ())
    with pytest.raises(StageError, match=r"fails .*misaligned address.*: use auto, or flex or sdpa or eager or padded"):
        choose_attention("varlen", llama, True, 1024, torch.bfloat16, "cuda")


def test_on_gpus_a_function_is_tested_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = multiprocessing.get_context("fork")
    assert isolated("cpu", os.getpid) == os.getpid()
    torch.set_float32_matmul_precision("high")
    try:
        assert isolated("cuda", torch.get_float32_matmul_precision) == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)  # it imports no torch
    with pytest.raises(RuntimeError, match="the process that computes it was ended"):  # and not this one
        isolated("cuda", os._exit, 1)
    assert isolated("cuda", os.getpid) != os.getpid()

    def refuse(index: int) -> None:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    assert isolated("cuda", os.getpid) == os.getpid(), "in exclusive mode, no other process gets the GPU"


def test_varlen_has_torchs_own_kernels_where_those_of_flash_attention_fail(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def activate(names: Any = None) -> tuple[str, ...]:
        active[:] = ["FA3"] if names is None else names
        return tuple(active)

    fails = False

    def find_fault(small: Any, name: str, *_: Any) -> str | None:
        return "computes gradients that differ" if [*active, fails] == ["FA3", True] else None

    active: list[str] = []
    monkeypatch.setattr(attention_choice, "_find_fault", find_fault)
    monkeypatch.setattr(attention_choice, "activate_kernels", activate)
    monkeypatch.setattr(attention_choice, "deactivate_kernels", active.clear)
    assert choose_long(llama, torch.float32, "cpu") == ("varlen", None, ("FA3",))
    fails = True
    assert choose_long(llama, torch.float32, "cpu") == ("varlen", "FA3 computes gradients that differ", ())
    assert not active, "sdpa would call them too"


def test_a_deterministic_training_has_torchs_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash Attention 3 before its version 3.0.0, and cuDNN, add up gradients in any order nevertheless."""
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: None)
    assert (activate_kernels(), has_cudnn()) == (("FA3",), False), "torch 2.15 would call cuDNN in its place"
    torch.use_deterministic_algorithms(True)
    try:
        assert (activate_kernels(), has_cudnn()) == ((), False)
    finally:
        torch.use_deterministic_algorithms(False)
        deactivate_kernels()
    assert has_cudnn()


def test_a_rank_without_the_kernels_that_rank_0_has_chosen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would compute with torch's own, and its gradients would differ without a word."""

    def activate(name: str) -> None:
        raise ImportError

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    assert activate_kernels() == activate_kernels(()) == ()
    with pytest.raises(StageError, match="rank 0 computes attention with FA3, which this rank does not find"):
        activate_kernels(("FA3",))


def test_documents_that_no_attention_function_keeps_apart_are_padded(tmp_path: Path) -> None:
    save(tmp_path, "bloom", hidden_size=24, num_hidden_layers=1, num_attention_heads=3, vocab_size=101)
    assert choose(tmp_path) == choose(tmp_path, name="padded") == "padded"
    assert choose(tmp_path, mask=False) in ("sdpa", "eager")


def test_a_named_attention_that_does_not_work_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"attention flex does not work with .*has no backward pass on CPUs.*: use auto, or sdpa or"
    with pytest.raises(StageError, match=message):
        choose(llama, "flex")
    monkeypatch.setattr(attention_choice, "logits", lambda *_: torch.zeros(2, 32, 64))
    with pytest.raises(StageError, match="computes logits that do not depend on what stands before"):
        choose(llama, "sdpa")


def test_a_small_config_has_a_layer_of_each_kind_and_small_windows() -> None:
    config = transformers.Gemma3TextConfig(head_dim=64)
    tiny = small_config(config)
    assert tiny is not None
    assert tiny.layer_types == ["sliding_attention", "full_attention"]
    assert (tiny.num_hidden_layers, tiny.hidden_size, tiny.vocab_size) == (2, 256, 64)
    assert (tiny.num_attention_heads, tiny.num_key_value_heads, tiny.sliding_window) == (4, 2, 5)
    assert config.num_hidden_layers == 26
    gemma2 = small_config(transformers.Gemma2Config())
    assert gemma2 is not None
    assert gemma2.attn_logit_softcapping == 1.0


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0}
MIXED = {"num_local_experts": 2, "num_experts_per_tok": 2}
TABLES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "longrope": ("llama", {}, {"rope_type": "longrope", **FACTORS}),
    "dynamic": ("llama", {"max_position_embeddings": 16}, {"rope_type": "dynamic", "factor": 4.0}),
    "phimoe": ("phimoe", MIXED, {"rope_type": "longrope", **FACTORS, "short_mscale": 1.1, "long_mscale": 1.3}),
}


def rope_config(name: str) -> PreTrainedConfig:
    """Of a model whose original context are 16 tokens."""
    architecture, sizes, rope = TABLES[name]
    rope = {"rope_theta": 1e4, "original_max_position_embeddings": 16, **rope}
    small = {**SMALL, "num_hidden_layers": 2, "max_position_embeddings": 64, **sizes}
    return AutoConfig.for_model(architecture, **small, rope_parameters=rope)


@pytest.mark.parametrize("name", TABLES)
def test_a_long_document_changes_no_other(name: str) -> None:
    model = random_model(rope_config(name), "eager", torch.float32, "cpu")
    rows = torch.randint(1, 101, (2, 64))  # row 0: documents of 8; row 1: one of 64
    rows[0, 7::8] = 0
    rows[1] = rows[1].clamp(min=1)

    def beside() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            alone, both = (logits(model, make_batch(each, 0, document_mask=True)) for each in (rows[:1], rows))
        return alone[0], both[0]

    assert not torch.allclose(*beside(), atol=1e-3), "as transformers computes it"
    handles = fix_tables(model, 64)
    fixed, both = beside()
    assert torch.allclose(fixed, both, atol=1e-5)
    with torch.no_grad():  # the table is that of rows of 64
        longest = logits(model, make_batch(rows[1:], 0, document_mask=True))
        for handle in handles:
            handle.remove()
        assert torch.equal(longest, logits(model, make_batch(rows[1:], 0, document_mask=True)))
    assert not torch.allclose(*beside(), atol=1e-3), "undone"
    assert not fix_tables(random_model(config_of("llama"), "eager", torch.float32, "cpu"), 64)


@pytest.mark.parametrize("name", TABLES)
def test_attention_is_chosen_for_models_whose_table_depends_on_the_length(name: str) -> None:
    assert attention_choice.refusal(small_config(rope_config(name)), "sdpa", True, torch.float32, "cpu") is None
