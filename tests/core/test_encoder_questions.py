"""Questions about encoders and classifiers as people ask them: which head, how many labels, whose
defaults."""

from __future__ import annotations

from typing import Any

import pytest

import memfit
from memfit import estimate
from memfit.cli import main
from memfit.errors import InputError
from memfit.estimate import estimate as estimate_of
from memfit.job import Job
from memfit.model.families import build, find
from memfit.model.heads import usual_head
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
    with pytest.raises(InputError, match="has no labels") as bad:
        estimate("llama-3.2-1b", gpu="t4", labels=3)
    assert bad.value.problems[0].hint == "use `--head classification`, or remove `--labels`"


def test_an_encoder_that_predicts_the_next_word_is_trained_by_the_trainer() -> None:
    found = estimate(BERT, gpu="t4", head="causal-lm")
    assert (found.source, found.job.seq, found.job.framework) == ("formula", 512, "transformers")
    assert found.parameters.total == 109_514_298


def test_a_decoder_answers_with_128_tokens() -> None:
    found = estimate("t5-base", gpu="rtx-3090")
    assert found.source == "formula"
    assert (found.job.head, found.job.seq, found.job.target_seq) == ("seq2seq-lm", 512, 128)
    assert found.parameters.total == 222_903_552


def test_a_decoder_behind_an_encoder_alone_is_refused() -> None:
    with pytest.raises(InputError, match="with a decoder"):
        estimate(BERT, gpu="t4", target_seq=64, by="formula")


def test_a_study_trains_the_head_at_the_length_of_the_model() -> None:
    found = memfit.study(["google-bert/bert-base-uncased"], gpus="t4", methods="full")
    (panel,) = found.panels
    assert panel.seq == 512
    (command,) = {
        cell.verdict
        for cell in panel.cells
        if cell.way.layout == "one GPU" and cell.way.attention == "sdpa"
    }
    assert command == "fits"


def test_a_study_that_supports_nothing_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["study", "google-bert/bert-base-uncased", "--gpu", "t4", "--attention", "eager"]
    main([*words, "--methods", "full"])
    assert "way of this study: no captured graph of `bert` with `eager` attention" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_plan_trains_the_head() -> None:
    found = memfit.plan("google-bert/bert-base-uncased", gpus="2xt4", method="full")
    assert found.rows
    assert found.rows[0].estimate.job.head == "classification"


