# SPDX-License-Identifier: Apache-2.0
"""Style, axes and arrays that all plots share."""

from contextlib import AbstractContextManager

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.rcsetup import cycler
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from pyro_bbb._utils.colors import CYCLE
from pyro_bbb._utils.validation import kind, of_array

Array = npt.NDArray[np.float64]


def style() -> AbstractContextManager[None]:
    """Return matplotlib's settings for reports, undone on leaving: ``with plots.style(): ...``."""
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
    """Return the given Axes, or those of a new figure in this package's style."""
    if ax is not None:
        return kind("ax", ax, Axes)
    with style():
        return plt.subplots()[1]


def percent(*axes: Axis) -> None:
    """Write the numbers of axes in per cent."""
    for axis in axes:
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def as_numpy(x: Tensor) -> Array:
    """Return a tensor's numbers in float64, from any device and dtype."""
    return np.asarray(of_array(x).detach().cpu().double())


def flat(x: Tensor) -> Array:
    """Return a tensor's numbers as a vector."""
    return as_numpy(x).reshape(-1)
