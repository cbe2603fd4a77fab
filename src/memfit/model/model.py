"""A model as data: its modules from embedding to head, and what is counted over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import cached_property
from typing import Any, NamedTuple

from memfit.lazy_dataclass import dataclass
from memfit.model.modules import (
    Attention,
    Latent,
    Layer,
    Linear,
    Mixer,
    Module,
    MoE,
    Weight,
)


@dataclass(frozen=True, kw_only=True)
class LabelHead:
    """What is around the linear layer that labels tokens or sequences: `task` as in `job.head`, the
    rate of the dropout before it, and whether the loss is of fp32 logits."""

    task: str
    dropout: float = 0.0
    wide: bool = False


class Stored(NamedTuple):
    """A tensor as a file keeps it: its layer (−1 for the ends), its name there, its bytes."""

    layer: int
    name: str
    bytes: int


BESIDE = "~"  # begins names in another list beside a layer's own: `~ffns.lin1`


def located(path: str, name: str) -> str:
    """Where something in the layer at `path` lies."""
    if not name.startswith(BESIDE):
        return f"{path}.{name}"
    own, _, number = path.rpartition(".")
    other, _, rest = name.removeprefix(BESIDE).partition(".")
    return ".".join(filter(None, (own.rpartition(".")[0], other, number, rest)))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A causal language model, from embedding to head; `prefix` is where its layers live
    (`model.layers`)."""

    name: str
    family: str
    prefix: str
    embed: tuple[
        Module, ...
    ]  # token embedding first, then positions, embedding norms and projections
    layers: tuple[Layer, ...]
    final: tuple[Module, ...]  # norms and projections before the head
    head: Linear
    tied: bool
    vocab: int
    width: int
    positions: int
    dtype: str = "bfloat16"
    softcap: bool = False
    logit_scale: bool = False
    embed_dropout: float = 0.0
    buffers: tuple[Weight, ...] = ()  # of the model itself: rotary frequencies and the like
    masks: tuple[
        int | None, ...
        # windows of masks that its code makes whatever the layers are; None: it looks for one in
        # vain
    ] = ()
    both_ways: bool = False  # tokens see those behind them: a mask is never left out
    heads: tuple[str, ...] = ("causal-lm",)  # of the classes that this is; as in `job.head`
    labelled: LabelHead | None = None  # its head gives labels, and no words
    own_positions: bool = False  # of each sequence, in three directions: tables have rows for all
    # its code fills a key/value cache while training, too: a config inside the config says so
    caching: bool = False
    assumed: tuple[tuple[str, Any], ...] = ()  # decisive keys that the config lacks, as taken
    headless: bool = False  # a stage of a pipeline that does not end it
    # held beside the language model and idle while it reads text (a tower and its projector)
    towers: tuple[Weight, ...] = ()
    behind: int = 0  # of the towers' weights, the last ones that lie behind the language model
    last: str = ""  # the module of the last parameter, where it is one of the towers'
    own_loss: bool = False  # its class cuts its logits itself (`losses.selected`)
    checkpoints: bool = True  # the class supports gradient checkpointing
    whole_prompt: bool = False  # its class has no `logits_to_keep`: generation computes all logits
    stored: tuple[Stored, ...] = field(
        default=(), repr=False
    )  # exact blocks of a quantized file, in place of the weights below
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    origin: str = ""
    graphs: Any = field(default=None, compare=False, repr=False)  # of captured pieces, by name
    unused: frozenset[str] = frozenset()  # weights that no operation reads
    whole: tuple[str, ...] = ()  # modules that PEFT trains whole beside adapters
    casting: tuple[str, ...] = ()  # ends of linear layers whose input gets the weight's dtype
    paths: tuple[str, ...] = ()  # of the layers, where they lie in several lists
    encodes: bool = False  # an encoder, with a decoder or without: its graphs end at the loss

    def path(self, number: int) -> str:
        """The path of a layer."""
        return self.paths[number] if self.paths else f"{self.prefix}.{number}"

    def weights(self) -> Iterator[Weight]:
        """Every parameter once, named as transformers names it; a tied head is the embedding."""
        yield from (weight for weight in self.tensors() if weight.role != "buffer")

    def tensors(self) -> Iterator[Weight]:
        """Parameters and buffers, in the order in which they are built."""
        yield from self.ahead
        for module in self.embed:
            yield from module.weights()
        for index, layer in enumerate(self.layers):
            for weight in layer.weights():
                yield Weight(
                    name=located(self.path(index), weight.name),
                    shape=weight.shape,
                    role=weight.role,
                    format=weight.format,
                )
        for module in self.final:
            yield from module.weights()
        yield from self.buffers
        yield from self.towers[len(self.ahead) :]
        if self.headless:
            return
        if not self.tied:
            yield from self.head.weights()
        elif self.head.bias:
            yield from (weight for weight in self.head.weights() if weight.role == "bias")

    @property
    def ahead(self) -> tuple[Weight, ...]:
        """Weights of the towers that lie before the language model."""
        return self.towers[: len(self.towers) - self.behind]

    @cached_property
    def kinds(self) -> tuple[tuple[Layer, int], ...]:
        """The distinct layers with how often each occurs; objects are told apart before values,
        since most are the same one."""
        found: list[Layer] = []
        times: list[int] = []
        known: dict[int, int] = {}
        for layer in self.layers:
            number = known.get(id(layer))
            if number is None:
                number = known[id(layer)] = found.index(layer) if layer in found else len(found)
                if number == len(found):
                    found.append(layer)
                    times.append(0)
            times[number] += 1
        return tuple(zip(found, times, strict=True))

    @cached_property
    def mixers(self) -> tuple[Mixer, ...]:
        """Attention and feed-forwards of the distinct layers."""
        return tuple([block.mixer for layer, _ in self.kinds for block in layer.blocks])

    @property
    def attentions(self) -> list[Attention]:
        return [mixer for mixer in self.mixers if isinstance(mixer, Attention)]

    @property
    def mixtures(self) -> list[MoE]:
        return [mixer for mixer in self.mixers if isinstance(mixer, MoE)]

    @cached_property
    def frozen(self) -> int:
        """Parameters that the class itself trains never."""
        return sum(weight.count for weight in self.weights() if weight.frozen)

    @cached_property
    def parameters(self) -> int:
        """Unique parameters, a tied head counted once."""
        ends = [*self.embed, *self.final]
        count = sum(
            weight.count
            for module in ends
            for weight in module.weights()
            if weight.role != "buffer"
        )
        for layer, times in self.kinds:
            count += times * sum(
                weight.count for weight in layer.weights() if weight.role != "buffer"
            )
        head = (
            0
            if self.headless
            else sum(
                weight.count
                for weight in self.head.weights()
                if not self.tied or weight.role == "bias"
            )
        )
        return count + head + self.idle

    @cached_property
    def idle(self) -> int:
        """Parameters of the towers, which text does not pass through."""
        return sum(weight.count for weight in self.towers if weight.role != "buffer")

    @cached_property
    def active(self) -> int:
        """Parameters that one token passes through (routed experts counted as used)."""
        idle = self.idle
        for layer, times in self.kinds:
            idle += times * (0 if layer.captured is None else layer.captured.idle)
            for block in layer.blocks:
                if isinstance(block.mixer, MoE):
                    experts = block.mixer.routed
                    idle += times * (experts - experts * block.mixer.active // block.mixer.experts)
        return self.parameters - idle

    @property
    def cached(self) -> int:
        """Values of KV cache per token, over all layers, as the method needs them."""
        mixers = (block.mixer for layer in self.layers for block in layer.blocks)
        return sum(mixer.cached for mixer in mixers if isinstance(mixer, (Attention, Latent)))
