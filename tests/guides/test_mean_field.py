# SPDX-License-Identifier: Apache-2.0
"""The diagonal Gaussian guide: its parameters, starts, densities, draws, copies, pruned form."""

import math

import pyro
import pyro.distributions as dist
import pytest
import scipy.stats
import torch
from pyro import poutine
from pyro.infer import SVI, TraceMeanField_ELBO
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pyro_bbb as bbb

KERNEL = "network.fc1.weight"


def make(likelihood=None, *, sizes=(3, 4, 1), prior=None, **options):
    network = bbb.BayesianMLP(list(sizes), prior=prior)
    model = bbb.BayesianModel(network, likelihood or bbb.likelihoods.Gaussian(), num_data=10)
    return model, bbb.AutoSoftplusNormal(model, **options)


def latent_noise():
    return bbb.likelihoods.Gaussian(dist.LogNormal(-1.0, 0.5))


def data(n=10):
    return torch.randn(n, 3), torch.randn(n)


# --- parameters exist from the start ---


def test_the_parameters_exist_before_any_call():
    _, guide = make(latent_noise())
    names = [f"network.fc{i}.{leaf}" for i in (1, 2) for leaf in ("weight", "bias")]
    assert guide.site_names == [*names, "likelihood.scale"]
    assert guide.weight_names == names
    actual = {name: tuple(p.shape) for name, p in guide.named_parameters()}
    shapes = [(4, 3), (4,), (1, 4), (1,), ()]
    sites = list(zip(guide.site_names, shapes, strict=True))
    assert actual == {f"{group}.{name}": s for group in ("locs", "rhos") for name, s in sites}
    assert len(pyro.get_param_store()) == 0


def test_a_call_adds_no_parameters_and_draws_every_latent_of_the_model():
    model, guide = make(latent_noise())
    before = dict(guide.named_parameters())
    draws = guide(*data())
    assert list(draws) == guide.site_names
    assert dict(guide.named_parameters()) == before
    trace = poutine.trace(model).get_trace(*data())
    shapes = {name: site["value"].shape for name, site in trace.iter_stochastic_nodes()}
    del shapes["data"]  # the plate
    assert {name: draw.shape for name, draw in draws.items()} == shapes


def test_a_first_call_without_targets_takes_no_observation_for_a_latent():
    _, guide = make()
    names = guide.site_names
    guide(data()[0])
    assert guide.site_names == names
    assert list(guide(*data(7))) == names


def test_scale_is_the_softplus_of_rho_and_loc_shares_memory():
    _, guide = make(init_rho=-1.5)
    assert guide.scale(KERNEL)[0, 0].item() == pytest.approx(math.log1p(math.exp(-1.5)), rel=1e-6)
    guide.loc(KERNEL).fill_(0.25)
    assert torch.equal(guide.median()[KERNEL], torch.full((4, 3), 0.25))


# --- where the means start ---


@pytest.mark.parametrize("init_loc", [None, "he"])
def test_the_default_start_is_he_for_kernels_and_the_priors_centre_elsewhere(init_loc):
    _, guide = make(latent_noise(), sizes=(200, 300, 2), init_loc=init_loc)
    kernel = guide.loc(KERNEL).double()  # 60,000 draws of N(0, 2/200)
    # 4.5 standard errors each of mean and variance: false alarm once in 70,000 seeds
    assert abs(kernel.mean().item()) < 4.5 * 0.1 / math.sqrt(60_000)
    assert kernel.var().item() == pytest.approx(0.01, rel=4.5 * math.sqrt(2 / 60_000))
    assert torch.equal(guide.loc("network.fc1.bias"), torch.zeros(300))
    # the median of 15 draws of LogNormal(-1, 0.5): within 5.6 standard errors
    assert guide.loc("likelihood.scale").item() == pytest.approx(-1.0, abs=0.9)


# --- densities, medians, quantiles, draws ---


def test_the_density_of_a_positive_latent_is_scipys_lognormal():
    _, guide = make(latent_noise(), init_rho=0.4)
    guide.loc("likelihood.scale").fill_(-0.7)
    sigma = guide.scale("likelihood.scale").item()
    site = poutine.trace(guide).get_trace(*data()).nodes["likelihood.scale"]
    for value in (0.01, 0.5, 3.0):
        expected = scipy.stats.lognorm(s=sigma, scale=math.exp(-0.7)).logpdf(value)
        assert site["fn"].log_prob(torch.tensor(value)).item() == pytest.approx(expected, rel=1e-5)
    own = site["fn"].log_prob(site["value"]).item()  # at its own draw, where the noise is known
    expected = scipy.stats.lognorm(s=sigma, scale=math.exp(-0.7)).logpdf(site["value"].item())
    assert own == pytest.approx(expected, rel=1e-5)


