# SPDX-License-Identifier: Apache-2.0
r"""Chains that tune themselves: trained first, then sampled, until their functions agree.

The target is $p(z \mid D) \propto e^{-U(z)}$ for all latents $z \in R^d$ in unconstrained space.
All chains move at once, in coordinates $\zeta_j = z_j / s_j$ with $s_j$ the posterior's standard
deviation as estimated so far. Three samplers share training, tuning and stopping:

- **mclmc**, microcanonical Langevin dynamics (Robnik et al. 2023, "Microcanonical Hamiltonian Monte
  Carlo", eqs. 14-17; Robnik and Seljak 2024, "Fluctuation without dissipation"; for networks Sommer
  et al. 2025, "Microcanonical Langevin Ensembles", arXiv:2502.06335). A unit vector $u$ moves
  $\zeta$, and the force $f = -\nabla_\zeta U$ of direction $n = f / |f|$ turns it: with
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
- **sghmc**, underdamped Langevin dynamics on minibatches (`mcmc/_langevin.py`). The minibatches'
  noise heats the momenta: tuning brings their mean square, 1 when exact, to 1.05.

Sampling runs in rounds, each twice as long as the one before and its warm-up: $s$ is the standard
deviation of the last round's draws, the first quarter of a round tunes $\epsilon$, and draws come
from the rest of the last round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.inputs import Rows, SeveralInputs, as_inputs, require_inputs, to_precision
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.progress import progress_bar
from pyro_bbb._utils.validation import count, kind, one_of, positive
from pyro_bbb.mcmc._chains import Chains
from pyro_bbb.mcmc._initial_positions import draw_positions
from pyro_bbb.mcmc._minibatch_gradient import MinibatchGradient, Shuffled
from pyro_bbb.mcmc._potential import Potential
from pyro_bbb.mcmc._sgmcmc import all_data, checkpoint_folder, run_definition
from pyro_bbb.mcmc._sgmcmc_loop import DivergedError, SavedRun
from pyro_bbb.metrics import ess, r_hat
from pyro_bbb.models import BayesianModel
from pyro_bbb.persistence.archive import Json
from pyro_bbb.prediction import drawn_arguments

TUNED_SAMPLERS = ("mclmc", "hmc", "sghmc")
_FULL_BATCH = 4096  # rows up to which a step takes all data
_BATCH = 512  # rows of a minibatch above
_MOST_CHAINS, _LEAST_CHAINS = 64, 8  # where num_chains is not given:
_WORK = 2**24  # of a step of all chains, in rows times latents
_TRAINING_BATCH = 128  # rows of a training step
_R_HAT, _ESS, _FRACTION = 1.2, 400.0, 0.95  # of function values that have to be as good
_PROBED = 64  # training inputs, and as many others, at which functions are compared
_LR = 0.01  # Adam's
_BLOCK = 100  # training steps between two looks at the energy
_FALL = 0.02  # nats per latent and block; a smaller fall ends the training
_ROUND = 200  # steps of the first round
_TUNED = 0.25  # of a round's steps tune
_ENERGY_VARIANCE = 5e-4  # of a step of mclmc, per latent
_ACCEPTANCE, _LEAPFROGS = 0.8, 16
_HEAT = 0.05  # excess of the momenta's mean square over 1
_DIVERGED = 1000.0  # nats
_SMALLEST = 2.0**-10  # factor of a chain's step, below which it restarts elsewhere
_LEAST_DRAWS = 16  # of each chain, to compare them
_DRAWS = ("positions", "log_density", "acceptance", "diverging")
_FORM = {"kind": str, "run": dict[str, Any], "counters": dict[str, Any]}


@locked
def sample(
    model: BayesianModel,
    data: Any,
    *,
    sampler: str | None = None,
    num_chains: int | None = None,
    num_samples: int = 1000,
    seconds: float | None = None,
    max_steps: int = 10_000,
    probes: Any = None,
    batch_size: int | None = None,
    init: Any = None,
    checkpoint: str | PathLike[str] | None = None,
    checkpoint_every: int = 1000,
    device: torch.device | str | None = None,
    seed: int | None = None,
    progress: bool = True,
    sample_weight: Any = None,
) -> Chains:
    r"""Sample from the posterior of all latents by chains that tune themselves.

    The chains are trained first, all at once (Adam, until the energy stops falling), then sampled
    in rounds of doubling length. Sampling stops when the chains agree on the network's function:
    at 95 % of the compared outputs the effective sample size is at least 400 (for four chains
    $\hat R$ is then below 1.01) and $\hat R$ at most 1.2 (for many short ones); or when
    ``seconds`` or ``max_steps`` are used up. A chain whose energy error is infinite or above 1,000
    nats returns to its last position with half the step; ``restarts`` counts it.

    Networks are in evaluation mode; parameters that are not random stay as they are.

    Args:
        model: the model; any network, prior and likelihood with continuous latents.
        data: a pair ``(x, y)`` of tensors or a map-style dataset of pairs, all ``num_data`` of
            them.
        sampler: ``"mclmc"`` (microcanonical Langevin) or ``"hmc"``, with all data in each step;
            ``"sghmc"`` on minibatches. By default mclmc up to 4,096 rows, sghmc above.
        num_chains: number of chains; by default 64, fewer where rows times latents are more than
            262,144, and at least 8.
        num_samples: draws kept in all, spread over the last round of all chains.
        seconds: budget of wall time, within which the last round is shortened to fit. The result
            is a function of the seed only where something else ends the run.
        max_steps: the most gradients of each chain, training included.
        probes: inputs ``[m, ...]`` at which the functions have to agree as well; by default made
            from the training inputs, between them and beyond.
        batch_size: rows of a minibatch for ``"sghmc"``, by default 512.
        init: where training starts, as for `run_nuts`: by default the He initialisation.
        checkpoint: a folder, from which a run that was interrupted goes on when called with the
            same arguments, on a CPU to the bit.
        checkpoint_every: steps from one checkpoint to the next.
        device: where to run; by default where ``x`` is.
        seed: makes the result a function of this number, and leaves torch's random state alone.
        progress: whether to show a progress bar.
        sample_weight: weights ``[n]`` of the examples in the likelihood, as for `fit`.

    Returns:
        The draws, which `predict` takes as they are. ``diverging`` marks a draw before which the
        chain had to return, ``r_hat_of_functions`` and ``ess_of_functions`` are those at which
        sampling stopped.

    Raises:
        ValueError: data that do not fit the model or its ``num_data``, an option out of range or
            of unknown name, a discrete latent, a start outside the support, or a checkpoint of
            another run.
        TypeError: an argument of the wrong kind.
        DivergedError: no chain can move, even by the smallest step.
        LoadError: the checkpoint is damaged, or something else.
    """
    kind("model", model, BayesianModel)
    max_steps = count("max_steps", max_steps)
    seconds = None if seconds is None else positive("seconds", seconds)
    folder = checkpoint_folder(checkpoint, checkpoint_every)
    x, y = all_data(model, data, device, sample_weight)
    sampler, batch_size = _choose(sampler, batch_size, len(y))
    draws = count("num_samples", num_samples)
    with seeded(seed), own_store(model):
        inputs = _compared(model, x, probes)
        batches = Shuffled(x, y, batch_size)
        potential = Potential(model, *batches.first())
        z = draw_positions(potential, init, _chain_count(potential, num_chains))
        kernel, draws = _kernel(sampler, z.shape[1]), max(_LEAST_DRAWS, -(-draws // len(z)))
        run = _Run(potential, batches, z, kernel, inputs, draws, max_steps, seconds)
        options = {"sampler": sampler, "num_samples": num_samples, "max_steps": max_steps}
        definition = run_definition(model, batches, init, seed, z) | options
        saved = SavedRun(*folder, definition, "sample", _FORM) if folder else None
        if saved:
            saved.resume(run)
        try:
            run.finish(progress, saved)
        except DivergedError as error:
            error.chains = run.chains() if run.positions else None
            raise
        return run.chains().thin(num_samples)


# --- the samplers ---


@dataclass
class SamplerState:
    """Positions of all chains ``[chains, d]``, with what each sampler keeps between steps."""

    z: Tensor
    motion: Tensor  # unit velocity of mclmc, momentum of sghmc, both in whitened coordinates
    energy: Tensor  # U at z, [chains]
    gradient: Tensor  # of U at z


Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]  # energies and gradients at positions
Step = Callable[[SamplerState, Evaluate, Tensor, Tensor], tuple[SamplerState, Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """A sampler: its step, the gradients that one takes, and how its step size is tuned.

    ``step(state, evaluate, scale, epsilon)`` returns the next state, and for each chain the error
    of the step (of the energy, or the heat) and its acceptance. ``change(error, acceptance,
    epsilon)`` is the change of the logarithm of epsilon that brings their mean to its target.
    """

    begin: Callable[[Tensor], Tensor]  # the motion at positions
    step: Step
    change: Callable[[Tensor, Tensor, float], Tensor]
    epsilon: float  # the first step
    tolerance: float = math.inf  # error above which a chain needs a smaller step than the others
    gradients: int = 1


def _turn(u: Tensor, force: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the unit velocities ``u`` by the force for a time epsilon; return the energy, too."""
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


