"""What all our guides have in common, whatever family their posterior is of.

The latents that a `BayesianModel` declares are known, and so the parameters exist, from the start.
The parameters belong to their guide, not to Pyro's global store. The guide's log-density is
weighted by ``kl_weight`` like the prior's. A copy leaves its original as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.guides import prototype_hide_fn
from torch import nn

from pyro_bbb._handlers.kl_scale import scale_kl
from pyro_bbb._handlers.param_store import announce_one, own_store
from pyro_bbb._utils.context import evaluating
from pyro_bbb.guides.latents import InitLoc, Latent, as_initialiser, refuse_unknown

Self = TypeVar("Self", bound="Guide")


@dataclass(frozen=True)
class ArgumentReader:
    """Reads one argument of a call by name or position."""

    name: str
    position: int | None
    default: Any

    @classmethod
    def of(cls, function: Any, name: str, default: Any) -> ArgumentReader:
        """The reader for a function's, or a module's, argument ``name``."""
        target = function.forward if isinstance(function, nn.Module) else function
        names = list(inspect.signature(target).parameters)
        return cls(name, names.index(name) if name in names else None, default)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.position is None:
            return self.default
        if self.position < len(args):
            return args[self.position]
        return kwargs.get(self.name, self.default)


class Guide(AutoGuide):
    """Base of the guides; a subclass says in `_add_latents` what parameters a latent needs.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        init_loc: where the means start, see `AutoSoftplusNormal`.
        **options: those of the Pyro guide that a subclass mends.

    Raises:
        TypeError: the model is not callable, or ``init_loc`` of another kind.
        ValueError: an unknown ``init_loc``.
    """

    def __init__(
        self, model: Callable[..., Any], *, init_loc: InitLoc | None = None, **options: Any
    ) -> None:
        if not callable(model):
            raise TypeError(f"model must be callable, got {model!r}")
        super().__init__(model, **options)
        self._model = (model,)  # Pyro's own guides hold it inside a handler
        if init_loc is None and hasattr(model, "initial_locs"):
            init_loc = model.initial_locs()
        self._initialise = as_initialiser(init_loc)
        self._refuse_unknown = partial(refuse_unknown, init_loc)
        self._kl_weight = ArgumentReader.of(model, "kl_weight", 1.0)
        self._latents: dict[str, Latent] = {}
        self._complete = False

    @property
    def site_names(self) -> list[str]:
        """Names of the latent variables, in the model's order."""
        return list(self._latents)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Draws every latent, for the model's arguments.

        Returns:
            The draws by site name.
        """
        if not self._complete:
            self._find_latents(*args, **kwargs)
        announce_one(self)
        with own_store(self), scale_kl(self._kl_weight(args, kwargs)):
            return super().__call__(*args, **kwargs)

    def _add_latents(self, trace: Any) -> None:
        """Adds the parameters of those latents in a trace of the model that are not yet known."""
        raise NotImplementedError

    def _find_declared(self) -> None:
        """Adds the latents that are known without data; subclasses call it once constructed."""
        if not hasattr(self.model, "draw_latents"):
            return
        with torch.no_grad(), own_store(self.model):
            self._add_latents(
                poutine.trace(poutine.block(self.model.draw_latents, _hide)).get_trace()
            )
        self._refuse_unknown(self._latents)

    def _find_latents(self, *args: Any, **kwargs: Any) -> None:
        """Runs the model once for latents that its forward pass samples by itself."""
        evaluated = evaluating(self.model) if isinstance(self.model, nn.Module) else ExitStack()
        known, frames = self.prototype_trace, self._prototype_frames
        with torch.no_grad(), torch.random.fork_rng(), evaluated:
            AutoGuide._setup_prototype(self, *args, **kwargs)
        trace, self.prototype_trace = self.prototype_trace, known
        self._prototype_frames |= frames
        self._add_latents(trace)
        self._refuse_unknown(self._latents)
        self._complete = True

    def _prototype_hide_fn(self, site: Any) -> bool:
        """What of the model's first run is no latent; so are the observations when not given."""
        hidden: bool = prototype_hide_fn(site)
        return hidden or (hasattr(self.model, "draw_latents") and site["name"] == "obs")

    def _known_latents(self) -> list[Latent]:
        if not self._latents:
            raise RuntimeError("the guide has no latents yet: call it with the model's arguments")
        return list(self._latents.values())

    def __getstate__(self) -> dict[str, Any]:
        """The state without the model; unlike Pyro's, it leaves this guide as it is."""
        model, master = self._model, self.master
        try:
            state: dict[str, Any] = dict(super().__getstate__())
        finally:
            self._model, self.master = model, master
        return state

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        """A guide with parameters of its own, for the same model (or its copy, if in ``memo``)."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new._model = (memo.get(id(self.model), self.model),)
        return new


@runtime_checkable
class Approximated(Protocol):
    """A guide that training alone does not finish."""

    def approximate(self, data: Any) -> None:
        """Finishes the guide after training, from the whole training set."""

    def reset(self) -> None:
        """Makes it ready for further training."""


def _hide(site: Any) -> bool:
    return bool(site["type"] != "sample" or site["is_observed"])
