# SPDX-License-Identifier: Apache-2.0
"""Uncertainty in a gap of the data: UCI tables without the middle third of a feature.

    python experiments/gap_splits.py --data-root DIR [--datasets yacht energy]

The splits of Foong et al. (2019), "'In-Between' Uncertainty in Bayesian Neural Networks",
arXiv:1906.11537: rows are sorted by one feature, the middle third is the test part, and the outer
thirds train; each feature in turn, which makes as many splits. A posterior that is sure between two
clusters of data where it should not be has a bad log-likelihood there.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from time import perf_counter
from typing import Any

import matplotlib.pyplot as plt
import torch
import tyro
from _helpers.fidelity import drawn, mean_of
from _helpers.regression_tables import digest, find_tables, made_up_tables, score, unscaled
from _helpers.run import Data, DataSettings, Picture, Run
from _helpers.tables import Table

import pyro_bbb as bbb
from pyro_bbb import plots

SUMMARY = (
    "Scores in the middle third of a feature, which the training part lacks, averaged over the "
    "features, in the target's own units. Coverage: of central 90 % intervals."
)
UNITS, BATCH, LR = 50, 256, 0.01  # of hidden units, of rows in each step, Adam's at the start


@dataclass(frozen=True)
class Config(DataSettings):
    """Settings of one run."""

    datasets: tuple[str, ...] = ()
    """Names of the tables, which are their folders'; by default all that are there."""
    steps: int = 3000
    """Training steps of each guide, at least; each row is seen 20 times or more."""
    draws: int = 100
    """Draws from each posterior."""
    features: int | None = None
    """Number of features, from a table's first; by default all."""
    workers: int = 1
    """Processes that work on splits."""


@dataclass(frozen=True)
class Method:
    """A guide and how it is trained; or chains, where it has none."""

    guide: str | None
    options: dict[str, Any] = field(default_factory=dict)
    lr_factor: float = 1.0
    linearized: bool = False
    after: str | None = None  # method whose means are the initial ones


FACTORISED = "softplus_normal"
METHODS = {
    "delta (MAP)": Method("delta"),
    "ensemble of 5 delta": Method("ensemble", {"size": 5}),
    FACTORISED: Method(FACTORISED),
    "full_rank": Method("full_rank", {"init_scale": 0.03}, lr_factor=0.2, after=FACTORISED),
    "laplace, linearized": Method("laplace", linearized=True),
    "20 chains of sghmc": Method(None),
}
CHAINS = {"num_chains": 20, "warmup_steps": 5000, "num_samples": 5, "thin": 200}
RATES = {"lr": 0.003, "momentum": 0.99}  # the rate is for noise of scale 1


def gap_split(x: torch.Tensor, y: torch.Tensor, feature: int) -> tuple[Data, Data]:
    """Return the outer thirds by a feature, which train, and the middle third, which tests."""
    order = x[:, feature].argsort(stable=True)
    first, middle, last = order.tensor_split(3)
    outer = torch.cat([first, last])
    return (x[outer], y[outer]), (x[middle], y[middle])


def make_model(data: Data, noise: bbb.likelihoods.Likelihood) -> bbb.BayesianModel:
    """One hidden layer."""
    network = bbb.BayesianMLP([data[0].shape[1], UNITS, 1], prior=bbb.priors.FanInNormal())
    return bbb.BayesianModel(network, noise, num_data=len(data[0]))


def noise_scale(data: Data, config: Config) -> float:
    """Return the RMSE of a MAP network on a fifth of the data, without which it is trained."""
    train, held_out = bbb.data.split(*data, fraction=0.2, seed=config.seed)
    torch.manual_seed(config.seed)
    model = make_model(train, bbb.likelihoods.Gaussian.learned(0.3))
    guide = posterior(model, Method("delta"), train, config, None)
    mean = bbb.predict(model, guide, held_out[0], num_samples=1).mean
    return bbb.metrics.rmse(mean, held_out[1])


def posterior(
    model: bbb.BayesianModel, method: Method, data: Data, config: Config, start: Any
) -> Any:
    """Return a trained guide, or chains."""
    if method.guide is None:
        steps = {"num_chains": 2, "warmup_steps": 2, "num_samples": 2, "thin": 1}
        return bbb.run_sgmcmc(
            model,
            data,
            batch_size=BATCH,
            seed=config.seed,
            progress=False,
            lr=RATES["lr"] * float(model.likelihood.scale) ** 2,
            momentum=RATES["momentum"],
            **(steps if config.smoke else CHAINS),
        )
    first = {} if start is None else {"init_loc": start.median()}
    guide = bbb.guides.make(method.guide, model, **method.options, **first)
    batches = math.ceil(len(data[0]) / BATCH)
    bbb.fit(
        model,
        guide,
        data,
        epochs=max(math.ceil(config.steps / batches), 1 if config.smoke else 20),
        batch_size=BATCH,
        lr=LR * method.lr_factor,
        seed=config.seed,
        progress=False,
    )
    return guide


