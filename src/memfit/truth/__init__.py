"""What others measured, and how far memfit and every known method are off: published figures,
baselines, the accuracy table."""

from memfit.truth.case import Case, Refused
from memfit.truth.published import read

__all__ = ["Case", "Refused", "read"]
