"""torchao's llama benchmarks (torchao/_models/llama/generate.py at c4ca58dbb^): gpt-fast's model,
run eagerly or compiled."""

from __future__ import annotations

from memfit.truth import words
from memfit.truth.case import STANDS, Unfit
from memfit.truth.published import Reading, plain, reader
from memfit.truth.rows import Row, count

PROMPT = 6  # "Hello, my name is" and the begin of text, under Llama 3's tokenizer


@reader("pytorch/ao")
def read(row: Row) -> Reading:
    """The model is what litgpt's was written after: fused projections, a static cache of the length
    that is generated, logits of all positions (gpt-fast model.py; litgpt generate/base.py says so).
    """
    if "gpt-fast" not in row.text("engine"):
        return plain(row)
    options = words.numbers(row.text("dtype"))
    if str(row.more("compile")).lower() != "false":
        raise Unfit("a technique without formula", "compile")
    for other in ("kv_cache_int8", "linear_causal_mask"):
        if str(row.more(other)).lower() == "true":
            raise Unfit("a technique without formula", other)
    new = count(row.more("max_new_tokens"))
    if new is None:
        raise Unfit("the number of generated tokens is not stated", row.seq)
    options |= {
        "framework": "litgpt",
        "task": "inference",
        "batch": words.batch(row),
        "seq": PROMPT,
        "new_tokens": new,
        **words.static_cache(row),
        "cache": "static",
        "attention": "sdpa",
        "versions": "litgpt=0.4",
    }
    return Reading(options=options, notes=[STANDS])
