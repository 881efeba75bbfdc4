# SPDX-License-Identifier: Apache-2.0
"""The pictures of ``docs/questions``, each of a symptom.

    python docs/question_figures.py            # all, in some minutes
    python docs/question_figures.py elbo memory

writes ``docs/images/question_NAME.png`` for each name. ``memory`` needs Unix.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pyro.distributions import Normal
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn

import pyro_bbb as bbb
from pyro_bbb import plots
from pyro_bbb.likelihoods import Categorical, Gaussian

Posterior: TypeAlias = tuple[bbb.BayesianModel, Any]
Unit: TypeAlias = Callable[[Tensor], Tensor]
IMAGES = Path(__file__).parent / "images"
GRID = torch.linspace(-3.5, 3.5, 200)[:, None]
NOISE = 0.1  # standard deviation of the curve's targets


def truth(x: Tensor) -> Tensor:
    """Return the curve behind the data."""
    return torch.sin(2 * x) + 0.5 * x


def same(x: Tensor) -> Tensor:
    """Return inputs in the unit of the curve."""
    return x


def far(x: Tensor) -> Tensor:
    """Return inputs in a unit in which they are far from 0 and 1."""
    return 500 + 100 * x


@cache
def curve() -> tuple[Tensor, Tensor]:
    """80 points of a curve, with a gap between two halves."""
    x = torch.cat([torch.linspace(-2, -0.7, 40), torch.linspace(0.7, 2, 40)])[:, None]
    return x, truth(x) + NOISE * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))


@cache
def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test digits."""
    x, y = (torch.tensor(each) for each in load_digits(return_X_y=True))
    return bbb.data.split(x.float() / 16, y, fraction=0.25, seed=0)


