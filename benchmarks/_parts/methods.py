# SPDX-License-Identifier: Apache-2.0
r"""Training methods: one step of a 784-H-H-10 ReLU classifier, by each library.

Without a library: the deterministic floor, and Bayes by Backprop as tutorials write it, the recipe
of Blundell et al. (2015) in plain PyTorch: parameters $\mu, \rho$ of each layer,
$w = \mu + \ln(1 + e^\rho)\,\epsilon$, the log-densities of the drawn weights written with
`torch.distributions`, $F = \pi_i (\ln q - \ln p) + NLL$. Then `pyro_bbb.fit`, Pyro's own autoguide,
and other libraries' layers, each used as its own documentation shows it.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import count
from typing import Any, TypeVar
from unittest import mock

import pyro
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn
from torch.distributions import Normal

import pyro_bbb as bbb
from _parts.timing import Meter, Take, repeated
from pyro_bbb.training._captured import has_few_parameters
from pyro_bbb.training._step import StepRunner

NUM_DATA = 60_000  # examples of the training set that the minibatches pretend to come from
BATCH = 128  # examples per step
LR = 1e-6
"""Adam's, so small that thousands of steps on one minibatch stay far from a loss of 0: the denormal
numbers there are slow, and slower for some methods than for others."""
PI, SIGMA1, SIGMA2 = 0.5, 1.0, math.exp(-6)
PRIORS: dict[str, Callable[[], Any]] = {
    "mixture": lambda: bbb.ScaleMixtureNormal(pi=PI, sigma1=SIGMA1, sigma2=SIGMA2),
    "Gaussian": lambda: pyro.distributions.Normal(0.0, 1.0),
}
T = TypeVar("T")
_numbers = count()


@dataclass(frozen=True)
class Work:
    """One training step on inputs of MNIST's shape."""

    hidden: int = 400  # units of each of the two hidden layers
    batch: int = BATCH  # examples per step
    draws: int = 1  # draws of the weights per step
    device: str = "cpu"  # device of the training
    lr: float = LR  # Adam's learning rate

    @property
    def sizes(self) -> list[int]:
        """Units of every layer."""
        return [784, self.hidden, self.hidden, 10]

    def data(self) -> tuple[Tensor, Tensor]:
        """Return the minibatch: pixels in [0, 1] and labels, always the same."""
        return images(self.batch, self.device)

    def network(self) -> nn.Sequential:
        """Return the network with ordinary weights."""
        return mlp(self.sizes).to(self.device)


