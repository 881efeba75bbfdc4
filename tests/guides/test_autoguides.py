# SPDX-License-Identifier: Apache-2.0
"""Pyro's automatic guides: what goes wrong with each of them, shown first, and not with ours."""

import copy
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import scipy.stats
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO, autoguide
from pyro.infer.autoguide.initialization import init_to_value
from pyro.nn import PyroModule
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.elbo import minibatch_elbo

STOCK = {
    "normal": autoguide.AutoNormal,
    "low_rank": autoguide.AutoLowRankMultivariateNormal,
    "full_rank": autoguide.AutoMultivariateNormal,
    "flow": autoguide.AutoIAFNormal,
    "delta": autoguide.AutoDelta,
    "laplace": autoguide.AutoLaplaceApproximation,
}
NAMES = list(STOCK)
ALL = [*NAMES, "softplus_normal"]
KERNEL, SCALE = "network.fc1.weight", "likelihood.scale"


def make_model(likelihood=None, *, sizes=(3, 4, 1), n=10):
    likelihood = likelihood or bbb.likelihoods.Gaussian(dist.LogNormal(-1.0, 0.5))
    prior = dist.Normal(0.0, 1.0)
    return bbb.BayesianModel(bbb.BayesianMLP(list(sizes), prior=prior), likelihood, num_data=n)


def make(name, **options):
    model = make_model()
    return model, bbb.guides.make(name, model, **options)


def data(n=10):
    x = torch.randn(n, 3)
    return x, x.sum(1)


def snapshot(guide):
    return {name: value.clone() for name, value in guide.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def by_svi(model, guide, args, steps=1, lr=0.05):
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), Trace_ELBO())
    for _ in range(steps):
        svi.step(*args)


def by_module(model, guide, args):
    loss = Trace_ELBO()(model, guide)
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.05)
    loss(*args).backward()
    optimizer.step()


# --- separate parameters ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("train", [by_svi, by_module])
def test_our_guides_are_independent_also_when_trained_in_turn(name, train):
    model, first = make(name)
    second, args = bbb.guides.make(name, model), data()
    for moving, resting in ((first, second), (second, first), (first, second)):
        unpruned, before = snapshot(resting), snapshot(moving)
        train(model, moving, args)
        assert same(snapshot(resting), unpruned)
        assert not same(snapshot(moving), before)
    assert len(pyro.get_param_store()) == 0


# --- the weight of the KL ---


@pytest.mark.parametrize("name", STOCK)
def test_the_mean_field_loss_counts_the_densities_of_deltas(name):
    """No KL of these has a closed form, so that both losses are one, draw by draw."""
    model, guide = make(name)
    args, losses = data(), {}
    elbos = {"trace": Trace_ELBO(), "stock": TraceMeanField_ELBO()}
    elbos["ours"] = minibatch_elbo("mean_field", 1)
    for key, elbo in elbos.items():
        pyro.set_rng_seed(4)
        losses[key] = elbo.loss(model, guide, *args)
    assert losses["ours"] == pytest.approx(losses["trace"], rel=1e-5)
    biased = abs(losses["stock"] - losses["trace"]) > 1e-2
    assert biased == (name != "delta")  # of the latent scale's Jacobian; a Delta has none


# --- where they start ---


@pytest.mark.parametrize("name", ALL)
def test_every_form_of_init_loc_reaches_every_guide(name):
    net = nn.Module()
    net.fc1, net.fc2 = nn.Linear(3, 4), nn.Linear(4, 1)
    kernel = torch.randn(4, 3)
    forms = {
        "number": (0.25, torch.full((4, 3), 0.25)),
        "dict": ({"fc1.weight": kernel, SCALE: torch.tensor(0.2)}, kernel),
        "network": (net, net.fc1.weight.detach()),
        "function": (init_to_value(values={KERNEL: kernel}), kernel),
    }
    for form, (init_loc, expected) in forms.items():
        _, guide = make(name, init_loc=init_loc)
        centre = centre_of(name, guide)
        torch.testing.assert_close(centre[KERNEL], expected, rtol=1e-6, atol=1e-7)
        if form == "dict":
            assert centre[SCALE].item() == pytest.approx(0.2, rel=1e-5)


