# SPDX-License-Identifier: Apache-2.0
"""Entries of targets that are missing or ignored do not count, through every door."""

import math
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import likelihoods

N, NAN = 12, math.nan
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=GENERATOR)
REAL = torch.stack([X.sum(1), X[:, 0]], 1)
MISSING = torch.rand(N, 2, generator=GENERATOR) < 0.4
COUNTS = (REAL.abs() + 1).round()
CASES = {  # likelihood, outputs, targets
    "gaussian": (lambda: likelihoods.Gaussian(0.5, missing="ignore"), 2, REAL),
    "learned": (lambda: likelihoods.Gaussian.learned(torch.ones(2), missing="ignore"), 2, REAL),
    "heteroscedastic": (lambda: likelihoods.HeteroscedasticGaussian(missing="ignore"), 4, REAL),
    "student t": (lambda: likelihoods.StudentT(4.0, missing="ignore"), 2, REAL),
    "poisson": (lambda: likelihoods.Poisson(missing="ignore"), 2, COUNTS),
    "negative binomial": (lambda: likelihoods.NegativeBinomial(missing="ignore"), 2, COUNTS),
    "bernoulli": (lambda: likelihoods.Bernoulli(missing="ignore"), 2, (REAL > 0).float()),
}


def with_gaps(y):
    return y.masked_fill(MISSING, NAN)


def problem(name="gaussian", guide="softplus_normal", *, rows=N, likelihood=None, outputs=None):
    torch.manual_seed(1)
    make, count, _ = CASES[name]
    layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs or count))
    prior = dist.Normal(0.0, 0.3)
    network = bbb.bayesianize(layers, prior, where="2" if guide == "vbll" else None)
    model = bbb.BayesianModel(network, likelihood or make(), num_data=rows)
    return model, bbb.guides.make(guide, model)


def nll(objective, x, y):
    torch.manual_seed(0)
    objective(x, y, kl_weight=0.0)
    return objective.parts.nll


@pytest.mark.parametrize("name", CASES)
def test_the_likelihood_is_the_sum_over_the_entries_that_are_there(name):
    model, guide = problem(name, "delta")
    objective, y = bbb.negative_elbo(model, guide), CASES[name][2]
    total = nll(objective, X, with_gaps(y))
    rows = {}
    for column in (0, 1):  # of either column alone, by gaps in all of the other
        alone = y.clone()
        alone[:, 1 - column] = NAN
        rows[column] = [nll(objective, X[i : i + 1], alone[i : i + 1]) for i in range(N)]
    there = [rows[c][i] for c in (0, 1) for i in range(N) if not MISSING[i, c]]
    assert total == pytest.approx(sum(there), rel=1e-5)
    both = nll(objective, X, y)
    assert both == pytest.approx(sum(rows[0]) + sum(rows[1]), rel=1e-5)
    value = objective(X, with_gaps(y))
    value.backward()
    assert all(p.grad.isfinite().all() for p in objective.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    ("form", "options"), [("loader", {}), ("tensors", {"optimizer": "ivon"})], ids=str
)
def test_fit_learns_each_column_from_the_rows_that_have_it(form, options):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, 3, generator=generator)
    y = torch.stack([x[:, 0], -x[:, 1]], 1).masked_fill(
        torch.rand(400, 2, generator=generator) < 0.3, NAN
    )
    model, guide = problem(rows=400, likelihood=likelihoods.Gaussian(0.1, missing="ignore"))
    data = (x, y) if form == "tensors" else DataLoader(TensorDataset(x, y), batch_size=100)
    history = bbb.fit(
        model, guide, data, epochs=60, batch_size=100, seed=0, progress=False, **options,
        validation=(x, y),
    )  # fmt: skip
    prediction = bbb.predict(model, guide, x, num_samples=10, seed=0)
    error = (prediction.mean - torch.stack([x[:, 0], -x[:, 1]], 1)).square().mean().sqrt()
    assert error < 0.3
    assert -prediction.log_prob(y).mean().item() == pytest.approx(history.validation_loss[-1])


@pytest.mark.filterwarnings("ignore::pyro_bbb.guides.LinearizationWarning")
def test_curvature_and_chains_do_not_see_missing_targets():
    y, one_column = with_gaps(REAL), REAL.clone()
    one_column[:, 1] = NAN
    model, guide = problem(guide="laplace")
    guide.approximate((X, y))
    assert guide.sample_posterior(2)["network.2.weight"].isfinite().all()
    scales = []
    for targets in (REAL, one_column):
        guide.approximate((X, targets))
        scales.append(guide.unconstrained_normal().parts[0].scale_tril.diagonal().mean())
    assert scales[0] < scales[1]  # fewer data
    options = {"num_samples": 3, "warmup_steps": 2, "seed": 0, "progress": False}
    bbb.run_nuts(problem()[0], (X, y), **options)
    bbb.run_sgmcmc(problem()[0], (X, y), lr=1e-3, batch_size=6, **options)


