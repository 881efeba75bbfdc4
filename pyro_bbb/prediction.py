"""Predictions: draws of the weights from whatever holds the posterior, and their outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
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

from pyro_bbb._pyro import evaluating, one_by_one, over_draws, own_store, seeded, stack
from pyro_bbb.models import BayesianModel
from pyro_bbb.summaries import ClassificationPrediction, Prediction, RegressionPrediction

Draws: TypeAlias = Mapping[str, Tensor]
_CHUNK = 2**24  # numbers of weights held at once
_ROWS = 8192  # inputs of one pass
_BATCHED_BELOW = 128  # inputs from which draws run one by one


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
        guide: a trained guide; the `Chains` of `run_nuts`; a finished Pyro `MCMC`; or draws by
            site name, ``[S, ...]`` each. Of given draws at most ``num_samples`` are used, evenly
            spaced.
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
        return _summarise(model, posterior_draws(model, guide, x, num_samples), x, batch_size)


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


def posterior_draws(
    model: BayesianModel, guide: Any, x: Tensor, num_samples: int
) -> Iterator[Draws]:
    """The posterior's draws in chunks, each ``[s, ...]`` by site name."""
    given = _given(guide)
    if given is not None:
        available = len(next(iter(given.values())))
        chosen = torch.linspace(0, available - 1, min(num_samples, available)).round().long()
        given = {name: values[chosen] for name, values in given.items()}
        num_samples = len(chosen)
    size = max(1, min(num_samples, _CHUNK // _latent_size(guide, given)))
    members = getattr(guide, "size", 1)
    size = math.ceil(size / members) * members  # an ensemble's draws go round its members
    for start in range(0, num_samples, size):
        count = min(size, num_samples - start)
        if given is not None:
            yield {name: values[start : start + count] for name, values in given.items()}
        elif hasattr(guide, "sample_posterior"):
            yield guide.sample_posterior(count)
        else:
            yield stack([_one_draw(guide, x[:1]) for _ in range(count)])


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
