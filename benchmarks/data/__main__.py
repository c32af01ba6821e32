"""Time, memory and disk use of the data stages, compared with the plain recipe and with parsing or encoding alone.

    python -m benchmarks.data                            JSON, YAML, text, pack, records, memory; 1 and 2 processes
    python -m benchmarks.data --only json pack           some of these
    python -m benchmarks.data --only pack --tokenizer MODEL/tokenizer.json
    python -m benchmarks.data --million-files 1000000    only organize, on so many small files
    python -m benchmarks.data --noop 100000              `dvc repro` with nothing to do, compared with bare DVC

records: the text of each record of one file, compared with `load_dataset` and `map`; (c) is `extract` without the rule.

The JSON is botocore's service descriptions (`pip install .[bench]`, or a directory passed as --botocore), the YAML is
the same documents dumped as YAML, the text is the sources and notes of the installed Python packages. A corpus smaller
than --megabytes is extended with copies under other names; the first line of its table shows how many times it was
used. Each measurement has its own process and its own project directory; the time counts from when everything is
imported to when the result is on the disk; memory is the peak of the sum over its processes, and pages that they share
are counted in each. All numbers of a table come from one run, one after the other.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks import REPO
from benchmarks.data.ceilings import ceiling_json, ceiling_pack, ceiling_text, ceiling_yaml
from benchmarks.data.corpora import make_json, make_records, make_text, make_yaml
from benchmarks.data.many_files import time_noop, time_organize
from benchmarks.data.recipes import recipe_json, recipe_pack, recipe_records, recipe_text, recipe_yaml
from benchmarks.data.stage_runs import make_pack_project, run_extract, run_extract_records, run_pack
from benchmarks.data.tables import compare, compare_memory

KINDS = ("json", "yaml", "text", "pack", "records", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--megabytes", type=int, default=100, help="size of each corpus, at least")
    parser.add_argument("--botocore", type=Path, help="directory of the package, if it is not installed")
    parser.add_argument("--work", type=Path, help="directory for temporary files, on a fast disk")
    parser.add_argument(
        "--tokenizer", type=Path, default=REPO / "models/tiny-llama/tokenizer.json", help="tokenizer.json for pack"
    )
    parser.add_argument("--million-files", type=int, metavar="N")
    parser.add_argument("--noop", type=int, metavar="N")
    args = parser.parse_args()
    if args.work and not args.work.is_dir():
        parser.error(f"--work: {args.work} is no directory: create it on a fast disk")
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        if args.million_files:
            time_organize(Path(work), args.million_files)
        if args.noop:
            time_noop(Path(work), args.noop)
        if not args.million_files and not args.noop:
            compare_all(Path(work), args)


def compare_all(work: Path, args: argparse.Namespace) -> None:
    kinds = {*args.only}
    json, yaml, text = corpora = [work / name for name in ("json", "yaml", "text")]
    for corpus in corpora:
        corpus.mkdir()
    if {"json", "yaml", "pack", "memory"} & kinds:
        make_json(json, args.megabytes, args.botocore)
    if "yaml" in kinds:
        make_yaml(yaml, args.megabytes, json)
    if {"text", "pack", "records"} & kinds:
        make_text(text, args.megabytes)
    if "json" in kinds:
        compare("JSON", json, recipe_json, run_extract, ceiling_json)
    if "yaml" in kinds:
        compare("YAML", yaml, recipe_yaml, run_extract, ceiling_yaml)
    if "text" in kinds:
        compare("text", text, recipe_text, run_extract, ceiling_text)
    if "pack" in kinds:
        for corpus in (text, json):
            project = make_pack_project(work, corpus, args.tokenizer)
            compare(f"pack, {corpus.name}", project, recipe_pack, run_pack, ceiling_pack)
    if "records" in kinds:  # the last column compares with `extract` without the rule
        for suffix in (".jsonl", ".parquet"):
            corpus = work / f"records{suffix}"
            corpus.mkdir()
            make_records(corpus, args.megabytes, text, suffix)
            compare(f"records, {suffix}", corpus, recipe_records, run_extract_records, run_extract)
    if "memory" in kinds:
        compare_memory(work, json)


if __name__ == "__main__":
    main()