def _mclmc_step(
    state: SamplerState, evaluate: Evaluate, scale: Tensor, epsilon: Tensor
) -> tuple[SamplerState, Tensor, Tensor]:
    d = state.z.shape[1]
    # partial refreshment of the velocity over the length L = sqrt(d)
    nu = (torch.expm1(2 * epsilon / math.sqrt(d)) / d).sqrt()
    u = _unit(state.motion + nu * torch.randn_like(state.motion))
    # half a turn, a step, half a turn; the force in whitened coordinates is -s * gradient
    u, first = _turn(u, -scale * state.gradient, epsilon / 2)
    z = state.z + epsilon * u * scale
    energy, gradient = evaluate(z)
    u, second = _turn(u, -scale * gradient, epsilon / 2)
    error = first + second + energy - state.energy
    return SamplerState(z, u, energy, gradient), error, torch.ones_like(error)


def _mclmc_change(d: int, error: Tensor, *_: Any) -> Tensor:
    """Return a third of the change by which Var(error) / d ~ epsilon^6 reaches its target."""
    ratio = error.square().mean() / (d * _ENERGY_VARIANCE)
    return -ratio.clamp(1e-3, 1e3).log() / 18


def _hmc_step(
    state: SamplerState, evaluate: Evaluate, scale: Tensor, epsilon: Tensor
) -> tuple[SamplerState, Tensor, Tensor]:
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
    proposal = SamplerState(z, p, energy, gradient)
    # a rejected proposal is not a divergence
    error = torch.where(accepted | error.isfinite(), error.clamp(max=_DIVERGED / 2), error)
    return _where(accepted, proposal, state), error, acceptance


