"""TRL's trainers with `use_vllm=True`, where vLLM is not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from memfit.api.verbs import trace

pytest.importorskip("trl.generation.vllm_generation", exc_type=ImportError)
PUBLIC = Path(__file__).parent / "public"
SHARE = 0.25


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_an_engine_in_the_trainers_process_takes_its_share(tmp_path: Path) -> None:
    text = (PUBLIC / "trl_grpo.py").read_text(encoding="utf-8")
    asked = f"use_vllm=True, vllm_gpu_memory_utilization={SHARE}, bf16=False"
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys\nsys.path.append({str(PUBLIC)!r})\n" + text.replace("bf16=False", asked)
    )
    found = trace(script, gpu="rtx-4090", steps=2)
    assert found.memory.allocated > SHARE * 23 * 2**30
    assert found.memory.allocated < SHARE * 26 * 2**30
    assert any("a block of 25% of the GPU" in one.message for one in found.problems)
