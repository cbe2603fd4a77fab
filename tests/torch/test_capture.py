"""Every family that runs by captured graphs: peaks equal to the trace's on sizes that no
graph was captured with. (Parameters are held to transformers' own in `test_families.py`.)"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tests.sampling import WHOLE

from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.graph import check, json_of
from memfit.job import Job
from memfit.lower import lower
from memfit.model import catalog
from memfit.model.families import _rows, build
from memfit.model.families._captured import GENERATION as PASSES
from memfit.model.families._captured import (
    SETTINGS,
    Row,
    graphs_of,
    known_settings,
    rows,
    stored,
)
from memfit.simulate.memory import memory
from memfit.tape import Alloc, Free, Tape
from memfit.tape import check as legal
from memfit.techniques.captured_graphs import stands_still
from memfit.trace import trace_config
from memfit.trace.capture import in_order
from memfit.uses import strategy_from

ROWS = {row.name: row for row in rows()}
DESCRIBED = sorted(ROWS.keys() & set(_rows.names()))  # which `memfit new-family` compared
BY_HAND = sorted(ROWS.keys() - set(DESCRIBED))
STILL = {"glm_moe_dsa", "deepseek_v32"}
WORST = 0.005  # of the peak that the trace has
CASES: tuple[dict[str, Any], ...] = (
    {"batch": 2, "seq": 200},
    {"batch": 1, "seq": 331, "checkpointing": "full"},
    {"batch": 2, "seq": 200, "method": "lora"},
    {"batch": 2, "seq": 200, "method": "qlora", "checkpointing": "full"},
)
UNSERVED = {"minimax"}  # its cache also keeps states, which generation does not know yet
SERVED = [name for name in BY_HAND if known_settings(name) >= set(PASSES)]
LOOPING = [name for name in SERVED if any(one.loops for one in graphs_of(name, "prefill").values())]
# Of `generate`: mostly prompt, mostly answer, and packed weights
GENERATION: tuple[dict[str, Any], ...] = (
    {"batch": 9, "seq": 1500, "new_tokens": 20},
    {"batch": 1, "seq": 331, "new_tokens": 3},
    {"batch": 50, "seq": 20, "new_tokens": 40},
    {"batch": 40, "seq": 64, "new_tokens": 16, "quant": "nf4"},
    {"batch": 5, "seq": 1000, "new_tokens": 2, "quant": "int8"},
)
# bitsandbytes' int8 takes no inputs of four dimensions, which these layers give
FOUR_DIMENSIONS = {
    "axk1",
    "axk2",
    "deepseek_v32",
    "glm_moe_dsa",
    "minicpm3",
    "mistral4",
    "youtu",
}
UNPACKED = {"mamba": "cannot be packed"}  # code that multiplies a weight itself
# Families that loop over tokens, which a trace runs one by one, or whose code is like others'
SAMPLED = {"exaone_moe", "falcon_mamba", "jamba", "mamba", "solar_open"}
TRL = {"framework": "trl", "clip": 1.0, "optimizer": "adamw_fused", "checkpointing": "full"}
# The defaults of TRL's trainer, of which each family takes one
USUAL: tuple[dict[str, Any], ...] = (
    {"batch": 8, "packing": False, "precision": "autocast-bf16", "method": "full"},
    {"batch": 2, "packing": False, "precision": "bf16-autocast", "method": "lora"},
    {"batch": 2, "packing": False, "precision": "bf16-autocast", "method": "qlora"},
    {"batch": 1, "packing": True, "precision": "autocast-bf16", "method": "full"},
    {"batch": 2, "packing": True, "precision": "bf16-autocast", "method": "lora"},
    {"batch": 2, "packing": False, "precision": "bf16", "method": "full"},
)


def unseen(row: Row) -> dict[str, Any]:
    """A configuration that is none of those captured: the first one with another vocabulary."""
    config = {**row.examples[0], "dtype": "bfloat16"}
    if row.text:
        text = config[row.text]
        return {**config, row.text: {**text, "vocab_size": text["vocab_size"] + 136}}
    return {**config, "vocab_size": config["vocab_size"] + 136}


def turns(*cases: Any, one: str, names: Sequence[str] = BY_HAND) -> list[tuple[str, Any]]:
    """A case for each family, in turn, and of those in `SAMPLED` for `one` alone; all with
    MEMFIT_WHOLE."""
    kept = sampled(names, one)
    return [
        (name, case)
        for place, name in enumerate(names)
        for number, case in enumerate(cases)
        if name in kept and (WHOLE or number == place % len(cases))
    ]


def sampled(names: Sequence[str], one: str) -> list[str]:
    """The families of a test: of those in `SAMPLED` `one` alone; all with MEMFIT_WHOLE."""
    return [name for name in names if WHOLE or name == one or name not in SAMPLED]


def numbers(one: str) -> list[int]:
    """Their places among all families."""
    return [BY_HAND.index(name) for name in sampled(BY_HAND, one)]


def length(name: str, seq: int) -> int:
    """Shorter where a loop goes from token to token, which a trace runs one by one."""
    return seq // 5 if ROWS[name].loops else seq


def unanswered(name: str, config: dict[str, Any], job: Job) -> bool:
    """Whether a family does not answer this job of packed weights, and says so."""
    four = "4 dim" if name in FOUR_DIMENSIONS and job.quant == "int8" else ""
    asks = "" if ROWS[name].packs else "with packed weights"
    reason = UNPACKED.get(name, four or asks) if job.quantization != "none" else ""
    if reason:
        with pytest.raises(InputError, match=reason):
            estimate(build(config), job)
    return bool(reason)


@pytest.mark.parametrize(("name", "case"), turns(*CASES, one="mamba"), ids=str)
def test_peaks_are_those_of_the_trace(name: str, case: dict[str, Any]) -> None:
    case = {"optimizer": "sgd", **case, "seq": length(name, case["seq"])}
    config, job = unseen(ROWS[name]), Job(**case)
    if unanswered(name, config, job):
        return
    tape = lower(build(config), job)
    legal(tape)
    ours, theirs = memory(tape).allocated, memory(trace_config(config, job)).allocated
    assert abs(ours - theirs) <= WORST * theirs, f"{ours / theirs - 1:+.2%}"


def described_turns() -> list[tuple[str, dict[str, Any]]]:
    """A case for every fourth family whose row is data, and all with MEMFIT_WHOLE."""
    serving = [{**one, "task": "inference"} for one in GENERATION]
    cases = [*CASES, *({"seq": 200, **TRL, **one} for one in USUAL), *serving]
    return [
        (name, case)
        for place, name in enumerate(DESCRIBED)
        for number, case in enumerate(cases)
        if WHOLE or (place % 4 == 0 and number == (place // 4) % len(cases))
    ]


@pytest.mark.parametrize(("name", "case"), described_turns(), ids=str)
def test_peaks_of_families_that_are_data_are_those_of_the_trace(
    name: str, case: dict[str, Any]
) -> None:
    """With twice the layers of any captured model."""
    config = unseen(ROWS[name])
    config["num_hidden_layers"] *= 2
    config |= {key: 2 * one for key, one in config.items() if isinstance(one, list)}
    if case.get("task") == "inference":
        generates_as_the_trace(name, config, Job(**case))
        return
    job = Job(**{"optimizer": "sgd", **case})
    if unanswered(name, config, job):
        return
    tape = lower(build(config), job)
    legal(tape)
    ours, theirs = memory(tape).allocated, memory(trace_config(config, job)).allocated
    assert abs(ours - theirs) <= WORST * theirs, f"{ours / theirs - 1:+.2%}"


def trainer(name: str) -> dict[str, Any]:
    """TRL's head does not run with Llama 4's class."""
    return {**TRL, "framework": "transformers"} if name.startswith("llama4") else TRL


@pytest.mark.parametrize("number", numbers("exaone_moe"))
def test_peaks_of_usual_trainers_are_those_of_the_trace(number: int) -> None:
    row, case = ROWS[BY_HAND[number]], USUAL[number % len(USUAL)]
    test_peaks_are_those_of_the_trace(row.name, {"seq": 200, **trainer(row.name), **case})


@pytest.mark.parametrize("number", numbers("jamba"))
def test_peaks_without_checkpoints_are_those_of_the_trace(number: int) -> None:
    """Where a cache, too, stays until the loss is made: Qwen3.5 beside its tower."""
    row, case = ROWS[BY_HAND[number]], USUAL[number % len(USUAL)]
    usual = {"seq": 200, **trainer(row.name), **case, "batch": 2, "checkpointing": "none"}
    test_peaks_are_those_of_the_trace(row.name, usual)
    if row.tower:
        wide = {"batch": 2, "seq": 200, "precision": "autocast-bf16"}
        test_peaks_are_those_of_the_trace(row.name, wide)


@pytest.mark.parametrize(
    ("name", "case"), turns(*GENERATION, one="solar_open", names=SERVED), ids=str
)
def test_peaks_of_generation_are_those_of_the_trace(name: str, case: dict[str, Any]) -> None:
    """Every token is generated in the trace, too."""
    case = {**case, "seq": length(name, case["seq"]) if case["seq"] > 100 else case["seq"]}
    generates_as_the_trace(name, unseen(ROWS[name]), Job(task="inference", **case))


@pytest.mark.parametrize("name", [name for name in SERVED if ROWS[name].window])
def test_peaks_of_answers_that_outgrow_a_window_are_those_of_the_trace(name: str) -> None:
    row, config = ROWS[name], unseen(ROWS[name])
    cut = {row.window: 71}
    config = {**config, row.text: {**config[row.text], **cut}} if row.text else {**config, **cut}
    for batch, seq, new_tokens in ((9, 1500, 3), (40, 60, 20)):
        job = Job(task="inference", batch=batch, seq=seq, new_tokens=new_tokens)
        generates_as_the_trace(name, config, job)


def generates_as_the_trace(name: str, config: dict[str, Any], job: Job) -> None:
    if unanswered(name, config, job):
        return
    tape = lower(build(config), job)
    legal(tape)
    ours, theirs = memory(tape), memory(trace_config(config, job, decode_all=True))
    gap = ours.allocated - theirs.allocated
    if job.quant == "int8" and "moe" in name:
        # Formulas take cuBLAS's workspace with the experts' grouped product, the trace with the
        # head, which is the first product of 16 bits otherwise.
        gap -= ours.parts.get("workspace", 0) - theirs.parts.get("workspace", 0)
    assert abs(gap) <= WORST * theirs.allocated, f"{gap / theirs.allocated:+.2%}"
    assert ours.parts.get("kv_cache", 0) == theirs.parts.get("kv_cache", 0)


@pytest.mark.parametrize("name", sampled(LOOPING, "mamba"))
def test_iterations_are_repeated_as_they_would_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(task="inference", batch=2, seq=length(name, 700), new_tokens=2)
    model = build(unseen(ROWS[name]))
    short = numbered(lower(model, job))
    monkeypatch.setattr("memfit.graph.loops.FEW", 10**9)
    monkeypatch.setattr("memfit.lower.captured.run._KNOWN", {})
    assert numbered(lower(model, job)) == short


def numbered(tape: Tape) -> list[Any]:
    """The events, with blocks by the order in which they are made."""
    ids: dict[int, int] = {}
    return [
        one._replace(id=ids.setdefault(one.id, len(ids))) if isinstance(one, (Alloc, Free)) else one
        for one in tape.events
    ]


@pytest.mark.parametrize("name", sampled(SERVED, "falcon_mamba"))
def test_layers_that_stand_for_others_change_no_peak_of_generation(name: str) -> None:
    config = unseen(ROWS[name])
    text = config[ROWS[name].text] if ROWS[name].text else config
    twice = {**text, "num_hidden_layers": 2 * text["num_hidden_layers"]}
    twice |= {key: 2 * value for key, value in text.items() if isinstance(value, list)}
    config = {**config, ROWS[name].text: twice} if ROWS[name].text else twice
    model, job = build(config), Job(task="inference", batch=9, seq=64, new_tokens=20)
    whole, short = memory(lower(model, job)), memory(lower(model, job, compact=True))
    assert (whole.allocated, whole.parts) == (short.allocated, short.parts)


@pytest.mark.parametrize(
    "name", [name for name in BY_HAND if ROWS[name].window and not ROWS[name].beyond]
)
def test_a_window_that_cuts_sequences_needs_a_mask(name: str) -> None:
    """As of sequences of its own length, not of shorter ones."""
    row = ROWS[name]
    config = unseen(row)
    (config[row.text] if row.text else config)[row.window] = 120
    job = Job(batch=2, seq=120, method="lora", optimizer="sgd")
    model = build(config)
    ours, theirs = memory(lower(model, job)).allocated, memory(trace_config(config, job)).allocated
    assert abs(ours - theirs) <= WORST * theirs, f"{ours / theirs - 1:+.2%}"
    start = model.graphs.of("start", 2, 120, "")
    same = name.startswith("gemma4_unified")  # its class makes all masks, whatever the window is
    assert (start is model.graphs.of("start", 2, 119, "")) == same


@pytest.mark.parametrize("seq", [64, 65, 100, 128, 256, 331])
@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
@pytest.mark.parametrize("batch", [1, 3])
def test_blocks_of_lightning_attention_are_as_many_as_a_length_has(
    seq: int, precision: str, batch: int
) -> None:
    """The last one is shorter where the length is no multiple of them."""
    config = {**unseen(ROWS["minimax"]), "block_size": 64}
    job = Job(batch=batch, seq=seq, precision=precision, optimizer="sgd")
    ours, theirs = memory(lower(build(config), job)), memory(trace_config(config, job))
    assert abs(ours.allocated / theirs.allocated - 1) <= WORST / 50


def test_a_weight_that_code_multiplies_itself_may_stay_unpacked() -> None:
    case = {"batch": 2, "seq": 40, "method": "qlora", "quant_skip": "dt_proj,lm_head"}
    config, job = unseen(ROWS["mamba"]), Job(**case)
    ours, theirs = (
        memory(lower(build(config), job)).allocated,
        memory(trace_config(config, job)).allocated,
    )
    assert abs(ours - theirs) <= WORST * theirs, f"{ours / theirs - 1:+.2%}"


@pytest.mark.parametrize("name", ["falcon_mamba", "mamba"])
def test_a_width_of_states_that_is_given_counts(name: str) -> None:
    """Whatever `expand` makes of the model's width."""
    config = {**unseen(ROWS[name]), "expand": 16, "intermediate_size": 264}
    job = Job(batch=2, seq=20, optimizer="sgd")
    ours, theirs = memory(lower(build(config), job)), memory(trace_config(config, job))
    assert abs(ours.allocated - theirs.allocated) <= WORST * theirs.allocated


