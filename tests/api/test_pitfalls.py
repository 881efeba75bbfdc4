# SPDX-License-Identifier: Apache-2.0
"""The pitfalls of Pyro that this library is to spare its users: each shown first, then ours."""

import copy
import json
import math
import re
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn

import pyro_bbb as bbb

PACKAGE = Path(bbb.__file__).parent


@pytest.fixture(autouse=True)
def default_settings():
    assert not pyro.settings.get("module_local_params"), "the pitfalls are those of the defaults"


class PlainNet(PyroModule):
    """A linear map written with Pyro alone."""

    def __init__(self):
        super().__init__()
        self.linear = PyroModule[nn.Linear](3, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))

    def forward(self, x, y=None):
        loc = self.linear(x)[:, 0]
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(loc, 0.5), obs=y)


def make(likelihood=None, prior=None, n=20):
    network = bbb.BayesianMLP([3, 4, 1], prior=prior or dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, likelihood or bbb.likelihoods.Gaussian(0.5), num_data=n)
    return model, bbb.AutoSoftplusNormal(model)


def data(n=20):
    x = torch.randn(n, 3)
    return x, x.sum(1)


def snapshot(guide):
    return {name: value.detach().clone() for name, value in guide.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- 1: two guides share their parameters through the global store ---


def by_svi(model, guide, x, y):
    SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO()).step(x, y)


def by_joint_svi(model, guide, x, y):
    SVI(model, guide, bbb.JointOptim(torch.optim.Adam, {"lr": 0.1}), Trace_ELBO()).step(x, y)


def by_fit(model, guide, x, y):
    bbb.fit(model, guide, (x, y), epochs=1, lr=0.1, progress=False)


def by_module(model, guide, x, y):
    loss = Trace_ELBO()(model, guide)
    optimizer = torch.optim.Adam(loss.parameters(), lr=0.1)
    loss(x, y).backward()
    optimizer.step()


def test_1_a_new_stock_guide_takes_the_values_of_the_first():
    x, y = data()
    model = PlainNet()
    first, second = AutoNormal(model), AutoNormal(model)
    for _ in range(5):
        by_svi(model, first, x, y)
    second(x, y)  # never trained
    assert same(second.median(), first.median())


@pytest.mark.parametrize("train", [by_svi, by_joint_svi, by_fit, by_module])
@pytest.mark.parametrize("models", ["one model", "two models"])
def test_1_our_guides_are_independent(train, models):
    x, y = data()
    likelihood = bbb.likelihoods.Gaussian.learned
    model, first = make(likelihood(1.0))
    other_model, second = make(likelihood(2.0))
    if models == "one model":
        other_model, second = model, bbb.AutoSoftplusNormal(model)
    start = snapshot(second)
    train(model, first, x, y)
    assert same(snapshot(second), start)
    moved = snapshot(first)
    assert not any(torch.equal(moved[name], start[name]) for name in moved if "locs" in name)
    noise = model.likelihood.scale_unconstrained.clone()
    train(other_model, second, x, y)
    assert same(snapshot(first), moved)
    assert not same(snapshot(second), start)
    assert torch.equal(model.likelihood.scale_unconstrained, noise) == (models == "two models")


def test_1_fit_keeps_stock_guides_apart_too():
    model, _ = make()
    pairs = data()
    first, second = AutoNormal(model), AutoNormal(model)
    bbb.fit(model, first, pairs, epochs=3, lr=0.1, progress=False)
    moved = snapshot(first)
    bbb.fit(model, second, pairs, epochs=1, lr=1e-12, seed=5, progress=False)
    assert same(snapshot(first), moved)
    assert not any(
        torch.equal(a, b) for a, b in zip(moved.values(), second.parameters(), strict=True)
    )


# --- 2: no closed form for AutoNormal, and a bias on constrained sites ---


def positive_latent():
    pyro.sample("z", dist.LogNormal(0.0, 1.0))


def kl_of_log_normals(loc, scale):
    return (0.5 * (scale**2 + loc**2 - 1) - torch.log(scale)).item()


def test_2_the_mean_field_loss_is_noisy_and_biased_for_a_stock_guide_and_exact_for_ours():
    stock = AutoNormal(positive_latent, init_scale=0.5)
    stock()
    with torch.no_grad():
        stock.locs.z.fill_(1.0)
    losses = torch.tensor([TraceMeanField_ELBO().loss(positive_latent, stock) for _ in range(1000)])
    exact = kl_of_log_normals(torch.tensor(1.0), torch.tensor(0.5))
    standard_error = losses.std().item() / math.sqrt(1000)
    assert losses.std() > 0.1
    assert abs(losses.mean().item() - exact) > 20 * standard_error
    # the density of the Delta, which is left out, is that of the exponential: E[-ln z] = -loc
    assert abs(losses.mean().item() - 1.0 - exact) < 4.5 * standard_error

    guide = bbb.AutoSoftplusNormal(positive_latent)
    guide()
    guide.loc("z").fill_(1.0)
    ours = {TraceMeanField_ELBO().loss(positive_latent, guide) for _ in range(5)}
    assert len(ours) == 1
    exact = kl_of_log_normals(torch.tensor(1.0), guide.scale("z"))
    assert ours.pop() == pytest.approx(exact, rel=1e-5)


