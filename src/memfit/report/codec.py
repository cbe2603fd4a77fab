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

from memfit.errors import Problem
from memfit.estimate import Estimate, Way
from memfit.report.explain import workings
from memfit.report.pace import TIME, time_dict
from memfit.simulate.memory import MOMENTS, Moment

SCHEMA = 1
# (path, type, meaning). `?` may be null, `[]` a list, `{}` a map from names, `a|b` one of these; a
# row for an object comes first.
FIELDS: tuple[tuple[str, str, str], ...] = (
    ("schema", "integer", "version of this format"),
    (
        "verdict",
        "fits|tight|no?",
        (
            "`tight`: the band straddles what is usable; null where no GPU was named or the "
            "input was unusable"
        ),
    ),
    ("model", "object?", "what was asked about"),
    ("model.name", "string", "as it was named, or as the catalog names it"),
    ("model.family", "string", "whose formulas it follows"),
    ("model.origin", "string", "where its config was read"),
    (
        "job",
        "object?",
        "every option of the job, defaults included; see the reference of jobs; null for a script",
    ),
    (
        "assumed",
        "{}any",
        "options of the job that nobody named, with the trainer's own defaults",
    ),
    ("script", "object?", "the script that was traced; null where it was a model"),
    ("script.path", "string", "as it was given"),
    ("script.arguments", "[]string", "what it was given"),
    ("script.steps", "integer", "optimizer steps for which it was followed"),
    ("script.files", "[]object", "files that it would have written, largest first"),
    ("script.files[].path", "string", "as the script sees it"),
    ("script.files[].size", "integer", "bytes; of checkpoints, with all their tensors"),
    ("script.isolation", "string", "what kept it from changing anything outside"),
    ("script.gaps", "string", "what that leaves open, or nothing"),
    ("gpu", "object?", "null where none was named"),
    ("gpu.id", "string", "its row in the table of GPUs, `custom` where only its memory was given"),
    ("gpu.name", "string", "as the driver names it"),
    ("gpu.usable_low", "integer", "the least that a process was found to be offered"),
    ("gpu.usable_high", "integer", "the most"),
    ("gpus", "integer", "how many ranks share the work"),
    ("layouts", "{}any", "what stands behind `--use`, by name, with every setting"),
    ("rank", "integer", "whose memory this is: the worst"),
    ("ranks", "[]object", "those whose memory differs"),
    ("ranks[].rank", "integer", "the first of those alike"),
    ("ranks[].alike", "integer", "how many are like it"),
    ("ranks[].allocated", "integer", "its peak of live tensors"),
    ("ranks[].device", "integer", "what it takes of its GPU"),
    ("ranks[].verdict", "fits|tight|no?", "as `verdict`"),
    ("memory", "object?", "the four numbers, and the host's"),
    (
        "memory.allocated",
        "integer",
        "peak of live tensors, as torch.cuda.max_memory_allocated counts it",
    ),
    (
        "memory.reserved",
        "integer?",
        "peak of what torch's caching allocator holds; null where it was not replayed",
    ),
    (
        "memory.device",
        "integer",
        "what nvidia-smi shows: reserved (or, without it, allocated), the CUDA context and NCCL",
    ),
    (
        "memory.usable",
        "integer?",
        "what the GPU offers to one process, at least; null where no GPU was named",
    ),
    ("memory.host", "integer", "host memory beside the process itself, at its worst moment"),
    (
        "memory.host_node",
        "integer",
        "what all ranks of a node keep there together while they run; 0 where nothing stays",
    ),
    (
        "memory.parts",
        "{}integer",
        (
            "what fills it at the peak; all together `device`, without `fragmentation`, "
            "`context` and `nccl` (several GPUs) `allocated`"
        ),
    ),
    (
        "memory.peak",
        "object?",
        "when the peak of live tensors comes; null where nothing is allocated",
    ),
    (
        "memory.peak.phase",
        "string",
        "load, prepare, forward, backward, step, evaluate, save, prefill or decode",
    ),
    ("memory.peak.step", "integer", "of the run, from 0"),
    ("memory.peak.where", "string", "path of the module"),
    ("memory.peak.op", "string", "the operation whose result did not fit below the peak before it"),
    *TIME,
    ("band", "object?", "`device` lies in here"),
    ("band.low", "integer", "the least"),
    ("band.high", "integer", "the most; it fits if this is below `usable`"),
    ("band.origin", "string", "what the band rests on"),
    ("parameters", "object?", "counted, a tied tensor once"),
    ("parameters.total", "integer", "of the model, without adapters"),
    ("parameters.trainable", "integer", "that get gradients, adapters included"),
    ("parameters.active", "integer", "of the total, that one token passes through"),
    ("source", "formula|trace|measured|handwritten|bound?", "what the answer was computed from"),
    ("versions", "{}string", "of the libraries that were asked"),
    ("timeline", "[]object", "the peaks of every phase, in order"),
    ("timeline[].moment", "string", ", ".join(MOMENTS)),
    ("timeline[].phase", "string", "as in `memory.peak.phase`"),
    ("timeline[].step", "integer", "of the run, from 0; -1: of the longest batch"),
    ("timeline[].allocated", "integer", "peak of live tensors"),
    ("timeline[].reserved", "integer?", "peak of what the allocator holds"),
    (
        "out_of_memory",
        "object?",
        "the request that this GPU could not serve; null where all were served",
    ),
    ("out_of_memory.phase", "string", "as in `memory.peak.phase`"),
    ("out_of_memory.step", "integer", "of the run, from 0"),
    ("out_of_memory.where", "string", "path of the module"),
    ("out_of_memory.op", "string", "the operation"),
    ("out_of_memory.asked", "integer", "the size of the request"),
    ("out_of_memory.left", "integer", "what the driver still had"),
    (
        "retries",
        "integer",
        "how often the allocator must give back everything cached to get through on this GPU",
    ),
    ("answers", "[]object", "to the reverse questions that were asked"),
    (
        "answers[].question",
        "largest_batch|longest_seq|smallest_gpu|cheapest_gpu|cheapest_precision",
        "which",
    ),
    ("answers[].value", "any", "a number or a name; null where nothing fits"),
    ("answers[].device", "integer?", "what it then takes of the device"),
    ("answers[].limit", "string", "what else ended the search, if anything did"),
    (
        "answers[].tried",
        "[]object",
        "the settings looked at, in order of preference; empty where they are numbers",
    ),
    ("answers[].tried[].setting", "string", "which"),
    ("answers[].tried[].verdict", "string", "fits, tight, no, or why there is none"),
    ("answers[].tried[].device", "integer", "what it takes"),
    (
        "next",
        "object?",
        "the best way that fits; null where the job fits as it is, or no way is known",
    ),
    ("next.kind", "string", "same, shorter, smaller, method, host or hardware"),
    ("next.command", "string", "the command that asks for it"),
    ("next.changes", "[]string", "what it changes, as flags or GPUs"),
    ("next.device", "integer", "what is needed then"),
    ("next.verdict", "fits|tight|no", "as `verdict`"),
    ("next.host", "integer", "host memory per process then"),
    ("next.slower", "number?", "how much longer a token then takes, 0.3 for 30 %"),
    (
        "advice",
        "object?",
        "ways that make it fit; null where they were not asked for",
    ),
    ("advice.helps", "boolean", "false where no way is known"),
    ("advice.ways", "[]object", "the best first; none where it fits as it is"),
    ("advice.ways[].kind", "string", "same, shorter, smaller, method, host or hardware"),
    ("advice.ways[].command", "string", "the command that asks for it"),
    ("advice.ways[].changes", "[]string", "what it changes, as flags or GPUs"),
    ("advice.ways[].device", "integer", "what is needed then"),
    ("advice.ways[].verdict", "fits|tight|no", "as `verdict`"),
    ("advice.ways[].host", "integer", "host memory per process then"),
    ("advice.ways[].slower", "number?", "how much longer a token then takes, 0.3 for 30 %"),
    ("advice.ways[].rungs", "[]object", "its changes one after the other"),
    ("advice.ways[].rungs[].name", "string", "the flags"),
    ("advice.ways[].rungs[].freed", "integer", "bytes of the device, after the rungs before"),
    (
        "advice.ways[].rungs[].slower",
        "number?",
        "how much longer a token then takes than without any, 0.3 for 30 %",
    ),
    ("advice.ways[].rungs[].device", "integer", "what is needed then"),
    ("advice.ways[].rungs[].verdict", "fits|tight|no", "as `verdict`"),
    (
        "advice.ways[].rungs[].host",
        "integer?",
        "host memory per process then, where it became more",
    ),
    ("problems", "[]object", "what is wrong (level `error`), doubtful or assumed"),
    ("problems[].level", "error|warning|note", "how bad"),
    ("problems[].where", "string", "path into the input"),
    ("problems[].message", "string", "one sentence"),
    ("problems[].hint", "string", "what to do about it, or nothing"),
)
EXPLAINED: tuple[tuple[str, str, str], ...] = (
    ("workings", "[]object", "with `--explain`: every kind of block alive at the peak"),
    ("workings[].part", "string", "one of `memory.parts`"),
    ("workings[].where", "string", "path of the module, a star for the number of the layer"),
    ("workings[].op", "string", "the operation that made it"),
    ("workings[].count", "integer", "how many there are"),
    ("workings[].letters", "string", "the formula, in letters where the sizes have them"),
    ("workings[].figures", "string", "the formula, in numbers"),
    ("workings[].each", "integer", "bytes of one"),
    ("workings[].total", "integer", "bytes of all"),
    (
        "kernels",
        "[]object",
        (
            "with `--explain`: kernels and calls of `time` on this rank (of `generation`: "
            "the prompt's pass, the last token's), the longest first"
        ),
    ),
    (
        "kernels[].part",
        "string",
        (
            "one of `time.parts`, or `beside`: on other streams, behind kernels as far as "
            "those are long enough"
        ),
    ),
    ("kernels[].phase", "string", "forward, backward, step, prefill or decode"),
    ("kernels[].where", "string", "path of the module, a star for the number of the layer"),
    ("kernels[].op", "string", "the operation"),
    ("kernels[].math", "string", "the kind of arithmetic, or nothing"),
    ("kernels[].flops", "integer", "that one computes"),
    ("kernels[].moved", "integer", "bytes that one reads and writes, or that a call carries"),
    ("kernels[].seconds", "number", "of one"),
    ("kernels[].ranks", "integer", "that a call is among; 0: none"),
    ("kernels[].times", "integer", "how often it runs in the step"),
)


