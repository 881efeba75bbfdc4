# SPDX-License-Identifier: Apache-2.0
"""Methods that learn one task after another."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions.transforms import SoftplusTransform

import pyro_bbb as bbb
from _helpers.continual_memory import DiagonalMemory
from _helpers.continual_tasks import Protocol, Task
from _helpers.run import Data
from pyro_bbb import guides


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
