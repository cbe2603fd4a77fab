"""Writes docs/accuracy.md, its picture, the table in README.md and the residuals that bands are
computed from.

python tools/accuracy.py [--from FILE.json]   (FILE: what `memfit accuracy --json` printed; without
it the rows are asked anew, which takes minutes)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from memfit import band  # noqa: E402
from memfit.report import accuracy as report  # noqa: E402
from memfit.report import accuracy_data  # noqa: E402
from memfit.report.figures import gib  # noqa: E402
from memfit.report.markdown import table  # noqa: E402
from memfit.truth import Case, read  # noqa: E402
from memfit.truth.accuracy import CERTAIN, Figures, figures  # noqa: E402
from memfit.truth.accuracy import accuracy as compare  # noqa: E402
from memfit.truth.case import CONFIDENCES, METRICS, SERVED  # noqa: E402
from memfit.truth.causes import why  # noqa: E402
from memfit.truth.repeats import METRIC, apart, middle, nearest, repeats  # noqa: E402
from memfit.truth.statistics import averaged  # noqa: E402
from memfit.truth.traced import STORED  # noqa: E402

NOTE = "<!-- Written by tools/accuracy.py (`make docs`); changes made here are lost. -->"
PEERS_FILE = ROOT / "docs" / "peers.json"
BEGIN, END = "<!-- accuracy: begin, written by tools/accuracy.py -->", "<!-- accuracy: end -->"
PAGE = """\
# Accuracy

{note}

How far memfit, and every known method of estimating, is off on figures that other people measured
and published. Print it with `memfit accuracy`; `--worst 20` takes the worst cases apart, `--plot
FILE.svg` draws the picture, and a file of rows of your own in the same form may follow ([JSON
format](reference/json.md)). No constant of a prediction is fitted to these figures: a correction
names the code that allocates. The tail of the likely range is, and is called so.

{summary}

![predicted against measured memory](accuracy.svg)

{legend}
"""
BAND = """\
## The band

The likely range (the band) should hold nine of ten measured values of device or reserved memory.
Each source counts alike, because a new question comes from a machine that memfit has never seen.
The band leaves out the outermost {tail} % of published runs on each side. Coverage is measured on
sources that the band has not seen: for each source in turn, the ends come from all others. Four
of five cases come from one source, fms-acceleration, whose errors are larger than the others', so
the coverage over cases is mostly its coverage. Ends in bytes were tried on 2026-11-23 ([the
log](log.md)) and not taken: they covered more, and added 4 GiB to every job, however small. What
would raise the coverage over cases is to find what fms-acceleration's reserved memory is made of.
"""
REGIMES = """\
## The band by regime

A regime is the counter, the number of GPUs and whether lengths vary. left out: how many of a
source's cases lie inside the ends computed from all other sources, averaged over sources; inside:
how many of all cases lie inside the ends from all sources; width: the median width of the band, as
a share of the prediction. A regime with fewer than {sources} sources or {cases} cases has no
evidence, and an answer says so. Live bytes have a band of their own; the band of an answer is about
device memory.
"""
REGIME_HEAD = ("regime", "cases", "sources", "left out %", "inside %", "width %", "evidence")
SERVING = """\
## Start-up logs of serving engines

