"""Language models with a vision tower beside them, for text: what of them is counted, what goes to
the trace instead, and options that no formula answers."""

from __future__ import annotations

from typing import Any

import pytest

from memfit.errors import InputError
from memfit.estimate import estimate
from memfit.job import Job
from memfit.libraries.bitsandbytes.check import whole
from memfit.lower import lower, programmed
from memfit.model import catalog
from memfit.model.families import build, find
from memfit.model.model import Model
from memfit.tape import Alloc, Free
from memfit.techniques.base import TRACE
from memfit.uses import strategy_from

SEEING = (
    "lighton_ocr",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "gemma4",
    "mistral3",
    "mllama",
    "llama4",
    "llava",
)

UNLISTED = ("internvl", "llava_next", "llava_onevision", "idefics3", "smolvlm")  # in no catalog


def example(name: str, **changes: Any) -> dict[str, Any]:
    return {**find(name).examples[0], "dtype": "bfloat16", **changes}


@pytest.mark.parametrize("kind", SEEING)
def test_catalogued_models_have_their_exact_parameters(kind: str) -> None:
    entries = [one for one in catalog.entries() if one.model_type == kind and one.parameters]
    assert entries
    for one in entries[:3]:
        if "modelopt" not in str(one.config().get("quantization_config")):
            assert build(one.config()).parameters == one.parameters, one.name


@pytest.mark.parametrize("kind", [*SEEING, *UNLISTED])
def test_the_tower_is_idle(kind: str) -> None:
    """It takes memory, and neither gradients nor states."""
    model = build(example(kind))
    assert model.idle > 0
    job = Job(batch=1, seq=64, optimizer="adamw")
    trained = model.parameters - model.idle
    assert states(model, job) == pytest.approx(2 * 2 * trained, rel=0.02)
    everything = states(model, job.replace(optimizer="adagrad"))
    assert everything == pytest.approx(2 * model.parameters, rel=0.02)


def test_its_adapters_are_trainable_and_stay_still() -> None:
    from memfit.program_facts import trainable

    model = build(example("mistral3"))
    job = Job(batch=1, seq=64, method="lora", targets="all-linear", rank=16)
    moving = sum(
        16 * (one.inputs + one.outputs) for layer in model.layers for one in layer.linears()
    )
    towers = [one for one in model.towers if one.role == "linear" and len(one.shape) == 2]
    idle = sum(16 * sum(one.shape) for one in towers)
    assert estimate(model, job).parameters.trainable == moving + idle
    assert trainable(model, job) == moving
    whole = job.replace(method="full")
    assert trainable(model, whole) == model.parameters - model.idle


def states(model: Model, job: Job) -> int:
    return sum(
        one.size
        for one in lower(model, job).events
        if isinstance(one, Alloc) and one.part == "optimizer"
    )


def test_gemma_4_scales_words_within_the_embedding() -> None:
    """So that with adapters what is looked up is let go, and its multiple begins the gradients."""
    events = lower(build(example("gemma4")), Job(seq=64, method="lora")).events
    found = next(one for one in events if isinstance(one, Alloc) and one.op == "embedding")
    freed = next(place for place, one in enumerate(events) if one == Free(found.id))
    layers = (
        place
        for place, one in enumerate(events)
        if isinstance(one, Alloc) and ".layers.0." in one.where and one.part == "activations"
    )
    assert freed < next(layers)


def test_gemma_4_keeps_the_projector_of_its_tower_unquantized() -> None:
    """The module of its last parameter, which follows the language model."""
    model = build(example("gemma4"))
    assert whole(model) == ("lm_head", "model.embed_vision.embedding_projection")
    assert whole(build(example("qwen3_5")))[-1] != model.last


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_head_dim": 256}, "heads of these sizes"),
        ({"hidden_size_per_layer_input": None}, "`hidden_size_per_layer_input` = 256"),
        ({"attention_k_eq_v": False}, "`attention_k_eq_v` = false"),
        ({"use_bidirectional_attention": "all"}, "this `use_bidirectional_attention`"),
    ],
)
def test_other_models_of_gemma_4_go_to_the_trace(change: dict[str, Any], message: str) -> None:
    config = example("gemma4")
    text = {**config["text_config"], **change}
    text = {key: value for key, value in text.items() if value is not None}
    with pytest.raises(InputError, match=message):
        build({**config, "text_config": text})


