"""Captures a family: its graphs, one for each kind of layer, and its weights, as the JSON that is
shipped with memfit."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import transformers

import torch
from memfit.errors import InputError
from memfit.graph import Graph, Loop, check, json_of
from memfit.graph.solve import Solver, Unsolved
from memfit.job import Job
from memfit.model.config import Fields
from memfit.model.families._captured import (
    ALONE,
    GENERATION,
    LONG,
    SETTINGS,
    SHORT,
    Row,
    bounded,
    completed,
)
from memfit.model.families._chains import ChainRow
from memfit.trace import samples
from memfit.trace.capture import Run, Weight, forward_of
from memfit.trace.capture_generation import TOKENS, alike, passes_of
from memfit.trace.layer_graphs import (
    alike_in_number,
    argument,
    layer_graphs,
    passing_of,
    shared_names,
    stand_ins,
)
from memfit.trace.loops import cut_down
from memfit.trace.segments import (
    FINAL,
    INPUT,
    START,
    TAIL,
    Piece,
    Refused,
    graph_from,
    pieces,
    relative,
)

# Fields of a config that no code of the layers depends on.
SILENT = re.compile(
    r".*_token_id|.*token_index|bos_|eos_|rope_.*|.*_eps|.*epsilon|initializer.*|.*_std|architectures|"
    r"dtype|torch_dtype|_name_or_path|transformers_version|model_type|use_cache|return_dict|"
    r"output_.*|id2label|label2id|num_labels|chunk_size_feed_forward|problem_type|is_encoder_decoder|"
    r"max_position_embeddings|pretraining_tp|tie_word_embeddings|router_aux_loss_coef|time_step_.*|"
    r"original_max_position.*|rescale.*|norm_epsilon|.*_multiplier|attention_multiplier|partial_rotary.*"
)


WINDOWS = (SHORT, 58, 37)  # where a cache has as many tokens, less one


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A family captured at some sizes: what ran, and the graphs that say it exactly."""

    runs: Sequence[Run]
    dims: Sequence[Mapping[str, int]]
    solver: Solver
    cut: Sequence[Mapping[str, Piece]]
    kinds: Sequence[Sequence[str]]  # of each example
    prefix: str
    carried: str
    graphs: Mapping[str, Graph]


def family_file(row: Row, chosen: str = "") -> dict[str, Any]:
    """The file of one family in one of `SETTINGS`; raises InputError where a piece cannot be
    written exactly."""
    options = SETTINGS[chosen]
    try:
        general = setting(row, row.sizes, options)
        graphs = by_batch(row, general, options)
        if row.window:
            varied = chosen in GENERATION or row.beyond
            windows = WINDOWS if varied else (SHORT,) * len(row.examples)
            cut = (windowed(row, *one) for one in zip(row.examples, windows, strict=True))
            short = replace(row, examples=tuple(cut), derived={**row.derived, **row.beyond})
            graphs |= by_window(
                graphs, by_batch(short, setting(short, row.sizes, options), options)
            )
        whole = written(row, general, graphs)
        return {"family": row.name, "setting": chosen, **part(whole)} if chosen else whole
    except (Refused, Unsolved) as bad:
        raise InputError.one(f"`{row.name}` cannot be captured: {bad}", where="model") from None


def by_batch(row: Row, general: Setting, options: Mapping[str, Any]) -> dict[str, Graph]:
    """The graphs, and those of a single sequence where they differ."""
    single = setting(row, [(1, seq) for _, seq in row.sizes], options)
    graphs = dict(general.graphs)
    for name, graph in single.graphs.items():
        if unlike(graph, graphs[name]):
            graphs[f"{name}{ALONE}"] = graph
    return graphs


def by_window(whole: Mapping[str, Graph], cut: Mapping[str, Graph]) -> dict[str, Graph]:
    """The graphs of sequences that a window cuts, of pieces where one of them differs."""
    names = [name for name in cut if not name.endswith(ALONE)]
    found: dict[str, Graph] = {}
    for name in names:
        some = [one for one in (name, f"{name}{ALONE}") if one in cut]
        before = [one for one in (name, f"{name}{ALONE}") if one in whole]
        if some != before or any(unlike(cut[one], whole[one]) for one in some):
            found |= {one.replace(name, f"{name}{LONG}"): cut[one] for one in some}
    return found


