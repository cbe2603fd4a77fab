"""Muse Glimmer with its vision tower: layers that see a window or all, each with or without
rotation, and a gate at what attention gives."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._captured import Dims, Row, captured, each, ratio, variants
from memfit.model.families._siglip import norm, perceptron
from memfit.model.families._towers import Weights, frequencies, linear, of_kind
from memfit.model.modules import Weight

SIZES = {
    "vocab_size": (544, 608, 736),
    "hidden_size": (96, 120, 280),
    "intermediate_size": (200, 312, 184),
    "num_attention_heads": (6, 10, 14),
    "num_key_value_heads": (2, 5, 7),
    "head_dim": (40, 88, 56),
}
TEXT = {
    "model_type": "muse_glimmer_text",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "layer_rope_theta": [10_000.0, 10_000.0, 0, 0],
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 20.0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": False,
}
VISION = {
    "model_type": "muse_glimmer_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pos_emb_height": 6,
    "pos_emb_width": 5,
}
# Class defaults (transformers 5.23 configuration_muse_glimmer.py)
DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
}
VISION_DEFAULTS = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 50,
    "num_attention_heads": 16,
    "patch_size": 14,
    "patch_temporal": 2,
    "pos_emb_height": 32,
    "pos_emb_width": 32,
}
ROOT = "model.vision_tower"


def usual(fields: Fields) -> None:
    """Take what a config of the text model leaves out from its class; nothing at all is no
    config."""
    if fields.config:
        fields.assume(**DEFAULTS)


def dims(fields: Fields) -> Dims:
    usual(fields)
    found = each(fields, *SIZES)
    ratio(fields, found, "num_attention_heads", "num_key_value_heads")
    fields.divides(
        found["num_attention_heads"], found["hidden_size"], "num_attention_heads", "`hidden_size`"
    )
    return found


def kinds(fields: Fields) -> list[str]:
    """Every fourth layer, counted from the last, sees all and has no rotation."""
    usual(fields)
    count = fields.layers()
    every = [(count - 1 - number) % 4 == 0 for number in range(count)]
    types = ["full_attention" if one else "sliding_attention" for one in every]
    seen = fields.listing("layer_types", count, types)
    turned = fields.listing("layer_rope_theta", count, [0 if one else 1 for one in every])
    return [
        f"{str(one).removesuffix('_attention')}{'' if theta else '_unturned'}"
        for one, theta in zip(seen, turned, strict=True)
    ]


def tower(fields: Fields) -> tuple[Weight, ...]:
    vision = fields.section("vision_config")
    of_kind(vision, "muse_glimmer_vision")
    vision.assume(**VISION_DEFAULTS)
    fields.assume(out_hidden_size=6144, projector_hidden_size=4096)
    out = fields.section("text_config").count("hidden_size", default=DEFAULTS["hidden_size"])
    width, inner = vision.count("hidden_size"), vision.count("intermediate_size")
    heads = vision.count("num_attention_heads")
    vision.divides(heads, width, "num_attention_heads", "the tower's width")
    read, middle = fields.count("out_hidden_size"), fields.count("projector_hidden_size")

    def weights() -> Weights:
        pixels = 3 * vision.count("patch_temporal") * vision.count("patch_size") ** 2
        places = vision.count("pos_emb_height") * vision.count("pos_emb_width")
        patch = f"{ROOT}.patch_embedder"
        yield from linear(f"{patch}.patch_embedding", pixels, width, bias=False)
        yield Weight(
            name=f"{patch}.position_embedding_table.weight", shape=(places, width), role="embedding"
        )
        yield from frequencies(f"{ROOT}.rotary_emb", -(-(width // heads // 2) // 2))
        yield from norm(f"{ROOT}.ln_pre", width)
        for number in range(vision.layers()):
            name = f"{ROOT}.layers.{number}"
            yield from norm(f"{name}.norm1", width)
            yield from norm(f"{name}.norm2", width)
            for one in ("proj", "q_proj", "k_proj", "v_proj"):
                yield from linear(f"{name}.attn.{one}", width, width)
            yield from perceptron(f"{name}.mlp", width, inner)
        yield from norm(f"{ROOT}.ln_post", width)
        yield from linear("model.vision_adapter.fc1", read, middle, bias=False)
        yield from linear("model.vision_adapter.fc2", middle, middle, bias=False)
        yield from linear("model.vision_projection", middle, out, bias=False)

    return tuple(weights())


captured(
    Row(
        name="muse_glimmer",
        text="text_config",
        dims=dims,
        kinds=kinds,
        examples=tuple(
            {
                "model_type": "muse_glimmer",
                "text_config": one,
                "vision_config": VISION,
                "out_hidden_size": 128,
                "projector_hidden_size": 56,
            }
            for one in variants(TEXT, SIZES)
        ),
        silent=("qk_scale_factor", "sliding_window", "final_logit_softcapping"),
        window="sliding_window",
        scaled=True,
        softcap="final_logit_softcapping",
        tower=tower,
        idle=(f"{ROOT}.", "model.vision_adapter.", "model.vision_projection."),
    )
)
