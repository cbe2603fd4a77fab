"""Weights of Gemma 4's towers for images and sounds. Text does not run them. The order is that of
transformers 5.23."""

from __future__ import annotations

from memfit.model.config import Fields
from memfit.model.families._towers import Weights, frequencies, linear, of_kind, rms_norm
from memfit.model.modules import Norm, Weight

# Class defaults (transformers 5.23 configuration_gemma4.py Gemma4VisionConfig)
GEMMA4 = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "patch_size": 16,
    "position_embedding_size": 10_240,
}


def clipped(name: str, inputs: int, outputs: int, *, limits: bool) -> Weights:
    """A linear layer with the limits of its inputs and outputs."""
    yield from linear(f"{name}.linear", inputs, outputs, bias=False)
    if limits:
        for one in ("input_min", "input_max", "output_min", "output_max"):
            yield Weight(name=f"{name}.{one}", shape=(), role="buffer")


def gemma4_tower(fields: Fields, out: int) -> tuple[Weight, ...]:
    """Its patches are projected, not convolved; `out` is the language model's width."""
    of_kind(fields, "gemma4_vision")
    fields.assume(**GEMMA4)
    root, limits = "model.vision_tower", fields.flag("use_clipped_linears", default=False)
    width, inner = fields.count("hidden_size"), fields.count("intermediate_size")
    head, rows = fields.count("head_dim"), fields.count("position_embedding_size")
    query, key = (head * fields.count(f"num_{one}_heads") for one in ("attention", "key_value"))
    pixels = 3 * fields.count("patch_size") ** 2

    def weights() -> Weights:
        table = f"{root}.patch_embedder.position_embedding_table"
        yield Weight(name=table, shape=(2, rows, width), role="embedding")
        yield from linear(f"{root}.patch_embedder.input_proj", pixels, width, bias=False)
        for number in range(fields.layers()):
            name = f"{root}.encoder.layers.{number}"
            for part, inputs, outputs in (
                ("self_attn.q_proj", width, query),
                ("self_attn.k_proj", width, key),
                ("self_attn.v_proj", width, key),
                ("self_attn.o_proj", query, width),
                ("mlp.gate_proj", width, inner),
                ("mlp.up_proj", width, inner),
                ("mlp.down_proj", inner, width),
            ):
                yield from clipped(f"{name}.{part}", inputs, outputs, limits=limits)
            for part in ("q_norm", "k_norm"):
                yield from rms_norm(f"{name}.self_attn.{part}", head)
            for part in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
                yield from rms_norm(f"{name}.{part}_layernorm", width)
        yield from frequencies(f"{root}.encoder.rotary_emb", head // 4)
        if fields.flag("standardize", default=False):
            for part in ("std_bias", "std_scale"):
                yield Weight(name=f"{root}.{part}", shape=(width,), role="buffer")
        yield from linear("model.embed_vision.embedding_projection", width, out, bias=False)

    return tuple(weights())


# Class defaults (transformers 5.23 configuration_gemma4.py Gemma4AudioConfig)
AUDIO = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "conv_kernel_size": 5,
    "output_proj_dims": 1536,
}
CHANNELS = [128, 32]  # of the two convolutions, each of which halves the bins of a spectrum


