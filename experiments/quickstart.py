# SPDX-License-Identifier: Apache-2.0
"""Bayesian neural networks on handwritten digits and a noisy sine: accuracy, uncertainty, pruning.

    python experiments/quickstart.py

1. A Bayesian neural network learns scikit-learn's bundled 1,797 handwritten digits (8x8 pixels) by
   Bayes by Backprop. Printed: accuracy, NLL and ECE of an ordinary network, of single sampled
   networks, of the network of mean weights and of the ensemble; out-of-distribution detection
   (patches of photographs, digits with shuffled pixels, noise); how many of each are refused.
2. A small network learns 10 sin(2 pi x) from 32 noisy points and predicts far outside them: the
   problem of https://krasserm.github.io/2019/03/14/bayesian-neural-networks/.

A quarter of the digits is the test set, read at the end. A tenth of the rest is never trained on:
the refusal threshold comes from it. An ordinary torch network of the same layers, batches and
epochs is trained beside the Bayesian one (Adam, 1e-3). The library's defaults are used, and for the
digits the temperature 0.1: docs/guide/trained.md compares it with 1.

Pictures, ``report.html`` and every printed number (``metrics.json``) go to the folder ``--output``.
Two CPU cores need less than a minute; ``--smoke`` runs the same path in seconds.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import tyro
from _helpers.run import Picture, Run, Settings, Table, digits, stratified
from _helpers.scores import scores
from _helpers.sine import draw_bands, sine
from pyro.distributions import Normal
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from tqdm import tqdm

import pyro_bbb as bbb
from pyro_bbb import metrics

Scores: TypeAlias = dict[str, dict[str, float]]
Predictions: TypeAlias = dict[str, bbb.ClassificationPrediction]
DIGITS, PHOTOGRAPHS = "test digits", "photograph patches"

FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)


@dataclass(frozen=True)
class Config(Settings):
    """Settings of one run."""

    epochs: int = 100
    """Passes over the digits."""
    hidden: int = 200
    """Units in each of the two hidden layers of the digit classifier."""
    temperature: float = 0.1
    """Factor of the KL in the digits' loss; 1 is the Bayesian posterior."""
    samples: int = 100
    """Networks drawn from the posterior for each prediction on digits."""
    answered: float = 0.95
    """Coverage of the validation digits at the refusal threshold."""
    regression_epochs: int = 1500
    """Full-batch steps on the sine."""
    regression_samples: int = 500
    """Networks drawn from the posterior of the sine."""
    output: Path = Path("results/quickstart")
    """Folder for results."""


