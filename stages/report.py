"""Show what a training has learned and what it cost, on a page that opens without a network.

Reads    outputs/*.json, outputs/*.tsv, outputs/rows.txt, the records in data/, and lineage.json of the model
Writes   outputs/report/: the page and its pictures
Example  python -m stages.report
"""

from dataclasses import dataclass

from stages.base import command, outputs, publish
from stages.base.outputs import ExperimentName
from stages.base.params_file import load_params
from stages.base.summary import table


@dataclass(frozen=True)
class ReportParams:
    """The leaves of `params.yaml` that the page shows."""

    experiment_name: ExperimentName
    """Name of the directory under outputs/, and title of the page."""
    raw_dir: str
    """Where the raw files are: what `organize` records is the same on each machine."""


def main() -> None:
    """Run the stage."""
    command.parser(__doc__).parse_args()
    params = load_params(ReportParams)
    from stages.reporting import page  # here, as matplotlib takes a second to import

    with publish.lock(outputs.REPORT), publish.directory(outputs.REPORT) as directory:
        page.write(directory, params.experiment_name, params.raw_dir)
    path = outputs.REPORT / page.PAGE
    print(table((path.stat().st_size, "bytes", f"{path}: open it in a browser")))


if __name__ == "__main__":
    command.run(main)
