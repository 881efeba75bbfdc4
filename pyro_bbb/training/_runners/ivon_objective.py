# SPDX-License-Identifier: Apache-2.0
r"""The objective of IVON: a draw of all latents, and the gradient of the likelihood there.

The network runs on plain tensors: there is no graph of the KL, nor one back to $\rho$. A fixed
Normal prior enters the step in closed form. For every other prior $-\pi\ln p(\theta)$ joins the
negative log-likelihood, so that its gradient is in $\hat g$ and its curvature, by Price's estimate,
in $\hat h$; parameters of the prior get their gradient with it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.infer import ELBO
from torch import Tensor

from pyro_bbb._handlers.pruned_sites import UnprunedEntries
from pyro_bbb._ops.buffers import Memory
from pyro_bbb._ops.reductions import HALF_LOG_2PI
from pyro_bbb._ops.step_context import StepOptions, step_context
from pyro_bbb.guides.latents import Latent
from pyro_bbb.training._runners.ivon import FlatPosterior
from pyro_bbb.training.objectives import LossParts, NonFiniteError, loss_parts


class NaturalGradientELBO(ELBO):
    """Loss of `SVI`, with the interface of the recorded objectives.

    Args:
        posterior: of the guide.
        latents: of the guide, by site name.
        open_priors: names of those whose prior is no fixed Normal.
        num_particles: draws per step.
        unpruned: what pruning has left of the weights.
        sync_free: whether the numbers of a step stay on the device, for `take`.
    """

    closed_form = False

    def __init__(
        self,
        posterior: FlatPosterior,
        latents: Mapping[str, Latent],
        open_priors: frozenset[str],
        num_particles: int,
        unpruned: UnprunedEntries | None = None,
        *,
        sync_free: bool = False,
    ) -> None:
        super().__init__(num_particles=num_particles, max_plate_nesting=1)
        self.posterior, self.latents, self.open_priors = posterior, dict(latents), open_priors
        self.unpruned, self.sync_free = unpruned, sync_free
        self.particles: list[Any] = []

    def without_sync(self) -> NaturalGradientELBO:
        """The same, with its numbers left on the device."""
        arguments = self.posterior, self.latents, self.open_priors, self.num_particles
        return NaturalGradientELBO(*arguments, self.unpruned, sync_free=True)

    @functools.cached_property
    def memory(self) -> Memory:
        """For what a step leaves behind."""
        return Memory()

    def loss_and_grads(
        self, model: Any, guide: Any, x: Any, y: Tensor, kl_weight: float | Tensor
    ) -> float:
        """Add the gradients of a part of a minibatch to the parameters', and record its loss."""
        with step_context(StepOptions(True, False, self.unpruned, self.memory)):
            for _ in range(self.num_particles):
                self._particle(model, x, y, kl_weight)
        self.posterior.count(len(y), kl_weight)
        return 0.0

    loss = loss_and_grads

    def _particle(self, model: Any, x: Any, y: Tensor, kl_weight: float | Tensor) -> None:
        num_data = len(y) / kl_weight
        draws = self.posterior.draw(num_data)
        with torch.enable_grad():
            values = {n: _constrained(self.latents[n], draw) for n, draw in draws.items()}
            terms = self._get_trace(model, values, (x, y, kl_weight), {})
            volume = self._log_volume(draws, values)
            nll = -sum(site["log_prob_sum"] for n, site in terms.items() if n not in draws)
            energy = nll - sum(terms[n]["log_prob_sum"] for n in self.open_priors)
            if isinstance(volume, Tensor):
                energy = energy - kl_weight * volume
        log_prior = sum(terms[n]["unscaled_log_prob"].sum().detach() for n in self.open_priors)
        self._record(kl_weight, nll.detach(), log_prior + self._log_normal(), volume)
        (energy / self.num_particles).backward()
        self.posterior.add(num_data)

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        """The sites of the data and of the open priors, scored at given values of the latents."""
        trace = poutine.trace(poutine.condition(model, data=guide)).get_trace(*args, **kwargs)
        closed = guide.keys() - self.open_priors
        trace.compute_log_prob(lambda name, _: name not in closed)
        nodes = trace.nodes.items()
        return {n: x for n, x in nodes if x["type"] == "sample" and n not in closed}

    def _log_volume(self, draws: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Any:
        r"""$\ln|\det J|$ of the bijections of latents that are not real-valued."""
        transforms = {n: x.transform for n, x in self.latents.items() if x.transform is not None}
        return sum(
            transform.log_abs_det_jacobian(draws[n], values[n]).sum()
            for n, transform in transforms.items()
        )

    @torch.no_grad()
    def _log_normal(self) -> Tensor:
        """The log-density of the draw under the fixed Normal priors."""
        posterior = self.posterior
        if len(self.open_priors) == len(self.latents):
            return posterior.value.new_zeros(())
        loc, precision = posterior.priors.loc, posterior.priors.precision
        distance = posterior.value if loc is None else posterior.value - loc
        if precision.dim() == 0:
            each = 0.5 * precision.log() - HALF_LOG_2PI
            return len(distance) * each - 0.5 * precision * distance.dot(distance)
        some = precision > 0
        each = (0.5 * precision.log() - HALF_LOG_2PI).masked_fill(~some, 0)
        return each.sum() - 0.5 * precision.dot(distance.square())

    @torch.no_grad()
    def _log_guide(self, volume: Any) -> Tensor:
        """The log-density of the draw under the guide."""
        drawn, unpruned = self.posterior, self.posterior.unpruned
        count = len(drawn.value) if unpruned is None else unpruned.sum()
        return -0.5 * drawn.square - drawn.log_scale - count * HALF_LOG_2PI - volume

    @torch.no_grad()
    def _record(
        self, kl_weight: float | Tensor, nll: Tensor, log_prior: Tensor, volume: Any
    ) -> None:
        log_guide = self._log_guide(volume)
        kl = log_guide - log_prior
        row = [x.double() for x in (kl_weight * kl + nll, kl, log_guide, nll)]
        if self.sync_free:
            self.particles.append(row)
            return
        loss, kl_value, log_q, log_loss = torch.stack(row).tolist()
        if not math.isfinite(loss):
            names = ["obs"] if not math.isfinite(log_loss) else sorted(self.open_priors)
            raise NonFiniteError("loss", names)
        self.particles.append(loss_parts(loss, kl_value, log_q, log_loss, float(kl_weight)))

    def take_parts(self) -> LossParts:
        """The mean parts of the particles since the last call."""
        particles, self.particles = self.particles, []
        columns = zip(*(vars(particle).values() for particle in particles), strict=True)
        return LossParts(*(math.fsum(column) / len(particles) for column in columns))

    def take(self) -> list[Tensor]:
        """The means of loss, ``kl``, ``log_guide`` and ``nll``, on the device."""
        particles, self.particles = self.particles, []
        columns = zip(*particles, strict=True)
        return [sum(rest, first) / self.num_particles for first, *rest in columns]


def _constrained(latent: Latent, draw: Tensor) -> Tensor:
    return draw if latent.transform is None else latent.constrain(draw)
