"""Optimizers, a row each: what they keep per parameter, and what their step holds for a moment.

A step is written in words. `x` makes a temporary called x, like the parameter; where there is one
of that name, it goes when the new one stands, as a variable's old value does. `-x` lets it go,
`x=y` gives y's to x; `grad` is the gradient itself. `x:fp32` names a dtype and `x@row` a shape
(both in `lower/optimize.py`). Words in braces are done parameter by parameter, the others for all
parameters of one dtype at once (`torch._foreach_…`); what is not let go lives into the next round,
and to the end of the step.
"""

from __future__ import annotations

from typing import Any, Literal

from memfit.lazy_dataclass import dataclass
from memfit.registry import Registry

Steps = Literal["after", "layerwise", "lomo"]
Order = Literal["mixed", "groups", "apart"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What is done with some of the trained parameters: the first rule whose `of` fits. What `of`
    and `states` can be is in `lower/optimize.py`."""

    of: str = "all"
    states: tuple[str, ...] = ()
    step: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """Parameters are stepped as they come (`mixed`), or rule after rule: in one function, whose
    variables stay alive (`groups`), or in separate calls (`apart`). `when`: after backward, or
    while it runs, parameter by parameter, each after its gradient (`layerwise`) or when the next
    one's is there (`lomo`)."""

    name: str
    rules: tuple[Rule, ...]
    order: Order = "apart"
    eager_states: bool = False  # allocated in the constructor, not at the first step
    when: Steps = "after"
    adapters: bool = False  # of PEFT, for its adapters only
    flat: bool = False  # knows parameters of at most two dimensions
    freezes: str = ""  # adapters whose name ends so are not trained
    # reads and writes of in-place kernels in a step, in tensors like the parameter; 0: nobody
    # counted
    passes: int = 0
    cite: str = ""
    assumes: str = ""  # what nobody could look at, in a note of the answer

    @property
    def low_rank(self) -> bool:
        """Steps matrices in few of their directions."""
        return any(
            state in ("low", "low_int8", "low_factored", "sketch")
            for rule in self.rules
            for state in rule.states
        )

    @property
    def moved(self) -> int:
        """Where nobody counted: parameter, gradient and states read once, parameter and states
        written once, as a fused kernel does."""
        return self.passes or 3 + 2 * len(self.states)

    @property
    def states(self) -> tuple[str, ...]:
        """Of the parameters that have the fewest."""
        return min((rule.states for rule in self.rules), key=len)


OPTIMIZERS: Registry[Optimizer] = Registry("optimizer", where="job.optimizer")
# Names that torch and transformers know, and why there is no answer.
REFUSED = {
    "sparse_adam": (
        "SparseAdam needs sparse gradients, which language models do not have "
        "(torch 2.13 optim/sparse_adam.py)"
    ),
    "lbfgs": (
        "L-BFGS is not supported: it runs the model several times per step "
        "(torch 2.13 optim/lbfgs.py)"
    ),
    "galore_adafactor_layerwise": (
        "the Trainer cannot create `galore_adafactor_layerwise` (transformers "
        "5.23 trainer_optimizer.py)"
    ),
    "adamw_torch_xla": "`adamw_torch_xla` runs on TPUs only",
    "adamw_torch_npu_fused": "`adamw_torch_npu_fused` runs on NPUs only",
}


def _row(name: str, cite: str, rules: tuple[Rule, ...] | Rule, *aliases: str, **more: Any) -> None:
    rules = (rules,) if isinstance(rules, Rule) else rules
    OPTIMIZERS.add(name, Optimizer(name=name, rules=rules, cite=cite, **more), *aliases)


def _simple(name: str, cite: str, states: str, step: str, *aliases: str, **more: Any) -> None:
    """One rule for all parameters."""
    _row(name, cite, Rule(states=tuple(states.split()), step=step), *aliases, **more)


# ------------------------------------------------------------------------------------------- torch
_TORCH = "torch 2.13 torch/optim/{}.py"
# In place, AdamW: decay 2, lerp 3, mul 2, addcmul 3, div 2, add 2, addcdiv 4 (_multi_tensor_adam);
# sqrt makes the temporary.
_FUSED = "like like scalar"  # the step counter lives on the GPU
_simple(
    "adamw", _TORCH.format("adam"), "like like", "root", "adamw_torch", "adamw_foreach", passes=18
)
_simple("adamw_fused", _TORCH.format("adam"), _FUSED, "", "adamw_torch_fused", passes=7)
_simple("adamw_loop", _TORCH.format("adam"), "like like", "{root denominator -root}", passes=18)
_simple("adam", _TORCH.format("adam"), "like like", "root", passes=16)
_simple("adam_fused", _TORCH.format("adam"), _FUSED, "", passes=7)
_simple("sgd", _TORCH.format("sgd"), "", "", passes=3)
_simple("sgd_fused", _TORCH.format("sgd"), "", "", passes=3)
_simple(
    "sgd_momentum", _TORCH.format("sgd"), "like", "", passes=8
)  # the first step clones the gradient
_simple("rmsprop", _TORCH.format("rmsprop"), "like", "average", passes=12)
_simple("adagrad", _TORCH.format("adagrad"), "like", "root numerator", eager_states=True, passes=10)
_simple("adagrad_fused", _TORCH.format("adagrad"), "like scalar", "", eager_states=True)
_simple("adadelta", _TORCH.format("adadelta"), "like like", "root delta")
_simple("adamax", _TORCH.format("adamax"), "like like", "absolute")
_simple("nadam", _TORCH.format("nadam"), "like like", "root")
_simple("radam", _TORCH.format("radam"), "like like", "buffer")
_simple(
    "rprop",
    _TORCH.format("rprop"),
    "like like",
    "signs {mask:bool -mask} {mask:bool kept -mask -kept} -signs directions",
)
_simple(
    "asgd", _TORCH.format("asgd"), "like scalar scalar scalar", "sum -sum difference -difference"
)
# A vector's update takes the place of the matrix' before it; where norms stand within a layer
# differs, so that they leave it there.
_row(
    "adafactor_torch",
    _TORCH.format("_adafactor"),
    (
        Rule(of="matrix", states=("row_column",), step="{row@row column@column update}"),
        Rule(of="ends", states=("like",), step="{square update}"),
        Rule(states=("like",), step="{square short}"),
    ),
    order="mixed",
)
# Matrices in hidden layers, all else by AdamW, as its documentation asks.
_MUON = (
    "{update start:bf16_copy gram:bf16@square turn:bf16@square x:bf16 -start x:bf16 -gram "
    "-turn update=x}"
)
_row(
    "muon",
    _TORCH.format("_muon"),
    (Rule(of="inner", states=("like",), step=_MUON), Rule(states=("like", "like"), step="root")),
)

# ------------------------------------------------------------------------------------ transformers
_FP32_STEP = (
    "parameter:wide square:fp32 update:fp32 -square factor:fp32@row update:fp32 -factor "
    "signed:fp32 -signed"
)
_ADAFACTOR = "{-gradient gradient:wide " + _FP32_STEP + "}"
_simple("adafactor", "transformers 5.23 optimization.py Adafactor", "factored", _ADAFACTOR)
_simple("lion", "lion-pytorch 0.2 lion_pytorch.py", "like", "{copy update -copy -update}", passes=9)
_simple(
    "adamw_anyprecision",
    "torchdistx 0.2 optimizers/anyprecision_optimizer.py",
    "fp32 fp32",
    "{root:fp32 quotient:fp32 -root}",
)

# --------------------------------------------------------------------------------------------------
# bitsandbytes
# AdEMAMix' first two states lie in one tensor; here each by itself
_BNB = "bitsandbytes 0.50 optim/{}.py, optim/optimizer.py"
_simple("adamw_8bit", _BNB.format("adamw"), "int8 int8", "", "adamw_bnb_8bit")
_simple("paged_adamw_8bit", _BNB.format("adamw"), "int8_paged int8_paged", "")
_simple("paged_adamw", _BNB.format("adamw"), "fp32_paged fp32_paged", "", "paged_adamw_32bit")
_simple("lion_8bit", _BNB.format("lion"), "int8", "")
_simple("lion_32bit", _BNB.format("lion"), "fp32", "")
_simple("paged_lion_8bit", _BNB.format("lion"), "int8_paged", "")
_simple("paged_lion_32bit", _BNB.format("lion"), "fp32_paged", "")
_simple("ademamix", _BNB.format("ademamix"), "fp32 fp32 fp32", "")
_simple("ademamix_8bit", _BNB.format("ademamix"), "int8 int8 int8", "")
_simple("paged_ademamix_32bit", _BNB.format("ademamix"), "fp32_paged fp32_paged fp32_paged", "")
_simple("paged_ademamix_8bit", _BNB.format("ademamix"), "int8_paged int8_paged int8_paged", "")
_simple("rmsprop_bnb", _BNB.format("rmsprop"), "fp32", "", "rmsprop_bnb_32bit")
_simple("rmsprop_bnb_8bit", _BNB.format("rmsprop"), "int8", "")

# ------------------------------------------------------------------------------------- packages
# that the Trainer knows
# A projection is made anew every 200 steps, by an SVD of the whole gradient: the steps here are
# such. cuSOLVER's own workspace is not known. Of m x n the smaller side is k: a gradient is m x k,
# `low` its projection on `rank` directions, `square` k x k.
_SVD = (
    "matrix:wide full:fp32 square:fp32@square scaled:fp32@low projection:narrow@projection "
    "-matrix -full -square -scaled -projection "
)
_GALORE = "{-low " + _SVD + "low@low denominator@low update@low back fresh -back update=fresh}"
_galore = (
    Rule(of="rest", states=("like", "like"), step="{denominator update}"),
    Rule(of="linear", states=("low", "low", "projection"), step=_GALORE),
)
_GALORE_8BIT = "{" + _SVD + "low@low saved tiny@low -saved grad=low back fresh -back -fresh -tiny}"
_galore_8bit = (
    Rule(of="rest", states=("int8_all", "int8_all", "scalar"), step=""),
    Rule(of="linear", states=("low_int8", "low_int8", "projection", "scalar"), step=_GALORE_8BIT),
)
_LOW_STEP = (
    "low:fp32@low -gradient parameter:wide square:fp32@low update:fp32@low -square update:fp32@low "
)
_GALORE_ADAFACTOR = (
    "{-low gradient:wide full:fp32 square:fp32@square scaled:fp32@low -full -square -scaled "
    + _LOW_STEP
    + "back:fp32 fresh:fp32 -back update=fresh signed:fp32 -signed}"
)
_galore_adafactor = (
    Rule(of="rest", states=("factored",), step=_ADAFACTOR),
    Rule(of="linear", states=("square", "low_factored"), step=_GALORE_ADAFACTOR),
)
# APOLLO draws its directions, always as many as asked for.
_RANDOM = (
    "matrix:wide random:fp32@drawn scaled:fp32@drawn -random drawn:narrow@drawn -scaled "
    "-matrix -drawn "
)
_APOLLO = "{-low " + _RANDOM + "low@sketch denominator@sketch update@sketch fresh fresh -update}"
_apollo = (
    Rule(of="rest", states=("like", "like"), step="{denominator update}"),
    Rule(of="linear", states=("sketch", "sketch", "drawn", "scalar"), step=_APOLLO),
)
for _end, _when in (("", "after"), ("_layerwise", "layerwise")):
    _row(
        f"galore_adamw{_end}",
        "galore-torch 1.0 adamw.py, galore_projector.py",
        _galore,
        order="groups",
        when=_when,
    )
    _row(
        f"galore_adamw_8bit{_end}",
        "galore-torch 1.0 adamw8bit.py, galore_projector.py",
        _galore_8bit,
        order="groups",
        when=_when,
    )
    _row(
        f"apollo_adamw{_end}",
        "apollo-torch 1.0.3 apollo.py, random_projector.py",
        _apollo,
        order="groups",
        when=_when,
    )
_row(
    "galore_adafactor",
    "galore-torch 1.0 adafactor.py, galore_projector.py",
    _galore_adafactor,
    order="groups",
)
_simple("lomo", "lomo-optim 0.1.1 lomo.py", "", "{wide:wide grad= parameter:wide}", when="lomo")
_ADALOMO = "{wide:fp32 grad= update:fp32 update:fp32 parameter:fp32}"
_simple(
    "adalomo",
    "lomo-optim 0.1.1 adalomo.py",
    "vector",
    _ADALOMO,
    when="lomo",
    eager_states=True,
    flat=True,
)
# its states come from the host and go back
_GROK = "{average square slow product sum -product root -root}"
_simple("grokadamw", "grokadamw 0.1.2 grokadamw.py", "host host host", _GROK)
_FREE = "schedulefree 1.4.1 {}_schedulefree.py"
_simple("schedule_free_adamw", _FREE.format("adamw"), "like like", "denominator")
_simple("schedule_free_radam", _FREE.format("radam"), "like like", "denominator")
_simple("schedule_free_sgd", _FREE.format("sgd"), "like", "")
_simple(
    "stable_adamw", "torch-optimi 0.3.3 stableadamw.py", "like like scalar kahan scalar", ""
)  # Triton's kernels, in place
# Compiled, parameter by parameter. What inductor (torch 2.13) writes for it, for a CPU, where it
# was run, and for an A100, whose code was made without one: a reduction and a product read each
# average, which are kept in fp32 between two kernels; codes of 4 bits stand in int64 beside them,
# because packing reads every second one.
_AO_TOLD = "torchao's compiled step is that of torch 2.13's inductor; other versions may differ"
_AO_STEPS = {
    "8bit": "{average:fp32 square:fp32 -average -square}",
    "4bit": "{average:fp32 square:fp32 codes:int64 others:int64 -average -square -codes -others}",
}
for _bits, _step in _AO_STEPS.items():
    _ao = f"torchao_{_bits} torchao_{_bits}"
    _simple(
        f"adamw_torch_{_bits}",
        f"torchao 0.18 optim/adam.py, subclass_{_bits}.py; torch 2.13 inductor",
        _ao,
        _step,
        assumes=_AO_TOLD,
    )

# -------------------------------------------------------------------------------------------- PEFT
_PEFT = "peft 0.21 optimizers/{}.py"
_GROUPS = tuple(
    Rule(of=some, states=("like", "like"), step="root") for some in ("others", "lora_B")
)
_row("loraplus", _PEFT.format("loraplus"), _GROUPS, adapters=True)
_PRECONDITION = "{wide:wide product:fp32 narrow:narrow -product -wide -narrow} "
_simple(
    "riemannian", _PEFT.format("riemannian"), "like like", _PRECONDITION + "root", adapters=True
)
_LORAFA = "{half:bf16_copy product:bf16 -half scaled:bf16 -product gradient denominator}"
_simple("lorafa", _PEFT.format("lorafa"), "like like", _LORAFA, adapters=True, freezes=".lora_A")
