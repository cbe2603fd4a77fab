"""The options of a question beside those of its job: where it runs, how it is answered, what a verb
adds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from memfit.job import Job, option
from memfit.lazy_dataclass import dataclass

if TYPE_CHECKING:  # each function imports what it needs, and no more
    pass


PRODUCERS = ("formula", "trace")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The options of a question that are not part of the job: model, GPU, layout and what to
    find."""

    model: str = option(
        "",
        "hub id, folder, config.json, .safetensors or .gguf file, or catalog name",
        group="question",
    )
    gpu: str = option(
        "",
        "GPU or cloud machine, like `rtx-4090`, `8xh100`, `p5.48xlarge`, `auto`",
        group="question",
    )
    memory: str = option(
        "",
        "GPU memory, like `24GiB` (for a GPU that is not listed)",
        group="question",
    )
    use: str = option(
        "",
        ("layout on several GPUs: `ddp`, `fsdp=8`, `tp=4,pp=2`, `zero,stage=3` …"),
        group="question",
    )
    by: str = option(
        "auto",
        "how to predict: formulas, a trace of the real code, or whichever works",
        choices=("auto", *PRODUCERS),
        group="question",
    )
    like: str = option(
        "",
        "use this model's formulas with the sizes of the given config",
        group="question",
    )
    prune: str = option(
        "",
        "cut the model: `layers=24`, or shares like `layers=0.5,ffn=0.75`",
        group="question",
    )
    offline: bool = option(False, "do not use the network", group="question")
    largest_batch: bool = option(False, "find the largest batch that fits", group="question")
    longest_seq: bool = option(
        False,
        "find the longest sequence that fits",
        group="question",
    )
    smallest_gpu: bool = option(False, "find the smallest GPU that fits", group="question")
    cheapest_gpu: bool = option(False, "find the cheapest GPU that fits", group="question")
    cheapest_precision: bool = option(
        False, "find the highest precision that fits", group="question"
    )
    advise: bool = option(
        False,
        "find changes that make it fit, with what each saves and costs",
        group="question",
    )
    dataset_tokens: float = option(
        0.0,
        "training tokens like `2B`; also report hours, energy and cost",
        low=0.0,
        high=1e18,
        group="question",
    )
    examples: int = option(
        0,
        "training sequences; also report hours, energy and cost",
        low=0,
        high=10**15,
        group="question",
    )
    price: float = option(
        0.0,
        "dollars per GPU-hour; 0 means the public price",
        low=0.0,
        high=1e6,
        group="question",
    )
    lengths: str = option(
        "",
        "texts of a whole run: `data.jsonl`, `lengths.txt`, `lognormal:mean=400,p99=2000`",
        group="run",
    )
    steps: int = option(
        0,
        "optimizer steps of the run; 0 means one epoch, at most 1000",
        low=0,
        high=100_000,
        group="run",
    )
    seed: int = option(0, "seed of the order of the texts", low=0, high=2**32, group="run")
    order: str = option(
        "shuffled",
        "order of the texts; `grouped` is the Trainer's `group_by_length`",
        choices=("shuffled", "as-is", "sorted", "grouped", "bucketed"),
        group="run",
    )
    pad_to_multiple: int = option(
        1, "pad batches to a multiple of N tokens", low=1, high=2**16, group="run"
    )
    tokenizer: str = option(
        "", "tokenizer.json, or a folder with one, that counts the texts' tokens", group="run"
    )
    tokens_per_char: float = option(
        0.0,
        "tokens per character, instead of a tokenizer; about 0.25 for English",
        low=0.0,
        high=16.0,
        group="run",
    )
    text_key: str = option("", "key of the text in the lines of a .jsonl file", group="run")
    evaluate_every: int = option(
        0,
        "steps between evaluations; 0 means at the end, with `--evaluate`",
        low=0,
        high=10**9,
        group="run",
    )
    save_every: int = option(
        0, "steps between checkpoints; 0 means at the end", low=0, high=10**9, group="run"
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """The options of `memfit trace` that control how the trace runs."""

    python: str = option(
        "",
        "Python or virtual environment whose libraries run the trace",
        group="trace",
    )
    steps: int = option(
        3,
        "optimizer steps to trace; 0 means until the script ends",
        low=0,
        high=10**6,
        group="trace",
    )
    time_limit: float = option(
        300.0, "time limit of the trace in seconds", low=1.0, high=10**6, group="trace"
    )
    show_output: bool = option(False, "show the script's output on stderr", group="trace")
    network: bool = option(False, "let a script download files", group="trace")
    keep_env: bool = option(
        False, "let a script see tokens and passwords of your environment", group="trace"
    )
    ranks: int = option(
        1,
        "run a script as one rank of N, as under `torchrun`",
        low=1,
        high=2**20,
        group="trace",
    )
    rank: int = option(0, "rank to trace", low=0, high=2**20, group="trace")
    launcher: str = option(
        "", "words that start a script, like `torchrun --nproc-per-node 8`", group="trace"
    )
    tokens: int = option(
        512,
        "tokens of each text in a script's data set that was not found",
        low=1,
        high=2**20,
        group="trace",
    )
    image_size: int = option(
        256,
        "width and height of each picture in such a data set",
        low=1,
        high=2**14,
        group="trace",
    )
    assume: str = option(
        "false",
        "value of conditions that depend on data, like `loss < best`",
        choices=("false", "true"),
        group="trace",
    )
    isolation: str = option(
        "auto",
        "how a script is kept from changing files",
        choices=("auto", "namespaces", "landlock", "none"),
        group="trace",
    )


@dataclass(frozen=True, kw_only=True)
class Measuring:
    """The options of `memfit measure` that are not part of the job."""

    out: str = option("", "folder for records (default for a campaign: `records`)", group="measure")
    budget: str = option("25m", "time limit of a campaign, like `25m` or `540s`", group="measure")
    case_limit: float = option(
        600.0, "time limit of one case in seconds", low=1.0, high=10**6, group="measure"
    )
    measured_steps: int = option(3, "optimizer steps to measure", low=1, high=1000, group="measure")
    history: bool = option(
        False, "save the CUDA allocator's history next to the record", group="measure"
    )
    use: str = option(
        "",
        ("measure one process of a layout like `fsdp=8`; collectives do nothing"),
        group="measure",
    )
    world: int = option(
        1,
        "short for `--use fsdp=N,param_dtype=bf16,reduce_dtype=fp32`",
        low=1,
        high=2**20,
        group="measure",
    )
    process: int = option(
        0, "which process of the layout to measure", low=0, high=2**24, group="measure"
    )
    engine: str = option(
        "",
        "serving engine instead of transformers, like `vllm`",
        group="measure",
    )


@dataclass(frozen=True, kw_only=True)
class Studying:
    """The options of `memfit study` that are not part of its jobs. Commas separate several
    values."""

    gpus: str = option(
        "8xa100-sxm-80gb",
        "machines, separated by commas: `8xa100-sxm-80gb,1xrtx-4090`",
        group="study",
    )
    lengths: str = option(
        "1024", "tokens per sequence, separated by commas: `512,2048,8192`", group="study"
    )
    methods: str = option("full,lora,qlora", "training methods, separated by commas", group="study")
    layouts: str = option(
        "", "layouts, separated by commas, like `DDP,ZeRO-3`; empty means all", group="study"
    )
    use: str = option(
        "", "one layout of your own in place of these, like `fsdp=8` or `tp=4`", group="study"
    )
    checkpointing: str = option(
        "none,full", "gradient checkpointing, separated by commas", group="study"
    )
    attention: str = option(
        "eager,sdpa", "attention kernels, separated by commas, like `flash-attn-2`", group="study"
    )
    measured: bool = option(True, "show published measurements of the same jobs", group="study")
    offline: bool = option(False, "do not use the network", group="study")


@dataclass(frozen=True, kw_only=True)
class Planning:
    """The options of `memfit plan` that are not part of the job. The job's own options may have
    several values here, separated by commas, or `any`."""

    global_batch: int = option(
        0,
        ("sequences per optimizer step on all GPUs; 0 means 64, or one per GPU"),
        low=0,
        high=2**32,
        group="plan",
    )
    tokens_per_step: int = option(
        0, "tokens per optimizer step on all GPUs", low=0, high=2**48, group="plan"
    )
    dataset_tokens: float = option(
        0.0,
        "training tokens like `2B`, for hours, energy and cost; 0 means 1M",
        low=0.0,
        high=1e18,
        group="plan",
    )
    examples: int = option(
        0, "training sequences; also report hours, energy and cost", low=0, high=2**48, group="plan"
    )
    network: str = option(
        "",
        ("network between nodes, like `ndr` or `ethernet-100`"),
        group="plan",
    )
    price: float = option(
        0.0,
        "dollars per GPU-hour; 0 means the public price",
        low=0.0,
        high=1e6,
        group="plan",
    )
    budget_money: float = option(
        0.0,
        "maximum cost of the run in dollars; 0 means no limit",
        low=0.0,
        high=1e15,
        group="plan",
    )
    budget_hours: float = option(
        0.0, "maximum hours of the run; 0 means no limit", low=0.0, high=1e9, group="plan"
    )
    policy: str = option("fastest", "what the best plan optimizes", group="plan")
    top: int = option(3, "number of plans to show per method", low=1, high=100, group="plan")
    offload: bool = option(True, "allow CPU offload", group="plan")
    front: bool = option(
        False,
        ("also show the best trade-offs of time, memory and cost (slow)"),
        group="plan",
    )
    verify: int = option(
        0,
        ("check the first N plans by a trace (`memfit[trace]`)"),
        low=0,
        high=100,
        group="plan",
    )
    measure: int = option(
        0,
        "measure the first N plans on this machine's GPU (`memfit[measure]`)",
        low=0,
        high=100,
        group="plan",
    )
    write: str = option(
        "",
        "write the best plan to this job file",
        group="plan",
    )


def options() -> dict[str, dataclasses.Field[Any]]:
    """Every option by its name, in the order in which people should read them."""
    return {one.name: one for one in (*dataclasses.fields(Ask), *dataclasses.fields(Job))}
