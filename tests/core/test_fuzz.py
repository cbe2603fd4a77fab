"""Thousands of mutated files a run, seeded by the date and printed: an answer or problems, never an
exception; and what must grow or shrink does so.

`MEMFIT_SEED` repeats a run, `MEMFIT_CASES` sets how many (`make whole` asks for many times more).
"""

from __future__ import annotations

import contextlib
import datetime
import io
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from memfit.api.verbs import estimate
from memfit.cli import main
from memfit.errors import InputError
from memfit.estimate import Estimate
from memfit.model.families import families
from memfit.words.options import options

SEED = int(os.environ.get("MEMFIT_SEED") or datetime.date.today().toordinal())
CASES = int(os.environ.get("MEMFIT_CASES") or 2000)
SECONDS = 40 * max(1.0, CASES / 2000)  # of this process, for the mutated files
EXAMPLES = [dict(one) for family in families().values() for one in family.examples]
NASTY: tuple[Any, ...] = (
    None, True, "", "x", "\x1b[2J\u202e", -1, 0, 1, 3, 7, 2**31, 2**70, 1e308, -0.5, float("nan"),
    [], {}, [None], [[]], {"a": 1}, "auto", "null", "1e9", 0.1, [0, 1], "float16", "bogus",
)  # fmt: skip
FIELDS = {name: one for name, one in options().items() if name not in ("model", "by", "gpu", "use")}
SLOW = ("longest_seq", "largest_batch", "smallest_gpu", "cheapest_gpu", "cheapest_precision")
SLOWER = ("advise", "offline", "like", "accept", "strict", *SLOW)


