# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of `mnist_mlp`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator, PercentFormatter

import pyro_bbb as bbb
from _helpers import weight_plots
from _helpers.repeats import shown
from _helpers.run import Data, Picture, Run, Table
from _helpers.scores import score_cells
from pyro_bbb import metrics, plots

Scores: TypeAlias = dict[str, Any]
SOURCE = "MXNet tutorial"
PUBLISHED_EPOCHS = (0.9455, 0.9593, 0.9641, 0.9684, 0.9723, 0.9733, 0.9756, 0.9749, 0.9765, 0.9775)

PUBLISHED_PRUNING = {
    0.1: 0.9777,
    0.25: 0.9779,
    0.5: 0.9756,
    0.75: 0.9602,
    0.95: 0.7259,
    0.99: 0.3753,
    1.0: 0.098,
}

FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 1.0)
EXPORTED = (0.0, 0.75, 0.95, 0.98)
FIRST, CORNER = "network.fc1.weight", (0, 0)  # from a pixel that no digit reaches


@dataclass(frozen=True)
class Trained:
    """A network after its training, with the test accuracy after every epoch."""

    model: bbb.BayesianModel
    guide: bbb.AutoSoftplusNormal
    history: bbb.History
    curve: list[float]

    def accuracy(self, data: Data) -> float:
        """Compute the accuracy of the network of mean weights."""
        return accuracy(self.model, self.guide, data)

    def pruned(self, fraction: float) -> "Trained":
        """Prune the weights of lowest signal-to-noise ratio."""
        return replace(self, guide=bbb.prune(self.guide, fraction))


def accuracy(model: bbb.BayesianModel, guide: bbb.AutoSoftplusNormal, data: Data) -> float:
    """Accuracy of the network of mean weights."""
    return metrics.accuracy(bbb.predict_mean(model, guide, data[0]).probs, data[1])


def accuracy_table(record: Scores, names: list[str]) -> Table:
    """Test accuracy of the mean network after each epoch."""
    epochs = [int(epoch) for epoch in record["mean"][names[0]]["accuracy_by_epoch"]]
    rows = [
        (
            str(epoch),
            f"{100 * PUBLISHED_EPOCHS[epoch - 1]:.2f}" if epoch <= len(PUBLISHED_EPOCHS) else "",
            *(shown(record, name, "accuracy_by_epoch", str(epoch)) for name in names),
        )
        for epoch in epochs
        if epoch <= len(PUBLISHED_EPOCHS) or epoch % 10 == 0
    ]
    return Table(("test accuracy (%) after epoch", SOURCE, *names), rows)


def networks_table(record: Scores, names: list[str], samples: int) -> Table:
    """The mean network and the ensemble, in figures that know of probabilities."""
    rows = [
        (f"{name}: {label}", *score_cells(record, name, kind))
        for name in names
        for kind, label in (("mean_network", "mean network"), ("ensemble", f"{samples} networks"))
    ]
    return Table(("on the test images", "accuracy (%)", "NLL (nats)", "ECE (%)"), rows)


def pruning_table(record: Scores, names: list[str]) -> Table:
    """Tabulate the mean network's test accuracy by pruned fraction."""
    rows = [
        (
            f"{100 * fraction:.0f}",
            f"{100 * PUBLISHED_PRUNING[fraction]:.2f}" if fraction in PUBLISHED_PRUNING else "",
            *(shown(record, name, "pruning", str(fraction)) for name in names),
        )
        for fraction in FRACTIONS
    ]
    return Table(("weights removed (%)", f"{SOURCE}: accuracy (%)", *names), rows)


def export_table(record: Scores, name: str) -> Table:
    """Size and speed against the dense network."""
    rows = [
        (
            f"{100 * fraction:.0f}",
            shown(record, name, "pruning", str(fraction)),
            shown(record, name, "exported", str(fraction), "bytes", factor=1e-3, digits=0),
            shown(record, name, "exported", str(fraction), "size", digits=1),
            shown(record, name, "exported", str(fraction), "latency_one", factor=1),
            shown(record, name, "exported", str(fraction), "latency_thousand", factor=1),
        )
        for fraction in EXPORTED
    ]
    columns = (
        f"{name}: removed (%)",
        "accuracy (%)",
        "compressed file (kB)",
        "of the dense file (%)",
        "time for 1 image, dense = 1",
        "for 1,000 images, dense = 1",
    )
    return Table(columns, rows)


