"""T5's configs: an encoder and a decoder, whose layers have names of their own."""

from __future__ import annotations

from memfit.serving.llamacpp.convert.parts import Sizes, gated, plain, sizes
from memfit.serving.llamacpp.convert.sheet import Sheet


def t5(sheet: Sheet) -> str:
    """conversion/t5.py of llama.cpp: one table for both halves, position biases in the first layer
    of each."""
    sheet.config = {"n_positions": 512, **sheet.config, "head_dim": sheet.optional("d_kv")}
    size = sizes(sheet)
    decoders = sheet.whole("num_decoder_layers", default=size.layers)
    sheet.put(
        decoder_block_count=decoders,
        decoder_start_token_id=sheet.whole("decoder_start_token_id", default=0),
        attention__key_length=size.head,
        attention__value_length=size.head,
        attention__relative_buckets_count=sheet.whole("relative_attention_num_buckets", default=32),
    )
    sheet.top()
    sheet.matrix("token_embd", size.vocab, size.width)
    sheet.norms(size.width, "enc.output_norm", "dec.output_norm")
    if not sheet.flag("tie_word_embeddings", default=True):
        sheet.matrix("output", size.vocab, size.width)
    for index in range(size.layers):
        sheet.prefix = f"enc.blk.{index}."
        _layer(sheet, size, "attn")
        _biases(sheet, size, index)
    for index in range(decoders):
        sheet.prefix = f"dec.blk.{index}."
        _layer(sheet, size, "attn", "cross_attn")
        _biases(sheet, size, index)
    return "t5"


def _layer(sheet: Sheet, size: Sizes, *mixers: str) -> None:
    rows = size.heads * size.head
    for mixer in mixers:
        sheet.norms(size.width, f"{mixer}_norm")
        for name in ("q", "k", "v"):
            sheet.matrix(f"{mixer}_{name}", rows, size.width)
        sheet.matrix(f"{mixer}_o", size.width, rows)
    sheet.norms(size.width, "ffn_norm")
    is_gated = str(sheet.optional("feed_forward_proj") or "relu").startswith("gated")
    (gated if is_gated else plain)(sheet, size.width, size.inner)


def _biases(sheet: Sheet, size: Sizes, index: int) -> None:
    if index == 0:
        buckets = sheet.whole("relative_attention_num_buckets", default=32)
        sheet.plain("attn_rel_b.weight", size.heads, buckets)
