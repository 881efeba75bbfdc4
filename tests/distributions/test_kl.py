# SPDX-License-Identifier: Apache-2.0
"""Closed-form divergences of the guides' Normals, against numerical integration.

`test_numerics` has them against 50 digits, for scales and priors of every size.
"""

import math

import mpmath
import numpy as np
import pyro.distributions as dist
import pytest
import scipy.stats
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from scipy.integrate import quad
from torch.autograd import grad, gradcheck, gradgradcheck
from torch.distributions import kl_divergence

import pyro_bbb as bbb
from pyro_bbb.distributions import PrunedNormal, SoftplusNormal, SummedNormal, softplus

EPS32, EPS64 = np.finfo(np.float32).eps, np.finfo(np.float64).eps
PRIORS = {"normal": dist.Normal, "laplace": dist.Laplace}
every_prior = pytest.mark.parametrize("kind", sorted(PRIORS))


@every_prior
@pytest.mark.parametrize(("loc", "rho"), [(0.0, 0.5), (0.7, -1.0), (-1.5, -3.0)])
def test_the_divergence_is_the_integral(kind, loc, rho):
    scale, reference = math.log1p(math.exp(rho)), {"normal": "norm", "laplace": "laplace"}[kind]
    q, p = scipy.stats.norm(loc, scale), getattr(scipy.stats, reference)(0.2, 0.8)

    def integrand(w):
        return q.pdf(w) * (q.logpdf(w) - p.logpdf(w))

    ends = loc - 12 * scale, loc + 12 * scale
    expected, _ = quad(integrand, *ends, points=[0.2, loc], epsabs=1e-12)
    q = SoftplusNormal(*torch.tensor([loc, rho], dtype=torch.float64))
    prior = PRIORS[kind](*torch.tensor([0.2, 0.8], dtype=torch.float64))
    assert kl_divergence(q, prior).item() == pytest.approx(expected, abs=1e-10)


def test_the_divergence_of_equal_distributions_is_exactly_0():
    rho, loc = torch.linspace(-60, 60, 481), torch.linspace(-3, 3, 481)
    divergence = kl_divergence(SoftplusNormal(loc, rho), dist.Normal(loc, softplus(rho)))
    assert (divergence == 0).all()


@pytest.mark.parametrize("rho", [-6.0, 0.0, 5.0])
def test_near_0_the_error_vanishes_with_the_divergence(rho):
    """It is about (t - 1)^2 at a ratio t of scales, and is off by what rounds t - 1 at most."""
    for step in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5):
        q = SoftplusNormal(torch.tensor(0.0), torch.tensor(rho + step))
        p = dist.Normal(torch.tensor(0.0), softplus(torch.tensor(rho)))
        with mpmath.workdps(40):
            t = mpmath.mpf(q.scale.item()) / mpmath.mpf(p.scale.item())
            expected = float((t**2 - 1) / 2 - mpmath.log(t))
        allowed = 2 * EPS32 * abs(q.scale.item() / p.scale.item() - 1)
        assert abs(kl_divergence(q, p).item() - expected) <= allowed


@every_prior
def test_derivatives_are_those_of_finite_differences(kind):
    torch.manual_seed(0)
    loc, rho, m, raw = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(4))

    def divergence(loc, rho, m, raw):
        return kl_divergence(SoftplusNormal(loc, rho), PRIORS[kind](m, raw.exp()))

    assert gradcheck(divergence, (loc, rho, m, raw), check_batched_grad=True)
    assert gradgradcheck(divergence, (loc, rho, m, raw))
    # a prior whose one scale serves all weights
    assert gradcheck(lambda *x: divergence(*x[:3], x[3][:1].expand(4)), (loc, rho, m, raw))


def test_far_from_the_prior_the_laplace_slope_is_finite_and_right():
    """There d / scale^2 overflows, which the derivatives of single terms multiply by 0."""
    loc = torch.tensor([1.0, -3.0, 0.0], requires_grad=True)
    rho = torch.tensor([-60.0, -80.0, -60.0], requires_grad=True)
    q = SoftplusNormal(loc, rho)
    in_loc, in_rho = grad(kl_divergence(q, dist.Laplace(0.0, 0.5)).sum(), (loc, rho))
    torch.testing.assert_close(in_loc, torch.tensor([2.0, -2.0, 0.0]))
    torch.testing.assert_close(in_rho, torch.full((3,), -1.0))  # of -ln scale, as scale = e^rho


