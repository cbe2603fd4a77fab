"""The Hugging Face hub: config.json and the headers of safetensors files, never a weight.

huggingface_hub brings token, cache, `HF_ENDPOINT` and `HF_HUB_OFFLINE`; requests go over its
session, bounded in bytes and time.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import memfit
from memfit.errors import Problem, SourceError
from memfit.lazy_dataclass import dataclass
from memfit.model import catalog
from memfit.model.sources import folder, http, safetensors
from memfit.model.sources.files import CONFIG_LIMIT, listed, parse_object, shown
from memfit.model.sources.inventory import Source, TensorInfo
from memfit.units import MIB

HEADERS_PATIENCE = 6  # all headers together may take that many timeouts
FIRST_BYTES = 2**16  # the header of a dense model's shard fits in
ALL_HEADERS = 256 * MIB
_REVISION = re.compile(r"[\w./+-]{1,200}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where on the hub: a repository at a revision, and how it is spoken to."""

    repo: str
    revision: str | None
    token: str | None
    timeout: float
    endpoint: str

    @property
    def name(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def host(self) -> str:
        """For messages: without the name and password that an address may have."""
        address = self.endpoint.partition("://")[2] or self.endpoint
        before, slash, rest = address.partition("/")
        return before.rpartition("@")[2] + slash + rest

    def url(self, file: str) -> str:
        from huggingface_hub import hf_hub_url

        return str(hf_hub_url(self.repo, file, revision=self.revision, endpoint=self.endpoint))

    def headers(self) -> dict[str, str]:
        """huggingface_hub's own would ask the hub for a list of agents first, without a limit of
        bytes (2.4 utils/_detect_agent.py)."""
        from huggingface_hub import __version__ as version
        from huggingface_hub import constants, get_token

        implicit = not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN
        token = self.token or (get_token() if implicit else None)
        agent = {"user-agent": f"memfit/{memfit.__version__}; hf_hub/{version}"}
        return agent | ({"authorization": f"Bearer {token}"} if token else {})


def read_hub(
    repo: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    token: str | None = None,
    timeout: float = 10.0,
    endpoint: str | None = None,
) -> Source:
    """A model of the hub, or of its local cache when offline or when the hub does not answer."""
    constants = _constants()
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise SourceError.one(
            f"`{shown(revision)}` is not a revision",
            where="model",
            hint="give a branch, a tag or a commit",
        )
    place = Place(
        repo=repo,
        revision=revision,
        token=token,
        timeout=timeout,
        endpoint=(endpoint or constants.ENDPOINT).rstrip("/"),
    )
    if offline or constants.HF_HUB_OFFLINE:
        return _from_cache(place)
    try:
        answer = _get(place, "config.json", limit=CONFIG_LIMIT)
    except Unavailable as error:
        if _cached(place) is None or error.__cause__ is None:
            raise
        warning = Problem(
            message=f"{error.problems[0].message}; memfit used the copy in the local cache",
            where="model",
            level="warning",
        )
        source = _from_cache(place)
        return replace(source, problems=(*source.problems, warning))
    config = folder.checked(
        parse_object(answer.body, where=f"{place.name}/config.json"),
        where=f"{place.name}/config.json",
    )
    commit = answer.headers.get("x-repo-commit")
    _keep(place, commit, answer.body)
    tensors, problems = _tensors(place, commit)
    at = f" at commit {shown(commit)[:12]}" if commit else ""
    return Source(
        name=place.name,
        origin=f"{place.host}/{place.repo}{at}",
        config=config,
        tensors=tensors,
        problems=problems,
    )


def _constants() -> Any:
    """The settings of huggingface_hub, which it reads from the environment when it is imported."""
    try:
        # All else comes from it, and it reads the environment too
        from huggingface_hub import constants, file_download  # noqa: F401
    except ImportError:
        raise SourceError.one(
            "reading from the hub needs huggingface_hub",
            where="model",
            hint="pip install huggingface_hub",
        ) from None
    except ValueError as error:  # it takes the address apart at import
        raise SourceError.one(
            (f"huggingface_hub rejects its settings: {re.sub('//[^/@]*@', '//', str(error))}"),
            where="model",
            hint="check `HF_ENDPOINT`",
        ) from None
    return constants


# ---------------------------------------------------------------- the cache


def _cached(place: Place) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(place.repo, "config.json", revision=place.revision)
    return Path(found) if isinstance(found, str) else None


def _from_cache(place: Place) -> Source:
    """What an earlier download left: the config, and the tensors where all shards are there."""
    found = _cached(place)
    if found is None:
        raise Unavailable.one(
            f"`{place.name}` is not in the local cache of the hub, and memfit is offline",
            where="model",
            hint=_similar(place.repo) or "unset `HF_HUB_OFFLINE`, or use a model of the catalog",
        )
    return folder.read_folder(
        found.parent,
        name=place.name,
        origin=f"local cache of {place.host}/{place.repo}, commit {found.parent.name[:12]}",
    )


def _keep(place: Place, commit: str | None, config: bytes) -> None:
    """Put config.json into huggingface_hub's cache, for the next time without network: as a file
    of its snapshot, as where there are no symbolic links. It is no matter if that fails."""
    if not commit or not re.fullmatch("[0-9a-f]{40}", commit):
        return
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    home = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=place.repo, repo_type="model")
    files = {home / "snapshots" / commit / "config.json": config}
    if place.revision != commit:
        files[home / "refs" / (place.revision or "main")] = commit.encode()
    with contextlib.suppress(OSError):
        for path, content in files.items():
            if not path.is_file() or (path.parent.name != commit and path.read_bytes() != content):
                path.parent.mkdir(parents=True, exist_ok=True)
                partial_file = path.with_name(f".{path.name}.{os.getpid()}")
                partial_file.write_bytes(content)
                partial_file.replace(path)


