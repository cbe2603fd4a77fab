"""Real training steps on the CPU under torch's profiler, which records every event of the
allocator: the truth for a trace without a GPU."""

from __future__ import annotations

import contextlib
import gc
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.torch.small import Small
from torch.profiler import ProfilerActivity, profile, record_function

import torch
from memfit.tape import Alloc, Free, Mark, Tape


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Bytes alive before the first step, and every change after, in order: positive when
    allocated."""

    before: int
    changes: tuple[int, ...]

    @property
    def peak(self) -> int:
        return self.before + max(itertools.accumulate(self.changes))

    def allocations(self, smallest: int) -> list[int]:
        return [one for one in self.changes if one >= smallest]


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A plain training loop; `frozen`: parameters whose name lacks this are; `quant`: what
    transformers' BitsAndBytesConfig is told; `head`: what is called in place of the model."""

    batch: int = 2
    seq: int = 64
    steps: int = 2
    accumulate: int = 1
    clip: float = 0.0
    dtype: str = "float32"
    autocast: str = ""
    attention: str | None = None
    checkpoint: dict[str, Any] | None = None
    lora: dict[str, Any] | None = None
    quant: dict[str, Any] | None = None
    frozen: str = ""
    optimizer: Callable[[Any], Any] = torch.optim.AdamW
    zero_grad: str = "after_step"
    keep_outputs: bool = False
    merge: bool = False
    head: Callable[[Any], Callable[..., Any]] | None = None


def real(small: Small, loop: Loop) -> Changes:
    """The steps, written without memfit, and every change of the bytes alive."""
    gc.collect()
    gc.freeze()  # collections from here on look through what these steps make, and nothing else
    with (
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        model = adapted(built(small, loop), loop)
        trained = [one for one in model.parameters() if one.requires_grad]
        stepper = loop.optimizer(trained)
        before = held(
            *weights(model), *(one for state in stepper.state.values() for one in state.values())
        )
        with uncollected(), record_function("first step"):
            train(model, trained, stepper, small, loop, loop.head and loop.head(model))
            if loop.merge:
                model.merge_and_unload()
    return split(profiler, before)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The end of what an earlier model left in cycles would be counted as this one's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def built(small: Small, loop: Loop) -> Any:
    """The model as it is made, or, where that would not be the same, as it is loaded from a
    file."""
    import transformers
    from transformers import AutoConfig

    values, auto = dict(small.config), getattr(transformers, small.builder)
    wanted = AutoConfig.for_model(values.pop("model_type"), **values)
    model = auto.from_config(wanted, dtype=torch.float32, attn_implementation=loop.attention)
    if loop.dtype != "float32" or loop.quant is not None:
        settings: dict[str, Any] = {
            "dtype": getattr(torch, loop.dtype),
            "attn_implementation": loop.attention,
        }
        if loop.quant is not None:
            settings |= {
                "quantization_config": transformers.BitsAndBytesConfig(**loop.quant),
                "device_map": "cpu",
            }
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            model = auto.from_pretrained(folder, **settings)
    model.train()
    model.config.use_cache = loop.keep_outputs  # nobody switches it off in loops by hand
    return model


def adapted(model: Any, loop: Loop) -> Any:
    if loop.quant is not None:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if loop.lora is not None:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**loop.lora))
    if loop.checkpoint is not None:
        model.gradient_checkpointing_enable(loop.checkpoint)
    for name, one in model.named_parameters():
        one.requires_grad_(one.requires_grad and loop.frozen in name)
    return model


def train(
    model: Any, trained: list[Any], stepper: Any, small: Small, loop: Loop, wrapped: Any = None
) -> None:
    """`wrapped`: the model as a library of many ranks hands it out."""
    from accelerate.utils.operations import convert_outputs_to_fp32

    kind = getattr(torch, loop.autocast) if loop.autocast else None
    wrapped = model if wrapped is None else wrapped
    forward = (
        wrapped
        if kind is None
        else convert_outputs_to_fp32(torch.autocast("cpu", dtype=kind)(wrapped))
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=kind is torch.float16)
    for _ in range(loop.steps):
        if loop.zero_grad == "before_backward":
            stepper.zero_grad()
        for left in reversed(range(loop.accumulate)):
            inputs = small.given(model, loop.batch, loop.seq)
            with (
                wrapped.no_sync()
                if left and hasattr(wrapped, "no_sync")
                else contextlib.nullcontext()
            ):
                outputs = forward(**inputs)
                loss = outputs.loss
                if not loop.keep_outputs:
                    del outputs
                if loop.accumulate > 1:
                    loss = loss / loop.accumulate
                scaler.scale(loss).backward()
            del loss
        if loop.clip:
            scaler.unscale_(stepper)
            torch.nn.utils.clip_grad_norm_(trained, loop.clip)
        scaler.step(stepper)
        scaler.update()
        if loop.zero_grad != "before_backward":
            stepper.zero_grad(set_to_none=loop.zero_grad != "keep")


def weights(model: Any) -> Iterator[Any]:
    """Parameters and buffers, with the constants of those that bitsandbytes packed."""
    for one in (*model.parameters(), *model.buffers()):
        yield one
        state = getattr(one, "quant_state", None)
        for found in (state, getattr(state, "state2", None)):
            if found is not None:
                yield from vars(found).values()
        yield getattr(one, "SCB", None)


def generated(
    config: Mapping[str, Any], *, batch: int = 2, seq: int = 64, new: int = 4, **settings: Any
) -> Changes:
    """A prompt and some tokens by `generate`, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(config)
    wanted = AutoConfig.for_model(values.pop("model_type"), **values)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model: Any = AutoModelForCausalLM.from_config(wanted, dtype=torch.float32)
        model.eval()
        model.generation_config.eos_token_id = None
        before = held(*model.parameters(), *model.buffers())
        with record_function("first step"):
            pass
        prompt = torch.randint(1, wanted.get_text_config().vocab_size, (batch, seq))
        answer = model.generate(
            prompt,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            **settings,
        )
        del answer
    return split(profiler, before)


def held(*values: Any) -> int:
    """Bytes of the storages behind these tensors, each once."""
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in values
        if isinstance(one, torch.Tensor)
    }
    return sum(storages.values())


def split(profiler: Any, before: int) -> Changes:
    events = profiler.profiler.kineto_results.events()
    start = next(one.start_ns() for one in events if one.name() == "first step")
    memory = sorted(
        ((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"),
        key=lambda one: one[0],
    )
    return Changes(before=before, changes=tuple(size for at, size in memory if at >= start))


def traced(tape: Tape) -> Changes:
    """The same view of a tape: everything before the first `prepare` is the model."""
    sizes: dict[int, int] = {}
    before, changes, started = 0, [], False
    for event in tape.events:
        if isinstance(event, Mark):
            started = started or event.phase == "prepare"
        elif isinstance(event, (Alloc, Free)):
            if isinstance(event, Alloc):
                sizes[event.id] = event.size
            change = sizes[event.id] if isinstance(event, Alloc) else -sizes[event.id]
            if started:
                changes.append(change)
            else:
                before += change
    return Changes(before=before, changes=tuple(changes))