def centre_of(name, guide):
    """The initial point by site name; a flow has no median but starts around its loc."""
    if name != "flow":
        return guide.median()
    return {
        site: draws[0] for site, draws in guide.latents.constrain(guide.loc.detach()[None]).items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_networks_weights_are_the_start(name):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    network = bbb.bayesianize(net, prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(), num_data=10)
    centre = centre_of(name, bbb.guides.make(name, model))
    for site, parameter in net.named_parameters():
        torch.testing.assert_close(centre[f"network.{site}"], parameter.detach())


@pytest.mark.parametrize("name", ["normal", "low_rank", "full_rank", "flow"])
def test_init_scale_is_the_standard_deviation_at_the_start(name):
    """4,000 draws of 22 latents: 6 standard errors, a false alarm once in 10 million runs."""
    softplus = math.log1p(math.exp(-5.0))
    for options, expected in (({}, softplus), ({"init_scale": 0.3}, 0.3)):
        _, guide = make(name, **options)
        draws = guide.sample_posterior(4000)
        draws[SCALE] = draws[SCALE].log()
        spread = torch.cat([draw.std(0).flatten() for draw in draws.values()])
        if name == "low_rank":  # its low-rank part is random: right on average over the latents
            assert spread.square().mean().sqrt().item() == pytest.approx(expected, rel=0.25)
        else:
            assert (spread / expected - 1).abs().max() < 6 / math.sqrt(8000)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("full_rank", (100, 163, 1), r"16,627 latents needs 276,457,129 parameters, 1.0 GiB.*low_"),
        ("flow", (100, 100, 1), r"flow for 10,201 latents needs 312,181,203 parameters, 1.2 GiB"),
        ("laplace", (100, 41, 1), r"at most 4,096 latents in one matrix, got 4,183; use .*'kron'"),
    ],
)
def test_a_model_too_large_for_a_guide_is_refused_before_its_memory_is_taken(name, sizes, message):
    model = make_model(bbb.likelihoods.Gaussian(), sizes=sizes)
    with pytest.raises(ValueError, match=message):
        bbb.guides.make(name, model)


# --- draws, medians, quantiles ---


@pytest.mark.parametrize("name", ["normal", "low_rank", "full_rank"])
def test_draws_medians_and_quantiles_are_those_of_one_normal(name):
    model, guide = make(name, init_scale=0.5)
    by_svi(model, guide, data(), steps=20)  # correlated by now
    draws = guide.sample_posterior(20_000)
    levels = [0.05, 0.5, 0.9]
    quantiles, median = guide.quantiles(levels), guide.median()
    assert list(draws) == list(median) == list(quantiles) == guide.site_names
    for site, draw in draws.items():
        assert draw.shape == (20_000, *median[site].shape) and not draw.requires_grad
        for level, quantile in zip(levels, quantiles[site], strict=True):
            # 66 shares, 5 standard errors: a false alarm once in 26,000 seeds
            share = (draw <= quantile).double().mean(0)
            tolerance = 5 * math.sqrt(level * (1 - level) / 20_000)
            assert (share - level).abs().max() < tolerance
        torch.testing.assert_close(quantiles[site][1], median[site])
    normal = quantiles[KERNEL]
    sigma = (normal[2] - normal[1]) / scipy.stats.norm.ppf(0.9)
    lower = normal[1] + sigma * scipy.stats.norm.ppf(0.05)
    torch.testing.assert_close(normal[0], lower, rtol=1e-4, atol=1e-5)


def test_the_draws_of_a_point_are_the_point():
    _, guide = make("delta")
    median, draws = guide.median(), guide.sample_posterior(3)
    for site, draw in draws.items():
        assert draw.shape == (3, *median[site].shape)
        assert torch.equal(draw, median[site].expand_as(draw))
        assert torch.equal(guide.quantiles([0.1, 0.9])[site], draw[:2])


