"""What makes a job fit: the shortest ladder, and what is said of each rung."""

import json
import shlex
import sys
from itertools import combinations

import pytest

from memfit.api.verbs import estimate as ask
from memfit.cli import main
from memfit.errors import InputError
from memfit.estimate import estimate, shortfall, surplus
from memfit.hardware import parse_cluster
from memfit.job import Job
from memfit.lower import walked
from memfit.lower.walk_cache import remembering
from memfit.model.families import build
from memfit.plan.advice import (
    KINDS,
    Setting,
    Weighed,
    advice,
    changes,
    climbed,
    hardware,
    least,
)
from memfit.plan.memory_lower_bounds import Holds
from memfit.plan.relayouts import relayouts
from memfit.strategy import ONE, Strategy
from memfit.truth.models import built
from memfit.uses import strategy_from

MODEL = "meta-llama/Llama-3.2-1B"


def test_what_fits_needs_no_advice():
    found = advice(built(MODEL), Job(), parse_cluster("h100-sxm"))
    assert found.helps
    assert found.ways == ()


@pytest.mark.parametrize(
    "options", [{"batch": 4}, {"batch": 2, "seq": 8192}, {"method": "lora", "batch": 16}]
)
def test_every_way_fits_and_no_shorter_ladder_of_its_kind_does(options):
    model, job, cluster = built(MODEL), Job(**options), parse_cluster("rtx-4090")
    setting = Setting(job, ONE)
    found = advice(model, job, cluster)
    assert surplus(model, job, cluster) > 0
    assert [one.kind for one in found.ways] == sorted(
        (one.kind for one in found.ways), key=KINDS.index
    )
    for way in found.ways:
        known = estimate(model, way.job, way.cluster, way.strategy)
        assert (known.device, known.verdict) == (way.device, "fits")
        assert all(rung.verdict != "fits" for rung in way.rungs[:-1])
    best = found.ways[0]
    assert best.kind == "same"
    for shorter in combinations(
        [one for one in changes(job) if one.kind == "same"], len(best.rungs) - 1
    ):
        try:
            less = climbed(setting, shorter)
            assert surplus(model, less.job, cluster, strategy=less.strategy) > 0
        except InputError:
            continue


def test_rungs_free_what_they_say():
    model, job, cluster = built(MODEL), Job(batch=8, seq=4096), parse_cluster("rtx-4090")
    found = advice(model, job, cluster)
    before = estimate(model, job, cluster).device
    assert before - sum(rung.freed for rung in found.rungs) == found.rungs[-1].device
    assert found.rungs[-1].slower is not None


def test_adapters_come_before_the_host():
    """8B at full precision of 16 bytes a parameter: no offload at thousands of per cent first."""
    found = ask("llama-3.1-8b", gpu="rtx-4090", method="full", advise=True, offline=True)
    assert found.advice is not None
    kinds = [one.kind for one in found.advice.ways]
    assert kinds[0] == "method"
    assert kinds.index("host") > kinds.index("method")
    assert found.advice.ways[0].job.method == "lora"
    assert len({one.kind for one in found.advice.ways}) >= 3


class Fitting:
    """Fits with fewer bits in the optimizer's states, or with two changes that keep every bit."""

    def answers(self, setting):
        return True

    def fits(self, setting):
        job = setting.job
        return job.optimizer == "adamw_8bit" or (job.batch == 1 and job.checkpointing == "full")


def test_every_bit_is_kept_where_that_can_fit():
    setting = Setting(Job(batch=2, framework="trl", optimizer="adamw_fused"), ONE)
    same = [one for one in changes(*setting) if one.kind == "same"]
    ladder = least(Fitting(), setting, None, same)
    assert {one.name for one in ladder} == {"--batch 1 --accumulate 2", "--checkpointing full"}


class Watched:
    """Fits with a smaller micro-batch, and says what it was asked."""

    def __init__(self):
        self.asked = []

    def answers(self, setting):
        self.asked.append(setting)
        return True

    def fits(self, setting):
        self.asked.append(setting)
        return setting.job.batch == 4


def test_the_search_ends_at_the_first_change_that_fits():
    """Each question asked costs a walk through the model, or a replay."""
    setting, watched = Setting(Job(batch=8, framework="trl", method="lora"), ONE), Watched()
    same = [one for one in changes(*setting) if one.kind == "same"]
    assert len(same) > 6
    (found,) = least(watched, setting, None, same)
    assert found.name == "--batch 4 --accumulate 2"
    assert all(one.job.batch in (4, 8) for one in watched.asked)
    changed = {one.job for one in watched.asked}
    assert len(changed) < len(same)


