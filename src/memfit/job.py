"""What the user wants done with a model. Every option is written once, here: the flag, the key of a
job file, the Python argument and the reference page come from these fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from memfit.errors import InputError, Problem, raise_errors
from memfit.formats import FORMATS
from memfit.job_checks import NEWEST, VERSION, cache_problems, optimizer_problems, version_problems
from memfit.lazy_dataclass import dataclass
from memfit.option_values import field_problems, from_text, sound, unknown

TASKS = ("finetune", "pretrain", "inference")
METHODS = ("full", "lora", "qlora", "freeze")
PRECISIONS = (
    "bf16",
    "fp16",
    "fp32",
    "autocast-bf16",
    "autocast-fp16",
    "bf16-autocast",
    "fp16-autocast",
    "bf16-master",
)
ATTENTIONS = (
    "sdpa",
    "flash",
    "efficient",
    "math",
    "cudnn",
    "eager",
    "flash-attn-2",
    "flash-attn-3",
)
AWAY = ("none", "streams", "wrapper", "all")
LOSSES = ("plain", "chunked", "te", "liger", "liger-ce")
CHECKPOINTING = ("none", "full", "every", "selective")
FRAMEWORKS = ("transformers", "trl", "torchtune", "torchtitan", "litgpt", "megatron")
CACHES = ("dynamic", "static", "quantized", "none")
UNSLOTH = ("norms", "rotary", "loss", "adapters")
HEADS = (
    "auto",
    "causal-lm",
    "image-text",
    "seq2seq-lm",
    "masked-lm",
    "question-answering",
    "classification",
    "token-classification",
    "none",
)
QUANTS = ("none", "nf4", "fp4", "int8")
LARGEST_COUNT = 2**40
PLAIN = frozenset({str, int, bool, float})  # types of values; what else is given may have no hash


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    group: str = "job",
    tries: tuple[Any, ...] = (),
    serves: tuple[Any, ...] = (),
) -> Any:
    """A field of `Job`: its default, its one-line help, what it accepts, and the values that a plan
    tries where none is named: to train, and to answer."""
    metadata = {
        "help": help,
        "choices": choices,
        "low": low,
        "high": high,
        "group": group,
        "tries": tries,
        "serves": serves,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run: the task, the method and every training or inference option. The defaults are
    those of a plain transformers loop."""

    task: str = option("finetune", "what the model is used for", choices=TASKS)
    method: str = option(
        "full", "training method", choices=METHODS, tries=("full", "lora", "qlora")
    )
    framework: str = option(
        "transformers",
        "library whose model code runs",
        choices=FRAMEWORKS,
        tries=("transformers",),
        serves=("transformers", "litgpt"),
    )

    batch: int = option(1, "sequences per micro-batch on one GPU", low=1, high=2**24)
    seq: int = option(2048, "tokens per sequence (inference: of the prompt)", low=1, high=2**28)
    accumulate: int = option(1, "micro-batches per optimizer step", low=1, high=2**20)
    packing: bool = option(True, "full sequences: no padding and no attention mask")
    head: str = option(
        "auto",
        ("model class by its task; `auto` follows the config's `architectures`"),
        choices=HEADS,
    )
    labels: int = option(
        0,
        "labels of a classification head; 0 means the config's own number, or 2",
        low=0,
        high=2**20,
    )
    target_seq: int = option(
        0,
        "decoder tokens of an encoder-decoder model in training; 0 means `--seq`",
        low=0,
        high=2**28,
    )
    images: int = option(
        0,
        "images per sequence; their tokens count towards `--seq`",
        low=0,
        high=4096,
    )
    image_size: int = option(
        0,
        "image height and width in pixels; 0 means the vision tower's own size",
        low=0,
        high=2**14,
    )

    precision: str = option(
        "bf16",
        ("format of weights and arithmetic"),
        choices=PRECISIONS,
        tries=("bf16", "autocast-bf16", "bf16-master"),
        serves=("bf16",),
    )
    optimizer: str = option(
        "adamw",
        "optimizer and the implementation of its step",
        tries=("adamw_fused", "adamw", "adamw_8bit"),
    )
    clip: float = option(0.0, "maximum gradient norm; 0 disables clipping", low=0.0, high=1e9)
    zero_grad: str = option(
        "after_step",
        "when gradients are released",
        choices=("after_step", "before_backward", "keep"),
    )

    checkpointing: str = option(
        "none",
        ("gradient checkpointing"),
        choices=CHECKPOINTING,
        group="memory",
        tries=("none", "selective", "full"),
    )
    checkpoint_every: int = option(
        1,
        "checkpoint one layer in N, with `--checkpointing every`",
        low=1,
        high=10_000,
        group="memory",
    )
    recompute_modules: str = option(
        "",
        ("Megatron's `--recompute-modules`, separated by commas; empty means core_attn"),
        group="memory",
    )
    recompute_layers: int = option(
        0,
        "Megatron's `--recompute-num-layers` with the block method; 0 means all",
        low=0,
        high=10_000,
        group="memory",
    )
    reentrant: bool = option(
        False, "reentrant checkpointing (`use_reentrant=True`)", group="memory"
    )
    activation_offload: str = option(
        "none",
        "keep tensors saved for backward in CPU memory",
        choices=AWAY,
        group="memory",
    )
    attention: str = option(
        "sdpa",
        "attention kernel; `sdpa` chooses one as torch does on that GPU",
        choices=ATTENTIONS,
        group="memory",
        tries=("sdpa",),
        serves=("sdpa", "flash-attn-2"),
    )
    loss: str = option(
        "plain",
        ("implementation of the cross-entropy loss"),
        choices=LOSSES,
        group="memory",
        tries=("plain", "liger", "te"),
    )
    liger: bool = option(
        False,
        "Liger kernels for norms, rotary embeddings and gated MLPs",
        group="memory",
        tries=(False, True),
    )
    unsloth: str = option(
        "",
        ("Unsloth kernels, separated by commas: norms, rotary, loss, adapters"),
        group="memory",
    )

    rank: int = option(16, "LoRA rank", low=1, high=65536, group="lora")
    alpha: float = option(
        32.0, "LoRA alpha (does not change memory)", low=0, high=1e9, group="lora"
    )
    rslora: bool = option(False, "rank-stabilised LoRA (does not change memory)", group="lora")
    targets: str = option(
        "all-linear",
        "modules with adapters: `all-linear` or names separated by commas",
        group="lora",
    )
    dropout: float = option(0.0, "LoRA dropout", low=0.0, high=0.999, group="lora")
    modules_to_save: str = option(
        "", "modules trained in full next to the adapters, separated by commas", group="lora"
    )
    adapter_dtype: str = option(
        "float32",
        "data type of the adapters; PEFT's default is float32",
        choices=("float32", "base"),
        group="lora",
    )
    trainable: str = option(
        "", "parts of trainable parameters' names, with `--method freeze`", group="lora"
    )

    quant: str = option(
        "none",
        "bitsandbytes quantization of the weights; QLoRA implies nf4",
        choices=QUANTS,
        group="quantization",
    )
    double_quant: bool = option(
        True, "double quantization of the 4-bit scales", group="quantization"
    )
    quant_skip: str = option(
        "",
        "modules kept unquantized, separated by commas; empty means the head",
        group="quantization",
    )
    quant_compute: str = option(
        "weights",
        ("compute data type of 4-bit layers"),
        choices=("weights", "float32", "bfloat16", "float16"),
        group="quantization",
    )
    prepare_kbit: bool = option(
        True,
        ("call PEFT's `prepare_model_for_kbit_training` (TRL 0.26 and later do not)"),
        group="quantization",
    )

    new_tokens: int = option(
        128, "tokens to generate after the prompt", low=0, high=2**28, group="inference"
    )
    cache: str = option(
        "dynamic",
        "type of the KV cache",
        choices=CACHES,
        group="inference",
        serves=("dynamic", "static", "quantized"),
    )
    cache_tokens: int = option(
        0,
        "tokens that a static KV cache has room for; 0 means prompt and new tokens",
        low=0,
        high=2**28,
        group="inference",
    )
    cache_bits: int = option(
        4, "bits per value of a quantized KV cache", low=2, high=8, group="inference"
    )
    logits: str = option(
        "last",
        ("prompt tokens with logits: the last one, or all (transformers before 4.45)"),
        choices=("last", "all"),
        group="inference",
    )
    beams: int = option(1, "beams", low=1, high=1024, group="inference")

    load: str = option(
        "auto",
        ("load weights straight to the GPU (`device_map`) or through CPU memory"),
        choices=("auto", "device_map", "host"),
        group="moments",
    )
    keep_outputs: bool = option(
        False,
        ("keep the model's outputs until the next forward (hand-written loops)"),
    )
    longest: int = option(
        0,
        ("tokens per sequence of the longest batch; 0 means all are equal"),
        low=0,
        high=2**28,
        group="moments",
    )
    evaluate: bool = option(False, "evaluate during training", group="moments")
    eval_batch: int = option(
        8, "sequences per evaluation batch", low=1, high=2**24, group="moments"
    )
    merge: bool = option(
        False, "merge the adapters into the weights on the GPU at the end", group="moments"
    )
    router_skew: float = option(
        1.0,
        "load of the busiest expert over the average",
        low=1.0,
        high=10_000.0,
        group="memory",
    )

    versions: str = option(
        "",
        "library versions like `transformers=4.51,torch=2.6`; newest otherwise",
        group="environment",
    )
    alloc_conf: str = option("", "value of PYTORCH_CUDA_ALLOC_CONF", group="environment")

    def __post_init__(self) -> None:
        raise_errors(self.problems())

    def problems(self) -> Iterator[Problem]:
        """Everything wrong with the values, all at once."""
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if type(value) not in PLAIN or not sound(one, value):
                yield from field_problems(one, value)
        if isinstance(self.optimizer, str):
            yield from optimizer_problems(self)
        if isinstance(self.versions, str):
            yield from version_problems(self.versions)
        if isinstance(self.unsloth, str):
            for name in filter(None, map(str.strip, self.unsloth.split(","))):
                if name not in UNSLOTH:
                    yield unknown("Unsloth kernel", name, "job.unsloth", UNSLOTH)
        if self.training and self.head == "none":
            yield Problem(
                message="a model without a head has no loss to train with",
                where="job.head",
                hint="name the head that is trained, like `--head classification`",
            )
        if self.task == "pretrain" and self.method != "full":
            yield Problem(
                message=f"pre-training needs method `full`, not `{self.method}`",
                where="job.method",
                hint="use `--task finetune`",
            )
        if (
            isinstance(self.longest, int)
            and isinstance(self.seq, int)
            and 0 < self.longest <= self.seq
        ):
            message = (
                f"`longest` is {self.longest} tokens, but must be more than `seq`, which "
                f"is {self.seq}"
            )
            yield Problem(
                message=message,
                where="job.longest",
                hint="`seq` is the usual length, `longest` the longest one",
            )
        if self.training is False and isinstance(self.cache_tokens, int):
            yield from cache_problems(self)
        if self.loss == "te" and self.framework != "megatron":
            hint = "use `--framework megatron` or another loss"
            yield Problem(
                message="loss `te` (Transformer Engine) needs Megatron", where="job.loss", hint=hint
            )
        named = (
            ("lora", "targets", "`all-linear`, or names like `q_proj,v_proj`"),
            ("freeze", "trainable", "for example `lm_head` or `layers.31.`"),
        )
        for method, name, hint in named:
            value = getattr(self, name)
            if (
                self.training
                and self.method.endswith(method)
                and isinstance(value, str)
                and not value.strip(" ,")
            ):
                yield Problem(
                    message=f"method `{self.method}` without `{name}` trains nothing",
                    where=f"job.{name}",
                    hint=hint,
                )

    @property
    def training(self) -> bool:
        return self.task != "inference"

    @property
    def hugging(self) -> bool:
        """Whether the models are transformers' own code, under its Trainer or TRL's."""
        return self.framework in ("transformers", "trl")

    @property
    def adapters(self) -> bool:
        return self.training and self.method in ("lora", "qlora")

    @property
    def quantization(self) -> str:
        """The bitsandbytes format in force: qlora means nf4 unless another is named."""
        return (
            "nf4"
            if self.method == "qlora" and self.training and self.quant == "none"
            else self.quant
        )

    @property
    def prepared(self) -> bool:
        """prepare_model_for_kbit_training is called; TRL did so up to 0.25, and then made adapters
        16-bit instead (trl 0.26 trainer/sft_trainer.py)."""
        own = self.framework == "trl" and self.version("trl") >= (0, 26)
        return self.adapters and self.quantization != "none" and self.prepare_kbit and not own

    @property
    def cache_room(self) -> int:
        """Tokens that a static KV cache has room for, where its size is stated or not."""
        return max(self.cache_tokens, self.seq + self.new_tokens - 1)

    @property
    def mapped(self) -> bool:
        """Weights are loaded with a `device_map`."""
        return self.load == "device_map" or (
            self.load == "auto" and (self.quantization != "none" or not self.training)
        )

    @property
    def reach(self) -> int:
        """Tokens of the longest sequence that the model will see."""
        return max(self.seq, self.longest)

    @property
    def autocast(self) -> bool:
        return "autocast" in self.precision

    def version(self, library: str) -> tuple[int, int]:
        """(major, minor) of a library: as `versions` says, else the newest known."""
        for piece in self.versions.split(",") if self.versions else ():
            found = VERSION.fullmatch(piece)
            if found and found[1] == library:
                return int(found[2]), int(found[3])
        return NEWEST[library]

    def replace(self, **changes: Any) -> Job:
        return dataclasses.replace(self, **changes)


def job_from(values: Mapping[str, Any]) -> Job:
    """A Job from text or parsed YAML/JSON; unknown keys and bad values are reported together."""
    fields = {one.name: one for one in dataclasses.fields(Job)}
    problems, good = [], {}
    for key, value in values.items():
        if key not in fields:
            problems.append(unknown("option", str(key), f"job.{str(key)[:60]}", tuple(fields)))
            continue
        value = from_text(value, str(fields[key].type)) if isinstance(value, str) else value
        if isinstance(value, (list, tuple)) and str(fields[key].type) == "str":
            value = ",".join(str(item) for item in value)
        found = list(field_problems(fields[key], value))
        problems += found
        if not found:
            good[key] = value
    try:
        job = Job(**good)
    except InputError as bad:
        raise InputError(*problems, *bad.problems) from None
    raise_errors(problems)
    return job


__all__ = ["FORMATS", "Job", "job_from"]
