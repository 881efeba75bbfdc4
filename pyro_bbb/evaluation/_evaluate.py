# SPDX-License-Identifier: Apache-2.0
"""One call that scores a posterior on test data, under shift and out of distribution.

`evaluate` scores one model, `compare` puts several side by side. A new score is a function of
`pyro_bbb.metrics`, an entry of `test_scores` and a line of `PRINTED`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from torch import Tensor

from pyro_bbb import metrics
from pyro_bbb._utils.tables import as_markdown, as_text
from pyro_bbb._utils.validation import kind
from pyro_bbb.data import as_tensors, corrupt
from pyro_bbb.evaluation._out_of_distribution import SCORES, Detector
from pyro_bbb.prediction import (
    ClassificationPrediction,
    Prediction,
    call_predict,
    predict,
    predict_calibration,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scores: TypeAlias = dict[str, float]
Table: TypeAlias = tuple[list[str], list[list[str]]]  # head and rows
TEST = "test"
LEVELS = {"coverage_50": 0.5, "coverage_90": 0.9, "coverage_95": 0.95}
PRINTED = {  # a score's name in a table, and its format there
    "accuracy": ("accuracy", ".1%"),
    "base_rate": ("base rate", ".1%"),
    "recall": ("lowest recall", ".1%"),
    "auroc": ("AUROC", ".1%"),
    "rmse": ("RMSE", ".4g"),
    "nll": ("NLL", "z.3f"),
    "brier": ("Brier", "z.3f"),
    "ece": ("ECE", ".1%"),
    "aurc": ("AURC", ".2%"),
    "aurc_epistemic": ("AURC epistemic", ".2%"),
    **{name: (f"{level:.0%} interval", ".1%") for name, level in LEVELS.items()},
    "aurc_std": ("AURC sd", ".4g"),
    "aurc_epistemic_std": ("AURC epistemic sd", ".4g"),
    "refusal_p": ("refusal p", ".3f"),
    "entropy": ("entropy", "z.3f"),
    "std": ("sd", ".4g"),
    "epistemic": ("epistemic", "z.3f"),
    "epistemic_std": ("epistemic sd", ".4g"),
    "auroc_entropy": ("AUROC entropy", ".1%"),
    "auroc_epistemic": ("AUROC epistemic", ".1%"),
    "auroc_std": ("AUROC sd", ".1%"),
    "auroc_epistemic_std": ("AUROC epistemic sd", ".1%"),
    **{f"auroc_{name}": (f"AUROC {name.replace('_', ' ')}", ".1%") for name in SCORES},
}
_AXES = {"entropy": "predictive entropy (nats)", "std": "predictive standard deviation"}


def evaluate(
    model: Any,
    guide: Any,
    test: Any,
    *,
    ood: Any = None,
    detectors: Iterable[Detector] = (),
    shift: Mapping[str, Any] | None = None,
    num_samples: int = 100,
    seed: int | None = None,
) -> Evaluation:
    """Score a posterior's predictions on test data, under shift, and out of distribution.

        evaluation = bbb.evaluate(model, guide, (x_test, y_test), ood={"letters": letters}, seed=0)
        print(evaluation)
        evaluation.plot().savefig("evaluation.png")

    For classes, on test data and each shift: ``accuracy``, ``base_rate`` (of always predicting the
    commonest class), ``recall`` (the lowest of a class), ``auroc`` (one class against the others),
    ``nll`` (nats per label), ``brier``, ``ece``, ``aurc`` and ``aurc_epistemic`` (areas under the
    risk-coverage curves of the confidence and of the epistemic uncertainty), and the means of
    ``entropy`` and ``epistemic`` (nats). For real targets and counts ``rmse``, ``nll`` (nats per
    example), ``coverage_50``, ``coverage_90`` and ``coverage_95`` of the central intervals,
    ``aurc_std`` and ``aurc_epistemic_std`` (mean RMSE of the 1, 2, ..., n most certain examples),
    and the means of ``std`` and ``epistemic_std``. For both ``refusal_p``, `refusal_p_value` of the
    5 % least certain. Out of distribution: the means of both uncertainties, and their AUROCs
    against the test data, as ``auroc_entropy``.

    Args:
        model: the model.
        guide: what `predict` takes: a trained guide, chains, or draws by site name.
        test: test data ``(x, y)``, or a map-style ``Dataset`` of such pairs.
        ood: out-of-distribution inputs, or a dict from names to such inputs.
        detectors: of different scores, made by `ood`; their AUROCs join those of the uncertainties,
            as ``auroc_ddu``.
        shift: a dict from names to shifted test data ``(x, y)``. For images in [0, 1], a number 1
            to 5 means the test data under the corruption of that name, by `data.corrupt`.
        num_samples: number of draws.
        seed: makes the result a function of this number, with common draws for all inputs, and
            leaves torch's random state alone.

    Returns:
        The scores, which print as a table. `Evaluation.of` makes them for other options of
        `predict`, or any function to a `Prediction`.

    Raises:
        ValueError: data or a number do not fit, or two data sets have one name.
    """
    predict_fn = partial(predict, model, guide, num_samples=num_samples, seed=seed)
    return Evaluation.of(predict_fn, test, ood=ood, detectors=detectors, shift=shift)


class _Printed:
    """Scores by name that print as a table, and show as one in a notebook."""

    scores: dict[str, Any]
    _labels: ClassVar[int] = 1  # columns that are not numbers

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.scores)})"

    def __str__(self) -> str:
        return as_text(*self._table(), labels=self._labels)

    def _repr_markdown_(self) -> str:
        return as_markdown(*self._table(), labels=self._labels)

    def _table(self) -> Table:
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class Evaluation(_Printed):
    """Scores by data set, made by `evaluate`; it prints as a table of them.

    Args:
        scores: a dict of scores for ``"test"``, each shift, and each out-of-distribution set.
        predictions: for the test data and the out-of-distribution sets, by the same names.
        targets: targets of the test data.
    """

    scores: dict[str, Scores]
    predictions: dict[str, Prediction] = field(compare=False)
    targets: Tensor = field(compare=False)

    @classmethod
    def of(
        cls,
        predict_fn: Any,
        test: Any,
        *,
        ood: Any = None,
        detectors: Iterable[Detector] = (),
        shift: Mapping[str, Any] | None = None,
    ) -> Evaluation:
        """Score any function from inputs to a `Prediction`, such as a `TemperatureScaled`.

            linearized = functools.partial(bbb.predict, model, guide, linearized=True)
            bbb.Evaluation.of(linearized, (x_test, y_test))

        The data and errors are those of `evaluate`.
        """
        if not isinstance(detectors, Iterable):
            got = type(detectors).__name__
            raise TypeError(f"detectors must be a list of Detectors, got {got}: write [detector]")
        fitted = [kind("detectors", detector, Detector) for detector in detectors]
        if fitted and ood is None:
            raise ValueError("detectors must be left out without ood, the inputs to detect")
        if len({detector.score for detector in fitted}) < len(fitted):
            got = [detector.score for detector in fitted]
            raise ValueError(f"detectors must be of different scores, got {got}")
        prediction, y = _predicted(predict_fn, test)
        scores, predictions = {TEST: test_scores(prediction, y)}, {TEST: prediction}
        shifted = {} if shift is None else kind("shift", shift, Mapping)
        outside = ood if isinstance(ood, Mapping) else {"out of distribution": ood}
        outside = {} if ood is None else outside
        if len({TEST, *shifted, *outside}) <= len(names := [*shifted, *outside]):
            expected = "ood and shift must have different names, and none 'test'"
            raise ValueError(f"{expected}, got {names}")
        test_tensors = cache(partial(as_tensors, test))  # a dataset is read once
        for name, data in shifted.items():
            if isinstance(data, int):  # the severity of a corruption
                x, targets = test_tensors()
                data = corrupt(x, name, data), targets
            scores[name] = test_scores(*_predicted(predict_fn, data))
        for name, x in outside.items():
            predictions[name] = call_predict(predict_fn, x)
            scores[name] = ood_scores(predictions[name], prediction)
        for detector in fitted:
            inside = -detector.score_samples(test_tensors()[0])
            for name, x in outside.items():
                auroc = metrics.auroc(-detector.score_samples(x), inside)
                scores[name][f"auroc_{detector.score}"] = auroc
        return cls(scores, predictions, y)

    @property
    def recall(self) -> Tensor:
        """Recall of each class in the test data, ``[C]``, by `metrics.recall`."""
        prediction = kind("prediction", self.predictions[TEST], ClassificationPrediction)
        return metrics.recall(prediction.probs.flatten(0, -2), self.targets.flatten())

    def _table(self) -> Table:
        """Return a row for each data set, a column for each score."""
        names = _columns(self.scores.values())
        rows = [[str(data), *(_cell(s, n) for n in names)] for data, s in self.scores.items()]
        return ["", *(PRINTED[name][0] for name in names)], rows

    def plot(self, figure: Figure | None = None) -> Figure:
        """Draw calibration on the test data, and the uncertainty of inputs in and out of it.

        For classes a reliability diagram and histograms of the entropy; for real targets and counts
        the coverage of intervals and histograms of the standard deviation. The figure is a new one
        unless given, which no window shows: ``figure.savefig(path)``.
        """
        from matplotlib.figure import Figure

        from pyro_bbb import plots

        prediction, y = self.predictions[TEST], self.targets
        (name, inside), *_ = uncertainties(prediction).items()
        outside = {data: uncertainties(p)[name] for data, p in self.predictions.items()}
        del outside[TEST]
        with plots.style():
            panels = 2 if outside else 1
            figure = Figure(figsize=(4.2 * panels, 3.2)) if figure is None else figure
            left, *right = kind("figure", figure, Figure).subplots(1, panels, squeeze=False)[0]
            if isinstance(prediction, ClassificationPrediction):
                plots.reliability(left, prediction.probs.flatten(0, -2), y.flatten())
            else:
                plots.coverage(left, prediction.cdf(y))
            for ax in right:
                plots.entropy_histogram(ax, inside, outside).set_xlabel(_AXES[name])
        return figure


def compare(evaluations: Mapping[str, Evaluation]) -> Comparison:
    """Put the scores of several evaluations side by side: a row for each, a column for each model.

        bbb.compare({"MAP": of_map, "Bayes by Backprop": of_bbb})

    Where an evaluation lacks a data set or a score, its cell is empty.

    Raises:
        ValueError: there are no evaluations.
    """
    if not kind("evaluations", evaluations, Mapping):
        raise ValueError("evaluations must hold at least one evaluation, got none")
    for name, evaluation in evaluations.items():
        kind(f"evaluations[{name!r}]", evaluation, Evaluation)
    return Comparison({str(name): e.scores for name, e in evaluations.items()})


@dataclass(frozen=True, repr=False)
class Comparison(_Printed):
    """Several evaluations as one table, made by `compare`."""

    scores: dict[str, dict[str, Scores]]
    """Scores of each evaluation, by its name."""
    _labels: ClassVar[int] = 2

    def _table(self) -> Table:
        """Return a row for each data set and score, a column for each model."""
        rows = []
        for data in dict.fromkeys(name for scores in self.scores.values() for name in scores):
            by_model = [scores.get(data, {}) for scores in self.scores.values()]
            for i, name in enumerate(_columns(by_model)):
                cells = (_cell(scores, name) for scores in by_model)
                rows.append(["" if i else str(data), PRINTED[name][0], *cells])
        return ["", "", *self.scores], rows


# --- scores ---


def test_scores(prediction: Prediction, y: Tensor) -> Scores:
    """Return all scores of test data."""
    means = {name: _mean(values) for name, values in uncertainties(prediction).items()}
    common = {"nll": -_mean(prediction.log_prob(y)), **means}
    scores: Scores = {}
    if isinstance(prediction, ClassificationPrediction):
        probs, y = prediction.probs.flatten(0, -2), y.flatten()
        recall = metrics.recall(probs, y)
        present = recall[~recall.isnan()]
        confidence, label = probs.max(-1)
        scores |= {"accuracy": metrics.accuracy(probs, y), "base_rate": _mean(y == y.mode().values)}
        scores |= {"recall": float(present.min()), "brier": metrics.brier(probs, y)}
        scores |= {"auroc": metrics.macro_auroc(probs, y)} if len(present) > 1 else {}
        scores["ece"] = metrics.ece(probs, y)
        refused_by = {"": -confidence, "epistemic": prediction.epistemic.flatten()}
        return scores | _refusal_scores((label != y).double(), refused_by, False) | common
    with suppress(NotImplementedError):  # a distribution without moments or cdf
        scores["rmse"] = metrics.rmse(prediction.mean, y)
        loss = (prediction.mean - y).double().square().reshape(len(y), -1).mean(1)
        scores |= _refusal_scores(loss, uncertainties(prediction), True) if means else {}
        for name, level in LEVELS.items():
            scores[name] = metrics.coverage(*prediction.interval(level), y)
    return scores | common


def _refusal_scores(loss: Tensor, scores: dict[str, Tensor], root: bool) -> Scores:
    """Return areas under risk-coverage, and whether the 5 % of highest first score are worse."""
    areas = {}
    for name, values in scores.items():
        risk = metrics.risk_coverage(-values, loss=loss)[1]
        areas[f"aurc_{name}".strip("_")] = _mean(risk.sqrt() if root else risk)
    total = next(iter(scores.values()))
    limit = total.kthvalue(math.ceil(0.95 * len(total))).values
    return areas | {"refusal_p": metrics.refusal_p_value(loss, total > limit)}


def ood_scores(prediction: Prediction, test: Prediction) -> Scores:
    """Return means of the uncertainties, and the AUROC of each against those of the test data."""
    outside, inside = uncertainties(prediction), uncertainties(test)
    means = {name: _mean(values) for name, values in outside.items()}
    aurocs = {name: metrics.auroc(values, inside[name]) for name, values in outside.items()}
    return means | {f"auroc_{name}": value for name, value in aurocs.items()}


def uncertainties(prediction: Prediction) -> dict[str, Tensor]:
    """Return total and epistemic uncertainty of each input, ``[n]``; the mean over its targets."""
    values = {}
    if isinstance(prediction, ClassificationPrediction):
        values = {"entropy": prediction.entropy, "epistemic": prediction.epistemic}
    else:
        with suppress(NotImplementedError):  # a distribution without moments
            values = {"std": prediction.std, "epistemic_std": prediction.epistemic_std}
    return {name: value.reshape(len(value), -1).mean(1) for name, value in values.items()}


def _predicted(predict_fn: Any, data: Any) -> tuple[Prediction, Tensor]:
    """Return the prediction and the targets, in the shape of the labels or means predicted."""
    prediction, y = predict_calibration(predict_fn, data)
    if isinstance(prediction, ClassificationPrediction):
        return prediction, y
    return prediction, y.reshape(prediction._shape[1:])


def _mean(values: Tensor) -> float:
    return float(values.double().mean())


def _columns(scores: Iterable[Scores]) -> list[str]:
    """Return the names of scores that occur, in the order of tables."""
    present = set().union(*scores)
    return [name for name in PRINTED if name in present]


def _cell(scores: Scores, name: str) -> str:
    """Return a score in print; empty for a missing one."""
    return format(scores[name], PRINTED[name][1]) if name in scores else ""