def test_the_allocators_settings_change_no_walk():
    model, job, cluster = built(MODEL), Job(batch=2), parse_cluster("rtx-4090")
    with remembering():
        plain = walked(model, job, cluster)
        assert walked(model, job.replace(alloc_conf="expandable_segments:True"), cluster) is plain
        assert walked(model, job.replace(batch=1), cluster) is not plain


def test_a_change_that_is_refused_is_none_however_far_the_job_is_from_fitting():
    job = Job(framework="trl", method="qlora", batch=512, loss="liger")
    weighed = Weighed(built(MODEL), parse_cluster("rtx-3060-8gb"))
    assert not weighed.answers(Setting(job, ONE))
    assert weighed.answers(Setting(job.replace(loss="plain"), ONE))


def test_what_no_change_helps():
    found = advice(built(MODEL), Job(seq=131072, batch=2048), parse_cluster("t4"))
    assert all(way.kind in ("shorter", "hardware") for way in found.ways)


def test_inference_is_advised_too():
    found = advice(built("meta-llama/Llama-3.1-8B"), Job(task="inference"), parse_cluster("t4"))
    assert [one.kind for one in found.ways] == ["method", "hardware"]
    assert found.rungs[-1].name in ("--quant int8", "--quant nf4")
    assert found.rungs[-1].slower is None


