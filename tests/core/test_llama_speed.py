"""Speed of llama.cpp and Ollama: what a token reads, against published speeds."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

import pytest

from memfit.cli import main
from memfit.hardware import find_gpu, parse_cluster
from memfit.model.source import from_catalog
from memfit.serving.llamacpp.loading import from_config
from memfit.serving.llamacpp.model import GgufModel
from memfit.serving.llamacpp.placement import BACKENDS, Machine, place
from memfit.serving.llamacpp.settings import NEWEST, Settings
from memfit.serving.llamacpp.speed import (
    LIKELY,
    READ,
    READERS,
    Decoding,
    Reader,
    Work,
    gpu_seconds,
    launches_graphs,
    layer_nodes,
    on_cpu,
    operations,
    token_seconds,
    turns,
)
from memfit.truth.llama_speed import (
    LlamaOutcome,
    held_out,
    judge_llama,
    ordered,
    read_llama_rows,
    source_of,
)
from memfit.truth.statistics import middle

PLAIN = Reader(0.5, 0.5, 0.25, 0.125, 1e9, 1e9, 1e9, 3e-6, 2e-6, 1e-6)  # no limit but the bandwidth
BLOCK = {"Q4_K": 144 / 256, "Q8_0": 34 / 32}  # bytes of a number, ggml-common.h


@cache
def model(name: str, quant: str) -> GgufModel:
    return from_config(from_catalog(name).config, name, quant)


def decoding(name: str, quant: str, **options: Any) -> Decoding:
    settings = Settings(**{"context": 4096, "parallel": 1, **options})
    machine = Machine(backend=BACKENDS["cuda"], free=(2**40,))
    found = model(name, quant)
    return Decoding(model=found, settings=settings, places=place(found, settings, machine))


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(list(words))
    said = capsys.readouterr()
    return said.out + said.err


# ------------------------------------------------------------- what a token reads
def test_a_dense_model_reads_all_but_its_table_of_inputs() -> None:
    found = decoding("meta-llama/Llama-3.1-8B", "Q4_K_M")
    (work,) = (one for device, one in found.work(0).items() if device == "CUDA0")
    table = 128256 * 4096 * BLOCK["Q4_K"]
    assert work.half + work.packed + work.large == found.model.bytes - table
    assert found.model.bytes / 2**30 == pytest.approx(4.58, abs=0.01)  # llama-bench's `size`


def test_a_tied_table_is_read_for_the_logits() -> None:
    found = decoding("meta-llama/Llama-3.2-1B", "Q8_0")
    work = found.work(0)["CUDA0"]
    assert work.half + work.packed + work.large == found.model.bytes


def test_a_token_reads_the_experts_that_it_chooses() -> None:
    found = decoding("Qwen/Qwen3-30B-A3B", "Q8_0")
    work = found.work(0)["CUDA0"]
    experts = 48 * 128 * 3 * 2048 * 768 * BLOCK["Q8_0"]
    table = 151936 * 2048 * BLOCK["Q8_0"]
    expected = found.model.bytes - table - experts * (1 - 8 / 128)
    assert work.half + work.packed + work.large == pytest.approx(expected, rel=1e-9)


def test_a_token_reads_the_cache_behind_it() -> None:
    found = decoding("meta-llama/Llama-3.1-8B", "Q8_0")
    keys = 32 * 8 * 128 * 2 * 2  # layers, heads, values, keys and values, bytes
    assert found.work(1000)["CUDA0"].cache == 1000 * keys
    half = decoding("meta-llama/Llama-3.1-8B", "Q8_0", cache_k="q8_0", cache_v="q8_0")
    assert half.work(1000)["CUDA0"].cache == pytest.approx(1000 * keys / 2 * 34 / 32)


def test_a_sliding_layer_reads_its_window_only() -> None:
    found = decoding("google/gemma-3-4b-it", "Q4_0", context=65536)
    far, near = (found.work(depth)["CUDA0"].cache for depth in (32768, 16384))
    layers_that_see_all, values = 5, 4 * 256 * 2 * 2
    assert far - near == pytest.approx(layers_that_see_all * values * 16384)


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("meta-llama/Llama-3.1-8B", "Q4_K_M"),
        ("Qwen/Qwen3-30B-A3B", "Q4_K_M"),
        ("google/gemma-3-4b-it", "Q4_0"),
        ("deepseek-ai/DeepSeek-V2-Lite", "Q4_0"),
        ("Qwen/Qwen3.6-35B-A3B", "Q4_K_M"),
    ],
)
def test_operations_of_layers_add_up_to_those_of_the_graph(name: str, quant: str) -> None:
    found, settings = model(name, quant), Settings(context=512, parallel=1)
    whole = operations(found, settings, list(range(found.layers)))
    assert sum(layer_nodes(found, settings)) == whole


# ------------------------------------------------------------- seconds
def test_seconds_are_bytes_over_the_bandwidth_and_launches() -> None:
    gpu = find_gpu("rtx-4090")
    work = Work(half=504e6, packed=504e6, cache=252e6, nodes=1000)
    found = gpu_seconds(work, gpu, PLAIN, flash=True, build=NEWEST)
    assert found == pytest.approx(1e-3 + 1e-3 + 1e-3 + 1e-3)  # of 1,008 GB/s
    plain = gpu_seconds(work, gpu, PLAIN, flash=False, build=NEWEST)
    assert plain == pytest.approx(found + 1e-3)


def test_wide_memory_needs_multiprocessors_that_ask_for_it() -> None:
    """An A100 has twice the bandwidth of a 3090, and reads a model a quarter faster."""
    work = Work(large=4.6e9)
    seconds = {
        name: gpu_seconds(work, find_gpu(name), READERS["CUDA"], flash=True, build=NEWEST)
        for name in ("rtx-3090", "a100-sxm-80gb")
    }
    assert 1.1 < seconds["rtx-3090"] / seconds["a100-sxm-80gb"] < 1.4


def test_a_spark_reads_no_faster_than_measured() -> None:
    work = Work(packed=232.5e9)
    found = gpu_seconds(work, find_gpu("gb10"), READERS["CUDA"], flash=True, build=NEWEST)
    assert found == pytest.approx(232.5e9 / READ["gb10"], rel=0.01)


def test_older_macs_are_limited_by_the_arithmetic_of_large_blocks() -> None:
    """M1 Max, Llama 3 8B: Q4_K_M generates 36 tokens/s, F16 of 3.2 times the size 19 (tg512 of
    XiongjieDai's table); an M4 Pro reads both at the same rate."""
    work = {"large": Work(large=4e9), "packed": Work(packed=4e9)}
    old, new = (parse_cluster(name).gpu for name in ("m1-max-64gb", "m4-pro-48gb"))
    seconds = {
        (gpu.name, kind): gpu_seconds(one, gpu, READERS["MTL"], flash=True, build=NEWEST)
        for gpu in (old, new)
        for kind, one in work.items()
    }
    assert seconds[old.name, "large"] > 1.3 * seconds[old.name, "packed"]
    assert seconds[new.name, "large"] == seconds[new.name, "packed"]
    assert set(READERS) == set(LIKELY)


def test_which_gpus_launch_graphs() -> None:
    assert launches_graphs(find_gpu("rtx-3090"), 2824)
    assert not launches_graphs(find_gpu("rtx-3090"), 2700)
    assert not launches_graphs(find_gpu("rtx-2080"), 9000)
    assert launches_graphs(find_gpu("rtx-2080"), NEWEST)
    assert not launches_graphs(find_gpu("p40"), NEWEST)


def test_no_number_where_nothing_is_known() -> None:
    found = decoding("meta-llama/Llama-3.1-8B", "Q8_0")
    vulkan = Machine(backend=BACKENDS["vulkan"], free=(2**40,))
    assert "Vulkan" in str(token_seconds(found, vulkan, (find_gpu("rtx-4090"),), 0))
    part = decoding("meta-llama/Llama-3.1-8B", "Q8_0", gpu_layers=10)
    metal = Machine(backend=BACKENDS["metal"], free=(2**40,))
    assert "CPU" in str(token_seconds(part, metal, (parse_cluster("m4-16gb").gpu,), 0))


# ------------------------------------------------------------- layers on the CPU
CUDA = Machine(backend=BACKENDS["cuda"], free=(2**40,))
CODER = ("Qwen/Qwen2.5-Coder-14B-Instruct", "Q4_K_M")


def test_a_token_goes_to_the_cpu_and_back() -> None:
    for options, expected in (({}, 0), ({"cpu_moe": 12}, 12), ({"gpu_layers": 10}, 0.5)):
        found = decoding("openai/gpt-oss-20b", "MXFP4", **options)
        assert turns(found.model, found.places, CUDA) == expected
        assert on_cpu(found.model, found.places, CUDA) == bool(options)


def test_the_cpu_reads_its_layers_beside_the_gpu() -> None:
    gpu = find_gpu("rtx-3090")
    found = decoding("meta-llama/Llama-3.1-8B", "Q8_0", gpu_layers=17)
    layer = (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) * BLOCK["Q8_0"] + 2 * 4 * 4096
    seconds = [token_seconds(found, CUDA, (gpu,), 0, host) for host in (50e9, 100e9)]
    assert float(seconds[0]) - float(seconds[1]) == pytest.approx(16 * layer / 100e9)


def test_one_rate_of_the_cpu_tells_every_share_of_layers() -> None:
    """A sweep of `-ngl` on an i7-8700 with an RTX 5060 Ti (inventivehq.com): the rate of reading
    from the row without a GPU, the rest of the model's constants from other machines."""
    gpu = find_gpu("rtx-5060-ti-16gb")
    rows = [row for row in read_llama_rows() if row.source.startswith("inventivehq")]
    assert [row.gpu_layers for row in rows] == [0, 8, 16, 24, 32, 40, None]
    (alone,) = decoding(*CODER, gpu_layers=0).work(128).values()
    host = alone.bytes * rows[0].measured
    for row in rows[1:]:
        layers = 999 if row.gpu_layers is None else row.gpu_layers
        found = decoding(*CODER, gpu_layers=layers, build=row.build)
        seconds = token_seconds(found, CUDA, (gpu,), 128, host)
        assert 1 / float(seconds) == pytest.approx(row.measured, rel=0.08)


def test_an_answer_names_the_rate_of_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("estimate", "gpt-oss-120b", "--engine", "llama.cpp", "--gpu", "4090", "-c", "8192")
    assert "46 GB/s (assumed: `--host-bandwidth`)" in " ".join(run(capsys, *words).split())
    guess = json.loads(run(capsys, *words, "--json"))["speed"]
    told = json.loads(run(capsys, *words, "--host-bandwidth", "60", "--json"))["speed"]
    assert guess["host_assumed"]
    assert not told["host_assumed"]
    assert (guess["host_bandwidth"], told["host_bandwidth"]) == (46e9, 60e9)
    assert guess["tokens_per_second"] < told["tokens_per_second"]
    assert guess["high"] / guess["low"] > 2 * told["high"] / told["low"]
    assert "CPU" in told["prompt_untimed"]


# ------------------------------------------------------------- published speeds
def test_sources_are_halved_by_their_names() -> None:
    name = "ggml-org/llama.cpp#15802"
    digit = hashlib.sha256(name.encode()).hexdigest()[0]
    assert held_out(name) == (digit in "13579bdf")
    assert source_of("ggml-org/llama.cpp@4c7e989:benches/dgx-spark.md") == "ggml-org/llama.cpp"
    folder = "AlexsJones/llmfit@3f44fd3:community/nvidia-gb10/1786611367-06d57be3-2.json"
    assert source_of(folder) == "AlexsJones/llmfit:nvidia-gb10"
    halves = {row.source: row.held_out for row in read_llama_rows()}
    assert 15 < sum(halves.values()) < len(halves) - 15


@cache
def outcomes() -> tuple[LlamaOutcome, ...]:
    rows = (row for row in read_llama_rows() if row.decoding and row.held_out)
    return tuple(found for found in map(judge_llama, rows) if not found.reason)


def test_held_out_speeds() -> None:
    """The goals: half of the figures within 12 %, and 95 % of choices in order."""
    found = outcomes()
    assert len({one.gpu for one in found}) >= 15
    assert middle(sorted(abs(one.error) for one in found)) < 0.12
    right = list(ordered(found))
    assert sum(right) / len(right) > 0.95


@pytest.mark.parametrize(("backend", "vendor"), [("CUDA", "NVIDIA"), ("MTL", "Apple")])
def test_likely_ranges_are_those_of_held_out_figures(backend: str, vendor: str) -> None:
    found = sorted(
        one.row.measured / one.predicted for one in outcomes() if one.gpu.startswith(vendor)
    )
    low, high = LIKELY[backend]
    assert low == pytest.approx(found[int(0.05 * len(found))], abs=0.006)
    assert high == pytest.approx(found[int(0.95 * len(found))], abs=0.006)


# ------------------------------------------------------------- answers
def test_an_estimate_says_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("estimate", "llama-3.1-8b", "--engine", "llama.cpp", "--gpu", "4090", "-c", "8192")
    assert "tokens/s for one request (likely" in run(capsys, *words)
    found = json.loads(run(capsys, *words, "--json"))["speed"]
    # 150.6 and more by builds of 2025; 130.6 in May 2024 (XiongjieDai's table)
    assert 140 < found["tokens_per_second"] < 190
    assert found["low"] < found["tokens_per_second"] < found["high"]
    assert (found["depth"], found["longest"]) == (512, 8192)
    assert found["at_longest"] < found["tokens_per_second"]


def test_ollama_says_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("estimate", "llama3.1:8b", "--engine", "ollama", "--gpu", "rtx-3060-12gb", "--json")
    assert 40 < json.loads(run(capsys, *words))["speed"]["tokens_per_second"] < 80


def test_a_mac_has_a_speed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("estimate", "llama-3.1-8b", "--engine", "llama.cpp", "--quant", "Q4_K_M", "-c", "4096")
    found = json.loads(run(capsys, *words, "--gpu", "m4-16gb", "--json"))["speed"]
    # 20.87 on a Mac mini (brand-o/normiebench#3), held out
    assert found["low"] < 20.87 < found["high"]


def test_an_answer_says_why_it_has_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("estimate", "llama-3.1-8b", "--engine", "llama.cpp", "--gpu", "4090", "-c", "4096")
    said = run(capsys, *words, "--backend", "vulkan", "--json")
    found = json.loads(said)
    assert found["speed"] is None
    assert "Vulkan" in found["untimed"]


def test_a_card_has_speeds_for_gguf_files(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, "llama-3.1-8b", "--gpu", "4090", "--json"))["rows"]
    found = {row["use"]: row["tokens_per_second"] for row in rows}
    assert 80 < found["Q8_0"] < 120
    assert 120 < found["Q4_K_M"] < 180
