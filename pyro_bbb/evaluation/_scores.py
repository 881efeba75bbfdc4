# SPDX-License-Identifier: Apache-2.0
"""Scores of one prediction, by name."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TypeAlias

from torch import Tensor

from pyro_bbb import metrics
from pyro_bbb.prediction import ClassificationPrediction, Prediction

Scores: TypeAlias = dict[str, float]
LEVELS = {"coverage_50": 0.5, "coverage_90": 0.9, "coverage_95": 0.95}


def scores_of_test(prediction: Prediction, y: Tensor) -> Scores:
    """All scores of test data."""
    means = {name: _mean(values) for name, values in uncertainties(prediction).items()}
    common = {"nll": -_mean(prediction.log_prob(y)), **means}
    if isinstance(prediction, ClassificationPrediction):
        return _class_scores(prediction, y.flatten()) | common
    scores: Scores = {}
    with suppress(NotImplementedError):  # by a distribution without moments or cdf
        scores["rmse"] = metrics.rmse(prediction.mean, y)
        loss = (prediction.mean - y).double().square().reshape(len(y), -1).mean(1)
        scores |= _refusal_scores(loss, uncertainties(prediction), True) if means else {}
        for name, level in LEVELS.items():
            scores[name] = metrics.coverage(*prediction.interval(level), y)
    return scores | common


def _class_scores(prediction: ClassificationPrediction, y: Tensor) -> Scores:
    probs, epistemic = prediction.probs.flatten(0, -2), prediction.epistemic.flatten()
    confidence, label = probs.max(-1)
    return {
        "accuracy": metrics.accuracy(probs, y),
        **_imbalance_scores(probs, y),
        "brier": metrics.brier(probs, y),
        "ece": metrics.ece(probs, y),
        **_refusal_scores((label != y).double(), {"": -confidence, "epistemic": epistemic}, False),
    }


def _imbalance_scores(probs: Tensor, y: Tensor) -> Scores:
    recall = metrics.recall(probs, y)
    present = recall[~recall.isnan()]
    scores = {"base_rate": _mean(y == y.mode().values), "recall": float(present.min())}
    return scores | ({"auroc": metrics.macro_auroc(probs, y)} if len(present) > 1 else {})


def _refusal_scores(loss: Tensor, scores: dict[str, Tensor], root: bool) -> Scores:
    """Areas under risk-coverage by name; whether the 5 % highest by the first score are worse."""
    areas = {}
    for name, values in scores.items():
        risk = metrics.risk_coverage(-values, loss=loss)[1]
        areas[f"aurc_{name}".strip("_")] = _mean(risk.sqrt() if root else risk)
    total = next(iter(scores.values()))
    limit = total.kthvalue(math.ceil(0.95 * len(total))).values
    return areas | {"refusal_p": metrics.refusal_p_value(loss, total > limit)}


def scores_of_ood(prediction: Prediction, test: Prediction) -> Scores:
    """Means of the uncertainties, and the AUROC of each against those of the test data."""
    outside, inside = uncertainties(prediction), uncertainties(test)
    means = {name: _mean(values) for name, values in outside.items()}
    aurocs = {name: metrics.auroc(values, inside[name]) for name, values in outside.items()}
    return means | {f"auroc_{name}": value for name, value in aurocs.items()}


def uncertainties(prediction: Prediction) -> dict[str, Tensor]:
    """Total and epistemic uncertainty of each input, ``[n]``; of several targets their mean."""
    if isinstance(prediction, ClassificationPrediction):
        found = {"entropy": prediction.entropy, "epistemic": prediction.epistemic}
    else:
        found = {}
        with suppress(NotImplementedError):  # by a distribution without moments
            found = {"std": prediction.std, "epistemic_std": prediction.epistemic_std}
    return {name: each.reshape(len(each), -1).mean(1) for name, each in found.items()}


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
