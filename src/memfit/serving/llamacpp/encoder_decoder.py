"""T5's decoder, whose graph llama.cpp reserves at the start; its encoder runs in the same buffer.

Read from src/models/t5.cpp, build_inp_cross_embd and build_pos_bias of src/llama-graph.cpp, and
from the graphs that llama.cpp b11549 prints.
"""

from __future__ import annotations

from memfit.serving.llamacpp import ggml
from memfit.serving.llamacpp.builder import Builder, Heads
from memfit.serving.llamacpp.ggml import I32, Tensor


def decoder(b: Builder) -> None:
    """Attention with position biases, attention over what the encoder made, feed-forward. The
    graph assumes as many encoded tokens as the model was trained for, and logits of all tokens."""
    model = b.model
    x = b.embedded()
    encoded = ggml.given((model.width, model.number("context_length")))
    buckets = ggml.given((b.cells, b.n), I32)
    for layer in b.order:
        p = f"dec.blk.{layer}."
        q, k, v = _projections(b, f"{p}attn", b.norm(x, f"{p}attn_norm"))
        head, heads = model.head(layer), model.heads(layer)
        made = b.attention(layer, Heads(k=head, v=head, kv=heads, bias=_bias(b, buckets)), q, k, v)
        x = ggml.same("add", b.linear(f"{p}attn_o", made), x)
        normed = b.norm(x, f"{p}cross_attn_norm")
        q, k, v = _projections(b, f"{p}cross_attn", normed, encoded)
        made = b.linear(f"{p}cross_attn_o", b.attention_within(q, k, v))
        if layer == b.order[-1]:
            made, x = b.chosen(made, x)
        x = ggml.same("add", made, x)
        x = ggml.same("add", b.ffn(p, b.norm(x, f"{p}ffn_norm")), x)
    b.expand(b.finish(x, "dec.output_norm"))


def _projections(
    b: Builder, name: str, x: Tensor, source: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of x, keys and values of `source`, or of x as well."""
    head, heads = b.model.head(), b.model.heads()
    source = x if source is None else source
    made = [b.linear(f"{name}_{one}", of) for one, of in (("q", x), ("k", source), ("v", source))]
    q, k, v = (ggml.reshape(one, head, heads, one.ne[1]) for one in made)
    return q, k, v


def _bias(b: Builder, buckets: Tensor) -> Tensor:
    """The first layer's bias of each pair of tokens and head; every layer looks it up anew."""
    table = b.needed("dec.blk.0.attn_rel_b.weight")
    cells, n = buckets.ne[:2]
    found = ggml.rows(table, ggml.reshape(buckets, cells * n))
    found = ggml.reshape(found, table.ne[0], cells, n)
    return ggml.contiguous(ggml.permute(found, 2, 0, 1, 3))
