# SPDX-License-Identifier: Apache-2.0
"""Several draws of weights that lie side by side, at once, are those one after the other."""

import math
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb._handlers import flat_site
from pyro_bbb._handlers.particle_plate import PlateOfDraws, in_plate, plate_shape
from pyro_bbb._ops import reductions as _blocks
from pyro_bbb._ops.flat import FlatTensors
from pyro_bbb._ops.multi_sample import shared_by
from pyro_bbb._ops.reductions import Blocks, concatenated, over_block
from pyro_bbb._ops.reparameterize import draw_many
from pyro_bbb._ops.step_context import StepOptions, step_context
from pyro_bbb.distributions.detached import DetachedSample
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.estimators._sampled_weights import Draws
from pyro_bbb.training.objectives import NonFiniteError, recorded_elbo
from tests._support.flat_site_cases import COUNT, FC1, Seen, assert_alike, data, model_of

DRAWS = 5
# numbers that fit a block: one draw at a time, two with one left over, all
BLOCKS = {"one": 1, "two": 2 * COUNT, "all": 2**19}


pytestmark = pytest.mark.usefixtures("double", "unvalidated")


@pytest.fixture(params=BLOCKS.values(), ids=BLOCKS)
def some_at_a_time(request, monkeypatch):
    monkeypatch.setattr(_blocks, "FITS", request.param)


def make(prior=None, likelihood=None):
    model = model_of(prior, likelihood)
    return model, bbb.AutoSoftplusNormal(model, init_rho=-2.0)


# --- some at a time ---


@pytest.mark.parametrize("shape", [(), (5,), (5, 1), (2, 3)])
@pytest.mark.parametrize("count", [1, 2, 3, 100])
def test_blocks_are_all_vectors_in_their_order(shape, count):
    x = torch.randn(*shape, 4, 3)
    parts = Blocks(len(shape), count)(x)
    rows = [part.reshape(-1, 4, 3) for part in parts]
    assert max(len(each) for each in rows) <= count
    assert torch.equal(torch.cat(rows).reshape(x.shape), x)
    assert torch.equal(concatenated([each.sum((-2, -1)) for each in parts], shape), x.sum((-2, -1)))
    assert [part.shape for part in Blocks(2, count)(torch.empty(0, 1, 3))] == [(0, 3)]
    total = sum(over_block(each) if each.dim() > 2 else each for each in parts)
    torch.testing.assert_close(total, x.reshape(-1, 4, 3).sum(0))


def test_a_block_holds_what_fits(monkeypatch):
    monkeypatch.setattr(_blocks, "FITS", 12)
    assert Blocks.of(torch.empty(7, 1, 4)) == Blocks(2, 3)
    assert Blocks.of(torch.empty(7, 13)) == Blocks(1, 1)
    assert Blocks.of(torch.empty(7, 2, 3), 2) == Blocks(1, 2)
    assert Blocks.of(torch.empty(7, 0)).count == 12
    assert Blocks.of(torch.empty(7, 13, device="meta")).count == 7  # of a GPU's, all at once


# --- several vectors ---


def tensors():
    shapes = (4, 3), (4,), (2, 4), ()
    locs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    rhos = [(torch.randn(shape) - 2).requires_grad_() for shape in shapes]
    return locs, rhos, FlatTensors(torch.randn(DRAWS, 1, sum(x.numel() for x in locs)), locs)


def each_by_itself(locs, rhos, noise):
    """The same draws one after another: values, scales, log q and parts of each."""
    rows = [FlatTensors(row, locs) for row in noise.vector.flatten(0, 1)]
    return [draw_many(locs, rhos, row, shared_by("abcd", rhos)) for row in rows]


