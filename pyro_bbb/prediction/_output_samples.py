# SPDX-License-Identifier: Apache-2.0
r"""A network's outputs drawn for each input on its own, without drawing a weight.

The weights of a layer, $W \sim N(M, S^2)$ and $b \sim N(m, s^2)$ elementwise, reach an input only
through its pre-activations. Given the layer before, these are independent,

$$Wx + b \sim N\big(Mx + m,\; S^2 x^2 + s^2\big)$$

(Kingma et al. 2015, "Variational Dropout and the Local Reparameterization Trick"). Drawn layer by
layer they have each input's exact predictive distribution. Inputs are independent of one another:
what they have under one number of a draw is not one function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import takewhile
from typing import Any

import torch
import torch.nn.functional as F
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_bbb import likelihoods
from pyro_bbb._handlers.sites import declared_names, sample_names
from pyro_bbb._handlers.substitute import substituted
from pyro_bbb._handlers.vmap import over_draws
from pyro_bbb._utils.inputs import Rows, at_least_single
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.latents import role_of
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import BayesianLinear, BayesianMLP, Converted
from pyro_bbb.prediction._draws import Part
from pyro_bbb.priors import Prior


def per_input(
    model: BayesianModel, guide: Any, x: Rows, num_samples: int, rows: int
) -> Iterator[Part]:
    """Yield the likelihood's arguments for every draw and input, each ``[s, n, ...]``.

    One pass has ``rows`` inputs times draws.

    Raises:
        ValueError: the outputs of an input are not independent given those of the layer before.
    """
    if reason := why_inexact(model, guide, x):
        raise ValueError(f"estimator 'local_reparam' is not exact here, use 'reparam': {reason}")
    layers = [_Layer(*layer, guide) for layer in _parts(model.network, "network")]
    draw_latents = guide.sampler([x.name for x in guide.latents.of_role("likelihood")])
    draws = min(num_samples, rows)
    inputs = rows // draws
    for i in range(0, len(x), inputs):
        batch = x[i : i + inputs]
        for s in range(0, num_samples, draws):
            count = min(draws, num_samples - s)
            outputs = _outputs(layers, batch, count)
            arguments = arguments_of(model, outputs, draw_latents(count))
            yield slice(s, s + count), slice(i, i + len(batch)), arguments


def _outputs(layers: list[_Layer], x: Any, draws: int) -> Tensor:
    """Draw the network's outputs ``[draws, n, ...]``; before the first noise all draws agree."""
    n, repeats = len(x), draws
    for layer in layers:
        x, std = layer.moments(x)
        if std is not None:
            noise = torch.randn(repeats, *x.shape, dtype=x.dtype, device=x.device)
            x = torch.addcmul(x, std, noise, out=noise).flatten(0, 1)
            repeats = 1  # from here on each row is one draw of an input
    return x.unflatten(0, (draws, n)) if len(x) == draws * n else x.expand(draws, *x.shape)


class _Layer:
    """A layer that acts row by row; of a linear one the weight's and bias' moments."""

    def __init__(self, path: str, part: nn.Module, cls: type, guide: AutoSoftplusNormal) -> None:
        self.part, self.random = part, False
        if cls in _LINEAR:
            self.weight, self.weight_variance = self._moments("weight", path, guide)
            self.bias, self.bias_variance = self._moments("bias", path, guide)
            self.random = self.weight_variance is not None or self.bias_variance is not None

    def _moments(self, name: str, path: str, guide: AutoSoftplusNormal) -> tuple[Any, Any]:
        site = f"{path}.{name}"
        if site not in guide.site_names:
            if isinstance(self.part, PyroModule) and name in sample_names(self.part):
                raise ValueError(f"the posterior's draws lack the latent {site!r}")
            return getattr(self.part, name), None
        return guide.loc(site), guide.scale(site).square_()

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return mean and standard deviation of the outputs; ``None`` where none is random."""
        if not self.random:
            return self.part(x), None
        if x.shape[1:] != self.weight.shape[1:]:
            shape = f"[batch, {self.weight.shape[1]}]"
            raise ValueError(f"expected x of shape {shape}, got {list(x.shape)}")
        if self.weight_variance is None:
            return F.linear(x, self.weight, self.bias), self.bias_variance.sqrt()
        std = F.linear(x.square(), self.weight_variance, self.bias_variance).sqrt_()
        return F.linear(x, self.weight, self.bias), std


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


_LINEAR = (nn.Linear, BayesianLinear)
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Tanhshrink),
    *(nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardshrink, nn.Softshrink, nn.Threshold),
    *(nn.Identity, nn.Dropout, nn.AlphaDropout),
)
_CONTAINERS = (nn.Sequential, BayesianMLP)
_KNOWN = (*_LINEAR, *_ELEMENTWISE, *_CONTAINERS, nn.Flatten, nn.LayerNorm)
_LIKELIHOODS = (
    likelihoods.Categorical,
    likelihoods.Bernoulli,
    likelihoods.Gaussian,
    likelihoods.HeteroscedasticGaussian,
    likelihoods.Poisson,
    likelihoods.NegativeBinomial,
    likelihoods.StudentT,
)


# --- where it is exact ---


def draws_of_each_input(model: BayesianModel, guide: Any, x: Rows) -> bool:
    """Return whether one input's draws by `per_input` are, in distribution, those by drawn weights.

    True only for the library's own model and likelihoods.
    """
    known = type(model) is BayesianModel and type(model.likelihood) in _LIKELIHOODS
    parts = _parts(model.network, "network")
    known = known and all(_acts_row_by_row(part, cls) for _, part, cls in parts)
    return known and not why_inexact(model, guide, x)


def why_inexact(model: BayesianModel, guide: Any, x: Rows) -> str:
    """Return why outputs cannot be drawn layer by layer; empty where they can.

    They can for independent Normals, each weight in one linear layer, and rows that never meet
    after the first of these layers; what is before it draws nothing and may be any module.
    """
    if not getattr(guide, "is_factorised", False):
        return f"guide must be an AutoSoftplusNormal, got {type(guide).__name__}"
    if type(model).predictive is not BayesianModel.predictive:
        return f"{type(model).__name__} predicts in a way of its own"
    real = guide.weight_names
    others = [n for n in guide.site_names if n not in real]
    if bounded := [n for n in others if role_of(n) not in ("prior", "likelihood")]:
        return f"{bounded[0]!r} is not a weight of independent Normals"
    parts = list(_parts(model.network, "network"))
    trunk = list(takewhile(lambda layer: not declared_names(layer[1]), parts))
    parts = parts[len(trunk) :]
    if unknown := [path for path, part, cls in parts if not _acts_row_by_row(part, cls)]:
        return f"{unknown[0]!r} is not a layer that is known to act row by row"
    linears = [part for _, part, cls in parts if cls in _LINEAR]
    if len(set(linears)) < len(linears):
        return "a layer is used twice, with one weight"
    if not isinstance(x, Tensor):
        return "inputs must be one tensor"
    if x.dim() != 2 and not trunk:
        return f"x must be rows [n, features], got shape {list(x.shape)}"
    return ""


def _parts(module: nn.Module | None, path: str) -> Iterator[tuple[str, nn.Module, type]]:
    """Yield layers in their order, as often as they are used, each with its class before Pyro."""
    if module is None or isinstance(module, Prior):
        return
    cls: Any = type(module)
    cls = _plain(cls)
    if cls not in _CONTAINERS or not _acts_row_by_row(module, cls):
        yield path, module, cls
        return
    for name, part in module._modules.items():
        yield from _parts(part, f"{path}.{name}")


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
