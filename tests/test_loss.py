"""The loss is that of the logits, its gradient too, and no tensor is as large as the logits of all tokens."""

import contextlib
import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from stages.base.errors import StageError
from stages.building import sharded_model
from stages.forward import loss as loss_module
from stages.forward.batch import make_batch
from stages.forward.loss import LossChoice, choose_loss, fuse, logits, loss_sum, losses, obstacle_to_fuse, summed_loss
from stages.forward.small_copy import rounding, small_config
from stages.training.params import TrainParams
from tests.artifacts import write_model
from tests.models import manifest_of

ARCHITECTURES = (
    "llama", "gpt2", "qwen2", "qwen3", "mistral", "gemma", "gemma3_text", "phi", "phi3", "gpt_neox", "olmo2", "olmo3",
    "smollm3", "starcoder2", "glm4", "exaone4", "mixtral", "opt", "falcon", "bloom", "stablelm", "deepseek_v3",
)  # fmt: skip
CHANGING: dict[str, dict[str, Any]] = {
    "gemma2": {"final_logit_softcapping": 30.0},
    "cohere": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0},
}
"""Models that change their logits after the LM head, and the parameter of the config."""

CHANGED = "the model changes what its LM head returns, as by a soft cap or a factor"


def tiny(name: str, **changed: Any) -> PreTrainedConfig:
    config = small_config(AutoConfig.for_model(name, **changed))
    assert config is not None
    return config


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return model


