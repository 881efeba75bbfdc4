# SPDX-License-Identifier: Apache-2.0
"""Parameters of the estimators that name an object, resolved to it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from numbers import Real
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_bbb._utils.validation import count, positive
from pyro_bbb.distributions import map_tensors
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
from pyro_bbb.priors import Function, Prior, as_prior

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
# from the number of targets to the likelihood, in units of the targets' standard deviation
NOISES: dict[str, Callable[[int], Likelihood]] = {
    "learned": lambda targets: Gaussian.learned(torch.ones(targets)),
    "latent": lambda targets: Gaussian(dist.HalfNormal(torch.ones(targets))),
    "heteroscedastic": lambda _: HeteroscedasticGaussian(),
    "student_t": lambda targets: StudentT(4.0, dist.HalfNormal(torch.ones(targets))),
    "poisson": lambda _: Poisson(),
    "negative_binomial": lambda targets: NegativeBinomial.learned(torch.ones(targets)),
}


def named(name: str, value: Any, table: dict[str, Any]) -> Any:
    """Return the function that a parameter names or is."""
    if isinstance(value, str) and value in table:
        return table[value]
    if isinstance(value, str) or not callable(value):
        wrong = ValueError if isinstance(value, str) else TypeError
        raise wrong(f"{name} must be callable or one of {sorted(table)}, got {value!r}")
    return value


def hidden_layers(sizes: Any) -> list[int]:
    """Return the hidden layers' sizes from one number or several."""
    several = isinstance(sizes, Iterable) and not isinstance(sizes, str | bytes)
    return [count("hidden_sizes", size) for size in (sizes if several else [sizes])]


def make_prior(prior: Any, dtype: torch.dtype) -> Prior:
    """Return a copy of a prior, or of the default, that returns distributions in a precision."""
    copied = copy.deepcopy(as_prior(prior))
    for submodule in copied.modules():
        if isinstance(submodule, Function):
            submodule.function = partial(_in_precision, dtype, submodule.function)
    return copied


def _in_precision(dtype: torch.dtype, function: Callable[..., Any], *args: Any) -> Any:
    made = function(*args)
    return map_tensors(made, lambda x: x.to(dtype)) if isinstance(made, Distribution) else made


def make_noise(noise: Any, unit: Tensor) -> Likelihood:
    """Return the likelihood of a regression whose targets have standard deviations ``unit``."""
    if isinstance(noise, Likelihood):
        return copy.deepcopy(noise)
    if isinstance(noise, Distribution):
        return Gaussian(copy.deepcopy(noise))
    if isinstance(noise, Real) and not isinstance(noise, bool):
        return Gaussian(positive("noise", noise) / unit)
    if isinstance(noise, str) and noise in NOISES:
        return NOISES[noise](len(unit))
    forms = f"a number, a distribution, a likelihood or one of {sorted(NOISES)}"
    wrong = ValueError if isinstance(noise, str) else TypeError
    raise wrong(f"noise must be {forms}, got {noise!r}")


def with_priors(likelihood: Likelihood) -> Likelihood:
    """Replace point estimates of a Gaussian's or a negative binomial's noise by latent ones."""
    missing: Any = {} if likelihood.ignored is None else {"missing": "ignore"}
    learned = any(x.requires_grad for x in likelihood.parameters())
    if learned and type(likelihood) is Gaussian:
        return Gaussian(dist.HalfNormal(likelihood.scale.detach()), **missing)
    if learned and type(likelihood) is NegativeBinomial:  # 95 % within 0.1 to 400 times the start
        start = likelihood.total_count.detach().log() + 2.0
        return NegativeBinomial(dist.LogNormal(start, torch.full_like(start, 2.0)), **missing)
    return likelihood


def constant_outputs(
    likelihood: Likelihood, y: Tensor, outputs: int, weight: Tensor | None
) -> Tensor:
    """Return the outputs ``[outputs]`` that fit all targets without inputs; 0 for real targets.

    They are log-means, log-odds or log-frequencies, estimated by the posterior mean under Jeffreys'
    prior, which is finite also for events that never occur.
    """
    family = type(likelihood)
    weight = torch.ones(len(y), dtype=torch.double) if weight is None else weight.double()
    if family is Categorical:
        logs = (torch.bincount(y, weight, outputs) + 0.5).log()
        return logs - logs[0]  # exactly 0 for classes of equal size
    if family in (Poisson, NegativeBinomial):
        return ((weight @ y.double() + 0.5) / weight.sum()).log()
    if family is Bernoulli:
        return ((weight @ y.double() + 0.5) / (weight.sum() + 1)).logit()
    return torch.zeros(outputs)
