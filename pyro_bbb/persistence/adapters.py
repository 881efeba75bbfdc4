# SPDX-License-Identifier: Apache-2.0
"""Saves of an adapted network: its frozen weights stay out, and their hash goes in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyro_bbb._utils.files import LoadError, require_form
from pyro_bbb.networks import Adapted, copy_sharing
from pyro_bbb.persistence.archive import Json
from pyro_bbb.persistence.state_dict import State, digest

WHY = "its adapters belong to a network that the save does not hold; adapt() makes it"


def is_adapted(module: nn.Module) -> bool:
    """Return whether a network, or a model's, has adapters; see `pyro_bbb.adapt`."""
    return any(isinstance(part, Adapted) for part in module.modules())


def take_base(model: nn.Module, state: State) -> Json:
    """Remove the model's frozen parameters from a state; return their names and their hash."""
    frozen = {id(x) for x in model.parameters() if not x.requires_grad}
    names = sorted(name for name, value in state.tensors.items() if id(value) in frozen)
    taken = [state.tensors.pop(name) for name in names]
    if sharded := [name for name, x in zip(names, taken, strict=True) if hasattr(x, "device_mesh")]:
        raise ValueError(
            f"frozen weights must be whole to be saved, got shards (DTensor) of {sharded[0]}: save "
            "a model that is not sharded, with this one's guide.state_dict() and lora_B"
        )
    return {"names": names, "sha256": digest(taken), "scales": _scales(model, "model.")}


def add_base(base: Json, part: nn.Module, prefix: str, tensors: dict[str, Tensor]) -> None:
    """Add frozen parameters to saved tensors.

    Args:
        base: result of `take_base`.
        part: a model or its network, with the same adapters.
        prefix: of the names of the part's tensors in the save.
        tensors: of the save, changed in place.

    Raises:
        LoadError: the frozen parameters or the adapters differ from the saved ones.
    """
    require_form(base, {"names": list[str], "sha256": str, "scales": dict[str, float]}, "base")
    present = {prefix + name: value for name, value in part.named_parameters()}
    if missing := [name for name in base["names"] if name not in present]:
        raise LoadError(f"network must have the frozen parameters {missing}, as the saved one has")
    taken = {name: present[name].detach() for name in base["names"]}
    if digest(taken.values()) != base["sha256"]:
        raise LoadError(
            "network must have the frozen weights that the adapters were trained for, got others "
            f"(SHA-256 of {len(taken)} parameters is not {base['sha256'][:12]}...)"
        )
    scales, saved = _scales(part, prefix), base["scales"]
    for path in saved | scales:
        if saved.get(path) != scales.get(path):
            raise LoadError(
                f"network must have an adapter of alpha / rank {saved.get(path)} on {path!r}, got "
                f"{scales.get(path)} (None is no adapter)"
            )
    tensors.update(taken)


def copy_on_cpu(network: nn.Module) -> nn.Module:
    """Return a copy on the CPU that shares the memory of frozen parameters on the CPU."""
    frozen = (x for x in network.parameters() if not x.requires_grad)
    return copy_sharing(network, frozen).to(torch.device("cpu"))


def _scales(root: nn.Module, prefix: str) -> dict[str, float]:
    return {
        prefix + path: part.lora_scale
        for path, part in root.named_modules()
        if isinstance(part, Adapted)
    }
