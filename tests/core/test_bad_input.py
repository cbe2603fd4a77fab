"""Bad input, case by case, through the real command: exit code 2, all problems at once, each with
its place and a hint, no traceback, little time and little memory. The process itself is held to 20
s of processor time and 1 GiB of address space."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core import fake_hub
from tests.core.fake_hub import Handler, Repo, status

from memfit.api.question import question
from memfit.cli import main
from memfit.words.models import unbuilt
from memfit.words.options import options as choices

SRC = Path(__file__).parents[2] / "src"
START = "import sys; sys.argv[0] = 'memfit'; from memfit.cli import main; sys.exit(main())"
GOOD: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SECONDS, BYTES = 20, 2**30
HUB = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}


def limits() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))


def refused(*arguments: str, **environment: str) -> list[str]:
    """What `memfit estimate` complains about, a line each, once it was found to complain as it
    should."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("HF_", "COLUMNS", "HUGGING"))
    }
    kept |= {
        "PYTHONPATH": str(SRC),
        "HF_HUB_OFFLINE": "1",
        "LC_ALL": "C.UTF-8",
        "OPENBLAS_NUM_THREADS": "1",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", START, "estimate", *arguments],
        capture_output=True,
        text=True,
        env=kept,
        timeout=120,
        check=False,
        preexec_fn=limits,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors
    assert all(line.startswith(("error: ", "  hint: ", "try: ")) for line in lines), done.stderr
    assert all(len(line) < 400 for line in lines)
    assert len(errors) == len(set(errors))
    return lines


def of_config(tmp_path: Path, content: bytes | dict[str, Any]) -> str:
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return "\n".join(refused(str(path), "--gpu", "t4"))


# ----------------------------------------------------------------------------------------- configs
def test_a_truncated_config(tmp_path: Path) -> None:
    said = of_config(tmp_path, json.dumps(GOOD).encode()[:60])
    assert "config.json" in said
    assert "line 1" in said


def test_a_config_that_is_no_json(tmp_path: Path) -> None:
    assert "config.json" in of_config(tmp_path, b"hidden_size = 64\n")


def test_a_config_with_missing_fields(tmp_path: Path) -> None:
    said = of_config(
        tmp_path, {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 4}
    )
    assert "@ config.hidden_size" in said
    assert "@ config.vocab_size" in said


def test_a_config_with_negative_zero_absurd_and_wrongly_typed_fields_at_once(
    tmp_path: Path,
) -> None:
    bad = {
        "hidden_size": -64,
        "vocab_size": 0,
        "num_hidden_layers": 10**12,
        "intermediate_size": "wide",
        "num_attention_heads": 4.5,
    }
    said = of_config(tmp_path, {**GOOD, **bad})
    for name in bad:
        assert f"@ config.{name}" in said


@pytest.mark.parametrize(
    ("field", "value"), [("num_attention_heads", 5), ("num_key_value_heads", 3)]
)
def test_heads_that_do_not_divide(field: str, value: int, tmp_path: Path) -> None:
    said = of_config(tmp_path, {**GOOD, field: value})
    assert "divide" in said
    assert f"config.{field}" in said


def test_a_config_that_would_run_code(tmp_path: Path) -> None:
    """`auto_map` names code in the repository; nothing of it is looked at."""
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    said = of_config(
        tmp_path,
        {
            "model_type": "brand_new",
            "auto_map": {"AutoModelForCausalLM": "modeling.Model"},
            "hidden_size": 64,
        },
    )
    assert "not supported yet: model_type `brand_new`" in said
    assert not (tmp_path / "ran").exists()


def test_a_folder_with_no_config(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    assert "config.json" in "\n".join(refused(str(tmp_path)))


def test_a_config_of_a_gibibyte(tmp_path: Path) -> None:
    """A sparse file: no byte of it is read."""
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**30)
    refused(str(tmp_path))


def test_a_config_nested_without_end(tmp_path: Path) -> None:
    of_config(tmp_path, b'{"model_type": ' + b"[" * 200_000)


# ----------------------------------------------------------------------------------------- options
def options(*arguments: str) -> str:
    return "\n".join(refused("llama-3.1-8b", *arguments))


@pytest.mark.parametrize(
    ("flag", "value", "near"),
    [
        ("--gpu", "rtx-4099", "`rtx-4090`"),
        ("--precision", "bf61", "`bf16`"),
        ("--optimizer", "adamww", "`adamw`"),
        ("--quant", "nf5", "`nf4`"),
        ("--attention", "flash-attn-4", "`flash-attn-2`"),
    ],
)
def test_an_unknown_name_offers_the_nearest(flag: str, value: str, near: str) -> None:
    lines = refused("llama-3.1-8b", flag, value)
    assert value in lines[0]
    assert lines[1].startswith("  hint: did you mean ")
    assert near in lines[1]


def test_an_unknown_dtype_of_a_config_offers_the_nearest(tmp_path: Path) -> None:
    assert "`bfloat16`" in of_config(tmp_path, {**GOOD, "torch_dtype": "bfloat17"})


def test_absurd_amounts_are_told_together() -> None:
    said = options(
        "--batch",
        str(10**18),
        "--seq",
        "0",
        "--method",
        "lora",
        "--rank",
        "-1",
        "--clip",
        "nan",
        "--memory",
        "12 elephants",
    )
    for name in ("job.batch", "job.seq", "job.rank", "job.clip", "memory"):
        assert f"@ {name}" in said


def test_bad_options_and_a_bad_config_are_told_together(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "hidden_size": "wide"}))
    said = "\n".join(
        refused(str(tmp_path), "--gpu", "nonesuch", "--batch", "few", "--optimizer", "adamww")
    )
    for where in ("config.hidden_size", "gpu", "job.batch", "job.optimizer"):
        assert f"@ {where}" in said


