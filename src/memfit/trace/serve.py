"""Inference by the real `generate`: the prompt, the first tokens, and the last ones with a cache as
long as it will get."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from memfit.errors import InputError
from memfit.job import Job
from memfit.trace import classes, extra_inputs, inputs, older, pictures, sparse_caches
from memfit.trace.generation import FIRST, LAST, Generation
from memfit.trace.recorder import Recorder

# tokens that a quantized cache holds as they are (transformers 5.23 cache_utils.py QuantizedLayer)
RESIDUAL = 128


def infer(recorder: Recorder, model: Any, job: Job, options: Any, plan: inputs.Plan) -> None:
    """Prefill and decode; with `decode_all` every token is generated, otherwise the middle of a
    long answer is skipped."""
    model.eval()
    recorder.mark("prepare")
    prompt = inputs.prompt(recorder, model, job, plan, job.batch)
    recorder.serving = True
    if job.new_tokens == 0 or plan.kind in classes.SILENT:
        with torch.no_grad():
            held = model(**prompt, **asked(model, job))
        del held
        return
    if not hasattr(model, "generate"):
        message = f"`{type(model).__name__}` cannot generate: it has no `generate`"
        raise InputError.one(
            message, where="job.task", hint="use `--new-tokens 0` to trace one forward"
        )
    settings = settings_of(model, job)
    whole = older.whole(model, job) or bool(extra_inputs.in_step(model))
    long = job.new_tokens > FIRST + LAST and not options.decode_all and not whole
    if long and plan.target and job.beams == 1:
        with first_and_last_tokens(recorder, model):
            model.generate(**prompt, max_new_tokens=job.new_tokens, **settings)
        return
    skip = long and not plan.target
    # The cache, or the beams' ids (since transformers 4.50), are made as long as they get: the
    # first answer must say so.
    static = job.cache == "static" or (job.beams > 1 and hasattr(model, "_flatten_beam_dim"))
    if skip and static:
        settings["stopping_criteria"] = [Stop()]
    held = model.generate(
        **prompt, max_new_tokens=FIRST if skip and not static else job.new_tokens, **settings
    )
    if not skip:
        return
    caches = [held.past_key_values if job.cache != "none" else None]
    del held, prompt
    last_tokens(recorder, model, job, plan, settings, caches)


def last_tokens(
    recorder: Recorder,
    model: Any,
    job: Job,
    plan: inputs.Plan,
    settings: dict[str, Any],
    caches: list[Any],
) -> None:
    """Generate the last tokens, with the cache as long as it is by then. `caches` holds that cache;
    it is taken out, so that nobody else keeps it."""
    settings.pop("stopping_criteria", None)
    settings.pop("cache_implementation", None)
    settings.pop("cache_config", None)
    cache = caches.pop()
    for done, count in stretches(job):
        length = job.seq + done
        if cache is not None and not hasattr(cache, "layers"):
            wanted = older.shapes(cache, length - 1)
            del cache
            cache = None if wanted is None else older.grown(wanted)
            if cache is None:  # of a form that is not known: every token, from the start
                model.generate(
                    **inputs.prompt(recorder, model, job, plan, job.batch),
                    max_new_tokens=job.new_tokens,
                    **settings,
                )
                return
        elif cache is not None and not grown(cache, length - 1):
            return
        recorder.mark("prepare")
        recorder.calls = done
        longer = lengthened(
            recorder, model, job.replace(images=0), plan.replace(pictures=None), length
        )
        given = {} if cache is None else {"past_key_values": cache}
        if done == job.new_tokens - LAST:
            cache = None
        model.generate(**longer, max_new_tokens=count, **settings, **given)
        del longer, given


@contextmanager
def first_and_last_tokens(recorder: Recorder, model: Any) -> Iterator[None]:
    """The model is run for the first tokens of an answer and for the last ones; what the others
    leave in the cache is added one by one, as the encoder's states cannot be given anew."""

    @contextmanager
    def joining() -> Iterator[None]:
        before, recorder.origin = recorder.origin, lambda: "kv_cache"
        yield
        recorder.origin = before

    generation, original = Generation(joining), model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not recorder.serving and recorder.phase != "prepare":
            recorder.mark("prepare")
            for block in recorder.blocks.values():  # of the caller, not of this phase
                block.part = block.part or "inputs"
        skipped, result = generation.step(lambda: original(*args, **kwargs), kwargs)
        recorder.calls += skipped
        recorder.serving = generation.runs(generation.length + 1)
        return result

    model.forward = forward
    try:
        yield
    finally:
        model.forward, recorder.serving = original, True


def lengthened(
    recorder: Recorder, model: Any, job: Job, plan: inputs.Plan, length: int
) -> pictures.Inputs:
    """The prompt with what was answered so far; its ids take no more memory than the prompt's own,
    because that is what a caller holds."""
    found = inputs.prompt(recorder, model, job.replace(seq=length), plan, job.batch)
    if "input_ids" in found:
        ids = inputs.prompt(recorder, model, job, plan, job.batch)["input_ids"]
        found["input_ids"] = ids[:, :1].expand(-1, length, *ids.shape[2:])
    return found


