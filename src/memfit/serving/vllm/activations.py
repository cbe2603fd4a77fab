"""The peak of torch's memory while vLLM measures: by its profiling run, by the images in it, or by
the compilation before it."""

from __future__ import annotations

from dataclasses import replace

from memfit.serving.vllm import compressed, pooling
from memfit.serving.vllm.profile import peak
from memfit.serving.vllm.setup import Setup
from memfit.serving.weights import table_rows

MODALITIES = ("vision_config", "audio_config")


def activations(setup: Setup, kernel: str = "") -> int:
    """The peak of the profiling run: of the encoder, or of the language model beside images;
    `kernel`: as if `--moe-backend` named it."""
    if compressed.is_compressed(setup.model):
        return compressed.activations(setup)
    return max(setup.images.peak, setup.images.kept + profiled(setup, kernel), copied_table(setup))


def profiled(setup: Setup, kernel: str = "") -> int:
    """The language model's part."""
    rules = replace(setup.rules, expert_kernel=kernel) if kernel else setup.rules
    if setup.pooling:
        return pooling.peak(
            setup.model, setup.rank, setup.batched, setup.requests, setup.width, rules
        )
    return peak(
        setup.model,
        setup.rank,
        setup.batched,
        setup.requests,
        setup.width,
        rules,
        setup.copies,
        second=setup.second_runner,
    )


def copied_table(setup: Setup) -> int:
    """While it compiles, vLLM times kernels that could be joined, on full-size copies of their
    arguments. The embedding table is one of them where the compiled model looks it up, which is not
    so where images are put among the tokens (config/compilation.py benchmark_combo_kernel, 0.11.2
    to 0.33.0; torch `_inductor/codegen/triton_combo_kernel.py` get_args, 2.10 to 2.13)."""
    config = setup.subject.config
    if not setup.rules.copied_table or setup.eager or not setup.fresh or setup.uncached:
        return 0  # without a cache nothing waits for what the compilation leaves
    if any(one in config for one in MODALITIES):
        return 0
    rows = table_rows(setup.model.vocab, setup.rank, setup.tensor)
    return rows * setup.model.width * setup.width
