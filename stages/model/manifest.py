"""The model manifest, `data/model.json`: which model a run starts from, file by file.

It has no clock times and no paths of this machine, so that the same model gives the same manifest everywhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from stages.base.errors import StageError
from stages.base.files import FileEntry, FileName, RelativePath, SealedJsonFile, check_files
from stages.model import hub_cache
from stages.model.adapters import LinearKind
from stages.model.files import CONFIG

MODEL_MANIFEST = Path("data/model.json")
TOKENIZER = Path("data/tokenizer.json")
"""The tokenizer that `AutoTokenizer` has loaded, as the library tokenizers writes it."""
REMEDY = "put it back, or run `dvc repro -f -s download`"
"""About a file that is not the one that was downloaded."""
_ROUTER_LOSS_OFF = (
    "the router loss, which balances how many tokens each expert gets: output_router_logits is false in the "
    "config.json of the model. To train with it, set that to true in a copy of the model"
)


@dataclass(frozen=True)
class ModelManifest(SealedJsonFile):
    """What the stages after `download` need to know about the model."""

    STAGE: ClassVar[str] = "download"
    PATH: ClassVar[Path] = MODEL_MANIFEST

    model_name: str
    """A Hub id or a local directory, as given in params.yaml."""
    model_revision: str
    """As given in params.yaml; a local directory has none, and ignores it."""
    commit: FileName | None
    """The commit that the revision of a Hub id resolved to; null for a local directory."""
    architecture: str
    """The class in transformers, such as `LlamaForCausalLM`."""
    model_type: str
    """The family's name in transformers, such as `llama`."""
    dtype: str
    """PyTorch's name of the dtype that most bytes of the weights have; that of the config where there are none."""
    num_parameters: int
    """Tied weights are counted once."""
    files: dict[RelativePath, FileEntry]
    """Every file that the model needs."""
    weights: list[FileName]
    """The safetensors files among them; empty: the run starts from random weights."""
    tied_weights: dict[str, str]
    """Each name of a parameter that has several -> the one under which it is trained and stored."""
    layer_classes: list[str]
    """Classes of the decoder's layers, which FSDP wraps."""
    module_classes: list[str]
    """Classes of all modules with parameters, which FSDP can wrap instead."""
    router_loss_coef: float | None
    """Factor of the router loss of a mixture of experts in the training loss, 0 where its config turns that loss off;
    null: the model has none."""
    vocab_size: int
    """Rows of the embedding."""
    max_seq_length: int | None
    """Tokens; null where the model has no limit."""
    eos_token_id: int
    """Ends each document."""
    start_token_ids: list[int]
    """Begin each document, such as BOS: what the tokenizer puts before a text."""
    tokenizer: FileEntry
    """Of `TOKENIZER`."""
    special_tokens: dict[str, str] = field(default_factory=dict)
    """By their names in chat templates, such as `bos_token`."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """By name; `default` is the one for conversations, `tool_use` for those with tools, if it is there."""
    linears: dict[str, LinearKind] = field(default_factory=dict)
    """The linear modules in the layers, by their names without numbers, and whether they can have adapters."""

    def directory(self) -> Path:
        """The directory of the model's files on this machine; no socket is opened.

        Raises:
            StageError: it no longer exists.
        """
        if self.commit is None:  # a local directory
            if not Path(self.model_name).is_dir():
                raise StageError(f"model_name: the directory {self.model_name!r} is gone; put it back")
            return Path(self.model_name)
        # By commit, not by revision: the branch may have moved.
        snapshot = hub_cache.snapshot(self.model_name, self.commit)
        if not (snapshot / CONFIG).is_file():
            cache = hub_cache.repository(self.model_name).parent
            raise StageError(
                f"{self.model_name} at commit {self.commit} is not in the model cache ({cache}): "
                "set HF_HOME to the directory that holds it, or run `dvc repro -f -s download`"
            )
        return snapshot

    def attention_heads(self) -> list[int]:
        """How many attention heads its layers have: each number once; none where its config names none."""
        from transformers import AutoConfig  # imports torch

        text = AutoConfig.from_pretrained(self.directory(), local_files_only=True).get_text_config()
        if text.is_heterogeneous:  # what differs between its layers is written for each of them
            found = {values.get("num_attention_heads") for values in text.to_dict()["per_layer_config"].values()}
        else:
            found = {getattr(text, "num_attention_heads", None)}
        return sorted(filter(None, found))

    def router_warning(self, lora_r: int | None) -> str | None:
        """For people, where the routers of a mixture of experts have no loss of their own; None: there is no reason."""
        if self.router_loss_coef != 0:
            return None
        if lora_r is not None:
            routers = "routers without an adapter keep their weights"
            return f"note: {routers}, and adapters are trained without {_ROUTER_LOSS_OFF}"
        return f"warning: the experts of this model are trained without {_ROUTER_LOSS_OFF}"

    def verify(self, names: Iterable[str] | None = None, contents: bool = True) -> Path:
        """Compare the model's files with the size and SHA-256 that this manifest lists.

        Args:
            names: Only these.
            contents: Whether to hash the files too, or only to compare their sizes.

        Returns:
            The directory of the files.

        Raises:
            DamagedFile: naming the file that is missing or was changed.
        """
        directory = self.directory()
        chosen = self.files if names is None else names  # callers that need one file do not wait for the weights
        check_files({directory / name: self.files[name] for name in chosen}, REMEDY, contents)
        return directory

    def verify_tokenizer(self) -> Path:
        """The file of the tokenizer, after it was compared with this manifest.

        Raises:
            DamagedFile: it is missing or was changed.
        """
        check_files({TOKENIZER: self.tokenizer}, "run `dvc repro -f -s download`")
        return TOKENIZER
