# SPDX-License-Identifier: Apache-2.0
r"""Without a library: the deterministic floor, and Bayes by Backprop as tutorials write it.

The second is the recipe of Blundell et al. (2015) in plain PyTorch: parameters $\mu, \rho$ of each
layer, $w = \mu + \ln(1 + e^\rho)\,\epsilon$, the log-densities of the drawn weights under the scale
mixture and the posterior written with `torch.distributions`, $F = \pi_i (\ln q - \ln p) + NLL$.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal

from _parts.tasks import NUM_DATA, Trainer, Work, trainer

PI, SIGMA1, SIGMA2 = 0.5, 1.0, math.exp(-6)


def deterministic(work: Work) -> Trainer:
    """The network with ordinary weights: the floor."""
    network, (x, y) = work.network(), work.data()
    return trainer(network, lambda: F.cross_entropy(network(x), y), work.lr)


def plain(work: Work) -> Trainer:
    """Hand-written Bayes by Backprop, with fused Adam."""
    network, (x, y) = PlainMLP(work.sizes).to(work.device), work.data()
    return trainer(network, lambda: network.loss(x, y, len(x) / NUM_DATA, work.draws), work.lr)


def plain_default_adam(work: Work) -> Trainer:
    """Hand-written Bayes by Backprop, with Adam's default implementation."""
    network, (x, y) = PlainMLP(work.sizes).to(work.device), work.data()
    loss, adam = (lambda: network.loss(x, y, len(x) / NUM_DATA, work.draws)), torch.optim.Adam
    return trainer(network, loss, work.lr, optimiser=adam)


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
        """Outputs ``[batch, n_out]`` of one draw."""
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
