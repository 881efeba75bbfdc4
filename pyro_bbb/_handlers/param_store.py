"""What we mend in Pyro: parameters that belong to their module, and a weight of zero.

By default Pyro keeps parameters in one global store by name, so that the second of two guides of
one class silently takes the first one's values. Here a module's parameters are its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pyro
from pyro.poutine.runtime import effectful
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_bbb._utils.locking import GLOBAL_LOCK


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
    with GLOBAL_LOCK:
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
