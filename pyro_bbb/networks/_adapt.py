# SPDX-License-Identifier: Apache-2.0
"""`adapt`: low-rank adapters with a posterior on the layers of a frozen network."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Literal, get_args

from pyro.nn import PyroModule
from torch import nn

from pyro_bbb._utils.locking import locked
from pyro_bbb._utils.validation import count, one_of, positive
from pyro_bbb.networks._adapted_layers import SUPPORTED, Adapted, attach, kind_of, names_of
from pyro_bbb.networks._bayesianize import Converted, make_random, without_wrappers
from pyro_bbb.networks._select import (
    Where,
    obstacle,
    parts,
    select,
    select_among,
    without_parameters_inside,
)
from pyro_bbb.priors import FanInNormal, PriorLike, as_prior

Factors = Literal["A", "both"]
UNIT_GAIN = 0.5**0.5  # of `FanInNormal`: variance 1 / inputs


@locked
def adapt(
    module: nn.Module,
    rank: int = 8,
    *,
    where: Where | None = None,
    prior: PriorLike | None = None,
    alpha: float | None = None,
    random: Factors = "A",
    trainable: Where | None = None,
) -> PyroModule:
    r"""Copy a network, freeze it, and give layers low-rank adapters with a posterior.

    In an adapted layer $W + \frac{\alpha}{r} B A$ stands for the weight W (Hu et al. 2021); A is
    random, B a parameter that is trained with the guide (Wang et al. 2024, arXiv:2406.11675), or
    random too. At first B is 0, and the outputs are the given network's. Sites are called as in
    ``"network.layers.0.q_proj.lora_A"``.

    The copy shares the memory of its frozen weights with ``module``: thaw none of them, which
    would train both; name layers that are to be trained as ``trainable``. Layers may be random as
    well: ``adapt(bayesianize(module, where="head"), ...)``.

    Args:
        module: a trained network of torch's or Hugging Face's layers; not changed.
        rank: r, rows of A.
        where: the layers that are adapted, as for `bayesianize`: a shell pattern that matches a
            module's path (with all layers inside), or several separated by ``|``, as in
            ``"*.q_proj|*.v_proj"``; a module type; a function of path and module; or a list.
            ``None`` adapts all layers that can be: linear, attention (the packed projections too),
            embeddings, and 2-D convolutions.
        prior: of the random factors; patterns of a dict match names such as
            ``"layers.0.q_proj.lora_A"``. ``None`` is `priors.FanInNormal` of variance 1 / inputs.
        alpha: strength $\alpha$ of the adapters; by default ``rank``.
        random: ``"A"``, or ``"both"`` factors.
        trainable: layers that have no adapter but stay ordinary parameters, trained with the guide,
            such as a new last layer; a selection as for `bayesianize`.

    Returns:
        The network as a `PyroModule`, for `BayesianModel` or for Pyro alone.

    Raises:
        TypeError: ``module`` or ``where`` is of another kind.
        ValueError: a number out of range; a criterion that selects no layer, or one that cannot be
            adapted; or a prior that does not fit.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    module = without_wrappers(module)
    rank = count("rank", rank)
    one_of("random", random, get_args(Factors))
    scale = (rank if alpha is None else positive("alpha", alpha)) / rank
    trained = [] if trainable is None else select(module, trainable, "trainable")
    chosen = _adaptable(module, where, {path for path, _ in trained})
    modules = dict(module.named_modules())
    excluded = {id(modules[path]._parameters[name]) for path, name in trained}
    network = copy_sharing(module, (x for x in module.parameters() if id(x) not in excluded))
    layers = {path: network.get_submodule(path) for path in chosen}
    for layer in layers.values():
        attach(layer, _plain(layer), rank, scale)
    _without_fast_path(network)
    factors = [
        (path, name)
        for path, layer in layers.items()
        for weight in _weights(layer)
        for name in names_of(weight)[: 1 if random == "A" else 2]
    ]
    own = FanInNormal(UNIT_GAIN) if prior is None else prior
    return make_random(network, factors, as_prior(own))


def _adaptable(module: nn.Module, where: Where | None, trained: set[str]) -> list[str]:
    """Paths of the layers that are chosen, each of which can have an adapter."""
    modules = dict(parts(module))
    reasons = {
        path: "trainable has it" if path in trained else _reason(part)
        for path, part in modules.items()
    }
    able = {path for path, reason in reasons.items() if reason is None}
    for path in without_parameters_inside(modules, able, where):
        raise ValueError(f"{path!r} cannot be adapted: {reasons[path]}; where must leave it out")
    weights = [(path, name) for path in able for name in _weights(modules[path])]
    chosen = {path for path, _ in select_among(modules, weights, where, "layers to adapt")}
    return [path for path in modules if path in chosen]


def _weights(layer: nn.Module) -> list[str]:
    kind = kind_of(_plain(layer))
    return kind.adapted(layer) if kind else []


def _plain(layer: nn.Module) -> type[nn.Module]:
    """A layer's class without Pyro."""
    return type(layer).plain_class if isinstance(layer, Converted) else type(layer)


def _reason(layer: nn.Module) -> str | None:
    """The reason why a layer cannot have an adapter, if any."""
    cls = _plain(layer)
    kind = kind_of(cls)
    if issubclass(cls, Adapted):
        return "it has an adapter already"
    if kind is None or getattr(layer, "groups", 1) != 1:
        return f"it is a {cls.__name__}, not one of {SUPPORTED}"
    if any(vars(layer).get(key) for key in ("_pyro_samples", "_pyro_bbb_tied")):
        return "some of its weights are random or tied"
    reasons = (obstacle(layer, name) for name in kind.adapted(layer))
    return next(filter(None, reasons), None)


def copy_sharing(module: nn.Module, parameters: Iterable[nn.Parameter]) -> nn.Module:
    """A copy in which these parameters are frozen and share the module's memory."""
    shared: dict[int, Any] = {
        id(x): nn.Parameter(x.detach(), requires_grad=False) for x in parameters
    }
    return copy.deepcopy(module, shared)


def _without_fast_path(network: nn.Module) -> None:
    """Turns off what torch's encoders compute from their layers' weights, without the layers."""
    encoders = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
    for part in [part for part in network.modules() if isinstance(part, encoders)]:
        if any(isinstance(layer, Adapted) for layer in part.modules()):
            if isinstance(part, nn.TransformerEncoderLayer):
                part.activation_relu_or_gelu = 0
            else:
                part.use_nested_tensor = False
