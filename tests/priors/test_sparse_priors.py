# SPDX-License-Identifier: Apache-2.0
"""Scale-free priors: their KLs against integrals, training with them, and what they refuse."""

import math

import numpy as np
import pyro.distributions as dist
import pytest
import scipy.stats
import torch
from pyro.infer import Predictive, TraceMeanField_ELBO
from scipy.integrate import quad
from sklearn.datasets import load_digits
from torch import nn
from torch.distributions import kl_divergence

import pyro_bbb as bbb
from pyro_bbb.distributions import LogUniform, PrunedNormal, SoftplusNormal, SummedNormal

PRUNED = math.exp(-1.5)  # ratio below which log alpha > 3, of Molchanov et al.


def small_model(prior="log_uniform", network=None, n=40):
    network = network or bbb.BayesianMLP([3, 8, 2], prior=prior)
    return bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=n)


def small_data(n=40):
    torch.manual_seed(0)
    x = torch.randn(n, 3)
    return x, (x[:, 0] > 0).long()


# --- the KL of the log-uniform prior ---


@pytest.mark.parametrize("loc", [0.0, 1e-3, 0.1, 0.3, 1.0, 2.0, 5.6, 30.0, -0.3, -2.0])
def test_the_divergence_from_log_uniform_is_the_integral_to_a_hundredth_nat(loc):
    scale, p = 0.5, LogUniform()
    q = scipy.stats.norm(loc, scale)

    def integrand(w):
        return q.pdf(w) * (q.logpdf(w) - p.log_prob(torch.tensor(w, dtype=torch.float64)).item())

    pieces = [(min(0.0, loc) - 10, 0.0), (0.0, max(0.0, loc) + 10)]  # ln|w| has its pole at an end
    inner = {"points": [loc], "limit": 400, "epsabs": 1e-10}
    expected = sum(
        quad(integrand, a, b, **(inner if a < loc < b else {"limit": 400}))[0] for a, b in pieces
    )
    normal = SummedNormal(*torch.tensor([loc, scale], dtype=torch.float64))
    assert kl_divergence(normal, p).item() == pytest.approx(expected, abs=0.01, rel=0.04)
    assert loc or kl_divergence(normal, p).item() == 0.0 == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_and_its_slopes_are_finite_and_grow_with_the_ratio(dtype):
    """From alpha = sigma^2 / mu^2 of 1e8 to 1e-8, and at mean 0 and of tiny scales."""
    ratio = torch.logspace(-4, 4, 801, dtype=dtype)
    for scale in (1e-6, 1.0, 1e3):
        loc = (ratio * scale).requires_grad_()
        sigma = torch.full_like(ratio, scale).requires_grad_()
        kl = kl_divergence(SummedNormal(loc, sigma), LogUniform())
        exact = kl_divergence(SummedNormal(ratio.double(), 1.0), LogUniform())
        torch.testing.assert_close(kl.double(), exact, rtol=1e-4, atol=0)
        in_loc, in_scale = torch.autograd.grad(kl.sum(), (loc, sigma))
        assert (kl.diff() > 0).all() and (in_loc > 0).all() and (in_scale < 0).all()
        torch.testing.assert_close(in_loc * ratio, -in_scale)  # it is a function of the ratio
    loc = torch.zeros(3, dtype=dtype, requires_grad=True)
    kl = kl_divergence(
        SoftplusNormal(loc, torch.tensor([-60.0, 0.0, 60.0], dtype=dtype)), LogUniform()
    )
    assert torch.equal(kl, torch.zeros_like(kl))
    assert torch.equal(torch.autograd.grad(kl.sum(), loc)[0], kl)


def test_it_is_the_same_in_other_units_and_around_another_centre():
    torch.manual_seed(0)
    loc, scale = torch.randn(2, 50, dtype=torch.float64)
    kl = kl_divergence(SummedNormal(loc, scale.exp()), LogUniform())
    moved = SummedNormal(7 * loc + 3, 7 * scale.exp())
    torch.testing.assert_close(kl_divergence(moved, LogUniform(torch.tensor(3.0).double())), kl)


def test_removed_weights_contribute_nothing():
    loc = torch.tensor([0.5, 0.3], requires_grad=True)
    rho = torch.tensor([-3.0, -math.inf], requires_grad=True)
    for prior in (LogUniform(), LogUniform().expand([2]).mask(torch.tensor([True, False]))):
        kl = kl_divergence(PrunedNormal(loc, rho), prior)
        plain = kl_divergence(SoftplusNormal(loc[:1], rho[:1]), LogUniform())
        assert torch.equal(kl, torch.cat([plain, torch.zeros(1)]))
        for slope in torch.autograd.grad(kl.sum(), (loc, rho)):
            assert slope[0] != 0 and slope[1] == 0


# --- the density and the KL of normal-Jeffreys groups ---

PER = {"unit": 0, "input": 1, "layer": None}  # to the dimension that indexes the groups
every_grouping = pytest.mark.parametrize("per", PER)


