# SPDX-License-Identifier: Apache-2.0
"""`to_module`: the network at the posterior's mean weights as an ordinary module, without Pyro."""

from __future__ import annotations

import copy
import timeit
import warnings
from collections.abc import Mapping
from functools import cache
from types import CellType, FunctionType
from typing import Any

import torch
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.poutine.guide import GuideMessenger
from torch import Tensor, nn

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._handlers.sites import parts_of_prior, sample_names
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import kind, tensor
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import merge_adapters
from pyro_bbb.priors import Prior

_PASSES = 20  # of each layer, dense and sparse; the fastest counts


@locked
def to_module(model: BayesianModel, guide: Any) -> nn.Module:
    """Return the network with the posterior's central weights, as a plain `torch.nn.Module`.

    It has no random weights, priors or Pyro classes left, and can be saved, compiled and exported.
    Adapters (`adapt`) are added to the weights of their layers.
    The removed weights of a pruned guide are zeros in it (see `sparse_where_faster`).

    Args:
        model: the model; it stays as it is.
        guide: a trained guide; its medians (for `AutoSoftplusNormal` the means) are the weights.

    Returns:
        A module in evaluation mode, with the outputs of `predict_mean`'s network. It does not check
        them: where an input overflows they are NaN or infinite.

    Raises:
        ValueError: the guide lacks a weight of the model.
    """
    kind("model", model, BayesianModel)
    if not hasattr(guide, "median") or isinstance(guide, GuideMessenger):
        hint = f"{type(guide).__name__}; bbb.to_ensemble takes draws"
        raise TypeError(f"guide must have medians without inputs, got {hint}")
    with own_store(model, guide):
        weights = {name: value.detach().clone() for name, value in guide.median().items()}
    return merge_adapters(plain_copy(model.network, "network", weights)).eval()


# --- a copy without Pyro ---


def plain_copy(part: nn.Module, path: str, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy with given values as parameters for its random weights, without Pyro.

    ``path`` is the name of the part in the model, ``weights`` has the latents by site name.
    """
    plain = copy.deepcopy(part)
    for name, module in list(plain.named_modules()):
        if isinstance(module, PyroModule):
            prefix = ".".join(filter(None, [path, name]))
            names = {name: f"{prefix}.{name}" for name in sample_names(module)}
            if missing := [name for name in names.values() if name not in weights]:
                raise ValueError(f"guide lacks the latents {missing}, it has {list(weights)}")
            _strip(module, {name: weights[site] for name, site in names.items()})
    return plain


def _strip(module: PyroModule, values: dict[str, Tensor]) -> None:
    """Turn a Pyro module into one of its plain class, with parameters for its random weights."""
    for name in _param_names(module):
        values[name] = getattr(module, name).detach().clone()
        del module._parameters[f"{name}_unconstrained"]
    for name in parts_of_prior(module):
        values.pop(name, None)
        module._parameters.pop(name, None)
    for name, child in list(module._modules.items()):
        if isinstance(child, Prior):
            del module._modules[name]
    if hasattr(type(module), "as_used"):
        values = {name: module.as_used(name, value) for name, value in values.items()}
    tied = vars(module).get("_pyro_bbb_tied", {})
    module.__class__ = _plain_class(type(module))
    for name in [key for key in vars(module) if key.startswith("_pyro_")]:
        del module.__dict__[name]
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(value))
    for name, (owner, owner_name) in tied.items():  # an earlier module, stripped already
        module.register_parameter(name, owner._parameters[owner_name])
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


def _param_names(module: PyroModule) -> list[str]:
    """Return the names of the `PyroParam` attributes of one module, decorated methods included."""
    attributes = (item for cls in type(module).__mro__ for item in vars(cls).items())
    decorated = [name for name, value in attributes if isinstance(value, PyroParam)]
    return list(dict.fromkeys([*module._pyro_params, *decorated]))


@cache
def _plain_class(cls: type) -> Any:
    """Return the class without Pyro: torch's if it adds only a constructor, or of its code."""
    if not issubclass(cls, PyroModule):
        return cls
    if "plain_class" in vars(cls):
        return _plain_class(cls.plain_class)  # type: ignore[attr-defined]
    plain = dict.fromkeys(nn.Module if b is PyroModule else _plain_class(b) for b in cls.__bases__)
    bases = tuple(b for b in plain if not any(b is not c and issubclass(c, b) for c in plain))
    code = {} if cls.__module__.startswith("pyro.") else _own_code(cls)
    return bases[0] if len(bases) == 1 and not code else _new_class(cls, bases, code)


def _own_code(cls: type) -> dict[str, Any]:
    """Return a class's own members, but for its constructor and random or learned attributes."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not isinstance(value, (PyroSample, PyroParam))
        and name != "__init__"
        and (callable(value) or not name.startswith("__"))
    }


def _new_class(cls: type, bases: tuple[type, ...], code: dict[str, Any]) -> Any:
    """Return a class of that name and code, in which ``super()`` means the new bases."""
    cell = CellType()
    body = {name: _with_class_cell(value, cell) for name, value in code.items()}
    reduced = {"__reduce_ex__": lambda self, _: (_new_instance, (cls,), self.__getstate__())}
    body = reduced | body  # a saved object names the Pyro class, from which this one is made
    new = type(cls.__name__, bases, {"__module__": cls.__module__, "__doc__": cls.__doc__, **body})
    cell.cell_contents = new
    return new


def _new_instance(cls: type) -> Any:
    """Return an object without state of a Pyro class's plain class, to unpickle into."""
    plain = _plain_class(cls)
    return plain.__new__(plain)


def _with_class_cell(value: Any, cell: CellType) -> Any:
    """Return a method whose ``super()``, if any, reads its class from the cell."""
    if not isinstance(value, FunctionType) or "__class__" not in value.__code__.co_freevars:
        return value
    pairs = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    closure = tuple(cell if name == "__class__" else own for name, own in pairs)
    new = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, closure
    )
    new.__kwdefaults__ = value.__kwdefaults__
    return new


