# SPDX-License-Identifier: Apache-2.0
"""One call that scores a posterior on test data, under shift and out of distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pyro_bbb import metrics
from pyro_bbb._utils.tables import as_markdown, as_text
from pyro_bbb._utils.validation import kind
from pyro_bbb.data import as_tensors, corrupt
from pyro_bbb.evaluation._scores import Scores, scores_of_ood, scores_of_test, uncertainties
from pyro_bbb.evaluation._tables import PRINTED, Table, cell, columns
from pyro_bbb.prediction import (
    ClassificationPrediction,
    Prediction,
    call_predict,
    predict,
    predict_calibration,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEST = "test"
_AXES = {"entropy": "predictive entropy (nats)", "std": "predictive standard deviation"}


def evaluate(
    model: Any,
    guide: Any,
    test: Any,
    *,
    ood: Any = None,
    shift: Mapping[str, Any] | None = None,
    num_samples: int = 100,
    seed: int | None = None,
) -> Evaluation:
    """Score a posterior's predictions on test data, under shift, and out of distribution.

        evaluation = bbb.evaluate(model, guide, (x_test, y_test), ood={"letters": letters}, seed=0)
        print(evaluation)
        evaluation.plot().savefig("evaluation.png")

    Of classes, for test data and each shift: ``accuracy``, ``base_rate`` (the accuracy of always
    predicting the commonest class), ``recall`` (the lowest of a class), ``auroc`` (one class
    against the others), ``nll`` (nats per label), ``brier``, ``ece``, ``aurc`` and
    ``aurc_epistemic`` (areas under the risk-coverage curves of the confidence and of the epistemic
    uncertainty), and the means of ``entropy`` and ``epistemic`` (nats). Of real targets and counts:
    ``rmse``, ``nll`` (nats per example), ``coverage_50``, ``coverage_90`` and ``coverage_95`` of
    the central intervals, ``aurc_std`` and ``aurc_epistemic_std`` (mean RMSE of the 1, 2, ..., n
    most certain examples), and the means of ``std`` and ``epistemic_std``. Of both ``refusal_p``:
    at most 0.05 where the 5 % least certain (by confidence or ``std``) are worse than the others,
    by `metrics.refusal_p_value`. Out of distribution: the means of both uncertainties, and how well
    each tells those inputs from the test data, ``auroc_entropy`` and ``auroc_epistemic``
    (``auroc_std`` and ``auroc_epistemic_std``).

    Args:
        model: the model.
        guide: what `predict` takes: a trained guide, chains, or draws by site name.
        test: test data ``(x, y)``, or a map-style ``Dataset`` of such pairs.
        ood: out-of-distribution inputs, or a dict from names to such inputs.
        shift: a dict from names to shifted test data ``(x, y)``. Of images in [0, 1], a number 1 to
            5 stands for the test data under the corruption of that name, by `data.corrupt`.
        num_samples: number of draws.
        seed: makes the result a function of this number, with common draws for all inputs, and
            leaves torch's random state alone.

    Returns:
        The scores, which print as a table. `Evaluation.of` makes them for other options of
        `predict`, or any function to a `Prediction`.

    Raises:
        ValueError: data or a number do not fit, or two data sets have one name.
        TypeError: an argument is of the wrong kind.
    """
    predict_fn = partial(predict, model, guide, num_samples=num_samples, seed=seed)
    return Evaluation.of(predict_fn, test, ood=ood, shift=shift)


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Scores by data set, made by `evaluate`; it prints as a table of them.

    Args:
        scores: a dict of scores for ``"test"``, each shift, and each out-of-distribution set.
        predictions: for the test data and the out-of-distribution sets, by the same names.
        targets: of the test data.
    """

    scores: dict[str, Scores]
    predictions: dict[str, Prediction] = field(compare=False)
    targets: Tensor = field(compare=False)

    @classmethod
    def of(
        cls, predict_fn: Any, test: Any, *, ood: Any = None, shift: Mapping[str, Any] | None = None
    ) -> Evaluation:
        """Score any function from inputs to a `Prediction`, such as a `TemperatureScaled`.

            linearized = functools.partial(bbb.predict, model, guide, linearized=True)
            bbb.Evaluation.of(linearized, (x_test, y_test))

        Args:
            predict_fn: the function.
            test: as of `evaluate`.
            ood: likewise.
            shift: likewise.

        Raises:
            ValueError: data do not fit, or two data sets have one name.
            TypeError: an argument is of the wrong kind.
        """
        prediction, y = _predicted(predict_fn, test)
        scores, predictions = {TEST: scores_of_test(prediction, y)}, {TEST: prediction}
        shifted = {} if shift is None else kind("shift", shift, Mapping)
        outside = _named(ood)
        _check_names([*shifted, *outside])
        for name, data in shifted.items():
            scores[name] = scores_of_test(*_predicted(predict_fn, _shifted(test, name, data)))
        for name, x in outside.items():
            predictions[name] = call_predict(predict_fn, x)
            scores[name] = scores_of_ood(predictions[name], prediction)
        return cls(scores, predictions, y)

    @property
    def recall(self) -> Tensor:
        """Recall of each class in the test data, ``[C]``, by `metrics.recall`."""
        prediction = kind("prediction", self.predictions[TEST], ClassificationPrediction)
        return metrics.recall(prediction.probs.flatten(0, -2), self.targets.flatten())

    def __repr__(self) -> str:
        return f"Evaluation({', '.join(self.scores)})"

    def __str__(self) -> str:
        return as_text(*self._table())

    def _repr_markdown_(self) -> str:
        return as_markdown(*self._table())

    def plot(self, figure: Figure | None = None) -> Figure:
        """Draw calibration on the test data, and the uncertainty of inputs in and out of it.

        Of classes a reliability diagram and histograms of the entropy; of real targets and counts
        the coverage of intervals and histograms of the standard deviation.

        Args:
            figure: an empty figure to draw on; by default a new one, which no window shows:
                ``figure.savefig(path)``, or the last expression of a notebook's cell.

        Returns:
            The figure.

        Raises:
            TypeError: ``figure`` is of another kind.
        """
        from matplotlib.figure import Figure

        from pyro_bbb import plots

        (name, inside), *_ = uncertainties(self.predictions[TEST]).items()
        outside = {of: uncertainties(each)[name] for of, each in self.predictions.items()}
        del outside[TEST]
        with plots.style():
            panels = 2 if outside else 1
            figure = Figure(figsize=(4.2 * panels, 3.2)) if figure is None else figure
            left, *right = kind("figure", figure, Figure).subplots(1, panels, squeeze=False)[0]
            _draw_calibration(left, self.predictions[TEST], self.targets)
            for ax in right:
                plots.entropy_histogram(ax, inside, outside).set_xlabel(_AXES[name])
        return figure

    def _table(self) -> Table:
        names = columns(self.scores.values())
        rows = [
            [str(of), *(cell(each, name) for name in names)] for of, each in self.scores.items()
        ]
        return ["", *(PRINTED[name][0] for name in names)], rows


def _named(ood: Any) -> Mapping[str, Any]:
    if ood is None:
        return {}
    return ood if isinstance(ood, Mapping) else {"out of distribution": ood}


def _check_names(names: list[str]) -> None:
    if len({TEST, *names}) <= len(names):
        raise ValueError(f"ood and shift must have different names, and none 'test', got {names}")


def _shifted(test: Any, name: str, data: Any) -> Any:
    """Shifted data as given, or the test data under a corruption of some severity."""
    if not isinstance(data, int):
        return data
    x, y = as_tensors(test)
    return corrupt(x, name, data), y


def _predicted(predict_fn: Any, data: Any) -> tuple[Prediction, Tensor]:
    """The prediction and the targets, in the shape of the labels or means predicted."""
    prediction, y = predict_calibration(predict_fn, data)
    if isinstance(prediction, ClassificationPrediction):
        return prediction, y
    return prediction, y.reshape(prediction._shape[1:])


def _draw_calibration(ax: Axes, prediction: Prediction, y: Tensor) -> None:
    from pyro_bbb import plots

    if isinstance(prediction, ClassificationPrediction):
        plots.reliability(ax, prediction.probs.flatten(0, -2), y.flatten())
    else:
        plots.coverage(ax, prediction.cdf(y))
