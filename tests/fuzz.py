"""Coverage-guided fuzzing of whatever reads a file that somebody else has made (SECURITY.md).

    python -m tests.fuzz                       # all readers, a minute each
    python -m tests.fuzz yaml manifest --seconds 600

An input may be refused with the reader's own errors. Any other exception, ten seconds for one input, or more than 1 GiB
beside the libraries ends with exit status 1, and leaves the input in outputs/fuzz: it becomes a test. The limits of
`extract` are as small as the inputs, so that they are reached.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import atheris

from tests.project import REPO

RSS_MIB = 2048
"""The libraries need up to 1 GiB of it."""
SECONDS_OF_AN_INPUT = 10
CRASHES = Path("outputs/fuzz")

Check = Callable[[bytes], None]


def extract(name: str) -> Check:
    """What `extract` does with a file of a name. The first byte decides the rule."""
    from stages.formats import readers
    from stages.formats.raw_content import Rejected, Unreadable
    from stages.formats.records import Records
    from stages.formats.rules import Rule, find
    from stages.formats.writer import TextWriter
    from stages.splits import tree
    from stages.splits.manifests import RawFile
    from stages.work import arrow
    from tests.hostile import limits_of

    directory = Path.cwd()
    limits = limits_of(256)
    rules = [
        None, Rule(files="**"), Rule(files="**", text="$.text"), Rule(files="**", each="$..*", text="$"),
        Rule(files="**", messages="$.messages"), Rule(files="**", format="sharegpt"), Rule(files="**", format="alpaca"),
    ]  # fmt: skip

    def check(data: bytes) -> None:
        rule = rules[data[0] % len(rules)] if data else None
        (directory / name).write_bytes(data[1:])
        with arrow.StreamWriter(directory / "shard", arrow.WITH_CONVERSATIONS) as stream:
            sink = TextWriter(stream, 1, lambda _: None, limits)
            records = Records(rule, sink, 1, limits) if rule and find([rule], name) else None
            file, encoding = RawFile(name, *tree.measure(directory / name)), "cp1252" if data[:1] > b"\x7f" else "utf-8"
            try:
                readers.read(str(directory), file, encoding, limits, sink, records)
            except Rejected as rejected:
                sink.reject(rejected)
            except Unreadable:
                sink.undo()
            sink.close()

    return check


def refusing(read: Callable[[Path], Any], name: str) -> Check:
    """What reads a file in the current directory, and refuses it with a `StageError`."""
    from stages.base.errors import StageError

    path = Path(name).absolute()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(StageError):
            read(path)

    return check


def sealing(read: Callable[[Path], Any], name: str, key: str = "sealed") -> Check:
    """The same for a record with a digest of itself, which no mutation can make fit: it is computed here."""
    from stages.base.publish import sha256_json

    check = refusing(read, name)

    def check_sealed(data: bytes) -> None:
        with suppress(ValueError, RecursionError):
            if isinstance(content := json.loads(data), dict):
                content.pop(key, None)
                data = json.dumps({**content, key: sha256_json(content)}).encode()
        check(data)

    return check_sealed


def header() -> Check:
    from stages.model import headers

    return refusing(lambda path: headers.read(path.parent, [path.name]), "model.safetensors")


def manifest() -> Check:
    """All records that a stage reads."""
    from stages.base.dataset import INFO, STATE, Dataset
    from stages.base.publish import sha256_file, write_json
    from stages.checkpointing.layout import MANIFEST, CheckpointManifest
    from stages.checkpointing.pointer import RunPointer
    from stages.checkpointing.state import TrainState
    from stages.export.lineage import Lineage
    from stages.model.license import ModelLicense
    from stages.model.manifest import ModelManifest
    from stages.splits import manifests

    write_json(Path(INFO), {"features": {}})
    checks = [
        sealing(lambda path: CheckpointManifest.read(path.parent), MANIFEST, "sha256"),
        refusing(RunPointer.read, "run.json"),
        sealing(ModelManifest.read, "model.json"),
        sealing(ModelLicense.read, "license.json"),
        sealing(Lineage.read, "lineage.json"),
        refusing(TrainState.read, "state.json"),
        refusing(manifests.Summary.read, "summary.json"),
        refusing(lambda path: manifests.read_manifest(path, sha256_file(path)), "split_00.jsonl"),
        refusing(lambda path: Dataset.read(path.parent, "extract"), STATE),
    ]
    return lambda data: checks[data[0] % len(checks)](data[1:]) if data else None


def params() -> Check:
    from stages.base.params_file import load_params
    from stages.training.params import TrainParams

    return refusing(lambda path: load_params(TrainParams, path=path), "params.yaml")


def template() -> Check:
    """A chat template, and a conversation that it renders."""
    from stages.tokenizing import conversations
    from stages.tokenizing.encoding import ChatSpec
    from tests.byte_model import byte_tokenizer
    from tests.kinds import spec_of

    spec = spec_of(byte_tokenizer())
    content = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'

    def check(data: bytes) -> None:
        chat = ChatSpec((("default", data.decode(errors="ignore")),), (), "assistant", 64)
        conversations.ConversationEncoder(spec._replace(chat=chat)).encode(content)

    check(b"{{ messages }}")  # with the imports, which take seconds
    return check


def bundle() -> Check:
    """The list of files of a bundle."""
    from scripts import bundle

    path = Path(bundle.SUMS).absolute()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        with suppress(bundle.Refused):
            bundle.verify(path.parent)

    return check


_FILES = {
    "text": "a.txt", "json": "a.json", "jsonl": "a.jsonl", "yaml": "a.yaml", "csv": "a.csv", "parquet": "a.parquet",
    "arrow": "a.arrow", "gzip": "a.jsonl.gz", "zstd": "a.json.zst",
}  # fmt: skip
READERS: dict[str, Callable[[], Check]] = {
    **{name: partial(extract, file) for name, file in _FILES.items()},
    "header": header, "manifest": manifest, "params": params, "template": template, "bundle": bundle,
}  # fmt: skip

DECIDED_BY_FIRST_BYTE = (*_FILES, "manifest")
"""How the rest of an input is read."""


def seeds() -> dict[str, list[bytes]]:
    """Valid inputs of each reader, from which mutations start."""
    import gzip
    import io

    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import safetensors.numpy
    import yaml
    import zstandard

    from stages.base.dataset import STATE, Dataset, Shard
    from stages.base.files import FileEntry
    from stages.splits.manifests import Part, RawFile, write_manifest
    from tests.trainings import checkpoint_manifest, train_state

    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}]
    record = {"text": "é \U0001f600", "messages": messages, "conversations": turns, "instruction": "a", "output": "b"}
    line = json.dumps({**record, "n": [1, None, 2.5e3, True, {"k": "\ud83d\ude00"}]}).encode() + b"\n"
    array = json.dumps([record]).encode()
    table, parquet, arrow = pa.Table.from_pylist([record, record]), io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet)
    with pa.ipc.new_stream(arrow, table.schema) as writer:
        writer.write_table(table)
    records = (checkpoint_manifest(files={"a": FileEntry(1, "0" * 64)}), train_state())
    with tempfile.TemporaryDirectory() as directory:
        Dataset({}, [Shard("a.arrow", 1, "0" * 64)]).write(Path(directory))
        write_manifest(split := Path(directory, "split"), [RawFile("a.txt", 1, "0" * 64, Part(0, 1, 1))])
        manifests = [Path(directory, STATE).read_bytes(), split.read_bytes()]
    return {
        "text": ["é \U0001f600\r\n".encode() + b"\xff\xfe\x00"],
        "json": [2 * line, array],
        "jsonl": [2 * line, array],
        "yaml": [
            yaml.safe_dump(record).encode(),
            b"--- &a [x, *a]\n--- !!str 1\n...\n%YAML 1.2\n--- |\n a\n b: >-\n  c\n? q\n: !t 'z'\n",
        ],
        "csv": [b'text,instruction,output\r\n"a ""b""\n",c,d\r\ne,f,g\n'],
        "parquet": [parquet.getvalue()],
        "arrow": [arrow.getvalue()],
        "gzip": [gzip.compress(2 * line)],
        "zstd": [zstandard.compress(array)],
        "header": [safetensors.numpy.save({"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.int8)})],
        "manifest": [*(json.dumps(dataclasses.asdict(made)).encode() for made in records), *manifests],
        "params": [(REPO / "params.yaml").read_bytes()],
        "template": [
            b"{% for m in messages %}<|{{ m['role'] }}|>{{ m.content | trim }}<|end|>{% endfor %}"
            b"{% if add_generation_prompt %}<|assistant|>{% endif %}"
        ],
        "bundle": [b"0" * 64 + b"  hf/a\n"],
    }


def fuzz_one(name: str) -> None:
    """Fuzz one reader until libFuzzer, whose options are those of this process, ends it."""
    with atheris.instrument_imports(include=["stages", "scripts.bundle", "yaml"]):
        check = READERS[name]()
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


def fuzz(name: str, seconds: int) -> bool:
    """Fuzz one reader in a process of its own, print how it ended, and return whether it refused what it had to."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # in memory
    with tempfile.TemporaryDirectory(dir=shared) as corpus, tempfile.TemporaryDirectory(dir=shared) as work:
        first_bytes = map(bytes, ([number] for number in range(9))) if name in DECIDED_BY_FIRST_BYTE else (b"",)
        for number, seed in enumerate(first + seed for first in first_bytes for seed in seeds()[name]):
            Path(corpus, str(number)).write_bytes(seed)
        options = [
            f"-max_total_time={seconds}", f"-timeout={SECONDS_OF_AN_INPUT}", f"-rss_limit_mb={RSS_MIB}",
            "-max_len=4096", f"-artifact_prefix={CRASHES.absolute()}/{name}-", corpus,
        ]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", f"from tests.fuzz import fuzz_one; fuzz_one({name!r})", *options],
            cwd=work, env={**os.environ, "PYTHONPATH": str(REPO)}, stdout=-1, stderr=-2, check=False,
        )  # fmt: skip
    lines = done.stdout.decode(errors="replace").splitlines()
    runs = next((line.split()[1] for line in reversed(lines) if line.startswith("Done ")), "?")
    print(f"{name:10} {runs:>9} inputs: {'FAILED' if done.returncode else 'no failure'}", flush=True)
    if done.returncode:
        print("\n".join(lines[-60:]), flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("readers", nargs="*", metavar="READER", help=f"of {', '.join(READERS)}; all, if none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each reader (default: 60)")
    args = parser.parse_args()
    if unknown := {*args.readers} - {*READERS}:
        parser.error(f"no such reader: {', '.join(sorted(unknown))}")
    CRASHES.mkdir(parents=True, exist_ok=True)
    failures = [name for name in args.readers or READERS if not fuzz(name, args.seconds)]
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
