# SPDX-License-Identifier: Apache-2.0
r"""Thompson sampling for contextual bandits: act by draws of a posterior, learn from the rewards.

Thompson (1933), as in Blundell et al. (2015), section 4: the agent draws networks, acts as if they
were true, and learns from the reward. Where the posterior is wide the draws disagree, and so the
agent explores. `ThompsonAgent` has any model and guide; `LastLayerAgent` an exact linear regression
on learned features (Snoek et al. 2015, arXiv:1502.05700; NeuralLinear of Riquelme et al. 2018,
arXiv:1802.09127).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

from pyro_bbb._param_store import own_store
from pyro_bbb._utils import validation as checks
from pyro_bbb._utils.locking import lock_methods
from pyro_bbb.elbo import free_energy, terms_of_traces
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.models import BayesianModel

__all__ = ["LastLayerAgent", "ThompsonAgent"]

Encode: TypeAlias = Callable[[Tensor, int], Tensor]
MakeOptimizer: TypeAlias = Callable[..., torch.optim.Optimizer]


@lock_methods
class ThompsonAgent:
    r"""Agent that takes the action whose reward is largest by networks drawn from the posterior.

    The posterior is that given the latest ``memory`` observations. After each observation come
    ``num_batches`` steps on minibatches of these, in random order, in which all occur equally often
    (to one). A step minimises $F_i = \pi_i\,\mathrm{KL} - \ln p(D_i|w)$ with $\pi_i = |D_i|/n$. A
    guide without spread (``"delta"``) makes the agent greedy, and ``epsilon`` $\epsilon$-greedy.

    Args:
        model: predicts the rewards, from what `encode` gives. Outputs are ``[rows]`` or
            ``[rows, 1]``; those of several agents, each of which decides separately,
            ``[rows, agents]``.
        guide: its posterior, a module that has its parameters already.
        encode: from contexts ``[n, ...]`` and the number of an action to inputs ``[n, ...]``.
        num_actions: number of actions; they are numbered from 0.
        memory: number of latest observations that the agent learns from.
        batch_size: observations per step.
        num_batches: steps after an observation.
        num_samples: networks drawn for a decision; their expected rewards are averaged.
        epsilon: probability of a random action instead, in [0, 1]; one number, or a tensor of one
            per agent.
        temperature: factor of the KL; 0 leaves the prior out.
        weigh_by: n: ``"seen"``, the observations in memory, which is Bayes' rule, or ``"memory"``,
            its size: until it is full the posterior then contracts sooner.
        optimizer: a torch optimiser class or function of ``(parameters, lr=...)``; by default fused
            Adam.
        lr: its learning rate.
        estimator: how gradients are estimated, as in `fit`.

    Attributes:
        seen: number of observations so far, a tensor on the guide's device.

    Raises:
        ValueError: a number out of range, an unknown estimator, a guide without parameters.
        TypeError: an argument is of another kind.
    """

    def __init__(
        self,
        model: BayesianModel,
        guide: nn.Module,
        encode: Encode,
        num_actions: int,
        *,
        memory: int = 4096,
        batch_size: int = 64,
        num_batches: int = 64,
        num_samples: int = 2,
        epsilon: float | Tensor = 0.0,
        temperature: float = 1.0,
        weigh_by: str = "seen",
        optimizer: MakeOptimizer | None = None,
        lr: float = 1e-3,
        estimator: str = "reparam",
    ) -> None:
        self.model: BayesianModel = checks.kind("model", model, BayesianModel)
        self.guide: nn.Module = checks.kind("guide", guide, nn.Module)
        self.encode: Callable[..., Any] = checks.function(
            "encode", encode, "(contexts, action) -> inputs"
        )
        self.num_actions: int = checks.count("num_actions", num_actions)
        self.memory: int = checks.count("memory", memory)
        self.batch_size: int = checks.count("batch_size", batch_size)
        self.num_batches: int = checks.count("num_batches", num_batches)
        self.num_samples: int = checks.count("num_samples", num_samples)
        self.temperature: float = checks.at_least_zero("temperature", temperature)
        self.weigh_by: str = checks.one_of("weigh_by", weigh_by, ("seen", "memory"))
        self.estimator: str = checks.one_of("estimator", estimator, ESTIMATORS)
        parameters = (*guide.parameters(), *model.parameters())
        self._parameters = list(dict.fromkeys(p for p in parameters if p.requires_grad))
        if not self._parameters:
            raise ValueError("guide must have its parameters already, got one without any")
        device = self._parameters[0].device
        if not isinstance(epsilon, Tensor):
            epsilon = torch.tensor(checks.fraction("epsilon", epsilon))
        elif not ((epsilon >= 0) & (epsilon <= 1)).all():
            raise ValueError(f"epsilon must be in [0, 1], got {epsilon}")
        self.epsilon: Tensor = epsilon.to(device)
        self._optimizer = _optimizer(optimizer, self._parameters, lr)
        self.seen: Tensor = torch.zeros((), dtype=torch.long, device=device)
        self._inputs: Tensor | None = None
        self._rewards: Tensor | None = None
        self._checked: set[Any] = set()  # shapes and dtypes that the network was tried on

    def act(self, contexts: Tensor) -> Tensor:
        """Return an action for each context, ``[n]`` or ``[n, agents]``, all by the same networks.

        Raises:
            TypeError: the contexts are not a tensor.
            ValueError: they do not fit the network.
        """
        best = self.values(contexts).argmax(0)
        anything = torch.randint_like(best, self.num_actions)
        explores = torch.rand(best.shape, device=best.device) < self.epsilon
        return torch.where(explores, anything, best)

    def values(self, contexts: Tensor) -> Tensor:
        """Return expected rewards ``[actions, n]`` or ``[actions, n, agents]``.

        They are the mean over ``num_samples`` newly drawn networks; errors are those of `act`.
        """
        x, means = self._encoded(contexts), []
        rows = x.flatten(0, 1)
        # Pyro's checks would read numbers from the device
        with torch.no_grad(), own_store(self.model, self.guide), pyro.validation_enabled(False):
            for _ in range(self.num_samples):
                guide_trace = poutine.trace(self.guide).get_trace(rows, None, 1.0)
                with poutine.replay(trace=guide_trace):
                    arguments = self.model.predictive(rows)
                draws = {name: value.unsqueeze(0) for name, value in arguments.items()}
                means.append(self.model.observed(draws).mean[0])
        values = torch.stack(means).mean(0).unflatten(0, x.shape[:2])
        return values.squeeze(2) if values.shape[2:] == (1,) else values

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Store actions with their rewards, both ``[n]`` or ``[n, agents]``, and learn.

        Raises:
            ValueError: shapes do not fit, there is no such action, or a reward is not finite.
            TypeError: an argument is not a tensor.
        """
        _check_observation(contexts, actions, rewards, self.num_actions, self.seen.device)
        self.remember(contexts, actions, rewards)
        self.learn()

    @torch.no_grad()
    def remember(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Overwrite the oldest observations, and learn nothing; arguments as for `observe`.

        It reads no number from the device, and so checks none.
        """
        encoded = self._encoded(contexts)
        chosen = actions.reshape(1, *actions.shape, *[1] * (encoded.dim() - actions.dim() - 1))
        inputs = encoded.take_along_dim(chosen, 0)[0]
        if self._inputs is None or self._rewards is None:
            self._inputs = inputs.new_zeros(self.memory, *inputs.shape[1:])
            self._rewards = inputs.new_zeros(self.memory, *rewards.shape[1:])
        n = min(len(inputs), self.memory)
        slots = self.seen + torch.arange(len(inputs) - n, len(inputs), device=self.seen.device)
        slots = slots % self.memory
        self._inputs.index_copy_(0, slots, inputs[-n:])
        self._rewards.index_copy_(0, slots, rewards[-n:].to(self._rewards.dtype))
        self.seen += len(inputs)

    def learn(self) -> None:
        """Run ``num_batches`` steps on the memory, without host synchronisation.

        Raises:
            ValueError: the memory is empty.
        """
        if self._inputs is None or self._rewards is None:
            raise ValueError("there must be an observation to learn from")
        filled = self.seen.clamp(max=self.memory)
        rows = self._minibatches(filled)
        counted = filled if self.weigh_by == "seen" else self.memory
        # pi_i = T |D_i| / n
        kl_weight: Any = self.temperature and self.temperature * self.batch_size / counted
        batches = zip(self._inputs[rows], self._rewards[rows], strict=True)
        with (
            own_store(self.model, self.guide),
            pyro.validation_enabled(False),
            ESTIMATORS[self.estimator](),
        ):
            for x, y in batches:
                self._differentiate(x, y, kl_weight)
                self._optimizer.step()
                self._optimizer.zero_grad()

    def _differentiate(self, x: Tensor, y: Tensor, kl_weight: Any) -> None:
        """Add the gradient of a minibatch's free energy to the parameters."""
        self._free_energy(x, y, kl_weight).backward()

    def _free_energy(self, x: Tensor, y: Tensor, kl_weight: Any) -> Tensor:
        """Return F_i = pi_i KL - ln p(D_i | w) at one draw w, a tensor on the device."""
        q = poutine.trace(self.guide).get_trace(x, y, 1.0)
        p = poutine.trace(poutine.replay(self.model, trace=q)).get_trace(x, y, 1.0)
        q, p = prune_subsample_sites(q), prune_subsample_sites(p)
        q.compute_log_prob()
        p.compute_log_prob()
        return free_energy(terms_of_traces(p, q), kl_weight)

    def _encoded(self, contexts: Tensor) -> Tensor:
        """Return the inputs of every action in every context, ``[actions, n, ...]``."""
        _check_rows("contexts", contexts, self.seen.device)
        x = torch.stack([self.encode(contexts, action) for action in range(self.num_actions)])
        form = x.shape[2:], x.dtype
        if form not in self._checked:
            try:
                self.model.check(x.flatten(0, 1))
            except ValueError as error:
                raise ValueError(f"contexts must fit the network when encoded: {error}") from error
            self._checked.add(form)
        return x

    def _minibatches(self, filled: Tensor) -> Tensor:
        """Return rows of the memory, ``[num_batches, batch_size]``: in turn, by a random order."""
        keys = torch.rand(self.memory, device=filled.device)
        slots = torch.arange(self.memory, device=filled.device)
        order = keys.where(slots < filled, 2.0).argsort()  # filled slots come first
        turns = torch.arange(self.num_batches * self.batch_size, device=filled.device) % filled
        return order[turns].view(self.num_batches, self.batch_size)


class LinearRewards:
    r"""Exact posterior of a linear regression for each action, with unknown noise.

    For features z and reward r of an action, $r = z^\top w + N(0, s^2)$ with the conjugate prior
    $w \sim N(0, s^2 I / \lambda)$, $s^2 \sim \mathrm{InvGamma}(a_0, b_0)$. After n observations
    with features Z and rewards r

    $$\Lambda = \lambda I + Z^\top Z, \quad \mu = \Lambda^{-1} Z^\top r, \quad a = a_0 + n / 2,
      \quad b = b_0 + (r^\top r - \mu^\top \Lambda \mu) / 2$$

    ``prior_precision`` is $\lambda$, ``shape`` $a_0$ and ``scale`` $b_0$; tensors are float64.
    """

    def __init__(
        self,
        num_actions: int,
        dim: int,
        prior_precision: float,
        shape: float,
        scale: float,
        device: torch.device,
    ) -> None:
        zeros = partial(torch.zeros, num_actions, dtype=torch.float64, device=device)
        self.prior_scale = scale
        self.precision: Tensor = zeros(dim, dim) + prior_precision * torch.eye(dim, device=device)
        self.moment: Tensor = zeros(dim)  # Z'r
        self.square: Tensor = zeros()  # r'r
        self.shape: Tensor = zeros() + shape
        self.scale: Tensor = zeros() + scale
        self.mean: Tensor = zeros(dim)
        self.root: Tensor = torch.linalg.cholesky(self.precision)

    def add(self, features: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Add observations: features ``[n, dim]``, actions and rewards ``[n]``."""
        for action in actions.unique().tolist():
            rows = actions == action
            z, r = features[rows].to(self.mean), rewards[rows].to(self.mean)
            precision = self.precision[action] + z.T @ z
            root, failed = torch.linalg.cholesky_ex(precision)
            if failed:
                raise ValueError(
                    "contexts must give smaller features: Z'Z + lambda I is singular in float64; "
                    "rescale the contexts"
                )
            self.precision[action], self.root[action] = precision, root
            self.moment[action] += z.T @ r
            self.square[action] += r @ r
            self.shape[action] += len(r) / 2
            mean = torch.cholesky_solve(self.moment[action, :, None], root)[:, 0]
            residual = self.square[action] - mean @ self.moment[action]  # r'r - mu' Lambda mu
            self.mean[action] = mean
            self.scale[action] = self.prior_scale + residual.clamp(min=0) / 2

    def draw(self) -> Tensor:
        r"""Draw weights from the posterior, one draw for each action, ``[actions, dim]``."""
        gamma = torch._standard_gamma(self.shape)
        noise = torch.randn_like(self.mean)[:, :, None]
        direction = torch.linalg.solve_triangular(self.root.mT, noise, upper=True)[:, :, 0]
        return self.mean + (self.scale / gamma).sqrt()[:, None] * direction


@lock_methods
class LastLayerAgent:
    r"""Thompson sampling whose uncertainty is in the last layer, exactly.

        features = nn.Sequential(nn.Linear(2, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
        agent = bbb.bandits.LastLayerAgent(features, num_actions=5, num_features=100)
        action = agent.act(context)
        agent.observe(context, action, reward)

    The rewards of each action have a Bayesian linear regression on the network's features and a
    constant, with the noise unknown (see `LinearRewards`). It is exact after every observation. The
    network is trained now and then, by least squares on the rewards of the actions taken; then the
    features have changed, and the regressions restart from all observations in memory.

    Args:
        features: from contexts ``[n, ...]`` to features ``[n, num_features]``.
        num_actions: number of actions; they are numbered from 0.
        num_features: number of features.
        memory: number of latest observations that the network learns from.
        learn_every: fewest observations between two trainings of the network.
        learn_growth: fewest observations between two trainings, as a fraction of those before; so
            trainings become rarer as the memory fills.
        num_batches: steps of a training.
        batch_size: observations per step.
        prior_precision: $\lambda$, of the weights in units of the noise.
        noise_shape: $a_0$ of the noise's variance.
        noise_scale: $b_0$ of the noise's variance, in units of reward squared.
        optimizer: as for `ThompsonAgent`.
        lr: its learning rate.

    Attributes:
        rewards: the posterior of the last layer, a `LinearRewards`.
        seen: number of observations so far.

    Raises:
        ValueError: a number out of range, or a network without parameters.
        TypeError: an argument is of another kind.
    """

    def __init__(
        self,
        features: nn.Module,
        num_actions: int,
        num_features: int,
        *,
        memory: int = 100_000,
        learn_every: int = 50,
        learn_growth: float = 0.0,
        num_batches: int = 100,
        batch_size: int = 512,
        prior_precision: float = 0.25,
        noise_shape: float = 6.0,
        noise_scale: float = 6.0,
        optimizer: MakeOptimizer | None = None,
        lr: float = 1e-3,
    ) -> None:
        self.features: nn.Module = checks.kind("features", features, nn.Module)
        self.num_actions: int = checks.count("num_actions", num_actions)
        self.num_features: int = checks.count("num_features", num_features)
        self.memory: int = checks.count("memory", memory)
        self.learn_every: int = checks.count("learn_every", learn_every)
        self.learn_growth: float = checks.at_least_zero("learn_growth", learn_growth)
        self.num_batches: int = checks.count("num_batches", num_batches)
        self.batch_size: int = checks.count("batch_size", batch_size)
        self._prior = (
            checks.positive("prior_precision", prior_precision),
            checks.positive("noise_shape", noise_shape),
            checks.positive("noise_scale", noise_scale),
        )
        parameters = list(features.parameters())
        if not parameters:
            raise ValueError("features must have parameters to learn, got a network without any")
        self._device, dtype = parameters[0].device, parameters[0].dtype
        self._head = nn.Linear(num_features, num_actions, device=self._device, dtype=dtype)
        self._optimizer = _optimizer(optimizer, [*parameters, *self._head.parameters()], lr)
        self.rewards: LinearRewards = self._regressions()
        self.seen: int = 0
        self._learned_at = 0
        # contexts, actions and rewards, oldest first
        self._observed: deque[tuple[Tensor, ...]] = deque(maxlen=self.memory)

    def act(self, contexts: Tensor) -> Tensor:
        """Return an action ``[n]`` for each context ``[n, ...]``, by one draw of the weights."""
        return self.values(contexts).argmax(0)

    def values(self, contexts: Tensor) -> Tensor:
        """Return expected rewards ``[actions, n]`` by one draw.

        Raises:
            TypeError: the contexts are not a tensor.
            ValueError: they do not fit the network.
        """
        return self.rewards.draw() @ self._features(contexts).to(self.rewards.mean).T

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Store actions ``[n]`` with their rewards ``[n]``, and learn, as `ThompsonAgent` does."""
        _check_observation(contexts, actions, rewards, self.num_actions, self._device)
        if actions.dim() != 1:
            raise ValueError(f"actions must have shape [n], got {list(actions.shape)}")
        self.rewards.add(self._features(contexts), actions, rewards)
        self._observed.append((contexts.clone(), actions.clone(), rewards.clone()))
        self.seen += len(contexts)
        pause = max(self.learn_every, self.learn_growth * self._learned_at)
        if self.seen - self._learned_at >= pause:
            self.learn()

    def learn(self) -> None:
        """Train the network on the memory, and restart the regressions.

        Raises:
            ValueError: the memory is empty.
        """
        if not self.seen:
            raise ValueError("there must be an observation to learn from")
        columns = zip(*self._observed, strict=True)
        contexts, actions, rewards = (torch.cat(column)[-self.memory :] for column in columns)
        self._observed.clear()
        self._observed.append((contexts, actions, rewards))
        shape = self.num_batches, self.batch_size
        for rows in torch.randint(len(contexts), shape).to(self._device):
            values = self._head(self.features(contexts[rows]))
            chosen = values.gather(1, actions[rows, None])[:, 0]
            self._optimizer.zero_grad()
            nn.functional.mse_loss(chosen, rewards[rows].to(chosen)).backward()
            self._optimizer.step()
        self.rewards = self._regressions()
        self.rewards.add(self._features(contexts), actions, rewards)
        self._learned_at = self.seen

    def _regressions(self) -> LinearRewards:
        return LinearRewards(self.num_actions, self.num_features + 1, *self._prior, self._device)

    def _features(self, contexts: Any) -> Tensor:
        """Return features and a constant, ``[n, num_features + 1]``."""
        _check_rows("contexts", contexts, self._device)
        try:
            with torch.no_grad():
                features = self.features(contexts)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"contexts must fit the network: {error}") from error
        if features.shape != (expected := (len(contexts), self.num_features)):
            raise ValueError(
                f"contexts must give features of shape {[*expected]}, got {[*features.shape]}"
            )
        if not checks.all_finite(features):
            raise ValueError("contexts must give finite features, got NaN or infinity")
        return nn.functional.pad(features, (0, 1), value=1.0)


def _optimizer(
    optimizer: MakeOptimizer | None, parameters: list[nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """Return the optimiser; the default's count of steps stays on the device."""
    adam = partial(torch.optim.Adam, fused=True, capturable=parameters[0].is_cuda)
    make = checks.function("optimizer", optimizer or adam, "(parameters, lr=...)")
    made: torch.optim.Optimizer = make(parameters, lr=checks.positive("lr", lr))
    return made


def _check_rows(name: str, value: Any, device: torch.device) -> None:
    """Check a tensor of one or more rows on the agent's device."""
    if checks.kind(name, value, Tensor).dim() == 0 or len(value) == 0:
        raise ValueError(f"{name} must have a row or more, got shape {list(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name} must be on {device}, got {value.device}")


def _check_observation(
    contexts: Any, actions: Any, rewards: Any, num_actions: int, device: torch.device
) -> None:
    """Check contexts, and for each the number of an action and a finite reward."""
    named: dict[str, Tensor] = {"contexts": contexts, "actions": actions, "rewards": rewards}
    for name, value in named.items():
        _check_rows(name, value, device)
    if len(contexts) != len(actions) or actions.shape != rewards.shape:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in named.items())
        raise ValueError(f"contexts, actions and rewards must go together, got {shapes}")
    last = num_actions - 1
    if actions.dtype != torch.long or not ((actions >= 0) & (actions <= last)).all():
        raise ValueError(f"actions must be integers (int64) in [0, {last}], got {actions}")
    if rewards.is_complex() or not rewards.isfinite().all():
        raise ValueError(f"rewards must be finite real numbers, got {rewards}")
