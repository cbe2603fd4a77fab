"""docs/served.md says which models of the catalog are answered for serving engines, and why not.

A model of each type in each run, the smallest; all of them with MEMFIT_WHOLE.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.sampling import WHOLE

from memfit.model import catalog

ROOT = Path(__file__).parents[2]
ENGINES = ("vllm", "sglang", "llamacpp")


@cache
def tool() -> Any:
    given = importlib.util.spec_from_file_location("served_tool", ROOT / "tools" / "served.py")
    assert given is not None
    assert given.loader is not None
    module = importlib.util.module_from_spec(given)
    given.loader.exec_module(module)
    return module


@cache
def sections() -> dict[str, str]:
    """The part of the page about each engine, by its title."""
    parts = tool().PAGE.read_text(encoding="utf-8").split("\n## ")
    return {part.partition(":")[0]: part for part in parts[1:]}


@cache
def entries() -> tuple[Any, ...]:
    """The smallest model of each type, quantized or not."""
    found: dict[str, Any] = {}
    for one in sorted(catalog.entries(), key=lambda one: one.parameters or 0):
        found.setdefault(one.model_type, one)
    return tuple(found.values())


def told(engine: str) -> tuple[dict[str, str], set[str]]:
    """The unanswered types that the page lists: supported ones with their reasons, and others."""
    part = sections()[tool().NAMES[engine]]
    listed = re.findall(r"^- `(.+?)` \(\d+ models?\): (.+)$", part, re.MULTILINE)
    return dict(listed), set(re.findall(r"`(.+?)`", part.rpartition("Not in its list")[2]))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_of_each_type_is_answered_unless_the_page_says_why(engine: str) -> None:
    found = [tool().row(engine, one) for one in entries()]
    supported, others = told(engine)
    assert len(found) > 100
    for one in found:
        if one.why and one.supported:
            assert supported[one.kind] == one.why
        elif one.why:
            assert one.kind in others, one
        elif one.supported:
            # other models of the type may be refused, for what they have and this one has not
            assert f"type `{one.kind}`" not in supported.get(one.kind, ""), one


def test_of_the_models_that_an_engine_supports_nearly_all_are_answered() -> None:
    text = tool().PAGE.read_text(encoding="utf-8")
    for engine, least in (("vLLM", 0.99), ("SGLang", 0.97), ("llama.cpp", 0.91)):
        row = next(line for line in text.splitlines() if line.startswith(f"| {engine} |"))
        supported, answered = (int(cell) for cell in row.split("|")[3:5])
        assert supported > 450
        assert answered >= least * supported


def test_classes_are_those_that_configs_name() -> None:
    """Where a config was put together from other sources, its class is that of its type."""
    by_name = {one.name: one for one in catalog.entries()}
    assert tool().class_of(by_name["Qwen/Qwen3-0.6B"]) == "Qwen3ForCausalLM"
    assert tool().class_of(by_name["adept/fuyu-8b"]) == "FuyuForCausalLM"


@pytest.mark.skipif(not WHOLE, reason="asks for every model: MEMFIT_WHOLE")
def test_the_page_has_not_drifted() -> None:
    assert tool().main(["--check"]) == 0
