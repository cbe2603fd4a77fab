"""The optimizer of a Job: torch's, transformers', PEFT's and third-party packages' own code, and
stand-ins where kernels need a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from memfit.errors import InputError
from memfit.job import Job
from memfit.optimizers import OPTIMIZERS
from memfit.trace import lowbit
from memfit.trace.lowbit import BlockwiseOptimizer
from memfit.trace.meshes import by_mesh

TORCH: Mapping[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adamw_fused": ("AdamW", {"fused": True}),
    "adamw_loop": ("AdamW", {"foreach": False}),
    "adam": ("Adam", {}),
    "adam_fused": ("Adam", {"fused": True}),
    "sgd": ("SGD", {"lr": 1e-3}),
    "sgd_fused": ("SGD", {"lr": 1e-3, "fused": True}),
    "sgd_momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "rmsprop": ("RMSprop", {}),
    "adagrad": ("Adagrad", {}),
    "adagrad_fused": ("Adagrad", {"fused": True}),
    "adadelta": ("Adadelta", {}),
    "adamax": ("Adamax", {}),
    "nadam": ("NAdam", {}),
    "radam": ("RAdam", {}),
    "rprop": ("Rprop", {}),
    "asgd": ("ASGD", {}),
    "adafactor_torch": ("Adafactor", {}),
}
OWN = (
    "adafactor",
    "muon",
    "loraplus",
    "lorafa",
    "riemannian",
)  # transformers', torch's and PEFT's, which no kernel of a package runs
# What the Trainer of transformers makes of a third-party package, and what to install for it.
PACKAGES = {
    "galore": ("galore_torch", "galore-torch"),
    "apollo": ("apollo_torch", "apollo-torch"),
    "lomo": ("lomo_optim", "lomo-optim"),
    "adalomo": ("lomo_optim", "lomo-optim"),
    "schedule": ("schedulefree", "schedulefree"),
    "stable": ("optimi", "torch-optimi"),
}
# bitsandbytes' by their names in transformers: states, bits and whether they are paged
BITSANDBYTES: Mapping[str, dict[str, Any]] = {
    "adamw_8bit": {"states": 2},
    "paged_adamw_8bit": {"states": 2, "paged": True},
    "paged_adamw": {"states": 2, "bits": 32, "paged": True},
    "lion_8bit": {"states": 1},
    "lion_32bit": {"states": 1, "bits": 32},
    "paged_lion_8bit": {"states": 1, "paged": True},
    "paged_lion_32bit": {"states": 1, "bits": 32, "paged": True},
    "ademamix": {"states": 2, "bits": 32, "doubled": True},
    "ademamix_8bit": {"states": 2, "doubled": True},
    "paged_ademamix_32bit": {"states": 2, "bits": 32, "paged": True, "doubled": True},
    "paged_ademamix_8bit": {"states": 2, "paged": True, "doubled": True},
    "rmsprop_bnb": {"states": 1, "bits": 32},
    "rmsprop_bnb_8bit": {"states": 1},
}


PROJECTED = ("galore_torch", "apollo_torch")  # gradients of linear layers, whichever they are
FRESH = "update_proj_gap=1"  # every step makes the projections anew, as one in 200 does
STEADY = 10


class Lion(torch.optim.Optimizer):
    """lion-pytorch 0.2's update, parameter by parameter: one state, and the interpolated sign as
    the temporary."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                if not self.state[one]:
                    self.state[one]["exp_avg"] = torch.zeros_like(one)
                average = self.state[one]["exp_avg"]
                one.mul_(1.0)
                one.add_(average.clone().mul_(0.9).add(one.grad, alpha=0.1).sign_(), alpha=-1e-4)
                average.mul_(0.99).add_(one.grad, alpha=0.01)


