# SPDX-License-Identifier: Apache-2.0
r"""Laplace's approximation: a Normal at the MAP, with the curvature of the log joint there.

$$q(z) = N(\hat z, H^{-1}), \qquad \hat z = \arg\max_z \ln p(D, z), \qquad
  H = -\nabla^2 \ln p(D, \hat z)$$

for all latents in unconstrained space (MacKay 1992, "A Practical Bayesian Framework for
Backpropagation Networks"). By default H is the Gauss-Newton matrix of ``_gauss_newton.py`` plus the
prior's curvature $\tau h$, taken as that of independent Normals: h is the second derivative of its
negative log-density; where this is not positive (a scale mixture between its widths, a Laplace
distribution) the slope from 0, $h = (-\ln p)'(z) / z$, which for a scale mixture of Normals is the
expected precision given z.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from torch import Tensor

from pyro_bbb._handlers.sites import sample_names
from pyro_bbb._handlers.substitute import substituted
from pyro_bbb._handlers.vmap import over_draws
from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.inputs import Rows, as_inputs, each, run_network
from pyro_bbb._utils.validation import kind, one_of, tensor
from pyro_bbb.guides._autoguides import PointThenNormal
from pyro_bbb.guides._base import as_batches
from pyro_bbb.guides._gauss_newton import Linearization, jacobian_of, moments_by_layer
from pyro_bbb.guides.covariance import CovariancePart, Dense, Diagonal, Kronecker
from pyro_bbb.guides.initial_values import InitLoc
from pyro_bbb.guides.tangent import OutputMoments
from pyro_bbb.latents import Latent, role_of

Batch: TypeAlias = tuple[Any, Tensor]
STRUCTURES = ("full", "kron", "diag", "last_layer")
CURVATURES = ("ggn", "hessian")
_MAX_LATENTS = 4096
_EXAMPLES = 256  # in one graph
_LOG_FACTORS = (-15.0, 15.0)  # of the prior's precision
_CHECKED, _DRAWS, _NATS = 64, 32, 0.1  # of the comparison of draws with the tangent


class LinearizationWarning(UserWarning):
    """Warning of `Laplace`: draws of the weights describe the training data worse than the tangent.

    Args:
        draws: mean negative log-likelihood of training examples by draws of the weights, nats.
        linearized: the same by the tangent.
    """

    def __init__(self, draws: float, linearized: float) -> None:
        self.draws, self.linearized = draws, linearized
        super().__init__(
            f"draws of the weights give training examples {draws:.3g} nats each (negative "
            f"log-likelihood), the linearised network {linearized:.3g}: use "
            "predict(..., linearized=True)"
        )


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


class Laplace(PointThenNormal):
    """Point in training; a Normal around it once `approximate` has seen the data.

    `fit` calls `approximate` at its end. For a network that is trained already (`bayesianize` keeps
    its weights) call it directly. The curvature is that of the full data, in float64.

    Gauss-Newton curvature describes the network's tangent: predict with ``linearized=True``. Draws
    of the weights in the network itself underfit where the data leave many weights undetermined
    (Immer et al. 2021); `approximate` warns where they do.

    Args:
        model: a `BayesianModel`.
        structure: of the curvature. ``"full"``: all latents together, at most 4,096. ``"kron"``: a
            Kronecker product for each kernel of a linear or 2-D convolution layer, a matrix for
            each bias. ``"diag"``: its diagonal. ``"last_layer"``: the full one of the last layer
            with random weights; the others stay points.
        curvature: ``"ggn"`` is Gauss-Newton's. It is positive for Normal and class likelihoods with
            Normal priors at any point. ``"hessian"`` is the exact one, of structure ``"full"``,
            positive at a maximum only.
        optimize_prior: whether `approximate` multiplies the prior's standard deviations by the one
            factor of largest marginal likelihood, `prior_scale`; the point stays.
        init_loc: initial point, see `AutoSoftplusNormal`.

    Raises:
        TypeError: the model is not a `BayesianModel`.
        ValueError: an unknown name, options that exclude each other, or more than 4,096 latents
            in one matrix.
    """

    prior_scale: Tensor

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        structure: str = "full",
        curvature: str = "ggn",
        optimize_prior: bool = False,
        init_loc: InitLoc | None = None,
    ) -> None:
        if not hasattr(model, "num_data"):
            raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
        super().__init__(model, init_loc=init_loc)
        self._structure = one_of("structure", structure, STRUCTURES)
        self._curvature = one_of("curvature", curvature, CURVATURES)
        self._optimize_prior = kind("optimize_prior", optimize_prior, bool)
        if curvature == "hessian" and (structure != "full" or optimize_prior):
            raise ValueError(
                "curvature='hessian' has structure='full' and no optimize_prior, got "
                f"structure={structure!r}, optimize_prior={optimize_prior}; use curvature='ggn'"
            )
        self.register_buffer("prior_scale", torch.ones(()))
        self._find_declared()

    def approximate(self, data: Batch | Iterable[Batch]) -> None:
        """Set the covariance to the inverse curvature of the negative log joint at the point.

        Args:
            data: the training set, as one pair ``(x, y)`` or as batches of such. Where examples
                are left out, the others are weighted up.

        Raises:
            ValueError: no examples; or a layer or prior that the structure does not support.
            NoModeError: the curvature is not positive.
        """
        batches = _bounded(as_batches(data))
        first = next(batches, None)
        if first is None:
            raise ValueError("data must hold at least one example")
        if not self._complete:
            self._find_latents(*first)
        total = self._total(chain([first], batches))
        factor = total.best_prior_factor() if self._optimize_prior else 1.0
        roots = [block.root(factor * total.prior_of(block)) for block in total.blocks]
        for part, tensors in zip(self.covariance, roots, strict=True):
            part.set(**{name: value.to(self.loc) for name, value in tensors.items()})
        self.prior_scale.fill_(factor**-0.5)
        _warn_of_draws(self.model, self, *first)

    def reset(self) -> None:
        """Return to the point, for further training."""
        super().reset()
        self.prior_scale.fill_(1.0)

    def output_moments(self, model: Any, x: Rows) -> OutputMoments:
        """Return moments of the tangent's outputs, layer by layer for Kronecker products."""
        if self._structure != "kron":
            return super().output_moments(model, x)
        return moments_by_layer(model, self._latents, self.unconstrained_normal(), x)

    def _total(self, batches: Iterable[Batch]) -> TotalCurvature:
        """Return the curvature of the whole data, in float64."""
        model, guide = copy.deepcopy((self.model, self))
        guide.reset()
        model.double().requires_grad_(False)  # derivatives are by the latents alone
        guide.double()
        total, count, watched = TotalCurvature(guide), 0, self._structure in ("kron", "diag")
        with evaluating(model), pyro.validation_enabled(False):
            for x, y in batches:
                fraction = len(x) / model.num_data  # of the prior
                args = (model, guide, each(x, _double), _double(y), fraction)
                if self._curvature == "hessian":
                    total.blocks[0].sum += _hessian(*args)
                else:
                    total.add(Linearization(*args, watched=watched))
                count += len(x)
        total.finish(model.num_data / count)
        return total

    def _unknown_parts(self) -> list[CovariancePart]:
        slices = self._latents.slices
        everything = slice(0, self.latent_dim)
        if self._structure == "diag":
            return [Diagonal(everything)]
        if self._structure == "kron":
            return [_kron_part(x, slices[x.name]) for x in self._latents.values()]
        if self._structure == "last_layer":
            layer = [slices[name] for name in self._last_layer()]
            everything = slice(layer[0].start, layer[-1].stop)
        if everything.stop - everything.start > _MAX_LATENTS:
            raise ValueError(
                f"structure={self._structure!r} is for at most {_MAX_LATENTS:,} latents in one "
                f"matrix, got {everything.stop - everything.start:,}; use structure='kron', "
                "'diag' or 'last_layer'"
            )
        return [Dense(everything)]

    def _last_layer(self) -> list[str]:
        """Return site names of the last layer with random weights."""
        layers = (
            [f"{path}.{name}" for name in sample_names(part) if role_of(name) != "prior"]
            for path, part in self.model.named_modules()
            if hasattr(part, "_pyro_samples") and path.startswith("network")
        )
        *_, last = [[name for name in layer if name in self._latents] for layer in layers if layer]
        return last

    def _check_size(self, latent_dim: int) -> None:
        """Leave sizes to `_unknown_parts`, which checks the parts."""


