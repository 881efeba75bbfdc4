# SPDX-License-Identifier: Apache-2.0
"""Draws from the exact posterior by the No-U-Turn sampler.

Hoffman and Gelman (2014), "The No-U-Turn Sampler", with the multinomial choice of Betancourt
(2017), as Pyro has it; ours is the fast potential energy underneath, and the chains around.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pyro
import torch
from joblib import Parallel, delayed
from pyro.infer import NUTS
from torch import Tensor

from pyro_bbb._param_store import own_store
from pyro_bbb._recorder import Function, record
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.progress import progress_bar
from pyro_bbb._utils.validation import as_seed, count, kind, probability
from pyro_bbb.mcmc._chains import Chains
from pyro_bbb.mcmc._potential import Potential
from pyro_bbb.mcmc._run import all_data, initial_positions
from pyro_bbb.models import BayesianModel


@locked
def run_nuts(
    model: BayesianModel,
    data: Any,
    *,
    num_samples: int = 1000,
    warmup_steps: int = 1000,
    num_chains: int = 1,
    num_workers: int = 1,
    init: Any = None,
    target_accept_prob: float = 0.8,
    max_tree_depth: int = 10,
    full_mass: bool = False,
    seed: int | None = None,
    progress: bool = True,
    sample_weight: Any = None,
) -> Chains:
    """Draw from the posterior of all latents by NUTS.

    The target is the model's joint density with a ``kl_weight`` of 1 and all data at once.
    Networks are in evaluation mode; parameters that are not random stay as they are. Every chain
    runs on one thread, and is a function of the seed and its number alone: not of the number of
    chains or workers.

    Args:
        model: the model; any prior and likelihood with continuous latents.
        data: a pair ``(x, y)`` of tensors or a map-style dataset of pairs, all ``num_data`` of
            them.
        num_samples: draws per chain after warm-up.
        warmup_steps: draws per chain, thrown away, in which step size and mass matrix adapt.
        num_chains: number of independent chains.
        num_workers: processes among which joblib divides the chains.
        init: where the chains start, each at another draw. ``None`` or ``"he"``: kernels from
            the He initialisation, other latents at their prior's centre, and converted networks
            at their weights. ``"prior"``: a draw from the prior. A trained guide: a draw from it,
            which saves warm-up. A number, a dict of tensors, a network or a function of a site, as
            in `AutoSoftplusNormal`.
        target_accept_prob: mean acceptance that the step size adapts to.
        max_tree_depth: a draw takes at most 2 to this power leapfrog steps.
        full_mass: whether the mass matrix has correlations; for at most some hundred latents.
        seed: makes the result a function of this number, and leaves torch's random state alone.
        progress: whether to show a progress bar.
        sample_weight: weights ``[n]`` of the examples in the likelihood, as for `fit`.

    Returns:
        The draws, which `predict` takes as they are, and their diagnostics.

    Raises:
        ValueError: data that do not fit the model or its ``num_data``, a number out of range, a
            discrete latent, or a start that is outside the support.
        TypeError: an argument of the wrong kind.
    """
    kind("model", model, BayesianModel)
    probability("target_accept_prob", target_accept_prob)
    counts = {"num_samples": num_samples, "warmup_steps": warmup_steps, "num_chains": num_chains}
    counts |= {"num_workers": num_workers, "max_tree_depth": max_tree_depth}
    for name, value in counts.items():
        count(name, value)
    kernel = {
        "target_accept_prob": target_accept_prob,
        "max_tree_depth": max_tree_depth,
        "full_mass": full_mass,
    }
    begun = time.perf_counter()
    x, y = all_data(model, data, sample_weight=sample_weight)
    seeds = _chain_seeds(seed, num_chains)
    bar = progress_bar(num_chains * (warmup_steps + num_samples), unit="draw", shown=progress)
    with bar, _one_thread(), own_store(model):
        potential = Potential(model, x, y)
        starts = initial_positions(potential, init, seeds)
        numbers = num_samples, warmup_steps, kernel
        jobs: Any = [(*start, *numbers) for start in zip(starts, seeds, strict=True)]
        if (workers := min(num_workers, num_chains)) == 1:
            gradient = record(potential.value_and_gradient, starts[0])
            records = [run_chain(gradient, *job, advance=bar.update) for job in jobs]
        else:
            run = partial(_run_in_worker, torch.get_default_dtype(), potential, starts[0])
            records = []
            for chain in Parallel(workers, return_as="generator")(map(delayed(run), jobs)):
                records.append(chain)
                bar.update(warmup_steps + num_samples)
        stacked: Any = {
            name: torch.stack([chain[name] for chain in records]) for name in records[0]
        }
        by_chain = potential.by_chain(stacked.pop("z").unbind(1))
        return Chains(by_chain=by_chain, seconds=time.perf_counter() - begun, **stacked)


# --- one chain ---


class _Energy(torch.autograd.Function):
    """An energy whose gradient comes with it."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, run: Function) -> Tensor:
        energy, ctx.gradient = run(z)
        return energy

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.gradient, None


def run_chain(
    gradient: Function,
    start: Tensor,
    seed: int,
    num_samples: int,
    warmup_steps: int,
    options: dict[str, Any],
    *,
    advance: Callable[[], Any] = lambda: None,
) -> dict[str, Tensor]:
    """Return the positions ``z`` ``[draws, d]`` and numbers of a chain, a function of its seed."""
    count = 0

    def energy(params: dict[str, Tensor]) -> Tensor:
        nonlocal count
        count += 1
        value: Tensor = _Energy.apply(params["z"], gradient)
        return value

    kernel = NUTS(potential_fn=energy, **options)
    rows, mean = [], 0.0
    with seeded(seed), pyro.validation_enabled(False):
        kernel.initial_params = state = {"z": start.clone()}
        kernel.setup(warmup_steps)
        for _ in range(warmup_steps):
            state = kernel.sample(state)
            advance()
        for n in range(1, num_samples + 1):
            before = count
            state = kernel.sample(state)
            previous, mean = mean, kernel._mean_accept_prob
            _, reached, _ = kernel._fetch_from_cache()
            rows.append((state["z"], -reached, n * mean - (n - 1) * previous, count - before))
            advance()
    z, log_density, acceptance, counts = zip(*rows, strict=True)
    diverging = torch.zeros(len(rows), dtype=torch.bool)
    diverging[kernel.diagnostics()["divergences"]] = True
    return {
        "z": torch.stack(z).detach(),
        "log_density": torch.stack(log_density).detach(),
        "diverging": diverging,
        "acceptance": torch.tensor(acceptance),
        "num_gradients": torch.tensor(counts),
        "step_size": torch.tensor(float(kernel.step_size)),
    }


# --- several chains ---


def _run_in_worker(
    dtype: torch.dtype, potential: Potential, z: Tensor, job: tuple[Any, ...]
) -> dict[str, Tensor]:
    """Run a chain in another process, where the gradient has to be recorded again."""
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    return run_chain(record(potential.value_and_gradient, z), *job)


def _chain_seeds(seed: int | None, num_chains: int) -> list[int]:
    """Return a seed for each chain, independent of the number of chains."""
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    seed = as_seed("seed", seed)
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    sequences = (np.random.SeedSequence(seed, spawn_key=(chain,)) for chain in range(num_chains))
    return [int(sequence.generate_state(1, np.uint64)[0]) >> 1 for sequence in sequences]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread: small nets gain nothing from more, and sums keep their order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
