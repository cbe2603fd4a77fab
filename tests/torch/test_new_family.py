"""`memfit new-family`: what it finds out about the fields of a config, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.sampling import WHOLE
from tests.torch.test_encoders import unseen

from memfit.api.new_family import new_family, write_family
from memfit.cli import main
from memfit.errors import InputError
from memfit.model.config import Fields
from memfit.model.families import _rows, build
from memfit.model.families._captured import ROWS
from memfit.model.families._chains import CHAINS
from memfit.trace.decoder_files import decodes
from memfit.trace.decoder_layers import popped
from memfit.trace.decoder_row import (
    caps_of,
    decoder,
    follows_of,
    least_of,
    ropes_of,
    window_of,
)
from memfit.trace.decoder_sizes import bound_of, proposed
from memfit.trace.family_check import fault, off, unlike_parameters
from memfit.trace.family_files import capturable
from memfit.trace.family_sizes import trouble
from memfit.trace.new_family import (
    Subject,
    lengths,
    rates_of,
    ratios_of,
    row_data,
    sizes_of,
    subject_of,
)
from memfit.trace.real_positions import positions_left

LONG = pytest.mark.skipif(not WHOLE, reason="half a minute: MEMFIT_WHOLE")
SAID = (("num_key_value_heads", 8),)  # the default of CWM's class
NAMES = sorted(_rows.names())
ROOM = Path(_rows.__file__).parents[2] / "libraries" / "transformers"


@pytest.fixture(scope="module")
def bert() -> Subject:
    """With the heads and the rates of dropout that its runs show."""
    subject = subject_of("bert")
    subject.base = {"num_hidden_layers": 2}
    rates_of(subject)
    return subject


def test_changes_of_a_field_are_told_apart(bert: Subject) -> None:
    assert bert.changed(layer_norm_eps=0.5) == "nothing"
    assert bert.changed(hidden_dropout_prob=0.4) == "rates"
    assert bert.changed(intermediate_size=1000) == "shapes"
    assert bert.changed(is_decoder=True) == "code"
    assert bert.changed(num_attention_heads=13) == "fails"


def test_rates_have_the_defaults_of_the_class() -> None:
    """BERT's classifiers drop out as its layers do, where they have no rate of their own."""
    subject = subject_of("bert")
    subject.base = {"num_hidden_layers": 1}
    assert rates_of(subject) == dict(CHAINS["bert"].rates)


def test_sizes_of_an_encoder_are_those_of_the_row_written_by_hand(bert: Subject) -> None:
    dims, equal, fixed = sizes_of(bert, "num_hidden_layers", ())
    row = CHAINS["bert"]
    by_hand = row.dims(Fields(row.examples[0]))
    assert {*dims, "hidden_size_each"} == set(by_hand)
    assert equal == {}
    assert fixed == []
    assert ratios_of(bert, dims) == [("hidden_size", "num_attention_heads")]


@LONG
@pytest.mark.parametrize("name", NAMES)
def test_the_command_makes_what_is_shipped(name: str) -> None:
    row = json.loads((ROOM / f"rows/{name}.json").read_text())
    found = new_family(name, row.get("given"))
    assert json.loads(json.dumps(found.row)) == row
    for setting, graphs in found.graphs.items():
        file = f"{name}.{setting}.json" if setting else f"{name}.json"
        assert graphs == json.loads((ROOM / "graphs" / file).read_text())


@LONG
def test_the_row_of_roberta_is_that_written_by_hand() -> None:
    """Two positions are before the first token's."""
    data, left_out = row_data("roberta")
    row, by_hand = _rows.row_of(data), CHAINS["roberta"]
    assert left_out == {}
    assert (row.before, row.limited, row.rates) == (2, True, by_hand.rates)
    assert row.dims(Fields(by_hand.examples[0])) == by_hand.dims(Fields(by_hand.examples[0]))


@pytest.mark.parametrize(("kind", "found"), [("bert", {}), ("roberta", {"pooler": "pooler.dense"})])
def test_what_the_model_without_a_head_has(kind: str, found: dict[str, str]) -> None:
    """RoBERTa's classes have no pooler, which its bare model has."""
    data, _ = row_data(kind)
    assert {key: data[key] for key in ("bare", "pooler") if key in data} == found


