"""Inputs of a model: token ids, labels, images and audio. They are planned once, so that the answer
can name what was assumed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from memfit.errors import InputError, Problem
from memfit.job import Job
from memfit.trace import classes, extra_inputs, versions
from memfit.trace.pictures import Inputs, Pictures, parameters, pictures, required, sees, special
from memfit.trace.recorder import Recorder

ASCII = 128
QUESTION = 16  # tokens of a question before its text
IGNORED = -100  # labels that count for nothing
TABLES = (
    "position_embeddings",
    "embed_positions",
    "wpe",
    "position_embedding",
)  # learned: there is a last position


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`kind` of model as in `job.head`; `pictures` where images are given; `target`: tokens of a
    decoder beside an encoder."""

    kind: str
    pictures: Pictures | None
    target: int
    notes: tuple[Problem, ...]

    def replace(self, **changes: Any) -> Plan:
        return dataclasses.replace(self, **changes)


def plan(model: Any, kind: str, job: Job, device: str) -> Plan:
    """Under a recorder of its own, because a vision tower is asked for the number of its tokens."""
    fits(model, job, kind)
    if job.images and not sees(model):
        raise InputError.one(
            f"`{type(model).__name__}` does not support images",
            where="job.images",
            hint="remove `images`",
        )
    if not job.images and required(model):
        raise InputError.one(
            f"`{type(model).__name__}` needs an image with every text",
            where="job.images",
            hint="`--images 1`",
        )
    found = pictures(model, job, device) if job.images else None
    target = 0
    if paired(model) and kind not in classes.SILENT:
        target = job.target_seq or job.seq
        target = min(target, special(model.config, "max_target_positions") or target)
    made = Plan(
        kind=kind,
        pictures=found,
        target=target,
        notes=tuple(notes(model, kind, job, found, target)),
    )
    if found is not None and len(found.places) > job.seq:
        message = (
            f"{found.count} images take {len(found.places)} tokens, more than the "
            f"sequence length {job.seq}"
        )
        raise InputError.one(
            message,
            where="job.seq",
            hint=f"use `--seq {len(found.places) + 128}`, or a smaller `image_size`",
        )
    return made


def fits(model: Any, job: Job, kind: str) -> None:
    """A table of learned positions has a last row."""
    for name, module in model.named_modules():
        rows = getattr(module, "num_embeddings", None)
        if (
            rows is None
            or name.rpartition(".")[2] not in TABLES
            or any(part in name for part in ("vision", "visual", "image", "video", "qformer"))
        ):
            continue
        decodes = paired(model) and "decoder" in name
        if decodes or (hearing(model) is not None):
            length = (job.target_seq if job.training else job.new_tokens) if decodes else 0
        else:
            answers = not (job.training or paired(model) or kind in classes.SILENT)
            length = job.seq + (job.new_tokens if answers else 0)
        if length > rows:
            message = f"{length} tokens exceed the {rows} positions of `{name}`"
            raise InputError.one(message, where="job.seq", hint=f"at most {rows}")


def notes(model: Any, kind: str, job: Job, found: Pictures | None, target: int) -> list[Problem]:
    told: list[tuple[str, str, str]] = []
    if found is not None:
        every = "an image" if found.count == 1 else f"{found.count} images"
        taken = (
            f", {len(found.places)} of its {job.seq} tokens"
            if found.places
            else ", in addition to its tokens"
        )
        told.append(
            (
                f"every sequence has {every} of {found.size[0]} x {found.size[1]} pixels{taken}",
                "job.images",
                "`--image-size` changes it",
            )
        )
    elif sees(model):
        told.append(
            (
                f"sequences are {job.seq} text tokens without an image",
                "job.images",
                "`--images 1` adds one to each",
            )
        )
    if target:
        heard = hearing(model)
        source = (
            f"{job.seq} tokens"
            if heard is None
            else f"{max(heard)} {'frames' if len(heard) > 1 else 'samples'} of sound"
        )
        source = source if reads(model) or heard is not None else "an image"
        answers = f"{target} tokens" if job.training else f"{job.new_tokens} new tokens"
        told.append(
            (
                f"encoder input: {source}; decoder input: {answers}",
                "job.target_seq" if job.training else "job.seq",
                "",
            )
        )
    if not job.training and kind in classes.SILENT:
        told.append(
            ("an encoder does not generate: the trace runs one forward", "job.new_tokens", "")
        )
    return [
        Problem(message=message, where=where, hint=hint, level="note")
        for message, where, hint in told
    ]


