# SPDX-License-Identifier: Apache-2.0
r"""Select batches of inputs whose labels are jointly most informative about the weights.

`ClassificationPrediction.epistemic` is the information of one label. The inputs of highest score
resemble each other, so that their labels carry the same information. For a batch B it is

$$I(y_B; w) = H(y_B) - \sum_{i \in B} E_w H(y_i \mid w)$$

(BatchBALD, Kirsch et al. 2019, arXiv:1906.08158). A further input i adds
$H(y_i \mid y_B) - E_w H(y_i \mid w)$, where the draws of the weights give, for the values m of the
labels $y_B$,

$$H(y_i \mid y_B) = \sum_m p(m)\, H\Big(\sum_s p(w_s \mid m)\, p(y_i \mid w_s)\Big), \qquad
  p(w_s \mid m) \propto p(m \mid w_s).$$
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_bbb._utils.validation import as_seed, count, kind
from pyro_bbb.prediction._classification import ClassificationPrediction

_NUMBERS = 20_000_000  # of one block of a computation
_LOOKED_AT = 64  # inputs whose gain is computed at a time


def batch_bald(
    prediction: ClassificationPrediction,
    size: int,
    *,
    num_configurations: int = 10_000,
    seed: int = 0,
) -> Tensor:
    r"""Return the inputs whose labels have the largest joint mutual information with the weights.

        prediction = bbb.predict(model, guide, x_pool, num_samples=100, seed=0)
        rows = bbb.batch_bald(prediction, size=10)

    BatchBALD, Algorithm 1: greedily, the next input is the one that adds most, which reaches at
    least $1 - 1/e$ of the best batch's information. The joint entropy is exact while the labels
    chosen have at most ``num_configurations`` values; later it is estimated from as many sampled
    ones. Gains only decrease, so that most inputs are skipped by their gains in the steps before
    (lazy greedy, Minoux 1978).

    Args:
        prediction: for the candidates, by draws of the weights common to all of them.
        size: how many to choose, at most n.
        num_configurations: values of the labels chosen so far, in the joint entropy.
        seed: seed of sampled values; the global random state is left alone.

    Returns:
        Their indices in the order in which they were chosen, int64 ``[size]``.

    Raises:
        ValueError: ``size`` or ``num_configurations`` is out of range, or the prediction has
            several labels for an input, draws of each input's outputs, or NaN.
    """
    probs = _common_draws(prediction, size)
    limit = count("num_configurations", num_configurations)
    generator = torch.Generator(probs.device).manual_seed(as_seed("seed", seed))
    own_entropy = torch.special.entr(probs).sum(-1).mean(0)  # E_w H(y_i | w), [n]
    log_prob, source = probs.new_zeros(len(probs), 1), None  # log p(m | w_s), [draws, M]
    gains = prediction.epistemic.to(probs)  # of earlier steps they are upper bounds
    chosen: list[int] = []
    while len(chosen) < size:
        if chosen:
            log_prob, source = _with_last(log_prob, source, probs[:, chosen], limit, generator)
        # sampled values have equal masses
        mass = log_prob.exp().mean(0) if source is None else log_prob.new_full((limit,), 1 / limit)
        posterior = log_prob.softmax(0).nan_to_num(0.0)  # p(w_s | m); 0 where m has no mass
        stale = torch.ones_like(gains, dtype=torch.bool)
        while stale[best := int(gains.argmax())]:
            rows = gains.where(stale, -torch.inf).topk(min(_LOOKED_AT, len(gains))).indices
            rows = rows[gains[rows] > -torch.inf]
            entropy = _conditional_entropy(probs[:, rows], posterior, mass)
            gains[rows] = entropy - own_entropy[rows]
            stale[rows] = False
        chosen.append(best)
        gains[best] = -torch.inf
    return torch.tensor(chosen, device=probs.device)


def _conditional_entropy(probs: Tensor, posterior: Tensor, mass: Tensor) -> Tensor:
    """Return $H(y_i | y_B)$ ``[n]`` for probabilities ``[draws, n, classes]``, in nats."""
    entropies = []
    for block in probs.split(max(1, _NUMBERS // (len(mass) * probs.shape[2])), dim=1):
        mixture = torch.einsum("sm,snc->mnc", posterior, block)  # p(y_i | m)
        entropies.append(mass @ torch.special.entr(mixture).sum(2))
    return torch.cat(entropies)


def _with_last(
    log_prob: Tensor,
    source: Tensor | None,
    probs: Tensor,
    limit: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor | None]:
    """Return ``log_prob [draws, M]`` of values with one label more, and the draw of each sample."""
    if source is None and log_prob.shape[1] * probs.shape[2] <= limit:
        return (log_prob[:, :, None] + probs[:, -1].log()[:, None]).flatten(1), None
    inputs = [-1]
    if source is None:  # equally many values of each draw, in random order
        order = torch.randperm(limit, generator=generator, device=probs.device)
        source = (torch.arange(limit, device=probs.device) % len(probs))[order]
        log_prob, inputs = probs.new_zeros(len(probs), limit), list(range(probs.shape[1]))
    for i in inputs:
        labels = torch.multinomial(probs[source, i], 1, generator=generator)[:, 0]
        log_prob = log_prob + probs[:, i, labels].log()
    return log_prob, source


def diverse_bald(prediction: ClassificationPrediction, size: int) -> Tensor:
    r"""Return inputs of high mutual information that do not resemble each other.

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
    """Return the class probabilities of each draw, ``[draws, n, classes]`` in float64."""
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
