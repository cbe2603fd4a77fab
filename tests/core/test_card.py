"""The card: what a GPU can do with a model, and every claim of it asked again."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memfit.api.card import card, job_of, own_gpu, served
from memfit.api.question import question
from memfit.api.verbs import VERBS
from memfit.cli import main
from memfit.cli.routing import routed
from memfit.errors import MissingExtra
from memfit.estimate import estimate
from memfit.model import catalog
from memfit.model.equivalents import EQUIVALENTS
from memfit.model.families import families
from memfit.model.quantized import stored_as
from memfit.plan.card import (
    USES,
    Asking,
    Card,
    supported_row,
)
from memfit.plan.furthest import halved
from memfit.plan.reverse import largest_batch, last, longest_seq
from memfit.plan.shelf import Shelf, Smallests
from memfit.processes import VARIABLE
from memfit.report.card import highlights
from memfit.report.card import text as card_text
from memfit.words.gpus import cluster_of

MODEL = "meta-llama/Llama-3.2-1B"


@pytest.fixture(scope="module")
def found() -> Card:
    answer = card(MODEL, gpu="rtx-3060-12gb", offline=True)
    assert isinstance(answer, Card)
    return answer


def test_every_claim_fits_when_it_is_asked(found: Card) -> None:
    assert {row.use.key for row in found.rows if row.fits} >= {"16-bit", "4-bit", "lora", "qlora"}
    for row in found.rows:
        if row.use.served or not row.fits:
            continue
        asked = question(MODEL, {"gpu": "rtx-3060-12gb", "offline": True, **row.use.options}, [])
        assert asked.cluster is not None
        most = largest_batch(asked.model, asked.job, asked.cluster).value
        assert isinstance(most, int)
        assert 0.95 * most - 1 <= row.most <= most, row.use.key
        alone = asked.job.replace(batch=1)
        longest = longest_seq(asked.model, alone, asked.cluster).value
        assert isinstance(longest, int)
        extra = alone.new_tokens if row.use.answers else 0
        assert 0.9 * longest - 512 <= row.longest - extra <= longest, row.use.key


def test_commands_of_rows_say_the_same(found: Card, capsys: pytest.CaptureFixture[str]) -> None:
    """As printed, word for word; what would make the rest possible fits."""
    for row in found.rows:
        if row.fits and not row.use.served:
            assert main([*shlex.split(row.command)[1:], "--offline", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["memory"]["device"] == row.device
        if row.way is not None:
            assert main([*shlex.split(row.way.command)[1:], "--offline", "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["verdict"] == "fits"


@pytest.mark.parametrize(
    ("name", "gpu", "keys"),
    [
        (MODEL, "l4", ["vllm", "vllm-fp8"]),
        (MODEL, "rtx-3060-12gb", ["vllm"]),  # has no arithmetic in 8-bit floats
        (MODEL, "2xl4", ["vllm", "vllm-fp8"]),
        ("openai/gpt-oss-20b", "l4", ["vllm"]),  # is quantized already
        (MODEL, "m4-max-64gb", []),
    ],
)
def test_a_server_s_rows_are_its_own_answers(
    name: str, gpu: str, keys: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command that is printed; the longest context starts, and one token more does not."""
    found = card(name, gpu=gpu, offline=True)
    assert isinstance(found, Card)
    rows = [row for row in found.rows if row.use.server]
    assert [row.use.key for row in rows] == keys
    for row in rows:
        words = shlex.split(row.command)[1:]
        assert main([*words, "--offline", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["device"] == row.device
        assert row.most == int(answer["figures"]["max_concurrency"]) or row.most == 256
        if "--max-model-len" in words:
            place = words.index("--max-model-len") + 1
            for more, code in ((0, 0), (1, 1)):
                words[place] = str(row.longest + more)
                if not more or row.longest < found.model.positions:
                    assert main([*words, "--offline", "--json"]) == code
                    capsys.readouterr()
        assert row.tokens_per_second is not None


@pytest.mark.parametrize(("name", "key"), [(MODEL, "4-bit"), ("LiquidAI/LFM2-350M", "16-bit")])
def test_several_gpus_answer_with_copies_where_layers_cannot_be_split(name: str, key: str) -> None:
    """Packed weights of any model, and graphs that were captured."""
    model = question(name, {"offline": True}, []).model
    cluster = cluster_of("2xrtx-3060-12gb", "")
    assert cluster is not None
    use = next(one for one in USES if one.key == key)
    row, strategy = supported_row(model, use, cluster, job_of)
    assert (strategy.size("ddp"), row.fits, row.most % 2) == (2, True, 0)
    most = row.job.replace(batch=row.most // 2)
    assert estimate(model, most, cluster, strategy).verdict == "fits"
    whole = Card(model=model, cluster=cluster, strategies={key: strategy}, rows=(row,))
    assert f"{use.title}: a copy of the model on each GPU" in card_text(whole)


def test_layers_of_a_packed_model_that_no_gpu_holds_are_split() -> None:
    """A copy on each GPU does not fit, so accelerate's `device_map` splits the layers."""
    name = "Qwen/Qwen3-32B"
    cluster = cluster_of("2xrtx-4060-ti-16gb", "")
    assert cluster is not None
    use = next(one for one in USES if one.key == "4-bit")
    model = question(name, {"offline": True}, []).model
    row, strategy = supported_row(model, use, cluster, job_of)
    assert (strategy.size("split"), row.fits) == (2, True)
    assert row.longest > 4096
    assert estimate(model, row.job, cluster, strategy).verdict == "fits"
    whole = Card(model=model, cluster=cluster, strategies={"4-bit": strategy}, rows=(row,))
    assert "4-bit: some of the layers on each GPU" in card_text(whole)


def test_weights_that_are_stored_quantized_are_named_by_their_format() -> None:
    """And what cannot be quantized again is said once."""
    found = card("openai/gpt-oss-20b", gpu="rtx-4090", offline=True)
    assert isinstance(found, Card)
    lines = card_text(found).splitlines()
    assert "answers in mxfp4" in lines[0]
    assert sum("quantized by mxfp4" in line for line in lines) == 1
    assert any(line.startswith("  8-bit, 4-bit and QLoRA: not supported: ") for line in lines)


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("meta-llama/Llama-3.2-1B", ""),
        ("deepseek-ai/DeepSeek-R1", "fp8"),
        ("moonshotai/Kimi-K2.5", "int4"),
        ("nvidia/Kimi-K2.5-NVFP4", "nvfp4"),
    ],
)
def test_the_format_of_stored_weights(name: str, stored: str) -> None:
    asked = question(name, {"offline": True, "task": "inference"}, [])
    assert stored_as(asked.model) == stored


def test_users_have_no_more_context_than_the_model_has_positions() -> None:
    """GPT-2's 1,024; llama.cpp's slots share a context that may be longer than one sequence."""
    found = card("gpt2", gpu="rtx-3060-12gb", offline=True)
    assert isinstance(found, Card)
    assert found.context == 1024
    assert "users at 1,024" in card_text(found)
    assert {row.longest for row in found.rows} == {1024}
    assert all(row.most > 50 for row in found.rows)


def test_a_model_with_few_positions_generates_fewer_tokens(tmp_path: Path) -> None:
    """Prompt and answer lie within 100 positions, though an answer has 128 tokens elsewhere."""
    config = {**catalog.entry("openai-community/gpt2").config(), "n_positions": 100, "n_layer": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = card(str(tmp_path), gpu="l4", offline=True)
    assert isinstance(found, Card)
    answering = [one for one in found.rows if one.use.answers and not one.use.gguf]
    assert [(one.fits, one.longest) for one in answering] == [(True, 100)] * 5


def test_a_folder_keeps_its_path_in_the_next_step(tmp_path: Path) -> None:
    config = catalog.entry("openai-community/gpt2").config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    smallest = card_text(card(str(tmp_path), offline=True))
    assert f"next step: memfit {tmp_path} --gpu NAME" in smallest
    labels = {**config, "architectures": ["GPT2ForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(labels))
    nothing = card_text(card(str(tmp_path), gpu="l4", offline=True))
    assert f"next step: memfit estimate {tmp_path} --gpu l4" in nothing


def test_the_best_form_of_the_smallest_gpu_is_named() -> None:
    first = {name: card_text(card(name, offline=True)).splitlines()[0] for name in ("gpt2", MODEL)}
    assert "answers in 16-bit from gtx-1650, fine-tunes with LoRA from gtx-1650" in first["gpt2"]
    assert "answers in 16-bit from rtx-a2000-6gb, fine-tunes with QLoRA from rtx-" in first[MODEL]


def test_the_best_of_each_group_is_marked(found: Card) -> None:
    assert next(row.use.key for row in found.rows if row.best) == "16-bit"
    assert sum(row.best for row in found.rows) == 2


def test_without_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([MODEL, "--gpu", "rtx-3060-12gb", "--offline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{MODEL} on NVIDIA GeForce RTX 3060: answers in 16-bit and fine-")
    assert lines[2].startswith("next step: memfit estimate ")
    assert any(line.startswith("* 16-bit ") for line in lines)


@pytest.mark.parametrize(
    ("words", "means"),
    [
        ("qwen3-8b --gpu rtx-4090", "card"),
        ("qwen3-8b", "card"),
        ("--gpu rtx-4090", "card"),
        ("org/unheard-of --gpu=l4 --json", "card"),
        ("qwen3-8b --gpu rtx-4090 --method lora", "estimate"),
        ("job.yaml --strict", "estimate"),
        ("estimate qwen3-8b", "estimate"),
        ("estimte qwen3-8b", "estimte"),
        ("2xrtx-4090", "card --gpu"),
        ("p4d.24xlarge --json", "card --gpu"),
        ("rtx-4090 qwen3-8b", "card --gpu"),
        ("rtx-4090 --method lora", "estimate --gpu rtx-4090 --method"),
        ("gpt2", "card gpt2"),
        ("--help", "--help"),
        ("train qwen3-8b --gpu rtx-4090", "estimate qwen3-8b --gpu rtx-4090"),
        ("finetune qwen3 8b qlora rtx 4090", "estimate qwen3 8b --method qlora --gpu rtx 4090"),
        ("chat qwen3-8b --gpu l4", "estimate qwen3-8b --gpu l4 --task inference"),
        ("serve qwen3-8b --gpu l4", "estimate qwen3-8b --gpu l4 --engine vllm"),
        ("serve qwen3-8b --engine sglang", "estimate qwen3-8b --engine sglang"),
        ("run qwen3:8b --gpu l4", "estimate qwen3:8b --gpu l4 --engine ollama"),
        ("serve Qwen/Qwen3-8B-GGUF:Q4_K_M", "estimate Qwen/Qwen3-8B-GGUF:Q4_K_M --engine llama"),
        ("llama 3.1 8b on my 4090", "card llama 3.1 8b --gpu 4090"),
        ("serve ./any.gguf", "estimate ./any.gguf --engine llamacpp"),
        ("train", "train"),
        ("serve --help", "serve --help"),
    ],
)
def test_questions_without_a_verb_find_theirs(words: str, means: str) -> None:
    assert " ".join(routed(words.split(), VERBS)).startswith(means)


def test_a_task_in_the_place_of_a_verb_says_how_it_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "qwen3-0.6b", "--gpu", "l4", "--offline"]) == 0
    printed = capsys.readouterr()
    assert "note: `serve` is read as `memfit estimate --engine vllm`" in printed.err
    assert printed.out.startswith("fits: ")
    assert main(["train", "train.py", "--lr", "1"]) == 2
    assert "`memfit trace train.py --lr 1` runs it" in capsys.readouterr().err


def test_a_name_of_several_gpus_says_which_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["qwen3-0.6b", "--gpu", "rtx-4060-ti"],
        ["serve", "qwen3-0.6b", "--gpu", "rtx-4060-ti"],
        ["plan", "qwen3-0.6b", "--gpu", "rtx-4060-ti", "--method", "lora"],
    ):
        assert main([*words, "--offline"]) == 0
        assert "this answer is for `rtx-4060-ti-8gb`" in capsys.readouterr().err
    assert main(["qwen3-0.6b", "--gpu", "rtx-4060-ti-16gb", "--offline"]) == 0
    assert "this answer is for" not in capsys.readouterr().err


def test_a_family_on_a_mac() -> None:
    """Qwen3-14B's Q4_K_M file has 9.0 GB (huggingface.co/Qwen/Qwen3-14B-GGUF), and macOS gives the
    GPU two thirds of 16 GB."""
    shelf = card("qwen3", gpu="mac-16gb", offline=True)
    assert isinstance(shelf, Shelf)
    largest = [line for line in shelf.lines if line.answer is not None][-1]
    assert largest.name == "Qwen/Qwen3-14B"
    assert largest.answer is not None
    assert largest.answer.key == "Q4_K_M"


def test_a_shelf_says_what_the_smallest_form_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["70b", "--gpu", "rtx-4090", "--offline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [one for one in lines if one.startswith("meta-llama/Llama-3.1-70B ")]
    assert line.split()[3::2] == ["needs", "needs"]
    answer, tune = (float(word) for word in line.split()[4::2])
    words = "estimate llama-3.1-70b:Q4_K_M --engine llama.cpp --gpu a100-sxm-80gb"
    assert main([*words.split(), "-c", "4096", "--offline", "--json"]) == 0
    pools = json.loads(capsys.readouterr().out)["pools"]
    whole = sum(one["bytes"] for one in pools if one["where"] == "gpu")
    assert answer * 2**30 == pytest.approx(whole, rel=0.02)
    assert 35 < tune < 45  # nf4's 4.13 bits of 68.5 B weights are 32.9 GiB
    assert len({one.find("needs") for one in lines if " needs " in one}) == 1
    assert main(["70b", "--gpu", "rtx-4090", "--offline", "--json"]) == 0
    models = {one["model"]: one for one in json.loads(capsys.readouterr().out)["models"]}
    row = models["meta-llama/Llama-3.1-70B"]
    assert (row["answer"], row["answer_device"], row["tune"], row["tune_device"]) == (None,) * 4
    assert answer * 2**30 == pytest.approx(row["answer_needs"], rel=0.01)
    assert tune * 2**30 == pytest.approx(row["tune_needs"], rel=0.01)


@pytest.mark.parametrize(
    ("model", "where", "total"), [("gpt2", {"gpu": "t4"}, len(USES) + 1), ("gpt2", {}, 6)]
)
def test_progress_counts_every_search(model: str, where: dict[str, str], total: int) -> None:
    told: list[tuple[int, int, str]] = []
    card(model, offline=True, progress=lambda *one: told.append(one), **where)
    assert [done for done, _, _ in told] == list(range(total))
    assert {all for _, all, _ in told} == {total}
    assert told[0][2] == "16-bit"


def test_progress_of_several_processes_names_what_is_under_way() -> None:
    """They begin with the last."""
    told: list[tuple[int, int, str]] = []
    asking = Asking(
        job_of=job_of, serve=served, processes=2, progress=lambda *one: told.append(one)
    )
    assert asking.all(abs, [5, -6, 7], str) == [5, 6, 7]
    assert told[0] == (0, 3, "7")
    assert told[-1] in {(2, 3, "5"), (2, 3, "-6")}


@pytest.mark.parametrize("words", [["gpt2", "--gpu", "t4"], ["gpt2", "--json"]])
def test_processes_print_the_same_card(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*words, "--offline"])
    done = subprocess.run(
        [sys.executable, "-m", "memfit", *words, "--offline"],
        env={**os.environ, VARIABLE: "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, capsys.readouterr().out, "")


def test_without_a_driver_to_ask_there_is_no_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even an error: the extra `measure` may be missing."""
    import memfit.hardware

    def missing() -> None:
        raise MissingExtra("asking the driver", "measure")

    monkeypatch.setattr(memfit.hardware, "auto_gpu", missing)
    assert own_gpu() is None


def test_an_amount_of_memory_is_no_gpu() -> None:
    for text in ("24GB", "24 GiB", "24g"):
        cluster = cluster_of(text, "")
        assert cluster is not None
        assert (cluster.gpu.id, cluster.gpu.memory) == ("custom", 24 * 2**30)
        assert cluster.gpu.name == "GPU with 24 GiB"


def test_a_gpu_without_a_name_is_no_custom(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt2", "--memory", "8GiB", "--offline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("openai-community/gpt2 on a GPU with 8 GiB: ")
    assert "; full fine-tuning up to " in lines[1]


def test_the_smallest_gpu_for_each_use() -> None:
    known = card(MODEL, offline=True)
    assert isinstance(known, Smallests)
    by_use = {row.use.key: row for row in known.rows}
    assert by_use["qlora"].gpu is not None
    assert by_use["full"].gpu is not None
    assert by_use["qlora"].gpu.memory <= by_use["full"].gpu.memory
    assert by_use["full"].dollars is not None


def test_what_only_a_trace_answers_says_so_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    known = {*families(), *EQUIVALENTS}
    name = next(one.name for one in catalog.entries() if one.model_type not in known)
    assert main([name, "--gpu", "t4", "--offline"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "a card needs formulas" in lines[0]
    assert lines[2].startswith(f"next step: memfit trace {name}")


@pytest.mark.parametrize(
    "where",
    [
        "--gpus 2xrtx-4090",
        "--memory 8GiB",
        "--memory 8000MiB",
        "--memory 8GB",
        "--memory 8589934593",
    ],
)
def test_the_next_step_without_a_card_keeps_the_gpus(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["whisper-tiny", *where.split(), "--offline"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"next step: memfit estimate whisper-tiny {where}"
    assert main([*said.removeprefix("next step: memfit ").split(), "--offline"]) == 0


@pytest.mark.parametrize(
    ("model", "gpu", "verdict"),
    [
        ("google/gemma-4-26B-A4B", "t4", "nothing fits without CPU memory"),
        ("meta-llama/Llama-3.3-70B-Instruct", "rtx-4090", "nothing fits without CPU memory"),
        ("tiiuae/falcon-7b", "8GiB", "answers in GGUF Q8_0"),
    ],
)
def test_the_next_step_fits(
    model: str, gpu: str, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([model, "--gpu", gpu, "--offline"])
    lines = capsys.readouterr().out.splitlines()
    assert verdict in lines[0]
    words = shlex.split(lines[2].removeprefix("next step: memfit "))
    assert main([*words, "--offline"]) == 0


def test_a_file_that_is_partly_in_cpu_memory_says_how_much(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """llama.cpp's own answer, which the card repeats."""
    main(["meta-llama/Llama-3.3-70B-Instruct", "--gpu", "rtx-4090", "--offline", "--json"])
    rows = {row["use"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    row = rows["Q4_K_M"]
    assert not row["fits"]
    words = shlex.split(row["command"])[1:]
    assert main([*words, "--offline", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    pools = answer["pools"]
    assert row["tokens_per_second"] == answer["speed"]["at_longest"]
    assert answer["speed"]["host_assumed"]
    for where, size in (("gpu", row["device"]), ("cpu", row["in_cpu_memory"])):
        assert sum(one["bytes"] for one in pools if one["where"] == where) == size


def test_the_largest_number_is_found_where_the_line_leads_too_far_down() -> None:
    refused: list[int] = []

    def over(count: int) -> int:
        refused.append(count)
        return count - 20

    assert halved(over, 100) in (19, 20)
    assert halved(over, 2) == 1
    assert halved(lambda count: 1, 50) == 0
    assert len(refused) < 20


def test_where_nothing_fits_it_says_how_much_is_not_supported() -> None:
    rows: Any = [
        SimpleNamespace(refused="no graph", in_cpu_memory=0, use=USES[0]),
        SimpleNamespace(refused="", in_cpu_memory=0, use=USES[0]),
    ]
    assert list(highlights([], rows)) == [
        "neither answering nor fine-tuning fits; 1 of 2 uses are not supported"
    ]
    assert list(highlights([], rows[1:])) == ["neither answering nor fine-tuning fits"]


def test_the_end_of_a_line_is_found_without_both_of_its_neighbours() -> None:
    tried: list[int] = []

    def over(count: int) -> int:
        tried.append(count)
        return 7 * count - 71_000

    assert last(over, 100_000, start=5_000) == 10_142
    exact = len(tried)
    tried.clear()
    assert last(over, 100_000, start=5_000, share=8) == 10_142
    assert len(tried) < exact