def to_json(estimate: Estimate, *, explain: bool = False) -> str:
    return json.dumps(to_dict(estimate, explain=explain), indent=2, ensure_ascii=False)


def to_dict(estimate: Estimate, *, explain: bool = False) -> dict[str, Any]:
    memory, gpu, known = estimate.memory, estimate.gpu, estimate.parameters
    usable = estimate.usable
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "verdict": estimate.verdict,
        "model": {
            "name": estimate.model.name,
            "family": estimate.model.family,
            "origin": estimate.model.origin,
        },
        "job": dataclasses.asdict(estimate.job) if estimate.script is None else None,
        "assumed": dict(estimate.assumed),
        "script": None
        if estimate.script is None
        else {**dataclasses.asdict(estimate.script), "arguments": [*estimate.script.arguments]},
        "gpu": None
        if gpu is None or usable is None
        else {"id": gpu.id, "name": gpu.name, "usable_low": usable[0], "usable_high": usable[1]},
        "gpus": estimate.strategy.ranks,
        "layouts": {}  # a script's are its own
        if estimate.script is not None
        else {name: dataclasses.asdict(layout) for name, layout in estimate.strategy.uses()},
        "rank": estimate.strategy.rank,
        "ranks": [dataclasses.asdict(one) for one in estimate.ranks],
        "memory": {
            "allocated": memory.allocated,
            "reserved": memory.reserved,
            "device": estimate.device,
            "usable": None if usable is None else usable[0],
            "host": estimate.host.size,
            "host_node": estimate.host.node,
            "parts": estimate.parts,
            "peak": moment(memory.at),
        },
        **time_dict(estimate),
        "band": {
            "low": estimate.band.low,
            "high": estimate.band.high,
            "origin": estimate.band.origin,
        },
        "parameters": {"total": known.total, "trainable": known.trainable, "active": known.active},
        "source": estimate.source,
        "versions": dict(estimate.versions),
        "timeline": [stretch._asdict() for stretch in memory.timeline],
        "out_of_memory": None,
        "retries": estimate.retries,
        "answers": [
            {
                "question": one.question,
                "value": one.value,
                "device": one.device,
                "limit": one.limit,
                "tried": [
                    {"setting": name, "verdict": verdict, "device": device}
                    for name, verdict, device in one.tried
                ],
            }
            for one in estimate.answers
        ],
        "next": None if estimate.next_way is None else way_dict(estimate.next_way),
        "advice": None
        if estimate.advice is None
        else {
            "helps": estimate.advice.helps,
            "ways": [
                {**way_dict(one), "rungs": [dataclasses.asdict(rung) for rung in one.rungs]}
                for one in estimate.advice.ways
            ],
        },
        "problems": [problem_dict(problem) for problem in estimate.problems],
    }
    if estimate.failure is not None:
        answer["out_of_memory"] = {
            **(moment(estimate.failure.at) or {}),
            "asked": estimate.failure.asked,
            "left": estimate.failure.left,
        }
    if explain:
        answer["workings"] = [dataclasses.asdict(one) for one in workings(estimate)]
        answer["kernels"] = [one._asdict() for one in estimate.kernels]
    return answer


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
