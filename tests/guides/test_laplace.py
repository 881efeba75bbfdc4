# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation against exact posteriors and curvature computed by other means."""

import copy
import io
import math
import pickle
import warnings
from functools import partial
from itertools import product
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive, Trace_ELBO
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.func import functional_call, jacrev

import pyro_bbb as bbb
from pyro_bbb.guides import linearization
from pyro_bbb.guides._laplace import Linearization
from pyro_bbb.guides.linearization import moments_by_jacobian, output_moments

N, PRIOR, SIGMA = 40, 0.5, 0.8
KINDS = ["hessian", "ggn"]
Laplace = bbb.guides.Laplace
Hessian = partial(Laplace, curvature="hessian")


def regression(sizes=(3, 1), likelihood=None, activation=nn.Tanh):
    x = torch.randn(N, 3) @ torch.tensor([[1.0, 0.6, 0.0], [0.0, 0.8, 0.3], [0.0, 0.0, 0.5]])
    y = x @ torch.tensor([0.7, -0.4, 0.2]) + 0.5 + SIGMA * torch.randn(N)
    network = bbb.BayesianMLP(list(sizes), activation=activation, prior=dist.Normal(0.0, PRIOR))
    likelihood = likelihood or bbb.likelihoods.Gaussian(SIGMA)
    return bbb.BayesianModel(network, likelihood, num_data=N), x, y


def exact(x, y):
    """Precision and mean of the conjugate posterior; the weights, then the bias."""
    design = torch.cat([x, torch.ones(N, 1)], dim=1)
    precision = design.T @ design / SIGMA**2 + torch.eye(4) / PRIOR**2
    return precision, torch.linalg.solve(precision, design.T @ y / SIGMA**2)


def covariance(guide):
    root = guide.parts[0].scale_tril
    return root @ root.T


def precision(guide, batches):
    """The curvature of the negative log joint over the whole data, in double precision."""
    total = guide._total(batches)
    return total.blocks[0].sum + torch.diag(total.prior)


# --- linear regression, where it is exact ---


@pytest.mark.parametrize("curvature", KINDS)
def test_fit_ends_at_the_exact_posterior_of_linear_regression(double, curvature):
    model, x, y = regression()
    guide = bbb.guides.make("laplace", model, curvature=curvature)
    options = {"lr_schedule": "constant", "batch_size": N, "progress": False}
    momentum = partial(torch.optim.SGD, momentum=0.8)
    bbb.fit(model, guide, (x, y), epochs=400, lr=0.01, optimizer=momentum, **options)
    precision, mean = exact(x, y)
    torch.testing.assert_close(guide.loc.detach(), mean, rtol=0, atol=1e-8)
    torch.testing.assert_close(covariance(guide), precision.inverse(), rtol=0, atol=1e-8)
    assert torch.equal(guide.median()["network.fc1.weight"][0], guide.loc.detach()[:3])


def test_draws_and_quantiles_are_those_of_the_exact_posterior(double):
    model, x, y = regression()
    precision, mean = exact(x, y)
    start = {"fc1.weight": mean[None, :3], "fc1.bias": mean[3:]}
    guide = bbb.guides.make("laplace", model, init_loc=start)
    guide.approximate((x, y))
    draws = guide.sample_posterior(20_000)
    joined = torch.cat([draws["network.fc1.weight"][:, 0], draws["network.fc1.bias"]], dim=1)
    white = (joined - mean) @ torch.linalg.cholesky(precision)
    # 4 means and 10 second moments, 5 standard errors: false alarm once in 120,000 seeds
    assert white.mean(0).abs().max() < 5 / math.sqrt(20_000)
    assert (white.T @ white / 20_000 - torch.eye(4)).abs().max() < 5 * math.sqrt(2 / 20_000)
    quantiles = guide.quantiles([0.5, 0.975])["network.fc1.bias"]
    torch.testing.assert_close(quantiles[0], mean[3:])
    sigma = precision.inverse()[3, 3].sqrt()
    torch.testing.assert_close(quantiles[1] - mean[3:], (1.959963984540054 * sigma)[None])
    by_pyro = Predictive(model, guide=guide, num_samples=50)(x)["obs"]
    assert by_pyro.shape == (50, N, 1) and by_pyro.std(0).min() > 0
    assert bbb.predict(model, guide, x, num_samples=20).epistemic_std.min() > 0


