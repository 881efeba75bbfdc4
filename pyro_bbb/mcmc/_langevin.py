# SPDX-License-Identifier: Apache-2.0
r"""Langevin dynamics with gradients of minibatches, for several chains at once.

Positions z are ``[chains, d]``. With $U$ the energy, $\eta$ the step, $T$ the temperature and $G$ a
diagonal preconditioner (1 without):

- SGLD (Welling and Teh 2011, "Bayesian Learning via Stochastic Gradient Langevin Dynamics"):
  $z \leftarrow z - \eta G \nabla U(z) + \sqrt{2 \eta T G}\,\xi$.
- SGHMC (Chen et al. 2014, "Stochastic Gradient Hamiltonian Monte Carlo"), split as BAOAB
  (Leimkuhler and Matthews 2013, "Rational Construction of Stochastic Numerical Methods for
  Molecular Sampling"), with momentum factor $c$ and $h^2 = 2 \eta / (1 + c)$:
  $p \leftarrow p - h \sqrt{G} \nabla U(z)$,
  $z \leftarrow z + \frac h2 \sqrt{G} p$, $p \leftarrow c p + \sqrt{(1 - c^2) T}\,\xi$,
  $z \leftarrow z + \frac h2 \sqrt{G} p$.

Without noise both are stochastic gradient descent of rate $\eta$, the second with momentum $c$. On
a quadratic energy of curvature $\lambda$ SGLD has variance $T / (\lambda (1 - \eta\lambda/2))$, and
SGHMC exactly $T / \lambda$ where the step is stable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_DECAY = 0.99  # of the mean of squared gradients
_EPS = 1e-5  # added to its root (Li et al. 2016)


@dataclass
class ChainState:
    """Positions of all chains, their momenta and preconditioner, ``[chains, d]`` each."""

    z: Tensor
    momentum: Tensor
    square_avg: Tensor  # moving mean of the squared gradient of the mean loss


@dataclass(frozen=True)
class Langevin:
    """A sampler's settings."""

    sampler: str  # "sgld" or "sghmc"
    momentum: float
    preconditioned: bool
    num_data: int

    def begin(self, z: Tensor) -> ChainState:
        """The state of chains at rest."""
        return ChainState(z, torch.zeros_like(z), torch.zeros_like(z))

    def adapt(self, state: ChainState, gradient: Tensor, *, first: bool) -> None:
        """Take a gradient into the preconditioner."""
        if self.preconditioned:
            weight = 1.0 if first else 1.0 - _DECAY
            state.square_avg.lerp_((gradient / self.num_data).square_(), weight)

    def step(self, state: ChainState, gradient: Tensor, lr: float, temperature: float) -> None:
        """Move all chains, by a learning rate for the mean loss of an example."""
        eta = lr / self.num_data
        if self.preconditioned:
            root = state.square_avg.sqrt().add_(_EPS).rsqrt_()
        else:
            root = torch.ones((), dtype=gradient.dtype, device=gradient.device)
        if self.sampler == "sgld":
            _sgld(state, gradient, eta, temperature, root)
        else:
            _sghmc(state, gradient, eta, temperature, root, self.momentum)


def _sgld(
    state: ChainState, gradient: Tensor, eta: float, temperature: float, root: Tensor
) -> None:
    move = gradient * root * -eta
    if temperature:
        move.add_(torch.randn_like(move), alpha=math.sqrt(2 * eta * temperature))
    state.z.addcmul_(move, root)


def _sghmc(
    state: ChainState, gradient: Tensor, eta: float, temperature: float, root: Tensor, c: float
) -> None:
    h = math.sqrt(2 * eta / (1 + c))
    p = state.momentum
    p.addcmul_(gradient, root, value=-h)
    state.z.addcmul_(p, root, value=h / 2)
    p.mul_(c)
    if temperature:
        p.add_(torch.randn_like(p), alpha=math.sqrt((1 - c * c) * temperature))
    state.z.addcmul_(p, root, value=h / 2)


@dataclass(frozen=True)
class Cycles:
    """Schedule of the steps: warm-up, samples and learning rate.

    Of one cycle the learning rate is constant. Of several it falls from its value to 0 along half a
    cosine in each, and steps that warm up have no noise (Zhang et al. 2020, "Cyclical Stochastic
    Gradient MCMC for Bayesian Deep Learning", Algorithm 1).
    """

    count: int
    warmup_steps: int
    samples: int  # of each cycle
    thin: int  # steps from one sample to the next

    @property
    def length(self) -> int:
        """Steps of a cycle."""
        return self.warmup_steps + self.samples * self.thin

    @property
    def steps(self) -> int:
        """Steps of all cycles."""
        return self.count * self.length

    def warms_up(self, step: int) -> bool:
        """Tell whether a step is before its cycle's first sample."""
        return step % self.length < self.warmup_steps

    def is_quiet(self, step: int) -> bool:
        """Tell whether a step has no noise."""
        return self.count > 1 and self.warms_up(step)

    def takes_sample(self, step: int) -> bool:
        """Tell whether the position before a step is a sample."""
        after = step % self.length - self.warmup_steps + 1
        return after > 0 and after % self.thin == 0

    def lr_factor(self, step: int) -> float:
        """The factor of the learning rate in a step."""
        if self.count == 1:
            return 1.0
        return 0.5 + 0.5 * math.cos(math.pi * (step % self.length) / self.length)
