"""Compare a model with everything that its lineage.json names, and run stages again to compare their bytes.

Reads    a model directory that `consolidate` wrote; and what there is of the project in the current directory: the
         checkpoint, data/, params.yaml, the code, the raw files, the installed packages
Writes   nothing; --rerun: a temporary directory below outputs/, which it deletes
Command  python -m stages.lineage verify DIR [--rerun STAGE]...

Each line is `equal`, `different`, or `missing` with the place where it would be. The exit status is 0 if nothing
differs; what is missing does not count, because a model directory may be all that there is. The directory itself must
have exactly the files that lineage.json lists, and a stage named with --rerun must run: all else is `different`.

--rerun runs a stage with the inputs that are here, linked into an empty directory with no checkpoint and no stored
result, and compares each byte of its outputs with those that are here. `train` then trains from its first step, with as
many ranks as the launcher chooses here: the bits are those of the same number of ranks.
"""

import dataclasses
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from stages.artifacts import code, command, outputs, publish
from stages.artifacts.dataset import Dataset
from stages.artifacts.errors import StageError
from stages.artifacts.identity import RunIdentity
from stages.artifacts.model_files import CARD, LINEAGE
from stages.artifacts.origin import RECORDS
from stages.artifacts.params_file import PARAMS_FILE, PIPELINE_FILE, load_params
from stages.checkpointing import layout
from stages.corpus import splits, tree
from stages.corpus.formats import suffixes
from stages.export.provenance import Lineage
from stages.model.manifest import MANIFEST, ModelManifest
from stages.tokens.packed import TRAIN, VALIDATION, PackedTokens
from stages.training.params import TrainParams
from stages.training.run import ENTRIES

STAGES = ("organize", "extract", "download", "pack", "plan", "train", "consolidate", "evaluate")
CORPUS = Path("data/corpus")

_MODULES = {"train": "stages.launch"}
"""What runs a stage, where it is not the module of its name."""
_MEASURED = {str(path) for path in (outputs.SPEED, outputs.TRAIN_METRICS, outputs.COST)}
"""Outs with durations, which differ between two runs of the same inputs, and which no digest covers."""
_NOT_LISTED = {LINEAGE, CARD}
"""Files of a model directory without a digest: no program loads them."""
_CHUNK_BYTES = 1 << 20
_LISTED = 5


class Finding(NamedTuple):
    """The result of one comparison."""

    state: str
    """`equal`, `different` or `missing`."""
    name: str
    detail: str = ""


@dataclass(frozen=True)
class RawDir:
    """The one parameter that a lineage does not have: where the raw files are on this machine."""

    raw_dir: str


def main() -> None:
    parser = command.parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verifying = commands.add_parser("verify", help="compare what there is with the lineage of a model")
    verifying.add_argument("directory", type=Path, metavar="DIR", help="the model, such as outputs/tiny-llama/model")
    verifying.add_argument(
        "--rerun", action="append", default=[], choices=STAGES, metavar="STAGE", help=f"one of {', '.join(STAGES)}"
    )
    arguments = parser.parse_args()
    num_different = 0
    for finding in verify(arguments.directory, arguments.rerun):
        num_different += finding.state == "different"
        print(f"{finding.state:9}  {finding.name}{': ' * bool(finding.detail)}{finding.detail}", flush=True)
    if num_different:
        raise StageError(f"{num_different} of these differ from what {arguments.directory / LINEAGE} records")


def verify(directory: Path, rerun: Iterable[str] = ()) -> Iterator[Finding]:
    """Compare everything, from the model back to the raw files; then run stages again.

    Raises:
        StageError: there is no valid lineage.json, or a stage cannot run.
    """
    if not directory.is_dir():
        raise StageError(f"{directory} is not a directory: name that of a model, such as outputs/tiny-llama/model")
    lineage = Lineage.read(directory / LINEAGE)
    if not isinstance(lineage.params.get("experiment_name"), str):
        raise StageError(f"{directory / LINEAGE} is not valid: its params have no experiment_name")
    yield from _model_directory(directory, {**lineage.weights, **lineage.files})
    # From the model directory alone: lineage.json itself was edited if these do not fit each other.
    identity = RunIdentity(lineage.params, lineage.data, lineage.model.manifest, lineage.code)
    run_id = publish.sha256_json(dataclasses.asdict(identity))[:16]
    yield _compared("run_id of parameters, data, model and code", lineage.run_id, run_id)
    yield _checkpoint(lineage)
    yield from _model(lineage)
    yield _code(lineage)
    yield from _params(lineage)
    yield from _packages(lineage)
    for tokens, digest in ((TRAIN, lineage.data.train), (VALIDATION, lineage.data.validation)):
        yield _guarded(str(tokens), tokens, partial(_tokens, tokens, digest))
    if lineage.corpus is not None:
        yield _guarded(str(CORPUS), CORPUS, partial(_corpus, lineage.corpus))
    if lineage.splits is not None:
        yield _file(str(RECORDS["organize"]), RECORDS["organize"], lineage.splits)
        if RECORDS["organize"].is_file():
            yield from _raw_files()
    for stage in rerun:
        yield from _rerun(stage, lineage)


