"""`--snapshot` as PyTorch's own tools read it: their summaries, plots and event lists, and sums
that are the report's."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import subprocess
import sys
import zlib
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import memfit
from memfit.estimate import Estimate
from memfit.report.snapshot import write
from memfit.report.timeline import curves
from memfit.simulate.settings import Settings

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module", params=["", "expandable_segments:True"])
def found(request: pytest.FixtureRequest) -> Estimate:
    return memfit.estimate(
        CONFIG,
        gpu="a100-sxm-80gb",
        by="trace",
        seq=256,
        batch=4,
        framework="transformers",
        alloc_conf=request.param,
    )


@pytest.fixture
def snapshot(found: Estimate, tmp_path: Path) -> dict[str, Any]:
    write(found, tmp_path / "run.pickle")
    # Our own
    loaded: dict[str, Any] = pickle.loads((tmp_path / "run.pickle").read_bytes())  # noqa: S301
    return loaded


def test_torchs_tools_read_it(snapshot: dict[str, Any]) -> None:
    """`segsum` itself asserts that blocks and gaps make up every segment, and segments what is
    reserved."""
    from torch.cuda import _memory_viz as viz

    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    words = viz.segsum(snapshot)
    assert f"segments: {len(snapshot['segments'])}" in words
    assert f"total_reserved: {viz.Bytes(reserved)}" in words
    listed = viz.trace(snapshot)
    entries = snapshot["device_traces"][0]
    assert f"{len(entries)} entries" in listed
    assert listed.count("cudaMalloc(") == sum(
        entry["action"] == "segment_alloc" for entry in entries
    )
    assert not re.search(
        r"^\w+ = MEM\[", listed, re.MULTILINE
    )  # every block lies in a segment that is known
    for plot in (
        viz.trace_plot(snapshot),
        viz.trace_plot(snapshot, filter_freed=True),
        viz.segment_plot(snapshot),
    ):
        assert "snapshot.pickle" in plot
    for lines in (
        viz.memory(snapshot, format_flamegraph=str),
        viz.segments(snapshot, format_flamegraph=str),
    ):
        assert "weights" in lines
        assert all(re.fullmatch(r".+ \d+", line) for line in lines.splitlines())


def test_its_sums_are_the_reports(found: Estimate, snapshot: dict[str, Any]) -> None:
    live: dict[int, int] = {}
    asked = reserved = 0
    highest, held = 0, 0
    for entry in snapshot["device_traces"][0]:
        match entry["action"]:
            case "alloc":
                assert entry["addr"] not in live
                live[entry["addr"]] = entry["size"]
                asked += entry["size"]
                highest = max(highest, asked)
            case "free_completed":
                asked -= live.pop(entry["addr"])
            case "segment_alloc" | "segment_map":
                reserved += entry["size"]
                held = max(held, reserved)
            case "segment_free" | "segment_unmap":
                reserved -= entry["size"]
    assert held == found.memory.reserved
    assert highest == pytest.approx(
        found.memory.allocated, rel=0.01
    )  # without rounding by the allocator
    assert highest <= found.memory.allocated
    assert reserved == sum(segment["total_size"] for segment in snapshot["segments"])
    active = {
        block["address"]: block["requested_size"]
        for one in snapshot["segments"]
        for block in one["blocks"]
        if block["requested_size"]
    }
    assert active == live
    frames = [
        entry["frames"] for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"
    ]
    assert any(stack[0]["filename"] == "model.layers.1.mlp.down_proj" for stack in frames)


def test_the_timeline_has_the_same_peaks(found: Estimate) -> None:
    drawn = curves(found.memory.tape, Settings.parse(found.job.alloc_conf, where="test"))
    assert max(drawn.reserved) == found.memory.reserved
    assert max(drawn.totals) == pytest.approx(found.memory.allocated, rel=0.001)
    assert [(band.phase, band.step) for band in drawn.bands][:3] == [
        ("load", 0),
        ("prepare", 0),
        ("forward", 0),
    ]


PICTURES = Path(sys.prefix) / "pictures"  # matplotlib, apart from the rest (Makefile)


def drawn(folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    given = [
        sys.executable,
        "-m",
        "memfit",
        "trace",
        "config.json",
        "--gpu",
        "rtx-4090",
        "--seq",
        "64",
        "--timeline",
        "run.png",
    ]
    return subprocess.run(
        given,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.skipif(not PICTURES.is_dir(), reason="`make setup` puts matplotlib there")
def test_the_timeline_as_a_png(tmp_path: Path) -> None:
    run = drawn(tmp_path, os.pathsep.join([str(PICTURES), os.environ.get("PYTHONPATH", "")]))
    said = [line for line in run.stderr.splitlines() if not line.startswith("tracing:")]
    assert (run.returncode, said) == (0, [])  # a slow machine hears how far it is
    written = (tmp_path / "run.png").read_bytes()
    assert written.startswith(b"\x89PNG\r\n\x1a\n")
    wide, high = struct.unpack(">II", written[16:24])
    assert wide > high > 500
    data, at = b"", 8
    while at < len(written):  # its picture's lines: a blank one has a single colour
        (size,) = struct.unpack(">I", written[at : at + 4])
        data += written[at + 8 : at + 8 + size] if written[at + 4 : at + 8] == b"IDAT" else b""
        at += size + 12
    assert len(Counter(zlib.decompress(data))) > 100


@pytest.mark.skipif(find_spec("matplotlib") is not None, reason="matplotlib is there")
def test_a_png_without_matplotlib_is_refused_before_anything_is_traced(tmp_path: Path) -> None:
    run = drawn(tmp_path, os.environ.get("PYTHONPATH", ""))
    assert run.returncode == 2
    assert "a PNG needs the package `matplotlib`" in run.stderr
    assert "memfit[plot]" in run.stderr
    assert not (tmp_path / "run.png").exists()