def mutated(value: Any, draw: random.Random) -> Any:
    """The config with up to two things changed, at any depth."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.choice((0, 1, 1, 2))):
        at: Any = value
        while isinstance(at, dict) and at:
            key = draw.choice(sorted(at))
            if isinstance(at[key], (dict, list)) and at[key] and draw.random() < 0.7:
                at = at[key]
                continue
            change(at, key, draw)
            break
        if isinstance(at, list) and at:
            change(at, draw.randrange(len(at)), draw)
    return value


def change(at: Any, key: Any, draw: random.Random) -> None:
    kind = draw.random()
    if kind < 0.2:
        del at[key]
    elif kind < 0.5 and isinstance(at[key], int) and not isinstance(at[key], bool):
        at[key] = draw.choice((at[key] * 2, at[key] + 1, at[key] - 1, -at[key], at[key] * 10**6))
    elif kind < 0.6 and isinstance(at, dict):
        at[draw.choice(("quantization_config", "rope_scaling", "layer_types", "dtype"))] = deepcopy(
            draw.choice(NASTY)
        )
    else:
        at[key] = deepcopy(draw.choice(NASTY))


def asked(draw: random.Random) -> dict[str, Any]:
    """A few options: mostly what they may be, at times anything."""
    found: dict[str, Any] = {}
    for name in draw.sample(sorted(set(FIELDS) - {*SLOWER}), draw.randint(0, 3)):
        choices = FIELDS[name].metadata["choices"]
        usual = choices or {"int": (1, 2, 3, 8), "bool": (True, False)}.get(str(FIELDS[name].type))
        found[name] = draw.choice(usual if usual and draw.random() < 0.95 else NASTY)
    return found


def spoiled(text: str, draw: random.Random) -> bytes:
    """Now and then the file itself is broken."""
    raw = text.encode(errors="surrogatepass")
    if draw.random() < 0.9:
        return raw
    place = draw.randrange(len(raw))
    return draw.choice((raw[:place], raw[:place] + b"\xff\x00" + raw[place:], raw + raw, raw[::-1]))


def test_no_file_ends_in_anything_but_an_answer_or_problems(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    begun, done, answers = time.process_time(), 0, 0
    for number in range(CASES):
        config = spoiled(json.dumps(mutated(draw.choice(EXAMPLES), draw)), draw)
        job = {"model": "./config.json", "gpu": "l4", "seq": 32, "by": "formula", **asked(draw)}
        written = spoiled(json.dumps(job), draw)
        (tmp_path / "config.json").write_bytes(config)
        (tmp_path / "job.yaml").write_bytes(written)
        said, complained = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            code = main(["estimate", str(tmp_path / "job.yaml"), "--json"])
        told = f"MEMFIT_SEED={SEED}, case {number}: {config!r} {written!r}\n{complained.getvalue()}"
        assert code in (0, 1, 2), told
        found = json.loads(said.getvalue())
        assert (found["verdict"] is None) or code != 2, told
        assert not {*"\x1b\u202e"} & {*said.getvalue(), *complained.getvalue()}, told
        done, answers = number + 1, answers + (code != 2)
        if time.process_time() - begun > SECONDS:
            break
    print(f"MEMFIT_SEED={SEED}: {done} files, {answers} answers")  # noqa: T201
    assert done >= CASES / 4  # else it has become slow
    assert answers >= done / 10


PRODUCT = {
    "attention": FIELDS["attention"].metadata["choices"],
    "quant": FIELDS["quant"].metadata["choices"],
    "framework": FIELDS["framework"].metadata["choices"],
    "task": ("finetune", "inference"),
}


def product() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    first = {one["model_type"]: one for one in reversed(EXAMPLES)}
    for example, *values in itertools.product(first.values(), *PRODUCT.values()):
        yield example, dict(zip(PRODUCT, values, strict=True))


def test_families_kernels_forms_frameworks_and_tasks_go_together_or_say_why_not() -> None:
    """A sample of the product; all of it with `MEMFIT_CASES` beyond its size."""
    cases = list(product())
    draw = random.Random(SEED)
    sample = cases if len(cases) <= CASES else draw.sample(cases, min(len(cases), CASES // 2))
    begun, wrong = time.process_time(), []
    for example, job in sample:
        more: dict[str, Any] = {"method": "qlora"} if job["quant"] != "none" else {}
        if job["task"] == "inference":
            more = {"new_tokens": 2}
        try:
            estimate(example, gpu="h100-sxm", seq=32, by="formula", **job, **more)
        except InputError:
            continue
        except Exception as bad:  # noqa: BLE001 - what the test is about
            wrong.append((example["model_type"], job, repr(bad)))
        if time.process_time() - begun > SECONDS / 5:
            break
    assert not wrong, (SEED, len(wrong), wrong[:5])


# What may be less where more is asked: blocks are rounded, and kernels change with their shapes.
SLACK = 0.01
BASE = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def drawn(draw: random.Random) -> dict[str, Any]:
    return {
        "batch": draw.randint(1, 8),
        "seq": draw.choice((64, 128, 384, 512, 1000)),
        "method": draw.choice(("full", "lora", "qlora")),
        "rank": draw.choice((4, 16, 64)),
        "precision": draw.choice(("bf16", "fp32", "bf16-autocast")),
        "checkpointing": draw.choice(("none", "full")),
        "attention": draw.choice(("sdpa", "eager", "flash-attn-2")),
        "optimizer": draw.choice(("adamw", "sgd", "adamw_8bit")),
        "packing": draw.choice((True, False)),
        "framework": draw.choice(("transformers", "trl")),
    }


def answer(config: dict[str, Any], job: dict[str, Any], **more: Any) -> Estimate | None:
    try:
        return estimate(config, gpu=more.pop("gpu", "h100-sxm"), by="formula", **{**job, **more})
    except InputError:
        return None


def test_more_is_not_less_and_spreading_is_not_more() -> None:
    """More batch, length, rank or layers; more shards. And device >= reserved >= allocated."""
    draw = random.Random(SEED)
    begun, compared = time.process_time(), 0
    for _ in range(max(10, CASES // 2)):
        job = drawn(draw)
        least = answer(BASE, job)
        if least is None:
            continue
        more = {
            "batch": {"batch": job["batch"] * 2},
            "seq": {"seq": job["seq"] * 2},
            "rank": {"rank": job["rank"] * 2},
        }
        name = draw.choice((*more, "layers", "shards"))
        if name == "layers":
            other = answer({**BASE, "num_hidden_layers": 6}, job)
        elif name == "shards":
            least = answer(BASE, job, gpu="2xh100-sxm", use="fsdp=2")
            other = answer(BASE, job, gpu="8xh100-sxm", use="fsdp=8")
            least, other = other, least
        else:
            other = answer(BASE, job, **more[name])
        if least is None or other is None:
            continue
        compared += 1
        told = (SEED, name, job, least.memory.allocated, other.memory.allocated)
        assert other.memory.allocated >= least.memory.allocated * (1 - SLACK), told
        for one in (least, other):
            assert one.device >= one.memory.reserved >= one.memory.allocated, told
        if time.process_time() - begun > SECONDS / 4:
            break
    assert compared >= CASES / 20


def held() -> int:
    """Bytes of this process, as Linux counts them."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(CASES < 20000, reason="`make whole` asks for it")
def test_many_estimates_leave_nothing_behind() -> None:
    """20,000 distinct ones: the second half takes no more memory than the first left."""
    after_half = 0
    for number in range(20_000):
        answer(BASE, {"batch": 1 + number % 97, "seq": 16 + number})
        if number == 10_000:
            after_half = held()
    assert held() <= after_half * 1.1


def test_threads_answer_as_one_does() -> None:
    from concurrent.futures import ThreadPoolExecutor

    draw = random.Random(SEED)
    jobs = [drawn(draw) for _ in range(32)]

    def peak(job: dict[str, Any]) -> int | None:
        found = answer(BASE, job)
        return None if found is None else found.memory.reserved

    alone = [peak(job) for job in jobs]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(peak, jobs)) == alone
    assert sum(one is not None for one in alone) >= 8
