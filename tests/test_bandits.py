# SPDX-License-Identifier: Apache-2.0
"""Agents that act by draws of their posterior."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

import pyro_bbb as bbb
from pyro_bbb import bandits, guides, likelihoods
from tests.training.test_captured import NoReading

SIGMAS = 6  # of a share, about 2e-9 for each


def by_arm(contexts, action):
    """The context in the place of its action's, zeros elsewhere: arms share no weight."""
    x = contexts.new_zeros(*contexts.shape[:-1], 2, contexts.shape[-1])
    x[..., action, :] = contexts
    return x.flatten(-2)


def linear(guide="softplus_normal", noise=0.5, features=2, **options):
    """An agent of two arms, whose rewards are linear in the context."""
    network = bbb.BayesianLinear(2 * features, 1, bias=False, prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, likelihoods.Gaussian(noise), num_data=100)
    guide = guides.make(guide, model)
    options = {"memory": 64, "batch_size": 16, "num_batches": 4, "num_samples": 1, **options}
    return bandits.ThompsonAgent(model, guide, by_arm, 2, **options)


def state(agent):
    return [parameter.detach().clone() for parameter in agent.guide.parameters()]


# --- acting ---


@pytest.mark.parametrize("num_samples", [1, 2])
def test_actions_have_the_frequencies_of_exact_thompson_sampling(num_samples):
    """The better arm's probability is that of a Normal difference, at the exact posterior."""
    torch.manual_seed(0)
    contexts = torch.tensor([[1.0, 0.0], [0.6, -0.8], [0.0, 1.0]])
    agent = linear("full_rank", noise=4.0, num_samples=num_samples)
    x = torch.cat([by_arm(torch.randn(6, 2), arm) for arm in (0, 1)])
    y = x @ torch.tensor([0.3, -0.2, 0.1, 0.4]) + 4 * torch.randn(12)
    precision = torch.eye(4) + x.T @ x / 16
    mean, covariance = torch.linalg.solve(precision, x.T @ y / 16), precision.inverse()
    put(agent.guide, mean, torch.linalg.cholesky(covariance))

    difference = by_arm(contexts, 1) - by_arm(contexts, 0)
    variance = ((difference @ covariance) * difference).sum(1) / num_samples
    exact = torch.special.ndtr(difference @ mean / variance.sqrt())
    assert ((exact > 0.05) & (exact < 0.95)).all()  # no foregone conclusion
    count = 1000
    share = sum(agent.act(contexts) for _ in range(count)) / count
    assert ((share - exact).abs() < SIGMAS * (exact * (1 - exact) / count).sqrt()).all()


def put(guide, mean, root):
    """Makes a full-rank guide the Normal of this mean and root of the covariance."""
    scale = root.diagonal()
    with torch.no_grad():
        guide.loc.copy_(mean)
        guide.scale_unconstrained.copy_(scale.expm1().log())
        guide.scale_tril_unconstrained.copy_(root / scale[:, None])
    draws = guide.sample_posterior(20_000)["network.weight"].flatten(1)
    torch.testing.assert_close(draws.T.cov(), root @ root.T, rtol=0.1, atol=0.01)


