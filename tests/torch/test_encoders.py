"""Encoders, and encoders with a decoder, by captured graphs: parameters are transformers' own, and
peaks are the trace's on sizes that no graph was captured with."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from tests.sampling import WHOLE

import torch
from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.graph import check
from memfit.job import Job
from memfit.lower import lower
from memfit.model.families import _rows, build, families
from memfit.model.families._chains import CAUSAL, CHAINS, ChainRow
from memfit.model.heads import CLASSES
from memfit.simulate.memory import memory
from memfit.tape import check as legal
from memfit.trace import classes, family_check, trace_config

families()
DESCRIBED = frozenset(_rows.names())  # whose rows are data


def turns() -> list[tuple[str, str]]:
    """Every head of every family; of those whose rows are data a head each in turn, of which
    `memfit new-family` compared all, and all with MEMFIT_WHOLE."""
    found = []
    for place, (name, row) in enumerate(sorted(CHAINS.items())):
        one = row.heads[place % len(row.heads)]
        heads = (one,) if name in DESCRIBED and not WHOLE else row.heads
        found += [(name, head) for head in heads]
    return found


HEADS = turns()
WORST = 0.005  # of the peak that the trace has
# What is asked of the families, a case for each head in turn.
CASES: tuple[dict[str, Any], ...] = (
    {"batch": 5, "seq": 96, "packing": False, "precision": "fp32"},
    {"batch": 4, "seq": 120, "packing": False, "precision": "autocast-bf16"},
    {"batch": 1, "seq": 100, "method": "lora", "precision": "fp16"},
    {"batch": 6, "seq": 80, "packing": False, "checkpointing": "full", "keep_outputs": True},
    {"batch": 3, "seq": 111, "task": "inference"},
    {"batch": 2, "seq": 64, "precision": "autocast-fp16", "method": "lora", "packing": False},
    {"batch": 4, "seq": 80, "method": "qlora"},
    {"batch": 3, "seq": 111, "task": "inference", "quant": "nf4"},
)
VOCABULARIES = ("vocab_size", "decoder_vocab_size")
# Tables that code multiplies itself, and which so cannot be packed.
UNPACKED = {"layoutlmv3": "rel_pos_bias,rel_pos_x_bias,rel_pos_y_bias"}
TARGETS = {"distilbert": "q_lin,v_lin"}  # PEFT trains `pre_classifier` whole beside `classifier`


def unseen(row: ChainRow, head: str) -> dict[str, Any]:
    """A configuration that is none of those captured: the first one with another vocabulary and
    more layers, with the class's own dropout."""
    kept = {key: value for key, value in row.examples[0].items() if key not in row.rates}
    end = next(end for end, name in CLASSES.items() if name == head)
    labels = 2 if head == "question-answering" else 7
    deeper = {key: kept[key] + 2 for key in (row.depths or filter(None, (row.depth,)))}
    if head == CAUSAL:
        deeper["is_decoder"] = True
    return {
        **kept,
        **deeper,
        "dtype": "bfloat16",
        **{key: kept[key] + 136 for key in kept if key in VOCABULARIES},
        "num_labels": labels,
        "architectures": [end],
    }


def compared(config: dict[str, Any], job: Job) -> float:
    tape = lower(build(config), job)
    legal(tape)
    return memory(tape).allocated / memory(trace_config(config, job)).allocated - 1


@pytest.mark.parametrize(("name", "head"), HEADS)
def test_parameters_are_those_of_transformers(name: str, head: str) -> None:
    config = unseen(CHAINS[name], head)
    with torch.device("meta"):
        own = transformers.AutoConfig.for_model(**config)
        theirs = classes.builder(head, own).from_config(own)
    expected = {key: tuple(one.shape) for key, one in theirs.named_parameters()}
    assert {one.name: one.shape for one in build(config).weights()} == expected


def first_linear(row: ChainRow, head: str) -> str:
    """A linear layer of attention: PEFT cannot add an adapter to what it trains whole."""
    return family_check.first_linear(build(unseen(row, head)))


