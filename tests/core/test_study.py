"""The matrix of ways to fine-tune: that it is the estimates it is made of, what it recommends, and
what it is when something is wrong."""

from __future__ import annotations

import dataclasses
import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memfit.api.study import matrix_of
from memfit.api.verbs import estimate as ask_estimate
from memfit.cli import main
from memfit.errors import InputError
from memfit.estimate import estimate, of_worst_rank
from memfit.hardware import parse_cluster
from memfit.job import Job
from memfit.measure.record import Case, write
from memfit.measure.run import recorded
from memfit.model.families import build
from memfit.plan.study import Cell, Matrix, Panel, Study, Way, default, strategy, study
from memfit.report import study as report
from memfit.report.heatmap import svg
from memfit.truth.published_cells import published
from memfit.uses import strategy_from
from memfit.words.models import model_of
from memfit.words.options import Ask

TINY = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
FEW, ONE = parse_cluster("4xa100-sxm-80gb"), parse_cluster("v100-sxm2-32gb")


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return Matrix(models=[build(TINY)], clusters=[FEW, ONE], lengths=[64])


@pytest.fixture(scope="module")
def found(matrix: Matrix) -> Study:
    return study(matrix)


def test_every_way_is_there_once(found: Study) -> None:
    several, one = found.panels
    assert len(several.cells) == 3 * 2 * 2 * 6
    assert len(one.cells) == 3 * 2 * 2 * 3
    assert len({cell.way for cell in several.cells}) == len(several.cells)
    assert not any(cell.refused for cell in several.cells)


def test_a_cell_is_the_estimate(found: Study, matrix: Matrix) -> None:
    panel = found.panels[0]
    for cell in panel.cells[::7]:
        same = estimate(
            matrix.models[0], matrix.job(cell.way, FEW, 64), FEW, strategy(cell.way, FEW)
        )
        assert (cell.device, cell.verdict, cell.host) == (same.device, same.verdict, same.host.size)
        assert cell.seconds == (None if same.time is None else same.time.seconds)


def test_a_study_leaves_out_the_rank_that_holds_least() -> None:
    model, job, layout = build(TINY), Job(seq=64), strategy_from(["zero=4,stage=1"], 4)
    every = estimate(model, job, FEW, layout)
    worst = of_worst_rank(model, job, FEW, layout)
    assert worst.device == every.device
    assert len(worst.ranks) < len(every.ranks)


def test_old_gpus_train_in_fp16_without_flash(found: Study, matrix: Matrix) -> None:
    old = found.panels[1].cells
    assert {cell.way.attention for cell in old} == {"eager", "sdpa"}
    assert matrix.job(old[0].way, ONE, 64).precision == "autocast-fp16"


def cell(layout: str, share: float, seconds: float | None, verdict: str = "fits") -> Cell:
    way = Way(method="lora", checkpointing="none", attention="flash-attn-2", layout=layout)
    return Cell(way=way, verdict=verdict, device=int(share * 2**36), seconds=seconds)


def panel(*cells: Cell) -> Panel:
    return Panel(model="m", parameters=1, cluster=FEW, seq=8, batch=1, cells=cells)


def test_what_to_begin_with() -> None:
    """It fits in most cases; of those the quickest; of those as quick, the smallest."""
    quick, small, safe = cell("DDP", 0.9, 1.0), cell("ZeRO-2", 0.5, 1.01), cell("ZeRO-3", 0.3, 2.0)
    told = default("s", [panel(quick, small, safe)], "")
    assert told.way is not None
    assert told.way.layout == "ZeRO-2"
    assert told.slower == pytest.approx(0.01)
    more = default(
        "s",
        [
            panel(quick, small, safe),
            panel(cell("DDP", 2, 1.0, "no"), cell("ZeRO-2", 2, 1, "no"), safe),
        ],
        "",
    )
    assert more.way is not None
    assert (more.way.layout, more.fits) == ("ZeRO-3", 2)
    unknown = default("s", [panel(cell("DDP", 0.9, None), safe)], "")
    assert unknown.way is not None
    assert unknown.way.layout == "ZeRO-3"  # a time that nobody knows is no reason to prefer it
    assert default("s", [panel(cell("DDP", 2, 1.0, "no"))], "").way is None


def run(name: str, seq: int, methods: Sequence[str], layouts: Sequence[str]) -> Study:
    model = model_of(name, Ask(offline=True))[1]
    return study(
        Matrix(
            models=[model],
            clusters=[parse_cluster("8xa100-sxm-80gb")],
            lengths=[seq],
            methods=methods,
            layouts=layouts,
        )
    )


