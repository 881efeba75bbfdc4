# SPDX-License-Identifier: Apache-2.0
"""Batches of labels to acquire: joint information by enumeration, and the greedy choice."""

import itertools
import math

import pytest
import torch

import pyro_bbb as bbb
from pyro_bbb.prediction import ClassificationPrediction, _acquisition


def prediction(draws, n, classes, seed=0, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(draws, n, classes, generator=generator).double()
    return ClassificationPrediction(logits.log_softmax(-1))


def information(predicted, rows):
    """Mutual information of the labels of some inputs and the draw, by enumeration, nats."""
    probs = predicted.sample_probs.double().tolist()
    draws, classes = len(probs), len(probs[0][0])
    joint = [
        [math.prod(draw[i][c] for i, c in zip(rows, labels, strict=True)) for draw in probs]
        for labels in itertools.product(range(classes), repeat=len(rows))
    ]
    means = [sum(by_draw) / draws for by_draw in joint]
    entropy = -sum(p * math.log(p) for p in means)
    own = -sum(p * math.log(p) for draw in probs for i in rows for p in draw[i]) / draws
    return entropy - own


def best_next(predicted, chosen):
    candidates = [i for i in range(predicted.sample_log_probs.shape[1]) if i not in chosen]
    return max(candidates, key=lambda i: information(predicted, [*chosen, i]))


@pytest.mark.parametrize("looked_at", [1, 64])
@pytest.mark.parametrize("seed", range(4))
def test_each_input_adds_most_information(seed, looked_at, monkeypatch):
    monkeypatch.setattr(_acquisition, "_LOOKED_AT", looked_at)
    predicted = prediction(draws=6, n=7, classes=3, seed=seed)
    rows = bbb.batch_bald(predicted, size=4).tolist()
    for i, row in enumerate(rows):
        assert row == best_next(predicted, rows[:i])
    assert rows[0] == predicted.epistemic.argmax()


def sampled_entropy(probs, chosen, limit, seed):
    """H(y_i | y_B) of all inputs, from ``limit`` sampled values of the chosen labels."""
    values, generator = probs.new_zeros(len(probs), limit), torch.Generator().manual_seed(seed)
    log_prob, _ = _acquisition._with_last(values, None, probs[:, chosen], limit, generator)
    mass = probs.new_full((limit,), 1 / limit)
    return _acquisition._conditional_entropy(probs, log_prob.softmax(0), mass)


def test_sampled_entropy_has_the_enumerated_mean():
    # 40 estimates of 4 entropies by 900 values, 6 standard errors: false alarms 2.1e-6
    predicted = prediction(draws=5, n=7, classes=3)
    chosen, free = [4, 1, 6], [0, 2, 3, 5]
    own = torch.special.entr(predicted.sample_probs).sum(-1).mean(0)[free]
    joint = [information(predicted, [*chosen, i]) - information(predicted, chosen) for i in free]
    estimates = torch.stack(
        [sampled_entropy(predicted.sample_probs, chosen, 900, seed)[free] for seed in range(40)]
    )
    error = estimates.std(0) / math.sqrt(40)
    assert ((estimates.mean(0) - own - torch.tensor(joint)).abs() < 6 * error).all()
    assert (error < 0.01).all()


def test_few_configurations_choose_nearly_as_well():
    predicted = prediction(draws=20, n=30, classes=4, sharpness=3.0)
    exact = bbb.batch_bald(predicted, size=5).tolist()
    sampled = bbb.batch_bald(predicted, size=5, num_configurations=200, seed=1).tolist()
    assert exact[:4] == sampled[:4], "4 ** 3 values are enumerated in both"
    assert information(predicted, sampled) > 0.98 * information(predicted, exact)
    again = bbb.batch_bald(predicted, size=5, num_configurations=200, seed=1).tolist()
    assert again == sampled


@pytest.mark.parametrize("choose", [bbb.batch_bald, bbb.diverse_bald])
def test_copies_of_an_input_are_not_acquired_together(choose):
    predicted = prediction(draws=30, n=4, classes=3, sharpness=3.0)
    copies = predicted.sample_log_probs[:, [0, 0, 0, 1, 2, 3]]
    # a confident label is learned from once; its copies add nothing
    rows = choose(ClassificationPrediction(copies), size=3).tolist()
    assert len({0, 1, 2} & set(rows)) <= 1
    best = ClassificationPrediction(copies).epistemic.topk(3).indices.tolist()
    assert len(set(rows)) == 3 and (set(best) != set(rows) or not {0, 1, 2} & set(best))


def test_parts_and_dtypes_choose_alike(monkeypatch):
    predicted = prediction(draws=8, n=25, classes=4)
    rows = bbb.batch_bald(predicted, size=6, num_configurations=300)
    single = ClassificationPrediction(predicted.sample_log_probs.float())
    assert bbb.batch_bald(single, size=6, num_configurations=300).equal(rows)
    monkeypatch.setattr(_acquisition, "_NUMBERS", 1)
    monkeypatch.setattr(_acquisition, "_LOOKED_AT", 2)
    assert bbb.batch_bald(predicted, size=6, num_configurations=300).equal(rows)


def test_rare_values_do_not_underflow():
    # three draws that are sure of other labels: the labels tell the draw, and no more
    labels = torch.tensor([[0, 1, 2], [1, 2, 0], [2, 0, 1]]).repeat(1, 14)
    logits = -250.0 * (1 - torch.nn.functional.one_hot(labels, 3).double())
    predicted = ClassificationPrediction(logits.log_softmax(-1))
    rows = bbb.batch_bald(predicted, size=42, num_configurations=50).tolist()
    assert sorted(rows) == list(range(42))
    entropy = sampled_entropy(predicted.sample_probs, rows, 50, seed=0)
    torch.testing.assert_close(entropy, torch.zeros(42).double())
