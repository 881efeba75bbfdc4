# SPDX-License-Identifier: Apache-2.0
"""Predictions against loops over draws, scipy's mixtures, and the laws of total uncertainty."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from pyro.nn import PyroModule
from scipy import optimize, special, stats
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pyro_bbb as bbb
from pyro_bbb.distributions.observation import LogRatePoisson, NegativeBinomial, StudentT
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction, _draws
from pyro_bbb.prediction._draws import BATCHED_BELOW

SIGMAS = 5  # two-sided false-alarm rate of each Monte Carlo comparison: 6e-7


LIKELIHOODS = {  # and the number of outputs
    "categorical": (bbb.likelihoods.Categorical, 3),
    "bernoulli": (bbb.likelihoods.Bernoulli, 2),
    "gaussian": (lambda: bbb.likelihoods.Gaussian(0.3), 2),
    "gaussian-learned": (lambda: bbb.likelihoods.Gaussian.learned(0.3), 2),
    "gaussian-latent": (lambda: bbb.likelihoods.Gaussian(dist.LogNormal(-1.0, 1.0)), 2),
    "heteroscedastic": (bbb.likelihoods.HeteroscedasticGaussian, 4),
    "poisson": (bbb.likelihoods.Poisson, 2),
    "negative-binomial": (bbb.likelihoods.NegativeBinomial, 2),
    "student": (lambda: bbb.likelihoods.StudentT(5.0, 0.2), 2),
    "student-latent": (lambda: bbb.likelihoods.StudentT(dist.Gamma(9.0, 1.0)), 2),
}


def draw(model, num_samples):
    """Widely scattered draws of all latents."""
    return bbb.AutoSoftplusNormal(model, init_rho=-0.5).sample_posterior(num_samples)


def loop(model, draws, x):
    """The observations' distribution for each draw, by Pyro's own `condition`."""
    model.eval()
    for s in range(len(next(iter(draws.values())))):
        weights = {name: values[s] for name, values in draws.items()}
        trace = poutine.trace(poutine.condition(model, weights)).get_trace(x)
        fn = trace.nodes["obs"]["fn"]
        yield getattr(fn, "base_dist", fn)


def assert_equals_loop(prediction, model, draws, x):
    expected = list(loop(model, draws, x))
    if isinstance(prediction, ClassificationPrediction):
        probs = torch.stack([fn.probs for fn in expected])
        if probs.shape != prediction.sample_probs.shape:
            probs = torch.stack([1 - probs, probs], -1)  # Bernoulli
        torch.testing.assert_close(prediction.sample_probs, probs)
    else:
        y = torch.randn(prediction.mean.shape).exp().round()
        log_prob = torch.stack([fn.log_prob(y) for fn in expected])
        means = torch.stack([fn.mean for fn in expected])
        torch.testing.assert_close(prediction.components.log_prob(y), log_prob)
        torch.testing.assert_close(prediction.sample_means, means)


def count_passes(model):
    passes = []
    model.network.register_forward_hook(lambda *_: passes.append(1))
    return passes


def line(likelihood=None):
    """A model whose output at x = 1 is its single weight."""
    network = bbb.BayesianLinear(1, 1, bias=False, prior=dist.Normal(0.0, 1.0))
    return bbb.BayesianModel(network, likelihood or bbb.likelihoods.Gaussian(), num_data=5)


def classifier(sizes=(2, 6, 3)):
    network = bbb.BayesianMLP(list(sizes))
    return bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=5)


# One pass for all draws, or one per draw


@pytest.mark.parametrize("n", [5, BATCHED_BELOW + 1])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_equals_a_loop_over_draws(double, name, n):
    likelihood, outputs = LIKELIHOODS[name]
    model = bbb.BayesianModel(bbb.BayesianMLP([3, 5, outputs]), likelihood(), num_data=5)
    draws, x = draw(model, 4), torch.randn(n, 3)
    prediction = bbb.predict(model, draws, x)
    assert_equals_loop(prediction, model, draws, x)
    if "latent" in name:  # each draw has its own noise, or the loop would not tell
        assert len(prediction.components.variance[:, 0, 0].unique()) == 4


def test_ordinary_layers_in_front_see_each_input_once(double):
    layers = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3))
    network = bbb.bayesianize(layers, dist.Normal(0.0, 1.0), where="2.*")
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=5)
    x, draws, rows = torch.randn(2 * BATCHED_BELOW + 7, 2), draw(model, 5), []
    network[0].register_forward_hook(lambda *call: rows.append(len(call[1][0])))
    prediction = bbb.predict(model, draws, x, batch_size=50)
    assert sum(rows) == len(x) and max(rows) == 50
    assert_equals_loop(prediction, model, draws, x)


def test_chunks_of_draws_join_in_order(double, monkeypatch):
    model, x = classifier(), torch.randn(5, 2)
    draws = draw(model, 7)
    at_once = bbb.predict(model, draws, x)
    counted = count_passes(model)
    numbers = sum(values[0].numel() for values in draws.values())
    monkeypatch.setattr(_draws, "SAMPLE_CHUNK", 3 * (numbers + 1))
    in_chunks = bbb.predict(model, draws, x)
    assert len(counted) == 3  # of 3, 3 and 1 draws
    torch.testing.assert_close(in_chunks.sample_log_probs, at_once.sample_log_probs)


class Branching(PyroModule):
    """Takes a path that depends on the weights, which vmap refuses."""

    def __init__(self):
        super().__init__()
        self.linear = bbb.BayesianLinear(2, 2)

    def forward(self, x):
        h = self.linear(x)
        return h if h.sum() > 0 else -2 * h


def test_networks_that_vmap_refuses_run_draw_by_draw(double):
    model = bbb.BayesianModel(Branching(), bbb.likelihoods.Gaussian(), num_data=5)
    draws, x = draw(model, 8), torch.randn(3, 2)
    counted = count_passes(model)
    prediction = bbb.predict(model, draws, x)
    assert len(counted) >= 8  # or the case shows nothing
    assert_equals_loop(prediction, model, draws, x)


class Normed(PyroModule):
    def __init__(self):
        super().__init__()
        self.linear = bbb.BayesianLinear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.inner = nn.Sequential(nn.Dropout(0.5))

    def forward(self, x):
        return self.inner(self.dropout(self.norm(self.linear(x))))


@pytest.mark.parametrize("n", [5, BATCHED_BELOW])
def test_networks_predict_in_evaluation_mode_and_get_their_modes_back(double, n):
    model = bbb.BayesianModel(Normed(), bbb.likelihoods.Gaussian(), num_data=5)
    draws, x = draw(model, 3), torch.randn(n, 2) + 1
    model.network.dropout.eval()
    modes = [m.training for m in model.modules()]
    assert len(set(modes)) == 2
    prediction = bbb.predict(model, draws, x)
    bbb.predict_mean(model, draws, x)
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(ValueError, match="does not fit"):
        bbb.predict(model, draws, torch.randn(4, 7))
    with pytest.raises(ValueError, match="lack"):
        bbb.predict(model, {"network.linear.bias": draws["network.linear.bias"]}, x)
    assert [m.training for m in model.modules()] == modes
    assert model.network.norm.num_batches_tracked == 0
    assert_equals_loop(prediction, model, draws, x)


# Seeds


@pytest.mark.parametrize("guide_type", [bbb.AutoSoftplusNormal, AutoNormal])
def test_a_seed_fixes_the_draws_and_leaves_torch_alone(guide_type):
    model, x = classifier(), torch.randn(BATCHED_BELOW + 3, 2)
    guide = guide_type(model)
    guide(x, torch.zeros(len(x), dtype=torch.long))

    def logs(seed, x=x):
        return bbb.predict(model, guide, x, num_samples=5, seed=seed).sample_log_probs

    state = torch.get_rng_state()
    first = logs(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logs(3), first)
    assert not torch.allclose(logs(4), first)
    torch.testing.assert_close(logs(3, x[20:23]), first[:, 20:23])  # other inputs, same functions
    assert not torch.equal(logs(None), logs(None))


# Memory


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside held at one time."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {k: v for k, v in self.alive.items() if not v[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


def peak_beyond_result(model, guide, x, num_samples, **options):
    with Peak() as peak:
        prediction = bbb.predict(model, guide, x, num_samples=num_samples, **options)
    result = prediction.sample_log_probs
    return peak.most - result.numel() * result.element_size()


@pytest.mark.parametrize("estimator", ["reparam", "local_reparam"])
def test_memory_does_not_grow_with_the_number_of_draws(estimator):
    units, n = 400, 1500
    model = classifier([20, units, units, 3])
    guide, x = bbb.AutoSoftplusNormal(model), torch.randn(n, 20)
    peaks = [
        peak_beyond_result(model, guide, x, num_samples, estimator=estimator)
        for num_samples in (2, 16)
    ]
    weights = sum(guide.loc(name).numel() for name in guide.site_names)
    activations = 1024 * units
    assert weights < min(peaks) / 4  # it is seen
    assert max(peaks) < 4 * (3 * weights + 5 * activations + 2 * 3 * n)
    assert max(peaks) < 1.05 * min(peaks)


# Where draws come from


def test_given_draws_are_thinned_evenly():
    model, x = line(), torch.ones(1, 1)
    draws = {"network.weight": torch.arange(10.0).reshape(10, 1, 1)}

    def used(num_samples):
        return bbb.predict(model, draws, x, num_samples=num_samples).sample_means.flatten().tolist()

    assert used(4) == [0, 3, 6, 9] and used(1) == [0]
    assert used(10) == used(1000) == list(range(10))


def test_mcmc_predicts_as_its_samples(double):
    model = line(bbb.likelihoods.Gaussian(dist.LogNormal(0.0, 0.5)))
    x = torch.randn(5, 1)
    kernel = NUTS(model, step_size=0.1, adapt_step_size=False, max_tree_depth=3)
    mcmc = MCMC(kernel, 12, 1, disable_progbar=True)
    mcmc.run(x, 2 * x)
    draws = mcmc.get_samples()
    assert set(draws) == {"network.weight", "likelihood.scale"}
    prediction = bbb.predict(model, mcmc, x)
    assert len(prediction.sample_means.unique(dim=0)) > 1
    assert_equals_loop(prediction, model, draws, x)
    centre = {name: values.mean(0, keepdim=True) for name, values in draws.items()}
    assert_equals_loop(bbb.predict_mean(model, mcmc, x), model, centre, x)


@pytest.mark.parametrize("guide_type", [AutoNormal, AutoMultivariateNormal])
def test_stock_guides_give_draws_of_their_posterior(double, guide_type):
    model, x = line(bbb.likelihoods.Gaussian(dist.LogNormal(0.0, 1.0))), torch.ones(2, 1)
    guide = guide_type(model, init_scale=0.3)
    guide(x, x)
    prediction = bbb.predict(model, guide, x, num_samples=400)
    weight, scale = prediction.sample_means[:, 0, 0], prediction.components.stddev[:, 0, 0]
    centre = guide.median(x)
    for draws, loc in (
        (weight, centre["network.weight"].squeeze()),
        (scale.log(), centre["likelihood.scale"].log()),
    ):
        assert abs(draws.mean() - loc) < SIGMAS * 0.3 / 400**0.5
        assert abs(draws.std() - 0.3) < SIGMAS * 0.3 / 800**0.5
    conditioned = {name: value.unsqueeze(0) for name, value in centre.items()}
    assert_equals_loop(bbb.predict_mean(model, guide, x), model, conditioned, x)


def test_a_guide_may_be_a_plain_function():
    def guide(x, y=None, kl_weight=1.0):
        loc = pyro.param("guide_loc", torch.tensor([[3.0]]))
        pyro.sample("network.weight", dist.Normal(loc, 1e-9).to_event(2))

    prediction = bbb.predict(line(), guide, torch.ones(1, 1), num_samples=4)
    assert prediction.sample_means.flatten().tolist() == [3.0] * 4
    with pytest.raises(TypeError, match="guide must have a method median, got function"):
        bbb.predict_mean(line(), guide, torch.ones(1, 1))


@pytest.mark.parametrize("name", ["categorical", "gaussian-latent", "student-latent"])
def test_predict_mean_runs_the_network_at_the_medians(double, name):
    likelihood, outputs = LIKELIHOODS[name]
    model = bbb.BayesianModel(bbb.BayesianMLP([3, 5, outputs]), likelihood(), num_data=5)
    guide, x = bbb.AutoSoftplusNormal(model), torch.randn(7, 3)
    centre = {name: value.unsqueeze(0) for name, value in guide.median().items()}
    for batch_size in (None, 3):
        prediction = bbb.predict_mean(model, guide, x, batch_size=batch_size)
        assert_equals_loop(prediction, model, centre, x)


# Classes


def of_probs(probs):
    return ClassificationPrediction(torch.tensor(probs).log())


def test_classification_by_hand(double):
    prediction = of_probs([[[0.9, 0.1]], [[0.5, 0.5]]])

    def entropy(p):
        return -p * math.log(p) - (1 - p) * math.log(1 - p)

    aleatoric = (entropy(0.9) + entropy(0.5)) / 2
    expected = {
        "probs": [[0.7, 0.3]],  # the mean of the logarithms would give [0.75, 0.25]
        "label": [0],
        "confidence": [0.7],
        "entropy": [entropy(0.7)],
        "aleatoric": [aleatoric],
        "epistemic": [entropy(0.7) - aleatoric],
    }
    for name, value in expected.items():
        torch.testing.assert_close(getattr(prediction, name), torch.tensor(value), msg=name)
    assert prediction.label.dtype == torch.int64
    y = torch.tensor([1])
    torch.testing.assert_close(prediction.log_prob(y), torch.tensor([0.3]).log())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0, 1000.0])
def test_laws_of_total_entropy(dtype, spread):
    logits = spread * torch.randn(20, 50, 4, dtype=dtype)
    prediction = ClassificationPrediction(logits.log_softmax(-1))
    eps = 20 * torch.finfo(dtype).eps
    ones = torch.ones(50, dtype=dtype)
    torch.testing.assert_close(prediction.probs.sum(-1), ones)
    torch.testing.assert_close(prediction.probs, prediction.sample_probs.mean(0))
    total = prediction.aleatoric + prediction.epistemic
    torch.testing.assert_close(total, prediction.entropy, rtol=0, atol=eps)
    assert (prediction.epistemic >= -eps).all()
    assert (prediction.epistemic <= prediction.entropy + eps).all()
    assert (prediction.entropy <= math.log(4) + eps).all()
    single = ClassificationPrediction(prediction.sample_log_probs[:1])
    assert (single.epistemic == 0).all()
    same = ClassificationPrediction(prediction.sample_log_probs[:1].expand(7, -1, -1))
    assert (same.epistemic.abs() < eps).all()


def test_certain_and_impossible_classes_give_no_nan():
    prediction = of_probs([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]]])
    torch.testing.assert_close(prediction.probs, torch.tensor([[0.5, 0.5, 0.0]]))
    assert prediction.aleatoric.item() == 0
    for value in (prediction.entropy, prediction.epistemic):
        assert value.item() == pytest.approx(math.log(2), rel=1e-6)
    assert prediction.log_prob(torch.tensor([2])).item() == -math.inf


def test_refuses_where_no_class_exceeds_the_threshold():
    prediction = of_probs([[[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]]])
    refused = {0.0: [0, 0, 0], 0.4: [0, 0, 0], 0.5: [1, 0, 0], 0.8: [1, 1, 0], 1.0: [1, 1, 1]}
    for threshold, expected in refused.items():
        assert prediction.refuse(threshold).tolist() == expected


# Real targets and counts


def mixture(n=6, d=2, draws=5):
    return dist.Normal(3 * torch.randn(draws, n, d), torch.rand(draws, n, d) + 0.1)


def test_regression_by_hand(double):
    loc, scale = torch.tensor([-1.0, 3.0]), torch.tensor([1.0, 2.0])
    prediction = RegressionPrediction(dist.Normal(loc.view(2, 1, 1), scale.view(2, 1, 1)))
    assert prediction.mean.item() == 1
    assert prediction.aleatoric_std.item() == pytest.approx(math.sqrt(2.5))
    assert prediction.epistemic_std.item() == pytest.approx(2)
    assert prediction.std.item() == pytest.approx(math.sqrt(6.5))


def test_log_prob_is_of_the_joint_mixture(double):
    components, y = mixture(), 3 * torch.randn(6, 2)
    logs = stats.norm.logpdf(y.numpy(), components.loc.numpy(), components.scale.numpy())
    expected = special.logsumexp(logs.sum(-1), axis=0) - math.log(5)
    actual = RegressionPrediction(components).log_prob(y).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    far = RegressionPrediction(components).log_prob(y + 1e6)
    assert far.isfinite().all()


def test_networks_may_drop_the_targets_dimension(double):
    network = PyroModule[nn.Sequential](bbb.BayesianLinear(2, 1), nn.Flatten(0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(0.5), num_data=5)
    draws, x, y = draw(model, 3), torch.randn(4, 2), torch.randn(4)
    prediction = bbb.predict(model, draws, x)
    expected = torch.stack([fn.log_prob(y) for fn in loop(model, draws, x)])
    torch.testing.assert_close(prediction.log_prob(y), expected.logsumexp(0) - math.log(3))
    assert prediction.mean.shape == prediction.interval(0.5)[0].shape == (4,)


def components_of(kind):
    """A torch mixture of 3 components for one target, and scipy's components."""
    if kind == "student":
        loc, df = [-1.0, 0.0, 30.0], [1.5, 2.0, 1.0]  # infinite variance, and no mean
        pairs = list(zip(df, loc, strict=True))
        return StudentT(*column(df, loc), 0.5), [stats.t(a, b, 0.5) for a, b in pairs]
    loc, scale = {
        "close": ([0.0, 1.0, -0.5], [1.0, 0.3, 2.0]),
        "apart": ([-1e3, 5.0, 1e3], [1e-2, 1.0, 1e-3]),
        "far-from-zero": ([1e6, 1e6 + 1, 1e6 + 2], [1.0, 1.0, 1.0]),
        "equal": ([2.0, 2.0, 2.0], [1e-8, 1e-8, 1e-8]),
    }[kind]
    pairs = list(zip(loc, scale, strict=True))
    return dist.Normal(*column(loc, scale)), [stats.norm(a, b) for a, b in pairs]


