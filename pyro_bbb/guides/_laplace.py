# SPDX-License-Identifier: Apache-2.0
r"""Laplace's approximation: a Normal at the MAP, with the curvature of the log joint there.

$$q(z) = N(\hat z, H^{-1}), \qquad \hat z = \arg\max_z \ln p(D, z), \qquad
  H = -\nabla^2 \ln p(D, \hat z)$$

for all latents in unconstrained space (MacKay 1992, "A Practical Bayesian Framework for
Backpropagation Networks"). By default H is the Gauss-Newton matrix $J^\top \Lambda J$ plus the
prior's curvature. J are the derivatives of an example's outputs by the latents, $\Lambda$ the
Hessian of its negative log-likelihood in the outputs (Immer et al. 2021, equation 6). With
the $a_t$ and $g_{kt}$ of ``linearization.py``, a layer's block of the curvature is

| structure | sum over examples |
|---|---|
| full | $J^\top \Lambda J$ |
| diagonal | $\mathrm{diag}(J^\top \Lambda J)$, of one position: $(\Lambda g)^\top g\; a^2$ |
| Kronecker | $\big(\sum g g^\top\big) \otimes \frac{1}{\#}\sum a a^\top$, KFAC-expand |

(Martens and Grosse 2015; Eschenhagen et al. 2023). The prior's curvature $\tau h$ is taken as that
of independent Normals: h is the second derivative of its negative log-density; where this is not
positive (a scale mixture between its widths, a Laplace distribution) the slope from 0,
$h = (-\ln p)'(z) / z$, which for a scale mixture of Normals is the expected precision given z.

$\tau$ maximises the evidence at the point, `TotalCurvature.best_prior_factors`: after training, or
also during it (Immer et al. 2021, "Scalable marginal likelihood estimation for model selection in
deep learning", Algorithm 1). The model keeps its prior $N(m, 1/h)$; the point gets the log-density
$\ln q = \frac{\tau - 1}{2} \sum_j h_j (z_j - m_j)^2$, so that $\ln q - \ln p$ in the objective is
$-\ln N(z \mid m, 1 / (\tau h))$ up to a constant.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import pyro
import torch
from pyro import distributions as dist
from pyro import poutine
from pyro.infer import Trace_ELBO
from torch import Tensor

from pyro_bbb._param_store import own_store
from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.inputs import Rows, as_inputs, each, tensor_of, weight_of
from pyro_bbb._utils.pages import read_on
from pyro_bbb._utils.validation import kind, one_of, tensor
from pyro_bbb.distributions.normal import fixed_normal
from pyro_bbb.guides._autoguides import PointThenNormal
from pyro_bbb.guides._base import as_batches
from pyro_bbb.guides.covariance import CovariancePart, Dense, Diagonal, Kronecker, LateTensors
from pyro_bbb.guides.initial_values import InitLoc
from pyro_bbb.guides.linearization import (
    Head,
    LayerUse,
    LayerUses,
    jacobians,
    network_outputs,
    outputs_and_head,
    root_of,
)
from pyro_bbb.latents import over_draws, role_of, sample_names, substituted, unseen

Batch: TypeAlias = tuple[Any, Tensor]
STRUCTURES = ("full", "kron", "diag", "last_layer", "last_layer_kron")
CURVATURES = ("ggn", "hessian")
_MAX_LATENTS = 4096
_EXAMPLES = 256  # in one graph
_LOG_FACTORS = (-15.0, 15.0)  # of the prior's precision
_PARTS = 10  # of a training, after each of which the prior is chosen
_CHOOSING = 2048  # examples that choose it then
_CHECKED, _DRAWS, _NATS = 64, 32, 0.1  # of the comparison of draws with the tangent


class LinearizationWarning(UserWarning):
    """Warning of `Laplace`: draws of the weights describe the training data worse than the tangent.

    Args:
        draws: mean negative log-likelihood of training examples by draws of the weights, nats.
        linearized: the same by the tangent.
    """

    def __init__(self, draws: float, linearized: float) -> None:
        self.draws: float = draws
        self.linearized: float = linearized
        super().__init__(
            f"draws of the weights give training examples {draws:.3g} nats each (negative "
            f"log-likelihood), the linearised network {linearized:.3g}: use "
            f"predict(..., linearized=True). {read_on('fidelity')}"
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
            with random weights; the others stay points. ``"last_layer_kron"``: as ``"kron"``, of
            that layer alone.
        curvature: ``"ggn"`` is Gauss-Newton's. It is positive for Normal and class likelihoods with
            Normal priors at any point. ``"hessian"`` is the exact one, of structure ``"full"``,
            positive at a maximum only.
        optimize_prior: whether `approximate` multiplies the prior's standard deviations by the one
            factor of largest marginal likelihood, `prior_scale`; the point stays. ``"layer"``: by
            one for each layer, of structures ``"kron"`` and ``"diag"``. ``"online"``: in `fit`
            also after each tenth of the epochs, by at most 2,048 examples, and the point is trained
            on under that prior; by layer where the structure is one of these two. The first tenth
            is without prior. It needs fixed Normal priors and at least two epochs.
        init_loc: initial point, see `AutoSoftplusNormal`.

    Raises:
        TypeError: the model is not a `BayesianModel`.
        ValueError: an unknown name, options that exclude each other, or more than 4,096 latents
            in one matrix.
    """

    prior_scale: Tensor
    online_prior: Any

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        structure: str = "full",
        curvature: str = "ggn",
        optimize_prior: bool | str = False,
        init_loc: InitLoc | None = None,
    ) -> None:
        if not hasattr(model, "num_data"):
            raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
        super().__init__(model, init_loc=init_loc)
        self._structure = one_of("structure", structure, STRUCTURES)
        self._curvature = one_of("curvature", curvature, CURVATURES)
        if isinstance(optimize_prior, str):
            one_of("optimize_prior", optimize_prior, ("layer", "online"))
        else:
            kind("optimize_prior", optimize_prior, bool)
        if optimize_prior == "layer" and structure not in ("kron", "diag"):
            raise ValueError(
                "optimize_prior='layer' has structure='kron' or 'diag', got "
                f"structure={structure!r}; use optimize_prior=True"
            )
        self._optimize_prior = optimize_prior
        if curvature == "hessian" and (structure != "full" or optimize_prior):
            raise ValueError(
                "curvature='hessian' has structure='full' and no optimize_prior, got "
                f"structure={structure!r}, optimize_prior={optimize_prior!r}; use curvature='ggn'"
            )
        self.register_buffer("prior_scale", torch.ones(()))
        self.online_prior = LateTensors(loc=None, change=None)  # m and (tau - 1) h
        self._find_declared()
        if optimize_prior == "online":
            self._normal_priors()

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
        layers = self._prior_layers()
        factors = total.best_prior_factors(layers) if self._optimize_prior else [1.0] * len(layers)
        prior = total.prior * self._by_latent(factors)
        roots = [block.root(prior[block.where]) for block in total.blocks]
        for part, tensors in zip(self.covariance, roots, strict=True):
            part.set(**{name: value.to(self.loc) for name, value in tensors.items()})
        self.prior_scale.copy_(torch.tensor(factors).rsqrt().view_as(self.prior_scale))
        self.online_prior.forget()
        _warn_of_draws(self.model, self, *first)

    def reset(self) -> None:
        super().reset()
        self.prior_scale.fill_(1.0)
        self.online_prior.forget()

    @property
    def stackable(self) -> bool:
        return self._optimize_prior != "online"

    def before_epoch(self, epoch: int, epochs: int, data: Any) -> None:
        """Choose the prior of the epochs that follow, with ``optimize_prior="online"``."""
        if self._optimize_prior != "online":
            return
        if epochs < 2:
            raise ValueError(f"optimize_prior='online' needs epochs of at least 2, got {epochs}")
        layers = self._prior_layers()
        if epoch == 0:
            factors = [0.0] * len(layers)
        elif _PARTS * epoch // epochs > _PARTS * (epoch - 1) // epochs:
            total = self._total(_bounded(as_batches(data), _CHOOSING))
            factors = total.best_prior_factors(layers)
        else:
            return
        loc, precision = self._normal_priors()
        change = (self._by_latent(factors).to(loc) - 1) * precision
        if self.online_prior.loc is None:
            self.online_prior.set(loc=loc, change=change)
        else:  # in place, where a captured step reads it
            self.online_prior.change.copy_(change)
        self.prior_scale.copy_(torch.tensor(factors).rsqrt().view_as(self.prior_scale))

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        prior = self.online_prior
        if prior.loc is None or not self.is_point:
            return super().get_posterior(*args, **kwargs)
        log_ratio = 0.5 * (self.loc - prior.loc).square() @ prior.change
        return dist.Delta(self.loc, log_ratio, event_dim=1)

    def _normal_priors(self) -> tuple[Tensor, Tensor]:
        """Return means and precisions ``[D]`` of the priors, 0 for latents that stay points."""
        with own_store(self.model), unseen(self.model), torch.enable_grad():
            sites = poutine.trace(self.model.draw_latents).get_trace().nodes
        loc, precision = (torch.zeros_like(self.loc.detach()) for _ in range(2))
        for part in self.covariance:
            for name in self._latents.within(part.where):
                normal = fixed_normal(sites[name]["fn"]) if name in sites else None
                if normal is None:
                    raise ValueError(
                        f"optimize_prior='online' needs a fixed Normal prior, {name} has another; "
                        "use optimize_prior=True"
                    )
                where = self._latents.slices[name]
                loc[where] = normal[0].flatten()
                precision[where] = normal[1].flatten() ** -2
        return loc, precision

    def _by_latent(self, factors: list[float]) -> Tensor:
        """Return the factor of each latent's prior precision, ``[D]``."""
        tau = self.loc.new_ones(self.latent_dim, dtype=torch.float64)
        for ranges, factor in zip(self._prior_layers(), factors, strict=True):
            for where in ranges:
                tau[where] = factor
        return tau

    def _total(self, batches: Iterable[Batch]) -> TotalCurvature:
        """Return the curvature of the whole data, in float64."""
        model, guide = copy.deepcopy((self.model, self))
        guide.reset()
        model.double().requires_grad_(False)  # derivatives are by the latents alone
        guide.double()
        total, count = TotalCurvature(guide), 0
        with evaluating(model), pyro.validation_enabled(False):
            for x, y in batches:
                fraction = len(x) / model.num_data  # of the prior
                args = (model, guide, each(x, _double), _double(y), fraction)
                if self._curvature == "hessian":
                    neg_log_joint = Trace_ELBO().differentiable_loss(*args)
                    (slope,) = torch.autograd.grad(neg_log_joint, guide.loc, create_graph=True)
                    total.blocks[0].sum += _jacobian(slope, guide.loc)
                else:
                    total.add(Linearization(*args))
                count += len(x)
        total.finish(model.num_data / count)
        return total

    def _prior_layers(self) -> list[list[slice]]:
        """Return ranges of the latents whose prior has one factor, by layer or all together."""
        if not self._has_layers:
            return [[part.where for part in self.covariance]]
        layers: dict[str, list[slice]] = {}
        for name, where in self._latents.slices.items():
            layers.setdefault(name.rpartition(".")[0], []).append(where)
        return list(layers.values())

    @property
    def _has_layers(self) -> bool:
        """Return whether each layer's prior has its own factor."""
        layered = self._structure in ("kron", "diag")
        return layered and self._optimize_prior in ("layer", "online")

    @property
    def by_layer(self) -> list[str]:
        """Names of latents whose curvature is computed from the uses of their layers."""
        if self._structure == "last_layer_kron":
            return self._last_layer()
        return list(self._latents) if self._structure in ("kron", "diag") else []

    def _unknown_parts(self) -> list[CovariancePart]:
        slices = self._latents.slices
        if self._has_layers:
            self.prior_scale = self.prior_scale.new_ones(len(self._prior_layers()))
        everything = slice(0, self.latent_dim)
        if self._structure == "diag":
            return [Diagonal(everything)]
        if self.by_layer:
            return [
                Diagonal(slices[x.name])
                if x.transform is not None or x.role == "likelihood"
                else (Kronecker if len(x.shape) > 1 else Dense)(slices[x.name])
                for x in map(self._latents.__getitem__, self.by_layer)
            ]
        if self._structure == "last_layer":
            layer = [slices[name] for name in self._last_layer()]
            everything = slice(layer[0].start, layer[-1].stop)
        if everything.stop - everything.start > _MAX_LATENTS:
            raise ValueError(
                f"structure={self._structure!r} is for at most {_MAX_LATENTS:,} latents in one "
                f"matrix, got {everything.stop - everything.start:,}; use structure='kron', "
                "'diag', 'last_layer' or 'last_layer_kron'"
            )
        return [Dense(everything)]

    def _last_layer(self) -> list[str]:
        """Return site names of the last layer with random weights."""
        layers = (
            [f"{path}.{name}" for name in sample_names(m) if role_of(name) != "prior"]
            for path, m in self.model.named_modules()
            if hasattr(m, "_pyro_samples") and path.startswith("network")
        )
        *_, last = [[name for name in layer if name in self._latents] for layer in layers if layer]
        return last


