# SPDX-License-Identifier: Apache-2.0
r"""Chains that tune themselves: trained first, then sampled, until their functions agree.

The target is $p(z \mid D) \propto e^{-U(z)}$ for all latents $z \in R^d$ in unconstrained space.
All chains move at once, in coordinates $\zeta_j = z_j / s_j$ with $s_j$ the posterior's standard
deviation as estimated so far; the samplers are in ``_samplers.py``.

1. *Training* by Adam on minibatches, until $U$ stops falling. It ends early on purpose: a mode can
   be far from the mass, as in the neck of a hierarchical prior's funnel, and all chains in it.
2. *Rounds*, each twice as long as the one before and its warm-up: $s$ is the standard deviation of
   the last round's draws, the first quarter of a round tunes $\epsilon$, and draws come from the
   rest of the last round.
3. *Stop*, when $\hat R$ and the effective sample size of function values are good enough.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._param_store import own_store
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.inputs import Rows, SeveralInputs, as_inputs, require_inputs, to_precision
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import count, kind, one_of, positive
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
from pyro_bbb.mcmc._samplers import DIVERGED, ChainState, Sampler, make_sampler
from pyro_bbb.metrics import ess, r_hat
from pyro_bbb.models import BayesianModel
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
_SMALLEST = 2.0**-10  # factor of a chain's step, below which it restarts elsewhere
_LEAST_DRAWS = 16  # of each chain, to compare them


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

    The chains are trained first, all at once, then sampled in rounds of doubling length. Sampling
    stops when the chains agree on the network's function: at 95 % of the compared outputs the
    effective sample size is at least 400 and $\hat R$ at most 1.2; or when ``seconds`` or
    ``max_steps`` are used up. A chain whose energy error is infinite or above 1,000 nats returns to
    its last position with half the step; ``restarts`` counts it.

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
    x, y = all_data(model, data, device, sample_weight)
    if sampler is None:
        sampler = "mclmc" if len(y) <= _FULL_BATCH and batch_size is None else "sghmc"
    if one_of("sampler", sampler, TUNED_SAMPLERS) == "sghmc":
        batch_size = _BATCH if batch_size is None else count("batch_size", batch_size)
    elif batch_size is not None:
        raise ValueError(f"batch_size needs sampler='sghmc', got {batch_size} with {sampler!r}")
    draws = count("num_samples", num_samples)
    with seeded(seed), own_store(model):
        inputs = _compared(model, x, probes)
        batches = Shuffled(x, y, batch_size or len(y))
        potential = Potential(model, *batches.first())
        if num_chains is None:
            work = potential.latents.size * len(batches.first()[1])
            num_chains = min(_MOST_CHAINS, max(_LEAST_CHAINS, _WORK // work))
        z = initial_positions(potential, init, [None] * count("num_chains", num_chains))
        tuned, draws = make_sampler(sampler, z.shape[1]), max(_LEAST_DRAWS, -(-draws // len(z)))
        run = TunedRun(potential, batches, z, tuned, inputs, draws, max_steps, seconds)
        options = {"sampler": sampler, "num_samples": num_samples, "max_steps": max_steps}
        options |= {"seed": seed, "init": init}
        chains = run.finish(max_steps, progress, checkpoint, checkpoint_every, options)
        return chains.thin(num_samples)


# --- the state of a run ---


@dataclass
class TunedCounters(Counters):
    """Numbers of a run that change."""

    trained: int = 0  # number of the last training step
    train_seconds: float = 0.0
    energy: float | None = None  # mean over the chains and the last block of training steps
    block: float = 0.0  # sum of the chains' mean energies in this block
    begun: int = 0  # gradients before the round
    length: int = 0  # gradients of the round, 0 in training
    log_epsilon: float = 0.0  # logarithm of the step in whitened coordinates
    mean_log_epsilon: float = 0.0  # over the second half of the steps that tune
    averaged: int = 0
    finished: bool = False
    r_hat: float | None = None
    ess: float | None = None


@dataclass
class TunedState(ChainState):
    """Tensors of a run that change: the chains, and what tunes them."""

    mean: Tensor  # Adam's moving mean of the gradient
    square: Tensor  # and of its square
    scale: Tensor  # s, [d]
    factor: Tensor  # of each chain's step
    restarts: Tensor  # [chains]
    returned: Tensor  # whether a chain had to return since the last draw


class TunedRun(Run):
    """A run of all chains, from training to the last round."""

    owner = "sample"

    def __init__(
        self,
        potential: Potential,
        batches: Shuffled,
        z: Tensor,
        sampler: Sampler,
        inputs: list[Rows],
        num_draws: int,
        max_steps: int,
        seconds: float | None,
    ) -> None:
        few = min(_TRAINING_BATCH, batches.batch_size)
        super().__init__(potential, Shuffled(batches.x, batches.y, few), z)
        self.sampling_batches, self.sampler, self.inputs = batches, sampler, inputs
        self.num_draws, self.max_steps, self.budget = num_draws, max_steps, seconds or math.inf
        self.shortest = 2 * _LEAST_DRAWS * sampler.gradients  # gradients of a round
        restarts = torch.zeros(len(z), dtype=torch.long, device=z.device)
        self.state = TunedState(
            z,
            sampler.motion(z),
            *self.evaluate(z),
            mean=torch.zeros_like(z),
            square=torch.zeros_like(z),
            scale=torch.ones_like(z[0]),
            factor=torch.ones_like(z[:, 0]),
            restarts=restarts,
            returned=restarts.bool(),
        )
        self.counters = TunedCounters(
            trained=max(1, max_steps // 5), log_epsilon=math.log(sampler.epsilon)
        )
        self.forget()

    def step(self) -> None:
        """Take one step of training, or of the sampler in a round."""
        (sample_step if self.counters.length else train_step)(self)

    def over(self) -> bool:
        """Return whether the last round is done."""
        return bool(self.counters.finished)

    def forget(self) -> None:
        """Drop the draws of the last round."""
        self.draws = {name: [] for name in ("z", "log_density", "acceptance", "diverging")}
        self.state.returned = torch.zeros_like(self.state.returned)

    def left(self, per_step: float) -> int:
        """Return the gradients until a budget is used up, each of ``per_step`` seconds."""
        left = self.max_steps - self.counters.done
        if self.budget == math.inf:
            return left
        return min(left, round((self.budget - self.counters.seconds) / per_step))

    def chains(self) -> Chains:
        """Return the draws of the last round."""
        stacked = {name: torch.stack(values, dim=1) for name, values in self.draws.items()}
        thin = max(1, round((1 - _TUNED) * self.counters.length / self.num_draws))
        return Chains(
            by_chain=self.potential.by_chain(self.draws["z"]),
            log_density=stacked["log_density"],
            diverging=stacked["diverging"],
            acceptance=stacked["acceptance"],
            num_gradients=torch.full_like(stacked["log_density"], thin, dtype=torch.long),
            step_size=math.exp(self.counters.log_epsilon) * self.state.factor,
            seconds=self.counters.seconds,
            restarts=self.state.restarts,
            r_hat_of_functions=self.counters.r_hat,
            ess_of_functions=self.counters.ess,
        )

    def restore(self, counters: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Return to the state of a checkpoint."""
        if counters["length"]:
            self.use(self.sampling_batches, self.state.z)
        super().restore(counters, tensors)


