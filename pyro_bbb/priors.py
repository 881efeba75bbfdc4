"""Priors: from a weight's name and shape to its distribution.

Wherever the library takes ``prior=``, it accepts a scalar distribution (every weight has it,
independently), a `Prior`, a callable ``(module, name, shape) -> distribution``, or a dict from
name patterns to any of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import pyro.distributions as dist
from pyro.nn import PyroModule, PyroSample
from torch import Size, Tensor, nn
from torch.distributions import Distribution

from pyro_bbb.distributions import map_tensors, without_validation

PriorFunction: TypeAlias = Callable[[nn.Module, str, Size], Distribution]
PriorLike: TypeAlias = "Prior | Distribution | PriorFunction | Mapping[str, PriorLike]"


class Prior(nn.Module):
    """Gives each weight its prior distribution; subclasses implement `forward`.

    A prior is a module, so that its tensors follow the network's device and dtype, and parameters
    of its own are trained with the network's.
    """

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """The distribution of weight ``name`` of ``module``, with event shape ``shape``."""
        raise NotImplementedError

    def scoped(self, prefix: str) -> Prior:
        """The prior for the weights below ``prefix``, by their names relative to it."""
        return self


class Independent(Prior):
    """One scalar distribution for every weight, independently.

    Args:
        distribution: a distribution of empty event shape whose batch shape expands to every
            weight's shape (usually a scalar).

    Raises:
        ValueError: the distribution is not univariate, or does not expand to a weight's shape.
    """

    def __init__(self, distribution: Distribution) -> None:
        super().__init__()
        if distribution.event_shape:
            raise ValueError(
                "prior must be a distribution of single weights (event_shape []), got "
                f"{type(distribution).__name__} with event_shape {list(distribution.event_shape)}"
            )
        self.distribution = distribution
        self._expanded: dict[Size, Distribution] = {}

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """The distribution expanded to ``shape``, built once per shape."""
        if shape not in self._expanded:
            self._expanded[shape] = _expand(self.distribution, name, shape)
        return self._expanded[shape]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Independent:
        super()._apply(fn, recurse)
        self.distribution = map_tensors(self.distribution, fn)
        self._expanded.clear()
        return self

    def extra_repr(self) -> str:
        """The distribution, for the module's printed form."""
        return repr(self.distribution)


class Function(Prior):
    """A prior computed by a callable, at every draw.

    Args:
        function: ``(module, name, shape)`` to a distribution of single weights, or to one whose
            event shape is ``shape``.
    """

    def __init__(self, function: PriorFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """The callable's distribution, expanded to ``shape``."""
        distribution = self.function(module, name, shape)
        if not isinstance(distribution, Distribution):
            raise TypeError(f"prior must return a distribution for {name!r}, got {distribution!r}")
        if distribution.event_shape == shape and not distribution.batch_shape:
            return distribution
        return _expand(distribution, name, shape)


class ByName(Prior):
    """Different priors for different weights; the first matching pattern counts.

    Args:
        patterns: from patterns as in a shell (``"fc1.*"``, ``"*.bias"``, ``"*"``), matched
            against the weight's name in the network, to priors.
    """

    def __init__(self, patterns: Mapping[str, PriorLike], *, _prefix: str = "") -> None:
        super().__init__()
        if not patterns:
            raise ValueError("prior must not be an empty dict")
        self._prefix = _prefix
        self._patterns = tuple(patterns)
        self.priors = nn.ModuleList(as_prior(prior) for prior in patterns.values())

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """The distribution by the first pattern that matches.

        Raises:
            ValueError: no pattern matches.
        """
        full_name = self._prefix + name
        for pattern, prior in zip(self._patterns, self.priors, strict=True):
            if fnmatchcase(full_name, pattern):
                distribution: Distribution = prior(module, name, shape)
                return distribution
        raise ValueError(f"prior has no pattern for {full_name!r}, only {list(self._patterns)}")

    def scoped(self, prefix: str) -> ByName:
        """The same priors, seen from below ``prefix``."""
        scoped = [prior.scoped(prefix) for prior in self.priors]  # type: ignore[operator]
        patterns = dict(zip(self._patterns, scoped, strict=True))
        return ByName(patterns, _prefix=f"{self._prefix}{prefix}.")


class FanInNormal(Prior):
    r"""$N(0, g^2 / n_\text{in})$ for kernels, $N(0, g^2)$ for biases: layers keep their scale.

    With the ReLU gain $g = \sqrt 2$ a random network of any width and depth passes on the second
    moment of its input (He et al. 2015, "Delving Deep into Rectifiers").

    Args:
        gain: $g$, positive.
    """

    def __init__(self, gain: float = math.sqrt(2)) -> None:
        super().__init__()
        if not (gain > 0 and math.isfinite(gain)):
            raise ValueError(f"gain must be positive and finite, got {gain}")
        self.gain = gain
        self.by_fan_in = nn.ModuleDict()

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """The Normal whose scale fits the fan-in of ``shape``."""
        fan_in = math.prod(shape[1:])
        key = str(fan_in)
        if key not in self.by_fan_in:
            self.by_fan_in[key] = Independent(dist.Normal(0.0, self.gain / math.sqrt(fan_in)))
        distribution: Distribution = self.by_fan_in[key](module, name, shape)
        return distribution


def default_prior() -> Prior:
    """The prior where none is given: standard Normal weights; docs/defaults.md says why."""
    return Independent(dist.Normal(0.0, 1.0))


def as_prior(prior: PriorLike | None) -> Prior:
    """Whatever stands for a prior, as a `Prior`; ``None`` is `default_prior`.

    Raises:
        TypeError: ``prior`` is none of the accepted kinds.
    """
    if prior is None:
        return default_prior()
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, Distribution):
        return Independent(prior)
    if isinstance(prior, Mapping):
        return ByName(prior)
    if callable(prior) and not isinstance(prior, type):
        return Function(prior)
    raise TypeError(
        "prior must be a distribution, a pyro_bbb.priors.Prior, a callable (module, name, shape) "
        f"-> distribution, or a dict of name patterns to these, got {prior!r}"
    )


class _SitePrior:
    """What a `PyroSample` calls: asks the module's own prior, also in a copy of the module."""

    def __init__(self, name: str, shape: Sequence[int]) -> None:
        self.name, self.shape = name, Size(shape)

    def __call__(self, module: nn.Module) -> Distribution:
        prior = module._modules["prior"]
        distribution: Distribution = prior(module, self.name, self.shape)  # type: ignore[misc]
        return distribution


def declare(module: PyroModule, prior: Prior, **shapes: Sequence[int]) -> None:
    """Makes weights of a module random: one `PyroSample` each, all under one prior.

    Args:
        module: the module; gets the prior as its child ``prior``.
        prior: gives the distributions.
        **shapes: the weights' names and shapes.

    Raises:
        ValueError: the prior does not fit a shape, or has no pattern for a name.
    """
    module.add_module("prior", prior)
    for name, shape in shapes.items():
        site = _SitePrior(name, shape)
        site(module)  # a prior that does not fit is an error here, not at the first draw
        setattr(module, name, PyroSample(site))  # type: ignore[arg-type]


def _expand(distribution: Any, name: str, shape: Size) -> Distribution:
    try:
        expanded = distribution.expand(shape)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"prior of {name!r} must expand to shape {list(shape)}, got batch_shape "
            f"{list(distribution.batch_shape)} and event_shape {list(distribution.event_shape)}"
        ) from error
    result: Distribution = without_validation(expanded.to_event(len(shape)))
    return result
