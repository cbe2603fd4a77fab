"""What a script downloads by itself, without a network: random words take the place of text
files, records that of JSON, blank pictures that of pictures; archives are empty."""

from __future__ import annotations

import functools
import importlib
import io
import random
import re
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from memfit.trace import asked_columns, failures, records
from memfit.trace.imports import Change, Patch
from memfit.trace.refuse import Watcher
from memfit.trace.synthetic_tokenizers import table

LINES, WORDS = 8000, 16  # a line each; about as long as a book
TEXTS, JSON = (".txt", ".text", ".md"), (".json", ".jsonl")
PICTURES = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG"}
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2")
DOWNLOAD = "download "  # begins the key of a note


@functools.cache
def words() -> bytes:
    known, source = table()["words"].split(), random.Random(0)
    return "\n".join(" ".join(source.choices(known, k=WORDS)) for _ in range(LINES)).encode()


def is_known(url: str) -> bool:
    """Whether a file of this name has a stand-in."""
    parts = urlsplit(url)
    path = parts.path.lower()
    seen = path.endswith(tuple(PICTURES))  # of which hubs have many, beside their models
    listed = path.endswith((*TEXTS, *JSON, *ARCHIVES))
    return seen or (listed and not (parts.hostname or "").endswith(failures.HUBS))


def content(url: str, size: int = 256) -> bytes:
    path = urlsplit(url).path.lower()
    if path.endswith(tuple(PICTURES)):
        return picture(PICTURES[path[path.rindex(".") :]], size)
    if path.endswith(ARCHIVES):
        return archive(path.rpartition(".")[2])
    return records.content(path) if path.endswith(JSON) else words()


def picture(kind: str, size: int) -> bytes:
    made = io.BytesIO()
    importlib.import_module("PIL.Image").new("RGB", (size, size)).save(made, kind)
    return made.getvalue()


def archive(ending: str) -> bytes:
    """One without files: what a script reads from it afterwards is not there either."""
    made = io.BytesIO()
    if ending == "zip":
        zipfile.ZipFile(made, "w").close()
    else:
        mode = {"tar": "w:", "bz2": "w:bz2"}.get(ending, "w:gz")
        tarfile.open(fileobj=made, mode=mode).close()  # type: ignore[call-overload]
    return made.getvalue()


def archives_of(notes: Iterable[str]) -> list[str]:
    """Names of the archives that were not downloaded, from the keys of a recorder's notes."""
    names = [key.removeprefix(DOWNLOAD) for key in notes if key.startswith(DOWNLOAD)]
    return [name for name in names if name.lower().endswith(ARCHIVES)]


def splitters(recorder: Watcher, module: ModuleType) -> list[Patch]:
    """nltk's splitters, without the data that they download."""

    def splitting(name: str, pattern: str) -> Patch:
        true = getattr(module, name)

        def tokenize(text: str, *args: Any, **given: Any) -> list[str]:
            try:
                found: list[str] = true(text, *args, **given)
            except LookupError:
                recorder.note("nltk", "nltk's data was not found: texts are split at spaces")
                found = [one for one in re.split(pattern, text) if one]
            return found

        return (module, name, tokenize)

    return [splitting("sent_tokenize", r"(?<=[.!?])\s+"), splitting("word_tokenize", r"\s+")]


def packages(recorder: Watcher, module: ModuleType) -> list[Patch]:
    """nltk's `find`, by which a script asks whether data is there, to download it."""
    true = module.find

    def find(name: str, *args: Any, **given: Any) -> Any:
        try:
            return true(name, *args, **given)
        except LookupError:
            if not asked_columns.by_user():
                raise
            recorder.note(
                f"nltk {name}",
                f"nltk's `{name}` was not found: the script goes on as if it were installed",
            )
            return name

    return [(module, "find", find)]