def images(number: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Random pixels ``[number, 784]``, and labels ``[number]``."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(number, 784, generator=generator)
    return x.to(device), torch.randint(10, (number,), generator=generator).to(device)


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers with ReLU between them, by name."""
    layers = OrderedDict[str, nn.Module]()
    for i, (n_in, n_out) in enumerate(zip(sizes[:-1], sizes[1:], strict=True), start=1):
        layers[f"fc{i}"] = nn.Linear(n_in, n_out)
        if i < len(sizes) - 1:
            layers[f"activation{i}"] = nn.ReLU()
    return nn.Sequential(layers)


def fused_adam(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Adam whose step is one kernel, for all methods that accept an optimiser."""
    return torch.optim.Adam(parameters, lr=lr, fused=True)


@dataclass(frozen=True)
class Trainer:
    """Method ready to train."""

    take: Take  # takes training steps
    module: nn.Module  # module of the trained parameters

    @property
    def num_parameters(self) -> int:
        """Trained numbers; a tensor that is registered twice counts once."""
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return sum({p.data_ptr(): p.numel() for p in trained}.values())


def trainer(
    module: nn.Module,
    loss: Callable[[], Tensor],
    lr: float,
    make_adam: Callable[[Any, float], torch.optim.Optimizer] = fused_adam,
) -> Trainer:
    """Run the usual loop's body: zero, forward, backward, step."""
    adam = make_adam(module.parameters(), lr)

    def step() -> Tensor:
        adam.zero_grad()
        value = loss()
        value.backward()
        adam.step()
        return value

    return Trainer(repeated(step), module)


def prepare(package: str | None, make: Callable[[], T]) -> T | str:
    """Call ``make``; of a missing or broken package return the reason instead."""
    if package is None:
        return make()
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
    try:
        return make()
    except Exception as error:  # of somebody else's code, on versions it may not know
        return f"does not run: {type(error).__name__}: {error}"


# --- without a library ---


def deterministic(work: Work) -> Trainer:
    """Return the network with ordinary weights: the floor."""
    network, (x, y) = work.network(), work.data()
    return trainer(network, lambda: F.cross_entropy(network(x), y), work.lr)


def plain(work: Work, **options: Any) -> Trainer:
    """Bayes by Backprop in plain PyTorch."""
    network, (x, y) = PlainMLP(work.sizes).to(work.device), work.data()
    loss = partial(network.loss, x, y, len(x) / NUM_DATA, work.draws)
    return trainer(network, loss, work.lr, **options)


def log_mixture(w: Tensor) -> Tensor:
    """Log-density of the scale mixture, summed."""
    first = torch.exp(Normal(0.0, SIGMA1).log_prob(w))
    second = torch.exp(Normal(0.0, SIGMA2).log_prob(w))
    return torch.log(PI * first + (1 - PI) * second).sum()


class PlainLinear(nn.Module):
    """A linear layer that samples its weights in every pass and records their log-densities."""

    log_prior: Tensor
    log_posterior: Tensor

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight_mu = nn.Parameter(torch.empty(n_out, n_in).uniform_(-0.2, 0.2))
        self.weight_rho = nn.Parameter(torch.empty(n_out, n_in).uniform_(-5.0, -4.0))
        self.bias_mu = nn.Parameter(torch.empty(n_out).uniform_(-0.2, 0.2))
        self.bias_rho = nn.Parameter(torch.empty(n_out).uniform_(-5.0, -4.0))

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs ``[batch, n_out]`` of one draw."""
        weight_sigma = torch.log1p(torch.exp(self.weight_rho))
        bias_sigma = torch.log1p(torch.exp(self.bias_rho))
        weight = self.weight_mu + weight_sigma * torch.randn_like(weight_sigma)
        bias = self.bias_mu + bias_sigma * torch.randn_like(bias_sigma)
        self.log_prior = log_mixture(weight) + log_mixture(bias)
        of_weight = Normal(self.weight_mu, weight_sigma).log_prob(weight).sum()
        of_bias = Normal(self.bias_mu, bias_sigma).log_prob(bias).sum()
        self.log_posterior = of_weight + of_bias
        return F.linear(x, weight, bias)


class PlainMLP(nn.Module):
    """Multi-layer perceptron of three `PlainLinear` layers."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        pairs = zip(sizes[:-1], sizes[1:], strict=True)
        self.fc1, self.fc2, self.fc3 = (PlainLinear(*pair) for pair in pairs)

    def forward(self, x: Tensor) -> Tensor:
        """Log-probabilities of the classes, ``[batch, 10]``."""
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return F.log_softmax(self.fc3(x), dim=1)

    def loss(self, x: Tensor, y: Tensor, kl_weight: float, draws: int = 1) -> Tensor:
        """Negative ELBO of the minibatch in nats, averaged over the draws."""
        layers = (self.fc1, self.fc2, self.fc3)
        losses = []
        for _ in range(draws):
            nll = F.nll_loss(self(x), y, reduction="sum")
            log_prior = sum(layer.log_prior for layer in layers)
            log_posterior = sum(layer.log_posterior for layer in layers)
            losses.append(kl_weight * (log_posterior - log_prior) + nll)
        return torch.stack(losses).mean()


# --- on Pyro ---


def guided(work: Work, prior: str = "mixture", num_data: int = NUM_DATA) -> tuple[Any, Any]:
    """Return the work's network with random weights as a model, and its guide."""
    network = bbb.BayesianMLP(work.sizes, prior=PRIORS[prior]())
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data).to(work.device)
    return model, bbb.AutoSoftplusNormal(model).to(work.device)


