"""What no candidate can do quicker: closed-form lower bounds on the seconds of a step, and bounds
by walking the kernels of one GPU, which are tight and tell of its bytes too.

Every bound leaves out what it does not know, so that a candidate whose bound is too large is out
for certain; tests hold them to the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple

from memfit.constants import counted, setting
from memfit.errors import InputError
from memfit.formats import FORMATS
from memfit.hardware import Cluster, Rates, rates
from memfit.hardware.collectives import Group, seconds
from memfit.hardware.rates import along
from memfit.job import Job
from memfit.lower import lower
from memfit.lower.schedules import in_flight
from memfit.model.model import Model
from memfit.model.modules import Attention, Latent, Layer
from memfit.optimizers import OPTIMIZERS
from memfit.parallel.pipeline.check import counts as layers_of
from memfit.plan.memory_lower_bounds import WIDTH, Holds, Walked, passes
from memfit.simulate.bubbles import standing
from memfit.simulate.host_step import away
from memfit.simulate.pace import calls
from memfit.simulate.time import Duration, duration
from memfit.strategy import PP, Strategy
from memfit.tape import Tape

KERNELS = {"bf16-master": "bf16"}  # precisions whose passes run the kernels of another
AGAIN: Annotated[
    Mapping[str, float],
    counted(
        "share of the layers' products that checkpointing computes again at least: a bound",
        "torch.utils.checkpoint's selective policy keeps every second product, maybe the larger",
    ),
] = {"full": 1.0, "selective": 0.2}
FEW_MICRO_BATCHES = (1, 2)  # times as many as there are stages: what a bound walks
SHORT: Annotated[int, setting("layers of the short models that bounds are made of")] = 2


class Like(NamedTuple):
    """A job, and the layouts that split its model: what ranks of it run, others that share out the
    data run too. `cast`: DeepSpeed makes one precision of several."""

    job: Job
    inner: Strategy
    cast: bool = False

    @property
    def split(self) -> int:
        """Ranks that share one sequence."""
        return self.inner.size("tp") * self.inner.size("cp")

    def of(self, **changes: Any) -> Like:
        return self._replace(job=self.job.replace(**changes))


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
    """Lower bounds for one model on one cluster. Results are cached."""

    def __init__(self, model: Model, cluster: Cluster) -> None:
        self.model, self.cluster = model, cluster
        self.rates: Rates | None = rates(cluster.gpu)
        self.holds = Holds(model)
        self.counts = self.holds.counts
        self.short: dict[int, Model] = {}
        self.tapes: dict[Like, Walked | None] = {}
        self.layers: dict[tuple[Like, int], float] = {}
        self.shorts: dict[tuple[Like, int], Walked | None] = {}
        self.stages: dict[tuple[Like, PP, int], float] = {}
        self.sharded: dict[tuple[Job, Strategy, int], float] = {}
        self.moved: dict[tuple[Like, int], float] = {}
        self.known: dict[tuple[Like, int], Walked | None] = {}
        self.called: dict[tuple[str, int, Group], float] = {}

    def forget(self) -> None:
        """The walks, which know what prices them: the cycle collector would look through all of
        them to find that they can go."""
        for known in (self.tapes, self.shorts, self.known):
            known.clear()

    def compute(self, job: Job, seq: int) -> float:
        """Of the products of one sequence, at the best rate that any was measured at; nothing where
        no rate is known."""
        if self.rates is None:
            return 0.0
        best = self.quickest(job)
        fused = max(
            fraction
            for table in self.rates.attention.values()
            for row in table.values()
            for _, fraction in row
        )
        fused = max(best, fused * self.peak(job))
        layers, again, head, *_ = self.counts
        linear = 2.0 * seq * (layers + head)
        scored = sum(times * scores(layer, seq) for layer, times in self.model.kinds)
        back = self.backward(job)
        linear += back * linear * (1 - 1 / max(1, len(self.model.layers)) if back == 1 else 1)
        linear += 2 * seq * again * AGAIN.get(job.checkpointing, 0.0)
        flash = job.attention not in ("eager", "math")
        return linear / best + (scored * (1 + back) / fused if flash else 0.0)

    @staticmethod
    def backward(job: Job) -> int:
        """The least arithmetic of the backward pass, in multiples of the forward's."""
        if job.method == "full":
            return 2
        return 1 if job.adapters and not any(sign.isdigit() for sign in job.targets) else 0

    def moving(self, like: Like, batch: int) -> float:
        """Seconds a sequence of kernels that only move bytes, with nothing recomputed, in
        micro-batches of at most `batch`: what they move of weights is shared by more sequences the
        larger those are."""
        if (like, batch) not in self.moved:
            walked = self.walked(
                like.of(checkpointing="none", attention="sdpa", activation_offload="none"), batch
            )
            self.moved[like, batch] = (
                0.0 if walked is None else walked.best.get("memory", 0.0) / batch
            )
        return self.moved[like, batch]

    @cached_property
    def ideal(self) -> Rates | None:
        """Rates that are never below those reached: of products as of any size at their intensity,
        and no kernel takes time to start. With these a sequence takes the less the larger its
        micro-batch is."""
        if self.rates is None:
            return None
        rows = list(self.rates.matmul.values())
        places = sorted({place for row in rows for place, _ in row})
        best, reached = 0.0, []
        for place in places:
            best = max(best, *(along(row, place) for row in rows))
            reached.append((place, best))
        return replace(self.rates, matmul={0: tuple(reached)}, launch=0.0, taken=0.0)

    def splitting(self, like: Like, batch: int) -> float:
        """Seconds a sequence of sums over tensor-parallel ranks, in micro-batches of at most
        `batch`: one behind each block, and one behind its backward. Larger calls carry more in a
        second."""
        tp = like.inner.tp
        if tp is None or tp.size < 2:
            return 0.0
        group = Group(size=tp.size, stride=1, per_node=self.cluster.gpus_per_node)
        blocks = sum(times * len(layer.blocks) for layer, times in self.model.kinds)
        return (
            2
            * blocks
            * self.call(
                "all_reduce",
                2 * batch * like.job.seq * self.model.width // like.inner.size("cp"),
                group,
            )
            / batch
        )

    def walked(self, like: Like, batch: int) -> Walked | None:
        """One micro-batch, as the formulas have it; None where they refuse it."""
        if like.job.activation_offload != "none" and like.job.checkpointing == "full":
            return self.parked(like, batch)
        if (like, batch) not in self.known:
            precision = (
                KERNELS.get(like.job.precision, like.job.precision)
                if like.job.hugging
                else like.job.precision
            )
            one = like.of(
                batch=batch, accumulate=1, optimizer="sgd", precision=precision, evaluate=False
            )._replace(cast=False)
            if one not in self.tapes:
                tape = self.lowered(one)
                self.tapes[one] = None if tape is None else Walked(tape, partial(self.priced, one))
            self.known[like, batch] = self.tapes[one]
        return self.known[like, batch]

    def parked(self, like: Like, batch: int) -> Walked | None:
        """Of a micro-batch whose checkpoints wait on the host: as if all that the forward leaves
        did, and no copy were waited for."""
        plain = self.walked(like.of(activation_offload="none"), batch)
        return None if plain is None else Walked(plain.tape, plain.time, parked=True)

    def priced(self, like: Like, tape: Tape, ideal: bool) -> Mapping[str, float]:
        """Seconds of a step by part."""
        chosen = self.ideal if ideal else self.rates
        found = None if chosen is None else self.duration(tape, like, chosen)
        return {} if found is None else found.parts

    def staged(
        self,
        like: Like,
        strategy: Strategy,
        micro: tuple[int, int],
        walked: Walked,
        *,
        closely: bool = True,
    ) -> float:
        """Of the kernels of all micro-batches, the least share that a rank of a pipeline is busy or
        waits: no stage is quicker than the mean one, nor (`closely`, for which layers are walked)
        than the last, which has the head; and a chunk of one micro-batch passes through all others
        before and behind it."""
        pp, (batch, times) = strategy.pp, micro
        if pp is None or pp.size == 1 or walked.seconds <= 0:
            return 1.0
        slowest = 1 / pp.size
        parts = layers_of(pp, len(self.model.layers)) or ()
        if (
            closely
            and len(self.model.kinds) == 1
            and len(parts) >= pp.size
            and self.rates is not None
        ):
            head = (
                2.0
                * batch
                * like.job.seq
                * self.counts.head
                * (1 + self.backward(like.job))
                / like.split
            )
            last = sum(parts[pp.size - 1 :: pp.size]) * self.layer(
                like, batch
            ) + head / self.quickest(like.job)
            slowest = min(1.0, max(slowest, last / walked.seconds))
        return slowest + (1 - slowest) / (times * pp.virtual)

    def layer(self, like: Like, batch: int) -> float:
        """Seconds of one layer's passes, of a model in which all are alike."""
        if (like, batch) not in self.layers:
            short, longer = (self.shortened(like, batch, layers) for layers in (SHORT, SHORT + 1))
            self.layers[like, batch] = (
                0.0 if short is None or longer is None else max(0.0, longer.seconds - short.seconds)
            )
        return self.layers[like, batch]

    def shortened(self, like: Like, batch: int, layers: int) -> Walked | None:
        """A micro-batch of a model of so few layers."""
        short = like.of(batch=batch, accumulate=1, optimizer="sgd")._replace(cast=False)
        if (short, layers) not in self.shorts:
            model = self.short.setdefault(
                layers, replace(self.model, layers=self.model.layers[:1] * layers)
            )
            tape = self.lowered(short, model)
            self.shorts[short, layers] = (
                None if tape is None else Walked(tape, partial(self.priced, short))
            )
        return self.shorts[short, layers]

    def staying(
        self, like: Like, strategy: Strategy, micro: tuple[int, int], walked: Walked
    ) -> int:
        """Bytes that the layers of a pipeline's first stage keep for the backward, of as many
        micro-batches as are under way there."""
        pp, (batch, times), layers = strategy.pp, micro, len(self.model.layers)
        if pp is None or pp.size == 1 or len(self.model.kinds) > 1 or layers <= SHORT:
            return 0
        short = self.shortened(like, batch, SHORT)
        each = (
            0
            if short is None
            else max(0, walked.room.between - short.room.between) // (layers - SHORT)
        )
        return each * (layers // (pp.size * pp.virtual)) * under_way(pp, times)

    def pipelined(
        self, like: Like, strategy: Strategy, micro: tuple[int, int], walked: Walked
    ) -> float:
        """Seconds of the passes of a pipeline whose last stage works no less than by its own
        tape."""
        pp, (batch, times) = strategy.pp, micro
        if pp is None or self.rates is None or times < pp.size or not like.job.hugging:
            return 0.0  # Megatron's tapes are cut short, and not every pass on them is alike
        last, whole = (
            times * self.stage(like, pp, batch),
            times * (walked.seconds + batch * self.splitting(like, batch)),
        )
        return last + max(0.0, whole - last) / (times * pp.virtual)

    def stage(self, like: Like, pp: PP, batch: int) -> float:
        """Seconds a micro-batch of the last stage without replicas and shards, in as few
        micro-batches as every schedule takes; what is sent goes to a near neighbour."""
        few = replace(pp, micro_batches=pp.size)
        if (like, few, batch) not in self.stages:
            inner = replace(like.inner, pp=few)
            job = like.job.replace(batch=batch, accumulate=pp.size, optimizer="sgd")
            tape = self.lowered(Like(job, replace(inner, rank=inner.ranks - 1)))
            turns = standing(few, pp.size - 1, pp.size, whole=job.hugging)
            assert self.rates is not None
            found = (
                None
                if tape is None
                else duration(
                    tape, self.rates, job, 0, calls=calls(self.cluster, inner), turns=turns
                )
            )
            self.stages[like, few, batch] = (
                0.0 if found is None else (found.seconds - found.stepping) / pp.size
            )
        return self.stages[like, few, batch]

    def sharded_stage(self, job: Job, strategy: Strategy, micro: tuple[int, int]) -> float:
        """Seconds of the kernels of all micro-batches on a pipeline's last stage, with the casts of
        sharded weights, which `stage` leaves out: of one micro-batch what more of them add. Nothing
        where that is as much work as an answer. Sharded over all GPUs of a stage, and gathered once
        a step, they are fewest."""
        pp, fsdp, (batch, times) = strategy.pp, strategy.fsdp, micro
        if (
            pp is None
            or fsdp is None
            or not job.hugging
            or times <= len(FEW_MICRO_BATCHES) * pp.size
        ):
            return 0.0
        whole = replace(fsdp, size=fsdp.size * strategy.size("ddp"), reshard=False, reshard_to=0)
        inner = replace(strategy, ddp=None, fsdp=whole, rank=strategy.ranks - 1)
        key = job, inner, batch
        if key not in self.sharded:
            one, two = (
                self.stage_kernels(job, replace(pp, micro_batches=count * pp.size), inner, batch)
                for count in FEW_MICRO_BATCHES
            )
            self.sharded[key] = max(0.0, two - one) / pp.size if one else 0.0
        return times * self.sharded[key]

    def stage_kernels(self, job: Job, pp: PP, strategy: Strategy, batch: int) -> float:
        """Seconds of the kernels of the last stage's passes; 0 where they are not known."""
        times, inner = pp.micro_batches, replace(strategy, pp=pp)
        job = job.replace(batch=batch, accumulate=times, optimizer="sgd")
        tape = self.lowered(Like(job, inner))
        if tape is None or self.rates is None:
            return 0.0
        turns = standing(pp, pp.size - 1, times, whole=job.hugging)
        found = duration(tape, self.rates, job, 0, calls=calls(self.cluster, inner), turns=turns)
        return 0.0 if found is None else passes(found.parts)

    def quickest(self, job: Job) -> float:
        """Of the arithmetic of products, the best rate that any was measured at."""
        assert self.rates is not None
        return self.peak(job) * max(
            fraction for row in self.rates.matmul.values() for _, fraction in row
        )

    def peak(self, job: Job) -> float:
        assert self.rates is not None
        return max(
            self.rates.rate(math)
            for math in (("fp32",) if job.precision == "fp32" else ("bf16", "fp16"))
        )

    def lowered(self, like: Like, model: Model | None = None) -> Tape | None:
        try:
            return lower(model or self.model, like.job, like.inner, self.cluster, compact=True)
        except (InputError, NotImplementedError):
            return None

    def duration(self, tape: Tape, like: Like, rates: Rates) -> Duration | None:
        return duration(tape, rates, like.job, 0, calls=calls(self.cluster, like.inner))

    def stepping(self, job: Job, strategy: Strategy) -> float:
        """Of the optimizer's own kernels, or of what the host does instead."""
        if self.rates is None:
            return 0.0
        host = away(self.cluster, strategy, self.holds.trainable(job), 2)
        if host is not None:
            return 0.0 if self.rates.host is None else host.seconds + host.weights / self.rates.host
        copies = (
            1 if strategy.ddp is not None and strategy.ddp.distributed else strategy.size("ddp")
        )
        values = self.holds.trainable(job) * copies // strategy.ranks
        optimizer = OPTIMIZERS[job.optimizer]
        if "like" not in optimizer.states:  # what `stepped` goes by
            wide = job.precision == "fp32" or job.autocast or job.method != "full"
            width = 4 if wide else FORMATS[self.model.dtype].block_bytes
            return self.rates.moved(
                optimizer.moved
                * (self.holds.trainable(job) * width // (strategy.ranks // strategy.size("ddp")))
            )
        flat = (
            strategy.zero is not None and "like" in optimizer.states
        )  # DeepSpeed steps copies in fp32
        width = 4 if flat or job.precision == "fp32" else 2
        return self.rates.moved(optimizer.moved * width * values)

    def calling(self, job: Job, strategy: Strategy, times: int) -> float:
        """Of the collectives that carry gradients and gathered weights, as if each were one call
        without latency; of a pipeline's, whose stages may keep what is gathered from one
        micro-batch to the next, those of one."""
        times = times if strategy.size("pp") == 1 else 1
        found, values = 0.0, self.holds.trainable(job)
        split = strategy.size("tp") * strategy.size("pp") * strategy.size("ep")
        weights = round(WIDTH.get(job.quantization, 1) * self.counts.values) // split
        for name, size, stride in strategy.groups:
            group = Group(size=size, stride=stride, per_node=self.cluster.gpus_per_node)
            shards = strategy.shards if name == "ddp" and strategy.fsdp is not None else 1
            if name == "ddp":
                found += self.call("reduce_scatter", 2 * values // split // shards, group)
            elif name == "fsdp":
                found += times * self.gathers(strategy) * self.call("all_gather", weights, group)
                sums = (
                    times
                    if strategy.fsdp is not None and strategy.fsdp.sync and job.method == "full"
                    else 0
                )
                found += sums * self.call("reduce_scatter", 2 * self.counts.values // split, group)
            elif name == "zero" and strategy.zero is not None and strategy.zero.stage == 3:
                found += times * self.call("all_gather", weights, group)
        return found

    def gathers(self, strategy: Strategy) -> float:
        """How often FSDP gathers a weight in a micro-batch: again for the backward, but for what it
        kept."""
        fsdp = strategy.fsdp
        again = fsdp is not None and fsdp.reshard and fsdp.shard and not fsdp.reshard_to
        return 1 + (1 - 2 / max(2, len(self.model.layers)) if again else 0)

    def call(self, op: str, size: int, group: Group) -> float:
        key = op, size, group
        if key not in self.called:
            full, empty = (seconds(op, one, group, self.cluster) for one in (size, 0))
            self.called[key] = 0.0 if full is None or empty is None else full - empty
        return self.called[key]


def under_way(pp: PP, times: int) -> int:
    """Passes through one of its chunks that a pipeline's first stage has between forward and
    backward at most, at least."""
    return (
        in_flight(pp, 0, times) if pp.schedule in ("1f1b", "interleaved") else min(times, pp.size)
    )


def sharing(strategy: Strategy) -> tuple[object, ...]:
    """All that `alike` looks at."""
    stage = 0 if strategy.zero is None else strategy.zero.stage
    return (
        strategy.tp,
        strategy.cp,
        (stage > 0, stage == 3),
        strategy.pp is None,
        strategy.size("fsdp") > 1,
        strategy.size("ep") > 1,
    )


def alike(job: Job, strategy: Strategy) -> Like | None:
    """Whose kernels are among those of a rank; None where no walk tells. DeepSpeed casts all there
    is to 16 bits, and FSDP gathers in 16 bits where others run under autocast: both leave casts
    out."""
    if strategy.size("ep") > 1 or (strategy.pp is not None and strategy.zero is not None):
        return None
    inner = Strategy(tp=strategy.tp, cp=strategy.cp)
    if strategy.zero is not None or (strategy.size("fsdp") > 1 and job.autocast):
        half = next((name for name in ("bf16", "fp16") if name in job.precision), job.precision)
        whole = (
            strategy.zero is not None and strategy.zero.stage == 3
        )  # whose adapters are made in parts, and stay as they are
        cast = job.replace(
            precision=half, adapter_dtype=job.adapter_dtype if whole else "base", prepare_kbit=False
        )
        return Like(cast, inner, strategy.zero is not None)
    return Like(job, inner)


def closest(strategy: Strategy) -> Strategy:
    """The layout that runs the same kernels and holds the least: with all ranks that share the data
    in one group of shards, on the GPU."""
    fsdp, zero = strategy.fsdp, strategy.zero
    if zero is not None:
        return replace(strategy, zero=replace(zero, offload_optimizer="none", offload_param="none"))
    if fsdp is None or fsdp.size == 1 or strategy.size("pp") * strategy.size("ep") > 1:
        return strategy
    return replace(
        strategy, ddp=None, fsdp=replace(fsdp, size=fsdp.size * strategy.size("ddp"), offload=False)
    )


__all__ = ["Bounds", "Like", "alike", "closest", "sharing", "under_way"]
