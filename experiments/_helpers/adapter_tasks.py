# SPDX-License-Identifier: Apache-2.0
"""Tasks of `adapters`: a network that was trained on other data, and what it is adapted to."""

import copy
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import nn

import pyro_bbb as bbb
from _helpers.adapter_networks import FAMILIES, Family, pretrain
from _helpers.docstrings import decimal, library, sequences
from _helpers.images import images, train_and_validation
from _helpers.posterior_tasks import Sets
from _helpers.posterior_training import Clock, Problem, Task
from _helpers.run import Data, fingerprint

RANK = 8
HELD_OUT = {"images": 1 / 12, "characters": 1 / 5}  # of the training part, to choose settings


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Data that a pretrained network is adapted to."""

    title: str
    """Name in tables and figures."""
    family: str
    """Name in `FAMILIES`."""
    fraction: float
    """Of the data for training."""
    epochs: int
    """Passes over them."""


ADAPTATIONS = {
    "mnist": Adaptation(title="MNIST, 55,000 labels", family="images", fraction=1.0, epochs=3),
    "mnist_tenth": Adaptation(
        title="MNIST, 5,500 labels", family="images", fraction=0.1, epochs=15
    ),
    "mnist_hundredth": Adaptation(
        title="MNIST, 550 labels", family="images", fraction=0.01, epochs=60
    ),
    "decimal": Adaptation(
        title="docstrings of decimal", family="characters", fraction=1.0, epochs=40
    ),
    "decimal_tenth": Adaptation(
        title="docstrings of decimal, a tenth", family="characters", fraction=0.1, epochs=60
    ),
}


@dataclass(frozen=True, kw_only=True)
class AdapterTask(Task):
    """One training of adapters."""

    family: Family

    def model(
        self, prior: object, where: str = "*", dropout: float = 0.0, num_data: int | None = None
    ) -> bbb.BayesianModel:
        """The pretrained network with random adapters, and a random last layer if it is new."""
        torch.manual_seed(self.seed)
        network: nn.Module = self.problem.network(dropout)
        if self.family.last:
            network.get_submodule(self.family.last).reset_parameters()
            network = bbb.bayesianize(network, copy.deepcopy(prior), where=self.family.last)
        adapted = self.family.adapted
        network = bbb.adapt(network, RANK, where=adapted, prior=copy.deepcopy(prior), random="both")
        likelihood = bbb.likelihoods.Categorical()
        return bbb.BayesianModel(network, likelihood, num_data or len(self.data[0]))


@dataclass(frozen=True, kw_only=True)
class Adaptations:
    """Pretrained networks and trainings of the current commit, in a folder."""

    root: Path
    """The folder."""
    data_root: Path | None
    """Folder of the data sets, see `images`."""
    smoke: bool
    """Train tiny networks on a few images and characters."""

    def sets(self, name: str, *, testing: bool) -> Sets:
        """The data of an adaptation: scored are those of the test or of validation."""
        at = ADAPTATIONS[name]
        pictures = at.family == "images"
        given = partial(self._images, "mnist") if pictures else self._decimal
        train, valid = train_and_validation(given(train=True), HELD_OUT[at.family])
        if at.fraction < 1 and not self.smoke:
            train = train_and_validation(train, at.fraction)[1]
        scored = given(train=False) if testing else valid
        ood = self._images("fashion_mnist", train=not testing)[0] if pictures else None
        return Sets(train, valid, scored, ood)

    def task(self, name: str, method: str, seed: int, sets: Sets) -> AdapterTask:
        """One training, which goes on from what is in its folder."""
        at, folder = ADAPTATIONS[name], self._folder / name / method / str(seed)
        problem = Problem(
            title=at.title,
            dataset="mnist",
            network=partial(self._pretrained, at.family),
            epochs=at.epochs,
            methods=(),
        )
        return AdapterTask(
            problem=problem,
            family=FAMILIES[at.family],
            data=sets.train,
            valid=sets.valid,
            seed=seed,
            folder=folder,
            clock=Clock(folder / "seconds.json"),
            engine="eager",
            epochs=1 if self.smoke else None,
        )

    @cached_property
    def _folder(self) -> Path:
        return self.root / fingerprint({"smoke": self.smoke})

    def _images(self, dataset: str, *, train: bool) -> Data:
        return images(dataset, self.data_root, train=train, smoke=self.smoke)

    def _decimal(self, *, train: bool) -> Data:
        """The first three quarters of the text, or the rest."""
        text = decimal()[: 10_000 if self.smoke else None]
        end = len(text) * 3 // 4
        return sequences(text[:end] if train else text[end:])

    def _pretrained(self, family: str, dropout: float) -> nn.Module:
        """A network after its first training, with a rate of dropout."""
        path = self._folder / f"{family}.safetensors"
        if not path.exists():
            self._pretrain(path, family)
        network = self._network(family, dropout)
        load_model(network, path)
        return network

    def _pretrain(self, path: Path, family: str) -> None:
        torch.manual_seed(0)
        network = self._network(family, dropout=0.0)
        garments = partial(self._images, "fashion_mnist", train=True)
        data = garments() if family == "images" else sequences(library(smoke=self.smoke))
        pretrain(network, data, 1 if self.smoke else FAMILIES[family].epochs)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_model(network, path)

    def _network(self, family: str, dropout: float) -> nn.Module:
        return FAMILIES[family].make(dropout, 8 if self.smoke else FAMILIES[family].width)