def _kron_part(latent: Latent, where: slice) -> CovariancePart:
    if latent.transform is not None or latent.role == "likelihood":
        return Diagonal(where)
    return Kronecker(where) if len(latent.shape) > 1 else Dense(where)


class TotalCurvature:
    """Curvature of all data: a block for each part of the covariance, and the prior's diagonal.

    Args:
        guide: a `Laplace` guide at its point, in double precision.
    """

    def __init__(self, guide: Any) -> None:
        self.guide, zeros = guide, torch.zeros_like(guide.loc.detach())
        kinds = {Dense: DenseBlock, Diagonal: DiagonalBlock, Kronecker: KroneckerBlock}
        self.kron = guide._structure == "kron"
        owners = list(guide.latents) if self.kron else [""]
        pairs = zip(guide.covariance, owners, strict=True)
        options = {"like": zeros, "curvature": guide._curvature}
        self.blocks = [kinds[type(part)](part.where, name, **options) for part, name in pairs]
        self.slope, self.prior = zeros.clone(), zeros.clone()  # of all but the network
        self.counted, self.coupled = 0.0, False

    def add(self, batch: Linearization) -> None:
        """Add the curvature of a batch."""
        slope, diagonal = batch.rest()
        self.slope += slope
        self.counted += float(batch.weight.sum())
        self.coupled = self._is_coupled(batch)
        self.prior += 0.0 if self.coupled else diagonal
        if self.kron:
            factors = _require_factors(batch)
            for block in self.blocks:
                block.add_factors(*factors.get(block.name, ()))
            return
        (block,) = self.blocks
        if isinstance(block, DiagonalBlock) and not batch.not_in_layers():
            for name, squares in batch.diagonal().items():  # no derivative by all weights is made
                block.sum[self.guide.latents.slices[name]] += squares.flatten()
            return
        for jacobian, weighted in batch.jacobians(block.where):
            block.add(jacobian, weighted)
        if self.coupled:
            block.sum += batch.coupled()

    def finish(self, factor: float) -> None:
        """Weight the sums up to the whole data."""
        for block in self.blocks:
            block.scale(factor, self.counted or 1.0)
        self.slope *= factor
        self.prior *= factor
        if not self.coupled:
            z = self.guide.loc.detach()
            secant = torch.where(self.slope * z > 0, self.slope / z, 0.0)
            self.prior = torch.where(self.prior > 0, self.prior, secant)

    def prior_of(self, block: Block) -> Tensor:
        """Return the prior's curvature h of a block's latents."""
        return self.prior[block.where]

    def best_prior_factor(self) -> float:
        r"""Return the factor $\tau$ of the prior's precision that maximises the evidence.

        With curvature $\lambda_i$ of the likelihood in units of the prior's h, of d latents:

        $$\ln Z(\tau) = -\tfrac{\tau}{2} \sum_i h_i (z_i - m_i)^2 + \tfrac{d}{2} \ln \tau
          - \tfrac12 \sum_i \ln(\lambda_i + \tau) + \text{const}$$

        (MacKay 1992; the first sum by the prior's slope $h (z - m)$).
        """
        from scipy.optimize import minimize_scalar  # which takes longer to import than the guides

        latents = self.guide.latents
        if self.coupled or latents.of_role("likelihood"):
            raise ValueError(
                "optimize_prior needs a likelihood and priors without latents of their own, got "
                f"latents {list(latents)}; use Gaussian.learned() for the noise"
            )
        spectra = torch.cat([b.spectrum(self.prior_of(b)).flatten() for b in self.blocks])
        ranges = [block.where for block in self.blocks]
        square = float(sum((self.slope[w].square() / self.prior[w]).sum() for w in ranges))

        def neg_log_evidence(log_factor: float) -> float:
            factor = math.exp(log_factor)
            log_det = float((spectra + factor).log().sum()) - len(spectra) * log_factor
            return 0.5 * (factor * square + log_det)

        optimum = minimize_scalar(neg_log_evidence, bounds=_LOG_FACTORS, method="bounded")
        return math.exp(optimum.x)

    def _is_coupled(self, batch: Linearization) -> bool:
        """Return whether the Hessian has entries besides J's and the diagonal."""
        structure = self.guide._structure
        if batch.is_separable():
            return structure == "full" and bool(self.guide.latents.of_role("likelihood"))
        if structure != "full":
            raise ValueError(
                f"structure={structure!r} needs priors of independent weights, got one with "
                "latents of its own; use structure='full'"
            )
        return True


