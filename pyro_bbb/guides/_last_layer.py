# SPDX-License-Identifier: Apache-2.0
r"""The variational last layer: a Normal on the weights of a network's last layer alone.

Its outputs $z = W\phi + b$ for the trunk's features $\phi$ are Normal, so that the ELBO has a
closed form or bound, and a step draws nothing (Harrison et al. 2024, "Variational Bayesian Last
Layers", arXiv:2404.11599). Rows of $(W, b)$ are independent, each of covariance $L L^\top$ with

$$L = \mathrm{diag}(\sigma)\,(I + U), \qquad
  \mathrm{Var}\,z = \lVert L^\top (\phi, 1) \rVert^2,$$

$U$ strictly lower triangular and $\sigma = \mathrm{softplus}(\rho)$. As U is relative to
$\sigma$, an optimiser's step is as large for weights of any scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributions.transforms import SoftplusTransform

from pyro_bbb._handlers.kl_scale import scale_kl
from pyro_bbb._handlers.param_store import own_param, own_store
from pyro_bbb._handlers.substitute import substituted
from pyro_bbb._utils.inputs import Rows, at_least_single, run_network
from pyro_bbb._utils.validation import count, one_of, positive, probabilities
from pyro_bbb.distributions import softplus
from pyro_bbb.distributions.expectation import AtMean, ExpectedObservation
from pyro_bbb.guides._autoguides import INIT_SCALE
from pyro_bbb.guides._base import Guide
from pyro_bbb.guides.initial_values import InitLoc, initial_loc
from pyro_bbb.guides.tangent import OutputMoments
from pyro_bbb.latents import Site

COVARIANCES = ("shared", "per_output")


class HeadPart(NamedTuple):
    """Parameters of W, or of b given W, with k covariances: one, or one for each output."""

    loc: Tensor  # [out, in], or [out]
    scale: Tensor  # sigma, [k, in], or [k]
    lower: Tensor  # rows of U, [k, in, in], or the last, [k, in]


class LastLayer(Guide):
    """Normal of full covariance on the last layer, with a deterministic trunk.

    The head is the model's only latent layer, as ``bayesianize(network, where="head")`` leaves it;
    the trunk's parameters are trained with the guide. `fit` minimises the negative ELBO in closed
    form, for class likelihoods a bound of it, for a Normal prior; ``loss="trace"`` draws
    weights, for any prior and likelihood. `predict` runs the trunk once.

    Args:
        model: a `BayesianModel` whose network ends with a Bayesian linear layer.
        head: path of that layer in the network, such as ``"layers.2"``; ``None`` finds it.
        init_loc: initial means, see `AutoSoftplusNormal`.
        init_scale: initial standard deviation of every weight.
        covariance: ``"shared"`` by the rows of all outputs, as the exact posterior of a linear
            regression with one noise has it, or ``"per_output"``, at a cost per output.

    Raises:
        TypeError: the model is not a `BayesianModel`, or the head not a linear layer.
        ValueError: there is no such head, other latents than the head's, or an option out of range.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        head: str | None = None,
        init_loc: InitLoc | None = None,
        init_scale: float = INIT_SCALE,
        covariance: str = "shared",
    ) -> None:
        if not hasattr(model, "num_data"):
            raise TypeError(f"model must be a BayesianModel, got {type(model).__name__}")
        super().__init__(model, init_loc=init_loc)
        self._head, self._path = head, ""
        self._init_scale = positive("init_scale", init_scale)
        one_of("covariance", covariance, COVARIANCES)
        self._covariance = covariance
        for kind in ("locs", "rhos", "lowers"):
            self.add_module(kind, nn.ParameterDict())
        self._find_declared()

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw the head's weights, by site name: W, and b given W."""
        parts = self._parts()
        loc, factor = parts["weight"].loc, _factor(parts["weight"])
        row = dist.MultivariateNormal(loc, scale_tril=factor, validate_args=False)
        weight = pyro.sample(f"{self._path}.weight", row.to_event(1))
        draws = {f"{self._path}.weight": weight}
        if bias := parts.get("bias"):
            residual = (weight - loc).unsqueeze(-1)
            noise = torch.linalg.solve_triangular(factor, residual, upper=False).squeeze(-1)
            related = bias.loc + bias.scale * (noise * bias.lower).sum(-1)
            given = dist.Normal(related, bias.scale.expand_as(bias.loc)).to_event(1)
            draws[f"{self._path}.bias"] = pyro.sample(f"{self._path}.bias", given)
        return draws

    def in_closed_form(self, model: Callable[..., Any]) -> tuple[Any, Any]:
        """Return model and guide for the mean-field objective, which so is the ELBO without draws.

        Args:
            model: the model, or a function that calls it; of ``(x, y, kl_weight)``.

        Raises:
            ValueError: when run, there is no closed form for prior or likelihood, or the
                network's outputs are not the head's.
        """
        return partial(self._expected, model), self._at_means

    def _variance(self, features: Tensor) -> Tensor:
        """Return variances ``[..., out]`` of the head's outputs for its inputs ``[..., in]``."""
        parts = self._parts()
        (loc, scale, lower), bias = parts["weight"], parts.get("bias")
        rows = features.reshape(-1, features.shape[-1]).to(loc.dtype)
        own = (None, None) if bias is None else (bias.scale, bias.lower)
        with torch.autocast(loc.device.type, enabled=False):  # it is of the parameters' precision
            variance: Tensor = LastLayerVariance.apply(rows, scale, lower, *own)[0]  # [k, n]
        return variance.T.expand(-1, len(loc)).reshape(*features.shape[:-1], -1)

    @property
    def has_normal_outputs(self) -> bool:
        """Return whether the outputs are Normal: always."""
        return True

    @torch.no_grad()
    def output_moments(self, model: Any, x: Rows) -> OutputMoments:
        """Return moments of the outputs; the network is its own tangent."""
        with own_store(self), substituted(model, self.median()), self.observed_head() as variance:
            outputs = run_network(model.network, x)
            mean = getattr(outputs, "logits", outputs)
            return OutputMoments(at_least_single(mean), at_least_single(variance()))

    @contextmanager
    def observed_head(self) -> Iterator[Callable[[], Tensor]]:
        """Yield a function that returns the variances of the network's outputs inside."""
        seen: list[tuple[Tensor, Tensor, int]] = []
        outputs: list[Any] = []
        network: nn.Module = self.model.network
        handles = [
            self.model.get_submodule(self._path).register_forward_hook(
                lambda module, args, output: seen.append((args[0], output, output._version))
            ),
            network.register_forward_hook(lambda module, args, output: outputs.append(output)),
        ]
        try:
            yield lambda: self._variance(_features(seen, outputs))
        finally:
            for handle in handles:
                handle.remove()

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the means, by site name."""
        return {f"{self._path}.{name}": x.detach().clone() for name, x in self._kind("locs")}

    def quantiles(self, quantiles: Iterable[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return posterior quantiles, ``[len(quantiles), ...]`` by site name."""
        levels = torch.tensor(probabilities("quantiles", quantiles), dtype=torch.float64)
        z = torch.special.ndtri(levels).tolist()
        with torch.no_grad():
            return {
                name: torch.stack([q.loc + zq * q.variance.sqrt() for zq in z])
                for name, q in self._moments().items()
            }

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Return samples of the head, ``[num_samples, ...]`` by site name, no gradient."""
        with torch.no_grad():
            parts = self._parts()
            (loc, scale, lower), bias = parts["weight"], parts.get("bias")
            noise = loc.new_empty(count("num_samples", num_samples), *loc.shape).normal_()
            related = (noise.unsqueeze(-2) @ lower.mT).squeeze(-2)
            draws = {f"{self._path}.weight": loc + scale * (noise + related)}
            if bias:
                own, related = torch.randn_like(noise[..., 0]), (noise * bias.lower).sum(-1)
                draws[f"{self._path}.bias"] = bias.loc + bias.scale * (own + related)
        return draws

    def _expected(self, model: Callable[..., Any], *args: Any) -> Any:
        if not self.model.likelihood.is_standard:
            found = f"got {type(self.model.likelihood).__name__}; or fit(loss='trace')"
            raise ValueError(f"vbll needs a likelihood of pyro_bbb.likelihoods, {found}")
        with self.observed_head() as variance, _ExpectObservation(variance):
            return model(*args)

    def _at_means(self, x: Any, y: Any, kl_weight: float | Tensor) -> dict[str, Tensor]:
        with scale_kl(kl_weight):
            return {name: pyro.sample(name, q) for name, q in self._moments().items()}

    def _moments(self) -> dict[str, AtMean]:
        """Return the weights' distributions at their means, by site name."""
        return {f"{self._path}.{name}": AtMean(*part) for name, part in self._parts().items()}

    def _parts(self) -> dict[str, HeadPart]:
        """Return the parameters of W, and of b where it is random."""
        self._known_latents()
        locs, rhos, lowers = (dict(self._kind(kind)) for kind in ("locs", "rhos", "lowers"))
        lowers["weight"] = lowers["weight"].tril(-1)
        return {name: HeadPart(locs[name], softplus(rhos[name]), lowers[name]) for name in locs}

    def _kind(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of one kind by name, announced to SVI."""
        for name, parameter in self._modules[kind]._parameters.items():  # type: ignore[union-attr]
            assert parameter is not None
            yield name, own_param(f"{self._pyro_name}.{kind}.{name}", parameter)

    def _add_parameters(self, sites: Mapping[str, Site]) -> None:
        self._path = self._path or self._find_head(list(sites))
        if others := [name for name in sites if name.rpartition(".")[0] != self._path]:
            raise ValueError(
                f"vbll needs a model with no latents but the head's, {self._path!r}, got {others} "
                "too: make only the head Bayesian, bayesianize(network, where=...)"
            )
        for name, site in sites.items():
            self._add_head_part(name, site)

    def _find_head(self, names: list[str]) -> str:
        """Return the path of the head in the model."""
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        known = [path.removeprefix("network").removeprefix(".") for path in layers]
        if self._head is None:
            if len(layers) != 1:
                raise ValueError(f"vbll needs one Bayesian layer, the last one, got {known}")
            path = layers[0]
        elif self._head in known:
            path = layers[known.index(self._head)]
        else:
            raise ValueError(f"head must be one of the Bayesian layers {known}, got {self._head!r}")
        layer = self.model.get_submodule(path)
        if not isinstance(layer, nn.Linear) or f"{path}.weight" not in names:
            raise TypeError(f"head must be a Bayesian linear layer, got {layer}")
        return path

    def _add_head_part(self, name: str, site: Site) -> None:
        latent = self._latents[name]
        if latent.transform is not None:
            raise ValueError(f"vbll needs a prior of real values, got {site['fn']} of {name!r}")
        loc, kind = initial_loc(latent, site, self.initialise), name.rpartition(".")[2]
        layer: Any = self.model.get_submodule(self._path)
        out, features = layer.out_features, layer.in_features
        k = 1 if self._covariance == "shared" else out
        rows = (k, features) if kind == "weight" else (k,)
        values = {
            "locs": loc.clone(),
            "rhos": SoftplusTransform().inv(loc.new_full(rows, self._init_scale)),
            "lowers": loc.new_zeros(*rows, features),
        }
        for group, value in values.items():
            owner: Any = self._modules[group]
            owner[kind] = nn.Parameter(value)


class _ExpectObservation(Messenger):
    """Scores the observations by their expectation over the outputs."""

    def __init__(self, variance: Callable[[], Tensor]) -> None:
        super().__init__()
        self.variance = variance

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] == "obs" and msg["is_observed"]:
            msg["fn"] = ExpectedObservation(msg["fn"], self.variance())


def _factor(weight: HeadPart) -> Tensor:
    """Return the Cholesky factor of the covariance of each row of W, ``[out, in, in]``."""
    eye = torch.eye(weight.loc.shape[1]).to(weight.loc)
    return (weight.scale.unsqueeze(-1) * (eye + weight.lower)).expand(len(weight.loc), -1, -1)


def _features(seen: list[tuple[Tensor, Tensor, int]], outputs: list[Any]) -> Tensor:
    """Return the head's inputs, if its outputs are the network's and were not changed later."""
    if len(seen) == len(outputs) == 1:
        (features, output, version), network = seen[0], outputs[0]
        own = network if isinstance(network, Tensor) else getattr(network, "logits", None)
        if own is output and output._version == version:
            return features
    raise ValueError(
        "vbll needs a network whose outputs are those of the head, run once; or draw weights by "
        "fit(loss='trace') and predict(estimator='reparam')"
    )


class LastLayerVariance(Function):
    r"""Variances ``[k, n]`` of $Wx + b$: $\lVert L^\top (x, 1)\rVert^2$, or without b.

    Its arguments are x ``[n, in]``; the columns' $\sigma$ ``[k, in]`` and U ``[k, in, in]``; and of
    b, the last column, $\sigma$ ``[k]`` and the row of U ``[k, in]``, or ``None``.
    """

    @staticmethod
    def forward(
        x: Tensor,
        scale: Tensor,
        lower: Tensor,
        bias_scale: Tensor | None,
        bias_lower: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        scaled = x * scale.unsqueeze(1)  # [k, n, in]
        whitened = torch.baddbmm(scaled, scaled, lower)
        if bias_scale is None or bias_lower is None:
            return whitened.square().sum(-1), whitened
        whitened += (bias_scale.unsqueeze(-1) * bias_lower).unsqueeze(1)
        return whitened.square().sum(-1).add_(bias_scale.square().unsqueeze(-1)), whitened

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 5
        x, scale, lower, bias_scale, bias_lower, whitened = ctx.saved_tensors
        of_whitened = whitened * (2 * grad).unsqueeze(-1)
        of_scaled = torch.baddbmm(of_whitened, of_whitened, lower.mT)
        of_lower = torch.bmm((x * scale.unsqueeze(1)).mT, of_whitened)
        of_x = (of_scaled * scale.unsqueeze(1)).sum(0)
        of_scale = (of_scaled * x).sum(1)
        if bias_scale is None:
            return of_x, of_scale, of_lower, None, None
        of_row = of_whitened.sum(1)  # [k, in]
        of_bias = (of_row * bias_lower).sum(-1).addcmul_(grad.sum(1), bias_scale, value=2)
        return of_x, of_scale, of_lower, of_bias, of_row * bias_scale.unsqueeze(-1)
