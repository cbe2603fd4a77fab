"""llama.cpp's buffers: published start-up logs, quantization by name, placement, bad input."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.core.writers import pair, tensor, whole

from memfit.api.engine import from_command
from memfit.cli import main
from memfit.errors import InputError, SourceError
from memfit.model import catalog
from memfit.serving.llamacpp import loading
from memfit.serving.llamacpp.convert import CONVERTERS, converted
from memfit.serving.llamacpp.drafts import Draft
from memfit.serving.llamacpp.engine import read_command
from memfit.serving.llamacpp.loading import from_file, tag
from memfit.serving.llamacpp.memory import Buffers, buffers
from memfit.serving.llamacpp.model import MOST, GgufModel
from memfit.serving.llamacpp.placement import BACKENDS, HOST, Machine
from memfit.serving.llamacpp.quantize import BASES, quantized
from memfit.serving.llamacpp.recipes import RECIPES
from memfit.serving.llamacpp.rows import row_figures
from memfit.serving.llamacpp.settings import Settings
from memfit.serving.llamacpp.versions import build_number, ollama_build
from memfit.units import GIB, MIB


def named(name: str, quantization: str) -> GgufModel:
    found = catalog.find(name)
    assert found is not None
    return converted(catalog.entry(found).config(), name, quantization)


def machine(backend: str = "cuda", gpus: int = 1) -> Machine:
    return Machine(backend=BACKENDS[backend], free=(24 * GIB,) * gpus)


def mib(part: dict[str, int]) -> dict[str, float]:
    return {name: round(size / MIB, 2) for name, size in part.items() if size}


# Start-up logs that people published (their rows are in the truth): model, settings, and the
# buffers that were printed, GPUs first and the host last.
LOGS = {
    "ollama 0.30.8, RTX 5050": (
        ("meta-llama/Llama-3.1-8B", "Q4_0"),
        Settings(context=4096, batch=512, build=9509),
        machine(),
        ([4155.99, 281.81], [512.0], [112.01, 20.01]),
    ),
    "ollama 0.6.1, RTX 3080 Ti": (
        ("meta-llama/Llama-3.1-8B", "Q4_K_M"),
        Settings(context=8192, parallel=4, unified=True, flash=False, build=4780),
        machine(),
        ([4403.49, 281.81], [1024.0], [560.0, 24.01]),
    ),
    "ollama 0.13.5, L40S": (
        ("meta-llama/Llama-3.1-70B", "Q4_K_M"),
        Settings(context=8192, batch=512, build=7436),
        machine(),
        ([39979.48, 563.62], [2560.0], [266.5, 32.01]),
    ),
    "ollama 0.13.5, two Quadro RTX 6000 as a pipeline": (
        ("meta-llama/Llama-3.1-70B", "Q4_K_M"),
        Settings(context=4096, batch=512, build=7436),
        machine(gpus=2),
        ([20038.81, 19940.67, 563.62], [656.0, 624.0], [316.04, 346.55, 48.05]),
    ),
    "ollama 0.6.1, 33 of 65 layers on an RTX 3080 Ti": (
        ("Qwen/Qwen2.5-32B", "Q4_K_M"),
        Settings(context=2048, batch=512, flash=False, gpu_layers=33, build=4780),
        machine(),
        ([9247.35, 9678.66], [264.0, 248.0], [916.08, 14.01]),
    ),
    "llama.cpp b8179, Vulkan, 35 of 37 layers": (
        ("Qwen/Qwen2.5-3B", "Q4_K_M"),
        Settings(context=2048, parallel=4, unified=True, gpu_layers=35, build=8179),
        machine("vulkan"),
        ([1740.74, 337.51], [68.0, 4.0], [300.75, 12.01]),
    ),
    "llama.cpp b8193, Tesla T4, windows": (
        ("openai/gpt-oss-20b", "F16"),
        Settings(context=32768, ubatch=2048, build=8193),
        machine(),
        ([12036.68, 1104.61], [768.0 + 54.0], [1593.5, 319.09]),
    ),
    "llama.cpp b6050, Metal, no flash attention": (
        ("mistralai/Mistral-Nemo-Base-2407", "Q5_K_M"),
        Settings(context=4096, flash=False, build=6050),
        machine("metal"),
        ([8315.8, 440.0], [640.0], [312.0, 18.01]),  # printed: 7875.8, a file in another order
    ),
}


@pytest.mark.parametrize("log", LOGS)
def test_published_logs_are_met_to_the_hundredth_of_a_mib(log: str) -> None:
    (name, quantization), settings, where, (model, cache, compute) = LOGS[log]
    held = buffers(named(name, quantization), settings, where)
    kv = [
        held.kv.get(device, 0) + held.kv_window.get(device, 0) for device in (*where.devices, HOST)
    ]
    assert list(mib(dict(held.model)).values()) == pytest.approx(model, abs=0.011)
    assert [one / MIB for one in kv if one] == pytest.approx(cache, abs=0.011)
    assert list(mib(dict(held.compute)).values()) == pytest.approx(compute, abs=0.011)


def test_old_builds_overwrote_the_gate_with_the_product() -> None:
    """Two published logs of Qwen2.5 32B with a cache of 8 bits: b4906 on one GPU, b4462 on two."""
    model = named("Qwen/Qwen2.5-32B", "Q8_0")
    settings = Settings(context=32768, cache_k="q8_0", cache_v="q8_0", build=4906)
    held = buffers(model, settings, machine("rocm"))
    assert mib(dict(held.kv)) == {"ROCm0": 4352.0}
    assert mib(dict(held.compute)) == {"ROCm0": 307.0, "CPU": 74.01}
    two = replace(settings, batch=512, ubatch=256, split=(10, 6), build=4462)
    held = buffers(model, two, machine(gpus=2))
    assert mib(dict(held.kv)) == {"CUDA0": 2788.0, "CUDA1": 1564.0}
    assert mib(dict(held.compute)) == {"CUDA0": 233.0, "CUDA1": 237.51, "CPU": 133.01}
    later = buffers(model, replace(two, build=6050), machine(gpus=2))
    assert mib(dict(later.compute))["CUDA0"] == 260.0


def test_a_draft_model_has_contexts_of_its_own() -> None:
    """A published log of a draft (b5130 or so): 6.00 MiB of cache, 298.50 and 2.76 of graph. Older
    builds have such a context for each slot, newer ones have one."""
    target, draft = (named(f"Qwen/Qwen2.5-{size}B", "Q8_0") for size in (14, 0.5))
    settings = Settings(context=512, batch=512, build=5130, draft=Draft(model=draft))
    weights = {"CUDA0": draft.bytes, "CPU": draft.by_name["token_embd.weight"].bytes}
    held = buffers(target, settings, machine())
    output = 4 * draft.vocabulary
    alone = buffers(draft, settings.draft.settings(settings), machine())  # type: ignore[union-attr]
    assert held.draft["CUDA0"] - alone.model["CUDA0"] == pytest.approx((6 + 298.5) * MIB, abs=9000)
    assert held.draft["CPU"] - weights["CPU"] - output == pytest.approx(2.76 * MIB, abs=9000)
    two = buffers(target, replace(settings, context=1024, parallel=2), machine()).draft
    assert two["CUDA0"] - alone.model["CUDA0"] == 2 * (held.draft["CUDA0"] - alone.model["CUDA0"])
    new = buffers(target, replace(settings, context=1024, parallel=2, build=11549), machine())
    assert new.draft["CUDA0"] < two["CUDA0"]
    checked = replace(settings, parallel=4, drafted=16, build=11549)
    assert (checked.outputs, replace(checked, drafted=0).outputs) == (4 * 17, 4)


def test_a_draft_model_leaves_less_context() -> None:
    words = ("qwen2.5-32b:Q4_K_M", "--engine", "llamacpp", "--gpu", "rtx-4090", "--json")
    contexts = []
    for more in ((), ("-hfd", "Qwen/Qwen2.5-0.5B:Q8_0", "--spec-type", "draft-simple")):
        code, text = run(*words, *more)
        assert code == 0
        contexts.append(json.loads(text)["figures"]["context"])
    assert 4096 <= contexts[1] < contexts[0]
    assert any(one["name"] == "draft model" for one in json.loads(text)["pools"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("qwen2.5-7b", "-md", "Qwen/Qwen2.5-0.5B", "-devd", "CUDA3"), "must be one of CUDA0"),
        (("Qwen/Qwen3-Next-80B-A3B-Instruct", "-md", "qwen3-0.6b"), "recurrent states"),
        (("qwen2.5-7b", "-md", "nowhere.gguf"), "nowhere.gguf"),
        (("qwen2.5-7b", "--spec-type", "draft-mtp"), "not supported yet: draft-mtp"),
    ],
)
def test_drafts_that_are_not_counted_are_refused(words: tuple[str, ...], message: str) -> None:
    code, text = run(*words, "--engine", "llamacpp", "--gpu", "rtx-4090", "--offline")
    assert code == 2
    assert message in " ".join(text.split())
    assert "Traceback" not in text


def test_a_log_without_weights_is_compared_by_its_gpu() -> None:
    printed = {"CUDA0_KV_mib": 10.0, "CUDA0_compute_mib": 20.0, "CUDA_Host_compute_mib": 5.0}
    assert row_figures({"buffers_mib": printed})["compute_gib"] == 20 / 1024
    tower = {"CUDA0_model_mib": 40.0, "CUDA1_compute_mib": 30.0}  # of an encoder on another GPU
    assert row_figures({"buffers_mib": printed | tower})["compute_gib"] == 20 / 1024


def test_layers_with_embeddings_of_their_own_and_layers_that_share_a_cache() -> None:
    """A published log of Gemma 4 E4B, of which the parameters, the caches and the compute buffers
    are known; masks of 32 bits date its build. Files of E4B and E2B in Q4_0 are published with
    5.2 and 3.3 GB."""
    model = named("google/gemma-4-E4B-it", "Q4_K_M")
    settings = Settings(context=32768, batch=512, swa_full=True, build=9300)
    held = buffers(model, settings, machine())
    assert round(model.parameters / 1e9, 2) == 7.52
    assert (mib(dict(held.kv)), mib(dict(held.kv_window))) == ({"CUDA0": 512.0}, {"CUDA0": 1280.0})
    assert mib(dict(held.compute)) == {"CUDA0": 569.01, "CPU": 159.02}
    for name, size in (("google/gemma-4-E4B-it", 5.2), ("google/gemma-4-E2B-it", 3.3)):
        assert round(named(name, "Q4_0").bytes / 1e9, 1) == size


def test_the_shortened_graph_has_the_peak_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from memfit.serving.llamacpp import memory

    cases = [
        (named("google/gemma-2-9b", "Q4_K_M"), Settings(context=8192)),
        (named("google/gemma-4-E2B-it", "Q4_K_M"), Settings(context=8192)),
        (named("Qwen/Qwen3-30B-A3B", "Q4_K_M"), Settings(context=8192, cpu_moe=20)),
        (named("meta-llama/Llama-3.1-8B", "Q4_K_M"), Settings(context=8192, gpu_layers=20)),
        (named("deepseek-ai/DeepSeek-V2-Lite", "Q4_K_M"), Settings(context=8192, flash=False)),
    ]
    short = [buffers(model, settings, machine(gpus=2)).compute for model, settings in cases]
    monkeypatch.setattr(memory, "enough_layers", lambda alike: list(range(len(alike))))
    whole = [buffers(model, settings, machine(gpus=2)).compute for model, settings in cases]
    assert short == whole


def test_what_a_search_remembers_of_a_model_is_what_a_fresh_one_has() -> None:
    """Sizes are remembered by what they depend on: experts and layers on the CPU, context, GPUs."""
    for name in ("Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B"):
        asked = [
            (Settings(context=8192, **more), machine(gpus=gpus))
            for gpus in (1, 2)
            for more in (
                {},
                {"cpu_moe": 1},
                {"cpu_moe": 20},
                {"cpu_moe": 40},
                {"gpu_layers": 0},
                {"gpu_layers": 20},
                {"gpu_layers": 32},
                {"overrides": (("ffn_down", "CPU"),)},
                {"flash": False},
            )
        ]
        one = named(name, "Q4_K_M")
        found = [buffers(one, *each) for each in asked]
        assert found == [buffers(named(name, "Q4_K_M"), *each) for each in asked]
        assert len({str(each) for each in found}) > 10


def test_a_few_models_are_kept_by_all_that_they_are_made_of() -> None:
    config = catalog.entry("meta-llama/Llama-3.1-8B").config()
    for layers in (8, 12, 16, 20, 24, 28):
        for quantization in ("Q4_K_M", "Q8_0"):
            other = {**config, "num_hidden_layers": layers}
            found = loading.from_config(other, "m", quantization)
            assert found == converted(other, "m", quantization)
            assert loading.from_config(dict(other), "m", quantization) is found
    assert len(loading.RECENT) == loading.KEPT


def test_a_model_remembers_no_more_than_its_last_findings() -> None:
    model = named("meta-llama/Llama-3.2-1B", "Q8_0")
    for number in range(3 * MOST):
        assert model.once(number, lambda number=number: -number) == -number  # type: ignore[misc]
    assert model.once(3 * MOST - 1, lambda: 7) == 1 - 3 * MOST
    assert model.once(0, lambda: 7) == 7


@pytest.mark.parametrize(
    ("name", "quantization", "gib"),
    [  # file sizes that logs print
        ("meta-llama/Llama-3.1-8B", "Q4_K_M", 4.58),
        ("meta-llama/Llama-3.1-8B", "Q4_0", 4.33),
        ("meta-llama/Llama-3.1-70B", "Q4_K_M", 39.59),
        ("Qwen/Qwen2.5-32B", "Q4_K_M", 18.48),
        ("mistralai/Mistral-Nemo-Base-2407", "Q5_K_M", 8.12),
        ("openai/gpt-oss-20b", "F16", 12.83),
    ],
)
def test_a_quantization_by_name_gives_the_file_that_llama_quantize_writes(
    name: str, quantization: str, gib: float
) -> None:
    assert named(name, quantization).bytes / GIB == pytest.approx(gib, abs=0.0075)


def test_every_quantization_has_a_type_and_more_bits_are_more_bytes() -> None:
    model = named("Qwen/Qwen3-8B", "F16")
    sizes = {name: quantized(model, name).bytes for name in BASES}
    assert sizes["F32"] > sizes["F16"] > sizes["Q8_0"] > sizes["Q6_K"] > sizes["Q5_K_M"]
    assert sizes["Q5_K_M"] > sizes["Q4_K_M"] > sizes["Q4_K_S"] > sizes["IQ4_XS"] > sizes["Q3_K_M"]
    assert sizes["Q3_K_M"] > sizes["Q2_K"] > sizes["IQ2_XS"] > sizes["IQ1_S"]


def test_a_row_that_no_block_fills_falls_back() -> None:
    model = named("Qwen/Qwen2.5-0.5B", "Q4_K_M")  # 896 wide: no multiple of 256
    types = {tensor.name: tensor.type.name for tensor in model.tensors}
    assert types["blk.0.attn_q.weight"] == "Q5_0"
    assert {types[f"blk.{layer}.ffn_down.weight"] for layer in range(24)} == {"Q4_K", "Q6_K"}
    assert types["token_embd.weight"] == "Q8_0"


def test_experts_move_to_the_cpu_by_layer_or_pattern() -> None:
    model = named("Qwen/Qwen3-30B-A3B", "Q4_K_M")
    every = buffers(model, Settings(cpu_moe=48), machine()).model
    pattern = buffers(model, Settings(overrides=(("exps", "CPU"),)), machine()).model
    assert every == pattern
    half = buffers(model, Settings(cpu_moe=24), machine()).model
    assert every["CUDA0"] < half["CUDA0"] < model.bytes
    assert sum(half.values()) == pytest.approx(sum(every.values()), rel=1e-5)


def test_layers_are_shared_by_free_memory_or_by_shares() -> None:
    model = named("meta-llama/Llama-3.1-8B", "Q4_K_M")
    unlike = Machine(backend=BACKENDS["cuda"], free=(24 * GIB, 8 * GIB))
    layers = buffers(model, Settings(), unlike).layers
    assert layers.count("CUDA0") == 25
    assert layers.count("CUDA1") == 7
    layers = buffers(model, Settings(split=(1, 1)), unlike).layers
    assert layers.count("CUDA0") == 17


def total(held: Buffers) -> int:
    return held.on("CUDA0")


def test_more_context_slots_and_tokens_are_never_less() -> None:
    model = named("google/gemma-2-9b", "Q4_K_M")
    base = Settings(context=8192)
    sizes = [
        total(buffers(model, replace(base, **change), machine()))
        for change in ({}, {"context": 16384}, {"context": 16384, "ubatch": 2048})
    ]
    assert sizes == sorted(sizes)
    quantized_cache = buffers(model, replace(base, cache_k="q8_0", cache_v="q8_0"), machine())
    assert sum(quantized_cache.kv.values()) * 2 > sum(buffers(model, base, machine()).kv.values())


# ------------------------------------------------------------------ the command


def run(*words: str) -> tuple[int, str]:
    """The exit code, and what is printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["estimate", *words])
    return code, out.getvalue() or err.getvalue()


