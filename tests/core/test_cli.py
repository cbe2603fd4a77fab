"""The command line: what it prints where, its exit codes, and that nothing a user types or hands
over ends in a traceback."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.core import fake_hub
from tests.core.fake_hub import Repo, status
from tests.core.test_report import problems_of

from memfit import __version__
from memfit.api.verbs import estimate
from memfit.cli import main
from memfit.cli.commands import commands
from memfit.errors import InputError
from memfit.job import Job
from memfit.report.codec import refusal, schema, to_dict
from memfit.words.options import Ask, options

SRC = Path(__file__).parents[2] / "src"
START = "import sys; sys.argv[0] = 'memfit'; from memfit.cli import main; sys.exit(main())"
SMALL: dict[str, Any] = {
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


@pytest.fixture
def small(tmp_path: Path) -> str:
    """The path of a config."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def environment(**more: str) -> Mapping[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("HF_", "FORCE_", "NO_COLOR", "COLUMNS", "TERM"))
    }
    return {
        **kept,
        "PYTHONPATH": str(SRC),
        "HF_HUB_OFFLINE": "1",
        "LC_ALL": "C.UTF-8",
        "TERM": "xterm",
        **more,
    }


def process(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", START, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(**more), timeout=120, check=False
    )


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


# -------------------------------------------------------------------------------------- exit codes
def test_it_fits_and_says_so_on_stdout(small: str) -> None:
    done = process("estimate", small, "--gpu", "rtx-4090", "--seq", "128")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fits: ")
    assert max(len(line) for line in done.stdout.splitlines() if "/" not in line) <= 80, (
        "a path is not broken"
    )
    assert "\x1b" not in done.stdout


def test_it_does_not_fit() -> None:
    done = process("estimate", "meta-llama/Llama-3.1-8B", "--gpu", "h100-sxm", "--batch", "8")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("does not fit: ")


def test_unusable_input_leaves_stdout_empty(small: str) -> None:
    done = process("estimate", small, "--gpu", "rtx-4091")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "error: unknown GPU `rtx-4091` @ gpu\n  hint: did you mean `rtx-4090`"
    )


def test_the_module_of_the_installed_command_returns_its_code(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "estimate", small, "--memory", "1.3GiB", "--seq", "16")[0] == 0
    assert said(capsys, "estimate", small, "--memory", "16MiB", "--seq", "16")[0] == 1
    assert said(capsys, "estimate", small, "--memory", "64 bananas")[0] == 2
    assert said(capsys, "--version") == (0, f"memfit {__version__}\n", "")


def test_may_fit_is_worth_a_try(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "estimate", small, "--memory", "600MiB", "--seq", "16")
    assert (code, out[:7]) == (0, "tight: ")


