"""Rows of a card about a server that shares the model among users: its own settings, with the
weights as they are or in 8 bits."""

from __future__ import annotations

from memfit.errors import InputError
from memfit.hardware import Cluster
from memfit.lazy_dataclass import dataclass
from memfit.model.modules import Model
from memfit.plan.engine_goals import EngineQuestion, Load
from memfit.plan.engine_search import FP8_SINCE, Candidate, asked_of, judged, longest, speed_of
from memfit.plan.engine_weights import EIGHT, OWN
from memfit.serving import SERVER_ENGINE, find_engine
from memfit.serving.base import Subject
from memfit.serving.planned import find_planned
from memfit.serving.subject import structure, with_settings

VENDORS = ("nvidia", "amd", "unknown")  # whose GPUs the server has kernels for; the last may be one


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
    them; none where the server does not run."""
    gpu = cluster.gpu
    if gpu.vendor not in VENDORS or cluster.nodes > 1:
        return ()
    stored = "quantization_config" in with_settings(model.config)
    eighth = gpu.sm is not None and gpu.sm >= FP8_SINCE and not stored
    return (OWN, EIGHT) if eighth else (OWN,)


def server_on(
    model: Model, weights: str, cluster: Cluster, context: int, answer: int
) -> Server | None:
    """For users of `context` tokens, of which `answer` are made; None where the model or the
    layout is not supported."""
    engine = find_engine(SERVER_ENGINE)
    subject = Subject(
        name=model.name, config=with_settings(model.config), model=structure(model.config)
    )
    question = EngineQuestion(
        planned=find_planned(SERVER_ENGINE, engine),
        subject=subject,
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


__all__ = ["Server", "server_on", "weights_for"]
