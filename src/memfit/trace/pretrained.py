"""`from_pretrained` without weights: the class and the config are the program's own, the parameters
are tensors without data.

A config comes from a folder or from the catalog; only a name that neither knows is looked for where
transformers looks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from types import ModuleType
from typing import Any

import torch
from memfit.job import Job
from memfit.model.quantized import bitsandbytes_options
from memfit.trace import assumed_models, failures, prepare, public_configs, steps
from memfit.trace.imports import Patch
from memfit.trace.refuse import CannotFollow, Watcher
from memfit.trace.versions import DTYPE, TRANSFORMERS
from memfit.units import GIB

# Arguments that only say how weights are found and read (transformers 4.40 to 5.23,
# modeling_utils.py `from_pretrained`).
READING = {
    "cache_dir",
    "ignore_mismatched_sizes",
    "force_download",
    "local_files_only",
    "token",
    "use_auth_token",
    "revision",
    "use_safetensors",
    "weights_only",
    "state_dict",
    "proxies",
    "tqdm_class",
    "output_loading_info",
    "_from_pipeline",
    "_from_auto",
    "max_memory",
    "offload_folder",
    "offload_buffers",
    "offload_state_dict",
    "subfolder",
    "commit_hash",
    "_commit_hash",
    "variant",
    "adapter_kwargs",
    "adapter_name",
    "generation_config",
    "gguf_file",
    "trust_remote_code",
    "low_cpu_mem_usage",
    "from_tf",
    "from_flax",
    "mirror",
    "_fast_init",
    "resume_download",
    "key_mapping",
    "disable_mmap",
    "fusion_config",
    "use_kernels",
    "kernel_config",
    "allow_all_kernels",
    "code_revision",
}
SPREAD = ("tp_plan", "tp_size", "device_mesh", "distributed_config")
PATIENCE = 2.0  # seconds for a connection to the hub
PLACING = ("auto", "balanced", "balanced_low_0", "sequential")


# How a copy that holds bitsandbytes' 4 bits is called, and what its config then says (the hub's
# `unsloth/*-bnb-4bit`).
DYNAMIC = "-unsloth-bnb-4bit"  # whose config skips layers, others in each model
FOUR_BITS = (DYNAMIC, "-bnb-4bit")
# What names of fine-tuned models add to that of the model that was tuned.
TUNED = ("-instruct", "-chat", "-it", "-sft", "-dpo", "-base", "-hf")
QUANTIZED = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}


def original(name: str) -> tuple[str, dict[str, Any]] | None:
    """The model of the catalog that a copy or a fine-tuned model is called after, and its
    config."""
    from memfit.model import catalog

    plain = name.partition("/")[2] or name
    suffix = next((one for one in FOUR_BITS if plain.endswith(one)), "")
    plain = plain.removesuffix(suffix)
    tuned = next((one for one in TUNED if plain.lower().endswith(one)), "")
    bare = plain[: -len(tuned)] if tuned else ""
    known = catalog.find(plain) or (catalog.find(bare) if bare else None)
    if known is None:
        return None
    config = dict(catalog.entry(known).config())
    return known, {**config, "quantization_config": dict(QUANTIZED)} if suffix else config


def configs(module: ModuleType, recorder: Watcher) -> list[Patch]:
    """For `transformers.configuration_utils`: names of the catalog need no hub."""
    kind = getattr(module, "PretrainedConfig", None) or module.PreTrainedConfig
    true = kind.get_config_dict.__func__

    def config_dict(cls: Any, name: Any, **given: Any) -> Any:
        from memfit.model import catalog

        here = os.path.isdir(name) or os.path.isfile(name)
        called = str(name) if here else assumed_models.published(str(name))
        known = None if here else catalog.find(called)
        found: Any = None
        if known is not None:
            found = catalog.entry(known).config()
            if called != str(name):
                message = f"`{name}` was not found: the config of `{known}` takes its place"
                recorder.note(f"config {name}", message)
        else:
            try:
                return true(cls, name, **given)
            except Exception as bad:
                if failures.missing_file(bad) is None:
                    raise
                found = assumed(str(name), called, str(given.get("subfolder") or ""), recorder)
                if found is None:
                    raise
        return {**found, **rotary(found), "_name_or_path": str(name)}, {
            key: value for key, value in given.items() if key not in READING
        }

    return [(kind, "get_config_dict", classmethod(config_dict))]  # type: ignore[arg-type]


# How Qwen3-VL's config.json shares the rotary embedding among time, height and width, which the
# catalog leaves out and classes before transformers 5 look up (4.57 modeling_qwen3_vl.py).
SHARED = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}


def rotary(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config") or {}
    asked = config.get("model_type") in ("qwen3_vl", "qwen3_vl_moe")
    if TRANSFORMERS >= (5, 0) or not asked or text.get("rope_scaling"):
        return {}
    return {"text_config": {**text, "rope_scaling": SHARED}}


def folders(module: ModuleType) -> list[Patch]:
    """For `transformers.utils.hub`: a folder that is not there is looked for by its model's name,
    in huggingface_hub's cache and on the hub."""

    def elsewhere(true: Any) -> Any:
        @functools.wraps(true)
        def cached(path_or_repo_id: Any, *args: Any, **given: Any) -> Any:
            name = str(path_or_repo_id)
            if not os.path.exists(name):
                name = assumed_models.published(name)
            return true(name, *args, **given)

        return cached

    return [
        (module, name, elsewhere(getattr(module, name)))
        for name in ("cached_file", "cached_files")
        if hasattr(module, name)
    ]


