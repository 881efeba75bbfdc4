# SPDX-License-Identifier: Apache-2.0
"""Comparison of draws of a guide's weights with its tangent, on training data."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_bbb._handlers.substitute import substituted
from pyro_bbb._handlers.vmap import over_draws
from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.inputs import Rows, run_network
from pyro_bbb.guides.tangent import normal_of, output_moments

_EXAMPLES, _DRAWS, _NATS = 64, 32, 0.1


class LinearizationWarning(UserWarning):
    """Warning of `Laplace`: draws of the weights describe the training data worse than the tangent.

    Args:
        draws: mean negative log-likelihood of training examples by draws of the weights, nats.
        linearized: the same by the tangent.
    """

    def __init__(self, draws: float, linearized: float) -> None:
        self.draws, self.linearized = draws, linearized
        super().__init__(
            f"draws of the weights give training examples {draws:.3g} nats each (negative "
            f"log-likelihood), the linearised network {linearized:.3g}: use "
            "predict(..., linearized=True)"
        )


def warn_of_draws(model: Any, guide: Any, x: Rows, y: Tensor) -> None:
    """Warn where draws of the weights lose more than 0.1 nats an example against the tangent."""
    x, y = x[:_EXAMPLES], y[:_EXAMPLES]
    devices = [guide.loc.device] if guide.loc.is_cuda else []
    with torch.random.fork_rng(devices), pyro.validation_enabled(False), evaluating(model):
        torch.manual_seed(0)
        with torch.no_grad():
            draws = _neg_log_likelihood(model, guide, _by_draws(model, guide, x), y)
            linearized = _neg_log_likelihood(model, guide, _by_tangent(model, guide, x), y)
    if not draws <= linearized + _NATS:
        warnings.warn(LinearizationWarning(draws, linearized), stacklevel=4)


def _by_draws(model: Any, guide: Any, x: Rows) -> Tensor:
    """Outputs ``[S, n, ...]`` for drawn weights."""

    def run(draw: dict[str, Tensor]) -> dict[str, Tensor]:
        with substituted(model, draw):
            outputs = run_network(model.network, x)
        return {"outputs": getattr(outputs, "logits", outputs)}

    return over_draws(run, guide.sample_posterior(_DRAWS))["outputs"]


def _by_tangent(model: Any, guide: Any, x: Rows) -> Tensor:
    """Outputs ``[S, n, ...]`` drawn from those of the tangent."""
    return output_moments(model, guide, x).draw(_DRAWS)


def _neg_log_likelihood(model: Any, guide: Any, outputs: Tensor, y: Tensor) -> float:
    """Of the mixture over samples, per example."""
    centre = guide.latents.constrain(normal_of(guide).loc)
    with substituted(model, centre):
        observed = model.likelihood(outputs.flatten(0, 1))
    y = model.likelihood.prepare(y, outputs).reshape(len(y), *observed.event_shape)
    repeated = y.repeat(len(outputs), *[1] * (y.dim() - 1))
    observed, repeated = model.likelihood.without_ignored(observed, repeated)
    log_prob = observed.log_prob(repeated)
    by_sample = log_prob.unflatten(0, outputs.shape[:2])
    return -(by_sample.logsumexp(0) - math.log(len(outputs))).mean().item()
