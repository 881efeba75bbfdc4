# SPDX-License-Identifier: Apache-2.0
r"""Convergence of Markov chains, and reliability of importance weights.

With $M$ half chains of $n$ draws, the mean $W$ of their variances and the variance $B/n$ of their
means,
$$\hat R = \sqrt{\frac{n-1}{n} + \frac{B}{nW}}, \qquad
  \mathrm{ESS} = \frac{Mn}{-1 + 2\sum_t \hat\rho_t}, \qquad
  \hat\rho_t = 1 - \frac{W - \tfrac1M\sum_m \hat\gamma_{m,t}}{\tfrac{n-1}{n}W + B/n},$$
where $\hat\gamma_{m,t}$ is a chain's autocovariance and the sum ends by Geyer's rule. Draws are
replaced by Normal scores of their ranks. Source: Vehtari, Gelman, Simpson, Carpenter, Bürkner 2021,
"Rank-Normalization, Folding, and Localization: An Improved R-hat".
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from pyro_bbb._utils.validation import of_array, one_of
from pyro_bbb.metrics._scores import _describe, _vector

_BLOCK = 2**21  # draws diagnosed at once, which bounds the memory


def r_hat(values: Tensor) -> Tensor:
    r"""Return rank-normalised split $\hat R$, the larger one of location and (folded) of scale.

    Near 1 where the chains agree; above 1.01 they do not yet.

    Args:
        values: draws of several chains, ``[chains, draws, ...]``.

    Returns:
        One number for each function drawn, float64 ``[...]``; NaN where all draws are equal, or
        one is not finite.

    Raises:
        ValueError: there is only one chain, or fewer than four draws.
    """
    if (draws := _draws(values)).shape[0] < 2:
        raise ValueError("values must be of 2 chains, got 1; run with num_chains of at least 2")
    return _by_function(_r_hat, draws)


def ess(values: Tensor, kind: str = "bulk") -> Tensor:
    """Return the effective number of independent draws in all chains together.

    Args:
        values: draws of one or several chains, ``[chains, draws, ...]``.
        kind: ``"bulk"`` for estimates of location, ``"tail"`` for the 5 % and 95 % quantiles,
            ``"mean"`` or ``"sd"`` for the standard error of these.

    Returns:
        One number for each function drawn, float64 ``[...]``; NaN where a draw is not finite.

    Raises:
        ValueError: an unknown kind, or fewer than four draws.
    """
    return _by_function(_ESS[one_of("kind", kind, list(_ESS))], _draws(values))


def pareto_k(log_weights: Tensor) -> float:
    r"""Return the shape $\hat k$ of the generalised Pareto law of the largest importance weights.

    The weights have $1/k$ finite moments. Below 0.7 importance sampling corrects the proposal with
    a practical number of draws; above, the proposal misses much of the target. Source: Vehtari,
    Simpson, Gelman, Yao, Gabry 2024, "Pareto Smoothed Importance Sampling"; the fit is that of
    Zhang and Stephens 2009, with their weak prior of 10 observations at 0.5.

    Args:
        log_weights: $\log p(D, w) - \log q(w)$ up to a constant, ``[draws]``.

    Returns:
        The shape; ``-inf`` where the largest weights are equal, ``inf`` where fewer than five are
        larger than the others.

    Raises:
        ValueError: it is empty, not one-dimensional, or has a NaN or ``inf``.
    """
    log_weights = _vector("log_weights", log_weights)
    if not (most := log_weights.max()).isfinite():
        raise ValueError(f"log_weights must be below inf, one above -inf, got at most {most}")
    weights, number = (log_weights - most).sort().values.exp(), len(log_weights)
    size = math.ceil(min(number / 5, 3 * math.sqrt(number)))
    cutoff = weights[max(number - 1 - size, 0)].clamp(min=torch.finfo(weights.dtype).tiny)
    x = weights[weights > cutoff] - cutoff  # exceedances, ascending
    if (n := len(x)) < 5:
        return -math.inf if cutoff == 1 else math.inf
    # posterior mean by a grid of theta = -k / scale, whose profile likelihood has k in closed form
    points = torch.arange(1, 31 + math.isqrt(n), dtype=x.dtype) - 0.5
    theta = 1 / x[-1] + (1 - (len(points) / points).sqrt()) / (3 * x[int(n / 4 + 0.5) - 1])
    k = torch.log1p(-theta[:, None] * x).mean(1)
    log_likelihood = n * ((-theta / k).log() - k - 1)
    theta_mean = log_likelihood.softmax(0) @ theta
    k_mean = float(torch.log1p(-theta_mean * x).mean())
    return (n * k_mean + 10 * 0.5) / (n + 10)


def _draws(values: Tensor) -> Tensor:
    values = of_array(values)
    if not isinstance(values, Tensor) or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"values must be a tensor of real numbers, got {_describe(values)}")
    if values.ndim < 2 or not len(values):
        raise ValueError(f"expected values [chains, draws, ...], got shape {list(values.shape)}")
    if values.shape[1] < 4:
        raise ValueError(f"values must hold at least 4 draws per chain, got {values.shape[1]}")
    return values.detach().cpu()


def _by_function(statistic: Callable[[Tensor], Tensor], draws: Tensor) -> Tensor:
    """Apply a statistic of ``[functions, chains, draws]`` to ``[chains, draws, ...]``."""
    functions, results = draws.flatten(2) if draws.ndim > 2 else draws[..., None], []
    for block in functions.split(max(_BLOCK // draws[..., 0].numel(), 1), 2):
        values = block.permute(2, 0, 1).double().contiguous()
        results.append(statistic(values).where(values.isfinite().all(2).all(1), math.nan))
    return torch.cat(results).reshape(draws.shape[2:])


def _r_hat(values: Tensor) -> Tensor:
    halves = _halves(values)
    order, ordered = _sorted(halves.flatten(1))
    number = ordered.shape[1]
    median = (ordered[:, (number - 1) // 2] + ordered[:, number // 2]) / 2
    outward, distance = _sorted((ordered - median[:, None]).abs(), "stable")  # merges two runs
    location = _normal_scores(order, ordered).view_as(halves)
    scale = _normal_scores(order.gather(1, outward), distance).view_as(halves)
    return torch.maximum(_plain_r_hat(location), _plain_r_hat(scale))


def _plain_r_hat(values: Tensor) -> Tensor:
    n = values.shape[2]
    return ((n * values.mean(2).var(1) / values.var(2).mean(1) + n - 1) / n).sqrt()


def _halves(values: Tensor) -> Tensor:
    """Split each chain into two, ``[functions, 2 * chains, draws // 2]``."""
    half = values.shape[2] // 2
    return torch.cat([values[..., :half], values[..., -half:]], 1)


def _sorted(
    rows: Tensor, algorithm: Literal["quicksort", "stable"] = "quicksort"
) -> tuple[Tensor, Tensor]:
    """Sort each row; return the permutations and the sorted values."""
    order = torch.from_numpy(rows.numpy().argsort(1, kind=algorithm))  # faster than torch's
    return order, rows.gather(1, order)


def _quantile(ordered: Tensor, level: float) -> Tensor:
    """Return a quantile of ascending rows, ``[rows, 1]``; `torch.quantile` refuses many draws."""
    position = level * (ordered.shape[1] - 1)
    low, high = ordered[:, math.floor(position), None], ordered[:, math.ceil(position), None]
    return low + (high - low) * (position % 1)


def _normal_scores(order: Tensor, ordered: Tensor) -> Tensor:
    """Return Normal scores of the ranks in each row; ties share their mean rank."""
    rows, number = ordered.shape
    # Blom's scores of the ranks 1, 1.5, ..., number
    ranks = 1 + torch.arange(2 * number - 1, dtype=ordered.dtype) / 2
    scores = torch.special.ndtri((ranks - 3 / 8) / (number + 1 / 4))
    by_position = scores[::2].repeat(rows)
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    if len(later := repeated.flatten().nonzero()[:, 0]):
        heads = later.diff(prepend=later[:1] - 2) != 1  # of the runs of ties
        first, run = later[heads] - 1, heads.cumsum(0) - 1
        tied = scores[2 * (first % number) + run.bincount()]
        by_position[first], by_position[later] = tied, tied[run]
    return torch.empty_like(ordered).scatter_(1, order, by_position.view(rows, number))


def _plain_ess(values: Tensor) -> Tensor:
    """Return the ESS of half chains ``[functions, chains, draws]`` by Geyer's monotone sequence."""
    _, chains, n = values.shape
    spectrum = torch.fft.rfft(values - values.mean(2, keepdim=True), 2 * n).abs().square().mean(1)
    covariance = torch.fft.irfft(spectrum, 2 * n)[:, :n] / n  # mean over chains, [functions, lags]
    within = covariance[:, :1] * n / (n - 1)
    rho = 1 - (within - covariance) / (covariance[:, :1] + values.mean(2).var(1)[:, None])
    rho[:, 0] = 1
    lags = 2 * max((n - 3) // 2, 0) + 2
    even, odd = rho[:, :lags:2], rho[:, 1:lags:2]
    pairs = even + odd
    # the sum ends before the first pair that is not positive, with the even lag of that pair
    ends = pairs <= 0
    ends[:, -1] = True
    end = ends.int().argmax(1, keepdim=True)
    monotone = pairs.cummin(1).values.where(torch.arange(pairs.shape[1]) < end, 0)
    last = even.where(pairs >= 0, even.clamp(min=0))
    time = -1 + 2 * monotone.sum(1) + last.gather(1, end)[:, 0]
    size = chains * n
    constant = (values == values[:, :1, :1]).flatten(1).all(1)
    return (size / time.clamp(min=1 / math.log10(size))).where(~constant, size)


def _tail_ess(values: Tensor) -> Tensor:
    ordered = _sorted(values.flatten(1))[1]
    low, high = (values <= _quantile(ordered, level)[..., None] for level in (0.05, 0.95))
    return torch.minimum(*(_plain_ess(_halves(below.double())) for below in (low, high)))


def _bulk_ess(values: Tensor) -> Tensor:
    halves = _halves(values)
    return _plain_ess(_normal_scores(*_sorted(halves.flatten(1))).view_as(halves))


_ESS: dict[str, Callable[[Tensor], Tensor]] = {
    "bulk": _bulk_ess,
    "tail": _tail_ess,
    "mean": lambda values: _plain_ess(_halves(values)),
    "sd": lambda values: _plain_ess(_halves((values - values.mean((1, 2), True)).square())),
}
