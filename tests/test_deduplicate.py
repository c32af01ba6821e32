"""Documents that are equal or similar: which ones leave, that each names one that stays, and that pack skips them."""

import json
import random
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.base.dataset import Dataset
from stages.base.errors import StageError
from stages.deduplicate import DeduplicateParams, DeduplicateRuntime, choose_examples, deduplicate
from stages.duplicates import finding, shingles, signatures
from stages.duplicates.shingles import shingles_of
from stages.pack import PackParams, PackRuntime, pack
from tests.byte_model import byte_tokenizer, make_model
from tests.corpus import CORPUS, content_of, make_corpus, with_processes
from tests.project import REPO, flip_bit

pytestmark = pytest.mark.usefixtures("empty_project")

DUPLICATES = Path("data/duplicates")
Place = tuple[int, int]
"""Split and row."""


def run(mode: Any = "near", threshold: float = 0.8, num_workers: int = 1) -> str:
    runtime = with_processes(DeduplicateRuntime(num_workers=num_workers, reuse_gib=1))
    return deduplicate(DeduplicateParams(mode, threshold), runtime)


def dropped() -> dict[Place, tuple[Place, str, float]]:
    """What is skipped: the row that stays, the reason, the similarity."""
    found = {}
    for split, shard in enumerate(Dataset.read(DUPLICATES, "deduplicate", contents=True).shards):
        if shard.rows:
            for row in datasets.Dataset.from_file(str(DUPLICATES / shard.filename)):
                kept = (row["kept_split"], row["kept_row"])
                found[split, row["row"]] = (kept, row["reason"], row["similarity"])
    return found


def words(number: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return ["".join(generator.choices("abcdefghij", k=generator.randint(2, 8))) for _ in range(number)]


def edited(given: list[str], share: float, seed: int) -> list[str]:
    """The words with a part of them replaced, in one or more runs."""
    generator, result = random.Random(seed), [*given]
    for _ in range(generator.choice([1, 1, 3])):
        length = max(1, int(share * len(given) / 2))
        first = generator.randrange(max(1, len(given) - length))
        result[first : first + length] = words(length, seed + 1)
    return result


def many_documents(number: int) -> list[str]:
    """Documents of 5 to 400 words, most of them versions of others, some with a common beginning or without spaces."""
    documents: list[str] = []
    for index in range(number):
        length = random.Random(index).choice([5, 18, 25, 60, 120, 400])
        text = words(length, index)
        if index % 3 and documents:
            text = edited(documents[(index * 7) % len(documents)].split(), (index % 13) / 20, index)
        if index % 17 == 0:
            text = words(30, 1) + text
        documents.append(" ".join(text))
        if index % 29 == 0:
            documents.append("".join(chr(0x4E00 + ord(letter)) for letter in documents[-1] if letter != " "))
    return documents


def jaccard(one: str, other: str) -> float:
    first, second = shingles_of(one), shingles_of(other)
    shared = len(np.intersect1d(first, second))
    return shared / max(1, len(first) + len(second) - shared)


def similar_pairs(documents: Sequence[str], threshold: float) -> set[tuple[int, int]]:
    """All pairs of documents of FEWEST_WORDS or more that are so similar, by their shingles."""
    holders = defaultdict(list)
    for index, text in enumerate(documents):
        if signatures.minima([text])[1][0] >= signatures.FEWEST_WORDS:
            for shingle in shingles_of(text).tolist():
                holders[shingle].append(index)
    pairs = {
        (one, other) for held in holders.values() if len(held) < 200 for one in held for other in held if one < other
    }
    return {pair for pair in pairs if jaccard(*(documents[index] for index in pair)) >= threshold}


@pytest.mark.parametrize(("threshold", "most_left"), [(0.7, 2), (0.8, 0), (0.9, 2)])
def test_what_leaves_is_similar_to_what_stays_and_nothing_similar_is_left(threshold: float, most_left: int) -> None:
    documents = many_documents(450)
    splits = [documents[index::4] for index in range(4)]
    make_corpus(splits)
    run(threshold=threshold)
    found = dropped()
    assert {reason for _, reason, _ in found.values()} >= {"similar"}
    for (split, row), ((kept_split, kept_row), reason, similarity) in found.items():
        assert (kept_split, kept_row) not in found
        one, other = splits[split][row], splits[kept_split][kept_row]
        assert (one == other) == (reason == "equal")
        assert similarity == (1 if one == other else jaccard(one, other)) >= threshold
        assert len(other.split()) >= len(one.split())  # the longer one stays
    flat = [(document, (split, row)) for split, rows in enumerate(splits) for row, document in enumerate(rows)]
    left = [document for document, place in flat if place not in found]
    assert len(similar_pairs(left, threshold)) <= most_left


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b", "é", "7 chars", "a b c d e f", ""]), max_size=9), min_size=1, max_size=4
    )
)
def test_of_equal_documents_the_first_stays(splits: list[list[str]]) -> None:
    make_corpus(splits, batch_size=2)
    run("exact")
    first: dict[str, Place] = {}
    wanted = {}
    for split, rows in enumerate(splits):
        for row, text in enumerate(rows):
            if (kept := first.setdefault(text, (split, row))) != (split, row):
                wanted[split, row] = (kept, "equal", 1.0)
    assert dropped() == wanted


