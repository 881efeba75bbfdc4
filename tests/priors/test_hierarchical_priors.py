# SPDX-License-Identifier: Apache-2.0
"""Latent scales of the weights: their sites, densities, marginals, and inference with them."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import scipy.stats
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.poutine.messenger import Messenger
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.priors import HierarchicalNormal
from pyro_bbb.priors._hierarchical import horseshoe, inverse_gamma

ALPHA = 1e-6  # false-alarm rate of each Kolmogorov-Smirnov test below
KINDS = {
    "layer": lambda: HierarchicalNormal(),
    "unit": lambda: HierarchicalNormal(per="unit"),
    "input": lambda: HierarchicalNormal(per="input"),
    "variance": lambda: inverse_gamma(2.0, 0.5),
    "variance per unit": lambda: inverse_gamma(2.0, 0.5, per="unit"),
    "log-normal": lambda: HierarchicalNormal(dist.LogNormal(-1.0, 0.5)),
}
every_kind = pytest.mark.parametrize("kind", sorted(KINDS))


def small_model(prior, network=None):
    network = network or bbb.BayesianMLP([3, 4, 1], prior=prior)
    return bbb.BayesianModel(network, bbb.likelihoods.Gaussian(0.5), num_data=12)


def small_data():
    return torch.randn(12, 3), torch.randn(12, 1)


def drawn(network, x):
    trace = poutine.trace(network).get_trace(x)
    return {name: site for name, site in trace.iter_stochastic_nodes()}


# --- sites ---


@pytest.mark.parametrize(
    ("prior", "part", "shapes"),
    [
        (HierarchicalNormal(), "scale", [(), (), (), ()]),
        (HierarchicalNormal(per="unit"), "scale", [(4,), (), (1,), ()]),
        (horseshoe(), "scale", [(4,), (), (1,), ()]),
        (horseshoe(per="input"), "scale", [(3,), (), (4,), ()]),
        (inverse_gamma(), "variance", [(), (), (), ()]),
    ],
)
def test_every_weight_has_a_latent_of_its_groups_before_it(prior, part, shapes):
    sites = drawn(bbb.BayesianMLP([3, 4, 1], prior=prior), torch.randn(5, 3))
    weights = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert list(sites) == [f"{w}{end}" for w in weights for end in (f"_prior_{part}", "")]
    actual = [sites[f"{weight}_prior_{part}"]["value"].shape for weight in weights]
    assert actual == shapes
    for name, site in sites.items():
        assert site["fn"].batch_shape == () and site["fn"].event_shape == site["value"].shape, name


@every_kind
def test_the_guide_draws_them_in_the_same_order(kind):
    model = small_model(KINDS[kind]())
    guide = bbb.AutoSoftplusNormal(model)
    latents = list(drawn(model.network, small_data()[0]))
    assert guide.site_names == latents
    weights = [name for name in guide.site_names if "_prior_" not in name]
    assert weights == guide.weight_names and len(weights) == 4
    # which Pyro verifies where its validation is on (else it warns)
    pyro.enable_validation(True)
    assert math.isfinite(TraceMeanField_ELBO().loss(model, guide, *small_data()))


def test_the_guide_starts_at_the_latents_median():
    model = small_model(None, bbb.BayesianMLP([3, 200, 1], prior=horseshoe(0.1)))
    guide = bbb.AutoSoftplusNormal(model)
    start = guide.median()["network.fc1.weight_prior_scale"] / 0.1
    # Medians of 15 draws: ln of each has about sd .41. 6 standard errors of the mean, 2e-9.
    assert start.log().mean().abs() < 6 * 0.41 / math.sqrt(200)


# --- densities ---


@every_kind
def test_the_weights_have_the_drawn_scale(kind):
    prior = KINDS[kind]()
    layer = bbb.BayesianConv2d(2, 3, 2, prior=prior)
    sites = drawn(layer, torch.randn(1, 2, 4, 4))
    latent = next(name for name in sites if name.startswith("weight_prior"))
    scale = sites[latent]["value"].sqrt() if "variance" in latent else sites[latent]["value"]
    scale = scale.view(1, -1, 1, 1) if kind == "input" else scale.view(-1, 1, 1, 1)
    per_entry = (scale * torch.ones(3, 2, 2, 2)).numpy()
    w = sites["weight"]["value"]
    expected = scipy.stats.norm.logpdf(w, 0, per_entry).sum()
    assert sites["weight"]["fn"].log_prob(w).item() == pytest.approx(expected, rel=1e-5)


@every_kind
def test_a_plate_of_particles_is_a_loop(kind):
    """What the model computes for three particles at once is what it computes for each."""
    model, data = small_model(KINDS[kind]()), small_data()
    guide = bbb.AutoSoftplusNormal(model, init_rho=-1.0)
    with pyro.plate("particles", 3, dim=-2):
        q = poutine.trace(guide).get_trace(*data)
        p = poutine.trace(poutine.replay(model, trace=q)).get_trace(*data)
    p.compute_log_prob(), q.compute_log_prob()
    for s in range(3):
        values = {name: site["value"][s, 0] for name, site in q.iter_stochastic_nodes()}
        single = poutine.trace(poutine.condition(model, values)).get_trace(*data)
        single.compute_log_prob()
        for name in (*values, "obs"):
            actual = p.nodes[name]["log_prob"][s].sum()
            torch.testing.assert_close(
                actual, single.nodes[name]["log_prob"].sum(), rtol=1e-4, atol=1e-4
            )


def marginal(prior, w, part):
    """Log-density of a weight tensor, summed over its latent in the library's model.

    The trapezoid rule converges geometrically for an integrand that is smooth and vanishes.
    """
    layer = bbb.BayesianLinear(w.shape[1], w.shape[0], bias=False, prior=prior).double()
    u = torch.linspace(-14, 14, 281, dtype=torch.float64)  # logarithm of the latent
    log_joint = torch.empty_like(u)
    for i, latent in enumerate(u.exp()):
        values = {"weight": w, part: latent.expand(layer_groups(prior, w))}
        trace = poutine.trace(poutine.condition(layer, values)).get_trace(
            w.new_zeros(1, w.shape[1])
        )
        log_joint[i] = trace.log_prob_sum() + u[i]
    return torch.logsumexp(log_joint, 0).item() + math.log(28 / 280)


def layer_groups(prior, w):
    return w.shape[:1] if prior.per == "unit" else ()


@pytest.mark.parametrize("per", ["layer", "unit"])
def test_with_an_inverse_gamma_variance_a_group_is_multivariate_student_t(per):
    a, b = 1.5, 0.7
    w = torch.tensor([[0.3, -1.2, 2.0]], dtype=torch.float64)
    prior = inverse_gamma(a, b, per=per)
    t = scipy.stats.multivariate_t(np.zeros(3), np.eye(3) * b / a, df=2 * a)
    actual = marginal(prior, w, "weight_prior_variance")
    assert actual == pytest.approx(t.logpdf(w[0].numpy()), abs=1e-6)


def test_with_a_half_cauchy_scale_a_weight_has_the_horseshoe_density():
    """Which is exp(w^2 / 2) E1(w^2 / 2) / sqrt(2 pi^3)."""
    for w in (0.05, 0.7, 4.0):
        half = w * w / 2
        expected = half + math.log(scipy.special.exp1(half)) - 0.5 * math.log(2 * math.pi**3)
        w = torch.tensor([[w]], dtype=torch.float64)
        assert marginal(horseshoe(), w, "weight_prior_scale") == pytest.approx(expected, abs=1e-5)


def test_draws_of_different_units_are_student_t_and_independent():
    """Squares of two weights correlate in a row, where they share their scale, not in a column."""
    layer = bbb.BayesianLinear(2, 10_000, bias=False, prior=inverse_gamma(4.0, 4.0, per="unit"))
    w = drawn(layer, torch.zeros(1, 2))["weight"]["value"]
    assert scipy.stats.kstest(w[:, 0], scipy.stats.t(8).cdf).pvalue > ALPHA
    in_row = np.corrcoef(w.abs().log().T.numpy())[0, 1]
    below = np.corrcoef(w[:-1, 0].abs().log(), w[1:, 0].abs().log())[0, 1]
    # Independent: 0 +- .01. The shared ln sqrt(tau^2) has variance psi'(4)/4 = .071 of 1.3 in all.
    assert abs(below) < 0.05 < in_row + 0.02
    expected = 0.07095 / (0.07095 + math.pi**2 / 8)
    assert abs(in_row - expected) < 0.05  # 5 standard errors, false alarms 6e-7


# --- inference ---


@pytest.mark.parametrize(
    ("loss", "estimator", "num_particles"),
    [("trace", "local_reparam", 3), ("trace", "stl", 1), ("mean_field", "flipout", 3)],
)
def test_every_objective_takes_them(loss, estimator, num_particles):
    model = small_model("horseshoe")
    guide = bbb.AutoSoftplusNormal(model)
    before = {name: parameter.clone() for name, parameter in guide.named_parameters()}
    options = {"loss": loss, "estimator": estimator, "num_particles": num_particles}
    history = bbb.fit(model, guide, small_data(), epochs=2, batch_size=6, progress=False, **options)
    assert all(map(math.isfinite, history.loss))
    assert all((parameter != before[name]).all() for name, parameter in guide.named_parameters())


class AtNoise(Messenger):
    """Gives the guide's latent variance a chosen noise, and the weights their means."""

    def __init__(self, z):
        super().__init__()
        self.z = z

    def _pyro_sample(self, msg):
        if not msg["done"]:
            fn = msg["fn"]
            positive = isinstance(fn, dist.TransformedDistribution)
            base = fn.base_dist
            msg["value"] = (base.loc + base.scale * self.z).exp() if positive else base.loc
            msg["done"] = True


