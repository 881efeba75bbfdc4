# SPDX-License-Identifier: Apache-2.0
r"""Latent variables of a model, and one vector $z$ of all of them in unconstrained space.

Each latent $\theta_i$ is read off its sample site. A bijection maps $\mathbb R^{d_i}$ onto its
support, and its unconstrained values fill one slice of $z \in \mathbb R^d$, in the model's order:

$$\theta_i = T_i(z_{[a_i, b_i)}), \qquad
  \ln p(z) = \ln p(\theta) + \sum_i \ln \lvert \det T_i' \rvert.$$
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from pyro.nn.module import _Context
from pyro.poutine.broadcast_messenger import BroadcastMessenger
from pyro.poutine.indep_messenger import IndepMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.util import site_is_subsample
from torch import Size, Tensor, nn
from torch.distributions import Distribution, ExpTransform, Transform, biject_to, constraints

from pyro_bbb._param_store import own_store
from pyro_bbb._utils.context import for_shapes
from pyro_bbb._utils.locking import GLOBAL_LOCK

__all__ = ["Latent", "Latents", "base_support", "is_real", "role_of"]

Site: TypeAlias = dict[str, Any]  # a node of a Pyro trace
Role: TypeAlias = Literal["weight", "adapter", "prior", "likelihood"]
Record: TypeAlias = dict[str, Tensor]
Run: TypeAlias = Callable[[Record], Record]
Bijection: TypeAlias = Callable[[Any], Any]  # from a support to a transform

_REAL = (constraints.real, constraints.real_vector)
_POSITIVE = (constraints.positive, constraints.nonnegative)


def role_of(name: str) -> Role:
    """Return what a latent is for. The library's own classes name their sites so.

    `BayesianModel` calls its likelihood ``likelihood``; a prior's latents of weight ``w`` are
    ``w_prior_...`` (`Prior.attach`); the B of an adapter BA, which starts at 0, ends in ``lora_B``.
    """
    path, _, attribute = name.rpartition(".")
    if path.split(".")[0] == "likelihood":
        return "likelihood"
    if "_prior_" in attribute:
        return "prior"
    return "adapter" if attribute.endswith("lora_B") else "weight"


@dataclass(frozen=True)
class Latent:
    """A latent variable of a model."""

    name: str  # of its sample site
    shape: Size
    transform: Transform | None  # from unconstrained space onto the support; None if that is real
    event_dim: int
    frames: tuple[Any, ...]  # plates around the site

    @classmethod
    def of_site(cls, name: str, site: Site, onto: Bijection = biject_to) -> Latent:
        """Read a latent off its sample site; it must be continuous, in no subsampled plate.

        Args:
            name: name of the site.
            site: a node of a trace.
            onto: from a support to the transform of unconstrained space onto it.

        Raises:
            ValueError: the latent is discrete, subsampled, or of a support without a bijection.
        """
        fn, frames = site["fn"], tuple(f for f in site["cond_indep_stack"] if f.vectorized)
        if fn.has_enumerate_support or getattr(fn.support, "is_discrete", False):
            raise ValueError(f"latent {name!r} is discrete, and must be continuous here")
        if any(frame.full_size not in (None, frame.size) for frame in frames):
            raise ValueError(f"latent {name!r} is in a subsampled plate, and must be in a full one")
        support = base_support(fn)
        try:
            transform = None if support in _REAL else onto(support)
            if support in _POSITIVE:  # torch's has an affine part, and so no closed-form KL
                transform = ExpTransform()
        except NotImplementedError as error:
            raise ValueError(
                f"latent {name!r} has the support {support}, onto which no bijection is known: "
                "guides.make('delta', model) takes it, as a point estimate"
            ) from error
        return cls(name, site["value"].shape, transform, fn.event_dim, frames)

    @property
    def role(self) -> Role:
        """Purpose of the latent, by its name."""
        return role_of(self.name)

    @property
    def unconstrained_shape(self) -> Size:
        """Shape in unconstrained space."""
        return self.shape if self.transform is None else self.transform.inverse_shape(self.shape)

    def constrain(self, unconstrained: Tensor) -> Tensor:
        """Return the value at a point of unconstrained space."""
        return unconstrained if self.transform is None else self.transform(unconstrained)

    def unconstrain(self, value: Tensor, what: str = "a value") -> Tensor:
        """Return the point of unconstrained space at a value; ``what`` names it in errors.

        Raises:
            ValueError: it has another shape, or is outside the support.
        """
        if value.shape != self.shape:
            expected = f"have shape {list(self.shape)}, got {list(value.shape)}"
            raise ValueError(f"{what} of {self.name!r} must {expected}")
        unconstrained = value if self.transform is None else self.transform.inv(value)
        if not unconstrained.isfinite().all():
            raise ValueError(
                f"{what} of {self.name!r} must be finite and inside its support, got values from "
                f"{value.min().item()} to {value.max().item()}"
            )
        return unconstrained


class Latents(Mapping[str, Latent]):
    """Latents by site name, in the model's order, and their layout in one vector.

    Args:
        latents: the latents; those of a model are read by `of_sites`.

    Attributes:
        slices: slice of the vector for each latent, by site name.
        size: length of the vector.
    """

    def __init__(self, latents: Iterable[Latent] = ()) -> None:
        self._by_name = {latent.name: latent for latent in latents}
        self._shapes = [latent.unconstrained_shape for latent in self.values()]
        self._sizes = [shape.numel() for shape in self._shapes]
        ends = list(accumulate(self._sizes, initial=0))
        bounds = zip(self, pairwise(ends), strict=True)
        self.slices: dict[str, slice] = {name: slice(start, stop) for name, (start, stop) in bounds}
        self.size: int = ends[-1]

    @classmethod
    def of_sites(cls, sites: Mapping[str, Site], onto: Bijection = biject_to) -> Latents:
        """Read the latents off sample sites, by the rules of `Latent.of_site`."""
        return cls(Latent.of_site(name, site, onto) for name, site in sites.items())

    def of_role(self, *roles: Role) -> list[Latent]:
        """Return the latents of the roles."""
        return [latent for latent in self.values() if latent.role in roles]

    def within(self, where: slice) -> Latents:
        """Return the latents inside a range of the vector, with the layout of that range."""
        offsets = {name: rows.start for name, rows in self.slices.items()}
        return Latents(x for x in self.values() if where.start <= offsets[x.name] < where.stop)

    def ravel(self, unconstrained: Mapping[str, Tensor]) -> Tensor:
        """Return one vector ``[d]`` of unconstrained values by site name."""
        return torch.cat([unconstrained[name].reshape(-1) for name in self])

    def unravel(self, z: Tensor) -> dict[str, Tensor]:
        """Return unconstrained values ``[..., *shape]`` by site name, of vectors ``[..., d]``.

        One operation splits the vector, so that its derivative is one, too.
        """
        pieces = zip(self, z.split(self._sizes, dim=-1), self._shapes, strict=True)
        return {name: piece.reshape(z.shape[:-1] + shape) for name, piece, shape in pieces}

    def constrain(self, z: Tensor) -> dict[str, Tensor]:
        """Return values ``[..., *shape]`` by site name, of vectors ``[..., d]``."""
        return {name: self[name].constrain(piece) for name, piece in self.unravel(z).items()}

    def unconstrain(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the vector ``[d]`` of one value of every latent.

        Raises:
            ValueError: a value is missing, of another shape, or outside its latent's support.
        """
        if missing := [name for name in self if name not in values]:
            raise ValueError(f"no value for the latent {missing[0]!r}, only for {list(values)}")
        pieces = {name: latent.unconstrain(values[name].detach()) for name, latent in self.items()}
        return self.ravel(pieces)

    def log_abs_det(self, z: Tensor | Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Any:
        r"""Return $\sum_i \ln\lvert\det T_i'\rvert$, 0 where all latents are real.

        Args:
            z: one vector, or unconstrained values by site name.
            values: the values there, by site name.
        """
        pieces = self.unravel(z) if isinstance(z, Tensor) else z
        return sum(
            latent.transform.log_abs_det_jacobian(pieces[name], values[name]).sum()
            for name, latent in self.items()
            if latent.transform is not None
        )

    def __getitem__(self, name: str) -> Latent:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"Latents({len(self)} sites, {self.size:,} values)"


def base_support(fn: Distribution) -> Any:
    """Return the support of one value of a distribution, without the dimensions of its event."""
    support = fn.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def is_real(fn: Distribution) -> bool:
    """Return whether a distribution is of real values."""
    return base_support(fn) in _REAL


# --- sample sites of modules and traces ---


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
    """Return the names of what priors have registered on a module besides its weights."""
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


@contextmanager
def unseen(module: nn.Module) -> Iterator[None]:
    """Draw a module's sites for nobody: no handler sees them, torch's random state stays."""
    devices = {x.device.index for x in module.parameters() if x.is_cuda}
    with (
        GLOBAL_LOCK,
        torch.no_grad(),
        torch.random.fork_rng(devices),
        poutine.block(),
        for_shapes(),
    ):
        yield


def repr_unseen(module: nn.Module) -> str:
    """Return a module's printed form, for which torch reads the weights."""
    with unseen(module):
        return nn.Module.__repr__(module)


def name_parts(root: PyroModule) -> None:
    """Name every part by its first path, in one context; Pyro names a shared part by its last."""
    context = Context()
    for path, module in root.named_modules():
        if isinstance(module, PyroModule):
            module._pyro_name, module._pyro_context = path, context


class Context(_Context):
    """Pyro's cache of a running module's values; a copy begins without them, a saved one too."""

    def __reduce__(self) -> Any:
        return Context, ()


# --- values from outside, many at once or one by one ---


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
    """Run parts of a model inside with these values of its latents, by site name.

    Running statistics of BatchNorm layers may be among them, as `batchnorm_draws` makes them.
    """
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in statistics_in(draw)}
    before = {name: getattr(owner, name.rpartition(".")[2]) for name, owner in owners.items()}
    with SubstituteMessenger(draw), own_store(model), model._pyro_context:
        for name, value in draw.items():
            model._pyro_context.set(name, value)
        try:
            for name, owner in owners.items():
                owner._buffers[name.rpartition(".")[2]] = draw[name]
            yield
        finally:
            for name, owner in owners.items():
                owner._buffers[name.rpartition(".")[2]] = before[name]


