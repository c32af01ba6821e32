"""Show what a training has learned and what it cost, from what the other stages have written.

Reads     outputs/evaluation.json, outputs/tasks.json, outputs/history.tsv, outputs/speed.tsv,
          outputs/train_metrics.json, outputs/rows.txt, lineage.json and config.json of the model, data/model.json, and
          the records of the data stages
Writes    outputs/report/: the page that opens without a network, and its pictures
Command   python -m stages.report

It takes seconds, without torch and without a GPU.
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
