"""Families of encoders, and of encoders with a decoder, that run by captured graphs: a row says how
a config becomes dimensions and kinds of layers; the heads come from the graphs' file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from memfit.errors import InputError
from memfit.graph import Graph, evaluated, graph_of
from memfit.model.classes import classes_of, named_head, unknown_class
from memfit.model.config import Fields
from memfit.model.families import family
from memfit.model.families._captured import (
    LATE,
    TRACE,
    Dims,
    classes,
    completed,
    modules,
    stored,
    unlike,
    weight_of,
)
from memfit.model.families._headless import HIDDEN, POOLED, without_head
from memfit.model.families._towers import Tower
from memfit.model.label_heads import labels_of
from memfit.model.model import BESIDE, Model
from memfit.model.modules import Captured, Layer, Linear, Loose, Module

CACHED = "cached_"  # begins the names of keys and values in a layer's graph
HELD = "held_"  # begins the names of what a layer makes and the encoder has until it returns
HANDED = "handed_"  # begins the names of what layers hand on beside their `x`
ENCODED = "encoded"  # the encoder's result, where nothing stands between it and the decoder
LAYERS = "layers"  # the dimension that counts them
CAUSAL = "causal-lm"
DECODING = "causal-lm-decoder"  # the same class where `is_decoder` is true: its mask is causal
# GPT's, which lies transposed, and I-BERT's, which PEFT and bitsandbytes do not know.
OTHER_MATRICES = ("Conv1D", "QuantLinear")
ENDLESS = 2**40  # positions of a model that looks at distances
# What PEFT trains whole beside adapters (peft 0.21 peft_model.py
# PeftModelForSequenceClassification, -TokenClassification, -QuestionAnswering).
CLASSIFIERS = ("classifier", "score")
TRAINED_WHOLE = {
    "classification": CLASSIFIERS,
    "token-classification": CLASSIFIERS,
    "question-answering": ("qa_outputs",),
}
BATCH = ((3, 88, 40, 5), (7, 104, 72, 9), (11, 152, 56, 13))


@dataclass(frozen=True, kw_only=True)
class ChainRow:
    """One family: `heads` are those of `job.head` that it has, the usual one first; `rates` are the
    config's fields of dropout with the class's defaults, or with the field that stands for an
    absent one; `sizes` are batch, sequence length, decoder length and labels of the
    captured runs. `pairs`: a decoder follows the encoder; `stack`: for heads that run only one of
    the two, the prefix of the kinds of its layers."""

    name: str
    dims: Callable[[Fields], Dims]
    kinds: Callable[[Fields], Sequence[str]]
    examples: tuple[Mapping[str, Any], ...]
    heads: tuple[str, ...]
    rates: Mapping[str, float | str]
    sizes: tuple[tuple[int, int, int, int], ...] = BATCH
    pairs: bool = False
    stack: Mapping[str, str] = field(default_factory=dict)
    hears: bool = False  # the encoder is given sounds of one length
    checkpoints: bool = True  # the class supports gradient checkpointing
    silent: tuple[str, ...] = ()
    casting: tuple[str, ...] = ()  # as of `Model`
    depth: str = ""  # the field of the number of layers, which the capture varies
    depths: tuple[str, ...] = ()  # those of an encoder and a decoder
    refused: tuple[str, ...] = ()  # precisions and tasks in which other code runs
    absent: tuple[str, ...] = ()
    positions: str = "max_position_embeddings"
    tied: bool = True  # whether the captured head is the embedding
    unties: bool = True  # the class heeds `tie_word_embeddings`
    limited: bool = True  # no token has a position beyond those
    longest: int = 0  # tokens of a sequence beyond which other code runs; 0 for none
    endless: tuple[str, ...] = ()  # heads that run the same code beyond those
    before: int = 0  # positions that no token has
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that configs leave out
    derived: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # see `completed`
    form: Callable[[Dims], str] = lambda dims: ""  # which of `forms` a pass runs
    # Other code by the length of a sequence, each with sizes as above.
    forms: Mapping[str, tuple[tuple[int, int, int, int], ...]] = field(default_factory=dict)
    alike: Mapping[str, str] = field(default_factory=dict)  # heads whose class is another head's
    others: tuple[str, ...] = ()  # classes that are named like a head's, and are none of them
    tower: Tower | None = None  # the weights beside the layers that text does not pass through
    bare: str = ""  # the head whose class has what the model without a head has; see `_headless`
    pooler: str = ""  # of the model without a head, where no class with a head has it

    def layers(self, fields: Fields, head: str) -> list[str]:
        """The kinds of the layers that run under a head."""
        return [one for one in self.kinds(fields) if one.startswith(self.stack.get(head, ""))]


@dataclass(frozen=True, kw_only=True)
class ChainGraphs:
    """The graphs of one model and head with the model's dimensions and dropout rates. `run` is the
    name of the head in the file."""

    row: ChainRow
    head: str
    run: str
    data: Mapping[str, Any]
    dims: Mapping[str, int]
    rates: Mapping[str, float]
    unknown: str = ""  # the class that the config names, where this is another
    base: str = ""  # where a model without a head has its modules; empty with a head

    @property
    def origin(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.data["origin"]
        return found

    @property
    def returned(self) -> tuple[str, ...]:
        """What the model returns beside the loss."""
        if self.base:
            return HIDDEN, POOLED
        return tuple(self.data["heads"][self.run]["returned"])

    @property
    def shared(self) -> tuple[str, ...]:
        """Weights that several operations read."""
        return tuple(self.data["heads"][self.run]["shared"])

    @property
    def history(self) -> bool:
        """Whether every layer's result is kept until the last one has run."""
        return bool(self.data["heads"][self.run].get("history", False))

    @property
    def crosses(self) -> bool:
        """Whether layers share weights, or leave something to the end or to the midst of the next
        one, so that none stands for others."""
        left = any(
            any(name.startswith((HELD, HANDED)) for name in one.outputs)
            or any(name.startswith(LATE) for name in one.inputs)
            for one in self.graphs.values()
        )
        return self.history or self.scattered or left

    @property
    def scattered(self) -> bool:
        """Whether layers run the weights of one module, or lie in several lists beside each
        other."""
        head = self.data["heads"][self.run]
        layers = head["weights"]["layers"]
        lists = head.get("lists", self.data["lists"])
        beside = any(row[0].startswith(BESIDE) for rows in layers.values() for row in rows)
        return beside or bool(lists.keys() - layers.keys())

    @property
    def caches(self) -> bool:
        """Whether the class makes a cache as it trains, which its outputs then hold."""
        return bool(self.data["heads"][self.run].get("caches", False))

    @property
    def transposed(self) -> bool:
        """Whether it has matrices to which adapters and packed weights do otherwise than to linear
        layers."""
        layers = self.data["heads"][self.run]["weights"]["layers"].values()
        return any(one[2] in OTHER_MATRICES for some in layers for one in some)

    @property
    def graphs(self) -> Mapping[str, Graph]:
        """All graphs of this head."""
        return {
            key: graphs_of(self.row.name)[number]
            for key, number in self.data["index"].items()
            if key.split("/")[1] == self.run
        }

    def of(self, name: str, batch: int, masked: bool, form: str = "") -> Graph:
        key = key_of(name, self.run, masked, batch == 1, form)
        number: int = self.data["index"][key]
        if self.base and name == "final":
            return last_of(self.row.name, number, self.base)
        return graphs_of(self.row.name)[number]

    def answers(self, batch: int, seq: int) -> bool:
        """Whether sequences of this length run captured code."""
        form = self.row.form(self.whole(batch, seq, 0)) if self.row.forms else ""
        return key_of("start", self.run, False, False, form) in self.data["index"]

    def has(self, name: str) -> bool:
        return key_of(name, self.run, False, False) in self.data["index"]

    def inputs(self, masked: bool) -> tuple[tuple[str, tuple[str | int, ...], str], ...]:
        """Name, shape and format of what the model is given, in the order in which it is made."""
        rows = self.data["heads"][self.run]["inputs+mask" if masked else "inputs"]
        return tuple((name, tuple(shape), format) for name, shape, format in rows)

    def whole(self, batch: int, seq: int, target: int) -> Dims:
        """All dimensions of a pass. Beside sounds a target that nobody gave ends where the
        positions do."""
        most = self.dims.get("max_position_embeddings", seq) if self.row.hears else seq
        sizes = {**self.dims, "batch": batch, "seq": seq, "target": target or min(seq, most)}
        return completed(sizes, self.row.derived)


