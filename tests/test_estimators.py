# SPDX-License-Identifier: Apache-2.0
"""Gradient estimators: the same ELBO and expected gradient, less variance, and nothing left behind.

Monte Carlo comparisons use k = 6 standard errors unless they say otherwise.
"""

import math
from functools import cache

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from pyro.nn import PyroModule, PyroSample
from sklearn.datasets import load_digits
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.distributions import SoftplusNormal
from pyro_bbb.elbo import minibatch_elbo
from pyro_bbb.estimators import ESTIMATORS, flipout, local_reparameterization, sticking_the_landing
from pyro_bbb.estimators._local_reparam import linear_std

CONTEXTS = {"flipout": flipout, "local_reparam": local_reparameterization}
CALLS, COPIES = 500, 8
DRAWS = 80  # gradients of a whole model


def sample(loc, rho):
    """A weight drawn by a sample statement, as in a guide."""
    return pyro.sample("w", SoftplusNormal(loc, rho).to_event(loc.dim()))


OPERATIONS = {
    "linear": (F.linear, (5, 7), (4, 7)),
    "linear over positions": (F.linear, (5, 7), (4, 3, 7)),
    "conv1d": (lambda x, w: F.conv1d(x, w, stride=2), (4, 3, 2), (2, 3, 6)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (4, 3, 3, 3), (2, 3, 5, 5)),
    "grouped conv2d": (lambda x, w: F.conv2d(x, w, groups=2), (4, 1, 2, 2), (2, 2, 3, 3)),
    "conv_transpose2d": (F.conv_transpose2d, (3, 2, 2, 2), (2, 3, 3, 3)),
    "matmul": (lambda x, w: x @ w.T, (5, 7), (4, 7)),
}


def repeated(name, run, x, loc, rho):
    """Outputs of several copies of the inputs in each of several calls, ``[CALLS, COPIES, ...]``.

    Calls are independent; copies in one call share what the weight was drawn as.
    """
    many = x.expand(COPIES, *x.shape).flatten(0, 1)
    with CONTEXTS[name](), torch.no_grad():
        calls = [run(many, sample(loc, rho)) for _ in range(CALLS)]
    return torch.stack(calls).unflatten(1, (COPIES, len(x)))


def assert_mean(values, expected):
    """The mean over calls and copies, within 6 standard errors of the calls' means."""
    of_calls = values.mean(1)
    error = of_calls.std(0) / CALLS**0.5
    assert ((of_calls.mean(0) - expected).abs() < 6 * error).all()


PERTURBED = [("flipout", operation) for operation in OPERATIONS]
PERTURBED += [("local_reparam", "linear"), ("local_reparam", "matmul")]


@pytest.mark.parametrize(("name", "operation"), PERTURBED)
def test_preactivations_have_their_closed_form_mean_and_variance(operation, name):
    torch.set_default_dtype(torch.float64)
    run, weight_shape, x_shape = OPERATIONS[operation]
    loc, rho, x = torch.randn(weight_shape), torch.randn(weight_shape) - 1, torch.randn(x_shape)
    off = repeated(name, run, x, loc, rho) - run(x, loc)
    assert_mean(off, 0.0)
    assert_mean(off.square(), run(x.square(), F.softplus(rho).square()))


@pytest.mark.parametrize("operation", [op for op in OPERATIONS if op not in ("linear", "matmul")])
def test_local_reparameterisation_is_flipout_where_an_example_meets_a_weight_again(operation):
    run, weight_shape, x_shape = OPERATIONS[operation]
    loc, rho, x = torch.randn(weight_shape), torch.randn(weight_shape), torch.randn(x_shape)
    outputs = {}
    for name, context in CONTEXTS.items():
        torch.manual_seed(0)
        with context():
            outputs[name] = run(x, sample(loc, rho))
    assert torch.equal(outputs["flipout"], outputs["local_reparam"])


