"""Weight decay is for matrices, whatever the number of dims of a norm or a bias is."""

import dataclasses

import pytest
import torch
from transformers import AutoConfig

from stages.forward.small_copy import random_model, small_config
from stages.training.optimizer import make_optimizer
from stages.training.params import TrainParams
from tests.architectures import PUBLISHED

DECAYED = {
    "cohere": {"self_attn.q_proj.weight", "mlp.up_proj.weight"},
    "falcon_mamba": {"mixer.in_proj.weight", "mixer.conv1d.weight", "mixer.dt_proj.weight"},
    "gpt2": {"attn.c_attn.weight", "mlp.c_fc.weight"},
    "gpt_oss": {"mlp.experts.gate_up_proj", "mlp.router.weight"},
    "jamba": {"mamba.x_proj.weight"},
    "kimi_linear": {"self_attn.b_proj.weight", "mlp.down_proj.weight"},
    "llama": {"self_attn.q_proj.weight", "embed_tokens.weight", "lm_head.weight"},
    "mamba": {"mixer.x_proj.weight"},
    "recurrent_gemma": {"rg_lru.input_gate_weight"},
    "rwkv": {"attention.key.weight"},
}
"""By architecture, some of those that decay. Norms and biases with two dims or more are in all but Llama and GPT-2."""
NOT_DECAYED = (
    "norm.weight",
    "layernorm.weight",
    "ln_1.weight",
    "bias",
    "A_log",
    ".D",
    "time_mix_key",
    "time_decay",
    "sinks",
)


@pytest.mark.parametrize("name", DECAYED)
def test_a_step_without_gradients_decays_matrices_alone(name: str, params: TrainParams) -> None:
    options = {"use_qk_norm": True} if name == "cohere" else PUBLISHED.get(name, {})
    small = small_config(AutoConfig.for_model(name, **options))
    assert small is not None
    model = random_model(small, None, torch.float32, "cpu")
    before = {name: param.clone() for name, param in model.named_parameters()}
    optimizer = make_optimizer(model, dataclasses.replace(params, lr=0.1, weight_decay=0.5))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    changed = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert all(any(found.endswith(each) for found in changed) for each in DECAYED[name]), changed
    assert not [found for found in changed if found.endswith(NOT_DECAYED)]
    assert any(param.dim() >= 2 for found, param in model.named_parameters() if found not in changed) or name in (
        "llama", "gpt2",
    )  # fmt: skip
