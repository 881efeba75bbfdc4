# SPDX-License-Identifier: Apache-2.0
"""Predicted distributions of numbers: moments, quantiles, intervals, and the split of the variance.

The law of total variance splits the uncertainty: aleatoric remains for known weights, epistemic is
due to the weights.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Size, Tensor
from torch.distributions import StudentT

from pyro_bbb._utils import validation as checks
from pyro_bbb._utils.bisection import bisect, with_derivatives
from pyro_bbb._utils.locking import cached_property
from pyro_bbb._utils.tables import first_rows
from pyro_bbb._utils.validation import tensor
from pyro_bbb.distributions import map_tensors
from pyro_bbb.distributions.observation import LOCATION_SCALE, counted, family_of
from pyro_bbb.likelihoods import align
from pyro_bbb.prediction._classification import ClassificationPrediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class RegressionPrediction:
    """Predicted distributions of n real targets or counts, a mixture over S draws of the weights.

    Args:
        components: the draws' distributions, batch shape ``[S, n, d]``, in the targets' unit.
        sampler: `predict` drew ``"weights"``, common to all inputs, or the ``"outputs"`` of each
            input by itself.
        ignored: entries of targets that do not count in `log_prob`: those of a label, or "nan", as
            of the model's likelihood.
    """

    components: Any
    sampler: str = "weights"
    ignored: int | str | None = None

    def __repr__(self) -> str:
        samples, *inputs = self._shape
        family, drawn = family_of(self.components), f"{samples:,} samples of {self.sampler}"
        return f"RegressionPrediction(inputs {inputs}, {family}, {drawn})"

    def _repr_markdown_(self) -> str:
        names = ("mean", "std", "aleatoric_std", "epistemic_std")
        return f"`{self!r}`\n\n{first_rows({name: getattr(self, name) for name in names})}"

    def plot(self, x: Tensor, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw mean and bands over one-dimensional inputs ``x``, by `plots.regression_band`."""
        from pyro_bbb import plots

        return plots.regression_band(plots.axes(ax), x, self, **options)

    @property
    def sample_means(self) -> Tensor:
        """Each draw's mean, ``[S, n, d]``."""
        means: Tensor = self._of_components("mean")
        return means

    @cached_property
    def mean(self) -> Tensor:
        """Mean of the mixture, ``[n, d]``."""
        return self.sample_means.mean(0)

    @cached_property
    def aleatoric_std(self) -> Tensor:
        """Root of the expected noise variance, ``[n, d]``."""
        # squares in float64: those of a float32 soon under- or overflow
        return self._of_components("stddev").double().square().mean(0).sqrt().to(self.mean)

    @cached_property
    def epistemic_std(self) -> Tensor:
        """Standard deviation of the draws' means, ``[n, d]``."""
        return self.sample_means.double().std(0, correction=0).to(self.mean)

    @cached_property
    def std(self) -> Tensor:
        """Total standard deviation, by the law of total variance, ``[n, d]``."""
        return torch.hypot(self.aleatoric_std, self.epistemic_std)

    def rescaled(self, mean: Tensor | float, scale: Tensor | float) -> RegressionPrediction:
        """The prediction of $m + s z$ where this is of z: of standardised targets, in their unit.

        Args:
            mean: m, a number or ``[d]``.
            scale: s, likewise, positive.

        Raises:
            TypeError: the components are neither Normals nor Student's t, or a value is no number.
            ValueError: an argument is not finite, or the scale not positive.
        """
        family = type(self.components)
        if family not in LOCATION_SCALE:
            found = family_of(self.components)
            raise TypeError(f"only Normals and Student's t can be rescaled, got {found}")
        loc = self.components.loc
        m, s = _finite("mean", mean, loc), _finite("scale", scale, loc)
        if not (s > 0).all():
            raise ValueError(f"scale must be positive, got {scale}")
        moved: dict[str, Any] = {"loc": m + s * loc, "scale": s * self.components.scale}
        if issubclass(family, StudentT):
            moved["df"] = self.components.df
        checks.require_numbers(moved)
        return RegressionPrediction(family(**moved), self.sampler, self.ignored)

    def log_prob(self, y: Tensor) -> Tensor:
        """Log-density of the true targets under the mixture, ``[n]``, nats.

        Args:
            y: targets, ``[n, d]``, or ``[n]`` for d = 1.

        Raises:
            ValueError: the targets have another shape, or are on another device.
            TypeError: they are no tensor of real numbers.
        """
        y = align(self._real("y", y), self._shape[2:])
        if len(y) != self._shape[1]:
            raise ValueError(f"expected y of {self._shape[1]} rows, got {len(y)}")
        which = counted(y, self.ignored)
        y = y if which is None else y.masked_fill(~which, 0)
        log_prob = self._of_components("log_prob", y)
        log_prob = log_prob if which is None else log_prob.where(which, 0.0)
        log_prob = log_prob.reshape(*log_prob.shape[:2], -1).sum(2)
        return log_prob.logsumexp(0) - math.log(len(log_prob))

    def cdf(self, value: Tensor) -> Tensor:
        """Probability of a target at most ``value``, ``[n, d]``.

        Raises:
            ValueError: the values have a shape that does not broadcast, or are on another device.
            TypeError: they are no tensor of real numbers.
        """
        value, shape = self._real("value", value), self._shape
        try:
            torch.broadcast_shapes(value.shape, shape)
        except RuntimeError as error:
            expected = f"broadcast to shape {list(shape[1:])}"
            raise ValueError(f"value must {expected}, got shape {list(value.shape)}") from error
        cdf: Tensor = self._of_components("cdf", value)
        return cdf.mean(0)

    def quantile(self, probability: float) -> Tensor:
        """The mixture's quantile, ``[n, d]``, by bisection of its distribution function in float64.

        It is differentiable in the components' parameters; that of counts is constant.

        Raises:
            ValueError: the probability is outside (0, 1).
            TypeError: it is no number.
        """
        probability = checks.probability("probability", probability)
        exact = RegressionPrediction(map_tensors(self.components, Tensor.double))
        with torch.no_grad():
            low, high = exact._bracket(probability)
            discrete = self._of_components("support").is_discrete
            width = float((high - low).max())
            halvings = 2 + math.ceil(math.log2(width)) if discrete and width < math.inf else 64
            halvings = min(max(halvings, 1), 64)  # of counts to within a half
            root = bisect(lambda middle: exact.cdf(middle) < probability, low, high, halvings)
        if discrete:
            return root.round().to(self.mean)
        if self.components.event_shape:  # the density is of several numbers together
            return root.to(self.mean)
        density = lambda value: exact._of_components("log_prob", value).exp().mean(0)  # noqa: E731
        return with_derivatives(root, exact.cdf, density).to(self.mean)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """The central interval of probability ``level`` under the mixture.

        Args:
            level: probability inside, in (0, 1).

        Returns:
            Lower and upper end, each ``[n, d]``.

        Raises:
            ValueError: the level is outside (0, 1).
            TypeError: it is no number.
        """
        level = checks.probability("level", level)
        return self.quantile(0.5 * (1 - level)), self.quantile(0.5 * (1 + level))

    @property
    def _shape(self) -> Size:
        """Shape ``[S, n, ...]`` of all draws' targets."""
        shape: Size = self.components.batch_shape + self.components.event_shape
        return shape

    def _of_components(self, name: str, *args: Tensor) -> Any:
        """Return an attribute of the components, or its value at ``args``."""
        try:
            found = getattr(self.components, name)
            return found(*args) if args else found
        except NotImplementedError as error:
            raise NotImplementedError(
                f"the likelihood's distribution {family_of(self.components)} has no {name}, which "
                "this needs: define it in a subclass, or use log_prob and components.sample()"
            ) from error

    def _real(self, name: str, value: Tensor) -> Tensor:
        """The value, if it is a tensor of real numbers on the device of the draws."""
        value = tensor(name, value)
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name} must hold real numbers, got dtype {value.dtype}")
        with suppress(NotImplementedError):  # of a family without mean
            if value.device != self.mean.device:
                raise ValueError(f"{name} must be on {self.mean.device}, got one on {value.device}")
        return value

    def _bracket(self, probability: float) -> tuple[Tensor, Tensor]:
        """Points on both sides of the quantile, from ever wider steps around any mean."""
        centre, width = self.mean.nan_to_num(0.0), self.std.nan_to_num(1.0, posinf=1.0)
        width = width + torch.finfo(width.dtype).tiny  # it may be 0, but must grow
        low, high = centre - width, centre + width
        while (outside := self.cdf(low) >= probability).any():
            width = 2 * width
            low = (low - width).where(outside, low)
        while (outside := self.cdf(high) < probability).any():
            width = 2 * width
            high = (high + width).where(outside, high)
        return low, high


Prediction: TypeAlias = ClassificationPrediction | RegressionPrediction


def _finite(name: str, value: Tensor | float, like: Tensor) -> Tensor:
    """The value as a tensor of the dtype and device of another one, if finite there."""
    if not isinstance(value, Tensor):
        value = torch.tensor(checks.finite(name, value), dtype=torch.double)
    if not checks.all_finite(value.to(like)):
        raise ValueError(f"{name} must be finite in {like.dtype}, got {value}")
    return value.to(like)
