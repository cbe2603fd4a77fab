"""Models on disk: a folder as `save_pretrained` or a download leaves it, or one file of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memfit.errors import Problem, SourceError
from memfit.model.sources import gguf, gguf_config, safetensors
from memfit.model.sources.files import listed, looks_like, opened, read_object, shown, unreadable
from memfit.model.sources.inventory import Source, TensorInfo

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MOST_ENTRIES = 10_000


def read_path(path: Path) -> Source:
    """A file or folder, by what it is."""
    try:
        if path.is_dir():
            return read_folder(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return _from_gguf(path)
    if suffix == ".safetensors":
        return _from_tensors(path, safetensors.read_file(path))
    if path.name.endswith(".safetensors.index.json"):
        return _from_tensors(path, safetensors.read_index(path))
    if suffix == ".json":
        return Source(
            name=_name(path),
            origin=shown(path),
            config=checked(read_object(path), where=shown(path)),
        )
    with opened(path) as (file, _):
        hint = looks_like(file.read(64))
    raise SourceError.one(
        f"`{shown(path)}` is not a model that memfit can read",
        where="model",
        hint=hint
        or (
            "name a folder, a config.json, a *.safetensors, a *.safetensors.index.json or a "
            "*.gguf file"
        ),
    )


def read_folder(folder: Path, *, name: str = "", origin: str = "") -> Source:
    """config.json, and the tensors where safetensors files lie beside it; a part that was not
    downloaded is a warning."""
    present = _entries(folder)
    if CONFIG not in present:
        return _without_config(folder, present)
    config = checked(read_object(folder / CONFIG), where=shown(folder / CONFIG))
    tensors, problems = _folder_tensors(folder, present)
    return Source(
        name=name or folder.absolute().name or shown(folder),
        origin=origin or shown(folder),
        config=config,
        tensors=tensors,
        problems=problems,
    )


def checked(config: Mapping[str, Any], *, where: str) -> Mapping[str, Any]:
    """Passed through as it is, unless it is plainly the config of something else."""
    if "model_type" in config or "architectures" in config:
        return config
    if "peft_type" in config:
        base = config.get("base_model_name_or_path")
        hint = (
            f"estimate its base model, `{shown(base)}`, with `--method lora`"
            if isinstance(base, str) and base
            else ""
        )
        raise SourceError.one(
            f"`{where}` is the config of an adapter, not of a model", where="model", hint=hint
        )
    if "weight_map" in config:
        raise SourceError.one(
            f"`{where}` is an index of weights, not a config",
            where="model",
            hint="name it `*.safetensors.index.json`, with a config.json beside it",
        )
    return config


def _entries(folder: Path) -> set[str]:
    names: set[str] = set()
    try:
        for entry in folder.iterdir():
            names.add(entry.name)
            if len(names) > MOST_ENTRIES:
                raise SourceError.one(
                    (
                        f"`{shown(folder)}` has more than {MOST_ENTRIES} entries: is it a "
                        "model's folder?"
                    ),
                    where="model",
                )
    except (OSError, ValueError) as error:
        raise unreadable(folder, error) from None
    return names


def _without_config(folder: Path, present: set[str]) -> Source:
    """Only GGUF files speak for themselves; for all else say what is there and what is missing."""
    files = sorted(
        name
        for name in present
        if name.lower().endswith(".gguf") and not name.lower().startswith("mmproj")
    )
    firsts = [name for name in files if "-of-" not in name or "-00001-of-" in name]
    if len(firsts) == 1:
        return _from_gguf(folder / firsts[0])
    if firsts:
        raise SourceError.one(
            f"`{shown(folder)}` has {len(firsts)} GGUF models: {listed(firsts)}",
            where="model",
            hint="give the file of one of them",
        )
    if "adapter_config.json" in present:
        checked(
            read_object(folder / "adapter_config.json"), where=shown(folder / "adapter_config.json")
        )
    hint = "give the folder with the model's config.json"
    if any(name.endswith(".safetensors") for name in present):
        hint = "the folder has tensors but no config.json: download it from the same place"
    elif "params.json" in present:
        hint = (
            "params.json is in the format of the original authors: use the folder or hub id "
            "in the transformers format"
        )
    elif "model_index.json" in present:
        hint = "it is a diffusers pipeline, not a language model"
    elif programs := [name for name in present if name.endswith(".py")]:
        hint += f", or to trace a script its file (`{folder / min(programs)}`)"
    raise SourceError.one(
        f"`{shown(folder)}` has no config.json" if present else f"`{shown(folder)}` is empty",
        where="model",
        hint=hint,
    )


def _folder_tensors(
    folder: Path, present: set[str]
) -> tuple[tuple[TensorInfo, ...] | None, tuple[Problem, ...]]:
    if INDEX in present:
        shards = (
            safetensors.parse_index((folder / INDEX).read_bytes(), where=shown(folder / INDEX))
            if _small(folder / INDEX)
            else None
        )
        names = list(shards.files) if shards else []
    else:
        shards, names = None, [SINGLE] if SINGLE in present else []
    if not names:
        return None, ()
    absent = [name for name in names if not (folder / name).is_file() or _is_pointer(folder / name)]
    if absent:
        warning = Problem(
            message=(
                f"{len(absent)} of {len(names)} weight files are missing, so tensors "
                f"follow the config: {listed(absent)}"
            ),
            where="model",
            hint="this is exact unless the checkpoint is quantized",
            level="warning",
        )
        return None, (warning,)
    if shards is None:
        return safetensors.read_file(folder / SINGLE), ()
    return safetensors.joined(
        shards, lambda name: safetensors.read_file(folder / name), where=shown(folder / INDEX)
    ), ()


def _small(path: Path) -> bool:
    with opened(path) as (_, size):
        if size <= safetensors.INDEX_LIMIT:
            return True
    raise SourceError.one(
        f"`{shown(path)}` has {size} bytes, more than the limit of an index", where="model"
    )


def _is_pointer(path: Path) -> bool:
    """Git leaves a text of some 130 bytes where a large file was not fetched."""
    with opened(path) as (file, size):
        return size < 1024 and file.read(23) == b"version https://git-lfs"


def _from_tensors(path: Path, tensors: tuple[TensorInfo, ...]) -> Source:
    config = path.with_name(CONFIG)
    if not config.is_file():
        raise SourceError.one(
            (f"`{shown(path)}` has {len(tensors)} tensors, but no config.json next to it"),
            where="model",
            hint=(
                "tensors do not show the number of heads: download config.json from the same place"
            ),
        )
    return Source(
        name=_name(path),
        origin=shown(path),
        config=checked(read_object(config), where=shown(config)),
        tensors=tensors,
    )


def _from_gguf(path: Path) -> Source:
    file = gguf.read_file(path)
    return Source(
        name=path.stem,
        origin=f"{shown(path)} (GGUF)",
        config=gguf_config.read_config(file),
        tensors=file.tensors,
    )


def _name(path: Path) -> str:
    """The folder's name for a file that is called as it is in every model, else the file's own."""
    usual = {CONFIG, INDEX, SINGLE}
    return (
        path.absolute().parent.name or path.stem
        if path.name in usual
        else path.name.removesuffix(".json").removesuffix(".safetensors")
    )