def column(*values):
    return [torch.tensor(value).view(3, 1, 1) for value in values]


@pytest.mark.parametrize("p", [5e-7, 0.05, 0.5, 1 - 5e-7])
@pytest.mark.parametrize("kind", ["close", "apart", "far-from-zero", "equal", "student"])
def test_quantiles_are_those_of_the_mixture(double, kind, p):
    components, oracle = components_of(kind)
    prediction = RegressionPrediction(components)
    ends = [fn.ppf(p) for fn in oracle]  # the mixture's quantile lies between

    def excess(y):
        return np.mean([fn.cdf(y) for fn in oracle]) - p

    step = 1e-9 * max(map(abs, ends))
    expected = optimize.brentq(excess, min(ends) - step, max(ends) + step, xtol=1e-13, rtol=1e-14)
    quantile = prediction.quantile(p)
    assert quantile.shape == (1, 1)
    assert prediction.cdf(quantile).item() == pytest.approx(p, abs=1e-9, rel=1e-6)
    # a probability of rounding error 1e-16 bounds the quantile no better than by the density
    density = np.mean([fn.pdf(expected) for fn in oracle])
    assert abs(quantile.item() - expected) <= 1e-15 / density + 1e-12 * abs(expected)


@pytest.mark.parametrize("p", [1e-6, 0.5, 1 - 1e-6])
def test_count_quantiles_are_the_smallest_that_suffice(double, p):
    rates = np.array([[1e-4, 0.3, 4.0, 30.0, 1e4], [2e-4, 0.1, 9.0, 300.0, 2e4]])
    prediction = RegressionPrediction(LogRatePoisson(torch.tensor(rates).log().unsqueeze(-1)))
    counts = np.arange(30_000)
    for i, rate in enumerate(rates.T):
        cdf = stats.poisson.cdf(counts, rate[:, None]).mean(0)
        assert prediction.quantile(p)[i].item() == np.searchsorted(cdf, p)
    logits = torch.tensor(rates[:, :4] / 2.5).log().unsqueeze(-1)
    prediction = RegressionPrediction(NegativeBinomial(torch.tensor(2.5), logits=logits))
    for i, rate in enumerate(rates[:, :4].T):
        cdf = stats.nbinom.cdf(counts, 2.5, 2.5 / (2.5 + rate[:, None])).mean(0)
        assert prediction.quantile(p)[i].item() == np.searchsorted(cdf, p)