@pytest.mark.parametrize(("name", "head"), HEADS)
def test_peaks_are_those_of_the_trace(name: str, head: str) -> None:
    """A case each, in turn, all with MEMFIT_WHOLE: a decoder has none of fp16 and none that is not
    trained."""
    row = CHAINS[name]
    decodes = row.pairs and head not in row.stack
    cases = [CASES[place] for place in (0, 1, 3, 6)] if decodes else list(CASES)
    cases = [one for one in cases if row.checkpoints or "checkpointing" not in one]
    cases = [one for one in cases if one.get("precision", "bf16") not in row.refused]
    cases = [one for one in cases if one.get("task", "finetune") not in row.refused]
    if build(unseen(row, head)).graphs.transposed:  # weights that adapters do not know
        cases = [one for one in cases if not {"method", "quant"} & one.keys()]
    if head == CAUSAL:  # an answer of several tokens is the trace's
        cases = [one for one in cases if one.get("task") != "inference"]
    turn = (row.heads.index(head) + sorted(CHAINS).index(name)) % len(cases)
    pair = {"target_seq": 56} if decodes else {}
    answers = build(unseen(row, head)).graphs.answers
    for case in cases if WHOLE else [cases[turn]]:
        lengths = range(case["seq"], 200)  # MRA asks for whole blocks
        case = {**case, "seq": next(one for one in lengths if answers(case["batch"], one))}
        if head == "classification" and "method" in case:
            own = first_linear(row, head) if name in DESCRIBED else "all-linear"
            case = {**case, "targets": TARGETS.get(name, own)}
        if head in ("token-classification", "question-answering") and "method" in case:
            case = {**case, "targets": first_linear(row, head)}
        if head not in ("masked-lm", CAUSAL) and case.get("method") == "qlora":
            case = {**case, "quant_skip": "classifier,qa_outputs,score"}
        if name in UNPACKED and ("quant" in case or case.get("method") == "qlora"):
            skip = case.get("quant_skip", "classifier")
            case = {**case, "quant_skip": f"{skip},{UNPACKED[name]}"}
        if build(unseen(row, head)).graphs.caches:
            case = {**case, "keep_outputs": False}
        job = Job(**{"optimizer": "adamw_fused", "head": head, **case, **pair})
        off = compared(unseen(row, head), job)
        assert abs(off) <= WORST, f"{off:+.2%} {case}"


@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
def test_an_encoder_with_a_head_for_the_next_word_sees_all_words(precision: str) -> None:
    """transformers warns, and runs it so, where `is_decoder` is not said."""
    config = {**unseen(CHAINS["bert"], CAUSAL), "is_decoder": False}
    job = Job(head=CAUSAL, batch=5, seq=96, packing=False, precision=precision)
    assert abs(compared(config, job)) <= WORST
    causal = build({**config, "is_decoder": True}).graphs.of("start", 5, True)
    names = [op.name for op in build(config).graphs.of("start", 5, True).ops]
    assert names != [op.name for op in causal.ops]


def test_what_a_decoder_of_an_encoder_is_not_asked() -> None:
    """Generation, and outputs with a cache: RemBERT makes one as it trains, BERT does not."""
    job = Job(head=CAUSAL, batch=2, seq=64, keep_outputs=True)
    estimate(build(unseen(CHAINS["bert"], CAUSAL)), job)
    config = unseen(CHAINS["rembert"], CAUSAL)
    with pytest.raises(InputError, match="`rembert` with a cache in the outputs"):
        estimate(build(config), job)
    with pytest.raises(InputError, match="no captured graph of `rembert` for generation"):
        estimate(build(config), Job(task="inference", head=CAUSAL, seq=64))
    with pytest.raises(InputError, match="`is_decoder` = true"):
        build({**unseen(CHAINS["bert"], "masked-lm"), "is_decoder": True})