@pytest.mark.parametrize("kind", ["llava", "mllama", "qwen3_5", "gemma4"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_ddp_stops_at_a_tower_unless_it_looks_for_unused_parameters(kind: str, method: str) -> None:
    """Its buckets have places for all that is trained, in a static graph's second set, too."""
    model, job = build(example(kind)), Job(seq=64, method=method, targets="all-linear")
    with pytest.raises(InputError, match="fails at the second step") as bad:
        estimate(model, job, strategy=strategy_from(["ddp=2"], None))
    (problem,) = bad.value.problems
    assert problem.hint == "use `ddp=2,find_unused=yes`"
    width = 2 if method == "full" else 4
    for use, sets in (("ddp=2,find_unused=yes", 1), ("ddp=2,static_graph=yes", 2)):
        strategy = strategy_from([use], None)
        events = lower(model, job, strategy).events
        made = [one for one in events if isinstance(one, Alloc) and one.op == "bucket"]
        trained = programmed(model, job, None, strategy, False).trainable
        assert sum(one.size for one in made) == sets * width * trained


@pytest.mark.parametrize(
    ("kind", "key"), [("gemma4", "sliding_window"), ("llama4", "attention_chunk_size")]
)
def test_a_window_without_a_size_is_refused(kind: str, key: str) -> None:
    """As the real code does (transformers 5.23 masking_utils.py)."""
    config = example(kind)
    with pytest.raises(InputError, match=key):
        build({**config, "text_config": {**config["text_config"], key: None}})
    text = {name: one for name, one in config["text_config"].items() if name != key}
    assert build({**config, "text_config": text}).graphs.window in (512, 8192)


def test_ddp_runs_where_adapters_are_in_the_language_model_alone() -> None:
    job = Job(seq=64, method="lora", targets="gate_proj")
    estimate(build(example("llava")), job, strategy=strategy_from(["ddp=2"], None))


def test_trls_trainer_looks_for_unused_parameters_itself() -> None:
    """With adapters or without checkpointing, and from 1.16 on wherever a model sees."""
    model, layout = build(example("llava")), strategy_from(["ddp=2"], None)
    lora = Job(seq=64, framework="trl", method="lora", targets="all-linear", checkpointing="full")
    estimate(model, lora, strategy=layout)
    full = Job(seq=64, framework="trl", checkpointing="none")
    estimate(model, full, strategy=layout)
    again = full.replace(checkpointing="full")
    estimate(model, again, strategy=layout)
    with pytest.raises(InputError, match="fails at the second step"):
        estimate(model, again.replace(versions="trl=1.10"), strategy=layout)
    with pytest.raises(InputError, match="fails at the second step"):
        estimate(model, again.replace(reentrant=True), strategy=layout)


def test_its_head_is_one_that_sees() -> None:
    model = build(example("mistral3"))
    estimate(model, Job(seq=64, head="image-text"))
    for options in ({"head": "causal-lm"}, {"images": 1}):
        with pytest.raises(InputError) as bad:
            estimate(model, Job(seq=64, **options))
        assert bad.value.problems[0].hint == TRACE


@pytest.mark.parametrize(
    ("kind", "tied"), [("qwen2_vl", True), ("qwen2_5_vl", True), ("llava", True), ("qwen3_vl", 0)]
)
def test_a_head_is_tied_where_the_language_model_says_so(kind: str, tied: bool) -> None:
    """Of three classes, which hand it on (transformers 5.23 configuration_*.py)."""
    config = example(kind, tie_word_embeddings=False)
    config["text_config"] = {**config["text_config"], "tie_word_embeddings": True}
    assert build(config).tied is bool(tied)


def test_a_tower_beside_another_language_model_goes_to_the_trace() -> None:
    for kind in ("mistral3", *UNLISTED):
        config = example(kind)
        other = {**config["text_config"], "model_type": "bloom"}
        with pytest.raises(InputError, match="not supported yet: the language model `bloom`"):
            build({**config, "text_config": other})


def test_experts_have_another_name() -> None:
    config = example("qwen3_vl_moe")
    text = dict(config["text_config"])
    text["num_local_experts"] = text.pop("num_experts")
    other = build({**config, "text_config": text})
    assert other.parameters == build(config).parameters


def test_parts_of_the_rotation_must_add_up() -> None:
    config = example("qwen2_vl")
    config["text_config"] = {**config["text_config"], "rope_scaling": {"mrope_section": [9, 9]}}
    with pytest.raises(InputError, match="does not add up to 8"):
        build(config)


def test_liger_knows_more_families_than_the_formulas() -> None:
    with pytest.raises(InputError, match="not supported yet: Liger") as bad:
        estimate(build(example("qwen2_vl")), Job(seq=64, liger=True))
    assert bad.value.problems[0].hint == TRACE


@pytest.mark.parametrize("kind", ["cohere2", "ernie4_5_moe", "persimmon"])
def test_liger_answers_without_kernels_are_refused(kind: str) -> None:
    job = Job(task="inference", seq=64, new_tokens=4, liger=True)
    with pytest.raises(InputError, match="Liger has no kernels for the family"):
        estimate(build(example(kind)), job)


def test_context_parallelism_needs_sdpa() -> None:
    layout = strategy_from(["cp=2", "fsdp=4"], None)
    with pytest.raises(InputError, match="context parallelism of the family `xglm`"):
        estimate(build(example("xglm")), Job(seq=64), strategy=layout)


def test_trl_is_not_assumed_where_it_fails() -> None:
    from memfit.defaults import assumed

    llama4 = {"architectures": ["Llama4ForConditionalGeneration"]}
    assert assumed({}, llama4, frozenset(), "bf16").get("framework", "") == ""
    with pytest.raises(InputError, match="TRL's own head fails with `llama4`"):
        estimate(build(example("llama4")), Job(seq=64, framework="trl"))
    others = {"architectures": ["Mistral3ForConditionalGeneration"]}
    assert assumed({}, others, frozenset(), "bf16")["framework"] == "trl"


@pytest.mark.parametrize(("listed", "left"), [([], 5), ([1, 3], 3), (None, 4)])
def test_layers_that_look_at_pictures_are_those_listed(listed: list[int] | None, left: int) -> None:
    """Of five; null means the class's own, of which one is among them."""
    example = find("mllama").examples[0]
    text = {**example["text_config"], "cross_attention_layers": listed}
    assert len(build({**example, "text_config": text}).layers) == left


def test_the_warm_up_counts_a_packed_tower_as_it_is_packed() -> None:
    """transformers asks its quantizer for the bytes of every weight, those of a tower, too
    (transformers 5.23 modeling_utils.py get_total_byte_count)."""
    model = build(example("llava"))
    job = Job(method="qlora", seq=64, targets="q_proj")
    sizes = {
        one.op: one.size
        for one in lower(model, job).events
        if isinstance(one, Alloc) and not one.where
    }
    packed = sum(
        one.count
        for one in (*model.weights(),)
        if one.role == "linear" and len(one.shape) == 2 and one.name != "lm_head.weight"
    )
    assert sizes["warmup"] == pytest.approx(2 * model.parameters - 1.5 * packed, abs=1024)


SIGHT = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16}
# As published, without what no weight depends on, with the parameters of transformers' class
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "PaliGemma 3B": (
        {
            "model_type": "paligemma",
            "projection_dim": 2048,
            "text_config": {
                "model_type": "gemma",
                "hidden_size": 2048,
                "intermediate_size": 16384,
                "num_attention_heads": 8,
                "num_hidden_layers": 18,
                "num_key_value_heads": 1,
                "vocab_size": 257216,
            },
            "vision_config": {
                **SIGHT,
                "model_type": "siglip_vision_model",
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
        2_923_466_480,
    ),
    "Idefics 2 8B": (  # its vision part calls itself so, and the class overrides it
        {
            "model_type": "idefics2",
            "perceiver_config": {"model_type": "idefics2"},
            "text_config": {"model_type": "mistral", "vocab_size": 32003},
            "tie_word_embeddings": False,
            "vision_config": {
                **SIGHT,
                "model_type": "idefics2",
                "image_size": 980,
                "num_hidden_layers": 27,
                "patch_size": 14,
            },
        },
        8_402_768_112,
    ),
    "Aya Vision 8B": (  # no config class has the width of its projector
        {
            "model_type": "aya_vision",
            "alignment_intermediate_size": 28672,
            "text_config": {
                "model_type": "cohere2",
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_attention_heads": 32,
                "num_hidden_layers": 32,
                "num_key_value_heads": 8,
            },
            "vision_config": {
                **SIGHT,
                "model_type": "siglip_vision_model",
                "image_size": 364,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
        8_631_842_032,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_of_described_families_have_their_parameters(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert build(config).parameters == parameters


def test_a_width_that_a_config_leaves_to_the_code_is_asked_for() -> None:
    config, _ = PUBLISHED["Aya Vision 8B"]
    bare = {key: one for key, one in config.items() if key != "alignment_intermediate_size"}
    with pytest.raises(InputError, match="`alignment_intermediate_size`"):
        build(bare)
