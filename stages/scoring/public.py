"""What `tasks` may name: files of yours, and tasks of lm-evaluation-harness that were fetched. Nothing is looked up.

evals/public/manifest.json maps what tasks give to `load_dataset` to files in evals/public/ORG--NAME/. `--fetch` of
stages.score writes both (stages/scoring/fetch.py); git tracks the manifest, DVC the files.
"""

import difflib
import glob
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from stages.base import publish
from stages.base.errors import StageError, explained
from stages.base.files import FileEntry, JsonFile, RelativePath, check_files

EVALS = Path("evals")
PUBLIC = EVALS / "public"
FETCH = "run `python -m stages.score --fetch {}` on a machine with internet access"
OUTPUT_TYPES = ("generate_until", "loglikelihood", "loglikelihood_rolling", "multiple_choice")
"""What lm-eval can ask a model for, its default first."""
TASK_KEYS = {
    "aggregate_metric_list", "class", "custom_dataset", "dataset_kwargs", "dataset_name", "dataset_path", "description",
    "doc_to_audio", "doc_to_choice", "doc_to_decontamination_query", "doc_to_image", "doc_to_target", "doc_to_text",
    "fewshot_config", "fewshot_delimiter", "fewshot_split", "filter_list", "gen_prefix", "generation_kwargs", "group",
    "group_alias", "include", "metadata", "metric_list", "num_fewshot", "output_type", "process_docs",
    "process_results", "repeats", "should_decontaminate", "tag", "target_delimiter", "task", "task_alias", "task_list",
    "test_split", "training_split", "unsafe_code", "use_prompt", "validation_split",
}  # fmt: skip
"""Of lm-eval's tasks and groups. A test compares them with those of the version that is installed."""
_BUILDERS = ("arrow", "csv", "json", "pandas", "parquet", "text")
"""Of `datasets`: they read files of this machine."""


@dataclass(frozen=True)
class DataSet:
    """A data set of the Hub, in part."""

    commit: str
    configs: dict[str, dict[str, list[RelativePath]]]
    """By `config_key`: the files of each split."""
    files: dict[RelativePath, FileEntry]
    """Of these configs, and its README and license."""


@dataclass(frozen=True)
class Manifest(JsonFile):
    """Content of evals/public/manifest.json."""

    STAGE: ClassVar[str] = "score"
    PATH: ClassVar[Path] = PUBLIC / "manifest.json"

    tasks: dict[str, list[str]]
    """Tasks of lm-eval, and groups of them: the data sets of each."""
    datasets: dict[str, DataSet]
    """By their names on the Hub."""

    @classmethod
    def load(cls) -> "Manifest":
        """What was fetched until now."""
        return cls.read() if cls.PATH.is_file() else cls({}, {})


def directory(dataset: str) -> Path:
    """Where the files of a data set are."""
    return PUBLIC / dataset.replace("/", "--")


def config_key(name: str | None, options: dict[str, Any]) -> str:
    """The name of a config of a data set, and what else a task gives to `load_dataset`."""
    return " ".join([name or "default", *(f"{option}={value}" for option, value in sorted(options.items()))])


def find(dataset: str, name: str | None, options: dict[str, Any], contents: bool = True) -> Path:
    """The directory of a data set of the Hub, whose files are as they were fetched.

    Args:
        dataset: Its name.
        name: Of its config; None: the default one.
        options: What else a task gives to `load_dataset`.
        contents: Whether to hash the files, or only to compare their sizes.

    Raises:
        StageError: it was not fetched, or a file is missing or damaged.
    """
    found, key = Manifest.load().datasets.get(dataset), config_key(name, options)
    if found is None or key not in found.configs:
        raise StageError(
            f"the data set {dataset} ({key}) is not in {Manifest.PATH}: {FETCH.format('TASK')}, with the task's name"
        )
    of_others = {file for config in found.configs.values() for files in config.values() for file in files}
    of_others -= {file for files in found.configs[key].values() for file in files}
    source = _check(dataset, {file: entry for file, entry in found.files.items() if file not in of_others}, contents)
    on_disk = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    if others := sorted(file for file in on_disk - {*found.files} if not file.startswith(".cache/")):
        raise StageError(f"{source / others[0]} is not in {Manifest.PATH}, and would be read as data: remove it")
    return source


def _check(dataset: str, files: dict[str, FileEntry], contents: bool) -> Path:
    source = directory(dataset)
    remedy = f"`dvc pull {source}`, or remove it and {FETCH.format('TASK')}"
    check_files({source / file: entry for file, entry in files.items()}, remedy, contents)
    return source


def local_files(dataset: str, options: dict[str, Any]) -> list[str]:
    """The files and directories that a task loads; none: its data set is one of the Hub.

    Raises:
        StageError: one is missing, or not in evals/.
    """
    given = [options.get("data_files"), options.get("data_dir")]
    files = [*_flat(given)] if dataset in _BUILDERS else [dataset] * Path(dataset).is_dir()
    for file in files:
        if EVALS not in Path(os.path.normpath(file)).parents:
            raise StageError(f"{file} is not below {EVALS}/, where DVC notices its changes: move it there")
        if not glob.glob(file):
            raise StageError(f"{file}, which a task names, is missing: put it there, or correct the name")
    return files


