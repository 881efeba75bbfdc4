# SPDX-License-Identifier: Apache-2.0
"""Gradients of quantiles and intervals, against finite differences and closed forms."""

import pyro.distributions as dist
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pyro_bbb as bbb
from pyro_bbb.distributions import observation

LOC = torch.tensor([4.0, -2.0, 0.5], dtype=torch.double)[:, None, None]  # of three draws
SCALE = torch.tensor([2.0, 0.3, 1.0], dtype=torch.double)[:, None, None]
FAMILIES = {
    "Normal": observation.Normal,
    "StudentT": lambda loc, scale: observation.StudentT(torch.tensor(3.0).to(loc), loc, scale),
    "Laplace": dist.Laplace,
}
X = torch.linspace(-1, 1, 6, dtype=torch.double).reshape(3, 2)


def leaves():
    return LOC.clone().requires_grad_(), SCALE.clone().requires_grad_()


@pytest.mark.parametrize("family", FAMILIES)
def test_quantiles_have_the_derivatives_of_finite_differences(family):
    def quantile(loc, scale):
        return bbb.RegressionPrediction(FAMILIES[family](loc, scale)).quantile(0.37)

    assert gradcheck(quantile, leaves(), eps=1e-5)
    assert gradgradcheck(quantile, leaves(), eps=1e-5, atol=1e-4)


def test_values_do_not_depend_on_gradients_and_counts_are_constant():
    known = bbb.RegressionPrediction(dist.Normal(LOC, SCALE)).interval(0.9)
    learned = bbb.RegressionPrediction(dist.Normal(*leaves())).interval(0.9)
    assert all(torch.equal(a, b) for a, b in zip(known, learned, strict=True))
    rates = LOC.clone().requires_grad_()
    counts = bbb.RegressionPrediction(observation.LogRatePoisson(rates)).interval(0.9)
    assert not any(end.requires_grad for end in counts)


def test_a_density_that_underflows_between_two_modes_gives_numbers():
    loc = torch.tensor([-1e3, 1e3], dtype=torch.double)[:, None, None].requires_grad_()
    median = bbb.RegressionPrediction(dist.Normal(loc, torch.ones_like(loc))).quantile(0.5)
    (slope,) = torch.autograd.grad(median.sum(), loc)
    assert median.isfinite().all() and slope.isfinite().all()


def make_ensemble(likelihood, outputs):
    torch.manual_seed(0)
    network = bbb.BayesianMLP([2, 8, outputs], activation=torch.nn.Tanh)
    model = bbb.BayesianModel(network, likelihood, 10).double()
    guide = bbb.AutoSoftplusNormal(model, init_loc="he", init_rho=-1.0)
    return bbb.to_ensemble(model, guide, num_samples=7, seed=0, quantiles=[0.05, 0.5, 0.9])


@pytest.mark.parametrize("likelihood", ["Gaussian", "HeteroscedasticGaussian"])
def test_an_ensembles_quantiles_have_the_derivatives_of_finite_differences(likelihood):
    outputs = 1 if likelihood == "Gaussian" else 2
    ensemble = make_ensemble(getattr(bbb.likelihoods, likelihood)(), outputs)

    def quantiles(x):
        return ensemble(x)["quantiles"]

    x = X.clone().requires_grad_()
    assert gradcheck(quantiles, x, eps=1e-5)
    assert gradgradcheck(quantiles, x, eps=1e-5, atol=1e-4)
    of_x = torch.autograd.grad(quantiles(x).sum(), x)[0]
    assert torch.allclose(torch.func.grad(lambda x: quantiles(x).sum())(X), of_x)
