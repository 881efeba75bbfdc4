# SPDX-License-Identifier: Apache-2.0
"""Shifted images, and the scores of a prediction on them."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

import pyro_bbb as bbb
from _helpers.repeats import over_seeds
from _helpers.run import Data
from pyro_bbb import metrics

Scores: TypeAlias = dict[str, Any]
Answer: TypeAlias = bbb.ClassificationPrediction
Predict: TypeAlias = Callable[[Tensor], Answer]
SEVERITIES = range(1, 6)
DEGREES = range(0, 181, 15)  # as Ovadia et al. (2019)
PIXELS = range(0, 15, 2)
THRESHOLDS = [i / 20 for i in range(20)]  # of confidence


def corrupted(x: Tensor) -> Iterator[tuple[int, str, Tensor]]:
    """Severity, name and images of all corruptions, by severity."""
    for severity in SEVERITIES:
        for seed, name in enumerate(bbb.data.CORRUPTIONS):
            yield severity, name, bbb.data.corrupt(x, name, severity, seed)


def measure(predict: Predict, data: Data, *, moved: bool) -> Scores:
    """Scores on clean and on shifted images.

    Args:
        predict: the posterior predictive of images.
        data: test images, and labels.
        moved: also turn and translate the images, which is for digits.

    Returns:
        ``clean``; ``corruptions`` by severity and name, ``severity``: their means over the names,
        ``shifted``: over the severities too; ``thresholds`` by severity, see `above`; and if
        ``moved``, ``rotation`` by degrees and ``translation`` by pixels.
    """
    x, y = data
    clean = predict(x)
    names: dict[str, Scores] = {str(severity): {} for severity in SEVERITIES}
    answers: dict[str, list[tuple[Tensor, Tensor]]] = {severity: [] for severity in names}
    for severity, name, images in corrupted(x):
        answer = predict(images)
        names[str(severity)][name] = score(answer, clean, y)
        answers[str(severity)].append((answer.confidence, answer.label == y))
    by_severity = {severity: mean(found) for severity, found in names.items()}
    found = {
        "clean": score(clean, clean, y),
        "corruptions": names,
        "severity": by_severity,
        "shifted": mean(by_severity),
        "thresholds": {severity: above(*joined(pairs)) for severity, pairs in answers.items()},
    }
    if moved:
        turned = {str(d): predict(bbb.data.rotate(x, d)) for d in DEGREES}
        aside = {str(p): predict(bbb.data.translate(x, p)) for p in PIXELS}
        found["rotation"] = {key: score(answer, clean, y) for key, answer in turned.items()}
        found["translation"] = {key: score(answer, clean, y) for key, answer in aside.items()}
    return found


def score(answer: Answer, clean: Answer, y: Tensor) -> dict[str, float]:
    """Scores of a prediction; ``auroc`` is of telling its images from clean ones by entropy."""
    right = answer.label == y
    found = {
        "accuracy": right.double().mean().item(),
        "confidence": answer.confidence.double().mean().item(),
        "nll": -answer.log_prob(y).double().mean().item(),
        "brier": metrics.brier(answer.probs, y),
        "ece": metrics.ece(answer.probs, y),
        "auroc": metrics.auroc(answer.entropy, clean.entropy),
        "area_under_risk_coverage": metrics.area_under_risk_coverage(answer.confidence, right),
    }
    return rounded(found)


def above(confidence: Tensor, right: Tensor) -> dict[str, dict[str, float]]:
    """By threshold: the fraction of images with at least that confidence, and of right ones."""
    found = {}
    for threshold in THRESHOLDS:
        sure = confidence >= threshold
        fractions = {"sure": sure, "sure_and_right": sure & right}
        found[str(threshold)] = rounded({k: v.double().mean().item() for k, v in fractions.items()})
    return found


def rounded(figures: dict[str, float]) -> dict[str, float]:
    """Figures with five decimals: there are thousands of them."""
    return {name: round(figure, 5) for name, figure in figures.items()}


def joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Confidence and correctness of several predictions as one."""
    confidence, right = zip(*pairs, strict=True)
    return torch.cat(confidence), torch.cat(right)


def mean(found: dict[str, Scores]) -> Scores:
    """Means of scores over their names."""
    means: Scores = over_seeds(list(found.values()))["mean"]
    return means
