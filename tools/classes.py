"""Which classes of the installed transformers memfit answers, and how: `python tools/classes.py`
writes docs/classes.md, `--check` compares it, `--run` traces every class anew first (half an hour).

A class counts as `formula` where formulas answer a training step of a small config of it, or of an
example of its family where the class's defaults are no model that ships, with the parameters of
transformers' class, name by name; as `trace` where a training step (and for half of those that
generate, an answer) runs under the trace, else as refused with the reason. What is refused is in
tests/torch/refused_classes.txt, which tests/torch/test_every_class.py holds to the truth in both
directions.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "docs" / "classes.md"
DATE = re.compile(r"\d{4}-\d\d-\d\d")
NAMES = {
    "causal-lm": "text",
    "image-text": "text with images",
    "seq2seq-lm": "sequence to sequence",
    "masked-lm": "masked tokens",
    "classification": "sequence classification",
    "token-classification": "token classification",
    "question-answering": "question answering",
}


class Row(NamedTuple):
    head: str
    kind: str
    how: str  # formula, trace, refused
    why: str = ""
    name: str = ""  # of the class, which several model types may share


def rows(run: bool) -> Iterator[Row]:
    from tests.torch.test_every_class import classes, outcome, refused, tasks

    table = refused()
    for head, kind in classes():
        said = [
            outcome(head, kind, task) if run else table.get(f"{head} {kind} {task}", "")
            for task in tasks(head, kind)
        ]
        why, name = next(filter(None, said), ""), class_name(head, kind)
        if why:
            yield Row(head, kind, "refused", why, name)
        else:
            yield Row(head, kind, "formula" if has_formula(head, kind) else "trace", "", name)


def class_name(head: str, kind: str) -> str:
    """The class that transformers has under this head for this model type."""
    from tests.torch.test_every_class import HEADS
    from transformers.models.auto import modeling_auto

    found = (
        getattr(modeling_auto, f"MODEL_FOR_{one}_MAPPING_NAMES").get(kind) for one in HEADS[head]
    )
    name = next(filter(None, found))
    return name if isinstance(name, str) else name[0]


def has_formula(head: str, kind: str) -> bool:
    """Whether a training step is answered, for the parameters that transformers' class has."""
    from tests.torch.small_configs import small

    from memfit.model.families import families

    if kind not in families():
        return False
    example = {**families()[kind].examples[0], "model_type": kind}
    return any(answers(head, config) for config in (small(kind), example))


def answers(head: str, config: dict[str, Any]) -> bool:
    from memfit.errors import InputError
    from memfit.estimate import estimate
    from memfit.job import Job
    from memfit.model.families import build
    from memfit.model.heads import with_head

    for precision in ("bf16", "fp32"):  # some code fails in 16 bits
        with contextlib.suppress(InputError, NotImplementedError):
            model = with_head(build(config), head, 0)
            estimate(model, Job(head=head, seq=64, precision=precision), precise=False)
            return {one.name: one.shape for one in model.weights()} == parameters_of(head, config)
    return False


def parameters_of(head: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The parameters of transformers' own class of this config."""
    import torch
    from memfit.job import Job
    from memfit.trace.program import made

    _, model = made(config, Job(head=head), None, torch.device("meta"))
    return {name: tuple(one.shape) for name, one in model.named_parameters()}


def page(found: list[Row], date: str) -> str:
    import transformers

    lines = [
        "# Classes of transformers",
        "",
        (
            f"Every class of transformers {transformers.__version__} for text, alone or with "
            f"images: how memfit answers it, on {date}."
        ),
        "Written by `tools/classes.py`; a formula also has a trace, which is its judge.",
        "",
        "| classes | all | formula | trace | refused | answered |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for head in (*NAMES, ""):
        some = [one for one in found if head in ("", one.head)]
        counts = [sum(one.how == how for one in some) for how in ("formula", "trace", "refused")]
        share = 100 * (counts[0] + counts[1]) / len(some)
        name = NAMES.get(head, "**all**")
        lines.append(f"| {name} | {len(some)} | {' | '.join(map(str, counts))} | {share:.1f} % |")
    lines += [
        "",
        distinct(found),
        "Formulas count a vision tower's weights; a question with `--images` goes to the trace.",
    ]
    lines += ["", "## Refused, and why", ""]
    lines += [
        f"- `{one.kind}` ({NAMES[one.head]}): {one.why}" for one in found if one.how == "refused"
    ]
    lines += ["", "## By formula", ""]
    by = sorted({one.kind for one in found if one.how == "formula"})
    lines.append(", ".join(f"`{kind}`" for kind in by))
    return "\n".join(lines) + "\n"


def distinct(found: list[Row]) -> str:
    """The same counts with each class once, as the best of the model types that share it."""
    order = ("formula", "trace", "refused")
    best: dict[str, str] = {}
    for one in found:
        best[one.name] = min(one.how, best.get(one.name, one.how), key=order.index)
    counts = ", ".join(f"{list(best.values()).count(how)} {how}" for how in order)
    return f"Some classes serve several model types: {len(best)} are distinct ({counts})."


def main(arguments: list[str]) -> int:
    if set(arguments) - {"--check", "--run"}:
        print(__doc__, file=sys.stderr)
        return 2
    before = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    known = DATE.search(before)
    check = "--check" in arguments
    date = known[0] if check and known else datetime.date.today().isoformat()
    now = page(list(rows("--run" in arguments)), date)
    if check:
        if now != before:
            print("docs/classes.md has drifted: `python tools/classes.py`", file=sys.stderr)
        return int(now != before)
    PAGE.write_text(now, encoding="utf-8")
    print("\n".join(now.splitlines()[5:16]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
