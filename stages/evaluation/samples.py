"""What a model writes after the beginnings of held-out documents."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from stages.evaluation import generation
from stages.evaluation.request import Request
from stages.evaluation.sharing import share
from stages.export.evaluation import Sample
from stages.forward.rows import TokenRows
from stages.ranks.watchdog import Heartbeat

PROMPT_TOKENS = 32
NEW_TOKENS = 64
TEMPERATURE = 0.8


def generate_samples(
    model: PreTrainedModel, tokenizer: Any, rows: TokenRows, request: Request, heartbeat: Heartbeat,
    is_sharded: bool,
) -> list[Sample]:  # fmt: skip
    """This rank's share of the samples: what the model writes after prompts that are spread over all held-out rows."""
    num_samples = min(request.num_samples, len(rows))
    bounds = np.arange(num_samples + 1) * len(rows) // max(1, num_samples)  # of as many ranges of rows
    limit = generation.max_length(model)
    size, with_room = min(PROMPT_TOKENS, limit // 2), max(limit // 2, limit - NEW_TOKENS)
    ranges = [range(*pair) for pair in pairwise(bounds.tolist())]
    found = [
        find_question(rows, each, with_room) or find_prompt(rows, each, request.eos_token_id, size) for each in ranges
    ]
    prompts = [(torch.from_numpy(prompt).long(), rest) for prompt, rest in found if len(prompt)]
    # As many for all prompts: ranks that share a model do not stop before the last of them.
    num_tokens = min(NEW_TOKENS, limit - max((len(prompt) for prompt, _ in prompts), default=0))
    own, num_counted = share(list(enumerate(prompts)), is_sharded)
    samples = []
    for number, (prompt, rest) in own:
        heartbeat.note(f"writing sample {number + 1} of {len(prompts)}")
        torch.manual_seed(number)  # of the sample: the same on any number of ranks
        continuation = generation.generate(
            model, prompt[None].to(model.device), num_tokens, TEMPERATURE, synced_gpus=is_sharded
        )
        samples.append(
            Sample(
                tokenizer.decode(prompt), tokenizer.decode(continuation, skip_special_tokens=True),
                tokenizer.decode(rest[:num_tokens]), generation.has_ended(model, continuation),
            )
        )  # fmt: skip
    return samples[:num_counted]


def find_prompt(
    rows: TokenRows, indices: range, eos_token_id: int, size: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The beginning of a held-out document, (n,), and the rest of what is there of the document, at least as long.

    n is at most `size`.

    It is that of the longest document which begins in the first of the rows in which one begins. If none does, it is
    taken from the middle of one; it is empty if there is nothing but EOS.

    Args:
        rows: Held-out rows, each of which continues the one before, unless that is of another source.
        indices: The rows to look at; at least one.
        eos_token_id: It ends each document, and is not a part of the prompt.
        size: In tokens.
    """
    bounds = np.cumsum([0, *(rows.sources.values() or [len(rows)])])
    for index in indices:
        end = bounds[np.searchsorted(bounds, index, "right")]  # of its source
        tokens = rows.rows(np.arange(index, min(index + 2, end))).ravel()  # (T or 2T,): a document may go on
        is_end = tokens == eos_token_id
        pieces = [piece[piece != eos_token_id] for piece in np.split(tokens, np.flatnonzero(is_end) + 1)]
        pieces = pieces[: 1 + np.count_nonzero(is_end[: rows.seq_length])]  # without those that begin in the next row
        # The first piece is the end of a document, except in the first row of a source.
        longest = max(pieces[int(index not in bounds) :], key=len, default=tokens[:0])
        if len(longest) > 1:
            break
    else:
        longest = max(pieces, key=len)
    size = min(size, max(1, len(longest) // 2))
    return longest[:size], longest[size:]


def find_question(rows: TokenRows, indices: range, size: int) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """The beginning of a held-out conversation, until the model is to write, and the rest of it; None: there is none.

    Args:
        rows: Held-out rows.
        indices: The rows to look at.
        size: In tokens, of the beginning, at most.
    """
    for index in indices:
        (tokens,), marks = rows.rows(np.array([index])), rows.marks(np.array([index]))
        if marks is None:
            return None
        (is_trained,), (is_start,) = marks
        for start, end in pairwise([*np.flatnonzero(is_start).tolist(), len(tokens)]):
            answers = np.flatnonzero(is_trained[start:end])
            if len(answers) and 0 < answers[0] <= size:
                return tokens[start : start + answers[0]], tokens[start + answers[0] : end]
    return None
