# SPDX-License-Identifier: Apache-2.0
"""Plots of training, posteriors and predictions, each drawn on an Axes that the caller owns.

Every function takes the Axes first, draws, labels the axes with their units and returns the Axes,
so that a finding can be put above it: ``plots.loss_parts(ax, history).set_title("...")``. Nothing
here opens a window or changes matplotlib's settings: `style` is a context for that, and `axes`
makes a new figure. Line styles and markers differ as well as colours, for grey print.

Imports the packages below, and matplotlib. A new plot goes into the module of what it shows.
"""

from pyro_bbb._utils.colors import BLACK as BLACK
from pyro_bbb._utils.colors import BLUE as BLUE
from pyro_bbb._utils.colors import CYCLE as CYCLE
from pyro_bbb._utils.colors import ORANGE as ORANGE
from pyro_bbb._utils.colors import SKY as SKY
from pyro_bbb._utils.colors import VERMILLION as VERMILLION
from pyro_bbb.plots._axes import axes, style
from pyro_bbb.plots._classification import (
    class_probabilities,
    entropy_histogram,
    reliability,
    risk_coverage,
    votes,
)
from pyro_bbb.plots._regression import coverage, function_band, regression_band
from pyro_bbb.plots._training import image, loss_parts
from pyro_bbb.plots._weights import (
    prior_density,
    pruning_curve,
    snr_density_and_cdf,
    weight_density,
    weight_locs,
    weight_scales,
)

__all__ = [
    "axes",
    "class_probabilities",
    "coverage",
    "entropy_histogram",
    "function_band",
    "image",
    "loss_parts",
    "prior_density",
    "pruning_curve",
    "regression_band",
    "reliability",
    "risk_coverage",
    "snr_density_and_cdf",
    "style",
    "votes",
    "weight_density",
    "weight_locs",
    "weight_scales",
]
