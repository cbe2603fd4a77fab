"""How many tokens one line of a dataset has: a number, a list of token ids, a text, or the messages
of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from memfit.constants import counted, setting
from memfit.errors import InputError, MissingExtra, Problem
from memfit.lazy_dataclass import dataclass
from memfit.model.sources.files import typed_path

COUNTS = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "seq_len", "seq_length")
IDS = ("input_ids", "token_ids", "tokens")
TEXTS = ("text", "content")
# Columns that trainers join: TRL's prompt and completion, Alpaca's three, OpenAI's and ShareGPT's
# messages (TRL 1.16 docs, dataset_formats.md; LLaMA-Factory data/README.md).
JOINED = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("instruction", "input", "output"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
)
CHATS = ("messages", "conversations", "conversation")
SPOKEN = ("content", "value")  # of a message: OpenAI's key, and ShareGPT's
AROUND: Annotated[
    int,
    counted(
        "tokens of a message beside its content: start, role, newline, end, newline",
        "ChatML, as in the chat_template of Qwen/Qwen3-8B tokenizer_config.json",
    ),
] = 5
LIKE = 'write lines like `{"text": "…"}`'
ALIKE: Annotated[
    float, setting("likeness of two keys, one of which is probably a slip of the other")
] = 0.7


@dataclass(frozen=True, kw_only=True)
class Counting:
    """How a text becomes a number of tokens: by a tokenizer's file, or by its characters. `column`:
    the key of the text, where it is none of the known ones."""

    tokenizer: str = ""
    tokens_per_char: float = 0.0
    column: str = ""
    model: str = ""  # a local folder of the model may have a tokenizer

    def counter(self) -> Callable[[str], int]:
        return counter_of(self)

    def make(self) -> Callable[[str], int]:
        if self.tokens_per_char:
            rate = self.tokens_per_char
            return lambda text: max(1, round(len(text) * rate)) if text else 0
        if self.tokenizer:
            path = typed_path(self.tokenizer, "tokenizer")
            file = path / "tokenizer.json" if path.is_dir() else path
            if file.is_file():
                return of_tokenizer(file)
        elif (own := own_tokenizer(self.model)) is not None:
            return of_tokenizer(own)
        missing = f"`{self.tokenizer[:80]}` has no tokenizer.json" if self.tokenizer else ""
        raise InputError.one(
            missing or "the texts need a tokenizer, to be counted in tokens",
            where="tokenizer",
            hint="`--tokenizer tokenizer.json`, or `--tokens-per-char 0.25` (about right for "
            "English)",
        )


def own_tokenizer(model: str) -> Path | None:
    """That of a local model; what is wrong with the model's path is reported with the model."""
    if not model:
        return None
    try:
        path = typed_path(model)
    except InputError:
        return None
    file = path / "tokenizer.json" if path.is_dir() else path
    return file if file.name == "tokenizer.json" and file.is_file() else None


@lru_cache(maxsize=4)
def counter_of(counting: Counting) -> Callable[[str], int]:
    """A tokenizer is read once, not for each line."""
    return counting.make()


