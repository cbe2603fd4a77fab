"""memfit from Python: the typed stub is current, a user's program passes a strict type checker, and
an answer shows itself in a shell and in a notebook."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

import memfit
from memfit.cli import main

ROOT = Path(__file__).parents[2]
QUESTION = {"gpu": "rtx-4090", "method": "lora", "framework": "transformers"}

GOOD = """\
import memfit

answer = memfit.estimate("llama-3.1-8b", gpu="rtx-4090", method="lora", rank=8)
fits: bool = answer.fits
peak: int = answer.memory.allocated
text: str = answer.summary()
data: dict[str, object] = answer.to_dict()
first, second = memfit.compare("llama-3.1-8b", [{"batch": 1}, {"batch": 2}], gpu="rtx-4090")
found = memfit.plan("llama-3.1-8b", gpu="2xrtx-4090", method="lora,qlora", batch="1,2")
served = memfit.serve("qwen3-8b", engine="vllm", gpu="l4", max_model_len=4096)
starts: bool = served.fits
card = memfit.card("qwen3-0.6b", gpu="l4")
said: str = card.summary()
load = memfit.plan_engine("qwen3-0.6b", engine="vllm", gpu="l4", users=8)
rows: int = len(load.rows)
names: list[str] = [one.name for one in memfit.models("llama")]
"""
BAD = {
    "an unknown option": 'import memfit\nmemfit.estimate("llama-3.1-8b", metod="lora")\n',
    "an unknown choice": 'import memfit\nmemfit.estimate("llama-3.1-8b", method="loar")\n',
    "a wrong type": 'import memfit\nmemfit.estimate("llama-3.1-8b", batch="one")\n',
}


def checked(tmp_path: Path, text: str) -> tuple[int, str]:
    (tmp_path / "program.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    command += ["--config-file=", f"--cache-dir={tmp_path.parent / 'mypy'}", "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    return done.returncode, done.stdout


def test_the_stub_has_every_option() -> None:
    command = [sys.executable, str(ROOT / "tools" / "stubs.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_of_a_user_passes_the_type_checker(tmp_path: Path) -> None:
    assert checked(tmp_path, GOOD) == (0, "Success: no issues found in 1 source file\n")


def test_mistakes_are_found_before_the_program_runs(tmp_path: Path) -> None:
    code, text = checked(tmp_path, "\n".join(BAD.values()))
    assert code == 1
    assert text.count("error:") == len(BAD), text


@pytest.fixture(scope="module")
def answer() -> memfit.Estimate:
    return memfit.estimate("llama-3.1-8b", **QUESTION)  # type: ignore[arg-type]


def test_an_answer_is_one_line_in_a_shell(answer: memfit.Estimate) -> None:
    text = repr(answer)
    assert text.startswith("<Estimate ")
    assert "Llama-3.1-8B" in text
    assert "RTX 4090" in text
    assert len(text) < 140
    assert "\n" not in text


def test_an_answer_shows_itself(answer: memfit.Estimate) -> None:
    assert answer.summary() == memfit.write(answer)
    data = answer.to_dict()
    assert data["verdict"] == answer.verdict
    assert data["memory"]["device"] == answer.device


def test_a_notebook_gets_well_formed_html(answer: memfit.Estimate) -> None:
    class Balanced(HTMLParser):
        stack: list[str]

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.stack.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.stack.pop() == tag

    parser = Balanced()
    parser.stack = []
    text = answer._repr_html_()
    parser.feed(text)
    assert parser.stack == []
    assert all(name in text for name in ("device", "reserved", "allocated", "usable", "weights"))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: memfit.serve("qwen3-8b", gpus="l4"), ("Qwen3-8B, vLLM: does not start on",)),
        (lambda: memfit.serve("qwen3-0.6b", engine="sglang", gpu="l4"), ("SGLang: fits: ",)),
        (lambda: memfit.plan_engine("qwen3-0.6b", engine="vllm", gpu="l4", users=8), ("8 users",)),
        (lambda: memfit.card("qwen3-0.6b", gpu="l4"), ("Qwen3-0.6B", "NVIDIA L4")),
        (lambda: memfit.gpus("l4")[0], ("l4: NVIDIA L4",)),
        (lambda: memfit.models("qwen3-0.6b")[0], ("Entry Qwen/Qwen3-0.6B",)),
    ],
)
def test_every_answer_is_one_line_in_a_shell(
    ask: Callable[[], object], words: tuple[str, ...]
) -> None:
    text = repr(ask())
    assert len(text) < 140
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_a_serving_answer_and_a_card_show_themselves(capsys: pytest.CaptureFixture[str]) -> None:
    for found, command in (
        (memfit.serve("qwen3-0.6b", gpu="l4"), "estimate qwen3-0.6b --engine vllm --gpu l4"),
        (memfit.card("qwen3-0.6b", gpu="l4"), "qwen3-0.6b --gpu l4"),
    ):
        assert main([*command.split(), "--json"]) == 0
        assert json.dumps(found.to_dict()) == json.dumps(json.loads(capsys.readouterr().out))
        assert found._repr_html_().startswith("<pre>")
        assert found.summary().splitlines()[0] in found._repr_html_()


def test_only_public_names_are_offered() -> None:
    shown = [name for name in dir(memfit) if not name.startswith("__")]
    assert shown == sorted(memfit.__all__)


def test_plans_and_studies_show_themselves() -> None:
    plan = memfit.plan("llama-3.2-1b", gpu="rtx-4090", method="lora", framework="transformers")
    assert repr(plan).startswith("<Plan ")
    assert plan.rows
    assert len(plan.to_dict()["rows"]) == len(plan.rows)
    assert plan._repr_html_().startswith("<pre>")
    assert "<" not in plan._repr_html_()[5:-6]
