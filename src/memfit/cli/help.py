"""Help pages: `--help` is one screen with the options that matter and examples, `--help-all` has
every option in groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import click

from memfit.defaults import trainer_default

SCREEN = 40  # lines that `--help` may take, 80 columns wide
# Headings of `--help-all`, by the group of an option.
GROUPS = {
    "question": "Question",
    "plan": "Plan",
    "job": "Job",
    "memory": "Memory",
    "lora": "LoRA",
    "quantization": "Quantization",
    "inference": "Inference",
    "study": "Study",
    "run": "Whole run",
    "trace": "Trace",
    "measure": "Measurement",
    "moments": "Phases of a run",
    "environment": "Environment",
    "output": "Output",
}
JOB = ("method", "task", "batch", "seq", "checkpointing", "precision", "optimizer", "quant")
OUTPUT = ("as_json",)
FIRST: dict[str, tuple[str, ...]] = {
    "estimate": (
        "gpu",
        "memory",
        "use",
        *JOB,
        "attention",
        "lengths",
        "advise",
        "engine",
        "explain",
        *OUTPUT,
    ),
    "compare": ("variants", "gpu", "use", *JOB, *OUTPUT),
    "study": ("gpus", "lengths", "methods", "layouts", "batch", "precision", "heatmap", *OUTPUT),
    "plan": (
        "gpu",
        "task",
        "method",
        "seq",
        "global_batch",
        "dataset_tokens",
        "policy",
        "budget_hours",
        "budget_money",
        "goal",
        "requests",
        "weights",
        "engine",
        "top",
        "write",
        *OUTPUT,
    ),
    "trace": (
        "gpu",
        *JOB[:6],
        "steps",
        "time_limit",
        "python",
        "at_peak",
        "timeline",
        "snapshot",
        *OUTPUT,
    ),
    "measure": ("out", "use", *JOB, "measured_steps", "campaign", "budget", *OUTPUT),
    "accuracy": (
        "by",
        "source",
        "confidence",
        "worst",
        "limit",
        "speed",
        "peers",
        "plot",
        "as_json",
    ),
    "card": ("gpu", "memory", "offline", *OUTPUT),
    "report": ("measured", "out", "gpu", "use", *JOB, *OUTPUT),
    "cache": ("clear", *OUTPUT),
    "capture": ("out", *OUTPUT),
    "new-family": ("fields", "out", *OUTPUT),
    "models": OUTPUT,
    "gpus": OUTPUT,
}
EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "memfit llama-3.1-8b --gpu rtx-4090",
        "memfit estimate llama-3.1-8b --method qlora --gpu rtx-4090",
        "memfit plan llama-3.1-8b --gpus 8xh100",
    ),
    "estimate": (
        "memfit estimate llama-3.1-8b --method qlora --gpu rtx-4090",
        "memfit estimate qwen3-32b --task inference --seq 32k --gpu a100",
        "memfit estimate qwen3-8b --method lora --gpu a100 --lengths data.jsonl",
    ),
    "card": ("memfit llama-3.1-8b --gpu rtx-4090", "memfit --gpu mac-16gb"),
    "compare": (
        'memfit compare qwen3-8b --gpu a100 --with "--lora" --with "--qlora"',
        'memfit compare qwen3-8b --gpus 8xh100 --with "--use fsdp" --with "--use ddp"',
    ),
    "study": (
        "memfit study llama-3.1-8b --gpus 8xa100",
        "memfit study qwen3-8b qwen3-14b --gpus 1xrtx-4090,8xh100 --lengths 2k,8k",
    ),
    "plan": (
        "memfit plan llama-3.1-8b --gpus 8xh100 --dataset-tokens 1B",
        "memfit plan qwen3-8b --gpus 2xrtx-4090 --task inference",
    ),
    "trace": (
        "memfit trace qwen3-8b --method lora --gpu rtx-4090",
        "memfit trace --gpu rtx-4090 train.py --epochs 3",
    ),
    "measure": (
        "memfit measure qwen3-0.6b --method lora --out records",
        "memfit measure --campaign cases.toml --budget 25m",
    ),
    "accuracy": ("memfit accuracy", "memfit accuracy records --worst 10"),
    "report": (
        "memfit report llama-3.1-8b --method lora --gpu rtx-4090 --measured 21.3GiB",
        "memfit report job.yaml --measured 21.3GiB --out issue.json",
    ),
    "cache": ("memfit cache", "memfit cache --clear"),
    "capture": ("memfit capture qwen3_next", "memfit capture llama --out llama.json"),
    "new-family": ("memfit new-family roformer", "memfit new-family roformer --out families"),
    "models": ("memfit models", "memfit models qwen3 8b"),
    "gpus": ("memfit gpus", "memfit gpus a100 --json"),
}
# Shorter texts for the short page, where an option's own takes two lines.
SHORT = {
    "gpu": "GPU or machine: rtx-4090, 8xh100, p5.48xlarge, auto",
    "memory": "memory of an unlisted GPU, like 24GiB",
    "use": "layout: ddp, fsdp=8, tp=4,pp=2, zero,stage=3",
    "task": "finetune, pretrain or inference",
    "checkpointing": "none, full, selective",
    "optimizer": "name, like adamw_8bit",
    "quant": "bitsandbytes format: nf4, fp4, int8",
    "attention": "attention kernel: sdpa, flash-attn-2, eager",
    "precision": "number formats",
    "seq": "tokens per sequence or prompt",
    "batch": "sequences per GPU and micro-batch",
    "advise": "find changes that make it fit",
    "engine": "serving engine, like vllm or sglang",
    "global_batch": "sequences per optimizer step on all GPUs",
    "dataset_tokens": "training tokens like 2B; report hours and cost",
    "budget_hours": "maximum hours of the run",
    "budget_money": "maximum cost of the run in dollars",
    "goal": "for inference: latency or throughput",
    "requests": "concurrent requests, or as-many-as-fit",
    "weights": "weight formats to try: own, int8, nf4, fp8 …",
    "steps": "optimizer steps to trace; 0 follows to the end",
    "python": "virtual environment whose libraries run it",
}
METAVARS = {"gpu": "NAME", "gpus": "NAMES", "memory": "SIZE", "use": "LAYOUT"}


@dataclasses.dataclass(frozen=True)
class Brief:
    """The parts of an option's help: its text, its choices and its default."""

    text: str
    choices: tuple[str, ...] = ()
    default: str = ""

    def line(self, room: int) -> str:
        """One line: the choices and the default where they fit."""
        chosen = f": {', '.join(self.choices)}" if self.choices else ""
        default = f" [{self.default}]" if self.default else ""
        for text in (
            self.text + chosen + default,
            self.text + chosen,
            self.text + default,
            self.text,
        ):
            if len(text) <= room:
                return text
        return self.text