def _similar(repo: str) -> str:
    close = catalog.nearest(repo)
    return (
        "did you mean " + ", ".join(f"`{one}`" for one in close) + ", known without the hub?"
        if close
        else ""
    )


# ---------------------------------------------------------------- requests


def _get(
    place: Place, file: str, *, limit: int, start: int | None = None, url: str = ""
) -> http.Answer:
    """One file or a part of it. Everything that can go wrong becomes one sentence."""
    name = f"{place.name}/{file}" if file else place.name
    try:
        answer = http.within(
            place.timeout,
            lambda: http.get(
                url or place.url(file),
                headers=place.headers(),
                limit=limit,
                seconds=place.timeout,
                start=start,
            ),
        )
    except http.Late as error:
        raise Unavailable.one(
            f"{place.host} did not send `{name}` within {place.timeout:g} s",
            where="model",
            hint="try again, or use a local copy",
        ) from error
    except http.Unreachable as error:
        raise Unavailable.one(
            f"cannot reach {place.host}: {error}",
            where="model",
            hint=" ".join(
                filter(
                    None,
                    (
                        _similar(place.repo),
                        "check the network, `HF_ENDPOINT` and proxies, or use a local copy",
                    ),
                )
            ),
        ) from error
    except http.TooLong as error:
        raise SourceError.one(
            (f"{place.host} sent more than {limit // MIB} MiB as `{name}`, which is not a config"),
            where="model",
        ) from error
    if answer.status == 429 or answer.status >= 500:  # the hub's own trouble: a cached copy may do
        raise Unavailable(*refusal(place, file, answer).problems) from http.Unreachable(
            str(answer.status)
        )
    if answer.status >= 300:
        raise refusal(place, file, answer)
    return answer


class Unavailable(SourceError):
    """The hub does not show what it may have: no network, no answer, or no leave."""


class Absent(SourceError):
    """The repository has no such file."""


def refusal(place: Place, file: str, answer: http.Answer) -> SourceError:
    """The message for an HTTP status, with the codes that the hub adds in `X-Error-Code`
    (huggingface_hub/utils/_http.py)."""
    code = answer.headers.get("x-error-code", "")
    said = answer.headers.get("x-error-message", "")
    page = f"{place.endpoint}/{place.repo}"
    known = "log in with `hf auth login`, or set `HF_TOKEN`"

    def error(message: str, hint: str = "") -> SourceError:
        return SourceError.one(message, where="model", hint=hint)

    if code == "GatedRepo":
        state = (
            "needs you to accept its license"
            if answer.status == 401
            else "is not open to your token"
        )
        return Unavailable.one(
            f"`{place.repo}` is gated and {state}",
            where="model",
            hint=f"accept the license at {page}, then {known}",
        )
    if answer.status == 401 and "credential" in said.lower():
        return error(f"{place.host} does not accept the token", f"it may have expired: {known}")
    if code == "RevisionNotFound":
        return error(
            f"`{place.repo}` has no revision `{place.revision or 'main'}`",
            f"see the branches and tags at {page}/tree/main",
        )
    if code == "EntryNotFound":
        return Absent(
            Problem(
                message=f"`{place.name}` has no {file}",
                where="model",
                hint=_what_is_there(place) if file == "config.json" else "",
            )
        )
    if code == "RepoNotFound" or answer.status in (401, 404):
        hint = _similar(place.repo)
        return error(
            f"`{place.repo}` is not on {place.host}, or is private",
            " ".join(filter(None, (hint, f"if it is private, {known}"))),
        )
    if answer.status == 403:
        why = " (the hub has disabled it)" if "disabled" in said.lower() else ""
        return error(
            f"{place.host} refuses `{place.repo}`{why}",
            f"the token may lack the right to read it: see {page}",
        )
    if answer.status == 429:
        wait = answer.headers.get("retry-after", "")
        return error(
            f"{place.host} has rate-limited this machine",
            f"wait {wait} s" if wait.isdigit() else f"wait a little, or {known}",
        )
    return error(
        f"{place.host} answers with status {answer.status} for `{place.name}`",
        "try again later, or use a local copy",
    )


