"""Commands that packages install, as a way to start a program."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from memfit.api.verbs import trace
from memfit.cli import main
from memfit.cli.commands import commands
from memfit.cli.trace import split
from memfit.errors import InputError
from memfit.trace import launchers

PROGRAM = """
import os, sys, torch

def main():
    assert sys.argv == ["tinytrain", "fit", "--width", "64"] and os.environ["DEPTH"] == "2"
    model = torch.nn.Linear(int(sys.argv[3]), 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
"""


def test_an_installed_command_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tinytrain.py").write_text(PROGRAM)
    about = tmp_path / "tinytrain-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tinytrain\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[console_scripts]\ntinytrain = tinytrain:main\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = trace("-- tinytrain", "fit", "--width", "64", launcher="DEPTH=2")
    assert found.script is not None
    assert found.script.steps == 3


def test_words_of_a_command() -> None:
    valued = {"--gpu": True}
    found = split(["--gpu", "t4", "--", "env", "A=1", "trl", "sft", "--config", "a.yaml"], valued)
    assert found.subject == "-- trl"
    assert found.launcher == "env A=1"
    assert found.arguments == ["sft", "--config", "a.yaml"]
    assert split(["--", "accelerate", "launch", "--config_file", "a.yaml"], {}).subject == ""
    written = ["--", "accelerate", "launch", "--config_file=a.yaml", "train.py", "--bf16"]
    assert split(written, {}).subject == "train.py"


PASTED = {
    "torchrun --nproc-per-node 4 train.py --bf16": ("train.py", "torchrun --nproc-per-node 4"),
    "accelerate launch --config_file a.yaml train.py --batch 2": (
        "train.py",
        "accelerate launch --config_file a.yaml",
    ),
    "deepspeed --num_gpus=8 --module package.train --lr 1": (
        "-m package.train",
        "deepspeed --num_gpus=8",
    ),
    "python -u train.py model=gpt2": ("train.py", "python -u"),
    "python3 train.py": ("train.py", ""),
    "CUDA_VISIBLE_DEVICES=0 python -m package.train --lr 1": (
        "-m package.train",
        "CUDA_VISIBLE_DEVICES=0 python",
    ),
    "uv run train.py": ("train.py", "uv run"),
    "env ls": ("-- ls", "env"),
    "ls folder --all": ("-- ls", ""),  # an installed command and its own options
}


@pytest.mark.parametrize("line", PASTED)
def test_a_pasted_launcher_needs_no_dashes(line: str) -> None:
    """Its options are its own, although memfit has some of the same names."""
    typed = ["--gpu", "t4", *line.split()]
    command = commands.get_command(click.Context(commands), "trace")
    assert command is not None
    with command.make_context("trace", typed) as context:
        words = context.params["words"]
    assert (words.subject, words.launcher) == PASTED[line]
    assert words.ours == ["--gpu", "t4"]
    behind = split(["--gpu", "t4", "--", *line.split()], {"--gpu": True})
    assert words == behind


def test_a_model_is_no_command() -> None:
    for line in ("qwen3-0.6b --batch 2", "deepspeed", "ls --batch 2", "ls"):
        words = split(line.split(), {"--batch": True})
        assert (words.subject, words.launcher) == (line.split()[0], "")


RANKED = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", type=int)
assert parser.parse_args().local_rank == torch.cuda.current_device() == 1
# Whatever is no device means the current one, as in torch/_utils.py
assert torch.cuda.get_device_name("cuda".index) == torch.cuda.get_device_name(0)
torch.nn.Linear(64, 64).cuda()(torch.ones(8, 64).cuda()).sum().backward()
"""


def test_a_launcher_s_own_argument_is_the_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKED)
    launcher = "python -m torch.distributed.launch --nproc-per-node=2"
    found = trace(script, launcher=launcher, rank=1, steps=0)
    assert found.strategy.ranks == 2


BESIDE = """
from importlib.util import find_spec
import torch
assert (find_spec("besides") is not None) == FOUND
torch.nn.Linear(64, 64).cuda()(torch.ones(8, 64).cuda()).sum().backward()
"""