class Gated(PyroModule):
    """A linear layer, and a latent of each unit in a plate of the forward pass."""

    def __init__(self):
        super().__init__()
        self.hidden = bbb.networks.BayesianLinear(3, 4)

    def forward(self, x):
        with pyro.plate("units", 4):
            gate = pyro.sample("gate", dist.LogNormal(0.0, 1.0))
        return (self.hidden(x) * gate).sum(-1, keepdim=True)


@pytest.mark.parametrize("family", ["softplus_normal", "low_rank", "delta"])
@pytest.mark.parametrize("n", [20, BATCHED_BELOW + 1])
def test_latents_in_a_plate_of_the_forward_pass_are_predicted_with(double, family, n):
    model = bbb.BayesianModel(Gated(), bbb.likelihoods.Gaussian(0.1), num_data=n)
    guide = bbb.guides.make(family, model)
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    bbb.fit(model, guide, (x, x[:, :1]), epochs=2, progress=False, seed=0)
    draws = guide.sample_posterior(5)
    assert draws["gate"].shape == (5, 4)
    assert_equals_loop(bbb.predict(model, draws, x), model, draws, x)
    assert bbb.predict(model, guide, x, num_samples=3).mean.shape == (n, 1)


def test_the_printed_form_tells_sizes():
    classes = ClassificationPrediction(torch.zeros(7, 5, 3))
    assert repr(classes) == "ClassificationPrediction(inputs [5], 3 classes, 7 samples of weights)"
    normal = dist.Normal(torch.zeros(7, 5, 2), 1.0)
    expected = "RegressionPrediction(inputs [5, 2], Normal, 7 samples of outputs)"
    assert repr(RegressionPrediction(normal, "outputs")) == expected


@pytest.mark.parametrize("family", [dist.Normal, lambda m, s: StudentT(3.0, m, s)])
def test_a_rescaled_prediction_is_that_of_the_rescaled_target(family):
    """Density, distribution function and moments, by the change of variables."""
    generator = torch.Generator().manual_seed(0)
    loc, scale = (torch.rand(5, 4, 2, generator=generator, dtype=torch.double) for _ in range(2))
    of_z = RegressionPrediction(family(loc, scale + 0.1))
    mean, unit = torch.tensor([152.0, -3.0]), torch.tensor([77.0, 0.01])
    of_y = of_z.rescaled(mean, unit)
    z = torch.randn(4, 2, generator=generator, dtype=torch.double)
    y = mean + unit * z
    torch.testing.assert_close(of_y.log_prob(y), of_z.log_prob(z) - unit.log().sum())
    torch.testing.assert_close(of_y.mean, mean + unit * of_z.mean)
    for name in ("std", "aleatoric_std", "epistemic_std"):
        torch.testing.assert_close(getattr(of_y, name), unit * getattr(of_z, name))
    for end, end_of_z in zip(of_y.interval(0.9), of_z.interval(0.9), strict=True):
        torch.testing.assert_close(end, mean + unit * end_of_z)