@every_prior
def test_vmap_over_posteriors_is_a_loop(kind):
    loc, rho = torch.randn(6, 3), torch.randn(6, 3)

    def divergence(loc, rho):
        p = PRIORS[kind](torch.tensor(0.0), 1.0, validate_args=False).expand([3])
        return kl_divergence(SoftplusNormal(loc, rho), p)

    loop = torch.stack([divergence(*row) for row in zip(loc, rho, strict=True)])
    torch.testing.assert_close(torch.vmap(divergence)(loc, rho), loop)


@every_prior
@pytest.mark.parametrize("library", [dist, torch.distributions])
def test_the_divergence_of_a_pruned_normal_leaves_removed_entries_out(kind, library):
    loc = torch.tensor([[0.5, -1.0], [2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    rho = torch.tensor([[-3.0, -math.inf], [-math.inf, 1.0]], dtype=torch.float64)
    unpruned = rho.isfinite()
    p = getattr(library, PRIORS[kind].__name__)(0.1, 0.7).expand([2, 2])
    divergence = kl_divergence(PrunedNormal(loc, rho.requires_grad_()), p)
    plain = kl_divergence(SoftplusNormal(loc, rho.detach().where(unpruned, 0.0)), p)
    assert torch.equal(divergence, plain.where(unpruned, 0.0)) and (divergence[unpruned] > 0).all()
    for gradient in grad(divergence.sum(), (loc, rho)):
        assert gradient.isfinite().all() and torch.equal(gradient != 0, unpruned)
    event = torch.distributions.Independent(p, 2)
    in_plate = kl_divergence(PrunedNormal(loc, rho).expand([3, 2, 2]).to_event(2), event)
    torch.testing.assert_close(in_plate, divergence.sum().expand(3))


@pytest.mark.parametrize("prior", ["normal", "laplace", "fan_in_normal", "learned_normal"])
def test_mean_field_objectives_use_it(prior):
    """Two losses are equal if the KL has no noise and there are no data."""
    network = bbb.BayesianMLP([3, 4, 1], prior=prior)
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(1.0), num_data=5)
    guide = bbb.AutoSoftplusNormal(model)
    blind = poutine.block(model, hide=["obs"])
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    losses = {TraceMeanField_ELBO().loss(blind, guide, x, y) for _ in range(3)}
    assert len(losses) == 1
    sampled = {Trace_ELBO().loss(blind, guide, x, y) for _ in range(3)}
    assert len(sampled) == 3
    sites = dict(network.named_modules())
    expected = 0.0
    for name in guide.site_names:
        _, layer, weight = name.split(".")
        fn = sites[layer].prior(sites[layer], weight, guide.loc(name).shape)
        plain = torch.distributions.Normal(guide.loc(name), guide.scale(name))
        base = fn.base_dist
        expected += torch.distributions.kl_divergence(plain, base).sum().item()
    assert losses.pop() == pytest.approx(expected, rel=1e-5)


# --- summed over many weights ---


def in_terms(kind):
    """Inputs that need gradients: mean, rho, and the prior's mean and scale."""
    torch.manual_seed(0)
    shapes = {"one prior": (), "a prior each": (4, 3)}[kind]
    loc, rho = torch.randn(4, 3), torch.randn(4, 3)
    inputs = loc, rho, torch.randn(shapes), torch.rand(shapes) + 0.5
    return [x.double().requires_grad_() for x in inputs]


def events(loc, rho, m, b):
    p = SummedNormal(m, b, validate_args=False).expand(loc.shape)
    return SoftplusNormal(loc, rho).to_event(2), p.to_event(2)


@pytest.mark.parametrize("shape", ["one prior", "a prior each"])
def test_the_summed_divergence_is_the_sum(shape):
    inputs = in_terms(shape)
    q, p = events(*inputs)
    actual = kl_divergence(q, p)
    expected = kl_divergence(dist.Normal(q.base_dist.loc, q.base_dist.scale), p.base_dist).sum()
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=0)
    theirs = grad(expected, inputs, retain_graph=True)
    for a, b in zip(grad(actual, inputs), theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", ["one prior", "a prior each"])
def test_derivatives_of_sums_of_both_orders(shape):
    def divergence(*inputs):
        return kl_divergence(*events(*inputs))

    def log_prob(value, rho, m, b):
        return events(value, rho, m, b)[1].log_prob(value)

    for function in (divergence, log_prob):
        assert gradcheck(function, in_terms(shape)) and gradgradcheck(function, in_terms(shape))


def test_events_of_different_dimensions_have_no_divergence():
    q, _ = events(*in_terms("one prior"))
    with pytest.raises(NotImplementedError):
        kl_divergence(q, dist.Normal(torch.zeros(4, 3), 1.0).to_event(1))