# --- the curvature ---


def outputs_by_torch(x):
    """A 3-4-3 network's outputs as a function of one vector of all its weights."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    shapes = {name: p.shape for name, p in net.named_parameters()}

    def outputs(z):
        chunks = z[: sum(shape.numel() for shape in shapes.values())].split(
            [shape.numel() for shape in shapes.values()]
        )
        weights = {k: v.view(s) for (k, s), v in zip(shapes.items(), chunks, strict=True)}
        return functional_call(net, weights, (x.double(),))

    return outputs


def hessian(function):
    return jacrev(jacrev(function))


def log_prior(z):
    return dist.Normal(0.0, PRIOR).log_prob(z).sum()


def test_both_curvatures_of_a_classifier_are_those_of_torchs_own_derivatives():
    model, x, _ = regression((3, 4, 3), bbb.likelihoods.Categorical())
    y = torch.arange(N) % 3
    outputs = outputs_by_torch(x)
    precisions = {}
    for curvature in KINDS:
        guide = bbb.guides.make("laplace", model, curvature=curvature)
        with torch.no_grad():
            guide.loc.copy_(torch.linspace(-1, 1, 31))
        precisions[curvature] = precision(guide, [(x, y)])
    z = guide.loc.detach().double()

    def nll(out):
        return nn.functional.cross_entropy(out, y, reduction="sum")

    expected = hessian(lambda z: nll(outputs(z)) - log_prior(z))(z)
    torch.testing.assert_close(precisions["hessian"], expected, rtol=1e-9, atol=1e-9)

    slope = jacrev(outputs)(z)  # [N, 3, 31]
    p = outputs(z).softmax(-1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    ggn = torch.einsum("ncd,nce,nef->df", slope, fisher, slope) + torch.eye(31) / PRIOR**2
    torch.testing.assert_close(precisions["ggn"], ggn, rtol=1e-9, atol=1e-9)
    assert torch.linalg.eigvalsh(precisions["hessian"])[0] < 0 < torch.linalg.eigvalsh(ggn)[0]


def test_a_latent_scale_is_approximated_in_log_space_with_its_jacobian(double):
    """ln s ~ N(-1, .5) and y ~ N(f, s): the derivatives of the log joint in (w, b, ln s)."""
    model, x, y = regression((3, 1), bbb.likelihoods.Gaussian(dist.LogNormal(-1.0, 0.5)))
    guide = Hessian(model, init_loc={"likelihood.scale": torch.tensor(0.7)})

    def neg_log_joint(z):
        loc = x @ z[:3] + z[3]
        log_prob = dist.Normal(loc, z[4].exp()).log_prob(y).sum()
        return -log_prob - log_prior(z[:4]) - dist.Normal(-1.0, 0.5).log_prob(z[4])

    z = guide.loc.detach().clone()
    assert z[4].item() == pytest.approx(math.log(0.7))
    torch.testing.assert_close(precision(guide, [(x, y)]), hessian(neg_log_joint)(z))
    assert Trace_ELBO().loss(model, guide, x, y) == pytest.approx(neg_log_joint(z).item())
    ggn = Laplace(model, init_loc=guide.median())
    # a linear network is its own tangent
    torch.testing.assert_close(precision(ggn, [(x, y)]), hessian(neg_log_joint)(z))


@pytest.mark.parametrize("curvature", KINDS)
def test_batches_add_up_to_the_whole_data_whatever_their_sizes(double, curvature):
    model, x, y = regression((3, 4, 1))
    guide = bbb.guides.make("laplace", model, curvature=curvature)
    expected = precision(guide, [(x, y)])
    for sizes in ([7] * 5 + [5], [1] * N, [N - 1, 1]):
        batches = zip(x.split(sizes), y.split(sizes), strict=True)
        torch.testing.assert_close(precision(guide, batches), expected)
    halves = precision(guide, [(x[:20], y[:20])]) + precision(guide, [(x[20:], y[20:])])
    torch.testing.assert_close(halves / 2, expected)  # each half stands for the whole


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
        nn.Sequential(nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 3), nn.Dropout(0.5)),
    ],
)
@pytest.mark.parametrize("prior", [dist.Normal(0.0, 1.0), bbb.ScaleMixtureNormal(0.5, 1.0, 0.5)])
def test_converted_networks_and_mixture_priors_have_a_curvature(network, prior):
    network = bbb.bayesianize(network, prior=prior)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=N)
    x, y = torch.randn(N, 1, 4, 4), torch.arange(N) % 3
    guide = Laplace(model)
    guide.approximate((x, y))
    assert guide.parts[0].scale_tril.isfinite().all()
    assert bbb.predict(model, guide, x, num_samples=5).sample_probs.shape == (5, N, 3)


# --- the guide as an object ---


def approximated():
    model, x, y = regression((3, 4, 1))
    guide = Laplace(model)
    guide.approximate((x, y))
    return model, guide, (x, y)


def test_before_the_approximation_there_are_no_draws_but_a_median():
    model, x, y = regression()
    guide = Laplace(model)
    for method in (
        lambda: guide.sample_posterior(3),
        lambda: guide.quantiles([0.5]),
        lambda: bbb.predict(model, guide, x),
    ):
        with pytest.raises(
            RuntimeError, match=r"still a point: call guide.approximate\(\(x, y\)\)"
        ):
            method()
    assert guide.median()["network.fc1.weight"].shape == (1, 3)
    assert bbb.predict_mean(model, guide, x).mean.shape == (N, 1)
    guide.approximate((x, y))
    guide.reset()
    with pytest.raises(RuntimeError, match="still a point"):
        guide.sample_posterior(3)


def test_copies_pickles_and_states_hold_the_factor():
    model, guide, _ = approximated()
    twin, sent = copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))
    fresh = Laplace(model)
    buffer = io.BytesIO()
    torch.save(guide.state_dict(), buffer)
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert set(guide.state_dict()) == {"loc", "prior_scale", "parts.0.scale_tril"}
    expected = seeded_draws(guide)
    for copied in (twin, sent, fresh):
        actual = seeded_draws(copied)
        assert all(torch.equal(actual[name], expected[name]) for name in expected)
    guide.reset()
    assert twin.parts[0].scale_tril is not None
    assert set(guide.state_dict()) == {"loc", "prior_scale"}
    fresh.load_state_dict(guide.state_dict())  # a point again
    assert fresh.parts[0].scale_tril is None


def seeded_draws(guide):
    pyro.set_rng_seed(5)
    return guide.sample_posterior(4)


def test_the_approximation_leaves_model_and_guide_as_they_were():
    model, x, y = regression((3, 4, 1))
    model.train()
    guide = Laplace(model)
    before, state = guide.loc.detach().clone(), torch.get_rng_state()
    guide.approximate((x, y))
    assert torch.equal(guide.loc, before) and guide.loc.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and not model.network._forward_hooks
    assert guide.model is model and len(pyro.get_param_store()) == 0


@pytest.mark.parametrize("form", ["loader", "dataset", "stopped"])
def test_fit_hands_over_whatever_form_the_data_have(form):
    model, x, y = regression()
    pairs = torch.utils.data.TensorDataset(x, y)
    data = torch.utils.data.DataLoader(pairs, batch_size=16) if form == "loader" else pairs
    guide = Laplace(model)
    stop = (lambda event: True,) if form == "stopped" else ()
    bbb.fit(model, guide, data, epochs=2, batch_size=16, callbacks=stop, progress=False)
    precision, _ = exact(x, y)
    torch.testing.assert_close(covariance(guide), precision.inverse(), rtol=1e-4, atol=1e-6)


# --- refusals ---


def test_a_point_that_is_no_mode_is_refused_with_its_curvature_and_the_ways_out():
    """f = v tanh(u x) at u = v = 0, with y = 3x: the Hessian is [[h, -3s], [-3s, h]]."""

    class Product(PyroModule):
        def __init__(self):
            super().__init__()
            self.u, self.v = (PyroSample(dist.Normal(0.0, 1.0)) for _ in range(2))

        def forward(self, x):
            return self.v * torch.tanh(self.u * x)

    x = torch.linspace(-1, 1, 5)[:, None]
    model = bbb.BayesianModel(Product(), bbb.likelihoods.Gaussian(1.0), num_data=5)
    guide = Hessian(model, init_loc=0.0)
    smallest = 1 - 3 * 2.5  # the prior's 1, and 3 times the sum of squares of x
    with pytest.raises(
        bbb.guides.NoModeError,
        match=rf"smallest is {smallest}: .*no maximum.*Train.*curvature='ggn'",
    ):
        guide.approximate((x, 3 * x))
    assert guide.parts[0].scale_tril is None
    with pytest.raises(bbb.guides.NoModeError) as raised:
        bbb.fit(model, guide, (x, 3 * x), epochs=2, lr=1e-9, progress=False)
    assert len(raised.value.history) == 2
    guide = Laplace(model, init_loc=0.0)
    guide.approximate((x, 3 * x))
    torch.testing.assert_close(covariance(guide), torch.eye(2))  # J = 0: the prior's


# --- structures: an independent implementation, and what each cannot serve ---

DELTA, NOISE = 2.0, 0.7  # precision of the prior, standard deviation of the noise


def mlp():
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3))


def lenet5():
    convolutions = [nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2)]
    convolutions += [nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten()]
    layers = [nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)]
    return nn.Sequential(*convolutions, *layers)


class Residual(nn.Module):
    """Two convolutions with batch normalisation, and a shortcut that has a convolution or not."""

    def __init__(self, channels, out, stride):
        super().__init__()
        first = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        layers = [first, nn.BatchNorm2d(out), nn.Tanh()]
        layers += [nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)]
        self.residual = nn.Sequential(*layers)
        self.shortcut = nn.Conv2d(channels, out, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return torch.tanh(self.shortcut(x) + self.residual(x))


def resnet():
    stem = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh()
    blocks = Residual(4, 4, 1), Residual(4, 6, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    network = nn.Sequential(*stem, *blocks, nn.Linear(6, 3))
    for norm in (m for m in network.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_mean.normal_(0.0, 0.3)
        norm.running_var.uniform_(0.5, 1.5)
        norm.requires_grad_(False)  # laplace-torch would count its parameters as weights
    return network.eval()


def by_laplace_torch(network, kind, structure, data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = pytest.importorskip("laplace")
        last = structure == "last_layer"
        posterior = peer.Laplace(
            network,
            kind,
            subset_of_weights="last_layer" if last else "all",
            hessian_structure="full" if last else structure,
            prior_precision=DELTA,
            sigma_noise=NOISE if kind == "regression" else 1.0,
        )
        pairs = torch.utils.data.TensorDataset(*data)
        posterior.fit(torch.utils.data.DataLoader(pairs, batch_size=len(pairs)))
        moments = posterior._glm_predictive_distribution(data[0][:7])
        posterior.optimize_prior_precision(method="marglik")
    return moments, posterior.prior_precision.item()


STRUCTURES = ("full", "kron", "diag", "last_layer")


@pytest.mark.parametrize(
    ("network", "shape", "structure", "kind"),
    [
        *product([mlp], [(4,)], STRUCTURES, ["classification", "regression"]),
        *product([resnet], [(3, 8, 8)], ["kron"], ["classification", "regression"]),
        *(
            pytest.param(lenet5, (1, 28, 28), *case, marks=pytest.mark.slow)
            for case in zip(
                STRUCTURES[1:], ["classification", "regression", "classification"], strict=True
            )
        ),
    ],
)
def test_outputs_have_the_moments_of_laplace_torch(double, network, shape, structure, kind):
    """The prior's precision has its best value there, found by 100 steps of Adam."""
    net, x = network(), torch.randn(30, *shape)
    classes = net(x).shape[1]
    y = torch.arange(30) % classes if kind == "classification" else torch.randn(30, classes)
    (mean, covariance), precision = by_laplace_torch(net, kind, structure, (x, y))
    likelihoods = {
        "classification": bbb.likelihoods.Categorical(),
        "regression": bbb.likelihoods.Gaussian(NOISE),
    }
    converted = bbb.bayesianize(net, prior=dist.Normal(0.0, DELTA**-0.5))
    model = bbb.BayesianModel(converted, likelihoods[kind], num_data=30)
    guide = bbb.guides.make("laplace", model, structure=structure)
    guide.approximate((x, y))
    moments = output_moments(model, guide, x[:7])
    torch.testing.assert_close(moments.mean, mean)
    torch.testing.assert_close(moments.covariance, covariance, rtol=1e-8, atol=1e-10)
    best = bbb.guides.make("laplace", model, structure=structure, optimize_prior=True)
    best.approximate((x, y))
    assert DELTA / best.prior_scale.item() ** 2 == pytest.approx(precision, rel=0.02)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_the_priors_of_layers_have_mackays_fixed_point(double, structure):
    """The precision times the square of a layer's weights is its number of determined ones."""
    model, x, y = regression((3, 4, 2), bbb.likelihoods.Categorical())
    guide = Laplace(model, structure=structure, optimize_prior="layer", init_loc="he")
    guide.approximate((x, (y > 0).long()))
    variance, slices = guide.unconstrained_normal().std().square(), guide.latents.slices
    assert guide.prior_scale.shape == (2,)
    for i, scale in enumerate(guide.prior_scale, start=1):
        layer = [slices[f"network.fc{i}.{name}"] for name in ("weight", "bias")]
        of_layer = torch.cat([torch.arange(guide.latent_dim)[where] for where in layer])
        precision = 1 / (PRIOR * scale) ** 2
        determined = len(of_layer) - precision * variance[of_layer].sum()
        square = guide.loc.detach()[of_layer].square().sum()
        torch.testing.assert_close(precision * square, determined, rtol=1e-3, atol=0)
    fresh = Laplace(model, structure=structure, optimize_prior="layer")
    fresh.load_state_dict(guide.state_dict())
    assert torch.equal(fresh.prior_scale, guide.prior_scale)