Published logs (`truth/data/serving.jsonl.gz`) against what `memfit estimate --engine` says, over
rows of confidence high or medium that name the model and the GPU. Errors in per cent; `over 5 %
more promised`: the share of logs in which the engine had less cache than memfit said, by more than
5 %. Left out as evidence: 30 logs from which constants are taken (ROCm; what a CUDA graph takes; in
unseen logs sums of ranks and copies of embeddings), and nine of one publisher's GPTQ files, whose
group size was chosen by the weights that they log.
Three readings use a row's own figures: where a name such as "A100" leaves the size open, the
smallest card that holds the logged weights and cache is taken; Unsloth's number of sequences, where
its log is not at hand, follows from the logged weights; and a log of vLLM without a version, whose
tokens are those of blocks, is read as one of 0.19.
Rows of llama.cpp and its fork with one figure each are gathered by run; of these only the weights
(`model_gib`, all devices) and the cache of the whole model are compared, since the placement of
tensors is not printed. Files that publishers made by recipes of their own, under the name of one
of llama.cpp's, are up to 25 % off.
What is off, and why: on a Radeon AI PRO R9700 starts of vLLM 0.11.2 that compiled have 0 to 3.0 GiB
less cache than starts by the same command with compiled kernels. vLLM compiles inside its profiling
run and counts the compiler's peak as activation (vllm#54122). From 0.17 on memfit counts what that
peak is on NVIDIA GPUs, a copy of the embedding table, where images are not put among the tokens.
On ROCm no rule was found: it counts 2.6 GiB, from one pair of logs, for each start that compiles,
before 0.13: the two logs of 0.13 that compiled, both of Gemma 3, miss nothing. On
Ascend cards weights are
within 1 %, but with a fused dispatch of experts (+10 %). Their logs print no version: the options
that they print are nearest to those of SGLang 0.5.7, which their rows name since their errors were
looked into, with the figures of one rank instead of several (SGLang's weights before: 3.7 % median,
12.4 % p95; tokens 2.2 and 38.8). On a DGX Spark SGLang reads the available memory of the
machine, which its own processes fill, too; what the driver keeps for each page counts (1 %). One
row of TensorRT-LLM
(tensorrt-llm-0012) said one GPU until its errors were looked into; its file is called `W4_tp2.txt`,
its bytes a token are those of half a model, and it says two
since (weights before: 96.5 % off). The GPU, cache and draft of vllm-0206 are those of its source
since then, too (tokens before: 37 % off; 7 % now). No row of this table was held out: the rules
were read from source and checked against these logs, and the one for starts on ROCm that compile
was seen in eight logs that are compared here.
"""
HELD_OUT = """\
### Logs that nobody had looked at

Seventeen logs of vLLM and SGLang (`truth/data/unseen.jsonl`), collected on 2026-11-24 once the
rules stood, and judged before a rule was changed. Tokens of KV cache were then: SGLang 0.1 %
median, 3.6 % p95, none over 5 % (7 logs); vLLM 5.4 % median, 572 % p95 (images, and a version whose
log counts blocks), 2 of 5 over 5 %, 3 refused of 8. Two of them gave a version's boundary (0.20.1:
tokens by concurrency; 0.22.1: a quantized output head). Only four have an
address: those of the other logs, found in public repositories, were not recorded.

Twenty-six more, from public issues and pages, each with its address, collected on 2026-11-28 and
judged in the same way. Then: vLLM, 19 of 20 answered, weights 0.1 % median and 38 % p95 (a
checkpoint known by name alone), KV tokens 8.5 % median and 38 % p95, 2 of 8 over 5 %; in bytes, 4
of 12 caches over 5 %; SGLang, 3 logs, KV tokens 0.4 and 5.6 % off; llama.cpp and Ollama, 3 logs,
weights and KV 0.0 %, the states of one 80 % (tokens guessed ahead).

Thirty-five more, of new models and versions, collected on 2026-11-29 and judged in the same way;
thirty have no address. Then: vLLM, 13 of 15 answered, weights 0.2 % median and 12 % p95, KV tokens
3.0 % median and 102 % p95, 4 of 13 over 5 % (videos, steps of 8,192 and 65,536 tokens, guessed
requests); SGLang, 7 of 8, weights 1.0 % median, KV tokens 1.0 % median, 1 of 7 over 5 % (attention
over contexts), and Kimi K2.5 was read as 16 bits; llama.cpp, 5 of 6, weights and KV 0.0 % median,
compute 0.0 % median and 1.9 % p95; Ollama, 1 of 5: three are of its engine in Go.