def test_the_command_line_of_llama_server_is_understood() -> None:
    code, text = run(
        *("llama-3.1-8b", "--engine", "llama.cpp", "--gpu", "rtx-4090", "--json", "--"),
        *("llama-server", "-ngl", "99", "-c", "8192", "-np", "1", "-fa", "--jinja", "--port", "80"),
    )
    assert code == 0
    figures = json.loads(text)["figures"]
    assert figures["model_mib"] == pytest.approx(4403.49, abs=0.01)
    assert figures["kv_mib"] == 1024


def test_flags_of_a_command_line_are_normalised() -> None:
    name, flags = read_command(
        ["/usr/bin/llama-server", "-m", "a.gguf", "-fa", "-ot", "a=CPU", "-ot", "b=CPU"]
    )
    assert name == "a.gguf"
    assert flags == ("-fa", "on", "-ot", "a=CPU,b=CPU")
    assert read_command(["-hf", "x/y-GGUF:Q4_K_M", "-fa", "off"])[1] == ("-fa", "off")
    assert tag("x/y-GGUF:Q4_K_M") == ("x/y-GGUF", "Q4_K_M")
    assert tag("x/y") == ("x/y", "")


def served(*words: str, gpu: str = "rtx-4090") -> dict[str, float]:
    line = ("llama-server", "-m", "Qwen3-8B-Q8_0.gguf", "-c", "8192", *words)
    code, text = run("--engine", "llamacpp", "--gpu", gpu, "--offline", "--json", "--", *line)
    assert code == 0, text
    return dict(json.loads(text)["figures"])