def stretches(job: Job) -> list[tuple[int, int]]:
    """What is generated behind the first tokens: after how many, and how many. A quantized cache
    takes most where it packs anew what waited, for the last time, or just before."""
    last = (job.new_tokens - LAST, LAST)
    flush = (job.new_tokens - 1) // RESIDUAL * RESIDUAL
    if job.cache != "quantized" or flush <= FIRST or flush >= last[0]:
        return [last]
    return [(flush - 1, 2), last]


def asked(model: Any, job: Job) -> dict[str, Any]:
    """What one call of the model takes beside its inputs, as far as it knows it."""
    known = pictures.parameters(model)
    given: dict[str, Any] = {"use_cache": job.cache != "none"} if "use_cache" in known else {}
    if job.logits == "last" and accepts_keep(model):
        given["logits_to_keep"] = 1
    return given


def settings_of(model: Any, job: Job) -> dict[str, Any]:
    """The arguments of `generate`."""
    settings: dict[str, Any] = {
        "do_sample": False,
        "num_beams": job.beams,
        "return_dict_in_generate": True,
        "use_cache": job.cache != "none",
    }
    if job.cache == "quantized":
        settings |= {
            "cache_implementation": "quantized",
            "cache_config": {"backend": "quanto", "nbits": job.cache_bits},
        }
    if job.cache == "static":
        settings |= {"cache_implementation": "static"}
        if hasattr(
            model.generation_config, "disable_compile"
        ):  # transformers 4.48 does not know it yet
            settings["disable_compile"] = True
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    if job.logits == "all":
        model._supports_logits_to_keep = lambda: False
    if job.beams > 1:
        unfinished(model)
    return settings


def unfinished(model: Any) -> None:
    """Beams go on until the length is reached: whether an open beam can still win depends on
    scores. Before transformers 4.50 a scorer on the host says so, and it is never done without an
    end token."""
    original = getattr(model, "_beam_search_has_unfinished_sequences", None)
    if original is None:
        return
    names = inspect.signature(original)

    def answer(*args: Any, **kwargs: Any) -> Any:
        hits = names.bind(*args, **kwargs).arguments.get("next_token_hits_stopping_criteria")
        return original(*args, **kwargs) if hits is None or hits.is_meta else ~torch.all(hits)

    model._beam_search_has_unfinished_sequences = answer


class Stop:
    """Ends an answer after the first tokens: a static cache is as long as it gets from the
    start."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.calls += 1
        return torch.full((ids.shape[0],), self.calls > FIRST, dtype=torch.bool, device=ids.device)


def accepts_keep(model: Any) -> bool:
    return hasattr(model, "_supports_logits_to_keep") and bool(model._supports_logits_to_keep())


def grown(cache: Any, length: int) -> bool:
    """Make a growing cache as long as it would be by then; False where nothing changes, so that
    nothing more can come."""
    any_grew = False
    for layer in getattr(cache, "layers", ()):
        if hasattr(layer, "_quantized_keys"):
            packed(layer, length)
            any_grew = True
            continue
        if hasattr(layer, "max_cache_len"):
            filled(layer, length)
            any_grew = True
            continue
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.dim() != 4:
            continue
        any_grew = sparse_caches.grown(layer, length) or any_grew
        window = getattr(layer, "sliding_window", None)
        wanted = length if window is None else min(length, window - 1)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
        if wanted > keys.shape[-2]:
            any_grew = True
            shapes = [
                (one.dtype, one.device, (*one.shape[:-2], wanted, one.shape[-1]))
                for one in (keys, values)
            ]
            del keys, values
            layer.keys = layer.values = (
                None  # first: no pass holds them beside both of the new ones
            )
            layer.keys, layer.values = (
                torch.empty(shape, dtype=kind, device=device) for kind, device, shape in shapes
            )
        else:
            del keys, values
    return any_grew


def packed(layer: Any, length: int) -> None:
    """Let a quantized layer hold so many tokens: packed by `RESIDUAL`, and the rest as they are."""
    prompt = layer._quantized_keys.shape[-2]
    whole = length - (length - prompt) % layer.residual_length
    kind, rest = layer._quantized_keys.scale.dtype, length - whole
    device = layer._quantized_keys.data.device
    layer.keys = layer.values = None
    for name in ("keys", "values"):
        now = getattr(layer, f"_quantized_{name}").of(whole)
        setattr(layer, f"_quantized_{name}", now)
        shape = (*now.shape[:-2], rest, now.shape[-1]) if rest else (0,)
        setattr(layer, name, torch.empty(shape, dtype=kind, device=device))
    layer.cumulative_length = length


def filled(layer: Any, length: int) -> None:
    """Let a static layer of this length believe that it is so full."""
    layer.cumulative_length.fill_(length)
    if hasattr(layer, "cumulative_length_int"):
        layer.cumulative_length_int = length
