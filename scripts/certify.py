"""Run the pipeline without a network and under a tracer, and write what it asked for.

    python -m scripts.certify [-o airgap.json]      `dvc repro` in a fresh copy of the project, so that every stage runs
    python -m scripts.certify [-o FILE] COMMAND...  a command in this directory

Reads     what the command reads
Writes    airgap.json: the addresses that any process asked for, what was read from outside the project, and digests of
          what went in and what came out. It has no clock times, process ids or ports: the same run gives the same file

The command runs in a network namespace (`unshare -rn`) whose only interface is loopback, so nothing leaves the machine,
and strace notes each attempt. Loopback, UNIX sockets and the kernel's own sockets are allowed. Any other address, and
each lookup of a name (port 53, /etc/resolv.conf, the resolvers of systemd and avahi), is an error that names stage,
process and address; the certificate lists it too. Programs that would look up names for the command through a UNIX
socket, such as nscd, are out of its reach.

The copy is made below outputs/, with a DVC cache of its own, and deleted at the end: it needs as much disk space as the
outputs and their cache. A stage of dvc.yaml that did not run in it is an error.
"""

import argparse
import importlib.metadata
import ipaddress
import itertools
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from stages.artifacts import command, outputs, publish
from stages.artifacts.errors import StageError
from stages.artifacts.params_file import PARAMS_FILE, PIPELINE_FILE
from stages.corpus import splits

CERTIFICATE = Path("airgap.json")
FORMAT = 1

_SYSCALLS = (
    "connect,sendto,sendmsg,sendmmsg,bind,openat,?open,?openat2,?rename,?renameat,renameat2,?link,linkat,?mkdir,mkdirat,"
    "execve,clone,?clone3,?fork,?vfork"
)
"""What is traced; `?`: not every architecture has it. With --seccomp-bpf all other calls run at full speed."""
_LOCAL_FAMILIES = {"AF_UNIX", "AF_NETLINK", "AF_UNSPEC", "AF_ALG"}
"""Other processes of this machine, and the kernel; AF_UNSPEC disconnects."""
_RESOLVERS = ("/io.systemd.Resolve", "/avahi-daemon/")
HIDDEN_SOCKETS = (
    "/var/run/nscd/socket",
    "/var/run/nslcd/socket",
    "/var/run/avahi-daemon/socket",
    "/var/run/dbus/system_bus_socket",
    "/var/run/systemd/resolve/io.systemd.Resolve",
    "/var/lib/sss/pipes/nss",
)
"""Of programs that look up names for others: the network namespace cuts off no UNIX socket that has a path."""
_RESOLVER_CONFIG = "/etc/resolv.conf"
_DNS = 53
_MEASURED = (outputs.SPEED, outputs.TRAIN_METRICS, outputs.COST, outputs.REPORT)
"""Outs with durations, which no digest covers and which differ between two runs."""
_WITHOUT_FILES = ("proc", "sys", "dev")
"""Directories of the kernel: their files differ from one run to the next."""
_SHARED_MEMORY = "/dev/shm"
_PAYLOAD = re.compile(r'(^\d+(?:<[^>]*>)?, |iov_base=)"(?:[^"\\]|\\.)*"')
"""What sendto and sendmsg send, which may look like an address."""
_SOCKET_ADDRESS = re.compile(r"\{sa_family=(\w+)((?:[^{}\"]|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\})*)")
_LINKED_BYTES = 1 << 20
"""Larger files, such as weights under models/, are linked into the copy."""

_NAMESPACES = ["unshare", "-rnm", "--propagation", "unchanged"]
"""Of users, network and mounts. What is mounted in there never gets out; some containers forbid even to say so."""