def test_a_file_of_a_repository_names_the_quantization() -> None:
    """`--hf-file` was passed over, and the answer was of Q4_K_M."""
    hub = "ggml-org/Qwen3-8B-GGUF"
    for words in (
        ("-hf", hub, "-hff", "Qwen3-8B-Q8_0.gguf"),
        ("-hf", f"{hub}:Q4_K_M", "--hf-file=q/Qwen3-8B.Q8_0-00001-of-00002.gguf"),
    ):
        assert read_command(["llama-server", *words]) == (f"{hub}:Q8_0", ())
    with pytest.raises(InputError, match="is not known from its name"):
        read_command(["llama-server", "-hf", hub, "-hff", "model.gguf"])


def test_ranks_take_what_embeddings_take() -> None:
    """`--reranking` sets `embedding` (common/arg.cpp, b11549)."""
    assert served("--reranking") == served("--embedding") != served()


def test_devices_that_are_named_are_the_ones_that_count() -> None:
    one, two = served(), served(gpu="2xrtx-4090")
    assert served("--device", "CUDA1", gpu="2xrtx-4090")["model_mib"] == one["model_mib"]
    assert served("-dev", "CUDA0,CUDA1", gpu="2xrtx-4090") == two
    assert served("--device", "none") == served("--backend", "cpu")
    line = ("llama-server", "-m", "Qwen3-8B-Q8_0.gguf", "--device", "CUDA0,CUDA1")
    code, text = run("--engine", "llamacpp", "--gpu", "rtx-4090", "--", *line)
    assert code == 2
    assert "names 2 GPUs, 1 are there" in text