def ood_inputs(x: Tensor, seed: int) -> dict[str, Tensor]:
    """Inputs that are no digits, each kind ``[n, 64]`` in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(x.shape, generator=generator).argsort(-1)
    return {
        PHOTOGRAPHS: photograph_patches(),
        "shuffled digits": x.gather(-1, order),
        "uniform noise": torch.rand(x.shape, generator=generator),
    }


def photograph_patches(name: str = "flower.jpg") -> Tensor:
    """The 32x32 patches of a photograph bundled with scikit-learn, grey, 8x8, each in [0, 1]."""
    grey = torch.from_numpy(load_sample_image(name).mean(-1)).float()  # [427, 640]
    small = torch.nn.functional.avg_pool2d(grey[None], 4)[0]
    patches = small.unfold(0, 8, 8).unfold(1, 8, 8).reshape(-1, 64)
    low, high = patches.amin(-1, keepdim=True), patches.amax(-1, keepdim=True)
    return (patches - low) / (high - low)


def plain_network(config: Config, x: Tensor, y: Tensor) -> nn.Module:
    """Train an ordinary network of the same layers."""
    torch.manual_seed(config.seed)
    hidden = config.hidden
    network = nn.Sequential(
        *(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, 10),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(config.epochs):
        for rows in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
    return network


@torch.no_grad()
def plain_prediction(network: nn.Module, x: Tensor) -> bbb.ClassificationPrediction:
    """Its class probabilities, as a prediction of one sample."""
    return bbb.ClassificationPrediction(network(x).log_softmax(-1)[None])


def compare_networks(
    plain: bbb.ClassificationPrediction,
    ensemble: bbb.ClassificationPrediction,
    mean: bbb.ClassificationPrediction,
    y: Tensor,
) -> Scores:
    """The ordinary network, sampled ones (mean and sd), that of mean weights, the ensemble."""
    singles = [scores(probs, y) for probs in ensemble.sample_probs]
    columns = {key: np.array([single[key] for single in singles]) for key in singles[0]}
    return {
        "plain": scores(plain.probs, y),
        "sampled": {key: float(column.mean()) for key, column in columns.items()},
        "sampled_sd": {key: float(column.std(ddof=1)) for key, column in columns.items()},
        "mean_network": scores(mean.probs, y),
        "ensemble": scores(ensemble.probs, y),
    }


def detect_ood(ensembles: Predictions, plains: Predictions, threshold: float) -> Scores:
    """Compute for each kind of input the rate of refusal and the AUROC against test digits.

    Three measures of uncertainty compete: the entropy of the ensemble, its epistemic part, and the
    entropy of an ordinary network.
    """
    inside, plain = ensembles[DIGITS], plains[DIGITS]
    return {
        kind: {
            "inputs": len(ood.probs),
            "auroc_entropy": metrics.auroc(ood.entropy, inside.entropy),
            "auroc_epistemic": metrics.auroc(ood.epistemic, inside.epistemic),
            "auroc_plain": metrics.auroc(plains[kind].entropy, plain.entropy),
            "refused": float(ood.refuse(threshold).double().mean()),
        }
        for kind, ood in ensembles.items()
    }


def prune_and_score(
    model: bbb.BayesianModel, guide: bbb.AutoSoftplusNormal, x: Tensor, y: Tensor
) -> list[float]:
    """Accuracy of the mean network when the least certain weights are removed, by `FRACTIONS`."""
    accuracies = []
    for fraction in tqdm(FRACTIONS, desc="pruning"):
        pruned = bbb.prune(guide, fraction=fraction)
        accuracies.append(metrics.accuracy(bbb.predict_mean(model, pruned, x).probs, y))
    return accuracies


def learn_digits(config: Config, run: Run) -> tuple[dict[str, Any], list[Table], Picture]:
    """Train the classifier; score it on digits and out-of-distribution inputs."""
    train_part, (x, y) = digits()
    train, valid = stratified(*train_part, 0.1)
    network = bbb.BayesianMLP([64, config.hidden, config.hidden, 10])
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(train[0]))
    guide = bbb.AutoSoftplusNormal(model)
    epochs, seed = config.epochs, config.seed
    cold = bbb.KLSchedule(temperature=config.temperature)
    bbb.fit(model, guide, train, epochs=epochs, kl_schedule=cold, seed=seed)
    plain = plain_network(config, *train)

    def predict(x: Tensor) -> bbb.ClassificationPrediction:
        return bbb.predict(model, guide, x, num_samples=config.samples, seed=seed)

    threshold = float(predict(valid[0]).confidence.quantile(1 - config.answered))
    inputs = {DIGITS: x, **ood_inputs(x, seed)}
    ensembles = {kind: predict(inputs[kind]) for kind in tqdm(inputs, desc="predicting")}
    plains = {kind: plain_prediction(plain, each) for kind, each in inputs.items()}

    mean = bbb.predict_mean(model, guide, x)
    networks = compare_networks(plains[DIGITS], ensembles[DIGITS], mean, y)
    detection = detect_ood(ensembles, plains, threshold)
    answered = ~ensembles[DIGITS].refuse(threshold)
    pruning = prune_and_score(model, guide, x, y)
    results = {
        "test_digits": networks,
        "threshold": threshold,
        "accuracy_where_answered": metrics.accuracy(ensembles[DIGITS].probs[answered], y[answered]),
        "detection": detection,
        "pruning": dict(zip(map(str, FRACTIONS), pruning, strict=True)),
    }
    tables = [networks_table(networks, config.samples), detection_table(detection)]
    line = {"mean network": (FRACTIONS, pruning)}
    axes = {"xlabel": "fraction of weights removed", "ylabel": "test accuracy"}
    return results, tables, run.curves("pruning", "Without training after.", {"": line}, **axes)


def learn_sine(config: Config, run: Run) -> tuple[dict[str, float], Table, Picture]:
    """Fit the sine where there are data; compare the uncertainty there and elsewhere."""
    generator = torch.Generator().manual_seed(config.seed)
    x_data = torch.linspace(-0.5, 0.5, 32)[:, None]
    y_data = sine(x_data) + torch.randn(x_data.shape, generator=generator)
    network = bbb.BayesianMLP([1, 20, 20, 1], prior=Normal(0.0, 1.5))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(scale=1.0), num_data=len(x_data))
    guide = bbb.AutoSoftplusNormal(model)
    epochs, draws, seed = config.regression_epochs, config.regression_samples, config.seed
    bbb.fit(model, guide, (x_data, y_data), epochs=epochs, lr=0.05, num_particles=5, seed=seed)

    x = torch.linspace(-1.5, 1.5, 1000)[:, None]
    prediction = bbb.predict(model, guide, x, num_samples=draws, seed=seed)
    inside = (x.abs() <= 0.5).flatten()
    epistemic = prediction.epistemic_std
    results = {
        "rmse_to_truth_on_data_range": metrics.rmse(prediction.mean[inside], sine(x[inside])),
        "epistemic_sd_on_data_range": float(epistemic[inside].mean()),
        "epistemic_sd_beyond": float(epistemic[~inside].mean()),
        "noise_sd": 1.0,
    }
    picture = draw_bands(run, {f"{draws} networks, 32 points": prediction}, x)
    return results, sine_table(results), picture


def networks_table(networks: Scores, samples: int) -> Table:
    """An ordinary network, and three ways to use one posterior."""
    rows = [
        ("ordinary network", networks["plain"]),
        (f"{samples} sampled networks, mean", networks["sampled"]),
        ("standard deviation of these", networks["sampled_sd"]),
        ("mean network", networks["mean_network"]),
        (f"ensemble of {samples}", networks["ensemble"]),
    ]
    columns = ("on the test digits", "accuracy (%)", "NLL (nats)", "ECE (%)")
    cells = [
        (name, f"{100 * s['accuracy']:.2f}", f"{s['nll']:.3f}", f"{100 * s['ece']:.2f}")
        for name, s in rows
    ]
    return Table(columns, cells)


def detection_table(detection: Scores) -> Table:
    """AUROC and refusals by kind of input; the digits against themselves have no AUROC."""
    aurocs = ("auroc_entropy", "auroc_epistemic", "auroc_plain")
    cells = [
        (
            f"{s['inputs']} {kind}",
            f"{100 * s['refused']:.1f}",
            *(("–" if kind == DIGITS else f"{100 * s[key]:.1f}") for key in aurocs),
        )
        for kind, s in detection.items()
    ]
    columns = (
        "kind of input",
        "refused (%)",
        "AUROC (%): entropy",
        "epistemic",
        "ordinary network",
    )
    return Table(columns, cells)


def sine_table(results: dict[str, float]) -> Table:
    """Uncertainty on the data's range and beyond it, in units of y."""
    rows = [
        ("epistemic sd on the data's range", results["epistemic_sd_on_data_range"]),
        ("epistemic sd beyond it", results["epistemic_sd_beyond"]),
        ("sd of the noise (known)", results["noise_sd"]),
        ("error of the mean on the data's range (RMSE)", results["rmse_to_truth_on_data_range"]),
    ]
    return Table(("sine regression", "value"), [(name, f"{value:.2f}") for name, value in rows])


def main(config: Config) -> dict[str, Any]:
    """Run both parts, print the tables, write the results; returns what ``metrics.json`` holds."""
    if config.smoke:
        config = replace(config, epochs=2, samples=5, regression_epochs=5, regression_samples=5)
    torch.manual_seed(config.seed)  # for the initial means
    run = Run(config)
    classifier, tables, pruning = learn_digits(config, run)
    wave, table, bands = learn_sine(config, run)
    record = run.finish({"digits": classifier, "sine": wave})
    pictures = [pruning, bands]
    run.report("Bayesian neural networks", SUMMARY, record, [*tables, table], pictures)
    return record


SUMMARY = (
    "Each draw from the distribution over the weights is a network; where the networks disagree, "
    "the data have not settled the answer. The mean network has every weight at its mean. NLL is "
    "the mean negative log-probability of the true class, ECE the gap between confidence and "
    "accuracy, AUROC the probability that an input that is no digit is less certain than a digit."
)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
