# SPDX-License-Identifier: Apache-2.0
"""Scores of predictions, and diagnostics of the draws behind them.

Pure functions of tensors or arrays. Scores of a prediction against its targets are in
``_scores.py``, convergence of chains and importance weights in ``_convergence.py``.

Imports only `_utils`. A new metric is a function in one of the two files.
"""

from pyro_bbb.metrics._convergence import ess, pareto_k, r_hat
from pyro_bbb.metrics._scores import (
    accuracy,
    area_under_risk_coverage,
    auroc,
    brier,
    coverage,
    ece,
    macro_auroc,
    nll,
    recall,
    refusal_p_value,
    risk_coverage,
    rmse,
)

__all__ = [
    "accuracy",
    "area_under_risk_coverage",
    "auroc",
    "brier",
    "coverage",
    "ece",
    "ess",
    "macro_auroc",
    "nll",
    "pareto_k",
    "r_hat",
    "recall",
    "refusal_p_value",
    "risk_coverage",
    "rmse",
]