def test_the_density_of_its_own_draw_is_right_where_the_transform_saturates():
    """At 20 the float32 sigmoid is 1; inverting it would miss the draw by 80 deviations."""

    def model():
        pyro.sample("z", dist.Beta(1.0, 1.0))

    guide = bbb.AutoSoftplusNormal(model)
    guide()
    guide.loc("z").fill_(20.0)
    site = poutine.trace(guide).get_trace().nodes["z"]
    assert site["value"].item() == pytest.approx(1.0, abs=1e-6)
    # ln N + 20 up to the noise, of which 6 deviations cost 18 nats: false alarm 2 in a billion
    at_mean = scipy.stats.norm(0, guide.scale("z").item()).logpdf(0) + 20
    assert at_mean - 19 < site["fn"].log_prob(site["value"]).item() < at_mean + 1


def test_medians_and_quantiles_are_scipys():
    _, guide = make(latent_noise(), init_rho=0.4)
    guide.loc("likelihood.scale").fill_(-0.7)
    levels = [0.01, 0.5, 0.9]
    quantiles = guide.quantiles(levels)
    assert list(quantiles) == list(guide.median()) == guide.site_names
    sigma = guide.scale("likelihood.scale").item()
    noise = scipy.stats.lognorm(s=sigma, scale=math.exp(-0.7))
    assert quantiles["likelihood.scale"].tolist() == pytest.approx(noise.ppf(levels), rel=1e-5)
    assert guide.median()["likelihood.scale"].item() == pytest.approx(math.exp(-0.7), rel=1e-6)
    weights = scipy.stats.norm(guide.loc(KERNEL).numpy(), guide.scale(KERNEL).numpy())
    for level, quantile in zip(levels, quantiles[KERNEL], strict=True):
        torch.testing.assert_close(quantile.double(), torch.tensor(weights.ppf(level)))
    assert torch.equal(guide.median()[KERNEL], guide.loc(KERNEL))


def test_draws_of_the_posterior_have_its_moments_and_are_independent():
    _, guide = make(latent_noise(), init_rho=0.4)
    draws = guide.sample_posterior(20_000)
    assert {name: tuple(d.shape) for name, d in draws.items()} == {
        name: (20_000, *guide.loc(name).shape) for name in guide.site_names
    }
    assert not any(draw.requires_grad for draw in draws.values())
    draws["likelihood.scale"] = draws["likelihood.scale"].log()
    z = torch.cat(
        [
            ((draw.double() - guide.loc(n)) / guide.scale(n)).flatten(1)
            for n, draw in draws.items()
            if n != "likelihood.scale"
        ]
        + [
            (draws["likelihood.scale"].double() - guide.loc("likelihood.scale")).unsqueeze(1)
            / guide.scale("likelihood.scale")
        ],
        dim=1,
    )  # [draws, 22], standard Normal and independent
    # 22 means and 253 second moments within 5.5 standard errors: false alarm below 1 in 90,000
    assert z.mean(0).abs().max() < 5.5 / math.sqrt(20_000)
    moments = (z.T @ z) / 20_000 - torch.eye(22)
    assert moments.abs().max() < 5.5 * math.sqrt(2 / 20_000)


# --- other models ---


