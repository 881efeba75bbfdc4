"""Predictions: draws of the weights from whatever holds the posterior, and their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyro
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import MCMC
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._handlers.vmap import stack
from pyro_bbb._utils.context import evaluating, seeded
from pyro_bbb._utils.distributed import Processes, processes
from pyro_bbb._utils.validation import all_finite, count
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.models import BayesianModel
from pyro_bbb.prediction._output_samples import draws_of_each_input, per_input
from pyro_bbb.prediction._summaries import (
    ClassificationPrediction,
    Prediction,
    RegressionPrediction,
)
from pyro_bbb.prediction._weight_samples import ALL, Draws, Part, default_rows, per_draw

ESTIMATORS = ("reparam", "local_reparam")


_CHUNK = 2**24  # numbers of a guide (or of one given draw) times the draws taken at once


_LARGE = 2**18  # such numbers from which draws may be taken one by one


def predict(
    model: BayesianModel,
    guide: Any,
    x: Tensor,
    *,
    num_samples: int = 100,
    batch_size: int | None = None,
    seed: int | None = None,
    estimator: str | None = None,
) -> Prediction:
    """The posterior predictive at new inputs.

    Processes that `torchrun` started together share the draws, and each gets the result: all of
    them must call it, with the same arguments; see `alone`.

    Networks are in evaluation mode meanwhile. Beyond the result itself memory holds a few draws of
    the weights (one, of a large network) and one pass, however many draws and inputs there are.

    Args:
        model: the model.
        guide: a trained guide; the `Chains` of `run_nuts`; a finished Pyro `MCMC`; or draws by
            site name, ``[S, ...]`` each. Of given draws at most ``num_samples`` are used, evenly
            spaced.
        x: inputs, ``[n, ...]``.
        num_samples: number of draws S.
        batch_size: inputs per pass of drawn weights; by default 1024 on a CPU, else 8192.
        seed: makes the result a function of this number, and leaves torch's random state alone.
        estimator: ``"reparam"`` draws weights, which all inputs meet: each draw is one function,
            also over several calls with one seed. ``"local_reparam"`` draws the outputs of linear
            layers instead, without a weight: fast for few inputs, and each input's predictive is
            exact, but inputs are independent of one another, and a draw is no function of them. It
            needs an `AutoSoftplusNormal`, and a network that uses each random weight once, in a
            linear layer on one row per input. ``None`` is ``"local_reparam"`` where both have the
            same distribution: for a single input of a network that consists of linear layers,
            elementwise activations, dropout and LayerNorm. Else it is ``"reparam"``.

    Returns:
        A `ClassificationPrediction` for class likelihoods, else a `RegressionPrediction`.

    Raises:
        ValueError: inputs that do not fit, are empty or not finite, a number out of range, draws
            that lack a latent, an unknown estimator or one that is not exact here.
        TypeError: an argument of the wrong kind.
    """
    _check(model, guide, x)
    num_samples, rows = count("num_samples", num_samples), _rows(batch_size, x)
    if estimator not in (None, *ESTIMATORS):
        raise ValueError(f"estimator must be one of {list(ESTIMATORS)}, got {estimator!r}")
    if estimator is None and len(x) == 1 and draws_of_each_input(model, guide, x):
        estimator = "local_reparam"
    cpu_only = x.device.type == "cpu" and not torch.cuda.is_initialized()
    team = processes(x.device)
    with seeded(seed, cpu_only=cpu_only), own_store(model, guide), team.own_stream() as begin:
        begin()
        if estimator == "local_reparam":
            counts = team.split_counts(num_samples)
            parts = per_input(model, guide, x, team.at_least_one(counts), default_rows(x))
        else:
            posterior, counts = _shared_draws(model, guide, x, num_samples, team)
            parts = per_draw(model, posterior, x, rows)
        outputs = _gather(parts, model, x, team.at_least_one(counts))
        return _answer(model, {name: team.join(y, counts) for name, y in outputs.items()})


def predict_mean(
    model: BayesianModel, guide: Any, x: Tensor, *, batch_size: int | None = None
) -> Prediction:
    """The prediction of one network, whose weights are the posterior's centre.

    Args:
        model: the model.
        guide: as for `predict`; its medians (for `AutoSoftplusNormal` the means) are the weights,
            of given draws the mean.
        x: inputs, ``[n, ...]``.
        batch_size: inputs per pass, as for `predict`.

    Returns:
        A prediction with a single draw.

    Raises:
        ValueError: as for `predict`.
        TypeError: as for `predict`.
    """
    _check(model, guide, x)
    rows = _rows(batch_size, x)
    with own_store(model, guide):
        given = _given(model, guide)
        if given is not None:
            centre = {name: values.mean(0) for name, values in given.items()}
        else:
            centre = _medians(guide, x[:1])
        draws = {name: value.unsqueeze(0) for name, value in centre.items()}
        return _answer(model, _gather(per_draw(model, [draws], x, rows), model, x, 1))


def _rows(batch_size: int | None, x: Tensor) -> int:
    """Rows of one pass."""
    return default_rows(x) if batch_size is None else count("batch_size", batch_size)


def _check(model: Any, guide: Any, x: Any) -> None:
    if not isinstance(model, BayesianModel):
        raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if x.dim() == 0 or len(x) == 0:
        raise ValueError(f"x must hold at least one input, got shape {list(x.shape)}")
    place = _device(guide)
    if place not in (None, x.device):
        raise ValueError(f"x must be on {place} as the guide is, got a tensor on {x.device}")
    if not all_finite(x):
        raise ValueError("x must be finite, got NaN or infinity")


def _device(guide: Any) -> torch.device | None:
    """Where the guide's parameters are, or the given draws, if it has any."""
    if isinstance(guide, nn.Module):
        found: Iterable[Any] = guide.parameters()
    else:
        found = guide.values() if isinstance(guide, Mapping) else ()
    return next((x.device for x in found if isinstance(x, Tensor)), None)


