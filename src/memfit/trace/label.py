"""Which part of memory a block belongs to, where the program did not say."""

from __future__ import annotations

from memfit.trace.paths import layer_of
from memfit.trace.recorder import Block, Recorder


def settle(recorder: Recorder, vocabulary: int) -> None:
    """Blocks not claimed by load, gradients, optimizer or the end of a forward call. Logits are
    known by their last dimension, outside of the layers, where scores or hidden states may be as
    wide."""
    for one in recorder.events:
        if not isinstance(one, Block):
            continue
        if one.phase == "prepare" and one.part is None:
            one.part = "inputs"
        if (
            one.part in (None, "activations")
            and one.phase in ("forward", "backward", "evaluate", "prefill", "decode")
            and vocabulary
            and one.shape[-1:] == (vocabulary,)
            and not layer_of(one.where)
        ):
            one.part = "logits"
