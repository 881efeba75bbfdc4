# SPDX-License-Identifier: Apache-2.0
r"""Predicted distributions of numbers: moments, quantiles, intervals, split of the variance.

The predictive is the mixture $\frac1S\sum_s p(y \mid f_s)$ over the draws. The law of total
variance splits its uncertainty,

$$\mathrm{Var}\,y = \underbrace{E\,\mathrm{Var}(y \mid w)}_{\text{aleatoric}}
  + \underbrace{\mathrm{Var}\,E(y \mid w)}_{\text{epistemic}}$$

aleatoric remains for known weights, epistemic is due to the weights.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
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
        sampler: what `predict` drew: ``"weights"``, common to all inputs, or the ``"outputs"`` of
            each input.
        ignored: entries of targets that do not count in `log_prob`: those of a label, or "nan".
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
        means: Tensor = self._component("mean")
        return means

    @cached_property
    def mean(self) -> Tensor:
        """Mean of the mixture, ``[n, d]``."""
        return self.sample_means.mean(0)

    @cached_property
    def aleatoric_std(self) -> Tensor:
        """Root of the expected noise variance, ``[n, d]``."""
        # squares in float64: those of a float32 soon under- or overflow
        return self._component("stddev").double().square().mean(0).sqrt().to(self.mean)

    @cached_property
    def epistemic_std(self) -> Tensor:
        """Return the standard deviation of the draws' means, ``[n, d]``."""
        return self.sample_means.double().std(0, correction=0).to(self.mean)

    @cached_property
    def std(self) -> Tensor:
        """Total standard deviation, by the law of total variance, ``[n, d]``."""
        return torch.hypot(self.aleatoric_std, self.epistemic_std)

    def rescaled(self, mean: Tensor | float, scale: Tensor | float) -> RegressionPrediction:
        """Return the prediction of $m + s z$ for this one of z: standardised targets in their unit.

        Args:
            mean: m, a number or ``[d]``.
            scale: s, a positive number or ``[d]``.

        Raises:
            TypeError: the components are neither Normals nor Student's t.
            ValueError: an argument is not finite, or the scale not positive.
        """
        family = type(self.components)
        if family not in LOCATION_SCALE:
            own = family_of(self.components)
            raise TypeError(f"only Normals and Student's t can be rescaled, got {own}")
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
        """Return the log-density of the true targets under the mixture, ``[n]``, nats.

        Raises:
            ValueError: the targets are not ``[n, d]`` (or ``[n]`` for d = 1), or on another device.
        """
        y = align(self._real("y", y), self._shape[2:])
        if len(y) != self._shape[1]:
            raise ValueError(f"expected y of {self._shape[1]} rows, got {len(y)}")
        which = counted(y, self.ignored)
        y = y if which is None else y.masked_fill(~which, 0)
        log_prob = self._component("log_prob", y)
        log_prob = log_prob if which is None else log_prob.where(which, 0.0)
        log_prob = log_prob.reshape(*log_prob.shape[:2], -1).sum(2)
        return log_prob.logsumexp(0) - math.log(len(log_prob))

    def cdf(self, value: Tensor) -> Tensor:
        """Return the probability of a target at most ``value``, ``[n, d]``.

        Raises:
            ValueError: the values have a shape that does not broadcast, or are on another device.
        """
        value, shape = self._real("value", value), self._shape
        try:
            torch.broadcast_shapes(value.shape, shape)
        except RuntimeError as error:
            expected = f"broadcast to shape {list(shape[1:])}"
            raise ValueError(f"value must {expected}, got shape {list(value.shape)}") from error
        cdf: Tensor = self._component("cdf", value)
        return cdf.mean(0)

    def quantile(self, probability: float) -> Tensor:
        """Return the mixture's quantile, ``[n, d]``: its distribution function bisected in float64.

        It is differentiable in the components' parameters; the quantile of counts is constant.

        Raises:
            ValueError: the probability is outside (0, 1).
        """
        probability = checks.probability("probability", probability)
        exact = RegressionPrediction(map_tensors(self.components, Tensor.double))
        with torch.no_grad():
            low, high = exact._bracket(probability)
            discrete = self._component("support").is_discrete
            width = float((high - low).max())
            halvings = 2 + math.ceil(math.log2(width)) if discrete and width < math.inf else 64
            halvings = min(max(halvings, 1), 64)  # of counts to within a half
            root = bisect(lambda middle: exact.cdf(middle) < probability, low, high, halvings)
        if discrete:
            return root.round().to(self.mean)
        if self.components.event_shape:  # the density is of several numbers together
            return root.to(self.mean)
        density = lambda value: exact._component("log_prob", value).exp().mean(0)  # noqa: E731
        return with_derivatives(root, exact.cdf, density).to(self.mean)

    def interval(self, level: float) -> tuple[Tensor, Tensor]:
        """Return both ends, ``[n, d]``, of the central interval of probability ``level`` in (0, 1).

        Raises:
            ValueError: the level is outside (0, 1).
        """
        level = checks.probability("level", level)
        return self.quantile(0.5 * (1 - level)), self.quantile(0.5 * (1 + level))

    @property
    def _shape(self) -> Size:
        """Shape ``[S, n, ...]`` of all draws' targets."""
        shape: Size = self.components.batch_shape + self.components.event_shape
        return shape

    def _component(self, name: str, *args: Tensor) -> Any:
        """Return an attribute of the components, or its value at ``args``."""
        try:
            attribute = getattr(self.components, name)
            return attribute(*args) if args else attribute
        except NotImplementedError as error:
            raise NotImplementedError(
                f"the likelihood's distribution {family_of(self.components)} has no {name}, which "
                "this needs: define it in a subclass, or use log_prob and components.sample()"
            ) from error

    def _real(self, name: str, value: Tensor) -> Tensor:
        """Return a checked tensor of real numbers on the device of the draws."""
        value = tensor(name, value)
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name} must hold real numbers, got dtype {value.dtype}")
        with suppress(NotImplementedError):  # of a family without mean
            if value.device != self.mean.device:
                raise ValueError(f"{name} must be on {self.mean.device}, got one on {value.device}")
        return value

    def _bracket(self, probability: float) -> tuple[Tensor, Tensor]:
        """Return points on both sides of the quantile, by ever wider steps from the mean."""
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


