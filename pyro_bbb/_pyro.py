"""What we mend in Pyro: parameters that belong to their module, and a weight of zero.

By default Pyro keeps parameters in one global store by name, so that the second of two guides of
one class silently takes the first one's values. Here a module's parameters are its own.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from pyro.poutine.runtime import effectful
from pyro.poutine.scale_messenger import ScaleMessenger
from pyro.poutine.util import is_validation_enabled, site_is_subsample
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_bbb._checks import as_seed, at_least_zero
from pyro_bbb._exclusive import TURN


def own_param(name: str, parameter: nn.Parameter) -> Tensor:
    """Announces a parameter to the handlers around (SVI finds it) without the global store.

    Args:
        name: the name of the ``param`` site.
        parameter: the parameter, of any shape.

    Returns:
        A view of the parameter, through which gradients reach it.
    """
    if parameter in _HELD.get():
        return parameter
    value: Tensor = _announce(name, parameter, constraint=constraints.real, name=name)
    return value


@contextmanager
def held_by_optimiser(parameters: Iterable[Tensor]) -> Iterator[None]:
    """An optimiser has these parameters already: they are not announced, which takes its time."""
    token = _HELD.set(frozenset(parameters))
    try:
        yield
    finally:
        _HELD.reset(token)


def announce_one(module: nn.Module) -> None:
    """Stands for all parameters that are not announced: without any, SVI computes no gradients."""
    held = _HELD.get()
    parameter = next((p for p in module.parameters() if p in held), None) if held else None
    if parameter is not None:
        name = f"one of {type(module).__name__}"
        _announce(name, parameter, constraint=constraints.real, name=name)


_HELD: ContextVar[frozenset[Tensor]] = ContextVar("held_by_optimiser", default=frozenset())


@effectful(type="param")
def _announce(name: str, parameter: nn.Parameter, constraint: Any) -> Tensor:
    value = parameter.view_as(parameter)
    value.unconstrained = weakref.ref(parameter)  # type: ignore[attr-defined]
    return value


@contextmanager
def own_store(*modules: Any) -> Iterator[dict[str, Tensor]]:
    """An empty parameter store for the duration, if every one of ``modules`` owns its parameters.

    A guide that is a plain function keeps its parameters in the global store only; with one among
    ``modules`` the store stays as it is. (The store's own ``scope`` would strip the parameters
    that an SVI step around it has already collected.) Other threads that ask for one wait.

    Yields:
        The unconstrained parameters registered so far, by name.
    """
    store = pyro.get_param_store()
    with TURN:
        if not all(isinstance(module, nn.Module) for module in modules):
            yield store._params
            return
        _PUT_ASIDE.append(_exchange({}, {}, {}))
        try:
            yield store._params
        finally:
            _exchange(*_PUT_ASIDE.pop())


@contextmanager
def callers_store() -> Iterator[None]:
    """Inside of `own_store`, the store as the caller has it: for callbacks."""
    if not _PUT_ASIDE:
        yield
        return
    aside = _PUT_ASIDE.copy()
    _PUT_ASIDE.clear()
    inside = _exchange(*aside[0])
    try:
        yield
    finally:
        aside[0] = _exchange(*inside)  # other dicts, where the callback cleared it
        _PUT_ASIDE.extend(aside)


def _exchange(*contents: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
    """Puts other contents into the parameter store; returns what was there."""
    store = pyro.get_param_store()
    before = store._params, store._param_to_name, store._constraints
    store._params, store._param_to_name, store._constraints = contents
    return before


_PUT_ASIDE: list[tuple[dict[Any, Any], ...]] = []  # by `own_store`, the outermost first


def weigh(weight: float | Tensor) -> AbstractContextManager[Any]:
    """Multiplies the log-densities inside by a non-negative weight, as ``poutine.scale`` does.

    ``poutine.scale`` refuses a weight of 0, which a Blundell schedule underflows to: there the
    log-densities are masked instead. Where Pyro does not validate, a tensor is used unread, as
    ``poutine.scale`` does: to read it would be to wait for its device.

    Raises:
        ValueError: the weight is negative, infinite or NaN.
        TypeError: it is neither a number nor a tensor.
    """
    if not isinstance(weight, Tensor):
        weight = at_least_zero("kl_weight", weight)
    elif not is_validation_enabled():
        return _Weigh(weight)
    elif not weight >= 0:
        raise ValueError(f"kl_weight must be a non-negative number, got {weight}")
    return poutine.mask(mask=False) if weight == 0 else poutine.scale(scale=weight)


class _Weigh(ScaleMessenger):
    """``poutine.scale`` that leaves all sites the same tensor where nothing else scales them."""

    def _process_message(self, msg: Any) -> None:
        if isinstance(msg["scale"], float) and msg["scale"] == 1.0:
            msg["scale"] = self.scale
        else:
            super()._process_message(msg)


def sample_names(module: PyroModule) -> list[str]:
    """Names of the `PyroSample` attributes of one module, decorated methods included."""
    return list(dict.fromkeys([*module._pyro_samples, *_decorated_names(type(module))]))


@functools.cache
def _decorated_names(cls: type) -> tuple[str, ...]:
    """Names of the methods of a class that Pyro's decorator made random."""
    return tuple(
        name
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, PyroSample)
    )


