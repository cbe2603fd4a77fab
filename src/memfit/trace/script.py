"""Runs a user's own program, unmodified, as if this machine had a GPU, and records what it
allocates there."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from memfit.errors import InputError, Problem
from memfit.simulate.settings import Settings
from memfit.tape import Alloc, Tape
from memfit.trace import (
    assume,
    autocast,
    bnb,
    colocated_vllm,
    cuda,
    data_moves,
    deepspeed,
    failures,
    flash_attn,
    flash_package,
    imports,
    kernels_of,
    launched_ranks,
    launchers,
    launches,
    lines,
    micro_batches,
    missing_adapters,
    missing_files,
    missing_packages,
    missing_pictures,
    missing_weights,
    notebooks,
    nvml,
    pretrained,
    public_configs,
    refuse,
    runtime,
    savers,
    synthetic_data,
    synthetic_downloads,
    synthetic_processors,
    synthetic_tokenizers,
    unused_packages,
    vision_tokens,
    zero,
)
from memfit.trace.follow import Follower, Stopped
from memfit.trace.live import Live
from memfit.trace.refuse import CannotFollow, Watcher
from memfit.trace.rules import learn
from memfit.trace.scratch import Scratch
from memfit.trace.sides import parameter_maker

COMMAND = "-- "  # before the name of an installed command
LIBRARIES = ("torch", "transformers", "peft", "accelerate", "trl", "datasets")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run and for how long; `steps` 0 means to its end. Files that the program writes go to
    `scratch`, if there is one."""

    script: str
    arguments: tuple[str, ...] = ()
    device: cuda.Device
    steps: int = 3
    seconds: float = 0
    scratch: str
    alloc_conf: str = ""
    truth: bool = False
    rank: int = 0
    world: int = 1
    gpus: int = 1  # of the machine
    launcher: str = ""  # the words before the script that start it
    module: str = ""  # run as `python -m`
    tokens: int = 512  # of a text in a data set that is not there
    image: int = 256  # pixels along a side of a picture in one
    watch: Callable[[Watcher], None] = field(default=lambda _: None)
    leave: Callable[[Follower], None] = field(default=lambda _: None)


class TimeIsUp(BaseException):
    """Raised in whatever the program is doing."""


def follow(request: Request) -> Follower:
    """Run the program until it has shown enough. What the follower holds then is the answer; see
    `answer`."""
    script = Path(request.script)
    command = request.script.startswith(COMMAND)
    if not request.module and not command and not script.is_file():
        raise InputError.one(f"`{request.script}` is not a file", where="script")
    device = request.device
    learn(Watcher(device))
    kernels_of.install(device)
    assume.install()
    recorder = launched_ranks.RankWatcher(device)
    recorder.truth = request.truth
    live = Live(recorder, Settings.parse(request.alloc_conf, where="job.alloc_conf"), device.memory)
    follower = Follower(recorder, request.steps, leave=lambda: request.leave(follower))
    request.watch(recorder)
    recorder.mark("load")
    if request.alloc_conf:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = request.alloc_conf
    with contextlib.ExitStack() as stack:
        ranks = launched_ranks.Ranks(recorder, stack, request.rank)
        follower.ranks = ranks
        prepare(stack, follower, live, request)
        judged(follower, request, lambda: execute(script, request, ranks))
    return follower


def prepare(stack: contextlib.ExitStack, follower: Follower, live: Live, request: Request) -> None:
    """All that makes the program believe in its GPU, from the outside in."""
    ranks = follower.ranks
    cuda.HERE.count = request.gpus
    recorder, device = follower.recorder, request.device
    assert isinstance(recorder, launched_ranks.RankWatcher)
    if request.scratch:  # else the operating system sees to it
        stack.enter_context(cuda.patched(Scratch(request.scratch).patches()))
    stack.enter_context(cuda.pretended(device))
    stack.enter_context(
        cuda.patched(
            runtime.patches(device, live)
            + refuse.patches(recorder)
            + savers.patches(recorder)
            + missing_weights.patches(recorder)
            + missing_files.patches(recorder)
            + data_moves.patches(recorder)
            + ranks.patches()
        )
    )
    stack.enter_context(
        cuda.patched([(torch.nn.Parameter, "__new__", staticmethod(parameter_maker(recorder)))])
    )
    stack.enter_context(bnb.installed())
    missing = missing_packages.Missing(recorder)
    flash = flash_package.Finder(recorder)
    columns = synthetic_data.columns_of(recorder, request.tokens, request.image)
    folders = missing_pictures.Folders(columns)
    stack.enter_context(cuda.patched(missing_pictures.listing(folders)))
    stack.enter_context(cuda.patched(missing_pictures.walking(folders)))
    launched = launches.Launches(recorder)
    stack.enter_context(launches.installed(launched))
    stack.enter_context(
        imports.changing(
            {
                **changes(recorder),
                **launched.changes(),
                **ranks.changes(),
                **missing_weights.changes(recorder),
                **missing_adapters.changes(recorder),
                **synthetic_data.changes(recorder, columns),
                **missing_pictures.readers(folders),
                **synthetic_tokenizers.changes(recorder),
                **synthetic_downloads.changes(recorder, columns),
                **colocated_vllm.changes(recorder),
                **synthetic_processors.changes(recorder),
                **vision_tokens.changes(),
                **public_configs.changes(recorder),
                "pynvml": nvml.functions(device, live),
                "transformers.integrations.integration_utils": missing.reporting,
            }
        )
    )
    for finder in (missing, flash, unused_packages.Unused(recorder.note)):
        sys.meta_path.append(finder)
        stack.callback(sys.meta_path.remove, finder)
    stack.enter_context(imports.replaced(missing.writer()))
    stack.enter_context(cuda.patched(missing.variables()))
    stack.enter_context(autocast.emulated())
    stack.enter_context(follower.following())
    if request.world > 1:
        ranks.start(request.world, request.gpus)
    stack.enter_context(limited(request.seconds))
    stack.enter_context(recorder)


