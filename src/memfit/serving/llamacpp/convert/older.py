"""Configs of the GPT-like decoders and of encoders."""

from __future__ import annotations

from memfit.serving.llamacpp.convert.parts import (
    Sizes,
    attention,
    ends,
    fused_attention,
    gated,
    plain,
    sizes,
)
from memfit.serving.llamacpp.convert.sheet import Sheet


def _frame(sheet: Sheet, *, positions: bool, tied: bool = True, second_norm: bool = True) -> Sizes:
    """Fused projections with biases, plain feed-forwards, LayerNorms."""
    size = sizes(sheet)
    ends(sheet, size, tied=tied, norm_bias=True)
    if positions:
        sheet.matrix("position_embd", sheet.whole("n_positions", "n_ctx"), size.width)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", bias=True)
        if second_norm:
            sheet.norms(size.width, "ffn_norm", bias=True)
        fused_attention(sheet, size, bias=True, out_bias=True)
        plain(sheet, size.width, size.inner, bias=True)
    return size


def gpt2(sheet: Sheet) -> str:
    _frame(sheet, positions=True)
    return "gpt2"


def starcoder(sheet: Sheet) -> str:
    if sheet.flag("multi_query", default=True):
        sheet.config = {**sheet.config, "num_key_value_heads": 1}
    _frame(sheet, positions=True)
    return "starcoder"


def gptneox(sheet: Sheet) -> str:
    sheet.put(use_parallel_residual=sheet.flag("use_parallel_residual", default=True))
    _frame(sheet, positions=False, tied=False)
    return "gptneox"


def jais2(sheet: Sheet) -> str:
    """Llama's projections with biases, LayerNorms, and squared ReLUs (conversion/jais.py)."""
    size = sizes(sheet)
    ends(sheet, size, norm_bias=True)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm", bias=True)
        attention(sheet, size, bias=True)
        plain(sheet, size.width, size.inner, bias=True)
    return "jais2"


def bloom(sheet: Sheet) -> str:
    size = _frame(sheet, positions=False)
    sheet.top()
    sheet.vector("token_embd_norm", size.width, bias=True)
    return "bloom"


def mpt(sheet: Sheet) -> str:
    inner = sheet.optional("attn_config") or {}
    kv_heads = inner.get("kv_n_heads") if isinstance(inner, dict) else None
    ratio = sheet.whole("expansion_ratio", default=4)
    sheet.config = {
        **sheet.config,
        "num_key_value_heads": kv_heads or sheet.whole("n_heads"),
        "n_inner": ratio * sheet.whole("d_model"),
    }
    size = sizes(sheet)
    ends(sheet, size, tied=True)
    sheet.put(attention__max_alibi_bias=8.0)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", "ffn_norm")
        fused_attention(sheet, size)
        plain(sheet, size.width, size.inner)
    return "mpt"


def falcon(sheet: Sheet) -> str:
    """The 40B has a norm of its own for the feed-forward, the 7B shares one."""
    new = sheet.flag("new_decoder_architecture")
    if not new:
        kv_heads = (
            1
            if sheet.flag("multi_query", default=True)
            else sheet.whole("n_head", "num_attention_heads")
        )
        sheet.config = {**sheet.config, "num_kv_heads": kv_heads, "num_key_value_heads": None}
    size = sizes(sheet)
    ends(sheet, size, tied=True, norm_bias=True)
    sheet.top()
    sheet.matrix("output", size.vocab, size.width)
    two = new and sheet.whole("num_ln_in_parallel_attn", default=2) == 2
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_norm", bias=True)
        if two:
            sheet.norms(size.width, "attn_norm_2", bias=True)
        fused_attention(sheet, size)
        plain(sheet, size.width, size.inner)
    return "falcon"


def nomic_bert(sheet: Sheet) -> str:
    """BERT with rotary positions, a gated feed-forward and no biases but those of its norms."""
    size = sizes(sheet)
    sheet.put(attention__causal=False, pooling_type=1)
    _embeddings(sheet, size, bias=True)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_output_norm", "layer_output_norm", bias=True)
        fused_attention(sheet, size)
        gated(sheet, size.width, size.inner)
    return "nomic-bert"


def modern_bert(sheet: Sheet) -> str:
    """ModernBERT: windows but for every third layer, feed-forwards that make gate and product as
    one; what follows the last norm is the start of a classifier."""
    size = sizes(sheet)
    sheet.put(
        attention__causal=False,
        attention__sliding_window=sheet.whole("local_attention", default=128),
        attention__sliding_window_pattern=sheet.whole("global_attn_every_n_layers", default=3),
    )
    _embeddings(sheet, size, bias=False)
    sheet.norms(size.width, "output_norm", "cls.norm")
    sheet.matrix("cls", size.width, size.width)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, *(("attn_norm", "ffn_norm") if index else ("ffn_norm",)))
        fused_attention(sheet, size)
        sheet.matrix("ffn_up", 2 * size.inner, size.width)
        sheet.matrix("ffn_down", size.width, size.inner)
    return "modern-bert"


def _embeddings(sheet: Sheet, size: Sizes, *, bias: bool) -> None:
    sheet.top()
    sheet.matrix("token_embd", size.vocab, size.width)
    kinds = sheet.whole("type_vocab_size", default=0)
    if kinds:
        sheet.matrix("token_types", kinds, size.width)
        sheet.facts["tokenizer.ggml.token_type_count"] = kinds
    sheet.vector("token_embd_norm", size.width, bias=bias)


def bert(sheet: Sheet) -> str:
    """Encoders: no output matrix; norms after attention and feed-forward."""
    if sheet.optional("dim") is not None and sheet.optional("hidden_dim") is not None:
        sheet.config = {
            **sheet.config,
            "intermediate_size": sheet.optional("hidden_dim"),
            "type_vocab_size": 0,
        }  # distilbert's own names
    size = sizes(sheet)
    sheet.put(attention__causal=False, pooling_type=1)
    _embeddings(sheet, size, bias=True)
    sheet.matrix("position_embd", sheet.whole("max_position_embeddings"), size.width)
    for index in range(size.layers):
        sheet.layer(index)
        sheet.norms(size.width, "attn_output_norm", "layer_output_norm", bias=True)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            sheet.matrix(name, size.width, size.width, bias=True)
        plain(sheet, size.width, size.inner, bias=True)
    return "bert"
