# SPDX-License-Identifier: Apache-2.0
"""Conformal sets: the exact law of their coverage, and sets spelled out in numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import pyro_bbb as bbb
from pyro_bbb.distributions import observation as families
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction
from tests._support.forged import rewrite

SIGMAS = 5  # two-sided false-alarm rate of each Monte Carlo comparison: 6e-7
REPETITIONS = 4000


def normal(loc, scale):
    """A prediction of two draws, on both sides of the mean ``[n, d]``."""
    loc, scale = torch.broadcast_tensors(loc, torch.as_tensor(scale))
    return RegressionPrediction(
        families.Normal(torch.stack([loc - 0.3 * scale, loc + 0.3 * scale]), scale, False)
    )


def classes(probs):
    """A prediction of two draws with these mean probabilities."""
    return ClassificationPrediction(torch.stack([probs, probs]).log())


# --- the law of coverage ---
# Several targets of one example are calibrated separately: as many repetitions at once.


def sample_regression(n, repetitions=1, seed=0):
    """Noise that grows with x."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, repetitions, generator=generator)
    return x, torch.sin(4 * x) + (0.1 + x) * torch.randn(x.shape, generator=generator)


def sample_counts(n, repetitions=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, repetitions, generator=generator)
    return x, torch.poisson(x.exp(), generator=generator)


def true_probs(x):
    return (torch.stack([x, x.square(), 1 - x, torch.ones_like(x)], -1) * 2).softmax(-1)