class TotalCurvature:
    """Curvature of all data: a block for each part of the covariance, and the prior's diagonal."""

    def __init__(self, guide: Any) -> None:
        self.guide, zeros = guide, torch.zeros_like(guide.loc.detach())
        block_types = {Dense: DenseBlock, Diagonal: DiagonalBlock, Kronecker: KroneckerBlock}
        self.kron = guide._structure in ("kron", "last_layer_kron")
        owners = guide.by_layer if self.kron else [""]
        pairs = zip(guide.covariance, owners, strict=True)
        curvature = guide._curvature
        self.blocks = [block_types[type(p)](p.where, name, curvature) for p, name in pairs]
        self.slope, self.prior = zeros.clone(), zeros.clone()  # of all but the network
        self.counted = 0.0
        self.coupled: bool | None = None  # not yet known

    def add(self, batch: Linearization) -> None:
        """Add the curvature of a batch."""
        self.slope += batch.by_z.detach()
        self.counted += float(batch.weight.sum())
        if self.coupled is None:
            self.coupled = self._is_coupled(batch)
        self.prior += 0.0 if self.coupled else batch.diagonal_of_rest
        if self.kron:
            factors = batch.kronecker_factors()
            for block in self.blocks:
                if block.name in factors:
                    block.add_factors(*factors[block.name])
            return
        (block,) = self.blocks
        if isinstance(block, DiagonalBlock) and not batch.not_in_layers():
            latents = self.guide.latents  # no derivative by all weights is made
            zeros = latents.unravel(torch.zeros_like(self.prior))
            block.sum = block.sum + latents.ravel(zeros | batch.diagonal())
            return
        if isinstance(block, DenseBlock) and (head := batch.head(block.where)):
            block.add_head(head, batch.curvature)
        else:
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

    def best_prior_factors(self, layers: list[list[slice]]) -> list[float]:
        r"""Return the factor $\tau$ of each layer's prior precision that maximises the evidence.

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
        spectra = {b.where.start: b.spectrum(self.prior[b.where]) for b in self.blocks}
        if self.guide._structure == "diag":  # one block, of an entry for each latent
            spectra = {w.start: spectra[0][w] for ranges in layers for w in ranges}
        factors = []
        for ranges in layers:
            curvatures = torch.cat([spectra[where.start].flatten() for where in ranges])
            square = sum((self.slope[w].square() / self.prior[w]).sum() for w in ranges)
            objective = partial(_neg_log_evidence, float(square), curvatures)
            optimum = minimize_scalar(objective, bounds=_LOG_FACTORS, method="bounded")
            factors.append(math.exp(optimum.x))
        return factors

    def _is_coupled(self, batch: Linearization) -> bool:
        """Return whether the Hessian has entries besides J's and the diagonal."""
        structure = self.guide._structure
        # the Hessian of the rest is diagonal if its product with random signs is the diagonal's
        generator = torch.Generator().manual_seed(0)
        random = torch.randint(2, batch.by_z.shape, generator=generator)
        signs = (2.0 * random - 1).to(batch.by_z)
        if torch.allclose(batch.rest_times(signs), signs * batch.diagonal_of_rest):
            return structure == "full" and bool(self.guide.latents.of_role("likelihood"))
        if structure != "full":
            raise ValueError(
                f"structure={structure!r} needs priors of independent weights, got one with "
                "latents of its own; use structure='full'"
            )
        return True


