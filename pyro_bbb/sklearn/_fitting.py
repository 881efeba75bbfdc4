# SPDX-License-Identifier: Apache-2.0
"""A posterior learned from arrays, learned on from further ones, and asked.

All of it is in double precision: networks for tables are small, and predictions for a row are then
the same to the last digits whatever rows are asked with it. Only chains run in single precision.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._utils.context import seeded
from pyro_bbb._utils.locking import GLOBAL_LOCK
from pyro_bbb.guides import Guide
from pyro_bbb.likelihoods import Gaussian, Likelihood, align
from pyro_bbb.mcmc import Chains, sample
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import BayesianMLP, Offset
from pyro_bbb.prediction import Prediction, predict
from pyro_bbb.priors import Prior, from_guide
from pyro_bbb.sklearn._params import Recipe, constant_outputs, with_priors
from pyro_bbb.training import fit
from pyro_bbb.training.history import History

_NOISE_DRAWS = 100  # networks by which the noise of further rows is estimated
_SMALL = 2**16  # weights
_CHAIN_STEPS = 1500  # gradients of each chain at most, where nothing is said


@dataclass(frozen=True)
class FittedPosterior:
    """A model with its trained guide or its chains, and the record of the training."""

    model: BayesianModel
    guide: Any  # or Chains, whose record is empty
    history: History
    num_seen: float  # rows, or their weights, that it was learned from, over all calls

    def predict(self, x: Tensor, num_samples: int, seed: int) -> Prediction:
        """By the same networks in each call with one seed."""
        if isinstance(self.guide, Chains):
            draws = _networks(self.guide, num_samples, seed)
            device = next(iter(draws.values())).device
            return predict(self.model, draws, x.to(device), num_samples=num_samples)
        device = next((p.device for p in getattr(self.guide, "parameters", list)()), x.device)
        options: Any = {"num_samples": num_samples, "seed": seed, "estimator": "reparam"}
        with _threads_for(self.model):
            return predict(self.model, self.guide, x.to(device), **options)

    def __getstate__(self) -> dict[str, Any]:
        """All fields. A guide leaves its model out of its own state, and has it back below."""
        if not isinstance(self.guide, Guide | Chains):
            raise TypeError(f"guide must be one of pyro_bbb's to be kept, got {self.guide!r}")
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["guide"], Guide):
            state["guide"]._model = (state["model"],)
        vars(self).update(state)


def learn(
    recipe: Recipe,
    likelihood: Likelihood,
    x: Tensor,
    y: Tensor,
    outputs: int,
    seed: int,
    weight: Tensor | None,
) -> FittedPosterior:
    """Train a new network on rows ``[n, d]``, targets ``[n, ...]`` and weights of the rows."""
    offset = constant_outputs(likelihood, y, outputs, weight)
    sizes = [x.shape[1], *recipe.hidden, outputs]
    if recipe.by_chains(sizes, len(x)):
        with seeded(seed):
            network = _network(recipe, sizes, recipe.make_prior(chains=True), offset)
        model = BayesianModel(network, with_priors(likelihood), num_data=len(x))
        if recipe.can_sample(model):
            return _sampled(recipe, model, x, y, seed, weight)
    with seeded(seed):
        network = _network(recipe, sizes, recipe.make_prior(), offset)
        model = BayesianModel(network, likelihood, num_data=len(x)).double()
        guide = _double(recipe.make_guide(model))
    history = _train(recipe, model, guide, x, y, seed, weight)
    return FittedPosterior(model, guide, history, _seen(x, weight))


def learn_on(
    recipe: Recipe,
    before: FittedPosterior,
    x: Tensor,
    y: Tensor,
    seed: int,
    weight: Tensor | None,
) -> FittedPosterior:
    r"""Learns from further rows: the posterior is their prior (Nguyen et al. 2018).

    The estimate of a Gaussian noise is a running one over all rows. It is held while the weights
    are trained; then, for m further rows after n,
    $\sigma^2 \leftarrow (n \sigma^2 + \sum_i E_q[(y_i - f(x_i))^2]) / (n + m)$.
    """
    prior = _as_prior(before.guide)
    likelihood = copy.deepcopy(before.model.likelihood).requires_grad_(False)
    sizes: Any = before.model.network.sizes
    with seeded(seed):
        old: Any = getattr(before.model.network, "offset", None)
        offset = torch.zeros(sizes[-1]) if old is None else old.values
        network = _network(recipe, sizes, prior, offset)
        model = BayesianModel(network, likelihood, num_data=len(x)).double()
        guide = _double(recipe.make_guide(model))
        _start_from(guide, before.guide)
    history = _train(recipe, model, guide, x, y, seed, weight)
    after = FittedPosterior(model, guide, history, before.num_seen + _seen(x, weight))
    _update_noise(after, before.num_seen, x, y, seed, weight)
    return after


def _seen(x: Tensor, weight: Tensor | None) -> float:
    return len(x) if weight is None else float(weight.sum())


@contextmanager
def _threads_for(model: BayesianModel) -> Iterator[None]:
    """One processor thread for a small network, which more would only keep waiting."""
    with GLOBAL_LOCK:  # the number is the process's
        before = torch.get_num_threads()
        if sum(shape.numel() for shape in model.latent_shapes().values()) < _SMALL:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _network(recipe: Recipe, sizes: Sequence[int], prior: Prior, offset: Tensor) -> BayesianMLP:
    """Return a network whose outputs are around the offset; 0 needs no layer."""
    network = BayesianMLP(sizes, activation=recipe.make_activation, prior=prior)
    if offset.any():
        network.offset = Offset(len(offset))
        network.offset.values.data = offset.detach().clone()
    return network


@torch.no_grad()
def _constant_nll(model: BayesianModel, y: Tensor, seed: int, weight: Tensor | None) -> float:
    """Return the negative log-likelihood of the network that ignores its inputs, in nats."""
    network: Any = model.network
    outputs = torch.zeros(len(y), network.sizes[-1], dtype=torch.double)
    if hasattr(network, "offset"):
        outputs = network.offset(outputs)
    with seeded(seed), poutine.block(), own_store(model):  # a latent scale is drawn
        observation = model.likelihood(outputs)
        y = align(model.likelihood.prepare(y, outputs), observation.event_shape)
        log_prob = observation.log_prob(y)
        return -float((log_prob if weight is None else weight * log_prob).sum())


def _sampled(
    recipe: Recipe, model: BayesianModel, x: Tensor, y: Tensor, seed: int, weight: Tensor | None
) -> FittedPosterior:
    """Sample the weights' posterior in single precision, and keep it in double."""
    steps = recipe.max_epochs or _CHAIN_STEPS
    with _threads_for(model):
        chains = sample(
            model.float(),
            (x.float(), y.float() if y.is_floating_point() else y),
            seconds=recipe.seconds,
            batch_size=recipe.batch_size,
            device=recipe.device,
            seed=seed,
            progress=recipe.progress,
            sample_weight=weight,
            max_steps=steps,
        )
    chains = chains.to(dtype=torch.float64)
    return FittedPosterior(model.double(), chains, History(), _seen(x, weight))


