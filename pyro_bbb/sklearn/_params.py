# SPDX-License-Identifier: Apache-2.0
"""Hyperparameters of the estimators, resolved to the parts of a model.

| parameter | names |
|---|---|
| ``activation`` | `ACTIVATIONS` |
| ``prior`` | `pyro_bbb.priors.PRIORS` |
| ``noise`` | `NOISES` |
| ``guide`` | `pyro_bbb.guides.GUIDES` |
| ``estimator`` | `pyro_bbb.estimators.ESTIMATORS` |
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from numbers import Real
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_bbb import guides
from pyro_bbb._utils.validation import as_number, at_least_zero, count, one_of, positive
from pyro_bbb.distributions import map_tensors
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from pyro_bbb.models import BayesianModel
from pyro_bbb.priors import FanInNormal, Function, Prior, as_prior
from pyro_bbb.sklearn._stopping import Plateau
from pyro_bbb.training import KLSchedule

_STEPS = 4000  # of training at most, where nothing is said
_WINDOW = 200  # steps over which the ELBO is averaged, where nothing is said
_LEAST_EPOCHS = 5
_BATCHES = (64, 1024)  # smallest and largest batch where its size is not given
_CHUNKS = 100  # batches per epoch, between these
INFERENCES = ("auto", "variational", "chains")
_MOST = 5000  # weights, and rows, for which "auto" samples
_GAIN = 2.5  # of the prior of chains: a gain of sqrt(2) is too smooth for gaps of some curves
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "elu": nn.ELU,
    "leaky_relu": nn.LeakyReLU,
    "softplus": nn.Softplus,
    "sigmoid": nn.Sigmoid,
}
# From the number of targets to the likelihood, whose unit is the targets' standard deviation
NOISES: dict[str, Callable[[int], Likelihood]] = {
    "learned": lambda targets: Gaussian.learned(torch.ones(targets)),
    "latent": lambda targets: Gaussian(dist.HalfNormal(torch.ones(targets))),
    "heteroscedastic": lambda _: HeteroscedasticGaussian(),
    "student_t": lambda targets: StudentT(4.0, dist.HalfNormal(torch.ones(targets))),
    "poisson": lambda _: Poisson(),
    "negative_binomial": lambda targets: NegativeBinomial.learned(torch.ones(targets)),
}


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of network and training, named as in the estimators."""

    hidden_sizes: Any
    activation: Any
    prior: Any
    default_prior: str
    inference: str
    seconds: float
    guide: Any
    estimator: str
    epochs: int | None
    batch_size: int | None
    max_epochs: int | None
    n_iter_no_change: int | None
    tol: float
    lr: float
    temperature: float
    device: Any
    progress: bool

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, as_number(value))
        _hidden(self.hidden_sizes)
        _named("activation", self.activation, ACTIVATIONS)
        _named("guide", self.guide, guides.GUIDES)
        one_of("inference", self.inference, INFERENCES)
        one_of("estimator", self.estimator, ["auto", *ESTIMATORS])
        for name in ("epochs", "max_epochs", "n_iter_no_change", "batch_size"):
            if (value := getattr(self, name)) is not None:
                count(name, value)
        at_least_zero("tol", self.tol)
        positive("seconds", self.seconds)
        positive("lr", self.lr)
        positive("temperature", self.temperature)

    @property
    def hidden(self) -> list[int]:
        """Numbers of units of the hidden layers."""
        return _hidden(self.hidden_sizes)

    def make_activation(self) -> nn.Module:
        """The module between two layers."""
        make: Callable[[], nn.Module] = _named("activation", self.activation, ACTIVATIONS)
        return make()

    def by_chains(self, sizes: list[int], rows: int) -> bool:
        """Return whether a network of such layers on so many rows is sampled by chains."""
        weights = sum((inputs + 1) * outputs for inputs, outputs in pairwise(sizes))
        small = max(weights, rows) <= _MOST and str(self.device or "cpu").startswith("cpu")
        return self.inference == "chains" or (self.inference == "auto" and small)

    def can_sample(self, model: BayesianModel) -> bool:
        """Return whether all unknowns of a model have a prior: chains train no parameters."""
        learned = [name for name, x in model.named_parameters() if x.requires_grad]
        if learned and self.inference == "chains":
            raise ValueError(
                f"inference='chains' samples, and the model has the trained parameter "
                f"{learned[0]!r}: take a prior without, or inference='variational'"
            )
        return not learned

    def make_prior(self, *, chains: bool = False) -> Prior:
        """A prior of the network's own, in double precision, or in single for chains."""
        usual = FanInNormal(_GAIN) if chains else self.default_prior
        prior = copy.deepcopy(as_prior(usual if self.prior is None else self.prior))
        for part in prior.modules():
            if isinstance(part, Function):
                part.function = partial(
                    _cast, torch.float32 if chains else torch.float64, part.function
                )
        return prior

    def make_guide(self, model: Callable[..., Any]) -> Any:
        """An untrained guide for the model."""
        return _named("guide", self.guide, guides.GUIDES)(model)

    def options(self, guide: Any, num_data: int, constant_nll: float = math.inf) -> dict[str, Any]:
        """Return the options of `fit` for a guide on so many rows; see `Plateau`."""
        return self._objective(guide) | self._length(guide, num_data, constant_nll)

    def _length(self, guide: Any, num_data: int, constant_nll: float) -> dict[str, Any]:
        """Batch size, and epochs: a fixed number, or at most some 4,000 steps up to a plateau.

        A guide that collects iterates trains for as many: at a plateau its iterates only begin.
        """
        smallest, largest = _BATCHES
        size = self.batch_size or min(max(smallest, num_data // _CHUNKS), largest)
        steps_per_epoch = math.ceil(num_data / size)
        if self.epochs:
            return {"epochs": self.epochs, "batch_size": size}
        most = self.max_epochs or max(_LEAST_EPOCHS, round(_STEPS / steps_per_epoch))
        if guides.collected(guide):
            return {"epochs": most, "batch_size": size}
        window = self.n_iter_no_change or max(1, round(_WINDOW / steps_per_epoch))
        plateau = Plateau(most, window, self.tol, constant_nll)
        schedule = {"lr_schedule": plateau, "callbacks": [plateau.callback]}
        return {"epochs": most, "batch_size": size, **schedule}

    def _objective(self, guide: Any) -> dict[str, Any]:
        """Estimator, loss and weight of the KL; the first two suit the guide."""
        factorised = type(guide) is guides.AutoSoftplusNormal
        estimator = self.estimator
        if estimator == "auto":
            estimator = "local_reparam" if factorised else "reparam"
        return {
            "estimator": estimator,
            "loss": "mean_field" if factorised else "trace",
            "kl_schedule": KLSchedule(temperature=self.temperature),
        }


def make_noise(noise: Any, unit: Tensor) -> Likelihood:
    """The likelihood of a regression whose targets have the standard deviations ``unit``.

    ``noise`` is a name of `NOISES`, or the noise's known standard deviation; or its prior or a
    likelihood, both in units of the targets' standard deviation.
    """
    if isinstance(noise, Likelihood):
        return copy.deepcopy(noise)
    if isinstance(noise, Distribution):
        return Gaussian(copy.deepcopy(noise))
    if isinstance(noise, Real) and not isinstance(noise, bool):
        return Gaussian(positive("noise", noise) / unit)
    if isinstance(noise, str) and noise in NOISES:
        return NOISES[noise](len(unit))
    kinds = f"a number, a distribution, a likelihood or one of {sorted(NOISES)}"
    wrong = ValueError if isinstance(noise, str) else TypeError
    raise wrong(f"noise must be {kinds}, got {noise!r}")


def with_priors(likelihood: Likelihood) -> Likelihood:
    """Return a likelihood of which nothing is a point estimate, as far as it is one of ours."""
    missing: Any = {} if likelihood.ignored is None else {"missing": "ignore"}
    learned = any(x.requires_grad for x in likelihood.parameters())
    if learned and type(likelihood) is Gaussian:
        return Gaussian(dist.HalfNormal(likelihood.scale.detach()), **missing)
    if learned and type(likelihood) is NegativeBinomial:  # 0.1 to 400 times the start in 95 %
        start = likelihood.total_count.detach().log() + 2.0
        return NegativeBinomial(dist.LogNormal(start, torch.full_like(start, 2.0)), **missing)
    return likelihood


def constant_outputs(
    likelihood: Likelihood, y: Tensor, outputs: int, weight: Tensor | None
) -> Tensor:
    """Return the outputs ``[outputs]`` that fit all targets without inputs; 0 for real targets.

    They are log-means, log-odds or log-frequencies, estimated by the posterior mean under Jeffreys'
    prior: finite also for what never occurs.
    """
    kind = type(likelihood)
    weight = torch.ones(len(y), dtype=torch.double) if weight is None else weight.double()
    if kind is Categorical:
        logs = (torch.bincount(y, weight, outputs) + 0.5).log()
        return logs - logs[0]  # exactly 0 for classes of equal size
    if kind in (Poisson, NegativeBinomial):
        return ((weight @ y.double() + 0.5) / weight.sum()).log()
    if kind is Bernoulli:
        return ((weight @ y.double() + 0.5) / (weight.sum() + 1)).logit()
    return torch.zeros(outputs)


def _named(name: str, value: Any, table: dict[str, Any]) -> Any:
    """The object that a parameter stands for."""
    if isinstance(value, str) and value in table:
        return table[value]
    if isinstance(value, str) or not callable(value):
        wrong = ValueError if isinstance(value, str) else TypeError
        raise wrong(f"{name} must be callable or one of {sorted(table)}, got {value!r}")
    return value


def _hidden(sizes: Any) -> list[int]:
    """Hidden sizes from a number or several."""
    if not isinstance(sizes, Iterable) or isinstance(sizes, (str, bytes)):
        sizes = [sizes]
    return [count("hidden_sizes", size) for size in sizes]


def _cast(dtype: torch.dtype, function: Callable[..., Any], *args: Any) -> Any:
    made = function(*args)
    return map_tensors(made, lambda x: x.to(dtype)) if isinstance(made, Distribution) else made
