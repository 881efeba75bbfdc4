# SPDX-License-Identifier: Apache-2.0
"""Log-densities of observations against scipy, and targets that do not fit."""

import functools

import numpy as np
import pyro.distributions as dist
import pytest
import scipy.optimize
import scipy.stats
import torch
from pyro import poutine

import pyro_bbb as bbb
from pyro_bbb import AutoSoftplusNormal, BayesianMLP, BayesianModel
from pyro_bbb.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    NegativeBinomial,
    Poisson,
    StudentT,
)

F64 = torch.float64
REAL = (Gaussian(0.3), HeteroscedasticGaussian(), StudentT(3.0))


def softmax_log(outputs, y):
    logits = np.log(np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True))
    return np.take_along_axis(logits, y[..., None], -1)[..., 0]


def sigmoid_log(outputs, y):
    return scipy.stats.bernoulli.logpmf(y, 1 / (1 + np.exp(-outputs)))


def heteroscedastic(outputs, y):
    loc, raw = np.split(outputs, 2, -1)
    return scipy.stats.norm.logpdf(y, loc, np.log1p(np.exp(raw)))


# name: likelihood, outputs per example -> elementwise log-density by scipy, targets from outputs
BY_SCIPY = {
    "categorical": (Categorical(), softmax_log),
    "bernoulli": (Bernoulli(), sigmoid_log),
    "gaussian": (Gaussian(0.3), lambda f, y: scipy.stats.norm.logpdf(y, f, 0.3)),
    "vector": (
        Gaussian(torch.tensor([0.3, 1.0, 2.0, 0.1], dtype=F64)),
        lambda f, y: scipy.stats.norm.logpdf(y, f, [0.3, 1.0, 2.0, 0.1]),
    ),
    "heteroscedastic": (HeteroscedasticGaussian(), heteroscedastic),
    "poisson": (Poisson(), lambda f, y: scipy.stats.poisson.logpmf(y, np.exp(f))),
    "negative binomial": (
        NegativeBinomial(2.5),
        lambda f, y: scipy.stats.nbinom.logpmf(y, 2.5, 2.5 / (2.5 + np.exp(f))),
    ),
    "student": (StudentT(3.0, 0.7), lambda f, y: scipy.stats.t.logpdf(y, 3.0, f, 0.7)),
}


@pytest.mark.parametrize("kind", sorted(BY_SCIPY))
@pytest.mark.parametrize("shape", [(6, 4), (6, 3, 4)])
def test_log_densities_of_one_example_add_up_to_those_of_scipy(kind, shape):
    likelihood, by_scipy = BY_SCIPY[kind]
    outputs = torch.randn(shape, dtype=F64)
    observation = likelihood(outputs)
    y = observation.sample()
    assert observation.batch_shape == (6,)
    assert y.shape[1:] == observation.event_shape
    likelihood.check(outputs, y)
    actual = observation.log_prob(likelihood.prepare(y, outputs))
    expected = by_scipy(outputs.numpy(), y.numpy()).reshape(6, -1).sum(1)
    torch.testing.assert_close(actual, torch.as_tensor(expected), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "likelihood", [Gaussian(0.3), Bernoulli(), Poisson(), NegativeBinomial(2.0), StudentT(3.0)]
)
def test_a_single_output_may_come_without_its_dimension(likelihood):
    outputs = torch.randn(6)
    observation = likelihood(outputs)
    assert (observation.batch_shape, observation.event_shape) == ((6,), ())
    likelihood.check(outputs, observation.sample())
    with pytest.raises(ValueError, match=r"expected y of shape \[n\], got \[6, 1\]"):
        likelihood.check(outputs, observation.sample()[:, None])


# --- shapes of targets ---


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), Bernoulli(), Poisson(), StudentT(3.0)])
def test_n_targets_stand_for_n_times_1_and_never_broadcast(likelihood):
    network = BayesianMLP([2, 1])
    model, x = BayesianModel(network, likelihood, 6), torch.randn(6, 2)
    y = torch.tensor([0.0, 1, 1, 0, 1, 0])
    weights = {"network.fc1.weight": torch.ones(1, 2), "network.fc1.bias": torch.zeros(1)}
    fixed = poutine.condition(model, weights)
    flat, column = (poutine.trace(fixed).get_trace(x, t) for t in (y, y[:, None]))
    for trace in (flat, column):
        trace.compute_log_prob()
        assert trace.nodes["obs"]["log_prob"].shape == (6,)
        assert trace.nodes["obs"]["value"].shape == (6, 1)
    assert torch.equal(flat.nodes["obs"]["log_prob"], column.nodes["obs"]["log_prob"])