def sample_classes(n, repetitions=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(n, repetitions, generator=generator)
    u = torch.rand(n, repetitions, 1, generator=generator)
    return x, (u > true_probs(x).cumsum(-1)[..., :-1]).sum(-1)


REGRESSIONS = {
    "right": lambda x: normal(torch.sin(4 * x), 0.1 + x),
    "biased and overconfident": lambda x: normal(x + 2, 0.01),
}
CLASSIFIERS = {
    "right": lambda x: classes(true_probs(x)),
    "wrong and overconfident": lambda x: classes((true_probs(-x).log() * 3).softmax(-1)),
}


def low_rates(x):
    return RegressionPrediction(families.LogRatePoisson(torch.stack([0.5 * x, 0.7 * x])))


def mean_coverage(predict_fn, sample, n, level, **options):
    """Mean over calibrations of the fraction of new targets inside, and its standard error."""
    calibrated = bbb.conformal(predict_fn, sample(n, REPETITIONS), level, **options)
    x, y = sample(50, REPETITIONS, seed=1)
    if calibrated.score == "standardized":
        lower, upper = calibrated.interval(x)
        inside = (lower <= y) & (y <= upper)
    else:
        inside = calibrated.label_set(x, seed=0).gather(-1, y[..., None])[..., 0]
    covered = inside.double().mean(0)
    return covered.mean().item(), covered.std().item() / math.sqrt(REPETITIONS)


@pytest.mark.parametrize("predictive", REGRESSIONS)
@pytest.mark.parametrize(("n", "level"), [(24, 0.9), (50, 0.5)])
def test_intervals_cover_as_often_as_the_law_says(predictive, n, level):
    mean, error = mean_coverage(REGRESSIONS[predictive], sample_regression, n, level)
    assert mean == pytest.approx(math.ceil((n + 1) * level) / (n + 1), abs=SIGMAS * error)


@pytest.mark.parametrize("predictive", CLASSIFIERS)
@pytest.mark.parametrize(("n", "level"), [(24, 0.9), (50, 0.6)])
def test_randomized_sets_cover_as_often_as_the_law_says(predictive, n, level):
    options = {"score": "randomized", "seed": 0}
    mean, error = mean_coverage(CLASSIFIERS[predictive], sample_classes, n, level, **options)
    assert mean == pytest.approx(math.ceil((n + 1) * level) / (n + 1), abs=SIGMAS * error)


@pytest.mark.parametrize(
    ("predict_fn", "sample"),
    [*((fn, sample_classes) for fn in CLASSIFIERS.values()), (low_rates, sample_counts)],
    ids=[*CLASSIFIERS, "counts"],
)
def test_sets_of_scores_with_ties_cover_at_least_as_often(predict_fn, sample):
    mean, error = mean_coverage(predict_fn, sample, 24, 0.9)
    assert mean >= 23 / 25 - SIGMAS * error


def test_coverage_given_the_calibration_data_has_a_beta_law(double):
    """The coverage of the true predictive is known without new examples."""
    n, level, k = 20, 0.8, 17
    y = torch.randn(n, REPETITIONS, generator=torch.Generator().manual_seed(0))
    unit = RegressionPrediction(families.Normal(torch.zeros(1, *y.shape), 1.0))
    intervals = torch.special.erf(bbb.conformal(lambda x: unit, (y, y), level).threshold / 2**0.5)
    # u spreads the score of the true predictive evenly over [0, 1]
    data, options = sample_classes(n, REPETITIONS), {"score": "randomized", "seed": 0}
    sets = bbb.conformal(CLASSIFIERS["right"], data, level, **options).threshold
    for coverage in (intervals, sets):
        assert stats.kstest(coverage, stats.beta(k, n + 1 - k).cdf).pvalue > 1e-6


# --- the sets themselves ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_intervals_by_hand_of_each_target(dtype):
    generator = torch.Generator().manual_seed(0)
    loc, y = torch.randn(2, 60, 2, generator=generator, dtype=dtype)
    scale = torch.rand(60, 2, generator=generator, dtype=dtype) + 0.1
    prediction = normal(loc, scale)
    predictor = bbb.conformal(lambda x: prediction, (y, y), 0.75)
    std = 1.09**0.5 * scale.double().numpy()  # noise and draws
    scores = np.abs(y.double().numpy() - loc.double().numpy()) / std
    threshold = np.sort(scores, 0)[45]  # 46 = ceil(61 * 0.75)
    accuracy = {"rtol": 1e-5 if dtype == torch.float32 else 1e-12}
    np.testing.assert_allclose(predictor.threshold, threshold, **accuracy)
    lower, upper = predictor.interval(None)
    assert lower.dtype == upper.dtype == dtype and lower.shape == (60, 2)
    np.testing.assert_allclose(upper - loc, threshold * std, rtol=1e-4)
    np.testing.assert_allclose(loc - lower, threshold * std, rtol=1e-4)
    inside = (lower <= y) & (y <= upper)
    assert inside.sum(0).tolist() == [46, 46]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("std", [0.7, 1.3, 1e-3, 37.0])
def test_targets_that_tie_with_the_threshold_are_inside(dtype, std):
    y = torch.randint(-20, 20, (500, 1), generator=torch.Generator().manual_seed(0)).to(dtype)
    for centre in (0.1, 3.0, 1e3):
        prediction = normal(torch.full_like(y, centre), torch.tensor(std, dtype=dtype))
        lower, upper = bbb.conformal(lambda x, p=prediction: p, (y, y), 0.5).interval(None)
        assert ((lower <= y) & (y <= upper)).sum() >= 251


def spelled_out(probs, u):
    """Scores of adaptive sets by loops over examples and classes."""
    scores = np.zeros_like(probs)
    for i, row in enumerate(probs):
        for c, own in enumerate(row):
            scores[i, c] = sum(p for p in row if p > own) + u[i] * own
    return scores


@pytest.mark.parametrize("score", ["adaptive", "randomized"])
def test_label_sets_spelled_out(score):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2, 99, 5, dtype=torch.double, generator=generator)
    before, new = logits.softmax(-1)
    y = torch.randint(5, (99,), generator=generator)
    predictor = bbb.conformal(lambda x: classes(x), (before, y), 0.7, score=score, seed=3)
    u = [np.random.default_rng([3, stream]).random(99) for stream in (0, 1)]
    if score == "adaptive":
        u = np.zeros((2, 99))
    calibration = spelled_out(before.numpy(), u[0])[np.arange(99), y]
    threshold = np.sort(calibration)[69]  # 70 of 100
    np.testing.assert_allclose(predictor.threshold, threshold, rtol=1e-12)
    state = torch.get_rng_state()
    sets = predictor.label_set(new, seed=3).numpy()
    assert torch.equal(torch.get_rng_state(), state)
    assert (sets == (spelled_out(new.numpy(), u[1]) <= threshold)).all()
    assert 1 < sets.sum(1).mean() < 5
    if score == "adaptive":
        assert sets[np.arange(99), new.argmax(1)].all()


