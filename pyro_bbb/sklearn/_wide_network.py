# SPDX-License-Identifier: Apache-2.0
r"""The infinitely wide Bayesian neural network: its posterior in closed form.

Two hidden layers of erf units with Normal weights, beside a linear map, have Normal outputs if both
layers have infinitely many units (Neal 1996; Williams 1997, "Computing with Infinite Networks"; Lee
et al. 2018, arXiv:1711.00165). With inputs $\tilde x = x / \ell$, scaled column by column, the
covariance of two outputs is

$$k_1 = \tfrac2\pi \arcsin\frac{2 (1 + \tilde x \cdot \tilde x')}
    {\sqrt{(3 + 2 |\tilde x|^2)(3 + 2 |\tilde x'|^2)}}, \qquad
k = a\, \tfrac2\pi \arcsin\frac{2 s\, k_1(x, x')}
    {\sqrt{(1 + 2 s\, k_1(x, x))(1 + 2 s\, k_1(x', x'))}} + \tfrac{b}{d} (1 + x \cdot x').$$

The scales $\theta = \log(\ell, a, s, b, \sigma^2)$ of prior and noise have Normal priors and the
evidence $\log N(y; 0, K + \sigma^2 R)$, R the rows' relative noise; they are sampled by HMC. For
one $\theta$ and M inducing rows $z$ of the n rows, $\phi(x) = L^{-1} k(z, x)$ with
$L L^T = k(z, z)$, the posterior is that of a linear regression on $\phi$ in which the rest of each
row's variance is noise (Snelson and Ghahramani 2006), $\Lambda_i = \sigma^2 R_i + k(x_i, x_i) -
|\phi_i|^2$:

$$A = I + \Phi^T \Lambda^{-1} \Phi, \quad m(x) = \phi(x)^T A^{-1} \Phi^T \Lambda^{-1} y, \quad
  v(x) = k(x, x) - |\phi(x)|^2 + \phi(x)^T A^{-1} \phi(x),$$

which is exact for M = n. So is its prediction of a row from all others, with the leverage
$h_i = \phi_i^T A^{-1} \phi_i / \Lambda_i$: residual $(y_i - m_i) / (1 - h_i)$ and variance
$\Lambda_i / (1 - h_i)$. With $P = (K + \sigma^2 R)^{-1}$, a block B of rows has, given all others,
the means $y_B - P_{BB}^{-1} (P y)_B$ and the covariance $P_{BB}^{-1}$.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

Energy = Callable[[NDArray[np.float64]], tuple[float, NDArray[np.float64]]]

_EVIDENCE_ROWS, _INDUCING, _LEFT_OUT = 400, 1000, 2000  # most rows
_BLOCK = 4096  # rows at once
_PARTS, _COLUMNS = 3, 30  # blocks of rows along each column, and most columns
_ITERATIONS, _REFINEMENTS = 80, 6  # of L-BFGS
_WARMUP, _LEAPS = 8, 3  # steps of HMC, and leaps of each
_START = (-0.5, 2.3, -2.0, -2.3)  # logarithms of a, s, b and the noise
_JITTER = 1e-9  # on the covariance's diagonal, relative to its mean
_BELOW_ONE = 1e-10  # from 1 to the largest cosine, whose arcsine has a finite slope
_FAILED = 1e10  # energy where a covariance is not positive definite
_RESOLUTION = 1e-3  # least standard deviation of the noise
# means and standard deviations of the logarithms' priors: length scales, a, s, b, noise variance
_PRIOR_LENGTH = (2.0, 1.5)
_PRIOR_OTHERS = ((0.0, 2.3, -1.0, -3.0), (3.0, 3.0, 3.0, 3.0))


# --- the prior ---


@dataclass(frozen=True)
class Scales:
    """Scales of the prior and the noise.

    Args:
        length: of the inputs, ``[d]``.
        a: variance of the deep part.
        s: variance of the second layer's inputs.
        b: variance of the linear part.
        noise: variance of the noise.
    """

    length: Tensor
    a: Tensor
    s: Tensor
    b: Tensor
    noise: Tensor

    @classmethod
    def of(cls, theta: Tensor) -> Scales:
        """Return the scales of their logarithms ``[d + 4]``."""
        length, a, s, b, noise = theta.exp().tensor_split([-4, -3, -2, -1])
        return cls(length, *(scale.squeeze() for scale in (a, s, b, noise + _RESOLUTION**2)))


def covariance(x: Tensor, z: Tensor, scales: Scales) -> Tensor:
    """Return the covariances ``[n, m]`` of the outputs at ``x [n, d]`` and ``z [m, d]``."""
    first = 2 / math.pi * torch.asin(_unit(x, scales) @ _unit(z, scales).T)
    left, right = (_second_factor(inputs, scales) for inputs in (x, z))
    second = 2 / math.pi * torch.asin(first * left[:, None] * right)
    return scales.a * second + scales.b / x.shape[1] * (1 + x @ z.T)


def variance(x: Tensor, scales: Scales) -> Tensor:
    """Return the prior variances ``[n]`` of the outputs at ``x [n, d]``."""
    second = 2 / math.pi * torch.asin(1 - 1 / _second_norm(x, scales))
    return scales.a * second + scales.b / x.shape[1] * (1 + x.square().sum(1))


def _unit(x: Tensor, scales: Scales) -> Tensor:
    """Return vectors whose products are the cosines in k_1, kept below 1 by rounding."""
    scaled = x / scales.length
    raw = torch.cat([torch.ones_like(x[:, :1]), scaled], 1)
    norm = 3 + 2 * scaled.square().sum(1, keepdim=True)
    return raw * ((2 - _BELOW_ONE) / norm).sqrt()


def _second_norm(x: Tensor, scales: Scales) -> Tensor:
    """Return 1 + 2 s k_1(x, x), ``[n]``."""
    norm = 3 + 2 * (x / scales.length).square().sum(1)
    return 1 + 4 / math.pi * scales.s * torch.asin((1 - _BELOW_ONE) * (1 - 1 / norm))


def _second_factor(x: Tensor, scales: Scales) -> Tensor:
    return ((2 - _BELOW_ONE) * scales.s / _second_norm(x, scales)).sqrt()


# --- the evidence ---


def evidence(x: Tensor, y: Tensor, relative: Tensor) -> Energy:
    """Return the negative log-posterior of theta, up to a constant, and its gradient.

    Args:
        x: inputs ``[n, d]``.
        y: targets ``[n]``.
        relative: relative variances ``[n]`` of the rows' noise.
    """
    means, stds = (
        torch.tensor([length] * x.shape[1] + list(others), dtype=x.dtype)
        for length, others in zip(_PRIOR_LENGTH, _PRIOR_OTHERS, strict=True)
    )

    def energy(values: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        theta = torch.tensor(values, requires_grad=True)
        with torch.enable_grad():
            scales = Scales.of(theta)
            k = covariance(x, x, scales)
            noise = scales.noise * relative
            prior = ((theta - means) / stds).square().sum() / 2
            # a row of weight w = 1 / R < 1 is less than a row: N(y; f, s2)^w, in proportion to
            # N(y; f, s2 / w) s2^((1 - w) / 2). One of w > 1 is not w equal copies: noise 0
            prior = prior + (1 / relative - 1).clamp(max=0).sum() / 2 * scales.noise.log()
        factor, failed = torch.linalg.cholesky_ex(_add_diagonal(k.detach(), noise.detach()))
        if failed:
            return _FAILED, np.zeros_like(values)
        inverse = torch.cholesky_inverse(factor)
        alpha = inverse @ y
        # -log N(y; 0, K + noise), and its derivative in K
        value = float(y @ alpha / 2 + factor.diagonal().log().sum() + prior.detach())
        by_k = (inverse - alpha[:, None] * alpha) / 2
        with torch.enable_grad():
            ((by_k * k).sum() + by_k.diagonal() @ noise + prior).backward()
        gradient: Any = theta.grad
        if not (math.isfinite(value) and gradient.isfinite().all()):
            return _FAILED, np.zeros_like(values)
        return value, gradient.numpy()

    return energy


def _add_diagonal(k: Tensor, noise: Tensor) -> Tensor:
    return k + torch.diag(noise + _JITTER * k.diagonal().mean())


def mode(energy: Energy, start: NDArray[np.float64], iterations: int) -> NDArray[np.float64]:
    """Return the theta of lowest energy, by L-BFGS."""
    options = {"maxiter": iterations, "maxcor": 20, "ftol": 1e-5}
    return np.asarray(minimize(energy, start, jac=True, method="L-BFGS-B", options=options).x)


def sample_scales(
    energy: Energy, centre: NDArray[np.float64], number: int, seed: int
) -> NDArray[np.float64]:
    """Draw ``[number, d + 4]`` values of theta by HMC, preconditioned by the mode's curvature."""
    rng, size, step = np.random.default_rng(seed), len(centre), 0.05
    slopes = [energy(centre + e)[1] - energy(centre - e)[1] for e in step * np.eye(size)]
    curvature = np.stack(slopes) / (2 * step)
    values, vectors = np.linalg.eigh((curvature + curvature.T) / 2)
    basis = vectors / np.sqrt(values.clip(0.1))

    def whitened(z: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        value, gradient = energy(centre + basis @ z)
        return value, basis.T @ gradient

    z, epsilon, draws = np.zeros(size), 0.5, []
    now, gradient = whitened(z)
    for t in range(_WARMUP + 2 * number):
        momentum: Any = rng.normal(size=size)
        start, at, slope, end = now + momentum @ momentum / 2, z, gradient, _FAILED
        for _ in range(_LEAPS):
            momentum = momentum - epsilon / 2 * slope
            at = at + epsilon * momentum
            value, slope = whitened(at)
            momentum = momentum - epsilon / 2 * slope
            end = float(value + momentum @ momentum / 2)
            if not end < start + 1000:
                break
        acceptance = math.exp(min(0.0, float(start - end)))
        if rng.random() < acceptance:
            z, now, gradient = at, value, slope
        if t < _WARMUP:
            epsilon *= math.exp(0.5 * (acceptance - 0.75) / math.sqrt(1 + 0.3 * t))
        elif (t - _WARMUP) % 2:
            draws.append(centre + basis @ z)
    return np.stack(draws)


# --- the posterior ---


@dataclass(frozen=True)
class LeftOut:
    """Prediction of training rows, each from all others.

    Args:
        rows: numbers ``[m]`` of the rows.
        mean: means, ``[J, m]``.
        variance: variances ``[J, m]``, noise included.
    """

    rows: Tensor
    mean: Tensor
    variance: Tensor


@dataclass(frozen=True)
class WideNetwork:
    """Posterior of the infinitely wide network for J draws of the scales.

    Args:
        theta: logarithms of the scales, ``[J, d + 4]``.
        inducing: inducing rows, ``[M, d]``.
        weight: ``[J, M]``, so that means are ``k(x, z) weight``.
        reduction: ``[J, M, M]``: variances are ``k(x, x) - k(x, z) reduction k(z, x)``.
    """

    theta: Tensor
    inducing: Tensor
    weight: Tensor
    reduction: Tensor

    @property
    def noise(self) -> Tensor:
        """Variances ``[J, 1]`` of the noise of a row of relative variance 1."""
        return torch.stack([Scales.of(theta).noise for theta in self.theta])[:, None]

    def mean(self, x: Tensor) -> Tensor:
        """Return the means ``[J, n]`` of the outputs."""
        pairs = zip(self.theta, self.weight, strict=True)
        return torch.stack([self._covariance(x, theta) @ weight for theta, weight in pairs])

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances ``[J, n]`` of the outputs, without noise."""
        means, variances = [], []
        for theta, weight, reduction in zip(self.theta, self.weight, self.reduction, strict=True):
            k = self._covariance(x, theta)
            means.append(k @ weight)
            reduced = variance(x, Scales.of(theta)) - ((k @ reduction) * k).sum(1)
            variances.append(reduced.clamp_min(0.0))  # it is negative by rounding alone
        return torch.stack(means), torch.stack(variances)

    def without_variance(self) -> WideNetwork:
        """Return the network for `mean` alone, which takes less memory."""
        return replace(self, reduction=self.reduction[:, :0, :0].clone())

    def _covariance(self, x: Tensor, theta: Tensor) -> Tensor:
        return covariance(x, self.inducing, Scales.of(theta))


def fit_wide(
    x: Tensor,
    y: Tensor,
    relative: Tensor,
    order: Tensor,
    *,
    draws: int,
    seed: int,
    evidence_rows: int = _EVIDENCE_ROWS,
    left_out: Tensor | None = None,
) -> tuple[WideNetwork, LeftOut]:
    """Return the posterior of the wide network, and predictions of rows from all others.

    Args:
        x: standardised inputs ``[n, d]``.
        y: standardised targets ``[n]``.
        relative: relative variances ``[n]`` of the rows' noise.
        order: a random permutation of the rows; the first are inducing.
        draws: number of draws of the scales, of which more rows than ``evidence_rows`` need half;
            1 is their mode.
        seed: of the draws.
        evidence_rows: rows whose evidence decides on the scales.
        left_out: numbers of the rows to predict from all others; by default at most 2,000.
    """
    few = order[: 2 * evidence_rows]
    thetas = _scales(x[few], y[few], relative[few], len(x), draws, evidence_rows, seed)
    if left_out is None:  # new rows are like those that are not inducing, if these are enough
        others = order[_INDUCING:]
        left_out = (others if len(others) >= _INDUCING // 3 else order)[:_LEFT_OUT]
    inducing = x[order[:_INDUCING]]
    posteriors = [_regression(x, y, relative, inducing, left_out, theta) for theta in thetas]
    weight, reduction, mean, var = map(torch.stack, zip(*posteriors, strict=True))
    return WideNetwork(thetas, inducing, weight, reduction), LeftOut(left_out, mean, var)


def _scales(
    x: Tensor, y: Tensor, relative: Tensor, num_rows: int, draws: int, rows: int, seed: int
) -> Tensor:
    """Return draws of theta ``[J, d + 4]``: by HMC on few rows, and moved to the mode of more."""
    energy = evidence(x[:rows], y[:rows], relative[:rows])
    length = np.full(x.shape[1], 0.5 * math.log(x.shape[1]))
    centre = mode(energy, np.concatenate([length, _START]), _ITERATIONS)
    if num_rows > rows:
        draws = (draws + 1) // 2
    thetas = centre[None] if draws == 1 else sample_scales(energy, centre, draws, seed)
    if num_rows > rows:  # more rows move the mode, and narrow the posterior around it
        moved = mode(evidence(x, y, relative), centre, _REFINEMENTS)
        thetas = moved + math.sqrt(rows / num_rows) * (thetas - centre)
    return torch.tensor(thetas)


def _regression(
    x: Tensor, y: Tensor, relative: Tensor, inducing: Tensor, left_out: Tensor, theta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weight, reduction, and the means and variances of the rows left out."""
    scales = Scales.of(theta)
    k = covariance(inducing, inducing, scales)
    lower = torch.linalg.cholesky(_add_diagonal(k, torch.zeros_like(k[0])))

    def features(rows: Tensor, relative: Tensor) -> tuple[Tensor, Tensor]:
        """Return phi ``[M, n]``, and 1 / Lambda ``[n]``."""
        phi = torch.linalg.solve_triangular(lower, covariance(inducing, rows, scales), upper=False)
        rest = (variance(rows, scales) - phi.square().sum(0)).clamp_min(0.0)  # rounding alone
        return phi, 1 / (scales.noise * relative + rest)

    identity = torch.eye(len(k), dtype=k.dtype)
    a, moment = identity.clone(), torch.zeros_like(k[0])
    for rows, targets, noise in zip(*(v.split(_BLOCK) for v in (x, y, relative)), strict=True):
        phi, precision = features(rows, noise)
        a += (phi * precision) @ phi.T  # A = I + Phi^T Lambda^-1 Phi
        moment += phi @ (precision * targets)  # Phi^T Lambda^-1 y
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(a))
    coefficients = inverse @ moment
    # rows left out, by their leverage
    phi, precision = features(x[left_out], relative[left_out])
    rest = (1 - ((inverse @ phi) * phi).sum(0) * precision).clamp_min(1e-10)  # rounding alone
    mean = y[left_out] - (y[left_out] - coefficients @ phi) / rest
    # from coefficients of phi to those of k(x, z)
    back = lambda b: torch.linalg.solve_triangular(lower.T, b, upper=True)  # noqa: E731
    reduction = back(back(identity - inverse).T)
    return back(coefficients[:, None])[:, 0], reduction, mean, 1 / (precision * rest)


