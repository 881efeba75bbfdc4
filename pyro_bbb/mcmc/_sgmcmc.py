# SPDX-License-Identifier: Apache-2.0
r"""Posterior samples by stochastic-gradient Markov chain Monte Carlo: chains on minibatches.

They scale to any network and data set that `fit` trains, without a family of distributions in
between; the price is a bias by the step size and by the minibatches' noise, as no step is rejected.

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
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._param_store import own_store
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import at_least_zero, below_one, count, kind, one_of, positive
from pyro_bbb.mcmc._chains import Chains
from pyro_bbb.mcmc._potential import Potential
from pyro_bbb.mcmc._run import (
    Counters,
    DivergedError,
    Run,
    Shuffled,
    all_data,
    initial_positions,
)
from pyro_bbb.models import BayesianModel

SAMPLERS = ("sgld", "sghmc")
_DECAY = 0.99  # of the mean of squared gradients
_EPS = 1e-5  # added to its root (Li et al. 2016)


@locked
def run_sgmcmc(
    model: BayesianModel,
    data: Any,
    *,
    sampler: str = "sghmc",
    lr: float = 0.1,
    num_samples: int = 50,
    warmup_steps: int = 1000,
    thin: int = 100,
    cycles: int = 1,
    num_chains: int = 1,
    batch_size: int = 128,
    momentum: float | None = None,
    preconditioner: str | None = None,
    temperature: float = 1.0,
    init: Any = None,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_every: int = 1000,
    device: torch.device | str | None = None,
    seed: int | None = None,
    progress: bool = True,
    sample_weight: Any = None,
) -> Chains:
    r"""Sample from the posterior of all latents by Langevin dynamics on minibatches.

    The target is proportional to $p(D, z)^{1/T}$, for all latents in unconstrained space. Without
    noise a chain is stochastic gradient descent of the mean loss, so a rate ``lr`` (and a momentum)
    that trains the network is a good first guess. Larger steps and smaller batches spread the
    samples more than the posterior does. Networks are in evaluation mode; parameters that are not
    random stay as they are.

    Args:
        model: the model; any prior and likelihood with continuous latents.
        data: a pair ``(x, y)`` of tensors or a map-style dataset of pairs, all ``num_data`` of
            them.
        sampler: ``"sgld"`` (Welling and Teh 2011) or ``"sghmc"`` (Chen et al. 2014).
        lr: learning rate for the mean loss of an example: a step moves by ``lr`` times the gradient
            of $-\ln p(D, z) / N$.
        num_samples: samples of each chain, of all its cycles together.
        warmup_steps: steps before the first sample, in each cycle.
        thin: steps from one sample to the next.
        cycles: with 1 the learning rate is constant. With more it falls to 0 along half a
            cosine in each of them; the warm-up of each cycle then has no noise, and ends in another
            mode (Zhang et al. 2020, "Cyclical Stochastic Gradient MCMC").
        num_chains: number of chains, independent but for the minibatches, which they share.
        batch_size: examples per minibatch; all data where it is ``num_data`` or more.
        momentum: of ``"sghmc"``, in [0, 1), by default 0.9.
        preconditioner: ``"rmsprop"`` scales steps by the inverse root of the mean squared gradient
            of each latent in the warm-up (Li et al. 2016, "Preconditioned Stochastic Gradient
            Langevin Dynamics"). A good ``lr`` is then near Adam's.
        temperature: T; below 1 the posterior is colder, and at 0 the chains descend without noise.
        init: where the chains start, as for `run_nuts`: by default the He initialisation.
        checkpoint: folder of a checkpoint, as for `sample`.
        checkpoint_every: steps from one checkpoint to the next.
        device: where to run; by default where ``x`` is.
        seed: makes the result a function of this number, and leaves torch's random state alone.
        progress: whether to show a progress bar.
        sample_weight: weights ``[n]`` of the examples in the likelihood, as for `fit`.

    Returns:
        The samples, which `predict` takes as they are. ``log_density`` is the minibatch's estimate,
        nothing is rejected (``acceptance`` 1) or diverging, and ``step_size`` is ``lr``.

    Raises:
        ValueError: data that do not fit the model or its ``num_data``, an option out of range or
            of unknown name, a discrete latent, a start outside the support, or a checkpoint of
            another run.
        TypeError: an argument of the wrong kind.
        DivergedError: the energy or gradient of a chain is not finite.
        LoadError: the checkpoint is damaged, or something else.
    """
    kind("model", model, BayesianModel)
    num_samples, cycles = count("num_samples", num_samples), count("cycles", cycles)
    thin, warmup_steps = count("thin", thin), count("warmup_steps", warmup_steps, least=0)
    num_chains, batch_size = count("num_chains", num_chains), count("batch_size", batch_size)
    if num_samples % cycles:
        raise ValueError(f"num_samples must be a multiple of cycles={cycles}, got {num_samples}")
    one_of("sampler", sampler, SAMPLERS)
    if preconditioner is not None:
        one_of("preconditioner", preconditioner, ["rmsprop"])
    if sampler == "sgld" and momentum is not None:
        raise ValueError(f"momentum needs sampler='sghmc', got momentum={momentum} with 'sgld'")
    langevin = Langevin(
        sampler,
        positive("lr", lr),
        0.9 if momentum is None else below_one("momentum", momentum),
        preconditioner is not None,
        at_least_zero("temperature", temperature),
        cycles,
        warmup_steps,
        thin,
        warmup_steps + num_samples // cycles * thin,
    )
    x, y = all_data(model, data, device, sample_weight)
    with seeded(seed), own_store(model):
        batches = Shuffled(x, y, batch_size)
        potential = Potential(model, *batches.first())
        z = initial_positions(potential, init, [None] * num_chains)
        run = LangevinRun(potential, batches, z, langevin)
        options = vars(langevin) | {"seed": seed, "init": init}
        total = cycles * langevin.length
        return run.finish(total, progress, checkpoint, checkpoint_every, options)


# --- steps ---


def sgld(z: Tensor, gradient: Tensor, eta: float, root: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Return positions after a step, with ``root`` $\sqrt G$."""
    move = gradient * root * -eta
    if temperature:
        move.add_(torch.randn_like(move), alpha=math.sqrt(2 * eta * temperature))
    return torch.addcmul(z, move, root)


def baoab(
    z: Tensor, p: Tensor, gradient: Tensor, h: Tensor, c: Any, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return positions and momenta after a step of SGHMC: kick, drift, noise, drift."""
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


# --- a run ---


@dataclass(frozen=True)
class Langevin:
    """Options of the steps, and when samples are taken."""

    sampler: str  # "sgld" or "sghmc"
    lr: float  # for the mean loss of an example
    momentum: float
    preconditioned: bool
    temperature: float
    cycles: int
    warmup_steps: int
    thin: int  # steps from one sample to the next
    length: int  # steps of a cycle


@dataclass
class LangevinState:
    """Positions of all chains, their momenta and preconditioner, ``[chains, d]`` each."""

    z: Tensor
    momentum: Tensor
    square_avg: Tensor  # moving mean of the squared gradient of the mean loss


class LangevinRun(Run):
    """A run of all chains."""

    owner = "run_sgmcmc"

    def __init__(
        self, potential: Potential, batches: Shuffled, z: Tensor, langevin: Langevin
    ) -> None:
        super().__init__(potential, batches, z)
        self.langevin, self.counters = langevin, Counters()
        self.state = LangevinState(z, torch.zeros_like(z), torch.zeros_like(z))
        self.draws = {"z": [], "log_density": []}

    def over(self) -> bool:
        """Return whether all cycles are done."""
        return self.counters.done >= self.langevin.cycles * self.langevin.length

    def step(self) -> None:
        """Take a gradient, a sample when it is due, and a step."""
        number, state, langevin = self.counters.done, self.state, self.langevin
        energy, gradient = self.evaluate(state.z)
        require_finite(energy, gradient, number + 1)
        at = number % langevin.length  # step of the cycle
        warms_up, after = at < langevin.warmup_steps, at - langevin.warmup_steps + 1
        if not warms_up and after % langevin.thin == 0:
            self.draws["z"].append(state.z)
            self.draws["log_density"].append(-energy)
        num_data = self.potential.model.num_data
        eta, temperature = langevin.lr / num_data, langevin.temperature
        if langevin.cycles > 1:  # Zhang et al. 2020, Algorithm 1
            eta *= 0.5 + 0.5 * math.cos(math.pi * at / langevin.length)
            temperature = 0.0 if warms_up else temperature
        root = torch.ones((), dtype=gradient.dtype, device=gradient.device)
        if langevin.preconditioned:
            if warms_up:
                state.square_avg = rmsprop(state.square_avg, gradient / num_data, number == 0)
            root = preconditioner_root(state.square_avg)
        if langevin.sampler == "sgld":
            state.z = sgld(state.z, gradient, eta, root, temperature)
        else:
            c = langevin.momentum
            h = math.sqrt(2 * eta / (1 + c)) * root
            state.z, state.momentum = baoab(state.z, state.momentum, gradient, h, c, temperature)
        self.counters.done += 1

    def chains(self) -> Chains:
        """Return the samples so far."""
        log_density = torch.stack(self.draws["log_density"], dim=1)
        return Chains(
            by_chain=self.potential.by_chain(self.draws["z"]),
            log_density=log_density,
            diverging=torch.zeros_like(log_density, dtype=torch.bool),
            acceptance=torch.ones_like(log_density),
            num_gradients=torch.full_like(log_density, self.langevin.thin, dtype=torch.long),
            step_size=torch.full((len(log_density),), self.langevin.lr),
            seconds=self.counters.seconds,
        )


def require_finite(energy: Tensor, gradient: Tensor, step: int) -> None:
    """Raise DivergedError where a chain's energy or gradient is not finite."""
    if (energy + gradient.sum(1)).isfinite().all():
        return
    wrong = ~(energy.isfinite() & gradient.isfinite().all(1))
    if wrong.any():  # finite numbers can have a sum that is not
        raise DivergedError(int(wrong.nonzero()[0]), step)