def posterior_draws(
    model: BayesianModel, guide: Any, x: Tensor, num_samples: int
) -> Iterator[Draws]:
    """The posterior's draws in chunks, each ``[s, ...]`` by site name."""
    return _shared_draws(model, guide, x, num_samples, Processes())[0]


def _shared_draws(
    model: BayesianModel, guide: Any, x: Tensor, num_samples: int, team: Processes
) -> tuple[Iterator[Draws], list[int]]:
    """This process's draws in chunks, at least one, and how many each process has."""
    given = _given(model, guide)
    if given is None:
        counts = team.split_counts(num_samples, unit=getattr(guide, "size", 1))
        return _drawn(guide, x, team.at_least_one(counts)), counts
    last = _count(given) - 1
    chosen = torch.linspace(0, last, min(num_samples, last + 1)).round().long()
    counts = team.split_counts(len(chosen))
    mine = chosen.split(counts)[team.rank]
    return _taken(given, mine if len(mine) else chosen[:1]), counts


def _taken(given: Draws, chosen: Tensor) -> Iterator[Draws]:
    """Given draws of these numbers."""
    numbers = sum(values[0].numel() for values in given.values())
    for rows in chosen.split(_chunk(numbers, one_by_one=True)):
        yield {name: values[rows] for name, values in given.items()}


def _drawn(guide: Any, x: Tensor, num_samples: int) -> Iterator[Draws]:
    """Draws from a guide."""
    parameters = guide.parameters() if isinstance(guide, nn.Module) else ()
    numbers = sum(parameter.numel() for parameter in parameters)
    size = min(num_samples, _chunk(numbers, one_by_one=type(guide) is AutoSoftplusNormal))
    members = getattr(guide, "size", 1)
    size = math.ceil(size / members) * members  # an ensemble's draws go round its members
    sample = _sampler(guide, x[:1])
    for start in range(0, num_samples, size):
        yield sample(min(size, num_samples - start))


def _chunk(numbers: int, one_by_one: bool) -> int:
    """Draws at once; one by one they take least memory, where that costs no time."""
    return 1 if one_by_one and numbers >= _LARGE else max(1, _CHUNK // (1 + numbers))


def _sampler(guide: Any, x: Tensor) -> Callable[[int], Draws]:
    """From a number to so many draws; what a guide's draws have in common is found once."""
    if type(guide) is AutoSoftplusNormal:
        posteriors = {each.name: guide._posterior(each) for each in guide._known_latents()}
        return lambda count: {name: q.sample((count,)) for name, q in posteriors.items()}
    if hasattr(guide, "sample_posterior"):
        sample: Callable[[int], Draws] = guide.sample_posterior
        return sample
    return lambda count: stack([_one_draw(guide, x) for _ in range(count)])


def _count(draws: Draws) -> int:
    return len(next(iter(draws.values())))


def _given(model: BayesianModel, guide: Any) -> dict[str, Tensor] | None:
    """Draws that exist already, all of one number."""
    if isinstance(guide, MCMC):
        guide = guide.get_samples()
    if not isinstance(guide, Mapping):
        _check_guide(guide)
        return None
    for name, values in guide.items():
        if not isinstance(values, Tensor):
            raise TypeError(f"guide must hold tensors by site name, got {values!r} of {name!r}")
    counts = {name: len(values) if values.dim() else 0 for name, values in guide.items()}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        raise ValueError(f"guide must hold equally many draws of its latents, got {counts}")
    for name, shape in model.latent_shapes().items():
        found = guide[name].shape[1:] if name in guide else shape
        if found != shape:  # which might broadcast
            raise ValueError(
                f"guide must hold draws of {name!r} of shape {list(shape)}, got {list(found)}"
            )
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


def _gather(
    parts: Iterable[Part], model: BayesianModel, x: Tensor, draws: int
) -> dict[str, Tensor]:
    """What a prediction holds, from parts whose draws and inputs are written where they belong."""
    family, whole = model.likelihood.family, dict[str, Tensor]()
    with torch.no_grad(), pyro.validation_enabled(False), evaluating(model):
        try:
            for which, inputs, part in parts:
                for name, value in finished(family, part).items():
                    if name not in whole:
                        n = value.shape[1] if inputs == ALL else len(x)
                        whole[name] = value.new_empty(draws, n, *value.shape[2:])
                    whole[name][which, inputs] = value
        except RuntimeError:
            model.check(x)  # says so if the inputs do not fit
            raise
    return whole


def _answer(model: BayesianModel, outputs: dict[str, Tensor]) -> Prediction:
    family = model.likelihood.family
    if issubclass(family, (Categorical, Bernoulli)):
        return ClassificationPrediction(**outputs)
    return RegressionPrediction(family(**outputs))


def finished(family: Any, arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a prediction holds of the likelihood's arguments ``[s, n, ...]``."""
    if issubclass(family, Categorical):
        return {"sample_log_probs": F.log_softmax(arguments["logits"], dim=-1)}
    if issubclass(family, Bernoulli):
        logits = arguments["logits"]
        log_probs = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], dim=-1)
        single = log_probs.dim() == 4 and log_probs.shape[2] == 1
        return {"sample_log_probs": log_probs.squeeze(2) if single else log_probs}
    return arguments
