# SPDX-License-Identifier: Apache-2.0
r"""Samplers of `sample`: microcanonical Langevin, Hamiltonian Monte Carlo, and SGHMC.

They move all chains in whitened coordinates $\zeta_j = z_j / s_j$, where the energy $U$ has the
force $f = -\nabla_\zeta U = -s \nabla_z U$. Each has a measure of its error, by which a step size
$\epsilon$ common to the chains is tuned.

- **mclmc**, microcanonical Langevin dynamics (Robnik et al. 2023, "Microcanonical Hamiltonian Monte
  Carlo", eqs. 14-17; Robnik and Seljak 2024, "Fluctuation without dissipation"; for networks Sommer
  et al. 2025, "Microcanonical Langevin Ensembles", arXiv:2502.06335). A unit vector $u$ moves
  $\zeta$, and the force of direction $n = f / |f|$ turns it: with
  $\delta = \epsilon |f| / (d - 1)$

  $$u \leftarrow \frac{u + n (\sinh\delta + n \cdot u (\cosh\delta - 1))}
                      {\cosh\delta + n \cdot u \sinh\delta}, \qquad
    \Delta K = (d - 1) \ln(\cosh\delta + n \cdot u \sinh\delta).$$

  Half a turn, $\zeta \leftarrow \zeta + \epsilon u$, half a turn, and noise that decorrelates $u$
  over the length $L = \sqrt d$: $u \leftarrow (u + \nu \xi) / |u + \nu \xi|$,
  $\nu^2 = (e^{2 \epsilon / L} - 1) / d$. Exact dynamics conserve $U + K$; a step changes it by
  $\Delta E$, and the bias follows $\mathrm{Var}(\Delta E) / d \propto \epsilon^6$, which tuning
  brings to 5e-4. No step is rejected.
- **hmc**, Hamiltonian Monte Carlo (Neal 2011, "MCMC using Hamiltonian dynamics", fig. 2): leapfrog
  steps, accepted with probability $\min(1, e^{-\Delta H})$, tuned to a mean of 0.8. Exact.
- **sghmc**, underdamped Langevin dynamics of friction 1 on minibatches (`mcmc/_sgmcmc.py`), the
  step $h = \epsilon$ and $c = e^{-\epsilon}$. The minibatches' noise heats the momenta: tuning
  brings their mean square, 1 when exact, to 1.05.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_bbb.mcmc._sgmcmc import baoab

DIVERGED = 1000.0  # nats
_ENERGY_VARIANCE = 5e-4  # of a step of mclmc, per latent
_ACCEPTANCE, _LEAPFROGS = 0.8, 16
_HEAT = 0.05  # excess of the momenta's mean square over 1

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]  # energies and gradients at positions


@dataclass
class ChainState:
    """Positions of all chains ``[chains, d]``, with what a sampler keeps between steps."""

    z: Tensor
    motion: Tensor  # unit velocity of mclmc, momentum of sghmc, both in whitened coordinates
    energy: Tensor  # U at z, [chains]
    gradient: Tensor  # of U at z

    def where(self, chains: Tensor, other: ChainState) -> ChainState:
        """Return this state for the chosen chains, ``[chains]``, the other one for the rest."""
        pick = chains[:, None]
        return ChainState(
            torch.where(pick, self.z, other.z),
            torch.where(pick, self.motion, other.motion),
            torch.where(chains, self.energy, other.energy),
            torch.where(pick, self.gradient, other.gradient),
        )

    def take(self, rows: Tensor) -> ChainState:
        """Return the chains of these numbers."""
        return ChainState(self.z[rows], self.motion[rows], self.energy[rows], self.gradient[rows])

    def move(self, other: ChainState) -> None:
        """Take the positions, motions, energies and gradients of another state."""
        self.z, self.motion = other.z, other.motion
        self.energy, self.gradient = other.energy, other.gradient


class Sampler(ABC):
    """A sampler: its first step size, its gradients of a step, its step, and how this is tuned."""

    epsilon: float
    gradients = 1

    def motion(self, z: Tensor) -> Tensor:
        """Draw the motion at positions."""
        return torch.randn_like(z)

    @abstractmethod
    def step(
        self, state: ChainState, evaluate: Evaluate, scale: Tensor, epsilon: Tensor
    ) -> tuple[ChainState, Tensor, Tensor]:
        """Return the next state, and each chain's error (of the energy, or heat) and acceptance.

        ``scale`` is s, ``[d]``, and ``epsilon`` the step sizes, ``[chains, 1]``.
        """

    @abstractmethod
    def change(self, error: Tensor, acceptance: Tensor, epsilon: float) -> Tensor:
        r"""Return the change of $\ln\epsilon$ that brings the errors nearer to their target."""

    def exceeds(self, error: Tensor) -> Tensor:
        """Return which chains need a smaller step than the others."""
        return torch.zeros_like(error, dtype=torch.bool)


class MCLMC(Sampler):
    """Microcanonical Langevin dynamics of d latents."""

    def __init__(self, d: int) -> None:
        if d < 2:
            raise ValueError(
                f"sampler 'mclmc' needs a model of at least 2 latents, got {d}: take 'hmc'"
            )
        self.d, self.epsilon = d, 0.02 * math.sqrt(d)

    def motion(self, z: Tensor) -> Tensor:
        """Draw a direction for each chain."""
        return _unit(torch.randn_like(z))

    def step(
        self, state: ChainState, evaluate: Evaluate, scale: Tensor, epsilon: Tensor
    ) -> tuple[ChainState, Tensor, Tensor]:
        """Refresh the velocity in part, then half a turn, a step, and half a turn."""
        nu = (torch.expm1(2 * epsilon / math.sqrt(self.d)) / self.d).sqrt()
        u = _unit(state.motion + nu * torch.randn_like(state.motion))
        u, first = turn(u, -scale * state.gradient, epsilon / 2)
        z = state.z + epsilon * u * scale
        energy, gradient = evaluate(z)
        u, second = turn(u, -scale * gradient, epsilon / 2)
        error = first + second + energy - state.energy
        return ChainState(z, u, energy, gradient), error, torch.ones_like(error)

    def change(self, error: Tensor, acceptance: Tensor, epsilon: float) -> Tensor:
        """Return a third of the change that brings Var(error) / d ~ epsilon^6 to its target."""
        ratio = error.square().mean() / (self.d * _ENERGY_VARIANCE)
        return -ratio.clamp(1e-3, 1e3).log() / 18

    def exceeds(self, error: Tensor) -> Tensor:
        """Return which errors are ten times as large as the target."""
        return error.abs() > 10 * math.sqrt(self.d * _ENERGY_VARIANCE)


def turn(u: Tensor, force: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
    r"""Turn unit velocities by the force for a time epsilon; return $\Delta K$, too."""
    d = u.shape[1]
    size = force.norm(dim=1, keepdim=True)
    n = force / size.clamp_min(torch.finfo(size.dtype).tiny)
    cosine = (n * u).sum(1, keepdim=True)
    delta = epsilon * size / (d - 1)
    # numerator and denominator of the docstring times 2 exp(-delta), which cannot overflow
    decay = torch.exp(-delta)
    turned = n * ((1 - decay) * (1 + decay + cosine * (1 - decay))) + u * (2 * decay)
    stretch = 1 + cosine + (1 - cosine) * decay.square()
    kinetic = (d - 1) * (delta - math.log(2) + stretch.log())
    return _unit(turned), kinetic.squeeze(1)


def _unit(u: Tensor) -> Tensor:
    return u / u.norm(dim=1, keepdim=True)


class HMC(Sampler):
    """Hamiltonian Monte Carlo."""

    epsilon, gradients = 0.1, _LEAPFROGS

    def step(
        self, state: ChainState, evaluate: Evaluate, scale: Tensor, epsilon: Tensor
    ) -> tuple[ChainState, Tensor, Tensor]:
        """Draw momenta, take leapfrog steps, and accept or return to the start."""
        p = torch.randn_like(state.z)
        start = state.energy + p.square().sum(1) / 2
        h = epsilon * (0.8 + 0.4 * torch.rand_like(epsilon))  # no resonance with a frequency
        z, energy, gradient = state.z, state.energy, state.gradient
        for _ in range(_LEAPFROGS):
            p = p - h / 2 * scale * gradient
            z = z + h * scale * p
            energy, gradient = evaluate(z)
            p = p - h / 2 * scale * gradient
        error = energy + p.square().sum(1) / 2 - start
        acceptance = torch.exp(-error).clamp(max=1.0).nan_to_num(0.0)
        accepted = torch.rand_like(acceptance) < acceptance
        # a rejected proposal is not a divergence
        error = torch.where(accepted | error.isfinite(), error.clamp(max=DIVERGED / 2), error)
        return ChainState(z, p, energy, gradient).where(accepted, state), error, acceptance

    def change(self, error: Tensor, acceptance: Tensor, epsilon: float) -> Tensor:
        """Return half the excess of the acceptance."""
        return (acceptance.mean() - _ACCEPTANCE) / 2


class SGHMC(Sampler):
    """Underdamped Langevin dynamics on minibatches."""

    epsilon = 0.05

    def step(
        self, state: ChainState, evaluate: Evaluate, scale: Tensor, epsilon: Tensor
    ) -> tuple[ChainState, Tensor, Tensor]:
        """Kick, drift, noise, drift."""
        h = epsilon * scale
        heat = (state.motion - h * state.gradient).square().mean(1) - 1
        z, p = baoab(state.z, state.motion, state.gradient, h, torch.exp(-epsilon))
        energy, gradient = evaluate(z)
        finite = energy.isfinite() & gradient.isfinite().all(1)
        heat = torch.where(finite, heat, math.inf)
        return ChainState(z, p, energy, gradient), heat, torch.ones_like(heat)

    def change(self, error: Tensor, acceptance: Tensor, epsilon: float) -> Tensor:
        """Return a change slower than the decay of heat in 1 / (2 epsilon) steps."""
        heat = error.mean()
        change = (1 - heat / _HEAT).clamp(-2.0, 1.0) * epsilon / 4
        return torch.where(heat > 10 * _HEAT, -0.2, change).clamp(max=-math.log(epsilon))


def make_sampler(name: str, d: int) -> Sampler:
    """Return a sampler of d latents by its name."""
    return HMC() if name == "hmc" else SGHMC() if name == "sghmc" else MCLMC(d)
