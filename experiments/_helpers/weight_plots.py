"""Pictures of a posterior's weights."""

import matplotlib.pyplot as plt

import pyro_bbb as bbb
from _helpers.run import Picture, Run
from pyro_bbb import plots


def draw_weights(run: Run, guide: bbb.AutoSoftplusNormal) -> list[Picture]:
    """Means and standard deviations of the weights by layer."""
    with plots.style():
        means, ax = plt.subplots()
        plots.weight_locs(ax, guide).set_title("Posterior means by layer")
        scales, ax = plt.subplots()
        plots.weight_scales(ax, guide).set_title("Posterior standard deviations by layer")
    return [
        run.picture(means, "weight_locs", "Where the posterior puts each weight."),
        run.picture(scales, "weight_scales", "How sure it is of each weight."),
    ]
