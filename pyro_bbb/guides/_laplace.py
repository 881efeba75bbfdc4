r"""Laplace's approximation: a Normal at the MAP, with the curvature of the log joint there.

$$q(z) = N(\hat z, H^{-1}), \qquad \hat z = \arg\max_z \ln p(D, z), \qquad
  H = -\nabla^2 \ln p(D, \hat z)$$

for all latents in unconstrained space (MacKay 1992, "A Practical Bayesian Framework for
Backpropagation Networks"). With the network $f$ replaced by its tangent $f(\hat z) + J(z - \hat z)$
in it, $H$ is the Gauss-Newton matrix $J^\top \Lambda J$, where $\Lambda$ is the Hessian of the
negative log-likelihood in the outputs, plus the prior's Hessian (Immer et al. 2021, "Improving
predictions of Bayesian neural nets via local linearization").
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoContinuous
from torch import Tensor, nn

from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.inputs import as_inputs, each
from pyro_bbb._utils.validation import tensor
from pyro_bbb.guides._autoguides import PrototypeFromLatents
from pyro_bbb.guides._joint_autoguides import JointAutoguide
from pyro_bbb.guides.latents import InitLoc

Batch: TypeAlias = tuple[Any, Tensor]
_MAX_LATENTS = 4096
_ROWS = 256  # of a matrix of derivatives at once


class NoModeError(ArithmeticError):
    """Error of `Laplace`: the point is no maximum of the log joint.

    Args:
        smallest: the smallest curvature there, which would have to be positive.
    """

    def __init__(self, smallest: float) -> None:
        self.smallest = smallest
        self.history: Any = None  # of the training, where `fit` raised it
        super().__init__(
            f"the point is no maximum of the log joint: its smallest curvature is {smallest:.3g}, "
            "which must be positive. Train longer, with a lower learning rate at the end or a "
            "smooth activation (Tanh, SiLU); or use laplace_ggn"
        )


class Laplace(JointAutoguide, AutoContinuous, PrototypeFromLatents):
    """Point in training; a Normal around it once `approximate` has seen the data.

    `fit` calls `approximate` at its end. The curvature is of the full data, in float64.

    Args:
        model: a `BayesianModel` of at most 4,096 latents.
        init_loc: initial point, see `AutoSoftplusNormal`.

    Raises:
        TypeError: the model is no `BayesianModel`.
        ValueError: it has more latents.
    """

    scale_tril: Tensor | None
    _examples = 256  # in one graph

    def __init__(self, model: Callable[..., Any], *, init_loc: InitLoc | None = None) -> None:
        if not hasattr(model, "num_data"):
            raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
        super().__init__(model, init_loc=init_loc)
        self.register_buffer("scale_tril", None)
        self._find_declared()

    def approximate(self, data: Batch | Iterable[Batch]) -> None:
        """Sets the covariance to the inverse Hessian of the negative log joint at the point.

        Args:
            data: the training set, as one pair ``(x, y)`` or as batches of such. Where examples
                are left out, the others are weighted up.

        Raises:
            ValueError: no examples.
            NoModeError: the point is no maximum of the log joint.
        """
        precision = self._precision(_batches(data))
        curvatures = torch.linalg.eigvalsh(precision)
        rounding = len(precision) * torch.finfo(precision.dtype).eps * curvatures[-1].abs()
        if not curvatures[0] > rounding:
            raise NoModeError(curvatures[0].item())
        posterior = dist.MultivariateNormal(self.loc.double(), precision_matrix=precision)
        self.scale_tril = posterior.scale_tril.detach().to(self.loc)

    def reset(self) -> None:
        """Goes back to the point, for further training."""
        self.scale_tril = None

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """The distribution of all unconstrained latents."""
        if self.scale_tril is None:
            return dist.Delta(self.loc).to_event(1)
        return dist.MultivariateNormal(self.loc, scale_tril=self.scale_tril)

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Independent samples of all latents, ``[num_samples, ...]`` by site name, no gradient.

        Raises:
            RuntimeError: not yet approximated.
        """
        self._known_scale()
        return super().sample_posterior(num_samples)

    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Posterior quantiles, ``[len(quantiles), ...]`` by site name.

        Raises:
            RuntimeError: not yet approximated.
        """
        self._known_scale()
        return super().quantiles(quantiles, *args, **kwargs)

    def _known_scale(self) -> Tensor:
        if self.scale_tril is None:
            raise RuntimeError(
                "the guide is still a point: call guide.approximate((x, y)) with the training "
                "set, as fit does at its end; guide.median() has the point"
            )
        return self.scale_tril

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return self.loc, None if self.scale_tril is None else self.scale_tril.norm(dim=-1)

    def _precision(self, batches: Iterable[Batch]) -> Tensor:
        """The Hessian of the negative log joint over all data, float64."""
        parts = _in_parts(batches, self._examples)
        first = next(parts, None)
        if first is None:
            raise ValueError("data must hold at least one example")
        if not self._complete:
            self._find_latents(*first)
        model, guide = copy.deepcopy((self.model, self))
        guide.reset()
        model.double()
        guide.double()
        total, count = torch.zeros(2 * [self.latent_dim], dtype=torch.float64).to(guide.loc), 0
        with evaluating(model), pyro.validation_enabled(False):
            for x, y in chain([first], parts):
                fraction = len(x) / model.num_data  # of the prior
                total += self._curvature(model, guide, (each(x, _double), _double(y), fraction))
                count += len(x)
        total *= model.num_data / count
        return 0.5 * (total + total.T)

    def _curvature(self, model: Any, guide: Any, args: tuple[Any, ...]) -> Tensor:
        """The Hessian of one batch's part of the negative log joint."""
        neg_log_joint = Trace_ELBO().differentiable_loss(model, guide, *args)
        (gradient,) = torch.autograd.grad(neg_log_joint, guide.loc, create_graph=True)
        return _derivatives(gradient, guide.loc)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self.loc = nn.Parameter(self._init_loc())

    def _check_size(self, latent_dim: int) -> None:
        if latent_dim > _MAX_LATENTS:
            raise ValueError(
                f"laplace is for at most {_MAX_LATENTS:,} latents, the model has {latent_dim:,}; "
                "use one of low_rank, softplus_normal, ensemble"
            )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}scale_tril")
        self.scale_tril = None if saved is None else saved.to(self.loc)
        super()._load_from_state_dict(state_dict, prefix, *args)


