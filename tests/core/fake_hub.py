"""A hub on 127.0.0.1: real HTTP, with the paths, headers and error codes of huggingface.co, and the
ill manners that a test asks for."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secretsecretsecret"


@dataclass
class Repo:
    """Files by name; a callable answers by itself, in place of the file."""

    files: dict[str, bytes] = field(default_factory=dict)
    behave: dict[str, Callable[[Handler], None]] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    revisions: tuple[str, ...] = ("main", COMMIT, "v1.0")
    card: dict[str, object] = field(default_factory=dict)
    ranges: bool = True


class Hub(ThreadingHTTPServer):
    """Repositories by name, and a record of what was asked: method, path, the Range header."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.moved: dict[str, str] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.sent = 0

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what some tests are about."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.server.asked.append((self.command, path, self.headers.get("Range", "")))
        if path.startswith("/api/models/"):
            name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
            self.listing(name, revision)
            return
        name, _, rest = path.removeprefix("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        if name in self.server.moved:
            self.answer(307, headers={"Location": f"/{self.server.moved[name]}/resolve/{rest}"})
            return
        repo = self.allowed(name)
        if repo is None:
            return
        if revision not in repo.revisions:
            self.refuse(404, "RevisionNotFound", "Invalid rev id")
        elif file in repo.behave:
            repo.behave[file](self)
        elif file in repo.files:
            self.file(repo, repo.files[file])
        else:
            self.refuse(404, "EntryNotFound", "Entry not found")

    def allowed(self, name: str) -> Repo | None:
        """The repository, or the refusal that the real hub gives."""
        said = self.headers.get("Authorization")
        if said is not None and said != f"Bearer {TOKEN}":
            self.refuse(401, "", "Invalid credentials in Authorization header")
            return None
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and said is None):
            self.refuse(404 if said else 401, "RepoNotFound", "Repository not found")
        elif repo.gated and said is None:
            self.refuse(401, "GatedRepo", f"Access to model {name} is restricted.")
        elif repo.gated:
            self.refuse(
                403,
                "GatedRepo",
                f"Access to model {name} is restricted and you are not in the authorized list.",
            )
        else:
            return repo
        return None

    def listing(self, name: str, revision: str) -> None:
        repo = self.allowed(name)
        if repo is not None:
            body = {
                "id": name,
                "sha": COMMIT,
                "siblings": [{"rfilename": file} for file in repo.files],
                "cardData": repo.card,
            }
            self.answer(200, json.dumps(body).encode())

    def file(self, repo: Repo, content: bytes) -> None:
        headers = {
            "ETag": f'"{hashlib.sha1(content, usedforsecurity=False).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        asked = self.headers.get("Range", "")
        if not asked or not repo.ranges:
            self.answer(200, content, headers)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(content)), len(content) - 1)
        if start >= len(content):
            self.refuse(416, "", "Range not satisfiable")
            return
        self.answer(
            206,
            content[start : end + 1],
            {**headers, "Content-Range": f"bytes {start}-{end}/{len(content)}"},
        )

    def refuse(self, status: int, code: str, message: str, **headers: str) -> None:
        more = {"X-Error-Code": code} if code else {}
        self.answer(status, message.encode(), {**more, "X-Error-Message": message, **headers})

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.server.sent += len(body)


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


# ---------------------------------------------------------------- ill manners


def silent(handler: Handler) -> None:
    """Accepts, and says nothing for longer than anyone waits."""
    time.sleep(5)


def trickle(handler: Handler) -> None:
    """A byte of the body now and then: no single wait is long, all of them together are."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    for _ in range(50):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.1)


def trickle_of_headers(handler: Handler) -> None:
    """The same before the body has begun."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for index in range(50):
        handler.wfile.write(b"X-Wait-%d: 1\r\n" % index)
        handler.wfile.flush()
        time.sleep(0.1)


def endless(handler: Handler) -> None:
    """No length announced, and no end."""
    handler.send_response(200)
    handler.send_header("Connection", "close")
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 2**16)


def huge(handler: Handler) -> None:
    """A length that is too much, and bytes to go with it."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(2**40))
    handler.end_headers()
    while True:
        handler.wfile.write(b" " * 2**16)


def hangs_up(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b"{")
    handler.close_connection = True


def no_http(handler: Handler) -> None:
    handler.wfile.write(b"\x00\x01\x02 garbage \xff\r\n\r\n")
    handler.close_connection = True


def circle(handler: Handler) -> None:
    handler.answer(302, headers={"Location": handler.path})


def status(code: int, message: str = "", **headers: str) -> Callable[[Handler], None]:
    return lambda handler: handler.refuse(code, "", message, **headers)


def body(content: bytes) -> Callable[[Handler], None]:
    return lambda handler: handler.answer(200, content)
