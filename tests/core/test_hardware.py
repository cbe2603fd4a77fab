"""Hardware: every row of the tables cited and plausible; look-ups, clusters, `auto` with a small
NVML of our own."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from memfit.errors import InputError
from memfit.hardware import (
    GPU,
    MATHS,
    Cluster,
    all_gpus,
    assumptions,
    auto_gpu,
    auto_gpus,
    context,
    custom_gpu,
    desktop,
    find_gpu,
    find_link,
    links,
    nvidia_cards,
    parse_cluster,
    usable,
    variants,
)
from memfit.hardware.gpu import common_gpu, gpu_problem, plain
from memfit.hardware.link import COLLECTIVES
from memfit.hardware.machines import machines
from memfit.hardware.outside import reserve
from memfit.hardware.tables import STATUSES, columns, sections, span, table
from memfit.hardware.vendors import VENDORS
from memfit.units import GIB, MIB

GPUS = {gpu.id: gpu for gpu in all_gpus()}
BY_MEMORY = "for any other card give its memory: `--memory 24GiB`"
BY_LAPTOP = (
    "a laptop GPU often has less memory than the card of the same number; "
    "give its own: `--memory 16GiB`"
)


def problems(error: pytest.ExceptionInfo[InputError]) -> list[tuple[str, str, str]]:
    return [(one.message, one.where, one.hint) for one in error.value.problems]


# ---------------------------------------------------------------- the tables


def test_there_are_enough_of_them() -> None:
    assert len(GPUS) >= 75
    assert {gpu.vendor for gpu in GPUS.values()} == {"nvidia", "amd", "intel", "apple"}
    assert len([gpu for gpu in GPUS.values() if gpu.status["memory"] == "log"]) >= 55


OTHER_SIZE = "`{}` is listed with {} GB; another size: `--gpu {}`"


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_every_figure_is_cited(gpu: GPU) -> None:
    row = table("gpus")[gpu.id]
    figures = set(row) - {"name", "aliases", "shared", "common", "vendor", "form", "note"}
    assert figures == set(gpu.status) == set(gpu.cites)
    assert {"memory", "label", "bandwidth"} <= figures
    assert set(gpu.status.values()) <= set(STATUSES)
    assert all(len(cite) > 4 for cite in gpu.cites.values())
    for key in figures - {"memory"}:
        _, status, source = row[key].split()
        assert source in table("gpus")["sources"], key
        assert (source == "own") == (status == "label"), key


def test_every_source_is_used() -> None:
    used = {
        row[key].split()[-1]
        for name, row in table("gpus").items()
        if name != "sources"
        for key in row
        if isinstance(row[key], str)
    }
    assert set(table("gpus")["sources"]) <= used


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_memory_is_plausible(gpu: GPU) -> None:
    low, high = gpu.memory_range
    assert gpu.memory == low <= high
    assert gpu.label is not None
    box = gpu.label * GIB
    if gpu.id == "strix-halo-128gb":  # Linux lends half of the memory, or as much as one sets
        assert (low, high) == (box // 2, box * 15 // 16)
        return
    assert (0.64 if gpu.vendor == "apple" else 0.9) * box <= low <= high <= 1.01 * box
    assert high - low < 0.06 * box
    if gpu.smi and gpu.vendor == "nvidia":
        assert low <= high <= gpu.smi <= box
        assert 0 <= gpu.smi - low <= reserve(gpu.smi).high
    assert 0.6 * low < usable(gpu) == low - gpu.held


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_speeds_are_plausible(gpu: GPU) -> None:
    assert gpu.bandwidth is not None
    assert 100e9 < gpu.bandwidth < 10e12
    assert set(gpu.rates) <= set(MATHS)
    rates = {math: gpu.rates.get(math) for math in MATHS}
    assert all(rate is None or 5e10 < rate < 2e16 for rate in rates.values())
    if rates["bf16"] and rates["fp16"] and gpu.id != "gaudi3":  # its fp16 runs at the tf32 rate
        assert rates["bf16"] / 2 <= rates["fp16"] <= 2 * rates["bf16"]
    if rates["fp8"] and rates["bf16"]:
        assert 0.99 <= rates["fp8"] / rates["bf16"] <= 2.1
    if rates["fp4"] and rates["fp8"]:
        assert 1.9 <= rates["fp4"] / rates["fp8"] <= 4.1
    if rates["tf32"] and rates["bf16"]:
        assert rates["tf32"] <= 0.51 * rates["bf16"]
    if rates["fp32"] and rates["tf32"]:
        assert (
            rates["tf32"] >= 0.9 * rates["fp32"] or gpu.id == "a10g"
        )  # a label beside a measured rate


@pytest.mark.parametrize(
    "gpu", [gpu for gpu in GPUS.values() if gpu.vendor == "nvidia"], ids=lambda gpu: gpu.id
)
def test_nvidia_rows_know_their_architecture(gpu: GPU) -> None:
    assert gpu.sm is not None
    assert (6, 0) <= gpu.sm <= (12, 1)
    assert gpu.arch == f"sm_{gpu.sm[0]}{gpu.sm[1]}"
    assert gpu.sms is None or 10 <= gpu.sms <= 188
    if gpu.rates and gpu.id != "gb10":  # its dense bf16 rate is not published
        assert ("bf16" in gpu.rates) == (gpu.sm >= (8, 0))
    assert "fp8" not in gpu.rates or gpu.sm >= (8, 9)
    assert "fp4" not in gpu.rates or gpu.sm >= (10, 0)
    # fp32 = SMs x lanes x 2 x clock: the clock that follows must be one that chips run at
    lanes = 64 if gpu.sm < (8, 6) else 128
    if gpu.sms and "fp32" in gpu.rates:
        assert 0.9e9 < gpu.rates["fp32"] / (gpu.sms * lanes * 2) < 2.9e9 or gpu.sm in {
            (6, 1),
            (8, 7),
            (10, 3),
        }


# Totals that were printed to the byte, or by torch in whole MiB: the range must hold each.
@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("rtx-5090", 33680457728),  # deviceQuery, NVIDIA/nccl#1637
        ("rtx-4090", 25262096384),  # torch, Comfy-Org/ComfyUI#7063
        ("rtx-6000-ada", 50865307648),  # unslothai/unsloth-zoo#1053
        ("a100-sxm-40gb", 42298834944),  # deviceQuery, bottlerocket-os/bottlerocket#3873
        ("h100-nvl", 99456909312),  # torch 2.5
        ("rtx-3060-12gb", 12622168064),
        ("gb10", 128501256192),  # leptonai/gpud#1170
        ("h200", 143156 * MIB),
        ("h20", 97285 * MIB),
        ("mi300x", 196592 * MIB),  # ROCm/legacy-rocm-build#4203
        ("rtx-4060-laptop", 7815 * MIB),  # llama.cpp
        ("rtx-3050-laptop-4gb", 3953393664),  # torch 2.12
        ("rtx-5060-laptop", 8080064512),
    ],
)
def test_ranges_hold_the_totals_that_were_logged(name: str, total: int) -> None:
    low, high = GPUS[name].memory_range
    assert low <= total <= high


def test_a_laptop_part_is_no_card_and_has_no_rates() -> None:
    laptops = [gpu for gpu in GPUS.values() if gpu.form == "laptop"]
    assert len(laptops) >= 45
    assert not {gpu.id for gpu in laptops} & {gpu.id for gpu in nvidia_cards()}
    assert not any(gpu.rates for gpu in laptops)
    assert find_gpu("gtx-1080") not in nvidia_cards()  # PyTorch has no kernels for Pascal
    for gpu in laptops:
        for name in (gpu.id, gpu.name, *gpu.aliases):
            assert all(one.form == "laptop" for one in variants(name)), name
    assert context(find_gpu("rtx-4060-laptop")).low == 24 * 1536 * 2048


def test_the_label_is_not_the_memory() -> None:
    assert find_gpu("h100-sxm").memory / GIB == pytest.approx(79.10, abs=0.01)
    assert find_gpu("rtx-4090").memory / GIB == pytest.approx(23.52, abs=0.01)
    assert find_gpu("t4").memory / GIB == pytest.approx(14.56, abs=0.01)


def test_what_is_unchecked_says_so() -> None:
    assert "memory" in find_gpu("mi325x").unchecked
    assert "memory" not in find_gpu("h100-sxm").unchecked
    assert find_gpu("l40").status["bf16"] == "label"
    assert find_gpu("mi308x").rates == {}  # doubtful figures are left out, not marked


# ---------------------------------------------------------------- names


def test_names_are_unique_up_to_spelling() -> None:
    shared = {plain(name) for row in table("gpus").values() for name in row.get("shared", ())}
    seen: dict[str, str] = {}
    for gpu in GPUS.values():
        for name in {plain(one) for one in (gpu.id, gpu.name, *gpu.aliases)} - shared:
            assert seen.setdefault(name, gpu.id) == gpu.id
            assert variants(name) == (gpu,)
    assert not shared & {plain(gpu.id) for gpu in GPUS.values()}


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("RTX_4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100 SXM", "h100-sxm"),
        ("h100-sxm5-80gb", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("a100 sxm 80G", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Intel(R) Arc(TM) B580 Graphics", "arc-b580"),
        ("Gaudi3", "gaudi3"),
        ("RTX 3080 12 GB", "rtx-3080-12gb"),
        ("3090 24gb", "rtx-3090"),
        ("16GB 4060 Ti", "rtx-4060-ti-16gb"),
        ("4090 with 24 GB VRAM", "rtx-4090"),
        ("a6000s", "rtx-a6000"),
        ("6000 Ada", "rtx-6000-ada"),
        ("4060", "rtx-4060"),
        ("4060 laptop", "rtx-4060-laptop"),
        ("rtx 4060 laptop gpu", "rtx-4060-laptop"),
        ("RTX 4060 Laptop 8GB", "rtx-4060-laptop"),
        ("rtx4090laptop", "rtx-4090-laptop"),
        ("rtx 4090 mobile", "rtx-4090-laptop"),
        ("laptop 4080", "rtx-4080-laptop"),
        ("4090m", "rtx-4090-laptop"),
        ("4070 max-q", "rtx-4070-laptop"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", "rtx-4070-laptop"),
        ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", "rtx-3050-laptop-6gb"),
        ("NVIDIA GeForce RTX 2080 Super with Max-Q Design", "rtx-2080-super-laptop"),
        ("3080 laptop 16gb", "rtx-3080-laptop-16gb"),
        ("5000 ada laptop", "rtx-5000-ada-laptop"),
        ("RTX PRO 6000 Max-Q", "rtx-pro-6000-ws"),
        ("L40S", "l40s"),
        ("Apple M2 Ultra 192GB", "m2-ultra-192gb"),
    ],
)
def test_found_by_any_of_its_names(name: str, known: str) -> None:
    assert find_gpu(name).id == known


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("RTX 3080", "`rtx-3080-10gb`, `rtx-3080-12gb`"),
        ("3080 laptop", "`rtx-3080-laptop-8gb`, `rtx-3080-laptop-16gb`"),
        ("NVIDIA GeForce RTX 4060 Ti", "`rtx-4060-ti-8gb`, `rtx-4060-ti-16gb`"),
        ("A100", "`a100-pcie-40gb`, `a100-sxm-40gb`, `a100-pcie-80gb`, `a100-sxm-80gb`"),
        ("a100-80gb", "`a100-pcie-80gb`, `a100-sxm-80gb`"),
        ("H100", "`h100-pcie`, `h100-sxm`, `h100-nvl`"),
        ("V100", "`v100-sxm2-16gb`, `v100-sxm2-32gb`, `v100-pcie-16gb`, `v100-pcie-32gb`"),
        ("GH200", "`gh200-96gb`, `gh200-144gb`"),
    ],
)
def test_a_name_of_several_is_refused_with_all_of_them(name: str, listed: str) -> None:
    with pytest.raises(InputError) as error:
        find_gpu(name)
    count = listed.count(",") + 1
    assert problems(error) == [(f"`{name}` names {count} GPUs", "gpu", f"name one of {listed}")]


def test_a_name_that_leaves_the_memory_open_is_refused() -> None:
    with pytest.raises(InputError) as error:
        find_gpu("Apple M1 Max")
    assert problems(error) == [
        (
            "`Apple M1 Max` comes in several memory sizes",
            "gpu",
            f"name the size, like `m1-max-32gb`; {BY_MEMORY}",
        )
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("macbook pro m3", "`macbook pro m3` comes in several memory sizes"),
        ("Mac Studio", "`Mac Studio` comes in several memory sizes"),
        ("MacBook Pro 14-inch 2023", "`MacBook Pro 14-inch 2023` comes in several memory sizes"),
        ("apple silicon", "`apple silicon` comes in several memory sizes"),
        ("mps", "`mps` comes in several memory sizes"),
        ("macro", "unknown GPU `macro`"),
        ("machine", "unknown GPU `machine`"),
        ("metal-16gb", "unknown GPU `metal-16gb`"),
    ],
)
def test_names_of_macs_are_no_other_words(name: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_cluster(name)
    assert problems(error)[0][0] == message


@pytest.mark.parametrize(
    ("name", "offer"),
    [
        ("rtx 4909", "did you mean `rtx-4090`"),
        ("MI300", "did you mean `mi300x`"),
        ("sources", ""),
        ("", ""),
        ("NVIDIA", ""),
        ("\N{SNOWMAN}" * 10_000, ""),
        ("h" * 1_000_000, ""),
    ],
)
def test_an_unknown_name_offers_the_nearest(name: str, offer: str) -> None:
    with pytest.raises(InputError) as error:
        find_gpu(name, where="job.gpu")
    [(message, where, hint)] = problems(error)
    assert (message, where) == (f"unknown GPU `{name[:80]}`", "job.gpu")
    assert hint.startswith(offer)
    assert hint.endswith(BY_MEMORY)


# ---------------------------------------------------------------- a card by its memory


def test_custom_memory_is_taken_as_it_is() -> None:
    gpu = custom_gpu(24 * GIB)
    assert usable(gpu) == gpu.memory == 24 * GIB
    assert gpu.memory_range == (24 * GIB, 24 * GIB)
    assert (gpu.bandwidth, gpu.rates, gpu.sm, gpu.sms, gpu.link, gpu.smi) == (
        None,
        {},
        None,
        None,
        None,
        None,
    )
    assert gpu.status == {"memory": "given"}


@pytest.mark.parametrize("memory", [0, -1, 2**61])
def test_custom_memory_out_of_range(memory: int) -> None:
    with pytest.raises(InputError) as error:
        custom_gpu(memory)
    assert problems(error) == [
        (
            f"`{memory}` bytes is not a valid GPU memory",
            "memory",
            "must be more than 0 and at most 1024 PiB",
        )
    ]


def test_gpus_can_be_keys_and_replaced() -> None:
    gpu = find_gpu("t4")
    assert {gpu: 1}[find_gpu("Tesla T4")] == 1
    assert usable(replace(gpu, held=GIB)) == usable(gpu) - GIB
    assert usable(replace(gpu, held=2 * gpu.memory)) == 0


# ---------------------------------------------------------------- links


@pytest.mark.parametrize("name", links())
def test_every_link_is_cited_and_plausible(name: str) -> None:
    link = find_link(name)
    assert set(link.status) == set(link.cites)
    assert set(link.status.values()) <= set(STATUSES)
    assert ("bandwidth" in link.cites) == (link.bandwidth is not None)
    assert link.bandwidth is None or 0.1e9 < link.bandwidth < 1e12
    assert link.peer is None or link.bandwidth is None or link.peer <= link.bandwidth
    assert link.copy is None or link.bandwidth is None or link.copy <= link.bandwidth
    assert link.latency is None or 1e-7 < link.latency < 1e-3
    for collective, by_gpus in link.measured.items():
        assert collective in COLLECTIVES
        for gpus, calls in by_gpus.items():
            assert gpus in {2, 4, 8}
            assert 1e-6 < calls[0][1] < 1e-4
            assert list(calls) == sorted(calls)
            assert link.bandwidth is not None
            size, seconds = calls[-1]
            rate = (2 if collective == "all_reduce" else 1) * size * (gpus - 1) / gpus / seconds
            assert 0.2 * link.bandwidth < rate < 1.05 * link.bandwidth


def test_every_link_source_is_used_and_links_are_linked() -> None:
    rows = {name: row for name, row in table("links").items() if name != "sources"}
    assert {
        text.split()[-1] for row in rows.values() for text in row.values() if isinstance(text, str)
    } >= set(table("links")["sources"])
    assert {"nvlink", "pcie", "xgmi", "network"} <= {link.kind for link in links().values()}
    found = find_gpu("h100-sxm").link
    assert found is not None
    assert (found.name, found.bandwidth, found.measured["all_reduce"][8][0]) == (
        "nvlink4",
        450e9,
        (512, 15.59e-6),
    )
    assert find_gpu("rtx-3090").bridge == find_link("nvlink3-bridge")


def test_an_unknown_link_offers_the_nearest() -> None:
    with pytest.raises(InputError) as error:
        find_link("infiniband-nrd")
    [(message, where, hint)] = problems(error)
    assert (message, where) == ("unknown link `infiniband-nrd`", "cluster.network")
    assert "`infiniband-ndr`" in hint


# ---------------------------------------------------------------- outside the allocator


def test_the_context_range_holds_every_log() -> None:
    logs = {name: text.split(" ", 3) for name, text in table("contexts")["log"].items()}
    assert len(logs) >= 10
    for name, (gpu, logged, status, source) in logs.items():
        assert status in STATUSES
        assert source
        low, high, cite = context(find_gpu(gpu))
        assert low <= int(logged) <= high, name
        assert cite


def test_the_context_follows_the_size_of_the_chip() -> None:
    low, high, cite = context(find_gpu("rtx-6000-ada"))
    assert (low, high - low) == (142 * 1536 * 2048, 483183821)
    assert cite.startswith("derived: ")
    assert context(find_gpu("rtx-4060")).high < context(find_gpu("b200")).high < 1.1 * GIB
    assert context(find_gpu("t4")) == (110100480, 147718144, context(find_gpu("t4")).cite)
    assert context(find_gpu("t4")).cite.startswith("log: ")


@pytest.mark.parametrize("gpu", [*GPUS.values(), custom_gpu(GIB)], ids=[*GPUS, "custom"])
def test_every_gpu_has_a_context(gpu: GPU) -> None:
    low, high, cite = context(gpu)
    assert 0 <= low < high <= 1.1 * GIB
    assert cite.split(":")[0] in STATUSES


def test_unknown_vendors_get_a_wide_range() -> None:
    assert context(find_gpu("mi300x")) == (0, GIB, "label: no figure found for ROCm")
    low, high, _ = context(custom_gpu(24 * GIB))
    assert all(
        low <= context(gpu).low and context(gpu).high <= high
        for gpu in GPUS.values()
        if gpu.sms and gpu.vendor == "nvidia"
    )


def test_context_rows_name_gpus_and_architectures_that_exist() -> None:
    contexts = table("contexts")
    assert set(contexts["gpu"]) <= set(GPUS)
    assert {f"{gpu.sm[0]}.{gpu.sm[1]}" for gpu in GPUS.values() if gpu.sm} <= set(
        contexts["threads"]
    )
    for section in ("gpu", "vendor", "desktop", "reserve"):
        for text in contexts[section].values():
            low, high, status, _ = span(text)
            assert low < high
            assert status in STATUSES


def test_a_desktop_holds_more_under_windows() -> None:
    assert (
        desktop("linux").high
        < desktop("wsl").low
        < desktop("windows").low
        < desktop("windows").high
        == int(3.2 * GIB)
    )


# ---------------------------------------------------------------- clusters


@pytest.mark.parametrize(
    ("text", "gpu", "per_node", "nodes"),
    [
        ("8xH100", "h100-sxm", 8, 1),
        ("8xh100-pcie", "h100-pcie", 8, 1),
        ("2x8xA100-80GB", "a100-sxm-80gb", 8, 2),
        ("1xRTX4090", "rtx-4090", 1, 1),
        ("rtx-4090", "rtx-4090", 1, 1),
        (" 4 x NVIDIA GeForce RTX 3090 ", "rtx-3090", 4, 1),
        ("100000×1024×h200", "h200", 1024, 100_000),
        ("2*b200", "b200", 2, 1),
    ],
)
def test_clusters_are_read(text: str, gpu: str, per_node: int, nodes: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.gpu.id, cluster.gpus_per_node, cluster.nodes, cluster.gpus) == (
        gpu,
        per_node,
        nodes,
        per_node * nodes,
    )
    assert cluster.network is None


@pytest.mark.parametrize(
    ("text", "per_node", "nodes"),
    [
        ("64xh100-sxm", 8, 8),
        ("8xh100-sxm", 8, 1),
        ("1x64xh100-sxm", 64, 1),
        ("12xh100-sxm", 12, 1),
        ("16xh100-pcie", 16, 1),
    ],
)
def test_more_boards_than_a_machine_carries_are_several_machines(
    text: str, per_node: int, nodes: int
) -> None:
    cluster = parse_cluster(text)
    assert (cluster.gpus_per_node, cluster.nodes) == (per_node, nodes)


def test_a_cluster_has_a_network() -> None:
    network = parse_cluster("2x8xh100-sxm", network="NDR").network
    assert network is not None
    assert (network.name, network.bandwidth) == ("infiniband-ndr", 50e9)


FORM = "write it like `8xh100-sxm` or, for several nodes, `2x8xh100-sxm`"
PER_NODE, NODES = "an integer from 1 to 1024", "an integer from 1 to 100000"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0xh200", [("`0` is not a valid number of GPUs per node", PER_NODE)]),
        ("-8xh200", [("`-8` is not a valid number of GPUs per node", PER_NODE)]),
        ("1.5xh200", [("`1.5` is not a valid number of GPUs per node", PER_NODE)]),
        ("1025xh200", [("`1025` is not a valid number of GPUs per node", PER_NODE)]),
        ("9" * 60 + "x8xh200", [(f"`{'9' * 20}` is not a valid number of nodes", NODES)]),
        (
            "0x0xh100",
            [
                ("`0` is not a valid number of nodes", NODES),
                ("`0` is not a valid number of GPUs per node", PER_NODE),
            ],
        ),
        ("2x3x4xh200", [("`2x3x4xh200` does not name a GPU", FORM)]),
        ("8x", [("`8x` does not name a GPU", FORM)]),
        ("", [("`` does not name a GPU", FORM)]),
        ("   ", [("`   ` does not name a GPU", FORM)]),
        ("1x" * 500_000, [(f"`{'1x' * 20}` does not name a GPU", FORM)]),
        ("8x?", [("unknown GPU `?`", BY_MEMORY)]),
        ("2xvega64", [("unknown GPU `vega64`", BY_MEMORY)]),
        ("RTX 4090 Ti Laptop", [("unknown GPU `RTX 4090 Ti Laptop`", BY_LAPTOP)]),
        (
            "8xH100-64GB",
            [
                (
                    "unknown GPU `H100-64GB`",
                    OTHER_SIZE.format("h100", "80 and 94", "h100-sxm --memory 64GiB"),
                )
            ],
        ),
        (
            "rtx 4090 48gb",
            [
                (
                    "unknown GPU `rtx 4090 48gb`",
                    OTHER_SIZE.format("rtx 4090", "24", "rtx-4090 --memory 48GiB"),
                )
            ],
        ),
    ],
)
def test_bad_clusters_say_all_that_is_wrong(text: str, expected: list[tuple[str, str]]) -> None:
    with pytest.raises(InputError) as error:
        parse_cluster(text, where="cluster")
    assert problems(error) == [(message, "cluster", hint) for message, hint in expected]


def test_a_bad_network_is_said_with_the_rest() -> None:
    with pytest.raises(InputError) as error:
        parse_cluster("0xwhat?", network="carrier pigeon")
    assert [message for message, _, _ in problems(error)] == [
        "`0` is not a valid number of GPUs per node",
        "unknown link `carrier pigeon`",
        "unknown GPU `what?`",
    ]


def test_a_cluster_checks_its_own_counts() -> None:
    with pytest.raises(InputError) as error:
        Cluster(gpu=find_gpu("t4"), gpus_per_node=0, nodes=-1)
    assert problems(error) == [
        ("`0` is not a valid number of GPUs per node", "cluster.gpus_per_node", PER_NODE),
        ("`-1` is not a valid number of nodes", "cluster.nodes", NODES),
    ]


@pytest.mark.parametrize(
    ("text", "gpu", "count"),
    [
        ("a100", "a100-sxm-80gb", 1),
        ("A100-40GB", "a100-sxm-40gb", 1),
        ("2xH100", "h100-sxm", 2),
        ("rtx-3060", "rtx-3060-12gb", 1),
        ("8xRTX 3080", "rtx-3080-10gb", 8),
    ],
)
def test_a_shared_name_means_the_most_common_gpu_and_says_so(
    text: str, gpu: str, count: int
) -> None:
    cluster = parse_cluster(text)
    assert (cluster.gpu.id, cluster.gpus) == (gpu, count)
    (note,) = assumptions(text)
    assert note.level == "note"
    assert note.message.endswith(f"this answer is for `{gpu}`")
    assert assumptions(gpu) == ()


def test_every_shared_name_but_a_macs_has_a_most_common_gpu() -> None:
    shared = {
        name
        for row in table("gpus").values()
        for name in row.get("shared", ())
        if row.get("vendor") != "apple"
    }
    assert [name for name in sorted(shared) if common_gpu(name) is None] == []


@pytest.mark.parametrize(
    ("text", "nodes", "each", "gpu"),
    [
        ("h100s", 1, 1, "h100-sxm"),
        ("8 h100s", 1, 8, "h100-sxm"),
        ("2 4090s", 1, 2, "rtx-4090"),
        ("2 1080 ti", 1, 2, "gtx-1080-ti"),
        ("rtx4090 x 2", 1, 2, "rtx-4090"),
        ("rtx-4090 x2", 1, 2, "rtx-4090"),
        ("4090\N{MULTIPLICATION SIGN}2", 1, 2, "rtx-4090"),
        ("Dual RTX 3090", 1, 2, "rtx-3090"),
        ("a100 80gb x8", 1, 8, "a100-sxm-80gb"),
        ("8 p5.48xlarge", 8, 8, "h100-sxm"),
        ("7900 xtx", 1, 1, "rx-7900-xtx"),
        ("2 gb200", 1, 2, "gb200"),
    ],
)
def test_counts_and_plurals_as_people_type_them(text: str, nodes: int, each: int, gpu: str) -> None:
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu.id) == (nodes, each, gpu)


@pytest.mark.parametrize("text", ["0 h100s", "8 h1000", "4090 48gb", "rtx 4090 16gb", "2 x4090 x2"])
def test_what_no_gpu_is_called_stays_unknown(text: str) -> None:
    with pytest.raises(InputError):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("text", "nodes", "each", "gpu"),
    [
        ("p4d.24xlarge", 1, 8, "a100-sxm-40gb"),
        ("2xp5.48xlarge", 2, 8, "h100-sxm"),
        ("a2-ultragpu-8g", 1, 8, "a100-sxm-80gb"),
        ("A3-HIGHGPU-8G", 1, 8, "h100-sxm"),
        ("g5.xlarge", 1, 1, "a10g"),
        ("Standard_ND96isr_H100_v5", 1, 8, "h100-sxm"),
        ("nc24ads_a100_v4", 1, 1, "a100-pcie-80gb"),
    ],
)
def test_a_cloud_machine_is_its_gpus(text: str, nodes: int, each: int, gpu: str) -> None:
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu.id) == (nodes, each, gpu)
    assert " x " in assumptions(text)[0].message


def test_every_machine_is_cited_and_has_known_gpus() -> None:
    sources = table("machines")["sources"]
    for machine in machines().values():
        assert machine.gpu in GPUS, machine.name
        assert 1 <= machine.count <= 16, machine.name
        assert machine.status in STATUSES, machine.name
        assert (machine.cite == sources["own"]) == (machine.status == "label"), machine.name
        assert gpu_problem(machine.name) is not None, "a machine is not a GPU too"
    assert {machine.cite for machine in machines().values()} == set(sources.values())


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("mac-16gb", 10.6, 11.9),
        ("MacBook Pro 24GB", 16, 17.8),
        ("m4-max-64gb", 48, 54),
        ("macbook pro m3 max 64gb", 48, 54),
        ("64 GB MacBook Pro 16-inch M3 Max", 48, 54),
        ("mac studio m2 ultra 192gb", 144, 162),
        ("m3 max 36 gb", 27, 30.3),
        ("M4 mac mini 16gb", 10.6, 11.9),
    ],
)
def test_a_mac_is_named_by_its_memory(text: str, low: float, high: float) -> None:
    gpu = parse_cluster(text).gpu
    assert gpu.vendor == "apple"
    assert low * GIB <= gpu.memory_range[0] <= gpu.memory_range[1] <= high * GIB


@pytest.mark.parametrize("text", ["tpu-v5e", "8xtpu-v4", "v5litepod-8", "trn1", "gaudi2", "HL-225"])
def test_hardware_whose_allocator_is_unknown_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not supported: "):
        parse_cluster(text)


def test_every_vendor_has_its_own_words() -> None:
    assert {gpu.vendor for gpu in GPUS.values()} <= set(VENDORS)
    for name, vendor in VENDORS.items():
        assert (name == "nvidia") == ("nvidia-smi" in vendor.shown_by)
        assert (name == "nvidia") == ("CUDA" in vendor.context)


# ---------------------------------------------------------------- auto: an NVML of our own


class FakeError(Exception):
    """What NVML raises."""


@dataclass
class Device:
    name: str | bytes
    total: int
    reserved: int | None = 500 * MIB
    used: int = 0
    sm: tuple[int, int] = (8, 9)
    uuid: str = "GPU-0"
    slices: list[Device | None] | None = None
    sms: int | None = None


@dataclass
class FakeNVML:
    """The part of pynvml that memfit calls."""

    devices: list[Device] = field(default_factory=list)
    broken: str = ""
    failing: str = ""
    open: int = 0

    NVMLError = FakeError
    nvmlMemory_v2 = 0x02000028

    def nvmlInit(self) -> None:
        if self.broken:
            raise FakeError(self.broken)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetCount(self) -> int:
        if self.failing:
            raise FakeError(self.failing)
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        return self.devices[index]

    def nvmlDeviceGetName(self, device: Device) -> str | bytes:
        return device.name

    def nvmlDeviceGetUUID(self, device: Device) -> str:
        return device.uuid

    def nvmlDeviceGetMemoryInfo(self, device: Device, version: int = 1) -> SimpleNamespace:
        if not device.total or (version == self.nvmlMemory_v2 and device.reserved is None):
            raise FakeError("Not Supported")
        free = device.total - (device.reserved or 0) - device.used
        return SimpleNamespace(
            total=device.total, reserved=device.reserved, free=free, used=device.used
        )

    def nvmlDeviceGetCudaComputeCapability(self, device: Device) -> tuple[int, int]:
        return device.sm

    def nvmlDeviceGetMigMode(self, device: Device) -> list[int]:
        if device.slices is None:
            raise FakeError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Device) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Device, index: int) -> Device:
        part = device.slices[index] if device.slices and index < len(device.slices) else None
        if part is None:
            raise FakeError("Not Found")
        return part

    def nvmlDeviceGetAttributes(self, device: Device) -> SimpleNamespace:
        if device.sms is None:
            raise FakeError("Not Supported")
        return SimpleNamespace(multiprocessorCount=device.sms)


def card(**changes: object) -> Device:
    return replace(
        Device(
            name="NVIDIA GeForce RTX 4090", total=24564 * MIB, reserved=484 * MIB, used=1024 * MIB
        ),
        **changes,
    )


def test_auto_asks_the_driver() -> None:
    nvml = FakeNVML([card()])
    gpu = auto_gpu(nvml, environ={})
    assert (gpu.id, gpu.smi, gpu.memory, gpu.held, gpu.free) == (
        "rtx-4090",
        24564 * MIB,
        24080 * MIB,
        1024 * MIB,
        23056 * MIB,
    )
    assert gpu.memory_range == (24080 * MIB, 24080 * MIB)
    assert usable(gpu) == gpu.free
    assert gpu.rates == find_gpu("rtx-4090").rates
    assert gpu.status["memory"] == "log"
    assert (
        gpu.cites["memory"]
        == "NVML, driver 580.65.06: 24564 MiB, minus 484 MiB that the driver reserves"
    )
    assert nvml.open == 0


def test_auto_with_an_old_driver_takes_the_row() -> None:
    gpu = auto_gpu(FakeNVML([card(reserved=None, name=b"NVIDIA GeForce RTX 4090")]), environ={})
    assert (gpu.id, gpu.memory, gpu.free) == ("rtx-4090", 24080 * MIB, 23540 * MIB)
    assert gpu.held == 540 * MIB
    assert gpu.cites["memory"].startswith("NVML, driver 580.65.06: 24564 MiB, for rtx-4090: ")


def test_auto_tells_cards_of_one_name_apart_by_their_total() -> None:
    for total, known in ((10240, "rtx-3080-10gb"), (12288, "rtx-3080-12gb")):
        assert (
            auto_gpu(
                FakeNVML([card(name="NVIDIA GeForce RTX 3080", total=total * MIB, sm=(8, 6))]),
                environ={},
            ).id
            == known
        )


def test_auto_knows_a_card_with_ecc_switched_on() -> None:
    gpu = auto_gpu(
        FakeNVML([card(name="NVIDIA RTX A6000", total=46068 * MIB, reserved=None, sm=(8, 6))]),
        environ={},
    )
    assert (gpu.id, gpu.sms, gpu.status["memory"]) == ("rtx-a6000", 84, "derived")
    assert gpu.memory == 46068 * MIB - reserve(46068 * MIB).high


@pytest.mark.parametrize(
    ("name", "total"), [("NVIDIA Frobnicator 9000", 50000), ("NVIDIA GeForce RTX 4090", 49140)]
)
def test_auto_guesses_nothing_of_a_card_that_no_row_describes(name: str, total: int) -> None:
    gpu = auto_gpu(FakeNVML([card(name=name, total=total * MIB, used=0)]), environ={})
    assert (gpu.id, gpu.name, gpu.memory, gpu.sm, gpu.arch) == (
        "auto",
        name,
        (total - 484) * MIB,
        (8, 9),
        "sm_89",
    )
    assert (gpu.rates, gpu.bandwidth, gpu.sms) == ({}, None, None)
    assert context(gpu).high > GIB


def test_auto_with_unified_memory_takes_the_row() -> None:
    assert auto_gpu(FakeNVML([card(name="NVIDIA GB10", total=0)]), environ={}) == find_gpu("gb10")
    thor = auto_gpu(FakeNVML([card(name="NVIDIA Thor", total=0)]), environ={})
    assert thor == find_gpu("jetson-agx-thor")


def test_auto_with_memory_that_nobody_knows() -> None:
    with pytest.raises(InputError) as error:
        auto_gpu(FakeNVML([card(name="NVIDIA Freyja", total=0)]), environ={})
    [(message, where, hint)] = problems(error)
    assert (message, where) == ("the driver does not report the memory of `NVIDIA Freyja`", "gpu")
    assert "--memory 24GiB" in hint


def test_auto_with_several_gpus_takes_the_first_visible() -> None:
    nvml = FakeNVML(
        [
            card(uuid="GPU-aa"),
            card(name="Tesla T4", total=15360 * MIB, sm=(7, 5), uuid="GPU-bb"),
            card(uuid="GPU-cc"),
        ]
    )
    assert [gpu.id for gpu in auto_gpus(nvml, environ={})] == ["rtx-4090", "t4", "rtx-4090"]
    assert auto_gpu(nvml, environ={}).id == "rtx-4090"
    assert auto_gpu(nvml, index=1, environ={}).id == "t4"
    for visible, ids in (
        ("1", ["t4"]),
        ("1,0", ["t4", "rtx-4090"]),
        ("GPU-b", ["t4"]),
        ("1,7,0", ["t4"]),
    ):
        assert [gpu.id for gpu in auto_gpus(nvml, environ={"CUDA_VISIBLE_DEVICES": visible})] == ids
    with pytest.raises(InputError) as error:
        auto_gpu(nvml, index=3, environ={})
    assert problems(error) == [("no GPU has index 3", "gpu", "from 0 to 2")]


@pytest.mark.parametrize("visible", ["", "-1", "9", "GPU-zz"])
def test_auto_with_every_gpu_hidden(visible: str) -> None:
    with pytest.raises(InputError) as error:
        auto_gpu(FakeNVML([card()]), environ={"CUDA_VISIBLE_DEVICES": visible})
    assert problems(error) == [
        (f"`CUDA_VISIBLE_DEVICES={visible}` hides all 1 GPUs of this machine", "gpu", "unset it")
    ]


def test_auto_sees_mig_slices_as_gpus() -> None:
    part = Device(
        name="NVIDIA A100-SXM4-80GB MIG 1g.10gb", total=9728 * MIB, reserved=0, sms=14, uuid="MIG-1"
    )
    whole = card(
        name="NVIDIA A100-SXM4-80GB",
        total=81920 * MIB,
        sm=(8, 0),
        slices=[None, part, replace(part, uuid="MIG-2", sms=None)],
    )
    first, second = auto_gpus(FakeNVML([whole]), environ={})
    assert (first.id, first.memory, first.sm, first.sms, first.rates) == (
        "auto",
        9728 * MIB,
        (8, 0),
        14,
        {},
    )
    assert first.note == "MIG slice: bandwidth and compute rates are unknown"
    assert second.sms is None
    assert auto_gpus(FakeNVML([whole]), environ={"CUDA_VISIBLE_DEVICES": "MIG-2"}) == (second,)


def test_auto_with_no_driver_no_gpu_or_a_failing_driver() -> None:
    for nvml, message in (
        (
            FakeNVML(broken="Driver Not Loaded"),
            "this machine has no working NVIDIA driver (Driver Not Loaded)",
        ),
        (FakeNVML(), "the NVIDIA driver reports no GPU on this machine"),
        (
            FakeNVML([card(slices=[])]),
            "the NVIDIA driver reports no GPU on this machine",
        ),  # MIG mode without a slice
        (
            FakeNVML([card()], failing="GPU is lost"),
            "the NVIDIA driver failed (GPU is lost)",
        ),
    ):
        with pytest.raises(InputError) as error:
            auto_gpu(nvml, environ={})
        assert problems(error) == [
            (message, "gpu", "name a GPU (`--gpu rtx-4090`) or give its memory (`--memory 24GiB`)")
        ]
        assert nvml.open == 0


def test_auto_without_nvidia_ml_py() -> None:
    script = (
        "import sys; sys.modules['pynvml'] = None\n"
        "from memfit.errors import MissingExtra\nfrom memfit.hardware import auto_gpu\n"
        "try:\n    auto_gpu()\nexcept MissingExtra as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "asking the driver for its GPUs (`--gpu auto`) needs the extra `measure`",
        "hint: pip install 'memfit[measure]'",
    ]


def test_importing_reads_no_table_and_nothing_heavy() -> None:
    script = (
        "import sys, memfit.hardware\nfrom memfit.hardware.tables import table\n"
        "assert table.cache_info().currsize == 0\nprint(sorted({'pynvml', 'torch', "
        "'numpy', 'yaml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("fields", [("name", "aliases", "shared"), ("common",)])
def test_names_are_read_without_the_rest_of_the_table(fields):
    rows = {key: row for key, row in table("gpus").items() if key != "sources"}
    found = columns("gpus", *fields)
    assert [*found] == [*rows]
    for key, row in rows.items():
        assert {name: found[key].get(name) for name in fields} == {
            name: row.get(name) for name in fields
        }
        assert "bandwidth" not in found[key]


def test_tables_are_parsed_section_by_section():
    folder = Path(sys.modules[table.__module__].__file__).parent
    for path in folder.glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        found = sections(text)
        assert {name: found[name] for name in found} == tomllib.loads(text)
    nested = 'title = "t"\n[a.b]\nc = 1\n[a]\nd = 2\n'
    assert sections(nested) == tomllib.loads(nested)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("3060", "rtx-3060-12gb"), ("2x3060", "rtx-3060-12gb"), ("4090", "rtx-4090")],
)
def test_a_number_alone_is_the_most_common_geforce(typed: str, meant: str) -> None:
    assert parse_cluster(typed).gpu.id == meant
