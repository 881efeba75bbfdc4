# SPDX-License-Identifier: Apache-2.0
"""Mushrooms of the experiment, and its agents side by side."""

import math
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import bandits, guides, likelihoods
from pyro_bbb._param_store import own_store
from tests.training.test_captured import NoReading

SIGMAS = 6  # of a share, about 2e-9 for each


@pytest.fixture
def bandit(load):
    return load("mushroom_bandit")


def offered(bandit, eats, count=4000, seeds=(0, 1, 0)):
    """Mushrooms, poisonous by their first feature, of which a rule of that feature eats some."""
    x = torch.rand(200, 117, generator=torch.Generator().manual_seed(0)).round()
    mushrooms, seen = bandit.Mushrooms(x, x[:, 0] > 0, list(seeds), count, unit=10.0), []
    agent = SimpleNamespace(
        act=lambda contexts: eats(contexts[..., 0] == 1).long(),
        remember=lambda contexts, actions, rewards: seen.append((contexts[..., 0] == 1, rewards)),
    )
    for _ in range(count):
        mushrooms.offer(agent)
    return mushrooms, *(torch.cat(rows) for rows in zip(*seen, strict=True))


def test_rewards_and_regret_follow_the_law_of_the_bandit(bandit):
    oracle, _, rewards = offered(bandit, torch.logical_not, 500)
    assert not oracle.regret.any() and not oracle.realised.any() and oracle.next == 500
    assert set(rewards.unique().tolist()) == {0.0, 0.5}
    passing, poisonous, rewards = offered(bandit, torch.zeros_like, 300)
    assert not rewards.any()
    assert passing.regret.equal(torch.where(poisonous, 0.0, 5.0))
    assert passing.realised.equal(passing.regret)
    eating, poisonous, rewards = offered(bandit, torch.ones_like)
    assert set((10 * rewards[poisonous]).unique().tolist()) == {-35.0, 5.0}
    assert set((10 * rewards[~poisonous]).unique().tolist()) == {5.0}
    own, bad = poisonous[:, :2], int(poisonous[:, :2].sum())
    harmed = ((rewards[:, :2] < 0) & own).sum() / bad
    assert abs(harmed - 0.5) < SIGMAS * 0.5 / math.sqrt(bad)
    assert eating.regret.equal(torch.where(poisonous, 15.0, 0.0))
    expected = torch.where(poisonous, -10 * rewards, 5.0 - 10 * rewards)
    torch.testing.assert_close(eating.realised, expected)
    assert rewards[:, 0].equal(rewards[:, 2]) and not rewards[:, 0].equal(rewards[:, 1])  # seeds


# --- agents side by side ---


def test_agents_side_by_side_have_an_epsilon_each(bandit):
    torch.manual_seed(0)
    network = bandit.StackedMLP(2, [119, 4, 1], dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, likelihoods.Gaussian(), num_data=10)
    agent = bandits.ThompsonAgent(
        model, guides.make("delta", model), bandit.encode, 2, epsilon=torch.tensor([0.0, 1.0])
    )
    contexts = torch.rand(4000, 2, 117).round()
    actions, best = agent.act(contexts), agent.values(contexts).argmax(0)
    assert actions[:, 0].equal(best[:, 0])
    agreeing = (actions[:, 1] == best[:, 1]).double().mean()
    assert abs(agreeing - 0.5) < SIGMAS * 0.5 / math.sqrt(4000)


def grouped_network(bandit, seeds, bayesian, record=None):
    prior = bbb.ScaleMixtureNormal(0.5, 1.0, 0.1)
    network = bandit.StackedMLP(len(seeds), [119, 6, 5, 1], prior)
    model = bbb.BayesianModel(network, likelihoods.Gaussian(0.7), num_data=10)
    start = {"weights": network.he(seeds)}
    name, temperature = ("softplus_normal", 1.0) if bayesian else ("delta", 0.0)
    guide = guides.make(name, model, init_loc=start)
    options = {"memory": 16, "batch_size": 4, "num_batches": 3, "temperature": temperature}
    if record is not None:
        return bandit.RecordedAgent(model, guide, bandit.encode, 2, compiler=record, **options)
    return bandits.ThompsonAgent(model, guide, bandit.encode, 2, **options)


