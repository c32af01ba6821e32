"""The packed tokens, data/tokens/: where they are, how many rows there are, how long each is, and what encoded them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NamedTuple

from stages.base.dataset import Dataset
from stages.base.files import JsonFile
from stages.base.origin import Origin
from stages.base.publish import sha256_json

TOKENS = Path("data/tokens")
TRAIN = TOKENS / "train"
VALIDATION = TOKENS / "validation"
METRICS = Path("data/pack.json")
# -f: DVC compares sizes and times first, and after a fault of the disk both may be the same. -s: this stage alone.
REMEDY = "run `dvc repro -f -s pack`"
"""About tokens that are damaged."""


@dataclass(frozen=True)
class PackedTokens:
    """One of the two datasets of rows, as its metadata describes it; no token is read."""

    digests: dict[Path, str]
    """The Arrow files, each with its SHA-256."""
    fingerprint: str
    """Digest of the content."""
    num_rows: int
    seq_length: int
    """Tokens per row."""
    sources: dict[str, int]
    """The rows of each source, in the order of the rows; none: they are of all files."""

    @classmethod
    def read(cls, directory: Path, contents: bool = False) -> "PackedTokens":
        """Read the metadata of `TRAIN` or `VALIDATION`; with `contents`, compare the files with it, too.

        Raises:
            StageError: it is missing or has been changed, or a file that it lists is.
        """
        dataset = Dataset.read(directory, "pack", contents)
        sources = {shard.source: shard.rows for shard in dataset.shards if shard.source}
        seq_length = dataset.features["input_ids"]["length"]
        return cls(dataset.files(directory), dataset.fingerprint, dataset.num_rows, seq_length, sources)


class RefusedConversation(NamedTuple):
    """A conversation that gives no tokens."""

    reason: str
    beginning: str
    """Of its JSON."""


@dataclass(frozen=True)
class ConversationMetrics:
    """Of the conversations for training, or of those for validation."""

    conversations: int
    """In the rows."""
    tokens: int
    """Of the conversations."""
    trained_tokens: int
    """Of these, those that the model is to learn."""
    padding_tokens: int
    """That fill up rows."""
    refused: dict[str, int]
    """Conversations that give no tokens, by reason."""
    first_refused: list[RefusedConversation]
    terminators: list[int]
    """Ids of the special tokens that end trained turns, and are nowhere within one, the most frequent first."""
    strings: dict[str, int] = field(default_factory=dict)
    """Of the conversations in the rows, by where they are: `system`, `assistant reasoning`, `tools`, ..."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Those of them that the chat template does not write, so that no token is theirs."""


@dataclass(frozen=True)
class RowsMetrics:
    """Of the documents for training, or of those for validation."""

    documents: int
    """Conversations included."""
    characters: int
    """Of the documents that are text."""
    bytes: int
    """Of that text in UTF-8."""
    tokens: int
    """Including those that begin and end each document, and those of the partial row that is dropped."""
    characters_per_token: float | None
    """BOS and EOS not counted; null: there is no text."""
    unknown_share: float | None
    """Of the tokens, BOS and EOS not counted, those that replace what the vocabulary cannot express; null: there is no
    text."""
    dropped_characters: int
    """That leave no token, not even the unknown one, or lose a part of their bytes."""
    rows: int
    duplicates: int = 0
    """Documents that are held out by their content, and equal to an earlier one."""
    conversations: ConversationMetrics | None = None
    """Null: the corpus has none, and the tokens of all documents are trained."""
    start_tokens: int = 0
    """Of the tokens, those that the tokenizer puts before a text, such as BOS."""

    @property
    def measured_bytes(self) -> int:
        """Bytes of the text that a loss is about; 0: not known, as of conversations."""
        return 0 if self.conversations else self.bytes

    def measured_tokens(self, document_mask: bool) -> int:
        """Tokens that a loss is about: with `document_mask`, the first one of a document follows from nothing.

        Without BOS that is a token of the text, which then counts as many nats as the others have on average.
        """
        return self.tokens - self.documents * (document_mask and self.start_tokens > 0)


@dataclass(frozen=True)
class EncoderMetrics:
    """What encoded."""

    name: str
    """The library and its version: the fast one, or the one that transformers requires, the model's own."""
    slow_characters: int
    """Encoded by the model's own, because the document has a character whose tokens differ."""
    reason: str | None
    """Why the fast one is not used; null: it is used, or `fast_encoder` is false."""


@dataclass(frozen=True)
class PackMetrics(JsonFile):
    """The content of `data/pack.json`."""

    STAGE: ClassVar[str] = "pack"

    train: RowsMetrics
    validation: RowsMetrics
    encoder: EncoderMetrics
    source: str
    """Fingerprint of the corpus."""
    fingerprint: str
    """Of the tokens, as `fingerprint` gives it."""
    origin: Origin
    train_shards: dict[str, float]
    """Shards of the corpus with documents to train on, each with the share of them that their content holds out."""
    chat_templates: dict[str, str] = field(default_factory=dict)
    """By name, those that the conversations were rendered with, and others of the model; none: there are none."""
    sources: dict[str, RowsMetrics] = field(default_factory=dict)
    """Of each source, named as in `train web`; none: the rows are of all files."""


def fingerprint(train: str, validation: str) -> str:
    """Digest of the fingerprints of both datasets."""
    return sha256_json([train, validation])
