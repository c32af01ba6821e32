"""Whether `from_pretrained` gives the weights that are stored: a model that was trained must load as it was."""

import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from stages.forward.small_copy import random_model, small_config


def changed_by_loading(directory: Path) -> list[str]:
    """The names of weights that transformers overwrites as it loads them, in a small random copy of a model.

    As Youtu does with the row of the padding token in the embedding, which it shares with the output. Nothing also
    where no small copy can be tested. Seeds the random number generator of torch.
    """
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    small = small_config(config)
    if small is None:
        return []
    if getattr(config.get_text_config(), "pad_token_id", None) is None:
        small.pad_token_id = small.get_text_config().pad_token_id = None
    logging.disable_progress_bar()  # it would be printed without a terminal too
    with suppress(Exception), tempfile.TemporaryDirectory() as copy:  # of any architecture, which need not be storable
        model = random_model(small, "eager", torch.float32, "cpu")
        model.save_pretrained(copy)
        loaded = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32, local_files_only=True).state_dict()
        return [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, loaded[name])]
    return []
