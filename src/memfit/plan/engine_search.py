"""Settings of a serving engine that hold a load, ranked: layouts, weights and cache in fewer
bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from memfit.constants import setting, vendor
from memfit.errors import InputError
from memfit.hardware import Cluster
from memfit.hardware.prices import price
from memfit.lazy_dataclass import dataclass
from memfit.model.named import AWQ
from memfit.plan.engine_goals import (
    EnginePlan,
    EngineQuestion,
    EngineRow,
    Grid,
    Load,
    Speed,
    users_fit,
)
from memfit.plan.engine_weights import AWQ_CHECKPOINT, EIGHT, FOUR, OWN
from memfit.plan.market import machines
from memfit.serving.base import Device, Question, Subject
from memfit.serving.pace import Engine, Step, step_seconds
from memfit.serving.result import ServingAnswer

FP8_SINCE: Annotated[
    tuple[int, int],
    vendor(
        "compute capability from which GPUs compute in fp8", "NVIDIA Ada and Hopper whitepapers"
    ),
] = (8, 9)
RANKS: Annotated[tuple[int, ...], setting("GPUs that share a model: what is tried")] = (1, 2, 4, 8)
LENGTHS: Annotated[tuple[int, ...], setting("tokens of a request in the table: 2k to 1M")] = tuple(
    2**power for power in range(11, 21)
)
USERS: Annotated[tuple[int, ...], setting("users in the table")] = (
    *(1, 2, 4, 8, 16, 32, 64, 128, 256),
)
MILLION: Annotated[int, setting("tokens that a price is for")] = 10**6
UNLIMITED: Annotated[int, setting("positions of a model that names no limit")] = 2048
ALIKE: Annotated[float, setting("speeds that count as equal differ by less")] = 0.02
HOUR = 3600
OTHERS: Annotated[int, setting("configurations that miss a goal and are shown")] = 4
SHORTEST: Annotated[int, setting("tokens of the shortest request: a block")] = 16


@dataclass(frozen=True, kw_only=True)
class Candidate:
    weights: str
    cache: str
    tensor: int
    replicas: int


def plan_engine(question: EngineQuestion, cluster: Cluster) -> EnginePlan:
    """The best configurations on these GPUs, or the nearest where none holds the load."""
    rows: list[EngineRow] = []
    close: list[EngineRow] = []
    last: InputError | None = None
    for one in candidates(question, cluster):
        try:
            row = judged(question, cluster, one)
        except InputError as error:
            last = error
            continue
        if row is not None:
            (rows if row.fits else close).append(row)
    if not rows and not close and last is not None:
        raise last
    known = price(cluster.gpu)
    ordered = ranked(rows)
    nearest = sorted(close, key=nearness)[: OTHERS if rows else 1]
    shown = ordered[: question.top]
    best = (shown or nearest)[:1]
    return EnginePlan(
        question=question,
        cluster=cluster,
        rows=tuple(shown),
        close=tuple(nearest),
        grid=grid_of(question, cluster, best[0]) if best else None,
        dollars=known.dollars if known else None,
        price_note=f"{known.date}: {known.cite}" if known else "",
        problems=best[0].answer.problems if best else (),
    )


def cheapest_engine(question: EngineQuestion, most: int) -> EnginePlan:
    """The plan on the first machine, by what an hour of it costs, that holds the load; of cheaper
    ones it says why they do not, or why the engine refuses them."""
    passed: list[str] = []
    found: EnginePlan | None = None
    tensor = int(question.fixed.get(question.planned.tensor) or 1)
    last = InputError.one(
        f"no machine with a public price shares layers over {tensor} GPUs",
        where=question.planned.tensor,
    )
    for dollars, cluster in machines():
        if cluster.gpus > most or cluster.gpus_per_node % tensor:
            continue
        try:
            found = plan_engine(question, cluster)
        except InputError as error:
            last, why = error, error.problems[0].message
        else:
            if found.fits:
                return replace(found, market=True, passed=tuple(passed))
            why = ", ".join(found.close[0].missed) if found.close else "no request fits"
        passed.append(f"${dollars:,.2f} per hour, {cluster.name}: {why}")
    if found is None:
        raise last
    return replace(found, market=True, passed=tuple(passed))


def order(row: EngineRow) -> tuple[Any, ...]:
    """Most tokens per second first, those without a speed last; else what costs no quality."""
    return (-row.speed.tokens_per_second if row.speed else 0.0, *lossless(row))


def ranked(rows: Sequence[EngineRow]) -> list[EngineRow]:
    """In order; of those about as fast as the fastest left, what costs no quality comes first."""
    left, found = sorted(rows, key=order), list[EngineRow]()
    while left:
        fastest = left[0].speed
        least = fastest.tokens_per_second * (1 - ALIKE) if fastest else 0.0
        alike = [one for one in left if one.speed and one.speed.tokens_per_second >= least]
        alike = alike if fastest else left
        found += sorted(alike, key=lossless)
        left = left[len(alike) :]
    return found


def lossless(row: EngineRow) -> tuple[Any, ...]:
    """What costs no quality first, then what holds most tokens."""
    return (row.weights != OWN, row.cache != "auto", -row.users * row.length, row.tensor)


def nearness(row: EngineRow) -> tuple[Any, ...]:
    return (len(row.missed), row.answer.failure != "", *order(row))


def candidates(question: EngineQuestion, cluster: Cluster) -> Iterator[Candidate]:
    """Every combination of what the user left open."""
    planned, fixed = question.planned, question.fixed
    tensors = [int(fixed[planned.tensor])] if planned.tensor in fixed else list(RANKS)
    sm = cluster.gpu.sm
    eighth = sm is not None and sm >= FP8_SINCE
    stored = "quantization_config" in question.subject.config
    forms = [OWN]
    if planned.weights not in fixed and not stored:
        forms += ([EIGHT] if eighth else []) + [FOUR]
    caches = [str(fixed.get(planned.cache, "auto"))]
    if planned.cache not in fixed and eighth:
        caches.append(planned.eighths)
    for tensor in tensors:
        if cluster.gpus_per_node % tensor:
            continue
        for weights in forms:
            for cache in caches:
                yield Candidate(
                    weights=weights, cache=cache, tensor=tensor, replicas=cluster.gpus // tensor
                )


def judged(question: EngineQuestion, cluster: Cluster, one: Candidate) -> EngineRow | None:
    """Rate one candidate: users, speed, missed goals. None if the engine cannot start."""
    load = question.load
    each = -(-load.users // one.replicas)
    length = load.length or longest(question, cluster, one, each)
    if not length:
        return None
    asked = asked_of(question, cluster, one, length, each)
    answer = question.planned.engine.answer(asked)
    users = 0 if answer.failure else seats(question, asked, each, answer) * one.replicas
    serving = min(load.users or users, users) or load.users  # those that do not fit wait
    speed = None if answer.failure else speed_of(question, cluster, one, asked, serving)
    known = price(cluster.gpu)
    made = speed.tokens_per_second if speed else 0.0
    model = question.subject.name
    return EngineRow(
        weights=one.weights,
        cache=one.cache,
        tensor=one.tensor,
        replicas=one.replicas,
        users=users,
        length=length,
        answer=answer,
        options=asked.options,
        command=question.planned.command(
            AWQ_CHECKPOINT if one.weights == FOUR else model, asked.options
        ),
        speed=speed,
        dollars=known.dollars * cluster.gpus * MILLION / HOUR / made if known and made else None,
        missed=tuple(missed(load, users, answer, speed, limited_by(question, answer))),
    )


def seats(question: EngineQuestion, asked: Question, each: int, answer: ServingAnswer) -> int:
    """Users of one copy: what the cache holds, and no more than the engine runs at once where the
    plan does not set that itself."""
    planned = question.planned
    room = int(answer.figures.get("max_concurrency", 0))
    if each and planned.users not in question.fixed:
        return room
    return min(room, planned.on_rank(asked).requests)


def limited_by(question: EngineQuestion, answer: ServingAnswer) -> str:
    """Words for users that a fixed limit keeps out, not the memory."""
    planned = question.planned
    most = int(question.fixed.get(planned.users) or 0)
    full = 0 < most < answer.figures.get("max_concurrency", 0)
    return f", since `{planned.users}` is {most}" if full else ""


def missed(
    load: Load, users: int, answer: ServingAnswer, speed: Speed | None, limited: str
) -> Iterator[str]:
    """Goals that are not met, in words."""
    if answer.failure:
        yield "the engine does not start"
        return
    if users < max(1, load.users):
        yield users_fit(users) + limited
    for what, limit, value in (
        ("time to first token", load.first, speed.first if speed else None),
        ("time per output token", load.token, speed.token if speed else None),
    ):
        if limit and value is None:
            yield f"{what} is not known on this GPU"
        elif limit and value is not None and value > limit:
            yield f"{what} {1000 * value:,.0f} ms"


def asked_of(
    question: EngineQuestion, cluster: Cluster, one: Candidate, length: int, each: int
) -> Question:
    """The engine's options for a candidate; `each`: users per replica, 0 if not given."""
    planned = question.planned
    options: dict[str, Any] = {planned.length: length}
    if one.tensor > 1:
        options[planned.tensor] = one.tensor
    if each:
        options[planned.users] = each
    if one.cache != "auto":
        options[planned.cache] = one.cache
    if one.weights == EIGHT:
        options[planned.weights] = EIGHT
    device = Device(name=cluster.gpu.name, total=cluster.gpu.memory, free=cluster.gpu.free)
    device = replace(device, gpu=cluster.gpu)
    return Question(
        subject=packed(question.subject) if one.weights == FOUR else question.subject,
        devices=(device,) * one.tensor,
        options={**options, **question.fixed},
        version=question.version,
    )


