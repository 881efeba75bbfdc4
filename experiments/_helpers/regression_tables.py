# SPDX-License-Identifier: Apache-2.0
"""Regression tables: their files, and one split standardised, trained, predicted and scored."""

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyro_bbb as bbb
from _helpers.run import Data
from _helpers.training import dropout_passes, final_elbo
from pyro_bbb import metrics, priors


@dataclass(frozen=True)
class Recipe:
    """Networks, posterior and training, for all sets alike."""

    prior: str  # name of the prior in `pyro_bbb.priors`
    options: dict[str, float]  # its arguments
    guide: str
    """Posterior of all weights by its name in `pyro_bbb.guides`; of ``"vbll"`` the last layer's."""
    guide_options: dict[str, Any]  # its arguments
    noise: Literal["constant", "by input"]
    """Whether the noise's scale is one number for each member, or an output of the network."""
    members: int  # ensemble members, each with its own posterior and an equal weight in predictions
    dropout: float
    """Rate of the units that are dropped, in training and in predictions (MC dropout)."""
    temperature: float  # weight of the KL in the ELBO; 1 is Bayes' rule
    lr: float  # Adam's learning rate at the start
    lr_schedule: str
    least_batch: int  # rows per step, at least; larger tables have more...
    most_batches: int  # ... so that an epoch has at most this number of steps
    least_epochs: int  # passes over the rows, at least...
    least_steps: int  # ... and as many more as make this number of steps
    draws: int = 100  # draws from each member's posterior for predictions
    units: int = 50  # hidden units...
    units_of_large: int = 100  # ... and those for a table of more than LARGE rows


LARGE = 20_000  # rows; of the protocol's sets, protein and year have more, and get 100 units


@dataclass(frozen=True)
class Task:
    """One split of one table, and all that decides its figures."""

    name: str
    path: str
    split: int  # number of the split, from 0
    part: str  # scored part: ``"test"``, or ``"validation"``, a fifth of the train part
    recipe: Recipe
    seed: int  # seed; each split derives its own from it

    @property
    def own_seed(self) -> int:
        """Seed of the split, independent of the order of splits."""
        words = f"{self.seed} {self.name} {self.split}"
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4])


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


