# SPDX-License-Identifier: Apache-2.0
r"""Accepted forms of a prior, each converted to a `Prior` by `as_prior`.

A distribution (`Independent`), a callable (`Function`), a dict of name patterns (`ByName`), or a
name in `PRIORS`, which the decorator `named` fills where a prior is defined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, TypeVar

import pyro.distributions as dist
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn import PyroModule
from torch import Size, Tensor, nn
from torch.distributions import Distribution

from pyro_bbb._utils import validation as checks
from pyro_bbb._utils.saving import Arguments, Modules, attributes, children, saveable
from pyro_bbb.distributions import SummedNormal, map_tensors, without_validation

P = TypeVar("P", bound=Callable[..., Any])
PriorFunction: TypeAlias = Callable[[nn.Module, str, Size], Distribution]
PriorLike: TypeAlias = "str | Prior | Distribution | PriorFunction | Mapping[str, PriorLike]"


class Prior(nn.Module):
    """Prior distribution of each weight, by name and shape; subclasses implement `forward`.

    A prior is a module, so that its tensors follow the network's device and dtype, and its
    parameters are trained with the network's.
    """

    is_fixed = False
    """Whether the distributions depend on no parameter, latent or call."""

    of_outputs = False
    """Whether it is a prior of the network's outputs instead of its weights."""

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """Return the distribution of weight ``name`` of ``module``, of event shape ``shape``."""
        raise NotImplementedError

    def attach(self, module: PyroModule, name: str, shape: Size) -> None:
        """Prepare weight ``name`` of ``module`` before it is declared; check that the prior fits.

        A prior may register parameters or `PyroSample` latents on the module. Their
        names begin with the weight's and ``_prior_``, as in ``weight_prior_scale``. These mark them
        as the prior's, so that `to_module` leaves them out.
        """
        self(module, name, shape)

    def for_weight(self, name: str) -> Prior:
        """Return the prior of weight ``name``: this one, unless it chooses among others."""
        return self

    def scoped(self, prefix: str) -> Prior:
        """Return the prior for the weights below ``prefix``, by their names relative to it."""
        return self


@saveable(attributes("distribution"))
class Independent(Prior):
    """One scalar distribution for every weight, independently.

    Args:
        distribution: a distribution of empty event shape whose batch shape expands to every
            weight's shape (usually a scalar).

    Raises:
        ValueError: the distribution is not univariate, or does not expand to a weight's shape.
    """

    is_fixed = True

    def __init__(self, distribution: Distribution) -> None:
        super().__init__()
        _require_pyro(distribution)
        if distribution.event_shape:
            raise ValueError(
                "prior must be a distribution of single weights (event_shape []), got "
                f"{type(distribution).__name__} with event_shape {list(distribution.event_shape)}"
            )
        self.distribution: Distribution = distribution
        self._expanded: dict[Size, Distribution] = {}

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """Return the distribution expanded to ``shape``, built once per shape."""
        if shape not in self._expanded:
            self._expanded[shape] = _expand(self.distribution, name, shape)
        return self._expanded[shape]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Independent:
        super()._apply(fn, recurse)
        self.distribution = map_tensors(self.distribution, fn)
        self._expanded.clear()
        return self

    def extra_repr(self) -> str:
        """Return the distribution, for the module's printed form."""
        return repr(self.distribution)


class Function(Prior):
    """Prior computed by a callable, at every sample.

    Args:
        function: ``(module, name, shape)`` to a distribution of single weights, or to one whose
            event shape is ``shape``.
    """

    def __init__(self, function: PriorFunction) -> None:
        super().__init__()
        self.function: PriorFunction = checks.function(
            "function", function, "(module, name, shape)"
        )

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """Return the callable's distribution, expanded to ``shape``."""
        distribution = self.function(module, name, shape)
        if not isinstance(distribution, Distribution):
            raise TypeError(f"prior must return a distribution for {name!r}, got {distribution!r}")
        _require_pyro(distribution)
        if distribution.event_shape == shape and not distribution.batch_shape:
            return distribution
        return _expand(distribution, name, shape)


def _by_name(cls: Any, arguments: Arguments, modules: Modules) -> nn.Module:
    patterns = dict(zip(arguments["patterns"], modules.values(), strict=True))
    prior: ByName = cls(patterns, _prefix=arguments["prefix"])
    return prior


saveable_by_name = saveable(
    lambda prior: {"patterns": prior.patterns, "prefix": prior._prefix},
    modules=lambda prior: children(prior.priors),
    build=_by_name,
)


