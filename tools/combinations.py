"""Prints docs/combinations.md: which layouts go with adapters, packed weights, checkpoints, losses,
attentions and offload, and why some do not. The answers are the formulas' own, of a tiny model.
tools/reference.py writes the page, and tells whether it is up to date.

python tools/combinations.py
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from memfit.errors import InputError  # noqa: E402
from memfit.job import Job  # noqa: E402
from memfit.lower import programmed  # noqa: E402
from memfit.model.families import build  # noqa: E402
from memfit.strategy import ONE  # noqa: E402
from memfit.uses import strategy_from  # noqa: E402

PAGE = ROOT / "docs" / "combinations.md"
Options = dict[str, Any]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
MODELS = {
    "dense": build(LLAMA),
    "experts": build(
        {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    ),
}
USUAL: Options = {"batch": 1, "seq": 32}
MEGATRON: Options = {"framework": "megatron", "precision": "bf16-master", "optimizer": "adam_fused"}

# What it is called, how it is asked for, and what the job needs for it.
LAYOUTS: tuple[tuple[str, str, Options], ...] = (
    ("one GPU", "", {}),
    ("DDP", "ddp=2", {}),
    ("ZeRO-1", "zero=2,stage=1", {}),
    ("ZeRO-2", "zero=2,stage=2", {}),
    ("ZeRO-3", "zero=2,stage=3", {}),
    ("ZeRO-2, states on the host", "zero=2,stage=2,offload-optimizer=cpu", {}),
    ("ZeRO-3 on the host", "zero=2,stage=3,offload-optimizer=cpu,offload-param=cpu", {}),
    ("ZeRO-3 on NVMe", "zero=2,stage=3,offload-optimizer=nvme,offload-param=nvme", {}),
    ("ZeRO++ hpZ", "zero=4,stage=3,hpz=2", {}),
    ("ZeRO++ qwZ", "zero=2,stage=3,qwz", {}),
    ("FSDP1", "fsdp=2,version=1", {}),
    ("FSDP1 on the host", "fsdp=2,version=1,offload", {}),
    ("FSDP2", "fsdp=2", {}),
    ("FSDP2 on the host", "fsdp=2,offload", {}),
    ("HSDP", "fsdp=2 ddp=2", {}),
    ("TP, transformers' plan", "tp=2", {}),
    ("TP beside FSDP2", "tp=2 fsdp=2", {}),
    ("TP with a split sequence", "tp=2,sequence", {}),
    ("TP with a split loss", "tp=2,parallel_loss", {}),
    ("CP, ring, beside FSDP2", "cp=2 fsdp=2", {}),
    ("CP, all-gather", "cp=2,style=allgather fsdp=2", {}),
    ("CP, Ulysses, beside ZeRO-3", "cp=2,style=ulysses zero=2,stage=3", {}),
    ("CP, Ulysses, beside ZeRO-2", "cp=2,style=ulysses zero=2,stage=2", {}),
    ("PP, 1F1B", "pp=2", {}),
    ("PP, zero bubble", "pp=2,schedule=zbv,virtual=2", {}),
    ("PP beside FSDP2", "pp=2 fsdp=2", {}),
    ("EP beside FSDP2", "fsdp=2 ep=2", {}),
    ("Gemini", "gemini=2", {}),
    ("Megatron TP", "tp=2,sequence", MEGATRON),
    ("Megatron CP", "cp=2", MEGATRON),
    ("Megatron PP", "pp=2", MEGATRON),
    ("Megatron EP", "ddp=2 ep=2", MEGATRON),
)
LORA, QLORA = ({"method": name, "targets": "q_proj,v_proj"} for name in ("lora", "qlora"))
# The axes: one of each makes a combination, the first of each being what is usual.
AXES: tuple[Mapping[str, Options], ...] = (
    {"full": {}, "LoRA": LORA, "QLoRA": QLORA},
    {"plain": {}, "checkpoints": {"checkpointing": "full"}},
    {
        "plain": {},
        "Liger": {"liger": True},
        "Liger's fused loss": {"liger": True, "loss": "liger"},
        "TRL's head": {"framework": "trl"},
        "TRL 1.6's": {"framework": "trl", "versions": "trl=1.6"},
        "TRL 1.14's": {"framework": "trl", "versions": "trl=1.14"},
    },
    {"sdpa": {}, "eager": {"attention": "eager"}, "flash-attn": {"attention": "flash-attn-2"}},
    {
        "plain": {},
        "evaluation": {"evaluate": True},
        "activations on the host": {"activation_offload": "all"},
    },
)

PLAIN = {next(iter(axis)) for axis in AXES} | {"plain"}
SAME = "·"  # the change is what the row has, or takes its framework away

HEAD = """\
# What goes with what

