"""scripts/certify.py: what strace notes is understood, and a planted call is found, with its stage and its process."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import certify
from stages.artifacts import publish
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
        ('connect(3<s>, {sa_family=AF_UNIX, sun_path="/tmp/ssh-x}1/agent"}, 6)', "unix:/tmp/ssh-x}1/agent", True),
        (
            'connect(3<s>, {sa_family=AF_UNIX, sun_path="/run/avahi-daemon/socket"}, 6)',
            "nameserver unix:/run/avahi-daemon/socket",
            False,
        ),
        (r'connect(3<s>, {sa_family=AF_UNIX, sun_path="/srv/caf\351"}, 6)', r"unix:/srv/caf\xe9", True),
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


CREATING = r"""
7 bind(3<socket:[5]>, {sa_family=AF_UNIX, sun_path="/tmp/pymp-x/listener"}, 22) = 0
8 connect(4<socket:[6]>, {sa_family=AF_UNIX, sun_path="/tmp/pymp-x/listener"}, 22) = 0
7 openat(AT_FDCWD</work>, "/tmp/before.json", O_RDONLY|O_CLOEXEC) = 3</tmp/before.json>
7 openat(AT_FDCWD</work>, "/tmp/new.json", O_RDWR|O_CREAT|O_EXCL, 0600) = 3</tmp/new.json>
7 rename("/tmp/new.json", "/tmp/before.json") = 0
8 openat(AT_FDCWD</work>, "/tmp/before.json", O_RDONLY) = 3</tmp/before.json>
7 rename("/tmp/before.json", "/tmp/after.json") = 0
8 openat(AT_FDCWD</work>, "/tmp/after.json", O_RDONLY) = 3</tmp/after.json>
7 rename("/srv/a", "/srv/b") = -1 ENOENT (No such file or directory)
7 renameat2(AT_FDCWD</srv>, "part", AT_FDCWD</srv>, "d\303\251", RENAME_NOREPLACE) = 0
8 openat(AT_FDCWD</work>, "/srv/d\303\251/deep/x", O_RDONLY) = 3</srv/d\303\251/deep/x>
8 openat(AT_FDCWD</work>, "/srv/b", O_RDONLY) = 3</srv/b>
7 linkat(AT_FDCWD</work>, "/dev/shm/sem.1", AT_FDCWD</work>, "/dev/shm/sem.2", 0) = 0
8 openat(AT_FDCWD</work>, "/dev/shm/sem.2", O_RDWR|O_NOFOLLOW) = 3</dev/shm/sem.2>
8 openat(AT_FDCWD</work>, "/dev/shm/weights", O_RDWR|O_NOFOLLOW) = 3</dev/shm/weights>
7 mkdir("/srv/training-1", 0700) = 0
7 openat(AT_FDCWD</work>, "/srv/training-1", O_RDONLY|O_CLOEXEC) = 3</srv/training-1>
7 mkdirat(3</srv/training-1>, "in\303\251", 0777) = 0
7 mkdirat(AT_FDCWD</srv>, "made", 0777) = 0
8 openat(AT_FDCWD</work>, "/srv/training-1/in\303\251/x", O_RDONLY) = 3</srv/training-1/in\303\251/x>
8 openat(AT_FDCWD</work>, "/srv/made", O_RDONLY) = 3</srv/made>(deleted)
7 mkdir("/srv/old", 0777) = -1 EEXIST (File exists)
8 openat(AT_FDCWD</work>, "/srv/old/x", O_RDONLY) = 3</srv/old/x>
""".strip()


def test_what_the_command_itself_has_created_is_not_from_outside() -> None:
    """What it reads before it is replaced, and what was in the same directory before, is."""
    trace = certify.parse(CREATING.splitlines())
    assert trace.files == {"/tmp/before.json", "/srv/b", "/dev/shm/weights", "/srv/old/x"}
    assert [access.address for access in trace.accesses()] == [("unix", True)]


def test_what_is_read_outside_is_grouped(tmp_path: Path) -> None:
    import yaml

    outside = certify.read_outside(
        {yaml.__file__, "/etc/passwd", "/usr/lib/x/y.so", "/proc/17/maps", "/proc/18/maps", "/srv/a", "/tmp/secret",
         "/dev/null", "/dev/shm/weights", "/run/media/disk/corpus.txt", f"{tmp_path}/b"},
        [tmp_path],
    )  # fmt: skip
    assert outside["environment"]["packages"] == {"PyYAML": yaml.__version__}
    assert outside["system"] == ["/dev", "/etc/passwd", "/proc", "/usr/lib"]
    assert outside["other"] == ["/dev/shm/weights", "/run/media/disk/corpus.txt", "/srv/a", "/tmp/secret"]


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
    assert certificate["stages"] == ["pack"]

    monkeypatch.setattr(sys, "argv", ["certify", sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(StageError, match="failed with exit status 3"):
        certify.main()


@needs_strace
@pytest.mark.parametrize(
    ("name", "reason"), [("nosuchcmd", "No such file or directory"), ("./empty", "Exec format error")]
)
def test_a_command_that_cannot_be_started_is_an_error_and_no_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    (tmp_path / "empty").touch(0o755)
    (tmp_path / "airgap.json").write_text("the last one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["certify", name])
    with pytest.raises(StageError, match=rf"`{name}` did: it could not be started \({reason}\)$"):
        certify.main()
    assert (tmp_path / "airgap.json").read_text() == "the last one"
    assert capfd.readouterr() == ("", "")


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
    certificate = certify.certify(command, tmp_path, [tmp_path], hidden=[f"{tmp_path}/nscd", f"{tmp_path}/missing"])
    assert certificate["exit_status"] == 1
    assert certificate["addresses"] == {f"unix:{path}": [""] for path in paths}
    for server in servers:
        server.close()


@needs_strace
def test_what_the_command_prints_is_not_in_the_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text("")
    command = ["bash", "-c", "echo out; echo 7 err >&2; cat *; exit 3"]
    certificate = certify.certify(command, tmp_path, [])
    assert certificate["exit_status"] == 3
    assert capfd.readouterr() == ("out\n", "7 err\n")
    assert certificate["read_outside"]["other"] == [rf"{tmp_path}/caf\xe9.txt"]
    publish.write_json(tmp_path / "airgap.json", certificate)


@needs_strace
@pytest.mark.parametrize(
    ("strace", "message"),
    [
        ("exec true", "exit status 0, and the trace ends before the command does"),
        ("strace \"$@\"; echo 'strace: no memory' >&2; exit 0", "strace: no memory"),
    ],
)
def test_a_trace_that_is_not_whole_is_no_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strace: str, message: str
) -> None:
    (tmp_path / "strace").write_text(f"#!/bin/sh\nPATH={os.environ['PATH']}\n{strace}\n")
    (tmp_path / "strace").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(StageError, match=f"strace did not see all that `true` did: {message}$"):
        certify.certify(["true"], tmp_path, [tmp_path])


def make_small_project(project: Path) -> None:
    """Raw files beside the project, a model that git ignores, and a DVC that does nothing."""
    (project / "outputs").mkdir(parents=True)
    (project.parent / "corpus").mkdir()
    (project.parent / "corpus/a.txt").write_text("a")
    (project / "models/stage1").mkdir(parents=True)
    files = {
        "params.yaml": "raw_dir: ../corpus\nmodel_name: models/stage1\n",
        "dvc.yaml": "stages:\n  pack:\n    cmd: python -m stages.pack\n  plan:\n    cmd: python -m stages.plan\n",
        "dvc.lock": "", "models/.gitignore": "/stage1", "models/stage1.dvc": "", "models/stage1/config.json": "{}",
        ".gitignore": "/outputs", "stages/__init__.py": "", "stages/pack.py": "",
    }  # fmt: skip
    for name, text in files.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text)
    subprocess.run(["git", "init", "-q", project], check=True)


def test_the_copy_has_all_that_the_stages_read_and_no_result(tmp_path: Path) -> None:
    project = tmp_path / "project"
    make_small_project(project)
    for _ in range(2):
        with certify.fresh_copy(project) as copy:
            assert (copy / "../corpus/a.txt").read_text() == "a"
            assert (copy / "models/stage1/config.json").read_text() == "{}"
            assert not any((copy / name).exists() for name in ("dvc.lock", "models/stage1.dvc"))
            assert "dir = cache" in (copy / ".dvc/config.local").read_text()
        assert list((project / "outputs").iterdir()) == []
    assert (tmp_path / "corpus/a.txt").exists()


@needs_strace
def test_a_stage_that_did_not_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose results DVC restores, or that is frozen."""
    project = tmp_path / "project"
    make_small_project(project)
    (tmp_path / "bin").mkdir()
    script = f'echo "$@" "$DVC_ROOT" "$CHECKPOINT_ROOT" > {tmp_path}/called\n{sys.executable} -m stages.pack'
    (tmp_path / "bin/dvc").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bin/dvc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=os.pathsep)
    for name in ("DVC_ROOT", "CHECKPOINT_ROOT"):
        monkeypatch.setenv(name, "/elsewhere")
    monkeypatch.setattr(sys, "argv", ["certify"])
    monkeypatch.chdir(project)
    with pytest.raises(StageError, match=r"^plan: `dvc repro --force` did not run it\nairgap\.json"):
        certify.main()
    assert (tmp_path / "called").read_text().split() == ["repro", "--force"]
    assert json.loads(Path("airgap.json").read_text())["stages"] == ["pack"]


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
    assert certificate["addresses"]["127.0.0.1"] == ["evaluate", "train"]
    assert str(tmp_path) not in json.dumps(certificate)
    here = certify.digests(reproduced.path)
    certain = {"data/splits", "data/tokens/train", "outputs/test/run.json", "outputs/evaluation.json"}
    assert certain <= here["came_out"].keys()
    assert {name: certificate[name] for name in here} == here
    assert not list((reproduced / "outputs").glob(".certify-*"))
    assert "Data and pipelines are up to date" in reproduced.run("dvc", "repro")

    module = reproduced / "stages/organize.py"
    module.write_text(module.read_text() + "\nimport socket\nsocket.socket().connect_ex(('192.0.2.1', 443))\n")
    output = reproduced.run("python", "-m", "scripts.certify", "dvc", "repro", "organize", status=2)
    assert "error: organize: `python -m stages.organize` asked for 192.0.2.1 port 443 (connect)" in output
