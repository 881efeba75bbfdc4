"""Families of observations with what torch's lack: a log-rate, distribution functions."""

from __future__ import annotations

from typing import Any

import torch
from pyro import distributions as dist
from scipy.special import stdtr
from torch import Tensor


class LogRatePoisson(dist.Poisson):
    """Poisson by its log-rate, exact where the rate itself under- or overflows.

    Args:
        log_rate: logarithm of the expected count, any shape.
    """

    def __init__(self, log_rate: Tensor) -> None:
        self.log_rate = log_rate
        super().__init__(log_rate.exp(), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> LogRatePoisson:
        """The same distribution with a larger batch shape."""
        return LogRatePoisson(self.log_rate.expand(batch_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probability of the counts in nats, elementwise."""
        return value * self.log_rate - self.rate - torch.lgamma(value + 1)

    def cdf(self, value: Tensor) -> Tensor:
        """Probability of a count at most ``value``, through the incomplete gamma function."""
        count = value.floor()
        cdf = torch.special.gammaincc((count + 1).clamp(min=1), self.rate)
        return cdf.where(count >= 0, 0.0)


class StudentT(dist.StudentT):
    """Student's t with the cumulative distribution function (scipy's, without gradient)."""

    def cdf(self, value: Tensor) -> Tensor:
        """Probability of a draw at most ``value``, elementwise."""
        z = (value - self.loc) / self.scale
        df, z = (x.detach().cpu().numpy() for x in torch.broadcast_tensors(self.df, z))
        return torch.as_tensor(stdtr(df, z)).to(value)