# --- 3: scaling the model alone leaves log q unscaled ---


def unweighted_guide(guide):
    """Our guide without the weight, as a stock one is."""
    return lambda x, y=None, kl_weight=1.0: guide(x, y)


@pytest.mark.parametrize("elbo", [Trace_ELBO(), TraceMeanField_ELBO()])
def test_3_the_weight_is_of_no_use_on_the_model_alone_and_right_on_both(elbo):
    model, guide = make()
    x, y = data()

    def loss(guide, weight):
        pyro.set_rng_seed(4)
        return elbo.loss(model, guide, x, y, weight)

    nll = loss(guide, 0.0)
    kl = loss(guide, 1.0) - nll
    halved = nll + 0.5 * kl
    assert kl > 10
    assert abs(loss(unweighted_guide(guide), 0.5) - halved) > 5
    assert loss(guide, 0.5) == pytest.approx(halved, rel=1e-5)


# --- 4: lazy guides without parameters; copies that break the original ---


def test_4_stock_guides_start_empty_and_ours_do_not():
    model, guide = make()
    assert list(AutoNormal(model).parameters()) == []
    with pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.Adam(AutoNormal(model).parameters())
    assert len(list(guide.parameters())) == 8
    state = guide.state_dict()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        trained = AutoNormal(model)
        trained(*data())
        AutoNormal(model).load_state_dict(trained.state_dict())
    bbb.AutoSoftplusNormal(model).load_state_dict(state)


def test_4_copying_breaks_a_stock_guide_and_not_ours():
    model, guide = make()
    stock = AutoNormal(model)
    copy.deepcopy(stock)
    with pytest.raises(TypeError):
        stock(*data())  # its model is gone

    twin = copy.deepcopy(guide)
    assert guide.model is model and twin.model is model
    for fitted in (guide, twin):
        bbb.fit(model, fitted, data(), epochs=1, progress=False)


# --- 6: vectorised prediction ---


def test_6_weights_with_a_batch_dimension_fail_in_stock_pyro_and_not_in_ours():
    x, y = data()
    plain = PlainNet()
    stock = AutoNormal(plain)
    stock(x, y)
    batched = {"num_particles": 7, "vectorize_particles": True, "max_plate_nesting": 1}
    with pytest.raises(RuntimeError, match="2 dimensions, but self is"):
        Predictive(plain, guide=stock, num_samples=7, parallel=True)(x)
    with pytest.raises(RuntimeError, match="2 dimensions, but self is"):
        Trace_ELBO(**batched).loss(plain, stock, x, y)

    model, guide = make()
    drawn = Predictive(model, guide=guide, num_samples=7, parallel=True)(x)["obs"]
    assert drawn.shape == (7, 20, 1)
    assert math.isfinite(Trace_ELBO(**batched).loss(model, guide, x, y))


# --- 7: validation is on by default, and a switch must be put back ---


@pytest.mark.parametrize("validation", [True, False])
def test_7_fit_turns_validation_off_and_restores_what_it_found(validation):
    seen = []

    class Spy(bbb.likelihoods.Gaussian):
        def arguments(self, outputs):
            seen.append(torch.distributions.Distribution._validate_args)
            return super().arguments(outputs)

    model, guide = make(Spy(0.5))

    def fail(event):
        raise RuntimeError("stop")

    with pyro.validation_enabled(validation):
        settings = pyro.settings.get()
        bbb.fit(model, guide, data(), epochs=1, progress=False)
        assert seen[-1] is False  # in the step
        assert pyro.settings.get() == settings
        with pytest.raises(RuntimeError, match="stop"):
            bbb.fit(model, guide, data(), epochs=1, callbacks=[fail], progress=False)
        assert pyro.settings.get() == settings


# --- 8: prior tensors stay behind; weights leave parameters() and state_dict() ---


PRIORS = {
    "Normal": lambda: dist.Normal(0.0, 1.0),
    "mixture": lambda: bbb.ScaleMixtureNormal(0.5, 1.0, 0.1),
    "by name": lambda: {"*.bias": dist.Normal(0.0, 1.0), "*": dist.Laplace(0.0, 1.0)},
}


@pytest.mark.parametrize("prior", PRIORS)
def test_8_the_tensors_of_a_prior_follow_the_network(prior):
    stock = PlainNet().to(torch.float64)
    x, y = data()
    with pytest.raises(RuntimeError, match="dtype"):
        stock(x.double(), y.double())  # the prior stayed in float32

    model, _ = make(bbb.likelihoods.Gaussian(dist.LogNormal(0.0, 1.0)), PRIORS[prior]())
    model(x, y)  # what is computed only once is computed now
    model.to(torch.float64)
    guide = bbb.AutoSoftplusNormal(model)
    trace = poutine.trace(model).get_trace(x.double(), y.double())
    trace.compute_log_prob()
    for name in guide.site_names:
        assert trace.nodes[name]["value"].dtype == torch.float64
        assert trace.nodes[name]["log_prob"].dtype == torch.float64
    assert {p.dtype for p in guide.parameters()} == {torch.float64}
    bbb.fit(model, guide, (x.double(), y.double()), epochs=1, progress=False)