# --- training ---


def train_step(run: TunedRun) -> None:
    """Take one step of Adam with all chains, at a rate that falls to 0 in the last ones."""
    counters, state = run.counters, run.state
    counters.done = t = counters.done + 1
    state.mean = state.mean.lerp(state.gradient, 0.1)
    state.square = state.square.lerp(state.gradient.square(), 0.001)
    direction = state.mean / (1 - 0.9**t) / (state.square / (1 - 0.999**t)).sqrt().add(1e-8)
    lr = _LR * min(1.0, (counters.trained - t) / _BLOCK)
    z = state.z - lr * state.factor[:, None] * direction
    energy, gradient = run.evaluate(z)
    good = energy.isfinite() & gradient.isfinite().all(1)
    state.move(ChainState(z, state.motion, energy, gradient).where(good, state))
    if not good.all():
        state.mean = torch.where(good[:, None], state.mean, 0.0)
        state.square = torch.where(good[:, None], state.square, 0.0)
        back_off(run, ~good)
    counters.block += float(state.energy.mean())
    if t % _BLOCK == 0:
        now, counters.block = counters.block / _BLOCK, 0.0
        if counters.energy is not None and counters.energy - now < _FALL * z.shape[1]:
            counters.trained = min(counters.trained, t + _BLOCK)
        counters.energy = now
    if counters.seconds > run.budget / 5:
        counters.trained = min(counters.trained, t + 1 + min(_BLOCK, t // 5))
    if t >= counters.trained:
        start_rounds(run)


def start_rounds(run: TunedRun) -> None:
    """Whiten by the spread of the trained chains, and choose the length of the first round."""
    counters, state = run.counters, run.state
    if run.sampling_batches.batch_size > run.batches.batch_size:
        run.use(run.sampling_batches, state.z)
    began = time.perf_counter()
    state.energy, state.gradient = run.evaluate(state.z)
    per_step = max(time.perf_counter() - began, counters.seconds / counters.done)
    finite = state.energy.isfinite() & state.gradient.isfinite().all(1)
    if not finite.any():
        raise DivergedError(0, counters.done + 1)
    if not finite.all():
        state.move(state.take(_elsewhere(~finite)))
    state.factor = torch.ones_like(state.factor)
    state.scale = whitening(state.z, state.scale)
    # rounds of lengths n, 2n, 4n, ... that use up what is left, n from 200 to 400
    left = run.left(per_step)
    rounds = max(1, int(math.log2(left / _ROUND + 1))) if left > 0 else 1
    counters.length = max(run.shortest, left // (2**rounds - 1))
    counters.begun = counters.trained = counters.done
    counters.train_seconds = counters.seconds


def _elsewhere(lost: Tensor) -> Tensor:
    """Return the chains' numbers, those of lost ones replaced by those of random others."""
    kept = (~lost).nonzero().squeeze(1)
    random = kept[torch.randint(len(kept), lost.shape, device=lost.device)]
    return torch.where(lost, random, torch.arange(len(lost), device=lost.device))


# --- rounds ---


def sample_step(run: TunedRun) -> None:
    """Take one step of the sampler with all chains, and a draw when it is due."""
    counters, state = run.counters, run.state
    last = counters.begun + round(_TUNED * counters.length)  # step that tunes
    epsilon = math.exp(counters.log_epsilon) * state.factor[:, None]
    after, error, acceptance = run.sampler.step(state, run.evaluate, state.scale, epsilon)
    bad = ~(error.abs() < DIVERGED)
    counters.done += run.sampler.gradients
    state.move(state.where(bad, after) if bad.any() else after)
    if bad.any():
        back_off(run, bad)
    # a chain that errs takes smaller steps, also while draws are taken: else it would heat up
    smaller = ~bad & run.sampler.exceeds(error)
    state.factor = torch.where(smaller, 0.8 * state.factor, state.factor)
    if counters.done <= last:
        tune(run, error, acceptance, bad, last)
        return
    thin = max(1, (counters.begun + counters.length - last) // run.num_draws)
    drawn = len(run.draws["z"])
    if drawn < min(run.num_draws, (counters.done - last) // thin):
        draw = state.z, -state.energy, acceptance, state.returned
        for values, value in zip(run.draws.values(), draw, strict=True):
            values.append(value)
        state.returned = torch.zeros_like(state.returned)
    late = counters.seconds > run.budget and drawn >= _LEAST_DRAWS
    if late or counters.done >= counters.begun + counters.length:
        end_round(run)


def tune(run: TunedRun, error: Tensor, acceptance: Tensor, bad: Tensor, last: int) -> None:
    """Change the common step size, and bring each chain's factor back to 1."""
    counters, state, good = run.counters, run.state, ~bad
    if good.any():
        epsilon = math.exp(counters.log_epsilon)
        change = run.sampler.change(error[good], acceptance[good], epsilon)
        counters.log_epsilon += min(max(float(change), -0.2), 0.2)
    state.factor = state.factor**0.995
    if 2 * (counters.done - counters.begun) > last - counters.begun:
        counters.averaged += 1
        counters.mean_log_epsilon += (
            counters.log_epsilon - counters.mean_log_epsilon
        ) / counters.averaged
    if counters.done + run.sampler.gradients > last and counters.averaged:
        counters.log_epsilon = counters.mean_log_epsilon
        state.returned = torch.zeros_like(state.returned)


def back_off(run: TunedRun, bad: Tensor) -> None:
    """Halve the step of diverged chains, which are where they were, or move them to another."""
    counters, state = run.counters, run.state
    state.restarts, state.returned = state.restarts + bad, state.returned | bad
    if counters.length and 2 * bad.sum() > len(bad):  # the common step is too large
        counters.log_epsilon -= math.log(2)
        if counters.log_epsilon < math.log(run.sampler.epsilon * _SMALLEST**3):
            raise DivergedError(int(bad.nonzero()[0]), counters.done + 1)
    else:
        state.factor = torch.where(bad, state.factor / 2, state.factor)
    lost = state.factor < _SMALLEST
    if lost.any() and not lost.all():
        state.move(state.take(_elsewhere(lost)))
        state.factor = torch.where(lost, 1.0, state.factor)
    state.motion = torch.where(bad[:, None], run.sampler.motion(state.z), state.motion)


def end_round(run: TunedRun) -> None:
    """Compare the chains' functions, and begin the next round unless all agree."""
    counters, state = run.counters, run.state
    counters.r_hat, counters.ess = agreement(run)
    per_step = (counters.seconds - counters.train_seconds) / (counters.done - counters.trained)
    length = min(2 * counters.length, run.left(per_step))
    agree = (counters.r_hat or 1.0) <= _R_HAT and counters.ess >= _ESS
    if agree or length < max(counters.length, run.shortest):
        counters.finished = True
        return
    state.scale = whitening(torch.cat(run.draws["z"]), state.scale)
    state.motion = run.sampler.motion(state.z)
    counters.begun, counters.length, counters.averaged = counters.done, length, 0
    counters.mean_log_epsilon = 0.0
    run.forget()


def whitening(z: Tensor, scale: Tensor) -> Tensor:
    """Return standard deviations of positions ``[n, d]``, shrunk for few; ``scale`` of one."""
    if (n := len(z)) < 2:
        return scale
    variance = z.var(0)
    usual = variance.mean() + 1e-4  # all chains may be at one point
    return ((n * variance + 5 * usual) / (n + 5)).sqrt()


def agreement(run: TunedRun) -> tuple[float | None, float]:
    """Return R-hat and ESS of function values, which 95 % of them are as good as."""
    draws = {name: v.flatten(0, 1) for name, v in run.potential.by_chain(run.draws["z"]).items()}
    chains = len(run.state.factor)
    worst: list[tuple[float, float]] = []
    arguments = (drawn_arguments(run.potential.model, draws, x) for x in run.inputs)
    for values in (values for by_name in arguments for values in by_name.values()):
        values = values.flatten(1).unflatten(0, (chains, -1))
        effective = ess(values)
        moving = effective.isfinite()  # what is constant agrees
        if moving.any():
            r = r_hat(values)[moving].quantile(_FRACTION) if chains > 1 else math.nan
            worst.append((float(r), float(effective[moving].quantile(1 - _FRACTION))))
    if not worst:
        return None, math.inf
    r = max(pair[0] for pair in worst)
    return (r if chains > 1 else None), min(pair[1] for pair in worst)


# --- where functions are compared ---


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
    """Return training inputs, evenly spaced, and probes."""
    if isinstance(x, SeveralInputs):  # maybe with weights, which are not inputs
        args, kwargs = x.args, x.kwargs
        x = args[0] if len(args) == 1 and not kwargs else SeveralInputs(args, kwargs)
    inputs = [x.index_select(0, spread_rows(len(x), _PROBED).to(x.device))]
    if probes is not None:
        inputs.append(to_precision(require_inputs(as_inputs(probes)), model).to(x.device))
    elif isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point():
        inputs.append(probe_inputs(x))
    return inputs
