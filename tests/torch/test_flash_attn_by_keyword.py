"""Classes that look themselves for a way to attend, as ModernBERT's did before transformers 5."""

from __future__ import annotations

from typing import Any, cast

import pytest

from memfit.trace import flash_attn


class Model:
    _supports_flash_attn = True

    def _flash_attn_2_can_dispatch(self) -> bool:
        raise ImportError("not installed")

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, is_init_check: bool = False
    ) -> str:
        if attn_implementation == "flash_attention_2":
            self._flash_attn_2_can_dispatch()
        return f"{attn_implementation or 'sdpa'} {is_init_check}"


class Recorder:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, *words: str) -> None:
        self.notes.append(words[0])


def test_only_a_script_that_asks_gets_flash_attn() -> None:
    class Changed(Model): ...

    recorder = Recorder()
    for owner, name, value in flash_attn.in_scripts(Changed, cast("Any", recorder)):
        setattr(owner, name, value)
    model = Changed()
    check = model._check_and_adjust_attn_implementation
    assert check(attn_implementation=None, is_init_check=True) == "sdpa True"
    assert recorder.notes == []
    assert check("flash_attention_2") == "flash_attention_2 False"
    assert check(attn_implementation="flash_attention_2") == "flash_attention_2 False"
    assert recorder.notes
    with pytest.raises(ImportError):
        model._flash_attn_2_can_dispatch()
