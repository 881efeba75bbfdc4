# SPDX-License-Identifier: Apache-2.0
r"""Laplace's approximation: a Normal at the MAP, with the curvature of the log joint there.

$$q(z) = N(\hat z, H^{-1}), \qquad \hat z = \arg\max_z \ln p(D, z), \qquad
  H = -\nabla^2 \ln p(D, \hat z)$$

for all latents in unconstrained space (MacKay 1992, "A Practical Bayesian Framework for
Backpropagation Networks"). By default H is the Gauss-Newton matrix, see ``gauss_newton.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import pyro
import torch
from pyro.infer import Trace_ELBO
from torch import Tensor

from pyro_bbb._handlers.sites import sample_names
from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.inputs import Rows, as_inputs, each
from pyro_bbb._utils.validation import kind, one_of, tensor
from pyro_bbb.guides._base import as_batches
from pyro_bbb.guides._joint_autoguides import PointThenNormal
from pyro_bbb.guides._laplace.check import warn_of_draws
from pyro_bbb.guides._laplace.gauss_newton import Linearization, jacobian_of
from pyro_bbb.guides._laplace.layerwise import moments_by_layer
from pyro_bbb.guides._laplace.sums import Sums
from pyro_bbb.guides.covariance import CovariancePart, Dense, Diagonal, Kronecker
from pyro_bbb.guides.initial_values import InitLoc
from pyro_bbb.latents import role_of

Batch: TypeAlias = tuple[Any, Tensor]
STRUCTURES = ("full", "kron", "diag", "last_layer")
CURVATURES = ("ggn", "hessian")
_MAX_LATENTS = 4096
_EXAMPLES = 256  # in one graph


class Laplace(PointThenNormal):
    """Point in training; a Normal around it once `approximate` has seen the data.

    `fit` calls `approximate` at its end. Of a network that is trained already (`bayesianize` keeps
    its weights) call it by yourself. The curvature is of the full data, in float64.

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
        TypeError: the model is no `BayesianModel`.
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
        """Sets the covariance to the inverse curvature of the negative log joint at the point.

        Args:
            data: the training set, as one pair ``(x, y)`` or as batches of such. Where examples
                are left out, the others are weighted up.

        Raises:
            ValueError: no examples; or a layer or prior for which the structure cannot be had.
            NoModeError: the curvature is not positive.
        """
        parts = _in_parts(as_batches(data))
        first = next(parts, None)
        if first is None:
            raise ValueError("data must hold at least one example")
        if not self._complete:
            self._find_latents(*first)
        sums = self._sums(chain([first], parts))
        factor = sums.best_prior_factor() if self._optimize_prior else 1.0
        found = [sums.tensors(i, factor) for i in range(len(self.covariance))]
        for part, tensors in zip(self.covariance, found, strict=True):
            part.set(**{name: value.to(self.loc) for name, value in tensors.items()})
        self.prior_scale.fill_(factor**-0.5)
        warn_of_draws(self.model, self, *first)

    def reset(self) -> None:
        """Goes back to the point, for further training."""
        super().reset()
        self.prior_scale.fill_(1.0)

    def _moments_by_layer(self, model: Any, x: Rows) -> tuple[Tensor, Tensor] | None:
        """Means and covariances of the tangent's outputs; none for other structures than kron."""
        if self._structure != "kron":
            return None
        self._require_scale()
        parts = dict(zip(self._latents.slices, self.covariance, strict=True))
        return moments_by_layer(model, self, parts, x)

    def _sums(self, batches: Iterable[Batch]) -> Sums:
        """The curvature of the whole data, float64."""
        model, guide = copy.deepcopy((self.model, self))
        guide.reset()
        model.double().requires_grad_(False)  # derivatives are by the latents alone
        guide.double()
        sums, count, watched = Sums(guide), 0, self._structure in ("kron", "diag")
        with evaluating(model), pyro.validation_enabled(False):
            for x, y in batches:
                fraction = len(x) / model.num_data  # of the prior
                args = (model, guide, each(x, _double), _double(y), fraction)
                if self._curvature == "hessian":
                    sums.totals[0] += _hessian(*args)
                else:
                    sums.add(Linearization(*args, watched=watched))
                count += len(x)
        sums.finish(model.num_data / count)
        return sums

    def _unknown_parts(self) -> list[CovariancePart]:
        ranges = self._latents.slices
        everything = slice(0, self.latent_dim)
        if self._structure == "diag":
            return [Diagonal(everything)]
        if self._structure == "kron":
            return [self._kron_part(name, where) for name, where in ranges.items()]
        if self._structure == "last_layer":
            own = [ranges[name] for name in self._last_layer()]
            everything = slice(own[0].start, own[-1].stop)
        if everything.stop - everything.start > _MAX_LATENTS:
            raise ValueError(
                f"structure={self._structure!r} is for at most {_MAX_LATENTS:,} latents in one "
                f"matrix, got {everything.stop - everything.start:,}; use structure='kron', "
                "'diag' or 'last_layer'"
            )
        return [Dense(everything)]

    def _kron_part(self, name: str, where: slice) -> CovariancePart:
        latent = self._latents[name]
        if latent.transform is not None or latent.role == "likelihood":
            return Diagonal(where)
        return Kronecker(where) if len(latent.shape) > 1 else Dense(where)

    def _last_layer(self) -> list[str]:
        """Site names of the last layer with random weights."""
        layers = (
            [f"{path}.{name}" for name in sample_names(part) if role_of(name) != "prior"]
            for path, part in self.model.named_modules()
            if hasattr(part, "_pyro_samples") and path.startswith("network")
        )
        *_, last = [[name for name in layer if name in self._latents] for layer in layers if layer]
        return last

    def _check_size(self, latent_dim: int) -> None:
        """Sizes are checked part by part."""


def _hessian(model: Any, guide: Any, x: Any, y: Tensor, fraction: float) -> Tensor:
    """The exact Hessian of one batch's part of the negative log joint."""
    neg_log_joint = Trace_ELBO().differentiable_loss(model, guide, x, y, fraction)
    (gradient,) = torch.autograd.grad(neg_log_joint, guide.loc, create_graph=True)
    return jacobian_of(gradient, guide.loc)


def _in_parts(batches: Iterable[Batch]) -> Iterator[Batch]:
    """The batches, a bounded number of examples at once."""
    for x, y in batches:
        x, y = as_inputs(x), tensor("y", y)
        if len(x) != len(y):
            raise ValueError(f"data must have equally many x and y, got {len(x)} and {len(y)}")
        if len(x):
            yield from zip(x.split(_EXAMPLES), y.split(_EXAMPLES), strict=True)


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
