"""How bitsandbytes packs weights on a CPU, whose kernels are Python: merging adapters packs again,
and real steps there judge the trace.

Read from bitsandbytes 0.50 backends/default/ops.py `quantize_4bit`, `quantize_blockwise`,
`int8_vectorwise_quant`; CUDA's kernels take nothing beside their results. Left out: fp4's codes are
put in another order (one tensor of int64 more).
"""

from __future__ import annotations

import torch


def scaled(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values between -1 and 1, and the largest of each block; what is left behind the last full
    block is done apart."""
    flat = weight.reshape(-1).float()
    full = flat.numel() - flat.numel() % block
    blocks = flat[:full].reshape(-1, block)
    largest = blocks.abs().max(dim=-1)[0]
    within = torch.clamp(blocks * (1.0 / largest.clamp(min=1e-38).view(-1, 1)), -1, 1).reshape(-1)
    if full < flat.numel():
        last = flat[full:].abs().max().clamp(min=1e-38)
        largest = torch.cat([largest, last.unsqueeze(0)])
        within = torch.cat([within, torch.clamp(flat[full:] / last, -1, 1)])
    return within, largest


def places(values: torch.Tensor) -> torch.Tensor:
    """`bucketize`: where each value stands among the codes."""
    return torch.empty(values.shape, dtype=torch.int32, device=values.device)


def four_bits(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    within, largest = scaled(weight, block)
    if within.numel() % 2:
        within = torch.nn.functional.pad(within, (0, 1))
    found = places(within)
    codes = found.to(torch.uint8)
    return ((codes[::2] << 4) | codes[1::2]).unsqueeze(1), largest


def eight_bits(values: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    within, largest = scaled(values, block)
    return places(within).to(torch.uint8), largest


def rows(half: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = torch.max(half.abs(), dim=1).values.float()
    return torch.round(half * (127.0 / largest.unsqueeze(-1))).to(torch.int8), largest


__all__ = ["eight_bits", "four_bits", "rows"]
