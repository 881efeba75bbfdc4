# SPDX-License-Identifier: Apache-2.0
"""Weights that lie side by side are drawn and scored as if each stood alone."""

import math
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch.autograd import gradcheck, gradgradcheck

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb._handlers import flat_site
from pyro_bbb._handlers.flat_site import get_traces
from pyro_bbb._ops.flat import FlatTensors
from pyro_bbb._ops.multi_sample import Shared, shared_by
from pyro_bbb._ops.reparameterize import DrawMany, draw, draw_many
from pyro_bbb._ops.scale_mixture import LogOneMixture, _exponent, log_mixture
from pyro_bbb._ops.step_context import StepOptions, step_context
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.estimators._sampled_weights import Draws
from pyro_bbb.training import objectives
from pyro_bbb.training.objectives import NonFiniteError, recorded_elbo
from tests._support.flat_site_cases import COUNT, FC1, assert_alike, data, model_of

pytestmark = pytest.mark.usefixtures("double", "unvalidated")


def make(prior=None, likelihood=None, **options):
    model = model_of(prior, likelihood)
    return model, bbb.AutoSoftplusNormal(model, **({"init_rho": -2.0} | options))


def traces(model, guide, seed=1):
    torch.manual_seed(seed)
    with step_context(StepOptions(flat=True)):
        return get_traces(model, guide, data(), {})


def sites(trace):
    nodes = poutine.util.prune_subsample_sites(trace).nodes.items()
    return [name for name, site in nodes if site["type"] == "sample"]


# --- one vector ---


def tensors():
    shapes = (4, 3), (4,), (2, 4)
    locs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    rhos = [(torch.randn(shape) - 2).requires_grad_() for shape in shapes]
    return locs, rhos, FlatTensors(torch.randn(sum(math.prod(shape) for shape in shapes)), locs)


def sampled(locs, rhos, noise):
    return draw_many(locs, rhos, noise, shared_by("abc", rhos))


ROUNDING = {"rtol": 4 * torch.finfo(torch.float64).eps, "atol": 0.0}


def one_by_one(locs, rhos, noise):
    return [draw(*each) for each in zip(locs, rhos, noise.parts, strict=True)]


def test_a_vector_holds_what_each_draws():
    locs, rhos, noise = tensors()
    value, scale, log_q, parts = draw_many(locs, rhos, noise)
    drawn = one_by_one(locs, rhos, noise)
    for part, (alone, *_) in zip(parts, drawn, strict=True):
        torch.testing.assert_close(part, alone, **ROUNDING)  # softplus differs at a vector's end
        assert part.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    assert torch.equal(value, torch.cat([part.flatten() for part in parts]))
    scales = torch.cat([s.flatten() for _, s, _ in drawn])
    torch.testing.assert_close(scale.vector, scales, **ROUNDING)
    torch.testing.assert_close(log_q, sum(q for *_, q in drawn), rtol=1e-13, atol=0)


@pytest.mark.parametrize("used", ["value", "scale", "log_q", "parts", "one part", "all"])
def test_its_gradient_is_that_of_each(used):
    locs, rhos, noise = tensors()
    weights = torch.randn(len(noise.vector)), torch.randn(len(noise.vector))
    of_parts = [torch.randn(loc.shape) for loc in locs]

    def objective(value, scale, log_q, parts):
        terms = {
            "value": (value * weights[0]).sum(),
            "scale": (scale * weights[1]).sum(),
            "log_q": 0.7 * log_q,
            "parts": sum((a * b).sum() for a, b in zip(parts, of_parts, strict=True)),
            "one part": (parts[1] * of_parts[1]).sum(),
        }
        return sum(terms.values()) if used == "all" else terms[used]

    value, scale, log_q, parts = draw_many(locs, rhos, noise)
    found = torch.autograd.grad(
        objective(value, scale.vector, log_q, parts), [*locs, *rhos], allow_unused=True
    )
    drawn = one_by_one(locs, rhos, noise)
    whole = (torch.cat([x[i].flatten() for x in drawn]) for i in (0, 1))
    total = objective(*whole, sum(x[2] for x in drawn), [x[0] for x in drawn])
    expected = torch.autograd.grad(total, [*locs, *rhos], allow_unused=True)
    for a, b, like in zip(found, expected, [*locs, *rhos], strict=True):
        b = torch.zeros_like(like) if b is None else b
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


