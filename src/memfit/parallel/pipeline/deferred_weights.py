"""A backward in two parts, as zero-bubble schedules have it: first the gradients of what a stage
received, later those of its weights.

The first part keeps the graph and the gradient of every node that has a weight; the second runs
those nodes once more, weight by weight in the model's order, and the graph goes from its end
towards its beginning as they do (torch 2.13 distributed/pipelining/_backward.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any, TypeAlias

from memfit.lower import ops
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Node, Tensor

Target: TypeAlias = "Node | Tensor | None"
Waiting: TypeAlias = "list[tuple[Node, Tensor]]"  # nodes with weights, and their gradients
PRODUCTS = ("linear", "matmul", "mul")  # what they save of one input serves the other's gradient
FLAT = ("linear",)  # matrix products: what comes is made a matrix by a node of its own before them


def inputs(r: Recorder, root: Tensor, gradient: Tensor, received: Tensor) -> Waiting:
    """`received` gets its gradient; nothing that was saved goes."""
    assert root.node is not None
    leads = leading(root.node, received)
    held: Waiting = []
    waiting: dict[int, int] = {}
    for node in (one for one in leads.values() if isinstance(one, Node)):
        for target in node.inputs:
            if id(target) in leads:
                waiting[id(target)] = waiting.get(id(target), 0) + 1
    again: set[int] = set()
    buffers: dict[Any, Tensor] = {(id(root.node), root.slot): gradient}
    ready = [(-root.node.seq, root.node)]
    heapify(ready)
    del gradient
    while ready:
        node = heappop(ready)[1]
        if node.span != r.span:
            r.mark(r.phase, node.span, r.at)
        r.where = node.where
        came = {
            slot: buffers.pop((id(node), slot))
            for slot in range(node.outputs)
            if (id(node), slot) in buffers
        }
        if node.op in FLAT:
            came[0] = ops.rows(r, came[0])
        if any(trained(target) for target in node.inputs if id(target) not in leads):
            held.append((node, came[0]))
        results = run(r, node, came, [id(target) in leads for target in node.inputs], again)
        del came
        for index, target in enumerate(node.inputs):
            if target is None or id(target) not in leads:
                continue
            result, results[index] = results[index], None
            key = (id(target), node.slots[index])
            if result is not None:
                old = buffers.pop(key, None)
                buffers[key] = result if old is None else r._sum(old, result, None)
                del old
            del result
            waiting[id(target)] -= 1
            if waiting[id(target)] == 0 and isinstance(target, Node):
                heappush(ready, (-target.seq, target))
    received.grad = buffers.pop((id(received), 0)).detach()
    return held


def weights(r: Recorder, waiting: Waiting, order: Sequence[Tensor]) -> None:
    """In the order of the model's weights; a node that has several comes with the first of them. A
    gradient that is added to another stays in a variable until the next one has been made."""
    place = {id(leaf): number for number, leaf in enumerate(order)}
    waiting.sort(
        key=lambda one: (
            -min(place[weight_of(target)] for target in one[0].inputs if trained(target))
        )
    )
    former: list[Tensor] = []
    node, gradient = None, None
    while waiting:
        del node, gradient  # what the variables of the round before held
        node, gradient = waiting.pop()
        if node.span != r.span:
            r.mark(r.phase, node.span, r.at)
        r.where = node.where
        wanted = [trained(target) for target in node.inputs]
        made = run(r, node, {0: gradient}, wanted, set())
        node.saved, node.spare, node.frame = (), [], None
        fresh = [
            pair
            for target, result in zip(node.inputs, made, strict=True)
            if result is not None
            for pair in down(r, target, result)
        ]
        del made
        former = [take(r, leaf, result) for leaf, result in fresh]
        del fresh
    del former


# In which a layer of the families that stages are known for makes its modules; what stands beside
# these comes last (transformers 5.23 models/llama/modeling_llama.py LlamaDecoderLayer).
MODULES = ("self_attn", "mlp")


def in_order(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The weights of a layer as `parameters()` gives them."""

    def place(leaf: Tensor) -> int:
        module = leaf.name.partition(".")[0]
        return MODULES.index(module) if module in MODULES else len(MODULES)

    return sorted(leaves, key=place)


def take(r: Recorder, leaf: Tensor, result: Tensor) -> Tensor:
    """`weight.grad = dw`, or `+= dw`."""
    if leaf.grad is None:
        leaf.grad = result.detach()
        if result.storage is not None:
            r._named(result.storage.id)
    return result


def down(r: Recorder, target: Target, result: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Through what stands between a node and its weight: casts."""
    while isinstance(target, Node):
        r.where = target.where
        results = list(target.back(r, target, result))
        target.saved = ()
        index = next(number for number, one in enumerate(target.inputs) if one is not None)
        made, target = results[index], target.inputs[index]
        assert made is not None
        result = made
        del made, results
    assert target is not None
    return [(target, result)]


def recomputed(r: Recorder, node: Node, again: set[int]) -> tuple[Any, ...]:
    """What the node saved. A checkpoint is run again for each backward that comes by (`again` has
    those that this one met), and what that makes for nodes which this one leaves out stays with
    them until they go (torch 2.13 utils/checkpoint.py unpack_hook, by `_current_graph_task_id`)."""
    frame = node.frame
    if frame is None:
        return node.saved
    if id(frame) not in again:
        again.add(id(frame))
        frame.fresh = []
        r.run_again(frame, node)
        for known, fresh in zip(frame.nodes, frame.fresh, strict=True):
            own = known()
            if own is not None and fresh is not None:
                own.spare.append(fresh.saved)
                fresh.saved = ()
        for gone in (one() for one in frame.spent):
            if gone is not None:
                gone.saved = ()
        frame.fresh, frame.spent = [], []
        r.where = node.where
    return node.spare.pop()


def run(
    r: Recorder, node: Node, came: dict[int, Tensor], wanted: list[bool], again: set[int]
) -> list[Tensor | None]:
    """The gradients that are wanted, of a node that keeps what it saved."""
    saved = recomputed(r, node, again)
    double = Node(
        node.seq,
        node.op,
        node.where,
        node.back,
        tuple(one if want else None for one, want in zip(node.inputs, wanted, strict=True)),
        node.slots,
    )
    double.extra, double.span, double.outputs, double.saved = (
        node.extra,
        node.span,
        node.outputs,
        saved,
    )
    if node.op in PRODUCTS:
        first, second = saved
        double.saved = first if wanted[1] else None, second if wanted[0] else None
    return list(node.back(r, double, came.pop(0) if node.outputs == 1 else came))


def leading(root: Node, received: Tensor) -> dict[int, Node | Tensor]:
    """The nodes from which `received` can be reached, and itself."""
    known: dict[int, bool] = {id(received): True}
    found: dict[int, Node | Tensor] = {id(received): received}
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, seen = stack.pop()
        if seen:
            known[id(node)] = any(known.get(id(target), False) for target in node.inputs)
            if known[id(node)]:
                found[id(node)] = node
        elif id(node) not in known:
            known[id(node)] = False
            stack.append((node, True))
            stack += [
                (target, False)
                for target in node.inputs
                if isinstance(target, Node) and id(target) not in known
            ]
    return found


def weight_of(target: Target) -> int:
    """The weight that it is, or was made of."""
    return weight_of(target.inputs[0]) if isinstance(target, Node) else id(target)


def trained(target: Target) -> bool:
    """Is it a weight, or what was made of one? Nodes that lead to what was received are not
    asked."""
    if isinstance(target, Node):
        return len(target.inputs) == 1 and trained(target.inputs[0])
    return target is not None and bool(target.name)