def test_an_ordinary_pyro_function_reaches_its_exact_posterior():
    """Normal mean with known noise: posterior N(n xbar / (n + 1), 1 / (n + 1)), also in a plate."""
    y = torch.tensor([[0.3, 1.1, -0.4, 2.0], [5.0, 4.0, 3.0, 4.0]], dtype=torch.float64)  # [2, 4]

    def model(y):
        with pyro.plate("groups", 2, dim=-2):
            m = pyro.sample("m", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
            with pyro.plate("rows", y.shape[1], dim=-1):
                pyro.sample("y", dist.Normal(m, 1.0), obs=y)

    guide = bbb.AutoSoftplusNormal(model)
    with pytest.raises(RuntimeError, match="call it with the model's arguments"):
        guide.median()
    guide(y)
    assert guide.site_names == ["m"]
    assert guide.loc("m").shape == (2, 1)
    optim = bbb.JointOptim(torch.optim.Adam, {"lr": 0.1})
    elbo = TraceMeanField_ELBO(num_particles=200, vectorize_particles=True, max_plate_nesting=2)
    svi = SVI(model, guide, optim, elbo)
    for step in range(600):
        optim.set_lr(0.1 * 0.99**step)
        svi.step(y)
    # leaving the prior out would move the means by y.mean / 5, which is 0.15 and 0.8, and the
    # scales by 1/2 - 5^-1/2 = 0.05
    expected = y.sum(1, keepdim=True) / 5
    torch.testing.assert_close(guide.loc("m"), expected, atol=0.01, rtol=0)
    exact_scale = torch.full((2, 1), 5**-0.5, dtype=torch.float64)
    torch.testing.assert_close(guide.scale("m"), exact_scale, atol=0.01, rtol=0)
    assert guide.quantiles([0.1, 0.9])["m"].shape == (2, 2, 1)


def test_weights_declared_as_pyro_samples_by_hand_are_latents():
    class Net(PyroModule):
        def __init__(self):
            super().__init__()
            self.linear = PyroModule[nn.Linear](3, 1)
            self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))

        def forward(self, x):
            return self.linear(x)

    model = bbb.BayesianModel(Net(), bbb.likelihoods.Gaussian(), num_data=10)
    guide = bbb.AutoSoftplusNormal(model)
    assert guide.site_names == ["network.linear.weight"]
    bias = model.network.linear.bias.clone()
    bbb.fit(model, guide, data(), epochs=1, lr=0.1, progress=False)
    assert not torch.equal(model.network.linear.bias, bias)  # an ordinary parameter, trained too


@pytest.mark.parametrize("discrete", [dist.Bernoulli(0.5), dist.Poisson(2.0)])
def test_discrete_latents_are_refused_by_name(discrete):
    def model():
        pyro.sample("flag", discrete)

    with pytest.raises(ValueError, match="latent 'flag' is discrete"):
        bbb.AutoSoftplusNormal(model)()


def test_a_subsampled_plate_is_refused():
    def model():
        with pyro.plate("rows", 10, subsample_size=3):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="'z' is in a subsampled plate"):
        bbb.AutoSoftplusNormal(model)()


# --- the weight of the KL ---


def test_kl_weight_reaches_the_guide_by_name_and_by_position():
    _, guide = make(latent_noise())
    x, y = data()
    calls = [((x, y), 1.0), ((x, y, 0.2), 0.2), ((x,), 1.0)]
    scales = [(poutine.trace(guide).get_trace(*args), expected) for args, expected in calls]
    scales.append((poutine.trace(guide).get_trace(x, y, kl_weight=0.3), 0.3))
    scales.append((poutine.trace(guide).get_trace(x, y=y, kl_weight=0.4), 0.4))
    for trace, expected in scales:
        assert {trace.nodes[name]["scale"] for name in guide.site_names} == {expected}


def test_a_model_without_kl_weight_leaves_the_guide_unweighted():
    def model(x, weight):
        pyro.sample("z", dist.Normal(x, 1.0))

    trace = poutine.trace(bbb.AutoSoftplusNormal(model)).get_trace(torch.zeros(()), 0.5)
    assert trace.nodes["z"]["scale"] == 1.0


# --- pruned guides ---


def trained(**options):
    model, guide = make(latent_noise(), **options)
    bbb.fit(model, guide, data(), epochs=2, lr=0.1, progress=False)
    return model, guide


def snapshot(guide):
    return {name: value.clone() for name, value in guide.state_dict().items()}


def assert_unchanged(guide, before):
    assert guide.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())


@pytest.mark.parametrize("loss", ["trace", "mean_field"])
@pytest.mark.parametrize("optimizer", [None, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)])
def test_removed_weights_stay_exactly_0_in_further_training(loss, optimizer):
    model, guide = trained(prior=dist.Normal(0.0, 1.0))
    before = snapshot(guide)
    masks = {name: torch.rand_like(guide.loc(name)) < 0.5 for name in guide.weight_names[:2]}
    pruned = guide.without(masks)
    assert_unchanged(guide, before)
    options = {"optimizer": optimizer, "loss": loss, "lr": 0.01, "progress": False}
    history = bbb.fit(model, pruned, data(), epochs=3, **options)
    assert all(map(math.isfinite, history.loss))
    draws = pruned.sample_posterior(5)
    for name, mask in masks.items():
        assert mask.any() and not mask.all()
        for zero in (pruned.loc(name), pruned.scale(name), pruned.median()[name]):
            assert (zero[mask] == 0).all()
        assert (draws[name][:, mask] == 0).all()
        assert (pruned.loc(name)[~mask] != guide.loc(name)[~mask]).all()  # the others train on
        assert (pruned.scale(name)[~mask] > 0).all()
    names = pruned.weight_names[2:]
    assert all((pruned.scale(name) > 0).all() for name in names)
