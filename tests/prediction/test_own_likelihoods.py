# SPDX-License-Identifier: Apache-2.0
"""Likelihoods of one's own: what they override takes effect wherever observations are scored."""

import functools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.nn import PyroSample
from scipy import stats
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.likelihoods import Gaussian, Likelihood, Poisson
from pyro_bbb.sklearn import BayesianRegressor

N = 12


class Correlated(Likelihood):
    """Two targets with a covariance, the same for all examples."""

    family = dist.MultivariateNormal

    def arguments(self, outputs):
        return {"loc": outputs, "covariance_matrix": outputs.new_tensor([[1, 0.6], [0.6, 0.5]])}


class Ordinal(Likelihood):
    """Ordered classes, whose cutpoints are a tensor without a row for each example."""

    family = dist.OrderedLogistic

    def arguments(self, outputs):
        return {"predictor": outputs[:, 0], "cutpoints": torch.tensor([-1.0, 0.0, 1.0])}


class LatentCutpoints(Likelihood):
    """The same with cutpoints that have a posterior."""

    def __init__(self):
        super().__init__()
        gaps = dist.Normal(torch.tensor([-1.0, 0.0, 0.0]), 0.5).to_event(1)
        self.gaps = PyroSample(gaps)

    def forward(self, outputs):
        first, *log_gaps = self.gaps.unbind(-1)
        cutpoints = torch.stack([first, *(x.exp() for x in log_gaps)], -1).cumsum(-1)
        return dist.OrderedLogistic(outputs[:, 0], cutpoints)


class OneScale(Likelihood):
    """A scale for all examples, as a number or a tensor without dimensions."""

    family = dist.Normal

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def arguments(self, outputs):
        return {"loc": outputs, "scale": self.scale}


class Overridden(Gaussian):
    """Laplace noise in place of a Normal's, of a scale known, learned or latent."""

    def forward(self, outputs):
        return dist.Laplace(outputs, self.scale).to_event(1)


class Gamma(Likelihood):
    """Positive targets."""

    family = dist.Gamma

    def arguments(self, outputs):
        concentration, rate = F.softplus(outputs).chunk(2, -1)
        return {"concentration": concentration, "rate": rate}


class OfTorch(Likelihood):
    """A distribution of torch, without Pyro's methods."""

    def forward(self, outputs):
        loc, raw = outputs.chunk(2, -1)
        return torch.distributions.Independent(torch.distributions.Beta(loc.exp(), raw.exp()), 1)


class Mixture(Likelihood):
    """A mixture of two Normals."""

    def forward(self, outputs):
        logits, loc, raw = outputs.chunk(3, -1)
        normals = dist.Normal(loc, F.softplus(raw))
        return dist.MixtureSameFamily(dist.Categorical(logits=logits), normals)


class Survival(dist.TorchDistribution):
    """Exponential times, observed or censored: pairs (time, whether observed)."""

    arg_constraints = {}

    def __init__(self, log_rate):
        self.log_rate = log_rate
        super().__init__(log_rate.shape, torch.Size([2]), validate_args=False)

    def log_prob(self, value):
        time, observed = value.unbind(-1)
        return observed * self.log_rate - time * self.log_rate.exp()


class Censored(Likelihood):
    """A distribution with nothing but a density."""

    def forward(self, outputs):
        return Survival(outputs[:, 0])


LABELS, POSITIVE = torch.arange(N) % 4, torch.linspace(0.05, 0.95, N)[:, None]
PAIRS = torch.stack([POSITIVE[:, 0], (torch.arange(N) % 2).float()], 1)
OWN = {  # the likelihood, number of outputs, targets
    "correlated": (Correlated, 2, torch.linspace(-1, 1, 2 * N).view(N, 2)),
    "ordinal": (Ordinal, 1, LABELS),
    "latent cutpoints": (LatentCutpoints, 1, LABELS),
    "a tensor without dimensions": (lambda: OneScale(torch.tensor(0.3)), 1, POSITIVE),
    "a number": (lambda: OneScale(0.3), 2, torch.cat([POSITIVE, -POSITIVE], 1)),
    "overridden": (lambda: Overridden(0.3), 1, POSITIVE),
    "overridden, learned": (lambda: Overridden.learned(0.3), 1, POSITIVE),
    "overridden, latent": (lambda: Overridden(dist.Gamma(20.0, 40.0)), 1, POSITIVE),
    "gamma": (Gamma, 2, POSITIVE),
    "torch": (OfTorch, 2, POSITIVE),
    "mixture": (Mixture, 6, POSITIVE[:, 0]),
    "censored": (Censored, 1, PAIRS),
}
CLASSES = {"ordinal", "latent cutpoints"}
WITHOUT_CDF = {"correlated", "torch", "censored"}
X = torch.linspace(-1, 1, 3 * N).view(N, 3)


