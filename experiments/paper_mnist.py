# SPDX-License-Identifier: Apache-2.0
"""MNIST by SGD, dropout and Bayes by Backprop: Table 1 of the paper, with NLL, ECE and AUROC.

    python experiments/paper_mnist.py [--preset published] [--repeats 3] [--device cuda]

Blundell et al. (2015), "Weight Uncertainty in Neural Networks", section 5.1: two hidden layers of
400, 800 or 1,200 ReLU units, trained on 50,000 images; 10,000 are for choosing, and the test images
are read once for a recipe, after it is chosen. Reported are the error, the negative log-likelihood,
the calibration error, the out-of-distribution detection of garments, and the posterior's standard
deviations before and after training: with tiny ones the method is an ordinary network in disguise.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import tyro
from _helpers import paper
from _helpers.paper import GAUSSIAN, METHODS, MIXTURE, Preset, Scores, Sets
from _helpers.run import DataSettings, Picture, RepeatedSettings, Run, check_names
from _helpers.tables import Table, cell, table

import pyro_bbb as bbb

PUBLISHED = {  # test error in per cent, by method and width
    "SGD": {400: 1.83, 800: 1.84, 1200: 1.88},
    "dropout": {400: 1.51, 800: 1.33, 1200: 1.36},
    GAUSSIAN: {400: 1.82, 800: 1.99, 1200: 2.04},
    MIXTURE: {400: 1.36, 800: 1.34, 1200: 1.32},
}


@dataclass(frozen=True)
class Config(RepeatedSettings, DataSettings):
    """Settings of one run."""

    preset: Preset = "ours"
    """Name of the recipes."""
    widths: tuple[int, ...] = (400, 800, 1200)
    """Units of each of the two hidden layers."""
    methods: tuple[str, ...] = METHODS
    """Rows of the table."""
    epochs: int | None = None
    """Passes over the training images, if not the recipe's."""
    draws: int = 100
    """Networks drawn from the posterior for predictions."""
    device: str = "cpu"
    """Device; on a GPU the training step is captured in a CUDA graph."""


def train_all(config: Config, run: Run) -> Scores:
    """Figures by method and width: of each seed, their means and standard deviations."""
    sets = Sets.load(config.data_root, config.device, config.smoke)

    def one(method: str, width: int, seed: int) -> Scores:
        recipe = paper.recipe_of(config.preset, method, width, config.epochs)
        trained = paper.train(recipe, width, seed, sets)
        figures = paper.evaluate(trained, sets, config.draws, seed)
        if (method, width, seed) == (MIXTURE, max(config.widths), config.seed):
            bbb.save(config.output / "posterior", trained.model.cpu(), trained.guide.cpu())
        return figures

    return {
        method: {
            str(width): run.repeat(partial(one, method, width), method, str(width))
            for width in config.widths
        }
        for method in config.methods
    }


def error_table(summary: Scores, config: Config) -> Table:
    """Tabulate test errors, and the paper's."""
    rows = []
    for method, widths in summary.items():
        cells = []
        for width in map(str, config.widths):
            known = PUBLISHED[method].get(int(width))
            cells += ["–" if known is None else f"{known:.2f}"]
            cells += [cell(widths[width], "error") if width in widths else "–"]
        rows.append((method, *cells))
    columns = [text for width in config.widths for text in (f"{width}: paper", f"{width}: ours")]
    return Table(("test error (%)", *columns), rows)


def calibration_table(summary: Scores) -> Table:
    """Tabulate NLL, ECE, AUROC and scales; an ordinary network is its own mean and draw."""
    columns = (
        ("error (%)", "error", 100, 2),
        ("mean network", lambda entry: of_draws(entry, "mean_network_error")),
        ("single draws", lambda entry: of_draws(entry, "draws_error")),
        ("NLL (nats)", "nll", 1, 4),
        ("ECE (%)", "ece", 100, 2),
        ("AUROC of garments (%)", "auroc", 100, 1),
        ("median sd", "median_scale", 1, 4),
    )
    networks = {f"{m}, {w}": entry for m, widths in summary.items() for w, entry in widths.items()}
    return table("on the test images", networks, columns)


def of_draws(entry: Scores, name: str) -> str:
    """Format an error that a posterior has apart from its ensemble's."""
    return cell(entry, name) if "median_scale" in entry["mean"] else "–"


def draw_curves(run: Run, summary: Scores, width: int) -> Picture:
    """Plot validation error by epoch and method, of the first seed."""
    lines = {
        method: ([*map(int, curve)], [*curve.values()])
        for method, widths in summary.items()
        for curve in [next(iter(widths[str(width)]["seeds"].values()))["validation_curve"]]
    }
    caption = (
        "Error on the 10,000 images for choosing, first seed; dropout: all units in use. Where "
        "parameters are averaged, the last point is theirs."
    )
    panels = {f"2 x {width} units: the network of mean weights": lines}
    axes = {"xlabel": "epoch", "ylabel": "validation error", "yscale": "log"}
    return run.curves("validation", caption, panels, **axes)


def main(config: Config) -> dict[str, Any]:
    """Trains everything, prints the tables and writes the results."""
    check_names("--methods", config.methods, METHODS)
    if config.smoke:
        config = replace(config, widths=(16, 24), epochs=2, draws=4)
    run = Run(config, free=("widths", "methods"))
    summary = train_all(config, run)
    recipes = {m: asdict(paper.recipe_of(config.preset, m, 1200)) for m in config.methods}
    tables = [error_table(summary, config), calibration_table(summary)]
    pictures = [draw_curves(run, summary, max(config.widths))]
    record = {"methods": summary, "recipes": recipes}
    return run.report(__doc__, record, tables, pictures)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