class LaplaceGGN(Laplace):
    """Laplace's approximation with the Gauss-Newton curvature: the network replaced by its tangent.

    Where likelihood and prior are log-concave (Normal and class likelihoods, Normal priors) this
    is positive definite at any point, so that it needs neither a converged nor a smooth network.
    Its samples are meant for the tangent. `predict` passes them through the network itself, where
    they underfit if the data leave many weights undetermined (Immer et al. 2021).
    """

    _examples = 64  # an output's derivative costs a pass over all of them

    def _curvature(self, model: Any, guide: Any, args: tuple[Any, ...]) -> Tensor:
        """The Hessian where the network's second derivative is left out, by the chain rule."""
        z, outputs = guide.loc, []

        def cut(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            outputs.extend([output.flatten(), output.detach().flatten().requires_grad_()])
            return outputs[1].view_as(output)

        handle = model.network.register_forward_hook(cut)
        try:
            neg_log_joint = Trace_ELBO().differentiable_loss(model, guide, *args)
        finally:
            handle.remove()
        f, cut_off = outputs
        by_f, by_z = torch.autograd.grad(neg_log_joint, (cut_off, z), create_graph=True)
        slope = _derivatives(f, z)  # J
        mixed = slope.T @ _derivatives(by_f, z)  # where the likelihood has latents of its own
        return (
            slope.T @ _derivatives(by_f, cut_off) @ slope + mixed + mixed.T + _derivatives(by_z, z)
        )


def _derivatives(values: Tensor, at: Tensor) -> Tensor:
    """Derivatives ``[m, d]`` of a vector ``[m]`` by another ``[d]``."""
    slope = torch.zeros(len(values), len(at), dtype=at.dtype, device=at.device)
    rows = torch.eye(len(values), dtype=at.dtype, device=at.device)
    for begin in range(0, len(values), _ROWS) if values.requires_grad else ():
        chunk = slice(begin, begin + _ROWS)
        options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": True}
        (part,) = torch.autograd.grad(values, at, rows[chunk], **options)
        if part is not None:
            slope[chunk] = part
    return slope


def _in_parts(batches: Iterable[Batch], examples: int) -> Iterator[Batch]:
    """The batches, a bounded number of examples at once."""
    for x, y in batches:
        x = as_inputs(x)
        if len(x) != len(tensor("y", y)):
            raise ValueError(f"data must have equally many x and y, got {len(x)} and {len(y)}")
        if len(x):
            yield from zip(x.split(examples), y.split(examples), strict=True)


def _batches(data: Batch | Iterable[Batch]) -> Iterable[Batch]:
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor):
        return [data]
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise TypeError(f"data must be a pair (x, y) of tensors or batches of these, got {data!r}")
    return data


def _double(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x
