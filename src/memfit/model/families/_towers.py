"""Weights of vision towers. Text does not run them. The order is that of transformers 5.23."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memfit.model.config import Fields
from memfit.model.families._siglip import norm as layer_norm
from memfit.model.modules import Linear, Norm, Weight

Weights = Iterator[Weight]
ROOT = "model.visual"


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Weights:
    return Linear(name=name, inputs=inputs, outputs=outputs, bias=bias).weights()


def rms_norm(name: str, width: int) -> Weights:
    return Norm(name=name, width=width).weights()


def frequencies(name: str, count: int) -> Weights:
    """The two buffers of a rotary embedding."""
    for one in ("inv_freq", "original_inv_freq"):
        yield Weight(name=f"{name}.{one}", shape=(count,), role="buffer", format="float32")


def patches(name: str, fields: Fields, width: int) -> Weight:
    """The convolution over patches of two frames."""
    patch = fields.count("patch_size")
    shape = (width, fields.count("in_channels"), fields.count("temporal_patch_size"), patch, patch)
    return Weight(name=f"{name}.patch_embed.proj.weight", shape=shape, role="linear")


def head_size(fields: Fields, width: int) -> int:
    heads = fields.count("num_heads")
    fields.divides(heads, width, "num_heads", "the tower's width")
    return width // heads


# --------------------------------------------------------------------------------- Qwen's towers
# Class defaults of the vision configs (transformers 5.23 configuration_qwen2_vl.py,
# configuration_qwen2_5_vl.py, configuration_qwen3_vl.py, configuration_qwen3_5.py)
PATCHES = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 16}
QWEN2 = {**PATCHES, "patch_size": 14, "depth": 32, "embed_dim": 1280, "hidden_size": 3584}
QWEN2_5 = {
    **PATCHES,
    "patch_size": 14,
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
}
QWEN3 = {
    **PATCHES,
    "patch_size": 16,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
DEEPSTACK = [8, 16, 24]


def qwen2_tower(fields: Fields) -> tuple[Weight, ...]:
    """Qwen2-VL's."""
    fields.assume(**QWEN2, mlp_ratio=4)
    width, merge = fields.count("embed_dim"), fields.count("spatial_merge_size") ** 2
    inner, out = width * fields.count("mlp_ratio", high=64), fields.count("hidden_size")

    def weights() -> Weights:
        yield patches(ROOT, fields, width)
        for number in range(fields.layers("depth")):
            name = f"{ROOT}.blocks.{number}"
            yield from layer_norm(f"{name}.norm1", width)
            yield from layer_norm(f"{name}.norm2", width)
            yield from linear(f"{name}.attn.qkv", width, 3 * width)
            yield from linear(f"{name}.attn.proj", width, width)
            yield from linear(f"{name}.mlp.fc1", width, inner)
            yield from linear(f"{name}.mlp.fc2", inner, width)
        yield from layer_norm(f"{ROOT}.merger.ln_q", width)
        yield from linear(f"{ROOT}.merger.mlp.0", merge * width, merge * width)
        yield from linear(f"{ROOT}.merger.mlp.2", merge * width, out)
        yield from frequencies(f"{ROOT}.rotary_pos_emb", head_size(fields, width) // 4)

    return tuple(weights())


def qwen2_5_tower(fields: Fields) -> tuple[Weight, ...]:
    """Qwen2.5-VL's: RMS norms and gated feed-forwards."""
    fields.assume(**QWEN2_5)
    width, merge = fields.count("hidden_size"), fields.count("spatial_merge_size") ** 2
    inner, out = fields.count("intermediate_size"), fields.count("out_hidden_size")

    def weights() -> Weights:
        yield patches(ROOT, fields, width)
        for number in range(fields.layers("depth")):
            name = f"{ROOT}.blocks.{number}"
            yield from rms_norm(f"{name}.norm1", width)
            yield from rms_norm(f"{name}.norm2", width)
            yield from linear(f"{name}.attn.qkv", width, 3 * width)
            yield from linear(f"{name}.attn.proj", width, width)
            yield from linear(f"{name}.mlp.gate_proj", width, inner)
            yield from linear(f"{name}.mlp.up_proj", width, inner)
            yield from linear(f"{name}.mlp.down_proj", inner, width)
        yield from rms_norm(f"{ROOT}.merger.ln_q", width)
        yield from linear(f"{ROOT}.merger.mlp.0", merge * width, merge * width)
        yield from linear(f"{ROOT}.merger.mlp.2", merge * width, out)
        yield from frequencies(f"{ROOT}.rotary_pos_emb", head_size(fields, width) // 4)

    return tuple(weights())


def merger(name: str, normed: int, width: int, out: int) -> Weights:
    yield from layer_norm(f"{name}.norm", normed)
    yield from linear(f"{name}.linear_fc1", width, width)
    yield from linear(f"{name}.linear_fc2", width, out)


def qwen3_tower(fields: Fields, *, deepstack: bool = False) -> tuple[Weight, ...]:
    """Qwen3-VL's, with a merger for each layer that goes into the text model's first ones, and
    Qwen3.5's, which has none of these."""
    fields.assume(**QWEN3, **({"deepstack_visual_indexes": DEEPSTACK} if deepstack else {}))
    width, merge = fields.count("hidden_size"), fields.count("spatial_merge_size") ** 2
    inner, out = fields.count("intermediate_size"), fields.count("out_hidden_size")
    stacked = len(fields.integers("deepstack_visual_indexes")) if deepstack else 0

    def weights() -> Weights:
        yield patches(ROOT, fields, width)
        yield Weight(name=f"{ROOT}.patch_embed.proj.bias", shape=(width,), role="bias")
        rows = fields.count("num_position_embeddings")
        yield Weight(name=f"{ROOT}.pos_embed.weight", shape=(rows, width), role="embedding")
        for number in range(fields.layers("depth")):
            name = f"{ROOT}.blocks.{number}"
            yield from layer_norm(f"{name}.norm1", width)
            yield from layer_norm(f"{name}.norm2", width)
            yield from linear(f"{name}.attn.qkv", width, 3 * width)
            yield from linear(f"{name}.attn.proj", width, width)
            yield from linear(f"{name}.mlp.linear_fc1", width, inner)
            yield from linear(f"{name}.mlp.linear_fc2", inner, width)
        yield from merger(f"{ROOT}.merger", width, merge * width, out)
        for number in range(stacked):
            name = f"{ROOT}.deepstack_merger_list.{number}"
            yield from merger(name, merge * width, merge * width, out)
        yield from frequencies(f"{ROOT}.rotary_pos_emb", head_size(fields, width) // 4)

    return tuple(weights())


# -------------------------------------------------------------------------------- Llama 4's tower
# Class defaults (transformers 5.23 configuration_llama4.py Llama4VisionConfig)
LLAMA4 = {
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "vision_output_dim": 7680,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}


def llama4_tower(fields: Fields, out: int) -> tuple[Weight, ...]:
    """Its patches are projected, and pixels are shuffled; `out` is the language model's width."""
    of_kind(fields, "llama4_vision_model")
    fields.assume(**LLAMA4)
    root = "vision_model"
    width, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    patch = fields.count("patch_size")
    places = (fields.count("image_size") // patch) ** 2 + 1
    middle, last = fields.count("projector_input_dim"), fields.count("projector_output_dim")
    heads, seen = fields.count("num_attention_heads"), fields.count("vision_output_dim")
    fields.divides(heads, width, "num_attention_heads", "hidden_size")
    pixels = fields.count("num_channels") * patch**2

    def weights() -> Weights:
        yield Weight(name=f"{root}.class_embedding", shape=(width,), role="embedding")
        table = f"{root}.positional_embedding_vlm"
        yield Weight(name=table, shape=(places, width), role="embedding")
        yield from linear(f"{root}.patch_embedding.linear", pixels, width, bias=False)
        for one in ("pre", "post"):
            yield from layer_norm(f"{root}.layernorm_{one}", width)
        for number in range(fields.layers()):
            name = f"{root}.model.layers.{number}"
            for one in ("q", "k", "v", "o"):
                yield from linear(f"{name}.self_attn.{one}_proj", width, width)
            yield from linear(f"{name}.mlp.fc1", width, inner)
            yield from linear(f"{name}.mlp.fc2", inner, width)
            for one in ("input", "post_attention"):
                yield from layer_norm(f"{name}.{one}_layernorm", width)
        yield from linear(f"{root}.vision_adapter.mlp.fc1", inner, middle, bias=False)
        yield from linear(f"{root}.vision_adapter.mlp.fc2", last, last, bias=False)
        turned = (places, 1, width // heads // 2)
        name = f"{root}.rotary_embedding.freqs_ci"
        yield Weight(name=name, shape=turned, role="buffer", format="complex64")
        yield from linear("multi_modal_projector.linear_1", seen, out, bias=False)

    return tuple(weights())


# ------------------------------------------------------------------- Pixtral's and CLIP's towers
# Class defaults (transformers 5.23 configuration_pixtral.py, configuration_clip.py)
PIXTRAL = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
}
CLIP = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
}


def of_kind(fields: Fields, kind: str, noun: str = "vision tower") -> None:
    """Say so where a config names another part than `kind`."""
    given = fields.text("model_type", default=kind)
    if given != kind:
        message = f"not supported yet: the {noun} `{given[:40]}`"
        fields.blame("model_type", message, "`--by trace` runs the real code instead")


def pixtral_tower(fields: Fields, name: str) -> tuple[int, tuple[Weight, ...]]:
    """(its width, its weights)"""
    of_kind(fields, "pixtral")
    fields.assume(**PIXTRAL)
    width, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    heads, patch = fields.count("num_attention_heads"), fields.count("patch_size")
    fields.divides(heads, width, "num_attention_heads", "the tower's width")

    def weights() -> Weights:
        shape = (width, fields.count("num_channels"), patch, patch)
        yield Weight(name=f"{name}.patch_conv.weight", shape=shape, role="linear")
        yield from rms_norm(f"{name}.ln_pre", width)
        for number in range(fields.layers()):
            layer = f"{name}.transformer.layers.{number}"
            yield from rms_norm(f"{layer}.attention_norm", width)
            for part, inputs, outputs in (
                ("gate", width, inner),
                ("up", width, inner),
                ("down", inner, width),
            ):
                yield from linear(f"{layer}.feed_forward.{part}_proj", inputs, outputs, bias=False)
            for part in "kvqo":
                yield from linear(f"{layer}.attention.{part}_proj", width, width, bias=False)
            yield from rms_norm(f"{layer}.ffn_norm", width)
        yield from frequencies(f"{name}.patch_positional_embedding", width // heads // 2)

    return width, tuple(weights())


def clip_layers(name: str, layers: int, width: int, inner: int) -> Weights:
    """The encoder of CLIP, SigLIP and Idefics 3, and the norm behind it."""
    for number in range(layers):
        layer = f"{name}.encoder.layers.{number}"
        for part in ("k", "v", "q", "out"):
            yield from linear(f"{layer}.self_attn.{part}_proj", width, width)
        yield from layer_norm(f"{layer}.layer_norm1", width)
        yield from linear(f"{layer}.mlp.fc1", width, inner)
        yield from linear(f"{layer}.mlp.fc2", inner, width)
        yield from layer_norm(f"{layer}.layer_norm2", width)
    yield from layer_norm(f"{name}.post_layernorm", width)


def clip_tower(fields: Fields, name: str) -> tuple[int, tuple[Weight, ...]]:
    """(its width, its weights)"""
    of_kind(fields, "clip_vision_model")
    fields.assume(**CLIP)
    width, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    patch, channels = fields.count("patch_size"), fields.count("num_channels")
    heads = fields.count("num_attention_heads", default=CLIP["num_attention_heads"])
    fields.divides(heads, width, "num_attention_heads", "hidden_size")
    places = (fields.count("image_size") // patch) ** 2 + 1

    def weights() -> Weights:
        place = f"{name}.embeddings"
        yield Weight(name=f"{place}.class_embedding", shape=(width,))
        shape = (width, channels, patch, patch)
        yield Weight(name=f"{place}.patch_embedding.weight", shape=shape, role="linear")
        table = f"{place}.position_embedding.weight"
        yield Weight(name=table, shape=(places, width), role="embedding")
        ids = f"{place}.position_ids"
        yield Weight(name=ids, shape=(1, places), role="buffer", format="int64")
        yield from layer_norm(f"{name}.pre_layrnorm", width)
        yield from clip_layers(name, fields.layers(), width, inner)

    return width, tuple(weights())


Tower = Callable[[Fields], tuple[Weight, ...]]

__all__ = [
    "Tower",
    "clip_tower",
    "frequencies",
    "layer_norm",
    "linear",
    "of_kind",
    "pixtral_tower",
    "qwen2_5_tower",
    "qwen2_tower",
    "qwen3_tower",
    "rms_norm",
]


# ---------------------------------------------------------------------------------- GLM's towers
# Class defaults of the vision configs (transformers 5.23 configuration_glm4v.py,
# configuration_glm4v_moe.py)
GLM = {
    **PATCHES,
    "num_heads": 12,
    "patch_size": 14,
    "image_size": 336,
    "depth": 24,
    "hidden_size": 1536,
    "intermediate_size": 13696,
    "out_hidden_size": 4096,
}


# transformers 5.23 configuration_glm_ocr.py
GLM_OCR = {
    **GLM,
    "num_heads": 16,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "out_hidden_size": 1536,
}


def gated(name: str, width: int, inner: int, *, bias: bool) -> Weights:
    """A gated feed-forward."""
    for one in ("gate_proj", "up_proj"):
        yield from linear(f"{name}.{one}", width, inner, bias=bias)
    yield from linear(f"{name}.down_proj", inner, width, bias=bias)


def gated_merger(width: int, inner: int) -> Weights:
    """What GLM's towers end in."""
    yield from linear(f"{ROOT}.merger.proj", width, width, bias=False)
    yield from layer_norm(f"{ROOT}.merger.post_projection_norm", width)
    yield from gated(f"{ROOT}.merger", width, inner, bias=False)


def downsample(outputs: int, width: int, merge: int) -> Weights:
    """A convolution that makes one of several patches."""
    shape = (outputs, width, merge, merge)
    yield Weight(name=f"{ROOT}.downsample.weight", shape=shape, role="linear")
    yield Weight(name=f"{ROOT}.downsample.bias", shape=(outputs,), role="bias")


def glm_ocr_tower(fields: Fields) -> tuple[Weight, ...]:
    """GLM-OCR's: norms on queries and keys, and no table of positions."""
    fields.assume(**GLM_OCR)
    width, out = fields.count("hidden_size"), fields.count("out_hidden_size")
    inner, merge = fields.count("intermediate_size"), fields.count("spatial_merge_size")
    bias, head = fields.flag("attention_bias", default=True), head_size(fields, width)
    wide = out * fields.count("in_channels")

    def weights() -> Weights:
        yield patches(ROOT, fields, width)
        yield Weight(name=f"{ROOT}.patch_embed.proj.bias", shape=(width,), role="bias")
        yield from frequencies(f"{ROOT}.rotary_pos_emb", head // 4)
        for number in range(fields.layers("depth")):
            name = f"{ROOT}.blocks.{number}"
            yield from rms_norm(f"{name}.norm1", width)
            yield from rms_norm(f"{name}.norm2", width)
            yield from linear(f"{name}.attn.qkv", width, 3 * width, bias=bias)
            yield from linear(f"{name}.attn.proj", width, width, bias=bias)
            yield from rms_norm(f"{name}.attn.q_norm", head)
            yield from rms_norm(f"{name}.attn.k_norm", head)
            yield from gated(f"{name}.mlp", width, inner, bias=bias)
        yield from gated_merger(out, wide)
        yield from downsample(out, width, merge)
        yield from rms_norm(f"{ROOT}.post_layernorm", width)

    return tuple(weights())


def glm_tower(fields: Fields) -> tuple[Weight, ...]:
    """GLM-4V's: feed-forwards as wide as the language model, and a convolution behind the
    layers."""
    fields.assume(**GLM)
    width, out = fields.count("hidden_size"), fields.count("out_hidden_size")
    inner, merge = fields.count("intermediate_size"), fields.count("spatial_merge_size")
    bias = fields.flag("attention_bias", default=False)

    def weights() -> Weights:
        rows = (fields.count("image_size") // fields.count("patch_size")) ** 2
        name = f"{ROOT}.embeddings.position_embedding.weight"
        yield Weight(name=name, shape=(rows, width), role="embedding")
        yield patches(ROOT, fields, width)
        yield Weight(name=f"{ROOT}.patch_embed.proj.bias", shape=(width,), role="bias")
        yield from frequencies(f"{ROOT}.rotary_pos_emb", head_size(fields, width) // 4)
        for number in range(fields.layers("depth")):
            name = f"{ROOT}.blocks.{number}"
            yield from rms_norm(f"{name}.norm1", width)
            yield from rms_norm(f"{name}.norm2", width)
            yield from linear(f"{name}.attn.qkv", width, 3 * width, bias=bias)
            yield from linear(f"{name}.attn.proj", width, width, bias=False)
            yield from gated(f"{name}.mlp", width, out, bias=False)
        yield from gated_merger(out, inner)
        yield from rms_norm(f"{ROOT}.post_conv_layernorm", width)
        yield from downsample(out, width, merge)
        yield from rms_norm(f"{ROOT}.post_layernorm", width)

    return tuple(weights())
