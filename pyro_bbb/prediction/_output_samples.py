# SPDX-License-Identifier: Apache-2.0
r"""A network's outputs drawn for each input separately, without drawing a weight.

The weights of a layer, $W \sim N(M, S^2)$ and $b \sim N(m, s^2)$ elementwise, reach an input only
through its pre-activations. Given the layer before, these are independent,

$$Wx + b \sim N\big(Mx + m,\; S^2 x^2 + s^2\big)$$

(Kingma et al. 2015, "Variational Dropout and the Local Reparameterization Trick"). Drawn layer by
layer they have each input's exact predictive distribution. Inputs are independent of one another:
what they have under one number of a draw is not one function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import takewhile
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_bbb._utils.inputs import Rows, at_least_single
from pyro_bbb.latents import declared_names, over_draws, role_of, sample_names, substituted
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import BayesianLinear, BayesianMLP, Converted
from pyro_bbb.prediction._draws import Part, default_rows
from pyro_bbb.priors import Prior

Layer: TypeAlias = tuple[str, nn.Module, type]  # its path, and its class before Pyro
Moments: TypeAlias = tuple[Tensor, Tensor | None]  # mean, and standard deviation if it is random

_LINEAR = (nn.Linear, BayesianLinear)
_CONTAINERS = (nn.Sequential, BayesianMLP)
_KNOWN = (
    *(*_LINEAR, *_CONTAINERS, nn.Flatten, nn.LayerNorm, nn.Identity, nn.Dropout, nn.AlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardshrink, nn.Softshrink, nn.Threshold),
)


def per_input(
    model: BayesianModel, guide: Any, layers: list[Layer], x: Rows, num_samples: int
) -> Iterator[Part]:
    """Yield the likelihood's arguments for every draw and input, each ``[s, n, ...]``."""
    moments = [_moments_of(layer, guide) for layer in layers]
    draw_latents = guide.sampler([x.name for x in guide.latents.of_role("likelihood")])
    rows = default_rows(x)  # inputs times draws of one pass
    draws = min(num_samples, rows)
    inputs = rows // draws
    for i in range(0, len(x), inputs):
        batch = x[i : i + inputs]
        for s in range(0, num_samples, draws):
            count = min(draws, num_samples - s)
            arguments = arguments_of(model, _drawn(moments, batch, count), draw_latents(count))
            yield slice(s, s + count), slice(i, i + len(batch)), arguments


def _drawn(layers: list[Callable[[Tensor], Moments]], x: Any, draws: int) -> Tensor:
    """Draw the network's outputs ``[draws, n, ...]``; before the first noise all draws agree."""
    n, repeats = len(x), draws
    for moments in layers:
        x, std = moments(x)
        if std is not None:
            noise = torch.randn(repeats, *x.shape, dtype=x.dtype, device=x.device)
            x = torch.addcmul(x, std, noise, out=noise).flatten(0, 1)
            repeats = 1  # from here on each row is one draw of an input
    return x.unflatten(0, (draws, n)) if len(x) == draws * n else x.expand(draws, *x.shape)


def _moments_of(layer: Layer, guide: Any) -> Callable[[Tensor], Moments]:
    """Return the function from a layer's inputs to the moments of its outputs."""
    path, module, cls = layer

    def parameter(name: str) -> tuple[Any, Any]:  # mean and variance
        site = f"{path}.{name}"
        if site in guide.site_names:
            return guide.loc(site), guide.scale(site).square_()
        if isinstance(module, PyroModule) and name in sample_names(module):
            raise ValueError(f"the posterior's draws lack the latent {site!r}")
        return getattr(module, name), None

    def linear(x: Tensor) -> Moments:
        if x.shape[1:] != weight.shape[1:]:
            shape = f"[batch, {weight.shape[1]}]"
            raise ValueError(f"expected x of shape {shape}, got {list(x.shape)}")
        if weight_variance is None:
            return F.linear(x, weight, bias), bias_variance.sqrt()
        std = F.linear(x.square(), weight_variance, bias_variance).sqrt_()  # of S^2 x^2 + s^2
        return F.linear(x, weight, bias), std

    if cls in _LINEAR:
        (weight, weight_variance), (bias, bias_variance) = map(parameter, ("weight", "bias"))
        if not (weight_variance is None and bias_variance is None):
            return linear
    return lambda x: (module(x), None)