@saveable_by_name
class ByName(Prior):
    """Different priors for different weights; the first matching pattern counts.

    Args:
        patterns: from patterns as in a shell (``"fc1.*"``, ``"*.bias"``, ``"*"``), matched
            against the weight's name in the network, to priors.
    """

    _missing = "prior has no pattern for {name!r}, only {patterns}"

    def __init__(self, patterns: Mapping[str, PriorLike], *, _prefix: str = "") -> None:
        super().__init__()
        if not isinstance(patterns, Mapping):
            raise TypeError(f"patterns must be a dict of priors, got {patterns!r}")
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise TypeError(f"the patterns of a prior must be strings, got {pattern!r}")
        if not patterns:
            raise ValueError("prior must not be an empty dict")
        self._prefix = _prefix
        self.patterns: tuple[str, ...] = tuple(patterns)
        self.priors: nn.ModuleList = nn.ModuleList(as_prior(prior) for prior in patterns.values())

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """Return the distribution of the weight by the chosen prior."""
        distribution: Distribution = self.for_weight(name)(module, name, shape)
        return distribution

    def attach(self, module: PyroModule, name: str, shape: Size) -> None:
        """Prepare the weight by the chosen prior."""
        self.for_weight(name).attach(module, name, shape)

    def for_weight(self, name: str) -> Prior:
        """Return the prior by the first pattern that matches.

        Raises:
            ValueError: no pattern matches.
        """
        full_name = self._prefix + name
        for pattern, prior in zip(self.patterns, self.priors, strict=True):
            if fnmatchcase(full_name, pattern):
                chosen: Prior = prior.for_weight(name)  # type: ignore[operator]
                return chosen
        raise ValueError(self._missing.format(name=full_name, patterns=list(self.patterns)))

    def scoped(self, prefix: str) -> ByName:
        """Return the priors seen from below ``prefix``."""
        scoped = [prior.scoped(prefix) for prior in self.priors]  # type: ignore[operator]
        patterns = dict(zip(self.patterns, scoped, strict=True))
        return type(self)(patterns, _prefix=f"{self._prefix}{prefix}.")


PRIORS: dict[str, Callable[..., Prior]] = {}


def named(name: str) -> Callable[[P], P]:
    """Register a prior, or a function that makes one, under a name of `make`."""

    def register(prior: P) -> P:
        PRIORS[name] = prior
        return prior

    return register


def make(name: str, **options: Any) -> Prior:
    """Make a prior by its name.

    Args:
        name: a name in `pyro_bbb.priors.PRIORS`.
        **options: keyword arguments of the prior of that name.

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(name, str) or name not in PRIORS:
        raise ValueError(f"prior must be one of {sorted(PRIORS)} where it is a name, got {name!r}")
    return PRIORS[name](**options)


def default_prior() -> Prior:
    """Return the prior where none is given: standard Normal weights, see docs/defaults.md."""
    return Independent(dist.Normal(0.0, 1.0))


def as_prior(prior: PriorLike | None) -> Prior:
    """Convert any accepted form of a prior to a `Prior`; ``None`` is `default_prior`.

    Raises:
        TypeError: ``prior`` has no accepted form.
        ValueError: an unknown name.
    """
    if prior is None:
        return default_prior()
    if isinstance(prior, str):
        return make(prior)
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, Distribution):
        return Independent(prior)
    if isinstance(prior, Mapping):
        return ByName(prior)
    if callable(prior) and not isinstance(prior, type):
        return Function(prior)
    raise TypeError(
        "prior must be a distribution, a pyro_bbb.priors.Prior, the name of one, a callable "
        f"(module, name, shape) -> distribution, or a dict of name patterns to these, got {prior!r}"
    )


def _require_pyro(distribution: Distribution) -> None:
    if not isinstance(distribution, TorchDistributionMixin):
        family = type(distribution)
        raise TypeError(
            f"prior must be a distribution of pyro.distributions, got {family.__module__}."
            f"{family.__name__}"
        )


def _expand(distribution: Any, name: str, shape: Size) -> Distribution:
    if type(distribution) is dist.Normal:
        distribution = SummedNormal(distribution.loc, distribution.scale, validate_args=False)
    try:
        expanded = distribution.expand(shape)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"prior of {name!r} must expand to shape {list(shape)}, got batch_shape "
            f"{list(distribution.batch_shape)} and event_shape {list(distribution.event_shape)}"
        ) from error
    result: Distribution = without_validation(expanded.to_event(len(shape)))
    return result
