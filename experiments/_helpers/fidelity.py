# SPDX-License-Identifier: Apache-2.0
"""Small problems that NUTS can solve, and distances between two posteriors' predictions."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
import torch
from pyro.distributions import LogNormal, Normal
from scipy.stats import wasserstein_distance
from sklearn.datasets import load_breast_cancer, load_diabetes
from torch import Tensor, nn

import pyro_bbb as bbb
from _helpers.repeats import over
from _helpers.run import Data, Picture, Run, Table
from _helpers.scores import scores
from pyro_bbb import metrics, plots
from pyro_bbb.prediction import GaussianPrediction

Array: TypeAlias = npt.NDArray[np.float64]
LEVEL = 0.9
SHIFT = 3.0
MOVED = "move of every measurement from its mean (sd)"


@dataclass(frozen=True)
class Problem:
    """A data set, a model of it, and the inputs at which posteriors are compared."""

    title: str
    text: str
    train: Data
    test: Data
    """Held-out examples from where the training data are."""
    far: Tensor
    """Inputs from where there are none, ``[n, features]``."""
    path: Tensor
    """Inputs along a line, for the picture."""
    at: Tensor
    """Their position on the line, ``[n]``."""
    labels: tuple[str, str]
    """Labels of the figure's axes."""
    make_model: Callable[[], bbb.BayesianModel]


def sine(seed: int) -> Problem:
    """10 sin(2 pi x) with noise of sd 1, as in the Keras and TFP articles of 2019."""
    generator = torch.Generator().manual_seed(seed)

    def noisy(x: Tensor) -> Data:
        y = 10 * torch.sin(2 * math.pi * x)
        return x, y + torch.randn(x.shape, generator=generator)

    prior = {
        "fc1.weight": Normal(0.0, 5.0),
        "fc1.bias": Normal(0.0, 3.0),
        "fc2.*": Normal(0.0, 2.0),
    }
    train = noisy(torch.linspace(-0.5, 0.5, 32)[:, None])
    test = noisy(torch.rand(200, 1, generator=generator) - 0.5)
    path = torch.linspace(-1.5, 1.5, 121)[:, None]
    return Problem(
        title="Sine",
        text="y = 10 sin(2 pi x) + N(0, 1), 32 points on [-0.5, 0.5]; off the data is the rest of "
        "[-1.5, 1.5]. 1-20-1, tanh; weights and biases N(0, 5) and N(0, 3) in the first "
        "layer, N(0, 2) in the second (standard deviations); the noise is known.",
        train=train,
        test=test,
        far=path[path.abs().flatten() > 0.5],
        path=path,
        at=path.flatten(),
        labels=("x", "f(x)"),
        make_model=lambda: _model([1, 20, 1], prior, bbb.likelihoods.Gaussian(1.0), train),
    )


def diabetes(seed: int) -> Problem:
    """Scikit-learn's diabetes set: progression of the disease from ten measurements."""
    x, y = load_diabetes(return_X_y=True)
    train, test = _standardised(x, y, seed)
    mean, sd = train[1].mean(), train[1].std()
    train, test = ((inputs, (targets - mean) / sd) for inputs, targets in (train, test))
    path, at = _line(x.shape[1], seed)
    likelihood = bbb.likelihoods.Gaussian
    return Problem(
        title="Diabetes",
        text="Progression of the disease from 10 measurements, all standardised; 332 patients to "
        "train, 110 to test. Off the data every measurement of a test patient is moved by "
        f"{SHIFT:g} standard deviations, up or down at random. 10-8-1, tanh, prior by fan-in; the "
        "noise's scale is latent, LogNormal(0, 1).",
        train=train,
        test=test,
        far=_moved(test[0], seed),
        path=path,
        at=at,
        labels=(MOVED, "f(x) (sd)"),
        make_model=lambda: _model(
            [10, 8, 1], bbb.priors.FanInNormal(), likelihood(LogNormal(0.0, 1.0)), train
        ),
    )


def breast_cancer(seed: int) -> Problem:
    """Scikit-learn's breast cancer set: malignant or benign from thirty measurements."""
    x, benign = load_breast_cancer(return_X_y=True)
    train, test = _standardised(x, 1 - benign, seed)
    path, at = _line(x.shape[1], seed)
    return Problem(
        title="Breast cancer",
        text="Malignant or benign from 30 standardised measurements; 427 tumours to train, 142 to "
        f"test. Off the data every measurement of a test tumour is moved by {SHIFT:g} standard "
        "deviations, up or down at random. 30-8-1, tanh, prior by fan-in.",
        train=train,
        test=test,
        far=_moved(test[0], seed),
        path=path,
        at=at,
        labels=(MOVED, "p(malignant)"),
        make_model=lambda: _model(
            [30, 8, 1], bbb.priors.FanInNormal(), bbb.likelihoods.Bernoulli(), train
        ),
    )