USES = {  # by draw: the vector, its parts, its scale, ln q
    "as in training": [(1, 1, 0, 1)] * 3,
    "each another": [(1, 1, 1, 1), (0, 1, 0, 0), (0, 0, 0, 1)],
    "value alone": [(1, 0, 0, 0)] * 3,
}


@pytest.mark.parametrize("uses", USES.values(), ids=USES)
def test_gradients_added_up_over_draws_are_the_sum_of_theirs(uses):
    locs, rhos, noise = tensors()
    noises = [noise, *(FlatTensors(torch.randn_like(noise.vector), locs) for _ in range(2))]
    of_whole, of_parts, of_scale = torch.randn(3, len(noise.vector))

    def add_gradient(noise, used):
        value, scale, log_q, parts = sampled(locs, rhos, noise)
        products = zip(parts, FlatTensors(of_parts, locs).parts, strict=True)
        terms = (
            (value * of_whole).sum(),
            sum((a * b).sum() for a, b in products),
            (scale.vector * of_scale).sum(),
            0.7 * log_q,
        )
        sum(term for term, use in zip(terms, used, strict=True) if use).backward()

    def gradients(context):
        for x in (*locs, *rhos):
            x.grad = torch.ones_like(x)  # what was there before stays
        with context:
            for each in zip(noises, uses, strict=True):
                add_gradient(*each)
        return [x.grad for x in (*locs, *rhos)]

    found = zip(
        gradients(step_context(StepOptions(several=True))), gradients(nullcontext()), strict=True
    )
    for together, one_by_one in found:
        torch.testing.assert_close(together, one_by_one, rtol=1e-12, atol=1e-13)


def test_the_sum_of_gradients_reaches_a_parameter_once():
    locs, rhos, noise = tensors()
    seen = []
    rhos[0].register_hook(lambda gradient: seen.append(gradient.clone()))
    with step_context(StepOptions(several=True)):
        for _ in range(3):
            sampled(locs, rhos, noise)[0].sum().backward()
        assert seen == [] and all(rho.grad is None for rho in rhos)
    assert len(seen) == 1 and torch.equal(seen[0], rhos[0].grad)


def test_a_scale_that_is_no_parameter_gets_each_gradient_by_itself():
    locs, rhos, noise = tensors()
    with step_context(StepOptions(several=True)):
        for _ in range(2):
            views = [rho.view_as(rho) for rho in rhos]  # as Pyro gives them
            sampled(locs, views, noise)[2].backward()
            assert all(rho.grad is not None for rho in rhos)
    expected = [-2 * torch.sigmoid(rho) / torch.nn.functional.softplus(rho) for rho in rhos]
    for rho, gradient in zip(rhos, expected, strict=True):
        torch.testing.assert_close(rho.grad, gradient.detach())


