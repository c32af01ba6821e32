"""Run the pipeline without a network and under a tracer, and write which addresses it asked for.

    python -m scripts.certify [-o airgap.json]      `dvc repro` in a fresh copy of the project, so that every stage runs
    python -m scripts.certify [-o FILE] COMMAND...  a command in this directory

The command runs in a network namespace (`unshare -rn`) whose only interface is loopback, so nothing leaves the machine,
and strace notes each attempt to connect, to send and to bind. Allowed are loopback, UNIX sockets and the sockets of the
kernel. Any other address is an error, and so is port 53, at which names are looked up, on every address. Programs that
would look up names for the command through a UNIX socket, such as nscd, are out of its reach.

airgap.json has neither clock times nor ports: the same run gives the same file. The copy is made below outputs/, with
a DVC cache of its own, and deleted at the end. A stage of dvc.yaml that did not run in it is an error.
"""

import argparse
import ipaddress
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from stages.base import command, outputs, publish
from stages.base.errors import StageError
from stages.base.params_file import PARAMS_FILE, PIPELINE_FILE

CERTIFICATE = Path("airgap.json")
HIDDEN_SOCKETS = (
    "/var/run/nscd/socket",
    "/var/run/nslcd/socket",
    "/var/run/avahi-daemon/socket",
    "/var/run/dbus/system_bus_socket",
    "/var/run/systemd/resolve/io.systemd.Resolve",
    "/var/lib/sss/pipes/nss",
)
"""Of programs that look up names for others: the network namespace cuts off no UNIX socket that has a path."""
_DNS = "53"
_LOCAL_FAMILIES = ("AF_UNIX", "AF_NETLINK", "AF_UNSPEC", "AF_ALG")
"""Other processes of this machine, and the kernel; AF_UNSPEC disconnects."""
_NAMESPACES = ["unshare", "-rnm", "--propagation", "unchanged"]
# What connects to a hidden socket is refused, and then looks up the name by itself, which strace notes.
_START = 'ip link set lo up; for f in $0; do [ ! -e $f ] || mount --bind /dev/null "$(realpath $f)"; done; exec "$@"'
_STRACE = ["strace", "--seccomp-bpf", "-fq", "-s256", "-e", "trace=execve,connect,bind,sendto,sendmsg,sendmmsg"]
"""All other calls run at full speed."""
_PAYLOAD = re.compile(r'(^\d+, |iov_base=)"(?:[^"\\]|\\.)*"')
"""What is sent, which may look like an address."""
_ADDRESS = re.compile(r'\{sa_family=(\w+)((?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*)')


def main() -> None:
    """Write the certificate; exit status 2 if anything was asked for that is not allowed."""
    parser = command.parser(__doc__)
    parser.add_argument("-o", "--output", type=Path, default=CERTIFICATE, metavar="FILE")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="default: `dvc repro` in a fresh copy")
    arguments = parser.parse_args()
    check_tools()
    if arguments.command:
        certificate = certify(arguments.command, Path())
        wanted = set()
    else:
        for name in ("DVC_ROOT", "CHECKPOINT_ROOT"):  # with these, stages would find earlier results
            os.environ.pop(name, None)
        with fresh_copy(Path.cwd()) as copy:
            certificate = certify(["dvc", "repro"], copy)
        wanted = set(yaml.safe_load(PIPELINE_FILE.read_text(encoding="utf-8"))["stages"])
    publish.write_json(arguments.output, certificate)
    problems = [f"{stage or 'no stage'}: asked for {what}" for stage, what in certificate["refused"]]
    if certificate["exit_status"]:
        problems.append(f"`{certificate['command']}` failed with exit status {certificate['exit_status']}")
    else:
        skipped = sorted(wanted - certificate["allowed"].keys())
        problems += [f"{stage}: `{certificate['command']}` did not run it" for stage in skipped]
    if problems:
        raise StageError(*problems, f"{arguments.output} lists the same")
    print(f"certify: no address but this machine's own was asked for, and no name looked up: see {arguments.output}")


def check_tools() -> None:
    """Refuse a machine on which nothing could be traced or isolated, and say how to change that."""
    for tool, package in {"strace": "strace", "unshare": "util-linux", "ip": "iproute2"}.items():
        if not shutil.which(tool):
            raise StageError(f"{tool} is not installed: install the package {package}")
    isolate = "allow namespaces: as root, or with `sysctl kernel.unprivileged_userns_clone=1` (on Ubuntu also "
    isolate += "`kernel.apparmor_restrict_unprivileged_userns=0`); in a container `--cap-add SYS_ADMIN`"
    trace = "allow tracing: strace 5.3 or newer, `sysctl kernel.yama.ptrace_scope=1`; in a container `SYS_PTRACE`"
    for attempt, remedy in ((_NAMESPACES, isolate), (["strace", "--seccomp-bpf", "-f", "-o", os.devnull], trace)):
        process = subprocess.run([*attempt, "true"], capture_output=True, text=True, check=False)
        if process.returncode:
            raise StageError(f"{process.stderr.strip()}: {remedy}")