def test_what_does_not_fit_names_settings_that_do() -> None:
    code, text = run(
        *("llama-3.1-70b", "--engine", "llamacpp", "--gpu", "rtx-4090", "-ngl", "99"),
        *("-c", "8192", "--quant", "Q4_K_M"),
    )
    assert code == 1
    assert "out of memory" in text
    layers = int(text.partition("-ngl ")[2].split()[0])
    code, _ = run(
        *("llama-3.1-70b", "--engine", "llamacpp", "--gpu", "rtx-4090", "-c", "8192"),
        *("-ngl", str(layers)),
    )
    assert code == 0


@pytest.mark.parametrize(
    ("model", "words", "line", "offload"),
    [
        ("qwen3-8b", "-ngl 12", "12 of 37 layers on the GPU; the CPU computes", (37, 12, 0)),
        ("qwen3-30b-a3b", "--n-cpu-moe 30", "the CPU computes the experts of 30 l", (49, 49, 30)),
        ("qwen3-8b", "-ngl 99", "", None),
    ],
)
def test_the_answer_begins_with_what_the_cpu_computes(
    model: str, words: str, line: str, offload: tuple[int, int, int] | None
) -> None:
    asked = (model, "--engine", "llamacpp", "--gpu", "rtx-3060-12gb", "-c", "8192", *words.split())
    second = run(*asked)[1].splitlines()[1]
    assert second.startswith(line) if line else second == ""
    found = json.loads(run(*asked, "--json")[1])["offload"]
    assert (found and tuple(found.values())) == offload


