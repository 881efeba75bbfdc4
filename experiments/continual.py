# SPDX-License-Identifier: Apache-2.0
"""Continual learning: one task after another, yesterday's posterior as today's prior.

    python experiments/continual.py [--protocols permuted split split_fashion] [--seeds 3]

After Nguyen et al. (2018), "Variational continual learning" (VCL), arXiv:1710.10628. Permuted
MNIST: ten tasks, all digits with the pixels in another order each time, 784-100-100-10, one last
layer. Split MNIST and split Fashion-MNIST: five tasks of two classes, 784-256-256-2, a last layer
for each task. Each task is seen once. The prior of its weights is the posterior after the tasks
before (`pyro_bbb.priors.from_guide`), where the guide starts, too. Beside it are diagonal Laplace
in sequence (what EWC, Kirkpatrick et al. 2017, approximates), Laplace with Kronecker factors
(Ritter et al. 2018, arXiv:1805.07810), fine-tuning, all tasks at once, and VCL with coresets:
images kept from each task (random, or by `pyro_bbb.data.k_center`), which it learns again before it
predicts. ``split_one_head`` is split MNIST where the task is not given.
"""

import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from _helpers import tables as tabulate
from _helpers.images import images, train_and_validation
from _helpers.run import Data, DataSettings, Picture, Run, SeveralSeeds, check_names
from _helpers.tables import Scores, Summaries, Summary, Table, over_seeds
from _helpers.training import Training, named
from pyro import poutine
from pyro.distributions import MultivariateNormal, Normal, TransformedDistribution
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Tensor, nn
from torch.distributions.transforms import ReshapeTransform, SoftplusTransform

import pyro_bbb as bbb
from pyro_bbb import guides, metrics, plots
from pyro_bbb.guides.covariance import Kronecker, PartsNormal

ONE_SD = [0.15865525393145707, 0.5, 0.8413447460685429]  # quantiles of a Normal


class Memory:
    """Means of the weights, and what the tasks so far gave them, by site name.

    Args:
        first_prior: prior of the weights before any task.
        strength: factor of what tasks gave.
    """

    def __init__(self, first_prior: Any, strength: float) -> None:
        self.first_prior, self.strength = first_prior, strength
        self.loc: dict[str, Tensor] = {}
        self.first: dict[str, Tensor] = {}  # precision of the first prior

    def prior(self) -> Any:
        """Priors by the weights' names in a network; the first one of weights without a memory."""
        known = {
            name.removeprefix("network."): partial(lambda normal, *_: normal, self.normal(name))
            for name in self.loc
        }
        return {**known, "*": self.first_prior}


def first_precisions(model: Any) -> dict[str, Tensor]:
    """Precision of each weight's prior in a model, by site name."""
    sites = poutine.trace(model.draw_latents).get_trace().nodes
    return {name: 1 / sites[name]["fn"].variance.detach() for name in model.latent_shapes()}


class DiagonalMemory(Memory):
    r"""Means of the weights, and the precision that the tasks so far gave them.

    A posterior has the precision of its prior and what its task gave. The next prior is the first
    one with ``strength`` times the sum of what all tasks gave. With strength 1 that is the
    posterior (`pyro_bbb.priors.from_guide`); more holds the means faster and leaves the variance
    of the posterior to the data, as in generalised VCL (Loo, Swaroop and Turner 2021,
    arXiv:2011.12328) and in EWC.
    """

    def __init__(self, first_prior: Any, strength: float) -> None:
        super().__init__(first_prior, strength)
        self.gained: dict[str, Tensor] = {}

    def normal(self, name: str) -> TorchDistribution:
        """Return the prior of a weight for the next task."""
        loc = self.loc[name]
        return Normal(loc, self.scale(name)).to_event(loc.dim())

    def scale(self, name: str) -> Tensor:
        """Return the standard deviation of a weight's prior."""
        return (self.first[name] + self.strength * self.gained[name]).rsqrt()

    def add(self, model: Any, guide: Any, data: Data) -> None:
        """Add what a task gave to the weights of a Normal guide; the model has `first_prior`."""
        first = first_precisions(model)
        for name, (below, loc, above) in guide.quantiles(ONE_SD).items():
            if name not in self.loc:
                self.first[name], self.gained[name] = first[name], torch.zeros_like(loc)
            gain = ((above - below) / 2).detach() ** -2 - self.scale(name) ** -2
            self.gained[name] = self.gained[name] + gain.clamp(min=0)
            self.loc[name] = loc.detach()


