"""Images in vLLM's profiling run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memfit.api.engine import serve
from memfit.errors import InputError
from memfit.model.families import build
from memfit.model.model import Model
from memfit.serving.vllm.encoders import ENCODERS, Step, longest_side
from memfit.serving.vllm.rules import rules_of
from memfit.truth.served import UNSEEN, judge, read_served

NONE = {"image": 0, "video": 0}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "image_size": 1540,
    "patch_size": 14,
}
TEXT = {
    "model_type": "internlm2",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 92553,
    "max_position_embeddings": 32768,
    "bias": False,
}
INTERNVL = {
    "model_type": "internvl_chat",
    "architectures": ["InternVLChatModel"],
    "downsample_ratio": 0.5,
    "force_image_size": 448,
    "max_dynamic_patch": 12,
    "use_thumbnail": True,
    "torch_dtype": "bfloat16",
    "llm_config": TEXT,
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "image_size": 448,
        "patch_size": 14,
    },
}


def step_of(version: str) -> tuple[Model, Step]:
    rules = rules_of(version)
    step = Step(options={}, length=8192, batched=8192, requests=8, ranks=1, width=2, rules=rules)
    return build(TEXT), step


def activation(model: str, **more: object) -> float:
    asked = {"engine": "vllm", "gpu": "h100-sxm", "max_model_len": 8192, "offline": True, **more}
    return float(serve(model, **asked).figures["activation_gib"])


def test_a_log_with_one_image_on_v0() -> None:
    """Unsloth's notebook of Qwen2.5-VL on a T4: 2.71 GiB, of which 2.17 are the text model's."""
    row = next(one for one in read_served() if one.id == "vllm-0189")
    assert judge(row).predicted["activation_gib"] == pytest.approx(2.71, rel=0.02)


def test_what_an_image_takes() -> None:
    """Qwen3-VL's image has 16,384 tokens of 4 patches. Alive where attention projects its output:
    the input, the positions, the layer's input and its norm; queries, keys and values, queries and
    keys before and after their rotation, the output and the projection. Of two ranks each has half
    of attention's, and the sum is one more."""
    patches, width = 65536, 1152
    few = {"max_num_seqs": 8}
    for ranks, numbers in ((1, (3 + 3 + 2 + 2 + 1 + 1) * width), (2, (3 + 4 + 1 + 1) * width)):
        peak = 2 * patches * (3 * 2 * 16**2 + numbers) / 2**30
        found = activation("Qwen/Qwen3-VL-30B-A3B-Instruct", tensor_parallel_size=ranks, **few)
        assert found == pytest.approx(peak, rel=0.001)
    assert activation("Qwen/Qwen3-VL-30B-A3B-Instruct", limit_mm_per_prompt=NONE, **few) < 1
    small = {"max_pixels": 1_003_520}
    assert activation("Qwen/Qwen3-VL-30B-A3B-Instruct", mm_processor_kwargs=small, **few) < 1


def test_a_video_has_as_many_frames_as_a_request_has_tokens_for() -> None:
    """Qwen2.5-VL: seven grids of 16,384 tokens from 114,688 tokens on, one below 32,768."""
    name, few = "Qwen/Qwen2.5-VL-7B-Instruct", {"max_num_seqs": 8}
    one, seven = (activation(name, max_model_len=length, **few) for length in (8192, 128_000))
    assert seven == pytest.approx(7 * one, rel=0.01)
    alone = activation(name, max_model_len=128_000, limit_mm_per_prompt={"video": 0}, **few)
    assert alone == pytest.approx(one, rel=0.01)


def test_gpus_share_the_encoder() -> None:
    given = {"max_num_seqs": 8, "tensor_parallel_size": 2}
    name = "Qwen/Qwen3-VL-30B-A3B-Instruct"
    whole = activation(name, **given, mm_encoder_tp_mode="data")
    assert activation(name, **given) < whole


