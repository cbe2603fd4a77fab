"""Causes that start-up logs of serving engines showed, each read in the engine's source."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from memfit.api.engine import from_command, serve
from memfit.cli import main
from memfit.errors import InputError
from memfit.hardware import find_gpu
from memfit.hardware.outside import page_records
from memfit.model.quantized import Skip
from memfit.serving import find_engine
from memfit.serving.base import Device, Question
from memfit.serving.links import communicator_bytes
from memfit.serving.sglang.setup import set_up as sglang_set_up
from memfit.serving.stored import FLASHINFER, MARLIN, TRITON
from memfit.serving.vllm.setup import set_up as vllm_set_up
from memfit.truth.served import UNSEEN, judge, read_served, rows_of, subject_of
from memfit.units import GIB


def asked(model: str, gpu: str, version: str, count: int = 1, **options: object) -> Question:
    found = find_gpu(gpu)
    device = Device(name=found.name, total=found.memory, gpu=found)
    return Question(
        subject=subject_of(model), devices=(device,) * count, options=options, version=version
    )


@pytest.mark.parametrize(
    ("version", "gpu", "logged"),
    [
        ("0.14.1", "h100-sxm-80gb", 64.38),  # vllm-project/vllm#33155: Triton
        ("0.10.1", "h100-sxm-80gb", 65.9651),  # vllm-project/vllm#23278: Marlin
    ],
)
def test_experts_in_mxfp4_are_laid_out_by_the_kernels_of_the_version(
    version: str, gpu: str, logged: float
) -> None:
    answer = find_engine("vllm").answer(asked("openai/gpt-oss-120b", gpu, version))
    assert answer.figures["weights_gib"] == pytest.approx(logged, rel=0.002)


def test_experts_in_mxfp4_take_whole_tiles_of_flashinfer_on_blackwell() -> None:
    """Both widths of 2880 become 3072, as with no other kernel."""
    engine = find_engine("vllm")
    triton, tiles = (
        engine.answer(asked("openai/gpt-oss-120b", gpu, "0.14.1")).figures["weights_gib"]
        for gpu in ("h100-sxm-80gb", "b200")
    )
    assert tiles - triton > 1


@pytest.mark.parametrize(
    ("version", "requests", "tokens"),
    [("0.14.1", 1, 1024), ("0.11.0", 1, 2048), ("0.14.1", 64, 2048)],
)
def test_a_step_has_no_more_tokens_than_its_requests(
    version: str, requests: int, tokens: int
) -> None:
    question = asked(
        "Qwen/Qwen3-1.7B", "rtx-4090", version, max_model_len=1024, max_num_seqs=requests
    )
    assert vllm_set_up(question).batched == tokens


def test_copies_send_their_tokens_to_each_others_experts() -> None:
    """vllm-project/recipes#12: 48.66 GiB of cache, and 52.4 if each saw its own tokens alone."""
    model = "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8"
    options = {"data_parallel_size": 8, "enable_expert_parallel": True}
    question = asked(model, "h200", "0.10.1", 8, **options)
    answer = find_engine("vllm").answer(question)
    assert answer.figures["activation_gib"] > 5.8
    assert answer.figures["non_torch_gib"] > 0.6
    assert answer.figures["available_kv_gib"] * GIB < 0.9 * question.devices[0].total


@pytest.mark.parametrize(
    ("version", "given", "fraction"),
    [
        ("0.4.4", None, 0.88 * 0.95),  # sgl-project/sglang#4826
        ("0.4.4", 0.8, 0.8 * 0.95),
        ("0.4.6", 0.8, 0.8 * 0.9),
        ("0.5.9", 0.8, 0.8),
    ],
)
def test_a_vision_tower_lowers_the_fraction_of_old_versions(
    version: str, given: float | None, fraction: float
) -> None:
    options = {} if given is None else {"mem_fraction_static": given}
    question = asked("google/gemma-3-4b-it", "h200", version, **options)
    assert sglang_set_up(question).fraction == pytest.approx(fraction)


