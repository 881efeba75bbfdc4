# SPDX-License-Identifier: Apache-2.0
"""The infinitely wide network: its covariance, evidence and posterior, and the estimator by it."""

from dataclasses import replace

import joblib
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.optimize import check_grad
from scipy.stats import boxcox, multivariate_normal
from sklearn.datasets import make_friedman1

from pyro_bbb import LoadError, load
from pyro_bbb.sklearn import BayesianRegressor
from pyro_bbb.sklearn import _wide_network as wide
from pyro_bbb.sklearn._skewed_columns import SkewedColumns
from pyro_bbb.sklearn._wide_network import Scales, covariance, variance

THETA = torch.tensor([0.3, -0.2, -0.4, 0.7, -0.6, -2.0], dtype=torch.double)
RNG = np.random.default_rng(0)
X = torch.tensor(RNG.normal(size=(30, 2)))
Y = torch.tensor(np.sin(2 * X[:, 0].numpy()) + 0.3 * RNG.normal(size=30))
RELATIVE = torch.tensor(RNG.uniform(0.5, 2.0, 30))


def exact(train, test):
    """Return the posterior's means and variances at rows, and the noise, by the textbook."""
    scales = Scales.of(THETA)
    k = covariance(X[train], X[train], scales) + torch.diag(scales.noise * RELATIVE[train])
    cross = covariance(X[test], X[train], scales)
    mean = cross @ torch.linalg.solve(k, Y[train])
    reduced = (cross * torch.linalg.solve(k, cross.T).T).sum(1)
    return mean, variance(X[test], scales) - reduced, scales.noise


def posterior(x, y, relative, inducing):
    arguments = (x, y, relative, inducing, torch.arange(len(x)), THETA)
    weight, reduction, mean, var = wide._regression(*arguments)
    return wide.WideNetwork(THETA[None], inducing, weight[None], reduction[None]), mean, var


def test_covariance_is_that_of_a_wide_network():
    # 600 networks of 400 and 400 erf units, at two inputs: mean products within 4.5 standard errors
    # (three numbers: false alarms 2e-5)
    torch.manual_seed(0)
    scales, x, products = Scales.of(THETA), X[:2], []
    units = 400
    for _ in range(600):
        first = torch.randn(units, 2, dtype=torch.double) / scales.length
        bias = torch.randn(units, dtype=torch.double)
        hidden = torch.erf(x @ first.T + bias)
        second = torch.randn(units, units, dtype=torch.double) * (scales.s / units).sqrt()
        last = torch.randn(units, dtype=torch.double) * (scales.a / units).sqrt()
        linear = torch.randn(3, dtype=torch.double) * (scales.b / 2).sqrt()
        out = torch.erf(hidden @ second.T) @ last + x @ linear[:2] + linear[2]
        products.append(torch.stack([out[0] ** 2, out[1] ** 2, out[0] * out[1]]))
    stacked = torch.stack(products)
    k = covariance(x, x, scales)
    expected = torch.stack([k[0, 0], k[1, 1], k[0, 1]])
    error = stacked.std(0) / len(stacked) ** 0.5
    assert ((stacked.mean(0) - expected).abs() < 4.5 * error).all()
    assert_allclose(variance(x, scales), k.diagonal(), rtol=1e-8)


def test_evidence_is_the_normal_density_with_its_gradient():
    energy, theta = wide.evidence(X, Y, RELATIVE), THETA.numpy()
    scales = Scales.of(THETA)
    k = covariance(X, X, scales) + torch.diag(scales.noise * RELATIVE)
    other = THETA + 0.1
    moved = Scales.of(other)
    k_moved = covariance(X, X, moved) + torch.diag(moved.noise * RELATIVE)
    means = np.array([2.0, 2.0, 0.0, 2.3, -1.0, -3.0])
    stds = np.array([1.5, 1.5, 3.0, 3.0, 3.0, 3.0])

    def expected(theta, k):
        log_prior = -0.5 * (((theta - means) / stds) ** 2).sum()
        less = (1 / RELATIVE.numpy() - 1).clip(max=0).sum()  # rows of less than weight 1
        log_prior -= 0.5 * less * np.log(np.exp(theta[-1]) + 1e-6)
        return -multivariate_normal.logpdf(Y, cov=k.numpy()) - log_prior

    difference = expected(other.numpy(), k_moved) - expected(theta, k)
    assert energy(other.numpy())[0] - energy(theta)[0] == pytest.approx(difference, rel=1e-6)
    assert check_grad(lambda t: energy(t)[0], lambda t: energy(t)[1], theta) < 1e-4


