"""A failed program's exception as one message for its user."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinMethodType, TracebackType
from typing import Any
from urllib.parse import urlsplit

from memfit.errors import Problem
from memfit.trace import absent_paths, lines
from memfit.trace.cuda import HERE, NoSuchDevice
from memfit.trace.imports import ORIGINALS
from memfit.trace.missing_weights import UNSIZED
from memfit.trace.unused_packages import TAKEN, Kind

SPREAD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
HUB = (
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
    "HfHubHTTPError",
    "RepositoryNotFoundError",
    "GatedRepoError",
    "ConnectionError",
    "ConnectError",
    "ConnectTimeout",
    "EntryNotFoundError",
    "OfflineModeError",
    "DatasetNotFoundError",
    "MaxRetryError",
    "HFValidationError",  # raised for the path of a missing folder
)
UNREACHABLE = (
    "couldn't connect",
    "couldn't reach",
    "can't load",
    "offline",
    "is not a local folder",
    "name resolution",
    "urlopen error",
)
PACKAGES = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}  # where it has another name on PyPI
# What transformers says of a tokenizer that only a package knows which is not installed
# (auto_factory.py and tokenization_auto.py, 5.23).
UNKNOWN_TOKENIZER = "to build an AutoTokenizer"
# By `requests`, urllib3, httpx and urllib
DOWNLOADS = ("ConnectionError", "MaxRetryError", "ConnectError", "URLError", "NameResolutionError")
HUBS = ("huggingface.co", "hf.co")  # whose clients have ways of their own
SHOW = "`--show-output`, before the script, shows its traceback and what it printed"
ANOTHER = "choose an environment with the version that the script was written for: `--python`"
ELSEWHERE = "use a local folder, or run it once with a network to fill the cache"


def explain(bad: BaseException, script: str, where: str, archives: Sequence[str] = ()) -> Problem:
    for rule in RULES:
        found = rule(bad, script)
        if found is not None:
            return Problem(message=found[0], where=where, hint=found[1])
    text = first_line(bad)
    if archives and lacks_file(bad):
        lost = f"probably from `{archives[-1]}`, which was not downloaded"
        hint = "unpack it where the script looks for its files, or let it download with `--network`"
        return Problem(message=f"`{script}` lacks a file, {lost}: {text}", where=where, hint=hint)
    return Problem(
        message=f"`{script}` failed with {type(bad).__name__}" + (f": {text}" if text else ""),
        where=where,
        hint=SHOW,
    )


Told = tuple[str, str] | None
# Errors that memfit's stand-ins never raise on purpose, but for these sentences of torch's.
DEFECTS = (AttributeError, TypeError, IndexError, AssertionError, NameError, UnboundLocalError)
MEANT = ("can't convert",)


def stand_in(bad: BaseException, script: str) -> Told:
    """A defect of ours is no fault of the script."""
    at = bad.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None or not isinstance(bad, DEFECTS) or str(bad).startswith(MEANT):
        return None
    name, number = at.tb_frame.f_code.co_filename, at.tb_lineno
    if not name.startswith(lines.OWN) or handed_on(at):
        return None
    place = f"{name.removeprefix(lines.OWN).lstrip('/')}:{number}"
    return (
        f"memfit's stand-in failed with {type(bad).__name__}: {first_line(bad)} ({place})",
        f"this is a bug in memfit, not in `{script}`: please report it",
    )


def same(one: Any, other: Any) -> bool:
    """Methods of C code are made again at every look."""
    return one is other or (isinstance(one, BuiltinMethodType) and bool(one == other))


def handed_on(at: TracebackType) -> bool:
    """Whether what raised is a function that a stand-in calls for the script: an operator of
    torch's, the function that it takes the place of, or one of the script."""
    called = lines.called(at)
    if called is None:
        return False
    code = getattr(called, "__code__", None)
    return (
        type(called).__name__ in ("OpOverload", "OpOverloadPacket")
        or any(same(called, one) for one in ORIGINALS.values())
        or (code is not None and lines.is_users(code.co_filename))
    )


