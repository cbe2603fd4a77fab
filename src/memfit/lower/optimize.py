"""The optimizer's step: states that appear at the first one, temporaries of every one, gradients
that go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property

from memfit.errors import InputError
from memfit.formats import BF16, BOOL, FP32, INT64, UINT8, Format
from memfit.lazy_dataclass import dataclass
from memfit.lower.recorder import Recorder
from memfit.lower.tensors import Shape, Tensor
from memfit.optimizers import Optimizer, Rule
from memfit.tape import Phase

Spans = list[tuple[str, list[Tensor]]]
Lists = dict[str, Spans]  # temporaries of a step by their names
Copies = list[tuple[str, list[Shape]]]  # shapes of fp32 copies by span
SMALLEST_8BIT = (
    4096  # bitsandbytes 0.50 optim/optimizer.py min_8bit_size; torchao 0.18 optim/adam.py
)
SMALLEST_PAGED = 100_000  # bitsandbytes 0.50 optim/optimizer.py get_state_buffer
BLOCK = 256  # both: values that share one fp32 constant
RANK = 128  # of GaLore and APOLLO (transformers 5.23 trainer_optimizer.py)


@dataclass(frozen=True, kw_only=True)
class Names:
    """What optimizers tell apart: the tensors that bitsandbytes' keep in fp32 (the Trainer asks
    that for embeddings), the head's weight, and those of `torch.nn.Linear` with their spans."""

    wide: frozenset[str] = frozenset()
    head: str = ""
    linear: frozenset[tuple[str, str]] = frozenset()