def _hmc_change(error: Tensor, acceptance: Tensor, epsilon: float) -> Tensor:
    return (acceptance.mean() - _ACCEPTANCE) / 2


def _sghmc_step(
    state: SamplerState, evaluate: Evaluate, scale: Tensor, epsilon: Tensor
) -> tuple[SamplerState, Tensor, Tensor]:
    # BAOAB with friction 1: kick, drift, noise, drift
    energy, gradient = evaluate(state.z)
    p = state.motion - epsilon * scale * gradient
    heat = p.square().mean(1) - 1
    decay = torch.exp(-epsilon)
    z = state.z + epsilon / 2 * scale * p
    p = decay * p + (1 - decay.square()).sqrt() * torch.randn_like(p)
    z = z + epsilon / 2 * scale * p
    heat = torch.where(energy.isfinite() & gradient.isfinite().all(1), heat, math.inf)
    return SamplerState(z, p, energy, gradient), heat, torch.ones_like(heat)


def _sghmc_change(error: Tensor, acceptance: Tensor, epsilon: float) -> Tensor:
    """Return a change slower than heat decays, in 1 / (2 epsilon) steps, unless it runs away."""
    heat = error.mean()
    change = (1 - heat / _HEAT).clamp(-2.0, 1.0) * epsilon / 4
    return torch.where(heat > 10 * _HEAT, -0.2, change).clamp(max=-math.log(epsilon))


