"""Parameters that are not to be trained stay as they are, whatever Pyro announces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Frozen:
    """The parameters of a model and a guide that need no gradient.

    Pyro asks for a gradient of whatever parameter a module of its own announces.

    Args:
        *modules: the model, the guide; what is no module has no parameters.

    Attributes:
        parameters: those that were frozen when one last looked.
    """

    def __init__(self, *modules: Any) -> None:
        self._modules = [part for part in modules if isinstance(part, nn.Module)]
        self.parameters: set[Tensor] = set()
        self.find()

    def find(self) -> None:
        """Looks which parameters are frozen now."""
        self.parameters.clear()
        self.parameters.update(
            p for part in self._modules for p in part.parameters() if not p.requires_grad
        )

    @contextmanager
    def kept(self) -> Iterator[None]:
        """They are frozen after it, too, and have no gradient."""
        try:
            yield
        finally:
            for parameter in self.parameters:
                parameter.requires_grad_(False)
                parameter.grad = None
