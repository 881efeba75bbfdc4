"""Moved to `pyro_bbb.training.objectives`; this name stays until the first release."""

from pyro_bbb.training.objectives import (
    KLSchedule,
    LossParts,
    NonFiniteError,
    RecordedTraceELBO,
    RecordedTraceMeanFieldELBO,
    as_kl_schedule,
    blundell,
    recorded_elbo,
    terms_of,
    uniform,
)
from pyro_bbb.training.objectives import (
    RecordedELBO as RecordedELBO,
)

__all__ = [
    "KLSchedule",
    "LossParts",
    "NonFiniteError",
    "RecordedTraceELBO",
    "RecordedTraceMeanFieldELBO",
    "as_kl_schedule",
    "blundell",
    "recorded_elbo",
    "terms_of",
    "uniform",
]