class Block:
    """Curvature of the likelihood for one part of the covariance; the base of its structures."""

    def __init__(self, where: slice, name: str, like: Tensor, curvature: str) -> None:
        self.where, self.name, self.curvature = where, name, curvature
        self.sum: Any = self._zeros(like.new_zeros(where.stop - where.start))

    def _zeros(self, zeros: Tensor) -> Any:
        return zeros

    def add(self, jacobian: Tensor, weighted: Tensor) -> None:
        r"""Add that of J ``[n, K, d]``, with $\Lambda J$."""

    def add_factors(self, out: Any = None, inner: Any = None) -> None:
        r"""Add $\sum g g^\top$, of a bias."""
        if out is not None:
            self.sum = self.sum + out

    def scale(self, factor: float, examples: float) -> None:
        """Weight the sum up to the whole data."""
        self.sum = self.sum * factor

    def root(self, prior: Tensor) -> dict[str, Tensor]:
        """Return the tensors of the covariance's root, with the prior's curvature ``[d]``."""
        raise NotImplementedError

    def spectrum(self, prior: Tensor) -> Tensor:
        """Return eigenvalues of the curvature in units of the prior's."""
        raise NotImplementedError

    def _positive(self, values: Tensor, shown: Tensor | None = None) -> Tensor:
        if not (values > 0).all():
            raise NoModeError((values if shown is None else shown).min().item(), self.curvature)
        return values


