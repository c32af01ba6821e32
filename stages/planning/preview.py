"""Rows of tokens as text: what a model will be fed, where documents end in it, and what it is not trained to predict.

Most errors of data are found by reading a few rows: markup, repeated headers, a wrong encoding, documents of one line.
"""

import textwrap
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import chain, groupby, islice, pairwise

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from stages.base.errors import StageError, one_line
from stages.base.packed import TRAIN
from stages.base.summary import counted
from stages.forward.batch import Marks, make_batch, read_marks
from stages.forward.rows import TokenRows
from stages.model.manifest import ModelManifest
from stages.training.order import RowOrder
from stages.training.params import TrainParams

LEGEND = (
    "⟦...⟧ is read but not predicted; ⟪...⟫ is one special token, and its name without these is text; a line of dashes "
    "ends a document; ⏎ is a line break"
)

_NUM_SHOWN = 3
"""Rows in rows.txt, the first ones of the training."""
_NUM_SEARCHED = 1000
"""Rows among which there should be one of a conversation, where there are conversations."""

_WIDTH = 110
_MAX_DOCUMENTS = 5
"""Shown of a row."""
_HEAD, _TAIL = 400, 100
"""Characters shown of a longer document."""


def first_rows(params: TrainParams, model: ModelManifest) -> str:
    """The first rows of the training, as text, and one of a conversation and one of documents where there are both.

    Raises:
        StageError: they cannot be read.
    """
    tokenizer = Tokenizer.from_file(str(model.verify_tokenizer()))
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    special.add(model.eos_token_id)
    try:
        tokens = TokenRows(TRAIN)
        order = RowOrder(params, len(tokens), tokens.sources)
        steps = range(-(-_NUM_SEARCHED // params.total_batch_size))
        decode, texts = partial(tokenizer.decode, skip_special_tokens=False), []
        for index in rows_to_show(tokens, chain.from_iterable(map(order.step, steps))):
            (row,), marks = tokens.rows(np.array([index])), read_marks(tokens, np.array([index]))
            text = render(row, decode, model.eos_token_id, special, params.document_mask, marks)
            texts.append(f"row {index}\n{text}")
    except (pa.ArrowException, ArithmeticError, LookupError, ValueError) as error:  # of damaged files; train verifies
        raise StageError(f"{TRAIN} cannot be read ({one_line(error)}): run `dvc repro -f -s pack`") from None
    return "\n\n".join([LEGEND, *texts]) + "\n"


def rows_to_show(tokens: TokenRows, indices: Iterable[np.int64]) -> list[np.int64]:
    """The first of these rows; the last gives way to one of a conversation, or of documents, where they have none."""
    rest = iter(indices)
    first = [*islice(rest, _NUM_SHOWN)]

    def is_trained(index: np.int64) -> bool:
        marks = tokens.marks(np.array([index]))
        return marks is None or bool(marks[0].all())

    kinds = {is_trained(index) for index in first}
    if len(kinds) == 1:
        first[-1] = next((index for index in rest if is_trained(index) not in kinds), first[-1])
    return first


def render(
    row: NDArray[np.int32], decode: Callable[[list[int]], str], eos_token_id: int, special: Collection[int],
    document_mask: bool, marks: Marks | None = None,
) -> str:  # fmt: skip
    """Lines of text for one row.

    Args:
        row: (T,) integers, as in data/tokens/.
        decode: From token ids to text.
        eos_token_id: The token that ends a document.
        special: The special tokens; a text may spell their names, in ordinary tokens.
        document_mask: As in params.yaml; it decides which tokens are predicted.
        marks: (1, T), of the row, where it has conversations.
    """
    tokens = [int(token) for token in row]
    batch = make_batch(torch.tensor([tokens]), eos_token_id, document_mask, marks=marks)
    labels = batch["labels"].flatten().tolist()
    # `labels[t]` is the token after `tokens[t]`; nothing comes before the first one.
    is_predicted = [False, *(label != -100 for label in labels[:-1])]
    ends = (
        marks.is_start.flatten().nonzero().flatten().tolist()
        if marks
        else [index + 1 for index, token in enumerate(tokens) if token == eos_token_id]
    )
    bounds = [*dict.fromkeys([0, *ends, len(tokens)])]
    documents = list(pairwise(bounds))
    lines = []
    for start, end in documents[:_MAX_DOCUMENTS]:
        if marks and {*tokens[start:end]} == {eos_token_id}:
            lines.append(f"  {counted(end - start, 'free token')}")
            continue
        lines += _wrap(_elide(_mark(tokens[start:end], is_predicted[start:end], special, decode)))
        if end in ends:
            lines.append(f"  {'-' * 8}")
    if hidden := documents[_MAX_DOCUMENTS:]:
        number = len(tokens) - hidden[0][0]
        lines.append(f"  ... {counted(len(hidden), 'more document')} with {counted(number, 'token')}")
    return "\n".join(lines)


def _mark(
    tokens: list[int], is_predicted: list[bool], special: Collection[int], decode: Callable[[list[int]], str]
) -> str:
    """The text of some tokens, with brackets around those that are not predicted, and around each special one."""
    text, previous, done, is_open = "", 0, 0, False

    def kind(index: int) -> tuple[bool, int | None]:
        return is_predicted[index], index if tokens[index] in special else None

    for (predicted, special_index), run in groupby(range(len(tokens)), kind):
        size = sum(1 for _ in run)
        # With the run before it: many tokenizers drop the space before the first token that they decode.
        before, after = (decode(tokens[previous:end]) for end in (done, done + size))
        piece = after[len(before) :] if after.startswith(before) else decode(tokens[done : done + size])
        if predicted == is_open:
            text += "⟧" if is_open else "⟦"
            is_open = not is_open
        text += piece if special_index is None else f"⟪{piece}⟫"
        previous, done = done, done + size
    return text + "⟧" * is_open


def _elide(text: str) -> str:
    if len(text) <= _HEAD + _TAIL:
        return text
    return f"{text[:_HEAD]} ... {len(text) - _HEAD - _TAIL:,} characters ... {text[-_TAIL:]}"


def _wrap(text: str) -> list[str]:
    # Data may contain anything, also what a terminal would obey.
    text = "".join(char if char.isprintable() else "⏎" if char == "\n" else repr(char)[1:-1] for char in text)
    return textwrap.wrap(
        text, _WIDTH, initial_indent="  ", subsequent_indent="  ",
        drop_whitespace=False, break_on_hyphens=False,  # every character is shown
    )  # fmt: skip