# A module that is loaded late, in transformers' and TRL's words.
LAZY = re.compile(r"^Failed to import .*No module named '([\w.]+)'", re.DOTALL)


def missing_package(bad: BaseException, script: str) -> Told:
    who = f"`{script}`"
    if UNKNOWN_TOKENIZER in str(bad) and not is_there("sentencepiece"):
        return needed(who, "sentencepiece")
    if TAKEN and re.search(rf"\b{Kind.__name__}\b", str(bad)):  # as torch names what it refuses
        return needed(who, TAKEN[-1])
    lazy = LAZY.search(str(bad)) if isinstance(bad, RuntimeError) else None
    if lazy and not is_there(lazy[1].partition(".")[0]):
        return needed(who, lazy[1].partition(".")[0])
    return lacking(bad, who) if isinstance(bad, ImportError) else None


def lacking(bad: ImportError, who: str) -> tuple[str, str]:
    """Python names the package; transformers' own checks do so in words (utils/import_utils.py
    `requires_backends`)."""
    found = re.search(r"requires the (\S+) library", str(bad))
    name = (
        bad.name.partition(".")[0]
        if isinstance(bad, ModuleNotFoundError) and bad.name
        else found[1]
        if found
        else ""
    )
    if name and isinstance(bad, ModuleNotFoundError) and bad.name != name and is_there(name):
        return (
            f"{who} needs `{bad.name}`, which the installed `{name}` does not have",
            f"install another version of `{name}`, or choose an environment with `--python`",
        )
    if name:
        return needed(who, name)
    lost = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(bad))
    if lost and (version := installed(lost[2])):
        return f"{who} imports `{lost[1]}` from `{lost[2]}`, which {version} does not have", ANOTHER
    return (
        f"{who} failed with ImportError: {first_line(bad)}",
        "`--python` chooses another environment",
    )


def installed(module: str) -> str:
    """A module's package and its version, or nothing where it is the user's own."""
    name = module.partition(".")[0]
    try:
        version = importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
    return "" if name == "memfit" else f"the installed {name} {version}"


def other_version(bad: BaseException, script: str) -> Told:
    """What a script asks of a package that was once there, or is not yet."""
    if "are not used by the HfArgumentParser" in str(bad):  # transformers, hf_argparser.py
        return f"`{script}` failed: {first_line(bad)}", ANOTHER
    at = inner = user = bad.__traceback__
    while at is not None:
        if lines.is_users(at.tb_frame.f_code.co_filename):
            user = at
        inner, at = at, at.tb_next
    if user is None or inner is None or not lines.is_users(user.tb_frame.f_code.co_filename):
        return None
    passed = re.search(r"unexpected keyword argument '(\w+)'", str(bad))
    lost = re.match(r"module '?([\w.]+)'? has no attribute '?(\w+)", str(bad))
    if isinstance(bad, TypeError) and passed:
        if inner is not user and not lines.speaks(f"{passed[1]}=".lower()):
            return None  # one library to another
        called = lines.called(user) if inner is user else None
        module = str(getattr(called, "__module__", inner.tb_frame.f_globals.get("__name__")))
        what = f"passes `{passed[1]}` to"
        owner = getattr(called, "__name__", str(bad).partition("(")[0])
    elif isinstance(bad, AttributeError) and lost:
        what, owner, module = f"uses `{lost[2]}` of", lost[1], lost[1]
    elif isinstance(bad, AttributeError):
        code = inner.tb_frame.f_code.co_name
        if inner is not user and code not in ("__getattr__", "__getattribute__"):
            return None
        asked = bad.obj if inner is user else inner.tb_frame.f_locals.get("self")
        kind = asked if isinstance(asked, type) else type(asked)
        name = str(bad).rpartition(" ")[2].strip("'")
        what = f"uses `{name}` of"
        owner, module = kind.__name__, kind.__module__
    else:
        return None
    version = installed(module)
    message = f"`{script}` {what} `{owner}`, which {version} does not know"
    return (message, ANOTHER) if version else None