def ours(work: Work, prior: str = "mixture", **options: Any) -> Trainer:
    """Train as `pyro_bbb.fit` does with these options."""
    model, guide = guided(work, prior, num_data=work.batch)
    return fit_steps(model, guide, work, num_particles=work.draws, **options)


@contextmanager
def metered_steps(meter: Meter) -> Iterator[None]:
    """Pass every step of `fit` to the meter.

    The name of its step is all that this knows of what `fit` is made of.
    """
    real = StepRunner.step

    def metered(*args: Any, **kwargs: Any) -> Any:
        return meter(lambda: real(*args, **kwargs))

    with mock.patch.object(StepRunner, "step", metered):
        yield


def fit_steps(model: Any, guide: Any, work: Work, **options: Any) -> Trainer:
    """Return the steps of real calls of `fit`, whose set-up is not measured.

    They are run as `fit` runs those of longer trainings by itself.
    """
    x, y = work.data()
    few = has_few_parameters(guide, model)
    fixed: dict[str, Any] = {"batch_size": len(x), "lr": work.lr, "progress": False}
    fixed["engine"] = "compiled" if few and work.device == "cpu" else "eager"

    def take(number: int, meter: Meter) -> None:
        with metered_steps(meter):
            bbb.fit(model, guide, (x, y), epochs=number, **fixed, **options)  # a step per epoch

    return Trainer(take, guide)


def stock(work: Work, prior: str) -> Trainer:
    """`AutoNormal`, `Trace_ELBO` and Pyro's Adam on the same model."""
    (model, _), (x, y) = guided(work, prior), work.data()
    guide = AutoNormal(model, init_scale=0.01)
    guide._pyro_name = f"AutoNormal{next(_numbers)}"  # else all have one set of parameters

    def with_kl_weight(x: Tensor, y: Tensor, kl_weight: float) -> Any:
        with poutine.scale(scale=kl_weight):
            return guide(x, y, kl_weight)

    with_kl_weight(x, y, 1.0)  # AutoNormal has no parameters before its first call
    guide.to(work.device)
    elbo = Trace_ELBO(num_particles=work.draws)
    svi = SVI(model, with_kl_weight, pyro.optim.Adam({"lr": work.lr}), elbo)
    return Trainer(repeated(lambda: svi.step(x, y, len(x) / NUM_DATA)), guide)


# --- other libraries ---


