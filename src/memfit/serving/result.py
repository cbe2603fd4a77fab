"""What a serving engine answers: the memory of the fullest GPU in pools, the figures that its log
prints, and whether it would start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from memfit.errors import Problem
from memfit.lazy_dataclass import dataclass
from memfit.presentation import Presented


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Memory for one purpose. `where` names the device (`gpu`, `gpu1`, `cpu`); `how` shows the
    working with its numbers; `cite` is the source of the rule. A pool that is not `counted` is in
    use only for a while and is no part of the total."""

    name: str
    bytes: int
    where: str = "gpu"
    how: str = ""
    cite: str = ""
    counted: bool = True


@dataclass(frozen=True, kw_only=True)
class Offload:
    """How many of the layers the GPUs compute, and of how many the experts stay on the CPU."""

    layers: int
    on_gpu: int
    cpu_experts: int = 0


@dataclass(frozen=True, kw_only=True)
class PromptSpeed:
    """Tokens per second of one prompt of `tokens`, with the likely range, and the seconds that it
    takes; and those of a prompt of `longest` tokens, the whole context."""

    tokens: int
    tokens_per_second: float
    low: float
    high: float
    seconds: float
    longest: int
    seconds_longest: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Tokens per second of one request alone, behind `depth` other tokens, with the likely range;
    and behind `longest` tokens, its whole context. `host_bandwidth`: bytes per second that the CPU
    reads, where it computes layers or experts. `prompt` is None where `prompt_untimed` says why."""

    tokens_per_second: float
    low: float
    high: float
    depth: int
    longest: int
    at_longest: float
    host_bandwidth: float | None = None
    host_assumed: bool = False
    prompt: PromptSpeed | None = None
    prompt_untimed: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingAnswer(Presented):
    """One engine, one model, one machine. `figures` uses the keys of published rows
    (`weights_gib`, `kv_tokens` …); `log` holds the lines that the engine prints; `failure` is the
    error that it raises instead of starting, and `remedy` the setting that works. `speed` is None
    for engines whose speed only plans predict, and where `untimed` says why."""

    engine: str
    title: str
    version: str
    model: str
    origin: str = ""
    parameters: int = 0
    gpu: str = ""
    gpus: int = 1
    usable: int | None = None  # bytes that one GPU offers
    pools: tuple[Pool, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    command: str = ""
    failure: str = ""
    remedy: str = ""
    offload: Offload | None = None
    speed: Speed | None = None
    untimed: str = ""
    problems: tuple[Problem, ...] = ()

    def on(self, where: str) -> int:
        """Bytes of all counted pools of one device."""
        return sum(pool.bytes for pool in self.pools if pool.counted and pool.where == where)

    @property
    def device(self) -> int:
        """Bytes in use on the fullest GPU, as nvidia-smi shows them."""
        names = {pool.where for pool in self.pools if pool.where.startswith("gpu")}
        return max((self.on(name) for name in names), default=0)

    @property
    def host(self) -> int:
        """Bytes in use in CPU memory."""
        return self.on("cpu")

    @property
    def fits(self) -> bool:
        """Whether the engine starts; without a GPU there is nothing that it could exceed."""
        return not self.failure

    @property
    def verdict(self) -> str | None:
        """`fits`, `no`, or None where no GPU was named."""
        return None if self.usable is None and not self.failure else "fits" if self.fits else "no"
