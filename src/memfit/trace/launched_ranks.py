"""A script as one rank of many: a launcher or the script itself says of how many, the environment
says so, and the process group that it joins sends nothing."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing.process
import os
import sys
import types
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from memfit.errors import InputError
from memfit.tape import Sync
from memfit.trace import collectives, cuda, lines, ranks, sides, stages, streams
from memfit.trace.activation_offload import Away
from memfit.trace.imports import Change, Patch
from memfit.trace.origins import origin
from memfit.trace.refuse import CannotFollow, Watcher
from memfit.trace.started_processes import Ended, is_rank

NCCL = (2, 27, 7)  # what torch 2.13's wheels have
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class RankWatcher(Watcher, Away):
    """A recorder of one rank's script: what C++ code makes on `meta`, like DDP's buckets, is on the
    GPU; what the script itself makes there is not."""

    def side_of(self, func: Any, args: Any, kwargs: Any) -> str:
        found = super(Away, self).side_of(func, args, kwargs)
        asked = kwargs.get("device") is not None  # else it is where its operands are
        return sides.GPU if found == sides.VOID and asked and by_torch() else found

    def brings(self, count: int) -> bool:
        return super(Away, self).brings(count)

    def caught_up(self) -> None:
        """The program waits for the GPU: nothing is lent to any stream."""
        self.events.extend(Sync(self.stream, stream) for stream in self.lent)


def by_torch() -> bool:
    """Whether torch's DDP or FSDP asks for it."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(lines.OWN):
        frame = frame.f_back
    name = frame.f_code.co_filename if frame is not None else ""
    return name.endswith("/parallel/distributed.py") or "/torch/distributed/" in name


