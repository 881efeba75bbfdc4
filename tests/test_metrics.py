# SPDX-License-Identifier: Apache-2.0
"""Metrics against hand-computed values and against scikit-learn, scipy and torchmetrics."""

import itertools
import math

import pytest
import scipy.stats
import sklearn.metrics
import torch
from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

from pyro_bbb import metrics


def random_classification(n=500, classes=4, dtype=torch.float64):
    probs = torch.randn(n, classes, dtype=dtype).mul(2).softmax(-1)
    return probs, torch.randint(classes, (n,))


# --- golden values, computed by hand ---


def test_accuracy_takes_the_first_of_tied_classes():
    assert metrics.accuracy(torch.tensor([[0.5, 0.5], [0.5, 0.5]]), torch.tensor([0, 1])) == 0.5


def test_nll_of_an_impossible_label_is_infinite():
    assert metrics.nll(torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([0, 0])) == math.inf


def test_ece_puts_full_confidence_into_the_last_bin():
    # one bin holds both: accuracy 1/2, mean confidence 0.995
    probs = torch.tensor([[1.0, 0.0], [0.99, 0.01]])
    assert metrics.ece(probs, torch.tensor([0, 1])) == pytest.approx(0.495, rel=1e-6)


def test_ece_takes_a_rounded_one_for_a_probability():
    probs = torch.tensor([[1.0 + 1e-6, 0.0], [1.0, 0.0]])
    assert metrics.ece(probs, torch.tensor([0, 0])) == pytest.approx(0, abs=1e-12)


def test_auroc_separates_scores_that_a_sigmoid_would_tie():
    assert metrics.auroc(torch.tensor([101.0, 102.0]), torch.tensor([99.0, 100.0])) == 1.0
    assert metrics.auroc(torch.tensor([math.inf]), torch.tensor([1e30, -math.inf])) == 1.0


def test_risk_coverage_by_hand():
    confidence = torch.tensor([0.5, 0.9, 0.8, 0.6])
    correct = torch.tensor([False, True, False, True])
    share, risk = metrics.risk_coverage(confidence, correct)
    assert share.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert risk.tolist() == [0.0, 1 / 2, 1 / 3, 2 / 4]
    expected = (0 + 1 / 2 + 1 / 3 + 1 / 2) / 4
    assert metrics.area_under_risk_coverage(confidence, correct) == pytest.approx(expected)


def test_risk_coverage_of_losses_by_hand():
    confidence = torch.tensor([0.5, 0.9, 0.8, 0.6])
    _, risk = metrics.risk_coverage(confidence, loss=torch.tensor([4.0, 1.0, 0.0, 7.0]))
    assert risk.tolist() == pytest.approx([1, 1 / 2, 8 / 3, 12 / 4])
    correct = torch.tensor([False, True, False, True])
    _, expected = metrics.risk_coverage(confidence, correct)
    _, risk = metrics.risk_coverage(confidence, loss=(~correct).double())
    assert torch.equal(risk, expected)
    with pytest.raises(TypeError, match="either correct or loss"):
        metrics.risk_coverage(confidence, correct, loss=confidence)
    with pytest.raises(TypeError, match="either correct or loss"):
        metrics.risk_coverage(confidence)


def test_recall_by_hand():
    probs = torch.eye(4)[[0, 0, 1, 2, 1]]
    recall = metrics.recall(probs, torch.tensor([0, 0, 0, 2, 1]))
    assert recall[:3].tolist() == pytest.approx([2 / 3, 1, 1]) and recall[3].isnan()


