# SPDX-License-Identifier: Apache-2.0
"""Scores of a model on rows whose targets are known, and their names in print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_bbb import metrics
from pyro_bbb.cli.model import Answers, doubt, is_regression, set_sizes

SCORE_NAMES = {
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R2, fraction of the variance explained",
    "log_likelihood": "log-likelihood (nats per row)",
    "coverage": "coverage of the intervals",
    "width": "mean width of the intervals",
    "accuracy": "accuracy",
    "nll": "NLL (nats per row)",
    "brier": "Brier score",
    "ece": "ECE, expected calibration error",
    "set_coverage": "coverage of the label sets",
    "set_size": "mean size of the label sets",
    "refused": "fraction of rows refused",
    "rmse_answered": "RMSE of the rows answered",
    "accuracy_answered": "accuracy of the rows answered",
}


def described(scores: dict[str, float]) -> str:
    """Lines of each score's name, value and description."""
    width = max(map(len, scores))
    return "\n".join(
        f"  {name:{width}}  {value:10.4g}  {SCORE_NAMES[name]}" for name, value in scores.items()
    )


def by_row(answers: Iterable[Answers], truth: NDArray[Any]) -> dict[str, Tensor]:
    """Summarise each row for scores and figures, without its draws.

    There are ``y``, ``doubt``, ``log_prob``; of a classification ``probs``; of a regression
    ``mean``, ``lower``, ``upper`` and ``pit``, the predictive's distribution function at ``y``.
    """
    y, parts, start = torch.from_numpy(truth), [], 0
    for each in answers:
        found = each.prediction
        here = y[start : (start := start + len(each))]
        part = {"y": here, "doubt": torch.from_numpy(doubt(found))}
        part["log_prob"] = found.log_prob(here)
        if is_regression(found):
            lower, upper = found.interval(each.model.about.level)
            part |= {"mean": found.mean[:, 0], "lower": lower[:, 0], "upper": upper[:, 0]}
            part["pit"] = found.cdf(here[:, None])[:, 0]
        else:
            part["probs"] = found.probs
        parts.append(part)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def score(rows: dict[str, Tensor], level: float, threshold: float) -> dict[str, float]:
    """All scores by name; those of the rows that are answered only where there are any."""
    answered = rows["doubt"] <= threshold
    scores = _classification(rows, level) if "probs" in rows else _regression(rows)
    scores["refused"] = _fraction(~answered)
    if answered.any():
        if "probs" in rows:
            name, value = "accuracy", metrics.accuracy(rows["probs"][answered], rows["y"][answered])
        else:
            name, value = "rmse", metrics.rmse(rows["mean"][answered], rows["y"][answered])
        scores[f"{name}_answered"] = value
    return scores


def quantile(values: NDArray[np.float64], fraction: float) -> float:
    """The smallest value not exceeded by less than such a fraction of the values."""
    return float(np.quantile(values, fraction, method="inverted_cdf"))


def _regression(rows: dict[str, Tensor]) -> dict[str, float]:
    y, mean, lower, upper = (rows[name] for name in ("y", "mean", "lower", "upper"))
    scores = {
        "rmse": metrics.rmse(mean, y),
        "mae": float((y - mean).abs().mean()),
        "log_likelihood": float(rows["log_prob"].mean()),
        "coverage": metrics.coverage(lower, upper, y),
        "width": float((upper - lower).mean()),
    }
    if (spread := float((y - y.mean()).square().sum())) > 0:
        scores["r2"] = 1 - float((y - mean).square().sum()) / spread
    return scores


def _classification(rows: dict[str, Tensor], level: float) -> dict[str, float]:
    probs, y = rows["probs"], rows["y"]
    ordered, classes = probs.sort(-1, descending=True)
    rank, sizes = (classes == y[:, None]).int().argmax(-1), set_sizes(ordered, level)
    return {
        "accuracy": metrics.accuracy(probs, y),
        "nll": -float(rows["log_prob"].mean()),
        "brier": metrics.brier(probs, y),
        "ece": metrics.ece(probs, y),
        "set_coverage": _fraction(rank < sizes),
        "set_size": float(sizes.double().mean()),
    }


def _fraction(which: Tensor) -> float:
    return float(which.double().mean())
