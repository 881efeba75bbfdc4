# SPDX-License-Identifier: Apache-2.0
r"""The scale mixture prior of Blundell et al. (2015), "Weight Uncertainty in Neural Networks".

Equation 7 for one weight:

$$\ln p(w) = \ln\big(\pi N(w \mid 0, \sigma_1^2) + (1 - \pi) N(w \mid 0, \sigma_2^2)\big)
  = \ln(e^a + e^b)$$

The quadratic $a = c - z^2$, $z = w / (\sqrt 2\,\sigma)$, is the weighted log-density of the wider
component and $b = a + t$ that of the narrower one, with the log-odds

$$t = \delta - \kappa z^2, \qquad \delta = b(0) - a(0), \qquad
  \kappa = \sigma_\text{wide}^2 / \sigma_\text{narrow}^2 - 1$$

No large numbers cancel in $a + \mathrm{softplus}(t) = b + \mathrm{softplus}(-t)$, so the density is
exact in single precision. `log_mixture` is the formula for tensors, `LogMixture` its fast form
where the parameters are numbers: a third of the passes over the weights.
"""

from __future__ import annotations

import math
import warnings
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from pyro import distributions as dist
from torch import Size, Tensor
from torch.autograd import Function
from torch.distributions import constraints

from pyro_bbb._utils.memory import pieces
from pyro_bbb._utils.pages import read_on
from pyro_bbb._utils.validation import as_float, as_number
from pyro_bbb.distributions.summed_event import HALF_LOG_2PI, Event, to_event, total

Numbers: TypeAlias = tuple[float, float, float]


