"""Time, memory and disk use of the data stages, compared with the plain recipe.

    python -m benchmarks.data                            JSON, YAML, text, pack; 1 and 2 processes
    python -m benchmarks.data --only json pack           some of these
    python -m benchmarks.data --only pack --tokenizer MODEL/tokenizer.json

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
from benchmarks.data.corpora import make_json, make_text, make_yaml
from benchmarks.data.measuring import Measurable, measure
from benchmarks.data.recipes import recipe_json, recipe_pack, recipe_text, recipe_yaml
from benchmarks.data.stage_runs import make_pack_project, run_extract, run_pack

KINDS = ("json", "yaml", "text", "pack")


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
    args = parser.parse_args()
    if args.work and not args.work.is_dir():
        parser.error(f"--work: {args.work} is no directory: create it on a fast disk")
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        compare_all(Path(work).resolve(), args)  # stages run elsewhere


def compare_all(work: Path, args: argparse.Namespace) -> None:
    kinds = {*args.only}
    json, yaml, text = corpora = [work / name for name in ("json", "yaml", "text")]
    for corpus in corpora:
        corpus.mkdir()
    if {"json", "yaml", "pack"} & kinds:
        make_json(json, args.megabytes, args.botocore)
    if "yaml" in kinds:
        make_yaml(yaml, args.megabytes, json)
    if {"text", "pack"} & kinds:
        make_text(text, args.megabytes)
    if "json" in kinds:
        compare("JSON", json, recipe_json, run_extract)
    if "yaml" in kinds:
        compare("YAML", yaml, recipe_yaml, run_extract)
    if "text" in kinds:
        compare("text", text, recipe_text, run_extract)
    if "pack" in kinds:
        for corpus in (text, json):
            project = make_pack_project(work, corpus, args.tokenizer)
            compare(f"pack, {corpus.name}", project, recipe_pack, run_pack)


def compare(name: str, corpus: Path, recipe: Measurable, stage: Measurable) -> None:
    """Print the speed of the recipe and of the stage with one and with two processes."""
    print(f"\n| {name} | processes | MB/s | of the recipe | peak MB | disk MB | |\n" + "|---" * 7 + "|", flush=True)
    for number in (1, 2):
        results = {"(a) recipe": measure(recipe, corpus, number), "(b) ours": measure(stage, corpus, number)}
        for label, result in results.items():
            ratio = result.rate / results["(a) recipe"].rate
            print(
                f"| {label} | {number} | {result.rate:.1f} | {ratio:.1f} x | {result.peak_mb:.0f} | "
                f"{result.disk_mb:.0f} | {result.timing.note} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
