# SPDX-License-Identifier: Apache-2.0
"""A noisy sine by 481 random weights: four priors and likelihoods, and NUTS on the same model.

    python experiments/sine_regression.py [--preset published] [--repeats 3]

y = 10 sin(2 pi x) plus noise of sd 1 at 32 even points of [-0.5, 0.5]; a 1-20-20-1 ReLU network
predicts on [-1.5, 1.5]. On the data is |x| < 0.4, off them 0.75 < |x| < 1.5, and the truth should
lie within 2 sd of the mean for about 95 % of |x| < 0.5. ``--preset published`` has the settings of
two articles by M. Krasser:

- fixed mixture prior: https://krasserm.github.io/2019/03/14/bayesian-neural-networks/ (Keras);
- mixture prior whose pi, sigma1 and sigma2 are learned with the posterior, and a Normal prior with
  a trainable location for every weight: the same experiment in TensorFlow Probability (2019), whose
  posterior starts at the standard deviation 1 (rho = ln(e - 1)).
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
import tyro
from _helpers.run import Data, Picture, RepeatedSettings, Run
from _helpers.tables import Table, at, shown, table
from _helpers.training import Training, normal_means
from torch import Tensor

import pyro_bbb as bbb
from pyro_bbb import metrics, priors

UNIT_SCALE = math.log(math.e - 1)  # the rho at which softplus(rho) = 1


@dataclass(frozen=True)
class Problem:
    """Data of one seed, and the inputs of predictions."""

    data: Data
    x: Tensor
    noise: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, seed: int, *, even_noise: bool) -> "Problem":
        """32 points with noise of sd 1; or 512 whose noise grows from 0.2 to 2.2."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.linspace(-0.5, 0.5, 32 if even_noise else 512)[:, None]
        noise = torch.ones_like if even_noise else growing
        y = sine(x) + noise(x) * torch.randn(x.shape, generator=generator)
        return cls((x, y), torch.linspace(-1.5, 1.5, 1000)[:, None], noise)


def sine(x: Tensor) -> Tensor:
    """Return the truth without its noise."""
    return 10 * torch.sin(2 * math.pi * x)


def growing(x: Tensor) -> Tensor:
    """Return the standard deviation of the uneven noise."""
    return 0.2 + 2 * (x + 0.5)


def draw_bands(run: Run, seen: dict[str, bbb.RegressionPrediction], x: Tensor) -> Picture:
    """Plot the mean and two standard deviations, epistemic and total, a panel for each variant."""
    panels = {}
    for name, prediction in seen.items():
        mean = prediction.mean.flatten()
        panels[name] = {
            label: (x.flatten(), mean, mean - 2 * std.flatten(), mean + 2 * std.flatten())
            for label, std in (("total", prediction.std), ("epistemic", prediction.epistemic_std))
        } | {"truth": (x.flatten(), sine(x).flatten())}
    caption = "Mean and 2 sd bands. The inner band is what more data would remove."
    return run.curves("bands", caption, panels, xlabel="x", ylabel="y", ylim=(-45, 45))


Trained: TypeAlias = tuple[bbb.BayesianModel, bbb.AutoSoftplusNormal]


@dataclass(frozen=True)
class Recipe(Training):
    """Hyper-parameters of one variant's training."""

    prior: str  # name of the prior in `pyro_bbb.priors`
    options: dict[str, float]  # its arguments
    init_sd: float  # standard deviation of the initial means
    init_rho: float  # initial rho; standard deviations are softplus(rho)
    epochs: int = 1500  # full-batch steps
    learns_noise: bool = False
    """Whether the network has a second output, the noise's scale at each input."""


_OURS = dict(init_sd=1.0, init_rho=-5.0, lr=0.05, num_particles=5)
_TFP = dict(init_sd=0.0, init_rho=UNIT_SCALE, lr=0.03, lr_schedule="constant")
_MIXTURE = {"pi": 0.75, "sigma1": 1.5, "sigma2": 0.5}
_LEARNED = {"pi": 0.2, "sigma1": 1.0, "sigma2": 0.1}

