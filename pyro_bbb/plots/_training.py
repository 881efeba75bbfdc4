# SPDX-License-Identifier: Apache-2.0
"""Plots of training, images and the style of all."""

import math
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.rcsetup import cycler
from torch import Tensor

from pyro_bbb._utils.colors import BLACK, CYCLE, PURPLE, SKY, VERMILLION
from pyro_bbb._utils.validation import kind, tensor
from pyro_bbb.plots._arrays import as_numpy
from pyro_bbb.training.history import History, Record


def style() -> AbstractContextManager[None]:
    """Matplotlib settings for reports: call as ``with plots.style(): ...``; undone on leaving."""
    return matplotlib.rc_context(
        {
            "axes.prop_cycle": cycler(color=CYCLE),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlelocation": "left",
            "axes.titlesize": "medium",
            "axes.titleweight": "bold",
            "axes.axisbelow": True,
            "figure.constrained_layout.use": True,
            "figure.dpi": 100,
            "figure.figsize": (4.8, 3.2),
            "font.size": 10,
            "legend.frameon": False,
            "legend.fontsize": "small",
            "savefig.dpi": 200,
        }
    )


def axes(ax: Axes | None = None) -> Axes:
    """The given Axes, or those of a new figure in this module's style.

    Raises:
        TypeError: ``ax`` is neither Axes nor None.
    """
    if ax is not None:
        return kind("ax", ax, Axes)
    with style():
        return plt.subplots()[1]


def loss_parts(ax: Axes, history: Record, *, unit: str = "epoch") -> Axes:
    r"""The two parts of the loss, $\pi\,KL$ (complexity) and $-\log p(D|w)$ (data), and their sum.

    A `History` of `fit` adds its baseline, the loss of a posterior that ignores the data, and the
    validation loss, times the number of training examples; a point marks its best epoch.

    Args:
        ax: where to draw.
        history: what `pyro_bbb.fit` returned, or its ``steps`` record. Values in nats.
        unit: what one entry of the record is, for the horizontal axis.

    Returns:
        ``ax``, logarithmic where every value is positive.
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
    """A grey picture, dark ink on white paper, without ticks.

    Args:
        ax: where to draw.
        x: ``[height, width]``, ``[1, height, width]`` or flat ``[side * side]``.

    Returns:
        ``ax``.

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
