"""An item of a task that is in the documents to train on is found, and no other one."""

import random
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stages.base.errors import StageError
from stages.base.packed import METRICS, TRAIN, VALIDATION, PackMetrics
from stages.deduplicate import DeduplicateParams, DeduplicateRuntime, deduplicate
from stages.duplicates.shingles import shingles_of
from stages.forward.rows import TokenRows
from stages.pack import PackParams, PackRuntime, pack
from stages.scoring import contamination
from stages.work.workers import Runtime
from tests.byte_model import EOS, byte_tokenizer, make_model
from tests.chat_templates import CHATML
from tests.corpus import make_corpus, with_processes

pytestmark = pytest.mark.usefixtures("empty_project")

ITEMS = [
    f"In town {n} the {n} farmers sold {n} sheep to {n} traders before the rain came. And who paid?" for n in range(8)
]
FILLER = [f"Filler of {n} words that no item has, and {n} more of them." for n in range(20)]


def prepare(splits: Sequence[Sequence[Any]], mode: Any = None, **params: Any) -> None:
    """Have a corpus, what is skipped of it, and its tokens; the last split is held out."""
    make_model(chat_templates={"default": CHATML})
    make_corpus(splits)
    deduplicate(DeduplicateParams(mode, 0.5), DeduplicateRuntime(num_workers=1, reuse_gib=1))
    values = {"seq_length": 16, "validation_splits": 1, "fast_encoder": False, **params}
    pack(PackParams(**values), PackRuntime(num_workers=1, reuse_gib=1))


def find(items: list[str] = ITEMS, num_workers: int = 1) -> list[bool | None]:
    runtime = with_processes(Runtime(num_workers=num_workers))
    return contamination.find({"task": items}, PackMetrics.read(METRICS).fingerprint, runtime)["task"]


def found(items: list[str] = ITEMS) -> list[int]:
    return [number for number, is_found in enumerate(find(items)) if is_found]


def around(item: str) -> str:
    return f"{FILLER[0]} {item} {FILLER[1]}"


def conversation(**messages: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages.items()]}


LONG = " ".join(FILLER[:12])


@pytest.mark.parametrize(
    ("splits", "mode", "numbers"),
    [
        ([FILLER, FILLER, FILLER], None, []),
        ([FILLER, [around(ITEMS[3])], FILLER], None, [3]),
        ([[*FILLER, around(ITEMS[3].upper().replace(" ", "...\n"))], FILLER, FILLER], None, [3]),
        ([FILLER, FILLER, [*FILLER, around(ITEMS[3])]], None, []),  # held out
        ([FILLER, [around(" ".join(ITEMS[3].split()[:13]))], FILLER], None, [3]),
        ([FILLER, [around(" ".join(ITEMS[3].split()[:12]))], FILLER], None, []),
        ([FILLER, [" ".join(ITEMS[3].split()[:9]), " ".join(ITEMS[3].split()[9:])], FILLER], None, []),  # two documents
        # Similar to the longer document before: skipped.
        ([[LONG, *FILLER[12:14]], [f"{LONG[:500]} {ITEMS[3]}", *FILLER[14:16]], FILLER[16:18]], None, [3]),
        ([[LONG, *FILLER[12:14]], [f"{LONG[:500]} {ITEMS[3]}", *FILLER[14:16]], FILLER[16:18]], "near", []),
        ([FILLER, [conversation(system=ITEMS[2], user="hi", assistant="yes")], FILLER], None, [2]),
        ([FILLER, [conversation(user=ITEMS[2][:60], assistant=ITEMS[2][60:])], FILLER], None, [2]),
    ],
)  # fmt: skip
def test_items_in_documents_to_train_on_are_found(splits: Any, mode: Any, numbers: list[int]) -> None:
    is_chat = any(not isinstance(row, str) for split in splits for row in split)
    prepare(splits, mode, **({"seq_length": 512} if is_chat else {}))
    assert found() == numbers


def test_documents_that_their_content_holds_out_do_not_count() -> None:
    documents = [*map(around, ITEMS), *FILLER[2:]]
    prepare([documents[::2], documents[1::2]], validation_fraction=0.5)
    rows = [TokenRows(directory) for directory in (TRAIN, VALIDATION)]
    trained, held_out = ("\0".join(decoded(each)) for each in rows)
    expected = [number for number, item in enumerate(ITEMS) if item in trained]
    assert 0 < len(expected) < len(ITEMS)
    assert [number for number, item in enumerate(ITEMS) if item in held_out] != expected
    assert found() == expected


