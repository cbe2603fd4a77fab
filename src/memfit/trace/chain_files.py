"""Captures a family of encoders, or of encoders with a decoder, as the JSON that is shipped: the
graphs of each head, with and without a padding mask, and the weights."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers

import torch
from memfit.errors import InputError
from memfit.graph import Graph, check, json_of
from memfit.graph.solve import Solver, Unsolved
from memfit.job import Job
from memfit.model.config import Fields
from memfit.model.families._captured import LATE, completed
from memfit.model.families._chains import (
    CACHED,
    CAUSAL,
    DECODING,
    ENCODED,
    HANDED,
    HELD,
    ChainRow,
    key_of,
    runs_of,
)
from memfit.trace import samples
from memfit.trace.capture import Call, Run, forward_of
from memfit.trace.chain_pieces import ENDS, Chain, carried, chain_of, led, list_of, passed_on
from memfit.trace.depth import by_depth
from memfit.trace.graph_files import assumed, solved_shape
from memfit.trace.paths import layer_of
from memfit.trace.probes import precision_of
from memfit.trace.samples import trained_titles
from memfit.trace.segments import FINAL, Piece, Refused, graph_from, relative, shape_of

LABELS, SPANS = "num_labels", 2  # a span of an answer has two ends
# With a mask of padding or none, and with one sequence or several.
SETTINGS = (False, False), (True, False), (False, True), (True, True)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run a family (a head, a mask or none, one sequence or several) at some sizes."""

    runs: Sequence[Run]
    chains: Sequence[Chain]
    dims: Sequence[Mapping[str, int]]
    solver: Solver
    kinds: Mapping[str, str]  # layer -> kind
    graphs: Mapping[str, Graph]
    returned: tuple[str, ...]  # names of shared values that the model returns


def chain_file(row: ChainRow) -> dict[str, Any]:
    """The file of one family; raises InputError where a piece cannot be written exactly."""
    try:
        return written(row)
    except (Refused, Unsolved) as bad:
        raise InputError.one(f"`{row.name}` cannot be captured: {bad}", where="model") from None


