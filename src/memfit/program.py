"""A model about to run on one rank: its layers placed, and the marks that techniques put on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from memfit.hardware import GPU
from memfit.job import Job
from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import Layer, Linear, Weight
from memfit.strategy import NAMES, ONE, Strategy


class Chunk(NamedTuple):
    """Layers that a rank runs one after the other: those of `Program.entries` from `first` up to
    `last`. `begins`, `ends`: with the embedding before them, with the head behind."""

    first: int
    last: int
    begins: bool
    ends: bool


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A rank's place in a pipeline of `count`."""

    number: int
    count: int
    micro_batches: int
    chunks: tuple[Chunk, ...]


class Entry(NamedTuple):
    """A layer as it runs: `times` identical neighbours that it stands for, itself among them, and
    whether it recomputes its activations. Where layers alternate, `period` of them repeat together.
    """

    number: int
    layer: Layer
    times: int = 1
    recompute: bool = False
    period: int = 1


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """LoRA: which linear layers get one (`targets` are ends of paths) and how it is kept."""

    rank: int
    dropout: float
    format: str
    targets: frozenset[str]
    parameters: tuple[
        tuple[str, int], ...
    ] = ()  # ends of names of parameters outside linear layers, and the rank of theirs
    everywhere: bool = False  # every linear layer but the head is meant
    excluded: tuple[str, ...] = ()  # ends of paths that `everywhere` leaves out
    saved: tuple[str, ...] = ()  # ends of paths of modules that are trained whole, as copies
    scaling: float = 1.0
    narrow: bool = False  # all that is trained is in `format`, whatever it stands beside

    def saves(self, path: str) -> bool:
        """Is the module of this path, or one that holds it, trained whole? (peft 0.21
        utils/other.py _set_trainable)"""
        if not self.saved:
            return False
        parts = path.split(".")
        return any(
            ".".join(parts[:count]).endswith(self.saved) for count in range(1, len(parts) + 1)
        )


@dataclass(frozen=True, kw_only=True)
class Quant:
    """Weights of linear layers stored by bitsandbytes, which casts their input to `compute`.
    `skip`: starts or ends of paths left as they are; `prepared`: prepare_model_for_kbit_training
    was called, and modules whose path holds one of `narrowed` were made bfloat16 again behind it.
    """

    format: str
    double: bool
    skip: tuple[str, ...]
    prepared: bool
    compute: str
    narrowed: tuple[str, ...] = ()
    # every weight is packed from this format when it is made, and once more when the checkpoint is
    # read
    again: str = ""


