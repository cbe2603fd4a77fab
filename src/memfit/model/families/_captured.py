"""Families that run by captured graphs: a row says how a config becomes dimensions and kinds of
layers; parameters and computation come from the graphs' file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from memfit.errors import InputError
from memfit.graph import Graph, evaluated, graph_of
from memfit.model.config import Fields
from memfit.model.families import Alone, family
from memfit.model.families._graph_files import read_graphs, stored_settings
from memfit.model.families._towers import Tower
from memfit.model.label_heads import LabelRow
from memfit.model.model import Model
from memfit.model.modules import Captured, Embedding, Layer, Linear, Loose, Module, Role, Weight

if TYPE_CHECKING:
    from memfit.model.families._chains import ChainRow

Dims = dict[str, int]
TRACE = "`--by trace` runs the real code instead (extra `trace`)"
# Kernels of attention pad other heads, and what follows then copies (aten attention.cpp).
HEADS, EIGHT = ("head_dim", "hidden_size_each"), 8
PER = "_per_"  # in the names of sizes of heads, where a model has two
ALONE = "@1"  # ends the names of graphs of batches of one sequence, where they differ
PAST = "past."  # begins the names of a cache's tensors
LATE = "late."  # those of what a layer returns and no other one reads
SECOND = "x1"  # what a layer hands to the next one beside `x`
CROSSING = "crossing."  # those of what a layer makes for later ones, beside what it hands on
LONG = "@long"  # the same of sequences that a sliding window cuts, which need a mask
SHORT = 48  # a window that cuts the sequences of every example
# What a graph is captured with, by the end of its file's name. Autocast casts, or not, by the
# weights' dtype; padded batches have masks. Generation has two kinds of passes: the prompt's, and
# those of one token each, of which the second stands for all.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "": {"precision": "bf16", "packing": True},
    "padded": {"precision": "bf16", "packing": False},
    "autocast": {"precision": "autocast-bf16", "packing": True},
    "autocast-padded": {"precision": "autocast-bf16", "packing": False},
    "half-autocast": {"precision": "bf16-autocast", "packing": True},
    "half-autocast-padded": {"precision": "bf16-autocast", "packing": False},
    "prefill": {"task": "inference", "precision": "bf16", "pass": 0},
    "decode": {"task": "inference", "precision": "bf16", "pass": 2},
}
GENERATION = ("prefill", "decode")
Root: TypeAlias = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One family: `dims` and `kinds` read a config; `examples` are the configurations that it is
    captured with, unrelated in all dimensions. `text`: the part of a config that they read.
    `tower`: the weights that lie beside the language model, from the whole config; their names
    begin with one of `idle`. `window`: the field of a sliding window's size; the examples' windows
    are beyond their sequences, and `SHORT` when they are captured once more."""

    name: str
    dims: Callable[[Fields], Dims]
    kinds: Callable[[Fields], Sequence[str]]
    examples: tuple[Mapping[str, Any], ...]
    sizes: tuple[tuple[int, int], ...] = ((3, 88), (7, 104), (11, 152))  # (batch, sequence length)
    active: Callable[[Fields], tuple[int, int]] | None = None  # (experts that run, experts)
    tied: bool = False
    ties: str = ""  # the config that says so: the whole one, its "text", or "either" of them
    silent: tuple[str, ...] = ()  # fields that no code of these layers reads
    absent: tuple[str, ...] = ()  # fields that bring code which was not captured
    loops: tuple[str, ...] = ()  # dimensions that count iterations of its code
    packs: bool = True  # its code does nothing else where weights are packed
    checkpoints: bool = True  # the class supports gradient checkpointing
    derived: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # as of `Graphs`
    positions: str = "max_position_embeddings"
    text: str = ""
    tower: Tower | None = None
    idle: tuple[str, ...] = ("model.visual.",)
    window: str = ""
    # As `derived`, of sequences longer than the window: the blocks of lightning attention, for
    # which the window is the size of one.
    beyond: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    last: tuple[str, ...] = ()  # of these modules, the last one that a model has: as of `Model`
    own_positions: bool = False  # as of `Model`
    scaled: bool = False  # logits are divided by a number
    softcap: str = ""  # the field whose number bounds logits, where it is given
    heads: tuple[str, ...] = ()  # of a class with a tower that has several
    label_heads: tuple[LabelRow, ...] = ()  # as of `Family`


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """A family's graphs with the dimensions of one model. Those of the first of `SETTINGS` are
    at hand, others are read when a job asks for them."""

    family: str
    graphs: Mapping[str, Graph]
    dims: Mapping[str, int]
    derived: Mapping[str, tuple[str, ...]]
    origin: Mapping[str, str]  # the class, its file and checksum, and the versions
    window: int = 0
    blocks: bool = False  # attention by blocks as long as the window, of which one is not cut
    root: Root = ("", "")  # what names begin with as captured, and in this model

    def of(self, name: str, batch: int, seq: int, setting: str) -> Graph:
        """The graph of this name for a batch of this size."""
        graphs = self.all(setting)
        if self.window and seq >= self.window + self.blocks:  # transformers 5.23 masking_utils.py
            name = f"{name}{LONG}" if f"{name}{LONG}" in graphs else name
        alone = graphs.get(f"{name}{ALONE}") if batch == 1 else None
        return graphs[name] if alone is None else alone

    @property
    def settings(self) -> frozenset[str]:
        """Those that it was captured in."""
        return known_settings(self.family)

    @property
    def late(self) -> bool:
        """Whether a layer that generates returns what no other one reads."""
        graphs = self.all("decode").values() if "decode" in self.settings else ()
        return any(name.startswith(LATE) for graph in graphs for name in graph.outputs)

    @property
    def crosses(self) -> bool:
        """Whether a layer reads more of earlier layers than what the one before hands on."""
        names = {name for graph in self.graphs.values() for name in graph.inputs}
        return any(name.startswith(CROSSING) or name == SECOND for name in names)

    def all(self, setting: str) -> Mapping[str, Graph]:
        """Every graph of a setting."""
        return graphs_of(self.family, setting, self.root) if setting else self.graphs

    def holds(self, setting: str) -> bool:
        """Whether the start's result stays until the model returns."""
        return bool(stored(self.family, setting)["holds"])

    def whole(self, batch: int, seq: int) -> Dims:
        """All dimensions of a pass."""
        sizes = {"batch": batch, "seq": seq, "window": self.window}
        return completed({**self.dims, **sizes}, self.derived)


