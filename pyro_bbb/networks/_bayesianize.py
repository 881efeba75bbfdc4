# SPDX-License-Identifier: Apache-2.0
"""`bayesianize`: conversion of any torch network to one with random weights.

Every submodule becomes a `PyroModule` that inherits from its class, so that its forward pass does
not change. A selected parameter becomes a `PyroSample`, which the forward pass reads instead.
Recurrent layers (RNN, LSTM, GRU) and embeddings have a class here.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from functools import cache
from typing import Any

import torch
from pyro.nn import PyroModule
from pyro.nn.module import _Context
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pyro_bbb._param_store import own_param
from pyro_bbb._utils.locking import locked
from pyro_bbb.latents import name_parts, unseen
from pyro_bbb.networks._select import ParameterPath, Where, modules_of, parameter_paths, select
from pyro_bbb.priors import Prior, PriorLike, as_prior, declare


@locked
def bayesianize(
    module: nn.Module, prior: PriorLike | None = None, *, where: Where | None = None
) -> PyroModule:
    """Copy a network and make parameters random: `PyroSample` sites of the same names.

    Other parameters do not change: they are trained with the guide, frozen ones
    (``requires_grad=False``) stay frozen. The present values are the initial means of
    `AutoSoftplusNormal`. A shared parameter is one site, named by its first path. A recurrent layer
    uses one sample for all time steps. The row of an embedding's ``padding_idx`` is constant.

    Args:
        module: any network, or a single layer; not changed. Existing sites of a `PyroModule` stay.
            Of a compiled one the original is converted.
        prior: prior of the selected parameters; patterns of a dict match full names such as
            ``"encoder.0.weight"``. ``None`` is `pyro_bbb.priors.default_prior`.
        where: selection of the random parameters: a shell pattern, or several separated by ``|``,
            which match a module's path (with all submodules) or a parameter's full name; a module
            type (with all submodules); a function of path and module, for the module's own
            parameters; or a list of these, any of which selects. ``None`` selects all but the
            parameters of normalisation layers, which a pattern, type or function has to match
            directly.

    Returns:
        The network as a `PyroModule`, for `BayesianModel` or for Pyro alone.

    Raises:
        TypeError: ``module`` or ``where`` is of another kind, or a module is scripted.
        ValueError: a criterion selects nothing, the prior does not fit, or a selected parameter
            cannot be random: without a shape yet, complex, or parametrised.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    module = without_wrappers(module)
    for path, inner in module.named_modules():
        if isinstance(inner, torch.jit.ScriptModule):
            raise TypeError(f"module must not be scripted, got {type(inner).__name__} at {path!r}")
    select(module, where)  # errors are raised before the copy
    network = copy.deepcopy(module)
    return make_random(network, select(network, where), as_prior(prior))


def without_wrappers(module: nn.Module) -> nn.Module:
    """Return a network without `torch.compile`, whose graphs would hold the original weights.

    Raises:
        TypeError: `nn.DataParallel` or DistributedDataParallel wraps it.
    """
    module = module._modules.get("_orig_mod") or module
    for path, inner in module.named_modules():
        if isinstance(inner, (nn.DataParallel, DistributedDataParallel)):
            wrapper = f"got {type(inner).__name__} at {path!r}"
            raise TypeError(f"module must not be wrapped, take its .module; {wrapper}")
    if any("_orig_mod" in inner._modules for inner in module.modules()):
        module = copy.deepcopy(module)
        for inner in list(module.modules()):
            for name, child in inner._modules.items():
                inner._modules[name] = getattr(child, "_orig_mod", child)
    return module


def make_random(network: nn.Module, chosen: list[ParameterPath], prior: Prior) -> PyroModule:
    """Convert a network in place: the chosen parameters become sites under the prior."""
    context = _Context()
    for _, module in list(modules_of(network)):
        mix_in(module, context)
    _replace(network, chosen, prior)
    assert isinstance(network, PyroModule)
    name_parts(network)
    return network