def run_split(path: str, feature: int, config: Config) -> dict[str, Any]:
    """Scores of every method where the middle third of a feature is missing."""
    table = bbb.data.read_uci(path, dtype=torch.float64)
    (x, y), (x_test, y_test) = gap_split(table.x, table.y, feature)
    (x, of_x), (y, of_y) = map(bbb.data.standardize, (x, y[:, None]))
    data = x.float(), y.float()
    noise = noise_scale(data, config)
    summaries: dict[str, Any] = {}
    trained: dict[str, Any] = {}
    for name, method in METHODS.items():
        torch.manual_seed(config.seed)
        began, model = perf_counter(), make_model(data, bbb.likelihoods.Gaussian(noise))
        start = trained.get(method.after or "")
        try:
            trained[name] = posterior(model, method, data, config, start)
        except ArithmeticError as error:  # no mode for Laplace, or a chain that diverged
            summaries[name] = {"failed": str(error)}
            continue
        seconds = perf_counter() - began
        options = {"num_samples": config.draws, "linearized": method.linearized}
        prediction = bbb.predict(model, trained[name], of_x(x_test).float(), seed=0, **options)
        scores = score(unscaled(drawn(prediction, 1000), of_y), y_test)
        covered = [abs(2 * quantile - 1) <= 0.9 for quantile in scores["quantiles"]]
        summaries[name] = {
            "rmse": scores["rmse"],
            "nll": -scores["log_likelihood"],
            "coverage": fmean(covered),
            "seconds": round(seconds, 2),
        }
    return summaries


def gap_table(tables: dict[str, Any]) -> Table:
    """NLL of each method on every table, and its coverage."""
    columns = ["in the gap", *(f"{name}: NLL" for name in tables), "coverage (%)", "seconds"]
    rows = []
    for name in METHODS:
        figures = [scores[name] for scores in tables.values()]
        nlls, mean = [_cell(x, "nll", 1, 2) for x in figures], mean_of(figures)
        rows.append([name, *nlls, _cell(mean, "coverage", 100, 0), _cell(mean, "seconds", 1, 0)])
    return Table(columns, rows)


def _cell(figures: dict[str, Any], name: str, factor: float, digits: int) -> str:
    return "failed" if "failed" in figures else f"{factor * figures[name]:.{digits}f}"


def draw_coverage(run: Run, tables: dict[str, Any]) -> Picture:
    """Coverage of each method on every table; the intervals' level is a line."""
    names = list(METHODS)[::-1]
    with plots.style():
        figure, ax = plt.subplots(figsize=(6.4, 0.5 + 0.4 * len(names)))
        for marker, (table, scores) in zip("osD^v", tables.items(), strict=False):
            rows = [i for i, name in enumerate(names) if "failed" not in scores[name]]
            covered = [100 * scores[names[i]]["coverage"] for i in rows]
            ax.plot(covered, rows, marker, label=table)
        ax.axvline(90, color="0.6", linewidth=1)
        ax.set(xlim=(-3, 103), xlabel="coverage of 90 % intervals in the gap (%)")
        ax.set_yticks(range(len(names)), names)
        figure.legend(loc="outside right upper")
    return run.picture(figure, "coverage", "Left of the line a method is overconfident in the gap.")


def main(config: Config) -> dict[str, Any]:
    """Run the splits that are not done; returns what ``metrics.json`` holds."""
    run = Run(config, free=("datasets", "features", "workers"))
    if config.smoke:
        config = replace(config, steps=2, draws=4, features=1)
        paths = made_up_tables(config.output / "made_up")
    else:
        paths = find_tables(config.data_root, config.datasets)
    jobs = {}
    for name, path in paths.items():
        x = bbb.data.read_uci(path).x
        features = [k for k in range(x.shape[1]) if len(x[:, k].unique()) > 2]
        for k in features[: config.features]:
            job = partial(run_split, str(path), k, config)
            jobs[f"{name}-{digest(path)[:8]}/{config.seed}-{k}"] = job
    records: dict[str, list[Any]] = {name: [] for name in paths}
    for job, scores in zip(jobs, run.spread(jobs, config.workers), strict=True):
        records[job.partition("/")[0].rpartition("-")[0]].append(scores)
    tables = {
        name: {method: mean_of([split[method] for split in splits]) for method in METHODS}
        for name, splits in records.items()
    }
    metrics = {"tables": tables, "splits": {k: len(v) for k, v in records.items()}}
    pictures = [draw_coverage(run, tables)]
    return run.report(__doc__, metrics, [gap_table(tables)], pictures, remark=SUMMARY)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
