"""What the exported model says of itself, beside its weights: config, chat templates, and what ends a text."""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.base import publish
from stages.base.packed import PackMetrics
from stages.model.files import (
    CHAT_TEMPLATE,
    CONFIG,
    GENERATION_CONFIG,
    MORE_TEMPLATES,
    OLD_CHAT_TEMPLATE,
    TOKENIZER_CONFIG,
)

if TYPE_CHECKING:
    from collections.abc import Container

    from transformers import PreTrainedModel

_OUTDATED_CONFIG_KEYS = {"torch_dtype", "_name_or_path"}
"""An older name of `dtype`, and where somebody's copy of the initial model was."""
_MTP_KEY = re.compile(r"nextn_predict_layers$|mtp.*(layers|modules)$")
"""Numbers of layers for multi-token prediction, as configs name them: `num_nextn_predict_layers`, `num_mtp_modules`."""
_MTP_WEIGHT = re.compile(r"(^|\.)mtp|nextn")


def write_config(path: Path, architecture: str, dtype: str, reference: "PreTrainedModel") -> None:
    """Keep the initial model's config, but name the class and the dtype of these weights, and no layers of MTP."""
    config = _in_dtype(publish.read_json(path), dtype)
    if not any(_MTP_WEIGHT.search(name) for name in reference.state_dict()):  # transformers drops them
        # A number that is not stated is that of the class.
        text = reference.config.get_text_config()
        place = config if text is reference.config else config.get("text_config", config)
        if not any(_is_mtp(key, value) for key, value in place.items()):
            place |= {key: value for key, value in text.to_dict().items() if _is_mtp(key, value)}
        config = without_mtp(config)
    publish.write_json(path, {**config, "architectures": [architecture], "dtype": dtype})


def _in_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A config, and those in it, with this dtype where it names one: some programs read that of `text_config`."""
    kept = {key: value for key, value in config.items() if key not in _OUTDATED_CONFIG_KEYS}
    found = {key: _in_dtype(value, dtype) if isinstance(value, dict) else value for key, value in kept.items()}
    return found | ({"dtype": dtype} if {"dtype", "torch_dtype"} & {*config} else {})


def without_mtp(config: dict[str, Any]) -> dict[str, Any]:
    """A config whose layers for multi-token prediction are 0: a server would make those that have no weights.

    Lists of all layers lose the values of these.
    """
    num_layers = config.get("num_hidden_layers", 0)
    dropped = {key: value for key, value in config.items() if _is_mtp(key, value)}
    lengths = {num_layers + number for number in dropped.values()} if num_layers else set()
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            found[key] = without_mtp(value)
        elif isinstance(value, list) and len(value) in lengths:
            found[key] = value[:num_layers]
        else:
            found[key] = 0 if key in dropped else value
    return found


def _is_mtp(key: str, value: Any) -> bool:
    return bool(_MTP_KEY.search(key)) and type(value) is int and value > 0


def add_chat_template(directory: Path, packed: PackMetrics) -> list[int]:
    """Write the chat templates that conversations were rendered with; returns the tokens that ended turns in them."""
    if not packed.chat_templates or packed.train.conversations is None:
        return []
    shutil.rmtree(directory / MORE_TEMPLATES, ignore_errors=True)
    for name, template in packed.chat_templates.items():
        file = CHAT_TEMPLATE if name == "default" else f"{MORE_TEMPLATES}/{name}.jinja"
        publish.write_text(directory / file, template)
    # It alone: other programs look for one in the tokenizer's config first.
    path = directory / TOKENIZER_CONFIG
    if path.is_file() and "chat_template" in (config := publish.read_json(path)):
        del config["chat_template"]
        publish.write_json(path, config)
    (directory / OLD_CHAT_TEMPLATE).unlink(missing_ok=True)
    return packed.train.conversations.terminators


def add_ends(directory: Path, reference: "PreTrainedModel", tokens: list[int], text_tokens: "Container[int]") -> None:
    """Have generated text end at the tokens that ended documents and turns, too, which need not be the config's.

    Of the config's, none that is text: the default of a class, such as 2 of Llama, is a quote in other tokenizers.
    """
    from transformers import GenerationConfig

    path = directory / GENERATION_CONFIG
    config = publish.read_json(path if path.is_file() else directory / CONFIG)
    stated = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    if not path.is_file():  # that of the class, whose own EOS may be any token of this tokenizer
        GenerationConfig.from_model_config(reference.config).save_pretrained(directory)
    known = stated if isinstance(stated, list) else [] if stated is None else [stated]
    ends = [*dict.fromkeys([*(token for token in known if token not in text_tokens), *tokens])]
    stored = ends if len(ends) > 1 else ends[0]
    config = publish.read_json(path)
    if config.get("eos_token_id") not in (ends, stored):
        publish.write_json(path, {**config, "eos_token_id": stored})