@dataclass(frozen=True, kw_only=True)
class Program:
    """`weights` is the format of the base weights, `autocast` the one that matrix products are cast
    to (or empty), `master` says that the optimizer keeps an fp32 copy. `trained`: parts of names;
    None trains everything."""

    model: Model
    job: Job
    entries: tuple[Entry, ...]
    weights: str
    autocast: str = ""
    master: bool = False
    trained: tuple[str, ...] | None = None
    adapter: Adapter | None = None
    quant: Quant | None = None
    gpu: GPU | None = None  # whose kernels run; None: an A100's
    opened: str = ""  # the method (`mxfp4`, `fp8`) whose weights become 16 bits as they are loaded
    input_gradients: bool = False  # enable_input_require_grads was called
    strategy: Strategy = ONE
    split: bool = False  # the model is that of one rank of `strategy.tp`
    stage: Stage | None = (
        None  # of `strategy.pp`; then the model has the layers of this stage alone
    )
    engine: str = ""  # whose data parallelism runs, where it is not torch's or DeepSpeed's
    # ranks among which fp32 copies and states are shared out (Megatron's distributed optimizer),
    shares: int = 1
    expert_shares: int = 1  # and those of experts
    joint: bool = False  # and are gathered in one unit with their layer
    spread: bool = False  # experts are those of one rank of `strategy.ep`
    on_cpu: int = 0  # bytes of weights that stay in CPU memory, where one GPU holds the rest

    def rebuilt(self, change: Callable[[Layer], Layer], **ends: Any) -> Program:
        """The model of one rank: every layer changed, each once; `ends` are other fields of the
        model."""
        known: dict[int, Layer] = {}

        def once(layer: Layer) -> Layer:
            if id(layer) not in known:
                known[id(layer)] = change(layer)
            return known[id(layer)]

        model = replace(
            self.model, layers=tuple(once(layer) for layer in self.model.layers), **ends
        )
        return self.replace(
            model=model,
            entries=tuple(entry._replace(layer=once(entry.layer)) for entry in self.entries),
        )

    def replace(self, **changes: Any) -> Program:
        """As `dataclasses.replace`, in a tenth of the time: a search asks for thousands."""
        if unknown := changes.keys() - self.__dict__.keys():
            raise TypeError(f"a program has no {', '.join(sorted(unknown))}")
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        found.__dict__.update(changes)
        return found

    @property
    def capability(self) -> tuple[int, int]:
        return self.gpu.sm if self.gpu is not None and self.gpu.sm is not None else (8, 0)

    @property
    def hidden(self) -> str:
        """The format of the first layer's input: that of the embedding, which
        prepare_model_for_kbit_training makes fp32; what is gathered may be cast, and DeepSpeed
        casts all there is."""
        if self.strategy.fsdp is not None and self.strategy.fsdp.param_dtype:
            return NAMES[self.strategy.fsdp.param_dtype]
        if self.quant is None or not self.quant.prepared or self.strategy.zero is not None:
            return self.weights
        return (
            "bfloat16"
            if any(part in self.model.embed[0].name for part in self.quant.narrowed)
            else "float32"
        )

    @property
    def processors(self) -> int:
        """Streaming multiprocessors, which decide how kernels split their work."""
        return self.gpu.sms if self.gpu is not None and self.gpu.sms is not None else 108

    @property
    def trainable(self) -> int:
        """Values that may get gradients: base weights that are trained, adapters, copies of modules
        that are trained whole."""
        if self.trained is None:
            return self.model.parameters - self.model.frozen
        trained = sum(count * times for count, _, times in self.trained_tensors())
        return trained + self.idle_adapters

    def trained_tensors(self) -> Iterator[tuple[int, bool, int]]:
        """(values, is it an embedding, how many such) of all that gets gradients."""
        model, adapter = self.model, self.adapter
        yield from (
            (weight.count, weight.role == "embedding", 1)
            for weight in model.weights()
            if self.trains(weight)
        )
        if adapter is None:
            return
        ends = (*model.embed, *model.final, model.head)
        places = [
            (linears, times) for layer, times in model.kinds for linears in [tuple(layer.linears())]
        ]
        for linears, times in [
            *places,
            (tuple(linear for module in ends for linear in module.linears()), 1),
        ]:
            for linear in linears:
                if self.adapted(linear):
                    yield adapter.rank * linear.inputs, False, times
                    yield adapter.rank * linear.outputs, False, times
        for weight in model.weights():
            rank = next(
                (rank for end, rank in adapter.parameters if weight.name.endswith(f".{end}")), 0
            )
            stack = weight.shape[0] if len(weight.shape) == 3 else 1
            if rank:
                yield stack * rank * weight.shape[-1], False, 1
                yield stack * rank * weight.shape[-2], False, 1
            if adapter.saves(weight.name.rpartition(".")[0]):
                yield weight.count, weight.role == "embedding", 1
        if model.tied and adapter.saves(model.head.name):
            yield model.head.inputs * model.head.outputs, False, 1

    @property
    def moving(self) -> int:
        """Those of the trainable values that text gives a gradient."""
        idle = sum(weight.count for weight in self.model.towers if self.trains(weight))
        return self.trainable - idle - self.idle_adapters

    @property
    def idle_adapters(self) -> int:
        """Values of the adapters in a tower, which text does not pass through."""
        found, adapter = 0, self.adapter
        for weight in self.model.towers if adapter is not None else ():
            name = weight.name.removesuffix(".weight")
            if weight.role == "linear" and len(weight.shape) == 2 and name != weight.name:
                outputs, inputs = weight.shape
                if adapter and self.adapted(Linear(name=name, inputs=inputs, outputs=outputs)):
                    found += adapter.rank * (inputs + outputs)
        return found

    def trains(self, weight: Weight, path: str = "") -> bool:
        """Is this base weight (of the full name `path`) trained? Adapters are, always."""
        if weight.role == "buffer" or weight.frozen:
            return False
        return self.trained is None or any(part in (path or weight.name) for part in self.trained)

    def adapted(self, linear: Linear) -> bool:
        """Does it get an adapter? A name means the end of a path; a module that is trained whole
        gets none (peft 0.21 tuners/tuners_utils.py check_target_module_exists)."""
        adapter = self.adapter
        if adapter is None or (adapter.saved and adapter.saves(linear.name)):
            return False
        if adapter.everywhere:
            return linear is not self.model.head and not linear.name.endswith(adapter.excluded)
        return any(linear.name == one or linear.name.endswith(f".{one}") for one in adapter.targets)

    def quantized(self, linear: Linear, path: str) -> bool:
        """Does bitsandbytes store it? The names to skip are those of the job, else the head
        (transformers 5.23 quantizers/quantizers_utils.py should_convert_module); from 5.0 on,
        nothing but nn.Linear itself is taken."""
        if self.quant is None or (linear.own_class and self.job.version("transformers") >= (5, 0)):
            return False
        return not any(
            path.endswith(one) or f"{path}.".startswith(f"{one}.")
            for one in filter(None, self.quant.skip)
        )