def groups_of(tensor, per):
    """Return the groups of a kernel as vectors."""
    if PER[per] is None:
        return [tensor.flatten()]
    return [group.flatten() for group in tensor.unbind(PER[per])]


def groups_prior(per, shape):
    prior = bbb.priors.make("normal_jeffreys", per=per).double()
    return prior(None, "weight", torch.Size(shape))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_normal_jeffreys_is_a_normal_of_any_scale(n):
    """Densities are those of N(0, tau^2) with 1 / tau integrated out, up to one factor."""
    torch.manual_seed(0)
    prior, draws = groups_prior("layer", (n,)), 3 * torch.randn(2, n, dtype=torch.float64)

    def marginal(w):
        density = scipy.stats.norm(0, 1)
        return quad(lambda u: np.prod(density.pdf(w / np.exp(u)) / np.exp(u)), -30, 30)[0]

    ratio = (prior.log_prob(draws[0]) - prior.log_prob(draws[1])).item()
    assert ratio == pytest.approx(math.log(marginal(draws[0].numpy()) / marginal(draws[1].numpy())))


@every_grouping
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 2, 2), (5,)])
def test_its_density_and_divergence_are_those_of_the_best_normal_of_each_group(per, shape):
    torch.manual_seed(0)
    prior = groups_prior(per, shape)
    groups_along = "layer" if len(shape) == 1 else per
    w, loc, rho = torch.randn(3, *shape, dtype=torch.float64)
    q = SoftplusNormal(loc, rho).to_event(len(shape))
    parts = [groups_of(x, groups_along) for x in (w, loc, q.base_dist.scale)]
    density = divergence = 0.0
    for value, mean, scale in zip(*parts, strict=True):
        best = torch.distributions.Normal(0.0, value.square().mean().sqrt())
        density += best.log_prob(value).sum()
        best = torch.distributions.Normal(0.0, (mean.square() + scale.square()).mean().sqrt())
        divergence += kl_divergence(torch.distributions.Normal(mean, scale), best).sum()
    torch.testing.assert_close(prior.log_prob(w), density)
    torch.testing.assert_close(kl_divergence(q, prior), divergence)
    torch.testing.assert_close(prior.expand([2, 1]).log_prob(w), density.expand(2, 1))
    assert prior.expand([2, 1]).shape() == (2, 1, *shape) and divergence > 0


@every_grouping
def test_groups_are_of_the_weights_left(per):
    torch.manual_seed(0)
    prior, left = groups_prior(per, (3, 4)), torch.rand(3, 4) < 0.6
    left[1], left[:, 2] = False, False  # groups of which nothing is left
    loc = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    rho = torch.randn(3, 4, dtype=torch.float64).where(left, -math.inf).requires_grad_()
    divergence = kl_divergence(PrunedNormal(loc, rho).to_event(2), prior)
    density = prior.log_prob(loc.where(left, 0.0))
    expected = kl, log_prob = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    along = [groups_of(x, per) for x in (loc, rho, left)]
    for mean, r, mask in zip(*along, strict=True):
        if mask.any():
            group = groups_prior("layer", (int(mask.sum()),))
            kl += kl_divergence(SoftplusNormal(mean[mask], r[mask]).to_event(1), group)
            log_prob += group.log_prob(mean[mask])
    torch.testing.assert_close((divergence, density), tuple(expected))
    for slope in torch.autograd.grad(divergence + density, (loc, rho)):
        assert slope.isfinite().all() and (slope[~left] == 0).all()


def test_noise_of_one_scale_costs_nothing_in_any_group():
    for scale in (1e-6, 1.0, 1e6):
        q = SummedNormal(torch.zeros(30, 40), scale).to_event(2)
        for per in PER:
            prior = bbb.priors.make("normal_jeffreys", per=per)(
                None, "weight", torch.Size([30, 40])
            )
            assert kl_divergence(q, prior).abs() < 1e-5 * q.event_shape.numel()


# --- training ---


def test_of_digits_it_leaves_a_tenth_of_the_weights():
    """After 20 epochs 6 % are left at an accuracy of 0.94."""
    x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    train, (x_test, y_test) = bbb.data.split(x.float() / 16, y, fraction=0.25, seed=0)
    network = bbb.BayesianMLP([64, 100, 10], prior="log_uniform")
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(train[0]))
    torch.manual_seed(0)
    guide = bbb.AutoSoftplusNormal(model)
    bbb.fit(model, guide, train, epochs=20, lr=1e-2, progress=False, seed=0)
    ratios = torch.cat([ratio.flatten() for ratio in bbb.signal_to_noise(guide).values()])
    pruned = bbb.prune(guide, float((ratios < PRUNED).double().mean()))
    assert (ratios < PRUNED).double().mean() > 0.9
    assert bbb.metrics.accuracy(bbb.predict_mean(model, pruned, x_test).probs, y_test) > 0.9