@pytest.mark.slow
def test_published_conclusions() -> None:
    """Those of arXiv 2406.02290: ZeRO-2 with LoRA to begin with; ZeRO-3 with LoRA and checkpointing
    where memory is scarce or the model very large; FlashAttention for long contexts."""
    usual = (
        run("meta-llama/Llama-2-7b-hf", 1024, ("full", "lora"), ("DDP", "ZeRO-2", "ZeRO-3"))
        .defaults[0]
        .way
    )
    assert usual is not None
    assert (usual.method, usual.layout, usual.attention) == ("lora", "ZeRO-2", "fused")
    scarce = run("meta-llama/Llama-2-70b-hf", 4096, ("lora",), ("ZeRO-2", "ZeRO-3")).panels[0]
    assert {(one.way.layout, one.way.checkpointing) for one in scarce.cells if one.fits} == {
        ("ZeRO-3", "full")
    }
    long = run("meta-llama/Llama-2-7b-hf", 8192, ("lora",), ("DDP",)).panels[0]
    assert not any(
        one.fits
        for one in long.cells
        if one.way.attention == "eager" and one.way.checkpointing == "none"
    )
    for one in long.cells:
        other = next(
            two for two in long.cells if two.way.attention == "eager" and same(one.way, two.way)
        )
        assert one.way.attention == "eager" or (
            one.device < other.device and (one.seconds or 0) <= (other.seconds or 0)
        )


def same(one: Way, two: Way) -> bool:
    return (one.method, one.checkpointing, one.layout) == (
        two.method,
        two.checkpointing,
        two.layout,
    )


def test_interrupted(matrix: Matrix) -> None:
    def stop(done: int, total: int, words: str) -> None:
        if done == 5 and words:
            raise KeyboardInterrupt

    some = study(matrix, stop)
    assert not some.whole
    assert len(some.panels[0].cells) == 5
    assert "Ctrl-C stopped the study" in report.text(some, {})


def test_measured_figures_stand_beside() -> None:
    """Published rows of the same model, machine, length and options; the same of one of another
    precision are none."""
    given = {
        "gpus": "a100-sxm-80gb",
        "lengths": "4096",
        "methods": "full",
        "layouts": "one gpu",
        "offline": True,
        "batch": 4,
    }
    found = study(
        matrix_of(["mistralai/Mistral-7B-v0.1"], {**given, "precision": "bf16", "framework": "trl"})
    )
    rows = published(found)[("mistralai/Mistral-7B-v0.1", "a100-sxm-80gb", 1, 4096)]
    assert {one.metric for _, one in rows} == {"peak_allocated", "nvidia-smi"}
    assert {way.checkpointing for way, _ in rows} == {"full"}
    assert "measured, " in report.text(found, published(found))
    assert not published(
        dataclasses.replace(found, matrix=dataclasses.replace(found.matrix, precision=""))
    )


