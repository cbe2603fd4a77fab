"""Ollama: tags, variables, defaults by version, published logs."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest

from memfit.cli import main
from memfit.errors import InputError
from memfit.model import catalog
from memfit.serving.llamacpp.loading import from_config
from memfit.serving.llamacpp.ollama import default_context
from memfit.serving.llamacpp.tags import LIBRARY, resolve, tag_of
from memfit.truth.served import ROWS, judge, lines, rows_of, summed


def run(*words: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["estimate", *words])
    return code, out.getvalue() or err.getvalue()


@pytest.mark.parametrize(
    ("tag", "repo", "quantization"),
    [
        ("qwen3:8b", "Qwen/Qwen3-8B", "Q4_K_M attn_v=F16"),
        ("qwen3", "Qwen/Qwen3-8B", "Q4_K_M attn_v=F16"),
        ("qwen3:30b", "Qwen/Qwen3-30B-A3B", "Q4_K_M attn_v=F16"),
        (
            "llama3.1:70b-instruct-q4_0",
            "meta-llama/Meta-Llama-3.1-70B-Instruct",
            "Q4_0",
        ),
        ("gemma3:27b-it-q8_0", "google/gemma-3-27b-it", "Q8_0"),
        ("llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct", "Q8_0"),
        ("mistral:latest", "mistralai/Mistral-7B-Instruct-v0.3", "Q4_0"),
    ],
)
def test_a_tag_is_a_model_and_a_quantization(tag: str, repo: str, quantization: str) -> None:
    assert resolve(tag) == (repo, quantization)


def test_tags_that_nobody_knows() -> None:
    assert resolve("no-such-model:7b") is None
    with pytest.raises(InputError, match="unknown quantization"):
        resolve("qwen3:8b-q9_0")
    with pytest.raises(InputError, match="no size"):
        resolve("qwq:7b")


# Sizes in the table of Ollama's README (v0.13.5), in GB; its 4.7 for llama3.1 is the Q4_0 file of
# 2024, the library has Q4_K_M since.
SIZES = {
    "gemma3:1b": 0.815,
    "llama3.3": 43,
    "llama3.2": 2.0,
    "llama3.2:1b": 1.3,
    "qwq": 20,
    "deepseek-r1:7b": 4.7,
    "deepseek-r1:671b": 404,
    "phi4": 9.1,
    "phi4-mini": 2.5,
    "mistral": 4.1,
    "codellama": 3.8,
    "granite3.3": 4.9,
}


@pytest.mark.parametrize("tag", SIZES)
def test_a_tag_has_the_size_that_ollama_prints(tag: str) -> None:
    repo, quantization = resolve(tag) or ("", "")
    found = catalog.find(repo)
    if found is None:
        pytest.skip(f"{repo} is not in the catalog")
    model = from_config(catalog.entry(found).config(), repo, quantization)
    rounding = 0.06 if SIZES[tag] < 10 else 0.51
    assert model.bytes / 1e9 == pytest.approx(SIZES[tag], abs=rounding, rel=0.01)


def test_every_entry_of_the_library_names_its_latest() -> None:
    for name in LIBRARY:
        assert resolve(name)


def test_the_command_and_its_variables_are_understood() -> None:
    words = ["OLLAMA_NUM_PARALLEL=4", "OLLAMA_KV_CACHE_TYPE=q8_0", "ollama", "run", "qwen3:8b"]
    own = ["--engine", "ollama", "--gpu", "rtx-4090", "--num-ctx", "4096", "--json"]
    code, text = run(*own, "--", *words)
    assert code == 0
    answer = json.loads(text)
    assert answer["figures"]["slots"] == 4
    assert answer["figures"]["context"] == 16384
    assert answer["figures"]["kv_mib"] == pytest.approx(2304 * 34 / 64)
    assert "OLLAMA_NUM_PARALLEL=4" in answer["command"]


def test_bad_input() -> None:
    assert run("qwen3:8b-q9_0", "--engine", "ollama")[0] == 2
    assert run("qwen3:8b", "--engine", "ollama", "--num-ctx", "0")[0] == 2
    assert run("qwen3:8b", "--engine", "ollama", "--engine-version", "new")[0] == 2


def test_the_default_context_depends_on_version_and_memory() -> None:
    assert default_context((), (0, 6, 1)) == 2048
    assert default_context((), (0, 13, 5)) == 4096


@pytest.mark.parametrize(
    ("tag", "words", "context"),
    [
        ("llama2:7b", (), 4096),
        ("qwen3:8b", (), 32768),
        ("qwen3:8b", ("--num-ctx", "49152"), 40960),
        ("llama2:7b", ("--num-ctx", "8192", "--engine-version", "0.3.0"), 8192),
    ],
)
def test_a_context_is_never_longer_than_the_model_was_trained_for(
    tag: str, words: tuple[str, ...], context: int
) -> None:
    """As a published log says: requested 49152, trained for 40960, `n_ctx = 40960`."""
    code, text = run(tag, "--engine", "ollama", "--gpu", "rtx-4090", "--json", *words)
    assert code == 0
    answer = json.loads(text)
    assert answer["figures"]["context"] == context
    assert f"OLLAMA_CONTEXT_LENGTH={context}" in answer["command"]
    assert ("Ollama reduces 49,152 tokens" in text) == ("49152" in words)


@pytest.mark.parametrize(
    ("model", "more", "tag"),
    [
        ("Qwen/Qwen3-8B", (), "qwen3:8b"),
        ("gpt-oss-20b", (), "gpt-oss:20b"),
        ("google/gemma-3-270m-it", (), "gemma3:270m"),
        ("mistral-small-24b-instruct-2501", (), "mistral-small:24b"),
        ("meta-llama/Llama-3.1-8B", (), ""),  # the library has the tuned model
        ("Qwen/Qwen3-8B", ("--quant", "Q5_K_M"), ""),  # its 8b has other types
    ],
)
def test_a_model_of_the_library_is_named_by_its_tag(
    model: str, more: tuple[str, ...], tag: str
) -> None:
    """The settings are the server's, so it gets them; a tag is named where it has these files."""
    asked = ("--engine", "ollama", "--gpu", "rtx-4090", "--json")
    code, text = run(model, *asked, *more)
    assert code == 0
    answer = json.loads(text)
    served, *rest = answer["command"].splitlines()
    assert served.startswith("OLLAMA_CONTEXT_LENGTH=32768 ")
    assert served.endswith(" ollama serve")
    assert rest == ([f"ollama run {tag}"] if tag else [])
    if tag:
        same = json.loads(run(tag, *asked)[1])
        assert same["pools"] == answer["pools"]


