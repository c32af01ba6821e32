"""The tasks of lm-evaluation-harness: found by name or file, loaded from data of this machine alone, and checked."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import jinja2.meta
import lm_eval.api.task
from lm_eval.tasks import TaskManager
from lm_eval.utils import apply_template

from stages.base import publish
from stages.base.errors import StageError, explained, one_line
from stages.ranks.torch_errors import is_of_ranks
from stages.scoring import network, public
from stages.scoring.public import EVALS

Fetch = Callable[[str, str | None, dict[str, Any]], None]
"""Fetches a data set: its name, that of its config, and what else a task gives to `load_dataset`."""
FEWSHOT_SEED = 1234
"""That of lm-eval's own command."""
_ALLOWED = "allow_truncation"
"""In the `metadata` of a task: whether its requests may be cut on the left."""


class Loaded(NamedTuple):
    """An entry of `tasks`."""

    tasks: dict[str, Any]
    """Objects of lm-eval that ask questions, by name."""
    content: dict[str, Any]
    """Of TaskManager.load: these and the groups that they are in."""
    digest: str
    """Of all that decides what is asked and what is right."""

    def allows_truncation(self) -> bool:
        """Whether all of the tasks say so."""
        return all((task.config.metadata or {}).get(_ALLOWED) for task in self.tasks.values())


def load(entries: list[str], cache: Path, fetch: Fetch | None = None) -> dict[str, Loaded]:
    """Load and check the entries of `tasks`.

    Args:
        entries: Names of lm-eval, or files in evals/, which `public.check` has accepted.
        cache: An empty directory. A cache that stays takes a file of the same path and time for the same file.
        fetch: Fetches data that are not here; None: they are refused.

    Raises:
        StageError: an entry is unknown, it needs more than data, they are not here, or a question has no answer.
    """
    lm_eval.api.task.datasets = local = _LocalDatasets(cache, fetch)
    # The tasks of lm-eval itself are 13,000 files.
    manager = TaskManager(include_path=str(EVALS), include_defaults=not all(map(public.is_file, entries)))
    loaded: dict[str, Loaded] = {}
    for entry in entries:
        if not public.is_file(entry) and entry not in manager.task_index:
            others = public.nearest(entry, manager.all_tasks)
            raise StageError(f"tasks: {entry!r} is neither a task of lm-eval nor a file{others}")
        spec = entry
        if public.is_file(entry) and isinstance((config := public.read(Path(entry))).get("task"), list):
            spec = config["group"]  # lm-eval takes the list of tasks in the file for its name
        with explained_task(entry, "load"):
            try:
                content = manager.load([spec])
            except jinja2.UndefinedError as error:  # lm-eval asks the first question to try a task
                raise StageError(f"tasks: {entry}: {error}: its columns are {', '.join(local.columns)}") from None
            except (IndexError, StopIteration) as error:
                problem = f"{type(error).__name__} {one_line(error)}".strip()
                hint = "its first row may be missing, or have a wrong answer or an empty choice"
                raise StageError(f"tasks: lm-eval cannot load {entry} ({problem}): {hint}") from None
            check_network(entry)
            for name, task in content["tasks"].items():
                if twice := [other for other in loaded if name in loaded[other].tasks]:
                    raise StageError(f"tasks: {name} is in {twice[0]} and {entry}: rename it in one, or leave one out")
                check(name, task)
            loaded[entry] = Loaded(content["tasks"], content, digest(content))
    return loaded


@contextmanager
def explained_task(entry: str, what: str) -> Iterator[None]:
    """Have all that lm-eval raises as it loads or asks an entry of `tasks` be a StageError."""
    try:
        with explained(lambda problem: StageError(f"tasks: lm-eval cannot {what} {entry}: {problem}"), is_of_ranks):
            yield
    except StageError as error:
        if isinstance(error.__context__, ModuleNotFoundError):  # such as evaluate, which has metrics, and nltk
            raise StageError(
                f"tasks: {entry} needs the package {error.__context__.name}, which would fetch more than data, or run "
                "what the model writes: leave it out"
            ) from None
        raise


def check_network(entry: str) -> None:
    """Raise StageError if other machines were asked for something, whatever came of that."""
    if network.refused:
        raise StageError(
            f"tasks: {entry} asks the network for {network.refused[0]}, and score uses files alone: leave it out"
        )


class _LocalDatasets:
    """In place of the module `datasets` in lm-eval: what it loads is here, or refused without a look-up."""

    def __init__(self, cache: Path, fetch: Fetch | None) -> None:
        self._cache, self._fetch = str(cache), fetch
        self.columns: list[str] = []
        """Of the data set that was loaded last."""

    def __getattr__(self, name: str) -> Any:
        return getattr(datasets, name)

    def load_dataset(self, path: str, name: str | None = None, **options: Any) -> Any:
        """As in `datasets`; a name of the Hub is a directory in evals/public/."""
        chosen = public.data_options(options)
        files = public.local_files(path, chosen)
        source = path if files else str(self._find(path, name, chosen, options))
        try:
            loaded = datasets.load_dataset(source, name, cache_dir=self._cache, **chosen)
        except datasets.exceptions.DatasetGenerationError as error:
            raise StageError(f"{', '.join(files) or source} cannot be read: {one_line(error.__cause__)}") from None
        splits = loaded.values() if isinstance(loaded, dict) else [loaded]
        self.columns = sorted({column for split in splits for column in split.column_names})
        return loaded

    def _find(self, dataset: str, name: str | None, chosen: dict[str, Any], options: dict[str, Any]) -> Path:
        try:
            return public.find(dataset, name, chosen)
        except StageError:
            if self._fetch is None:
                raise
        self._fetch(dataset, name, options)
        return public.find(dataset, name, chosen)