def test_what_was_not_set_is_reduced_until_it_fits() -> None:
    code, text = run("llama-3.1-8b", "--engine", "llamacpp", "--gpu", "rtx-3060-12gb", "--json")
    assert code == 0
    figures = json.loads(text)["figures"]
    assert 4096 <= figures["context"] < 131072
    assert figures["device_mib"] < 11.63 * 1024 - 1024


def test_the_longest_context_and_the_most_slots_fit_and_one_more_does_not() -> None:
    words = ("qwen3-8b", "--engine", "llamacpp", "--gpu", "rtx-3060-12gb", "-ngl", "99")
    code, text = run(*words, "-c", "8192", "-np", "1", "--longest-context", "--json")
    assert code == 0
    longest = json.loads(text)["figures"]["longest_context"]
    assert run(*words, "-c", str(longest), "-np", "1")[0] == 0
    assert longest == 40960 or run(*words, "-c", str(longest + 256), "-np", "1")[0] == 1
    code, text = run(*words, "-c", "4096", "-np", "1", "--most-slots", "--json")
    assert code == 0
    slots = json.loads(text)["figures"]["most_slots"]
    assert slots >= 2
    assert run(*words, "-c", str(4096 * slots), "-np", str(slots))[0] == 0
    assert run(*words, "-c", str(4096 * (slots + 1)), "-np", str(slots + 1))[0] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-ngl", "many"), "must be an integer, `auto` or `all`"),
        (("-ts", "a,b"), "must be shares"),
        (("-ot", "nothing"), "must be PATTERN=BUFFER"),
        (("-ctk", "q9_9"), "must be one of"),
        (("--quant", "Q4_K_X"), "unknown GGUF quantization"),
        (("-ctv", "q8_0", "-fa", "off"), "a quantized V cache needs flash attention"),
        (("--no-such-flag",), "unknown llama.cpp option"),
        (("-ub", "0"), "must be at least 1"),
        (("-sm", "row"), "row"),
        (("--mmproj", "nowhere.gguf"), "nowhere.gguf"),
    ],
)
def test_bad_flags_are_refused(words: tuple[str, ...], message: str) -> None:
    code, text = run("llama-3.1-8b", "--engine", "llamacpp", *words)
    assert code == 2
    assert message in text
    assert "Traceback" not in text