def unlike(one: Graph, other: Graph) -> bool:
    """Whether they do something else, or read what other pieces call otherwise."""
    names = [(tuple(graph.inputs), tuple(graph.outputs)) for graph in (one, other)]
    return outline(one) != outline(other) or names[0] != names[1]


def windowed(row: Row, config: Mapping[str, Any], window: int) -> Mapping[str, Any]:
    """An example with a window that cuts its sequences."""
    if row.text:
        return {**config, row.text: {**config[row.text], row.window: window}}
    return {**config, row.window: window}


def part(whole: Mapping[str, Any]) -> dict[str, Any]:
    """What a file of another setting than the first has: weights are the same in all."""
    return {key: whole[key] for key in ("origin", "holds", "graphs")}


def outline(graph: Graph) -> Any:
    """What a graph does, whatever the sizes: strides of a dimension of one say nothing."""
    ops = [(op.name, op.inputs, op.outputs, op.where, op.templates.keys()) for op in graph.ops]
    return ops, [(one.of, one.until, one.format) for one in graph.values], graph.loops


def setting(row: Row, sizes: Sequence[tuple[int, int]], options: Mapping[str, Any]) -> Setting:
    """Run the examples at these (batch, sequence length), and write the graphs."""
    runs: list[Run] = []
    dims: list[dict[str, int]] = []
    kept_out = bounded(row.derived)
    serving = options.get("task") == "inference"
    for config, (batch, seq) in zip(row.examples, sizes, strict=False):
        run, length = ran(config, batch, seq, options)
        runs.append(run)
        found = {**row.dims(text_of(row, config)), "batch": batch, "seq": length}
        if row.window and (serving or row.beyond):
            found["window"] = text_of(row, config).count(row.window)
        found = completed(found, row.derived)
        dims.append({key: size for key, size in found.items() if key not in kept_out})
    solver = Solver(dims, row.beyond)
    solver.check()
    cut = [pieces(run, run.head) for run in runs]
    counted = (*row.derived, *row.loops)
    prefix = prefix_of(cut[0])
    listed = [list(row.kinds(text_of(row, one))) for one in row.examples[: len(runs)]]
    kinds = listed[0]
    cut = [alike_in_number(run, prefix, own, kinds) for run, own in zip(cut, listed, strict=True)]
    loops = short_loops(cut, dims, counted, blocks=bool(row.beyond))
    dtype = runs[0].dtype
    graphs, handed = layer_graphs(cut, prefix, kinds, solver, dtype)
    shared = shared_names(cut[0][START], handed)
    graphs[START] = start_graph(cut, solver, dtype, handed | shared)
    graphs[FINAL] = final_graph(cut, solver, dtype, f"{prefix}.{len(kinds) - 1}", shared)
    for name, graph in graphs.items():
        for problem in check(graph, set(dims[0])):
            raise Refused(f"graph `{name}`: {problem.message} at {problem.where}")
    graphs = {
        name: replace(one, loops=loops.get(piece_of(name, prefix, kinds), ()))
        for name, one in graphs.items()
    }
    places = {name: piece_of(name, prefix, kinds) for name in graphs}
    if serving:
        graphs = samples.with_buffers(graphs, cut, places, solver, dtype)
    else:
        passing = passing_of(graphs, cut[0], prefix, kinds)
        graphs = samples.templated(graphs, cut, places, solver, dtype, passing)
    return Setting(
        runs=runs,
        dims=dims,
        solver=solver,
        cut=cut,
        kinds=listed,
        prefix=prefix,
        carried=next(title for title, name in handed.items() if name == "x"),
        graphs=graphs,
    )


