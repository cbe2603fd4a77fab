"""The process that traces: run by its path in any interpreter, it imports memfit from where this
file lies, and nothing else of there.

It reads a request (JSON) and appends lines of JSON to a file: progress, then either the tape or
problems. Until `memfit` is imported the code here must suit old versions of Python, to be able to
say that they are too old.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import signal
import sys
import threading
import time

OLDEST = (3, 11)
MOST = 8  # notes beside an error
BEAT = 0.25  # seconds between two signs of life


class Channel:
    """The file to which the lines go; opened before anything is changed in this process."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open until the process ends
        self.lock = threading.Lock()
        self.recorder: object = None

    def say(self, **what: object) -> None:
        with self.lock:
            self.file.write(json.dumps(what) + "\n")
            self.file.flush()

    def refuse(self, message: str, where: str = "", hint: str = "") -> None:
        self.say(problems=[{"message": message, "where": where, "hint": hint, "level": "error"}])

    def watch(self, recorder: object) -> None:
        """From now on tell how far the recorder is, and end when there is nobody left to tell."""
        self.recorder = recorder
        parent = os.getppid()

        def beat() -> None:
            while os.getppid() == parent:
                time.sleep(BEAT)
                at = [recorder.phase, recorder.step, recorder.layer]  # type: ignore[attr-defined]
                self.say(progress=[*at, len(recorder.events)])  # type: ignore[attr-defined]
            os._exit(3)

        threading.Thread(target=beat, daemon=True).start()


def mortal() -> None:
    """End with the process that started this one, however that ends: the signal comes from Linux
    (prctl PR_SET_PDEATHSIG), elsewhere `Channel.watch` looks."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    mortal()
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    channel = Channel(request["answer"])
    stack = open(request["stack"], "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.enable(stack)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, stack)  # the parent process asks where we are
    elif request["seconds"]:
        faulthandler.dump_traceback_later(request["seconds"] + 2, file=stack)
    if sys.version_info < OLDEST:
        version = ".".join(str(one) for one in sys.version_info[:2])
        channel.refuse(
            "the trace needs Python 3.11 or newer, and `%s` is %s" % (sys.executable, version),  # noqa: UP031
            "python",
        )
        return
    for name in ("torch", *(("transformers",) if request["kind"] == "model" else ())):
        if importlib.util.find_spec(name) is None:
            channel.refuse(
                f"`{sys.executable}` has no `{name}`",
                "python",
                "install it there, or choose another interpreter with `--python`",
            )
            return
    sys.path.pop(0)  # the folder of this file
    home(request["package"])
    if request["kind"] == "script":
        from memfit.trace import sandbox

        request["sandbox"] = sandbox.enter(
            request["scratch"],
            network=request["network"],
            secrets=request["keep_env"],
            most="" if request["isolation"] == "auto" else request["isolation"],
        )
    traced(request, channel)


def home(folder: str) -> None:
    """Make `import memfit` mean the package in `folder`, without putting its neighbours on the
    path."""
    spec = importlib.util.spec_from_file_location(
        "memfit", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["memfit"] = module
    spec.loader.exec_module(module)


def traced(request: dict, channel: Channel) -> None:  # type: ignore[type-arg]
    import dataclasses

    from memfit.errors import InputError
    from memfit.trace import library_warnings
    from memfit.trace.light import lighten

    warned = library_warnings.collect()
    lighten()
    try:
        tape, notes, facts = (of_model if request["kind"] == "model" else of_script)(
            request, channel
        )
    except InputError as bad:
        if request["show"] and bad.__cause__ is not None:
            sys.excepthook(type(bad.__cause__), bad.__cause__, bad.__cause__.__traceback__)
        said = (*bad.problems, *doubts(request), *assumed(channel))
        problems = [dataclasses.asdict(one) for one in said]
        channel.say(problems=problems, warned=list(warned))
    except KeyboardInterrupt:
        channel.say(interrupted=True)
    except Exception:  # noqa: BLE001 - a defect of ours, which the parent process shows as one
        import traceback

        channel.say(broken=traceback.format_exc())
    else:
        from memfit.trace.wire import to_text

        channel.say(
            tape=to_text(tape), notes=[dataclasses.asdict(one) for one in notes], facts=facts
        )
    leave()


def doubts(request: dict) -> list:  # type: ignore[type-arg]
    """Whether what stopped the script may be that it was not allowed to write."""
    from memfit.errors import Problem
    from memfit.trace import leftovers

    found = request.get("sandbox")
    text = leftovers.gaps(found) if found is not None and found.level == "landlock" else ""
    return [Problem(message=f"isolated by {text}", where="script", level="note")] if text else []


def assumed(channel: Channel) -> list:  # type: ignore[type-arg]
    """What took the place of data and packages before the script stopped."""
    return [*getattr(channel.recorder, "notes", {}).values()][:MOST]


def leave() -> None:
    """Nothing of the program runs any more, not even what it wanted done at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(0)


