# SPDX-License-Identifier: Apache-2.0
"""Tasks, priors and scores of `experiments/continual.py`."""

from dataclasses import replace

import pytest
import torch
from pyro import poutine
from pyro.distributions import MultivariateNormal, Normal

from pyro_bbb import guides


@pytest.fixture
def tasks(load):
    return load("continual")


def images(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, 784, generator=generator), torch.arange(n) % 10


def test_permuted_tasks_have_the_same_pixels_in_other_orders(tasks):
    train, scored = images(20), images(10, seed=1)
    permuted = tasks.permuted(train, scored, seed=3, own_heads=False)
    assert len(permuted) == 10 and {task.head for task in permuted} == {"last"}
    assert permuted[0].data(True)[0].equal(train[0])
    orders = set()
    for task in permuted:
        (x, y), (x_scored, _) = task.data(True), task.data(False)
        assert y.equal(train[1]) and x.sort(-1).values.equal(train[0].sort(-1).values)
        order = (x[0][:, None] == train[0][0]).int().argmax(-1)  # random pixels are different
        assert x_scored.equal(scored[0][:, order])
        orders.add(tuple(order.tolist()))
    assert len(orders) == 10


@pytest.mark.parametrize("own_heads", [True, False])
def test_split_tasks_are_pairs_of_classes(tasks, own_heads):
    train, scored = images(50), images(30, seed=1)
    pairs = tasks.split(train, scored, seed=0, own_heads=own_heads)
    assert len({task.head for task in pairs}) == (5 if own_heads else 1)
    for training, (x, y) in ((True, train), (False, scored)):
        data = [task.data(training) for task in pairs]
        for number, (pixels, label) in enumerate(data):
            assert pixels.equal(x[y // 2 == number]) and label.equal(y[y // 2 == number] % 2)


def small(tasks, name="split", **settings):
    protocol = replace(tasks.PROTOCOLS[name], hidden=(5, 4), coreset=3)
    chosen = {"guide": "softplus_normal", "epochs": 1, "engine": "eager", **settings}
    learner = tasks.Learner(protocol, tasks.Settings(**chosen), seed=0)
    return learner, protocol.tasks(images(60), images(30, seed=1), 0, protocol.own_heads)


@pytest.mark.parametrize("strength", [1.0, 4.0])
def test_the_posterior_is_the_next_prior_and_the_next_start(tasks, strength):
    learner, (first, second, *_) = small(tasks, strength=strength)
    learner.learn(first)
    before = learner.latest["last0"]
    model, guide = learner.posterior(second.head, 12)
    trace = poutine.trace(model).get_trace(torch.rand(2, 784), torch.tensor([0, 1]))
    sites = {n: site["fn"] for n, site in trace.nodes.items() if n.startswith("network.")}
    for name in ("network.fc1.weight", "network.fc2.bias"):
        torch.testing.assert_close(sites[name].mean, before.loc(name))
        scale = sites[name].variance.sqrt()
        if strength == 1:
            torch.testing.assert_close(scale, before.scale(name), rtol=1e-4, atol=0)
        assert guide.loc(name).equal(before.loc(name))
        torch.testing.assert_close(guide.scale(name), scale, rtol=1e-4, atol=0)
    head = sites["network.last1.weight"]
    assert head.mean.eq(0).all() and head.variance.allclose(torch.tensor(0.5))  # 2 / 4 units


def test_an_earlier_task_has_its_own_head_and_the_latest_trunk(tasks):
    learner, (first, second, *_) = small(tasks)
    learner.learn(first)
    before = learner.latest["last0"].loc("network.last0.weight").clone()
    learner.learn(second)
    _, guide = learner.posterior("last0", 1)
    assert guide.loc("network.last0.weight").equal(before)
    trunk = "network.fc1.weight"
    assert guide.loc(trunk).equal(learner.latest["last1"].loc(trunk))
    _, draws = learner.refine("last0")
    assert draws.keys() == guide.median().keys()
    assert learner.predict(first).probs.shape == (6, 2)


def test_the_kronecker_normal_has_the_density_of_the_full_one(tasks):
    torch.set_default_dtype(torch.float64)
    loc, roots = torch.randn(3, 4), (torch.randn(3, 3), torch.randn(4, 2))
    of_outputs, of_inputs = (root @ root.T for root in roots)
    ours = tasks.kronecker_normal(loc, of_outputs, of_inputs, 0.7)
    precision = torch.kron(of_outputs, of_inputs) + 0.7 * torch.eye(12)
    full = MultivariateNormal(loc.flatten(), precision_matrix=precision)
    value = torch.randn(5, 3, 4)
    torch.testing.assert_close(ours.log_prob(value), full.log_prob(value.flatten(1)))
    log_p = ours.log_prob(ours.rsample((2000,)))
    # minus half a chi-square of 12: within 5 standard errors, a false alarm in 1.7 million seeds
    assert log_p.mean().item() == pytest.approx(-full.entropy().item(), abs=5 * (6 / 2000) ** 0.5)


def test_one_task_in_kronecker_factors_is_its_laplace_posterior(tasks):
    options = {"guide": "delta", "memory": tasks.KroneckerMemory, "draws": 0}
    learner, (first, *_) = small(tasks, **options)
    learner.learn(first)
    memory, data = learner.memory, first.data(True)
    model = learner.model(first.head, learner.settings.first_prior, len(data[0]))
    laplace = guides.Laplace(model, structure="kron")
    laplace.approximate(data)
    values = {name: loc + 0.1 * torch.randn_like(loc) for name, loc in memory.loc.items()}
    once = {name: memory.normal(name).log_prob(value) for name, value in values.items()}
    for name, factor in zip(laplace.site_names, laplace.covariance, strict=True):
        white = factor.whiten((values[name] - memory.loc[name]).flatten())
        expected = Normal(0.0, 1.0).log_prob(white).sum() - factor.log_det_root()
        torch.testing.assert_close(once[name], expected, rtol=1e-4, atol=1e-2)


def test_what_two_tasks_gave_adds_up_and_strength_multiplies_it(tasks):
    options = {"guide": "delta", "memory": tasks.KroneckerMemory, "draws": 0}
    learner, (first, *_) = small(tasks, **options)
    learner.learn(first)
    memory, name = learner.memory, "network.fc1.weight"
    (factor,) = memory.normal(name).base_dist.parts
    once = factor.scale**-2 - memory.first[name]
    model = learner.model(first.head, learner.settings.first_prior, 12)
    memory.add(model, learner.latest[first.head], first.data(True))
    memory.strength = 5.0
    (factor,) = memory.normal(name).base_dist.parts
    both = factor.scale**-2 - memory.first[name]
    torch.testing.assert_close(both, 10 * once, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kind", ["random", "k_center"])
def test_a_coreset_is_kept_from_training(tasks, kind):
    learner, (first, *_) = small(tasks, coreset=kind)
    x, y = first.data(True)
    left, labels = learner.set_aside(first, (x, y))
    ((kept, kept_labels),) = learner.coresets[first.head]
    assert len(kept) == 3 and len(left) == len(x) - 3
    together = torch.cat([torch.cat([left, kept]), torch.cat([labels, kept_labels])[:, None]], 1)
    assert together.unique(dim=0).equal(torch.cat([x, y[:, None]], 1).unique(dim=0))


def test_at_once_each_image_has_the_outputs_of_its_tasks_head(tasks):
    protocol = replace(tasks.PROTOCOLS["split"], hidden=(5, 4))
    together = tasks.AllTasks(protocol, protocol.tasks(images(60), images(30), 0, True))
    x, y = together.joined.data(True)
    assert x.shape == (60, 785) and len(y) == 60
    network = together.network("last")
    everything = network.network(x[:, :-1])
    for number in range(5):
        rows = x[:, -1] == number
        assert network(x)[rows].equal(everything[rows, 2 * number : 2 * number + 2])
    one_head = replace(protocol, own_heads=False)
    plain = tasks.AllTasks(one_head, one_head.tasks(images(60), images(30), 0, False))
    assert plain.joined.data(True)[0].shape == (60, 784)


def test_forgetting_is_what_was_known_best_less_what_is_known_at_the_end(tasks):
    matrix = [[0.9], [0.95, 0.8], [0.7, 0.85, 0.99]]
    assert tasks.forgetting(matrix) == pytest.approx((0.25 - 0.05) / 2)
    assert tasks.forgetting([[0.5]]) == 0.0
