# SPDX-License-Identifier: Apache-2.0
"""Predictions by the network's tangent: exact where it can be, and as by its definition else."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import pyro_bbb as bbb
from pyro_bbb.guides.linearization import OutputMoments, output_moments

NORMALS = ["softplus_normal", "normal", "low_rank", "full_rank", "laplace"]


@pytest.fixture
def x():
    return torch.linspace(-2, 2, 12).reshape(4, 3)


def make(name, outputs=2, likelihood=None):
    """A guide with random moments for a 3-4-2 network, and the network in plain torch."""
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))
    network = bbb.bayesianize(plain, prior=dist.Normal(0.0, 1.0))
    likelihood = likelihood or bbb.likelihoods.Gaussian(0.3)
    model = bbb.BayesianModel(network, likelihood, num_data=20)
    guide = bbb.guides.make(name, model)
    if name == "laplace":
        x = torch.randn(20, 3)
        classes = isinstance(likelihood, bbb.likelihoods.Categorical)
        guide.approximate((x, torch.arange(20) % outputs if classes else x[:, :outputs]))
    else:
        with torch.no_grad():
            for parameter in guide.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model, guide, plain


def by_definition(guide, plain, x):
    """Mean and covariance of the outputs, from torch's derivatives and many draws' covariance."""
    centre = {name.removeprefix("network."): value for name, value in guide.median().items()}
    jacobians = jacrev(lambda weights: functional_call(plain, weights, (x,)))(centre)
    jacobian = torch.cat([jacobians[name].flatten(2) for name in centre], dim=2)
    draws = guide.sample_posterior(100_000)
    joined = torch.cat([value.flatten(1) for value in draws.values()], dim=1)
    covariance = torch.cov(joined.T)
    return functional_call(plain, centre, (x,)), jacobian @ covariance @ jacobian.mT


def test_draws_of_outputs_hardly_change_with_their_covariance():
    """Equal variances leave the eigenvectors to rounding, which differs between machines."""
    mean, equal = torch.zeros(2, 3), torch.eye(3).expand(2, 3, 3)
    changed = equal + 1e-5 * torch.tensor([[0.0, 1.0, -1.0], [1.0, 0.0, 2.0], [-1.0, 2.0, 0.0]])
    draws = []
    for covariance in (equal, changed):
        torch.manual_seed(0)
        moments = OutputMoments(mean, covariance.diagonal(dim1=1, dim2=2), covariance)
        draws.append(moments.draw(100))
    torch.testing.assert_close(draws[0], draws[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", NORMALS)
def test_outputs_of_every_normal_guide_have_the_moments_of_the_tangent(double, x, name):
    """Covariances of 100,000 draws have standard errors of at most .0045 of the variances."""
    model, guide, plain = make(name)
    mean, covariance = by_definition(guide, plain, x)
    moments = output_moments(model, guide, x)
    torch.testing.assert_close(moments.mean, mean)
    scale = covariance.diagonal(dim1=1, dim2=2).amax()
    assert (moments.covariance - covariance).abs().max() < 6 * 0.0045 * scale


def test_a_regression_is_normal_without_draws(double, x):
    model, guide, _ = make("softplus_normal")
    moments = output_moments(model, guide, x)
    mean, covariance = moments.mean, moments.covariance
    linear = bbb.predict(model, guide, x, linearized=True)
    variance = covariance.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(linear.mean, mean)
    torch.testing.assert_close(linear.epistemic_std, variance.sqrt())
    assert (linear.aleatoric_std == 0.3).all() and linear.sampler == "linearized"
    total = dist.Normal(mean, (variance + 0.09).sqrt())
    y = mean + 0.2
    torch.testing.assert_close(linear.log_prob(y), total.log_prob(y).sum(1))
    torch.testing.assert_close(linear.interval(0.9)[1], total.icdf(torch.tensor(0.95)))
    moved = linear.rescaled(5.0, torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(moved.mean, 5 + linear.mean * torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(moved.epistemic_std, linear.epistemic_std * torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(moved.std, torch.hypot(moved.aleatoric_std, moved.epistemic_std))


def test_draws_for_classes_have_the_moments_and_probit_is_near(double, x):
    model, guide, _ = make("laplace", outputs=3, likelihood=bbb.likelihoods.Categorical())
    moments = output_moments(model, guide, x)
    mean, covariance = moments.mean, moments.covariance
    prediction = bbb.predict(model, guide, x, linearized=True, num_samples=40_000, seed=0)
    logits = mean + torch.distributions.MultivariateNormal(
        torch.zeros(3), covariance + 1e-12 * torch.eye(3)
    ).sample((40_000,))
    # two means of 40,000 probabilities, at most .5 apart from their mean: 5 standard errors
    limit = 5 * 0.5 * math.sqrt(2 / 40_000)
    assert (prediction.probs - logits.softmax(-1).mean(0)).abs().max() < limit
    probit = bbb.predict(model, guide, x, linearized="probit")
    variance = covariance.diagonal(dim1=1, dim2=2)
    expected = (mean / (1 + math.pi / 8 * variance).sqrt()).softmax(-1)
    torch.testing.assert_close(probit.probs, expected)
    assert probit.sample_probs.shape == (1, 4, 3)


@pytest.mark.parametrize("scale", [dist.LogNormal(-1.0, 0.1), None])
def test_other_likelihoods_are_by_draws_of_the_outputs(x, scale):
    noise = bbb.likelihoods.Gaussian(scale) if scale else bbb.likelihoods.StudentT(5.0, 0.3)
    model, guide, _ = make("softplus_normal", likelihood=noise)
    prediction = bbb.predict(model, guide, x, linearized=True, num_samples=30, seed=0)
    assert type(prediction) is bbb.RegressionPrediction and len(prediction.sample_means) == 30


def test_batches_and_loaders_change_nothing_where_there_are_no_draws(double, x):
    model, guide, _ = make("low_rank")
    at_once = bbb.predict(model, guide, x, linearized=True)
    batched = bbb.predict(model, guide, x, linearized=True, batch_size=3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x), batch_size=3)
    loaded = bbb.predict(model, guide, loader, linearized=True)
    for prediction in (batched, loaded):
        torch.testing.assert_close(prediction.mean, at_once.mean)
        torch.testing.assert_close(prediction.std, at_once.std)
