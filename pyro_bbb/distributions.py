r"""Distributions of weights.

The scale mixture prior and the softplus-scaled Normal of Blundell et al. (2015), "Weight
Uncertainty in Neural Networks" (equation 7 and section 3.2), written so that their log-densities
are exact in single precision and cost few passes over millions of weights.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from pyro import distributions as dist
from torch import Size, Tensor
from torch.autograd import Function
from torch.distributions import Distribution, Transform, constraints, kl_divergence, register_kl

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def softplus(rho: Tensor) -> Tensor:
    r"""$\ln(1 + e^\rho)$, exact to rounding in float32 and float64 for every $\rho$."""
    return F.softplus(rho, threshold=40.0)  # e^-40 is below the rounding of float64


class _LogMixture(Function):
    r"""$c - z^2 + \mathrm{softplus}(\delta - \kappa z^2)$ with $z = hw$, and its derivatives.

    This is $\ln(e^{a} + e^{b})$ for the two quadratics $a = c - z^2$ and $b = a + \delta - \kappa
    z^2$. With the wider component as $a$, $b - a \le \delta$, so that no large numbers cancel.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, h: Tensor, c: Tensor, delta: Tensor, kappa: Tensor) -> Tensor:
        z2 = (w * h).square()
        return F.softplus(delta - kappa * z2, threshold=40.0).sub_(z2).add_(c)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, h, c, delta, kappa = ctx.saved_tensors
        z = w * h
        r = torch.sigmoid(delta - kappa * z.square())  # share of the narrower component
        slope = grad * z * (-2 * (1 + kappa * r))  # d/dz
        parts = (
            lambda: slope * h,
            lambda: slope * w,
            lambda: grad,
            lambda: grad * r,
            lambda: -grad * r * z.square(),
        )
        return tuple(
            part().sum_to_size(x.shape) if needed else None
            for part, x, needed in zip(
                parts, (w, h, c, delta, kappa), ctx.needs_input_grad, strict=True
            )
        )