@pytest.mark.parametrize(
    ("name", "operation"),
    [("flipout", "linear"), ("flipout", "conv2d"), ("local_reparam", "linear")],
)
def test_examples_have_noise_of_their_own(operation, name):
    """Equal inputs have equal outputs with one draw, uncorrelated ones per example."""
    run, weight_shape, x_shape = OPERATIONS[operation]
    loc, rho = torch.zeros(weight_shape), torch.zeros(weight_shape)
    x = torch.randn(x_shape[1:]).expand(2, *x_shape[1:])
    with torch.no_grad():
        first, second = run(x, sample(loc, rho))
        assert torch.allclose(first, second)
    draws = repeated(name, run, x, loc, rho)
    assert_mean(draws[:, :, 0] * draws[:, :, 1], 0.0)


@pytest.mark.parametrize("name", CONTEXTS)
def test_positions_of_an_example_share_one_weight(name):
    """Equal patches of one image have equal outputs, as with any single weight."""
    x = torch.randn(3, 2, 1, 1).expand(3, 2, 4, 4)
    with CONTEXTS[name](), torch.no_grad():
        outputs = F.conv2d(x, sample(torch.zeros(5, 2, 1, 1), torch.zeros(5, 2, 1, 1)))
    assert torch.allclose(outputs, outputs[..., :1, :1].expand_as(outputs), atol=1e-6)
    assert outputs[..., 0, 0].std() > 0


def test_flipout_perturbs_the_deviation_and_not_the_weight():
    """Nothing is random at scale 0; a sign on W itself would still show."""
    loc, x = torch.randn(4, 3), torch.randn(6, 3)
    with flipout():
        outputs = F.linear(x, sample(loc, torch.full((4, 3), -200.0)))
    assert torch.allclose(outputs, F.linear(x, loc))


def test_a_weight_used_twice_keeps_its_signs_in_flipout():
    loc, x = torch.zeros(4, 3), torch.randn(6, 3)
    with flipout():
        w = sample(loc, torch.zeros(4, 3))
        assert torch.equal(F.linear(x, w), F.linear(x, w))


# --- whole models ---


def digits():
    x, y = (torch.as_tensor(a)[:128] for a in load_digits(return_X_y=True))
    return x.float() / 16, y


def dense():
    return bbb.BayesianMLP([64, 30, 10], prior=bbb.ScaleMixtureNormal(0.5, 1.0, 0.1))


class Convolutional(nn.Sequential, PyroModule):
    def __init__(self):
        prior = bbb.ScaleMixtureNormal(0.5, 1.0, 0.1)
        super().__init__(
            nn.Unflatten(1, (1, 8, 8)),
            bbb.BayesianConv2d(1, 4, 3, stride=2, prior=prior),
            nn.ReLU(),
            nn.Flatten(),
            bbb.BayesianLinear(36, 10, prior=prior),
        )


@cache
def losses_and_gradients(network, name, draws=DRAWS):
    """Loss and gradient of the first layer's mean, for independent draws at the same parameters."""
    pyro.set_rng_seed(0)
    model, guide = make(network(), init_rho=-3.0)
    pyro.set_rng_seed(1 + list(ESTIMATORS).index(name))
    x, y = digits()
    parameter = next(guide.parameters())
    elbo, losses, gradients = Trace_ELBO(), [], []
    for _ in range(draws):
        parameter.grad = None
        with ESTIMATORS[name]():
            losses.append(elbo.loss_and_grads(model, guide, x, y, 0.01))
        gradients.append(parameter.grad.flatten().clone())
    return torch.tensor(losses, dtype=torch.float64), torch.stack(gradients).double()


def make(network, guide=bbb.AutoSoftplusNormal, **options):
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=1280)
    guide = guide(model, **options)
    guide(*digits())
    return model, guide


@pytest.mark.parametrize("name", ["flipout", "local_reparam", "stl"])
@pytest.mark.parametrize("network", [dense, Convolutional])
def test_expected_loss_and_gradient_are_the_naive_estimators(network, name):
    naive = losses_and_gradients(network, "reparam")
    estimates = losses_and_gradients(network, name)
    for a, b in zip(naive, estimates, strict=True):
        error = ((a.var(0) + b.var(0)) / DRAWS).sqrt()
        live = error > 0  # inputs that are always 0 have no gradient
        z = ((a.mean(0) - b.mean(0))[live] / error[live]).abs()
        assert z.max() < 7  # of at most 1,920 two-sided comparisons: 5e-9
        if z.numel() > 1:  # a bias below 7 errors everywhere would still show in the mean square
            # of what is worth 80 independent numbers in the dense network, 10 in the other
            assert z.square().mean() < (2 if network is dense else 8)