def test_names_that_stay_in_16_bits_are_looked_up() -> None:
    """A whole path, a part of it, a wildcard, and a regular expression, as before; thousands of
    plain names cost nothing for each module."""
    names = tuple(f"model.layers.{number}.self_attn.kv_b_proj" for number in range(5000))
    skip = Skip((*names, "lm_head", "mlp.gate", "*vision*", "re:.*shared_expert"))
    for path in (
        "model.layers.7.self_attn.kv_b_proj",
        "lm_head",
        "model.layers.3.mlp.gate",
        "model.vision_tower.proj",
        "model.layers.0.mlp.shared_expert.up_proj",
    ):
        assert path in skip
    for path in ("model.layers.7.self_attn.o_proj", "model.layers.3.mlp.gate_proj", "head"):
        assert path not in skip
    assert "a[0].b" in Skip(("a[0].b",))  # brackets of a name are no set of letters
    with pytest.raises(InputError, match=r"`re:\(` is not a regular expression"):
        assert "lm_head" not in Skip(("re:(",))


@pytest.mark.parametrize("stack", ["model", "model.language_model", "language_model.model"])
@pytest.mark.parametrize("form", ["{}.layers.0.mlp*", "{}.layers.0.mlp", r"re:{}\.layers\.0\.mlp"])
def test_a_stack_of_layers_has_several_names(stack: str, form: str) -> None:
    """nvidia/Gemma-4-26B-A4B-NVFP4 lists `model.language_model.layers.0.mlp*`, which was not found
    in `model.layers`: attention and feed-forwards counted in 4 bits, 15.7 of 17.9 GiB."""
    skip = Skip((form.format(stack), "mtp.layers.1*"))
    for path in ("model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"):
        assert path in skip
    for path in ("model.layers.1.mlp.up_proj", "model.vision_tower.layers.0.mlp.up_proj"):
        assert path not in skip


@pytest.mark.parametrize(
    ("log", "figure", "error"),
    [
        ("unseen-0043", "weights_gib", 0.015),  # Gemma 4 31B, NVFP4 except attention
        ("unseen-0052", "weights_gib", 0.005),  # Gemma 4 26B-A4B, NVFP4 in its experts alone
        # attention over two contexts: weights of two ranks are the same
        ("unseen-0061", "weights_gib", 0.004),
        # Kimi K2.5, whose text config has the quantization: 228 % before
        ("unseen-0066", "weights_gib", 0.035),
        # the log's nvidia-smi shows an H100 of 64 GB: 50 % before
        ("unseen-0081", "kv_tokens", 0.01),
        # a draft of attention and experts, of which only attention was counted: 13 % before
        ("unseen-0083", "weights_gib", 0.02),
        # no image may come, so no tower is loaded, and NVML does not know the memory: 7 % before
        ("unseen-0084", "weights_gib", 0.003),
        # 0.6 GiB of graphs too much, of a printed 0.1
        ("unseen-0084", "kv_tokens", 0.03),
        # sparse attention's fp8 cache has scales that its tokens are not reckoned by: 10 % before
        ("unseen-0095", "kv_gib", 0.005),
        # a month in the notes is no build of llama.cpp, and `enabled` is `-fa on`: refused before
        ("unseen-0098", "compute_gib", 0.001),
        ("unseen-0100", "compute_gib", 0.001),
        # gemma4_unified, the text of the smallest Gemma 4: refused before
        ("unseen-0122", "weights_gib", 0.001),
        ("unseen-0122", "compute_gib", 0.003),
        # a log without its cache has no sum of its parts: 30 % before
        ("unseen-0123", "compute_gib", 0.02),
    ],
)
def test_figures_of_logs(log: str, figure: str, error: float) -> None:
    row = next(one for one in read_served(UNSEEN) if one.id == log)
    off = judge(row).error(figure)
    assert off is not None
    assert abs(off) < error


@pytest.mark.parametrize(
    ("model", "low", "high"),
    [
        # hf_quant_config.json beside the config: 437.9 GiB were said, as of 16 bits
        ("nvidia/Qwen3-235B-A22B-NVFP4", 120, 130),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 110, 118),
        # a mix that lists each expert
        ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4", 17, 20),
    ],
)
def test_weights_of_checkpoints_that_say_it_elsewhere(model: str, low: int, high: int) -> None:
    answer = serve(model, engine="vllm", gpu="8xh200", offline=True, tensor_parallel_size=1)
    assert low < answer.figures["weights_gib"] < high


def test_towers_are_loaded_unless_every_kind_is_excluded() -> None:
    def weights(version: str = "0.20.0", **more: Any) -> float:
        answer = serve(
            "Qwen/Qwen3.6-35B-A3B", engine="vllm", gpu="h200", engine_version=version, **more
        )
        return answer.figures["weights_gib"]

    none = weights(limit_mm_per_prompt={"image": 0, "video": 0})
    assert none == weights(language_model_only=True) < weights() - 0.8
    assert weights(limit_mm_per_prompt={"image": 0}) == weights()  # videos may still come
    assert weights("0.14.0", language_model_only=True) == weights("0.14.0")


