# SPDX-License-Identifier: Apache-2.0
"""Scores of a model on rows whose targets are known, the rule of refusal, and both in words."""

from __future__ import annotations

from textwrap import indent
from typing import Any

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyro_bbb import metrics
from pyro_bbb._utils.tables import as_text
from pyro_bbb.apps.table_model import ROWS, Model, set_sizes, uncertainties
from pyro_bbb.prediction import RegressionPrediction

SCORE_NAMES = {
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R2, fraction of the variance explained",
    "log_likelihood": "log-likelihood (nats per row)",
    "coverage": "coverage of the intervals",
    "width": "mean width of the intervals",
    "accuracy": "accuracy",
    "base_rate": "accuracy of always predicting the commonest class",
    "auroc": "AUROC (of several classes, mean of one against the others)",
    "nll": "NLL (nats per row)",
    "brier": "Brier score",
    "ece": "ECE, expected calibration error",
    "set_coverage": "coverage of the label sets",
    "set_size": "mean size of the label sets",
    "aurc": "AURC, mean error or RMSE of the 1, 2, ... most certain rows",
    "refused": "fraction of rows refused",
    "rmse_answered": "RMSE of the rows answered",
    "rmse_refused": "RMSE of the rows refused",
    "accuracy_answered": "accuracy of the rows answered",
    "accuracy_refused": "accuracy of the rows refused",
    "refusal_p": "p-value of the refusal; at most 0.05 if the rows refused are worse",
}
CLASS_COLUMNS = ("class", "rows", "right (recall)", "answered", "right (recall)")
_MOST_CLASSES = 20  # in print
_MOST_REFUSED = 0.25  # of a class, and twice the fraction of all, before a warning
_P_VALUE = 0.05
_FRACTIONS = (0.99, 0.9, 0.8, 0.7, 0.5)  # of rows answered, tried where --answered does not help


def by_row(
    model: Model, inputs: pl.DataFrame, y: NDArray[Any], progress: bool = False
) -> dict[str, Tensor]:
    """Predict rows, and summarise each for scores and figures, without its draws.

    The entries are ``y``, ``loss`` (squared error, or 0 or 1), ``total`` and ``epistemic``
    uncertainty and ``log_prob``; of a classification ``probs``; of a regression ``mean``,
    ``lower``, ``upper`` and ``pit``, the predictive's distribution function at ``y``.
    """
    batches: list[dict[str, Tensor]] = []
    targets = torch.from_numpy(y).split(ROWS)
    for prediction, batch in zip(model.predict(inputs, progress), targets, strict=True):
        row = {"y": batch, **uncertainties(prediction), "log_prob": prediction.log_prob(batch)}
        if isinstance(prediction, RegressionPrediction):
            lower, upper = prediction.interval(model.about.level)
            row |= {"mean": prediction.mean[:, 0], "lower": lower[:, 0], "upper": upper[:, 0]}
            row["loss"] = (row["mean"] - batch).double().square()
            row["pit"] = prediction.cdf(batch[:, None])[:, 0]
        else:
            row |= {"probs": prediction.probs, "loss": (prediction.label != batch).double()}
        batches.append(row)
    return {name: torch.cat([row[name] for row in batches]) for name in batches[0]}


def score(rows: dict[str, Tensor], model: Model) -> dict[str, Any]:
    """Return the scores by name, ``"classes"`` those of each class; none without rows."""
    about, classes, y = model.about, "probs" in rows, rows["y"]
    refused, scores = rows[about.uncertainty] > about.threshold, dict[str, Any]()
    if classes:
        probs = rows["probs"]
        ordered, labels = probs.sort(-1, descending=True)
        rank, sizes = (labels == y[:, None]).int().argmax(-1), set_sizes(ordered, about.level)
        scores |= {"accuracy": metrics.accuracy(probs, y), "base_rate": _mean(y == y.mode().values)}
        scores |= {"auroc": metrics.macro_auroc(probs, y)} if len(y.unique()) > 1 else {}
        scores |= {"nll": -_mean(rows["log_prob"]), "brier": metrics.brier(probs, y)}
        scores |= {"ece": metrics.ece(probs, y), "set_coverage": _mean(rank < sizes)}
        scores["set_size"] = _mean(sizes)
    else:
        mean, lower, upper = (rows[name] for name in ("mean", "lower", "upper"))
        scores |= {"rmse": metrics.rmse(mean, y), "mae": _mean((y - mean).abs())}
        scores |= {"log_likelihood": _mean(rows["log_prob"]), "width": _mean(upper - lower)}
        scores["coverage"] = metrics.coverage(lower, upper, y)
        if (spread := float((y - y.mean()).square().sum())) > 0:
            scores["r2"] = 1 - float((y - mean).square().sum()) / spread
    scores["aurc"] = _mean(risk_coverage(rows, about.uncertainty)[1])
    scores["refused"] = _mean(refused)
    for name, which in (("answered", ~refused), ("refused", refused)):
        if which.any():
            loss = _mean(rows["loss"][which])
            key, value = ("accuracy", 1 - loss) if classes else ("rmse", loss**0.5)
            scores[f"{key}_{name}"] = value
    if 0 < scores["refused"] < 1:
        scores["refusal_p"] = metrics.refusal_p_value(rows["loss"], refused)
    if classes:
        right = rows["loss"] == 0
        subsets = (torch.ones_like(refused), right, ~refused, right & ~refused)
        names = model.estimator.classes_
        counts = [torch.bincount(y[x], minlength=len(names)).tolist() for x in subsets]
        scores["classes"] = {
            str(name): dict(zip(("rows", "right", "answered", "answered_right"), row, strict=True))
            for name, *row in zip(names, *counts, strict=True)
        }
    return scores