def test_each_network_side_by_side_is_the_plain_one(bandit):
    network = bandit.StackedMLP(3, [119, 6, 5, 1], dist.Normal(0.0, 1.0))
    weights = network.he([0, 1, 2])
    assert weights[1].equal(bandit.StackedMLP(1, [119, 6, 5, 1], dist.Normal(0, 1)).he([1])[0])
    x = torch.randn(7, 3, 119)
    with pyro.poutine.condition(data={"weights": weights}):
        outputs = network(x)
    for agent in range(3):
        blocks = weights[agent].split(network.lengths)
        plain = nn.Sequential(
            nn.Linear(119, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1)
        )
        for layer, kernel, bias in zip(plain[::2], blocks[::2], blocks[1::2], strict=True):
            layer.weight.data = kernel.view(layer.in_features, layer.out_features).t()
            layer.bias.data = bias
        torch.testing.assert_close(outputs[:, agent], plain(x[:, agent])[:, 0])


@pytest.mark.parametrize("bayesian", [True, False])
def test_two_agents_side_by_side_learn_as_each_alone(bandit, bayesian, monkeypatch):
    """The noise is the same, the ELBO a sum over the agents, and Adam elementwise."""
    length = sum(bandit.StackedMLP(1, [119, 6, 5, 1], dist.Normal(0.0, 1.0)).lengths)
    source = torch.Generator().manual_seed(1)
    noise = torch.randn(100, 2, length, generator=source)
    x, rewards = torch.rand(9, 2, 117).round(), torch.randn(9, 2)
    actions = torch.randint(2, (9, 2))
    ends = []
    for who in ([0, 1], [0], [1]):
        agent, steps = grouped_network(bandit, [10 + w for w in who], bayesian), iter(noise)
        monkeypatch.setattr(torch, "randn", lambda *_, s=steps, w=who, **__: next(s)[w])
        for rows in torch.arange(9).split(3):
            torch.manual_seed(int(rows[0]))  # the order of the minibatches
            agent.remember(x[rows][:, who], actions[rows][:, who], rewards[rows][:, who])
            agent.learn()
        monkeypatch.undo()
        ends.append([parameter.detach().clone() for parameter in agent.guide.parameters()])
    for both, first, second in zip(*ends, strict=True):
        torch.testing.assert_close(both, torch.cat([first, second]))


def test_a_recorded_step_is_the_step(bandit):
    x, actions, rewards = torch.rand(9, 2, 117).round(), torch.randint(2, (9, 2)), torch.randn(9, 2)
    agent = grouped_network(bandit, [0, 1], True, record=lambda graph: graph)
    agent.observe(x, actions, rewards)
    batch = agent._inputs[:4], agent._rewards[:4], torch.tensor(0.3)
    ends = []
    for gradients in (torch.no_grad()(agent._recorded), agent._gradients):
        torch.manual_seed(0)
        with own_store(agent.model, agent.guide), pyro.validation_enabled(False):
            ends.append(gradients(*batch))
    for recorded, plain in zip(*ends, strict=True):
        torch.testing.assert_close(recorded, plain)
    agent.learn()
    with NoReading():
        agent.learn()


def test_what_was_played_is_not_played_again(bandit, tmp_path, monkeypatch):
    options = {"smoke": True, "seeds": 2, "output": tmp_path}
    first = bandit.main(bandit.Config(**options, agents=("bbb",)))
    monkeypatch.setattr(bandit.Mushrooms, "offer", None)
    again = bandit.main(bandit.Config(**options, agents=("bbb",)))
    assert again["seeds"] == first["seeds"]
    with pytest.raises(TypeError):
        bandit.main(bandit.Config(**options, agents=("bbb",), seed=1))
