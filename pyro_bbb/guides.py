r"""The diagonal Gaussian posterior, $q(w) = \prod_j N(w_j | \mu_j, \mathrm{softplus}(\rho_j)^2)$.

Blundell et al. (2015), section 3.2. A latent variable that is not real-valued gets its Normal in
unconstrained space, carried over by a bijection.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import autoguide
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.guides import prototype_hide_fn
from torch import Tensor, nn

from pyro_bbb._latents import (
    InitLoc,
    Latent,
    as_initialiser,
    describe,
    finite,
    refuse_unknown,
)
from pyro_bbb._pyro import evaluating, own_param, weigh
from pyro_bbb.distributions import PrunedNormal, SoftplusNormal, softplus


class AutoSoftplusNormal(AutoGuide):
    r"""Independent Normals, $w = \mu + \mathrm{softplus}(\rho)\,\epsilon$, for every latent.

    Each latent variable is one Normal sample site, so `TraceMeanField_ELBO` has its closed form
    wherever a KL is registered. The parameters of the model's declared latents exist from the
    start, and belong to this guide alone, whatever Pyro's global store holds.

    Args:
        model: a `BayesianModel`, or any Pyro model; where it takes an argument ``kl_weight``, the
            guide's log-density is weighted by it too.
        init_loc: initial means. ``None``: the weights of a network made by `bayesianize` as they
            were, else as ``"he"``. ``"he"``: kernels from $N(0, 2/n_\text{in})$, other latents at
            their prior's centre. A number: all real-valued latents there. A dict of tensors by site
            name (``network.`` may be left out), or a trained network with parameters of those
            names. A function from a Pyro site to its initial value, such as those of
            `pyro.infer.autoguide.initialization`.
        init_rho: initial $\rho$ of every latent; the standard deviation is its softplus.

    Raises:
        ValueError: an unknown ``init_loc``, tensors that do not fit, or numbers not finite.
        TypeError: an argument is of another kind.
    """

    def __init__(
        self, model: Callable[..., Any], *, init_loc: InitLoc | None = None, init_rho: float = -5.0
    ) -> None:
        if not callable(model):
            raise TypeError(f"model must be callable, got {model!r}")
        super().__init__(model)
        if init_loc is None and hasattr(model, "initial_locs"):
            init_loc = model.initial_locs()
        self._init_loc = as_initialiser(init_loc)
        self._init_rho = finite("init_rho", init_rho)
        self._kl_weight = _ArgumentReader.of(model, "kl_weight", 1.0)
        self._latents: dict[str, Latent] = {}
        self._complete = False
        self._pruned = False
        self.add_module("locs", nn.Module())
        self.add_module("rhos", nn.Module())
        if hasattr(model, "draw_latents"):
            with torch.no_grad():
                self._add_latents(
                    poutine.trace(poutine.block(model.draw_latents, _hide)).get_trace()
                )
            refuse_unknown(init_loc, self._latents)

    @property
    def site_names(self) -> list[str]:
        """Names of the latent variables, in the model's order."""
        return list(self._latents)

    @property
    def weight_names(self) -> list[str]:
        """Names of the latents that are weights: real-valued, and not of the likelihood."""
        latents = self._latents.values()
        real = [latent.name for latent in latents if latent.transform is None]
        return [name for name in real if not name.startswith("likelihood.")]

    def loc(self, name: str) -> Tensor:
        r"""$\mu$ of one latent (in unconstrained space), sharing memory with the parameter."""
        return self._parameter("locs", name).detach()

    def scale(self, name: str) -> Tensor:
        r"""Standard deviation $\mathrm{softplus}(\rho)$ of one latent (in unconstrained space)."""
        return softplus(self._parameter("rhos", name).detach())

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draws every latent.

        Args:
            *args: the model's arguments.
            **kwargs: the model's keyword arguments.

        Returns:
            The draws by site name.
        """
        if not self._complete:
            self._find_latents(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs) if self._prototype_frames else {}
        draws = {}
        with weigh(self._kl_weight(args, kwargs)):
            for latent in self._latents.values():
                with ExitStack() as stack:
                    for frame in latent.frames:
                        stack.enter_context(plates[frame.name])
                    draws[latent.name] = pyro.sample(latent.name, self._posterior(latent))
        return draws

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Independent draws of all latents, ``[num_samples, ...]`` by site name, no gradient."""
        with torch.no_grad():
            latents = self._known_latents()
            return {x.name: self._posterior(x).sample((num_samples,)) for x in latents}

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior medians by site name; for weights these are the means."""
        return {
            latent.name: self._at(latent, self.loc(latent.name)) for latent in self._known_latents()
        }

    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior quantiles, ``[len(quantiles), ...]`` by site name."""
        z = [torch.special.ndtri(torch.tensor(q, dtype=torch.float64)) for q in quantiles]
        return {
            x.name: torch.stack(
                [self._at(x, self.loc(x.name) + float(zq) * self.scale(x.name)) for zq in z]
            )
            for x in self._known_latents()
        }

    def without(self, removed: Mapping[str, Tensor]) -> AutoSoftplusNormal:
        """A copy in which weights are fixed at exactly 0, and stay so in further training.

        Args:
            removed: masks by site name, true where a weight goes.
        """
        new = copy.deepcopy(self)
        for name, mask in removed.items():
            new.loc(name)[mask] = 0.0
            new._parameter("rhos", name).detach()[mask] = -math.inf
        new._pruned = True
        return new

    def _posterior(self, latent: Latent) -> Any:
        loc, rho = (
            own_param(f"{self._pyro_name}.{kind}.{latent.name}", self._parameter(kind, latent.name))
            for kind in ("locs", "rhos")
        )
        q: Any = (PrunedNormal if self._pruned else SoftplusNormal)(loc, rho)
        if latent.transform is not None:
            # a cache of its own: kept in the guide, it would hold the graph of the latest step
            q = dist.TransformedDistribution(q, [latent.transform.with_cache()])
        return q.to_event(latent.event_dim - len(q.event_shape))

    def _at(self, latent: Latent, unconstrained: Tensor) -> Tensor:
        return (
            unconstrained.clone() if latent.transform is None else latent.transform(unconstrained)
        )

    def _parameter(self, kind: str, name: str) -> nn.Parameter:
        """The parameter of a site; found without Pyro's statements, which use the global store."""
        if name not in self._latents:
            raise KeyError(f"no latent named {name!r}; known: {self.site_names}")
        *path, leaf = name.split(".")
        owner: Any = self._modules[kind]
        for part in path:
            owner = owner._modules[part]
        return owner._parameters[leaf]

    def _add_parameter(self, kind: str, name: str, value: Tensor) -> None:
        *path, leaf = name.split(".")
        owner: Any = self._modules[kind]
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner._modules[part]
        owner.register_parameter(leaf, nn.Parameter(value.detach().clone().contiguous()))

    def _known_latents(self) -> list[Latent]:
        if not self._latents:
            raise RuntimeError("the guide has no latents yet: call it with the model's arguments")
        return list(self._latents.values())

    def _find_latents(self, *args: Any, **kwargs: Any) -> None:
        """Runs the model once for latents that its forward pass samples by itself."""
        evaluated = evaluating(self.model) if isinstance(self.model, nn.Module) else ExitStack()
        with torch.no_grad(), torch.random.fork_rng(), evaluated:
            self._setup_prototype(*args, **kwargs)
        self._add_latents(self.prototype_trace)
        self.prototype_trace, self._complete = None, True

    def _prototype_hide_fn(self, site: Any) -> bool:
        """What of the model's first run is no latent; so are the observations when not given."""
        hidden: bool = prototype_hide_fn(site)
        return hidden or (hasattr(self.model, "draw_latents") and site["name"] == "obs")

    def _add_latents(self, trace: Any) -> None:
        for name, site in trace.iter_stochastic_nodes():
            if name not in self._latents:
                self._latents[name] = latent = describe(name, site)
                value = self._init_loc(site)
                if value.shape != site["value"].shape:
                    raise ValueError(
                        f"init_loc of {name!r} must have shape {list(site['value'].shape)}, "
                        f"got {list(value.shape)}"
                    )
                loc = value if latent.transform is None else latent.transform.inv(value)
                if not loc.isfinite().all():
                    raise ValueError(
                        f"init_loc of {name!r} must be finite and inside its support, got values "
                        f"from {value.min().item()} to {value.max().item()}"
                    )
                self._add_parameter("locs", name, loc.to(site["value"].dtype))
                self._add_parameter("rhos", name, torch.full_like(loc, self._init_rho))

    def __getstate__(self) -> dict[str, Any]:
        """The state without the model; unlike Pyro's, it leaves this guide as it is."""
        model, master = self._model, self.master
        try:
            state: dict[str, Any] = dict(super().__getstate__())
        finally:
            self._model, self.master = model, master
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> AutoSoftplusNormal:
        """A guide with parameters of its own, for the same model (or its copy, if in ``memo``)."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        new._model = (memo.get(id(self.model), self.model),)
        return new


GUIDES: dict[str, Callable[..., AutoGuide]] = {
    "softplus_normal": AutoSoftplusNormal,
    "normal": autoguide.AutoNormal,
    "low_rank": autoguide.AutoLowRankMultivariateNormal,
    "full_rank": autoguide.AutoMultivariateNormal,
    "delta": autoguide.AutoDelta,
}


def make(name: str, model: Callable[..., Any], **options: Any) -> AutoGuide:
    """A guide by its name.

    Args:
        name: ``"softplus_normal"``, or one of Pyro's: ``"normal"``, ``"low_rank"``,
            ``"full_rank"``, ``"delta"``.
        model: the model that the guide is for.
        **options: keyword arguments of the guide's class.

    Returns:
        The guide.

    Raises:
        ValueError: an unknown name.
    """
    if name not in GUIDES:
        raise ValueError(f"name must be one of {sorted(GUIDES)}, got {name!r}")
    return GUIDES[name](model, **options)


def weighs_kl(guide: Any) -> bool:
    """Whether a guide weighs its log-density by ``kl_weight`` itself."""
    ours = isinstance(guide, AutoSoftplusNormal)
    return ours or _ArgumentReader.of(guide, "kl_weight", None).position is not None


@dataclass(frozen=True)
class _ArgumentReader:
    """Reads one argument of a call by name or position."""

    name: str
    position: int | None
    default: Any

    @classmethod
    def of(cls, function: Any, name: str, default: Any) -> _ArgumentReader:
        target = function.forward if isinstance(function, nn.Module) else function
        names = list(inspect.signature(target).parameters)
        return cls(name, names.index(name) if name in names else None, default)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.position is None:
            return self.default
        if self.position < len(args):
            return args[self.position]
        return kwargs.get(self.name, self.default)


def _hide(site: Any) -> bool:
    return bool(site["type"] != "sample" or site["is_observed"])
