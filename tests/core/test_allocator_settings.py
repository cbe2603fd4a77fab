"""The options of the allocator: what torch reads is read alike, and what is unusable is said all at
once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.errors import InputError, Problem
from memfit.simulate.settings import KEYS, Settings

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", Settings()),
        ("expandable_segments:True", Settings(expandable_segments=True)),
        (
            " expandable_segments : True , max_split_size_mb:128,",
            Settings(expandable_segments=True, max_split_size=128 * MIB),
        ),
        ("expandable_segments:True,expandable_segments:False", Settings()),
        (
            "max_split_size_mb:20",
            Settings(max_split_size=20 * MIB),
        ),  # 20 itself is allowed since 2.7
        (
            "max_split_size_mb:64,large_segment_size_mb:64",
            Settings(max_split_size=64 * MIB, large_segment_size=64 * MIB),
        ),
        (
            "max_split_size_mb:30,max_non_split_rounding_mb:25",
            Settings(max_split_size=30 * MIB, max_non_split_rounding=25 * MIB),
        ),
        (
            "garbage_collection_threshold:0.8,per_process_memory_fraction:.9",
            Settings(garbage_collection_threshold=0.8, memory_fraction=0.9),
        ),
        ("per_process_memory_fraction:5e-1", Settings(memory_fraction=0.5)),
        ("roundup_power2_divisions:4", Settings(roundup_power2_divisions=4)),
        (
            "backend:native,pinned_use_background_threads:True,pinned_num_register_threads:8",
            Settings(),
        ),
    ],
)
def test_reads(text: str, settings: Settings) -> None:
    assert Settings.parse(text) == settings


def test_what_nobody_sets_is_as_torch_has_it() -> None:
    """The members of `AcceleratorAllocatorConfig` before anything is parsed
    (c10/core/AllocatorConfig.h, torch 2.13), and the sizes of the same file."""
    assert Settings() == Settings(
        expandable_segments=False,
        max_split_size=None,
        max_non_split_rounding=None,
        garbage_collection_threshold=0,
        roundup_power2_divisions=0,
        large_segment_size=20 * MIB,
        memory_fraction=1,
    )
    assert Settings(memory_fraction=0).memory_fraction == 0
    assert [Settings().rounded(size) for size in (1, 512, 513, MIB, MIB + 1)] == [
        512,
        512,
        1024,
        MIB,
        MIB + 512,
    ]


@pytest.mark.parametrize(
    ("text", "table"),
    [
        # What AcceleratorAllocatorConfig::roundup_power2_divisions of torch 2.13.0 answered for 1
        # MiB, 2 MiB, 4 MiB, … 32 GiB.
        ("256:1,512:2,1024:4,>:8", (1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 8, 8, 8, 8)),
        ("2:4,16:2,>:1", (4, 4, 0, 0, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1)),
        (">:8", (0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8)),
        ("1:8", (8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
        ("131072:8", (8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8)),
        ("1:0,>:4", (0, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4)),
    ],
)
def test_reads_the_table_of_divisions_as_torch_does(text: str, table: tuple[int, ...]) -> None:
    assert (
        Settings.parse(
            f"roundup_power2_divisions:[{text}],max_split_size_mb:21"
        ).roundup_power2_divisions
        == table
    )


def test_every_problem_at_once_with_the_nearest_names() -> None:
    text = (
        "expandable_segment:True,max_split_size_mb:128MB,garbage_collection_threshold:1.5,"
        "backend:cudaMallocAsync,,pinned_free_catch_all:yes"
    )
    with pytest.raises(InputError) as caught:
        Settings.parse(text)
    found = {(problem.where, problem.message) for problem in caught.value.problems}
    assert found == {
        ("PYTORCH_ALLOC_CONF", "unknown option `expandable_segment`"),
        ("PYTORCH_ALLOC_CONF.max_split_size_mb", "`128MB` must be an integer"),
        ("PYTORCH_ALLOC_CONF.backend", "backend `cudaMallocAsync` is not supported"),
        ("PYTORCH_ALLOC_CONF", "an option has no name"),
        ("PYTORCH_ALLOC_CONF.pinned_free_catch_all", "`yes` is neither `True` nor `False`"),
        ("allocator.garbage_collection_threshold", "`1.5` is not valid"),
    }
    assert all(problem.hint for problem in caught.value.problems)
    assert "`expandable_segments`" in caught.value.problems[0].hint


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments",
        "expandable_segments:true",
        "expandable_segments:",
        "max_split_size_mb:19",
        "max_split_size_mb:-1",
        "max_split_size_mb:30,large_segment_size_mb:40",
        "max_non_split_rounding_mb:10",
        "large_segment_size_mb:10",
        "large_segment_size_mb:9999999999999",
        "garbage_collection_threshold:0",
        "garbage_collection_threshold:1",
        "garbage_collection_threshold:nan",
        "per_process_memory_fraction:1.1",
        "per_process_memory_fraction:1e400",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:[256:3]",
        "roundup_power2_divisions:[100:4]",
        "roundup_power2_divisions:[256]",
        "roundup_power2_divisions:[0:4]",
        "roundup_power2_divisions:[]",
        "roundup_power2_divisions:[256:1",
        "roundup_power2_divisions:[256:14",  # without its last character it would be `256:1`
        "roundup_power2_divisions:5256:1]",
        "roundup_power2_divisions:256:1]",
        "roundup_power2_divisions:[>]",
        "backend:",
        "backend:vmm",
        ":True",
        "x" * 5000,
    ],
)
def test_refuses(text: str) -> None:
    with pytest.raises(InputError) as caught:
        Settings.parse(text)
    assert all(problem.hint and len(str(problem)) < 400 for problem in caught.value.problems)


@pytest.mark.parametrize(
    "values",
    [
        {"expandable_segments": 1},
        {"max_split_size": True},
        {"max_split_size": 30 * MIB + 512},
        {"max_split_size": "30MiB"},
        {"max_non_split_rounding": 5 * MIB},
        {"large_segment_size": 10 * MIB},
        {"large_segment_size": 21 * MIB + 1},
        {"garbage_collection_threshold": float("nan")},
        {"garbage_collection_threshold": -0.1},
        {"memory_fraction": "all"},
        {"memory_fraction": 2},
        {"memory_fraction": -0.1},
        {"memory_fraction": True},
        {"garbage_collection_threshold": True},
        {"large_segment_size": True},
        {"large_segment_size": (2**40 + 1) * MIB},
        {"max_split_size": 19 * MIB},
        {"roundup_power2_divisions": (4, 4)},
        {"roundup_power2_divisions": (4,)},
        {"roundup_power2_divisions": -2},
        {"roundup_power2_divisions": (2.0,) * 16},
        {"roundup_power2_divisions": (3,) * 16},
    ],
)
def test_refuses_values(values: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        Settings(**values)  # type: ignore[arg-type]
    assert [problem.where for problem in caught.value.problems] == [
        f"allocator.{next(iter(values))}"
    ]


@pytest.mark.parametrize("key", [*KEYS, "no_such_key"])
def test_a_long_value_is_cut_in_what_is_said(key: str) -> None:
    """A line of a terminal or a log, whatever was pasted. The list of the known keys is 240."""
    with pytest.raises(InputError) as caught:
        Settings.parse(f"{key if key in KEYS else key * 100}:{'x' * 900}")
    assert all(len(problem.message) < 120 for problem in caught.value.problems)
    table = f"roundup_power2_divisions:[{'3' * 12}:{'4' * 12}]"
    with pytest.raises(InputError, match="is not a size") as caught:
        Settings.parse(table)
    with pytest.raises(InputError, match="reasonable length"):
        Settings.parse("x" * 2001)
    assert Settings.parse(" " * 2000) == Settings()


def test_no_text_is_refused() -> None:
    with pytest.raises(InputError):
        Settings.parse(None)  # type: ignore[arg-type]


@given(
    st.one_of(
        st.text(max_size=200),
        st.lists(st.sampled_from([*KEYS, ":", ",", "[", "]", ">", "4", "256", "True", "0.5"])).map(
            "".join
        ),
    )
)
def test_any_text_gives_settings_or_an_input_error(text: str) -> None:
    problems: tuple[Problem, ...] = ()
    try:
        Settings.parse(text)
    except InputError as error:
        problems = error.problems
    assert all(problem.level == "error" and len(str(problem)) < 400 for problem in problems)


def test_another_backend_is_said_to_follow_the_driver() -> None:
    with pytest.raises(InputError, match="cudaMallocAsync") as caught:
        Settings.parse("backend:cudaMallocAsync")
    assert "the driver's own rules" in (caught.value.problems[0].hint or "")
    with pytest.raises(InputError, match="vmm") as other:
        Settings.parse("backend:vmm")
    assert other.value.problems[0].hint == "use `native`"


def test_small_requests_are_multiples_of_512_whatever_the_divisions() -> None:
    divided = Settings(roundup_power2_divisions=4)
    assert [divided.rounded(size) for size in (1, 512, 1200, 2048, 2049, 2561)] == [
        512,
        512,
        1536,
        2048,
        2560,
        3072,
    ]
