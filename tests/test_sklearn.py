# SPDX-License-Identifier: Apache-2.0
"""The estimators for scikit-learn: its own checks in full, and what they promise beyond."""

import copy
import os
import pickle
import warnings
from functools import partial

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pyro.distributions as dist
import pytest
import torch
from numpy.testing import assert_allclose
from pyro.infer.autoguide import AutoNormal
from scipy import sparse, stats
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.metrics import mean_pinball_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import guides, likelihoods
from pyro_bbb.sklearn import BayesianClassifier, BayesianRegressor, _posterior
from pyro_bbb.sklearn._choices import NOISES
from pyro_bbb.sklearn._posterior import Plateau
from pyro_bbb.training import EpochEnd

QUICK = {"hidden_sizes": (8,), "epochs": 40, "lr": 0.1, "num_samples": 10, "random_state": 0}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3)) * [1.0, 100.0, 0.01] + [5.0, 0.0, 1.0]
Y = 1000 * (X[:, 0] + X[:, 1] / 100) + 50 * RNG.normal(size=60)
LABELS = np.array(["no", "yes"])[(X[:, 0] > 5).astype(int)]


def regressor(**options):
    return BayesianRegressor(**QUICK | options)


def classifier(**options):
    return BayesianClassifier(**QUICK | options)


def chains(make=BayesianRegressor, **options):
    """Chains of few steps, as a result that time cuts short differs from run to run."""
    few = {"hidden_sizes": (4,), "max_epochs": 60, "num_samples": 10, "random_state": 0}
    return make(**few | {"inference": "chains"} | options)


@pytest.fixture(scope="module", params=[regressor, chains])
def fitted(request):
    return request.param().fit(X, Y)


