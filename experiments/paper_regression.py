# SPDX-License-Identifier: Apache-2.0
"""Regression with predictive bands: Figure 5 of Blundell et al. (2015).

    python experiments/paper_regression.py --repeats 3

The data of "Weight Uncertainty in Neural Networks" (https://arxiv.org/abs/1505.05424), section 5.2:
y = x + 0.3 sin(2 pi (x + e)) + 0.3 sin(4 pi (x + e)) + e with e from N(0, 0.02^2), x in [0, 0.5],
predictions on [-0.2, 1.2]. The figure shows the median and the interquartile range of a Bayes by
Backprop network's predictions, and of a plain network of the same shape and loss; so do we, with
the central 90 % as well. A third answer is an ensemble of five plain networks from different
starts. All predict a Normal whose standard deviation is one learned number (in truth the noise
differs from input to input, as e is inside the sines).

The paper says nothing of the network's size, the number of points, prior or training. ``--preset
published`` fills in 500 points, the two layers of 100 units of its bandit (section 5.3), the middle
of its grid of mixture priors (pi = 1/2, -ln sigma1 = 0, -ln sigma2 = 6), one draw per step.

``--preset ours`` (the default) has smaller layers, a prior of wider components, 5 draws per step,
and the inputs stretched so that the data lie on [-1, 1]. Tried on the data of seed 0, with the
negative ELBO after 2,000 steps: (pi, sigma1, sigma2) = (.75, 1.5, .5) -457 nats, (.5, 1, .3) -467,
and the former on inputs as they are -493. With two outputs, so that the noise depends on the input,
and inputs as they are: (.75, 1.5, .5) -492, (.5, 1, .3) -531, (.5, 1.5, .1) -116; one draw in place
of 5 -222, initial means of sd 1 in place of 0.3 +865, 2x50 units +600, 2x100 +2,396. Of those that
fit alike, the one taken is the one that is least sure beyond the data; learned noise that depends
on the input was given up because beyond the data it is anything.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
import tyro
from _helpers.plain_regression import Plain, predict_plain
from _helpers.repeats import repeat, shown
from _helpers.run import Data, Picture, RepeatedSettings, Run, Section, Table
from _helpers.training import Training, normal_means
from torch import Tensor
from torch.distributions import Normal

import pyro_bbb as bbb
from pyro_bbb import plots

BAYES, PLAIN, ENSEMBLE = "Bayes by Backprop", "plain network", "ensemble of 5"
NETWORKS = (BAYES, PLAIN, ENSEMBLE)
LEVELS = (0.5, 0.9)


@dataclass(frozen=True)
class Recipe(Training):
    """The data, the network and its training."""

    units: tuple[int, ...]
    """Units of the hidden layers."""
    prior: tuple[float, float, float]
    """pi, sigma1 and sigma2 of the mixture prior."""
    init_sd: float | None
    """Spread of the initial means; None is He's, by fan-in."""
    shift: float = 0.0
    """Subtracted from the inputs before they are..."""
    stretch: float = 1.0
    """...multiplied by this."""
    init_rho: float = -5.0
    """Initial rho; standard deviations are softplus(rho)."""
    steps: int = 3000
    """Steps on all data at once."""
    points: int = 500
    """Number of data."""
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
    output: Path = Path("results/paper_regression")
    """Folder for results."""


def curve(x: Tensor, noise: Tensor) -> Tensor:
    """The paper's curve: y at the inputs ``x`` for the given values of its noise e."""
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
        """Inputs uniform in [0, 0.5]; 2,000 fresh ones."""
        generator = torch.Generator().manual_seed(seed)
        inputs = [0.5 * torch.rand(count, 1, generator=generator) for count in (points, 2000)]
        train, fresh = ((x, observe(x, generator)) for x in inputs)
        return cls(train, fresh, torch.linspace(-0.2, 1.2, 561)[:, None])


def make_model(recipe: Recipe) -> bbb.BayesianModel:
    """The network with random weights, and the Normal that it predicts."""
    network = bbb.BayesianMLP([1, *recipe.units, 1], prior=bbb.ScaleMixtureNormal(*recipe.prior))
    return bbb.BayesianModel(network, bbb.likelihoods.Gaussian.learned(), recipe.points)


def train(recipe: Recipe, data: Data, seed: int, steps: int) -> tuple[Any, Any, bbb.History]:
    """Bayes by Backprop."""
    torch.manual_seed(seed)
    model, sd = make_model(recipe), recipe.init_sd
    start = "he" if sd is None else normal_means(sd)
    guide = bbb.AutoSoftplusNormal(model, init_loc=start, init_rho=recipe.init_rho)
    scaled = recipe.inputs(data[0]), data[1]
    options = {"epochs": steps, "batch_size": recipe.points, "seed": seed}
    return model, guide, recipe.fit(model, guide, scaled, **options)


def train_plain(recipe: Recipe, data: Data, seed: int, steps: int) -> Plain:
    """By the same loss without the KL."""
    torch.manual_seed(seed)
    network, x, y = Plain(recipe.units), recipe.inputs(data[0]), data[1]
    optimiser = torch.optim.Adam(network.parameters(), lr=recipe.plain_lr)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        (-network(x).log_prob(y).mean()).backward()
        optimiser.step()
        cosine.step()
    return network


def width(prediction: bbb.RegressionPrediction, level: float = 0.5) -> Tensor:
    """Compute the width of the central interval; by default the interquartile range."""
    low, high = prediction.interval(level)
    return high - low


