# SPDX-License-Identifier: Apache-2.0
"""One chain of the No-U-Turn sampler, Pyro's, on a function that gives energy and gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import torch
from pyro.infer import NUTS
from torch import Tensor

from pyro_bbb._recorder import Function
from pyro_bbb._utils.context import seeded
from pyro_bbb.mcmc._potential import Potential


@dataclass(frozen=True)
class Settings:
    """Settings of all chains."""

    num_samples: int
    warmup_steps: int
    target_accept_prob: float
    max_tree_depth: int
    full_mass: bool
    compile: bool


@dataclass(frozen=True)
class ChainRecord:
    """One chain; its numbers by draw."""

    z: Tensor  # [draws, d]
    log_density: Tensor
    diverging: Tensor
    acceptance: Tensor
    num_gradients: Tensor
    step_size: float


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
    settings: Settings,
    start: Tensor,
    seed: int,
    advance: Callable[[], Any],
) -> ChainRecord:
    count = 0

    def energy(params: dict[str, Tensor]) -> Tensor:
        nonlocal count
        count += 1
        value: Tensor = _Energy.apply(params["z"], gradient)
        return value

    kernel = NUTS(
        potential_fn=energy,
        target_accept_prob=settings.target_accept_prob,
        max_tree_depth=settings.max_tree_depth,
        full_mass=settings.full_mass,
    )
    rows, mean = [], 0.0
    with seeded(seed), pyro.validation_enabled(False):
        kernel.initial_params = state = {"z": start.clone()}
        kernel.setup(settings.warmup_steps)
        for _ in range(settings.warmup_steps):
            state = kernel.sample(state)
            advance()
        for n in range(1, settings.num_samples + 1):
            before = count
            state = kernel.sample(state)
            previous, mean = mean, kernel._mean_accept_prob
            _, reached, _ = kernel._fetch_from_cache()
            rows.append((state["z"], -reached, n * mean - (n - 1) * previous, count - before))
            advance()
    z, log_density, acceptance, counts = zip(*rows, strict=True)
    diverging = torch.zeros(len(rows), dtype=torch.bool)
    diverging[kernel.diagnostics()["divergences"]] = True
    stacked = torch.stack(z).detach(), torch.stack(log_density).detach()
    return ChainRecord(
        *stacked, diverging, torch.tensor(acceptance), torch.tensor(counts), float(kernel.step_size)
    )


def fastest(potential: Potential, settings: Settings, z: Tensor) -> Function:
    """The fastest form of the potential's gradient that gives its values."""
    recorded = potential.recorded(z)
    return torch.compile(recorded) if settings.compile else recorded
