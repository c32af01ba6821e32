"""Compare a model with everything that its lineage.json names.

Reads    a model directory that `consolidate` wrote; and what there is of the project in the current directory: the
         checkpoint, data/, params.yaml, the code, the raw files, the installed packages
Writes   nothing
Example  python -m stages.lineage verify [DIR]
         python -m stages.lineage segments [--step 150]

Each line is `equal`, `different`, or `missing` with the place where it would be. The exit status is 0 if nothing
differs. What is missing does not count: a model directory may be all that there is. The directory itself must have
exactly the files that lineage.json lists.

`segments` trains parts of the run in params.yaml again, each from one of its checkpoints to the next. It compares, bit
for bit, all that the next step needs, such as weights and optimizer state, and the history. Where other bits may come
from other hardware or packages, the line is `unknown`, which does not count as a difference either.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from stages.base import code, command, outputs, publish
from stages.base.dataset import CORPUS, Dataset
from stages.base.errors import StageError
from stages.base.files import DamagedFile
from stages.base.identity import RunIdentity
from stages.base.names import printable
from stages.base.origin import DATA_METRICS, Origin
from stages.base.outputs import ExperimentName
from stages.base.packed import TRAIN, VALIDATION
from stages.base.params_file import PARAMS_FILE, load_params
from stages.checkpointing import layout, run
from stages.deduplicate import DeduplicateParams
from stages.export.lineage import Lineage
from stages.extract import ExtractParams
from stages.formats.raw_content import is_unchanged
from stages.launching.runtime import TrainRuntime
from stages.model.files import CARD, LINEAGE
from stages.model.manifest import MODEL_MANIFEST, ModelManifest
from stages.organize import OrganizeParams
from stages.pack import PackParams
from stages.splits import manifests as splits
from stages.training.params import TrainParams

_SUMMARY = DATA_METRICS["organize"]
_PARAMS: dict[str, Any] = {
    "organize": OrganizeParams,
    "extract": ExtractParams,
    "deduplicate": DeduplicateParams,
    "pack": PackParams,
}

_NOT_LISTED = {LINEAGE, CARD, ".gitattributes"}
"""Files of a model directory that are not compared: no program loads them. The last one is written by the Hub."""
_DOWNLOADED = ".cache/huggingface/"
"""Where `hf download --local-dir` notes what it has fetched."""
_LISTED = 5


class Finding(NamedTuple):
    """The result of one comparison."""

    state: str
    """`equal`, `different`, `missing` or `unknown`."""
    name: str
    detail: str = ""


def main() -> None:
    parser = command.parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verifying = commands.add_parser("verify", help="compare what there is with the lineage of a model")
    verifying.add_argument(
        "directory", type=Path, metavar="DIR", nargs="?", help="default: the model of the experiment in params.yaml"
    )
    training = commands.add_parser("segments", help="train parts of the run again, and compare them with checkpoints")
    training.add_argument("--step", type=command.positive_integer, metavar="N", help="only the part that ends there")
    arguments = parser.parse_args()
    if arguments.command == "segments":
        _report(train_segments(arguments.step), "the checkpoints")
        return
    directory = arguments.directory or outputs.directory(load_params(TrainParams).experiment_name) / "model"
    _report(verify(directory), f"what {directory / LINEAGE} records")


def _report(findings: Iterable[Finding], recorded: str) -> None:
    counts: Counter[str] = Counter()
    for finding in findings:
        counts[finding.state] += 1
        detail = f": {finding.detail}" if finding.detail else ""
        print(printable(f"{finding.state:9}  {finding.name}{detail}"), flush=True)
    print(", ".join(f"{number} {state}" for state, number in counts.items()))
    if counts["different"]:
        raise StageError(f"{counts['different']} of these differ from {recorded}")


def train_segments(step: int | None) -> Iterator[Finding]:
    """Train all parts of the current run again, or the one that ends at `step`.

    Raises:
        StageError: it has no checkpoints, or none of that step, or a training fails.
    """
    from stages.launching import segments  # torch

    current, runtime = run.describe(load_params(TrainParams)), load_params(TrainRuntime, "runtime")
    for segment in segments.find(current, step):
        name = f"{segment.name}, trained again"
        try:
            recorded = segments.content(segment.end)
            again, here = segments.train_again(current, runtime, segment)
            obstacle = segments.find_obstacle(current, segment, here)
        except (DamagedFile, FileNotFoundError) as error:
            deleted = [path.name for path in (segment.start, segment.end) if path and not path.exists()]
            detail = f"{deleted[0]} was deleted meanwhile" if deleted else str(error).splitlines()[0]
            yield Finding("missing" if deleted else "different", segment.name, detail)
            continue
        result = _compare(name, recorded, again, "in the checkpoint")
        is_unknown = result.state == "different" and obstacle
        yield Finding("unknown", name, f"other bits here, but {obstacle}") if is_unknown else result


def verify(directory: Path) -> Iterator[Finding]:
    """Compare everything, from the model back to the raw files.

    Raises:
        StageError: there is no valid lineage.json.
    """
    if not directory.is_dir():
        raise StageError(f"{directory} is not a directory: name that of a model; {outputs.RESTORE}")
    lineage = Lineage.read(directory / LINEAGE)
    try:
        experiment_name = TypeAdapter(ExperimentName).validate_python(lineage.params.get("experiment_name"))
    except ValidationError:
        raise StageError(f"{directory / LINEAGE} is not valid: its params have no experiment_name") from None
    yield from _model_directory(directory, {**lineage.weights, **lineage.files})
    # From the model directory alone: lineage.json itself was edited if these do not fit each other.
    identity = RunIdentity(lineage.params, lineage.data, lineage.model.manifest, lineage.code)
    run_id = publish.sha256_json(dataclasses.asdict(identity))[:16]
    yield _check("run_id of parameters, data, model and code", directory, lineage.run_id, lambda: run_id)
    root = layout.checkpoint_root(experiment_name)
    checkpoint = root / lineage.run_id / layout.step_name(lineage.step)
    yield _check(
        f"checkpoint {checkpoint}", checkpoint, lineage.checkpoint, lambda: layout.verify(checkpoint).result_sha256
    )
    yield _file(f"{MODEL_MANIFEST} of {lineage.model.name}", MODEL_MANIFEST, lineage.model.manifest)
    yield from _initial_model()
    yield _check("code of the training", Path(), lineage.code, lambda: code.digest(*run.WEIGHTS, within=run.DECIDING))
    yield from _params_and_packages(lineage)
    for path, digest in ((TRAIN, lineage.data.train), (VALIDATION, lineage.data.validation), (CORPUS, lineage.corpus)):
        if digest is not None:
            yield _check(str(path), path, digest, partial(_fingerprint, path))
    if lineage.splits is not None:
        yield _file(str(_SUMMARY), _SUMMARY, lineage.splits)
        yield from _raw_files()


def _check(name: str, path: Path, recorded: Any, find: Callable[[], Any]) -> Finding:
    """Compare what a lineage records with what there is.

    Args:
        name: Of both.
        path: What must be here for that.
        recorded: In the lineage.
        find: The same of what is here; a StageError says what is damaged.
    """
    if not path.exists():
        return Finding("missing", name, f"it would be {path.absolute()}")
    try:
        found = find()
    except StageError as error:
        return Finding("different", name, str(error).splitlines()[0])
    return _compare(name, recorded, found, f"in {LINEAGE}")


def _compare(name: str, recorded: Any, found: Any, where: str) -> Finding:
    if found == recorded:
        return Finding("equal", name)
    if not isinstance(recorded, dict):
        return Finding("different", name, f"{recorded} {where}, {found} here")
    values = (f"{key} {there} {where}, {here} here" for key, there, here in run.compare(recorded, found))
    return Finding("different", name, "; ".join(values))


def _file(name: str, path: Path, digest: str) -> Finding:
    return _check(name, path, f"SHA-256 {digest}", lambda: f"SHA-256 {publish.sha256_file(path)}")


def _model_directory(directory: Path, listed: Mapping[str, str]) -> Iterator[Finding]:
    """Compare a model with its digests. A file too many may be loaded too: an adapter, code, other weights."""
    here = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_symlink() or not path.is_dir()}
    for name in sorted(name for name in here - {*listed, *_NOT_LISTED} if not name.startswith(_DOWNLOADED)):
        yield Finding("different", str(directory / name), f"{LINEAGE} does not list it")
    for name, digest in listed.items():
        found = _file(str(directory / name), directory / name, digest)
        yield found._replace(state="different") if found.state == "missing" else found


def _initial_model() -> Iterator[Finding]:
    with suppress(StageError):  # its manifest is missing or damaged, which is another line
        manifest = ModelManifest.read()
        name = f"files of the initial model {manifest.model_name}"
        try:
            directory = manifest.directory()
        except StageError as error:
            yield Finding("missing", name, str(error))
        else:
            yield _check(name, directory, directory, manifest.verify)


def _params_and_packages(lineage: Lineage) -> Iterator[Finding]:
    def params_of(stage: str) -> dict[str, Any]:
        return Origin.of(f"stages.{stage}", load_params(_PARAMS[stage])).params

    yield _check(
        f"parameters of train in {PARAMS_FILE}", PARAMS_FILE, lineage.params,
        lambda: load_params(TrainParams).identity(),
    )  # fmt: skip
    for stage, origin in lineage.origins.items():
        here = partial(params_of, stage)
        yield _check(f"parameters of {stage} in {PARAMS_FILE}", PARAMS_FILE, origin.params, here)
    yield _check("packages of train", Path(), lineage.packages, lambda: run.packages(lineage.params))
    for stage, origin in lineage.origins.items():
        yield _check(f"packages of {stage}", Path(), origin.packages, partial(code.packages, f"stages.{stage}"))


def _fingerprint(path: Path) -> str:
    return Dataset.read(path, "extract" if path == CORPUS else "pack", contents=True).fingerprint


def _raw_files() -> Iterator[Finding]:
    """Compare the manifests with the summary, and the raw files with the manifests."""
    files: list[splits.RawFile] = []

    def read() -> None:
        for part in splits.read_summary(splits.SPLITS).splits:
            files.extend(splits.read_manifest(splits.SPLITS / part.manifest, part.digest))

    manifests = _check(f"manifests in {splits.SPLITS}", _SUMMARY, None, read)
    yield manifests
    if manifests.state == "equal" and PARAMS_FILE.is_file():
        root = Path(load_params(OrganizeParams).raw_dir)
        yield _check(f"raw files in {root}", root, None, lambda: _compare_raw(root, files))


def _compare_raw(root: Path, files: Iterable[splits.RawFile]) -> None:
    changed = (file.path for file in files if not is_unchanged(root / file.path, file.digest, file.part))
    names = sorted({*map(printable, changed)})
    if names:
        more = f" and {len(names) - _LISTED} more" * (len(names) > _LISTED)
        raise StageError(f"{', '.join(names[:_LISTED])}{more} missing or changed")


if __name__ == "__main__":
    command.run(main)
