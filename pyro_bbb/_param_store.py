# SPDX-License-Identifier: Apache-2.0
"""Parameters that belong to their module instead of Pyro's global store.

By default Pyro keeps parameters in one global store by name, so that the second of two guides of
one class silently takes the first one's values. Here a module's parameters are its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyro
import pyro.distributions as dist
from pyro import infer, poutine
from pyro.nn import PyroModule
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK, effectful
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_bbb._utils.locking import AFTER_FORK, GLOBAL_LOCK


def own_param(name: str, parameter: nn.Parameter) -> Tensor:
    """Announce a parameter to the handlers around, such as SVI, without the global store."""
    value: Tensor = _announce(name, parameter, constraint=constraints.real, name=name)
    unconstrained = getattr(value, "unconstrained", None)
    return parameter if unconstrained is not None and unconstrained() is parameter else value


@effectful(type="param")
def _announce(name: str, parameter: nn.Parameter, constraint: Any) -> Tensor:
    value = parameter.view_as(parameter)
    value.unconstrained = weakref.ref(parameter)  # type: ignore[attr-defined]
    return value


@contextmanager
def own_store(*modules: Any) -> Iterator[dict[str, Tensor]]:
    """Empty the parameter store for the duration, and yield its unconstrained parameters by name.

    With a plain function among ``modules``, which keeps its parameters in the global store, the
    store stays as it is. (The store's own ``scope`` would strip the parameters that an SVI step
    around it has already collected.)
    """
    store = pyro.get_param_store()
    with GLOBAL_LOCK:
        _RUNNING.append((modules, [switch.is_validation_enabled() for switch in _SWITCHES]))
        own = all(isinstance(module, nn.Module) for module in modules)
        if own:
            _PUT_ASIDE.append(_exchange({}, {}, {}))
        try:
            yield store._params
        finally:
            if own:
                _exchange(*_PUT_ASIDE.pop())
            _RUNNING.pop()


class HandlersParams(Messenger):
    """Keep parameters that handlers around a model create at its sites in the enclosing store.

    A guide that runs the model (`AutoNormalMessenger`) and `AutoReparam` do so. It stands inside
    `own_store`, innermost: a site reaches it before those handlers, and leaves it after them.
    """

    _depth = 0  # sites that the handlers process now

    def _pyro_sample(self, msg: Any) -> None:
        if self._depth == 0:
            self._inside = _exchange(*_PUT_ASIDE.pop())
        self._depth += 1

    def _pyro_post_sample(self, msg: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            _PUT_ASIDE.append(_exchange(*self._inside))

    def __exit__(self, *error: Any) -> None:
        if self._depth:  # a handler has raised
            self._depth = 1
            self._pyro_post_sample({})
        super().__exit__(*error)


@contextmanager
def callers_store() -> Iterator[None]:
    """Restore, inside of `own_store`, the caller's store: for callbacks."""
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
    """Put other contents into the parameter store, and return those before."""
    store = pyro.get_param_store()
    before = store._params, store._param_to_name, store._constraints
    store._params, store._param_to_name, store._constraints = contents
    return before


def _leave_all() -> None:
    """End what another thread was running when this process was forked from it."""
    _PYRO_STACK.clear()
    _DIM_ALLOCATOR._stack.clear()
    if _PUT_ASIDE:
        _exchange(*_PUT_ASIDE[0])
    for modules, validating in reversed(_RUNNING):
        for module in modules:
            if isinstance(module, PyroModule):
                module._pyro_context.active = 0
                module._pyro_context.cache.clear()
        for switch, is_on in zip(_SWITCHES, validating, strict=True):
            switch.enable_validation(is_on)
    _PUT_ASIDE.clear()
    _RUNNING.clear()


_PUT_ASIDE: list[tuple[dict[Any, Any], ...]] = []  # by `own_store`, the outermost first
_RUNNING: list[tuple[tuple[Any, ...], list[bool]]] = []  # its modules, and validation before it
_SWITCHES: tuple[Any, ...] = (dist, infer, poutine)  # of validation
AFTER_FORK.append(_leave_all)