def _flat(values: Any) -> Iterator[str]:
    """The strings in lists and dictionaries, such as `data_files`."""
    if isinstance(values, (dict, list)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _flat(value)
    elif values is not None:
        yield str(values)


def is_file(entry: str) -> bool:
    """Whether an entry of `tasks` is a file, and not a name."""
    return "/" in entry or entry.endswith((".yaml", ".yml"))


def check(entries: list[str]) -> None:
    """Check the entries of `tasks` as far as their names, their YAML and the names of their data tell.

    Raises:
        StageError: one is neither a file of yours nor fetched, its YAML is not valid, or it has no data.
    """
    files = [path for path in sorted(EVALS.rglob("*.yaml")) if PUBLIC not in path.parents] if entries else []
    configs = {str(path): read(path) for path in files}
    for path, config in configs.items():
        for kind in ("task", "group"):
            if not isinstance(config.get(kind, ""), (str, list)):  # lm-eval could not sort the names
                raise StageError(f"{path}: {kind} is {config[kind]!r}, which is no text: put it in quotes")
    kinds = [(config.get(kind), config) for config in configs.values() for kind in ("task", "group")]
    own = {name: config for name, config in kinds if isinstance(name, str)}
    manifest = Manifest.load()
    known = {name for name, needed in manifest.tasks.items() if {*needed} <= {*manifest.datasets}}
    known |= {tag for config in configs.values() for tag in _flat(config.get("tag"))}

    waiting = [*entries]
    for entry in waiting:
        path = os.path.normpath(entry)
        if is_file(entry) and path not in configs:
            raise StageError(f"tasks: {entry} is no file below {EVALS}/ that ends in .yaml{nearest(entry, configs)}")
        config = configs[path] if is_file(entry) else own.get(entry, {})
        if not config and entry not in known:
            remedy = f"correct it, or {FETCH.format(entry)}"
            others = nearest(entry, {*own, *known})
            raise StageError(f"tasks: {entry!r} is neither in {EVALS}/ nor fetched{others}: {remedy}")
        if is_file(entry) and not {"task", "group"} & {*config}:
            raise StageError(f"tasks: {entry} has no name: add a line such as `task: {Path(entry).stem}`")
        for dataset in () if config else manifest.tasks.get(entry, ()):
            _check(dataset, manifest.datasets[dataset].files, contents=False)
        with explained(_error(f"tasks: {entry} is not valid")):
            waiting.extend(name for name in _check_config(config) if name not in waiting)


def _check_config(config: dict[str, Any]) -> Iterator[str]:
    """Check how a task of yours is measured, and that its data are there; yields the tasks in a group."""
    if "class" not in config and (unknown := sorted(map(str, {*config} - TASK_KEYS))):
        raise ValueError(f"{unknown[0]!r} is no key of a task{nearest(unknown[0], TASK_KEYS)}")
    if (kind := config.get("output_type") or OUTPUT_TYPES[0]) not in OUTPUT_TYPES:
        raise ValueError(f"output_type is {kind!r}{nearest(str(kind), OUTPUT_TYPES)}")
    for member in config["task"] if isinstance(config.get("task"), list) else ():
        if isinstance(member, str):
            yield member
            continue
        if not isinstance(member, dict):
            raise ValueError(f"{member!r} is neither a name nor a task")
        yield from _check_config(member)  # a group or a task that is written here
        name = member.get("task") or member.get("group")  # else of another one, with changes
        if isinstance(name, str) and "dataset_path" not in member:
            yield name
    options = dict(config.get("dataset_kwargs") or {})
    if (found := config.get("dataset_path")) and not local_files(found, options):
        find(found, config.get("dataset_name"), data_options(options), contents=False)
    if found in _BUILDERS and (files := options.get("data_files")):
        asked = config.get("test_split") or config.get("validation_split")
        splits = [*files] if isinstance(files, dict) else ["train"]  # as `datasets` names files without a split
        if asked and asked not in splits:
            raise ValueError(
                f"it asks the split {asked!r}, but its data_files have {', '.join(splits)}: correct test_split"
            )


def data_options(options: dict[str, Any]) -> dict[str, Any]:
    """What a task gives to `load_dataset`, without what concerns the download."""
    others = ("cache_dir", "download_mode", "revision", "token", "trust_remote_code")
    return {name: value for name, value in options.items() if name not in others and value is not None}


def nearest(name: str, known: Iterable[str]) -> str:
    """For the end of a message: which names are like an unknown one."""
    found = difflib.get_close_matches(name, known, 3, 0.5)
    return f" (did you mean {' or '.join(found)}?)" if found else ""


class _Loader(yaml.SafeLoader):
    """Reads the YAML of lm-eval, without the code that it names."""


_Loader.add_constructor("!function", lambda _, node: node.value)


def _error(what: str) -> Callable[[str], StageError]:
    return lambda problem: StageError(f"{what}: {problem}")


def read(path: Path) -> dict[str, Any]:
    """The config in a file of a task or a group, with those that it includes.

    Raises:
        StageError: it is no valid YAML, or has no keys.
    """
    with explained(_error(f"{path} is no valid YAML of a task")):
        config: dict[str, Any] = yaml.load(publish.read_bytes(path), _Loader)
        if not isinstance(config, dict):
            raise ValueError("it has no keys")
        for include in reversed([*_flat([config.get("include")])]):
            config = read(path.parent / include) | config
    return config