def draw_curves(run: Run, networks: Mapping[str, Trained]) -> Picture:
    """Plot test accuracy by epoch, and the published one."""
    with plots.style():
        figure, ax = plt.subplots()
        for (name, trained), marker in zip(networks.items(), "osD", strict=False):
            epochs = range(1, len(trained.curve) + 1)
            ax.plot(epochs, trained.curve, f"{marker}-", markersize=4, label=name)
        published = range(1, len(PUBLISHED_EPOCHS) + 1)
        ax.plot(published, PUBLISHED_EPOCHS, "k^--", markersize=4, linewidth=1.0, label=SOURCE)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
        ax.set(xlabel="epoch", ylabel="test accuracy, mean network")
        best = max(trained.curve[-1] for trained in networks.values())
        ax.set_title(f"{best:.2%} at the end")
        ax.legend(loc="lower right")
    caption = "Test accuracy of the network of mean weights after every epoch."
    return run.picture(figure, "accuracy", caption)


def draw_weights(run: Run, name: str, trained: Trained) -> Picture:
    """The posterior of one weight that data cannot reach and of one that they determine."""
    ratio = bbb.signal_to_noise(trained.guide)[FIRST]
    clearest = divmod(int(ratio.argmax()), ratio.shape[1])
    with plots.style():
        figure, axes = plt.subplots(2, figsize=(4.8, 4.4))
        for ax, index, what in zip(
            axes, (CORNER, clearest), ("No data", "Highest ratio"), strict=True
        ):
            plots.weight_density(ax, trained.guide, FIRST, index)
            ax.locator_params(axis="x", nbins=6)
            ax.set_title(f"{what}: {ax.get_title(loc='left')}", fontsize="small")
    caption = (
        f"{name}: posterior of a weight from the corner pixel, which no digit reaches, and of the "
        "first layer's weight with the highest signal-to-noise ratio. The dotted line is zero."
    )
    return run.picture(figure, f"weights_{slug(name)}", caption)


def draw_ratios(run: Run, name: str, trained: Trained, below: float) -> Picture:
    """Plot density and cumulative distribution of the signal-to-noise ratio."""
    with plots.style():
        figure, ax = plt.subplots()
        plots.snr_density_and_cdf(ax, bbb.signal_to_noise(trained.guide))
        ax.set_title(f"{below:.0%} of the weights are more noise than signal")
    caption = f"{name}: all weights and biases; below 0 dB the mean is smaller than the sd."
    return run.picture(figure, f"snr_{slug(name)}", caption)


def draw_pruning(run: Run, name: str, pruning: Mapping[str, float]) -> Picture:
    """Plot the pruning curve, and the published one."""
    accuracies = list(pruning.values())
    published = list(PUBLISHED_PRUNING), list(PUBLISHED_PRUNING.values())
    caption = f"{name}: test accuracy of the mean network, without training after the removal."
    file = f"pruning_{slug(name)}"
    return weight_plots.draw_pruning(run, file, caption, FRACTIONS, accuracies, published)


def draw_unpruned(run: Run, name: str, trained: Trained, fraction: float = 0.95) -> Picture:
    """Plot the fraction of unpruned weights of each pixel."""
    unpruned = trained.pruned(fraction).guide.loc(FIRST) != 0
    left = unpruned.double().mean(0)  # [pixels]
    with plots.style():
        figure, ax = plt.subplots(figsize=(3.6, 3.4))
        plots.image(ax, left)
        figure.colorbar(ax.images[0], ax=ax, format=PercentFormatter(1.0, decimals=0))
        ax.set_title(f"{int((left > 0).sum())} of {len(left)} pixels have unpruned weights")
    caption = f"{name}: fraction of each pixel's weights left when {fraction:.0%} are pruned."
    return run.picture(figure, f"kept_{slug(name)}", caption)


def slug(name: str) -> str:
    """A name for files."""
    return name.lower().replace(",", "").replace(" ", "_")