def test_a_tag_alone_means_ollama(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "qwen3:8b", "--gpu", "rtx-4090", "--json"]) == 0
    found = capsys.readouterr()
    answer = json.loads(found.out)
    named = json.loads(run("qwen3:8b", "--engine", "ollama", "--gpu", "rtx-4090", "--json")[1])
    assert answer == named
    assert "`qwen3:8b` is a tag of Ollama's library, so `--engine ollama`" in found.err
    tuned = ("qwen3:8b", "--gpu", "rtx-4090", "--method", "qlora", "--json", "--offline")
    assert main(["estimate", *tuned]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["method"] == "qlora"


def test_every_tag_is_found_from_its_repository() -> None:
    tags = {name: tag_of(name) for name in catalog.names()}
    assert sum(map(bool, tags.values())) > 100
    for name, tag in tags.items():
        assert not tag or (resolve(tag) or ("",))[0] == name
    assert tag_of("nobody/nothing") == ""


def test_models_that_stay_loaded_leave_the_rest() -> None:
    """Each is a runner of its own; what does not fit beside them is refused, not offloaded."""
    common = ("--engine", "ollama", "--gpu", "rtx-4090", "--json")
    alone = [
        json.loads(run(tag, *common)[1]) for tag in ("qwen3:8b", "llama3.2:3b", "granite3.3:2b")
    ]
    code, text = run("qwen3:8b", *common, "--beside", "llama3.2:3b,granite3.3:2b")
    assert code == 0
    together = json.loads(text)

    def used(answer: dict[str, Any]) -> int:
        return sum(one["bytes"] for one in answer["pools"] if one["where"] == "gpu")

    assert used(together) == sum(map(used, alone))
    assert together["usable"] == alone[0]["usable"]
    code, text = run("qwen3:14b", *common, "--beside", "qwen3:8b")
    assert code == 1
    assert "so Ollama unloads them" in json.loads(text)["failure"]
    assert run("qwen3:8b", "--engine", "ollama", "--beside", "llama3.2:3b")[0] == 2
    assert run("qwen3:8b", *common, "--beside", "nope:8b")[0] == 2


def test_published_logs_are_answered() -> None:
    rows = [row for row in rows_of(lines(ROWS)) if row.engine in ("llama.cpp", "ollama")]
    found = summed([judge(row) for row in rows])
    for engine in ("llama.cpp", "ollama"):
        figures = found[engine]["figures"]
        assert figures["weights_gib"]["median"] < 0.001
        assert figures["kv_gib"]["median"] < 0.001
        assert figures["kv_gib"]["p95"] < 0.015  # of 16 logs the worst: 0.13 of 8.88 MiB
        assert figures["compute_gib"]["median"] < 0.01
        assert figures["device_gib"]["median"] < 0.005
    assert found["llama.cpp"]["answered"] == found["llama.cpp"]["complete"] == 16
    assert found["ollama"]["answered"] >= 16  # of 18; two are of Ollama's own engine in Go
