"""Bands of sampled functions, and how one posterior's band compares with another's."""

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from torch import Tensor

from pyro_bbb._checks import of_length, probability, tensor
from pyro_bbb._colours import BLACK, BLUE, SKY, VERMILLION

Array = npt.NDArray[np.float64]


def function_band(
    ax: Axes,
    x: Tensor,
    functions: Tensor,
    *,
    reference: Tensor | None = None,
    data: tuple[Tensor, Tensor] | None = None,
    level: float = 0.9,
) -> Axes:
    """Where sampled functions run: their median and the central interval that holds most of them.

    Args:
        ax: where to draw.
        x: increasing inputs, ``[n]`` or ``[n, 1]``.
        functions: values of S sampled functions there, ``[S, n]`` or ``[S, n, 1]``.
        reference: functions of another posterior; its band and median are outlined.
        data: training inputs and targets, drawn as points.
        level: share of the functions inside the band, at each input by itself.

    Returns:
        ``ax``. The legend is left to the caller, who may have many such pictures.

    Raises:
        ValueError: ``level`` is outside (0, 1), or shapes do not fit.
        TypeError: an argument is of another kind.
    """
    level = probability("level", level)
    if tensor("functions", functions).dim() < 2 or functions.numel() == 0:
        raise ValueError(f"functions must have shape [S, n], got {list(functions.shape)}")
    at = _numpy(of_length("x", x, functions[0].numel())).reshape(-1)
    low, middle, high = _quantiles(functions, level)
    ax.fill_between(at, low, high, color=SKY, alpha=0.5, linewidth=0, label=f"{level:.0%} band")
    ax.plot(at, middle, color=BLUE, linewidth=1.8, label="median")
    if reference is not None:
        low, middle, high = _quantiles(reference, level)
        ax.plot(at, low, color=BLACK, linewidth=1.0, label=f"reference, {level:.0%}")
        ax.plot(at, high, color=BLACK, linewidth=1.0)
        ax.plot(at, middle, color=BLACK, linewidth=1.0, linestyle=":", label="reference, median")
    if data is not None:
        inputs, targets = (_numpy(part).reshape(-1) for part in data)
        ax.plot(inputs, targets, "o", color=VERMILLION, markersize=2.5, label="data")
    ax.margins(x=0)
    return ax


def _quantiles(functions: Tensor, level: float) -> Array:
    """Lower end, median and upper end at each input, ``[3, n]``."""
    values = _numpy(functions).reshape(len(functions), -1)
    quantiles: Array = np.quantile(values, [0.5 - level / 2, 0.5, 0.5 + level / 2], axis=0)
    return quantiles


def _numpy(x: Tensor) -> Array:
    return np.asarray(x.detach().cpu().double())