def completed(dims: Dims, derived: Mapping[str, tuple[str, ...]]) -> Dims:
    """With the dimensions that follow from a pass: (length, step) is how many steps it takes,
    rounded up; (a, b, "min") the smaller of two, which stands for the first one then."""
    for name, (first, second, *how) in derived.items():
        one, other = evaluated(first, dims), evaluated(second, dims)
        dims[name] = min(one, other) if how else -(-one // other)
    return dims


def bounded(derived: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """Dimensions that occur as the smaller of themselves and another one alone."""
    return frozenset(first for first, _, *how in derived.values() if how)


ROWS: dict[str, Row] = {}


def captured(
    *rows: Row,
    choose: Callable[[Fields], int] = lambda fields: 0,
    alone: Alone | None = None,
) -> Row:
    """Register a family that runs by graphs, under the name of its first row; `choose` says which
    row's code a config runs, `alone` is as of `Family`."""
    ROWS.update({row.name: row for row in rows})
    examples = tuple(example for row in rows for example in row.examples)

    def build(fields: Fields) -> Model:
        row = rows[choose(fields)]
        model = model_of(row, fields, stored(row.name), graphs_of(row.name))
        return replace(model, family=rows[0].name)

    name, heads = rows[0].name, rows[0].label_heads
    family(name, examples=examples, graphs=True, label_heads=heads, alone=alone)(build)
    return rows[0]


# Graphs of families that have no file yet, by family and setting
MADE: dict[tuple[str, str], Mapping[str, Any]] = {}


@cache
def stored(name: str, setting: str = "") -> Mapping[str, Any]:
    """The file of a family's graphs in a setting."""
    if (name, setting) in MADE:
        return MADE[name, setting]
    return read_graphs(name, setting)


@cache
def graphs_of(name: str, setting: str = "", root: Root = ("", "")) -> Mapping[str, Graph]:
    """A family's graphs, read once."""
    found = parsed(stored(name, setting))
    return found if root == ("", "") else {key: moved(one, *root) for key, one in found.items()}


def moved(graph: Graph, old: str, new: str) -> Graph:
    """A graph whose weights and modules have another beginning of their names."""

    def named(one: Any, mark: str = "") -> Any:
        if not isinstance(one, str) or not f"{one}.".startswith(f"{mark}{old}"):
            return one
        return f"{mark}{new}{one[len(mark) + len(old) :]}".rstrip(".")

    ops = tuple(
        replace(op, where=named(op.where), inputs=tuple(named(one, "$") for one in op.inputs))
        for op in graph.ops
    )
    return replace(graph, ops=ops)


@cache
def known_settings(name: str) -> frozenset[str]:
    """The settings that a family was captured in."""
    made = {setting for family, setting in MADE if family == name}
    return stored_settings(name, tuple(SETTINGS)) | made


def parsed(data: Mapping[str, Any]) -> Mapping[str, Graph]:
    return {key: graph_of(one, data["origin"]) for key, one in data["graphs"].items()}


def model_of(
    row: Row, fields: Fields, data: Mapping[str, Any], graphs: Mapping[str, Graph]
) -> Model:
    """The model of a config: dimensions from the row, everything else from the file."""
    said = fields.value("dtype", "torch_dtype", default=None) is not None
    outer, fields = fields, fields.section(row.text) if row.text else fields
    tied = tied_of(row, outer, fields)
    towers = () if row.tower is None else row.tower(outer)
    if towers and any("ForCausalLM" in one for one in classes(outer)):
        outer.blame("architectures", f"no captured graph of `{row.name}` without its tower", TRACE)
    dims, kinds = row.dims(fields), list(row.kinds(fields))
    positions = fields.count(row.positions, default=2048, high=2**40)
    window = fields.count(row.window) if row.window else 0
    dims |= {"window": window} if row.beyond else {}
    dtype = outer.dtype() if said else fields.dtype()
    share = row.active(fields) if row.active is not None else (1, 1)
    unlike(row, fields, data, dims)
    if fields.problems:
        raise InputError(*fields.problems)
    weights = data["weights"]
    layers = layers_of(row, weights["layers"], kinds, dims, share)
    head = data["head"]
    vocab, width = (evaluated(one, dims) for one in data["head_shape"])
    return Model(
        name=row.name,
        family=row.name,
        prefix=data["prefix"],
        layers=tuple(layers[kind] for kind in kinds),
        tied=tied,
        vocab=vocab,
        width=width,
        embed=start_of(modules(weights["start"], dims)),
        final=(Captured(name="", graph="final", parts=modules(weights["final"], dims)),),
        head=Linear(name=head, inputs=width, outputs=vocab, bias=data.get("head_bias", False)),
        positions=positions,
        dtype=dtype,
        buffers=tuple(weight_of(one, dims) for one in weights["buffers"]),
        towers=towers,
        own_positions=row.own_positions,
        last=last_of(row, towers),
        caching=row.tower is not None and fields.flag("use_cache", default=True),
        heads=row.heads or (("image-text",) if row.tower is not None else ("causal-lm",)),
        logit_scale=row.scaled,
        unused=standing_still([graphs[kind] for kind in dict.fromkeys(kinds)]),
        softcap=bool(row.softcap and fields.config.get(row.softcap)),
        graphs=Graphs(
            family=row.name,
            graphs=graphs,
            dims={**data["constants"], **dims},
            derived={**row.derived, **row.beyond},
            origin=data["origin"],
            window=window,
            blocks=bool(row.beyond),
        ),
    )


def standing_still(graphs: Sequence[Graph]) -> frozenset[str]:
    """The weights of layers that are read under `no_grad` alone, as those of indexers of sparse
    attention are: they get no gradient, and so no optimizer states."""
    reads: dict[bool, set[str]] = {True: set(), False: set()}
    for op in (op for graph in graphs for op in graph.ops):
        names = (one[1:] for one in op.inputs if isinstance(one, str))
        reads[bool(op.attrs.get("no_grad"))].update(names)
    return frozenset(reads[True] - reads[False])


def layers_of(
    row: Row,
    weights: Mapping[str, Any],
    kinds: Sequence[str],
    dims: Mapping[str, int],
    share: tuple[int, int],
) -> dict[str, Layer]:
    """A layer for each kind; `share` of the experts' weights work at a time."""
    if missing := sorted(set(kinds) - weights.keys()):
        raise InputError.one(
            f"no captured graph for layers of kind `{missing[0]}` of `{row.name}`",
            where="config",
            hint=TRACE,
        )
    parts = {kind: modules(weights[kind], dims) for kind in dict.fromkeys(kinds)}
    return {
        kind: Layer(captured=Captured(name="", graph=kind, parts=some, idle=idle(some, share)))
        for kind, some in parts.items()
    }


def tied_of(row: Row, outer: Fields, text: Fields) -> bool:
    """Whether the head is the embedding, by the config that the class asks."""
    places = {"": (outer,), "text": (text,), "either": (outer, text)}[row.ties]
    key = "tie_word_embeddings"
    given = [one for one in places if key in one.config] or places[:1]
    said = [one.flag(key, default=row.tied) for one in given]
    return any(said)


def last_of(row: Row, towers: Sequence[Weight]) -> str:
    """The module of a tower that comes behind the head."""
    held = {one.name for one in towers}
    return next((one for one in reversed(row.last) if f"{one}.weight" in held), "")


def classes(fields: Fields) -> tuple[str, ...]:
    """The classes that a config names."""
    named = fields.value("architectures", default=[])
    if isinstance(named, (list, tuple)) and all(isinstance(one, str) for one in named):
        return tuple(named)
    fields.blame("architectures", "must be a list of class names")
    return ()


def given_of(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """A field of a config, or of its rope parameters."""
    rope = config.get("rope_parameters")
    inner = rope.get(key) if isinstance(rope, Mapping) else None
    return config.get(key, default if inner is None else inner)


def start_of(parts: tuple[Module, ...]) -> tuple[Module, ...]:
    """The token embedding by itself, which a tied head shares, and what else runs first."""
    return parts[0], Captured(name="", graph="start", parts=parts[1:])


def unlike(
    row: Row | ChainRow, fields: Fields, data: Mapping[str, Any], dims: Mapping[str, int]
) -> None:
    """A config that says otherwise than the captured ones, where the code may depend on it."""
    for key in (*HEADS, *(one for one in dims if one.startswith(f"hidden_size{PER}"))):
        if dims.get(key, EIGHT) % EIGHT and not fields.problems:
            message = f"no captured graph of `{row.name}` for heads of {dims[key]} values"
            fields.blame("head_dim" if key == "head_dim" else "hidden_size", message, TRACE)
    for key in row.absent:
        given = fields.config.get(key)
        if given and not (isinstance(given, list) and set(map(str, given)) == {"full"}):
            fields.blame(key, f"no captured graph of `{row.name}` with `{key}`", TRACE)
    for key, value in data["constants"].items():
        if dims.get(key, value) != value and not fields.doubts(key):
            fields.blame(
                key, f"no captured graph of `{row.name}` with `{key}` = {dims[key]}", TRACE
            )
    for key, value in data["assumed"].items():
        given = given_of(fields.config, key, value)
        same = given == value and type(given) is type(value)
        if not same and (given is not None or value is True):  # null is no
            text = json.dumps(given, default=str)[:40] if not big(given) else "a huge number"
            fields.blame(key, f"no captured graph of `{row.name}` with `{key}` = {text}", TRACE)


def big(value: Any) -> bool:
    """Python refuses to print integers of more than 4300 digits."""
    return isinstance(value, int) and value.bit_length() > 200


def modules(rows: Sequence[Sequence[Any]], dims: Mapping[str, int]) -> tuple[Module, ...]:
    """Linear layers and embeddings as such, other weights as they are."""
    found: list[Module] = []
    known = {row[0] for row in rows}
    for row in rows:
        weight = weight_of(row, dims)
        path, _, last = weight.name.rpartition(".")
        if row[2] == "Linear" and last == "weight":
            outputs, inputs = weight.shape
            found.append(
                Linear(
                    name=path,
                    inputs=inputs,
                    outputs=outputs,
                    bias=f"{path}.bias" in known,
                    format=weight.format,
                )
            )
        elif row[2] == "Linear" and f"{path}.weight" in known:
            continue
        elif weight.frozen:
            found.append(Loose(name=path, held=(weight,)))
        elif row[2].endswith("Embedding") and last == "weight" and len(weight.shape) == 2:
            found.append(Embedding(name=path, rows=weight.shape[0], width=weight.shape[1]))
        else:
            found.append(Loose(name=path, held=(weight,)))
    return tuple(found)


def weight_of(row: Sequence[Any], dims: Mapping[str, int]) -> Weight:
    name, shape, kind, format, buffer, *frozen = row
    return Weight(
        name=name,
        shape=tuple(evaluated(one, dims) for one in shape),
        role="buffer" if buffer else role_of(name, kind, len(shape)),
        format="" if format == "model" else format,
        frozen=bool(frozen),
    )


def role_of(name: str, kind: str, count: int) -> Role:
    if kind == "Linear":
        return "linear" if name.endswith("weight") else "bias"
    if "Norm" in kind:
        return "norm"
    if count == 3 and "xpert" in kind:
        return "expert"
    if "Router" in kind or "Gate" in kind:
        return "router"
    return "embedding" if kind.endswith("Embedding") else "other"


def idle(parts: Sequence[Module], share: tuple[int, int]) -> int:
    """Parameters of experts that a token passes by."""
    active, experts = share
    held = sum(
        weight.count for part in parts for weight in part.weights() if weight.role == "expert"
    )
    return held - held * active // experts


def each(fields: Fields, *keys: str) -> Dims:
    """These fields, by their own names."""
    return {key: fields.count(key) for key in keys}


def variants(
    base: Mapping[str, Any], sizes: Mapping[str, Sequence[int]], *others: Mapping[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    """A configuration for each column of `sizes`; `others` are what the columns have beside."""
    count = len(next(iter(sizes.values())))
    return tuple(
        {
            **base,
            **{key: values[number] for key, values in sizes.items()},
            **(others[number] if number < len(others) else {}),
        }
        for number in range(count)
    )


def alternating(fields: Fields, every: int, first: str, last: str) -> list[str]:
    """The kinds that `layer_types` lists, or `last` for each `every`th layer."""
    count = fields.layers()
    default = [last if (number + 1) % every == 0 else first for number in range(count)]
    return [str(one) for one in fields.listing("layer_types", count, default)]


def ratio(fields: Fields, dims: Dims, large: str, small: str) -> None:
    """How many of the one come on each of the other, as `large_each`."""
    fields.divides(dims[small], dims[large], small, f"`{large}`")
    dims[f"{large}_each"] = dims[large] // dims[small]


__all__ = [
    "CROSSING",
    "GENERATION",
    "LATE",
    "PAST",
    "ROWS",
    "SETTINGS",
    "Graphs",
    "Row",
    "captured",
    "each",
    "field",
    "known_settings",
    "model_of",
    "replace",
]


def rows() -> Iterator[Row]:
    """Every family that runs by graphs."""
    from memfit.model.families import families

    families()
    return iter(ROWS.values())
