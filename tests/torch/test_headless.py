"""Encoders without a head: the bare model of transformers, tensor by tensor, and its peak."""

from __future__ import annotations

from typing import Any

import pytest
from tests.sampling import sampled

from memfit import estimate
from memfit.errors import InputError
from memfit.model.classes import is_bare
from memfit.model.families import build, families
from memfit.model.families._chains import CHAINS
from memfit.model.families._headless import NONE, source_of
from memfit.model.heads import with_head

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ENCODERS = {
    name: dict(one.examples[0])
    for name, one in families().items()
    if one.heads and source_of(build(dict(one.examples[0])))
}
# As with a head: in training only, in fp32 only, and MRA for lengths that its blocks divide.
REFUSED = {("ctrl", ""), ("xlnet", ""), ("mra", ""), ("deberta", "bf16"), ("fnet", "bf16")}
ASKED = {"task": "inference", "head": NONE, "gpu": "a100-sxm-80gb"}


def theirs(config: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config))


@pytest.mark.parametrize("name", ENCODERS)
def test_parameters_are_those_of_the_bare_model(name: str) -> None:
    model = with_head(build(ENCODERS[name]), NONE, 0)
    base = model.graphs.base + "."
    found = {one.name.removeprefix(base): one.shape for one in model.weights()}
    real = theirs(ENCODERS[name])
    assert found == {name: tuple(one.shape) for name, one in real.named_parameters()}


@pytest.mark.parametrize("name", sampled(sorted(ENCODERS), 5))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_its_peak_is_that_of_the_trace(name: str, precision: str) -> None:
    job = {**ASKED, "precision": precision, "batch": 3, "seq": 96}
    if (name, precision) in REFUSED or (name, "") in REFUSED:
        with pytest.raises(InputError, match="no captured graph"):
            estimate(ENCODERS[name], **job, by="formula")
        return
    ours = estimate(ENCODERS[name], **job, by="formula")
    real = estimate(ENCODERS[name], **job, by="trace")
    assert ours.memory.allocated == pytest.approx(real.memory.allocated, rel=0.005)
    assert ours.parameters.total == real.parameters.total


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("BertModel", True),
        ("RoFormerModel", True),
        ("LongformerModel", True),
        ("BertForMaskedLM", False),
        ("BertLMHeadModel", False),
        ("XLMWithLMHeadModel", False),
    ],
)
def test_names_of_classes_without_a_head(name: str, bare: bool) -> None:
    assert is_bare({"architectures": [name]}) is bare


def test_the_families_that_people_embed_with_are_among_them() -> None:
    named = {"bert", "roberta", "xlm-roberta", "mpnet", "modernbert", "nomic_bert", "gte"}
    assert named <= ENCODERS.keys()
    assert named <= CHAINS.keys()


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        ("google-bert/bert-base-uncased", {}, "no loss to train with"),
        ("google-t5/t5-small", {"task": "inference"}, "has a decoder"),
    ],
)
def test_what_needs_a_head(model: str, words: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        estimate(model, head=NONE, gpu="t4", offline=True, **words)


def test_a_decoder_without_a_head_is_traced_over_its_prompt() -> None:
    found = estimate("openai-community/gpt2", **ASKED, seq=64, offline=True)
    assert found.parameters.total == 124_439_808  # its head is tied to the embedding
    assert found.job.new_tokens == 0
