# SPDX-License-Identifier: Apache-2.0
"""Posteriors of one network compared: scores, out-of-distribution detection and cost.

    python experiments/posteriors.py [--problems fashion_mlp mnist_lenet5] [--seeds 3]
    python experiments/posteriors.py --problems mnist_ensemble10 fashion_ensemble10 --output ...

Networks, data and training are the same but for the posterior: MAP (weight decay by the prior), MC
dropout, a deep ensemble, Bayes by Backprop with two priors and two gradient estimators, IVON,
Laplace at the MAP (last layer, and Kronecker factors of all layers; by the network's tangent), the
variational last layer, SWAG, the rank-one ensemble, and cyclical SGHMC. Problems are an MLP on
Fashion-MNIST and LeNet-5 on MNIST; ``mnist_ensemble10`` and ``fashion_ensemble10`` compare ten
deterministic LeNet-5 with ten variational ones, each drawn once, so that prediction costs the same
ten passes. Published beside them are the ensembles of uncertainty-baselines
(https://github.com/google/uncertainty-baselines, baselines/mnist).
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import matplotlib.pyplot as plt
import tyro
from _helpers import tables as tabulate
from _helpers.posteriors import METHODS, PROBLEMS, Problem, Trainings, labelled, measure
from _helpers.run import DataSettings, Picture, Run, SeveralSeeds, check_names
from _helpers.scores import MEASURES, SCORES, draws
from _helpers.tables import Summaries, Summary, Table
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from pyro_bbb import plots

COLUMNS = (
    *SCORES,
    ("AUROC, ood (%)", "ood.entropy", 100, 1),
    ("AURC (per mille)", "area_under_risk_coverage", 1000, 2),
    ("draws", draws),
    ("training", "training", 1, 1),
    ("prediction", "prediction", 1, 1),
)


def table(problem: Problem, summaries: Summaries) -> Table:
    """Scores and costs of every method, with published scores."""
    published = {
        name: (f"{100 * accuracy:.1f}", f"{nll:.3f}", f"{100 * ece:.1f}", *("–",) * 5)
        for name, (accuracy, nll, ece) in problem.published.items()
    }
    return tabulate.table(problem.title, labelled(summaries), COLUMNS, published)


def ood_table(problem: Problem, summaries: Summaries) -> Table:
    """AUROC of out-of-distribution detection by three measures of uncertainty."""
    columns = [(measure, f"ood.{measure}", 100, 1) for measure in MEASURES]
    return tabulate.table(f"{problem.title}: AUROC (%)", labelled(summaries), columns)


def draw_costs(run: Run, results: dict[str, Summaries]) -> Picture:
    """Plot NLL against training cost, a panel for each problem."""
    with plots.style():
        figure, axes = plt.subplots(
            1, len(results), figsize=(6.4 * len(results), 4.2), squeeze=False
        )
        for ax, (name, summaries) in zip(axes[0], results.items(), strict=True):
            draw_methods(ax, summaries)
            ax.set_title(PROBLEMS[name].title)
    return run.picture(
        figure,
        "costs",
        "Mean over seeds; bars are standard deviations. Down and left is better.",
    )


def draw_methods(ax: Axes, summaries: Summaries) -> None:
    """Plot a point for each method, with a different marker and colour, the best first."""
    names, colors = list(METHODS), plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for name in sorted(summaries, key=lambda name: float(summaries[name]["mean"]["nll"])):
        mean, number = summaries[name]["mean"], names.index(name)
        ax.errorbar(
            mean["training"],
            mean["nll"],
            summaries[name].get("sd", {}).get("nll", 0.0),
            fmt="osD^v"[number % 5],
            color=colors[number % len(colors)],
            capsize=2,
            label=METHODS[name].label,
        )
    ax.set(xscale="log", xlabel="training, multiples of the deterministic network's")
    ax.set_ylabel("NLL (nats)")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")


@dataclass(frozen=True)
class Config(SeveralSeeds, DataSettings):
    """Settings of one run."""

    problems: tuple[str, ...] = ("fashion_mlp", "mnist_lenet5")
    """Problems: fashion_mlp, mnist_lenet5, mnist_ensemble10, fashion_ensemble10."""
    methods: tuple[str, ...] = ()
    """Methods, instead of all of the problem."""
    scored: Literal["test", "validation"] = "test"
    """Images that are scored; settings were chosen on the 5,000 of validation."""
    images: int = 5000
    """Out-of-distribution images."""


def compare(config: Config, run: Run, name: str) -> Summaries:
    """All methods on one problem: the figures of the seeds, their means and deviations."""
    options = {"data_root": config.data_root, "smoke": config.smoke}
    trainings = Trainings(root=config.output / "trainings", **options)
    sets = trainings.sets(name, testing=config.scored == "test", unknown=config.images)

    def one(method: str, seed: int) -> Summary:
        return measure(trainings.task(name, method, seed, sets), METHODS[method], sets)

    return run.compare(one, PROBLEMS[name].methods, config.methods, name)


def main(config: Config) -> dict[str, Any]:
    """Trains and scores every method, prints the tables and writes the results."""
    check_names("--problems", config.problems, PROBLEMS)
    known = (name for problem in config.problems for name in PROBLEMS[problem].methods)
    check_names("--methods", config.methods, known)
    if config.smoke:
        config = replace(config, problems=config.problems[:1], seeds=1, images=50)
    run = Run(config, free=("problems", "methods"))
    results = {name: compare(config, run, name) for name in config.problems}
    tables = [
        make(PROBLEMS[name], summaries)
        for name, summaries in results.items()
        for make in (table, ood_table)
    ]
    pictures = [draw_costs(run, results)]
    return run.report(__doc__, {"problems": results}, tables, pictures)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
