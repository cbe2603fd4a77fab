"""SGLang's pools: tokens of full and sliding layers, states of linear attention.

Source: `srt/model_executor/model_runner_kv_cache_mixin.py` (0.5.9), `srt/mem_cache/memory_pool.py`.
"""

from __future__ import annotations

from memfit.lazy_dataclass import dataclass
from memfit.model.modules import Attention, Latent
from memfit.serving.drafts import attends
from memfit.serving.parts import Picking, Recurrent, pair
from memfit.serving.separate_drafts import token_values
from memfit.serving.sglang.setup import Setup
from memfit.serving.weights import kv_heads, layers_of

# MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO (0.5.9 model_executor/model_runner_kv_cache_mixin.py,
# 0.5.18 mem_cache/kv_cache_configurator.py)
STATES_A_REQUEST = 3
INDEX_BLOCK = 128  # values per scale of the sparse indexer and its cache (NSATokenToKVPool)


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Tokens of each pool and their bytes."""

    tokens: int
    full: int
    sliding_tokens: int = 0
    sliding: int = 0
    states: int = 0
    guessed: int = 0  # states of guessed tokens
    draft: int = 0  # cache of the draft layers

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return self.full + self.sliding


def number_bytes(setup: Setup, values: int) -> int:
    """Bytes of so many cached values; fp4 keeps a byte of scale for 16 of them."""
    if setup.kv_dtype.startswith("fp8"):
        return values
    if setup.kv_dtype.startswith("fp4"):
        return values // 2 + values // 16
    return values * setup.width


def cells(setup: Setup, *, stored: bool = False) -> tuple[int, int]:
    """Bytes of one token over all full layers, and over all sliding ones: as the number of tokens
    is reckoned, or as they are `stored`."""
    full = sliding = 0
    for layer in layers_of(setup.rank, setup.model):
        for block in layer.blocks:
            mixer = block.mixer
            if isinstance(mixer, Attention):
                values = kv_heads(mixer.kv_heads, setup.rank.heads) * pair(mixer)
                if mixer.window and setup.windows:
                    sliding += number_bytes(setup, values)
                else:
                    full += number_bytes(setup, values)
                if isinstance(mixer, Picking):  # pool_configurator.py: in the model's numbers
                    full += mixer.index * setup.width
            elif isinstance(mixer, Latent):
                full += latent_bytes(setup, mixer, stored)
    return full, sliding


def latent_bytes(setup: Setup, mixer: Latent, stored: bool) -> int:
    """A token of latent attention: values, and the keys of the sparse indexer. With an indexer
    Blackwell caches in fp8 unless told otherwise, and what is stored in fp8 has scales and leaves
    the rotated values in 16 bits, which the number of tokens does not know: 656 bytes for 576
    (calculate_mla_kv_cache_dim and get_cell_size_per_token, 0.5.9)."""
    index = indexer(setup)
    eighth = index and setup.kv_dtype == "auto" and (setup.rank.sm or (0, 0)) >= (10, 0)
    values = mixer.cached if eighth else number_bytes(setup, mixer.cached)
    if stored and index and (eighth or setup.kv_dtype.startswith("fp8")):
        values += mixer.latent // INDEX_BLOCK * 4 + mixer.rope
    return values + index


def state_bytes(setup: Setup) -> int:
    """The state of one request over all layers of linear attention: the convolution in the model's
    numbers, the state itself in fp32 (`mamba_ssm_dtype`)."""
    wide = 2 if "16" in setup.state_dtype else 4
    return sum(
        (block.mixer.conv * setup.width + block.mixer.state * wide) // setup.rank.heads
        for layer in layers_of(setup.rank, setup.model)
        for block in layer.blocks
        if isinstance(block.mixer, Recurrent)
    )


def states(setup: Setup, rest: int) -> tuple[int, int]:
    """Bytes of all states, a share of the rest (handle_max_mamba_cache), and of the states that
    each guessed token of a running request keeps. Before 0.5.15 the latter come first."""
    each = state_bytes(setup)
    if not each or rest <= 0:
        return 0, 0
    guessed = setup.guesses * setup.running * each
    per = states_a_request(setup)
    if not setup.joint_states:
        rest -= guessed
    budget = int(rest * setup.state_ratio / (1 + setup.state_ratio))
    split = 1 + setup.guesses / per if setup.joint_states else 1.0
    count = setup.states or max(0, int(budget // (each * split)))
    if not setup.states and not setup.radix and setup.running:
        count = setup.running
    if setup.joint_states:
        guessed = setup.guesses * min(setup.running, count // per) * each
    return count * each, guessed


def states_a_request(setup: Setup) -> int:
    """States that a running request keeps, with those of its cached prefix."""
    return STATES_A_REQUEST if setup.radix else 1


def stateless(setup: Setup, made: Pools) -> bool:
    """Whether the states are too few for one request."""
    return made.states < state_bytes(setup) * states_a_request(setup)


def indexer(setup: Setup) -> int:
    """Keys of DeepSeek's sparse attention: a byte a value and a scale for each 128 of them."""
    size = setup.subject.config.get("index_head_dim")
    return 0 if not isinstance(size, int) else size + size // INDEX_BLOCK * 4


def pools(setup: Setup, rest: int) -> Pools:
    """What `rest` bytes hold."""
    full, sliding = cells(setup)
    kept_states, guessed = states(setup, rest)
    rest -= kept_states + guessed
    if not full + sliding or rest <= 0:
        return Pools(tokens=0, full=0, states=kept_states, guessed=guessed)
    draft = draft_cell(setup)
    tokens = rest // (full + sliding + (draft if setup.draft_in_pool else 0))
    if setup.tokens:
        tokens = min(tokens, setup.tokens)
    tokens -= tokens % setup.page
    beside = {"states": kept_states, "guessed": guessed, "draft": tokens * draft}
    if not sliding or not full:
        return Pools(tokens=tokens, full=tokens * sum(cells(setup, stored=True)), **beside)
    everything = tokens * (full + sliding)
    kept = int(everything / (full + setup.swa_ratio * sliding))
    slides = int(kept * setup.swa_ratio)
    kept, slides = kept - kept % setup.page, slides - slides % setup.page
    return Pools(
        tokens=kept,
        full=kept * full,
        sliding_tokens=slides,
        sliding=slides * sliding,
        **beside,
    )


def draft_cell(setup: Setup) -> int:
    """Bytes of one token in the cache of the draft layers. A separate draft model has its own
    heads; the model's own draft layers are as large as its others (pool_configurator.py,
    0.5.15)."""
    if setup.separate is not None:
        return number_bytes(setup, token_values(setup.separate, setup.rank.heads))
    cached = sum(
        isinstance(block.mixer, (Attention, Latent))
        for layer in layers_of(setup.rank, setup.model)
        for block in layer.blocks
    )
    return sum(cells(setup)) * sum(map(attends, setup.draft)) // cached if cached else 0
