# SPDX-License-Identifier: Apache-2.0
"""Posterior samples by stochastic-gradient Markov chain Monte Carlo: chains on minibatches.

They scale to any network and data set that `fit` trains, without a family of distributions in
between; the price is a bias by the step size and by the minibatches' noise, as no step is rejected.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.inputs import Rows, input_tensors, to_precision, weighted
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import (
    as_device,
    at_least_zero,
    below_one,
    count,
    kind,
    one_of,
    positive,
)
from pyro_bbb._utils.version import __version__
from pyro_bbb.data import as_tensors
from pyro_bbb.mcmc._chains import Chains
from pyro_bbb.mcmc._initial_positions import draw_positions
from pyro_bbb.mcmc._langevin import Cycles, Langevin
from pyro_bbb.mcmc._minibatch_gradient import MinibatchGradient, Shuffled
from pyro_bbb.mcmc._potential import Potential
from pyro_bbb.mcmc._sgmcmc_loop import SAVED_FORM, DivergedError, Run, SavedRun
from pyro_bbb.models import BayesianModel
from pyro_bbb.persistence.archive import Json
from pyro_bbb.persistence.definition import definition, in_words
from pyro_bbb.persistence.state_dict import digest

SAMPLERS = ("sgld", "sghmc")


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
    r"""Samples from the posterior of all latents by Langevin dynamics on minibatches.

    The target is proportional to $p(D, z)^{1/T}$, for all latents in unconstrained space. Without
    noise a chain is stochastic gradient descent of the mean loss, so a rate ``lr`` (and a momentum)
    that trains the network is a good first guess. Larger steps and smaller batches spread the
    samples more than the posterior does (equations in ``mcmc/_langevin.py``). Networks are in
    evaluation mode; parameters that are not random stay as they are.

    Several chains are one vectorised pass per step where the network's operations can be batched
    over weights. Of a small network and data set a hundred short chains with all data in each step
    take seconds.

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
        cycles: with 1 the learning rate is constant. With more it starts anew as often, and falls
            to 0 along half a cosine each time; the warm-up of each cycle then has no noise, and
            ends in another mode (Zhang et al. 2020).
        num_chains: number of chains, independent but for the minibatches, which they share.
        batch_size: examples per minibatch; all data where it is ``num_data`` or more.
        momentum: of ``"sghmc"``, in [0, 1), by default 0.9.
        preconditioner: ``"rmsprop"`` scales steps by the inverse root of the mean squared gradient
            of each latent (Li et al. 2016, "Preconditioned Stochastic Gradient Langevin
            Dynamics"), as found in the warm-up and kept for the samples. A good ``lr`` is then near
            Adam's.
        temperature: T; below 1 the posterior is colder, and at 0 the chains descend without noise.
        init: where the chains start, as for `run_nuts`: by default the He initialisation.
        checkpoint: a folder, from which a run that was interrupted goes on when called with the
            same arguments, on a CPU to the bit.
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
    schedule = _schedule(num_samples, warmup_steps, thin, cycles)
    langevin = _langevin(model, sampler, momentum, preconditioner)
    count("num_chains", num_chains), count("batch_size", batch_size)
    lr, temperature = positive("lr", lr), at_least_zero("temperature", temperature)
    saved = checkpoint_folder(checkpoint, checkpoint_every)
    x, y = all_data(model, data, device, sample_weight)
    with seeded(seed), own_store(model):
        batches = Shuffled(x, y, batch_size)
        potential = Potential(model, *batches.first())
        z = draw_positions(potential, init, num_chains)
        gradient = MinibatchGradient(potential, z, batches.first())
        run = Run(langevin, schedule, gradient, batches, z, lr, temperature)
        definition = _definition(model, run, init, seed, z)
        save = SavedRun(*saved, definition, "run_sgmcmc", SAVED_FORM) if saved else None
        if save:
            save.resume(run)
        try:
            run.finish(progress, save)
        except DivergedError as error:
            error.chains = _chains(potential, run) if run.samples.z else None
            raise
        return _chains(potential, run)


def _chains(potential: Potential, run: Run) -> Chains:
    with torch.no_grad():
        by_chain = potential.constrain(torch.stack(run.samples.z, dim=1))
    log_density = torch.stack(run.samples.log_density, dim=1)
    return Chains(
        by_chain={name: values.contiguous() for name, values in by_chain.items()},
        log_density=log_density,
        diverging=torch.zeros_like(log_density, dtype=torch.bool),
        acceptance=torch.ones_like(log_density),
        num_gradients=torch.full_like(log_density, run.cycles.thin, dtype=torch.long),
        step_size=torch.full((len(log_density),), run.lr),
        seconds=run.seconds,
    )


def _definition(
    model: BayesianModel, run: Run, init: Any, seed: int | None, z: Tensor
) -> dict[str, Json]:
    """The definition of a run by name."""
    return {
        **vars(run.langevin),
        **{f"cycles.{name}": value for name, value in vars(run.cycles).items()},
        "lr": run.lr,
        "temperature": run.temperature,
        **run_definition(model, run.batches, init, seed, z),
    }


def run_definition(
    model: BayesianModel, batches: Shuffled, init: Any, seed: int | None, z: Tensor
) -> dict[str, Json]:
    """Return what defines any run on minibatches: versions, model, data, seed and start."""
    constants = model.state_dict()  # parameters and buffers that are not sampled
    return {
        "version of pyro_bbb": __version__,
        "version of torch": str(torch.__version__),
        "batch_size": batches.batch_size,
        "seed": seed,
        **definition(model, "model"),
        **{f"model.{name}": in_words(value) for name, value in constants.items()},
        "init": in_words(init),
        "data": digest([*input_tensors(batches.x), batches.y])[:16],
        "initial positions": list(z.shape) if seed is None else digest([z])[:16],
    }


# --- what comes in ---


def _schedule(num_samples: int, warmup_steps: int, thin: int, cycles: int) -> Cycles:
    count("num_samples", num_samples), count("cycles", cycles), count("thin", thin)
    count("warmup_steps", warmup_steps, least=0)
    if num_samples % cycles:
        raise ValueError(f"num_samples must be a multiple of cycles={cycles}, got {num_samples}")
    return Cycles(cycles, warmup_steps, num_samples // cycles, thin)


def _langevin(
    model: BayesianModel, sampler: str, momentum: float | None, preconditioner: str | None
) -> Langevin:
    one_of("sampler", sampler, SAMPLERS)
    if preconditioner is not None:
        one_of("preconditioner", preconditioner, ["rmsprop"])
    if sampler == "sgld" and momentum is not None:
        raise ValueError(f"momentum needs sampler='sghmc', got momentum={momentum} with 'sgld'")
    c = 0.9 if momentum is None else below_one("momentum", momentum)
    return Langevin(sampler, c, preconditioner is not None, model.num_data)


def checkpoint_folder(checkpoint: Any, every: int) -> tuple[Path, int] | None:
    count("checkpoint_every", every)
    if checkpoint is None:
        return None
    if not isinstance(checkpoint, str | PathLike):
        raise TypeError(f"checkpoint must be a path, got {checkpoint!r}")
    return Path(checkpoint), every


def all_data(
    model: BayesianModel, data: Any, device: Any, sample_weight: Any
) -> tuple[Rows, Tensor]:
    """All of the data, checked, and the model on their device."""
    missing = model.likelihood.ignored is not None
    device = None if device is None else as_device(device)
    x, y = as_tensors(data, device=device, missing=missing)
    model.to(x.device)
    x = to_precision(weighted(x, sample_weight), model)
    if len(x) != model.num_data:
        raise ValueError(f"num_data of the model is {model.num_data}, but data has {len(x)}")
    model.check(x, y)
    return x, y