def paired(model: Any) -> bool:
    return bool(getattr(model.config, "is_encoder_decoder", False))


WAVE = 480_000  # half a minute at 16 kHz, as Whisper's window


def heard_as(model: Any) -> str:
    """The name of its main input; of a pair of two models, that of the first."""
    name: str = getattr(model, "main_input_name", "")
    return (
        getattr(model.encoder, "main_input_name", name)
        if name == "inputs" and hasattr(model, "encoder")
        else name
    )


def hearing(model: Any) -> tuple[int, ...] | None:
    """The shape of one sound for models that hear: Whisper's mel bins by frames; frames by bins; a
    wave."""
    name = heard_as(model)
    if name == "input_values" and paired(model):
        return (WAVE,)
    if name != "input_features" or extra_inputs.in_step(model):
        return None
    config = model.config
    bins = special(config, "num_mel_bins")
    frames = 2 * (special(config, "max_source_positions") or 1500)
    if bins is not None:
        return bins, frames
    inner = special(getattr(config, "encoder_config", config), "num_mel_bins")
    width = inner or (special(config, "input_feat_per_channel") or 80) * (
        special(config, "input_channels") or 1
    )
    return special(config, "max_source_positions") or frames, width


def prompt(recorder: Recorder, model: Any, job: Job, made: Plan, size: int) -> Inputs:
    """Everything but labels."""
    extra_inputs.decide(recorder, model)
    device = recorder.device.type
    heard = hearing(model)
    if heard is not None:
        return {heard_as(model): torch.empty((size, *heard), dtype=model.dtype, device=device)}
    given: Inputs = {}
    if not reads(model):
        given["pixel_values"] = torch.empty(
            (size, 3, *screen(model)), dtype=model.dtype, device=device
        )
        return given if made.pictures is None else made.pictures.make(size)
    if sees(model) or made.kind in ("classification", "question-answering"):
        given["input_ids"] = written(model, job, made, size).to(device)
    else:
        given["input_ids"] = torch.randint(
            1, versions.vocabulary(model.config) or ASCII, (size, job.seq), device=device
        )
    given |= extra_inputs.given(recorder, model, size, job)
    if made.pictures is not None:
        given |= made.pictures.make(size)
        given |= seen(model, job, made, given["input_ids"])
    if job.training and not job.packing:
        mask = torch.ones((size, job.seq), dtype=torch.int64, device=device)
        mask[:, -1] = 0
        given["attention_mask"] = mask
    return given


def reads(model: Any) -> bool:
    """Whether the main input is text."""
    return getattr(model, "main_input_name", "input_ids") in (
        "input_ids",
        "inputs_embeds",
    ) or "input_ids" in parameters(model)


def screen(model: Any) -> tuple[int, int]:
    encoder = getattr(model.config, "encoder", model.config)
    size = getattr(encoder, "image_size", 224)
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def written(model: Any, job: Job, made: Plan, size: int) -> torch.Tensor:
    """Text of one ordinary token, with the marks of images first; on the host, as a processor
    leaves it."""
    config = model.config
    marks = {
        value
        for name in dir(config)
        if name.endswith(("token_id", "token_index"))
        and isinstance(value := getattr(config, name), int)
    }
    ordinary = next(number for number in range(3, 3 + len(marks) + 1) if number not in marks)
    ids = torch.full((size, job.seq), ordinary, dtype=torch.int64)
    if made.kind in ("classification", "question-answering"):
        ids[:, -1] = special(config, "eos_token_id") or ordinary  # where BART and T5 look
        between = special(config, "sep_token_id")
        if between is not None and made.kind == "question-answering":
            ids[:, [QUESTION, QUESTION + 1, -1]] = between  # Longformer asks for three
    places = [] if made.pictures is None else made.pictures.places
    if places:
        ids[:, : len(places)] = torch.tensor(places)
    return ids


