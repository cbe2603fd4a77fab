"""Attention that reads only the tokens which an indexer chose (DeepSeek-V3.2, GLM-5).

Read from src/models/deepseek32.cpp, glm-dsa.cpp and build_attn_inp_k_dsa of src/llama-graph.cpp,
and from the graphs that llama.cpp b11549 prints. Its fused `lightning_indexer` runs on CPUs, CUDA
and Metal.
"""

from __future__ import annotations

from memfit.serving.llamacpp import ggml
from memfit.serving.llamacpp.builder import Builder
from memfit.serving.llamacpp.ggml import F16, F32, I32, Tensor


def chosen_tokens(b: Builder, layer: int, x: Tensor, q_latent: Tensor) -> Tensor:
    """Which cached tokens each new token reads; a layer without an indexer reads those of the
    layer before it."""
    model, p, n = b.model, f"blk.{layer}.", b.n
    if b.weight(f"{p}indexer.proj.weight") is None and "chosen" in b.shared:
        return b.shared["chosen"]
    head = model.number("attention.indexer.key_length")
    heads = model.number("attention.indexer.head_count")
    turn = b.shared.setdefault("rotation", ggml.given((head, head), F32))
    cache = b.index_cache(layer, head)
    key = b.norm(b.linear(f"{p}indexer.attn_k", x), f"{p}indexer.k_norm", "norm")
    key = ggml.matmul(turn, b.rope(ggml.reshape(key, head, 1, n)))
    b.store(key, cache, head, "index", slides=False, turned=False)
    query = b.rope(ggml.reshape(b.linear(f"{p}indexer.attn_q_b", q_latent), head, heads, n))
    query = b.by_stream(ggml.matmul(turn, query))
    weights = b.linear(f"{p}indexer.proj", x)
    each = (heads, n // b.streams, 1, b.streams)
    weights = ggml.same("scale", ggml.view(weights, each, weights.nb[1:3]))
    sizes = (b.cells, n // b.streams, 1, b.streams)
    mask = b.shared.setdefault("index mask", ggml.given(sizes, F16))
    scores = ggml.as_float("lightning_indexer", sizes, query, cache, weights, mask)
    count = min(b.cells, model.number("attention.indexer.top_k"))
    best = Tensor("top_k", (count, *scores.ne[1:]), I32, (scores,))
    b.shared["chosen"] = ggml.contiguous(best)
    return b.shared["chosen"]


def only(b: Builder, chosen: Tensor, mask: Tensor) -> Tensor:
    """The mask that leaves the chosen tokens: zeros written into a mask that hides all. Each layer
    has its own buffer for the zeros, which is there from the start."""
    count, tokens, _, streams = chosen.ne
    zeros = ggml.same("fill", Tensor("none", (1, count, tokens, streams)))
    hidden = ggml.same("fill", mask)
    ids = ggml.view(chosen, (count, tokens, streams), chosen.nb[1:3])
    shown = ggml.into(zeros, ids, ggml.reshape(hidden, 1, b.cells, tokens, streams))
    return ggml.same("add", ggml.reshape(shown, *mask.ne), mask)