def test_of_short_documents_equal_ones_alone_leave() -> None:
    make_corpus([["7 chars", "a b c d e f", "7 chars"], ["a b c d e f g", "A b c d e f", "7 chars"]])
    run("near")
    assert dropped() == {(0, 2): ((0, 0), "equal", 1.0), (1, 2): ((0, 0), "equal", 1.0)}


def test_each_of_a_chain_of_versions_names_one_that_is_similar_itself() -> None:
    """v1 is similar to v2, v2 to v3, and v1 not to v10: it stays, although all are linked."""
    versions = [words(200, 1)]
    for number in range(9):
        version = [*versions[-1]]
        version[number * 20 : number * 20 + 14] = words(14, number + 2)
        versions.append(version)
    texts = [" ".join(version) for version in versions]
    make_corpus([texts, [texts[0]]])
    run()
    found = dropped()
    assert jaccard(texts[0], texts[9]) < 0.3 and 1 < 11 - len(found) < 10
    for (split, row), ((kept_split, kept_row), _, similarity) in found.items():
        assert (kept_split, kept_row) not in found
        assert similarity == jaccard([texts, texts[:1]][split][row], [texts, texts[:1]][kept_split][kept_row]) >= 0.8


def test_a_copy_of_what_leaves_names_what_stays() -> None:
    short, long = words(100, 1), [*words(100, 1), *words(10, 2)]
    make_corpus([[" ".join(short), " ".join(long)], [" ".join(short)]])
    run()
    similarity = jaccard(" ".join(short), " ".join(long))
    assert dropped() == {
        (0, 0): ((0, 1), "similar", similarity), (1, 0): ((0, 1), "equal", similarity),
    }  # fmt: skip


def test_conversations_are_compared_without_their_system_message() -> None:
    system = {"role": "system", "content": " ".join(words(900, 1))}

    def conversation(seed: int, changed: int = 0) -> dict[str, Any]:
        answer = words(60, seed)
        answer[:changed] = words(changed, seed + 1)
        turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": " ".join(answer)}]
        return {"messages": [system, *turns]}

    text = " ".join(words(60, 2))
    make_corpus([[conversation(2), conversation(3), text], [conversation(2, changed=3), conversation(3), text]])
    run()
    assert {place: (kept, reason) for place, (kept, reason, _) in dropped().items()} == {
        (1, 0): ((0, 0), "similar"), (1, 1): ((0, 1), "equal"), (1, 2): ((0, 2), "equal"),
    }  # fmt: skip


def test_a_document_of_an_earlier_source_stays_and_else_the_longest() -> None:
    short, long = words(100, 1), [*words(100, 1), *words(10, 2)]
    make_corpus([[" ".join(short)], [" ".join(long)]])
    run()
    assert dropped().keys() == {(0, 0)}
    make_corpus([[" ".join(short)], [" ".join(long)]], sources=["good", "other"])
    assert " ".join(run().split()) == "1 document kept of 2 1 dropped 0 equal, 1 similar 2 of 2 splits reused"
    assert dropped().keys() == {(1, 0)}
    metrics = json.loads(Path("data/deduplicate.json").read_text())
    assert metrics["sources"] == {
        "good": {"documents": 1, "equal": 0, "similar": 0}, "other": {"documents": 1, "equal": 0, "similar": 1},
    }  # fmt: skip
    assert metrics["examples"][0]["kept"] == " ".join(short)[:300] and metrics["largest"][0]["skipped"] == 1


