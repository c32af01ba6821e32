"""Faults that tests plant in a rank, each named by a line of text. The stages know nothing of them.

tests/ranks.py plants them itself; where a launcher starts the ranks, tests/faults_site/sitecustomize.py does, which
runs in each of them in the `environment` of the faults.

    kill rank 1 at step 5            when it fetches the rows of the step after step 5
    kill rank 1 in update 5          between gradient and update
    nan rank 1 at step 5             its loss is not finite
    memory rank 1 at step 5          there is none left; and it ends later than those who lose the connection
    delay rank 1 at step 5           it takes two seconds
    stop rank 1 at step 5            SIGSTOP, but only the first time that it comes there
    kill rank 0 at file 17           before it touches a file of a checkpoint for the 17th time since it wrote to one
    kill rank 0 at os.rename:.*tmp$  before the first such time whose event (see Python's audit events) and path match
    kill rank 0 in write of __0_0    by the kernel, after 100 000 bytes of a file whose path matches
    full rank 0 at state.json        the disk is full for files whose path matches
    limit rank 0 at __0_0            a file size limit of 100 000 bytes, from the file on whose path matches
    log rank 0 at FILE               the times that it touches a checkpoint, one line each
"""

import atexit
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

_TEXT = re.compile(
    r"(kill|nan|memory|delay|stop|full|limit|log) rank (\d) (at step|in update|at file|in write of|at) (\S+)"
)


def plant(text: str) -> None:
    """Plant the faults of `text`, one a line, in this process, if it is the rank that they name."""
    for line in filter(None, text.splitlines()):
        match = _TEXT.fullmatch(line)
        assert match, line
        what, rank, where, value = match.groups()
        if rank != os.environ.get("RANK"):
            continue
        if where in ("at step", "in update"):
            _plant_step(what, where, int(value))
        else:
            _plant_file(what, where, value)


def environment(text: str) -> dict[str, str]:
    """The environment of a launcher whose ranks have the faults of `text`."""
    site = Path(__file__).with_name("faults_site")
    return {"FAULT": text, "FAULT_REPO": str(site.parent.parent), "PYTHONPATH": str(site)}


def _strike(what: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "memory":
        import torch

        atexit.register(time.sleep, 1)
        torch.empty(2**52)
    elif what == "delay":
        time.sleep(2)
    elif what == "stop" and not Path("stopped").exists():
        Path("stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)


def _plant_step(what: str, where: str, step: int) -> None:
    from stages.training import step as module

    now = [-1]
    of_step, clip, loss_sum = module.Batches.of_step, module.torch.nn.utils.clip_grad_norm_, module.loss_sum

    def new_of_step(self: Any, number: int) -> Any:
        now[0] = number
        if number == step and where == "at step":
            _strike(what)
        return of_step(self, number)

    def new_clip(*args: Any, **kwargs: Any) -> Any:
        if now[0] == step and where == "in update":
            _strike(what)
        return clip(*args, **kwargs)

    def new_loss_sum(*args: Any) -> Any:
        return loss_sum(*args) * (float("nan") if now[0] == step and what == "nan" else 1)

    module.Batches.of_step = new_of_step
    module.torch.nn.utils.clip_grad_norm_ = new_clip
    module.loss_sum = new_loss_sum


def _plant_file(what: str, where: str, value: str) -> None:
    number = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal number
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            return
        path = os.fspath(args[0]) if isinstance(args[0], (str, os.PathLike)) else ""
        if event != "os.remove" and not re.search(r"/step-\d{8}(\.tmp(/|$)|$)", path):  # removed by a bare name
            return
        writes = event == "open" and args[2] & os.O_WRONLY
        number += number > 0 or event == "os.mkdir" or bool(writes)
        found = re.search(value, f"{event}:{path}")
        if what == "log":
            with open(value, "a") as file:
                file.write(f"{event}:{path}\n")
        elif where == "at file":
            if number == int(value):
                _strike(what)
        elif found and what == "kill" and where == "at":
            _strike(what)
        elif found and event == "open" and what == "full":
            if not os.path.lexists(path):
                os.symlink("/dev/full", path)
        elif found and writes:
            if what == "kill":
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    sys.addaudithook(hook)
