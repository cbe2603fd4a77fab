"""Rows of a card about a server that shares the model among users: its own settings, with the
weights as they are or in 8 bits."""

from __future__ import annotations

from typing import Any

from memfit.errors import InputError
from memfit.hardware import Cluster
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.plan.engine_goals import EngineQuestion, Load
from memfit.plan.engine_search import FP8_SINCE, Candidate, asked_of, judged, longest, speed_of
from memfit.plan.engine_weights import EIGHT, OWN
from memfit.serving import SERVER_ENGINE, find_engine
from memfit.serving.planned import PlannedEngine, find_planned
from memfit.serving.subject import of_config, with_settings


@dataclass(frozen=True, kw_only=True)
class Server:
    """What a server does on these GPUs: bytes on each, users at once, tokens of the longest
    request, and tokens per second of a user alone; nothing where it does not start."""

    device: int = 0
    users: int = 0
    longest: int = 0
    tokens_per_second: float | None = None


def weights_for(model: Model, cluster: Cluster) -> tuple[str, ...]:
    """As they are, and in 8 bits where the checkpoint is not quantized and the GPU computes in
    them; none where several machines would share the layers."""
    sm = cluster.gpu.sm
    if cluster.nodes > 1:
        return ()
    stored = "quantization_config" in with_settings(model.config)
    eighth = sm is not None and sm >= FP8_SINCE and not stored
    return (OWN, EIGHT) if eighth else (OWN,)


def server() -> PlannedEngine:
    return find_planned(SERVER_ENGINE, find_engine(SERVER_ENGINE))


def server_options(weights: str, cluster: Cluster, context: int) -> dict[str, Any]:
    """The server's options of a row, by its own names."""
    planned = server()
    options: dict[str, Any] = {planned.length: context}
    if weights != OWN:
        options[planned.weights] = weights
    if cluster.gpus > 1:
        options[planned.tensor] = cluster.gpus
    return options


def server_on(
    model: Model, weights: str, cluster: Cluster, context: int, answer: int
) -> Server | None:
    """For users of `context` tokens, of which `answer` are made; None where the model or the
    layout is not supported."""
    question = EngineQuestion(
        planned=server(),
        subject=of_config(model.config, model.name),
        load=Load(prompt=context - answer, output=answer),
        fixed={},
    )
    one = Candidate(weights=weights, cache="auto", tensor=cluster.gpus, replicas=1)
    try:
        row = judged(question, cluster, one)
        if row is None or row.answer.failure or not row.users:
            return Server()
        asked = asked_of(question, cluster, one, context, 0)
        speed = speed_of(question, cluster, one, asked, 1)
        most = longest(question, cluster, one, 0)
    except InputError:
        return None
    return Server(
        device=row.answer.device,
        users=row.users,
        longest=most,
        tokens_per_second=None if speed is None else speed.tokens_per_second,
    )


__all__ = ["Server", "server", "server_on", "server_options", "weights_for"]
