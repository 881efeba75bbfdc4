# SPDX-License-Identifier: Apache-2.0
"""Bayesian adapters of pretrained networks, compared with MAP, dropout, ensembles and Laplace.

    python experiments/adapters.py [--tasks mnist_hundredth decimal] [--seeds 3]

A convolutional net of 128,000 weights is trained on Fashion-MNIST, then frozen. Adapters of rank 8
on its layers and a new last layer learn MNIST, from all 55,000 labels, a tenth and a hundredth of
them. A transformer of 160,000 weights is trained on the characters of the docstrings of Python's
standard library; adapters learn those of decimal arithmetic, of which the last quarter is scored.
"""

import ast
import copy
import math
import sysconfig
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from _helpers import tables as tabulate
from _helpers.images import images, train_and_validation
from _helpers.posteriors import (
    POINT_PRIOR,
    Clock,
    Method,
    Problem,
    Scores,
    Sets,
    Task,
    by_fit,
    dropout_draws,
    dropout_map,
    ensemble_of,
    laplace,
    measure,
    named,
)
from _helpers.run import (
    Data,
    DataSettings,
    Picture,
    Run,
    SeveralSeeds,
    check_names,
    fingerprint,
)
from _helpers.scores import SCORES, draws
from _helpers.tables import Summaries, Table
from _helpers.training import train_plain
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import pyro_bbb as bbb

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
CONTEXT = 64
DECIMAL = "_pydecimal.py"  # decimal arithmetic: its rules, with examples
LEFT_OUT = {DECIMAL, "test", "tests", "idle_test", "lib2to3", "site-packages"}


def library(*, smoke: bool) -> str:
    """Return the docstrings of all modules but decimal arithmetic; in a smoke test of one."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [root / "argparse.py"] if smoke else sorted(root.rglob("*.py"))
    return docstrings(p for p in files if not LEFT_OUT & {*p.relative_to(root).parts})


def decimal() -> str:
    """Return the docstrings of decimal arithmetic."""
    return docstrings([Path(sysconfig.get_paths()["stdlib"]) / DECIMAL])


def docstrings(files: Iterable[Path]) -> str:
    """Return the docstrings of Python files in order, with an empty line between."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts: list[str] = []
    for path in files:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in old files
            tree = ast.parse(path.read_bytes())
        nodes = (node for node in ast.walk(tree) if isinstance(node, documented))
        docstrings = map(ast.get_docstring, nodes)
        texts += [docstring for docstring in docstrings if docstring]
    return "\n\n".join(texts)


def sequences(text: str) -> Data:
    """Numbers of characters ``[n, 64]``, and of those that follow each, ``[n, 64]``.

    A character that is not ASCII counts as a question mark.
    """
    number = {character: i for i, character in enumerate(CHARACTERS)}
    numbers = torch.tensor([number.get(character, number["?"]) for character in text])
    n = (len(numbers) - 1) // CONTEXT
    x, y = (characters[: n * CONTEXT].reshape(n, CONTEXT) for characters in (numbers, numbers[1:]))
    return x, y


def convolutional(dropout: float, width: int) -> nn.Sequential:
    """Three convolutions and a hidden layer of 128 units; dropout before the dense layers."""
    layers: dict[str, nn.Module] = {}
    for i, (inputs, outputs) in enumerate(pairwise((1, width, 2 * width, 2 * width)), start=1):
        layers[f"conv{i}"] = nn.Conv2d(inputs, outputs, 3, padding=1)
        layers |= {f"relu{i}": nn.ReLU(), f"pool{i}": nn.MaxPool2d(2)}
    layers |= {"flatten": nn.Flatten(), "drop1": nn.Dropout(dropout)}
    layers |= {"fc": nn.Linear(2 * width * 9, 128), "relu4": nn.ReLU()}
    layers |= {"drop2": nn.Dropout(dropout), "last": nn.Linear(128, 10)}
    return named(layers)


