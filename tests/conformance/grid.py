"""The grid over which the formulas are held to the trace: its cases, and what is compared of each.

`tools/grid.py` prints it, `test_lower_trace.py` holds it to its bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from memfit import kernels
from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model.catalog import entry
from memfit.model.families import build, families
from memfit.simulate.memory import Memory, memory
from memfit.tape import PARTS

# Bounds, as shares of what the job itself holds at the trace's peak (the cuBLAS workspaces left
# out): the peak of any case, the median over all, any part of the peak, and how far the trace must
# stay below its peak to have it at another moment.
WORST, MEDIAN, PART, MOMENT = 0.02, 0.0005, 0.01, 0.005

NAMES = sorted({one.name for one in families().values() if not (one.brought or one.graphs)})
# transformers stops at these: it wants a `sliding_window` where a layer slides, though the config
# may leave it out.
REFUSED = {("gemma2", 3), ("gpt_oss", 2), ("ministral", 2), ("qwen2", 3)}

# Every example of every family meets one job of this product, neighbours another one in all three.
# Without an optimizer's states the passes decide where the peak is.
MODES = tuple(product(("none", "full"), ("sdpa", "eager"), ("bf16", "autocast-bf16", "fp32")))
STRIDE = 5
SMALL: dict[str, Any] = {"batch": 2, "seq": 128, "optimizer": "sgd"}

# Every family, grown to where its tensors matter, meets the first three of these, and more in turn;
# KINDS meet all of them.
WIDER = 4
WIDTHS = (
    "hidden_size",
    "n_embd",
    "n_embed",
    "d_model",
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "ffn_hidden_size",
    "head_dim",
    "rotary_dim",
    "word_embed_proj_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
LENGTHS, LONGEST = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 1024
ALWAYS = 3
RECIPES: tuple[dict[str, Any], ...] = (
    {"optimizer": "sgd"},
    {
        "optimizer": "sgd",
        "checkpointing": "full",
        "attention": "eager",
        "precision": "autocast-bf16",
    },
    {"seq": 64, "attention": "eager"},
    {"method": "lora"},
    {"method": "lora", "checkpointing": "full", "dropout": 0.1},
    {"method": "lora", "checkpointing": "full", "reentrant": True, "precision": "bf16-autocast"},
    {"method": "lora", "precision": "autocast-bf16", "rank": 64, "clip": 1.0},
    {"method": "lora", "adapter_dtype": "base", "attention": "eager", "packing": False},
    {"method": "qlora"},
    {
        "method": "qlora",
        "checkpointing": "full",
        "precision": "bf16-autocast",
        "optimizer": "paged_adamw_8bit",
    },
    {
        "method": "qlora",
        "quant": "fp4",
        "double_quant": False,
        "prepare_kbit": False,
        "dropout": 0.1,
    },
    {"method": "qlora", "quant": "int8", "checkpointing": "full"},
    {"method": "freeze", "trainable": ".1.", "optimizer": "adamw_loop"},
    {"method": "freeze", "trainable": ".0.", "checkpointing": "full", "precision": "fp32"},
    {"checkpointing": "every", "checkpoint_every": 2, "optimizer": "sgd", "seq": 256},
    {"checkpointing": "full", "reentrant": True, "optimizer": "sgd_momentum"},
    {"attention": "flash", "optimizer": "sgd", "seq": 256},
    {"attention": "efficient", "optimizer": "sgd", "seq": 200, "packing": False},
    {"attention": "math", "optimizer": "sgd"},
    {"attention": "math", "optimizer": "sgd", "packing": False, "precision": "fp32"},
    {"packing": False, "optimizer": "sgd", "checkpointing": "full"},
    {"precision": "fp16", "optimizer": "adamw_fused"},
    {"precision": "autocast-fp16", "optimizer": "adamw", "clip": 1.0},
    {"method": "lora", "precision": "fp16-autocast"},
    {"precision": "fp32", "optimizer": "adafactor"},
    {"accumulate": 2, "optimizer": "lion", "clip": 0.5},
    {"optimizer": "adamw_8bit", "zero_grad": "before_backward"},
    {"optimizer": "paged_adamw", "evaluate": True},
    {"optimizer": "rmsprop", "zero_grad": "keep"},
    {"optimizer": "adagrad", "precision": "autocast-bf16", "batch": 1, "seq": 33},
    {"optimizer": "lion_8bit", "batch": 8, "seq": 32},
    {"optimizer": "adam", "batch": 1, "seq": 480, "checkpointing": "full"},
    {"optimizer": "adam_fused", "batch": 3, "seq": 100, "evaluate": True},
)
# For KINDS alone; `tests/torch/test_optimizers.py` has every optimizer, on one model.
MORE: tuple[dict[str, Any], ...] = (
    {"optimizer": "muon", "clip": 1.0},
    {"optimizer": "adafactor_torch", "checkpointing": "full", "precision": "fp32"},
    {"method": "lora", "optimizer": "lorafa", "checkpointing": "full"},
    {"checkpointing": "selective", "optimizer": "sgd", "seq": 384},
    {"checkpointing": "selective", "attention": "efficient", "packing": False},
)
KINDS = ("llama", "gpt2", "gemma2", "mixtral", "deepseek_v3", "falcon", "opt")

# Real configurations, of full width, with few layers; each with a job that people run.
LAYERS = 4
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("meta-llama/Llama-3.1-8B", {"seq": 2048}),
    (
        "meta-llama/Llama-3.1-8B",
        {"method": "lora", "batch": 4, "seq": 1024, "checkpointing": "full"},
    ),
    (
        "mistralai/Mistral-7B-v0.3",
        {
            "method": "qlora",
            "batch": 4,
            "seq": 1024,
            "checkpointing": "full",
            "precision": "bf16-autocast",
        },
    ),
    (
        "Qwen/Qwen2.5-7B",
        {"batch": 2, "seq": 2048, "precision": "autocast-bf16", "checkpointing": "full"},
    ),
    ("Qwen/Qwen3-8B", {"method": "lora", "batch": 1, "seq": 4096, "precision": "autocast-bf16"}),
    (
        "google/gemma-2-9b",
        {"method": "lora", "seq": 2048, "attention": "eager", "checkpointing": "full"},
    ),
    (
        "google/gemma-3-12b-it",
        {"method": "qlora", "seq": 2048, "checkpointing": "full", "optimizer": "paged_adamw_8bit"},
    ),
    (
        "microsoft/Phi-3-mini-4k-instruct",
        {"seq": 1024, "batch": 2, "accumulate": 2, "clip": 1.0, "optimizer": "adamw_fused"},
    ),
    (
        "microsoft/phi-4",
        {
            "method": "lora",
            "batch": 8,
            "seq": 512,
            "rank": 64,
            "checkpointing": "full",
            "reentrant": True,
        },
    ),
    (
        "mistralai/Mixtral-8x7B-v0.1",
        {"method": "lora", "seq": 2048, "targets": "q_proj,v_proj", "checkpointing": "full"},
    ),
    (
        "deepseek-ai/DeepSeek-V2-Lite",
        {"seq": 1024, "optimizer": "adamw_8bit", "checkpointing": "full"},
    ),
    (
        "deepseek-ai/DeepSeek-V3",
        {
            "method": "lora",
            "seq": 1024,
            "targets": "q_a_proj,q_b_proj,o_proj",
            "checkpointing": "full",
        },
    ),
    (
        "openai/gpt-oss-20b",
        {
            "method": "lora",
            "seq": 1024,
            "targets": "q_proj,k_proj,v_proj,o_proj",
            "attention": "eager",
        },
    ),
    (
        "allenai/OLMo-2-1124-7B",
        {"seq": 2048, "batch": 2, "packing": False, "optimizer": "adafactor"},
    ),
    ("tiiuae/falcon-7b", {"method": "qlora", "seq": 2048, "checkpointing": "full"}),
    (
        "bigcode/starcoder2-7b",
        {"seq": 4096, "precision": "fp16", "optimizer": "sgd_momentum", "checkpointing": "full"},
    ),
    ("openai-community/gpt2-xl", {"batch": 8, "seq": 1024, "precision": "fp32"}),
    ("facebook/opt-6.7b", {"batch": 4, "seq": 1024, "precision": "autocast-fp16", "clip": 1.0}),
    (
        "Qwen/Qwen3-30B-A3B",
        {"seq": 2048, "optimizer": "lion_8bit", "checkpointing": "every", "checkpoint_every": 2},
    ),
    (
        "bigscience/bloom-7b1",
        {"method": "lora", "seq": 1024, "targets": "query_key_value", "batch": 4},
    ),
    (
        "HuggingFaceTB/SmolLM3-3B",
        {"batch": 4, "seq": 2048, "evaluate": True, "optimizer": "adamw_fused"},
    ),
    (
        "EleutherAI/pythia-6.9b",
        {"method": "freeze", "trainable": "layers.3.", "batch": 2, "seq": 2048},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    name: str
    config: Mapping[str, Any]
    job: Job

    def __str__(self) -> str:
        return f"{self.family} {self.name}"


def told(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in fields.items()) or "plain"


def steady(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without layers that are dropped by chance."""
    return {**config, **({"layerdrop": 0.0} if "layerdrop" in config else {})}