def audio_tower(fields: Fields, out: int) -> tuple[Weight, ...]:
    """A conformer; `out` is the language model's width."""
    of_kind(fields, "gemma4_audio", "audio tower")
    fields.assume(**AUDIO)
    root, limits = "model.audio_tower", fields.flag("use_clipped_linears", default=True)
    width, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    fields.divides(heads, width, "num_attention_heads", "the audio tower's width")
    kernel, end = fields.count("conv_kernel_size"), fields.count("output_proj_dims")
    channels = fields.listing("subsampling_conv_channels", 2, CHANNELS)
    if not all(type(one) is int and 0 < one < 2**20 for one in channels):
        fields.blame("subsampling_conv_channels", "must be two numbers")
        channels = CHANNELS

    def weights() -> Weights:
        for number, (before, after) in enumerate(((1, channels[0]), channels)):
            name = f"{root}.subsample_conv_projection.layer{number}"
            yield Weight(name=f"{name}.conv.weight", shape=(after, before, 3, 3), role="linear")
            yield from rms_norm(f"{name}.norm", after)
        name = f"{root}.subsample_conv_projection.input_proj_linear"
        # Of as many bins as the first convolution has channels
        yield from linear(name, channels[0] // 4 * channels[1], width, bias=False)
        name = f"{root}.rel_pos_enc.inv_timescales"
        yield Weight(name=name, shape=(1, 1, width // 2), role="buffer")
        for number in range(fields.layers()):
            yield from conformer(f"{root}.layers.{number}", width, width // heads, kernel, limits)
        yield from linear(f"{root}.output_proj", width, end)
        yield from linear("model.embed_audio.embedding_projection", end, out, bias=False)

    return tuple(weights())


def conformer(name: str, width: int, head: int, kernel: int, limits: bool) -> Weights:
    """One layer of the audio tower."""
    for part in ("feed_forward1", "feed_forward2"):
        place = f"{name}.{part}"
        yield from clipped(f"{place}.ffw_layer_1", width, 4 * width, limits=limits)
        yield from clipped(f"{place}.ffw_layer_2", 4 * width, width, limits=limits)
        for norm in ("pre", "post"):
            yield from rms_norm(f"{place}.{norm}_layer_norm", width)
    yield Weight(name=f"{name}.self_attn.per_dim_scale", shape=(head,))
    for part in ("q_proj", "k_proj", "v_proj", "post"):
        yield from clipped(f"{name}.self_attn.{part}", width, width, limits=limits)
    yield from linear(f"{name}.self_attn.relative_k_proj", width, width, bias=False)
    yield Weight(name=f"{name}.self_attn.softcap", shape=(), role="buffer")
    yield from clipped(f"{name}.lconv1d.linear_start", width, 2 * width, limits=limits)
    yield from clipped(f"{name}.lconv1d.linear_end", width, width, limits=limits)
    shape = (width, 1, kernel)
    yield Weight(name=f"{name}.lconv1d.depthwise_conv1d.weight", shape=shape, role="linear")
    for norm in ("lconv1d.pre_layer_norm", "lconv1d.conv_norm"):
        yield from rms_norm(f"{name}.{norm}", width)
    for norm in ("norm_pre_attn", "norm_post_attn", "norm_out"):
        yield from rms_norm(f"{name}.{norm}", width)


def unified_patches(fields: Fields, out: int) -> tuple[Weight, ...]:
    """Gemma 4 12B projects patches of several pixels (transformers 5.23
    modeling_gemma4_unified.py)."""
    of_kind(fields, "gemma4_unified_vision")
    fields.assume(patch_size=16, pooling_kernel_size=3, mm_embed_dim=3840, mm_posemb_size=1120)
    side = fields.count("patch_size") * fields.count("pooling_kernel_size")
    width, root = fields.count("mm_embed_dim"), "model.embed_vision"

    def weights() -> Weights:
        rows = fields.count("mm_posemb_size")
        yield Weight(name=f"{root}.pos_embedding", shape=(rows, 2, width))
        yield from centred(f"{root}.patch_ln1", 3 * side**2)
        yield from linear(f"{root}.patch_dense", 3 * side**2, width)
        yield from centred(f"{root}.patch_ln2", width)
        yield from centred(f"{root}.pos_norm", width)
        inner = fields.count("output_proj_dims", default=3840)
        name = f"{root}.multimodal_embedder.embedding_projection"
        yield from linear(name, inner, out, bias=False)

    return tuple(weights())


def centred(name: str, width: int) -> Weights:
    return Norm(name=name, width=width, style="layer", bias=True).weights()


def unified_sounds(fields: Fields, out: int) -> tuple[Weight, ...]:
    of_kind(fields, "gemma4_unified_audio", "audio tower")
    width = fields.count("audio_embed_dim", default=640)
    return tuple(linear("model.embed_audio.embedding_projection", width, out, bias=False))


__all__ = ["audio_tower", "gemma4_tower", "unified_patches", "unified_sounds"]
