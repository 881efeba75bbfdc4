# SPDX-License-Identifier: Apache-2.0
"""Values of latents given to a model from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_bbb._handlers.param_store import own_store


class SubstituteMessenger(Messenger):
    """Gives the latents inside their values."""

    def __init__(self, draw: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and not site_is_subsample(msg):
            if msg["name"] not in self.draw:
                raise ValueError(f"the posterior's draws lack the latent {msg['name']!r}")
            msg["value"] = self.draw[msg["name"]]


@contextmanager
def substituted(model: Any, draw: Mapping[str, Tensor]) -> Iterator[None]:
    """Run parts of a model inside with these values of its latents, by site name."""
    with SubstituteMessenger(draw), own_store(model), model._pyro_context:
        for name, value in draw.items():
            model._pyro_context.set(name, value)
        yield
