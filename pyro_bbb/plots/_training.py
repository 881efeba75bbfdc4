# SPDX-License-Identifier: Apache-2.0
"""Plots of training, and images."""

import math
from typing import Any

from matplotlib.axes import Axes
from torch import Tensor

from pyro_bbb._utils.colors import BLACK, PURPLE, SKY, VERMILLION
from pyro_bbb._utils.validation import kind, tensor
from pyro_bbb.plots._axes import as_numpy
from pyro_bbb.training.history import History, Record


def loss_parts(ax: Axes, history: Record, *, unit: str = "epoch") -> Axes:
    r"""Draw the two parts of the loss, $\pi\,KL$ and $-\log p(D|w)$, and their sum, in nats.

    A `History` of `fit` adds its baseline, the loss of a posterior that ignores the data, and the
    validation loss, times the number of training examples; a point marks its best epoch.

    Args:
        ax: where to draw; logarithmic where every value is positive.
        history: what `pyro_bbb.fit` returned, or its ``steps`` record.
        unit: what one entry of the record is, for the horizontal axis.
    """
    if not kind("history", history, Record).loss:
        raise ValueError("history must hold at least one entry, got none")
    complexity = [weight * kl for weight, kl in zip(history.kl_weight, history.kl, strict=True)]
    when = range(1, len(history.loss) + 1)
    ax.plot(when, complexity, color=SKY, linewidth=3.0, label="complexity cost")
    ax.plot(when, history.nll, color=VERMILLION, linewidth=2.0, label="data cost")
    ax.plot(when, history.loss, color=BLACK, linewidth=1.0, linestyle="--", label="loss, the sum")
    if isinstance(history, History) and history.baseline_per_example is not None:
        baseline = history.baseline_per_example * history.num_data
        ax.axhline(baseline, color=PURPLE, linewidth=1.5, linestyle=":", label="data ignored")
    if isinstance(history, History) and history.validation_loss:
        validation = [history.num_data * nats for nats in history.validation_loss]
        best = [] if history.best_epoch is None else [history.best_epoch]
        options: dict[str, Any] = {"marker": "o", "markevery": best, "label": "validation, scaled"}
        ax.plot(range(1, len(validation) + 1), validation, color=PURPLE, linewidth=1.5, **options)
    if min(*history.loss, *complexity, *history.nll) > 0:
        ax.set_yscale("log")
    ax.set(xlabel=unit, ylabel="nats")
    ax.legend(frameon=True, framealpha=0.8, edgecolor="none")  # the curves of steps are everywhere
    return ax


def image(ax: Axes, x: Tensor) -> Axes:
    """Draw a grey image, dark ink on white paper, without ticks.

    Args:
        ax: where to draw.
        x: ``[height, width]``, ``[1, height, width]`` or flat ``[side * side]``.

    Raises:
        ValueError: ``x`` has another shape.
    """
    x = tensor("x", x)
    side = math.isqrt(x.numel())
    if x.ndim == 1 and side * side == x.numel():
        x = x.reshape(side, side)
    elif x.ndim == 3 and x.shape[0] == 1:
        x = x[0]
    if x.ndim != 2 or x.numel() == 0:
        raise ValueError(
            "expected x of shape [height, width], [1, height, width] or [side * side], "
            f"got {list(x.shape)}"
        )
    ax.imshow(as_numpy(x), cmap="gray_r", interpolation="nearest")
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set(visible=True, color="0.7")
    return ax