def digest(content: dict[str, Any]) -> str:
    """SHA-256 of what decides the questions of tasks and their answers: config, code beside it, and each row.

    And the configs of the groups that they are in.
    """
    total = hashlib.sha256()
    for path in sorted(EVALS.rglob("*.py")):
        total.update(publish.sha256_file(path).encode())
    for name, group in sorted(content["groups"].items()):
        total.update(_canonical([name, group.to_dict(), group.child_names]))
    for name, task in sorted(content["tasks"].items()):
        total.update(_canonical([name, task.config.to_dict()]))
        for _, rows in _rows(task):
            for row in rows:
                total.update(_canonical(row))
    return total.hexdigest()


def _canonical(value: Any) -> bytes:
    # Not str of a function, which has its address. Its code is in a file that counts, or is that of lm-eval.
    return json.dumps(value, sort_keys=True, default=lambda other: getattr(other, "__qualname__", repr(other))).encode()


def _rows(task: Any) -> Iterator[tuple[str | None, Iterable[dict[str, Any]]]]:
    """What is asked, and what is shown as answered examples, each with the name of its split; None: of no data set."""
    config = task.config
    yield config.test_split or config.validation_split, task.eval_docs
    if config.num_fewshot:
        yield _split_of_examples(task), task.fewshot_docs() or []


def _split_of_examples(task: Any) -> str | None:
    config, shown = task.config, task.fewshot_cfg
    if shown.samples is not None and shown.split is None:
        return None
    split: str | None = shown.split or config.training_split or config.validation_split or config.test_split
    return split


def check(name: str, task: Any) -> None:
    """Check that each question of a task has an answer that can be right.

    Raises:
        StageError: with the file and the row.
    """
    if task.OUTPUT_TYPE is None or getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
        raise StageError(f"tasks: {name} runs code that the model writes, or needs pictures or sound: leave it out")
    config, text = task.config, task.config.doc_to_text
    if isinstance(text, str) and text.isidentifier() and text not in task.features:  # lm-eval would ask this word
        columns = ", ".join(sorted(task.features))
        raise StageError(f"tasks: {name}: doc_to_text: {text} is no column: there are {columns}")
    asked = config.test_split or config.validation_split
    if config.num_fewshot and _split_of_examples(task) == asked and task.fewshot_cfg.split != config.test_split:
        # Where the last two are the same, lm-eval leaves the question itself out of its examples.
        raise StageError(
            f"tasks: {name}: the examples before a question are rows that are asked, and may have its own answer: "
            f"write `test_split: {asked}` and `fewshot_split: {asked}`, which leaves the question out, or name another "
            "split"
        )
    if callable(config.process_results):  # it compares in a way of its own
        return
    if lacking := [metric for metric, function in task._metric_fn_list.items() if function is None]:
        raise StageError(f"tasks: {name} uses {lacking[0]}, which is no metric of lm-eval: name another one")
    fields = [*_fields(task, config.doc_to_target), *_fields(task, config.doc_to_choice)]
    for split, rows in _rows(task):
        for number, row in enumerate(rows, start=1):
            if problem := _problem(task, row, fields):
                raise StageError(f"tasks: {name}: {_place(task, split)}, row {number}: {problem}: correct or remove it")


def _problem(task: Any, row: dict[str, Any], fields: list[str]) -> str | None:
    if empty := [field for field in fields if _is_empty(row.get(field))]:
        return f"{', '.join(empty)} is missing or empty"
    target = task.doc_to_target(row)
    if _is_empty(target):
        return "the answer is empty"
    if task.OUTPUT_TYPE == "multiple_choice":
        choices = task.doc_to_choice(row)
        right = task.doc_to_text(row) if task.multiple_input else target
        for each in right if isinstance(right, list) else [right]:
            if not (each in choices if isinstance(each, str) else 0 <= each < len(choices)):
                return f"the answer {each!r} is none of the choices {choices}, nor their number, from 0"
    return None


def passage(task: Any, row: dict[str, Any]) -> str:
    """A question and its right answer, without examples and the words of the template."""
    template, text = task.config.doc_to_text, task.doc_to_text(row)
    if isinstance(template, str) and "{%" not in template and (values := re.findall(r"{{.*?}}", template)):
        text = apply_template("\n".join(values), row)
    target = task.doc_to_target(row)
    found = [text, *(target if isinstance(target, list) else [target])]
    choices = task.doc_to_choice(row) if task.OUTPUT_TYPE == "multiple_choice" else {}
    return "\n".join(str(choices[each] if choices and isinstance(each, int) else each) for each in found)


def _fields(task: Any, template: Any) -> list[str]:
    """The columns that a template of a task reads."""
    if not isinstance(template, str):
        return []
    if template in task.features:
        return [template]
    return sorted(jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(template)) & {*task.features})


def _is_empty(value: Any) -> bool:
    if isinstance(value, list):
        return not value or any(map(_is_empty, value))
    return value is None or (isinstance(value, str) and not value.strip())


def _place(task: Any, split: str | None) -> str:
    if split is None:
        return "the samples of its fewshot_config"
    files = (task.config.dataset_kwargs or {}).get("data_files")
    files = files.get(split) if isinstance(files, dict) else files
    files = files[0] if isinstance(files, list) and len(files) == 1 else files
    return files if isinstance(files, str) else f"{task.config.dataset_path}, split {split}"
