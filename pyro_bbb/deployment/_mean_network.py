"""From a Bayesian network to an ordinary one: mean weights, no Pyro, sparse where pruned."""

from __future__ import annotations

import warnings
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._utils.validation import kind, tensor
from pyro_bbb.deployment._strip_pyro import plain_copy
from pyro_bbb.models import BayesianModel

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
    kind("model", model, BayesianModel)
    if not hasattr(guide, "median"):
        raise TypeError(f"guide must have a method median, got {type(guide).__name__}")
    with own_store(model, guide):
        weights = {name: value.detach().clone() for name, value in guide.median().items()}
    return _sparse(plain_copy(model.network, "network", weights)).eval()


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
