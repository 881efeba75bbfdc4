# SPDX-License-Identifier: Apache-2.0
r"""IVON: natural-gradient descent of a diagonal Gaussian posterior.

Shen et al. (2024), "Variational Learning is Effective for Large Deep Networks", Algorithm 1. Each
weight has a mean $m$, a momentum $g$ and a Hessian $h$ of the mean loss per example. The posterior
is $N(m, \sigma^2)$ with $\sigma^{-2} = \lambda(h + \delta)$, where $\lambda$ is the number of data
over the temperature, and the prior is $N(\mu_0, 1/(\lambda\delta))$. A step draws
$\theta = m + \sigma\epsilon$. With the gradient $\hat g$ of the mean loss at $\theta$, and Price's
estimate $\hat h = \hat g\,(\theta - m)/\sigma^2$ of its curvature (Price 1958),

$$g \leftarrow \beta_1 g + (1-\beta_1)\hat g, \qquad
  h \leftarrow h - (1-\beta_2)(h-\hat h) + \tfrac12(1-\beta_2)^2\frac{(h-\hat h)^2}{h+\delta},$$
$$m \leftarrow m - \alpha\,\frac{g/(1-\beta_1^t) + \delta(m-\mu_0)}{h+\delta}.$$

Two additions keep a start far from the optimum sound. No step of a weight exceeds $\alpha/10$, with
$\alpha$ rising from 0 over the first 5 % of a run, unless the schedule rises there; and $h$ starts
at the Fisher information of the likelihood, the mean over each latent's entries for labels drawn
from the model itself:

$$h_0 = \max\Bigl(\overline{\hat g_\text{sum}^2}/B,\ 0.1,\ n_\text{in}/(0.4^2\lambda)-\delta\Bigr),
  \qquad \hat g_\text{sum} = \nabla\textstyle\sum_{i\le B}-\ln p(\tilde y_i|x_i, m).$$

Its last term bounds the standard deviation that noise of $n_\text{in}$ weights gives a unit.

The last term of the update of $h$ keeps $h + \delta$ positive also for negative $\hat h$ (Lin et
al. 2020): the new $h + \delta$ is $\tfrac12\bigl(1 + (1 - x)^2\bigr)$ times the old one,
$x = (1-\beta_2)(h-\hat h)/(h+\delta)$.

Natural gradients follow $E_q[\nabla^2(-\ln p(D|\theta) - \ln p(\theta))]$ (Khan and Rue 2023). Of a
fixed Normal prior this Hessian is $\delta$, as above. For every other prior $\delta = 0$ and
$-\ln p(\theta)/\lambda$ joins the loss, so that its curvature is in $\hat h$.

The network runs on plain tensors: there is no graph of the KL, nor one back to $\rho$. Sums over
examples of $\hat g$ and $\hat h$ are the gradients of the vectors of ``loc`` and ``rho``, so they
add up over the parts of a minibatch and over processes as gradients do; so does the number of
examples, which is the gradient of ``totals``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from pyro import poutine
from torch import Tensor, nn
from torch.optim import Adam

from pyro_bbb._utils.context import evaluating, seeded
from pyro_bbb._utils.inputs import Rows
from pyro_bbb._utils.memory import FlatMemory
from pyro_bbb._utils.validation import positive, probability
from pyro_bbb.distributions.normal import fixed_normal
from pyro_bbb.elbo import MinibatchELBO, NonFiniteError, Terms, free_energy, minibatch_elbo
from pyro_bbb.guides import AutoSoftplusNormal
from pyro_bbb.latents import Latents
from pyro_bbb.models import BayesianModel
from pyro_bbb.training._lr_schedule import default_lr, lr_factor

if TYPE_CHECKING:
    from pyro_bbb.training._batches import Batches
    from pyro_bbb.training._fit import Options

IVON_LR = 0.1  # in units of a Newton step
_WINDOWS = 10.0  # decay times of the Hessian in a run
_WARMUP = 0.05  # part of a run in which alpha rises
_MOST_STEP = 0.1  # of a weight, over alpha: that of Adam's means by default, 0.01, at alpha = 0.1
_LEAST_HESSIAN = 0.1  # at the start; with less, LeNet-5 loses units
_MOST_NOISE = 0.4  # at the start: std of a unit's noise at inputs of 1
_LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True, kw_only=True)
class IVON:
    r"""Options of ``fit(..., optimizer="ivon")``: natural gradients for an `AutoSoftplusNormal`.

    Each step moves the mean $m$ and the Hessian $h$ of the mean loss per example by Algorithm 1 of
    Shen et al. (2024), "Variational Learning is Effective for Large Deep Networks". The posterior
    has $\sigma^{-2} = \lambda h + \Lambda_0$, $\lambda$ being the number of data over the
    temperature and $\Lambda_0$ the precision of a fixed Normal prior. Every other prior joins the
    loss, and its curvature is estimated with that of the likelihood.

    Args:
        hess_init: $h$ at the start; by default the Fisher information on a first minibatch, at
            least 0.1, and more where noise of the weights would drown a layer's signal.
        beta1: decay rate of the momentum.
        beta2: decay rate of $h$, as in the paper. By default $1 - 10/\text{steps}$ (at least .9),
            approached over the first quarter of a run: $e^{-9}$ of the initial $h$ is left, and the
            means have settled before $h$ follows the noise.

    Raises:
        ValueError: a number is out of range.
        TypeError: an option is not a number.
    """

    hess_init: float | None = None
    beta1: float = 0.9
    beta2: float | None = None

    def __post_init__(self) -> None:
        if self.hess_init is not None:
            positive("hess_init", self.hess_init)
        probability("beta1", self.beta1)
        if self.beta2 is not None:
            probability("beta2", self.beta2)


class NaturalGradient(Adam):
    """IVON's step for the latents of a posterior; Adam's, at most at ``max_lr``, for the others."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        *,
        posterior: FlatPosterior,
        options: IVON,
        num_steps: int,
        max_lr: float,
        schedule: str | Callable[[float], float],
    ) -> None:
        groups: list[dict[str, Any]] = [{"params": posterior.open()}]
        super().__init__(groups, lr=lr, fused=True)
        latents = {*posterior.locs, *posterior.rhos}
        if further := [p for p in parameters if p not in latents]:
            self.add_param_group({"params": further, "max_lr": max_lr})
        self.posterior, self.beta1 = posterior, options.beta1
        factor = lr_factor(schedule)
        rises = factor(0.0) < factor(_WARMUP)  # then it is the warm-up
        self.warmup = 1.0 if rises else 1 / (_WARMUP * num_steps)
        self.ramp = 4 / num_steps if options.beta2 is None else 1.0  # of 1 - beta2, at each step
        self.beta2 = 1 - min(_WINDOWS / num_steps, 0.1) if options.beta2 is None else options.beta2
        self.defaults.update(asdict(options), beta2=self.beta2)
        self.found_inf: Tensor | None = None  # 1 if a step must leave the state as it is
        self.state[posterior.totals] = posterior.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one step of all parameters that have a gradient."""
        posterior = self.posterior
        if not all(p.requires_grad for p in (*posterior.locs, *posterior.rhos)):
            raise ValueError(
                "optimizer 'ivon' trains all latents of the guide, which must not be frozen"
            )
        self._update(posterior)
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None
        if len(self.param_groups) > 1:
            super().step()

    def _update(self, q: FlatPosterior) -> None:
        """Algorithm 1, lines 3 to 8, in place: equations at the head of this file."""
        m, g, h = q.loc.data, q.state["momentum"], q.state["hessian"]
        examples, kl_weight = q.totals.grad.unbind()  # type: ignore[union-attr]
        grad: Any = q.loc.grad
        price: Any = q.rho.grad
        if self.found_inf is not None:  # they leave the state as it is, if multiplied by 0
            for sums in (grad, price):
                sums.nan_to_num_(0.0, 0.0, 0.0)
        num_data = q.state["num_data"].copy_(examples / kl_weight)
        delta = q.prior_precision / num_data
        lr, rate1, rate2, debias = self._rates(examples.dtype)
        # (1 - beta2) (h - ĥ)
        change = torch.addcmul(h, price, 1 / examples, value=-1, out=price).mul_(rate2)
        curvature = h + delta
        h.sub_(change).addcdiv_(change.square_(), curvature, value=0.5)
        g.mul_(1 - rate1).addcmul_(grad, rate1 / examples)
        # alpha (g / (1 - beta1^t) + delta (m - mu_0))
        ascent = torch.mul(g, lr / debias, out=price).addcmul_(m, lr * delta)
        if q.prior_loc is not None:
            ascent.sub_(lr * delta * q.prior_loc)
        bound = _MOST_STEP * lr
        m.sub_(ascent.div_(torch.add(h, delta, out=curvature)).clamp_(-bound, bound))
        if q.unpruned is not None:
            m.mul_(q.unpruned)

    def _rates(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return alpha, 1 - beta1, 1 - beta2 and 1 - beta1^t; a failed step's first three are 0.

        They are tensors, so that no step waits for its device.
        """
        count = self.posterior.state["step"]
        moving = 1.0 if self.found_inf is None else 1 - self.found_inf.to(dtype)
        count += moving
        t = count.clamp(min=1).to(dtype)
        lr = torch.as_tensor(self.param_groups[0]["lr"], dtype=dtype, device=t.device)
        rate1 = (1 - self.beta1) * torch.ones_like(t)
        rate2 = (t * self.ramp).clamp(max=1) * (1 - self.beta2)
        lr = lr * (t * self.warmup).clamp(max=1)
        return lr * moving, rate1 * moving, rate2 * moving, 1 - self.beta1**t

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state; the posterior's vectors stay where they are."""
        super().load_state_dict(state_dict)
        totals, vectors = self.posterior.totals, self.posterior.state
        for name, value in self.state[totals].items():
            vectors[name].copy_(value)
        self.state[totals] = vectors


