# SPDX-License-Identifier: Apache-2.0
r"""Covariances of the latents' vector in parts, each $\Sigma = R R^\top$ of some structure.

| part | $R$ | $\mathrm{diag}\,\Sigma$ |
|---|---|---|
| `Dense` | lower triangular L | $\lVert L_{j\cdot} \rVert^2$ |
| `Diagonal` | $\mathrm{diag}(s)$ | $s_j^2$ |
| `LowRankPlusDiagonal` | $(F, \mathrm{diag}(s))$ | $\lVert F_{j\cdot} \rVert^2 + s_j^2$ |
| `Kronecker` | $W = Q (S \circ E) P^\top$ of noise E | $\sum_{kl} Q_{ik}^2 S_{kl}^2 P_{jl}^2$ |

A part covers a range of the vector. Latents in no part have no variance.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Size, Tensor, nn
from torch.distributions import constraints


class LateTensors(nn.Module):
    """Buffers that are ``None`` until they are computed."""

    def __init__(self, **tensors: Tensor | None) -> None:
        super().__init__()
        for name, value in tensors.items():
            self.register_buffer(name, value)

    def set(self, **tensors: Tensor | None) -> None:
        """Replace the tensors."""
        self._buffers.update(tensors)

    def forget(self) -> None:
        """Make all of them ``None``."""
        self.set(**dict.fromkeys(self._buffers))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in self._buffers:
            saved = state_dict.get(prefix + name)
            self._buffers[name] = None if saved is None else saved.clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


class CovariancePart(LateTensors):
    r"""Covariance $R R^\top$ of one range of the latents; the base class of the structures."""

    def __init__(self, where: slice, **tensors: Tensor | None) -> None:
        super().__init__(**tensors)
        self.where = where

    @property
    def size(self) -> int:
        """Number of latents."""
        return int(self.where.stop - self.where.start)

    @property
    def dim(self) -> int:
        """Number of latents that have a density."""
        return self.size

    @property
    def columns(self) -> int:
        """Number of columns of $R$."""
        return self.size

    def times_root(self, rows: Tensor) -> Tensor:
        """Return $J R$ for rows J ``[..., size]``, such as derivatives of outputs."""
        raise NotImplementedError

    def transform(self, noise: Tensor) -> Tensor:
        r"""Return $R\epsilon$ for standard Normals ``[..., columns]``."""
        raise NotImplementedError

    def whiten(self, deviations: Tensor) -> Tensor:
        r"""Return standard Normals ``[..., size]``, $\Sigma^{-1/2}(z - m)$, for $z - m$."""
        raise NotImplementedError

    def std(self) -> Tensor:
        """Return standard deviations ``[size]``."""
        raise NotImplementedError

    def log_det_root(self) -> Tensor:
        r"""Return half the logarithm of the determinant of $\Sigma$."""
        raise NotImplementedError


class Dense(CovariancePart):
    """Any covariance, by its lower-triangular root ``scale_tril`` L ``[d, d]``."""

    scale_tril: Tensor

    def __init__(self, where: slice, scale_tril: Tensor | None = None) -> None:
        super().__init__(where, scale_tril=scale_tril)

    def times_root(self, rows: Tensor) -> Tensor:
        return rows @ self.scale_tril

    def transform(self, noise: Tensor) -> Tensor:
        return noise @ self.scale_tril.T

    def whiten(self, deviations: Tensor) -> Tensor:
        columns = deviations.unsqueeze(-1)
        return torch.linalg.solve_triangular(self.scale_tril, columns, upper=False).squeeze(-1)

    def std(self) -> Tensor:
        return self.scale_tril.norm(dim=-1)

    def log_det_root(self) -> Tensor:
        return self.scale_tril.diagonal().log().sum()


class Diagonal(CovariancePart):
    """Independent latents, by their standard deviations ``scale`` s ``[d]``."""

    scale: Tensor

    def __init__(self, where: slice, scale: Tensor | None = None) -> None:
        super().__init__(where, scale=scale)

    def times_root(self, rows: Tensor) -> Tensor:
        return rows * self.scale

    def transform(self, noise: Tensor) -> Tensor:
        return noise * self.scale

    def whiten(self, deviations: Tensor) -> Tensor:
        return deviations / self.scale

    def std(self) -> Tensor:
        return self.scale

    def log_det_root(self) -> Tensor:
        return self.scale.log().sum()


class LowRankPlusDiagonal(Diagonal):
    r"""$\Sigma = F F^\top + \mathrm{diag}(s^2)$; latents of $s = 0$ have no density.

    With $U = F / s$, $U^\top U = V \Lambda V^\top$ and $q = \sqrt{1 + \Lambda}$, the root of the
    scaled precision is $(I + U U^\top)^{-1/2} = I - U V \frac{1}{q (1 + q)} V^\top U^\top$, and
    $\ln\det\Sigma = 2\sum_j \ln s_j + \sum_k \ln(1 + \Lambda_k)$.
    """

    factor: Tensor

    def __init__(
        self, where: slice, factor: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        super().__init__(where, scale)
        self.register_buffer("factor", factor)

    @property
    def dim(self) -> int:
        return int(self.scale.count_nonzero())

    @property
    def columns(self) -> int:
        return self.factor.shape[1] + self.size

    def times_root(self, rows: Tensor) -> Tensor:
        return torch.cat([rows @ self.factor, rows * self.scale], dim=-1)

    def transform(self, noise: Tensor) -> Tensor:
        shared, single = noise.split([self.factor.shape[1], self.size], dim=-1)
        return shared @ self.factor.T + single * self.scale

    def whiten(self, deviations: Tensor) -> Tensor:
        u, (values, vectors) = self._over_scale(self.factor.T).T, self._spectrum()
        q, directions = (1 + values).sqrt(), u @ vectors
        white = self._over_scale(deviations)
        return white - (white @ directions / (q * (1 + q))) @ directions.T

    def std(self) -> Tensor:
        return (self.factor.square().sum(-1) + self.scale.square()).sqrt()

    def log_det_root(self) -> Tensor:
        log_scale = self.scale[self.scale > 0].log().sum()
        return log_scale + 0.5 * self._spectrum()[0].log1p().sum()

    def _over_scale(self, rows: Tensor) -> Tensor:
        return torch.where(self.scale > 0, rows / self.scale, 0.0)

    def _spectrum(self) -> tuple[Tensor, Tensor]:
        r"""Return eigenvalues and vectors of $U^\top U$."""
        u = self._over_scale(self.factor.T)
        return torch.linalg.eigh(u @ u.T)


class Kronecker(CovariancePart):
    r"""A matrix $W = Q\,(S \circ E)\,P^\top$ of latents, E being standard Normals.

    ``out`` Q ``[o, o]`` and ``inner`` P ``[i, i]`` are orthogonal, ``scale`` S is ``[o, i]``.
    """

    out: Tensor
    inner: Tensor
    scale: Tensor

    def __init__(self, where: slice) -> None:
        super().__init__(where, out=None, inner=None, scale=None)

    def times_root(self, rows: Tensor) -> Tensor:
        return (self._rotate(rows) * self.scale).flatten(-2)

    def transform(self, noise: Tensor) -> Tensor:
        scaled = self.scale * noise.unflatten(-1, self.scale.shape)
        return (self.out @ scaled @ self.inner.T).flatten(-2)

    def whiten(self, deviations: Tensor) -> Tensor:
        return (self._rotate(deviations) / self.scale).flatten(-2)

    def std(self) -> Tensor:
        variances = self.out.square() @ self.scale.square() @ self.inner.square().T
        return variances.sqrt().flatten()

    def log_det_root(self) -> Tensor:
        return self.scale.log().sum()

    def _rotate(self, rows: Tensor) -> Tensor:
        r"""Return $Q^\top J P$."""
        return self.out.T @ rows.unflatten(-1, self.scale.shape) @ self.inner


class PartsNormal(TorchDistribution):
    """Normal of the latents' vector, its covariance in parts; latents in no part are fixed.

    The density is that of the latents which have one.

    Args:
        loc: mean ``[D]``.
        parts: covariances of ranges that do not overlap.
    """

    arg_constraints: Any = {"loc": constraints.real_vector}
    support: Any = constraints.real_vector
    has_rsample = True

    def __init__(self, loc: Tensor, parts: list[CovariancePart]) -> None:
        self.loc: Tensor = loc
        self.parts: list[CovariancePart] = parts
        super().__init__(event_shape=loc.shape, validate_args=False)

    def std(self) -> Tensor:
        """Return standard deviations ``[D]``, 0 for latents in no part."""
        std = torch.zeros_like(self.loc)
        for block in self.parts:
            std[block.where] = block.std()
        return std

    def rsample(self, sample_shape: Any = Size()) -> Tensor:
        z = self.loc.expand(*sample_shape, *self.loc.shape).clone()
        for block in self.parts:
            noise = torch.randn(*sample_shape, block.columns, dtype=z.dtype, device=z.device)
            z[..., block.where] += block.transform(noise)
        return z

    def log_prob(self, value: Tensor) -> Tensor:
        total = value.new_zeros(value.shape[:-1])
        for block in self.parts:
            white = block.whiten((value - self.loc)[..., block.where])
            total = total - 0.5 * white.square().sum(-1) - block.log_det_root()
            total = total - 0.5 * block.dim * math.log(2 * math.pi)
        return total