def test_noise_of_one_draw_per_example_lowers_the_gradients_variance():
    """Seen 5.4 to 8.0 and 3.5 to 4.9 times: real digits, batch 128, first layer."""
    variance = {
        name: losses_and_gradients(dense, name)[1].var(0).sum()
        for name in ("reparam", "local_reparam", "flipout")
    }
    assert variance["reparam"] > 2.5 * variance["local_reparam"]
    assert variance["reparam"] > 1.8 * variance["flipout"]


@pytest.mark.parametrize("guide", [AutoNormal, AutoDiagonalNormal])
@pytest.mark.parametrize("name", CONTEXTS)
def test_stock_diagonal_guides_are_perturbed_too(guide, name):
    """Two equal rows get different outputs, although the guide draws one weight."""
    model, guide = make(bbb.BayesianMLP([64, 10]), guide=guide)
    x, y = digits()
    twice = x[:1].expand(2, 64)
    with CONTEXTS[name]():
        drawn = pyro.poutine.trace(guide).get_trace(x, y, 1.0)
        first, second = pyro.poutine.replay(model.network, trace=drawn)(twice)
    assert not torch.allclose(first, second)


@pytest.mark.parametrize(
    "objective",
    [Trace_ELBO(), minibatch_elbo(None, 1), minibatch_elbo(None, 3)],
    ids=["Pyro's", "ours, 1 draw", "ours, 3 draws"],
)
def test_sticking_the_landing_has_no_noise_at_the_optimum(objective):
    """Each draw's gradient is 0 at q = prior without data; the naive one's is not."""
    torch.set_default_dtype(torch.float64)
    model = bbb.BayesianModel(
        bbb.BayesianMLP([3, 2], prior=dist.Normal(0.0, 1.0)), bbb.likelihoods.Gaussian(), 1
    )
    guide = bbb.AutoSoftplusNormal(model, init_loc=0.0, init_rho=math.log(math.e - 1))
    silent = pyro.poutine.block(model, hide=["obs"])
    gradients = {}
    for name in ("reparam", "stl"):
        guide.zero_grad()
        with ESTIMATORS[name](), pyro.validation_enabled(False):
            objective.loss_and_grads(silent, guide, torch.randn(4, 3), torch.randn(4, 2), 1.0)
        gradients[name] = torch.cat([p.grad.flatten() for p in guide.parameters()]).abs().max()
    assert gradients["stl"] < 1e-14 < 1e-2 < gradients["reparam"]


# --- where it does not apply, and what is left behind ---


def test_sites_without_a_pathwise_gradient_keep_their_score_under_stl():
    """A Bernoulli's parameter learns by the score alone."""
    probs = torch.tensor(0.3, requires_grad=True)
    with sticking_the_landing():
        trace = pyro.poutine.trace(lambda: pyro.sample("z", dist.Bernoulli(probs))).get_trace()
    trace.compute_log_prob()
    trace.nodes["z"]["log_prob_sum"].backward()
    assert probs.grad.abs() > 1


class Embedder(PyroModule):
    def __init__(self):
        super().__init__()
        self.table = PyroSample(dist.Normal(0.0, 1.0).expand([5, 2]).to_event(2))

    def forward(self, x):
        return F.embedding(x, self.table)


@pytest.mark.parametrize("name", CONTEXTS)
def test_an_operation_that_shares_its_weight_says_so_once(name):
    network = Embedder()
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(), 3)
    guide = bbb.AutoSoftplusNormal(model)
    x, y = torch.tensor([0, 1, 4]), torch.randn(3, 2)
    with CONTEXTS[name](), pytest.warns(UserWarning, match="embedding cannot perturb") as caught:
        for _ in range(3):
            Trace_ELBO().loss(model, guide, x, y)
    assert len(caught) == 1


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_guide_that_is_not_diagonal_says_so(name):
    model, guide = make(bbb.BayesianMLP([64, 2, 10]), guide=AutoMultivariateNormal)
    with CONTEXTS[name](), pytest.warns(UserWarning, match="is not an elementwise Normal"):
        Trace_ELBO().loss(model, guide, *digits(), 1.0)


