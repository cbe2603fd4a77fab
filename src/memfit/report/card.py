"""A card as text and JSON: what a GPU can do with a model, each row with how far it goes."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from memfit.commands import gpu_words
from memfit.hardware import Cluster
from memfit.plan.card import CONTEXT, Card, Row, Use
from memfit.plan.shelf import Line, Shelf, Smallest, Smallests
from memfit.report.figures import count, gib

LABEL, WIDTH = 11, 80
SEQUENCES = ("longest sequence", "largest batch")


def text(found: Card | Shelf | Smallests) -> str:
    if isinstance(found, Card):
        return "\n".join(card_lines(found))
    return "\n".join(shelf_lines(found) if isinstance(found, Shelf) else smallest_lines(found))


def card_lines(found: Card) -> Iterator[str]:
    cluster, model = found.cluster, found.model
    where = gpu_name(cluster)
    if found.unknown:
        yield from unknown_lines(found, f"{model.name} on {where}", gpu_words(cluster))
        return
    best = [row for row in found.rows if row.best]
    nothing = "nothing fits without CPU memory" if in_part(found.rows) else "nothing fits"
    yield f"{model.name} on {where}: {verdict(best) or nothing}"
    yield from highlights(best, found.rows, found.context)
    yield f"next step: {next_command(found)}"
    for title, answers, heads in (
        answering_heads(found),
        ("fine-tuning", False, SEQUENCES),
    ):
        rows = [row for row in found.rows if row.use.answers is answers]
        if not rows:
            continue
        yield ""
        yield (f"{title:<{LABEL + 4}}{'GiB':>9}{heads[0]:>19}{heads[1]:>16}{'tokens/s':>12}")
        yield from (row_line(row) for row in rows)
    yield ""
    yield from textwrap.wrap(
        f"GiB and tokens/s: {shown(found)}fine-tuning by {trainer(found)}; "
        f"{gib(usable(found))} GiB usable. * the best that fits",
        WIDTH,
        break_on_hyphens=False,
    )
    servers = [row.use.title for row in found.rows if row.use.server and row.fits]
    if servers:
        yield f"{servers[0]} fills its share of the GPU, whatever the model: the rest is cache"
    copied = [row.use.title for row in found.rows if row.fits and copies(found, row)]
    if copied:
        yield f"{listed(copied)}: a copy of the model on each GPU"
    parted = [row.use.title for row in found.rows if row.fits and has_layers(found, row)]
    if parted:
        yield f"{listed(parted)}: some of the layers on each GPU"
    for words, names in by_note(found.rows).items():
        yield from textwrap.wrap(f"{listed(names)}: {words}", WIDTH, subsequent_indent="  ")
    rest = [
        row for row in found.rows if not row.fits and (row.way or row.refused or row.in_cpu_memory)
    ]
    if rest:
        yield ""
        yield "what would make the rest possible"
        yield from possible_lines(rest)


def answering_heads(found: Card) -> tuple[str, bool, tuple[str, str]]:
    """The heads of the rows without training."""
    if found.model.encodes:
        return "running", True, SEQUENCES
    return "answering", True, ("longest context", f"users at {found.context:,}")


def shown(found: Card) -> str:
    """What the figures of the rows without training are about."""
    if not found.model.encodes:
        return f"answering for one user with {found.context:,} tokens of context, "
    lengths = {row.job.seq for row in found.rows if row.use.encodes}
    return "".join(f"running one sequence of {length:,} tokens, " for length in lengths)


def trainer(found: Card) -> str:
    """Whose defaults the rows of fine-tuning have."""
    encodes = found.model.encodes
    return "the defaults of transformers' Trainer" if encodes else "TRL's defaults"


def by_note(rows: Sequence[Row]) -> dict[str, list[str]]:
    """What quantizations leave as it is, and of which rows."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.stays:
            found.setdefault(row.stays, []).append(row.use.title)
    return found


def possible_lines(rows: Sequence[Row]) -> Iterator[str]:
    """One line for all that is refused for one reason."""
    alike: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        helped = row.in_cpu_memory or row.way is not None
        command = (row.way.command if row.way else row.command) if helped else ""
        alike.setdefault((possible(row), command), []).append(row)
    for (words, command), some in alike.items():
        names = [row.use.title for row in some] if some[1:] else [label(some[0])]
        yield f"  {listed(names)}: {words}"
        if command:
            yield f"    {command}"


