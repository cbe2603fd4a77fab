"""How many positions tokens can have: a small model runs on the CPU on longer and longer
sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from memfit.errors import InputError
from memfit.trace import classes, inputs
from memfit.trace.program import configuration

BEYOND, MOST = 24, 8  # tokens more than there are positions; positions that no token may have


def positions_left(config: Mapping[str, Any], key: str, head: str) -> int | None:
    """How many positions of the field `key` no token has; None where sequences may be longer than
    it says."""
    own = configuration(config, None)
    count = getattr(own, key, None)
    if not isinstance(count, int):
        count = 64
    torch.manual_seed(0)
    model = classes.builder(head, own).from_config(own).eval()
    if not trouble(model, count + BEYOND):
        return None
    why = ""
    for left in range(MOST):
        why = trouble(model, count - left)
        if not why:
            return left
    message = f"no row for `{own.model_type}`: it does not run on the CPU: {why}"
    raise InputError.one(message, where="family")


def trouble(model: Any, length: int) -> str:
    """Why a sequence of this length does not run; a token without a position is a reason."""
    ids = torch.randint(5, min(64, model.config.vocab_size), (1, length))
    paired = getattr(model.config, "is_encoder_decoder", False)
    sound = inputs.hearing(model)
    given = {"input_ids": ids}
    if corners := getattr(model.config, "dim_bbox", None):
        given["bbox"] = torch.zeros(1, length, corners)
    if sound is not None:
        given = {inputs.heard_as(model): torch.zeros(1, *sound)}
    try:
        with torch.no_grad():
            model(**given, **({"decoder_input_ids": ids} if paired else {}))
    except Exception as bad:  # noqa: BLE001 - a class may ask for more than ids, in any way
        return f"{type(bad).__name__}: {str(bad)[:200]}"
    return ""


__all__ = ["BEYOND", "MOST", "positions_left"]
