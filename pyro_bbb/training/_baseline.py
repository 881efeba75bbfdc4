# SPDX-License-Identifier: Apache-2.0
r"""Baseline of training: the best negative ELBO of some posteriors that ignore the data.

Their weights are Normals around the prior's means, with the prior's standard deviations times a
factor: of all weights, or of the last layer's alone, which makes the outputs nearly constant.
A trained guide should be better. One that is not has stopped far from the posterior. Its data cost
should be below that of each of them as well, or it has learned nothing. At a temperature $T < 1$
that holds for the data cost of rows left out, too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pyro
import torch
from pyro import poutine
from pyro.distributions import Normal
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.distributions import constraints

from pyro_bbb._utils.context import evaluating, seeded
from pyro_bbb._utils.inputs import Rows, weight_of
from pyro_bbb._utils.pages import read_on
from pyro_bbb.data import Minibatches
from pyro_bbb.guides.scale_kl import with_kl_weight
from pyro_bbb.latents import base_support, drawn
from pyro_bbb.likelihoods import Bernoulli, Categorical
from pyro_bbb.models import BayesianModel
from pyro_bbb.prediction import log_prob_left_out
from pyro_bbb.training._batches import Batch, Batches
from pyro_bbb.training.history import History

if TYPE_CHECKING:
    from pyro_bbb.training._fit import Options

FACTORS = tuple(4.0**-k for k in range(1, 7))
_DRAWS = 4  # of each of the best three
_ERROR = 0.05  # of a data cost per example, by 256 of them whose costs vary by 0.8
_FAR = 5.5  # sum of Adam's rates that moves a rho from -5 to the scale of a standard Normal
_COLLAPSED = "it has collapsed to the prior, or the inputs are not informative"
_LARGE_LR = 0.1  # of Adam, where posterior standard deviations are 0.01 to 1
UNSCALED = 20.0  # factor between 1 and inputs, targets, or outputs at draws from the prior
PASSES = 1 + 2 * len(FACTORS) + 3 * _DRAWS  # 25 draws of the weights, over the same examples


class UndertrainedWarning(UserWarning):
    """Training ended where a posterior that ignores the data has a better ELBO, or likelihood.

    At temperatures below 1 the likelihood of rows left out is estimated and compared, too.
    """


@torch.no_grad()
def baseline_per_example(batches: Batches, num_steps: int, kl_weight: float) -> list[float] | None:
    """Return the best negative ELBO and data cost of posteriors that ignore the data.

    They are in nats per example; ``None`` where none is finite or a prior is improper. The 25
    passes cost less than the training: one of fewer steps has no baseline, and they see at most 256
    examples, a hundredth of those that the training sees, or a minibatch.
    """
    if num_steps < PASSES or batches.model.has_improper_prior:  # which has no scale
        return None
    size = (batches.batch_size or len(batches.examples[1])) * batches.accumulate
    x, y = batches.spread(max(size, num_steps * size // 100))
    batches_of_data = [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]
    least = least_costs(batches.model, batches_of_data, kl_weight)
    nats = [max(batches.processes.gather(cost)) / batches.model.num_data for cost in least]
    # a rare class may be absent from the few examples, whose cost is then below the entropy
    nats[1] = max(nats[1], _entropy_of_labels(batches))
    return nats if max(nats) < math.inf else None


def _entropy_of_labels(batches: Batches) -> float:
    """Return the entropy of the labels in memory, in nats per example; 0 for other targets."""
    source = batches.source
    of_classes = type(batches.model.likelihood) in (Categorical, Bernoulli)
    if not (of_classes and isinstance(source, Minibatches) and source.y.dim() == 1):
        return 0.0
    if weight_of(source.x) is not None:
        return 0.0
    counts = source.y[source.y >= 0].unique(return_counts=True)[1].double()
    return float((counts / len(source.y) * (counts.sum() / counts).log()).sum())


def warn_if_undertrained(options: Options, batches: Batches, history: History) -> None:
    """Warn where the last (or best) epoch's objective, or data cost, is worse than the baseline."""
    least_loss = history.baseline_per_example
    if least_loss is None or not history.loss:
        return
    last = -1 if history.best_epoch is None else history.best_epoch
    loss, nll = (record[last] / history.num_data for record in (history.loss, history.nll))
    kl, least_nll = loss - nll, history.baseline_nll_per_example or math.inf
    reached, least = f"a data cost of {nll:.3g}", f"{least_nll:.3g}"
    # a step is of about lr in Adam, and of lr times Newton's step in IVON
    most = 1.0 if options.ivon else _LARGE_LR if options.optimizer is None else math.inf
    too_fast, longer = (options.lr or 0.0) > most, "train longer, or with a larger lr"
    if too_fast:
        longer = f"lr={options.lr:g} is too large, take a lower lr"
    elif max(kl, loss) > least_loss and sum(history.steps.lr) > _FAR:
        longer += _or_a_narrower_prior(batches)
    constant = abs(nll - least_nll) < _ERROR  # in its outputs
    page = "guide/trained"
    if (loss > least_loss and constant) or (kl > least_loss and nll > least_nll):
        why = (
            "The network has learned nothing: steps that are too large at the start kill its units "
            "(take a lower lr, or lr_schedule='warmup_cosine'), or training is too short"
        )
    elif kl > least_loss:
        reached, least = f"a KL term of {kl:.3g}", f"a negative ELBO of {least_loss:.3g}"
        why = (
            "The guide's standard deviations are too small, or its means too large, for the prior, "
            f"and predictions are likely overconfident: {longer}"
        )
    elif loss > least_loss:
        reached, least = f"a negative ELBO of {loss:.3g}", f"{least_loss:.3g}"
        why = f"The guide is far from the posterior: {longer}"
    elif nll > least_nll:
        why = f"The guide has learned little or nothing: {longer if too_fast else _COLLAPSED}"
        page = "questions/elbo"
    elif (cost := _cost_left_out(options, batches, history.kl_weight[last])) > least_nll:
        reached = (
            f"an estimated data cost of {cost:.3g} for rows left out, {nll:.3g} for rows seen,"
        )
        why = "The posterior is too cold, and overconfident: take a temperature nearer 1"
    else:
        return
    warnings.warn(
        f"training ended at {reached} nats per example; a posterior that ignores the data reaches "
        f"{least}. {why}. Check it by bbb.check. {read_on(page)}",
        UndertrainedWarning,
        stacklevel=4,
    )


