"""What no candidate can do better: closed-form lower bounds on the bytes of a rank and the seconds of a step, and bounds by walking the
kernels of one GPU, which are tight.

Every bound leaves out what it does not know, so that a candidate whose bound is too large is out for certain; tests hold them to the formulas.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any, NamedTuple

from memfit.errors import InputError
from memfit.estimate import trainable
from memfit.formats import FORMATS
from memfit.hardware import Cluster, Rates, rates
from memfit.hardware.collectives import Group, seconds
from memfit.hardware.rates import along
from memfit.job import Job
from memfit.lower import lower
from memfit.model.modules import MLP, Attention, Latent, Layer, Model, MoE
from memfit.optimizers import OPTIMIZERS
from memfit.simulate.away import away
from memfit.simulate.memory import memory
from memfit.simulate.pace import calls
from memfit.simulate.time import Duration, duration
from memfit.strategy import ONE, Strategy
from memfit.tape import Alloc, Tape
from memfit.techniques.precision import WEIGHTS

STATES = {"like": 0, "int8": 1, "fp32": 4}  # bytes a value; 0: as wide as the parameter. Other states count as nothing
KEPT = frozenset({"weights", "buffers", "optimizer", "master", "gradients", "inputs"})


KERNELS = {"bf16-master": "bf16"}  # precisions whose passes run the kernels of another
AGAIN = {"full": 1.0, "selective": 0.2}  # of the layers' products, the least that is computed again: every second is kept, maybe the larger
SHORT = 2  # layers of the short models


class Counts(NamedTuple):
    """Of one token: products of all layers, those without each layer's largest, and the head's; values of the layers' linear weights."""

    layers: int
    again: int
    head: int
    values: int


class Like(NamedTuple):
    """A job, and the layouts that split its model: what ranks of it run, others that share out the data run too. `sharded`: and what
    ZeRO adds to it."""

    job: Job
    inner: Strategy
    sharded: Strategy = ONE

    @property
    def split(self) -> int:
        """Ranks that share one sequence."""
        return self.inner.size("tp") * self.inner.size("cp")

    def of(self, **changes: Any) -> Like:
        return self._replace(job=self.job.replace(**changes))


class Walked(NamedTuple):
    """One micro-batch on one GPU: seconds of its kernels, those at ideal rates, and bytes of what its forward holds beside weights and states."""

    seconds: float
    ideal: float
    held: int


def counts(model: Model) -> Counts:
    layers = again = values = 0
    for layer, times in model.kinds:
        each = [one.inputs * one.outputs for one in layer.linears()]
        active = sum(routed(block.mixer) for block in layer.blocks if isinstance(block.mixer, MoE))
        layers += times * (sum(each) + active)
        again += times * (sum(each) + active - max([*each, active], default=0))
        values += times * sum(each)
    return Counts(layers, again, model.head.inputs * model.head.outputs, values)


def routed(mixer: MoE) -> int:
    return 3 * mixer.active * mixer.inputs * mixer.width


def scores(layer: Layer, seq: int) -> int:
    """Arithmetic of causal attention's two products in the forward, over a sequence."""
    found = 0
    for block in layer.blocks:
        mixer = block.mixer
        if isinstance(mixer, Attention):
            seen = min(mixer.window or seq, seq)
            found += 2 * seq * seen * mixer.heads * mixer.head
        elif isinstance(mixer, Latent):
            found += seq * seq * mixer.heads * (mixer.nope + mixer.rope + mixer.value)
    return found


