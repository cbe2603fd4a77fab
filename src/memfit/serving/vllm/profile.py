"""What vLLM measures in its profiling run: the peak of activations over the largest step, and the
sampler on the most requests.

Source: vLLM `v1/worker/gpu_model_runner.py` profile_run and _dummy_sampler_run,
`v1/sample/ops/topk_topp_sampler.py` (0.11.0); torch `aten/src/ATen/native/cuda/Sort.cu`.
"""

from __future__ import annotations

from memfit.model.model import Model
from memfit.model.modules import MLP, Attention, Latent, MoE
from memfit.serving.vllm.experts import activation, experts_room
from memfit.serving.vllm.rules import Rules
from memfit.serving.weights import Rank, kv_heads

SEGMENTS = 128  # from so many rows on torch sorts them by segments (Sort.cu)
PLAIN = Rules()  # experts take all tokens at once
UNITS = 132  # multiprocessors of a GPU that is not known: those of an H100
ROWS_OF_TRITON = 8  # below, logits are sorted all the same (topk_topp_sampler.py)


def triton_rows(rows: int, rules: Rules, rank: Rank) -> int:
    """Rows of logits in fp32 that Triton's kernel for top-k and top-p keeps: one for each of its
    programs, up to a power of two (topk_topp_triton.py, 0.17.0)."""
    if rules.sorted_sampling or rows < ROWS_OF_TRITON:
        return 0
    if rules.flashinfer_sampling and (rank.sm is None or rank.sm >= (8, 0)):
        return 0
    units = rank.sms or UNITS
    return min(1 << (min(units, rows) - 1).bit_length(), units)


def sampler(rows: int, vocab: int, width: int, *, sort: bool = True) -> int:
    """Logits in the model's numbers and in fp32, and what top-k and top-p add.

    Sorting, for a value of the logits: `width` + 4 bytes, the sorted value (4) and its index (8);
    then a sort by segments keeps the indices once more (8) and cub's second buffers (4 + 8), a sort
    of few rows keeps two copies of index and row (16), the sorted keys (4) and the buffers (12).
    The Triton kernel works in place; probabilities (4) and random numbers (4) follow."""
    if not sort and rows >= ROWS_OF_TRITON:
        return rows * vocab * (width + 4 + 4 + 4)
    work = 20 if rows >= SEGMENTS else 32
    return rows * vocab * (width + 4 + 4 + 8 + work)


def second_sampler(rows: int, vocab: int, width: int, rules: Rules) -> int:
    """The same of the second runner, which picks tokens in place (v1/worker/gpu/sample/sampler.py,
    0.22.0 to 0.33.0): its dummy requests want neither top-k nor top-p, until 0.33 they do."""
    if rules.second_samples:
        return sampler(rows, vocab, width, sort=False)
    return rows * vocab * (width + 4 * rules.second_copies)


def step(model: Model, rank: Rank, tokens: int, width: int, rules: Rules, copies: int = 1) -> int:
    """The largest moment of one layer: the residual and the layer's input beside the widest pair
    of neighbours. V0 runs without compilation: the model's loop keeps the last layer's output and
    the feed-forward its own beside both, and what ranks sum is a copy (models/llama.py, 0.7.2)."""
    streams = 2 if rules.engine else 4 + (rank.tensor > 1)
    stream = streams * tokens * model.width * width
    return stream + max(
        (
            layer_peak(mixer, rank, tokens, width, rules, copies, activation(model))
            for mixer in model.mixers
        ),
        default=0,
    )


def layer_peak(
    mixer: object,
    rank: Rank,
    tokens: int,
    width: int,
    rules: Rules = PLAIN,
    copies: int = 1,
    function: str = "silu",
) -> int:
    """Bytes of one mixer's largest moment; `function` is the activation within its experts."""
    if isinstance(mixer, MLP):
        inner = mixer.down.inputs // rank.tensor
        return tokens * width * inner * (3 if mixer.gate is not None or mixer.fused else 2)
    if isinstance(mixer, MoE):
        return experts_room(mixer, rank, tokens, width, rules, copies, function).inside
    if isinstance(mixer, Attention):
        heads = mixer.heads // rank.heads
        pairs = kv_heads(mixer.kv_heads, rank.heads)
        return tokens * width * mixer.head * (2 * heads + 2 * pairs)
    if isinstance(mixer, Latent):
        heads = mixer.heads // rank.heads
        return tokens * width * heads * 2 * (mixer.nope + mixer.rope + mixer.value)
    return 0


def peak(
    model: Model,
    rank: Rank,
    tokens: int,
    requests: int,
    width: int,
    rules: Rules,
    copies: int = 1,
    *,
    second: bool = False,
) -> int:
    """Bytes of `torch_peak_increase`; `copies` of the model share their experts' work. `second`:
    by the second model runner."""
    rows = min(requests, tokens)
    hidden = 2 * tokens * model.width * width
    picked = sampler(rows, model.vocab, width, sort=rules.sorted_sampling)
    picked += 4 * model.vocab * triton_rows(rows, rules, rank)
    if second:
        picked = second_sampler(rows, model.vocab, width, rules)
    kept = workspace(model, rank, tokens, width, rules, copies)
    return kept + max(step(model, rank, tokens, width, rules, copies), hidden + picked)


def workspace(
    model: Model, rank: Rank, tokens: int, width: int, rules: Rules, copies: int = 1
) -> int:
    """Bytes of the experts' workspace, which all layers share and which stays."""
    return max(
        (
            experts_room(mixer, rank, tokens, width, rules, copies, activation(model)).kept
            for mixer in model.mixtures
        ),
        default=0,
    )
