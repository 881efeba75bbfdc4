# SPDX-License-Identifier: Apache-2.0
r"""Scores of predictions, and diagnostics of the draws behind them.

Every score takes tensors on any device, of any floating precision, or numpy arrays, and computes
on the CPU in float64. ``probs`` are class probabilities ``[n, classes]``, whose rows sum to 1, and
``y`` integer labels ``[n]`` in ``0 .. classes - 1``. Scalars are returned as Python floats, curves
as float64 CPU tensors. Nothing is broadcast, and likelihoods are not smoothed. All raise a
TypeError for an argument that is not a tensor of the right dtype, and a ValueError where shapes
differ or data are empty, NaN or out of range; for class probabilities also where a row is negative
or does not sum to 1.

Convergence of Markov chains: with $M$ half chains of $n$ draws, the mean $W$ of their variances and
the variance $B/n$ of their means,
$$\hat R = \sqrt{\frac{n-1}{n} + \frac{B}{nW}}, \qquad
  \mathrm{ESS} = \frac{Mn}{-1 + 2\sum_t \hat\rho_t}, \qquad
  \hat\rho_t = 1 - \frac{W - \tfrac1M\sum_m \hat\gamma_{m,t}}{\tfrac{n-1}{n}W + B/n},$$
where $\hat\gamma_{m,t}$ is a chain's autocovariance and the sum ends by Geyer's rule. Draws are
replaced by Normal scores of their ranks. Source: Vehtari, Gelman, Simpson, Carpenter, Bürkner 2021,
"Rank-Normalization, Folding, and Localization: An Improved R-hat".
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from pyro_bbb._utils.validation import count, holds_labels, of_array, one_of

_ROW_SUM_TOLERANCE = 1e-3  # of a row of probabilities, or what its dtype resolves if that is more
_BLOCK = 2**21  # draws diagnosed at once, which bounds the memory


# --- classes ---


def accuracy(probs: Tensor, y: Tensor) -> float:
    """Return the share of examples whose most probable class, the first if tied, is the label."""
    probs, y = _classification(probs, y)
    return float((probs.argmax(-1) == y).double().mean())


def recall(probs: Tensor, y: Tensor) -> Tensor:
    """Return the share of each class's examples predicted as it, ``[classes]``; NaN without any."""
    probs, y = _classification(probs, y)
    hits = y[probs.argmax(-1) == y]
    right, total = (torch.bincount(labels, minlength=probs.shape[1]) for labels in (hits, y))
    return right.double() / total


def nll(probs: Tensor, y: Tensor) -> float:
    r"""Return the negative log-likelihood in nats, $-\tfrac1n\sum_i \log p_{i,y_i}$; maybe inf."""
    probs, y = _classification(probs, y)
    return float(-probs.gather(1, y[:, None]).log().mean())


def brier(probs: Tensor, y: Tensor) -> float:
    r"""Return the Brier score $\tfrac1n\sum_i \sum_c (p_{ic} - [y_i = c])^2$, in [0, 2].

    This is Brier's (1950) definition, summed over the classes: for two classes it is twice the
    score that looks at the positive class only.
    """
    probs, y = _classification(probs, y)
    one_hot = torch.nn.functional.one_hot(y, probs.shape[1])
    return float((probs - one_hot).square().sum(-1).mean())


def ece(probs: Tensor, y: Tensor, bins: int = 15) -> float:
    r"""Return the expected calibration error, $\sum_b \tfrac{n_b}{n}|acc_b - conf_b|$, in [0, 1].

    Confidence is the top label's. The ``bins`` over [0, 1] are equally wide and closed on the left;
    the last one includes confidence 1. Source: Guo et al. 2017, "On Calibration of Modern Neural
    Networks".
    """
    probs, y = _classification(probs, y)
    bins = count("bins", bins)
    confidence, label = probs.clamp(max=1.0).max(-1)  # 1 + rounding is a probability, too
    bounds = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype)[1:-1]
    number = torch.bucketize(confidence, bounds, right=True)
    gap = confidence.new_zeros(bins).index_add_(0, number, (label == y).to(confidence) - confidence)
    return float(gap.abs().sum() / len(y))