PROBLEMS = {"sine": sine, "diabetes": diabetes, "breast_cancer": breast_cancer}


def _model(
    sizes: list[int], prior: Any, likelihood: bbb.likelihoods.Likelihood, train: Data
) -> bbb.BayesianModel:
    network = bbb.BayesianMLP(sizes, activation=nn.Tanh, prior=prior)
    return bbb.BayesianModel(network, likelihood, num_data=len(train[0]))


def _standardised(x: Array, y: Array, seed: int) -> tuple[Data, Data]:
    """A quarter for the test; features standardised by the training part, targets ``[n, 1]``."""
    inputs, targets = (torch.tensor(a, dtype=torch.float32) for a in (x, y[:, None]))
    train, test = bbb.data.split(inputs, targets, fraction=0.25, seed=seed)
    mean, sd = train[0].mean(0), train[0].std(0)
    return ((train[0] - mean) / sd, train[1]), ((test[0] - mean) / sd, test[1])


def _moved(x: Tensor, seed: int) -> Tensor:
    signs = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)).sub(0.5).sign()
    return x + SHIFT * signs


def _line(features: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs on a straight line through the data's mean, and their distance from it by feature."""
    at = torch.linspace(-4.0, 4.0, 101)
    return _moved(torch.zeros(1, features), seed) / SHIFT * at[:, None], at


def drawn(prediction: bbb.Prediction, num_samples: int) -> bbb.Prediction:
    """The prediction by draws of each input's function, where it is Normal in closed form."""
    if not isinstance(prediction, GaussianPrediction):
        return prediction
    noise = torch.randn(num_samples, *prediction.mean.shape)
    loc = prediction.mean + prediction.function_std * noise
    return bbb.RegressionPrediction(Normal(loc, prediction.noise_std.expand_as(loc)))


def functions(prediction: bbb.Prediction) -> Tensor:
    """Return each draw's mean of y, or its probability of y = 1; ``[S, n]``."""
    if isinstance(prediction, bbb.ClassificationPrediction):
        return prediction.sample_probs[..., 1]
    return prediction.sample_means[..., 0]


def distance(a: Tensor, b: Tensor) -> float:
    """1-Wasserstein distance between two sets of draws ``[S, n]``, averaged over the inputs."""
    pairs = zip(a.T.double().numpy(), b.T.double().numpy(), strict=True)
    return float(np.mean([wasserstein_distance(u, v) for u, v in pairs]))


def compare(found: bbb.Prediction, gold: bbb.Prediction) -> dict[str, float]:
    """Compute distances between two posteriors' predictions at the same inputs.

    Returns:
        ``function``: 1-Wasserstein distance between the draws of the function, and ``sd_ratio``:
        its standard deviation, both over the one of ``gold``. ``predictive``: distance between the
        predictive distributions of y: total variation of classes; or 1-Wasserstein of real
        targets, over their standard deviation.
    """
    f, g = functions(found), functions(gold)
    spread = float(g.std(0).mean())
    if isinstance(found, bbb.ClassificationPrediction):
        predictive = float((found.probs - gold.probs).abs().sum(-1).mean()) / 2
    else:
        predictive = distance(_targets(found, 1), _targets(gold, 0)) / float(gold.std.mean())
    return {
        "function": distance(f, g) / spread,
        "predictive": predictive,
        "sd_ratio": float(f.std(0).mean()) / spread,
    }


def _targets(prediction: bbb.RegressionPrediction, seed: int) -> Tensor:
    """Draws of y, one for each draw of the weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return prediction.components.sample()[..., 0]


def score(prediction: bbb.Prediction, y: Tensor) -> dict[str, float]:
    """Scores on held-out targets ``[n, 1]``."""
    if isinstance(prediction, bbb.ClassificationPrediction):
        return scores(prediction.probs, y.flatten().long())
    return {
        "nll": -float(prediction.log_prob(y).mean()),
        "coverage": metrics.coverage(*prediction.interval(LEVEL), y),
        "rmse": metrics.rmse(prediction.mean, y),
    }


def mean_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of equally nested figures of several seeds; of failed ones the first."""
    failed = [record for record in records if "failed" in record]
    means: dict[str, Any] = failed[0] if failed else over(fmean, records)
    return means


Predictions: TypeAlias = dict[str, bbb.Prediction]
ON, OFF, PATH = "on the data", "off the data", "path"
NUTS = "NUTS"


def predict_at(
    problem: Problem,
    model: bbb.BayesianModel,
    posterior: Any,
    num_samples: int,
    seed: int,
    *,
    linearized: bool = False,
) -> Predictions:
    """Predictions on the data, off it, and along the picture's path."""
    inputs = {ON: problem.test[0], OFF: problem.far, PATH: problem.path}
    options = {"num_samples": num_samples, "seed": seed, "linearized": linearized}
    return {
        region: drawn(bbb.predict(model, posterior, x, **options), num_samples)
        for region, x in inputs.items()
    }


def verdict(nuts: dict[str, Any]) -> str:
    """Describe the convergence of NUTS in words."""
    worst = max(nuts["r_hat"].values())
    rest = (
        f"effective sample size at least {min(nuts['ess_bulk'].values()):.0f} (bulk) and "
        f"{min(nuts['ess_tail'].values()):.0f} (tail), {nuts['divergences']} divergences, "
        f"{nuts['gradients_per_draw']:.0f} gradients per draw, {nuts['seconds']:.0f} s."
    )
    if worst < 1.01:
        return f"The four chains agree: R-hat at most {worst:.3f}, {rest}"
    return (
        f"The four chains do NOT agree (R-hat up to {worst:.3f}, 1.01 or more): "
        f"NUTS is no reference here, and distances to it mean little; {rest}"
    )


def title(name: str) -> str:
    """The name of a problem in words."""
    return name.replace("_", " ").capitalize()


def nuts_table(records: dict[str, Any]) -> Table:
    """Convergence and costs of NUTS on every problem, given its diagnostics."""
    columns = ("NUTS", "R-hat, on", "off", "ESS, on", "off", "floor, off", "gradients", "seconds")
    rows = []
    for name, nuts in records.items():
        cells = [f"{nuts['r_hat'][at]:.3f}" for at in ("on", "off")]
        cells += [f"{nuts['ess'][at]:,.0f}" for at in ("on", "off")]
        cells += [f"{nuts['floor']['off']['function']:.3f}", f"{nuts['gradients_per_draw']:.0f}"]
        rows.append([title(name), *cells, f"{nuts['seconds']:.0f}"])
    return Table(columns, rows)


def draw_bands(
    run: Run,
    name: str,
    problem: Problem,
    figures: dict[str, Any],
    predictions: dict[str, Predictions],
) -> Picture:
    """Every guide's functions along the path in a panel of its own, NUTS outlined in all."""
    gold = functions(predictions[NUTS][PATH])
    guides = {name: found for name, found in predictions.items() if name != NUTS}
    classes = isinstance(predictions[NUTS][PATH], bbb.ClassificationPrediction)
    rows = math.ceil(len(guides) / 4)
    with plots.style():
        figure, axes = plt.subplots(
            rows, 4, figsize=(9.6, 1.9 * rows + 0.5), sharex=True, sharey=True, squeeze=False
        )
        for ax, (guide, found) in zip(axes.flat, guides.items(), strict=False):
            data = problem.train if len(problem.train[0][0]) == 1 else None
            plots.function_band(
                ax, problem.at, functions(found[PATH]), reference=gold, data=data, level=LEVEL
            )
            ratio = figures[guide][OFF]["sd_ratio"]
            ax.set_title(f"{guide}\noff the data {ratio:.0%} of NUTS's sd", fontsize="x-small")
        for ax in axes.flat[len(guides) :]:
            ax.set_axis_off()
        axes.flat[0].set_ylim(*((-0.03, 1.03) if classes else _limits(gold)))
        figure.supxlabel(problem.labels[0], fontsize="medium")
        figure.supylabel(problem.labels[1], fontsize="medium")
        handles, labels = axes.flat[0].get_legend_handles_labels()
        labels = [label.replace("reference", NUTS) for label in labels]
        figure.legend(handles, labels, loc="outside upper center", ncols=5)
    caption = (
        f"Blue: the central {LEVEL:.0%} of each guide's functions; black lines: NUTS, the "
        "same in all panels."
    )
    return run.picture(figure, f"bands_{name}", caption)


def _limits(gold: Tensor) -> tuple[float, float]:
    """Return the range of NUTS's functions, extended by a quarter on both sides."""
    low, high = float(gold.quantile(0.05, 0).min()), float(gold.quantile(0.95, 0).max())
    margin = (high - low) / 4
    return low - margin, high + margin