@torch.no_grad()
def _or_a_narrower_prior(batches: Batches) -> str:
    """Return the advice to take another prior, where outputs at draws from it are far from 1."""
    x, _ = batches.spread()
    with seeded(0), poutine.block(), evaluating(batches.model):
        std = fmean(float(batches.model.network(x).std()) for _ in range(_DRAWS))
    if std <= UNSCALED:
        return ""
    return (
        ", or take a narrower prior, such as 'fan_in_normal': networks drawn from this one have "
        f"outputs of standard deviation {std:.3g}"
    )


@torch.no_grad()
def _cost_left_out(options: Options, batches: Batches, temperature: float) -> float:
    """Estimate the data cost per example of rows left out, in nats."""
    if temperature > 0.99:  # the posterior's noise alone would count
        return 0.0
    x, y = batches.spread()
    guide, model, draws = with_kl_weight(options.guide), batches.model, []
    with seeded(0), poutine.block(), evaluating(model):
        for _ in range(2 * _DRAWS):
            replayed = poutine.replay(model, poutine.trace(guide).get_trace(x, y, 1.0))
            trace = poutine.trace(replayed).get_trace(x, y)
            trace.compute_log_prob(lambda _, site: site["is_observed"])
            draws.append(trace.nodes["obs"]["unscaled_log_prob"])
    return -float(log_prob_left_out(torch.stack(draws), temperature).mean())


@torch.no_grad()
def least_costs(
    model: BayesianModel, parts: Sequence[Batch], kl_weight: float = 1.0
) -> tuple[float, float]:
    """Return the least negative ELBO, of the best three by more draws, and the least data cost."""
    costs = []

    def neg_elbo(factors: Mapping[str, float]) -> float:
        kl, nll = _costs(model, parts, factors)
        costs.append(math.inf if math.isnan(nll) else nll)
        return math.inf if math.isnan(kl + nll) else kl_weight * kl + nll

    quiet = pyro.validation_enabled(False)  # outputs may be infinite
    with quiet, seeded(0), poutine.block(), evaluating(model):
        best = sorted(_candidates(model, *parts[0]), key=neg_elbo)[:3]
        least = min(fmean(neg_elbo(factors) for _ in range(_DRAWS)) for factors in best)
    return least, min(costs)


def _candidates(model: BayesianModel, x: Rows, y: Tensor) -> Iterator[dict[str, float]]:
    """Yield factors of the weights' standard deviations, by name."""
    sites = drawn(poutine.trace(model).get_trace(x[:1], y[:1]))
    names = [name for name, site in sites.items() if _has_moments(site["fn"])]
    matrices = [i for i, name in enumerate(names) if sites[name]["value"].dim() > 1]
    last = names[matrices[-1] :] if matrices else []
    yield dict.fromkeys(names, 1.0)
    for factor in FACTORS:
        yield dict.fromkeys(names, factor)
        yield dict.fromkeys(names, 1.0) | dict.fromkeys(last, factor**2)  # outputs may be large


def _has_moments(prior: Any) -> bool:
    """Return whether a prior is of real numbers, and has a mean and a variance."""
    if base_support(prior) is not constraints.real:
        return False
    try:
        return bool(torch.isfinite(prior.mean).all() and torch.isfinite(prior.stddev).all())
    except NotImplementedError:  # torch's answer for a distribution that does not define them
        return False


class _ScaledPrior(Messenger):
    """One draw from Normals of the priors' moments, the standard deviations times a factor."""

    def __init__(self, factors: Mapping[str, float]) -> None:
        super().__init__()
        self.factors, self.kl = factors, 0.0  # by name; estimate by this draw, in nats

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.factors:
            prior, factor = msg["fn"], self.factors[msg["name"]]
            q = Normal(prior.mean, factor * prior.stddev).to_event(prior.event_dim)
            msg["value"], msg["done"] = q.sample(), True
            self.kl += float((q.log_prob(msg["value"]) - prior.log_prob(msg["value"])).sum())


def _costs(
    model: BayesianModel, parts: Sequence[Batch], factors: Mapping[str, float]
) -> tuple[float, float]:
    """Estimate the KL and the data cost of all data, in nats, by one draw of the weights."""
    with _ScaledPrior(factors) as draw:
        traces = [poutine.trace(model).get_trace(*parts[0])]
    values = {name: site["value"] for name, site in drawn(traces[0]).items()}
    same_draw = poutine.condition(model, data=values)
    traces += [poutine.trace(same_draw).get_trace(*batch) for batch in parts[1:]]
    log_likelihood = sum(
        float(trace.log_prob_sum(lambda name, site: site["is_observed"] and name not in values))
        for trace in traces
    )
    return draw.kl, -model.num_data / sum(len(y) for _, y in parts) * log_likelihood
