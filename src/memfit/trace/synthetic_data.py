"""Data sets that are not there: rows of the right columns and of one stated length, so that the
answer is for that length."""

from __future__ import annotations

import functools
import glob
import importlib
import io
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from memfit.trace import (
    asked_columns,
    embedding_columns,
    failures,
    lines,
    near_files,
    records,
    streamed_columns,
    synthetic_tables,
    trainer_columns,
)
from memfit.trace.imports import Change, Patch
from memfit.trace.refuse import Watcher
from memfit.trace.synthetic_tokenizers import table

ROWS = {"train": 2000}
OTHERS = 200  # rows of every other split
TENFOLD = 10
SHORT = 32  # words of a sentence
LANGUAGES = ("en", "de", "fr", "ro")  # and those that a configuration names: `en-it`
SECONDS = 10  # of a recording
OBJECTS = 4  # in a picture
PASSAGES = 10  # of a query in MS MARCO, at most
STEPS = 8  # of a solution, each of which is judged
FILES = ("json", "csv", "text", "parquet", "imagefolder", "audiofolder", "arrow", "pandas", "xml")
READ = FILES[:4]  # rows of texts and numbers
GUESSED = "are those that the script asks for, with values that their names and its lines suggest"
SPLITS = ("train", "validation", "test")


def entry(path: str, name: str) -> str:
    """The key of a data set, by its whole name, its owner or what is behind the owner."""
    known = table()["names"]
    owner, _, last = path.rpartition("/")
    for one in (
        f"{path}/{name}",
        path,
        f"{owner}/*/{name}",
        f"{owner}/*",
        f"{last}/{name}",
        last,
    ):
        if one.lower() in known:
            return one.lower()
    return ""