def needed(who: str, package: str) -> tuple[str, str]:
    known = f" (`pip install {PACKAGES[package]}`)" if package in PACKAGES else ""
    hint = f"install it{known}, or choose an environment that has it with `--python`"
    return f"{who} needs the package `{package}`, which is not installed here", hint


def is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def no_such_device(bad: BaseException, script: str) -> Told:
    if not isinstance(bad, NoSuchDevice):
        return None
    if bad.index < HERE.count:
        return (
            f"`{script}` uses `cuda:{bad.index}` in the process of `cuda:{HERE.index}`",
            "a trace follows one process on one GPU",
        )
    return (
        f"`{script}` uses `cuda:{bad.index}`, but a trace has one GPU, `cuda:0`",
        "a trace runs one process on one GPU",
    )


def no_path(bad: BaseException, script: str) -> Told:
    path = absent_paths.asserted(bad)
    hint = "put it there; a small one of the same shape will do"
    return (f"`{script}` asserts that `{path}` exists, and it does not", hint) if path else None


def ended(bad: BaseException, script: str) -> Told:
    if not isinstance(bad, SystemExit):
        return None
    how = (
        "by itself"
        if not bad.code
        else f"with code {bad.code}"
        if isinstance(bad.code, int)
        else f"with `{str(bad.code)[:120]}`"
    )
    arguments = "put its arguments after the script and memfit's options before it"
    # Parsers of arguments end with 2 (argparse, click); Hydra ends with 1 whatever has failed
    failed = isinstance(bad.code, int) and bad.code not in (0, 2)
    return f"`{script}` ended {how} before its first training step", SHOW if failed else arguments


def asks(bad: BaseException, script: str) -> Told:
    return (
        (f"`{script}` reads input from the terminal", "pass it as an argument")
        if isinstance(bad, EOFError)
        else None
    )


def several(bad: BaseException, script: str) -> Told:
    if isinstance(bad, KeyError) and bad.args and bad.args[0] in SPREAD:
        return (
            f"`{script}` expects several processes: `{bad.args[0]}` is not set",
            "`--ranks N` runs it as one of N, or `memfit trace -- torchrun …`",
        )
    return None


def download(bad: BaseException, script: str) -> Told:
    """What the script fetches by itself, by the address in the frames that failed."""
    chain = [*causes(bad)]
    if not any(type(one).__name__ in DOWNLOADS for one in chain):
        return None
    addresses = [found for one in chain for found in urls(one.__traceback__)]
    hosts = [(urlsplit(one).hostname or "") for one in addresses]
    if not addresses or hosts[0].endswith(HUBS):
        return None
    return (
        f"`{script}` downloads `{addresses[0][:100]}`, which is unreachable",
        "put the file where the script looks for it, or let it download with `--network`",
    )


def causes(bad: BaseException) -> Iterator[BaseException]:
    """An exception and what it came from, which libraries wrap in errors of their own."""
    at: BaseException | None = bad
    for _ in range(12):
        if at is None:
            return
        yield at
        at = at.__cause__ or at.__context__


def urls(trace: TracebackType | None) -> Iterator[str]:
    while trace is not None:
        for name in ("url", "fullurl", "URL"):
            value = trace.tb_frame.f_locals.get(name)
            value = getattr(value, "full_url", value)
            if isinstance(value, str) and value.startswith("http"):
                yield value
        trace = trace.tb_next


def hub(bad: BaseException, script: str) -> Told:
    for at in causes(bad):
        text = str(at)
        if (
            type(at).__name__ in HUB
            or "couldn't connect to" in text.lower()
            or ("Can't load" in text and "from_pretrained" in text)
        ):
            name = repository(bad)
            if is_path(name):
                message = f"`{script}` loads the folder `{name}`, which was not found"
                return message, "give the path of the folder, or the model's name on the hub"
            named = f"`{name}`" if name else "something"
            return (
                (
                    f"`{script}` needs {named} from the hub, which is unreachable, and it is "
                    "not in the cache"
                ),
                ELSEWHERE,
            )
    return None


