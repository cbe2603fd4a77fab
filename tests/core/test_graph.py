"""The layer graph: sizes as expressions, what a legal graph is, its JSON, and loops written out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.errors import InputError
from memfit.graph import Graph, Loop, Op, Value, check, evaluated, graph_of, json_of, unrolled
from memfit.graph.solve import Solver, Unsolved

RUNS = (
    {"batch": 3, "seq": 88, "hidden": 96, "heads": 6, "vocab": 512},
    {"batch": 7, "seq": 104, "hidden": 168, "heads": 12, "vocab": 640},
    {"batch": 11, "seq": 152, "hidden": 200, "heads": 10, "vocab": 608},
)


def sizes(text: str) -> list[int]:
    return [evaluated(text, run) for run in RUNS]


@pytest.mark.parametrize(
    "text",
    ["hidden", "2*hidden", "batch*seq*heads", "1/2*hidden", "seq + 1", "heads*seq + hidden"],
)
def test_a_size_is_solved_exactly(text: str) -> None:
    assert sizes(str(Solver(RUNS).solved(sizes(text)))) == sizes(text)


def test_a_size_that_no_expression_gives_is_refused() -> None:
    with pytest.raises(Unsolved, match="no exact expression"):
        Solver(RUNS).solved([97, 1013, 10007])


def test_three_dimensions_side_by_side_are_a_sum() -> None:
    """RoCBert concatenates three embeddings. Where two such sums give the same, none is taken."""
    runs = [{"a": 96, "b": 340, "c": 211, "d": 517}, {"a": 160, "b": 101, "c": 997, "d": 73}]
    assert Solver(runs).solved([96 + 340 + 211, 160 + 101 + 997]) == "a + b + c"
    alike = [{"a": 96, "b": 340, "c": 211, "d": 301, "e": 250}, {**runs[1], "e": 1025}]
    with pytest.raises(Unsolved, match="no exact expression"):
        Solver(alike).solved([96 + 340 + 211, 160 + 101 + 997])


def test_a_size_with_two_readings_is_refused() -> None:
    runs = [{"a": 2, "b": 3, "c": 6}, {"a": 4, "b": 5, "c": 20}]
    assert Solver(runs).solved([6, 20]) == "c"  # a plain dimension goes before a product
    runs = [{"a": 2, "b": 6, "c": 3, "d": 4}, {"a": 4, "b": 10, "c": 5, "d": 8}]
    with pytest.raises(Unsolved, match="may be"):
        Solver(runs).solved([12, 40])


def test_dimensions_that_no_run_tells_apart_are_refused() -> None:
    with pytest.raises(Unsolved, match="alike"):
        Solver([{"a": 2, "b": 2}, {"a": 3, "b": 3}]).check()


def test_a_size_that_is_no_whole_number_is_an_error() -> None:
    with pytest.raises(InputError, match="do not go together"):
        evaluated("1/2*heads", {"heads": 5})


GRAPH = Graph(
    inputs={"x": 0},
    values=(
        Value(id=0, shape=("batch", "hidden"), format="model"),
        Value(id=1, shape=("batch", "hidden"), format="float32", until=2),
        Value(id=2, shape=("batch", "hidden"), format="model"),
    ),
    ops=(
        Op(name="_to_copy", inputs=(0,), outputs=(1,)),
        Op(name="_to_copy", inputs=(1,), outputs=(2,), where="norm", attrs={"dim": 1}),
    ),
    outputs={"x": 2},
)


def test_a_legal_graph_has_no_fault_and_survives_json() -> None:
    assert check(GRAPH, RUNS[0]) == []
    assert graph_of(json_of(GRAPH)) == GRAPH


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ops": GRAPH.ops[1:]}, "before it is made"),
        ({"ops": (*GRAPH.ops, GRAPH.ops[0])}, "made twice"),
        (
            {"values": (*GRAPH.values[:2], replace(GRAPH.values[2], format="int3"))},
            "unknown format",
        ),
        ({"values": (replace(GRAPH.values[0], shape=("width",)), *GRAPH.values[1:])}, "`width`"),
        (
            {"values": (GRAPH.values[0], replace(GRAPH.values[1], until=1), GRAPH.values[2])},
            "after its last use",
        ),
        ({"outputs": {"x": 7}}, "never made"),
    ],
)
def test_faults_of_a_graph_are_named(change: dict[str, object], message: str) -> None:
    found = check(replace(GRAPH, **change), RUNS[0])  # type: ignore[arg-type]
    assert any(message in problem.message for problem in found), found


def looped() -> Graph:
    """x, then three times `x = neg(x); y = exp(x)`, and a join of all y."""
    values = [Value(id=0, shape=("batch",), format="model", until=1)]
    ops: list[Op] = []
    for k in range(3):
        x = 0 if k == 0 else 2 * k - 1
        ops.append(Op(name="neg", inputs=(x,), outputs=(2 * k + 1,)))
        ops.append(Op(name="exp", inputs=(2 * k + 1,), outputs=(2 * k + 2,)))
        values.append(
            Value(id=2 * k + 1, shape=("batch",), format="model", until=2 * k + 3 if k < 2 else 6)
        )
        values.append(Value(id=2 * k + 2, shape=("batch",), format="model", until=7))
    ops.append(Op(name="cat", inputs=(2, 4, 6), outputs=(7,)))
    values.append(Value(id=7, shape=("batch*seq",), format="model"))
    return Graph(
        inputs={"x": 0},
        values=tuple(values),
        ops=tuple(ops),
        outputs={"x": 7},
        loops=(Loop(start=0, period=2, count="seq"),),
    )


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_loop_runs_as_often_as_the_sizes_say(count: int) -> None:
    graph, jumps = unrolled(looped(), {"batch": 2, "seq": count}, few=True)
    assert jumps == ()  # what an iteration makes is read behind the loop
    assert check(graph, RUNS[0]) == []
    assert [op.name for op in graph.ops] == ["neg", "exp"] * count + ["cat"]
    assert len(graph.ops[-1].inputs) == count
    ends = {value.id: value.until for value in graph.values}
    assert [ends[one] for one in graph.ops[-1].inputs if isinstance(one, int)] == [
        2 * count + 1
    ] * count