def assumed(name: str, called: str, part: str, recorder: Watcher) -> dict[str, Any] | None:
    """The config of a public model that stands for one that was not found."""
    public = public_configs.find(called, part)
    if public is not None:
        public_configs.note(recorder, name)
        return public
    copied = original(called)
    if copied is not None:
        message = f"`{name}` was not found: it is assumed to have the sizes of `{copied[0]}`"
        if name.endswith(DYNAMIC):
            message += "; it takes more memory, for some of its layers stay in 16 bits"
        recorder.note(f"config {name}", message)
        return copied[1]
    alike = assumed_models.find(called)
    if alike is None:
        return None
    recorder.note(f"config {name}", alike[1], "give the folder of the true one")
    return alike[0]


def hub_constants(module: ModuleType) -> list[Patch]:
    """For `huggingface_hub.constants`: without a way to the hub, every request to it fails at once,
    not after its retries."""
    if module.HF_HUB_OFFLINE or reachable(module.ENDPOINT):
        return []
    os.environ.update(
        {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    )
    return [(module, "HF_HUB_OFFLINE", True)]


def reachable(endpoint: str) -> bool:
    """Whether there is a connection; behind a proxy only the proxy knows."""
    import socket
    from urllib.parse import urlsplit

    if any(
        os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    ):
        return True
    parts = urlsplit(endpoint)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 443), timeout=PATIENCE):
            return True
    except OSError:
        return False


def in_bits(rest: dict[str, Any], old: bool) -> Any:
    """`load_in_8bit=True` by itself, as `from_pretrained` took it until transformers 5 (4.44
    modeling_utils.py)."""
    import transformers

    if not old:
        return None
    asked = any(rest.get(one) for one in BITS)
    if asked and rest.get("quantization_config") is not None:  # transformers' own words
        raise ValueError(
            "You can't pass `load_in_4bit`or `load_in_8bit` as a kwarg when passing "
            "`quantization_config` argument at the same time."
        )
    taken = inspect.signature(transformers.BitsAndBytesConfig).parameters if asked else BITS
    found = {one: rest.pop(one) for one in [*rest] if one in taken}
    return transformers.BitsAndBytesConfig(**found) if asked else None


BITS = ("load_in_8bit", "load_in_4bit")