def test_a_weight_used_twice_is_warned_of_by_local_reparameterisation():
    loc = torch.zeros(3, 3)
    with local_reparameterization(), pytest.warns(UserWarning, match="used twice"):
        w = sample(loc, loc)
        F.linear(F.linear(torch.ones(2, 3), w), w)


def test_a_value_that_is_given_is_left_alone():
    """Conditioned sites under a Normal prior are not draws of it."""
    w, x = torch.randn(4, 3), torch.randn(2, 3)
    with local_reparameterization(), pyro.poutine.condition(data={"w": w}):
        outputs = F.linear(x, sample(torch.zeros(4, 3), torch.zeros(4, 3)))
    assert torch.equal(outputs, F.linear(x, w))


@pytest.mark.parametrize("context", ESTIMATORS.values(), ids=ESTIMATORS)
def test_nothing_is_left_after_an_exception(context):
    linear, stack = F.linear, list(pyro.poutine.runtime._PYRO_STACK)
    with pytest.raises(KeyError), context(), context():
        raise KeyError
    loc = torch.zeros(4, 3)
    w, x = sample(loc, loc), torch.randn(3).expand(2, 3)
    first, second = F.linear(x, w)
    assert F.linear is linear and torch.equal(first, second)
    assert pyro.poutine.runtime._PYRO_STACK == stack


def test_the_innermost_context_decides():
    loc, x = torch.zeros(4, 3), torch.randn(2, 3)
    with local_reparameterization(), flipout():
        w = sample(loc, loc)
        assert torch.equal(F.linear(x, w), F.linear(x, w))  # as flipout does
    with flipout(), local_reparameterization(), pytest.warns(UserWarning, match="used twice"):
        w = sample(loc, loc)
        assert not torch.equal(F.linear(x, w), F.linear(x, w))


@pytest.mark.parametrize("name", CONTEXTS)
def test_prediction_is_right_inside_a_context(name):
    model, guide = make(bbb.BayesianMLP([64, 20, 10]))
    x, _ = digits()
    outside = bbb.predict(model, guide, x, num_samples=5, seed=0).probs
    with CONTEXTS[name]():
        inside = bbb.predict(model, guide, x, num_samples=5, seed=0).probs
        drawn = Predictive(model, guide=guide, num_samples=5)(x)["obs"]
    assert torch.equal(inside, outside)
    assert drawn.shape == (5, 128)


# --- combinations ---


def test_contexts_nest_in_either_order():
    """Sticking the landing around local reparameterisation keeps the likelihood's gradient."""
    x, norms = torch.randn(50, 3), []
    orders = [
        (sticking_the_landing, local_reparameterization),
        (local_reparameterization, sticking_the_landing),
    ]
    for outer, inner in orders:
        loc = torch.zeros(2, 3, requires_grad=True)
        with outer(), inner():
            F.linear(x, sample(loc, torch.zeros(2, 3))).sum().backward()
        norms.append(loc.grad)
    assert torch.equal(*norms) and torch.allclose(norms[0], x.sum(0).expand(2, 3), atol=1e-4)


def test_sticking_the_landing_keeps_the_gradient_of_the_kl_under_mean_field():
    """The closed form of a detached posterior would be constant; the sampled KL is not."""
    x, y = digits()
    model, guide = make(bbb.BayesianMLP([64, 5, 10]), init_rho=-1.0)
    elbo = minibatch_elbo("mean_field", 1)
    gradients = []
    with sticking_the_landing():
        for _ in range(100):
            guide.zero_grad()
            elbo.loss_and_grads(model, guide, x, y, 1.0)
            gradients.append(torch.cat([p.grad.flatten() for p in guide.rhos.parameters()]))
    mean = torch.stack(gradients).mean(0)
    assert mean.mean() < -0.1  # of KL[N(0, .31^2) || N(0, 1)] by rho: about -0.7 for each weight


def test_a_matrix_and_its_transpose_are_one_weight_in_flipout():
    """Mean of x W'W for W ~ N(0, 1) of 4 rows is 4 x; with different signs it would be 0."""
    x, loc, rho = torch.ones(COPIES, 2), torch.zeros(4, 2), torch.full((4, 2), 0.541325)
    with flipout(), torch.no_grad():
        draws = []
        for _ in range(CALLS):
            w = sample(loc, rho)
            draws.append(F.linear(F.linear(x, w), w.t()))
    assert_mean(torch.stack(draws), 4.0)


