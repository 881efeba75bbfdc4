# SPDX-License-Identifier: Apache-2.0
"""Guides as plain data (`record`), and made from such data (`make`).

A record has the guide's name in `GUIDES`, its options, and the latents that the model does not
declare but its forward pass samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine import Trace
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch.distributions import ExpTransform

from pyro_bbb._utils.files import require_form
from pyro_bbb.guides import GUIDES, Ensemble, Guide
from pyro_bbb.guides.latents import Latent

Record = dict[str, Any]
_FORM = {
    "name": str,
    "options": dict[str, Any],
    "pruned": bool,
    "found": dict[str, dict[str, Any]],
}


def record(guide: Any, declared: set[str]) -> Record:
    """Return all that `make` needs besides tensors and the latents ``declared`` by the model."""
    if type(guide) is Ensemble:
        members = [record(member, declared) for member in guide.members]
        return {"name": "ensemble", "members": members, "calls": guide._calls % guide.size}
    name = next((name for name, cls in GUIDES.items() if cls is type(guide)), None)
    if name is None:
        raise TypeError(f"guide must be one of {sorted(GUIDES)}, got a {type(guide).__name__}")
    return {
        "name": name,
        "options": guide.options,
        "pruned": bool(getattr(guide, "unpruned", {})),
        "found": {x.name: _latent(x) for x in guide._latents.values() if x.name not in declared},
    }


def make(record: Record, model: Any, fill: Callable[[Guide, str], None], prefix: str) -> Guide:
    """Return a record's guide for a model; ``fill`` copies the tensors saved under ``prefix``."""
    if record["name"] == "ensemble":
        return _ensemble(record, model, fill, prefix)
    require_form(record, _FORM, prefix)
    cls: Any = GUIDES[record["name"]]
    require_form(record["options"], dict.fromkeys(cls.option_names(), Any), f"{prefix}options")
    guide: Guide = cls(model, **record["options"])
    if record["found"]:
        guide._add_latents(_trace(record["found"]))
    if record["pruned"]:
        guide = guide.without({})
    fill(guide, prefix)
    return guide


def _ensemble(
    record: Record, model: Any, fill: Callable[[Guide, str], None], prefix: str
) -> Ensemble:
    form = {"name": str, "members": list[dict[str, Any]], "calls": int}
    require_form(record, form, prefix)
    first, *others = (
        make(member, model, fill, f"{prefix}member.{i}.")
        for i, member in enumerate(record["members"])
    )
    ensemble = Ensemble(model, lambda model: first, 1)
    for member in others:
        ensemble.add(member)
    ensemble._calls = record["calls"]
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


def _trace(found: Record) -> Trace:
    """Return a trace with sites of the latents' names, supports and plates."""
    trace = Trace()
    for name, latent in found.items():
        zeros = torch.zeros(latent["shape"])
        family = dist.LogNormal if latent["positive"] else dist.Normal
        frames = tuple(
            CondIndepStackFrame(name=plate, dim=dim, size=size, counter=0)
            for plate, dim, size in latent["plates"]
        )
        fn = family(zeros, torch.ones_like(zeros)).to_event(latent["event_dim"])
        node = {"type": "sample", "is_observed": False, "value": torch.ones_like(zeros)}
        trace.add_node(name, name=name, **node, fn=fn, cond_indep_stack=frames)
    return trace