def test_a_context_beyond_training_is_warned_of() -> None:
    code, text = run("meta-llama/Llama-2-7b-hf", "--engine", "llamacpp", "-c", "16384", "-np", "1")
    assert code == 0
    assert "4,096 that the model was trained for" in " ".join(text.split())


def test_builds_and_versions() -> None:
    assert build_number("b8133") == build_number("8133 (2b6dfe824)") == 8133
    assert ollama_build("0.13.5") == 7436
    with pytest.raises(InputError):
        build_number("newest")


# ------------------------------------------------------------------ coverage


def test_every_converter_has_a_graph() -> None:
    archs = set()
    for name in catalog.names():
        config = catalog.entry(name).config()
        if config.get("model_type") not in CONVERTERS or name.startswith("stepfun-ai/Step-3.7"):
            continue  # Step's config lacks the heads of its windows
        archs.add(converted(config, name, "Q4_K_M").arch)
    assert archs <= set(RECIPES)
    assert len(archs) >= 30


@pytest.mark.parametrize(
    ("name", "arch", "parameters"),
    [  # text models: those of the published counts without their towers
        ("IQuestLab/IQuest-Coder-V1-40B-Instruct", "llama", 39_794_283_520),
        ("zai-org/GLM-4.1V-9B-Thinking", "glm4", 9_400_279_040),
        # Llama 2 7B and 64 more words
        ("llava-hf/llava-1.5-7b-hf", "llama", 6_738_415_616 + 2 * 64 * 4096),
    ],
)
def test_text_models_of_catalog_names(name: str, arch: str, parameters: int) -> None:
    found = named(name, "Q4_K_M")
    assert (found.arch, found.parameters) == (arch, parameters)


