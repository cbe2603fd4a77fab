"""By what a plan chooses: a row each. A policy is a way to search a space, and answers with what it
would take, best first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memfit.lazy_dataclass import dataclass
from memfit.plan import llmem
from memfit.plan.ledger import Found
from memfit.plan.search import Search
from memfit.registry import Registry

Solve = Callable[[Search], Sequence[Found]]


@dataclass(frozen=True, kw_only=True)
class Policy:
    name: str
    help: str
    solve: Solve


POLICIES: Registry[Policy] = Registry("policy")


def fastest(search: Search) -> Sequence[Found]:
    search.run()
    return search.taken


POLICIES.add(
    "fastest",
    Policy(name="fastest", help="shortest step time that fits (exact)", solve=fastest),
)
POLICIES.add(
    "llmem",
    Policy(
        name="llmem",
        help="largest batch that fits, by LLMem's Algorithm 1",
        solve=llmem.solve,
    ),
)

__all__ = ["POLICIES", "Policy"]