@pytest.mark.parametrize("words", [{"language_model_only": True}, {"skip_mm_profiling": True}])
def test_text_alone(words: dict[str, bool]) -> None:
    given = {"max_num_seqs": 8, "limit_mm_per_prompt": NONE}
    name = "Qwen/Qwen3-VL-30B-A3B-Instruct"
    assert activation(name, max_num_seqs=8, **words) == activation(name, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mm_processor_kwargs": {"max_pixels": "large"}}, "max_pixels: large` must be an integer"),
        # a prime number of patches: factors were sought for hours
        ({"mm_processor_kwargs": {"max_pixels": 1024 * (10**18 + 9)}}, "from 1 to 1073741824"),
        ({"mm_processor_kwargs": [1]}, "mm_processor_kwargs` must be a JSON object"),
        ({"mm_processor_kwargs": {"size": 3}}, "size` must be a JSON object"),
        ({"limit_mm_per_prompt": {"image": float("inf")}}, "image: inf` must be an integer"),
        ({"limit_mm_per_prompt": {"video": {"count": float("nan")}}}, "must be an integer"),
        ({"limit_mm_per_prompt": {"image": -1}}, "image: -1` must be an integer of at least 0"),
        ({"limit_mm_per_prompt": {"image": "two"}}, "image: two` must be an integer"),
        ({"limit_mm_per_prompt": [1]}, "limit_mm_per_prompt` must be a JSON object"),
    ],
)
def test_limits_that_are_none(given: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        activation("Qwen/Qwen3-VL-8B-Instruct", **given)


def test_sides_of_an_image_are_not_too_unlike() -> None:
    assert longest_side(16384) == 16384
    assert longest_side(16381) == 16380  # a prime number of patches would be one row


def test_an_unknown_encoder_is_said() -> None:
    assert "gemma4" not in ENCODERS
    answer = serve("gemma-4-31b-it", engine="vllm", gpu="h200", offline=True)
    assert any("images is not counted" in problem.message for problem in answer.problems)
    known = serve("gemma-3-12b-it", engine="vllm", gpu="h200", offline=True)
    assert not any("not counted" in problem.message for problem in known.problems)


@pytest.mark.parametrize(("given", "notes"), [({}, 1), ({"limit_mm_per_prompt": NONE}, 0)])
def test_images_in_the_peak_are_noted_with_a_way_out(given: dict[str, object], notes: int) -> None:
    answer = serve("gemma-3-12b-it", engine="vllm", gpu="h200", offline=True, **given)
    found = [one for one in answer.problems if "the largest images" in one.message]
    assert len(found) == notes
    assert all(
        """`--limit-mm-per-prompt '{"image": 0, "video": 0}'`""" in one.hint for one in found
    )


def test_pixtrals_mask_has_a_number_for_each_pair_of_patches() -> None:
    """Two images of 110 × 110 patches are one sequence. Since 0.12 the wheel has no xFormers, and
    attention is torch's with a mask. Alive as queries and keys are rotated: 4 numbers a patch and
    width of 1,024, tables of 128, 7 beside them, and the mask."""
    name, patches, width = "mistralai/Mistral-Small-3.2-24B-Instruct-2506", 2 * 110**2, 1024
    most = max(11 * width, 6 * width + 3 * 4096) + 2 * 64
    given = 2 * 3 * 1540**2
    few = {"max_num_seqs": 4, "max_model_len": 8192}
    found = activation(name, engine_version="0.24.0", **few)
    assert found == pytest.approx(2 * (given + patches * (most + patches)) / 2**30, rel=0.001)
    assert activation(name, engine_version="0.24.0", limit_mm_per_prompt=NONE, **few) < 2


def test_xformers_needs_no_mask() -> None:
    encoder = {
        version: ENCODERS["mistral3"](VISION, *step_of(version)) for version in ("0.11.2", "0.12.0")
    }
    patches = 2 * 110**2
    with_mask, without = (encoder[one].numbers(patches, 1) for one in ("0.12.0", "0.11.2"))
    assert with_mask - without == patches**2
    one = [encoder[version].numbers(110**2, 1) for version in ("0.12.0", "0.11.2")]
    assert one[0] == 110**2 * (10 * 1024 + 128 + 2 * 110**2)  # 12,100 is no multiple of 8
    assert one[1] == 110**2 * (6 * 1024 + 128 + 3 * 4096)


def test_a_log_of_internvl_on_v0(tmp_path: Path) -> None:
    """LMCache's issue 432: 1.39 GiB of activation for InternVL2.5-8B, one image of 13 tiles."""
    folder = tmp_path / "internvl"
    folder.mkdir()
    folder.joinpath("config.json").write_text(json.dumps(INTERNVL))
    given = {"gpu": "a5000", "max_model_len": 10000, "engine_version": "0.7.2"}
    assert activation(str(folder), **given) == pytest.approx(1.39, rel=0.04)
    assert activation(str(folder), limit_mm_per_prompt=NONE, **given) < 1.15


def test_ranks_share_what_llama_4_rotates() -> None:
    """Seventeen tiles of 24 × 24 patches and a class token."""
    vision = {
        "hidden_size": 1408,
        "intermediate_size": 5632,
        "image_size": 336,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
    }
    found = ENCODERS["llama4"](vision, *step_of("0.24.0"))
    assert found.items[0].tokens == 17 * 144
    assert found.items[0].patches == 17 * 577
    assert found.numbers(577, 1) == 577 * 16 * 1408
    assert found.numbers(577, 8) == 577 * (4 * 1408 + 2 * 5632 // 8)


def test_qwen2_5_vl_keeps_what_its_norm_does_not_overwrite() -> None:
    """Seven grids of 65,536 patches: input, layer's input, attention's output, sum, norm, the
    feed-forward's output, and three inner tensors; the sum and the norm take the places of the
    former two where nothing is compiled. The log of unseen-0117 has 15.4 GiB."""
    patches, width, inner = 7 * 65536, 1280, 3420
    name, given = "Qwen/Qwen2.5-VL-7B-Instruct", {"max_num_seqs": 8, "max_model_len": 128_000}
    for streams, eager in ((5, False), (3, True)):
        peak = 2 * patches * (3 * 2 * 14**2 + streams * width + 3 * inner) / 2**30
        assert activation(name, enforce_eager=eager, **given) == pytest.approx(peak, rel=0.001)


def test_tables_of_positions_with_sections_are_four_times_as_long() -> None:
    """Logs of vLLM 0.22.1 and 0.20.0 (unseen-0013, 0084): 0.1 GiB more than without."""
    rows = {one.id: one for one in read_served(UNSEEN)}
    for log in ("unseen-0013", "unseen-0084"):
        off = judge(rows[log]).error("weights_gib")
        assert off is not None
        assert abs(off) < 0.001
