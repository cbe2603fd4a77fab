"""Programs of a user, run unmodified as if there were a GPU: their answers are those of the same
job told to `estimate --by trace`."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.api.verbs import trace
from memfit.estimate import Estimate

SCRIPTS = Path(__file__).parent / "scripts"
GPU = "a100-sxm-80gb"
TOLERANCE = 0.005
BASE: dict[str, Any] = {
    "batch": 2,
    "seq": 256,
    "precision": "bf16",
    "optimizer": "adamw",
    "framework": "transformers",
    "checkpointing": "none",
    "packing": True,
}
ADAPTERS: dict[str, Any] = {
    **BASE,
    "method": "lora",
    "precision": "bf16-autocast",
    "targets": "q_proj,v_proj",
    "load": "device_map",
}
PREPARED: dict[str, Any] = {"prepare_kbit": True, "checkpointing": "full"}

# The words that start a script, and the same job in memfit's.
JOBS: dict[str, dict[str, Any]] = {
    "plain.py": {**BASE, "clip": 1.0},
    "plain.py --batch 5": {**BASE, "clip": 1.0, "batch": 5},
    "accelerated.py": {**BASE, "clip": 1.0, "precision": "autocast-bf16"},
    "adapters.py": {**BASE, "method": "lora", "rank": 8},
    "checkpointed.py": {**BASE, "batch": 4, "optimizer": "adamw_fused", "checkpointing": "full"},
    "scaler.py": {**BASE, "clip": 1.0, "precision": "autocast-fp16", "accumulate": 2},
    "trainer.py": {**BASE, "clip": 1.0, "precision": "autocast-bf16", "optimizer": "adamw_fused"},
    "evaluated.py": {
        **BASE,
        "clip": 1.0,
        "precision": "fp32",
        "optimizer": "adamw_fused",
        "accumulate": 2,
        "checkpointing": "full",
        "evaluate": True,
        "eval_batch": 4,
    },
    "compiled.py": {**BASE, "clip": 1.0},
    "mapped.py MODEL none": ADAPTERS,
    "mapped.py MODEL nf4": {
        **ADAPTERS,
        **PREPARED,
        "method": "qlora",
        "quant": "nf4",
        "quant_compute": "bfloat16",
    },
    "mapped.py MODEL int8": {**ADAPTERS, **PREPARED, "quant": "int8"},
    "generates.py": {
        "task": "inference",
        "framework": "transformers",
        "packing": True,
        "precision": "bf16",
        "batch": 4,
        "seq": 128,
        "new_tokens": 16,
    },
}
TO_THE_END = ("evaluated.py", "generates.py")
QUICK = ("plain.py", "mapped.py MODEL nf4")


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    known: dict[str, Any] = runpy.run_path(str(SCRIPTS / "model.py"))["CONFIG"]
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **known,
    }


def run(words: str, model: Path, **given: Any) -> Estimate:
    name, *arguments = words.replace("MODEL", str(model)).split()
    return trace(SCRIPTS / name, *arguments, gpu=GPU, **given)


def cases() -> list[Any]:
    return [
        pytest.param(words, id=words, marks=[] if words in QUICK else [pytest.mark.slow])
        for words in JOBS
    ]


@pytest.mark.parametrize("words", cases())
def test_a_script_is_the_job_that_it_does(
    words: str, config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = run(words, tmp_path, steps=0 if words in TO_THE_END else 3)
    wanted = memfit.estimate(config, gpu=GPU, by="trace", **JOBS[words])
    assert found.memory.allocated == pytest.approx(wanted.memory.allocated, rel=TOLERANCE)
    assert found.memory.reserved == pytest.approx(wanted.memory.reserved, rel=TOLERANCE)
    assert (found.memory.at is None) == (wanted.memory.at is None)
    assert found.memory.at is not None
    assert wanted.memory.at is not None
    assert found.memory.at.phase == wanted.memory.at.phase
    for part in {*found.memory.parts, *wanted.memory.parts}:
        assert found.memory.parts.get(part, 0) == pytest.approx(
            wanted.memory.parts.get(part, 0), abs=TOLERANCE * wanted.memory.allocated
        )
    if wanted.job.training:
        assert found.parameters.trainable == wanted.parameters.trainable


def test_the_gpu_answers_what_programs_ask(tmp_path: Path) -> None:
    """The script itself asserts what it is told; were one of them wrong, it would not reach its
    steps."""
    found = run("queries.py", tmp_path)
    assert found.script is not None
    assert found.script.steps == 3
    assert found.problems == ()


def test_a_long_trace_shows_signs_of_life(tmp_path: Path) -> None:
    script, seen = tmp_path / "train.py", []
    script.write_text(
        "import time\ntime.sleep(1)\nimport torch\nx = torch.ones(8, device='cuda', "
        "requires_grad=True)\nx.sum().backward()\n"
    )
    trace(script, steps=1, progress=lambda *words: seen.append(words))
    assert seen
    assert seen[0][:3] == ("load", 0, "")
    assert [one[3] for one in seen] == sorted(one[3] for one in seen)


@pytest.mark.slow
def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    found = run("compiled.py", tmp_path)
    notes = {
        one.message.partition(":")[0]: one.where for one in found.problems if one.level == "note"
    }
    assert "compiled.py:8" in notes["`torch.compile` is ignored"]


def test_triton_kernels_are_left_out(tmp_path: Path) -> None:
    """The script asserts what its memory is; with Triton installed or not."""
    found = run("by_triton.py", tmp_path, steps=3)
    (told,) = [one for one in found.problems if "Triton" in one.message]
    assert "double[" in told.where
    assert found.script is not None
    assert found.script.steps == 3


@pytest.mark.slow
def test_trl_runs_its_own_head(tmp_path: Path) -> None:
    """Logits of 32768 words for up to 4096 tokens at a time, made twice and never whole (trl 1.16
    kernels/chunked_logprob.py): the 512 tokens but for the first of each sequence. On a CPU the
    same code goes other ways."""
    trl = pytest.importorskip("trl", reason="the program needs trl and datasets")
    pytest.importorskip("datasets", reason="the program needs trl and datasets")
    if tuple(map(int, trl.__version__.split(".")[:2])) < (1, 15):
        pytest.skip("older versions of trl have no such head")
    found = run("sft.py", tmp_path)
    assert found.memory.at is not None
    assert found.memory.at.phase == "backward"
    assert 510 * 32768 * 2 in [group.size for group in found.memory.groups]
    assert not [group for group in found.memory.groups if group.part == "logits"]


@pytest.mark.slow
def test_ligers_own_code_is_what_the_formulas_say(config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel", reason="the program needs liger-kernel")
    found = run("liger.py", tmp_path)
    wanted = memfit.estimate(config, gpu=GPU, **BASE, clip=1.0, liger=True, loss="liger")
    assert found.memory.allocated == pytest.approx(wanted.memory.allocated, rel=TOLERANCE)
    assert found.memory.reserved == pytest.approx(wanted.memory.reserved, rel=TOLERANCE)
    ours = {(one.phase, one.step): one.allocated for one in found.memory.timeline}
    for one in wanted.memory.timeline:
        assert ours[one.phase, one.step] == pytest.approx(one.allocated, rel=TOLERANCE)