class KroneckerMemory(Memory):
    r"""Means of the weights, and the curvature that the tasks so far gave them.

    Laplace's approximation of one task after the other (Ritter, Botev and Barber 2018,
    arXiv:1805.07810): the next prior of a kernel $[o, i]$ has the latest mean and the precision

    $$h I + \lambda \Big(\sum_t H_t\Big) \otimes \Big(\frac1T \sum_t A_t\Big)$$

    with h that of the first prior, $\lambda$ the strength, and $H_t \otimes A_t$ the Gauss-Newton
    curvature of task t: $H_t$ ``[o, o]`` of the outputs, $A_t$ ``[i, i]`` of the inputs, of trace
    1. That of a bias is $h I + \lambda \sum_t H_t$.
    """

    def __init__(self, first_prior: Any, strength: float) -> None:
        super().__init__(first_prior, strength)
        self.of_outputs: dict[str, Tensor] = {}  # sum of the tasks'
        self.of_inputs: dict[str, list[Tensor]] = {}  # one of each task; none for biases

    def normal(self, name: str) -> TorchDistribution:
        """Return the prior of a weight for the next task."""
        loc, first = self.loc[name], self.first[name]
        of_outputs = self.strength * self.of_outputs[name]
        if name not in self.of_inputs:
            precision = of_outputs + first * torch.eye(len(loc))
            return MultivariateNormal(loc, precision_matrix=precision)
        of_inputs = torch.stack(self.of_inputs[name]).mean(0)
        return kronecker_normal(loc, of_outputs, of_inputs, first)

    def add(self, model: Any, guide: Any, data: Data) -> None:
        """Add the curvature at a guide's means, which is what a precision has above the prior's."""
        laplace = guides.Laplace(model, structure="kron")
        with warnings.catch_warnings():  # of its draws, which nobody predicts with
            warnings.simplefilter("ignore", guides.LinearizationWarning)
            laplace.approximate(data)
        precisions, loc = first_precisions(model), guide.median()
        for name, factor in zip(laplace.site_names, laplace.covariance, strict=True):
            self.loc[name], self.first[name] = loc[name].detach(), precisions[name].mean()
            if self.loc[name].dim() == 1:
                precision = torch.cholesky_inverse(factor.scale_tril)
                gained = precision - self.first[name] * torch.eye(len(precision))
            else:
                curvature = (factor.scale**-2 - self.first[name]).clamp(min=0)  # of rank one
                gained = factor.out * curvature.sum(1) @ factor.out.T
                of_inputs = factor.inner * (curvature.sum(0) / curvature.sum()) @ factor.inner.T
                self.of_inputs.setdefault(name, []).append(of_inputs)
            self.of_outputs[name] = self.of_outputs.get(name, 0.0) + gained


def kronecker_normal(
    loc: Tensor, of_outputs: Tensor, of_inputs: Tensor, first: Tensor | float
) -> TransformedDistribution:
    r"""Return the Normal of a matrix ``[o, i]`` of precision $h I + H \otimes A$; h: ``first``."""
    outer, out = torch.linalg.eigh(of_outputs)
    inner, directions = torch.linalg.eigh(of_inputs)
    curvature = torch.outer(outer.clamp(min=0), inner.clamp(min=0))
    block = Kronecker(slice(0, loc.numel()))
    block.set(out=out, inner=directions, scale=(curvature + first).rsqrt())
    flat = PartsNormal(loc.flatten(), [block])
    return TransformedDistribution(flat, [ReshapeTransform(flat.event_shape, loc.shape)])


