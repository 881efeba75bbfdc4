# SPDX-License-Identifier: Apache-2.0
"""MNIST by SGD, dropout and Bayes by Backprop: Table 1 of the paper, with NLL, ECE and AUROC.

    python experiments/paper_mnist.py [--preset published] [--repeats 3] [--device cuda | --jobs 2]

Blundell et al. (2015), "Weight Uncertainty in Neural Networks", section 5.1: two hidden layers of
400, 800 or 1,200 ReLU units, trained on 50,000 images; 10,000 are for choosing, and the test images
are read once for a recipe, after it is chosen. Reported are the error, the negative log-likelihood,
the calibration error, the out-of-distribution detection of garments, and the posterior's standard
deviations before and after training: with tiny ones the method is an ordinary network in disguise.

``docs/development/experiments.md`` has the other settings, and those tried.
"""

import json
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import joblib
import torch
import tyro
from _helpers import paper
from _helpers.paper import GAUSSIAN, METHODS, MIXTURE, Preset, Recipe, Scores, Sets
from _helpers.repeats import cell, over_seeds, table
from _helpers.run import (
    DataSettings,
    Picture,
    RepeatedSettings,
    Run,
    Table,
    check_names,
    write_json,
)
from tqdm.auto import tqdm

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
    jobs: int = 1
    """Trainings at a time, each a process; on a GPU they take turns, so that one is best."""
    output: Path = Path("results/paper_mnist")
    """Folder for results."""
    collect: bool = False
    """Train nothing; report on the trainings in the folder of results."""


@dataclass(frozen=True)
class Job:
    """One training."""

    method: str
    width: int
    seed: int
    recipe: Recipe

    def path(self, folder: Path) -> Path:
        """Return the path of its figures."""
        return folder / "runs" / f"{self.method.replace(', ', '_')}_{self.width}_{self.seed}.json"


def jobs_of(config: Config) -> list[Job]:
    """All trainings, the widest first, which take longest."""
    seeds = range(config.seed, config.seed + config.repeats)
    return [
        Job(method, width, seed, paper.recipe_of(config.preset, method, width, config.epochs))
        for seed, width, method in product(seeds, sorted(config.widths, reverse=True), METHODS)
        if method in config.methods
    ]


def terms(job: Job, config: Config) -> Scores:
    """Settings that determine a job's figures, as JSON."""
    recipe: Scores = json.loads(json.dumps(asdict(job.recipe)))
    return recipe | {"draws": config.draws}


def known(job: Job, config: Config) -> Scores | None:
    """Read the cached figures of a job with the same settings."""
    path = job.path(config.output)
    if not path.exists():
        return None
    figures: Scores = json.loads(path.read_text(encoding="utf-8"))
    return figures if figures["recipe"] == terms(job, config) else None


def work(job: Job, config: Config) -> Scores:
    """Trains and evaluates, or reads what was found before."""
    found = known(job, config)
    if found is not None:
        return found
    torch.set_num_threads(config.threads)
    sets = Sets.load(config.data_root, config.device, config.smoke)
    trained = paper.train(job.recipe, job.width, job.seed, sets, progress=config.jobs == 1)
    figures = paper.evaluate(trained, sets, config.draws, job.seed)
    figures["recipe"] = terms(job, config)
    if job.method == MIXTURE and job.width == max(config.widths) and job.seed == config.seed:
        bbb.save(config.output / "posterior", trained.model.cpu(), trained.guide.cpu())
    write_json(job.path(config.output), figures)
    return figures


def run_all(jobs: list[Job], config: Config) -> list[Scores]:
    """The figures of all jobs, in their order."""
    parallel = joblib.Parallel(n_jobs=config.jobs, return_as="generator")
    calls = (joblib.delayed(work)(job, config) for job in jobs)
    return list(tqdm(parallel(calls), total=len(jobs), unit="training"))


def summarise(jobs: list[Job], found: list[Scores]) -> Scores:
    """Figures by method and width: of each seed, their means and standard deviations."""
    summary: Scores = {}
    kinds = {(job.method, job.width) for job in jobs}
    for method, width in sorted(kinds, key=lambda kind: (METHODS.index(kind[0]), kind[1])):
        seeds = {
            str(job.seed): figures
            for job, figures in zip(jobs, found, strict=True)
            if (job.method, job.width) == (method, width)
        }
        records = [{k: v for k, v in each.items() if k != "recipe"} for each in seeds.values()]
        summary.setdefault(method, {})[str(width)] = {"seeds": seeds} | over_seeds(records)
    return summary


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


def first_seeds(summary: Scores, width: int) -> Scores:
    """Figures of the first seed, by method, where there are networks of that width."""
    return {
        method: next(iter(widths[str(width)]["seeds"].values()))
        for method, widths in summary.items()
        if str(width) in widths
    }


def draw_curves(run: Run, summary: Scores, width: int) -> Picture:
    """Plot validation error by epoch and method, of the first seed."""
    lines = {
        method: ([*map(int, curve)], [*curve.values()])
        for method, first in first_seeds(summary, width).items()
        for curve in [first["validation_curve"]]
    }
    caption = (
        "Error on the 10,000 images for choosing, first seed; dropout: all units in use. Where "
        "parameters are averaged, the last point is theirs."
    )
    panels = {f"2 x {width} units: the network of mean weights": lines}
    axes = {"xlabel": "epoch", "ylabel": "validation error", "yscale": "log"}
    return run.curves("validation", caption, panels, **axes)


SUMMARY = (
    "Bayes by Backprop with the scale mixture prior against ordinary training, on the paper's own "
    "terms; and what its error does not say of its uncertainty. Scores are of the ensemble of "
    "networks drawn from the posterior; ± is the standard deviation over seeds."
)


def main(config: Config) -> dict[str, Any]:
    """Trains everything, prints the tables and writes the results."""
    check_names("--methods", config.methods, METHODS)
    if config.smoke:
        config = replace(config, widths=(16, 24), epochs=2, draws=4)
    run, jobs = Run(config), jobs_of(config)
    if config.collect:
        jobs = [job for job in jobs if known(job, config) is not None]
        config = replace(config, widths=tuple(sorted({job.width for job in jobs})))
    if not jobs:
        raise SystemExit(f"no trained network of the --methods and --widths is in {config.output}")
    summary = summarise(jobs, run_all(jobs, config))
    record = run.finish({"methods": summary})
    tables = [error_table(summary, config), calibration_table(summary)]
    pictures = [draw_curves(run, summary, max(config.widths))]
    run.report("The paper's MNIST networks", SUMMARY, record, tables, pictures)
    return record


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
