"""`dvc repro` in the current directory; its stages, torchrun and ranks are forks of a process that has imported torch.

    python -m tests.repro

So a process takes a tenth of a second to start, and not five. The data stages import no torch: they are processes as
they always are.
"""

import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from stages.ranks import handoff
from tests.pipeline import DATA_STAGES


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process. If it is `python -m MODULE` with a module of the stages, it is a fork of this one."""

    def _execute_child(self, command: Any, *options: Any) -> None:
        words = " ".join(map(str, command)).split()  # of a shell, too
        module, *arguments = words[words.index("-m") + 1 :] if "-m" in words else [""]
        if not module.startswith("stages.") or module.removeprefix("stages.") in DATA_STAGES:
            super()._execute_child(command, *options)  # type: ignore[misc]
            return
        _, preexec, _, _, _, environment, _, _, _, stdin = options[:10]
        sys.stdout.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            if options[20]:  # start_new_session
                os.setsid()
            if preexec:
                preexec()
            if stdin != -1:
                os.dup2(stdin, 0)
            os.environ.clear()
            os.environ.update(environment)
            if module == "stages.ranks.torchrun":  # as its shell does
                os.dup2(2, 0)
                log = Path(os.environ[handoff.DIRECTORY], "torchrun-here")
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            os._exit(run(module, arguments))


def run(module: str, arguments: list[str]) -> int:
    """Run a module as `python -m` does, and return the exit status."""
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    subprocess.Popen = Popen  # type: ignore[misc]

    import matplotlib.figure
    import pandas  # as pyarrow does at its first array
    import torch.distributed.run
    import transformers.models.llama.modeling_llama
    from dvc.cli import main

    import stages.evaluation.measure
    import stages.export.merged
    import stages.forward.adapter_probe
    import stages.forward.load_probe
    import stages.launching.rank

    assert matplotlib and pandas and torch and transformers and stages  # before the forks
    sys.exit(main(["repro"]))