@dataclass(frozen=True)
class Task:
    """One task: images ``[n, 784]``, labels ``[n]``, and the last layer that answers it."""

    data: Callable[[bool], Data]  # the training part, or the one that is scored
    head: str  # name of its last layer; tasks of one name share it


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A published sequence of tasks."""

    title: str
    dataset: str
    hidden: tuple[int, int]  # units of the hidden layers
    outputs: int  # classes of a task
    own_heads: bool
    """Each task has a separate last layer, and its name is known when it is scored."""
    tasks: Callable[[Data, Data, int, bool], list[Task]]
    """Makes them, of training and scored images, and a seed."""
    coreset: int  # images of each task that a coreset keeps
    published: dict[str, float] = field(default_factory=dict)
    """Average accuracy after the last task, by method."""


def permuted(train: Data, scored: Data, seed: int, own_heads: bool) -> list[Task]:
    """Ten tasks: all digits, the pixels in another order each time, the first as they are."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.arange(784), *(torch.randperm(784, generator=generator) for _ in range(9))]

    def reordered(order: Tensor, training: bool) -> Data:
        x, y = train if training else scored
        return x[:, order], y

    return [Task(partial(reordered, order), "last") for order in orders]


def split(train: Data, scored: Data, seed: int, own_heads: bool) -> list[Task]:
    """Five tasks: to tell class 0 from 1, then 2 from 3, and so on."""

    def pair(first: int, training: bool) -> Data:
        x, y = train if training else scored
        rows = (y == first) | (y == first + 1)
        return x[rows], y[rows] - first

    return [
        Task(partial(pair, first), f"last{first // 2}" if own_heads else "last")
        for first in range(0, 10, 2)
    ]


