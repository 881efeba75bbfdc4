# SPDX-License-Identifier: Apache-2.0
"""Buying labels: what is chosen, by what, and that nothing is read that is not bought."""

import math
from dataclasses import replace

import pytest
import torch

import pyro_bbb as bbb

CLASSES = 4


@pytest.fixture
def pool(load):
    return load("_helpers.label_pool")


@pytest.fixture
def experiment(load):
    return load("active_learning")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def examples(count=200):
    """Inputs that are the numbers from 0, and their labels."""
    return torch.arange(count, dtype=torch.float32), torch.arange(count) % CLASSES


def never(x):
    raise AssertionError("asked")


def says(probs):
    """A prediction from class probabilities ``[S, n, C]``."""
    return bbb.ClassificationPrediction(torch.tensor(probs, dtype=torch.float64).log())


def by_value(x):
    """Two draws that disagree the more, the larger an input is."""
    fraction = 0.5 + x.double() / 1000
    draw = torch.stack([fraction, 1 - fraction], -1)
    return bbb.ClassificationPrediction(torch.stack([draw, draw.flip(-1)]).log())


@pytest.mark.parametrize("rule", ["BALD", "entropy", "random"])
def test_the_labelled_set_only_grows_and_holds_each_example_once(pool, rule):
    some = pool.Pool(*examples(), 8, generator())
    before = some.rows
    for count in (1, 5, 30):
        pool.acquire(some, rule, by_value, count, 50)
        assert len(some) == len(some.rows) == len(before) + count
        assert some.rows[: len(before)].equal(before), "an earlier label went, or moved"
        before = some.rows
    assert len(before.unique()) == len(before)
    x, y = some.data
    assert x.equal(before.float()) and y.equal(before % CLASSES)
    assert not set(some.candidates(10**6)[0].tolist()) & set(before.tolist())
    assert len(some.candidates(10**6)[0]) == 200 - len(before)


def test_the_start_has_equally_many_of_each_class(pool):
    some = pool.Pool(*examples(), 12, generator(3))
    assert some.data[1].bincount().tolist() == [3] * CLASSES
    assert not some.rows.equal(pool.Pool(*examples(), 12, generator(4)).rows)
    for start in (10, 10 * 200):
        with pytest.raises(ValueError, match="start must be equally many of 4 classes"):
            pool.Pool(*examples(), start, generator())


def test_a_label_is_bought_once(pool):
    some = pool.Pool(*examples(), 8, generator())
    free = some.candidates(2)[0]
    for rows in (some.rows[:1], free[[0, 0]]):
        with pytest.raises(ValueError, match="different and without a label"):
            some.label(rows)
    assert len(some) == 8


def test_the_highest_scores_are_bought(pool):
    some = pool.Pool(*examples(), 8, generator())
    free = some.candidates(200)[0].sort().values
    pool.acquire(some, "BALD", by_value, 5, 200)
    assert some.rows[8:].sort().values.equal(free[-5:])  # their draws disagree most


def test_only_so_many_candidates_are_looked_at(pool):
    some = pool.Pool(*examples(), 8, generator())
    asked = []

    def predict(x):
        asked.append(x)
        return by_value(x)

    pool.acquire(some, "BALD", predict, 3, 20)
    (x,) = asked
    assert len(x) == 20 and set(some.rows[8:].tolist()) == set(x.topk(3).values.int().tolist())
    pool.acquire(some, "BALD", predict, 30, 20)
    assert len(asked[1]) == 30 and not asked[1].equal(x)


def test_bald_wants_disagreement_and_entropy_any_doubt(pool):
    agreed, sure = [0.3, 0.3, 0.4], [0.98, 0.01, 0.01]
    one, other = [0.98, 0.01, 0.01], [0.01, 0.98, 0.01]
    prediction = says([[agreed, sure, one], [agreed, sure, other]])
    assert pool.SCORES["BALD"](prediction).argmax() == 2
    assert pool.SCORES["entropy"](prediction).argmax() == 0
    assert pool.SCORES["BALD"](prediction)[:2].abs().max() < 1e-12
    mean = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
    entropy = [-sum(p * math.log(p) for p in probs) for probs in (one, mean)]
    assert float(pool.SCORES["BALD"](prediction)[2]) == pytest.approx(entropy[1] - entropy[0])


def test_random_asks_no_network(pool):
    some = pool.Pool(*examples(), 8, generator())
    pool.acquire(some, "random", never, 5, 50)
    assert len(some) == 13


def test_labels_at_a_target_are_interpolated(pool):
    labels, accuracy = [20, 30, 50, 90], [0.5, 0.7, 0.6, 0.8]
    assert pool.labels_at(labels, accuracy, 0.4) == 20
    assert pool.labels_at(labels, accuracy, 0.6) == pytest.approx(25)
    assert pool.labels_at(labels, accuracy, 0.7) == 30
    assert pool.labels_at(labels, accuracy, 0.75) == pytest.approx(80)
    assert pool.labels_at(labels, accuracy, 0.9) is None


