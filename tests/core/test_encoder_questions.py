"""Questions about encoders as people ask them: which head, how many labels, whose defaults."""

from __future__ import annotations

import pytest

from memfit import estimate
from memfit.errors import InputError
from memfit.report import text

BERT = "bert-base-uncased"


def test_a_checkpoint_is_fine_tuned_as_a_classifier_by_the_trainer() -> None:
    found = estimate(BERT, gpu="t4")
    assert found.source == "formula"
    assert (found.job.head, found.job.batch, found.job.seq) == ("classification", 8, 512)
    assert (found.job.precision, found.job.packing, found.job.clip) == ("fp32", False, 1.0)
    assert found.parameters.total == 109_483_778  # transformers' own, two labels
    assert "transformers' Trainer 5.23 defaults" in text.text(found)


@pytest.mark.parametrize(("labels", "more"), [(2, 0), (5, 3 * 769)])
def test_labels_are_counted(labels: int, more: int) -> None:
    found = estimate(BERT, gpu="t4", labels=labels)
    assert found.parameters.total == 109_483_778 + more


def test_pretraining_predicts_masked_tokens() -> None:
    found = estimate(BERT, gpu="t4", task="pretrain")
    assert (found.source, found.job.head) == ("formula", "masked-lm")
    assert found.parameters.total == 109_514_298


def test_adapters_leave_the_classifier_trained_whole() -> None:
    found = estimate(BERT, gpu="t4", method="lora", rank=8, targets="query,value")
    assert found.parameters.trainable == 24 * 8 * 2 * 768 + 2 * 769


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("roberta-large", 355_412_057),
        ("distilbert-base-uncased", 66_985_530),
        ("xlm-roberta-base", 278_295_186),
        ("flan-t5-xl", 2_783_959_040),
        ("mt5-small", 172_119_424),
    ],
)
def test_published_checkpoints_answer_by_formula(name: str, parameters: int) -> None:
    found = estimate(name, gpu="a100", task="pretrain", by="formula")
    assert found.parameters.total == parameters


def test_labels_of_a_language_model_are_refused() -> None:
    with pytest.raises(InputError, match="has no labels"):
        estimate("llama-3.2-1b", gpu="t4", labels=3)


def test_a_decoder_answers_with_128_tokens() -> None:
    found = estimate("t5-base", gpu="rtx-3090")
    assert found.source == "formula"
    assert (found.job.head, found.job.seq, found.job.target_seq) == ("seq2seq-lm", 512, 128)
    assert found.parameters.total == 222_903_552


def test_a_decoder_behind_an_encoder_alone_is_refused() -> None:
    with pytest.raises(InputError, match="with a decoder"):
        estimate(BERT, gpu="t4", target_seq=64, by="formula")
