"""ERNIE 1 to 3: BERT's layers; a table of tasks is an option that is not captured."""

from __future__ import annotations

from dataclasses import replace

from memfit.model.families._captured import variants
from memfit.model.families._chains import chained
from memfit.model.families.bert import BASE, ROW, SIZES

OWN = {**BASE, "model_type": "ernie"}
chained(replace(ROW, name="ernie", examples=variants(OWN, SIZES), absent=("use_task_id",)))
