# SPDX-License-Identifier: Apache-2.0
r"""Likelihoods: from a network's outputs $f$ to the distribution of the observations $y$.

| class | distribution |
|---|---|
| `Categorical` | $P(y = c) = \operatorname{softmax}(f)_c$ |
| `Bernoulli` | $P(y = 1) = 1 / (1 + e^{-f})$ |
| `Gaussian` | $y \sim N(f, \sigma^2)$ |
| `HeteroscedasticGaussian` | $y \sim N(f_1, \operatorname{softplus}(f_2)^2)$ |
| `StudentT` | $y = f + \sigma t_\nu$ |
| `Poisson` | $y \sim \operatorname{Poisson}(e^f)$ |
| `NegativeBinomial` | counts of mean $e^f$ and variance $e^f + e^{2f} / r$ |

The leading dimension of the outputs is the batch; the others belong to one observation. The
quantities $\sigma$, $\nu$ and $r$ are known, latent (a distribution) or learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroParam
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_bbb._utils.saving import Arguments, Modules, saveable
from pyro_bbb._utils.validation import as_seed, one_of, positive, tensor
from pyro_bbb.distributions import observation as _families
from pyro_bbb.distributions import softplus
from pyro_bbb.distributions.summed_event import innermost
from pyro_bbb.priors import ByName, declare


class Likelihood(PyroModule):
    """Base of the likelihoods: a subclass names a `family` and its `arguments`, or a `forward`.

    Args:
        missing: meaning of NaN in the targets: ``"raise"`` an error, or ``"ignore"`` a missing
            entry, which does not count.
    """

    family: ClassVar[Any] = Distribution
    ignored: int | str | None = None  # entries of targets that do not count: a label, or "nan"

    def __init__(self, *, missing: str = "raise") -> None:
        super().__init__()
        if one_of("missing", missing, ["raise", "ignore"]) == "ignore":
            self.ignored: int | None = "nan"

    @property
    def is_standard(self) -> bool:
        """True where family, arguments and `forward` are those of a class of this module."""
        return all(
            next(cls for cls in type(self).__mro__ if name in vars(cls)).__module__ == __name__
            for name in ("family", "arguments", "forward")
        )

    @property
    def has_unit(self) -> bool:
        """True for Normal and Student's t noise, whose location and scale have a unit."""
        overridden = type(self).forward is not Likelihood.forward
        return self.family in _families.LOCATION_SCALE and not overridden

    def arguments(self, outputs: Tensor) -> dict[str, Any]:
        """Return the family's arguments for network outputs ``[batch, ...]``."""
        raise NotImplementedError(f"{type(self).__name__} must define arguments or forward")

    def forward(self, outputs: Tensor) -> Any:
        """Return the distribution of the observations, of batch shape ``[batch]``."""
        family = self.family(**self.arguments(outputs))
        return dist.Independent(family, len(family.batch_shape) - 1)

    def prepare(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Convert targets to the dtype that the family scores; ValueError for another kind."""
        if y.is_complex():
            raise ValueError(f"y must hold real numbers, got dtype {y.dtype}")
        return y.to(outputs.dtype)

    def check(self, outputs: Tensor, y: Tensor) -> None:
        """Check all targets ``[n, ...]`` against the network's outputs for a few examples.

        Raises:
            ValueError: the shape, dtype, device or range of the targets does not fit.
            TypeError: an argument is not a tensor.
        """
        if (y := tensor("y", y)).device != tensor("outputs", outputs).device:
            raise ValueError(f"y must be on {outputs.device} as the outputs are, got {y.device}")
        if y.numel() == 0:
            raise ValueError(f"y must hold at least one target, got shape {list(y.shape)}")
        if self.ignored is not None and not self.is_standard:
            raise ValueError(
                f"{type(self).__name__} must not ignore targets: only the likelihoods of "
                "pyro_bbb.likelihoods can, whose entries are independent; leave out the rows"
            )
        prepared, observation = self.prepare(y, outputs), self(outputs)
        if observation.batch_shape != outputs.shape[:1]:
            raise ValueError(
                f"{type(self).__name__} must give a distribution of batch shape {[len(outputs)]}, "
                f"got {list(observation.batch_shape)}: make an event of the rest by to_event"
            )
        y, prepared = (align(x, observation.event_shape) for x in (y, prepared))
        which = _families.counted(y, self.ignored)
        if which is not None:
            y, prepared = y[which], prepared[which]
        _require("finite real numbers", y, y.isfinite())
        _require(f"numbers in the range of {outputs.dtype}", y, prepared.isfinite())
        with suppress(NotImplementedError):  # which a distribution without support raises
            base = innermost(observation)
            bounds = vars(support := base.support)
            if not any(isinstance(bound, Tensor) and bound.dim() for bound in bounds.values()):
                values = f"values in the support {support} of {type(base).__name__}"
                if type(base) is _families.Categorical:
                    values = "labels in [{lower_bound}, {upper_bound}]".format(**bounds)
                valid = support.check(prepared)
                valid = valid.reshape(*valid.shape, *[1] * (y.dim() - valid.dim())).expand_as(y)
                _require(_TARGETS.get(support, values), y, valid)

    def without_ignored(self, observation: Any, y: Tensor) -> tuple[Any, Tensor]:
        """Return distribution and aligned targets without the entries that do not count."""
        which = _families.counted(y, self.ignored)
        if which is None:
            return observation, y
        return _families.Observed(observation, which), y.masked_fill(~which, 0)


_TARGETS = {  # in messages, by the support of a family
    constraints.boolean: "0 and 1 only",
    constraints.nonnegative_integer: "counts 0, 1, 2, ...",
}


def _require(values: str, y: Tensor, valid: Tensor) -> None:
    if not valid.all():
        raise ValueError(f"y must hold {values}, got {y[~valid][0].item()}")


def align(y: Tensor, event_shape: torch.Size) -> Tensor:
    """Reshape targets to one event per row; ``[n]`` is accepted for ``[n, 1]``.

    Other shapes raise ValueError, as broadcasting would be silently wrong.
    """
    if y.dim() == 1 and event_shape == (1,):
        y = y.unsqueeze(-1)
    if y.dim() == 0 or y.shape[1:] != event_shape:
        expected = ", ".join(["n", *map(str, event_shape)])
        raise ValueError(f"expected y of shape [{expected}], got {list(y.shape)}")
    return y


# --- how likelihoods are saved ---


class _Learned(NamedTuple):
    """Initial value of a quantity that is a point estimate."""

    init: Any


def _arguments(*names: str) -> Callable[[Any], Arguments]:
    """Return a reader of known and latent quantities, and of the shapes of learned ones."""

    def read(x: Any) -> Arguments:
        arguments: Arguments = {} if x.ignored is None else {"missing": "ignore"}
        for name in names:
            if name in x._pyro_params:
                value = x._parameters[f"{name}_unconstrained"]
                arguments[f"learned_{name}"] = tuple(value.shape)
            elif name in x._pyro_samples:
                arguments[name] = x._modules["prior"].for_weight(name).distribution
            else:
                arguments[name] = getattr(x, name)
        return arguments

    return read


def _build(cls: Any, arguments: Arguments, modules: Modules) -> Any:
    learned = [name for name in arguments if name.startswith("learned_")]
    for name in learned:
        shape = arguments.pop(name)
        arguments[name.removeprefix("learned_")] = _Learned(torch.ones(shape))
    return cls(**arguments)


# --- the likelihoods ---


@saveable(lambda x: {} if x.ignored is None else {"ignore_index": x.ignored})
class Categorical(Likelihood):
    """One of C classes: outputs are logits ``[batch, ..., C]``, targets integers in [0, C).

    A network with channels first, as one that ends in a convolution, returns its outputs after
    ``.movedim(1, -1)``. Training refuses other shapes, and outputs that are those of a convolution,
    batch normalisation or upsampling where C, H and W are equal.

    Args:
        ignore_index: label of targets that do not count, as pixels of no class; an integer.
    """

    family = _families.Categorical

    def __init__(self, *, ignore_index: int | None = None) -> None:
        super().__init__()
        self.ignored: int | None = (
            None if ignore_index is None else as_seed("ignore_index", ignore_index)
        )

    def arguments(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the outputs as logits; ValueError if they have no class dimension."""
        if outputs.dim() < 2:
            raise ValueError(f"expected outputs of shape [batch, classes], got {outputs.shape}")
        return {"logits": outputs}

    def prepare(self, y: Tensor, outputs: Tensor) -> Tensor:
        """Return the labels, unchanged; ValueError if they are not of an integer type."""
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise ValueError(f"y must hold integer class labels, got dtype {y.dtype}")
        return y

    def check(self, outputs: Tensor, y: Tensor) -> None:
        """Check as `Likelihood` does, and that the classes are the outputs' last dimension."""
        shape = tensor("outputs", outputs).shape[1:]
        if len(shape) > 1 and tensor("y", y).shape[1:] == shape[1:] != shape[:-1]:
            raise ValueError(
                f"the classes must be the last dimension of the outputs, got outputs {[*shape]} "
                f"and targets {[*y.shape[1:]]} of an example: return outputs.movedim(1, -1)"
            )
        super().check(outputs, y)


@saveable(_arguments())
class Bernoulli(Likelihood):
    """Binary targets: outputs are logits, targets 0 or 1 of the same shape (or ``[n]`` for one)."""

    family = dist.Bernoulli

    def arguments(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the outputs as logits."""
        return {"logits": outputs}


@saveable(_arguments("scale"), build=_build)
class Gaussian(Likelihood):
    r"""Real targets with Normal noise, $y \sim N(f(x), \sigma^2)$, in the targets' unit.

    Args:
        scale: the noise's standard deviation $\sigma$: a positive number or tensor that
            broadcasts to the outputs, if known; a distribution of positive support, if latent
            (the guide then infers it as ``likelihood.scale``). `Gaussian.learned` estimates it.
        missing: as for `Likelihood`.

    Raises:
        ValueError: the scale is not positive and finite, or its distribution reaches below 0.
        TypeError: the scale is of another kind.
    """

    family = _families.Normal

    def __init__(
        self, scale: float | Tensor | Distribution = 1.0, *, missing: str = "raise"
    ) -> None:
        super().__init__(missing=missing)
        _set_positive(self, scale=scale)

    @classmethod
    def learned(cls, init: float | Tensor = 1.0, *, missing: str = "raise") -> Gaussian:
        """Return noise whose scale is a point estimate, trained with the guide from ``init``."""
        return cls(_Learned(init), missing=missing)  # type: ignore[arg-type]

    def arguments(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the outputs as means, and the scale expanded to them."""
        return {"loc": outputs, "scale": _expand_as("scale", self.scale, outputs)}


@saveable(_arguments())
class HeteroscedasticGaussian(Likelihood):
    """Normal noise that depends on the input: outputs ``[batch, 2 d]`` are d means, d raw scales.

    The standard deviation is the softplus of the raw scale, in the targets' unit.
    """

    family = _families.Normal

    def arguments(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return one half of the outputs as means, and softplus of the other half as scales."""
        if outputs.shape[-1] % 2:
            raise ValueError(f"expected an even number of outputs, got {outputs.shape[-1]}")
        loc, raw = outputs.chunk(2, dim=-1)
        return {"loc": loc, "scale": softplus(raw)}


@saveable(_arguments())
class Poisson(Likelihood):
    """Counts: outputs are logarithms of the rates, targets integers from 0."""

    family = _families.LogRatePoisson

    def arguments(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the outputs as log-rates."""
        return {"log_rate": outputs}


@saveable(_arguments("total_count"), build=_build)
class NegativeBinomial(Likelihood):
    r"""Counts that vary more than Poisson's: outputs are logarithms of the means.

    The variance of a count of mean $\mu$ is $\mu + \mu^2 / r$. The Poisson is the limit of large r.

    Args:
        total_count: r, a positive number or tensor that broadcasts to the outputs, if known; a
            distribution of positive support, if latent. By default r is learned: a point estimate
            trained with the guide from 1, see `learned`.
        missing: as for `Likelihood`.

    Raises:
        ValueError, TypeError: as for `Gaussian`.
    """

    family = _families.NegativeBinomial

    def __init__(
        self,
        total_count: float | Tensor | Distribution | None = None,
        *,
        missing: str = "raise",
    ) -> None:
        super().__init__(missing=missing)
        _set_positive(self, total_count=_Learned(1.0) if total_count is None else total_count)

    @classmethod
    def learned(cls, init: float | Tensor = 1.0, *, missing: str = "raise") -> NegativeBinomial:
        """Return counts whose r is a point estimate, trained with the guide from ``init``."""
        return cls(_Learned(init), missing=missing)  # type: ignore[arg-type]

    def arguments(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return r expanded to the outputs, and the logarithm of mean / r as logits."""
        total_count = _expand_as("total_count", self.total_count, outputs)
        return {"total_count": total_count, "logits": outputs - total_count.log()}


@saveable(_arguments("df", "scale"))
class StudentT(Likelihood):
    """Real targets with heavy-tailed noise; outputs are the locations.

    Args:
        df: degrees of freedom, a positive number or a distribution of positive support.
        scale: scale in the targets' unit, as in `Gaussian`.
        missing: as for `Likelihood`.

    Raises:
        ValueError, TypeError: as for `Gaussian`.
    """

    family = _families.StudentT

    def __init__(
        self,
        df: float | Tensor | Distribution,
        scale: float | Tensor | Distribution = 1.0,
        *,
        missing: str = "raise",
    ) -> None:
        super().__init__(missing=missing)
        _set_positive(self, df=df, scale=scale)

    def arguments(self, outputs: Tensor) -> dict[str, Tensor]:
        """Return the outputs as locations, and degrees of freedom and scale expanded to them."""
        df, scale = (_expand_as(x, getattr(self, x), outputs) for x in ("df", "scale"))
        return {"df": df, "loc": outputs, "scale": scale}


def _set_positive(module: PyroModule, **quantities: Any) -> None:
    """Give a module positive quantities: constants, sample sites or parameters."""
    latent = {name: x for name, x in quantities.items() if isinstance(x, Distribution)}
    for name, value in quantities.items():
        if isinstance(value, Distribution):
            if torch.as_tensor(getattr(value.support, "lower_bound", -math.inf)).min() < 0:
                raise ValueError(f"{name} must have a prior on positive values, got {value}")
        elif isinstance(value, _Learned):
            init = torch.as_tensor(_known("init", value.init), dtype=torch.get_default_dtype())
            module._initial = init.clone()
            setattr(module, name, PyroParam(init.clone(), constraint=constraints.positive))
        elif isinstance(known := _known(name, value), Tensor):
            module.register_buffer(name, known)
        else:
            setattr(module, name, known)
    if latent:
        declare(module, ByName(latent), **{name: x.batch_shape for name, x in latent.items()})


def _known(name: str, value: Any) -> float | Tensor:
    """Return a positive number, or a copy of a tensor of positive numbers."""
    if not isinstance(value, Tensor):
        return positive(name, value)
    if value.is_complex() or not ((value > 0) & value.isfinite()).all():
        raise ValueError(f"{name} must be positive and finite, got {value}")
    return value.detach().clone()


def _expand_as(name: str, value: float | Tensor, outputs: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        return torch.full_like(outputs, value)
    try:
        return value.expand_as(outputs)
    except RuntimeError as error:
        expected = f"{name} to broadcast to outputs of shape {list(outputs.shape)}"
        raise ValueError(f"expected {expected}, got shape {list(value.shape)}") from error
