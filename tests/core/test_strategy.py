"""Layouts as they are written: sizes that fill the GPUs, settings that are known, and what is said
of the rest."""

import pytest

from memfit.errors import InputError
from memfit.strategy import DDP, FSDP, ONE, PP, TP, Strategy, ZeRO
from memfit.uses import strategy_from


@pytest.mark.parametrize(
    ("words", "gpus", "meant"),
    [
        (["fsdp"], 8, Strategy(fsdp=FSDP(size=8))),
        (["fsdp=8", "tp=8"], 64, Strategy(fsdp=FSDP(size=8), tp=TP(size=8))),
        (["tp=2"], 8, Strategy(ddp=DDP(size=4), tp=TP(size=2))),  # the rest are replicas
        (["fsdp=4"], 8, Strategy(ddp=DDP(size=2), fsdp=FSDP(size=4))),  # HSDP
        (
            ["zero,stage=3,offload-param=cpu"],
            4,
            Strategy(zero=ZeRO(size=4, stage=3, offload_param="cpu")),
        ),
        (
            ["pp=4,schedule=gpipe", "ddp"],
            8,
            Strategy(ddp=DDP(size=2), pp=PP(size=4, schedule="gpipe")),
        ),
        (["fsdp=8,reshard=no"], None, Strategy(fsdp=FSDP(size=8, reshard=False))),
        ([], 4, Strategy(ddp=DDP(size=4))),
    ],
)
def test_layouts_are_read(words: list[str], gpus: int | None, meant: Strategy) -> None:
    found = strategy_from(words, gpus)
    assert found == meant
    assert found.ranks == (gpus or 8)


@pytest.mark.parametrize(
    ("words", "gpus", "said"),
    [
        (["fsdp=3"], 8, "3 ranks do not divide 8 GPUs"),
        (["fsdp=64", "tp=8"], 64, "`--use fsdp=8` `--use tp=8`"),
        (["fsdp", "ddp"], 8, "hint: give one of them a size"),
        (["fdsp=8"], 8, "unknown layout `fdsp`"),
        (["fsdp=8", "fsdp=8"], 8, "is given twice"),
        (["fsdp=8,reshard=no,reshard"], 8, "`reshard` is given twice"),
        (["fsdp=8,size=4"], 8, "`size` is given twice"),
        (["fsdp=0"], 8, "a layout must have at least 1 rank"),
        (["fsdp=x"], 8, "`x` must be an integer"),
        (["zero=8,stage=4"], 8, "`4` is out of range"),
        (["zero=8,stages=3"], 8, "unknown setting `stages`"),
        (["zero=4", "fsdp=2"], 8, "FSDP and ZeRO cannot shard the same weights"),
        (["zero=4"], 8, "take 4 of 8 GPUs"),
        (["zero=4", "ddp=2"], 8, "ZeRO already covers data parallelism"),
        (["fsdp"], None, "`fsdp` has no size and there are no GPUs to take it from"),
        (["fsdp=8", "ep=3"], 8, "do not divide the 8 ranks of a stage"),
    ],
)
def test_what_makes_no_sense_is_told(words: list[str], gpus: int | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        strategy_from(words, gpus)


def test_everything_wrong_is_told_at_once() -> None:
    with pytest.raises(InputError) as caught:
        strategy_from(["fdsp=8", "zero=4,stage=9", "tp=-1"], 8)
    assert len(caught.value.problems) == 3


def test_one_gpu_is_no_layout() -> None:
    assert not ONE
    assert Strategy(tp=TP(size=2))