def missing_file(bad: BaseException) -> BaseException | None:
    """Where in the chain of causes something was not to be had, from a disk or a network."""
    for at in causes(bad):
        text = str(at).lower()
        if (
            isinstance(at, (FileNotFoundError, ConnectionError, TimeoutError))
            or type(at).__name__ in HUB
            or any(word in text for word in UNREACHABLE)
        ):
            return at
    return None


def is_path(name: str) -> bool:
    """Whether a model is named by a folder; the hub has an owner and a name at most."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def repository(bad: BaseException) -> str:
    """What was asked for, by the arguments of the functions that the exception came through: its
    text does not say."""
    trace = bad.__traceback__
    while trace is not None:
        for name in ("pretrained_model_name_or_path", "path_or_repo_id", "repo_id"):
            value = trace.tb_frame.f_locals.get(name)
            if isinstance(value, str) and value:
                return value[:100]
        trace = trace.tb_next
    found = re.search(r"['`]([\w.-]+/[\w.-]+)['`]", str(bad))
    return found[1] if found else ""


def custom_operator(bad: BaseException, script: str) -> Told:
    text = str(bad) if isinstance(bad, (NotImplementedError, RuntimeError)) else ""
    found = re.search(r"\b(\w+::\w+)", text) if "Meta" in text or "backend" in text else None
    if found is None or found[1].startswith(
        ("aten::", "prim::", "c10::", "at::", "torch::", "std::")
    ):
        return None
    hint = "register a fake implementation with `torch.library.register_fake`"
    return f"the operator `{found[1]}` runs on real GPUs only", hint


def no_values(bad: BaseException, script: str) -> Told:
    text = str(bad)
    if (
        "meta tensor" in text
        or ("Meta" in text and "aten::" in text)
        or "data-dependent" in text
        or "data-independent" in text
        or "DynamicOutputShape" in type(bad).__name__
    ):
        sized = (
            any(word in text for word in ("nonzero", "data-dependent", "data-independent"))
            or "DynamicOutputShape" in type(bad).__name__
        )
        hint = (
            "they set the size of a result (`nonzero`, `unique`)"
            if sized
            else f"{type(bad).__name__}: {first_line(bad)}"
        )
        return "the script depends on values that a trace does not compute", hint
    return None


def no_data(bad: BaseException, script: str) -> Told:
    """An array or a tensor that a missing file would hold."""
    if not re.search(r"\(got Checkpoint\)|not '?Checkpoint'?\b", str(bad)):
        return None
    return (
        f"`{script}` needs the data of a file that was not found",
        "put a small file of the same shapes where the script loads it",
    )


def no_file(bad: BaseException, script: str) -> Told:
    if not isinstance(bad, FileNotFoundError) or not bad.filename:
        return None
    hint = "put one there: a few rows or pictures as long or large as yours are enough"
    return f"`{script}` reads `{str(bad.filename)[:100]}`, which is not there", hint


def lacks_file(bad: BaseException) -> bool:
    """Whether the disk lacks a file, or an archive does in the words of zipfile and tarfile; a
    folder that is renamed to another one's name fails with FileExistsError."""
    kinds = (FileNotFoundError, FileExistsError, NotADirectoryError)
    in_archive = isinstance(bad, KeyError) and re.search(r"in the archive|not found", str(bad))
    return isinstance(bad, kinds) or bool(in_archive)


def no_sizes(bad: BaseException, script: str) -> Told:
    """torch's own sentence, where it reads a size in C++."""
    return UNSIZED if "found element of type Checkpoint" in str(bad) else None


def first_line(bad: BaseException) -> str:
    """The first line of an error, and the next one where the first ends with a colon."""
    rows = [one.strip() for one in str(bad).strip().splitlines() if one.strip()]
    found = " ".join(rows[: 2 if rows and rows[0].endswith(":") else 1])
    return found[:240].rstrip(". ")


RULES: tuple[Callable[[BaseException, str], Told], ...] = (
    no_such_device,
    stand_in,
    missing_package,
    other_version,
    ended,
    asks,
    several,
    download,
    hub,
    custom_operator,
    no_values,
    no_sizes,
    no_data,
    no_path,
    no_file,
)
__all__ = ["explain"]