def test_without_spread_it_is_greedy():
    agent = linear("delta")
    with torch.no_grad():
        next(agent.guide.parameters()).copy_(torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
    contexts = torch.randn(50, 2)
    assert agent.act(contexts).equal((contexts[:, 1] > contexts[:, 0]).long())
    values = agent.values(contexts)
    torch.testing.assert_close(values, contexts.T)


# --- remembering ---


@pytest.mark.parametrize("chunks", [[1] * 11, [3, 5, 3], [11], [2, 20]])
def test_memory_is_a_ring_of_the_latest(chunks):
    agent, count = linear(memory=8), sum(chunks)
    x, actions, rewards = torch.randn(count, 2), torch.arange(count) % 2, torch.arange(count) + 0.5
    for rows in torch.arange(count).split(chunks):
        agent.remember(x[rows], actions[rows], rewards[rows])
    latest = range(count - 8, count)
    arms = [torch.where(torch.arange(2)[:, None] == actions[i], x[i], 0.0) for i in latest]
    expected = {(*arm.flatten().tolist(), i + 0.5) for arm, i in zip(arms, latest, strict=True)}
    held = torch.cat([agent._inputs, agent._rewards[:, None]], 1)
    assert {tuple(row) for row in held.tolist()} == expected
    assert agent.seen == count


@pytest.mark.parametrize("filled", [1, 3, 7, 8])
def test_minibatches_hold_every_observation_equally_often_in_random_order(filled):
    agent = linear(memory=8, batch_size=4, num_batches=6)
    rows = agent._minibatches(torch.tensor(filled))
    assert rows.shape == (6, 4)
    counts = rows.flatten().bincount(minlength=8)
    assert counts[filled:].sum() == 0
    assert counts[:filled].max() - counts[:filled].min() <= 1
    again = agent._minibatches(torch.tensor(filled))
    assert filled < 7 or not again.equal(rows)


# --- learning ---


@pytest.mark.parametrize("weigh_by", ["seen", "memory"])
@pytest.mark.parametrize("guide", ["softplus_normal", "low_rank", "delta"])
def test_a_step_is_that_of_pyros_svi(guide, weigh_by):
    """Losses agree for the same minibatch and noise, the KL weighed by the share of the data."""
    sides = []
    for own in (True, False):
        torch.manual_seed(0)
        agent = linear(guide, batch_size=6, num_batches=1, lr=0.01, weigh_by=weigh_by)
        contexts, actions, rewards = torch.randn(6, 2), torch.arange(6) % 2, torch.randn(6)
        agent.remember(contexts, actions, rewards)
        torch.manual_seed(1)
        if own:
            agent.learn()
        else:
            rows = agent._minibatches(agent.seen)[0]
            weight = 6 / (6 if weigh_by == "seen" else 64)
            svi(agent).step(agent._inputs[rows], agent._rewards[rows], weight)
        sides.append(state(agent))
    for actual, expected in zip(*sides, strict=True):
        torch.testing.assert_close(actual, expected)


def svi(agent):
    optim = bbb.JointOptim(torch.optim.Adam, {"lr": 0.01})
    return SVI(agent.model, agent.guide, optim, Trace_ELBO())


def test_temperature_0_leaves_the_prior_out():
    """Least squares, however narrow the prior."""
    torch.manual_seed(0)
    network = bbb.BayesianLinear(4, 1, bias=False, prior=dist.Normal(0.0, 1e-3))
    model = bbb.BayesianModel(network, likelihoods.Gaussian(1.0), num_data=8)
    options = {"memory": 8, "batch_size": 8, "num_batches": 400, "temperature": 0.0, "lr": 0.05}
    agent = bandits.ThompsonAgent(model, guides.make("delta", model), by_arm, 2, **options)
    contexts, actions = torch.randn(8, 2), torch.arange(8) % 2
    truth = torch.tensor([1.0, -2.0, 0.5, 3.0])
    rewards = torch.where(actions == 0, contexts @ truth[:2], contexts @ truth[2:])
    agent.observe(contexts, actions, rewards)
    torch.testing.assert_close(state(agent)[0][0], truth, atol=1e-2, rtol=0)


CASES = {
    "learned noise": (likelihoods.Gaussian.learned(), "softplus_normal", {}),
    "Bernoulli": (likelihoods.Bernoulli(), "normal", {"optimizer": torch.optim.AdamW}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_learns_with_other_networks_likelihoods_and_guides(name):
    """One arm pays, which one is in the context; at last nearly every action is right."""
    torch.manual_seed(0)
    likelihood, guide, options = CASES[name]
    prior = bbb.ScaleMixtureNormal(0.5, 1.0, 0.1)
    model = bbb.BayesianModel(bbb.BayesianMLP([4, 16, 1], prior=prior), likelihood, num_data=10)
    options = {"memory": 256, "batch_size": 32, "num_batches": 6, "lr": 0.04, **options}
    options["weigh_by"] = "memory"
    agent = bandits.ThompsonAgent(model, guides.make(guide, model), by_arm, 2, **options)
    right = []
    for _ in range(20):
        contexts = torch.nn.functional.one_hot(torch.randint(2, (8,)), 2).float()
        actions = agent.act(contexts)
        hit = actions == contexts.argmax(1)
        agent.observe(contexts, actions, hit.float())
        right.append(hit.double().mean())
    assert sum(right[-8:]) / 8 > 0.85 > sum(right[:2]) / 2


def test_two_agents_are_independent_and_leave_pyros_store_alone():
    torch.manual_seed(0)
    first, second = linear(), linear()
    before = state(second)
    pyro.clear_param_store()
    first.observe(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]), torch.randn(4))
    assert all(map(torch.equal, before, state(second)))
    assert not list(pyro.get_param_store().keys())
    assert pyro.settings.get("validate_distributions_pyro")


@pytest.mark.parametrize("guide", ["softplus_normal", "delta"])
def test_no_number_is_read_from_the_device(guide):
    torch.manual_seed(0)
    agent = linear(guide, epsilon=0.1, temperature=0.0 if guide == "delta" else 1.0)

    def interact():
        contexts = torch.randn(1, 2)
        actions = agent.act(contexts)
        agent.remember(contexts, actions, contexts[:, 0])
        agent.learn()

    interact()
    with NoReading():
        interact()