def seen(model: Any, job: Job, made: Plan, ids: torch.Tensor) -> Inputs:
    """What processors give beside the images: which tokens stand for them, and which tokens look at
    which."""
    known = parameters(model)
    given: Inputs = {}
    assert made.pictures is not None
    device, (size, length) = ids.device, ids.shape
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
        if name in known:
            kinds = torch.zeros((size, length), dtype=torch.int64)
            kinds[:, : len(made.pictures.places)] = torch.tensor(
                [int(one == made.pictures.mark) for one in made.pictures.places] or [0]
            )[: len(made.pictures.places)]
            given[name] = kinds.to(device)
    if "image_embeds_position_mask" in known:
        given["image_embeds_position_mask"] = (ids == made.pictures.mark).to(ids.dtype)
    if "image_attention_mask" in known:
        given["image_attention_mask"] = torch.ones(
            (size, length, made.pictures.count), dtype=torch.int64, device=device
        )
    if "qformer_input_ids" in known:
        asked = min(
            length - len(made.pictures.places),
            special(model.config.qformer_config, "max_position_embeddings") or length,
        )
        given |= {
            name: torch.ones((size, asked), dtype=torch.int64, device=device)
            for name in ("qformer_input_ids", "qformer_attention_mask")
        }
    if "cross_attention_mask" in known:
        tiles = special(model.config.vision_config, "max_num_tiles") or 1
        given["cross_attention_mask"] = torch.ones(
            (size, length, made.pictures.count, tiles), dtype=torch.int64, device=device
        )
    return given


def training(recorder: Recorder, model: Any, job: Job, made: Plan, size: int) -> Inputs:
    """With labels: the ids themselves, those of the decoder, a class of a sequence or of each
    token, or an answer's first and last place."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    given = prompt(recorder, model, job, made, size)
    device = recorder.device.type
    if "labels" not in parameters(model) and "actions" in parameters(model):
        given |= extra_inputs.actions(model, size, device)
    elif made.kind == "classification":
        number = int(getattr(model.config, "num_labels", 2))
        given["labels"] = torch.zeros(
            (size,), dtype=torch.int64 if number > 1 else torch.float32, device=device
        )
    elif made.kind == "question-answering":
        names = (
            ("start_positions", "end_positions")
            if "start_positions" in parameters(model)
            else ("labels",)
        )
        given |= {name: torch.zeros((size,), dtype=torch.int64, device=device) for name in names}
    elif made.kind == "token-classification":
        given["labels"] = torch.zeros(
            tuple(given["input_ids"].shape), dtype=torch.int64, device=device
        )
    elif (
        made.target and (channels := getattr(model, "num_channels", 0)) and reads(model)
    ):  # Dia: sound as codes on several channels
        given["decoder_input_ids"] = torch.randint(
            3, versions.vocabulary(model.config), (size, made.target, channels), device=device
        )
        given["labels"] = (
            given["decoder_input_ids"]
            .transpose(1, 2)
            .reshape(size * channels, made.target)
            .contiguous()
        )
    elif made.target:
        given["labels"] = torch.randint(
            3, versions.vocabulary(model.config), (size, made.target), device=device
        )
    elif sees(model):
        labels = written(model, job, made, size)
        if made.pictures is not None:
            labels[:, : len(made.pictures.places)] = IGNORED
        given["labels"] = labels.to(device)
    else:
        given["labels"] = torch.randint(
            1, versions.vocabulary(model.config), tuple(given["input_ids"].shape[:2]), device=device
        )  # a collator's copy
    return given


__all__ = ["Plan", "plan", "prompt", "sees", "training"]
