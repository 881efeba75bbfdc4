# SPDX-License-Identifier: Apache-2.0
r"""A network replaced by its tangent in the latents at a guide's centre.

$$f(x, z) \approx f(x, m) + J(x)\,(z - m)$$

Where the guide is Normal, so are the tangent's outputs, for each input
$N(f(x, m), J \Sigma J^\top)$ (Immer et al. 2021, "Improving predictions of Bayesian neural nets via
local linearization", equation 8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev
from torch.nn import functional as F

from pyro_bbb._handlers.layer_uses import LayerUses
from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._handlers.substitute import substituted
from pyro_bbb._utils.inputs import Rows, at_least_single, input_tensors, run_network, with_tensors
from pyro_bbb.guides._autoguides import Normal
from pyro_bbb.guides._joint_autoguides import FullRank, LowRank
from pyro_bbb.guides._last_layer import LastLayer
from pyro_bbb.guides._mean_field import AutoSoftplusNormal
from pyro_bbb.guides.covariance import Dense, Diagonal, LowRankPlusDiagonal, UnconstrainedNormal
from pyro_bbb.latents import Latent, Latents

_NUMBERS = 2**25  # of derivatives at once


@dataclass(frozen=True)
class OutputMoments:
    """Moments of Normal outputs, of each input by itself.

    Args:
        mean: ``[n, ...]``, of K outputs for each input.
        variance: of the same shape.
        covariance: ``[n, K, K]``; none where the outputs of an input are independent.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None

    def draw(self, num_samples: int) -> Tensor:
        """Outputs ``[num_samples, n, ...]``."""
        noise = torch.randn(
            num_samples, *self.mean.shape, dtype=self.mean.dtype, device=self.mean.device
        )
        if self.covariance is None:
            return torch.addcmul(self.mean, self.variance.sqrt(), noise, out=noise)
        root = root_of(self.covariance)
        return self.mean + torch.einsum("nij,snj->sni", root, noise.flatten(2)).view_as(noise)


@dataclass(frozen=True)
class Head:
    """A last linear layer, in whose weights the network is linear.

    Args:
        inputs: of the layer, ``[n, in]``.
        outputs: number of outputs.
        bias: whether it has one.
    """

    inputs: Tensor
    outputs: int
    bias: bool

    def jacobian(self) -> Tensor:
        """Derivatives of the outputs by weight and bias, ``[n, out, out (in + 1)]``."""
        unit = torch.eye(self.outputs, dtype=self.inputs.dtype, device=self.inputs.device)
        by_weight = (unit[:, :, None] * self.inputs[:, None, None, :]).flatten(2)
        by_bias = unit.expand(len(self.inputs), -1, -1)
        return torch.cat([by_weight, by_bias], dim=2) if self.bias else by_weight

    def times(self, columns: Tensor) -> Tensor:
        """`jacobian` times columns ``[out (in + 1), r]``, ``[n, out, r]``, without making it."""
        weight, bias = columns.split(
            [self.outputs * self.inputs.shape[1], self.outputs * self.bias]
        )
        by_input = weight.unflatten(0, (self.outputs, -1)).transpose(0, 1)
        product = (self.inputs @ by_input.flatten(1)).unflatten(1, by_input.shape[1:])
        return product + bias if self.bias else product