def test_reports(found: Study) -> None:
    text = report.text(found, {})
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("several GPUs, 1 case\nFull fine-tuning fits with ")
    assert "This compares their cost, not what the model learns." in text.replace("\n", " ")
    told = report.data(found, {})
    assert json.loads(json.dumps(told))["panels"][0]["cells"][0]["method"] == "full"
    assert "begin with" in report.markdown(found, {})
    fields = [one for one in ET.fromstring(svg(found)).iter() if one.tag.endswith("title")]
    assert len(fields) == 2 * sum(len(one.cells) for one in found.panels)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gpus": "8xh1000"}, "h1000"),
        ({"lengths": "0,abc"}, "abc"),
        ({"methods": "prompt"}, "prompt"),
        ({"layouts": "DDP,gemini"}, "gemini"),
        ({"layouts": "fsdp"}, "use `--use fsdp`"),
        ({"attention": "egaer"}, "egaer"),
        ({"checkpointing": ""}, "`checkpointing` is empty"),
        ({"use": "fsdp=3"}, "3"),
        ({"use": "ddp", "layouts": "DDP"}, "both choose the layouts"),
        ({"quant": "nf4"}, "`quant` is varied by the study itself"),
        ({"lengths": ""}, "` is empty"),
        ({"batch": -1}, "batch"),
    ],
)
def test_bad_input(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        matrix_of([TINY], {"offline": True, **given})


def test_the_defaults_are_those_of_trl_and_are_named() -> None:
    """As for a single job, and a framework that is named changes nothing else."""
    assumed = matrix_of(["qwen3-0.6b"], {"offline": True, "gpus": "rtx-4090"})
    assert (assumed.base.framework, assumed.base.batch, assumed.lengths) == ("trl", 8, [1024])
    way = Way(method="lora", checkpointing="full", attention="sdpa", layout="one GPU")
    alone = ask_estimate("qwen3-0.6b", gpu="rtx-4090", method="lora", offline=True)
    assert assumed.job(way, assumed.clusters[0], 1024) == alone.job
    plain = matrix_of(["qwen3-0.6b"], {"offline": True, "framework": "transformers"})
    assert (plain.base.framework, plain.base.batch, plain.assumed) == ("transformers", 1, {})


def test_one_study_speaks_in_sentences_with_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """The first lines answer each method and say what to type; the options of other commands
    work; the command gives the same figure."""
    words = ["qwen3-0.6b", "--gpu", "2xrtx-4090", "--method", "full,lora", "--seq", "512"]
    assert main(["study", *words, "--gradient-checkpointing", "--use", "ddp"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith("Full fine-tuning fits with ddp and checkpointing: ")
    second = second if second.startswith("  memfit") else third
    size = first.split(": ")[1].split(" ")[0]
    assert second.startswith("  memfit estimate Qwen/Qwen3-0.6B --method full --gpus 2xrtx-4090")
    assert main(second.split()[1:]) == 0
    assert f"fits: {size} GiB" in capsys.readouterr().out


def test_offload_is_recommended_only_where_nothing_else_fits() -> None:
    """However much quicker its engine is."""
    plain, offloaded = cell("one GPU", 0.9, 2.0), cell("ZeRO-2 + offload", 0.1, 1.0)
    told = default("s", [panel(plain, offloaded)], "lora")
    assert told.way is not None
    assert told.way.layout == "one GPU"
    needed = default("s", [panel(cell("one GPU", 2, 2.0, "no"), offloaded)], "lora")
    assert needed.way is not None
    assert needed.way.layout == "ZeRO-2 + offload"


def test_a_way_that_may_fit_is_called_tight() -> None:
    place = panel(cell("DDP", 0.5, 1.0, "tight"), cell("ZeRO-2", 2, 1.0, "no"))
    none = default("s", [place], "lora")
    assert report.best_words(none, place).startswith("is tight with DDP, no checkpointing")
    large = panel(cell("DDP", 2, 1.0, "no"))
    assert "does not fit: the smallest configuration" in report.best_words(none, large)


def test_all_problems_at_once() -> None:
    with pytest.raises(InputError) as bad:
        matrix_of([], {"gpus": "8xh1000", "lengths": "-4", "methods": "prompt", "optimizer": "sdg"})
    assert len(bad.value.problems) == 5


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, picture = tmp_path / "config.json", tmp_path / "map.svg"
    config.write_text(json.dumps(TINY))
    assert (
        main(
            [
                "study",
                str(config),
                "--gpus",
                "2xa100-sxm-80gb",
                "--lengths",
                "32",
                "--methods",
                "lora",
                "--heatmap",
                str(picture),
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["whole"] is True
    assert picture.read_text().startswith("<svg")
    assert main(["study", str(config), "--heatmap", str(tmp_path / "no" / "map.svg")]) == 2
    assert main(["study", "--lengths", "32"]) == 2


def test_own_records_stand_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record of one cell's job, and one of another length; a folder without records is told."""
    model, matrix = (
        "openai-community/gpt2",
        matrix_of(
            ["openai-community/gpt2"],
            {"gpus": "1xa100-sxm-80gb", "lengths": "64", "methods": "full"},
        ),
    )
    (cell, *_) = study(matrix).panels[0].cells
    for name, seq in (("same", 64), ("other", 128)):
        job = matrix.job(cell.way, matrix.clusters[0], seq)
        answer = {
            "result": "ok",
            "by": "cuda",
            "gpu": "NVIDIA A100-SXM4-80GB",
            "allocated": 2**30 * 7 // 5,
            "reserved": 2**31,
        }
        write(
            recorded(Case(model=model, config={}, job=job), answer, 2.0), tmp_path / f"{name}.json"
        )
    words = [
        "study",
        model,
        "--gpus",
        "1xa100-sxm-80gb",
        "--lengths",
        "64",
        "--methods",
        "full",
        "--no-measured",
    ]
    assert main([*words, "--records", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("GiB measured") == 2
    assert "allocated 1.40 GiB measured" in said
    assert "(own records)" in said
    assert main(words) == 0
    assert "GiB measured" not in capsys.readouterr().out
    assert main([*words, "--records", str(tmp_path / "none")]) == 2
    assert "records" in capsys.readouterr().err