def _compared(name: str, recorded: object, found: object) -> Finding:
    if recorded == found:
        return Finding("equal", name)
    return Finding("different", name, f"{recorded!r} in {LINEAGE}, {found!r} here")


def _missing(name: str, path: Path) -> Finding:
    return Finding("missing", name, f"it would be {path.absolute()}")


def _file(name: str, path: Path, digest: str) -> Finding:
    if not path.is_file():
        return _missing(name, path)
    found = publish.sha256_file(path)
    return Finding("equal", name) if found == digest else Finding("different", name, f"SHA-256 {found}, not {digest}")


def _model_directory(directory: Path, listed: Mapping[str, str]) -> Iterator[Finding]:
    """Compare a model with its digests. A file too many may be loaded too: an adapter, code, other weights."""
    for name, digest in listed.items():
        path = directory / name
        yield _file(str(path), path, digest) if path.is_file() else Finding("different", str(path), "it is missing")
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if name not in listed and name not in _NOT_LISTED and (path.is_symlink() or not path.is_dir()):
            yield Finding("different", str(path), f"{LINEAGE} does not list it")


def _guarded(name: str, path: Path, check: Callable[[], Finding]) -> Finding:
    """A check of what is at a path: `missing` without it, `different` where it cannot be read."""
    if not path.exists():
        return _missing(name, path)
    try:
        return check()
    except StageError as error:
        return Finding("different", name, str(error).splitlines()[0])


def _checkpoint(lineage: Lineage) -> Finding:
    root = layout.checkpoint_root(lineage.params["experiment_name"])
    path = root / lineage.run_id / layout.step_name(lineage.step)

    def check() -> Finding:
        return _compared(f"checkpoint {path}", lineage.checkpoint, layout.verify(path).result_sha256)

    return _guarded(f"checkpoint {path}", path / layout.MANIFEST, check)


def _model(lineage: Lineage) -> Iterator[Finding]:
    yield _file(f"{MANIFEST} of {lineage.model.name}", MANIFEST, lineage.model.manifest)
    with suppress(StageError):  # missing or damaged: the line above
        manifest = ModelManifest.read()
        name = f"files of the initial model {manifest.model_name}"
        try:
            where = manifest.directory()
        except StageError as error:
            yield Finding("missing", name, str(error))
            return

        def check() -> Finding:
            manifest.verify()
            return Finding("equal", name)

        yield _guarded(name, where, check)


def _code(lineage: Lineage, num_commits: int = 50) -> Finding:
    """Compare the code of the training with that which runs here, then with the last commits."""
    name = "code of train"
    if lineage.code == code.digest(*ENTRIES):
        return Finding("equal", name)
    listed = ["git", "log", f"-{num_commits}", "--format=%H", "--", "stages"]
    # No repository, or no git: then there is nothing to search.
    commits = subprocess.run(listed, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False).stdout
    for commit in commits.split():
        with tempfile.TemporaryDirectory() as directory:
            archive = subprocess.run(["git", "archive", commit, "stages"], capture_output=True, check=False).stdout
            subprocess.run(["tar", "-x", "-C", directory], input=archive, capture_output=True, check=False)
            # A commit that does not run, or with the relative imports that `code` asserts there are none of.
            with suppress(SyntaxError, AssertionError):
                if lineage.code == code.digest(*ENTRIES, project=Path(directory)):
                    detail = f"it is that of commit {commit[:12]}: check it out to train again"
                    return Finding("different", name, detail)
    return Finding("different", name, "nor is it that of one of the last commits here")