@dataclass(frozen=True)
class NetworkFunction:
    """A network's outputs as a function of some of its latents; the others stay where they are.

    Args:
        model: a `BayesianModel`.
        latents: all latents.
        loc: their unconstrained values ``[D]``.
        where: the range of the vector that varies.
    """

    model: Any
    latents: Latents
    loc: Tensor
    where: slice

    def __call__(self, z: Tensor, x: Rows) -> Tensor:
        """Outputs ``[n, ...]`` at values ``[d]`` of those that vary."""
        # layers of the others see no derivative
        varied = self.latents.within(self.where).constrain(z)
        return self.run(self.latents.constrain(self.loc) | varied, x)

    def jacobians(self, x: Rows) -> Iterator[Tensor]:
        """Derivatives of the outputs, flattened, ``[n, K, d]`` for bounded parts of the inputs."""
        z = self.loc[self.where]
        head = None if len(z) == len(self.loc) else self.with_head(x)[1]
        if head is not None:
            yield head.jacobian()
            return

        def of_one(z: Tensor, *row: Tensor) -> Tensor:
            return self(z, with_tensors(x, [part[None] for part in row])).flatten()

        derivatives: Callable[..., Tensor] = torch.vmap(
            jacrev(of_one), in_dims=(None, *[0] * len(input_tensors(x))), randomness="different"
        )
        outputs = self(z, x[:1]).numel()
        for part in x.split(max(1, _NUMBERS // (outputs * len(z)))):
            yield derivatives(z, *input_tensors(part))

    def with_head(self, x: Rows) -> tuple[Tensor, Head | None]:
        """Outputs, and the last layer if the latents that vary are its weight and bias."""
        values = self.latents.constrain(self.loc)
        varied = self.latents.within(self.where)
        with LayerUses({name: values[name] for name in varied}) as layers:
            f = self.run(values, x)
        if len(layers.uses) != 1 or layers.uses[0].function is not F.linear:
            return f, None
        (use,) = layers.uses
        inputs, names = use.arguments["input"], [use.weight] + [use.bias] * (use.bias is not None)
        if use.output is not f or inputs.dim() != 2 or names != list(varied):
            return f, None
        return f, Head(inputs, f.shape[1], bias=len(names) == 2)

    def run(self, values: dict[str, Tensor], x: Rows) -> Tensor:
        """Outputs ``[n, ...]`` at values of all latents by site name."""
        with substituted(self.model, values):
            outputs = run_network(self.model.network, x)
        found: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
        return found


def normal_of(guide: Any) -> UnconstrainedNormal:
    """The Normal of all latents that a guide is.

    Raises:
        TypeError: the guide is no Normal.
    """
    if hasattr(guide, "unconstrained_normal"):
        found: UnconstrainedNormal = guide.unconstrained_normal()
        return found
    if isinstance(guide, AutoSoftplusNormal | Normal):
        moments = [_moments(guide, latent) for latent in guide._known_latents()]
        loc, scale = (torch.cat([x[i].flatten() for x in moments]) for i in range(2))
        return UnconstrainedNormal(loc, [Diagonal(slice(0, len(loc)), scale)])
    if isinstance(guide, FullRank | LowRank):
        guide._known_latents()
        q, everything = guide.get_posterior(), slice(0, guide.latent_dim)
        if isinstance(guide, FullRank):
            return UnconstrainedNormal(q.loc, [Dense(everything, q.scale_tril)])
        scale = q.cov_diag.sqrt()
        return UnconstrainedNormal(q.loc, [LowRankPlusDiagonal(everything, q.cov_factor, scale)])
    raise TypeError(
        "linearized needs a Normal guide, one of softplus_normal, normal, low_rank, full_rank, "
        f"laplace, swag, vbll, got {type(guide).__name__}"
    )


def output_moments(model: Any, guide: Any, x: Rows) -> OutputMoments:
    r"""Moments of the outputs: means $f(x, m)$, covariances $J \Sigma J^\top$.

    The network is the tangent at the guide's means; with a `LastLayer` it is its own tangent.
    """
    with torch.no_grad():
        if isinstance(guide, LastLayer):
            return _of_last_layer(model, guide, x)
        by_layer = getattr(guide, "_moments_by_layer", None)
        f, covariance = (by_layer and by_layer(model, x)) or _by_derivatives(model, guide, x)
    f, covariance = at_least_single(f), at_least_single(covariance)
    return OutputMoments(f, covariance.diagonal(dim1=1, dim2=2).reshape(f.shape), covariance)


def _of_last_layer(model: Any, guide: LastLayer, x: Rows) -> OutputMoments:
    with own_store(guide), substituted(model, guide.median()), guide.observed_head() as variance:
        outputs = run_network(model.network, x)
        mean = getattr(outputs, "logits", outputs)
        return OutputMoments(at_least_single(mean), at_least_single(variance()))


def _by_derivatives(model: Any, guide: Any, x: Rows) -> tuple[Tensor, Tensor]:
    """Means ``[n, ...]`` and covariances ``[n, K, K]``."""
    normal = normal_of(guide)
    where = normal.parts[0].where if len(normal.parts) == 1 else slice(0, len(normal.loc))
    function = NetworkFunction(model, guide.latents, normal.loc, where)
    layer = _last_layer(normal)
    f, head = function.with_head(x) if layer else (function(normal.loc[where], x), None)
    if layer and head:
        root = head.times(layer.scale_tril)
        return f, root @ root.mT
    covariance, begin = f.new_zeros(len(f), f[0].numel(), f[0].numel()), 0
    for jacobian in function.jacobians(x):
        here = slice(begin, begin + len(jacobian))
        for part in normal.parts:
            own = slice(part.where.start - where.start, part.where.stop - where.start)
            root = part.times_root(jacobian[..., own])
            covariance[here] += root @ root.mT
        begin += len(jacobian)
    return f, covariance


def root_of(matrices: Tensor) -> Tensor:
    r"""L ``[..., K, K]`` with $L L^\top$ the positive semidefinite matrices.

    The symmetric one, as eigenvectors have the signs that a machine's library gives them.
    """
    values, vectors = torch.linalg.eigh(matrices)
    roots = values.clamp(min=0).sqrt().unsqueeze(-2)  # rounding leaves some below 0
    return vectors * roots @ vectors.mT


def _last_layer(normal: UnconstrainedNormal) -> Dense | None:
    """The only part, where it is dense and covers not all latents."""
    first = normal.parts[0]
    alone = len(normal.parts) == 1 and first.size < len(normal.loc)
    return first if isinstance(first, Dense) and alone else None


def _moments(guide: Any, latent: Latent) -> tuple[Tensor, Tensor]:
    if isinstance(guide, AutoSoftplusNormal):
        return guide.loc(latent.name), guide.scale(latent.name)
    loc, scale = guide._get_loc_and_scale(latent.name)
    return loc.detach(), scale.detach()