class GroupedLinear(nn.Module):
    """Linear outputs of each group of units: ``[n, groups * units]`` to ``[n, outputs * groups]``.

    The first outputs of all groups come first, then the second ones.
    """

    def __init__(self, units: int, groups: int, outputs: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.zeros(outputs * groups, units))
        self.bias = nn.Parameter(torch.zeros(outputs * groups))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all groups."""
        x = x.unflatten(-1, (self.groups, -1))
        weight = self.weight.unflatten(0, (-1, self.groups))
        return torch.einsum("ngu,ogu->nog", x, weight).flatten(1) + self.bias


def grouped_network(recipe: Recipe, inputs: int, units: int) -> nn.Sequential:
    """Build an ensemble of one-hidden-layer networks as one, for inputs ``[n, d]``.

    Outputs are ``[n, members]``, or ``[n, 2 * members]`` where noise depends on the input. The
    units are the members' in turn, and none sees another's; trained together they are as good as
    trained one by one, at little more than one's cost.
    """
    outputs = 2 if recipe.noise == "by input" else 1
    layers: list[nn.Module] = [nn.Linear(inputs, recipe.members * units), nn.ReLU()]
    if recipe.dropout:
        layers.append(nn.Dropout(recipe.dropout))
    return nn.Sequential(*layers, GroupedLinear(units, recipe.members, outputs))


def model_and_guide(recipe: Recipe, inputs: int, units: int, num_data: int) -> tuple[Any, Any]:
    """Return a network of one hidden layer, or one for each member, and its posterior."""
    prior = priors.make(recipe.prior, **recipe.options)
    noise: bbb.likelihoods.Likelihood = bbb.likelihoods.HeteroscedasticGaussian()
    if recipe.noise == "constant":
        noise = bbb.likelihoods.Gaussian.learned(torch.ones(recipe.members))
    if recipe.guide == "vbll":
        plain = nn.Sequential(nn.Linear(inputs, units), nn.ReLU(), nn.Linear(units, 1))
        network = bbb.bayesianize(plain, prior=prior, where="2")
    else:
        network = bbb.bayesianize(grouped_network(recipe, inputs, units), prior=prior)
    model = bbb.BayesianModel(network, noise, num_data=num_data)
    return model, bbb.guides.make(recipe.guide, model, **recipe.guide_options)


def train(recipe: Recipe, data: Data, units: int, seed: int) -> tuple[bbb.BayesianModel, Any]:
    """Return a trained model and guide for standardised data ``[n, d]`` and ``[n]``."""
    x, y = data
    torch.manual_seed(seed)
    model, guide = model_and_guide(recipe, x.shape[1], units, len(x))
    batch_size = max(recipe.least_batch, -(-len(x) // recipe.most_batches))
    steps_per_epoch = -(-len(x) // batch_size)
    history = bbb.fit(
        model,
        guide,
        (x, y[:, None].expand(-1, recipe.members).contiguous()),
        epochs=max(recipe.least_epochs, -(-recipe.least_steps // steps_per_epoch)),
        batch_size=batch_size,
        lr=recipe.lr,
        lr_schedule=recipe.lr_schedule,
        kl_schedule=bbb.KLSchedule(temperature=recipe.temperature),
        loss="mean_field",
        progress=False,
        seed=seed,
    )
    print(final_elbo(history))
    return model, guide


def predict(
    recipe: Recipe, model: bbb.BayesianModel, guide: Any, x: Tensor, seed: int
) -> bbb.RegressionPrediction:
    """Return the mixture over draws of weights, or of dropped units (Gal and Ghahramani 2016)."""
    if not recipe.dropout:
        return bbb.predict(model, guide, x, num_samples=recipe.draws, seed=seed)
    outputs = dropout_passes(bbb.to_module(model, guide), x, recipe.draws, seed)
    with torch.no_grad():
        return bbb.RegressionPrediction(dist.Normal(**model.likelihood.arguments(outputs)))


def unscaled(prediction: bbb.RegressionPrediction, scaling: Any) -> bbb.RegressionPrediction:
    """Return the mixture over draws and members, in the target's own units and double precision.

    From components ``[draws, n, members]`` to ``[draws * members, n, 1]``: $p(y) = p(z) / s$.
    """
    components = prediction.components
    loc, scale = (
        parameter.double().movedim(-1, 1).flatten(0, 1).unsqueeze(-1)
        for parameter in torch.broadcast_tensors(components.loc, components.scale)
    )
    mixture = bbb.RegressionPrediction(dist.Normal(loc, scale))
    return mixture.rescaled(scaling.mean, scaling.scale)


def score(prediction: bbb.RegressionPrediction, y: Tensor) -> dict[str, Any]:
    """Figures of one split; targets ``[n]`` in their own units.

    Returns:
        ``rmse``; ``log_likelihood``, the mean log-density of the mixture, nats; ``quantiles``:
        the predicted probability of a target at most each true one, from which coverage follows.
    """
    return {
        "rmse": metrics.rmse(prediction.mean.squeeze(-1), y),
        "log_likelihood": float(prediction.log_prob(y).mean()),
        "quantiles": [round(q, 5) for q in prediction.cdf(y[:, None]).flatten().tolist()],
    }


def run_task(task: Task) -> dict[str, Any]:
    """Train and score."""
    began = time.perf_counter()
    table = bbb.data.read_uci(task.path, dtype=torch.float64)
    (x, y), (x_test, y_test) = table.split(task.split)
    if task.part == "validation":
        (x, y), (x_test, y_test) = bbb.data.split(x, y, fraction=0.2, seed=task.own_seed)
    if y.eq(y[0]).all():
        raise ValueError(f"y of {task.path} must vary, got one value in split {task.split}")
    (x, of_x), (y, of_y) = map(bbb.data.standardize, (x, y[:, None]))
    recipe = task.recipe
    units = recipe.units if len(table.x) <= LARGE else recipe.units_of_large
    data = x.float(), y.float().squeeze(1)
    model, guide = train(recipe, data, units, task.own_seed)
    prediction = predict(recipe, model, guide, of_x(x_test).float(), task.own_seed)
    seconds = round(time.perf_counter() - began, 2)
    return score(unscaled(prediction, of_y), y_test) | {"seconds": seconds}


RESERVED = ("recipe", "files", "part", "seed", "seconds", "commit", "python", "versions", "threads")
"""Keys of a run's record that are no table's name."""


def find_tables(root: Path | None, names: tuple[str, ...]) -> dict[str, Path]:
    """Files ``[uci/]NAME/data.npz`` by name of a folder or ``$PYRO_BBB_DATA``; all or some."""
    folder = root or os.environ.get("PYRO_BBB_DATA")
    bases = (Path(folder) / "uci", Path(folder)) if folder else ()
    there = {path.parent.name: path for base in bases for path in base.glob("*/data.npz")}
    names_of_tables = names or sorted(there)
    if not there or not set(names_of_tables) <= there.keys():
        present = ", ".join(sorted(there)) or "none"
        raise FileNotFoundError(
            f"datasets must be of data_root, a folder with NAME/data.npz or uci/NAME/data.npz; "
            f"in {folder} there are {present}, got {', '.join(names_of_tables) or 'none'}"
        )
    if set(names_of_tables) & set(RESERVED):
        raise ValueError(f"datasets must not be called as a part of the record, {RESERVED}")
    return {name: there[name] for name in names_of_tables}


def made_up_tables(folder: Path) -> dict[str, Path]:
    """Two small tables for a smoke test; one has a column that does not vary."""
    rng, paths = np.random.default_rng(0), {}
    for name, unit in (("made-up-lines", 1.0), ("made-up-waves", 1e-3)):
        x = rng.normal(size=(40, 3))
        x[:, 1] = 5.0 if name == "made-up-waves" else x[:, 1]
        y = unit * (np.sin(x[:, 0]) + 0.1 * rng.normal(size=40) + 3.0)
        rows = np.stack([rng.permutation(40) for _ in range(3)])
        paths[name] = folder / name / "data.npz"
        paths[name].parent.mkdir(parents=True, exist_ok=True)
        np.savez(paths[name], X=x, y=y, train_index=rows[:, 4:], test_index=rows[:, :4])
    return paths
