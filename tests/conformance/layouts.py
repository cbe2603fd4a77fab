"""One table of layouts over several GPUs, and what is compared of each: the formulas' rank beside
the traced one, the first rank and the worst.

`tools/grid.py --layouts` prints it, `test_layouts.py` holds it to its bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.conformance.layouts_away import AWAY
from tests.conformance.layouts_ep import EP, EP_FUSED, SPREADABLE
from tests.conformance.layouts_heads import FUSED
from tests.conformance.layouts_split import SHARED
from tests.conformance.layouts_ulysses import ULYSSES
from tests.conformance.layouts_zero import ZERO, ZERO_HEADS
from tests.conformance.models import SMALL, SPLIT

from memfit import kernels
from memfit.job import Job
from memfit.lower import distinct, lower
from memfit.model.families import build
from memfit.simulate.memory import memory
from memfit.simulate.replay import replay
from memfit.strategy import Strategy
from memfit.tape import Comm, Tape
from memfit.uses import strategy_from

# Bounds, as shares of what the job itself holds at the trace's peak (the cuBLAS workspaces left
# out): the peak of any rank, the median over a group, any part of the peak; what the allocator
# reserves, and in bytes, for small models.
WORST, MEDIAN, PART, RESERVED, LEAST = 0.005, 0.0005, 0.01, 0.02, 4 * 2**20
CLOSE = {"trl zero": 0.001, "trl": 0.001}  # of kinds whose peaks lie closer
# Before it is reduced, the trace takes a gradient for something that passes; what tensor
# parallelism sums up or gathers is what comes next,
PASSING = ("gradients", "activations", "temporaries")
PARTS = (("weights",), ("optimizer",), ("communication",), ("logits",), PASSING)
TOGETHER: dict[str, tuple[tuple[str, ...], ...]] = {
    "tp": (("weights",), ("optimizer",), ("logits", "communication", *PASSING)),
    "pp": (("weights",), ("optimizer",), ("communication",), ("logits", *PASSING)),
    "cp": (("weights",), ("optimizer",), ("logits", "communication", *PASSING)),
    "ep": (("weights",), ("optimizer",), ("logits", "communication", *PASSING)),
    "experts": (("weights",), ("optimizer",), ("logits", "communication", *PASSING)),
    "pp tp": (("weights",), ("optimizer",), ("logits", "communication", *PASSING)),
}
TOGETHER |= {
    f"{kind} {package}": TOGETHER[kind]
    for kind in ("tp", "cp", "ep")
    for package in ("trl", "liger_kernel")
}

MIXED = "param-dtype=bf16,reduce-dtype=fp32"
FULL: dict[str, Any] = {"checkpointing": "full"}
OLD = FULL | {"reentrant": True}
AUTO: dict[str, Any] = {"precision": "autocast-bf16"}
AUTO16: dict[str, Any] = {"precision": "bf16-autocast"}
LORA: dict[str, Any] = {"method": "lora", "targets": "q_proj,k_proj,v_proj,o_proj"}
TWICE: dict[str, Any] = {"accumulate": 2}
SENT = (
    ("host", "to_host"),
    ("host", "to_device"),
    ("ep", "all_to_all"),
)  # of activations, and rows to their experts
EQUAL = 0.002  # how far off all bytes of one kind may be
STRIDES = (0, 3, 5)
GROUP = 12
MANY = 8  # ranks


@dataclass(frozen=True, kw_only=True)
class Row:
    """A layout, on one of the small models, with what the job has beside the usual."""

    # rows of one kind are compared together; `trl`, `liger_kernel` and `zero` need a package
    kind: str
    model: str
    use: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(
            (self.model, self.use, *(f"{key}={value}" for key, value in self.options.items()))
        )

    @property
    def config(self) -> dict[str, Any]:
        config = (
            SPREADABLE
            if " ep=" in self.use or self.kind == "experts"
            else SPLIT
            if self.kind in TOGETHER
            else SMALL
        )[self.model]
        return {**config, "num_hidden_layers": 6} if self.kind.startswith("pp") else config

    @property
    def job(self) -> Job:
        return Job(
            **{
                "batch": 2,
                "seq": 128,
                **({"clip": 0.0} if self.kind in TOGETHER else {}),
                **self.options,
            }
        )

    @property
    def strategy(self) -> Strategy:
        return strategy_from(self.use.split(), None)


# --------------------------------------------------------------------------------------- the table
SHARDED = (
    "fsdp=8",
    "fsdp=8,wrap=layers",
    f"fsdp=16,{MIXED}",
    f"fsdp=8,wrap=layers,{MIXED}",
    "fsdp=8,reduce-dtype=fp32",
    "fsdp=8,reshard=no",
    "fsdp=8,reshard-to=2",
    "fsdp=3",
    "fsdp=4 ddp=2",
    f"fsdp=4,wrap=layers,{MIXED} ddp=2",
    "fsdp=8,sync=no",
    f"fsdp=8,sync=no,{MIXED}",
    "fsdp=8,prefetch=2",
    "fsdp=8,wrap=none",
)
# Shards on the host, and what is done beside them.
OFFLOADED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "fsdp=2,offload", {"evaluate": True}),
    ("qwen2", "fsdp=3,offload,wrap=layers", FULL | AUTO | {"clip": 1.0}),
    ("llama", f"fsdp=4,offload,{MIXED}", TWICE | {"precision": "fp32"}),
    ("gpt2", "fsdp=2,offload ddp=2", {"method": "lora"} | FULL),
    ("llama", "fsdp=2,offload,sync=no", TWICE | {"optimizer": "sgd"}),
    ("mistral", "fsdp=8,offload,reshard=no", OLD),
)
# Packed weights in shards, `bnb_4bit_quant_storage` being the model's own dtype.
QLORA: dict[str, Any] = {"method": "qlora"}
QLORA_AS_IT_IS: dict[str, Any] = QLORA | {"prepare_kbit": False}
PACKED: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("fsdp2", "llama", "fsdp=2", QLORA),
    ("fsdp2", "mistral", "fsdp=4,offload", QLORA | FULL),
    ("fsdp2", "gpt2", "fsdp=2 ddp=2", QLORA | FULL | TWICE),
    ("fsdp2", "qwen2", "fsdp=3,wrap=layers", QLORA_AS_IT_IS | AUTO16 | OLD),
    ("fsdp2", "llama", "fsdp=8,reshard=no", QLORA | {"quant": "fp4", "targets": "q_proj,v_proj"}),
    ("fsdp2", "llama", "fsdp=2,offload,param-dtype=bf16", QLORA_AS_IT_IS | FULL | {"clip": 1.0}),
    ("fsdp1", "llama", "fsdp=2,version=1", QLORA_AS_IT_IS),
    ("fsdp1", "mistral", "fsdp=8,version=1", QLORA_AS_IT_IS | AUTO16 | OLD),
    ("fsdp1", "qwen2", "fsdp=4,version=1,backward-prefetch=pre", QLORA_AS_IT_IS | FULL),
    (
        "fsdp1",
        "llama",
        "fsdp=2,version=1,adapters=layer",
        QLORA_AS_IT_IS | FULL | {"adapter_dtype": "base"},
    ),
    ("fsdp1", "llama", "fsdp=4,version=1,offload,reshard=no", FULL | {"evaluate": True}),
    ("fsdp1", "qwen2", "fsdp=4,version=1,offload", AUTO | FULL),
    (
        "fsdp1",
        "mistral",
        "fsdp=2,version=1,offload,backward-prefetch=pre",
        FULL | {"method": "lora"},
    ),
    ("fsdp1", "llama", "fsdp=2,version=1,offload", QLORA_AS_IT_IS | OLD | AUTO16),
    ("fsdp1", "llama", "fsdp=3,version=1,offload,orig-params=no", FULL),
    ("fsdp1", "llama", "fsdp=2,version=1,offload ddp=2", {"clip": 1.0}),
    ("fsdp1", "llama", "fsdp=2,version=1,offload,reshard=no", TWICE),
    ("pp", "qwen2", "pp=2,schedule=interleaved,virtual=2 fsdp=2,offload", FULL),
    ("pp", "llama", "pp=2 fsdp=2", QLORA | FULL),
    ("tp", "qwen2", "tp=2 fsdp=2,offload", FULL),
    ("cp", "llama", "cp=2 fsdp=2,offload", {}),
)
# Fused losses multiply by the head's weight and never call it, so that its unit's forward ends with
# the model's; what they need is installed, or not.
TRL: dict[str, Any] = {"framework": "trl"}
HEADS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("trl", "llama", "fsdp=2", TRL | {"evaluate": True}),
    ("trl", "llama", "fsdp=2,wrap=layers", TRL),
    ("trl", "qwen2", "fsdp=2", TRL | FULL | {"method": "lora"}),
    ("trl", "qwen2", "fsdp=4 ddp=2", TRL | AUTO | TWICE),
    ("trl", "gpt2", "fsdp=2", TRL | FULL),
    ("trl", "llama", "fsdp=2,offload", TRL | QLORA | FULL),
    ("trl", "qwen2", "fsdp=3,reshard=no,prefetch=2", TRL | AUTO16),
    ("trl", "llama", "fsdp=2,wrap=none", TRL | {"method": "lora"}),
    ("trl", "mistral", "fsdp=4,version=1", TRL | OLD | {"method": "lora"}),
    ("trl", "llama", "fsdp=8,version=1", TRL | AUTO | FULL | TWICE),
    ("trl", "qwen2", "fsdp=2,version=1", TRL | QLORA | FULL),
    ("liger_kernel", "llama", "fsdp=2", {"loss": "liger"}),
    ("liger_kernel", "qwen2", "fsdp=2", FULL | {"loss": "liger", "liger": True}),
)
REPLICATED = (
    "ddp=8",
    "ddp=8,bucket-mb=1",
    "ddp=4,bucket-view",
    "ddp=4,static-graph",
    "ddp=4,find-unused",
)
JOBS: tuple[dict[str, Any], ...] = (
    {},
    FULL,
    AUTO | FULL | TWICE,
    {"method": "lora"},
    {"method": "lora", "optimizer": "adamw_fused", "clip": 1.0} | FULL,
    {"precision": "fp32", "optimizer": "sgd"},
    OLD,
    {"optimizer": "adamw_loop", "evaluate": True} | FULL,
    {"precision": "fp32", "zero_grad": "before_backward"} | TWICE,
)
# What DDP's buckets meet alone.
ALONE: tuple[dict[str, Any], ...] = (
    {"optimizer": "sgd", "seq": 512},
    {"precision": "fp32", "optimizer": "sgd_momentum", "seq": 256} | TWICE,
    {"method": "qlora"} | FULL,
    {"clip": 1.0, "optimizer": "adamw_fused", "attention": "eager"},
)
FLAT: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "fsdp=8", {}),
    ("qwen2", "fsdp=8", AUTO | FULL),
    ("mistral", "fsdp=8,backward-prefetch=pre", OLD),
    ("mixtral", "fsdp=8", {}),
    ("llama", "fsdp=3,orig-params=no", FULL),
    ("mistral", "fsdp=8,reshard=no", {}),
    ("mistral", "fsdp=8,forward-prefetch,backward-prefetch=pre", AUTO),
    ("gpt2", "fsdp=4 ddp=2", {}),
    ("llama", "fsdp=8,shard=no", AUTO),
    ("llama", "fsdp=8", {"method": "lora"}),
    ("mistral", "fsdp=8", LORA | AUTO16 | OLD),
    ("llama", "fsdp=8", LORA | FULL),
    ("llama", "fsdp=8,backward-prefetch=pre", LORA | OLD),
    ("mistral", "fsdp=8,backward-prefetch=pre", LORA | AUTO16),
    ("mistral", "fsdp=8,backward-prefetch=post", LORA | AUTO16 | FULL),
    ("llama", "fsdp=8,adapters=ignored", LORA),
    ("mistral", "fsdp=8,adapters=layer", LORA | {"adapter_dtype": "base"}),
    ("mistral", "fsdp=8,orig-params=no", LORA | AUTO16 | OLD),
    ("mistral", "fsdp=8,reshard=no", LORA | FULL),
    ("qwen2", "fsdp=2 ddp=2", LORA | AUTO16 | FULL | TWICE),
    ("qwen2", "fsdp=8", {}),
    ("gpt2", "fsdp=8", {}),
    ("mistral", "fsdp=8,backward-prefetch=pre", {}),
    ("mistral", "fsdp=8,backward-prefetch=post", {}),
    ("mistral", "fsdp=8,forward-prefetch", {}),
    ("llama", "fsdp=8,backward-prefetch=pre", FULL),
    ("qwen2", f"fsdp=8,{MIXED}", {}),
    ("llama", f"fsdp=8,{MIXED}", {"precision": "fp32"}),
    ("llama", "fsdp=8", {"precision": "fp32", "optimizer": "sgd"}),
    ("llama", "fsdp=8", TWICE),
    ("llama", "fsdp=8,sync=no", TWICE),
    ("llama", "fsdp=8,sync=no,reshard=no", TWICE),
    ("qwen2", "fsdp=8,sync=no", AUTO | OLD | TWICE),
    ("llama", "fsdp=8", {"clip": 1.0, "optimizer": "adamw_fused"}),
    ("llama", "fsdp=4,reshard=no ddp=2", AUTO),
    ("llama", "fsdp=8,wrap=none", {}),
    ("mixtral", "fsdp=8", OLD),
    ("llama", "fsdp=8,shard=no", {}),
    ("llama", "fsdp=8", {"evaluate": True, "optimizer": "adamw_loop"}),
    ("llama", "fsdp=8", AUTO16),
    ("llama", "fsdp=8,sync=no", {"zero_grad": "before_backward"} | TWICE),
    ("llama", "fsdp=3,orig-params=no,reshard=no", AUTO),
)
CUT = (
    "tp=2",
    "tp=4",
    "tp=2,style=dtensor",
    "tp=2 fsdp=2",
    "tp=2 fsdp=4,wrap=layers",
    f"tp=4 fsdp=2,{MIXED}",
    "tp=2 fsdp=3,reshard=no",
    "tp=2 fsdp=2 ddp=2",
    f"tp=2 fsdp=2,sync=no,{MIXED}",
    "tp=4 fsdp=4",
)
CUT_JOBS: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer": "sgd"} | FULL,
    AUTO | FULL | TWICE,
    {"precision": "fp32", "optimizer": "sgd", "batch": 4},
    {"optimizer": "adamw_fused", "clip": 1.0, "seq": 256},
    {"attention": "eager"} | OLD,
    {"zero_grad": "before_backward"} | AUTO16,
)

# PEFT's adapters on what transformers' own plan splits by columns: rows stop there (transformers
# from 5.21 on).
SPREAD_OUT: dict[str, Any] = {"method": "lora", "targets": "q_proj,k_proj,v_proj,gate_proj,up_proj"}
SAVED: dict[str, Any] = {"method": "lora", "targets": "q_proj,v_proj"}
CUT_ADAPTED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "tp=2", {"method": "lora", "targets": "q_proj,v_proj"}),
    ("llama-tied", "tp=2", SPREAD_OUT | {"clip": 1.0, "optimizer": "adamw_fused"}),
    ("qwen2", "tp=4", SPREAD_OUT | {"attention": "eager", "dropout": 0.1}),
    ("qwen3", "tp=2 fsdp=2", SPREAD_OUT | OLD | AUTO16 | TWICE),
    ("qwen2-tied", "tp=4 fsdp=2", SPREAD_OUT | FULL | AUTO),
    ("llama-biased", f"tp=2 fsdp=4,{MIXED}", SPREAD_OUT | FULL),
    ("llama", "tp=2 fsdp=2", SAVED | {"modules_to_save": "norm"} | AUTO | FULL),
    ("olmo2", "tp=2", SPREAD_OUT | {"targets": "up_proj", "modules_to_save": "q_norm"}),
    ("mistral", "tp=2 fsdp=2 ddp=2", SPREAD_OUT | {"adapter_dtype": "base"}),
    ("gemma", "tp=2 fsdp=3,reshard=no", SPREAD_OUT | {"precision": "fp32"}),
)
# Norms over all heads: what the ranks have of queries, keys and values is gathered.
NORMED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("olmo2", "tp=2", {}),
    ("olmo2", "tp=4 fsdp=2", OLD | {"precision": "fp32"}),
    ("olmo3", "tp=2 fsdp=2", AUTO16 | {"seq": 256}),
)


STAGES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "pp=2", {}),
    ("qwen3", "pp=4", FULL),
    ("mistral", "pp=3,stages=3/2/1", AUTO),
    ("qwen2-tied", "pp=2,micro-batches=6", {"batch": 1, "seq": 256}),
    ("llama", "pp=2,schedule=gpipe", {}),
    ("qwen2-tied", "pp=3,schedule=gpipe,micro-batches=5", AUTO16),
    ("llama-biased", "pp=2,schedule=gpipe,micro-batches=4", OLD | {"precision": "fp32"}),
    ("llama", "pp=2,schedule=interleaved,virtual=2,micro-batches=4", {}),
    ("qwen3", "pp=3,schedule=interleaved,virtual=2", FULL | AUTO),
    ("mistral", "pp=2,schedule=bfs,virtual=3", {}),
    ("qwen2", "pp=3,schedule=bfs,virtual=2", FULL),
    ("llama", "pp=2,schedule=zero-bubble,virtual=2", {}),
    ("qwen3", "pp=3,schedule=zero-bubble,virtual=2,micro-batches=6", {"optimizer": "sgd"}),
    (
        "llama-biased",
        "pp=4,schedule=zero-bubble,micro-batches=8",
        {"precision": "fp32", "optimizer": "sgd"},
    ),
    ("llama", "pp=2,schedule=zbv,virtual=2", {}),
    (
        "mistral",
        "pp=3,schedule=zbv,virtual=2,micro-batches=5",
        {"optimizer": "adamw_fused", "clip": 1.0},
    ),
)
# Backwards in two parts, each of whose pieces runs a checkpoint again, and keeps what it did not
# ask for.
STAGES_AGAIN: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "pp=2,schedule=zbv,virtual=2", FULL),
    ("qwen3", "pp=3,schedule=zero-bubble,virtual=2,micro-batches=6", FULL | {"optimizer": "sgd"}),
    ("llama", "pp=2,schedule=zbv,virtual=2", FULL | {"method": "lora"}),
    ("qwen2-tied", "pp=2,schedule=zbv,virtual=2", FULL | {"attention": "eager"}),
    (
        "mistral",
        "pp=2,schedule=zbv,virtual=2 fsdp=2,wrap=layers,reshard=no",
        FULL | {"optimizer": "sgd"},
    ),
    ("llama", "pp=2,schedule=zbv,virtual=2", AUTO),
    ("llama", "pp=2,schedule=zbv,virtual=2", {"checkpointing": "every", "checkpoint_every": 2}),
    ("mistral", "pp=3,schedule=zero-bubble,virtual=2,micro-batches=6", AUTO | FULL),
)
# Their evaluations, which hold most there.
JUDGED: dict[str, Any] = {"evaluate": True, "eval_batch": 24, "batch": 1}
STAGES_JUDGED: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("pp", "llama", "pp=2", JUDGED),
    ("pp", "qwen3", "pp=4", JUDGED | FULL),
    ("pp", "mistral", "pp=2,schedule=bfs,virtual=3", JUDGED | AUTO),
    ("pp", "llama", "pp=3,schedule=zero-bubble,virtual=2,micro-batches=6", JUDGED),
    ("pp", "llama", "pp=2,schedule=gpipe ddp=2", JUDGED),
    ("pp", "llama", "pp=2,schedule=interleaved,virtual=2 fsdp=2", JUDGED | FULL),
    ("pp tp", "qwen3", "pp=2 tp=2 fsdp=2", JUDGED | AUTO16),
    ("pp", "llama", "pp=2", JUDGED | {"method": "qlora"}),
)
# torch's styles with a split sequence, and a loss on split logits: no mask can be made there.
SEQUENCES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "tp=2,sequence", {}),
    ("llama", "tp=4,sequence,parallel_loss fsdp=2", FULL),
    ("qwen2", "tp=2,sequence", AUTO | FULL),
    ("mistral", "tp=4,sequence,parallel_loss", {"precision": "fp32", "seq": 64}),
    ("llama-biased", "tp=2,sequence", OLD | {"batch": 1}),
    ("llama", "tp=2,parallel_loss fsdp=2", AUTO16),
    ("llama-tied", "tp=2,sequence,parallel_loss", TWICE),
    ("qwen3", "tp=2,sequence", AUTO),
    ("smollm3", "tp=2,sequence", {"checkpointing": "selective"}),
)
# torch's ring attention beside FSDP2, as accelerate has it.
RINGS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "cp=2 fsdp=2,wrap=layers", {}),
    ("llama", "cp=4 fsdp=2", {"seq": 2048, "batch": 1, "optimizer": "sgd"} | FULL),
    ("qwen2", "cp=2,style=allgather fsdp=2", AUTO),
    ("qwen3", "cp=2 fsdp=1", {"attention": "flash", "seq": 512}),
    ("llama", "cp=4,style=allgather fsdp=2", {"seq": 1024}),
    ("llama-biased", "cp=2 fsdp=2", {"method": "lora", "seq": 512, "batch": 1}),
    ("llama", "cp=3 fsdp=2", OLD | {"seq": 384}),
    ("qwen2", "cp=2 fsdp=2", TWICE | AUTO16 | {"clip": 1.0}),
)
# Stages beside other layouts, adapters and packed weights in stages; `pp tp`: what is summed up
# over ranks is told with what comes next.
STAGES_BESIDE: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("pp", "llama", "pp=2 fsdp=2", {}),
    ("pp", "qwen3", "pp=2 fsdp=2", AUTO | FULL),
    ("pp", "mistral", f"pp=2,micro-batches=4 fsdp=2,reshard=no,{MIXED}", {}),
    ("pp", "qwen2", "pp=2 fsdp=2,wrap=layers", {"method": "lora"} | FULL),
    ("pp", "llama", "pp=2,schedule=interleaved,virtual=2 fsdp=2", {}),
    ("pp", "qwen2-tied", "pp=2 fsdp=2 ddp=2", {"clip": 1.0, "optimizer": "adamw_fused"}),
    ("pp", "qwen2", "pp=2,schedule=interleaved,virtual=2 ddp=2,bucket-view", {}),
    ("pp", "llama", "pp=2,micro-batches=4 ddp=2", {"method": "lora"} | AUTO),
    ("pp tp", "qwen3", "pp=2 tp=2 fsdp=2", AUTO16),
    ("pp tp", "llama", "pp=2 tp=2", SPREAD_OUT | FULL),
    ("pp", "mistral", "pp=2,schedule=gpipe", {"method": "lora"} | OLD | AUTO16),
    ("pp", "llama", "pp=2,schedule=zbv,virtual=2", {"method": "qlora"}),
    ("pp", "llama", "pp=2,schedule=interleaved,virtual=2 fsdp=2,wrap=layers", FULL),
    ("pp", "mistral", "pp=2,schedule=bfs,virtual=3 fsdp=2,wrap=layers", FULL),
    (
        "pp",
        "llama",
        "pp=2,schedule=interleaved,virtual=2 fsdp=2,wrap=layers",
        {"method": "lora"} | FULL,
    ),
    ("pp", "llama", "pp=2,schedule=zero-bubble,virtual=2 fsdp=2,reshard=no", {}),
    (
        "pp",
        "mistral",
        "pp=2,schedule=zbv,virtual=2 fsdp=2,wrap=layers,reshard=no",
        {"optimizer": "sgd"},
    ),
    ("pp", "qwen2-tied", "pp=2,schedule=zbv,virtual=2", {"attention": "eager"}),
    ("pp", "llama", "pp=2", {"checkpointing": "every", "checkpoint_every": 2}),
)


def crossed(
    kind: str, models: tuple[str, ...], uses: tuple[str, ...], jobs: tuple[dict[str, Any], ...]
) -> Iterator[Row]:
    """Every layout meets some of the jobs, its neighbours others, the families in turn."""
    for place, use in enumerate(uses):
        for stride in STRIDES:
            options = jobs[(place + stride) % len(jobs)]
            model = models[(len(STRIDES) * place + STRIDES.index(stride) + 1) % len(models)]
            if runs(use, options):
                yield Row(kind=kind, model=model, use=use, options=options)


def runs(use: str, options: Mapping[str, Any]) -> bool:
    """With a static graph that accumulates, torch 2.13 stops at an assertion of its own
    (reducer.cpp `expect_autograd_hooks_`)."""
    return "static-graph" not in use or "accumulate" not in options


def rows() -> Iterator[Row]:
    some = ("llama", "qwen2", "gpt2")
    yield from crossed("ddp", some, REPLICATED, JOBS)
    for use in REPLICATED:
        yield from (
            Row(kind="ddp", model="llama", use=use, options=options)
            for options in ALONE
            if runs(use, options)
        )
    yield from crossed("fsdp2", some, SHARDED, JOBS)
    yield from (
        Row(kind="fsdp2", model=model, use=use, options=options)
        for model, use, options in OFFLOADED
    )
    yield from (
        Row(kind=kind, model=model, use=use, options=options)
        for kind, model, use, options in (*PACKED, *HEADS, *ZERO_HEADS, *AWAY)
    )
    for model, use, options in FLAT:
        first, *rest = use.split()
        yield Row(
            kind="fsdp1", model=model, use=" ".join((f"{first},version=1", *rest)), options=options
        )
    yield from crossed(
        "tp", tuple(name for name in SPLIT if name not in ("olmo2", "olmo3")), CUT, CUT_JOBS
    )
    yield from (
        Row(kind="tp", model=model, use=use, options=options)
        for model, use, options in (*CUT_ADAPTED, *NORMED, *SEQUENCES)
    )
    yield from (
        Row(kind="cp", model=model, use=use, options=options) for model, use, options in RINGS
    )
    yield from (
        Row(kind="pp", model=model, use=use, options=options)
        for model, use, options in (*STAGES, *STAGES_AGAIN)
    )
    yield from (
        Row(kind=kind, model=model, use=use, options=options)
        for kind, model, use, options in (*STAGES_BESIDE, *STAGES_JUDGED)
    )
    yield from (Row(kind="ep", model=model, use=use, options=options) for model, use, options in EP)
    yield from (
        Row(kind="experts", model=model, use=use, options=options) for model, use, options in SHARED
    )
    yield from (
        Row(kind="liger_kernel", model=model, use=use, options=options)
        for model, use, options in EP_FUSED
    )
    yield from (
        Row(kind=kind, model=model, use=use, options=options) for kind, model, use, options in FUSED
    )
    yield from (
        Row(kind="zero", model=model, use=use, options=options)
        for model, use, options in (*ZERO, *ULYSSES)
    )


def groups(table: Sequence[Row]) -> list[list[Row]]:
    """Rows of one kind, as many as one process compares at a time."""
    of_kind = [
        [row for row in table if row.kind == kind]
        for kind in dict.fromkeys(row.kind for row in table)
    ]
    return [some[start : start + GROUP] for some in of_kind for start in range(0, len(some), GROUP)]


# -------------------------------------------------------------------------------- what is compared
@dataclass(frozen=True, kw_only=True)
class Side:
    """A rank as both producers have it: `off` is the difference of the peaks, a share of the
    trace's."""

    rank: int
    peak: int
    off: float
    wrong: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Found:
    """`peaks` are the formulas', of the ranks that were written."""

    row: Row
    peaks: tuple[int, ...]
    first: Side
    worst: Side

    @property
    def off(self) -> float:
        """Of the two, the one that is further off."""
        return max(self.first.off, self.worst.off, key=abs)

    @property
    def wrong(self) -> list[str]:
        return [
            f"rank {side.rank}: {what}" for side in (self.first, self.worst) for what in side.wrong
        ]


