# SPDX-License-Identifier: Apache-2.0
"""Pruning by signal-to-noise ratio: Table 2 of the paper.

    python experiments/paper_pruning.py [--posterior results/paper_mnist/posterior]

Blundell et al. (2015), "Weight Uncertainty in Neural Networks", section 5.1 and Table 2: two hidden
layers of 1,200 units; weights are ranked by their signal-to-noise ratio |mean| / standard deviation
and the lowest set to zero, with no training afterwards. ``--posterior`` is a folder that
``paper_mnist.py`` or `pyro_bbb.save` wrote; without it the network is trained here first.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from _helpers.paper import MIXTURE, Preset, Scores, Sets, Trained, error, recipe_of, train
from _helpers.run import DataSettings, Run
from _helpers.tables import Table

import pyro_bbb as bbb

PUBLISHED = {0.0: 0.0124, 0.5: 0.0124, 0.75: 0.0124, 0.95: 0.0129, 0.98: 0.0139}
FRACTIONS = tuple(PUBLISHED)
STEPS = (0.5, 0.75, 0.9, 0.95, 0.98)  # of the removal with training between
WIDTH = 1200


@dataclass(frozen=True)
class Config(DataSettings):
    """Settings of one run."""

    preset: Preset = "ours"
    """Whether to train between removals as well."""
    posterior: Path | None = None
    """Folder of a trained network; without one it is trained first."""
    epochs: int | None = None
    """Passes over the training images for the first training, if not the recipe's."""
    between: int = 15
    """Epochs of training after each step of removal."""
    draws: int = 50
    """Networks drawn from the posterior for the ensemble."""
    device: str = "cpu"
    """Device; on a GPU the training step is captured in a CUDA graph."""
    output: Path = Path("results/paper_pruning")
    """Folder for results."""


def start(config: Config, sets: Sets) -> Trained:
    """Return the trained network, from its folder, or train it."""
    if config.posterior is None:
        recipe = recipe_of(config.preset, MIXTURE, WIDTH, config.epochs)
        return train(recipe, 24 if config.smoke else WIDTH, config.seed, sets)
    saved = bbb.load(config.posterior)
    device = torch.device(config.device)
    return Trained(model=saved.model.to(device), guide=saved.guide.to(device))


def removed(trained: Trained, fraction: float) -> Trained:
    """Prune the weights of lowest signal-to-noise ratio."""
    return replace(trained, guide=bbb.prune(trained.guide, fraction))


def in_steps(trained: Trained, config: Config, sets: Sets) -> dict[float, Trained]:
    """Remove more and more, with training between, and return what is left at each fraction."""
    recipe, networks = recipe_of("ours", MIXTURE, WIDTH), {0.0: trained}
    for step, fraction in enumerate(STEPS, start=1):
        trained = removed(trained, fraction)
        bbb.fit(
            trained.model,
            trained.guide,
            sets.train,
            epochs=config.between,
            lr=recipe.lr / 2,
            kl_schedule=bbb.KLSchedule(temperature=recipe.temperature),
            estimator=recipe.estimator,
            cuda_graph=sets.train[0].is_cuda,
            seed=config.seed + step,
        )
        networks[fraction] = trained
    return networks


def evaluate(trained: Trained, sets: Sets, config: Config) -> Scores:
    """Test error of the network of mean weights, and of the ensemble."""
    x, y = sets.test
    return {
        "error": error(trained.point(x), y),
        "ensemble_error": error(trained.ensemble(x, config.draws, config.seed), y),
    }


def errors_table(figures: dict[str, Scores]) -> Table:
    """Errors, and their change from the network with all weights, and the paper's."""
    rows = []
    for fraction in FRACTIONS:
        published = PUBLISHED[fraction]
        cells = [f"{100 * published:.2f} ({100 * (published - PUBLISHED[0.0]):+.2f})"]
        for of_way in figures.values():
            now, first = (of_way[str(f)]["error"] for f in (fraction, 0.0))
            cells.append(f"{100 * now:.2f} ({100 * (now - first):+.2f})")
        rows.append((f"{100 * fraction:.0f}", *cells))
    columns = (f"{name}: error (%)" for name in ("paper", *figures))
    return Table(("weights removed (%)", *columns), rows)


ONCE, STEPWISE = "removed once", "removed in steps"


def main(config: Config) -> dict[str, Any]:
    """Trains or loads, removes, evaluates, prints the tables and writes the results."""
    if config.smoke:
        config = replace(config, epochs=2, between=1, draws=3)
    run, sets = Run(config), Sets.load(config.data_root, config.device, config.smoke)
    trained = start(config, sets)
    ways = {ONCE: {fraction: removed(trained, fraction) for fraction in FRACTIONS}}
    if config.preset == "ours":
        ways[STEPWISE] = in_steps(trained, config, sets)
    figures = {
        name: {str(f): evaluate(networks[f], sets, config) for f in FRACTIONS}
        for name, networks in ways.items()
    }
    lines = {
        name: (FRACTIONS, [errors[str(fraction)]["error"] for fraction in FRACTIONS])
        for name, errors in figures.items()
    }
    lines["paper"] = FRACTIONS, list(PUBLISHED.values())
    axes = {"xlabel": "fraction of weights removed", "ylabel": "test error"}
    picture = run.curves("pruning", "The network of mean weights.", {"": lines}, **axes)
    tables = [errors_table(figures)]
    return run.report(__doc__, {"errors": figures}, tables, [picture])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
