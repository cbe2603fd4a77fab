"""Make the built model into the one that trains: frozen parts, adapters, checkpointing, mixed
precision, as PEFT and accelerate do it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import torch
from memfit.errors import InputError, raise_errors
from memfit.job import Job
from memfit.parallel.tensor.check import copied
from memfit.trace import selective, standins, tensors, versions


def names(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def trainable(model: Any, job: Job, device: str) -> Any:
    """The model with what `job.method` trains; adapters come from PEFT itself."""
    if job.method == "full":
        if job.quantization != "none":
            raise InputError.one(
                "a quantized weight cannot be trained",
                where="job.quant",
                hint="use `--method lora` or `qlora`",
            )
        return model
    if job.method == "freeze":
        wanted = names(job.trainable)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(one in name for one in wanted))
        if not any(one.requires_grad for one in model.parameters()):
            raise InputError.one(
                f"no parameter name contains any of `{job.trainable}`", where="job.trainable"
            )
        return model
    return adapted(model, job, device)


def quantized(model: Any, job: Job) -> Any:
    """Linear layers become bitsandbytes' (their weights still full), but for those that
    transformers or the job leaves out."""
    from transformers.pytorch_utils import Conv1D

    skip = versions.kept_whole(model, names(job.quant_skip))
    kind = model.dtype
    compute = kind if job.quant_compute == "weights" else getattr(torch, job.quant_compute)
    old = job.version("bitsandbytes") < (0, 50)
    for path, module in list(model.named_modules()):
        if not (
            isinstance(module, Conv1D) or type(module) is torch.nn.Linear
        ) or not versions.converts(path, skip):
            continue
        source = transposed(module) if isinstance(module, Conv1D) else module
        made: torch.nn.Module = (
            standins.Linear8bitLt(source)
            if job.quantization == "int8"
            else standins.Linear4bit(
                source, nested=job.double_quant, kind=job.quantization, compute=compute, old=old
            )
        )
        made.requires_grad_(False)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, made)
    for one in (
        one.config for one in model.modules() if hasattr(one, "config")
    ):  # quantizers/base.py, and before transformers 5
        one._is_quantized = True
        if versions.TRANSFORMERS < (5, 0):  # a later config is no JSON with it
            one._pre_quantization_dtype = kind
        setattr(one, versions.DTYPE, kind)
    setattr(model, "is_loaded_in_8bit" if job.quantization == "int8" else "is_loaded_in_4bit", True)
    return model


def transposed(module: Any) -> torch.nn.Linear:
    """GPT-2's `Conv1D` as the linear layer that quantization makes of it."""
    with torch.device("meta"):
        made = torch.nn.Linear(
            module.weight.shape[0],
            module.weight.shape[1],
            bias=module.bias is not None,
            dtype=module.weight.dtype,
        )
    made.bias = module.bias
    return made


def kbit(model: Any, job: Job) -> Any:
    """PEFT's own preparation of a quantized model: everything frozen, 16-bit leftovers in fp32."""
    from peft import prepare_model_for_kbit_training

    checkpointing = job.checkpointing != "none"
    return prepare_model_for_kbit_training(
        model,
        use_gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": job.reentrant},
    )


def adapted(model: Any, job: Job, device: str) -> Any:
    from peft import LoraConfig, get_peft_model

    raise_errors(list(copied(tensors.named(model, names(job.modules_to_save)))))
    targets: Any = job.targets if job.targets == "all-linear" else names(job.targets)
    without = left_out(model, job)
    settings = LoraConfig(
        **({"exclude_modules": without} if without else {}),
        r=job.rank,
        lora_alpha=job.alpha,
        lora_dropout=job.dropout,
        target_modules=targets,
        modules_to_save=names(job.modules_to_save) or None,
        use_rslora=job.rslora,
        task_type=purpose(model),
    )
    try:
        with torch.device(device), standins.installed(model):
            wanted = {"autocast_adapter_dtype": job.adapter_dtype == "float32"}
            known = inspect.signature(get_peft_model).parameters  # it is there since PEFT 0.12
            return as_trl(
                get_peft_model(
                    model,
                    settings,
                    **{name: value for name, value in wanted.items() if name in known},
                ),
                job,
            )
    except ValueError as bad:
        raise InputError.one(
            " ".join(str(bad).split())[:300].rstrip("."), where="job.targets"
        ) from None


