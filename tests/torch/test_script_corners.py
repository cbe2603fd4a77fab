"""Corners of what a script may do with tensors, each checked by the script itself."""

from __future__ import annotations

from pathlib import Path

from memfit.verbs import trace

HEAD = "import copy, torch\n"
MASKS = """
x = torch.randn(1000, 5000)
mask = torch.rand(1000) > 0.5
y = x[mask]
assert y.shape == (int(mask.sum()), 5000) and not y.is_cuda
assert torch.cuda.max_memory_allocated() == 0
"""
NOWHERE = """
half = torch.ones(4, 4, device="cuda").to("meta", torch.float16)
assert half.dtype == torch.float16 and half.device.type == "meta"
"""
COPIES = """
class Wrapper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(8, 8)
        self.own = torch.ones(3, requires_grad=True)
        self.own.tag, self.own.grad = [1], torch.full((3,), 2.0)


wrapper = Wrapper()
copied = copy.deepcopy(wrapper)
assert copied.own.grad.sum() == 6 and copied.own.tag == [1]
assert copied.own.tag is not wrapper.own.tag
copied.cuda()
assert copied.lstm.weight_hh_l0.is_cuda
pair = copy.deepcopy([torch.arange(3)] * 2)
assert pair[0] is pair[1] and pair[0].tolist() == [0, 1, 2]
there = torch.ones(3, device="cuda", requires_grad=True)
there.grad, there.tag = torch.ones(3, device="cuda"), [1]
again = copy.deepcopy(there)
assert again.tag == [1] and again.is_cuda and again.grad.is_cuda and again.grad is not there.grad
"""
SCALARS = """
assert (torch.ones(3, device="cuda") + torch.ones(())).is_cuda
try:
    torch.ones(3) + torch.ones((), device="cuda")
except RuntimeError as bad:
    assert "at least two devices" in str(bad)
else:
    raise SystemExit("a number on the GPU was added to a tensor on the CPU")
"""
TYPES = """
assert torch.ones(3, dtype=torch.complex64, device="cuda").type() == "torch.cuda.ComplexFloatTensor"
torch.set_default_tensor_type("torch.cuda.FloatTensor")
assert torch.ones(2).is_cuda
torch.set_default_tensor_type("torch.FloatTensor")
assert not torch.ones(2).is_cuda
"""


def test_corners(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HEAD + MASKS + NOWHERE + COPIES + SCALARS + TYPES)
    trace(script, steps=0)


DISTRIBUTED = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2,))
spread = distribute_tensor(torch.ones(1, 4, device="cuda"), mesh, [Shard(1)])
spread.squeeze_(0)
assert spread._spec.shape == (spread * 2).shape == (4,), (spread._spec, (spread * 2).shape)
"""


def test_distributed_tensors_change_their_shape_in_place(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DISTRIBUTED)
    trace(script, ranks=2, steps=0)