class DiagonalBlock(Block):
    r"""$\mathrm{diag}(J^\top \Lambda J)$; the standard deviation is $(\lambda + h)^{-1/2}$."""

    def add(self, jacobian: Tensor, weighted: Tensor) -> None:
        """Add the diagonal."""
        self.sum += (weighted * jacobian).sum((0, 1))

    def root(self, prior: Tensor) -> dict[str, Tensor]:
        """Return the standard deviations."""
        return {"scale": self._positive(self.sum + prior).rsqrt()}

    def spectrum(self, prior: Tensor) -> Tensor:
        """Return the ratios of the curvatures."""
        return self.sum / self._positive(prior)


class DenseBlock(Block):
    r"""$J^\top \Lambda J$, or $\sum g g^\top$ of a bias; the root is Cholesky's of the inverse."""

    def _zeros(self, zeros: Tensor) -> Any:
        return zeros.new_zeros(2 * [len(zeros)])

    def add(self, jacobian: Tensor, weighted: Tensor) -> None:
        r"""Add $J^\top \Lambda J$."""
        self.sum += weighted.flatten(0, 1).T @ jacobian.flatten(0, 1)

    def root(self, prior: Tensor) -> dict[str, Tensor]:
        """Return the lower-triangular root of the covariance."""
        precision = 0.5 * (self.sum + self.sum.T) + torch.diag(prior)
        curvatures = torch.linalg.eigvalsh(precision)
        rounding = len(precision) * torch.finfo(precision.dtype).eps * curvatures[-1].abs()
        self._positive(curvatures - rounding, curvatures)
        normal = dist.MultivariateNormal(torch.zeros_like(prior), precision_matrix=precision)
        return {"scale_tril": normal.scale_tril}

    def spectrum(self, prior: Tensor) -> Tensor:
        r"""Return eigenvalues of $h^{-1/2} H h^{-1/2}$."""
        root = self._positive(prior).sqrt()
        return torch.linalg.eigvalsh(self.sum / torch.outer(root, root)).clamp(min=0)


