r"""Temperature scaling: one number, fitted on held-out data, that makes a predictive calibrated.

A network's logits are divided by T > 0 (Guo et al. 2017, arXiv:1706.04599); deviations of a real
target from its mean are multiplied by T (standard deviation scaling: Levi et al. 2019,
arXiv:1905.11659). Above 1 it makes predictions less certain. T minimises the negative
log-likelihood of the posterior predictive on calibration data, of the mixture over draws:

$$-\frac1n\sum_i \log\frac1S\sum_s \mathrm{softmax}(z_{si} / T)_{y_i}, \qquad
  -\frac1n\sum_i \log\frac1{S\,T^d}\sum_s p_s\big(\mu_i + (y_i - \mu_i) / T\big).$$

Each draw's logits are divided, and not the logarithm of the mean probabilities: so every draw
remains a distribution, and entropies still add up. The first has one minimum for a single draw, as
it is convex in 1/T. For several it keeps each draw's most probable class, and nearly always the
mixture's. The second is the law of the mixture stretched around its mean, noise and draws alike.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pyro_bbb._utils.files import read_json, write_json
from pyro_bbb._utils.validation import function, positive
from pyro_bbb.distributions import map_tensors
from pyro_bbb.prediction._calibration import PredictFn, call_predict, predict_calibration
from pyro_bbb.prediction._summaries import (
    ClassificationPrediction,
    Prediction,
    RegressionPrediction,
)

_FORMAT = "pyro_bbb.temperature"
_LIMIT = math.log(1e4)  # temperatures are in [1e-4, 1e4]
_FLAT = 1e-9  # nats per example by which half and twice the best temperature must be worse


@dataclass(frozen=True)
class TemperatureScaled:
    """A function from inputs to predictions of another temperature, made by `temperature_scaling`.

    Args:
        predict_fn: function from inputs to a `Prediction`.
        temperature: T, positive; above 1 predictions become less certain.
    """

    predict_fn: PredictFn = field(repr=False)
    temperature: float

    def __call__(self, x: Any) -> Prediction:
        """The prediction at inputs that ``predict_fn`` takes, of the same kind and draws.

        Raises:
            TypeError: ``predict_fn`` gives no prediction, or one of counts, which have no scale.
        """
        return _scaled(call_predict(self.predict_fn, x), self.temperature)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the temperature to a JSON file, which appears complete or not at all.

        Raises:
            TypeError: the path is of another type.
            ValueError: it names no file.
            OSError: the file cannot be written.
        """
        write_json(path, _FORMAT, {"temperature": self.temperature})

    @classmethod
    def load(cls, path: str | os.PathLike[str], predict_fn: PredictFn) -> TemperatureScaled:
        """Read what `save` wrote.

        Args:
            path: the file.
            predict_fn: the function that was scaled, such as `predict` with the same model, guide
                and options.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged or of another kind.
            TypeError: an argument is of the wrong kind.
        """
        function("predict_fn", predict_fn, "from inputs to a Prediction")
        content = read_json(path, _FORMAT)
        try:
            return cls(predict_fn, positive("temperature", content["temperature"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"path leads to {path}, which is altered: {error!r}") from error


def temperature_scaling(predict_fn: PredictFn, data: Any) -> TemperatureScaled:
    """Fit the temperature of a predictive on calibration data.

    Args:
        predict_fn: function from inputs to a `Prediction`, such as ``functools.partial(predict,
            model, guide, seed=0)``.
        data: calibration data that training has not seen: a pair ``(x, y)`` of tensors or arrays,
            or a map-style ``Dataset`` of such pairs.

    Returns:
        A function from inputs to predictions, with the temperature, that can be saved and stands
        wherever ``predict_fn`` does. Its log-likelihood on the calibration data is not below that
        of ``predict_fn``.

    Raises:
        ValueError: targets do not fit; the prediction has NaN or gives a target probability 0; or
            no temperature in [1e-4, 1e4] is best, as where all labels are predicted correctly.
        TypeError: an argument is of the wrong kind, or the prediction of counts.
    """
    from scipy.optimize import minimize_scalar  # which takes longer to import than this room

    prediction, y = predict_calibration(predict_fn, data)
    exact = _double(prediction)

    def nll(log_temperature: float) -> float:
        limited = min(max(log_temperature, -_LIMIT), _LIMIT)
        return -_scaled(exact, math.exp(limited)).log_prob(y).mean().item()

    if math.isinf(nll(0.0)):
        raise ValueError("data must have no target to which predict_fn gives the probability 0")
    # Brent's method returns the best of the points that it tried, and 0 is the first
    best: float = minimize_scalar(nll, bracket=(0.0, 0.1)).x
    if min(nll(best - math.log(2)), nll(best + math.log(2))) - nll(best) < _FLAT:
        found = "their likelihood has no maximum there, as where all labels are right"
        raise ValueError(f"data must have a best temperature in [1e-4, 1e4], but {found}")
    return TemperatureScaled(predict_fn, math.exp(best))


def _scaled(prediction: Prediction, temperature: float) -> Prediction:
    """The prediction at a temperature."""
    if isinstance(prediction, ClassificationPrediction):
        logits = prediction.sample_log_probs / temperature
        return ClassificationPrediction(logits.log_softmax(-1), prediction.sampler)
    return prediction.rescaled((1 - temperature) * prediction.mean, temperature)


def _double(prediction: Prediction) -> Prediction:
    """The prediction in float64, in which its likelihoods are compared."""
    if isinstance(prediction, ClassificationPrediction):
        return ClassificationPrediction(prediction.sample_log_probs.double(), prediction.sampler)
    components = map_tensors(prediction.components, Tensor.double)
    return RegressionPrediction(components, prediction.sampler)
