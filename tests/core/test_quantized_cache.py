"""The quantized cache beside the real one: sizes as optimum-quanto 0.2.7 has them under
transformers 5.23, run on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

import memfit
from memfit.formats import BF16
from memfit.lower.quantized_cache import Packed, Pair, flushes, skipped, update
from memfit.lower.recorder import Recorder

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SHAPE = (2, 4, 300, 64)  # sequences, heads, tokens, head size


def recorder() -> Recorder:
    r = Recorder()
    r.grad = False
    r.mark("decode")
    return r


def held(packed: Packed) -> int:
    return sum(
        one.storage.size
        for one in (packed.data, packed.scale, packed.shift)
        if one.storage is not None
    )


def test_packed_sizes_pass_by_pass() -> None:
    """300 tokens, then one at a time; the figures were read off the storages of
    QuantoQuantizedLayer."""
    r = recorder()
    prompt = r.tensor(SHAPE, BF16, "k")
    pair, keys, _ = update(r, None, prompt, prompt, 4)
    assert keys is prompt
    assert held(pair.packed[0]) == 86400
    seen = {}
    for step in range(1, 131):
        new = r.tensor((2, 4, 1, 64), BF16, "k")
        pair, keys, _ = update(r, pair, new, new, 4)
        seen[step] = (keys.shape[2], pair.packed[0].shape[2], held(pair.packed[1]), pair.tokens)
    assert {step: seen[step] for step in (1, 127, 128, 129)} == {
        1: (301, 300, 86400, 301),
        127: (427, 300, 86400, 427),
        128: (428, 428, 123264, 428),
        129: (429, 428, 123264, 429),
    }


@pytest.mark.parametrize("passes", [1, 127, 128, 129, 300])
def test_skipping_passes_leaves_what_walking_leaves(passes: int) -> None:
    r = recorder()
    new = r.tensor((2, 4, 1, 64), BF16, "k")
    walked, _, _ = update(r, None, r.tensor(SHAPE, BF16, "k"), r.tensor(SHAPE, BF16, "v"), 2)
    layers: dict[str, Pair] = {"": Pair(packed=walked.packed)}
    for _ in range(passes):
        walked, _, _ = update(r, walked, new, new, 2)
    jumped = skipped(r, layers, "", 300 + passes, 2)
    assert (jumped.tokens, [held(one) for one in jumped.packed]) == (
        walked.tokens,
        [held(one) for one in walked.packed],
    )
    assert (jumped.waiting is None) == (walked.waiting is None)


def test_the_pass_that_packs_anew_and_the_one_before_are_among_those_walked() -> None:
    assert (flushes(127), flushes(128), flushes(1000)) == ([], [127, 128], [895, 896])


def test_a_long_prompt_takes_a_quarter_and_the_scales() -> None:
    sizes = {}
    for cache in ("dynamic", "quantized"):
        sizes[cache] = memfit.estimate(
            SMALL, task="inference", seq=4096, new_tokens=2, batch=4, cache=cache
        ).memory.parts["kv_cache"]
    values = 2 * 4 * 4096 * 128 * 4  # keys and values, sequences, tokens, heads · head size, layers
    assert sizes["quantized"] == pytest.approx(values // 2 + values // 64 * 4, rel=0.01)
    assert sizes["dynamic"] == pytest.approx(2 * values, rel=0.01)


def test_what_the_backend_does_not_do_is_refused_at_once() -> None:
    config = {**SMALL, "model_type": "mistral", "sliding_window": 64}
    with pytest.raises(memfit.InputError) as caught:
        memfit.estimate(config, task="inference", cache="quantized", cache_bits=3, beams=2)
    assert [problem.where for problem in caught.value.problems] == [
        "job.cache_bits",
        "job.cache",
        "job.beams",
    ]


def test_a_static_cache_of_a_stated_size_is_there_whole() -> None:
    """Keys and values of every layer for the stated tokens, and in litgpt their mask, too (litgpt
    0.4 model.py build_mask_cache)."""

    def parts(**options: Any) -> dict[str, int]:
        asked = {"task": "inference", "seq": 16, "new_tokens": 4, "cache": "static", **options}
        return dict(memfit.estimate(SMALL, **asked).memory.parts)

    each = 2 * 2 * 128 * 4  # keys and values in bf16, heads · head size, layers
    assert parts()["kv_cache"] == pytest.approx(19 * each, rel=0.2)
    stated = parts(cache_tokens=4096)
    assert stated["kv_cache"] == pytest.approx(4096 * each, rel=0.01)
    litgpt = parts(cache_tokens=4096, framework="litgpt")
    assert litgpt["kv_cache"] == pytest.approx(4096 * each, rel=0.01)
    assert litgpt["buffers"] >= 4096 * 4096
    with pytest.raises(memfit.InputError) as caught:
        parts(cache_tokens=18)
    assert [problem.where for problem in caught.value.problems] == ["job.cache_tokens"]