class Ends(NamedTuple):
    """Which layers of a run of like ones are walked by themselves, because they touch what is not
    like them."""

    first: bool = True
    last: bool = True


BOTH = Ends()


def placed(
    layers: tuple[Layer, ...], compact: bool, every: int = 1, start: int = 0, ends: Ends = BOTH
) -> tuple[Entry, ...]:
    """The layers one by one; or, compact, with one period of each long run standing for all others
    but its `ends`.

    `every`: only each such layer is treated like the one before (a period cannot be shorter).
    `start`: the number of the first."""
    entries: list[Entry] = []
    index = 0
    while index < len(layers):
        period, repeats = _run(layers, index, every) if compact else (1, 1)
        if repeats > 3:
            inner = (int(ends.first), repeats - ends.first - ends.last)
            for block, times in (
                *(((0, 1),) if ends.first else ()),
                inner,
                *(((repeats - 1, 1),) if ends.last else ()),
            ):
                entries += [
                    Entry(
                        start + index + block * period + k,
                        layers[index + block * period + k],
                        times,
                        False,
                        period,
                    )
                    for k in range(period)
                ]
            index += period * repeats
        else:
            entries.append(Entry(start + index, layers[index]))
            index += 1
    return tuple(entries)


LONGEST_PERIOD = 12


def _run(layers: tuple[Layer, ...], start: int, every: int) -> tuple[int, int]:
    """The (period, repetitions) from `start` on that covers the most layers, more than three
    times."""
    best = (1, 1)
    same = {id(layer): number for layer, number in _numbered(layers)}
    kinds = [(same[id(layer)], number % every) for number, layer in enumerate(layers)]
    if kinds.count(kinds[start]) == len(kinds):
        return (1, len(kinds) - start)
    for period in range(1, LONGEST_PERIOD + 1):
        repeats = 1
        pattern = kinds[start : start + period]
        while (
            len(pattern) == period
            and kinds[start + repeats * period : start + (repeats + 1) * period] == pattern
        ):
            repeats += 1
        if repeats > 3 and repeats * period > best[0] * best[1]:
            best = (period, repeats)
    return best


def _numbered(layers: Iterable[Layer]) -> Iterable[tuple[Layer, int]]:
    """Equal layers get equal numbers; identity is looked at first, since most layers are one
    object."""
    known: dict[int, int] = {}
    distinct: list[Layer] = []
    for layer in layers:
        if id(layer) not in known:
            known[id(layer)] = next(
                (number for number, other in enumerate(distinct) if other == layer), len(distinct)
            )
            if known[id(layer)] == len(distinct):
                distinct.append(layer)
        yield layer, known[id(layer)]
