# SPDX-License-Identifier: Apache-2.0
"""Observation distributions with log-rates, distribution functions and digits that torch's lack.

Where terms far larger than their sum cancel, these compute in float64: observations are few.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from pyro import distributions as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from pyro_bbb.distributions.summed_event import HALF_LOG_2PI


class Stacked(dist.TorchDistribution):
    """Distributions of one family, one for each draw, as one of batch shape ``[*draws, *batch]``.

    Args:
        parts: the distributions, of equal shape.
        draws: shape of the draws.
    """

    arg_constraints: Any = {}
    support: Any = property(lambda self: self.parts[0].support)
    logits: Any = property(lambda self: self._stack([p.logits for p in self.parts]))
    mean: Any = property(lambda self: self._stack([p.mean for p in self.parts]))
    variance: Any = property(lambda self: self._stack([p.variance for p in self.parts]))
    stddev: Any = property(lambda self: self._stack([p.stddev for p in self.parts]))

    def __init__(self, parts: list[Any], draws: torch.Size) -> None:
        self.parts: list[Any] = parts
        self.draws: torch.Size = draws
        shape, event_shape = parts[0].batch_shape, parts[0].event_shape
        super().__init__(draws + shape, event_shape, validate_args=False)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        shape = torch.Size(sample_shape)
        return self._stack([p.sample(shape) for p in self.parts], len(shape))

    def log_prob(self, value: Tensor) -> Tensor:
        return self._stack([p.log_prob(row) for p, row in self._with_rows(value)])

    def cdf(self, value: Tensor) -> Tensor:
        return self._stack([_cdf(p, row) for p, row in self._with_rows(value)])

    def _with_rows(self, value: Tensor) -> Iterable[tuple[Any, Tensor]]:
        shape = self.batch_shape[len(self.draws) :] + self.event_shape  # of one draw
        return zip(self.parts, value.expand(self.draws + shape).reshape(-1, *shape), strict=True)

    def _stack(self, values: list[Tensor], dim: int = 0) -> Tensor:
        return torch.stack(values, dim).unflatten(dim, self.draws)


def stack_draws(parts: list[Any]) -> Any:
    """Return the distributions of S draws as one; Normals and Student's t keep their family."""
    family = type(parts[0])
    if family not in LOCATION_SCALE:
        return Stacked(parts, torch.Size([len(parts)]))
    names = family.arg_constraints
    return family(**{name: torch.stack([getattr(p, name) for p in parts]) for name in names})


def family_of(distribution: Any) -> str:
    """Return the name of a distribution's class, of stacked ones theirs."""
    return type(getattr(distribution, "parts", [distribution])[0]).__name__


def _cdf(distribution: Any, value: Tensor) -> Tensor:
    support = distribution.support
    low = torch.as_tensor(getattr(support, "lower_bound", -math.inf)).to(value)
    high = torch.as_tensor(getattr(support, "upper_bound", math.inf)).to(value)
    cdf: Tensor = distribution.cdf(value.maximum(low).minimum(high))
    return cdf.where(value >= low, 0.0)


