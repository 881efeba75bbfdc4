# SPDX-License-Identifier: Apache-2.0
"""Base class of the guides.

Parameters exist at construction, as a `BayesianModel` declares its latents without data. They
belong to their guide, not to Pyro's global store. ``kl_weight`` scales the guide's log-density like
the prior's. Copying a guide does not change it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.guides import prototype_hide_fn
from torch import Size, Tensor, nn
from torch.distributions import biject_to

from pyro_bbb._param_store import own_param, own_store
from pyro_bbb._utils.context import evaluating, for_shapes
from pyro_bbb._utils.inputs import Rows
from pyro_bbb._utils.locking import lock_methods, locked
from pyro_bbb._utils.validation import probabilities
from pyro_bbb.guides.covariance import PartsNormal
from pyro_bbb.guides.initial_values import InitLoc, as_initialiser, refuse_unknown
from pyro_bbb.guides.linearization import OutputMoments, not_normal, tangent_moments
from pyro_bbb.guides.scale_kl import position_of_kl_weight, scale_kl
from pyro_bbb.latents import Bijection, Context, Latent, Latents, Site

Self = TypeVar("Self", bound="Guide")


@lock_methods
class Guide(AutoGuide):
    """Base of the guides; a subclass makes the parameters of new latents in `_add_parameters`.

    `GUIDES` names the guides that can be saved. An option of the constructor is saved from the
    attribute of its name with a leading underscore.

    Args:
        model: a `BayesianModel`, or any Pyro model.
        init_loc: initial means, see `AutoSoftplusNormal`.
        **options: options of the Pyro autoguide that a subclass wraps.

    Raises:
        TypeError: the model is not callable, or ``init_loc`` of another kind.
        ValueError: an unknown ``init_loc``.
    """

    master: Any  # of Pyro's guide
    prototype_trace: Any
    has_normal_outputs = False
    """Whether the network's outputs are Normal under it, without linearisation."""

    def __init__(
        self, model: Callable[..., Any], *, init_loc: InitLoc | None = None, **options: Any
    ) -> None:
        if not callable(model):
            raise TypeError(f"model must be callable, got {model!r}")
        super().__init__(model, **options)
        self._pyro_context = Context()
        self._model = (model,)  # Pyro's own guides hold it inside a handler
        if init_loc is None and hasattr(model, "initial_locs"):
            init_loc = model.initial_locs()
        self.initialise: Callable[[Site], Tensor] = as_initialiser(init_loc)
        self._refuse_unknown = partial(refuse_unknown, init_loc)
        self._kl_weight_at = position_of_kl_weight(model)
        self._latents = Latents()
        self._complete = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lock construction and every public method: they may draw or run Pyro's statements."""
        super().__init_subclass__(**kwargs)
        lock_methods(cls, "_repr_markdown_")

    @property
    def site_names(self) -> list[str]:
        """Names of the latent variables, in the model's order."""
        return list(self.latents)

    @property
    def latents(self) -> Latents:
        """Latent variables by site name, in the model's order; none before a first call."""
        return self._latents

    @property
    def members(self) -> list[Guide]:
        """The guides that share the draws, in turn: this one, or the members of an ensemble."""
        return [self]

    @property
    def is_point(self) -> bool:
        """Return whether it is a point at present, without a distribution around."""
        return False

    @property
    def is_factorised(self) -> bool:
        """Return whether it draws independent Normals of means ``loc`` and deviations ``scale``."""
        return False

    @property
    def stackable(self) -> bool:
        """Return whether several draws can be made at once."""
        return True

    def unconstrained_normal(self) -> PartsNormal | None:
        """Return the Normal of all unconstrained latents; ``None`` if the guide is not one."""
        return None

    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return posterior quantiles, ``[len(quantiles), ...]`` by site name.

        Raises:
            TypeError: the guide is not a Normal.
        """
        levels = torch.tensor(probabilities("quantiles", quantiles), dtype=torch.float64)
        with torch.no_grad():
            loc, std = self._marginals()
            z = torch.special.ndtri(levels).to(loc)
            return self._latents.constrain(loc + std * z[:, None])

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return posterior medians by site name.

        Raises:
            TypeError: they have no closed form.
        """
        values = self._latents.constrain(self._marginals()[0])
        return {name: value.clone() for name, value in values.items()}

    def _marginals(self) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations of all unconstrained latents, ``[D]`` each."""
        normal = self.unconstrained_normal()
        if normal is None:
            raise TypeError(
                f"{type(self).__name__}: marginals have no closed form; use draws, "
                "sample_posterior(1000)"
            )
        return normal.loc, normal.std()

    def output_moments(self, model: Any, x: Rows) -> OutputMoments:
        """Return moments of the network's outputs, by its tangent at the guide's means.

        Raises:
            TypeError: the guide is not a Normal.
        """
        normal = self.unconstrained_normal()
        if normal is None:
            raise not_normal(self)
        return tangent_moments(model, self._latents, normal, x)

    def before_epoch(self, epoch: int, epochs: int, data: Any) -> None:
        """Change what depends on the data between epochs of `fit`; nothing by default.

        Args:
            epoch: number of the epoch that begins, from 0.
            epochs: number of all.
            data: the training set, as batches ``(x, y)``.
        """

    def sampler(self) -> Callable[[int], dict[str, Tensor]]:
        """Return `sample_posterior` at the present parameters; what draws share is made once."""
        draw: Callable[[int], dict[str, Tensor]] = self.sample_posterior
        return draw

    @classmethod
    def option_names(cls) -> list[str]:
        """Names of the constructor's options besides the initial means."""
        names = inspect.signature(cls.__init__).parameters
        return [name for name in names if name not in ("self", "model", "init_loc")]

    @property
    def options(self) -> dict[str, Any]:
        """The constructor's options besides the initial means, by name."""
        return {name: getattr(self, f"_{name}", None) for name in self.option_names()}

    def latent_shapes(self) -> dict[str, Size]:
        """Shapes of the latents, by site name."""
        return {name: latent.shape for name, latent in self.latents.items()}

    @locked
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Sample every latent, by site name, for the model's arguments."""
        if not self._complete:
            self._find_latents(*args, **kwargs)
        with own_store(self), scale_kl(self._kl_weight(args, kwargs)):
            return super().__call__(*args, **kwargs)

    def _kl_weight(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument ``kl_weight`` of a call; 1 where the model has none."""
        if self._kl_weight_at is None:
            return 1.0
        from_weight = args[self._kl_weight_at :]
        return from_weight[0] if from_weight else kwargs.get("kl_weight", 1.0)

    _onto: Bijection = staticmethod(biject_to)  # from a support to its bijection

    def add_latents(self, sites: Mapping[str, Site]) -> None:
        """Add latents of sample sites, those that are new, and their parameters."""
        new = {name: site for name, site in sites.items() if name not in self._latents}
        further = Latents.of_sites(new, self._onto)
        self._latents = Latents([*self._latents.values(), *further.values()])
        self._add_parameters(new)

    def _add_parameters(self, sites: Mapping[str, Site]) -> None:
        """Add the parameters of new latents."""
        raise NotImplementedError

    def _find_declared(self) -> None:
        """Add the latents that the model declares; subclasses call it once constructed."""
        if not hasattr(self.model, "draw_latents"):
            return
        with torch.no_grad(), own_store(self.model), for_shapes():
            draw_latents = poutine.block(self.model.draw_latents, expose_types=["sample"])
            trace: Any = poutine.trace(draw_latents).get_trace()
            self.add_latents(dict(trace.iter_stochastic_nodes()))
        self._refuse_unknown(self._latents)

    def _find_latents(self, *args: Any, **kwargs: Any) -> None:
        """Run the model once to find latents that its forward pass samples."""
        evaluated = evaluating(self.model) if isinstance(self.model, nn.Module) else nullcontext()
        known, frames = self.prototype_trace, self._prototype_frames
        quiet = pyro.validation_enabled(False)  # the first weights are drawn from the prior
        with torch.no_grad(), torch.random.fork_rng(), evaluated, quiet, for_shapes():
            AutoGuide._setup_prototype(self, *args, **kwargs)
        trace: Any = self.prototype_trace
        self.prototype_trace = known
        self._prototype_frames |= frames
        self.add_latents(dict(trace.iter_stochastic_nodes()))
        self._refuse_unknown(self._latents)
        self._complete = True

    def _prototype_hide_fn(self, site: Any) -> bool:
        """Hide sites of the model's first run that are no latents, observations included."""
        hidden: bool = prototype_hide_fn(site)
        return hidden or (hasattr(self.model, "draw_latents") and site["name"] == "obs")

    def _known_latents(self) -> list[Latent]:
        if not self._latents:
            raise RuntimeError("the guide has no latents yet: call it with the model's arguments")
        return list(self._latents.values())

    def _own(self, kind: str, name: str) -> Tensor:
        """Return a parameter of a latent, announced to the handlers around."""
        return own_param(f"{self._pyro_name}.{kind}.{name}", self._parameter(kind, name))

    def _parameter(self, kind: str, name: str) -> nn.Parameter:
        """Return the parameter of a site, without Pyro's statements, which use the global store."""
        if not isinstance(name, str) or name not in self._latents:
            raise KeyError(f"no latent named {name!r}; known: {self.site_names}")
        *path, leaf = f"{kind}.{name}".split(".")
        owner: Any = self
        for child in path:
            owner = owner._modules[child]
        return owner._parameters[leaf]

    def _add_parameter(self, kind: str, name: str, value: Tensor) -> None:
        *path, leaf = f"{kind}.{name}".split(".")
        owner: Any = self
        for child in path:
            if child not in owner._modules:
                owner.add_module(child, nn.Module())
            owner = owner._modules[child]
        owner.register_parameter(leaf, nn.Parameter(value.detach().clone().contiguous()))

    def __repr__(self) -> str:
        shapes = self.latent_shapes().values()
        numbers = sum(shape.numel() for shape in shapes)
        return f"{type(self).__name__}({len(shapes)} sites, {numbers:,} values)"

    @locked
    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the model; Pyro's method would remove it from this guide."""
        model, master = self._model, self.master
        try:
            state: dict[str, Any] = dict(super().__getstate__())
        finally:
            self._model, self.master = model, master
        return state

    @locked
    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        """Copy the parameters, for the same model (or its copy, if in ``memo``)."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new._model = (memo.get(id(self.model), self.model),)
        return new


@runtime_checkable
class Approximated(Protocol):
    """Guide that needs the training set once more after training."""

    def approximate(self, data: Any) -> None:
        """Finish the guide after training, from the full training set."""

    def reset(self) -> None:
        """Make it ready for further training."""


def as_batches(data: Any) -> Iterable[tuple[Any, Tensor]]:
    """Return the batches ``(x, y)`` of a training set, which may be one pair."""
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor):
        return [data]
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise TypeError(f"data must be a pair (x, y) of tensors or batches of these, got {data!r}")
    return data


@runtime_checkable
class Collected(Protocol):
    """Guide that is made of the iterates of training, such as `SWAG`."""

    @property
    def start(self) -> float:
        """Fraction of training from which on the learning rate is to stay as it is."""

    def plan(self, num_steps: int, epoch_steps: int) -> range:
        """Return the numbers of the steps, from 1, after which `collect` is to be called."""

    def collect(self) -> None:
        """Take in the parameters as they are now."""


def collected(guide: Any) -> list[Collected]:
    """Return the guide, or members of an ensemble, that are made of iterates of training."""
    modules = guide.modules() if isinstance(guide, nn.Module) else ()
    return [module for module in modules if isinstance(module, Collected)]


@runtime_checkable
class ClosedForm(Protocol):
    """Guide with a closed form of the expected log-likelihood: a step draws nothing."""

    def in_closed_form(self, model: Any) -> tuple[Any, Any]:
        """Return model and guide whose mean-field objective is the ELBO without draws."""
