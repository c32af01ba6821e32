"""Ranks of a training without torchrun, as forks of a process that has imported torch: one second instead of ten.

A request is a line of JSON on stdin: `directories` of the project, one for each rank, `faults`, `environment`,
`output`, the file that the ranks print into, and `call`, a file with what they call instead of a training. The answer
is two lines: the ids of their processes, then their exit statuses.
"""

import gc
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stages.ranks.handoff import DIRECTORY
from tests import faults
from tests.project import REPO, Project, read_once


class Ranks:
    """Starts trainings: the client of this module, which runs as a server."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._start_server()

    def _start_server(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.ranks"], cwd=REPO, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._is_running = False

    def start(
        self, project: Project, faults: str = "", world_size: int = 2, nodes: Sequence[Path] = (),
        **environment: str | None,
    ) -> list[int]:  # fmt: skip
        """Start a training, and return the ids of its processes.

        Args:
            project: What to train.
            faults: As `tests.faults` describes them.
            world_size: How many ranks, on one node.
            nodes: Instead, a rank on each of these: where it has the project.
            environment: Of all ranks; a variable of value None is not set.
        """
        directories = [str(path) for path in nodes or [project.path] * world_size]
        if nodes:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = str(free.getsockname()[1])
            environment |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return self._request(directories=directories, faults=faults, environment=environment)

    def _request(self, **request: Any) -> list[int]:
        if self._is_running:  # a test ran out of time: its answer would be taken for the next one's
            self.restart()
        self.output = self.directory / "output.txt"
        self.output.unlink(missing_ok=True)
        request["output"] = str(self.output)
        assert self._server.stdin and self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        self._is_running = True
        pids: list[int] = json.loads(self._server.stdout.readline())
        return pids

    def wait(self) -> tuple[list[int], str]:
        """The exit statuses of the training, and what it printed."""
        assert self._server.stdout
        statuses = json.loads(self._server.stdout.readline())
        self._is_running = False
        return statuses, self.output.read_text()

    def run(self, project: Project, faults: str = "", status: int | None = 0, **options: Any) -> str:
        """Run a training to its end; `status` is that of the rank with the faults, or of all."""
        self.start(project, faults, **options)
        statuses, output = self.wait()
        victim = re.search(r"rank (\d)", faults)
        ended = [statuses[int(victim[1])]] if victim else statuses
        assert set(ended) == {status}, (statuses, output)
        return output

    def call(self, function: Callable[..., object], *arguments: Any, world_size: int = 2) -> None:
        """Call a function of a module on ranks in the current directory, with the number of the rank first."""
        call = self.directory / "call.pickle"
        call.write_bytes(pickle.dumps((function, arguments)))
        directories = [str(Path.cwd())] * world_size
        self._request(directories=directories, faults="", environment={}, call=str(call), path=sys.path)
        statuses, output = self.wait()
        assert not any(statuses), output

    def restart(self) -> None:
        self.close()
        self._start_server()

    def close(self) -> None:
        self._server.kill()
        self._server.communicate()


def main() -> None:
    gc.disable()  # until all is imported, which then stays
    import pandas  # as pyarrow does at its first array
    import transformers.models.llama.modeling_llama

    import stages.launching.rank
    from stages.base import code
    from stages.base.params_file import load_params
    from stages.checkpointing.run import DECIDING, WEIGHTS
    from stages.training.params import TrainParams

    assert pandas and transformers.models.llama.modeling_llama and stages.launching.rank  # before the forks
    with read_once():
        code.digest(*WEIGHTS, within=DECIDING)
        load_params(TrainParams)
        gc.freeze()
        gc.enable()
        for line in sys.stdin:
            request = json.loads(line)
            with tempfile.TemporaryDirectory() as directory:
                pids = [_fork(request, rank, directory) for rank in range(len(request["directories"]))]
                print(json.dumps(pids), flush=True)
                print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


def _fork(request: dict[str, Any], rank: int, directory: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status: Any = 1
    try:
        os.chdir(request["directories"][rank])
        size = str(len(request["directories"]))
        environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
                       DIRECTORY: directory, "SLURMD_NODENAME": f"n{rank + 1}", **request["environment"]}  # fmt: skip
        os.environ |= {name: value for name, value in environment.items() if value is not None}
        descriptor = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        faults.inject(request["faults"])
        status = _call(request, rank) if "call" in request else _train()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _call(request: dict[str, Any], rank: int) -> int:
    sys.path[:] = request["path"]
    function, arguments = pickle.loads(Path(request["call"]).read_bytes())
    function(rank, *arguments)
    return 0


def _train() -> Any:
    from stages import train
    from stages.base import command

    command._other_code = lambda: None  # type: ignore[assignment]  # the project may have a copy of this code
    sys.argv = ["stages.train"]
    try:
        command.run(train.main)
    except SystemExit as end:
        if isinstance(end.code, str):  # Python prints it, where nothing catches it
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


if __name__ == "__main__":
    main()
