"""Models as llama.cpp's users name them: a GGUF file, `REPOSITORY:QUANTIZATION`, or the name of a
file that is not here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.errors import InputError, SourceError
from memfit.serving.base import Subject
from memfit.serving.llamacpp.loading import from_file, repository, tag
from memfit.serving.llamacpp.quantize import usual

if TYPE_CHECKING:
    from memfit.model.source import Source

_PART = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)  # of a file in parts


def subject(spec: str, offline: bool) -> Subject | None:
    """The model of a GGUF file, or of a name with a quantization; None for any other name."""
    if spec.lower().endswith(".gguf") and Path(spec).expanduser().exists():
        model = from_file(Path(spec).expanduser())
        return Subject(
            name=model.name,
            config={"gguf": model},
            parameters=model.parameters,
            origin=model.origin,
        )
    if spec.lower().endswith(".gguf"):
        return by_name(
            _PART.sub("", Path(spec).name), f"`{Path(spec).name}` is not on this machine"
        )
    name, quantization = tag(spec)
    name = repository(name)
    if name == spec:
        return None
    from memfit.model.source import read

    try:
        source = read(name, offline=offline, copies=False)
    except SourceError:
        if (found := by_name(spec, "the hub cannot be read")) is None:
            raise
        return found
    return quantized(source, quantization, source.origin)


def by_name(spec: str, why: str) -> Subject | None:
    """The catalog's model that a file or a repository is named after, with the quantization that
    the name ends with."""
    from memfit.model.source import from_catalog
    from memfit.model.spellings import meant

    found = meant(spec)
    if found is None:
        return None
    source = from_catalog(found.name)
    quant = found.quant or (usual(source.config) if repository(spec) != spec else "")
    if not quant or not tag(f"{found.name}:{quant}")[1]:
        return None
    origin = f"its name, read as {found.name} in {quant}: {why}"
    return quantized(source, quant, origin)


def of_file(spec: str, file: str) -> str:
    """`REPOSITORY:QUANTIZATION` of a repository's file (`--hf-file`), which says more than the tag
    beside the repository."""
    stem = _PART.sub("", file.rpartition("/")[2])
    repo = tag(spec)[0]
    found = f"{repo}:{re.split(r'[-.]', stem)[-1]}"
    if not tag(found)[1]:
        raise InputError.one(
            f"the quantization of `{file[:80]}` is not known from its name",
            where="--hf-file",
            hint=f"name it: `-hf {repo}:Q4_K_M`",
        )
    return found


def quantized(source: Source, quantization: str, origin: str) -> Subject:
    return Subject(
        name=source.name,
        config={**source.config, "gguf_quantization": quantization},
        source=source,
        parameters=source.parameters,
        origin=origin,
    )
