"""What vLLM's kernels for experts need beside the model's own activations.

From 0.14 on experts run in workspaces that all layers share and that stay once they are made, so
they lie beside the sampler's tensors, too. Sources: vLLM `model_executor/layers/fused_moe/`
modular_kernel.py (_allocate_buffers) and the `workspace_shapes` of each kernel,
`v1/worker/workspace.py`, and `oracle/`, which picks the kernel (0.14.1 to 0.33.0); FlashInfer
0.6.8 `csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh` getWorkspaceDeviceBufferSizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from memfit.lazy_dataclass import dataclass
from memfit.model.model import Model
from memfit.model.modules import MoE
from memfit.serving.stored import FLASHINFER, MARLIN, TRITON, Scheme, ceil, padded
from memfit.serving.vllm.rules import Rules
from memfit.serving.weights import Rank

DIRECT, CUTLASS = "direct", "cutlass"
# `--moe-backend`, as far as it changes the memory (config/kernel.py MoEBackend, 0.20.2)
NAMED = {
    "triton": TRITON,
    "marlin": MARLIN,
    "deep_gemm": TRITON,
    "cutlass": CUTLASS,
    "flashinfer_cutlass": FLASHINFER,
    "flashinfer_trtllm": FLASHINFER,
}
# _custom_ops.py scaled_fp4_experts_quant: rows of scales for each chosen expert, whatever the step
SCALE_ROWS = 163_840  # VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE
SCALED = 16  # values that share a scale in NVFP4
TILE = 128  # rows of an expert's scales are padded to it
MAPS = 12  # bytes of FlashInfer's maps for each row


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes of one rank's experts: `kept` stays for the rest of the run, `inside` is needed at
    their largest moment."""

    kept: int = 0
    inside: int = 0


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The work of one step: tokens, rows of the chosen experts among those taken at once, and
    numbers of a row outside and inside of an expert. `gates`: matrices that lead inside."""

    tokens: int
    rows: int
    outer: int
    inner: int
    gates: int
    width: int


def gated(mixer: MoE) -> bool:
    return not (mixer.each and mixer.each[0].gate is None)


def activation(model: Model) -> str:
    """The function within an expert, as the config names it."""
    text = model.config.get("text_config")
    inner = text if isinstance(text, Mapping) else model.config
    return str(inner.get("hidden_activation") or inner.get("hidden_act") or "silu")


def kernel(mixer: MoE, rank: Rank, rules: Rules, function: str = "silu") -> str:
    """Whose kernel runs the experts. What the workspaces of Triton's, Marlin's, DeepGEMM's and
    CUTLASS' fp8 kernels take is alike."""
    scheme = rank.scheme.of(f"{mixer.name}.up")
    if scheme.kind not in rules.expert_workspaces:
        return DIRECT
    if rules.expert_kernel in NAMED:
        return NAMED[rules.expert_kernel]
    sm = rank.sm or (0, 0)
    if scheme.kind == "fp4" and sm >= (10, 0):
        flash = rules.flashinfer_experts and not function.startswith("gelu")
        return FLASHINFER if flash else CUTLASS
    if scheme.kind == "mxfp4":
        return MARLIN if scheme.tiles in (MARLIN, "") else DIRECT
    plain = scheme.kind == "plain" and rules.flashinfer_plain and sm >= (9, 0)
    if plain and not function.startswith("gelu"):
        return FLASHINFER
    # fp8 in blocks on 10.x: FlashInfer's TensorRT-LLM kernels, whose own buffers are taken to be
    # those of its CUTLASS kernels
    blocks = scheme.kind == "fp8" and scheme.group > 0
    if blocks and rules.flashinfer_experts and (10, 0) <= sm < (11, 0):
        return FLASHINFER
    return TRITON


def experts_room(
    mixer: MoE,
    rank: Rank,
    tokens: int,
    width: int,
    rules: Rules,
    copies: int = 1,
    function: str = "silu",
) -> Room:
    """Bytes of the experts in a step. Copies of the model send their tokens to each other's
    experts, so that each has those of all (device_communicators/all2all.py NaiveAll2AllManager,
    0.10.1)."""
    scheme = rank.scheme.of(f"{mixer.name}.up")
    inner = mixer.width if rank.experts > 1 else mixer.width // rank.tensor
    outer = mixer.inputs
    if scheme.kind == "mxfp4":
        inner, outer = padded(inner, 128), padded(outer, 256)
    gathered = tokens * copies
    at_once = min(gathered, rules.expert_chunk or gathered)
    step = Rows(
        tokens=at_once,
        rows=at_once * mixer.active,
        outer=outer,
        inner=inner,
        gates=2 if gated(mixer) else 1,
        width=width,
    )
    outputs = gathered * mixer.inputs * width
    inputs = outputs if copies > 1 else 0
    name = kernel(mixer, rank, rules, function)
    if name == DIRECT:
        return Room(inside=direct(step, mixer) + inputs + outputs)
    if name == FLASHINFER:
        room = flashinfer(step, scheme, ceil(mixer.experts, rank.experts))
    elif name == CUTLASS and scheme.kind == "fp4":
        room = cutlass_fp4(step, mixer.active)
    else:
        room = workspaces(step)
    apart = outputs if at_once < gathered else 0  # of several pieces the output lies by itself
    return Room(kept=room.kept + apart, inside=room.inside + inputs + outputs)


def direct(step: Rows, mixer: MoE) -> int:
    """fused_moe.py fused_experts_impl and fused_marlin_moe: gate and up of every chosen expert,
    their product, and the outputs, which share memory with the first."""
    return step.rows * step.width * (max(2 * step.inner, mixer.inputs) + step.inner)


def workspaces(step: Rows) -> Room:
    """TritonExperts, MarlinExperts, CutlassExpertsFp8: two workspaces, each as wide as the larger
    of what it has in turn."""
    first = max(step.inner, step.outer)
    second = max(step.gates * step.inner, step.outer)
    return Room(kept=step.rows * step.width * (first + second))


def cutlass_fp4(step: Rows, active: int) -> Room:
    """run_cutlass_moe_fp4: inputs sorted by expert stay; then packed values with their scales, or
    the outputs in the order of tokens and their product with the weights."""
    up = step.gates * step.inner
    kept = step.rows * step.width * (max(2 * up, step.outer) + up)
    copies = step.rows * step.outer * step.width
    packed = step.rows * step.outer // 2 + scale_bytes(active, step.outer)
    return Room(kept=kept, inside=copies + max(packed, 2 * copies))


def scale_bytes(active: int, width: int) -> int:
    """Scales of CUTLASS' NVFP4 kernels for values of this width."""
    return SCALE_ROWS * active * 4 * ceil(ceil(width, SCALED), 4)


def flashinfer(step: Rows, scheme: Scheme, experts: int) -> Room:
    """FlashInferExperts: a workspace of the step's inputs stays; FlashInfer's own is made anew in
    each layer: inputs and outputs of both products overlap, beside packed inputs and scales."""
    outer = step.rows * step.outer * step.width
    up = step.rows * 2 * step.inner * step.width if step.gates > 1 else 0
    maps = step.rows * MAPS + experts * step.tokens * 4
    packed = 0
    if scheme.kind == "fp4":
        up = up or step.rows * step.inner * step.width
        widest = max(step.outer, step.inner)
        packed = (step.rows + experts * (TILE - 1)) * ceil(widest, SCALED)
        packed += step.tokens * (step.outer // 2 + ceil(step.outer, SCALED))
    return Room(
        kept=step.tokens * step.outer * step.width, inside=outer + max(up, outer) + maps + packed
    )