# Loopback has to be switched on in a new namespace; `ip` may not be installed. 0x8914: SIOCSIFFLAGS, 1: IFF_UP.
# What connects to a hidden socket is refused, and then looks up the name by itself, which strace notes.
_START = """
import fcntl, os, socket, struct, subprocess, sys
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 1))
hidden, command = sys.argv[1].split(":"), sys.argv[2:]
for path in filter(os.path.exists, hidden):
    subprocess.run(["mount", "--bind", "/dev/null", os.path.realpath(path)], check=True)
os.execvp(command[0], command)
"""
# The pipe to this process, which no command inherits, is for what happens before there is one.
_RESTORE = """
import os, sys
own, command = int(sys.argv[1]), sys.argv[2:]
pipe = os.dup(2)
os.dup2(own, 2)
os.close(own)
try:
    os.execvp(command[0], command)
except OSError as error:
    os.write(pipe, f"it could not be started ({error.strerror})\\n".encode())
    sys.exit(1)
"""


class Address(NamedTuple):
    """What a process asked for."""

    text: str
    """For people, without the ports of loopback, which differ between runs."""
    is_allowed: bool


class Access(NamedTuple):
    """One of the calls of a traced process, as far as it matters."""

    address: Address
    call: str
    process: str
    """Its command line."""
    stage: str
    """Of the pipeline; empty for processes of none, such as DVC itself."""


