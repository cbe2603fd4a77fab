"""safetensors headers: what is read, what is refused, and that nothing but one clear error ever
comes out of a broken file."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.writers import packed, sharded

from memfit.errors import InputError, SourceError
from memfit.formats import FORMATS
from memfit.model.sources import safetensors
from memfit.model.sources.inventory import TensorInfo

TWO = {
    "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b.bias": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}


def reading(tmp_path: Path, content: bytes) -> tuple[TensorInfo, ...]:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    return safetensors.read_file(path)


def flaws(tmp_path: Path, content: bytes) -> list[str]:
    with pytest.raises(SourceError) as caught:
        reading(tmp_path, content)
    return [problem.message for problem in caught.value.problems]


def test_names_shapes_formats_and_bytes(tmp_path: Path) -> None:
    assert reading(tmp_path, packed({"__metadata__": {"format": "pt"}, **TWO})) == (
        TensorInfo(name="a.weight", shape=(2, 3), format="float32", bytes=24),
        TensorInfo(name="b.bias", shape=(4,), format="bfloat16", bytes=8),
    )


def test_scalars_and_empty_tensors_and_no_tensors_are_legal(tmp_path: Path) -> None:
    header = {
        "empty": {"dtype": "F16", "shape": [0, 7], "data_offsets": [0, 0]},
        "scalar": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
    }
    assert [tensor.bytes for tensor in reading(tmp_path, packed(header))] == [0, 8]
    assert reading(tmp_path, packed({})) == ()


def test_formats_below_a_byte(tmp_path: Path) -> None:
    header = {
        "four": {"dtype": "F4", "shape": [3, 4], "data_offsets": [0, 6]},
        "six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [6, 9]},
    }
    assert [(tensor.format, tensor.bytes) for tensor in reading(tmp_path, packed(header))] == [
        ("F4", 6),
        ("F6_E2M3", 3),
    ]
    header["six"]["shape"] = [3]
    assert "of F6_E2M3 needs 2 and a fraction" in flaws(tmp_path, packed(header))[0]


def test_every_dtype_with_a_row_in_formats_has_its_bytes() -> None:
    for dtype, (bits, name) in safetensors.DTYPES.items():
        if name in FORMATS:
            assert FORMATS[name].bits == bits, dtype
        else:
            assert name == dtype  # what has no row keeps its own name


def test_the_package_writes_what_we_read(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    save = pytest.importorskip("safetensors.numpy").save_file
    arrays = {
        "half": numpy.zeros((3, 5), dtype=numpy.float16),
        "scalar": numpy.array(1.0, dtype=numpy.float32),
        "bools": numpy.zeros((7,), dtype=bool),
        "empty": numpy.zeros((0, 4), dtype=numpy.int64),
        "bytes": numpy.zeros((9, 1), dtype=numpy.uint8),
    }
    save(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = {tensor.name: tensor for tensor in safetensors.read_file(tmp_path / "x.safetensors")}
    assert {name: (one.shape, one.bytes) for name, one in found.items()} == {
        name: (one.shape, one.nbytes) for name, one in arrays.items()
    }
    assert found["half"].format == "float16"


def test_no_more_than_the_header_is_read(tmp_path: Path) -> None:
    """A file whose data is a hole of 1 TiB, which could not be read in a lifetime of tests."""
    size = 2**40
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(
            packed({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}, data=0)
        )
        try:
            file.truncate(file.tell() + size)
        except OSError:
            pytest.skip("no sparse files of 1 TiB here")
    assert safetensors.read_file(path)[0].bytes == size


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\x01\x02", "has 2 bytes, too few for a safetensors file"),
        (bytes(8), "declares a header of 0 bytes, fewer than the"),
        (
            (2**31).to_bytes(8, "little") + b"{}",
            "a header of 2147483648 bytes, more than the format's limit of 100000000",
        ),
        ((2**63).to_bytes(8, "little"), "limit of 100000000"),
        (b"\xff" * 8, "limit of 100000000"),
        (
            (1000).to_bytes(8, "little") + b"{}",
            "a header of 1000 bytes, more than the file has (10)",
        ),
        (packed(b"[]", 0), "does not start with a brace"),
        (packed(b"{,}", 0), "` is not valid JSON:"),
        (packed(b"\x00" * 64, 0), "does not start with a brace"),
        (packed(b'{"a": \xff}', 0), "is not UTF-8 text: byte 0xff"),
        (packed(b'{"a":' * 5000, 0), "` is nested too deeply: more than"),
        (packed(b'{"a":1,"a":2}', 0), "key `a` is given twice in one object"),
        (packed(b'{"a":' + b"9" * 5000 + b"}", 0), "too many digits"),
    ],
)
def test_a_lying_or_broken_start_is_one_message(tmp_path: Path, content: bytes, said: str) -> None:
    messages = flaws(tmp_path, content)
    assert len(messages) == 1
    assert said in messages[0]


def entry(**changed: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changed}}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (entry(dtype="F31"), "unknown dtype `F31`"),
        (entry(dtype=None), "unknown dtype `None`"),
        (entry(dtype=["F32"]), "unknown dtype"),
        (entry(shape=[-2]), "has a shape that is not a list of sizes"),
        (entry(shape=[2.0]), "has a shape that is not a list of sizes"),
        (entry(shape=[True, 2]), "has a shape that is not a list of sizes"),
        (entry(shape="2"), "has a shape that is not a list of sizes"),
        (entry(shape=[1] * 33), "has a shape that is not a list of sizes"),
        (entry(shape=[2**63]), "has a shape that is not a list of sizes"),
        (entry(shape=[2**61, 2**61]), "of F32 needs more than 2"),
        (entry(shape=[3]), "has 8 bytes of data, but shape [3] of F32 needs 12"),
        (entry(data_offsets=[0]), "has `data_offsets` that are not an increasing pair"),
        (entry(data_offsets=[8, 0]), "has `data_offsets` that are not an increasing pair"),
        (entry(data_offsets=[-8, 0]), "has `data_offsets` that are not an increasing pair"),
        (entry(data_offsets=[0, 8, 16]), "has `data_offsets` that are not an increasing pair"),
        (entry(extra=1), "exactly `dtype`, `shape` and `data_offsets`"),
        ({"w": [1, 2]}, "exactly `dtype`"),
        ({"w": None}, "exactly `dtype`"),
        ({"__metadata__": {"a": 1}}, "`__metadata__` must be an object of strings"),
        ({"\ud800": entry()["w"]}, "` has an invalid character in its name"),
    ],
)
def test_a_bad_entry_is_named(tmp_path: Path, header: dict[str, Any], said: str) -> None:
    messages = flaws(tmp_path, packed(header, 8))
    assert len(messages) == 1
    assert said in messages[0]


def test_tensors_that_overlap_leave_holes_or_leave_the_file(tmp_path: Path) -> None:
    overlapping = {**entry(), "v": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}
    assert "`v` overlaps the previous one by 4 bytes" in flaws(tmp_path, packed(overlapping))[0]
    holed = {**entry(), "v": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}}
    assert "`v` leaves a gap of 8 bytes" in flaws(tmp_path, packed(holed))[0]
    assert flaws(tmp_path, packed(entry(), data=7)) == [
        "the file is truncated: its tensors take 8 bytes, and 7 follow the header"
    ]
    assert flaws(tmp_path, packed(entry(), data=9)) == [
        "the file is longer than its header says: its tensors take 8 bytes, and 9 follow the header"
    ]


def test_all_flaws_come_at_once_and_a_flood_of_them_is_counted(tmp_path: Path) -> None:
    header = {f"w{index}": {"dtype": "Q", "shape": [-1], "data_offsets": []} for index in range(3)}
    assert len(flaws(tmp_path, packed(header, 0))) == 3
    header = {
        f"w{index}": {"dtype": "Q", "shape": [-1], "data_offsets": []} for index in range(1000)
    }
    messages = flaws(tmp_path, packed(header, 0))
    assert len(messages) == 21
    assert messages[-1] == "and 980 more problems like this"


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
        (b"GGUF\x03\x00\x00\x00" + bytes(60), "GGUF file"),
    ],
)
def test_another_kind_of_file_is_recognised(tmp_path: Path, content: bytes, hint: str) -> None:
    with pytest.raises(SourceError) as caught:
        reading(tmp_path, content)
    assert hint in caught.value.problems[0].hint


@pytest.mark.parametrize(
    "header", [b'{"a":' + b"[" * 600_000, b"{" * 300_000, b'{"a":"' + b"," * 4_000_000 + b'"}']
)
def test_a_header_of_brackets_is_refused_before_it_fills_the_memory(
    tmp_path: Path, header: bytes
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed(header, 0))
    tracemalloc.start()
    with pytest.raises(SourceError, match="more than 262144 tensors"):
        safetensors.read_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * len(header) + 2**20


# ---------------------------------------------------------------- shards


def test_the_shards_of_an_index_are_joined(tmp_path: Path) -> None:
    assert [tensor.name for tensor in safetensors.read_index(sharded(tmp_path))] == [
        "layer.0",
        "layer.1",
        "layer.2",
    ]


def test_missing_shards_are_named_all_at_once(tmp_path: Path) -> None:
    path = sharded(tmp_path, skip=("model-00000.safetensors", "model-00002.safetensors"))
    with pytest.raises(SourceError, match="2 of the 3 files") as caught:
        safetensors.read_index(path)
    assert (
        "`model-00000.safetensors`, `model-00002.safetensors`" in caught.value.problems[0].message
    )


def test_flaws_of_several_shards_come_at_once(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    for index in (0, 2):
        (tmp_path / f"model-{index:05d}.safetensors").write_bytes(b"no")
    with pytest.raises(SourceError) as caught:
        safetensors.read_index(path)
    assert len(caught.value.problems) == 2


def test_a_tensor_in_two_shards_or_not_where_the_index_says_is_an_error(tmp_path: Path) -> None:
    path = sharded(tmp_path)
    (tmp_path / "model-00001.safetensors").write_bytes(
        (tmp_path / "model-00000.safetensors").read_bytes()
    )
    with pytest.raises(
        SourceError,
        match=(
            r"`layer\.0` is in both `model-00000\.safetensors` and "
            r"`model-00001\.safetensors`"
        ),
    ):
        safetensors.read_index(path)
    path = sharded(tmp_path)
    (tmp_path / "model-00001.safetensors").write_bytes(packed({}))
    with pytest.raises(SourceError, match=r"the files do not match the index: `layer\.1`"):
        safetensors.read_index(path)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "x.bin",
        "",
        3,
        None,
    ],
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, name: Any) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(SourceError, match=r"they must be next to the index"):
        safetensors.read_index(path)


@pytest.mark.parametrize(
    "content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": null}']
)
def test_an_index_without_a_map_is_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content)
    with pytest.raises(SourceError, match="no `weight_map`"):
        safetensors.read_index(path)


# ---------------------------------------------------------------- fuzz

GOOD = packed({"__metadata__": {"format": "pt"}, **TWO})


def survives(folder: Path, content: bytes) -> None:
    """Read it: tensors or an InputError, nothing else."""
    path = folder / "fuzz.safetensors"
    path.write_bytes(content)
    try:
        tensors = safetensors.read_file(path)
    except InputError:
        return
    assert sum(tensor.bytes for tensor in tensors) <= len(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_cut_anywhere(folder: Path) -> None:
    for length in range(len(GOOD)):
        path = folder / "cut.safetensors"
        path.write_bytes(GOOD[:length])
        with pytest.raises(InputError):
            safetensors.read_file(path)


@given(
    flips=st.lists(
        st.tuples(st.integers(0, len(GOOD) - 1), st.integers(1, 255)), min_size=1, max_size=6
    )
)
def test_bits_flipped(folder: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(GOOD)
    for place, mask in flips:
        content[place] ^= mask
    survives(folder, bytes(content))


@given(content=st.binary(max_size=200))
def test_noise(folder: Path, content: bytes) -> None:
    survives(folder, content)
    survives(folder, packed(content, 0))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(header=st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_any_json_as_header(folder: Path, header: dict[str, Any]) -> None:
    survives(folder, packed(json.dumps(header).encode(), 16))
