# SPDX-License-Identifier: Apache-2.0
r"""Expected log-densities under a Normal posterior of a layer, in closed form.

With outputs $z \sim N(m, v)$, elementwise, an observation's expected log-likelihood is the
log-density at other arguments, less a term of the variance:

| family | $E \ln p(y \mid z)$ |
|---|---|
| Normal | $\ln N(y \mid m, \sigma^2) - v / 2\sigma^2$ |
| Poisson | $\ln\mathrm{Poisson}(y \mid e^{m + v/2}) - y v / 2$ |
| Categorical | $\geq \ln\mathrm{softmax}(m + v/2)_y - v_y / 2$ |
| Bernoulli | $\geq \ln\mathrm{Bernoulli}(y \mid m + v/2) - y v / 2$ |

The first two are exact. The others are Jensen's bound $E \ln\sum_k e^{z_k} \leq \ln\sum_k e^{m_k +
v_k/2}$ (Harrison et al. 2024, "Variational Bayesian Last Layers", arXiv:2404.11599, equations 9 and
16, here without noise on the logits), exact where v is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from pyro import distributions as dist
from torch import Size, Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributions import Distribution, Normal, constraints, register_kl

from pyro_bbb.distributions import observation
from pyro_bbb.distributions.summed_event import HALF_LOG_2PI, innermost


class AtMean(dist.TorchDistribution):
    r"""Jointly Normal weights, whose draw is their mean and whose log-density is its expectation.

    It has what an ELBO in closed form takes from a posterior: $E \ln q$, and the KL from a prior of
    independent Normals. Both are sums over columns, so that W and b are one of these each.

    Args:
        loc: means of W ``[out, in]``, or of b ``[out]``.
        scale: $\sigma$, ``[k, in]`` or ``[k]``; k is 1 for all rows, or their number.
        lower: rows of U, strictly lower triangular, ``[k, in, in]`` or ``[k, in]``. The covariance
            of a row is $L L^\top$ with $L = \mathrm{diag}(\sigma)(I + U)$.
    """

    arg_constraints = {}
    support = constraints.real
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, lower: Tensor) -> None:
        self.loc, self.scale, self.lower = loc, scale, lower
        super().__init__(Size(), loc.shape, validate_args=False)

    @property
    def variance(self) -> Tensor:
        """Marginal variances, of the shape of the means."""
        variance = self.scale.square() * (1 + self.lower.square().sum(-1))
        return variance.expand_as(self.loc)

    def expand(self, batch_shape: Any, _instance: Any = None) -> AtMean:
        """Itself: there is one draw."""
        return self

    def rsample(self, sample_shape: Any = Size()) -> Tensor:
        """The mean."""
        return self.loc

    def log_prob(self, value: Tensor) -> Tensor:
        r"""$E \ln q$ in nats, whatever the value."""
        log_scale = self.scale.log().sum() * (len(self.loc) / len(self.scale))
        return -log_scale - self.loc.numel() * (0.5 + HALF_LOG_2PI)


@register_kl(AtMean, Distribution)
def _kl_at_mean(q: AtMean, p: Distribution) -> Tensor:
    """KL[q || p] in nats, of `LastLayerKL`."""
    normal: Any = innermost(p)
    if not isinstance(normal, Normal):
        raise ValueError(
            f"the KL in closed form needs a Normal prior of the head, such as 'fan_in_normal', got "
            f"{type(normal).__name__}; or draw weights by fit(loss='trace')"
        )
    prior = normal.loc.expand_as(q.loc), normal.scale.expand_as(q.loc)
    kl: Tensor = LastLayerKL.apply(q.loc, q.scale, q.lower, *prior)[0]
    return kl


class ExpectedObservation(dist.TorchDistribution):
    """Observations whose log-density is its expectation, or bound, over uncertain outputs.

    Args:
        family: the distribution at the outputs' means, with an event for each row.
        variance: variances of the outputs, of their shape.

    Raises:
        ValueError: there is no closed form for the family, or an output is no argument of it.
    """

    arg_constraints = {}

    def __init__(self, family: Any, variance: Tensor) -> None:
        self.family, self.variance_of_outputs = family, variance
        super().__init__(family.batch_shape, family.event_shape, validate_args=False)
        base = innermost(family)
        shape = next((_outputs(base).shape for kind in _KINDS if isinstance(base, kind)), None)
        if shape != variance.shape:
            raise ValueError(
                "the expected log-likelihood needs Gaussian, Categorical, Bernoulli or Poisson "
                f"observations, got {type(base).__name__} of outputs {list(variance.shape)}; or "
                "draw weights by fit(loss='trace')"
            )

    def log_prob(self, value: Tensor) -> Tensor:
        """Expected log-density in nats, ``[n]``."""
        each = expected_log_prob(innermost(self.family), self.variance_of_outputs, value)
        if isinstance(self.family, observation.Observed):
            each = each.where(self.family.counted, 0.0)
        return each.reshape(*self.batch_shape, -1).sum(-1)


_KINDS = (Normal, dist.Categorical, dist.Bernoulli, observation.LogRatePoisson)


def _outputs(base: Any) -> Tensor:
    """The outputs among a family's arguments."""
    if isinstance(base, Normal):
        return base.loc
    outputs: Tensor = base.log_rate if hasattr(base, "log_rate") else base.logits
    return outputs


