"""Predictions: draws of the weights, their outputs, and what they say about the uncertainty.

The total is split by the laws of total entropy and of total variance into what the data leave open
even for known weights (aleatoric) and what the weights leave open (epistemic).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import pyro
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import MCMC
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical

from pyro_bbb._pyro import evaluating, one_by_one, over_draws, own_store, seeded
from pyro_bbb.distributions import map_tensors
from pyro_bbb.likelihoods import align
from pyro_bbb.models import BayesianModel

Draws: TypeAlias = Mapping[str, Tensor]
_CHUNK = 2**24  # numbers of weights held at once
_ROWS = 8192  # inputs of one pass
_BATCHED_BELOW = 128  # inputs from which draws run one by one


@dataclass(frozen=True)
class ClassificationPrediction:
    """Predicted classes of n examples by S draws of the weights.

    Targets of several parts (``[n, T]``) add their dimensions after n everywhere.

    Args:
        sample_log_probs: log-probabilities of each draw, ``[S, n, C]``, nats.
    """

    sample_log_probs: Tensor

    @cached_property
    def sample_probs(self) -> Tensor:
        """Class probabilities of each draw, ``[S, n, C]``."""
        return self.sample_log_probs.exp()

    @cached_property
    def log_probs(self) -> Tensor:
        """Logarithm of the mean probabilities, ``[n, C]``, nats."""
        return self.sample_log_probs.logsumexp(0) - math.log(len(self.sample_log_probs))

    @cached_property
    def probs(self) -> Tensor:
        """The posterior predictive: mean probabilities, ``[n, C]``."""
        return self.log_probs.exp()

    @property
    def label(self) -> Tensor:
        """The most probable class, int64 ``[n]``."""
        return self.probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """Its probability, ``[n]``."""
        return self.probs.amax(-1)

    @property
    def entropy(self) -> Tensor:
        """Total uncertainty: entropy of `probs`, ``[n]``, nats; `aleatoric` + `epistemic`."""
        return torch.special.entr(self.probs).sum(-1)

    @property
    def aleatoric(self) -> Tensor:
        """Expected entropy of one draw's probabilities, ``[n]``, nats."""
        return torch.special.entr(self.sample_probs).sum(-1).mean(0)

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of class and weights, ``[n]``, nats (Houlsby et al. 2011, BALD).

        As the mean KL from the predictive to the draws, which is 0 for one draw.
        """
        gain = self.sample_probs * (self.sample_log_probs - self.log_probs)
        return gain.where(self.sample_probs > 0, 0.0).sum(-1).mean(0)

    def refuse(self, threshold: float) -> Tensor:
        """Where to give no answer: no class is more probable than the threshold; bool ``[n]``.

        Raises:
            ValueError: the threshold is outside [0, 1].
        """
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {threshold}")
        return self.confidence <= threshold

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-probability of the true labels under the predictive, ``[n]``, nats.

        Raises:
            ValueError: the labels are not integers in [0, C) of the predictions' shape.
        """
        classes, shape = self.log_probs.shape[-1], self.log_probs.shape[:-1]
        if y.shape != shape or y.is_floating_point():
            raise ValueError(
                f"expected y of integer type and shape {list(shape)}, got {y.dtype} {list(y.shape)}"
            )
        if y.numel() and not (0 <= y.min() and y.max() < classes):
            raise ValueError(
                f"y must hold labels in [0, {classes - 1}], got {y.min()} to {y.max()}"
            )
        return self.log_probs.gather(-1, y.long().unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class RegressionPrediction:
    """Predicted distributions of n real targets or counts, a mixture over S draws of the weights.

    Args:
        components: the draws' distributions, batch shape ``[S, n, d]``, in the targets' unit.
    """

    components: Any

    @property
    def sample_means(self) -> Tensor:
        """Each draw's mean, ``[S, n, d]``."""
        return self.components.mean

    @cached_property
    def mean(self) -> Tensor:
        """Mean of the mixture, ``[n, d]``."""
        return self.sample_means.mean(0)

    @cached_property
    def aleatoric_std(self) -> Tensor:
        """Root of the expected noise variance, ``[n, d]``."""
        return self.components.variance.mean(0).sqrt()

    @cached_property
    def epistemic_std(self) -> Tensor:
        """Standard deviation of the draws' means, ``[n, d]``."""
        return self.sample_means.std(0, correction=0)

    @cached_property
    def std(self) -> Tensor:
        """Total standard deviation, by the law of total variance, ``[n, d]``."""
        return torch.hypot(self.aleatoric_std, self.epistemic_std)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of the true targets under the mixture, ``[n]``, nats.

        Args:
            y: targets, ``[n, d]``, or ``[n]`` for d = 1.

        Raises:
            ValueError: the targets have another shape.
        """
        y = align(y, self.components.batch_shape[2:])
        if len(y) != self.components.batch_shape[1]:
            raise ValueError(f"expected y of {self.components.batch_shape[1]} rows, got {len(y)}")
        log_prob = self.components.log_prob(y)
        log_prob = log_prob.reshape(*log_prob.shape[:2], -1).sum(2)
        return log_prob.logsumexp(0) - math.log(len(log_prob))

    def cdf(self, value: Tensor) -> Tensor:
        """Probability of a target at most ``value``, ``[n, d]``."""
        return self.components.cdf(value).mean(0)

    def quantile(self, probability: float) -> Tensor:
        """The mixture's quantile, ``[n, d]``, by bisection of its distribution function in float64.

        Raises:
            ValueError: the probability is outside (0, 1).
        """
        if not 0 < probability < 1:
            raise ValueError(f"probability must be in (0, 1), got {probability}")
        exact = RegressionPrediction(map_tensors(self.components, Tensor.double))
        low, high = exact._bracket(probability)
        for _ in range(64):
            middle = 0.5 * (low + high)
            below = exact.cdf(middle) < probability
            low, high = middle.where(below, low), high.where(below, middle)
        return (high.round() if self.components.support.is_discrete else high).to(self.mean)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """The central interval that holds a share ``level`` of the mixture.

        Args:
            level: probability inside, in (0, 1).

        Returns:
            Lower and upper end, each ``[n, d]``.

        Raises:
            ValueError: the level is outside (0, 1).
        """
        if not 0 < level < 1:
            raise ValueError(f"level must be in (0, 1), got {level}")
        return self.quantile(0.5 * (1 - level)), self.quantile(0.5 * (1 + level))

    def _bracket(self, probability: float) -> tuple[Tensor, Tensor]:
        """Points on both sides of the quantile, from ever wider steps around any mean."""
        centre, width = self.mean.nan_to_num(0.0), self.std.nan_to_num(1.0, posinf=1.0) + 1e-3
        low, high = centre - width, centre + width
        while (outside := self.cdf(low) >= probability).any():
            width = 2 * width
            low = (low - width).where(outside, low)
        while (outside := self.cdf(high) < probability).any():
            width = 2 * width
            high = (high + width).where(outside, high)
        return low, high


Prediction: TypeAlias = ClassificationPrediction | RegressionPrediction


def predict(
    model: BayesianModel,
    guide: Any,
    x: Tensor,
    *,
    num_samples: int = 100,
    batch_size: int | None = None,
    seed: int | None = None,
) -> Prediction:
    """The posterior predictive at new inputs.

    All inputs meet the same draws, so that each draw is one function. Networks are in evaluation
    mode meanwhile.

    Args:
        model: the model.
        guide: a trained guide; a finished Pyro `MCMC`; or draws by site name, ``[S, ...]`` each.
            Of given draws at most ``num_samples`` are used, evenly spaced.
        x: inputs, ``[n, ...]``.
        num_samples: number of draws S.
        batch_size: inputs per pass, to bound memory; 8192 by default.
        seed: makes the result a function of this number, and leaves torch's random state alone.

    Returns:
        A `ClassificationPrediction` for class likelihoods, else a `RegressionPrediction`.

    Raises:
        ValueError: inputs that do not fit, are empty or not finite, a number out of range, or draws
            that lack a latent.
        TypeError: an argument of the wrong kind.
    """
    _check(model, x, num_samples=num_samples, batch_size=batch_size)
    with seeded(seed), own_store(model, guide):
        return _summarise(model, _posterior(model, guide, x, num_samples), x, batch_size)


def predict_mean(
    model: BayesianModel, guide: Any, x: Tensor, *, batch_size: int | None = None
) -> Prediction:
    """The prediction of one network, whose weights are the posterior's centre.

    Args:
        model: the model.
        guide: as for `predict`; its medians (for `AutoSoftplusNormal` the means) are the weights,
            of given draws the mean.
        x: inputs, ``[n, ...]``.
        batch_size: inputs per pass; 8192 by default.

    Returns:
        A prediction with a single draw.

    Raises:
        ValueError: as for `predict`.
        TypeError: as for `predict`.
    """
    _check(model, x, batch_size=batch_size)
    with own_store(model, guide):
        given = _given(guide)
        if given is not None:
            centre = {name: values.mean(0) for name, values in given.items()}
        else:
            centre = _medians(guide, x[:1])
        draws = {name: value.unsqueeze(0) for name, value in centre.items()}
        return _summarise(model, iter([draws]), x, batch_size)


def _check(model: Any, x: Any, **numbers: int | None) -> None:
    if not isinstance(model, BayesianModel):
        raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if x.dim() == 0 or len(x) == 0:
        raise ValueError(f"x must hold at least one input, got shape {list(x.shape)}")
    if not x.isfinite().all():
        raise ValueError("x must be finite, got NaN or infinity")
    for name, number in numbers.items():
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {number!r}")


def _posterior(model: BayesianModel, guide: Any, x: Tensor, num_samples: int) -> Iterator[Draws]:
    """The posterior's draws in chunks, each ``[s, ...]`` by site name."""
    given = _given(guide)
    if given is not None:
        available = len(next(iter(given.values())))
        chosen = torch.linspace(0, available - 1, min(num_samples, available)).round().long()
        given = {name: values[chosen] for name, values in given.items()}
        num_samples = len(chosen)
    size = max(1, min(num_samples, _CHUNK // _latent_size(guide, given)))
    for start in range(0, num_samples, size):
        count = min(size, num_samples - start)
        if given is not None:
            yield {name: values[start : start + count] for name, values in given.items()}
        elif hasattr(guide, "sample_posterior"):
            yield guide.sample_posterior(count)
        else:
            yield _stack([_one_draw(guide, x[:1]) for _ in range(count)])


def _latent_size(guide: Any, given: Draws | None) -> int:
    """About how many numbers one draw holds."""
    if given is not None:
        return 1 + sum(values[0].numel() for values in given.values())
    parameters = guide.parameters() if isinstance(guide, nn.Module) else ()
    return 1 + sum(parameter.numel() for parameter in parameters)


def _given(guide: Any) -> dict[str, Tensor] | None:
    """Draws that exist already, all of one number."""
    if isinstance(guide, MCMC):
        guide = guide.get_samples()
    if not isinstance(guide, Mapping):
        _check_guide(guide)
        return None
    counts = {name: len(values) if values.dim() else 0 for name, values in guide.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ValueError(f"guide must hold equally many draws of its latents, got {counts}")
    return dict(guide)


def _check_guide(guide: Any) -> None:
    if not callable(guide):
        kind = type(guide).__name__
        raise TypeError(f"guide must be a guide, an MCMC or a dict of draws, got {kind}")
    stock = isinstance(guide, AutoGuide) and not hasattr(guide, "sample_posterior")
    if stock and guide.prototype_trace is None:  # it would take the observations for a latent
        raise ValueError(f"guide must be trained before, got {type(guide).__name__} that never ran")


def _medians(guide: Any, x: Tensor) -> dict[str, Tensor]:
    if not hasattr(guide, "median"):
        raise TypeError(f"guide must have a method median, got {type(guide).__name__}")
    medians: dict[str, Tensor] = guide.median(x)
    return medians


def _one_draw(guide: Any, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        trace = poutine.trace(guide).get_trace(x, None, 1.0)
    return {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}


def _stack(draws: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


class _Supplied(Messenger):
    """Gives the latents inside the values of one posterior draw."""

    def __init__(self, draw: Draws) -> None:
        super().__init__()
        self.draw = draw

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"]:
            if msg["name"] not in self.draw:
                raise ValueError(f"the posterior's draws lack the latent {msg['name']!r}")
            msg["value"] = self.draw[msg["name"]]


def _summarise(
    model: BayesianModel, posterior: Iterable[Draws], x: Tensor, batch_size: int | None
) -> Prediction:
    parts = []
    with torch.no_grad(), pyro.validation_enabled(False), evaluating(model):
        for draws in posterior:
            try:
                batches = [_run(model, draws, part) for part in x.split(batch_size or _ROWS)]
            except RuntimeError:
                model.check(x)  # says so if the inputs do not fit
                raise
            parts.append(_concatenate(batches, dim=1))
    return _as_prediction(model.likelihood.family, _concatenate(parts, dim=0))


def _run(model: BayesianModel, draws: Draws, x: Tensor) -> dict[str, Tensor]:
    """The likelihood's arguments for every draw, each ``[s, n, ...]``.

    For few inputs all draws run as one batched pass. For many, or where a network's operations
    cannot be batched over weights, they run one by one: then a pass is large enough by itself.
    """

    def run(draw: Draws) -> dict[str, Tensor]:
        with _Supplied(draw):
            return model.predictive(x)

    return (over_draws if len(x) < _BATCHED_BELOW else one_by_one)(run, draws)


def _concatenate(parts: list[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts], dim) for name in parts[0]}


def _as_prediction(family: Any, arguments: dict[str, Tensor]) -> Prediction:
    if issubclass(family, Categorical):
        return ClassificationPrediction(F.log_softmax(arguments["logits"], dim=-1))
    if issubclass(family, Bernoulli):
        logits = arguments["logits"]
        log_probs = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=-1)
        single = log_probs.dim() == 4 and log_probs.shape[2] == 1
        return ClassificationPrediction(log_probs.squeeze(2) if single else log_probs)
    return RegressionPrediction(family(**arguments))