def models(module: ModuleType, recorder: Watcher) -> list[Patch]:
    """For `transformers.modeling_utils`."""

    def from_pretrained(cls: Any, *args: Any, **given: Any) -> Any:
        name, *rest = args or (given.pop("pretrained_model_name_or_path", None),)
        return load(cls, name, tuple(rest), given, recorder)

    return [(module.PreTrainedModel, "from_pretrained", classmethod(from_pretrained))]


def load(
    cls: Any, name: Any, args: tuple[Any, ...], given: dict[str, Any], recorder: Watcher
) -> Any:
    """The model of `name` as the class builds it, in the dtype, with the attention, quantized and
    placed as asked."""
    for one in SPREAD:
        if given.pop(one, None) is not None:
            raise CannotFollow(
                f"a trace of a script does not follow `{one}`, which splits a model over GPUs",
                "`memfit estimate MODEL --use tp=2` predicts tensor parallelism",
            )
    config, rest = config_of(cls, name, given)
    asked = (
        in_bits(rest, TRANSFORMERS < (5, 0))
        or rest.pop("quantization_config", None)
        or getattr(config, "quantization_config", None)
    )
    wanted = job_of(asked)
    if getattr(asked, "dequantize", False) and getattr(config, "dtype", None) is None:
        config.dtype = torch.bfloat16  # as such checkpoints store what is not quantized
    dtype = dtype_of(rest, config, quantized=wanted is not None)
    place, info = rest.pop("device_map", None), given.get("output_loading_info")
    build = {
        key: rest.pop(key)
        for key in ("attn_implementation", "experts_implementation", "use_flash_attention_2")
        if key in rest
    }
    for key in READING:
        rest.pop(key, None)
    model = cls._from_config(config, **{DTYPE: dtype}, **build, **rest)
    kept_wide(model, dtype)
    if getattr(config, "model_type", "") == "whisper":
        multilingual(model)
    model.config.name_or_path = str(name)
    model.name_or_path = str(name)
    if wanted is not None:
        place = {"": 0} if place is None else place
        quantize(model, asked, wanted)
    put(model, place, recorder)
    model.eval()
    return (
        (
            model,
            {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []},
        )
        if info
        else model
    )


DTYPES = ("dtype", "torch_dtype")