def decoded(rows: TokenRows) -> list[str]:
    tokens = rows.rows(np.arange(len(rows))).flatten()
    return [byte_tokenizer().decode(part.tolist()) for part in np.split(tokens, np.flatnonzero(tokens == EOS) + 1)]


def test_all_are_found_that_a_plain_search_finds() -> None:
    """Also by several workers."""
    generator = random.Random(0)

    def sentence(number: int) -> str:
        return "".join(generator.choice(("ah", "be", "Co", "1")) + generator.choice(" \n,-") for _ in range(number))

    documents = [sentence(generator.randrange(1, 400)) for _ in range(60)]
    items = []
    for _ in range(100):
        document, begin = generator.choice(documents), generator.randrange(400)
        items.append(document[begin : begin + generator.randrange(90)] + sentence(generator.randrange(25)))
    prepare([documents[:20], documents[20:40], documents[40:]])

    def words(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    def grams(text: str) -> set[tuple[str, ...]]:
        return {tuple(words(text)[begin : begin + 13]) for begin in range(len(words(text)) - 12)}

    known = set().union(*map(grams, documents[:40]))
    expected = [bool(grams(item) & known) if grams(item) else None for item in items]
    assert all(expected.count(each) > 10 for each in (True, False, None))
    assert find(items) == expected
    shutil.rmtree("data/.reuse")
    assert find(items, num_workers=2) == expected


def test_items_of_few_words_are_too_short_and_then_nothing_is_read() -> None:
    assert contamination.find({"task": ["What is 3 plus 4?", ""]}, "", Runtime(num_workers=1)) == {"task": [None, None]}


@pytest.mark.parametrize(
    ("number", "shared", "is_left_out"),
    [(5, 3, True), (5, 2, False), (20, 10, False), (20, 11, True), (200, 20, False), (200, 21, True)],
)
def test_what_many_items_share_is_the_template(number: int, shared: int, is_left_out: bool) -> None:
    """As the introduction of a task; not the text that some questions are about."""
    text = " ".join(f"w{n}" for n in range(13))
    items = [f"{text} {n}" if n < shared else f"{n} {' '.join(f'v{n}-{m}' for m in range(13))}" for n in range(number)]
    (gram,) = shingles_of(text, 13)
    having = [n for n, own in enumerate(contamination.grams_of(items)) if gram in own]
    assert having == ([] if is_left_out else [*range(shared)])


def test_splits_that_have_not_changed_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    batches_of = contamination.batches_of

    def noted(shard: Path, skipped: bytes) -> Iterator[tuple[int, bytes]]:
        read.append(shard)
        return batches_of(shard, skipped)

    def num_read(items: list[str] = ITEMS) -> int:
        read.clear()
        assert {items[number] for number in found(items)} <= {ITEMS[3]}  # by its content it may be held out
        return len(read)

    monkeypatch.setattr(contamination, "batches_of", noted)
    splits = [[*FILLER[:5], FILLER[0]], [around(ITEMS[3])], FILLER[5:10], FILLER[10:15]]
    prepare(splits)
    assert num_read() == 3
    assert num_read() == 0
    prepare([[*FILLER[:5], "one more"], *splits[1:]])
    assert num_read() == 1
    prepare(splits, "exact")
    assert num_read() == 1  # the one of whose documents some are skipped now
    prepare(splits, validation_fraction=0.2)
    assert num_read() == 4
    assert num_read(ITEMS[1:]) == 4


def test_a_corpus_that_was_not_trained_on_is_refused() -> None:
    prepare([FILLER, FILLER])
    with pytest.raises(StageError, match="data/corpus is not what the model was trained on: run `dvc repro score`"):
        contamination.find({"task": ITEMS}, "another", Runtime(num_workers=1))
    tokens = PackMetrics.read(METRICS).fingerprint
    make_corpus([FILLER, FILLER[1:]])
    deduplicate(DeduplicateParams(None, 0.5), DeduplicateRuntime(num_workers=1, reuse_gib=1))
    with pytest.raises(StageError, match="is not what the model was trained on"):
        contamination.find({"task": ITEMS}, tokens, Runtime(num_workers=1))
