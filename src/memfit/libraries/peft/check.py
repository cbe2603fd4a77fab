"""LoRA in PEFT: the base is frozen, and adapters run next to the linear layers, in fp32 unless an
option says otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from memfit.errors import Level, Problem
from memfit.job import Job
from memfit.lower.load import idle_linears
from memfit.model.model import Model
from memfit.model.modules import Embedding
from memfit.program import Adapter, Program
from memfit.registry import nearest
from memfit.techniques.base import TRACE, Overlay, Technique, names
from memfit.techniques.inputs import head_of

UPCAST = (
    0,
    12,
    # the first peft that keeps adapters in fp32 over a 16-bit base (peft_model.py
    # autocast_adapter_dtype)
)


def apply(program: Program) -> Program:
    job = program.job
    wide = job.adapter_dtype == "float32" and job.version("peft") >= UPCAST
    targets, parameters = fused(program, frozenset(names(job.targets)))
    # TRL from 0.26 on makes all that is trained beside a packed model 16-bit (trl 0.26
    # trainer/sft_trainer.py).
    narrow = job.framework == "trl" and job.version("trl") >= (0, 26) and job.quantization != "none"
    adapter = Adapter(
        rank=job.rank,
        dropout=job.dropout,
        format="bfloat16" if narrow else "float32" if wide else program.weights,
        narrow=narrow,
        targets=targets,
        parameters=parameters,
        everywhere=job.targets == "all-linear" and not parameters,
        excluded=left_out(program),
        saved=(*names(job.modules_to_save), *program.model.whole),
        scaling=job.alpha / (job.rank**0.5 if job.rslora else job.rank),
    )
    return program.replace(adapter=adapter, trained=())


def left_out(program: Program) -> tuple[str, ...]:
    """Ends of paths that `all-linear` leaves out: what PEFT refuses for Mamba, and routers that
    return more than one tensor."""
    if program.model.family in MAMBA:
        return (".out_proj",)
    router = TUPLES.get(program.model.family)
    return (router,) if router and program.job.version("transformers") >= (5, 0) else ()


def fused(
    program: Program, targets: frozenset[str]
) -> tuple[frozenset[str], tuple[tuple[str, int], ...]]:
    """Where transformers 5 keeps experts in stacks and older versions kept linear layers, PEFT
    turns the old names into the stacks' own, and lets go of them everywhere else: `all-linear` then
    means attention, experts and router, but no dense feed-forward (peft 0.21
    utils/transformers_weight_conversion.py). Two matrices in one stack get twice the rank."""
    mapping = FUSED.get(program.model.family)
    everywhere = program.job.targets == "all-linear"
    if mapping is None or not converts(program.job):
        return frozenset() if everywhere else targets, ()
    if everywhere:
        linears = {linear.name for layer, _ in program.model.kinds for linear in layer.linears()}
        linears |= {
            linear.name
            for module in (*program.model.embed, *program.model.final)
            for linear in module.linears()
        }
        linears |= {one.name for one in idle_linears(program.model.towers)}
        targets = frozenset({name.rsplit(".", 1)[-1] for name in linears} | mapping.keys())
    found = {
        target: new
        for target in targets
        for old, new in mapping.items()
        if target == old or target.endswith(f".{old}")
    }
    matrices = {new: sum(other == new for other in mapping.values()) for new in found.values()}
    ranks = tuple((new, program.job.rank * count) for new, count in sorted(matrices.items()))
    return frozenset(target for target in targets if target not in found), ranks


def check(program: Program) -> Iterator[Problem]:
    adapter = program.adapter
    assert adapter is not None
    if adapter.parameters and adapter.dropout:
        message = "PEFT does not support dropout on adapters of stacked experts"
        yield Problem(
            message=message, where="job.dropout", hint="use 0, or `targets` of attention only"
        )
    yield from routers(program)
    yield from half_fused(program)
    yield from packed_and_saved(program)
    yield from adapted_and_saved(program)
    yield from blocks_of_towers(program)
    yield from without_linear(program, adapter.targets)
    yield from without_module(program.model, adapter.saved)


def without_linear(program: Program, targets: frozenset[str]) -> Iterator[Problem]:
    """Targets that no linear layer has."""
    model = program.model
    linears = {linear.name for layer, _ in model.kinds for linear in layer.linears()}
    linears |= {
        linear.name
        for module in (*model.embed, *model.final, model.head)
        for linear in module.linears()
    }
    matched = {
        target
        for target in targets
        if any(name == target or name.endswith(f".{target}") for name in linears)
    }
    for target in sorted(targets - matched):
        if any(
            isinstance(module, Embedding) and module.name.endswith(target) for module in model.embed
        ):
            yield Problem(
                message=f"not supported yet: an adapter on the embedding `{target[:60]}`",
                where="job.targets",
                hint=TRACE,
            )
        elif any(part.isdigit() for part in target.split(".")):
            yield Problem(
                message=f"`{target[:60]}` names one layer, but adapters are added to all",
                where="job.targets",
                hint=TRACE,
            )
        else:
            yield unmatched(program, target, linears, alone=not matched)


def without_module(model: Model, saved_modules: Iterable[str]) -> Iterator[Problem]:
    """Modules to save that the model does not have, or that are the model itself."""
    paths = module_paths(model)
    for saved in saved_modules:
        if f"{model.prefix}.0".endswith(saved) or any(
            part.endswith(saved) for part in whole(model.prefix)
        ):
            yield Problem(
                message=f"`{saved[:60]}` is the model itself",
                where="job.modules_to_save",
                hint="use `--method full` to train it all",
            )
        elif not any(path.endswith(saved) for path in paths):
            close = nearest(saved, sorted({path.rsplit(".", 1)[-1] for path in paths}))
            hint = (
                "did you mean " + ", ".join(f"`{one}`" for one in close) + "?"
                if close
                else "for example `lm_head` or `embed_tokens`"
            )
            yield Problem(
                message=f"no module's path ends with `{saved[:60]}`",
                where="job.modules_to_save",
                hint=hint,
            )


def routers(program: Program) -> Iterator[Problem]:
    """A router that is a linear layer gives more than a tensor, which PEFT's layer then asks for
    its dtype (peft 0.21 tuners/lora/layer.py Linear.forward)."""
    adapter, name = program.adapter, TUPLES.get(program.model.family, "")
    assert adapter is not None
    if not name or program.job.version("transformers") < (5, 0):
        return
    if adapter.everywhere:
        yield Problem(
            message=f"`all-linear` leaves out `{name}`, which PEFT cannot adapt in this model",
            where="job.targets",
            level="note",
            hint="the real run needs `exclude_modules` in its LoraConfig",
        )
    elif any(f".{name}".endswith(f".{target}") for target in adapter.targets):
        message = f"PEFT cannot add an adapter to `{name}`, which returns more than one tensor"
        yield Problem(
            message=message,
            where="job.targets",
            hint="choose `targets` without it, for example those of attention",
        )


def packed_and_saved(program: Program) -> Iterator[Problem]:
    """Packed weights take no gradient."""
    adapter, model = program.adapter, program.model
    assert adapter is not None
    if program.quant is None or not adapter.saved:
        return
    places = [
        (f"{model.prefix}.0.{linear.name}", linear)
        for layer, _ in model.kinds
        for linear in layer.linears()
    ]
    places += [
        (linear.name, linear)
        for module in (*model.embed, *model.final, model.head)
        for linear in module.linears()
    ]
    packed = {path for path, linear in places if program.quantized(linear, path)}
    heads = [one for one in model.whole if any(f"{path}.".startswith(f"{one}.") for path in packed)]
    if heads:
        message = f"PEFT cannot train the head `{heads[0]}`, because bitsandbytes quantizes it"
        hint = f"use `--quant-skip {heads[0]}`"
        yield Problem(message=message, where="job.quant_skip", hint=hint)
    elif any(map(adapter.saves, packed)):
        message = "a module in `modules_to_save` is quantized"
        yield Problem(
            message=message,
            where="job.modules_to_save",
            hint="add it to `quant_skip` (with the head, which is skipped by default)",
        )


def adapted_and_saved(program: Program) -> Iterator[Problem]:
    """A module to save is the end of a path, while only the name of a whole module keeps adapters
    away: `classifier` saves `pre_classifier`, too (peft 0.21 tuners/tuners_utils.py
    check_target_module_exists, utils/other.py _set_trainable)."""
    adapter, model = program.adapter, program.model
    assert adapter is not None
    head = head_of(program)
    if adapter.everywhere and head != "classification":
        # `all-linear` leaves out the heads of SEQ_CLS alone (_maybe_include_all_linear_layers)
        for name in model.whole:
            message = f"PEFT cannot train `{name}` whole when `all-linear` adds an adapter to it"
            hint = "choose `targets` without it, for example those of attention"
            yield Problem(message=message, where="job.targets", hint=hint)
    free = program.replace(adapter=replace(adapter, saved=()))
    for module in (*model.embed, *model.final):
        for linear in module.linears():
            named = any(f".{linear.name}.".find(f".{one}.") >= 0 for one in adapter.saved)
            if adapter.saves(linear.name) and not named and free.adapted(linear):
                message = f"PEFT cannot both train `{linear.name}` whole and add an adapter to it"
                hint = "choose `targets` without it, for example those of attention"
                yield Problem(message=message, where="job.targets", hint=hint)


def blocks_of_towers(program: Program) -> Iterator[Problem]:
    """A target is every module whose path ends with its name, also in a tower, and PEFT stops at
    one that only holds a linear layer (peft 0.21 tuners/lora/model.py _create_new_module)."""
    if program.job.targets == "all-linear":
        return
    paths = (weight.name.rpartition(".")[0] for weight in program.model.towers)
    blocks = dict.fromkeys(path.rpartition(".")[0] for path in paths)
    for target in sorted(names(program.job.targets)):
        block = next((one for one in blocks if f".{one}".endswith(f".{target}")), "")
        if block:
            message = f"PEFT cannot adapt `{block}`, whose path ends with `{target[:60]}`"
            hint = "use `--targets all-linear`: this module only holds a linear layer"
            yield Problem(message=message, where="job.targets", hint=hint)


def converts(job: Job) -> bool:
    return job.version("transformers") >= (5, 0) and job.version("peft") >= (0, 19)


def unmatched(program: Program, target: str, linears: set[str], alone: bool) -> Problem:
    """A target that is no linear layer. PEFT stops at another module of that name, skips a name
    that no module has, and stops if no target is left (peft 0.21 tuners/lora/model.py
    `_create_new_module`, tuners/tuners_utils.py `inject_adapter`)."""
    known = sorted({name.rsplit(".", 1)[-1] for name in linears})
    other = any(f".{path}".endswith(f".{target}") for path in module_paths(program.model))
    stops = other and "conv" not in target  # PEFT adapts convolutions
    inside = {name.rpartition(".")[2] for name in linears if f".{target}." in f".{name}"}
    close = sorted(inside) if inside else nearest(target, known) or known
    hint = "there are " + ", ".join(f"`{one}`" for one in close[:8])
    message = f"no linear layer is named `{target[:60]}`"
    level: Level = "warning"
    if stops:
        message, level = f"`{target[:60]}` is not a linear layer, so PEFT stops at it", "error"
        hint = f"name its layers: {', '.join(close[:8])}" if inside else hint
    elif not alone or (program.adapter is not None and program.adapter.parameters):
        message += ", so PEFT skips it"
    else:
        level = "error"
    return Problem(message=message, where="job.targets", hint=hint, level=level)


def half_fused(program: Program) -> Iterator[Problem]:
    """PEFT refuses one of two matrices that share a stack."""
    mapping = FUSED.get(program.model.family, {})
    targets = names(program.job.targets)
    if program.job.targets == "all-linear" or not converts(program.job):
        return
    for stack in sorted(set(mapping.values())):
        olds = [old for old, new in mapping.items() if new == stack]
        missing = [
            old
            for old in olds
            if not any(target == old or target.endswith(f".{old}") for target in targets)
        ]
        if 0 < len(missing) < len(olds):
            message = (
                f"`{olds[0]}` and `{olds[1]}` are stored in one stack, `{stack}`, and "
                "share an adapter"
            )
            yield Problem(message=message, where="job.targets", hint=f"add `{missing[0]}`")


def module_paths(model: Model) -> set[str]:
    """Every module that has parameters: in a layer by its path there, else by its full one."""
    found = [weight.name for layer, _ in model.kinds for weight in layer.weights()]
    found += [
        weight.name
        for module in (*model.embed, *model.final, model.head)
        for weight in module.weights()
    ]
    return {path for name in found for path in whole(name.rpartition(".")[0])}


def whole(path: str) -> list[str]:
    """`a.b.c` as `a`, `a.b` and `a.b.c`."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


