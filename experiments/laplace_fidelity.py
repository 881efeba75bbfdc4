# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation by draws of the weights and by the network's tangent, against NUTS.

    python experiments/laplace_fidelity.py [--repeats 3]

The sine problem of ``posterior_fidelity.py``: a network is trained to its MAP, and every structure
of the curvature is computed there, with the model's prior and with the one of largest marginal
likelihood. Each predicts by draws of its weights in the network, and by the network's tangent at
the MAP (Immer et al. 2021). Repeats have seeds of their own for the training; NUTS runs once.
"""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from _helpers import fidelity
from _helpers.fidelity import NUTS, OFF, ON, Predictions, Problem, compare, predict_at, score
from _helpers.run import RepeatedSettings, Run, Section, Table
from tqdm import tqdm

import pyro_bbb as bbb

SUMMARY = (
    "Function: 1-Wasserstein distance between the draws of the network's output and those of NUTS, "
    "averaged over inputs, in standard deviations of NUTS's. Sd: the standard deviation of the "
    "function over that of NUTS's; the ideal is 1. The first row is one chain of NUTS against the "
    "other: smaller distances are noise."
)
STRUCTURES = ("full", "kron", "diag", "last_layer")


@dataclass(frozen=True)
class Config(RepeatedSettings):
    """Settings of one run."""

    repeats: int = 3
    """Trainings with consecutive seeds; tables show their means, the picture the first."""
    steps: int = 9000
    """Training steps to the MAP, each on all data."""
    lr: float = 0.05
    """Learning rate of the first half of the steps."""
    draws: int = 2000
    """Draws from each guide."""
    chain_length: int = 600
    """Draws of each of the two chains of NUTS, after as many to warm up."""
    max_tree_depth: int = 7
    """A draw of NUTS takes at most 2 to this power leapfrog steps."""
    output: Path = Path("results/laplace_fidelity")
    """Folder for results."""


def solve(problem: Problem, config: Config) -> tuple[dict[str, Any], Predictions]:
    """NUTS: the distance between its chains, its scores and its predictions."""
    model, length = problem.make_model(), config.chain_length
    chains = bbb.run_nuts(
        model,
        problem.train,
        num_samples=length,
        warmup_steps=length,
        num_chains=2,
        max_tree_depth=config.max_tree_depth,
        seed=config.seed,
    )
    gold = predict_at(problem, model, chains, 2 * length, 0)
    one, other = (
        predict_at(problem, model, {n: x[half] for n, x in chains.items()}, length, 0)
        for half in (slice(0, length), slice(length, None))
    )
    return figures(problem, one, other) | {"seconds": chains.seconds}, gold


def figures(problem: Problem, found: Predictions, gold: Predictions) -> dict[str, Any]:
    """Distances on and off the data, and scores."""
    distances = {region: compare(found[region], gold[region]) for region in (ON, OFF)}
    return distances | {"scores": score(found[ON], problem.test[1])}


def study(
    problem: Problem, gold: Predictions, config: Config, seed: int
) -> dict[str, tuple[dict[str, Any], Predictions]]:
    """Every variant around one MAP: its figures and its predictions."""
    torch.manual_seed(seed)
    model, found = problem.make_model(), {}
    point = bbb.guides.make("delta", model)
    options = {"batch_size": len(problem.train[0]), "lr": config.lr, "seed": seed}
    bbb.fit(model, point, problem.train, epochs=config.steps, progress=False, **options)
    for structure in STRUCTURES:
        for optimize in (False, True):
            guide = bbb.guides.make(
                "laplace",
                model,
                structure=structure,
                optimize_prior=optimize,
                init_loc=point.median(),
            )
            guide.approximate(problem.train)
            for linearized in (False, True):
                name = structure + (", optimized prior" if optimize else "")
                name += ", linearized" if linearized else ", draws"
                predictions = predict_at(
                    problem, model, guide, config.draws, 0, linearized=linearized
                )
                record = figures(problem, predictions, gold)
                found[name] = record | {"prior_scale": guide.prior_scale.item()}, predictions
    return found


def table(nuts: dict[str, Any], variants: dict[str, Any]) -> Table:
    """All variants, after NUTS against itself."""
    columns = (
        "Sine",
        "function, on",
        "off",
        "sd, on",
        "off",
        "RMSE",
        "NLL",
        "factor of prior's sd",
    )
    rows = [["NUTS, chain against chain", *_cells(nuts), ""]]
    for name, record in variants.items():
        factor = f"{record['prior_scale']:.2f}" if "optimized" in name else ""
        rows.append([f"laplace {name}", *_cells(record), factor])
    return Table(columns, rows)


def _cells(record: dict[str, Any]) -> list[str]:
    distances = [
        f"{record[region][measure]:.2f}"
        for measure in ("function", "sd_ratio")
        for region in (ON, OFF)
    ]
    return [*distances, f"{record['scores']['rmse']:.2f}", f"{record['scores']['nll']:.3f}"]


def main(config: Config) -> dict[str, Any]:
    """Compare all variants; returns what ``metrics.json`` holds."""
    if config.smoke:
        config = replace(config, repeats=1, steps=20, draws=8, chain_length=4, max_tree_depth=2)
    run, problem = Run(config), fidelity.PROBLEMS["sine"](config.seed)
    nuts, gold = solve(problem, config)
    with warnings.catch_warnings():  # that draws do worse: the table has both
        warnings.simplefilter("ignore", bbb.guides.LinearizationWarning)
        seeds = range(config.seed, config.seed + config.repeats)
        found = [study(problem, gold, config, seed) for seed in tqdm(seeds, desc="Laplace")]
    variants = {name: fidelity.mean_of([each[name][0] for each in found]) for name in found[0]}
    shown = {name: each[1] for name, each in found[0].items() if "optimized" not in name}
    first = {name: each[0] for name, each in found[0].items()}
    picture = fidelity.draw_bands(run, "laplace", problem, first, {NUTS: gold} | shown)
    record = run.finish({NUTS: nuts, "variants": variants, "seeds": list(seeds)})
    section = Section(problem.title, problem.text, [table(nuts, variants)], [picture])
    run.report("Laplace by draws and by the tangent", SUMMARY, [section], record)
    return record


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
