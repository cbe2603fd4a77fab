"""Module paths: the name without wrappers, and the layer of a module."""

from __future__ import annotations


def plain(path: str) -> str:
    """A module's path without the wrapping of PEFT and FSDP1, so that adapted and plain models name
    their layers alike."""
    path = (
        path.replace("_fsdp_wrapped_module.", "")
        .removesuffix("_fsdp_wrapped_module")
        .removesuffix(".")
    )
    return (
        path.removeprefix("base_model")
        .removeprefix(".model")
        .removeprefix(".")
        .replace(".base_layer", "")
    )


def is_layer(path: str) -> bool:
    """`model.layers.3`: an entry of a list of layers, itself not inside another one."""
    return path.rpartition(".")[2].isdigit() and not any(
        piece.isdigit() for piece in path.split(".")[:-1]
    )


def layer_of(path: str) -> str:
    pieces = path.split(".")
    for index, piece in enumerate(pieces):
        if piece.isdigit():
            return ".".join(pieces[: index + 1])
    return ""