@pytest.mark.parametrize("name", ["normal", "low_rank", "full_rank", "flow", "delta"])
def test_a_guide_of_a_plain_model_says_that_it_never_ran(name):
    guide = bbb.guides.make(name, lambda: pyro.sample("z", dist.Normal(0.0, 1.0).expand([2])))
    for method in (lambda: guide.sample_posterior(2), lambda: guide.median()):
        with pytest.raises((RuntimeError, TypeError), match="no latents yet|no closed form"):
            method()
    guide()
    assert guide.sample_posterior(5)["z"].shape == (5, 2)


# --- the flow ---


def test_the_density_of_a_flows_draw_is_that_of_the_change_of_variables():
    _, guide = make("flow", num_transforms=2, hidden_dim=30, init_scale=0.5)
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    guide.double()
    noise = torch.randn(22, dtype=torch.float64)

    def carried(e):
        for transform in guide.get_transform():
            e = transform(e)
        return e

    jacobian = torch.autograd.functional.jacobian(carried, noise)
    expected = dist.Normal(0.0, 1.0).log_prob(noise).sum() - torch.linalg.slogdet(jacobian)[1]
    posterior = guide.get_posterior()
    value = noise
    for transform in posterior.transforms:
        value = transform(value)
    assert posterior.log_prob(value).item() == pytest.approx(expected.item(), rel=1e-9)
    correlated = (jacobian @ jacobian.T).fill_diagonal_(0).abs().max()
    assert correlated > 1e-3


def test_a_flow_has_no_medians():
    _, guide = make("flow")
    for method in (guide.median, lambda: guide.quantiles([0.5])):
        with pytest.raises(TypeError, match="marginals have no closed form; use draws"):
            method()


def test_a_flow_needs_two_latents():
    with pytest.raises(ValueError, match="flow needs at least 2 latents, the model has 1"):
        bbb.guides.Flow(lambda: pyro.sample("z", dist.Normal(0.0, 1.0)))()


@pytest.mark.parametrize("name", ["flow", "stock"])
def test_sticking_the_landing_refuses_a_flow(name):
    model = make_model()
    guide = autoguide.AutoIAFNormal(model, [60]) if name == "stock" else bbb.guides.Flow(model)
    with pytest.raises(ValueError, match="latent' is a flow.*use the estimator 'reparam'"):
        bbb.fit(model, guide, data(), epochs=1, estimator="stl", progress=False)


# --- copies ---


@pytest.mark.parametrize("name", ALL)
def test_copying_or_pickling_leaves_a_guide_as_it_is(name):
    model, guide = make(name)
    args = data()
    by_svi(model, guide, args, steps=2)  # what a call leaves in it is there
    before = snapshot(guide)
    twin, sent = copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))
    assert guide.model is twin.model is model
    by_svi(model, twin, args)
    assert same(snapshot(guide), before) and not same(snapshot(twin), before)
    unpruned = snapshot(twin)
    by_svi(model, guide, args)
    assert same(snapshot(twin), unpruned) and same(snapshot(sent), before)
    assert list(centre_of(name, sent)) == guide.site_names
    both = copy.deepcopy((model, guide))
    assert both[1].model is both[0]


# --- latents sampled in the forward pass ---


