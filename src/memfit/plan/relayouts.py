"""Other layouts over the same GPUs that hold less on each: what is sharded further, or waits on the
host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from memfit.lazy_dataclass import dataclass
from memfit.strategy import FSDP, Strategy, ZeRO
from memfit.uses import uses

HALF: dict[str, Any] = {"stage": 2, "offload_optimizer": "cpu"}
WHOLE: dict[str, Any] = {"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}


@dataclass(frozen=True, kw_only=True)
class Relayout:
    """`host`: something waits there that did not before."""

    name: str
    strategy: Strategy
    host: bool = False


def relayouts(strategy: Strategy) -> Iterator[Relayout]:
    """The least different first. What splits the model (tensor, context, pipeline parallelism)
    stays."""
    fsdp, zero, ddp = strategy.fsdp, strategy.zero, strategy.ddp
    if fsdp is not None:
        yield from sharded(strategy, fsdp)
    elif zero is not None:
        yield from partitioned(strategy, zero)
    elif strategy.gemini is None and strategy.data > 1:
        assert ddp is not None
        for stage in (1, 2):
            yield to(strategy, "zero", ZeRO(size=ddp.size, stage=stage))
        yield to(strategy, "fsdp", FSDP(size=ddp.size))
        yield to(strategy, "zero", ZeRO(size=ddp.size, stage=3))
        yield to(strategy, "fsdp", FSDP(size=ddp.size, offload=True), host=True)
    if zero is None and fsdp is None and strategy.gemini is None:
        yield to(strategy, "zero", ZeRO(size=strategy.data, **HALF), host=True)
        yield to(strategy, "zero", ZeRO(size=strategy.data, **WHOLE), host=True)


def sharded(strategy: Strategy, fsdp: FSDP) -> Iterator[Relayout]:
    if not fsdp.reshard:
        yield to(strategy, "fsdp", dataclasses.replace(fsdp, reshard=True), ddp=strategy.ddp)
    if strategy.ddp is not None and strategy.ddp.size > 1:  # no replicas of shards
        yield to(
            strategy,
            "fsdp",
            dataclasses.replace(fsdp, reshard=True, size=fsdp.size * strategy.ddp.size),
        )
    if not fsdp.offload:
        yield to(
            strategy, "fsdp", dataclasses.replace(fsdp, offload=True), host=True, ddp=strategy.ddp
        )


def partitioned(strategy: Strategy, zero: ZeRO) -> Iterator[Relayout]:
    for stage in range(zero.stage + 1, 4):
        yield to(strategy, "zero", dataclasses.replace(zero, stage=stage))
    states = zero.offload_optimizer
    if states == "none":
        states = "cpu"
        yield to(strategy, "zero", dataclasses.replace(zero, offload_optimizer=states), host=True)
    if zero.offload_param == "none":
        yield to(
            strategy,
            "zero",
            dataclasses.replace(zero, **WHOLE | {"offload_optimizer": states}),
            host=True,
        )


def to(
    strategy: Strategy, name: str, layout: FSDP | ZeRO, *, host: bool = False, ddp: Any = None
) -> Relayout:
    """With this layout in place of those that share the data."""
    other = dataclasses.replace(strategy, **{"ddp": ddp, "fsdp": None, "zero": None, name: layout})
    before, after = set(uses(strategy)), list(uses(other))
    words = [f"--use {use}" for use in after if use not in before]
    return Relayout(name=" ".join(words), strategy=other, host=host)


__all__ = ["Relayout", "relayouts"]
