"""Variants side by side: the same figures as one by one, flags read as `estimate` reads them, and
everything wrong at once."""

import json

import pytest

from memfit import compare, estimate
from memfit.cli import main
from memfit.errors import InputError

MODEL = "qwen/qwen2.5-0.5b"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["compare", MODEL, "--offline", "--seq", "64", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_each_column_is_the_estimate_of_its_variant(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(
        capsys,
        "--gpus",
        "2xa10",
        "--with",
        "--use ddp",
        "--with",
        "--method lora --rank 4",
        "--json",
    )
    assert code == 0
    found = json.loads(out)["variants"]
    assert [one["words"] for one in found] == ["--use ddp", "--method lora --rank 4"]
    for one, given in zip(found, ({"use": "ddp"}, {"method": "lora", "rank": 4}), strict=True):
        alone = estimate(MODEL, offline=True, seq=64, gpu="2xa10", **given)
        assert one["estimate"]["memory"]["parts"] == alone.parts
        assert one["estimate"]["memory"]["device"] == alone.device


@pytest.mark.parametrize("between", [" ", ","])
def test_a_variant_may_be_written_as_keys(between: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = ("--gpus", "2xa10", "--json")
    lora = f"method=lora{between}rank=4"
    _, keys, _ = said(capsys, *gpus, "--with", lora, "--with", "use=ddp=2")
    flags = ("--with", "--method lora --rank 4", "--with", "--use ddp=2")
    _, plain, _ = said(capsys, *gpus, *flags)
    found, wanted = (json.loads(one)["variants"] for one in (keys, plain))
    assert [one["estimate"] for one in found] == [one["estimate"] for one in wanted]


def test_a_comma_within_a_value_stays(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = ("--gpus", "4xa10", "--json")
    code, out, _ = said(capsys, *gpus, "--with", "use=fsdp=2,ddp=2,batch=2", "--with", "batch=4")
    assert code == 0
    jobs = [one["estimate"]["job"] for one in json.loads(out)["variants"]]
    assert [job["batch"] for job in jobs] == [2, 4]


def test_models_are_variants_too(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--offline", "--seq", "64", "--json")
    names = ("qwen3-0.6b", "llama-3.2-1b")
    assert main(["compare", *names, *flags, "--method", "lora"]) == 0
    found = json.loads(capsys.readouterr().out)["variants"]
    assert [one["words"] for one in found] == [*names]
    for one, name in zip(found, names, strict=True):
        alone = estimate(name, offline=True, seq=64, method="lora")
        assert one["estimate"]["memory"]["parts"] == alone.parts
    assert main(["compare", *names, *flags, "--with", "batch=1", "--with", "batch=2"]) == 0
    both = json.loads(capsys.readouterr().out)["variants"]
    assert [one["words"] for one in both] == [
        f"{name} batch={size}" for name in names for size in (1, 2)
    ]
    assert main(["compare", "qwen3", "0.6b", *flags, "--with", "batch=1", "--with", "batch=2"]) == 0
    one_model = json.loads(capsys.readouterr().out)["variants"]
    assert [one["words"] for one in one_model] == ["batch=1", "batch=2"]
    assert main(["compare", names[0], "nosuch", "nosuch2", *flags]) == 2
    said = capsys.readouterr()
    assert "nosuch2" in said.out + said.err


def test_the_table_has_a_column_for_each_and_says_which_is_which(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = said(
        capsys, "--gpu", "t4", "--with", "--method full", "--with", "--method full --batch 100000"
    )
    assert code == 0
    legend, table = out.split("\n\n")
    assert legend.splitlines() == ["A  --method full", "B  --method full --batch 100000"]
    rows = table.splitlines()
    assert rows[0].split() == ["A", "B"]
    assert rows[1].split(maxsplit=1)[1].split("  ")[0] == "fits"
    assert rows[1].endswith("does not fit")
    assert max(map(len, rows)) <= 80
    assert (
        said(capsys, "--gpu", "t4", "--with", "--batch 100000", "--with", "--batch 200000")[0] == 1
    )


def test_many_variants_go_on_below(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for batch in range(1, 7) for word in ("--with", f"--batch {batch}")]
    code, out, _ = said(capsys, *words)
    assert code == 0
    assert len(out.strip().split("\n\n")) == 3
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no variants"),
        (["--with", "--batch 1"], "1 variant to compare"),
        (["--with", "--batch 1", "--with", "--bach 2"], "unknown option"),
        (["--with", "--batch 1", "--with", '--batch "2'], "no closing quotation"),
        (["--with", "--batch x", "--with", "--use fdsp"], "variant 2"),
        (["--with", "--batch 1", "--with", "gpt2"], "unexpected extra argument"),
    ],
)
def test_what_is_wrong_is_told(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, *words)
    assert (code, out) == (2, "")
    assert told in err.lower()


def test_problems_of_all_variants_are_raised_together() -> None:
    with pytest.raises(InputError) as caught:
        compare(MODEL, [{"batch": 0}, {"use": "fdsp", "seq": -1}], offline=True)
    assert [one.where.split(":")[0] for one in caught.value.problems] == [
        "variant 1",
        "variant 2",
        "variant 2",
    ]


def test_markdown_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = said(capsys, "--with", "--batch 1", "--with", "--batch 2", "--format", "markdown")
    assert "- A: `--batch 1`" in out
    assert "|  | A | B |" in out
