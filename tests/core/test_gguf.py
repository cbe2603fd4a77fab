"""GGUF headers: the same as the gguf package writes and reads, and one clear error for each file
that lies or ends too soon."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.writers import array, pair, tensor, text, whole

from memfit.errors import InputError, SourceError
from memfit.formats import FORMATS
from memfit.model.source import read
from memfit.model.sources import gguf, gguf_config
from memfit.model.sources.ggml import GGML_TYPES, REMOVED

LLAMA = [
    pair("general.architecture", "str", "llama"),
    pair("llama.block_count", "u32", 1),
    pair("llama.embedding_length", "u32", 64),
    pair("llama.attention.head_count", "u32", 4),
    array("tokenizer.ggml.tokens", "str", ["a", "bc", "déf"]),
]
TENSORS = [
    tensor("token_embd.weight", [64, 3], 0, 0),
    tensor("blk.0.attn_q.weight", [64, 64], 8, 768),
]
GOOD = whole(LLAMA, TENSORS, 768 + 4352)


def reading(folder: Path, content: bytes, name: str = "model.gguf") -> gguf.Gguf:
    path = folder / name
    path.write_bytes(content)
    return gguf.read_file(path)


def flaws(folder: Path, content: bytes, name: str = "model.gguf") -> list[str]:
    with pytest.raises(SourceError) as caught:
        reading(folder, content, name)
    return [problem.message for problem in caught.value.problems]


def test_metadata_and_tensors(tmp_path: Path) -> None:
    file = reading(tmp_path, GOOD)
    assert file.metadata["llama.block_count"] == 1
    assert file.lengths == {"tokenizer.ggml.tokens": 3}
    assert [(one.name, one.shape, one.format, one.bytes) for one in file.tensors] == [
        ("token_embd.weight", (3, 64), "float32", 768),
        ("blk.0.attn_q.weight", (64, 64), "Q8_0", 4352),
    ]
    assert reading(tmp_path, whole(LLAMA, TENSORS, 5120, version=2)) == file


def test_every_kind_of_value(tmp_path: Path) -> None:
    values: Mapping[str, Any] = {
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -3,
        "u32": 2**32 - 1,
        "i32": -3,
        "bool": 1,
        "u64": 2**63,
        "i64": -(2**62),
        "f64": 0.1,
    }
    pairs = [pair(kind, kind, value) for kind, value in values.items()]
    pairs += [array("list." + kind, kind, [value, value]) for kind, value in values.items()]
    metadata = reading(tmp_path, whole(pairs, [], 0)).metadata
    assert metadata == {**values, "bool": True} | {
        "list." + kind: (value, value) for kind, value in {**values, "bool": True}.items()
    }


def test_long_values_are_stepped_over_and_long_arrays_counted(tmp_path: Path) -> None:
    long = [
        pair("template", "str", "x" * 100_000),
        array("numbers", "f32", [0.5] * 10_000),
        array("words", "str", ["word"] * 300_000),
        pair("after", "u8", 7),
    ]
    file = reading(tmp_path, whole(long, [], 0))
    assert file.metadata == {"after": 7}
    assert file.lengths == {"numbers": 10_000, "words": 300_000}


# ---------------------------------------------------------------- against the gguf package


def test_block_sizes_are_those_of_the_package() -> None:
    constants = pytest.importorskip("gguf").constants
    theirs = {kind.value: sizes for kind, sizes in constants.GGML_QUANT_SIZES.items()}
    assert {
        code: (row.block, row.block_bytes) for code, row in GGML_TYPES.items() if code in theirs
    } == theirs
    for kind in constants.GGMLQuantizationType:
        name = GGML_TYPES[kind.value].name
        assert name == kind.name or (name in FORMATS and FORMATS[name] is FORMATS[kind.name])
    assert not set(REMOVED) & set(GGML_TYPES)


def test_numbers_that_are_no_quantization_have_their_row_in_formats() -> None:
    for row in GGML_TYPES.values():
        if row.block == 1:
            assert FORMATS[row.name].block_bytes == row.block_bytes


@pytest.mark.parametrize("big", [False, True])
def test_the_package_writes_what_we_read_and_reads_the_same(tmp_path: Path, big: bool) -> None:
    package, numpy = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    path = tmp_path / "model.gguf"
    writer = package.GGUFWriter(
        path, "qwen2", endianess=package.GGUFEndian.BIG if big else package.GGUFEndian.LITTLE
    )
    writer.add_name("Mine")
    writer.add_block_count(2)
    writer.add_head_count_kv([1, 2])
    writer.add_rope_freq_base(1e6)
    writer.add_token_list([f"token {index} é" for index in range(5000)])
    writer.add_token_scores([0.5] * 5000)
    writer.add_bool("qwen2.some", True)
    writer.add_custom_alignment(64)
    writer.add_tensor("token_embd.weight", numpy.zeros((10, 256), dtype=numpy.float32))
    types = [
        kind
        for kind in package.GGMLQuantizationType
        if kind.name[0] in "QITMN" and kind.name not in ("I8", "I16", "I32", "I64")
    ]
    for kind in types:
        block, size = package.constants.GGML_QUANT_SIZES[kind]
        writer.add_tensor(
            f"blk.0.{kind.name}",
            numpy.zeros((3, 512 // block * size), dtype=numpy.uint8),
            raw_dtype=kind,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    ours, theirs = gguf.read_file(path), package.GGUFReader(path)
    assert ours.metadata["general.name"] == "Mine"
    assert ours.metadata["qwen2.attention.head_count_kv"] == (1, 2)
    assert ours.metadata["qwen2.rope.freq_base"] == 1e6
    assert ours.metadata["qwen2.some"] is True
    assert ours.lengths["tokenizer.ggml.tokens"] == 5000
    expected = [
        (str(one.name), tuple(int(size) for size in reversed(one.shape)), int(one.n_bytes))
        for one in theirs.tensors
    ]
    assert [(one.name, one.shape, one.bytes) for one in ours.tensors] == expected
    assert len(expected) == len(types) + 1 > 25


def test_no_tensor_data_is_read(tmp_path: Path) -> None:
    size = 2**40
    path = tmp_path / "huge.gguf"
    with path.open("wb") as file:
        file.write(whole(LLAMA, [tensor("w", [size], 24, 0)], 0))
        try:
            file.truncate(file.tell() + size)
        except OSError:
            pytest.skip("no sparse files of 1 TiB here")
    assert gguf.read_file(path).tensors[0].bytes == size


# ---------------------------------------------------------------- lies


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"GGUF", "has 4 bytes, too few for a GGUF file"),
        (b"GGML" + bytes(60), "does not start with `GGUF`"),
        (b"tjgg" + bytes(60), "does not start with `GGUF`"),
        (
            b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
            "is GGUF version 1; memfit reads versions 2 and 3",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 4, 0, 0),
            "is GGUF version 4; memfit reads versions 2 and 3",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0),
            "declares 1099511627776 tensors and 0 keys; the limits",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
            "declares 0 tensors and 9223372036854775808 keys; the",
        ),
        (whole([], [], 0, counts=(5, 0)), "is truncated or has a wrong length:"),
        (whole([], [], 0, counts=(0, 5)), "is truncated or has a wrong length:"),
        (
            whole([struct.pack("<Q", 2**62)], [], 0, counts=(0, 1)),
            "declares 4611686018427387904 bytes for a key at",
        ),
        (
            whole([text(b"\xff\xfe") + struct.pack("<I", 4)], [], 8, counts=(0, 1)),
            "has a key at offset 32 that is not UTF-8",
        ),
        (whole([text("k") + struct.pack("<I", 99)], [], 64), "has the unknown type 99 for `k`"),
        (
            whole([text("k") + struct.pack("<IIQ", 9, 99, 1)], [], 64),
            "has the unknown type 99 for `k`",
        ),
        (whole([text("k") + struct.pack("<IIQ", 9, 9, 1)], [], 64), "an array of arrays"),
        (
            whole([array("k", "str", [], length=2**60)], [], 64),
            "is truncated or has a wrong length:",
        ),
        (
            whole([array("k", "u8", [], length=2**63)], [], 64),
            "is truncated or has a wrong length:",
        ),
        (
            whole([text("k") + struct.pack("<IIQQ", 9, 8, 1, 2**62)], [], 64),
            "is truncated or has a wrong length:",
        ),
        (
            whole([text("k") + struct.pack("<IQ", 8, 2**62)], [], 64),
            "is truncated or has a wrong length:",
        ),
        (whole([pair("k", "bool", 2)], [], 0), "that is not 0 or 1"),
        (whole([pair("k", "u8", 2), pair("k", "u8", 2)], [], 0), "has the key `k` twice"),
        (whole([pair("general.alignment", "u32", 0)], [], 0), ", which is not a power of two"),
        (whole([pair("general.alignment", "u32", 48)], [], 0), ", which is not a power of two"),
        (whole([pair("general.alignment", "str", "32")], [], 0), ", which is not a power of two"),
        (
            whole([], [tensor("w", [4], 0, 0, rank=5)], 64),
            "has tensor `w` with 5 dimensions; the limit is 4",
        ),
        (
            whole([], [tensor("w", [], 0, 0, rank=2**31)], 64),
            "has tensor `w` with 2147483648 dimensions; the limit",
        ),
        (
            whole([], [struct.pack("<Q", 300) + b"x" * 300], 64),
            "declares 300 bytes for a tensor",
        ),
    ],
)
def test_a_lying_length_or_type_is_one_message(tmp_path: Path, content: bytes, said: str) -> None:
    messages = flaws(tmp_path, content)
    assert len(messages) == 1
    assert said in messages[0]


@pytest.mark.parametrize(
    ("tensors", "data", "said"),
    [
        ([tensor("w", [8], 77, 0)], 64, "`w` has the unknown type 77"),
        ([tensor("w", [32], 4, 0)], 64, "unknown type 4 (`Q4_2`, which llama.cpp has removed"),
        ([tensor("w", [31], 2, 0)], 64, "tensor `w` has rows of 31 values, not a multiple of the"),
        ([tensor("w", [0], 0, 0)], 64, "impossible shape [0]"),
        ([tensor("w", [2**40, 2**40], 0, 0)], 64, "impossible shape"),
        ([tensor("w", [2**63], 24, 0)], 64, "impossible shape"),
        (
            [tensor("w", [8], 0, 3)],
            64,
            "tensor `w` is at offset 3, not a multiple of the alignment",
        ),
        ([tensor("w", [8], 0, 2**63)], 64, "the file is truncated: its tensors need"),
        ([tensor("w", [8], 0, 0)], 31, "the file is truncated: its tensors need"),
        (
            [tensor("w", [16], 0, 0), tensor("v", [8], 0, 32)],
            96,
            "tensor `v` overlaps the previous one by 32 bytes",
        ),
        ([tensor("w", [8], 0, 0), tensor("w", [8], 0, 32)], 64, "has tensors twice: `w`"),
    ],
)
def test_a_bad_tensor_is_named(tmp_path: Path, tensors: list[bytes], data: int, said: str) -> None:
    messages = flaws(tmp_path, whole([], tensors, data))
    assert len(messages) == 1
    assert said in messages[0]


def test_all_flaws_of_tensors_come_at_once(tmp_path: Path) -> None:
    assert (
        len(flaws(tmp_path, whole([], [tensor(f"w{index}", [8], 77, 0) for index in range(3)], 64)))
        == 3
    )
    assert (
        flaws(tmp_path, whole([], [tensor(f"w{index}", [8], 77, 0) for index in range(50)], 64))[-1]
        == "and 30 more problems like this"
    )


def test_a_fork_that_reuses_a_type_code_with_other_blocks_is_noticed(tmp_path: Path) -> None:
    """Type 42 takes 18 bytes for 64 values; a fork writes 34 for 128, so that its tensors lie
    closer together than they can."""
    rows = 64
    for row, fits in ((1024 // 64 * 18, True), (1024 // 128 * 34, False)):
        size = rows * row
        content = whole(
            [], [tensor("a", [1024, rows], 42, 0), tensor("b", [1024, rows], 42, size)], 2 * size
        )
        if fits:
            assert [one.bytes for one in reading(tmp_path, content).tensors] == [size, size]
        else:
            assert "overlaps the previous one" in flaws(tmp_path, content)[0]


@pytest.mark.parametrize(
    "start", [b"<html>", b"version https://git-lfs.github.com/spec/v1", b"PK\x03\x04"]
)
def test_another_kind_of_file_is_recognised(tmp_path: Path, start: bytes) -> None:
    with pytest.raises(SourceError) as caught:
        reading(tmp_path, start + bytes(100))
    assert caught.value.problems[0].hint


def test_a_flood_of_strings_is_bounded(tmp_path: Path) -> None:
    """A sparse file of 4 GiB that announces an array of half a thousand million empty strings."""
    path = tmp_path / "flood.gguf"
    start = whole([array("k", "str", [], length=2**29)], [], 0)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(2**32 + len(start))
    tracemalloc.start()
    with pytest.raises(SourceError, match="has more metadata than the limit of 64 MiB"):
        gguf.read_file(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


# ---------------------------------------------------------------- split files


def parts(folder: Path, count: int = 3) -> list[Path]:
    paths = [folder / f"big-{part:05d}-of-{count:05d}.gguf" for part in range(1, count + 1)]
    for index, path in enumerate(paths):
        pairs = LLAMA if index == 0 else [pair("split.no", "u16", index)]
        path.write_bytes(
            whole(
                pairs,
                TENSORS if index == 0 else [tensor(f"blk.0.part{index}.weight", [8], 0, 0)],
                5120,
            )
        )
    return paths


def test_a_split_model_is_read_whole_by_any_of_its_parts(tmp_path: Path) -> None:
    for path in parts(tmp_path):
        tensors = read(path).tensors
        assert tensors is not None
        assert [one.name for one in tensors] == [
            "token_embd.weight",
            "blk.0.attn_q.weight",
            "blk.0.part1.weight",
            "blk.0.part2.weight",
        ]
    assert len(read(tmp_path).tensors or ()) == 4


def test_missing_parts_are_named_all_at_once(tmp_path: Path) -> None:
    paths = parts(tmp_path, 4)
    paths[1].unlink()
    paths[3].unlink()
    with pytest.raises(
        SourceError,
        match=(
            r"2 of the 4 parts of the model are missing: `big-00002-of-00004\.gguf`, "
            r"`big-00004-of-00004\.gguf`"
        ),
    ):
        gguf.read_file(paths[0])


def test_flaws_of_several_parts_come_at_once_and_no_tensor_twice(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    with pytest.raises(SourceError, match=r"has tensors twice: `blk\.0\.part1\.weight`"):
        gguf.read_file(paths[0])
    for path in paths[1:]:
        path.write_bytes(b"no")
    with pytest.raises(SourceError) as caught:
        gguf.read_file(paths[0])
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    "name",
    [
        "x-00000-of-00002.gguf",
        "x-00003-of-00002.gguf",
        "x-00001-of-99999.gguf",
        "x-00001-of-00000.gguf",
    ],
)
def test_impossible_part_numbers(tmp_path: Path, name: str) -> None:
    assert "impossible part numbers" in flaws(tmp_path, GOOD, name)[0]


# ---------------------------------------------------------------- to a config


def config(folder: Path, pairs: list[bytes], tensors: list[bytes] | None = None) -> dict[str, Any]:
    tensors = TENSORS if tensors is None else tensors
    return gguf_config.read_config(reading(folder, whole(pairs, tensors, 2**16)))


def test_a_llama_in_the_words_of_config_json(tmp_path: Path) -> None:
    more = [
        pair("llama.attention.head_count_kv", "u32", 2),
        pair("llama.feed_forward_length", "u32", 96),
        pair("llama.context_length", "u32", 4096),
        pair("llama.attention.layer_norm_rms_epsilon", "f32", 0.5),
        pair("llama.rope.freq_base", "f32", 10000.0),
    ]
    path = tmp_path / "tiny.Q8_0.gguf"
    path.write_bytes(whole([*LLAMA, *more], TENSORS, 5120))
    source = read(path)
    assert source.name == "tiny.Q8_0"
    assert source.origin == f"{path} (GGUF)"
    assert source.config == {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 0.5,
        "rope_theta": 10000.0,
        "head_dim": 16,
        "vocab_size": 3,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "quantization_config": {"quant_method": "gguf"},
    }


def test_tying_biases_and_head_size_are_read_off_the_tensors(tmp_path: Path) -> None:
    tensors = [
        tensor("token_embd.weight", [64, 3], 0, 0),
        tensor("output.weight", [64, 3], 0, 1024),
        tensor("blk.0.attn_q.weight", [64, 128], 0, 2048),
        tensor("blk.0.attn_q.bias", [128], 0, 40960),
        tensor("blk.0.ffn_up.bias", [64], 0, 45056),
    ]
    found = config(tmp_path, LLAMA, tensors)
    assert (
        found["tie_word_embeddings"],
        found["attention_bias"],
        found["mlp_bias"],
        found["head_dim"],
    ) == (False, True, True, 32)


def test_values_by_layer_stay_a_list_unless_all_are_the_same(tmp_path: Path) -> None:
    assert (
        config(tmp_path, [*LLAMA, array("llama.attention.head_count_kv", "u32", [2, 2])])[
            "num_key_value_heads"
        ]
        == 2
    )
    assert config(tmp_path, [*LLAMA, array("llama.attention.head_count_kv", "u32", [2, 4])])[
        "num_key_value_heads"
    ] == [2, 4]


def test_experts_make_a_llama_a_mixtral(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        [*LLAMA, pair("llama.expert_count", "u32", 8), pair("llama.expert_used_count", "u32", 2)],
    )
    assert (found["model_type"], found["num_local_experts"], found["num_experts_per_tok"]) == (
        "mixtral",
        8,
        2,
    )


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([], "does not name its `general.architecture`"),
        ([pair("general.architecture", "u32", 3)], "does not name its"),
        (
            [pair("general.architecture", "str", "qwen9")],
            "the GGUF architecture `qwen9` is not supported yet",
        ),
        (
            [pair("general.architecture", "str", "clip")],
            "it contains a model's vision tower: give the file of the model itself",
        ),
        ([*LLAMA, pair("general.type", "str", "adapter")], "is an adapter, not a model"),
        (LLAMA[:1], "`llama.block_count` is missing"),
        (
            [*LLAMA[:3], pair("llama.attention.head_count", "u32", 0)],
            "`llama.attention.head_count` is `0`, but must be an integer of at least 1",
        ),
        ([*LLAMA[:3], pair("llama.attention.head_count", "i32", -4)], "is `-4`"),
        ([*LLAMA[:3], pair("llama.attention.head_count", "f32", 4.0)], "is `4.0`"),
        ([*LLAMA[:3], pair("llama.attention.head_count", "str", "four")], "is `four`"),
        (
            [*LLAMA, pair("llama.rope.freq_base", "f32", float("nan"))],
            "`llama.rope.freq_base` is nan",
        ),
    ],
)
def test_metadata_that_makes_no_config(tmp_path: Path, pairs: list[bytes], said: str) -> None:
    with pytest.raises(SourceError) as caught:
        config(tmp_path, pairs)
    assert said in str(caught.value)


def test_all_that_is_missing_comes_at_once(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        config(tmp_path, LLAMA[:1])
    assert len(caught.value.problems) == 3


def test_a_vocabulary_alone_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="` contains only a vocabulary or a part of a model"):
        config(tmp_path, LLAMA, [])


def test_an_unknown_architecture_offers_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        config(tmp_path, [pair("general.architecture", "str", "qwen3-moe")])
    assert "`qwen3moe`" in caught.value.problems[0].hint


# ---------------------------------------------------------------- fuzz


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def survives(folder: Path, content: bytes) -> None:
    """Read it to the config: a source or an InputError, nothing else."""
    path = folder / "fuzz.gguf"
    path.write_bytes(content)
    try:
        source = read(path)
    except InputError:
        return
    assert source.stored_bytes is not None
    assert source.stored_bytes <= len(content)
    assert source.config["model_type"]


def test_cut_anywhere(folder: Path) -> None:
    for length in [*range(0, len(GOOD) - 5120, 1), len(GOOD) - 5120, len(GOOD) - 1]:
        path = folder / "cut.gguf"
        path.write_bytes(GOOD[:length])
        with pytest.raises(InputError):
            gguf.read_file(path)


HEADER = len(GOOD) - 5120


@given(
    flips=st.lists(
        st.tuples(st.integers(0, HEADER - 1), st.integers(1, 255)), min_size=1, max_size=6
    )
)
def test_bits_flipped(folder: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(GOOD)
    for place, mask in flips:
        content[place] ^= mask
    survives(folder, bytes(content))


@given(content=st.binary(max_size=300))
def test_noise(folder: Path, content: bytes) -> None:
    survives(folder, content)
    survives(folder, b"GGUF\x03\x00\x00\x00" + content)


VALUES = st.sampled_from([0, 1, 2, 3, 64, 2**31, 2**32 - 1])


@given(
    architecture=st.sampled_from([*gguf_config.ARCHITECTURES, "nothing"]),
    keys=st.dictionaries(
        st.sampled_from(
            [
                "block_count",
                "embedding_length",
                "attention.head_count",
                "attention.head_count_kv",
                "attention.key_length",
                "expert_count",
                "rope.dimension_count",
                "attention.value_length",
                "attention.kv_lora_rank",
                "feed_forward_length",
                "leading_dense_block_count",
            ]
        ),
        st.tuples(st.sampled_from(["u32", "f32", "str", "array"]), VALUES),
    ),
)
def test_any_metadata_of_any_architecture(
    folder: Path, architecture: str, keys: dict[str, tuple[str, int]]
) -> None:
    pairs = [pair("general.architecture", "str", architecture)]
    for key, (kind, value) in keys.items():
        name = f"{architecture}.{key}"
        pairs.append(
            array(name, "u32", [value, 1])
            if kind == "array"
            else pair(name, kind, str(value) if kind == "str" else value)
        )
    survives(folder, whole(pairs, TENSORS, 5120))