def statistics_in(draws: Iterable[str]) -> list[str]:
    """Return the names of running statistics of BatchNorm layers among those of draws."""
    return [name for name in draws if name.endswith((".running_mean", ".running_var"))]


def over_draws(run: Run, draws: Mapping[str, Tensor]) -> Record:
    """Run a function of one draw for S draws: as one batched pass if its operations allow it.

    Draws and results are tensors ``[S, ...]`` by name. Needs the global lock, for the filters of
    warnings.
    """
    batched: Record
    try:
        with _errors_for_loops():
            batched = torch.vmap(run, randomness="different")(dict(draws))
    except (RuntimeError, UserWarning):  # the loop does it, or raises what is wrong
        batched = one_by_one(run, draws)
    return batched


def batches(run: Run, draws: Mapping[str, Tensor]) -> bool:
    """Return whether `over_draws` takes one pass."""
    try:
        with _errors_for_loops():
            torch.vmap(run, randomness="different")(dict(draws))
    except (RuntimeError, UserWarning):
        return False
    return True


@contextmanager
def _errors_for_loops() -> Iterator[None]:
    """Turn torch's warning that it loops over the draws into an error, but for attention."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".*scaled_dot_product", UserWarning)  # which is slow
        yield


def one_by_one(run: Run, draws: Mapping[str, Tensor]) -> Record:
    """Run the function in a loop."""
    columns = (values.unbind() for values in draws.values())  # gradients are stacked, not added up
    return stack([run(dict(zip(draws, row, strict=True))) for row in zip(*columns, strict=True)])


def stack(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack records of tensors by name along a new first dimension."""
    return {name: torch.stack([record[name] for record in records]) for name in records[0]}


class PlateOfDraws(IndepMessenger):
    """The plate of several draws at once: each site is one of them all, and counts as it is.

    `pyro.plate` multiplies every site's factor by their number and divides by it, which can round,
    and makes different tensors of one.
    """

    def _process_message(self, msg: Any) -> None:
        super()._process_message(msg)
        BroadcastMessenger._pyro_sample(msg)


def plate_shape() -> Size | None:
    """Return the batch shape around the call, ``None`` in other plates than draws."""
    plates = [handler for handler in _PYRO_STACK if isinstance(handler, IndepMessenger)]
    if not plates:
        return Size()
    plate = plates[0]
    if len(plates) > 1 or not isinstance(plate, PlateOfDraws) or plate.dim is None:
        return None
    return Size([plate.size] + [1] * (-plate.dim - 1))
