"""scripts/certify.py: what strace notes is understood, and a planted call is found, with its stage and its process."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import certify
from stages.artifacts.errors import StageError
from tests.pipeline import STAGES, ran
from tests.project import Project

can_trace = (
    bool(shutil.which("strace") and shutil.which("unshare"))
    and subprocess.run(["unshare", "-rn", "strace", "-o", "/dev/null", "true"], capture_output=True).returncode == 0
)
needs_strace = pytest.mark.skipif(not can_trace, reason="strace or network namespaces are missing on this machine")

# Lines of strace 6.1.
RECORDED = r"""
100 execve("/usr/bin/dvc", ["dvc", "repro"], 0x7fffa7df0998 /* 36 vars */) = 0
100 openat(AT_FDCWD</work>, "/etc/ld.so.cache", O_RDONLY|O_CLOEXEC) = 3</etc/ld.so.cache>
100 openat(AT_FDCWD</work>, "/usr/lib/libmissing.so", O_RDONLY|O_CLOEXEC) = -1 ENOENT (No such file or directory)
100 openat(AT_FDCWD</work>, ".", O_RDONLY|O_NONBLOCK|O_CLOEXEC|O_DIRECTORY) = 3</work>
100 vfork( <unfinished ...>
101 execve("/bin/nothing", ["python", "-m", "stages.extract"], 0x7fe7b8 /* 38 vars */) = -1 ENOENT (No such file)
101 execve("/bin/bash", ["/bin/bash", "-c", "exec python -m stages.launch"], 0x7fe7b8 /* 38 vars */ <unfinished ...>
100 <... vfork resumed>)              = 101
101 <... execve resumed>)             = 0
101 execve("/usr/bin/python", ["python", "-m", "stages.launch"], 0x55a7f5d02c50 /* 38 vars */) = 0
101 connect(3<socket:[5]>, {sa_family=AF_UNIX, sun_path="/var/run/nscd/socket"}, 110) = -1 ENOENT (No such file)
101 clone3({flags=CLONE_VM|CLONE_THREAD, stack_size=0x7fff80} => {parent_tid=[102]}, 88) = 102
103 connect(8<socket:[7]>, {sa_family=AF_INET, sin_port=htons(29500), sin_addr=inet_addr("127.0.0.1")}, 16) = -1 EINPROGRESS
103 sendto(8<socket:[7]>, "{sa_family=AF_INET, \"x\"}", 20, MSG_NOSIGNAL, NULL, 0) = 20
102 clone(child_stack=NULL, flags=CLONE_CHILD_CLEARTID|SIGCHLD, child_tidptr=0x7f) = 103
103 connect(9<socket:[8]>, {sa_family=AF_INET, sin_port=htons(443), sin_addr=inet_addr("10.0.0.1")}, 16 <unfinished ...>
102 sendto(10<socket:[9]>, [{nlmsg_len=20, nlmsg_type=RTM_GETADDR}, {ifa_family=AF_UNSPEC, ...}], 20, 0, {sa_family=AF_NETLINK, nl_pid=0, nl_groups=00000000}, 12) = 20
100 openat(AT_FDCWD</work>, "caf\303\251.txt", O_RDONLY <unfinished ...>
102 openat(AT_FDCWD</work>, "log", O_WRONLY|O_CREAT, 0666) = 4</work/log>
100 <... openat resumed>)             = 5</srv/caf\303\251 \74x\76.txt>
102 +++ exited with 0 +++
""".strip()  # noqa: E501


def test_a_trace_is_understood() -> None:
    """Calls in two parts, children that are noted before the call that started them, a call that never returns."""
    trace = certify.parse(RECORDED.splitlines())
    assert trace.files == {"/etc/ld.so.cache", "/srv/café <x>.txt"}
    found = [(access.stage, access.process, access.address.text, access.call) for access in trace.accesses()]
    launch = ("train", "python -m stages.launch")
    assert found == [
        (*launch, "10.0.0.1 port 443", "connect"),
        (*launch, "127.0.0.1", "connect"),
        (*launch, "AF_NETLINK", "sendto"),
        (*launch, "unix:/var/run/nscd/socket", "connect"),
    ]
    assert [access.address.text for access in trace.accesses() if not access.address.is_allowed] == [
        "10.0.0.1 port 443"
    ]


@pytest.mark.parametrize(
    ("call", "text", "is_allowed"),
    [
        (
            'connect(3<s>, {sa_family=AF_INET, sin_port=htons(1), sin_addr=inet_addr("127.8.0.1")}, 16)',
            "127.0.0.1",
            True,
        ),
        ('connect(3<s>, {sa_family=AF_INET, sin_port=htons(1), sin_addr=inet_addr("0.0.0.0")}, 16)', "127.0.0.1", True),
        (
            'connect(3<s>, {sa_family=AF_INET6, sin6_port=htons(9), sin6_flowinfo=htonl(0), inet_pton(AF_INET6, "::1", '
            "&sin6_addr), sin6_scope_id=0}, 28)",
            "::1",
            True,
        ),
        (
            "connect(3<s>, {sa_family=AF_INET6, sin6_port=htons(9), sin6_flowinfo=htonl(0), inet_pton(AF_INET6, "
            '"::ffff:10.0.0.9", &sin6_addr), sin6_scope_id=0}, 28)',
            "::ffff:10.0.0.9 port 9",
            False,
        ),
        (
            "connect(3<s>, {sa_family=AF_INET6, sin6_port=htons(9), sin6_flowinfo=htonl(0), inet_pton(AF_INET6, "
            '"::ffff:127.0.0.1", &sin6_addr), sin6_scope_id=0}, 28)',
            "127.0.0.1",
            True,
        ),
        (
            'connect(3<s>, {sa_family=AF_INET, sin_port=htons(53), sin_addr=inet_addr("127.0.0.53")}, 16)',
            "nameserver 127.0.0.53 port 53",
            False,
        ),
        (
            'sendmmsg(3, [{msg_hdr={msg_name={sa_family=AF_INET, sin_port=htons(5), sin_addr=inet_addr("10.0.0.2")}, '
            'msg_namelen=16, msg_iov=[{iov_base="\\1{sa_family=AF_INET}", iov_len=2}], msg_iovlen=1}}], 1, 0)',
            "10.0.0.2 port 5",
            False,
        ),
        (
            'connect(3<s>, {sa_family=AF_UNIX, sun_path="/run/systemd/resolve/io.systemd.Resolve"}, 42)',
            "nameserver unix:/run/systemd/resolve/io.systemd.Resolve",
            False,
        ),
        ('connect(3<s>, {sa_family=AF_UNIX, sun_path=@"abc"}, 6)', "unix", True),
        ('connect(3<s>, {sa_family=AF_UNIX, sun_path="/tmp/pymp-x}1/listener"}, 6)', "unix", True),
        ('connect(3<s>, {sa_family=AF_UNSPEC, sa_data="\\0\\0"}, 16)', "AF_UNSPEC", True),
        ("connect(3<s>, {sa_family=AF_VSOCK, svm_cid=2, svm_port=9}, 16)", "AF_VSOCK, svm_cid=2, svm_port=9", False),
        (
            'openat(AT_FDCWD</w>, "/etc/resolv.conf", O_RDONLY|O_CLOEXEC) = -1 ENOENT (No such file or directory)',
            "nameservers (/etc/resolv.conf)",
            False,
        ),
    ],
)
def test_loopback_and_unix_are_allowed_and_nothing_else(call: str, text: str, is_allowed: bool) -> None:
    (access,) = certify.parse([f"7 {call}"]).accesses()
    assert access.address == (text, is_allowed)
    assert (access.stage, access.process) == ("", "?")


def test_what_is_read_outside_is_grouped(tmp_path: Path) -> None:
    import yaml

    outside = certify.read_outside(
        {yaml.__file__, "/etc/passwd", "/usr/lib/x/y.so", "/proc/17/maps", "/proc/18/maps", "/srv/a", f"{tmp_path}/b"},
        [tmp_path],
    )
    assert outside["environment"]["packages"] == {"PyYAML": yaml.__version__}
    assert outside["system"] == ["/etc/passwd", "/proc", "/usr/lib"]
    assert outside["other"] == ["/srv/a"]


@needs_strace
def test_a_planted_call_is_an_error_with_its_stage_and_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a child of a stage; nothing is reached, because the namespace has only loopback."""
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/__init__.py").touch()
    connect = "import socket; print(socket.socket().connect_ex(('{}', {})))"
    listen = "import socket; server = socket.create_server(('127.0.0.1', 0)); port = server.getsockname()[1]\n"
    (tmp_path / "stages/pack.py").write_text(
        f"{listen}assert socket.socket().connect_ex(('127.0.0.1', port)) == 0\n"
        f"import os\nif os.fork() == 0:\n    {connect.format('10.11.12.13', 80)}\nelse:\n    os.wait()\n"
    )
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "stages.pack"]
    monkeypatch.setattr(sys, "argv", ["certify", *command])
    with pytest.raises(StageError, match=r"pack: `.* -m stages\.pack` asked for 10\.11\.12\.13 port 80 \(connect\)"):
        certify.main()
    certificate = json.loads(Path("airgap.json").read_text())
    assert certificate["addresses"] == {"127.0.0.1": ["pack"]}
    assert certificate["refused"] == [
        {"stage": "pack", "process": " ".join(command), "address": "10.11.12.13 port 80", "call": "connect"}
    ]
    assert certificate["exit_status"] == 0

    monkeypatch.setattr(sys, "argv", ["certify", sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(StageError, match="failed with exit status 3"):
        certify.main()


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "strace is not installed: install the package strace"),
        ({"strace": "exit 0"}, "unshare is not installed: install the package util-linux"),
        (
            {"strace": "exit 0", "unshare": "echo 'unshare failed: Operation not permitted' >&2; exit 1"},
            r"no network namespaces \(unshare failed: Operation not permitted\): run it as root",
        ),
        ({"strace": "echo 'ptrace: denied' >&2; exit 1", "unshare": "exit 0"}, r"cannot trace here \(ptrace: denied\)"),
    ],
)
def test_a_machine_that_cannot_certify_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: dict[str, str], message: str
) -> None:
    for name, script in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StageError, match=message):
        certify.check_tools()


