# SPDX-License-Identifier: Apache-2.0
"""Ensembles: whose turn it is, what each member learns, and how their draws mix."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

import pyro_bbb as bbb
from pyro_bbb.guides import _ensemble, _mean_field
from tests._support.guide_names import ANY_MODEL

KERNEL = "network.fc1.weight"


def make(guide="delta", size=3, likelihood=None, **options):
    network = bbb.BayesianMLP([3, 4, 1], prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, likelihood or bbb.likelihoods.Gaussian(0.5), num_data=20)
    return model, bbb.guides.make("ensemble", model, size=size, guide=guide, **options)


def data():
    x = torch.randn(20, 3)
    return x, x.sum(1)


def snapshot(guide):
    return {name: value.detach().clone() for name, value in guide.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- starts ---


@pytest.mark.parametrize("name", [name for name in ANY_MODEL if name != "ensemble"])
def test_every_member_starts_elsewhere_with_parameters_of_its_own(name):
    _, guide = make(name, size=4)
    assert len(guide.members) == guide.size == 4
    assert all(isinstance(member, bbb.guides.GUIDES[name]) for member in guide.members)
    starts = [torch.cat([p.flatten() for p in member.parameters()]) for member in guide.members]
    assert torch.pdist(torch.stack(starts).detach()).min() > 0.1
    assert len({id(p) for p in guide.parameters()}) == 4 * len(list(guide.members[0].parameters()))
    assert guide.site_names == guide.members[0].site_names


def test_members_for_a_converted_network_do_not_all_start_at_its_weights():
    network = bbb.bayesianize(torch.nn.Sequential(torch.nn.Linear(3, 1)))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(), num_data=20)
    first, second = bbb.guides.ensemble(model, 2).members
    assert not torch.equal(*(member.median()["network.0.weight"] for member in (first, second)))


@pytest.mark.parametrize("name", ["delta", "laplace"])
def test_points_that_start_alike_are_refused(name):
    with pytest.raises(ValueError, match="init_loc must give each member different initial values"):
        make(name, init_loc=0.1)
    make(name, size=1, init_loc=0.1)


# --- turns ---


def test_calls_go_round_the_members():
    model, guide = make()
    args = data()
    medians = [member.median()[KERNEL] for member in guide.members]
    for number in range(7):
        assert torch.equal(guide(*args)[KERNEL], medians[number % 3])


@pytest.mark.parametrize("particles", [1, 2])
def test_a_step_of_fit_trains_each_member_as_if_alone(particles):
    """A member's gradient is divided by the size; the rate of SGD is multiplied by it."""
    model, guide = make(size=3)
    args = data()
    alone = [copy.deepcopy(member) for member in guide.members]
    options = {"optimizer": torch.optim.SGD, "epochs": 3, "batch_size": 8, "seed": 1}
    options |= {"lr_schedule": "constant", "progress": False, "num_particles": particles}
    history = bbb.fit(model, guide, args, lr=3e-3, **options)
    losses = []
    for member, expected in zip(guide.members, alone, strict=True):
        losses.append(bbb.fit(model, expected, args, lr=1e-3, **options).loss)
        for a, b in zip(member.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    means = torch.tensor(losses).mean(0)
    torch.testing.assert_close(torch.tensor(history.loss), means, rtol=1e-5, atol=1e-5)


def test_raw_svi_trains_all_members_of_a_step_with_as_many_particles():
    model, guide = make("softplus_normal")
    before, args = snapshot(guide), data()
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO(num_particles=3))
    svi.step(*args)
    moved = snapshot(guide)
    assert not any(torch.equal(moved[name], before[name]) for name in moved)
    assert len(pyro.get_param_store()) == 0


def test_the_weight_of_the_kl_counts_once():
    model, guide = make("softplus_normal", size=1)
    member, args = guide.members[0], data()
    for weight in (0.0, 0.3, 1.0):
        losses = []
        for candidate in (guide, member):
            pyro.set_rng_seed(2)
            losses.append(Trace_ELBO().loss(model, candidate, *args, weight))
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert bbb.guides.weighs_kl(guide)


# --- draws ---