def is_of_prior(name: str) -> bool:
    """Whether a site or parameter is a prior's own, such as ``fc1.weight_prior_scale``."""
    return "_prior_" in name.rpartition(".")[2]


def parts_of_prior(module: nn.Module) -> list[str]:
    """Names of what priors have registered on a module beside its random weights."""
    if not isinstance(module, PyroModule):
        return []
    weights = sample_names(module)
    names = dict.fromkeys([*weights, *module._pyro_params, *module._parameters])
    return [name for name in names if is_of_prior(name) and name.partition("_prior_")[0] in weights]


def declared_names(root: nn.Module) -> set[str]:
    """Full names of the `PyroSample` attributes below ``root``."""
    return {
        f"{path}.{name}" if path else name
        for path, module in root.named_modules()
        if isinstance(module, PyroModule)
        for name in sample_names(module)
    }


def drawn(trace: Any) -> dict[str, Any]:
    """The sites of a trace that are drawn, by name; a plate's choice of its rows is none."""
    sites = trace.iter_stochastic_nodes()
    return {name: site for name, site in sites if not site_is_subsample(site)}


def draw_all(root: nn.Module) -> None:
    """Draws every declared `PyroSample` below ``root``, in the order of its modules.

    Called in an active context it fixes the set and order of the sample sites, whatever path the
    forward pass takes.
    """
    for module in root.modules():
        if isinstance(module, PyroModule):
            for name in sample_names(module):
                getattr(module, name)


def name_parts(root: PyroModule) -> None:
    """Names every part by its first path, as `named_parameters` does, all in one context.

    Pyro by itself names a part that stands in several places by its last path.
    """
    for path, part in root.named_modules():
        if isinstance(part, PyroModule):
            part._pyro_name, part._pyro_context = path, root._pyro_context


def over_draws(
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]], draws: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Runs a function of one draw for many: as one batched pass where its operations allow it.

    Args:
        run: from one draw's tensors by name to tensors by name.
        draws: the draws, ``[S, ...]`` each.

    Returns:
        The results, ``[S, ...]`` each.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # of what torch batches badly
            return torch.vmap(run, randomness="different")(dict(draws))
    except (RuntimeError, UserWarning):  # the loop does it, or raises what is wrong
        return one_by_one(run, draws)


def one_by_one(
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]], draws: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """As `over_draws`, in a loop."""
    columns = (values.unbind() for values in draws.values())  # gradients are stacked, not added up
    return stack([run(dict(zip(draws, one, strict=True))) for one in zip(*columns, strict=True)])


def stack(records: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Records of tensors by name as one record, stacked along a new first dimension."""
    return {name: torch.stack([record[name] for record in records]) for name in records[0]}


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for the duration; every submodule's own mode comes back."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def seeded(seed: int | None, *, cpu_only: bool = False) -> Iterator[None]:
    """Torch's random state set from ``seed``, and given back afterwards; ``None`` changes nothing.

    Other threads that ask for one wait.

    Args:
        seed: the seed.
        cpu_only: leave other devices alone; to look for them takes longer than a small network.

    Raises:
        TypeError: the seed is not an integer.
        ValueError: it has more than 64 bits.
    """
    if seed is None:
        yield
        return
    seed = as_seed("seed", seed)
    with TURN, torch.random.fork_rng(devices=[] if cpu_only else None):
        (torch.default_generator if cpu_only else torch).manual_seed(seed)
        yield