class FlatPosterior:
    """The means and Hessians of a guide's latents as vectors, and draws from the posterior.

    Args:
        locs: the guide's means in the order of its latents; on ``loc`` from `open` to `close`.
        rhos: the guide's scales in that order, on ``rho``; `write` sets them.
        prior_loc: means of the fixed Normal priors, ``[n]``.
        prior_precision: their precisions, ``[n]``; 0 for entries with another prior, whose density
            is in the loss, and for pruned ones.
        unpruned: true where an entry is not pruned, ``[n]``; ``None`` if none is.
        hessian: $h$ at the start, ``[n]``.
    """

    def __init__(
        self,
        locs: list[nn.Parameter],
        rhos: list[nn.Parameter],
        prior_loc: Tensor,
        prior_precision: Tensor,
        unpruned: Tensor | None,
        hessian: Tensor,
    ) -> None:
        self.locs, self.rhos, self.unpruned = locs, rhos, unpruned
        self.prior_loc = prior_loc if prior_loc.any() else None
        equal = (prior_precision == prior_precision[0]).all()
        self.prior_precision = prior_precision[0].clone() if equal else prior_precision
        log_precision = prior_precision[prior_precision > 0].double().log()
        self.log_normalizer = 0.5 * (log_precision - _LOG_2PI).sum().to(hessian)
        self.state = {  # of the algorithm, in a checkpoint; num_data is lambda of the latest step
            "step": torch.zeros((), device=hessian.device),
            "hessian": hessian,
            "momentum": torch.zeros_like(hessian),
            "num_data": hessian.new_ones(()),
        }
        self.count = len(hessian) if unpruned is None else unpruned.sum()
        self.totals = nn.Parameter(hessian.new_zeros(2))  # its gradient: examples, KL weight
        self.loc = self.rho = nn.Parameter(hessian.new_empty(0))  # once open
        self._memory: list[FlatMemory] = []

    def log_prior(self, theta: Tensor) -> Tensor:
        """Return the sum of the log-densities under the fixed Normal priors."""
        distance = theta if self.prior_loc is None else theta - self.prior_loc
        return self.log_normalizer - 0.5 * (self.prior_precision * distance).dot(distance)

    def open(self) -> list[nn.Parameter]:
        """Move the guide's parameters onto vectors, and return the parameters of the optimiser."""
        self._memory = [FlatMemory(tensors, keep=False) for tensors in (self.locs, self.rhos)]
        self.loc, self.rho = (nn.Parameter(memory.vector) for memory in self._memory)
        return [self.totals, self.loc, self.rho]

    @torch.no_grad()
    def draw(self, num_data: Tensor | float) -> tuple[Tensor, Tensor]:
        r"""Draw $\theta = m + \sigma\epsilon$, a leaf, and return it with its log-density."""
        scale = self._precision(num_data).rsqrt_()
        noise = torch.empty_like(scale).normal_()
        if self.unpruned is not None:
            noise.mul_(self.unpruned)
            scale.masked_fill_(~self.unpruned, 1.0)
        log_q = -0.5 * noise.dot(noise) - scale.log().sum() - self.count * (0.5 * _LOG_2PI)
        return torch.addcmul(self.loc, scale, noise, out=noise).requires_grad_(), log_q

    @torch.no_grad()
    def add(self, theta: Tensor, num_data: Tensor | float) -> None:
        """Add the gradient at a draw, and Price's product, to those of the step."""
        price = torch.sub(theta, self.loc).mul_(theta.grad).mul_(self._precision(num_data))  # type: ignore[arg-type]
        if self.loc.grad is None:
            self.totals.grad, self.loc.grad, self.rho.grad = None, theta.grad, price
        else:
            self.loc.grad.add_(theta.grad)  # type: ignore[arg-type]
            self.rho.grad.add_(price)  # type: ignore[union-attr]

    @torch.no_grad()
    def add_totals(self, examples: int, kl_weight: Tensor | float) -> None:
        """Add to the number of examples and the weight of the KL of a step."""
        pair = self.totals.new_tensor([examples, 0.0])
        pair[1] = kl_weight
        self.totals.grad = pair if self.totals.grad is None else self.totals.grad + pair

    @torch.no_grad()
    def write(self) -> None:
        r"""Set $\rho = \ln(e^\sigma - 1) = \sigma + \ln(-\mathrm{expm1}(-\sigma))$."""
        if not self._memory or not self.state["step"]:
            return
        scale = self._precision(self.state["num_data"]).rsqrt_()
        if self.unpruned is not None:
            scale.mul_(self.unpruned)
        torch.neg(scale, out=self.rho.data).expm1_().neg_().log_().add_(scale)

    def close(self) -> None:
        """Set ``rho``, and give the parameters their own memory back."""
        self.write()
        for memory in self._memory:
            memory.close()
        self._memory = []

    def _precision(self, num_data: Tensor | float) -> Tensor:
        r"""Return $\sigma^{-2} = \lambda h + \Lambda_0$, with the prior's precision."""
        return torch.mul(self.state["hessian"], num_data).add_(self.prior_precision)


