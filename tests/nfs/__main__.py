"""Run the tests of this directory on NFS 4.2, in a guest with its own kernel: `python -m tests.nfs [pytest's options]`.

The kernel is User Mode Linux, a program: it needs no virtualization, and no rights but those to read what it uses. Its
Python and packages are those of this environment.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.project import BIN, REPO

HERE = Path(__file__).parent
NEEDED = {"linux.uml": "user-mode-linux", "rpc.nfsd": "nfs-kernel-server", "mount.nfs": "nfs-common",
          "modprobe": "kmod", "ip": "iproute2", "mkfs.ext4": "e2fsprogs"}  # fmt: skip
"""Commands, with Debian's packages."""


def main() -> int:
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [package for name, package in NEEDED.items() if not shutil.which(name, path=path)]:
        print(f"tests/nfs is skipped: it needs Debian's packages {' '.join(missing)}")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        disk = Path(directory) / "disk"
        disk.touch()
        os.truncate(disk, 4 << 30)
        environment = {**os.environ, "TMPDIR": "/dev/shm"}  # for the memory of the guest
        if shutil.which("cc"):
            environment["LD_PRELOAD"] = library = f"{directory}/ptrace.so"
            subprocess.run(["cc", "-O", "-shared", "-fPIC", "-o", library, HERE / "ptrace.c"], check=True)
        guest = {"BIN": BIN, "REPO": REPO, "HOST": directory}
        (Path(directory) / "options").write_text(shlex.join(sys.argv[1:]))
        kernel = subprocess.Popen(
            ["linux.uml", "mem=6G", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "quiet",
             f"ubdb={disk}", f"init={HERE / 'init.sh'}", "con=null", "con0=null,fd:1",
             *(f'{name}="{value}"' for name, value in guest.items())],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,  # a console can be no file
        )  # fmt: skip
        assert kernel.stdout
        for line in kernel.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        kernel.wait()
        status = Path(directory) / "status"
        return int(status.read_text()) if status.exists() else 1


if __name__ == "__main__":
    sys.exit(main())
