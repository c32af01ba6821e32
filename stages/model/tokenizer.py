"""The model's tokenizer as `AutoTokenizer` loads it: what everybody who uses the model encodes with.

tokenizer.json alone need not be it. The class that tokenizer_config.json or the model's type names may divide words in
its own way, and added tokens may be in tokenizer_config.json alone.
"""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from stages.base.errors import StageError, explained
from stages.base.files import FileEntry
from stages.base.names import is_file_name
from stages.model.files import TOKENIZER
from stages.model.manifest import ModelManifest

TEXTS = (
    "The 1 12 123 1234 12345 123456 1234567 12345678901234567890 3.14, 1,000,000 and x2 y33z.",
    "I'm, you're, he'd, we'll, they've, it's, don't; I'M, YOU'RE, HE'D, WE'LL, THEY'VE, IT'S, DON'T 'tis 's",
    "a  b   c    d\n\n\ne\r\n\r\nf \n g\t\th \n\n i   \n", "   \n", " \t\n\x0b\x0c\r", "camelCase HTTPServer aB Ab ABc",
    "/usr/bin/\n// ...!?\n#$%&()*+,-./:;<=>@[\\]^_`{|}~\n\n}{\n",
    "\u00e9\u00e8 e\u0301 \u6771\u4eac \ud55c \u05d0\u05b0 \u0661\u0662\u0663 \u00b2\u2163 \U0001f600\U0001f469\u200d",
)  # fmt: skip
"""What patterns divide in many ways."""
_BEGINNINGS = (" a", "  a", "   a", "\na", "\n\n a")
_AROUND = ("{}", " {} a", "a{}b")
"""An added token alone and among others."""
_ANY = (1 << 32) - 1
"""The id of no token: it stands for those of a text."""


class ModelTokenizer(NamedTuple):
    """What `AutoTokenizer` makes of a model directory."""

    name: str
    """Of its class."""
    content: str
    """Of a tokenizer.json that encodes as it does."""
    special_tokens: dict[str, str]
    """By their names in templates, such as `bos_token`."""
    chat_templates: dict[str, str]
    """By name: `default`, `tool_use`, ..."""
    eos_token_id: int | None

    def fields(self) -> dict[str, Any]:
        """Those of the model manifest."""
        return {
            "tokenizer": FileEntry.of_text(self.content),
            "special_tokens": self.special_tokens,
            "chat_templates": self.chat_templates,
        }


def load(directory: Path) -> ModelTokenizer:
    """Load the tokenizer of a model directory, without code of its authors.

    Raises:
        StageError: transformers cannot load it, or it is none of the library tokenizers.
    """
    # It imports torch, which takes seconds.
    from transformers import AutoTokenizer

    with explained(lambda problem: StageError(f"{directory}: the tokenizer cannot be loaded: {problem}")):
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    name = type(tokenizer).__name__
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise StageError(
            f"{directory}: transformers loads its tokenizer as {name}, which is none of the library tokenizers, so "
            "pack cannot encode with it: name another tokenizer_class in the tokenizer_config.json of a copy"
        )
    templates = tokenizer.chat_template or {}
    templates = templates if isinstance(templates, dict) else {"default": templates}
    for key, template in templates.items():
        if not is_file_name(key):
            raise StageError(f"{directory}: {key!r} is no name for a chat template: correct it in a copy")
        if not isinstance(template, str):
            raise StageError(
                f"{directory}: the chat template {key} is a {type(template).__name__}, not text: correct it in a copy"
            )
    content, names = backend.to_str(), tokenizer.special_tokens_map
    return ModelTokenizer(name, content, names, templates, tokenizer.eos_token_id)


def find_start(tokenizer: Tokenizer, eos_token_id: int | None) -> list[int]:
    """The ids that a tokenizer puts before each text, such as BOS, without those that it puts after it.

    Never EOS, which some models also have as BOS: in rows it ends documents. Turns truncation and padding off.
    """
    if tokenizer.post_processor is None:
        return []
    tokenizer.no_truncation()
    tokenizer.no_padding()
    text = tokenizer.encode([], is_pretokenized=True, add_special_tokens=False)
    text.pad(1, pad_id=_ANY)
    ids = tokenizer.post_processor.process(text).ids
    return [*takewhile(lambda token: token not in (_ANY, eos_token_id), ids)]


def text_tokens(path: Path) -> set[int]:
    """The ids of a tokenizer.json that are pieces of text, and no added tokens, such as EOS."""
    tokenizer = Tokenizer.from_file(str(path))
    return {*tokenizer.get_vocab().values()} - tokenizer.get_added_tokens_decoder().keys()


def compared_with_file(tokenizer: ModelTokenizer, directory: Path) -> str | None:
    """A sentence for people where a model's tokenizer.json alone gives other tokens; None: it gives the same."""
    with explained(lambda problem: StageError(f"{directory / TOKENIZER} is no tokenizer: {problem}")):
        file = Tokenizer.from_file(str(directory / TOKENIZER))
    text = difference(Tokenizer.from_str(tokenizer.content), file)
    if text is None:
        return None
    return (
        f"pack encodes as AutoTokenizer ({tokenizer.name}) does; {TOKENIZER} alone gives other tokens, as for "
        f"{text!r}: do not use the trained model with programs that read only that file"
    )


def check_exported(directory: Path, model: ModelManifest) -> None:
    """Check that the tokenizer of an exported model encodes as that of the training did.

    Raises:
        StageError: it gives other tokens.
    """
    content = load(directory).content
    if FileEntry.of_text(content) == model.tokenizer:
        return
    # Another version of transformers may write the same tokenizer in another way.
    trained = Tokenizer.from_file(str(model.verify_tokenizer()))
    if (text := difference(trained, Tokenizer.from_str(content))) is not None:
        raise StageError(
            f"the exported model would encode {text!r} with other tokens than it was trained on, as transformers now "
            f"loads the tokenizer of {model.model_name} in another way: install the version that `download` ran with, "
            "or run `dvc repro -f -s download` and train again"
        )


def difference(one: Tokenizer, other: Tokenizer) -> str | None:
    """The first of some texts, and of texts with added tokens, for which two tokenizers give other tokens."""
    added = {
        token.content: None
        for tokenizer in (one, other)
        for _, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    texts = [*TEXTS, *_BEGINNINGS, *(around.format(token) for token in added for around in _AROUND)]
    encoded = zip(texts, _encode(one, texts), _encode(other, texts), strict=True)
    return next((text for text, ids, others in encoded if ids != others), None)


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int] | str]:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    found: list[list[int] | str] = []
    for text in texts:
        try:
            found.append(tokenizer.encode(text).ids)
        except Exception as error:  # the only class that `tokenizers` raises: a word that it cannot express
            found.append(str(error))
    return found