def test_attention_over_contexts_has_ranks_for_each_copy() -> None:
    question = asked("Qwen/Qwen3-32B", "rtx-5090", "0.5.13", 4, tp_size=4, attn_cp_size=2)
    assert sglang_set_up(question).rank.heads == 2
    both = {"dp_size": 4, "enable_dp_attention": True}
    question = asked("Qwen/Qwen3-32B", "rtx-5090", "0.5.13", 4, tp_size=4, attn_cp_size=2, **both)
    with pytest.raises(InputError, match="divisible by `--attn-cp-size 2` times `--dp 4`"):
        sglang_set_up(question)


def test_patterns_with_wildcards_are_one_expression() -> None:
    """ModelOpt writes hundreds of them; each was compared with each module."""
    skip = Skip(tuple(f"model.layers.{number}.mlp.shared*" for number in range(4000)))
    paths = [f"model.layers.{number}.self_attn.o_proj" for number in range(1000)]
    start = time.process_time()
    assert not any(path in skip for path in paths)
    assert time.process_time() - start < 1.5
    assert "model.layers.999.mlp.shared_experts.up_proj" in skip


def test_a_hybrid_model_wants_a_block_of_states_for_each_request() -> None:
    """vllm-project/recipes#831: no variant of a 27B starts on 96 GB with the 1024 requests that are
    the default there."""
    engine = find_engine("vllm")
    asked_ = asked("Qwen/Qwen3.6-27B", "rtx-pro-6000-ws", "0.24.0", gpu_memory_utilization=0.95)
    answer = engine.answer(asked_)
    assert "exceeds available Mamba cache blocks" in answer.failure
    most = int(answer.remedy.rpartition(" ")[2])
    assert most < 1024
    fewer = {"max_num_seqs": most, "gpu_memory_utilization": 0.95}
    assert not engine.answer(
        asked("Qwen/Qwen3.6-27B", "rtx-pro-6000-ws", "0.24.0", **fewer)
    ).failure
    old = asked("Qwen/Qwen3.6-27B", "rtx-pro-6000-ws", "0.18.0", gpu_memory_utilization=0.95)
    assert not engine.answer(old).failure
    eager = {"enforce_eager": True, "gpu_memory_utilization": 0.95}
    assert not engine.answer(
        asked("Qwen/Qwen3.6-27B", "rtx-pro-6000-ws", "0.24.0", **eager)
    ).failure


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_config_that_is_wrong_is_said_so(engine: str) -> None:
    """Not that its model type is unknown."""
    config = {"model_type": "llama", "num_hidden_layers": -3}
    with pytest.raises(InputError, match="`-3` is out of range"):
        serve(config, engine=engine, gpu="rtx-4090")
    with pytest.raises(InputError, match="not supported yet: model_type `nobodys`"):
        serve({"model_type": "nobodys"}, engine=engine, gpu="rtx-4090")


VLLM_COMMAND = (
    "vllm serve Qwen/Qwen3-8B --gpu-memory-utilization 0.9 --all2all-backend naive --headless "
    "--middleware a.b c.d --kv-offloading-size 32 --kv-offloading-backend native "
    "--lora-modules one=/x two=/y --safetensors-load-strategy lazy --mamba-cache-mode align"
)
SGLANG_COMMAND = (
    "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --pipeline-parallel-size 1 "
    "--enable-metrics --disaggregation-mode prefill --log-requests-level 1 --cuda-graph-bs 1 2 64 "
    "--grammar-backend xgrammar --disable-hybrid-swa-memory --enable-mixed-chunk"
)


@pytest.mark.parametrize(("engine", "line"), [("vllm", VLLM_COMMAND), ("sglang", SGLANG_COMMAND)])
def test_a_real_command_line_is_read(engine: str, line: str) -> None:
    answer = from_command((), line.split(), engine, {"gpu": "rtx-4090", "offline": True})
    plain = serve("Qwen/Qwen3-8B", engine=engine, gpu="rtx-4090", offline=True)
    if engine == "vllm":
        assert answer.figures["weights_gib"] == plain.figures["weights_gib"]
        kept = next(one for one in answer.pools if one.name == "KV cache in CPU memory")
        assert (kept.bytes, kept.where) == (32 * GIB, "cpu")
    else:  # graphs up to 64 leave less for the cache than those up to 24
        assert answer.figures["kv_tokens"] < plain.figures["kv_tokens"]