briefs: dict[str, Brief] = {}
groups: dict[str, str] = {}


def default_text(one: dataclasses.Field[Any], *, resolved: bool) -> str:
    """`TRL: 8, else 1` where a question takes its trainer's defaults, or the option's own; flags
    have none here."""
    if one.default in ("", None) or one.type == "bool":
        return ""
    own = f"{one.default:g}" if isinstance(one.default, float) else str(one.default)
    assumed = trainer_default(one.name) if resolved else None
    return own if assumed is None else f"{assumed[0]}: {assumed[1]}, else {own}"


def describe(one: dataclasses.Field[Any], *, resolved: bool = False) -> None:
    """Remember the parts of an option's help, for the short page. `resolved`: the command takes a
    trainer's defaults."""
    shown = default_text(one, resolved=resolved)
    groups[one.name] = one.metadata["group"]
    brief = SHORT.get(one.name)
    choices = () if brief else tuple(one.metadata["choices"])
    briefs[one.name] = Brief(brief or one.metadata["help"], choices, shown)


class Helpful(click.Command):
    """A command with a short and a whole help page."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        whole = click.Option(
            ["--help-all"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=show_all,
            help="show every option, in groups",
        )
        return [*super().get_params(ctx), whole]

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        found = super().get_help_option(ctx)
        if found is not None:
            found.help = "show one screen of help"
        return found

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        if self.name in EXAMPLES:
            write_examples(formatter, EXAMPLES[self.name])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = {
            one.name or "": one for one in self.get_params(ctx) if isinstance(one, click.Option)
        }
        if ctx.meta.get("help_all"):
            write_groups(ctx, options, formatter)
            return
        first = [options[name] for name in FIRST.get(self.name or "", ()) if name in options]
        rows = [(spelled(one), one) for one in first]
        ends = [("--help", "show this page")]
        if len(options) > len(first) + 2:
            ends.append(("--help-all", f"show all {len(options) - 2} options, in groups"))
        width = max(len(left) for left, _ in (*rows, *ends))
        room = formatter.width - formatter.indent_increment - width - 2
        lines = [(left, text_of(one, room)) for left, one in rows]
        with formatter.section("Options"):
            formatter.write_dl([*lines, *ends], col_max=width)


def write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    """Commands to copy, under their own heading."""
    with formatter.section("Examples"):
        for example in examples:
            formatter.write(f"{'':{formatter.current_indent}}{example}\n")


def text_of(one: click.Option, room: int) -> str:
    brief = briefs.get(one.name or "")
    return brief.line(room) if brief else SHORT.get(one.name or "") or one.help or ""


def spelled(one: click.Option) -> str:
    """`--batch N`, `--advise`."""
    if one.is_flag:
        return one.opts[0]
    kind = one.metavar if one.metavar and len(one.metavar) < 10 else "TEXT"
    return f"{one.opts[0]} {METAVARS.get(one.name or '', kind)}"


def write_groups(
    ctx: click.Context, options: dict[str, click.Option], formatter: click.HelpFormatter
) -> None:
    """Every option, under the heading of its group."""
    sections: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
    for name, one in options.items():
        record = one.get_help_record(ctx)
        if record is not None:
            sections[groups.get(name, "output")].append(record)
    for group, records in sections.items():
        if records:
            with formatter.section(GROUPS[group]):
                formatter.write_dl(records)


def show_all(ctx: click.Context, one: click.Parameter, wanted: bool) -> None:
    if wanted:
        ctx.meta["help_all"] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


__all__ = ["EXAMPLES", "FIRST", "GROUPS", "SCREEN", "Helpful", "describe"]