def test_a_head_that_cannot_be_written_is_left_out() -> None:
    """One of three sizes is not said to be one."""
    data = json.loads((ROOM / "rows/roformer.json").read_text())
    del data["dims"]["intermediate_size"]
    kept, left_out = capturable({**data, "heads": ["masked-lm"]})
    assert kept["heads"] == []
    assert "no exact expression" in left_out["masked-lm"]


def test_a_wrong_parameter_is_found() -> None:
    config = unseen(CHAINS["roformer"], "masked-lm")
    assert unlike_parameters(config, "masked-lm") == ""
    assert unlike_parameters(config, "classification")


def test_a_field_that_the_code_depends_on_is_refused() -> None:
    config = unseen(CHAINS["roformer"], "classification")
    for changes in ({"embedding_size": 64}, {"rotary_value": True}, {"hidden_act": "relu"}):
        with pytest.raises(InputError, match="no captured graph"):
            build({**config, **changes})


def test_defaults_of_the_class_are_said() -> None:
    config = unseen(CHAINS["roformer"], "classification")
    before = build(config)
    del config["type_vocab_size"]
    model = build(config)
    said = ("type_vocab_size", 2)
    assert said not in before.assumed
    assert said in model.assumed


def test_layers_of_a_decoder_are_told_apart() -> None:
    """By lists of the config, whose defaults go on in a pattern, and by how many come first."""
    subject, layers = decoder("afmoe", {})
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    assert layers.data() == {
        "lists": {"layer_types": [[], kinds]},
        "deciding": {"global_attn_every_n_layers": 4},
        "first": "num_dense_layers",
    }
    assert window_of(subject, ()) == "sliding_window"
    assert decoder("cwm", {})[1].lists["layer_types"] == ([], ["full_attention", *kinds[:3]])


def test_sizes_of_a_decoder_and_their_relations() -> None:
    subject, layers = decoder("bitnet", {})
    dims, equal, _ = sizes_of(subject, "num_hidden_layers", (), following=False)
    assert "max_position_embeddings" not in dims
    assert equal == {}
    assert set(ratios_of(subject, dims)) >= {("num_attention_heads", "num_key_value_heads")}
    assert follows_of(subject, dims, layers) == {}
    assert ropes_of(subject) == ["default", "linear", "llama3", "yarn"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("dots3_note_text", "rejects the configuration of `dots3_note_text`"),
    ],
)
def test_what_cannot_be_told_apart_is_refused_with_the_reason(kind: str, said: str) -> None:
    """It ended in a traceback."""
    with pytest.raises(InputError, match=said):
        new_family(kind)


def test_keys_whose_number_must_be_even_divide_the_queries() -> None:
    """One key more fails whatever else changes; two more divide more queries."""
    subject, _ = decoder("diffllama", {})
    dims = ["hidden_size", "num_attention_heads", "num_key_value_heads"]
    pair = ("num_attention_heads", "num_key_value_heads")
    assert pair in ratios_of(subject, dims)


def test_keys_of_latent_attention_are_not_made_fewer() -> None:
    """There are as many as queries, whatever the config says, and no fewer run the same."""
    subject, _ = decoder("mistral4", {})
    assert subject.head == "image-text"  # the only list of classes that has it
    assert subject.equal == {"num_key_value_heads": "num_attention_heads"}


def test_the_first_layer_may_be_another_one() -> None:
    """ModernBERT's has no norm in front of attention; so has the last of GPT-NeoX Japanese a
    bias."""
    assert decoder("modernbert-decoder", {})[1].odd == ("first",)
    assert decoder("gpt_neox_japanese", {})[1].odd == ("last",)
    kinds = [one.captured for one in build(ROWS["modernbert-decoder"].examples[0]).layers]
    names = [one.graph for one in kinds if one]
    assert names[0].startswith("first_")
    assert not any(one.startswith("first_") for one in names[1:])


