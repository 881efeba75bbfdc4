# SPDX-License-Identifier: Apache-2.0
"""Parameters and buffers of several modules by name: shared ones once, frozen ones marked.

Torch's ``state_dict`` repeats a shared parameter under each name and does not mark frozen ones.
The frozen weights of an adapted network are not saved, only their hash: `take_base`, `add_base`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bbb._utils.files import LoadError, require_form
from pyro_bbb.networks import Adapted


@dataclass(frozen=True)
class State:
    """Tensors of several modules, each named by its module's prefix."""

    tensors: dict[str, Tensor]  # every tensor under the first of its names
    aliases: dict[str, str] = field(default_factory=dict)  # first name by each further one
    frozen: list[str] = field(default_factory=list)  # names of parameters that are not trained

    def add(self, module: nn.Module, prefix: str) -> None:
        """Add a module's tensors."""
        first: dict[int, str] = {}
        for name, value in module.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} must be a tensor to be saved, got {value!r}")
            own = first.setdefault(id(value), prefix + name)
            if own != prefix + name:
                self.aliases[prefix + name] = own
                continue
            self.tensors[own] = value
            if isinstance(value, nn.Parameter) and not value.requires_grad:
                self.frozen.append(own)

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Copy tensors into a module, and remove them here; LoadError where they do not fit."""
        device = next((x.device for x in module.parameters()), None)
        for path, m in module.named_modules():
            for leaf, buffer in m._buffers.items():  # some are None at first, as in `Laplace`
                name = prefix + ".".join(filter(None, [path, leaf]))
                if buffer is None and name in self.tensors:
                    m._buffers[leaf] = torch.empty_like(self.tensors[name], device=device)
        used: dict[str, Tensor] = {}
        names: dict[int, str] = {}
        for name, own in module.state_dict(keep_vars=True).items():
            key = self.aliases.get(prefix + name, prefix + name)
            if key not in self.tensors:
                raise LoadError(f"tensor {prefix + name} is not saved, and the network expects it")
            value = self.tensors[key]
            if value.shape != own.shape:
                raise LoadError(
                    f"tensor {prefix + name} has shape {list(value.shape)}, the network expects "
                    f"{list(own.shape)}"
                )
            if used.setdefault(key, own) is not own or names.setdefault(id(own), key) != key:
                raise LoadError(f"tensor {prefix + name} is not shared as the network expects")
            if own.dtype == value.dtype:
                own.detach().copy_(value)
            else:
                own.data = value
            if isinstance(own, nn.Parameter):
                own.requires_grad_(key not in self.frozen)
        for key in used:
            del self.tensors[key]


def cpu_copy(value: Tensor) -> Tensor:
    """Copy a tensor to new contiguous memory on the CPU."""
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of the content of tensors, one after the other."""
    content = sha256()
    for x in tensors:
        content.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


# --- adapted networks ---


def is_adapted(module: nn.Module) -> bool:
    """Return whether a network, or a model's, has adapters; see `pyro_bbb.adapt`."""
    return any(isinstance(m, Adapted) for m in module.modules())


def take_base(model: nn.Module, state: State) -> dict[str, Any]:
    """Remove the model's frozen parameters from a state; return their names and their hash."""
    frozen = {id(x) for x in model.parameters() if not x.requires_grad}
    names = sorted(name for name, value in state.tensors.items() if id(value) in frozen)
    taken = {name: state.tensors.pop(name) for name in names}
    if sharded := [name for name, x in taken.items() if hasattr(x, "device_mesh")]:
        raise ValueError(
            f"frozen weights must be whole to be saved, got shards (DTensor) of {sharded[0]}: save "
            "a model that is not sharded, with this one's guide.state_dict() and lora_B"
        )
    return {"names": names, "sha256": digest(taken.values()), "scales": _scales(model, "model.")}


def add_base(base: Any, part: nn.Module, prefix: str, tensors: dict[str, Tensor]) -> None:
    """Add frozen parameters of a model or network to saved tensors, if they are the saved ones."""
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


def _scales(root: nn.Module, prefix: str) -> dict[str, float]:
    modules = root.named_modules(prefix=prefix.removesuffix("."))
    return {path: m.lora_scale for path, m in modules if isinstance(m, Adapted)}
