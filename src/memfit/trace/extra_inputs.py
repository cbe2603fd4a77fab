"""What some models take beside a text and images, as their processors leave it: places of words,
sound in step with the text, what a detector saw, the state of a robot. Found by the names of a
model's `forward` and by the facts of its configuration."""

from __future__ import annotations

import math
from typing import Any

import torch
from memfit.errors import InputError
from memfit.job import Job
from memfit.trace.forms import Inputs, parameters
from memfit.trace.recorder import Recorder

REGIONS = (
    36  # of an image, as bottom-up attention's detector gives them to LXMERT (arXiv 1908.07490)
)
# units of a page's side, in which tokenizers of documents give the places of words
# (tokenization_udop.py, tokenization_layoutlmv3.py)
PAGE = 1000
# Options of a configuration that values are compared with, and the one that says how often they are
# passed: a byte-level model begins a patch where the entropy of the next byte is above a threshold
# (BLT, arXiv 2412.09871).
THRESHOLDS = (("patching_threshold", "patch_size"),)


def given(recorder: Recorder, model: Any, size: int, job: Job) -> Inputs:
    """What stands beside `size` texts."""
    config, device, known, length = model.config, recorder.device.type, parameters(model), job.seq
    found: Inputs = {}
    if hasattr(model, "codec_model") and getattr(
        config, "codebook_vocab_size", None
    ):  # Kyutai: codes of sound beside each word
        found["input_ids"] = torch.randint(
            1, config.codebook_vocab_size, (size, length, config.num_codebooks + 1), device=device
        )
    if getattr(config, "dim_bbox", None):  # BROS: the corners of each word
        found["bbox"] = torch.empty(
            (size, length, config.dim_bbox), dtype=model.dtype, device=device
        )
    elif "bbox" in known:
        found["bbox"] = written_over_a_page(size, length).to(device)
        recorder.real_floats = max(
            recorder.real_floats, 8 * found["bbox"].numel()
        )  # they decide which patches of an image are kept
    if "visual_feats" in known:  # LXMERT: what a detector found in an image, and where
        for name, width in (
            ("visual_feats", config.visual_feat_dim),
            ("visual_pos", config.visual_pos_dim),
        ):
            found[name] = torch.empty((size, REGIONS, width), dtype=model.dtype, device=device)
    if frames := in_step(model):
        heard = length + (0 if job.training else job.new_tokens)
        found["input_features"] = torch.empty(
            (size, bins_of(config), frames * heard), dtype=model.dtype, device=device
        )
    if "state" in known and getattr(config, "max_state_dim", None):
        found["state"] = torch.empty((size, config.max_state_dim), dtype=model.dtype, device=device)
    return found


def written_over_a_page(size: int, length: int) -> torch.Tensor:
    """The places of words in lines, as many in each as there are lines; corners in thousandths of a
    page."""
    side = max(1, math.isqrt(length - 1) + 1)
    step = PAGE // side
    left, top = torch.arange(length) % side * step, torch.arange(length) // side * step
    places = torch.stack((left, top, left + step, top + step), -1)
    return places.expand(size, -1, -1).contiguous()


def in_step(model: Any) -> int:
    """Frames of sound for each token, where a model adds one to the other (Voxtral Realtime)."""
    frames = getattr(model.config, "audio_length_per_tok", 0)
    return int(frames) if {"input_ids", "input_features"} <= parameters(model) else 0


def bins_of(config: Any) -> int:
    return int(getattr(getattr(config, "audio_config", config), "num_mel_bins", 128))


def actions(model: Any, size: int, device: str) -> Inputs:
    """What a robot did, which such a model learns to foretell in place of tokens."""
    shape = (size, model.config.chunk_size, model.config.max_action_dim)
    return {"actions": torch.empty(shape, dtype=model.dtype, device=device)}


def loss_of(model: Any, outputs: Any) -> torch.Tensor:
    """What a class without a loss of its own cannot give."""
    found: torch.Tensor | None = getattr(outputs, "loss", None)
    if found is None:
        message = f"`{type(model).__name__}` returns no loss, so a plain loop cannot train it"
        raise InputError.one(
            message,
            where="job.task",
            hint=("use `--task inference`, or trace your own training script"),
        )
    return found


def decide(recorder: Recorder, model: Any) -> None:
    """Comparisons of values that nobody knows, on which the length of what follows depends: passed
    at every so-many-th place."""
    for name, often in THRESHOLDS:
        threshold, every = getattr(model.config, name, None), getattr(model.config, often, None)
        if isinstance(threshold, float) and isinstance(every, int) and every > 0:
            recorder.decided[threshold] = (
                every,
                f"assumes one `{name}` in {every} tokens (`{often}`)",
            )


__all__ = ["actions", "decide", "given", "in_step", "loss_of"]
