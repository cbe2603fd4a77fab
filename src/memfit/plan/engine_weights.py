"""Weights in fewer bits that a plan for a serving engine tries, each with its published loss."""

from __future__ import annotations

from memfit.lazy_dataclass import dataclass

OWN, EIGHT, FOUR = "own", "fp8", "awq-4bit"
AWQ_CHECKPOINT = "AWQ_CHECKPOINT"  # stands in a command for a checkpoint that the user has
STUDY = "Llama 3.1 of 8B to 405B, ACL 2025, arXiv 2411.02355"


@dataclass(frozen=True, kw_only=True)
class EngineWeights:
    """`how` says where the weights come from, `quality` what others measured, and `cite` who."""

    name: str
    how: str
    quality: str
    cite: str


WEIGHTS: dict[str, EngineWeights] = {
    one.name: one
    for one in (
        EngineWeights(
            name=EIGHT,
            how="8-bit weights, quantized while loading without calibration",
            quality="effectively lossless",
            cite=STUDY,
        ),
        EngineWeights(
            name=FOUR,
            how="4-bit weights, which need an AWQ checkpoint of this model (groups of 128)",
            quality="4-bit weights rival 8-bit integers, which lose 1 to 3 %",
            cite=STUDY,
        ),
    )
}

__all__ = ["AWQ_CHECKPOINT", "EIGHT", "FOUR", "OWN", "WEIGHTS", "EngineWeights"]
