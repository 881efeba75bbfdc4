# SPDX-License-Identifier: Apache-2.0
"""The probabilistic program: its log-densities, its weighting of the KL, its own parameters."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam
from torch import nn

from pyro_bbb import AutoSoftplusNormal, BayesianMLP, BayesianModel
from pyro_bbb.likelihoods import Categorical, Gaussian
from pyro_bbb.priors import Prior
from pyro_bbb.training._kl_schedule import KLSchedule

N = 23
F64 = torch.float64


class PartlyBayesian(PyroModule):
    """A latent, a `PyroParam`, a plain parameter, and a plain module of parameters."""

    def __init__(self, value=1.0):
        super().__init__()
        self.weight = PyroSample(dist.Normal(0.0, 1.0).expand([2, 2]).to_event(2))
        self.gain = PyroParam(torch.tensor(value), constraint=dist.constraints.positive)
        self.offset = nn.Parameter(torch.tensor(value))
        self.last = nn.Linear(2, 1)
        nn.init.constant_(self.last.weight, value)

    def forward(self, x):
        return self.last(self.gain * x @ self.weight + self.offset)


def regression(num_data=N, dtype=torch.float32, network=None, likelihood=None):
    network = network or BayesianMLP([2, 3, 1])
    model = BayesianModel(network, likelihood or Gaussian(0.3), num_data).to(dtype)
    x = torch.randn(num_data, 2, dtype=dtype)
    return model, x, torch.randn(num_data, 1, dtype=dtype)


def get_traces(model, *args, **kwargs):
    trace = poutine.trace(model).get_trace(*args, **kwargs)
    trace.compute_log_prob()
    return trace


def latent_sites(trace):
    return {n: s for n, s in trace.iter_stochastic_nodes() if n not in ("data", "obs")}


def values(trace):
    return {name: site["value"].detach() for name, site in latent_sites(trace).items()}


# --- the loss ---


def test_the_joint_density_is_prior_plus_likelihood():
    model, x, y = regression(dtype=F64)
    trace = get_traces(model, x, y)
    draws = values(trace)
    prior = dist.Normal(0.0, 1.0)  # the default
    log_prior = sum(prior.log_prob(value).sum() for value in draws.values())
    w = {name.removeprefix("network."): value for name, value in draws.items()}
    hidden = (x @ w["fc1.weight"].T + w["fc1.bias"]).relu()
    mean = hidden @ w["fc2.weight"].T + w["fc2.bias"]
    log_likelihood = torch.distributions.Normal(mean, 0.3).log_prob(y).sum()
    torch.testing.assert_close(trace.log_prob_sum(), log_prior + log_likelihood)
    torch.testing.assert_close(trace.nodes["obs"]["log_prob_sum"], log_likelihood)


SCHEDULES = {
    "uniform": KLSchedule("uniform"),
    "blundell": KLSchedule("blundell"),
    "own": KLSchedule(lambda batch, num_batches: 2 * batch / (num_batches * (num_batches + 1))),
}


@pytest.mark.parametrize("batch_size", [1, 7, 100])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(
    ("objective", "scale"), [(Trace_ELBO, 0.3), (TraceMeanField_ELBO, dist.Gamma(3.0, 3.0))]
)
def test_minibatch_losses_add_up_to_the_full_data_loss(objective, scale, name, batch_size):
    prior = dist.Normal(0.0, 0.8)
    network = BayesianMLP([2, 3, 1], prior=prior)
    model, x, y = regression(dtype=F64, network=network, likelihood=Gaussian(scale))
    guide = AutoSoftplusNormal(model, init_rho=-1.0)
    drawn = poutine.trace(guide).get_trace(x, y)
    same_draws = poutine.replay(guide, trace=drawn)

    def loss(x, y, kl_weight):
        return objective().loss(model, same_draws, x, y, kl_weight)

    batches = list(zip(x.split(batch_size), y.split(batch_size), strict=True))
    weights = [
        SCHEDULES[name].weight(batch=i, num_batches=len(batches), batch_size=len(xb), num_data=N)
        for i, (xb, _) in enumerate(batches, start=1)
    ]
    losses = [loss(xb, yb, weight) for (xb, yb), weight in zip(batches, weights, strict=True)]
    assert math.fsum(losses) == pytest.approx(loss(x, y, 1.0), rel=1e-12)


def test_with_the_prior_as_guide_and_no_data_the_negative_elbo_is_zero():
    model, x, y = regression(likelihood=Gaussian(dist.Gamma(3.0, 3.0)))
    prior = poutine.block(model, hide=["obs", "data"])  # draws all latents, weighted as they are
    assert Trace_ELBO().loss(model, prior, x, y) > 1
    for kl_weight in (1.0, 0.25, 0.0):
        assert Trace_ELBO().loss(prior, prior, x, y, kl_weight) == 0


# --- kl_weight ---


@pytest.mark.parametrize("kl_weight", [0.25, torch.tensor(3.0)])
def test_the_weight_scales_latents_only(kl_weight):
    model, x, y = regression(likelihood=Gaussian(dist.Gamma(3.0, 3.0)))
    plain = get_traces(model, x, y)
    fixed = poutine.condition(model, values(plain))
    weighted = get_traces(poutine.replay(model, trace=plain), x, y, kl_weight)
    assert len(latent_sites(weighted)) == 5
    for name, site in latent_sites(weighted).items():
        expected = float(kl_weight) * plain.nodes[name]["log_prob_sum"]
        torch.testing.assert_close(site["log_prob_sum"], expected)
        torch.testing.assert_close(
            site["unscaled_log_prob"].sum(), plain.nodes[name]["log_prob_sum"]
        )
    observed = get_traces(fixed, x, y, kl_weight).nodes["obs"]
    assert observed["scale"] == 1
    assert torch.equal(observed["log_prob_sum"], plain.nodes["obs"]["log_prob_sum"])


@pytest.mark.parametrize("kl_weight", [0, torch.tensor(0.0)])
def test_a_weight_of_zero_leaves_the_likelihood_alone(kl_weight):
    model, x, y = regression()
    plain = get_traces(model, x, y)
    trace = get_traces(poutine.replay(model, trace=plain), x, y, kl_weight)
    assert trace.log_prob_sum() == plain.nodes["obs"]["log_prob_sum"]
    assert latent_sites(trace).keys() == latent_sites(plain).keys()


# --- observations ---


def test_without_targets_the_observations_are_drawn():
    model, x, _ = regression()
    trace = poutine.trace(model).get_trace(x)
    assert not trace.nodes["obs"]["is_observed"]
    assert trace.nodes["obs"]["value"].shape == (N, 1)
    assert trace.nodes["_RETURN"]["value"] is trace.nodes["obs"]["value"]
    weights = values(trace)
    fixed = poutine.condition(model, weights)
    draws = torch.stack([fixed(x) for _ in range(400)])
    # 23 means and one pooled deviation, 6 standard errors: false-alarm rate below 1e-7
    mean = model_mean(model, weights, x)
    assert ((draws.mean(0) - mean).abs() < 6 * 0.3 / math.sqrt(400)).all()
    assert (draws - mean).std().item() == pytest.approx(0.3, rel=6 / math.sqrt(2 * 400 * N))


def model_mean(model, weights, x):
    with poutine.condition(data=weights):
        return model.predictive(x)["loc"].detach()


def test_the_network_runs_outside_the_data_plate():
    seen = []

    class Probe(PyroModule):
        def forward(self, x):
            with poutine.trace() as trace:
                pyro.sample("probe", dist.Normal(0.0, 1.0))
            seen.append(trace.trace.nodes["probe"]["cond_indep_stack"])
            return x

    model, x, y = regression(network=Probe())
    model(x, torch.randn(N, 2))
    assert seen == [()]


# --- parameters of one's own (two models of one class, Pyro's default settings) ---


def two_models():
    torch.manual_seed(0)
    return [
        regression(network=PartlyBayesian(value), likelihood=Gaussian.learned(value))[0]
        for value in (1.0, 2.0)
    ]


def state(module):
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_state(module, expected, equal=True):
    actual = state(module)
    assert actual.keys() == expected.keys() and actual
    for name, value in actual.items():
        assert torch.equal(value, expected[name]) == equal, name


def steps_of_raw_svi(model, guide, x, y):
    svi = SVI(model, guide, Adam({"lr": 0.01}), Trace_ELBO())
    for _ in range(3):
        svi.step(x, y)


def steps_of_elbo_module(model, guide, x, y):
    elbo = Trace_ELBO()(model, guide)
    optimizer = torch.optim.Adam(elbo.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        elbo(x, y).backward()
        optimizer.step()


@pytest.mark.parametrize("steps", [steps_of_raw_svi, steps_of_elbo_module])
def test_two_models_keep_their_own_parameters(steps):
    first, second = two_models()
    guides = [AutoSoftplusNormal(model, init_rho=-1.0) for model in (first, second)]
    x, y = torch.randn(N, 2), torch.randn(N, 1)
    before = [state(module) for module in (first, guides[0], second, guides[1])]
    assert len(before[0]) == 5  # gain, offset, weight and bias of `last`, the scale
    assert not any(torch.equal(before[0][k], before[2][k]) for k in before[0] if "bias" not in k)
    steps(first, guides[0], x, y)
    assert_state(first, before[0], equal=False)
    assert_state(guides[0], before[1], equal=False)
    assert_state(second, before[2])
    assert_state(guides[1], before[3])
    after = [state(module) for module in (first, guides[0])]
    steps(second, guides[1], x, y)
    assert_state(second, before[2], equal=False)
    assert_state(guides[1], before[3], equal=False)
    assert_state(first, after[0])
    assert_state(guides[0], after[1])
    assert not list(pyro.get_param_store())


def test_nothing_is_left_in_the_global_store():
    model = two_models()[0]
    x, y = torch.randn(N, 2), torch.randn(N, 1)
    pyro.get_param_store()["network.offset"] = torch.tensor(7.0)  # of somebody else
    model(x, y)
    poutine.trace(model).get_trace(x, y)
    model.predictive(x)
    model.check(x, y)
    with pytest.raises(ValueError, match="expected y of shape"):
        model(x, torch.randn(N, 2))
    assert dict(pyro.get_param_store().items()) == {"network.offset": torch.tensor(7.0)}
    assert model.network.offset == 1.0


def test_raw_svi_trains_the_parameters_of_a_prior():
    class Learned(Prior):
        def __init__(self):
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(()))

        def forward(self, module, name, shape):
            return dist.Normal(0.0, self.log_scale.exp()).expand(shape).to_event(len(shape))

    prior = Learned()  # reached by no attribute of a Pyro module
    model, x, y = regression(network=BayesianMLP([2, 1], prior=prior))
    steps_of_raw_svi(model, AutoSoftplusNormal(model), x, y)
    assert prior.log_scale != 0


def test_a_raw_param_statement_in_the_network_is_refused():
    class Raw(PyroModule):
        def forward(self, x):
            return x * pyro.param("raw", torch.tensor(1.0))

    model, x, _ = regression(network=Raw())
    with pytest.raises(ValueError, match=r"pyro.param\('raw'\) inside the network .* PyroParam"):
        model(x, torch.randn(N, 2))
    assert not list(pyro.get_param_store())


# --- checks ---


class Convolution(PyroModule):
    def __init__(self):
        super().__init__()
        self.kernel = PyroSample(dist.Normal(0.0, 1.0).expand([1, 1, 3, 3]).to_event(4))

    def forward(self, x):
        return torch.nn.functional.conv2d(x, self.kernel).flatten(1)


@pytest.mark.parametrize(
    ("network", "shape", "message"),
    [
        (BayesianMLP([2, 3]), (9, 3), r"expected x of shape \[batch, 2\], got \[2, 3\]"),
        (BayesianMLP([2, 3]), (9,), r"expected x of shape \[batch, 2\]"),
        (Convolution(), (9, 5, 4, 4), r"x of shape \[9, 5, 4, 4\] and torch.float32 does not fit"),
        (PartlyBayesian(), (9, 5), r"x of shape \[9, 5\] and torch.float32 does not fit"),
    ],
)
def test_inputs_that_do_not_fit_the_network_are_refused(network, shape, message):
    with pytest.raises(ValueError, match=message):
        BayesianModel(network, Gaussian(), 9).check(torch.randn(shape))


def test_a_check_of_data_that_fit_changes_nothing():
    network = nn.Sequential(BayesianMLP([2, 3]), nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval())
    model = BayesianModel(network, Categorical(), 9)
    x, y = torch.randn(9, 2), torch.randint(3, (9,))
    modes = {name: module.training for name, module in model.named_modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    random = torch.get_rng_state()
    with poutine.trace() as trace:
        model.check(x, y)
    assert not trace.trace.stochastic_nodes and not trace.trace.param_nodes
    assert torch.equal(torch.get_rng_state(), random)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert modes["network.1"] and not modes["network.2"]
    assert all(torch.equal(buffer, buffers[k]) for k, buffer in model.named_buffers())


def test_all_targets_are_checked_not_only_those_of_the_first_examples():
    model = BayesianModel(BayesianMLP([2, 3]), Categorical(), 9)
    y = torch.zeros(9, dtype=torch.long)
    model.check(torch.randn(9, 2), y)
    y[-1] = 3
    with pytest.raises(ValueError, match=r"labels in \[0, 2\], got 3"):
        model.check(torch.randn(9, 2), y)
