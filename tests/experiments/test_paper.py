# SPDX-License-Identifier: Apache-2.0
"""The pieces of the experiments on the paper's Tables 1 and 2 that could be wrong unseen."""

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import pyro_bbb as bbb


@pytest.fixture
def paper(load):
    return load("_helpers.paper")


@pytest.fixture
def training(load):
    return load("_helpers.training")


@pytest.fixture
def pruning(load):
    return load("paper_pruning")


@pytest.fixture
def sets(paper):
    return paper.Sets.load(None, "cpu", smoke=True)


def shape(network):
    return [
        layer.p
        if isinstance(layer, nn.Dropout)
        else (layer.in_features, layer.out_features)
        if isinstance(layer, nn.Linear)
        else type(layer)
        for layer in network
    ]


def test_dropout_stands_before_each_layer_of_an_ordinary_network(training):
    first, second, third = (784, 5), (5, 6), (6, 10)
    sizes = [784, 5, 6, 10]
    assert shape(training.mlp(sizes)) == [first, nn.ReLU, second, nn.ReLU, third]
    assert shape(training.mlp(sizes, (0.2, 0.5))) == [
        *(0.2, first, nn.ReLU),
        *(0.5, second, nn.ReLU),
        *(0.5, third),
    ]
    assert shape(training.mlp(sizes, (0.0, 0.5)))[:3] == [first, nn.ReLU, 0.5]


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_ordinary_training_is_gradient_descent_at_the_scheduled_rate(
    paper, training, sets, schedule
):
    recipe = paper.Recipe(optimizer="sgd", lr=0.1, lr_schedule=schedule, epochs=3, batch_size=100)
    trained = paper.train(recipe, 6, 5, sets)

    (x, y), total = sets.train, 3 * 3
    torch.manual_seed(5)
    network = training.mlp([784, 6, 6, 10])
    batches = (rows for _ in range(3) for rows in torch.randperm(len(x)).split(100))
    for step, rows in enumerate(batches):
        network.zero_grad()
        nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
        cosine = 0.5 * (1 + math.cos(math.pi * step / total))
        rate = 0.1 * (cosine if schedule == "cosine" else 1.0)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter -= rate * parameter.grad
    for here, there in zip(trained.network.parameters(), network.parameters(), strict=True):
        torch.testing.assert_close(here, there)
    assert trained.seconds > 0


def test_ordinary_training_learns_the_digits(paper, sets):
    bound = 0.5
    recipe = paper.Recipe(dropout=(0.2, 0.5), epochs=30, batch_size=25)
    trained = paper.train(recipe, 60, 0, sets)
    assert list(map(int, trained.curve)) == list(range(1, 31))
    assert trained.curve["30"] < bound < trained.curve["1"]
    point = trained.point(sets.test[0])
    assert paper.error(point, sets.test[1]) < bound
    assert trained.ensemble(sets.test[0], 3, 0).probs.equal(point.probs), "dropout is in use"


def test_the_averaged_posterior_is_the_mean_of_the_second_halfs_epochs(paper, sets, monkeypatch):
    recipe = paper.Recipe(prior=(1.0,), lr=0.01, epochs=5, batch_size=50)
    seen = []

    def point(trained, x):
        seen.append({k: v.clone() for k, v in trained.guide.state_dict().items()})
        return bbb.ClassificationPrediction(torch.zeros(1, len(x), 10))

    monkeypatch.setattr(paper.Trained, "point", point)
    last = paper.train(recipe, 4, 0, sets, progress=False).guide.state_dict()
    averaged = dataclasses.replace(recipe, averaged=True)
    mean = paper.train(averaged, 4, 0, sets, progress=False).guide.state_dict()
    for name, value in mean.items():
        expected = torch.stack([state[name] for state in seen[2:5]]).mean(0)
        torch.testing.assert_close(value, expected)
        assert last[name].equal(seen[4][name]) and not value.equal(last[name])
    assert len(seen) == 10 and all(value.equal(seen[9][name]) for name, value in mean.items())


def test_rates_end_at_their_floor_and_temperatures_where_they_should(paper):
    recipe = paper.Recipe(lr_floor=0.25, temperature=0.1, initial_temperature=0.4, epochs=2)
    rate, schedule = paper._rate(recipe), paper._schedule(recipe)
    assert [rate(progress) for progress in (0, 0.5, 1)] == pytest.approx([1, 0.625, 0.25])
    counts = {"num_batches": 1, "batch_size": 1, "num_data": 1}
    weights = [schedule.weight(batch=1, epoch=epoch, **counts) for epoch in (0, 1, 2)]
    assert weights == pytest.approx([0.2, 0.1, 0.1])
    assert paper._rate(dataclasses.replace(recipe, lr_schedule="constant"))(1.0) == 1.0
    assert paper._schedule(paper.Recipe(temperature=0.3)) == bbb.KLSchedule(temperature=0.3)