def test_several_vectors_hold_what_each_draws(some_at_a_time):
    locs, rhos, noise = tensors()
    value, scale, log_q, parts = draw_many(locs, rhos, noise)
    assert value.shape == noise.vector.shape and log_q.shape == (DRAWS, 1)
    for number, (one, its_scale, its_log_q, its_parts) in enumerate(
        each_by_itself(locs, rhos, noise)
    ):
        assert torch.equal(value[number, 0], one)
        assert torch.equal(scale.vector, its_scale.vector)
        torch.testing.assert_close(log_q[number, 0], its_log_q, rtol=1e-14, atol=0)
        for part, its in zip(parts, its_parts, strict=True):
            assert part.shape == (DRAWS, 1, *its.shape) and torch.equal(part[number, 0], its)
    places = {part.untyped_storage().data_ptr() for part in (value, *parts)}
    assert len(places) == 1


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("used", ["value", "scale", "log_q", "parts", "one part", "all"])
def test_their_gradient_is_the_sum_of_each(used, several, some_at_a_time):
    locs, rhos, noise = tensors()
    of_value, of_scale = torch.randn_like(noise.vector), torch.randn(noise.vector.shape[-1])
    of_log_q, of_parts = torch.randn(DRAWS, 1), [torch.randn(DRAWS, 1, *x.shape) for x in locs]

    def objective(value, scale, log_q, parts, weights):
        by_value, by_log_q, by_parts = weights
        terms = {
            "value": (value * by_value).sum(),
            "scale": (scale.vector * of_scale).sum(),
            "log_q": (by_log_q * log_q).sum(),
            "parts": sum((a * b).sum() for a, b in zip(parts, by_parts, strict=True)),
            "one part": (parts[1] * by_parts[1]).sum(),
        }
        return sum(terms.values()) if used == "all" else terms[used]

    def gradients(draws):
        for x in (*locs, *rhos):
            x.grad = None
        with step_context(StepOptions(several=several)):
            for drawn, weights in draws():
                objective(*drawn, weights).backward()
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in (*locs, *rhos)]

    def together():
        yield draw_many(locs, rhos, noise, shared_by("abcd", rhos)), (of_value, of_log_q, of_parts)

    def apart():
        for number, drawn in enumerate(each_by_itself(locs, rhos, noise)):
            weights = of_value[number, 0], of_log_q[number, 0], [x[number, 0] for x in of_parts]
            yield drawn, weights

    expected = gradients(apart)
    if used in ("scale", "all"):  # which is one tensor for all draws, and counts once
        sigmoid = [torch.sigmoid(rho).detach() for rho in rhos]
        for rho, slope, part in zip(
            expected[4:], sigmoid, FlatTensors(of_scale, locs).parts, strict=True
        ):
            rho -= (DRAWS - 1) * part * slope
    for found, other in zip(gradients(together), expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-12, atol=1e-13)


def test_a_gradient_handed_in_is_left_as_it_is(some_at_a_time):
    locs, rhos, noise = tensors()
    value, *_ = draw_many(locs, rhos, noise)
    given = torch.randn_like(value)
    before = given.clone()
    value.backward(given)
    assert torch.equal(given, before)


