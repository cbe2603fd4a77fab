"""The judge: the real transformers, PEFT and optimizer code run on tensors without data, its
allocations recorded as a Tape.

Nothing below this package imports torch; everything here may.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memfit.job import Job
from memfit.tape import Tape


def trace_config(
    config: Mapping[str, Any], job: Job, *, layers: int | None = None, **options: Any
) -> Tape:
    """Run `job` on the model that the Hugging Face `config` describes; `layers` overrides its
    number of layers.

    `options` are the fields of `program.Options` (the GPU, the number of steps, whether outputs are
    kept, …).
    """
    from memfit.trace.program import Options, run

    return run(config, job, Options(layers=layers, **options))


def trace(model: Any, job: Job, strategy: Any, cluster: Any) -> Tape:
    """The `Producer` of this package; `model.config` is the Hugging Face configuration."""
    gpu = getattr(cluster, "gpu", None)
    options = {"strategy": strategy} if strategy else {}
    return (
        trace_config(model.config, job, **options)
        if gpu is None
        else trace_config(model.config, job, gpu=gpu, **options)
    )


__all__ = ["trace", "trace_config"]
