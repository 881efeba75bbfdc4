# SPDX-License-Identifier: Apache-2.0
"""Other libraries' Bayesian layers, each used as its own documentation shows it."""

from collections.abc import Callable, Iterator
from typing import Any

import pyro
import torch.nn.functional as F
from torch import Tensor, nn

from _parts.baselines import PI, SIGMA1, SIGMA2
from _parts.tasks import NUM_DATA, Trainer, Work, trainer
from _parts.timing import repeated


def _replaced(network: nn.Sequential, linear: Callable[[nn.Linear], nn.Module]) -> list[nn.Module]:
    """Replace the linear layers by the library's."""
    return [linear(layer) if isinstance(layer, nn.Linear) else layer for layer in network]


def torchbnn_network(network: nn.Sequential) -> tuple[nn.Sequential, Callable[[], Tensor]]:
    """The network with standard Normal priors, and its closed-form KL."""
    import torchbnn

    def linear(layer: nn.Linear) -> nn.Module:
        return torchbnn.BayesLinear(0.0, 1.0, layer.in_features, layer.out_features)

    bayesian, kl = nn.Sequential(*_replaced(network, linear)), torchbnn.BKLLoss(reduction="sum")
    return bayesian, lambda: kl(bayesian).sum()


def torchbnn(work: Work) -> Trainer:
    """Gaussian prior, closed-form KL."""
    network, kl = torchbnn_network(work.network())
    network, (x, y) = network.to(work.device), work.data()

    def loss() -> Tensor:
        return F.cross_entropy(network(x), y) + kl() / NUM_DATA

    return trainer(network, loss, work.lr)


class WithKL(nn.Sequential):
    """Layers of bayesian-torch, which return their outputs and their closed-form KL."""

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """The outputs, and the sum of all KL."""
        total: Any = 0.0
        for layer in self:
            x = layer(x)
            if isinstance(x, tuple):
                x, kl = x
                total = total + kl
        return x, total


def bayesian_torch_network(work: Work, kind: str) -> WithKL:
    """The network in bayesian-torch's layers; ``kind`` is Reparameterization or Flipout."""
    from bayesian_torch import layers

    linear, convolution = (getattr(layers, f"{name}{kind}") for name in ("Linear", "Conv2d"))

    def converted() -> Iterator[nn.Module]:
        for layer in work.network():
            if isinstance(layer, nn.Linear):
                yield linear(layer.in_features, layer.out_features)
            elif isinstance(layer, nn.Conv2d):
                sizes = layer.in_channels, layer.out_channels, layer.kernel_size
                yield convolution(*sizes, padding=layer.padding)
            else:
                yield layer

    return WithKL(*converted()).to(work.device)


def bayesian_torch(kind: str) -> Callable[[Work], Trainer]:
    """Gaussian prior, closed-form KL."""

    def train(work: Work) -> Trainer:
        network, (x, y) = bayesian_torch_network(work, kind), work.data()

        def loss() -> Tensor:
            outputs, kl = network(x)
            return F.cross_entropy(outputs, y) + kl / NUM_DATA

        return trainer(network, loss, work.lr)

    return train


def blitz(work: Work) -> Trainer:
    """Scale mixture prior, KL of the draws."""
    from blitz.modules import BayesianLinear
    from blitz.utils import variational_estimator

    prior = {"prior_pi": PI, "prior_sigma_1": SIGMA1, "prior_sigma_2": SIGMA2}

    def linear(layer: nn.Linear) -> nn.Module:
        return BayesianLinear(layer.in_features, layer.out_features, **prior)

    cls = variational_estimator(type("Network", (nn.Sequential,), {}))
    network, (x, y) = cls(*_replaced(work.network(), linear)).to(work.device), work.data()
    options = {"sample_nbr": work.draws, "complexity_cost_weight": 1 / NUM_DATA}

    def loss() -> Tensor:
        return network.sample_elbo(inputs=x, labels=y, criterion=F.cross_entropy, **options)

    return trainer(network, loss, work.lr)


def torch_blue_network(work: Work) -> nn.Module:
    """The network in torch_blue's layers."""
    from torch_blue import vi

    def linear(layer: nn.Linear) -> nn.Module:
        return vi.VILinear(layer.in_features, layer.out_features)

    network: nn.Module = vi.VISequential(*_replaced(work.network(), linear)).to(work.device)
    return network


def torch_blue(work: Work) -> Trainer:
    """Gaussian prior, closed-form KL, outputs drawn instead of weights."""
    from torch_blue import vi
    from torch_blue.vi.distributions import Categorical

    network, (x, y) = torch_blue_network(work), work.data()
    objective = vi.AnalyticalKullbackLeiblerLoss(network, Categorical(), dataset_size=NUM_DATA)
    return trainer(network, lambda: objective(network(x, samples=work.draws), y), work.lr)


def tyxe(work: Work) -> Trainer:
    """Gaussian prior, closed-form KL, on Pyro."""
    import tyxe
    from pyro.distributions import Normal

    network, (x, y) = work.network(), work.data()
    prior = tyxe.priors.IIDPrior(Normal(0.0, 1.0))
    likelihood = tyxe.likelihoods.Categorical(dataset_size=NUM_DATA)
    bnn = tyxe.VariationalBNN(network, prior, likelihood, tyxe.guides.AutoNormal)
    adam = pyro.optim.Adam({"lr": work.lr})
    svi = bnn.fit([(x, y)], adam, 1, num_particles=work.draws)
    return Trainer(repeated(lambda: svi.step(x, y)), bnn)
