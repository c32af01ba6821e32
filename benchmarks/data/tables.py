"""What is measured about each format, printed as Markdown tables."""

from pathlib import Path

from benchmarks.data.corpora import MB, files_in, link_all
from benchmarks.data.measuring import Measurable, measure
from benchmarks.data.stage_runs import run_extract


def compare(name: str, corpus: Path, recipe: Measurable, stage: Measurable, ceiling: Measurable) -> None:
    """Print the speed of the recipe, the stage and the ceiling with one and with two processes."""
    print(f"\n| {name} | processes | MB/s | of the recipe | of the ceiling | peak MB | disk MB | |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    functions = {"(a) recipe": recipe, "(b) ours": stage, "(c) ceiling": ceiling}
    for num_processes in (1, 2):
        results = {label: measure(function, corpus, num_processes) for label, function in functions.items()}
        for label, result in results.items():
            columns = [
                label, str(num_processes), f"{result.rate:.1f}", f"{result.rate / results['(a) recipe'].rate:.1f} x",
                f"{result.rate / results['(c) ceiling'].rate:.0%}", f"{result.peak_mb:.0f}", f"{result.disk_mb:.0f}",
                result.timing.note,
            ]  # fmt: skip
            print(f"| {' | '.join(columns)} |", flush=True)


def compare_memory(work: Path, json_corpus: Path) -> None:
    """Print the peak memory of `extract` for a corpus and for one ten times as large."""
    peaks = []
    for times in (1, 10):
        corpus = work / f"memory-{times}"
        corpus.mkdir()
        for copy in range(times):
            link_all(files_in(json_corpus), corpus, prefix=f"{copy}-")
        result = measure(run_extract, corpus, 1)
        peaks.append(result.peak_mb)
        print(f"\nmemory: {result.timing.num_bytes / MB:.0f} MB of JSON, 1 process: peak {result.peak_mb:.0f} MB")
    print(f"memory: ten times the corpus, {peaks[1] / peaks[0]:.2f} x the peak")