def on_meta(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return kind(config).to(torch.bfloat16)


def usual_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """By torch's function, from the logits of all tokens."""
    return nn.functional.cross_entropy(
        logits(model, batch).flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum"
    )


def gradients(loss: Tensor, *inputs: Tensor | None) -> list[Tensor]:
    """Of a part of the loss, as `train_step` makes it; in double precision."""
    params = [tensor for tensor in inputs if tensor is not None]
    return [gradient.double() for gradient in torch.autograd.grad(loss * (1 / 77), params)]


def distance(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of the compiler
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        *((dtype, "aot_eager") for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        pytest.param(torch.bfloat16, "inductor", marks=pytest.mark.slow),
    ],
)
def test_the_loss_in_parts_is_as_exact_as_that_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, backend: str, with_bias: bool
) -> None:
    """Compared with double precision; 90 tokens in parts of 16, the last one shorter."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(loss_module, "_compiled", loss_module._compiled.__wrapped__)  # keeps no other backend
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(90, 32, generator=generator).to(dtype).requires_grad_()
    weight = (0.2 * torch.randn(500, 32, generator=generator)).to(dtype).requires_grad_()
    bias = torch.randn(500, generator=generator).to(dtype).requires_grad_() if with_bias else None
    labels = torch.randint(0, 500, (90,), generator=generator)
    labels[::7] = -100

    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    losses = {
        "exact": nn.functional.cross_entropy(nn.functional.linear(*exact), labels, reduction="sum"),
        "usual": nn.functional.cross_entropy(
            nn.functional.linear(hidden, weight, bias).float(), labels, reduction="sum"
        ),
        "fused": summed_loss(hidden, labels, weight, bias, num_logits=16 * 500),
        "plain": summed_loss(nn.functional.linear(hidden, weight, bias), labels, num_logits=16 * 500),
    }
    if dtype != torch.float32:
        losses["compiled"] = summed_loss(hidden, labels, weight, bias, num_logits=16 * 500, compiles=True)
    inputs = {name: exact if name == "exact" else [hidden, weight, bias] for name in losses}
    found = {name: gradients(loss, *inputs[name]) for name, loss in losses.items()}
    usual = distance(found["usual"], found["exact"])
    for name in losses.keys() - {"exact", "usual"}:
        loss = losses[name]
        assert (loss.dtype, loss.shape) == (torch.float32, ())
        torch.testing.assert_close(loss, losses["usual"], rtol=1e-6, atol=0)
        for error, limit in zip(distance(found[name], found["exact"]), usual, strict=True):
            assert error < 1.4 * limit  # the gradient of fused hidden states is rounded once more
    with torch.no_grad():
        assert torch.equal(summed_loss(hidden, labels, weight, bias, num_logits=16 * 500), losses["fused"])


@pytest.mark.parametrize(("memory", "expected"), [(24 * 2**30, 2**27), (79.2 * 2**30, 2**29), (None, 2**29)])
def test_large_gpus_compute_more_of_the_loss_at_a_time(
    monkeypatch: pytest.MonkeyPatch, memory: float | None, expected: int
) -> None:
    """An H100 has 79.2 GiB. On CPUs nothing changes."""
    with loss_module.assumed_device("cuda", memory):
        assert loss_module._logits_at_a_time(torch.device("cpu")) == expected
    if memory is not None:
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
        assert loss_module._logits_at_a_time(torch.device("cuda", 0)) == expected
    assert loss_module._logits_at_a_time(torch.device("cpu")) == 2**23


def test_what_rounds_as_tf32_is_compared_like_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_float32_matmul_precision", lambda: "high")
    assert rounding(torch.float32, "cuda") == 2**-10
    assert rounding(torch.float32, "cpu") == 2**-23
    assert rounding(torch.bfloat16, "cuda") == 2**-7


def test_gradients_of_rare_tokens_do_not_vanish_in_fp16() -> None:
    """In it, a probability below 3e-8 is 0."""
    hidden = torch.ones(1, 1, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[0.0], [-18.0]], dtype=torch.float16, requires_grad=True)  # of the second: 1.5e-8
    summed_loss(hidden, torch.tensor([0]), weight).mul(2**16).backward()
    assert hidden.grad is not None
    assert hidden.grad.item() == pytest.approx(2**16 * 1.523e-8 * -18, rel=0.03)


def test_tokens_without_labels_have_no_gradient() -> None:
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    loss = summed_loss(hidden, torch.full((4,), -100), weight)
    loss.backward()
    assert (loss.item(), hidden.grad.norm().item(), weight.grad.norm().item()) == (0, 0, 0)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_fused_loss_and_its_gradients_are_those_of_the_logits(name: str) -> None:
    model = make_model(tiny(name))
    batch = make_batch(torch.randint(0, 64, (2, 16)), eos_token_id=0, document_mask=False)
    expected = usual_loss(model, batch)
    expected.backward()
    gradients = {key: param.grad for key, param in model.named_parameters()}
    model.zero_grad()
    assert obstacle_to_fuse(on_meta(type(model), model.config)) is None
    fuse(model)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    found = loss_sum(model, batch)
    torch.testing.assert_close(found, expected)
    found.backward()
    for key, param in model.named_parameters():
        torch.testing.assert_close(
            param.grad, gradients[key], rtol=1e-4, atol=1e-5, msg=lambda text, key=key: key + text
        )
    with torch.no_grad():
        assert next(losses(model, [batch]))[0] == pytest.approx(expected.item(), rel=1e-5)
        assert logits(model, batch).shape == (2, 16, 64)  # without labels it is a model like any other


@pytest.mark.parametrize("name", CHANGING)
def test_a_model_that_changes_its_logits_keeps_the_plain_loss(name: str, tmp_path: Path) -> None:
    config = tiny(name, **CHANGING[name])
    config.save_pretrained(tmp_path)
    found = choose_loss("auto", tmp_path)
    assert (found.name, found.reason) == ("plain", CHANGED)
    assert choose_loss("plain", tmp_path) == LossChoice("plain", None)
    with pytest.raises(
        StageError, match=r"loss fused is not possible with \w+: the model changes .* use loss auto or plain"
    ):
        choose_loss("fused", tmp_path)
    # If the answer were ignored, no forward pass would give another loss.
    model = make_model(config)
    batch = make_batch(torch.randint(1, 64, (2, 16)), eos_token_id=0, document_mask=False)
    torch.testing.assert_close(loss_sum(model, batch), usual_loss(model, batch))  # plain
    fuse(model)
    with pytest.raises(StageError, match=r"the model changes what its LM head returns, .*; set loss to plain"):
        loss_sum(model, batch)


def test_without_its_soft_cap_a_model_has_the_fused_loss(tmp_path: Path) -> None:
    tiny("gemma2", final_logit_softcapping=None).save_pretrained(tmp_path)
    assert choose_loss("auto", tmp_path) == LossChoice("fused", None)


def test_a_model_that_uses_its_logits_keeps_the_plain_loss() -> None:
    class Sliced(transformers.LlamaForCausalLM):
        def forward(self, **inputs: Any) -> Any:
            output = super().forward(**inputs)
            output.logits = output.logits[..., :64]
            return output

    class Detached(transformers.LlamaForCausalLM):
        def forward(self, **inputs: Any) -> Any:
            output = super().forward(**inputs)
            output.logits = output.logits.detach()
            return output

    class OtherHead(transformers.LlamaForCausalLM):
        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.lm_head = type("Scaled", (nn.Linear,), {})(config.hidden_size, config.vocab_size, bias=False)

    config = tiny("llama")
    kinds = (Sliced, Detached, OtherHead)
    sliced, detached, other_head = [str(obstacle_to_fuse(on_meta(kind, config))) for kind in kinds]
    assert "cannot continue with a loss in place of logits (IndexError" in sliced
    assert "the model changes what its LM head returns" in detached
    assert other_head == "its LM head is not torch's nn.Linear, but Scaled"


def test_a_model_whose_values_decide_is_seen_as_it_computes() -> None:
    """Without them nothing is known; a single forward pass that differs is enough to end the training."""

    class Sometimes(transformers.LlamaForCausalLM):
        def forward(self, **inputs: Any) -> Any:
            output = super().forward(**inputs)
            if inputs["input_ids"].sum().item() % 2:
                output.logits = output.logits * 1.0
            return output

    assert obstacle_to_fuse(on_meta(Sometimes, tiny("llama"))) is None
    model = Sometimes(tiny("llama"))
    fuse(model)
    for odd in (False, True):
        batch = make_batch(torch.tensor([[1, 2, 3, 4 + odd]]), eos_token_id=0, document_mask=False)
        refused = pytest.raises(StageError, match="the model changes what its LM head returns")
        with refused if odd else contextlib.nullcontext():
            assert loss_sum(model, batch) > 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_config_has_no_states_of_all_layers_kept(name: str) -> None:
    """They would be in memory until the loss is there."""
    model = make_model(tiny(name, output_hidden_states=True, output_attentions=True, attn_implementation="eager"))
    batch = make_batch(torch.randint(1, 64, (2, 16)), eos_token_id=0, document_mask=False)
    kept: list[Any] = []
    model.register_forward_hook(lambda module, args, output: kept.extend([output.hidden_states, output.attentions]))
    loss_sum(model, batch)
    assert kept == [None, None]


class Sizes(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.largest[tensor.dtype] = max(self.largest.get(tensor.dtype, 0), tensor.numel())
        return result


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_tensor_is_as_large_as_the_logits_of_all_tokens(
    params: TrainParams, mesh: DeviceMesh, tmp_path: Path, precision: Any
) -> None:
    config = transformers.LlamaConfig(
        vocab_size=50_000, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    manifest = manifest_of(write_model(tmp_path, config, dtype=None), with_weights=False)
    batch = make_batch(torch.randint(1, 50_000, (2, 128)), eos_token_id=0, document_mask=True)
    all_logits = 2 * 128 * 50_000
    found = {}
    for loss in ("fused", "plain"):
        changed = dataclasses.replace(params, loss=loss, precision=precision)
        model = sharded_model.build(manifest, changed, mesh, initialize=True).train()
        with Sizes() as training:
            loss_sum(model, batch).backward()
        with Sizes() as validation, torch.no_grad():
            list(losses(model.eval(), [batch]))
        found[loss] = training.largest, validation.largest
    for largest in found["fused"]:
        assert max(largest.values()) <= all_logits / 2
    for largest in found["plain"]:
        if precision == "fp32":
            assert largest[torch.float32] == all_logits  # what the model returns
        else:
            assert largest[torch.bfloat16] == all_logits
            assert largest[torch.float32] <= all_logits / 2
