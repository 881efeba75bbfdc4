# SPDX-License-Identifier: Apache-2.0
r"""Split conformal prediction: intervals and label sets that contain the target with a guarantee.

Of n calibration examples, exchangeable with the new ones and not used for training, each has a
score $s_i$ that is large where the target is unlike its prediction. The threshold $\hat q$ is the
k-th smallest of them, $k = \lceil (n + 1)\,\mathrm{level} \rceil$. The set of all targets with a
score of at most $\hat q$ contains the true one with probability at least $k / (n + 1)$ for any
model (Vovk et al. 2005; Lei et al. 2018, arXiv:1604.04173). Where scores have no ties the
probability is $k / (n + 1)$, and given the calibration data it has the law Beta(k, n + 1 - k).

Regression: $s = |y - \mu(x)| / \sigma(x)$, the residual in total standard deviations (Lei et al.
2018, locally weighted). Classes: adaptive prediction sets (Romano, Sesia and Candès 2020,
arXiv:2006.02544), where $s = \sum_{c: p_c > p_y} p_c$ is the mass of the classes more probable than
y; randomised sets add $u\,p_y$ with u uniform in [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import all_finite, as_seed, count, one_of, probability
from pyro_bbb.prediction._calibration import (
    Calibrated,
    PredictFn,
    call_predict,
    predict_calibration,
)
from pyro_bbb.prediction._classification import ClassificationPrediction
from pyro_bbb.prediction._regression import RegressionPrediction

_REAL, _CLASSES = "standardized", ("adaptive", "randomized")
_CALIBRATION, _NEW = 0, 1  # streams of random numbers, independent also for one seed


@dataclass(frozen=True, eq=False)
class ConformalPredictor(Calibrated):
    """Intervals or label sets of a level, made by `conformal`.

    Args:
        predict_fn: function from inputs to a `Prediction`, the one of the calibration.
        level: probability that a set contains its target.
        score: ``"standardized"`` for intervals, ``"adaptive"`` or ``"randomized"`` for label sets.
        num_calibration: number n of calibration examples.
        threshold: largest score inside, for each target of one example, ``[d]`` or ``[]``, float64;
            for ``"standardized"`` in standard deviations, otherwise a probability.

    Raises:
        ValueError: a field is out of range.
    """

    _FORMAT = "pyro_bbb.conformal"
    _FORM = {
        "level": float,
        "score": str,
        "num_calibration": int,
        "threshold": float | list[float] | list[list[Any]],
    }
    predict_fn: PredictFn = field(repr=False)
    level: float
    score: str
    num_calibration: int
    threshold: Tensor

    def __post_init__(self) -> None:
        probability("level", self.level)
        one_of("score", self.score, (_REAL, *_CLASSES))
        count("num_calibration", self.num_calibration)
        threshold = torch.as_tensor(self.threshold, dtype=torch.double)  # a list in files
        if not (threshold.numel() and (threshold.isfinite() & (threshold >= 0)).all()):
            raise ValueError(f"threshold must be finite, at least 0, got {threshold.tolist()}")
        object.__setattr__(self, "threshold", threshold)

    def interval(self, x: Any) -> tuple[Tensor, Tensor]:
        """Return intervals of real targets or counts: mean ± threshold times standard deviation.

        Ends are rounded outward, and those of counts are not below 0.

        Args:
            x: inputs that ``predict_fn`` takes.

        Returns:
            Lower and upper end, each ``[n, d]``, in the targets' unit.

        Raises:
            TypeError: the calibration was of classes, or ``predict_fn`` gives another prediction.
            ValueError: the prediction has other dimensions than the calibration's, or no finite
                mean and standard deviation.
        """
        if self.score != _REAL:
            raise TypeError("self must be calibrated with real targets or counts: take label_set")
        prediction = call_predict(self.predict_fn, x)
        if not isinstance(prediction, RegressionPrediction):
            raise TypeError(f"predict_fn must predict real targets or counts, got {prediction!r}")
        mean, std = _moments(prediction)
        # a score that ties with the threshold is inside: rounding must not put it outside
        half = std * self._threshold(mean) * (1 + 4 * torch.finfo(std.dtype).eps)
        like = prediction.mean
        lower = torch.nextafter((mean - half).to(like), torch.full_like(like, -math.inf))
        upper = torch.nextafter((mean + half).to(like), torch.full_like(like, math.inf))
        return (lower.clamp(min=0) if prediction.components.support.is_discrete else lower), upper

    def label_set(self, x: Any, *, seed: int | None = None) -> Tensor:
        """Return sets of labels: the most probable classes, until the mass ahead is too large.

        Args:
            x: inputs that ``predict_fn`` takes.
            seed: makes randomised sets a function of this number, and leaves torch's random state
                alone.

        Returns:
            Whether each class is in the set, bool ``[n, C]``. Randomised sets may be empty.

        Raises:
            TypeError: the calibration was of real targets, or ``predict_fn`` gives another
                prediction.
            ValueError: the prediction has other dimensions than the calibration's.
        """
        if self.score == _REAL:
            raise TypeError("self must be calibrated with classes: take interval")
        seed = None if seed is None else as_seed("seed", seed)
        prediction = call_predict(self.predict_fn, x)
        if not isinstance(prediction, ClassificationPrediction):
            raise TypeError(f"predict_fn must predict classes, got {prediction!r}")
        scores = _class_scores(prediction, self.score, seed, _NEW)
        return scores <= self._threshold(scores[..., 0]).unsqueeze(-1)

    def _threshold(self, like: Tensor) -> Tensor:
        """Return the threshold on the device of a prediction ``[n, ...]`` of its dimensions."""
        if like.shape[1:] != self.threshold.shape:
            expected = f"targets of shape {list(self.threshold.shape)} as in the calibration"
            raise ValueError(f"predict_fn must give {expected}, got {list(like.shape[1:])}")
        return self.threshold.to(like.device)


def conformal(
    predict_fn: PredictFn,
    data: Any,
    level: float = 0.9,
    *,
    score: str | None = None,
    seed: int | None = None,
) -> ConformalPredictor:
    """Calibrate intervals or label sets that contain the target with probability ``level``.

    The guarantee is for new examples that are exchangeable with the calibration data, on average
    over both; it holds for any model, also one that is wrong. Of several targets each has its own
    interval or set, and its own guarantee: all are inside at once less often.

    Args:
        predict_fn: function from inputs to a `Prediction`, such as ``functools.partial(predict,
            model, guide, seed=0, estimator="reparam")``. It must treat calibration data and new
            inputs alike; the seed and the estimator make sure that they have the same draws.
        data: calibration data that training has not seen: a pair ``(x, y)`` of tensors or arrays,
            or a map-style ``Dataset`` of such pairs.
        level: probability inside, in (0, 1), reached as closely as n examples allow.
        score: for classes ``"adaptive"`` (the default), whose sets have at least one class and may
            contain the label more often than ``level``, or ``"randomized"``, whose sets contain it
            exactly as often, but differ from call to call and may be empty. For real targets and
            counts ``"standardized"``.
        seed: makes a randomised calibration a function of this number.

    Raises:
        ValueError: there are too few examples for the level, less than level / (1 - level); a
            number is out of range, the score unknown; targets do not fit; or the prediction has
            NaN, or for real targets no finite standard deviation above 0.
    """
    level, seed = probability("level", level), None if seed is None else as_seed("seed", seed)
    prediction, y = predict_calibration(predict_fn, data)
    if isinstance(prediction, RegressionPrediction):
        score = one_of("score", score or _REAL, [_REAL])
        mean, std = _moments(prediction)
        if not (std > 0).all():
            raise ValueError("predict_fn must give standard deviations above 0, got 0")
        scores = (y.double().reshape(mean.shape) - mean).abs() / std  # |y - mu| / sigma
    else:
        score = one_of("score", score or _CLASSES[0], _CLASSES)
        class_scores = _class_scores(prediction, score, seed, _CALIBRATION)
        scores = class_scores.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    n, exact = len(scores), Fraction(repr(level))  # the decimal number that was written
    k = math.ceil((n + 1) * exact)
    if k > n:
        least = math.ceil(exact / (1 - exact))
        raise ValueError(f"data must hold at least {least} examples for level {level}, got {n}")
    threshold = scores.kthvalue(k, dim=0).values.cpu()
    return ConformalPredictor(predict_fn, level, score, n, threshold)


def _moments(prediction: RegressionPrediction) -> tuple[Tensor, Tensor]:
    """Return mean and total standard deviation, in float64."""
    mean, std = prediction.mean.double(), prediction.std.double()
    if not (all_finite(mean) and all_finite(std)):
        hint = f"got {prediction!r} (a Student's t has them for more than 2 degrees of freedom)"
        raise ValueError(f"predict_fn must give finite means and standard deviations, {hint}")
    return mean, std


@locked
def _class_scores(
    prediction: ClassificationPrediction, score: str, seed: int | None, stream: int
) -> Tensor:
    """Return the scores of classes, ``[n, C]``: the mass ahead, plus u times their own mass."""
    probs, order = prediction.probs.double().sort(dim=-1, descending=True, stable=True)
    scores = torch.cat([torch.zeros_like(probs[..., :1]), probs.cumsum(-1)[..., :-1]], -1)
    if score == "randomized":
        shape = (*probs.shape[:-1], 1)
        if seed is None:
            u = torch.rand(shape, dtype=torch.double)
        else:
            u = torch.from_numpy(np.random.default_rng([seed % 2**64, stream]).random(shape))
        scores = scores + u.to(probs.device) * probs
    return torch.zeros_like(scores).scatter(-1, order, scores)