def test_what_is_about_generated_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "google-bert/bert-base-uncased", "--gpu", "t4", "--task", "inference"]
    assert main(words) == 2
    assert "the inference of models with an encoder" in capsys.readouterr().err
    main(["openai/whisper-tiny", "--gpu", "t4"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("a card is about models that read and generate text")
    assert lines[1] == "next step: memfit estimate openai/whisper-tiny --gpu t4"
    found = memfit.estimate("google-bert/bert-base-uncased", gpu="t4", task="inference")
    assert found.job.new_tokens == 0


def example(kind: str, **changes: Any) -> dict[str, Any]:
    return {**find(kind).examples[0], "dtype": "bfloat16", **changes}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("pegasus", "PegasusModelForRanking"),
        ("t5", "T5EncoderModel"),
        ("bert", "BertForMultipleChoice"),
        ("distilbert", "DistilBertForMultipleChoice"),
    ],
)
def test_a_class_without_graphs_is_not_answered_as_another(kind: str, name: str) -> None:
    config = example(kind, architectures=[name])
    model, heads = build(config), find(kind).heads
    assert usual_head(config, heads, "finetune") == "auto"
    with pytest.raises(InputError, match=f"the class `{name}`") as bad:
        estimate_of(model, Job(seq=64))
    assert f"`--head`: `{heads[0]}`" in bad.value.problems[0].hint
    estimate_of(model, Job(seq=64, head=heads[0]))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("bert", "BertModel"),
        ("bert", "BertForPreTraining"),
        ("t5", "T5Model"),
        ("t5", "T5WithLMHeadModel"),
    ],
)
def test_a_bare_model_gets_the_usual_head(kind: str, name: str) -> None:
    estimate_of(build(example(kind, architectures=[name])), Job(seq=64))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("bert", {"architectures": 3}, "must be a list of class names"),
        ("qwen3_5", {"architectures": [3]}, "must be a list of class names"),
        ("bert", {"hidden_dropout_prob": 1.5}, "`1.5` is out of range"),
        ("bart", {"dropout": -0.1}, "`-0.1` is out of range"),
        ("bart", {"tie_word_embeddings": False}, "an untied head"),
        ("t5", {"tie_word_embeddings": False}, "with this `tie_word_embeddings`"),
        ("deberta-v2", {"embedding_size": 32}, "another `embedding_size`"),
        ("deberta-v2", {"conv_kernel_size": 3}, "with `conv_kernel_size`"),
    ],
)
def test_configs_that_no_graph_answers_are_refused(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        build(example(kind, **changes))


def test_t5_has_no_last_position() -> None:
    found = estimate_of(build(example("t5", n_positions=128)), Job(seq=256))
    assert not [one for one in found.problems if "positions" in one.message]


LLAMA = "llama-3.2-1b"
TRUNK = 1_235_814_400  # transformers' LlamaModel of this config


def classifier(name: str = "LlamaForSequenceClassification", **changes: Any) -> dict[str, Any]:
    return example("llama", architectures=[name], **changes)


@pytest.mark.parametrize(
    ("options", "head"),
    [
        ({"head": "classification"}, 2 * 2048),
        ({"head": "classification", "labels": 1}, 2048),
        ({"head": "token-classification", "labels": 9}, 9 * 2049),
        ({"head": "question-answering"}, 2 * 2049),
    ],
)
def test_a_decoder_has_a_head_of_labels_in_place_of_words(
    options: dict[str, Any], head: int
) -> None:
    found = estimate(LLAMA, gpu="a100", **options)
    assert found.source == "formula"
    assert found.parameters.total == TRUNK + head


def test_a_config_that_names_a_classifier_is_no_language_model() -> None:
    config = classifier(num_labels=5)
    found = estimate(config, gpu="t4", by="formula")
    assert (found.job.head, found.job.framework) == ("classification", "transformers")
    assert (found.job.precision, found.job.packing) == ("bf16", False)
    words = estimate(example("llama"), gpu="t4", by="formula")
    assert words.parameters.total - found.parameters.total == (512 - 5) * 64
    again = estimate(config, gpu="t4", by="formula", head="causal-lm")
    assert again.parameters.total == words.parameters.total


@pytest.mark.parametrize("task", ["finetune", "inference"])
def test_the_length_of_a_classifiers_sequences_is_named_where_it_is_assumed(task: str) -> None:
    """The answer depends on it, and no guide says a usual one."""
    found = memfit.estimate(classifier(), gpu="t4", task=task, by="formula")
    assert " --seq 2048" in text.text(found).partition("assumed")[2].partition("\nby ")[0]
    given = memfit.estimate(classifier(), gpu="t4", task=task, by="formula", seq=128)
    assert "--seq" not in text.assumed_words(given.job, given.assumed)


def test_before_transformers_5_a_classifier_is_loaded_in_fp32() -> None:
    found = estimate(classifier(), gpu="t4", versions="transformers=4.57")
    assert found.job.precision == "fp32"


def test_adapters_leave_the_classifier_of_a_decoder_trained_whole() -> None:
    asked = {"gpu": "t4", "method": "lora", "rank": 8, "targets": "q_proj"}
    found = estimate(classifier(num_labels=3), **asked)
    assert found.parameters.trainable == 3 * 8 * (64 + 64) + 3 * 64


def test_a_classifier_answers_with_one_pass() -> None:
    found = memfit.estimate(classifier(), gpu="t4", task="inference", by="formula")
    assert found.job.new_tokens == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "trl"}, "does not train a head of kind `classification`"),
        ({"loss": "liger"}, "has its own loss"),
        ({"gpus": "2xa100", "use": "tp=2", "by": "formula"}, "`tp` with a head of kind"),
        ({"head": "token-classification", "method": "lora"}, "when `all-linear` adds an adapter"),
    ],
)
def test_what_no_classifier_runs_with_is_refused(options: dict[str, Any], message: str) -> None:
    asked = {"gpu": "a100"} if "gpus" not in options else {}
    with pytest.raises(InputError, match=message):
        estimate(classifier(), **asked, **options)


@pytest.mark.parametrize("name", ["LlamaForRewardModel", "LlamaForMultipleChoice"])
def test_another_head_is_not_answered_as_words(name: str) -> None:
    with pytest.raises(InputError, match=f"not supported yet: the class `{name}`") as bad:
        estimate(classifier(name), gpu="t4", by="formula")
    assert "`causal-lm`, `classification`" in bad.value.problems[0].hint
    estimate(classifier(name), gpu="t4", by="formula", head="causal-lm")


def test_a_card_and_a_plan_of_a_classifier(capsys: pytest.CaptureFixture[str]) -> None:
    found = memfit.plan(classifier(), gpus="1xt4", method="full")
    assert found.rows[0].estimate.job.head == "classification"
    with pytest.raises(InputError, match="models with a head of labels"):
        memfit.plan(classifier(), gpus="1xt4", task="inference")
