"""Reading a model: from the hub, a folder, a file or the bundled catalog, into its raw config and,
where available, its exact tensors.

Nothing of a model is ever executed, and weights are never read: headers only, each with a limit on
bytes and on time.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from memfit.errors import Problem, SourceError
from memfit.model import catalog
from memfit.model.family_names import is_closed, models_of
from memfit.model.sources.files import listed, shown, typed_path, unreadable
from memfit.model.sources.inventory import Source, TensorInfo
from memfit.model.spellings import meant

__all__ = ["Source", "TensorInfo", "read"]

LONGEST = 4096
TIMEOUT = 10.0
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_BARE = re.compile(r"[A-Za-z0-9][\w. -]{0,95}", re.ASCII)
_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/(?:tree|blob|resolve)/([^/?#]+))?"
    r"(?:[/?#].*)?",
    re.ASCII,
)
_FILES = (".json", ".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")


def read(
    spec: str | os.PathLike[str],
    *,
    offline: bool = False,
    revision: str | None = None,
    token: str | None = None,
    timeout: float = TIMEOUT,
    copies: bool = True,
) -> Source:
    """The model that `spec` names: an existing path first, then the catalog, then the hub.

    `hub:org/name` and `catalog:name` go to one of them straight; `org/name@revision`, or
    `revision`, means the hub, since the catalog has no revisions. `timeout` bounds the wait for the
    config, and a multiple of it the wait for all tensor headers. `copies` of known models go by
    their names where the hub does not show them.
    """
    if not isinstance(spec, str):
        return _local(Path(spec), revision)
    spec = spec.strip()
    if not spec or len(spec) > LONGEST or not spec.isprintable():
        raise SourceError.one(
            "no model is given" if not spec else f"`{shown(spec)}` is not the name of a model",
            where="model",
            hint="give a hub id, a path or a catalog name",
        )
    if spec.startswith("catalog:"):
        _no_revision(spec, revision)
        return from_catalog(spec.removeprefix("catalog:"))
    forced = spec.startswith("hub:")
    name = spec.removeprefix("hub:")
    if name.startswith(("hf.co/", "huggingface.co/")):  # as Ollama and llama.cpp write it
        spec = name = name.partition("/")[2]
    page = _PAGE.fullmatch(name)
    if page:
        name, revision = page[1], revision or page[2]
        spec, forced = name, revision is not None or catalog.find(name) is None
    elif not forced and _exists(spec):
        return _local(Path(spec).expanduser(), revision)
    if "@" in name:
        name, _, tail = name.partition("@")
        revision = revision or tail or None
    if not forced:
        _refuse_paths(spec, name)
        found = catalog.find(name)
        if found is not None and not revision:
            return from_catalog(found)
        name = found or name
        other = None if found or revision else meant(name)
        if other is not None and (offline or not _HUB_ID.fullmatch(name)):
            return replace(from_catalog(other.name), problems=other.notes)
        if not _HUB_ID.fullmatch(name):
            told = guessed(name) if copies else None
            if told is None:
                raise unknown(name)
            return told
    elif not (_HUB_ID.fullmatch(name) or _BARE.fullmatch(name)):
        raise SourceError.one(
            f"`{shown(name)}` is not a hub id",
            where="model",
            hint="write it like `org/name` or `org/name@revision`",
        )
    from memfit.model.sources import hub

    try:
        return hub.read_hub(name, revision=revision, offline=offline, token=token, timeout=timeout)
    except hub.Unavailable as error:
        told = guessed(name) if copies and not (forced or revision) else None
        if told is None:
            raise
        message = f"{error.problems[0].message}; memfit goes by the name"
        warning = Problem(message=message, where="model", level="warning")
        return replace(told, problems=(*told.problems, warning))


def guessed(name: str) -> Source | None:
    """A copy, or a quantized checkpoint, of a model that is known, by its name alone."""
    from memfit.model.named import by_name, mistyped

    return None if mistyped(name) else by_name(name)


def _local(path: Path, revision: str | None) -> Source:
    _no_revision(shown(path), revision)
    from memfit.model.sources import (
        folder,
    )  # here, so that a model of the catalog does not wait for the readers of files

    return folder.read_path(path)


def _no_revision(spec: str, revision: str | None) -> None:
    if revision:
        raise SourceError.one(
            (f"`{shown(spec)}` has no revisions, so `{shown(revision)}` is not available"),
            where="model",
            hint="only models of the hub have revisions: `hub:org/name`",
        )


def from_catalog(name: str) -> Source:
    """A bundled config by its id or unambiguous short name."""
    key = catalog.find(name)
    if key is None:
        raise unknown(name)
    entry = catalog.entry(key)
    count = entry.parameters if entry.parameters is not None else entry.published
    return Source(
        name=entry.name,
        origin=f"bundled catalog ({entry.provenance})",
        config=entry.config(),
        parameters=count,
    )


def unknown(name: str) -> SourceError:
    """A name that is neither in the catalog nor a path: with all that it could mean."""
    if is_closed(name):
        return SourceError.one(
            f"`{shown(name)}` is not public: nobody outside can run or fine-tune its weights",
            where="model",
            hint="name a model that can be downloaded, like those of `memfit models`",
        )
    several = catalog.candidates(name) or list(models_of(name))
    if len(several) == 1:
        return SourceError(
            Problem(
                message=f"unknown model `{shown(name)}`",
                where="model",
                hint=f"did you mean `{several[0]}`?",
                fix=(name, several[0]),
            )
        )
    if several:
        likely = min(several, key=lambda one: (one.count("-"), len(one)))  # the plainest name
        return SourceError(
            Problem(
                message=f"`{shown(name)}` could be any of {len(several)} models: {listed(several)}",
                where="model",
                hint="give the full name of one of them",
                fix=(name, likely),
            )
        )
    close = catalog.alike(name)
    offer = "did you mean " + ", ".join(f"`{one}`" for one in close) + "? " if close else ""
    if not close and (family := catalog.family(name)):
        offer = f"`memfit models {family}` lists known models; "
    return SourceError(
        Problem(
            message=f"`{shown(name)}` is neither a path nor a model of the catalog",
            where="model",
            hint=f"{offer}models of the Hugging Face Hub are named `org/name`",
            fix=(name, close[0]) if close else None,
        )
    )


def _exists(spec: str) -> bool:
    """Whether a path is there, also one that can be seen but not opened."""
    try:
        path = Path(spec).expanduser()
        return path.exists() or path.is_symlink()
    except (OSError, ValueError, RuntimeError):
        return False


def _unread(spec: str, error: OSError) -> SourceError:
    """Why a file cannot be read, and the model that a missing GGUF file is named after."""
    bad = unreadable(spec, error)
    name = Path(spec).name
    if not name.lower().endswith(".gguf") or not isinstance(error, FileNotFoundError):
        return bad
    found = meant(name[: -len(".gguf")])
    if found is None:
        return bad
    hint = f"did you mean `{found.name}`?"
    return SourceError(replace(bad.problems[0], hint=hint, fix=(spec, found.name)))


def _refuse_paths(spec: str, name: str) -> None:
    """What can only have been meant as a path is not looked for on the hub."""
    looks = (
        spec.startswith(("/", "./", "../", "~", ".\\", "..\\"))
        or "\\" in spec
        or spec.count("/") > 1
        or spec.lower().endswith(_FILES)
    )
    if "://" in spec:
        raise SourceError.one(
            f"`{shown(spec)}` is not an address that memfit can read",
            where="model",
            hint="download the file, or give `org/name` on the hub",
        )
    if looks and (not _HUB_ID.fullmatch(name) or spec.lower().endswith(_FILES[:3])):
        try:
            typed_path(spec).stat()
        except OSError as error:
            raise _unread(spec, error) from None