def test_a_trunk_of_ordinary_parameters_is_one_of_known_latents(double):
    """No batch leaves a graph, as its gradients are not needed."""
    x, y, net, results = torch.randn(N, 4), torch.arange(N) % 3, mlp(), []
    for where, structure in [("*", "last_layer"), ("4.*", "full")]:
        network = bbb.bayesianize(net, prior=dist.Normal(0.0, PRIOR), where=where)
        model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=N)
        guide = bbb.guides.make("laplace", model, structure=structure, optimize_prior=True)
        guide.approximate([(x[:15], y[:15]), (x[15:], y[15:])])
        assert not guide._total([(x, y)]).blocks[0].sum.requires_grad
        results.append((guide.prior_scale, output_moments(model, guide, x).covariance))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "last_layer"])
def test_draws_have_the_covariance_that_the_outputs_have(double, structure):
    """Draws of the weights through the tangent of a network that is linear in them."""
    model, x, y = regression((3, 2), bbb.likelihoods.Categorical())
    guide = bbb.guides.make("laplace", model, structure=structure)
    guide.approximate((x, torch.arange(N) % 2))
    moments = output_moments(model, guide, x[:5])
    mean, covariance = moments.mean, moments.covariance
    draws = guide.sample_posterior(20_000)
    weight, bias = draws["network.fc1.weight"], draws["network.fc1.bias"]
    outputs = torch.einsum("soi,ni->nso", weight, x[:5]) + bias
    deviations = outputs - mean[:, None]
    sampled = deviations.mT @ deviations / 20_000
    limits = 5 * (2 / 20_000) ** 0.5 * covariance.diagonal(dim1=1, dim2=2).amax(1)
    assert ((sampled - covariance).abs().amax((1, 2)) < limits).all()
    log_prob = guide.get_posterior().log_prob(guide.loc)
    scales = sum(block.log_det_root() for block in guide.covariance)
    dimension = sum(block.size for block in guide.covariance)
    assert log_prob.item() == pytest.approx(
        -scales.item() - 0.5 * dimension * math.log(2 * math.pi)
    )


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("structure", ["kron", "last_layer_kron"])
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4, bias=False), nn.ReLU()], (5,)),
        ([nn.Linear(5, 6), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4)], (3, 5)),
        ([nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(3, 1, 3)], (2, 8, 8)),
        ([nn.Conv2d(2, 6, (2, 3), padding="same"), nn.ReLU(), nn.Conv2d(6, 1, 1)], (2, 2, 2)),
    ],
)
def test_kronecker_moments_by_layer_are_those_of_the_jacobian(double, layers, shape, structure):
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3))
    network = bbb.bayesianize(network, prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=70)
    x, y = torch.randn(70, *shape), torch.arange(70) % 3  # more than one part of the inputs
    guide = Laplace(model, structure=structure)
    guide.approximate((x, y))
    actual = output_moments(model, guide, x)
    expected = moments_by_jacobian(model, guide.latents, guide.unconstrained_normal(), x)
    torch.testing.assert_close(actual.mean, expected.mean)
    torch.testing.assert_close(actual.covariance, expected.covariance)