def test_four_bits_hand_on_the_dtype_of_their_input() -> None:
    """Under autocast, too, where other layers make 16 bits of fp32: residuals become fp32."""
    case = {**TRL, "batch": 2, "packing": False, "precision": "bf16-autocast", "method": "qlora"}
    test_peaks_are_those_of_the_trace("nemotron_h", {"seq": 200, **case})
    case["framework"] = "transformers"  # Llama 4 repeats such residuals for its experts
    test_peaks_are_those_of_the_trace("llama4", {"seq": 200, **case})


@pytest.mark.parametrize(("name", "use"), turns("ddp=4", "fsdp=4", one="falcon_mamba"))
def test_a_rank_of_several_has_the_peak_of_the_trace(name: str, use: str) -> None:
    config, strategy = unseen(ROWS[name]), strategy_from([use], None)
    job = Job(batch=2, seq=length(name, 200), optimizer="sgd", checkpointing="full")
    still = any(map(stands_still, graphs_of(name).values()))
    assert still is (name in STILL)
    if use == "ddp=4" and build(config).towers:
        with pytest.raises(InputError, match="fails at the second step"):
            estimate(build(config), job, strategy=strategy)
        strategy = strategy_from([f"{use},find_unused=yes"], None)
    if use == "ddp=4" and still:
        with pytest.raises(InputError, match="without a gradient"):
            estimate(build(config), job, strategy=strategy)
        return
    if use == "fsdp=4" and name == "hunyuan_v1_moe":
        with pytest.raises(InputError, match="FSDP expects uniform original parameter dtype"):
            estimate(build(config), job, strategy=strategy)
        return
    ours = memory(lower(build(config), job, strategy)).allocated
    theirs = memory(trace_config(config, job, strategy=strategy)).allocated
    assert abs(ours - theirs) <= WORST * theirs, f"{ours / theirs - 1:+.2%}"


