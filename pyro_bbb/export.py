"""From a Bayesian network to an ordinary one: mean weights, no Pyro, sparse where pruned."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from types import CellType, FunctionType
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import Tensor, nn

from pyro_bbb._checks import tensor
from pyro_bbb._pyro import own_store, parts_of_prior, sample_names
from pyro_bbb.models import BayesianModel
from pyro_bbb.priors import Prior

_SPARSE_BELOW = 0.5  # share of non-zero weights from which 8 bytes for each are fewer than dense 4


def to_module(model: BayesianModel, guide: Any) -> nn.Module:
    """The network with the posterior's central weights, as a plain `torch.nn.Module`.

    It has no random weights, priors or Pyro classes left, and can be saved, compiled and exported.
    Linear layers of a pruned guide keep only their non-zero weights (`SparseLinear`).

    Args:
        model: the model; it stays as it is.
        guide: a trained guide; its medians (for `AutoSoftplusNormal` the means) are the weights.

    Returns:
        A module in evaluation mode, with the outputs of `predict_mean`'s network.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: the guide lacks a weight of the model.
    """
    if not isinstance(model, BayesianModel):
        raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
    if not hasattr(guide, "median"):
        raise TypeError(f"guide must have a method median, got {type(guide).__name__}")
    with own_store(model, guide):
        weights = {name: value.detach().clone() for name, value in guide.median().items()}
    network = copy.deepcopy(model.network)
    for path, module in list(network.named_modules()):
        if isinstance(module, PyroModule):
            prefix = ".".join(filter(None, ["network", path]))
            names = {name: f"{prefix}.{name}" for name in sample_names(module)}
            if missing := [name for name in names.values() if name not in weights]:
                raise ValueError(f"guide lacks the latents {missing}, it has {list(weights)}")
            _strip(module, {name: weights[site] for name, site in names.items()})
    return _sparse(network).eval()


class SparseLinear(nn.Module):
    """A linear layer that stores its non-zero weights only, in compressed rows.

    A compiler sees a dense layer rebuilt from them; otherwise the product itself is sparse.

    Args:
        linear: the layer to take over.

    Raises:
        TypeError: it is another.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be a torch.nn.Linear, got {type(linear).__name__}")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        _accept_beta()
        rows = linear.weight.detach().to_sparse_csr()
        self.register_buffer("row_starts", rows.crow_indices().int())
        self.register_buffer("columns", rows.col_indices().int())
        self.register_buffer("values", rows.values().clone())
        self.bias = linear.bias

    row_starts: Tensor
    columns: Tensor
    values: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Outputs ``[..., out_features]`` for inputs ``[..., in_features]``.

        Raises:
            ValueError: the inputs have another shape.
            TypeError: they are no tensor.
        """
        if tensor("x", x).dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"expected x of shape [..., {self.in_features}], got {list(x.shape)}")
        if torch.compiler.is_compiling():
            return F.linear(x, self._dense(), self.bias)
        shape = (self.out_features, self.in_features)
        weight = torch.sparse_csr_tensor(
            self.row_starts, self.columns, self.values, shape, check_invariants=False
        )
        outputs = (weight @ x.reshape(-1, self.in_features).T).T
        outputs = outputs if self.bias is None else outputs + self.bias
        return outputs.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes and the number of weights, for the module's printed form."""
        return f"{self.in_features}, {self.out_features}, weights={len(self.values)}"

    def __setstate__(self, state: dict[str, Any]) -> None:
        _accept_beta()
        super().__setstate__(state)

    @property
    def weight(self) -> Tensor:
        """The dense weight ``[out_features, in_features]``, for code that reads it."""
        return self._dense()

    def _dense(self) -> Tensor:
        counts = self.row_starts.diff().long()
        rows = torch.arange(self.out_features, device=counts.device).repeat_interleave(
            counts, output_size=len(self.values)
        )
        dense = self.values.new_zeros(self.out_features, self.in_features)
        return dense.index_put((rows, self.columns.long()), self.values)


def _accept_beta() -> None:
    """Makes a first sparse tensor: torch warns once in a process that they are in beta."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        torch.zeros(1, 1).to_sparse_csr()


def _strip(module: PyroModule, values: dict[str, Tensor]) -> None:
    """Turns a Pyro module into one of its plain class, with parameters for its random weights."""
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
    """Names of the `PyroParam` attributes of one module, decorated methods included."""
    attributes = (item for cls in type(module).__mro__ for item in vars(cls).items())
    decorated = [name for name, value in attributes if isinstance(value, PyroParam)]
    return list(dict.fromkeys([*module._pyro_params, *decorated]))


@cache
def _plain_class(cls: type) -> Any:
    """The class without Pyro: torch's own if it adds only a constructor, else its code on that."""
    if not issubclass(cls, PyroModule):
        return cls
    if "plain_class" in vars(cls):
        return _plain_class(cls.plain_class)  # type: ignore[attr-defined]
    plain = dict.fromkeys(nn.Module if b is PyroModule else _plain_class(b) for b in cls.__bases__)
    bases = tuple(b for b in plain if not any(b is not c and issubclass(c, b) for c in plain))
    code = {} if cls.__module__.startswith("pyro.") else _own_code(cls)
    return bases[0] if len(bases) == 1 and not code else _new_class(cls, bases, code)


def _own_code(cls: type) -> dict[str, Any]:
    """What a class defines itself, apart from its constructor and random or learned attributes."""
    return {
        name: value
        for name, value in vars(cls).items()
        if not isinstance(value, (PyroSample, PyroParam))
        and name != "__init__"
        and (callable(value) or not name.startswith("__"))
    }


def _new_class(cls: type, bases: tuple[type, ...], code: dict[str, Any]) -> Any:
    """A class of that name and code, in which ``super()`` means the new bases."""
    cell = CellType()
    body = {name: _with_class_cell(value, cell) for name, value in code.items()}
    new = type(cls.__name__, bases, {"__module__": cls.__module__, "__doc__": cls.__doc__, **body})
    cell.cell_contents = new
    return new


def _with_class_cell(value: Any, cell: CellType) -> Any:
    """A method whose ``super()``, if it has one, looks its class up in the cell."""
    if not isinstance(value, FunctionType) or "__class__" not in value.__code__.co_freevars:
        return value
    pairs = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    closure = tuple(cell if name == "__class__" else own for name, own in pairs)
    new = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, closure
    )
    new.__kwdefaults__ = value.__kwdefaults__
    return new


def _sparse(network: nn.Module) -> nn.Module:
    """The network with its mostly zero linear layers made sparse, shared ones once."""
    sparse: dict[nn.Module | None, nn.Module] = {
        part: SparseLinear(part) for part in network.modules() if _mostly_zero(part)
    }
    for part in list(network.modules()):
        for name, child in part._modules.items():
            part._modules[name] = sparse.get(child, child)
    return sparse.get(network, network)


def _mostly_zero(part: nn.Module) -> TypeGuard[nn.Linear]:
    if type(part) is not nn.Linear:
        return False
    return int(part.weight.count_nonzero()) < _SPARSE_BELOW * part.weight.numel()