def test_the_best_log_normal_of_a_variance_is_stationary():
    """All weights known: then the variance's posterior is inverse-gamma.

    Of the Normals for its logarithm u, with ln p = -A u - B e^-u, the best has variance 1 / A and
    mean ln(B / A) + 1 / (2 A). Gauss-Hermite quadrature gives the expected gradient.
    """
    torch.set_default_dtype(torch.float64)
    n, a, b = 30, 1.5, 0.7
    w = 0.1 * torch.randn(n)
    concentration, rate = a + n / 2, b + 0.5 * w.square().sum()
    best = (rate / concentration).log() + 0.5 / concentration, concentration**-0.5
    layer = bbb.BayesianLinear(n, 1, bias=False, prior=inverse_gamma(a, b))
    model = bbb.BayesianModel(layer, bbb.likelihoods.Gaussian(1.0), num_data=1)
    guide = bbb.AutoSoftplusNormal(model, init_loc={"weight": w[None]})
    latent = "network.weight_prior_variance"
    loc, rho = (guide._parameter(name, latent) for name in ("locs", "rhos"))
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)

    def slopes(shift, factor):
        loc.data.copy_(best[0] + shift)
        rho.data.copy_(torch.tensor(factor * best[1]).expm1().log())
        expected = 0.0
        for z, weight in zip(nodes, weights / math.sqrt(2 * math.pi), strict=True):
            args = model, AtNoise(z)(guide), torch.zeros(1, n), torch.zeros(1, 1)
            expected = expected + weight * Trace_ELBO().differentiable_loss(*args)
        return torch.stack(torch.autograd.grad(expected, (loc, rho)))

    assert slopes(0.0, 1.0).abs().max() < 1e-9
    assert slopes(0.1, 1.0)[0] > 1 and slopes(0.0, 1.2)[1] > 0.05  # and uphill from there


