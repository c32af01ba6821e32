"""A Hub on loopback, with models and data sets: info, tree, files with redirects and ETags, and answers of which people
must be told.

As on huggingface.co, small files are under git's SHA-1 and redirect within the Hub; large ones are under their SHA-256
and redirect to another host, here another port, to which a client must not send its token. All of them are also
advertised through Xet, which is refused, as by a firewall that knows only the Hub.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "fedcba9876543210fedcba9876543210fedcba98"
TOKEN = "hf_SENTINEL"


@dataclass
class Request:
    """What a client has asked for."""

    method: str
    path: str
    token: bool


@dataclass
class Hub:
    """The models that it has, how it misbehaves, and what it was asked."""

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    """Models whose files need the token."""
    refused: dict[str, int] = field(default_factory=dict)
    """By the end of the path: the status of the answer."""
    endless: set[str] = field(default_factory=set)
    """Files that never end."""
    changed: dict[str, bytes] = field(default_factory=dict)
    """By file: what is sent in its place."""
    described: dict[str, bytes] = field(default_factory=dict)
    """By model: what is answered in place of its commit and files."""
    requests: list[Request] = field(default_factory=list)
    url: str = ""
    files_url: str = ""

    def add(self, repo: str, directory: Path, **others: bytes) -> None:
        """Serve the files of a directory, and others, as a model, or as a data set: `datasets/ORG/NAME`."""
        files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
        self.models[repo] = {name: path.read_bytes() for name, path in files.items()} | others

    def fetched(self) -> set[str]:
        """The names of the files of which contents were asked."""
        return {unquote(request.path).rpartition("/")[2] for request in self.requests if "/file/" in request.path}

    @contextmanager
    def serve(self) -> Iterator["Hub"]:
        """Answer on two ports until the block ends."""
        servers = [ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self)) for _ in range(2)]
        # Two names of one machine, which clients consider as two hosts.
        self.url = f"http://127.0.0.1:{servers[0].server_port}"
        self.files_url = f"http://localhost:{servers[1].server_port}"
        threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            for server in servers:
                server.shutdown()
                server.server_close()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".parquet"))


def oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(name: str, content: bytes) -> dict[str, Any]:
    """A file as the tree lists it. A large one is in git as a pointer."""
    found: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": oid(content)}
    if is_large(name):
        digest = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n"
        found["oid"] = oid(pointer.encode())
        found["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 134}
        found["xetHash"] = digest
    return found


def tree(files: dict[str, bytes], folder: str, is_recursive: bool) -> list[dict[str, Any]]:
    """What is in a folder: files and folders, and if it is recursive what is in these."""
    prefix, found = f"{folder}/" if folder else "", {}
    for name, content in files.items():
        if name.startswith(prefix):
            *folders, _ = name.removeprefix(prefix).split("/")
            for depth in range(1, 1 + (len(folders) if is_recursive else min(1, len(folders)))):
                path = prefix + "/".join(folders[:depth])
                found[path] = {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
            if is_recursive or not folders:
                found[name] = entry(name, content)
    return [*found.values()]


def info(files: dict[str, bytes]) -> dict[str, Any]:
    """A model as the Hub describes it."""
    siblings = []
    for name, content in files.items():
        found = entry(name, content)
        sibling = {"rfilename": name, "size": found["size"], "blobId": found["oid"]}
        if "lfs" in found:
            sibling["lfs"] = {"sha256": found["lfs"]["oid"], "size": found["size"], "pointerSize": 134}
        siblings.append(sibling)
    return {"id": "a/b", "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        token = self.headers.get("Authorization")
        hub.requests.append(Request(self.command, self.path, token is not None))
        for end, status in hub.refused.items():
            if path.endswith(end):
                return self.answer(status, {})
        if token not in (None, f"Bearer {TOKEN}"):
            return self.answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if "/xet-read-token/" in path:
            return self.answer(403, {})
        parts = path.strip("/").split("/")
        is_api, is_file = parts[0] == "api", parts[0] == "file"
        parts = parts[is_api or is_file :]
        if parts[0] == "models":
            parts = parts[1:]
        depth = 3 if parts[0] == "datasets" else 2
        repo, others = "/".join(parts[:depth]), parts[depth:]
        if is_file:
            return self.file(repo, unquote("/".join(others)))
        if not is_api and len(others) < 2:
            return self.answer(404, {})
        kind, revision = [*others[:2], "revision", "main"][:2]
        name = unquote("/".join(others[2:]))
        files = hub.models.get(repo)
        if files is None:  # also of a private one: only the token tells them apart
            return self.answer(404 if token else 401, {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        if kind == "revision":
            return self.answer(200, {}, hub.described.get(repo, json.dumps(info(files)).encode()))
        if kind == "tree":
            is_recursive = "recursive=true" in urlsplit(self.path).query.lower()
            return self.answer(200, {}, json.dumps(tree(files, name, is_recursive)).encode())
        if name not in files:
            return self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        if repo in hub.gated and token is None:
            return self.answer(401, {"X-Error-Code": "GatedRepo"})
        digest = hashlib.sha256(files[name]).hexdigest() if is_large(name) else oid(files[name])
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"', "X-Linked-Size": str(len(files[name]))}
        headers |= {"X-Linked-ETag": f'"{digest}"', "Location": f"/file/{repo}/{name}"}
        if is_large(name):
            headers["Location"] = hub.files_url + headers["Location"]
            headers["X-Xet-Hash"] = digest
            api = f"{hub.url}/api/{repo if depth == 3 else f'models/{repo}'}"
            headers["Link"] = f'<{api}/xet-read-token/{COMMIT}>; rel="xet-auth"'
        return self.answer(302 if is_large(name) else 307, headers)

    def file(self, repo: str, name: str) -> None:
        if name not in self.hub.endless:
            content = self.hub.changed.get(name, self.hub.models[repo][name])
            return self.answer(200, {"ETag": f'"{oid(content)}"', "X-Repo-Commit": COMMIT}, content)
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        with suppress(ConnectionError):
            while True:
                self.wfile.write(bytes(1 << 20))
                time.sleep(0.01)

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
