"""`memfit new-family`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from memfit.api.new_family import NewFamily, new_family, write_family
from memfit.errors import InputError

HELP = """\
{help}.

Runs the classes of an encoder, a decoder or both on fake tensors with each field of the config
changed, captures the layers, and compares parameters and peaks with the real code. Of a language
model with a tower for images or sounds it finds out the tower's weights, which text leaves idle.
What is not exact is refused. Needs the extra `trace`; runs code of the installed library only.
"""
PARAMETERS = (
    click.Argument(["model_type"], metavar="MODEL_TYPE"),
    click.Option(
        ["--set", "fields"],
        multiple=True,
        metavar="FIELD=VALUE",
        help="a field of the config that is not as by default [default: none]",
    ),
    click.Option(
        ["--out"],
        default="",
        metavar="FOLDER",
        help="folder for `rows/` and `graphs/` [default: none]",
    ),
)


def run(model_type: str, fields: tuple[str, ...], out: str, as_json: bool) -> tuple[int, str]:
    found = new_family(model_type, dict(map(field_of, fields)))
    places = write_family(found, Path(out)) if out else ()
    if as_json:
        answer = {"family": model_type, "row": found.row, "left_out": dict(found.left_out)}
        return 0, json.dumps(answer, indent=2)
    lines = described(found)
    return 0, "\n".join([*lines, *(["", *(f"written to {one}" for one in places)] if out else [])])


def field_of(text: str) -> tuple[str, Any]:
    """The field and the value of `vocab_size=33`; what is no JSON is text."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        hint = "write `--set FIELD=VALUE`"
        raise InputError.one(f"`{text[:60]}` names no value", where="set", hint=hint)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def described(found: NewFamily) -> list[str]:
    """What was found out about the fields of the config."""
    row = found.row
    if row.get("composite"):
        return composed(found)
    origin = found.graphs[""]["origin"]
    sizes = [key if key == name else f"{key} ({name})" for name, key in row["dims"].items()]
    divided = [f"{small} divides {large}" for large, small in row["ratios"]]
    equal = [f"{key} equals {name}" for key, name in row["equal"].items()]
    follows = [
        f"{key} defaults to {' / '.join(names)}" for key, names in row.get("follows", {}).items()
    ]
    kinds = row["kinds"]
    layers = [*kinds["lists"], kinds["first"]] if row.get("decoder") else kinds[1:]
    rows = {
        "heads": heads_of(row),
        "sizes": sizes,
        "relations": [*divided, *equal, *follows],
        "layers": [one for one in layers if one],
        "dropout": list(row.get("rates", ())),
        "window": [row["window"]] if row.get("window") else [],
        "no effect": [key for key in row["silent"] if key not in row["equal"]],
        "refused": [*row["absent"], *row.get("refused", ())],
    }
    graphs = sum(len(one["graphs"]) for one in found.graphs.values())
    return [
        f"{found.model_type}: from {origin['class']}, transformers {origin['transformers']}",
        "parameters equal those of transformers, peaks are within 0.5 % of the trace",
        "",
        *(f"  {name:10} {', '.join(values)}" for name, values in rows.items() if values),
        f"  {'graphs':10} {graphs}",
        *(f"  left out   {head}: {why}" for head, why in found.left_out.items()),
    ]


def composed(found: NewFamily) -> list[str]:
    """The same of a language model with towers beside it."""
    row, text = found.row, found.row["text"]
    rows = {
        "heads": row["heads"],
        "text": [text["family"]],
        "sizes": [*row["sizes"]],
        "relations": [f"{small} divides {large}" for large, small, _ in row["ratios"]],
        "flags": [*row["flags"]],
        "fixed": [*row["fixed"]],
        "no effect": row["silent"],
    }
    return [
        f"{found.model_type}: a language model with towers, which text leaves idle",
        "parameters equal those of transformers, peaks are within 0.5 % of the trace",
        "",
        *(f"  {name:10} {', '.join(values)}" for name, values in rows.items() if values),
    ]


def heads_of(row: Mapping[str, Any]) -> list[str]:
    """Those of `--head` that the family has."""
    if not row.get("decoder"):
        return list(row["heads"])
    return ["causal-lm", *(one["head"] for one in row["label_heads"])]


__all__ = ["HELP", "PARAMETERS", "run"]
