"""What people and programs are shown: figures, the text within its width, the working, Markdown,
JSON against its schema."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from memfit.errors import InputError, Problem
from memfit.estimate import Answer, Estimate, estimate
from memfit.hardware import Cluster, custom_gpu, find_gpu
from memfit.job import Job
from memfit.model.families import build
from memfit.report import codec, write
from memfit.report.explain import working, workings
from memfit.report.figures import bar, count, gib, percent, with_unit
from memfit.report.markdown import escape, markdown
from memfit.report.text import text
from memfit.tape import Alloc, Free, Mark, Tape
from memfit.units import GIB, KIB, MIB

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
MODEL = build(
    SMALL, name="acme/a-model-with-a-name-that-is-long-but-not-unheard-of-8b-it", origin="a test"
)
EVENTS = (
    Mark("load"),
    Alloc(0, 8 * GIB, "weights", "model.embed_tokens", "parameter", (2**21, 2048, 2)),
    Mark("forward", "model.layers.0"),
    Alloc(
        1,
        3 * 512 * MIB,
        "activations",
        "model.layers.0.mlp.gate_proj",
        "linear",
        (3, 2**20, 256, 2),
    ),
    Mark("forward", "model.layers.1"),
    Alloc(
        2,
        3 * 512 * MIB,
        "activations",
        "model.layers.1.mlp.gate_proj",
        "linear",
        (3, 2**20, 256, 2),
    ),
    Mark("backward"),
    Alloc(3, 100, "temporaries", "lm_head", "scalar", "a trace saw it"),
    Free(1),
    Free(2),
    Mark("forward", step=1),
    Alloc(4, GIB, "activations"),
    Free(4),
)


def made(cluster: Cluster | None, **options: Any) -> Estimate:
    tape = Tape(events=EVENTS, source="handwritten", versions={"torch": "9.9"})
    return estimate(MODEL, Job(**options), cluster, producer=lambda *_: tape)


def variants() -> Iterator[Estimate]:
    yield made(None)
    yield made(Cluster(gpu=custom_gpu(24 * GIB)))
    yield made(
        Cluster(gpu=custom_gpu(12 * GIB)),
        method="lora",
        targets="q_proj,v_proj",
        checkpointing="full",
        alloc_conf="expandable_segments:True",
    )
    yield made(Cluster(gpu=find_gpu("rtx-pro-6000-ws")))
    out = made(Cluster(gpu=custom_gpu(9 * GIB)), task="inference", batch=1000, seq=100_000)
    problems = (
        *out.problems,
        Problem(message="m" * 30 + " word" * 30, where="job.seq", hint="do " * 60, level="warning"),
    )
    answers = (
        Answer(question="largest_batch", value=None),
        Answer(question="longest_seq", value=77, device=GIB, limit="the model's maximum length"),
        Answer(
            question="cheapest_precision",
            value="bf16",
            device=GIB,
            tried=(("fp32", "no", 9 * GIB), ("int8", "no formula", 0), ("bf16", "fits", GIB)),
        ),
    )
    yield dataclasses.replace(out, problems=problems, answers=answers)


@pytest.fixture(params=range(5), ids=["no gpu", "fits", "tight", "large", "no"])
def found(request: pytest.FixtureRequest) -> Estimate:
    return list(variants())[request.param]


# ----------------------------------------------------------------------------------------- figures
@pytest.mark.parametrize(("size", "shown"), [(999.4, "999"), (1369, "1,370"), (12_597, "12,600")])
def test_three_digits_are_enough(size: float, shown: str) -> None:
    assert gib(int(size * GIB)) == shown


def test_figures() -> None:
    assert [gib(size) for size in (0, 1, GIB // 200 - 1, GIB // 100, 80319652864)] == [
        "0.00",
        "<0.01",
        "<0.01",
        "0.01",
        "74.8",
    ]
    assert [with_unit(size) for size in (0, 1023, KIB, 56 * MIB, GIB)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "56.0 MiB",
        "1.00 GiB",
    ]
    assert [count(value) for value in (7, 1500, 41_943_040, 8_030_261_248, 2 * 10**12)] == [
        "7",
        "1.50 k",
        "41.94 M",
        "8.03 B",
        "2.00 T",
    ]
    assert [percent(1, 3), percent(0, 5), percent(1, 0)] == ["33 %", "0 %", ""]


def test_a_bar_begins_where_the_one_before_ends() -> None:
    assert bar(0, 50, 100, 10) == "█████"
    assert bar(50, 50, 100, 10) == "     █████"
    assert bar(0, 1, 1000, 10) == "█", "what is there is seen"
    assert bar(0, 0, 1000, 10) == ""
    assert bar(0, 20, 100, 10, mark=80) == "██      │"
    assert bar(70, 30, 100, 10, mark=80) == "       ███", (
        "where the GPU is full, the bar covers the line"
    )


# -------------------------------------------------------------------------------------------- text
@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_keep_within_the_width(found: Estimate, width: int) -> None:
    lines = text(found, width=width).splitlines() + working(found, width=width).splitlines()
    unbreakable = max(len(word) for word in " ".join(lines).split())
    assert [line for line in lines if len(line) > max(width, unbreakable + 11)] == []
    if width >= 80:
        assert [line for line in lines if len(line) > width] == []


def test_the_verdict_stands_first_and_without_colour(found: Estimate) -> None:
    plain = text(found)
    start = {"fits": "fits: ", "tight": "tight: ", "no": "does not fit: ", None: "needs "}[
        found.verdict
    ]
    assert plain.startswith(start)
    assert "\x1b" not in plain
    painted = text(found, colour=True)
    assert ("\x1b[" in painted) == bool(found.verdict or found.problems)
    assert re.sub(r"\x1b\[\d*m", "", painted) == plain


def test_every_number_says_which_it_is(found: Estimate) -> None:
    plain = text(found)
    for name, size in (
        ("device", found.device),
        ("reserved", found.memory.reserved),
        ("allocated", found.memory.allocated),
    ):
        assert size is not None
        assert re.search(rf"^{name} +{gib(size)} GiB  \w", plain, re.MULTILINE), name
    assert ("usable  " in plain) == (found.usable is not None)


def test_shown_parts_sum_to_device(found: Estimate) -> None:
    shown = re.findall(r"^  (\w[\w ]*?) +(<?[\d.]+) GiB +\d+ %", text(found), re.MULTILINE)
    assert abs(sum(float(size.lstrip("<")) for _, size in shown) - found.device / GIB) < 0.06 * len(
        shown
    )
    assert re.search(rf"^  = device +{gib(found.device)} GiB$", text(found), re.MULTILINE)


def test_the_text_names_the_moment_and_the_failure() -> None:
    found = made(Cluster(gpu=custom_gpu(11 * GIB)))
    plain = text(found, width=120)
    assert "allocated memory peaks in the first step, backward, lm_head (scalar)" in plain
    assert (
        "runs out of memory in the first step, forward, model.layers.1.mlp.gate_proj "
        "(linear): requests 1.50 GiB"
    ) in plain
    rows = re.findall(r"^  ([\w ,]+?)  +([\d.]+) +([\d.]+)  █", plain, re.MULTILINE)
    assert [(name.strip(), allocated) for name, allocated, _ in rows] == [
        ("load", "8.00"),
        ("first step, forward", "11.0"),
        ("backward", "11.0"),
        ("steady step, forward", "9.00"),
    ]


def test_only_options_that_were_changed_are_told() -> None:
    plain = text(made(None, method="lora", rank=8, packing=False), width=120)
    assert (
        "job        finetune lora, transformers, bf16, adamw, batch 1 x 2048 tokens, "
        "packing false, rank 8\n"
    ) in plain


def test_steps_of_one_phase_stand_in_one_line() -> None:
    events = (
        Mark("decode", step=1),
        Alloc(0, GIB, "kv_cache"),
        Mark("decode", step=2),
        Alloc(1, GIB, "kv_cache"),
    )
    found = estimate(
        MODEL, Job(task="inference"), producer=lambda *_: Tape(events=events, source="handwritten")
    )
    assert re.findall(r"^  decode +(\S+) +(\S+)", text(found), re.MULTILINE) == [("2.00", "2.00")]
    assert len(codec.to_dict(found)["timeline"]) == 2


def test_an_empty_tape_is_an_answer() -> None:
    found = estimate(
        MODEL,
        Job(),
        Cluster(gpu=custom_gpu(GIB)),
        producer=lambda *_: Tape(events=(), source="handwritten"),
    )
    assert "allocated     0.00 GiB" in text(found)
    assert working(found)
    assert markdown(found)
    assert codec.to_dict(found)["memory"]["peak"] is None


# ------------------------------------------------------------------------------------- the working
def test_formulas_with_their_numbers_put_in() -> None:
    found = estimate(MODEL, Job(seq=128, batch=3), Cluster(gpu=custom_gpu(GIB)))
    every = list(workings(found))
    lines = {(one.part, one.where, one.op): one for one in every}
    gate = lines["activations", "model.layers.*.mlp.gate_proj", "linear"]
    assert (gate.letters, gate.figures) == ("B·S·F·2", "3·128·176·2")
    assert gate.each == 3 * 128 * 176 * 2
    assert (gate.count, gate.total) == (8, 8 * gate.each)
    key = lines["weights", "model.layers.*.self_attn.k_proj", "parameter"]
    assert (key.letters, key.figures, key.each) == ("K·H·D·2", "2·16·64·2", 2 * 16 * 64 * 2)
    totals: dict[str, int] = {}
    for one in every:
        totals[one.part] = totals.get(one.part, 0) + one.total
    assert {**totals, "rounding": found.memory.parts["rounding"]} == dict(found.memory.parts)


def test_the_working_reads_like_the_sum_it_is() -> None:
    shown = working(made(None), width=200)
    assert (
        "  2 × model.layers.*.mlp.gate_proj linear\n      3·1048576·256·2 = 1.50 GiB, in "
        "all 3.00 GiB\n"
    ) in shown
    assert "a trace saw it = 100 B" in shown
    assert "rounding  412 B" in shown
    assert re.search(r"^context  .* GiB\n  middle of", shown, re.MULTILINE)


def test_packed_values_are_no_product() -> None:
    events = (Mark("load"), Alloc(0, 2048, "weights", "w", "parameter", (64, 64, 1)))
    found = estimate(MODEL, Job(), producer=lambda *_: Tape(events=events, source="handwritten"))
    assert next(iter(workings(found))).letters == "D·D values, packed"


def test_one_function_writes_every_format() -> None:
    answer = made(None)
    assert write(answer) == text(answer)
    assert (
        write(answer, explain=True, width=100)
        == f"{text(answer, width=100)}\n\n{working(answer, width=100)}"
    )
    assert write(answer, "markdown", explain=True).startswith(
        markdown(answer) + "\n\n```\nevery part in detail"
    )
    assert json.loads(write(answer, "json", explain=True))["workings"]
    with pytest.raises(InputError, match="`yaml`"):
        write(answer, "yaml")


# ------------------------------------------------------------------------------- Markdown and JSON
def test_markdown_tables_are_whole(found: Estimate) -> None:
    rows = [line for line in markdown(found).splitlines() if line.startswith("|")]
    assert len(rows) > 10
    assert all(line.endswith("|") and line.count("|") in (4, 5) for line in rows)


def test_names_bring_no_markup_along() -> None:
    assert escape("a_b*c|<d>") == r"a\_b\*c\|\<d\>"
    evil = dataclasses.replace(MODEL, name="<script>|x|`y`")
    found = estimate(evil, Job(), producer=lambda *_: Tape(events=EVENTS, source="handwritten"))
    assert "<script>" not in markdown(found)


def problems_of(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """As much of JSON Schema as ours uses; unknown keys of an object that lists its own are
    problems, too."""
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "null": type(None),
    }
    if "enum" in schema:
        if value not in schema["enum"]:
            yield f"{path}: {value!r} is none of {schema['enum']}"
        return
    wanted = schema.get("type")
    if wanted is None:
        return
    names = [wanted] if isinstance(wanted, str) else wanted
    if isinstance(value, bool) != ("boolean" in names) or not isinstance(
        value, tuple(kinds[name] for name in names)
    ):
        yield f"{path}: {value!r} is no {wanted}"
    elif isinstance(value, dict):
        listed = schema.get("properties", {})
        yield from (
            f"{path}.{key} is missing" for key in schema.get("required", ()) if key not in value
        )
        for key, inner in value.items():
            if listed and key not in listed:
                yield f"{path}.{key} is not in the schema"
            yield from problems_of(
                inner, listed.get(key, schema.get("additionalProperties", {})), f"{path}.{key}"
            )
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from problems_of(inner, schema.get("items", {}), f"{path}[{index}]")


@pytest.mark.parametrize("explain", [False, True])
def test_json_follows_its_schema(found: Estimate, explain: bool) -> None:
    answer = json.loads(codec.to_json(found, explain=explain))
    assert list(problems_of(answer, codec.schema())) == []
    assert ("workings" in answer) == explain
    assert answer["schema"] == 1
    assert answer["verdict"] == found.verdict
    assert sum(answer["memory"]["parts"].values()) == answer["memory"]["device"]
    inside = {
        name: size
        for name, size in answer["memory"]["parts"].items()
        if name not in ("fragmentation", "context")
    }
    assert sum(inside.values()) == answer["memory"]["allocated"]
    assert answer["job"] == dataclasses.asdict(found.job)


def test_a_refusal_has_the_same_keys() -> None:
    refusal = codec.refusal((Problem(message="m", where="w"),))
    assert list(problems_of(refusal, codec.schema())) == []
    assert list(refusal) == [path for path, _, _ in codec.FIELDS if "." not in path]
    assert refusal["problems"] == [{"level": "error", "where": "w", "message": "m", "hint": ""}]


def test_the_schema_check_finds_what_is_wrong() -> None:
    answer = codec.to_dict(made(None))
    schema = codec.schema()
    for change in (
        {"verdict": "maybe"},
        {"extra": 1},
        {"band": {"low": 1.5, "high": 2, "origin": ""}},
        {"timeline": [{"phase": "load"}]},
    ):
        assert list(problems_of({**answer, **change}, schema)), change
    del answer["source"]
    assert list(problems_of(answer, schema)) == [".source is missing"]


def test_usable_memory_is_the_least_and_the_most_by_name() -> None:
    """They differ on an A100: what the driver keeps is a range."""
    found = made(Cluster(gpu=find_gpu("a100-sxm-80gb")))
    assert found.usable is not None
    least, most = found.usable
    assert least < most
    answer = codec.to_dict(found)
    assert answer["memory"]["usable"] == least
    assert (answer["gpu"]["usable_low"], answer["gpu"]["usable_high"]) == (least, most)


def test_the_keys_that_the_format_promises() -> None:
    """Schema 1: these may not go."""
    answer = codec.to_dict(made(Cluster(gpu=custom_gpu(24 * GIB))))
    assert {"schema", "verdict", "memory", "band", "parameters", "source", "problems"} <= set(
        answer
    )
    assert {"allocated", "reserved", "device", "usable", "host", "parts", "peak"} <= set(
        answer["memory"]
    )
    assert {"phase", "where"} <= set(answer["memory"]["peak"])
    assert {"low", "high"} <= set(answer["band"])
    assert {"total", "trainable", "active"} == set(answer["parameters"])


def test_phases_stand_in_the_order_of_a_step() -> None:
    """Outputs that the forward pass lets go belong to it, also where autocast made fp32 copies of
    them."""
    from memfit.api.verbs import estimate as asked

    for precision in ("bf16", "autocast-fp16", "autocast-bf16"):
        found = asked("openai-community/gpt2", offline=True, seq=64, precision=precision)
        phases = [(one.phase, one.step) for one in found.memory.timeline]
        assert phases == [
            ("load", 0),
            *((phase, step) for step in (0, 1) for phase in ("forward", "backward", "step")),
        ]


def test_shares_that_round_to_nothing_are_less_than_one_percent() -> None:
    from memfit.report.figures import percent

    assert [percent(part, 1000) for part in (0, 1, 4, 5, 6, 1000)] == [
        "0 %",
        "<1 %",
        "<1 %",
        "<1 %",
        "1 %",
        "100 %",
    ]
