"""Encoders whose layers are no modules of their own: many runs of one (ALBERT), entries of several
lists beside each other (XLM), weights outside of them (DeBERTa)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.torch.test_encoders import WORST, compared, unseen

from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.job import Job
from memfit.model.families import build
from memfit.model.families._chains import CHAINS
from memfit.model.model import located
from memfit.trace.paths import beside
from memfit.uses import strategy_from

CLOSE = WORST / 10
PADDED: dict[str, Any] = {"batch": 5, "seq": 96, "packing": False, "optimizer": "adamw_fused"}


def off(name: str, **options: Any) -> float:
    head = "classification"
    return abs(compared(unseen(CHAINS[name], head), Job(**{"head": head, **options})))


@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
def test_runs_of_one_layer_share_its_weights_and_their_casts(precision: str) -> None:
    config = unseen(CHAINS["albert"], "classification")
    deeper = {**config, "num_hidden_layers": config["num_hidden_layers"] + 7}
    assert build(deeper).parameters == build(config).parameters
    assert off("albert", precision=precision, **PADDED) <= CLOSE
    case = {"method": "lora", "targets": "query,ffn", "batch": 2, "seq": 64}
    assert off("albert", precision=precision, **case) <= CLOSE


def test_entries_of_the_same_number_are_one_layer() -> None:
    assert beside("net.attentions.3", "net.ffns.3")
    assert not beside("net.attentions.3", "net.ffns.4")
    assert not beside("encoder.layers.3", "decoder.layers.3")
    assert located("net.attentions.3", "~ffns.lin1.weight") == "net.ffns.3.lin1.weight"
    assert located("net.attentions.3", "q_lin.weight") == "net.attentions.3.q_lin.weight"


@pytest.mark.parametrize("name", ["xlm", "flaubert"])
def test_what_an_encoder_holds_until_it_returns_and_loops_overwrite(name: str) -> None:
    """XLM makes a cache that nobody reads, and lets go of attention's results in the midst of the
    next layer."""
    assert off(name, task="inference", batch=3, seq=111) <= CLOSE
    assert off(name, precision="autocast-bf16", **PADDED) <= WORST


def test_a_recomputation_that_stops_early_keeps_what_its_layer_was_given() -> None:
    """DeBERTa's mask has eight bytes for each pair of tokens."""
    case = {"precision": "fp32", "checkpointing": "full"}
    assert off("deberta", **PADDED, **case) <= CLOSE


def test_weights_outside_of_layers_that_nothing_reads_get_no_states() -> None:
    """LUKE's table of entities, which a text does not name."""
    assert (
        "luke.entity_embeddings.entity_embeddings.weight"
        in build(unseen(CHAINS["luke"], "classification")).unused
    )
    assert off("luke", **PADDED) <= CLOSE


def test_a_pooler_whose_result_is_only_returned_gets_no_states() -> None:
    """FNet's masked words are no sentence."""
    model = build(unseen(CHAINS["fnet"], "masked-lm"))
    assert model.unused == {"fnet.pooler.dense.weight", "fnet.pooler.dense.bias"}
    assert not build(unseen(CHAINS["fnet"], "classification")).unused


def test_numbers_of_rotary_positions_change_no_code() -> None:
    """EuroBERT's published models turn more slowly than its class does by default."""
    config = unseen(CHAINS["eurobert"], "masked-lm")
    turned = {"rope_type": "default", "rope_theta": 250000.0}
    assert build({**config, "rope_parameters": turned}).parameters == build(config).parameters
    with pytest.raises(InputError, match="no captured graph of `eurobert` with this"):
        build({**config, "rope_parameters": {**turned, "rope_type": "linear", "factor": 2.0}})


def test_real_parts_of_complex_numbers_are_half_as_wide() -> None:
    assert off("fnet", precision="fp32", **PADDED) <= CLOSE
    with pytest.raises(InputError, match="no captured graph of `fnet` in `bf16`"):
        estimate(build(unseen(CHAINS["fnet"], "classification")), Job(**PADDED))


@pytest.mark.parametrize("name", ["albert", "xlm"])
def test_layouts_go_to_the_trace_where_no_layer_is_a_module(name: str) -> None:
    model = build(unseen(CHAINS[name], "classification"))
    with pytest.raises(InputError, match="since its layers are not separate modules"):
        estimate(model, Job(batch=2, seq=64), strategy=strategy_from(["fsdp=2"], 2))


def test_inference_under_autocast_goes_to_the_trace() -> None:
    job = Job(task="inference", precision="autocast-bf16", head="classification", batch=2, seq=64)
    with pytest.raises(InputError, match="for inference in `autocast-bf16`"):
        estimate(build(unseen(CHAINS["bert"], "classification")), job)