# --- levels and numbers of examples ---


def of_scores(n, level):
    """The threshold where the scores are 1, ..., n."""
    y = torch.arange(1.0, n + 1)[torch.randperm(n), None]
    unit = RegressionPrediction(families.Normal(torch.zeros(1, n, 1), 1.0))
    return bbb.conformal(lambda x: unit, (y, y), level).threshold.item()


def test_the_rank_is_that_of_the_decimal_level():
    assert of_scores(9, 0.9) == 9
    assert of_scores(10, 0.9) == 10
    assert of_scores(19, 0.9) == 18
    assert math.ceil(100 * 0.07) == 8 and of_scores(99, 0.07) == 7
    for n, level, least in ((8, 0.9, 9), (98, 0.99, 99), (2, 0.7, 3)):
        with pytest.raises(ValueError, match=f"at least {least} examples for level {level}"):
            of_scores(n, level)
    assert of_scores(3, 0.7) == 3


def test_standard_deviations_that_are_zero_or_infinite():
    ones = torch.ones(20, 1)
    predictor = bbb.conformal(lambda scale: normal(0 * ones, scale), (ones, ones))
    lower, upper = predictor.interval(0 * ones)  # the mean alone
    assert lower.abs().max() < 1e-40 and upper.abs().max() < 1e-40
    with pytest.raises(ValueError, match="finite means and standard deviations"):
        predictor.interval(math.inf * ones)
    with pytest.raises(ValueError, match="above 0, got 0"):
        bbb.conformal(low_rates, (-500 * ones, ones))  # rates that underflow


# --- files ---


def calibrated(kind):
    if kind == "standardized":
        return bbb.conformal(REGRESSIONS["right"], sample_regression(40))
    return bbb.conformal(CLASSIFIERS["right"], sample_classes(40), score=kind, seed=0)


@pytest.mark.parametrize("kind", ["standardized", "adaptive", "randomized"])
def test_saved_and_loaded(kind, tmp_path):
    first = calibrated(kind)
    first.save(tmp_path / "sets.json")
    again = bbb.ConformalPredictor.load(tmp_path / "sets.json", first.predict_fn)
    assert torch.equal(again.threshold, first.threshold)
    assert replace(again, threshold=0).__dict__ == replace(first, threshold=0).__dict__
    assert [path.name for path in tmp_path.iterdir()] == ["sets.json"]


@pytest.mark.parametrize(
    ("altered", "message"),
    [
        ({"format": "pyro_bbb.temperature"}, "'format' must be 'pyro_bbb.conformal'"),
        ({"version": 3}, "has format version 3, this pyro_bbb reads up to 2"),
        ({"level": 1.5}, "level must be in"),
        ({"score": "best"}, "score must be one of"),
        ({"threshold": "high"}, "threshold must be .*, got 'high'"),
        ({"threshold": [-1.0]}, "at least 0"),
    ],
)
def test_altered_files_are_errors(altered, message, tmp_path):
    path = tmp_path / "sets.json"
    calibrated("adaptive").save(path)
    rewrite(path, **altered)
    with pytest.raises(bbb.LoadError, match=message) as caught:
        bbb.ConformalPredictor.load(path, CLASSIFIERS["right"])
    assert str(path) in str(caught.value)
