# SPDX-License-Identifier: Apache-2.0
r"""The minibatch free energy $F_i = \pi_i\,\mathrm{KL} - \log p(D_i|w)$ and its parts.

Blundell et al. (2015), section 3.4 and equation 8. All quantities are in nats.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from pyro import poutine
from pyro.distributions import Delta
from pyro.distributions.util import scale_and_mask
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.util import check_fully_reparametrized, torch_item
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import is_validation_enabled, prune_subsample_sites
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_bbb._handlers.flat_site import get_traces
from pyro_bbb._handlers.particle_plate import PlateOfDraws
from pyro_bbb._handlers.pruned_sites import UnprunedEntries
from pyro_bbb._ops.buffers import Memory
from pyro_bbb._ops.step_context import StepOptions, step_context
from pyro_bbb._utils.validation import count, one_of
from pyro_bbb.training._schedules import KLSchedule, as_kl_schedule, blundell, uniform

__all__ = [
    "KLSchedule",
    "LossParts",
    "NonFiniteError",
    "RecordedTraceELBO",
    "RecordedTraceMeanFieldELBO",
    "as_kl_schedule",
    "blundell",
    "recorded_elbo",
    "terms_of",
    "uniform",
]


class NonFiniteError(ArithmeticError):
    """Training met a loss or a gradient that is infinite or not a number.

    The parameters are still those before the step.

    Args:
        what: "loss" or "gradient".
        names: sample sites or parameters where it appeared.
        step: number of the step, from 1, once known.
    """

    def __init__(self, what: str, names: list[str], step: int | None = None) -> None:
        self.what, self.names, self.step = what, names, step
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


class _Recorded:
    """Mixin for `Trace_ELBO` and its kin: keeps the parts of each particle's loss."""

    particles: list[LossParts]
    num_particles: int
    max_plate_nesting: float
    closed_form = False
    unpruned: UnprunedEntries | None = None  # what pruning has left of the guide's weights

    @functools.cached_property
    def memory(self) -> Memory:
        """For what a step leaves behind."""
        return Memory()

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """One minibatch's negative ELBO; its gradient is added to the parameters'."""
        with step_context(StepOptions(True, self.num_particles > 1, self.unpruned, self.memory)):
            loss: float = super().loss_and_grads(model, guide, *args, **kwargs)  # type: ignore[misc]
        return loss

    def _vectorized_num_particles(self, fn: Any) -> Any:
        name, dim = "num_particles_vectorized", -int(self.max_plate_nesting)
        return PlateOfDraws(name, self.num_particles, dim)(fn) if self.num_particles > 1 else fn

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        if is_validation_enabled() or isinstance(poutine.unwrap(guide), Messenger):
            return super()._get_trace(model, guide, args, kwargs)  # type: ignore[misc]
        model_trace, guide_trace = map(
            prune_subsample_sites, get_traces(model, guide, args, kwargs)
        )
        model_trace.compute_log_prob(self._is_scored)
        guide_trace.compute_score_parts()
        return model_trace, guide_trace

    def _is_scored(self, name: str, site: Any) -> bool:
        """Return whether the objective needs the log-density of a site of the model."""
        return True

    def _differentiable_loss_particle(self, model_trace: Any, guide_trace: Any) -> Any:
        loss, surrogate = super()._differentiable_loss_particle(model_trace, guide_trace)  # type: ignore[misc]
        self._record(torch_item(loss), model_trace, guide_trace)
        return loss, surrogate

    def _record(self, loss: Any, model_trace: Any, guide_trace: Any) -> None:
        if not math.isfinite(loss):
            raise NonFiniteError("loss", _not_finite(model_trace) + _not_finite(guide_trace))
        terms = terms_of(model_trace, guide_trace)
        self.particles.append(loss_parts(loss, *terms, _weight_of(_sites(guide_trace))))

    def take_parts(self) -> LossParts:
        """The mean parts of the particles since the last call."""
        particles, self.particles = self.particles, []
        columns = zip(*(vars(particle).values() for particle in particles), strict=True)
        sums = LossParts(*map(math.fsum, columns))  # a vectorised entry is a sum already
        means = {name: total / self.num_particles for name, total in vars(sums).items()}
        return LossParts(**means | {"kl_weight": particles[0].kl_weight})


class RecordedTraceELBO(_Recorded, Trace_ELBO):
    """`Trace_ELBO` that keeps the parts of its loss."""


class _MeanField(TraceMeanField_ELBO):
    """Pyro's objective, without scores of draws under priors that a closed form makes needless.

    Each latent site of the model keeps its ``kl``. The log-density of a guide's Deltas, which
    Pyro's KL of a Delta leaves out, is in it.
    """

    def _differentiable_loss_particle(self, model_trace: Any, guide_trace: Any) -> Any:
        elbo: Any = 0.0
        for name, site in model_trace.nodes.items():
            if site["type"] == "sample" and site["is_observed"]:
                elbo = elbo + site["log_prob_sum"]
            elif site["type"] == "sample":
                q = guide_trace.nodes[name]
                site["kl"] = _kl_of(q, model_trace, name)
                elbo = elbo - scale_and_mask(site["kl"], q["scale"], q["mask"]).sum()
        for site in _sites(guide_trace):
            if site["name"] not in model_trace:
                elbo = elbo - site["score_parts"].entropy_term.sum()
        return -torch_item(elbo), -elbo


