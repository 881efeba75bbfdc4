# SPDX-License-Identifier: Apache-2.0
"""Regression with predictive bands: Figure 5 of Blundell et al. (2015).

    python experiments/paper_regression.py --repeats 3

The data of "Weight Uncertainty in Neural Networks" (https://arxiv.org/abs/1505.05424), section 5.2:
y = x + 0.3 sin(2 pi (x + e)) + 0.3 sin(4 pi (x + e)) + e with e from N(0, 0.02^2), x in [0, 0.5],
predictions on [-0.2, 1.2]. The figure shows the median and the interquartile range of a Bayes by
Backprop network's predictions, and of a plain network of the same shape and loss; so do we, with
the central 90 % as well. A third answer is an ensemble of five plain networks from different
starts. All predict a Normal whose standard deviation is one learned number (in truth the noise
differs from input to input, as e is inside the sines). On the data is 0.05 < x < 0.45, off them
x < -0.05 and x > 0.55.
"""

import math
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
import tyro
from _helpers.run import Data, Picture, RepeatedSettings, Run
from _helpers.tables import Table, at, table
from _helpers.training import Training, normal_means, train_plain
from torch import Tensor, nn
from torch.distributions import Normal

import pyro_bbb as bbb


class Plain(nn.Module):
    """Network without random weights, of these hidden units, that predicts a Normal."""

    def __init__(self, units: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise([1, *units, 1]):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]  # torch's biases spread the kinks over x
            nn.init.kaiming_normal_(layers[-2].weight)
        self.mean = nn.Sequential(*layers[:-1])
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Normal:
        """Return the predicted Normal."""
        loc = self.mean(x)
        return Normal(loc, self.log_scale.exp().expand_as(loc))


def predict_together(networks: list[Plain], x: Tensor) -> bbb.RegressionPrediction:
    """Networks without random weights as an ensemble, which may be of one."""
    with torch.no_grad():
        normals = [network(x) for network in networks]
    loc, scale = (torch.stack([getattr(n, name) for n in normals]) for name in ("loc", "scale"))
    return bbb.RegressionPrediction(Normal(loc, scale))


BAYES, PLAIN, ENSEMBLE = "Bayes by Backprop", "plain network", "ensemble of 5"
NETWORKS = (BAYES, PLAIN, ENSEMBLE)
LEVELS = (0.5, 0.9)


@dataclass(frozen=True)
class Recipe(Training):
    """The data, the network and its training."""

    units: tuple[int, ...]  # units of the hidden layers
    prior: tuple[float, float, float]  # pi, sigma1 and sigma2 of the mixture prior
    init_sd: float | None  # spread of the initial means; None is He's, by fan-in
    shift: float = 0.0  # subtracted from the inputs before they are...
    stretch: float = 1.0  # ...multiplied by this
    init_rho: float = -5.0  # initial rho; standard deviations are softplus(rho)
    steps: int = 3000  # steps on all data at once
    points: int = 500  # number of data
    plain_lr: float = 1e-2
    """Learning rate of the plain networks, which start from He's initial weights."""

    def inputs(self, x: Tensor) -> Tensor:
        """Scale the inputs."""
        return (x - self.shift) * self.stretch


RECIPES = {
    "published": Recipe((100, 100), (0.5, 1.0, math.exp(-6)), None, num_particles=1, lr=1e-2),
    "ours": Recipe(
        (20, 20), (0.75, 1.5, 0.5), 0.3, num_particles=5, lr=1e-2, shift=0.25, stretch=4.0
    ),
}


@dataclass(frozen=True)
class Config(RepeatedSettings):
    """Settings of one run."""

    preset: Literal["published", "ours"] = "ours"
    """The paper's prior and a network of its usual size, or what the ELBO prefers."""
    samples: int = 500
    """Networks drawn from the posterior for each prediction."""


def curve(x: Tensor, noise: Tensor) -> Tensor:
    """Return the paper's curve: y at the inputs ``x`` for the given values of its noise e."""
    inside = x + noise
    waves = torch.sin(2 * math.pi * inside) + torch.sin(4 * math.pi * inside)
    return x + 0.3 * waves + noise


def observe(x: Tensor, generator: torch.Generator) -> Tensor:
    """Noisy values of the curve."""
    return curve(x, 0.02 * torch.randn(x.shape, generator=generator))


@dataclass(frozen=True)
class Problem:
    """Training data, fresh data from the same law, and the inputs of predictions."""

    train: Data
    fresh: Data
    x: Tensor

    @classmethod
    def of(cls, seed: int, points: int) -> "Problem":
        """Return inputs uniform in [0, 0.5]; 2,000 fresh ones."""
        generator = torch.Generator().manual_seed(seed)
        inputs = [0.5 * torch.rand(count, 1, generator=generator) for count in (points, 2000)]
        train, fresh = ((x, observe(x, generator)) for x in inputs)
        return cls(train, fresh, torch.linspace(-0.2, 1.2, 561)[:, None])


