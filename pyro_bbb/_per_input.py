r"""A network's outputs drawn for each input by itself, without drawing a weight.

The weights of a layer, $W \sim N(M, S^2)$ and $b \sim N(m, s^2)$ elementwise, reach an input only
through its pre-activations. Given the layer before these are independent,

$$Wx + b \sim N\big(Mx + m,\; S^2 x^2 + s^2\big)$$

(Kingma et al. 2015, "Variational Dropout and the Local Reparameterization Trick"). Drawn layer by
layer they have each input's exact predictive distribution. Inputs are independent of one another:
what they have under one number of a draw is not one function.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from pyro_bbb._per_draw import Part, Supplied
from pyro_bbb._pyro import over_draws, own_store
from pyro_bbb._softplus_normal import AutoSoftplusNormal
from pyro_bbb._unvalued import Moments, Pass, inexact, is_of_likelihood
from pyro_bbb.models import BayesianModel


def per_input(
    model: BayesianModel, guide: Any, x: Tensor, num_samples: int, rows: int
) -> Iterator[Part]:
    """The likelihood's arguments for every draw and input, each ``[s, n, ...]``.

    Args:
        model: the model.
        guide: its guide.
        x: inputs, ``[n, ...]``.
        num_samples: number of draws S.
        rows: inputs times draws of one pass.

    Raises:
        ValueError: the guide's weights are no independent Normals, or the network does with them
            what does not leave an input independent Normals.
    """
    if type(guide) is not AutoSoftplusNormal:  # a subclass may draw otherwise
        raise inexact(f"guide must be an AutoSoftplusNormal, got {type(guide).__name__}")
    if type(model).predictive is not BayesianModel.predictive:
        raise inexact(f"{type(model).__name__} predicts in a way of its own")
    moments = Moments(guide)
    draws = min(num_samples, rows)
    inputs = rows // draws
    for i in range(0, len(x), inputs):
        part = x[i : i + inputs]
        for s in range(0, num_samples, draws):
            count = min(draws, num_samples - s)
            outputs = _outputs(model, moments, part, count)
            yield slice(s, s + count), slice(i, i + len(part)), _arguments(model, guide, outputs)


def _outputs(model: BayesianModel, moments: Moments, x: Tensor, draws: int) -> Tensor:
    """The network's outputs ``[draws, n, ...]``."""
    rows = draws * len(x)
    try:  # up to the first random weight all draws are alike
        outputs = _run(model, Pass(moments, len(x), draws), x)
    except RuntimeError:  # a connection past it needs the inputs once for each draw
        outputs = None
    if outputs is None or outputs.shape[:1] != (rows,):
        repeated = x.expand(draws, *x.shape).flatten(0, 1)
        outputs = _run(model, Pass(moments, rows, 1), repeated)
    if outputs.shape[:1] != (rows,):
        raise inexact(f"{rows} inputs have outputs of shape {list(outputs.shape)}, not one each")
    return outputs.unflatten(0, (draws, len(x)))


def _run(model: BayesianModel, passing: Pass, x: Tensor) -> Tensor:
    weights = passing.weights()
    with Supplied(weights), own_store(model), model._pyro_context:
        for name, weight in weights.items():
            model._pyro_context.set(name, weight)
        outputs: Tensor = model.network(x)
    return outputs


def _arguments(
    model: BayesianModel, guide: AutoSoftplusNormal, outputs: Tensor
) -> dict[str, Tensor]:
    """The likelihood's arguments for outputs ``[s, n, ...]``; its latents are drawn."""

    def run(draw: dict[str, Tensor]) -> dict[str, Tensor]:
        with Supplied(draw), own_store(model), model._pyro_context:
            return model.likelihood.arguments(draw["outputs"])

    latents = [latent for latent in guide._known_latents() if is_of_likelihood(latent.name)]
    draws = {x.name: guide._posterior(x).sample((len(outputs),)) for x in latents}
    if draws:
        return over_draws(run, {**draws, "outputs": outputs})
    arguments = run({"outputs": outputs.flatten(0, 1)})  # all rows at once
    return {name: value.unflatten(0, outputs.shape[:2]) for name, value in arguments.items()}