# ----------------------------------------------------------------------------------------- formats
def test_json_is_the_documented_one(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--json"], ["--format", "json", "--explain"]):
        code, out, err = said(capsys, "estimate", small, "--gpu", "t4", "--longest-seq", *arguments)
        assert (code, err) == (0, "")
        answer = json.loads(out)
        assert list(problems_of(answer, schema())) == []
        assert answer["verdict"] == "fits"
        assert answer["answers"] == [
            {
                "question": "longest_seq",
                "value": 256,
                "device": answer["answers"][0]["device"],
                "limit": "the model's maximum length",
                "tried": [],
            }
        ]


def test_json_of_unusable_input_has_the_same_keys(
    small: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(
        capsys, "estimate", small, "--gpu", "nonesuch", "--batch", "many", "--json"
    )
    assert code == 2
    answer = json.loads(out)
    assert list(problems_of(answer, schema())) == []
    assert [problem["where"] for problem in answer["problems"]] == ["job.batch", "gpu"]
    assert err.count("error: ") == 2


def test_markdown_and_the_working(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(
        capsys, "estimate", small, "--gpu", "t4", "--format", "markdown", "--explain"
    )
    assert (code, out[:8]) == (0, "**fits: ")
    assert "\n```\nevery part in detail" in out
    code, out, _ = said(capsys, "estimate", small, "--gpu", "t4", "--explain")
    assert "K·H·D·2 = 2·16·64·2 = 4.00 KiB" in out


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "gpus", "a100", "80gb")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == [
        "gpu",
        "a100-pcie-80gb",
        "a100-sxm-80gb",
    ]
    code, out, _ = said(capsys, "gpus", "--json", "t4")
    assert [(gpu["id"], gpu["usable"] > 2**33) for gpu in json.loads(out)] == [("t4", True)]
    code, out, _ = said(capsys, "models", "mistral-7b-v0.1")
    assert "mistralai/Mistral-7B-v0.1" in out
    assert "7.24 B" in out
    code, out, _ = said(capsys, "models", "--json", "mistralai/mistral-7b-v0.1")
    assert json.loads(out)[0]["parameters"] == 7_241_732_096
    code, _, err = said(capsys, "models", "zzz")
    assert (code, err) == (
        2,
        (
            "error: no model of the catalog matches `zzz` @ pattern\n  hint: `memfit models` "
            "lists all\n"
        ),
    )
    assert said(capsys, "gpus", "no-such-gpu")[0] == 2


# ---------------------------------------------------------------------------------------- terminal
def on_a_terminal(*arguments: str, **more: str) -> str:
    mine, theirs = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", START, *arguments],
        stdout=theirs,
        stderr=theirs,
        env=environment(**more),
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(mine, 65536):
            shown += chunk
    except OSError:  # Linux says so at the end
        pass
    finally:
        os.close(mine)
        done.wait(timeout=60)
    return shown.decode()


def test_colour_only_on_a_terminal_that_wants_it(small: str) -> None:
    command = ("estimate", small, "--gpu", "rtx-4090")
    assert "\x1b[32mfits\x1b[0m: " in on_a_terminal(*command)
    assert "\x1b" not in on_a_terminal(*command, NO_COLOR="1")
    assert "\x1b" not in on_a_terminal(*command, TERM="dumb")
    assert "\x1b[31merror\x1b[0m: " in on_a_terminal("estimate", small, "--gpu", "nonesuch")


def test_lists_keep_within_a_terminal_and_are_whole_in_a_pipe() -> None:
    for command in ("gpus", "models"):
        shown = on_a_terminal(command, COLUMNS="60").splitlines()
        assert max(map(len, shown)) == 60
        assert any(line.endswith("…") for line in shown)
        piped = process(command, COLUMNS="60").stdout
        assert max(map(len, piped.splitlines())) > 60
        assert "…" not in piped


def test_an_encoding_without_blocks_gets_ascii(small: str) -> None:
    done = process("estimate", small, "--gpu", "rtx-4090", "--explain", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "###" in done.stdout
    assert "K*H*D*2 = 2*16*64*2" in done.stdout


def test_a_wider_terminal_is_used_and_a_narrow_one_kept(small: str) -> None:
    wide = process("estimate", small, "--gpu", "rtx-4090", COLUMNS="110").stdout
    narrow = process("estimate", small, "--gpu", "rtx-4090", COLUMNS="60").stdout
    assert 80 < max(map(len, wide.splitlines())) <= 110
    assert max(len(line) for line in narrow.splitlines() if "/" not in line) <= 60


def test_a_closed_pipe_is_quiet() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", START, "models"], stdout=-1, stderr=-1, env=environment()
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        err = running.stderr.read()
    assert (running.returncode, err) == (141, b"")


def test_an_interrupt_is_quiet() -> None:
    """The hub does not answer, so that the interrupt comes while memfit waits."""
    hub = socket.create_server(("127.0.0.1", 0))
    endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
    # a runner in the background ignores it
    heard = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {START}"
    with subprocess.Popen(
        [sys.executable, "-c", heard, "estimate", "some/model"],
        stdout=-1,
        stderr=-1,
        env=environment(HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0"),
    ) as running:
        hub.settimeout(60)
        asked, _ = hub.accept()
        asked.recv(1)
        running.send_signal(signal.SIGINT)
        try:
            out, err = running.communicate(timeout=60)
        finally:
            running.kill()
    asked.close()
    hub.close()
    assert (running.returncode, out, err) == (130, b"", b"\n")


# ----------------------------------------------------------------------------------------- options
def test_every_option_has_a_flag_with_its_help() -> None:
    shown = CliRunner().invoke(commands, ["estimate", "--help-all"], terminal_width=400).output
    for name, one in options().items():
        if name != "model":
            assert f"--{name.replace('_', '-')}" in shown
            assert one.metadata["help"][:30] in shown
            for choice in one.metadata["choices"]:
                assert choice in shown, f"{name}: {choice}"
    assert set(options()) == set(Ask.__dataclass_fields__) | set(Job.__dataclass_fields__)
    assert (
        max(map(len, CliRunner().invoke(commands, ["estimate", "--help"]).output.splitlines()))
        <= 80
    )


SAMPLES = {
    "gpu": "t4",
    "memory": "3GiB",
    "use": "fsdp=8,reshard=no",
    "like": "llama",
    "prune": "layers=0.5",
    "optimizer": "sgd",
    "unsloth": "norms",
    "targets": "q_proj",
    "modules_to_save": "lm_head",
    "trainable": "mlp",
    "quant_skip": "q_proj",
    "recompute_modules": "mlp",
    "versions": "torch=2.6",
    "lengths": "uniform:min=8,max=16",
    "tokenizer": "nonesuch/tokenizer.json",
    "text_key": "body",
    "alloc_conf": "expandable_segments:True",
}
BESIDE = {
    "trainable": {"method": "freeze"},
    "modules_to_save": {"method": "lora"},
    "targets": {"method": "lora"},
    "tokenizer": {"lengths": "nonesuch.jsonl"},
    "text_key": {"lengths": "nonesuch.jsonl"},
}


def other(name: str) -> Any:
    """A value that is not the default."""
    one = options()[name]
    if one.type == "bool":
        return not one.default
    if one.metadata["choices"]:
        return one.metadata["choices"][1 if one.default == one.metadata["choices"][0] else 0]
    return SAMPLES.get(name) or type(one.default)(
        one.default + 1 if (one.metadata["high"] or 0) > one.default + 1 else 0.5
    )


@pytest.mark.parametrize("name", [name for name in options() if name not in ("model", "by")])
def test_every_option_means_the_same_as_a_flag_a_key_and_an_argument(
    name: str, small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes of it is the same answer, or the same refusal."""
    given = {"seq": 16, "memory": "2GiB", **BESIDE.get(name, {}), name: other(name)}
    flags: list[str] = []
    for key, value in given.items():
        flag = f"--{key.replace('_', '-')}"
        flags += (
            ([flag] if value else [flag.replace("--", "--no-", 1)])
            if isinstance(value, bool)
            else [flag, str(value)]
        )
    job = tmp_path / "job.yaml"
    job.write_text(
        json.dumps(
            {"model": small, **{key.replace("_", "-"): value for key, value in given.items()}}
        )
    )
    answers = []
    for command in ([small, *flags], [str(job)]):
        code, out, _ = said(capsys, "estimate", *command, "--json")
        assert code in (0, 1, 2)
        answers.append(json.loads(out))
    try:
        answers.append(to_dict(estimate(small, **given)))
    except InputError as error:
        answers.append(refusal(error.problems))
    assert answers[0] == answers[1] == json.loads(json.dumps(answers[2]))
    if answers[0]["job"] is not None and name in answers[0]["job"]:
        assert answers[0]["job"][name] == other(name) != Job.__dataclass_fields__[name].default


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "--help")
    assert code == 0
    assert all(f"\n  {name} " in out for name in ("estimate", "models", "gpus"))
    assert said(capsys)[0] == 2


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = said(capsys, "estimate", *arguments, "--json")
    assert code in (0, 1), err
    found: dict[str, Any] = json.loads(out)
    return found


def test_flags_override_the_job_file_and_the_file_the_defaults(
    small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "model: ./config.json\ngpu: rtx 4090\nmethod: lora\nbatch: 2\nseq: 64\ntargets: "
        "[q_proj, v_proj]\nadapter-dtype: base\npacking: no\n"
    )
    found = answer(capsys, str(path), "--batch", "3", "--gpu", "t4")
    assert {
        name: found["job"][name]
        for name in ("method", "batch", "seq", "targets", "adapter_dtype", "packing", "optimizer")
    } == {
        "method": "lora",
        "batch": 3,
        "seq": 64,
        "targets": "q_proj,v_proj",
        "adapter_dtype": "base",
        "packing": False,
        "optimizer": "adamw_fused",
    }
    assert found["gpu"]["id"] == "t4"
    assert answer(capsys, str(path), "--packing")["job"]["packing"] is True


@pytest.mark.parametrize(
    ("text", "wheres"),
    [
        ("", ["job file"]),
        ("just words", ["job file"]),
        ("[1, 2]", ["job file"]),
        ("model: {", ["job file, line 1"]),
        ("a: b: c", ["job file, line 1"]),
        ("model: x\nmodel: y", ["job.yaml: model"]),
        ("!!python/object/apply:os.system [id]", ["job file, line 1"]),
        ("[" * 20000, ["job file"]),
        ("x: " + "1" * 5000, ["job file"]),
        ("#" * 70000, ["job file"]),
        ("batch: 2", ["job.yaml"]),
        ("model:\nbatch: {a: 1}", ["job.yaml: model", "job.yaml: batch", "job.yaml"]),
        (
            "model: ./config.json\nmetod: lora\nbatch: two\nseq: -1\ngpu: h1\nrank: 1.5",
            ["metod", "job.batch", "job.seq", "job.rank", "gpu"],
        ),
        ("model: 12\nby: 7", ["by", "model"]),
        ("? [1, 2]\n: x\nmodel: ./config.json", ["job file, line 1"]),
        ("a: &a [&b [*a]]\nmodel: ./config.json", ["job.yaml: a"]),
        (
            "model: ./config.json\nadapter-dtype: base\nadapter_dtype: base",
            ["job.yaml: adapter_dtype"],
        ),
        (
            "model: ./config.json\nformat: json\nexplain: true",
            ["job.yaml: format", "job.yaml: explain"],
        ),
        ("model: ./config.json\nmemory: 24 bananas\nversions: 4.5", ["job.versions", "memory"]),
    ],
)
def test_bad_job_files(
    text: str, wheres: list[str], small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    code, out, _ = said(capsys, "estimate", str(path), "--json")
    assert code == 2
    assert [problem["where"] for problem in json.loads(out)["problems"]] == wheres


def test_job_files_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "bytes.yml").write_bytes(b"\xff\xfe\x00")
    for name, word in (
        ("folder.yaml", "folder"),
        ("bytes.yml", "not a text file"),
        ("missing.yaml", "no such file"),
    ):
        code, out, err = said(capsys, "estimate", str(tmp_path / name))
        assert (code, out) == (2, "")
        assert word in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["estimate"], ["no model is given"]),
        (["estimate", "a", "b"], ["one model at a time"]),
        (
            ["estimate", "a", "--bach", "3", "--modle=x"],
            [
                "unknown option `--bach`",
                "`--batch`",
                "unknown option `--modle`",
                "try: memfit estimate",
            ],
        ),
        (["estimate", "a", "-x"], ["unknown option `-x`"]),
        (
            ["estimate", "gpt2", "--by", "trace", "--python", "/x"],
            ["no option `--python`", "`memfit trace` has it"],
        ),
        (["estimate", "a", "--gpu"], ["`--gpu` needs a value", "GPU or cloud machine"]),
        (["estimate", "a", "--format", "xml"], ["'xml' is not one of"]),
        (
            ["estmate", "a"],
            ["`estmate` is neither a command nor a model", "try: memfit estimate a"],
        ),
        (["fit", "llama-3.3-70b"], ["neither a command", "try: memfit estimate llama-3.3-70b"]),
        (["fits", "qwen3:8b"], ["neither a command", "try: memfit estimate qwen3:8b"]),
        (["rtx-5900"], ["unknown GPU `rtx-5900`", "try: memfit rtx-"]),
        (["xyzzy"], ["`xyzzy` is neither a command nor a model", "see `memfit --help`"]),
        (["estimate", "llama-3.1-8b", "--cpu"], ["about GPU memory", "-ngl 0"]),
        (["estimate", "llama-3.1-8b", "--dpo"], ["supervised", "memfit trace train.py"]),
        (["estimate", "llama-3.1-8b", "--vllm"], ["`--engine`"]),
        (["study"], ["no model is given"]),
        (
            ["study", "gpt2", "--gpus", "t4", "--layouts", "DDP"],
            ["`DDP` has no layout for one GPU"],
        ),
        (["measure", "gpt2", "--gpu", "t4"], ["this machine", "try: memfit measure gpt2"]),
        (["measure", "gpt2", "--gpus", "t4"], ["this machine", "try: memfit measure gpt2"]),
        (["estimate", "qwen3-8b", "4090"], ["try: memfit estimate qwen3-8b --gpu 4090"]),
        (["--nonsense"], ["--nonsense"]),
        (["estimate", "", "--offline"], ["no model is given"]),
        (["estimate", "\x00\x01", "--offline"], ["` is not the name of a model"]),
        (["estimate", "x" * 5000, "--offline"], ["` is not the name of a model"]),
        (
            ["estimate", "llama-3.1-8b", "--gpus", "8xh100-sxm", "--use", "fdsp"],
            ["unknown layout `fdsp`", "`fsdp`"],
        ),
        (
            ["estimate", "llama-3.1-8b", "--gpu", "m1 max"],
            ["several memory sizes", "like `m1-max-64gb`"],
        ),
        (
            ["estimate", "llama-3.1-8b", "--optimizer", "adamx"],
            ["unknown optimizer `adamx`", "`adam`"],
        ),
        (["estimate", "llama-3.1-8b", "--precision", "bf6"], ["unknown precision `bf6`", "`bf16`"]),
        (["estimate", "llama-3.1-8b", "--seq", "1e3"], ["`1e3` must be an integer"]),
        (["estimate", "llama-3.1-8b", "--batch", "99999999999999999999999"], ["out of range"]),
        (["estimate", "llama-3.1-8b", "--clip", "nan"], ["out of range"]),
        (["estimate", "llama-3.1-8b", "--memory", "0"], ["out of range"]),
        (["estimate", "llama-3.1-8b", "--alloc-conf", "max_split_size_mb:1"], ["max_split_size"]),
        (["estimate", "llama-3.1-8b", "--largest-batch"], ["` needs a GPU"]),
        (["estimate", "metallama/llama-3.1-8b", "--offline"], ["offline"]),
        (["estimate", "llama-3.1", "--offline"], ["could be any of"]),
    ],
)
def test_bad_arguments(
    arguments: Sequence[str], words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    for word in words:
        assert word in err


# -------------------------------------------------------------------------------------- bad models
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty"]),
        (b'{"model_type": "lla', ["config.json"]),
        (b"\x80\x81\x82", ["config.json"]),
        (b"[]", ["config.json"]),
        (b"{}", ["model_type"]),
        (b'{"model_type": "lama"}', ["lama", "`llama`", "--like"]),
        (json.dumps({**SMALL, "hidden_size": -4}).encode(), ["config.hidden_size"]),
        (
            json.dumps({**SMALL, "hidden_size": 0, "vocab_size": "many"}).encode(),
            ["config.hidden_size", "config.vocab_size"],
        ),
        (json.dumps({**SMALL, "num_hidden_layers": 10**12}).encode(), ["config.num_hidden_layers"]),
        (json.dumps({**SMALL, "num_attention_heads": 5}).encode(), ["config.num_attention_heads"]),
        (json.dumps({**SMALL, "num_key_value_heads": 3}).encode(), ["config.num_key_value_heads"]),
        (json.dumps({**SMALL, "torch_dtype": "bfloat17"}).encode(), ["bfloat17"]),
        (json.dumps({"model_type": "llama"}).encode(), ["config.hidden_size", "config.vocab_size"]),
        (b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}", ["config"]),
    ],
)
def test_bad_configs(
    content: bytes, words: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    begun = time.monotonic()
    code, out, err = said(capsys, "estimate", str(path), "--gpu", "t4")
    assert (code, out) == (2, "")
    for word in words:
        assert word in err
    assert time.monotonic() - begun < 10


def test_other_things_that_are_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\xff")
    (tmp_path / "cut.safetensors").write_bytes(b"\xff\xff\xff\xff\xff\x00\x00\x00{}")
    for name in ("empty", "cut.gguf", "cut.safetensors", "missing/config.json"):
        code, out, err = said(capsys, "estimate", str(tmp_path / name), "--gpu", "t4")
        assert (code, out) == (2, ""), name
        assert err.startswith("error: "), name


def test_hub_errors_end_like_any_other(tmp_path: Path) -> None:
    cases = {
        "acme/missing": None,
        "acme/gated": Repo(files={"config.json": json.dumps(SMALL).encode()}, gated=True),
        "acme/down": Repo(behave={"config.json": status(503)}),
        "acme/broken": Repo(files={"config.json": b'{"model_type": '}),
    }
    with fake_hub.running() as hub:
        hub.repos.update({name: repo for name, repo in cases.items() if repo is not None})
        for name in cases:
            done = process(
                "estimate",
                name,
                HF_ENDPOINT=hub.endpoint,
                HF_HUB_OFFLINE="0",
                HF_HOME=str(tmp_path),
                HF_HUB_DISABLE_TELEMETRY="1",
            )
            assert (done.returncode, done.stdout) == (2, ""), name
            assert done.stderr.startswith("error: "), name
            assert "Traceback" not in done.stderr


# -------------------------------------------------------------------------------------- completion
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("memfit esti", "estimate"),
        ("memfit estimate --checkpo", "--checkpointing"),
        ("memfit estimate --gpu rtx-409", "rtx-4090"),
        ("memfit estimate --optimizer paged_adamw_", "paged_adamw_8bit"),
        ("memfit estimate --method q", "qlora"),
        ("memfit estimate mistralai/Mistral-7B-v0", "mistralai/Mistral-7B-v0.1"),
    ],
)
def test_the_shell_is_offered_what_is_known(words: str, offered: str) -> None:
    last = len(words.split()) - 1
    for shell, word, line in (
        ("bash", str(last), f"plain,{offered}"),
        ("zsh", str(last), f"plain\n{offered}\n"),
        ("fish", words.split()[-1], f"plain,{offered}"),
    ):
        done = process(_MEMFIT_COMPLETE=f"{shell}_complete", COMP_WORDS=words, COMP_CWORD=word)
        assert f"{line}" in done.stdout, shell
        assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_is_told_how(shell: str) -> None:
    done = process(_MEMFIT_COMPLETE=f"{shell}_source")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_MEMFIT_COMPLETE={shell}_complete" in done.stdout


def test_a_trace_without_torch_says_what_else_would_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for words in (
        ["estimate", "gpt2", "--by", "trace", "--offline"],
        ["trace", "gpt2", "--offline"],
    ):
        code, _, told = said(capsys, *words)
        assert code == 2
        assert "needs the extra `trace`" in told
        assert "pip install 'memfit[trace]'" in told
        assert "--python VENV" in told


@pytest.mark.parametrize(
    ("words", "hint", "right"),
    [
        ("qwen99", "`memfit models qwen` lists known models", ""),
        ("h10", "did you mean `h100`", "memfit h100"),
        ("lama-3.1-8b --gpu l4", "did you mean `meta-llama/Llama-3.1-8B`", "memfit meta-llama/"),
        ("fit qwen3-8b --gpu l4", "did you mean `estimate`", "memfit estimate qwen3-8b --gpu l4"),
        ("estimate qwen3-8b on a 4090", "did you mean `memfit qwen3-8b --gpu 4090`", ""),
        ("qwen3-8b --gpu m2", "add the memory of the machine, like `m2-16gb`", ""),
        ("--gpu mac", "like `mac-16gb`", ""),
        ("qwen3-8b --batch", "sequences per micro-batch on one GPU", ""),
    ],
)
def test_what_is_offered_is_near(
    words: str, hint: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that is far from all others gets a list to look at, and no command to copy."""
    assert main(words.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert hint in lines[1]
    assert len(lines) == (3 if right else 2)
    assert not right or lines[2].startswith(f"try: {right}")


@pytest.mark.parametrize(
    ("begun", "name"),
    [("llama-3.1-8", "Llama-3.1-8B"), ("meta-llama/llama-3.1-8", "meta-llama/Llama-3.1-8B")],
)
def test_a_shell_completes_models_with_their_owner_and_without(begun: str, name: str) -> None:
    words = {"COMP_WORDS": f"memfit estimate {begun}", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", "from memfit.cli import main; main()"],
        env={**environment(), **words, "_MEMFIT_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"plain,{name}" in done.stdout.splitlines()