def posterior(name):
    make, outputs, y = OWN[name]
    model = bbb.BayesianModel(bbb.BayesianMLP([3, 4, outputs]), make(), num_data=N)
    guide = bbb.AutoSoftplusNormal(model, init_rho=-1.5)
    return model, guide, y


def by_the_model(model, draws, y):
    """The observations' distribution for each draw, by Pyro's own `condition`."""
    for s in range(len(next(iter(draws.values())))):
        weights = {name: values[s] for name, values in draws.items()}
        yield poutine.trace(poutine.condition(model, weights)).get_trace(X, y).nodes["obs"]["fn"]


@pytest.mark.parametrize("name", OWN)
def test_predictions_are_mixtures_of_what_the_likelihood_gives(name):
    model, guide, y = posterior(name)
    model.check(X, y)
    draws = guide.sample_posterior(6)
    prediction, fns = bbb.predict(model, draws, X), list(by_the_model(model, draws, y))
    log_probs = torch.stack([fn.log_prob(y) for fn in fns]).logsumexp(0) - math.log(6)
    torch.testing.assert_close(prediction.log_prob(y), log_probs)
    assert (name in CLASSES) == hasattr(prediction, "probs")
    if name in CLASSES:
        probs = torch.stack(
            [torch.stack([fn.log_prob(c * y**0).exp() for c in range(4)], -1) for fn in fns]
        ).mean(0)
        torch.testing.assert_close(prediction.probs, probs)
    elif name != "censored":
        torch.testing.assert_close(prediction.mean, torch.stack([fn.mean for fn in fns]).mean(0))
        variances = torch.stack([fn.variance for fn in fns]).mean(0)
        torch.testing.assert_close(prediction.aleatoric_std.square(), variances)


@pytest.mark.parametrize("name", ["correlated", "latent cutpoints", "mixture", "censored"])
def test_every_door_agrees(name):
    model, guide, y = posterior(name)
    history = bbb.fit(model, guide, (X, y), epochs=2, num_particles=2, progress=False, seed=0)
    assert math.isfinite(history.loss[-1])
    prediction = bbb.predict(model, guide, X, num_samples=5, seed=0, estimator="reparam")
    log_prob = prediction.log_prob(y)
    data = torch.utils.data.TensorDataset(X, y)
    for answer in (
        bbb.predict(model, guide, data, num_samples=5, batch_size=5, seed=0),
        bbb.predict(model, guide, X, num_samples=5, batch_size=5, seed=0),
    ):
        torch.testing.assert_close(answer.log_prob(y), log_prob)
    outputs = bbb.predict(model, guide, X, num_samples=5, estimator="local_reparam")
    for answer in (outputs, bbb.predict_mean(model, guide, X)):
        assert answer.log_prob(y).isfinite().all()
    evaluation = bbb.evaluate(model, guide, (X, y), num_samples=5, seed=0, ood=3 * X)
    scores = evaluation.scores["test"]
    assert scores["nll"] == pytest.approx(-log_prob.mean().item(), rel=1e-4)
    assert "NLL" in str(evaluation)
    assert ("coverage_90" in scores) == (name not in WITHOUT_CDF | CLASSES)
    ensemble = bbb.to_ensemble(model, guide, num_samples=5, seed=0)
    predict = functools.partial(bbb.predict, model, guide, num_samples=5, seed=0)
    if name in CLASSES:
        torch.testing.assert_close(ensemble(X)["probs"], prediction.probs)
        assert bbb.conformal(predict, (X, y), 0.5).label_set(X).shape == (N, 4)
    elif name != "censored":
        for moment in ("mean", "std", "aleatoric_std", "epistemic_std"):
            torch.testing.assert_close(ensemble(X)[moment], getattr(prediction, moment))
        assert bbb.conformal(predict, (X, y), 0.5).interval(X)[0].shape == prediction.mean.shape
    chains = bbb.run_sgmcmc(
        model, (X, y), lr=1e-3, num_samples=2, warmup_steps=2, thin=1, progress=False, seed=0
    )
    assert bbb.predict(model, chains, X).log_prob(y).isfinite().all()


@pytest.mark.parametrize("name", OWN)
def test_particles_at_once_are_particles_one_by_one(name):
    model, guide, y = posterior(name)
    plate = pyro.plate("particles", 3, dim=-2)
    drawn = poutine.trace(plate(guide)).get_trace(X, y)
    trace = poutine.trace(poutine.replay(plate(model), drawn)).get_trace(X, y)
    draws = {site: drawn.nodes[site]["value"].squeeze(1).detach() for site in guide.site_names}
    actual = trace.nodes["obs"]["fn"].log_prob(trace.nodes["obs"]["value"])
    expected = torch.stack([fn.log_prob(y) for fn in by_the_model(model, draws, y)])
    assert actual.shape == (3, N)
    torch.testing.assert_close(actual, expected)