class ScaleMixtureNormal(dist.TorchDistribution):
    r"""Mixture of two zero-mean Normals, $\pi N(0, \sigma_1^2) + (1 - \pi) N(0, \sigma_2^2)$.

    The prior of Blundell et al. (2015), equation 7. Its support is the whole real line, so every
    Pyro autoguide and NUTS accept it. The log-density is differentiable in the value and in
    tensor-valued parameters. (At $\pi$ of exactly 0 or 1 its derivative in $\pi$ is NaN; to learn
    the weight, see `from_logit`.)

    Args:
        pi: weight of the first component, in [0, 1].
        sigma1: standard deviation of the first component, positive.
        sigma2: standard deviation of the second component, positive. The three broadcast
            together to the batch shape.
        validate_args: whether to check arguments and values; with ``None`` arguments are checked,
            and values where torch's global setting is on.

    Raises:
        ValueError: a parameter is outside its domain.
        TypeError: a parameter is neither a number nor a tensor.
    """

    arg_constraints: Any = {
        "pi": constraints.unit_interval,
        "sigma1": constraints.positive,
        "sigma2": constraints.positive,
    }
    support: Any = constraints.real
    has_rsample = False
    pi: Tensor
    sigma1: Tensor
    sigma2: Tensor

    def __init__(
        self,
        pi: float | Tensor,
        sigma1: float | Tensor,
        sigma2: float | Tensor,
        validate_args: bool | None = None,
    ) -> None:
        arguments = pi, sigma1, sigma2 = as_number(pi), as_number(sigma1), as_number(sigma2)
        numbers = None if any(isinstance(x, Tensor) for x in arguments) else arguments
        pi, sigma1, sigma2 = _as_tensors(pi=pi, sigma1=sigma1, sigma2=sigma2)
        if validate_args is not False:  # not torch's global switch, which compiling turns off
            _require("pi", pi, (pi >= 0) & (pi <= 1), "in [0, 1]")
            _require("sigma1", sigma1, (sigma1 > 0) & sigma1.isfinite(), "positive and finite")
            _require("sigma2", sigma2, (sigma2 > 0) & sigma2.isfinite(), "positive and finite")
        self._assemble((pi, sigma1, sigma2), None, numbers)
        if validate_args is not False:
            ratio, most = self.sigma1 / self.sigma2, torch.finfo(self.pi.dtype).max ** 0.5
            apart = (ratio >= most) | (ratio <= 1 / most)  # its square overflows
            _require("sigma1 / sigma2", ratio, ~apart, f"within a factor of {most:.0e} of 1")
            if numbers and numbers[1] < numbers[2] and numbers[0] != 0.5:
                warnings.warn(
                    f"sigma1={numbers[1]} is below sigma2={numbers[2]}, but pi={numbers[0]} is "
                    "the weight of sigma1, by custom the wide part: were they swapped? "
                    + read_on("questions/prior_scales"),
                    stacklevel=2,
                )
        if validate_args is not None:
            self._validate_args = validate_args

    @classmethod
    def from_logit(cls, logit: Tensor, sigma1: Tensor, sigma2: Tensor) -> ScaleMixtureNormal:
        r"""Return the mixture with $\pi = 1 / (1 + e^{-\text{logit}})$, which may round to 0 or 1.

        Log-density and gradients are finite all the same, to rounding of numbers as large as the
        logit.

        Args:
            logit: log-odds of the first component, finite.
            sigma1: as for the class, like ``sigma2``; they are not checked.
            sigma2: standard deviation of the second component.
        """
        new = cls.__new__(cls)
        new._assemble((torch.sigmoid(logit), sigma1, sigma2), logit)
        return new

    def _assemble(
        self,
        compact: tuple[Tensor, Tensor, Tensor],
        logit: Tensor | None,
        numbers: tuple[Any, ...] | None = None,
    ) -> None:
        self._compact, self._logit = compact, logit  # unexpanded: one logarithm, not one per weight
        self.numbers = numbers
        """The parameters, where they are numbers; else ``None``."""
        try:
            self.pi, self.sigma1, self.sigma2 = torch.broadcast_tensors(*compact)
        except RuntimeError as error:
            shapes = ", ".join(str(list(x.shape)) for x in compact)
            raise ValueError(
                f"pi, sigma1 and sigma2 must broadcast, got shapes {shapes}"
            ) from error
        self.derive()
        super().__init__(self.pi.shape, validate_args=False)

    def derive(self) -> None:
        """Compute the coefficients of the log-density from the parameters."""
        pi, sigma1, sigma2 = self._compact
        if self._logit is None:
            log_weights = pi.log(), torch.log1p(-pi)
        else:
            log_weights = F.logsigmoid(self._logit), F.logsigmoid(-self._logit)
        self._coefficients = coefficients(*log_weights, sigma1, sigma2)
        self._fast = None if self.numbers is None else fast_coefficients(self.numbers, pi.dtype)

    def expand(self, batch_shape: Any, _instance: Any = None) -> ScaleMixtureNormal:
        new = self._get_checked_instance(ScaleMixtureNormal, _instance)
        batch_shape = Size(batch_shape)
        new.pi, new.sigma1, new.sigma2 = (x.expand(batch_shape) for x in self._compact)
        new._compact, new._logit, new.numbers = self._compact, self._logit, self.numbers
        new._coefficients, new._fast = self._coefficients, self._fast
        super(ScaleMixtureNormal, new).__init__(batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    @property
    def mean(self) -> Tensor:
        return torch.zeros_like(self.pi)

    @property
    def variance(self) -> Tensor:
        r"""$\pi\sigma_1^2 + (1 - \pi)\sigma_2^2$."""
        return self.pi * self.sigma1.square() + (1 - self.pi) * self.sigma2.square()

    def sample(self, sample_shape: Any = Size()) -> Tensor:
        shape = self._extended_shape(Size(sample_shape))
        with torch.no_grad():
            first = torch.bernoulli(self.pi.expand(shape)).bool()
            noise = torch.randn(shape, dtype=self.pi.dtype, device=self.pi.device)
            return noise * torch.where(first, self.sigma1, self.sigma2)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-density in nats, elementwise; exact for every finite value."""
        self._check(value)
        value = value.expand(torch.broadcast_shapes(value.shape, self.batch_shape))
        return self.sum_log_prob(value, 0)

    def sum_log_prob(self, value: Tensor, dims: int) -> Tensor:
        """Return the log-density in nats, summed over the last ``dims`` dimensions."""
        log_prob: Tensor
        if self._fast is None:
            log_prob = log_mixture(value, self._coefficients, dims)
        else:
            value = value.to(torch.result_type(value, self._compact[0]))  # integers are floats
            log_prob = LogMixture.apply(value, self._fast, dims)
        return log_prob

    def to_event(self, reinterpreted_batch_ndims: int | None = None) -> Event | ScaleMixtureNormal:
        return to_event(self, reinterpreted_batch_ndims)

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability of a draw at most ``value``, elementwise."""
        self._check(value)
        first, second = (
            torch.erfc(-math.sqrt(0.5) * value / sigma) for sigma in (self.sigma1, self.sigma2)
        )  # torch's ndtr is a difference from 1, and so loses the lower tail
        return 0.5 * (self.pi * first + (1 - self.pi) * second)

    def _check(self, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.is_complex():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"value must be a tensor of real numbers, got {got}")
        if self._validate_args:
            self._validate_sample(value)


def mixture_of(numbers: Numbers, rounded: tuple[Tensor, Tensor, Tensor]) -> ScaleMixtureNormal:
    r"""Return the mixture of unchecked $\pi, \sigma_1, \sigma_2$, as numbers and as scalars."""
    new = ScaleMixtureNormal.__new__(ScaleMixtureNormal)
    new._assemble(rounded, None, numbers)
    return new


# --- the log-density ---


class Coefficients(NamedTuple):
    r"""Coefficients of a and t; those of `LogMixture` are numbers."""

    h: Any  # z = h w for the wider component
    c: Any  # a = c - z^2
    d: Any  # b = d - (1 + kappa) z^2
    delta: Any
    kappa: Any
    floor: Any  # below which t does not count


def coefficients(log_pi: Tensor, log_rest: Tensor, sigma1: Tensor, sigma2: Tensor) -> Coefficients:
    r"""Return the coefficients for $\ln\pi$, $\ln(1 - \pi)$ and the scales.

    The reference is the wider component, unless its weight is 0.
    """
    second = ((sigma2 > sigma1) & (log_rest > -math.inf)) | (log_pi == -math.inf)
    wide, narrow = torch.where(second, sigma2, sigma1), torch.where(second, sigma1, sigma2)
    log_first = torch.where(second, log_rest, log_pi)
    log_second = torch.where(second, log_pi, log_rest)
    log_wide, log_narrow = wide.log(), narrow.log()
    kappa = (wide - narrow) / narrow * (wide / narrow + 1)  # (wide / narrow)^2 - 1
    return Coefficients(
        h=math.sqrt(0.5) / wide,
        c=log_first - log_wide - HALF_LOG_2PI,
        d=log_second - log_narrow - HALF_LOG_2PI,
        delta=log_second - log_first + (log_wide - log_narrow),
        kappa=kappa,
        floor=_floor(kappa.detach()),
    )


def log_mixture(w: Tensor, coefficients: Coefficients, dims: int) -> Tensor:
    r"""Return $\ln p(w)$, summed over the last ``dims`` dimensions; differentiable in all.

    Where b is well above a, $b + \mathrm{softplus}(-t)$ lets autograd compute the fraction of
    either component to all digits, however small. Where the fraction is too small to count,
    ``floor`` bounds t, as processors are slow on subnormal numbers.
    """
    h, c, d, delta, kappa, floor = coefficients
    z2 = (w * h).square()
    t = torch.maximum(torch.addcmul(delta, kappa, z2, value=-1), floor)
    narrow = t > 1  # at 0 the derivative in w would lose a digit
    larger = torch.where(narrow, d - (1 + kappa) * z2, c - z2)
    softplus = torch.logaddexp(torch.where(narrow, -t, t), t.new_zeros(()))
    return total(larger + softplus, dims)


def _floor(kappa: Tensor) -> Tensor:
    """Return the t below which 1 + kappa / (1 + e^-t) rounds to 1; -inf if kappa is huge."""
    numbers = torch.finfo(kappa.dtype)
    smallest = 8 * numbers.tiny  # well clear of subnormal numbers
    floor = torch.where(kappa * smallest < numbers.eps / 2, math.log(smallest), -math.inf)
    return floor.to(kappa.dtype)


_LARGEST = 80.0  # e^80 is finite in single precision


def fast_coefficients(parameters: Numbers, dtype: torch.dtype) -> Coefficients | None:
    r"""Return the coefficients of `LogMixture`, computed in double precision.

    ``None`` where squares of the scales, or $e^\delta$, may overflow.
    """
    if not all(1e-9 < sigma < 1e3 for sigma in parameters[1:]):
        return None
    pi, sigma1, sigma2 = torch.tensor(parameters, dtype=torch.float64)
    exact = coefficients(pi.log(), torch.log1p(-pi), sigma1, sigma2)
    h, c, d, delta, kappa, _ = (x.item() for x in exact)
    floor = _floor(torch.tensor(kappa, dtype=dtype)).item()
    return Coefficients(h, c, d, delta, kappa, floor) if delta < _LARGEST else None


class LogMixture(Function):
    r"""`log_mixture` where the coefficients are numbers.

    The value is $c - z^2 + \mathrm{softplus}(t)$, with the softplus as $-\ln(1 / (1 + e^t))$; the
    derivative is $-2h^2 w\,(1 + \kappa / (1 + e^{-t}))$.
    """

    @staticmethod
    def forward(w: Tensor, c: Coefficients, dims: int) -> Tensor:
        sums = []
        for (x,) in pieces(w) if dims == w.dim() == 1 else [(w,)]:
            log_fraction = _exponent(x, c, -1).sigmoid_().log_()  # -softplus(t)
            z2 = torch.addcmul(x.new_zeros(()), x, x, value=c.h**2)
            sums.append(total(log_fraction, dims) + total(z2, dims))
        count = math.prod(w.shape[w.dim() - dims :])
        return reduce(add, sums).neg_().add_(c.c * count)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        w, ctx.coefficients, ctx.dims = inputs
        ctx.save_for_backward(w)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (w,), c = ctx.saved_tensors, ctx.coefficients
        grad = grad.reshape(grad.shape + (1,) * ctx.dims) * (-2 * c.h**2)
        if torch.is_grad_enabled():  # for second derivatives
            t = (c.delta - c.kappa * c.h**2 * w.square()).clamp(min=c.floor)
            return grad * (w + c.kappa * w * torch.sigmoid(t)), None, None
        of_w = torch.empty_like(w)
        for x, of_x in pieces(w, of_w) if ctx.dims == w.dim() == 1 else [(w, of_w)]:
            fraction = _exponent(x, c, 1).sigmoid_()
            torch.addcmul(x, x, fraction, value=c.kappa, out=of_x).mul_(grad)
        return of_w, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        w, numbers, dims = args
        result: Tensor = LogMixture.apply(w.movedim(in_dims[0], 0), numbers, dims)
        return result, 0


def _exponent(w: Tensor, c: Coefficients, sign: int) -> Tensor:
    """Return t or -t, with t bounded by its floor."""
    delta = w.new_full((), sign * c.delta)
    t = torch.addcmul(delta, w, w, value=-sign * c.kappa * c.h**2)
    return t.clamp_(min=c.floor) if sign > 0 else t.clamp_(max=-c.floor)


# --- arguments ---


def _as_tensors(**parameters: float | Tensor) -> list[Tensor]:
    """Convert numbers and tensors to floating tensors of one dtype and device."""
    for name, value in parameters.items():
        if isinstance(value, Tensor) and value.is_complex():
            raise TypeError(f"{name} must be real, got dtype {value.dtype}")
        if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
            raise TypeError(f"{name} must be a number or a tensor, got {value!r}")
    like = [x for x in parameters.values() if isinstance(x, Tensor) and x.is_floating_point()]
    dtype = like[0].dtype if like else torch.get_default_dtype()
    device = like[0].device if like else None
    numbers = (x if isinstance(x, Tensor) else as_float(x) for x in parameters.values())
    return [torch.as_tensor(x, dtype=dtype, device=device) for x in numbers]


def _require(name: str, value: Tensor, valid: Tensor, expected: str) -> None:
    if not valid.all():
        offender = value.expand(valid.shape)[~valid].flatten()[0].item()
        raise ValueError(f"{name} must be {expected}, got {offender}")