def test_no_two_sizes_are_alike_and_heads_are_in_order() -> None:
    """The indexer's heads must not be narrower than the part that turns with positions."""
    subject, _ = decoder("axk2", {})
    dims = [key for key in subject.whole if "head_dim" in key and key != "head_dim"]
    dims += ["index_n_heads", "gated_norm_rank", "num_attention_heads", "n_shared_experts"]
    dims += ["num_experts_per_tok"]
    found = proposed(subject, dims, [], 4)
    assert len(set(found.values())) == len(dims)
    narrow, wide = found["qk_rope_head_dim"], found["index_head_dim"]
    assert all(one <= other for one, other in zip(narrow, wide, strict=True))
    assert caps_of(subject, dims) == ["index_topk"]
    names = {key: key for key in dims}
    assert ["index_head_dim", "qk_rope_head_dim"] in least_of(subject, dims, names)


def test_later_proposals_have_more_experts_than_run() -> None:
    """FlexOlmo runs five of seven experts, and more are tried only by fields that may vary."""
    subject, _ = decoder("flex_olmo", {})
    dims = ["num_experts", "vocab_size"]
    why = [trouble(subject, dims, [], proposed(subject, dims, [], turn)) for turn in (0, 4)]
    assert "k not in range" in why[0]
    assert why[1] == ""


def test_a_number_that_another_one_bounds_is_less() -> None:
    subject, _ = decoder("axk1", {})
    groups = {"n_group": (2, 5, 7, 3)}
    assert bound_of(subject, "topk_group", groups) == groups["n_group"]
    assert bound_of(subject, "n_shared_experts", groups) is None


def test_a_decoder_of_a_config_that_says_otherwise_is_refused() -> None:
    config = {**ROWS["cwm"].examples[0], "num_hidden_layers": 6}
    del config["layer_types"]
    assert len(build(config).layers) == 6  # as the class repeats its kinds
    assert build(config).assumed == ()  # sizes are said, and no rate of dropout
    heads = {key: one for key, one in config.items() if key != "num_key_value_heads"}
    assert build({**heads, "num_attention_heads": 16, "hidden_size": 128}).assumed == SAID
    for changes, said in (
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "positions `dynamic`"),
        ({"rope_scaling": {"type": "longrope"}}, "positions `longrope`"),
        ({"layer_types": ["other"] * 6}, "layers of kind `other`"),
        ({"layer_types": ["full_attention"]}, "needs 6 entries"),
        ({"hidden_act": "relu"}, "with `hidden_act`"),
    ):
        with pytest.raises(InputError, match=said):
            build({**config, **changes})


def test_the_positions_of_a_published_config_win_over_those_of_the_class() -> None:
    """InternLM 3 8B's config has `rope_scaling`; its class's defaults run other operations."""
    config = {**ROWS["internlm3"].examples[0], "num_hidden_layers": 2}
    del config["rope_parameters"]
    published = {"rope_type": "dynamic", "factor": 6.0}
    assert len(build({**config, "rope_scaling": published}).layers) == 2
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    assert len(build({**config, "rope_scaling": published, "rope_parameters": plain}).layers) == 2
    for other in (config, {**config, "rope_parameters": plain}):
        with pytest.raises(InputError, match="positions `default`"):
            build(other)


def test_how_many_layers_come_first_is_a_size() -> None:
    config = {**ROWS["afmoe"].examples[0], "num_hidden_layers": 4}
    del config["layer_types"]
    for dense in (1, 3):
        kinds = [layer.captured for layer in build({**config, "num_dense_layers": dense}).layers]
        assert (
            len(
                {one.graph for one in kinds[:dense] if one}
                & {one.graph for one in kinds[dense:] if one}
            )
            == 0
        )


def test_a_decoder_with_other_defaults_needs_its_list() -> None:
    """Where a field is given from which the class would derive it."""
    data = json.loads((ROOM / "rows/cwm.json").read_text())
    kinds = {**data["kinds"], "deciding": {"every": 4}}
    listed = _rows.layer_kinds("num_hidden_layers", kinds, "cwm")
    assert listed(Fields({"num_hidden_layers": 2, "every": 4}))[1] == "sliding_attention"
    fields = Fields({"num_hidden_layers": 2, "every": 3})
    listed(fields)
    assert "without `layer_types`" in fields.problems[0].message