def test_posterior_is_exact_where_all_rows_are_inducing():
    network, mean, var = posterior(X, Y, RELATIVE, X)
    rows, new = torch.arange(30), torch.arange(5)
    expected_mean, expected_variance, _ = exact(rows, new)
    means, variances = network.moments(X[new])
    assert_allclose(means[0], expected_mean, rtol=1e-5)
    assert_allclose(variances[0], expected_variance, rtol=1e-4)
    assert_allclose(network.mean(X[new]), means)
    for row in range(30):  # from all others, by leaving it out
        one = torch.tensor([row])
        left_mean, left_variance, noise = exact(rows[rows != row], one)
        assert_allclose(mean[row], left_mean[0], rtol=1e-4, atol=1e-6)
        assert_allclose(var[row], left_variance[0] + noise * RELATIVE[row], rtol=1e-4)


def test_blocks_are_predicted_from_all_other_rows():
    blocks = wide.blocks_left_out(X, Y, RELATIVE, THETA[None], columns=2)
    assert len(blocks.rows) == 60  # three thirds along each of two columns
    for place, block in enumerate(blocks.rows.split(10)):
        others = torch.tensor(sorted({*range(30)} - {*block.tolist()}))
        along = X[:, place // 3].sort().values
        assert_allclose(X[block, place // 3], along[10 * (place % 3) : 10 * (place % 3 + 1)])
        mean, var, noise = exact(others, block)
        at = slice(10 * place, 10 * (place + 1))
        assert_allclose(blocks.mean[0, at], mean, rtol=1e-6, atol=1e-9)
        assert_allclose(blocks.variance[0, at], var + noise * RELATIVE[block], rtol=1e-6)


def test_few_inducing_rows_give_the_posterior_of_their_covariance():
    # Snelson and Ghahramani's covariance as a dense matrix: Q, and the rest of K on the diagonal
    network, mean, var = posterior(X, Y, RELATIVE, X[:20])
    scales, new = Scales.of(THETA), X[:10] + 0.1
    k = covariance(X[:20], X[:20], scales)
    cross, cross_new = (covariance(x, X[:20], scales) for x in (X, new))
    q, q_new = (c @ torch.linalg.solve(k, cross.T) for c in (cross, cross_new))
    dense = q + torch.diag(variance(X, scales) - q.diagonal() + scales.noise * RELATIVE)
    means, variances = network.moments(new)
    assert_allclose(means[0], q_new @ torch.linalg.solve(dense, Y), rtol=1e-4)
    reduced = (q_new * torch.linalg.solve(dense, q_new.T).T).sum(1)
    assert_allclose(variances[0], variance(new, scales) - reduced, rtol=1e-4)
    # Rasmussen and Williams (2006), eq. 5.12
    inverse = torch.linalg.inv(dense)
    assert_allclose(var, 1 / inverse.diagonal(), rtol=1e-4)
    assert_allclose(mean, Y - inverse @ Y / inverse.diagonal(), rtol=1e-4, atol=1e-5)


def test_scales_are_drawn_from_their_posterior():
    # moments of 4,000 draws of three independent Normals, within 5 standard errors of about 300
    # effective draws (six numbers: false alarms 4e-6)
    stds = np.array([0.5, 1.0, 3.0])
    draws = wide.sample_scales(
        lambda z: (float(((z / stds) ** 2).sum() / 2), z / stds**2), np.zeros(3), 4000, seed=1
    )
    assert (np.abs(draws.mean(0)) < 5 * stds / 300**0.5).all()
    assert_allclose(draws.std(0), stds, rtol=5 / 600**0.5)


@pytest.fixture(scope="module")
def table():
    x, y = make_friedman1(900, noise=0, random_state=0)
    rng = np.random.default_rng(0)
    y += (0.3 + 2 * x[:, 5]) * rng.standard_t(5, 900)
    return x[:300], y[:300], x[300:], y[300:]


@pytest.fixture(scope="module")
def fitted(table):
    return BayesianRegressor(random_state=0).fit(*table[:2])


def test_default_intervals_cover_and_follow_the_noise(fitted, table):
    _, _, x, y = table
    low, high = fitted.predict_interval(x, level=0.9)
    # 600 rows, 4 standard errors of .0122, and 300 rows left out that set the scale, of .017
    assert abs(np.mean((low <= y) & (y <= high)) - 0.9) < 4 * np.hypot(0.0122, 0.017)
    quiet, loud = x[:, 5] < 0.25, x[:, 5] > 0.75
    assert (high - low)[loud].mean() > 1.5 * (high - low)[quiet].mean()
    uncertainty, (_, std) = fitted.predict_uncertainty(x), fitted.predict(x, return_std=True)
    assert_allclose(np.hypot(*uncertainty), std, rtol=1e-6)


def test_the_band_widens_in_a_gap_where_blocks_left_out_surprise():
    rng = np.random.default_rng(0)

    def rows(inside, number):
        x = rng.uniform(-1, 1, (number, 2))
        far = np.where(rng.random(number) < 0.5, -1, 1) * rng.uniform(0.35, 1, number)
        x[:, 0] = 0.35 * x[:, 0] if inside else far
        level = np.floor(4 * x[:, 0])  # of steps that no other step predicts
        return x, 3 * level * np.sign(np.sin(37 * level)) + x[:, 1] + 0.1 * rng.normal(size=number)

    model = BayesianRegressor(random_state=0).fit(*rows(False, 200))
    gap, (x, _) = rows(True, 300), rows(False, 300)
    posterior = model.posterior_

    def widths():
        intervals = [model.predict_interval(inputs, level=0.95) for inputs in (gap[0], x)]
        return [np.median(high - low) for low, high in intervals]

    in_gap, on_data = widths()
    plain = replace(posterior.outputs[0], stretch=1.0)
    model.posterior_ = replace(posterior, outputs=(plain,))
    narrower, same = widths()
    assert in_gap > 1.3 * narrower and on_data < 1.05 * same


def test_samples_have_the_predicted_moments(fitted, table):
    mean, std = fitted.predict(table[2][:5], return_std=True)
    samples = fitted.sample_y(table[2][:5], 4000)
    # within 5 standard errors of the mean (five numbers: false alarms 3e-6)
    assert (np.abs(samples.mean(1) - mean) < 5 * std / 4000**0.5).all()
    assert fitted.sample_y(table[2][:5], 3).shape == (5, 3)


def test_saves_and_pickles_predict_the_same(fitted, table, tmp_path):
    fitted.save(tmp_path / "model")
    joblib.dump(fitted, tmp_path / "pickle")
    with pytest.raises(LoadError, match=r"model holds .*, which BayesianRegressor\.load reads"):
        load(tmp_path / "model")
    expected = fitted.predict(table[2], return_std=True)
    for again in (BayesianRegressor.load(tmp_path / "model"), joblib.load(tmp_path / "pickle")):
        assert_allclose(again.predict(table[2], return_std=True), expected, rtol=1e-12)


def test_skewed_columns_are_repeated_by_the_likeliest_power():
    rng = np.random.default_rng(0)
    x = rng.gamma((0.3, 0.8, 50.0), size=(400, 3))
    x = np.c_[x, rng.integers(2, size=400)]  # a mark, which has no shape
    scaled = torch.tensor((x - x.mean(0)) / x.std(0))
    skewed = SkewedColumns.learn(scaled, torch.ones(400, dtype=torch.double))
    assert skewed.column.tolist() == [0, 1]
    for column, power in zip(skewed.column, skewed.power, strict=True):
        u = 1 + 10 * (x[:, column] - x[:, column].min()) / x[:, column].std()
        assert abs(boxcox(u)[1] - float(power)) <= 0.125  # half a step
    assert_allclose(skewed(scaled)[:, 4:].mean(0), 0.0, atol=1e-12)
    assert_allclose(skewed(scaled)[:, 4:].std(0, correction=0), 1.0)
    below = skewed(scaled.amin(0, keepdim=True) - torch.arange(2.0)[:, None])
    assert_allclose(below[0, 4:], below[1, 4:])


def test_logarithms_of_columns_are_found(tmp_path):
    rng = np.random.default_rng(0)
    x = np.exp(rng.normal(size=(400, 1)))
    y = np.sin(3 * np.log(x[:, 0])) + 0.1 * rng.normal(size=400)
    model = BayesianRegressor(random_state=0).fit(x[:200], y[:200])
    by_log = BayesianRegressor(random_state=0).fit(np.log(x[:200]), y[:200])
    scores = [
        part.score_samples(inputs, y[200:]).mean()
        for part, inputs in ((model, x[200:]), (by_log, np.log(x[200:])))
    ]
    assert scores[0] > scores[1] - 0.2  # -.14; without a transform -.27
    model.save(tmp_path)
    again = BayesianRegressor.load(tmp_path)
    assert_allclose(again.predict(x), model.predict(x), rtol=1e-12)


def test_weights_count_rows(table, tmp_path):
    x, y = table[0][:60], table[1][:60]
    weight = np.tile([1.0, 2.0, 0.0], 20)
    rows = np.repeat(np.arange(60), weight.astype(int))
    weighted = BayesianRegressor(random_state=0).fit(x, y, sample_weight=weight)
    repeated = BayesianRegressor(random_state=0).fit(x[rows], y[rows])
    weighted.save(tmp_path / "model")
    loaded = BayesianRegressor.load(tmp_path / "model")
    assert_allclose(loaded.predict(table[2][:5]), weighted.predict(table[2][:5]), rtol=1e-12)
    # the draws of scales differ; their modes are of the same evidence
    means = [model.predict(table[2][:50]) for model in (weighted, repeated)]
    assert np.sqrt(np.mean((means[0] - means[1]) ** 2)) < 0.2 * y.std()


def test_weights_count_rows_of_skewed_columns():
    rng = np.random.default_rng(0)
    x = rng.lognormal(0, 2, (60, 1))
    y = np.log(x[:, 0]) + 0.1 * rng.normal(size=60)
    weight, new = np.where(x[:, 0] > 1, 9, 1), [[0.0], [0.1], [300.0]]
    weighted = BayesianRegressor(random_state=0).fit(x, y, sample_weight=weight)
    repeated = BayesianRegressor(random_state=0).fit(x.repeat(weight, 0), y.repeat(weight))
    expected = repeated.predict(new, return_std=True)
    assert_allclose(weighted.predict(new, return_std=True), expected, rtol=1e-3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", ["constant", "two", "rare"])
def test_columns_of_few_values_are_learned_in_silence(values):
    rng = np.random.default_rng(0)
    x = np.zeros((120, 1))
    x[: {"constant": 0, "two": 60, "rare": 1}[values]] = 1
    y = x[:, 0] + 0.1 * rng.normal(size=120)
    mean, std = BayesianRegressor(random_state=0).fit(x, y).predict([[0.0]], return_std=True)
    assert abs(mean) < 0.05 and 0.07 < std < 0.14


def test_far_inputs_have_finite_predictions_with_the_noise_of_the_data():
    rng = np.random.default_rng(2)
    x = rng.normal(size=300)
    y = x + np.exp(x - 2) * rng.normal(size=300)
    model = BayesianRegressor(random_state=0).fit(x[:, None], y)
    assert model.posterior_.outputs[0].noise is not None
    far = np.array([[-1e4], [-10.0], [30.0], [1e3]])
    noise, function = model.predict_uncertainty(far)
    inside = model.predict_uncertainty(x[:, None])[0]
    assert np.isfinite(function).all() and np.isfinite(model.predict(far)).all()
    assert (noise >= 0.5 * inside.min()).all() and (noise <= 2 * inside.max()).all()


def test_weights_leave_the_noise_as_it_is():
    x = RNG.normal(size=(90, 1))
    y = np.sin(2 * x[:, 0]) + 0.3 * RNG.normal(size=90)
    few = np.where(np.arange(90) % 2, 1.0, 1e-6)
    for weight in (np.full(90, 0.1), np.full(90, 100.0), np.full(90, 1e300), few):
        weighted = BayesianRegressor(random_state=0).fit(x, y, sample_weight=weight)
        assert 0.2 < weighted.predict_uncertainty(x).aleatoric.mean() < 0.4


def test_copies_of_rows_are_left_out_together(table):
    x, y, new, targets = table
    copied = np.repeat(np.arange(120), 3)
    low, high = BayesianRegressor(random_state=0).fit(x[copied], y[copied]).predict_interval(new)
    assert np.mean((low <= targets) & (targets <= high)) > 0.8


def test_noise_of_many_columns_is_not_learned():
    x, y = RNG.normal(size=(480, 100)), RNG.normal(size=480)
    low, high = BayesianRegressor(random_state=0).fit(x[:80], y[:80]).predict_interval(x[80:])
    assert np.mean((low <= y[80:]) & (y[80:] <= high)) > 0.8


def test_extreme_weights_are_refused_by_name():
    with pytest.raises(ValueError, match="sample_weight must differ by a factor"):
        BayesianRegressor().fit(X.numpy(), Y.numpy(), sample_weight=[1e-300] + [1.0] * 29)


def test_several_targets_are_learned_one_by_one(fitted, table):
    x, y, new, _ = table
    both = BayesianRegressor(random_state=0).fit(x, np.stack([y, -y], 1))
    mean, std = both.predict(new[:20], return_std=True)
    assert_allclose(mean[:, 0], fitted.predict(new[:20]), rtol=1e-6)
    assert_allclose(std[:, 1], std[:, 0], rtol=0.05)
    assert_allclose(mean[:, 1], -mean[:, 0], rtol=0.05, atol=0.3)


def test_constant_targets_and_single_inputs_are_learned():
    flat = BayesianRegressor().fit(np.arange(150.0)[:, None], np.ones(150))
    assert_allclose(flat.predict([[3.0]]), 1.0, atol=1e-2)
    assert flat.predict_interval([[3.0]])[1] < 1.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_sizes": (20,)}, "hidden_sizes must stay at its default for inference='wide'"),
        ({"noise": "student_t"}, "noise must stay at its default for inference='wide'"),
        ({"epochs": 3}, "epochs must stay at its default"),
    ],
)
def test_options_of_other_inferences_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BayesianRegressor(inference="wide", **options).fit(X.numpy(), Y.numpy())


def test_wide_networks_do_not_learn_on(fitted):
    assert not hasattr(fitted, "partial_fit")
    assert fitted.n_iter_ == 1 and not fitted.history_