def packed(subject: Subject) -> Subject:
    """The same model as an AWQ checkpoint with groups of 128."""
    config: Mapping[str, Any] = {**subject.config, "quantization_config": dict(AWQ)}
    return replace(subject, config=config)


def longest(question: EngineQuestion, cluster: Cluster, one: Candidate, each: int) -> int:
    """The longest request of which `each` fit at once (0: one, at the engine's own settings), up to
    the model's limit; 0: none."""
    fixed = question.fixed.get(question.planned.length)
    if fixed:
        return int(fixed)

    def fits(length: int) -> bool:
        answer = question.planned.engine.answer(asked_of(question, cluster, one, length, each))
        return not answer.failure and answer.figures.get("max_concurrency", 0) >= max(1, each)

    if not fits(SHORTEST):
        return 0
    model = question.subject.model
    low, high = SHORTEST, max(SHORTEST, (model.positions if model else 0) or UNLIMITED)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def speed_of(
    question: EngineQuestion, cluster: Cluster, one: Candidate, asked: Question, users: int
) -> Speed | None:
    """Steady state: every user's answer waits for the prompts that come in between. None where the
    load or the GPU's rates are not known."""
    load = question.load
    if not load.length or not users:
        return None
    found = question.planned.on_rank(asked)
    alone = replace(cluster, gpus_per_node=one.tensor, nodes=1)
    engine = Engine(
        model=found.model, rank=found.rank, cluster=alone, cached=found.cached, host=found.host
    )
    each = -(-users // one.replicas)
    middle = load.prompt + load.output // 2
    decode = step_seconds(engine, Step(decoding=each, context=middle))
    prefill = prompt_seconds(engine, load.prompt, found.chunk, 0, 0)
    first = prompt_seconds(engine, load.prompt, found.chunk, each - 1, middle)
    known = engine.rates
    if decode is None or prefill is None or first is None or known is None:
        return None
    token = decode + (each * prefill / load.output if load.output else 0.0)
    return Speed(
        first=first,
        token=token,
        tokens_per_second=users / token if load.output else 0.0,
        measured=known.measured,
    )


def prompt_seconds(
    engine: Engine, prompt: int, chunk: int, decoding: int, context: int
) -> float | None:
    """A prompt in pieces, each in a step with those that decode; None where they leave no room."""
    if decoding >= chunk:
        return None
    total, before = 0.0, 0
    while before < prompt:
        part = min(chunk - decoding, prompt - before)
        each = step_seconds(
            engine, Step(decoding=decoding, context=context, prompt=part, before=before)
        )
        if each is None:
            return None
        total, before = total + each, before + part
    return total


def grid_of(question: EngineQuestion, cluster: Cluster, row: EngineRow) -> Grid | None:
    """Memory by length and users, for one configuration."""
    planned, model = question.planned, question.subject.model
    if model is None or planned.length in question.fixed:
        return None
    one = Candidate(weights=row.weights, cache=row.cache, tensor=row.tensor, replicas=row.replicas)
    lengths, cells, most = [], [], []
    limit = 0
    for length in LENGTHS:
        if model.positions and length > model.positions:
            break
        answer = planned.engine.answer(asked_of(question, cluster, one, length, 0))
        many = answer.figures.get("max_concurrency", 0.0)
        cache = answer.figures.get("kv_gib", 0.0) * 2**30
        if many <= 0:
            break
        rest = answer.device - sum(
            pool.bytes for pool in answer.pools if pool.name.startswith("KV cache")
        )
        limit = int(rest + cache)
        lengths.append(length)
        cells.append(tuple(int(rest + users * cache / many) for users in USERS))
        most.append(int(many))
    if not lengths:
        return None
    return Grid(
        lengths=tuple(lengths), users=USERS, cells=tuple(cells), most=tuple(most), limit=limit
    )


__all__ = ["cheapest_engine", "plan_engine"]