def test_files_are_written_and_a_bad_folder_is_refused(tmp_path: Path) -> None:
    from memfit.api.new_family import NewFamily

    found = NewFamily(model_type="x", row={"type": "x"}, graphs={"": {"graphs": []}}, left_out={})
    row, graphs = write_family(found, tmp_path / "new")
    assert json.loads(row.read_text()) == {"type": "x"}
    assert json.loads(graphs.read_text()) == {"graphs": []}
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_family(found, tmp_path / "file")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("bert", "written by hand"),
        ("roformr", "did you mean `roformer`"),
        ("encoder-decoder", "two fields must count the layers of its encoder and decoder"),
        ("funnel", "no integer `num_hidden_layers`"),
    ],
)
def test_other_types_are_refused_in_a_sentence(
    kind: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-family", kind]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [("attention_type", "names no value"), ("attention=full", "its config has no `attention`")],
)
def test_a_field_that_is_set_is_checked(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-family", "big_bird", "--set", given]) == 2
    assert said in capsys.readouterr().err


def test_what_is_set_is_no_default_of_the_class() -> None:
    """BigBird's is block-sparse, and so is a config that does not say."""
    subject = subject_of("big_bird", {"attention_type": "original_full"})
    assert subject.whole["attention_type"] == "original_full"
    assert subject.plain["attention_type"] == "block_sparse"


def test_code_that_ends_with_a_length_is_said(bert: Subject) -> None:
    """Block-sparse attention is full on a short sequence; local attention of 128 tokens has a turn
    of its loop more for each of them."""
    subject = subject_of("big_bird")
    subject.base = {"num_hidden_layers": 1}
    rates_of(subject)
    lengths(subject, ())
    assert subject.longest == (5 + 2 * 3) * 64
    assert subject.changed(block_size=16) != "nothing"
    short = subject_of("canine")
    short.base = {"num_hidden_layers": 1}
    rates_of(short)
    with pytest.raises(InputError, match="tokens: it runs other operations"):
        lengths(short, ())
    lengths(bert, ("max_position_embeddings",))
    assert len(bert.before) == 5


def test_a_model_that_asks_for_more_than_ids_is_refused() -> None:
    """LXMERT wants what a detector saw, also on the CPU. BROS is given a box for every token."""
    with pytest.raises(InputError, match="does not run on the CPU: ValueError"):
        positions_left({"model_type": "lxmert"}, "none", "question-answering")
    small = {"model_type": "bros", "num_hidden_layers": 1, "max_position_embeddings": 64}
    assert positions_left(small, "max_position_embeddings", "token-classification") == 0


def test_positions_are_counted_on_a_real_model() -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "vocab_size": 99, "max_position_embeddings": 20}
    config = {**sizes, "pad_token_id": 1}
    found = {
        kind: positions_left({**config, "model_type": kind}, "max_position_embeddings", "masked-lm")
        for kind in ("bert", "roberta", "modernbert")
    }
    assert found == {"bert": 0, "roberta": 2, "modernbert": None}


def test_a_peak_that_is_off_is_said() -> None:
    from memfit.job import Job

    config: dict[str, Any] = unseen(CHAINS["roformer"], "classification")
    assert fault(config, Job(batch=2, seq=64, head="classification")) == ""
    assert "no captured graph" in fault(config, Job(batch=2, seq=64, attention="eager"))


def test_a_fused_norm_keeps_its_input_and_a_number_for_each_row() -> None:
    """DiffLlama has `nn.RMSNorm` without a weight (kernels_of.py), which no adapter trains."""
    from memfit.job import Job

    config = {**ROWS["diffllama"].examples[0], "dtype": "bfloat16"}
    for case in ({}, {"method": "lora"}):
        assert fault(config, Job(batch=2, seq=100, optimizer="sgd", **case)) == ""


def test_logits_are_bounded_by_the_class_where_a_config_does_not_say() -> None:
    """Nanochat's class has 15; null in a config is no bound."""
    config = dict(ROWS["nanochat"].examples[0])
    config.pop("final_logit_softcapping", None)
    assert build(config).softcap
    assert not build({**config, "final_logit_softcapping": None}).softcap


