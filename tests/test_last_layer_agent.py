# SPDX-License-Identifier: Apache-2.0
"""Exact regressions on learned features, and the bandit agent that acts by them."""

import pyro.distributions as dist
import torch
from torch import nn

from pyro_bbb import bandits
from pyro_bbb.bandits import LinearRewards


def observations(n, dim, num_actions, seed=0):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, dim, generator=generator).double()
    actions = torch.randint(num_actions, (n,), generator=generator)
    return z, actions, torch.randn(n, generator=generator).double() + actions


def test_each_action_has_the_conjugate_posterior():
    """The marginal t agrees with Pyro's density, and all data at once with one by one."""
    z, actions, rewards = observations(40, 3, 2)
    at_once, one_by_one = (LinearRewards(2, 3, 0.5, 3.0, 2.0, z.device) for _ in range(2))
    at_once.add(z, actions, rewards)
    for i in range(40):
        one_by_one.add(z[i : i + 1], actions[i : i + 1], rewards[i : i + 1])
    for name in ("precision", "mean", "root", "shape", "scale"):
        torch.testing.assert_close(getattr(at_once, name), getattr(one_by_one, name))

    def log_joint(w, variance, action):
        """Return the log-density of weights, variance of the noise, and the action's rewards."""
        mine = actions == action
        terms = (
            dist.InverseGamma(3.0, 2.0).log_prob(variance),
            dist.Normal(0.0, (variance / 0.5).sqrt()).log_prob(w).sum(),
            dist.Normal(z[mine] @ w, variance.sqrt()).log_prob(rewards[mine]).sum(),
        )
        return sum(terms)

    def log_posterior(w, variance, action):
        precision = at_once.precision[action] / variance
        normal = dist.MultivariateNormal(at_once.mean[action], precision_matrix=precision)
        gamma = dist.InverseGamma(at_once.shape[action], at_once.scale[action])
        return normal.log_prob(w) + gamma.log_prob(variance)

    points = [(torch.randn(3).double(), torch.rand(()).double() + 0.1) for _ in range(6)]
    for action in range(2):
        ratios = [log_joint(*p, action) - log_posterior(*p, action) for p in points]
        torch.testing.assert_close(torch.stack(ratios), ratios[0].expand(6))  # the evidence


def test_draws_of_the_last_layer_are_the_posteriors(monkeypatch):
    """Exactly, as functions of their noise."""
    z, actions, rewards = observations(30, 3, 2)
    posterior = LinearRewards(2, 3, 0.5, 3.0, 2.0, z.device)
    posterior.add(z, actions, rewards)
    seen = []

    def gamma(shape):
        seen.append(shape)
        return torch.tensor([1.5, 0.7]).double()

    monkeypatch.setattr(torch, "_standard_gamma", gamma)
    columns = []
    for i in range(3):
        unit = torch.zeros(2, 3).double().index_fill(1, torch.tensor([i]), 1.0)
        monkeypatch.setattr(torch, "randn_like", lambda _, unit=unit: unit)
        columns.append(posterior.draw() - posterior.mean)
    root = torch.stack(columns, -1)
    variance = posterior.scale / torch.tensor([1.5, 0.7])  # b / Gamma(a, 1) is InvGamma(a, b)
    expected = variance[:, None, None] * torch.linalg.inv(posterior.precision)
    torch.testing.assert_close(root @ root.mT, expected)
    assert all(concentration.equal(posterior.shape) for concentration in seen)


def wheel_like(n, seed=0):
    """Contexts in the square, and rewards of three actions: best by the side."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, 2, generator=generator) - 1
    best = torch.where(x[:, 0].abs() < 0.5, 0, torch.where(x[:, 0] > 0, 1, 2))
    return x, best


def test_the_last_layer_agent_learns_what_no_linear_agent_can():
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(2, 30), nn.ReLU())
    agent = bandits.LastLayerAgent(
        features, num_actions=3, num_features=30, learn_every=40, batch_size=64, lr=1e-2
    )
    x, best = wheel_like(500)
    right = []
    for i in range(500):
        action = agent.act(x[i : i + 1])
        right.append(bool(action == best[i]))
        agent.observe(x[i : i + 1], action, (action == best[i : i + 1]).float())
    assert agent.seen == 500
    assert sum(right[-100:]) > 85 and sum(right[:40]) < 30


def test_a_training_begins_the_regressions_anew_with_the_memory():
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    agent = bandits.LastLayerAgent(
        features, 2, 4, memory=10, learn_every=6, num_batches=2, batch_size=3
    )
    x = torch.randn(17, 2)
    actions, rewards = torch.arange(17) % 2, torch.randn(17)
    for rows in (slice(0, 5), slice(5, 6), slice(6, 17)):
        before = features[0].weight.clone()
        agent.observe(x[rows], actions[rows], rewards[rows])
        assert features[0].weight.equal(before) == (rows.stop == 5)
    fresh = LinearRewards(2, 5, 0.25, 6.0, 6.0, x.device)
    z = torch.nn.functional.pad(features(x[7:]), (0, 1), value=1.0).detach()
    fresh.add(z, actions[7:], rewards[7:])
    for name in ("precision", "mean", "shape", "scale"):
        torch.testing.assert_close(getattr(agent.rewards, name), getattr(fresh, name))


def test_trainings_become_rarer_as_observations_grow(monkeypatch):
    """Learned at 2, 4 (each time after two), 6 (half of 4), 9 (half of 6), then after 5 and 7."""
    features = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    agent = bandits.LastLayerAgent(
        features, 2, 4, learn_every=2, learn_growth=0.5, num_batches=1, batch_size=3
    )
    learned, learn = [], agent.learn
    monkeypatch.setattr(agent, "learn", lambda: (learned.append(agent.seen), learn()))
    for _ in range(30):
        agent.observe(torch.randn(1, 2), torch.tensor([0]), torch.randn(1))
    assert learned == [2, 4, 6, 9, 14, 21]
