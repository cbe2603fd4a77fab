"""What no candidate can do with less: closed-form lower bounds on the bytes that a rank holds, and
what the passes of a walk hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, NamedTuple

from memfit.constants import setting
from memfit.formats import FORMATS
from memfit.job import Job
from memfit.lower.load import idle_linears
from memfit.model.model import Model
from memfit.model.modules import MLP, MoE
from memfit.optimizers import OPTIMIZERS
from memfit.parallel.pipeline.check import counts as layers_of
from memfit.plan.weights import packed
from memfit.program_facts import trainable
from memfit.simulate.peaks import peaks
from memfit.strategy import Strategy
from memfit.tape import NOTHING, Alloc, Event, Free, Mark, Tape
from memfit.techniques.framework import facts_of
from memfit.techniques.precision import WEIGHTS
from memfit.techniques.separate_experts import separates

LESS: Annotated[
    float, setting("share of the layers' parameters that a bound counts: norms are of other sizes")
] = 0.999
STATES = {
    "like": 0,
    "int8": 1,
    "fp32": 4,
}  # bytes a value; 0: as wide as the parameter. Other states count as nothing
BESIDE = (
    "optimizer",
    "communication",
    "host",
    "launch",
)  # what of a step is no pass's kernel: sums of gradients may come once a step
WIDTH = {
    "none": 2,
    "nf4": 0.5,
    "fp4": 0.5,
}  # bytes of a linear weight that is gathered; 1 of other formats
KEPT = frozenset({"weights", "buffers", "optimizer", "master", "gradients", "inputs"})


class Counts(NamedTuple):
    """Of one token: products of all layers, those without each layer's largest, and the head's;
    values of the layers' linear weights; `experts`: those of experts beside them, in stacks."""

    layers: int
    again: int
    head: int
    values: int
    experts: int = 0


class Held(NamedTuple):
    """The most bytes that a micro-batch's passes use, without weights, states and gradients;
    `between`: when the forward is over."""

    held: int
    between: int


class Walked:
    """One micro-batch on one GPU; `time` prices its tape, at the rates that are reached or
    (`ideal`) at those that no kernel goes beyond. `parked`: what a forward leaves waits on the
    host."""

    def __init__(
        self, tape: Tape, time: Callable[[Tape, bool], Mapping[str, float]], parked: bool = False
    ) -> None:
        self.tape, self.time, self.parked = tape, time, parked

    @cached_property
    def seconds(self) -> float:
        """Of its kernels."""
        return passes(self.time(self.tape, False))

    @cached_property
    def best(self) -> Mapping[str, float]:
        return self.time(self.tape, True)

    @property
    def ideal(self) -> float:
        return passes(self.best)

    @cached_property
    def room(self) -> Held:
        found = passing(self.tape)
        return Held(found.held - found.between, 0) if self.parked else found


def passes(parts: Mapping[str, float]) -> float:
    """Seconds of the passes' kernels, of a step's parts."""
    return sum(value for kind, value in parts.items() if kind not in BESIDE)


class Kept(NamedTuple):
    """Bytes of a rank whatever its micro-batch: weights and states from step to step, gradients
    behind a backward, and layers' weights that stay gathered between the passes."""

    always: int
    gradients: int = 0
    gathered: int = 0
    states: int = 0  # of `always`, the optimizer's
    waiting: int = (
        0  # gradients behind a backward that is not the last, where they are more than behind that
    )

    def least(self, held: int, between: int, times: int) -> int:
        """With what the passes hold, of `times` micro-batches: those behind the first find its
        gradients there."""
        waiting = max(self.gradients, self.waiting) if times > 1 else 0
        return self.always + max(self.gradients, waiting + held, waiting + self.gathered + between)

    def scaled(self, share: float) -> Kept:
        """Of a rank that holds so many times the values of a mean one."""
        return Kept(*(int(share * one) for one in self))