def test_a_dropout_by_default_makes_it_a_row_of_rates() -> None:
    assert not decodes("bert-generation")
    assert decodes("nanochat")
    assert CHAINS["bert-generation"].heads == ("causal-lm",)
    assert CHAINS["bert-generation"].rates["hidden_dropout_prob"] == 0.1


@pytest.mark.parametrize(("number", "keys"), [(0, 3), (4, 1)])
def test_a_language_model_without_its_towers_is_that_of_the_trace(number: int, keys: int) -> None:
    """Of Gemma 4 12B, which has one key for all queries of the layers that see all."""
    from memfit.job import Job

    row = ROWS[("gemma4", "gemma4-one")[number > 0]]
    text = {**row.examples[0]["text_config"], "dtype": "bfloat16"}
    assert text["num_global_key_value_heads"] == keys
    for kind in ("gemma4_text", "gemma4_unified_text"):
        config = {**text, "model_type": kind}
        assert unlike_parameters(config, "causal-lm") == ""
        assert fault(config, Job(batch=2, seq=120, packing=False, method="lora")) == ""
    unread = {**text, "model_type": "gemma4_unified_text", "num_kv_shared_layers": 2}
    with pytest.raises(InputError, match="share keys"):
        build(unread)


def test_glm_46v_is_either_of_two() -> None:
    from memfit.model.families import families

    for name in ("glm_ocr", "glmga"):
        assert unlike_parameters(families()[name].examples[-1], "image-text") == ""
    first, *_, last = [
        one for one in families()["glm46v"].examples if one["model_type"] == "glm46v"
    ]
    assert build(first).graphs.family == "glm4v"
    assert build(last).graphs.family == "glm4v_moe"
    for config in (first, last):
        assert unlike_parameters(config, "image-text") == ""


def test_fields_that_a_class_turns_into_a_list_are_known() -> None:
    """A.X K1's older configs count dense layers in front, of which its class makes a list."""
    legacy = {"first_k_dense_replace": 1, "moe_layer_freq": 1}
    assert popped("axk1") == legacy
    config = {**ROWS["axk1"].examples[0], **legacy}
    del config["mlp_layer_types"]
    build(config)
    with pytest.raises(InputError, match="without `mlp_layer_types`"):
        build({**config, "first_k_dense_replace": 2})


def test_adapters_of_transposed_matrices_go_to_the_trace() -> None:
    from memfit.estimate import estimate
    from memfit.job import Job

    model = build(CHAINS["openai-gpt"].examples[0])
    job = Job(batch=2, seq=64, head="causal-lm", optimizer="sgd")
    assert estimate(model, job, precise=False).memory.allocated > 0
    with pytest.raises(InputError, match="with adapters or packed weights"):
        estimate(model, replace(job, method="lora", targets="c_attn"), precise=False)


def test_weights_that_stand_still_have_no_states() -> None:
    """An indexer runs under `no_grad`; AdamW makes states where there is a gradient."""
    from memfit.job import Job

    for name in ("axk2", "glm_moe_dsa"):
        config = {**ROWS[name].examples[0], "dtype": "bfloat16"}
        assert any("indexer" in one for one in build(config).unused)
        assert fault(config, Job(batch=2, seq=100)) == ""
    assert not build(ROWS["cwm"].examples[0]).unused


def test_a_capture_under_autocast_is_of_what_it_casts_to() -> None:
    from memfit.job import Job
    from memfit.trace.capture import forward_of

    job = Job(task="pretrain", batch=2, seq=40)
    for precision, dtype in (("bf16", "bfloat16"), ("autocast-bf16", "bfloat16"), ("fp32",) * 2):
        run = forward_of(dict(ROWS["nanochat"].examples[0]), job.replace(precision=precision))
        assert run.dtype == {"fp32": "float32"}.get(dtype, dtype)


@pytest.mark.parametrize("name", ["axk2", "glm_ocr", "laguna"])
def test_peaks_under_autocast_are_those_of_the_trace(name: str) -> None:
    """Graphs that say fp32 where autocast casts are up to 3 % off."""
    from memfit.job import Job

    config = {**ROWS[name].examples[2], "dtype": "bfloat16"}
    job = Job(batch=3, seq=150, packing=False, optimizer="sgd", precision="autocast-bf16")
    assert abs(off(config, job)) < 0.001
