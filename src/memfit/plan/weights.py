"""Weight formats for inference: one row each, with its loss of quality against the published
checkpoint.

bitsandbytes packs any checkpoint as it is loaded; for the others somebody must have made, or make,
a checkpoint of that kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from memfit.errors import InputError
from memfit.lazy_dataclass import dataclass
from memfit.model.families import build
from memfit.model.model import Model
from memfit.model.quantized import method
from memfit.registry import Registry

OWN = "own"


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A weight format. `quant`: the job's option; `stored`: the quantization in a checkpoint's
    config."""

    name: str
    gives_up: str = ""
    quant: str = "none"
    stored: Mapping[str, Any] = field(default_factory=dict)


WEIGHTS: Registry[Weights] = Registry("weight format", where="weights")
for _row in (
    Weights(name=OWN),
    Weights(
        name="int8",
        quant="int8",
        gives_up="8-bit weights and activations (bitsandbytes)",
    ),
    Weights(
        name="nf4",
        quant="nf4",
        gives_up="4-bit weights, quantized without calibration (bitsandbytes)",
    ),
    Weights(
        name="gptq-8bit",
        stored={"quant_method": "gptq", "bits": 8, "group_size": 128},
        gives_up="8-bit weights: a GPTQ checkpoint with group size 128",
    ),
    Weights(
        name="gptq-4bit",
        stored={"quant_method": "gptq", "bits": 4, "group_size": 128},
        gives_up="4-bit weights: a GPTQ checkpoint with group size 128",
    ),
    Weights(
        name="awq-4bit",
        stored={"quant_method": "awq", "bits": 4, "group_size": 128},
        gives_up="4-bit weights: an AWQ checkpoint with group size 128",
    ),
    Weights(
        name="fp8",
        stored={"quant_method": "fp8", "weight_block_size": [128, 128]},
        gives_up="fp8 weights and activations: a checkpoint with 128-value blocks",
    ),
):
    WEIGHTS.add(_row.name, _row)


def packed(model: Model) -> bool:
    """Whether the checkpoint is stored quantized already; nobody packs it again."""
    return bool(method(model.config) or model.stored)


def models(
    model: Model, wanted: tuple[str, ...], refused: dict[tuple[str, str], str]
) -> Iterator[tuple[Weights, Model]]:
    """The model in each form; what cannot be is `refused`."""
    for name in wanted:
        row = WEIGHTS.find(name)
        if not row.stored:
            yield row, model
            continue
        fields = {**model.config, "quantization_config": dict(row.stored)}
        try:
            made = build(fields, name=model.name, origin=model.origin)
        except InputError as bad:
            refused[name, ""] = bad.problems[0].message
        else:
            yield row, made


__all__ = ["OWN", "WEIGHTS", "Weights", "models", "packed"]
