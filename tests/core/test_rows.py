"""Lines of published figures: what counts as a number, a size or a name, and where limits lie."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from memfit.errors import InputError
from memfit.truth.case import Refused
from memfit.truth.rows import Row, count, number, read_rows, row, served

MIB = 2**20


def one(**fields: Any) -> Row:
    return Row(id="a", source="b", **fields)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (1, 1.0),
        (-2.5, -2.5),
        (0, 0.0),
        (True, None),
        ("1", None),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        (10**400, None),
    ],
)
def test_a_number_is_finite_and_no_text(value: Any, found: float | None) -> None:
    assert number(value) == found


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (1, 1),
        (0, None),
        (-1, None),
        (8.0, 8),
        (8.5, None),
        (False, None),
        (" 16 ", 16),
        ("1e3", None),
        ("-4", None),
        (2**40 - 1, 2**40 - 1),
        (2**40, None),
        ("0" * 18 + "7", 7),
        ("0" * 19 + "7", None),
    ],
)
def test_a_count_is_positive_and_whole(value: Any, found: int | None) -> None:
    assert count(value) == found


@pytest.mark.parametrize(
    ("unit", "power"),
    [
        ("bytes", 1),
        ("B", 1),
        ("kB", 10**3),
        ("MB", 10**6),
        ("GB", 10**9),
        ("TB", 10**12),
        ("KiB", 2**10),
        ("MiB", 2**20),
        ("GiB", 2**30),
        ("TiB", 2**40),
    ],
)
def test_units_are_decimal_or_binary_by_their_name(unit: str, power: int) -> None:
    assert one(value=3, unit=unit, value_gib=5).bytes == 3 * power


def test_a_value_without_a_unit_is_taken_from_its_gib() -> None:
    assert one(value=3, unit="tokens", value_gib=1.5).bytes == 3 * 2**29
    assert one(value=3, unit=None, value_gib=None).bytes is None
    assert one(value=None, unit="GiB", value_gib=2).bytes == 2**31


def test_a_size_is_no_less_than_nothing_and_no_more_than_an_exbibyte() -> None:
    assert one(value=2**60, unit="bytes").bytes == 2**60
    assert one(value=2**60 + 2**10, unit="bytes").bytes is None
    assert one(value=0, unit="bytes").bytes == 0
    assert one(value=-1, unit="bytes").bytes is None
    assert one(value=0.6, unit="bytes").bytes == 1


def test_texts_are_joined_in_small_letters_up_to_a_length() -> None:
    assert one(engine="TRL", notes="A B").text("engine", "gpu", "notes") == "trl a b"
    assert one(notes="X" * 3999 + "yz").text("notes") == "x" * 3999 + "y"


@pytest.mark.parametrize(
    ("source", "origin"),
    [
        ("owner/name:path/file.csv line 3", "owner/name"),
        ("owner/name@abc:path", "owner/name"),
        ("A page (read in May)", "A page"),
        (":nothing", "unnamed"),
        ("x" * 61, "x" * 60),
    ],
)
def test_an_origin_is_a_repository_or_the_first_words(source: str, origin: str) -> None:
    assert Row(id="a", source=source).origin == origin


@pytest.mark.parametrize(
    ("fields", "vary"),
    [
        ({"seq": "variable, see notes"}, True),
        ({"seq": "mean 3234.4 tokens"}, True),
        ({"extra": {"mean_tokens_per_sample": 7}}, True),
        ({"notes": "variable"}, False),
        ({"seq": "invariable"}, False),
        ({"seq": 4096, "extra": {"tokens": 7}}, False),
    ],
)
def test_lengths_vary_where_the_length_itself_says_so(fields: dict[str, Any], vary: bool) -> None:
    assert one(**fields).lengths_vary is vary


def test_extra_is_asked_by_its_keys() -> None:
    assert one(extra={"plugin": "x"}).more("plugin") == "x"
    assert one(extra={"plugin": "x"}).more("other") is None
    assert one(extra=["plugin"]).more("plugin") is None


def test_names_are_cut_and_a_line_without_one_is_called_by_its_place() -> None:
    def read(**fields: Any) -> Row:
        found = row(json.dumps(fields).encode(), 7)
        assert isinstance(found, Row)
        return found

    assert read(id="i" * 81, source="s" * 401) == Row(id="i" * 80, source="s" * 400)
    assert read(id=0, unknown=1) == Row(id="0", source="unnamed")
    assert [read(id=name).id for name in ("", None, [1])] == ["line 7"] * 3
    assert row(b"[1]", 7) == Refused(
        id="line 7", source="?", reason="no JSON object", detail="list"
    )
    broken = row(b"{", 7)
    assert isinstance(broken, Refused)
    assert (broken.id, broken.reason) == ("line 7", "no JSON")


def test_a_log_of_an_engine_is_no_row() -> None:
    assert served(b'{"figures": {}}')
    assert not served(b'{"figures": 3}')
    assert not served(b'{"figures": {')
    assert not served(b'{"metric": {}}')


def test_a_line_may_have_a_mebibyte_and_a_file_256(tmp_path: Path) -> None:
    line = json.dumps({"id": "a"}).encode().ljust(MIB - 1) + b"\n"
    plain = tmp_path / "rows.jsonl"
    plain.write_bytes(line + b"\n" + line)
    assert [found.id for found in read_rows(plain)] == ["a", "a"]
    plain.write_bytes(b"\n" + b" " + line)
    with pytest.raises(InputError, match=r"line 2 of `rows.jsonl` is too long"):
        list(read_rows(plain))
    whole = gzip.compress(b" " * (MIB - 1) + b"\n", 1) * 256  # members of one file
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(whole + gzip.compress(b"\n"))
    with pytest.raises(InputError, match=r"line 257 of `rows.jsonl.gz` is too long"):
        list(read_rows(packed))  # not line 256, which ends where the limit does


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    cut = tmp_path / "rows.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"id": "a"}\n')[:-4])
    for path in (cut, tmp_path / "none.jsonl"):
        with pytest.raises(InputError, match="cannot be read"):
            list(read_rows(path))
