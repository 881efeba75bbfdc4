# SPDX-License-Identifier: Apache-2.0
r"""Initial means of a guide, in all forms that ``init_loc`` takes.

By default kernels are drawn as in He et al. (2015), "Delving Deep into Rectifiers":
$w \sim N(0, 2 / n_\text{in})$. Other latents start at the centre of their prior.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from pyro.infer.autoguide.initialization import init_to_median
from torch import Tensor, nn

from pyro_bbb._utils.validation import as_number, finite, of_array, tensor
from pyro_bbb.latents import Latent, Site, is_real, role_of

InitLoc: TypeAlias = "float | str | Mapping[str, Tensor] | nn.Module | Callable[[Site], Tensor]"


def as_initialiser(init_loc: InitLoc | None) -> Callable[[Site], Tensor]:
    """Convert any accepted ``init_loc`` to a function from a site to its initial value."""
    init_loc = as_number(init_loc)
    if init_loc is None or init_loc == "he":
        return _he
    if isinstance(init_loc, str):
        raise ValueError(f"init_loc must be 'he' where it is a name, got {init_loc!r}")
    if isinstance(init_loc, (int, float)) and not isinstance(init_loc, bool):
        return partial(_constant, finite("init_loc", init_loc))
    if isinstance(init_loc, nn.Module):
        return partial(_by_name, dict(init_loc.named_parameters()))
    if isinstance(init_loc, Mapping):
        return partial(_by_name, dict(init_loc))
    if callable(init_loc):
        return init_loc
    raise TypeError(
        "init_loc must be a number, 'he', a dict of tensors, a network or a function of a site, "
        f"got {init_loc!r}"
    )


def initial_loc(latent: Latent, site: Site, initialise: Callable[[Site], Tensor]) -> Tensor:
    """Return the initial mean of a latent, in unconstrained space."""
    value = tensor(f"init_loc of {latent.name!r}", initialise(site))
    return latent.unconstrain(value, "init_loc").detach().to(site["value"].dtype)


def refuse_unknown(init_loc: Any, latents: Iterable[str]) -> None:
    """Raise ValueError if tensors or a network name latents that the model lacks."""
    known = {*latents, *(_in_network(name) for name in latents)}
    if isinstance(init_loc, Mapping):
        unknown = set(init_loc) - known
        if unknown:
            raise ValueError(
                f"init_loc names {sorted(unknown)}; the latents are {list(latents)} (those that "
                "only a forward pass samples start where a function of the site says)"
            )
    if isinstance(init_loc, nn.Module):
        names = [name for name, _ in init_loc.named_parameters()]
        if known.isdisjoint(names):
            raise ValueError(
                f"init_loc must have parameters named like the latents {list(latents)}, got {names}"
            )


def _he(site: Site) -> Tensor:
    value = site["value"]
    if role_of(site["name"]) == "adapter":  # which adds nothing at first
        return torch.zeros_like(value)
    if is_real(site["fn"]) and value.dim() >= 2:
        return torch.randn_like(value) * math.sqrt(2 / math.prod(value.shape[1:]))
    return _centre(site)


def _centre(site: Site) -> Tensor:
    """Return the prior's mean of a real latent, where it is finite, else the median."""
    if is_real(site["fn"]):
        mean = site["fn"].mean
        if mean.isfinite().all():
            return mean.expand_as(site["value"])
    median: Tensor = init_to_median(site)
    return median


def _constant(number: float, site: Site) -> Tensor:
    return torch.full_like(site["value"], number) if is_real(site["fn"]) else _centre(site)


def _by_name(tensors: Mapping[str, Tensor], site: Site) -> Tensor:
    for key in (site["name"], _in_network(site["name"])):
        if key in tensors:
            try:
                return torch.as_tensor(of_array(tensors[key])).to(site["value"])
            except (TypeError, ValueError, RuntimeError) as error:
                what = f"init_loc[{key!r}] must be a tensor, got {tensors[key]!r}"
                raise TypeError(what) from error
    return _he(site)


def _in_network(name: str) -> str:
    """Return a site's name in its network alone."""
    return name.removeprefix("network.")
