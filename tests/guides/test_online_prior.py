# SPDX-License-Identifier: Apache-2.0
"""Priors that Laplace's marginal likelihood chooses during training."""

from functools import partial

import pyro.distributions as dist
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import BayesianRidge
from torch import nn

import pyro_bbb as bbb

pytestmark = pytest.mark.filterwarnings("ignore::pyro_bbb.guides.LinearizationWarning")
Online = partial(bbb.guides.Laplace, optimize_prior="online")
momentum = partial(torch.optim.SGD, momentum=0.8)


def classifier(prior=None):
    x, prior = torch.randn(60, 4), prior or dist.Normal(0.3, 0.5)
    network = bbb.BayesianMLP([4, 6, 3], activation=nn.Tanh, prior=prior)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=60)
    return model, (x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def fit(model, guide, data, **options):
    options = {"epochs": 20, "lr": 0.02, "progress": False, "seed": 0} | options
    return bbb.fit(model, guide, data, **options)


def log_evidence(x, y, prior, noise):
    """Exact, of weights N(0, prior²)."""
    covariance = noise**2 * torch.eye(len(x)) + prior**2 * x @ x.T
    return dist.MultivariateNormal(torch.zeros(len(x)), covariance).log_prob(y).item()


@pytest.mark.parametrize("declared", [0.05, 1.0, 10.0])
def test_linear_regression_ends_at_the_fixed_point_of_mackay(double, declared):
    """Of known noise, that which scikit-learn has at its own fixed point."""
    x = torch.randn(40, 5)
    y = x @ torch.randn(5) * 0.5 + 0.8 * torch.randn(40)
    flat = dict.fromkeys(["alpha_1", "alpha_2", "lambda_1", "lambda_2"], 0.0)
    ridge = BayesianRidge(fit_intercept=False, max_iter=10_000, tol=1e-12, **flat).fit(x, y)
    network = bbb.BayesianLinear(5, 1, bias=False, prior=dist.Normal(0.0, declared))
    noise = float(ridge.alpha_) ** -0.5
    likelihood = bbb.likelihoods.Gaussian(noise)
    model = bbb.BayesianModel(nn.Sequential(network), likelihood, num_data=40)
    evidence = {}
    for optimize in (True, "online"):
        guide = bbb.guides.Laplace(model, optimize_prior=optimize)
        options = {"lr": 0.002, "optimizer": momentum, "lr_schedule": "constant"}
        fit(model, guide, (x, y), epochs=150, batch_size=40, **options)
        prior = declared * guide.prior_scale.item()
        evidence[optimize] = log_evidence(x, y, prior, noise)
    assert prior**-2 == pytest.approx(ridge.lambda_, rel=1e-3)
    mean, root = guide.median()["network.0.weight"][0], guide.covariance[0].scale_tril
    torch.testing.assert_close(mean, torch.as_tensor(ridge.coef_), rtol=0, atol=1e-4)
    torch.testing.assert_close(root @ root.T, torch.as_tensor(ridge.sigma_), rtol=2e-3, atol=0)
    best = max(log_evidence(x, y, prior * factor, noise) for factor in (0.98, 1.0, 1.02))
    assert evidence["online"] == best >= evidence[True]


def test_the_point_feels_the_prior_that_the_scale_tells(double):
    """The gradient is that of a model which declares the prior in force; 0 precision at first."""
    model, data = classifier()
    scales, gradients, expected = [], [], []

    def compare(end):
        scales.append(end.guide.prior_scale.clone())
        loss = bbb.negative_elbo(model, end.guide)(*data)
        gradients.append(torch.autograd.grad(loss, end.guide.loc)[0])
        declared = {
            f"fc{i}.*": dist.Normal(0.3, 0.5 * min(float(scale), 1e9))
            for i, scale in enumerate(scales[-1], start=1)
        }
        other, _ = classifier(declared)
        delta = bbb.guides.Laplace(other, init_loc=end.guide.median())
        loss = bbb.negative_elbo(other, delta)(*data)
        expected.append(torch.autograd.grad(loss, delta.loc)[0])

    guide = Online(model, structure="kron")
    history = fit(model, guide, data, batch_size=30, callbacks=[compare])
    assert history.baseline_per_example is None  # a point has no ELBO to warn of
    assert (scales[0] == torch.inf).all() and all(x.isfinite().all() for x in scales[2:])
    assert len({tuple(x.tolist()) for x in scales}) == 10  # one for each tenth
    torch.testing.assert_close(gradients, expected)
    site = model.latent_sites()["network.fc1.weight"]["fn"]
    assert (site.base_dist.scale == 0.5).all()  # as declared


def test_the_result_does_not_depend_on_the_scale_that_is_declared(double):
    """With N(0, .02²) and no choice the weights vanish; digits, a validation part."""
    x, y = map(torch.as_tensor, load_digits(return_X_y=True))
    train, validation = (x[:400] / 16, y[:400]), (x[1000:] / 16, y[1000:])
    found, accuracy = {}, {}
    for scale, optimize in [(0.02, "layer"), (0.02, "online"), (10.0, "online")]:
        torch.manual_seed(0)
        network = bbb.BayesianMLP([64, 20, 10], prior=dist.Normal(0.0, scale))
        model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=400)
        guide = bbb.guides.Laplace(model, structure="kron", optimize_prior=optimize)
        fit(model, guide, train, epochs=30)
        found[scale, optimize] = scale * guide.prior_scale
        prediction = bbb.predict(model, guide, validation[0], linearized="probit")
        accuracy[scale, optimize] = bbb.metrics.accuracy(prediction.probs, validation[1])
    torch.testing.assert_close(found[0.02, "online"], found[10.0, "online"], rtol=1e-3, atol=0)
    assert accuracy[0.02, "layer"] < 0.2 and accuracy[0.02, "online"] > 0.85