def test_8_what_leaves_the_networks_state_is_in_the_guides():
    linear = PlainNet().linear
    assert "weight" not in dict(linear.named_parameters()) and "weight" not in linear.state_dict()
    model, guide = make(bbb.likelihoods.Gaussian.learned())
    x, y = data()
    bbb.fit(model, guide, (x, y), epochs=3, lr=0.1, progress=False)
    assert list(model.state_dict()) == ["likelihood.scale_unconstrained"]

    other_model, other_guide = make(bbb.likelihoods.Gaussian.learned())
    other_model.load_state_dict(model.state_dict())
    other_guide.load_state_dict(guide.state_dict())
    actual, expected = (
        bbb.predict(m, g, x, num_samples=10, seed=0)
        for m, g in ((other_model, other_guide), (model, guide))
    )
    assert torch.equal(actual.mean, expected.mean)
    assert torch.equal(actual.std, expected.std)


# --- 9: one draw per outermost call ---


class Twice(PyroModule):
    """Uses one layer at two places."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        self.weights = (self.layer.weight, self.layer.weight)
        return self.layer(self.layer(x) * 0 + x) - self.layer(x)


def test_9_a_weight_used_twice_is_one_draw_also_after_the_network_ran_alone():
    x, y = data()
    layer = PyroModule[nn.Linear](3, 3)
    layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([3, 3]).to_event(2))
    assert not torch.equal(layer.weight, layer.weight)  # outside a call: a draw each time

    network = Twice(bbb.BayesianLinear(3, 3))
    network(x)  # alone, before it is part of a model
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(), num_data=20)
    guide = bbb.AutoSoftplusNormal(model)
    draws = []
    for _ in range(2):
        trace = poutine.trace(model).get_trace(x, x)
        first, second = network.weights
        assert first is second is trace.nodes["network.layer.weight"]["value"]
        assert torch.equal(trace.nodes["obs"]["fn"].mean, torch.zeros(20, 3))
        draws.append(first)
    assert not torch.equal(*draws)  # a new draw at each call of the model
    bbb.fit(model, guide, (x, x), epochs=1, progress=False)
    assert network.weights[0] is network.weights[1]
    assert guide.site_names == ["network.layer.weight", "network.layer.bias"]


# --- 10: nothing is loaded that could execute code ---

EXECUTES = re.compile(
    r"torch\.load\b|\bpickle\b|\bjoblib\.load\b|\bdill\b|\bshelve\b|\bmarshal\b|allow_pickle\s*=\s*True"
    r"|weights_only\s*=\s*False|\b(?<!\.)eval\(|\bexec\(|__import__|yaml\.load\b"
    r"|\bsubprocess\b|os\.(?:system|popen|exec|spawn)|\bimportlib\b|\brunpy\b|(?<![.\w])compile\("
    r"|\bread_pickle\b|\bcloudpickle\b|torch\.jit\.load\b|shell\s*=\s*True"
    r"|\b(?:np|numpy)\.load\((?!.*allow_pickle=False)|^\s*(?:!|%%?(?:bash|sh|sx|system)\b)"
)
OF_PROGRAMS = {
    "subprocess",
    "importlib",
}  # they ask git and importlib.metadata, and start themselves
PROGRAMS = ("experiments", "benchmarks", "notebooks")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("x = torch.load(path)", True),
        ("import pickle", True),
        ("y = eval(text)", True),
        ("model.eval()", False),
        ("os.system(text)", True),
        ("code = compile(text)", True),
        ("re.compile(pattern)", False),
        ("np.load(path, allow_pickle=False)", False),
        ("!rm results", True),
        ("if a != b:", False),
    ],
)
def test_10_the_scan_finds_what_it_is_for(line, found):
    assert bool(EXECUTES.search(line)) == found


def executing(path, lines, allowed):
    """Lines of a file with something that may execute what it reads, apart from what it may use."""
    return [
        f"{path.name}:{number}: {line.strip()}"
        for number, line in enumerate(lines, start=1)
        if {match.group() for match in EXECUTES.finditer(line)} - set(allowed)
    ]


def test_10_the_library_never_loads_what_could_execute_code():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 10
    for path in files:
        assert not executing(path, path.read_text().splitlines(), set())


def code_of(path):
    """Lines of a Python file, or of the code cells of a notebook."""
    if path.suffix == ".py":
        return path.read_text().splitlines()
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "\n".join(code).splitlines()


@pytest.mark.parametrize("folder", PROGRAMS)
def test_10_programs_never_load_what_could_execute_code(folder):
    files = sorted(
        p for p in (PACKAGE.parent / folder).rglob("*.*") if p.suffix in {".py", ".ipynb"}
    )
    assert files
    for path in files:
        assert not executing(path, code_of(path), OF_PROGRAMS)