def test_the_examples_show_all_similarities_and_those_near_the_threshold() -> None:
    """Most pairs differ in their spaces alone, which are in no shingle."""
    originals = [words(100, seed) for seed in range(50)]
    changed = [edited(original, share, 7) for original, share in zip(originals, (0.01, 0.04, 0.06, 0.08), strict=False)]
    copies = [" ".join(document) for document in changed] + ["  ".join(original) for original in originals[4:]]
    make_corpus([[" ".join(original) for original in originals], [*copies, " ".join(originals[0])]])
    run(threshold=0.7)
    found = [example["similarity"] for example in json.loads(Path("data/deduplicate.json").read_text())["examples"]]
    assert len(found) == 20 and found == sorted(found)
    assert sum(similarity < 1 for similarity in found) == 4

    similarity = np.array([1.0] * 40 + [0.8 + number / 1000 for number in range(160)] + [1.0] * 40)
    is_equal = np.arange(240) >= 200
    chosen = choose_examples(finding.Dropped(np.arange(240), np.arange(240), similarity, is_equal))
    assert np.diff(similarity[chosen]) == pytest.approx([0.159 / 19] * 19, abs=0.001)
    assert choose_examples(finding.NOTHING) == []
    assert choose_examples(
        finding.Dropped(*(values[200:] for values in (np.arange(240),) * 2), similarity[200:], is_equal[200:])
    )


def test_the_result_is_the_same_for_any_workers_ranges_and_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = many_documents(100)
    make_corpus([documents[index::5] for index in range(5)])
    results = []
    for num_workers in (1, 2):
        shutil.rmtree("data/.reuse", ignore_errors=True)
        run(num_workers=num_workers)
        results.append((content_of(DUPLICATES), Path("data/deduplicate.json").read_bytes()))
    monkeypatch.setattr(finding.find, "__defaults__", (13,))
    run()
    results.append((content_of(DUPLICATES), Path("data/deduplicate.json").read_bytes()))
    values = "deduplicate: near\ndedup_threshold: 0.8\nruntime: {num_workers: 1, reuse_gib: 1, dask_scheduler: null}\n"
    Path("params.yaml").write_text(values)
    shutil.rmtree("data/.reuse")
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": str(REPO), "PATH": "/usr/bin"}
    subprocess.run([sys.executable, "-m", "stages.deduplicate"], env=environment, check=True)
    results.append((content_of(DUPLICATES), Path("data/deduplicate.json").read_bytes()))
    assert dropped() and all(result == results[0] for result in results)


def test_signatures_are_computed_once() -> None:
    documents = many_documents(100)
    splits = [documents[index::5] for index in range(5)]
    make_corpus(splits)
    assert run(threshold=0.8).endswith("0 of 5  splits reused")
    assert run(threshold=0.9).endswith("5 of 5  splits reused")
    make_corpus([*splits[:4], [*splits[4], "one more"], [], []])  # those without documents are no work
    assert run(threshold=0.9).endswith("4 of 5  splits reused")


def test_a_band_that_all_share_is_compared_with_the_first_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    signatures_of = finding.SignedCorpus.signatures
    monkeypatch.setattr(finding, "MOST_COMPARED", 3)
    monkeypatch.setattr(finding, "bands", lambda threshold: (1, 1))
    monkeypatch.setattr(finding, "_of_band", lambda split, own, *_: (np.zeros(len(own), np.uint64),) * 2 + (own,))

    def counted(self: finding.SignedCorpus, numbers: Sequence[int]) -> Any:
        compared.append(len(numbers) - 1)
        return signatures_of(self, numbers)

    monkeypatch.setattr(finding.SignedCorpus, "signatures", counted)
    make_corpus([[" ".join(words(40, seed)) for seed in range(20)]])
    run()
    assert not dropped() and max(compared) == 3


LETTERS = st.lists(
    st.sampled_from(["foo", "Bar", "über", "a1", "日本語", "ไทย", "e\u0301t", "İs", " ", ", ", "\n", "-"]), max_size=60
)


@settings(deadline=None, max_examples=50)
@given(st.lists(LETTERS.map("".join), min_size=1, max_size=5))
def test_shingles_are_those_of_words_however_a_text_is_cut(texts: list[str]) -> None:
    def reference(text: str) -> list[str]:
        own = "[\u0e00-\u0eff\u4e00-\u9fff]"
        return re.findall(rf"{own}|(?:(?!{own})[\w\u0300-\u036f])+", text.lower().replace("i̇", "İ"))

    wanted = [{tuple(found[index : index + 5]) for index in range(len(found) - 4)} for found in map(reference, texts)]
    assert [len(shingles_of(text)) for text in texts] == [*map(len, wanted)]
    whole, numbers = signatures.minima(texts)
    assert numbers.tolist() == [len(reference(text)) for text in texts]
    for text, signature in zip(texts, whole, strict=True):
        assert np.array_equal(signatures.minima([text])[0][0], signature)


def test_a_long_text_is_computed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(words(400, 1))
    whole, wanted = signatures.minima([text]), shingles_of(text)
    monkeypatch.setattr(shingles, "PIECE", 100)
    cut = signatures.minima([text])
    assert np.array_equal(cut[0], whole[0]) and cut[1] == whole[1] == 400
    assert np.array_equal(shingles_of(text), wanted)


