# SPDX-License-Identifier: Apache-2.0
"""The table of ``docs/guide/out_of_domain.md``: garments against digits, by network and score.

    python docs/ood_table.py

trains multilayer perceptrons on 10,000 images of Fashion-MNIST in minutes, and compares 2,000
others with 2,000 of MNIST. All are from the sets' training parts.
"""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import pyro_bbb as bbb

SCORES = ["ddu", "knn", "mahalanobis", "relative_mahalanobis", "energy", "max_logit", "entropy"]
SCORES.append("mutual_information")
TRAINING, VALIDATION = slice(0, 10_000), slice(50_000, 52_000)
Data = tuple[Tensor, Tensor]


def network(data: Data, *, spectral: bool = False) -> tuple[nn.Module, None]:
    """Return a network trained by maximum likelihood, and that it has no posterior."""
    torch.manual_seed(0)
    trunk = [nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()]
    if spectral:
        trunk = [spectral_norm(m) if isinstance(m, nn.Linear) else m for m in trunk]
    layers = nn.Sequential(*trunk, nn.Linear(200, 10))
    optimizer = torch.optim.Adam(layers.parameters(), 1e-3)
    for _ in range(12):
        for x, y in bbb.data.Minibatches(*data, batch_size=128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(layers(x), y).backward()
            optimizer.step()
    return layers.eval(), None


def posterior(data: Data, name: str, **options: Any) -> tuple[bbb.BayesianModel, Any]:
    """Return a model and its trained guide."""
    torch.manual_seed(0)
    layers = bbb.BayesianMLP([784, 200, 200, 10], prior=dist.Normal(0.0, 0.1))
    model = bbb.BayesianModel(layers, bbb.likelihoods.Categorical(), num_data=len(data[0]))
    guide = bbb.guides.make(name, model, init_loc="he", **options)
    bbb.fit(model, guide, data, epochs=12, lr=2e-3, progress=False, seed=0)
    return model, guide


def accuracy(model: nn.Module, guide: Any, data: Data) -> float:
    """Return the accuracy of a network, or of a posterior's mean prediction."""
    if guide is None:
        return bbb.metrics.accuracy(model(data[0]).detach().softmax(-1), data[1])
    return bbb.metrics.accuracy(bbb.predict(model, guide, data[0], seed=0).probs, data[1])


def main() -> None:
    """Train, score and print the table in Markdown: AUROC and FPR95 in percent."""
    (x, y), digits = bbb.data.load_images("fashion_mnist"), bbb.data.load_images("mnist")[0]
    train, test = ((x[rows].flatten(1), y[rows]) for rows in (TRAINING, VALIDATION))
    outside = digits[VALIDATION].flatten(1)
    mean_field = posterior(train, "softplus_normal", init_rho=-4.0)
    models = {
        "network": network(train),
        "spectral norm": network(train, spectral=True),
        "ensemble of 5": posterior(train, "ensemble", size=5),
        "mean field, means": (bbb.to_module(*mean_field), None),
        "mean field, 1 draw": mean_field,
        "mean field, 5 draws": mean_field,
    }
    print("|", *(f"| {name}" for name in models), "|")
    print("|---" + "|---:" * len(models) + "|")
    accuracies = (f"{accuracy(*pair, test):.1%}" for pair in models.values())
    print("| accuracy", *(f"| {value}" for value in accuracies), "|")
    for score in SCORES:
        cells = []
        for name, (model, guide) in models.items():
            draws = 1 if "1 draw" in name or guide is None else 5
            if score == "mutual_information" and draws == 1:
                cells.append("–")
                continue
            detector = bbb.ood(model, guide, train, score=score, num_samples=draws)
            inside, out = detector.score_samples(test[0]), detector.score_samples(outside)
            fpr = (out >= inside.quantile(0.05)).double().mean()  # at 95 % of garments kept
            cells.append(f"{bbb.metrics.auroc(-out, -inside):.1%} / {fpr:.1%}")
        print(f"| `{score}`", *(f"| {cell}" for cell in cells), "|", flush=True)


if __name__ == "__main__":
    main()
