"""Mamba 1 and Falcon-Mamba: layers of a state-space model that go through a sequence token by
token. `transformers` without the package `mamba-ssm` runs this loop."""

from __future__ import annotations

from typing import Any

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, variants

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 160, 224),
    "state_size": (24, 40, 56),
    "expand": (2, 3, 2),
    "time_step_rank": (5, 11, 18),
}
BASE = {"num_hidden_layers": 3, "conv_kernel": 4, "use_associative_scan": True}
DERIVED = {"conv_length": ("seq + 3", "1")}


def dims(fields: Fields) -> Dims:
    width = fields.count("hidden_size", default=768)
    if fields.config.get("time_step_rank") in (None, "auto"):
        fields.assume(time_step_rank=-(-width // 16))
    for key, usual in (("expand", 2), ("state_size", 16)):  # configuration_mamba.py
        if fields.config.get(key) is None:
            fields.assume(**{key: usual})
    found = each(fields, *SIZES)
    # A width that is given counts (transformers 5.23 configuration_mamba.py `__post_init__`)
    inner = fields.count("intermediate_size", default=found.pop("expand") * width)
    return {**found, "inner": inner, "split": found["time_step_rank"] + 2 * found["state_size"]}


def kinds(fields: Fields) -> list[str]:
    """Residuals are fp32 behind the first layer."""
    return ["first", *["mamba"] * (fields.layers() - 1)]


def row(name: str, **how: Any) -> Row:
    return Row(
        name=name,
        dims=dims,
        kinds=kinds,
        examples=variants({**BASE, "model_type": name}, SIZES),
        sizes=((3, 24), (7, 34), (11, 42)),
        derived=DERIVED,
        loops=("seq",),
        silent=("intermediate_size",),
        tied=True,
        **how,
    )


captured(row("mamba"))
captured(row("falcon_mamba", packs=False))