def auroc(positive_scores: Tensor, negative_scores: Tensor) -> float:
    r"""Return the area under the ROC curve, $P(s^+ > s^-) + \tfrac12 P(s^+ = s^-)$ (Mann-Whitney).

    For out-of-distribution detection: the predictive entropy of out-of-distribution inputs as
    ``positive_scores``, that of inputs in distribution as ``negative_scores``. Exact with ties;
    infinite scores are ordered like any others.

    Args:
        positive_scores: scores of the positive examples, ``[n]``; higher means more positive.
        negative_scores: scores of the negative examples, ``[m]``.
    """
    positive = _vector("positive_scores", positive_scores)
    negative = _vector("negative_scores", negative_scores)
    ordered = negative.sort().values
    below = torch.searchsorted(ordered, positive, right=False)  # negatives < s, per positive
    not_above = torch.searchsorted(ordered, positive, right=True)  # negatives <= s
    return float((below + not_above).sum()) / (2 * len(positive) * len(negative))


def macro_auroc(probs: Tensor, y: Tensor) -> float:
    """Return the mean over the classes with examples of the AUROC of one against the others.

    For two classes that is the AUROC of either.

    Raises:
        ValueError: the labels are of one class only.
    """
    probs, y = _classification(probs, y)
    classes = y.unique().tolist()
    if len(classes) == 1:
        raise ValueError(f"y must hold two classes or more, got only {classes[0]}")
    areas = [auroc(probs[y == c, c], probs[y != c, c]) for c in classes]
    return sum(areas) / len(areas)


# --- refusal ---


