"""scripts/certify.py: what strace notes is understood, and a planted call is found, with its stage."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import certify
from stages.base.errors import StageError
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
100 sendto(10, [{nlmsg_len=20, nlmsg_type=RTM_GETADDR}, {ifa_family=AF_UNSPEC, ...}], 20, 0, {sa_family=AF_NETLINK, nl_pid=0, nl_groups=00000000}, 12) = 20
101 execve("/usr/bin/python", ["python", "-m", "stages.launch"], 0x55a7f5d02c50 /* 38 vars */ <unfinished ...>
101 connect(3, {sa_family=AF_UNIX, sun_path="/var/run/nscd/socket"}, 110) = -1 ENOENT (No such file)
103 connect(8, {sa_family=AF_INET, sin_port=htons(29500), sin_addr=inet_addr("127.0.0.1")}, 16) = -1 EINPROGRESS
103 sendto(8, "{sa_family=AF_INET, sin_port=htons(1)\"x\"}", 20, MSG_NOSIGNAL, NULL, 0) = 20
103 connect(9, {sa_family=AF_INET, sin_port=htons(443), sin_addr=inet_addr("10.0.0.1")}, 16 <unfinished ...>
103 <... connect resumed>)              = -1 ENETUNREACH (Network is unreachable)
102 +++ exited with 0 +++
""".strip()  # noqa: E501


def test_a_trace_is_understood() -> None:
    allowed, refused = certify.parse(RECORDED.splitlines())
    assert allowed == {"": {"AF_NETLINK"}, "train": {"AF_UNIX", "127.0.0.1 (connect)"}}
    assert refused == {("train", "10.0.0.1 port 443 (connect)")}


def inet6(host: str) -> str:
    return f'{{sa_family=AF_INET6, sin6_port=htons(9), inet_pton(AF_INET6, "{host}", &sin6_addr), sin6_scope_id=0}}, 28'


def inet(host: str, port: int = 1) -> str:
    return f'{{sa_family=AF_INET, sin_port=htons({port}), sin_addr=inet_addr("{host}")}}, 16'


@pytest.mark.parametrize(
    ("call", "is_allowed"),
    [
        (f"connect(3, {inet('127.8.0.1')})", True),
        (f"connect(3, {inet('0.0.0.0')})", True),
        (f"bind(3, {inet('0.0.0.0')})", False),
        (f"bind(3, {inet('127.0.0.1')})", True),
        (f"connect(3, {inet6('::1')})", True),
        (f"bind(3, {inet6('::')})", False),
        (f"connect(3, {inet6('::ffff:10.0.0.9')})", False),
        (f"connect(3, {inet6('::ffff:127.0.0.1')})", True),
        (f"connect(3, {inet('127.0.0.53', 53)})", False),
        (f'sendto(3, "x", 1, 0, {inet("10.0.0.1")})', False),
        (f'sendmmsg(3, [{{msg_hdr={{msg_name={inet("10.0.0.2")}, [{{iov_base="{{sa_family=AF_UNIX}}"}}]}}}}])', False),
        ('connect(3, {sa_family=AF_UNIX, sun_path="/tmp/ssh-x}1/agent"}, 6)', True),
        ('connect(3, {sa_family=AF_UNIX, sun_path=@"abc"}, 6)', True),
        ('connect(3, {sa_family=AF_UNSPEC, sa_data="\\0\\0"}, 16)', True),
        ("connect(3, {sa_family=AF_VSOCK, svm_cid=2, svm_port=9}, 16)", False),
    ],
)
def test_loopback_and_unix_are_allowed_and_nothing_else(call: str, is_allowed: bool) -> None:
    allowed, refused = certify.parse([f"7 {call} = 0"])
    assert (len(allowed[""]), len(refused)) == (is_allowed, not is_allowed)