def trained(
    sizes: Sequence[int],
    likelihood: Any,
    data: tuple[Tensor, Tensor],
    *,
    guide: str = "softplus_normal",
    activation: type[nn.Module] = nn.ReLU,
    init: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[bbb.BayesianModel, Any, bbb.History]:
    """Return a trained model and guide, and the record of the training."""
    torch.manual_seed(0)
    network = bbb.BayesianMLP(list(sizes), activation=activation)
    model = bbb.BayesianModel(network, likelihood, num_data=len(data[0]))
    made = bbb.guides.make(guide, model, **(init or {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # symptoms are to be shown
        history = bbb.fit(model, made, data, **{"progress": False, "seed": 0} | options)
    return model, made, history


def of_curve(noise: float = NOISE, unit: Unit = same, **options: Any) -> Posterior:
    """Return a posterior of the curve, with inputs in another unit."""
    x, y = curve()
    options = {"epochs": 1000, "batch_size": 80, "activation": nn.Tanh} | options
    return trained([1, 50, 1], Gaussian(noise), (unit(x), y), **options)[:2]


def of_digits(**options: Any) -> tuple[bbb.BayesianModel, Any, bbb.History]:
    """Return a posterior of digits."""
    return trained([64, 100, 10], Categorical(), digits()[0], **{"epochs": 60} | options)


def bands(figure: Figure, posteriors: dict[str, Posterior], units: Sequence[Unit]) -> None:
    """Draw the bands of several posteriors of the curve, with one legend."""
    rows = figure.subplots(1, len(posteriors), sharey=True)
    for ax, (title, posterior), unit in zip(rows, posteriors.items(), units, strict=True):
        prediction = bbb.predict(*posterior, unit(GRID), seed=0)
        plots.regression_band(ax, GRID, prediction, data=curve(), truth=truth(GRID))
        ax.set(title=title, ylabel="", xlabel="x", xlim=(-3.5, 3.5), ylim=(-3, 3))
    rows[0].set_ylabel("y")
    figure.legend(*rows[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)


def it_does_not_work(figure: Figure) -> None:
    """Draw four posteriors of one curve: three that do not work, and one that does."""
    figure.set_size_inches(8, 2.7)
    posteriors = {
        "a constant": of_curve(unit=far),
        "data missed": of_curve(epochs=40),
        "too narrow": of_curve(noise=0.02),
        "as it should be": of_curve(),
    }
    bands(figure, posteriors, [far, same, same, same])


def elbo(figure: Figure) -> None:
    """Draw the parts of three losses."""
    figure.set_size_inches(8, 2.9)
    warm_up = bbb.KLSchedule(warmup_epochs=30)
    histories = {
        "steps too small": of_digits(lr=1e-3)[2],
        "collapsed to the prior": of_digits(init={"init_rho": 0.5})[2],
        "warm-up of the KL: normal": of_digits(kl_schedule=warm_up)[2],
    }
    for ax, (title, history) in zip(
        figure.subplots(1, 3, sharey=True), histories.items(), strict=True
    ):
        plots.loss_parts(ax, history).get_legend().remove()
        ax.set(title=title)
        ax.label_outer()
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def accuracy(figure: Figure) -> None:
    """Draw accuracies against the temperature."""
    figure.set_size_inches(6, 3.2)
    (x, y), temperatures = digits()[1], (1.0, 0.3, 0.1, 0.03, 0.01)
    names = ("100 draws together", "mean network", "one draw")
    scores: dict[str, list[float]] = {name: [] for name in (*names, "spread")}
    for temperature in temperatures:
        model, guide, _ = of_digits(kl_schedule=bbb.KLSchedule(temperature=temperature))
        prediction = bbb.predict(model, guide, x, seed=0)
        each = torch.tensor([bbb.metrics.accuracy(p, y) for p in prediction.sample_probs])
        mean = bbb.predict_mean(model, guide, x)
        found = [bbb.metrics.accuracy(p.probs, y) for p in (prediction, mean)]
        for name, value in zip(
            scores, [*found, float(each.mean()), float(each.std())], strict=True
        ):
            scores[name].append(value)
    model, guide, _ = of_digits(guide="delta")
    plain = bbb.metrics.accuracy(bbb.predict_mean(model, guide, x).probs, y)
    ax = figure.subplots()
    ax.axhline(plain, color=plots.BLACK, linestyle=":", label="MAP, without a posterior")
    for name, marker in zip(names[:2], "os", strict=True):
        ax.plot(temperatures, scores[name], f"{marker}-", markersize=5, label=name)
    ax.errorbar(temperatures, scores[names[2]], scores["spread"], fmt="^-", label="one draw, ± sd")
    ax.set(xscale="log", xlabel="temperature", ylabel="accuracy of test digits")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.legend()


def kl_weight(figure: Figure) -> None:
    """Draw posteriors of one curve at four weights of the KL."""
    figure.set_size_inches(8, 2.7)
    each_batch = {"kl_schedule": lambda batch, batches: 1.0, "batch_size": 2, "epochs": 50}
    weights = {"the KL 40 times": each_batch, "temperature 1": {}}
    for temperature in (0.1, 0.001):
        schedule = bbb.KLSchedule(temperature=temperature)
        weights[f"temperature {temperature}"] = {"kl_schedule": schedule}
    posteriors = {title: of_curve(**options) for title, options in weights.items()}
    bands(figure, posteriors, [same] * len(weights))


def prior_scales(figure: Figure) -> None:
    """Draw mixtures, and functions of networks whose weights are drawn from them."""
    figure.set_size_inches(8, 4.6)
    scales = ((1.0, 0.0025), (1.0, 0.1), (0.1, 0.0025))
    densities, functions = figure.subplots(2, 3, sharey="row")
    for upper, lower, (sigma1, sigma2) in zip(densities, functions, scales, strict=True):
        prior = bbb.ScaleMixtureNormal(pi=0.5, sigma1=sigma1, sigma2=sigma2)
        plots.prior_density(upper, prior).get_legend().remove()
        upper.set(title=f"$\\sigma_1$ = {sigma1:g}, $\\sigma_2$ = {sigma2:g}", ylabel="")
        upper.set(ylim=(1e-3, 300))
        network = bbb.BayesianMLP([1, 50, 50, 1], prior=prior, activation=nn.Tanh)
        torch.manual_seed(0)
        for _ in range(12):
            lower.plot(GRID, network(GRID).detach(), color=plots.BLUE, linewidth=1, alpha=0.7)
        lower.set(xlabel="x", ylim=(-15, 15))
    densities[0].set_ylabel("density of a weight")
    functions[0].set_ylabel("functions of the prior")


def image_folder(figure: Figure) -> None:
    """Draw two digits as in training and as they come from elsewhere, with their answers."""
    figure.set_size_inches(8, 1.7)
    cold = bbb.KLSchedule(temperature=0.1)
    model, guide, _ = of_digits(epochs=100, kl_schedule=cold)
    digit = digits()[1][0][3:5].view(-1, 1, 8, 8)
    small = nn.functional.interpolate(digit, size=5, mode="area")
    kinds = {
        "as in training": digit,
        "dark on light": 1 - digit,
        "another size": nn.functional.pad(small, (1, 2, 1, 2)),
        "turned": digit.rot90(1, (2, 3)),
    }
    axes = figure.subplots(1, 8)
    for i, (ax, (kind, images)) in enumerate(zip(axes, 2 * list(kinds.items()), strict=True)):
        image = images[i // 4]
        ax.imshow(image[0], cmap="gray", vmin=0, vmax=1)
        answer = bbb.predict(model, guide, image.reshape(1, 64), seed=0)
        ax.set_title(kind, fontweight="normal", loc="center", fontsize="small")
        ax.set_xlabel(f"{answer.label.item()}, {answer.confidence.item():.0%}")
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set(visible=True, color="0.7")


def intervals(figure: Figure) -> None:
    """Draw the coverage of three kinds of intervals of the diabetes data."""
    figure.set_size_inches(8, 3)
    patients, progression = (torch.tensor(each).float() for each in load_diabetes(return_X_y=True))
    x, y = bbb.data.standardize(patients)[0], bbb.data.standardize(progression[:, None])[0]
    train, (x_test, y_test) = bbb.data.split(x, y, fraction=0.3, seed=0)
    fits = {"fixed": Gaussian(0.25), "learned": Gaussian.learned()}
    posterior = {name: trained([10, 20, 1], fits[name], train, epochs=400)[:2] for name in fits}
    at = {name: bbb.predict(*posterior[name], x_test, seed=0) for name in fits}
    spread = Normal(at["learned"].mean, at["learned"].epistemic_std).cdf(y_test)
    levels = {
        "spread of the draws alone": spread,
        "noise fixed, too small": at["fixed"].cdf(y_test),
        "noise learned": at["learned"].cdf(y_test),
    }
    for ax, (title, pit) in zip(figure.subplots(1, 3, sharey=True), levels.items(), strict=True):
        plots.coverage(ax, pit).set(title=title, aspect="equal", xticks=[0, 0.5, 1])
        ax.label_outer()


def uncertainty_everywhere_the_same(figure: Figure) -> None:
    """Draw the epistemic uncertainty of four posteriors of one curve against the input."""
    figure.set_size_inches(6.5, 3.3)
    ax = figure.subplots()
    low, high = curve()[0][39].item(), curve()[0][40].item()
    for ends in ((-2.0, low), (high, 2.0)):
        ax.axvspan(*ends, color="0.9", label="data" if ends[0] == -2.0 else None)
    ax.axhline(NOISE, color=plots.BLACK, linestyle=":", label="noise, known")
    posteriors = {
        "softplus_normal, 40 epochs": predicted(of_curve(epochs=40)),
        "softplus_normal, 1,000 epochs": predicted(of_curve()),
        "Laplace, by the tangent": predicted(of_curve(guide="laplace"), linearized=True),
        "100 chains": predicted(chains()),
    }
    for (name, prediction), style in zip(posteriors.items(), (":", "-", "--", "-."), strict=True):
        ax.plot(GRID, prediction.epistemic_std, style, linewidth=2, label=name)
    ax.set(yscale="log", xlabel="x", ylabel="epistemic sd", xlim=(-3.5, 3.5))
    plain_ticks(ax, (0.02, 0.05, 0.1, 0.2, 0.5))
    figure.legend(loc="outside right upper")


def plain_ticks(ax: Axes, values: Sequence[float]) -> None:
    """Label a logarithmic axis at these values alone."""
    ax.set_yticks(values, [f"{value:g}" for value in values])
    ax.set_yticks([], minor=True)


def predicted(posterior: Posterior, **options: Any) -> Any:
    """Return the prediction of a posterior on the grid."""
    return bbb.predict(*posterior, GRID, seed=0, **options)


def chains() -> Posterior:
    """Return a hundred short chains of the curve's posterior."""
    network = bbb.BayesianMLP([1, 50, 1], activation=nn.Tanh)
    model = bbb.BayesianModel(network, Gaussian(NOISE), num_data=80)
    many = {"num_chains": 100, "warmup_steps": 4000, "num_samples": 10, "thin": 50}
    options = {"lr": 5e-5, "momentum": 0.99, "batch_size": 80, "progress": False, "seed": 0}
    return model, bbb.run_sgmcmc(model, curve(), **many, **options)


def memory(figure: Figure) -> None:
    """Draw the largest memory of a training of one network in several ways."""
    figure.set_size_inches(7, 2.8)
    ways: dict[str, dict[str, Any]] = {
        "delta (MAP)": {"guide": "delta"},
        "softplus_normal": {},
        "last layer random": {"where": "8"},
        "num_particles=8": {"num_particles": 8},
        "batch_size=256": {"batch_size": 256},
        "batch_size=32, accumulate=8": {"accumulate": 8},
    }
    spawn = multiprocessing.get_context("spawn")  # a process each, as a maximum never falls
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        peaks = [pool.submit(peak_of_training, **options).result() for options in ways.values()]
    ax = figure.subplots()
    colors = [plots.BLUE if name.startswith("soft") else plots.SKY for name in ways]
    bars = ax.barh(list(ways), peaks, color=colors)
    ax.bar_label(bars, [f"{peak:,.0f}" for peak in peaks], padding=3, fontsize="small")
    ax.set(xlabel="memory of a training (MB)")
    ax.margins(x=0.1)
    ax.invert_yaxis()


def peak_of_training(
    guide: str = "softplus_normal", where: str | None = None, batch_size: int = 32, **options: Any
) -> float:
    """Return the largest memory of a training above that of the process before it, in MB."""
    import resource  # of Unix alone

    x, y = torch.rand(512, 3, 64, 64), torch.randint(10, (512,))
    of_curve(epochs=1)  # loads what the first training of a process loads
    plain = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8), nn.Flatten()),
        *(nn.Linear(1024, 4000), nn.ReLU(), nn.Linear(4000, 1000), nn.ReLU()),
        nn.Linear(1000, 10),
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = bbb.BayesianModel(bbb.bayesianize(plain, where=where), Categorical(), num_data=512)
    made = bbb.guides.make(guide, model)
    bbb.fit(model, made, (x, y), epochs=1, batch_size=batch_size, progress=False, **options)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit


def reproducible(figure: Figure) -> None:
    """Draw the NLL of one posterior by seeds of the prediction, and of several trainings."""
    figure.set_size_inches(7, 3)
    x, y = digits()[1]
    posteriors = [of_digits(seed=seed)[:2] for seed in range(10)]
    draws = (1, 3, 10, 30, 100, 300)
    ax = figure.subplots()
    for at, number in enumerate(draws):
        values = [nll(posteriors[0], x, y, number, seed) for seed in range(20)]
        ax.plot([at] * 20, values, "o", color=plots.BLUE, markersize=4, alpha=0.5)
    values = [nll(posterior, x, y, 300, 0) for posterior in posteriors]
    ax.plot([len(draws)] * 10, values, "s", color=plots.ORANGE, markersize=4, alpha=0.7)
    ax.set_xticks(range(len(draws) + 1), [*map(str, draws), "300,\n10 trainings"])
    ax.set(xlabel="draws of a prediction", ylabel="NLL of test digits (nats)", yscale="log")
    plain_ticks(ax, (0.2, 0.3, 0.4, 0.6))
    ax.plot([], [], "o", color=plots.BLUE, label="one training, 20 seeds of predict")
    ax.plot([], [], "s", color=plots.ORANGE, label="10 seeds of fit, one of predict")
    ax.legend()


def nll(posterior: Posterior, x: Tensor, y: Tensor, num_samples: int, seed: int) -> float:
    """Return the NLL of a prediction."""
    prediction = bbb.predict(*posterior, x, num_samples=num_samples, seed=seed)
    return bbb.metrics.nll(prediction.probs, y)


PICTURES: dict[str, Callable[[Figure], None]] = {
    each.__name__: each
    for each in (
        it_does_not_work,
        elbo,
        accuracy,
        kl_weight,
        prior_scales,
        image_folder,
        intervals,
        uncertainty_everywhere_the_same,
        memory,
        reproducible,
    )
}


def main(names: Sequence[str]) -> None:
    """Draw the pictures of these names, or all."""
    for name in names or PICTURES:
        with plots.style():
            figure = Figure(layout="constrained")
            PICTURES[name](figure)
            figure.savefig(IMAGES / f"question_{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
