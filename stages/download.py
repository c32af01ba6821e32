"""Find the model, check it, and write its manifest. The weights stay where they are.

Reads    a local directory, or HF_HOME; without HF_HUB_OFFLINE=1 it fetches what HF_HOME lacks from the Hub
Writes   data/model.json: commit, size and SHA-256 of each file, and what later stages need to know of the model
         data/tokenizer.json, data/license.json: the tokenizer of `pack`; what the model card says of the license
Example  dvc exp run -S model_name=HuggingFaceTB/SmolLM2-135M download
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from tokenizers import Tokenizer
from tqdm import tqdm

from stages.base import command, process, publish
from stages.base.errors import StageError, explained, is_out_of_memory
from stages.base.files import FileEntry, RelativePath
from stages.base.names import printable
from stages.base.params_file import load_params
from stages.base.summary import counted, table
from stages.model import headers, hub, hub_cache, tokenizer
from stages.model.files import CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG
from stages.model.license import LICENSE, ModelLicense, is_license_file
from stages.model.manifest import MODEL_MANIFEST, ModelManifest
from stages.model.manifest import TOKENIZER as TOKENIZER_FILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SECONDS, _BYTES = 120, 4 << 30
"""For building a model without weights; the largest ones take some seconds and 1 GiB."""
_OTHER_TOKENIZERS = ("*.model", "*.tiktoken", "vocab*", "merges.txt")
"""Files from which transformers makes tokenizer.json."""


@dataclass(frozen=True)
class DownloadParams:
    """The leaves of `params.yaml` that decide which model a run starts from."""

    model_name: Annotated[str, Field(min_length=1)]
    """Hub id such as `Qwen/Qwen3-0.6B`, or an existing directory."""
    model_revision: RelativePath
    """Branch, tag or commit of a Hub id. A directory has none."""
    initial_weights: Literal["auto", "pretrained", "random"]
    """Where the weights come from. auto: pretrained where the model has weights, else random. With random no weights
    are fetched."""


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    with publish.lock(MODEL_MANIFEST):
        model = describe(load_params(DownloadParams))
        terms = describe_license(model)
        loaded = tokenizer.load(model.directory())
        with publish.together(LICENSE, TOKENIZER_FILE, MODEL_MANIFEST):
            terms.write()
            publish.write_text(TOKENIZER_FILE, loaded.content)
            model.write()
    origin = "a local directory" if model.commit is None else f"commit {model.commit}"
    weights = f"{model.dtype} weights in {counted(len(model.weights), 'file')}" if model.weights else "random weights"
    name = printable(model.model_name)
    if warning := tokenizer.compared_with_file(loaded, model.directory()):
        print(f"warning: {warning}")
    if terms.problem and model.weights:  # random weights have none yet
        print(f"warning: the license of {name} is unknown: {terms.problem}")
    if model.commit is not None and hub_cache.listing(model.model_name, model.commit) is None:
        # Filled by an older tool, or copied without it. The Hub is not asked: the cache has all that must be there.
        print(
            "warning: the model cache has no list of the model's files, so one that it lacks can go unnoticed: "
            f"`hf download {model.model_name} --revision {model.commit}` with a current version adds it"
        )
    num_bytes = sum(entry.size for entry in model.files.values())
    print(
        table(
            (model.num_parameters, "parameters", f"{model.architecture}, {weights}"),
            (num_bytes, "bytes", f"{name}, {origin}"),
        )
    )


def describe(params: DownloadParams) -> ModelManifest:
    """Find the model that `params` names, check it and describe it.

    The headers of the weights suffice to compare names, shapes and dtypes with the model that config.json describes.
    With HF_HUB_OFFLINE=1, or a complete cache, no socket is opened. Files of the Hub must have the digests that it
    lists. A download that was interrupted continues.

    Raises:
        StageError: it is not found, cannot be loaded, or its weights do not fit its config.
    """
    resolved = hub.resolve(params.model_name, params.model_revision, want_weights=params.initial_weights != "random")
    # With auto the run would start from random weights.
    if params.initial_weights == "pretrained" and not resolved.weights:
        raise StageError(
            f"initial_weights is 'pretrained', but {params.model_name!r} has no safetensors files: "
            "add them, or set it to 'random' or 'auto'"
        )
    directory = resolved.directory
    _check_tokenizer(params.model_name, directory)

    # torch and transformers take seconds to import: not for --help
    from stages.forward.adapter_probe import describe_linears
    from stages.model import meta

    _check_generation_config(directory)
    model = build(directory)
    stored = headers.read(directory, resolved.weights)
    with meta.understood(directory):
        if stored:  # else the run starts from random weights
            dropped = meta.dropped(model, stored, meta.check_headers(model, stored))
            if dropped:
                names = ", ".join([tensor.key for tensor in dropped[:5]] + ["..."] * (len(dropped) > 5))
                number = sum(math.prod(each.shape) for each in dropped)
                print(
                    f"warning: {counted(len(dropped), 'tensor')} with {counted(number, 'value')} dropped, as "
                    f"{type(model).__name__} does not have them: they are neither trained nor exported "
                    f"({names})"
                )
            meta.check_tied(model, stored, directory)
        loaded = tokenizer.load(directory)
        config = model.config.get_text_config()  # a multimodal config has the decoder's values one level below
        eos_token_id = _first(loaded.eos_token_id, getattr(config, "eos_token_id", None))
        if eos_token_id is None:
            raise StageError(
                f"{params.model_name} has no EOS token, which must end each document: set eos_token in the "
                f"{TOKENIZER_CONFIG} of a copy, or eos_token_id in its {CONFIG}"
            )
        manifest = ModelManifest(
            model_name=params.model_name,
            model_revision=params.model_revision,
            commit=resolved.commit,
            dtype=meta.dtype_name(directory, stored),
            files=_hash(params.model_name, resolved.commit, directory, hub.model_files(resolved)),
            weights=resolved.weights,
            eos_token_id=eos_token_id,
            start_token_ids=tokenizer.find_start(Tokenizer.from_str(loaded.content), eos_token_id),
            linears=describe_linears(model, meta.layer_classes(model), directory),
            **meta.fields(model),
            **loaded.fields(),
        )
        _check_trainable(manifest, is_quantized=getattr(model.config, "quantization_config", None) is not None)
    _check_small_copy(manifest, directory)
    return manifest


def build(directory: Path, seconds: float = _SECONDS, num_bytes: int = _BYTES) -> "PreTrainedModel":
    """Build a model without weights, within limits: any key of its config may be the number of something.

    Raises:
        StageError: it cannot be built, or not within the limits.
    """
    from stages.model import meta

    try:
        with process.limited(seconds, num_bytes):
            return meta.build(directory)
    except TimeoutError:
        limit = f"{seconds:g} s"
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        limit = f"{command.format_gib(num_bytes)} of memory"
    raise StageError(
        f"{directory / CONFIG}: without its weights, the model needs more than {limit}: correct it in a copy"
    )


def _check_trainable(model: ModelManifest, is_quantized: bool) -> None:
    """Refuse what `pack` or `train` could not use.

    Raises:
        StageError: the weights are quantized, the embedding has no row for EOS, or the length of a text is none.
    """
    if is_quantized:
        raise StageError(f"{CONFIG}: the weights are quantized (quantization_config), which cannot be trained")
    if not 0 <= model.eos_token_id < model.vocab_size:
        raise StageError(
            f"{model.model_name}: the EOS token has the id {model.eos_token_id}, and there are {model.vocab_size} rows "
            f"of the embedding: correct eos_token_id or vocab_size in the {CONFIG} of a copy"
        )
    if model.max_seq_length is not None and model.max_seq_length < 2:
        raise StageError(f"{CONFIG}: max_position_embeddings is {model.max_seq_length}: correct it in a copy")


def _check_small_copy(model: ModelManifest, directory: Path) -> None:
    """Refuse what a small random copy of the model shows, if there can be one.

    Raises:
        StageError: its tokens see what follows, or it would not be loaded as it was trained.
    """
    from transformers import AutoConfig

    from stages.forward.attention_choice import sees_what_follows
    from stages.forward.load_probe import changed_by_loading
    from stages.forward.small_copy import small_config

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    small = small_config(config)
    if small is None:
        return
    if sees_what_follows(small):
        raise StageError(
            f"model_name is {model.model_name!r}: in {model.architecture}, with this {CONFIG}, a token sees those "
            "after it, as in an encoder: it would learn to copy the next one. Use a model that generates text"
        )
    if changed := changed_by_loading(small, config):
        raise StageError(
            f"model_name is {model.model_name!r}: as transformers loads {model.architecture}, it overwrites "
            f"{changed[0]}, so the trained model would not be the one that is loaded: set pad_token_id to null in the "
            f"{CONFIG} of a copy, or use another model"
        )


def describe_license(model: ModelManifest) -> ModelLicense:
    """Find what a model says about its license.

    Raises:
        StageError: a file is not what the Hub lists.
    """
    directory = model.directory()
    names = sorted(path.name for path in directory.iterdir() if is_license_file(path.name) and path.is_file())
    return ModelLicense.of(directory, _hash(model.model_name, model.commit, directory, names))


def _check_tokenizer(model_name: str, directory: Path) -> None:
    """Refuse a model without the tokenizer that `pack` reads."""
    if not (directory / TOKENIZER).is_file():
        problem = f"model_name is {model_name!r}: it has no {TOKENIZER}"
        if not any(path for pattern in _OTHER_TOKENIZERS for path in directory.glob(pattern)):
            raise StageError(
                f"{problem} and no other tokenizer: add {TOKENIZER} and {TOKENIZER_CONFIG}, for example those of the "
                "model that it was trained from, to a local copy, and set model_name to that directory"
            )
        raise StageError(
            f"{problem}. Convert its tokenizer in a local copy of the "
            "model (pip install sentencepiece tiktoken), and set model_name to that directory:",
            "  from transformers import AutoTokenizer",
            "  AutoTokenizer.from_pretrained('<copy>').save_pretrained('<copy>')",
        )


def _check_generation_config(directory: Path) -> None:
    """Refuse what `evaluate` could not read, which is after the training."""
    from transformers import GenerationConfig

    path = directory / GENERATION_CONFIG
    if path.is_file():
        with explained(lambda problem: StageError(f"{path} cannot be read: {problem}: correct it in a copy")):
            GenerationConfig.from_pretrained(directory, local_files_only=True)


def _first(token_id: int | None, configured: int | list[int] | None) -> int | None:
    """The tokenizer's id, else that of the config: of several the first."""
    if token_id is not None:
        return token_id
    return next(iter(configured), None) if isinstance(configured, list) else configured


def _hash(model_name: str, commit: str | None, directory: Path, names: list[str]) -> dict[str, FileEntry]:
    """Hash files of the model; those of the Hub must be what it lists."""
    sizes = {name: (directory / name).stat().st_size for name in names}
    entries = {}
    with tqdm(total=sum(sizes.values()), desc="sha256", unit="B", unit_scale=True, disable=None) as progress:
        for name, size in sizes.items():
            entries[name] = FileEntry.of(directory / name)
            if commit is not None:
                hub_cache.check(model_name, commit, name, entries[name].sha256)
            progress.update(size)
    return entries


if __name__ == "__main__":
    command.run(main)
