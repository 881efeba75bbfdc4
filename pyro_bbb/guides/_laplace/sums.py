# SPDX-License-Identifier: Apache-2.0
r"""The curvature of all data, part by part, and the covariance that it gives.

The prior's curvature is taken as that of independent Normals, h for each latent: the second
derivative of its negative log-density; where this is not positive (a scale mixture between its
widths, a Laplace distribution) the slope from 0, $h = (-\ln p)'(z) / z$, which for a scale mixture
of Normals is the expected precision given z.
"""

from __future__ import annotations

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_bbb.guides._laplace.gauss_newton import (
    Linearization,
    diagonal,
    kronecker_factors,
    unserved,
)
from pyro_bbb.guides.covariance import Dense, Diagonal, Kronecker

_LOG_FACTORS = (-15.0, 15.0)  # of the prior's precision


class NoModeError(ArithmeticError):
    """Error of `Laplace`: the curvature of the negative log joint is not positive.

    Args:
        smallest: the smallest curvature there, which would have to be positive.
        curvature: the kind of curvature.
    """

    def __init__(self, smallest: float, curvature: str = "hessian") -> None:
        self.smallest = smallest
        self.history: Any = None  # of the training, where `fit` raised it
        ways = {
            "hessian": "the point is no maximum of the log joint. Train longer, with a lower "
            "learning rate at the end or a smooth activation (Tanh, SiLU); or use curvature='ggn'",
            "ggn": "the data leave latents undetermined to which the prior gives no curvature "
            "either. Use a Normal prior",
        }
        super().__init__(
            f"the curvature must be positive, its smallest is {smallest:.3g}: {ways[curvature]}"
        )