def _what_is_there(place: Place) -> str:
    """For a repository without config.json: what kind it is, by its list of files."""
    at = f"/revision/{place.revision}" if place.revision else ""
    try:
        answer = _get(
            place, "", limit=CONFIG_LIMIT, url=f"{place.endpoint}/api/models/{place.repo}{at}"
        )
        info = parse_object(answer.body, where=f"{place.name} (list of files)")
    except SourceError:
        return "give a repository in the transformers format"
    files = [
        entry["rfilename"]
        for entry in _dicts(info.get("siblings"))
        if isinstance(entry.get("rfilename"), str)
    ]
    if "adapter_config.json" in files:
        card = info.get("cardData")
        base = card.get("base_model") if isinstance(card, dict) else None
        which = f", `{shown(base)}`," if isinstance(base, str) else ""
        return f"it is an adapter: estimate its base model{which} with `--method lora`"
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if ggufs:
        return f"it holds GGUF files; download one and name it: {listed(ggufs, 4)}"
    return "give a repository in the transformers format"


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


# ---------------------------------------------------------------- tensors


def _tensors(
    place: Place, commit: str | None
) -> tuple[tuple[TensorInfo, ...] | None, tuple[Problem, ...]]:
    """Exact tensors, or None with a warning where the headers cannot be had; a header that is wrong
    is an error."""
    if commit and _REVISION.fullmatch(commit):
        place = replace(place, revision=commit)  # so that all parts are of one version
    until = time.monotonic() + HEADERS_PATIENCE * place.timeout
    try:
        try:
            index = _get(place, folder.INDEX, limit=safetensors.INDEX_LIMIT)
        except Absent:
            return _header(place, folder.SINGLE, _Budget()), ()
        shards = safetensors.parse_index(index.body, where=f"{place.name}/{folder.INDEX}")
        budget = _Budget()
        calls: list[Callable[[], tuple[TensorInfo, ...]]] = [
            partial(_header, place, name, budget) for name in shards.files
        ]
        read = dict(
            zip(shards.files, http.all_within(until - time.monotonic(), calls), strict=True)
        )
        return safetensors.joined(
            shards, lambda name: read[name], where=f"{place.name}/{folder.INDEX}"
        ), ()
    except Absent as error:
        note = Problem(
            message=f"{error.problems[0].message}, so tensors follow the config",
            where="model",
            level="warning",
            hint="exact unless quantized",
        )
        return None, (note,)
    except (SourceError, http.Late) as error:
        if not isinstance(error, http.Late) and not isinstance(
            error.__cause__, (http.Late, http.Unreachable)
        ):
            raise
        why = (
            error.problems[0].message
            if isinstance(error, SourceError)
            else f"{place.host} was too slow with the headers"
        )
        warning = Problem(
            message=f"{why}, so tensors follow the config",
            where="model",
            level="warning",
            hint="exact unless quantized",
        )
        return None, (warning,)


class _Budget:
    """Bytes that all headers of a model may take together."""

    def __init__(self) -> None:
        self.left, self.lock = ALL_HEADERS, threading.Lock()

    def spend(self, count: int, what: str) -> None:
        with self.lock:
            self.left -= count
            if self.left < 0:
                raise SourceError.one(
                    f"the headers of `{what}` are larger than {ALL_HEADERS // MIB} MiB together",
                    where="model",
                )


def _header(place: Place, file: str, budget: _Budget) -> tuple[TensorInfo, ...]:
    """The tensors of one file: its first bytes, and the rest of the header where it is longer."""
    where = f"{place.name}/{file}"
    first = _get(place, file, limit=FIRST_BYTES, start=0)
    length = safetensors.header_length(first.body, where=where, file_bytes=first.total)
    budget.spend(length, place.name)
    header = first.body[safetensors.PREFIX : safetensors.PREFIX + length]
    if len(header) < length:
        start = safetensors.PREFIX + len(header)
        header += _get(place, file, limit=length - len(header), start=start).body
    if len(header) < length:
        raise SourceError.one(
            (f"{place.host} sent only {len(header)} of {length} bytes of the header of `{where}`"),
            where="model",
        )
    data = None if first.total is None else first.total - safetensors.PREFIX - length
    return safetensors.parse_header(header, where=where, data_bytes=data)