def written(row: ChainRow) -> dict[str, Any]:
    index: dict[str, int] = {}
    graphs: list[Any] = []
    known: dict[str, int] = {}
    heads: dict[str, Any] = {}
    first: Setting | None = None
    for head, _ in runs_of(row):
        for form, (masked, alone) in itertools.product(forms_of(row, head), SETTINGS):
            found = setting(in_form(row, form), head, masked, alone)
            for name, graph in found.graphs.items():
                data = json_of(graph)
                text = json.dumps(data)
                if text not in known:
                    known[text] = len(graphs)
                    graphs.append(data)
                index[key_of(name, head, masked, alone, form)] = known[text]
            if head not in heads:
                heads[head] = of_head(row, found, head)
                lists = lists_of(found)
                if first is not None and lists != lists_of(first):
                    heads[head]["lists"] = lists
                if head == DECODING or (row.pairs and head == CAUSAL):
                    heads[head]["caches"] = caches(row, found, head)
            heads[head].setdefault(f"inputs{'+mask' if masked else ''}", inputs_of(found))
            first = first or found
    assert first is not None
    source = Path(first.runs[0].file)
    return {
        "family": row.name,
        "origin": {
            "class": first.runs[0].cls,
            "file": "/".join(source.parts[-4:]),
            "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "lists": lists_of(first),
        "constants": {name: first.dims[0][name] for name in first.solver.constant_names},
        "assumed": {
            key: value
            for key, value in assumed(row, first.dims[0]).items()
            if key not in (*row.rates, row.depth)
        },
        "heads": heads,
        "index": dict(sorted(index.items())),
        "graphs": graphs,
    }


def forms_of(row: ChainRow, head: str) -> tuple[str, ...]:
    """The forms that a head is captured in. Decoders have the first alone: those of blocks and
    windows are refused by their classes (transformers 5.23 modeling_big_bird.py)."""
    return ("",) if head == DECODING else tuple(dict.fromkeys(("", *row.forms)))


def in_form(row: ChainRow, form: str) -> ChainRow:
    """The row with the sizes of one form. One that is not listed is that of sequences seen whole,
    which have no blocks."""
    if not row.forms:
        return row
    sizes = row.forms.get(form, row.sizes)
    return replace(row, sizes=sizes, derived=row.derived if form in row.forms else {})


def lists_of(found: Setting) -> dict[str, str]:
    """Where the layers of each kind are in the model."""
    return {kind: list_of(layer) for layer, kind in found.kinds.items()}


def setting(row: ChainRow, head: str, masked: bool, alone: bool) -> Setting:
    runs: list[Run] = []
    dims: list[dict[str, int]] = []
    for config, (batch, seq, target, labels) in zip(row.examples, row.sizes, strict=True):
        batch = 1 if alone else batch
        config = labelled(config, head, labels)
        job = Job(
            task="pretrain",
            batch=batch,
            seq=seq,
            head=dict(runs_of(row))[head],
            packing=not masked,
            target_seq=target if row.pairs else 0,
            precision=precision_of(config),
        )
        run = forward_of(config, job)
        mark_made(run, config, job)
        leave_tower(run, row, config)
        runs.append(run)
        found = {**row.dims(Fields(config)), "labels": labels, "batch": batch, "seq": seq}
        found |= {"target": target} if row.pairs else {}
        dims.append(dict(completed(found, row.derived)))
    solver = Solver(dims, row.derived)
    solver.check()
    chains = [chain_of(run) for run in runs]
    layers = chains[0].layers
    listed = row.layers(Fields(row.examples[0]), dict(runs_of(row))[head])
    if any(chain.layers != layers for chain in chains) or len(listed) != len(layers):
        raise Refused(f"{len(layers)} layers run where the config has {len(listed)}")
    kinds = dict(zip(layers, listed, strict=True))
    graphs, passing = graphs_of(chains, kinds, solver, runs[0].dtype)
    for name, graph in graphs.items():
        for problem in check(graph, set(dims[0])):
            raise Refused(f"graph `{name}`: {problem.message} at {problem.where}")
    places = {kind: next(one for one in layers if kinds[one] == kind) for kind in listed}
    places |= {name: name for name in ENDS}
    graphs = samples.templated(
        dict(graphs), [one.pieces for one in chains], places, solver, runs[0].dtype, passing
    )
    return Setting(
        runs=runs,
        chains=chains,
        dims=dims,
        solver=solver,
        kinds=kinds,
        graphs={name: with_rates(graph, row) for name, graph in graphs.items()},
        returned=returned_of(chains[0], kinds),
    )


def leave_tower(run: Run, row: ChainRow, config: Mapping[str, Any]) -> None:
    """Forget the weights that the row itself says."""
    held = {one.name for one in row.tower(Fields(config))} if row.tower is not None else set()
    run.weights[:] = [one for one in run.weights if one.name not in held]


# What makes tensors of nothing but a size and a dtype.
MADE = ("aten::zeros", "aten::ones", "aten::full")


def mark_made(run: Run, config: Mapping[str, Any], job: Job) -> None:
    """Mark the tensors whose dtype the model's own code takes from one that autocast has made
    narrower, and those whose gradient it asks for under gradient checkpointing (modeling_t5.py
    T5Attention.forward)."""
    made = made_of_nothing(run)
    if not made:
        return
    narrow = forward_of(config, job.replace(precision="autocast-bf16"))
    leaves = forward_of(config, job, leaves=True)
    runs = (made, made_of_nothing(narrow), made_of_nothing(leaves))
    for one, under, leaf in zip(*runs, strict=True):
        marks = {"narrow": True} if under.outputs[0].format == "bfloat16" else {}
        marks |= {"leaf": True} if leaf.attrs.get("leaf") else {}
        one.attrs.update(marks)  # type: ignore[attr-defined]


def made_of_nothing(run: Run) -> list[Call]:
    floats = ("float32", "bfloat16")
    return [
        one
        for one in run.log
        if isinstance(one, Call) and one.name in MADE and one.outputs[0].format in floats
    ]


def labelled(config: Mapping[str, Any], head: str, labels: int) -> dict[str, Any]:
    """The config of a model with this head that tells so many labels apart."""
    if head == DECODING:
        config = {**config, "is_decoder": True}
    return {**config, LABELS: SPANS if head == "question-answering" else labels}


# ------------------------------------------------------------------------------------------ graphs
def graphs_of(
    chains: Sequence[Chain], kinds: Mapping[str, str], solver: Solver, dtype: str
) -> tuple[dict[str, Graph], dict[str, frozenset[str]]]:
    """One graph a kind and one for each end; and which inputs of each take a gradient."""
    chain = chains[0]
    follow = carried(chain)
    through = passed_on(chain, follow)
    found: dict[str, Graph] = {}
    shapes: dict[str, tuple[str, Any]] = {}
    passing: dict[str, frozenset[str]] = {}
    trained: set[str] = set()  # titles that a gradient goes to
    for place, piece in chain.pieces.items():
        name = kinds.get(place, place)
        prefix = place if place in kinds else ""
        roles = {title: role_of(title, follow.get(place, ""), kinds) for title in piece.given}
        roles |= {title: ENCODED for title in piece.given if title == through}
        roles |= {title: chain.handed[title] for title in piece.given if title in chain.handed}
        leaving = leaving_of(chain, place, follow, kinds)
        own = frozenset(roles[one] for one in piece.given if one in trained) | {"x"}
        shape = shape_of(piece, prefix), sorted(roles.values()), sorted(leaving.values()), own
        if name in shapes:
            if shapes[name][1] != shape:
                raise Refused(f"`{place}` differs from `{shapes[name][0]}`, both `{name}`")
        else:
            shapes[name] = place, shape
            graph = graph_from(
                [one.pieces[place] for one in chains], prefix, solver, dtype, roles, {}
            )
            found[name] = with_earlier(with_ends(graph, piece, leaving), chain)
            passing[name] = own
        trained |= trained_titles(found[name], piece, passing[name])
    return found, passing


def with_ends(graph: Graph, piece: Piece, leaving: Mapping[str, int]) -> Graph:
    """With what leaves it, and with the moments at which it lets go what others made."""
    ends = {one: piece.values[one].until for one in piece.given.values()}
    values = tuple(
        replace(one, until=ends[one.id]) if ends.get(one.id) is not None else one
        for one in graph.values
    )
    return replace(graph, values=values, outputs=dict(leaving))


def with_earlier(graph: Graph, chain: Chain) -> Graph:
    """With what the layer before made, where this one overwrites the variable that has it."""
    numbers = {name: one for name, one in graph.outputs.items() if name.startswith(LATE)}
    values, inputs = list(graph.values), dict(graph.inputs)
    for name, number in numbers.items():
        if number in chain.overwritten:
            inputs[name] = len(values)
            like = graph.values[number]
            until = chain.overwritten[number]
            values.append(replace(like, id=len(values), of=None, until=until))
    return replace(graph, values=tuple(values), inputs=inputs)


def role_of(title: str, follow: str, kinds: Mapping[str, str]) -> str:
    if title == follow:
        return "x"
    place, _, number = title.rpartition(":")
    return number if place == "input" else f"{kinds.get(place, place)}_{number}"


def leaving_of(
    chain: Chain, place: str, follow: Mapping[str, str], kinds: Mapping[str, str]
) -> dict[str, int]:
    """What leaves a piece, by the names under which others read it: `x` for the next one, others
    for all; and what the model returns."""
    piece = chain.pieces[place]
    found: dict[str, int] = {}
    readers = {
        title: [one for one, other in chain.pieces.items() if title in other.given]
        for title in piece.left
    }
    for title, number in piece.left.items():
        if title in follow.values():
            found["x"] = number
            if len(readers[title]) == 1 or title == passed_on(chain, follow):
                continue
        if title not in chain.handed:
            found[role_of(title, "", kinds)] = number
    found |= {
        name: int(title.rpartition(":")[2])
        for title, name in chain.handed.items()
        if title.rpartition(":")[0] == place
    }
    late = {int(one.rpartition(":")[2]) for one in chain.late if one.rpartition(":")[0] == place}
    if place in kinds:
        found |= {f"{LATE}{number}": number for number in sorted(late)}
        ours = [one for one in chain.held if one.rpartition(":")[0] == place]
        held = sorted(int(one.rpartition(":")[2]) for one in ours)
        found |= {f"{HELD}{number}": number for number in held}
        found |= cached(piece, set(found.values()))
    for name, (at, number) in chain.results.items():
        if at == place and place == FINAL:
            found[name] = number
        elif at == place and f"{at}:{number}" == passed_on(chain, follow):
            continue
        elif at == place and number not in found.values():
            found[role_of(f"{place}:{number}", "", kinds)] = number
    repeated = list(kinds.values()).count(kinds.get(place, place)) > 1
    if repeated and any(
        name != "x" and not name.startswith((CACHED, HANDED, HELD, LATE)) for name in found
    ):
        raise Refused(f"`{place}`, one of several layers alike, makes values that others read")
    return found


def cached(piece: Piece, leaving: set[int]) -> dict[str, int]:
    """What a layer makes and somebody else still has when the model returns: keys and values."""
    outside = {*piece.given.values(), *leaving}
    return {
        f"{CACHED}{one.id}": one.id
        for one in piece.values
        if one.of is None and not one.gone and one.until is None and one.id not in outside
    }


def returned_of(chain: Chain, kinds: Mapping[str, str]) -> tuple[str, ...]:
    """What the model returns beside the loss: names of shared values, or of results of the end."""
    found = []
    follow = carried(chain)
    for name, (at, number) in chain.results.items():
        if name != "loss":
            title = f"{at}:{number}"
            through = title == passed_on(chain, follow)
            other = ENCODED if through else role_of(title, "", kinds)
            found.append(name if at == FINAL else other)
    return tuple(found)


def with_rates(graph: Graph, row: ChainRow) -> Graph:
    """Dropout by the field of the config that gives its rate, which examples have one of their own
    for each."""
    fields = {given_rate(row.examples[0], name): name for name in row.rates}
    ops = []
    for op in graph.ops:
        rate = op.attrs.get("p")
        if isinstance(rate, float) and rate > 0:
            if rate not in fields:
                raise Refused(f"no field of the config has the rate {rate} of `{op.where}`")
            op = replace(op, attrs={**op.attrs, "p": fields[rate]})
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def given_rate(config: Mapping[str, Any], name: str) -> float:
    """A field of dropout, which may be in a section: `text_config.attention_dropout`."""
    for part in name.split("."):
        config = config[part]
    return float(config)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------- weights
def of_head(row: ChainRow, found: Setting, head: str) -> dict[str, Any]:
    """The class of a head, its weights by the piece that holds them, and what the model returns."""
    first = found.runs[0]
    data: dict[str, Any] = {
        "class": first.cls,
        "head": first.head,
        "returned": list(found.returned),
        "shared": shared_weights(found),
        "history": found.chains[0].history,
    }
    if first.head:
        data["head_shape"] = solved_shape(found.runs, first.head + ".weight", found.solver)
    if unused := unused_weights(found):
        data["unused"] = unused
    return data | {"weights": weights_of(found, growing(row, found, head))}


def caches(row: ChainRow, found: Setting, head: str) -> bool:
    """Whether the class makes a cache as it trains, where its config asks for one."""
    batch, seq, _, labels = row.sizes[0]
    config = labelled(row.examples[0], head, labels)
    job = Job(
        task="pretrain",
        batch=batch,
        seq=seq,
        head=CAUSAL,
        packing=True,
        precision=precision_of(config),
    )
    run = forward_of(config, job, caching=True)
    return len(run.log) != len(found.runs[0].log)  # keys and values are not let go


def shared_weights(found: Setting) -> list[str]:
    """Tables that several operations read, whose gradients are summed."""
    reads: dict[str, int] = {}
    for piece in found.chains[0].pieces.values():
        for some in piece.reads:
            for one in some:
                if isinstance(one, str):
                    reads[one[1:]] = reads.get(one[1:], 0) + 1
    parameters = {one.name for one in found.runs[0].weights if not one.buffer}
    names = {name for name, count in reads.items() if count > 1 and name in parameters}
    return sorted({relative(name, holder(found, name)) for name in names})


def holder(found: Setting, name: str) -> str:
    """The layer that has this weight; empty where none has."""
    layer = led(layer_of(name), found.chains[0].leaders)
    return layer if layer in found.kinds else ""


def unused_weights(found: Setting) -> list[str]:
    """Parameters that nothing on the way to the loss reads: those of attention over an encoder that
    is not there, of entities that a text does not name (LUKE), of a pooler whose result is only
    returned (FNet)."""
    chain = found.chains[0]
    reads = {
        one[1:]
        for name, piece in chain.pieces.items()
        for some in (to_the_loss(piece, chain) if name == FINAL else piece.reads)
        for one in some
        if isinstance(one, str)
    }
    names = {one.name for one in found.runs[0].weights if not one.buffer} - reads
    return sorted({relative(name, holder(found, name)) for name in names})


def to_the_loss(piece: Piece, chain: Chain) -> Iterator[tuple[int | str | None, ...]]:
    """What operations of the last piece read whose results the loss is made of."""
    wanted = {number for name, (_, number) in chain.results.items() if name == "loss"}
    for reads, makes in zip(reversed(piece.reads), reversed(piece.makes), strict=True):
        if not chain.results.keys() >= {"loss"} or wanted & {*makes, *map(piece.root, makes)}:
            wanted |= {one for one in reads if isinstance(one, int)}
            wanted |= {piece.root(one) for one in reads if isinstance(one, int)}
            yield reads


def growing(row: ChainRow, found: Setting, head: str) -> Mapping[str, list[str | int]]:
    """The weights outside of the layers that grow with the number of layers."""
    if not row.depth:
        return {}
    configs = [
        labelled(config, head, labels)
        for config, (*_, labels) in zip(row.examples, row.sizes, strict=True)
    ]
    names = [
        one.name for one in found.runs[0].weights if not (one.buffer or holder(found, one.name))
    ]
    return by_depth(configs, row.depth, dict(runs_of(row))[head], names, found.dims)


def weights_of(found: Setting, deeper: Mapping[str, list[str | int]]) -> dict[str, Any]:
    tables = [{weight.name: weight for weight in run.weights} for run in found.runs]
    ends: dict[str, list[Any]] = {"start": [], "final": [], "buffers": []}
    layers: dict[str, list[Any]] = {}
    seen: dict[str, str] = {}
    for weight, solved in solved_weights(found, tables):
        layer = holder(found, weight.name)
        format = "model" if weight.format == found.runs[0].dtype else weight.format
        solved = deeper.get(weight.name, solved)
        row = [weight.name, solved, weight.module, format, weight.buffer]
        row += [True] if weight.frozen else []
        if layer:
            kind = found.kinds[layer]
            if seen.setdefault(kind, layer) == layer:
                layers.setdefault(kind, []).append([relative(weight.name, layer), *row[1:]])
        else:
            ends["buffers" if weight.buffer else "final" if seen else "start"].append(row)
    return {**ends, "layers": layers}


def solved_weights(
    found: Setting, tables: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Any, list[str | int]]]:
    for weight in found.runs[0].weights:
        shapes = [table[weight.name].shape for table in tables]
        try:
            yield weight, [found.solver.solved(sizes) for sizes in zip(*shapes, strict=True)]
        except Unsolved as bad:
            raise Refused(f"`{weight.name}`: {bad}") from None


def inputs_of(found: Setting) -> list[Any]:
    """What the model is given, in the order in which it is made."""
    rows = []
    for name, ref in found.runs[0].inputs.items():
        shapes = [run.inputs[name].shape for run in found.runs]
        shape = [found.solver.solved(sizes) for sizes in zip(*shapes, strict=True)]
        rows.append([name, shape, "model" if ref.format == found.runs[0].dtype else ref.format])
    return rows


__all__ = ["chain_file"]
