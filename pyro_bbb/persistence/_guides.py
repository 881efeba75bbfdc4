"""A guide as plain data: its name, its options, and the latents that it holds."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine import Trace
from pyro.poutine.indep_messenger import CondIndepStackFrame
from torch import Size
from torch.distributions import ExpTransform

from pyro_bbb.guides import GUIDES, AutoSoftplusNormal, Ensemble, Guide
from pyro_bbb.guides.latents import Latent

Record = dict[str, Any]


_OPTIONS: dict[str, dict[str, str]] = {  # option -> attribute
    "softplus_normal": {"init_rho": "_init_rho"},
    "normal": {"init_scale": "_init_scale"},
    "low_rank": {"init_scale": "_init_scale", "rank": "_asked_rank"},
    "full_rank": {"init_scale": "_init_scale"},
    "flow": {
        "init_scale": "_init_scale",
        "hidden_dim": "_hidden_dim",
        "num_transforms": "_num_transforms",
    },
    "delta": {},
    "laplace": {},
    "laplace_ggn": {},
}


_NAMES = {GUIDES[name]: name for name in _OPTIONS}


def record(guide: Any, declared: set[str]) -> Record:
    """What `make` needs besides tensors.

    Args:
        guide: the guide.
        declared: names of the latents that the model tells of without data.

    Raises:
        TypeError: the guide is none of `guides.GUIDES`.
        ValueError: a latent that the forward pass samples has a support that the format lacks.
    """
    if type(guide) is Ensemble:
        members = [record(member, declared) for member in guide.members]
        return {"name": "ensemble", "members": members, "calls": guide._calls % guide.size}
    name = _NAMES.get(type(guide))
    if name is None:
        raise TypeError(f"guide must be one of {sorted(GUIDES)}, got a {type(guide).__name__}")
    found, shapes = {}, latent_shapes(guide)
    for latent in guide._latents.values():
        if latent.name not in declared:
            found[latent.name] = _record_latent(latent, shapes[latent.name])
    options = {option: getattr(guide, own) for option, own in _OPTIONS[name].items()}
    return {
        "name": name,
        "options": options,
        "pruned": bool(getattr(guide, "unpruned", {})),
        "found": found,
    }


def make(record: Record, model: Any, fill: Callable[[Guide, str], None], path: str) -> Guide:
    """The guide of a record, for a model.

    Args:
        record: as `record` gave it.
        model: the model.
        fill: gives a guide the tensors whose names begin so.
        path: how they do.

    Raises:
        KeyError: a name or a key is unknown or lacking.
    """
    if record["name"] == "ensemble":
        _require_keys(record, {"name", "members", "calls"})
        first, *others = (
            make(member, model, fill, f"{path}member.{i}.")
            for i, member in enumerate(record["members"])
        )
        ensemble = Ensemble(model, lambda model: first, 1)
        for member in others:
            ensemble.add(member)
        ensemble._calls = operator.index(record["calls"])
        return ensemble
    _require_keys(record, {"name", "options", "pruned", "found"})
    _require_keys(record["options"], set(_OPTIONS[record["name"]]))
    cls: Any = GUIDES[record["name"]]
    guide: Guide = cls(model, **record["options"])
    if record["found"]:
        guide._add_latents(_trace_of(record["found"]))
    if record["pruned"]:
        guide = guide.without({})
    fill(guide, path)
    return guide


def latent_shapes(guide: Any) -> dict[str, Size]:
    """Shapes of the latents, in their own space, by name."""
    if isinstance(guide, Ensemble):
        return latent_shapes(guide.members[0])
    if isinstance(guide, AutoSoftplusNormal):
        return {name: _shape(x, guide.loc(name).shape) for name, x in guide._latents.items()}
    nodes = {} if guide.prototype_trace is None else guide.prototype_trace.nodes
    return {name: nodes[name]["value"].shape for name in guide._latents}


def _require_keys(record: Record, keys: set[str]) -> None:
    if record.keys() != keys:
        raise KeyError(f"a guide's record must have the keys {sorted(keys)}, got {list(record)}")


def _shape(latent: Latent, unconstrained: Size) -> Size:
    transform = latent.transform
    return unconstrained if transform is None else Size(transform.forward_shape(unconstrained))


def _record_latent(latent: Latent, shape: Size) -> Record:
    if latent.transform is not None and type(latent.transform) is not ExpTransform:
        raise ValueError(
            f"latent {latent.name!r}, which the forward pass samples by itself, must be of real or "
            "positive values to be saved; declare it as a PyroSample instead"
        )
    return {
        "shape": list(shape),
        "positive": latent.transform is not None,
        "event_dim": latent.event_dim,
        "plates": [[frame.name, frame.dim, frame.size] for frame in latent.frames],
    }


def _trace_of(found: Record) -> Trace:
    """Sites like those that the model's forward pass would show, for their names and spaces."""
    trace = Trace()
    for name, latent in found.items():
        zeros = torch.zeros(latent["shape"])
        family = dist.LogNormal if latent["positive"] else dist.Normal
        frames = tuple(
            CondIndepStackFrame(name=plate, dim=dim, size=size, counter=0)
            for plate, dim, size in latent["plates"]
        )
        fn = family(zeros, torch.ones_like(zeros)).to_event(latent["event_dim"])
        site = {
            "type": "sample",
            "name": name,
            "is_observed": False,
            "value": torch.ones_like(zeros),
        }
        trace.add_node(name, **site, fn=fn, cond_indep_stack=frames)
    return trace