@pytest.mark.parametrize(
    ("text", "kv_heads", "inner"), [("llama", 32, 11008), ("mistral", 8, 14336)]
)
def test_sizes_that_a_text_config_leaves_out_are_those_of_its_class(
    text: str, kv_heads: int, inner: int
) -> None:
    config = {"model_type": "llava", "text_config": {"model_type": text, "vocab_size": 32064}}
    found = converted(config, "toy")
    assert {found.kv_heads(layer) for layer in range(found.layers)} == {kv_heads}
    assert found.by_name["blk.0.ffn_up.weight"].sizes == (4096, inner)


def test_other_language_models_of_llava_are_refused() -> None:
    config = {"model_type": "llava", "text_config": {"model_type": "qwen2", "hidden_size": 64}}
    with pytest.raises(SourceError, match="not supported yet: the language model `qwen2`"):
        converted(config, "toy")


def test_an_answer_takes_milliseconds() -> None:
    first, *others = (named("Qwen/Qwen3-30B-A3B", "Q4_K_M") for _ in range(6))
    settings = Settings(context=32768)
    buffers(first, settings, machine())
    start = time.process_time()
    for model in others:  # a model remembers what was asked of it
        buffers(model, settings, machine())
    assert (time.process_time() - start) / 5 < 1  # 10 to 20 ms on an idle machine


# ------------------------------------------------------------------ files


SHAPES = {
    "token_embd.weight": [64, 96],
    "output_norm.weight": [64],
    "blk.0.attn_norm.weight": [64],
    "blk.0.ffn_norm.weight": [64],
    **{f"blk.0.attn_{one}.weight": [64, 64] for one in ("q", "k", "v", "output")},
    "blk.0.ffn_gate.weight": [64, 128],
    "blk.0.ffn_up.weight": [64, 128],
    "blk.0.ffn_down.weight": [128, 64],
}