def test_the_score_of_draws_held_fixed_is_that_of_a_normal():
    locs, rhos, noise = tensors()
    value, scale, log_q, _ = draw_many(locs, rhos, noise)
    detached = DetachedSample(noise.vector, scale.vector, log_q)
    assert detached.batch_shape == (DRAWS, 1) and detached.event_shape == noise.vector.shape[-1:]
    value, weights = value.detach().requires_grad_(), torch.randn(DRAWS, 1)
    (detached.log_prob(value) * weights).sum().backward()
    loc = torch.cat([x.detach().flatten() for x in locs])
    other = value.detach().requires_grad_()
    normal = dist.Normal(loc, scale.vector.detach()).to_event(1).log_prob(other)
    (normal * weights).sum().backward()
    torch.testing.assert_close(detached.log_prob(value), normal, rtol=1e-12, atol=0)
    torch.testing.assert_close(value.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_a_mixture_of_numbers_sums_each_vector(dims, some_at_a_time):
    mixture = bbb.ScaleMixtureNormal(0.3, 1.2, 0.05)
    w = (torch.randn(DRAWS, 1, 7, 10) * 0.2).requires_grad_()
    shape = w.shape[w.dim() - dims :]
    found = mixture.expand(shape).to_event(dims).log_prob(w)
    expected = mixture.expand(w.shape).log_prob(w).sum(tuple(range(4 - dims, 4)) or ())
    torch.testing.assert_close(found, expected if dims else mixture.log_prob(w), rtol=1e-12, atol=0)
    weights = torch.randn(found.shape)
    (slope,) = torch.autograd.grad((found * weights).sum(), w, retain_graph=True)
    parameters = torch.tensor([0.3, 1.2, 0.05])
    other = bbb.ScaleMixtureNormal(*parameters).expand(shape).to_event(dims).log_prob(w)
    (expected,) = torch.autograd.grad((other * weights).sum(), w)
    torch.testing.assert_close(slope, expected, rtol=1e-10, atol=1e-12)


# --- one site in the plate of draws ---


def test_a_plate_of_draws_counts_each_site_as_it_is():
    weight, shapes = torch.tensor(0.3), []

    def model():
        shapes.append(plate_shape())
        with poutine.scale(scale=weight):
            pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    trace = poutine.trace(PlateOfDraws("draws", DRAWS, -2)(model)).get_trace()
    site = trace.nodes["w"]
    assert site["scale"] is not None and site["value"].shape == (DRAWS, 1, 3)
    trace.compute_log_prob()
    assert site["log_prob"].shape == (DRAWS, 1)
    expected = 0.3 * dist.Normal(0.0, 1.0).log_prob(site["value"]).sum(-1)
    torch.testing.assert_close(site["log_prob"], expected)
    assert shapes == [torch.Size([DRAWS, 1])] and plate_shape() == torch.Size() and not in_plate()


def test_of_other_plates_the_shape_is_unknown():
    with pyro.plate("draws", DRAWS, dim=-2):
        assert in_plate() and plate_shape() is None
    with PlateOfDraws("draws", DRAWS, -2), pyro.plate("others", 3, dim=-3):
        assert in_plate() and plate_shape() is None


def test_an_estimator_knows_each_weight_of_each_draw_by_its_place():
    _, guide = make()
    for rho in guide.rhos.parameters():
        rho.data.uniform_(-3, 0)
    with step_context(StepOptions(flat=True)), Draws() as draws, PlateOfDraws("draws", DRAWS, -2):
        values = guide(*data())
    assert len({value.untyped_storage().data_ptr() for value in values.values()}) == 1
    for name, value in values.items():
        for seen in value.flatten(0, 1):
            loc, scale = draws.find(seen).seen_as(seen)
            assert torch.equal(loc, guide.loc(name))
            torch.testing.assert_close(scale, guide.scale(name))
            if seen.dim() == 2:
                assert torch.equal(draws.find(seen.t()).seen_as(seen.t())[0], guide.loc(name).t())


@pytest.mark.parametrize("context", [bbb.flipout, bbb.local_reparameterization])
def test_an_estimator_around_several_draws_changes_no_mean(context):
    """At a scale of almost 0 they leave the loss of the means, for every weight of each draw."""
    model, guide = make()
    for rho in guide.rhos.parameters():
        rho.data.fill_(-40.0)
    elbo, found = recorded_elbo(None, DRAWS, vectorize=True), []
    for around in (nullcontext, context):
        with around():
            elbo.loss_and_grads(model, guide, *data()[:2], 0.2)
        found.append(elbo.take_parts().nll)
    assert found[0] == pytest.approx(found[1], rel=1e-9)


def test_latents_with_dimensions_of_their_own_count_each_draw_once():
    def model(kl_weight=1.0):
        for name in ("a", "b"):
            pyro.sample(name, dist.Normal(0.0, 1.0).expand([3]))

    guide = bbb.AutoSoftplusNormal(model, init_rho=-2.0)
    guide()
    kl = {}
    for vectorize in (False, True):
        elbo = recorded_elbo("mean_field", DRAWS, vectorize=vectorize)
        kl[vectorize] = elbo.loss_and_grads(model, guide)
        elbo.take_parts()
    assert kl[True] == pytest.approx(kl[False], rel=1e-12)


MERGED = {
    "mixture": lambda: make(),
    "Normal": lambda: make(dist.Normal(0.1, 0.7)),
    "default prior": lambda: make(bbb.priors.default_prior()),
}
APART = {
    "by layer": lambda: make({"fc1.*": dist.Normal(0.0, 1.0), "*": dist.Normal(0.0, 0.5)}),
    "learned mixture": lambda: make(bbb.priors.LearnedScaleMixture()),
    "Laplace": lambda: make(dist.Laplace(0.0, 1.0)),
    "tensors": lambda: make(bbb.ScaleMixtureNormal(*torch.tensor([0.5, 1.0, 0.1]))),
    "learned noise": lambda: make(likelihood=likelihoods.Gaussian.learned()),
}


@pytest.mark.parametrize("weight", [0.2, torch.tensor(0.2)])
@pytest.mark.parametrize("estimator", ["reparam", "stl"])
@pytest.mark.parametrize("name", MERGED)
def test_weights_of_one_prior_are_one_site(name, estimator, weight):
    model, guide = MERGED[name]()
    elbo = Seen(num_particles=DRAWS, vectorize_particles=True, max_plate_nesting=1)
    elbo.particles = []
    with ESTIMATORS[estimator]():
        elbo.loss_and_grads(model, guide, *data()[:2], weight)
    for trace in elbo.traces:
        latent = [name for name in trace.stochastic_nodes if name != "obs"]
        assert latent == [FC1] and len(trace.nodes[FC1]["members"]) == 4
        assert trace.nodes[FC1]["value"].shape == (DRAWS, 1, COUNT)


def as_each_tensor_would(noise):
    """What each tensor would draw by itself, within a plate too."""
    for part in noise.parts:
        part.copy_(torch.randn(part.shape))


@pytest.mark.parametrize("kind", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("name", [*MERGED, *APART])
def test_loss_and_gradients_are_those_of_pyros_own_objective(
    name, kind, some_at_a_time, monkeypatch
):
    monkeypatch.setattr(flat_site, "draw_noise", as_each_tensor_would)
    options = {"num_particles": DRAWS, "vectorize_particles": True, "max_plate_nesting": 1}

    def parts(_):
        model, guide = {**MERGED, **APART}[name]()
        return model, model, guide

    ours = recorded_elbo(kind, DRAWS, vectorize=True)
    assert_alike((ours, kind(**options)), parts, real="noise" in name)


FROZEN = {"nothing": (), "a mean": ("locs.network.fc1",), "a scale": ("rhos.network.fc2",)}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("kind", ["trace", "mean_field"])
@pytest.mark.parametrize("estimator", ["reparam", "stl"])
def test_at_once_is_one_after_another(estimator, kind, frozen, some_at_a_time, monkeypatch):
    rows = torch.randn(DRAWS, COUNT)
    left = list(rows)

    def given(noise):
        noise.vector.copy_(left.pop(0) if noise.vector.dim() == 1 else rows.unsqueeze(1))

    monkeypatch.setattr(flat_site, "draw_noise", given)
    found = []
    for vectorize in (False, True):
        pyro.set_rng_seed(0)
        model, guide = make()
        for name, parameter in guide.named_parameters():
            parameter.requires_grad_(not name.startswith(FROZEN[frozen]))
        learned = [p for p in guide.parameters() if p.requires_grad]
        elbo = recorded_elbo(kind, DRAWS, vectorize=vectorize)
        with ESTIMATORS[estimator]():
            loss = elbo.loss_and_grads(model, guide, *data())
        parts = torch.tensor(list(vars(elbo.take_parts()).values()))
        found.append((torch.tensor(loss), parts, *(p.grad for p in learned)))
    assert not left
    for one_by_one, at_once in zip(*found, strict=True):
        torch.testing.assert_close(at_once, one_by_one, rtol=1e-11, atol=1e-12)


def test_what_is_not_finite_is_named_by_itself():
    model, guide = make()
    with torch.no_grad():
        guide.loc("network.fc2.bias").fill_(math.inf)
    with pytest.raises(NonFiniteError) as caught:
        recorded_elbo(None, DRAWS, vectorize=True).loss_and_grads(model, guide, *data())
    assert "network.fc2.bias" in caught.value.names and FC1 not in caught.value.names


def test_the_weight_of_the_kl_is_the_number_given():
    # three plates' worth of 0.4 is not 0.4
    model, guide = make()
    elbo = recorded_elbo(None, 3, vectorize=True)
    elbo.loss_and_grads(model, guide, *data()[:2], 0.4)
    assert elbo.take_parts().kl_weight == 0.4