class Ranks:
    """Which process of how many the script is, as far as it has been said."""

    def __init__(self, recorder: Watcher, stack: contextlib.ExitStack, rank: int) -> None:
        self.recorder, self.stack = recorder, stack
        self.rank, self.size = rank, 1
        self.started = self.joined = False
        self.inside = False  # whether a launcher has read its options
        self.processes = 0  # that the script has started by itself

    # -- how it is started
    # ----------------------------------------------------------------------------------------------
    def start(self, size: int, local: int) -> None:
        """As `torchrun` starts one of `size` processes, of which `local` share a machine."""
        self.take(size, local)
        here = self.rank % local
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(here),
            LOCAL_WORLD_SIZE=str(local),
            GROUP_RANK=str(self.rank // local),
            GROUP_WORLD_SIZE=str(-(-size // local)),
            ROLE_RANK=str(self.rank),
            ROLE_WORLD_SIZE=str(size),
            TORCHELASTIC_RUN_ID="none",
            TORCHELASTIC_RESTART_COUNT="0",
            TORCHELASTIC_MAX_RESTARTS="0",
        )
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    def take(self, size: int, local: int) -> None:
        if self.rank >= size:
            message = f"rank {self.rank} does not exist: the script runs as {size} ranks"
            raise InputError.one(message, where="rank", hint="ranks start at 0")
        self.size, self.started = size, True
        cuda.HERE.index, cuda.HERE.count = self.rank % local, max(cuda.HERE.count, local)

    def spawn(
        self, function: Any, args: Sequence[Any] = (), nprocs: int = 1, *_: Any, **__: Any
    ) -> Any:
        """`torch.multiprocessing.spawn`: one of the processes runs here, the others do not."""
        if not self.started:
            self.take(nprocs, nprocs)
        function(self.rank % nprocs, *args)
        return types.SimpleNamespace(join=lambda *_, **__: True, processes=[])

    def process(self) -> Callable[[Any], None]:
        """`Process(target=run, args=(rank, …)).start()` in a loop over ranks: the one with this
        rank runs here."""
        true = multiprocessing.process.BaseProcess.start

        def start(process: Any) -> None:
            target, given = process._target, process._args
            code = getattr(target, "__code__", None)
            if (
                code is None
                or not lines.is_users(code.co_filename)
                or not given
                or type(given[0]) is not int
                or given[0] != self.processes
                or not is_rank(target)
            ):
                return true(process)
            self.processes += 1
            if given[0] == self.rank:
                cuda.HERE.index = self.rank
                cuda.HERE.count = max(cuda.HERE.count, self.rank + 1)
                target(*given, **process._kwargs)
            process._popen = Ended()
            process._sentinel = process._popen.sentinel
            return None

        return start

    # -- its group
    # ----------------------------------------------------------------------------------------------
    def join(
        self,
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *_: Any,
        **__: Any,
    ) -> None:
        """`init_process_group`: numbers that the script names come before those of the
        environment."""
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if dist.is_initialized():
            return
        size = world_size if world_size > 0 else number("WORLD_SIZE")
        rank = rank if rank >= 0 else number("RANK")
        self.rank, self.size, self.started = rank, max(size, self.size), True
        cuda.HERE.count = max(cuda.HERE.count, cuda.HERE.index + 1)
        self.follow()
        self.true_join("fake", rank=rank, world_size=size, store=FakeStore())

    def follow(self) -> None:
        """Streams, collectives, storages that are emptied and filled: from the first group on."""
        if self.joined:
            return
        self.joined = True
        recorder = self.recorder
        collectives.install()
        recorder.origin = origin
        recorder.groups = Groups()
        self.stack.enter_context(streams.followed(recorder))
        self.stack.enter_context(
            cuda.patched(
                [
                    *ranks.storages(recorder),
                    *ranks.aside(recorder),
                    *stages.settled(recorder),
                    *elsewhere(self.answers()),
                ]
            )
        )
        self.stack.callback(leave)

    def answers(self) -> list[Patch]:
        """What the other ranks would say."""
        import torch.distributed as dist

        home: Any = dist.distributed_c10d
        true_new = home.new_group

        def new_group(*args: Any, **given: Any) -> Any:
            args = (*args[:2], "fake", *args[3:]) if len(args) > 2 else args
            return true_new(*args, **{**given, **({} if len(args) > 2 else {"backend": "fake"})})

        def all_gather_object(found: list[Any], one: Any, group: Any = None) -> None:
            found[:] = [one] * len(found)

        def gather_object(one: Any, found: Any = None, *_: Any, **__: Any) -> None:
            if found is not None:
                found[:] = [one] * len(found)

        def scatter_object_list(found: list[Any], given: Any = None, *_: Any, **__: Any) -> None:
            found[0] = given[0] if given else None

        mesh: Any = importlib.import_module("torch.distributed.device_mesh")
        true_handle = mesh._get_device_handle

        def handle(kind: str = "cuda") -> Any:
            """For what the trace has on `meta`, the pretended GPU's."""
            return torch.cuda if kind == "meta" else true_handle(kind)

        nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
        found: dict[str, Any] = {
            "new_group": new_group,
            "all_gather_object": all_gather_object,
            "gather_object": gather_object,
            "scatter_object_list": scatter_object_list,
            "broadcast_object_list": nothing,  # the same for all ranks
            "barrier": nothing,
            "monitored_barrier": nothing,
            "get_backend": lambda *_, **__: "nccl",
        }
        patches: list[Patch] = [(home, name, value) for name, value in found.items()]
        return [*patches, (mesh, "_get_device_handle", handle)]

    def patches(self) -> list[Patch]:
        """From the start of the script."""
        found: list[Patch] = [
            *elsewhere(
                [(torch.multiprocessing, name, self.spawn) for name in ("spawn", "start_processes")]
            ),
            (multiprocessing.process.BaseProcess, "start", self.process()),
            (torch._C, "_get_accelerator", lambda *_: torch.device("cuda")),
        ]
        if not torch.distributed.is_available():
            return found
        dist: Any = torch.distributed
        self.true_join = dist.distributed_c10d.init_process_group
        found += elsewhere(
            [
                (dist.distributed_c10d, "init_process_group", self.join),
                (dist.distributed_c10d, "is_nccl_available", lambda: True),
            ]
        )
        return [*found, (torch.cuda.nccl, "version", lambda: NCCL)]

    def changes(self) -> dict[str, Change]:
        """For modules that the script may import: those of launchers, and RPC, which needs real
        processes."""

        def launch(config: Any, entrypoint: Any, args: Sequence[Any], *_: Any, **__: Any) -> Any:
            from memfit.trace.launchers import SEARCHED, run_words, search

            self.inside = True
            if SEARCHED in os.environ:  # accelerate's, for DeepSpeed
                search(os.environ[SEARCHED])
            local = int(config.nproc_per_node)
            self.start(local * int(config.min_nodes), local)
            if callable(entrypoint):
                return {0: entrypoint(*args)}
            here = str(self.rank % local)  # torch/distributed/elastic/utils/api.py `macros`
            own = (one.replace("${local_rank}", here) for one in map(str, args))
            run_words([entrypoint, *own], self)
            return {}

        def simple(module: ModuleType) -> list[Patch]:
            def launcher(args: Any) -> None:
                from memfit.trace.launchers import run_words

                words, environment = module.prepare_simple_launcher_cmd_env(args)
                os.environ.update(environment)
                self.inside = True
                run_words(words, self)

            return [(module, "simple_launcher", launcher)]

        def sharding(module: ModuleType) -> list[Patch]:
            """FSDP2 takes new weights for its own (`to_empty`, a checkpoint) unless they are meta,
            which those of the pretended GPU are, too (torch 2.13 _fsdp_param.py
            `reset_sharded_param`)."""
            kind, owns = module.FSDPParam, self.recorder.device.owns
            true = kind.reset_sharded_param

            def reset_sharded_param(self: Any) -> None:
                true(self)
                held = self.sharded_param._local_tensor
                if not owns(held) or self._sharded_param_data is None:
                    return
                if owns(self._sharded_param_data):
                    return
                if (whole := self.padded_sharded_param_size) != held.size():
                    padded = held.new_zeros(whole)
                    self.sharded_param._local_tensor = padded[: held.size(0)]
                    held = padded
                self._sharded_param_data = held.view(-1)

            return [(kind, "reset_sharded_param", reset_sharded_param)]

        def remote(*_: Any, **__: Any) -> None:
            raise CannotFollow(
                "the script uses torch.distributed.rpc, which a trace does not support",
                "a trace runs one process",
            )

        return {
            "torch.distributed.launcher.api": lambda module: [(module, "launch_agent", launch)],
            "accelerate.commands.launch": simple,
            "torch.distributed.fsdp._fully_shard._fsdp_param": sharding,
            "torch.distributed.rpc": lambda module: [(module, "init_rpc", remote)],
            **{
                f"{name}.utilities.init": lambda module: [
                    (module, "_has_meta_device_parameters_or_buffers", on_meta)
                ]
                for name in ("lightning.fabric", "lightning_fabric")
            },
            **{
                f"{name}.strategies.launchers.subprocess_script": lambda module: [
                    (
                        module._SubprocessScriptLauncher,
                        "_call_children_scripts",
                        lambda *_, **__: None,
                    )
                ]
                for name in ("lightning.fabric", "lightning.pytorch", "pytorch_lightning")
            },
        }


def on_meta(one: Any, recurse: bool = True) -> bool:
    """Lightning asks `is_meta`, which tensors of the pretended GPU are."""
    if isinstance(one, torch.optim.Optimizer):
        tensors = [tensor for group in one.param_groups for tensor in group["params"]]
    else:
        tensors = [*one.parameters(recurse=recurse), *one.buffers(recurse=recurse)]
    return any(tensor.device.type == "meta" for tensor in tensors)


def number(name: str) -> int:
    """As torch's `env://` reads it."""
    if name not in os.environ:
        raise KeyError(name)
    return int(os.environ[name])


def elsewhere(patches: Sequence[Patch]) -> list[Patch]:
    """Also where torch's own modules have imported a function by its name."""
    found = list(patches)
    modules = [
        one
        for name, one in sys.modules.items()
        if name.startswith("torch.") and isinstance(one, ModuleType)
    ]
    for owner, name, value in patches:
        true = vars(owner)[name]
        found += [
            (one, name, value)
            for one in modules
            if one is not owner and vars(one).get(name) is true
        ]
        if vars(torch.distributed).get(name) is true:
            found.append((torch.distributed, name, value))
    return found


def leave() -> None:
    """The process has no group any more."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


class Groups(dict[str, str]):
    """Every group is one of ranks that have the same model."""

    def __missing__(self, name: str) -> str:
        return "ddp"


__all__ = ["RankWatcher", "Ranks"]
