# SPDX-License-Identifier: Apache-2.0
"""Law of the wheel bandit, and its agents."""

import pytest
import torch

RADII = (0.5, 0.8)


@pytest.fixture
def wheel(load):
    return load("wheel_bandit")


def test_rewards_are_those_of_the_wheel(wheel):
    env = wheel.Wheel(RADII, 20_000, seed=3)
    x, radius = env.contexts, env.contexts.norm(dim=-1)
    area = torch.rand(20_000, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(radius.square(), area)  # uniform in the disk
    signs = {0: (1, 1), 1: (1, -1), 2: (-1, 1), 3: (-1, -1)}
    for means, delta in zip(env.means.unbind(1), RADII, strict=True):
        beyond = radius > delta
        assert means[~beyond].eq(torch.tensor([1.0, 1.0, 1.0, 1.0, 1.2])).all()
        assert means[beyond].sum(-1).allclose(torch.tensor(54.2))
        for action, sign in signs.items():
            high = means[:, action] == 50
            assert high.equal(beyond & (x * torch.tensor(sign) > 0).all(-1))
    assert (env.rewards - env.means).abs().max() < 0.1


def test_regret_of_the_best_the_safe_and_any_action(wheel):
    env = wheel.Wheel(RADII, 500, seed=0)
    assert env.regret(env.means.argmax(-1)).eq(0).all()
    beyond = env.contexts.norm(dim=-1, keepdim=True) > torch.tensor(RADII)
    safe = env.regret(torch.full((500, 2), wheel.SAFE))
    assert safe.allclose(torch.where(beyond, 48.8, 0.0))
    every = torch.stack([env.regret(torch.full((500, 2), a)) for a in range(5)])
    torch.testing.assert_close(env.uniform_regret, every.mean(0))


@pytest.mark.parametrize("name", ["last layer", "BBB", "bootstrap of 3"])
def test_an_agent_plays(wheel, name, radii=RADII):
    torch.manual_seed(0)
    learning = wheel.Learning(hidden=8, learn_every=10, num_batches=2, batch_size=4, memory=30)
    env = wheel.Wheel(radii, 50, seed=0)
    agent = wheel.AGENTS[name](len(radii), learning)
    actions = wheel.play(env, agent, name)
    assert actions.shape == (50, len(radii))
    assert all(column[:15].tolist() == [*range(5)] * 3 for column in actions.T)
    assert ((actions >= 0) & (actions < 5)).all()


def test_wheels_are_learned_apart(wheel):
    """An agent's values on one wheel do not depend on the other's rewards."""
    learning = wheel.Learning(hidden=8, learn_every=10, num_batches=3, batch_size=4, memory=30)
    contexts = torch.randn(20, 1, 2, generator=torch.Generator().manual_seed(1)).expand(-1, 2, -1)
    actions = torch.arange(40).view(20, 2) % 5
    values = []
    for second in (0.0, 10.0):
        torch.manual_seed(0)
        agent = wheel.by_guide("softplus_normal", 2, learning)
        for n in range(20):
            reward = torch.tensor([[1.0, second]])
            agent.observe(contexts[n, None], actions[n, None], reward)
        torch.manual_seed(2)
        values.append(agent.agent.values(contexts))
    torch.testing.assert_close(values[0][..., 0], values[1][..., 0])
    assert (values[0][..., 1] - values[1][..., 1]).abs().mean() > 0.01
