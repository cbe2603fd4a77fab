"""Configs of models with recurrent layers: Mamba, hybrids of attention and state, short
convolutions, gated delta nets."""

from __future__ import annotations

from memfit.serving.llamacpp.convert.dense import put_granite
from memfit.serving.llamacpp.convert.parts import (
    Experts,
    Sizes,
    attention,
    ends,
    experts,
    gated,
    plain,
    put_experts,
    sizes,
)
from memfit.serving.llamacpp.convert.sheet import Sheet

SIGMOID = 2  # llama_expert_gating_func_type


def _first(sheet: Sheet, width: int, inner: int, state: int, rank: int, conv: int) -> None:
    """The tensors of one Mamba layer."""
    sheet.matrix("ssm_in", 2 * inner, width)
    sheet.plain("ssm_conv1d.weight", conv, inner)
    sheet.plain("ssm_conv1d.bias", inner)
    sheet.matrix("ssm_x", rank + 2 * state, inner)
    sheet.matrix("ssm_dt", inner, rank, bias=True)
    sheet.plain("ssm_a", state, inner)
    sheet.plain("ssm_d", inner)
    sheet.matrix("ssm_out", width, inner)


def _put(sheet: Sheet, *, conv: int, inner: int, state: int, rank: int, groups: int = 0) -> None:
    sheet.put(
        ssm__conv_kernel=conv,
        ssm__inner_size=inner,
        ssm__state_size=state,
        ssm__time_step_rank=rank,
    )
    if groups:
        sheet.put(ssm__group_count=groups)


