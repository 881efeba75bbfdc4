# SPDX-License-Identifier: Apache-2.0
"""Buying labels: what is chosen, by what, and that nothing is read that is not bought."""

from dataclasses import replace

import pytest
import torch

import pyro_bbb as bbb

CLASSES = 4


@pytest.fixture
def experiment(load):
    return load("active_learning")


@pytest.fixture
def pool(experiment):
    return experiment


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


@pytest.mark.parametrize("rule", ["BALD", "random"])
def test_the_labelled_set_only_grows_and_holds_each_example_once(pool, rule):
    labelled = pool.Pool(*examples(), 8, generator())
    before = labelled.rows
    for count in (1, 5, 30):
        pool.acquire(labelled, rule, by_value, count, 50)
        assert len(labelled.rows) == len(before) + count
        assert labelled.rows[: len(before)].equal(before), "an earlier label went, or moved"
        before = labelled.rows
    assert len(before.unique()) == len(before)
    x, y = labelled.data
    assert x.equal(before.float()) and y.equal(before % CLASSES)
    assert not set(labelled.candidates(10**6)[0].tolist()) & set(before.tolist())
    assert len(labelled.candidates(10**6)[0]) == 200 - len(before)


def test_the_start_has_equally_many_of_each_class(pool):
    labelled = pool.Pool(*examples(), 12, generator(3))
    assert labelled.data[1].bincount().tolist() == [3] * CLASSES
    assert not labelled.rows.equal(pool.Pool(*examples(), 12, generator(4)).rows)
    with pytest.raises(ValueError, match="start must be equally many of 4 classes"):
        pool.Pool(*examples(), 10, generator())


def test_a_label_is_bought_once(pool):
    labelled = pool.Pool(*examples(), 8, generator())
    free = labelled.candidates(2)[0]
    for rows in (labelled.rows[:1], free[[0, 0]]):
        with pytest.raises(ValueError, match="different and without a label"):
            labelled.label(rows)
    assert len(labelled.rows) == 8


def test_random_asks_no_network(pool):
    labelled = pool.Pool(*examples(), 8, generator())
    pool.acquire(labelled, "random", never, 5, 50)
    assert len(labelled.rows) == 13


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
@pytest.mark.parametrize("rule", ["BALD", "BatchBALD"])
def test_no_label_is_read_that_is_not_bought(experiment, pool, small, monkeypatch, rule):
    recipe, sets = small
    curve, honest = experiment.learn(recipe, sets, rule, 0, 40)
    assert curve["labels"] == [20, 30, 40] == [20, *range(30, 41, 10)]

    x, y = sets.measured
    relabelled = replace(sets, measured=(x, (y + 1) % 10))
    changed, again = experiment.learn(recipe, relabelled, rule, 0, 40)
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
