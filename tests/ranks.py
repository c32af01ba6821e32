"""Ranks of a training without torchrun, as forks of a process that has imported torch: one second, and not ten.

A request is a line of JSON on stdin: `directory` of the project, `world_size`, `faults`, `environment`, and `output`,
the file that the ranks print into. The answer is two lines: the ids of their processes, then their exit statuses.
"""

import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from stages.training.process import STOP_SIGNALS
from tests import faults


def main() -> None:
    import transformers.models.llama.modeling_llama

    import stages.train

    assert transformers.models.llama.modeling_llama and stages.train  # for the forks
    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pids = [_fork(request, rank, port) for rank in range(request["world_size"])]
        print(json.dumps(pids), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


def _fork(request: dict[str, Any], rank: int, port: int) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as the launcher does
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return pid
    status: Any = 1
    try:
        os.chdir(request["directory"])
        size = str(request["world_size"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **request["environment"]}  # fmt: skip
        descriptor = os.open(request["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        faults.plant(request["faults"])
        status = _train()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _train() -> Any:
    from stages import train
    from stages.artifacts import command, params
    from stages.training import run

    Path(run.describe(params.load(train.TrainParams)).directory).mkdir(parents=True, exist_ok=True)  # as the launcher
    sys.argv = ["stages.train"]
    try:
        command.run(train.main)
    except SystemExit as end:
        return end.code or 0
    return 0


if __name__ == "__main__":
    main()
