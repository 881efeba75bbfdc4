# SPDX-License-Identifier: Apache-2.0
r"""The variational last layer: a Normal on the weights of a network's last layer alone.

Its outputs $z = W\phi + b$ for the trunk's features $\phi$ are Normal, so that the ELBO has a
closed form or bound, and a step draws nothing (Harrison et al. 2024, "Variational Bayesian Last
Layers", arXiv:2404.11599). Rows of $(W, b)$ are independent, each of covariance $L L^\top$ with

$$L = \mathrm{diag}(\sigma)\,(I + U), \qquad
  \mathrm{Var}\,z = \lVert L^\top (\phi, 1) \rVert^2,$$

$U$ strictly lower triangular and $\sigma = \mathrm{softplus}(\rho)$. As U is relative to
$\sigma$, an optimiser's step is as large for weights of any scale.

With outputs $z \sim N(m, v)$, elementwise, an observation's expected log-likelihood is the
log-density at other arguments, less a term of the variance:

| family | $E \ln p(y \mid z)$ |
|---|---|
| Normal | $\ln N(y \mid m, \sigma^2) - v / 2\sigma^2$ |
| Poisson | $\ln\mathrm{Poisson}(y \mid e^{m + v/2}) - y v / 2$ |
| Categorical | $\geq \ln\mathrm{softmax}(m + v/2)_y - v_y / 2$ |
| Bernoulli | $\geq \ln\mathrm{Bernoulli}(y \mid m + v/2) - y v / 2$ |

The first two are exact. The others are Jensen's bound $E \ln\sum_k e^{z_k} \leq \ln\sum_k e^{m_k +
v_k/2}$ (equations 9 and 16 there, here without noise on the logits), exact where v is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Size, Tensor, nn
from torch.distributions import Distribution, constraints, register_kl
from torch.distributions.transforms import SoftplusTransform
from torch.nn import functional as F

from pyro_bbb._param_store import own_param, own_store
from pyro_bbb._utils.context import evaluating
from pyro_bbb._utils.inputs import Rows, as_inputs, at_least_single, call_arguments
from pyro_bbb._utils.validation import count, one_of, positive
from pyro_bbb.distributions import observation, softplus
from pyro_bbb.distributions.summed_event import HALF_LOG_2PI, innermost
from pyro_bbb.guides._autoguides import INIT_SCALE
from pyro_bbb.guides._base import Guide
from pyro_bbb.guides.initial_values import InitLoc, initial_loc
from pyro_bbb.guides.linearization import OutputMoments, network_outputs
from pyro_bbb.guides.scale_kl import scale_kl
from pyro_bbb.latents import Site

COVARIANCES = ("shared", "per_output")


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

    has_normal_outputs = True

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
        for group in ("locs", "rhos", "lowers"):
            self.add_module(group, nn.ParameterDict())
        self._find_declared()

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw the head's weights, by site name: W, and b given W."""
        q = self._parts()
        loc, factor = q["weight"].loc, _factor(q["weight"])
        row = dist.MultivariateNormal(loc, scale_tril=factor, validate_args=False)
        weight = pyro.sample(f"{self._path}.weight", row.to_event(1))
        draws = {f"{self._path}.weight": weight}
        if bias := q.get("bias"):
            residual = (weight - loc).unsqueeze(-1)
            noise = torch.linalg.solve_triangular(factor, residual, upper=False).squeeze(-1)
            related = bias.loc + bias.scale * (noise * bias.lower).sum(-1)
            conditional = dist.Normal(related, bias.scale.expand_as(bias.loc)).to_event(1)
            draws[f"{self._path}.bias"] = pyro.sample(f"{self._path}.bias", conditional)
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
        weight = self._parts()["weight"]
        white, of_bias = self._root(features)
        variance = white.square().sum(-1) + of_bias  # [k, n]
        return variance.T.expand(-1, len(weight.loc)).reshape(*features.shape[:-1], -1)

    def _root(self, features: Tensor) -> tuple[Tensor, Tensor]:
        r"""Return R ``[k, n, in]`` and v ``[k, 1]``: values have the covariance $R R^\top + v$."""
        q = self._parts()
        weight, bias = q["weight"], q.get("bias")
        x = features.reshape(-1, features.shape[-1]).to(weight.loc.dtype)
        with torch.autocast(x.device.type, enabled=False):  # it is of the parameters' precision
            scaled = x * weight.scale.unsqueeze(1)  # [k, n, in]
            white = torch.baddbmm(scaled, scaled, weight.lower)  # L^T (x, 1), without the last
            if bias is None:
                return white, white.new_zeros(len(white), 1)
            white = white + (bias.scale.unsqueeze(-1) * bias.lower).unsqueeze(1)
            return white, bias.scale.square().unsqueeze(-1)

    @torch.no_grad()
    def output_moments(self, model: Any, x: Rows) -> OutputMoments:
        with own_store(self), self.observed_head() as features:
            mean = network_outputs(model, self.median(), x)  # the network is its own tangent
            return OutputMoments(at_least_single(mean), at_least_single(self._variance(features())))

    @contextmanager
    def observed_head(self) -> Iterator[Callable[[], Tensor]]:
        """Yield a function that returns the head's inputs, once the network has run inside."""
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
            yield lambda: _features(seen, outputs)
        finally:
            for handle in handles:
                handle.remove()

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return {f"{self._path}.{name}": x.detach().clone() for name, x in self._kind("locs")}

    def _marginals(self) -> tuple[Tensor, Tensor]:
        moments = self._moments()
        loc = self._latents.ravel({name: q.loc for name, q in moments.items()})
        return loc, self._latents.ravel({name: q.variance for name, q in moments.items()}).sqrt()

    def sample_posterior(self, num_samples: int) -> dict[str, Tensor]:
        """Return samples of the head, ``[num_samples, ...]`` by site name, no gradient."""
        with torch.no_grad():
            q, size = self._parts(), count("num_samples", num_samples)
            weight, bias = q["weight"], q.get("bias")
            noise = weight.loc.new_empty(size, *weight.loc.shape).normal_()
            related = (noise.unsqueeze(-2) @ weight.lower.mT).squeeze(-2)
            draws = {f"{self._path}.weight": weight.loc + weight.scale * (noise + related)}
            if bias:
                own, related = torch.randn_like(noise[..., 0]), (noise * bias.lower).sum(-1)
                draws[f"{self._path}.bias"] = bias.loc + bias.scale * (own + related)
        return draws

    def _expected(self, model: Callable[..., Any], *args: Any) -> Any:
        if not self.model.likelihood.is_standard:
            got = f"got {type(self.model.likelihood).__name__}; or fit(loss='trace')"
            raise ValueError(f"vbll needs a likelihood of pyro_bbb.likelihoods, {got}")
        with self.observed_head() as features:
            with _ExpectObservation(lambda: self._variance(features())):
                return model(*args)

    def _at_means(self, x: Any, y: Any, kl_weight: float | Tensor) -> dict[str, Tensor]:
        moments = self._moments()
        if prior := self._prior_of_outputs():
            first, *others = moments.values()
            first.kl = self._kl_of_outputs(prior, as_inputs(x))
            for q in others:  # it is of all weights
                q.kl = torch.zeros_like(first.kl)
        with scale_kl(kl_weight):
            return {name: pyro.sample(name, q) for name, q in moments.items()}

    def _prior_of_outputs(self) -> Any:
        """Return the head's `FunctionNormal`, if that is its prior."""
        prior: Any = self.model.get_submodule(self._path)._modules.get("prior")
        names = self._parts() if prior else ()
        priors = [prior.for_weight(name) for name in names]
        if not any(prior.of_outputs for prior in priors):
            return None
        if any(prior is not priors[0] for prior in priors):
            raise ValueError("FunctionNormal must be the prior of the head's weight and bias alike")
        return priors[0]

    def _kl_of_outputs(self, prior: Any, x: Rows) -> Tensor:
        r"""Return $\mathrm{KL}[q(f_C) \| p(f_C)]$ at context points of a minibatch, in nats."""
        args, kwargs = call_arguments(x)
        if len(args) != 1 or kwargs:
            got = f"got {len(args) + len(kwargs)}"
            raise ValueError(f"FunctionNormal needs a network of one tensor of inputs, {got}")
        points = prior.points(args[0])
        loc = {name: q.loc for name, q in self._moments().items()}
        # as in prediction, so that a batch of context points moves no running average
        with own_store(self), evaluating(self.model.network), self.observed_head() as features:
            mean = network_outputs(self.model, loc, points)
            white, of_bias = self._root(features())
        if mean.dim() != 2:
            shape = list(mean.shape)
            raise ValueError(
                f"FunctionNormal needs outputs [batch, out] of the network, got {shape}"
            )
        covariance = white @ white.mT + of_bias.unsqueeze(-1)
        kl: Tensor = prior.kl(mean.to(white.dtype), covariance, points)
        return kl

    def _moments(self) -> dict[str, AtMean]:
        """Return the weights' distributions at their means, by site name."""
        return {f"{self._path}.{name}": q for name, q in self._parts().items()}

    def _parts(self) -> dict[str, AtMean]:
        """Return the distributions of W, and of b given W where it is random."""
        self._known_latents()
        locs, rhos, lowers = (dict(self._kind(group)) for group in ("locs", "rhos", "lowers"))
        lowers["weight"] = lowers["weight"].tril(-1)
        return {name: AtMean(locs[name], softplus(rhos[name]), lowers[name]) for name in locs}

    def _kind(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of one kind by name, announced to SVI."""
        for name, parameter in self._modules[kind]._parameters.items():  # type: ignore[union-attr]
            assert parameter is not None
            yield name, own_param(f"{self._pyro_name}.{kind}.{name}", parameter)

    def _add_parameters(self, sites: Mapping[str, Site]) -> None:
        self._path = self._path or self._find_head(list(sites))
        if further := [name for name in sites if name.rpartition(".")[0] != self._path]:
            raise ValueError(
                f"vbll needs a model with no latents but the head's, {self._path!r}, got {further} "
                "too: make only the head Bayesian, bayesianize(network, where=...)"
            )
        layer: Any = self.model.get_submodule(self._path)
        k = 1 if self._covariance == "shared" else layer.out_features
        for name, site in sites.items():
            latent, leaf = self._latents[name], name.rpartition(".")[2]
            if latent.transform is not None:
                raise ValueError(f"vbll needs a prior of real values, got {site['fn']} of {name!r}")
            loc = initial_loc(latent, site, self.initialise)
            rows = (k, layer.in_features) if leaf == "weight" else (k,)
            values = {
                "locs": loc.clone(),
                "rhos": SoftplusTransform().inv(loc.new_full(rows, self._init_scale)),
                "lowers": loc.new_zeros(*rows, layer.in_features),
            }
            for group, value in values.items():
                owner: Any = self._modules[group]
                owner[leaf] = nn.Parameter(value)

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


class _ExpectObservation(Messenger):
    """Scores the observations by their expectation over the outputs."""

    def __init__(self, variance: Callable[[], Tensor]) -> None:
        super().__init__()
        self.variance = variance

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] == "obs" and msg["is_observed"]:
            msg["fn"] = ExpectedObservation(msg["fn"], self.variance())
        elif getattr(msg["fn"], "of_outputs", False):  # `AtMean.kl` scores all weights
            msg["fn"] = dist.ImproperUniform(constraints.real, Size(), msg["fn"].event_shape)


def _factor(weight: AtMean) -> Tensor:
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


# --- the closed form ---


class AtMean(dist.TorchDistribution):
    r"""Jointly Normal weights, whose draw is their mean and whose log-density is its expectation.

    It has what an ELBO in closed form takes from a posterior: $E \ln q$, and the KL from a prior of
    independent Normals. Both are sums over columns, so that W and b are one of these each: means
    ``[out, in]`` or ``[out]``, $\sigma$ ``[k, in]`` or ``[k]``, and rows of U ``[k, in, in]`` or
    ``[k, in]``, with k = 1 for all rows, or their number.
    """

    arg_constraints = {}
    support = constraints.real
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, lower: Tensor) -> None:
        self.loc, self.scale, self.lower = loc, scale, lower
        self.kl: Tensor | None = None  # from a prior of the outputs
        super().__init__(Size(), loc.shape, validate_args=False)

    @property
    def variance(self) -> Tensor:
        variance = self.scale.square() * (1 + self.lower.square().sum(-1))
        return variance.expand_as(self.loc)

    def expand(self, batch_shape: Any, _instance: Any = None) -> AtMean:
        return self  # there is one draw

    def rsample(self, sample_shape: Any = Size()) -> Tensor:
        return self.loc

    def log_prob(self, value: Tensor) -> Tensor:
        return -self.log_scale() - self.loc.numel() * (0.5 + HALF_LOG_2PI)

    def log_scale(self) -> Tensor:
        r"""Return $\sum_j \ln\sigma_j$ over all weights."""
        return self.scale.log().sum() * (len(self.loc) / len(self.scale))


@register_kl(AtMean, Distribution)
def _kl_at_mean(q: AtMean, p: Distribution) -> Tensor:
    r"""Return KL[q || p] in nats, from a prior of independent Normals $N(m, s^2)$.

    $$\tfrac12\sum_j \Big(\frac{(\mu_j - m_j)^2 + \mathrm{Var}\,w_j}{s_j^2} - 1\Big)
      + \sum_j \ln s_j - \sum_j \ln\sigma_j$$
    """
    if q.kl is not None:
        return q.kl
    normal: Any = innermost(p)
    if not isinstance(normal, dist.Normal):
        raise ValueError(
            f"the KL in closed form needs a Normal prior of the head, such as 'fan_in_normal', got "
            f"{type(normal).__name__}; or draw weights by fit(loss='trace')"
        )
    m, s = normal.loc.expand_as(q.loc), normal.scale.expand_as(q.loc)
    spread = ((q.loc - m).square() + q.variance) / s.square()
    kl: Tensor = 0.5 * (spread.sum() - spread.numel()) + s.log().sum() - q.log_scale()
    return kl


class ExpectedObservation(dist.TorchDistribution):
    """Observations whose log-density is its expectation, or bound, over uncertain outputs.

    The family is that at the outputs' means, with an event for each row.
    """

    arg_constraints = {}

    def __init__(self, family: Any, variance: Tensor) -> None:
        self.family, self.variance_of_outputs = family, variance
        super().__init__(family.batch_shape, family.event_shape, validate_args=False)
        base = innermost(family)
        shape = _outputs(base).shape if isinstance(base, _FAMILIES) else None
        if shape != variance.shape:
            raise ValueError(
                "the expected log-likelihood needs Gaussian, Categorical, Bernoulli or Poisson "
                f"observations, got {type(base).__name__} of outputs {list(variance.shape)}; or "
                "draw weights by fit(loss='trace')"
            )

    def log_prob(self, value: Tensor) -> Tensor:
        log_prob = expected_log_prob(innermost(self.family), self.variance_of_outputs, value)
        if isinstance(self.family, observation.Observed):
            log_prob = log_prob.where(self.family.counted, 0.0)
        return log_prob.reshape(*self.batch_shape, -1).sum(-1)


_FAMILIES = (dist.Normal, dist.Categorical, dist.Bernoulli, observation.LogRatePoisson)


def expected_log_prob(base: Any, v: Tensor, y: Tensor) -> Tensor:
    """Return the table at the top of the module, elementwise (of classes: for each label)."""
    if isinstance(base, dist.Normal):
        return base.log_prob(y) - 0.5 * v / base.scale.square()
    shifted = _outputs(base) + 0.5 * v
    if isinstance(base, dist.Categorical):
        log_probs = shifted.log_softmax(-1) - 0.5 * v
        return log_probs.gather(-1, y.long().unsqueeze(-1)).squeeze(-1)
    if isinstance(base, dist.Bernoulli):
        return y * _outputs(base) - F.softplus(shifted)
    return observation.LogRatePoisson(shifted).log_prob(y) - 0.5 * y * v


def _outputs(base: Any) -> Tensor:
    """Return the outputs among a family's arguments."""
    if isinstance(base, dist.Normal):
        return base.loc
    outputs: Tensor = base.log_rate if hasattr(base, "log_rate") else base.logits
    return outputs
