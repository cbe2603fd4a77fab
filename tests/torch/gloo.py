"""Real ranks: as many processes on the CPU, joined by torch's gloo group, each measured by the
profiler as a process of its own."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.torch.real_steps import Changes, Loop, adapted, built, split, train, uncollected
from tests.torch.small import Small
from tests.torch.watch import Watch
from torch.profiler import ProfilerActivity, profile, record_function

import torch

IMPORTED = (  # for all ranks at once
    "tests.torch.gloo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.experimental",
    "accelerate",
    "transformers.models.llama.modeling_llama",
    "transformers.distributed.tensor_parallel",
    "tests.torch.zero_ready",
)
MOMENT = 0.002  # seconds
PATIENCE = 120  # seconds, for all ranks of a case
Wrap = Callable[[Any], Any]


@functools.cache
def processes() -> Any:
    """Where ranks come from: a server that has imported the libraries once, and forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def ranks(count: int, body: Callable[..., Any], *given: Any) -> list[Any]:
    """What `body(*given)` returns on each of `count` ranks of a gloo group; it and what it is given
    must be picklable."""
    with tempfile.TemporaryDirectory() as folder:
        return each(range(count), count, joined, str(Path(folder, "store")), body, given)


def each(
    some: Iterable[int],
    count: int,
    body: Callable[..., Any],
    *given: Any,
    patience: float = PATIENCE,
) -> list[Any]:
    """What `body(*given)` returns in a process for each of these ranks out of `count`, which sees
    what a launcher would tell it."""
    context = processes()
    found: dict[Connection, int] = {}
    started = []
    try:
        for rank in some:
            mine, its = context.Pipe(duplex=False)
            one = context.Process(target=told, args=(its, rank, count, body, given), daemon=True)
            one.start()
            its.close()
            found[mine] = rank
            started.append(one)
        return received(found, patience)
    finally:
        for one in started:
            one.kill() if one.is_alive() else None
            one.join()


def received(pipes: dict[Connection, int], patience: float) -> list[Any]:
    results: dict[int, Any] = {}
    left = dict(pipes)
    while left:
        ready = wait(list(left), timeout=patience)
        if not ready:
            raise TimeoutError(f"ranks {sorted(left.values())} said nothing for {patience} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = left.pop(pipe)
            good, value = pipe.recv()
            if not good:
                raise RuntimeError(f"rank {rank}: {value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def told(
    pipe: Connection, rank: int, count: int, body: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    """One process: what launchers tell it, its body."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    try:
        pipe.send((True, body(*given)))
    except Exception:  # noqa: BLE001 - told to the process that asked
        pipe.send((False, traceback.format_exc()))


def joined(store: str, body: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """One rank of the group."""
    import torch.distributed as dist

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    value = body(*given)
    dist.barrier()
    dist.destroy_process_group()
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """What one rank held: every change that the profiler saw, and the peaks of what the dispatcher
    saw, without what kernels and gloo take for themselves, by phase."""

    changes: Changes
    peaks: dict[str, int]


def trained(small: Small, loop: Loop, wrap: Wrap) -> Rank:
    """The steps of a plain loop on a model that `wrap` spreads over the ranks."""
    warnings.simplefilter("ignore")
    settled()
    with torch.backends.mkldnn.flags(enabled=False), measured() as profiler, Watch() as watch:
        torch.manual_seed(0)  # ranks start from the same weights
        model = adapted(built(small, loop), loop)
        wrapped = wrap(model)
        stepping = [one for one in wrapped.parameters() if one.requires_grad]
        stepper = loop.optimizer(stepping)
        watch.phase = "steps"
        with uncollected(), record_function("first step"):
            train(model, stepping, stepper, small, loop, wrapped)
    return Rank(changes=changes(profiler), peaks=watch.peaks)


def answered(small: Small, loop: Loop, wrap: Wrap, new: int) -> Changes:
    """A prompt and some tokens of every rank."""
    warnings.simplefilter("ignore")
    settled()
    with torch.backends.mkldnn.flags(enabled=False), measured() as profiler:
        torch.manual_seed(0)
        model = wrap(built(small, loop))
        model.eval()
        model.generation_config.eos_token_id = None
        prompt = small.given(model, loop.batch, loop.seq)["input_ids"]
        with uncollected(), record_function("first step"):
            answer = model.generate(
                prompt,
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                use_cache=True,
                return_dict_in_generate=True,
            )
        del answer
    return changes(profiler)


def busy() -> bool:
    """Whether another thread of this process runs, or waits for a processor: Linux tells; elsewhere
    the moment must do."""
    mine = str(threading.get_native_id())
    return any(
        running(one) for one in Path("/proc/self/task").glob("*/stat") if one.parent.name != mine
    )


def running(stat: Path) -> bool:
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:  # the thread is gone
        return False


def measured() -> Any:
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def changes(profiler: Any) -> Changes:
    """Bytes alive before the first step are all that came and did not go since the profiler
    began."""
    events = profiler.profiler.kineto_results.events()
    start = next(one.start_ns() for one in events if one.name() == "first step")
    return split(
        profiler,
        sum(one.nbytes() for one in events if one.name() == "[memory]" and one.start_ns() < start),
    )


def settled() -> None:
    """Whoever waits for a collective waits a moment more, until this process' other threads have
    nothing to run. Gloo's thread lets go of a collective's tensors after it has said that it is
    done (ProcessGroupGloo.cpp `runLoop`), and what it frees then no profiler sees: profilers belong
    to threads."""
    from torch._C._distributed_c10d import Work
    from torch.distributed import _functional_collectives as functional
    from torch.utils._python_dispatch import _disable_current_modes

    def late(true: Any) -> Any:
        @functools.wraps(true)
        def wait_for(*given: Any, **named: Any) -> Any:
            with _disable_current_modes():  # gloo copies what it has summed while it is waited for
                found = true(*given, **named)
            while True:
                time.sleep(MOMENT)
                if not busy():
                    return found

        return wait_for

    for owner, name in ((Work, "wait"), (functional, "wait_tensor")):
        setattr(owner, name, late(getattr(owner, name)))