class Source:
    """Columns by their kinds."""

    def __init__(self, tokens: int, image: int, note: Callable[..., None]) -> None:
        self.tokens, self.image, self.random = tokens, image, random.Random(0)
        self.note = note
        self.known = table()["words"].split()

    def words(self, count: int) -> str:
        return " ".join(self.random.choices(self.known, k=max(1, count)))

    def value(self, kind: str, row: int) -> Any:
        name, _, number = kind.partition(" ")
        half = self.tokens // 2
        # What a row asks is the same in all of its columns
        asked = " ".join(random.Random(row).choices(self.known, k=max(1, half)))
        makers: dict[str, Callable[[], Any]] = {
            "text": lambda: self.words(self.tokens),
            "sentence": lambda: self.words(min(SHORT, self.tokens)),
            "messages": lambda: [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": self.words(half)},
            ],
            "dialogue": lambda: f"\n\nHuman: {asked}\n\nAssistant: {self.words(half)}",
            "turns": lambda: [{"user": asked, "assistant": self.words(half)}],
            "prompt": lambda: [{"role": "user", "content": asked}],
            "answer": lambda: [{"role": "assistant", "content": self.words(half)}],
            "conversations": lambda: [
                {"from": "human", "value": self.words(half)},
                {"from": "gpt", "value": self.words(half)},
            ],
            "label": lambda: row % int(number),
            "choice": lambda: (listed := json.loads(number))[row % len(listed)],
            "pixels": lambda: self.image,
            "float": lambda: float(row % 5),
            "bool": lambda: row % 2 == 0,
            "id": lambda: row,
            "ids": lambda: [(row + one) % OTHERS for one in range(OTHERS // 2)],
            "tokens": lambda: self.words(SHORT).split(),
            "tags": lambda: [self.random.randrange(int(number)) for _ in range(SHORT)],
            "several": lambda: [self.value(number, row)],
            "json": lambda: json.dumps(
                self.value(number, row)
                if number
                else [{"name": self.words(1), "arguments": {"text": self.words(half)}}]
            ),
            "answers": lambda: {"text": [self.words(4)], "answer_start": [0]},
            "passages": lambda: {
                "is_selected": [int(one == 0) for one in range(PASSAGES)],
                "passage_text": [self.words(self.tokens) for _ in range(PASSAGES)],
                "url": [self.words(1)] * PASSAGES,
            },
            "replies": lambda: {"text": [self.words(self.tokens)], "score": [1]},
            "translation": lambda: {
                one: self.words(min(SHORT, self.tokens)) for one in (*LANGUAGES, *number.split())
            },
            "image": lambda: self.picture(number, "RGB"),
            "ratings": lambda: [5],
            "numbered": lambda: {f"class {one}": one for one in range(records.CLASSES)},
            "steps": lambda: [self.words(self.tokens // STEPS) for _ in range(STEPS)],
            "judged": lambda: [one < STEPS - 1 for one in range(STEPS)],
            "gray": lambda: self.picture(number, "L"),
            "encoded": lambda: encoded(self.picture(number, "RGB")),
            "audio": self.recording,
            "objects": lambda: {
                "id": [*range(OBJECTS)],
                "area": [64.0 * 64] * OBJECTS,
                "bbox": [[16.0 * one, 16.0, 64.0, 64.0] for one in range(OBJECTS)],
                "category": [one % 2 for one in range(OBJECTS)],
            },
        }
        return makers[name]()

    def picture(self, number: str, mode: str) -> Any:
        return picture(self.side(number), mode)

    def side(self, number: str = "") -> int:
        """Pixels along a side of a picture."""
        size = int(number or self.image)
        message = f"the pictures of missing data sets are blank, {size} by {size}"
        self.note(f"pictures {size}", message, "" if number else "choose with `--image-size`")
        return size

    def recording(self) -> dict[str, Any]:
        rate = asked_columns.RATE
        message = f"the recordings of missing data sets are {SECONDS} s of silence"
        self.note("recordings", f"{message} at {rate // 1000} kHz")
        return {"array": silence(), "sampling_rate": rate, "path": ""}

    def rows(self, columns: dict[str, str], count: int) -> Any:
        datasets: Any = importlib.import_module("datasets")
        values = {
            name: [self.value(kind, row) for row in range(count)] for name, kind in columns.items()
        }
        made = datasets.Dataset.from_dict(values)
        for name, kind in columns.items():
            word, _, number = kind.partition(" ")
            labels = [str(one) for one in range(int(number))] if word in ("label", "tags") else []
            if word == "label":
                made = made.cast_column(name, datasets.ClassLabel(names=labels))
            if word == "objects" and (kinds := made.features[name]):
                named = datasets.ClassLabel(names=[str(one) for one in range(2)])
                within = type(kinds["category"])(named)
                made = made.cast_column(name, type(kinds)({**kinds, "category": within}))
            if word == "tags":
                made = made.cast_column(name, datasets.Sequence(datasets.ClassLabel(names=labels)))
        return made


def encoded(image: Any) -> bytes:
    """The file of a picture."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


@functools.cache
def picture(size: int, mode: str) -> Any:
    return importlib.import_module("PIL.Image").new(mode, (size, size))


@functools.cache
def silence() -> Any:
    numpy: Any = importlib.import_module("numpy")
    return numpy.zeros(asked_columns.RATE * SECONDS, dtype="float32")


def remote(path: str, given: dict[str, Any]) -> str:
    """The data set whose files a reader of files is to download: `hf://datasets/owner/name…`."""
    found = re.search(r"hf://datasets/([\w.-]+/[\w.-]+)", str(given.get("data_files")))
    return found[1] if path in FILES and found else ""


def named_files(given: dict[str, Any]) -> list[str]:
    """The files or folders that a reader of files is given."""
    files = given.get("data_files") or given.get("data_dir")
    named = list(files.values()) if isinstance(files, dict) else [files]
    return [str(one) for some in named for one in (some if isinstance(some, list) else [some])]


def missing(path: str, given: dict[str, Any]) -> str:
    """The first file or folder of a reader of files, where none of them is there."""
    listed = named_files(given)
    listed_here = [one for one in listed if not records.is_stand_in(one)]
    there = any(one == "None" or "://" in one or glob.glob(one) for one in listed_here)
    return "" if path not in READ or there else listed[0]


def dataset(path: str, name: str, split: Any, streaming: bool, source: Source) -> Any:
    """As `load_dataset` gives it: one split, or all of them by name."""
    datasets: Any = importlib.import_module("datasets")
    key = entry(path, name)
    lines_alone = not key and path.lower().endswith((".txt", ".text"))  # as the reader of texts
    columns = {"text": "text"} if lines_alone else table()["names"][key] if key else unknown()
    columns = spoken(columns, f"{path} {name}")
    splits = table()["splits"].get(key, SPLITS)

    def rows(word: str) -> Any:
        found = re.match(r"([\w.-]+)(?:\[(.*)\])?", str(word).strip())
        base, part = (found[1], found[2]) if found else (str(word), None)
        images = any(kind.startswith(("image", "gray")) for kind in columns.values())
        count = ROWS.get(base.partition("_")[0], OTHERS)
        if any(kind == "audio" for kind in columns.values()):
            count = asked_columns.RECORDINGS
        made = source.rows(columns, min(count, 256) if images else count)
        known = bool(key) or lines_alone
        made._info.description = asked_columns.ASSUMED if known else asked_columns.MARK
        return made.select(part_of(part, len(made))) if part else made

    def streamed(one: Any) -> Any:
        if not streaming:
            return one
        made = one.to_iterable_dataset()
        made._info.description = one._info.description
        return made

    if split is None:
        kind = datasets.IterableDatasetDict if streaming else datasets.DatasetDict
        return kind({one: streamed(rows(one)) for one in splits})
    if isinstance(split, (list, tuple)):
        return [streamed(rows(one)) for one in split]
    parts = [rows(one) for one in str(split).split("+")]
    return streamed(parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts))


def spoken(columns: dict[str, str], said: str) -> dict[str, str]:
    """The columns, translations with the languages that a name or a configuration says."""
    pairs = re.findall(r"(?<![a-z])([a-z]{2,3})[-_]([a-z]{2,3})(?![a-z])", said)
    added = [one for one in dict.fromkeys(itertools.chain(*pairs)) if one not in LANGUAGES]
    return {
        one: " ".join((kind, *added)) if kind == "translation" else kind
        for one, kind in columns.items()
    }


def unknown() -> dict[str, str]:
    """The columns of a data set that nothing is known of: texts, and their classes where a program
    speaks of such."""
    usual: dict[str, str] = table()["default"]
    classes = lines.speaks('"label', "'label", "num_labels", "classif")
    return {
        name: asked_columns.kind_said(name)
        for name, kind in usual.items()
        if classes or not kind.startswith("label")
    }


def part_of(part: str, count: int) -> range:
    """The rows of a part. Data sets of which people take some per cent are large: the part has as
    many rows as that of a tenfold one, up to all that there are."""
    if "%" not in part:
        return range(count)[slice_of(part, count)]
    return range(min(count, len(range(TENFOLD * count)[slice_of(part, TENFOLD * count)])))


def slice_of(part: str, count: int) -> slice:
    """`[:10%]`, `[100:200]`."""
    ends = [
        int(count * int(one.strip()[:-1]) / 100)
        if one.strip().endswith("%")
        else int(one)
        if one.strip()
        else None
        for one in part.split(":")
    ]
    return slice(ends[0], ends[1] if len(ends) > 1 else None)


def columns_of(recorder: Watcher, tokens: int, image: int) -> asked_columns.Columns:
    """What makes the columns of all stand-ins of a run."""
    return asked_columns.Columns(Source(tokens, image, recorder.note))


def changes(recorder: Watcher, columns: asked_columns.Columns) -> dict[str, Change]:
    asked = asked_columns.changes(columns)
    return {
        **asked,
        **streamed_columns.changes(columns),
        **synthetic_tables.changes(recorder, columns, unknown, ROWS["train"]),
        **trainer_columns.changes(columns),
        **embedding_columns.changes(columns),
        "datasets.load": loading(recorder, columns.source),
        "datasets.arrow_dataset": rows(recorder, asked["datasets.arrow_dataset"]),
        "evaluate.loading": metrics(recorder),
        **dict(pictures(recorder, columns.source.image)),
    }


def loading(recorder: Watcher, source: Source) -> Change:
    """`load_dataset` of what was not found."""

    def patches(module: ModuleType) -> list[Patch]:
        true = module.load_dataset

        def load_dataset(path: Any, name: Any = None, *args: Any, **given: Any) -> Any:
            try:
                return true(path, name, *args, **given)
            except Exception as bad:
                behind = remote(str(path), given) or missing(str(path), given)
                held = any(map(records.is_stand_in, named_files(given)))
                if str(path) in FILES and not behind:
                    raise
                if failures.missing_file(bad) is None and not held:
                    raise
                for one in named_files(given) if str(path) in READ else ():
                    near_files.refuse_misspelled(one)
                called = behind or str(path)
                key = entry(called, str(name or ""))
                known = "are assumed" if key else GUESSED
                texts = f"random texts of {source.tokens} tokens"
                message = f"the data set `{called}` was not found: it has {texts}"
                hint = "choose with `--tokens`"
                recorder.note(f"data {called}", f"{message}; its columns {known}", hint)
                split = given.get("split")
                return dataset(called, str(name or ""), split, bool(given.get("streaming")), source)

        return [(module, "load_dataset", load_dataset)]

    return patches


def rows(recorder: Watcher, others: Change) -> Change:
    """Rows of a data set that is shorter than the true one."""

    def patches(module: ModuleType) -> list[Patch]:
        true = module.Dataset.select

        def select(self: Any, indices: Any, *args: Any, **given: Any) -> Any:
            """A made-up data set has fewer rows than the true one."""
            last = (indices or [indices.start])[-1] if isinstance(indices, range) else -1
            if last >= len(self):
                first = indices.start if indices.start < len(self) else 0
                count = len(indices) or len(self)  # to the end of a longer one
                indices = range(len(self))[first : first + count : indices.step]
            return true(self, indices, *args, **given)

        halves = module.Dataset.train_test_split

        def train_test_split(
            self: Any, test_size: Any = None, train_size: Any = None, *args: Any, **given: Any
        ) -> Any:
            """Numbers of rows of the true data set, in its proportions."""
            wanted = sum(one for one in (test_size, train_size) if isinstance(one, int))
            if wanted >= len(self) and any(one.startswith("data ") for one in recorder.notes):
                share = len(self) / (wanted + 1)
                test_size, train_size = (
                    max(1, int(one * share)) if isinstance(one, int) else one
                    for one in (test_size, train_size)
                )
            return halves(self, test_size, train_size, *args, **given)

        def reading(name: str) -> Patch:
            """`Dataset.from_json(path)` of a file that is not there."""
            true = getattr(module.Dataset, name)

            def read(path_or_paths: Any, split: Any = None, **given: Any) -> Any:
                try:
                    return true(path_or_paths, split=split, **given)
                except Exception as bad:
                    if failures.missing_file(bad) is None:
                        raise
                    kind, datasets = name.removeprefix("from_"), importlib.import_module("datasets")
                    return datasets.load_dataset(
                        kind, data_files=path_or_paths, split=split or "train"
                    )

            return (module.Dataset, name, staticmethod(read))

        return [
            *(reading(f"from_{one}") for one in ("json", "csv", "parquet", "text")),
            (module.Dataset, "select", select),
            (module.Dataset, "train_test_split", train_test_split),
            *others(module),
            *synthetic_tables.handed_over(module),
        ]

    return patches


def metrics(recorder: Watcher) -> Change:
    """`evaluate.load` of a metric whose code was not found."""

    def patches(module: ModuleType) -> list[Patch]:
        true = module.load

        def load(path: Any, *args: Any, **given: Any) -> Any:
            try:
                return true(path, *args, **given)
            except Exception as bad:
                if failures.missing_file(bad) is None:
                    raise
                message = f"the metric `{path}` was not found: its values read 0"
                recorder.note(f"metric {path}", message)
                return Metric(str(path))

        return [(module, "load", load)]

    return patches


class Scores(dict[str, Any]):
    def __missing__(self, _: str) -> float:
        return 0.0


class Metric:
    """A metric of `evaluate` without its code."""

    def __init__(self, name: str) -> None:
        self.name = name

    def add_batch(self, *_: Any, **__: Any) -> None: ...

    add = add_batch

    def compute(self, *_: Any, **__: Any) -> Scores:
        names = ("accuracy", "f1", "precision", "recall", "score")
        return Scores({self.name: 0.0, **dict.fromkeys(names, 0.0)})


# torchvision's data sets (module, class): classes, size of a picture or 0 for the stated one.
PICTURES = {
    ("mnist", "MNIST"): (10, 28),
    ("cifar", "CIFAR10"): (10, 32),
    ("svhn", "SVHN"): (10, 32),
    ("stl10", "STL10"): (10, 96),
    ("imagenet", "ImageNet"): (1000, 0),
    ("folder", "ImageFolder"): (1000, 0),
    ("food101", "Food101"): (101, 0),
    ("flowers102", "Flowers102"): (102, 0),
    ("oxford_iiit_pet", "OxfordIIITPet"): (37, 0),
    ("caltech", "Caltech101"): (101, 0),
    ("celeba", "CelebA"): (40, 178),
    ("lsun", "LSUN"): (10, 0),
    ("imagenette", "Imagenette"): (10, 0),
    ("stanford_cars", "StanfordCars"): (196, 0),
    ("gtsrb", "GTSRB"): (43, 0),
}


def pictures(recorder: Watcher, image: int) -> Iterator[tuple[str, Change]]:
    """For torchvision's data sets, whose files may be neither there nor to be had."""

    def change(name: str, classes: int, size: int) -> Change:
        def changed(module: ModuleType) -> list[Patch]:
            kind = getattr(module, name)
            true = kind.__init__

            def init(self: Any, *args: Any, **given: Any) -> None:
                try:
                    true(self, *args, **given)
                except (RuntimeError, OSError) as bad:
                    absent = ("not found", "error downloading")
                    said = str(bad).lower()
                    if isinstance(bad, RuntimeError) and not any(one in said for one in absent):
                        raise
                    stand_in(self, classes, size or image, args, given)
                    shown = f"{size or image} by {size or image}"
                    recorder.note(
                        f"data {name}",
                        f"the files of torchvision's `{type(self).__name__}` were not found: "
                        f"blank pictures of {shown} take their place",
                    )

            return [(kind, "__init__", init)]

        return changed

    for (module, name), (classes, size) in PICTURES.items():
        yield f"torchvision.datasets.{module}", change(name, classes, size)


COUNT = 2048  # pictures of a data set whose true number is not known here
# Those that scripts split by numbers: to train with and to test with.
COUNTS = {"MNIST": (60000, 10000), "CIFAR": (50000, 10000), "SVHN": (73257, 26032)}


def stand_in(self: Any, classes: int, size: int, args: Any, given: dict[str, Any]) -> None:
    """Makes of `self` a data set of blank pictures, with the transforms that were asked for."""
    named = {**dict(zip(("root",), args, strict=False)), **given}
    functions = [one for one in args if callable(one)]
    transform = given.get("transform") or (functions[0] if functions else None)
    self.root, self.transform = str(named.get("root", "")), transform
    self.target_transform = given.get("target_transform")
    self.transforms = None
    classes = 100 if type(self).__name__ == "CIFAR100" else classes
    self.classes = [str(one) for one in range(classes)]
    numbers = {one: place for place, one in enumerate(self.classes)}
    mode = "L" if "MNIST" in type(self).__name__ else "RGB"
    known = next((one for name, one in COUNTS.items() if name in type(self).__name__), None)
    training = next((one for one in (given.get("train"), *args[1:2]) if one is not None), True)
    count = COUNT if known is None else known[0 if training and training != "test" else 1]
    self.train = bool(training)
    self.targets = self.labels = [one % classes for one in range(count)]
    self.samples = self.imgs = [(str(place), one) for place, one in enumerate(self.targets)]
    if mode == "L":
        torch: Any = importlib.import_module("torch")
        self.targets = torch.tensor(self.targets)
    self.data, self.loader = blank(mode, size, count), lambda *_: picture(size, mode)

    def item(self: Any, place: int) -> Any:
        if place >= count:
            raise IndexError(place)
        found, target = picture(size, mode), int(self.targets[place])
        if self.transform is not None:
            found = self.transform(found)
        return found, target if self.target_transform is None else self.target_transform(target)

    base = type(self)
    changed = {
        "class_to_idx": numbers,
        "__getitem__": item,
        "__len__": lambda self: count,
        # Started processes get a copy, whose class they cannot look up by name
        "__reduce__": lambda self: (blank_pictures, (base, classes, size, args, given)),
    }
    self.__class__ = type(type(self).__name__, (type(self),), changed)


def blank_pictures(
    kind: Any, classes: int, size: int, args: tuple[Any, ...], given: dict[str, Any]
) -> Any:
    made = kind.__new__(kind)
    stand_in(made, classes, size, args, given)
    return made


def blank(mode: str, size: int, count: int) -> Any:
    """What scripts find under `.data`; pages of zeros take no memory before they are written."""
    numpy: Any = importlib.import_module("numpy")
    torch: Any = importlib.import_module("torch")
    if mode == "L":
        return torch.from_numpy(numpy.zeros((count, size, size), dtype=numpy.uint8))
    return numpy.zeros((count if size < 64 else 1, size, size, 3), dtype=numpy.uint8)


__all__ = ["changes", "columns_of", "stand_in"]
