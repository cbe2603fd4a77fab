"""CPU memory of a job: the copy of the weights while they load, and paged optimizer states."""

from __future__ import annotations

from collections.abc import Callable

from memfit.formats import FORMATS
from memfit.lazy_dataclass import dataclass
from memfit.lower.optimize import SMALLEST_PAGED
from memfit.optimizers import OPTIMIZERS
from memfit.program import Program
from memfit.strategy import ZeRO
from memfit.units import round_up

PAGED = {"int8_paged": 1, "fp32_paged": 4}  # bytes a value of the states that are managed memory


@dataclass(frozen=True, kw_only=True)
class Host:
    """Bytes of host memory beside the process itself, at the worst moment, and which that is;
    `node`: what all ranks of a node keep there together while they run, if each keeps as much."""

    size: int
    why: str
    node: int = 0


def host(program: Program, total: int, parked: int = 0, here: int = 1) -> Host:
    """Without a device_map, from_pretrained fills the model on the CPU and `.to` copies it over;
    with one, tensors pass the host one at a time, out of a memory-mapped file (transformers 5.23
    modeling_utils.py, core_model_loading.py). `parked`: activations that wait there; `here`: ranks
    of a node."""
    width, states = FORMATS[program.weights].block_bytes, paged(program)
    if program.on_cpu:
        return Host(size=program.on_cpu, why="weights that stay in CPU memory")
    if program.job.mapped or program.strategy.split is not None:
        largest = max((weight.count for weight in program.model.weights()), default=0)
        loading, why = largest * width, "the largest tensor while it is copied to the GPU"
    else:
        loading, why = (
            total * width,
            "a copy of the weights while they load without a device_map",
        )
    offloaded = offload(program)
    pinned = parked + offloaded
    if pinned > max(states, loading):
        whose = "offloaded activations" if parked else ""
        what = " and ".join(
            filter(None, (whose, "this rank's offloaded tensors" if offloaded else ""))
        )
        return Host(size=pinned, why=f"{what}, pinned", node=pinned * here)
    if states > loading:
        return Host(
            size=states,
            why="paged optimizer states that do not fit on the GPU",
            node=pinned * here,
        )
    return Host(size=loading, why=why, node=pinned * here)


def paged(program: Program) -> int:
    """States in managed memory, which torch's allocator never sees: the driver moves their pages
    between GPU and host (bitsandbytes 0.50 functional.py get_paged, optim/optimizer.py
    get_state_buffer; embeddings keep fp32)."""
    states = [PAGED[state] for state in OPTIMIZERS[program.job.optimizer].states if state in PAGED]
    if not states or not program.job.training:
        return 0
    return sum(
        times * count * (4 if wide else width)
        for count, wide, times in program.trained_tensors()
        if count >= SMALLEST_PAGED
        for width in states
    )


def offload(program: Program) -> int:
    """What one rank keeps on the host all the time. Pinned blocks are as large as the next power of
    two (torch 2.13 aten/src/ATen/core/CachingHostAllocator.h)."""
    zero, fsdp = program.strategy.zero, program.strategy.fsdp
    if not program.job.training:
        return 0
    if zero is not None and {zero.offload_optimizer, zero.offload_param} != {"none"}:
        return of_zero(program, zero)
    gemini = program.strategy.gemini
    if (
        gemini is not None and gemini.placement == "cpu"
    ):  # fp32 copies and two states, and 16 bits between the passes; not pinned
        return 14 * program.model.parameters // gemini.size
    return of_fsdp(program, program.strategy.shards) if fsdp is not None and fsdp.offload else 0


# bytes that what is read and written is a multiple of (deepspeed 0.19.8
# runtime/swap_tensor/utils.py)
AIO = 1024


def pinned(size: int) -> int:
    return 1 << (size - 1).bit_length() if size > 0 else 0


def of_zero(program: Program, zero: ZeRO, pinned: Callable[[int], int] = pinned) -> int:
    """Stages 1 and 2: fp32 copies and gradients, a 16-bit copy on its way back, the largest
    parameter's gradient, with accumulation the sum of 16-bit gradients (deepspeed 0.19.8
    runtime/zero/stage_1_and_2.py). Stage 3: the same without those ways, and 16-bit gradients in
    any case; weights where they are offloaded (runtime/zero/stage3.py). With states on NVMe 16-bit
    gradients and some buffers of the largest group that is stepped at once, locked and not rounded
    up; with weights there a flat buffer of those that may stay, and some buffers
    (runtime/swap_tensor/ utils.py SwapBufferManager, partitioned_param_swapper.py). Left out:
    weights and groups of less than 1 MiB, which stay on the host."""
    width = FORMATS[program.weights].block_bytes
    trained = [(count, times) for count, _, times in program.trained_tensors()]
    part = sum(count * times for count, times in trained) // zero.size
    size = 0
    if zero.offload_optimizer == "cpu":
        size += pinned(4 * part) + part * kept_states(program, 4)
        if zero.stage == 3:
            size += 4 * part + pinned(width * part)
        else:
            size += (
                pinned(4 * part)
                + pinned(width * part)
                + pinned(width * max(count for count, _ in trained))
            )
            size += width * part if program.job.accumulate > 1 else 0
    if zero.offload_optimizer == "nvme":
        size += pinned(width * part) + zero.optimizer_buffers * 4 * round_up(
            min(part, zero.sub_group), AIO // 4
        )
    whole = program.model.parameters // zero.size
    if zero.offload_param == "cpu":
        size += pinned(width * part) + width * (whole - part)
    if zero.offload_param == "nvme":
        size += pinned(width * min(part, zero.max_in_cpu)) + zero.param_buffers * width * round_up(
            zero.param_buffer, AIO // width
        )
    return size


def of_fsdp(program: Program, shards: int) -> int:
    """FSDP2: each parameter's shard is pinned, and so is its gradient; states are not (torch 2.13
    distributed/fsdp/_fully_shard/_fsdp_param.py)."""
    width = FORMATS[program.weights].block_bytes
    weights = sum(
        pinned(width * -(-weight.count // shards))
        for weight in program.model.weights()
        if weight.role != "buffer"
    )
    trained = [(-(-count // shards), times) for count, _, times in program.trained_tensors()]
    return weights + sum(
        times * (pinned(width * part) + part * kept_states(program, width))
        for part, times in trained
    )


def kept_states(program: Program, width: int) -> int:
    """Bytes of states that an optimizer keeps for a value."""
    return sum(
        {"like": width, "fp32": 4}.get(state, 0)
        for state in OPTIMIZERS[program.job.optimizer].states
    )