@pytest.mark.parametrize("name", sorted(ROWS))
def test_graphs_are_legal(name: str) -> None:
    known = build(ROWS[name].examples[0]).graphs.whole(2, 64)
    known_here = known_settings(name)
    assert known_here == set(SETTINGS) - (set(PASSES) if name in UNSERVED else set())
    for setting in known_here:
        data = stored(name, setting)
        for key, graph in graphs_of(name, setting).items():
            assert check(graph, known) == []
            assert json.loads(json.dumps(json_of(graph))) == data["graphs"][key]


def test_the_command_captures_what_is_shipped() -> None:
    """As the library that is installed has it: a new version shows here what changed."""
    from memfit.api.capture import capture

    assert capture("lfm2").same
    assert capture("lfm2", "half-autocast-padded").same
    assert capture("lfm2", "decode").same


KINDS = ["full", "sliding", "linear", "chunked", "sparse", "dense"]


class Sets:
    def kinds(self) -> list[str]:
        return list(set(KINDS))


def test_sets_of_a_models_file_are_in_order_while_it_is_captured() -> None:
    """Laguna makes a rotation for each kind of layers, in the order of a set of words."""
    with in_order(Sets()):
        assert Sets().kinds() == sorted(KINDS)
    assert "set" not in globals()


def test_experts_of_a_token_may_be_listed_for_each_layer() -> None:
    config = unseen(ROWS["hunyuan_v1_moe"])
    listed = {**config, "moe_topk": [config["moe_topk"]] * config["num_hidden_layers"]}
    assert build(listed) == build(config)
    with pytest.raises(InputError, match="moe_topk"):
        build({**config, "moe_topk": [2, 3, 4]})