@needs_strace
def test_a_planted_call_is_an_error_with_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a child of a stage; nothing is reached, because the namespace has only loopback."""
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/pack.py").write_text(
        "import os, socket; server = socket.create_server(('127.0.0.1', 0)); port = server.getsockname()[1]\n"
        "assert socket.socket().connect_ex(('127.0.0.1', port)) == 0\n"
        "if os.fork() == 0:\n    print(socket.socket().connect_ex(('10.11.12.13', 80)))\nelse:\n    os.wait()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["certify", sys.executable, "-m", "stages.pack"])
    with pytest.raises(StageError, match=r"^pack: asked for 10\.11\.12\.13 port 80 \(connect\)\nairgap\.json"):
        certify.main()
    certificate = json.loads(Path("airgap.json").read_text())
    assert certificate["refused"] == [["pack", "10.11.12.13 port 80 (connect)"]]
    assert certificate["allowed"] == {"": [], "pack": ["127.0.0.1 (bind)", "127.0.0.1 (connect)"]}
    for name, message in (("exit 3", "failed with exit status 3"), ("exec ./missing", "failed with exit status 127")):
        monkeypatch.setattr(sys, "argv", ["certify", "sh", "-c", name])
        with pytest.raises(StageError, match=message):
            certify.main()


@needs_strace
def test_a_socket_of_another_process_is_out_of_reach(tmp_path: Path) -> None:
    """As that of nscd, which would look up names for the command, outside of its network namespace."""
    paths = [tmp_path / "nscd", tmp_path / "other"]
    servers = [socket.socket(socket.AF_UNIX) for _ in paths]
    for server, path in zip(servers, paths, strict=True):
        server.bind(str(path))
        server.listen()
    connect = (
        "import socket, sys; sys.exit(sum(socket.socket(socket.AF_UNIX).connect_ex(p) != 0 for p in sys.argv[1:]))"
    )
    command = [sys.executable, "-c", connect, *map(str, paths)]
    certificate = certify.certify(command, tmp_path, hidden=[f"{tmp_path}/nscd", f"{tmp_path}/missing"])
    assert certificate["exit_status"] == 1
    for server in servers:
        server.close()


@needs_strace
def test_a_trace_that_is_not_whole_is_no_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strace").write_text("#!/bin/sh\nexec true\n")
    (tmp_path / "strace").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(StageError, match=r"strace did not see all that `true` did: its exit status is 0$"):
        certify.certify(["true"], tmp_path)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "strace is not installed: install the package strace"),
        ({"strace": "exit 0", "ip": ""}, "unshare is not installed: install the package util-linux"),
        (
            {"strace": "", "ip": "", "unshare": "echo 'Operation not permitted' >&2; exit 1"},
            "Operation not permitted: allow namespaces: as root",
        ),
        ({"strace": "echo 'ptrace: denied' >&2; exit 1", "ip": "", "unshare": ""}, "ptrace: denied: allow tracing"),
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
def test_the_certificate_of_the_pipeline(reproduced: Project) -> None:
    """Every stage runs in a copy, with raw files beside the project and earlier results; a stage's call is found."""
    (reproduced / "data/raw").rename(reproduced / "../corpus")
    reproduced.set(raw_dir="../corpus")
    assert ran(reproduced.run("python", "-m", "scripts.certify", timeout=400)) == STAGES
    certificate = reproduced.json("airgap.json")
    assert certificate["refused"] == []
    assert list(certificate["allowed"]) == ["", *STAGES]
    assert "127.0.0.1 (connect)" in certificate["allowed"]["train"]
    assert not (reproduced / "outputs/.certify").exists()

    module = reproduced / "stages/organize.py"
    module.write_text(module.read_text() + "\nimport socket\nsocket.socket().connect_ex(('192.0.2.1', 443))\n")
    output = reproduced.run("python", "-m", "scripts.certify", "dvc", "repro", "organize", status=2)
    assert "error: organize: asked for 192.0.2.1 port 443 (connect)" in output
    (reproduced / "dvc.yaml").write_text('stages: {plan: {cmd: "true"}}')
    assert "error: plan: `dvc repro` did not run it" in reproduced.run("python", "-m", "scripts.certify", status=2)