<!-- Written by tools/combinations.py (`make docs`); changes made here are lost. -->

Each row is a layout. Each column changes one thing of a job that fine-tunes all weights of a small
dense model (EP: a mixture of experts) with transformers, a plain loss and SDPA. Megatron's rows run
its own code. `yes` means that memfit answers; a number means that it refuses, for the reason listed
below. LoRA and QLoRA adapt `q_proj` and `v_proj`; Liger's column is its kernels with a plain loss.
Two changes that work alone also work together, except for those under *Only together*: all pairs of
changes are tried, {pairs} on each of {layouts} layouts.
"""


def changes() -> dict[str, Options]:
    """Each alone, and with every other of another axis."""
    each = [
        (place, name, options)
        for place, axis in enumerate(AXES)
        for name, options in axis.items()
        if name not in PLAIN
    ]
    found = {name: options for _, name, options in each}
    for (first, one, these), (second, other, those) in itertools.combinations(each, 2):
        if first != second:
            found[f"{one} + {other}"] = these | those
    return found


def asked(use: str, needs: Options, change: Options) -> tuple[str, ...] | None:
    """Why this is refused; nothing where there is an answer, None where it is another row's."""
    if needs and change.keys() & needs.keys() | (
        {"evaluate"} & change.keys() if "task" in needs else set()
    ):
        return None
    try:
        job = Job(**{**USUAL, **needs, **change})
        programmed(
            MODELS["experts" if "ep=" in use else "dense"],
            job,
            None,
            strategy_from(use.split(), None) if use else ONE,
            True,
        )
    except InputError as refused:
        return tuple(dict.fromkeys(one.message for one in refused.problems if one.level == "error"))
    return ()


def answers() -> dict[str, dict[str, tuple[str, ...] | None]]:
    """By layout and change."""
    wanted = changes()
    return {
        title: {name: asked(use, needs, change) for name, change in {"": {}, **wanted}.items()}
        for title, use, needs in LAYOUTS
    }


def page() -> str:
    found, names = answers(), [name for name in changes() if " + " not in name]
    reasons: dict[str, int] = {}
    lines = ["| layout | full | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for title, row in found.items():
        lines.append(
            f"| {title} | " + " | ".join(cell(row[name], reasons) for name in ("", *names)) + " |"
        )
    pairs = len(changes()) - len(names)
    text = [HEAD.format(pairs=pairs, layouts=len(LAYOUTS)), *lines, "", "## Reasons", ""]
    text += [f"{number}. {reason}." for reason, number in reasons.items()]
    return "\n".join([*text, "", "## Only together", "", *together(found), ""])


def cell(said: tuple[str, ...] | None, reasons: dict[str, int]) -> str:
    if said is None:
        return SAME
    return ", ".join(str(reasons.setdefault(one, len(reasons) + 1)) for one in said) or "yes"


def together(found: Mapping[str, Mapping[str, tuple[str, ...] | None]]) -> Iterator[str]:
    """Pairs that are refused though each of them is answered."""
    said: dict[tuple[str, str], list[str]] = {}
    for title, row in found.items():
        for name, why in row.items():
            alone = [row[part] for part in name.split(" + ")] if " + " in name else []
            if why and alone and not any(alone):
                said.setdefault((name, "; ".join(why)), []).append(title)
    everywhere = {title for title, row in found.items() if row[""] == ()}
    for (name, reason), titles in said.items():
        yield (
            f"- {name} ({'everywhere' if everywhere <= set(titles) else ', '.join(titles)}): "
            f"{reason}."
        )
    if not said:
        yield "Nothing: what goes alone goes with the others."


if __name__ == "__main__":
    print(page())
