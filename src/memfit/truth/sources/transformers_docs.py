"""Figures in the documentation of transformers: the octocoder tutorial, AWQ (docs/source/en)."""

from __future__ import annotations

from memfit.truth import words
from memfit.truth.case import Unfit
from memfit.truth.published import Reading, reader
from memfit.truth.rows import Row

# tokens of the tutorial's tenfold system prompt under octocoder's tokenizer (data/octocoder.md)
LONG_PROMPT = 5770


@reader("huggingface/transformers")
def read(row: Row) -> Reading:
    if (row.metric == "nvidia-smi" and not row.model) or str(row.model) == "none":
        raise Unfit("a context, no job")
    options = words.numbers(row.text("dtype"))
    if options.get("quant", "none") != "none":
        # `load_in_8bit=True` or `load_in_4bit=True` and nothing else: the rest is loaded in fp16,
        # and 4 bits compute in bitsandbytes' own default (transformers 4.33 modeling_utils.py
        # from_pretrained, utils/quantization_config.py)
        options |= {"precision": "fp16"} | (
            {"quant_compute": "float32"} if options["quant"] != "int8" else {}
        )
    notes = []
    if isinstance(row.seq, dict) and "10x system prompt" in str(row.seq.get("input")):
        options |= {"seq": LONG_PROMPT, "new_tokens": words.length(row.seq.get("new_tokens"))}
        notes.append("the long prompt has about 5770 tokens")
    else:
        options |= words.lengths(row)
    options |= {
        "task": "inference",
        "framework": "transformers",
        "batch": words.batch(row),
        "attention": words.attention(row.text("attention")),
        "versions": words.versions(row.text("engine_version")) or dated(row.text("engine_version")),
    }
    return Reading(options=options, notes=notes)


def dated(text: str) -> str:
    """The libraries that were current in that month, where only a date is given."""
    for month, versions in (
        ("2023-09", "transformers=4.33,torch=2.0,bitsandbytes=0.41"),
        ("2023-12", "transformers=4.36,torch=2.1"),
    ):
        if month in text:
            return versions
    raise Unfit("the versions are not known", text)
