"""DeepSeek-V4 in vLLM: compressed entries, windows and states in shared blocks."""

from __future__ import annotations

import pytest

from memfit.api.engine import serve
from memfit.errors import InputError
from memfit.model import catalog
from memfit.model.source import from_catalog
from memfit.serving.base import Question
from memfit.serving.subject import subject_from
from memfit.serving.vllm.compressed import least_padding, packed
from memfit.serving.vllm.setup import set_up
from memfit.truth.served import UNSEEN, judge, read_served

FLASH = "deepseek-ai/DeepSeek-V4-Flash"
MTP = {"method": "mtp", "num_speculative_tokens": 2}
GIVEN = {
    "kv_cache_dtype": "fp8",
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 64,
    "speculative_config": MTP,
    "tensor_parallel_size": 2,
}


def test_the_log_of_two_gpus() -> None:
    """unseen-0115, whose 1.58 GiB of graphs are the only figure that was taken from it."""
    row = next(one for one in read_served(UNSEEN) if one.id == "unseen-0115")
    judged = judge(row)
    for figure, error in (("weights_gib", 0.001), ("kv_gib", 0.01), ("kv_tokens", 0.01)):
        off = judged.error(figure)
        assert off is not None
        assert abs(off) < error


def test_blocks_of_a_request() -> None:
    """21 layers of ratio 4, 20 of 128, 44 windows in two groups of 22; pages of 37,440, 8,640 and
    1,728 bytes. 10,631 blocks are the log's 1,993,100 tokens."""
    subject = subject_from(from_catalog(catalog.find(FLASH)))
    setup = set_up(Question(subject=subject, options=GIVEN, version="0.25.0"))
    made = packed(setup)
    assert [one.layers for one in made.groups] == [21, 22, 22, 21, 20]
    assert made.per_block == 22 * 37440 + 21 * 8640 + 20 * 1728
    assert made.first == 21 * 37440 + 21 * 8640 + 20 * 1728
    pages = [one.spec.pages(setup.length, setup.in_flight) for one in made.groups]
    assert pages == [4096, 67, 67, 1027, 529]
    assert made.tokens(10631, setup.length, setup.in_flight, setup.rules) == 1993100


@pytest.mark.parametrize(
    ("counts", "size"), [([21, 44, 21, 20], 22), ([11, 21], 11), ([7], 7), ([30, 61], 31)]
)
def test_groups_are_padded_least(counts: list[int], size: int) -> None:
    assert least_padding(counts) == size


def test_experts_in_nvfp4_have_twice_the_scales() -> None:
    def weights(name: str) -> float:
        answer = serve(name, engine="vllm", gpu="b200", kv_cache_dtype="fp8", offline=True)
        return answer.figures["weights_gib"]

    scales = 43 * 256 * 3 * 4096 * 2048 / 32 / 2**30
    more = weights("nvidia/DeepSeek-V4-Flash-NVFP4") - weights(FLASH)
    assert more == pytest.approx(scales, rel=0.001)


@pytest.mark.parametrize(
    ("version", "cache", "starts"),
    [
        ("", None, False),
        ("0.29.0", None, False),
        ("0.30.0", None, True),
        ("0.30.0", "bfloat16", False),
        ("0.29.0", "fp8", True),
    ],
)
def test_a_cache_that_is_not_in_8_bits(version: str, cache: str | None, starts: bool) -> None:
    """Until 0.30 vLLM does not take 8 bits by itself, and stops."""
    given = {} if cache is None else {"kv_cache_dtype": cache}
    found = serve(FLASH, engine="vllm", gpu="8xh200", engine_version=version, **given)
    assert found.fits is starts
    if not starts:
        name = cache or "auto"
        assert found.failure.endswith(f"layout only supports fp8 kv-cache, got {name}")
        assert found.remedy == "--kv-cache-dtype fp8"
    same = serve(FLASH, engine="vllm", gpu="8xh200", engine_version=version, kv_cache_dtype="fp8")
    assert found.pools == same.pools


def test_sglang_does_not_know_compressed_entries() -> None:
    with pytest.raises(InputError, match="known for vLLM alone"):
        serve(FLASH, engine="sglang", gpu="8xh200", offline=True)
