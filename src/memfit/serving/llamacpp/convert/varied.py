"""Configs whose layers differ from each other: searched ones, and mixtures of attention."""

from __future__ import annotations

from memfit.errors import Problem
from memfit.serving.llamacpp.convert.parts import (
    attention,
    ends,
    experts,
    gated,
    read_experts,
    sizes,
)
from memfit.serving.llamacpp.convert.sheet import Sheet
from memfit.units import round_up


def deci(sheet: Sheet) -> str:
    """Nemotron's searched models: each layer has its own feed-forward, and some have no attention,
    or one matrix instead (conversion/deci.py)."""
    size = sizes(sheet)
    blocks = sheet.optional("block_configs")
    if not isinstance(blocks, list) or len(blocks) != size.layers:
        message = f"`block_configs` must have an entry for each of {size.layers} layers"
        sheet.problems.append(Problem(message=message, where=f"config of {sheet.name}"))
        sheet.done()
    heads, kv_heads, inner = [], [], []
    for block in blocks:
        mixer, feeds = block.get("attention") or {}, block.get("ffn") or {}
        shared, factor = mixer.get("n_heads_in_group"), feeds.get("ffn_mult")
        heads.append(size.heads if shared or mixer.get("replace_with_linear") else 0)
        kv_heads.append(size.heads // shared if shared else 0)
        inner.append(round_up(int(2 * factor * size.width / 3), 256) if factor else 0)
    ends(sheet, size)
    sheet.put(
        attention__head_count=tuple(heads),
        attention__head_count_kv=tuple(kv_heads),
        attention__key_length=size.head,
        attention__value_length=size.head,
        feed_forward_length=tuple(inner),
    )
    for index in range(size.layers):
        sheet.layer(index)
        if heads[index]:
            sheet.norms(size.width, "attn_norm")
        if kv_heads[index]:
            attention(sheet, size, kv_heads=kv_heads[index])
        elif heads[index]:
            sheet.matrix("attn_output", size.width, size.width)
        if inner[index]:
            sheet.norms(size.width, "ffn_norm")
            gated(sheet, size.width, inner[index])
    if sheet.rope().get("rope_type") == "llama3":
        sheet.top()
        sheet.plain("rope_freqs.weight", size.head // 2)
    return "deci"


def mimo2(sheet: Sheet) -> str:
    """MiMo-V2-Flash: windows have twice the key/value heads, and sinks; keys are longer than values
    (conversion/mimo.py). Files have no layers that predict further tokens."""
    size = sizes(sheet)
    value, swa_heads = sheet.whole("v_head_dim"), sheet.whole("swa_num_key_value_heads")
    slides = [bool(one) for one in sheet.each("hybrid_layer_pattern", layers=size.layers)]
    routed = sheet.each("moe_layer_freq", layers=size.layers, default=1)
    ends(sheet, size)
    found = read_experts(sheet, correction=True)
    kv_heads = [swa_heads if one else size.kv_heads for one in slides]
    sheet.put(
        attention__head_count_kv=tuple(kv_heads),
        attention__key_length=size.head,
        attention__value_length=value,
        attention__sliding_window=sheet.whole("sliding_window", "sliding_window_size"),
        attention__sliding_window_pattern=tuple(slides),
    )
    scale = sheet.optional("attention_value_scale")
    if isinstance(scale, float):
        sheet.put(attention__value_scale=scale)
    for index, window in enumerate(slides):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        sheet.matrix("attn_q", size.heads * size.head, size.width)
        sheet.matrix("attn_k", kv_heads[index] * size.head, size.width)
        sheet.matrix("attn_v", kv_heads[index] * value, size.width)
        sheet.matrix("attn_output", size.width, size.heads * value)
        if sheet.flag(f"add_{'swa' if window else 'full'}_attention_sink_bias"):
            sheet.vector("attn_sinks", size.heads)
        if routed[index]:
            experts(sheet, size.width, found)
        else:
            gated(sheet, size.width, size.inner)
    return "mimo2"


def gemma3n(sheet: Sheet) -> str:
    """Gemma 3n: four copies of the hidden state, a table of embeddings for each layer, and caches
    that the last layers share; files keep those layers' own keys and values. Both tables have rows
    for images and sound (conversion/gemma.py)."""
    size = sizes(sheet)
    copies, rank = sheet.whole("altup_num_inputs", default=4), sheet.whole("laurel_rank")
    narrow = sheet.whole("hidden_size_per_layer_input")
    slides = tuple(one == "sliding_attention" for one in sheet.words("layer_types"))
    sheet.put(
        attention__key_length=size.head,
        attention__value_length=size.head,
        attention__sliding_window=sheet.whole("sliding_window"),
        attention__sliding_window_pattern=slides,
        attention__shared_kv_layers=max(0, size.layers - OWN_CACHES),
        embedding_length_per_layer_input=narrow,
        altup__num_inputs=copies,
        altup__active_idx=0,
        final_logit_softcapping=30.0,
    )
    ends(sheet, size, tied=True)
    sheet.matrix("per_layer_token_embd", size.vocab, narrow * size.layers)
    sheet.matrix("per_layer_model_proj", narrow * size.layers, size.width)
    sheet.norms(narrow, "per_layer_proj_norm")
    for name in ("altup_proj", "altup_unembd_proj"):
        sheet.plain(f"{name}.weight", size.width, size.width, copies - 1)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        attention(sheet, size, qk_norm=size.head)
        gated(sheet, size.width, size.inner)
        sheet.matrix("inp_gate", narrow, size.width)
        sheet.matrix("proj", size.width, narrow)
        sheet.norms(size.width, "post_norm", "altup_correct_scale", "altup_router_norm")
        sheet.matrix("altup_correct_coef", copies, copies)
        sheet.matrix("altup_predict_coef", copies * copies, copies)
        sheet.matrix("altup_router", copies, size.width)
        sheet.matrix("laurel_l", rank, size.width)
        sheet.matrix("laurel_r", size.width, rank)
        sheet.norms(size.width, "laurel_post_norm")
    return "gemma3n"


OWN_CACHES = 20  # layers with a cache of their own: load_arch_hparams of src/models/gemma3n.cpp


def step35(sheet: Sheet) -> str:
    """Step-3.5 and 3.7 Flash: windows have heads of their own, each head's output is gated, and the
    layers that predict further tokens are in the file (conversion/step3.py)."""
    layers = sheet.whole("num_hidden_layers")
    extra = sheet.whole("num_nextn_predict_layers", default=0)
    other = sheet.optional("attention_other_setting")
    if not isinstance(other, dict) or not all(
        type(other.get(key)) is int for key in ("num_attention_heads", "num_attention_groups")
    ):
        message = "`attention_other_setting` must say how many heads layers with windows have"
        sheet.problems.append(Problem(message=message, where=f"config of {sheet.name}"))
        sheet.done()
    sheet.config = {
        **sheet.config,
        "num_hidden_layers": layers + extra,
        "num_key_value_heads": sheet.whole("num_attention_groups", "num_key_value_heads"),
        "num_experts": sheet.whole("moe_num_experts", "num_experts"),
        "num_experts_per_tok": sheet.whole("moe_top_k", "num_experts_per_tok"),
    }
    size = sizes(sheet)
    types = sheet.words("layer_types")
    slides = [types[one : one + 1] == ["sliding_attention"] for one in range(size.layers)]
    heads = [other["num_attention_heads"] if one else size.heads for one in slides]
    kv_heads = [other["num_attention_groups"] if one else size.kv_heads for one in slides]
    ends(sheet, size)
    found = read_experts(sheet, shared=sheet.whole("share_expert_dim"), correction=True)
    routed = {int(one) for one in str(sheet.optional("moe_layers_enum") or "").split(",") if one}
    sheet.put(
        attention__head_count=tuple(heads),
        attention__head_count_kv=tuple(kv_heads),
        attention__key_length=size.head,
        attention__value_length=size.head,
        attention__sliding_window=sheet.whole("sliding_window"),
        attention__sliding_window_pattern=tuple(slides),
        expert_weights_norm=True,
        expert_weights_scale=3.0,
        leading_dense_block_count=min(routed, default=layers),
        nextn_predict_layers=extra,
    )
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        attention(sheet, size, heads=heads[index], kv_heads=kv_heads[index], qk_norm=size.head)
        sheet.matrix("attn_gate", heads[index], size.width)
        if index in routed:
            experts(sheet, size.width, found)
        else:
            gated(sheet, size.width, size.inner)
        if index >= layers:
            sheet.matrix("nextn.eh_proj", size.width, 2 * size.width)
            sheet.norms(size.width, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
            sheet.matrix("nextn.shared_head_head", size.vocab, size.width)
    return "step35"
