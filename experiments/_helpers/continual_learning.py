# SPDX-License-Identifier: Apache-2.0
"""Tasks in sequence, learners that see each once, and the settings of each method."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyro.distributions import Normal
from torch import Tensor, nn
from torch.distributions.transforms import SoftplusTransform

import pyro_bbb as bbb
from _helpers.continual_memory import DiagonalMemory, KroneckerMemory
from _helpers.images import images, train_and_validation
from _helpers.run import Data
from pyro_bbb import guides


@dataclass(frozen=True)
class Task:
    """One task: images ``[n, 784]``, labels ``[n]``, and the last layer that answers it."""

    data: Callable[[bool], Data]
    """The training part, or the one that is scored."""
    head: str
    """Name of its last layer; tasks of one name share it."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A published sequence of tasks."""

    title: str
    dataset: str
    hidden: tuple[int, int]
    """Units of the hidden layers."""
    outputs: int
    """Classes of a task."""
    own_heads: bool
    """Each task has a last layer of its own, and its name is known when it is scored."""
    tasks: Callable[[Data, Data, int, bool], list[Task]]
    """Makes them, of training and scored images, and a seed."""
    coreset: int
    """Images of each task that a coreset keeps."""
    published: dict[str, float] = field(default_factory=dict)
    """Average accuracy after the last task, by method."""

    def sequence(
        self, root: Path | None, *, smoke: bool, seed: int, validation: bool = False
    ) -> list[Task]:
        """The tasks; with ``validation``, held-out training images take the test images' part."""
        train = images(self.dataset, root, train=True, smoke=smoke)
        if validation:
            train, scored = train_and_validation(train, 1 / 12)
        else:
            scored = images(self.dataset, root, train=False, smoke=smoke)
        (x, y), (x_scored, y_scored) = train, scored
        flat = (x.flatten(1), y), (x_scored.flatten(1), y_scored)
        return self.tasks(*flat, seed, self.own_heads)


def permuted(train: Data, scored: Data, seed: int, own_heads: bool) -> list[Task]:
    """Ten tasks: all digits, the pixels in another order each time, the first as they are."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.arange(784), *(torch.randperm(784, generator=generator) for _ in range(9))]
    return [Task(reordered(train, scored, order), "last") for order in orders]


def reordered(train: Data, scored: Data, order: Tensor) -> Callable[[bool], Data]:
    """Images whose pixels are in another order, made when they are asked for."""

    def data(training: bool) -> Data:
        x, y = train if training else scored
        return x[:, order], y

    return data


def split(train: Data, scored: Data, seed: int, own_heads: bool) -> list[Task]:
    """Five tasks: to tell class 0 from 1, then 2 from 3, and so on."""
    return [
        Task(pair(train, scored, first), f"last{first // 2}" if own_heads else "last")
        for first in range(0, 10, 2)
    ]


def pair(train: Data, scored: Data, first: int) -> Callable[[bool], Data]:
    """Images of two classes that follow each other, labelled 0 and 1."""

    def data(training: bool) -> Data:
        x, y = train if training else scored
        rows = (y == first) | (y == first + 1)
        return x[rows], y[rows] - first

    return data


PROTOCOLS = {
    "permuted": Protocol(
        title="permuted MNIST",
        dataset="mnist",
        hidden=(100, 100),
        outputs=10,
        own_heads=False,
        tasks=permuted,
        coreset=200,
        published={
            "VCL": 0.90,
            "VCL, random coreset of 200": 0.93,
            "mean field, Swaroop et al.": 0.93,
            "EWC": 0.84,
            "SI": 0.86,
            "Laplace propagation": 0.82,
        },
    ),
    "split": Protocol(
        title="split MNIST",
        dataset="mnist",
        hidden=(256, 256),
        outputs=2,
        own_heads=True,
        tasks=split,
        coreset=40,
        published={
            "VCL": 0.970,
            "VCL, random coreset of 40": 0.984,
            "mean field, Swaroop et al.": 0.984,
            "EWC": 0.631,
            "SI": 0.989,
        },
    ),
    "split_fashion": Protocol(
        title="split Fashion-MNIST",
        dataset="fashion_mnist",
        hidden=(256, 256),
        outputs=2,
        own_heads=True,
        tasks=split,
        coreset=40,
    ),
    "split_one_head": Protocol(
        title="split MNIST, the task not known",
        dataset="mnist",
        hidden=(256, 256),
        outputs=2,
        own_heads=False,
        tasks=split,
        coreset=40,
        published={"VCL": 0.64, "TD-VCL": 0.66},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Hyper-parameters of a method."""

    guide: str
    """Name of the guide."""
    options: dict[str, Any] = field(default_factory=dict)
    """Its arguments."""
    first_prior: Any = field(default_factory=bbb.priors.FanInNormal)
    """Prior of the weights before any task."""
    strength: float = 1.0
    """Factor of what earlier tasks say in the prior, see `Memory`; 0 forgets it."""
    memory: Callable[[Any, float], Any] = DiagonalMemory
    """What holds earlier tasks: `DiagonalMemory`, or `KroneckerMemory` for a point."""
    loss: str | None = None
    """Objective, see `pyro_bbb.fit`."""
    coreset: str = ""
    """How images of each task are kept: "random" or "k_center"; none by default."""
    temperature: float = 1.0
    """Weight of the KL; 1 is Bayes' rule."""
    estimator: str = "reparam"
    """Gradient estimator."""
    lr: float = 3e-3
    """Learning rate at the start of a task."""
    epochs: int = 10
    """Passes over each task."""
    batch_size: int = 256
    """Images per step."""
    draws: int = 20
    """Draws of the weights in predictions; 0 for their means."""
    engine: str = "compiled"
    """How steps are run, see `pyro_bbb.fit`."""


