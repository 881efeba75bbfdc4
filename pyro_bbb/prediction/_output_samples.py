# SPDX-License-Identifier: Apache-2.0
r"""A network's outputs drawn for each input by itself, without drawing a weight.

The weights of a layer, $W \sim N(M, S^2)$ and $b \sim N(m, s^2)$ elementwise, reach an input only
through its pre-activations. Given the layer before these are independent,

$$Wx + b \sim N\big(Mx + m,\; S^2 x^2 + s^2\big)$$

(Kingma et al. 2015, "Variational Dropout and the Local Reparameterization Trick"). Drawn layer by
layer they have each input's exact predictive distribution. Inputs are independent of one another:
what they have under one number of a draw is not one function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_bbb import likelihoods
from pyro_bbb._handlers.sites import sample_names
from pyro_bbb._handlers.substitute import substituted
from pyro_bbb._handlers.vmap import over_draws
from pyro_bbb._utils.inputs import Rows, at_least_single, each, run_network
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.latents import role_of
from pyro_bbb.models import BayesianModel
from pyro_bbb.networks import BayesianLinear, BayesianMLP, Converted
from pyro_bbb.prediction._draws import Part
from pyro_bbb.prediction._moment_tensor import Moments, Pass, inexact, is_of_likelihood
from pyro_bbb.priors import Prior


def per_input(
    model: BayesianModel, guide: Any, x: Rows, num_samples: int, rows: int
) -> Iterator[Part]:
    """The likelihood's arguments for every draw and input, each ``[s, n, ...]``.

    One pass has ``rows`` inputs times draws. The error is a ValueError where the guide's weights
    are no independent Normals, or the network does not leave an input independent Normals.
    """
    if type(guide) is not AutoSoftplusNormal:  # a subclass may draw otherwise
        raise inexact(f"guide must be an AutoSoftplusNormal, got {type(guide).__name__}")
    if type(model).predictive is not BayesianModel.predictive:
        raise inexact(f"{type(model).__name__} predicts in a way of its own")
    moments = Moments(guide)
    own = [latent for latent in guide._known_latents() if is_of_likelihood(latent.name)]
    draws = min(num_samples, rows)
    inputs = rows // draws
    for i in range(0, len(x), inputs):
        part = x[i : i + inputs]
        for s in range(0, num_samples, draws):
            count = min(draws, num_samples - s)
            outputs = _outputs(model, moments, part, count)
            drawn = {x.name: guide._posterior(x).sample((count,)) for x in own}
            arguments = arguments_of(model, outputs, drawn)
            yield slice(s, s + count), slice(i, i + len(part)), arguments


def _outputs(model: BayesianModel, moments: Moments, x: Rows, draws: int) -> Tensor:
    """The network's outputs ``[draws, n, ...]``."""
    rows = draws * len(x)
    try:  # up to the first random weight all draws are alike
        outputs = _run(model, Pass(moments, len(x), draws), x)
    except RuntimeError:  # a connection past it needs the inputs once for each draw
        outputs = None
    if outputs is None or outputs.shape[:1] != (rows,):
        repeated = each(x, lambda part: part.expand(draws, *part.shape).flatten(0, 1))
        outputs = _run(model, Pass(moments, rows, 1), repeated)
    if outputs.shape[:1] != (rows,):
        raise inexact(f"{rows} inputs have outputs of shape {list(outputs.shape)}, not one each")
    return outputs.unflatten(0, (draws, len(x)))


def _run(model: BayesianModel, passing: Pass, x: Rows) -> Tensor:
    weights = passing.weights()
    with substituted(model, weights):
        outputs: Tensor = run_network(model.network, x)
    return outputs


def arguments_of(
    model: BayesianModel, outputs: Tensor, draws: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The likelihood's arguments for outputs ``[s, n, ...]`` and draws of its own latents."""
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
_KNOWN = (*_LINEAR, *_ELEMENTWISE, nn.Sequential, BayesianMLP, nn.Flatten, nn.LayerNorm)
_LIKELIHOODS = (
    likelihoods.Categorical,
    likelihoods.Bernoulli,
    likelihoods.Gaussian,
    likelihoods.HeteroscedasticGaussian,
    likelihoods.Poisson,
    likelihoods.NegativeBinomial,
    likelihoods.StudentT,
)


def draws_of_each_input(model: BayesianModel, guide: Any, x: Rows) -> bool:
    """Return whether one input's draws by `per_input` are, in distribution, those by drawn weights.

    True only of what is known: independent Normals, each weight in one linear layer, and rows that
    never meet.
    """
    if type(model) is not BayesianModel or type(model.likelihood) not in _LIKELIHOODS:
        return False
    if type(guide) is not AutoSoftplusNormal or not _is_normal(guide):
        return False
    parts = list(_parts(model.network))
    linears = [part for part, cls in parts if cls in _LINEAR]
    first = next((cls for _, cls in parts if cls not in (nn.Sequential, BayesianMLP)), None)
    return (
        all(_is_known(part, cls) for part, cls in parts)
        and len(set(linears)) == len(linears)
        and (x.dim() == 2 or (x.dim() > 2 and first is nn.Flatten))
    )


def _is_normal(guide: AutoSoftplusNormal) -> bool:
    """Return whether all weights of the network are Normal, not of another support."""
    normal = guide.weight_names
    others = [name for name in guide.site_names if name not in normal]
    return all(role_of(name) in ("prior", "likelihood") for name in others)


def _parts(module: nn.Module | None) -> Iterator[tuple[nn.Module, type]]:
    """A module and its parts, as often as they stand in it, each with its class without Pyro."""
    if module is None or isinstance(module, Prior):
        return
    cls: Any = type(module)
    yield module, _plain(cls)
    for part in module._modules.values():
        yield from _parts(part)


def _is_known(part: nn.Module, cls: type) -> bool:
    """Return whether a part acts row by row as its class says, and only linear ones are random."""
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
    """A class as it was before Pyro came in."""
    if issubclass(cls, Converted):
        return vars(cls).get("plain_class", cls)
    mixed = (base for base in cls.__bases__ if base in _KNOWN and PyroModule[base] is cls)
    return next(mixed, cls)