def left_out(model: Any, job: Job) -> list[str]:
    """The last names of linear layers that `all-linear` means and PEFT does not adapt: those that
    it refuses for this type of model (Mamba's `out_proj`), and those of classes whose forward is
    their own (routers that return a pair, grouped products), at which it stops."""
    if not job.training or not job.adapters or job.targets != "all-linear":
        return []
    found = {
        path.rpartition(".")[2]: module
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    return sorted(name for name, one in found.items() if own_forward(one) or forbidden(model, name))


def own_forward(module: torch.nn.Module) -> bool:
    kind = type(module)
    ours = kind.__module__.startswith(("torch.", "memfit.", "bitsandbytes."))
    fp8 = kind.__module__.endswith("finegrained_fp8") and "Grouped" not in kind.__name__
    if ours or fp8 or kind.forward is torch.nn.Linear.forward:
        return False
    return "Grouped" in kind.__name__ or returns_several(kind)


def returns_several(kind: type) -> bool:
    """Whether a layer's forward returns a tuple, to which PEFT cannot add an adapter's output.
    Falcon's own linear layer returns one tensor, and is adapted."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError):
        return True
    found = (one.value for one in ast.walk(tree) if isinstance(one, ast.Return))
    return any(isinstance(value, ast.Tuple) for value in found)


def forbidden(model: Any, name: str) -> bool:
    """By PEFT's own check, which came with 0.17."""
    from peft import LoraConfig
    from peft.tuners import tuners_utils

    check = getattr(tuners_utils, "_check_lora_target_modules_mamba", None)
    if check is None:
        return False
    try:
        check(LoraConfig(), model, name)
    except ValueError:
        return True
    return False


# peft 0.21 peft_model.py, documentation of `TaskType`.
PURPOSES = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


def purpose(model: Any) -> str | None:
    """The `task_type` that PEFT's documentation gives to models of this kind; it decides which
    wrapper calls them, and that a head of labels is trained whole. Encoders and models that hear
    get the plain wrapper."""
    for end, kind in PURPOSES.items():
        if type(model).__name__.endswith(end):
            return kind
    if getattr(model, "main_input_name", "input_ids") == "input_features" or not hasattr(
        model, "prepare_inputs_for_generation"
    ):
        return None
    return "SEQ_2_SEQ_LM" if getattr(model.config, "is_encoder_decoder", False) else "CAUSAL_LM"


def as_trl(model: Any, job: Job) -> Any:
    """What TRL does to a packed model behind PEFT: from 0.26 on everything trained becomes bfloat16
    (trainer/sft_trainer.py); before, embeddings and head by their usual names, for 4 bits under
    bf16 autocast (0.13 trainer/utils.py peft_module_casting_to_bf16)."""
    if job.framework != "trl" or job.quantization == "none":
        return model
    if job.version("trl") >= (0, 26):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    elif job.prepared and job.quantization != "int8" and job.autocast and "bf16" in job.precision:
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            usual = (
                any(part in name for part in ("lm_head", "embed_tokens", "wte", "wpe"))
                and "norm" not in name
            )
            if usual and weight is not None and weight.dtype == torch.float32:
                module.to(torch.bfloat16)
    return model


def checkpointed(model: Any, job: Job) -> None:
    """Gradient checkpointing by the model's own method, with the arguments that its version
    takes."""
    if job.checkpointing == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": job.reentrant}
    if job.checkpointing == "selective":
        if job.reentrant:
            raise InputError.one(
                "selective checkpointing cannot be reentrant",
                where="job.reentrant",
                hint="`--no-reentrant`",
            )
        settings["context_fn"] = selective.contexts
    every = job.checkpoint_every if job.checkpointing == "every" else 1
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    try:
        if hasattr(base, "activation_checkpointing_enable"):
            base.activation_checkpointing_enable(settings, every_n_layers=every)
        elif every > 1:
            raise InputError.one(
                "this transformers version checkpoints every layer or none",
                where="job.checkpoint_every",
                hint="use 1",
            )
        else:
            base.gradient_checkpointing_enable(settings)
    except ValueError as bad:
        raise InputError.one(str(bad)[:200].rstrip("."), where="job.checkpointing") from None
    if job.adapters and job.reentrant and not getattr(base, "_require_grads_hook", None):
        base.enable_input_require_grads()


def mixed(model: Any, job: Job, device: str) -> Any:
    """The callable that runs a forward: under autocast with outputs made fp32, as accelerate wraps
    it, or the model itself."""
    if not job.autocast:
        return model
    from accelerate.utils.operations import convert_outputs_to_fp32

    dtype = torch.bfloat16 if "bf16" in job.precision else torch.float16
    return convert_outputs_to_fp32(torch.autocast(device, dtype=dtype)(model))


def accepts(model: Any, name: str) -> bool:
    """Whether the forward of the model (under its adapters) takes an argument of that name."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return name in inspect.signature(base.forward).parameters