def config_of(cls: Any, name: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config, and the arguments that it did not take."""
    import copy

    import transformers

    config = given.pop("config", None)
    base = getattr(transformers, "PretrainedConfig", None) or transformers.PreTrainedConfig
    if isinstance(config, base):
        return copy.deepcopy(config), given
    kind = getattr(cls, "config_class", None) or transformers.AutoConfig
    # `auto` would take the place of the config's own dtype before transformers 5
    own = {key: one for key, one in given.items() if key not in DTYPES or one != "auto"}
    found, rest = kind.from_pretrained(
        name if config is None else config, return_unused_kwargs=True, **own
    )
    return found, {
        **rest,
        **{
            key: given[key]
            for key in ("device_map", "quantization_config", "dtype", "torch_dtype")
            if key in given
        },
    }


def dtype_of(rest: dict[str, Any], config: Any, *, quantized: bool) -> Any:
    """`auto` is the checkpoint's own, which its config names. Without a word it was fp32 before
    transformers 5, fp16 where quantized."""
    asked = [rest.pop(key, None) for key in DTYPES]
    found = asked[0] if asked[0] is not None else asked[1]
    if found is None and TRANSFORMERS < (5, 0):
        found = torch.float16 if quantized else torch.float32
    if found is None or found == "auto":
        found = (
            getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
        )
    if isinstance(found, dict):
        found = found.get("", torch.float32)
    return getattr(torch, found) if isinstance(found, str) else found


ENGLISH = 51864  # tokens of a Whisper that knows no other language; newer ones have one more
TRANSCRIBE = 50359  # of the others; a language more moves it by one (large-v3)


def multilingual(model: Any) -> None:
    """What Whisper's generation config says of languages and tasks (openai/whisper tokenizer.py
    `get_tokenizer`: `<|startoftranscript|>`, a token for each language, the tasks)."""
    found, size = model.generation_config, int(model.config.vocab_size)
    found.is_multilingual = size > ENGLISH
    if not found.is_multilingual:
        return
    from transformers.models.whisper import tokenization_whisper

    more = size - ENGLISH - 1
    known = [*tokenization_whisper.LANGUAGES][: TRANSCRIBE - 50259 - 1 + more]
    found.lang_to_id = {f"<|{one}|>": 50259 + place for place, one in enumerate(known)}
    found.task_to_id = {"transcribe": TRANSCRIBE + more, "translate": TRANSCRIBE - 1 + more}


def kept_wide(model: Any, dtype: Any) -> None:
    """Modules that a class keeps in fp32 under 16-bit weights."""
    names: list[str] = []
    if dtype == torch.float16:
        names += getattr(model, "_keep_in_fp32_modules", None) or []
    if dtype in (torch.float16, torch.bfloat16):
        names += getattr(model, "_keep_in_fp32_modules_strict", None) or []
    if names:
        for path, parameter in model.named_parameters():
            if any(name in path.split(".") for name in names):
                parameter.data = parameter.data.float()


def job_of(asked: Any) -> Job | None:
    """The quantization asked for, in the words of a Job; None for none."""
    if asked is None:
        return None
    values = asked if isinstance(asked, dict) else asked.to_dict()
    method = str(
        getattr(values.get("quant_method"), "value", values.get("quant_method") or "bitsandbytes")
    )
    if values.get("dequantize") or getattr(asked, "dequantize", False):
        return None  # 16-bit weights from the start (`Mxfp4Config(dequantize=True)`)
    if "bitsandbytes" not in method:
        raise CannotFollow(
            f"a trace does not support weights quantized by `{method}`",
            "use bitsandbytes",
        )
    named = {**values, "quant_method": "bitsandbytes"}
    return Job(**bitsandbytes_options({"quantization_config": named}))


def quantize(model: Any, asked: Any, wanted: Job) -> None:
    prepare.quantized(model, wanted)
    from transformers.quantizers import AutoHfQuantizer

    model.config.quantization_config = asked
    model.is_quantized = True
    with contextlib.suppress(ImportError, ValueError):
        model.hf_quantizer = AutoHfQuantizer.from_config(asked)
        model.quantization_method = model.hf_quantizer.quantization_config.quant_method


def put(model: Any, place: Any, recorder: Watcher) -> None:
    """Onto the GPU, where a device map says so; tensor by tensor, after one request for all of them
    where this version makes one."""
    if place is None or on_cpu(place):
        return
    size = sum(one.numel() * one.element_size() for one in model.parameters())
    if place in PLACING and size > recorder.device.memory:
        message = (
            f"the weights alone need {size / GIB:.1f} GiB; a trace does not support "
            "the CPU offload of `device_map`"
        )
        recorder.note("device_map", message)
    import transformers.modeling_utils as home

    if hasattr(home, "caching_allocator_warmup") and not getattr(model, "is_quantized", False):
        whole = torch.empty(size // 2, dtype=torch.float16, device="cuda")
        del whole
    steps.arrivals(recorder, model)
    steps.own(recorder, "weights", steps.weights(model))
    model.hf_device_map = {"": 0}


def on_cpu(place: Any) -> bool:
    """Whether all goes to the CPU; where only some does, that is not followed."""
    values = list(place.values()) if isinstance(place, dict) else [place]
    places = {
        "cuda" if isinstance(one, int) or str(one) in PLACING else str(one).partition(":")[0]
        for one in values
    }
    for one in values:
        if isinstance(one, int) or str(one).startswith("cuda:"):
            index = one if isinstance(one, int) else int(str(one).partition(":")[2])
            if index > 0:
                from memfit.trace.cuda import NoSuchDevice

                raise NoSuchDevice(index)
    if places == {"cpu"}:
        return True
    if places != {"cuda"}:
        raise CannotFollow(
            f"the device map uses {', '.join(sorted(places))}",
            "a trace runs on one GPU, without offload",
        )
    return False


__all__ = ["configs", "folders", "models"]
