# SPDX-License-Identifier: Apache-2.0
r"""Langevin dynamics with gradients of minibatches, for several chains at once.

Positions z are ``[chains, d]``. With $U$ the energy, $\eta$ the step, $T$ the temperature and $G$ a
diagonal preconditioner (1 without):

- SGLD (Welling and Teh 2011, "Bayesian Learning via Stochastic Gradient Langevin Dynamics"):
  $z \leftarrow z - \eta G \nabla U(z) + \sqrt{2 \eta T G}\,\xi$.
- SGHMC (Chen et al. 2014, "Stochastic Gradient Hamiltonian Monte Carlo"), split as BAOAB
  (Leimkuhler and Matthews 2013, "Rational Construction of Stochastic Numerical Methods for
  Molecular Sampling"), with momentum factor $c$ and $h = \sqrt{2 \eta G / (1 + c)}$:
  $p \leftarrow p - h \nabla U(z)$,
  $z \leftarrow z + \frac h2 p$, $p \leftarrow c p + \sqrt{(1 - c^2) T}\,\xi$,
  $z \leftarrow z + \frac h2 p$.

Without noise both are stochastic gradient descent of rate $\eta$, the second with momentum $c$. On
a quadratic energy of curvature $\lambda$ SGLD has variance $T / (\lambda (1 - \eta\lambda/2))$, and
SGHMC exactly $T / \lambda$ where the step is stable.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_DECAY = 0.99  # of the mean of squared gradients
_EPS = 1e-5  # added to its root (Li et al. 2016)


def sgld(z: Tensor, gradient: Tensor, eta: float, root: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Return positions after a step, with ``root`` $\sqrt G$."""
    move = gradient * root * -eta
    if temperature:
        move.add_(torch.randn_like(move), alpha=math.sqrt(2 * eta * temperature))
    return torch.addcmul(z, move, root)


def baoab(
    z: Tensor, p: Tensor, gradient: Tensor, h: Tensor, c: Any, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return positions and momenta after a step of SGHMC: kick, drift, noise, drift.

    Args:
        z: positions.
        p: momenta.
        gradient: gradient of the energy at the positions.
        h: step, of each latent or of all.
        c: factor of the momenta, a number or ``[chains, 1]``.
        temperature: T.
    """
    p = torch.addcmul(p, h, gradient, value=-1)
    z = torch.addcmul(z, h, p, value=0.5)
    p = c * p
    if temperature:
        p.add_(((1 - c * c) * temperature) ** 0.5 * torch.randn_like(p))
    return torch.addcmul(z, h, p, value=0.5), p


def rmsprop(square_avg: Tensor, gradient: Tensor, first: bool) -> Tensor:
    """Return the moving mean of squared gradients after one more."""
    return square_avg.lerp(gradient.square(), 1.0 if first else 1.0 - _DECAY)


def preconditioner_root(square_avg: Tensor) -> Tensor:
    r"""Return $\sqrt G$, for $G = 1 / (\sqrt v + 10^{-5})$ of the mean of squares $v$."""
    return square_avg.sqrt().add_(_EPS).rsqrt_()