# Their kernels read this matrix themselves (peft 0.21 tuners/tuners_utils.py
# _check_lora_target_modules_mamba).
MAMBA = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
MIXTRAL = {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
QWEN2_MOE = {
    "gate": "gate.weight",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}
# Of the families here, those in transformers 5.23 conversion_mapping.py
# _MODEL_TO_CONVERSION_PATTERN (and mixtral, which PEFT adds).
FUSED = {
    "afmoe": QWEN2_MOE,
    "cohere2_moe": QWEN2_MOE,
    "mellum": QWEN2_MOE,
    "mixtral": MIXTRAL,
    "minimax_m2": MIXTRAL,
    "deepseek_v2": QWEN2_MOE,
    "deepseek_v3": QWEN2_MOE,
    "deepseek_v32": QWEN2_MOE,
    "dots1": QWEN2_MOE,
    "ernie4_5_moe": QWEN2_MOE,
    "exaone_moe": QWEN2_MOE,
    "flex_olmo": QWEN2_MOE,
    "glm4_moe": QWEN2_MOE,
    "glm4_moe_lite": QWEN2_MOE,
    "glm4v_moe": QWEN2_MOE,
    "glm_moe_dsa": QWEN2_MOE,
    "hunyuan_v1_moe": QWEN2_MOE,
    "minimax": MIXTRAL,
    "olmoe": QWEN2_MOE,
    "qwen3_moe": QWEN2_MOE,
    "qwen3_next": QWEN2_MOE,
    "solar_open": QWEN2_MOE,
}
TUPLES = {"phimoe": "mlp.router"}  # transformers 5.23 modeling_phimoe.py PhimoeTopKRouter
TECHNIQUE = Technique(
    name="lora",
    order=80,
    cite="peft 0.21 tuners/lora/layer.py",
    wanted=lambda job: job.adapters,
    apply=apply,
    check=check,
    overlays=(
        Overlay(
            module="memfit.libraries.peft.merge",
            applies=lambda program: program.adapter is not None,
        ),
    ),
)