@pytest.mark.parametrize(
    ("engine", "flag"),
    [
        ("vllm", "--decode-context-parallel-size 2"),
        ("vllm", "--enable-eplb"),
        ("vllm", "--specialize-active-lora"),
        ("vllm", "--ec-transfer-config {}"),
        ("sglang", "--enable-lora"),
        ("sglang", "--mm-enable-dp-encoder"),
        ("sglang", "--speculative-token-map hot.pt"),
        ("llama.cpp", "-otd exps=CPU"),
        ("llama.cpp", "--spec-type draft-mtp --spec-draft-n-max 3"),
        ("llama.cpp", "--lora adapter.gguf"),
    ],
)
def test_what_changes_the_memory_uncounted_is_refused(engine: str, flag: str) -> None:
    words = ("Qwen/Qwen3-8B", *flag.split())
    with pytest.raises(InputError, match=f"{flag.split()[0]}` is not supported yet"):
        from_command(words, (), engine, {"gpu": "rtx-4090", "offline": True})


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_ranks_that_work_hold_the_weights_and_share_the_heads(engine: str) -> None:
    """57 GiB of Qwen3-30B-A3B on 24 GB cards: four; Llama-2-13B has 40 heads: two and no 16."""
    flag = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}[engine]
    answer = serve("Qwen/Qwen3-30B-A3B", engine=engine, gpu="rtx-4090", offline=True)
    assert "CUDA out of memory" in answer.failure
    ranks = int(answer.remedy.rpartition(" ")[2])
    assert ranks == 4
    assert serve("Qwen/Qwen3-30B-A3B", engine=engine, gpu="4xrtx-4090", **{flag: ranks}).fits
    small = serve("Qwen/Qwen2.5-32B", engine=engine, memory="6GiB", offline=True)
    assert small.remedy == "a larger GPU, or weights in fewer bits"  # 40 heads: 16 do not share


def test_a_plan_of_what_does_not_start_has_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan Qwen/Qwen3-8B --task inference --engine vllm --gpu rtx-4090 --offline"
    load = "--users 4 --in 8m --out 1k"
    assert main(f"{words} {load}".split()) == 1
    assert "start it with" not in capsys.readouterr().out
    assert main(f"{words} --users 4 --in 8k --out 1k".split()) in (0, 1)
    assert "start it with" in capsys.readouterr().out


def test_what_a_llama_server_says_to_its_clients_costs_nothing() -> None:
    plain = "llama-server -hf Qwen/Qwen3-8B -c 8192"
    said = (
        "--jinja --reasoning off --chat-template-kwargs {} --repeat-last-n 64 --dry-base 1.75"
        " --cache-reuse 256 --grammar-file g.gbnf --agent --kv-offload --perf -sps 0.5 -lm mmap"
    )
    options = {"gpu": "rtx-4090", "offline": True}
    with_all = from_command((), f"{plain} {said}".split(), "llama.cpp", options)
    assert with_all.device == from_command((), plain.split(), "llama.cpp", options).device


def test_experts_beside_adapters_are_marlins() -> None:
    """vLLM takes Marlin's kernels for MXFP4 as soon as LoRA is on (get_mxfp4_backend_with_lora),
    which pad the weights of gpt-oss-120b by 1.6 GiB more than Triton's."""
    for gpu, plain in (("h100-sxm-80gb", TRITON), ("b200", FLASHINFER)):
        for more, kernels in (({}, plain), ({"enable_lora": True}, MARLIN)):
            setup = vllm_set_up(asked("openai/gpt-oss-120b", gpu, "0.24.0", **more))
            assert setup.scheme.tiles == kernels


