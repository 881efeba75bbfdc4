# SPDX-License-Identifier: Apache-2.0
"""The prior of outputs: against the KL of weights, exact regression, and torch's Normals."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb.elbo import minibatch_elbo
from pyro_bbb.priors import CONTEXTS, FunctionNormal

N, SCALE, NOISE = 30, 0.7, 0.5
COVARIANCES = ["shared", "per_output"]


def linear_kernel(points):
    """The covariance of f(x) = w x + b for standard Normal w and b."""
    return points @ points.T + 1


def rbf(points):
    return (-0.5 * torch.cdist(points, points).square()).exp()


def make(prior, net=None, likelihood=None, covariance="shared", where="1", num_data=N, scale=0.3):
    network = bbb.bayesianize(
        net or nn.Sequential(nn.Identity(), nn.Linear(3, 2)), prior=prior, where=where
    )
    model = bbb.BayesianModel(network, likelihood or likelihoods.Gaussian(NOISE), num_data=num_data)
    return model, bbb.guides.make("vbll", model, covariance=covariance, init_scale=scale)


def perturb(guide):
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return guide


def parts(model, guide, x, y, kl_weight=1.0):
    """The terms of the objective, which `fit` minimises."""
    elbo = minibatch_elbo("mean_field", 1)
    with pyro.validation_enabled(False):
        elbo.differentiable_loss(*guide.in_closed_form(model), x, y, kl_weight)
    return elbo.take_parts()


def kl_at(points, guide, covariance, noise=0.0):
    """The KL of a linear network's outputs at these points, for the guide's parameters."""
    prior = FunctionNormal(
        SCALE, context=lambda x: points, num_points=len(points), noise=noise, kernel=linear_kernel
    )
    model, other = make(prior, covariance=covariance)
    other.load_state_dict(guide.state_dict())
    return parts(model, other, torch.randn(N, 3), torch.randn(N, 2)).kl


# --- function space and weight space ---


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_with_features_of_full_rank_it_is_the_kl_of_the_weights(double, covariance):
    """f(x) = w x + b at four points determines w and b: the KL is invariant under the map."""
    model, guide = make(dist.Normal(0.0, SCALE), covariance=covariance)
    of_weights = parts(model, perturb(guide), torch.randn(N, 3), torch.randn(N, 2)).kl
    of_outputs = kl_at(torch.randn(4, 3), guide, covariance)
    assert of_outputs == pytest.approx(of_weights, rel=1e-6)


def test_it_grows_with_the_points_towards_the_kl_of_the_weights(double):
    """The sets are nested, with noise; what is left is of the order of noise^2 / C."""
    model, guide = make(dist.Normal(0.0, SCALE))
    of_weights = parts(model, perturb(guide), torch.randn(N, 3), torch.randn(N, 2)).kl
    points = torch.randn(800, 3)
    kls = [kl_at(points[:size], guide, "shared", noise=0.1) for size in (1, 3, 10, 50, 800)]
    assert kls == sorted(kls)
    assert 0 < of_weights - kls[-1] < 1e-3 * of_weights


def test_fit_ends_at_the_exact_posterior_of_linear_regression(double):
    x, y = torch.randn(N, 3), torch.randn(N, 2)
    points = torch.randn(4, 3)
    prior = FunctionNormal(
        SCALE, context=lambda x: points, num_points=4, noise=0, kernel=linear_kernel
    )
    model, guide = make(prior)
    bbb.fit(model, guide, (x, y), epochs=250, batch_size=N, lr=0.1, engine="eager", progress=False)
    phi = torch.cat([x, torch.ones(N, 1)], 1)
    covariance = (phi.T @ phi / NOISE**2 + torch.eye(4) / SCALE**2).inverse()
    mean = (covariance @ phi.T @ y / NOISE**2).T
    locs = guide.median().values()
    rows = torch.cat([value.reshape(2, -1) for value in locs], 1)
    torch.testing.assert_close(rows, mean, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        guide.output_moments(model, x).variance[:, 0],
        (phi @ covariance * phi).sum(1),
        rtol=0,
        atol=1e-4,
    )


# --- the KL ---


def normals(outputs, covariance):
    """A prior, points, and the moments of outputs; with those as torch's Normals."""
    prior = FunctionNormal(1.5, noise=0.2, num_points=6, kernel=rbf)
    points, mean = torch.randn(6, 2), torch.randn(6, outputs)
    root = torch.randn(1 if covariance == "shared" else outputs, 6, 4)
    noise = 0.04 * torch.eye(6)
    q = torch.distributions.MultivariateNormal(mean.T, root @ root.mT + noise)
    p = torch.distributions.MultivariateNormal(torch.zeros(6), 2.25 * rbf(points) + noise)
    return prior, (mean, root @ root.mT, points), q, p


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_the_kl_is_that_of_torchs_normals(double, covariance):
    """Closed form, and 20,000 draws within 6 standard errors."""
    prior, arguments, q, p = normals(3, covariance)
    kl = prior.kl(*arguments)
    assert kl > 0
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(q, p).sum())
    draws = q.sample((20_000,))
    ratios = (q.log_prob(draws) - p.log_prob(draws)).sum(1)
    assert (ratios.mean() - kl).abs() < 6 * ratios.std() / math.sqrt(20_000)


