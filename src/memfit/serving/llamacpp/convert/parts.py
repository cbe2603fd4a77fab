"""What most architectures share: the frame, attention, dense and routed feed-forwards."""

from __future__ import annotations

from memfit.lazy_dataclass import dataclass
from memfit.serving.llamacpp.convert.sheet import Sheet


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers that nearly every config states."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocab: int


def sizes(sheet: Sheet) -> Sizes:
    """Reads them, and writes them as metadata."""
    layers = sheet.whole("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    width = sheet.whole("hidden_size", "n_embd", "d_model", "dim")
    heads = sheet.whole("num_attention_heads", "n_head", "n_heads", "num_heads", default=0)
    kv_heads = sheet.whole(
        "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", default=heads
    )
    head = sheet.whole("head_dim", "attention_head_dim", "kv_channels", default=0)
    head = head or (width // heads if heads else 0)
    inner = sheet.whole(
        "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", default=4 * width
    )
    vocab = sheet.whole("vocab_size", "padded_vocab_size")
    positions = sheet.whole(
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "model_max_length",
        "n_ctx",
        "max_sequence_length",
        default=2048,
    )
    sheet.put(
        block_count=layers,
        context_length=positions,
        embedding_length=width,
        feed_forward_length=inner,
        attention__head_count=heads,
        attention__head_count_kv=kv_heads,
        attention__layer_norm_rms_epsilon=1e-5,
        attention__layer_norm_epsilon=1e-5,
        vocab_size=vocab,
    )
    if heads and head != width // heads:
        sheet.put(attention__key_length=head, attention__value_length=head)
    if head:
        sheet.put(rope__dimension_count=rotated(sheet, head))
    sheet.done()
    return Sizes(
        layers=layers,
        width=width,
        inner=inner,
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        vocab=vocab,
    )


def rotated(sheet: Sheet, head: int) -> int:
    """Values of a head that are rotated."""
    share = sheet.rope().get("partial_rotary_factor")
    if share is None:
        share = sheet.optional("partial_rotary_factor", "rotary_pct")
    if isinstance(share, (int, float)) and 0 < share < 1:
        return int(head * share)
    return head


def ends(
    sheet: Sheet, size: Sizes, *, tied: bool = False, norm_bias: bool = False, bias: bool = False
) -> None:
    """The embedding table, the last norm and the output matrix where it is not the table again."""
    sheet.top()
    sheet.matrix("token_embd", size.vocab, size.width)
    sheet.vector("output_norm", size.width, bias=norm_bias)
    if not sheet.flag("tie_word_embeddings", default=tied):
        sheet.matrix("output", size.vocab, size.width, bias=bias)
    elif bias:
        sheet.plain("output.bias", size.vocab)


def attention(
    sheet: Sheet,
    size: Sizes,
    *,
    bias: bool = False,
    out_bias: bool | None = None,
    qk_norm: int = 0,
    kv_heads: int | None = None,
    heads: int | None = None,
) -> None:
    """Four matrices; `qk_norm` values of norm on queries and keys."""
    heads = size.heads if heads is None else heads
    kv_heads = size.kv_heads if kv_heads is None else kv_heads
    sheet.matrix("attn_q", heads * size.head, size.width, bias=bias)
    sheet.matrix("attn_k", kv_heads * size.head, size.width, bias=bias)
    sheet.matrix("attn_v", kv_heads * size.head, size.width, bias=bias)
    sheet.matrix(
        "attn_output", size.width, heads * size.head, bias=bias if out_bias is None else out_bias
    )
    if qk_norm:
        sheet.norms(qk_norm, "attn_q_norm", "attn_k_norm")


def fused_attention(
    sheet: Sheet, size: Sizes, *, bias: bool = False, out_bias: bool = False
) -> None:
    rows = (size.heads + 2 * size.kv_heads) * size.head
    sheet.matrix("attn_qkv", rows, size.width, bias=bias)
    sheet.matrix("attn_output", size.width, size.heads * size.head, bias=out_bias)


def gated(sheet: Sheet, width: int, inner: int, *, bias: bool = False, suffix: str = "") -> None:
    sheet.matrix(f"ffn_gate{suffix}", inner, width, bias=bias)
    sheet.matrix(f"ffn_up{suffix}", inner, width, bias=bias)
    sheet.matrix(f"ffn_down{suffix}", width, inner, bias=bias)


def plain(sheet: Sheet, width: int, inner: int, *, bias: bool = False, suffix: str = "") -> None:
    sheet.matrix(f"ffn_up{suffix}", inner, width, bias=bias)
    sheet.matrix(f"ffn_down{suffix}", width, inner, bias=bias)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Routed experts and what runs beside them."""

    count: int
    active: int
    inner: int
    shared: int = 0  # width of what every token passes
    correction: bool = False


def experts(sheet: Sheet, width: int, found: Experts, *, gate: bool = True) -> None:
    """Stacked matrices of all experts, the router, and the shared expert."""
    count, inner = found.count, found.inner
    sheet.matrix("ffn_gate_inp", count, width)
    if gate:
        sheet.plain("ffn_gate_exps.weight", width, inner, count)
    sheet.plain("ffn_up_exps.weight", width, inner, count)
    sheet.plain("ffn_down_exps.weight", inner, width, count)
    if found.correction:
        sheet.plain("exp_probs_b.bias", count)
    if found.shared:
        (gated if gate else plain)(sheet, width, found.shared, suffix="_shexp")


def put_experts(sheet: Sheet, found: Experts) -> None:
    sheet.put(
        expert_count=found.count,
        expert_used_count=found.active,
        expert_feed_forward_length=found.inner,
    )
    if found.shared:
        sheet.put(expert_shared_feed_forward_length=found.shared)


def read_experts(sheet: Sheet, *, shared: int = 0, correction: bool = False) -> Experts:
    found = Experts(
        count=sheet.whole(
            "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"
        ),
        active=sheet.whole(
            "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"
        ),
        inner=sheet.whole("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
        shared=shared,
        correction=correction,
    )
    put_experts(sheet, found)
    return found