class NaturalGradientELBO(MinibatchELBO):
    """Loss of `SVI` for `NaturalGradient`, at draws of the posterior's vectors."""

    def __init__(
        self,
        posterior: FlatPosterior,
        latents: Latents,
        open_priors: frozenset[str],
        num_particles: int,
    ) -> None:
        super().__init__(num_particles)
        self.posterior, self.latents = posterior, latents
        self.rows_per_part: float | None = None  # mean over a step's parts; None for one part
        self.open_priors = open_priors  # latents whose prior is not a fixed Normal

    def loss_and_grads(
        self, model: Any, guide: Any, x: Any, y: Any = None, kl_weight: float | Tensor = 1.0
    ) -> float:
        """Add the gradients of a part of a minibatch to the parameters', and record its loss."""
        self._kl_weight = kl_weight
        rows = len(y) if self.rows_per_part is None else self.rows_per_part
        num_data = rows / kl_weight  # that of the whole step, not of the part alone
        for _ in range(self.num_particles):
            theta, log_q = self.posterior.draw(num_data)
            with torch.enable_grad():
                energy = self._energy(model, theta, log_q, x, y)
            (energy / self.num_particles).backward()
            self.posterior.add(theta, num_data)
        self.posterior.add_totals(len(y), kl_weight)
        return 0.0

    def _energy(self, model: Any, theta: Tensor, log_q: Tensor, x: Any, y: Tensor) -> Any:
        r"""Return $-\ln p(D|\theta)$, less the weighted log-densities of open priors; record it."""
        z = self.latents.unravel(theta)
        values = {name: self.latents[name].constrain(value) for name, value in z.items()}
        conditioned = poutine.condition(model, data=values)
        trace = poutine.trace(conditioned).get_trace(x, y, self._kl_weight)
        trace.compute_log_prob(lambda name, _: name in self.open_priors or name not in z)
        sites = {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}
        nll: Any = -sum(site["log_prob_sum"] for name, site in sites.items() if name not in z)
        volume = self.latents.log_abs_det(z, values)
        open_priors = [sites[name] for name in sorted(self.open_priors)]
        with torch.no_grad():
            log_open = sum(site["unscaled_log_prob"].sum() for site in open_priors)
            kl = log_q - volume - log_open - self.posterior.log_prior(theta)
            loss = free_energy(Terms(nll, kl, log_q, values), self._kl_weight)
            if self.reads and not loss.isfinite():
                names = sorted(self.open_priors) if nll.isfinite() else ["obs"]
                raise NonFiniteError("loss", names)
            self._keep(loss / self.num_particles, kl, log_q - volume, nll)
        energy = nll - sum(site["log_prob_sum"] for site in open_priors)
        return energy - self._kl_weight * volume if isinstance(volume, Tensor) else energy