@pytest.mark.parametrize("shape", [(), (6, 2), (6, 1, 1)])
@pytest.mark.parametrize("likelihood", [*REAL, Bernoulli(), Poisson(), NegativeBinomial()])
def test_targets_of_another_shape_are_refused(likelihood, shape):
    outputs = torch.randn(2, 2 if isinstance(likelihood, HeteroscedasticGaussian) else 1)
    with pytest.raises(ValueError, match=r"expected y of shape \[n, 1\], got \["):
        likelihood.check(outputs, torch.ones(shape))
    model = BayesianModel(BayesianMLP([2, outputs.shape[1]]), likelihood, 6)
    with pytest.raises(ValueError, match=r"expected y of shape \[n, 1\], got \["):
        model(torch.randn(6, 2), torch.ones(shape))


# --- values of targets ---


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (Categorical(), torch.tensor([0, 2], dtype=torch.uint8)),
        (Bernoulli(), torch.tensor([[True, False, True], [False, False, True]])),
        (Poisson(), torch.tensor([[0, 1, 1], [1000, 1, 0]])),
        (Gaussian(0.3), torch.tensor([[0, 1, 1], [1000, 1, 0]])),
        (Gaussian(0.3), torch.zeros(2, 3, dtype=F64)),
    ],
)
def test_targets_of_every_fitting_dtype_are_scored_as_floats_would_be(likelihood, y):
    outputs = torch.randn(2, 3)
    likelihood.check(outputs, y)
    observation = likelihood(outputs)
    log_prob = observation.log_prob(likelihood.prepare(y, outputs))
    assert log_prob.dtype == torch.float32
    torch.testing.assert_close(log_prob, observation.log_prob(y.to(torch.float32)))


# --- outputs ---


def test_outputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="expected an even number of outputs, got 3"):
        HeteroscedasticGaussian()(torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"expected outputs of shape \[batch, classes\], got"):
        Categorical()(torch.randn(5))
    with pytest.raises(ValueError, match=r"scale to broadcast to outputs of shape \[5, 2\], got"):
        Gaussian(torch.ones(3))(torch.randn(5, 2))
    with pytest.raises(ValueError, match=r"df to broadcast to outputs of shape \[5, 2\], got"):
        StudentT(torch.ones(3))(torch.randn(5, 2))
    with pytest.raises(ValueError, match=r"total_count to broadcast to outputs .* \[5, 2\], got"):
        NegativeBinomial(torch.ones(3))(torch.randn(5, 2))


# --- scales ---


def test_a_known_scale_is_no_parameter_and_follows_the_model():
    for likelihood in (Gaussian(0.3), Gaussian(torch.tensor([0.3, 0.6])), StudentT(3.0, 0.3)):
        assert list(likelihood.parameters()) == []
        moved = likelihood.double()(torch.zeros(5, 2, dtype=F64))
        assert moved.sample().dtype == moved.base_dist.scale.dtype == F64
        assert moved.base_dist.scale[0, 0].item() == pytest.approx(0.3, rel=1e-7)


def test_a_tensor_given_as_scale_is_copied():
    scale = torch.ones(2)
    likelihood = Gaussian(scale)
    scale.fill_(9.0)
    assert torch.equal(likelihood.scale, torch.ones(2))


COUNTS = torch.tensor([0.0, 1, 1, 2, 3, 5, 9, 20])[:, None].expand(-1, 2)  # mean 5.125
DISPERSION = scipy.optimize.minimize_scalar(
    lambda r: -scipy.stats.nbinom.logpmf(COUNTS[:, 0], r, r / (r + 5.125)).sum(),
    bounds=(0.1, 10),
    method="bounded",
).x
LEARNED = {  # the likelihood, outputs and targets, and the best value of its quantity
    "scale": (Gaussian.learned, torch.zeros(8, 2), torch.full((8, 2), 2.0), 2.0),
    "dispersion": (NegativeBinomial.learned, COUNTS.mean(0).log().expand(8, 2), COUNTS, DISPERSION),
}


@pytest.mark.parametrize(("factor", "sign"), [(0.5, -1), (1.0, 0), (2.0, 1)])
@pytest.mark.parametrize("kind", LEARNED)
def test_a_learned_quantity_is_one_parameter_whose_gradient_vanishes_at_its_best(
    kind, factor, sign
):
    make, outputs, y, best = LEARNED[kind]
    likelihood = make(torch.full((2,), factor * best))
    (parameter,) = likelihood.parameters()
    (gradient,) = torch.autograd.grad(-likelihood(outputs).log_prob(y).sum(), parameter)
    gradient = gradient.where(gradient.abs() > 1e-3, 0.0)
    assert torch.equal(gradient.sign(), torch.full((2,), float(sign)))


def get_traces(likelihood, outputs):
    model = BayesianModel(BayesianMLP([2, outputs]), likelihood, 5)
    return model, poutine.trace(model).get_trace(torch.randn(5, 2), torch.randn(5, outputs))


def test_a_latent_scale_is_a_site_that_the_observation_uses():
    prior = dist.LogNormal(torch.tensor([0.0, 5.0]), 0.01)
    model, trace = get_traces(Gaussian(prior), 2)
    assert list(model.likelihood.parameters()) == []
    assert "likelihood.scale" in AutoSoftplusNormal(model).site_names
    scale = trace.nodes["likelihood.scale"]["value"]
    assert scale.shape == (2,) and scale[1] > 100
    assert torch.equal(trace.nodes["obs"]["fn"].base_dist.scale, scale.expand(5, 2))
    assert model.double()(torch.randn(5, 2, dtype=F64)).dtype == F64  # after a first log-density


