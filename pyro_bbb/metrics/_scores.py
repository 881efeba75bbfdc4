# SPDX-License-Identifier: Apache-2.0
r"""Scores of a prediction: accuracy, recall, NLL, Brier, ECE, AUROC, refusal, RMSE, coverage.

Every function takes tensors on any device, of any floating precision, or numpy arrays, and computes
on the CPU in float64. Scalars are returned as Python floats, curves as float64 CPU tensors.
Nothing is broadcast, and likelihoods are not smoothed. All raise a TypeError for an argument that
is not a tensor of the right dtype, and a ValueError where shapes differ or data are empty, NaN or
out of range; for class probabilities also where a row is negative or does not sum to 1.

torchmetrics is an oracle of the tests only: its import takes half a second and brings matplotlib,
its AUROC ties large scores by a sigmoid, its accuracy rounds to float32, and its ECE puts
confidence 1 into a separate bin.
"""

import numpy as np
import torch
from torch import Tensor

from pyro_bbb._utils.validation import as_number, holds_labels, of_array

_ROW_SUM_TOLERANCE = 1e-3  # of a row of probabilities, or what its dtype resolves if that is more


def accuracy(probs: Tensor, y: Tensor) -> float:
    """Return the share of examples whose most probable class is the label.

    Args:
        probs: class probabilities, ``[n, classes]``, rows summing to 1.
        y: integer labels, ``[n]``, in ``0 .. classes - 1``.

    Returns:
        The share, in [0, 1]. Of equally probable classes the first one counts as predicted.

    """
    probs, y = _classification(probs, y)
    return float((probs.argmax(-1) == y).double().mean())


def recall(probs: Tensor, y: Tensor) -> Tensor:
    """Return the fraction of each class's examples that are predicted as it.

    Args:
        probs: class probabilities, ``[n, classes]``, rows summing to 1.
        y: integer labels, ``[n]``, in ``0 .. classes - 1``.

    Returns:
        Recall by class, float64 ``[classes]``; NaN for a class without examples.

    """
    probs, y = _classification(probs, y)
    hits = y[probs.argmax(-1) == y]
    right, total = (torch.bincount(labels, minlength=probs.shape[1]) for labels in (hits, y))
    return right.double() / total


def nll(probs: Tensor, y: Tensor) -> float:
    r"""Return $-\tfrac1n\sum_i \log p_{i,y_i}$, the mean negative log-likelihood in nats.

    Args:
        probs: class probabilities, ``[n, classes]``, rows summing to 1.
        y: integer labels, ``[n]``, in ``0 .. classes - 1``.

    Returns:
        The mean in nats; ``inf`` where a label was given probability 0.

    """
    probs, y = _classification(probs, y)
    return float(-probs.gather(1, y[:, None]).log().mean())


def brier(probs: Tensor, y: Tensor) -> float:
    r"""Return the Brier score $\tfrac1n\sum_i \sum_c (p_{ic} - [y_i = c])^2$, in [0, 2].

    This is Brier's (1950) definition, summed over the classes: for two classes it is twice the
    score that looks at the positive class only.

    Args:
        probs: class probabilities, ``[n, classes]``, rows summing to 1.
        y: integer labels, ``[n]``, in ``0 .. classes - 1``.

    Returns:
        The mean over examples of the squared distance between probabilities and one-hot label.

    """
    probs, y = _classification(probs, y)
    one_hot = torch.nn.functional.one_hot(y, probs.shape[1])
    return float((probs - one_hot).square().sum(-1).mean())


def ece(probs: Tensor, y: Tensor, bins: int = 15) -> float:
    r"""Return the expected calibration error, $\sum_b \tfrac{n_b}{n}|acc_b - conf_b|$.

    Confidence is the top label's. Bins are equally wide and closed on the left; the last one
    includes confidence 1. Source: Guo et al. 2017, "On Calibration of Modern Neural Networks".

    Args:
        probs: class probabilities, ``[n, classes]``, rows summing to 1.
        y: integer labels, ``[n]``, in ``0 .. classes - 1``.
        bins: number of bins over [0, 1], at least 1.

    Returns:
        The error, in [0, 1].

    """
    probs, y = _classification(probs, y)
    bins = as_number(bins)
    if isinstance(bins, bool) or not isinstance(bins, int):
        raise TypeError(f"bins must be an int, got {type(bins).__name__}")
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    confidence, label = probs.clamp(max=1.0).max(-1)  # 1 + rounding is a probability, too
    bounds = torch.linspace(0, 1, bins + 1, dtype=confidence.dtype)[1:-1]
    number = torch.bucketize(confidence, bounds, right=True)
    gap = confidence.new_zeros(bins).index_add_(0, number, (label == y).to(confidence) - confidence)
    return float(gap.abs().sum() / len(y))


