"""Runs a model's own forward pass on fake tensors, of which none needs a gradient, and writes down
every operation with what it reads, makes and lets go.

So a tensor lives as long as the model's own code refers to it; what autograd saves
beside that follows from the operations and is added when a graph is evaluated.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from memfit.job import Job
from memfit.lower.captured.templates import OWN
from memfit.trace import autocast, cuda, inputs, program, steps
from memfit.trace.ops import collect
from memfit.trace.paths import layer_of
from memfit.trace.recorder import Block, Recorder, local

# Arguments that say what an operation does beside the shapes of its results.
TELLING = frozenset(
    {"dim", "dim0", "dim1", "dims", "keepdim", "groups", "accumulate", "descending", "train", "p"}
)
# Autograd functions of the trace's own run these, where no gradient is recorded.
OWN_BACKWARD = frozenset({"aten::_fused_rms_norm"})
SKIPPED = frozenset({"aten::detach", "aten::_local_scalar_dense", "aten::lift_fresh"})


class Ref(NamedTuple):
    """A tensor as an operation sees it: its storage's block, and how it lies there."""

    block: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    format: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One operation that ran in the module at `where`. `sample` makes the same call again on fresh
    tensors."""

    name: str
    where: str
    inputs: tuple[Ref | None, ...]
    outputs: tuple[Ref, ...]
    attrs: Mapping[str, Any]
    sample: Any = None
    turn: int = 0  # how often its layer had been entered: some classes run one many times


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A parameter or buffer of the model, in the model's order, with the class of its module."""

    name: str
    shape: tuple[int, ...]
    format: str
    module: str
    buffer: bool
    frozen: bool = False


@dataclass(kw_only=True)
class Run:
    """What one forward pass did: calls, and the blocks that were freed between them."""

    log: list[Call | int] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # block -> weight
    weights: list[Weight] = field(default_factory=list)
    given: dict[int, str] = field(default_factory=dict)  # block -> argument of the model
    inputs: dict[str, Ref] = field(default_factory=dict)  # in the order in which they were made
    results: dict[str, Ref] = field(default_factory=dict)  # what the model returns
    kept: dict[str, Ref] = field(default_factory=dict)  # what its cache has afterwards
    dtype: str = "bfloat16"
    head: str = ""  # the module that makes logits
    head_block: int = -1
    cls: str = ""
    file: str = ""


def apart(values: Any) -> bool:
    """Whether an operation reads nothing but `x.data` or `x.detach()`, and so passes no gradient
    on."""
    found: list[torch.Tensor] = []
    collect(values, found)
    return bool(found) and all(hasattr(one, "without_gradient") for one in found)


class Writer(Recorder):
    """A recorder that also writes down calls. What a collapsed function does inside is its own
    business."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.run = Run()
        self.inside = 0
        self.turns: dict[str, int] = {}  # of layers, how often each was entered
        self.casts = 0  # of autocast, not of the model's own code
        self.writing = False
        self.marks_leaves = False  # calls that make what the model's code asks a gradient of

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        outer = self.writing and not self.inside
        before = self.refs(args, kwargs) if outer else ()
        self.inside += 1
        try:
            result = super().dispatch(func, args, kwargs)
        finally:
            self.inside -= 1
        if outer:
            telling_more = telling(func, args, kwargs)
            if apart((*args, *kwargs.values())):
                telling_more = {**telling_more, "no_grad": True}
            self.wrote(named(func), before, result, telling_more, (func, args, kwargs))
        if named(func) == "aten::detach":
            result.without_gradient = True
        return result

    def enter(self, module: Any) -> None:
        """A module that layers share, such as an activation, is part of the one that runs."""
        super().enter(module)
        path, above = self.modules[-1], layer_of(self.modules[-2]) if self.modules[1:] else ""
        if above and layer_of(path) not in ("", above):
            self.modules[-1] = self.modules[-2]
        elif self.writing and path and path == layer_of(path) == self.names.get(id(module)):
            self.turns[path] = self.turns.get(path, 0) + 1

    def wrote(
        self, name: str, before: tuple[Ref | None, ...], result: Any, attrs: Any, call: Any = None
    ) -> None:
        after = self.refs(result if isinstance(result, (tuple, list)) else (result,), {})
        made = tuple(one for one in after if one is not None)
        if name in SKIPPED or not made:
            return
        where = self.modules[-1] if self.modules else ""
        if not torch.is_grad_enabled() and not self.serving and name not in OWN_BACKWARD:
            attrs = {**attrs, "no_grad": True}
        if self.casts and name == "aten::_to_copy":
            attrs = {**attrs, "autocast": True}
        sample = None if call is None else sampled(call)
        self.run.log.append(
            Call(
                name=name,
                where=where,
                inputs=before,
                outputs=made,
                attrs=attrs,
                sample=sample,
                turn=self.turns.get(layer_of(where), 0),
            )
        )

    def mark_leaf(self, made: Ref) -> None:
        """Say of the call that made a tensor that the model's own code asks for its gradient."""
        for call in reversed(self.run.log):
            if isinstance(call, Call) and any(one.block == made.block for one in call.outputs):
                call.attrs["leaf"] = True  # type: ignore[index]
                return

    def refs(self, args: Any, kwargs: Any) -> tuple[Ref | None, ...]:
        found: list[Ref | None] = []
        for one in (*args, *kwargs.values()):
            if isinstance(one, torch.Tensor):
                found.append(self.ref(one))
            elif isinstance(one, (tuple, list)):
                found += [self.ref(item) for item in one if isinstance(item, torch.Tensor)]
        return tuple(found)

    def ref(self, tensor: torch.Tensor) -> Ref | None:
        block = self.blocks.get(local(tensor).untyped_storage()._cdata)
        if block is None:
            return None
        found = Ref(
            block.id,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.storage_offset(),
            str(tensor.dtype)[6:],
        )
        if self.marks_leaves and self.writing and tensor.requires_grad and tensor.is_leaf:
            self.mark_leaf(found)
        return found

    def free(self, block: Block) -> None:
        if block.alive and self.writing and not self.inside:
            self.run.log.append(block.id)
        super().free(block)


