"""TensorRT-LLM, TGI, LMDeploy and MLX: weights, the largest step, and the fraction of the cache."""

from __future__ import annotations

import pytest

import memfit
from memfit.api.engine import subject_of
from memfit.cli import main
from memfit.errors import InputError
from memfit.hardware import find_gpu
from memfit.hardware.outside import context
from memfit.serving import find_engine
from memfit.serving.base import Question
from memfit.serving.paged.engine import Paged
from memfit.truth.served import judge, read_served
from memfit.truth.served import subject_of as judged_subject
from memfit.units import GIB

CELL = 36 * 2 * 8 * 128 * 2  # a token of Qwen3-8B in 16 bits: layers, keys and values, heads, size


def test_published_logs_of_tensorrt_llm() -> None:
    """Rows of the PyTorch back end; one that tells nothing of its second GPU is left out."""
    rows = [
        row
        for row in read_served()
        if row.engine == "tensorrt-llm"
        and row.options.get("engine_type") == "PyTorch back end"
        and row.figures.get("kv_gib_profiling_phase")
    ]
    assert len(rows) == 7
    for row in rows:
        found = judge(row)
        assert found.answered
        for figure, most in (("weights_gib", 0.01), ("activation_gib", 0.05), ("kv_tokens", 0.031)):
            error = found.error(figure)
            assert error is not None
            assert abs(error) < most, (row.id, figure, error)


def test_an_engine_that_was_built_is_refused() -> None:
    row = next(row for row in read_served() if row.id == "tensorrt-llm-0020")
    assert "trtllm-build" in judge(row).reason


def test_lmdeploy_takes_a_share_of_what_the_weights_leave() -> None:
    found = memfit.serve("qwen3-8b", engine="lmdeploy", gpu="rtx-4090", cache_max_entry_count=0.5)
    gpu = find_gpu("rtx-4090")
    weights = found.figures["weights_gib"] * GIB
    left = gpu.memory - context(gpu).high - weights
    assert found.figures["kv_tokens"] == int(left * 0.5) // (CELL * 64) * 64
    half = memfit.serve(
        "qwen3-8b", engine="lmdeploy", gpu="rtx-4090", cache_max_entry_count=0.5, quant_policy=8
    )
    assert half.figures["kv_tokens"] == pytest.approx(2 * found.figures["kv_tokens"], abs=64)


def test_lmdeploy_without_room_for_a_step_does_not_start() -> None:
    found = memfit.serve("qwen3-8b", engine="lmdeploy", gpu="rtx-4090", cache_max_entry_count=0.95)
    assert not found.fits
    assert "--max-prefill-token-num" in found.remedy


def test_tgi_leaves_a_tenth_of_the_card() -> None:
    found = memfit.serve("qwen3-8b", engine="tgi", gpu="rtx-4090")
    assert found.device == pytest.approx(0.9 * find_gpu("rtx-4090").memory, rel=1e-4)
    more = memfit.serve("qwen3-8b", engine="tgi", gpu="rtx-4090", max_batch_prefill_tokens=16384)
    assert more.figures["kv_tokens"] < found.figures["kv_tokens"]


def test_mlx_checkpoint_by_name() -> None:
    """4.52 GB is what the hub shows of the files of mlx-community/Meta-Llama-3.1-8B-Instruct-4bit:
    4.5 bits a parameter."""
    found = memfit.serve(
        "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
        engine="mlx",
        gpu="mac-16gb",
        max_kv_size=8192,
    )
    assert found.figures["weights_gib"] * GIB == pytest.approx(4.52e9, rel=0.002)
    assert found.fits
    cache = next(pool for pool in found.pools if pool.name == "KV cache")
    assert cache.bytes == 8192 * 32 * 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("engine", "words", "named"),
    [
        ("trtllm", "trtllm-serve MODEL --tp_size 2", "MODEL"),
        ("tgi", "text-generation-launcher --model-id MODEL --num-shard 2", "MODEL"),
        ("lmdeploy", "lmdeploy serve api_server MODEL --tp 2", "MODEL"),
        ("mlx-lm", "mlx_lm.server --model MODEL", "MODEL"),
    ],
)
def test_command_lines(engine: str, words: str, named: str) -> None:
    known = find_engine(engine)
    assert known.read(words.split())[0] == named
    with pytest.raises(InputError, match="does not start"):
        known.read(["vllm", "serve", "MODEL"])
    line = words.replace("MODEL", "qwen3-0.6b").split()
    assert main(["estimate", "--engine", engine, "--gpu", "2xrtx-4090", "--", *line]) == 0


@pytest.mark.parametrize("engine", ["tensorrt-llm", "tgi", "lmdeploy", "mlx"])
def test_flags_that_name_the_model(engine: str) -> None:
    known = find_engine(engine)
    assert isinstance(known, Paged)
    for flag in known.model_flags:
        line = [*known.starts[0], flag, "qwen3-0.6b"]
        gpu = "mac-64gb" if known.unified else "l40s"
        assert main(["estimate", "--engine", engine, "--gpu", gpu, "--", *line]) == 0