def test_two_latents_of_one_likelihood_keep_their_own_priors():
    _, trace = get_traces(StudentT(dist.Gamma(2.0, 0.1), dist.HalfNormal(0.5)), 1)
    assert isinstance(trace.nodes["likelihood.df"]["fn"], dist.Gamma)
    assert isinstance(trace.nodes["likelihood.scale"]["fn"], dist.HalfNormal)
    for known, latent in (("df", "scale"), ("scale", "df")):
        _, trace = get_traces(StudentT(**{known: 2.0, latent: dist.Gamma(2.0, 0.1)}), 1)
        assert f"likelihood.{latent}" in trace and f"likelihood.{known}" not in trace
        assert (getattr(trace.nodes["obs"]["fn"].base_dist, known) == 2).all()


@pytest.mark.parametrize(
    "prior",
    [
        dist.Normal(1.0, 0.1),
        dist.Uniform(torch.tensor([0.0, -1.0]), 1.0),
    ],
)
def test_a_prior_of_the_scale_must_not_reach_below_zero(prior):
    for make in (Gaussian, lambda prior: StudentT(3.0, prior)):
        with pytest.raises(ValueError, match="scale must have a prior on positive values, got"):
            make(prior)
    with pytest.raises(ValueError, match="df must have a prior on positive values, got"):
        StudentT(prior)


# --- several labels, or one, of 0 and 1 ---


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(40, 3), (40,)])
def test_labels_that_fit_takes_are_taken_at_every_door(shape, dtype):
    torch.manual_seed(0)
    x, labels = torch.randn(40, 3), shape[1] if len(shape) == 2 else 1
    y = (x[:, :labels] + torch.randn(40, labels) > 0).reshape(shape)
    model = bbb.BayesianModel(bbb.BayesianMLP([3, labels]), Bernoulli(), num_data=40)
    guide = AutoSoftplusNormal(model)
    bbb.fit(model, guide, (x, y.to(dtype)), epochs=3, lr=0.05, progress=False, seed=0)
    predict = functools.partial(bbb.predict, model, guide, num_samples=4, seed=0)
    prediction, integers = predict(x), y.long().reshape(40, labels)
    ones = prediction.probs[..., 1].reshape(40, labels)
    expected = torch.where(integers == 1, ones, 1 - ones).log()
    log_prob = prediction.log_prob(y.to(dtype))
    assert prediction.probs.shape == ((40, 3, 2) if labels == 3 else (40, 2))
    torch.testing.assert_close(log_prob.reshape(40, labels), expected, rtol=1e-4, atol=1e-5)
    accuracy = ((ones > 0.5) == integers).double().mean().item()
    for scored in (y.to(dtype), y.to(dtype).numpy()):
        assert bbb.metrics.accuracy(prediction.probs, scored) == pytest.approx(accuracy)
    data = x, y.to(dtype)
    evaluation = bbb.evaluate(model, guide, data, num_samples=4, seed=0)
    assert evaluation.scores["test"]["accuracy"] == pytest.approx(accuracy)
    assert evaluation.scores["test"]["nll"] == pytest.approx(-expected.mean().item(), rel=1e-4)
    sets = bbb.conformal(predict, data, 0.8).label_set(x)
    assert sets.shape == prediction.probs.shape
    inside = sets.gather(-1, integers.reshape(*sets.shape[:-1], 1)).double().mean(0)
    assert (inside >= 0.8).all()
    assert bbb.temperature_scaling(predict, data).temperature > 0


class Segmentation(torch.nn.Module):
    """Logits of each pixel: with channels, which are the classes, first or last."""

    def __init__(self, classes, *, last):
        super().__init__()
        self.conv, self.last = torch.nn.Conv2d(1, classes, 3, padding=1), last

    def forward(self, x):
        return self.conv(x).movedim(1, -1) if self.last else self.conv(x)


@pytest.mark.parametrize("end", [None, torch.nn.BatchNorm2d(5), torch.nn.Upsample(scale_factor=1)])
def test_classes_that_are_not_last_are_refused_where_all_sizes_are_equal(end):
    x, y = torch.randn(6, 1, 5, 5), torch.randint(0, 5, (6, 5, 5))
    for last in (False, True):
        network = Segmentation(5, last=last)
        network.conv = torch.nn.Sequential(network.conv, *filter(None, [end]))
        model = bbb.BayesianModel(bbb.bayesianize(network), bbb.likelihoods.Categorical(), 6)
        guide = bbb.AutoSoftplusNormal(model)
        if last:
            bbb.fit(model, guide, (x, y), epochs=1, progress=False)
        else:
            with pytest.raises(
                ValueError, match=r"channels first: return outputs.movedim\(1, -1\)"
            ):
                bbb.fit(model, guide, (x, y), epochs=1, progress=False)