@pytest.mark.parametrize(
    "words",
    [
        "llama-3.1-8b --method full --gpu rtx-4090",
        "llama-3.1-8b --method lora --gpu rtx-4090",
        "llama-3.1-8b --task inference --seq 8192 --memory 12GiB",
        "qwen2.5-72b-instruct --method lora --gpus 8xa100-sxm-40gb",
        "llama-3.1-8b --method lora --framework transformers --gpu l4",
    ],
)
def test_the_next_step_is_a_command_that_fits(words, capsys):
    """As it is printed, word for word."""
    assert main(["estimate", *words.split(), "--offline", "--strict"]) == 1
    lines = capsys.readouterr().out.splitlines()
    command = lines[2].removeprefix("next step: memfit ")
    assert main([*shlex.split(command), "--offline", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "fits"


def test_a_shorter_sequence_is_named_where_it_is_the_default(capsys):
    words = "qwen3-14b --method qlora --gpu t4 --seq 2048 --batch 2 --unsloth norms,rotary,loss"
    assert main(["estimate", *words.split(), "--offline"]) == 1
    step, why = capsys.readouterr().out.splitlines()[2:4]
    assert "shorter sequences" in why
    assert " --seq 1024" in step


def test_a_tight_job_above_the_memory_needs_more_than_there_is(capsys):
    words = "llama-3.1-70b --method full --gpus 16xh100-sxm --use fsdp"
    assert main(["estimate", *words.split(), "--offline"]) == 1
    assert capsys.readouterr().out.startswith("tight: needs 9")
    main(["estimate", "qwen3-8b", "--method", "lora", "--gpu", "rtx-4090", "--offline"])
    assert capsys.readouterr().out.startswith("tight: 2")


def test_by_the_verb():
    found = ask(MODEL, gpu="rtx-4090", batch=4, advise=True, offline=True)
    assert found.advice is not None
    with pytest.raises(InputError, match="`advise` needs a GPU"):
        ask(MODEL, advise=True, offline=True)


@pytest.mark.parametrize(
    ("gpus", "use", "others"),
    [
        (
            1,
            (),
            [
                "zero=1,offload-optimizer=cpu",
                "zero=1,stage=3,offload-optimizer=cpu,offload-param=cpu",
            ],
        ),
        (
            4,
            ("ddp=4",),
            [
                "zero=4,stage=1",
                "zero=4",
                "fsdp=4",
                "zero=4,stage=3",
                "fsdp=4,offload",
                "zero=4,offload-optimizer=cpu",
                "zero=4,stage=3,offload-optimizer=cpu,offload-param=cpu",
            ],
        ),
        (8, ("fsdp=4,reshard=no", "ddp=2"), ["fsdp=4", "fsdp=8", "fsdp=4,reshard=no,offload"]),
        (8, ("fsdp=4", "tp=2"), ["fsdp=4,offload"]),
        (
            8,
            ("zero=8,stage=2,overlap",),
            [
                "zero=8,stage=3,overlap",
                "zero=8,overlap,offload-optimizer=cpu",
                "zero=8,stage=3,overlap,offload-optimizer=cpu,offload-param=cpu",
            ],
        ),
        (
            8,
            ("zero=8,stage=3,offload-optimizer=nvme",),
            ["zero=8,stage=3,offload-optimizer=nvme,offload-param=cpu"],
        ),
    ],
)
def test_layouts_that_hold_less(gpus, use, others):
    """Each as the flag that it is, over all the GPUs, holding less than before wherever the engine
    takes it."""
    strategy = strategy_from(use, gpus)
    found = list(relayouts(strategy))
    assert [one.name for one in found] == [f"--use {other}" for other in others]
    assert all(
        one.strategy.ranks == gpus and one.strategy.size("tp") == strategy.size("tp")
        for one in found
    )
    model, job, cluster = (
        built(MODEL),
        Job(seq=512, precision="bf16"),
        parse_cluster(f"{gpus}xh100-sxm"),
    )
    before = estimate(model, job, cluster, strategy).memory.allocated
    assert all(
        estimate(model, job, cluster, one.strategy).memory.allocated < before
        for one in found
        if one.host or use
    )


def test_a_layout_is_a_rung():
    """No change to the job alone is enough for 70B."""
    model, job, cluster, strategy = (
        built("meta-llama/Llama-3.1-70B"),
        Job(seq=1024),
        parse_cluster("8xa100-sxm-80gb"),
        strategy_from(["ddp=8"], 8),
    )
    found = advice(model, job, cluster, strategy)
    assert found.rungs[-1].verdict == "fits"
    assert all(
        sum(rung.name.startswith("--use ") for rung in way.rungs) == 1
        for way in found.ways
        if way.rungs
    )


@pytest.mark.parametrize(
    "use", [(), ("ddp=4",), ("fsdp=4",), ("zero=4,stage=1",), ("fsdp=2", "tp=2")]
)
def test_what_is_ruled_out_early_does_not_fit(use):
    """The bound that spares a walk never lies above the live peak that it spares."""
    model, cluster = built(MODEL), parse_cluster(f"{4 if use else 1}xrtx-4090")
    asked, weighed = (
        Setting(Job(batch=2, seq=1024), strategy_from(use, 4) if use else Strategy()),
        Weighed(model, cluster),
    )
    for change in changes(*asked):
        job, strategy = climbed(asked, (change,))
        try:
            live = estimate(model, job, cluster, strategy, precise=False).memory.allocated
        except InputError:
            continue
        assert weighed.holds.least(job, strategy, (job.batch, job.accumulate)) <= live, change.name


@pytest.mark.parametrize("name", [MODEL, "google/gemma-3-27b-it", "Qwen/Qwen3.5-9B"])
@pytest.mark.parametrize(
    "options",
    [
        {"method": "qlora", "seq": 64},
        {"method": "lora", "seq": 64},
        *({"task": "inference", "seq": 64, "quant": one} for one in ("none", "int8", "nf4")),
    ],
)
def test_a_lower_bound_is_below_the_live_peak(name, options):
    """Of a model with a vision tower, too, whose linear weights bitsandbytes packs."""
    model, job, cluster = built(name), Job(**options), parse_cluster("b200")
    live = estimate(model, job, cluster, precise=False).memory.allocated
    assert 0 < Holds(model).least(job, ONE, (job.batch, job.accumulate)) <= live


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    "stored",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    ],
)
def test_adapters_on_a_quantized_checkpoint_are_not_ruled_out(stored):
    """A bound that counted 16 bits a value lay 30 to 75 % above the live peak."""
    model = build({**LLAMA, "quantization_config": stored})
    job, cluster = Job(method="lora", seq=64), parse_cluster("b200")
    live = estimate(model, job, cluster, precise=False).memory.allocated
    assert Holds(model).least(job, ONE, (1, 1)) <= live


def test_hardware_that_is_too_small_for_the_weights_is_not_walked(monkeypatch):
    walked = []

    def noted(*question):
        walked.append(question[2].gpu.id)
        return shortfall(*question)

    monkeypatch.setattr(sys.modules[hardware.__module__], "shortfall", noted)
    model, cluster = built("google/gemma-3-27b-it"), parse_cluster("rtx-4090")
    setting = Setting(Job(task="inference", seq=64), ONE)
    ways = list(hardware(model, setting, cluster))
    assert walked == [ways[0].cluster.gpu.id]


def test_a_mac_is_offered_a_larger_mac():
    """No machine has two of them, and most Macs' owners have no NVIDIA card."""
    setting = Setting(Job(method="lora", batch=1, seq=64), ONE)
    ways = list(hardware(built("google/gemma-3-27b-it"), setting, parse_cluster("m4-max-64gb")))
    found = ways[0].cluster
    assert (found.gpus, found.gpu.vendor) == (1, "apple")
    assert found.gpu.memory > parse_cluster("m4-max-64gb").gpu.memory