def test_the_kl_of_the_prior_is_zero(double):
    prior, (mean, _, points), _, _ = normals(3, "shared")
    covariance = 2.25 * rbf(points)[None]
    assert prior.kl(torch.zeros_like(mean), covariance, points).item() == pytest.approx(0, abs=1e-9)


def test_a_singular_covariance_is_not_a_number(double):
    """Such as that of a head without uncertainty, or of more points than features."""
    prior = FunctionNormal(noise=0, num_points=6)
    assert prior.kl(torch.randn(6, 2), torch.zeros(1, 6, 6), torch.randn(6, 2)).isnan()


def test_the_kl_alone_is_weighted(double):
    x, y = torch.randn(N, 3), torch.randn(N, 2)
    kls = []
    for weight in (1.0, 5.0):
        prior = FunctionNormal(context=torch.ones(1, 3), num_points=2, weight=weight)
        torch.manual_seed(0)
        model, guide = make(prior)
        full, half = parts(model, guide, x, y), parts(model, guide, x, y, 0.5)
        assert half.loss == pytest.approx(0.5 * full.kl + full.nll)
        kls.append(full.kl)
    assert kls[1] == pytest.approx(5 * kls[0])


# --- training ---


def gap_regression(prior):
    """The epistemic standard deviation at a datum and in the gap, and the error of the mean."""
    torch.manual_seed(1)
    x = torch.cat([torch.linspace(-2, -1, 40), torch.linspace(1, 2, 40)])[:, None]
    y = torch.sin(2 * x) + 0.1 * torch.randn(80, 1)
    net = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
    likelihood = likelihoods.Gaussian(0.1)
    model, guide = make(prior, net, likelihood, where="4", num_data=80, scale=0.05)
    bbb.fit(model, guide, (x, y), epochs=800, batch_size=80, lr=0.01, progress=False, seed=0)
    at = guide.output_moments(model, torch.tensor([[-1.5], [0.0]])).variance.sqrt().flatten()
    fitted = guide.output_moments(model, x).mean
    return at[0].item(), at[1].item(), (fitted - y).square().mean().sqrt().item()


def test_the_band_opens_in_a_gap_of_a_regression():
    _, gap, _ = gap_regression(dist.Normal(0.0, 1 / math.sqrt(51)))
    datum, opened, error = gap_regression(FunctionNormal(1.0, num_points=20, weight=5))
    assert opened > 3 * gap
    assert opened > 10 * datum
    assert error < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_captured_and_eager_steps_are_alike_and_batches_of_context_move_no_average(dtype):
    histories, models = [], []
    x, y = torch.rand(64, 1, 8, 6, dtype=dtype), torch.arange(64) % 3
    for engine in ("eager", "compiled"):
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1)]
        net = nn.Sequential(*layers, nn.Linear(72, 3)).to(dtype)
        prior = FunctionNormal(num_points=20)
        model, guide = make(prior, net, likelihoods.Categorical(), where="5", num_data=64)
        options = {"epochs": 3, "batch_size": 32, "progress": False, "seed": 2}
        before = net[0].weight.detach()
        histories.append(
            bbb.fit(model.to(dtype), guide.to(dtype), (x, y), engine=engine, **options)
        )
        models.append(model)
        assert not torch.equal(model.network[0].weight, before)
        assert model.network[1].num_batches_tracked == 6
    rel = 1e-4 if dtype == torch.float32 else 1e-9
    assert histories[0].loss == pytest.approx(histories[1].loss, rel=rel)
    assert histories[0].kl == pytest.approx(histories[1].kl, rel=rel)


CONTEXT_POINTS = {
    "default": None,
    "name": "shuffled",
    "names": ("spread", "shuffled"),
    "tensor": torch.ones(5, 3),
}