class Characters(nn.Module):
    """A transformer of 64 characters: the logits of the next after each."""

    def __init__(self, dropout: float, width: int) -> None:
        super().__init__()
        self.network = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=len(CHARACTERS),
                n_positions=CONTEXT,
                n_embd=width,
                n_layer=3,
                n_head=4,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=None,
                eos_token_id=None,
                use_cache=False,
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, 64, 96]`` of characters ``[n, 64]``."""
        logits: Tensor = self.network(x).logits
        return logits


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of network, and its layers that are adapted."""

    make: Callable[[float, int], nn.Module]
    """Makes it with random weights, from a rate of dropout and a width."""
    width: int  # its width; in smoke tests it is 8
    epochs: int  # passes of its first training
    adapted: str  # layers that get adapters
    last: str | None = None  # the last layer, if it is new for each task


FAMILIES = {
    "images": Family(make=convolutional, width=32, epochs=4, adapted="conv*|fc", last="last"),
    "characters": Family(make=Characters, width=64, epochs=5, adapted="*.h.*"),
}


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Mean over the labels, of which an input may have several."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())


RANK = 8
HELD_OUT = {"images": 1 / 12, "characters": 1 / 5}  # of the training part, to choose settings


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Data that a pretrained network is adapted to."""

    title: str  # name in tables and figures
    family: str  # name in `FAMILIES`
    fraction: float  # of the data for training
    epochs: int  # passes over them


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
        """Return the pretrained network with random adapters, and a random new last layer."""
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

    root: Path  # the folder
    data_root: Path | None  # folder of the data sets, see `images`
    smoke: bool  # train tiny networks on a few images and characters

    def sets(self, name: str, *, testing: bool) -> Sets:
        """Return the data of an adaptation: scored are those of the test or of validation."""
        at = ADAPTATIONS[name]
        pictures = at.family == "images"
        read = partial(self._images, "mnist") if pictures else self._decimal
        train, valid = train_and_validation(read(train=True), HELD_OUT[at.family])
        if at.fraction < 1 and not self.smoke:
            train = train_and_validation(train, at.fraction)[1]
        scored = read(train=False) if testing else valid
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
        """Return the first three quarters of the text, or the rest."""
        text = decimal()[: 10_000 if self.smoke else None]
        end = len(text) * 3 // 4
        return sequences(text[:end] if train else text[end:])

    def _pretrained(self, family: str, dropout: float) -> nn.Module:
        """Return a network after its first training, with a rate of dropout."""
        path = self._folder / f"{family}.safetensors"
        if not path.exists():
            torch.manual_seed(0)
            network = self._network(family, dropout=0.0)
            data = sequences(library(smoke=self.smoke))
            if family == "images":
                data = self._images("fashion_mnist", train=True)
            epochs = 1 if self.smoke else FAMILIES[family].epochs
            train_plain(network, data, epochs, batch_size=64, lr=2e-3, loss=cross_entropy)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_model(network, path)
        network = self._network(family, dropout)
        load_model(network, path)
        return network

    def _network(self, family: str, dropout: float) -> nn.Module:
        return FAMILIES[family].make(dropout, 8 if self.smoke else FAMILIES[family].width)


DRAWS = 10
FAN_IN = bbb.priors.FanInNormal(1.0)
POINT_LR = {"images": 1e-2, "characters": 3e-2}  # of a training without a posterior
IMAGE_OPTIONS = {"temperature": 0.03, "lr": 3e-2}
TEXT_OPTIONS = {"temperature": 0.1, "lr": 3e-2, "batch_size": 16}
BAYES = {  # options of `by_fit`
    "mnist": IMAGE_OPTIONS | {"lr": 1e-2},
    "mnist_tenth": IMAGE_OPTIONS | {"estimator": "local_reparam"},
    "mnist_hundredth": IMAGE_OPTIONS,
    "decimal": TEXT_OPTIONS,
    "decimal_tenth": TEXT_OPTIONS,
}


def methods(name: str) -> dict[str, Method]:
    """Methods for an adaptation, by name.

    The transformer's last layer is its embedding, which stays frozen and has no Laplace posterior.
    """
    family = ADAPTATIONS[name].family
    lr = POINT_LR[family]
    by_map = by_fit("delta", POINT_PRIOR, lr=lr)
    by_dropout = dropout_map(0.1, POINT_PRIOR, times=1, lr=lr)
    by_bayes = by_fit("softplus_normal", FAN_IN, **BAYES[name])
    by_short = by_fit("softplus_normal", FAN_IN, times=0.5, **BAYES[name])
    by_name = {
        "map": Method(label="MAP", draws=0, train=by_map),
        "dropout": Method(label="MC dropout", draws=DRAWS, train=by_dropout, predict=dropout_draws),
        "ensemble": Method(label="ensemble of 5", draws=5, train=ensemble_of(5, by_map)),
        "bayes": Method(label="Bayesian adapters", draws=DRAWS, train=by_bayes),
        "bayes_short": Method(
            label="Bayesian adapters, 3 at half the epochs",
            draws=12,
            train=ensemble_of(3, by_short, draws=4),
        ),
    }
    if family == "images":
        by_name["laplace_last"] = Method(
            label="Laplace, last layer",
            draws=100,
            train=laplace("last.*", POINT_PRIOR, lr=lr, optimize_prior=True),
            options={"linearized": True},
        )
    return by_name


RATIOS = {"nll": "NLL, over that of MAP", "ece": "ECE, over that of MAP"}


def table(name: str, found: Summaries) -> Table:
    """Scores and costs of every method on one adaptation."""
    available = methods(name)
    last = ("bits per character", "nll", 1 / math.log(2), 3)
    if ADAPTATIONS[name].family == "images":
        last = ("AUROC, ood (%)", "ood.entropy", 100, 1)
    columns = [*SCORES, last, ("draws", draws), ("training", "training", 1, 1)]
    labelled = {available[method].label: summary for method, summary in found.items()}
    return tabulate.table(ADAPTATIONS[name].title, labelled, columns)


def draw(run: Run, results: dict[str, Summaries]) -> Picture:
    """Plot NLL and ECE of every method over those of MAP, by adaptation."""
    panels: dict[str, Any] = {label: {} for label in RATIOS.values()}
    for score, label in RATIOS.items():
        for name, method in methods("mnist").items():
            scored = {task: summaries for task, summaries in results.items() if name in summaries}
            ratios = [
                summaries[name]["mean"][score] / summaries["map"]["mean"][score]
                for summaries in scored.values()
            ]
            panels[label][method.label] = list(scored), ratios
    return run.curves("adapters", "Means over seeds; lower is better.", panels)


@dataclass(frozen=True)
class Config(SeveralSeeds, DataSettings):
    """Settings of one run."""

    tasks: tuple[str, ...] = tuple(ADAPTATIONS)
    """Tasks: mnist, mnist_tenth, mnist_hundredth, decimal, decimal_tenth."""
    methods: tuple[str, ...] = ()
    """Methods, instead of all."""
    scored: Literal["test", "validation"] = "test"
    """Data that are scored; settings were chosen on those of validation."""


def compare(config: Config, run: Run, name: str) -> Summaries:
    """All methods on one task: the figures of the seeds, their means and deviations."""
    options = {"data_root": config.data_root, "smoke": config.smoke}
    trainings = Adaptations(root=config.output / "trainings", **options)
    sets, available = trainings.sets(name, testing=config.scored == "test"), methods(name)

    def one(method: str, seed: int) -> Scores:
        return measure(trainings.task(name, method, seed, sets), available[method], sets)

    return run.compare(one, available, config.methods, name)


def main(config: Config) -> dict[str, Any]:
    """Trains and scores every method on every task, prints the tables and writes the results."""
    check_names("--tasks", config.tasks, ADAPTATIONS)
    known = (name for task in config.tasks for name in methods(task))
    check_names("--methods", config.methods, known)
    if config.smoke:
        tasks, few = ("mnist_hundredth", "decimal"), ("map", "bayes")
        config = replace(config, tasks=tasks, methods=config.methods or few, seeds=1)
    run = Run(config, free=("tasks", "methods"))
    results = {name: compare(config, run, name) for name in config.tasks}
    scaled = all("map" in summaries for summaries in results.values())
    pictures = [draw(run, results)] if scaled else []
    all_tables = [table(name, summaries) for name, summaries in results.items()]
    return run.report(__doc__, {"tasks": results}, all_tables, pictures)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