def ran(
    config: Mapping[str, Any], batch: int, seq: int, options: Mapping[str, Any]
) -> tuple[Run, int]:
    """A training forward, or one pass of `generate`; and how many tokens attention sees in it."""
    if options.get("task") != "inference":
        return forward_of(dict(config), Job(task="pretrain", batch=batch, seq=seq, **options)), seq
    given = {key: value for key, value in options.items() if key != "pass"}
    job = Job(batch=batch, seq=seq, new_tokens=TOKENS, **given)
    number = options["pass"]
    passes = passes_of(dict(config), job)
    if number and not all(alike(passes[number], one) for one in passes[1:]):
        raise Refused("passes over one token differ")
    return passes[number], seq + number


def text_of(row: Row, config: Mapping[str, Any]) -> Fields:
    """The part of a config that the row reads."""
    fields = Fields(config)
    return fields.section(row.text) if row.text else fields


def written(row: Row, found: Setting, graphs: Mapping[str, Graph]) -> dict[str, Any]:
    """As JSON, with the weights and where it is from."""
    first, solver = found.runs[0], found.solver
    source = Path(first.file)
    return {
        "family": row.name,
        "origin": {
            "class": first.cls,
            "file": "/".join(source.parts[-4:]),
            "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        },
        "prefix": found.prefix,
        "head": first.head,
        "head_shape": solved_shape(found.runs, first.head + ".weight", solver),
        **({"head_bias": True} if head_bias(first) else {}),
        "holds": holds(found.cut[0], found.carried),
        "constants": {name: found.dims[0][name] for name in solver.constant_names},
        "assumed": assumed(row, found.dims[0]),
        "weights": weights_of(row, found.runs, found.prefix, found.kinds, solver),
        "graphs": {name: json_of(graph) for name, graph in graphs.items()},
    }


def piece_of(name: str, prefix: str, kinds: Sequence[str]) -> str:
    return name if name in (START, FINAL) else f"{prefix}.{kinds.index(name)}"


def short_loops(
    cut: list[dict[str, Piece]],
    dims: Sequence[Mapping[str, int]],
    names: Sequence[str],
    blocks: bool = False,
) -> dict[str, tuple[Loop, ...]]:
    """Cut every piece's loops down; returns them by piece."""
    found: dict[str, tuple[Loop, ...]] = {}
    counts = [[one[name] for name in names] for one in dims]
    for name in cut[0]:
        if name == TAIL or any(name not in run for run in cut):
            continue
        shorter, loops = cut_down([run[name] for run in cut], counts, names, blocks)
        for run, piece in zip(cut, shorter, strict=True):
            run[name] = piece
        found[name] = tuple(Loop(start=a, period=b, count=c) for a, b, c in loops)
    return found


def prefix_of(cut: Mapping[str, Piece]) -> str:
    layers = [name for name in cut if name not in (START, FINAL, TAIL)]
    found = {name.rpartition(".")[0] for name in layers}
    if len(found) != 1:
        raise Refused(f"layers lie in {len(found)} lists: {', '.join(sorted(found)) or 'none'}")
    return found.pop()


def start_graph(
    cut: Sequence[Mapping[str, Piece]], solver: Solver, dtype: str, leaving: Mapping[str, str]
) -> Graph:
    titles = [title for title in cut[0][START].given if title.startswith(INPUT)]
    roles = {title: argument(title) for title in titles}
    if unknown := sorted(set(roles.values()) - {"ids", "mask", "positions"}):
        raise Refused(f"the model reads `{unknown[0]}`")
    return graph_from([run[START] for run in cut], "", solver, dtype, roles, leaving)


def final_graph(
    cut: Sequence[Mapping[str, Piece]],
    solver: Solver,
    dtype: str,
    last: str,
    shared: Mapping[str, str],
) -> Graph:
    if any(FINAL not in run for run in cut):
        raise Refused("nothing runs between the last layer and the head")
    piece = cut[0][FINAL]
    roles = {title: "x" for title in piece.given if title.startswith(f"{last}:")}
    leaving = {title: "x" for title in piece.left if title in cut[0][TAIL].given}
    if len(roles) != 1 or len(leaving) != 1:
        raise Refused(f"the head takes {len(leaving)} values")
    return graph_from([run[FINAL] for run in cut], "", solver, dtype, {**roles, **shared}, leaving)


def holds(run: Mapping[str, Piece], carried: str) -> bool:
    """Whether the start's result is referred to until the model returns."""
    value = run[START].values[run[START].left[carried]]
    while value.of is not None:
        value = run[START].values[value.of]
    return value.gone in ("", FINAL, TAIL)


def solved_shape(runs: Sequence[Run], name: str, solver: Solver) -> list[str | int]:
    shapes = []
    for run in runs:
        known = {weight.name: weight for weight in run.weights}
        weight = known.get(name) or known[run.names[run.head_block]]
        shapes.append(weight.shape)
    return [solver.solved(sizes) for sizes in zip(*shapes, strict=True)]


def head_bias(run: Run) -> bool:
    """Whether logits have a bias."""
    return any(weight.name == f"{run.head}.bias" for weight in run.weights)


def weights_of(
    row: Row, runs: Sequence[Run], prefix: str, listed: Sequence[Sequence[str]], solver: Solver
) -> dict[str, Any]:
    """Weights by the piece that holds them, relative to their layer; those of towers come from the
    row."""
    first, kinds = runs[0], listed[0]
    tables = [tables_of(run, prefix, own, kinds) for run, own in zip(runs, listed, strict=True)]
    start: list[Any] = []
    final: list[Any] = []
    buffers: list[Any] = []
    layers: dict[str, list[Any]] = {}
    seen: dict[str, str] = {}
    begun = False
    for weight in first.weights:
        if row.tower is not None and weight.name.startswith(row.idle):
            continue
        shapes = [table[weight.name].shape for table in tables]
        try:
            shape = [solver.solved(sizes) for sizes in zip(*shapes, strict=True)]
        except Unsolved as bad:
            raise Refused(f"`{weight.name}`: {bad}") from None
        format = "model" if weight.format == first.dtype else weight.format
        number = layer_number(weight.name, prefix)
        if number is not None:
            begun = True
            name = f"{prefix}.{number}"
            kind = kinds[number]
            if seen.setdefault(kind, name) == name:
                layers.setdefault(kind, []).append(
                    [relative(weight.name, name), shape, weight.module, format, weight.buffer]
                )
            continue
        if weight.name.startswith(f"{first.head}."):
            continue
        entry = [weight.name, shape, weight.module, format, weight.buffer]
        (buffers if weight.buffer else final if begun else start).append(entry)
    return {"start": start, "layers": layers, "final": final, "buffers": buffers}


def tables_of(run: Run, prefix: str, own: Sequence[str], kinds: Sequence[str]) -> dict[str, Weight]:
    """A run's weights by the names that they have where layers are of the kinds `kinds`."""
    known = {weight.name: weight for weight in run.weights}
    if own == kinds:
        return known
    found = {name: one for name, one in known.items() if layer_number(name, prefix) is None}
    for layer, source in stand_ins(prefix, own, kinds).items():
        for name, one in known.items():
            if name.startswith(f"{source}."):
                found[layer + name[len(source) :]] = one
    return found


def layer_number(name: str, prefix: str) -> int | None:
    rest = name[len(prefix) + 1 :] if name.startswith(f"{prefix}.") else ""
    head = rest.partition(".")[0]
    return int(head) if head.isdigit() else None


def assumed(row: Row | ChainRow, dims: Mapping[str, int]) -> dict[str, Any]:
    """Plain values of the captured configuration that the code may depend on, as the class's own
    defaults complete it."""
    from memfit.trace.program import configuration

    wholes = [configuration(one, None).to_dict() for one in row.examples]
    text = row.text if isinstance(row, Row) else ""
    whole, *others = [one[text] for one in wholes] if text else wholes
    depth = row.depth if isinstance(row, ChainRow) else ""
    rope = whole.get("rope_parameters") or {}
    turned = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    found = {} if turned is None else {"partial_rotary_factor": turned}
    return found | {
        key: value
        for key, value in whole.items()
        if (isinstance(value, (bool, str, float, int)) or value == [])
        and key not in row.silent
        and key not in dims
        and not SILENT.fullmatch(key)
        and not key.startswith("_")
        and all(other.get(key) == value for other in others)
        and not key.startswith("num_hidden_layers")
        and key != depth
    }


def unused(_: Weight) -> None:
    """Weights are described by `capture`."""


__all__ = ["family_file"]