def test_a_router_that_its_class_makes_in_fp32_is_loaded_so() -> None:
    """Since transformers 5; before, `from_pretrained` casts it like the others."""
    from memfit.trace.capture import forward_of

    config = unseen(ROWS["hunyuan_v1_moe"])
    run = forward_of(config, Job(task="pretrain", batch=1, seq=16))
    traced = {one.format for one in run.weights if one.name.endswith("gate.wg.weight")}
    ours = {one.format for one in build(config).weights() if one.name.endswith("gate.wg.weight")}
    assert traced == ours == {"float32"}


def test_layers_that_read_earlier_ones_stand_for_no_others() -> None:
    """Gradients go past the next layer: Gemma 4 E2B has 35 layers, four of a kind in a row."""
    model = build(catalog.entry("google/gemma-4-E2B").config())
    for checkpointing in ("none", "full"):
        job = Job(method="lora", batch=1, seq=64, checkpointing=checkpointing)
        short, long = (lower(model, job, compact=compact) for compact in (True, False))
        legal(short)
        assert memory(short).allocated == memory(long).allocated


def test_reentrant_checkpoints_of_layers_that_read_earlier_ones_go_to_the_trace() -> None:
    config = unseen(ROWS["gemma4-small"])
    job = Job(batch=2, seq=64, checkpointing="full", reentrant=True)
    with pytest.raises(InputError, match="reentrant checkpoints"):
        estimate(build(config), job)


