"""Other programs' command lines behind `memfit`: serving engines' are answered, scripts' are not
run."""

from __future__ import annotations

import json

import pytest

from memfit.cli import main
from memfit.cli.command_lines import pasted
from memfit.errors import InputError

ENGINES = {
    "vllm serve Qwen/Qwen3-8B --max-model-len 32768": "vllm",
    "CUDA_VISIBLE_DEVICES=0 vllm serve Qwen/Qwen3-8B": "vllm",
    "python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B": "vllm",
    "docker run --rm --gpus all -p 8000:8000 vllm/vllm-openai:latest --model Qwen/Qwen3-8B": "vllm",
    "python -m sglang.launch_server --model-path Qwen/Qwen3-8B": "sglang",
    "docker run ghcr.io/ggml-org/llama.cpp:server -m Qwen3-8B-Q4_K_M.gguf -c 8192": "llamacpp",
    "./build/bin/llama-server -m models/Qwen3-8B-Q4_K_M.gguf -c 32768 -ngl 99 -fa on": "llamacpp",
    "llama-cli -hf unsloth/Qwen3-8B-GGUF:Q4_K_M -c 16384": "llamacpp",
    "ollama run qwen3:8b": "ollama",
    "OLLAMA_NUM_PARALLEL=4 ollama run qwen3:8b": "ollama",
    "text-generation-launcher --model-id Qwen/Qwen3-8B": "tgi",
}


@pytest.mark.parametrize("line", ENGINES)
def test_a_pasted_command_of_an_engine_is_answered_by_that_engine(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--gpu", "h100-sxm", "--json"]
    forms = ([*line.split(), *place], [*place, "--", *line.split()], [line, *place])
    meant = [pasted(words) for words in forms]
    assert meant[0] == meant[1] == meant[2]
    assert main(forms[0]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["engine"] == ENGINES[line]
    assert "Qwen3-8B" in answer["model"] or "qwen3:8b" in answer["model"]
    assert answer["gpu"] == "NVIDIA H100 80GB HBM3"


def test_an_engine_may_be_named_before_its_own_command() -> None:
    line = ["vllm", "serve", "Qwen/Qwen3-8B", "--gpu", "h100"]
    meant = pasted(["estimate", *line])
    for before in (["--engine", "vllm"], ["--engine=vllm"], ["--engine", "vllm", "--"]):
        assert pasted(["estimate", *before, *line]) == meant
    with pytest.raises(InputError, match="unknown serving engine"):
        pasted(["estimate", "--engine", "vlmm", "--", *line])


def test_an_offline_question_may_hold_an_engine_s_own_command() -> None:
    line = ["llama-server", "-m", "Qwen3-8B-Q4_K_M.gguf", "--offline"]  # here it is the engine's
    assert pasted(["--offline", *line]) == (
        ["estimate", "--offline", "--engine", "llamacpp", "--", *line]
    )


def test_options_of_a_pasted_command_count() -> None:
    line = "vllm serve Qwen/Qwen3-8B --max-model-len 8192 --gpu h100"
    own, command = ["--gpu", "h100"], line.split()[:-2]
    assert pasted(line.split()) == ["estimate", *own, "--engine", "vllm", "--", *command]
    assert pasted(["estimate", *line.split()]) == pasted(line.split())


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("train.py", "memfit trace train.py"),
        ("--gpu a100 python train.py --lr 3", "memfit trace --gpu a100 train.py --lr 3"),
        ("accelerate launch train.py", "memfit trace -- accelerate launch train.py"),
        (
            "CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 8 train.py --gpu 3",
            "memfit trace -- torchrun --nproc-per-node 8 train.py --gpu 3",
        ),
    ],
)
def test_a_pasted_script_is_not_run(
    line: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    shown = capsys.readouterr().err
    assert "only `memfit trace` runs code" in shown
    assert f"`{right}`" in shown


@pytest.mark.parametrize("words", [["qwen3-8b"], ["estimate", "qwen3-8b"], ["--gpu", "h100"], []])
def test_other_words_are_left_alone(words: list[str]) -> None:
    assert pasted(words) is None


def test_an_engine_alone_is_told_what_is_missing() -> None:
    with pytest.raises(InputError, match="no model is named"):
        pasted(["vllm"])


@pytest.mark.parametrize("name", ["Qwen3-8B-GGUF:Q4_K_M", "unsloth/Qwen3-8B-GGUF:Q4_K_M"])
def test_a_model_in_a_quantization_of_ggml_is_run_by_llama_cpp(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", name, "--gpu", "rtx-3060", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"] == "llamacpp"
    assert found["model"].endswith("Q4_K_M")
    main(["estimate", name, "--gpu", "rtx-3060", "--method", "lora", "--json"])
    assert "engine" not in json.loads(capsys.readouterr().out)


def test_a_missing_gguf_file_is_read_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "--engine", "llama.cpp", "--gpu", "rtx-3060"]
    assert main([*words, "models/Qwen3-8B-UD-Q4_K_M-00001-of-00002.gguf"]) == 0
    assert "is not on this machine" in capsys.readouterr().out
    assert main(["estimate", "Qwen3-8B-UD-Q4_K_M.gguf", "--gpu", "rtx-3060"]) == 0
    assert "is not on this machine" in capsys.readouterr().out
    assert main([*words, "models/unheard-of.gguf"]) == 2
    assert main(["models/Qwen3-8B-Q4_K_M.gguf", "--gpu", "rtx-3060"]) == 2
    assert "did you mean `Qwen/Qwen3-8B`?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        ("python", "names neither a serving engine nor a script", "memfit trace train.py"),
        ("accelerate launch -m pkg.train", "names neither", "trace -- accelerate launch -m pkg"),
        ("--gpu h100 uv run train", "names neither", "memfit trace -- uv run train"),
        ("docker run lmsysorg/sglang:latest", "starts no serving engine", "lmsysorg/sglang"),
        ("docker run --gpus all nginx", "starts no serving engine", "vllm/vllm-openai"),
    ],
)
def test_a_command_that_starts_neither_engine_nor_script_is_told_so(
    line: str, said: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert said in shown
    assert hint in shown
