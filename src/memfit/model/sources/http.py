"""One GET over huggingface_hub's session, bounded in bytes and seconds whatever the server does.

The session is httpx in huggingface_hub 1.x (httpx2 from 2.x) and requests before; its proxies,
certificates and tokens are kept.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from types import ModuleType
from typing import Any, TypeVar

from memfit.lazy_dataclass import dataclass

T = TypeVar("T")
CHUNK = 2**16
REDIRECTS = 10


class Late(Exception):
    """The answer did not come in time."""


class TooLong(Exception):
    """The answer is larger than it may be."""


class Unreachable(Exception):
    """No answer: no connection, no name, a broken protocol."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Status, headers (names in lower case) and as much of the body as was asked for."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def total(self) -> int | None:
        """Size of the whole file, where the answer tells it."""
        if self.status == 206:
            text = self.headers.get("content-range", "").rpartition("/")[2]
        else:
            text = (
                "" if "content-encoding" in self.headers else self.headers.get("content-length", "")
            )
        return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def get(
    url: str, *, headers: Mapping[str, str], limit: int, seconds: float, start: int | None = None
) -> Answer:
    """GET `url`. With `start`, only `limit` bytes from there; a server that ignores ranges is read
    as far as that and no further."""
    until = time.monotonic() + seconds
    asked = dict(headers) | {"accept-encoding": "identity"}
    if start is not None:
        asked["range"] = f"bytes={start}-{start + limit - 1}"
    from huggingface_hub.utils import get_session

    session = get_session()
    library = _library(session)
    try:
        with _stream(session, library, url, asked, seconds) as (response, before):
            status = int(response.status_code)
            found = {str(name).lower(): str(value) for name, value in response.headers.items()}
            for earlier in before:  # the hub names the commit before it sends elsewhere
                if "x-repo-commit" in earlier.headers:
                    found.setdefault("x-repo-commit", str(earlier.headers["x-repo-commit"]))
            skip = start if start and status == 200 else 0
            ranged = start is not None and status in (200, 206)
            body = _body(response, library, limit + skip, until, cut=ranged or status >= 400)
            return Answer(status=status, headers=found, body=body[skip:])
    except _timeouts(library):
        raise Late from None
    except _failures(library) as error:
        raise Unreachable(_reason(error)) from None
    except ValueError as error:  # a token or an address that cannot be sent
        raise Unreachable(f"the request cannot be sent ({type(error).__name__})") from None


def _library(session: Any) -> ModuleType:
    """The HTTP library that the session is of."""
    names = {
        part for kind in type(session).__mro__ for part in (kind.__module__.partition(".")[0],)
    }
    for name in ("httpx2", "httpx", "requests"):
        if name in names:
            return sys.modules[name]
    raise Unreachable(f"huggingface_hub brings the unknown HTTP session {type(session).__name__}")


def _timeouts(library: ModuleType) -> type[Exception]:
    kind: type[Exception] = (
        library.Timeout if library.__name__ == "requests" else library.TimeoutException
    )
    return kind


def _failures(library: ModuleType) -> tuple[type[Exception], ...]:
    own = (
        (library.RequestException,)
        if library.__name__ == "requests"
        else (library.HTTPError, library.InvalidURL)
    )
    return (*own, OSError)


@contextmanager
def _stream(
    session: Any, library: ModuleType, url: str, headers: Mapping[str, str], seconds: float
) -> Iterator[tuple[Any, list[Any]]]:
    """The answer, and those that sent elsewhere before. These are followed here: the libraries read
    what comes with them to its end, however long that is."""
    earlier: list[Any] = []
    if library.__name__ == "requests":
        response = session.get(
            url, headers=headers, timeout=seconds, stream=True, allow_redirects=False
        )
        while response.next is not None and len(earlier) < REDIRECTS:
            response.close()
            earlier.append(response)
            response = session.send(
                response.next, timeout=seconds, stream=True, allow_redirects=False
            )
    else:
        request = session.build_request("GET", url, headers=headers, timeout=seconds)
        response = session.send(request, stream=True, follow_redirects=False)
        while response.next_request is not None and len(earlier) < REDIRECTS:
            response.close()
            earlier.append(response)
            response = session.send(response.next_request, stream=True, follow_redirects=False)
    with closing(response):
        if len(earlier) == REDIRECTS:
            raise Unreachable("it redirects endlessly")
        yield response, earlier


def _body(response: Any, library: ModuleType, limit: int, until: float, *, cut: bool) -> bytes:
    body = bytearray()
    for chunk in (
        response.iter_content(CHUNK) if library.__name__ == "requests" else response.iter_bytes()
    ):
        if time.monotonic() > until:
            raise Late
        body += chunk
        if len(body) > limit and not cut:
            raise TooLong
        if len(body) >= limit and cut:
            break
    return bytes(body[:limit])


def _reason(error: Exception) -> str:
    """What the socket said, without addresses of libraries."""
    text = str(error).lower()
    for mark, reason in (
        ("refused", "connection refused"),
        ("illegal header", "the token has characters that cannot be sent"),
        ("name or service", "its name cannot be resolved"),
        ("nodename", "its name cannot be resolved"),
        ("name resolution", "its name cannot be resolved"),
        ("getaddrinfo", "its name cannot be resolved"),
        ("certificate", "its certificate is not trusted"),
        ("redirects", "it redirects endlessly"),
        ("unreachable", "the network is unreachable"),
        ("disconnected", "it closed the connection without a response"),
        ("remote end closed", "it closed the connection without a response"),
        ("reset by peer", "it closed the connection"),
        ("peer closed", "its response was cut off"),
        ("incompleteread", "its response was cut off"),
        ("status line", "its response is not HTTP"),
        ("badstatusline", "its response is not HTTP"),
        ("https://", "its address is not http or https"),
        ("unsupported protocol", "its address is not http or https"),
        ("invalid", "its address is not http or https"),
    ):
        if mark in text:
            return reason
    return type(error).__name__


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call`, or `Late`. It runs in a thread of its own, since a name server or a
    trickle of headers knows no timeout."""
    return all_within(seconds, [call])[0]


def all_within(seconds: float, calls: list[Callable[[], T]], workers: int = 16) -> list[T]:
    """The results of all calls, some at a time; the first failure is raised. Threads are daemons: a
    late one holds nobody up."""
    results: dict[int, T] = {}
    failures: list[BaseException] = []
    todo = iter(list(enumerate(calls)))
    lock, done = threading.Lock(), threading.Event()

    def work() -> None:
        while True:
            with lock:
                turn = None if failures or done.is_set() else next(todo, None)
            if turn is None:
                return
            try:
                result = turn[1]()
            # Handed over to the waiting thread, which raises it
            except BaseException as error:  # noqa: BLE001
                with lock:
                    failures.append(error)
                done.set()
                return
            with lock:
                results[turn[0]] = result
                if len(results) == len(calls):
                    done.set()

    for _ in range(min(workers, len(calls))):
        threading.Thread(target=work, daemon=True, name="memfit-hub").start()
    in_time = done.wait(seconds) if calls else True
    done.set()
    if failures:
        raise failures[0]
    if not in_time:
        raise Late
    return [results[index] for index in range(len(calls))]
