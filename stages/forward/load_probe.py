"""Whether `from_pretrained` gives the weights that are stored: a model that was trained must load as it was."""

import tempfile
from contextlib import suppress

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import logging

from stages.forward.small_copy import random_model


def changed_by_loading(small: PreTrainedConfig, config: PreTrainedConfig) -> list[str]:
    """The names of weights that transformers overwrites as it loads them, in a small random copy of a model.

    As Youtu does with the row of the padding token in the embedding, which it shares with the output. Nothing also
    where the small copy cannot be tested. Seeds the random number generator of torch.

    Args:
        small: What `small_config` returned; it loses a padding token that `config` has not.
        config: That of the model.
    """
    if getattr(config.get_text_config(), "pad_token_id", None) is None:
        small.pad_token_id = small.get_text_config().pad_token_id = None
    logging.disable_progress_bar()  # it would be printed without a terminal too
    with suppress(Exception), tempfile.TemporaryDirectory() as copy:  # of any architecture, which need not be storable
        model = random_model(small, "eager", torch.float32, "cpu")
        model.save_pretrained(copy)
        loaded = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32, local_files_only=True).state_dict()
        return [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, loaded[name])]
    return []
