"""Families and sizes as people type them."""

from __future__ import annotations

import json

import pytest

from memfit.api.verbs import VERBS
from memfit.cli.app import main
from memfit.cli.routing import routed
from memfit.model import catalog
from memfit.model.family_names import MOST, is_closed, models_of


def shorts(name: str) -> list[str]:
    return [one.rpartition("/")[2] for one in models_of(name)]


@pytest.mark.parametrize("name", ["phi3", "phi-3", "Phi 3", "PHI_3"])
def test_separators_and_case_do_not_count(name: str) -> None:
    found = shorts(name)
    assert len(found) == 4
    assert all(one.startswith("Phi-3-m") for one in found)  # not Phi-3.5


def test_a_longer_number_is_another_version() -> None:
    assert all(one.startswith("Qwen3-") for one in shorts("qwen3"))
    assert all(one.startswith("Qwen3.5-") for one in shorts("qwen 3.5"))
    assert shorts("llama3") == ["Meta-Llama-3-8B", "Meta-Llama-3-70B"]


def test_a_size_means_the_models_of_that_size() -> None:
    found = models_of("8b")
    assert "meta-llama/Llama-3.1-8B" in found
    assert "Qwen/Qwen3-8B" in found
    assert not any("1_8" in one or "1.8" in one for one in found)
    assert "meta-llama/Llama-3.1-70B" in models_of("70B")


def test_a_family_with_a_size() -> None:
    found = models_of("llama 70b")
    assert found[-1] == "meta-llama/Llama-3.1-70B"  # of one size the plainest name is last
    assert all("lama" in one and "70b" in one.lower() for one in found)
    assert not any("DeepSeek" in one for one in found)


def test_each_model_comes_in_one_form_smallest_first() -> None:
    counts = {one.name: one.parameters or one.published or 0 for one in catalog.entries()}
    for name in ("gemma3", "qwen3", "mistral", "70b", "granite"):
        found = models_of(name)
        assert [counts[one] for one in found] == sorted(counts[one] for one in found)
    assert shorts("gemma3").count("gemma-3-4b-it") == 1
    assert "gemma-3-4b-pt" not in shorts("gemma3")


def test_a_large_family_keeps_its_largest_models() -> None:
    found = shorts("qwen")
    assert len(found) == MOST
    assert found[-1] == "Qwen3.5-397B-A17B"


def test_one_model_is_no_family() -> None:
    assert models_of("llama-3.1-8b") == ()
    assert models_of("Qwen/Qwen3-8B") == ()
    assert models_of(" ") == models_of("...") == ()


@pytest.mark.parametrize(
    ("word", "means"),
    [
        ("mistral", "card"),  # like `trace`
        ("gpt-oss", "card"),  # like `gpus`
        ("granite", "card"),
        ("8b", "card"),
        ("trac", "trac"),
        ("stud", "stud"),
        ("whisper", "card"),
        ("wisper", "wisper"),
    ],
)
def test_a_family_is_no_misspelled_command(word: str, means: str) -> None:
    assert routed([word, "--gpu", "rtx-4090"], VERBS)[0] == means


@pytest.mark.parametrize(
    ("words", "means"),
    [
        ("qwen3 8b lora 4090", "estimate|qwen3 8b|--method|lora|--gpu|4090"),
        ("llama-3.1-8b 2x3090", "card|llama-3.1-8b|--gpu|2x3090"),
        ("qwen3-8b on 4090 --json", "card|qwen3-8b|--gpu|4090|--json"),
        ("gemma 2 9b", "card|gemma 2 9b"),
        ("mixtral 8x7b", "card|mixtral 8x7b"),
        ("qwen3-8b h100 full --seq 4096", "estimate|qwen3-8b|--gpu|h100|--method|full|--seq|4096"),
        ("qwen3-8b --vram 16", "card|qwen3-8b|--vram|16"),
        ("--model qwen3-8b --gpu t4", "card|--model|qwen3-8b|--gpu|t4"),
        ("gemma 3 12b m4 max 64gb", "card|gemma 3 12b|--gpu|m4 max 64gb"),
        ("gemma 3 12b m4 max", "card|gemma 3 12b|--gpu|m4 max"),  # which memory, it then asks
        (
            "phi 4 lora on 2 x rtx 4060 ti 16gb",
            "estimate|phi 4|--method|lora|--gpu|2 x rtx 4060 ti 16gb",
        ),
        ("llama 3.3 70b 2 a100", "card|llama 3.3 70b|--gpu|2 x a100"),
        ("gpt 2 t4", "card|gpt 2|--gpu|t4"),
        ("qwen3-8b nonsense", "card|qwen3-8b|nonsense"),
    ],
)
def test_words_before_the_first_option_are_known_by_what_they_name(words: str, means: str) -> None:
    assert "|".join(routed(words.split(), VERBS)) == means


def test_a_context_asks_for_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """Without this it was full fine-tuning with sequences of 32k tokens: 415 GiB."""
    assert main(["qwen3-8b", "--gpu", "h100", "--context", "32k", "--offline"]) == 0
    said = capsys.readouterr()
    assert "inference" in said.out
    assert "`--context` is read as a question about answering" in said.err
    for training in ("--method lora", "--lora", "--rank 8", "--optim adamw_torch", "--packing"):
        words = ["qwen3-8b", "--gpu", "h100", "--context", "2k", *training.split()]
        main([*words, "--offline"])
        said = capsys.readouterr()
        assert "finetune" in said.out, training
        assert "is read as" not in said.err


@pytest.mark.parametrize(
    ("family", "together"), [("whisper", False), ("smollm2", True), ("t5", True)]
)
def test_a_family_without_cards_is_not_offered_one(
    family: str, together: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([family]) == 2
    assert ("see them all on one GPU" in capsys.readouterr().err) == together


@pytest.mark.parametrize("users", [["--users", "4"], ["--users=4"]])
def test_users_of_an_answer_are_a_batch(
    users: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["estimate", "qwen3-0.6b", "--context", "4k", "--offline", "--json"]
    assert main([*asked, *users]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["job"]["batch"] == 4
    assert "`--users` is read as `--batch`" in said.err
    assert main(["estimate", "qwen3-0.6b", "--users", "4"]) == 2  # of what, nobody knows


@pytest.mark.parametrize("name", ["claude", "Claude-3.5-Sonnet", "gpt-4o", "GPT4", "gemini 2.5"])
def test_models_that_are_not_public(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_closed(name)
    assert main([name, "--offline"]) == 2
    assert "is not public" in capsys.readouterr().err


def test_public_models_are_not_taken_for_closed_ones() -> None:
    assert not any(is_closed(one.rpartition("/")[2]) for one in catalog.names())


def test_a_family_without_a_gpu_lists_its_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["phi3", "--offline"]) == 2
    said = capsys.readouterr().err
    assert "could be any of 4 models: `microsoft/Phi-3-mini" in said
    assert "add `--gpu NAME` to see them all on one GPU" in said


def test_a_family_without_cards_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["whisper", "--gpu", "rtx-4090", "--offline"]) == 2
    assert "`memfit estimate openai/whisper-tiny`" in capsys.readouterr().err


def test_the_only_model_of_a_family_has_its_card(capsys: pytest.CaptureFixture[str]) -> None:
    main(["smollm3", "--gpu", "rtx-4090", "--offline"])
    assert capsys.readouterr().out.startswith("HuggingFaceTB/SmolLM3-3B on NVIDIA")