Twenty-eight more, collected later on that day and judged in the same way; eight have an address.
Then: vLLM, 14 of 16 answered, weights 0.1 % median and 13 % p95, KV tokens 5.1 % median, 6 of 14
over 5 % (three starts on an H100 of 64 GB read as one of 80, a draft of experts, a separate draft
that the catalog lacks, a recipe whose options are not shown); SGLang, 2 of 3, KV tokens 0.3 and
1.2 % off; llama.cpp, 3 of 5, weights and KV 0.0 %, compute 0.0, 4.0 and 7.1 % (two were refused and
one was off because a month was read as a build); Ollama, 3 of 3, weights 0.0, 0.0 and 2.2 %;
TensorRT-LLM on a DGX Spark, 1 of 1, weights 3.8 %, and its tokens eightfold, for what others hold
of that machine's memory is not known.

Twenty-two more, mostly of June to October 2026, collected once the former were mended and judged in
the same way; none has an address. Then: vLLM, 5 of 11 answered (five models that the catalog lacks,
and DeepSeek-V4), weights 0.5 % median, KV tokens 2.5 % median, none over 5 %, and one start that
fails, as foreseen, by 2.6 GiB more; SGLang, 2 of 4, KV tokens 0.3 and 0.5 % off; llama.cpp, 2 of 4,
KV 0.0 %, compute 0.0 and 1.4 %; Ollama, 3 of 3, KV 0.0 %, weights 0.0, 2.6 and 6.8 %, compute 0.0,
0.0 and 25 %.

Thirty-one more, collected on 2026-11-30 and judged in the same way: thirty of vLLM 0.16 to 0.28 and
one of SGLang; 27 have an address. Then: all answered; vLLM, weights 0.0 % median and 0.8 % at most,
KV cache 1.9 % median and 13 % at most, 4 of 22 over 5 % (two starts on a DGX Spark, two that
compiled on 0.28), activations 2.8 % median and 3.4 % at most but for one first stage of a pipeline
(67 %), for which memfit gives the last one's; SGLang, tokens 1.4 %. Mended then: sums of ranks
behind an NVSwitch, a buffer of the sampler, and the embedding table that a start copies while it
compiles; the nine logs that these rest on are no evidence any more.

Three more, once that was mended, of 0.15, 0.20 and 0.22: tokens -0.9, +36 (a start in WSL by the
author of a row that is as far off) and -39 % (layers that share a cache; +3 now).

Twenty-five more, later on that day, of vLLM 0.11 to 0.23 and one of SGLang 0.5.15; one has an
address. Then: vLLM, 18 of 24 answered (six models that the catalog lacks), 16 of them with all that
decides; weights 0.3 % median and 8.3 % at most, KV tokens 1.3 % median, 6 of 16 over 5 %: three on
a DGX Spark that compiled (5.7, 5.9 and 24 %), a recipe of AWQ (11 %; 0.0 now, and no evidence any
more), a draft that the catalog lacks (7.7 %), and two GPUs of which the log shows one (252 %);
SGLang, none of 1.

Below are today's figures of all 187, which are no longer blind. Over the first 128 alone vLLM's
tokens are 2.4 % median and 49.6 % p95, 18.2 % over 5 %; before the workspaces of experts and
attention counted they were 2.5, 56.6 and 24.4. The worst are starts on a DGX Spark, whose memory
others use, drafts whose config is not at hand, and recipes that the row does not show.
"""
SPEEDS = """\
### Speed of one request

Tokens per second of one request, prompt included (QwenLM/Qwen3's speed benchmarks of vLLM 0.4 and
0.6.3 on A100 and SGLang 0.4.6 on H20) against the time of its steps. In order: pairs of one
version, GPU and load whose speeds differ by 10 % or more, and have the same order in both. Two rows
gave the time in which the GPU waits for V0's host, and are left out. What is off: the H20 of these
rows reads 1.6 TB/s, whatever the format, and its own figure is 4; experts in GPTQ under SGLang
0.4.6 take 28 ms more; the kernels of vLLM 0.4 for AWQ and experts are older than the rates.
"""
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
SPEED_HEAD = ("engine", "answered", "median", "p95", "pairs", "in order %")
PEERS = """\
## Other people's tools

Asked once, on {date}, as pip installs them ([figures](peers.json)), about peaks on one GPU that
are described completely; memfit on the same cases beside. DeepSpeed's estimator speaks of states
alone, accelerate's of loading, or of Adam's states; torch's MemTracker takes minutes a case and
was asked about one. hf-mem reads headers from the hub, and had no network. `memfit accuracy
--peers` asks them anew.
"""
TRACED = """\
## Formulas and trace on the same rows

