"""What models are made of: modules as data, each knowing its weights by the names transformers
gives them.

Shape letters, here and in every formula: B sequences, S tokens of one, T = B·S tokens, D model
width, N query heads, K key/value heads, H head size, F feed-forward width, V vocabulary, L layers,
E experts, R adapter rank. How a module computes (which tensors appear, and when) is the business of
`lower`, found there by `style`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cached_property
from math import prod
from typing import Literal, TypeAlias

from memfit.lazy_dataclass import dataclass

COLUMNS, ROWS = "columns", "rows"  # of a linear layer that ranks share
Role = Literal["linear", "embedding", "norm", "bias", "expert", "router", "other", "buffer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter, or (role `buffer`) a tensor that is no parameter; `format` only where it differs
    from the model's dtype."""

    name: str
    shape: tuple[int, ...]
    role: Role = "other"
    format: str = ""
    frozen: bool = False  # the class's own code says that it needs no gradient

    @property
    def count(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Module:
    """A piece of a model; its own weights first, then those of the modules it holds, in field
    order."""

    name: str

    def own(self) -> Iterator[Weight]:
        """Weights that belong to this module itself."""
        return iter(())

    @cached_property
    def children(self) -> tuple[Module, ...]:
        """The modules held directly, found once."""
        values = (getattr(self, one.name) for one in fields(self))
        items = (
            item for value in values for item in (value if isinstance(value, tuple) else (value,))
        )
        return tuple(item for item in items if isinstance(item, Module))

    def weights(self) -> Iterator[Weight]:
        yield from self.own()
        for module in self.children:
            yield from module.weights()

    def linears(self) -> Iterator[Linear]:
        """Every linear layer inside, itself included."""
        if isinstance(self, Linear):
            yield self
        for module in self.children:
            yield from module.linears()


@dataclass(frozen=True, kw_only=True)
class Linear(Module):
    """x·Wᵀ + b. `conv1d`: GPT-2's Conv1D keeps its weight as (in, out). `format`: the checkpoint
    stores it quantized. `own_class`: a class of the family's own stands in for torch's
    (FalconLinear), which bitsandbytes' integration does not know. `across`: a rank has these of its
    `columns` or `rows` (tensor parallelism); what it gives is a part of the whole's, or of a sum.
    `joined`: all the same, what comes out of columns, or goes into rows, stands whole on every
    rank."""

    inputs: int
    outputs: int
    bias: bool = False
    conv1d: bool = False
    format: str = ""
    own_class: bool = False
    across: str = ""
    joined: bool = False

    def own(self) -> Iterator[Weight]:
        shape = (self.inputs, self.outputs) if self.conv1d else (self.outputs, self.inputs)
        yield Weight(name=f"{self.name}.weight", shape=shape, role="linear", format=self.format)
        if self.bias:
            yield Weight(name=f"{self.name}.bias", shape=(self.outputs,), role="bias")


@dataclass(frozen=True, kw_only=True)
class Embedding(Module):
    """A table of `rows` vectors. `scaled`: its output is multiplied once more (gemma, granite)."""

    rows: int
    width: int
    # tokens | learned (positions) | beside_mask (learned, with a mask that nobody asked for) |
    # counted (learned, each sequence's counted along its mask) | sinusoidal (in a table that is a
    # buffer)
    style: str = "tokens"
    scaled: bool = False
    outside: bool = (
        False  # scaled by the model, behind the hook that makes the table's output a leaf
    )
    kept: bool = False  # the class around that model holds the output until it returns

    def own(self) -> Iterator[Weight]:
        if self.style == "sinusoidal":
            yield Weight(name=f"{self.name}.weights", shape=(self.rows, self.width), role="buffer")
            return
        yield Weight(name=f"{self.name}.weight", shape=(self.rows, self.width), role="embedding")


@dataclass(frozen=True, kw_only=True)
class Norm(Module):
    """`style`: `llama` (RMS in fp32, cast, then times the weight), `gemma` (all in fp32, times 1 +
    w, then cast), `olmo2` (RMS in fp32, times the weight in fp32, then cast: also gpt-oss),
    `helium` (as olmo2, with the weight cast up first), `layer` (torch's LayerNorm), `layer1p`
    (LayerNorm with 1 + w: nemotron), `olmo` (LayerNorm in fp32 with no weight, then cast), `cohere`
    (mean and variance by hand in fp32, times the weight cast up, then cast)."""

    width: int
    style: str = "llama"
    bias: bool = False
    affine: bool = True
    heads: int = 0  # one weight of `width` for each of so many heads, in one tensor (cohere)
    split: bool = False  # and a module for each head (stablelm)

    def own(self) -> Iterator[Weight]:
        if self.split:
            yield from (
                Weight(name=f"{self.name}.norms.{head}.weight", shape=(self.width,), role="norm")
                for head in range(self.heads)
            )
        elif self.affine:
            yield Weight(
                name=f"{self.name}.weight",
                shape=(self.heads, self.width) if self.heads else (self.width,),
                role="norm",
            )
        if self.bias:
            yield Weight(name=f"{self.name}.bias", shape=(self.width,), role="norm")


@dataclass(frozen=True, kw_only=True)
class Attention(Module):
    """Softmax attention. `project` is either (q, k, v) or one fused projection; `style` names the
    code that runs it."""

    heads: int
    kv_heads: int
    head: int
    project: tuple[Linear, ...]
    out: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    rotary: int = 0  # rotated values per head
    window: int = 0  # tokens seen by a sliding window; 0 sees all
    sinks: bool = False
    softcap: bool = False
    alibi: bool = False  # distance biases are added to the scores (BLOOM, MPT, Falcon-RW)
    clipped: bool = False  # projected values are clamped (MPT, OLMo)
    # keys and values are repeated for every query head before they are cached (Falcon 40B)
    expanded: bool = False
    repeated_until: tuple[int, int] = (
        0,
        0,
    )  # the version of transformers that no longer repeats them for flash-attn, which takes groups
    kernels: tuple[str, ...] = (
        "eager",
        "sdpa",
        "flash",
    )  # what transformers' code for it can run; without `sdpa` its default is `eager`
    dropout: float = 0.0
    out_dropout: float = 0.0
    style: str = "llama"
    buffers: tuple[Weight, ...] = ()

    def own(self) -> Iterator[Weight]:
        if self.sinks:
            yield Weight(name=f"{self.name}.sinks", shape=(self.heads,), role="other")
        yield from self.buffers

    @property
    def cached(self) -> int:
        """Values per token that the method needs."""
        return 2 * self.kv_heads * self.head

    @property
    def cached_expanded(self) -> int:
        """Values per token that transformers' own code keeps."""
        return 2 * (self.heads if self.expanded else self.kv_heads) * self.head


@dataclass(frozen=True, kw_only=True)
class Latent(Module):
    """DeepSeek's multi-head latent attention: `nope` + `rope` query/key sizes per head, `value` per
    head; keys and values come from a latent of `latent` values, queries from one of `q_latent` (0:
    straight from the input)."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    q_latent: int
    q_proj: Linear | None
    q_a: Linear | None
    q_norm: Norm | None
    q_b: Linear | None
    kv_a: Linear
    kv_norm: Norm
    kv_b: Linear
    out: Linear
    kernels: tuple[str, ...] = ("eager", "sdpa", "flash")
    dropout: float = 0.0
    interleaved: bool = True  # neighbours make the pairs that rotate, not the halves (deepseek_v3)
    style: str = "deepseek_v3"

    @property
    def window(self) -> int:
        """It sees all there is."""
        return 0

    @property
    def cached(self) -> int:
        """Values per token that the method needs: the latent and the shared rotary key (576 in V2
        and V3)."""
        return self.latent + self.rope

    @property
    def cached_expanded(self) -> int:
        """Values per token of code that caches keys and values of every head, as transformers 4
        did; 5.23 caches the latent and the shared rotary key (modeling_deepseek_v3.py
        DeepseekV3Attention.forward)."""
        return self.heads * (self.nope + self.rope + self.value)


@dataclass(frozen=True, kw_only=True)
class MLP(Module):
    """Feed-forward. Gated: down(act(gate(x))·up(x)); `fused` holds gate and up in one; plain:
    down(act(up(x)))."""

    gate: Linear | None = None
    up: Linear
    down: Linear
    fused: bool = False
    activation: str = "silu"
    inner_dropout: float = 0.0  # between the activation and `down`
    dropout: float = 0.0
    style: str = "gated"

    @property
    def width(self) -> int:
        return self.down.inputs


@dataclass(frozen=True, kw_only=True)
class MoE(Module):
    """A router and `experts` feed-forwards of which each token uses `active`; `shared` runs for
    every token. The experts lie in stacks, unless `each` has them one by one."""

    experts: int
    active: int
    inputs: int
    width: int
    gate: Linear | None = None  # the router, where it is a linear layer
    each: tuple[MLP, ...] = ()  # the experts, where each has linear layers of its own
    shared: MLP | None = None
    shared_gate: Linear | None = None
    router: str = "gate"  # name of the router module
    router_bias: bool = False  # a parameter, as in gpt-oss
    correction_bias: bool = False  # a buffer, as in DeepSeek-V3
    expert_bias: bool = False
    transposed: bool = False  # gpt-oss keeps (E, in, out)
    normed: bool = (
        False  # chosen weights are divided by their sum, where the style leaves it to the config
    )
    groups: int = (
        0  # experts are chosen within the best `open_groups` of so many groups; 0: among all
    )
    open_groups: int = 0
    jitter: bool = False  # training multiplies the input by noise
    experts_name: str = "experts"
    activation: str = "silu"
    style: str = "mixtral"
    format: str = (
        ""  # of the stored expert matrices, where it differs from the model's dtype (MXFP4)
    )
    router_format: str = ""  # of the router's weight, where it is kept in fp32 (ernie)
    extra: tuple[
        Weight, ...
    ] = ()  # what else lies in the module, by its full name within the layer
    local: int = 0  # experts that this rank holds; 0: all of them
    apart: bool = False  # gate and up are stacks of their own (torchtitan)

    @property
    def held(self) -> int:
        """Experts that lie here."""
        return self.local or self.experts

    @property
    def routed(self) -> int:
        """Parameters of all experts that lie here."""
        if self.each:
            return sum(weight.count for expert in self.each for weight in expert.weights())
        return sum(weight.count for weight in self.stacks())

    def own(self) -> Iterator[Weight]:
        if self.gate is None:
            yield Weight(
                name=f"{self.name}.{self.router}.weight",
                shape=(self.experts, self.inputs),
                role="router",
                format=self.router_format,
            )
        if self.router_bias:
            yield Weight(
                name=f"{self.name}.{self.router}.bias", shape=(self.experts,), role="router"
            )
        if self.correction_bias:
            yield Weight(
                name=f"{self.name}.{self.router}.e_score_correction_bias",
                shape=(self.experts,),
                role="buffer",
                format="float32",
            )
        if not self.each:
            yield from self.stacks()
        yield from self.extra

    def stacks(self) -> Iterator[Weight]:
        """The experts' matrices, those of all experts in one tensor."""
        up, down = (2 * self.width, self.inputs), (self.inputs, self.width)
        path = f"{self.name}.{self.experts_name}"
        half = (self.width, self.inputs)
        stacks = (
            (("gate_up_proj", up), ("down_proj", down))
            if not self.apart
            else (("gate_proj", half), ("down_proj", down), ("up_proj", half))
        )
        for name, (outputs, inputs) in stacks:
            matrix = (inputs, outputs) if self.transposed else (outputs, inputs)
            yield Weight(
                name=f"{path}.{name}", shape=(self.held, *matrix), role="expert", format=self.format
            )
            if self.expert_bias:
                yield Weight(name=f"{path}.{name}_bias", shape=(self.held, outputs), role="expert")


@dataclass(frozen=True, kw_only=True)
class Loose(Module):
    """Weights of a captured module that is neither a linear layer nor an embedding."""

    held: tuple[Weight, ...] = ()

    def own(self) -> Iterator[Weight]:
        return iter(self.held)


@dataclass(frozen=True, kw_only=True)
class Captured(Module):
    """A piece of the model that runs by a captured graph: its modules in transformers' order, and
    the graph's name among those of `Model.graphs`. `idle`: parameters that a token passes by."""

    graph: str
    parts: tuple[Module, ...]
    idle: int = 0

    @cached_property
    def by_name(self) -> Mapping[str, Linear]:
        """Its linear layers, by name."""
        return {one.name: one for one in self.linears()}


Mixer: TypeAlias = Attention | Latent | MLP | MoE


@dataclass(frozen=True, kw_only=True)
class Block(Module):
    """norm → mixer → post-norm → (scaled) → added to the residual. The name is empty: it adds no
    level to paths.

    `order`: `pre` is x + mixer(norm(x)); `post` is norm(x + mixer(x)) (OPT-350m); `normed` is
    norm(x) + mixer(norm(x)) (BLOOM's option)."""

    name: str = ""
    norm: Norm | None = None
    mixer: Mixer
    post_norm: Norm | None = None
    scaled: bool = False
    order: str = "pre"


@dataclass(frozen=True, kw_only=True)
class Layer(Module):
    """One decoder layer; equal layers are equal values, whatever their place. `parallel`: all
    blocks read the same input and their results are added together (GPT-J, NeoX, Falcon)."""

    name: str = ""
    blocks: tuple[Block, ...] = ()
    parallel: bool = False
    captured: Captured | None = None  # in place of blocks

    @cached_property
    def listed(self) -> tuple[Weight, ...]:
        """The weights, found once; a norm shared by parallel blocks stands once."""
        return tuple({weight.name: weight for weight in super().weights()}.values())

    @cached_property
    def products(self) -> tuple[Linear, ...]:
        """The linear layers, found once."""
        return tuple(super().linears())

    def weights(self) -> Iterator[Weight]:
        return iter(self.listed)

    def linears(self) -> Iterator[Linear]:
        return iter(self.products)
