# SPDX-License-Identifier: Apache-2.0
"""Parameters and buffers of several modules by name: shared ones once, frozen ones marked.

Torch's ``state_dict`` repeats a shared parameter under each name and does not mark frozen ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bbb._utils.files import LoadError


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
        self._make_buffers(module, prefix)
        used: dict[str, Tensor] = {}
        firsts: dict[int, str] = {}
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
            if own.is_meta:
                _set(module, name, used.setdefault(key, _like(own, value)))
            elif firsts.setdefault(id(own), key) != key or used.setdefault(key, own) is not own:
                raise LoadError(f"tensor {prefix + name} is not shared as the network expects")
            else:
                _overwrite(own, value)
            if isinstance(used[key], nn.Parameter):
                used[key].requires_grad_(key not in self.frozen)
        for key in used:
            del self.tensors[key]

    def _make_buffers(self, module: nn.Module, prefix: str) -> None:
        """Allocate buffers that are ``None`` at first, such as the factor of `Laplace`."""
        device = next((x.device for x in module.parameters()), None)
        for path, part in module.named_modules():
            for leaf, buffer in part._buffers.items():
                name = prefix + ".".join(filter(None, [path, leaf]))
                if buffer is None and name in self.tensors:
                    part._buffers[leaf] = torch.empty_like(self.tensors[name], device=device)


def cpu_copy(value: Tensor) -> Tensor:
    """Copy a tensor to new contiguous memory on the CPU."""
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner: Any = module.get_submodule(path)
    (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = value
    if isinstance(owner, nn.RNNBase):
        owner._init_flat_weights()  # a list of them


def _like(own: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, False) if isinstance(own, nn.Parameter) else value


def _overwrite(own: Tensor, value: Tensor) -> None:
    if own.dtype == value.dtype:
        own.detach().copy_(value)
    else:
        own.data = value


def digest(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of the content of tensors, one after the other."""
    content = sha256()
    for x in tensors:
        content.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
