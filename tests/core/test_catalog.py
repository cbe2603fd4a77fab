"""The bundled catalog: complete, quick to search, and honest about where each config came from."""

from __future__ import annotations

import subprocess
import sys

import pytest

from memfit.errors import InputError
from memfit.model import catalog


def test_at_least_four_hundred_models_each_with_a_model_type_and_a_source() -> None:
    entries = list(catalog.entries())
    assert len(entries) == len(catalog.names()) >= 400
    for entry in entries:
        assert entry.model_type, entry.name
        assert entry.source, entry.name
        assert entry.name.count("/") == 1, entry.name


def test_every_config_parses_and_is_of_the_type_its_line_says() -> None:
    for name in catalog.names():
        entry = catalog.entry(name)
        assert entry.name == name
        assert entry.config()["model_type"] == entry.model_type


def test_names_are_sorted_and_stand_once() -> None:
    names = catalog.names()
    assert list(names) == sorted(names, key=str.lower)
    assert len({name.lower() for name in names}) == len(names)


def test_agreement_says_what_the_two_counts_say() -> None:
    for entry in catalog.entries():
        if entry.agree is None:
            assert entry.parameters is None or entry.published is None, entry.name
        else:
            assert entry.agree == (entry.parameters == entry.published), entry.name
        if entry.agree is False:
            assert entry.notes, f"{entry.name}: a difference without a reason"
        if entry.parameters is not None:
            assert entry.built_with, entry.name
        if entry.published is not None:
            assert entry.published_source, entry.name


def test_no_line_cites_a_number_that_nobody_can_look_up() -> None:
    assert b"index id" not in catalog.DATA.read_bytes()


@pytest.mark.parametrize(
    "spelled",
    [
        "meta-llama/Llama-3.1-8B",
        "META-LLAMA/llama-3.1-8b",
        "Llama-3.1-8B",
        "llama-3.1-8b",
        "llama_3.1_8B",
        " Llama 3.1 8B ",
    ],
)
def test_a_name_is_found_in_every_case_and_without_its_organisation(spelled: str) -> None:
    assert catalog.find(spelled) == "meta-llama/Llama-3.1-8B"


@pytest.mark.parametrize(
    "spelled", ["", "Llama", "Llama-3.1", "llama31-8b", "no/such", "meta-llama/", "/Llama-3.1-8B"]
)
def test_a_name_that_is_not_whole_is_not_guessed(spelled: str) -> None:
    assert catalog.find(spelled) is None


def test_a_dot_is_part_of_a_number_and_not_a_separator() -> None:
    assert catalog.find("Qwen2.5-7B") == "Qwen/Qwen2.5-7B"
    assert catalog.find("Qwen2-5-7B") is None


def test_a_short_name_of_two_organisations_is_ambiguous() -> None:
    line = (
        '{"name":"%s","model_type":"llama","verbatim":true,"source":"here",'
        '"config":{"model_type":"llama"}}\n'
    )
    small = catalog.Catalog(
        "".join(line % name for name in ("a/Same-1B", "b/Same-1B", "b/Other")).encode()
    )
    assert small.find("same-1b") is None
    assert small.candidates("same-1b") == ["a/Same-1B", "b/Same-1B"]
    assert small.find("other") == "b/Other"
    assert small.find("B/same-1B") == "b/Same-1B"


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"no model `Lama-3\.1-8B`(?s:.*)meta-llama/Llama-3\.1-8B"):
        catalog.entry("Lama-3.1-8B")
    assert catalog.nearest("qwen/qwen25-7b")[0] == "Qwen/Qwen2.5-7B"


def test_a_config_is_given_anew_each_time() -> None:
    entry = catalog.entry("openai-community/gpt2")
    entry.config()["n_layer"] = 99
    assert entry.config()["n_layer"] == 12


def test_a_config_too_wide_for_its_line_lies_in_a_file_of_its_own() -> None:
    config = catalog.entry("nvidia/MiniMax-M3-NVFP4").config()
    assert config["model_type"] == "minimax_m3_vl"
    assert len(config["quantization_config"]) > 2
    wide = {path.name for path in catalog.DATA.with_name("wide").iterdir()}
    assert wide == {
        name.replace("/", "--") + ".json"
        for name in catalog.names()
        if catalog.entry(name).raw.startswith(b'"')
    }


@pytest.mark.parametrize(
    ("name", "phrase"),
    [
        ("meta-llama/Llama-3.1-8B", "verbatim copy of config.json"),
        ("codellama/CodeLlama-7b-hf", "copy of config.json, with keys merged in or left out"),
        (
            "01-ai/Yi-1.5-6B",
            "assembled from published hyper-parameters, parameter count equal to the published one",
        ),
        (
            "tiiuae/falcon-7b",
            (
                "assembled from published hyper-parameters, parameter count differs from the "
                "published one for a known reason"
            ),
        ),
        (
            "xai-org/grok-1",
            (
                "assembled from published hyper-parameters, no published parameter count to "
                "compare with"
            ),
        ),
    ],
)
def test_provenance_says_how_far_a_config_is_checked(name: str, phrase: str) -> None:
    assert catalog.entry(name).provenance == phrase


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("openai-community/gpt2", 124_439_808),
        ("mistralai/Mistral-7B-v0.1", 7_241_732_096),
    ],
)
def test_well_known_counts(name: str, parameters: int) -> None:
    assert catalog.entry(name).parameters == parameters


def test_looking_up_a_name_imports_nothing_heavy() -> None:
    code = (
        "import sys; from memfit.model import catalog; assert catalog.find('Llama-3.1-8B');"
        "heavy = {'huggingface_hub', 'numpy', 'torch', 'gguf', 'safetensors', 'yaml', "
        "'httpx', 'requests'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_config_of_the_catalog_is_refused_for_good() -> None:
    """What a family cannot read is left to a trace; any other problem is an error of ours."""
    from memfit.errors import Problem
    from memfit.words.models import model_of
    from memfit.words.options import Ask

    for name in catalog.names():
        reasons: list[Problem] = []
        model_of(f"catalog:{name}", Ask(), reasons)