RECIPES: dict[str, dict[str, Recipe]] = {
    "published": {
        "fixed mixture": Recipe(
            "scale_mixture",
            {"pi": 0.5, "sigma1": 1.5, "sigma2": 0.1},
            init_sd=math.sqrt(0.5 * 1.5**2 + 0.5 * 0.1**2),
            init_rho=0.0,
            lr=0.08,
            lr_schedule="constant",
        ),
        "learned mixture": Recipe("learned_scale_mixture", _LEARNED, **_TFP),
        "trainable location": Recipe("learned_normal", {"scale": 1.0}, **_TFP),
    },
    "ours": {
        "fixed mixture": Recipe("scale_mixture", _MIXTURE, **_OURS),
        "learned mixture": Recipe("learned_scale_mixture", _LEARNED, **_OURS),
        "trainable location": Recipe("learned_normal", {"scale": 1.0}, **_OURS),
        "learned noise": Recipe(
            "scale_mixture",
            _MIXTURE,
            learns_noise=True,
            epochs=3000,
            **_OURS | {"init_sd": 0.3, "lr": 0.02, "num_particles": 2},
        ),
    },
}


@dataclass(frozen=True)
class Config(RepeatedSettings):
    """Settings of one run."""

    preset: Literal["published", "ours"] = "ours"
    """Name of the recipes."""
    samples: int = 500
    """Networks drawn from the posterior for each prediction."""
    nuts_samples: int = 250
    """Draws of NUTS in each of 4 chains, after as many of warm-up; 0 leaves NUTS out."""
    workers: int = 2
    """Processes for the chains of NUTS."""


def make_model(recipe: Recipe, num_data: int) -> bbb.BayesianModel:
    """Return the network and what it predicts."""
    sizes = [1, 20, 20, 2 if recipe.learns_noise else 1]
    network = bbb.BayesianMLP(sizes, prior=priors.make(recipe.prior, **recipe.options))
    noisy = bbb.likelihoods.HeteroscedasticGaussian()
    likelihood = noisy if recipe.learns_noise else bbb.likelihoods.Gaussian(scale=1.0)
    return bbb.BayesianModel(network, likelihood, num_data=num_data)


def train(recipe: Recipe, problem: Problem, seed: int, epochs: int) -> Trained:
    """Train a model and guide."""
    torch.manual_seed(seed)
    model = make_model(recipe, len(problem.data[0]))
    start = normal_means(recipe.init_sd)
    guide = bbb.AutoSoftplusNormal(model, init_loc=start, init_rho=recipe.init_rho)
    recipe.fit(
        model, guide, problem.data, epochs=epochs, batch_size=len(problem.data[0]), seed=seed
    )
    return model, guide


def score(prediction: bbb.RegressionPrediction, problem: Problem) -> dict[str, float]:
    """Compute epistemic sd on and off the data, coverage and errors."""
    distance = problem.x.abs().flatten()
    inside, truth = distance < 0.5, sine(problem.x)
    low, high = (prediction.mean + k * prediction.std for k in (-2, 2))
    on, off = (
        float(prediction.epistemic_std[where].mean()) for where in (distance < 0.4, distance > 0.75)
    )
    return {
        "epistemic_sd_on_data": on,
        "epistemic_sd_off_data": off,
        "ratio": off / on,
        "coverage_of_truth": metrics.coverage(low[inside], high[inside], truth[inside]),
        "rmse_to_truth": metrics.rmse(prediction.mean[inside], truth[inside]),
        "noise_sd_error": metrics.rmse(
            prediction.aleatoric_std[inside], problem.noise(problem.x)[inside]
        ),
    }


