# SPDX-License-Identifier: Apache-2.0
"""The minibatch free energy: weights of the KL, identities of the loss, and gradients by hand."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from torch.distributions import ExpTransform, SigmoidTransform, StickBreakingTransform

import pyro_bbb as bbb
from pyro_bbb.elbo import minibatch_elbo
from pyro_bbb.training._kl_schedule import KLSchedule, as_kl_schedule

ELBOS = [Trace_ELBO, TraceMeanField_ELBO]


pytestmark = pytest.mark.usefixtures("double")


def guide_as_prior(make_prior):
    """A model whose prior is ``make_prior(name, shape)``, a Normal, and the guide equal to it."""
    priors = {}

    def prior(module, name, shape):
        return priors.setdefault((name, tuple(shape)), make_prior(shape))

    model, guide = make(prior)
    for name in guide.site_names:
        normal = priors[name.split(".")[-1], tuple(guide.loc(name).shape)]
        guide.loc(name).copy_(normal.loc)
        # rho = ln(e^s - 1), the inverse of the softplus
        guide._parameter("rhos", name).data.copy_(torch.expm1(normal.scale).log())
    return model, guide


def make(prior, *, sizes=(3, 4, 2), likelihood=None, num_data=10, **options):
    network = bbb.BayesianMLP([*sizes], prior=prior)
    likelihood = likelihood or bbb.likelihoods.Gaussian()
    model = bbb.BayesianModel(network, likelihood, num_data=num_data)
    return model, bbb.AutoSoftplusNormal(model, **options)


def random_normal(shape):
    return dist.Normal(torch.randn(shape), torch.rand(shape) + 0.1)


# --- identities: q = prior ---


@pytest.mark.parametrize("elbo", ELBOS)
@pytest.mark.parametrize("kl_weight", [1.0, 0.25])
def test_without_data_and_with_q_equal_to_the_prior_the_loss_is_0_for_every_draw(elbo, kl_weight):
    model, guide = guide_as_prior(random_normal)
    blind = poutine.block(model, hide=["obs"])
    losses = [elbo().loss(blind, guide, torch.randn(5, 3), None, kl_weight) for _ in range(20)]
    # 26 weights of log-density below 10 each: rounding is below 26 * 10 * 2^-52 = 6e-14
    assert max(map(abs, losses)) < 1e-13


PUSHED = {
    "positive": lambda normal: dist.TransformedDistribution(normal, [ExpTransform()]).to_event(1),
    "unit interval": lambda normal: dist.TransformedDistribution(
        normal, [SigmoidTransform()]
    ).to_event(1),
    "simplex": lambda normal: dist.TransformedDistribution(
        normal.to_event(1), [StickBreakingTransform()]
    ),
}


@pytest.mark.parametrize("elbo", ELBOS)
@pytest.mark.parametrize("support", PUSHED)
def test_constrained_latents_have_the_right_jacobian(elbo, support):
    """A prior that is a Normal pushed forward equals the guide: 0 for every draw."""
    loc, scale = torch.tensor([0.3, -0.5]), torch.tensor([0.4, 1.1])

    def model():
        pyro.sample("z", PUSHED[support](dist.Normal(loc, scale)))

    guide = bbb.AutoSoftplusNormal(model)
    guide()
    guide.loc("z").copy_(loc)
    guide._parameter("rhos", "z").data.copy_(torch.expm1(scale).log())
    losses = [elbo().loss(model, guide) for _ in range(20)]
    assert max(map(abs, losses)) < 1e-12  # inverting the transform costs some digits


def test_the_closed_form_kl_is_the_same_on_two_calls_and_torchs():
    model, guide = make(dist.Normal(0.5, 2.0))
    blind = poutine.block(model, hide=["obs"])
    first, second = (TraceMeanField_ELBO().loss(blind, guide, torch.randn(5, 3)) for _ in range(2))
    prior = torch.distributions.Normal(0.5, 2.0)
    exact = sum(
        torch.distributions.kl_divergence(
            torch.distributions.Normal(guide.loc(name), guide.scale(name)), prior
        ).sum()
        for name in guide.site_names
    )
    assert first == second
    assert first == pytest.approx(exact.item(), rel=1e-12)


# --- identities: minibatches recombine ---


def fixed_noise(model, guide, *args):
    """One loss with always the same weights."""
    pyro.set_rng_seed(1)
    return Trace_ELBO().loss(model, guide, *args)


SCHEDULES = ["uniform", "blundell", lambda i, m: 2 * i / (m * (m + 1))]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["uniform", "blundell", "function"])
@pytest.mark.parametrize("batch_size", [1, 4, 30])
def test_minibatch_losses_add_up_to_the_loss_of_all_data(schedule, batch_size):
    model, guide = make(bbb.ScaleMixtureNormal(0.5, 1.0, 0.1), init_rho=0.0)
    x, y = torch.randn(10, 3), torch.randn(10, 2)
    total = fixed_noise(model, guide, x, y, 1.0)
    batches = list(zip(x.split(batch_size), y.split(batch_size), strict=True))
    losses = [
        fixed_noise(model, guide, a, b, weight)
        for (a, b), weight in zip(batches, weights(schedule, 10, batch_size), strict=True)
    ]
    assert math.fsum(losses) == pytest.approx(total, rel=1e-12)


# --- schedules ---


def weights(schedule, num_data, batch_size, epoch=0):
    """The weights of one epoch, with a short last batch where it does not divide."""
    num_batches = math.ceil(num_data / batch_size)
    return [
        as_kl_schedule(schedule).weight(
            batch=i,
            num_batches=num_batches,
            batch_size=min(batch_size, num_data - (i - 1) * batch_size),
            num_data=num_data,
            epoch=epoch,
        )
        for i in range(1, num_batches + 1)
    ]


def test_uniform_weights_are_the_shares_of_the_examples():
    assert weights("uniform", 10, 4) == [0.4, 0.4, 0.2]


def test_blundell_weights_are_those_of_equation_9():
    assert weights("blundell", 3, 1) == pytest.approx([4 / 7, 2 / 7, 1 / 7], rel=1e-15)


@pytest.mark.parametrize("num_batches", [1, 53, 1024, 5000])
def test_blundell_weights_sum_to_1_without_overflow(num_batches):
    kl_weights = weights("blundell", num_batches, 1)
    assert math.fsum(kl_weights) == pytest.approx(1.0, rel=1e-15)
    assert kl_weights == sorted(kl_weights, reverse=True)


def test_warm_up_is_a_line_and_cooling_goes_by_equal_factors():
    cooling = {"temperature": 0.02, "initial_temperature": 0.5, "cooling_epochs": 2}
    both, cold, warm = (
        np.array([4 * w for epoch in range(4) for w in weights(schedule, 4, 1, epoch)])
        for schedule in (
            KLSchedule(warmup_epochs=3, **cooling),
            KLSchedule(**cooling),
            KLSchedule(warmup_epochs=3),
        )
    )
    assert warm == pytest.approx(np.minimum(np.arange(1, 17) / 12, 1), rel=1e-15)
    expected = np.r_[np.geomspace(0.5, 0.02, 9)[1:], [0.02] * 8]
    assert cold == pytest.approx(expected, rel=1e-14)
    assert both == pytest.approx(cold * warm, rel=1e-14)


def test_a_negative_weight_is_refused_by_the_model():
    model = bbb.BayesianModel(bbb.BayesianMLP([3, 2]), bbb.likelihoods.Gaussian(), num_data=10)
    with pytest.raises(ValueError, match="kl_weight must be a non-negative number, got -1"):
        model(torch.randn(5, 3), None, -1.0)


# --- the record of one step ---


def recorded(loss, kl_weight, num_particles=1, seed=0):
    pyro.set_rng_seed(0)  # of the kernels' initial values
    model, guide = make(dist.Normal(0.0, 1.0))
    pyro.set_rng_seed(seed)
    elbo = minibatch_elbo(loss, num_particles)
    value = elbo.loss_and_grads(model, guide, torch.randn(5, 3), torch.randn(5, 2), kl_weight)
    return value, elbo.take_parts()


@pytest.mark.parametrize("kl_weight", [1.0, 2.0**-500, 0.0])
@pytest.mark.parametrize("num_particles", [1, 3])
def test_the_parts_of_the_loss_make_the_loss(kl_weight, num_particles):
    value, terms = recorded("trace", kl_weight, num_particles)
    assert terms.kl_weight == pytest.approx(kl_weight, rel=1e-15)
    assert terms.loss == pytest.approx(value, rel=1e-14)
    assert terms.loss == pytest.approx(terms.kl_weight * terms.kl + terms.nll, rel=1e-13)
    assert terms.kl == pytest.approx(terms.log_guide - terms.log_prior, rel=1e-13)
    first, second = (recorded("mean_field", kl_weight, seed=seed)[1].kl for seed in (3, 4))
    assert first == pytest.approx(second, rel=1e-9)  # the closed form, for any draw


@pytest.mark.parametrize(
    ("loss", "num_particles", "closed_form"),
    [
        (None, 2, False),
        ("trace", 2, False),
        (Trace_ELBO, 2, False),
        (Trace_ELBO(num_particles=3), 3, False),
        ("mean_field", 2, True),
        (TraceMeanField_ELBO, 2, True),
        (TraceMeanField_ELBO(), 1, True),
    ],
)
def test_objectives_by_name_class_and_instance(loss, num_particles, closed_form):
    elbo = minibatch_elbo(loss, 2)
    assert isinstance(elbo, Trace_ELBO)
    assert (elbo.num_particles, elbo.closed_form) == (num_particles, closed_form)


# --- oracle: the step written by hand ---


def normal_log_density(x, loc, scale):
    return -((x - loc) ** 2) / (2 * scale**2) - torch.log(scale) - math.log(math.sqrt(2 * math.pi))


def noise_of(locs, num_particles):
    """What the guide draws, site by site."""
    return {name: torch.randn(num_particles, *loc.shape) for name, loc in locs.items()}


def by_hand(guide, num_particles):
    """Leaf copies of the guide's parameters; draws, and their log q, from the guide's noise."""
    thetas = {
        name: (
            guide.loc(name).clone().requires_grad_(),
            guide._parameter("rhos", name).detach().clone().requires_grad_(),
        )
        for name in guide.site_names
    }
    sigmas = {name: torch.log(1 + torch.exp(rho)) for name, (_, rho) in thetas.items()}
    noise = noise_of({name: mu for name, (mu, _) in thetas.items()}, num_particles)
    particles = []
    for p in range(num_particles):
        w = {n: mu + sigmas[n] * noise[n][p] for n, (mu, _) in thetas.items()}
        log_q = {n: normal_log_density(w[n], mu, sigmas[n]).sum() for n, (mu, _) in thetas.items()}
        particles.append((w, log_q))
    return thetas, particles


def assert_same_gradients(model, guide, args, num_particles, free_energy):
    """Return gradients of one SVI step and of ``free_energy``, averaged over the same draws."""
    pyro.set_rng_seed(7)
    elbo = minibatch_elbo("trace", num_particles, vectorize=True)
    svi = SVI(model, guide, pyro.optim.Adam({}), elbo)
    loss = svi.loss_and_grads(model, guide, *args)
    pyro.set_rng_seed(7)
    thetas, particles = by_hand(guide, num_particles)
    expected = sum(free_energy(w, log_q) for w, log_q in particles) / num_particles
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert elbo.take_parts().loss == pytest.approx(expected.item(), rel=1e-12)
    for name, pair in thetas.items():
        for group, theta in zip(("locs", "rhos"), pair, strict=True):
            actual = guide._parameter(group, name).grad
            torch.testing.assert_close(actual, theta.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_particles", [1, 3])
def test_gradients_of_a_classifier_under_the_scale_mixture_are_those_by_hand(num_particles):
    pi, sigma1, sigma2 = 0.25, 1.5, 0.02
    options = {"sizes": (5, 7, 3), "likelihood": bbb.likelihoods.Categorical(), "num_data": 60}
    model, guide = make(bbb.ScaleMixtureNormal(pi, sigma1, sigma2), **options)
    for name in guide.site_names:
        guide._parameter("rhos", name).data.normal_(-2, 1)
    x, y, kl_weight = torch.randn(6, 5), torch.randint(0, 3, (6,)), 0.1

    def mixture(w):
        first = math.log(pi) + normal_log_density(w, 0.0, torch.tensor(sigma1))
        second = math.log(1 - pi) + normal_log_density(w, 0.0, torch.tensor(sigma2))
        return torch.logsumexp(torch.stack([first, second]), dim=0)

    def free_energy(w, log_q):
        fc1, fc2 = "network.fc1.", "network.fc2."
        hidden = torch.clamp(x @ w[fc1 + "weight"].T + w[fc1 + "bias"], min=0)
        logits = hidden @ w[fc2 + "weight"].T + w[fc2 + "bias"]
        nll = -torch.log(torch.softmax(logits, dim=1))[torch.arange(6), y].sum()
        kl = sum(log_q[name] - mixture(w[name]).sum() for name in w)
        return kl_weight * kl + nll

    assert_same_gradients(model, guide, (x, y, kl_weight), num_particles, free_energy)


@pytest.mark.parametrize("num_particles", [1, 3])
def test_gradients_of_a_regression_with_latent_noise_are_those_by_hand(num_particles):
    """The guide's density of the noise scale holds the Jacobian of the exponential."""
    noise = dist.LogNormal(torch.tensor(-1.0), torch.tensor(0.7))
    options = {"sizes": (5, 1), "likelihood": bbb.likelihoods.Gaussian(noise), "num_data": 60}
    model, guide = make(dist.Normal(0.0, 2.0), init_rho=-1.0, **options)
    x, y, kl_weight = torch.randn(6, 5), torch.randn(6, 1), 0.1

    def free_energy(w, log_q):
        log_scale = w.pop("likelihood.scale")
        loc = x @ w["network.fc1.weight"].T + w["network.fc1.bias"]
        nll = -normal_log_density(y, loc, torch.exp(log_scale)).sum()
        prior = sum(normal_log_density(v, 0.0, torch.tensor(2.0)).sum() for v in w.values())
        # both densities of the scale are those of its logarithm, divided by the scale
        prior = prior + normal_log_density(log_scale, -1.0, torch.tensor(0.7)) - log_scale
        return kl_weight * (sum(log_q.values()) - log_scale - prior) + nll

    assert_same_gradients(model, guide, (x, y, kl_weight), num_particles, free_energy)


def test_the_mean_field_loss_counts_the_density_that_stock_guides_keep_in_deltas():
    """AutoNormal of a LogNormal latent: the Jacobian is in its Delta; 6 standard errors.

    Its mean is the latent's median on the log scale, here 2; that much is lost without it.
    """
    likelihood = bbb.likelihoods.Gaussian(dist.LogNormal(0.0, 1.0))
    model = bbb.BayesianModel(bbb.BayesianMLP([2, 1]), likelihood, 5)
    x, y = torch.randn(5, 2), torch.randn(5, 1)
    guide = AutoNormal(model, init_scale=0.5)
    guide(x, y)
    with torch.no_grad():
        guide.locs.likelihood.scale.fill_(2.0)
    losses = {}
    for name in ("trace", "mean_field"):
        elbo = minibatch_elbo(name, 1)
        with torch.no_grad():
            losses[name] = torch.tensor(
                [elbo.loss_and_grads(model, guide, x, y) for _ in range(300)]
            )
    a, b = losses.values()
    error = ((a.var() + b.var()) / 300).sqrt()
    assert (a.mean() - b.mean()).abs() < 6 * error < 2.0