SPLIT_MNIST = Protocol(
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
)
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
    "split": SPLIT_MNIST,
    "split_fashion": replace(
        SPLIT_MNIST, title="split Fashion-MNIST", dataset="fashion_mnist", published={}
    ),
    "split_one_head": replace(
        SPLIT_MNIST,
        title="split MNIST, the task not known",
        own_heads=False,
        published={"VCL": 0.64, "TD-VCL": 0.66},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings(Training):
    """A way to learn tasks in sequence."""

    label: str = ""  # its name in tables and figures
    at_once: bool = False  # learn all tasks together
    guide: str  # name of the guide
    options: dict[str, Any] = field(default_factory=dict)  # its arguments
    first_prior: Any = field(default_factory=bbb.priors.FanInNormal)
    """Prior of the weights before any task."""
    strength: float = 1.0
    """Factor of what earlier tasks say in the prior, see `Memory`; 0 forgets it."""
    memory: Callable[[Any, float], Any] = DiagonalMemory
    """What holds earlier tasks: `DiagonalMemory`, or `KroneckerMemory` for a point."""
    loss: str | None = None  # objective, see `pyro_bbb.fit`
    coreset: str = ""  # how images of each task are kept: "random" or "k_center"; none by default
    temperature: float = 1.0  # weight of the KL; 1 is Bayes' rule
    lr: float = 3e-3  # learning rate at the start of a task
    epochs: int = 10  # passes over each task
    batch_size: int = 256  # images per step
    draws: int = 20  # draws of the weights in predictions; 0 for their means
    engine: str = "compiled"  # how steps are run, see `pyro_bbb.fit`


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

    def predict(self, task: Task) -> Any:
        """Predict the scored images; coresets are learned before, for this prediction alone."""
        x, _ = task.data(False)
        if task.head not in self.refined:
            self.refined[task.head] = self.refine(task.head)
        model, draws = self.refined[task.head]
        return bbb.predict(model, draws, x)

    def refine(self, head: str) -> tuple[bbb.BayesianModel, dict[str, Tensor]]:
        """Return a model, and draws of its weights after the tasks and coresets."""
        known = self.known(head)
        if head in self.coresets:
            x, y = map(torch.cat, zip(*self.coresets[head], strict=True))
            model, guide = self.posterior(head, len(x))
            self.fit(model, guide, (x, y))
            known = [guide]
        else:
            model = self.model(head, self.settings.first_prior, 1)
        torch.manual_seed(self.seed)
        draws = {}
        for guide in known:
            means = {name: loc[None] for name, loc in guide.median().items()}
            number = self.settings.draws
            draws |= guide.sample_posterior(number) if number else means
        return model, {name: draws[name] for name in model.latent_shapes()}

    def known(self, head: str) -> list[Any]:
        """Guides with a last layer and with all others; the later one is right in common."""
        newest = list(self.latest.values())[-1:]
        return [*(self.latest[name] for name in [head] if name in self.latest), *newest]

    def model(self, head: str, prior: Any, num_data: int) -> bbb.BayesianModel:
        """Return a network with a last layer that starts from what was learned, and a prior."""
        torch.manual_seed(self.seed + len(self.latest))  # no two last layers start alike
        network = self.network(head)
        for guide in self.known(head):
            learned = {k.removeprefix("network."): loc for k, loc in guide.median().items()}
            network.load_state_dict(learned, strict=False)
        return bbb.BayesianModel(
            bbb.bayesianize(network, prior), bbb.likelihoods.Categorical(), num_data
        )

    def posterior(self, head: str, num_data: int) -> tuple[bbb.BayesianModel, Any]:
        """Return a model with all that was learned as prior, and a guide that starts there.

        With its scales, too: a scale far above its prior's may never come down to it, and would
        leave no precision to remember.
        """
        model = self.model(head, self.memory.prior(), num_data)
        guide = guides.make(self.settings.guide, model, **self.settings.options)
        if self.settings.guide == "softplus_normal":
            rhos = {
                f"rhos.{name}": SoftplusTransform().inv(self.memory.scale(name))
                for name in self.memory.loc
            }
            guide.load_state_dict(rhos, strict=False)
        return model, guide

    def fit(self, model: Any, guide: Any, data: Data) -> None:
        """Train a guide by the settings."""
        schedule = bbb.KLSchedule(temperature=self.settings.temperature)
        options = {"progress": False, "seed": self.seed + len(self.latest)}
        self.settings.fit(model, guide, data, kl_schedule=schedule, **options)

    def set_aside(self, task: Task, data: Data) -> Data:
        """Return the data without those that the task's coreset keeps."""
        if not self.settings.coreset:
            return data
        x, y = data
        if self.settings.coreset == "k_center":
            rows = bbb.data.k_center(x, self.protocol.coreset, seed=self.seed)
        else:
            generator = torch.Generator().manual_seed(self.seed)
            rows = torch.randperm(len(x), generator=generator)[: self.protocol.coreset]
        self.coresets.setdefault(task.head, []).append((x[rows], y[rows]))
        remaining = torch.ones(len(x), dtype=torch.bool)
        remaining[rows] = False
        return x[remaining], y[remaining]


def network_of(protocol: Protocol, head: str, heads: int = 1) -> nn.Sequential:
    """Return a perceptron of ReLU units whose last layer has a task's name."""
    first, second = protocol.hidden
    layers = {"fc1": nn.Linear(784, first), "relu1": nn.ReLU()}
    layers |= {"fc2": nn.Linear(first, second), "relu2": nn.ReLU()}
    return named(layers | {head: nn.Linear(second, heads * protocol.outputs)})


class Chosen(nn.Module):
    """Outputs of one task's last layer for each image, of a network that has all of them.

    The number of the task is the last column of its inputs ``[n, 785]``.
    """

    def __init__(self, network: nn.Module, outputs: int) -> None:
        super().__init__()
        self.network, self.outputs = network, outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs ``[n, classes]``."""
        heads = self.network(x[:, :-1]).unflatten(-1, (-1, self.outputs))
        task = x[:, -1].long()[:, None, None].expand(-1, 1, self.outputs)
        return heads.gather(1, task).squeeze(1)


class AllTasks:
    """Tasks to be learned at once; where each has a last layer, the inputs say which."""

    def __init__(self, protocol: Protocol, tasks: list[Task]) -> None:
        self.protocol, self.number = protocol, len(tasks)
        self.tasks = [Task(partial(self.numbered, task, i), "last") for i, task in enumerate(tasks)]
        self.joined = Task(self.all_data, "last")

    def network(self, head: str) -> nn.Module:
        """Return the network, with the last layers of all tasks."""
        if not self.protocol.own_heads:
            return network_of(self.protocol, head)
        return Chosen(network_of(self.protocol, head, self.number), self.protocol.outputs)

    def numbered(self, task: Task, number: int, training: bool) -> Data:
        """Return a task's data, with its number as the last column where a network needs it."""
        x, y = task.data(training)
        if self.protocol.own_heads:
            x = torch.cat([x, torch.full((len(x), 1), float(number))], dim=-1)
        return x, y

    def all_data(self, training: bool) -> Data:
        """Return the data of all tasks."""
        xs, ys = zip(*(task.data(training) for task in self.tasks), strict=True)
        return torch.cat(xs), torch.cat(ys)


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


def methods(vcl: Settings, ewc: Settings, kronecker: Settings) -> dict[str, Settings]:
    """Return the methods of one protocol, by the settings of the three that remember on it."""
    label = f"VCL, strength {vcl.strength:g}"
    point = Settings(guide="delta", first_prior=vcl.first_prior, strength=0.0, lr=1e-3)
    return {
        "vcl": replace(vcl, label=label),
        "vcl_random": replace(vcl, label=f"{label}, random coreset", coreset="random"),
        "vcl_k_center": replace(vcl, label=f"{label}, k-center coreset", coreset="k_center"),
        "laplace": replace(ewc, label=f"online Laplace (EWC), strength {ewc.strength:g}"),
        "kronecker": replace(
            kronecker, label=f"Kronecker Laplace, strength {kronecker.strength:g}"
        ),
        "fine_tuning": replace(point, label="fine-tuning"),
        "joint": replace(point, label="all tasks at once", at_once=True),
    }


METHODS = dict.fromkeys(PROTOCOLS, methods(SPLIT, EWC_SPLIT, KRONECKER_SPLIT))
METHODS["permuted"] = methods(PERMUTED, EWC_PERMUTED, KRONECKER_PERMUTED)


def table(name: str, found: Summaries) -> Table:
    """Average accuracy after the last task, and forgetting; with published accuracies."""
    protocol = PROTOCOLS[name]
    columns = (
        ("accuracy (%)", "accuracy", 100, 2),
        ("forgetting (%)", "forgetting", 100, 2),
        ("NLL (nats)", "nll", 1, 3),
        ("ECE (%)", "ece", 100, 2),
    )
    published = {
        f"published: {method}": (f"{100 * average:.1f}", *("–",) * 3)
        for method, average in protocol.published.items()
    }
    labelled = {METHODS[name][method].label: summary for method, summary in found.items()}
    title = f"{protocol.title}, after the last task"
    return tabulate.table(title, labelled, columns, published)


def first_seed(summary: Summary) -> dict[str, Any]:
    """Return the figures of a summary's first seed."""
    return next(iter(summary["seeds"].values()))


def draw_matrices(run: Run, name: str, found: Summaries) -> Picture:
    """Accuracy on every task after every task, a panel for each method."""
    first = {method: first_seed(summary) for method, summary in found.items()}
    matrices = {method: record["matrix"] for method, record in first.items() if "matrix" in record}
    rows = 1 if len(matrices) < 4 else 2
    columns = -(-len(matrices) // rows)
    with plots.style():
        figure, axes = plt.subplots(
            rows, columns, figsize=(3.3 * columns + 0.8, 3.1 * rows + 0.4), squeeze=False
        )
        for ax, (method, matrix) in zip(axes.flat, matrices.items(), strict=False):
            size = len(matrix)
            values = np.full((size, size), np.nan)
            for i, row in enumerate(matrix):
                values[i, : len(row)] = row
            picture = ax.imshow(100 * values, vmin=50, vmax=100, cmap="viridis")
            ax.set_title(METHODS[name][method].label, fontsize="small")
            ticks = range(0, size, 1 if size < 8 else 3)
            ax.set_xticks(ticks, [str(i + 1) for i in ticks])
            ax.set_yticks(ticks, [str(i + 1) for i in ticks])
            ax.set(xlabel="scored on task", ylabel="after task")
        for ax in axes.flat[len(matrices) :]:
            ax.set_axis_off()
        figure.colorbar(picture, ax=axes, label="accuracy (%)", shrink=0.8)
    return run.picture(figure, f"{name}_matrices", f"{PROTOCOLS[name].title}, the first seed.")


def draw_averages(run: Run, name: str, found: Summaries) -> Picture:
    """Errors on the tasks so far, by their number."""
    lines, tasks = {}, max(len(first_seed(x).get("averages", "-")) for x in found.values())
    for method, summary in found.items():
        averages = [x["averages"] for x in summary["seeds"].values() if "averages" in x]
        right = np.mean(averages or [[summary["mean"]["accuracy"]] * tasks], axis=0)
        lines[METHODS[name][method].label] = range(1, tasks + 1), 100 * (1 - right)
    axes = {"xlabel": "tasks learned", "ylabel": "wrong on these tasks (%)", "yscale": "log"}
    panels = {PROTOCOLS[name].title: lines}
    return run.curves(f"{name}_averages", "Means over seeds.", panels, **axes)


def draw_capacity(run: Run, name: str, found: Summaries) -> Picture:
    """Plot the distribution of the weights' signal-to-noise ratio after each task."""
    method = next(m for m in found if "snr" in first_seed(found[m]))
    by_task = first_seed(found[method])["snr"]
    lines = {
        f"task {i}": (levels, 100 * (1 - np.linspace(0, 1, len(levels))))
        for i, levels in enumerate(by_task, start=1)
    }
    axes = {"xlabel": "signal-to-noise ratio |loc| / scale (dB)", "xlim": (-40, 25)}
    axes["ylabel"] = "weights above it (%)"
    panels = {f"{PROTOCOLS[name].title}: {METHODS[name][method].label}": lines}
    caption = "Weights of the layers that tasks share."
    return run.curves(f"{name}_capacity", caption, panels, **axes)


LEVELS = 101  # quantiles of the signal-to-noise ratio


@dataclass(frozen=True)
class Config(SeveralSeeds, DataSettings):
    """Settings of one run."""

    protocols: tuple[str, ...] = ("permuted", "split", "split_fashion", "split_one_head")
    """Protocols: permuted, split, split_fashion, split_one_head."""
    methods: tuple[str, ...] = ()
    """Methods, instead of all."""
    validation: bool = False
    """Score 5,000 held-out training images; settings were chosen on these."""


def learn(protocol: Protocol, method: Settings, tasks: list[Task], seed: int) -> Scores:
    """Learn the tasks one after the other; after each, score those so far."""
    learner = Learner(protocol, method, seed)
    matrix, snr = [], []
    for i, task in enumerate(tasks):
        learner.learn(task)
        task_scores = [score(learner.predict(task), task) for task in tasks[: i + 1]]
        matrix.append([task_score["accuracy"] for task_score in task_scores])
        if method.guide == "softplus_normal":
            snr.append(signal_to_noise(learner.latest[task.head]))
    averages = [statistics.fmean(row) for row in matrix]
    history = {"matrix": matrix, "averages": averages, "forgetting": forgetting(matrix)}
    return over_seeds(task_scores)["mean"] | history | ({"snr": snr} if snr else {})


def learn_at_once(protocol: Protocol, method: Settings, tasks: list[Task], seed: int) -> Scores:
    """Learn the images of all tasks together, and score every task."""
    together = AllTasks(protocol, tasks)
    learner = Learner(protocol, method, seed, together.network)
    learner.learn(together.joined)
    task_scores = [score(learner.predict(task), task) for task in together.tasks]
    return over_seeds(task_scores)["mean"]


def score(answer: bbb.ClassificationPrediction, task: Task) -> dict[str, float]:
    """Accuracy and ECE in [0, 1], and NLL in nats."""
    _, y = task.data(False)
    return {
        "accuracy": metrics.accuracy(answer.probs, y),
        "nll": -answer.log_prob(y).double().mean().item(),  # finite where a probability is 0
        "ece": metrics.ece(answer.probs, y),
    }


def forgetting(matrix: list[list[float]]) -> float:
    """Mean over the tasks but the last of the best accuracy before it less the one after it.

    Chaudhry et al. (2018, arXiv:1801.10112), section 3.
    """
    *before, last = matrix
    best = [max(row[i] for row in before[i:]) for i in range(len(before))]
    return statistics.fmean(b - a for b, a in zip(best, last, strict=False)) if best else 0.0


def signal_to_noise(guide: Any) -> list[float]:
    """Quantiles of the ratio in decibel, over the weights of the layers that tasks share."""
    ratios = bbb.signal_to_noise(guide)
    shared = torch.cat([ratio.flatten() for name, ratio in ratios.items() if ".fc" in name])
    decibel = 10 * shared.clamp(min=1e-9).log10()
    levels = np.quantile(decibel.numpy(), np.linspace(0, 1, LEVELS))
    return [round(float(level), 2) for level in levels]


def compare(config: Config, run: Run, name: str) -> Summaries:
    """All methods on one protocol: the figures of the seeds, their means and deviations."""
    protocol = PROTOCOLS[name]
    get = partial(images, protocol.dataset, config.data_root, smoke=config.smoke)
    sets = get(train=True), get(train=False)
    if config.validation:
        sets = train_and_validation(sets[0], 1 / 12)
    train, scored = ((x.flatten(1), y) for x, y in sets)

    def one(label: str, seed: int) -> Scores:
        method = METHODS[name][label]
        tasks = protocol.tasks(train, scored, seed, protocol.own_heads)
        if config.smoke:  # of a size that needs no compiled steps
            tasks, method = tasks[:2], replace(method, epochs=1, engine="eager")
        return (learn_at_once if method.at_once else learn)(protocol, method, tasks, seed)

    return run.compare(one, METHODS[name], config.methods, name)


def main(config: Config) -> dict[str, Any]:
    """Learns every sequence by every method, prints the tables and writes the results."""
    check_names("--protocols", config.protocols, PROTOCOLS)
    known = (name for protocol in config.protocols for name in METHODS[protocol])
    check_names("--methods", config.methods, known)
    if config.smoke:
        config = replace(config, seeds=1, protocols=config.protocols[:2])
    run = Run(config, free=("protocols", "methods"))
    results = {name: compare(config, run, name) for name in config.protocols}
    tables = [table(name, summaries) for name, summaries in results.items()]
    pictures = []
    for name, found in results.items():
        pictures.append(draw_averages(run, name, found))
        if any("matrix" in first_seed(method) for method in found.values()):
            pictures.append(draw_matrices(run, name, found))
        if any("snr" in first_seed(method) for method in found.values()):
            pictures.append(draw_capacity(run, name, found))
    return run.report(__doc__, {"protocols": results}, tables, pictures)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
