r"""Baseline of training: the best negative ELBO of some posteriors that ignore the data.

Their weights are Normals around the prior's means, with the prior's standard deviations times a
factor: of all weights, or of the last layer's alone, which makes the outputs nearly constant.
A trained guide should be better. One that is not has stopped far from the posterior.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import Normal
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints

from pyro_bbb._handlers.sites import drawn
from pyro_bbb._utils.context import evaluating, seeded
from pyro_bbb._utils.inputs import Rows
from pyro_bbb.models import BayesianModel
from pyro_bbb.training._batches import Batches
from pyro_bbb.training.history import History

FACTORS = tuple(4.0**-k for k in range(1, 7))
_DRAWS = 4


class UndertrainedWarning(UserWarning):
    """Training ended where a posterior that ignores the data has a better ELBO."""


class _ScaledPrior(Messenger):
    """Draws some latents from Normals of their priors' moments, the deviation times a factor."""

    def __init__(self, factors: Mapping[str, float]) -> None:
        super().__init__()
        self.factors = factors  # by name
        self.kl = self.log_likelihood = 0.0  # estimates by this draw, in nats

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.factors:
            prior = msg["fn"]
            scale = self.factors[msg["name"]] * prior.stddev
            q = Normal(prior.mean, scale).to_event(prior.event_dim)
            msg["value"], msg["done"] = q.sample(), True
            self.kl += float((q.log_prob(msg["value"]) - prior.log_prob(msg["value"])).sum())

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["is_observed"]:
            self.log_likelihood += float(msg["fn"].log_prob(msg["value"]).sum())


@torch.no_grad()
def baseline_per_example(batches: Batches, kl_weight: float) -> float | None:
    """Return the best negative ELBO of posteriors that ignore the data, in nats per example.

    Args:
        batches: the data; a few hundred examples estimate the log-likelihood.
        kl_weight: factor of the KL.

    Returns:
        The least estimate; ``None`` where none is finite.
    """
    model, (x, y) = batches.model, batches.examples
    quiet = pyro.validation_enabled(False)  # outputs may be infinite
    with quiet, seeded(0), poutine.block(), evaluating(model):
        nats = batches.processes.largest(_least(model, x, y, kl_weight))
    return nats / model.num_data if nats < math.inf else None


def warn_if_undertrained(history: History) -> None:
    """Warn where the last epoch's objective is worse than the baseline."""
    baseline, reached = history.baseline_per_example, history.neg_elbo_per_example
    if baseline is not None and reached and reached[-1] > baseline:
        warnings.warn(
            f"training ended at a negative ELBO of {reached[-1]:.3g} nats per example; a posterior "
            f"that ignores the data reaches {baseline:.3g}. The guide is far from the posterior: "
            "train longer, or with a larger lr. See docs/guide/trained.md.",
            UndertrainedWarning,
            stacklevel=4,
        )


def _least(model: BayesianModel, x: Rows, y: Tensor, kl_weight: float) -> float:
    """Return the least negative ELBO; the best three by one draw are estimated by more draws."""

    def estimate(factors: Mapping[str, float]) -> float:
        nats = _neg_elbo(model, x, y, factors, kl_weight)
        return math.inf if math.isnan(nats) else nats

    best = sorted(_candidates(model, x, y), key=estimate)[:3]
    return min(fmean(estimate(each) for _ in range(_DRAWS)) for each in best)


def _candidates(model: BayesianModel, x: Rows, y: Tensor) -> Iterator[dict[str, float]]:
    """Yield factors of the weights' standard deviations, by name."""
    sites = drawn(poutine.trace(model).get_trace(x[:1], y[:1]))
    names = [name for name, site in sites.items() if _has_moments(site["fn"])]
    matrices = [i for i, name in enumerate(names) if sites[name]["value"].dim() > 1]
    last = names[matrices[-1] :] if matrices else []
    yield dict.fromkeys(names, 1.0)
    for factor in FACTORS:
        yield dict.fromkeys(names, factor)
        yield dict.fromkeys(names, 1.0) | dict.fromkeys(last, factor)


def _has_moments(prior: Any) -> bool:
    """Return whether a prior is of real numbers, and has a mean and a variance."""
    support = prior.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support is constraints.real and bool(
        torch.isfinite(prior.mean).all() and torch.isfinite(prior.stddev).all()
    )


def _neg_elbo(
    model: BayesianModel, x: Rows, y: Tensor, factors: Mapping[str, float], kl_weight: float
) -> float:
    """Estimate a negative ELBO of all data, in nats, by one draw of the weights."""
    with _ScaledPrior(factors) as draw:
        model(x, y)
    return kl_weight * draw.kl - model.num_data / len(x) * draw.log_likelihood