The trace runs the publishers' code, so it needs an environment with their versions: on {date} it
answered {rows} rows, {own} with the row's own versions of torch, transformers, PEFT and
accelerate, {instead} with another one of which the formulas say that it makes no difference to
the byte (each row says which in `memfit accuracy --json`). `memfit accuracy --by trace` asks what
the installed versions can answer, `tools/traced.py` all of them anew. apart: how far the two
differ at most. Seconds are those of two busy cores.
"""
PEER_HEAD = (
    "tool",
    "version",
    "cases",
    "median",
    "p95",
    "worst",
    "under",
    "memfit median",
    "memfit p95",
    "seconds",
)
ANSWERED = """\
## Answered

Of the rows that carry memory and are described completely (confidence high), by what was run;
rows on several GPUs are among them.
"""
WORST = """\
## Where it is off

The worst case of each model, source and counter that is more than {notable:.0f} % off, and why.
"Not explained yet" is a defect of memfit until somebody shows otherwise.
"""


def residuals(data: dict[str, Any]) -> list[list[Any]]:
    """The figures alone, as `memfit.band` reads them."""
    names = (
        "id",
        "source",
        "metric",
        "confidence",
        "technique",
        "measured",
        "predicted",
        "least",
        "most",
        "lengths_vary",
        "gpus",
    )
    return [[one[name] for name in names] for one in data["outcomes"] if one["measured"]]


def of(one: dict[str, Any]) -> Figures:
    return Figures(**{name: one[name] for name in Figures.__dataclass_fields__})


def by_source(rows: list[list[Any]]) -> list[tuple[str, ...]]:
    """A line a source and counter, from residuals alone, and the average over sources."""
    groups: dict[str, dict[str, list[float]]] = {}
    for _, source, metric, _, _, measured, predicted, *_ in rows:
        groups.setdefault(source, {}).setdefault(metric, []).append(predicted / measured - 1)
    found = {
        source: {metric: figures(errors) for metric, errors in sorted(metrics.items())}
        for source, metrics in sorted(groups.items())
    }
    lines = [
        (source, METRICS[metric], *report.cells(one))
        for source, metrics in found.items()
        for metric, one in metrics.items()
        if one
    ]
    average = averaged([one for one in metrics.values() if one] for metrics in found.values())
    return [*lines, (report.EVERY_SOURCE, "", *report.cells(average))] if average else lines


def certain(rows: list[list[Any]]) -> list[list[Any]]:
    """Those that describe a run completely."""
    return [row for row in rows if row[3] == CERTAIN]


def fixed(rows: list[list[Any]]) -> list[list[Any]]:
    """Those of runs whose batches have one length."""
    return [row for row in rows if not row[9]]


AGAIN_HEAD = ("of the cases measured again", "cases", "median", "p95", "worst")
AGAIN = """\
## The same case, measured again

fms-acceleration's repository keeps earlier tables of its benchmark (tools/campaigns.py reads
them). Here are the cases that stand in more than one with the same allocation, within 1.5 %, and
how far what nvidia-smi showed lies apart from table to table, %: that is the machine, its
libraries or its set-up, not the job, and no prediction from a job can be nearer to all of them.
Below, how far memfit is from the published row that the tables above count, from the middle one,
and from the one that it meets best. Nothing is corrected by it.
"""
FAR, FAR_HEAD = 0.10, ("cases and their errors, %", "rows", "cause")
FARTHEST = """\
## Every row farther off than {far:.0f} %

Of those described completely; what was found out about each cause stands in [the log](log.md).
"""


# Counters that decide whether a job fits come first.
COUNTERS = {
    "device": ("nvidia-smi", "peak_allocated_plus_context"),
    "reserved": ("peak_reserved",),
    "allocated": ("peak_allocated", "peak_active"),
    "allocated after a step": ("allocated_end_of_step", "allocated_end_of_generation"),
}
DEEP = 0.05  # an under-estimate that costs a run
HEADLINE_HEAD = (
    "task",
    "counter",
    "cases",
    "sources",
    "median, over sources",
    "p95, over sources",
    "median, over cases",
    "p95, over cases",
    "% under by > 5 %",
    "deepest",
)
HEADLINE = """\
## By counter