class Learner:
    """Learns tasks in sequence: yesterday's posterior is today's prior (Nguyen et al. 2018)."""

    def __init__(
        self,
        protocol: Protocol,
        settings: Settings,
        seed: int,
        network: Callable[[str], nn.Module] | None = None,
    ) -> None:
        self.protocol, self.settings, self.seed = protocol, settings, seed
        self.network = network or partial(network_of, protocol)
        self.memory = settings.memory(settings.first_prior, settings.strength)
        self.latest: dict[str, Any] = {}  # guide by head, the latest one last
        self.coresets: dict[str, list[Data]] = {}
        self.refined: dict[str, Any] = {}

    def learn(self, task: Task) -> None:
        """Learn a task, and set images aside if there are coresets."""
        data = self.set_aside(task, task.data(True))
        model, guide = self.posterior(task.head, len(data[0]))
        self.fit(model, guide, data)
        self.latest.pop(task.head, None)
        self.latest[task.head] = guide
        self.refined.clear()
        if self.settings.strength:
            known = self.model(task.head, self.settings.first_prior, len(data[0]))
            self.memory.add(known, guide, data)

    def predict(self, task: Task) -> bbb.ClassificationPrediction:
        """Predict the scored images; coresets are learned before, for this prediction alone."""
        x, _ = task.data(False)
        if task.head not in self.refined:
            self.refined[task.head] = self.refine(task.head)
        model, draws = self.refined[task.head]
        answer = bbb.predict(model, draws, x)
        assert isinstance(answer, bbb.ClassificationPrediction)
        return answer

    def refine(self, head: str) -> tuple[bbb.BayesianModel, dict[str, Tensor]]:
        """A model, and draws of its weights after the tasks and the coresets of a last layer."""
        known = self.known(head)
        if head in self.coresets:
            x, y = map(torch.cat, zip(*self.coresets[head], strict=True))
            model, guide = self.posterior(head, len(x))
            self.fit(model, guide, (x, y))
            known = [guide]
        else:
            model = self.model(head, self.settings.first_prior, 1)
        torch.manual_seed(self.seed)
        draws = {k: v for each in known for k, v in self.draw(each).items()}
        return model, {name: draws[name] for name in model.latent_shapes()}

    def draw(self, guide: Any) -> dict[str, Tensor]:
        """Draws of a guide's weights, or one that has their means."""
        if not self.settings.draws:
            return {name: loc[None] for name, loc in guide.median().items()}
        draws: dict[str, Tensor] = guide.sample_posterior(self.settings.draws)
        return draws

    def known(self, head: str) -> list[Any]:
        """Guides with a last layer and with all others; the later one is right in common."""
        newest = list(self.latest.values())[-1:]
        return [*(self.latest[name] for name in [head] if name in self.latest), *newest]

    def model(self, head: str, prior: Any, num_data: int) -> bbb.BayesianModel:
        """A network with a last layer that starts from what was learned, and a prior."""
        torch.manual_seed(self.seed + len(self.latest))  # no two last layers start alike
        network = self.network(head)
        for each in self.known(head):
            learned = {k.removeprefix("network."): loc for k, loc in each.median().items()}
            network.load_state_dict(learned, strict=False)
        return bbb.BayesianModel(
            bbb.bayesianize(network, prior), bbb.likelihoods.Categorical(), num_data
        )

    def posterior(self, head: str, num_data: int) -> tuple[bbb.BayesianModel, Any]:
        """A model with all that was learned as prior, and a guide that starts there.

        With its scales, too: a scale far above its prior's may never come down to it, and would
        leave no precision to remember.
        """
        model = self.model(head, self.memory.prior(), num_data)
        guide = guides.make(self.settings.guide, model, **self.settings.options)
        if self.settings.guide == "softplus_normal":
            rhos = {
                f"rhos.{name}": SoftplusTransform().inv(scale)
                for name, scale in self.memory.scales()
            }
            guide.load_state_dict(rhos, strict=False)
        return model, guide

    def fit(self, model: Any, guide: Any, data: Data) -> None:
        """Train a guide by the settings."""
        of = self.settings
        bbb.fit(
            model,
            guide,
            data,
            epochs=of.epochs,
            batch_size=of.batch_size,
            lr=of.lr,
            estimator=of.estimator,
            loss=of.loss,
            kl_schedule=bbb.KLSchedule(temperature=of.temperature),
            engine=of.engine,
            progress=False,
            seed=self.seed + len(self.latest),
        )

    def set_aside(self, task: Task, data: Data) -> Data:
        """The data without those that the task's coreset keeps."""
        if not self.settings.coreset:
            return data
        x, y = data
        if self.settings.coreset == "k_center":
            rows = bbb.data.k_center(x, self.protocol.coreset, seed=self.seed)
        else:
            generator = torch.Generator().manual_seed(self.seed)
            rows = torch.randperm(len(x), generator=generator)[: self.protocol.coreset]
        self.coresets.setdefault(task.head, []).append((x[rows], y[rows]))
        others = torch.ones(len(x), dtype=torch.bool)
        others[rows] = False
        return x[others], y[others]