def copies(found: Card, row: Row) -> bool:
    """Whether each GPU runs inference on its own copy of the model."""
    return row.use.answers and found.strategies[row.use.key].size("ddp") > 1


def has_layers(found: Card, row: Row) -> bool:
    """Whether each GPU has some layers of one model."""
    return row.use.answers and found.strategies[row.use.key].size("split") > 1


def listed(words: list[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def usable(found: Card) -> int:
    from memfit.hardware import usable as offered

    return offered(found.cluster.gpu)


def label(row: Row) -> str:
    kind = "running, " if row.use.encodes else "answering, " if row.use.answers else ""
    return f"{kind}{row.use.title}"


def verdict(best: list[Row]) -> str:
    """`answers in 16-bit and fine-tunes with LoRA`."""
    return " and ".join(does(row.use) for row in best)


def does(use: Use) -> str:
    if use.encodes:
        return f"runs in {use.title}"
    return f"answers in {use.title}" if use.answers else f"fine-tunes with {named(use)}"


def named(use: Use) -> str:
    return "all weights" if use.key == "full" else use.title


def gpu_name(cluster: Cluster) -> str:
    """`2 x NVIDIA H100`; of one that is known by its memory alone, `a GPU with 16 GiB`."""
    one = "a " if cluster.gpu.id == "custom" else ""
    return f"{f'{cluster.gpus} x ' if cluster.gpus > 1 else one}{cluster.gpu.name}"


def tuning(use: Use) -> str:
    return "full fine-tuning" if use.key == "full" else use.title


def highlights(best: list[Row], rows: Sequence[Row], context: int = CONTEXT) -> Iterator[str]:
    missing = sum(bool(row.refused) for row in rows)
    both = any(row.use.answers for row in rows)
    nothing = "neither answering nor fine-tuning fits" if both else "fine-tuning does not fit"
    nothing += f"; {missing} of {len(rows)} uses are not supported" if missing else ""
    words = [most_words(row, context) for row in best]
    yield "; ".join(words) or in_part(rows) or nothing


def in_part(rows: Sequence[Row]) -> str:
    """What an engine can do that keeps some of the weights in CPU memory."""
    some = [row for row in rows if row.in_cpu_memory]
    if not some:
        return ""
    row = min(some, key=lambda one: one.in_cpu_memory)
    rest = f"{gib(row.device)} GiB on the GPU and {gib(row.in_cpu_memory)} GiB in CPU memory"
    return f"{row.use.title} answers slowly with {rest}"


def most_words(row: Row, context: int) -> str:
    if row.use.answers and not row.use.encodes:
        return f"{row.longest:,} tokens of context, or {row.most:,} x {context:,}"
    kind = row.use.title if row.use.encodes else tuning(row.use)
    return f"{kind} up to {row.most:,} x {row.job.seq:,} tokens, or 1 x {row.longest:,}"


def next_command(found: Card) -> str:
    """Where nothing fits, that of the row which needs the least CPU memory beside the GPU, or of
    the first which fits elsewhere."""
    best = [row.command for row in found.rows if row.best]
    beside = sorted(
        (row for row in found.rows if row.in_cpu_memory), key=lambda row: row.in_cpu_memory
    )
    elsewhere = [row.way.command for row in found.rows if row.way is not None]
    others = [*(row.command for row in beside), *elsewhere, found.rows[0].command]
    return best[-1] if best else others[0]


def row_line(row: Row) -> str:
    mark = "*" if row.best else " "
    head = f"{mark} {row.use.title:<{LABEL + 2}}"
    if row.refused:
        return f"{head}{'-':>9}"
    if not row.fits:
        if row.longest:
            return f"{head}{'-':>9}{row.longest:>19,}{'-':>16}{'-':>12}"
        return f"{head}{'does not fit':>12}"
    speed = "?" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
    return f"{head}{gib(row.device):>9}{row.longest:>19,}{row.most:>16,}{speed:>12}"


def possible(row: Row) -> str:
    if row.in_cpu_memory:
        here = f"{gib(row.device)} GiB here and {gib(row.in_cpu_memory)} GiB in CPU memory"
        return f"{here}, {pace(row)}"
    if row.way is None or row.way.cluster is None:
        return unsupported(row.refused)
    gpus = f"{row.way.cluster.gpus} x " if row.way.cluster.gpus > 1 else ""
    return f"{gpus}{row.way.cluster.gpu.name}, {gib(row.way.device)} GiB each"


def pace(row: Row) -> str:
    """Of a model that lies partly in CPU memory."""
    if row.tokens_per_second is None:
        return "slower"
    speed = f"{row.tokens_per_second:.2g} tokens/s"
    return f"about {speed} if the CPU reads {row.host_bandwidth / 1e9:.0f} GB/s"


def unsupported(why: str) -> str:
    return why if why.startswith("not supported") else f"not supported: {why}"


def shelf_lines(found: Shelf) -> Iterator[str]:
    from memfit.hardware import usable as offered

    cluster = found.cluster
    answers = [one for one in found.lines if one.answer is not None]
    tunes = [one for one in found.lines if one.tune is not None]
    encodes = found.encodes
    does = "runs" if encodes else "answers with"
    first = f"{does} {short(answers[-1].name) if answers else 'none of these'}"
    then = f"fine-tunes {short(tunes[-1].name) if tunes else 'none of these'}"
    both = then if encodes and not answers else f"{first} and {then}"
    yield f"{gpu_name(cluster)} ({gib(offered(cluster.gpu))} GiB usable) {both}"
    if answers:
        to = "run" if encodes else "answer with"
        yield f"largest to {to}: {largest(answers[-1], answers=True)}"
    if tunes:
        yield f"largest to fine-tune: {largest(tunes[-1], answers=False)}"
    if answers or tunes:
        name = (tunes or answers)[-1].name
        yield f"next step: memfit {name} {gpu_words(cluster)}"
    else:
        yield f"next step: memfit {found.lines[0].name}   (the smallest GPU for each use)"
    yield ""
    names = max(36, *(len(one.name) for one in found.lines))
    runs = "run" if encodes else "answer"
    yield f"{'model':<{names}}{'parameters':>12}{runs:>20}{'fine-tune':>14}"
    yield from (shelf_line(one, names) for one in found.lines)
    yield ""
    what = "running one sequence" if encodes else f"answering one user with {CONTEXT:,} tokens"
    yield f"GiB of the best form that fits: {what},"
    whose = "the Trainer's" if encodes else "TRL's"
    yield f"fine-tuning by {whose} defaults, with a smaller batch where theirs does not fit."
    if len(answers) < len(found.lines) or len(tunes) < len(found.lines):
        yield "needs: nothing fits; GiB of the smallest form, one sequence at a time."


def largest(one: Line, *, answers: bool) -> str:
    use, size = (one.answer, one.answer_bytes) if answers else (one.tune, one.tune_bytes)
    assert use is not None
    how = f"in {use.title}" if answers else f"with {named(use)}"
    return f"{one.name} {how}, {gib(size)} GiB"


def short(name: str) -> str:
    return name.rpartition("/")[2]


def shelf_line(one: Line, names: int) -> str:
    answer, tune = formed(one.answer, one.answer_bytes), formed(one.tune, one.tune_bytes)
    return f"{one.name:<{names}}{count(one.parameters):>12}{answer:>20}{tune:>14}"


def formed(use: Use | None, size: int) -> str:
    """The form of a model that fits and its GiB; what the smallest form needs where none does."""
    if not size:
        return "-"
    return f"{'needs' if use is None else use.title} {gib(size):>6}"


def unknown_lines(found: Card | Smallests, title: str, where: str) -> Iterator[str]:
    """Why there is no card, and the command that answers all the same."""
    name = shlex.quote(found.subject or found.model.name)
    if found.model.layers:
        yield f"{title}: {found.unknown}"
        yield f"next step: memfit estimate {name} {where}"
        return
    yield f"{title}: a card needs formulas, which this model lacks"
    yield f"reason: {found.unknown}"
    yield f"next step: memfit trace {name} --task inference {where}"


def smallest_lines(found: Smallests) -> Iterator[str]:
    model = found.model
    if found.unknown:
        yield from unknown_lines(found, model.name, "--gpu NAME")
        return
    words = [smallest_words(found.rows, answers) for answers in (True, False)]
    words = [one for one in words if one]
    yield f"{model.name}: {', '.join(words) or 'no single GPU on record is enough'}"
    yield f"{count(model.parameters)} parameters; the smallest GPU for each use is below"
    yield f"next step: memfit {shlex.quote(found.subject or model.name)} --gpu NAME"
    yield ""
    yield f"{'use':<18}{'GiB':>9}  {'smallest GPU':<30}cheapest to rent, $ per hour"
    yield from (smallest_line(one) for one in found.rows)
    refused: dict[str, list[str]] = {}
    for one in found.rows:
        if one.refused:
            refused.setdefault(unsupported(one.refused), []).append(one.use.title)
    yield from ("", *(f"{listed(uses)}: {why}" for why, uses in refused.items())) if refused else ()


def smallest_words(rows: Sequence[Smallest], answers: bool) -> str:
    """`answers in 4-bit from a2`: the best form that the smallest GPU has room for."""
    from memfit.hardware import usable as offered

    gpus = [(one.use, one.gpu) for one in rows if one.use.answers is answers and one.gpu]
    if not gpus:
        return ""
    use, gpu = min(gpus, key=lambda one: offered(one[1]))
    return f"{does(use)} from {gpu.id}"


def smallest_line(one: Smallest) -> str:
    kind = "run" if one.use.encodes else "answer" if one.use.answers else "tune"
    title = f"{kind}, {one.use.title}"
    if one.refused:
        return f"{title:<18}{'-':>9}"
    if one.gpu is None:
        return f"{title:<18}{gib(one.needs):>9}  no single GPU: use several"
    rent = "" if one.cheapest is None else f"{one.cheapest.id} {one.dollars:.2f}"
    return f"{title:<18}{gib(one.needs):>9}  {one.gpu.id:<30}{rent}".rstrip()


# -------------------------------------------------------------------------------------------- JSON
def data(found: Card | Shelf | Smallests) -> dict[str, Any]:
    if isinstance(found, Card):
        return {
            "schema": 1,
            "kind": "card",
            "model": found.model.name,
            "gpu": found.cluster.gpu.id,
            "gpus": found.cluster.gpus,
            "usable": usable(found),
            "unknown": found.unknown or None,
            "rows": [row_data(one) for one in found.rows],
        }
    if isinstance(found, Shelf):
        lines = [
            {
                "model": one.name,
                "parameters": one.parameters,
                "answer": None if one.answer is None else one.answer.key,
                "answer_device": one.answer_bytes if one.answer else None,
                "answer_needs": None if one.answer else one.answer_bytes or None,
                "tune": None if one.tune is None else one.tune.key,
                "tune_device": one.tune_bytes if one.tune else None,
                "tune_needs": None if one.tune else one.tune_bytes or None,
            }
            for one in found.lines
        ]
        gpu = found.cluster.gpu.id
        return {
            "schema": 1,
            "kind": "shelf",
            "gpu": gpu,
            "gpus": found.cluster.gpus,
            "models": lines,
        }
    rows = [
        {
            "use": one.use.key,
            "device": one.needs or None,
            "gpu": None if one.gpu is None else one.gpu.id,
            "cheapest": None if one.cheapest is None else one.cheapest.id,
            "dollars": one.dollars,
            "command": one.command or None,
            "refused": one.refused or None,
        }
        for one in found.rows
    ]
    unknown = found.unknown or None
    return {
        "schema": 1,
        "kind": "smallest",
        "model": found.model.name,
        "unknown": unknown,
        "rows": rows,
    }


def row_data(one: Row) -> dict[str, Any]:
    return {
        "use": one.use.key,
        "fits": one.fits,
        "best": one.best,
        "device": one.device or None,
        "in_cpu_memory": one.in_cpu_memory or None,
        "batch": one.job.batch,
        "seq": one.job.seq,
        "longest": one.longest,
        "most": one.most,
        "tokens_per_second": one.tokens_per_second,
        "command": one.command,
        "refused": one.refused or None,
        "unquantized": one.stays or None,
        "possible": None
        if one.way is None
        else {"command": one.way.command, "device": one.way.device},
    }


__all__ = ["data", "text"]
