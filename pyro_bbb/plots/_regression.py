# SPDX-License-Identifier: Apache-2.0
"""Plots of a regression: bands around a curve, sampled functions, coverage of intervals."""

import numpy as np
from matplotlib.axes import Axes
from torch import Tensor

from pyro_bbb._utils.colors import BLACK, BLUE, SKY, VERMILLION
from pyro_bbb._utils.validation import kind, of_length, probability, tensor
from pyro_bbb.plots._axes import Array, as_numpy, flat, percent
from pyro_bbb.prediction import RegressionPrediction


def regression_band(
    ax: Axes,
    x: Tensor,
    prediction: RegressionPrediction,
    *,
    data: tuple[Tensor, Tensor] | None = None,
    truth: Tensor | None = None,
) -> Axes:
    """Draw the predictive mean with two bands of 2 sd: the epistemic one inside the total one.

    Args:
        ax: where to draw.
        x: increasing inputs, ``[n]`` or ``[n, 1]``.
        prediction: prediction at ``x``, of one output.
        data: training inputs and targets, drawn as points.
        truth: noise-free targets at ``x``, drawn as a dashed line.
    """
    rows = len(kind("prediction", prediction, RegressionPrediction).mean)
    at, mean = flat(of_length("x", x, rows)), flat(prediction.mean)
    bands = ((prediction.std, SKY, "total"), (prediction.epistemic_std, BLUE, "epistemic"))
    for std, colour, name in bands:
        low, high = mean - 2 * flat(std), mean + 2 * flat(std)
        ax.fill_between(at, low, high, color=colour, alpha=0.45, lw=0, label=f"{name} ± 2 sd")
    ax.plot(at, mean, color=BLUE, linewidth=2.0, label="mean")
    if truth is not None:
        curve = flat(of_length("truth", truth, rows))
        ax.plot(at, curve, color=BLACK, linestyle="--", linewidth=1.2, label="truth")
    if data is not None:
        ax.plot(flat(data[0]), flat(data[1]), "o", color=VERMILLION, markersize=3.5, label="data")
    ax.margins(x=0)
    ax.set(xlabel="x", ylabel="y")
    return ax


def function_band(
    ax: Axes,
    x: Tensor,
    functions: Tensor,
    *,
    reference: Tensor | None = None,
    data: tuple[Tensor, Tensor] | None = None,
    level: float = 0.9,
) -> Axes:
    """Draw sampled functions: their median and a central interval. The legend is the caller's.

    Args:
        ax: where to draw.
        x: increasing inputs, ``[n]`` or ``[n, 1]``.
        functions: values of S sampled functions there, ``[S, n]`` or ``[S, n, 1]``.
        reference: functions of another posterior; its band and median are outlined.
        data: training inputs and targets, drawn as points.
        level: fraction of the functions inside the band, at each input.

    Raises:
        ValueError: ``level`` is outside (0, 1), or shapes do not fit.
    """
    level = probability("level", level)
    functions = tensor("functions", functions)
    if functions.dim() < 2 or functions.numel() == 0:
        raise ValueError(f"functions must have shape [S, n], got {list(functions.shape)}")
    at = flat(of_length("x", x, functions[0].numel()))
    low, middle, high = _quantiles(functions, level)
    ax.fill_between(at, low, high, color=SKY, alpha=0.5, linewidth=0, label=f"{level:.0%} band")
    ax.plot(at, middle, color=BLUE, linewidth=1.8, label="median")
    if reference is not None:
        low, middle, high = _quantiles(reference, level)
        ax.plot(at, low, color=BLACK, linewidth=1.0, label=f"reference, {level:.0%}")
        ax.plot(at, high, color=BLACK, linewidth=1.0)
        ax.plot(at, middle, color=BLACK, linewidth=1.0, linestyle=":", label="reference, median")
    if data is not None:
        ax.plot(flat(data[0]), flat(data[1]), "o", color=VERMILLION, markersize=2.5, label="data")
    ax.margins(x=0)
    return ax


def coverage(ax: Axes, pit: Tensor) -> Axes:
    """Draw the fraction of targets inside the central predictive intervals of each level.

    On the dotted diagonal the intervals are calibrated, below it too narrow.

    Args:
        ax: where to draw.
        pit: the predictive's distribution function at the targets, ``prediction.cdf(y)``, of any
            shape, each in [0, 1].

    Raises:
        ValueError: ``pit`` is empty, or a value outside [0, 1].
    """
    values = flat(tensor("pit", pit))
    if not len(values) or not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"pit must hold numbers in [0, 1], got others in shape {list(pit.shape)}")
    depth = np.sort(np.abs(2 * values - 1))  # the level at which an interval reaches the target
    ax.plot([0, 1], [0, 1], ":", color=BLACK, linewidth=1.0)
    ax.step(depth, np.arange(1, len(depth) + 1) / len(depth), where="post", color=BLUE)
    percent(ax.xaxis, ax.yaxis)
    ax.set(xlabel="level of the interval", ylabel="coverage", xlim=(0.0, 1.0), ylim=(0.0, 1.0))
    return ax


def _quantiles(functions: Tensor, level: float) -> Array:
    """Return lower end, median and upper end at each input, ``[3, n]``."""
    values = as_numpy(functions).reshape(len(functions), -1)
    quantiles: Array = np.quantile(values, [0.5 - level / 2, 0.5, 0.5 + level / 2], axis=0)
    return quantiles
