# SPDX-License-Identifier: Apache-2.0
"""A Bayesian neural network on handwritten digits: accuracy, uncertainty, refusal, pruning.

    python experiments/quickstart.py

Bayes by Backprop learns scikit-learn's bundled 1,797 handwritten digits (8x8 pixels). Printed:
accuracy, NLL and ECE of an ordinary network, of single sampled networks, of the network of mean
weights and of the ensemble; out-of-distribution detection (patches of photographs, digits with
shuffled pixels, noise); how many of each are refused.

A quarter of the digits is the test set, read at the end. A tenth of the rest is never trained on:
the refusal threshold comes from it. An ordinary torch network of the same layers, batches and
epochs is trained, too (Adam, 1e-3). The library's defaults are used.
Two CPU cores need less than a minute; ``--smoke`` runs the same path in seconds.
"""

import statistics
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import tyro
from _helpers.images import digits, stratified
from _helpers.run import Picture, Run, Settings
from _helpers.scores import SCORES, detect, scores
from _helpers.tables import Table, over, table
from _helpers.training import mlp, predict_plain, train_plain
from sklearn.datasets import load_sample_image
from torch import Tensor
from tqdm import tqdm

import pyro_bbb as bbb
from pyro_bbb import metrics

Scores: TypeAlias = dict[str, dict[str, float]]
DIGITS, PHOTOGRAPHS = "test digits", "photograph patches"

SIZES = [64, 200, 200, 10]
ANSWERED = 0.95  # coverage of the validation digits at the refusal threshold
FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0)


@dataclass(frozen=True)
class Config(Settings):
    """Settings of one run."""

    epochs: int = 300
    """Passes over the digits."""
    samples: int = 100
    """Networks drawn from the posterior for each prediction on digits."""


def ood_inputs(x: Tensor, seed: int) -> dict[str, Tensor]:
    """Return inputs that are no digits, each kind ``[n, 64]`` in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(x.shape, generator=generator).argsort(-1)
    return {
        PHOTOGRAPHS: photograph_patches(),
        "shuffled digits": x.gather(-1, order),
        "uniform noise": torch.rand(x.shape, generator=generator),
    }


def photograph_patches(name: str = "flower.jpg") -> Tensor:
    """Return 8x8 grey patches of scikit-learn's photograph, each in [0, 1]."""
    grey = torch.from_numpy(load_sample_image(name).mean(-1)).float()  # [427, 640]
    small = torch.nn.functional.avg_pool2d(grey[None], 4)[0]
    patches = small.unfold(0, 8, 8).unfold(1, 8, 8).reshape(-1, 64)
    low, high = patches.amin(-1, keepdim=True), patches.amax(-1, keepdim=True)
    return (patches - low) / (high - low)


def learn_digits(config: Config, run: Run) -> tuple[dict[str, Any], list[Table], Picture]:
    """Train the classifier; score it on digits and out-of-distribution inputs."""
    train_part, (x, y) = digits()
    train, valid = stratified(*train_part, 0.1)
    model = bbb.BayesianModel(
        bbb.BayesianMLP(SIZES), bbb.likelihoods.Categorical(), num_data=len(train[0])
    )
    guide = bbb.AutoSoftplusNormal(model)
    epochs, seed = config.epochs, config.seed
    bbb.fit(model, guide, train, epochs=epochs, seed=seed)
    torch.manual_seed(seed)
    plain = train_plain(mlp(SIZES), train, epochs)

    def predict(x: Tensor) -> bbb.ClassificationPrediction:
        return bbb.predict(model, guide, x, num_samples=config.samples, seed=seed)

    threshold = float(predict(valid[0]).confidence.quantile(1 - ANSWERED))
    inputs = {DIGITS: x, **ood_inputs(x, seed)}
    ensembles = {name: predict(inputs[name]) for name in tqdm(inputs, desc="predicting")}
    plains = {name: predict_plain(plain, images) for name, images in inputs.items()}
    ensemble = ensembles[DIGITS]
    # in double precision, where no probability of a single network is 0
    singles = [scores(probs, y) for probs in ensemble.sample_log_probs.double().exp()]
    networks = {
        "plain": scores(plains[DIGITS].probs, y),
        "sampled": over(statistics.fmean, singles),
        "sampled_sd": over(statistics.stdev, singles),
        "mean_network": scores(bbb.predict_mean(model, guide, x).probs, y),
        "ensemble": scores(ensemble.probs, y),
    }
    detection: Scores = {}
    for name, ood in ensembles.items():
        refused = float(ood.refuse(threshold).double().mean())
        detection[name] = {"inputs": len(ood.probs), "refused": refused}
        if name != DIGITS:
            plain_scores = detect(plains[name], plains[DIGITS])
            detection[name] |= detect(ood, ensemble) | {"plain": plain_scores["entropy"]}
    answered = ~ensemble.refuse(threshold)
    mean_networks = [bbb.predict_mean(model, bbb.prune(guide, p), x) for p in FRACTIONS]
    pruning = [metrics.accuracy(pruned.probs, y) for pruned in mean_networks]
    results = {
        "test_digits": networks,
        "threshold": threshold,
        "accuracy_where_answered": metrics.accuracy(ensemble.probs[answered], y[answered]),
        "detection": detection,
        "pruning": dict(zip(map(str, FRACTIONS), pruning, strict=True)),
    }
    tables = [networks_table(networks, config.samples), detection_table(detection)]
    line = {"mean network": (FRACTIONS, pruning)}
    axes = {"xlabel": "fraction of weights removed", "ylabel": "test accuracy"}
    return results, tables, run.curves("pruning", "Without training after.", {"": line}, **axes)


def networks_table(networks: Scores, samples: int) -> Table:
    """Return an ordinary network, and three ways to use one posterior."""
    labels = {
        "plain": "ordinary network",
        "sampled": f"{samples} sampled networks, mean",
        "sampled_sd": "standard deviation of these",
        "mean_network": "mean network",
        "ensemble": f"ensemble of {samples}",
    }
    rows = {label: {"mean": networks[name]} for name, label in labels.items()}
    return table("on the test digits", rows, SCORES)


def detection_table(detection: Scores) -> Table:
    """Return AUROC and refusals by kind of input."""
    columns = [("refused (%)", "refused", 100, 1), ("AUROC (%): entropy", "entropy", 100, 1)]
    columns += [("epistemic", "epistemic", 100, 1), ("ordinary network", "plain", 100, 1)]
    rows = {f"{s['inputs']} {name}": {"mean": s} for name, s in detection.items()}
    return table("kind of input", rows, columns)


def main(config: Config) -> dict[str, Any]:
    """Train, score, print the tables and write the results."""
    if config.smoke:
        config = replace(config, epochs=2, samples=5)
    torch.manual_seed(config.seed)  # for the initial means
    run = Run(config)
    results, tables, pruning = learn_digits(config, run)
    return run.report(__doc__, {"digits": results}, tables, [pruning])


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
