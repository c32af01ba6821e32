"""What encodes the documents and the conversations of a model: checked before the first token."""

from contextlib import suppress
from pathlib import Path

from stages.base import process
from stages.base.errors import StageError, explained, one_line
from stages.model.manifest import ModelManifest
from stages.tokenizing import chat_template, fast_tokenizer, vocabulary
from stages.tokenizing.encoding import ChatSpec, TokenizerSpec, TrainOn

TEMPLATES = Path("models/templates")
"""Chat templates, which DVC watches for `pack`."""

_MEND_TEMPLATE = "correct it, or set chat_template to the file of another one"


def find_tokenizer_spec(model: ModelManifest, seq_length: int, is_fast: bool) -> TokenizerSpec:
    """The model's tokenizer, checked against its manifest; `is_fast`: `fast_encoder` of params.yaml.

    Raises:
        StageError: it is missing or was changed, or the model does not allow such long rows.
    """
    if model.max_seq_length is not None and seq_length > model.max_seq_length:
        raise StageError(
            f"seq_length is {seq_length}, {model.model_name} allows at most {model.max_seq_length}: lower it"
        )
    if is_fast:
        fast_tokenizer.check_installed()
    path = model.verify_tokenizer()
    with explained(lambda problem: StageError(f"{path} is no tokenizer: {problem}")):
        token_ids, unk_token_id, special_tokens = vocabulary.read(path, model.special_tokens, model.eos_token_id)
    if model.eos_token_id not in token_ids:
        raise StageError(f"{path} has no token {model.eos_token_id}, which {model.model_name} gives as its EOS token")
    return TokenizerSpec(
        path=path.resolve(),
        sha256=model.tokenizer.sha256,
        eos_token_id=model.eos_token_id,
        unk_token_id=unk_token_id,
        special_tokens=tuple(sorted(special_tokens)),
        vocab_size=model.vocab_size,
        is_fast=is_fast,
        start_token_ids=tuple(model.start_token_ids),
    )


def find_chat_spec(model: ModelManifest, file: str | None, train_on: TrainOn, seq_length: int) -> ChatSpec:
    """How conversations become tokens: by the chat template in `file`, else by those of the model.

    Raises:
        StageError: the file is not there, or is none that DVC watches; or the template is no text, or none of Jinja.
    """
    # This is the order in data/pack.json.
    templates = sorted(_find_templates(model, file).items(), key=lambda item: item[0] != "default")
    for name, template in templates:
        of_model = f"the chat template{f' {name}' * (name != 'default')} of {model.model_name}"
        _check_syntax(template, file or of_model)
    return ChatSpec(tuple(templates), tuple(model.special_tokens.items()), train_on, seq_length)


def _check_syntax(template: str, name: str) -> None:
    """Refuse a template in which Jinja finds an error before it has a conversation."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        with suppress(MemoryError, TimeoutError), process.limited(chat_template.SECONDS, chat_template.BYTES):
            render_jinja_template([], chat_template=template)
    except jinja2.TemplateSyntaxError as error:
        raise StageError(f"{name}, line {error.lineno}: {one_line(error.message)}: {_MEND_TEMPLATE}") from None


def _find_templates(model: ModelManifest, file: str | None) -> dict[str, str]:
    """The chat templates by name."""
    if file is None:
        return model.chat_templates
    path = Path(file)
    if not path.resolve().is_relative_to(TEMPLATES.resolve()) or not path.is_file():
        raise StageError(
            f"chat_template is {file!r}: name a file in {TEMPLATES}/, which DVC watches; null: "
            "the template of the model"
        )
    with explained(lambda problem: StageError(f"the chat template cannot be read ({problem}): {_MEND_TEMPLATE}")):
        return {"default": path.read_text(encoding="utf-8")}
