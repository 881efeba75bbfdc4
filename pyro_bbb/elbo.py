# SPDX-License-Identifier: Apache-2.0
r"""The minibatch free energy, the objective of Bayes by Backprop, in nats.

Blundell et al. (2015), equations 8 and 9, for minibatch $D_i$ and one draw $w \sim q$:

$$F_i = \pi_i\,\mathrm{KL} - \ln p(D_i \mid w), \qquad \mathrm{KL} = \ln q(w) - \ln p(w)$$

It is what Pyro's `Trace_ELBO` gives where `poutine.scale` weighs model and guide by $\pi_i$, and
`TraceMeanField_ELBO` where the KL has a closed form. `terms` computes the parts from the sites of
model and guide; where these are a `BayesianModel` and an `AutoSoftplusNormal`, all weights are one
vector.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from pyro import poutine
from pyro.distributions import Delta, Normal
from pyro.distributions.util import scale_and_mask
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.util import check_fully_reparametrized
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.util import is_validation_enabled
from torch import Tensor
from torch.distributions import Distribution, kl_divergence

from pyro_bbb._utils.validation import count, one_of
from pyro_bbb.distributions import ScaleMixtureNormal, SummedNormal, without_validation
from pyro_bbb.distributions.summed_event import Event, innermost, unexpanded
from pyro_bbb.estimators import DetachScores, Draws
from pyro_bbb.guides import AutoSoftplusNormal, Ensemble, Guide
from pyro_bbb.latents import PlateOfDraws, declared_names, drawn, sample_names
from pyro_bbb.models import BayesianModel
from pyro_bbb.priors.declaration import SitePrior, prior_of

__all__ = [
    "LossParts",
    "MinibatchELBO",
    "NonFiniteError",
    "Terms",
    "free_energy",
    "minibatch_elbo",
    "terms",
    "terms_of_traces",
    "vector_prior",
]


class Terms(NamedTuple):
    """The terms of the minibatch free energy at a draw of the weights, in nats."""

    nll: Tensor
    """Negative log-likelihood, summed over the minibatch."""
    kl: Tensor
    """KL from the prior to the guide, unweighted: its closed form, or that of the draw."""
    log_q: Tensor
    """Log-density of the draw under the guide."""
    values: Mapping[str, Tensor]
    """The draw by site name; several draws are ``[S, 1, ...]``, as in a plate."""


def free_energy(terms: Terms, kl_weight: float | Tensor) -> Tensor:
    r"""Blundell et al. 2015, equation 8: $F_i = \pi_i\,\mathrm{KL} - \ln p(D_i \mid w)$."""
    return kl_weight * terms.kl + terms.nll


def terms(
    model: BayesianModel,
    guide: Any,
    x: Any,
    y: Tensor,
    *,
    prior: Event | None = None,
    num_draws: int | None = None,
    closed_form: bool = False,
) -> Terms:
    """Return the terms at a draw of all weights as one vector: `terms_of_traces`, to rounding.

    Args:
        model: the model.
        guide: an `AutoSoftplusNormal`, or an ensemble of these, with `is_one_vector`.
        x: inputs of the minibatch.
        y: targets of the minibatch.
        prior: the prior of the vector, `vector_prior`; ``None`` scores each site.
        num_draws: S, for the sums over S draws; needs ``prior``.
        closed_form: whether the KL is the closed form, for a Normal ``prior``.
    """
    draw = guide.draw(num_draws)  # w = mu + softplus(rho) eps, ln q(w)
    latents = guide.latents
    for estimator in _active(Draws):
        locs, scales = latents.unravel(draw.loc), latents.unravel(draw.scale)
        real = {name for name, latent in latents.items() if latent.transform is None}
        estimator.add(draw.values, {name: (locs[name], scales[name]) for name in real})
    log_likelihood = model.log_likelihood(draw.values, x, y, num_draws)
    log_prior = model.log_prior(draw.values) if prior is None else prior.log_prob(draw.vector)
    kl, log_q = draw.log_q - log_prior, draw.log_q
    if _active(DetachScores):  # sticking the landing: ln q at fixed parameters
        q = SummedNormal(draw.loc.detach(), draw.scale.detach(), validate_args=False).to_event(1)
        kl = q.log_prob(draw.vector) - log_prior
    elif closed_form and prior is not None and isinstance(innermost(prior), SummedNormal):
        q = SummedNormal(draw.loc, draw.scale, validate_args=False).to_event(1)
        kl = kl_divergence(q, prior).expand_as(log_q)
    if num_draws is None:
        return Terms(-log_likelihood, kl, log_q, draw.values)
    values = {name: value.unsqueeze(1) for name, value in draw.values.items()}
    return Terms(-log_likelihood, kl.sum(), log_q.sum(), values)


def vector_prior(model: BayesianModel) -> Event | None:
    """Return the prior of all declared latents as one vector ``[n]``.

    ``None`` where it depends on anything, or is neither one scale mixture nor Normals.
    """
    modules: Any = [m for m in model.modules() if isinstance(m, PyroModule)]
    for module in modules:
        for name in sample_names(module):
            prior = module._pyro_samples.get(name)
            by_prior = isinstance(prior, SitePrior) and prior_of(module, name).is_fixed
            if not (by_prior or isinstance(prior, Distribution)):
                return None
    priors = [site["fn"] for site in model.latent_sites().values()]
    if not priors or any(prior.batch_shape for prior in priors):
        return None
    bases: list[Any] = [innermost(prior) for prior in priors]
    joint: Any = bases[0]
    if all(type(base) is ScaleMixtureNormal for base in bases):
        if joint.numbers is None or any(base.numbers != joint.numbers for base in bases):
            return None
    elif all(type(base) in (SummedNormal, Normal) for base in bases):
        columns = [[base.loc for base in bases], [base.scale for base in bases]]
        if any(x.requires_grad for column in columns for x in column):
            return None
        loc, scale = map(_joined, columns)
        joint = SummedNormal(loc, scale, validate_args=False)
    else:
        return None
    n = sum(prior.event_shape.numel() for prior in priors)
    return cast(Event, without_validation(joint.expand([n]).to_event(1)))


def _joined(tensors: list[Tensor]) -> Tensor:
    """Return the entries of all tensors as one vector, or as one number if all are equal."""
    numbers = [unexpanded(x).reshape(-1) for x in tensors]
    if all(len(x) == 1 for x in numbers) and len({x.item() for x in numbers}) == 1:
        return numbers[0].reshape(())
    return torch.cat([x.reshape(-1) for x in tensors])


def terms_of_traces(model_trace: Any, guide_trace: Any, closed_form: bool = False) -> Terms:
    """Return the terms from the sites of any model and guide, in Pyro's traces."""
    prior, data, q = drawn(model_trace), _observed(model_trace), drawn(guide_trace)
    nll: Any = -sum(site["log_prob_sum"] for site in data.values())
    log_q: Any = sum(site["log_prob_sum"] for site in q.values())
    if closed_form:
        kl = sum(_closed_form(q[name], model_trace, name) for name in prior)
        # auxiliary sites, such as those of Pyro's AutoNormal
        kl = kl + sum(site["log_prob_sum"] for name, site in q.items() if name not in prior)
    else:
        kl = log_q - sum(site["log_prob_sum"] for site in prior.values())
    values = {name: site["value"] for name, site in q.items()}
    nll, kl, log_q = (torch.as_tensor(x) for x in (nll, kl, log_q))
    return Terms(nll, kl, log_q, values)