@pytest.mark.parametrize(
    ("likelihood", "y"),
    [
        (bbb.likelihoods.Categorical(), torch.arange(N) % 3),
        (bbb.likelihoods.StudentT(3.0, 0.05), torch.randn(N, 3).double()),  # not log-concave
    ],
)
def test_the_diagonal_by_layers_is_that_of_the_full_curvature(double, monkeypatch, likelihood, y):
    layers = (nn.Conv2d(1, 3, 3, padding=1, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3))
    network = bbb.bayesianize(nn.Sequential(*layers), prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, likelihood, num_data=N)
    x = torch.randn(N, 1, 5, 5)
    full = Laplace(model, structure="full")._total([(x, y)]).blocks[0].sum.diagonal()
    guide = Laplace(model, structure="diag")
    monkeypatch.setattr(Linearization, "jacobians", None)
    total = guide._total([(x[:20], y[:20]), (x[20:], y[20:])])
    torch.testing.assert_close(total.blocks[0].sum, full)


@pytest.mark.parametrize("bias", [True, False])
def test_a_last_layer_has_the_curvature_and_moments_of_its_jacobian(double, monkeypatch, bias):
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=bias)
    network = bbb.bayesianize(nn.Sequential(*layers), prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=N)
    guide, x, y = Laplace(model, structure="last_layer"), torch.randn(N, 4), torch.arange(N) % 3
    guide.approximate((x, y))
    moments = output_moments(model, guide, x)
    by_layer = covariance(guide), moments.covariance
    monkeypatch.setattr(Linearization, "head", lambda *_: None)
    monkeypatch.setattr(linearization, "outputs_and_head", lambda *_: (moments.mean, None))
    guide.approximate((x, y))
    by_jacrev = covariance(guide), output_moments(model, guide, x).covariance
    torch.testing.assert_close(by_layer, by_jacrev)