class Sums:
    """Sums over batches of the curvature of a `Laplace` guide's parts.

    Args:
        guide: the guide at its point, in double precision.
    """

    def __init__(self, guide: Any) -> None:
        self.guide, zeros = guide, torch.zeros_like(guide.loc.detach())
        self.parts, self.names = guide.covariance, list(guide.latents.slices)
        self.kron = guide._structure == "kron"
        self.slope, self.prior = zeros.clone(), zeros.clone()  # of all but the network
        self.totals: list[Any] = [_zeros(part, zeros, self.kron) for part in self.parts]
        self.counted, self.coupled = 0.0, False

    def add(self, batch: Linearization) -> None:
        """Adds a batch."""
        slope, diagonal = batch.rest()
        self.slope += slope
        self.counted += float(batch.weight.sum())
        self.coupled = self._is_coupled(batch)
        self.prior += 0.0 if self.coupled else diagonal
        if self.kron:
            self._add_factors(batch)
            return
        (part,) = self.parts
        if isinstance(part, Diagonal) and not unserved(self.guide.latents, batch.uses):
            self._add_diagonal(batch)
            return
        for rows, jacobian in batch.jacobians(part.where):
            weighted = batch.curvature[rows] @ jacobian
            if isinstance(part, Dense):
                self.totals[0] += weighted.flatten(0, 1).T @ jacobian.flatten(0, 1)
            else:
                self.totals[0] += (weighted * jacobian).sum((0, 1))
        if self.coupled:
            self.totals[0] += batch.coupled()

    def finish(self, factor: float) -> None:
        """Weights the sums up to the whole data."""
        for i, total in enumerate(self.totals):
            scaled = [total[0] * factor, total[1] / (self.counted or 1.0)] if self.kron else None
            self.totals[i] = total * factor if scaled is None else scaled
        self.slope *= factor
        self.prior *= factor
        if not self.coupled:
            z = self.guide.loc.detach()
            secant = torch.where(self.slope * z > 0, self.slope / z, 0.0)
            self.prior = torch.where(self.prior > 0, self.prior, secant)

    def tensors(self, i: int, factor: float) -> dict[str, Tensor]:
        """The tensors of part i, where the prior's precision is multiplied by a factor."""
        part, total, prior = self.parts[i], self.totals[i], factor * self.prior[self._where(i)]
        if isinstance(part, Kronecker):
            (out, left), (inner, right) = map(_eigen, total)
            scale = (torch.outer(out, inner) + self._require(prior).mean()).rsqrt()
            return {"out": left, "inner": right, "scale": scale}
        total = total[0] if self.kron else total
        if isinstance(part, Dense):
            precision = 0.5 * (total + total.T) + torch.diag(prior)
            curvatures = torch.linalg.eigvalsh(precision)
            rounding = len(precision) * torch.finfo(precision.dtype).eps * curvatures[-1].abs()
            self._require(curvatures - rounding, curvatures)
            normal = dist.MultivariateNormal(torch.zeros_like(prior), precision_matrix=precision)
            return {"scale_tril": normal.scale_tril}
        return {"scale": self._require(total + prior).rsqrt()}

    def best_prior_factor(self) -> float:
        r"""The factor $\tau$ of the prior's precision that maximises the marginal likelihood.

        With curvature $\lambda_i$ of the likelihood in units of the prior's h, of d latents:

        $$\ln Z(\tau) = -\tfrac{\tau}{2} \sum_i h_i (z_i - m_i)^2 + \tfrac{d}{2} \ln \tau
          - \tfrac12 \sum_i \ln(\lambda_i + \tau) + \text{const}$$

        (MacKay 1992; the first sum by the prior's slope $h (z - m)$).
        """
        from scipy.optimize import minimize_scalar  # which takes longer to import than this room

        if self.coupled or self.guide.latents.of_role("likelihood"):
            raise ValueError(
                "optimize_prior needs a likelihood and priors without latents of their own, got "
                f"latents {self.names}; use Gaussian.learned() for the noise"
            )
        spectra = torch.cat([self._spectrum(i).flatten() for i in range(len(self.parts))])
        ranges = [self._where(i) for i in range(len(self.parts))]
        square = float(sum((self.slope[w].square() / self.prior[w]).sum() for w in ranges))

        def neg_log_evidence(log_factor: float) -> float:
            factor = math.exp(log_factor)
            log_det = float((spectra + factor).log().sum()) - len(spectra) * log_factor
            return 0.5 * (factor * square + log_det)

        found = minimize_scalar(neg_log_evidence, bounds=_LOG_FACTORS, method="bounded")
        return math.exp(found.x)

    def _spectrum(self, i: int) -> Tensor:
        """Eigenvalues of the likelihood's curvature in units of the prior's."""
        total, prior = self.totals[i], self._require(self.prior[self._where(i)])
        if isinstance(self.parts[i], Kronecker):
            (out, _), (inner, _) = map(_eigen, total)
            return torch.outer(out, inner) / prior.mean()
        total = total[0] if self.kron else total
        if isinstance(self.parts[i], Dense):
            root = prior.sqrt()
            return torch.linalg.eigvalsh(total / torch.outer(root, root)).clamp(min=0)
        return total / prior

    def _where(self, i: int) -> slice:
        where: slice = self.parts[i].where
        return where

    def _require(self, values: Tensor, shown: Tensor | None = None) -> Tensor:
        if not (values > 0).all():
            smallest = (values if shown is None else shown).min().item()
            raise NoModeError(smallest, self.guide._curvature)
        return values

    def _is_coupled(self, batch: Linearization) -> bool:
        """Tell whether the Hessian has entries beside J's and the diagonal; a structure may not."""
        full = self.guide._structure == "full"
        if batch.is_separable():
            return full and bool(self.guide.latents.of_role("likelihood"))
        if not full:
            raise ValueError(
                f"structure={self.guide._structure!r} needs priors of independent weights, got one "
                "with latents of its own; use structure='full'"
            )
        return True

    def _add_diagonal(self, batch: Linearization) -> None:
        """Adds a batch layer by layer: no derivative by all weights is made."""
        ranges = self.guide.latents.slices
        for name, squares in diagonal(batch).items():
            self.totals[0][ranges[name]] += squares.flatten()

    def _add_factors(self, batch: Linearization) -> None:
        missing = unserved(self.guide.latents, batch.uses)
        if missing:
            raise ValueError(
                "structure='kron' needs every latent to be once the weight or bias of a linear or "
                f"2-D convolution layer without groups, got {', '.join(missing)}; use "
                "structure='diag' or 'last_layer'"
            )
        factors = kronecker_factors(batch)
        for i, name in enumerate(self.names):
            for j, factor in enumerate(factors.get(name, ())):
                if factor is not None:
                    self.totals[i][j] = self.totals[i][j] + factor


def _zeros(part: Any, like: Tensor, kron: bool) -> Any:
    if kron:
        return [like.new_zeros(part.size) if isinstance(part, Diagonal) else 0.0, 0.0]
    return like.new_zeros(2 * [part.size] if isinstance(part, Dense) else part.size)


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp(min=0), vectors  # rounding leaves some below 0