class ScaleMixtureNormal(dist.TorchDistribution):
    r"""Mixture of two zero-mean Normals, $\pi N(0, \sigma_1^2) + (1 - \pi) N(0, \sigma_2^2)$.

    The prior of Blundell et al. (2015), equation 7. Its support is the whole real line, so every
    Pyro autoguide and NUTS accept it. The log-density is differentiable in the value and in
    tensor-valued parameters.

    Args:
        pi: weight of the first component, in [0, 1].
        sigma1: standard deviation of the first component, positive.
        sigma2: standard deviation of the second component, positive. The three broadcast
            together to the batch shape.
        validate_args: whether to check arguments and values; with ``None`` arguments are checked,
            and values where torch's global setting says so.

    Raises:
        ValueError: a parameter is outside its domain.
        TypeError: a parameter is neither a number nor a tensor.
    """

    arg_constraints = {
        "pi": constraints.unit_interval,
        "sigma1": constraints.positive,
        "sigma2": constraints.positive,
    }
    support = constraints.real
    has_rsample = False

    def __init__(
        self,
        pi: float | Tensor,
        sigma1: float | Tensor,
        sigma2: float | Tensor,
        validate_args: bool | None = None,
    ) -> None:
        pi, sigma1, sigma2 = _as_tensors(pi=pi, sigma1=sigma1, sigma2=sigma2)
        if validate_args is not False:  # not torch's global switch, which compiling turns off
            _require("pi", pi, (pi >= 0) & (pi <= 1), "in [0, 1]")
            _require("sigma1", sigma1, (sigma1 > 0) & sigma1.isfinite(), "positive and finite")
            _require("sigma2", sigma2, (sigma2 > 0) & sigma2.isfinite(), "positive and finite")
        self._coefficients = _mixture_coefficients(pi, sigma1, sigma2)
        self.pi, self.sigma1, self.sigma2 = torch.broadcast_tensors(pi, sigma1, sigma2)
        super().__init__(self.pi.shape, validate_args=False)
        if validate_args is not None:
            self._validate_args = validate_args

    def expand(self, batch_shape: Any, _instance: Any = None) -> ScaleMixtureNormal:
        """The same distribution with a larger batch shape, sharing the parameters' memory."""
        new = self._get_checked_instance(ScaleMixtureNormal, _instance)
        batch_shape = Size(batch_shape)
        for name in self.arg_constraints:
            setattr(new, name, getattr(self, name).expand(batch_shape))
        new._coefficients = self._coefficients  # unexpanded: one logarithm, not one per weight
        super(ScaleMixtureNormal, new).__init__(batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        """Zero, of the batch shape."""
        return torch.zeros_like(self.pi)

    @property
    def variance(self) -> Tensor:
        r"""$\pi\sigma_1^2 + (1 - \pi)\sigma_2^2$."""
        return self.pi * self.sigma1.square() + (1 - self.pi) * self.sigma2.square()

    def sample(self, sample_shape: Any = Size()) -> Tensor:
        """Independent draws, ``[*sample_shape, *batch_shape]``, one component choice per entry."""
        shape = self._extended_shape(Size(sample_shape))
        with torch.no_grad():
            first = torch.bernoulli(self.pi.expand(shape)).bool()
            noise = torch.randn(shape, dtype=self.pi.dtype, device=self.pi.device)
            return noise * torch.where(first, self.sigma1, self.sigma2)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density in nats, elementwise; exact for every finite value."""
        if self._validate_args:
            self._validate_sample(value)
        log_prob: Tensor = _LogMixture.apply(value, *self._coefficients)
        return log_prob.expand(torch.broadcast_shapes(log_prob.shape, self.batch_shape))

    def cdf(self, value: Tensor) -> Tensor:
        """Probability of a draw at most ``value``, elementwise."""
        if self._validate_args:
            self._validate_sample(value)
        first = torch.special.ndtr(value / self.sigma1)
        return self.pi * first + (1 - self.pi) * torch.special.ndtr(value / self.sigma2)


def _mixture_coefficients(pi: Tensor, sigma1: Tensor, sigma2: Tensor) -> tuple[Tensor, ...]:
    """The h, c, delta, kappa of `_LogMixture`; its reference is the wider possible component."""
    second = ((sigma2 > sigma1) & (pi < 1)) | (pi == 0)
    wide, narrow = torch.where(second, sigma2, sigma1), torch.where(second, sigma1, sigma2)
    share = torch.where(second, 1 - pi, pi)
    log_ratio = wide.log() - narrow.log()
    h = math.sqrt(0.5) / wide
    c = share.log() - wide.log() - _HALF_LOG_2PI
    kappa = (wide - narrow) / narrow * (wide / narrow + 1)  # (wide/narrow)^2 - 1
    return h, c, torch.log1p(-share) - share.log() + log_ratio, kappa


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


@register_kl(PrunedNormal, dist.Normal)
def _kl_pruned_normal(q: PrunedNormal, p: dist.Normal) -> Tensor:
    """KL[q || p] of the kept entries in nats; 0 for the removed ones."""
    return kl_divergence(SoftplusNormal(q.loc, q.rho), p).where(q.kept, 0.0)


def map_tensors(distribution: Distribution, fn: Callable[[Tensor], Tensor]) -> Distribution:
    """A copy of a distribution (nested ones too) with ``fn`` applied to every tensor inside."""
    return _map_tensors(distribution, fn, {})


def _map_tensors(x: Any, fn: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> Any:
    if isinstance(x, Tensor):
        return fn(x)
    if isinstance(x, (list, tuple)):
        return type(x)(_map_tensors(item, fn, memo) for item in x)
    if isinstance(x, weakref.ref):
        return None  # some versions of torch remember a transform's inverse so
    if not isinstance(x, (Distribution, Transform)):
        return x
    if id(x) not in memo:  # others hold it, and it holds the transform
        memo[id(x)] = new = copy.copy(x)
        new.__dict__.update({key: _map_tensors(value, fn, memo) for key, value in vars(x).items()})
    return memo[id(x)]


def without_validation(distribution: Distribution) -> Distribution:
    """A copy that never validates values: checks cost passes, and fail inside ``torch.vmap``."""
    new = copy.copy(distribution)
    for key, value in vars(distribution).items():
        if isinstance(value, Distribution):
            setattr(new, key, without_validation(value))
    new._validate_args = False  # last, as some pass it on to the distribution inside
    return new


def _as_tensors(**parameters: float | Tensor) -> list[Tensor]:
    """Numbers and tensors to floating tensors of one dtype and device."""
    for name, value in parameters.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
            raise TypeError(f"{name} must be a number or a tensor, got {value!r}")
    like = [x for x in parameters.values() if isinstance(x, Tensor) and x.is_floating_point()]
    dtype = like[0].dtype if like else torch.get_default_dtype()
    device = like[0].device if like else None
    return [torch.as_tensor(x, dtype=dtype, device=device) for x in parameters.values()]


def _require(name: str, value: Tensor, valid: Tensor, expected: str) -> None:
    if not valid.all():
        offender = value.expand(valid.shape)[~valid].flatten()[0].item()
        raise ValueError(f"{name} must be {expected}, got {offender}")