def _neg_log_evidence(square: float, curvatures: Tensor, log_factor: float) -> float:
    factor = math.exp(log_factor)
    log_det = float((curvatures + factor).log().sum()) - len(curvatures) * log_factor
    return 0.5 * (factor * square + log_det)


# --- a part of the covariance ---


class Block:
    """Curvature of the likelihood for one part of the covariance; the base of its structures."""

    sum: Any = 0.0

    def __init__(self, where: slice, name: str, curvature: str) -> None:
        self.where, self.name, self.curvature = where, name, curvature

    def add(self, jacobian: Tensor, weighted: Tensor) -> None:
        r"""Add that of J ``[n, K, d]``, with $\Lambda J$."""

    def add_factors(self, *factors: Tensor) -> None:
        r"""Add $\sum g g^\top$ of a bias, for a kernel also $\sum a a^\top$."""
        self.sum = self.sum + factors[0]

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
    r"""$\lambda = \mathrm{diag}(J^\top \Lambda J)$; deviations are $(\lambda + h)^{-1/2}$."""

    def add(self, jacobian: Tensor, weighted: Tensor) -> None:
        self.sum = self.sum + (weighted * jacobian).sum((0, 1))

    def root(self, prior: Tensor) -> dict[str, Tensor]:
        return {"scale": self._positive(self.sum + prior).rsqrt()}

    def spectrum(self, prior: Tensor) -> Tensor:
        return self.sum / self._positive(prior)


