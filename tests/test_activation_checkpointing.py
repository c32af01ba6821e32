"""Which activations stay in memory, and that the gradients do not depend on it."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from stages.base.errors import StageError
from stages.building.activation_checkpointing import checkpoint_activations
from stages.forward.attention import activate_kernels
from stages.forward.batch import make_batch
from stages.forward.loss import loss_sum
from stages.model import meta
from tests.models import CONFIGS, MIXTRAL, CountedGraphs

KINDS = ("none", "selective_op", "full")
CONFIG = transformers.LlamaConfig(
    vocab_size=101, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


class Meter(TorchDispatchMode):
    """Counts what is really computed, and the bytes of it that are still in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.products = self.attentions = 0
        self._storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.attentions += func.name() in (
            "aten::_scaled_dot_product_flash_attention_for_cpu", "stages::document_attention"
        )  # fmt: skip
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._storages[StorageWeakRef(storage)] = storage.nbytes()
        return results

    def bytes(self) -> int:
        return sum(size for storage, size in self._storages.items() if not storage.expired())


def build(config: transformers.PreTrainedConfig, kind: str, attention: str = "sdpa") -> PreTrainedModel:
    if attention == "varlen":
        activate_kernels()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    names = [name for name, _ in model.named_parameters()]
    layers = [module for module in model.modules() if type(module).__name__ in meta.layer_classes(model)]
    checkpoint_activations(model, layers, kind)
    assert [name for name, _ in model.named_parameters()] == names
    return model.train()


def loss(model: PreTrainedModel) -> Tensor:
    rows = torch.randint(1, 101, (2, 32), generator=torch.Generator().manual_seed(1))
    rows[:, 11] = 0
    torch.manual_seed(2)  # of dropout
    lengths = model.config._attn_implementation == "varlen"
    return loss_sum(model, make_batch(rows, eos_token_id=0, document_mask=True, lengths=lengths))


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    loss(model).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize(
    "config",
    [
        CONFIGS["llama"],
        transformers.GPT2Config(**{**CONFIGS["gpt2"].to_dict(), "resid_pdrop": 0.1, "attn_pdrop": 0.1}),
        CONFIGS["gemma3"],
        MIXTRAL,
    ],
    ids=["llama", "gpt2 with dropout", "gemma3", "mixtral"],
)
def test_what_is_computed_again_gives_the_same_gradients(config: transformers.PreTrainedConfig) -> None:
    expected = gradients(build(config, "none"))
    for kind in KINDS[1:]:
        found = gradients(build(config, kind))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items()), kind


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch looks at it
def test_dropout_is_the_same_when_a_compiled_layer_is_computed_again() -> None:
    config = transformers.GPT2Config(**{**CONFIGS["gpt2"].to_dict(), "resid_pdrop": 0.1, "attn_pdrop": 0.1})
    found, graphs = [], []
    for kind in ("none", "selective_op"):
        model, backend = build(config, kind), CountedGraphs()
        for layer in model.transformer.h:
            layer.compile(fullgraph=True, backend=backend)
        found.append(gradients(model))
        graphs.append(backend)
    assert [counted.backward["aten.native_dropout.default"] for counted in graphs] == [0, 3]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_selective_op_is_between_none_and_full_in_memory_and_in_work(attention: str) -> None:
    kept, products, attentions = {}, {}, {}
    for kind in KINDS:
        model = build(CONFIG, kind, attention)
        with Meter() as meter:
            result = loss(model)
            kept[kind] = meter.bytes()
            result.backward()
        products[kind], attentions[kind] = meter.products, meter.attentions
    assert kept["full"] < 0.8 * kept["selective_op"] < 0.8 * 0.8 * kept["none"], kept
    # Of the seven products of a layer, the second, fourth and sixth are computed again.
    assert products["selective_op"] == products["none"] + 3 * 4
    assert products["full"] > products["selective_op"]
    assert attentions["selective_op"] == attentions["none"] == attentions["full"] - 4


def test_an_architecture_without_support_is_an_error_that_names_the_choices() -> None:
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"], dtype=torch.float32)
    model.supports_gradient_checkpointing = False
    with pytest.raises(StageError, match=r"selective_op: LlamaForCausalLM does not support it, use none"):
        checkpoint_activations(model, [], "selective_op")