def natural_gradients(
    options: Options, ivon: IVON, batches: Batches
) -> tuple[NaturalGradientELBO, partial[NaturalGradient]]:
    """Return the objective and the optimiser of a run, if IVON can train it."""
    model, guide = options.model, options.guide
    _check(guide, options, len(batches))
    locs, rhos = (dict(guide.get_submodule(x).named_parameters()) for x in ("locs", "rhos"))
    pairs = {name: (loc, rhos[name]) for name, loc in locs.items()}
    if frozen := [name for name, pair in pairs.items() if not all(x.requires_grad for x in pair)]:
        raise ValueError(
            f"optimizer 'ivon' trains all latents of the guide, got frozen ones: {frozen}; another "
            "optimizer leaves them as they are"
        )
    formats = {(str(x.dtype), str(x.device)) for x in locs.values()}
    if len(formats) > 1:
        raise ValueError(
            f"optimizer 'ivon' needs latents of one precision on one device, got {sorted(formats)}"
        )
    latents = Latents(guide.latents[name] for name in locs)
    normals, fisher = _at_the_means(model, latents, latents.ravel(locs), batches.examples[0])
    masks, unpruned = guide.unpruned, None
    if masks:
        every = {n: torch.ones_like(x, dtype=torch.bool) for n, x in locs.items()}
        unpruned = latents.ravel(every | masks)
    zeros = {name: torch.zeros_like(loc) for name, loc in locs.items()}
    prior_loc = latents.ravel(zeros | {name: mean for name, (mean, _) in normals.items()})
    inverse_squares = {name: std.square().reciprocal() for name, (_, std) in normals.items()}
    precision = latents.ravel(zeros | inverse_squares)
    if unpruned is not None:
        precision.mul_(unpruned)
    hessian = torch.full_like(latents.ravel(rhos).detach(), ivon.hess_init or _LEAST_HESSIAN)
    if ivon.hess_init is None:
        num_data = model.num_data / options.last_kl_weight(model.num_data, len(batches))
        fan_in = {n: torch.full_like(x.detach(), math.prod(x.shape[1:])) for n, x in locs.items()}
        least = (latents.ravel(fan_in) / _MOST_NOISE**2 - precision) / num_data
        hessian.copy_(fisher.maximum(least).clamp(min=_LEAST_HESSIAN))
        batches.processes.align([hessian])  # each has drawn its own labels
    vectors = [*locs.values()], [rhos[name] for name in locs]
    posterior = FlatPosterior(*vectors, prior_loc, precision, unpruned, hessian)
    open_priors = frozenset(locs.keys() - normals.keys())
    elbo = NaturalGradientELBO(posterior, latents, open_priors, options.num_particles)
    num_steps = options.epochs * len(batches)
    optimizer = partial(
        NaturalGradient,
        posterior=posterior,
        options=ivon,
        num_steps=num_steps,
        max_lr=default_lr(num_steps),
        schedule=options.lr_schedule,
    )
    return elbo, optimizer