def _kernel(sampler: str, d: int) -> Kernel:
    if sampler == "hmc":
        return Kernel(torch.randn_like, _hmc_step, _hmc_change, 0.1, gradients=_LEAPFROGS)
    if sampler == "sghmc":
        return Kernel(torch.randn_like, _sghmc_step, _sghmc_change, 0.05)
    if d < 2:
        raise ValueError(
            f"sampler 'mclmc' needs a model of at least 2 latents, got {d}: take 'hmc'"
        )
    change, epsilon = partial(_mclmc_change, d), 0.02 * math.sqrt(d)
    tolerance = 10 * math.sqrt(d * _ENERGY_VARIANCE)
    return Kernel(lambda z: _unit(torch.randn_like(z)), _mclmc_step, change, epsilon, tolerance)


def _where(chains: Tensor, new: SamplerState, old: SamplerState) -> SamplerState:
    """Return ``new`` for the chosen chains, ``[chains]``, and ``old`` for the others."""
    pick = chains[:, None]
    return SamplerState(
        torch.where(pick, new.z, old.z),
        torch.where(pick, new.motion, old.motion),
        torch.where(chains, new.energy, old.energy),
        torch.where(pick, new.gradient, old.gradient),
    )


# --- the run ---


@dataclass
class _Counters:
    """Numbers of a run that change, in its checkpoint as JSON."""

    done: int = 0  # gradients of each chain
    seconds: float = 0.0
    train_seconds: float = 0.0  # of these, in training
    trained: int = 0  # number of the last training step
    energy: float | None = None  # mean over the chains and the last block of training steps
    block: float = 0.0  # sum of the chains' mean energies in this block
    begun: int = 0  # gradients before the round
    length: int = 0  # gradients of the round, 0 in training
    log_epsilon: float = 0.0  # logarithm of the step in whitened coordinates
    mean_log_epsilon: float = 0.0  # over the second half of the steps that tune
    averaged: int = 0
    over: bool = False
    r_hat: float | None = None
    ess: float | None = None


