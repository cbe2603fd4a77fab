"""A Triton kernel of its own: a launch changes nothing in memory, the first one of an autotuned
kernel passes through a benchmark."""

import torch
import triton
import triton.language as tl

MIB = 2**20


@triton.jit
def double(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    tl.store(y_ptr + offsets, 2 * tl.load(x_ptr + offsets, mask=mask), mask=mask)


tuned = triton.autotune(
    configs=[triton.Config({"BLOCK": size}, num_warps=4) for size in (512, 1024)], key=["count"]
)(double)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        double[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
        return y

    @staticmethod
    def backward(ctx, gradient):
        out = torch.empty_like(gradient)
        tuned[lambda meta: (triton.cdiv(gradient.numel(), meta["BLOCK"]),)](
            gradient.contiguous(), out, gradient.numel()
        )
        return out


x = torch.ones(MIB, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([x], lr=0.1)
before = torch.cuda.memory_allocated()
y = Doubled.apply(x)
assert torch.cuda.memory_allocated() - before == 4 * MIB  # y and nothing else
whole = torch.empty(8, dtype=torch.int64, device="cuda")
double[(1,)](whole, whole, 8, BLOCK=8)
assert whole.tolist() == [0] * 8
for step, benchmark in enumerate((256, 0, 0)):
    torch.cuda.reset_peak_memory_stats()
    y.sum().backward()
    peak = torch.cuda.max_memory_allocated()
    assert (peak - before > 256 * MIB) == (benchmark > 0), (step, peak)
    optimizer.step()
    optimizer.zero_grad()
    y = Doubled.apply(x)