def grown(config: Mapping[str, Any]) -> dict[str, Any]:
    """The example as a model whose tensors matter: wider, and with room for every length."""
    wide = {
        key: value * WIDER if key in WIDTHS and isinstance(value, int) else value
        for key, value in config.items()
    }
    return steady({key: LONGEST if key in LENGTHS else value for key, value in wide.items()})


def examples(name: str) -> Iterator[Case]:
    """Every example with one job of the product, another for each."""
    start = sum(len(families()[other].examples) for other in NAMES[: NAMES.index(name)])
    for index, example in enumerate(families()[name].examples):
        if (name, index) not in REFUSED:
            checkpointing, attention, precision = MODES[(start + index) * STRIDE % len(MODES)]
            fields = {
                "checkpointing": checkpointing,
                "attention": attention,
                "precision": precision,
                **SMALL,
            }
            yield Case(
                family=name,
                name=f"example {index} {told(fields)}",
                config=steady(example),
                job=Job(**fields),
            )


def recipes(name: str) -> Iterator[Case]:
    """The first example grown, with recipes: some for everybody, the others in turn."""
    rest = len(RECIPES) - ALWAYS
    turn = NAMES.index(name) * 4
    taken = (
        range(len(RECIPES))
        if name in KINDS
        else (*range(ALWAYS), *(ALWAYS + (turn + step) % rest for step in range(4)))
    )
    config = grown(families()[name].examples[0])
    stacks = any(len(weight.shape) == 3 for weight in build(config).weights())
    for one in (*(RECIPES[index] for index in taken), *(MORE if name in KINDS else ())):
        recipe = {
            key: value for key, value in one.items() if not (stacks and key == "dropout")
        }  # PEFT refuses that
        yield Case(
            family=name,
            name=told(recipe),
            config=config,
            job=Job(**{"batch": 2, "seq": 128, **recipe}),
        )