@pytest.mark.parametrize(
    ("likelihood", "rows"),
    [(bbb.likelihoods.Gaussian(0.4), N), (bbb.likelihoods.Categorical(), 1)],
)
def test_a_last_layers_product_is_its_full_curvature_where_that_is_one(double, likelihood, rows):
    r"""Lambda is the same for all examples of known noise: sum of Lambda x a a' is a product."""
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)
    network = bbb.bayesianize(nn.Sequential(*layers), prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, likelihood, num_data=rows)
    x, y = torch.randn(rows, 4), torch.randn(rows, 3)
    y = y.argmax(1) if isinstance(likelihood, bbb.likelihoods.Categorical) else y
    results = []
    for structure in ("last_layer", "last_layer_kron"):
        guide = Laplace(model, structure=structure, optimize_prior=True)
        guide.approximate((x, y))
        moments = output_moments(model, guide, torch.linspace(-1, 1, 20).view(5, 4))
        results.append((guide.prior_scale, moments.mean, moments.covariance))
    torch.testing.assert_close(*results)


def test_a_last_layer_of_51200_weights_has_a_kronecker_product():
    network = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 100))
    network = bbb.bayesianize(network, prior=dist.Normal(0.0, 0.1), where="2.*")
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=500)
    with pytest.raises(ValueError, match=r"at most 4,096 .* got 51,300; .*'last_layer_kron'"):
        Laplace(model, structure="last_layer")
    guide = Laplace(model, structure="last_layer_kron", optimize_prior=True)
    x, y = torch.randn(500, 8), torch.randint(100, (500,))
    guide.approximate((x, y))
    prediction = bbb.predict(model, guide, x[:50], linearized=True, num_samples=20)
    assert prediction.probs.shape == (50, 100) and (prediction.epistemic > 0).all()


