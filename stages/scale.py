"""Show what start, save, resume and export would cost with many ranks, without having them.

Reads    the section `fsdp` of params.yaml
Writes   nothing
Command  python -m stages.scale --ranks 8 64 1024 --params 70e9

The model is a Llama of about so many parameters, sharded over all ranks. Plans are made by the training's own code for
a process group that exists in name only; seconds are of this machine, without network and disks. docs/scale.md has what
they mean, and what was not shown.
"""

from typing import TYPE_CHECKING

from stages.artifacts import command
from stages.artifacts.errors import StageError
from stages.artifacts.params_file import load_params
from stages.training.params import TrainParams

if TYPE_CHECKING:
    from stages.training.many_ranks import Costs

_MAX_RANKS = 16384


def main() -> None:
    """Print a table with a column for each number of ranks."""
    parser = command.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 1024], help="numbers of ranks")
    parser.add_argument("--params", type=float, default=70e9, help="parameters of the model, such as 8e9")
    args = parser.parse_args()
    if not all(2 <= num_ranks <= _MAX_RANKS for num_ranks in args.ranks):
        raise StageError(f"--ranks is {args.ranks}: use numbers from 2 to {_MAX_RANKS}")
    if not 1e8 <= args.params <= 1e12:
        raise StageError(f"--params is {args.params:g}: use a number from 1e8 to 1e12")
    params = load_params(TrainParams)

    from stages.training import many_ranks  # imports torch

    config = many_ranks.llama(args.params)
    rates = many_ranks.measure_rates()
    found = [many_ranks.measure(config, params, rates, num_ranks) for num_ranks in args.ranks]
    print(
        f"Llama with {config.num_hidden_layers} layers of {config.hidden_size}: {found[0].num_params:,} parameters, "
        f"with optimizer {_size(found[0].model_bytes)} in fp32, sharded over all ranks"
    )
    tables = [_rows(costs) for costs in found]
    for name in tables[0]:
        print(f"{name:<46}" + "".join(f"{table[name]:>10}" for table in tables))


def _rows(costs: "Costs") -> dict[str, str]:
    return {
        "ranks": f"{costs.num_ranks:,}",
        "start:   random weights, each rank": f"{costs.random_seconds:,.1f} s",
        "step:    agreement, one all-reduce": f"{costs.step_bytes} B",
        "save:    state of each rank": _size(costs.rank_bytes),
        "         collectives, first and later": "{} and {}".format(*costs.save_collectives),
        "         plan, each rank, first save": f"{costs.plan_seconds:,.1f} s",
        "         SHA-256, each rank": f"{costs.hash_seconds:,.1f} s",
        "         to rank 0: what is where, first save": _size(costs.report_bytes),
        "         rank 0 alone: .metadata, first save": f"{costs.metadata_seconds:,.1f} s",
        "         to rank 0: random generators": _size(costs.rng_bytes),
        "         files": f"{costs.files:,}",
        "         size of .metadata": _size(costs.metadata_bytes),
        "resume:  SHA-256, each rank": f"{costs.hash_seconds:,.1f} s",
        "         collectives meanwhile": f"{costs.hash_rounds:,}",
        "         reading .metadata, each rank": f"{costs.read_metadata_seconds:,.1f} s",
        "         plan, each rank": f"{costs.load_plan_seconds:,.1f} s",
        "export:  files opened": f"{costs.model_files:,}",
        "         parts of tensors read": f"{costs.export_reads:,}",
    }


def _size(num_bytes: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} GB"


if __name__ == "__main__":
    command.run(main)
