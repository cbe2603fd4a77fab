"""Configs whose layers differ from each other: searched ones, and mixtures of attention."""

from __future__ import annotations

from memfit.errors import Problem
from memfit.serving.llamacpp.convert.parts import attention, ends, gated, sizes
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