# --- sparse weights ---


@locked
def sparse_where_faster(module: nn.Module, x: Tensor) -> nn.Module:
    """Return a copy of a pruned network, its linear layers sparse where that is faster.

    Each layer is timed on this machine with the inputs that it gets in ``module(x)``: with its
    weight as it is, and in compressed sparse rows (`torch.Tensor.to_sparse_csr`). The faster one
    stays. Sparse weights pay where a few per cent of a large layer are left. Torch can neither
    train nor compile them, nor export them to ONNX.

    Args:
        module: a network from `to_module`, on a CPU; it stays as it is.
        x: inputs ``[batch, ...]``, as many at once as the network will get.

    Returns:
        The network of the same layers, in evaluation mode.
    """
    kind("module", module, nn.Module)
    network, inputs = copy.deepcopy(module).eval(), dict[nn.Linear, Tensor]()

    def record(layer: nn.Linear, args: tuple[Tensor, ...]) -> None:
        inputs[layer] = args[0]

    layers = [layer for layer in network.modules() if type(layer) is nn.Linear]
    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    with torch.no_grad():
        network(tensor("x", x))
    for hook in hooks:
        hook.remove()
    for layer, its_inputs in inputs.items():
        sparse = _with_sparse_weight(layer)
        if _seconds(sparse, its_inputs) < _seconds(layer, its_inputs):
            layer.weight = sparse.weight
    return network


def _with_sparse_weight(layer: nn.Linear) -> nn.Linear:
    sparse = copy.copy(layer)
    sparse._parameters = dict(layer._parameters)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        rows = layer.weight.detach().to_sparse_csr()
    row_offsets, columns = rows.crow_indices().int(), rows.col_indices().int()
    weight = torch.sparse_csr_tensor(
        row_offsets, columns, rows.values(), rows.shape, check_invariants=False
    )
    sparse.weight = nn.Parameter(weight, requires_grad=False)
    return sparse


def _seconds(layer: nn.Linear, x: Tensor) -> float:
    with torch.no_grad():
        timer = timeit.Timer(lambda: layer(x))
        return min(timer.repeat(_PASSES, number=1))