class Both:
    """Several optimizers that step one after the other."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    @property
    def state(self) -> dict[Any, Any]:
        return {key: value for part in self.parts for key, value in part.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


def trained(model: Any) -> list[torch.Tensor]:
    return [one for one in model.parameters() if one.requires_grad]


def of_torch(name: str, model: Any, job: Job) -> Any:
    kind, given = TORCH[name]
    made = getattr(torch.optim, kind, None)
    if made is None:
        raise InputError.one(
            f"this torch version has no `{kind}`", where="job.optimizer", hint="use a newer version"
        )
    groups = by_mesh(trained(model))
    return made(groups[0] if len(groups) == 1 else [{"params": group} for group in groups], **given)


def adafactor(name: str, model: Any, job: Job) -> Any:
    """As the Trainer makes it."""
    from transformers.optimization import Adafactor

    return Adafactor(trained(model), lr=1e-3, scale_parameter=False, relative_step=False)


def bitsandbytes(name: str, model: Any, job: Job) -> Any:
    wide = (
        [one.weight for one in model.modules() if isinstance(one, torch.nn.Embedding)]
        if "bits" not in BITSANDBYTES[name]
        else []
    )
    kind = name.removeprefix("paged_").partition("_")[0]
    return BlockwiseOptimizer(trained(model), wide=wide, kind=kind, **BITSANDBYTES[name])


def torchao(name: str, model: Any, job: Job) -> Any:
    return lowbit.TorchaoAdamW(trained(model), bits=4 if "4bit" in name else 8)


def muon(name: str, model: Any, job: Job) -> Any:
    """Matrices of hidden layers by Muon, all else by AdamW, as its documentation asks (torch 2.13
    optim/_muon.py)."""
    ends = {
        id(one)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        for one in module.parameters()
    }
    head = model.get_output_embeddings()
    ends |= set() if head is None else {id(one) for one in head.parameters()}
    matrices = [one for one in trained(model) if one.ndim == 2 and id(one) not in ends]
    inner = {id(one) for one in matrices}
    rest = [one for one in trained(model) if id(one) not in inner]
    parts = [torch.optim.Muon(matrices)] if matrices else []
    return Both(*parts, *([torch.optim.AdamW(rest)] if rest else []))


def of_peft(name: str, model: Any, job: Job) -> Any:
    from peft import optimizers

    made = getattr(optimizers, f"create_{name}_optimizer", None)
    if made is None:
        raise InputError.one(
            f"this PEFT version has no `create_{name}_optimizer`",
            where="job.optimizer",
            hint="use a newer version",
        )
    if name == "lorafa":
        return made(model, r=job.rank, lora_alpha=int(job.alpha), lr=1e-4)
    more = {"loraplus_lr_ratio": 16.0} if name == "loraplus" else {}
    return made(model, torch.optim.AdamW, lr=1e-4, **more)


def by_trainer(name: str, model: Any, job: Job) -> Any:
    """What `Trainer.create_optimizer` makes, from the Trainer's own table; every linear layer is
    projected, its own default rank."""
    module, package = PACKAGES[name.partition("_")[0]]
    if importlib.util.find_spec(module) is None:
        message = f"optimizer `{name}` needs the package {package}, which is not installed"
        raise InputError.one(
            message,
            where="job.optimizer",
            hint=f"run `pip install {package}`, or use `--by formula`",
        )
    with standing(module):
        made = of_trainer(name, model, FRESH if module in PROJECTED else None)
    settle(made)
    return made


def of_trainer(name: str, model: Any, settings: str | None = None) -> Any:
    """`optim=name` of TrainingArguments, as the Trainer makes it."""
    from transformers import Trainer
    from transformers.training_args import OptimizerNames, ParallelMode

    asked = SimpleNamespace(
        optim=OptimizerNames(name),
        optim_args=settings,
        optim_target_modules="all-linear",
        learning_rate=1e-4,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        warmup_steps=0,
        gradient_accumulation_steps=1,
        parallel_mode=ParallelMode.NOT_PARALLEL,
    )
    kind, given = Trainer.get_optimizer_cls_and_kwargs(asked, model)
    over = given.pop("optimizer_dict", None)
    for key in ("params", "model"):
        found = given.pop(key, None)
        over = found if over is None else over
    return kind(trained(model) if over is None else over, **given)


@contextlib.contextmanager
def standing(module: str) -> Iterator[None]:
    """GaLore and APOLLO import bitsandbytes, whose kernels need a GPU: they get the stand-in, once
    and for all."""
    from memfit.trace import bnb

    if module not in PROJECTED:
        yield
        return
    before = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.partition(".")[0] == "bitsandbytes"
    }
    try:
        with bnb.installed():
            yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
            del sys.modules[name]
        sys.modules.update(before)


def settle(made: Any) -> None:
    """As far on as a run is after some steps: schedule-free RAdam divides from the fifth on;
    Triton's kernels run, in place."""
    for group in made.param_groups:
        if "train_mode" in group:
            group["train_mode"] = True
            group["k"] = STEADY
        if type(made).__module__ == "optimi.stableadamw":
            group["triton"] = True
            vars(sys.modules["optimi.stableadamw"]).setdefault(
                "_triton_stableadamw", lambda *_, **__: None
            )


