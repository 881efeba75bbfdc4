# SPDX-License-Identifier: Apache-2.0
r"""Temperature scaling: one number, fitted on held-out data, that makes a predictive calibrated.

The logarithms of the mean probabilities $\bar p$ are divided by T > 0 (Guo et al. 2017,
arXiv:1706.04599; of the mean rather than of each draw: Rahaman and Thiery 2021, arXiv:2007.08792).
Deviations of a real target from its mean $\mu$ are multiplied by T (standard deviation scaling:
Levi et al. 2019, arXiv:1905.11659). Above 1 both make predictions less certain. T minimises the
negative log-likelihood of calibration data, which for classes is convex in 1/T:

$$-\frac1n\sum_i \log p'_{i y_i},\quad p'_i = \mathrm{softmax}(\log\bar p_i / T); \qquad
  -\frac1n\sum_i \log\frac1{S\,T^d}\sum_s p_s\big(\mu_i + (y_i - \mu_i) / T\big).$$

The draws follow their mean. Real targets: the mixture is stretched around its mean, noise and draws
alike. Classes: a class that loses probability, $p'_c < \bar p_c$, loses the same fraction of it in
each draw, and what a draw loses goes to the classes that gain, in proportion to $p'_c - \bar p_c$.
Then draws are distributions with the mean $p'$, and entropies add up as before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._utils.validation import positive
from pyro_bbb.distributions import map_tensors
from pyro_bbb.prediction._calibration import (
    Calibrated,
    PredictFn,
    call_predict,
    predict_calibration,
)
from pyro_bbb.prediction._classification import ClassificationPrediction
from pyro_bbb.prediction._regression import Prediction, RegressionPrediction

_LIMIT = math.log(1e4)  # temperatures are in [1e-4, 1e4]
_FLAT = 1e-9  # nats per example by which half and twice the best temperature must be worse


@dataclass(frozen=True)
class TemperatureScaled(Calibrated):
    """A function from inputs to predictions of another temperature, made by `temperature_scaling`.

    Args:
        predict_fn: function from inputs to a `Prediction`.
        temperature: T, positive; above 1 predictions become less certain.

    Raises:
        ValueError: the temperature is not positive and finite.
    """

    _FORMAT = "pyro_bbb.temperature"
    _FORM = {"temperature": float}
    predict_fn: PredictFn = field(repr=False)
    temperature: float

    def __post_init__(self) -> None:
        positive("temperature", self.temperature)

    def __call__(self, x: Any) -> Prediction:
        """Return the prediction at inputs that ``predict_fn`` takes; labels and means stay.

        Raises:
            TypeError: ``predict_fn`` gives no prediction, or one of counts, which have no scale.
        """
        return _scaled(call_predict(self.predict_fn, x), self.temperature)


def temperature_scaling(predict_fn: PredictFn, data: Any) -> TemperatureScaled:
    """Fit the temperature of a predictive on calibration data.

    Args:
        predict_fn: function from inputs to a `Prediction`, such as ``functools.partial(predict,
            model, guide, seed=0)``.
        data: calibration data that training has not seen: a pair ``(x, y)`` of tensors or arrays,
            or a map-style ``Dataset`` of such pairs.

    Returns:
        A function from inputs to predictions that can be saved and replaces ``predict_fn``
        everywhere. Its log-likelihood on the calibration data is not below that of ``predict_fn``.

    Raises:
        ValueError: targets do not fit; the prediction has NaN or gives a target probability 0; or
            no temperature in [1e-4, 1e4] is best, as where all labels are predicted correctly.
        TypeError: an argument is of the wrong kind, or the prediction of counts.
    """
    from scipy.optimize import minimize_scalar  # its import takes longer than this package

    prediction, y = predict_calibration(predict_fn, data)
    # likelihoods are compared in float64; of classes only the mean matters, as one draw
    exact: Prediction
    if isinstance(prediction, ClassificationPrediction):
        log_probs = prediction.log_probs.double().unsqueeze(0)
        exact = replace(prediction, sample_log_probs=log_probs)
    else:
        components = map_tensors(prediction.components, Tensor.double)
        exact = RegressionPrediction(components, ignored=prediction.ignored)

    def nll(log_temperature: float) -> float:
        limited = min(max(log_temperature, -_LIMIT), _LIMIT)
        return -_scaled(exact, math.exp(limited)).log_prob(y).mean().item()

    if math.isinf(nll(0.0)):
        raise ValueError("data must have no target to which predict_fn gives the probability 0")
    # Brent's method returns the best of the points that it tried, and 0 is the first
    best: float = minimize_scalar(nll, bracket=(0.0, 0.1)).x
    if min(nll(best - math.log(2)), nll(best + math.log(2))) - nll(best) < _FLAT:
        reason = "their likelihood has no maximum there, as where all labels are right"
        raise ValueError(f"data must have a best temperature in [1e-4, 1e4], but {reason}")
    return TemperatureScaled(predict_fn, math.exp(best))


def _scaled(prediction: Prediction, temperature: float) -> Prediction:
    """Return the prediction at a temperature."""
    if not isinstance(prediction, ClassificationPrediction):
        return prediction.rescaled((1 - temperature) * prediction.mean, temperature)
    old = prediction.log_probs
    new = (old / temperature).log_softmax(-1)
    log_ratio = (new - old).nan_to_num(nan=0.0)  # 0, too, where a probability is 0
    loss, gain = log_ratio.clamp(max=0), log_ratio.clamp(min=0)
    lost = prediction.sample_log_probs + (-loss.expm1()).log()  # p_s (1 - p'/p)
    gained = old + gain + (-(-gain).expm1()).log()  # p' - p
    fractions = gained.log_softmax(-1).nan_to_num(nan=-math.inf)  # NaN where no class gains
    moved = lost.logsumexp(-1, keepdim=True) + fractions
    log_probs = torch.logaddexp(prediction.sample_log_probs + loss, moved)
    return replace(prediction, sample_log_probs=log_probs)