def test_evaluation_tells_the_ensemble_from_its_draws(paper, sets):
    right, wrong = (torch.full((2, 10), 0.01) for _ in range(2))
    right[[0, 1], [0, 1]] = 0.91
    wrong[[0, 1], [1, 0]], wrong[[0, 1], [0, 1]] = 0.51, 0.41
    test = torch.zeros(2, 784), torch.tensor([0, 1])

    class Known(paper.Trained):
        def ensemble(self, x, draws, seed):
            if x is sets.garments:
                return bbb.ClassificationPrediction(torch.full((2, 5, 10), 0.1).log())
            return bbb.ClassificationPrediction(torch.stack([right, wrong]).log())

        def point(self, x):
            return bbb.ClassificationPrediction(wrong.log()[None])

    known = dataclasses.replace(sets, test=test, validation=test)
    scores = paper.evaluate(Known(seconds=3.0), known, 2, 0)
    assert (scores["error"], scores["mean_network_error"], scores["draws_error"]) == (0.0, 1.0, 0.5)
    assert scores["nll"] == pytest.approx(-math.log((0.91 + 0.41) / 2))
    assert scores["auroc"] == 1.0 and scores["seconds"] == 3.0 and "median_scale" not in scores


def gone(guide):
    """Where weights are removed: their scale is zero, and so is their mean."""
    loc, scale = (
        torch.cat([of(name).flatten() for name in guide.weight_names])
        for of in (guide.loc, guide.scale)
    )
    assert not loc[scale == 0].any()
    return scale == 0


def test_weights_go_gradually_and_the_others_learn(paper, pruning, sets):
    config = pruning.Config(smoke=True, epochs=150)
    states = list(pruning.gradually(config, sets, 0))
    assert paper.error(states[0].point(sets.test[0]), sets.test[1]) < 0.75
    sizes = [784, 24, 24, 10]
    total = sum((before + 1) * after for before, after in pairwise(sizes))
    rates = []
    for fraction, trained in zip(pruning.FRACTIONS, states, strict=True):
        most = (1 - fraction) * total + 1  # units that nothing reads take weights with them
        assert most / 3 < pruning.weights_left(trained.guide) <= most
        assert len(trained.guide.loc("network.fc1.weight")) <= 24
        rates.append([m.p for m in trained.model.modules() if isinstance(m, nn.Dropout)])
        gone(trained.guide)
    assert rates[0] == [0.2, 0.4, 0.4] and rates[2] == pytest.approx([0.2 / 2**0.5, 0.2, 0.2])


def test_a_posterior_loses_weights_at_once(paper, pruning, sets, tmp_path):
    recipe = paper.recipe_of("ours", paper.MIXTURE, 1200, 2)
    trained = paper.train(recipe, 10, 0, sets, progress=False)
    bbb.save(tmp_path / "posterior", trained.model, trained.guide)
    config = pruning.Config(posterior=tmp_path / "posterior", draws=2)
    figures = pruning.one(config, sets, "once", 0)
    before = gone(trained.guide)
    assert not before.any()
    for fraction, scores in figures.items():
        pruned = bbb.prune(trained.guide, float(fraction))
        assert scores["weights"] == int((~gone(pruned)).sum())
        mean = bbb.predict_mean(trained.model, pruned, sets.test[0])
        assert scores["error"] == paper.error(mean, sets.test[1])


def test_weights_removed_in_steps_stay_removed_and_the_others_learn(paper, pruning, sets, tmp_path):
    trained = paper.train(paper.recipe_of("ours", paper.MIXTURE, 1200, 2), 10, 0, sets)
    bbb.save(tmp_path / "posterior", trained.model, trained.guide)
    config = pruning.Config(smoke=True, posterior=tmp_path / "posterior")
    guides = [state.guide for state in pruning.in_steps(config, sets, 0)]
    for before, after, fraction in zip(guides, guides[1:], pruning.FRACTIONS[1:], strict=False):
        earlier, now = gone(before), gone(after)
        assert int(now.sum()) == round(fraction * len(now))
        assert now[earlier].all(), "one has come back"
        loc = [guide.loc("network.fc1.weight") for guide in (before, after)]
        assert (loc[0] != loc[1])[loc[1] != 0].all(), "one has not learnt"