# ------------------------------------------------------------------------------------- safetensors
def safetensors(tmp_path: Path, header: bytes, length: int | None = None, data: int = 0) -> str:
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    path = tmp_path / "model.safetensors"
    path.write_bytes(
        struct.pack("<Q", len(header) if length is None else length) + header + bytes(data)
    )
    return "\n".join(refused(str(path)))


def entry(shape: Sequence[int], begin: int, end: int) -> bytes:
    return json.dumps(
        {"a": {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}}
    ).encode()


def test_a_safetensors_file_cut_short(tmp_path: Path) -> None:
    assert "model.safetensors" in safetensors(tmp_path, b"", length=80)
    assert "model.safetensors" in safetensors(tmp_path, entry([64, 64], 0, 8192), data=100)


@pytest.mark.parametrize(
    ("shape", "begin", "end"),
    [([64, 64], 0, 4096), ([64, 64], 8192, 0), ([-1, 64], 0, 128), ([10**12, 10**12], 0, 8)],
)
def test_a_safetensors_header_with_lying_lengths(
    shape: Sequence[int], begin: int, end: int, tmp_path: Path
) -> None:
    safetensors(tmp_path, entry(shape, begin, end), data=8192)


@pytest.mark.parametrize("length", [2**31, 2**63, 2**64 - 1])
def test_a_safetensors_header_of_two_gibibytes(length: int, tmp_path: Path) -> None:
    """Announced, and (the first) really there, in a sparse file."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length) + b"{")
        file.truncate(2**31 + 4096)
    assert "header" in "\n".join(refused(str(path)))


# -------------------------------------------------------------------------------------------- GGUF
def text(value: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value.encode()


def gguf(tmp_path: Path, body: bytes, *, tensors: int = 0, keys: int = 1, version: int = 3) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body)
    return "\n".join(refused(str(path)))


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def test_a_gguf_cut_short(tmp_path: Path) -> None:
    assert "model.gguf" in gguf(tmp_path, ARCHITECTURE[:-2])
    assert "model.gguf" in gguf(tmp_path, ARCHITECTURE, keys=2)
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03")
    refused(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        (text("general.architecture", 2**62) + b"x", {}),  # a name longer than the file
        (text("general.architecture") + struct.pack("<I", 8) + text("llama", 2**63), {}),
        (text("tokens") + struct.pack("<IIQ", 9, 8, 2**60), {}),  # an array of 2^60 texts
        (text("tokens") + struct.pack("<I", 9) * 1000, {}),  # arrays in arrays
        (ARCHITECTURE, {"keys": 2**62}),
        (ARCHITECTURE, {"tensors": 2**62}),
        (
            ARCHITECTURE + text("w") + struct.pack("<I", 2**31),
            {"tensors": 1},
        ),  # dimensions without end
        (ARCHITECTURE + text("w") + struct.pack("<IQQIQ", 2, 2**62, 2**62, 0, 0), {"tensors": 1}),
        (ARCHITECTURE, {"version": 99}),
        (
            ARCHITECTURE + text("llama.block_count") + struct.pack("<IQ", 10, 10**12),
            {"keys": 2},
        ),  # 10^12 layers
    ],
)
def test_a_gguf_with_lying_lengths(body: bytes, counts: dict[str, int], tmp_path: Path) -> None:
    gguf(tmp_path, body, **counts)


# --------------------------------------------------------------------------------------------- hub
@pytest.mark.parametrize(
    ("name", "repo", "words"),
    [
        ("acme/missing", None, ["acme/missing"]),  # the hub answers 401 where nobody is logged in
        (
            "acme/gated",
            Repo(files={"config.json": json.dumps(GOOD).encode()}, gated=True),
            ["gated", "HF_TOKEN"],
        ),
        (
            "acme/private",
            Repo(files={"config.json": json.dumps(GOOD).encode()}, private=True),
            ["private"],
        ),
        ("acme/empty", Repo(files={"README.md": b"hello"}), ["config.json"]),  # 404 for the file
        ("acme/down", Repo(behave={"config.json": status(503)}), ["503"]),
        ("acme/broken", Repo(files={"config.json": b'{"model_type": '}), ["config.json"]),
    ],
)
def test_hub_errors(name: str, repo: Repo | None, words: Sequence[str], tmp_path: Path) -> None:
    with fake_hub.running() as hub:
        if repo is not None:
            hub.repos[name] = repo
        lines = refused(name, HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path), **HUB)
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert all(word in "\n".join(lines) for word in words), lines


def test_a_404_for_whoever_is_logged_in(tmp_path: Path) -> None:
    with fake_hub.running() as hub:
        lines = refused(
            "acme/missing",
            HF_ENDPOINT=hub.endpoint,
            HF_HOME=str(tmp_path),
            HF_TOKEN=fake_hub.TOKEN,
            **HUB,
        )
    assert "is not on" in lines[0]
    assert fake_hub.TOKEN not in "".join(lines)


def test_a_token_that_is_refused(tmp_path: Path) -> None:
    with fake_hub.running() as hub:
        lines = refused(
            "acme/any",
            HF_ENDPOINT=hub.endpoint,
            HF_HOME=str(tmp_path),
            HF_TOKEN="hf_expired",
            **HUB,
        )
    assert "does not accept the token" in lines[0]
    assert "hf_expired" not in "".join(lines)


def test_offline_and_not_in_the_cache(tmp_path: Path) -> None:
    assert "offline" in refused("acme/model", "--offline", HF_HOME=str(tmp_path))[0]


def test_no_hub_at_all(tmp_path: Path) -> None:
    lines = refused(
        "meta-llama/Llama-3.1-8C", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path), **HUB
    )
    assert "cannot reach" in lines[0]
    assert "`meta-llama/Llama-3.1-8B`" in lines[1]


@pytest.mark.slow
def test_a_hub_that_never_answers(tmp_path: Path) -> None:
    def silent(handler: Handler) -> None:
        time.sleep(60)

    with fake_hub.running() as hub:
        hub.repos["acme/silent"] = Repo(behave={"config.json": silent})
        began = time.monotonic()
        lines = refused("acme/silent", HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path), **HUB)
    assert "did not send" in lines[0]
    assert time.monotonic() - began < 40


# ---------------------------------------------------------------------------------------- anything
def test_a_family_that_only_the_trace_takes_is_not_judged_by_its_linear_layers() -> None:
    config = {"model_type": "brand_new", "num_hidden_layers": 2}
    asked = {"by": "trace", "method": "lora", "targets": "q_proj", "seq": 16}
    asked_for = question(unbuilt(config, "acme/new", "a test"), asked, [])
    assert asked_for.job.targets == "q_proj"


FIELDS = {
    name: one
    for name, one in choices().items()
    if name
    not in ("model", "by", "gpu", "longest_seq", "largest_batch", "smallest_gpu", "cheapest_gpu")
}
ABSURD = (
    st.sampled_from(
        [
            0,
            -1,
            10**18,
            2**63,
            1e308,
            -0.5,
            float("nan"),
            float("inf"),
            "",
            None,
            True,
            [],
            {},
            "\x00",
            "é" * 50,
            [[[]]],
            "1e9",
        ]
    )
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=20)
)


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Some options, each at one of its choices or at anything."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=5, unique=True))
    return {
        name: draw(st.sampled_from(FIELDS[name].metadata["choices"] or ("x",)) | ABSURD)
        for name in names
    }


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_no_job_file_ends_in_anything_but_an_answer_or_its_problems(job: dict[str, Any]) -> None:
    said, complained = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        (Path(folder) / "config.json").write_text(json.dumps(GOOD))
        path.write_text(json.dumps({"model": "./config.json", "gpu": "t4", "seq": 16, **job}))
        begun = time.process_time()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            code = main(["estimate", str(path)])
    assert code in (0, 1, 2), complained.getvalue()
    assert (code == 2) == complained.getvalue().startswith("error: ")
    assert bool(said.getvalue()) == (code != 2)
    assert time.process_time() - begun < 20