@pytest.mark.parametrize("structure", ["kron", "last_layer"])
def test_recorded_steps_read_the_prior_again(double, structure):
    model, data = classifier()
    trained = []
    for engine in ("eager", "compiled"):
        torch.manual_seed(1)
        guide = Online(model, structure=structure)
        fit(model, guide, data, batch_size=30, engine=engine)
        trained.append((guide.loc.detach(), guide.prior_scale))
    torch.testing.assert_close(*trained, rtol=1e-8, atol=1e-10)


def test_a_killed_training_resumes_to_the_bit_and_is_saved(tmp_path):
    model, data = classifier()
    torch.manual_seed(2)
    start = Online(model, structure="kron").median()
    guides = [Online(model, structure="kron", init_loc=start) for _ in range(3)]

    def kill(end):
        if end.epoch == 12:
            raise InterruptedError

    options = {"batch_size": 25, "checkpoint_every": 2}
    fit(model, guides[0], data, batch_size=25, checkpoint=tmp_path / "a", checkpoint_every=2)
    with pytest.raises(InterruptedError):
        fit(model, guides[1], data, checkpoint=tmp_path / "b", callbacks=[kill], **options)
    fit(model, guides[2], data, checkpoint=tmp_path / "b", **options)
    expected, resumed = (guide.state_dict() for guide in (guides[0], guides[2]))
    assert expected.keys() == resumed.keys() and "online_prior.loc" not in expected
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    bbb.save(tmp_path / "model", model, guides[2])
    loaded = bbb.load(tmp_path / "model").guide
    assert torch.equal(loaded.prior_scale, guides[0].prior_scale)
    assert loaded.options["optimize_prior"] == "online"


def test_members_of_an_ensemble_choose_their_priors():
    model, data = classifier()
    guide = bbb.guides.ensemble(model, 2, "laplace", structure="kron", optimize_prior="online")
    fit(model, guide, data)
    a, b = (member.prior_scale for member in guide.members)
    assert a.shape == (2,) and not torch.equal(a, b) and (torch.stack([a, b]) != 1).all()


def test_what_online_cannot_serve_is_refused():
    model, data = classifier()
    with pytest.raises(ValueError, match=r"needs epochs of at least 2, got 1"):
        fit(model, Online(model), data, epochs=1)
    for prior in (bbb.ScaleMixtureNormal(0.5, 1.0, 0.1), "learned_normal"):
        other, _ = classifier(prior)
        with pytest.raises(ValueError, match=r"fixed Normal prior, network.fc1.weight has anoth"):
            Online(other)
    with pytest.raises(ValueError, match=r"optimize_prior must be one of .*'layer', 'online'"):
        bbb.guides.Laplace(model, optimize_prior="onlin")