def changes(recorder: launched_ranks.RankWatcher) -> dict[str, imports.Change]:
    """Packages that are changed when the program imports them."""
    return {
        "huggingface_hub.constants": pretrained.hub_constants,
        "transformers.utils.hub": pretrained.folders,
        "transformers.configuration_utils": lambda module: pretrained.configs(module, recorder),
        "transformers.modeling_utils": lambda module: [
            *pretrained.models(module, recorder),
            *savers.pretrained(module.PreTrainedModel),
            *flash_attn.in_scripts(module.PreTrainedModel, recorder),
        ],
        "transformers.modeling_flash_attention_utils": flash_attn.utilities,
        "transformers.trainer": lambda module: micro_batches.trainer(module, recorder),
        "peft.peft_model": lambda module: savers.pretrained(module.PeftModel),
        "safetensors.torch": savers.safetensors,
        "huggingface_hub.hf_api": lambda module: savers.hub(module, recorder),
        "huggingface_hub.repository": lambda module: savers.repositories(module, recorder),
        "huggingface_hub._login": lambda module: savers.logins(module, recorder),
        "torch.utils.tensorboard.writer": savers.graphs,
        "tensorboardX.writer": savers.graphs,
        "torch.utils.cpp_extension": refuse.extensions,
        "deepspeed.ops.op_builder.builder": lambda module: deepspeed.builders(module, recorder),
        "deepspeed": lambda _: zero.answers(recorder),
    }


def execute(script: Path, request: Request, ranks: launched_ranks.Ranks) -> None:
    """As `python script.py arguments` would, or `python -m module arguments`, or a launcher."""
    if request.launcher or request.script.startswith(COMMAND):
        program = ["-m", request.module] if request.module else [request.script]
        if request.script.startswith(COMMAND):
            program = [request.script.removeprefix(COMMAND)]
        words = [*shlex.split(request.launcher), *program, *request.arguments]
        launchers.run_words(words, ranks)
    elif request.module:
        launchers.run_module(request.module, request.arguments, request.script)
    else:
        own = script.suffix == ".ipynb"
        path = request.script
        if own:
            folder = ranks.stack.enter_context(tempfile.TemporaryDirectory())
            path = notebooks.script(script, folder)
        names = notebooks.NAMES if own else {}
        launchers.run_file(path, request.arguments, home=script, names=names)


def judged(follower: Follower, request: Request, run: Callable[[], None]) -> None:
    """However the program ends: either it has shown enough, or it becomes one clear message."""
    try:
        run()
    except BaseException as bad:
        if follower.end is not None:
            return
        if isinstance(bad, (Stopped, KeyboardInterrupt, InputError)):
            raise
        shown = follower.steps or not request.steps or follower.inferred()
        if not isinstance(bad, SystemExit) or bad.code or not shown:
            raise InputError(problem_of(bad, request, follower)) from bad
    if request.steps and not follower.backwards and not follower.inferred():
        message = (
            f"`{Path(request.script).name}` ended without training: no optimizer step "
            "and no backward pass"
        )
        hint = "`--steps 0` traces a script to its end, even without training"
        raise InputError.one(message, where="script", hint=hint)


def problem_of(bad: BaseException, request: Request, follower: Follower) -> Problem:
    if isinstance(bad, CannotFollow):
        return bad.problem
    where = lines.failed(bad.__traceback__)
    if isinstance(bad, SyntaxError) and bad.filename and bad.lineno:
        where = lines.shown(bad.filename, bad.lineno)
    name = Path(request.script).name
    if isinstance(bad, TimeIsUp):
        message = (
            f"`{name}` did not finish {request.steps or 'all of its'} steps within "
            f"{request.seconds:g} s"
        )
        return Problem(message=message, where=where, hint="raise it with `--time-limit`")
    archives = synthetic_downloads.archives_of(follower.recorder.notes)
    return failures.explain(bad, name, where, archives)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Where the system has alarms; elsewhere the parent process ends what takes too long."""
    if not seconds or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(_: int, frame: FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(
        signal.ITIMER_REAL, seconds, 1.0
    )  # again, if the program catches the first one
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def answer(follower: Follower) -> Tape:
    """The events up to the last step that was asked for."""
    recorder = follower.recorder
    if follower.end is not None:
        recorder.events = recorder.events[: follower.end]
    follower.settled()
    if follower.repeats.skipped and isinstance(recorder, Watcher):
        recorder.note(
            "repeats",
            f"{follower.repeats.skipped} passes without gradients that allocate like those before "
            "them are not run",
        )
    events = recorder.finished()
    if isinstance(recorder, Watcher) and not any(isinstance(one, Alloc) for one in events):
        hint = 'move the model and its inputs there with `.to("cuda")`'
        recorder.note("cpu", "the script puts nothing on the GPU: it runs on the CPU", hint)
    versions = {
        name: str(module.__version__)
        for name in LIBRARIES
        if (module := sys.modules.get(name)) is not None and hasattr(module, "__version__")
    }
    return Tape(
        events=events,
        source="trace",
        versions={"python": sys.version.split()[0], **versions},
    )


__all__ = ["Follower", "Request", "answer", "follow"]