def hub(note: Callable[[str], None]) -> dict[str, Change]:
    """For scripts that fetch a repository's files themselves."""

    def file(module: ModuleType) -> list[Patch]:
        """What reads tables, weights or data sets has stand-ins where there is no file."""
        true = module.hf_hub_download

        @functools.wraps(true)
        def hf_hub_download(repo_id: str, filename: str, *args: Any, **given: Any) -> Any:
            try:
                return true(repo_id, filename, *args, **given)
            except Exception as bad:
                if failures.missing_file(bad) is None or not asked_columns.by_user():
                    raise
                path = Path(tempfile.mkdtemp(), filename)
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix in (*TEXTS, *JSON):
                    note(filename)
                    path.write_bytes(content(filename))
                return str(path)

        return [(module, "hf_hub_download", hf_hub_download)]

    def whole(module: ModuleType) -> list[Patch]:
        true = module.snapshot_download

        @functools.wraps(true)
        def snapshot_download(repo_id: str, *args: Any, **given: Any) -> Any:
            """The name, by which other stand-ins know it."""
            try:
                return true(repo_id, *args, **given)
            except Exception as bad:
                if failures.missing_file(bad) is None or not asked_columns.by_user():
                    raise
                return repo_id

        return [(module, "snapshot_download", snapshot_download)]

    return {
        "huggingface_hub.file_download": file,
        "huggingface_hub._snapshot_download": whole,
    }


def changes(recorder: Watcher, columns: asked_columns.Columns) -> dict[str, Change]:
    size = columns.source.image

    def note(url: str) -> None:
        name = urlsplit(url).path.rpartition("/")[2]
        asked = f"it holds {records.COUNT} records with the fields that the script asks for"
        if count := records.classes(name):
            asked = f"it holds {count} classes"
        known = (JSON, asked), (tuple(PICTURES), "it is blank"), (ARCHIVES, "it is empty")
        held = next(
            (said for ends, said in known if name.lower().endswith(ends)), "it holds random words"
        )
        recorder.note(f"{DOWNLOAD}{name}", f"`{name}` was not downloaded: {held}")

    def requests(module: ModuleType) -> list[Patch]:
        true = module.Session.request

        def request(self: Any, method: str, url: Any, *args: Any, **given: Any) -> Any:
            try:
                return true(self, method, url, *args, **given)
            except OSError:
                if method.lower() != "get" or not is_known(str(url)):
                    raise
                note(str(url))
                found = module.Response()
                found.status_code, found.url, found.encoding = 200, str(url), "utf-8"
                held = content(str(url), size)
                found.raw, found.headers["content-length"] = io.BytesIO(held), str(len(held))
                return found

        return [(module.Session, "request", request)]

    def httpx(module: ModuleType) -> list[Patch]:
        true = module.get

        def get(url: Any, *args: Any, **given: Any) -> Any:
            try:
                return true(url, *args, **given)
            except (module.HTTPError, OSError):
                if not is_known(str(url)):
                    raise
                note(str(url))
                asked = module.Request("GET", url)
                return module.Response(200, content=content(str(url), size), request=asked)

        return [(module, "get", get)]

    def urllib(module: ModuleType) -> list[Patch]:
        true = module.urlopen

        def urlopen(url: Any, *args: Any, **given: Any) -> Any:
            try:
                return true(url, *args, **given)
            except OSError as bad:
                named = str(getattr(url, "full_url", url))
                answered = hasattr(bad, "code")  # by a server, which does not have it
                caller = str(sys._getframe(1).f_globals.get("__name__"))
                # torchvision's data sets have stand-ins of their own
                if answered or not is_known(named) or caller.startswith("torchvision."):
                    raise
                note(named)
                message: Any = importlib.import_module("email.message")
                headers = message.Message()
                held = content(named, size)
                headers["Content-Length"] = str(len(held))
                kind: Any = importlib.import_module("urllib.response")
                return kind.addinfourl(io.BytesIO(held), headers, named, 200)

        return [(module, "urlopen", urlopen)]

    return {
        **hub(note),
        "json": lambda module: records.changes(module, columns),
        "requests.sessions": requests,
        "httpx": httpx,
        "urllib.request": urllib,
        "nltk.tokenize": lambda module: splitters(recorder, module),
        "nltk.data": lambda module: packages(recorder, module),
    }


__all__ = ["changes"]