def mamba(sheet: Sheet) -> str:
    size = sizes(sheet)
    inner = sheet.whole("intermediate_size", "d_inner", default=2 * size.width)
    state = sheet.whole("state_size", "d_state", default=16)
    conv = sheet.whole("conv_kernel", "d_conv", default=4)
    rank = sheet.optional("time_step_rank", "dt_rank")
    rank = rank if isinstance(rank, int) else -(-size.width // 16)
    _put(sheet, conv=conv, inner=inner, state=state, rank=rank)
    sheet.put(feed_forward_length=0, attention__head_count=0, attention__head_count_kv=0)
    if sheet.optional("model_type") == "falcon_mamba":
        sheet.put(ssm__dt_b_c_rms=True)
    ends(sheet, size, tied=True)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm")
        _first(sheet, size.width, inner, state, rank, conv)
    return "mamba"


def _second(
    sheet: Sheet, width: int, inner: int, state: int, heads: int, groups: int, conv: int
) -> None:
    """The tensors of one Mamba 2 layer."""
    joined = inner + 2 * groups * state
    sheet.matrix("ssm_in", inner + joined + heads, width)
    sheet.plain("ssm_conv1d.weight", conv, joined)
    sheet.plain("ssm_conv1d.bias", joined)
    sheet.plain("ssm_dt.bias", heads)
    sheet.plain("ssm_a", 1, heads)
    sheet.plain("ssm_d", 1, heads)
    sheet.plain("ssm_norm.weight", inner // groups, groups)
    sheet.matrix("ssm_out", width, inner)


def mamba2(sheet: Sheet) -> str:
    size = sizes(sheet)
    heads = sheet.whole("num_heads")
    inner = heads * sheet.whole("head_dim", default=64)
    state = sheet.whole("state_size", "ssm_state_size", default=128)
    groups, conv = sheet.whole("n_groups", default=8), sheet.whole("conv_kernel", default=4)
    _put(sheet, conv=conv, inner=inner, state=state, rank=heads, groups=groups)
    sheet.put(feed_forward_length=0, attention__head_count=0, attention__head_count_kv=0)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        sheet.facts.pop(key, None)
    ends(sheet, size)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm")
        _second(sheet, size.width, inner, state, heads, groups, conv)
    return "mamba2"


def nemotron_h(sheet: Sheet) -> str:
    """Each layer is one thing: a state (M), attention (*), a feed-forward (-) or experts (E)."""
    kinds = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
    pattern = str(sheet.optional("hybrid_override_pattern") or "") or "".join(
        kinds.get(one, "?") for one in sheet.words("layers_block_type")
    )
    sheet.config = {**sheet.config, "num_hidden_layers": len(pattern) or None}
    size = sizes(sheet)
    heads = sheet.whole("mamba_num_heads")
    inner = heads * sheet.whole("mamba_head_dim")
    state, groups = sheet.whole("ssm_state_size"), sheet.whole("n_groups", default=8)
    conv = sheet.whole("conv_kernel", default=4)
    _put(sheet, conv=conv, inner=inner, state=state, rank=heads, groups=groups)
    dense = {"-": size.inner, "E": sheet.whole("moe_intermediate_size", default=0)}
    sheet.put(
        attention__head_count_kv=tuple(size.kv_heads if one == "*" else 0 for one in pattern),
        feed_forward_length=tuple(dense.get(one, 0) for one in pattern),
        attention__key_length=size.head,
        attention__value_length=size.head,
        vocab_size=size.vocab,
    )
    ends(sheet, size)
    found = _nemotron_experts(sheet) if "E" in pattern else None
    latent = sheet.whole("moe_latent_size", default=0)
    for index, kind in enumerate(pattern):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm")
        if kind == "M":
            _second(sheet, size.width, inner, state, heads, groups, conv)
        elif kind == "*":
            attention(sheet, size)
        elif kind == "E" and found is not None:
            _latent_experts(sheet, size.width, latent, found)
        else:
            plain(sheet, size.width, size.inner)
    return "nemotron_h_moe" if found else "nemotron_h"


def _latent_experts(sheet: Sheet, width: int, latent: int, found: Experts) -> None:
    """Routed experts without a gate; `latent`: they work in a narrower space."""
    inner = latent or width
    sheet.matrix("ffn_gate_inp", found.count, width)
    sheet.plain("exp_probs_b.bias", found.count)
    if latent:
        sheet.matrix("ffn_latent_down", latent, width)
        sheet.matrix("ffn_latent_up", width, latent)
    sheet.plain("ffn_up_exps.weight", inner, found.inner, found.count)
    sheet.plain("ffn_down_exps.weight", found.inner, inner, found.count)
    plain(sheet, width, found.shared, suffix="_shexp")


def _nemotron_experts(sheet: Sheet) -> Experts:
    found = Experts(
        count=sheet.whole("n_routed_experts"),
        active=sheet.whole("num_experts_per_tok"),
        inner=sheet.whole("moe_intermediate_size"),
        shared=sheet.whole("moe_shared_expert_intermediate_size", default=0),
        correction=True,
    )
    put_experts(sheet, found)
    sheet.put(
        expert_shared_count=sheet.whole("n_shared_experts", default=1),
        expert_weights_norm=sheet.flag("norm_topk_prob", default=True),
        expert_weights_scale=2.5,
        expert_group_count=sheet.whole("n_group", default=1),
        expert_group_used_count=sheet.whole("topk_group", default=1),
    )
    latent = sheet.whole("moe_latent_size", default=0)
    if latent:
        sheet.put(moe_latent_size=latent)
    return found


def granitehybrid(sheet: Sheet) -> str:
    """Granite 4: Mamba 2 or attention, then a feed-forward or experts."""
    size = sizes(sheet)
    put_granite(sheet)
    types = sheet.words("layer_types", "layers_block_type")
    types = types or ["attention"] * size.layers
    heads = sheet.whole("mamba_n_heads", default=1)
    inner = heads * sheet.whole("mamba_d_head", default=1)
    state, groups = (
        sheet.whole("mamba_d_state", default=128),
        sheet.whole("mamba_n_groups", default=1),
    )
    conv = sheet.whole("mamba_d_conv", default=4)
    if "mamba" in types:
        _put(sheet, conv=conv, inner=inner, state=state, rank=heads, groups=groups)
        sheet.put(
            attention__head_count_kv=tuple(
                size.kv_heads if one == "attention" else 0 for one in types
            )
        )
    ends(sheet, size, tied=True)
    count = sheet.whole("num_local_experts", default=0)
    shared = sheet.whole("shared_intermediate_size", default=0)
    sheet.put(
        feed_forward_length=shared if not count else size.inner,
        rope__scaling__finetuned=sheet.optional("position_embedding_type") == "rope",
    )
    found = Experts(
        count=count,
        active=sheet.whole("num_experts_per_tok", default=0),
        inner=size.inner,
        shared=shared,
    )
    if count:
        put_experts(sheet, found)
    for index, kind in enumerate(types):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        if kind == "mamba":
            _second(sheet, size.width, inner, state, heads, groups, conv)
        else:
            attention(sheet, size)
        if count:
            experts(sheet, size.width, found)
        else:
            gated(sheet, size.width, shared)
    return "granitehybrid" if "mamba" in types else "granite"


def jamba(sheet: Sheet) -> str:
    size = sizes(sheet)
    inner = sheet.whole("mamba_expand", default=2) * size.width
    state, conv = (
        sheet.whole("mamba_d_state", default=16),
        sheet.whole("mamba_d_conv", default=4),
    )
    rank = sheet.optional("mamba_dt_rank")
    rank = rank if isinstance(rank, int) else -(-size.width // 16)
    _put(sheet, conv=conv, inner=inner, state=state, rank=rank)
    period, offset = (
        sheet.whole("attn_layer_period", default=8),
        sheet.whole("attn_layer_offset", default=4),
    )
    every, first = (
        sheet.whole("expert_layer_period", default=2),
        sheet.whole("expert_layer_offset", default=1),
    )
    attends = [index % period == offset for index in range(size.layers)]
    sheet.put(
        attention__head_count_kv=tuple(size.kv_heads if one else 0 for one in attends),
    )
    found = Experts(
        count=sheet.whole("num_experts"),
        active=sheet.whole("num_experts_per_tok"),
        inner=size.inner,
    )
    sheet.put(expert_count=found.count, expert_used_count=found.active)
    ends(sheet, size)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        if attends[index]:
            attention(sheet, size)
        else:
            _first(sheet, size.width, inner, state, rank, conv)
            sheet.vector("ssm_dt_norm", rank)
            sheet.norms(state, "ssm_b_norm", "ssm_c_norm")
        if index % every == first:
            experts(sheet, size.width, found)
        else:
            gated(sheet, size.width, size.inner)
    return "jamba"


def lfm2(sheet: Sheet) -> str:
    """Short convolutions, attention every few layers."""
    size = sizes(sheet)
    inner = sheet.whole("block_ff_dim", "intermediate_size", default=size.inner)
    if sheet.flag("block_auto_adjust_ff_dim", default=True):
        inner = int(2 * inner / 3)
        multiplier = sheet.optional("block_ffn_dim_multiplier")
        if isinstance(multiplier, (int, float)):
            inner = int(multiplier * inner)
        step = sheet.whole("block_multiple_of", default=256)
        inner = step * -(-inner // step)
    window = sheet.whole("conv_L_cache", default=3)
    types = sheet.words("layer_types")
    places = sheet.optional("full_attn_idxs")
    if types:
        attends = [one == "full_attention" for one in types]
    else:
        attends = [index in (places or ()) for index in range(size.layers)]
    sheet.put(
        attention__head_count_kv=tuple(size.kv_heads if one else 0 for one in attends),
        feed_forward_length=inner,
        shortconv__l_cache=window,
    )
    sheet.top()
    sheet.matrix("token_embd", size.vocab, size.width)
    sheet.vector("token_embd_norm", size.width)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        if attends[index]:
            attention(sheet, size, qk_norm=size.head)
        else:
            sheet.plain("shortconv.conv.weight", window, size.width)
            sheet.matrix("shortconv.in_proj", 3 * size.width, size.width)
            sheet.matrix("shortconv.out_proj", size.width, size.width)
        gated(sheet, size.width, inner)
    return "lfm2"


# ------------------------------------------------------------------ gated delta nets


def _delta(sheet: Sheet, size: Sizes, *, joined: bool) -> None:
    """A linear attention layer; `joined`: beta and alpha are one matrix (Qwen3-Next)."""
    key = sheet.whole("linear_key_head_dim") * sheet.whole("linear_num_key_heads")
    heads, head = sheet.whole("linear_num_value_heads"), sheet.whole("linear_value_head_dim")
    value = heads * head
    sheet.matrix("attn_qkv", 2 * key + value, size.width)
    sheet.matrix("attn_gate", value, size.width)
    sheet.plain("ssm_conv1d.weight", sheet.whole("linear_conv_kernel_dim"), 2 * key + value)
    sheet.plain("ssm_dt.bias", heads)
    sheet.plain("ssm_a", heads)
    if joined:
        sheet.matrix("ssm_ba", 2 * heads, size.width)
    else:
        sheet.matrix("ssm_beta", heads, size.width)
        sheet.matrix("ssm_alpha", heads, size.width)
    sheet.vector("ssm_norm", head)
    sheet.matrix("ssm_out", size.width, value)


def _hybrid(sheet: Sheet, *, joined: bool, routed: bool) -> Sizes:
    size = sizes(sheet)
    heads, head = sheet.whole("linear_num_value_heads"), sheet.whole("linear_value_head_dim")
    _put(
        sheet,
        conv=sheet.whole("linear_conv_kernel_dim"),
        inner=heads * head,
        state=sheet.whole("linear_key_head_dim"),
        rank=heads,
        groups=sheet.whole("linear_num_key_heads"),
    )
    interval = sheet.whole("full_attention_interval", default=4)
    sheet.put(
        full_attention_interval=interval,
        attention__key_length=size.head,
        attention__value_length=size.head,
    )
    ends(sheet, size)
    found = None
    if routed:
        found = Experts(
            count=sheet.whole("num_experts"),
            active=sheet.whole("num_experts_per_tok"),
            inner=sheet.whole("moe_intermediate_size"),
            shared=sheet.whole("shared_expert_intermediate_size", default=0),
        )
        put_experts(sheet, found)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "post_attention_norm")
        if (index + 1) % interval:
            _delta(sheet, size, joined=joined)
        else:
            sheet.matrix("attn_q", 2 * size.heads * size.head, size.width)
            sheet.matrix("attn_k", size.kv_heads * size.head, size.width)
            sheet.matrix("attn_v", size.kv_heads * size.head, size.width)
            sheet.matrix("attn_output", size.width, size.heads * size.head)
            sheet.norms(size.head, "attn_q_norm", "attn_k_norm")
        if found is None:
            gated(sheet, size.width, size.inner)
        else:
            experts(sheet, size.width, found)
            sheet.plain("ffn_gate_inp_shexp.weight", size.width)
    return size


def qwen3next(sheet: Sheet) -> str:
    _hybrid(sheet, joined=True, routed=True)
    return "qwen3next"


def qwen35(sheet: Sheet) -> str:
    _hybrid(sheet, joined=False, routed=False)
    sheet.put(rope__dimension_sections=(11, 11, 10, 0))
    return "qwen35"


def qwen35moe(sheet: Sheet) -> str:
    _hybrid(sheet, joined=False, routed=True)
    sheet.put(rope__dimension_sections=(11, 11, 10, 0))
    return "qwen35moe"