def runs_of(row: ChainRow) -> tuple[tuple[str, str], ...]:
    """The names of a row's heads in its file, each with the head. The class of a decoder without
    its encoder decodes always (transformers 5.23 modeling_bart.py BartForCausalLM)."""
    more = ((DECODING, CAUSAL),) if CAUSAL in row.heads and not row.pairs else ()
    return (*((head, head) for head in row.heads), *more)


def key_of(name: str, head: str, masked: bool, alone: bool, form: str = "") -> str:
    """The name of a graph in a file: a piece, a head, and what else decides."""
    key = f"{name}/{head}/{'mask' if masked else ''}{'+one' if alone else ''}"
    return f"{key}/{form}" if form else key


CHAINS: dict[str, ChainRow] = {}


def chained(*rows: ChainRow, choose: Callable[[Fields], int] = lambda fields: 0) -> None:
    """Register a family of encoders that runs by graphs, under the name of its first row; `choose`
    says which row's code a config runs."""
    CHAINS.update({row.name: row for row in rows})
    examples = tuple(example for row in rows for example in row.examples)

    def build(fields: Fields) -> Model:
        row = rows[choose(fields)]
        return model_of(row, fields, stored(row.name))

    family(rows[0].name, examples=examples, graphs=True, heads=rows[0].heads)(build)


@cache
def graphs_of(name: str) -> tuple[Graph, ...]:
    """A family's graphs, read once."""
    data = stored(name)
    return tuple(graph_of(one, data["origin"]) for one in data["graphs"])


@cache
def last_of(name: str, number: int, base: str) -> Graph:
    """A class's last graph as far as the model without a head goes, made once."""
    return without_head(graphs_of(name)[number], base)