def auroc(positive_scores: Tensor, negative_scores: Tensor) -> float:
    r"""Return the area under the ROC curve, $P(s^+ > s^-) + \tfrac12 P(s^+ = s^-)$ (Mann-Whitney).

    For out-of-distribution detection: the predictive entropy of out-of-distribution inputs as
    ``positive_scores``, that of inputs in distribution as ``negative_scores``.

    Args:
        positive_scores: scores of the positive examples, ``[n]``; higher means more positive.
        negative_scores: scores of the negative examples, ``[m]``.

    Returns:
        The area, in [0, 1], exact with ties; infinite scores are ordered like any others.

    """
    positive = _vector("positive_scores", positive_scores)
    negative = _vector("negative_scores", negative_scores)
    ordered = negative.sort().values
    below = torch.searchsorted(ordered, positive, right=False)  # negatives < s, per positive
    not_above = torch.searchsorted(ordered, positive, right=True)  # negatives <= s
    return float((below + not_above).sum()) / (2 * len(positive) * len(negative))


def macro_auroc(probs: Tensor, y: Tensor) -> float:
    """Return the mean over the classes of the AUROC of one class against the others.

    For two classes that is the AUROC of either.

    Args:
        probs: class probabilities, ``[n, classes]``, rows summing to 1.
        y: integer labels, ``[n]``; classes without examples do not count.

    Returns:
        The mean area, in [0, 1].

    Raises:
        ValueError: the labels are of one class only.
    """
    probs, y = _classification(probs, y)
    classes = y.unique().tolist()
    if len(classes) == 1:
        raise ValueError(f"y must hold two classes or more, got only {classes[0]}")
    areas = [auroc(probs[y == c, c], probs[y != c, c]) for c in classes]
    return sum(areas) / len(areas)


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
    _same_shape("loss", loss, "confidence", confidence)
    loss = _vector("loss", loss)
    _, group, size = confidence.neg().unique(return_inverse=True, return_counts=True)
    mean_loss = loss.new_zeros(len(size)).index_add(0, group, loss) / size  # [groups]
    answered = torch.arange(1, len(loss) + 1, dtype=torch.float64)
    risk = mean_loss.repeat_interleave(size).cumsum(0) / answered
    return answered / len(loss), risk


def area_under_risk_coverage(confidence: Tensor, correct: Tensor) -> float:
    """Return the mean risk over the coverages 1/n, ..., 1 (AURC; Geifman et al. 2019).

    Args:
        confidence: any score that is higher where the model is surer, ``[n]``.
        correct: whether each example was classified correctly, bool, ``[n]``.

    Returns:
        The area, in [0, 1]; the error rate itself if confidence carries no information.

    """
    _, risk = risk_coverage(confidence, correct)
    return float(risk.mean())


def refusal_p_value(loss: Tensor, refused: Tensor) -> float:
    """Return the probability that as many examples, refused at random, have as large a mean loss.

    A permutation test with 999 random subsets, of a fixed seed. Where refusal is unrelated to the
    loss, the value is at most 0.05 in at most one of 20 cases.

    Args:
        loss: the loss of each example, ``[n]``: 0 or 1 for right or wrong, or the squared error.
        refused: whether each example is refused, bool, ``[n]``.

    Returns:
        The p-value, from 0.001 to 1; 1 where all or none are refused.

    """
    loss = _vector("loss", _finite("loss", loss))
    chosen, losses = _flags("refused", refused, "loss", loss).numpy(), loss.numpy()
    generator, number = np.random.default_rng(0), int(chosen.sum())
    subsets = (generator.choice(len(losses), number, replace=False) for _ in range(999))
    # equal sums round differently in another order
    least = losses[chosen].sum() - 1e-12 * np.abs(losses).sum()
    return (1 + sum(bool(losses[subset].sum() >= least) for subset in subsets)) / 1000


