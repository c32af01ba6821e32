"""Whether the fast tokenizer of `pack` gives the tokens of the model's own, on much text and for many tokenizers.

    python -m benchmarks.encoding --megabytes 300 --processes 2 [TOKENIZER.json ...]

The text is the sources, notes and data of the installed Python packages, each file a document, and a tenth of noise:
random bytes, all blocks of Unicode, very long words, spaces, and spellings of special tokens. Further tokenizers are
trained on a part of it. Each is compared as `pack` uses it; a row of the table is printed as soon as it is finished.
`left` is the share of the text that `pack` leaves to the model's own tokenizer because of a character.
"""

import argparse
import hashlib
import os
import random
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from stages.tokenizing import comparison, encoding, vocabulary
from tests.kinds import KINDS, MORE_KINDS, SPECIAL, SPELLINGS, prose, train

MB = 1_000_000
SUFFIXES = {".py", ".md", ".rst", ".txt", ".h", ".json", ".c", ".js", ".html", ".css", ".pyi", ".cfg", ".toml", ".csv"}
NUM_CHARACTERS_TO_TRAIN = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.encoding", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("tokenizers", type=Path, nargs="*", help="tokenizer.json of models")
    args = parser.parse_args()
    print(
        "| tokenizer | MB | tokens | equal | left | fast, MB/s | own, MB/s |\n|---|---:|---:|---|---:|---:|---:|",
        flush=True,
    )
    context = get_context("spawn")
    with ProcessPoolExecutor(args.processes, context) as pool:
        names = [*map(str, args.tokenizers), *KINDS, *MORE_KINDS]
        for row in pool.map(compare, names, [args.megabytes * MB] * len(names)):
            print(row, flush=True)


def compare(name: str, num_bytes: int) -> str:
    """A row of the table, for a kind of tokenizers or a file."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(name)
        if not path.is_file():
            sample = "".join(documents(2 * NUM_CHARACTERS_TO_TRAIN))[:NUM_CHARACTERS_TO_TRAIN]
            lines = [line for line in sample.splitlines(keepends=True) if len(line) < 300]
            path = Path(directory) / "tokenizer.json"
            train(name, lines, 4000).save(str(path))
        found = vocabulary.read(path, {}, 0)
        special = tuple(sorted(found.special_tokens))
        spec = encoding.TokenizerSpec(path, "", 0, found.unk_token_id, special, max(found.token_ids) + 1, is_fast=True)
        try:
            encoders = [encoding.Encoder(spec), encoding.Encoder(spec._replace(is_fast=False))]
        except comparison.Differs as error:
            return f"| {name} | | | not used: {error} | | | |"
        digests, seconds, counts = [hashlib.sha256(), hashlib.sha256()], [0.0, 0.0], [0, 0, 0]
        num_characters = 0
        for batch in batches(num_bytes):
            counts[0] += sum(len(document.as_buffer()) for document in batch)
            num_characters += pc.sum(pc.utf8_length(batch)).as_py()
            for index, encoder in enumerate(encoders):
                start = time.process_time()
                try:
                    pieces = [*encoder.encode(batch)]
                except comparison.Differs as error:
                    return f"| {name} | {counts[0] / MB:.0f} | | not used: {error} | | | |"
                seconds[index] += time.process_time() - start
                for piece in pieces:
                    digests[index].update(piece.tokens.data)
                    counts[1] += len(piece.tokens) if index else 0
                    counts[2] += piece.num_slow
        is_equal = digests[0].digest() == digests[1].digest()
        speeds = [counts[0] / MB / each for each in seconds]
        return (
            f"| {name} | {counts[0] / MB:.0f} | {counts[1]:,} | {'yes' if is_equal else '**NO**'} | "
            f"{100 * counts[2] / num_characters:.2g} % | {speeds[0]:.1f} | {speeds[1]:.1f} |"
        )


def batches(num_bytes: int) -> Iterator[pa.StringArray]:
    """Documents with so many bytes of UTF-8, in arrays of about 4 MB."""
    batch, size = [], 0
    for document in documents(num_bytes):
        batch.append(document)
        size += len(document)
        if size > 4 * MB:
            yield pa.array(batch)
            batch, size = [], 0
    yield pa.array(batch)


def documents(num_bytes: int) -> Iterator[str]:
    """The text: files of the installed packages, as often as needed, and noise after each MB of them."""
    chance = random.Random(0)
    paths = [path for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*")) if path.suffix in SUFFIXES]
    chance.shuffle(paths)
    total = since = times = 0
    while total < num_bytes:
        for path in paths:
            content = path.read_bytes().decode("utf-8", "replace")
            # Another text each time: otherwise the tokenizers would only look up what they have encoded before.
            document = content if not times else content[times * 7 :].replace("e", "tai"[times % 3], 50 * times)
            size = len(document.encode())
            if not size or size > 20 * MB:
                continue
            yield document
            total, since = total + size, since + size
            if since > MB:
                since = 0
                # The first of them is cut. Not at the beginning, as tokenizers are trained on that.
                for each in ["a" + " a" * 2_600_000] * (total < 2 * MB) + [*noise(chance)]:
                    total += len(each.encode())
                    yield each
            if total >= num_bytes:
                return
        times += 1


def noise(chance: random.Random) -> Iterator[str]:
    """About 100 kB of what documents rarely contain."""
    yield chance.randbytes(10_000).decode("utf-8", "replace")
    yield chance.randbytes(10_000).decode("latin-1")
    for _ in range(40):
        block = chance.choice([chance.randrange(0xD8), chance.randrange(0xE0, 0x320), 0xE00, 0x1F6]) << 8
        yield "".join(chr(block + chance.randrange(256)) for _ in range(200))
    for _ in range(5):
        yield "".join(
            map(chr, [*chance.choices(range(0xD800), k=500), *chance.choices(range(0xE000, 0x110000), k=500)])
        )
    yield "".join(chance.choice("abcdefghijklmnop") for _ in range(chance.randrange(100, 20_000)))
    yield chance.choice([" ", "\n", "\t", "\u3000", "a", "é", "\u0301", "1", "-"]) * chance.randrange(100, 10_000)
    for _ in range(50):
        yield chance.choice(SPELLINGS)(chance.choice([*SPECIAL, "<0x0A>", "<l>", "word", "<|endoftext|>"]))
    yield prose(chance.randrange(10**6), 300)
    pieces = ["'s", "'S", "'\u017f", "'LL", "\u212a", "\u0130", "\u03a3", "a", "B", " ", "\n", "12345", "<l>", *SPECIAL]
    yield "".join(chance.choices(pieces, k=500))
    marks = [*range(0x300, 0x370), *range(0x890, 0x900), *range(0x1AB0, 0x1B00), *range(0x1DC0, 0x1E00), 0x113C2]
    yield "".join(chr(chance.choice(marks)) if chance.random() < 0.7 else "e" for _ in range(500))


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
