# SPDX-License-Identifier: Apache-2.0
"""What makes a training step fast changes nothing: the same noise gives what plain Pyro gives."""

import gc

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import pyro_bbb as bbb
from pyro_bbb.distributions.scale_mixture import LogMixture, log_mixture
from pyro_bbb.elbo import minibatch_elbo
from pyro_bbb.guides._mean_field import plain_draw, reparameterize
from pyro_bbb.training.optim import JointOptim

SIZES = [5, 7, 3]
MIXTURE = {"pi": 0.3, "sigma1": 1.2, "sigma2": 0.05}


pytestmark = pytest.mark.usefixtures("double")


def posterior(*shape):
    loc = torch.randn(shape, requires_grad=True)
    rho = (torch.randn(shape) - 2).requires_grad_()
    return loc, rho, torch.randn(shape)


# --- one draw and its log-density ---


@pytest.mark.parametrize("function", [plain_draw, reparameterize])
def test_a_draw_has_the_density_of_torchs_normal(function):
    loc, rho, noise = posterior(24)
    value, scale, log_q = function(loc, rho, noise)
    torch.testing.assert_close((value, scale), (loc + F.softplus(rho) * noise, F.softplus(rho)))
    torch.testing.assert_close(log_q, dist.Normal(loc, scale).log_prob(value).sum())


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_the_gradient_of_a_draw_is_that_of_its_formula(used):
    loc, rho, noise = posterior(24)
    weights = torch.randn(24), torch.randn(24), torch.tensor(0.7)

    def objective(outputs):
        return sum((outputs[i] * weights[i]).sum() for i in used)

    def gradient(function):
        total = objective(function(loc, rho, noise))
        return torch.autograd.grad(total, (loc, rho), allow_unused=True)

    for actual, expected in zip(gradient(reparameterize), gradient(plain_draw), strict=True):
        expected = torch.zeros(24) if expected is None else expected
        actual = torch.zeros(24) if actual is None else actual
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


# --- the mixture's log-density, summed ---


def test_the_mixture_of_numbers_is_finite_where_the_log_density_is():
    w = torch.tensor([1e20, 1e18], dtype=torch.float32)  # the first one's square is NaN
    mixture = bbb.distributions.map_tensors(
        bbb.ScaleMixtureNormal(0.5, 900.0, 1.0), lambda x: x.float()
    )
    expected = -0.5 * (w.double() / 900).square()
    torch.testing.assert_close(mixture.log_prob(w).double(), expected, rtol=1e-6, atol=0)
    summed = mixture.expand(w.shape).to_event(1).log_prob(w)
    torch.testing.assert_close(summed.double(), expected.sum(), rtol=1e-6, atol=0)


# --- a step ---


def data():
    return torch.randn(20, SIZES[0]), torch.randint(0, SIZES[-1], (20,))


def ours():
    network = bbb.BayesianMLP(SIZES, prior=bbb.ScaleMixtureNormal(**MIXTURE))
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=20)
    return model, bbb.AutoSoftplusNormal(model, init_rho=-2.0)


def plain_pyro(guide):
    """Build posterior and model from Pyro's distributions, parameters in its store."""
    names = guide.site_names
    weights = dist.Categorical(torch.tensor([MIXTURE["pi"], 1 - MIXTURE["pi"]]))
    scales = torch.tensor([MIXTURE["sigma1"], MIXTURE["sigma2"]])

    def q(x, y, kl_weight):
        with poutine.scale(scale=kl_weight):
            for name in names:
                loc = pyro.param(f"loc.{name}", guide.loc(name).clone())
                rho = pyro.param(f"rho.{name}", guide._parameter("rhos", name).detach().clone())
                pyro.sample(name, dist.Normal(loc, F.softplus(rho)).to_event(loc.dim()))

    def p(x, y, kl_weight):
        w = {}
        with poutine.scale(scale=kl_weight):
            for name in names:
                shape = guide.loc(name).shape
                normals = dist.Normal(torch.zeros(*shape, 2), scales)
                mixture = dist.MixtureSameFamily(weights.expand(shape), normals)
                w[name] = pyro.sample(name, mixture.to_event(len(shape)))
        for layer in (1, 2):
            x = F.linear(x, w[f"network.fc{layer}.weight"], w[f"network.fc{layer}.bias"])
            x = x.relu() if layer == 1 else x
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Categorical(logits=x), obs=y)

    return p, q


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("num_particles", [1, 3])
def test_loss_and_gradients_of_a_step_are_those_of_plain_pyro(num_particles, validated):
    """The weights are drawn and scored together if Pyro does not validate."""
    (x, y), (model, guide) = data(), ours()
    p, q = plain_pyro(guide)
    pyro.clear_param_store()
    torch.manual_seed(1)
    expected = Trace_ELBO(num_particles=num_particles).loss_and_grads(p, q, x, y, 0.2)
    torch.manual_seed(1)
    with pyro.validation_enabled(validated):
        loss = minibatch_elbo(None, num_particles).loss_and_grads(model, guide, x, y, 0.2)
    assert loss == pytest.approx(expected, rel=1e-12)
    for name in guide.site_names:
        for quantity in ("loc", "rho"):
            theirs = pyro.param(f"{quantity}.{name}").grad
            torch.testing.assert_close(
                guide._parameter(f"{quantity}s", name).grad, theirs, rtol=1e-10, atol=1e-10
            )
    pyro.clear_param_store()