class Bounds:
    """For one model on one cluster; what is asked twice is computed once."""

    def __init__(self, model: Model, cluster: Cluster) -> None:
        self.model, self.cluster = model, cluster
        self.rates: Rates | None = rates(cluster.gpu)
        self.trained: dict[Job, int] = {}
        self.short: dict[int, Model] = {}
        self.tapes: dict[Like, Walked | None] = {}
        self.moved: dict[Like, float] = {}

    @cached_property
    def counts(self) -> Counts:
        return counts(self.model)

    # ------------------------------------------------------------------------------------------------------- seconds
    def compute(self, job: Job, seq: int) -> float:
        """Of the products of one sequence, at the best rate that any was measured at; nothing where no rate is known."""
        if self.rates is None:
            return 0.0
        peak = max(self.rates.rate(math) for math in (("fp32",) if job.precision == "fp32" else ("bf16", "fp16")))
        best = max(fraction for row in self.rates.matmul.values() for _, fraction in row)
        fused = max(fraction for table in self.rates.attention.values() for row in table.values() for _, fraction in row)
        layers, again, head, _ = self.counts
        linear = 2.0 * seq * (layers + head)
        scored = sum(times * scores(layer, seq) for layer, times in self.model.kinds)
        back = self.backward(job)
        linear += back * linear * (1 - 1 / max(1, len(self.model.layers)) if back == 1 else 1)
        linear += 2 * seq * again * AGAIN.get(job.checkpointing, 0.0)
        flash = job.attention not in ("eager", "math")
        return linear / (peak * best) + (scored * (1 + back) / (peak * max(fused, best)) if flash else 0.0)

    @staticmethod
    def backward(job: Job) -> int:
        """How often the forward's arithmetic the backward does at least, in whole."""
        if job.method == "full":
            return 2
        return 1 if job.adapters and not any(sign.isdigit() for sign in job.targets) else 0

    def moving(self, like: Like, batch: int) -> float:
        """Seconds a sequence of kernels that only move bytes, with nothing recomputed, in micro-batches of at most `batch`: what they move
        of weights is shared by more sequences the larger those are."""
        like = like.of(checkpointing="none", attention="sdpa", accumulate=1, batch=batch, optimizer="sgd", evaluate=False)
        like = like._replace(sharded=ONE)
        if like not in self.moved:
            tape = self.lowered(like)
            found = None if tape is None or self.ideal is None else self.duration(tape, like, self.ideal)
            self.moved[like] = 0.0 if found is None else found.parts.get("memory", 0.0) / batch
        return self.moved[like]

    @cached_property
    def ideal(self) -> Rates | None:
        """Rates that are never below those reached: of products as of any size at their intensity, and no kernel takes time to start. With
        these a sequence takes the less the larger its micro-batch is."""
        if self.rates is None:
            return None
        rows = list(self.rates.matmul.values())
        places = sorted({place for row in rows for place, _ in row})
        best, reached = 0.0, []
        for place in places:
            best = max(best, *(along(row, place) for row in rows))
            reached.append((place, best))
        return dataclasses.replace(self.rates, matmul={0: tuple(reached)}, launch=0.0, taken=0.0)

    def splitting(self, like: Like) -> float:
        """Seconds a sequence of sums over tensor-parallel ranks: one behind each block, and one behind its backward."""
        tp = like.inner.tp
        if tp is None or tp.size < 2:
            return 0.0
        group = Group(size=tp.size, stride=1, per_node=self.cluster.gpus_per_node)
        blocks = sum(times * len(layer.blocks) for layer, times in self.model.kinds)
        return 2 * blocks * self.call("all_reduce", 2 * like.job.seq * self.model.width // like.inner.size("cp"), group)

    def walked(self, like: Like, batch: int) -> Walked | None:
        """One micro-batch, as the formulas have it; None where they refuse it."""
        precision = KERNELS.get(like.job.precision, like.job.precision) if like.job.hugging else like.job.precision
        like = like.of(batch=batch, accumulate=1, optimizer="sgd", precision=precision)
        if like not in self.tapes:
            tape = self.lowered(like)
            found = None if tape is None else self.walk(tape, like)
            self.tapes[like] = self.longer(like, found) if found is not None and like.sharded else found
        return self.tapes[like]

    def longer(self, like: Like, found: Walked) -> Walked:
        """With what ZeRO's own kernels take at ideal rates. Its walks are long, so that two short models tell what a layer adds."""
        if len(self.model.kinds) > 1 or len(self.model.layers) <= SHORT + 1:
            return found
        times: list[float] = []
        for layers in (SHORT, SHORT + 1):
            model = self.short.setdefault(layers, dataclasses.replace(self.model, layers=self.model.layers[:layers]))
            try:
                tape = lower(model, like.job, like.sharded, self.cluster, compact=True)
            except (InputError, NotImplementedError):
                return found
            times.append(self.passes(tape, like, self.ideal))
        more = max(0.0, times[0] + (len(self.model.layers) - SHORT) * (times[1] - times[0]) - found.ideal)
        return Walked(found.seconds + more, found.ideal + more, found.held)

    def lowered(self, like: Like) -> Tape | None:
        try:
            return lower(self.model, like.job, like.inner, self.cluster, compact=True)
        except (InputError, NotImplementedError):
            return None

    def walk(self, tape: Tape, like: Like) -> Walked:
        passes, least = (self.passes(tape, like, rates) for rates in (self.rates, self.ideal))
        often = {place: repeat.times for repeat in tape.repeats for place in range(repeat.first, repeat.last)}
        kept = sum(event.size * often.get(place, 1) for place, event in enumerate(tape) if type(event) is Alloc and event.part in KEPT)
        forward = [one.allocated for one in memory(tape).timeline if one.moment == "steady step" and one.phase == "forward"]
        return Walked(passes, least, max(0, max(forward, default=0) - kept))

    def passes(self, tape: Tape, like: Like, rates: Rates | None) -> float:
        found = None if rates is None else self.duration(tape, like, rates)
        beside = ("optimizer", "communication", "host")  # sums of gradients come once a step, however many micro-batches there are
        return 0.0 if found is None else sum(value for kind, value in found.parts.items() if kind not in beside)

    def duration(self, tape: Tape, like: Like, rates: Rates) -> Duration | None:
        return duration(tape, rates, like.job, 0, calls=calls(self.cluster, like.sharded or like.inner))

    def stepping(self, job: Job, strategy: Strategy) -> float:
        """Of the optimizer's own kernels, or of what the host does instead."""
        if self.rates is None:
            return 0.0
        if strategy.offloads:
            host = away(self.cluster, strategy, self.trainable(job), 2)
            return 0.0 if host is None or self.rates.host is None else host.seconds + host.weights / self.rates.host
        whole = strategy.ranks == strategy.size("ddp") and not (strategy.ddp is not None and strategy.ddp.distributed)
        values = self.trainable(job) // (1 if whole else strategy.ranks)
        width = 2 if job.precision not in ("fp32",) else 4
        return OPTIMIZERS[job.optimizer].moved * width * values / (self.rates.bandwidth * self.rates.copy)

    def trainable(self, job: Job) -> int:
        like = job.replace(batch=1, accumulate=1, checkpointing="none", optimizer="sgd")
        if like not in self.trained:
            self.trained[like] = trainable(self.model, like)
        return self.trained[like]

    def calling(self, job: Job, strategy: Strategy, times: int) -> float:
        """Of the collectives that carry gradients and gathered weights, as if each were one call without latency."""
        found, values = 0.0, self.trainable(job)
        split = strategy.size("tp") * strategy.size("pp") * strategy.size("ep")
        weights = 2 * self.counts.values // split if job.quantization == "none" else 0
        for name, size, stride in strategy.groups:
            group = Group(size=size, stride=stride, per_node=self.cluster.gpus_per_node)
            shards = strategy.shards if name == "ddp" and strategy.fsdp is not None else 1
            if name == "ddp":
                found += self.call("reduce_scatter", 2 * values // split // shards, group)
            elif name == "fsdp":
                found += times * self.gathers(strategy) * self.call("all_gather", weights, group)
                sums = times if strategy.fsdp is not None and strategy.fsdp.sync and job.method == "full" else 0
                found += sums * self.call("reduce_scatter", 2 * self.counts.values // split, group)
            elif name == "zero" and strategy.zero is not None and strategy.zero.stage == 3:
                found += times * self.call("all_gather", weights, group)
        return found

    def gathers(self, strategy: Strategy) -> float:
        """How often FSDP gathers a weight in a micro-batch: again for the backward, but for what it kept."""
        fsdp = strategy.fsdp
        again = fsdp is not None and fsdp.reshard and fsdp.shard and not fsdp.reshard_to
        return 1 + (1 - 2 / max(2, len(self.model.layers)) if again else 0)

    def call(self, op: str, size: int, group: Group) -> float:
        full, empty = (seconds(op, one, group, self.cluster) for one in (size, 0))
        return 0.0 if full is None or empty is None else full - empty

    # --------------------------------------------------------------------------------------------------------- bytes
    def kept(self, job: Job, strategy: Strategy) -> tuple[int, int]:
        """(weights and states of a rank, its gradients), whatever lives on the host left out."""
        zero, fsdp = strategy.zero, strategy.fsdp
        split = strategy.size("tp") * strategy.size("pp") * strategy.size("ep")
        half = 2 if zero is not None and job.precision != "fp32" else FORMATS[WEIGHTS[job.precision]].block_bytes
        whole = fsdp.size if fsdp is not None else zero.size if zero is not None and zero.stage == 3 else 1
        weights = self.weights(job, half) // (split * whole * (strategy.size("cp") if fsdp is not None else 1))
        if strategy.offloads:
            return (0 if fsdp is not None or (zero is not None and zero.offload_param != "none") else weights), 0
        shards = strategy.ranks if zero is not None or fsdp is not None or distributed(strategy) else split
        values = self.trainable(job)
        optimizer = OPTIMIZERS[job.optimizer]
        width = 4 if zero is not None else half
        states = sum(STATES.get(state, -width) or width for state in optimizer.states if state in STATES)
        if job.method != "full":
            values = 0
        if zero is not None and half == 2 and job.method == "full":
            states += 4
        gradients = 0
        if optimizer.when == "after":
            over = shards if fsdp is not None else zero.size if zero is not None and zero.stage > 1 else split
            gradients = half * values // over
        return weights + states * values // shards, gradients

    def weights(self, job: Job, width: int) -> int:
        linear = self.counts.values
        rest = self.model.parameters - linear
        if job.quantization == "none":
            return width * (linear + rest)
        return (linear // 2 if job.quantization in ("nf4", "fp4") else linear) + 2 * rest if not self.model.stored else 0

    def activations(self, job: Job, strategy: Strategy, batch: int) -> int:
        """What the forward leaves for the backward: inputs of the layers, or of some of their products, and the logits' copy in fp32."""
        tokens = batch * job.seq // (strategy.size("cp") * strategy.size("tp"))
        layers = len(self.model.layers) // strategy.size("pp")
        width = self.model.width
        if job.checkpointing == "none" and job.method == "full":
            width += min(
                (block.mixer.width for layer, _ in self.model.kinds for block in layer.blocks if isinstance(block.mixer, MLP)), default=0
            )
        logits = 4 * self.model.vocab if job.loss == "plain" and job.hugging and not job.unsloth else 0
        return tokens * (2 * width * layers + logits)

    def least(self, job: Job, strategy: Strategy, batch: int) -> int:
        """Bytes of live tensors at the peak."""
        kept, gradients = self.kept(job, strategy)
        return kept + max(gradients, self.activations(job, strategy, batch))


def alike(job: Job, strategy: Strategy) -> Like | None:
    """Whose kernels are among those of a rank; None where no walk tells. DeepSpeed casts all there is to 16 bits, and FSDP gathers in 16
    bits where others run under autocast: both leave casts out."""
    if strategy.size("pp") * strategy.size("ep") > 1:
        return None
    inner = Strategy(tp=strategy.tp, cp=strategy.cp)
    if strategy.zero is not None or (strategy.size("fsdp") > 1 and job.autocast):
        half = next((name for name in ("bf16", "fp16") if name in job.precision), job.precision)
        cast = job.replace(precision=half, adapter_dtype="base", prepare_kbit=False)
        return Like(cast, inner, strategy if strategy.zero is not None else ONE)
    return Like(job, inner)


def distributed(strategy: Strategy) -> bool:
    return strategy.ddp is not None and strategy.ddp.distributed


__all__ = ["Bounds", "Counts", "Like", "Walked", "alike", "counts"]
