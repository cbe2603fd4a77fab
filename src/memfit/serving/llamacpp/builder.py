"""The pieces that graphs of llama.cpp are made of: norms, feed-forwards, experts, attention with
its cache.

What a graph holds follows src/llama-graph.cpp and src/models/ (llama.cpp b11549, read also at
b7437); tests compare the allocator's result with llama.cpp itself.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import field

from memfit.errors import SourceError
from memfit.lazy_dataclass import dataclass
from memfit.model.sources.ggml import GGML_TYPES
from memfit.serving.llamacpp import ggml
from memfit.serving.llamacpp.ggml import F16, F32, I32, I64, Graph, Kind, Tensor
from memfit.serving.llamacpp.model import GgufModel, layer_of
from memfit.serving.llamacpp.settings import (
    BOTH_INPUTS,
    HALF_MASK,
    MIXED_INPUTS,
    ONE_PRODUCT,
    Settings,
)

KINDS: Mapping[str, Kind] = {
    **{row.name.lower(): Kind(row.block, row.block_bytes) for row in GGML_TYPES.values()},
    "f16": F16,
    "f32": F32,
    "bf16": Kind(1, 2),
    # caches of TurboQuant forks: ggml-common.h block_turbo3_0 and block_turbo4_0, which have one
    # scale of 16 bits and 3 or 4 bits for each of 32 values
    "turbo3": Kind(32, 14),
    "turbo4": Kind(32, 18),
}


SUMS_EARLY = 8000  # the experts' sum comes before what runs beside them; absent in b7437
SET_ROWS = 6070  # pull request 14959, August 2025: the cache is written by row numbers


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The shape of one attention: values of a key and of a value, and how many heads are cached.
    `after` turns what is read into heads again; `v_in_k`: values are a part of the keys; `masked`
    hides more than the mask does; `bias` is added to the scores."""

    k: int
    v: int
    kv: int
    slides: bool = False
    softcap: bool = False
    v_in_k: bool = False
    after: Callable[[Tensor], Tensor] | None = None
    masked: Callable[[Tensor], Tensor] | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where things lie: a device for each tensor and for each layer's cache. `key`: what decided
    it, under which a model remembers what follows from it."""

    tensors: Mapping[str, str]
    layers: tuple[str, ...]
    caches: tuple[str, ...]
    output: str
    cpu: str = "CPU"
    key: Hashable = field(default_factory=object, compare=False)


class Builder:
    """A graph under construction, for `n` tokens. `order`: the layers that it has."""

    def __init__(
        self, model: GgufModel, settings: Settings, places: Places, window: int, order: list[int]
    ) -> None:
        self.model, self.settings, self.places, self.order = model, settings, places, order
        self.graph = Graph()
        self.n = settings.tokens
        self.streams = settings.streams
        self.cells, self.window_cells = settings.cells, window
        self.full = settings.gpu_layers > model.number("block_count")
        self.kept: list[Tensor] = []
        self.fixed: dict[int, str] = {}
        self._weights: dict[str, Tensor] = {}
        self._masks: dict[bool, Tensor] = {}
        self._ids: dict[tuple[str, bool], Tensor] = {}
        self.own_masks: dict[bool, Tensor] = {}
        self.state_ids: tuple[Tensor, Tensor] | None = None
        self.shared: dict[str, Tensor] = {}  # what several layers read, by what it is
        self.opened_states: dict[int, Tensor] = {}
        self.open_caches: dict[int, Tensor] = {}
        kinds = 4 if "rope.dimension_sections" in model.facts else 1  # of positions of a token
        self.positions = ggml.given((kinds * self.n,), I32)
        self.out_ids = ggml.given((settings.outputs,), I32)
        self.expand = self.graph.expand

    # -------------------------------------------------------- weights

    def weight(self, name: str) -> Tensor | None:
        found = self._weights.get(name)
        if found is None:
            stored = self.model.by_name.get(name)
            if stored is None:
                return None
            kind = Kind(stored.type.block, stored.type.block_bytes)
            home = self.places.tensors.get(name, self.places.cpu)
            found = ggml.outside(stored.sizes, kind, home, weight=True)
            found.name = name
            self._weights[name] = found
        return found

    def needed(self, name: str) -> Tensor:
        found = self.weight(name)
        if found is None:
            raise SourceError.one(
                f"the model has no tensor `{name}`, which llama.cpp's `{self.model.arch}` needs",
                where="model",
                hint="download it again, or convert it anew",
            )
        return found

    def linear(self, name: str, x: Tensor) -> Tensor:
        """x times a weight, with its bias where there is one."""
        made = ggml.matmul(self.needed(f"{name}.weight"), x)
        bias = self.weight(f"{name}.bias")
        return made if bias is None else ggml.same("add", made, bias)

    def norm(self, x: Tensor, name: str | None, kind: str = "rms_norm") -> Tensor:
        x = ggml.same(kind, x)
        if name is None:
            return x
        if self.full and (layer := layer_of(name)) >= 0:
            # else it would run where the layer before lies (llama-context.cpp `graph_get_cb`)
            self.fixed[id(x)] = self.places.layers[layer]
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        if weight is not None:
            x = ggml.same("mul", x, weight)
        return x if bias is None else ggml.same("add", x, bias)

    # -------------------------------------------------------- the ends

    def embedded(self) -> Tensor:
        """Rows of the embedding table; newer builds keep room for embeddings given instead."""
        table = self.needed("token_embd.weight")
        width = self.model.width
        tokens = ggml.rows(table, ggml.given((self.n,), I32))
        self.expand(tokens)
        if self.settings.build >= BOTH_INPUTS:
            self.graph.leafs.append(ggml.given((width, self.n)))
        if self.settings.build >= MIXED_INPUTS:
            text = ggml.rows(table, ggml.given((self.n,), I32))
            other = ggml.same("dup", ggml.given((width, self.n)))
            self.expand(ggml.into(text, ggml.given((self.n,), I64), other))
        return tokens

    def finish(self, x: Tensor, norm: str | None, kind: str = "rms_norm") -> Tensor:
        if norm is not None:
            x = self.norm(x, norm, kind)
        head = self.weight("output.weight")
        if head is None:
            head = ggml.outside(
                self.model.by_name["token_embd.weight"].sizes,
                self.needed("token_embd.weight").kind,
                self.places.output,
                weight=True,
            )
        made = ggml.matmul(head, x)
        bias = self.weight("output.bias")
        return made if bias is None else ggml.same("add", made, bias)

    def chosen(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Of each, the rows that give logits."""
        return tuple(ggml.rows(value, self.out_ids) for value in values)

    # -------------------------------------------------------- feed-forward

    def ffn(self, prefix: str, x: Tensor, act: str = "silu", suffix: str = "") -> Tensor:
        """down(act(gate(x)) · up(x)), or down(act(up(x))); `act` on a fused `up` halves it."""
        up = self.linear(f"{prefix}ffn_up{suffix}", x)
        gated = self.weight(f"{prefix}ffn_gate{suffix}.weight") is not None
        if gated:
            gate = self.linear(f"{prefix}ffn_gate{suffix}", x)
            hidden = self.glu(gate, up)
        elif act == "fused" and self.settings.build < ONE_PRODUCT:
            hidden = self.glu(*(ggml.contiguous(half) for half in _halves(up)))
        elif act == "fused":
            hidden = ggml.as_float("glu", (up.ne[0] // 2, *up.ne[1:]), up)
        else:
            hidden = ggml.same("unary", up)
            if act == "relu_sqr":
                hidden = ggml.same("sqr", hidden)
        return self.linear(f"{prefix}ffn_down{suffix}", hidden)

    def glu(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.settings.build < ONE_PRODUCT:
            return ggml.same("mul", ggml.same("unary", gate), up)
        return ggml.as_float("glu", gate.ne, gate, up)

    def moe(
        self,
        prefix: str,
        x: Tensor,
        gating: str,
        *,
        normed: bool,
        scaled: bool,
        router: Tensor | None = None,
    ) -> Tensor:
        """Routed experts: each token's choice, its weights, the products, their sum."""
        model, n = self.model, x.ne[1]
        experts = self.needed(f"{prefix}ffn_gate_inp.weight").ne[1]
        active = model.number("expert_used_count")
        logits = self.linear(f"{prefix}ffn_gate_inp", x if router is None else router)
        act = model.arch
        if gating == "softmax":
            probs = ggml.same("soft_max", logits)
        elif gating == "sigmoid":
            probs = ggml.same("unary", logits)
        else:
            probs = logits
        selection = probs
        bias = self.weight(f"{prefix}exp_probs_b.bias")
        if bias is not None:
            selection = ggml.same("add", probs, bias)
        if act == "llama4":
            selection = logits
        groups = model.number("expert_group_count")
        if groups > 1:
            selection = self._grouped(selection, experts, groups, n)
        chosen = self._top(selection, active)
        weights = ggml.rows(ggml.reshape(probs, 1, experts, n), chosen)
        if gating == "softmax_weight":
            flat = ggml.same("soft_max", ggml.reshape(weights, active, n))
            weights = ggml.reshape(flat, 1, active, n)
        if normed:
            flat = ggml.reshape(weights, active, n)
            total = ggml.in_place("clamp", ggml.as_float("sum_rows", (1, n), flat))
            weights = ggml.reshape(ggml.same("div", flat, total), 1, active, n)
        if scaled:
            weights = ggml.same("scale", weights)
        self.expand(weights)
        return self._experts(prefix, x, chosen, weights, active)

    def _top(self, scores: Tensor, count: int) -> Tensor:
        sorted_ = Tensor("argsort", scores.ne, I32, (scores,))
        return ggml.view(sorted_, (count, *scores.ne[1:]), sorted_.nb[1:])

    def _grouped(self, scores: Tensor, experts: int, groups: int, n: int) -> Tensor:
        """DeepSeek's choice within the best groups."""
        each, used = experts // groups, self.model.number("expert_group_used_count", 1)
        table = ggml.reshape(scores, each, groups, n)
        best = self._top(table, 2)
        found = ggml.rows(ggml.reshape(table, 1, each, groups, n), best)
        total = ggml.as_float("sum_rows", (1, groups, n), ggml.reshape(found, 2, groups, n))
        kept = self._top(ggml.reshape(total, groups, n), used)
        picked = ggml.rows(table, kept)
        masked = ggml.into(picked, kept, ggml.same("fill", table))
        return ggml.reshape(masked, experts, n)

    def _experts(
        self, prefix: str, x: Tensor, chosen: Tensor, weights: Tensor, active: int
    ) -> Tensor:
        n, width = x.ne[1], x.ne[0]
        x = ggml.reshape(x, width, 1, n)
        first = self.model.arch == "llama4"  # its weights come before the experts
        if first:
            x = ggml.same("mul", ggml.as_float("repeat", (width, active, n), x), weights)

        def product(name: str, value: Tensor) -> Tensor:
            made = ggml.matmul_id(self.needed(f"{prefix}{name}.weight"), value, chosen)
            bias = self.weight(f"{prefix}{name}.bias")
            return made if bias is None else ggml.same("add_id", made, bias, chosen)

        if self.weight(f"{prefix}ffn_gate_up_exps.weight") is not None:
            both = product("ffn_gate_up_exps", x)
            hidden = ggml.as_float("glu", (both.ne[0] // 2, *both.ne[1:]), *_halves(both))
        else:
            up = product("ffn_up_exps", x)
            if self.weight(f"{prefix}ffn_gate_exps.weight") is not None:
                hidden = self.glu(product("ffn_gate_exps", x), up)
            else:
                hidden = ggml.same("sqr", ggml.same("unary", up))
        down = product("ffn_down_exps", hidden)
        if not first:
            down = ggml.same("mul", down, weights)
        parts = [
            self.expand(ggml.view(down, (down.ne[0], n), (down.nb[2],), index * down.nb[1]))
            for index in range(active)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = ggml.same("add", total, part)
        total = total if active > 1 else ggml.contiguous(total)
        return self.expand(total) if self.settings.build >= SUMS_EARLY else total

    # -------------------------------------------------------- attention

    def mask(self, slides: bool) -> Tensor:
        found = self._masks.get(slides)
        if found is None:
            cells = self.window_cells if slides else self.cells
            shape = (cells, self.n // self.streams, 1, self.streams)
            if self.settings.build >= HALF_MASK and self.settings.flash:
                found = ggml.given(shape, F16)
            else:
                found = ggml.given(shape, F32)
                if self.settings.flash:
                    found = Tensor("cpy", found.ne, F16, (found,))
            self._masks[slides] = found
        return found

    def by_stream(self, x: Tensor) -> Tensor:
        """Queries with an axis for the streams of the cache."""
        sizes = (*x.ne[:2], self.n // self.streams, self.streams)
        return ggml.view(x, sizes, (x.nb[1], x.nb[2], x.nb[3] // self.streams))

    def ids(self, which: str, slides: bool, count: int) -> Tensor:
        key = (which, slides)
        if key not in self._ids:
            self._ids[key] = ggml.given((count,), I64)
        return self._ids[key]

    def rope(self, x: Tensor) -> Tensor:
        return ggml.same("rope", x, self.positions)

    def attention(
        self, layer: int, shape: Heads, q: Tensor, k: Tensor | None, v: Tensor | None
    ) -> Tensor:
        """Writes keys and values into the cache and reads it as a whole."""
        for value in (q, k, v) if any(self.model.sliding) else (q, v, k):
            if value is not None:
                self.expand(value)
        settings, slides = self.settings, shape.slides
        cells = self.window_cells if slides else self.cells
        home = self.places.caches[self.model.cache_of(layer)]
        k_cache = self._cache(settings.cache_k, shape.k * shape.kv, cells, home)
        v_cache = k_cache
        if not shape.v_in_k:
            v_cache = self._cache(settings.cache_v, shape.v * shape.kv, cells, home)
        if k is not None:
            self.store(k, k_cache, shape.k * shape.kv, "k", slides, turned=False)
        if v is not None and not shape.v_in_k:
            turned = not settings.flash
            self.store(v, v_cache, shape.v * shape.kv, "v", slides, turned=turned)
        mask, streams = self.mask(slides), self.streams
        if shape.masked is not None:
            mask = shape.masked(mask)
        q = ggml.permute(self.by_stream(q), 0, 2, 1, 3)
        keys = self._read(k_cache, shape.k, shape.kv, cells)
        if not settings.flash or shape.bias is not None:
            return self.expand(self._scores(shape, q, keys, v_cache, cells, mask))
        values = self._read(v_cache, shape.v, shape.kv, cells)
        sizes = (shape.v, q.ne[2], q.ne[1], streams)
        mixed = ggml.as_float("flash_attn", sizes, q, keys, values, mask)
        if shape.after is not None:
            mixed = shape.after(ggml.permute(mixed, 0, 2, 1, 3))
            mixed = ggml.contiguous(ggml.permute(mixed, 0, 2, 1, 3))
        flat = ggml.reshape(mixed, mixed.ne[0] * mixed.ne[1], mixed.ne[2] * mixed.ne[3])
        return self.expand(flat)

    def attention_within(self, q: Tensor, k: Tensor, v: Tensor, *, slides: bool = False) -> Tensor:
        """Attention over a batch's own tokens, or over what an encoder made, without a cache."""
        for value in (q, k, v):
            self.expand(value)
        mask = self.own_masks.get(slides)
        if mask is None:
            kind = F16 if self.settings.build >= HALF_MASK and self.settings.flash else F32
            mask = ggml.given((k.ne[2], self.n), kind)
            if kind == F32 and self.settings.flash:
                mask = ggml.cast(mask, F16)
            self.own_masks[slides] = mask
        q, k, v = (ggml.permute(one, 0, 2, 1, 3) for one in (q, k, v))
        if self.settings.flash:
            k, v = ggml.cast(k, F16), ggml.cast(v, F16)
            sizes = (v.ne[0], q.ne[2], q.ne[1], 1)
            mixed = ggml.as_float("flash_attn", sizes, q, k, v, mask)
            return self.expand(ggml.reshape(mixed, mixed.ne[0] * mixed.ne[1], self.n))
        scores = ggml.same("soft_max", ggml.matmul(k, q), mask)
        mixed = ggml.matmul(ggml.contiguous(ggml.transpose(v)), scores)
        turned = ggml.permute(mixed, 0, 2, 1, 3)
        return self.expand(ggml.contiguous(turned, turned.ne[0] * turned.ne[1], self.n))

    def index_cache(self, layer: int, width: int) -> Tensor:
        """The keys of a layer's indexer."""
        return self._cache(self.settings.cache_k, width, self.cells, self.places.caches[layer])

    def _cache(self, kind: str, width: int, cells: int, home: str) -> Tensor:
        return ggml.outside((width, cells, self.streams), KINDS[kind], home, weight=False)

    def _read(self, cache: Tensor, head: int, heads: int, cells: int) -> Tensor:
        row = head // cache.kind.block * cache.kind.bytes
        seen = ggml.view(cache, (head, heads, cells, self.streams), (row, cache.nb[1], cache.nb[2]))
        return ggml.permute(seen, 0, 2, 1, 3)

    def store(
        self, x: Tensor, cache: Tensor, width: int, which: str, slides: bool, *, turned: bool
    ) -> None:
        """Keys or values into the cache; builds before `ggml_set_rows` copied them to one place."""
        if self.settings.build < SET_ROWS:
            target = ggml.view(cache, (width, self.n), (cache.nb[1],))
            flat = ggml.view(x, (width, self.n), (x.nb[2],))
            self.expand(ggml.copied(ggml.transpose(flat) if turned else flat, target))
            return
        flat = ggml.view(x, (width, self.n), (x.nb[2],))
        count = self.n
        if turned:
            wide = self.model.widest_values
            count = self.n * wide
            if width < wide:
                flat = ggml.as_float("pad", (wide, self.n), flat)
            flat = ggml.reshape(flat, 1, count)
        self.expand(ggml.into(flat, self.ids(which, slides, count), cache))

    def _scores(
        self, shape: Heads, q: Tensor, keys: Tensor, v_cache: Tensor, cells: int, mask: Tensor
    ) -> Tensor:
        """Attention without a fused kernel: the scores are written out."""
        scores = ggml.matmul(keys, q)
        if shape.softcap:
            scores = ggml.same("scale", scores)
            scores = ggml.same("scale", ggml.same("unary", scores))
        if shape.bias is not None:
            scores = ggml.same("add", scores, shape.bias)
        scores = ggml.same("soft_max", scores, mask)
        size = v_cache.kind.bytes
        if shape.v_in_k or self.settings.flash:
            values = self._read(v_cache, shape.v, shape.kv, cells)
            values = ggml.contiguous(ggml.transpose(values))
        else:
            values = ggml.view(
                v_cache,
                (cells, shape.v, shape.kv, self.streams),
                (size * cells, size * cells * shape.v, v_cache.nb[2]),
            )
        mixed = ggml.matmul(values, scores)
        if shape.after is not None:
            mixed = shape.after(mixed)
        turned = ggml.permute(mixed, 0, 2, 1, 3)
        made = ggml.contiguous(turned, turned.ne[0] * turned.ne[1], turned.ne[2] * turned.ne[3])
        if not self.settings.kv_offload:
            self.fixed[id(made)] = self.places.cpu
        return made


def _halves(both: Tensor) -> tuple[Tensor, Tensor]:
    """The gate and the product beside it, of a matrix that makes both."""
    half, strides = both.ne[0] // 2, both.nb[1:3]
    sizes = (half, *both.ne[1:3])
    return ggml.view(both, sizes, strides), ggml.view(both, sizes, strides, half * 4)
