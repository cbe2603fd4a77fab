"""Text encoders in SGLang, which sets a cache aside for them as for any other model
(model_executor/ and mem_cache/, 0.5.18)."""

from __future__ import annotations

from memfit.model.model import Model
from memfit.serving.base import Subject
from memfit.serving.subject import known_model
from memfit.serving.text_encoders import in_own_numbers, is_encoder

ENCODERS = ("bert", "xlm-roberta")  # models/bert.py and models/roberta.py


def of_sglang(subject: Subject) -> Model:
    """The model as SGLang has it: an encoder's head is in the model's own numbers."""
    model = known_model(subject, encoders=str(subject.config.get("model_type")) in ENCODERS)
    return in_own_numbers(model) if is_encoder(model) else model


__all__ = ["of_sglang"]
