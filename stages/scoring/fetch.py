"""Fetch the data of public tasks into evals/public/, on a machine with internet access.

lm-eval loads the tasks as when they are asked, in this process, and each data set that it asks for is fetched at a
commit. Nothing else is: metrics and code that a task would fetch are refused here, too.
"""

import glob
import os
import tempfile
from pathlib import Path
from typing import Any

from stages.base.errors import StageError, explained
from stages.base.files import FileEntry, compare
from stages.model.license import is_license_file
from stages.scoring import network, packages, public
from stages.scoring.public import DataSet, Manifest

_CARDS = ("README.md", "dataset_infos.json", ".huggingface.yaml")
"""What `datasets` reads beside the data."""


def fetch(entries: list[str]) -> None:
    """Fetch what tasks of lm-eval need, and print how to track it.

    Args:
        entries: As in `tasks`.

    Raises:
        StageError: a task is unknown, needs more than data, or the Hub does not give them.
    """
    os.environ |= {"TQDM_DISABLE": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # it needs other servers than the Hub's, which firewalls refuse
    packages.use(packages.ensure_installed())
    # Below, as they take seconds.
    from lm_eval.evaluator import evaluate
    from lm_eval.models.dummy import DummyLM

    from stages.scoring import tasks

    with tempfile.TemporaryDirectory() as cache:

        def fetch_one(dataset: str, name: str | None, options: dict[str, Any]) -> None:
            network.is_allowed = True
            try:
                fetch_dataset(Path(cache), dataset, name, options)
            finally:
                network.is_allowed = False

        loaded = tasks.load(entries, Path(cache), fetch_one)
        for entry, each in loaded.items():  # of metrics, some fetch something when they are computed
            with tasks.explained_task(entry, "ask"):
                evaluate(DummyLM(), each.content, limit=1, bootstrap_iters=0)
            tasks.check_network(entry)
        manifest = Manifest.load()
        for entry, each in loaded.items():
            datasets = sorted({task.DATASET_PATH for task in each.tasks.values()} & {*manifest.datasets})
            names = {entry, *each.tasks, *each.content["groups"]}
            manifest.tasks.update((name, datasets) for name in names if not public.is_file(name))
        manifest.write()
    print(f"score: {', '.join(entries)}: all is in {public.PUBLIC}/. To keep it:")
    print(f"  dvc add {public.PUBLIC}/*--*\n  git add {public.PUBLIC}")


def fetch_dataset(cache: Path, dataset: str, name: str | None, options: dict[str, Any]) -> None:
    """Fetch the files of a config, and add them to the manifest.

    A data set stays at the commit that was fetched first, as its configs are in one directory.

    Args:
        cache: A directory for what `datasets` fetches to find out which files these are.
        dataset: Its name.
        name: Of the config; None: the default one.
        options: What else a task gives to `load_dataset`.

    Raises:
        StageError: the Hub does not give them.
    """
    import datasets
    from huggingface_hub import HfApi, snapshot_download

    manifest, chosen = Manifest.load(), public.data_options(options)
    known = manifest.datasets.get(dataset, DataSet(options.get("revision") or "main", {}, {}))
    page = f"https://huggingface.co/datasets/{dataset}"

    def find_files(name: str | None, **chosen: Any) -> tuple[Any, dict[str, list[str]]]:
        builder = datasets.load_dataset_builder(dataset, name, revision=commit, cache_dir=str(cache), **chosen)
        files = builder.config.data_files.items()
        return builder, {str(split): [url.partition(f"@{commit}/")[2] for url in urls] for split, urls in files}

    # Without the text of the error, which may quote the token.
    with explained(
        lambda problem: StageError(
            f"the Hub does not give {dataset} ({problem.partition(':')[0]}): look at {page}, log in there and set "
            "HF_TOKEN if it is gated or private, and check HF_ENDPOINT, HF_HUB_OFFLINE and the network"
        )
    ):
        info = HfApi().dataset_info(dataset, revision=known.commit, files_metadata=True)
    commit, listed = str(info.sha), {file.rfilename: file for file in info.siblings or ()}
    with explained(lambda problem: StageError(f"{dataset} cannot be fetched: {problem}: look at {page}")):
        builder, files = find_files(name, **chosen)
        configs = {**known.configs, public.config_key(name, chosen): files}
        first = next(iter(builder.builder_configs), None)  # from which `datasets` infers the format of all
        if first and first not in configs:
            configs[first] = find_files(first)[1]
        names = {file for config in configs.values() for files in config.values() for file in files}
        names |= {file for file in listed if file in _CARDS or is_license_file(file)}
        size = sum(listed[file].size or 0 for file in names)
        print(f"score: fetching {dataset} at {commit[:12]}: {len(names)} files, {size / 1e6:,.1f} MB", flush=True)
        source = public.directory(dataset)
        patterns = [glob.escape(file) for file in names]
        snapshot_download(dataset, repo_type="dataset", revision=commit, local_dir=source, allow_patterns=patterns)
    entries = {file: FileEntry.of(source / file) for file in sorted(names)}
    for file, entry in entries.items():
        if lfs := listed[file].lfs:
            compare(source / file, lfs.sha256, entry.sha256, "remove it, and fetch it again")
    manifest.datasets[dataset] = DataSet(commit, dict(sorted(configs.items())), entries)
    manifest.write()
