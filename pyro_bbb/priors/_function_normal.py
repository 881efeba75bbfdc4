# SPDX-License-Identifier: Apache-2.0
r"""A prior of a network's outputs at context points, in place of one of its weights.

The free energy of a minibatch takes its KL between the values of the network at C points, which
are drawn at each step (Sun et al. 2019, "Functional Variational Bayesian Neural Networks",
arXiv:1903.05779; Rudner et al. 2022, "Tractable Function-Space Variational Inference in Bayesian
Neural Networks", arXiv:2312.17199):

$$F_i = \pi_i\,\mathrm{KL}[q(f_C) \,\|\, p(f_C)] - E_q \ln p(D_i \mid f), \qquad
  p(f_C) = N(0,\; s^2 K + t^2 I)$$

for each output. A random last layer on the trunk's features $\phi$, of mean $\mu$ and covariance
$\Sigma$, has exactly

$$q(f_C) = N(\Phi\mu,\; \Phi\Sigma\Phi^\top + t^2 I).$$

The KL at finitely many points is at most that of the functions, the supremum over all such sets
(Sun et al., theorem 1). Noise t in both keeps the KL finite where C exceeds the number of features,
and makes it smaller (the regularised KL of Cinquin and Bamler 2024, arXiv:2406.04317). Gradients
reach the trunk: it learns features by which the outputs at the context points are as uncertain as
the prior.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pyro.distributions as dist
import torch
from torch import Size, Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional as F

from pyro_bbb._utils import validation as checks
from pyro_bbb._utils.saving import attributes, saveable
from pyro_bbb.priors._base import Prior

Context: TypeAlias = "str | Sequence[str] | Tensor | Callable[[Tensor], Tensor]"


@saveable(attributes("scale", "context", "num_points", "weight", "noise", "kernel"))
class FunctionNormal(Prior):
    r"""$N(0, s^2 K + t^2 I)$ of each output at context points, for the last layer of `vbll`.

    The prior of a network's only random layer, its last. `fit` of a `LastLayer` guide then weighs
    the KL of the outputs, at points drawn at each step, and not that of the weights.

    Args:
        scale: prior standard deviation s of an output.
        context: where the outputs are compared: names of `CONTEXTS`, which change rows of the
            minibatch; a tensor ``[n, ...]`` of inputs, of which rows are drawn; or a function from
            rows of the minibatch ``[num_points, ...]`` to as many inputs. By default all names that
            fit: of images ``[n, channels, height, width]``, or else of columns.
        num_points: C, context points of a step.
        weight: factor of the KL: the number of independent sets of C points that it counts.
        noise: t, positive where ``num_points`` exceeds the number of features.
        kernel: K ``[C, C]`` of context points ``[C, ...]``; ``None`` for independent values.

    Raises:
        ValueError: a number out of range, an unknown name, or no context points.
        TypeError: an argument is of another kind.
    """

    of_outputs = True
    zero: Tensor

    def __init__(
        self,
        scale: float = 3.0,
        *,
        context: Context | None = None,
        num_points: int = 64,
        weight: float = 1.0,
        noise: float = 0.1,
        kernel: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.scale: float = checks.positive("scale", scale)
        self.weight: float = checks.positive("weight", weight)
        self.num_points: int = checks.count("num_points", num_points)
        self.noise: float = checks.at_least_zero("noise", noise)
        self.kernel: Callable[[Tensor], Tensor] | None = (
            kernel if kernel is None else checks.function("kernel", kernel, "(points)")
        )
        self.context: Context | None = _checked(context)
        self.register_buffer("zero", torch.zeros(()), persistent=False)

    def forward(self, module: nn.Module, name: str, shape: Size) -> Distribution:
        """Return a distribution without density, whose draw is the prior's mean, 0."""
        return _OfOutputs(self.zero.expand(shape), event_dim=len(shape), validate_args=False)

    @torch.no_grad()
    def points(self, x: Tensor) -> Tensor:
        """Return context points ``[num_points, ...]`` for the inputs of a minibatch."""
        inputs = self.context.to(x) if isinstance(self.context, Tensor) else x
        inputs = inputs[torch.randint(len(inputs), (self.num_points,), device=x.device)]
        if isinstance(self.context, Tensor):
            return inputs
        if callable(self.context):
            return checks.tensor("context(x)", self.context(inputs))
        names = self.context or tuple(_OF_IMAGES if x.dim() == 4 else _OF_COLUMNS)
        if not x.is_floating_point() or (x.dim() != 4 and not _OF_IMAGES.keys().isdisjoint(names)):
            got = f"got {x.dtype} of shape {list(x.shape)}: pass context=function or tensor"
            raise ValueError(f"context {names} does not fit the inputs, {got}")
        rows_by_name = zip(names, inputs.tensor_split(len(names)), strict=True)
        return torch.cat([CONTEXTS[name](rows) for name, rows in rows_by_name if len(rows)])

    def kl(self, mean: Tensor, covariance: Tensor, points: Tensor) -> Tensor:
        r"""Return $\mathrm{KL}[q(f_C) \| p(f_C)]$, summed over outputs, times `weight`, in nats.

        $$\tfrac12\big(\mathrm{tr}\,P^{-1}S + m^\top P^{-1} m - C + \ln\det P - \ln\det S\big)$$

        Args:
            mean: m of each output, ``[C, out]``.
            covariance: $S - t^2 I$ of each output, ``[out, C, C]``, or ``[1, C, C]`` of all.
            points: the context points, ``[C, ...]``.
        """
        (size, outputs), repeats = mean.shape, mean.shape[1] / len(covariance)
        eye = torch.eye(size, dtype=mean.dtype, device=mean.device)
        gram = eye if self.kernel is None else self.kernel(points)
        if gram.shape != eye.shape:
            raise ValueError(f"kernel must return {list(eye.shape)}, got {list(gram.shape)}")
        noise = self.noise**2 * eye
        p, q = _cholesky(self.scale**2 * gram + noise), _cholesky(covariance + noise)
        # tr P^-1 S = |L_p^-1 L_q|^2
        spread = torch.linalg.solve_triangular(p, q, upper=False).square().sum() * repeats
        shift = torch.linalg.solve_triangular(p, mean, upper=False).square().sum()
        log_ratio = outputs * p.diagonal().log().sum()  # of the roots of the determinants
        log_ratio = log_ratio - repeats * q.diagonal(dim1=1, dim2=2).log().sum()
        return self.weight * (0.5 * (spread + shift - size * outputs) + log_ratio)

    def extra_repr(self) -> str:
        """Return scale, noise and number of points, for the module's printed form."""
        return f"scale={self.scale:g}, noise={self.noise:g}, num_points={self.num_points}"


