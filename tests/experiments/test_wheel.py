"""Law of the wheel bandit, and its agents."""

import pytest
import torch


@pytest.fixture
def wheel(load):
    return load("_helpers.wheel")


def test_rewards_are_those_of_the_wheel(wheel):
    env = wheel.Wheel(0.8, 20_000, seed=3)
    x, radius = env.contexts, env.contexts.norm(dim=-1)
    area = torch.rand(20_000, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(radius.square(), area)  # uniform in the disk
    beyond = radius > 0.8
    assert env.means[~beyond].eq(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.2])).all()
    assert env.means[beyond].sum(-1).allclose(torch.tensor(54.2))
    signs = {0: (1, 1), 1: (1, -1), 2: (-1, 1), 3: (-1, -1)}
    for action, sign in signs.items():
        high = env.means[:, action] == 50
        assert high.equal(beyond & (x * torch.tensor(sign) > 0).all(-1))
    assert (env.rewards - env.means).abs().max() < 0.1


def test_regret_of_the_best_the_safe_and_any_action(wheel):
    env = wheel.Wheel(0.5, 500, seed=0)
    assert env.regret(env.means.argmax(-1)).eq(0).all()
    beyond = env.contexts.norm(dim=-1) > 0.5
    safe = env.regret(torch.full((500,), wheel.SAFE))
    assert safe.allclose(torch.where(beyond, 48.8, 0.0))
    every = torch.stack([env.regret(torch.full((500,), a)) for a in range(5)])
    torch.testing.assert_close(env.uniform_regret, every.mean(0))


@pytest.mark.parametrize("name", ["last layer", "BBB", "bootstrap of 5", "greedy"])
def test_an_agent_plays(wheel, name):
    torch.manual_seed(0)
    learning = wheel.Learning(hidden=8, learn_every=10, num_batches=2, batch_size=4, memory=30)
    env = wheel.Wheel(0.5, 50, seed=0)
    agent = wheel.AGENTS[name](learning)
    actions = wheel.play(env, agent, name)
    assert actions[:15].tolist() == [*range(5)] * 3
    assert ((actions >= 0) & (actions < 5)).all()


def test_a_bootstrap_shows_each_observation_to_half_of_the_networks(wheel):
    torch.manual_seed(0)
    learning = wheel.Learning(hidden=4, learn_every=10_000, memory=30)
    agent = wheel.Bootstrap(3, learning)
    for _ in range(40):
        agent.observe(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([1.0]))
    seen = [member.seen for member in agent.members]
    assert len(set(seen)) > 1 and all(8 < each < 32 for each in seen)