@pytest.mark.parametrize("context", CONTEXT_POINTS)
def test_saved_and_loaded_it_predicts_and_trains_as_before(context, tmp_path):
    prior = FunctionNormal(2.0, context=CONTEXT_POINTS[context], num_points=7, weight=3, noise=0.2)
    model, guide = make(prior)
    x, y = torch.randn(N, 3), torch.randn(N, 2)
    bbb.fit(model, guide, (x, y), epochs=2, progress=False, seed=0)
    bbb.save(tmp_path / "model", model, guide)
    pairs = [(model, guide), tuple(bbb.load(tmp_path / "model"))]
    means = [guide.output_moments(model, x).mean for model, guide in pairs]
    assert torch.equal(*means)
    losses = [bbb.fit(*p, (x, y), epochs=2, progress=False, seed=0).loss for p in pairs]
    assert losses[0] == losses[1]


# --- context points ---


@pytest.mark.parametrize("name", ["warped", "clouds", "mixed"])
def test_context_images_are_images(double, name):
    x = torch.rand(5, 3, 9, 14)
    points = CONTEXTS[name](x)
    assert points.shape == x.shape and points.dtype == x.dtype
    assert points.min() >= 0 and points.max() <= 1
    assert not torch.allclose(points, x)
    assert not torch.equal(CONTEXTS[name](x), points)


def test_shuffled_columns_keep_their_values():
    x = torch.randn(20, 4)
    shuffled = CONTEXTS["shuffled"](x)
    assert torch.equal(shuffled.sort(0).values, x.sort(0).values)
    assert not torch.equal(shuffled, x)


def test_points_are_rows_of_a_tensor_or_what_a_function_makes_of_the_minibatch():
    x, rows = torch.zeros(4, 2), torch.arange(10.0)[:, None].expand(10, 2)
    points = FunctionNormal(context=rows, num_points=50).points(x)
    assert points.shape == (50, 2) and set(points[:, 0].tolist()) <= set(range(10))
    points = FunctionNormal(context=lambda x: x + 3, num_points=50).points(x)
    assert torch.equal(points, torch.full((50, 2), 3.0))
    assert FunctionNormal(num_points=3).points(torch.rand(4, 1, 8, 8)).shape == (3, 1, 8, 8)


# --- what it does not support ---


def test_other_guides_and_sampled_weights_are_refused():
    model, guide = make(FunctionNormal())
    data = torch.randn(N, 3), torch.randn(N, 2)
    for other, options in [(bbb.AutoSoftplusNormal(model), {}), (guide, {"loss": "trace"})]:
        with pytest.raises(ValueError, match=r"no density of weights: train .*'vbll'"):
            bbb.fit(model, other, data, epochs=1, progress=False, **options)


def test_weight_and_bias_must_share_it():
    model, guide = make({"*.weight": FunctionNormal(), "*": dist.Normal(0.0, 1.0)})
    with pytest.raises(ValueError, match="weight and bias alike"):
        bbb.fit(model, guide, (torch.randn(N, 3), torch.randn(N, 2)), epochs=1, progress=False)


@pytest.mark.parametrize(
    ("options", "x", "message"),
    [
        (
            {"context": "warped"},
            torch.randn(N, 3),
            "does not fit the inputs, got .* shape \\[30, 3",
        ),
        ({}, torch.ones(N, 3).long(), "does not fit the inputs, got torch.int64"),
        ({"context": len}, torch.randn(N, 3), r"context\(x\) must be a tensor"),
        ({"kernel": torch.norm}, torch.randn(N, 3), r"kernel must return \[64, 64\], got \[\]"),
    ],
)
def test_inputs_and_functions_that_do_not_fit_are_refused(options, x, message):
    net = nn.Sequential(nn.Identity() if x.is_floating_point() else Floating(), nn.Linear(3, 2))
    model, guide = make(FunctionNormal(**options), net)
    with pytest.raises((ValueError, TypeError), match=message):
        bbb.fit(model, guide, (x, torch.randn(N, 2)), epochs=1, progress=False)


class Floating(nn.Module):
    def forward(self, x):
        return x.float()


def test_several_inputs_are_refused():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, a, b):
            return self.head(a + b)

    model, guide = make(FunctionNormal(), Sum(), where="head")
    data = (torch.randn(N, 3), torch.randn(N, 3)), torch.randn(N, 2)
    with pytest.raises(ValueError, match="one tensor of inputs, got 2"):
        bbb.fit(model, guide, data, epochs=1, progress=False)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ((), "a name of `CONTEXTS` or more, got none"),
        ("digits", "context must be one of"),
        (torch.zeros(0, 3), r"\[n, ...\], got a tensor of shape \[0, 3\]"),
        (torch.full((2, 3), torch.nan), "context must be finite inputs"),
    ],
)
def test_a_wrong_context_is_an_error(context, message):
    with pytest.raises(ValueError, match=message):
        FunctionNormal(context=context)