def _checked(context: Any) -> Any:
    """Return names of `CONTEXTS` as a tuple, a tensor with rows, a function, or ``None``."""
    if context is None or (callable(context) and not isinstance(context, Tensor)):
        return context
    if isinstance(context, str | Sequence):
        names = (context,) if isinstance(context, str) else tuple(context)
        checks.require("context", {"a name of `CONTEXTS` or more, got none": not names})
        return tuple(checks.one_of("context", name, CONTEXTS) for name in names)
    points = checks.tensor("context", context).detach()
    if points.dim() < 2 or len(points) == 0 or not checks.all_finite(points):
        shape = list(points.shape)
        raise ValueError(f"context must be finite inputs [n, ...], got a tensor of shape {shape}")
    return points


def _cholesky(covariance: Tensor) -> Tensor:
    """Return L of positive definite matrices, NaN for others, without a read of the device."""
    factor, info = torch.linalg.cholesky_ex(covariance)
    return factor.where((info == 0)[..., None, None], torch.nan)


class _OfOutputs(dist.Delta):
    """Weights whose prior is one of the outputs."""

    of_outputs = True

    @property
    def variance(self) -> Tensor:
        raise NotImplementedError("a prior of outputs has no variance of weights")

    def log_prob(self, value: Tensor) -> Tensor:
        raise ValueError(
            "FunctionNormal is a prior of outputs and has no density of weights: train the guide "
            "guides.make('vbll', model), by fit's default loss"
        )


# --- context points from inputs ---


def _warped(x: Tensor) -> Tensor:
    """Rotate by any angle, stretch, shear and translate, each image by its own map."""
    angle, normal = x.new_empty(len(x), 1).uniform_(0, 2 * torch.pi), x.new_empty(len(x), 2, 3)
    rotation = torch.cat([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(-1, 2, 2)
    maps = rotation @ (torch.eye(2, 3).to(x) + 0.4 * normal.normal_())
    places = F.affine_grid(maps, list(x.shape), align_corners=False)
    return F.grid_sample(x, places, align_corners=False)


def _clouds(x: Tensor) -> Tensor:
    """Return noise in [0, 1] whose standard deviation at four scales is random."""
    total = torch.zeros_like(x)
    for side in (4, 7, 14, min(x.shape[-2:])):
        noise = x.new_empty(*x.shape[:2], side, side).normal_()
        noise = noise * x.new_empty(len(x), 1, 1, 1).uniform_()
        total = total + F.interpolate(noise, x.shape[-2:], mode="bilinear")
    return (0.5 + 0.5 * total / total.std((1, 2, 3), keepdim=True)).clamp(0, 1)


def _mixed(x: Tensor) -> Tensor:
    """Replace random areas of each image by those of another."""
    return x.where(_clouds(x[:, :1]) > 0.5, x.roll(1, 0))


def _shuffled(x: Tensor) -> Tensor:
    """Permute the values of each column independently."""
    return x.gather(0, torch.rand_like(x).argsort(0))


def _spread(x: Tensor) -> Tensor:
    """Draw columns uniformly, to three standard deviations on both sides of the rows' means."""
    return x.mean(0) + 3 * x.std(0, correction=0) * torch.empty_like(x).uniform_(-1, 1)


_OF_IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "warped": _warped,
    "clouds": _clouds,
    "mixed": _mixed,
}
_OF_COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {"shuffled": _shuffled, "spread": _spread}
CONTEXTS = _OF_IMAGES | _OF_COLUMNS
"""Changes of inputs that make context points of a `FunctionNormal`, by name."""
