# SPDX-License-Identifier: Apache-2.0
"""Six recipes for a network of the digits: the ELBO that each reaches, beside its scores.

    python experiments/digits_recipes.py

A 64-100-100-10 network, with a standard Normal prior and with a mixture whose narrow part has the
scale e^-6, is trained by the default learning rate, by 0.001 for as many epochs, and by 0.01 for
six times as many. Each is compared with the best posterior that ignores the data
(docs/guide/trained.md), and scored on the 450 test digits. Uniform noise is out-of-distribution.
"""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from _helpers.run import Data, Run, Settings, Table, digits
from _helpers.scores import detect, scores
from pyro.distributions import Normal

import pyro_bbb as bbb

PRIORS = {
    "Normal": lambda: Normal(0.0, 1.0),
    "mixture": lambda: bbb.ScaleMixtureNormal(0.5, 1.0, math.exp(-6)),
}
NATS = "neg_elbo", "baseline"
RATES = {"the defaults": (1, None), "lr 0.001": (1, 1e-3), "lr 0.01": (6, 1e-2)}


@dataclass(frozen=True)
class Config(Settings):
    """Settings of one run."""

    epochs: int = 100
    """Passes over the digits; six times as many in the longest training."""
    output: Path = Path("results/digits_recipes")
    """Folder for results."""


def score(
    parts: tuple[Data, Data], prior: Any, epochs: int, lr: float | None, seed: int
) -> dict[str, float]:
    """Train one network; its ELBO and baseline in nats of all training data, and its scores.

    The AUROC says how well the entropy tells uniform noise from digits.
    """
    train, (x_test, y_test) = parts
    torch.manual_seed(seed)
    likelihood = bbb.likelihoods.Categorical()
    network = bbb.BayesianMLP([64, 100, 100, 10], prior=prior)
    model = bbb.BayesianModel(network, likelihood, num_data=len(train[0]))
    guide = bbb.AutoSoftplusNormal(model)
    with warnings.catch_warnings(action="ignore", category=bbb.UndertrainedWarning):
        history = bbb.fit(model, guide, train, epochs=epochs, lr=lr, seed=seed)
    per_example = history.baseline_per_example
    noise = torch.rand(x_test.shape, generator=torch.Generator().manual_seed(0))
    known, unknown = (bbb.predict(model, guide, x, seed=seed) for x in (x_test, noise))
    return {
        "neg_elbo": history.loss[-1],
        "baseline": None if per_example is None else per_example * len(train[0]),
        **scores(known.probs, y_test),
        "auroc": detect(unknown, known)["entropy"],
    }


def table(results: dict[str, dict[str, float]]) -> Table:
    """One row per recipe."""
    columns = "recipe", "neg. ELBO (nats)", "data ignored", "accuracy", "NLL (nats)", "AUROC, noise"
    rows = [
        (
            name,
            *("–" if found[key] is None else f"{found[key]:,.0f}" for key in NATS),
            *(f"{found[key]:.3f}" for key in ("accuracy", "nll", "auroc")),
        )
        for name, found in results.items()
    ]
    return Table(columns, rows)


def main(config: Config) -> dict[str, Any]:
    """Train all recipes, print the table and write the results."""
    run, parts, results = Run(config), digits(), {}
    epochs = 2 if config.smoke else config.epochs
    for prior, make in PRIORS.items():
        for rate, (times, lr) in RATES.items():
            name = f"{prior}, {rate}, {times * epochs} epochs"
            results[name] = score(parts, make(), times * epochs, lr, config.seed)
    record = run.finish({"recipes": results})
    run.report("How far recipes are trained", __doc__ or "", record, [table(results)])
    return record


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