class DenseBlock(Block):
    r"""$J^\top \Lambda J$, or $\sum g g^\top$ of a bias; the root is Cholesky's of the inverse.

    Until `scale` only the lower triangle of the sum counts.
    """

    def add(self, jacobian: Tensor, weighted: Tensor) -> None:
        self.sum = self.sum + weighted.flatten(0, 1).T @ jacobian.flatten(0, 1)

    def add_head(self, head: Head, curvature: Tensor) -> None:
        """Add that of a last layer, whose J is not made."""
        if isinstance(self.sum, float):
            size = self.where.stop - self.where.start
            self.sum = curvature.new_zeros(size, size)
        head.add_curvature(self.sum, curvature)

    def scale(self, factor: float, examples: float) -> None:
        lower = self.sum.tril()
        self.sum = factor * (lower + lower.tril(-1).mT)

    def root(self, prior: Tensor) -> dict[str, Tensor]:
        precision = self.sum + torch.diag(prior)
        # L of a reversed H gives the upper-triangular U with H = U U^T, and H^{-1} = U^{-T} U^{-1}
        reverse, failed = torch.linalg.cholesky_ex(precision.flip(0, 1))
        unit = torch.eye(len(prior), dtype=prior.dtype, device=prior.device)
        root = torch.linalg.solve_triangular(reverse.flip(0, 1).mT, unit, upper=False)
        rounding = len(precision) * torch.finfo(precision.dtype).eps
        # the smallest curvature is at least 1 / |root|^2, the largest at most |H|
        if failed or not root.square().sum() * rounding * precision.norm() < 1:
            curvatures = torch.linalg.eigvalsh(precision)
            self._positive(curvatures - rounding * curvatures[-1].abs(), curvatures)
        return {"scale_tril": root}

    def spectrum(self, prior: Tensor) -> Tensor:
        root = self._positive(prior).sqrt()  # the eigenvalues of h^{-1/2} H h^{-1/2}
        return torch.linalg.eigvalsh(self.sum / torch.outer(root, root)).clamp(min=0)


