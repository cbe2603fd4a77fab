"""Makes the files of a family of decoders: its row as data, its graphs in every setting, and what
the comparison with the real code found."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from memfit.errors import InputError
from memfit.job import Job
from memfit.model import label_heads as usual
from memfit.model.classes import CLASSES
from memfit.model.families import _captured, _rows, forget
from memfit.model.families._captured import SETTINGS
from memfit.model.label_heads import SEQUENCE, SPAN, TOKENS
from memfit.trace import classes
from memfit.trace.decoder_check import (
    packs,
    parameters_fault,
    peaks_fault,
    unlike_pairs,
    unseen,
)
from memfit.trace.decoder_row import decoder_data, rates_of
from memfit.trace.family_check import fault, unlike_parameters
from memfit.trace.graph_files import family_file
from memfit.trace.new_family import language_head, paired, refuse, subject_of
from memfit.trace.program import configuration

SHOWN = 3  # examples that are captured
TRIES = 3  # of their sizes
USUAL = {
    SEQUENCE: (usual.CLASSIFIES, usual.CLASSIFIES_BEHIND),
    TOKENS: (usual.TAGS, usual.TAGS_UNDROPPED, usual.TAGS_NARROW, usual.TAGS_NARROW_UNDROPPED),
    SPAN: (usual.ANSWERS, usual.ANSWERS_RENAMED, usual.ANSWERS_LABELLED),
}


def decodes(kind: str) -> bool:
    """Whether a type of models goes on with a text, neither fills gaps in it nor has an encoder
    beside, and drops nothing out by default, which rows of encoders say."""
    subject = subject_of(kind)
    own = subject.whole
    config = configuration(own, None)
    return (
        not paired(config)
        and classes.builder("masked-lm", config) is None
        and bool(language_head(config))
        and not any(own[key] for key in rates_of(subject))
    )


def made_decoder(
    kind: str, given: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row, and the graphs by setting; raises InputError where they do not agree with the real
    code."""
    data, more = decoder_data(kind, given)
    config, graphs = first_captured(data, more)
    graphs |= {one: captured_as(data, one) for one in SETTINGS if one}
    registered(data, graphs)
    if found := peaks_fault(config, data):
        raise refuse(kind, found)
    data["packs"] = packs(config, data)
    data["unlike"] += unlike_pairs(config, data)
    data["label_heads"] = list(label_heads(data, graphs, config))
    registered(data, graphs)
    return data, graphs


def first_captured(
    data: dict[str, Any], more: Iterator[Mapping[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config of unseen sizes, and the graphs of the first setting. A size may be taken for
    another one where three models have both by chance; then others of the sizes are tried. `sums`
    are sizes by themselves where nothing is exact without them."""
    why, sums = "", data.pop("sums")
    drawn = itertools.islice(
        (one for one in itertools.chain([data["sizes"]], more) if apart(data, one)), TRIES
    )
    for named, sizes in itertools.product([{}, sums] if sums else [{}], list(drawn)):
        if named:
            data["sums"] = named
        data["sizes"] = {key: values[:SHOWN] for key, values in sizes.items()}
        config = unseen(data, {key: values[SHOWN] for key, values in sizes.items()})
        try:
            graphs = {"": captured_as(data, "")}
        except InputError as bad:
            why = bad.problems[0].message
            continue
        registered(data, graphs)
        found = parameters_fault(config, data)
        if not found:
            return config, graphs
        why = f"no row for `{data['type']}`: {found}"
    raise InputError.one(why, where="family")


def apart(data: Mapping[str, Any], sizes: Mapping[str, Sequence[int]]) -> bool:
    """Whether no model has two sizes equal that the row refuses where they are."""
    names = [[data["dims"].get(name) for name in pair] for pair in data["unlike"]]
    return all(
        one != other
        for first, second in names
        if first and second
        for one, other in zip(sizes[first], sizes[second], strict=True)
    )


def captured_as(data: Mapping[str, Any], setting: str) -> Any:
    """The graphs of a setting, as they are read from a file."""
    return json.loads(json.dumps(family_file(_rows.decoder_row(data), setting)))


def label_heads(
    data: dict[str, Any], graphs: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The heads of labels that are one of the usual ones, with the real class's parameters and
    peak."""
    own = configuration(config, None)
    for head, rows in USUAL.items():
        if classes.builder(head, own) is None:
            continue
        end = next(end for end, name in CLASSES.items() if name == head)
        labelled = {**config, "architectures": [end], "num_labels": 2 if head == SPAN else 7}
        job = Job(batch=3, seq=100, head=head, packing=False, optimizer="sgd")
        for row in rows:
            registered({**data, "label_heads": [asdict(row)]}, graphs)
            if not (unlike_parameters(labelled, head) or fault(labelled, job)):
                yield asdict(row)
                break


def registered(data: Mapping[str, Any], graphs: Mapping[str, Mapping[str, Any]]) -> None:
    """The row and its graphs are known in this process from now on."""
    name = data["type"]
    _captured.MADE.update({(name, one): some for one, some in graphs.items()})
    for known in (_captured.stored, _captured.graphs_of, _captured.known_settings):
        known.cache_clear()
    forget(name)
    _captured.ROWS.pop(name, None)
    _rows.register(data)


__all__ = ["decodes", "made_decoder"]