def replaced(network: nn.Sequential, linear: Callable[[int, int], nn.Module]) -> list[nn.Module]:
    """Replace the linear layers by the library's."""
    return [
        linear(layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else layer
        for layer in network
    ]


def torchbnn_network(network: nn.Sequential) -> tuple[nn.Sequential, Callable[[], Tensor]]:
    """Return the network with standard Normal priors, and its closed-form KL."""
    import torchbnn

    bayesian = nn.Sequential(*replaced(network, partial(torchbnn.BayesLinear, 0.0, 1.0)))
    kl = torchbnn.BKLLoss(reduction="sum")
    return bayesian, lambda: kl(bayesian).sum()


def torchbnn(work: Work) -> Trainer:
    """Gaussian prior, closed-form KL."""
    network, kl = torchbnn_network(work.network())
    network, (x, y) = network.to(work.device), work.data()
    return trainer(network, lambda: F.cross_entropy(network(x), y) + kl() / NUM_DATA, work.lr)


class WithKL(nn.Sequential):
    """Layers of bayesian-torch, which return their outputs and their closed-form KL."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the outputs, and the sum of all KL."""
        total: Any = 0.0
        for layer in self:
            x = layer(x)
            if isinstance(x, tuple):
                x, kl = x
                total = total + kl
        return x, total


def bayesian_torch_network(work: Work, kind: str) -> WithKL:
    """Return the network in bayesian-torch's layers; ``kind`` is Reparameterization or Flipout."""
    from bayesian_torch import layers

    return WithKL(*replaced(work.network(), getattr(layers, f"Linear{kind}"))).to(work.device)


def bayesian_torch(work: Work, kind: str) -> Trainer:
    """Gaussian prior, closed-form KL."""
    network, (x, y) = bayesian_torch_network(work, kind), work.data()

    def loss() -> Tensor:
        outputs, kl = network(x)
        return F.cross_entropy(outputs, y) + kl / NUM_DATA

    return trainer(network, loss, work.lr)


def blitz(work: Work) -> Trainer:
    """Scale mixture prior, KL of the draws."""
    from blitz.modules import BayesianLinear
    from blitz.utils import variational_estimator

    prior = {"prior_pi": PI, "prior_sigma_1": SIGMA1, "prior_sigma_2": SIGMA2}
    layers = replaced(work.network(), partial(BayesianLinear, **prior))
    cls = variational_estimator(type("Network", (nn.Sequential,), {}))
    network, (x, y) = cls(*layers).to(work.device), work.data()
    options = {"sample_nbr": work.draws, "complexity_cost_weight": 1 / NUM_DATA}
    loss = partial(network.sample_elbo, inputs=x, labels=y, criterion=F.cross_entropy, **options)
    return trainer(network, loss, work.lr)


def torch_blue_network(work: Work) -> nn.Module:
    """Return the network in torch_blue's layers."""
    from torch_blue import vi

    network: nn.Module = vi.VISequential(*replaced(work.network(), vi.VILinear)).to(work.device)
    return network


def torch_blue(work: Work) -> Trainer:
    """Gaussian prior, closed-form KL, outputs drawn instead of weights."""
    from torch_blue import vi
    from torch_blue.vi.distributions import Categorical

    network, (x, y) = torch_blue_network(work), work.data()
    objective = vi.AnalyticalKullbackLeiblerLoss(network, Categorical(), dataset_size=NUM_DATA)
    return trainer(network, lambda: objective(network(x, samples=work.draws), y), work.lr)


# --- all by the name shown, with the package that they need ---

FLOOR, OURS, PLAIN = "deterministic", "pyro_bbb (mixture)", "plain PyTorch (mixture)"
OURS_GAUSSIAN = "pyro_bbb (Gaussian, closed KL)"
TORCHBNN = "torchbnn (Gaussian, closed KL)"
METHODS: dict[str, tuple[Callable[[Work], Trainer], str | None]] = {
    FLOOR: (deterministic, None),
    OURS: (ours, None),
    OURS_GAUSSIAN: (partial(ours, prior="Gaussian", loss="mean_field"), None),
    PLAIN: (plain, None),
    "plain PyTorch, default Adam": (partial(plain, make_adam=torch.optim.Adam), None),
    "Pyro AutoNormal (mixture)": (partial(stock, prior="mixture"), None),
    "Pyro AutoNormal (Gaussian)": (partial(stock, prior="Gaussian"), None),
    TORCHBNN: (torchbnn, "torchbnn"),
    "bayesian-torch (Gaussian, closed KL)": (
        partial(bayesian_torch, kind="Reparameterization"),
        "bayesian-torch",
    ),
    "bayesian-torch, flipout": (partial(bayesian_torch, kind="Flipout"), "bayesian-torch"),
    "blitz (mixture)": (blitz, "blitz-bayesian-pytorch"),
    "torch_blue (Gaussian, closed KL)": (torch_blue, "torch_blue"),
    "pyro_bbb, local_reparam": (partial(ours, estimator="local_reparam"), None),
    "pyro_bbb, flipout": (partial(ours, estimator="flipout"), None),
    "pyro_bbb, stl": (partial(ours, estimator="stl"), None),
}
ESTIMATORS = [name for name in METHODS if name.startswith("pyro_bbb, ")]
LIBRARIES = [name for name in METHODS if name not in ESTIMATORS]


def started(name: str, work: Work) -> Trainer | str:
    """Return a method after its first step, or the reason why it is unavailable."""
    train, package = METHODS[name]

    def start() -> Trainer:
        torch.manual_seed(0)
        trainer = train(work)
        trainer.take(1, lambda step: step())
        return trainer

    return prepare(package, start)


def training(name: str, work: Work) -> Take | str:
    """Return a method's training steps, or the reason why it is unavailable."""
    found = started(name, work)
    return found.take if isinstance(found, Trainer) else found