def test_an_overridden_density_is_the_one_of_scipy():
    model, guide, y = posterior("overridden")
    draws = guide.sample_posterior(1)
    prediction = bbb.predict(model, draws, X)
    loc = prediction.mean.numpy()
    expected = stats.laplace.logpdf(y.numpy(), loc, 0.3)[:, 0]
    np.testing.assert_allclose(prediction.log_prob(y), expected, rtol=1e-5)
    low, high = prediction.interval(0.8)
    np.testing.assert_allclose(low, stats.laplace.ppf(0.1, loc, 0.3), rtol=1e-5)
    np.testing.assert_allclose(high, stats.laplace.ppf(0.9, loc, 0.3), rtol=1e-5)


def test_what_a_distribution_lacks_is_named():
    model, guide, y = posterior("censored")
    prediction = bbb.predict(model, guide, X, num_samples=3)
    for operation in (lambda: prediction.mean, lambda: prediction.interval(0.9)):
        with pytest.raises(NotImplementedError, match="Survival has no mean, .* log_prob and comp"):
            operation()
    model, guide, _ = posterior("torch")
    prediction = bbb.predict(model, guide, X, num_samples=3)
    with pytest.raises(NotImplementedError, match="distribution Beta has no cdf, which this needs"):
        prediction.quantile(0.5)
    with pytest.raises(TypeError, match="only Normals and Student's t can be rescaled, got Beta"):
        prediction.rescaled(0.0, 1.0)
    with pytest.raises(ValueError, match="quantiles must be left out for the likelihood OfTorch"):
        bbb.to_ensemble(model, guide, quantiles=[0.5])


class NoEvent(Likelihood):
    """Independent numbers that are no event."""

    def forward(self, outputs):
        return dist.Normal(outputs, 1.0)


@pytest.mark.parametrize(
    ("likelihood", "y", "message"),
    [
        (NoEvent(), torch.zeros(N, 2), r"NoEvent must give .* shape \[2\], got \[2, 2\]: make an"),
        (Likelihood(), torch.zeros(N, 2), "Likelihood must define arguments or forward"),
        (Gamma(), -torch.ones(N, 1), "y must hold values in the support .* of Gamma, got -1"),
        (OfTorch(), 1 + POSITIVE, "y must hold values in the support .* of Beta, got 1.0"),
        (Ordinal(), LABELS + 1, "y must hold values in the support .* of OrderedLogistic, got 4"),
        (Correlated(), LABELS.float(), r"expected y of shape \[n, 2\], got \[12\]"),
    ],
)
def test_what_cannot_work_is_refused_before_training(likelihood, y, message):
    model = bbb.BayesianModel(bbb.BayesianMLP([3, 2]), likelihood, num_data=N)
    guide = bbb.AutoSoftplusNormal(model)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        bbb.fit(model, guide, (X, y), epochs=1, progress=False)


class Doubled(Poisson):
    """Outputs that are not the family's argument."""

    def arguments(self, outputs):
        return {"log_rate": 2 * outputs}


class Truncated(dist.Normal):
    """A Normal with another density."""

    def log_prob(self, value):
        return super().log_prob(value) - dist.Normal(self.loc, self.scale).cdf(0 * value).log()


class OwnNormal(Gaussian):
    """A family derived from the Normal."""

    family = Truncated


@pytest.mark.parametrize("likelihood", [Doubled(), OwnNormal(0.5)])
def test_no_closed_form_stands_for_another_density(likelihood):
    network = bbb.bayesianize(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), where=["2"]
    )
    model = bbb.BayesianModel(network, likelihood, num_data=N)
    guide, y = bbb.guides.make("vbll", model), LABELS.float()[:, None]
    name = type(likelihood).__name__
    with pytest.raises(ValueError, match=f"vbll needs a likelihood of .*, got {name}; or fit"):
        bbb.fit(model, guide, (X, y), epochs=1, progress=False)
    bbb.fit(model, guide, (X, y), epochs=1, loss="trace", progress=False)
    prediction = bbb.predict(model, guide, X, num_samples=4, seed=0)
    assert type(prediction) is bbb.RegressionPrediction
    assert prediction.log_prob(y).isfinite().all()


def test_estimators_scale_targets_only_where_predictions_can_be_scaled_back():
    rows, targets = X.numpy(), 100 + 10 * X.sum(1).numpy()
    for noise, scaled in ((OneScale(0.3), True), (Overridden(0.3), False)):
        model = BayesianRegressor((4,), noise=noise, epochs=1, random_state=0)
        assert (model.fit(rows, targets).y_scaling_.mean != 0).all() == scaled
        assert np.isfinite(model.predict(rows)).all()