class KroneckerBlock(Block):
    r"""$G \otimes A = Q \Lambda_G Q^\top \otimes P \Lambda_A P^\top$ of one kernel.

    The covariance is $Q (S \circ E) P^\top$ with $S_{ij} = (\Lambda_{G,i} \Lambda_{A,j} + \bar
    h)^{-1/2}$ for the prior's mean curvature.
    """

    sum: Any = (0.0, 0.0)

    def add_factors(self, *factors: Tensor) -> None:
        self.sum = self.sum[0] + factors[0], self.sum[1] + factors[1]

    def scale(self, factor: float, examples: float) -> None:
        self.sum = self.sum[0] * factor, self.sum[1] / examples  # A is a mean over examples

    def root(self, prior: Tensor) -> dict[str, Tensor]:
        (out, left), (inner, right) = map(_eigen, self.sum)
        scale = (torch.outer(out, inner) + self._positive(prior).mean()).rsqrt()
        return {"out": left, "inner": right, "scale": scale}

    def spectrum(self, prior: Tensor) -> Tensor:
        (out, _), (inner, _) = map(_eigen, self.sum)
        return torch.outer(out, inner) / self._positive(prior).mean()


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    return values.clamp(min=0), vectors  # rounding leaves negative ones


# --- one batch ---


