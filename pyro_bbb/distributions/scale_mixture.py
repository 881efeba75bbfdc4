# SPDX-License-Identifier: Apache-2.0
r"""The scale mixture prior of Blundell et al. (2015), "Weight Uncertainty in Neural Networks".

Equation 7; its log-density is exact in single precision and costs few passes over many weights.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from pyro import distributions as dist
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_bbb._ops.scale_mixture import LARGEST, LogOneMixture, Numbers, coefficients, log_mixture
from pyro_bbb._utils.validation import as_float, as_number
from pyro_bbb.distributions.summed_event import Event, to_event


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
        given = pi, sigma1, sigma2 = as_number(pi), as_number(sigma1), as_number(sigma2)
        numbers = None if any(isinstance(x, Tensor) for x in given) else given
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
            _warn_if_swapped(numbers)
        if validate_args is not None:
            self._validate_args = validate_args

    @classmethod
    def from_logit(cls, logit: Tensor, sigma1: Tensor, sigma2: Tensor) -> ScaleMixtureNormal:
        r"""The mixture with $\pi = 1 / (1 + e^{-\text{logit}})$, which may round to 0 or 1.

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
        given: tuple[Any, ...] | None = None,
    ) -> None:
        self._compact, self._logit = compact, logit  # unexpanded: one logarithm, not one per weight
        self._given = given  # where all parameters are numbers
        try:
            self.pi, self.sigma1, self.sigma2 = torch.broadcast_tensors(*compact)
        except RuntimeError as error:
            found = ", ".join(str(list(x.shape)) for x in compact)
            raise ValueError(f"pi, sigma1 and sigma2 must broadcast, got shapes {found}") from error
        self.derive()
        super().__init__(self.pi.shape, validate_args=False)

    def derive(self) -> None:
        """Computes what the log-density needs of the parameters."""
        pi, sigma1, sigma2 = self._compact
        if self._logit is None:
            log_weights = pi.log(), torch.log1p(-pi)
        else:
            log_weights = F.logsigmoid(self._logit), F.logsigmoid(-self._logit)
        self._coefficients = coefficients(*log_weights, sigma1, sigma2)
        given = self._given
        self._numbers: Numbers | None = None
        # squares of others may overflow
        if given is not None and all(1e-9 < x < 1e3 for x in given[1:]):
            numbers = Numbers.of(given[0], given[1], given[2], pi.dtype)
            self._numbers = numbers if numbers.delta < LARGEST else None

    def expand(self, batch_shape: Any, _instance: Any = None) -> ScaleMixtureNormal:
        """The same distribution with a larger batch shape, sharing the parameters' memory."""
        new = self._get_checked_instance(ScaleMixtureNormal, _instance)
        batch_shape = Size(batch_shape)
        for name in self.arg_constraints:
            setattr(new, name, getattr(self, name).expand(batch_shape))
        new._compact, new._logit = self._compact, self._logit
        new._coefficients, new._numbers = self._coefficients, self._numbers
        new._given = self._given
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
        self._check(value)
        value = value.expand(torch.broadcast_shapes(value.shape, self.batch_shape))
        return self.sum_log_prob(value, 0)

    def sum_log_prob(self, value: Tensor, dims: int) -> Tensor:
        """Log-density in nats, summed over the last ``dims`` dimensions of ``value``."""
        log_prob: Tensor
        if self._numbers is not None:
            value = value.to(torch.result_type(value, self._compact[0]))  # integers are floats
            log_prob = LogOneMixture.apply(value, self._numbers, dims)
        else:
            log_prob = log_mixture(value, self._coefficients, dims)
        return log_prob

    @property
    def same_for_each(self) -> Any:
        """The parameters, where they are numbers, the same for each weight; else ``None``."""
        return self._given

    def single(self) -> ScaleMixtureNormal:
        """The distribution of one weight, where it is the same for each."""
        new = copy.copy(self)
        new.pi, new.sigma1, new.sigma2 = self._compact
        new._batch_shape = Size()
        return new

    def to_event(self, reinterpreted_batch_ndims: int | None = None) -> Event | ScaleMixtureNormal:
        """The last dimensions (all by default) as one event."""
        return to_event(self, reinterpreted_batch_ndims)

    def cdf(self, value: Tensor) -> Tensor:
        """Probability of a draw at most ``value``, elementwise."""
        self._check(value)
        first, second = (
            torch.erfc(-math.sqrt(0.5) * value / sigma) for sigma in (self.sigma1, self.sigma2)
        )  # torch's ndtr is a difference from 1, and so loses the lower tail
        return 0.5 * (self.pi * first + (1 - self.pi) * second)

    def _check(self, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.is_complex():
            found = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"value must be a tensor of real numbers, got {found}")
        if self._validate_args:
            self._validate_sample(value)


def mixture_of(
    numbers: tuple[float, float, float], rounded: tuple[Tensor, Tensor, Tensor]
) -> ScaleMixtureNormal:
    r"""The mixture of unchecked $\pi, \sigma_1, \sigma_2$, as numbers and as scalar tensors."""
    new = ScaleMixtureNormal.__new__(ScaleMixtureNormal)
    new._assemble(rounded, None, numbers)
    return new


def _warn_if_swapped(numbers: tuple[Any, ...] | None) -> None:
    """Warn where the first part of an uneven mixture is the narrow one."""
    if numbers and numbers[1] < numbers[2] and numbers[0] != 0.5:
        warnings.warn(
            f"sigma1={numbers[1]} is below sigma2={numbers[2]}, but pi={numbers[0]} is the weight "
            "of sigma1, by custom the wide part: were they swapped?",
            stacklevel=3,
        )


def _as_tensors(**parameters: float | Tensor) -> list[Tensor]:
    """Numbers and tensors to floating tensors of one dtype and device."""
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
