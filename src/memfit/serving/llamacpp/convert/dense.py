"""Configs of dense decoders as llama.cpp's converter (`convert_hf_to_gguf.py`) writes them."""

from __future__ import annotations

from memfit.errors import Problem
from memfit.model.families.llava import DEFAULTS
from memfit.serving.llamacpp.convert.parts import (
    Sizes,
    attention,
    ends,
    fused_attention,
    gated,
    plain,
    rotated,
    sizes,
)
from memfit.serving.llamacpp.convert.sheet import Sheet


def _usual(
    sheet: Sheet,
    *,
    bias: bool = False,
    out_bias: bool | None = None,
    mlp_bias: bool = False,
    head_norm: bool = False,
    tied: bool = False,
    scaled_rope: bool = False,
) -> Sizes:
    """Llama and what follows it: two norms, attention, a gated feed-forward."""
    size = sizes(sheet)
    ends(sheet, size, tied=tied)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        attention(sheet, size, bias=bias, out_bias=out_bias, qk_norm=size.head if head_norm else 0)
        gated(sheet, size.width, size.inner, bias=mlp_bias)
    if scaled_rope and sheet.rope().get("rope_type", sheet.rope().get("type")) == "llama3":
        sheet.top()
        sheet.plain("rope_freqs.weight", size.head // 2)
    return size


def llama(sheet: Sheet) -> str:
    _usual(
        sheet,
        bias=sheet.flag("attention_bias"),
        mlp_bias=sheet.flag("mlp_bias"),
        scaled_rope=True,
    )
    return "llama"


# Class defaults of text configs, for what a config inside a config leaves out (transformers 5.23
# configuration_mistral.py)
TEXT_DEFAULTS = {
    "llama": DEFAULTS,
    "mistral": {
        **DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
}


def llava(sheet: Sheet) -> str:
    """LLaVA's text model; a config without one has the text model's sizes itself."""
    kind = str(sheet.config.get("model_type"))
    if kind in TEXT_DEFAULTS:
        sheet.config = {**TEXT_DEFAULTS[kind], **sheet.config}
    elif sheet.config.get("text_config"):
        message = f"not supported yet: the language model `{kind[:40]}`"
        sheet.problems.append(Problem(message=message, where="config.text_config.model_type"))
        sheet.done()
    return llama(sheet)


def mistral3(sheet: Sheet) -> str:
    _usual(sheet)
    return "mistral3"


def baichuan(sheet: Sheet) -> str:
    _usual(sheet)
    return "baichuan"


def internlm2(sheet: Sheet) -> str:
    _usual(sheet, bias=sheet.flag("bias"))
    return "internlm2"


def minicpm(sheet: Sheet) -> str:
    _usual(sheet, tied=True)
    sheet.put(embedding_scale=12.0, residual_scale=0.2, logit_scale=0.1)
    return "minicpm"


def arcee(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        attention(sheet, size)
        plain(sheet, size.width, size.inner)
    return "arcee"


def qwen2(sheet: Sheet) -> str:
    _usual(sheet, bias=True, out_bias=False)
    return "qwen2"


def qwen2vl(sheet: Sheet) -> str:
    _usual(sheet, bias=True, out_bias=False)
    sheet.put(rope__dimension_sections=(16, 24, 24, 0))
    return "qwen2vl"


def qwen(sheet: Sheet) -> str:
    """Qwen 1: fused projections, a feed-forward of half the stated width."""
    size = sizes(sheet)
    inner = size.inner // 2
    sheet.put(feed_forward_length=size.inner)
    ends(sheet, size)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        sheet.matrix("attn_qkv", 3 * size.width, size.width, bias=True)
        sheet.matrix("attn_output", size.width, size.width)
        gated(sheet, size.width, inner)
    return "qwen"


def qwen3(sheet: Sheet) -> str:
    _usual(sheet, head_norm=True, bias=sheet.flag("attention_bias"))
    return "qwen3"


def qwen3vl(sheet: Sheet) -> str:
    _usual(sheet, head_norm=True)
    vision = sheet.optional("vision_config")
    deep = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    sheet.put(rope__dimension_sections=(24, 20, 20, 0), n_deepstack_layers=len(deep or ()) or 3)
    return "qwen3vl"


def seed_oss(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "post_attention_norm")
        attention(sheet, size, bias=True, out_bias=sheet.flag("attention_out_bias"))
        gated(sheet, size.width, size.inner)
    return "seed_oss"


def smollm3(sheet: Sheet) -> str:
    _usual(sheet, tied=True)
    return "smollm3"


def ernie4_5(sheet: Sheet) -> str:
    _usual(sheet, tied=True)
    return "ernie4_5"


def hunyuan_dense(sheet: Sheet) -> str:
    _usual(sheet, head_norm=True, tied=True)
    return "hunyuan-dense"


def granite(sheet: Sheet) -> str:
    size = _usual(sheet, tied=True)
    put_granite(sheet)
    sheet.put(embedding_length=size.width)
    return "granite"


def put_granite(sheet: Sheet) -> None:
    """Multipliers; each is a step of the graph where it is not 0."""
    for key, name in (
        ("embedding_multiplier", "embedding_scale"),
        ("residual_multiplier", "residual_scale"),
        ("logits_scaling", "logit_scale"),
        ("attention_multiplier", "attention.scale"),
    ):
        value = sheet.optional(key)
        if isinstance(value, (int, float)):
            sheet.facts[name] = float(value)


def gemma(sheet: Sheet) -> str:
    _usual(sheet, tied=True)
    return "gemma"


def gemma2(sheet: Sheet) -> str:
    _gemma_layers(sheet, qk_norm=False)
    sheet.put(
        attention__sliding_window=sheet.whole("sliding_window", default=4096),
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    return "gemma2"


def gemma3(sheet: Sheet) -> str:
    _gemma_layers(sheet, qk_norm=True)
    sheet.put(attention__sliding_window=sheet.whole("sliding_window", default=4096))
    return "gemma3"


def gemma4(sheet: Sheet) -> str:
    """Windows and full attention have heads of their own; full layers use keys as values; experts
    run beside the dense feed-forward. E2B and E4B have a table of embeddings for each layer, and
    their last layers read the cache of others; files keep those layers' own keys and values."""
    size = sizes(sheet)
    types = sheet.words("layer_types") or ["full_attention"] * size.layers
    full_head = sheet.whole("global_head_dim", default=size.head)
    full_kv = sheet.whole("num_global_key_value_heads", default=size.kv_heads)
    slides = tuple(one == "sliding_attention" for one in types)
    per_layer = sheet.whole("hidden_size_per_layer_input", default=0)
    shared = sheet.whole("num_kv_shared_layers", default=0)
    wide = sheet.flag("use_double_wide_mlp")
    inner = tuple(
        size.inner * (1 + (wide and index >= size.layers - shared)) for index in range(size.layers)
    )
    sheet.put(
        attention__sliding_window=sheet.whole("sliding_window"),
        attention__sliding_window_pattern=slides,
        attention__key_length=full_head,
        attention__value_length=full_head,
        attention__key_length_swa=size.head,
        attention__value_length_swa=size.head,
        attention__head_count_kv=tuple(size.kv_heads if one else full_kv for one in slides),
        attention__shared_kv_layers=shared,
        embedding_length_per_layer_input=per_layer,
        final_logit_softcapping=30.0,
        rope__dimension_count=full_head,
        rope__dimension_count_swa=size.head,
    )
    ends(sheet, size, tied=True)
    routed = sheet.flag("enable_moe_block")
    if routed:
        sheet.put(
            expert_count=sheet.whole("num_experts"),
            expert_used_count=sheet.whole("top_k_experts", "num_experts_per_tok"),
            expert_feed_forward_length=sheet.whole("moe_intermediate_size"),
        )
    for index, window in enumerate(slides):
        sheet.layer(index)
        _gemma4_layer(sheet, size, size.head if window else full_head, window, full_kv)
        gated(sheet, size.width, inner[index])
        if routed:
            _gemma4_experts(sheet, size)
        if per_layer:
            sheet.matrix("inp_gate", per_layer, size.width)
            sheet.matrix("proj", size.width, per_layer)
            sheet.norms(size.width, "post_norm")
    sheet.top()
    if per_layer:
        rows = sheet.whole("vocab_size_per_layer_input", "vocab_size")
        sheet.matrix("per_layer_token_embd", rows, per_layer * size.layers)
        sheet.matrix("per_layer_model_proj", per_layer * size.layers, size.width)
        sheet.norms(per_layer, "per_layer_proj_norm")
    if not all(slides):
        sheet.plain("rope_freqs.weight", full_head // 2)
    return "gemma4"


def _gemma4_layer(sheet: Sheet, size: Sizes, head: int, window: bool, full_kv: int) -> None:
    width, kv_heads = size.width, size.kv_heads if window else full_kv
    sheet.norms(width, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    sheet.matrix("attn_q", size.heads * head, width)
    sheet.matrix("attn_k", kv_heads * head, width)
    if window or not sheet.flag("attention_k_eq_v"):
        sheet.matrix("attn_v", kv_heads * head, width)
    sheet.matrix("attn_output", width, size.heads * head)
    sheet.norms(head, "attn_q_norm", "attn_k_norm")
    sheet.vector("layer_output_scale", 1)


def _gemma4_experts(sheet: Sheet, size: Sizes) -> None:
    count, inner = sheet.whole("num_experts"), sheet.whole("moe_intermediate_size")
    sheet.matrix("ffn_gate_inp", count, size.width)
    sheet.plain("ffn_gate_inp.scale", size.width)
    sheet.norms(size.width, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    sheet.plain("ffn_gate_up_exps.weight", size.width, 2 * inner, count)
    sheet.plain("ffn_down_exps.weight", inner, size.width, count)
    sheet.plain("ffn_down_exps.scale", count)


def _gemma_layers(sheet: Sheet, *, qk_norm: bool) -> None:
    # Gemma3TextConfig of transformers 5.23 has defaults that published files leave out.
    sheet.config = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        **sheet.config,
    }
    size = sizes(sheet)
    sheet.put(attention__key_length=size.head, attention__value_length=size.head)
    ends(sheet, size, tied=True)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        attention(sheet, size, qk_norm=size.head if qk_norm else 0)
        gated(sheet, size.width, size.inner)


def phi3(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        fused_attention(sheet, size)
        sheet.matrix("ffn_up", 2 * size.inner, size.width)
        sheet.matrix("ffn_down", size.width, size.inner)
    if sheet.rope():
        sheet.top()
        half = rotated(sheet, size.head) // 2
        sheet.plain("rope_factors_long.weight", half)
        sheet.plain("rope_factors_short.weight", half)
        original = sheet.whole("original_max_position_embeddings", default=4096)
        sheet.put(rope__scaling__original_context_length=original)
    return "phi3"


def phi2(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size, norm_bias=True, bias=True)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", bias=True)
        attention(sheet, size, bias=True)
        plain(sheet, size.width, size.inner, bias=True)
    return "phi2"


def starcoder2(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size, norm_bias=True, tied=True)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm", bias=True)
        attention(sheet, size, bias=True)
        plain(sheet, size.width, size.inner, bias=True)
    return "starcoder2"


def nemotron(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size, norm_bias=True)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm", bias=True)
        attention(sheet, size)
        plain(sheet, size.width, size.inner)
    return "nemotron"


def stablelm(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size, norm_bias=True)
    parallel = sheet.flag("use_parallel_residual")
    sheet.put(use_parallel_residual=parallel)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", bias=True)
        if not parallel:
            sheet.norms(size.width, "ffn_norm", bias=True)
        attention(sheet, size, bias=sheet.flag("use_qkv_bias"), out_bias=False)
        if sheet.flag("qk_layernorm"):
            sheet.plain("attn_q_norm.weight", size.head, size.heads)
            sheet.plain("attn_k_norm.weight", size.head, size.kv_heads)
        gated(sheet, size.width, size.inner)
    return "stablelm"


def olmo(sheet: Sheet) -> str:
    """Norms without weights."""
    size = sizes(sheet)
    ends(sheet, size)
    del sheet.shapes["output_norm.weight"]
    for index in range(size.layers):
        sheet.layer(index)
        attention(sheet, size)
        gated(sheet, size.width, size.inner)
    return "olmo"


def olmo2(sheet: Sheet) -> str:
    """Norms after attention and feed-forward; keys and queries are normed as a whole."""
    size = sizes(sheet)
    ends(sheet, size)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "post_attention_norm", "post_ffw_norm")
        attention(sheet, size)
        sheet.norms(size.heads * size.head, "attn_q_norm")
        sheet.norms(size.kv_heads * size.head, "attn_k_norm")
        gated(sheet, size.width, size.inner)
    types = sheet.words("layer_types")
    if "sliding_attention" in types:
        sheet.put(
            attention__sliding_window=sheet.whole("sliding_window"),
            attention__sliding_window_pattern=tuple(one == "sliding_attention" for one in types),
        )
    return "olmo2"


def exaone(sheet: Sheet) -> str:
    _usual(sheet, scaled_rope=True)
    return "exaone"


def exaone4(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "post_attention_norm", "post_ffw_norm")
        attention(sheet, size, qk_norm=size.head)
        gated(sheet, size.width, size.inner)
    window = sheet.optional("sliding_window")
    if window and size.layers == 64:
        sheet.put(attention__sliding_window=window)
    if sheet.rope():
        sheet.top()
        sheet.plain("rope_freqs.weight", size.head // 2)
    return "exaone4"


def cohere(sheet: Sheet) -> str:
    size = _cohere_layers(sheet, norm=sheet.flag("use_qk_norm"))
    sheet.put(embedding_length=size.width)
    return "command-r"


def cohere2(sheet: Sheet) -> str:
    _cohere_layers(sheet, norm=False)
    sheet.put(attention__sliding_window=sheet.whole("sliding_window", default=4096))
    return "cohere2"


def _cohere_layers(sheet: Sheet, *, norm: bool) -> Sizes:
    size = sizes(sheet)
    sheet.put(logit_scale=0.0625)
    ends(sheet, size, tied=True)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm")
        attention(sheet, size)
        if norm:
            sheet.plain("attn_q_norm.weight", size.head, size.heads)
            sheet.plain("attn_k_norm.weight", size.head, size.kv_heads)
        gated(sheet, size.width, size.inner)
    return size


def glm4(sheet: Sheet, bias: bool | None = None) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    biased = sheet.flag("attention_bias") if bias is None else bias
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        attention(sheet, size, bias=biased, out_bias=False)
        sheet.matrix("ffn_up", 2 * size.inner, size.width)
        sheet.matrix("ffn_down", size.width, size.inner)
    return "glm4"


def glm4v(sheet: Sheet) -> str:
    """GLM-4.1V's text model, whose queries, keys and values always have a bias
    (modeling_glm4v.py Glm4vTextAttention)."""
    return glm4(sheet, bias=True)


def chatglm(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        fused_attention(sheet, size, bias=sheet.flag("attention_bias", "add_qkv_bias"))
        sheet.matrix("ffn_up", 2 * size.inner, size.width)
        sheet.matrix("ffn_down", size.width, size.inner)
    return "chatglm"
