"""Whether the output embedding of a model can compute the loss itself, tested before the model is trained.

`fuse` is right as long as a model returns what its output embedding does. So a tiny random model of the architecture is
tested: its loss and its gradients must be those of its logits.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages.model.manifest import ModelManifest
from stages.tokens.batch import make_batch
from stages.tokens.document_mask import tiny_config
from stages.tokens.loss import LossChoice, choose, obstacle_to_fuse
from stages.training.distributed import device_type
from stages.training.params import TrainParams
from stages.training.precision import compute_dtype


def choose_loss(manifest: ModelManifest, params: TrainParams) -> LossChoice:
    """Decide how the loss is computed. Seeds the random number generator of torch.

    Raises:
        StageError: `loss` is fused, which the model does not allow.
    """
    return choose(params.loss, manifest.architecture, lambda: _obstacle(manifest, params))


def _obstacle(manifest: ModelManifest, params: TrainParams) -> str | None:
    """What `obstacle_to_fuse` returns for a tiny copy of the model."""
    try:
        config = tiny_config(AutoConfig.from_pretrained(manifest.directory(), local_files_only=True))
        # In fp32 differences are not rounding; and with the device and the dtype of the training, its kernels.
        for device, dtype in dict.fromkeys([("cpu", torch.float32), (device_type(), compute_dtype(params.precision))]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False).to(device, dtype).eval()
            rows = torch.randint(1, config.get_text_config().vocab_size, (2, 16), device=device)  # (B, T)
            if reason := obstacle_to_fuse(model, make_batch(rows, eos_token_id=0, document_mask=False)):
                return reason
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return f"a small copy of it cannot be tested ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    return None
