"""Models by a name, a path, a config or a script, and who answers for them."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import InputError, MissingExtra, Problem
from memfit.words.options import Ask

if TYPE_CHECKING:  # each function imports what it needs, and no more
    from memfit.model.model import Model
    from memfit.model.source import Source
    from memfit.tape import Producer

OTHERWISE = (
    "trace with another environment that has torch and transformers: `memfit trace … --python VENV`"
)


def model_of(
    subject: Any, ask: Ask, reasons: list[Problem] | None = None
) -> tuple[Source | None, Model]:
    """The model that is named. Where no family knows it and a trace may answer, only its config;
    why then joins `reasons`."""
    from memfit.model.families import build
    from memfit.model.model import Model

    if isinstance(subject, Model):
        if ask.prune:
            message = "a built Model cannot be pruned"
            raise InputError.one(message, where="prune", hint="pass its config, or its name")
        return None, subject
    if ask.like:
        from memfit.model.likeness import build_like

        build = partial(build_like, ask.like)
    if isinstance(subject, Mapping):
        config = cut_config(subject, ask)
        return None, otherwise(ask, config, ("", ""), lambda: build(config), reasons)
    if not isinstance(subject, (str, os.PathLike)):
        raise InputError.one(
            f"`{str(subject)[:60]}` is not a model",
            where="model",
            hint="pass a name, a path, a parsed config or a `Model`",
        )
    from memfit.model.source import read

    source = read(subject, offline=ask.offline)
    if ask.prune:
        source = dataclasses.replace(
            source,
            config=cut_config(source.config, ask),
            origin=f"{source.origin}, pruned: {ask.prune}",
            parameters=None,
            tensors=None,
        )
    made = lambda: exact(source, build(source.config, name=source.name, origin=source.origin))  # noqa: E731
    return source, otherwise(ask, source.config, (source.name, source.origin), made, reasons)


def cut_config(config: Mapping[str, Any], ask: Ask) -> Mapping[str, Any]:
    """What `--prune` leaves of a config."""
    if not ask.prune:
        return config
    from memfit.model.pruning import pruned

    return pruned(config, ask.prune)


def planned_model(subject: Any, ask: Ask) -> Model:
    """The model of a plan or a study, which formulas alone can make."""
    try:
        return model_of(subject, dataclasses.replace(ask, by="formula"))[1]
    except InputError as bad:
        hint = "`memfit estimate` traces it; `--like NAME` takes the formulas of a known family"
        problems = [
            dataclasses.replace(one, hint=hint) if traced(one) else one for one in bad.problems
        ]
        raise type(bad)(*problems) from None


def otherwise(
    ask: Ask,
    config: Mapping[str, Any],
    named: tuple[str, str],
    made: Callable[[], Model],
    reasons: list[Problem] | None,
) -> Model:
    """The Model of the formulas; where these say that a trace can do what they cannot, and one may
    be run, only its config. `named`: the model's name and where its config is from."""
    try:
        return made()
    except InputError as bad:
        may = ask.by == "trace" or (ask.by == "auto" and reasons is not None)
        if (
            not may
            or not config.get("model_type")
            or not (all(traced(problem) for problem in bad.problems) or by_graphs(config))
        ):
            raise
        if reasons is not None:
            reasons += bad.problems
        return unbuilt(config, *named)


def by_graphs(config: Mapping[str, Any]) -> bool:
    """Whether captured graphs answer for this type: their map of sizes may not read what its own
    class reads (a default, a list under an older name), so that a trace has the last word."""
    from memfit.model.families import families

    known = families().get(str(config.get("model_type")))
    return known is not None and known.graphs


def traced(problem: Problem) -> bool:
    """Whether it is one of the formulas alone."""
    return "--by trace" in problem.hint


def exact(source: Source, model: Model) -> Model:
    """A GGUF's tensors in place of the weights that its config would have in 16 bits."""
    from memfit.model.stored import with_blocks

    packing = source.config.get("quantization_config")  # may be null
    gguf = isinstance(packing, Mapping) and packing.get("quant_method") == "gguf"
    return with_blocks(model, source.tensors) if gguf and source.tensors else model


def compared(source: Source, model: Model) -> tuple[Problem, ...]:
    """What the exact tensors of a file say of the model that its config describes."""
    from memfit.model.stored import doubts

    if source.tensors is None and source.parameters is None and model.assumed:
        said = ", ".join(f"`{key}` as {json.dumps(value)}" for key, value in model.assumed)
        message = f"the config leaves open what decides much; taken, as transformers does: {said}"
        return (Problem(message=message, where="config", level="note"),)
    if (
        model.stored
        or source.tensors is None
        or source.config.get("quantization_config")
        or not model.layers
    ):
        return ()
    return tuple(doubts(model, source.tensors))


def unbuilt(config: Mapping[str, Any], name: str, origin: str) -> Model:
    """A model that no family knows: only its config, for the trace."""
    from memfit.model.config import LARGEST_LAYERS, Fields
    from memfit.model.model import Model
    from memfit.model.modules import Linear

    fields = Fields(config)
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if fields.value(key, default=None) is not None:
            fields.count(key, high=LARGEST_LAYERS)  # each would be built
    fields.done()
    kind = str(config.get("model_type"))
    head = Linear(name="lm_head", inputs=1, outputs=1)
    return Model(
        name=name or kind,
        family=kind,
        prefix="",
        embed=(),
        layers=(),
        final=(),
        head=head,
        tied=True,
        vocab=1,
        width=1,
        positions=0,
        config=config,
        origin=origin,
    )


def is_program(subject: str) -> bool:
    """Whether it is a script, a notebook, a module (`-m package.module`) or a command (`-- trl`),
    and no model."""
    return subject.endswith((".py", ".ipynb")) or subject.startswith(("-m ", "-- "))


def script_model(path: str) -> Model:
    """A placeholder for the model where a script builds its own."""
    from memfit.model.model import Model
    from memfit.model.modules import Linear

    head = Linear(name="", inputs=1, outputs=1)
    return Model(
        name=Path(path).name,
        family="script",
        prefix="",
        embed=(),
        layers=(),
        final=(),
        head=head,
        tied=True,
        vocab=1,
        width=1,
        positions=0,
        config={},
        origin=path,
    )


def producer_of(by: str) -> Producer | None:
    """None means the formulas, which `estimate` knows itself."""
    if by != "trace":
        return None
    from importlib.util import find_spec

    if not all(find_spec(name) for name in ("torch", "transformers")):
        raise MissingExtra("`--by trace`", "trace", OTHERWISE)
    from memfit.trace import trace

    return trace
