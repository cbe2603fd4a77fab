"""Language models with towers beside them whose row `memfit new-family` made: what it finds out
about their config, and peaks equal to the trace's. (Parameters are held to transformers' own in
`test_families.py`.)"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.sampling import WHOLE

from memfit.api.new_family import new_family
from memfit.errors import InputError
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import _rows, build
from memfit.trace.composite_files import heads_of_size, place_of, ties_of
from memfit.trace.composite_row import Found, Parts, fields_of, outline, parts_of, ratios_of
from memfit.trace.decoder_check import first_fault
from memfit.trace.program import configuration

ROOM = Path(_rows.__file__).parents[2] / "libraries" / "transformers" / "rows"
DATA = {name: json.loads((ROOM / f"{name}.json").read_text()) for name in _rows.names()}
ROWS = {name: data for name, data in DATA.items() if data.get("composite")}
# How many cases: of weights behind the language model, of one that is captured, of sounds, of a
# class that computes the loss itself, and of one that keeps the embedded text
SOME = {"fuyu": 3, "lfm2_vl": 1, "glmasr": 2, "qwen2_audio": 1, "granite_speech": 3}
SECTIONS = {"qwen2_5_omni_thinker": 36}  # positions have sections of 16, 24 and 24 in each head
CASES: tuple[dict[str, Any], ...] = (
    {"batch": 2, "seq": 130, "method": "lora", "packing": False},
    {"batch": 2, "seq": 200, "method": "qlora", "checkpointing": "full"},
    {"batch": 5, "seq": 300, "new_tokens": 4, "task": "inference"},
)


def unseen(name: str) -> dict[str, Any]:
    """Larger and deeper than the example."""
    config = json.loads(json.dumps(ROWS[name]["example"]))
    text = config["text_config"]
    for key in ("hidden_size", "intermediate_size", "vocab_size"):
        text[key] = 12 * text[key]
    for key in ("num_attention_heads", "num_key_value_heads") if name in SECTIONS else ():
        text[key] = SECTIONS[name] * text[key]
    return {**config, "dtype": "bfloat16"}


@pytest.mark.parametrize("name", sorted(ROWS if WHOLE else SOME))
def test_peaks_are_those_of_the_trace(name: str) -> None:
    cases = CASES if WHOLE else CASES[: SOME[name]]
    model = build(unseen(name))
    if model.graphs is not None and model.whole_prompt:
        cases = tuple(one for one in cases if "task" not in one)  # refused, see below
    without = {} if ROWS[name].get("checkpoints", True) else {"checkpointing": "none"}
    jobs = [{**one, "head": ROWS[name]["heads"][0]} for one in cases]
    jobs = [{**one, **without} if "checkpointing" in one else one for one in jobs]
    assert first_fault(unseen(name), jobs) == ""


def test_a_class_that_keeps_all_logits_generates_with_those_of_the_prompt() -> None:
    """No `logits_to_keep` in its forward; captured graphs have the last position alone."""
    job = {"batch": 4, "seq": 500, "new_tokens": 3, "task": "inference"}
    config = json.loads(json.dumps(ROWS["qwen2_audio"]["example"])) | {"dtype": "bfloat16"}
    config["text_config"]["vocab_size"] = 64000
    assert first_fault(config, [job | {"head": "seq2seq-lm"}]) == ""
    with pytest.raises(InputError, match="with the logits of the whole prompt"):
        lower(build(ROWS["minicpm_ocr"]["example"]), Job(**job))


def test_a_class_without_checkpoints_or_flash_attention_says_so() -> None:
    config = ROWS["granite_speech"]["example"]
    with pytest.raises(InputError, match="has no gradient checkpointing"):
        lower(build(config), Job(checkpointing="full"))
    with pytest.raises(InputError, match="flash"):
        lower(build(config), Job(attention="flash_attention_2"))


def test_a_last_bias_keeps_no_layer_unpacked() -> None:
    """With a tied head Fuyu's last parameter is a bias: `linear.bias` is the name of no module, so
    bitsandbytes packs that layer."""
    config = unseen("fuyu") | {"tie_word_embeddings": True}
    config["text_config"]["tie_word_embeddings"] = True
    assert build(config).tied
    assert first_fault(config, [CASES[1] | {"head": "image-text"}]) == ""


@pytest.fixture(scope="module")
def paligemma() -> tuple[Parts, Found]:
    text = ROWS["paligemma"]["example"]["text_config"]
    own = configuration({"model_type": "paligemma"}, None)
    parts = parts_of("paligemma", own, text, {})
    return parts, fields_of(parts)


def test_fields_of_a_tower_are_told_apart(paligemma: tuple[Parts, Found]) -> None:
    parts, found = paligemma
    assert found.depths == ["vision_config.num_hidden_layers"]
    assert found.flags == ["vision_config.vision_use_head"]
    assert found.fixed == ["vision_config.model_type"]
    assert {"vision_config.patch_size", "projection_dim"} <= set(found.sizes)
    assert "vision_config.num_attention_heads" in found.silent
    assert ratios_of(parts, found) == [
        ("vision_config.hidden_size", "vision_config.num_attention_heads")
    ]


def test_the_language_model_is_found_and_its_head(paligemma: tuple[Parts, Found]) -> None:
    parts, _ = paligemma
    place = place_of(parts, "gemma")
    assert place is not None
    assert (place.new, place.head) == ("model.language_model.", "lm_head")
    assert place_of(parts, "llama") is not None  # which has the same parameters
    assert place_of(parts, "opt") is None
    assert ties_of(parts, place) == ROWS["paligemma"]["ties"]


def test_a_type_without_an_answer_is_refused_with_the_reason() -> None:
    for kind, said in (
        ("florence2", "two fields must count the layers"),
        ("ovis2x", "no such model type"),
    ):
        with pytest.raises(InputError, match=said):
            new_family(kind)
    with pytest.raises(InputError, match="its config has no `vision`"):
        new_family("fuyu", {"vision": 3})


def test_an_example_without_heads_of_attention_gives_no_size_of_them() -> None:
    own = configuration({"model_type": "molmo2_text"}, None)
    assert heads_of_size(own, {"hidden_size": 96}) == {}
    assert heads_of_size(own, {"hidden_size": 96, "num_attention_heads": 6}) == {"head_dim": 16}


def test_a_class_that_cannot_be_built_says_why() -> None:
    found = outline({"model_type": "fuyu", "text_config": {"model_type": "nobody"}}, "image-text")
    assert isinstance(found, str)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text_config": {"model_type": "llama"}}, "the language model `llama`"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "with this `model_type`"),
        ({"vision_config": {"num_attention_heads": 11}}, "11 does not divide `hidden_size`"),
        ({"vision_config": {"patch_size": "large"}}, "`large` must be an integer"),
        ({"vision_config": {"vision_use_head": 3}}, "`3` must be true or false"),
        ({"text_config": None}, "`text_config` is missing"),
    ],
)
def test_other_towers_are_refused_in_a_sentence(change: dict[str, Any], said: str) -> None:
    config = json.loads(json.dumps(ROWS["paligemma"]["example"]))
    for key, value in change.items():
        config[key] = {**config[key], **value} if value else value
    with pytest.raises(InputError, match=said):
        build(config)


def test_a_flag_takes_weights_away_and_a_layer_brings_its_own() -> None:
    config = json.loads(json.dumps(ROWS["paligemma"]["example"]))
    vision = config["vision_config"]
    headed = build({**config, "vision_config": {**vision, "vision_use_head": True}})
    bare = build({**config, "vision_config": {**vision, "vision_use_head": False}})
    gone = {one.name for one in headed.towers} - {one.name for one in bare.towers}
    assert gone
    assert all(".vision_tower.head." in name for name in gone)
    deeper = {**vision, "num_hidden_layers": vision["num_hidden_layers"] + 2}
    more = len(build({**config, "vision_config": deeper}).towers) - len(build(config).towers)
    assert more == 2 * 16