class Shifted(PyroModule):
    def __init__(self):
        super().__init__()
        self.fc = bbb.BayesianLinear(3, 1)

    def forward(self, x):
        return self.fc(x) + pyro.sample("shift", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("train", ["fit", "optimiser made before the first call"])
def test_latents_found_at_the_first_call_are_trained_with_the_others(name, train):
    model = bbb.BayesianModel(Shifted(), bbb.likelihoods.Gaussian(0.1), num_data=40)
    guide = bbb.guides.make(name, model)
    assert guide.site_names == ["network.fc.weight", "network.fc.bias"]
    x = torch.randn(40, 3)
    args = x, x.sum(1) + 3
    if train == "fit":
        bbb.fit(model, guide, args, epochs=80, lr=0.1, progress=False)
    else:
        held = list(guide.parameters())
        guide(*args)
        after = {id(parameter) for parameter in guide.parameters()}
        assert {id(parameter) for parameter in held} <= after  # the optimiser's are still it
        by_svi(model, guide, args, steps=80, lr=0.1)
    assert guide.site_names == ["network.fc.weight", "network.fc.bias", "shift"]
    if name == "laplace" and train != "fit":
        guide.approximate(args)
    draws = guide.sample_posterior(50)
    offset = draws["network.fc.bias"][:, 0] + draws["shift"]
    assert offset.mean().item() == pytest.approx(3.0, abs=0.3)
    weight = draws["network.fc.weight"].mean(0)
    torch.testing.assert_close(weight, torch.ones(1, 3), atol=0.3, rtol=0)


@pytest.mark.parametrize("name", ["softplus_normal", *NAMES])
def test_a_start_for_such_latents_is_a_function_and_else_refused_with_the_way_out(name):
    model = bbb.BayesianModel(Shifted(), bbb.likelihoods.Gaussian(), num_data=10)
    with pytest.raises(ValueError, match=r"names \['shift'\].*start where a function of the site"):
        bbb.guides.make(name, model, init_loc={"shift": torch.tensor(2.0)})
    start = init_to_value(values={"shift": torch.tensor(2.0)})
    guide = bbb.guides.make(name, model, init_loc=start)
    guide(*data())
    assert centre_of(name, guide)["shift"].item() == 2.0


# --- vectorised particles ---


class Mixed(PyroModule):
    """A mean of the inputs whose weights have a bounded support."""

    def __init__(self, prior):
        super().__init__()
        self.weights = pyro.nn.PyroSample(prior)

    def forward(self, x):
        return x @ self.weights.reshape(3, -1)


BOUNDED = {
    "simplex": dist.Dirichlet(torch.tensor([2.0, 3.0, 4.0])),
    "simplexes": dist.Dirichlet(torch.full((1, 3), 2.0)).to_event(1),
    "sphere": dist.ProjectedNormal(torch.ones(3)),
    "interval": dist.Beta(torch.full((3,), 2.0), 2.0).to_event(1),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_a_point_on_any_support_is_trained_as_pyros_own(name):
    x, y = data()
    model = bbb.BayesianModel(Mixed(BOUNDED[name]), bbb.likelihoods.Gaussian(), num_data=10)
    init = {"network.weights": torch.tensor([0.6, 0.36, 0.64 if name == "interval" else 0.04])}
    if name == "sphere":
        init = {"network.weights": torch.tensor([0.6, 0.0, 0.8])}
    if name == "simplexes":
        init = {key: value.unsqueeze(0) for key, value in init.items()}
    points = []
    for guide in (
        bbb.guides.make("delta", model, init_loc=init),
        autoguide.AutoDelta(model, init_loc_fn=init_to_value(values=init)),
    ):
        pyro.clear_param_store()
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
        losses = [svi.step(x, y) for _ in range(20)]
        points.append((losses, guide.median(x, y)["network.weights"]))
    (ours, point), (stock, expected) = points
    assert ours == pytest.approx(stock, rel=1e-5) and ours[-1] < ours[0]
    assert torch.allclose(point, expected, atol=1e-5)
    assert bool(model.network._pyro_samples["weights"].support.check(point).all())
    assert (point - init["network.weights"]).abs().max() > 0.01


def test_a_support_without_a_bijection_is_refused_by_name():
    model = bbb.BayesianModel(Mixed(BOUNDED["sphere"]), bbb.likelihoods.Gaussian(), num_data=10)
    for name in ("softplus_normal", "normal", "full_rank"):
        with pytest.raises(ValueError, match=r"latent 'network.weights'.*Sphere.*make\('delta'"):
            bbb.guides.make(name, model)