@pytest.mark.parametrize("name", [name for name in BY_HAND if ROWS[name].tower])
def test_a_head_is_tied_where_its_class_says_so(name: str) -> None:
    """By the whole config, by that of the text, or by either of them."""
    from memfit.trace.depth import shapes_of

    for outer, inner in ((False, True), (True, False)):
        config = unseen(ROWS[name])
        text = {**config["text_config"], "tie_word_embeddings": inner}
        config |= {"tie_word_embeddings": outer, "text_config": text}
        ours = {one.name: one.shape for one in build(config).weights()}
        assert ours == shapes_of(config, "image-text")


def test_null_for_a_yes_of_the_captured_code_is_refused() -> None:
    config = unseen(ROWS["falcon_h1"])
    with pytest.raises(InputError, match="no captured graph of `falcon_h1` with `mamba_conv_bias`"):
        build({**config, "mamba_conv_bias": None})


def test_operations_that_have_code_have_no_template() -> None:
    """What else a process had imported decided that once."""
    from memfit.lower.captured.run import operators
    from memfit.trace.samples import SPECIAL

    for name in ("bert", "jais2", "t5"):
        graphs = stored(name)["graphs"]
        ops = [op for one in (graphs if name != "jais2" else graphs.values()) for op in one["ops"]]
        assert not {op[0] for op in ops if len(op) > 5} & (operators().keys() - SPECIAL)
        assert {op[0] for op in ops} & operators().keys()


@pytest.mark.parametrize("name", ["lfm2", "bert"])
def test_a_capture_says_how_many_operations_its_graphs_have(name: str) -> None:
    """Files of encoders list their graphs, which several names share."""
    from memfit.api.capture import Capture

    found = Capture(family=name, setting="", data=stored(name), same=True).operations
    assert found
    assert min(found.values()) > 0


def test_an_unknown_family_is_refused_with_the_nearest_name() -> None:
    from memfit.api.capture import capture

    with pytest.raises(InputError, match="qwen3_nex"):
        capture("qwen3_nex")


def test_what_was_not_captured_goes_to_the_trace() -> None:
    config = unseen(ROWS["lfm2"])
    serving = {"task": "inference", "new_tokens": 4}
    for option in (
        {"framework": "torchtune"},
        {"attention": "eager"},
        {**serving, "cache": "static"},
        {**serving, "beams": 2},
        {**serving, "new_tokens": 0},
        {**serving, "seq": 4},
        {**serving, "precision": "autocast-bf16"},
    ):
        with pytest.raises(InputError, match="no captured graph"):
            estimate(build(config), Job(**{"batch": 2, "seq": 64, **option}))
