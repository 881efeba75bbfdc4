# SPDX-License-Identifier: Apache-2.0
"""Scores of classification and out-of-distribution detection."""

from typing import Any

from torch import Tensor

import pyro_bbb as bbb
from pyro_bbb import metrics

MEASURES = ("entropy", "epistemic", "confidence")
SCORES = (  # columns of `repeats.table`
    ("accuracy (%)", "accuracy", 100, 2),
    ("NLL (nats)", "nll", 1, 4),
    ("ECE (%)", "ece", 100, 2),
)


def draws(summary: dict[str, Any]) -> str:
    """Return the number of draws of a prediction, or a dash."""
    return f"{summary['mean']['draws']:.0f}" if summary["mean"]["draws"] else "–"


def scores(probs: Tensor, y: Tensor) -> dict[str, float]:
    """Compute accuracy and ECE in [0, 1], and NLL in nats per label.

    Args:
        probs: probabilities ``[..., classes]``.
        y: classes ``[...]``.
    """
    probs, y = probs.flatten(0, -2), y.flatten()
    return {
        "accuracy": metrics.accuracy(probs, y),
        "nll": metrics.nll(probs, y),
        "ece": metrics.ece(probs, y),
    }


def detect(
    ood: bbb.ClassificationPrediction, in_distribution: bbb.ClassificationPrediction
) -> dict[str, float]:
    """Compute the AUROC of out-of-distribution detection by three measures of uncertainty."""
    return {
        "entropy": metrics.auroc(ood.entropy, in_distribution.entropy),
        "epistemic": metrics.auroc(ood.epistemic, in_distribution.epistemic),
        "confidence": metrics.auroc(-ood.confidence, -in_distribution.confidence),
    }
