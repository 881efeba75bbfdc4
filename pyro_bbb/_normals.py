r"""The softplus-scaled Normal of Blundell et al. (2015), section 3.2, and its divergences."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from pyro import distributions as dist
from torch import Size, Tensor
from torch.autograd import Function
from torch.distributions import Laplace, Normal, constraints, kl_divergence, register_kl

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def softplus(rho: Tensor) -> Tensor:
    r"""$\ln(1 + e^\rho)$, exact to rounding in float32 and float64 for every $\rho$."""
    return F.softplus(rho, threshold=40.0)  # e^-40 is below the rounding of float64


class SoftplusNormal(dist.Normal):
    r"""$N(\mu, \mathrm{softplus}(\rho)^2)$, the posterior of one weight (Blundell et al., 3.2).

    It remembers the noise of its latest draw: there $\ln q = -\epsilon^2/2 - \ln\sigma - \ln
    \sqrt{2\pi}$ needs neither the value nor a division by the scale.

    Args:
        loc: mean, any shape.
        rho: unconstrained scale, same shape; the standard deviation is ``softplus(rho)``.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}

    def __init__(self, loc: Tensor, rho: Tensor) -> None:
        self.rho = rho
        self._draw: tuple[Tensor, Tensor] | None = None
        super().__init__(loc, softplus(rho), validate_args=False)
        self._compact_scale = self.scale

    def expand(self, batch_shape: Any, _instance: Any = None) -> SoftplusNormal:
        """The same distribution with a larger batch shape, sharing the parameters' memory."""
        new = self._get_checked_instance(SoftplusNormal, _instance)
        new.rho, new._draw = self.rho.expand(batch_shape), None
        new._compact_scale = self._compact_scale  # one logarithm for all copies
        return super().expand(batch_shape, _instance=new)

    def rsample(self, sample_shape: Any = Size()) -> Tensor:
        r"""$\mu + \sigma\epsilon$ with standard Normal $\epsilon$, of the extended shape."""
        shape = self._extended_shape(Size(sample_shape))
        noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
        value = torch.addcmul(self.loc, self.scale, noise)
        self._draw = (value, noise)
        return value

    def sample(self, sample_shape: Any = Size()) -> Tensor:
        """As `rsample`, without gradient; not remembered, as the noise would hide the score."""
        with torch.no_grad():
            value = self.rsample(sample_shape)
        self._draw = None
        return value

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density in nats, elementwise."""
        if self._draw is not None and value is self._draw[0]:
            z = self._draw[1]
        else:
            z = (value - self.loc) / self.scale
        return torch.addcmul(-_HALF_LOG_2PI - self._compact_scale.log(), z, z, value=-0.5)


class PrunedNormal(SoftplusNormal):
    r"""`SoftplusNormal` in which entries with $\rho = -\infty$ are removed.

    A removed entry is exactly 0 and stays so in training: it has scale 0, no gradient, and
    contributes nothing to the log-density, which is that of the remaining entries.
    """

    def __init__(self, loc: Tensor, rho: Tensor) -> None:
        self.kept = rho > -math.inf
        super().__init__(loc.where(self.kept, 0.0), rho.where(self.kept, 0.0))
        self.scale = self.scale.where(self.kept, 0.0)

    def expand(self, batch_shape: Any, _instance: Any = None) -> PrunedNormal:
        """The same distribution with a larger batch shape, sharing the parameters' memory."""
        new = self._get_checked_instance(PrunedNormal, _instance)
        new.kept = self.kept.expand(batch_shape)
        super().expand(batch_shape, _instance=new)
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of the kept entries in nats, 0 for the removed ones."""
        kept = SoftplusNormal(self.loc, self.rho)
        kept._draw = self._draw
        return kept.log_prob(value).where(self.kept, 0.0)


@register_kl(SoftplusNormal, Normal)
def _kl_normal(q: SoftplusNormal, p: Normal) -> Tensor:
    r"""KL[q || p] in nats, exactly 0 for equal distributions.

    $\tfrac12(t - 1)(t + 1) - \ln t + \tfrac12 (\mu_q - \mu_p)^2 / \sigma_p^2$ with
    $t = \sigma_q / \sigma_p$: near 1 neither t - 1 nor ln t loses digits, as t^2 - 1 would.
    """
    t = q._compact_scale / _unexpanded(p.scale)
    z = (q.loc - p.loc) / p.scale
    of_scale = torch.addcmul(-t.log(), t - 1, t + 1, value=0.5)
    return torch.addcmul(of_scale, z, z, value=0.5)


@register_kl(SoftplusNormal, Laplace)
def _kl_laplace(q: SoftplusNormal, p: Laplace) -> Tensor:
    r"""KL[q || p] in nats: $E_q|w - m| / b + \ln 2b - \ln\sigma - \tfrac12\ln 2\pi e$."""
    mean_distance: Tensor = _MeanDistance.apply(q.loc - p.loc, q.scale)
    log_ratio = _unexpanded(p.scale).log() - q._compact_scale.log()
    return mean_distance / p.scale + log_ratio + (math.log(2) - 0.5 - _HALF_LOG_2PI)


@register_kl(PrunedNormal, Normal)
@register_kl(PrunedNormal, Laplace)
def _kl_pruned(q: PrunedNormal, p: Normal | Laplace) -> Tensor:
    """KL[q || p] of the kept entries in nats; 0 for the removed ones."""
    return kl_divergence(SoftplusNormal(q.loc, q.rho), p).where(q.kept, 0.0)


class _MeanDistance(Function):
    r"""$E|x| = \sigma\sqrt{2/\pi}\,e^{-r^2/2} + d\,\mathrm{erf}(r/\sqrt2)$, $r = d/\sigma$.

    That is for $x \sim N(d, \sigma^2)$. The derivatives, $\mathrm{erf}(r/\sqrt2)$ in d and
    $\sqrt{2/\pi}\,e^{-r^2/2}$ in $\sigma$, are finite also where those of the terms are not.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(d: Tensor, scale: Tensor) -> Tensor:
        in_d, in_scale = _distance_slopes(d, scale)
        return torch.addcmul(d * in_d, scale, in_scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        d, scale = ctx.saved_tensors
        in_d, in_scale = _distance_slopes(d, scale)
        return (grad * in_d).sum_to_size(d.shape), (grad * in_scale).sum_to_size(scale.shape)


def _distance_slopes(d: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    r = d / scale
    return torch.erf(math.sqrt(0.5) * r), math.sqrt(2 / math.pi) * torch.exp(-0.5 * r.square())


def _unexpanded(x: Tensor) -> Tensor:
    """A tensor with the dimensions that only repeat it reduced to one: less work per weight."""
    return x[tuple(slice(0, 1) if step == 0 else slice(None) for step in x.stride())]
