"""Spread a model over ranks as its strategy says, by torch's own wrappers: for the trace and for
real steps alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from memfit.strategy import FSDP, ONE, Strategy
from memfit.trace import experts, flat, stages, tensors, ulysses
from memfit.trace.flat import DTYPES


@dataclass(frozen=True)
class Spread:
    """A strategy and the mesh of its ranks; of one rank it changes nothing."""

    strategy: Strategy = ONE
    mesh: Any = None
    autocast: bool = False
    experts: Any = None  # the mesh of the same ranks as experts see them, where those are spread

    @property
    def cuts(self) -> bool:
        """Whether a rank loads less than the whole model."""
        return any(
            one is not None
            for one in (self.strategy.fsdp, self.strategy.tp, self.strategy.pp, self.experts)
        )

    def split(self, model: Any) -> Any:
        """Into stages, and matrices over ranks: transformers' own model, before there are adapters,
        which PEFT makes like them."""
        if self.strategy.pp is not None:
            return stages.cut(model, self.strategy, self.matrices)
        return self.matrices(model)

    def matrices(self, model: Any) -> Any:
        model = (
            model
            if self.strategy.tp is None
            else tensors.cut(model, self.strategy.tp, self.mesh["tp"], self.strategy.size("ep"))
        )
        return (
            model
            if self.experts is None
            else experts.spread(model, self.mesh, self.experts, "auto")
        )

    def cut(self, model: Any) -> Any:
        """Before it is loaded: only this rank's part will be."""
        fsdp = self.strategy.fsdp
        if fsdp is not None and fsdp.version == 1:
            made = flat.wrapped(model, fsdp, self.groups(), layers_of(base(model)))
            return flat.widened(made) if self.autocast else made
        if fsdp is not None:
            for one, body in (
                [(part, part.whole) for part in model.parts]
                if self.strategy.pp is not None
                else [(model, base(model))]
            ):
                fully_sharded(one, body, fsdp, self.shards(), self.experts)
        return model

    def groups(self) -> Any:
        """The process group that weights are sharded over, and with replicas theirs beside it."""
        group = self.mesh.get_group("fsdp")
        return group if self.strategy.ddp is None else (group, self.mesh.get_group("ddp"))

    def shards(self) -> Any:
        """The mesh that weights are sharded over: ranks of a sequence take part (accelerate 1.15
        and torchtitan: `dp_shard_cp`)."""
        if self.strategy.cp is not None:
            return self.mesh["fsdp", "cp"]._flatten("dp_shard_cp")
        return self.mesh["ddp", "fsdp"] if self.strategy.ddp is not None else self.mesh["fsdp"]

    def wrapped(self, model: Any) -> Any:
        """When it is loaded and ready to train: DDP around it."""
        ddp = self.strategy.ddp
        if self.strategy.cp is not None and ulysses.ranks(self.strategy) == 1:
            from accelerate.big_modeling import _attach_context_parallel_hooks

            _attach_context_parallel_hooks(model)
        if ddp is None or self.strategy.fsdp is not None:
            return model
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(
            model,
            process_group=self.mesh.get_group("ddp"),
            bucket_cap_mb=ddp.bucket_mb or None,
            gradient_as_bucket_view=ddp.bucket_view,
            static_graph=ddp.static_graph,
            find_unused_parameters=ddp.find_unused == "yes",
        )

    @contextlib.contextmanager
    def inputs(self, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Positions are those of the whole sequence, of which sequence and context parallelism
        leave each rank a part."""
        tp, cp = self.strategy.tp, self.strategy.cp
        if cp is None and (tp is None or not tp.sequence):
            yield given
            return
        if ulysses.ranks(self.strategy) > 1:
            yield ulysses.part(given, self.strategy)
            return
        tokens = given["input_ids"]
        given = {
            **given,
            "position_ids": torch.arange(tokens.shape[1], device=tokens.device).expand(
                tokens.shape[0], -1
            ),
        }
        if cp is None:
            yield given
            return
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        given["shift_labels"] = torch.nn.functional.pad(given["labels"], (0, 1), value=-100)[
            :, 1:
        ].contiguous()
        set_rotate_method("allgather" if cp.style == "allgather" else "alltoall")
        buffers = list(
            given.values()
        )  # as the Trainer has it (transformers 5.23 trainer.py `_prepare_context_parallel_inputs`)
        with context_parallel(
            self.mesh["cp"],
            buffers=buffers,
            buffer_seq_dims=[1] * len(buffers),
            no_restore_buffers=set(buffers),
        ):
            yield given

    @contextlib.contextmanager
    def micro_batch(self, model: Any, last: bool) -> Iterator[None]:
        """Gradients are reduced after the last micro-batch, FSDP's after each unless it is told not
        to; the loss of split logits is told that they are split."""
        tp, fsdp = self.strategy.tp, self.strategy.fsdp
        with contextlib.ExitStack() as stack:
            if hasattr(model, "no_sync") and not last and (fsdp is None or not fsdp.sync):
                stack.enter_context(model.no_sync())
            if fsdp is not None and fsdp.version == 2 and not fsdp.sync:
                model.set_requires_gradient_sync(last)
            if tp is not None and tp.parallel_loss:
                from torch.distributed.tensor.parallel import loss_parallel

                stack.enter_context(loss_parallel())
            yield


UNSPREAD = Spread()


def fully_sharded(model: Any, body: Any, fsdp: FSDP, mesh: Any, apart: Any = None) -> None:
    """Every layer a unit, and the rest with the root (torch's tutorials), or embedding and head
    units of their own, as accelerate 1.15 and torchtitan have it; `body` is transformers' own model
    in it. Experts that are spread are units within the layers, on the mesh `apart`."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    given: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[fsdp.param_dtype], reduce_dtype=DTYPES[fsdp.reduce_dtype]
        ),
    }
    if fsdp.offload:
        given["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    reshard = fsdp.reshard_to or fsdp.reshard
    if apart is not None:
        experts.sharded(body, mesh.size(), apart, given)
    layers = list(layers_of(body)) if fsdp.wrap != "none" else []
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard, **given)
    if fsdp.wrap == "ends":
        for unit, may in ends(body):
            fully_shard(unit, reshard_after_forward=may and reshard, **given)
    fully_shard(model, **({} if fsdp.reshard else {"reshard_after_forward": False}), **given)
    for place, layer in enumerate(layers):
        if fsdp.prefetch:
            layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + fsdp.prefetch])
            layer.set_modules_to_backward_prefetch(
                layers[max(0, place - fsdp.prefetch) : place][::-1]
            )


def base(model: Any) -> Any:
    """transformers' own model under adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def layers_of(model: Any) -> torch.nn.ModuleList:
    return max((one for one in model.modules() if isinstance(one, torch.nn.ModuleList)), key=len)


def ends(body: Any) -> list[tuple[Any, bool]]:
    """(unit, whether it may reshard): embedding and [norm, head] apart, or one unit where they
    share their weight (accelerate 1.15 utils/fsdp_utils.py `fsdp2_prepare_model`)."""
    embedding, head, layers = (
        body.get_input_embeddings(),
        body.get_output_embeddings(),
        layers_of(body),
    )  # of a stage the ends may be missing
    parent = next(one for one in body.modules() if any(child is layers for child in one.children()))
    norms = [one for one in parent.children() if "Norm" in type(one).__name__][-1:]
    if head is not None and embedding is not None and head.weight is embedding.weight:
        return [([*norms, embedding, head], False)]
    last = [*norms, *([] if head is None else [head])]
    return [*([] if embedding is None else [(embedding, True)]), *([(last, False)] if last else [])]


__all__ = ["UNSPREAD", "Spread", "base", "layers_of"]
