"""What is wanted of answers: the quickest one, or the most tokens a second; and what none may
exceed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memfit.lazy_dataclass import dataclass
from memfit.registry import Registry
from memfit.simulate.generating import Generation


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The speed of a machine with `requests` concurrent requests: seconds from the prompt to the
    last token, to the first token, and per output token."""

    requests: int
    seconds: float
    first: float
    token: float
    tokens_per_second: float


def pace(found: Generation, requests: int) -> Pace:
    """Groups of GPUs that hold the model each answer their share of the requests."""
    return Pace(
        requests=requests,
        seconds=found.seconds,
        first=found.prefill,
        token=found.token,
        tokens_per_second=requests * found.new_tokens / found.seconds,
    )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a serving plan: seconds for a whole answer, to the first token and per output
    token, and tokens per second of the machine; 0 means no limit."""

    answer: float = 0.0
    first: float = 0.0
    token: float = 0.0
    tokens_per_second: float = 0.0

    def broken(self, found: Pace) -> Iterator[tuple[str, float, float]]:
        """(what, how much it is, what is allowed)."""
        for what, seconds, most in (
            ("an answer", found.seconds, self.answer),
            ("time to first token", found.first, self.first),
            ("a token", found.token, self.token),
        ):
            if most and seconds > most:
                yield what, seconds, most
        if found.tokens_per_second < self.tokens_per_second:
            yield "tokens per second", found.tokens_per_second, self.tokens_per_second


@dataclass(frozen=True, kw_only=True)
class Goal:
    name: str
    help: str
    key: Callable[[Pace], tuple[float, ...]]  # the least first
    figure: Callable[[Pace], float]  # of the best, in `unit`
    unit: str


GOALS: Registry[Goal] = Registry("goal")
for _goal in (
    Goal(
        name="latency",
        help="shortest time per request",
        key=lambda one: (one.seconds, -one.tokens_per_second),
        figure=lambda one: one.seconds,
        unit="s an answer",
    ),
    Goal(
        name="throughput",
        help="highest throughput in tokens per second",
        key=lambda one: (-one.tokens_per_second, one.seconds),
        figure=lambda one: one.tokens_per_second,
        unit="tokens/s",
    ),
):
    GOALS.add(_goal.name, _goal)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of a plan for inference. `requests`: concurrent requests on the machine; 0: as
    many as fit. `weights`: the formats to choose from, most exact first."""

    goal: str
    requests: int
    weights: tuple[str, ...]
    limits: Limits = Limits()


__all__ = ["GOALS", "Asked", "Goal", "Limits", "Pace", "pace"]