@pytest.mark.parametrize("name", ["roberta-prelayernorm", "megatron-bert"])
def test_the_last_layers_result_goes_behind_the_norm_that_reads_it(name: str) -> None:
    """Without gradients: the loop over layers is over, and the encoder has returned."""
    config = unseen(CHAINS[name], "masked-lm")
    job = Job(head="masked-lm", batch=3, seq=111, task="inference")
    assert abs(compared(config, job)) <= WORST / 10


def test_results_that_are_kept_until_the_last_layer_has_run_end_then() -> None:
    """DeBERTa's encoder holds all of them. Under autocast nothing else does, and one layer that
    stood for several let go of its own result alone."""
    config = unseen(CHAINS["deberta-v2"], "classification")
    job = Job(head="classification", precision="autocast-bf16", batch=6, seq=80, packing=False)
    assert abs(compared(config, job)) <= WORST / 10


def test_a_class_that_answers_with_beams_is_not_the_captured_one() -> None:
    config = {**unseen(CHAINS["xlnet"], "question-answering"), "dtype": "float32"}
    job = Job(batch=2, seq=100, packing=False, precision="fp32")
    config["architectures"] = ["XLNetForQuestionAnsweringSimple"]
    assert abs(compared(config, job)) <= WORST
    config["architectures"] = ["XLNetForQuestionAnswering"]
    with pytest.raises(InputError, match="of the class `XLNetForQuestionAnswering`"):
        estimate(build(config), job)


def test_what_a_class_keeps_without_training_goes_to_the_trace() -> None:
    """XLNet keeps what each layer was given (modeling_xlnet.py `use_mems_eval`); its products of
    attention by autocast are off where scores have the peak."""
    config = {**unseen(CHAINS["xlnet"], "classification"), "dtype": "float32"}
    asked = {"batch": 2, "seq": 500, "packing": False, "head": "classification"}
    assert abs(compared(config, Job(**asked, precision="fp32"))) <= WORST
    for more in ({"task": "inference", "precision": "fp32"}, {"precision": "autocast-bf16"}):
        with pytest.raises(InputError, match="no captured graph"):
            estimate(build(config), Job(**asked, **more))


@pytest.mark.parametrize("name", ["modernvbert", "ultravbert"])
def test_the_text_beside_a_tower_may_have_other_sizes(name: str) -> None:
    config = unseen(CHAINS[name], "masked-lm")
    text = config["text_config"]
    grown = {key: text[key] * 2 for key in ("hidden_size", "num_attention_heads")}
    config["text_config"] = {**text, **grown, "vocab_size": 680, "num_hidden_layers": 8}
    tower = {"precision": "autocast-bf16", "checkpointing": "full"}
    for case in (tower, {"precision": "fp32"}, {"method": "lora", "precision": "bf16"}):
        job = Job(head="masked-lm", batch=4, seq=111, packing=False, **case)
        assert abs(compared(config, job)) <= WORST / 10, case
    for other in ({"model_type": "bert"}, {"mlp_bias": True}):
        with pytest.raises(InputError, match=f"no captured graph of `.*{name[-8:-5]}"):
            build({**config, "text_config": {**config["text_config"], **other}})


def test_short_sequences_are_seen_whole_and_longer_ones_refused() -> None:
    """BigBird's attention on blocks begins behind five of them and twice those drawn by chance
    (modeling_big_bird.py `max_tokens_to_attend`)."""
    config = {**unseen(CHAINS["big_bird"], "masked-lm"), "max_position_embeddings": 900}
    longest = Job(head="masked-lm", batch=1, seq=(5 + 2 * 3) * 64, packing=False)
    assert abs(compared(config, longest)) <= WORST / 10
    with pytest.raises(InputError, match=r"for 705 tokens \(at most 704\)"):
        estimate(build(config), longest.replace(seq=705))
    with pytest.raises(InputError, match=r"for 800 tokens \(at most 704\)"):
        estimate(build(config), longest.replace(longest=800))
    for field, value in {"block_size": 16, "rescale_embeddings": True}.items():
        with pytest.raises(InputError, match="no captured graph of `big_bird` with"):
            build({**config, field: value})


