# SPDX-License-Identifier: Apache-2.0
"""Batches of inputs whose labels, bought together, tell most about the weights.

`ClassificationPrediction.epistemic` is what one label tells. The inputs of highest score resemble
each other, so that a batch of them tells the same thing several times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pyro_bbb._utils.validation import as_seed, count, kind
from pyro_bbb.prediction._classification import ClassificationPrediction

_NUMBERS = 20_000_000  # of one part of a computation
_LOOKED_AT = 64  # inputs whose gain is computed at a time


def batch_bald(
    prediction: ClassificationPrediction,
    size: int,
    *,
    num_configurations: int = 10_000,
    seed: int = 0,
) -> Tensor:
    r"""Inputs whose labels have the largest mutual information with the weights together.

        prediction = bbb.predict(model, guide, x_pool, num_samples=100, seed=0)
        rows = bbb.batch_bald(prediction, size=10)

    BatchBALD (Kirsch et al. 2019, arXiv:1906.08158, Algorithm 1): greedily, the next input
    maximises $I(y_1, \dots, y_b; w) = H(y_1, \dots, y_b) - \sum_i E_w H(y_i | w)$, which has at
    least $1 - 1/e$ of the best batch's information. The draws stand for the posterior. The joint
    entropy is exact while the labels chosen have at most ``num_configurations`` values; later it is
    estimated from so many sampled ones. An input tells the less, the more labels are known: so most
    inputs are passed over, by what they told in the steps before (lazy greedy, Minoux 1978). Of a
    few thousand inputs that takes seconds, and a minute where all tell about as much.

    Args:
        prediction: for the candidates, by draws of the weights common to all of them.
        size: how many to choose, at most n.
        num_configurations: values of the labels chosen so far, in the joint entropy.
        seed: of sampled values; the global random state is left alone.

    Returns:
        Their indices in the order in which they were chosen, int64 ``[size]``.

    Raises:
        ValueError: ``size`` or ``num_configurations`` is out of range, or the prediction has
            several labels for an input, draws of each input's outputs, or NaN.
        TypeError: ``prediction`` is no `ClassificationPrediction`, or ``seed`` no integer.
    """
    probs = _common_draws(prediction, size)
    limit = count("num_configurations", num_configurations)
    generator = torch.Generator(probs.device).manual_seed(as_seed("seed", seed))
    own_entropy = torch.special.entr(probs).sum(-1).mean(0)
    joint: _Joint = _Exact(probs)
    bounds = prediction.epistemic.to(probs)
    chosen: list[int] = []
    while len(chosen) < size:
        chosen.append(_best(joint, own_entropy, bounds))
        bounds[chosen[-1]] = -torch.inf
        joint = joint.with_label(chosen, limit, generator)
    return torch.tensor(chosen, device=probs.device)


def _best(joint: _Joint, own_entropy: Tensor, bounds: Tensor) -> int:
    """The input whose label tells most beside those chosen; ``bounds`` become gains on the way.

    Args:
        joint: of the labels chosen.
        own_entropy: of each input's label, given the weights, ``[n]``.
        bounds: upper ones of what each input tells, ``[n]``; -inf for those chosen.
    """
    stale = torch.ones_like(bounds, dtype=torch.bool)
    while stale[best := int(bounds.argmax())]:
        rows = bounds.where(stale, -torch.inf).topk(min(_LOOKED_AT, len(bounds))).indices
        rows = rows[bounds[rows] > -torch.inf]
        bounds[rows] = joint.conditional_entropy(rows) - own_entropy[rows]
        stale[rows] = False
    return best


def diverse_bald(prediction: ClassificationPrediction, size: int) -> Tensor:
    r"""Inputs of high mutual information that do not resemble each other.

    Cheaper than `batch_bald`: greedily, the next input maximises its own `epistemic` times the
    fraction of its variance that is left when the inputs chosen before are known, as in a pivoted
    Cholesky decomposition of the covariance $k(i, j) = \sum_c \mathrm{cov}(p_{ic}, p_{jc})$ of the
    class probabilities over the draws.

    Args:
        prediction: for the candidates, by draws of the weights common to all of them.
        size: how many to choose, at most n.

    Returns:
        Their indices in the order in which they were chosen, int64 ``[size]``.

    Raises:
        ValueError: ``size`` is out of range, or the prediction has several labels for an input,
            draws of each input's outputs, or NaN.
        TypeError: ``prediction`` is no `ClassificationPrediction`.
    """
    probs = _common_draws(prediction, size)
    residual = (probs - probs.mean(0)).transpose(0, 1).flatten(1)  # [n, draws * classes]
    variance = residual.square().sum(-1)
    score = prediction.epistemic.to(probs) / variance.where(variance > 0, 1.0)
    chosen: list[int] = []
    while len(chosen) < size:
        gain = score * residual.square().sum(-1)
        gain[chosen] = -torch.inf
        chosen.append(int(gain.argmax()))
        direction = torch.nn.functional.normalize(residual[chosen[-1]], dim=0)
        residual = residual - torch.outer(residual @ direction, direction)
    return torch.tensor(chosen, device=probs.device)


def _common_draws(prediction: Any, size: Any) -> Tensor:
    """Class probabilities of each draw of the weights, ``[draws, n, classes]`` in float64."""
    probs: Tensor = kind("prediction", prediction, ClassificationPrediction).sample_probs.double()
    if probs.dim() != 3 or prediction.sampler != "weights":
        raise ValueError(
            "prediction must be of one label for each input, by draws of the weights "
            f"(estimator='reparam'), got {prediction!r}"
        )
    if probs.isnan().any():
        raise ValueError("prediction must have no NaN")
    if count("size", size) > probs.shape[1]:
        raise ValueError(
            f"size must be at most the {probs.shape[1]} inputs of prediction, got {size}"
        )
    return probs


class _Exact:
    """All values of the labels chosen so far, and their probability under each draw."""

    def __init__(self, probs: Tensor, values: Tensor | None = None) -> None:
        self.probs = probs
        self.values = probs.new_ones(len(probs), 1) if values is None else values  # [draws, M]

    def conditional_entropy(self, rows: Tensor) -> Tensor:
        """Entropy of each input's label when the labels chosen are known, ``[rows]``, nats."""
        parts = [
            torch.special.entr(each).sum((0, 2))
            for each in _mixtures(self.values, self.probs[:, rows])
        ]
        return torch.cat(parts) - torch.special.entr(self.values.mean(0)).sum()

    def with_label(self, chosen: list[int], limit: int, generator: torch.Generator) -> _Joint:
        """The same with the label chosen last; sampled if that has more values than ``limit``."""
        newest = self.probs[:, chosen[-1]]
        if self.values.shape[1] * newest.shape[1] > limit:
            return _Sampled(self.probs, chosen, limit, generator)
        return _Exact(self.probs, (self.values[:, :, None] * newest[:, None]).flatten(1))