def cases(name: str) -> Iterator[Case]:
    yield from examples(name)
    yield from recipes(name)


def models() -> Iterator[Case]:
    for name, fields in MODELS:
        yield Case(
            family="models",
            name=f"{name} {told(fields)}",
            config=cut(entry(name).config()),
            job=Job(**fields),
        )


def cut(config: Mapping[str, Any]) -> dict[str, Any]:
    """With fewer layers, as many entries in lists of one entry a layer, and weights in 16 bits, as
    the trace loads them."""
    counts = [key for key in ("num_hidden_layers", "n_layer", "num_layers") if key in config]
    short: dict[str, Any] = dict.fromkeys(counts, LAYERS)
    short |= {
        key: config[key][:LAYERS] for key in ("layer_types", "no_rope_layers") if config.get(key)
    }
    short |= (
        {"text_config": cut({"num_hidden_layers": 0, **config["text_config"]})}
        if "text_config" in config
        else {}
    )
    return steady(
        {key: value for key, value in {**config, **short}.items() if key != "quantization_config"}
    )


@dataclass(frozen=True, kw_only=True)
class Found:
    """`off` is the difference of the peaks, `parts` of each part there, as shares of what the
    trace's job itself holds at its peak."""

    case: Case
    peak: int
    off: float
    parts: Mapping[str, float]
    phases: tuple[str, str]
    # how far the trace's own peak in the phase that the formulas name lies below its highest
    earlier: float


def compare(case: Case) -> Found | None:
    """None where both refuse the job."""
    from memfit.trace import trace_config

    try:
        formulas = lower(build(case.config), case.job)
    except InputError:
        formulas = None
    try:
        traced = trace_config(case.config, case.job)
    except InputError as refused:
        if formulas is None:
            return None
        raise AssertionError(
            f"{case}: the real code refuses what the formulas take: {refused}"
        ) from refused
    assert formulas is not None, f"{case}: the formulas refuse what the real code takes"
    ours, real = memory(formulas), memory(traced)
    passing = 2 * kernels.cublas_workspace()  # one of the forward's thread, one of backward's
    whole = real.allocated - passing
    return Found(
        case=case,
        peak=real.allocated,
        off=(ours.allocated - real.allocated) / whole,
        parts={
            part: (ours.parts.get(part, 0) - real.parts.get(part, 0)) / whole
            for part in (*PARTS, "rounding")
        },
        phases=(phase(ours), phase(real)),
        earlier=(real.allocated - height(real, phase(ours))) / whole,
    )


def phase(found: Memory) -> str:
    return "" if found.at is None else found.at.phase


def height(found: Memory, named: str) -> int:
    return max((one.allocated for one in found.timeline if one.phase == named), default=0)


def holds(found: Found) -> list[str]:
    """What is wrong with one case, in words."""
    wrong = [f"the peak by {100 * found.off:+.2f} %"] if abs(found.off) > WORST else []
    wrong += [
        f"{part} by {100 * share:+.2f} %"
        for part, share in found.parts.items()
        if abs(share) > PART
    ]
    if found.earlier > MOMENT:
        wrong.append(
            f"the moment: {found.phases[0]}, where the trace has its peak in {found.phases[1]}"
        )
    return wrong
