# SPDX-License-Identifier: Apache-2.0
"""Posteriors as plain data (`record`), and made from such data (`make`): guides, and `Chains`.

A record has the guide's name in `GUIDES`, its options, and the latents that the model does not
declare but its forward pass samples; of chains, the type of the draws and all that is not a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal

import pyro.distributions as dist
import torch
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Size, Tensor
from torch.distributions import ExpTransform

from pyro_bbb._utils.files import LoadError, require_form
from pyro_bbb.guides import GUIDES, Ensemble, Guide
from pyro_bbb.latents import Latent, Site
from pyro_bbb.persistence.state_dict import State

Record = dict[str, Any]
_FORM = {
    "name": str,
    "options": dict[str, Any],
    "pruned": bool,
    "found": dict[str, dict[str, Any]],
}
_CHAINS, _DRAWS = "chains", "by_chain."
_FORM_OF_CHAINS = {
    "name": str,
    "latents": list[str],
    "dtype": Literal["float64", "float32", "float16", "bfloat16"],
    "numbers": dict[str, float],
}


def record(guide: Any, declared: set[str]) -> Record:
    """Return all that `make` needs besides tensors and the latents ``declared`` by the model."""
    if is_chains(guide):
        dtype = str(next(iter(guide.values())).dtype).removeprefix("torch.")
        values = vars(guide).items()
        numbers = {name: x for name, x in values if isinstance(x, int | float) and isfinite(x)}
        return {"name": _CHAINS, "latents": [*guide], "dtype": dtype, "numbers": numbers}
    if type(guide) is Ensemble:
        members = [record(member, declared) for member in guide.members]
        return {"name": "ensemble", "members": members, "calls": guide.turn % guide.size}
    name = next((name for name, cls in GUIDES.items() if cls is type(guide)), None)
    if name is None:
        names = f"one of {sorted(GUIDES)} or Chains"
        raise TypeError(f"guide must be {names}, got a {type(guide).__name__}")
    return {
        "name": name,
        "options": guide.options,
        "pruned": bool(getattr(guide, "unpruned", {})),
        "found": {x.name: _latent(x) for x in guide.latents.values() if x.name not in declared},
    }


def make(record: Record, model: Any, state: State, prefix: str) -> Any:
    """Return a record's posterior for a model, with the tensors saved under ``prefix``."""
    if record["name"] == _CHAINS:
        return _chains(record, state.tensors, prefix)
    if record["name"] == "ensemble":
        return _ensemble(record, model, state, prefix)
    require_form(record, _FORM, prefix)
    cls: Any = GUIDES[record["name"]]
    require_form(record["options"], dict.fromkeys(cls.option_names(), Any), f"{prefix}options")
    guide: Guide = cls(model, **record["options"])
    if record["found"]:
        guide.add_latents(_sites(record["found"]))
    if record["pruned"]:
        guide = guide.without({})
    state.fill(guide, prefix)
    return guide


def shapes(guide: Any) -> Mapping[str, Size]:
    """Return the shape of each latent of a posterior."""
    if is_chains(guide):
        return {name: values.shape[2:] for name, values in guide.by_chain.items()}
    return dict(guide.latent_shapes())


def is_chains(guide: Any) -> bool:
    """Return whether a posterior is `Chains`, whose package imports this one."""
    from pyro_bbb.mcmc import Chains

    return isinstance(guide, Chains)


def chains_tensors(chains: Any, prefix: str) -> dict[str, Tensor]:
    """Return draws, in float32 at most, and diagnostics by name; `make` takes them back."""
    tensors = {name: x for name, x in vars(chains).items() if isinstance(x, Tensor)}
    for name, draws in chains.by_chain.items():
        tensors[_DRAWS + name] = draws.float() if draws.dtype == torch.float64 else draws
    return {prefix + name: x for name, x in tensors.items()}


def _chains(record: Record, tensors: dict[str, Tensor], prefix: str) -> Any:
    from pyro_bbb.mcmc import Chains

    require_form(record, _FORM_OF_CHAINS, prefix)
    dtype, draws = getattr(torch, record["dtype"]), prefix + _DRAWS
    by_chain = {name: tensors.pop(draws + name).to(dtype) for name in record["latents"]}
    names = [name for name in tensors if name.startswith(prefix)]
    fields: dict[str, Any] = {name.removeprefix(prefix): tensors.pop(name) for name in names}
    chains = Chains(by_chain=by_chain, **fields, **record["numbers"])
    if wrong := [k for k, x in by_chain.items() if x.shape[:2] != chains.diverging.shape]:
        raise LoadError(f"chains must hold equally many draws of each latent, not of {wrong}")
    return chains


def _ensemble(record: Record, model: Any, state: State, prefix: str) -> Ensemble:
    form = {"name": str, "members": list[dict[str, Any]], "calls": int}
    require_form(record, form, prefix)
    first, *others = (
        make(member, model, state, f"{prefix}member.{i}.")
        for i, member in enumerate(record["members"])
    )
    ensemble = Ensemble(model, lambda model: first, 1)
    for member in others:
        ensemble.add(member)
    ensemble.turn = record["calls"]
    return ensemble


def _latent(latent: Latent) -> Record:
    if latent.transform is not None and type(latent.transform) is not ExpTransform:
        raise ValueError(
            f"latent {latent.name!r}, which the forward pass samples by itself, must be of real or "
            "positive values to be saved; declare it as a PyroSample instead"
        )
    return {
        "shape": list(latent.shape),
        "positive": latent.transform is not None,
        "event_dim": latent.event_dim,
        "plates": [[frame.name, frame.dim, frame.size] for frame in latent.frames],
    }


def _sites(found: Record) -> dict[str, Site]:
    """Return sample sites of the latents' names, supports and plates."""
    sites = {}
    for name, latent in found.items():
        zeros = torch.zeros(latent["shape"])
        family = dist.LogNormal if latent["positive"] else dist.Normal
        frames = tuple(
            CondIndepStackFrame(name=plate, dim=dim, size=size, counter=0)
            for plate, dim, size in latent["plates"]
        )
        fn = family(zeros, torch.ones_like(zeros)).to_event(latent["event_dim"])
        value = torch.ones_like(zeros)
        sites[name] = {"name": name, "value": value, "fn": fn, "cond_indep_stack": frames}
    return sites
