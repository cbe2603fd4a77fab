"""One rank of real DeepSpeed on the CPU: each case under torch's profiler, and how many bytes were
alive at most in every phase, and at its end."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.torch import products
from torch.profiler import ProfilerActivity, profile, record_function

import torch

LARGEST = 4_000_000  # numbers in a product of matrices and its operands


def backend(store: str) -> None:
    """DeepSpeed's own, which compiles a kernel of its own for sums on CPUs unless it is told that
    there is none. Collectives run in a thread that the profiler does not see: gloo copies what NCCL
    does not. Without a `store` to meet at, other ranks are made up."""
    import deepspeed
    from deepspeed.comm import comm
    from deepspeed.comm.torch import TorchBackend

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()

    class Settled(TorchBackend):  # type: ignore[misc, unused-ignore]
        pass

    def settled(name: str) -> Any:
        method = getattr(TorchBackend, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            given, named = [self, *args], dict(kwargs)
            done = pool.submit(finished, method, given, named).result()
            given.clear()  # the pool's thread holds them a moment longer
            named.clear()
            return done

        return call

    for name in (
        "all_reduce",
        "all_gather_into_tensor",
        "all_gather",
        "reduce_scatter_tensor",
        "broadcast",
        "reduce",
        "all_to_all_single",
    ):
        setattr(Settled, name, settled(name))
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    if store:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", **place)
        comm.cdb = Settled("gloo", comm.default_pg_timeout, None)
    else:  # collectives move nothing
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), **place)
        comm.cdb = TorchBackend("gloo", comm.default_pg_timeout, None)


class Done:
    """A collective that is over; unlike gloo's own it holds no tensors."""

    def wait(self) -> None:
        pass


def finished(method: Any, args: list[Any], kwargs: dict[str, Any]) -> Done:
    """The collective on copies: gloo's threads let go of what they are given a moment late, and
    what they free the profiler does not see."""
    pairs: list[tuple[Any, Any]] = []
    with torch.no_grad():
        work = method(
            *[copied(one, pairs) for one in args],
            **{name: copied(one, pairs) for name, one in kwargs.items()},
        )
        if hasattr(work, "wait"):
            work.wait()
        for original, copy in pairs:
            original.detach().copy_(copy)
    return Done()


def copied(one: Any, pairs: list[tuple[Any, Any]]) -> Any:
    if isinstance(one, list):
        return [copied(item, pairs) for item in one]
    if not isinstance(one, torch.Tensor):
        return one
    pairs.append((one, one.detach().clone()))
    return pairs[-1][1]


def mark(name: str) -> None:
    with record_function(f"phase {name}"):
        pass


def run(case: dict[str, Any]) -> None:
    import deepspeed
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(case["config"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    known = told_of_partitions(case["deepspeed"])
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, case["dtype"]), attn_implementation=case["attention"]
    )
    if case.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**case["lora"]))
    model.train()
    model.config.use_cache = False
    if case.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.get("lora"):
            model.enable_input_require_grads()
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [[one for one in trained if one.dim() > 1], [one for one in trained if one.dim() <= 1]]
    stepper = torch.optim.AdamW([{"params": some} for some in groups if some], foreach=True)
    mark("prepare 0")
    beside = by_heads(model, case)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=stepper, config=case["deepspeed"], **beside
    )
    for step in range(case["steps"]):
        for _ in range(engine.gradient_accumulation_steps()):
            given = inputs(case, config.vocab_size)
            mark(f"forward {step}")
            loss = engine(**given).loss
            mark(f"backward {step}")
            engine.backward(loss)
            del loss
            mark(f"step {step}")
            engine.step()
    mark("end 0")
    engine.destroy()
    deepspeed.utils.groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = (
        None  # an engine a process is what it is made for
    )
    del known


def by_heads(model: Any, case: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's Ulysses attention, as accelerate registers it."""
    if case["parts"] == 1:
        return {}
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    groups = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=case["attention"],
        sequence_parallel_size=case["parts"],
        micro_batch_size=case["batch"],
        seq_length_is_variable=True,
        disable_in_eval=True,
    )
    return {"mpu": groups}


@contextlib.contextmanager
def as_it_was(case: dict[str, Any]) -> Iterator[None]:
    """Groups that a process makes once, and transformers' attention, are afterwards what they
    were."""
    if case["parts"] == 1:
        yield
        return
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = [vars(parallel_state_sp), vars(groups), ALL_ATTENTION_FUNCTIONS._local_mapping]
    before = [dict(one) for one in tables]
    yield
    for table, known in zip(tables, before, strict=True):
        table.clear()
        table.update(known)


def inputs(case: dict[str, Any], words: int) -> dict[str, torch.Tensor]:
    """A batch; of sequences in parts this rank's, with positions in the whole and shifted labels,
    as `UlyssesSPDataLoaderAdapter` hands them over."""
    batch, seq = case["batch"], case["seq"] // case["parts"]
    ids, labels = (torch.randint(1, words, (batch, seq)) for _ in range(2))
    if case["parts"] == 1:
        return {"input_ids": ids, "labels": labels}
    first = int(os.environ["RANK"]) % case["parts"] * seq
    positions = torch.arange(first, first + seq).repeat(batch, 1)
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "shift_labels": labels}


def told_of_partitions(settings: dict[str, Any]) -> Any:
    """Where transformers knows of ZeRO-3, and for as long as what is returned lives, models are
    made in parts."""
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(settings) if settings["zero_optimization"]["stage"] == 3 else None


def measured(case: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(phase, bytes alive at most, at its end), one after the other."""
    gc.collect()
    gc.disable()
    with (
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        mark("load 0")
        run(case)
    gc.enable()
    events = profiler.profiler.kineto_results.events()
    times = [
        (one.start_ns(), one.name(), one.nbytes())
        for one in events
        if one.name() == "[memory]" or one.name().startswith("phase ")
    ]
    found: list[tuple[str, int, int]] = []
    phase, live, peak = "", 0, 0
    for _, name, size in sorted(times, key=lambda one: one[0]):
        if name == "[memory]":
            live += size if phase else 0
            peak = max(peak, live)
            continue
        found.append((phase, peak, live))
        phase, peak = name.removeprefix("phase "), live
    return found[1:]


def cases(store: str, some: list[dict[str, Any]]) -> list[list[tuple[str, int, int]]]:
    """In one process, whose end is waited for: each has an engine after the other."""
    import deepspeed

    warnings.simplefilter("ignore")
    os.environ |= {
        "LOCAL_SIZE": os.environ["WORLD_SIZE"],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    deepspeed.utils.logger.setLevel(logging.ERROR)
    quick = products.install(LARGEST)
    backend(store)
    found = []
    for case in some:
        with as_it_was(case):
            found.append(measured(case))
    torch.distributed.barrier()
    del quick
    return found