class Linearization:
    """The negative log joint of one batch, with the network cut off from the rest of the model.

    Model and guide are in double precision. The `uses` are those of the guide's `by_layer`.
    """

    def __init__(self, model: Any, guide: Any, x: Rows, y: Tensor, fraction: float) -> None:
        self.model, self.guide, self.x = model, guide, x
        outputs: list[Tensor] = []

        def cut(module: Any, inputs: Any, output: Any) -> Any:
            logits = tensor_of(output)
            outputs.extend([logits, logits.detach().requires_grad_()])
            if logits is output:
                return outputs[1]
            output = copy.copy(output)
            output.logits = outputs[1]
            return output

        at_point = poutine.trace(guide).get_trace(x, y, fraction)
        values = {name: at_point.nodes[name]["value"] for name in guide.site_names}
        handle = model.network.register_forward_hook(cut)
        with LayerUses({name: values[name] for name in guide.by_layer}) as layers:
            joint = poutine.trace(poutine.replay(model, trace=at_point)).get_trace(x, y, fraction)
        handle.remove()
        neg_log_joint = at_point.log_prob_sum() - joint.log_prob_sum()
        f, cut_off = outputs
        # slopes in the outputs, and of all but the network in the latents [D]
        self.by_f, self.by_z = torch.autograd.grad(
            neg_log_joint, (cut_off, guide.loc), create_graph=True, materialize_grads=True
        )
        self.f, self.uses = f.flatten(1), layers.uses  # f is [n, K], a function of the latents
        rows = self.by_f.flatten(1).sum(0).unbind()
        # Lambda, [n, K, K]
        self.curvature = torch.stack([_gradient(row, cut_off).flatten(1) for row in rows], dim=2)
        self.diagonal_of_rest = self.rest_times(torch.ones_like(self.by_z))
        weight = weight_of(x)
        self.weight = self.f.new_ones(len(self.f)) if weight is None else weight

    @torch.no_grad()
    def head(self, where: slice) -> Head | None:
        """Return the last layer if a range of the latents is its weight and bias."""
        loc = self.guide.loc.detach()
        return outputs_and_head(self.model, self.guide.latents, loc, where, self.x)[1]

    def jacobians(self, where: slice) -> Iterator[tuple[Tensor, Tensor]]:
        r"""Yield J ``[n, K, d]`` by a range of latents and $\Lambda J$, for some examples each."""
        begin, loc = 0, self.guide.loc.detach()
        for jacobian in jacobians(self.model, self.guide.latents, loc, where, self.x):
            yield jacobian, self.curvature[begin : begin + len(jacobian)] @ jacobian
            begin += len(jacobian)

    def coupled(self) -> Tensor:
        r"""Return the Hessian ``[D, D]`` of all but the network, and its mixed terms with f.

        The network stands as its tangent; mixed terms come from latents of the likelihood.
        """
        slope = _jacobian(self.f.flatten(), self.guide.loc)
        mixed = slope.T @ _jacobian(self.by_f.flatten(), self.guide.loc)
        return mixed + mixed.T + _jacobian(self.by_z, self.guide.loc)

    def rest_times(self, vector: Tensor) -> Tensor:
        """Return the Hessian of all but the network times a vector."""
        return _gradient((self.by_z * vector).sum(), self.guide.loc).detach()

    def _pulled_back(
        self, vector: Tensor, uses: list[LayerUse]
    ) -> Iterator[tuple[LayerUse, Tensor]]:
        r"""Yield $J^\top v$ at each use's output, ``[n, out, positions]``, for v ``[n, K]``."""
        targets = [use.output for use in uses]
        grads = torch.autograd.grad((self.f * vector).sum(), targets, retain_graph=True)
        for use, by_output in zip(uses, grads, strict=True):
            yield use, use.gradients(by_output)

    def kronecker_factors(self) -> dict[str, tuple[Tensor, ...]]:
        r"""Return $\sum g g^\top$ and the sum over examples of the mean $a a^\top$, by site name.

        Biases have only the first.
        """
        if missing := self.not_in_layers():
            raise ValueError(
                f"structure={self.guide._structure!r} needs every latent to be once the weight or "
                "bias of a linear or 2-D convolution layer without groups, got "
                f"{', '.join(missing)}; use structure='diag' or 'last_layer'"
            )
        outer: dict[str, Any] = dict.fromkeys([use.weight for use in self.uses], 0.0)
        inside = []
        for use in self.uses:
            if use.output is self.f:  # g is a unit vector
                outer[use.weight] = self.curvature.sum(0)
            else:
                inside.append(use)
        for column in root_of(self.curvature).unbind(-1) if inside else ():  # Lambda = sum of c c^T
            for use, gradients in self._pulled_back(column, inside):
                g = gradients.movedim(1, 0).flatten(1)
                outer[use.weight] = outer[use.weight] + g @ g.T
        factors: dict[str, tuple[Tensor, ...]] = {}
        for use in self.uses:
            a = use.inputs.flatten(0, 1)
            repeated = self.weight.repeat_interleave(len(a) // len(self.weight))
            inner = (repeated * a.T) @ a / use.inputs.shape[1]
            factors[use.weight] = outer[use.weight], inner
            if use.bias is not None:
                factors[use.bias] = (outer[use.weight],)
        return factors

    def diagonal(self) -> dict[str, Tensor]:
        r"""Return the diagonal of $J^\top \Lambda J$ over all examples, by site name."""
        sums: dict[str, Any] = {}
        single: dict[str, Any] = {}  # of uses at one position, at the output, [n, out]
        values, vectors = torch.linalg.eigh(self.curvature)
        for value, vector in zip(values.unbind(-1), vectors.unbind(-1), strict=True):
            for use, g in self._pulled_back(vector, self.uses):
                if use.bias is not None:
                    sums[use.bias] = sums.get(use.bias, 0.0) + value @ g.sum(2).square()
                if g.shape[2] == 1:
                    square = value[:, None] * g[:, :, 0].square()
                    single[use.weight] = single.get(use.weight, 0.0) + square
                else:
                    squares = torch.einsum("n,noi->oi", value, (g @ use.inputs).square())
                    sums[use.weight] = sums.get(use.weight, 0.0) + squares
        for use in self.uses:
            if use.weight in single:  # the square of a product is the product of squares
                sums[use.weight] = single[use.weight].T @ use.inputs[:, 0].square()
        return sums

    def not_in_layers(self) -> list[str]:
        """Return names of the network's latents that are not once a weight or bias of a layer."""
        used = [name for use in self.uses for name in (use.weight, use.bias)]
        names = [name for name in self.guide.by_layer if role_of(name) != "likelihood"]
        return [name for name in names if used.count(name) != 1]


def _jacobian(values: Tensor, at: Tensor, rows: int = 256) -> Tensor:
    """Return derivatives ``[m, d]`` of a vector ``[m]`` by another ``[d]``."""
    slope = torch.zeros(len(values), len(at), dtype=at.dtype, device=at.device)
    units = torch.eye(len(values), dtype=at.dtype, device=at.device)
    for begin in range(0, len(values), rows) if values.requires_grad else ():
        chunk = slice(begin, begin + rows)
        (slope[chunk],) = torch.autograd.grad(
            values,
            at,
            units[chunk],
            retain_graph=True,
            is_grads_batched=True,
            materialize_grads=True,
        )
    return slope


def _gradient(value: Tensor, at: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(at)
    return torch.autograd.grad(value, at, retain_graph=True, materialize_grads=True)[0]


# --- the user's data ---


def _warn_of_draws(model: Any, guide: Laplace, x: Rows, y: Tensor) -> None:
    """Warn where draws of the weights lose more than 0.1 nats an example against the tangent."""
    x, y = x[:_CHECKED], y[:_CHECKED]
    devices = [guide.loc.device] if guide.loc.is_cuda else []
    centre = guide.latents.constrain(guide.loc.detach())

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
            weights = guide.sample_posterior(_DRAWS)
            draws = over_draws(lambda draw: {"": network_outputs(model, draw, x)}, weights)
            by_draws = neg_log_likelihood(draws[""])
            by_tangent = neg_log_likelihood(guide.output_moments(model, x).draw(_DRAWS))
    if not by_draws <= by_tangent + _NATS:
        warnings.warn(LinearizationWarning(by_draws, by_tangent), stacklevel=4)


def _bounded(batches: Iterable[Batch], most: float = math.inf) -> Iterator[Batch]:
    """Yield the batches until ``most`` examples are reached, a bounded number at once."""
    reached = 0
    for x, y in batches:  # to the end, as of `fit` an epoch that is read halfway is under way
        x, y = as_inputs(x), tensor("y", y)
        if len(x) != len(y):
            raise ValueError(f"data must have equally many x and y, got {len(x)} and {len(y)}")
        if len(x) and reached < most:
            yield from zip(x.split(_EXAMPLES), y.split(_EXAMPLES), strict=True)
        reached += len(x)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
