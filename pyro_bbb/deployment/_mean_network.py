# SPDX-License-Identifier: Apache-2.0
"""`to_module`: the network at the posterior's mean weights as an ordinary module, without Pyro."""

from __future__ import annotations

import copy
import timeit
import warnings
from typing import Any

import torch
from pyro.poutine.guide import GuideMessenger
from torch import Tensor, nn

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import kind, tensor
from pyro_bbb.deployment._strip_pyro import plain_copy
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import merge_adapters

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
        TypeError: an argument is of another kind.
        ValueError: the guide lacks a weight of the model.
    """
    kind("model", model, BayesianModel)
    if not hasattr(guide, "median") or isinstance(guide, GuideMessenger):
        hint = f"{type(guide).__name__}; bbb.to_ensemble takes draws"
        raise TypeError(f"guide must have medians without inputs, got {hint}")
    with own_store(model, guide):
        weights = {name: value.detach().clone() for name, value in guide.median().items()}
    return merge_adapters(plain_copy(model.network, "network", weights)).eval()


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

    Raises:
        TypeError: an argument is of another kind.
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