def expected_log_prob(base: Any, variance: Tensor, value: Tensor) -> Tensor:
    """The table at the top of the module, elementwise (of classes: for each label).

    Args:
        base: the family at the outputs' means.
        variance: their variances, of the outputs' shape.
        value: observations.
    """
    if isinstance(base, Normal):
        return base.log_prob(value) - 0.5 * variance / base.scale.square()
    shifted = _outputs(base) + 0.5 * variance
    if isinstance(base, dist.Categorical):
        label = value.long().unsqueeze(-1)
        log_probs = shifted.log_softmax(-1) - 0.5 * variance
        return log_probs.gather(-1, label).squeeze(-1)
    if isinstance(base, dist.Bernoulli):
        return value * _outputs(base) - torch.nn.functional.softplus(shifted)
    return observation.LogRatePoisson(shifted).log_prob(value) - 0.5 * value * variance


class LastLayerKL(Function):
    r"""KL from independent Normals $N(m, s^2)$ in nats, summed over the weights W, or b given W.

    $$\tfrac12\sum_j \frac{(\mu_j - m_j)^2 + \sigma_j^2 (1 + \lVert U_j\rVert^2)}{s_j^2}
      + \sum_j \ln\frac{s_j}{\sigma_j} - \tfrac d2$$

    Its arguments are $\mu$ ``[out, in]``, $\sigma$ ``[k, in]``, U ``[k, in, in]``, m and s like
    $\mu$; or ``[out]``, ``[k]``, ``[k, in]``.
    """

    @staticmethod
    def forward(
        loc: Tensor, scale: Tensor, lower: Tensor, prior_loc: Tensor, prior_scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        distance, rows = loc - prior_loc, lower.square().sum(-1).add_(1)
        spread = torch.addcmul(scale.square() * rows, distance, distance)  # E (w - m)^2
        of_moments = (spread / prior_scale.square()).sum().mul_(0.5)
        log_scale = scale.log().sum().mul_(len(loc) / len(scale))
        kl = of_moments.add_(prior_scale.log().sum()).sub_(log_scale).sub_(0.5 * loc.numel())
        return kl, rows, spread

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        loc, scale, lower, prior_loc, prior_scale, rows, spread = ctx.saved_tensors
        precision = prior_scale.square().reciprocal()
        of_loc = grad * ((loc - prior_loc) * precision)
        shared = precision.sum(0, keepdim=True) if len(scale) < len(loc) else precision
        slope = grad * (shared * scale)  # of half the variance over sigma
        of_scale = torch.addcmul(-grad * (len(loc) / len(scale)) / scale, slope, rows)
        of_lower = lower * (slope * scale).unsqueeze(-1)
        of_prior_loc = of_prior_scale = None
        if ctx.needs_input_grad[3]:
            of_prior_loc = -of_loc
        if ctx.needs_input_grad[4]:
            of_prior_scale = grad * (1 - spread * precision) / prior_scale
        return of_loc, of_scale, of_lower, of_prior_loc, of_prior_scale
