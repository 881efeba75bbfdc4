# SPDX-License-Identifier: Apache-2.0
r"""A network replaced by its tangent in the latents at a guide's centre m.

$$f(x, z) \approx f(x, m) + J(x)\,(z - m), \qquad
  z \sim N(m, \Sigma) \;\Rightarrow\; f(x, z) \sim N(f(x, m),\; J \Sigma J^\top)$$

(Immer et al. 2021, "Improving predictions of Bayesian neural nets via local linearization",
equation 8). With $\Sigma = R R^\top$ in parts, $J \Sigma J^\top = \sum (J R) (J R)^\top$.
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
from pyro_bbb._handlers.substitute import substituted
from pyro_bbb._utils.inputs import Rows, at_least_single, input_tensors, run_network, with_tensors
from pyro_bbb.guides.covariance import Dense, PartsNormal
from pyro_bbb.latents import Latents

_NUMBERS = 2**25  # of derivatives at once


@dataclass(frozen=True)
class OutputMoments:
    """Moments of Normal outputs, for each input separately.

    Args:
        mean: ``[n, ...]``, of K outputs for each input.
        variance: of the same shape.
        covariance: ``[n, K, K]``; none where the outputs of an input are independent.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor | None = None

    @classmethod
    def jointly(cls, mean: Tensor, covariance: Tensor) -> OutputMoments:
        """Return moments of jointly Normal outputs, at least in single precision."""
        mean, covariance = at_least_single(mean.detach()), at_least_single(covariance.detach())
        variance = covariance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
        return cls(mean, variance, covariance)

    def draw(self, num_samples: int) -> Tensor:
        """Return outputs ``[num_samples, n, ...]``."""
        mean = self.mean
        noise = torch.randn(num_samples, *mean.shape, dtype=mean.dtype, device=mean.device)
        if self.covariance is None:
            return torch.addcmul(mean, self.variance.sqrt(), noise, out=noise)
        root = root_of(self.covariance)
        return mean + torch.einsum("nij,snj->sni", root, noise.flatten(2)).view_as(noise)


def output_moments(model: Any, guide: Any, x: Rows) -> OutputMoments:
    """Return `Guide.output_moments`; other guides raise TypeError."""
    if not hasattr(guide, "output_moments"):
        raise not_normal(guide)
    moments: OutputMoments = guide.output_moments(model, x)
    return moments


def not_normal(guide: Any) -> TypeError:
    """Return the error for a guide that is not a Normal."""
    return TypeError(
        "linearized needs a Normal guide, one of softplus_normal, normal, low_rank, full_rank, "
        f"laplace, swag, vbll, got {type(guide).__name__}"
    )


def tangent_moments(model: Any, latents: Latents, normal: PartsNormal, x: Rows) -> OutputMoments:
    r"""Return means $f(x, m)$ and covariances $J \Sigma J^\top$ of the tangent's outputs.

    Args:
        model: a `BayesianModel`.
        latents: its latents.
        normal: their Normal.
        x: inputs, each of which decides its own outputs alone.
    """
    parts = normal.parts
    where = parts[0].where if len(parts) == 1 else slice(0, latents.size)
    function = NetworkFunction(model, latents, normal.loc, where)
    only = parts[0] if len(parts) == 1 else None
    with torch.no_grad():
        if isinstance(only, Dense) and only.size < latents.size:
            f, head = function.with_head(x)
            if head:
                root = head.times(only.scale_tril)
                return OutputMoments.jointly(f, root @ root.mT)
        else:
            f = function(normal.loc[where], x)
        covariances = []
        for jacobian in function.jacobians(x):  # [rows, K, d]
            covariance = jacobian.new_zeros(())
            for part in parts:
                rows = slice(part.where.start - where.start, part.where.stop - where.start)
                root = part.times_root(jacobian[..., rows])
                covariance = covariance + root @ root.mT
            covariances.append(covariance)
    return OutputMoments.jointly(f, torch.cat(covariances))


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
        """Return derivatives of the outputs by weight and bias, ``[n, out, out (in + 1)]``."""
        unit = torch.eye(self.outputs, dtype=self.inputs.dtype, device=self.inputs.device)
        by_weight = torch.einsum("ko,ni->nkoi", unit, self.inputs).flatten(2)
        by_bias = unit.expand(len(self.inputs), -1, -1)
        return torch.cat([by_weight, by_bias], dim=2) if self.bias else by_weight

    def times(self, columns: Tensor) -> Tensor:
        """Return `jacobian` times columns ``[out (in + 1), r]``, ``[n, out, r]``."""
        weight, bias = columns.split(
            [self.outputs * self.inputs.shape[1], self.outputs * self.bias]
        )
        by_input = weight.unflatten(0, (self.outputs, -1)).transpose(0, 1)
        product = (self.inputs @ by_input.flatten(1)).unflatten(1, by_input.shape[1:])
        return product + bias if self.bias else product


@dataclass(frozen=True)
class NetworkFunction:
    """A network's outputs as a function of a range of its latents; the others are constant.

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
        """Return outputs ``[n, ...]`` at values ``[d]`` of the range."""
        # layers of the others see no derivative
        varied = self.latents.within(self.where).constrain(z)
        return self.run(self.latents.constrain(self.loc) | varied, x)

    def jacobians(self, x: Rows) -> Iterator[Tensor]:
        """Yield derivatives of the outputs, ``[rows, K, d]``, for bounded parts of the inputs."""
        z = self.loc[self.where]
        head = None if len(z) == len(self.loc) else self.with_head(x)[1]
        if head is not None:
            yield head.jacobian()
            return

        def outputs_of(z: Tensor, *row: Tensor) -> Tensor:
            return self(z, with_tensors(x, [value[None] for value in row])).flatten()

        derivatives: Callable[..., Tensor] = torch.vmap(
            jacrev(outputs_of), in_dims=(None, *[0] * len(input_tensors(x))), randomness="different"
        )
        outputs = self(z, x[:1]).numel()
        for rows in x.split(max(1, _NUMBERS // (outputs * len(z)))):
            yield derivatives(z, *input_tensors(rows))

    def with_head(self, x: Rows) -> tuple[Tensor, Head | None]:
        """Return outputs, and the last layer if the range holds its weight and bias."""
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
        """Return outputs ``[n, ...]`` at values of all latents by site name."""
        with substituted(self.model, values):
            outputs = run_network(self.model.network, x)
        tensor: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
        return tensor


def root_of(matrices: Tensor) -> Tensor:
    r"""Return L ``[..., K, K]`` with $L L^\top$ the positive semidefinite matrices.

    The symmetric root, as eigenvectors have the signs that a machine's library gives them.
    """
    values, vectors = torch.linalg.eigh(matrices)
    roots = values.clamp(min=0).sqrt().unsqueeze(-2)  # rounding leaves negative ones
    return vectors * roots @ vectors.mT