def compare(row: Row) -> Found:
    """The formulas say of every rank what it holds (of more than `MANY`: of each that is unlike the
    others), and so which is the worst; of ranks that hold as much, the last is taken, lest rank 0
    be compared twice."""
    model, job, strategy = build(row.config), row.job, row.strategy
    apart = (
        {0, strategy.ranks - 1, *(rank for rank, _ in distinct(model, job, None, strategy))}
        if strategy.ranks > MANY
        else range(strategy.ranks)
    )
    tapes = {rank: lower(model, job, replace(strategy, rank=rank)) for rank in sorted(apart)}
    peaks = {rank: memory(tape).allocated for rank, tape in tapes.items()}
    worst = max(peaks, key=lambda rank: (peaks[rank], rank))
    first, last = (side(row, rank, tapes[rank]) for rank in (0, worst))
    return Found(row=row, peaks=tuple(peaks.values()), first=first, worst=last)


def side(row: Row, rank: int, written: Tape) -> Side:
    traced = trace(row, rank)
    ours, real = memory(written), memory(traced)
    whole = real.allocated - 2 * kernels.cublas_workspace()
    off = (ours.allocated - real.allocated) / whole
    wrong = [f"the peak by {100 * off:+.2f} %"] if abs(off) > CLOSE.get(row.kind, WORST) else []
    for parts in TOGETHER.get(row.kind, PARTS):
        apart = sum(ours.parts.get(part, 0) - real.parts.get(part, 0) for part in parts) / whole
        wrong += [f"{' '.join(parts)} by {100 * apart:+.2f} %"] if abs(apart) > PART else []
    for group, op in SENT:
        size, there = sent(written, group, op), sent(traced, group, op)
        wrong += [f"{op} {size} bytes, not {there}"] if abs(size - there) > EQUAL * there else []
    held, reserved = replay(written).peak_reserved, replay(traced).peak_reserved
    if abs(held - reserved) > max(RESERVED * reserved, LEAST):
        wrong.append(f"reserved by {100 * (held / reserved - 1):+.2f} %")
    return Side(rank=rank, peak=real.allocated, off=off, wrong=tuple(wrong))


def sent(tape: Tape, group: str, op: str) -> int:
    """torch's names may go on (`all_to_all_single`)."""
    return sum(
        event.size
        for event in tape
        if type(event) is Comm and event.group == group and event.op.startswith(op)
    )


def trace(row: Row, rank: int) -> Tape:
    from memfit.trace import trace_config

    return trace_config(row.config, row.job, strategy=replace(row.strategy, rank=rank))