def test_pruning_and_export_leave_the_latents_out():
    model, (x, y) = small_model("horseshoe"), small_data()
    guide = bbb.prune(bbb.AutoSoftplusNormal(model), fraction=0.25)
    assert not any("_prior_" in name for name in bbb.signal_to_noise(guide))
    bbb.fit(model, guide, (x, y), epochs=2, progress=False, loss="mean_field")
    plain = bbb.to_module(model, guide)
    weights = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert [name for name, _ in plain.named_parameters()] == weights == list(plain.state_dict())
    torch.testing.assert_close(plain(x), bbb.predict_mean(model, guide, x).mean)


class Sequence(nn.Module):
    """A convolution, a recurrent layer and a read-out."""

    def __init__(self):
        super().__init__()
        self.conv, self.lstm = nn.Conv1d(1, 2, 2), nn.LSTM(2, 3, batch_first=True)
        self.out = nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.lstm(self.conv(x[:, None]).transpose(1, 2))[0][:, -1])


def test_converted_networks_have_them_too():
    plain = Sequence()
    network = bbb.bayesianize(plain, inverse_gamma(per="unit"), where=["lstm", "conv"])
    model, (x, y) = small_model(None, network), small_data()
    guide = bbb.AutoSoftplusNormal(model)
    start = guide.median()["network.lstm.weight_hh_l0"]
    torch.testing.assert_close(start, plain.lstm.weight_hh_l0.detach())
    history = bbb.fit(model, guide, (x, y), epochs=2, num_particles=2, progress=False)
    assert all(map(math.isfinite, history.loss))
    exported = bbb.to_module(model, guide)
    assert [name for name, _ in exported.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    torch.testing.assert_close(exported(x), bbb.predict_mean(model, guide, x).mean)


def test_by_name_only_some_layers_have_latents():
    nested = {"fc1.*": {"*.weight": "horseshoe", "*": "normal"}, "*": "normal"}
    for prior in ({"fc1.weight": "horseshoe", "*": "normal"}, nested):
        network = bbb.BayesianMLP([3, 4, 1], prior=prior)
        sites = list(drawn(network, torch.randn(5, 3)))
        other_weights = ["fc1.bias", "fc2.weight", "fc2.bias"]
        assert sites == ["fc1.weight_prior_scale", "fc1.weight", *other_weights]