def small_file(left_out: str = "", renamed: str = "", **change: int) -> bytes:
    """A llama of one layer in 32 bits; `change` alters its metadata, a tensor may be missing or
    stand under another name."""
    facts = {"block_count": 1, "embedding_length": 64, "context_length": 512} | change
    pairs = [pair("general.architecture", "str", "llama")]
    pairs += [pair(f"llama.{key}", "u32", value) for key, value in facts.items()]
    pairs += [
        pair("llama.attention.head_count", "u32", 4),
        pair("llama.feed_forward_length", "u32", 128),
    ]
    tensors, at = [], 0
    for name, sizes in SHAPES.items():
        if name == left_out:
            if not renamed:
                continue
            name = renamed
        tensors.append(tensor(name, sizes, 0, at))
        at += 4 * sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    return whole(pairs, tensors, at)


def test_a_file_with_lying_counts_is_refused(tmp_path: Path) -> None:
    for key, value in (("block_count", 9), ("embedding_length", 65), ("block_count", 0)):
        path = tmp_path / "lies.gguf"
        path.write_bytes(small_file(**{key: value}))
        with pytest.raises(SourceError, match=key):
            from_file(path)
        assert run(str(path), "--engine", "llamacpp")[0] == 2


@pytest.mark.parametrize(
    ("left_out", "renamed"),
    [
        ("blk.0.ffn_down.weight", ""),
        ("output_norm.weight", ""),
        ("blk.0.attn_k.weight", "blk.7.attn_k.weight"),
    ],
)
def test_a_file_without_a_tensor_that_the_graph_needs_is_refused(
    tmp_path: Path, left_out: str, renamed: str
) -> None:
    path = tmp_path / "short.gguf"
    path.write_bytes(small_file(left_out, renamed))
    code, text = run(str(path), "--engine", "llamacpp", "-c", "256")
    assert code == 2
    assert (renamed or left_out.removesuffix(".weight")) in text
    assert "Traceback" not in text


def test_a_vision_tower_adds_its_tensors(tmp_path: Path) -> None:
    model, tower = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    model.write_bytes(small_file())
    pairs = [pair("general.architecture", "str", "clip")]
    tower.write_bytes(whole(pairs, [tensor("v.patch_embd.weight", [512, 2048], 0, 0)], 4 * MIB))
    code, text = run(
        *(str(model), "--engine", "llamacpp", "--gpu", "rtx-4090", "-c", "256", "-np", "1"),
        *("--mmproj", str(tower), "--json"),
    )
    assert code == 0
    pools = {one["name"]: one["bytes"] for one in json.loads(text)["pools"]}
    assert pools["vision tower"] == 4 * MIB


def test_a_file_is_counted_by_its_own_types(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_file())
    model = from_file(path)
    assert model.layers == 1
    assert model.bytes == sum(tensor.bytes for tensor in model.tensors)
    held = buffers(model, Settings(context=256), machine())
    assert held.kv["CUDA0"] == 256 * 64 * 2 * 2
    code, text = run(str(path), "--engine", "llamacpp", "-c", "256", "-np", "1")
    assert code == 0
    assert "CUDA0 KV buffer size =     0.06 MiB" in text


def test_the_printed_command_places_everything_as_it_was_asked() -> None:
    """Its own answer is the same."""
    flags = shlex.split("-dev CUDA0,CUDA1 -ts 3,1 -ot '(up|down)_exps=CPU' -nkvo --no-mmap -c 8192")
    options = {"gpu": "3xrtx-4090"}
    asked = from_command(["qwen3-30b-a3b", *flags], (), "llamacpp", options)
    name, printed = read_command(shlex.split(asked.command))
    assert name.endswith("-Q4_K_M.gguf")
    assert set(flags) <= set(printed)
    again = from_command(["qwen3-30b-a3b", *printed], (), "llamacpp", options)
    assert again.pools == asked.pools