Rows that their publishers describe completely. Counters that decide whether a job fits come
first; "one length" leaves out runs whose batches are as long as a dataset's texts. Serving engines
are apart, below.
"""


def headline(rows: list[list[Any]]) -> list[tuple[str, ...]]:
    """A line for each task and counter; training also without runs whose lengths vary."""
    lines = []
    known = [band.Residual(*row) for row in certain(rows)]
    for task in ("training", "inference"):
        mine = [one for one in known if one.technique.startswith("inf") == (task == "inference")]
        for counter, metrics in COUNTERS.items():
            some = [one for one in mine if one.metric in metrics]
            fixed_alone = [one for one in some if not one.lengths_vary]
            lines += headline_line(task, counter, some)
            if len(fixed_alone) < len(some):
                lines += headline_line(task, f"{counter}, one length", fixed_alone)
    return lines


def headline_line(task: str, counter: str, some: list[band.Residual]) -> list[tuple[str, ...]]:
    if not some:
        return []
    sources: dict[str, list[float]] = {}
    for one in some:
        sources.setdefault(one.source, []).append(one.predicted / one.measured - 1)
    errors = [error for each in sources.values() for error in each]
    every, mean = (
        figures(errors),
        averaged([one for one in (figures(each),) if one] for each in sources.values()),
    )
    assert every is not None
    assert mean is not None
    deep = sum(error < -DEEP for error in errors) / len(errors)
    shown = [report.share(one) for one in (mean.median, mean.p95, every.median, every.p95)]
    counts = str(len(errors)), str(len(sources))
    return [(task, counter, *counts, *shown, report.share(deep, 0), report.signed(every.deepest))]


FIXED = """\
## By source, rows described completely, batches of one length