def test_sglangs_second_cache_counts_in_cpu_memory() -> None:
    """A multiple of the GPU's cache, or GB of each rank (memory_pool_host.py HostKVCache)."""

    def kept(**given: object) -> tuple[float, int]:
        asked = {"engine": "sglang", "gpu": "rtx-4090", "offline": True, **given}
        answer = serve("Qwen/Qwen3-8B", **asked)
        host = next(one for one in answer.pools if one.name == "KV cache in CPU memory")
        assert host.where == "cpu"
        return answer.figures["kv_gib"] * GIB, host.bytes

    assert kept(hicache_ratio=3.0)[1] == 0
    cache, host = kept(enable_hierarchical_cache=True)
    assert host == pytest.approx(2 * cache, rel=1e-6)
    assert kept(enable_hierarchical_cache=True, hicache_ratio=3.0)[1] == pytest.approx(3 * cache)
    assert kept(enable_hierarchical_cache=True, hicache_size=30)[1] == 30 * 10**9


def test_prefill_has_no_graphs_beside_a_second_cache() -> None:
    """Of 0.5.10 to 0.5.13 (_handle_piecewise_cuda_graph), so that more is left for the cache."""
    plain, beside = (
        sglang_set_up(asked("Qwen/Qwen3-8B", "b200", "0.5.12", **more)).fraction
        for more in ({}, {"enable_hierarchical_cache": True})
    )
    assert beside > plain


@pytest.mark.parametrize("words", ["1 2 x", "0", "1 99999999999999", "1.5"])
def test_batches_of_graphs_that_are_none(words: str) -> None:
    """Words were passed over, and a large one was a share that nobody had given."""
    with pytest.raises(InputError, match="must be integers from 1 to 65536"):
        serve("Qwen/Qwen3-8B", engine="sglang", gpu="rtx-4090", cuda_graph_bs=words)
    listed, spelled = (
        sglang_set_up(asked("Qwen/Qwen3-8B", "rtx-4090", "0.5.18", cuda_graph_bs=one)).graphs
        for one in ([1, 2, 64], "1 2 64")
    )
    assert listed == spelled == 64


def test_reserves_beyond_the_gpu_are_said_so() -> None:
    asked = {"engine": "sglang", "gpu": "rtx-4090", "cuda_graph_max_bs": 10**6}
    with pytest.raises(InputError, match="is more than the GPU has"):
        serve("Qwen/Qwen3-8B", **asked)
    with pytest.raises(InputError, match=r"`--mem-fraction-static 1\.5` must be"):
        serve("Qwen/Qwen3-8B", mem_fraction_static=1.5, **asked)


@pytest.mark.parametrize(
    ("engine", "given", "said"),
    [
        ("vllm", {"all2all_backend": "deepep_low_latency"}, "`--all2all-backend deepep_low_"),
        ("sglang", {"moe_a2a_backend": "deepep"}, "`--moe-a2a-backend deepep` are not counted"),
        ("vllm", {"hf_overrides": {"num_hidden_layers": 4}}, "changes of the model's config"),
        ("vllm", {"all2all_backend": "allgather_reducescatter", "hf_overrides": {}}, ""),
    ],
)
def test_what_is_not_counted_is_said(engine: str, given: dict[str, object], said: str) -> None:
    answer = serve("Qwen/Qwen3-30B-A3B", engine=engine, gpu="h100-sxm-80gb", **given)
    where = {"all2all_backend", "moe_a2a_backend", "hf_overrides"}
    found = [one.message for one in answer.problems if one.where in where]
    assert len(found) == bool(said)
    assert all(said in one for one in found)


def test_a_pipeline_of_sglang_shares_the_layers() -> None:
    """Two stages: 16 of 32 layers and the output head on the last one, half of the cache of a
    token; of three the last has 11."""
    engine = find_engine("sglang")
    one, two, three = (
        engine.answer(
            asked("meta-llama/Llama-3.1-8B", "h100-sxm-80gb", "0.5.9", count, pp_size=count)
        )
        for count in (1, 2, 3)
    )
    cached = [one.figures["kv_gib"] * GIB / one.figures["kv_tokens"] for one in (one, two, three)]
    assert cached == pytest.approx([32 * 4096, 16 * 4096, 11 * 4096], rel=1e-4)
    assert two.figures["weights_gib"] == pytest.approx(one.figures["weights_gib"] / 2, rel=0.01)
    with pytest.raises(InputError, match="no speculative decoding with pipeline parallelism"):
        engine.answer(
            asked(
                "meta-llama/Llama-3.1-8B",
                "h100-sxm-80gb",
                "0.5.9",
                pp_size=2,
                speculative_algorithm="NGRAM",
            )
        )