def named(func: Any) -> str:
    schema = func._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def telling(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Plain arguments that an evaluation needs to know."""
    found = {
        spec.name: value
        for spec, value in zip(func._schema.arguments, args, strict=False)
        if spec.name in TELLING and isinstance(value, (int, float, bool, list))
    }
    found |= {
        name: value
        for name, value in kwargs.items()
        if name in TELLING and isinstance(value, (int, float, bool, list))
    }
    return {
        name: list(value) if isinstance(value, list) else value for name, value in found.items()
    }


def sampled(call: Any) -> Any:
    """The call with descriptions in place of its tensors, so that it keeps none alive."""
    func, args, kwargs = call
    return func, described(args), {key: described(value) for key, value in kwargs.items()}


class Like(NamedTuple):
    """A tensor to be made anew for a sample of a call. `chosen`: how many places a mask selects."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    real: bool
    chosen: int = 0


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        real = not value.is_meta
        chosen = int(value.sum()) if real and value.dtype is torch.bool else 0
        return Like(tuple(value.shape), tuple(value.stride()), value.dtype, real, chosen)
    if isinstance(value, (tuple, list)):
        return type(value)(described(one) for one in value)
    return value


class Ordered(set[Any]):
    """A set that goes through its entries in their order, as Python's own does not with words."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=str))


@contextlib.contextmanager
def in_order(model: Any) -> Iterator[None]:
    """Sets that the model's file makes are in order, so that its code runs alike every time:
    rotations and masks of each kind of layers (modeling_laguna.py `set(config.layer_types)`)."""
    names = vars(sys.modules[type(model).__module__])
    names.setdefault("set", Ordered)
    try:
        yield
    finally:
        if names["set"] is Ordered:
            del names["set"]


@dataclass(frozen=True)
class Applied:
    """A `torch.autograd.Function`, recorded as one operation that can be run by itself."""

    cls: Any
    _schema = SimpleNamespace(is_mutable=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cls.apply(*args, **kwargs)


@contextlib.contextmanager
def collapsed(writer: Writer) -> Iterator[None]:
    """Functions that stand as one operation, whatever they do inside: what replaces them (adapters,
    packed weights, another kernel) then finds them."""
    functional = torch.nn.functional
    linear, attention = functional.linear, functional.scaled_dot_product_attention

    def one_linear(input: Any, weight: Any, bias: Any = None) -> Any:
        if writer.inside or not isinstance(weight, torch.nn.Parameter):
            return linear(input, weight, bias)
        before = writer.refs((input, weight, bias), {})
        writer.inside += 1
        try:
            result = linear(input, weight, bias)
        finally:
            writer.inside -= 1
        writer.wrote("linear", before, result, {})
        return result

    def one_attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Any:
        asked, held = query.shape[-3], key.shape[-3]
        if asked != held and (not enable_gqa or asked % held):  # fake tensors do not mind
            raise ValueError(f"attention of {asked} heads on {held} heads of keys")
        before = writer.refs((query, key, value, attn_mask), {})
        writer.inside += 1
        try:
            result = attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        finally:
            writer.inside -= 1
        attrs = {"p": dropout_p, "causal": is_causal, "gqa": enable_gqa}
        writer.wrote("sdpa", before, result, attrs)
        return result

    def one_function(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if writer.inside or not cls.__module__.startswith("transformers.models."):
            return apply(cls, *args, **kwargs)
        before = writer.refs(args, kwargs)
        writer.inside += 1
        try:
            result = apply(cls, *args, **kwargs)
        finally:
            writer.inside -= 1
        writer.wrote(OWN + cls.__name__, before, result, {}, (Applied(cls), args, kwargs))
        return result

    apply = torch.autograd.Function.apply.__func__
    changes = [
        (torch.autograd.Function, "apply", classmethod(one_function)),
        (functional, "linear", one_linear),
        (functional, "scaled_dot_product_attention", one_attention),
    ]
    with cuda.patched(changes):
        yield


@contextlib.contextmanager
def casting(writer: Writer, job: Job) -> Iterator[None]:
    """Inside, autocast as the job asks for it; casts of its own are marked."""
    if not job.autocast:
        yield
        return
    true = autocast.cast

    def cast(value: Any, dtype: torch.dtype) -> Any:
        writer.casts += 1
        try:
            return true(value, dtype)
        finally:
            writer.casts -= 1

    with cuda.patched([(autocast, "cast", cast)]), torch.autocast("cuda", dtype=torch.bfloat16):
        yield


def forward_of(
    config: Mapping[str, Any], job: Job, *, caching: bool = False, leaves: bool = False
) -> Run:
    """One training forward of the class that transformers has for `config`. `caching`: its config
    asks for a cache. `leaves`: as under gradient checkpointing, where some code asks for gradients
    of what it makes; autograd then keeps what follows, so such a run tells no lifetimes."""
    held: list[Writer] = []

    def perform(writer: Any, model: Any, job: Job, options: Any, plan: inputs.Plan) -> None:
        held.append(writer)
        with program.module_stack(writer), collapsed(writer), writer:
            model = steps.brought(writer, model, job, options.strategy, lambda one, on: one)
            if not job.autocast:  # what autocast casts to is the dtype of a decoder's graphs
                writer.run.dtype = str(program.DTYPES[job.precision])[6:]
            writer.names = {id(module): name for name, module in model.named_modules()}
            described_weights(writer, model)
            model.train()
            model.config.use_cache = caching
            if leaves:
                writer.marks_leaves = True
                ask_for_leaves(model)
            given = inputs.training(writer, model, job, plan, job.batch)
            described_inputs(writer, given)
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            writer.writing = True
            with casting(writer, job), in_order(model):
                outputs = model(**given)
            writer.writing = False
            described_results(writer, outputs)
            del outputs

    program.run(config, job, program.Options(recorder=Writer, perform=perform))
    return held[0].run


def ask_for_leaves(model: Any) -> None:
    """Modules that make tensors with gradients of their own under gradient checkpointing
    (modeling_t5.py T5Attention.forward) do so while they are captured."""
    for module in model.modules():
        code = type(module).forward.__code__.co_names
        if hasattr(module, "gradient_checkpointing") and "requires_grad" in code:
            module.gradient_checkpointing = True


def described_inputs(writer: Writer, given: Mapping[str, Any]) -> None:
    for name, tensor in given.items():
        ref = writer.ref(tensor)
        if ref is not None:
            writer.run.given[ref.block] = name
            writer.run.inputs[name] = ref


def described_results(writer: Writer, outputs: Any) -> None:
    for name, tensor in outputs.items():
        ref = writer.ref(tensor) if isinstance(tensor, torch.Tensor) else None
        if ref is not None:
            writer.run.results[name] = ref


def described_weights(writer: Writer, model: Any) -> None:
    import inspect

    run = writer.run
    head = model.get_output_embeddings()
    run.head = next((name for name, one in model.named_modules() if one is head), "")
    block = writer.owned(head.weight) if head is not None else None
    run.head_block = -1 if block is None else block.id
    run.cls, run.file = type(model).__name__, inspect.getfile(type(model))
    modules = dict(model.named_modules())
    tensors = [(name, one, False) for name, one in model.named_parameters()]
    tensors += [(name, one, True) for name, one in model.named_buffers()]
    for name, tensor, buffer in tensors:
        block = writer.owned(tensor)
        if block is not None:
            run.names.setdefault(block.id, name)
        run.weights.append(
            Weight(
                name=name,
                shape=tuple(tensor.shape),
                format=str(tensor.dtype)[6:],
                module=type(modules[name.rpartition(".")[0]]).__name__,
                buffer=buffer,
                frozen=not (buffer or tensor.requires_grad),
            )
        )


__all__ = ["Call", "Ref", "Run", "forward_of"]