def test_draws_are_spread_evenly_and_in_turn():
    _, guide = make()
    medians = torch.stack([member.median()[KERNEL] for member in guide.members])
    for count in (1, 2, 3, 4, 8):
        draws = guide.sample_posterior(count)
        assert list(draws) == guide.site_names
        assert torch.equal(draws[KERNEL], medians[torch.arange(count) % 3])


def test_predictions_average_the_members_evenly_however_they_are_chunked(monkeypatch):
    model, guide = make()
    x, _ = data()
    apart = torch.stack([bbb.predict_mean(model, member, x).mean for member in guide.members])
    for chunk in (2**24, 1, 200):
        monkeypatch.setattr("pyro_bbb.prediction._draws.SAMPLE_CHUNK", chunk)
        prediction = bbb.predict(model, guide, x, num_samples=6)
        torch.testing.assert_close(prediction.mean, apart.mean(0))


@pytest.mark.parametrize("verb", ["median", "predict_mean", "to_module"])
def test_there_is_no_single_centre(verb):
    model, guide = make()
    x, _ = data()
    verbs = {
        "median": guide.median,
        "predict_mean": lambda: bbb.predict_mean(model, guide, x),
        "to_module": lambda: bbb.to_module(model, guide),
    }
    with pytest.raises(TypeError, match="an ensemble has no single centre; use predict, or one of"):
        verbs[verb]()


# --- members that are approximated, copies ---


def test_laplace_members_are_approximated_at_the_end_of_fit():
    model, guide = make("laplace", size=2)
    args = data()
    with pytest.raises(RuntimeError, match="still a point"):
        guide.sample_posterior(4)
    bbb.fit(model, guide, args, epochs=2, progress=False)
    alone = copy.deepcopy(guide.members[1])
    alone.approximate(args)
    torch.testing.assert_close(guide.members[1].parts[0].scale_tril, alone.parts[0].scale_tril)
    assert guide.sample_posterior(4)[KERNEL].shape == (4, 4, 3)
    history = bbb.fit(model, guide, args, epochs=1, progress=False)  # from the points on
    assert history.log_guide == [0.0]


@pytest.mark.parametrize("name", ["delta", "softplus_normal", "flow", "laplace"])
def test_copies_are_independent_and_leave_the_original_working(name):
    model, guide = make(name, size=2)
    args = data()
    options = {"epochs": 1, "lr": 0.1, "progress": False}
    bbb.fit(model, guide, args, **options)
    before = snapshot(guide)
    twin, sent = copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))
    assert all(member.model is model for member in (*guide.members, *twin.members))
    assert same(snapshot(twin), before) and same(snapshot(sent), before)
    bbb.fit(model, twin, args, **options)
    assert same(snapshot(guide), before) and not same(snapshot(twin), before)
    bbb.fit(model, guide, args, **options)
    fresh = bbb.guides.ensemble(model, 2, name)
    fresh.load_state_dict(guide.state_dict())
    assert same(snapshot(fresh), snapshot(guide))


def test_latents_found_at_the_first_call_belong_to_every_member():
    def model(x):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(z, 1.0), obs=x)

    guide = bbb.guides.ensemble(model, 2, "softplus_normal", init_loc=lambda site: site["value"])
    guide(torch.zeros(3))
    assert [member.site_names for member in guide.members] == [["z"], ["z"]]
    assert guide.sample_posterior(4)["z"].shape == (4,)


def same_in_every_draw(loc, rho, noise):
    """A draw whose noise depends on a weight's place in the vector alone."""
    return REPARAMETERIZE(loc, rho, torch.sin(3.0 * torch.arange(noise.shape[-1])).expand_as(noise))


REPARAMETERIZE = _mean_field.reparameterize


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("particles", [1, 2])
def test_members_trained_at_once_are_those_trained_alone(monkeypatch, engine, particles):
    for module in (_mean_field, _ensemble):
        monkeypatch.setattr(module, "reparameterize", same_in_every_draw)
    model, guide = make("softplus_normal")
    alone, pairs = [copy.deepcopy(member) for member in guide.members], data()
    options = {"epochs": 5, "batch_size": 7, "seed": 1, "lr": 0.01, "num_particles": particles}
    bbb.fit(model, guide, pairs, engine=engine, progress=False, **options)
    for member, expected in zip(guide.members, alone, strict=True):
        bbb.fit(model, expected, pairs, engine=engine, progress=False, **options)
        for a, b in zip(member.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