def run_seed(config: Config, seed: int, seen: dict[str, Any]) -> dict[str, Any]:
    """Every variant with one seed's data; ``seen`` collects the first seed's predictions."""
    results: dict[str, Any] = {}
    for name, recipe in RECIPES[config.preset].items():
        problem = Problem.of(seed, even_noise=not recipe.learns_noise)
        trained = train(recipe, problem, seed, 20 if config.smoke else recipe.epochs)
        prediction = bbb.predict(*trained, problem.x, num_samples=config.samples, seed=seed)
        results[name] = score(prediction, problem)
        for prior in trained[0].modules():
            if isinstance(prior, priors.LearnedScaleMixture):
                values = {"pi": prior.pi, "sigma1": prior.sigma1, "sigma2": prior.sigma2}
                results[name] |= {key: value.item() for key, value in values.items()}
        seen.setdefault(name, prediction)
    return results


def run_nuts(config: Config) -> tuple[dict[str, Any], bbb.RegressionPrediction]:
    """Return the exact posterior of the first variant's model, and how well its chains agree."""
    problem = Problem.of(config.seed, even_noise=True)
    model = make_model(next(iter(RECIPES[config.preset].values())), len(problem.data[0]))
    samples = 5 if config.smoke else config.nuts_samples
    chains = bbb.run_nuts(
        model.double(),
        tuple(values.double() for values in problem.data),
        num_samples=samples,
        warmup_steps=samples,
        num_chains=2 if config.smoke else 4,
        num_workers=1 if config.smoke else config.workers,
        max_tree_depth=3 if config.smoke else 8,
        seed=config.seed,
    )
    prediction = bbb.predict(model, chains, problem.x.double(), num_samples=4 * samples)
    functions = prediction.sample_means.flatten(1).unflatten(0, chains.diverging.shape)
    r_hat = replace(chains, by_chain={"y": functions}).r_hat()["y"]  # weights are interchangeable
    diagnostics = {
        "max_r_hat": float(r_hat.max()),
        "diverging": int(chains.diverging.sum()),
        "seconds": chains.seconds,
    }
    return score(prediction, problem) | diagnostics, prediction


def results_table(summary: dict[str, Any], nuts: dict[str, Any]) -> Table:
    """One row per variant."""
    columns = (
        ("epistemic sd on the data", "epistemic_sd_on_data", 1, 2),
        ("off the data", "epistemic_sd_off_data", 1, 2),
        ("ratio", "ratio", 1, 2),
        ("coverage of 2 sd (%)", "coverage_of_truth", 100, 2),
        ("error of the noise sd", "noise_sd_error", 1, 2),
    )
    variants = {name: at(summary, name) for name in summary["mean"]}
    variants |= {"NUTS, fixed mixture": {"mean": nuts}} if nuts else {}
    return table("variant", variants, columns)


def mixture_table(summary: dict[str, Any]) -> Table:
    """Tabulate the learned prior."""
    start = [f"{_LEARNED[key]:.2f}" for key in ("pi", "sigma1", "sigma2")]
    end = [shown(summary, "learned mixture", key, factor=1) for key in ("pi", "sigma1", "sigma2")]
    columns = ("mixture prior", "pi", "sigma 1", "sigma 2")
    return Table(columns, [("at the start", *start), ("learned", *end)])


def main(config: Config) -> dict[str, Any]:
    """Train, compare with NUTS, print the tables, write the results."""
    run = Run(config)
    seen: dict[str, Any] = {}
    summary = run.repeat(lambda seed: run_seed(config, seed, seen), cache=False)
    nuts, exact = run_nuts(config) if config.nuts_samples else ({}, None)
    recipes = {name: asdict(recipe) for name, recipe in RECIPES[config.preset].items()}
    seen |= {"NUTS, fixed mixture": exact} if nuts else {}
    pictures = [draw_bands(run, seen, Problem.of(config.seed, even_noise=True).x)]
    tables = [results_table(summary, nuts), mixture_table(summary)]
    metrics = {"recipe": recipes, **summary, "nuts": nuts}
    return run.report(__doc__, metrics, tables, pictures)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