def test_a_layer_without_kronecker_factors_is_named_with_the_structures_that_serve():
    grouped = nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(8, 3))
    network = bbb.bayesianize(grouped, prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=N)
    x, y = torch.randn(N, 2, 4, 4), torch.arange(N) % 3
    guide = Laplace(model, structure="kron")
    with pytest.raises(ValueError, match=r"got network.0.weight, .*use structure='diag'"):
        guide.approximate((x, y))
    assert guide.is_point
    for structure in ("diag", "last_layer", "full"):
        Laplace(model, structure=structure).approximate((x, y))


def test_priors_with_latents_of_their_own_need_the_full_structure():
    network = bbb.BayesianMLP([3, 2, 1], prior="inverse_gamma")
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(1.0), num_data=N)
    x = torch.randn(N, 3)
    with pytest.raises(ValueError, match=r"structure='diag' needs priors of independent weights"):
        Laplace(model, structure="diag").approximate((x, x.sum(1)))


# --- the guide looks at its own draws ---


def test_draws_that_do_not_describe_the_training_data_are_told():
    """200 examples of noise .05, 40 hidden units: most weights are left to the prior."""
    x = torch.linspace(-1, 1, 200)[:, None]
    network = bbb.BayesianMLP([1, 40, 1], activation=nn.Tanh, prior=dist.Normal(0.0, 3.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(0.05), num_data=200)
    guide = Laplace(model)
    data = x, torch.sin(3 * x)
    with pytest.warns(bbb.guides.LinearizationWarning, match=r"use predict\(..., linearized=True"):
        bbb.fit(model, guide, data, epochs=300, lr=0.02, progress=False)
    by_draws = bbb.predict(model, guide, x).log_prob(data[1]).mean()
    by_tangent = bbb.predict(model, guide, x, linearized=True).log_prob(data[1]).mean()
    assert by_tangent > by_draws + 0.1


class Wrapped(nn.Module):
    """A network whose output is an object with logits, as Hugging Face's."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return SimpleNamespace(logits=self.inner(x))


@pytest.mark.parametrize("structure", ["full", "kron", "last_layer"])
def test_outputs_may_be_an_object_with_logits(structure):
    x, y = torch.randn(N, 3), torch.arange(N) % 2

    def covariances(wrap):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        network = bbb.bayesianize(wrap(layers), dist.Normal(0.0, 1.0))
        model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=N)
        guide = bbb.guides.make("laplace", model, structure=structure)
        guide.approximate((x, y))
        return guide.unconstrained_normal().std()

    torch.testing.assert_close(covariances(Wrapped), covariances(lambda layers: layers))