def _kl_of(q: Any, model_trace: Any, name: str) -> Tensor:
    """The KL of a site, of the guide's batch shape: by its closed form, or else of the draw."""
    if is_validation_enabled():
        check_fully_reparametrized(q)
    site = model_trace.nodes[name]
    try:
        kl: Tensor = kl_divergence(q["fn"], site["fn"])
    except NotImplementedError:
        model_trace.compute_log_prob(lambda other, _: other == name)
        return q["unscaled_log_prob"] - site["unscaled_log_prob"]
    return kl + q["unscaled_log_prob"] if isinstance(q["fn"], Delta) else kl


class RecordedTraceMeanFieldELBO(_Recorded, _MeanField):
    """`TraceMeanField_ELBO` (closed-form KL where registered) that keeps the parts of its loss."""

    closed_form = True

    def _is_scored(self, name: str, site: Any) -> bool:
        return bool(site["is_observed"])


RecordedELBO: TypeAlias = RecordedTraceELBO | RecordedTraceMeanFieldELBO
_OBJECTIVES: dict[str, type[RecordedTraceELBO] | type[RecordedTraceMeanFieldELBO]] = {
    "trace": RecordedTraceELBO,
    "mean_field": RecordedTraceMeanFieldELBO,
}


def recorded_elbo(loss: Any, num_particles: int, *, vectorize: bool = False) -> RecordedELBO:
    """The objective for training.

    Args:
        loss: ``None`` or ``"trace"`` for `Trace_ELBO`, ``"mean_field"`` for
            `TraceMeanField_ELBO`, or one of these classes or an instance of it.
        num_particles: draws per step, where ``loss`` is not an instance with its own.
        vectorize: whether model and guide are run once for all draws.

    Returns:
        The objective, keeping the parts of its loss.

    Raises:
        ValueError: an unknown name, or ``num_particles`` below 1.
        TypeError: another objective (use it with `pyro.infer.SVI` directly).
    """
    num_particles = count("num_particles", num_particles)
    if isinstance(loss, str):
        one_of("loss", loss, sorted(_OBJECTIVES))
    if type(loss) in (Trace_ELBO, TraceMeanField_ELBO):
        loss, num_particles = type(loss), loss.num_particles
    kinds = {None: "trace", Trace_ELBO: "trace", TraceMeanField_ELBO: "mean_field"}
    name = loss if isinstance(loss, str) else next((v for k, v in kinds.items() if k is loss), None)
    if name is None:
        raise TypeError(f"loss must be Trace_ELBO or TraceMeanField_ELBO, got {loss!r}")
    elbo = _OBJECTIVES[name](
        num_particles=num_particles,
        vectorize_particles=vectorize and num_particles > 1,
        max_plate_nesting=1,  # the model's plate of the data
    )
    elbo.particles = []
    return elbo


def loss_parts(loss: float, kl: float, log_guide: float, nll: float, kl_weight: float) -> LossParts:
    """The parts of a loss, of which one is the sum of two others."""
    return LossParts(loss, kl, log_guide - kl, log_guide, nll, kl_weight)


def terms_of(model_trace: Any, guide_trace: Any) -> tuple[Any, Any, Any]:
    """The ``kl``, ``log_guide`` and ``nll`` of a pair of traces."""
    prior = [site for site in _sites(model_trace) if not site["is_observed"]]
    data = [site for site in _sites(model_trace) if site["is_observed"]]
    nll = -sum(torch_item(site["log_prob_sum"]) for site in data)
    log_guide = _total(site["unscaled_log_prob"] for site in _sites(guide_trace))
    if all("kl" in site for site in prior):
        return _total(site["kl"] for site in prior), log_guide, nll
    return log_guide - _total(site["unscaled_log_prob"] for site in prior), log_guide, nll


def _sites(trace: Any) -> list[dict[str, Any]]:
    return [site for site in trace.nodes.values() if site["type"] == "sample"]


def _weight_of(latent: list[dict[str, Any]]) -> float:
    """The weight of the KL, from the scale of the guide's sites; masked sites weigh 0."""
    if not latent or latent[0]["mask"] is False:
        return 0.0
    return float(torch_item(latent[0]["scale"]))


def _total(values: Iterable[Tensor]) -> Any:
    return sum(torch_item(x.sum() if x.dim() else x) for x in values)


def _score(site: dict[str, Any]) -> float:
    """The site's term of the objective."""
    return float(torch_item(site["kl"].sum() if "kl" in site else site["log_prob_sum"]))


def _not_finite(trace: Any) -> list[str]:
    """Names of the sites whose log-density is not; a site of many is asked one by one."""
    found = []
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and not math.isfinite(_score(site)):
            members = site.get("members", {})
            sums = {x: member["fn"].log_prob(member["value"]) for x, member in members.items()}
            found += [x for x, total in sums.items() if not total.isfinite().all()] or [name]
    return found