def blocks_left_out(
    x: Tensor, y: Tensor, relative: Tensor, thetas: Tensor, columns: int
) -> LeftOut | None:
    """Return predictions of the lowest, middle and highest third by each column from the others.

    At most 30 columns are taken, evenly spread. If none varies the result is None.

    Args:
        x: standardised inputs ``[n, d]``.
        y: standardised targets ``[n]``.
        relative: relative variances ``[n]`` of the rows' noise.
        thetas: logarithms of the scales, ``[J, d + 4]``.
        columns: number of the first columns by which rows are left out.
    """
    varied = [column for column in x.T[:columns] if column.min() < column.max()]
    if not varied:
        return None
    orders = [column.argsort(stable=True) for column in varied[:: -(-len(varied) // _COLUMNS)]]
    blocks = [block for order in orders for block in order.tensor_split(_PARTS) if len(block)]
    means, variances = [], []
    for scales in map(Scales.of, thetas):
        k = _add_diagonal(covariance(x, x, scales), scales.noise * relative)
        precision = torch.cholesky_inverse(torch.linalg.cholesky(k))
        alpha = precision @ y
        inverses = [torch.linalg.inv(precision[block][:, block]) for block in blocks]
        pairs = list(zip(blocks, inverses, strict=True))
        means.append(torch.cat([y[block] - inverse @ alpha[block] for block, inverse in pairs]))
        variances.append(torch.cat([inverse.diagonal() for inverse in inverses]))
    return LeftOut(torch.cat(blocks), torch.stack(means), torch.stack(variances))
