"""Scripts that import flash-attn themselves, on a machine that cannot build it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memfit.api.verbs import trace
from memfit.trace import flash_attn

SCRIPT = """
import torch
from flash_attn.flash_attn_interface import flash_attn_func
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.ops.triton.layer_norm import layer_norm_fn
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.flash_attn_interface import _flash_attn_varlen_backward
from flash_attn.utils.generation import InferenceParams
import transformers
from transformers.utils import is_flash_attn_2_available

assert not is_flash_attn_2_available()  # the script alone has asked for it
try:
    import flash_attn_3
except ImportError:
    flash_attn_3 = None
B, T, H, D, V = 2, 256, 4, 64, 512

def used():
    return torch.cuda.memory_allocated()

x = torch.randn(B, T, H * D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
weight = torch.ones(H * D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
before = used()
out = layer_norm_fn(x, weight, None, is_rms_norm=True)
assert used() - before == B * T * H * D * 2 + B * T * 4
before = used()
heads = out.view(B, T, H, D)
cos = torch.ones(T, D // 2, device="cuda", dtype=torch.bfloat16)
turned = apply_rotary_emb(heads, cos, cos)
assert used() - before == B * T * H * D * 2 + T * D
attended = flash_attn_func(turned, turned, heads, causal=True)
logits = attended.reshape(B * T, H * D) @ torch.ones(
    H * D, V, device="cuda", dtype=torch.bfloat16, requires_grad=True)
loss = CrossEntropyLoss(inplace_backward=True)(logits, torch.zeros(B * T, device="cuda").long())
assert loss.shape == ()
loss.backward()
assert x.grad.shape == x.shape and weight.grad.dtype == torch.bfloat16
"""


def test_a_script_imports_flash_attention(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found = trace(str(script), gpu="h100", steps=0)
    assert any("its memory is counted" in one.message for one in found.problems)
    script.write_text(
        "try:\n    import flash_attn\nexcept ImportError:\n    flash_attn = None\n"
        "import torch\nassert flash_attn is None\ntorch.ones(4, device='cuda')\n"
    )
    assert trace(str(script), gpu="h100", steps=0).memory.allocated == 512


BOTH = """
from flash_attn.flash_attn_interface import flash_attn_varlen_func
import torch
from transformers import AutoModelForCausalLM

name = "HuggingFaceTB/SmolLM2-135M"
flash = {"attn_implementation": "flash_attention_2", "dtype": torch.bfloat16}
model = AutoModelForCausalLM.from_pretrained(name, **flash).cuda()
ids = torch.randint(0, 1000, (2, 64), device="cuda")
model(input_ids=ids, labels=ids).loss.backward()
"""


def test_a_model_uses_it_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BOTH)
    assert trace(script, gpu="h100", steps=0).memory.allocated > 500_000_000


def test_no_kernels_are_downloaded_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 4.57 does where the package is not installed."""
    asked = []

    class Model:
        _supports_flash_attn = True

        def _check_and_adjust_attn_implementation(self, name: str) -> str:
            asked.append(is_kernels_available())
            return name

        def _flash_attn_2_can_dispatch(self) -> bool:
            return False

    monkeypatch.setitem(globals(), "is_kernels_available", lambda: True)
    recorder = SimpleNamespace(note=lambda *_: None)
    ((_, name, adjust),) = flash_attn.in_scripts(Model, cast(Any, recorder))
    assert name == "_check_and_adjust_attn_implementation"
    assert adjust(Model(), "flash_attention_2") == "flash_attention_2"
    assert asked == [False]
    assert is_kernels_available()


def is_kernels_available() -> bool:
    return False


def test_a_script_may_use_some_of_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src" / "parts").mkdir(parents=True)
    (tmp_path / "src" / "parts" / "sizes.py").write_text("WIDTH = 64\n")
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\nfrom parts.sizes import WIDTH\n"
        "dist.init_process_group('nccl')\nassert dist.get_world_size() == 2\n"
        "torch.nn.Linear(WIDTH, WIDTH).cuda()(torch.ones(8, WIDTH).cuda()).sum().backward()\n"
    )
    launcher = "PYTHONPATH=src: torchrun --nproc_per_node 2"
    found = trace("train.py", gpu="8xh100-sxm", launcher=launcher, steps=0)
    assert found.cluster is not None
    assert found.cluster.gpus == 2