def _params(lineage: Lineage) -> Iterator[Finding]:
    if not PARAMS_FILE.is_file():
        yield _missing("parameters", PARAMS_FILE)
        return
    here = dataclasses.asdict(load_params(TrainParams))
    values = yaml.safe_load(PARAMS_FILE.read_text(encoding="utf-8"))
    recorded = {"train": lineage.params, **{stage: origin.params for stage, origin in lineage.origins.items()}}
    for stage, params in recorded.items():
        found = here if stage == "train" else {name: values.get(name) for name in params}
        different = [
            f"{name} {there!r} in {LINEAGE}, {now!r} here" for name, there, now in _leaves_that_differ(params, found)
        ]
        name = f"parameters of {stage} in {PARAMS_FILE}"
        yield Finding("different", name, "; ".join(different)) if different else Finding("equal", name)


def _leaves_that_differ(
    there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name in sorted(there.keys() | here.keys()):
        one, other = there.get(name), here.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _leaves_that_differ(one, other, f"{prefix}{name}.")
        elif one != other:
            yield prefix + name, one, other


def _packages(lineage: Lineage) -> Iterator[Finding]:
    recorded = {"train": lineage.packages, **{stage: origin.packages for stage, origin in lineage.origins.items()}}
    for stage, packages in recorded.items():
        found = {name: _version(name) for name in packages}
        different = [f"{name} {there}, {found[name]} here" for name, there in packages.items() if there != found[name]]
        name = f"packages of {stage}"
        yield Finding("different", name, "; ".join(different)) if different else Finding("equal", name)


def _version(package: str) -> str:
    if package == "python":
        return "{}.{}".format(*sys.version_info)
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _tokens(directory: Path, fingerprint: str) -> Finding:
    tokens = PackedTokens.read(directory)
    tokens.verify()
    return _compared(str(directory), fingerprint, tokens.fingerprint)


def _corpus(fingerprint: str) -> Finding:
    dataset = Dataset.read(CORPUS, "extract")
    for shard in dataset.shards:
        path = CORPUS / shard.filename
        if not path.is_file() or publish.sha256_file(path) != shard.sha256:
            return Finding("different", str(CORPUS), f"{path} is missing or was changed")
    return _compared(str(CORPUS), fingerprint, dataset.fingerprint)


def _raw_files() -> Iterator[Finding]:
    """Compare manifests and raw files with the summary, and look for raw files that it does not know."""
    name = f"manifests in {splits.SPLITS}"
    try:
        summary = splits.read_summary(splits.SPLITS)
        files = [
            file for part in summary.splits for file in splits.read_manifest(splits.SPLITS / part.manifest, part.digest)
        ]
    except StageError as error:
        yield Finding("different", name, str(error))
        return
    yield Finding("equal", name)
    if not PARAMS_FILE.is_file():
        yield Finding("missing", "raw files", f"no {PARAMS_FILE} names raw_dir")
        return
    root = Path(load_params(RawDir).raw_dir)
    name = f"raw files in {root}"
    if not root.is_dir():
        yield _missing(name, root)
        return
    changed = {splits.printable(file.path) for file in files if _raw_digest(root / file.path, file.part) != file.digest}
    known = {splits.printable(file.path) for file in files} | {file.path for file in summary.duplicates}
    # Not those that were passed over for another reason, as a broken link: `organize` would read them now.
    known |= {item.path for item in summary.passed_over if item.reason.startswith("unreadable")}
    here, _ = tree.walk(root, lambda path: suffixes.find(path) is not None)
    new = {splits.printable(path) for path in here} - known
    different = [f"{_some(changed)} missing or changed"] * bool(changed)
    different += [f"not in the lineage: {_some(new)}"] * bool(new)
    yield Finding("different", name, "; ".join(different)) if different else Finding("equal", name)


def _some(names: Set[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(sorted(names)[:_LISTED])}{more}"


def _raw_digest(path: Path, part: splits.Part | None) -> str | None:
    """SHA-256 of a file, or of a part of it; None: it cannot be read."""
    try:
        if part is None:
            return publish.sha256_file(path)
        digest = hashlib.sha256()
        with path.open("rb") as file:
            file.seek(part.start)
            left = sys.maxsize if part.end is None else part.end - part.start
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
        return digest.hexdigest()
    except OSError:
        return None


def _rerun(stage: str, lineage: Lineage) -> Iterator[Finding]:
    """Run a stage in an empty directory with links to its inputs, and compare its outputs with those here."""
    if not (PIPELINE_FILE.is_file() and PARAMS_FILE.is_file()):
        raise StageError(f"--rerun needs {PIPELINE_FILE} and {PARAMS_FILE}: run it from the root of the project")
    inputs, outs = _inputs_and_outs(stage)
    if missing := [path for path in inputs if not path.exists()]:
        yield Finding("different", f"rerun of {stage}", f"its input {missing[0]} is missing: `dvc pull` may bring it")
        return
    if stage == "train" and (lineage.adopted or lineage.params.get("extend_from")):
        yield Finding(
            "different", "rerun of train", "it continued from a checkpoint of another run, so it cannot run alone"
        )
        return
    if stage == "consolidate":  # the checkpoint, which is no dep of DVC
        inputs.append(layout.checkpoint_root(lineage.params["experiment_name"]))
    outputs.OUTPUTS.mkdir(exist_ok=True)
    project = Path.cwd()
    # On the disk of the outputs: /tmp may be small, or in memory.
    with tempfile.TemporaryDirectory(prefix=".rerun-", dir=outputs.OUTPUTS) as temporary:
        # As deep as the project, so that `raw_dir: ../corpus` is a link in there too.
        directory = Path(temporary, *project.parts[1:]).resolve()
        directory.mkdir(parents=True)
        for path in inputs:
            if not path.is_absolute() and path.exists():
                _link(project / path, directory / path)
        # Without DVC_ROOT, so that no stored result is used. Relative paths are those of the project.
        environment = {name: value for name, value in os.environ.items() if name not in ("DVC_ROOT", "CHECKPOINT_ROOT")}
        kept = ["CHECKPOINT_ROOT"] * (stage == "consolidate") + ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"]
        environment |= {name: str(project / os.environ[name]) for name in kept if os.environ.get(name)}
        module = _MODULES.get(stage, f"stages.{stage}")
        result = subprocess.run(
            [sys.executable, "-m", module],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if result.returncode:
            last = "; ".join(line for line in result.stdout.splitlines() if line.startswith("error: "))
            yield Finding("different", f"rerun of {stage}", last or f"exit status {result.returncode}")
            return
        for path in outs:
            name = f"rerun of {stage}: {path}"
            if not path.exists():
                yield Finding("different", name, f"it is missing: it would be {path.absolute()}")
            elif different := _files_that_differ(path, directory / path):
                yield Finding("different", name, ", ".join(different[:_LISTED]))
            else:
                yield Finding("equal", name)


def _inputs_and_outs(stage: str) -> tuple[list[Path], list[Path]]:
    """What a stage reads, and what it writes, as dvc.yaml declares it, and the directories that params.yaml names."""
    values = yaml.safe_load(PARAMS_FILE.read_text(encoding="utf-8"))

    def paths(*sections: str) -> list[Path]:
        named = [path for section in sections for path in declared.get(section, [])]
        return [Path(re.sub(r"\$\{(\w+)\}", lambda found: str(values[found[1]]), path)) for path in named]

    declared = yaml.safe_load(PIPELINE_FILE.read_text(encoding="utf-8"))["stages"][stage]
    # As one, so that the digest of the code is that of the same files.
    inputs = {path for path in paths("deps") if path.parts[0] != "stages"}
    inputs |= {Path("stages"), PARAMS_FILE, PIPELINE_FILE}
    # Read by stages that depend on a record of them.
    places = (values["raw_dir"], values["model_name"], ".hf")
    inputs |= {Path(place) for place in places if Path(place).is_dir()}
    inputs = {path for path in inputs if not inputs & {*path.parents}}  # a link to a directory has all that is in it
    return sorted(inputs), [path for path in paths("outs", "metrics") if str(path) not in _MEASURED]


def _link(target: Path, link: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


def _files_that_differ(one: Path, other: Path) -> list[str]:
    """The files below two directories whose bytes are not the same, or that only one of them has."""
    if one.is_file():
        return [] if other.is_file() and publish.sha256_file(one) == publish.sha256_file(other) else [str(one)]
    names = {path.relative_to(top) for top in (one, other) for path in top.rglob("*") if path.is_file()}
    return [
        str(one / name)
        for name in sorted(names)
        if not ((one / name).is_file() and (other / name).is_file())
        or publish.sha256_file(one / name) != publish.sha256_file(other / name)
    ]


if __name__ == "__main__":
    command.run(main)