class Converted(PyroModule):
    """Module of any class after conversion, which gives its forward pass the sampled weights."""

    plain_class: type[nn.Module]  # before conversion
    _pyro_bbb_initial: dict[str, Tensor]  # values of the sites before conversion
    _pyro_bbb_tied: dict[str, tuple[PyroModule, str]]  # name here: the module and name of the site

    def __repr__(self) -> str:
        with unseen(self):  # torch reads the weights
            return super().__repr__()

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if name in own.get("_pyro_bbb_tied", ()):
            owner, owner_name = self._pyro_bbb_tied[name]
            return getattr(owner, owner_name)
        parameter = own.get("_parameters", {}).get(name)
        if parameter is None or name.endswith("_unconstrained"):
            value = super().__getattr__(name)
            return self.as_used(name, value) if name in own.get("_pyro_samples", ()) else value
        # announced without Pyro's global store, which would make frozen parameters trainable
        if parameter.requires_grad and self._pyro_context.active:
            own_param(self._pyro_get_fullname(name), parameter)
        return parameter

    def __setattr__(self, name: str, value: Any) -> None:
        known = self.__dict__.get("_parameters", {})
        if name in known and isinstance(value, nn.Parameter):
            known[name] = value  # in its place, as in torch: FSDP needs the order
        else:
            super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        return _empty, (type(self).plain_class,), self.__getstate__()

    def as_used(self, name: str, value: Tensor) -> Tensor:
        """Return the weight that the layer uses for a value of its site."""
        return value


# --- embeddings and recurrent layers ---


class _ConvertedEmbedding(Converted):
    """Embedding whose padding row is constant."""

    def as_used(self, name: str, value: Tensor) -> Tensor:
        padding, initial = self.padding_idx, self._pyro_bbb_initial.get(name)
        if padding is None or initial is None:
            return value
        row = torch.arange(value.shape[-2], device=value.device).unsqueeze(-1) == padding
        return torch.where(row, initial.to(value), value)


class _ConvertedRNN(Converted):
    """Recurrent layer that collects the sampled weights at every call."""

    @property
    def _flat_weights(self) -> list[Any]:
        if not self._pyro_context.active:
            return [None] * len(self._flat_weights_names)
        return [getattr(self, name) for name in self._flat_weights_names]

    @_flat_weights.setter
    def _flat_weights(self, value: list[Any]) -> None:
        """Ignore the value: the weights are collected at every call."""

    def flatten_parameters(self) -> None:
        """Do nothing: weights are collected at every call, and not rearranged in memory."""

    _init_flat_weights = _update_flat_weights = flatten_parameters

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, without torch's warning about weights in several blocks of memory."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single")
            return super().forward(*args, **kwargs)


# --- conversion ---


@cache
def _converted(cls: Any) -> Any:
    """Return the class with Pyro mixed in."""
    if issubclass(cls, Converted):
        return cls
    embedding = issubclass(cls, (nn.Embedding, nn.EmbeddingBag))
    recurrent = issubclass(cls, nn.RNNBase)
    base = _ConvertedRNN if recurrent else _ConvertedEmbedding if embedding else Converted
    body = {"plain_class": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(PyroModule)(f"Pyro{cls.__name__}", (base, PyroModule[cls]), body)  # type: ignore[misc]


def _empty(cls: Any) -> Any:
    """Make a converted module without state, for copies and pickles."""
    new = _converted(cls)
    return new.__new__(new)


def mix_in(module: nn.Module, context: _Context) -> None:
    """Convert one module in place to a `PyroModule`."""
    state = module.__dict__
    if not isinstance(module, PyroModule):
        state.update(_pyro_name="", _pyro_params=OrderedDict(), _pyro_samples=OrderedDict())
    state.setdefault("_pyro_bbb_initial", {})
    state.setdefault("_pyro_bbb_tied", {})
    state["_pyro_context"] = context
    state.pop("_flat_weights", None)  # of a recurrent layer before conversion
    cls: Any = type(module)
    module.__class__ = _converted(cls)


def _replace(network: nn.Module, chosen: list[ParameterPath], prior: Prior) -> None:
    """Make the chosen parameters sites at their first paths, and references at further ones."""
    modules: dict[str, Any] = dict(network.named_modules())
    paths = parameter_paths(network)
    parameters = {(path, name): modules[path]._parameters[name] for path, name in paths}
    random = {parameters[path] for path in chosen}
    first: dict[nn.Parameter, ParameterPath] = {}
    owned: dict[str, dict[str, nn.Parameter]] = {}
    for (path, name), value in parameters.items():
        if value in first:
            owner, owner_name = first[value]
            del modules[path]._parameters[name]
            modules[path]._pyro_bbb_tied[name] = modules[owner], owner_name
        elif value in random:
            first[value] = path, name
            owned.setdefault(path, {})[name] = value
    for path, values in owned.items():
        own = (prior.scoped(path) if path else prior).to(next(iter(values.values())))
        declare(modules[path], own, **{name: value.shape for name, value in values.items()})
        initial = {name: value.detach() for name, value in values.items()}
        modules[path]._pyro_bbb_initial.update(initial)
