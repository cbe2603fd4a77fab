"""Scripts that people train with, written here in small with the same calls in the same order:
they come through, and where the CPU can really run one, its live bytes are the trace's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.sampling import WHOLE
from tests.torch.watch import told
from tools.scripts import scripts, started

from memfit.trace.launch import launch

FOLDER = Path(__file__).parent / "public"
WITHIN = 0.02  # of the real peak of live bytes
# Those that really run on the CPU, too, with the words that make both compute alike: autocast's
# lists and the masks of dropout differ.
TRUE = {
    "nanogpt.py": "",
    "nanochat.py": "--float32",
    "mingpt_ddp.py": "--no-amp --dropout 0",
    "imagenet.py": "",
    "run_clm.py": "--tiny --do_train --do_eval --block_size 128 --max_steps 3 "
    "--per_device_train_batch_size 16 --per_device_eval_batch_size 4 --output_dir out "
    "--report_to none --eval_accumulation_steps 1",
    "run_glue.py": "--tiny --do_train --do_eval --max_steps 3 --per_device_train_batch_size 16 "
    "--output_dir out --report_to none",
    "trl_reward.py": "",
    "timm_train.py": "",
    "diffusers_lora.py": "",
    "sentence_pairs.py": "",
}
MODULES = ("blocks.py", "tiny.py")
SCRIPTS = sorted(one.name for one in FOLDER.glob("*.py") if one.name not in MODULES)
# Packages that the tests' environment lacks: with them (`pip install --no-deps litgpt==0.5.13
# lightning==2.6.6 lightning-utilities torchmetrics pytorch-lightning diffusers==0.42.1 pillow`)
# these come through, too.
NEEDS = {
    "lightning_fit.py": "lightning",
    "litgpt_lora.py": "litgpt",
    "litgpt_pretrain.py": "litgpt",
    "stable_diffusion_lora.py": "diffusers",
}
# What is traced at every commit; all with MEMFIT_WHOLE.
SAMPLE = ("fsdp2.py", "mingpt_ddp.py", "nanochat.py")
TRUE_SAMPLE = ("imagenet.py", "nanogpt.py")


def request(name: str, words: str | None = None, **given: Any) -> dict[str, Any]:
    launcher, arguments = started(FOLDER / name)
    return {
        "kind": "script",
        "script": str(FOLDER / name),
        "arguments": arguments if words is None else words.split(),
        "steps": 3,
        "alloc_conf": "",
        "module": "",
        "rank": 0,
        "world": 1,
        "gpus": 1,
        "launcher": launcher,
        "tokens": 128,
        "image": 64,
        "truth": False,
        "isolation": "auto",
        "network": False,
        "keep_env": False,
        "gpu": {},
        **given,
    }


def real(name: str, folder: Path) -> int:
    launcher, _ = started(FOLDER / name)
    program = ["-m", "tests.torch.real_script", str(FOLDER / name), *TRUE[name].split()]
    starts = ["-m", "torch.distributed.run", *launcher.split()[1:]] if launcher else []
    words = [sys.executable, *starts, *program]
    env = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (said,) = {line for line in done.stdout.splitlines() if line.startswith("peak of rank 0")}
    return int(said.split()[-1])


def outside_the_optimizer(peaks: dict[str, int]) -> int:
    return max(size for name, size in peaks.items() if not name.startswith("optimizer"))


def test_what_make_scripts_finds() -> None:
    """Programs that train, whether in a function or not, and no modules."""
    assert [one.name for one in scripts(FOLDER)] == SCRIPTS


@pytest.mark.parametrize("name", SCRIPTS if WHOLE else SAMPLE)
def test_it_comes_through(name: str) -> None:
    """With two optimizer steps at least, on as many ranks as its launcher is told to start."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    found = launch(request(name), seconds=300)
    assert int(found.facts["steps"]) >= 2
    launcher, _ = started(FOLDER / name)
    number = re.search(r"(?:nproc_per_node|num_processes|num_gpus)[ =](\d+)", launcher)
    assert int(found.facts["world"]) == (int(number[1]) if number else 1)


@pytest.mark.parametrize("name", TRUE if WHOLE else TRUE_SAMPLE)
def test_the_cpu_really_takes_as_much(name: str, tmp_path: Path) -> None:
    found = launch(request(name, TRUE[name], steps=0), seconds=120)
    assert int(found.facts["steps"]) >= 2
    said = outside_the_optimizer(told(found.tape))
    assert said == pytest.approx(real(name, tmp_path), rel=WITHIN)
