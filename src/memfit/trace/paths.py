"""Module paths: the name without wrappers, and the layer of a module."""

from __future__ import annotations

TURNS = "@"  # ends the name of a list whose entries run many times, turn by turn


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


def beside(one: str, other: str) -> bool:
    """Entries of the same number in two lists that lie beside each other: `net.attentions.3` and
    `net.ffns.3` (XLM)."""
    (own, _, number), (others, _, last) = one.rpartition("."), other.rpartition(".")
    alike = own.rpartition(".")[0] == others.rpartition(".")[0]
    return number == last and alike and own != others and not others.endswith(TURNS)


def layer_of(path: str) -> str:
    pieces = path.split(".")
    for index, piece in enumerate(pieces):
        if piece.isdigit():
            return ".".join(pieces[: index + 1])
    return ""
