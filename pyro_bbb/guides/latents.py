# SPDX-License-Identifier: Apache-2.0
"""Latent variables of a model, read off their sample sites, and the initial means of a guide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from pyro.infer.autoguide.initialization import init_to_median
from torch import Size, Tensor, nn
from torch.distributions import ExpTransform, Transform, biject_to, constraints

from pyro_bbb._utils.validation import as_number, finite, of_array, tensor

Site: TypeAlias = dict[str, Any]
InitLoc: TypeAlias = "float | str | Mapping[str, Tensor] | nn.Module | Callable[[Site], Tensor]"


@dataclass(frozen=True)
class Latent:
    """A latent variable of the model."""

    name: str  # of its sample site
    shape: Size
    transform: Transform | None  # from unconstrained space onto the support; none of real values
    event_dim: int
    frames: tuple[Any, ...]  # plates around the site

    def constrain(self, unconstrained: Tensor) -> Tensor:
        """Return the value at a point of unconstrained space, in new memory."""
        return unconstrained.clone() if self.transform is None else self.transform(unconstrained)

    def unconstrain(self, value: Tensor) -> Tensor:
        """Return the point of unconstrained space at a value."""
        return value if self.transform is None else self.transform.inv(value)


def describe(name: str, site: Site, onto: Callable[[Any], Any] = biject_to) -> Latent:
    """Read a latent off its sample site; it must be continuous, in no subsampled plate.

    ``onto`` maps a support to the transform of unconstrained space onto it.
    """
    support, frames = site["fn"].support, tuple(f for f in site["cond_indep_stack"] if f.vectorized)
    if site["fn"].has_enumerate_support or getattr(support, "is_discrete", False):
        raise ValueError(f"latent {name!r} is discrete; a Normal guide needs continuous latents")
    if any(frame.full_size not in (None, frame.size) for frame in frames):
        raise ValueError(
            f"latent {name!r} is in a subsampled plate, which a Normal guide cannot represent"
        )
    event_dim = site["fn"].event_dim
    base = _base(support)
    try:
        transform = None if base in _REAL else _transform(base, onto)
    except NotImplementedError as error:
        raise ValueError(
            f"latent {name!r} has the support {base}, onto which no bijection is known: "
            "guides.make('delta', model) takes it, as a point estimate"
        ) from error
    return Latent(name, site["value"].shape, transform, event_dim, frames)


_REAL = (constraints.real, constraints.real_vector)


def _base(support: Any) -> Any:
    """Return the support of one value."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _transform(support: Any, onto: Callable[[Any], Any]) -> Transform:
    """Return the map from unconstrained space; for positive values the exponential."""
    if support in (constraints.positive, constraints.nonnegative):
        return ExpTransform()  # torch's has an affine part, and so no closed-form KL
    transform: Transform = onto(support)
    return transform


def start(latent: Latent, site: Site, initialise: Callable[[Site], Tensor]) -> Tensor:
    """Return the initial mean of a latent, in unconstrained space."""
    value, expected = tensor(f"init_loc of {latent.name!r}", initialise(site)), site["value"]
    if value.shape != expected.shape:
        raise ValueError(
            f"init_loc of {latent.name!r} must have shape {list(expected.shape)}, "
            f"got {list(value.shape)}"
        )
    loc = latent.unconstrain(value)
    if not loc.isfinite().all():
        raise ValueError(
            f"init_loc of {latent.name!r} must be finite and inside its support, got values "
            f"from {value.min().item()} to {value.max().item()}"
        )
    return loc.detach().to(expected.dtype)


def as_initialiser(init_loc: Any) -> Callable[[Site], Tensor]:
    """Convert any accepted ``init_loc`` to a function from a site to its initial value."""
    init_loc = as_number(init_loc)
    if init_loc is None or init_loc == "he":
        return _he
    if isinstance(init_loc, str):
        raise ValueError(f"init_loc must be 'he' where it is a name, got {init_loc!r}")
    if isinstance(init_loc, (int, float)) and not isinstance(init_loc, bool):
        return partial(_constant, finite("init_loc", init_loc))
    if isinstance(init_loc, nn.Module):
        return partial(_given, dict(init_loc.named_parameters()))
    if isinstance(init_loc, Mapping):
        return partial(_given, dict(init_loc))
    if callable(init_loc):
        return init_loc
    raise TypeError(
        "init_loc must be a number, 'he', a dict of tensors, a network or a function of a site, "
        f"got {init_loc!r}"
    )


def _is_real(site: Site) -> bool:
    return _base(site["fn"].support) in _REAL


def _he(site: Site) -> Tensor:
    value = site["value"]
    if site["name"].endswith("lora_B"):  # an adapter adds nothing at first
        return torch.zeros_like(value)
    if _is_real(site) and value.dim() >= 2:
        return torch.randn_like(value) * math.sqrt(2 / math.prod(value.shape[1:]))
    return _centre(site)


def _centre(site: Site) -> Tensor:
    """Return the prior's mean of a real latent, where it is finite, else the median."""
    if _is_real(site):
        mean = site["fn"].mean
        if mean.isfinite().all():
            return mean.expand_as(site["value"])
    median: Tensor = init_to_median(site)
    return median


def _constant(number: float, site: Site) -> Tensor:
    return torch.full_like(site["value"], number) if _is_real(site) else _centre(site)


def _given(tensors: Mapping[str, Tensor], site: Site) -> Tensor:
    for key in (site["name"], site["name"].removeprefix("network.")):
        if key in tensors:
            return _as_tensor(key, tensors[key]).to(site["value"])
    return _he(site)


def _as_tensor(key: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(of_array(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"init_loc[{key!r}] must be a tensor, got {value!r}") from error


def refuse_unknown(init_loc: Any, latents: Iterable[str]) -> None:
    """Raise ValueError if tensors or a network name latents that the model lacks."""
    known = {*latents, *(name.removeprefix("network.") for name in latents)}
    if isinstance(init_loc, Mapping):
        unknown = set(init_loc) - known
        if unknown:
            raise ValueError(
                f"init_loc names {sorted(unknown)}; the latents are {list(latents)} (those that a "
                "forward pass samples by itself start where a function of the site says)"
            )
    if isinstance(init_loc, nn.Module):
        names = [name for name, _ in init_loc.named_parameters()]
        if known.isdisjoint(names):
            raise ValueError(
                f"init_loc must have parameters named like the latents {list(latents)}, got {names}"
            )
