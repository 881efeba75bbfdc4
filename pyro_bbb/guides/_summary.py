# SPDX-License-Identifier: Apache-2.0
"""A diagonal Gaussian posterior as a table: its moments by latent, beside those of the prior."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.tables import as_markdown

if TYPE_CHECKING:
    from pyro_bbb.guides._mean_field import AutoSoftplusNormal

HEAD = ["latent", "shape", "loc, root mean square", "scale, median", "prior sd", "KL per value"]


@torch.no_grad()
def moments_as_markdown(guide: AutoSoftplusNormal, posteriors: dict[str, Any]) -> str:
    """A row for each latent, in unconstrained space; KLs are in nats.

    The prior is known where a `BayesianModel` declares the latent. A KL without closed form is that
    of one draw. Removed weights are left out, and with them the KL.
    """
    left = guide.unpruned
    with seeded(0):
        draw = {name: value[0] for name, value in guide.sample_posterior(1).items()}
        priors = {} if left else _priors(guide.model, draw)
    rows = []
    for name, q in posteriors.items():
        kl = _kl_per_value(q, priors[name], draw[name]) if name in priors else ["", ""]
        loc, scale = guide.loc(name), guide.scale(name)
        rows.append([f"`{name}`", *_moments(loc, scale, left.get(name)), *kl])
    return as_markdown(HEAD, rows, labels=2)


def _priors(model: Any, draw: dict[str, Tensor]) -> dict[str, Any]:
    """Priors of the declared latents by name, given the others at a draw."""
    if not hasattr(model, "draw_latents"):
        return {}
    with own_store(model), poutine.block():
        trace = poutine.trace(poutine.condition(model.draw_latents, data=draw)).get_trace()
    return {name: trace.nodes[name]["fn"] for name in draw if name in trace}


def _moments(loc: Tensor, scale: Tensor, left: Tensor | None) -> list[str]:
    shape = " × ".join(map(str, loc.shape)) or "1"
    if left is not None:
        loc, scale, shape = loc[left], scale[left], f"{left.sum():,} of {shape}"
    if not loc.numel():
        return [shape, "", ""]
    return [shape, f"{loc.square().mean().sqrt():.3g}", f"{scale.median():.3g}"]


def _kl_per_value(q: Any, prior: Any, value: Tensor) -> list[str]:
    """The prior's standard deviation, and the KL per value."""
    return [_sd(prior), f"{_kl(q, prior, value) / value.numel():.3g}"]


def _sd(prior: Any) -> str:
    """The prior's standard deviation, the median over its values, where it has one."""
    try:
        return f"{prior.stddev.median():.3g}"
    except NotImplementedError:
        return ""


def _kl(q: Any, p: Any, value: Tensor) -> float:
    """The KL in nats, in closed form where torch knows one."""
    try:
        return float(kl_divergence(q, p).sum())
    except NotImplementedError:
        return float((q.log_prob(value) - p.log_prob(value)).sum())