@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_certificate_of_the_pipeline(reproduced: Project, tmp_path: Path) -> None:
    """Loopback and UNIX sockets only, and in the copy each file that a digest covers has the bytes it has here."""
    output = reproduced.run("python", "-m", "scripts.certify", timeout=400)
    assert ran(output) == STAGES
    certificate = reproduced.json("airgap.json")
    assert certificate["refused"] == []
    assert all(
        name in ("127.0.0.1", "::1", "AF_NETLINK") or name.startswith("unix") for name in certificate["addresses"]
    )
    assert certificate["addresses"]["127.0.0.1"] == ["train"]
    assert str(tmp_path) not in json.dumps(certificate)
    here = certify.digests(reproduced.path)
    assert {"data/splits", "data/tokens/train", "outputs/test/run.json", "outputs/report"} <= here["came_out"].keys()
    assert {name: certificate[name] for name in here} == here
    assert not list((reproduced / "outputs").glob(".certify-*"))
    assert "Data and pipelines are up to date" in reproduced.run("dvc", "repro")

    module = reproduced / "stages/organize.py"
    module.write_text(module.read_text() + "\nimport socket\nsocket.socket().connect_ex(('192.0.2.1', 443))\n")
    output = reproduced.run("python", "-m", "scripts.certify", "dvc", "repro", "organize", status=2)
    assert "error: organize: `python -m stages.organize` asked for 192.0.2.1 port 443 (connect)" in output
