"""T5Gemma 2: an encoder and a decoder of Gemma 3's layers, and a tower that images pass through. A
decoder's layer sees the encoder's words beside its own, with the same keys' weights."""

from __future__ import annotations

from typing import Any

from memfit.model.config import Fields
from memfit.model.families._captured import PER, TRACE, Dims, alternating
from memfit.model.families._chains import ChainRow, chained
from memfit.model.families._siglip import vision_tower
from memfit.model.families.t5gemma import GROUPS, HEADS, LAYERS, RATES, SIZES, STACKS, WORDS
from memfit.model.modules import Weight

KINDS = ("sliding_attention", "full_attention")
EVERY = 6  # transformers 5.23 configuration_t5gemma2.py, where no pattern is given
DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    HEADS: 8,
    GROUPS: 4,
    "head_dim": 256,
}
COMMON = ("vocab_size", "hidden_size")
# What the captured code ran with, as the class has it by default.
FIXED: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "final_logit_softcapping": None,
}
NUMBERS = (
    {HEADS: (6, 10, 12), GROUPS: (2, 5, 4), "head_dim": (24, 16, 40)},
    {HEADS: (12, 8, 9), GROUPS: (4, 2, 3), "head_dim": (32, 56, 48)},
)
VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 896,
    "patch_size": 14,
}
ROOT = "model.encoder"


def examples() -> tuple[dict[str, Any], ...]:
    def stack(place: int, number: int) -> dict[str, Any]:
        sizes = {**SIZES[place], **NUMBERS[place], "vocab_size": WORDS}
        sizes["hidden_size"] = SIZES[0]["hidden_size"]
        kinds = [KINDS[one % 2] for one in range(LAYERS)]
        own = {key: one[number] for key, one in sizes.items()}
        return {"num_hidden_layers": LAYERS, "layer_types": kinds, **own}

    rates = dict(zip(RATES, (0.11, 0.13, 0.17), strict=True))
    return tuple(
        {
            "model_type": "t5gemma2",
            "encoder": {"text_config": stack(0, number), "vision_config": VISION},
            "decoder": stack(1, number),
            **rates,
        }
        for number in range(len(WORDS))
    )


def stack_of(fields: Fields, name: str) -> Fields:
    found = fields.section(name)
    return found.section("text_config") if name == "encoder" else found


def dims(fields: Fields) -> Dims:
    found: dict[str, int] = {}
    for name in STACKS:
        stack = stack_of(fields, name)
        sizes = {key: stack.count(key, default=usual) for key, usual in DEFAULTS.items()}
        stack.divides(sizes[GROUPS], sizes[HEADS], GROUPS, f"`{HEADS}`")
        stack.divides(sizes[HEADS], sizes["hidden_size"], HEADS, "`hidden_size`")
        unlike(stack)
        if sizes[GROUPS] in (1, sizes[HEADS]):  # keys are not copied then
            message = f"no captured graph of `t5gemma2` for {sizes[GROUPS]} of {sizes[HEADS]} heads"
            stack.blame(GROUPS, message, TRACE, of=(sizes[GROUPS],))
        for key in COMMON:
            size = sizes.pop(key)
            if found.setdefault(key, size) != size:
                stack.blame(key, "the encoder's and the decoder's must be equal")
        found |= {f"{name}_{key}": one for key, one in sizes.items()}
        found[f"{name}_{HEADS}{PER}{GROUPS}"] = sizes[HEADS] // max(1, sizes[GROUPS])
    return found


def unlike(stack: Fields) -> None:
    """A stack that runs other code than the captured ones."""
    odd = [key for key, one in FIXED.items() if stack.config.get(key, one) != one]
    turned = stack.mapping("rope_parameters") or {"all": stack.mapping("rope_scaling")}
    kinds = (one.get("rope_type", "default") for one in turned.values() if isinstance(one, dict))
    odd += ["rope_parameters"] if any(one != "default" for one in kinds) else []
    for key in odd:
        stack.blame(key, f"no captured graph of `t5gemma2` with this `{key}`", TRACE)


def kinds(fields: Fields) -> list[str]:
    found = []
    for name in STACKS:
        stack = stack_of(fields, name)
        every = stack.count("sliding_window_pattern", default=EVERY)
        own = alternating(stack, every, *KINDS)
        if {*own} != {*KINDS}:  # frequencies and masks are made for those that there are
            message = "no captured graph of `t5gemma2` without layers of both kinds"
            stack.blame("layer_types", message, TRACE)
        found += [f"{name}_{kind}" for kind in own]
    return found


def tower(fields: Fields) -> tuple[Weight, ...]:
    """What images pass through (transformers 5.23 modeling_t5gemma2.py T5Gemma2Encoder)."""
    encoder = fields.section("encoder")
    width, found = vision_tower(encoder.section("vision_config"), f"{ROOT}.vision_tower")
    text = encoder.section("text_config").count("hidden_size", default=DEFAULTS["hidden_size"])
    name = f"{ROOT}.multi_modal_projector"
    return (
        *found,
        Weight(name=f"{name}.mm_input_projection_weight", shape=(width, text), role="other"),
        Weight(name=f"{name}.mm_soft_emb_norm.weight", shape=(width,), role="norm"),
    )


chained(
    ChainRow(
        name="t5gemma2",
        dims=dims,
        kinds=kinds,
        examples=examples(),
        heads=("seq2seq-lm", "classification", "token-classification"),
        rates=RATES,
        pairs=True,
        limited=False,
        alike={"image-text": "seq2seq-lm"},  # transformers 5.23 modeling_auto.py lists it twice
        tower=tower,
    )
)