def rates_of(row: ChainRow, fields: Fields) -> dict[str, float]:
    """The dropout rates of a config, of which some are in a section of it."""
    found: dict[str, float] = {}
    for name, default in row.rates.items():
        usual = found[default] if isinstance(default, str) else default
        section, _, key = name.rpartition(".")
        owner = fields.section(section) if section else fields
        found[name] = owner.number(key, default=usual)
        if not 0 <= found[name] <= 1:
            owner.blame(key, f"`{found[name]:g}` is out of range", "must be from 0 to 1")
    return found


def model_of(row: ChainRow, fields: Fields, data: Mapping[str, Any]) -> Model:
    """The model of a config: dimensions from the row, everything else from the file."""
    fields.complete(**row.defaults)
    labels = labels_of(fields)
    classes(fields)
    head = named_head(fields.config, row.heads) or row.heads[0]
    dims, kinds = row.dims(fields), row.layers(fields, head)
    run, data = (head, data) if row.pairs else run_of(head, fields, data)
    rates = rates_of(row, fields)
    positions = fields.count(row.positions, default=512, high=2**40)
    towers = () if row.tower is None else row.tower(fields)
    dtype = fields.dtype()
    tied = fields.flag("tie_word_embeddings", default=row.tied)
    if data["heads"][run]["head"] and row.unties and tied is not row.tied:
        message = f"no captured graph of `{row.name}` with {'a tied' if tied else 'an untied'} head"
        fields.blame("tie_word_embeddings", message, TRACE)
    unlike(row, fields, data, dims)
    if fields.problems:
        raise InputError(*fields.problems)
    lists = data["heads"][run].get("lists", data["lists"])
    missing = sorted(set(kinds) - lists.keys())
    if missing:
        raise InputError.one(
            f"no captured graph for layers of kind `{missing[0]}` of `{row.name}`",
            where="config",
            hint=TRACE,
        )
    dims = {**data["constants"], **dims, "labels": labels, LAYERS: len(kinds)}
    weights = data["heads"][run]["weights"]
    layered = weights["layers"]
    parts = {kind: modules(layered.get(kind, ()), dims) for kind in dict.fromkeys(kinds)}
    layers = {
        kind: Layer(captured=Captured(name="", graph=kind, parts=some))
        for kind, some in parts.items()
    }
    start, final = modules(weights["start"], dims), modules(weights["final"], dims)
    others = (one for one in classes_of(fields.config) if one in row.others)
    return Model(
        name=row.name,
        family=row.examples[0]["model_type"],
        prefix=lists[kinds[0]],
        paths=paths_of(kinds, lists),
        encodes=True,
        layers=tuple(layers[kind] for kind in kinds),
        tied=False,
        headless=True,
        vocab=dims.get("vocab_size", 1),
        width=dims.get("hidden_size", 1),
        embed=(start[0], Captured(name="", graph="start", parts=start[1:])),
        final=(Captured(name="", graph="final", parts=final),),
        head=head_linear(data["heads"][run], (*start, *final), dims),
        positions=positions - row.before if row.limited else ENDLESS,
        dtype=dtype,
        buffers=tuple(weight_of(one, dims) for one in weights["buffers"]),
        towers=towers,
        unused=frozenset(data["heads"][run].get("unused", ())),
        whole=trained_whole((*start, *final), head),
        casting=row.casting,
        graphs=ChainGraphs(
            row=row,
            head=head,
            run=run,
            data=data,
            dims=dims,
            rates=rates,
            unknown=next(others, "") or unknown_class(fields.config, row.heads),
        ),
    )


def run_of(head: str, fields: Fields, data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The head's name in the file, and the file with what is assumed of this head."""
    if head != CAUSAL or not fields.flag("is_decoder", default=False):
        return head, data
    return DECODING, {**data, "assumed": {**data["assumed"], "is_decoder": True}}


def paths_of(kinds: Sequence[str], lists: Mapping[str, str]) -> tuple[str, ...]:
    """The path of every layer, each list counted by itself."""
    counts: dict[str, int] = {}
    found = []
    for kind in kinds:
        number = counts[lists[kind]] = counts.get(lists[kind], -1) + 1
        found.append(f"{lists[kind]}.{number}")
    return tuple(found)


def trained_whole(parts: Sequence[Module], head: str) -> tuple[str, ...]:
    """The modules of a head of labels."""
    return tuple(
        name
        for name in TRAINED_WHOLE.get(head, ())
        if any(f"{part.name}.".startswith(f"{name}.") for part in parts)
    )


def head_linear(data: Mapping[str, Any], parts: Sequence[Module], dims: Dims) -> Linear:
    """The layer that makes logits of words, which adapters leave out; one of no size where there is
    none."""
    for part in parts:
        for linear in part.linears():
            if linear.name == data["head"]:
                return linear
    outputs, inputs = (evaluated(one, dims) for one in data.get("head_shape", (1, 1)))
    return Linear(name=data["head"], inputs=inputs, outputs=outputs)


__all__ = ["CHAINS", "ChainGraphs", "ChainRow", "Loose", "chained", "key_of", "runs_of"]