def _networks(chains: Chains, num_samples: int, seed: int) -> dict[str, Tensor]:
    """Return as many draws, evenly spaced over all chains from a random start, in random order."""
    with seeded(seed):
        start, order = torch.rand((), dtype=torch.float64), torch.randperm(num_samples)
    rows = ((order + start) * chains.diverging.numel() / num_samples).long()
    return {name: draws[rows] for name, draws in chains.items()}


def _double(guide: Any) -> Any:
    return guide.double() if isinstance(guide, nn.Module) else guide


def _train(
    recipe: Recipe,
    model: BayesianModel,
    guide: Any,
    x: Tensor,
    y: Tensor,
    seed: int,
    weight: Tensor | None,
) -> History:
    with _threads_for(model):
        return fit(
            model,
            guide,
            (x, y),
            lr=recipe.lr,
            device=recipe.device,
            progress=recipe.progress,
            seed=seed,
            engine="compiled",
            sample_weight=weight,
            **recipe.options(guide, len(x), _constant_nll(model, y, seed, weight)),
        )


def _as_prior(guide: Any) -> Prior:
    try:
        return from_guide(guide)
    except TypeError as error:  # as of an ensemble
        kind = type(guide).__name__
        raise TypeError(f"guide must have Normal marginals to be learned on, got {kind}") from error


def _start_from(guide: Any, before: Any) -> None:
    """Lets a guide start from another one's values, where both have a parameter."""
    if isinstance(guide, nn.Module):
        own, theirs = guide.state_dict(), before.state_dict()
        shared = {
            name: value
            for name, value in theirs.items()
            if name in own and own[name].shape == value.shape
        }
        guide.load_state_dict(own | shared)


def _update_noise(
    after: FittedPosterior,
    num_before: float,
    x: Tensor,
    y: Tensor,
    seed: int,
    weight: Tensor | None,
) -> None:
    """Updates the running estimate of a Gaussian's noise, if it is one."""
    raw = getattr(after.model.likelihood, "scale_unconstrained", None)  # its logarithm
    if type(after.model.likelihood) is not Gaussian or not isinstance(raw, nn.Parameter):
        return
    means: Tensor = after.predict(x, _NOISE_DRAWS, seed).sample_means  # type: ignore[union-attr]
    squares = (y.to(means.device) - means).square().mean(0)  # [n, targets]
    here = (squares if weight is None else weight.to(squares).unsqueeze(1) * squares).sum(0)
    variance = (num_before * (2 * raw.detach()).exp() + here) / after.num_seen
    raw.detach().copy_(0.5 * variance.log())
