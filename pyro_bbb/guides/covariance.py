r"""Covariances of the unconstrained latents in parts, each $\Sigma = R R^\top$ of some structure.

A part covers a range of the flat vector of latents. What is in no part has no variance.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.distributions.torch_distribution import TorchDistribution
from torch import Size, Tensor, nn
from torch.distributions import constraints


class CovariancePart(nn.Module):
    """Covariance of one range of the latents; its tensors are ``None`` until they are known."""

    def __init__(self, where: slice, **tensors: Tensor | None) -> None:
        super().__init__()
        self.where = where
        for name, value in tensors.items():
            self.register_buffer(name, value)

    @property
    def size(self) -> int:
        """Number of latents."""
        return int(self.where.stop - self.where.start)

    def set(self, **tensors: Tensor | None) -> None:
        """Replaces the tensors."""
        self._buffers.update(tensors)

    def times_root(self, rows: Tensor) -> Tensor:
        """$J R$ for rows ``[..., size]``, such as derivatives of outputs."""
        raise NotImplementedError

    def transform(self, noise: Tensor) -> Tensor:
        r"""$R\epsilon$ for standard Normals ``[..., size]``."""
        raise NotImplementedError

    def whiten(self, deviations: Tensor) -> Tensor:
        """$R^{-1}(z - m)$ for deviations ``[..., size]``."""
        raise NotImplementedError

    def std(self) -> Tensor:
        """Standard deviations ``[size]``."""
        raise NotImplementedError

    def log_det_root(self) -> Tensor:
        """Logarithm of the determinant of $R$."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in self._buffers:
            saved = state_dict.get(prefix + name)
            self._buffers[name] = None if saved is None else saved.clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


class Dense(CovariancePart):
    """Any covariance, by its lower-triangular root ``scale_tril`` ``[d, d]``."""

    scale_tril: Tensor

    def __init__(self, where: slice, scale_tril: Tensor | None = None) -> None:
        super().__init__(where, scale_tril=scale_tril)

    def times_root(self, rows: Tensor) -> Tensor:
        """As for `CovariancePart`."""
        return rows @ self.scale_tril

    def transform(self, noise: Tensor) -> Tensor:
        """As for `CovariancePart`."""
        return noise @ self.scale_tril.T

    def whiten(self, deviations: Tensor) -> Tensor:
        """As for `CovariancePart`."""
        columns = deviations.unsqueeze(-1)
        return torch.linalg.solve_triangular(self.scale_tril, columns, upper=False).squeeze(-1)

    def std(self) -> Tensor:
        """As for `CovariancePart`."""
        return self.scale_tril.norm(dim=-1)

    def log_det_root(self) -> Tensor:
        """As for `CovariancePart`."""
        return self.scale_tril.diagonal().log().sum()


class Diagonal(CovariancePart):
    """Independent latents, by their standard deviations ``scale`` ``[d]``."""

    scale: Tensor

    def __init__(self, where: slice, scale: Tensor | None = None) -> None:
        super().__init__(where, scale=scale)

    def times_root(self, rows: Tensor) -> Tensor:
        """As for `CovariancePart`."""
        return rows * self.scale

    def transform(self, noise: Tensor) -> Tensor:
        """As for `CovariancePart`."""
        return noise * self.scale

    def whiten(self, deviations: Tensor) -> Tensor:
        """As for `CovariancePart`."""
        return deviations / self.scale

    def std(self) -> Tensor:
        """As for `CovariancePart`."""
        return self.scale

    def log_det_root(self) -> Tensor:
        """As for `CovariancePart`."""
        return self.scale.log().sum()


class LowRankPlusDiagonal(Diagonal):
    r"""$\Sigma = F F^\top + \mathrm{diag}(s^2)$, for derivatives only."""

    factor: Tensor

    def __init__(self, where: slice, factor: Tensor, scale: Tensor) -> None:
        super().__init__(where, scale)
        self.register_buffer("factor", factor)

    def times_root(self, rows: Tensor) -> Tensor:
        """$J R$ ``[..., rank + size]``."""
        return torch.cat([rows @ self.factor, rows * self.scale], dim=-1)


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
        """As for `CovariancePart`."""
        return (self._rotate(rows) * self.scale).flatten(-2)

    def transform(self, noise: Tensor) -> Tensor:
        """As for `CovariancePart`."""
        scaled = self.scale * noise.unflatten(-1, self.scale.shape)
        return (self.out @ scaled @ self.inner.T).flatten(-2)

    def whiten(self, deviations: Tensor) -> Tensor:
        """As for `CovariancePart`."""
        return (self._rotate(deviations) / self.scale).flatten(-2)

    def std(self) -> Tensor:
        """As for `CovariancePart`."""
        variances = self.out.square() @ self.scale.square() @ self.inner.square().T
        return variances.sqrt().flatten()

    def log_det_root(self) -> Tensor:
        """As for `CovariancePart`."""
        return self.scale.log().sum()

    def _rotate(self, rows: Tensor) -> Tensor:
        return self.out.T @ rows.unflatten(-1, self.scale.shape) @ self.inner


class PartsNormal(TorchDistribution):
    """Normal of the flat vector of latents, its covariance in parts; the rest is fixed.

    Its density is that of the latents which have a variance.

    Args:
        loc: mean ``[D]``.
        parts: covariances of ranges that do not overlap.
    """

    arg_constraints = {"loc": constraints.real_vector}
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, loc: Tensor, parts: list[CovariancePart]) -> None:
        self.loc, self.parts = loc, parts
        super().__init__(event_shape=loc.shape, validate_args=False)

    def rsample(self, sample_shape: Any = Size()) -> Tensor:
        """Samples ``[*sample_shape, D]``."""
        z = self.loc.expand(*sample_shape, *self.loc.shape).clone()
        for part in self.parts:
            noise = torch.randn(*sample_shape, part.size, dtype=z.dtype, device=z.device)
            z[..., part.where] += part.transform(noise)
        return z

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density in nats."""
        total = value.new_zeros(value.shape[:-1])
        for part in self.parts:
            white = part.whiten((value - self.loc)[..., part.where])
            total = total - 0.5 * white.square().sum(-1) - part.log_det_root()
            total = total - 0.5 * part.size * math.log(2 * math.pi)
        return total
