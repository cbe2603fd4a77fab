"""Configs of mixtures of experts, latent attention among them."""

from __future__ import annotations

from collections.abc import Collection

from memfit.serving.llamacpp.convert.dense import put_granite
from memfit.serving.llamacpp.convert.parts import (
    Experts,
    Sizes,
    attention,
    ends,
    experts,
    fused_attention,
    gated,
    read_experts,
    sizes,
)
from memfit.serving.llamacpp.convert.sheet import Sheet

SIGMOID = 2  # llama_expert_gating_func_type


def _sparse(
    sheet: Sheet,
    size: Sizes,
    found: Experts,
    *,
    norms: tuple[str, ...] = ("attn_norm", "ffn_norm"),
    dense: int = 0,
    bias: bool = False,
    out_bias: bool | None = None,
    qk_norm: int = 0,
) -> None:
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, *norms)
        attention(sheet, size, bias=bias, out_bias=out_bias, qk_norm=qk_norm)
        if index < dense:
            gated(sheet, size.width, size.inner)
        else:
            experts(sheet, size.width, found)


def mixtral(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    _sparse(sheet, size, read_experts(sheet))
    return "llama"


def phimoe(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size, norm_bias=True, bias=True)
    found = read_experts(sheet)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm", bias=True)
        attention(sheet, size, bias=True)
        experts(sheet, size.width, found)
    half = size.head // 2
    sheet.top()
    sheet.plain("rope_factors_long.weight", half)
    sheet.plain("rope_factors_short.weight", half)
    return "phimoe"


def qwen2moe(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    shared = sheet.whole("shared_expert_intermediate_size", default=5632)
    found = read_experts(sheet, shared=shared)
    _sparse(sheet, size, found, bias=True, out_bias=False)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.plain("ffn_gate_inp_shexp.weight", size.width)
    return "qwen2moe"


def qwen3moe(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    _sparse(sheet, size, read_experts(sheet), qk_norm=size.head)
    return "qwen3moe"


def qwen3vlmoe(sheet: Sheet) -> str:
    qwen3moe(sheet)
    sheet.put(rope__dimension_sections=(24, 20, 20, 0), n_deepstack_layers=3)
    return "qwen3vlmoe"


def olmoe(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    _sparse(sheet, size, read_experts(sheet))
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.heads * size.head, "attn_q_norm")
        sheet.norms(size.kv_heads * size.head, "attn_k_norm")
    return "olmoe"


def granitemoe(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size, tied=True)
    put_granite(sheet)
    _sparse(
        sheet, size, read_experts(sheet, shared=sheet.whole("shared_intermediate_size", default=0))
    )
    return "granitemoe"


def gpt_oss(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    found = read_experts(sheet)
    sheet.put(
        attention__sliding_window=sheet.whole("sliding_window"),
        attention__key_length=size.head,
        attention__value_length=size.head,
    )
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "post_attention_norm")
        attention(sheet, size, bias=True)
        sheet.plain("attn_sinks.weight", size.heads)
        experts(sheet, size.width, found)
        for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
            sheet.types[f"{sheet.prefix}{name}.weight"] = "MXFP4"
        sheet.plain("ffn_gate_inp.bias", found.count)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            sheet.plain(f"{name}.bias", found.inner, found.count)
        sheet.plain("ffn_down_exps.bias", size.width, found.count)
    return "gpt-oss"


def deepseek(sheet: Sheet) -> str:
    """DeepSeek's first mixture of experts: plain attention."""
    size = sizes(sheet)
    ends(sheet, size)
    dense = sheet.whole("first_k_dense_replace", default=1)
    count = sheet.whole("n_shared_experts", default=2)
    sheet.put(leading_dense_block_count=dense, expert_shared_count=count)
    found = read_experts(sheet, shared=count * sheet.whole("moe_intermediate_size"))
    _sparse(sheet, size, found, dense=dense)
    return "deepseek"


def deepseek2(sheet: Sheet, indexed: Collection[int] = ()) -> str:
    """Latent attention, absorbed: the cache holds the latent and the rotary key, once for all
    heads. `indexed`: layers that choose the tokens which attention reads."""
    size = sizes(sheet)
    ends(sheet, size)
    sigmoid = sheet.optional("scoring_func") == "sigmoid" or (
        "topk_method" in sheet.config and (sheet.optional("topk_method") == "noaux_tc")
    )
    third = sheet.optional("model_type") not in ("deepseek_v2",)
    sigmoid = bool(sigmoid or third)
    inner = sheet.whole("moe_intermediate_size")
    count = sheet.whole("n_shared_experts", default=2)
    found = read_experts(sheet, shared=count * inner, correction=sigmoid)
    dense = sheet.whole("first_k_dense_replace", default=0)
    groups = sheet.whole("n_group", default=1)
    sheet.put(
        leading_dense_block_count=dense,
        expert_shared_count=count,
        expert_gating_func=SIGMOID if sigmoid else 1,
        expert_weights_scale=2.5 if sigmoid else 1.0,
        expert_weights_norm=sigmoid,
    )
    if sigmoid and groups > 1:
        sheet.put(
            expert_group_count=groups, expert_group_used_count=sheet.whole("topk_group", default=1)
        )
    _latent_layers(sheet, size, found, dense, indexed)
    return "deepseek2"


def deepseek32(sheet: Sheet) -> str:
    """DeepSeek-V3.2: an indexer in each layer. The layer that predicts further tokens is counted,
    and has no tensors (pull request 21149)."""
    layers = sheet.whole("num_hidden_layers")
    deepseek2(sheet, range(layers))
    extra = sheet.whole("num_nextn_predict_layers", default=0)
    sheet.put(block_count=layers + extra, nextn_predict_layers=extra)
    return "deepseek32"


def glm_dsa(sheet: Sheet) -> str:
    """GLM-5: an indexer in each layer; from 5.2 on some layers use that of a layer before."""
    layers = sheet.whole("num_hidden_layers")
    extra = sheet.whole("num_nextn_predict_layers", default=0)
    sheet.config = {**sheet.config, "num_hidden_layers": layers + extra}
    types = sheet.words("indexer_types") or ["full"] * layers
    indexed = [index for index, kind in enumerate(types) if kind == "full"]
    deepseek2(sheet, indexed)
    sheet.put(
        nextn_predict_layers=extra,
        attention__indexer__types=tuple(kind == "full" for kind in types),
    )
    width = sheet.whole("hidden_size")
    for index in range(layers, layers + extra):
        sheet.layer(index)
        sheet.matrix("nextn.eh_proj", width, 2 * width)
        sheet.norms(width, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
    return "glm-dsa"


def _indexer(sheet: Sheet, width: int, q_latent: int) -> None:
    heads, head = sheet.whole("index_n_heads"), sheet.whole("index_head_dim")
    sheet.put(
        attention__indexer__head_count=heads,
        attention__indexer__key_length=head,
        attention__indexer__top_k=sheet.whole("index_topk"),
    )
    sheet.vector("indexer.k_norm", head, bias=True)
    sheet.matrix("indexer.proj", heads, width)
    sheet.matrix("indexer.attn_k", head, width)
    sheet.matrix("indexer.attn_q_b", heads * head, q_latent)


def _latent_layers(
    sheet: Sheet, size: Sizes, found: Experts, dense: int, indexed: Collection[int]
) -> None:
    nope, rope, value = (
        sheet.whole(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    latent, heads = sheet.whole("kv_lora_rank"), size.heads
    q_latent = sheet.optional("q_lora_rank")
    sheet.put(
        attention__head_count_kv=1,
        attention__key_length=latent + rope,
        attention__value_length=latent,
        attention__key_length_mla=nope + rope,
        attention__value_length_mla=value,
        attention__kv_lora_rank=latent,
        rope__dimension_count=rope,
    )
    if q_latent:
        sheet.put(attention__q_lora_rank=q_latent)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        if q_latent:
            sheet.matrix("attn_q_a", q_latent, size.width)
            sheet.vector("attn_q_a_norm", q_latent)
            sheet.matrix("attn_q_b", heads * (nope + rope), q_latent)
        else:
            sheet.matrix("attn_q", heads * (nope + rope), size.width)
        sheet.matrix("attn_kv_a_mqa", latent + rope, size.width)
        sheet.vector("attn_kv_a_norm", latent)
        sheet.plain("attn_k_b.weight", nope, latent, heads)
        sheet.plain("attn_v_b.weight", latent, value, heads)
        sheet.matrix("attn_output", size.width, heads * value)
        if index in indexed:
            _indexer(sheet, size.width, q_latent)
        if index < dense:
            gated(sheet, size.width, size.inner)
        else:
            experts(sheet, size.width, found)


def glm4moe(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    dense = sheet.whole("first_k_dense_replace", default=1)
    count = sheet.whole("n_shared_experts", default=1)
    found = read_experts(
        sheet, shared=count * sheet.whole("moe_intermediate_size"), correction=True
    )
    sheet.put(
        leading_dense_block_count=dense,
        expert_shared_count=count,
        expert_gating_func=SIGMOID,
        expert_weights_norm=True,
        expert_weights_scale=1.0,
    )
    extra = sheet.whole("num_nextn_predict_layers", default=0)
    norm = size.head if sheet.flag("use_qk_norm") else 0
    total = Sizes(**{**size.__dict__, "layers": size.layers + extra})
    _sparse(
        sheet,
        total,
        found,
        norms=("attn_norm", "post_attention_norm"),
        dense=dense,
        bias=sheet.flag("attention_bias", default=True),
        out_bias=False,
        qk_norm=norm,
    )
    sheet.put(block_count=size.layers + extra, nextn_predict_layers=extra)
    for index in range(size.layers, size.layers + extra):
        sheet.layer(index)
        sheet.matrix("nextn.eh_proj", size.width, 2 * size.width)
        sheet.norms(size.width, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
    return "glm4moe"


def minimax_m2(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    found = read_experts(sheet, correction=True)
    sheet.put(expert_gating_func=SIGMOID)
    _sparse(sheet, size, found)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.heads * size.head, "attn_q_norm")
        sheet.norms(size.kv_heads * size.head, "attn_k_norm")
    return "minimax-m2"


def dots1(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    dense = sheet.whole("first_k_dense_replace", default=1)
    count = sheet.whole("n_shared_experts", default=2)
    found = read_experts(
        sheet, shared=count * sheet.whole("moe_intermediate_size"), correction=True
    )
    sheet.put(
        leading_dense_block_count=dense,
        expert_shared_count=count,
        expert_gating_func=SIGMOID,
        expert_weights_norm=True,
        expert_weights_scale=2.5,
    )
    _sparse(sheet, size, found, dense=dense, qk_norm=size.head)
    return "dots1"


def ernie4_5_moe(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size, tied=True)
    dense = sheet.whole("moe_layer_start_index", default=1)
    count = sheet.whole("moe_num_shared_experts", default=0)
    found = read_experts(
        sheet, shared=count * sheet.whole("moe_intermediate_size"), correction=True
    )
    sheet.put(
        leading_dense_block_count=dense, interleave_moe_layer_step=1, expert_shared_count=count
    )
    _sparse(sheet, size, found, dense=dense)
    return "ernie4_5-moe"


def hunyuan_moe(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size, tied=True)
    count = sheet.whole("num_shared_expert", default=1)
    inner = sheet.whole("moe_intermediate_size", "intermediate_size")
    found = read_experts(sheet, shared=count * inner)
    _sparse(sheet, size, found, qk_norm=size.head)
    return "hunyuan-moe"


def dbrx(sheet: Sheet) -> str:
    attn = sheet.optional("attn_config") or {}
    ffn = sheet.optional("ffn_config") or {}
    sheet.config = {
        **sheet.config,
        "num_key_value_heads": attn.get("kv_n_heads", 8),
        "n_inner": ffn.get("ffn_hidden_size"),
        "intermediate_size": ffn.get("ffn_hidden_size"),
        "num_experts": ffn.get("moe_num_experts"),
        "num_experts_per_tok": ffn.get("moe_top_k"),
        "moe_intermediate_size": ffn.get("ffn_hidden_size"),
    }
    size = sizes(sheet)
    ends(sheet, size)
    found = read_experts(sheet)
    sheet.put(attention__clamp_kqv=8.0)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "attn_output_norm")
        fused_attention(sheet, size)
        experts(sheet, size.width, found)
    return "dbrx"


def llama4(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    step = sheet.whole("interleave_moe_layer_step", default=1)
    inner = sheet.whole("intermediate_size")
    dense = sheet.whole("intermediate_size_mlp", default=inner)
    found = read_experts(sheet, shared=inner)
    sheet.put(
        interleave_moe_layer_step=step,
        feed_forward_length=dense,
        attention__chunk_size=8192,
        attention__sliding_window=8192,
        expert_feed_forward_length=inner,
        expert_weights_scale=1.0,
    )
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        attention(sheet, size)
        if (index + 1) % step == 0:
            experts(sheet, size.width, found)
        else:
            gated(sheet, size.width, dense)
    sheet.top()
    sheet.plain("rope_freqs.weight", size.head // 2)
    return "llama4"


def grok(sheet: Sheet) -> str:
    size = sizes(sheet)
    ends(sheet, size)
    found = read_experts(sheet)
    sheet.put(embedding_scale=78.0, logit_scale=0.57)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "attn_output_norm", "ffn_norm", "layer_output_norm")
        attention(sheet, size)
        experts(sheet, size.width, found)
    return "grok"