def test_ollamas_qwen3_keeps_values_in_16_bits() -> None:
    """The bytes of each layer that ollama/ollama#13372 lists: 18,842.4 MiB, of which llama.cpp's
    own Q4_K_M lacked 418."""
    found = serve("qwen3:32b", engine="ollama", gpu="h100")
    assert found.figures["model_mib"] == pytest.approx(18842.40, abs=0.01)
    plain = serve("Qwen/Qwen3-32B", engine="llama.cpp", gpu="h100", quant="Q4_K_M")
    assert plain.figures["model_mib"] == pytest.approx(18423.65, abs=0.01)


@pytest.mark.parametrize(
    "name",
    ["/models/gpt-oss-20b-mxfp4.gguf", "ggml-org/gpt-oss-20b-GGUF", "openai/gpt-oss-20b"],
)
def test_gpt_oss_has_one_format(name: str) -> None:
    """11.27 GiB of file by the log of llama.cpp; Q4_K_M was taken for a repository."""
    found = serve(name, engine="llama.cpp", gpu="rtx-4090", offline=True)
    assert found.model.startswith("openai/gpt-oss-20b MXFP4")
    both = found.figures["model_mib"] + found.figures["host_model_mib"]
    assert both == pytest.approx(11.27 * 1024, rel=0.005)


def test_a_publishers_mix_is_said_to_be_one() -> None:
    with pytest.raises(InputError, match="only the file says") as raised:
        serve("unsloth/Qwen3-8B-GGUF:UD-Q4_K_XL", engine="llama.cpp", offline=True)
    assert "`Q4_K_M`, the nearest" in str(raised.value.problems[0].hint)


def test_ollamas_container_needs_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["docker", "run", "-d", "--gpus=all", "ollama/ollama:0.30.8"]
    assert main(["estimate", "--gpu", "rtx-4090", "--", *command]) == 2
    assert "ollama run qwen3:8b" in capsys.readouterr().err


@pytest.mark.parametrize(
    "quant", ["Q4_K_M foo", "Q4_K_M attn_v=F99", "Q4_K_M =F16", "Q4_K_M a=b=c"]
)
def test_matrices_of_another_type_need_a_type(quant: str) -> None:
    with pytest.raises(InputError, match="unknown GGUF quantization"):
        serve("Qwen/Qwen3-8B", engine="llama.cpp", gpu="rtx-3060", quant=quant)


def test_figures_of_another_rank_than_the_first_are_left_out() -> None:
    """vLLM V0 samples on the first rank alone, whose cache decides."""
    shared = {
        "source": "vllm-project/vllm issue #13061",
        "engine": "vllm",
        "model": "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B",
        "gpus": 2,
        "extra": {"pool_tokens": 81536},
    }
    other = {**shared, "metric": "activation_peak", "value_gib": 0.19}
    said = "per GPU (another rank than the first)"
    (row,) = rows_of(
        [
            {**shared, "metric": "weights", "value_gib": 13.9476},
            {**other, "scope": said},
        ]
    )
    assert row.figures == {"weights_gib": 13.9476, "kv_tokens": 81536}
    (row,) = rows_of([{**other, "scope": "per GPU"}])
    assert row.figures["activation_gib"] == 0.19


def test_a_reranker_by_its_name() -> None:
    """unseen-0120: 1.18 GiB, 208,651 tokens."""
    row = next(one for one in read_served(UNSEEN) if one.id == "unseen-0120")
    found = judge(row)
    assert found.error("weights_gib") == pytest.approx(0, abs=0.005)
    assert found.error("kv_tokens") == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_drivers_page_records_take_memory_that_is_the_hosts(engine: str) -> None:
    """40 bytes for each page of 4 KiB: of the weights before the cache, and of the cache."""
    shared, own = (asked("Qwen/Qwen3-8B", gpu, "") for gpu in ("gb10", "rtx-4090"))
    device = replace(shared.devices[0], total=own.devices[0].total)
    parts = {}
    for name, gpu in (("shared", device.gpu), ("own", own.devices[0].gpu)):
        question = replace(own, devices=(replace(device, gpu=gpu, free=device.total),))
        parts[name] = find_engine(engine).answer(question)
    key = "non_torch_gib" if engine == "vllm" else "weights_gib"
    weights = parts["own"].figures["weights_gib"]
    more = parts["shared"].figures[key] - parts["own"].figures[key]
    assert more == pytest.approx(weights * 40 / 4096, rel=1e-3)
    pools = {pool.name: pool.bytes for pool in parts["shared"].pools}
    if engine == "sglang":
        cache = pools["KV cache"] + pools["request table"]
        assert pools["page records"] == pytest.approx(cache * 40 / 4096, rel=1e-3)
    assert "page records" not in {pool.name for pool in parts["own"].pools if pool.bytes}


