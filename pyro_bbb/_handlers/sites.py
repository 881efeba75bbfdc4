# SPDX-License-Identifier: Apache-2.0
"""Names of a network's sample sites, and draws of all of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from pyro.nn.module import _Context
from pyro.poutine.util import site_is_subsample
from torch import nn

from pyro_bbb._utils.locking import GLOBAL_LOCK
from pyro_bbb.latents import role_of


def sample_names(module: PyroModule) -> list[str]:
    """Return the names of a module's `PyroSample` attributes, decorated methods included."""
    return list(dict.fromkeys([*module._pyro_samples, *_decorated_names(type(module))]))


@functools.cache
def _decorated_names(cls: type) -> tuple[str, ...]:
    """Return the names of the methods of a class that Pyro's decorator made random."""
    return tuple(
        name
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, PyroSample)
    )


def parts_of_prior(module: nn.Module) -> list[str]:
    """Return the names of what priors have registered on a module beside its weights."""
    if not isinstance(module, PyroModule):
        return []
    weights = sample_names(module)
    names = dict.fromkeys([*weights, *module._pyro_params, *module._parameters])
    return [
        name
        for name in names
        if role_of(name) == "prior" and name.partition("_prior_")[0] in weights
    ]


def declared_names(root: nn.Module) -> set[str]:
    """Return the full names of the `PyroSample` attributes below ``root``."""
    return {
        f"{path}.{name}" if path else name
        for path, module in root.named_modules()
        if isinstance(module, PyroModule)
        for name in sample_names(module)
    }


def drawn(trace: Any) -> dict[str, Any]:
    """Return the drawn sites of a trace by name, without a plate's choice of its rows."""
    sites = trace.iter_stochastic_nodes()
    return {name: site for name, site in sites if not site_is_subsample(site)}


def draw_all(root: nn.Module) -> None:
    """Draw every declared `PyroSample` below ``root``, whatever path the forward pass takes."""
    for module in root.modules():
        if isinstance(module, PyroModule):
            for name in sample_names(module):
                getattr(module, name)


@contextmanager
def unseen(module: nn.Module) -> Iterator[None]:
    """Draw a module's sites for nobody: no handler sees them, torch's random state stays."""
    devices = {x.device.index for x in module.parameters() if x.is_cuda}
    with GLOBAL_LOCK, torch.no_grad(), torch.random.fork_rng(devices), poutine.block():
        yield


def repr_unseen(module: nn.Module) -> str:
    """Return a module's printed form, for which torch reads the weights."""
    with unseen(module):
        return nn.Module.__repr__(module)


def name_parts(root: PyroModule) -> None:
    """Name every part by its first path, in one context; Pyro names a shared part by its last."""
    context = Context()
    for path, part in root.named_modules():
        if isinstance(part, PyroModule):
            part._pyro_name, part._pyro_context = path, context


class Context(_Context):
    """Pyro's cache of a running module's values; a copy begins without them, a saved one too."""

    def __reduce__(self) -> Any:
        return Context, ()