def test_a_second_derivative_of_it_is_refused():
    locs, rhos, noise = tensors()
    value = DrawMany.apply(noise, Shared(), *locs, *rhos)[0]
    (gradient,) = torch.autograd.grad(value.square().sum(), rhos[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_the_noise_is_what_each_would_have_drawn():
    (_, guide), args = make(), data()
    torch.manual_seed(1)
    alone = guide(*args)
    with step_context(StepOptions(flat=True)):
        torch.manual_seed(1)
        beside = guide(*args)
    assert alone.keys() == beside.keys()
    assert all(torch.equal(alone[name], beside[name]) for name in alone)
    assert len({w.untyped_storage().data_ptr() for w in beside.values()}) == 1


def test_only_the_first_draw_of_a_weight_is_its_part():
    (_, guide), args = make(), data()
    with step_context(StepOptions(flat=True)), poutine.trace() as trace:
        guide(*args)
    site = trace.trace.nodes[FC1]
    again = site["fn"].rsample()
    assert not torch.equal(again, site["value"])
    log_prob = dist.Normal(guide.loc(FC1), guide.scale(FC1)).log_prob(again).sum()
    torch.testing.assert_close(site["fn"].log_prob(again), log_prob)


def test_an_estimator_knows_each_weight_by_its_place_in_the_vector():
    (_, guide), args = make(), data()
    for rho in guide.rhos.parameters():
        rho.data.uniform_(-3, 0)
    with step_context(StepOptions(flat=True)), Draws() as draws:
        values = guide(*args)
    for name, value in values.items():
        for seen in (value, value.reshape(-1)[-1:]):
            assert torch.equal(draws.find(seen).loc, guide.loc(name))
        loc, scale = draws.find(value.t()).seen_as(value.t()) if value.dim() == 2 else (None, None)
        if value.dim() == 2:
            assert torch.equal(loc, guide.loc(name).t())
            torch.testing.assert_close(scale, guide.scale(name).t())


# --- one site ---

MERGED = {
    "mixture": lambda: make(),
    "Normal": lambda: make(dist.Normal(0.1, 0.7)),
    "default prior": lambda: make(bbb.priors.default_prior()),
    "equal by pattern": lambda: make(
        {"fc1.*": bbb.ScaleMixtureNormal(0.5, 1.0, 0.1), "*": bbb.ScaleMixtureNormal(0.5, 1.0, 0.1)}
    ),
    "by layer": lambda: make({"fc1.*": dist.Normal(0.0, 1.0), "*": dist.Normal(0.0, 0.5)}),
    "fan-in": lambda: make(bbb.priors.FanInNormal()),
}
APART = {
    "two families": lambda: make(
        {"fc1.*": dist.Normal(0.0, 1.0), "*": bbb.ScaleMixtureNormal(0.5, 1.0, 0.1)}
    ),
    "learned mixture": lambda: make(bbb.priors.LearnedScaleMixture()),
    "Laplace": lambda: make(dist.Laplace(0.0, 1.0)),
    "tensors": lambda: make(bbb.ScaleMixtureNormal(*torch.tensor([0.5, 1.0, 0.1]))),
    "latent scales": lambda: make(bbb.priors.HierarchicalNormal(dist.HalfNormal(1.0))),
}


@pytest.mark.parametrize("name", MERGED)
def test_weights_of_one_prior_are_one_site(name):
    for trace in traces(*MERGED[name]()):
        latent = [name for name in sites(trace) if name != "obs"]
        assert latent == [FC1] and len(trace.nodes[FC1]["members"]) == 4
        assert trace.nodes[FC1]["value"].shape == (5 * 7 + 7 + 7 * 3 + 3,)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_they_are_for_every_estimator(estimator):
    model, guide = make()
    with ESTIMATORS[estimator]():
        found = [set(sites(trace)) for trace in traces(model, guide)]
    assert found == [{FC1, "obs"}, {FC1}]


@pytest.mark.parametrize("name", APART)
def test_others_are_not(name):
    for trace in traces(*APART[name]()):
        assert len(sites(trace)) >= 4
        assert not any("members" in site for site in trace.nodes.values())


@pytest.mark.parametrize("name", ["by layer", "fan-in"])
def test_nor_are_many_weights_of_several_priors(monkeypatch, name):
    monkeypatch.setattr(flat_site, "SMALL", COUNT)
    for trace in traces(*MERGED[name]()):
        assert not any("members" in site for site in trace.nodes.values())


class Handled(poutine.messenger.Messenger):
    """Samples one weight, and passes on what a function makes of it."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def _pyro_sample(self, msg):
        if msg["name"] == FC1:
            msg["value"], msg["done"] = self.change(msg["fn"]()), True


@pytest.mark.parametrize("copy", [torch.clone, lambda w: w.expand(1, 7, 5)[0]])
@pytest.mark.parametrize("name", MERGED)
def test_copies_of_weights_are_scored_as_the_weights(name, copy):
    found = []
    for change in (lambda w: w, copy):
        torch.manual_seed(0)
        model, guide = MERGED[name]()
        pair = traces(model, Handled(change)(guide))
        assert [len(sites(trace)) for trace in pair] == [2, 1]
        sum(trace.log_prob_sum() for trace in pair).backward()
        found.append([p.grad for p in guide.parameters()])
    for other, original in zip(*found, strict=True):
        torch.testing.assert_close(other, original)


def test_copies_of_weights_under_several_priors_are_known_draws():
    model, guide = APART["two families"]()
    for site in traces(model, Handled(torch.clone)(guide))[1].nodes.values():
        assert site["type"] != "sample" or site["fn"].base_dist.remembers(site["value"])


@pytest.mark.parametrize("change", [lambda w: w + 1, torch.Tensor.detach])
def test_weights_that_a_handler_changes_are_scored_by_themselves(change):
    model, guide = make()
    trace = traces(model, Handled(change)(guide))[1]
    assert len(sites(trace)) == 4
    site = trace.nodes[FC1]
    expected = dist.Normal(guide.loc(FC1), guide.scale(FC1)).log_prob(site["value"])
    torch.testing.assert_close(site["fn"].log_prob(site["value"]), expected.sum())


class Changed(poutine.messenger.Messenger):
    """One weight's site is another than its fellows'."""

    def __init__(self, **changes):
        super().__init__()
        self.changes = changes

    def _pyro_sample(self, msg):
        if msg["name"] == FC1:
            msg.update(self.changes)


def test_weights_that_count_alike_are_one_site_whatever_their_factor():
    model, guide = make()
    assert len(sites(traces(poutine.scale(model, 0.5), guide)[0])) == 2


OTHERS = {
    "scale": {"scale": 3.0},
    "mask": {"mask": torch.tensor(True)},
    "value": {"value": torch.ones(7, 5, dtype=torch.float64), "done": True},
}


@pytest.mark.parametrize(
    ("change", "of_guide"),
    [("scale", False), ("scale", True), ("mask", False), ("mask", True), ("value", True)],
)
def test_weights_of_which_one_is_unlike_are_not(change, of_guide):
    model, guide = make()
    parts = [model, guide]
    parts[of_guide] = Changed(**OTHERS[change])(parts[of_guide])
    found = traces(*parts)
    assert [len(sites(trace)) for trace in found] == [5, 4]


EVERY = {
    **MERGED,
    **APART,
    "learned noise": lambda: make(likelihood=likelihoods.Gaussian.learned()),
}


@pytest.mark.parametrize("kind", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("name", EVERY)
def test_loss_and_gradients_are_those_of_pyros_own_objective(name, kind):
    def parts(_):
        model, guide = EVERY[name]()
        return model, model, guide

    assert_alike((recorded_elbo(kind, 1), kind()), parts, real="noise" in name)


FROZEN = {"nothing": (), "a mean": ("locs.network.fc1",), "a scale": ("rhos.network.fc2",)}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("num_particles", [1, 3])
@pytest.mark.parametrize("kind", ["trace", "mean_field"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_are_those_of_each_weight_by_itself(
    estimator, kind, num_particles, frozen, monkeypatch
):
    def gradients():
        pyro.set_rng_seed(0)
        model, guide = make()
        for name, parameter in guide.named_parameters():
            parameter.requires_grad_(not name.startswith(FROZEN[frozen]))
        learned = [p for p in guide.parameters() if p.requires_grad]
        torch.manual_seed(1)
        with ESTIMATORS[estimator]():
            loss = recorded_elbo(kind, num_particles).loss_and_grads(model, guide, *data())
        return torch.tensor(loss), *(p.grad for p in learned)

    found = gradients()
    monkeypatch.setattr(objectives, "StepOptions", lambda *_: StepOptions())
    for together, apart in zip(found, gradients(), strict=True):
        torch.testing.assert_close(together, apart, rtol=1e-11, atol=1e-12)


def test_draws_of_a_frozen_scale_find_it_once():
    locs, rhos, noise = tensors()
    places = set()
    with step_context(StepOptions(several=True)):
        for _ in range(3):  # as Pyro gives what the optimiser does not hold
            views = [rhos[0], *(rho.detach().view_as(rho) for rho in rhos[1:])]
            places.add(sampled(locs, views, noise)[1].vector.data_ptr())
    assert len(places) == 1


def test_derivatives_of_scales_are_found_once_for_several_samples():
    _, rhos, noise = tensors()
    shared, gradient = Shared(several=True), FlatTensors(noise.vector, [x.detach() for x in rhos])
    found = shared.slope_of(gradient)
    torch.testing.assert_close(found, torch.cat([x.detach().flatten().sigmoid() for x in rhos]))
    assert shared.slope_of(gradient) is found


def test_the_parts_of_the_loss_are_those_of_the_sites():
    model, guide = make()
    elbo = recorded_elbo(None, 1)
    torch.manual_seed(1)
    elbo.loss_and_grads(model, guide, *data())
    parts = elbo.take_parts()
    torch.manual_seed(1)
    guide_trace = poutine.trace(guide).get_trace(*data())
    model_trace = poutine.trace(poutine.replay(model, guide_trace)).get_trace(*data())
    for trace, found in ((model_trace, parts.log_prior), (guide_trace, parts.log_guide)):
        nodes = [trace.nodes[name] for name in guide.site_names]
        total = sum(node["fn"].log_prob(node["value"]).item() for node in nodes)
        assert found == pytest.approx(total, rel=1e-12)
    assert parts.kl_weight == 0.2


def test_what_is_not_finite_is_named_by_itself():
    model, guide = make()
    with torch.no_grad():
        guide.loc("network.fc2.bias").fill_(math.inf)
    with pytest.raises(NonFiniteError) as caught:
        recorded_elbo(None, 1).loss_and_grads(model, guide, *data())
    assert "network.fc2.bias" in caught.value.names
    assert FC1 not in caught.value.names


# --- the mixture of numbers ---


def both(dtype=torch.float64, sigma2=0.05):
    numbers = bbb.ScaleMixtureNormal(0.3, 1.2, sigma2)
    parameters = torch.tensor([0.3, 1.2, sigma2], dtype=dtype)
    return bbb.distributions.map_tensors(numbers, lambda x: x.to(dtype)), bbb.ScaleMixtureNormal(
        *parameters
    )


@pytest.mark.filterwarnings("ignore:sigma1=")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sigma2", [0.05, 1e-3, 2.0, 1.2, 1e-8])
def test_a_mixture_of_numbers_is_that_of_tensors(dtype, sigma2):
    numbers, parameters = both(dtype, sigma2)
    assert numbers._numbers is not None and parameters._numbers is None
    w = (torch.randn(2000).sign() * torch.logspace(-9, 12, 2000)).to(dtype).requires_grad_()
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    found, expected = (each.expand(w.shape).log_prob(w) for each in (numbers, parameters))
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=10 * tolerance)
    slopes = [torch.autograd.grad(x.sum(), w)[0] for x in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=50 * tolerance, atol=0)


def test_numbers_whose_squares_overflow_are_left_to_tensors():
    for sigma in (1e-12, 1e6):
        mixture = bbb.ScaleMixtureNormal(0.5, sigma, sigma / 10)
        assert mixture._numbers is None
        assert mixture.log_prob(torch.tensor(sigma)).isfinite()


def test_no_share_is_a_subnormal_number():
    for dtype in (torch.float32, torch.float64):
        numbers = both(dtype, 1e-3)[0]._numbers
        w = torch.logspace(-6, 3, 2000, dtype=dtype)
        share = _exponent(w, numbers, 1, torch.empty_like(w)).sigmoid()
        assert share.min() >= torch.finfo(dtype).tiny
        assert share.min() < 1e-30  # the bound is at work


def test_its_derivatives_of_both_orders_and_its_batches():
    numbers = both()[0]._numbers
    w = (torch.randn(3, 4) * 0.2).requires_grad_()
    for dims in (0, 1, 2):
        assert gradcheck(lambda w, dims=dims: LogOneMixture.apply(w, numbers, dims), w)
        assert gradgradcheck(lambda w, dims=dims: LogOneMixture.apply(w, numbers, dims), w)
    rows = torch.vmap(lambda row: LogOneMixture.apply(row, numbers, 1))(w)
    torch.testing.assert_close(rows, LogOneMixture.apply(w, numbers, 1))
    general = log_mixture(w, both()[1]._coefficients, 2)
    torch.testing.assert_close(LogOneMixture.apply(w, numbers, 2), general, rtol=1e-13, atol=0)


def test_a_mixture_of_numbers_follows_its_dtype():
    wide = bbb.ScaleMixtureNormal(0.5, 1.0, 0.1)
    single = bbb.distributions.map_tensors(wide, torch.Tensor.float)
    assert single.log_prob(torch.zeros(2, dtype=torch.float32)).dtype == torch.float32
    assert -math.inf < wide._numbers.floor < single._numbers.floor
