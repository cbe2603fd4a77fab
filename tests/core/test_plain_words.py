"""What is answered without click is what click would have read."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from memfit.cli.commands import commands
from memfit.cli.plain import read
from memfit.words.options import options

MODEL = "llama-3.1-8b"
SAMPLES = {"bool": [], "int": ["3"], "float": ["0.5"]}


def by_click(*words: str) -> dict[str, Any]:
    """The arguments of the command without those that have no value."""
    command = commands.get_command(None, "estimate")  # type: ignore[arg-type]
    assert command is not None
    params = command.make_context("estimate", list(words)).params
    return {name: one for name, one in params.items() if one not in (None, (), "")}


@pytest.mark.parametrize(
    "name", [name for name in options() if name not in ("model", "use")], ids=str
)
def test_every_option_has_the_value_that_click_gives(name: str) -> None:
    rule = options()[name]
    flag = f"--{name.replace('_', '-')}"
    for value in SAMPLES.get(str(rule.type), [*rule.metadata["choices"], "8k", "a,b"]):
        for words in ((MODEL, flag, value), (f"{flag}={value}", MODEL)):
            assert read(words) == by_click(*words)
    if rule.type == "bool":
        assert read((flag, MODEL)) == by_click(flag, MODEL)


@pytest.mark.parametrize(
    "words",
    [
        "meta-llama/Llama-3.1-8B --method lora --gpu 2xa100 --batch 4 --explain --bytes --strict",
        "--json --precision bfloat16 llama-3.1-8b --seq 8k",
    ],
)
def test_several_options_too(words: str) -> None:
    assert read(words.split()) == by_click(*words.split())


@pytest.mark.parametrize(
    "words",
    [
        "",
        MODEL + " mistral-7b",  # two models
        "Qwen3-8B-GGUF:Q4_K_M",  # an engine's
        "job.yaml",
        MODEL + " --lora",
        MODEL + " --engine vllm",
        MODEL + " --use tp=2",
        MODEL + " --context 8k",
        MODEL + " --gpu",
        MODEL + " --gpu --json",
        MODEL + " --gpu a100 --gpu h100",
        MODEL + " --new_tokens 4",
        MODEL + " --no-prepare-kbit",
        MODEL + " --format json",
        MODEL + " --help",
        MODEL + " -- vllm serve x",
        MODEL + " --bogus 1",
    ],
)
def test_everything_else_is_left_to_click(words: str) -> None:
    assert read(words.split()) is None


def test_a_plain_estimate_loads_no_click() -> None:
    code = "import sys; from memfit.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    words = ["estimate", "llama-3.2-1b", "--method", "lora", "--gpu", "t4"]
    for more, loaded in (([], False), (["--lora"], True)):
        done = subprocess.run(
            [sys.executable, "-c", code, *words, *more], capture_output=True, text=True, check=True
        )
        assert ("click" in done.stdout.splitlines()[-1].split()) is loaded