def makers() -> dict[str, Callable[[str, Any, Job], Any]]:
    """Who makes the optimizer of each name."""
    found: dict[str, Callable[[str, Any, Job], Any]] = dict.fromkeys(TORCH, of_torch)
    found |= dict.fromkeys(BITSANDBYTES, bitsandbytes)
    found |= dict.fromkeys(OWN[2:], of_peft)
    found |= {
        "adafactor": adafactor,
        "lion": lambda name, model, job: Lion(trained(model)),
        "muon": muon,
    }
    found |= dict.fromkeys(("adamw_torch_8bit", "adamw_torch_4bit"), torchao)
    found["grokadamw"] = lambda name, model, job: lowbit.Grok(trained(model))
    found["adamw_anyprecision"] = lambda name, model, job: lowbit.AnyPrecision(trained(model))
    return found | {
        name: by_trainer
        for name in OPTIMIZERS
        if name.partition("_")[0] in PACKAGES and name not in found
    }


def optimizer_of(model: Any, job: Job) -> Any:
    """The job's optimizer over the trainable parameters."""
    name = OPTIMIZERS.find(job.optimizer).name
    if job.precision == "bf16-master":
        return Master(model, lambda copies: makers()[name](name, copies, job))
    return makers()[name](name, model, job)


class Copies(torch.nn.Module):
    """fp32 copies in the place of the parameters that are trained."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.sources = trained(model)
        for index, one in enumerate(self.sources):
            self.register_parameter(str(index), torch.nn.Parameter(one.detach().clone().float()))


class Master:
    """Steps on fp32 copies of 16-bit parameters: each gradient is made fp32 and goes, the copies go
    back into the parameters (megatron/core/optimizer/optimizer.py
    Float16OptimizerWithFloat16Params, without its fused kernels)."""

    def __init__(self, model: Any, make: Callable[[Any], Any]) -> None:
        self.copies = Copies(model)
        self.pairs = list(zip(self.copies.sources, self.copies.parameters(), strict=True))
        self.inner = make(self.copies)
        self.tell: Callable[[list[Any]], None] = lambda gradients: None

    @property
    def state(self) -> dict[Any, Any]:
        return {self.names.get(id(key), key): value for key, value in self.inner.state.items()}

    @property
    def names(self) -> dict[int, Any]:
        return {id(copy): source for source, copy in self.pairs}

    def masters(self) -> list[torch.Tensor]:
        return [copy for _, copy in self.pairs]

    @torch.no_grad()
    def step(self) -> None:
        for source, copy in self.pairs:
            if source.grad is not None:
                copy.grad, source.grad = source.grad.float(), None
        self.tell([copy.grad for copy in self.masters() if copy.grad is not None])
        self.inner.step()
        for source, copy in self.pairs:
            copy.grad = None
            source.copy_(copy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for source, _ in self.pairs:
            source.grad = None


def backward(optimizer: Any, loss: torch.Tensor) -> None:
    """Some optimizers step while backward runs, and so run it themselves."""
    fused = getattr(optimizer, "fused_backward", None)
    if fused is None:
        loss.backward()
    else:
        fused(loss, 1e-4)


def stepped(optimizer: Any) -> None:
    """accelerate passes over the step of one that has stepped in backward (accelerate 1.15
    optimizer.py)."""
    if not hasattr(optimizer, "fused_backward"):
        optimizer.step()


def kept_of(optimizer: Any) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """All that an optimizer keeps, by parameter where it says so; projections are attributes of an
    object in the state."""
    parts = [optimizer, *(getattr(optimizer, "optimizer_dict", None) or {}).values()]
    for part in parts:
        for parameter, state in part.state.items():
            if isinstance(state, dict):
                held = [
                    *state.values(),
                    *(value for one in state.values() for value in vars_of(one)),
                ]
                yield parameter, [one for one in held if isinstance(one, torch.Tensor)]
        for name in (
            "exp_avg_sq",
            "exp_avg_sq_row",
            "exp_avg_sq_col",
        ):  # AdaLomo's, by the parameters' names
            yield None, list(getattr(part, name, {}).values())


def vars_of(one: Any) -> list[Any]:
    return list(vars(one).values()) if hasattr(one, "ortho_matrix") else []
