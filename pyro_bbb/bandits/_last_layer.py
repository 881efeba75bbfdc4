# SPDX-License-Identifier: Apache-2.0
r"""Thompson sampling by Bayesian linear regression on the features of a network.

Snoek et al. (2015, arXiv:1502.05700); for bandits Riquelme et al. (2018, arXiv:1802.09127),
NeuralLinear.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyro_bbb._utils import validation as checks
from pyro_bbb._utils.locking import lock_methods
from pyro_bbb._utils.validation import all_finite
from pyro_bbb.bandits._checks import observation as check_observation
from pyro_bbb.bandits._checks import rows as check_rows


class LinearRewards:
    r"""Exact posterior of a linear regression for each action, with unknown noise.

    For features z and reward r of an action, $r = z^\top w + N(0, s^2)$ with the conjugate prior
    $w \sim N(0, s^2 I / \lambda)$, $s^2 \sim \mathrm{InvGamma}(a_0, b_0)$. After n observations
    with features Z and rewards r

    $$\Lambda = \lambda I + Z^\top Z, \quad \mu = \Lambda^{-1} Z^\top r, \quad a = a_0 + n / 2,
      \quad b = b_0 + (r^\top r - \mu^\top \Lambda \mu) / 2$$

    Args:
        num_actions: how many actions.
        dim: number of features.
        prior_precision: $\lambda$.
        shape: $a_0$.
        scale: $b_0$.
        device: of the tensors, which are float64.
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
        kind: Any = {"dtype": torch.float64, "device": device}
        self.prior = prior_precision, shape, scale
        self.precision = prior_precision * torch.eye(dim, **kind).repeat(num_actions, 1, 1)
        self.moment = torch.zeros(num_actions, dim, **kind)  # Z'r
        self.square = torch.zeros(num_actions, **kind)  # r'r
        self.shape = torch.full((num_actions,), shape, **kind)
        self.scale = torch.full((num_actions,), scale, **kind)
        self.mean = torch.zeros(num_actions, dim, **kind)
        self.root = torch.linalg.cholesky(self.precision)

    def add(self, features: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Add observations: features ``[n, dim]``, actions and rewards ``[n]``."""
        z, r = features.to(self.mean), rewards.to(self.mean)
        for action in actions.unique().tolist():
            rows = actions == action
            self._add(action, z[rows], r[rows])

    def _add(self, action: int, z: Tensor, r: Tensor) -> None:
        precision = self.precision[action] + z.T @ z
        root, failed = torch.linalg.cholesky_ex(precision)
        if failed:
            raise ValueError("contexts must give features whose squares leave the prior a digit")
        self.precision[action], self.root[action] = precision, root
        self.moment[action] += z.T @ r
        self.square[action] += r @ r
        self.shape[action] += len(r) / 2
        mean = torch.cholesky_solve(self.moment[action, :, None], root)[:, 0]
        rest = self.square[action] - mean @ self.moment[action]  # of squares, at least 0
        self.mean[action], self.scale[action] = mean, self.prior[2] + rest.clamp(min=0) / 2

    def draw(self) -> Tensor:
        r"""Weights from the posterior, one draw for each action, ``[actions, dim]``."""
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
    network is trained now and then, by least squares on the rewards of the actions taken; then
    features have changed, and the regressions begin anew with all that is in memory.

    Args:
        features: from contexts ``[n, ...]`` to features ``[n, num_features]``.
        num_actions: how many actions there are; they are numbered from 0.
        num_features: how many features.
        memory: number of latest observations that the network learns from.
        learn_every: observations between two trainings of the network, at least.
        learn_growth: observations between two trainings as a fraction of those before, at least; so
            that trainings become rarer as there is more in memory.
        num_batches: steps of a training.
        batch_size: observations per step.
        prior_precision: $\lambda$, of the weights in units of the noise.
        noise_shape: $a_0$ of the noise's variance.
        noise_scale: $b_0$ of the noise's variance, in units of reward squared.
        optimizer: a torch optimiser class or function of ``(parameters, lr=...)``; by default fused
            Adam.
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
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        lr: float = 1e-3,
    ) -> None:
        self.features = checks.kind("features", features, nn.Module)
        self.num_actions = checks.count("num_actions", num_actions)
        self.num_features = checks.count("num_features", num_features)
        self.memory = checks.count("memory", memory)
        self.learn_every = checks.count("learn_every", learn_every)
        self.learn_growth = checks.at_least_zero("learn_growth", learn_growth)
        self.num_batches = checks.count("num_batches", num_batches)
        self.batch_size = checks.count("batch_size", batch_size)
        self._prior = (
            checks.positive("prior_precision", prior_precision),
            checks.positive("noise_shape", noise_shape),
            checks.positive("noise_scale", noise_scale),
        )
        self._parameters = list(features.parameters())
        if not self._parameters:
            raise ValueError("features must have parameters to learn, got a network without any")
        first = self._parameters[0]
        self._device = first.device
        self._head = nn.Linear(num_features, num_actions, device=first.device, dtype=first.dtype)
        adam = partial(torch.optim.Adam, fused=True)
        make = checks.function("optimizer", optimizer or adam, "(parameters, lr=...)")
        parameters = [*self._parameters, *self._head.parameters()]
        self._optimizer = make(parameters, lr=checks.positive("lr", lr))
        self.rewards, self.seen, self._learned_at = self._regressions(), 0, 0
        self._observed: list[Tensor] = []  # contexts, actions and rewards of the memory

    def act(self, contexts: Tensor) -> Tensor:
        """An action for each context; one draw of the last layer serves them all.

        Args:
            contexts: ``[n, ...]``, on the network's device.

        Returns:
            Numbers of actions, ``[n]``.

        Raises:
            TypeError: the contexts are no tensor.
            ValueError: they do not fit the network.
        """
        return self.values(contexts).argmax(0)

    def values(self, contexts: Tensor) -> Tensor:
        """Expected rewards ``[actions, n]`` by one draw of the last layer.

        Raises:
            TypeError: the contexts are no tensor.
            ValueError: they do not fit the network.
        """
        return self.rewards.draw() @ self._features(contexts).to(self.rewards.mean).T

    def observe(self, contexts: Tensor, actions: Tensor, rewards: Tensor) -> None:
        """Remember actions with their rewards, and learn.

        Args:
            contexts: ``[n, ...]``.
            actions: numbers of the actions taken there, integers ``[n]``.
            rewards: of the actions, ``[n]``.

        Raises:
            ValueError: shapes do not fit, there is no such action, or a reward is not finite.
            TypeError: an argument is no tensor.
        """
        check_observation(contexts, actions, rewards, self.num_actions, self._device)
        if actions.dim() != 1:
            raise ValueError(f"actions must have shape [n], got {list(actions.shape)}")
        self.rewards.add(self._features(contexts), actions, rewards)
        self._remember(contexts, actions, rewards)
        self.seen += len(contexts)
        pause = max(self.learn_every, self.learn_growth * self._learned_at)
        if self.seen - self._learned_at >= pause:
            self.learn()

    def learn(self) -> None:
        """Train the network on the memory, and begin the regressions anew.

        Raises:
            ValueError: the memory is empty.
        """
        if not self.seen:
            raise ValueError("there must be an observation to learn from")
        filled = min(self.seen, self.memory)
        contexts, actions, rewards = (part[:filled] for part in self._observed)
        for rows in torch.randint(filled, (self.num_batches, self.batch_size)).to(actions.device):
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
        """Features and a constant, ``[n, num_features + 1]``."""
        check_rows("contexts", contexts, self._device)
        try:
            with torch.no_grad():
                found = self.features(contexts)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"contexts must fit the network: {error}") from error
        if found.shape != (len(contexts), self.num_features):
            expected = [len(contexts), self.num_features]
            raise ValueError(
                f"contexts must give features of shape {expected}, got {list(found.shape)}"
            )
        if not all_finite(found):
            raise ValueError("contexts must give finite features, got NaN or infinity")
        return nn.functional.pad(found, (0, 1), value=1.0)

    def _remember(self, *parts: Tensor) -> None:
        """Overwrite the oldest observations."""
        if not self._observed:
            self._observed = [part.new_zeros(0, *part.shape[1:]) for part in parts]
        size = len(self._observed[0])
        needed = min(self.memory, self.seen + len(parts[0]))
        if size < needed:  # twice the size each time
            size = min(self.memory, max(needed, 2 * size))
            self._observed = [_lengthened(part, size) for part in self._observed]
        slots = torch.arange(self.seen, self.seen + len(parts[0]))[-self.memory :] % self.memory
        for stored, part in zip(self._observed, parts, strict=True):
            stored[slots.to(stored.device)] = part[-self.memory :].to(stored.dtype)


def _lengthened(part: Tensor, size: int) -> Tensor:
    return torch.cat([part, part.new_zeros(size - len(part), *part.shape[1:])])