class KroneckerBlock(Block):
    r"""$G \otimes A = Q \Lambda_G Q^\top \otimes P \Lambda_A P^\top$ of one kernel.

    The covariance is $Q (S \circ E) P^\top$ with $S_{ij} = (\Lambda_{G,i} \Lambda_{A,j} + \bar
    h)^{-1/2}$ for the prior's mean curvature.
    """

    def _zeros(self, zeros: Tensor) -> Any:
        return [0.0, 0.0]

    def add_factors(self, out: Any = None, inner: Any = None) -> None:
        r"""Add $\sum g g^\top$ and $\sum a a^\top$."""
        self.sum = [self.sum[0] + out, self.sum[1] + inner]

    def scale(self, factor: float, examples: float) -> None:
        """Weight G up to the whole data, and average A over the examples."""
        self.sum = [self.sum[0] * factor, self.sum[1] / examples]

    def root(self, prior: Tensor) -> dict[str, Tensor]:
        """Return Q, P and S."""
        (out, left), (inner, right) = map(_eigen, self.sum)
        scale = (torch.outer(out, inner) + self._positive(prior).mean()).rsqrt()
        return {"out": left, "inner": right, "scale": scale}

    def spectrum(self, prior: Tensor) -> Tensor:
        r"""Return $\Lambda_{G,i} \Lambda_{A,j} / \bar h$."""
        (out, _), (inner, _) = map(_eigen, self.sum)
        return torch.outer(out, inner) / self._positive(prior).mean()


def _require_factors(batch: Linearization) -> dict[str, tuple[Tensor, Tensor | None]]:
    missing = batch.not_in_layers()
    if missing:
        raise ValueError(
            "structure='kron' needs every latent to be once the weight or bias of a linear or "
            f"2-D convolution layer without groups, got {', '.join(missing)}; use "
            "structure='diag' or 'last_layer'"
        )
    return batch.kronecker_factors()


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp(min=0), vectors  # rounding leaves negative ones


def _hessian(model: Any, guide: Any, x: Any, y: Tensor, fraction: float) -> Tensor:
    """Return the exact Hessian of one batch's part of the negative log joint."""
    neg_log_joint = Trace_ELBO().differentiable_loss(model, guide, x, y, fraction)
    (gradient,) = torch.autograd.grad(neg_log_joint, guide.loc, create_graph=True)
    return jacobian_of(gradient, guide.loc)


def _warn_of_draws(model: Any, guide: Laplace, x: Rows, y: Tensor) -> None:
    """Warn where draws of the weights lose more than 0.1 nats an example against the tangent."""
    x, y = x[:_CHECKED], y[:_CHECKED]
    devices = [guide.loc.device] if guide.loc.is_cuda else []
    centre = guide.latents.constrain(guide.loc.detach())

    def run(draw: dict[str, Tensor]) -> dict[str, Tensor]:
        with substituted(model, draw):
            outputs = run_network(model.network, x)
        return {"outputs": getattr(outputs, "logits", outputs)}

    def neg_log_likelihood(outputs: Tensor) -> float:
        """Return that of the mixture over outputs ``[S, n, ...]``, per example."""
        with substituted(model, centre):
            observed = model.likelihood(outputs.flatten(0, 1))
        target = model.likelihood.prepare(y, outputs).reshape(len(y), *observed.event_shape)
        repeated = target.repeat(len(outputs), *[1] * (target.dim() - 1))
        observed, repeated = model.likelihood.without_ignored(observed, repeated)
        by_sample = observed.log_prob(repeated).unflatten(0, outputs.shape[:2])
        return -(by_sample.logsumexp(0) - math.log(len(outputs))).mean().item()

    with torch.random.fork_rng(devices), pyro.validation_enabled(False), evaluating(model):
        torch.manual_seed(0)
        with torch.no_grad():
            draws = over_draws(run, guide.sample_posterior(_DRAWS))["outputs"]
            by_draws = neg_log_likelihood(draws)
            by_tangent = neg_log_likelihood(guide.output_moments(model, x).draw(_DRAWS))
    if not by_draws <= by_tangent + _NATS:
        warnings.warn(LinearizationWarning(by_draws, by_tangent), stacklevel=4)


def _bounded(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches, a bounded number of examples at once."""
    for x, y in batches:
        x, y = as_inputs(x), tensor("y", y)
        if len(x) != len(y):
            raise ValueError(f"data must have equally many x and y, got {len(x)} and {len(y)}")
        if len(x):
            yield from zip(x.split(_EXAMPLES), y.split(_EXAMPLES), strict=True)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