def of_tokenizer(file: Path) -> Callable[[str], int]:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtra(
            "a tokenizer", "trace", "`--tokens-per-char 0.25` needs no tokenizer"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    # The library raises a plain Exception for every broken file
    except Exception as error:  # noqa: BLE001
        raise InputError.one(
            f"`{file}` is not a tokenizer: {str(error)[:80]}",
            where="tokenizer",
            hint="give the `tokenizer.json` of the model",
        ) from None
    # A stored limit would cut or fill up every text
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(text: str) -> int:
        try:
            return len(tokenizer.encode(text).ids)
        except (TypeError, UnicodeError):  # half of a surrogate pair, as "\ud83d" in JSON
            raise bad("the text is not valid Unicode", "remove the line, or save it anew") from None

    return count


def length_of(line: str, counting: Counting) -> int:
    """Tokens of a line; 0 for an empty text or null."""
    if line[0] in '{["':
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise bad("this is not valid JSON", "each line must be one JSON object") from None
        if isinstance(value, dict):
            return of_row(value, counting)
        if isinstance(value, str):
            return of_value(value, counting)
        if all(type(one) is int for one in value):
            return len(value)
        raise bad("this is not a JSON object", LIKE)
    return 0 if line == "null" else number(line)


def number(line: str) -> int:
    try:
        value = int(line)
    except ValueError:
        raise bad(
            f"`{line[:40]}` is not a length", "each line is an integer, or a JSON object"
        ) from None
    return in_range(value)


def in_range(value: int) -> int:
    if value < 1:
        raise bad("a length must be at least 1 token", "remove the line")
    if value >= 2**32:
        raise bad("a length must be below 2^32 tokens", "one text a line")
    return value


def of_row(row: Mapping[str, Any], counting: Counting) -> int:
    if counting.column:
        if counting.column not in row:
            raise bad(f"no key `{counting.column[:40]}`", f"it has {listed(row)}")
        return of_value(row[counting.column], counting)
    for name in (*COUNTS, *IDS):
        value = row.get(name)
        if type(value) is int:
            return in_range(value)
        if isinstance(value, list) and value and all(type(one) is int for one in value):
            return len(value)
    for name in (*CHATS, *TEXTS):
        if isinstance(row.get(name), (str, list)):
            return of_value(row[name], counting)
    for names in JOINED:
        if all(name in row for name in names):
            return sum(of_value(row[name], counting) for name in names)
    known = [name for name in (*COUNTS, *IDS, *CHATS, *TEXTS) if name in row]
    wrong = next((name for name in known if row[name] not in (None, [])), None)
    if wrong is not None:
        raise unusable(wrong)
    if known:
        return 0
    raise bad(f"no key with a text: it has {listed(row)}", likely(row))


def unusable(name: str) -> InputError:
    """A known key with a value of the wrong type."""
    if name in COUNTS:
        return bad(f"`{name}` is not an integer", 'write it like `{"length": 512}`')
    if name in IDS:
        return bad(f"`{name}` is not a list of token ids", 'write it like `{"input_ids": [1, 2]}`')
    return bad(f"`{name}` is neither a text nor messages", LIKE)


def of_value(value: Any, counting: Counting) -> int:
    """A text, ids, messages, or a number; null is an empty text."""
    if value is None:
        return 0
    if isinstance(value, str):
        return counting.counter()(value) if value else 0
    if type(value) is int:
        return in_range(value)
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        return len(value)
    if isinstance(value, list):
        return sum(of_message(one, counting) for one in value)
    raise bad(f"`{str(value)[:40]}` is neither a text nor messages", LIKE)


def of_message(message: Any, counting: Counting) -> int:
    if isinstance(message, Mapping):
        for name in SPOKEN:
            said = message.get(name)
            if isinstance(said, str):
                return AROUND + counting.counter()(said)
            if isinstance(said, list):  # parts of a message; images have no text
                pieces = [part.get("text") for part in said if isinstance(part, Mapping)]
                return AROUND + sum(
                    counting.counter()(one) for one in pieces if isinstance(one, str)
                )
            if name in message and said is None:  # a call of a tool
                return AROUND
    raise bad(
        f"`{str(message)[:40]}` is not a message", 'write it like `{"role": …, "content": …}`'
    )


def likely(row: Mapping[str, Any]) -> str:
    """Which key was probably meant."""
    known = (*COUNTS, *IDS, *TEXTS, *CHATS)
    for name in row:
        close = get_close_matches(str(name).lower(), known, 1, ALIKE)
        if close:
            return f"did you mean `{close[0]}`? `--text-key {str(name)[:40]}` reads it as it is"
    texts = {name: len(value) for name, value in row.items() if isinstance(value, str)}
    if texts:
        longest = max(texts, key=lambda name: texts[name])
        return f"`{str(longest)[:40]}` has the longest text: `--text-key {str(longest)[:40]}`"
    return "name it with `--text-key`"


def listed(row: Mapping[str, Any]) -> str:
    names = [f"`{str(name)[:40]}`" for name in row]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or (
        "no keys"
    )


def bad(message: str, hint: str) -> InputError:
    return InputError(Problem(message=message, where="lengths", hint=hint))