@pytest.mark.parametrize(
    ("launcher", "found"),
    [
        ("torchrun --nproc-per-node 2", False),
        ("accelerate launch --multi_gpu --num_processes 2", False),
        ("accelerate launch --use_deepspeed --num_processes 2", True),  # sets PYTHONPATH
    ],
)
def test_a_launched_script_finds_what_is_beside_it(
    launcher: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of the working directory, which Python adds to the launcher's own path."""
    if found and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    (tmp_path / "besides.py").touch()
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text(BESIDE.replace("FOUND", str(found)))
    monkeypatch.chdir(tmp_path)
    assert trace("scripts/train.py", launcher=launcher, steps=0).strategy.ranks == 2


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed_starts_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tinymodule.py").write_text('import sys\nassert sys.argv[1:] == ["-m", "x"]')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = "-- deepspeed --num_gpus 2 --no_local_rank --module tinymodule -m x"
    words = split(started.split(), {})
    assert words.subject == "-m tinymodule"
    found = trace(words.subject, *words.arguments, launcher=words.launcher, steps=0)
    assert found.strategy.ranks == 2


MAGICS = """%%capture
!pip install one \\
   "two==1"
if True:
    !ls
files = !ls -l
%time made = 1
train?
rest = 5 % 3"""
CELLS = (
    "%matplotlib inline\nimport torch\nget_ipython().system('ls')",
    "%%bash\necho done | cat",
    f"{MAGICS}\nassert (files, made, rest) == ([], 1, 2)",
    'text = """\n!kept\n%s" % 1\n"""\nassert "\\n!kept" in text',
    "display(1)\ntorch.nn.Linear(64, 64).cuda()(torch.ones(8, 64).cuda()).sum().backward()",
)


def test_a_notebook_with_magics_runs(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": one.splitlines(keepends=True)} for one in CELLS]
    notebook = tmp_path / "run.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    trace(notebook)


STEPS = """
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(STEPS):
    model(torch.ones(8, 64).cuda()).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("steps", [3, 1])
def test_a_cell_that_is_no_python_fails_when_it_is_reached(steps: int, tmp_path: Path) -> None:
    code = [STEPS.replace("STEPS", str(steps)), "print(1)\nmodel(\n  first\n  second)\n", "1"]
    cells = [{"cell_type": "code", "source": one} for one in code]
    notebook = tmp_path / "run.ipynb"
    notebook.write_text(json.dumps({"cells": cells}))
    if steps == 3:
        assert trace(notebook).script is not None
        return
    with pytest.raises(InputError, match="in a cell: first") as caught:
        trace(notebook)
    assert "run.py:10:" in str(caught.value.problems[0].where)


WARNS = """
import logging, sys, warnings, torch
print("reading a.txt")
for level in (logging.WARNING, logging.ERROR):
    record = {"pathname": torch.__file__, "levelno": level, "msg": f"level {level}"}
    logging.lastResort.handle(logging.makeLogRecord(record))
warnings.warn_explicit("it is old", FutureWarning, torch.__file__, 1)
logging.warning("own words")
raise ValueError("stop")
"""


def test_a_librarys_warnings_are_not_the_scripts_last_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WARNS)
    with pytest.raises(InputError, match="stop") as caught:
        trace(script)
    last = [one.message for one in caught.value.problems if "last lines" in one.message]
    assert last == ["the script's last lines: reading a.txt / level 40 / WARNING:root:own words"]


TRACKS = """
import os, torch
for name, value in {"WANDB_MODE": "disabled", "SWANLAB_MODE": "disabled",
                    "HYDRA_FULL_ERROR": "1"}.items():
    assert os.environ[name] == value
torch.nn.Linear(64, 64).cuda()(torch.ones(8, 64).cuda()).sum().backward()
"""


def test_trackers_ask_for_no_login(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRACKS)
    trace(script, steps=0)


PARSES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=4)
parser.parse_args()
"""


def test_options_of_memfit_behind_a_script_are_put_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(PARSES)
    monkeypatch.chdir(tmp_path)
    assert main(["trace", "train.py", "--bs", "8", "--gpu", "rtx-3060"]) == 2
    assert "try: memfit trace --gpu rtx-3060 train.py --bs 8\n" in capsys.readouterr().err
    assert main(["trace", "train.py", "--batch", "8"]) == 2  # the script's own mistake
    assert "try: " not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("axolotl train a.yml", "org/m --framework trl --method qlora --seq 4096 --batch 2"),
        ("llamafactory-cli train l.yaml", "org/n --framework trl --method full --seq 512"),
        ("swift sft --model o/s --max_length 64", "o/s --framework trl --method lora --seq 64"),
        ("tune run lora_x --config y batch_size=3", "MODEL --framework torchtune --method lora"),
        ("litgpt pretrain broken.yaml", "MODEL --method full"),
    ],
)
def test_a_trainer_that_is_not_installed_says_what_to_ask(
    words: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yml").write_text(
        "base_model: org/m\nadapter: lora\nload_in_4bit: true\nsequence_len: 4096\n"
        "micro_batch_size: 2\nmodel_type: LlamaForCausalLM\n"
    )
    Path("l.yaml").write_text("model_name_or_path: org/n\nfinetuning_type: full\ncutoff_len: 512")
    Path("broken.yaml").write_text("a: [")
    name, *arguments = words.split()
    found = launchers.unknown_command(name, arguments)
    assert f"ask `memfit estimate {asked}" in found.hint
    assert "is not installed here" in found.message