SORTERS = [classifier, pytest.param(partial(chains, BayesianClassifier), marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=SORTERS)
def sorter(request):
    return request.param().fit(X, LABELS)


# --- scikit-learn's own checks: none is left out or skipped for our sake ---

# by local reparameterisation a row that is given twice has two draws, and a weight of 2 one;
# chains round sums of weights and of rows differently
BY_WEIGHTS = {f"check_sample_weight_equivalence_on_{layout}_data" for layout in ("dense", "sparse")}


@pytest.mark.parametrize(
    ("kind", "inference"),
    [
        (BayesianRegressor, "variational"),
        (BayesianRegressor, "chains"),
        (BayesianClassifier, "variational"),
    ],
)
@pytest.mark.slow
def test_every_check_of_scikit_learn_passes(kind, inference):
    few = {"epochs": 8, "batch_size": 100, "inference": inference}
    estimator = chains(kind) if inference == "chains" else kind(**QUICK | few)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # checks that are skipped, or look for warnings themselves
        checks = check_estimator(estimator, on_fail=None)
    failed = {c["check_name"]: c["exception"] for c in checks if c["status"] == "failed"}
    assert failed.keys() <= BY_WEIGHTS
    skipped = {c["check_name"] for c in checks if c["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}  # of arrays of other libraries, off by default
    assert len(checks) > 40


@pytest.mark.parametrize("make", [regressor, classifier])
@pytest.mark.parametrize("check", sorted(BY_WEIGHTS))
def test_a_weight_is_as_many_rows(make, check):
    estimator = make(estimator="reparam", batch_size=1000, epochs=8)
    getattr(estimator_checks, check)(type(estimator).__name__, estimator)


def test_classes_have_weights():
    rng = np.random.default_rng(0)
    y = np.where(np.arange(400) < 360, "often", "seldom")
    x = rng.normal(size=(400, 1)) + (y == "seldom")[:, None]
    probs = {}
    for name in (None, "balanced", {"seldom": 9.0}):
        sorter = classifier(class_weight=name, epochs=60, hidden_sizes=()).fit(x, y)
        probs[str(name)] = sorter.predict_proba(x)[:, 1]
    weight = np.where(y == "seldom", 9.0, 1.0)
    weighed = classifier(epochs=60, hidden_sizes=()).fit(x, y, sample_weight=weight)
    assert probs["None"].mean() < 0.2 and 0.4 < probs["balanced"].mean() < 0.6
    assert np.array_equal(probs[str({"seldom": 9.0})], weighed.predict_proba(x)[:, 1])
    balanced, plain = probs["balanced"], probs["None"]
    recall = [((p > 0.5) == (y == "seldom"))[y == "seldom"].mean() for p in (plain, balanced)]
    assert recall[0] < 0.2 and recall[1] > 0.5


def test_weights_are_checked():
    message = r"class_weight must be None, 'balanced' or a dict .* labels \['no', 'yes'\], got"
    for wrong in ("even", {"maybe": 2.0}, {"yes": -1.0}):
        with pytest.raises(ValueError, match=message):
            classifier(class_weight=wrong).fit(X, LABELS)
    with pytest.raises(ValueError, match="partial_fit, which does not see all rows"):
        classifier(class_weight="balanced").partial_fit(X, LABELS)
    for weight, message in ((np.zeros(60), ""), (-np.eye(60)[3], ".* -1.0 in row 3")):
        with pytest.raises(ValueError, match=f"[sS]ample.weights? must{message}"):
            regressor().fit(X, Y, sample_weight=weight)
    with pytest.raises(ValueError, match="sample_weight.shape"):
        regressor().fit(X, Y, sample_weight=np.ones(59))


@pytest.mark.parametrize("make", [regressor, classifier])
def test_sparse_inputs_are_learned_as_dense_ones(make):
    y = Y if make is regressor else LABELS
    thin = sparse.csr_array(X * (X > 1))
    dense, on_sparse = make(epochs=2).fit(thin.toarray(), y), make(epochs=2).fit(thin, y)
    assert (on_sparse.predict(thin) == dense.predict(thin.toarray())).all()
    assert (
        on_sparse.partial_fit(thin, y).predict(thin) == dense.partial_fit(thin, y).predict(thin)
    ).all()
    wide = sparse.csr_array((2**14, 2**14))  # of 8 bytes: 2 GiB
    with pytest.raises(TypeError, match="X must take at most 1 GiB when dense, .* takes 2 GiB"):
        make().fit(wide, np.arange(2**14) % 2)


# --- in scikit-learn's company ---


def test_it_works_in_a_pipeline_a_grid_and_cross_validation():
    pipeline = make_pipeline(MinMaxScaler(), regressor(epochs=2))
    assert cross_val_score(pipeline, X, Y, cv=2).shape == (2,)
    grid = {"bayesianregressor__prior": ["normal", dist.Laplace(0.0, 1.0)]}
    search = GridSearchCV(pipeline, grid, cv=2, n_jobs=1).fit(X, Y)
    assert len(search.cv_results_["params"]) == 2 and search.predict(X).shape == (60,)


OBJECTS = {
    "prior": bbb.priors.LearnedScaleMixture(0.5, 1.0, 0.1),
    "noise": likelihoods.Gaussian.learned(0.3),
    "guide": guides.LowRank,
    "activation": nn.Tanh,
}


@pytest.mark.parametrize("parameter", OBJECTS)
def test_parameters_that_are_objects_are_cloned_and_stay_as_they_are(parameter):
    estimator = clone(regressor(epochs=2, **{parameter: OBJECTS[parameter]}))
    value = estimator.get_params()[parameter]
    state = copy.deepcopy(value.state_dict()) if isinstance(value, nn.Module) else {}
    once, twice = estimator.fit(X, Y).predict(X), estimator.fit(X, Y).predict(X)
    assert np.array_equal(once, twice)
    assert all(torch.equal(x, value.state_dict()[name]) for name, x in state.items())


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_data_frames_are_taken_and_their_names_kept(frame):
    columns = {"a": X[:, 0], "b": X[:, 1], "c": X[:, 2]}
    fitted = regressor(epochs=2).fit(frame(columns), Y)
    assert list(fitted.feature_names_in_) == ["a", "b", "c"]
    assert np.array_equal(fitted.predict(frame(columns)), regressor(epochs=2).fit(X, Y).predict(X))
    with pytest.raises(ValueError, match="feature names"):
        fitted.predict(frame({"b": X[:, 1], "a": X[:, 0], "c": X[:, 2]}))


# --- columns of categories, missing values ---

TOWNS = np.array(["Rome", None, "Oslo", "Bonn"] * 15, dtype=object)
HOLES = np.where(np.arange(60) % 3 == 0, np.nan, X[:, 0])
FLAGS = np.arange(60) % 2 == 0
BY_HAND = np.c_[
    np.where(np.isnan(HOLES), np.nanmedian(HOLES), HOLES),
    np.isnan(HOLES),
    *(TOWNS == town for town in ("Bonn", "Oslo", "Rome", None)),
    FLAGS,
]


def in_pandas(holes, towns, flags):
    holes = pd.array(holes, dtype="Float64")  # with NA
    return pd.DataFrame({"a": holes, "town": pd.Categorical(towns), "flag": flags})


def in_polars(holes, towns, flags):
    towns = pl.Series(towns.tolist(), dtype=pl.Categorical)
    return pl.DataFrame({"a": pl.Series(holes, nan_to_null=True), "town": towns, "flag": flags})


def as_objects(holes, towns, flags):
    return np.array([[None if np.isnan(x) else x for x in holes], towns, flags], dtype=object).T


TABLES = [
    (in_pandas, "from_dtype"),
    (in_polars, "from_dtype"),
    (in_pandas, ["town"]),
    (in_polars, [False, True, False]),
    (as_objects, [1]),
]


@pytest.mark.parametrize(("table", "categorical"), TABLES)
def test_tables_are_learned_as_encoded_by_hand(table, categorical):
    rows, new = table(HOLES, TOWNS, FLAGS), np.s_[:4]
    fitted = regressor(epochs=2, categorical_features=categorical).fit(rows, Y)
    by_hand = regressor(epochs=2).fit(BY_HAND, Y)
    assert np.array_equal(fitted.predict(rows), by_hand.predict(BY_HAND))
    assert fitted.columns_.is_number.tolist() == [True, *[False] * 5, True]
    assert fitted.n_features_in_ == 3
    unknown = np.array(["Ulm", "Rome", None, "Ulm"], dtype=object)
    expected = BY_HAND[new].copy()
    expected[:, 2:6] = [[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1]]
    predicted = fitted.predict(table(HOLES[new], unknown, FLAGS[new]))
    assert np.array_equal(predicted, by_hand.predict(expected))
    labels = classifier(epochs=2, categorical_features=categorical).fit(rows, LABELS)
    assert np.array_equal(
        labels.predict_proba(rows), classifier(epochs=2).fit(BY_HAND, LABELS).predict_proba(BY_HAND)
    )


def test_what_is_missing_at_prediction_only_is_not_marked():
    towns = np.where(TOWNS == None, "Rome", TOWNS)  # noqa: E711
    table = in_pandas(X[:, 0], towns, FLAGS)
    fitted = regressor(epochs=2).fit(table, Y)
    median = table.assign(a=np.median(X[:, 0]))
    assert np.array_equal(fitted.predict(table.assign(a=np.nan)), fitted.predict(median))
    network = regressor(epochs=2).fit(
        by_hand := np.c_[X[:, 0], *(towns == town for town in ("Bonn", "Oslo", "Rome")), FLAGS], Y
    )
    by_hand[:, 1:4] = 0  # an unknown town
    assert np.array_equal(
        fitted.predict(table.assign(town=pd.Categorical(["Ulm"] * 60))), network.predict(by_hand)
    )


def test_rows_of_weight_0_do_not_decide_on_columns():
    weight = (np.arange(60) >= 4).astype(float)
    towns = np.where(np.arange(60) < 4, "Ulm", "Rome")
    towns[30:] = "Oslo"
    weighed, fewer = (
        regressor(epochs=2, estimator="reparam").fit(in_pandas(*rows), Y[at], weight[at])
        for at in (np.s_[:], np.s_[4:])
        for rows in [(np.where(np.arange(60) < 4, np.nan, X[:, 0])[at], towns[at], FLAGS[at])]
    )
    assert weighed.columns_ == fewer.columns_
    assert weighed.columns_.categories[1] == ["Oslo", "Rome"] and not any(weighed.columns_.gaps)


def test_further_rows_are_encoded_as_the_first(tmp_path):
    estimator = regressor(epochs=2).partial_fit(in_pandas(HOLES, TOWNS, FLAGS), Y)
    columns = estimator.columns_
    rows = in_pandas(X[:8, 0], np.array(["Ulm"] * 8, dtype=object), FLAGS[:8])
    assert estimator.partial_fit(rows, Y[:8]).columns_ is columns
    estimator.save(tmp_path)
    for twin in (BayesianRegressor.load(tmp_path), pickle.loads(pickle.dumps(estimator))):
        assert twin.columns_ == columns and np.array_equal(
            twin.predict(rows), estimator.predict(rows)
        )


TEXT = pd.DataFrame({"a": X[:, 0], "town": TOWNS})
BAD_TABLES = {
    "text": (TEXT, {}, "column 'town' has 'Rome' in row 0, not a number: .* categorical_features"),
    "text in polars": (pl.DataFrame({"town": TOWNS.tolist()}), {}, "column 'town' has 'Rome'"),
    "text in an array": (as_objects(HOLES, TOWNS, FLAGS), {}, "column 1 has 'Rome' in row 0"),
    "a date": (TEXT.assign(town=pd.Timestamp("2024")), {}, "column 'town' has Timestamp.*convert"),
    "infinite": (TEXT[["a"]] * np.inf, {}, "column 'a' of X has inf in row 0: .* NaN"),
    "infinite array": (X * [1, 1, np.inf], {}, "column 2 of X has inf in row 0"),
    "no such name": (
        TEXT,
        {"categorical_features": ["twn"]},
        "names or .* got 'twn' for 2 columns",
    ),
    "no such index": (TEXT, {"categorical_features": [2]}, "got 2 for 2 columns"),
    "a short mask": (TEXT, {"categorical_features": [True]}, "got True for 2 columns"),
    "no such word": (TEXT, {"categorical_features": "by_dtype"}, "got 'by_dtype' for 2 columns"),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables_are_named_by_column_value_and_remedy(case):
    table, options, message = BAD_TABLES[case]
    with pytest.raises((ValueError, TypeError), match=message):
        regressor(**options).fit(table, Y)


@pytest.mark.parametrize("device", ["pickle", "joblib", "deepcopy", "save"])
def test_a_fitted_estimator_is_kept(device, fitted, sorter, tmp_path):
    for est, ask in ((fitted, "predict"), (sorter, "predict_proba")):
        if device == "save":
            est.save(tmp_path / ask, metadata={"note": "x"})
            twin = type(est).load(tmp_path / ask)
            assert twin.get_params() == est.get_params() | {"hidden_sizes": [*est.hidden_sizes]}
        elif device == "joblib":
            joblib.dump(est, tmp_path / ask)
            twin = joblib.load(tmp_path / ask)
        else:
            twin = copy.deepcopy(est) if device == "deepcopy" else pickle.loads(pickle.dumps(est))
        assert np.array_equal(getattr(est, ask)(X), getattr(twin, ask)(X))
        assert twin.n_features_in_ == 3
    assert list(twin.classes_) == ["no", "yes"]


# --- regression: what is predicted, in which unit ---


def test_it_learns_in_the_targets_unit_whatever_the_scales(fitted):
    assert fitted.score(X, Y) > 0.95
    mean, std = fitted.predict(X, return_std=True)
    aleatoric, epistemic = fitted.predict_uncertainty(X)
    np.testing.assert_allclose(np.hypot(aleatoric, epistemic), std, rtol=1e-12)
    assert np.ptp(aleatoric) < 1e-9 * aleatoric[0]  # one noise for all inputs
    if fitted.inference == "chains":
        return
    moved = regressor().fit(X * 8 + 3, 4 * Y - 7)  # powers of 2 round nothing but the shift
    np.testing.assert_allclose(moved.predict(X * 8 + 3), 4 * mean - 7, rtol=1e-6)


def test_the_predictive_is_the_mixture_over_the_networks(fitted):
    pred = fitted.posterior_predictive(X)
    loc, scale = (x[..., 0].numpy() for x in (pred.components.loc, pred.components.scale))
    mixture = stats.norm(loc, scale)
    density = np.log(mixture.pdf(Y).mean(0))
    np.testing.assert_allclose(pred.log_prob(torch.from_numpy(Y)), density, rtol=1e-9)
    lower, upper = fitted.predict_interval(X, level=0.8)
    cdf = stats.norm(loc, scale).cdf
    np.testing.assert_allclose(cdf(lower).mean(0), 0.1, atol=1e-9)
    np.testing.assert_allclose(cdf(upper).mean(0), 0.9, atol=1e-9)
    np.testing.assert_allclose(fitted.predict(X), loc.mean(0), rtol=1e-12)


def test_quantiles_and_scores_are_those_of_the_mixture(fitted):
    levels, draws = (0.1, 0.5, 0.9), fitted.sample_y(X, 200)
    quantiles, pred = fitted.predict_quantiles(X, levels), fitted.posterior_predictive(X)
    std = pred.std[:, 0].numpy()
    for level, column in zip(levels, quantiles.T, strict=True):
        np.testing.assert_allclose(pred.cdf(torch.tensor(column[:, None])), level, atol=1e-9)
        loss = [
            mean_pinball_loss(draws.T, np.tile(column + shift * std, (200, 1)), alpha=level)
            for shift in (-1, 0, 1)
        ]
        assert np.argmin(loss) == 1
    np.testing.assert_allclose(quantiles[:, [0, 2]].T, fitted.predict_interval(X, level=0.8))
    assert fitted.predict_quantiles(X).shape == (60, 3)
    np.testing.assert_allclose(fitted.score_samples(X, Y), pred.log_prob(torch.tensor(Y)))
    np.testing.assert_allclose(fitted.score_samples(X), fitted.score_samples(X, quantiles[:, 1]))
    for wrong, message in ((0.5, "several numbers"), ((0.5, 1.0), "in .0, 1.")):
        with pytest.raises((TypeError, ValueError), match=f"quantiles must be {message}"):
            fitted.predict_quantiles(X, wrong)
    with pytest.raises(ValueError, match=r"y must have shape \[n\] as before"):
        fitted.score_samples(X, np.c_[Y, Y])


def test_drawn_targets_have_the_predictive_distribution(fitted):
    # 4 comparisons at 6 standard errors
    draws = fitted.sample_y(X[:4], 4000, random_state=1)
    assert draws.shape == (4, 4000)
    noise = fitted.predict_uncertainty(X[:4])[0]
    many = copy.deepcopy(fitted).set_params(num_samples=4000)
    error = draws.std(1) / np.sqrt(4000) + many.predict_uncertainty(X[:4])[1] / np.sqrt(4000)
    assert (np.abs(draws.mean(1) - many.predict(X[:4])) < 6 * error).all()
    assert (draws.std(1) > 0.9 * noise).all()
    again = fitted.sample_y(X[:4], 3, random_state=1)
    assert np.array_equal(again, fitted.sample_y(X[:4], 3, random_state=1))


def test_several_targets_keep_their_own_units():
    both = np.stack([Y, -1e-3 * Y], axis=1)
    fitted = regressor().fit(X, both)
    assert fitted.score(X, both) > 0.9
    assert fitted.predict(X).shape == (60, 2)
    assert fitted.sample_y(X, 3).shape == fitted.predict_quantiles(X).shape == (60, 2, 3)
    density = fitted.posterior_predictive(X).log_prob(torch.tensor(both))
    np.testing.assert_allclose(fitted.score_samples(X, both), density)
    ratio = fitted.predict(X, return_std=True)[1].mean(0)
    assert 300 < ratio[0] / ratio[1] < 3000
    with pytest.raises(ValueError, match=r"y must have shape \[n, 2\] as before"):
        fitted.partial_fit(X, Y)


BY_CHAINS = [pytest.param("negative_binomial", chains, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("noise", "make"), [*((x, regressor) for x in sorted(NOISES)), *BY_CHAINS])
def test_noise_by_name(noise, make):
    counts = noise in ("poisson", "negative_binomial")
    y = np.round(np.exp(X[:, 0] - 4)) if counts else Y
    fitted = make(noise=noise, **{"max_epochs": 600} if make is chains else {}).fit(X, y)
    assert fitted.score(X, y) > 0.5
    draws = fitted.sample_y(X, 2)
    assert not counts or (np.array_equal(draws, np.round(draws)) and (draws >= 0).all())
    quantile, pred = fitted.predict_quantiles(X, [0.3]), fitted.posterior_predictive(X)
    above, below = (pred.cdf(torch.tensor(quantile - by)).numpy() for by in (0, int(counts)))
    assert (above >= 0.3 - 1e-9).all() and (below <= 0.3 + 1e-9).all()
    assert np.isfinite(fitted.score_samples(X)).all()


# --- where the outputs start, and whether they got there ---


def counts_of(level, rows=300, seed=0, spread=0.0):
    """Counts around a level, log-linear in the inputs; more than Poisson's with a spread."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    log_rate = np.log(level) + 0.3 * x[:, 0] - 0.2 * x[:, 1] + spread * rng.normal(size=rows)
    return x, rng.poisson(np.exp(log_rate))


@pytest.mark.parametrize("noise", ["poisson", "negative_binomial"])
def test_the_start_of_counts_is_their_mean_and_is_kept(noise, tmp_path):
    x, y = counts_of(500)
    y = np.stack([y, 10 * y, 0 * y], axis=1)  # the third never happens
    fitted = regressor(noise=noise, epochs=4).fit(x, y)
    values = fitted.posterior_.model.network.offset.values
    np.testing.assert_allclose(values.exp(), (y.sum(0) + 0.5) / 300, rtol=1e-12)
    assert all("offset" not in name for name in fitted.posterior_.model.latent_shapes())
    fitted.save(tmp_path / "saved")
    for twin in (BayesianRegressor.load(tmp_path / "saved"), pickle.loads(pickle.dumps(fitted))):
        assert np.array_equal(twin.predict(x), fitted.predict(x))
        twin.partial_fit(x[:50], y[:50])
        assert torch.equal(twin.posterior_.model.network.offset.values, values)


def test_the_start_of_classes_is_their_frequency():
    labels = np.array(["rare", "usual"])[(RNG.random(60) > 0.1).astype(int)]
    network = classifier(epochs=2).fit(X, labels).posterior_.model.network
    counts = (labels == "rare").sum() + 0.5, (labels == "usual").sum() + 0.5
    odds = (network.offset.values[1] - network.offset.values[0]).item()
    assert odds == pytest.approx(np.log(counts[1] / counts[0]))
    absent = classifier(epochs=2).partial_fit(X, labels, classes=["never", "rare", "usual"])
    assert absent.predict_proba(X)[:, 0].max() < 0.2
    balanced = classifier(epochs=2).fit(X, np.arange(60) % 2).posterior_.model.network
    real = regressor(epochs=2).fit(X, Y).posterior_.model.network
    assert not hasattr(balanced, "offset") and not hasattr(real, "offset")


def test_a_likelihood_object_starts_at_the_weighted_mean_too():
    weight = np.repeat([2.0, 1.0, 0.0], 20)
    for likelihood, y, expected in (
        (likelihoods.Poisson(), np.full(60, 7.0), np.log(420.5 / 60)),
        (likelihoods.Bernoulli(), (np.arange(60) < 6).astype(float), np.log(12.5 / 48.5)),
    ):
        network = regressor(noise=likelihood, epochs=2).fit(X, y, weight).posterior_.model.network
        assert network.offset.values.item() == pytest.approx(expected)


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_intervals_that_miss_too_much_of_the_training_rows_are_told(spread):
    """Counts of too large a spread for a Poisson, and then for the noise that has it."""
    x, y = counts_of(100, spread=spread)
    fit = BayesianRegressor(noise="poisson", epochs=60, lr=0.03, random_state=0).fit
    if spread:
        with pytest.warns(
            UserWarning, match=r"level 0\.9 hold 0\.[2-7].*negative_binomial"
        ) as caught:
            fit(x, y)
        assert [w.filename for w in caught] == [__file__]
    else:
        fit(x, y)  # a warning is an error here
    BayesianRegressor(noise="negative_binomial", epochs=60, lr=0.03, random_state=0).fit(x, y)


def test_known_noise_is_in_the_targets_unit():
    fitted = regressor(noise=50.0, epochs=2).fit(X, Y)
    np.testing.assert_allclose(fitted.predict_uncertainty(X).aleatoric, 50.0, rtol=1e-12)


def test_rows_do_not_depend_on_the_rows_beside_them(fitted):
    at_once = fitted.predict(X)
    for rows in (slice(0, 1), slice(7, 20)):
        np.testing.assert_allclose(fitted.predict(X[rows]), at_once[rows], rtol=1e-12)


def test_constant_columns_do_no_harm():
    constant = np.c_[X, np.full(60, 0.1), np.zeros(60)]
    fitted = regressor().fit(constant, Y)
    assert fitted.score(constant, Y) > 0.9
    assert np.isfinite(regressor(epochs=2).fit(X, np.ones(60)).predict(X)).all()


@pytest.mark.parametrize("scale", [1e-160, 1e200])
def test_targets_whose_squares_overflow_or_vanish_are_named_by_row(scale):
    with pytest.raises(ValueError, match=r"y must be of size 1e-150 to 1e\+150.* in row 0"):
        regressor(epochs=2).fit(X, np.c_[Y, Y * scale])
    std = regressor(epochs=2).fit(X, Y * 1e-140).predict(X, return_std=True)[1]
    assert (std > 0).all()
    with pytest.raises(ValueError, match=r"got 1e\+200 in row 3"):
        regressor(epochs=1).fit(X, Y).partial_fit(X[:4], np.array([0, 1, 1e-200, 1e200]))


# --- classification ---


def test_classes_of_any_kind_with_both_uncertainties(sorter):
    assert sorter.score(X, LABELS) > 0.9
    probs = sorter.predict_proba(X)
    np.testing.assert_allclose(probs.sum(1), 1.0)
    np.testing.assert_allclose(np.exp(sorter.predict_log_proba(X)), probs)
    total = stats.entropy(probs, axis=1)
    np.testing.assert_allclose(sum(sorter.predict_uncertainty(X)), total, rtol=1e-9)
    score = stats.multinomial(1, probs).logpmf((LABELS[:, None] == sorter.classes_).astype(int))
    np.testing.assert_allclose(sorter.score_samples(X, LABELS), score, atol=1e-12)
    np.testing.assert_allclose(sorter.score_samples(X), np.log(probs.max(1)))
    with pytest.raises(ValueError, match="y must hold labels of classes_"):
        sorter.score_samples(X, np.full(60, "never"))
    draws = sorter.sample_y(X, 5)
    assert draws.shape == (60, 5) and set(draws.ravel()) == {"no", "yes"}


def test_drawn_labels_come_from_each_networks_probabilities(sorter):
    # 10 comparisons at 6 standard errors
    rows, many = X[:10], copy.deepcopy(sorter).set_params(num_samples=4000)
    share = (sorter.sample_y(rows, 4000) == "yes").mean(1)
    probs = many.predict_proba(rows)[:, 1]
    error = np.sqrt(2 * probs * (1 - probs) / 4000)  # both are estimates
    assert (np.abs(share - probs) < 6 * error + 1e-3).all()


# --- learning on ---


def line(rows, noise, seed):
    """Rows of a line through 0, and inputs with mean 0, so that weight and bias are independent."""
    rng = np.random.default_rng(seed)
    half = rng.normal(size=(rows // 2, 1))
    x = np.concatenate([half, -half])
    return x, x + noise * rng.normal(size=(rows, 1))


def test_learning_on_is_bayes_rule_where_that_is_exact():
    options = {"prior": "normal", "temperature": 1.0, "epochs": 160, "batch_size": 100}
    estimator = regressor(hidden_sizes=(), noise=likelihoods.Gaussian(1.0), **options)
    precision, sum_xy = 1.0, 0.0
    for seed in (1, 2):
        rows, targets = line(100, 1.0, seed)
        estimator.partial_fit(rows, targets)
        # N(0, 1) prior and unit noise in the scaled units: posterior precision 1 + sum x^2
        x, y = estimator.x_scaling_(torch.tensor(rows)), estimator.y_scaling_(torch.tensor(targets))
        precision, sum_xy = precision + x.square().sum(), sum_xy + (x * y).sum()
        mean, sd = sum_xy / precision, precision.rsqrt()
        guide, name = estimator.posterior_.guide, "network.fc1.weight"
        assert abs(guide.loc(name) - mean) < 0.3 * sd
        assert guide.scale(name).item() == pytest.approx(sd.item(), rel=0.1)
        assert estimator.posterior_.num_seen == 100 * seed
    estimator.partial_fit(rows[:1], targets[:1])  # a single row


def test_learned_noise_is_a_running_estimate():
    estimator = regressor(hidden_sizes=(), epochs=150, batch_size=1000, lr=0.3)
    (x1, y1), (x2, y2) = line(200, 1.0, 1), line(600, 3.0, 2)
    first = estimator.partial_fit(x1, y1).posterior_.model.likelihood
    noise = estimator.predict_uncertainty(x1).aleatoric[0]
    assert noise == pytest.approx((y1 - x1).std(), rel=0.05)
    before = first.scale.item()
    after = estimator.partial_fit(x2, y2).predict_uncertainty(x1).aleatoric[0]
    assert after == pytest.approx(np.concatenate([y1 - x1, y2 - x2]).std(), rel=0.05)
    assert first.scale.item() == before  # that of the first posterior stays


def test_classes_may_come_later():
    estimator = classifier().partial_fit(X[:40], LABELS[:40], classes=["maybe", "no", "yes"])
    estimator.partial_fit(X[40:], LABELS[40:])
    assert list(estimator.classes_) == ["maybe", "no", "yes"] and estimator.score(X, LABELS) > 0.85
    with pytest.raises(ValueError, match="y must hold labels of classes_"):
        estimator.partial_fit(X, np.full(60, "never"))
    with pytest.raises(ValueError, match="classes must be"):
        estimator.partial_fit(X, LABELS, classes=["no", "yes"])


# --- chains ---


@pytest.mark.parametrize("make", [BayesianRegressor, BayesianClassifier])
def test_early_stopping_keeps_the_weights_of_the_best_pass(make):
    # labels of noise alone: the first passes predict best
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 5)), rng.integers(2, size=120)
    options = {"max_epochs": 200, "n_iter_no_change": 20, "temperature": 0.01, "random_state": 0}
    stopped = make(early_stopping=True, validation_fraction=0.25, **options).fit(x, y)
    losses = stopped.history_.validation_loss
    assert len(losses) < 200 and np.argmin(losses) == len(losses) - 21
    assert stopped.posterior_.model.num_data == 90
    new = rng.normal(size=(500, 5)), rng.integers(2, size=500)
    long = make(inference="variational", tol=0, **options).fit(x, y)
    assert stopped.score_samples(*new).mean() > long.score_samples(*new).mean()
    with pytest.raises(ValueError, match="validation_fraction must leave rows"):
        make(early_stopping=True, validation_fraction=0.999).fit(x, y)


def test_early_stopping_validates_by_the_weights_of_rows():
    # nine rows of ten, of little weight, have the opposite labels: without weights every pass
    # after the first looks worse
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    light = np.arange(300) % 10 > 0
    y = (x[:, 0] > 0) ^ light
    weight = np.where(light, 1e-3, 10.0)
    options = {"max_epochs": 100, "n_iter_no_change": 30, "random_state": 0}
    model = BayesianClassifier(early_stopping=True, **options).fit(x, y, weight)
    new = rng.normal(size=(300, 2))
    assert model.score(new, new[:, 0] > 0) > 0.9
    assert min(model.history_.validation_loss) < 0.3


def test_auto_flattens_probabilities_of_labels_without_signal(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)), rng.integers(2, size=60)
    auto, chains = (
        BayesianClassifier(inference=name, max_epochs=epochs, random_state=0).fit(x, y)
        for name, epochs in (("auto", None), ("chains", 1000))
    )
    sharpness = auto.posterior_.sharpness
    assert sharpness < 1 == chains.posterior_.sharpness
    draws = auto.posterior_predictive(x).sample_log_probs
    plain = chains.posterior_predictive(x).sample_log_probs
    assert_allclose(draws, (sharpness * plain).log_softmax(-1))
    new = rng.normal(size=(500, 5)), rng.integers(2, size=500)
    assert auto.score_samples(*new).mean() > chains.score_samples(*new).mean() + 0.05
    auto.save(tmp_path)
    again = BayesianClassifier.load(tmp_path)  # draws are saved in float32
    assert_allclose(again.predict_proba(x), auto.predict_proba(x), atol=1e-5)


def test_auto_raises_the_likelihood_of_clean_labels():
    x, y = load_iris(return_X_y=True)
    auto, chains = (
        BayesianClassifier(inference=name, random_state=0).fit(x[::2], y[::2])
        for name in ("auto", "chains")
    )
    assert auto.posterior_.sharpness == 1 and auto.posterior_.num_seen == 75
    new = x[1::2], y[1::2]
    assert auto.score_samples(*new).mean() > chains.score_samples(*new).mean() + 0.02


def test_auto_takes_what_the_options_allow():
    def chosen(rows=100, hidden=(50,), make=BayesianRegressor, **options):
        estimator = make(hidden_sizes=hidden, **options)
        return _posterior.chosen_inference(estimator, [3, *hidden, 1], rows)

    assert chosen() == chosen(10**6) == chosen(num_samples=5, seconds=1.0) == "wide"
    assert chosen(noise="student_t", prior="laplace") == chosen(make=BayesianClassifier) == "chains"
    assert chosen(5000, activation="tanh") == "chains"
    assert chosen(5001, activation="tanh") == "variational"
    assert chosen(hidden=(999,)) == "chains"  # 4,996 weights
    assert chosen(hidden=(1000,)) == "variational"  # 5,001
    for changes in ({"guide": "delta"}, {"max_epochs": 9}, {"temperature": 0.5}):
        assert chosen(**changes) == "variational"
    assert chosen(10**6, max_epochs=9, inference="chains") == "chains"


def test_auto_trains_a_guide_where_something_has_no_prior(monkeypatch):
    monkeypatch.setattr(_posterior, "fit", lambda *args, **options: None)
    options = {"prior": "learned_scale_mixture", "random_state": 0}
    auto, plain = (
        BayesianRegressor(inference=name, **options).fit(X, Y) for name in ("auto", "variational")
    )
    assert type(auto.posterior_.guide) is guides.AutoSoftplusNormal
    assert np.array_equal(auto.predict(X), plain.predict(X))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.5}, "lr must stay at its default for inference='chains'.*0.5.*'variational'"),
        ({"guide": "delta"}, "guide must stay at its default"),
        ({"prior": "learned_scale_mixture"}, "trained parameter 'network.*'variational'"),
    ],
)
def test_what_chains_do_not_use_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        chains(**options).fit(X, Y)


def test_chains_are_not_learned_on_from_further_rows(fitted):
    assert hasattr(fitted, "partial_fit") == (fitted.inference != "chains")
    assert fitted.n_iter_ > 0 and len(fitted.history_) == 40 * (fitted.inference != "chains")
    by_chains = clone(fitted).set_params(inference="chains")
    with pytest.raises(AttributeError, match="no attribute 'partial_fit'") as error:
        by_chains.partial_fit(X, Y)
    assert "fit all rows at once, or take inference='variational'" in str(error.value.__cause__)


@pytest.mark.parametrize("make", [regressor, chains])
@pytest.mark.parametrize(("n_jobs", "threads"), [(3, 3), (-1, os.cpu_count()), (None, 1)])
def test_the_number_of_threads_is_n_jobs(make, n_jobs, threads, monkeypatch):
    used, before = {}, torch.get_num_threads()
    for name in ("fit", "sample", "predict"):
        original = getattr(_posterior, name)

        def noted(*args, name=name, original=original, **options):
            used[name] = torch.get_num_threads()
            return original(*args, **options)

        monkeypatch.setattr(_posterior, name, noted)
    options = {"max_epochs": 4} if make is chains else {"epochs": 1}
    make(n_jobs=n_jobs, **options).fit(X, Y).predict(X)
    if n_jobs is None and make is chains:
        assert used.pop("predict") == before
    assert set(used.values()) == {threads} and torch.get_num_threads() == before


# --- bad input ---

BAD = {
    "hidden size 0": ({"hidden_sizes": (0,)}, "hidden_sizes must be an integer of at least 1"),
    "activation": ({"activation": "step"}, "activation must be callable or one of"),
    "prior": ({"prior": "nice"}, "prior must be one of"),
    "guide": ({"guide": "nice"}, "guide must be callable or one of"),
    "estimator": ({"estimator": "nice"}, "estimator must be one of"),
    "inference": ({"inference": "exact"}, "inference must be one of"),
    "seconds": ({"seconds": 0}, "seconds must be positive"),
    "noise": ({"noise": "nice"}, "noise must be a number, a distribution"),
    "epochs 0": ({"epochs": 0}, "epochs must be an integer of at least 1"),
    "max epochs": ({"max_epochs": 0}, "max_epochs must be an integer"),
    "window": ({"n_iter_no_change": 0}, "n_iter_no_change must be an integer"),
    "tol": ({"tol": -1.0}, "tol must be a non-negative number"),
    "batch size": ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
    "lr": ({"lr": -1.0}, "lr must be positive"),
    "temperature": ({"temperature": 0.0}, "temperature must be positive"),
    "jobs": ({"n_jobs": 0}, "n_jobs must be an integer of at least 1"),
    "samples": ({"num_samples": 0}, "num_samples must be an integer of at least 1"),
    "device": ({"device": "nowhere"}, "device 'nowhere' is not available"),
    "counts": ({"noise": "poisson"}, "y must hold counts"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_parameters_are_named_when_fitted(case):
    options, message = BAD[case]
    estimator = BayesianRegressor(**options)  # scikit-learn's rule: only fit checks
    with pytest.raises((ValueError, TypeError), match=message):
        estimator.fit(X, Y)


def test_bad_data_and_order_of_calls_are_named(fitted, tmp_path):
    for unfitted in (regressor(), classifier()):
        with pytest.raises(NotFittedError):
            unfitted.predict(X)
    with pytest.raises(NotFittedError):
        regressor().save(tmp_path)
    with pytest.raises(ValueError, match="at least two classes"):
        classifier().fit(X, np.ones(60))
    with pytest.raises(ValueError, match="level must be in"):
        fitted.predict_interval(X, level=1.0)
    with pytest.raises(ValueError, match="n_samples must be"):
        fitted.sample_y(X, 0)
    with pytest.raises(TypeError, match="prior must be a name, a number or None to be saved"):
        regressor(epochs=1, prior=dist.Normal(0.0, 1.0)).fit(X, Y).save(tmp_path)
    fitted.save(tmp_path)
    with pytest.raises(bbb.LoadError, match="expected a saved BayesianClassifier"):
        BayesianClassifier.load(tmp_path)
    with pytest.raises(TypeError, match="guide must have Normal marginals"):
        regressor(epochs=1, guide="ensemble").fit(X, Y).partial_fit(X, Y)
    estimator = regressor(epochs=1, guide=AutoNormal).fit(X, Y)
    with pytest.raises(TypeError, match="guide must be one of pyro_bbb's to be kept"):
        pickle.dumps(estimator)
    assert np.isfinite(estimator.predict(X)).all()


# --- the end of training ---


def ended(losses, **options):
    """A plateau's epochs up to the end, and its factors of the rate, for such a loss per row."""
    plateau = Plateau(**{"max_epochs": 30, "n_iter_no_change": 2, "tol": 0.1, **options})
    history = bbb.History(num_data=10)
    for epoch in range(30):
        history.loss.append(10 * losses(epoch))
        factors = [plateau((epoch + fraction) / 30) for fraction in (0.0, 0.5)]
        if plateau.callback(EpochEnd(epoch, None, None, history)):
            break
    return epoch + 1, plateau, factors


def test_training_ends_as_long_after_the_plateau_began():
    epochs, plateau, factors = ended(lambda epoch: max(0.0, 5.0 - epoch))
    # averages over 2 epochs: 4.5, 2.5, 0.5, 0.0, which is lower by 0.5, more than a tenth of 4; 0.0
    assert (plateau.first, epochs) == (10, 20)
    assert plateau(0.99 * 10 / 30) == 1.0 and plateau(15 / 30) == pytest.approx(0.5)
    assert 0 < factors[-1] < 0.03  # half an epoch before the end
    epochs, plateau, _ = ended(lambda epoch: max(0.0, 5.0 - epoch), tol=0.13)
    assert (plateau.first, epochs) == (8, 16)  # 0.5 is less than 0.13 of 4
    epochs, plateau, _ = ended(lambda epoch: 1.0 / (1 + epoch), tol=0.0)
    assert (plateau.first, epochs) == (15, 30)  # it goes on getting better, up to the most


@pytest.mark.parametrize("bad", [10.0, 1e6])
def test_where_training_ends_depends_on_no_bad_start(bad):
    """An epoch of a bad start before the losses of a good one delays the plateau by one epoch."""
    losses = [3.0 + 0.8**epoch for epoch in range(30)]

    def end(nlls):
        plateau = Plateau(1000, 1, 0.02, 40.0)  # constant outputs cost 4.0 nats per row
        for epoch, nll in enumerate(nlls):
            history.nll.append(10 * nll)
            history.loss.append(10 * nll + 5.0)
            if plateau.callback(EpochEnd(epoch, None, None, history)):
                return epoch + 1
            if plateau.last < 1000:
                return plateau.first

    history = bbb.History(num_data=10)
    good = end(losses)
    history = bbb.History(num_data=10)
    assert end([bad, *losses]) == good + 1
    assert good < 30


def test_the_number_of_epochs_is_told():
    quick = BayesianRegressor(tol=0.5, random_state=0).fit(X, X[:, 0])
    most = _posterior.training_length(quick, None, 60)["epochs"]
    assert len(quick.history_) == quick.n_iter_ < most
    assert BayesianRegressor(max_epochs=7, random_state=0).fit(X, X[:, 0]).n_iter_ == 7