def test_kernels_from_the_hub_are_counted() -> None:
    """MRA's class computes zeros without them, and asks for whole blocks of 32 tokens, enough for
    those that are seen in full (modeling_mra.py mra2_attention)."""
    config = {**unseen(CHAINS["mra"], "masked-lm"), "dtype": "float32"}
    job = Job(head="masked-lm", batch=3, seq=160, packing=False, precision="fp32")
    scores = [one for one in trace_config(config, job).events if "mra" in str(one).lower()]
    blocks = str((3 * 2, 10, 32, 32)).strip("()")  # heads, and 2 blocks for each of 5 rows
    assert any(blocks in str(one) for one in scores)
    for more in ({}, {"checkpointing": "full"}, {"precision": "autocast-bf16"}):
        assert abs(compared(config, job.replace(**more))) <= WORST / 10, more
    for more in ({"seq": 150}, {"seq": 96}, {"precision": "bf16"}):
        with pytest.raises(InputError, match="no captured graph of `mra`"):
            estimate(build(config), job.replace(**more))
    with pytest.raises(InputError, match="heads of fewer than 32 values"):
        build({**config, "num_attention_heads": 6})


@pytest.mark.parametrize("seq", [73, 101, 108])
def test_lengths_that_windows_divide_or_not(seq: int) -> None:
    """Longformer pads to whole windows; a list has one for each layer."""
    config = {**unseen(CHAINS["longformer"], "masked-lm"), "attention_window": [12] * 5}
    for case in ({"precision": "fp32"}, {"method": "lora", "targets": "query"}):
        job = Job(head="masked-lm", batch=3, seq=seq, packing=False, **case)
        assert abs(compared(config, job)) <= WORST / 5, case
    with pytest.raises(InputError, match="windows of several sizes"):
        build({**config, "attention_window": [12, 12, 12, 12, 16]})
    with pytest.raises(InputError, match="with a head of kind `classification`"):
        estimate(build(config), Job(head="classification", batch=3, seq=seq))


def test_a_function_with_a_backward_of_its_own_is_one_operation() -> None:
    """YOSO's makes the gradients of queries, keys and values, whichever are trained, in the dtype
    of what packed layers return (modeling_yoso.py YosoCumulation)."""
    config = unseen(CHAINS["yoso"], "classification")
    names = [op.name for op in build(config).graphs.of("layer", 3, False).ops]
    assert names.count("function.YosoCumulation") == 1
    few = {"targets": "query", "seq": 100, "head": "classification"}
    for case in ({"method": "lora"}, {"method": "qlora", "quant_skip": "classifier"}):
        assert abs(compared(config, Job(batch=3, **few, **case))) <= WORST / 5, case


@pytest.mark.parametrize("name", ["esm", "mobilebert"])
def test_masked_words_of_made_families_have_the_peak_of_the_trace(name: str) -> None:
    config = unseen(CHAINS[name], "masked-lm")
    case = {"batch": 4, "seq": 120, "precision": "autocast-bf16"}
    for one in (case, {**case, "checkpointing": "full"}, {"batch": 3, "task": "inference"}):
        off = compared(config, Job(**{"head": "masked-lm", "seq": 111, "packing": False, **one}))
        assert abs(off) <= WORST, f"{off:+.2%} {one}"


@pytest.mark.parametrize("name", ["t5", "mt5"])
def test_a_head_on_the_encoder_alone(name: str) -> None:
    """T5's token classifier has no decoder, and its layers have other names."""
    config = unseen(CHAINS[name], "token-classification")
    model = build(config)
    assert {path.rpartition(".")[0] for path in model.paths} == {"transformer.encoder.block"}
    for case in ({"task": "inference"}, {"precision": "autocast-bf16", "packing": False}):
        job = Job(head="token-classification", batch=3, seq=111, **case)
        assert abs(compared(config, job)) <= WORST, case