def of_model(request: dict, channel: Channel) -> tuple:  # type: ignore[type-arg]
    from memfit.job import Job
    from memfit.strategy import from_data
    from memfit.trace import trace_config

    options = {**request["options"], "strategy": from_data(request["strategy"])}
    tape = trace_config(
        request["config"],
        Job(**request["job"]),
        gpu=Given(request["gpu"]),
        watch=channel.watch,
        **options,
    )
    return tape, [], {}


class Given:
    """The GPU's figures as attributes."""

    def __init__(self, values: dict) -> None:  # type: ignore[type-arg]
        self.name, self.sms, self.memory = (
            values.get("name"),
            values.get("sms"),
            values.get("memory"),
        )
        self.sm = tuple(values["sm"]) if values.get("sm") else None


def of_script(request: dict, channel: Channel) -> tuple:  # type: ignore[type-arg]
    from memfit.trace import script
    from memfit.trace.program import Options, device_of

    def told(follower: script.Follower) -> None:
        tape = script.answer(follower)
        notes = getattr(follower.recorder, "notes", {})
        from memfit.trace.wire import to_text

        channel.say(
            tape=to_text(tape),
            notes=[vars_of(one) for one in notes.values()],
            facts={**facts_of(follower), **outside(request)},
        )
        leave()

    wanted = script.Request(
        script=request["script"],
        arguments=tuple(request["arguments"]),
        device=device_of(Options(gpu=Given(request["gpu"]))),
        steps=request["steps"],
        truth=request["truth"],
        rank=request["rank"],
        world=request["world"],
        gpus=request["gpus"],
        launcher=request["launcher"],
        tokens=request["tokens"],
        image=request["image"],
        module=request["module"],
        seconds=request["seconds"],
        scratch="" if request["sandbox"].level == "namespaces" else request["scratch"],
        alloc_conf=request["alloc_conf"],
        watch=channel.watch,
        leave=told,
    )
    follower = script.follow(wanted)
    tape = script.answer(follower)
    notes = list(follower.recorder.notes.values())
    return tape, notes, {**facts_of(follower), **outside(request)}


def outside(request: dict) -> dict:  # type: ignore[type-arg]
    """What the script would have left behind, and what kept it from doing so."""
    from memfit.trace import leftovers

    found = request["sandbox"]
    return {
        "files": leftovers.files(found.files or request["scratch"] + "/files"),
        "isolation": found.level or "python",
        "gaps": leftovers.gaps(found),
    }


def vars_of(one: object) -> dict:  # type: ignore[type-arg]
    import dataclasses

    return dataclasses.asdict(one)  # type: ignore[call-overload]


def facts_of(follower: object) -> dict:  # type: ignore[type-arg]
    total, trainable = follower.parameters  # type: ignore[attr-defined]
    conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    steps, host = follower.steps, follower.recorder.host_peak  # type: ignore[attr-defined]
    return {
        "steps": steps,
        "rank": follower.ranks.rank,  # type: ignore[attr-defined]
        "world": follower.ranks.size,  # type: ignore[attr-defined]
        "host": host,
        "parameters": total,
        "trainable": trainable,
        "alloc_conf": conf,
    }


if __name__ == "__main__":
    main()