def risk_coverage(
    confidence: Tensor, correct: Tensor | None = None, *, loss: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return the error rate among the most confident examples, by the share answered.

    Within a group of equal confidence the order is arbitrary, so its errors are spread evenly: the
    curve is the expectation over random orders and does not depend on the order of the examples.

    Args:
        confidence: any score that is higher where the model is surer, ``[n]``.
        correct: whether each example was classified correctly, bool, ``[n]``.
        loss: instead of ``correct``, the loss of each example, ``[n]``, such as the squared error.

    Returns:
        ``coverage`` and ``risk``, each ``[n]``, from the most confident example alone
        (coverage 1/n) to all examples (coverage 1, risk = 1 - accuracy, or the mean loss).

    Raises:
        TypeError: both or neither of ``correct`` and ``loss`` are passed.
    """
    confidence = _vector("confidence", confidence)
    if (correct is None) == (loss is None):
        raise TypeError("either correct or loss must be passed, not both")
    if loss is None:
        loss = 1.0 - _flags("correct", correct, "confidence", confidence).double()
    loss = _vector("loss", loss)
    _same_shape("loss", loss, "confidence", confidence)
    _, group, size = confidence.neg().unique(return_inverse=True, return_counts=True)
    mean_loss = loss.new_zeros(len(size)).index_add(0, group, loss) / size  # [groups]
    answered = torch.arange(1, len(loss) + 1, dtype=torch.float64)
    risk = mean_loss.repeat_interleave(size).cumsum(0) / answered
    return answered / len(loss), risk


def area_under_risk_coverage(confidence: Tensor, correct: Tensor) -> float:
    """Return the mean risk over the coverages 1/n, ..., 1 (AURC; Geifman et al. 2019).

    The arguments are those of `risk_coverage`. Confidence without information has the error rate.
    """
    return float(risk_coverage(confidence, correct)[1].mean())


def refusal_p_value(loss: Tensor, refused: Tensor) -> float:
    """Return the probability that as many examples, refused at random, have as large a mean loss.

    A permutation test with 999 random subsets, of a fixed seed. Where refusal is unrelated to the
    loss, the value is at most 0.05 in at most one of 20 cases. It is 1 where all or none are
    refused.

    Args:
        loss: the loss of each example, ``[n]``: 0 or 1 for right or wrong, or the squared error.
        refused: whether each example is refused, bool, ``[n]``.
    """
    loss = _vector("loss", _finite("loss", loss))
    chosen, losses = _flags("refused", refused, "loss", loss).numpy(), loss.numpy()
    generator, number = np.random.default_rng(0), int(chosen.sum())
    subsets = (generator.choice(len(losses), number, replace=False) for _ in range(999))
    # equal sums round differently in another order
    least = losses[chosen].sum() - 1e-12 * np.abs(losses).sum()
    return (1 + sum(bool(losses[subset].sum() >= least) for subset in subsets)) / 1000


# --- real targets ---


def rmse(mean: Tensor, y: Tensor) -> float:
    """Return the root mean squared error over all elements ``[n]`` or ``[n, d]``."""
    mean, y = _finite("mean", mean), _finite("y", y)
    _same_shape("mean", mean, "y", y)
    return float((mean - y).square().mean().sqrt())


def coverage(lower: Tensor, upper: Tensor, y: Tensor) -> float:
    """Return the share of targets inside their interval, ends included.

    Args:
        lower: lower ends, ``[n]`` or ``[n, d]``, in units of the target; may be infinite.
        upper: upper ends, same shape.
        y: targets, same shape.

    Raises:
        ValueError: an upper end is below its lower end.
    """
    lower, upper, y = _numbers("lower", lower), _numbers("upper", upper), _finite("y", y)
    _same_shape("lower", lower, "y", y)
    _same_shape("upper", upper, "y", y)
    if (lower > upper).any():
        i = int((lower > upper).flatten().nonzero()[0])
        ends = f"[{lower.flatten()[i]:g}, {upper.flatten()[i]:g}]"
        raise ValueError(f"upper must not be below lower, got the interval {ends} at element {i}")
    return float(((lower <= y) & (y <= upper)).double().mean())


# --- chains and importance weights ---


def r_hat(values: Tensor) -> Tensor:
    r"""Return rank-normalised split $\hat R$, the larger one of location and (folded) of scale.

    Near 1 where the chains agree; above 1.01 they do not yet. The result is float64 ``[...]`` for
    draws ``[chains, draws, ...]``; NaN where all draws are equal, or one is not finite.

    Raises:
        ValueError: there is only one chain, or fewer than four draws.
    """
    if (draws := _draws(values)).shape[0] < 2:
        raise ValueError("values must be of 2 chains, got 1; run with num_chains of at least 2")
    return _by_function(_r_hat, draws)


def ess(values: Tensor, kind: str = "bulk") -> Tensor:
    """Return the effective number of independent draws in all chains together.

    The result is float64 ``[...]``; NaN where a draw is not finite.

    Args:
        values: draws of one or several chains, ``[chains, draws, ...]``.
        kind: ``"bulk"`` for estimates of location, ``"tail"`` for the 5 % and 95 % quantiles,
            ``"mean"`` or ``"sd"`` for the standard error of these.

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


# --- checks ---


def _classification(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return checked probabilities ``[n, classes]`` and labels ``[n]`` as float64 and int64.

    Labels of several parts, ``[n, T]`` with probabilities ``[n, T, classes]``, count as examples.
    """
    probs, y = of_array(probs), of_array(y)
    if isinstance(probs, Tensor) and not probs.is_floating_point():
        raise TypeError(f"probs must be a floating tensor, got dtype {probs.dtype}")
    argument, probs = probs, _numbers("probs", probs)
    if probs.ndim < 2:
        raise ValueError(f"expected probs of shape [n, classes], got {list(probs.shape)}")
    *shape, classes = probs.shape
    if not isinstance(y, Tensor) or not holds_labels(y, classes):
        allowed = "integer labels (or 0 and 1 in two classes)"
        raise TypeError(f"y must be a tensor of {allowed}, got {_describe(y)}")
    if list(y.shape) != shape and (classes != 2 or list(y.shape) != [*shape, 1]):
        raise ValueError(f"expected y of shape {shape} to match probs, got {list(y.shape)}")
    probs, y = probs.flatten(0, -2), y.detach().cpu().flatten().long()
    tolerance = max(_ROW_SUM_TOLERANCE, torch.finfo(argument.dtype).eps)
    bad = ((probs.sum(-1) - 1).abs() > tolerance) | (probs < 0).any(-1)
    if bad.any():
        i = int(bad.nonzero()[0])
        row = f"row {i} has minimum {probs[i].min():g} and sum {probs[i].sum():g}"
        raise ValueError(f"probs must be non-negative with rows summing to 1, but {row}")
    if y.min() < 0 or y.max() >= classes:
        bounds = f"{int(y.min())} .. {int(y.max())}"
        raise ValueError(f"y must hold labels in 0 .. {classes - 1}, got labels in {bounds}")
    return probs, y


def _flags(name: str, value: Tensor | None, other_name: str, other: Tensor) -> Tensor:
    """Return a bool tensor on the CPU, if it is one of the other's shape."""
    value = of_array(value)
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        raise TypeError(f"{name} must be a bool tensor, got {_describe(value)}")
    _same_shape(name, value, other_name, other)
    return value.cpu()


def _vector(name: str, value: Tensor) -> Tensor:
    values = _numbers(name, value)
    if values.ndim != 1:
        raise ValueError(f"expected {name} of shape [n], got {list(values.shape)}")
    return values


def _finite(name: str, value: Tensor) -> Tensor:
    values = _numbers(name, value)
    if values.isinf().any():
        raise ValueError(f"{name} must be finite, got an infinity")
    return values


def _numbers(name: str, value: Tensor) -> Tensor:
    """Return checked real numbers, none NaN, on the CPU as float64."""
    value = of_array(value)
    if not isinstance(value, Tensor) or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of real numbers, got {_describe(value)}")
    if value.numel() == 0:
        raise ValueError(f"{name} must not be empty, got shape {list(value.shape)}")
    values = value.detach().cpu().double()
    if values.isnan().any():
        i = int(values.flatten().isnan().nonzero()[0])
        raise ValueError(f"{name} must not have NaN, got one at element {i}")
    return values


def _same_shape(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.shape != other.shape:
        shapes = f"{list(value.shape)} and {list(other.shape)}"
        raise ValueError(f"{name} and {other_name} must have the same shape, got {shapes}")


def _describe(value: object) -> str:
    return f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


# --- diagnostics of draws ``[functions, chains, draws]`` ---


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
    median = torch.from_numpy(np.median(halves.flatten(1).numpy(), axis=1))
    folded = (halves - median[:, None, None]).abs()
    location, scale = (_plain_r_hat(_normal_scores(x)) for x in (halves, folded))
    return torch.maximum(location, scale)


def _plain_r_hat(values: Tensor) -> Tensor:
    n = values.shape[2]
    return ((n * values.mean(2).var(1) / values.var(2).mean(1) + n - 1) / n).sqrt()


def _halves(values: Tensor) -> Tensor:  # [functions, 2 * chains, draws // 2]
    half = values.shape[2] // 2
    return torch.cat([values[..., :half], values[..., -half:]], 1)


def _normal_scores(values: Tensor) -> Tensor:
    """Return Blom's Normal scores of the ranks of a function's draws; ties share their mean."""
    from scipy.stats import rankdata  # slow to import

    ranks = torch.from_numpy(rankdata(values.flatten(1).numpy(), axis=1)).view_as(values)
    return torch.special.ndtri((ranks - 3 / 8) / (values[0].numel() + 1 / 4))


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
    ends = np.quantile(values.flatten(1).numpy(), (0.05, 0.95), axis=1)  # torch's refuses many
    below = (values <= torch.from_numpy(end)[:, None, None] for end in ends)
    return torch.minimum(*(_plain_ess(_halves(x.double())) for x in below))


def _bulk_ess(values: Tensor) -> Tensor:
    return _plain_ess(_normal_scores(_halves(values)))


_ESS: dict[str, Callable[[Tensor], Tensor]] = {
    "bulk": _bulk_ess,
    "tail": _tail_ess,
    "mean": lambda values: _plain_ess(_halves(values)),
    "sd": lambda values: _plain_ess(_halves((values - values.mean((1, 2), True)).square())),
}