def train(recipe: Recipe, data: Data, seed: int, steps: int) -> tuple[Any, Any, bbb.History]:
    """Bayes by Backprop."""
    torch.manual_seed(seed)
    network = bbb.BayesianMLP([1, *recipe.units, 1], prior=bbb.ScaleMixtureNormal(*recipe.prior))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian.learned(), recipe.points)
    start = "he" if recipe.init_sd is None else normal_means(recipe.init_sd)
    guide = bbb.AutoSoftplusNormal(model, init_loc=start, init_rho=recipe.init_rho)
    scaled = recipe.inputs(data[0]), data[1]
    options = {"epochs": steps, "batch_size": recipe.points, "seed": seed}
    return model, guide, recipe.fit(model, guide, scaled, **options)


def plain(recipe: Recipe, data: Data, seed: int, steps: int) -> Plain:
    """Train a plain network by the same loss without the KL."""
    torch.manual_seed(seed)
    options = {"batch_size": recipe.points, "lr": recipe.plain_lr}
    loss = lambda normal, y: -normal.log_prob(y).mean()  # noqa: E731
    scaled = recipe.inputs(data[0]), data[1]
    return train_plain(Plain(recipe.units), scaled, steps, loss=loss, **options)


def score(
    at: bbb.RegressionPrediction, fresh: bbb.RegressionPrediction, problem: Problem, seed: int
) -> dict[str, Any]:
    """Compute epistemic sd, interval widths, coverage and NLL on and off the data."""
    x = problem.x.flatten()
    on, off = (x > 0.05) & (x < 0.45), (x < -0.05) | (x > 0.55)
    beyond = (x < 0) | (x > 0.5)
    y = observe(problem.x, torch.Generator().manual_seed(1000 + seed))
    low, high = at.interval(0.5)
    epistemic, quartiles = at.epistemic_std.flatten(), (high - low).flatten()
    ranks = {"on": fresh.cdf(problem.fresh[1]), "off": at.cdf(y)[beyond]}
    covered = {  # a value is in the central interval where its rank is near one half
        f"{100 * level:.0f}": {
            where: float(((rank - 0.5).abs() <= level / 2).double().mean())
            for where, rank in ranks.items()
        }
        for level in LEVELS
    }
    return {
        "epistemic_sd": {"on": float(epistemic[on].mean()), "off": float(epistemic[off].mean())},
        "interquartile": {"on": float(quartiles[on].mean()), "off": float(quartiles[off].mean())},
        "coverage": covered,
        "nll": -float(fresh.log_prob(problem.fresh[1]).mean()),
    }


def one_seed(config: Config, recipe: Recipe, seen: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train and score all three with one seed's data; ``seen`` collects the first seed's."""
    problem = Problem.of(seed, recipe.points)
    steps, samples = (10, 10) if config.smoke else (recipe.steps, config.samples)
    model, guide, history = train(recipe, problem.train, seed, steps)
    networks = [plain(recipe, problem.train, 100 * seed + i, steps) for i in range(5)]
    predictions = {
        BAYES: lambda x: bbb.predict(model, guide, x, num_samples=samples, seed=seed),
        PLAIN: lambda x: predict_together(networks[:1], x),
        ENSEMBLE: lambda x: predict_together(networks, x),
    }
    results: dict[str, Any] = {"neg_elbo": sum(history.loss[-50:]) / len(history.loss[-50:])}
    for name, predict in predictions.items():
        at, fresh = (predict(recipe.inputs(x)) for x in (problem.x, problem.fresh[0]))
        results[name] = score(at, fresh, problem, seed)
        seen.setdefault(name, (problem, at))
    sds = results[BAYES]["epistemic_sd"]
    return results | {"ratio": sds["off"] / sds["on"]}


def results_table(summary: dict[str, Any]) -> Table:
    """One row per network."""
    columns = (
        ("epistemic sd on the data", "epistemic_sd.on", 1, 3),
        ("off", "epistemic_sd.off", 1, 3),
        ("interquartile range on the data", "interquartile.on", 1, 3),
        ("off", "interquartile.off", 1, 3),
        ("coverage (%) of 50 % on the data", "coverage.50.on", 100, 1),
        ("in 90 %", "coverage.90.on", 100, 1),
        ("in 90 %, off the data", "coverage.90.off", 100, 1),
        ("NLL (nats)", "nll", 1, 3),
    )
    return table("network", {name: at(summary, name) for name in NETWORKS}, columns)


def draw_bands(run: Run, seen: dict[str, Any]) -> Picture:
    """Draw the paper's figure: median, interquartile range and central 90 % per network."""
    panels = {}
    for name, (problem, prediction) in seen.items():
        x, middle = problem.x.flatten(), prediction.quantile(0.5).flatten()
        bands = {
            f"median, central {level:.0%}": (
                x,
                middle,
                *(end.flatten() for end in prediction.interval(level)),
            )
            for level in LEVELS[::-1]
        }
        panels[name] = bands | {"curve without noise": (x, curve(x, torch.zeros(1)))}
    caption = "Predicted values; the data are in [0, 0.5]."
    return run.curves("bands", caption, panels, xlabel="x", ylabel="y", ylim=(-1.0, 2.0))


def main(config: Config) -> dict[str, Any]:
    """Trains, predicts, prints the table, writes the results."""
    run, recipe = Run(config), RECIPES[config.preset]
    seen: dict[str, Any] = {}
    summary = run.repeat(lambda seed: one_seed(config, recipe, seen, seed), cache=False)
    pictures, record = [draw_bands(run, seen)], {"recipe": asdict(recipe), **summary}
    return run.report(__doc__, record, [results_table(summary)], pictures)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