class Stepper:
    """Runs one optimizer over the trained tensors, span by span, so that identical layers stay
    comparable. `cut`: names of those that tensor parallelism cuts, and of experts that are spread:
    no list holds any of them beside others. `idle`: tensors that it is given, and that get no
    gradient."""

    def __init__(
        self,
        r: Recorder,
        optimizer: Optimizer,
        spans: Spans,
        names: Callable[[], Names] = Names,
        master: bool = False,
        copies: Copies | None = None,
        cut: tuple[frozenset[str], ...] = (),
        idle: Sequence[Tensor] = (),
    ) -> None:
        if r.adds:  # fused kernels over all tensors, no lists (TE optimizers/fused_adam.py)
            optimizer = replace(
                optimizer,
                rules=tuple(replace(rule, step="", states=full(rule)) for rule in optimizer.rules),
            )
        self.r, self.optimizer, self.tell, self.cut = r, optimizer, names, cut
        self.states: list[Tensor] = []
        self.maps: list[Tensor] = []
        self.model_spans = spans
        self.spans = self.copied(spans, copies) if master else spans
        self.master = master
        self.ready: set[int] = set()
        self.check()
        for tensor in idle if master else ():
            self.copy(tensor.shape, self.states)
        if optimizer.eager_states:
            self.make_states(0)
            for tensor in idle:
                self.make_state(self.rule_of("", tensor), tensor)
        if optimizer.when != "after":
            self.hook()

    @cached_property
    def names(self) -> Names:
        """Few optimizers ask."""
        return self.tell()

    def check(self) -> None:
        """Some code fails where a parameter has three dimensions, as stacks of experts have."""
        deep = [
            tensor.name
            for _, tensors in self.model_spans
            for tensor in tensors
            if len(tensor.shape) > 2
        ]
        if self.optimizer.flat and deep:
            message = (
                f"optimizer `{self.optimizer.name}` does not support `{deep[0]}`, which "
                "has three dimensions"
            )
            raise InputError.one(message, where="job.optimizer", hint="use `lomo`")

    def copied(self, spans: Spans, shapes: Copies | None) -> Spans:
        """fp32 master copies, made before the first step, each by way of a 16-bit one
        (megatron/core/optimizer/optimizer.py Float16OptimizerWithFloat16Params,
        distrib_optimizer.py)."""
        copies: Spans = []
        for where, each in shapes or [
            (where, [one.shape for one in tensors]) for where, tensors in spans
        ]:
            self.r.mark("prepare", where)
            copies.append((where, []))
            for shape in each:
                self.copy(shape, copies[-1][1])
        if shapes is None:
            for (_, tensors), (_, masters) in zip(spans, copies, strict=True):
                for tensor, copy in zip(tensors, masters, strict=True):
                    copy.name = tensor.name
        return copies

    def copy(self, shape: Shape, into: list[Tensor]) -> None:
        """One master copy."""
        clone = self.r.tensor(shape, BF16, "clone", "temporaries")
        into.append(self.r.tensor(shape, FP32, "master", "master"))
        del clone

    def step(self, step: int) -> None:
        if self.optimizer.when != "after":
            return
        if self.master and not self.r.adds:
            self.raise_gradients(step)
        self.make_states(step)
        self.own_rows(step)
        held: Lists = {}
        for group in self.groups():
            drop(self.r, held, step)
            if self.optimizer.order == "mixed":
                for where, tensor in ((where, one) for where, tensors in group for one in tensors):
                    run(self.r, self.rule_of(where, tensor).step, [(where, [tensor])], held, step)
            for rule in self.optimizer.rules if self.optimizer.order != "mixed" else ():
                spans = [
                    (where, [one for one in tensors if self.rule_of(where, one) is rule])
                    for where, tensors in group
                ]
                run(
                    self.r,
                    rule.step,
                    [(where, tensors) for where, tensors in spans if tensors],
                    held,
                    step,
                )
                if self.optimizer.order == "apart":
                    drop(self.r, held, step)
        for where, tensors in self.spans if self.master else []:
            self.r.mark("step", where, step)
            for tensor in tensors:
                tensor.grad = None
        drop(self.r, held, step)

    def groups(self) -> list[Spans]:
        """All tensors, or cut ones and then whole ones."""
        if not self.cut:
            return [self.spans]
        known = frozenset[str]().union(*self.cut)
        apart = [
            [
                (where, [one for one in tensors if one.name in names])
                for where, tensors in self.spans
            ]
            for names in self.cut
        ]
        return [
            *apart,
            [
                (where, [one for one in tensors if one.name not in known])
                for where, tensors in self.spans
            ],
        ]

    def own_rows(self, step: int) -> None:
        """Of a gradient that is whole where the tensor is split, each operation takes a copy of
        this rank's rows (torch 2.13 distributed/tensor/_redistribute.py)."""
        for where, tensors in self.spans:
            for tensor in tensors:
                if tensor.grad is not None and tensor.grad.shape != tensor.shape:
                    self.r.mark("step", where, step)
                    self.r.scratch(tensor.grad.format.bytes(tensor.count), "clone", "temporaries")

    def raise_gradients(self, step: int) -> None:
        """Each 16-bit gradient becomes fp32 and goes."""
        for (where, tensors), (_, masters) in zip(self.model_spans, self.spans, strict=True):
            self.r.mark("step", where, step)
            for tensor, copy in zip(tensors, masters, strict=True):
                copy.grad = self.r.tensor(copy.shape, FP32, "float", "gradients")
                tensor.grad = None

    def rule_of(self, where: str, tensor: Tensor) -> Rule:
        return next(rule for rule in self.optimizer.rules if OF[rule.of](self, where, tensor))

    # ----------------------------------------------------------------------------- during backward
    def hook(self) -> None:
        """Each gradient is used up while backward runs: at once, or when the next one has come
        (lomo_optim lomo.py fuse_update)."""
        places = {
            id(tensor): (where, tensor) for where, tensors in self.spans for tensor in tensors
        }
        waiting: list[tuple[str, Tensor]] = []

        def arrived(leaf: Tensor) -> None:
            if before is not None:
                before(leaf)
            place = places.get(id(leaf))
            if place is None:
                return
            if self.optimizer.when == "lomo":
                waiting.append(place)
                place = waiting.pop(0) if len(waiting) > 1 else None
            if place is not None:
                self.use_up(*place)

        def over() -> None:
            while waiting:
                self.use_up(*waiting.pop())

        before, self.r.ready, self.r.over = self.r.ready, arrived, over

    def use_up(self, where: str, tensor: Tensor) -> None:
        """A step of one parameter."""
        rule = self.rule_of(where, tensor)
        before = self.r.where, self.r.part
        self.r.part = "temporaries"
        self.make_state(rule, tensor)
        held: Lists = {}
        for _, words in pieces(rule.step):
            for word in words:
                say(self.r, word, [(where, [tensor])], held)
        while held:
            held.popitem()
        tensor.grad = None
        self.r.where, self.r.part = before

    # -------------------------------------------------------------------------------------- states
    def make_states(self, step: int) -> None:
        for rule in self.optimizer.rules:
            for where, tensors in self.spans:
                mine = [
                    one
                    for one in tensors
                    if id(one) not in self.ready and self.rule_of(where, one) is rule
                ]
                if mine:
                    self.r.mark("step", where, step)
                for tensor in mine:
                    self.make_state(rule, tensor)

    def make_state(self, rule: Rule, tensor: Tensor) -> None:
        if id(tensor) not in self.ready:
            self.ready.add(id(tensor))
            for kind in rule.states:
                STATES[kind](self, tensor)

    def keep(self, shape: Shape, format: Format) -> None:
        self.states.append(self.r.tensor(shape, format, "state", "optimizer"))

    def blockwise(
        self, tensor: Tensor, shape: Shape, paged: bool = False, narrow: bool = False
    ) -> None:
        """One byte a value and an fp32 constant per block; small tensors and embeddings stay fp32;
        the code table is shared."""
        count = counted(shape)
        if count < SMALLEST_8BIT or (tensor.name in self.names.wide and not narrow):
            self.wide_state(shape, paged)
            return
        if not (paged and count >= SMALLEST_PAGED):
            self.keep(shape, UINT8)
        if len(self.maps) < 2:
            self.maps.append(self.r.only(self.r.tensor((256,), FP32, "code", "optimizer")))
        self.keep((-(-count // BLOCK),), FP32)

    def wide_state(self, shape: Shape, paged: bool = False) -> None:
        """fp32; a large paged state is managed memory, which the allocator never sees."""
        if not (paged and counted(shape) >= SMALLEST_PAGED):
            self.keep(shape, FP32)

    def factored(self, shape: Shape, format: Format, alone: bool = True) -> None:
        """Adafactor: a row and a column of second moments for matrices, all of them for vectors; in
        transformers' the root mean square is a scalar of its own (transformers 5.23
        optimization.py)."""
        if len(shape) >= 2:
            self.keep(shape[:-1], format)
            self.keep((*shape[:-2], shape[-1]), format)
        else:
            self.keep(shape, format)
        if alone:
            self.keep((1,), FP32)

    def torchao(self, tensor: Tensor, bits: int) -> None:
        """Codes, a scale per block, and a table for every state (torchao 0.18
        optim/subclass_8bit.py, subclass_4bit.py)."""
        if tensor.count < SMALLEST_8BIT or tensor.count % BLOCK:
            self.keep(tensor.shape, tensor.format)
            return
        self.keep((tensor.count * bits // 8,), UINT8)
        self.keep((tensor.count // BLOCK,), FP32)
        self.keep((2**bits,), FP32)

    def projection(self, tensor: Tensor) -> None:
        """Some rows of V, or columns of U; in fp32 they are a view that keeps all of them
        (galore_torch galore_projector.py)."""
        self.keep(
            SHAPES["square" if tensor.format is FP32 else "projection"](tensor.shape), tensor.format
        )

    def drop_gradients(self, step: int) -> None:
        for where, tensors in self.model_spans:
            self.r.mark("step", where, step)
            for tensor in tensors:
                tensor.grad = None


def full(rule: Rule) -> tuple[str, ...]:
    return tuple(state for state in rule.states if state != "scalar")


def counted(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


# --------------------------------------------------------------------------------- words of a step
@cache
def pieces(step: str) -> tuple[tuple[bool, tuple[str, ...]], ...]:
    """The words of a step, and whether they are done parameter by parameter."""
    found = [tuple(piece.split()) for piece in step.replace("}", "{").split("{")]
    return tuple((bool(index % 2), words) for index, words in enumerate(found) if words)


def run(r: Recorder, step: str, spans: Spans, held: Lists, at: int) -> None:
    for each, words in pieces(step):
        if each:
            for where, tensors in (*spans, ("", [])):
                r.mark("step", where, at)
                if r.notes is not None:
                    r.notes.keep(
                        r,
                        [
                            one
                            for _, lists in sorted(held.items())
                            for _, some in lists
                            for one in some
                        ],
                    )
                for tensor in tensors:
                    for word in words:
                        say(r, word, [(where, [tensor])], held)
            continue
        for format in formats(spans):
            group = [
                (where, [one for one in tensors if one.format is format])
                for where, tensors in spans
            ]
            for word in words:
                say(r, word, group, held, at)


def say(r: Recorder, word: str, spans: Spans, held: Lists, at: int | None = None) -> None:
    """One word, for these parameters: in one place, or (`at` a step) in each one's own span."""
    if word.startswith("-"):
        drop(r, {"": held.pop(word.removeprefix("-"), [])}, at)
        return
    if "=" in word:
        new, _, old = word.partition("=")
        given = held.pop(old, [])
        if new != "grad":
            held[new] = given
            return
        fresh_gradients = iter([one for _, tensors in given for one in tensors])
        for tensor in (one for _, tensors in spans for one in tensors):
            tensor.grad = next(fresh_gradients, None)
        return
    text, _, shape = word.partition("@")
    name, _, format = text.partition(":")
    fresh: Spans = []
    for where, tensors in spans:
        if at is not None:
            r.mark("step", where, at)
        fresh.append(
            (where, [one for tensor in tensors for one in made(r, tensor, name, format, shape)])
        )
    old_spans = held.pop(name, [])
    held[name] = fresh
    del fresh
    drop(r, {"": old_spans}, at)


def made(r: Recorder, tensor: Tensor, name: str, format: str, shape: str) -> Iterator[Tensor]:
    kind = FORMS[format](tensor.format)
    if kind is not None:
        if shape or kind is not tensor.format:
            yield r.tensor(SHAPES[shape](tensor.shape), kind, name)
        else:
            yield r.like(tensor, name)


def drop(r: Recorder, held: Lists, at: int | None) -> None:
    """Lists go, each with its last item first."""
    for spans in held.values():
        if at is not None:
            release(r, spans, at)
        while spans:
            _, tensors = spans.pop()
            while tensors:
                tensors.pop()


def release(
    r: Recorder, held: list[tuple[str, list[Tensor]]], step: int, phase: Phase = "step"
) -> None:
    """A list that goes frees its last item first."""
    while held:
        where, tensors = held.pop()
        r.mark(phase, where, step)
        while tensors:
            tensors.pop()


def formats(spans: Spans) -> list[Format]:
    """Dtypes in order of first appearance, as torch groups its lists."""
    return list(dict.fromkeys(tensor.format for _, tensors in spans for tensor in tensors))


def sides(shape: Shape) -> tuple[int, int, int]:
    """The larger side of a matrix, the smaller, and how many directions of it are taken."""
    short = min(shape)
    return max(shape), short, min(short, RANK)


def low(shape: Shape) -> Shape:
    """A gradient in few directions; of a matrix as high as it is wide, too, those on the right."""
    _, _, rank = sides(shape)
    return (shape[0], rank) if shape[0] >= shape[1] else (rank, shape[1])


def is_linear(stepper: Stepper, where: str, tensor: Tensor) -> bool:
    return (where, tensor.name) in stepper.names.linear or tensor.name.endswith(
        (".lora_A", ".lora_B")
    )


SHAPES: dict[str, Callable[[Shape], Shape]] = {
    "": lambda shape: shape,
    "row": lambda shape: shape[:-1],
    "column": lambda shape: (*shape[:-2], shape[-1]),
    "low": low,
    "projection": lambda shape: (sides(shape)[2], sides(shape)[1]),
    "square": lambda shape: (sides(shape)[1], sides(shape)[1]),
    "sketch": lambda shape: (shape[0], RANK) if shape[0] >= shape[1] else (RANK, shape[1]),
    "drawn": lambda shape: (RANK, sides(shape)[1]),
}
FORMS: dict[str, Callable[[Format], Format | None]] = {
    "": lambda own: own,
    "fp32": lambda own: FP32,
    "bf16": lambda own: BF16,
    "bool": lambda own: BOOL,
    "int64": lambda own: INT64,
    "wide": lambda own: None if own is FP32 else FP32,
    "narrow": lambda own: None if own is FP32 else own,
    "bf16_copy": lambda own: None if own is BF16 else BF16,
}
OF: dict[str, Callable[[Stepper, str, Tensor], bool]] = {
    "all": lambda stepper, where, tensor: True,
    "matrix": lambda stepper, where, tensor: len(tensor.shape) > 1,
    "ends": lambda stepper, where, tensor: not where,
    "inner": lambda stepper, where, tensor: (
        len(tensor.shape) == 2 and tensor.name not in (*stepper.names.wide, stepper.names.head)
    ),
    "linear": lambda stepper, where, tensor: is_linear(stepper, where, tensor),
    "rest": lambda stepper, where, tensor: not is_linear(stepper, where, tensor),
    "lora_B": lambda stepper, where, tensor: tensor.name.endswith(".lora_B"),
    "others": lambda stepper, where, tensor: not tensor.name.endswith(".lora_B"),
}
STATES: dict[str, Callable[[Stepper, Tensor], None]] = {
    "like": lambda stepper, tensor: stepper.keep(tensor.shape, tensor.format),
    "fp32": lambda stepper, tensor: stepper.keep(tensor.shape, FP32),
    "int8": lambda stepper, tensor: stepper.blockwise(tensor, tensor.shape),
    "int8_all": lambda stepper, tensor: stepper.blockwise(tensor, tensor.shape, narrow=True),
    "int8_paged": lambda stepper, tensor: stepper.blockwise(tensor, tensor.shape, paged=True),
    "fp32_paged": lambda stepper, tensor: stepper.wide_state(tensor.shape, paged=True),
    "factored": lambda stepper, tensor: stepper.factored(tensor.shape, FP32),
    "row_column": lambda stepper, tensor: stepper.factored(
        tensor.shape, tensor.format, alone=False
    ),
    "vector": lambda stepper, tensor: stepper.factored(tensor.shape, FP32, alone=False),
    "low": lambda stepper, tensor: stepper.keep(low(tensor.shape), tensor.format),
    "low_int8": lambda stepper, tensor: stepper.blockwise(tensor, low(tensor.shape), narrow=True),
    "low_factored": lambda stepper, tensor: stepper.factored(low(tensor.shape), FP32),
    "projection": lambda stepper, tensor: stepper.projection(tensor),
    "sketch": lambda stepper, tensor: stepper.keep(SHAPES["sketch"](tensor.shape), tensor.format),
    "drawn": lambda stepper, tensor: stepper.keep(SHAPES["drawn"](tensor.shape), tensor.format),
    "square": lambda stepper, tensor: stepper.keep(SHAPES["square"](tensor.shape), FP32),
    "scalar": lambda stepper, tensor: stepper.keep((1,), FP32),
    "kahan": lambda stepper, tensor: stepper.keep(
        *((tensor.shape, tensor.format) if tensor.format is not FP32 else ((1,), UINT8))
    ),
    "host": lambda stepper, tensor: None,
    "torchao_8bit": lambda stepper, tensor: stepper.torchao(tensor, 8),
    "torchao_4bit": lambda stepper, tensor: stepper.torchao(tensor, 4),
}