def test_tegras_driver_keeps_other_records() -> None:
    assert page_records(find_gpu("jetson-agx-orin-64gb"), GIB) == 0
    assert page_records(find_gpu("gb10"), GIB) == GIB // 4096 * 40
    assert page_records(None, GIB) == 0


def test_layers_that_guess_stay_in_16_bits_where_a_name_tells_the_quantization() -> None:
    """A file on a Jetson AGX Thor has Sehyo's NVFP4 with its layer of MTP (75.17 GiB) and without
    (70.47), which is that layer in 16 bits."""
    model = "Sehyo/Qwen3.5-122B-A10B-NVFP4"
    guess = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    with_it, without = (
        find_engine("vllm").answer(asked(model, "jetson-agx-thor", "0.19.0", **more)).figures
        for more in (guess, {})
    )
    layer = with_it["weights_gib"] - without["weights_gib"]
    assert layer == pytest.approx(75.17 - 70.47, abs=0.05)


def test_a_geforce_keeps_nccls_buffers_in_the_hosts_memory() -> None:
    """NVIDIA/nccl#1127: two RTX 3090 without a bridge cannot reach each other."""
    devices = {
        name: asked("Qwen/Qwen3-8B", name, "").devices[0]
        for name in ("rtx-3090", "rtx-5090", "gtx-1080-ti", "rtx-a6000", "l40s")
    }
    taken = {name: communicator_bytes(device, 2, (2, 9)) for name, device in devices.items()}
    assert taken["rtx-3090"] == taken["rtx-5090"] == 0
    assert taken["gtx-1080-ti"] == taken["rtx-a6000"] == taken["l40s"] > 0
    gpu = find_gpu("rtx-3090")
    bridged = replace(devices["rtx-3090"], gpu=replace(gpu, link=gpu.bridge))
    assert communicator_bytes(bridged, 2, (2, 9)) > 0


def test_cyankiwi_quantizes_experts_alone() -> None:
    """unseen-0185: 22.53 GiB on each of two L40S, and 767,552 tokens; no linear layer's kernel."""
    row = next(one for one in read_served(UNSEEN) if one.id == "unseen-0185")
    found = judge(row)
    assert found.error("weights_gib") == pytest.approx(0, abs=0.002)
    assert found.error("kv_tokens") == pytest.approx(0, abs=0.005)
    names = (f"{owner}/Qwen3-Next-80B-A3B-Instruct-AWQ-4bit" for owner in ("cpatonn", "cyankiwi"))
    configs = [subject_of(name).config["quantization_config"] for name in names]
    assert configs[0] == configs[1]
    assert configs[1]["config_groups"]["group_0"]["weights"]["group_size"] == 32
    dense = subject_of("cyankiwi/Qwen3.5-9B-AWQ-4bit").config["quantization_config"]
    assert not any("self_attn" in one for one in dense["ignore"])


@pytest.mark.parametrize(("name", "logged"), [("unseen-0166", 16.78), ("unseen-0168", 58.2299)])
def test_qwen3_vl_keeps_features_of_images_and_a_long_rotary_table(
    name: str, logged: float
) -> None:
    row = next(one for one in read_served(UNSEEN) if one.id == name)
    assert row.figures["weights_gib"] == logged
    assert judge(row).error("weights_gib") == pytest.approx(0, abs=0.0005)


def test_qwen3_vl_without_images_keeps_no_features_of_them() -> None:
    sizes = [
        find_engine("vllm")
        .answer(asked("Qwen/Qwen3-VL-8B-Instruct", "l40s", "0.20.0", max_num_batched_tokens=tokens))
        .figures["weights_gib"]
        for tokens in (8192, 16384)
    ]
    assert sizes[1] - sizes[0] == pytest.approx(3 * 8192 * 4096 * 2 / GIB, abs=1e-3)
    textual = [
        find_engine("vllm")
        .answer(
            asked(
                "Qwen/Qwen3-VL-8B-Instruct",
                "l40s",
                "0.20.0",
                max_num_batched_tokens=tokens,
                language_model_only=True,
            )
        )
        .figures["weights_gib"]
        for tokens in (8192, 16384)
    ]
    assert textual[0] == textual[1]
