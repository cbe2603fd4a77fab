"""GPUs and prices of one's own, MIG slices and vGPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

import memfit
from memfit.errors import InputError
from memfit.hardware import find_gpu, parse_cluster
from memfit.hardware.mig import SLICED, profiles
from memfit.hardware.prices import price
from memfit.hardware.vgpu import CARDS
from memfit.units import GIB

OWN = """\
[basement]
like = "a100-sxm-80gb"
memory = "47.5GiB"
price = 1.25

[rtx-4090]
price = 0.5

["our card"]
memory = "20GiB"
bandwidth = 5e11
rates = { bf16 = 1e14 }
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "gpus.toml"
    path.write_text(OWN, encoding="utf-8")
    monkeypatch.setenv("MEMFIT_GPUS", str(path))
    return path


def test_a_gpu_of_ones_own_is_found_by_name(own: Path) -> None:
    gpu = parse_cluster("2xbasement").gpu
    assert (gpu.id, gpu.name, gpu.memory) == ("basement", "basement", 47.5 * GIB)
    assert gpu.bandwidth == find_gpu("a100-sxm-80gb").bandwidth
    card = parse_cluster("Our Card").gpu
    assert (card.memory, card.bandwidth, card.rates["bf16"]) == (20 * GIB, 5e11, 1e14)


def test_a_price_of_ones_own_goes_before_the_public_one(own: Path) -> None:
    listed = price(find_gpu("rtx-4090"))
    assert listed is not None
    assert listed.dollars == 0.5
    assert parse_cluster("rtx-4090").gpu.name == "NVIDIA GeForce RTX 4090"


def test_own_gpus_are_listed_first(own: Path) -> None:
    assert [gpu.id for gpu in memfit.gpus()][:2] == ["basement", "rtx-4090"]


def test_an_estimate_takes_them(own: Path) -> None:
    answer = memfit.estimate(
        "llama-3.2-1b", gpu="basement", method="lora", framework="transformers"
    )
    assert answer.usable == (47.5 * GIB, 47.5 * GIB)


def test_the_file_is_read_again_when_it_changes(own: Path) -> None:
    assert parse_cluster("basement").gpu.memory == 47.5 * GIB
    own.write_text('[basement]\nmemory = "8GiB"\n# longer\n', encoding="utf-8")
    assert parse_cluster("basement").gpu.memory == 8 * GIB


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("[x]\nmemry = '3'\n", ["unknown key `memry`", "`memory` is missing"]),
        ("[x]\nmemory = true\n", ["`True` is not an amount of memory"]),
        ("[x]\nmemory = '3 parsecs'\n", ["parsecs"]),
        ("[x]\nlike = 'a100x'\n", ["unknown GPU `a100x`"]),
        ("[x]\nmemory = '8GiB'\nprice = -1\n", ["`-1` must be a number above 0"]),
        ("[x]\nmemory = '8GiB'\nrates = { bf61 = 1e12 }\n", ["`rates` must be a table"]),
        ("x = 3\n", ["`x` must be a table"]),
        ("[x\n", ["is not valid TOML"]),
    ],
)
def test_every_problem_of_the_file_is_named(own: Path, text: str, messages: list[str]) -> None:
    own.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        parse_cluster("h100-sxm")
    found = "; ".join(problem.message for problem in caught.value.problems)
    assert all(message in found for message in messages), found


def test_a_folder_in_its_place_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_GPUS", str(tmp_path))
    with pytest.raises(InputError, match="must be a file"):
        parse_cluster("h100-sxm")


# ------------------------------------------------------------------------------------------- MIG
@pytest.mark.parametrize(
    ("name", "shown", "sms"),
    [  # what `nvidia-smi mig -lgip` or torch printed, GiB
        ("h100-sxm/1g.10gb", 9.75, 16),
        ("h100-sxm/1g.20gb", 19.62, 26),
        ("h100-sxm/3g.40gb", 39.38, 60),
        ("a100-pcie-80gb/3g.40gb", 39.25, 42),
    ],
)
def test_a_slice_is_as_large_as_logs_show(name: str, shown: float, sms: int) -> None:
    gpu = parse_cluster(name).gpu
    low, high = gpu.memory_range
    assert low <= shown * GIB <= high
    assert (high - low) / GIB < 0.7
    assert gpu.sms == sms
    assert gpu.link is None


def test_slices_take_the_same_names_as_whole_gpus() -> None:
    assert parse_cluster("A100-80GB/3g.40gb").gpu.id == "a100-sxm-80gb/3g.40gb"
    assert parse_cluster("7xh100-sxm/1g.10gb").gpus == 7
    assert parse_cluster("h200/3g.71gb").gpu.label == 71


@pytest.mark.parametrize("name", SLICED)
def test_slices_grow_with_their_parts(name: str) -> None:
    whole = find_gpu(name)
    known = profiles(whole)
    sizes = [parse_cluster(f"{name}/{profile}").gpu for profile in known]
    assert sorted(one.memory for one in sizes) == [one.memory for one in sizes]
    assert all(one.memory < whole.memory for one in sizes)
    assert all((one.bandwidth or 0) <= (whole.bandwidth or 0) for one in sizes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100-sxm/5g.50gb", "has no MIG slice `5g.50gb`"),
        ("rtx-4090/1g.10gb", "cannot be split into MIG slices"),
        ("h100x/1g.10gb", "unknown GPU"),
    ],
)
def test_a_slice_that_does_not_exist_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_cluster(name)


# ------------------------------------------------------------------------------------------ vGPU
@pytest.mark.parametrize(
    ("name", "card", "share"),
    [
        ("a40-24c", "a40", 0.5),
        ("NVIDIA L40S-48C", "l40s", 1),
        ("GRID A100D-20C", "a100-pcie-80gb", 0.25),
        ("h100xm-40c", "h100-sxm", 0.5),
    ],
)
def test_a_vgpu_is_a_share_of_its_card(name: str, card: str, share: float) -> None:
    """Never more than the frame buffer in its name, which the card itself does not show whole."""
    whole, gpu = find_gpu(card), parse_cluster(name).gpu
    assert gpu.memory == pytest.approx(whole.memory * share, rel=0.001)
    assert gpu.label is not None
    assert gpu.memory <= gpu.label * GIB
    assert (gpu.sms, gpu.bandwidth, gpu.link) == (whole.sms, whole.bandwidth, None)
    assert "time-sliced" in (gpu.note or "")


def test_every_vgpu_of_the_tables_has_its_card() -> None:
    for prefix, (card, sizes) in CARDS.items():
        assert sizes[0] == find_gpu(card).label, prefix
        for size in sizes:
            gpu = parse_cluster(f"{prefix}-{size}c").gpu
            assert gpu.memory_range[0] <= gpu.memory <= gpu.memory_range[1]


def test_a_vgpu_backed_by_mig_is_the_slice() -> None:
    assert parse_cluster("a100d-3-40c").gpu.id == "a100-pcie-80gb/3g.40gb"
    answer = memfit.estimate("llama-3.2-1b", gpu="a40-24c", method="lora", offline=True)
    assert answer.verdict == "fits"


def test_a_vgpu_that_there_is_not_gets_those_that_are() -> None:
    with pytest.raises(InputError, match="`a40` has no vGPU with 20 GB") as bad:
        parse_cluster("a40-20c")
    assert "`a40-24c`" in bad.value.problems[0].hint