def steps(model, guide, x, y):
    parameters = {name: p for name, p in guide.named_parameters()}
    optim = JointOptim(torch.optim.Adam, {"lr": 0.01}, parameters=parameters)
    svi = SVI(model, guide, optim, minibatch_elbo(None, 2))
    torch.manual_seed(2)
    return [svi.step(x, y, 0.2) for _ in range(5)]


def test_parameters_of_the_model_train_with_a_guide_of_none():
    x, y = data()
    network = bbb.bayesianize(
        torch.nn.Sequential(torch.nn.Linear(SIZES[0], 4), torch.nn.Linear(4, SIZES[-1])), where="1"
    )
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=20)

    def prior(x, y, kl_weight):
        with poutine.scale(scale=kl_weight):
            model.draw_latents()

    before = network[0].weight.clone()
    bbb.fit(model, prior, (x, y), epochs=1, progress=False)
    assert not torch.equal(network[0].weight, before)


def test_a_step_leaves_nothing_for_the_garbage_collector():
    # what it did leave would hold a step's memory until the collector's next turn
    (x, y), (model, guide) = data(), ours()
    steps(model, guide, x, y)
    gc.collect()
    gc.disable()
    try:
        before = sum(issubclass(type(x), Tensor) for x in gc.get_objects())
        bbb.fit(model, guide, (x, y), epochs=1, batch_size=2, progress=False)
        left = sum(issubclass(type(x), Tensor) for x in gc.get_objects()) - before
    finally:
        gc.enable()
    assert left <= 3 * len(list(guide.parameters()))  # gradients' places and the optimiser's state


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
def test_a_mixture_of_fast_is_that_of_tensors(dtype, sigma2):
    numbers, parameters = both(dtype, sigma2)
    assert numbers._fast is not None and parameters._fast is None
    w = (torch.randn(2000).sign() * torch.logspace(-9, 12, 2000)).to(dtype).requires_grad_()
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    actual, expected = (m.expand(w.shape).log_prob(w) for m in (numbers, parameters))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=10 * tolerance)
    slopes = [torch.autograd.grad(x.sum(), w)[0] for x in (actual, expected)]
    torch.testing.assert_close(*slopes, rtol=50 * tolerance, atol=0)


def test_fast_whose_squares_overflow_are_left_to_tensors():
    for sigma in (1e-12, 1e6):
        mixture = bbb.ScaleMixtureNormal(0.5, sigma, sigma / 10)
        assert mixture._fast is None
        assert mixture.log_prob(torch.tensor(sigma)).isfinite()


def test_its_derivatives_of_both_orders_and_its_batches():
    numbers = both()[0]._fast
    w = (torch.randn(3, 4) * 0.2).requires_grad_()
    for dims in (0, 1, 2):
        assert gradcheck(lambda w, dims=dims: LogMixture.apply(w, numbers, dims), w)
        assert gradgradcheck(lambda w, dims=dims: LogMixture.apply(w, numbers, dims), w)
    rows = torch.vmap(lambda row: LogMixture.apply(row, numbers, 1))(w)
    torch.testing.assert_close(rows, LogMixture.apply(w, numbers, 1))
    general = log_mixture(w, both()[1]._coefficients, 2)
    torch.testing.assert_close(LogMixture.apply(w, numbers, 2), general, rtol=1e-13, atol=0)