@pytest.mark.parametrize(
    ("engine", "flag"),
    [
        ("tgi", "--quantize"),
        ("lmdeploy", "--model-format"),
        ("mlx", "--adapter-path"),
        ("mlx", "--kv-group-size"),
        ("tensorrt-llm", "--extra_llm_api_options"),
    ],
)
def test_flags_that_change_the_memory_are_not_passed_over(
    engine: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", "qwen3-0.6b", "--engine", engine, flag, "32"]) == 2
    assert f"`{flag}` is not supported yet" in capsys.readouterr().err
    with pytest.raises(InputError, match="is not supported yet"):
        memfit.serve("qwen3-0.6b", engine=engine, **{flag[2:].replace("-", "_"): "32"})


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("tgi", "cuda_memory_fraction"),
        ("lmdeploy", "cache_max_entry_count"),
        ("tensorrt-llm", "kv_cache_free_gpu_memory_fraction"),
    ],
)
def test_a_fraction_of_nothing_is_nothing(engine: str, name: str) -> None:
    found = memfit.serve("qwen3-0.6b", engine=engine, gpu="rtx-4090", **{name: 0})
    assert not found.fits
    assert found.figures["kv_tokens"] == 0


def test_built_engines_are_refused_without_a_gpu_too() -> None:
    with pytest.raises(InputError, match="trtllm-build"):
        memfit.serve("qwen3-0.6b", engine="tensorrt-llm", backend="tensorrt")


MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
EIGHT_BITS = {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}


@pytest.mark.parametrize(
    ("stored", "width"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 2),
        (MODELOPT, 2),
        ({**MODELOPT, "kv_cache_quant_algo": "FP8"}, 1),
        ({**MODELOPT, **EIGHT_BITS}, 1),
        ({**MODELOPT, "quant_method": None, "producer": {"name": "modelopt"}, **EIGHT_BITS}, 1),
    ],
)
def test_a_modelopt_checkpoint_names_the_numbers_of_the_cache(
    stored: dict[str, object], width: int
) -> None:
    base = subject_of("qwen3-8b")
    config = {**base.config, "quantization_config": stored}
    found = memfit.serve(config, engine="tensorrt-llm", max_seq_len=1024)
    assert found.figures["kv_gib"] * GIB == 1024 * CELL * width / 2


def test_checkpoints_of_nvidia_by_name_bring_an_fp8_cache() -> None:
    for name, width in (("nvidia/Qwen3-8B-FP8", 1), ("Qwen/Qwen3-8B-FP8", 2)):
        found = judged_subject(name)
        answer = find_engine("tensorrt-llm").answer(
            Question(subject=found, options={"max_seq_len": 1024})
        )
        assert answer.figures["kv_gib"] * GIB == 1024 * CELL * width / 2


def test_a_cache_in_unknown_numbers_is_refused() -> None:
    base = subject_of("qwen3-8b")
    stored = {**MODELOPT, "kv_cache_quant_algo": "NVFP4"}
    config = {**base.config, "quantization_config": stored}
    with pytest.raises(InputError, match="a cache in `nvfp4`"):
        memfit.serve(config, engine="tensorrt-llm")


def test_the_sparse_indexer_has_a_cache() -> None:
    """DeepSeek-V3.2: 61 layers of 576 values in 16 bits, and of 128 keys and a scale in fp32."""
    found = memfit.serve(
        "deepseek-ai/DeepSeek-V3.2", engine="tensorrt-llm", tp_size=8, max_seq_len=1024
    )
    assert found.figures["kv_gib"] * GIB == 1024 * 61 * (576 * 2 + 128 + 4)


def test_mlx_reads_configs_as_mlx_writes_them() -> None:
    """`quantization` and `quantization_config` say the same."""
    base = dict(subject_of("llama-3.1-8b").config)
    four = {"bits": 4, "group_size": 64}
    sizes = {
        memfit.serve({**base, **stored}, engine="mlx").figures["weights_gib"]
        for stored in (
            {"quantization": four},
            {"quantization": four, "quantization_config": four},
            {"quantization_config": four},
        )
    }
    assert len(sizes) == 1
    assert sizes.pop() * GIB == pytest.approx(4.52e9, rel=0.002)


def test_ranks_that_do_not_divide_the_heads(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "qwen3-8b", "--engine", "tensorrt-llm", "--gpu", "3xh100", "--tp_size"]
    assert main([*words, "3"]) == 2
    assert "32 attention heads cannot be split over 3 GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["tensorrt-llm", "tgi", "lmdeploy", "mlx"])
def test_less_detail_is_said(engine: str) -> None:
    found = memfit.serve("llama-3.2-1b", engine=engine, memory="24GiB")
    assert any("less detail" in problem.message for problem in found.problems)