def encode(**params: Any) -> str:
    return pack(
        PackParams(**{"seq_length": 8, "validation_splits": 1, **params}), PackRuntime(num_workers=1, reuse_gib=1)
    )


def tokens() -> dict[str, list[int]]:
    return {
        name: [token for row in datasets.load_from_disk(f"data/tokens/{name}")["input_ids"] for token in row]
        for name in ("train", "validation")
    }


@pytest.mark.parametrize("params", [{}, {"validation_fraction": 0.3}], ids=["splits", "fraction"])
def test_pack_makes_the_rows_of_a_corpus_without_what_is_skipped(params: dict[str, Any]) -> None:
    make_model()
    generator = random.Random(1)
    splits = [[f"text {generator.randrange(30)} of some length" for _ in range(40)] for _ in range(4)]
    make_corpus(splits)
    run("exact")
    encode(**params)
    found, skipped = tokens(), dropped()
    assert len(skipped) == 130
    run(None)
    encode(**params)
    assert tokens() != found  # not those that the store has
    kept = [[text for row, text in enumerate(rows) if (split, row) not in skipped] for split, rows in enumerate(splits)]
    make_corpus(kept, batch_size=3)
    run(None)
    encode(**params)
    assert tokens() == found
    assert not set(map(str, dropped()))


def test_tokens_are_found_again_where_the_same_rows_are_skipped() -> None:
    make_model()
    for first in (["the same text", "another one"], ["another one", "the same text"]):  # another row stays
        make_corpus([first, ["the same text", "a third one"], ["held out"]])
        run("exact")
        printed = encode()
    assert {place: kept for place, (kept, *_) in dropped().items()} == {(1, 0): (0, 1)}
    assert printed.endswith("2 of 3  splits reused")


def test_of_two_versions_none_is_held_out(capsys: pytest.CaptureFixture[str]) -> None:
    """One of them is all that there is."""
    make_model()
    text = " ".join(words(50, 1))
    make_corpus([[text, f"{text} more"], []])
    run()
    encode()
    assert "nothing is held out: there is only one document" in capsys.readouterr().out


def test_two_versions_are_never_on_both_sides() -> None:
    make_model()
    text, filler = " ".join(words(50, 1)), [f"number {number} is here" for number in range(30)]
    make_corpus([[*filler, text], [*filler[:3], f"{text} more"]])
    run()
    encode()
    sides = {name: byte_tokenizer().decode(found) for name, found in tokens().items()}
    assert dropped().keys() == {(0, 30), (1, 0), (1, 1), (1, 2)}
    assert text not in sides["train"] and text in sides["validation"]


def test_pack_refuses_what_is_not_of_its_corpus() -> None:
    make_model()
    make_corpus([["one text", "one text"], ["another text of the corpus"]])
    with pytest.raises(StageError, match=r"data/duplicates.*is missing: run `dvc repro deduplicate`"):
        encode()
    run("exact")
    encode()
    make_corpus([["one text", "one more"], ["another text of the corpus"]])
    with pytest.raises(StageError, match="is of another corpus: run `dvc repro -f -s deduplicate`"):
        encode()
    run("exact")
    flip_bit(next(DUPLICATES.glob("*.arrow")), -40)
    with pytest.raises(StageError, match="dvc repro -f -s deduplicate"):
        encode()


def test_an_empty_side_names_what_is_skipped_of_it() -> None:
    make_model()
    make_corpus([[f"text {number} of some length" for number in range(40)]] * 2)
    run("exact")
    with pytest.raises(StageError, match="deduplicate skips 40 documents of its splits: set it to null"):
        encode(seq_length=4096)


def test_a_source_of_which_nothing_stays_is_named() -> None:
    make_model()
    make_corpus([["one text", "two"]] * 4, sources=["web", "web", "wiki", "wiki"])
    run("exact")
    with pytest.raises(StageError, match=r"deduplicate skips all documents of source wiki.*name it first there"):
        encode()


@pytest.mark.parametrize("content", [None, "{}", "{broken"])
def test_a_missing_or_damaged_record_names_the_stage(content: str | None) -> None:
    make_model()
    make_corpus([["one text", "two"]] * 2)
    run("exact")
    Path("data/deduplicate.json").unlink()
    if content:
        Path("data/deduplicate.json").write_text(content)
    with pytest.raises(StageError, match=r"data/deduplicate\.json .*dvc repro .*deduplicate"):
        encode()


def test_a_corpus_that_was_changed_is_refused() -> None:
    make_corpus([["a", "a"]])
    flip_bit(next(CORPUS.glob("*.arrow")), -20)
    with pytest.raises(StageError, match=r"data-00000-of-00001\.arrow"):
        run("exact")
    assert not DUPLICATES.exists()