@contextmanager
def fresh_copy(project: Path) -> Iterator[Path]:
    """A copy of what git knows of a project, which reads its raw files and its model, and has none of its results."""
    listing = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=project, stdout=subprocess.PIPE, check=True).stdout
    # Not below /tmp, which may be small, or in memory.
    with publish.scratch(project / outputs.OUTPUTS / ".certify") as copy:
        for name in filter(None, os.fsdecode(names).split("\0")):
            # With dvc.lock, DVC would look for earlier results, and with data/raw.dvc for the raw files in its cache.
            if name != "dvc.lock" and not name.endswith(".dvc") and (project / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(project / name, copy / name)
        params = yaml.safe_load((project / PARAMS_FILE).read_text(encoding="utf-8"))
        for name in ("raw_dir", "model_name"):  # a model of the Hub is no directory
            if (project / params[name]).is_dir():
                params[name] = str((project / params[name]).absolute())
        publish.write_text(copy / PARAMS_FILE, yaml.safe_dump(params))
        if (project / ".hf").is_dir():
            (copy / ".hf").symlink_to(project / ".hf")
        # A cache that the project shares with others has results of earlier runs.
        publish.write_text(copy / ".dvc/config.local", "[cache]\n    dir = cache\n")
        subprocess.run(["git", "init", "-q", str(copy)], check=True)  # DVC wants a repository
        yield copy


def certify(arguments: list[str], directory: Path, hidden: Iterable[str] = HIDDEN_SOCKETS) -> dict[str, Any]:
    """Run a command in a directory, traced and without a network, and list the addresses that it asked for.

    Raises:
        StageError: it was not traced to its end.
    """
    # As on a cluster: huggingface_hub and datasets do not even try, so that an attempt is somebody else's.
    environment = {"HF_HUB_OFFLINE": "1", **os.environ}
    with tempfile.NamedTemporaryFile(mode="r", errors="replace") as trace:
        started = [*_NAMESPACES, "sh", "-c", _START, " ".join(hidden), *_STRACE, "-o", trace.name, "--", *arguments]
        process = subprocess.Popen(started, cwd=directory, env=environment, start_new_session=True)
        try:
            status = process.wait()
        except BaseException:  # strace itself ignores SIGTERM, and ends with the command
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
        lines = trace.read().splitlines()
    first = lines[0].split()[0] if lines else "?"
    if not any(re.match(rf"{first} +\+\+\+ (exited|killed)", line) for line in reversed(lines)):
        raise StageError(f"strace did not see all that `{' '.join(arguments)}` did: its exit status is {status}")
    allowed, refused = parse(lines)
    return {
        "command": " ".join(arguments),
        "exit_status": status,
        "allowed": {stage: sorted(found) for stage, found in allowed.items()},
        "refused": sorted(refused),
    }


def parse(lines: Iterable[str]) -> tuple[dict[str, set[str]], set[tuple[str, str]]]:
    """Read the output of `strace -f`: what each stage asked for, and with what it should not have, by stage.

    DVC runs one stage after the other, so what is asked for belongs to the one that started last. Before the first
    it is "".
    """
    stage = ""
    allowed: dict[str, set[str]] = {"": set()}
    refused = set()
    for line in lines:
        call = re.match(r"\d+ +(\w+)\((.*)", line)  # a call that is resumed was noted when it began
        name, rest = call.groups() if call else ("", "")
        if name == "execve":
            if started := re.search(r'"-m", "stages\.(\w+)"', rest):
                stage = {"launch": "train", "measure": "evaluate"}.get(started[1], started[1])
                allowed.setdefault(stage, set())
            continue
        for family, fields in _ADDRESS.findall(_PAYLOAD.sub(r"\1", rest)):  # sendmmsg has several
            host = re.search(r'inet_(?:addr\(|pton\(AF_INET6, )"([^"]+)"', fields)
            port = re.search(r"htons\((\d+)\)", fields)
            if family in _LOCAL_FAMILIES:
                allowed[stage].add(family)
            elif not host or not port:
                refused.add((stage, f"{family}{fields} ({name})"))
            elif port[1] == _DNS or not is_own(host[1], is_bound=name == "bind"):
                refused.add((stage, f"{host[1]} port {port[1]} ({name})"))
            else:
                allowed[stage].add(f"{host[1]} ({name})")
    return allowed, refused


def is_own(host: str, is_bound: bool) -> bool:
    """Whether an address is this machine's own alone. 0.0.0.0 is for who connects to it, not for who listens there."""
    ip = ipaddress.ip_address(host)
    ip = getattr(ip, "ipv4_mapped", None) or ip
    return ip.is_loopback or (ip.is_unspecified and not is_bound)


if __name__ == "__main__":
    command.run(main)