NETWORKS = {
    "mlp": lambda: bbb.BayesianMLP([64, 8, 2], prior="log_uniform"),
    **{
        f"mlp, groups per {per}": lambda per=per: bbb.BayesianMLP(
            [64, 8, 2], prior=bbb.priors.make("normal_jeffreys", per=per)
        )
        for per in PER
    },
    "lenet, groups": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Upsample(28),
        bbb.BayesianLeNet5(2, prior=bbb.priors.make("normal_jeffreys", per="input")),
    ),
    "lenet": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Upsample(28), bbb.BayesianLeNet5(2, prior="log_uniform")
    ),
    "converted": lambda: bbb.bayesianize(
        nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2)
        ),
        prior="log_uniform",
    ),
}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("estimator", ["reparam", "local_reparam"])
def test_every_network_trains_is_pruned_saved_and_trained_further(kind, estimator, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(40, 64)
    data = x, (x[:, 0] > 0).long()
    model = small_model(network=NETWORKS[kind]())
    guide = bbb.AutoSoftplusNormal(model)
    options = {"epochs": 1, "progress": False, "seed": 0, "estimator": estimator}
    bbb.fit(model, guide, data, **options, loss="mean_field")
    pruned = bbb.prune(guide, 0.5)
    bbb.fit(model, pruned, data, **options)
    bbb.save(tmp_path / "saved", model, pruned)
    again, loaded = bbb.load(tmp_path / "saved")
    for fitted, its_guide in ((model, pruned), (again, loaded)):
        bbb.fit(fitted, its_guide, data, **options)
    before, after = (bbb.signal_to_noise(g) for g in (pruned, loaded))
    for name, ratio in before.items():
        assert torch.equal(ratio, after[name])
        assert (ratio.isfinite() & ((ratio == 0) >= ~pruned.unpruned[name])).all()
    removed = sum(int((~left).sum()) for left in loaded.unpruned.values())
    assert removed == round(0.5 * sum(ratio.numel() for ratio in before.values()))


IMPROPER = ["log_uniform", "normal_jeffreys"]


@pytest.mark.parametrize("prior", IMPROPER)
def test_the_default_loss_is_the_closed_form(prior):
    model = small_model(prior)
    losses = []
    for loss in (None, "mean_field", TraceMeanField_ELBO()):
        torch.manual_seed(0)
        guide = bbb.AutoSoftplusNormal(model)
        history = bbb.fit(model, guide, small_data(), epochs=2, progress=False, seed=0, loss=loss)
        losses.append(history.loss)
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.parametrize("prior", IMPROPER)
@pytest.mark.parametrize("num_particles", [1, 4])
def test_an_ensemble_trains_with_it(prior, num_particles):
    model = small_model(prior)
    guide = bbb.guides.make("ensemble", model, guide="softplus_normal", size=2)
    options = {"epochs": 3, "progress": False, "seed": 0, "num_particles": num_particles}
    history = bbb.fit(model, guide, small_data(), **options)
    assert history.loss[-1] < history.loss[0]


# --- what is refused ---


def refused(prior="log_uniform"):
    model, data = small_model(prior), small_data()
    trained = bbb.AutoSoftplusNormal(model)
    loop = {"epochs": 1, "progress": False, "seed": 0}
    return {
        "draws": lambda: model.network.fc1.prior(None, "w", torch.Size([2, 3])).sample(),
        "a network at draws": lambda: bbb.BayesianMLP([3, 2], prior=prior)(data[0]),
        "the prior predictive": lambda: Predictive(model, num_samples=2)(data[0]),
        "NUTS": lambda: bbb.run_nuts(model, data, num_samples=2, warmup_steps=2, progress=False),
        "SG-MCMC": lambda: bbb.run_sgmcmc(
            model, data, warmup_steps=1, num_samples=2, progress=False
        ),
        "IVON": lambda: bbb.fit(model, trained, data, optimizer="ivon", **loop),
        "a sampled KL": lambda: bbb.fit(model, trained, data, loss="trace", **loop),
        "a sampled score": lambda: bbb.fit(model, trained, data, estimator="stl", **loop),
        "sample": lambda: bbb.sample(model, data, seconds=1, progress=False),
        "check": lambda: bbb.check(model, trained, data),
        **{
            name: lambda name=name: bbb.fit(model, bbb.guides.make(name, model), data, **loop)
            for name in (
                "delta",
                "low_rank",
                "normal",
                "laplace",
                "swag",
                "rank1_ensemble",
                "ensemble",
            )
        },
    }


@pytest.mark.parametrize("prior", IMPROPER)
@pytest.mark.parametrize("what", refused())
def test_what_needs_a_proper_prior_is_refused(what, prior):
    with pytest.raises(ValueError, match="improper|proper prior"):
        refused(prior)[what]()


def test_printing_and_checking_need_no_draws():
    model, (x, y) = small_model(), small_data()
    small_model("normal_jeffreys").check(x, y)
    assert "LogUniform" in repr(model) and "LogUniform" in repr(NETWORKS["converted"]())
    model.check(x, y)
    assert isinstance(model.latent_sites()["network.fc1.bias"]["fn"], dist.Independent)