class Categorical(dist.Categorical):
    """Categorical by logits ``[..., classes]``, in the memory of one log-softmax.

    Torch's would hold two tensors of that size, and lose digits of large logits.
    """

    def __init__(self, logits: Tensor, validate_args: bool | None = None) -> None:
        self._param = logits.log_softmax(-1)
        self.logits: Any = self._param
        self._num_events = logits.shape[-1]
        Distribution.__init__(self, logits.shape[:-1], validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Categorical:
        return super().expand(batch_shape, self._get_checked_instance(Categorical, _instance))


class Normal(dist.Normal):
    """Normal whose density needs no square of the scale, which soon under- or overflows."""

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        z = (value - self.loc) / self.scale
        return -0.5 * z.square() - self.scale.log() - HALF_LOG_2PI


class LogRatePoisson(dist.Poisson):
    """Poisson by the logarithm of its rate, exact where the rate itself under- or overflows."""

    def __init__(self, log_rate: Tensor) -> None:
        self.log_rate = log_rate
        super().__init__(log_rate.exp(), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> LogRatePoisson:
        return LogRatePoisson(self.log_rate.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        count, log_rate = value.double(), self.log_rate.double()
        log_prob = count * log_rate - log_rate.exp() - torch.lgamma(count + 1)
        return log_prob.to(self.log_rate.dtype)

    def cdf(self, value: Tensor) -> Tensor:
        count = value.floor()
        cdf = torch.special.gammaincc((count + 1).clamp(min=1), self.rate)
        return cdf.where(count >= 0, 0.0)


class NegativeBinomial(dist.NegativeBinomial):
    """Negative binomial by ``total_count`` r > 0 and ``logits`` = log(mean / r)."""

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        count, r, logits = value.double(), self.total_count.double(), self.logits.double()
        of_count = torch.lgamma(count + r) - torch.lgamma(r) - torch.lgamma(count + 1)
        log_prob = of_count + count * logsigmoid(logits) + r * logsigmoid(-logits)
        return log_prob.to(self.logits.dtype)

    def cdf(self, value: Tensor) -> Tensor:
        from scipy.special import betainc, betaincc  # slow to import

        tensors = torch.broadcast_tensors(value.floor(), self.total_count, self.logits.double())
        count, r, logits = (x.detach().double().cpu() for x in tensors)
        p, q = logits.sigmoid().numpy(), (-logits).sigmoid().numpy()
        above = count.clamp(min=0).numpy() + 1  # the functions' domain; counts below 0 have 0
        # 1 - I_p(k + 1, r) = I_{1-p}(r, k + 1), by the smaller of p and 1 - p
        low, high = betaincc(above, r.numpy(), p), betainc(r.numpy(), above, q)
        cdf = torch.as_tensor(low).where(logits < 0, torch.as_tensor(high))
        return cdf.where(count >= 0, 0.0).to(self.logits)


class _StudentCDF(Function):
    """Distribution function of the standard Student's t, by scipy; differentiable in z only."""

    @staticmethod
    def forward(ctx: Any, df: Tensor, z: Tensor) -> Tensor:
        from scipy.special import stdtr  # slow to import

        ctx.save_for_backward(df, z)
        return torch.as_tensor(stdtr(df.cpu().numpy(), z.cpu().numpy())).to(z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        df, z = ctx.saved_tensors
        return None, grad * dist.StudentT(df, validate_args=False).log_prob(z).exp()


class StudentT(dist.StudentT):
    """Student's t with the cumulative distribution function, differentiable but for ``df``."""

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        df, z = self.df.double(), (value.double() - self.loc) / self.scale
        half = 0.5 * (df + 1)
        of_df = torch.lgamma(half) - torch.lgamma(0.5 * df) - 0.5 * (df * math.pi).log()
        log_prob = of_df - half * torch.log1p(z.square() / df) - self.scale.log()
        return log_prob.to(self.loc.dtype)

    def cdf(self, value: Tensor) -> Tensor:
        df, z = torch.broadcast_tensors(self.df.detach(), (value - self.loc) / self.scale)
        cdf: Tensor = _StudentCDF.apply(df, z)
        return cdf.to(self.loc)


# Families that stay the same under a change of the targets' unit: ours, Pyro's and torch's classes
LOCATION_SCALE = {*Normal.__mro__[:3], *StudentT.__mro__[:3]}


class Observed(dist.Independent):
    """Observations of which some entries do not count.

    Args:
        observation: the distribution of all entries, with an event for each row.
        counted: bool ``[n, ...]``, true where an entry counts.
    """

    def __init__(self, observation: Any, counted: Tensor) -> None:
        self.counted = counted
        super().__init__(observation.base_dist, observation.reinterpreted_batch_ndims)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Observed:
        plain = dist.Independent(self.base_dist, self.reinterpreted_batch_ndims)
        return Observed(plain.expand(batch_shape), self.counted)

    def log_prob(self, value: Tensor) -> Tensor:
        log_prob = self.base_dist.log_prob(value).where(self.counted, 0.0)
        return log_prob.flatten(len(self.batch_shape)).sum(-1) if self.event_shape else log_prob


def counted(y: Tensor, ignored: Any) -> Tensor | None:
    """Entries of targets other than an ignored label, or than ``"nan"``; ``None`` for all."""
    if ignored is None:
        return None
    return ~y.isnan() if ignored == "nan" else y.ne(ignored)