@dataclass(frozen=True, repr=False, kw_only=True)
class GaussianPrediction(RegressionPrediction):
    """A Normal predictive distribution: a Normal function with Normal noise.

    Args:
        components: the predictive distribution, batch shape ``[1, n, d]``.
        sampler: ``"linearized"``, or ``"outputs"`` of a `LastLayer`.
        function_std: standard deviation of the function, ``[n, d]``.
        noise_std: standard deviation of the noise, ``[n, d]``.
    """

    function_std: Tensor
    noise_std: Tensor

    @cached_property
    def aleatoric_std(self) -> Tensor:
        """Return the standard deviation of the noise, ``[n, d]``."""
        return self.noise_std

    @cached_property
    def epistemic_std(self) -> Tensor:
        """Return the standard deviation of the function, ``[n, d]``."""
        return self.function_std

    def rescaled(self, mean: Tensor | float, scale: Tensor | float) -> GaussianPrediction:
        """Return the prediction of $m + s z$, as `RegressionPrediction.rescaled` does."""
        moved = super().rescaled(mean, scale).components
        factor = (moved.scale / self.components.scale)[0]
        stds = {"function_std": factor * self.function_std, "noise_std": factor * self.noise_std}
        return replace(self, components=moved, **stds)


Prediction: TypeAlias = ClassificationPrediction | RegressionPrediction


def _finite(name: str, value: Tensor | float, like: Tensor) -> Tensor:
    """Return the value as a finite tensor of the dtype and device of ``like``."""
    if not isinstance(value, Tensor):
        value = torch.tensor(checks.finite(name, value), dtype=torch.double)
    if not checks.all_finite(value.to(like)):
        raise ValueError(f"{name} must be finite in {like.dtype}, got {value}")
    return value.to(like)