def test_coverage_by_hand_includes_the_ends():
    lower, upper = torch.tensor([0.0, 0.0, 0.0, -math.inf]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert metrics.coverage(lower, upper, torch.tensor([0.0, 1.0, 1.5, -9.0])) == 0.75


# --- independent implementations ---


def test_accuracy_and_nll_equal_sklearn():
    probs, y = random_classification()
    expected = sklearn.metrics.accuracy_score(y.numpy(), probs.argmax(-1).numpy())
    assert metrics.accuracy(probs, y) == pytest.approx(expected, rel=1e-12)
    expected = sklearn.metrics.log_loss(y.numpy(), probs.numpy())
    assert metrics.nll(probs, y) == pytest.approx(expected, rel=1e-12)


def test_brier_equals_sklearn_per_class():
    probs, y = random_classification()
    per_class = [
        sklearn.metrics.brier_score_loss((y == c).numpy(), probs[:, c].numpy()) for c in range(4)
    ]
    assert metrics.brier(probs, y) == pytest.approx(sum(per_class), rel=1e-12)


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_ece_equals_a_loop_and_torchmetrics(bins):
    probs, y = random_classification()
    confidence, label = probs.max(-1)
    correct = (label == y).double()
    error = 0.0
    for b in range(bins):
        inside = (confidence >= b / bins) & (confidence < (b + 1) / bins)
        if inside.any():
            share = inside.double().mean()
            error += share * (correct[inside].mean() - confidence[inside].mean()).abs()
    assert metrics.ece(probs, y, bins=bins) == pytest.approx(float(error), rel=1e-9)
    multiclass = float(multiclass_calibration_error(probs, y, num_classes=4, n_bins=bins))
    assert metrics.ece(probs, y, bins=bins) == pytest.approx(multiclass, abs=1e-5)


@pytest.mark.parametrize("levels", [3, 10**9])  # many ties, none
def test_auroc_equals_sklearn_scipy_and_torchmetrics(levels):
    positive = torch.randint(levels, (300,)).double() / levels
    negative = torch.randint(levels, (200,)).double() / levels * 0.9
    area = metrics.auroc(positive, negative)
    scores = torch.cat([positive, negative])
    target = torch.cat([torch.ones(300), torch.zeros(200)]).long()
    expected = sklearn.metrics.roc_auc_score(target.numpy(), scores.numpy())
    assert area == pytest.approx(expected, rel=1e-12)
    u = scipy.stats.mannwhitneyu(positive.numpy(), negative.numpy()).statistic
    assert area == pytest.approx(u / (300 * 200), rel=1e-12)
    assert area == pytest.approx(float(binary_auroc(scores, target)), abs=1e-5)


def test_risk_coverage_with_ties_is_the_mean_over_their_orders():
    confidence = torch.tensor([0.9, 0.5, 0.5, 0.5, 0.1])
    correct = torch.tensor([True, False, True, True, False])
    curves = []
    for order in itertools.permutations([1, 2, 3]):
        wrong = ~correct[[0, *order, 4]]
        curves.append(wrong.double().cumsum(0) / torch.arange(1, 6))
    _, risk = metrics.risk_coverage(confidence, correct)
    torch.testing.assert_close(risk, torch.stack(curves).mean(0), rtol=1e-12, atol=0)


def test_recall_and_macro_auroc_equal_sklearn():
    probs, y = random_classification()
    labels, p = y.numpy(), probs.double().numpy()
    expected = sklearn.metrics.recall_score(labels, p.argmax(1), average=None)
    assert metrics.recall(probs, y).tolist() == pytest.approx(expected.tolist(), rel=1e-12)
    expected = sklearn.metrics.roc_auc_score(labels, p / p.sum(1, keepdims=True), multi_class="ovr")
    assert metrics.macro_auroc(probs, y) == pytest.approx(expected, rel=1e-12)
    two = torch.stack([1 - probs[:, 1], probs[:, 1]], 1).double()
    expected = sklearn.metrics.roc_auc_score(labels == 1, two[:, 1].numpy())
    assert metrics.macro_auroc(two, (y == 1).long()) == pytest.approx(expected, rel=1e-12)
    three = torch.cat([two, torch.zeros(len(y), 1)], 1)  # a class without examples
    assert metrics.macro_auroc(three, (y == 1).long()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("wrong", "refused", "both"), [(20, 30, 4), (20, 30, 6), (5, 40, 3)])
def test_the_p_value_of_refusal_is_fishers(wrong, refused, both):
    # 6 standard errors of the frequency in 999 random subsets
    index = torch.arange(200)
    loss = (index < wrong).double()
    chosen = (index >= wrong - both) & (index < wrong - both + refused)
    expected = scipy.stats.hypergeom.sf(both - 1, 200, wrong, refused)
    p_value = (1000 * metrics.refusal_p_value(loss, chosen) - 1) / 999
    assert abs(p_value - expected) < 6 * math.sqrt(expected * (1 - expected) / 999)


def test_the_p_value_of_refusal_of_real_losses_is_scipys_exact_one():
    loss = torch.tensor([0.1, 0.4, 0.3, 2.5, 0.2, 1.9, 0.7, 0.6])
    refused = torch.tensor([0, 0, 0, 1, 0, 0, 1, 0]).bool()
    exact = scipy.stats.permutation_test(
        (loss[refused].numpy(), loss[~refused].numpy()),
        lambda a, b: a.mean() - b.mean(),
        alternative="greater",
    )  # of all 28 subsets
    for chosen, expected in ((refused, exact.pvalue), (loss > 2, 1 / 8)):
        p_value = (1000 * metrics.refusal_p_value(loss, chosen) - 1) / 999
        assert abs(p_value - expected) < 6 * math.sqrt(expected * (1 - expected) / 999)
    assert metrics.refusal_p_value(loss, loss < 0) == metrics.refusal_p_value(loss, loss > 0) == 1


def test_rmse_equals_sklearn():
    mean, y = torch.randn(50, 3, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64)
    expected = math.sqrt(sklearn.metrics.mean_squared_error(y.numpy(), mean.numpy()))
    assert metrics.rmse(mean, y) == pytest.approx(expected, rel=1e-12)


# --- laws ---


def test_scalars_are_python_floats_and_curves_float64_tensors():
    probs, y = random_classification(dtype=torch.float32)
    for name in ("accuracy", "nll", "brier", "ece"):
        assert type(getattr(metrics, name)(probs.requires_grad_(), y.int())) is float
    v = torch.randn(5)
    scalars = [metrics.auroc(v, v), metrics.rmse(v, v), metrics.coverage(v, v, v)]
    assert [type(value) for value in scalars] == [float] * 3
    curves = metrics.risk_coverage(v, v > 0)
    assert [c.dtype for c in curves] == [torch.float64] * 2