def network_of(protocol: Protocol, head: str, heads: int = 1) -> nn.Sequential:
    """A perceptron of ReLU units whose last layer has a task's name."""
    network, sizes = nn.Sequential(), (784, *protocol.hidden)
    for i, (inputs, outputs) in enumerate(zip(sizes, sizes[1:], strict=False), start=1):
        network.add_module(f"fc{i}", nn.Linear(inputs, outputs))
        network.add_module(f"relu{i}", nn.ReLU())
    network.add_module(head, nn.Linear(sizes[-1], heads * protocol.outputs))
    return network


class Chosen(nn.Module):
    """Outputs of one task's last layer for each image, of a network that has all of them.

    The number of the task is the last column of its inputs ``[n, 785]``.
    """

    def __init__(self, network: nn.Module, outputs: int) -> None:
        super().__init__()
        self.network, self.outputs = network, outputs

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[n, classes]``."""
        heads = self.network(x[:, :-1]).unflatten(-1, (-1, self.outputs))
        task = x[:, -1].long()[:, None, None].expand(-1, 1, self.outputs)
        return heads.gather(1, task).squeeze(1)


class AllTasks:
    """Tasks to be learned at once; where each has a last layer, the inputs say which."""

    def __init__(self, protocol: Protocol, tasks: list[Task]) -> None:
        self.protocol, self.number = protocol, len(tasks)
        self.tasks = [Task(self.numbered(task, i), "last") for i, task in enumerate(tasks)]

    def network(self, head: str) -> nn.Module:
        """The network, with the last layers of all tasks."""
        if not self.protocol.own_heads:
            return network_of(self.protocol, head)
        return Chosen(network_of(self.protocol, head, self.number), self.protocol.outputs)

    def numbered(self, task: Task, number: int) -> Callable[[bool], Data]:
        """A task's data, with its number as the last column where a network needs it."""

        def data(training: bool) -> Data:
            x, y = task.data(training)
            if self.protocol.own_heads:
                x = torch.cat([x, torch.full((len(x), 1), float(number))], dim=-1)
            return x, y

        return data

    def joined(self) -> Task:
        """All tasks as one."""

        def data(training: bool) -> Data:
            xs, ys = zip(*(task.data(training) for task in self.tasks), strict=True)
            return torch.cat(xs), torch.cat(ys)

        return Task(data, "last")


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to learn tasks in sequence."""

    label: str
    """Name in tables and figures."""
    settings: Settings
    """Its hyper-parameters."""
    at_once: bool = False
    """Learn all tasks together."""


PERMUTED = Settings(
    guide="softplus_normal",
    options={"init_rho": -2.5},
    temperature=0.3,
    strength=10.0,
    estimator="local_reparam",
    loss="mean_field",
    lr=5e-3,
    epochs=6,
)
SPLIT = replace(
    PERMUTED,
    first_prior=Normal(0.0, 1.0),
    temperature=0.01,
    strength=100.0,
    lr=1e-3,
    epochs=20,
)
EWC_PERMUTED = Settings(
    guide="laplace", options={"structure": "diag"}, strength=3.0, lr=1e-3, draws=0
)
EWC_SPLIT = replace(EWC_PERMUTED, first_prior=Normal(0.0, 1.0), strength=1e4)
KRONECKER_PERMUTED = Settings(
    guide="delta", memory=KroneckerMemory, strength=6.0, lr=2e-3, epochs=12, draws=0
)
KRONECKER_SPLIT = replace(KRONECKER_PERMUTED, first_prior=Normal(0.0, 1.0), strength=100.0)


def methods(vcl: Settings, ewc: Settings, kronecker: Settings) -> dict[str, Method]:
    """The methods of one protocol, by the settings of the three that remember on it."""
    label = f"VCL, strength {vcl.strength:g}"
    plain = replace(vcl, strength=1.0)
    point = Settings(guide="delta", first_prior=vcl.first_prior, strength=0.0, lr=1e-3)
    return {
        "vcl": Method(label=label, settings=vcl),
        "vcl_random": Method(
            label=f"{label}, random coreset", settings=replace(vcl, coreset="random")
        ),
        "vcl_k_center": Method(
            label=f"{label}, k-center coreset", settings=replace(vcl, coreset="k_center")
        ),
        "plain": Method(label="VCL, strength 1", settings=plain),
        "bayes": Method(
            label="VCL, strength 1, temperature 1", settings=replace(plain, temperature=1.0)
        ),
        "laplace": Method(label=f"online Laplace (EWC), strength {ewc.strength:g}", settings=ewc),
        "kronecker": Method(
            label=f"Kronecker Laplace, strength {kronecker.strength:g}", settings=kronecker
        ),
        "fine_tuning": Method(label="fine-tuning", settings=point),
        "joint": Method(label="all tasks at once", settings=point, at_once=True),
    }


METHODS = {
    "permuted": methods(PERMUTED, EWC_PERMUTED, KRONECKER_PERMUTED),
    "split": methods(SPLIT, EWC_SPLIT, KRONECKER_SPLIT),
    "split_fashion": methods(SPLIT, EWC_SPLIT, KRONECKER_SPLIT),
    "split_one_head": methods(SPLIT, EWC_SPLIT, KRONECKER_SPLIT),
}
