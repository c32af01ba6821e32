"""Faults that tests inject into a rank, each described by a line of text. The stages do not know them.

tests/ranks.py injects them itself. Where a launcher starts the ranks, tests/faults_site/sitecustomize.py does: Python
runs it at the start of each rank, given the `environment` of the faults.

    kill rank 1 at step 5            when it fetches the rows of the step after step 5
    kill rank 1 in update 5          between gradient and update
    nan rank 1 at step 5             its loss is not finite
    memory rank 1 at step 5          it is out of memory, and exits after the ranks that lose the connection
    delay rank 1 at step 5           the step needs two seconds more
    stop rank 1 at step 5            SIGSTOP, only the first time that it reaches the step
    kill rank 0 at file 17           before its 17th access to a file of a checkpoint, counted from the first write
    kill rank 0 at os.rename:.*tmp$  before the first access whose event (see Python's audit events) and path match
    kill rank 0 in write of model/__0_0  by the kernel, after 100 000 bytes of a file whose path matches
    full rank 0 at state.json        the disk is full for files whose path matches
    limit rank 0 at model/__0_0        a file size limit of 100 000 bytes, from the first file whose path matches
    EROFS rank 0 at open:.*model/__0_0 the first such access fails with this error of the operating system
    directory rank 1 at PATH         it runs in another directory, so it reads other files
    log rank 0 at FILE               writes each access to a checkpoint into FILE, one a line
    count rank 0 at FILE             writes each collective but FSDP's into FILE: its name and its bytes, one a line
"""

import atexit
import errno
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

_TEXT = re.compile(
    r"(kill|nan|memory|delay|stop|full|limit|directory|log|count|E[A-Z]+) rank (\d) "
    r"(at step|in update|at file|in write of|at) (\S+)"
)


def inject(text: str) -> None:
    """Inject the faults of `text`, one a line, into this process, if it is the rank that they name."""
    for line in filter(None, text.splitlines()):
        match = _TEXT.fullmatch(line)
        assert match, line
        what, rank, where, value = match.groups()
        if rank != os.environ.get("RANK"):
            continue
        if where in ("at step", "in update"):
            _inject_step(what, where, int(value))
        elif what == "directory":
            os.chdir(value)
        elif what == "count":
            _count_collectives(value)
        else:
            _inject_file(what, where, value)


def environment(text: str) -> dict[str, str]:
    """The environment of a launcher whose ranks have the faults of `text`."""
    site = Path(__file__).with_name("faults_site")
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]  # where packages may lie that Python lacks
    return {"FAULT": text, "FAULT_REPO": str(site.parent.parent), "PYTHONPATH": os.pathsep.join(paths)}


def _cause(what: str) -> None:
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


def _inject_step(what: str, where: str, step: int) -> None:
    from stages.training import step as step_module
    from stages.training.loader import BatchLoader

    now = [-1]
    step_batches, training_losses = BatchLoader.step_batches, step_module.training_losses
    clip = step_module.torch.nn.utils.clip_grad_norm_

    def new_step_batches(self: Any, number: int) -> Any:
        now[0] = number
        if number == step and where == "at step":
            _cause(what)
        return step_batches(self, number)

    def new_clip(*args: Any, **kwargs: Any) -> Any:
        if now[0] == step and where == "in update":
            _cause(what)
        return clip(*args, **kwargs)

    def new_training_losses(*args: Any) -> Any:
        loss, router_loss = training_losses(*args)
        return loss * (float("nan") if now[0] == step and what == "nan" else 1), router_loss

    BatchLoader.step_batches = new_step_batches
    step_module.torch.nn.utils.clip_grad_norm_ = new_clip
    step_module.training_losses = new_training_losses


def _count_collectives(file: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    def counted(name: str, collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            num_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            with open(file, "a") as log:
                log.write(f"{name} {num_bytes}\n")
            return collective(*args, **kwargs)

        return call

    for name in ("all_reduce", "broadcast", "gather", "all_gather", "scatter", "barrier"):
        collective = counted(name, getattr(dist, name))
        for module in (dist, distributed_c10d):  # torch's own functions for objects use the second
            setattr(module, name, collective)


def _inject_file(what: str, where: str, value: str) -> None:
    number = 0
    failed: list[str] = []
    if where == "in write of":  # here, in the main thread: the file may be written in another one
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal number
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            return
        path = os.fspath(args[0]) if isinstance(args[0], (str, os.PathLike)) else ""
        is_written = event == "os.remove" or re.search(r"/step-\d{8}(\.tmp(/|$)|$)", path)  # removals have bare names
        if not is_written and not what.startswith("E"):
            return
        writes = event == "open" and args[2] & os.O_WRONLY
        number += number > 0 or event == "os.mkdir" or bool(writes)
        found = re.search(value, f"{event}:{path}")
        if what == "log":
            with open(value, "a") as file:
                file.write(f"{event}:{path}\n")
        elif where == "at file":
            if number == int(value):
                _cause(what)
        elif found and what == "kill" and where == "at":
            _cause(what)
        elif what.startswith("E"):
            if found and what not in failed:
                failed.append(what)
                raise OSError(getattr(errno, what), os.strerror(getattr(errno, what)), path)
        elif found and event == "open" and what == "full":
            if not os.path.lexists(path):
                os.symlink("/dev/full", path)
        elif found and writes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    sys.addaudithook(hook)