def risk_coverage(rows: dict[str, Tensor], uncertainty: str) -> tuple[Tensor, Tensor]:
    """Return fractions of rows answered, and their error rate or RMSE."""
    coverage, risk = metrics.risk_coverage(-rows[uncertainty], loss=rows["loss"])
    return coverage, risk if "probs" in rows else risk.sqrt()


def with_refusal(model: Model, rows: dict[str, Tensor]) -> Model:
    """Return the model with the uncertainty and the threshold chosen on these rows, and scores."""
    names = ("total", "epistemic") if "probs" in rows else ("epistemic", "total")
    name = min(names, key=lambda name: float(risk_coverage(rows, name)[1].mean()))

    def threshold(answered: float) -> float:
        """Return the smallest that at least this fraction of the rows does not exceed."""
        return float(np.quantile(rows[name].numpy(), answered, method="inverted_cdf"))

    model = model.described(uncertainty=name, threshold=threshold(model.about.answered))
    scores = score(rows, model)
    if scores.get("refusal_p", 0) > _P_VALUE:  # Bonferroni: one of 20 trainings has a false offer
        scores["helpful"] = [
            answered
            for answered in _FRACTIONS
            if metrics.refusal_p_value(rows["loss"], rows[name] > threshold(answered))
            <= _P_VALUE / len(_FRACTIONS)
        ]
    return model.described(scores=scores)


def text_of(scores: dict[str, Any]) -> str:
    """Return a line for each score, a table of the classes, and warnings."""
    width = max(map(len, scores))
    lines = [
        f"  {name:{width}}  {value:10.4g}  {SCORE_NAMES[name]}"
        for name, value in scores.items()
        if name in SCORE_NAMES
    ]
    if "classes" in scores:
        lines.append(indent(as_text(CLASS_COLUMNS, class_rows(scores)), "  "))
    return "\n".join([*lines, *(f"warning: {words}" for words in cautions(scores))])


def class_rows(scores: dict[str, Any]) -> list[list[str]]:
    """Return the cells of a table of the classes, the rarest first."""
    table = []
    for label, counts in sorted(scores["classes"].items(), key=lambda item: item[1]["rows"]):
        rows, right, answered, answered_right = counts.values()
        recall, recall_answered = (
            f"{correct} ({correct / total:.0%})" if total else ""
            for correct, total in ((right, rows), (answered_right, answered))
        )
        table.append([label, str(rows), recall, str(answered), recall_answered])
    return table[:_MOST_CLASSES]


def verdict(scores: dict[str, Any], level: float) -> str:
    """Return a sentence on the error and on the intervals or label sets."""
    if "accuracy" in scores:
        return (
            f"It predicts {scores['accuracy']:.1%} of rows right, where always predicting the "
            f"commonest class gives {scores['base_rate']:.1%}; its label sets of {level:.0%} "
            f"hold the class of {scores['set_coverage']:.1%}."
        )
    explained = f", {scores['r2']:.0%} of the variance explained" if "r2" in scores else ""
    return (
        f"Its RMSE is {scores['rmse']:.4g}{explained}; its intervals of {level:.0%} hold the "
        f"target of {scores['coverage']:.1%} of rows."
    )


def refusal(scores: dict[str, Any]) -> str:
    """Return how many rows are refused, whether they are worse, and which thresholds help."""
    words = f"It refuses {scores['refused']:.1%} of rows"
    if "refusal_p" not in scores:
        return words
    offer = ""
    if "helpful" in scores:
        fractions = " or ".join(f"{answered:g}" for answered in scores["helpful"])
        offer = (
            f"; refusal helps with --answered {fractions}" if fractions else "; none tried helps"
        )
    worse = "worse" if scores["refusal_p"] <= _P_VALUE else "not shown to be worse"
    name, form = ("accuracy", ".1%") if "accuracy" in scores else ("rmse", ".4g")
    refused, answered = (format(scores[f"{name}_{x}"], form) for x in ("refused", "answered"))
    return (
        f"{words}, which are {worse} than those answered: {SCORE_NAMES[name]} {refused} against "
        f"{answered} (p = {scores['refusal_p']:.2g}){offer}"
    )


def cautions(scores: dict[str, Any]) -> list[str]:
    """Return warnings about what accuracy or RMSE would hide."""
    warnings = []
    if "auroc" in scores and scores["accuracy"] <= scores["base_rate"]:
        warnings.append("The accuracy is not above that of always predicting the commonest class")
    if scores.get("refusal_p", 0) > _P_VALUE:
        warnings.append(refusal(scores))
    limit = max(_MOST_REFUSED, 2 * scores["refused"])
    lost = [
        f"{counts['rows'] - counts['answered']} of the {counts['rows']} rows of {label!r}"
        for label, counts in scores.get("classes", {}).items()
        if counts["answered"] < counts["rows"] * (1 - limit)
    ]
    if lost:
        warnings.append(f"It refuses {', '.join(lost[:3])}, but {scores['refused']:.1%} of all")
    return warnings


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
