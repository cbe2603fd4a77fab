"""T5Gemma: an encoder and a decoder of Gemma 2's layers, whose sizes may differ."""

from __future__ import annotations

from typing import Any

from memfit.model.config import Fields
from memfit.model.families._captured import PER, TRACE, Dims, alternating
from memfit.model.families._chains import ChainRow, chained

STACKS = ("encoder", "decoder")
HEADS, GROUPS = "num_attention_heads", "num_key_value_heads"
DECISIVE = ("vocab_size", "hidden_size", "intermediate_size", HEADS)
DEFAULTS = {GROUPS: 4, "head_dim": 256}
# What the captured code ran with, as the class has it by default.
FIXED: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
CAPPED = ("final_logit_softcapping", "attn_logit_softcapping")
SIZES = (
    {"hidden_size": (96, 160, 288), "intermediate_size": (200, 312, 184)},
    {"hidden_size": (144, 240, 128), "intermediate_size": (248, 280, 216)},
)
NUMBERS = (
    {HEADS: (6, 10, 12), GROUPS: (2, 5, 4), "head_dim": (24, 16, 40)},
    {HEADS: (12, 8, 8), GROUPS: (3, 4, 2), "head_dim": (32, 56, 48)},
)
WORDS = (544, 608, 736)
LAYERS = 4
RATES: dict[str, float | str] = {
    "dropout_rate": 0.0,
    "classifier_dropout_rate": 0.0,
    "attention_dropout": 0.0,
}


def examples() -> tuple[dict[str, Any], ...]:
    def stack(place: int, number: int) -> dict[str, Any]:
        sizes = {**SIZES[place], **NUMBERS[place], "vocab_size": WORDS}
        return {"num_hidden_layers": LAYERS, **{key: one[number] for key, one in sizes.items()}}

    rates = dict(zip(RATES, (0.11, 0.13, 0.17), strict=True))
    return tuple(
        {
            "model_type": "t5gemma",
            **{name: stack(place, number) for place, name in enumerate(STACKS)},
            **rates,
        }
        for number in range(len(WORDS))
    )


def dims(fields: Fields) -> Dims:
    found: dict[str, int] = {}
    for name in STACKS:
        stack = fields.section(name)
        sizes = {key: stack.count(key) for key in DECISIVE}
        sizes |= {key: stack.count(key, default=usual) for key, usual in DEFAULTS.items()}
        stack.divides(sizes[GROUPS], sizes[HEADS], GROUPS, f"`{HEADS}`")
        unlike(stack)
        if sizes[GROUPS] in (1, sizes[HEADS]):  # keys are not copied then
            message = f"no captured graph of `t5gemma` for {sizes[GROUPS]} of {sizes[HEADS]} heads"
            stack.blame(GROUPS, message, TRACE, of=(sizes[GROUPS],))
        words = sizes.pop("vocab_size")
        if found.setdefault("vocab_size", words) != words:
            for one in STACKS:
                message = "the encoder's and the decoder's must be equal"
                fields.section(one).blame("vocab_size", message, TRACE)
        found |= {f"{name}_{key}": one for key, one in sizes.items()}
        found[f"{name}_{HEADS}{PER}{GROUPS}"] = sizes[HEADS] // max(1, sizes[GROUPS])
    return found


def unlike(stack: Fields) -> None:
    """A stack that runs other code than the captured ones."""
    turned = stack.mapping("rope_parameters") or stack.mapping("rope_scaling")
    odd = [key for key, one in FIXED.items() if stack.config.get(key, one) != one]
    odd += [key for key in CAPPED if key in stack.config and not stack.config[key]]
    odd += ["rope_parameters"] if turned.get("rope_type", "default") != "default" else []
    for key in odd:
        stack.blame(key, f"no captured graph of `t5gemma` with this `{key}`", TRACE)


def kinds(fields: Fields) -> list[str]:
    return [
        f"{name}_{kind}"
        for name in STACKS
        for kind in alternating(fields.section(name), 2, "sliding_attention", "full_attention")
    ]


chained(
    ChainRow(
        name="t5gemma",
        dims=dims,
        kinds=kinds,
        examples=examples(),
        heads=("seq2seq-lm", "classification", "token-classification"),
        rates=RATES,
        pairs=True,
        limited=False,
    )
)