class _Run:
    """A run of all chains, from training to the last round.

    Args:
        potential: the energy.
        batches: the minibatches.
        z: initial positions, ``[chains, d]``.
        kernel: the sampler.
        inputs: where functions are compared.
        draws: draws of each chain.
        max_steps: the most gradients of a chain.
        seconds: budget of wall time.
    """

    def __init__(
        self,
        potential: Potential,
        batches: Shuffled,
        z: Tensor,
        kernel: Kernel,
        inputs: list[Rows],
        draws: int,
        max_steps: int,
        seconds: float | None,
    ) -> None:
        self.potential, self.kernel, self.inputs = potential, kernel, inputs
        self.all_batches = batches
        self.draws, self.max_steps, self.budget = draws, max_steps, seconds or math.inf
        self.began = time.perf_counter()
        self._draw_from(Shuffled(batches.x, batches.y, min(batches.batch_size, _TRAINING_BATCH)), z)
        zeros = torch.zeros_like(z)
        self.state = self.anchor = SamplerState(z, kernel.begin(z), zeros[:, 0], zeros)
        self.adam = [zeros, zeros]  # moving means of the gradient and of its square
        self.scale, self.factor = torch.ones_like(z[0]), torch.ones_like(z[:, 0])
        self.restarts = torch.zeros(len(z), dtype=torch.long, device=z.device)
        self.returned = torch.zeros_like(self.restarts, dtype=torch.bool)
        self.counters = _Counters(
            trained=max(1, max_steps // 5), log_epsilon=math.log(kernel.epsilon)
        )
        self._forget()

    def _draw_from(self, batches: Shuffled, z: Tensor) -> None:
        """Take minibatches from now on from these."""
        self.batches, self._stream = batches, iter(batches)
        self._gradient = MinibatchGradient(self.potential, z, batches.first())

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return energies and gradients given the next minibatch."""
        return self._gradient(z, *next(self._stream))

    def finish(self, progress: bool, saved: SavedRun | None) -> None:
        """Take all steps that are left, and write a checkpoint where one is due."""
        counters = self.counters
        before, began = counters.seconds, self.began
        bar = progress_bar(self.max_steps, initial=counters.done, unit="step", shown=progress)
        with bar:
            while not counters.over:
                done = counters.done
                self._sample() if counters.length else self._train()
                counters.seconds = before + time.perf_counter() - began
                bar.update(counters.done - done)
                if saved and counters.done // saved.every > done // saved.every:
                    saved.write(self)
        if saved:
            saved.write(self)

    # --- training ---

    def _train(self) -> None:
        """Take one step of Adam with all chains, at a rate that falls to 0 in the last ones."""
        counters = self.counters
        energy, gradient = self.evaluate(self.state.z)
        bad = ~(energy.isfinite() & gradient.isfinite().all(1))
        self.state = replace(self.state, energy=energy, gradient=gradient)
        if bad.any():
            self._return(bad)
            gradient = torch.where(bad[:, None], 0.0, gradient)
            self.adam = [torch.where(bad[:, None], 0.0, mean) for mean in self.adam]
        self.anchor = _where(bad, self.anchor, self.state)
        counters.done += 1
        t, (mean, square) = counters.done, self.adam
        self.adam = [mean.lerp(gradient, 0.1), square.lerp(gradient.square(), 0.001)]
        direction = self.adam[0] / (1 - 0.9**t) / (self.adam[1] / (1 - 0.999**t)).sqrt().add(1e-8)
        lr = _LR * min(1.0, (counters.trained - t) / _BLOCK)
        self.state = replace(self.state, z=self.state.z - lr * self.factor[:, None] * direction)
        counters.block += float(energy[~bad].mean())
        if t % _BLOCK == 0:
            now, counters.block = counters.block / _BLOCK, 0.0
            before = counters.energy
            if before is not None and before - now < _FALL * self.scale.numel():
                counters.trained = min(counters.trained, t + _BLOCK)
            counters.energy = now
        if counters.seconds > self.budget / 5:
            counters.trained = min(counters.trained, t + 1 + min(_BLOCK, t // 5))
        if t >= counters.trained:
            self._begin_sampling()

    def _begin_sampling(self) -> None:
        """Whiten by the spread of the trained chains, and choose the length of the first round."""
        counters = self.counters
        if self.all_batches.batch_size > self.batches.batch_size:
            self._draw_from(self.all_batches, self.state.z)
        began = time.perf_counter()
        energy, gradient = self.evaluate(self.state.z)
        per_step = max(time.perf_counter() - began, counters.seconds / counters.done)
        self.state = replace(self.state, energy=energy, gradient=gradient)
        bad = ~(energy.isfinite() & gradient.isfinite().all(1))
        if bad.any():
            self._return(bad)
        self.anchor, self.factor = self.state, torch.ones_like(self.factor)
        self._whiten(self.state.z[None])
        # rounds of lengths n, 2n, 4n, ... that use up what is left, n from 200 to 400
        left = self._left(per_step)
        rounds = max(1, int(math.log2(left / _ROUND + 1))) if left > 0 else 1
        counters.length = max(self._least, left // (2**rounds - 1))
        counters.begun, counters.train_seconds = counters.done, counters.seconds
        counters.trained = counters.done

    def _left(self, per_step: float) -> int:
        """Gradients until a budget is used up, each of so many seconds."""
        left = self.max_steps - self.counters.done
        if self.budget == math.inf:
            return left
        return min(left, round((self.budget - self.counters.seconds) / per_step))

    @property
    def _least(self) -> int:
        """Gradients of the shortest round."""
        return 2 * _LEAST_DRAWS * self.kernel.gradients

    # --- sampling ---

    def _sample(self) -> None:
        """Take one step of the sampler with all chains."""
        counters = self.counters
        last = counters.begun + round(_TUNED * counters.length)  # step that tunes
        epsilon = math.exp(counters.log_epsilon)
        state, error, acceptance = self.kernel.step(
            self.state, self.evaluate, self.scale, epsilon * self.factor[:, None]
        )
        bad = ~(error.abs() < _DIVERGED)
        if bad.any():
            self.anchor, self.state = _where(bad, self.anchor, self.state), state
            self._return(bad)
        else:
            self.anchor, self.state = self.state, state
        erring = ~bad & (error.abs() > self.kernel.tolerance)
        self.factor = torch.where(erring, 0.8 * self.factor, self.factor)
        counters.done += self.kernel.gradients
        if counters.done <= last:
            self._tune(error, acceptance, bad, last)
            return
        thin = max(1, (counters.begun + counters.length - last) // self.draws)
        count = len(self.positions)
        if count < min(self.draws, (counters.done - last) // thin):
            self.positions.append(self.state.z)
            self.log_density.append(-self.state.energy)
            self.acceptance.append(acceptance)
            self.diverging.append(self.returned)
            self.returned = torch.zeros_like(self.returned)
        late = counters.seconds > self.budget and count >= _LEAST_DRAWS
        if late or counters.done >= counters.begun + counters.length:
            self._end_round()

    def _tune(self, error: Tensor, acceptance: Tensor, bad: Tensor, last: int) -> None:
        """Change the common step size, and bring each chain's factor back to 1."""
        counters, good = self.counters, ~bad
        if good.any():
            epsilon = math.exp(counters.log_epsilon)
            change = float(self.kernel.change(error[good], acceptance[good], epsilon))
            counters.log_epsilon += min(max(change, -0.2), 0.2)
        self.factor = self.factor**0.995
        if 2 * (counters.done - counters.begun) > last - counters.begun:
            counters.averaged += 1
            counters.mean_log_epsilon += (
                counters.log_epsilon - counters.mean_log_epsilon
            ) / counters.averaged
        if counters.done + self.kernel.gradients > last and counters.averaged:
            counters.log_epsilon = counters.mean_log_epsilon

    def _return(self, bad: Tensor) -> None:
        """Return diverged chains to where they were, with half the step, or to another chain."""
        counters, origin = self.counters, self.anchor
        self.restarts, self.returned = self.restarts + bad, self.returned | bad
        if counters.length and 2 * bad.sum() > len(bad):  # the common step is too large
            counters.log_epsilon -= math.log(2)
            if counters.log_epsilon < math.log(self.kernel.epsilon * _SMALLEST**3):
                raise DivergedError(int(bad.nonzero()[0]), counters.done + 1)
        else:
            self.factor = torch.where(bad, self.factor / 2, self.factor)
        if (lost := self.factor < _SMALLEST).any() and not lost.all():
            others = (~lost).nonzero().squeeze(1)
            anywhere = others[torch.randint(len(others), bad.shape, device=bad.device)]
            rows = torch.where(lost, anywhere, torch.arange(len(bad), device=bad.device))
            origin = SamplerState(*(value[rows] for value in vars(origin).values()))
            self.factor = torch.where(lost, 1.0, self.factor)
        origin = replace(origin, motion=self.kernel.begin(origin.z))
        self.state = _where(bad, origin, self.state)

    def _end_round(self) -> None:
        """Compare the chains' functions, and begin the next round unless all agree."""
        counters = self.counters
        counters.r_hat, counters.ess = self._agreement()
        agree = (counters.r_hat or 1.0) <= _R_HAT and counters.ess >= _ESS
        per_step = (counters.seconds - counters.train_seconds) / (counters.done - counters.trained)
        length = min(2 * counters.length, self._left(per_step))
        if agree or length < max(counters.length, self._least):
            counters.over = True
            return
        self._whiten(torch.stack(self.positions))
        self.state = replace(self.state, motion=self.kernel.begin(self.state.z))
        counters.begun, counters.length, counters.averaged = counters.done, length, 0
        counters.mean_log_epsilon = 0.0
        self._forget()

    def _forget(self) -> None:
        """Drop the draws of the last round."""
        self.positions: list[Tensor] = []  # [chains, d] each
        self.log_density: list[Tensor] = []
        self.acceptance: list[Tensor] = []
        self.diverging: list[Tensor] = []
        self.returned = torch.zeros_like(self.restarts, dtype=torch.bool)

    def _whiten(self, positions: Tensor) -> None:
        """Take the standard deviations of positions ``[draws, chains, d]``, shrunk for few."""
        values = positions.flatten(0, 1)
        if (n := len(values)) > 1:
            variance = values.var(0)
            usual = variance.mean() + 1e-4  # all chains may be at one point
            self.scale = ((n * variance + 5 * usual) / (n + 5)).sqrt()

    def _agreement(self) -> tuple[float | None, float]:
        """R-hat and ESS of function values, which 95 % of them are as good as."""
        by_chain = self.potential.constrain(torch.stack(self.positions, dim=1))
        draws = {name: values.flatten(0, 1) for name, values in by_chain.items()}
        chains = len(self.state.z)
        worst: list[tuple[float, float]] = []
        for values in _functions(self.potential.model, draws, self.inputs):
            values = values.unflatten(0, (chains, -1))
            effective = ess(values)
            moving = effective.isfinite()  # what is constant agrees
            if moving.any():
                r = r_hat(values)[moving].quantile(_FRACTION) if chains > 1 else math.nan
                worst.append((float(r), float(effective[moving].quantile(1 - _FRACTION))))
        if not worst:
            return None, math.inf
        r = max(pair[0] for pair in worst)
        return (r if chains > 1 else None), min(pair[1] for pair in worst)

    # --- results ---

    def chains(self) -> Chains:
        """The draws of the last round."""
        with torch.no_grad():
            by_chain = self.potential.constrain(torch.stack(self.positions, dim=1))
        log_density = torch.stack(self.log_density, dim=1)
        thin = max(1, round((1 - _TUNED) * self.counters.length / self.draws))
        return Chains(
            by_chain={name: values.contiguous() for name, values in by_chain.items()},
            log_density=log_density,
            diverging=torch.stack(self.diverging, dim=1),
            acceptance=torch.stack(self.acceptance, dim=1),
            num_gradients=torch.full_like(log_density, thin, dtype=torch.long),
            step_size=math.exp(self.counters.log_epsilon) * self.factor,
            seconds=self.counters.seconds,
            restarts=self.restarts,
            r_hat_of_functions=self.counters.r_hat,
            ess_of_functions=self.counters.ess,
        )

    def save(self) -> tuple[dict[str, Json], dict[str, Tensor]]:
        """All that changes, as numbers and tensors."""
        tensors = {f"state.{name}": value for name, value in vars(self.state).items()}
        tensors |= {f"anchor.{name}": value for name, value in vars(self.anchor).items()}
        tensors |= {f"adam.{i}": value for i, value in enumerate(self.adam)}
        for name in ("scale", "factor", "restarts", "returned"):
            tensors[name] = getattr(self, name)
        if self.positions:
            tensors |= {name: torch.stack(getattr(self, name)) for name in _DRAWS}
        return {"counters": vars(self.counters)}, tensors | self.batches.random_state(self.state.z)

    def restore(self, spec: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> None:
        """Go back to the state of a checkpoint."""
        device = self.state.z.device
        on_device = {name: value.to(device) for name, value in tensors.items()}
        self.counters = _Counters(**spec["counters"])
        self.state = SamplerState(*(on_device[f"state.{name}"] for name in vars(self.state)))
        self.anchor = SamplerState(*(on_device[f"anchor.{name}"] for name in vars(self.anchor)))
        self.adam = [on_device[f"adam.{i}"] for i in range(2)]
        for name in ("scale", "factor", "restarts", "returned"):
            setattr(self, name, on_device[name])
        if "positions" in tensors:
            for name in _DRAWS:
                setattr(self, name, list(on_device[name]))
        if self.counters.length and self.all_batches.batch_size > self.batches.batch_size:
            self._draw_from(self.all_batches, self.state.z)
        self.batches.restore_random_state(tensors)


# --- where functions are compared ---


def _functions(
    model: BayesianModel, draws: dict[str, Tensor], inputs: list[Rows]
) -> Iterator[Tensor]:
    """Yield the likelihood's arguments, log-probabilities for classes, ``[draws, ...]`` each."""
    for x in inputs:
        for values in drawn_arguments(model, draws, x).values():
            yield values.flatten(1)


def spread_rows(length: int, most: int) -> Tensor:
    """Return indices of at most ``most`` rows, evenly spread."""
    return torch.arange(min(length, most)) * length // min(length, most)


def probe_inputs(x: Tensor, count: int = _PROBED) -> Tensor:
    """Return inputs off the data, made of rows ``[n, features]``: between them and beyond.

    Half are midpoints of two random rows, the other half is twice as far from the mean as a row.
    """
    pairs = x[torch.randint(len(x), (2, count))]
    middle, mean = pairs.mean(0)[: count // 2], x.mean(0)
    return torch.cat([middle, mean + 2 * (pairs[0, count // 2 :] - mean)])


def _compared(model: BayesianModel, x: Rows, probes: Any) -> list[Rows]:
    """Training inputs, evenly spaced, and probes."""
    if isinstance(x, SeveralInputs):  # maybe with weights, which are not inputs
        args, kwargs = x.args, x.kwargs
        x = args[0] if len(args) == 1 and not kwargs else SeveralInputs(args, kwargs)
    inputs = [x.index_select(0, spread_rows(len(x), _PROBED).to(x.device))]
    if probes is not None:
        inputs.append(to_precision(require_inputs(as_inputs(probes)), model).to(x.device))
    elif isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point():
        inputs.append(probe_inputs(x))
    return inputs


def _choose(sampler: str | None, batch_size: int | None, rows: int) -> tuple[str, int]:
    """The sampler and the rows of its minibatches."""
    if sampler is None:
        sampler = "mclmc" if rows <= _FULL_BATCH and batch_size is None else "sghmc"
    one_of("sampler", sampler, TUNED_SAMPLERS)
    if sampler == "sghmc":
        return sampler, min(rows, _BATCH if batch_size is None else count("batch_size", batch_size))
    if batch_size is not None:
        raise ValueError(f"batch_size needs sampler='sghmc', got {batch_size} with {sampler!r}")
    return sampler, rows


def _chain_count(potential: Potential, num_chains: int | None) -> int:
    if num_chains is not None:
        return count("num_chains", num_chains)
    work = potential.parts[-1].stop * len(potential.y)
    return min(_MOST_CHAINS, max(_LEAST_CHAINS, _WORK // work))