def _closed_form(q: Any, model_trace: Any, name: str) -> Tensor:
    """Return the KL of a site: its closed form, or else that of the draw."""
    if is_validation_enabled():
        check_fully_reparametrized(q)
    site = model_trace.nodes[name]
    try:
        kl: Tensor = kl_divergence(q["fn"], site["fn"])
        if isinstance(q["fn"], Delta):  # Pyro's KL leaves out its log-density
            kl = kl + q["unscaled_log_prob"]
    except NotImplementedError:
        model_trace.compute_log_prob(lambda other, _: other == name)
        kl = q["unscaled_log_prob"] - site["unscaled_log_prob"]
    kl = scale_and_mask(kl, q["scale"], q["mask"])
    return kl.sum()


def _observed(trace: Any) -> dict[str, Any]:
    return {n: x for n, x in trace.nodes.items() if x["type"] == "sample" and x["is_observed"]}


def _alike(key: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether two keys hold the same objects or equal values."""
    pairs = zip(key, other, strict=False)
    return len(key) == len(other) and all(a is b or a == b for a, b in pairs)


def _active(kind: type) -> list[Any]:
    """Return the estimators of a kind around the call."""
    return [handler for handler in _PYRO_STACK if isinstance(handler, kind)]


# --- the loss of SVI ---


class NonFiniteError(ArithmeticError):
    """Training met a loss or a gradient that is infinite or not a number.

    The parameters are still those before the step.

    Args:
        what: "loss" or "gradient".
        names: sample sites or parameters where it appeared.
        step: number of the step, from 1, once known.
    """

    def __init__(self, what: str, names: list[str], step: int | None = None) -> None:
        self.what: str = what
        self.names: list[str] = names
        self.step: int | None = step
        self.history: Any = None  # of the steps before, where `fit` raised it
        at = "" if step is None else f" at step {step}"
        where = ", ".join(dict.fromkeys(names)) or "the objective"
        super().__init__(
            f"{what} is not finite{at} in {where}; the parameters are those before the step. "
            "Try a lower learning rate or standardised data."
        )


@dataclass(frozen=True)
class LossParts:
    """One minibatch's negative ELBO and its parts, in nats; means over the particles.

    Args:
        loss: ``kl_weight * kl + nll``.
        kl: unweighted KL from the prior to the guide, ``log_guide - log_prior``.
        log_prior: log-density of the latent draws under the prior; where the objective has the KL
            in closed form, ``log_guide - kl``, with the same mean.
        log_guide: their log-density under the guide.
        nll: negative log-likelihood, summed over the minibatch.
        kl_weight: the factor of the KL.
    """

    loss: float
    kl: float
    log_prior: float
    log_guide: float
    nll: float
    kl_weight: float


def loss_parts(loss: float, kl: float, log_guide: float, nll: float, kl_weight: float) -> LossParts:
    """Return the parts of a loss; the log-prior is the difference of two others."""
    return LossParts(loss, kl, log_guide - kl, log_guide, nll, kl_weight)


class MinibatchELBO(Trace_ELBO):
    """The loss of `SVI`: the `free_energy` of `terms`. `take` returns the numbers of its calls.

    A guide whose draws cannot be reparametrised has the surrogate loss of `Trace_ELBO`.

    Args:
        num_particles: draws of a step, over which the terms are averaged.
        vectorize: whether model and guide are run once for all draws.
        closed_form: whether the KL is in closed form, as by `TraceMeanField_ELBO`.

    Attributes:
        reads: whether to read each loss, and raise a NonFiniteError if it is not finite; else all
            numbers stay on the device.
        particles: for each draw its loss, ``kl``, ``log_q`` and ``nll``, until they are taken.
    """

    def __init__(
        self, num_particles: int = 1, *, vectorize: bool = False, closed_form: bool = False
    ) -> None:
        super().__init__(
            num_particles=num_particles,
            vectorize_particles=vectorize and num_particles > 1,
            max_plate_nesting=1,  # the model's plate of the data
        )
        self.closed_form: bool = closed_form
        self.reads: bool = True
        self.particles: list[Tensor] = []
        self._kl_weight: float | Tensor = 1.0
        self._reparametrized: bool | None = None
        self._cached: tuple[Any, tuple[bool, Event | None]] | None = None

    def without_reads(self) -> MinibatchELBO:
        """Copy, for steps whose numbers stay on the device."""
        new = copy.copy(self)
        new.reads, new.particles = False, []
        return new

    def loss_and_grads(
        self, model: Any, guide: Any, x: Any, y: Any = None, kl_weight: float | Tensor = 1.0
    ) -> float:
        """Add the gradient of the mean over draws to the parameters', and return the loss."""
        self._kl_weight, total = kl_weight, 0.0
        if not self._is_reparametrized(guide, x, y):
            return float(super().loss_and_grads(model, guide, x, y, kl_weight))
        for draw in self._draws(model, guide, x, y):
            loss = free_energy(draw, kl_weight) / self.num_particles
            total += self._record(loss, draw, model)
            if loss.requires_grad:
                loss.backward()
        return total

    def differentiable_loss(
        self, model: Any, guide: Any, x: Any, y: Any = None, kl_weight: float | Tensor = 1.0
    ) -> Tensor:
        """Return the mean over draws, with its graph."""
        self._kl_weight, total = kl_weight, torch.zeros(())
        if not self._is_reparametrized(guide, x, y):
            surrogate: Tensor = super().differentiable_loss(model, guide, x, y, kl_weight)
            return surrogate
        for draw in self._draws(model, guide, x, y):
            loss = free_energy(draw, kl_weight) / self.num_particles
            self._record(loss, draw, model)
            total = total.to(loss) + loss
        return total

    def loss(self, *args: Any, **kwargs: Any) -> float:
        """Return the mean over draws."""
        with torch.no_grad():
            return self.loss_and_grads(*args, **kwargs)

    def take(self) -> Tensor:
        """Return the mean loss, ``kl``, ``log_q`` and ``nll`` since the last call, ``[4]``."""
        rows, self.particles = self.particles, []
        return torch.stack(rows).sum(0) if len(rows) > 1 else rows[0]

    def take_parts(self) -> LossParts:
        """Return the mean parts since the last call."""
        loss, kl, log_q, nll = self.take().tolist()
        return loss_parts(loss, kl, log_q, nll, float(self._kl_weight))

    def _draws(self, model: Any, guide: Any, x: Any, y: Any) -> Iterator[Terms]:
        """Yield the terms of each draw; of draws made at once, their sums."""
        one_vector, prior = self._one_vector(model, guide)
        if not one_vector:
            for model_trace, guide_trace in self._get_traces(model, guide, (x, y, 1.0), {}):
                yield terms_of_traces(model_trace, guide_trace, self.closed_form)
            return
        together = self.num_particles if self.vectorize_particles else None
        for _ in range(1 if together else self.num_particles):
            yield terms(
                model, guide, x, y, prior=prior, num_draws=together, closed_form=self.closed_form
            )

    def _one_vector(self, model: Any, guide: Any) -> tuple[bool, Event | None]:
        """Return whether all weights are drawn and scored as one vector, and the vector's prior."""
        if type(guide) not in (AutoSoftplusNormal, Ensemble) or is_validation_enabled():
            return False, None
        changes = [  # another handler may change a site, which has to be traced then
            handler
            for handler in _PYRO_STACK
            if not isinstance(handler, Draws | DetachScores)
            and not (isinstance(handler, TraceMessenger) and handler.param_only)
        ]
        if not isinstance(model, BayesianModel) or changes:
            return False, None
        like, detached = next(guide.parameters()), bool(_active(DetachScores))
        modules = (module for module in model.modules() if isinstance(module, PyroModule))
        priors = [prior for module in modules for prior in module._pyro_samples.values()]
        form = guide.is_one_vector, like.dtype, like.device, detached, len(priors)
        key = (model, guide, *priors, *form)
        if self._cached is None or not _alike(key, self._cached[0]):
            flat = guide.is_one_vector and type(model).forward is BayesianModel.forward
            flat = flat and set(guide.site_names) <= declared_names(model)
            prior = vector_prior(model) if flat else None
            if isinstance(guide, Ensemble):
                flat = flat and self.vectorize_particles and self.num_particles % guide.size == 0
            if self.vectorize_particles or self.closed_form or detached:
                flat = flat and prior is not None
            self._cached = key, (flat, prior if flat else None)
        return self._cached[1]

    def forget_prior(self) -> None:
        """Read the model's priors again at the next step, as after a callback that may set them."""
        self._cached = None

    def _record(self, loss: Tensor, draw: Terms, model: Any) -> float:
        """Keep the numbers of a draw; return the loss if it is read."""
        self._keep(loss, draw.kl, draw.log_q, draw.nll)
        if not self.reads:
            return 0.0
        if not math.isfinite(value := loss.item()):
            raise NonFiniteError("loss", self._not_finite(draw, model))
        return value

    def _keep(self, loss: Tensor, *numbers: Any) -> None:
        """Append a loss, and the other numbers divided by the number of draws, to `particles`."""
        means = (x / self.num_particles if self.num_particles > 1 else x for x in numbers)
        row = [torch.as_tensor(x).detach().to(loss.device) for x in (loss, *means)]
        self.particles.append(torch.stack(row).double())

    def _not_finite(self, draw: Terms, model: Any) -> list[str]:
        """Return the names of the sites whose log-density is not finite at a draw."""
        names, draws = [], range(self.num_particles if self.vectorize_particles else 1)
        for s in draws if isinstance(model, BayesianModel) else ():
            values = {n: v[s, 0] if len(draws) > 1 else v for n, v in draw.values.items()}
            with torch.random.fork_rng():
                trace = poutine.trace(poutine.condition(model.draw_latents, values)).get_trace()
            trace.compute_log_prob()
            sites = drawn(trace) | _observed(trace)
            names += [n for n, x in sites.items() if not x["log_prob_sum"].isfinite().all()]
        return names if draw.nll.isfinite().all() else [*names, "obs"]

    def _is_reparametrized(self, guide: Any, x: Any, y: Any) -> bool:
        """Return whether all draws of a guide are differentiable; our guides' are."""
        if self.closed_form or isinstance(guide, Guide):
            return True
        if isinstance(poutine.unwrap(guide), Messenger):
            return False
        if self._reparametrized is None:
            with torch.no_grad(), torch.random.fork_rng(), poutine.block():
                sites = drawn(poutine.trace(guide).get_trace(x, y, 1.0)).values()
            self._reparametrized = all(site["fn"].has_rsample for site in sites)
        return self._reparametrized

    def _vectorized_num_particles(self, fn: Any) -> Any:
        name, dim = "num_particles_vectorized", -int(self.max_plate_nesting)
        return PlateOfDraws(name, self.num_particles, dim)(fn) if self.num_particles > 1 else fn

    def _differentiable_loss_particle(self, model_trace: Any, guide_trace: Any) -> Any:
        """Return the surrogate loss of `Trace_ELBO`, and keep its numbers."""
        loss, surrogate = super()._differentiable_loss_particle(model_trace, guide_trace)
        prior, q = drawn(model_trace).values(), drawn(guide_trace).values()
        log_prior = sum(site["unscaled_log_prob"].sum() for site in prior)
        log_q = sum(site["unscaled_log_prob"].sum() for site in q)
        nll = -sum(site["log_prob_sum"] for site in _observed(model_trace).values())
        self._keep(torch.as_tensor(loss) / self.num_particles, log_q - log_prior, log_q, nll)
        return loss, surrogate


def minibatch_elbo(loss: Any, num_particles: int, *, vectorize: bool = False) -> MinibatchELBO:
    """Return the objective of a training.

    Args:
        loss: ``None`` or ``"trace"`` for `Trace_ELBO`, ``"mean_field"`` for
            `TraceMeanField_ELBO`, or one of these classes or an instance of it.
        num_particles: draws per step, where ``loss`` is not an instance with its own.
        vectorize: whether model and guide are run once for all draws.

    Raises:
        ValueError: an unknown name, or ``num_particles`` below 1.
        TypeError: another objective (use it with `pyro.infer.SVI` directly).
    """
    num_particles = count("num_particles", num_particles)
    if isinstance(loss, str):
        one_of("loss", loss, ["mean_field", "trace"])
    if type(loss) in (Trace_ELBO, TraceMeanField_ELBO):
        loss, num_particles = type(loss), loss.num_particles
    if loss not in (None, "trace", "mean_field", Trace_ELBO, TraceMeanField_ELBO):
        raise TypeError(f"loss must be Trace_ELBO or TraceMeanField_ELBO, got {loss!r}")
    closed_form = loss in ("mean_field", TraceMeanField_ELBO)
    return MinibatchELBO(num_particles, vectorize=vectorize, closed_form=closed_form)