def score(
    at: bbb.RegressionPrediction, fresh: bbb.RegressionPrediction, problem: Problem, seed: int
) -> dict[str, Any]:
    """Compute epistemic sd, interval widths, coverage and NLL on and off the data."""
    x = problem.x.flatten()
    on, off = (x > 0.05) & (x < 0.45), (x < -0.05) | (x > 0.55)
    beyond = (x < 0) | (x > 0.5)
    y = observe(problem.x, torch.Generator().manual_seed(1000 + seed))
    epistemic, quartiles = at.epistemic_std.flatten(), width(at).flatten()
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
    plain = [train_plain(recipe, problem.train, 100 * seed + i, steps) for i in range(5)]
    predictions = {
        BAYES: lambda x: bbb.predict(model, guide, x, num_samples=samples, seed=seed),
        PLAIN: lambda x: predict_plain(plain[:1], x),
        ENSEMBLE: lambda x: predict_plain(plain, x),
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
        "network",
        "epistemic sd on the data",
        "off",
        "interquartile range on the data",
        "off",
        "coverage (%) of 50 % on the data",
        "in 90 %",
        "in 90 %, off the data",
        "NLL (nats)",
    )
    rows = []
    for name in NETWORKS:
        cells = [
            shown(summary, name, key, where, factor=1, digits=3)
            for key in ("epistemic_sd", "interquartile")
            for where in ("on", "off")
        ]
        keys = (("50", "on"), ("90", "on"), ("90", "off"))
        cells += [shown(summary, name, "coverage", *key, digits=1) for key in keys]
        rows.append((name, *cells, shown(summary, name, "nll", factor=1, digits=3)))
    return Table(columns, rows)


def draw_bands(run: Run, seen: dict[str, Any]) -> Picture:
    """The paper's figure: median, interquartile range and more, one panel per network."""
    with plots.style():
        figure, axes = plt.subplots(1, 3, sharex=True, sharey=True, figsize=(10.5, 3.8))
        for ax, (name, (problem, prediction)) in zip(axes, seen.items(), strict=True):
            x = problem.x.flatten()
            for level, colour, label in ((0.9, plots.SKY, "90 %"), (0.5, plots.BLUE, "50 %")):
                low, high = (end.flatten() for end in prediction.interval(level))
                text = f"central {label}"
                ax.fill_between(x, low, high, color=colour, alpha=0.45, lw=0, label=text)
            ax.plot(x, prediction.quantile(0.5), color=plots.BLUE, label="median")
            truth = curve(problem.x, torch.zeros(1))
            ax.plot(x, truth, "k--", lw=1.0, label="curve without noise")
            ax.plot(*problem.train, "x", color=plots.VERMILLION, ms=2.5, mew=0.6, label="data")
            ax.set(xlabel="x", xlim=(-0.2, 1.2), ylim=(-1.0, 2.0))
            off = float(width(prediction).flatten()[x > 0.55].mean())
            ax.set_title(f"{name}: quartiles {off:.2f} apart beyond", fontsize=9)
        axes[0].set_ylabel("y")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    caption = (
        "Median, interquartile range and central 90 % of the predicted values. Above: the mean "
        "interquartile range right of x = 0.55."
    )
    return run.picture(figure, "bands", caption)


def draw_widths(run: Run, seen: dict[str, Any]) -> Picture:
    """Plot the interquartile range by x, and the true law's."""
    with plots.style():
        figure, ax = plt.subplots(figsize=(5.6, 3.4))
        for (name, (problem, prediction)), line in zip(
            seen.items(), ("-", "--", "-."), strict=True
        ):
            ax.plot(problem.x, width(prediction), line, label=name)
        ends = Normal(0.0, 0.02).icdf((torch.arange(2000) + 0.5) / 2000)
        values = curve(problem.x, ends)  # [n, 2000]
        quartiles = values.quantile(torch.tensor([0.25, 0.75]), dim=1)
        ax.plot(problem.x, quartiles[1] - quartiles[0], "k:", lw=1.4, label="true law")
        ax.axvspan(0, 0.5, color="0.92", zorder=0)
        ax.set(xlabel="x", ylabel="interquartile range", yscale="log", xlim=(-0.2, 1.2))
        ax.set_title("As wide as the noise on the data, wider beyond")
        figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return run.picture(figure, "widths", "The shaded range has data.")


def main(config: Config) -> dict[str, Any]:
    """Trains, predicts, prints the table, writes the results."""
    run, recipe = Run(config), RECIPES[config.preset]
    seen: dict[str, Any] = {}
    summary = repeat(lambda seed: one_seed(config, recipe, seen, seed), config.seed, config.repeats)
    record = run.finish({"recipe": asdict(recipe), **summary})
    table = results_table(summary)
    text = (
        "On the data: the mean over 0.05 < x < 0.45; off the data: over x < -0.05 and x > 0.55. "
        "The truth: 2,000 fresh values on the data, and one at each of 360 inputs beyond "
        "[0, 0.5]. NLL is of the fresh values on the data. One network has no epistemic "
        f"uncertainty at all; the Bayesian one's is {shown(summary, 'ratio', factor=1, digits=1)} "
        "times as large off the data as on them. ± is the standard deviation over seeds."
    )
    pictures = [draw_bands(run, seen), draw_widths(run, seen)]
    sections = [Section("Many curves fit the data", text, [table], pictures)]
    run.report("Regression and extrapolation", SUMMARY, sections, record)
    return record


SUMMARY = (
    "Figure 5 of Blundell et al. (2015). Beyond its data a plain network picks one curve and is "
    "sure of it; the Bayesian one says that there are many."
)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