@dataclass
class Trace:
    """What strace has noted of a command and all its descendants."""

    addresses: list[tuple[int, int, str, Address]] = field(default_factory=list)
    """Line, process, call and address, in order."""
    files: set[str] = field(default_factory=set)
    """Real paths of the files that were opened for reading, without those that the command itself had created."""
    created: set[str] = field(default_factory=set)
    """Real paths of what it had created, or renamed to, so far; with a directory, all that is below."""
    bound: set[str] = field(default_factory=set)
    """The UNIX sockets of its own, as the text of their addresses."""
    commands: dict[int, list[tuple[int, list[str]]]] = field(default_factory=dict)
    """Of each process: line, and arguments of what it executed."""
    parents: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of each process: line, and the process that started it."""
    first: int | None = None
    """The process that is the command."""
    has_ended: bool = False
    """Whether strace saw the end of it."""
    messages: list[str] = field(default_factory=list)
    """What strace and those before it wrote besides."""

    def stages(self) -> set[str]:
        """The stages of which a process ran."""
        executed = (arguments for commands in self.commands.values() for _, arguments in commands)
        return {stage for stage in map(_stage, executed) if stage}

    def accesses(self) -> list[Access]:
        """Each different access once, sorted."""
        found = set()
        for line, process, call, address in self.addresses:
            if address.text in self.bound:
                address = Address("unix", True)  # their names are random
            arguments, stage = self._origin(line, process)
            found.add(Access(address, call, " ".join(arguments)[:200], stage))
        return sorted(found, key=lambda access: (access.stage, access.address.text, access.call, access.process))

    def _origin(self, line: int, process: int) -> tuple[list[str], str]:
        """The command line of a process at a line, and the stage that it or one of its ancestors runs."""
        arguments: list[str] = []
        while True:
            executed = [words for at, words in self.commands.get(process, []) if at <= line]
            if executed and not arguments:
                arguments = executed[-1]
            for candidate in reversed(executed):
                if stage := _stage(candidate):
                    return arguments, stage
            if process not in self.parents:
                return arguments or ["?"], ""
            # Not what the parent executed later. A child may be noted before the call that started it returns.
            line, process = self.parents[process]


def _stage(arguments: list[str]) -> str | None:
    module = next((after for option, after in itertools.pairwise(arguments) if option == "-m"), "")
    package, _, name = module.partition(".")
    return {"launch": "train", "measure": "evaluate"}.get(name, name) if package == "stages" else None


def parse(lines: Iterable[str]) -> Trace:
    """Read the output of `strace -f -y`, in which the parts of a call may be apart."""
    trace = Trace()
    pending: dict[int, str] = {}
    number = 0
    for number, line in enumerate(lines):
        head, _, text = line.rstrip("\n").partition(" ")
        if not head.isdigit():
            trace.messages.append(line.strip())
            continue
        process, text = int(head), text.lstrip()
        trace.first = trace.first or process
        # strace dies of the signal that killed the command, with a part of this line still in memory.
        trace.has_ended |= process == trace.first and text.startswith(("+++ exited", "+++ killed"))
        if text.endswith("<unfinished ...>"):
            pending[process] = text.removesuffix("<unfinished ...>")
            # What was executed is known now: its first calls come before the line that ends this one.
            if text.startswith("execve("):
                _note(trace, number, process, text)
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>", text):
            text = pending.pop(process, "") + text[resumed.end() :]
            if text.startswith("execve("):
                continue
        _note(trace, number, process, text)
    for process, text in pending.items():  # killed while it waited, as for an address that does not answer
        _note(trace, number, process, text)
    return trace


def _note(trace: Trace, number: int, process: int, text: str) -> None:
    name, _, rest = text.partition("(")
    if name in ("connect", "sendto", "sendmsg", "sendmmsg"):
        rest = _PAYLOAD.sub(r"\1", rest)
        # sendmmsg has an address for each message.
        for found in re.finditer(_SOCKET_ADDRESS, rest):
            trace.addresses.append((number, process, name, address(found[1], found[2])))
    elif name in ("open", "openat", "openat2"):
        # Even where there is no such file: who reads it wants to know whom to ask.
        if f'"{_RESOLVER_CONFIG}"' in rest:
            trace.addresses.append((number, process, name, Address(f"nameservers ({_RESOLVER_CONFIG})", False)))
        if opened := re.search(r" = \d+<(.*)>(?: ?\(deleted\))?$", rest):
            path = _unquote(opened[1])
            if re.search(r"\b(O_CREAT|O_TMPFILE)\b", rest):
                trace.created.add(path)
            elif not re.search(r"\b(O_WRONLY|O_DIRECTORY|O_PATH)\b", rest) and trace.created.isdisjoint(
                map(str, (path, *Path(path).parents))
            ):
                trace.files.add(path)
    elif name in ("rename", "renameat", "renameat2", "link", "linkat", "mkdir", "mkdirat"):
        if " = -1 " not in rest:
            directory, target = re.findall(r'(?:<([^>]*)>, )?"((?:[^"\\]|\\.)*)"', rest)[-1]
            trace.created.add(os.path.realpath(os.path.join(_unquote(directory), _unquote(target))))
    elif name == "bind":
        if (own := re.search(_SOCKET_ADDRESS, rest)) and own[1] == "AF_UNIX":
            trace.bound.add(address(own[1], own[2]).text)
    elif name == "execve":
        if " = -1 " not in rest and (arguments := re.search(r", \[(.*?)\], 0x", rest)):
            words = [_unquote(word) for word in re.findall(r'"((?:[^"\\]|\\.)*)"', arguments[1])]
            trace.commands.setdefault(process, []).append((number, words))
    elif name in ("clone", "clone3", "fork", "vfork") and (child := re.search(r" = (\d+)(?:<[^>]*>)?$", rest)):
        trace.parents[int(child[1])] = (number, process)


def address(family: str, fields: str) -> Address:
    """What a socket address of strace means: `AF_INET`, `, sin_port=htons(80), sin_addr=inet_addr("10.0.0.1")`."""
    if family in ("AF_INET", "AF_INET6"):
        port = re.search(r"htons\((\d+)\)", fields)
        host = re.search(r"inet_(?:addr\(|pton\(AF_INET6, )\"([^\"]+)\"", fields)
        if port and host:
            if int(port[1]) == _DNS:
                return Address(f"nameserver {host[1]} port {_DNS}", False)
            ip = ipaddress.ip_address(host[1])
            mapped = getattr(ip, "ipv4_mapped", None) or ip
            # 0.0.0.0 is loopback too, for those who connect to it.
            if mapped.is_loopback or mapped.is_unspecified:
                return Address("127.0.0.1" if mapped.version == 4 else "::1", True)
            return Address(f"{host[1]} port {port[1]}", False)
    if family == "AF_UNIX":
        path = re.search(r'sun_path=(@?)"((?:[^"\\]|\\.)*)"', fields)
        name = _unquote(path[2]) if path else ""
        if any(resolver in name for resolver in _RESOLVERS):
            return Address(f"nameserver unix:{name}", False)
        # Abstract names are those of the network namespace, and so of the command itself.
        return Address(f"unix:{name}" if name and path and not path[1] else "unix", True)
    return Address(f"{family}{fields}" if family not in _LOCAL_FAMILIES else family, family in _LOCAL_FAMILIES)


def _unquote(text: str) -> str:
    r"""Text as strace quotes it: `\303\251`, `\"`, `\n`. Bytes that are not UTF-8 stay escaped, as `\xe9`."""
    named = {"n": b"\n", "t": b"\t", "r": b"\r", "f": b"\f", "v": b"\v"}
    raw = re.sub(
        rb"\\([0-7]{1,3}|.)",
        lambda found: (
            bytes([int(found[1], 8)]) if found[1].isdigit() else named.get(found[1].decode("latin-1"), found[1])
        ),
        os.fsencode(text),
    )
    return raw.decode("utf-8", "backslashreplace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=CERTIFICATE, metavar="FILE")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="default: `dvc repro` in a fresh copy")
    arguments = parser.parse_args()
    check_tools()
    project = Path.cwd()
    if arguments.command:
        certificate = certify(arguments.command, project, [project])
    else:
        for name in ("DVC_ROOT", "CHECKPOINT_ROOT"):  # with these, stages would find earlier results
            os.environ.pop(name, None)
        with fresh_copy(project) as copy:
            certificate = certify(["dvc", "repro", "--force"], copy, [copy, project])
    publish.write_json(arguments.output, certificate)
    refused = [
        f"{entry['stage'] or 'no stage'}: `{entry['process']}` asked for {entry['address']} ({entry['call']})"
        for entry in certificate["refused"]
    ]
    if certificate["exit_status"]:
        refused.append(f"`{certificate['command']}` failed with exit status {certificate['exit_status']}")
    elif not arguments.command:
        pipeline = yaml.safe_load((project / PIPELINE_FILE).read_text(encoding="utf-8"))
        skipped = [stage for stage in pipeline["stages"] if stage not in certificate["stages"]]
        refused += [f"{stage}: `{certificate['command']}` did not run it" for stage in skipped]
    if refused:
        raise StageError("\n".join([*refused, f"{arguments.output} lists the same"]))
    print(f"certify: no address but this machine's own was asked for, and no name looked up: see {arguments.output}")


def check_tools() -> None:
    """Refuse a machine on which nothing could be traced or isolated.

    Raises:
        StageError: naming what is missing, and how to get it.
    """
    for tool, package in {"strace": "strace", "unshare": "util-linux"}.items():
        if not shutil.which(tool):
            raise StageError(f"{tool} is not installed: install the package {package} (`apt-get install {package}`)")
    isolated = subprocess.run([*_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    if isolated.returncode:
        raise StageError(
            f"this machine allows no network namespaces ({isolated.stderr.strip()}): run it as root, or have root "
            "allow them (`sysctl kernel.unprivileged_userns_clone=1`, on Ubuntu also "
            "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`; in a container `--cap-add SYS_ADMIN`)"
        )
    traced = subprocess.run(["strace", "--seccomp-bpf", "-f", "-o", os.devnull, "true"], capture_output=True, text=True)
    if traced.returncode:
        raise StageError(
            f"strace cannot trace here ({traced.stderr.strip()}): it must be version 5.3 or newer, and tracing allowed "
            "(`sysctl kernel.yama.ptrace_scope=1`; in a container `--cap-add SYS_PTRACE`)"
        )


@contextmanager
def fresh_copy(project: Path) -> Iterator[Path]:
    """A copy of what git knows of a project, and of its model, with a link to its raw files and without any result."""
    params = yaml.safe_load((project / PARAMS_FILE).read_text(encoding="utf-8"))
    raw, model = (Path(os.path.normpath(params[name])) for name in ("raw_dir", "model_name"))
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=project, capture_output=True, check=False
    )
    if listed.returncode:
        raise StageError(f"the copy is made of what git knows: {os.fsdecode(listed.stderr).strip()}")
    names = {Path(name) for name in os.fsdecode(listed.stdout).split("\0") if name}
    if not model.is_absolute():  # `dvc add` has git ignore it
        names |= {path.relative_to(project) for path in (project / model).rglob("*")}
    (project / outputs.OUTPUTS).mkdir(exist_ok=True)
    # Not below /tmp, which may be small, or in memory.
    with tempfile.TemporaryDirectory(prefix=".certify-", dir=project / outputs.OUTPUTS) as directory:
        # As deep as the project, so that `raw_dir: ../corpus` is in there too.
        copy = Path(directory, *project.parts[1:])
        for name in names:
            source, target = project / name, copy / name
            # With dvc.lock, DVC would look for earlier results, and with data/raw.dvc for the raw files in its cache.
            is_left_out = name == Path("dvc.lock") or name.suffix == ".dvc" or raw in name.parents
            if is_left_out or not source.is_file():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.stat().st_size > _LINKED_BYTES:
                with suppress(OSError):  # another disk, or one without links
                    os.link(source.resolve(), target)
            if not target.exists():
                shutil.copy(source, target)
        for place in (raw, Path(".hf")):
            if not place.is_absolute() and (project / place).is_dir():
                (copy / place).parent.mkdir(parents=True, exist_ok=True)
                (copy / place).symlink_to(project / place)
        # A cache that the project shares with others has results of earlier runs.
        publish.write_text(copy / ".dvc/config.local", "[cache]\n    dir = cache\n")
        subprocess.run(["git", "init", "-q", str(copy)], check=True)  # DVC wants a repository
        yield copy


def certify(
    arguments: list[str], directory: Path, projects: list[Path], hidden: Iterable[str] = HIDDEN_SOCKETS
) -> dict[str, Any]:
    """Run a command in a directory, traced and without a network, and describe what it did.

    Args:
        arguments: The command.
        directory: Where it runs, with params.yaml and dvc.lock.
        projects: Directories whose files are not "outside".
        hidden: UNIX sockets that it cannot reach.

    Raises:
        StageError: it could not be started, or not traced to its end.
    """
    # As on a cluster: huggingface_hub and datasets do not even try, so that an attempt is somebody else's.
    environment = {"HF_HUB_OFFLINE": "1", **os.environ}
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if name in environment:  # relative paths are those of the project
            environment[name] = os.path.abspath(environment[name])
    trace, status = traced(arguments, directory, environment, hidden)
    if trace.messages or not trace.has_ended:
        problem = "\n".join(trace.messages) or f"exit status {status}, and the trace ends before the command does"
        raise StageError(f"strace did not see all that `{' '.join(arguments)}` did: {problem}")
    accesses = trace.accesses()
    allowed: dict[str, set[str]] = {}
    for access in accesses:
        if access.address.is_allowed:
            allowed.setdefault(access.address.text, set()).add(access.stage)
    return {
        "format": FORMAT,
        "command": splits.printable(" ".join(arguments)),
        "exit_status": status,
        "stages": sorted(trace.stages()),
        "addresses": {text: sorted(stages) for text, stages in sorted(allowed.items())},
        "refused": [
            {"stage": stage, "process": process, "address": asked.text, "call": call}
            for asked, call, process, stage in accesses
            if not asked.is_allowed
        ],
        "read_outside": read_outside(trace.files, projects),
        **digests(directory),
    }


def traced(
    arguments: list[str], directory: Path, environment: dict[str, str], hidden: Iterable[str]
) -> tuple[Trace, int]:
    """Run a command under strace in namespaces of its own; return what it did, and its exit status."""
    # Through a pipe, which needs no disk space and cannot be full. strace's own messages go the same way, so its
    # standard error is that pipe, and the command gets back the one of this process.
    read_end, write_end = os.pipe()
    own = os.dup(2)
    start = [*_NAMESPACES, sys.executable, "-c", _START, ":".join(hidden)]
    tracer = ["strace", "--seccomp-bpf", "-fyq", "-s256", "-o", "/dev/stderr", "-e", f"trace={_SYSCALLS}", "--"]
    restore = [sys.executable, "-IS", "-c", _RESTORE, str(own)]
    with os.fdopen(read_end, encoding="utf-8", errors="surrogateescape") as lines:
        process = subprocess.Popen(
            [*start, *tracer, *restore, *arguments], cwd=directory, env=environment, stderr=write_end, pass_fds=[own]
        )
        os.close(write_end)
        os.close(own)
        try:
            trace = parse(lines)
        except BaseException:  # SIGTERM: strace itself ignores it, and without strace its command would run on
            for child in psutil.Process(process.pid).children(recursive=True):
                child.terminate()
            for _ in lines:  # strace waits until it can write
                pass
            process.wait()
            raise
    return trace, process.wait()


def read_outside(files: Iterable[str], projects: list[Path]) -> dict[str, Any]:
    """What was read from outside the project, in groups whose names are the same on each machine where possible."""
    from huggingface_hub import constants

    site_packages = [os.path.realpath(path) for path in site.getsitepackages()]
    environment = [*site_packages, *map(os.path.realpath, (sys.prefix, sys.base_prefix))]
    cache, home = os.path.realpath(constants.HF_HOME), os.path.realpath(Path.home())
    own = [os.path.realpath(project) for project in projects]
    tops, model_cache, system, other = set(), set(), set(), set()
    for path in files:
        if base := _is_below(path, environment):
            if base in site_packages:
                tops.add(Path(path).relative_to(base).parts[0].removesuffix(".py"))
        elif _is_below(path, [cache]):
            model_cache.add(os.path.relpath(path, cache))
        elif _is_below(path, own) or not path.startswith("/") or os.path.isdir(path):
            pass  # not outside; a pipe
        elif (parts := Path(path).parts)[1] in _WITHOUT_FILES and not _is_below(path, [_SHARED_MEMORY]):
            system.add(f"/{parts[1]}")
        elif parts[1] == "etc":
            system.add(path)  # it may change what programs do
        elif parts[1] in ("usr", "lib", "lib64", "bin", "sbin", "opt"):
            system.add("/".join(parts[:3])[1:])
        else:
            other.add(f"~/{os.path.relpath(path, home)}" if _is_below(path, [home]) else path)
    distributions = importlib.metadata.packages_distributions()
    packages = {name for top in tops for name in distributions.get(top, ())}
    return {
        "environment": {
            "python": ".".join(map(str, sys.version_info[:3])),
            "packages": {name: importlib.metadata.version(name) for name in sorted(packages, key=str.lower)},
        },
        "model_cache": sorted(model_cache),
        "system": sorted(system),
        "other": sorted(other),
    }


def _is_below(path: str, directories: Iterable[str]) -> str | None:
    """The first of `directories` that is, or contains, a path."""
    return next((top for top in directories if path == top or path.startswith(top.rstrip("/") + "/")), None)


def digests(directory: Path) -> dict[str, Any]:
    """SHA-256 of all that the stages have read and written, as dvc.lock lists it. Directories have one of their own."""
    lock = directory / "dvc.lock"
    if not lock.is_file():
        return {"went_in": {}, "came_out": {}}
    stages = yaml.safe_load(lock.read_text(encoding="utf-8"))["stages"]
    outs = {out["path"] for stage in stages.values() for out in stage.get("outs", [])}
    deps = {dep["path"] for stage in stages.values() for dep in stage.get("deps", [])}
    deps = {path for path in deps if not _is_below(path, outs)}
    modules = {path for path in deps if path.startswith("stages/")}
    params = {name: stage["params"] for name, stage in stages.items() if "params" in stage}
    measured = {str(path) for path in _MEASURED}
    return {
        "went_in": {
            "code": publish.sha256_json({path: _digest(directory / path) for path in sorted(modules)}),
            "params": publish.sha256_json(params),
            **{path: _digest(directory / path) for path in sorted(deps - modules)},
        },
        "came_out": {path: _digest(directory / path) for path in sorted(outs - measured)},
    }


def _digest(path: Path) -> str | None:
    """SHA-256 of a file, or of the paths and digests of all files below a directory; None: there is nothing."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        return publish.sha256_json({str(file.relative_to(path)): publish.sha256_file(file) for file in files})
    return publish.sha256_file(path) if path.is_file() else None


if __name__ == "__main__":
    command.run(main)
