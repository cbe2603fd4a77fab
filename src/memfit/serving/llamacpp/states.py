"""Layers with a recurrent state: Mamba, short convolutions and gated delta nets.

Read from src/models/mamba-base.cpp, lfm2.cpp, delta-net-base.cpp, qwen35.cpp, nemotron-h.cpp
(llama.cpp b11549, b7437) and from the graphs that b11549 prints.
"""

from __future__ import annotations

from collections.abc import Callable

from memfit.serving.llamacpp import ggml
from memfit.serving.llamacpp.builder import Builder, Heads
from memfit.serving.llamacpp.caches import state_values
from memfit.serving.llamacpp.ggml import F32, I32, Tensor


def state(
    b: Builder, layer: int, values: int, read: Callable[[Tensor, Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """(what is read of a layer's states, the cache): the states of this batch's sequences, after
    one of them has been cleared."""
    users = b.settings.parallel
    home = b.places.caches[layer]
    cache = ggml.outside((values * users,), F32, home, weight=False)
    table = ggml.reshape(cache, values, users)
    cleared = ggml.view(table, (values,))
    b.expand(ggml.in_place("scale", cleared))
    if b.state_ids is None:
        ids = ggml.given((users,), I32)
        b.state_ids = (ggml.view(ids, (users,)), ggml.view(ids, (0,), (), 4 * users))
    main, extra = b.state_ids
    found = read(table, main) if read is not None else ggml.rows(table, main)
    b.expand(found)
    b.expand(ggml.copied(ggml.rows(table, extra), ggml.view(cache, (0,))))
    return found, cache


def convolved(b: Builder, layer: int, x: Tensor, name: str) -> Tensor:
    """A causal convolution over (tokens, channels, sequences) that keeps its last columns."""
    users, channels = b.settings.parallel, x.ne[1]
    window = b.needed(f"blk.{layer}.{name}.weight").ne[0]
    past = b.opened_states.pop(layer)
    past = ggml.reshape(past, window - 1, channels, users)
    joined = ggml.as_float("concat", (window - 1 + x.ne[0], channels, users), past, x)
    last = ggml.view(joined, (window - 1, channels, users), joined.nb[1:3], x.ne[0] * 4)
    target = ggml.view(b.open_caches.pop(layer), ((window - 1) * channels * users,))
    b.expand(ggml.copied(last, target))
    weight = b.needed(f"blk.{layer}.{name}.weight")
    return ggml.as_float("ssm_conv", (channels, x.ne[0], users), joined, weight)


def open_convolution(b: Builder, layer: int) -> None:
    """Reads the columns that the convolution kept; it comes before the rest of the layer."""
    conv, _ = state_values(b.model)
    b.opened_states[layer], b.open_caches[layer] = state(b, layer, conv)


def _scan(b: Builder, layer: int, x: Tensor, dt: Tensor, parts: tuple[Tensor, Tensor]) -> Tensor:
    """The selective scan: outputs and new states in one tensor; the states go to the cache."""
    model, users = b.model, b.settings.parallel
    inner, size = model.number("ssm.inner_size"), model.number("ssm.state_size")
    a = b.needed(f"blk.{layer}.ssm_a")

    def read(table: Tensor, ids: Tensor) -> Tensor:
        states = ggml.reshape(table, size, x.ne[0], x.ne[1], users)
        count = x.count + size * inner * users
        return ggml.as_float("ssm_scan", (count,), states, x, dt, a, *parts, ids)

    scanned, cache = state(b, layer, size * inner, read)
    new = ggml.view(scanned, (size * inner * users,), (), x.count * 4)
    b.expand(ggml.copied(new, ggml.view(cache, (size * inner * users,))))
    return scanned


def mamba(b: Builder, layer: int, x: Tensor) -> Tensor:
    """Mamba's first layer: a scan with a state for each channel."""
    model, users, p = b.model, b.settings.parallel, f"blk.{layer}."
    inner, size = model.number("ssm.inner_size"), model.number("ssm.state_size")
    rank, n = model.number("ssm.time_step_rank"), b.n // b.settings.parallel
    open_convolution(b, layer)
    both = b.linear(f"{p}ssm_in", ggml.reshape(x, model.width, n, users))
    x = ggml.view(both, (inner, n, users), both.nb[1:3])
    z = ggml.view(both, (inner, n, users), both.nb[1:3], inner * 4)
    x = convolved(b, layer, ggml.transpose(x), "ssm_conv1d")
    x = ggml.same("unary", ggml.same("add", x, b.needed(f"{p}ssm_conv1d.bias")))
    mixed = ggml.matmul(b.needed(f"{p}ssm_x.weight"), x)
    dt = ggml.view(mixed, (rank, n, users), mixed.nb[1:3])
    step = (size * 4, mixed.nb[1], mixed.nb[2])
    first = ggml.view(mixed, (size, 1, n, users), step, rank * 4)
    second = ggml.view(mixed, (size, 1, n, users), step, (rank + size) * 4)
    if model.facts.get("ssm.dt_b_c_rms") or b.weight(f"{p}ssm_dt_norm.weight") is not None:
        dt = b.norm(dt, f"{p}ssm_dt_norm")
        first = b.norm(first, f"{p}ssm_b_norm")
        second = b.norm(second, f"{p}ssm_c_norm")
    elif b.settings.build >= CONTIGUOUS_STEPS:
        dt = ggml.contiguous(dt)
    dt = b.linear(f"{p}ssm_dt", dt)
    heads = ggml.reshape(x, 1, inner, n, users)
    scanned = _scan(b, layer, heads, dt, (first, second))
    y = ggml.view(scanned, (inner, n, users), (heads.nb[2], heads.nb[3]))
    y = ggml.same("add", y, ggml.same("mul", x, b.needed(f"{p}ssm_d")))
    y = ggml.same("glu", ggml.contiguous(z), y)
    made = ggml.matmul(b.needed(f"{p}ssm_out.weight"), y)
    return ggml.reshape(made, model.width, b.n)


CONTIGUOUS_STEPS = 8000  # found in b11549, absent in b7437


def mamba2(b: Builder, layer: int, x: Tensor) -> Tensor:
    """Mamba 2: heads share a state's decay; a grouped norm at the end."""
    model, users, p = b.model, b.settings.parallel, f"blk.{layer}."
    inner, size = model.number("ssm.inner_size"), model.number("ssm.state_size")
    heads, groups = model.number("ssm.time_step_rank"), model.number("ssm.group_count")
    head, n = inner // heads, b.n // b.settings.parallel
    open_convolution(b, layer)
    joined = inner + 2 * groups * size
    mixed = b.linear(f"{p}ssm_in", x)
    mixed = ggml.reshape(mixed, mixed.ne[0], n, users)
    z = ggml.view(mixed, (head, heads, n, users), (head * 4, mixed.nb[1], mixed.nb[2]))
    inside = ggml.view(mixed, (joined, n, users), mixed.nb[1:3], inner * 4)
    dt = ggml.view(mixed, (heads, n, users), mixed.nb[1:3], (inner + joined) * 4)
    y = convolved(b, layer, ggml.transpose(inside), "ssm_conv1d")
    y = ggml.same("unary", ggml.same("add", y, b.needed(f"{p}ssm_conv1d.bias")))
    x = ggml.view(y, (head, heads, n, users), (head * 4, y.nb[1], y.nb[2]))
    step, each = (size * 4, y.nb[1], y.nb[2]), groups * size * 4
    first = ggml.view(y, (size, groups, n, users), step, inner * 4)
    second = ggml.view(y, (size, groups, n, users), step, inner * 4 + each)
    dt = ggml.same("add", ggml.contiguous(dt), b.needed(f"{p}ssm_dt.bias"))
    scanned = _scan(b, layer, x, dt, (first, second))
    row = inner * 4
    y = ggml.view(scanned, (head, heads, n, users), (head * 4, row, row * n))
    y = ggml.same("add", y, ggml.same("mul", x, b.needed(f"{p}ssm_d")))
    y = ggml.same("glu", ggml.contiguous(z), y)
    if b.weight(f"{p}ssm_norm.weight") is not None:
        y = ggml.reshape(y, inner // groups, groups, n, users)
        y = b.norm(y, f"{p}ssm_norm")
    made = ggml.matmul(b.needed(f"{p}ssm_out.weight"), ggml.reshape(y, inner, n, users))
    return ggml.reshape(made, model.width, b.n)


def short_convolution(b: Builder, layer: int, x: Tensor) -> Tensor:
    """LFM2: two gates around a convolution of a few tokens."""
    model, users, p = b.model, b.settings.parallel, f"blk.{layer}."
    width, n = model.width, b.n // b.settings.parallel
    open_convolution(b, layer)
    mixed = b.linear(f"{p}shortconv.in_proj", ggml.reshape(x, width, n, users))
    parts = [
        ggml.view(mixed, (width, n, users), mixed.nb[1:3], part * width * 4) for part in range(3)
    ]
    gated = ggml.transpose(ggml.same("mul", parts[0], parts[2]))
    made = convolved(b, layer, gated, "shortconv.conv")
    made = b.linear(f"{p}shortconv.out_proj", ggml.same("mul", parts[1], made))
    return ggml.reshape(made, width, b.n)


def delta_net(b: Builder, layer: int, x: Tensor) -> Tensor:
    """A gated delta net (Qwen3-Next, Qwen3.5) as one fused operation."""
    model, users, p = b.model, b.settings.parallel, f"blk.{layer}."
    size, value_heads = model.number("ssm.state_size"), model.number("ssm.time_step_rank")
    key_heads, inner = model.number("ssm.group_count"), model.number("ssm.inner_size")
    head, n = inner // value_heads, b.n // b.settings.parallel
    b.expand(x)
    open_convolution(b, layer)
    mixed = b.linear(f"{p}attn_qkv", x)
    mixed = ggml.reshape(mixed, mixed.ne[0], n, users)
    y = convolved(b, layer, ggml.transpose(mixed), "ssm_conv1d")
    past, cache = state(b, layer, size * inner)
    past = ggml.reshape(past, head, head, value_heads, users)
    y = ggml.same("unary", y)
    keys = key_heads * size * 4
    row, batch = y.nb[1], y.nb[2]
    shape = (size, key_heads, n, users)
    q = ggml.view(y, shape, (size * 4, row, batch))
    k = ggml.view(y, shape, (size * 4, row, batch), keys)
    v = ggml.view(y, (head, value_heads, n, users), (head * 4, row, batch), 2 * keys)
    q, k = _length(q), _length(k)
    if b.weight(f"{p}ssm_ba.weight") is not None and key_heads != value_heads:
        q, k = _repeated(q, value_heads), _repeated(k, value_heads)
    gate, beta = _gates(b, layer, x, value_heads, n, users)
    count = (inner, n * users + head * users)
    made = ggml.as_float("gated_delta_net", count, q, k, v, gate, beta, past)
    new = ggml.view(made, (head * head * value_heads * users,), (), inner * n * users * 4)
    b.expand(ggml.copied(new, ggml.view(cache, (head * head * value_heads * users,))))
    out = ggml.view(made, (head, value_heads, n, users), (head * 4, inner * 4, inner * n * 4))
    out = b.norm(out, f"{p}ssm_norm")
    z = b.linear(f"{p}attn_gate", x)
    z = ggml.same("unary", ggml.reshape(z, head, value_heads, n, users))
    out = ggml.reshape(ggml.same("mul", out, z), inner, n, users)
    return ggml.reshape(b.linear(f"{p}ssm_out", out), model.width, b.n)


def _length(x: Tensor) -> Tensor:
    """A vector of unit length: a norm and a scale."""
    return ggml.same("scale", ggml.same("rms_norm", x))


def _repeated(x: Tensor, heads: int) -> Tensor:
    """A key head for each value head."""
    size, groups, n, users = x.ne
    wide = ggml.as_float(
        "repeat",
        (size, heads // groups, groups, n * users),
        ggml.reshape(x, size, 1, groups, n * users),
    )
    return ggml.reshape(wide, size, heads, n, users)


def _gates(
    b: Builder, layer: int, x: Tensor, heads: int, n: int, users: int
) -> tuple[Tensor, Tensor]:
    """Decay and strength of each head's update."""
    p = f"blk.{layer}."
    if b.weight(f"{p}ssm_ba.weight") is not None:
        both = b.linear(f"{p}ssm_ba", x)
        groups = b.model.number("ssm.group_count")
        each = heads // groups
        both = ggml.reshape(both, 2 * each, groups, n, users)
        shape = (each, groups, n, users)
        beta = ggml.contiguous(ggml.view(both, shape, both.nb[1:4]), heads, n, users)
        alpha = ggml.contiguous(ggml.view(both, shape, both.nb[1:4], each * 4), heads, n, users)
    else:
        alpha = ggml.reshape(b.linear(f"{p}ssm_alpha", x), heads, n, users)
        beta = ggml.reshape(b.linear(f"{p}ssm_beta", x), 1, heads, n, users)
    gate = ggml.same("unary", ggml.same("add", alpha, b.needed(f"{p}ssm_dt.bias")))
    gate = ggml.same("mul", gate, b.needed(f"{p}ssm_a"))
    beta = ggml.same("unary", beta)
    return ggml.reshape(gate, 1, heads, n, users), ggml.reshape(beta, 1, heads, n, users)


def gated_attention(b: Builder, layer: int, x: Tensor) -> Tensor:
    """Attention whose output is multiplied by a gate that comes with the queries."""
    model, p = b.model, f"blk.{layer}."
    head, heads, kv_heads = model.head(layer), model.heads(layer), model.kv_heads(layer)
    both = b.linear(f"{p}attn_q", x)
    strides = (2 * head * 4, both.nb[1])
    q = b.rope(b.norm(ggml.view(both, (head, heads, b.n), strides), f"{p}attn_q_norm"))
    k = ggml.reshape(b.linear(f"{p}attn_k", x), head, kv_heads, b.n)
    v = ggml.reshape(b.linear(f"{p}attn_v", x), head, kv_heads, b.n)
    k = b.rope(b.norm(k, f"{p}attn_k_norm"))
    made = b.attention(layer, Heads(k=head, v=head, kv=kv_heads), q, k, v)
    gate = ggml.contiguous(
        ggml.view(both, (head, heads, b.n), strides, head * 4), head * heads, b.n
    )
    return b.linear(f"{p}attn_output", ggml.same("mul", made, ggml.same("unary", gate)))