Without the runs of which the row itself says that batches are as long as a dataset's texts
(`VARYING` in truth/rows.py, one rule for every source). An estimate assumes one length, and the
likely range rests on these rows.
"""


def summary(data: dict[str, Any]) -> str:
    total = {
        name: sum(kind["all"][name] for kind in data["shares"].values())
        for name in ("answered", "rows")
    }
    tasks, ours, average = data["answered"], data["oom"]["memfit"], data["certain"]
    one_length = data["certain_fixed"]
    told = " and ".join(
        f"{counts['answered']} of {counts['rows']} for {name}"
        for name, counts in tasks.items()
        if name != SERVED
    )
    return (
        f"Of {total['rows']} published rows memfit answers {total['answered']}, and "
        "refuses the others with a reason. Of those that carry memory "
        f"and describe\na run completely, it answers {told}. There, averaged over "
        "sources, half of the errors are\nwithin "
        f"{report.share(average['median'])} %, and 95 % within "
        f"{report.share(average['p95'])} %; without runs whose lengths vary, "
        f"{report.share(one_length['median'])} % and {report.share(one_length['p95'])} %. "
        f"{ours['seen']} of {ours['asked']} runs out "
        "of memory "
        f"are foreseen; of {ours['fitted']} runs that went through, {ours['false_no']} "
        f"{'is' if ours['false_no'] == 1 else 'are'} called too large."
    )


def methods(data: dict[str, Any]) -> list[tuple[str, ...]]:
    def ratio(method: str, first: str, second: str) -> str:
        counts = data["oom"][method]
        return f"{counts[first]}/{counts[second]}" if counts[second] else ""

    return [
        (
            name,
            *report.cells(of(one)),
            ratio(name, "seen", "asked"),
            ratio(name, "false_no", "fitted"),
            report.brief(one["seconds"]),
        )
        for name, one in data["methods"].items()
    ]


def worst(data: dict[str, Any]) -> list[tuple[str, ...]]:
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for one in data["outcomes"]:
        key = one["source"], one["model"], one["metric"]
        if one["cause"] and abs(one["error"]) > abs(found.get(key, {"error": 0})["error"]):
            found[key] = one
    return [
        (
            one["id"],
            model,
            METRICS[metric],
            gib(one["measured"]),
            gib(one["predicted"]),
            report.signed(one["error"]),
            one["cause"],
        )
        for (_, model, metric), one in sorted(
            found.items(), key=lambda item: -abs(item[1]["error"])
        )
    ]


def kernels(data: dict[str, Any]) -> list[tuple[str, ...]]:
    groups: dict[str, list[float]] = {}
    for one in data["kernels"]:
        groups.setdefault(one["kernel"], []).append(one["error"])
    return [
        (name, *report.cells(found))
        for name, errors in sorted(groups.items())
        if (found := figures(errors))
    ]


def traced(data: dict[str, Any]) -> dict[str, Any]:
    """When the trace was asked, how many rows it answered, and with whose versions."""
    found = [one["traced"] for one in data["outcomes"] if one["traced"]]
    odd = sum(bool(one["instead"]) for one in found)
    date = json.loads(STORED.read_text(encoding="utf-8"))["date"]
    return {"date": date, "rows": len(found), "own": len(found) - odd, "instead": odd}


def peers(rows: list[list[Any]]) -> list[tuple[str, ...]]:
    """A line a tool, over its cases that memfit answers too."""
    known = {row[0]: (row[5], row[6]) for row in rows}
    lines = []
    for tool in json.loads(PEERS_FILE.read_text(encoding="utf-8"))["tools"]:
        both = [(said, *known[name]) for name, said in tool["predicted"].items() if name in known]
        theirs, ours = (
            figures(one)
            for one in (
                [said / value - 1 for said, value, _ in both],
                [own / value - 1 for _, value, own in both],
            )
        )
        if theirs is not None and ours is not None:
            cells, own = report.cells(theirs), report.cells(ours)
            lines.append(
                (
                    tool["method"],
                    tool["version"],
                    *cells[:4],
                    cells[5],
                    *own[1:3],
                    report.brief(tool["seconds"]),
                )
            )
    return lines


def tasks(data: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            f"{counts['answered']}/{counts['rows']}",
            report.share(counts["answered"] / counts["rows"], 0),
        )
        for name, counts in data["answered"].items()
    ]


def shares(data: dict[str, Any]) -> list[tuple[str, ...]]:
    def ratio(counts: dict[str, int] | None) -> str:
        return f"{counts['answered']}/{counts['rows']}" if counts else ""

    return [
        (kind, *(ratio(groups.get(name)) for name in (*CONFIDENCES, "all")))
        for kind, groups in data["shares"].items()
    ]


def regimes(rows: list[list[Any]]) -> list[tuple[str, ...]]:
    return [
        (
            one.regime,
            str(one.cases),
            str(one.sources),
            "" if one.left_out is None else report.share(one.left_out, 0),
            report.share(one.inside, 0),
            report.share(one.width),
            "enough" if one.enough else "too little",
        )
        for one in band.by_regime([band.Residual(*row) for row in rows])
    ]


def coverage(rows: list[list[Any]]) -> list[tuple[str, ...]]:
    found = band.coverage([band.Residual(*row) for row in rows])
    return [
        (
            source,
            str(one.cases),
            report.share(one.covered, 0),
            report.signed(one.low),
            report.signed(one.high),
        )
        for source, one in found.items()
    ]


def page(data: dict[str, Any]) -> Iterator[str]:
    rows = residuals(data)
    yield PAGE.format(note=NOTE, summary=summary(data), legend=report.LEGEND)
    for heading, head, body in (
        *peak_tables(data, rows),
        *method_tables(data, rows),
        *serving_tables(data["serving"], data["serving_speed"]),
        ("Single kernels", ("kernel", *report.HEAD[2:]), kernels(data)),
        *range_tables(rows),
        *row_tables(data, rows),
    ):
        lines = table(head, body, report.WORDS)
        yield "\n".join([heading if heading.startswith("#") else f"## {heading}\n", *lines, ""])


def peak_tables(data: dict[str, Any], rows: list[list[Any]]) -> list[Table]:
    """The errors of memfit by source, technique, task and GPU."""

    def named(*groups: str) -> list[tuple[str, ...]]:
        found = (one for group in groups for one in data[group].items())
        return [(name, *report.cells(of(one))) for name, one in found]

    return [
        (HEADLINE, HEADLINE_HEAD, headline(rows)),
        ("By source, rows described completely", report.HEAD, by_source(certain(rows))),
        (FIXED, report.HEAD, by_source(fixed(certain(rows)))),
        ("By source", report.HEAD, by_source(rows)),
        ("Peaks by technique", ("technique", *report.HEAD[2:]), named("techniques")),
        ("Peaks by task and GPU", ("task, GPU", *report.HEAD[2:]), named("tasks", "gpus")),
    ]


def method_tables(data: dict[str, Any], rows: list[list[Any]]) -> list[Table]:
    """Formulas beside the trace, other formulas and other tools."""
    traces = report.producer_rows(data["producers"])
    tools = json.loads(PEERS_FILE.read_text(encoding="utf-8"))
    return [
        (TRACED.format(**traced(data)), report.PRODUCER_HEAD, traces),
        ("Peaks by every method", report.METHOD_HEAD, methods(data)),
        *(
            (f"Every method by {axis}", report.AXIS_HEAD, report.axis_rows(data["by"], axis))
            for axis in data["by"]
        ),
        (PEERS.format(**tools), PEER_HEAD, peers(rows)),
    ]


def range_tables(rows: list[list[Any]]) -> list[Table]:
    """What the likely range rests on, and how many rows it covers."""
    enough = {"sources": band.ENOUGH_SOURCES, "cases": band.ENOUGH_CASES}
    left_out = ("source left out", "cases", "covered %", "from %", "to %")
    return [
        (REGIMES.format(**enough), REGIME_HEAD, regimes(rows)),
        (BAND.format(tail=report.share(band.TAIL)), left_out, coverage(rows)),
    ]


def row_tables(data: dict[str, Any], rows: list[list[Any]]) -> list[Table]:
    """Which rows are answered, refused and far off."""
    refused: list[tuple[str, ...]] = [
        (one["kind"], one["reason"], str(one["certain"] or ""), str(one["rows"]))
        for one in data["reasons"]
    ]
    worst_head = ("case", "model", "compared", "measured", "predicted", "error", "cause")
    return [
        (ANSWERED, report.TASK_HEAD, tasks(data)),
        ("Rows answered", ("about", *CONFIDENCES, "all"), shares(data)),
        ("Refused", report.REASON_HEAD, refused),
        (WORST.format(notable=100 * accuracy_data.NOTABLE), worst_head, worst(data)),
        (FARTHEST.format(far=100 * FAR), FAR_HEAD, far(rows)),
        (AGAIN, AGAIN_HEAD, again(rows)),
    ]


def serving_section() -> None:
    """The table of serving engines in docs/accuracy.md, anew."""
    from memfit.truth.served import judge, read_served, summed
    from memfit.truth.served_speed import judge_speed, read_speeds, summed_speeds

    tables = serving_tables(
        summed(map(judge, read_served())), summed_speeds(map(judge_speed, read_speeds()))
    )
    section = "\n".join(
        "\n".join([heading, *table(head, body, report.WORDS), ""]) for heading, head, body in tables
    )
    path = ROOT / "docs" / "accuracy.md"
    text = path.read_text(encoding="utf-8")
    start = text.find(SERVING.split("\n", 1)[0])
    follows = "## Single kernels"
    before = text[: start if start >= 0 else text.index(follows)]
    path.write_text(before + section + "\n" + text[text.index(follows) :], encoding="utf-8")


def serving_tables(serving: Any, speeds: Any) -> list[Table]:
    """Heading, head and lines of what start-up logs say, and of speeds of one request."""
    timed: list[tuple[str, ...]] = [
        (
            engine,
            f"{one['answered']} of {one['rows']}",
            report.share(one["median"]),
            report.share(one["p95"]),
            str(one["pairs"]),
            report.share(one["pairs_in_order"]),
        )
        for engine, one in speeds.items()
    ]
    from memfit.truth.served import UNSEEN, judge, read_served, summed

    held_out = summed(map(judge, read_served(UNSEEN)))
    return [
        (SERVING, report.SERVED_HEAD, report.served_rows(serving)),
        (HELD_OUT, report.SERVED_HEAD, report.served_rows(held_out)),
        (SPEEDS, SPEED_HEAD, timed),
    ]


def again(rows: list[list[Any]]) -> list[tuple[str, ...]]:
    """How far figures of one case are apart, and memfit from each kind of them."""
    known = {case.id: case for case in read() if isinstance(case, Case) and case.metric == METRIC}
    found = [
        (one, repeats(known[one.id]))
        for one in map(band.Residual._make, rows)
        if one.metric == METRIC
    ]
    several = [(one.predicted, one.measured, some) for one, some in found if some]
    kinds = {
        "largest figure above the smallest": [apart(some) for _, _, some in several],
        "memfit from the row counted": [
            predicted / measured - 1 for predicted, measured, _ in several
        ],
        "memfit from the middle figure": [
            middle(predicted, some) for predicted, _, some in several
        ],
        "memfit from the nearest figure": [
            nearest(predicted, some) for predicted, _, some in several
        ],
    }
    return [
        (name, *report.cells(one)[:4]) for name, errors in kinds.items() if (one := figures(errors))
    ]


def far(rows: list[list[Any]]) -> list[tuple[str, ...]]:
    """Each row described completely that is far off, under its cause; the largest groups first."""
    known = {(case.id, case.metric): case for case in read() if isinstance(case, Case)}
    groups: dict[str, list[tuple[float, str]]] = {}
    for one in map(band.Residual._make, rows):
        error = one.predicted / one.measured - 1 if one.measured else 0.0
        if one.confidence == CERTAIN and abs(error) > FAR:
            groups.setdefault(why(known[one.id, one.metric]), []).append((error, one.id))
    return [
        (
            ", ".join(f"{name} {report.signed(error)}" for error, name in sorted(some)),
            str(len(some)),
            cause,
        )
        for cause, some in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


SHORT = (0, 1, 2, 3, 4, 5, 8)  # columns of the headline that README shows
OTHERS_HEAD = ("tool", "cases", "its median error", "its worst", "memfit's median")


def readme(text: str, rows: list[list[Any]], words: str) -> str:
    """The text with the tables between their marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    head = tuple(HEADLINE_HEAD[at] for at in SHORT)
    body = [tuple(line[at] for at in SHORT) for line in headline(rows)]
    others = [(row[0], row[2], row[3], row[5], row[7]) for row in peers(rows)]
    return (
        f"{before}{BEGIN}\n{words}\n\n"
        + "\n".join(table(head, body, frozenset({"task", "counter"})))
        + "\n\nBeside other tools, on the cases that both answer:\n\n"
        + "\n".join(table(OTHERS_HEAD, others, report.WORDS))
        + f"\n{END}{after}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description="write docs/accuracy.md, README's table and the residuals"
    )
    parser.add_argument(
        "--from",
        dest="given",
        help="what `memfit accuracy --json` printed; the picture is then left as it is",
    )
    parser.add_argument(
        "--serving", action="store_true", help="only the table of serving engines (seconds)"
    )
    arguments = parser.parse_args()
    if arguments.serving:
        serving_section()
        return 0
    given = arguments.given
    if given:
        data = json.loads(Path(given).read_text(encoding="utf-8"))
    else:
        found = compare(processes=os.cpu_count() or 1)
        data = accuracy_data.data(found)
        from memfit.report.scatter import svg

        (ROOT / "docs" / "accuracy.svg").write_text(svg(found), encoding="utf-8")
    rows = residuals(data)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows)
    band.TABLE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    (ROOT / "docs" / "accuracy.md").write_text("\n".join(page(data)), encoding="utf-8")
    path = ROOT / "README.md"
    path.write_text(readme(path.read_text(encoding="utf-8"), rows, summary(data)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