def test_predictions_score_the_entries_that_are_there():
    for name in ("gaussian", "poisson"):
        model, guide = problem(name)
        y = CASES[name][2]
        prediction = bbb.predict(model, guide, X, num_samples=1, seed=0)
        densities = prediction.components.log_prob(y)[0]
        expected = densities.masked_fill(MISSING, 0).sum(1)
        torch.testing.assert_close(prediction.log_prob(with_gaps(y)), expected)
    model, guide = problem("bernoulli")
    labels = CASES["bernoulli"][2]
    prediction = bbb.predict(model, guide, X, num_samples=1, seed=0)
    gapped, full = (prediction.log_prob(y) for y in (with_gaps(labels), labels))
    torch.testing.assert_close(gapped, full.masked_fill(MISSING, 0))
    scaled = bbb.predict(*problem(), X, seed=0).rescaled(1.0, 2.0)
    assert scaled.log_prob(with_gaps(REAL)).isfinite().all()
    plain = problem(likelihood=likelihoods.Gaussian(0.5))
    assert bbb.predict(*plain, X, seed=0).ignored is None


# --- labels ---

LABELS = torch.randint(3, (N, 4), generator=GENERATOR)
HIDDEN = torch.rand(N, 4, generator=GENERATOR) < 0.5


class Pixels(nn.Module):
    """Logits ``[n, 4, 3]`` of four pixels."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 12)

    def forward(self, x):
        return self.layer(x).unflatten(1, (4, 3))


@pytest.mark.parametrize("index", [-100, 255, 1])
def test_ignored_labels_do_not_count(index):
    torch.manual_seed(0)
    likelihood = likelihoods.Categorical(ignore_index=index)
    model = bbb.BayesianModel(bbb.bayesianize(Pixels()), likelihood, num_data=N)
    guide = bbb.guides.make("delta", model)
    y = LABELS.masked_fill(HIDDEN, index)
    objective = bbb.negative_elbo(model, guide)
    loss = nll(objective, X, y)
    with torch.no_grad():
        logits = bbb.predict_mean(model, guide, X).log_probs
    expected = nn.functional.cross_entropy(
        logits.movedim(2, 1), y, ignore_index=index, reduction="sum"
    )
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    prediction = bbb.predict_mean(model, guide, X)
    assert -prediction.log_prob(y).sum().item() == pytest.approx(loss, rel=1e-5)
    bbb.fit(model, guide, (X, y), epochs=2, progress=False, validation=(X, y), patience=1)
    with pytest.raises(ValueError, match=r"y must hold labels in \[0, 2\]"):
        bbb.fit(model, guide, (X, y.masked_fill(~HIDDEN, 7)), epochs=1, progress=False)


# --- kept, and refused ---


@pytest.mark.parametrize(
    ("likelihood", "ignored"),
    [(CASES["gaussian"][0], "nan"), (partial(likelihoods.Categorical, ignore_index=-100), -100)],
)
def test_the_option_is_saved(likelihood, ignored, tmp_path):
    model, guide = problem(likelihood=likelihood(), outputs=4)
    bbb.save(tmp_path / "model", model, guide)
    assert bbb.load(tmp_path / "model").model.likelihood.ignored == ignored


class Own(likelihoods.Gaussian):
    """Overrides what it documents."""

    def arguments(self, outputs):
        return {"loc": 2 * outputs, "scale": torch.ones_like(outputs)}


def test_what_is_not_asked_for_is_refused():
    y = with_gaps(REAL)
    model, guide = problem(likelihood=likelihoods.Gaussian())
    with pytest.raises(ValueError, match="y must be finite, got NaN or infinity first in row"):
        bbb.fit(model, guide, (X, y), epochs=1, progress=False)
    with pytest.raises(ValueError, match="y must hold finite real numbers, got nan"):
        bbb.negative_elbo(model, guide)(X, y)
    model, guide = problem()
    with pytest.raises(ValueError, match="y must hold finite real numbers, got inf"):
        bbb.fit(model, guide, (X, y.nan_to_num(math.inf)), epochs=1, progress=False)
    model, guide = problem(likelihood=Own(missing="ignore"))
    with pytest.raises(ValueError, match="Own must not ignore targets"):
        bbb.fit(model, guide, (X, y), epochs=1, progress=False)
    with pytest.raises(ValueError, match="missing must be one of"):
        likelihoods.Gaussian(missing="drop")
    with pytest.raises(TypeError, match="ignore_index must be an integer"):
        likelihoods.Categorical(ignore_index=1.5)
    with pytest.raises(ValueError, match="y must be finite"):
        bbb.evaluate(*problem(), (X, y))
