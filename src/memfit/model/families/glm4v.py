"""GLM-4.1V, dense, GLM-4.5V with experts, GLM-4.6V and GLM-GA, which are either, and GLM-OCR, as
they read text: positions in three directions, and an idle vision tower."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._captured import (
    TRACE,
    Dims,
    Row,
    captured,
    each,
    graphs_of,
    model_of,
    ratio,
    stored,
    variants,
)
from memfit.model.families._towers import glm_ocr_tower, glm_tower
from memfit.model.model import Model
from memfit.model.modules import Weight

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 240, 336),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 14),
    "num_key_value_heads": (2, 5, 7),
}
HEADS = {"head_dim": (40, 88, 56)}  # of models with experts
WIDE = {**SIZES, "hidden_size": (240, 880, 784)}  # as wide as the heads together
EXPERTS = {
    "n_routed_experts": (13, 11, 9),
    "num_experts_per_tok": (5, 3, 4),
    "moe_intermediate_size": (64, 152, 120),
    "n_shared_experts": (1, 2, 3),
}
# Frequencies that turn with time, row and column: a quarter of a head together
SECTIONS = ((5, 3, 2), (9, 7, 6), (6, 3, 5))
TEXT = {"num_hidden_layers": 2, "attention_bias": True, "max_position_embeddings": 4096}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "image_size": 56,
}


def dense(fields: Fields) -> Dims:
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    ratio(fields, found, "hidden_size", "num_attention_heads")
    return {**found, **sections(fields, found["hidden_size_each"])}


def sparse(fields: Fields) -> Dims:
    if fields.config.get("head_dim") is None:
        width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        fields.assume(head_dim=max(1, width // heads))
    found = each(fields, *SIZES, *HEADS, *EXPERTS)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    found["shared_size"] = found.pop("n_shared_experts") * found["moe_intermediate_size"]
    return {**found, **sections(fields, found["head_dim"])}


def read(fields: Fields) -> Dims:
    """GLM-OCR's heads are wider than their share of the width."""
    if fields.config.get("head_dim") is None:
        width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        fields.assume(head_dim=max(1, width // heads))
    found = each(fields, *SIZES, *HEADS)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    return {**found, **sections(fields, found["head_dim"])}


def sections(fields: Fields, head: int) -> Dims:
    """As `mrope_section` says (transformers 5.23 modeling_glm4v.py
    recomposition_frequencies)."""
    key = "rope_parameters" if fields.mapping("rope_parameters") else "rope_scaling"
    given = fields.mapping(key).get("mrope_section") or [8, 12, 12]
    sizes = given if isinstance(given, (list, tuple)) else ()
    if len(sizes) != 3 or any(type(one) is not int or one < 1 for one in sizes):
        fields.blame(key, "`mrope_section` must be three integers")
        return {}
    if 4 * sum(sizes) != head:
        fields.blame(key, f"`mrope_section` does not add up to a quarter of {head}", TRACE)
    return {f"section_{place}": size for place, size in enumerate(sizes)}


def kinds(fields: Fields) -> list[str]:
    """The first layers of models with experts are dense."""
    count, dense = fields.layers(), fields.count("first_k_dense_replace", default=1, low=0)
    return ["dense" if number < dense else "moe" for number in range(count)]


def row(
    name: str,
    sizes: Mapping[str, tuple[int, ...]],
    build_tower: Callable[[Fields], tuple[Weight, ...]] = glm_tower,
    unread: tuple[str, ...] = (),
    **how: Any,
) -> Row:
    """`unread`: fields of the others that this class has not."""
    examples = []
    vision = {key: value for key, value in VISION.items() if key not in unread}
    for text, parts in zip(variants(TEXT, sizes), SECTIONS, strict=True):
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
        rope |= {"partial_rotary_factor": 0.5, "mrope_section": list(parts)}
        told = {key: value for key, value in text.items() if key not in unread}
        examples.append(
            {
                "model_type": name,
                "tie_word_embeddings": False,
                "text_config": {**told, "model_type": f"{name}_text", "rope_parameters": rope},
                "vision_config": {**vision, "out_hidden_size": text["hidden_size"]},
            }
        )
    return Row(
        name=name,
        examples=tuple(examples),
        text="text_config",
        ties="either",
        tower=lambda fields: build_tower(fields.section("vision_config")),
        own_positions=True,
        **how,
    )


DENSE = captured(row("glm4v", WIDE, dims=dense, kinds=lambda fields: ["layer"] * fields.layers()))
SPARSE = captured(
    row(
        "glm4v_moe",
        {**SIZES, **HEADS, **EXPERTS},
        dims=sparse,
        kinds=kinds,
        active=lambda fields: (
            fields.count("num_experts_per_tok"),
            fields.count("n_routed_experts"),
        ),
        silent=("first_k_dense_replace", "routed_scaling_factor", "use_qk_norm"),
    )
)


captured(
    row(
        "glm_ocr",
        {**SIZES, **HEADS},
        glm_ocr_tower,
        ("attention_bias", "image_size"),
        dims=read,
        kinds=lambda fields: ["layer"] * fields.layers(),
    )
)
EITHER = ("glm46v", "glmga")


@family(
    *EITHER,
    examples=tuple(
        {**one, "model_type": name}
        for name, one in itertools.product(EITHER, (*DENSE.examples, *SPARSE.examples))
    ),
    graphs=True,
)
def build(fields: Fields) -> Model:
    """The layers are those of the type that the text's config names."""
    kind = fields.mapping("text_config").get("model_type", "glm4v_text")
    one = SPARSE if kind == "glm4v_moe_text" else DENSE
    return replace(model_of(one, fields, stored(one.name), graphs_of(one.name)), family=EITHER[0])