@pytest.mark.parametrize("name", CONTEXTS)
def test_parameters_may_be_expanded_or_parts_of_larger_ones(name):
    flat = torch.arange(20.0)
    for loc, scale in [
        (torch.ones(3, 2), torch.tensor(1e-6)),
        (flat[7:13].view(3, 2), flat[1:2] * 1e-6),
    ]:
        fn = dist.Normal(loc, scale.expand(3, 2)).to_event(2)
        with CONTEXTS[name]():
            w = pyro.sample("w", fn)
            assert torch.allclose(torch.eye(3) @ w, loc, atol=1e-3)


@pytest.mark.parametrize("name", CONTEXTS)
def test_positions_folded_into_the_batch_are_warned_of(name):
    class Folding(PyroModule):
        def __init__(self):
            super().__init__()
            self.linear = bbb.BayesianLinear(3, 1)

        def forward(self, x):
            return self.linear(x.flatten(0, 1)).view(len(x), -1).sum(1, keepdim=True)

    model = bbb.BayesianModel(Folding(), bbb.likelihoods.Gaussian(), 4)
    guide = bbb.AutoSoftplusNormal(model)
    with CONTEXTS[name](), pytest.warns(UserWarning, match="first dimension is not that"):
        Trace_ELBO().loss(model, guide, torch.randn(4, 5, 3), torch.randn(4))


def test_flipout_around_vectorised_particles_still_perturbs_each_example():
    x, y = digits()
    model, guide = make(bbb.BayesianMLP([64, 10]), init_rho=0.0)
    elbo = Trace_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1)

    def spread(context):
        with context(), torch.no_grad():
            return torch.tensor([elbo.loss(model, guide, x, y, 1e-9) for _ in range(120)]).std()

    # the ratio is .33, known to 13 %
    assert spread(flipout) < 0.65 * spread(ESTIMATORS["reparam"])


def test_vectorised_particles_count_a_batch_once_each():
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 1))
    model = bbb.BayesianModel(bbb.bayesianize(network), bbb.likelihoods.Gaussian(), 8)
    guide = bbb.AutoSoftplusNormal(model)
    data = torch.randn(8, 3), torch.randn(8)
    bbb.fit(model, guide, data, epochs=4, num_particles=2, progress=False)
    assert int(model.network[1].num_batches_tracked) == 8


@pytest.mark.parametrize("single", [False, True])
def test_outputs_without_noise_pass_no_gradient_on(single):
    x, scale = torch.randn(5, 4), (torch.rand(4) if single else torch.rand(3, 4))
    x[:2] = 0.0
    outputs = linear_std(x.requires_grad_(), scale.requires_grad_(), None)
    torch.testing.assert_close(outputs, F.linear(x**2, scale**2).sqrt())
    by_x, by_scale = torch.autograd.grad(outputs.sum(), (x, scale))
    assert (outputs[:2] == 0).all() and (by_x[:2] == 0).all()
    assert by_scale.isfinite().all()


@pytest.mark.parametrize("name", CONTEXTS)
def test_weights_that_are_not_normal_are_drawn_once_and_warned_of(name):
    """The loss is the naive one at the same seed, drawn as one vector (the default of `fit`)."""
    layer = PyroModule[nn.Linear](3, 2, bias=False)
    layer.weight = PyroSample(dist.LogNormal(0.0, 1.0).expand([2, 3]).to_event(2))
    model = bbb.BayesianModel(layer, bbb.likelihoods.Gaussian(0.5), num_data=8)
    guide = bbb.AutoSoftplusNormal(model, init_rho=0.0)
    x, y = torch.randn(8, 3), torch.randn(8, 2)
    torch.manual_seed(0)
    expected = bbb.negative_elbo(model, guide)(x, y)
    loss = bbb.negative_elbo(model, guide, estimator=name)
    with pytest.warns(
        UserWarning, match="guide site 'network.weight' is not an elementwise Normal"
    ):
        torch.manual_seed(0)
        actual = loss(x, y)
    assert torch.equal(actual, expected)