@pytest.fixture
def small(experiment):
    """A recipe of a second, and a few enlarged digits."""
    recipe = replace(experiment.RECIPES["ours"], steps=1, samples=2, joint_samples=2, candidates=40)
    return recipe, experiment.load(experiment.Config(smoke=True))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["BALD", "entropy", "BatchBALD", "diverse BALD", "random"])
def test_no_label_is_read_that_is_not_bought(experiment, pool, small, monkeypatch, rule):
    recipe, sets = small
    curve, honest = experiment.learn(recipe, sets, rule, 0, 40)
    assert curve["labels"] == [20, 30, 40] == [20, *range(30, 41, 10)]

    x, y = sets.measured
    other = replace(sets, measured=(x, (y + 1) % 10))
    changed, again = experiment.learn(recipe, other, rule, 0, 40)
    assert again.rows.equal(honest.rows) and changed["accuracy"] != curve["accuracy"]

    start = pool.Pool.__init__

    def lie(self, *args):
        start(self, *args)
        self._y = self._y.where(~self._hidden, 0)  # labels not bought yet
        bought = honest.rows  # but for those that it will buy
        self._y[bought] = args[1][bought]

    monkeypatch.setattr(pool.Pool, "__init__", lie)
    assert experiment.learn(recipe, sets, rule, 0, 40)[1].rows.equal(honest.rows)


def test_the_next_round_goes_on_from_the_means_with_the_scales_as_at_the_start(
    experiment, small, monkeypatch
):
    recipe, sets = small
    x, y = sets.pool
    before = experiment.train(recipe, (x[:20], y[:20]), 0)
    means = {name: value.clone() for name, value in before[1].median().items()}
    kernels = [p.clone() for p in before[0].network.parameters()]
    assert len(kernels) == 4 and len(means) == 4  # of convolutions, and of dense layers
    monkeypatch.setattr(bbb, "fit", lambda *args, **options: None)
    model, guide = experiment.train(recipe, (x[:30], y[:30]), 1, before)
    assert model.num_data == 30
    for name, mean in means.items():
        assert guide.loc(name).equal(mean)
        scale = torch.nn.functional.softplus(torch.tensor(recipe.init_rho))
        torch.testing.assert_close(guide.scale(name), scale.expand_as(mean))
    assert all(a.equal(b) for a, b in zip(model.network.parameters(), kernels, strict=True))


def test_the_published_network_has_the_papers_layers(experiment):
    network = experiment.make_network(experiment.RECIPES["published"])
    kinds = [type(layer).__name__ for layer in network]
    assert kinds == "Conv2d ReLU Conv2d MaxPool2d ReLU Flatten Linear ReLU Linear".split()
    shapes = [tuple(p.shape) for p in network.parameters() if p.dim() > 1]
    assert shapes == [(32, 1, 4, 4), (32, 32, 4, 4), (128, 32 * 11 * 11), (10, 128)]
    assert network(torch.rand(2, 1, 28, 28)).shape == (2, 10)


def test_networks_are_asked_for_equally_many_draws_and_count_alike(experiment, small):
    recipe, sets = small
    x, y = (part[:8] for part in sets.measured)
    networks = [experiment.train(recipe, (x, y), seed) for seed in (0, 1, 2)]
    options = {"seed": 4, "estimator": "local_reparam"}
    joined = experiment.predict(networks, x, num_samples=6, **options)
    each = [bbb.predict(*trained, x, num_samples=2, **options) for trained in networks]
    assert len(joined.sample_log_probs) == 6 and joined.sampler == "outputs"
    mean = torch.stack([prediction.probs for prediction in each]).mean(0)
    assert torch.allclose(joined.probs, mean, atol=1e-6)
    assert not torch.allclose(each[0].probs, each[1].probs, atol=1e-2)


@pytest.mark.parametrize(("rules", "times"), [(("BALD",), "–"), (("BALD", "random"), "over 2.00")])
def test_the_table_has_a_ratio_where_random_labels_were_bought(experiment, rules, times):
    runs = {
        "BALD": experiment.summarise({"labels": [20, 40], "accuracy": [0.95, 0.96], "nll": [1, 1]}),
        "random": experiment.summarise({"labels": [20, 40], "accuracy": [0.1, 0.2], "nll": [2, 2]}),
    }
    ratios = {"BALD": dict.fromkeys(experiment.TARGETS, 2.0)} if "random" in rules else {}
    seed = {rule: runs[rule] for rule in rules} | {"times_fewer_labels": ratios}
    summary = {"seeds": {"0": seed}} | {"mean": seed}
    assert experiment.labels_table(summary, rules).rows[0] == [
        "BALD",
        *"20 20".split(),
        times,
        times,
        "20",
    ]