class Holds:
    """Lower bounds on memory for one model. Results are cached."""

    def __init__(self, model: Model) -> None:
        self.model, self.counts = model, counts(model)
        self.trained: dict[Job, int] = {}

    def trainable(self, job: Job) -> int:
        if job not in self.trained:
            like = job.replace(batch=1, accumulate=1, checkpointing="none", optimizer="sgd")
            if like not in self.trained:
                self.trained[like] = trainable(self.model, like)
            self.trained[job] = self.trained[like]
        return self.trained[job]

    def kept(self, job: Job, strategy: Strategy) -> Kept:
        """Whatever lives on the host is left out; Gemini's chunks, which go there and come back,
        altogether."""
        if strategy.gemini is not None:
            return Kept(0)
        zero, fsdp = strategy.zero, strategy.fsdp
        split = (
            strategy.size("tp") * strategy.size("pp") * strategy.size("ep") * strategy.size("split")
        )
        half = (
            2
            if zero is not None and job.precision != "fp32"
            else FORMATS[WEIGHTS[job.precision]].block_bytes
        )
        whole = (
            fsdp.size
            if fsdp is not None
            else zero.size
            if zero is not None and zero.stage == 3
            else 1
        )
        weights = self.weights(job, half) // (
            split * whole * (strategy.size("cp") if fsdp is not None else 1)
        )
        stays = fsdp is not None and fsdp.size > 1 and not (fsdp.reshard or fsdp.reshard_to)
        gathered = 2 * self.counts.values // split if stays and job.quantization == "none" else 0
        staged = (
            fsdp is not None and fsdp.size > 1 and fsdp.version == 2 and strategy.size("pp") > 1
        )
        if staged and strategy.pp is not None:
            # a stage's weights stay gathered behind a backward (torch 2.13
            # distributed/pipelining/stage.py backward_maybe_with_nosync) and without `reshard`
            # those of all the stages on the rank, from their forwards on
            gathered = round(WIDTH.get(job.quantization, 1) * self.counts.values) // (
                split * (1 if stays else strategy.pp.virtual)
            )
        weights = 0 if zero is not None and zero.offload_param != "none" else weights
        if hosted(strategy):
            return Kept(0 if fsdp is not None else weights, gathered=gathered)
        shards = strategy.ranks if zero is not None or distributed(strategy) else split
        if fsdp is not None:
            shards = strategy.ranks // strategy.size("ddp")
        values = self.trainable(job) if job.method == "full" else 0
        optimizer = OPTIMIZERS[job.optimizer]
        width = 4 if zero is not None else half
        states = sum(
            STATES.get(state, -width) or width for state in optimizer.states if state in STATES
        )
        if zero is not None and half == 2 and job.method == "full":
            states += 4
        gradients = 0
        if optimizer.when == "after":
            over = (
                shards
                if fsdp is not None
                else zero.size
                if zero is not None and zero.stage > 1
                else split
            )
            gradients = half * values // over
        states = states * values // shards
        always = weights + states
        if (
            strategy.ddp is None
            or strategy.ddp.size == 1
            or fsdp is not None
            or facts_of(job.framework).engine
        ):
            whole = (
                2 * values // split if staged and optimizer.when == "after" else 0
            )  # in 16 bits, summed up behind the last backward
            return Kept(always, gradients, gathered, states, whole)
        return Kept(
            always + gradients, 0 if strategy.ddp.bucket_view else gradients, gathered, states
        )  # buckets stay

    def weights(self, job: Job, width: int) -> int:
        """Of all ranks together; none of a checkpoint that is stored quantized."""
        if packed(self.model):
            return 0
        linear = self.counts.values
        if separates(self.model, job):
            linear += self.counts.experts
        if job.quantization != "none":
            linear += self.packable
        rest = self.model.parameters - linear
        if job.quantization == "none":
            return width * (linear + rest)
        return (linear // 2 if job.quantization in ("nf4", "fp4") else linear) + 2 * rest

    @cached_property
    def packable(self) -> int:
        """Values of linear weights outside of the layers and the head."""
        model = self.model
        modules = (*model.embed, *model.final)
        linears = [one for module in modules for one in module.linears()]
        linears += idle_linears(model.towers)
        return sum(one.inputs * one.outputs for one in linears)

    def activations(self, job: Job, strategy: Strategy, batch: int, times: int) -> int:
        """What the forward leaves for the backward: inputs of the layers, or of some of their
        products, and the logits' copy in fp32. The first stage of a pipeline has several
        micro-batches under way, the last one logits."""
        tokens = batch * job.seq // (strategy.size("cp") * strategy.size("tp"))
        pp = strategy.pp
        chunks = pp.size * pp.virtual if pp is not None else strategy.size("split")
        under_way = min(times, pp.size) if pp is not None else 1
        width = self.model.width
        if job.checkpointing == "none" and job.method == "full":
            width += min(
                (mixer.width for mixer in self.model.mixers if isinstance(mixer, MLP)),
                default=0,
            )
        layers = 2 * width * (len(self.model.layers) // chunks)
        if job.activation_offload != "none":
            layers = 0
        logits = (
            4 * self.model.head.outputs
            if job.loss == "plain" and job.hugging and not job.unsloth
            else 0
        )
        if (
            strategy.size("split") > 1
        ):  # the GPU that has the logits may have fewer layers than the others
            return tokens * max(layers, logits)
        return tokens * max(layers + logits, under_way * layers)

    def ends(
        self, job: Job, strategy: Strategy, micro: tuple[int, int], staying: int, *, again: bool
    ) -> int:
        """Bytes of live tensors at the peak on the first or the last stage of a pipeline: of their
        own layers and tables, with buffers for what comes from other stages, of every micro-batch
        (parallel/pipeline/stages.py). `staying`: what waits on the first for its backward at most;
        `again`: behind one, too."""
        pp, kept, (batch, times) = strategy.pp, self.kept(job, strategy), micro
        assert pp is not None
        parts = layers_of(pp, len(self.model.layers)) or (0,)
        shares = [1.0, 1.0]
        if job.method == "full" and len(self.model.kinds) == 1:
            tables = [
                sum(weight.count for one in self.model.embed for weight in one.weights()),
                self.model.head.inputs * self.model.head.outputs,
            ]
            layers = (
                self.model.parameters - tables[0] - (0 if self.model.tied else tables[1])
            ) / len(self.model.layers)
            own = (sum(parts[:: pp.size]), sum(parts[pp.size - 1 :: pp.size]))
            shares = [
                (layers * LESS * count + table) * pp.size / self.model.parameters
                for count, table in zip(own, tables, strict=True)
            ]
        passed = 2 * batch * job.seq * self.model.width
        buffers = (
            times * passed * (2 * pp.virtual - (1 if pp.schedule != "zbv" else 2))
            if job.hugging
            else 0
        )
        logits = (
            4 * batch * job.seq * self.model.head.outputs // strategy.size("tp")
            if job.loss == "plain" and job.hugging
            else 0
        )
        first = kept.scaled(shares[0])
        most = (
            first.least(staying, staying, times)
            if again
            else max(first.least(staying, 0, 1), first.least(0, 0, times))
        )
        return buffers + max(most, kept.scaled(shares[1]).least(logits, 0, times))

    def passing(
        self, job: Job, strategy: Strategy, micro: tuple[int, int], walked: Held | None
    ) -> tuple[int, int]:
        """Bytes that the passes hold at least at once, and between forward and backward, of
        `micro`: a batch, and how many there are. A walk is of all layers, and tells nothing of a
        stage."""
        held = self.activations(job, strategy, *micro)
        return (
            (held, 0)
            if walked is None or strategy.size("pp") * strategy.size("split") > 1
            else (max(held, walked.held), walked.between)
        )

    def least(
        self, job: Job, strategy: Strategy, micro: tuple[int, int], walked: Held | None = None
    ) -> int:
        """Bytes of live tensors at the peak; of inference the weights."""
        if not job.training:
            if strategy.size("split") > 1:
                return 0  # on other devices
            split = strategy.size("tp") * strategy.size("pp") * strategy.size("ep")
            return self.weights(job, FORMATS[WEIGHTS[job.precision]].block_bytes) // split
        return self.kept(job, strategy).least(*self.passing(job, strategy, micro, walked), micro[1])


def hosted(strategy: Strategy) -> bool:
    """Whether the optimizer's states live on the host."""
    zero = strategy.zero
    return zero.offload_optimizer != "none" if zero is not None else strategy.offloads


def counts(model: Model) -> Counts:
    layers = again = values = experts = 0
    for layer, times in model.kinds:
        each = [one.inputs * one.outputs for one in layer.linears()]
        active = sum(routed(block.mixer) for block in layer.blocks if isinstance(block.mixer, MoE))
        layers += times * (sum(each) + active)
        again += times * (sum(each) + active - max([*each, active], default=0))
        values += times * sum(each)
        mixers = (block.mixer for block in layer.blocks)
        experts += times * sum(mixer.routed for mixer in mixers if isinstance(mixer, MoE))
    return Counts(layers, again, model.head.inputs * model.head.outputs, values, experts)


def routed(mixer: MoE) -> int:
    return 3 * mixer.active * mixer.inputs * mixer.width


def passing(tape: Tape) -> Held:
    """Bytes that the passes of the last step hold at most, and between them, of what is not kept
    from step to step."""
    kept = {event.id for event in tape if type(event) is Alloc and event.part in KEPT}

    def of(event: Event) -> Event:
        return (
            NOTHING if (type(event) is Alloc or type(event) is Free) and event.id in kept else event
        )

    events = tuple(map(of, tape))
    repeats = tuple(
        one._replace(odd=tuple(odd._replace(instead=of(odd.instead)) for odd in one.odd))
        for one in tape.repeats
    )
    found = peaks(replace(tape, events=events, repeats=repeats))
    last = max((step for (phase, step), _ in found.phases if phase == "forward"), default=0)
    over = next(
        (
            place
            for place, event in enumerate(events)
            if type(event) is Mark and (event.phase, event.step) == ("backward", last)
        ),
        0,
    )
    between = peaks(
        replace(
            tape, events=events[:over], repeats=tuple(one for one in repeats if one.last <= over)
        )
    ).end
    return Held(
        max(
            (
                most
                for phase, most in found.phases
                if phase in (("forward", last), ("backward", last))
            ),
            default=0,
        ),
        between,
    )


def distributed(strategy: Strategy) -> bool:
    return strategy.ddp is not None and strategy.ddp.distributed


__all__ = [
    "BESIDE",
    "Counts",
    "Held",
    "Holds",
    "Kept",
    "WIDTH",
    "Walked",
    "counts",
    "hosted",
    "passes",
    "passing",
]