class _Sampled:
    """Sampled values of the labels chosen so far, and the draws' weights given each of them."""

    def __init__(
        self, probs: Tensor, chosen: list[int], number: int, generator: torch.Generator
    ) -> None:
        self.probs = probs
        draws = torch.arange(number, device=probs.device) % len(probs)
        self.own = draws[torch.randperm(number, generator=generator, device=probs.device)]
        self.log_values = probs.new_zeros(len(probs), number)  # [draws, M]
        self._add(chosen, generator)

    def conditional_entropy(self, rows: Tensor) -> Tensor:
        """Estimate it: the mean over sampled values; the label of the input is summed over."""
        parts = [
            torch.special.entr(each).sum(2).mean(0)
            for each in _mixtures(self.weights, self.probs[:, rows])
        ]
        return torch.cat(parts)

    def with_label(self, chosen: list[int], limit: int, generator: torch.Generator) -> _Joint:
        """The same with the label chosen last."""
        self._add(chosen[-1:], generator)
        return self

    def _add(self, rows: list[int], generator: torch.Generator) -> None:
        """Sample further labels, by the draw of the weights that is each value's own."""
        for row in rows:
            labels = torch.multinomial(self.probs[self.own, row], 1, generator=generator)[:, 0]
            self.log_values += self.probs[:, row, labels].log()
        self.weights = self.log_values.softmax(0) * len(self.probs)  # of mean 1


_Joint: TypeAlias = "_Exact | _Sampled"


def _mixtures(values: Tensor, probs: Tensor) -> Iterator[Tensor]:
    """Mean over the draws of values' and labels' probabilities, ``[M, some of n, classes]``."""
    draws, _, classes = probs.shape
    for part in probs.split(max(1, _NUMBERS // (values.shape[1] * classes)), dim=1):
        yield (values.T @ part.flatten(1) / draws).unflatten(1, part.shape[1:])