def arguments_of(
    model: BayesianModel, outputs: Tensor, draws: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the likelihood's arguments for outputs ``[s, n, ...]`` and draws of its latents."""
    outputs = at_least_single(outputs)
    if not model.likelihood.is_standard:
        own = {name.removeprefix("likelihood."): x.unsqueeze(1) for name, x in draws.items()}
        return {"outputs": outputs, **own}

    def run(draw: dict[str, Tensor]) -> dict[str, Tensor]:
        with substituted(model, draw):
            return model.likelihood.arguments(draw["outputs"])

    if draws:
        return over_draws(run, {**draws, "outputs": outputs})
    arguments = run({"outputs": outputs.flatten(0, 1)})  # all rows at once
    return {name: value.unflatten(0, outputs.shape[:2]) for name, value in arguments.items()}


# --- where it is exact ---


def layers_in_order(model: BayesianModel, guide: Any, x: Rows) -> tuple[list[Layer], str, bool]:
    """Return the layers, why outputs cannot be drawn, and whether they have the weights' law."""
    layers = list(_layers(model.network, "network"))
    trunk = list(takewhile(lambda layer: not declared_names(layer[1]), layers))
    random = layers[len(trunk) :]
    linears = [module for _, module, cls in random if cls in _LINEAR]
    reason = ""
    if not getattr(guide, "is_factorised", False):
        reason = f"guide must be an AutoSoftplusNormal, got {type(guide).__name__}"
    elif type(model).predictive is not BayesianModel.predictive:
        reason = f"{type(model).__name__} overrides predictive"
    elif bounded := [x.name for x in guide.latents.of_role("weight", "adapter") if x.transform]:
        reason = f"{bounded[0]!r} is not a weight of independent Normals"
    elif unknown := [path for path, m, cls in random if not _acts_row_by_row(m, cls)]:
        reason = f"{unknown[0]!r} is not a layer that is known to act row by row"
    elif len(set(linears)) < len(linears):
        reason = "a layer is used twice, with one weight"
    elif not isinstance(x, Tensor):
        reason = "inputs must be one tensor"
    elif x.dim() != 2 and not trunk:
        reason = f"x must be rows [n, features], got shape {list(x.shape)}"
    # within known layers no module can hide another use of a weight
    known = all(_acts_row_by_row(m, cls) for _, m, cls in trunk)
    return layers, reason, not reason and known and model.likelihood.is_standard


def _layers(module: nn.Module | None, path: str) -> Iterator[Layer]:
    """Yield layers in their order, as often as they are used."""
    if module is None or isinstance(module, Prior):
        return
    module_class: Any = type(module)
    cls = _plain(module_class)
    if cls not in _CONTAINERS or not _acts_row_by_row(module, cls):
        yield path, module, cls
        return
    for name, child in module._modules.items():
        yield from _layers(child, f"{path}.{name}")


def _acts_row_by_row(part: nn.Module, cls: type) -> bool:
    """Return whether a part acts as its class says, and only linear ones are random."""
    own = vars(part)
    random = sample_names(part) if isinstance(part, PyroModule) and cls not in _LINEAR else []
    return (
        cls in _KNOWN
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in own)
        and not own.get("_pyro_bbb_tied")
        and all(role_of(name) == "prior" for name in random)
        and (cls is not nn.Flatten or (own["start_dim"], own["end_dim"]) == (1, -1))
        and (cls is not nn.LayerNorm or len(own["normalized_shape"]) == 1)
    )


@cache
def _plain(cls: Any) -> Any:
    """Return a class as it was before Pyro's `PyroModule` was mixed in."""
    if issubclass(cls, Converted):
        return vars(cls).get("plain_class", cls)
    mixed = (base for base in cls.__bases__ if base in _KNOWN and PyroModule[base] is cls)
    return next(mixed, cls)