def _check(guide: Any, options: Options, num_batches: int) -> None:
    if not isinstance(guide, AutoSoftplusNormal):
        raise ValueError(
            "optimizer 'ivon' trains a guide of independent Normals, AutoSoftplusNormal(model), "
            f"got {type(guide).__name__}: take that guide, or another optimizer"
        )
    if options.model.has_improper_prior:
        raise ValueError(
            "optimizer 'ivon' needs proper priors, whose gradients at draws of the weights have a "
            "variance: take another optimizer, or a prior such as 'scale_mixture'"
        )
    if options.estimator != "reparam":
        raise ValueError(
            "optimizer 'ivon' needs estimator='reparam': its Hessian comes from the noise of the "
            f"weights, got estimator {options.estimator!r}"
        )
    if minibatch_elbo(options.loss, options.num_particles).closed_form:
        raise ValueError(
            "optimizer 'ivon' has an objective of its own, recorded as by loss='trace', got "
            f"loss {options.loss!r}"
        )
    plain = replace(options.schedule, warmup_epochs=0, cooling_epochs=0, initial_temperature=None)
    sizes = {"num_batches": num_batches, "batch_size": 1, "num_data": num_batches}
    weights = [plain.weight(batch=i, **sizes) for i in range(1, num_batches + 1)]
    if not min(weights) > (1 - 1e-6) * max(weights):
        raise ValueError(
            "optimizer 'ivon' needs a kl_schedule that weighs all minibatches of an epoch alike, "
            "as 'uniform' does, also with warm-up and temperature: got weights from "
            f"{min(weights):.3g} to {max(weights):.3g}"
        )


def _at_the_means(
    model: BayesianModel, latents: Latents, loc: Tensor, x: Rows
) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """Return the fixed Normal priors, as location and scale by latent, and the Fisher information.

    A prior that depends on another latent or on a parameter is not fixed: it needs a gradient, as
    the latents do. The information ``[n]`` is a mean over examples and the entries of a latent.
    """
    z = loc.detach().requires_grad_()
    conditioned = poutine.condition(model, data=latents.constrain(z))
    with seeded(0), evaluating(model), torch.enable_grad():
        trace = poutine.trace(conditioned).get_trace(x, None, 0.5)
        obs: Any = trace.nodes["obs"]
        log_p = obs["fn"].log_prob(obs["value"].detach()).sum()
        (score,) = torch.autograd.grad(log_p, z, materialize_grads=True)
    # scores of labels drawn from the model have mean 0: squares of their sum add up
    squares = latents.unravel(score.square().nan_to_num() / len(x))
    fisher = latents.ravel({n: v.mean().expand_as(v) for n, v in squares.items()})
    normals = {}
    for name in latents:
        if normal := fixed_normal(trace.nodes[name]["fn"]):
            normals[name] = normal
    return normals, fisher