def rmse(mean: Tensor, y: Tensor) -> float:
    """Return the root mean squared error over all elements, in units of the target.

    Args:
        mean: predicted means, ``[n]`` or ``[n, d]``.
        y: targets, of exactly the same shape.

    Returns:
        The error.

    """
    _same_shape("mean", mean, "y", y)
    mean, y = _finite("mean", mean), _finite("y", y)
    return float((mean - y).square().mean().sqrt())


def coverage(lower: Tensor, upper: Tensor, y: Tensor) -> float:
    """Return the share of targets inside their interval, ends included.

    Args:
        lower: lower ends, ``[n]`` or ``[n, d]``, in units of the target; may be infinite.
        upper: upper ends, same shape.
        y: targets, same shape.

    Returns:
        The share, in [0, 1]; for honest intervals close to their level.

    Raises:
        ValueError: an upper end is below its lower end.
    """
    _same_shape("lower", lower, "y", y)
    _same_shape("upper", upper, "y", y)
    lower, upper, y = _numbers("lower", lower), _numbers("upper", upper), _finite("y", y)
    if (lower > upper).any():
        i = int((lower > upper).flatten().nonzero()[0])
        ends = f"[{lower.flatten()[i]:g}, {upper.flatten()[i]:g}]"
        raise ValueError(f"upper must not be below lower, got the interval {ends} at element {i}")
    return float(((lower <= y) & (y <= upper)).double().mean())


def _classification(probs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return checked probabilities ``[n, classes]`` and labels ``[n]`` as float64 and int64.

    Labels of several parts, ``[n, T]`` with probabilities ``[n, T, classes]``, count as examples.
    """
    probs, y = of_array(probs), of_array(y)
    if isinstance(probs, Tensor) and not probs.is_floating_point():
        raise TypeError(f"probs must be a floating tensor, got dtype {probs.dtype}")
    given, probs = probs, _numbers("probs", probs)
    if probs.ndim < 2:
        raise ValueError(f"expected probs of shape [n, classes], got {list(probs.shape)}")
    *shape, classes = probs.shape
    if not isinstance(y, Tensor) or not holds_labels(y, classes):
        allowed = "integer labels (or 0 and 1 in two classes)"
        raise TypeError(f"y must be a tensor of {allowed}, got {_describe(y)}")
    if list(y.shape) != shape and (classes != 2 or list(y.shape) != [*shape, 1]):
        raise ValueError(f"expected y of shape {shape} to match probs, got {list(y.shape)}")
    probs, y = probs.flatten(0, -2), y.flatten()
    _check_simplex(probs, max(_ROW_SUM_TOLERANCE, torch.finfo(given.dtype).eps))
    y = y.detach().cpu().long()
    if y.min() < 0 or y.max() >= classes:
        bounds = f"{int(y.min())} .. {int(y.max())}"
        raise ValueError(f"y must hold labels in 0 .. {classes - 1}, got labels in {bounds}")
    return probs, y


def _check_simplex(probs: Tensor, tolerance: float) -> None:
    off = (probs.sum(-1) - 1).abs() > tolerance
    bad = off | (probs < 0).any(-1)
    if bad.any():
        i = int(bad.nonzero()[0])
        row = f"row {i} has minimum {probs[i].min():g} and sum {probs[i].sum():g}"
        raise ValueError(f"probs must be non-negative with rows summing to 1, but {row}")


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
    for label, tensor in ((name, value), (other_name, other)):
        if not isinstance(of_array(tensor), Tensor):
            raise TypeError(f"{label} must be a tensor, got {_describe(tensor)}")
    if value.shape != other.shape:
        shapes = f"{list(value.shape)} and {list(other.shape)}"
        raise ValueError(f"{name} and {other_name} must have the same shape, got {shapes}")


def _describe(value: object) -> str:
    return f"dtype {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
