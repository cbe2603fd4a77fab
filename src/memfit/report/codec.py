"""An estimate as JSON, schema 1: every key is a row of `FIELDS`, from which the schema file and the
reference page are written.

Keys are added without a new number; a key that goes, or changes its meaning, makes it schema 2.
Sizes are whole bytes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from memfit import renames
from memfit.answers import Advice, Answer, Failure, Way
from memfit.errors import Problem
from memfit.estimate import Estimate
from memfit.report.explain import workings
from memfit.report.pace import TIME, time_dict
from memfit.report.run import RUN, data
from memfit.simulate.memory import MOMENTS, Moment

SCHEMA = 1
# (path, type, meaning). `?` may be null, `[]` a list, `{}` a map from names, `a|b` one of these; a
# row for an object comes first.
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("schema", "integer", "version of this format"),
    ("deprecated", "[]object", "old names that this result still has"),
    ("deprecated[].name", "string", "the old name"),
    ("deprecated[].use", "string", "the new name"),
    ("deprecated[].until", "string", "the version of memfit that drops the old name"),
    (
        "verdict",
        "fits|tight|no?",
        (
            "`tight`: the likely range includes usable memory; null without a GPU or "
            "if the input was unusable"
        ),
    ),
    ("model", "object?", "the model"),
    ("model.name", "string", "its name as given, or in the catalog"),
    ("model.family", "string", "family whose formulas apply"),
    ("model.origin", "string", "source of its config"),
    (
        "job",
        "object?",
        "every option of the job, with defaults; null for a script",
    ),
    (
        "assumed",
        "{}any",
        "options set by the trainer's defaults",
    ),
    ("script", "object?", "the script that was traced; null where it was a model"),
    ("script.path", "string", "its path as given"),
    ("script.arguments", "[]string", "its arguments"),
    ("script.steps", "integer", "optimizer steps traced"),
    ("script.files", "[]object", "files that the script would have written, largest first"),
    ("script.files[].path", "string", "as the script sees it"),
    ("script.files[].size", "integer", "bytes; checkpoints count all their tensors"),
    ("script.isolation", "string", "how the script was isolated"),
    ("script.gaps", "string", "gaps of the isolation, or empty"),
    ("gpu", "object?", "null without a GPU"),
    ("gpu.id", "string", "its row in the table of GPUs, `custom` if only its memory was given"),
    ("gpu.name", "string", "name as the driver reports it"),
    ("gpu.usable_low", "integer", "usable memory"),
    ("gpu.usable_high", "integer", "the most"),
    ("gpus", "integer", "number of ranks"),
    ("layouts", "{}any", "layouts of `--use` by name, with every setting"),
    ("rank", "integer", "rank with the largest memory, which this answer describes"),
    ("ranks", "[]object", "ranks whose memory differs"),
    ("ranks[].rank", "integer", "first of the equal ranks"),
    ("ranks[].alike", "integer", "number of equal ranks"),
    ("ranks[].allocated", "integer", "its allocated peak"),
    ("ranks[].device", "integer", "its device memory"),
    ("ranks[].verdict", "fits|tight|no?", "as `verdict`"),
    ("memory", "object?", "the four numbers, and CPU memory"),
    (
        "memory.allocated",
        "integer",
        "peak of allocated memory, as torch.cuda.max_memory_allocated counts it",
    ),
    (
        "memory.reserved",
        "integer?",
        ("peak of memory reserved by torch's caching allocator; null if it was not replayed"),
    ),
    (
        "memory.device",
        "integer",
        ("device memory, as nvidia-smi shows it: reserved (or allocated), the context and NCCL"),
    ),
    (
        "memory.usable",
        "integer?",
        "memory that one process can use; null without a GPU",
    ),
    ("memory.host", "integer", "peak CPU memory, without the process itself"),
    (
        "memory.host_node",
        "integer",
        "CPU memory of all ranks of a node while they run",
    ),
    (
        "memory.parts",
        "{}integer",
        (
            "memory at the peak by part; the sum is `device`, without "
            "`fragmentation`, `context` and `nccl` it is `allocated`"
        ),
    ),
    (
        "memory.peak",
        "object?",
        "time of the allocated peak; null if nothing is allocated",
    ),
    (
        "memory.peak.phase",
        "string",
        "load, prepare, forward, backward, step, evaluate, save, prefill or decode",
    ),
    ("memory.peak.step", "integer", "step of the run, from 0"),
    ("memory.peak.where", "string", "path of the module"),
    ("memory.peak.op", "string", "operation that sets the peak"),
    *TIME,
    ("band", "object?", "likely range of `device`"),
    ("band.low", "integer", "the least"),
    ("band.high", "integer", "upper end; the job fits if it is below `usable`"),
    ("band.origin", "string", "what the range is based on"),
    ("parameters", "object?", "parameters; a tied tensor counts once"),
    ("parameters.total", "integer", "of the model, without adapters"),
    ("parameters.trainable", "integer", "trainable parameters, with adapters"),
    ("parameters.active", "integer", "parameters used by one token"),
    ("source", "formula|trace|measured|handwritten|bound?", "source of the answer"),
    ("versions", "{}string", "library versions"),
    ("timeline", "[]object", "peaks of every phase, in order"),
    ("timeline[].moment", "string", ", ".join(MOMENTS)),
    ("timeline[].phase", "string", "as in `memory.peak.phase`"),
    ("timeline[].step", "integer", "step of the run, from 0; -1 for the longest batch"),
    ("timeline[].allocated", "integer", "peak of allocated memory"),
    ("timeline[].reserved", "integer?", "peak of reserved memory"),
    (
        "out_of_memory",
        "object?",
        "allocation that fails on this GPU; null if none fails",
    ),
    ("out_of_memory.phase", "string", "as in `memory.peak.phase`"),
    ("out_of_memory.step", "integer", "step of the run, from 0"),
    ("out_of_memory.where", "string", "path of the module"),
    ("out_of_memory.op", "string", "the operation"),
    ("out_of_memory.asked", "integer", "the size of the request"),
    ("out_of_memory.left", "integer", "free memory of the GPU"),
    *RUN,
    (
        "retries",
        "integer",
        "how often the allocator frees its cache and retries on this GPU",
    ),
    ("answers", "[]object", "answers to the reverse questions"),
    (
        "answers[].question",
        "largest_batch|longest_seq|smallest_gpu|cheapest_gpu|cheapest_precision",
        "which",
    ),
    ("answers[].value", "any", "a number or a name; null if nothing fits"),
    ("answers[].device", "integer?", "device memory then"),
    ("answers[].limit", "string", "other limit of the search, or null"),
    (
        "answers[].tried",
        "[]object",
        "settings tried, in order of preference; empty if they are numbers",
    ),
    ("answers[].tried[].setting", "string", "which"),
    ("answers[].tried[].verdict", "string", "fits, tight, no, or the reason"),
    ("answers[].tried[].device", "integer", "device memory"),
    (
        "next",
        "object?",
        "the best change that fits; null if the job fits or no change is known",
    ),
    ("next.kind", "string", "same, shorter, smaller, method, host or hardware"),
    ("next.command", "string", "command for it"),
    ("next.changes", "[]string", "changes, as flags or GPUs"),
    ("next.device", "integer", "device memory then"),
    ("next.verdict", "fits|tight|no", "as `verdict`"),
    ("next.host", "integer", "CPU memory per process then"),
    ("next.slower", "number?", "relative time per token: 0.3 means 30 % slower"),
    (
        "advice",
        "object?",
        "changes that make it fit; null without `--advise`",
    ),
    ("advice.helps", "boolean", "false if no change is known"),
    ("advice.rungs", "[]any", "old name, see `deprecated`: the changes of the first way"),
    ("advice.ways", "[]object", "best first; empty if it already fits"),
    ("advice.ways[].kind", "string", "same, shorter, smaller, method, host or hardware"),
    ("advice.ways[].command", "string", "command for it"),
    ("advice.ways[].changes", "[]string", "changes, as flags or GPUs"),
    ("advice.ways[].device", "integer", "device memory then"),
    ("advice.ways[].verdict", "fits|tight|no", "as `verdict`"),
    ("advice.ways[].host", "integer", "CPU memory per process then"),
    ("advice.ways[].slower", "number?", "relative time per token: 0.3 means 30 % slower"),
    ("advice.ways[].rungs", "[]object", "its changes in order"),
    ("advice.ways[].rungs[].name", "string", "the flags"),
    ("advice.ways[].rungs[].freed", "integer", "bytes saved, after the previous changes"),
    (
        "advice.ways[].rungs[].slower",
        "number?",
        "relative time per token against no change: 0.3 means 30 % slower",
    ),
    ("advice.ways[].rungs[].device", "integer", "device memory then"),
    ("advice.ways[].rungs[].verdict", "fits|tight|no", "as `verdict`"),
    (
        "advice.ways[].rungs[].host",
        "integer?",
        "CPU memory per process then, if it grew",
    ),
    ("problems", "[]object", "errors, warnings and notes"),
    ("problems[].level", "error|warning|note", "how bad"),
    ("problems[].where", "string", "path in the input"),
    ("problems[].message", "string", "one sentence"),
    ("problems[].hint", "string", "how to fix it, or empty"),
)
EXPLAINED: tuple[tuple[str, str, str], ...] = (
    ("workings", "[]object", "with `--explain`: every kind of block alive at the peak"),
    ("workings[].part", "string", "one of `memory.parts`"),
    ("workings[].where", "string", "module path, with a star for the layer number"),
    ("workings[].op", "string", "operation that allocated it"),
    ("workings[].count", "integer", "number of blocks"),
    ("workings[].letters", "string", "formula in symbols"),
    ("workings[].figures", "string", "formula in numbers"),
    ("workings[].each", "integer", "bytes of one"),
    ("workings[].total", "integer", "bytes of all"),
    (
        "kernels",
        "[]object",
        (
            "with `--explain`: kernels and calls of `time` on this rank (of "
            "`generation`: prefill and the last token), longest first"
        ),
    ),
    (
        "kernels[].part",
        "string",
        ("one of `time.parts`, or `beside` for work on other streams"),
    ),
    ("kernels[].phase", "string", "forward, backward, step, prefill or decode"),
    ("kernels[].where", "string", "module path, with a star for the layer number"),
    ("kernels[].op", "string", "the operation"),
    ("kernels[].math", "string", "kind of arithmetic, or empty"),
    ("kernels[].flops", "integer", "FLOPs of one"),
    ("kernels[].moved", "integer", "bytes that one reads and writes, or that a call sends"),
    ("kernels[].seconds", "number", "of one"),
    ("kernels[].ranks", "integer", "ranks of a call; 0 for none"),
    ("kernels[].times", "integer", "number per step"),
)


def to_json(estimate: Estimate, *, explain: bool = False) -> str:
    return json.dumps(to_dict(estimate, explain=explain), indent=2, ensure_ascii=False)


def to_dict(estimate: Estimate, *, explain: bool = False) -> dict[str, Any]:
    known = estimate.parameters
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "deprecated": [
            {"name": one.old, "use": one.new, "until": one.until}
            for one in renames.FIELDS
            if one.old.partition(".")[0] != "advice" or estimate.advice is not None
        ],
        "verdict": estimate.verdict,
        "model": {
            "name": estimate.model.name,
            "family": estimate.model.family,
            "origin": estimate.model.origin,
        },
        **job_dict(estimate),
        **place_dict(estimate),
        "memory": memory_dict(estimate),
        **time_dict(estimate),
        "band": {
            "low": estimate.band.low,
            "high": estimate.band.high,
            "origin": estimate.band.origin,
        },
        "parameters": {"total": known.total, "trainable": known.trainable, "active": known.active},
        "source": estimate.source,
        "versions": dict(estimate.versions),
        "timeline": [stretch._asdict() for stretch in estimate.memory.timeline],
        "out_of_memory": failure_dict(estimate.failure),
        "run": data(estimate.run),
        "retries": estimate.retries,
        "answers": [answer_dict(one) for one in estimate.answers],
        "next": None if estimate.next_way is None else way_dict(estimate.next_way),
        "advice": None if estimate.advice is None else advice_dict(estimate.advice),
        "problems": [problem_dict(problem) for problem in estimate.problems],
    }
    if explain:
        answer["workings"] = [dataclasses.asdict(one) for one in workings(estimate)]
        answer["kernels"] = [one._asdict() for one in estimate.kernels]
    return answer


def job_dict(estimate: Estimate) -> dict[str, Any]:
    """The job, or the script that was run instead."""
    script = estimate.script
    return {
        "job": dataclasses.asdict(estimate.job) if script is None else None,
        "assumed": dict(estimate.assumed),
        "script": None
        if script is None
        else {**dataclasses.asdict(script), "arguments": [*script.arguments]},
    }


def place_dict(estimate: Estimate) -> dict[str, Any]:
    """The GPUs, and how they share the work."""
    gpu, usable, strategy = estimate.gpu, estimate.usable, estimate.strategy
    return {
        "gpu": None
        if gpu is None or usable is None
        else {"id": gpu.id, "name": gpu.name, "usable_low": usable[0], "usable_high": usable[1]},
        "gpus": strategy.ranks,
        "layouts": {}  # a script's are its own
        if estimate.script is not None
        else {name: dataclasses.asdict(layout) for name, layout in strategy.uses()},
        "rank": strategy.rank,
        "ranks": [dataclasses.asdict(one) for one in estimate.ranks],
    }


def memory_dict(estimate: Estimate) -> dict[str, Any]:
    memory = estimate.memory
    return {
        "allocated": memory.allocated,
        "reserved": memory.reserved,
        "device": estimate.device,
        "usable": None if estimate.usable is None else estimate.usable[0],
        "host": estimate.host.size,
        "host_node": estimate.host.node,
        "parts": estimate.parts,
        "peak": moment(memory.at),
    }


def failure_dict(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {**(moment(failure.at) or {}), "asked": failure.asked, "left": failure.left}


def answer_dict(one: Answer) -> dict[str, Any]:
    return {
        "question": one.question,
        "value": one.value,
        "device": one.device,
        "limit": one.limit,
        "tried": [
            {"setting": name, "verdict": verdict, "device": device}
            for name, verdict, device in one.tried
        ],
    }


def advice_dict(advice: Advice) -> dict[str, Any]:
    return {
        "helps": advice.helps,
        "rungs": [dataclasses.asdict(rung) for rung in advice.rungs],
        "ways": [
            {**way_dict(one), "rungs": [dataclasses.asdict(rung) for rung in one.rungs]}
            for one in advice.ways
        ],
    }


def way_dict(way: Way) -> dict[str, Any]:
    return {
        "kind": way.kind,
        "command": way.command,
        "changes": list(way.names),
        "device": way.device,
        "verdict": way.verdict,
        "host": way.host,
        "slower": way.slower,
    }


def refusal(problems: Iterable[Problem]) -> dict[str, Any]:
    """Unusable input in the same shape: everything that would be an answer is null or empty."""
    empty: dict[str, Any] = {"schema": SCHEMA}
    for path, kind, _ in FIELDS:
        if "." not in path and path != "schema":
            empty[path] = (
                []
                if kind.startswith("[]")
                else {}
                if kind.startswith("{}")
                else 0
                if kind == "integer"
                else None
            )
    empty["problems"] = [problem_dict(problem) for problem in problems]
    return empty


def moment(at: Moment | None) -> dict[str, Any] | None:
    return (
        None if at is None else {"phase": at.phase, "step": at.step, "where": at.where, "op": at.op}
    )


def problem_dict(problem: Problem) -> dict[str, str]:
    return {
        "level": problem.level,
        "where": problem.where,
        "message": problem.message,
        "hint": problem.hint,
    }


def schema() -> dict[str, Any]:
    """`FIELDS` as a JSON Schema (2020-12)."""
    root: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
    for path, kind, meaning in (*FIELDS, *EXPLAINED):
        *outer, name = path.split(".")
        holder = root
        for step in outer:
            holder = holder["properties"][step.removesuffix("[]")]
            holder = holder["items"] if step.endswith("[]") else holder
        holder["properties"][name] = {**_type(kind), "description": meaning}
        if (path, kind, meaning) in FIELDS or outer:
            holder["required"].append(name)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"memfit estimate, schema {SCHEMA}",
    }
    return head | root


def _type(kind: str) -> dict[str, Any]:
    if kind == "any":
        return {}
    null = kind.endswith("?")
    kind = kind.removesuffix("?")
    if kind.startswith("[]"):
        return {"type": "array", "items": _type(kind[2:])}
    if kind.startswith("{}"):
        return {"type": "object", "additionalProperties": _type(kind[2:])}
    if "|" in kind:
        return {"enum": [*kind.split("|"), *([None] if null else [])]}
    nested: dict[str, Any] = {"properties": {}, "required": []} if kind == "object" else {}
    return {"type": [kind, "null"] if null else kind, **nested}
