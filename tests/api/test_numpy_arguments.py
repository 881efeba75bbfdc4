# SPDX-License-Identifier: Apache-2.0
"""NumPy's scalars and read-only arrays, where Python's numbers and tensors are taken."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV

import pyro_bbb as bbb
from pyro_bbb.sklearn import BayesianClassifier, BayesianRegressor

X = torch.linspace(-1, 1, 60).reshape(20, 3)
Y = X.sum(1, keepdim=True)
KINDS = {
    "scalars": lambda number: np.asarray(number)[()],
    "arrays without dimensions": np.asarray,
    "of 32 bits": lambda number: (np.float32 if isinstance(number, float) else np.int32)(number),
}


def make():
    model = bbb.BayesianModel(bbb.BayesianMLP([3, 4, 1]), bbb.likelihoods.Gaussian(0.3), 20)
    return model, bbb.AutoSoftplusNormal(model)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_numpy_are_numbers(kind):
    n = KINDS[kind]
    network = bbb.BayesianMLP([n(3), n(4), n(1)], prior=bbb.ScaleMixtureNormal(n(0.5), n(1.0), 0.1))
    bbb.BayesianMLP(np.array([3, 4, 1]))
    bbb.BayesianConv2d(n(1), n(2), np.int64(3))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(n(0.3)), n(20))
    assert type(model.num_data) is int
    guide = bbb.AutoSoftplusNormal(model, init_loc=n(0.1), init_rho=n(-4.0))
    training = {"epochs": n(2), "batch_size": n(8), "lr": n(0.01), "seed": n(3)}
    particles = {"num_particles": n(1), "accumulate": n(2)}
    history = bbb.fit(model, guide, (X, Y), **training, **particles, progress=False)
    assert len(history.loss) == 2
    prediction = bbb.predict(model, guide, X, num_samples=n(3), batch_size=n(5), seed=n(0))
    assert prediction.sample_means.shape == (3, 20, 1)
    level = 0.25  # a number of 32 bits too
    assert torch.equal(prediction.interval(n(level))[0], prediction.interval(level)[0])
    probs, y = torch.eye(2), torch.tensor([0, 1])
    assert bbb.metrics.ece(probs, y, bins=n(4)) == bbb.metrics.ece(probs, y, bins=4)
    assert bbb.ClassificationPrediction(probs[None].log()).refuse(n(0.5)).tolist() == [False] * 2
    bbb.prune(guide, fraction=n(0.5))
    draws = {"num_samples": n(2), "warmup_steps": n(1), "seed": n(0), "progress": False}
    bbb.run_sgmcmc(model, (X, Y), lr=n(1e-3), batch_size=n(8), num_chains=n(1), **draws)
    bbb.to_ensemble(model, guide, num_samples=n(2), seed=n(1), quantiles=np.array([0.1, 0.9]))


def test_a_chains_seed_may_be_numpys():
    model, _ = make()
    options = {"num_samples": 1, "warmup_steps": 1, "max_tree_depth": 1, "progress": False}
    actual, expected = (bbb.run_nuts(model, (X, Y), seed=s, **options) for s in (np.int64(3), 3))
    means = (bbb.predict(make()[0], chains, X).mean for chains in (actual, expected))
    assert torch.equal(*means)


@pytest.mark.parametrize("value", [np.True_, np.array(True), np.array([2]), np.float64(2.0), "2"])
def test_what_is_not_an_integer_is_still_refused(value):
    model, guide = make()
    with pytest.raises((TypeError, ValueError), match="num_samples must be an integer"):
        bbb.predict(model, guide, X, num_samples=value)
    with pytest.raises((TypeError, ValueError), match="batch_size must be an"):
        bbb.fit(model, guide, (X, Y), epochs=1, batch_size=value, progress=False)


def test_a_grid_search_of_numpys_numbers_can_be_cloned_and_saved(tmp_path):
    x, y = X.numpy().astype(float), Y[:, 0].numpy().astype(float)
    grid = {
        "lr": np.logspace(-3, -2, 1),
        "batch_size": np.arange(8, 9),
        "num_samples": [np.int8(3)],
    }
    grid["hidden_sizes"] = [np.array([3, 2]), (np.int64(3),)]
    start = BayesianRegressor(epochs=np.int64(1), random_state=np.int64(0), progress=np.False_)
    best = GridSearchCV(start, grid, cv=2).fit(x, y).best_estimator_
    clone(best).fit(x, y)
    best.save(tmp_path / "best")
    loaded = BayesianRegressor.load(tmp_path / "best")
    assert loaded.batch_size == 8 and loaded.lr == best.lr and loaded.progress is False
    assert {type(size) for size in loaded.hidden_sizes} == {int}
    np.testing.assert_array_equal(loaded.predict(x), best.predict(x))


def test_read_only_arrays_do_not_warn_and_are_not_written_to():
    def locked(values):
        array = np.array(values)
        array.setflags(write=False)
        return array

    x, y = locked(X.numpy().astype(float)), locked(Y[:, 0].numpy().astype(float))
    x32, y32 = locked(X.numpy()), locked(Y.numpy())
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else once in a process
    try:
        regressor = BayesianRegressor(epochs=1).fit(x, y)
        regressor.partial_fit(x, y).predict(x)
        regressor.predict_interval(x)
        classifier = BayesianClassifier(epochs=1).fit(x32, locked(y > 0))
        classifier.partial_fit(x32, locked(y > 0)).predict_proba(x)
        model, _ = make()
        guide = bbb.AutoSoftplusNormal(model, init_loc={"network.fc1.bias": locked(np.zeros(4))})
        bbb.fit(model, guide, (x32, y32), epochs=1, progress=False)
        bbb.predict(model, guide, x32, num_samples=2).log_prob(y32)
        bbb.evaluate(model, guide, (x32, y32), num_samples=2)
        bbb.metrics.rmse(y32, y32)
        bbb.data.standardize(x32)
    finally:
        torch.set_warn_always(before)
    assert np.array_equal(x32, X.numpy()) and np.array_equal(y32, Y.numpy())
