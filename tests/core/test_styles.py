"""Styles of attention and of experts: every one is there, and loaded when it is asked for."""

import subprocess
import sys

import pytest

from memfit.lower.attention import ATTENTION, SHARED
from memfit.lower.attention.llama import STYLES
from memfit.lower.moe import MOES
from memfit.lower.styles import Styles


@pytest.mark.parametrize("table", [ATTENTION, SHARED, MOES])
def test_every_style_is_a_function(table):
    assert all(callable(table[style]) for style in table)
    assert len({*table}) == len(table)


def test_every_style_of_the_common_kernel_is_in_the_table():
    assert {style for style, place in ATTENTION.places.items() if place == "llama.STYLES"} == {
        *STYLES
    }
    assert ATTENTION["qwen3"] is STYLES["qwen3"]


def test_an_unknown_style_is_none():
    table = Styles("memfit.lower.attention", {"opt": "opt.opt"})
    assert "opt" in table
    assert "mpt" not in table
    with pytest.raises(KeyError):
        table["mpt"]


def test_an_answer_loads_the_styles_of_its_model_alone():
    code = (
        "import sys; from memfit import estimate; "
        "estimate('llama-3.2-1b', method='lora', gpu='h100-sxm', offline=True); "
        "print([name for name in sys.modules if name.startswith('memfit.lower.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "memfit.lower.attention.llama'" in done.stdout
    for name in ("attention.qwen", "attention.gpt2", "moe.experts", "captured", "script"):
        assert f"memfit.lower.{name}'" not in done.stdout
