"""Why the worst cases are off, a row each: what the software did, or that nobody knows yet. A cause
never changes a number."""

from __future__ import annotations

from memfit.lazy_dataclass import dataclass
from memfit.truth.case import Case
from memfit.truth.repeats import repeats

OPEN = "not explained yet"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Holds for the cases of a source and model (empty: all), for these metrics (empty: all), on
    one GPU or several (None: both), and measured again by the publisher or not (None: either)."""

    source: str
    why: str
    model: str = ""
    metrics: tuple[str, ...] = ()
    several: bool | None = None
    again: bool | None = None

    def holds(self, case: Case) -> bool:
        named = (
            self.source in case.source
            and self.model in case.model
            and case.metric in (self.metrics or (case.metric,))
        )
        spread = case.strategy.ranks > 1
        return (
            named and self.several in (None, spread) and self.again in (None, bool(repeats(case)))
        )


CAUSES = (
    Cause(
        source="fsdp_qlora",
        model="Llama-2-7b",
        why="not explained yet: about one fp32 tensor of logits too much, near the GPU's limit",
    ),
    Cause(
        source="fsdp_qlora",
        model="Llama-2-70b",
        why=(
            "not explained yet: what packing leaves between blocks as the weights are loaded "
            "is not counted"
        ),
    ),
    Cause(
        source="foundation-model-stack",
        model="Mixtral",
        why=(
            "every expert is taken to get an equal share of the tokens; the run's router is "
            "not published"
        ),
    ),
    Cause(
        source="foundation-model-stack",
        metrics=("nvidia-smi",),
        model="PowerLM",
        why=(
            "not explained yet: what is allocated agrees within 0.2 %, what the cache keeps "
            "beside it does not; both tables of it say the same"
        ),
    ),
    Cause(
        source="foundation-model-stack",
        metrics=("nvidia-smi",),
        model="santacoder",
        why="not explained yet: the size of its tokenizer, which the run gives to embeddings and "
        "logits, is not published, and where it is not round the cache keeps one fp32 tensor of "
        "logits more; the table of February 2025 shows 1.1 to 1.4 GiB more than the one before, "
        "whatever the case",
    ),
    Cause(
        source="foundation-model-stack",
        metrics=("nvidia-smi",),
        several=False,
        again=True,
        why="not explained yet: the publisher's table of February 2025 shows 1.1 to 1.4 GiB more "
        "than the one before, whatever the case and at the same allocation",
    ),
    Cause(
        source="foundation-model-stack",
        metrics=("nvidia-smi",),
        several=True,
        again=True,
        why="the publisher's own tables of this case differ as much, at the same allocation: "
        "everything rose by 1.1 GiB, over GPTQ 2 GiB, in February 2025",
    ),
    Cause(
        source="foundation-model-stack",
        metrics=("nvidia-smi",),
        several=True,
        why="not explained yet: measured once, by a set-up whose ranks but the first wrap empty "
        "weights; how far their host runs ahead is counted in launches, not in time",
    ),
    Cause(
        source="foundation-model-stack",
        metrics=("nvidia-smi",),
        why=(
            "not explained yet: what is allocated agrees within 0.1 %, what the cache keeps "
            "beside it does not"
        ),
    ),
    Cause(
        source="QwenLM",
        model="Qwen3-",
        metrics=("allocated_end_of_generation",),
        why=(
            "not explained yet: FP8 checkpoints of 1.7B and 4B hold exactly one embedding "
            "more (594 and 742 MiB), that of 0.6B does not"
        ),
    ),
    Cause(
        source="QwenLM",
        model="Qwen1.5-1.8B",
        why=(
            "not explained yet: the AWQ checkpoint holds 920 MiB more at every length; the "
            "other models' do not"
        ),
    ),
    Cause(
        source="QwenLM",
        model="Qwen2.5-1.5B",
        why="in part: of a prompt of one token, whose peak is before the answer, by about "
        "the size of the tied head: if the checkpoint stores it "
        "apart, loading holds both until they are tied; longer prompts are within 1 %",
    ),
    Cause(
        source="modelscope/ms-swift",
        why="in part: lengths vary from batch to batch (3234 tokens in the mean, cut at the "
        "cap), and what is reserved is what many lengths leave behind "
        "(60 of them raise Qwen-1.8B at 8192 from 19 to 32 GiB, of 37); of shorter and "
        "packed ones some 8 fp32 tensors of logits more stay, "
        "whatever the model's size: not explained yet",
    ),
    Cause(
        source="pytorch/torchtitan",
        metrics=("peak_reserved",),
        model="Llama-2-7b",
        why=(
            "not explained yet: in the loop of early 2024 what is alive agrees within 1.3 %, "
            "what the cache keeps beside it does not"
        ),
    ),
    Cause(
        source="pytorch/torchtitan",
        metrics=("peak_reserved",),
        why=(
            "not explained yet: on 64 GPUs what was reserved is less than the live peaks of "
            "its streams need; how it was started is not published"
        ),
    ),
    Cause(
        source="huggingface/optimum",
        why=(
            "the publisher adds a context that he measured; here it is the middle of that "
            "GPU's range"
        ),
    ),
)


def why(case: Case) -> str:
    """The first cause that holds."""
    return next((one.why for one in CAUSES if one.holds(case)), OPEN)


__all__ = ["CAUSES", "OPEN", "Cause", "why"]