def test_outputs_that_are_wide_already_are_kept_under_autocast() -> None:
    """BART adds a bias in fp32 to its logits, so that accelerate copies none of them."""
    wide = {"precision": "autocast-bf16", "packing": False, "keep_outputs": True}
    pair = {"batch": 16, "seq": 150, "target_seq": 120, "checkpointing": "full"}
    job = Job(**{"optimizer": "adamw_fused", "head": "seq2seq-lm", **wide, **pair})
    assert abs(compared(unseen(CHAINS["bart"], "seq2seq-lm"), job)) <= WORST


def test_a_target_may_be_longer_than_the_source() -> None:
    """The trace cut it to the source's length."""
    job = Job(head="seq2seq-lm", batch=3, seq=60, target_seq=140, optimizer="adamw_fused")
    assert abs(compared(unseen(CHAINS["bart"], "seq2seq-lm"), job)) <= WORST


@pytest.mark.parametrize(
    ("name", "precision", "packing", "worst"),
    [
        ("t5", "bf16", False, WORST),
        ("t5-gated", "bf16", True, WORST),
        ("mt5", "fp32", False, WORST),
        ("umt5", "bf16", False, WORST),
        ("t5", "autocast-bf16", False, 2 * WORST),
    ],
)
def test_checkpoints_ask_for_the_gradient_of_a_bias_of_zeros(
    name: str, precision: str, packing: bool, worst: float
) -> None:
    """T5's attention over the encoder, whose peak that gradient makes (T5Attention.forward)."""
    case = {"precision": precision, "packing": packing, "checkpointing": "full"}
    job = Job(
        optimizer="adamw_fused",
        head="seq2seq-lm",
        batch=16,
        seq=150,
        target_seq=120,
        **case,  # type: ignore[arg-type]
    )
    off = compared(unseen(CHAINS[name], "seq2seq-lm"), job)
    assert abs(off) <= worst, f"{off:+.2%}"


@pytest.mark.parametrize("name", sorted(CHAINS))
def test_graphs_are_legal(name: str) -> None:
    graphs = build(unseen(CHAINS[name], CHAINS[name].heads[0])).graphs
    for graph in graphs.graphs.values():
        assert check(graph, graphs.whole(2, 64, 48)) == []


@pytest.mark.parametrize(
    ("name", "head"),
    [("bert", "question-answering"), ("t5", "seq2seq-lm"), ("xlm-roberta", "masked-lm")],
)
def test_encoders_are_quantized_as_transformers_does(name: str, head: str) -> None:
    """A head without a name keeps nothing unquantized; T5's `wo` stays in fp32."""
    row = CHAINS[name]
    pair = {"target_seq": 56} if row.pairs else {}
    kept = {"targets": first_linear(row, head), "quant_skip": "qa_outputs"}
    case = CASES[6] | (kept if head == "question-answering" else {})
    off = compared(unseen(row, head), Job(**{"head": head, **case, **pair}))
    assert abs(off) <= WORST, f"{off:+.2%}"


def test_a_head_that_peft_cannot_train_is_refused() -> None:
    """Quantized, or with an adapter on what is trained whole: the real code fails on both."""
    for name, job, message in (
        ("xlm-roberta", Job(method="qlora"), "bitsandbytes quantizes it"),
        ("distilbert", Job(method="lora"), "`pre_classifier` whole"),
    ):
        with pytest.raises(InputError, match=message):
            estimate(build(unseen(CHAINS[name], "classification")), job)


def test_what_was_not_captured_goes_to_the_trace() -> None:
    config = unseen(CHAINS["bert"], "classification")
    for option in ({"attention": "eager"}, {"framework": "trl"}):
        with pytest.raises(InputError, match="no captured graph"):
            estimate(build(config), Job(batch=2, seq=64, **option))
    config = unseen(CHAINS["mpnet"], "classification")  # whose class refuses it
    with pytest.raises(InputError, match="no captured graph of `mpnet` with gradient checkpoint"):
        estimate(build(config), Job(batch=2, seq=64, checkpointing="full"))
