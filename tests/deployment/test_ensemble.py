# SPDX-License-Identifier: Apache-2.0
"""Exported networks and ensembles: `predict`'s numbers in torch, torch.export and ONNX Runtime."""

import pickle
import subprocess
import sys
import threading
from functools import cache

import onnxruntime
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroParam, PyroSample
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb._utils.locking import GLOBAL_LOCK

S = 5  # odd, lest a median lie where the distribution function is flat
LEVELS = (0.05, 0.5, 0.975)
BATCH = {0: torch.export.Dim.DYNAMIC}


def convolutional():
    layers = (nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    network = nn.Sequential(*layers, nn.Linear(27, 4))
    network[1].running_mean.normal_()
    return bbb.bayesianize(network)


class Tied(nn.Module):
    """One layer in two places, and a factor."""

    def __init__(self):
        super().__init__()
        self.first, self.gain = nn.Linear(3, 3), nn.Parameter(torch.tensor(1.5))
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.gain * self.second(self.first(x).tanh())


class Recurrent(nn.Module):
    """An LSTM over the columns."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.cell(x.unsqueeze(-1))[0][:, -1])


class Written(PyroModule):
    """Random and learned quantities declared by hand."""

    def __init__(self):
        super().__init__()
        self.layer = bbb.BayesianLinear(3, 2)
        self.gain = PyroParam(torch.tensor(2.0), constraint=dist.constraints.positive)
        self.shift = PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))

    def forward(self, x):
        return self.gain * self.layer(x) + self.shift


def horseshoe():
    return bbb.BayesianMLP([3, 5, 1], prior="horseshoe")


CASES = {
    "classes": (lambda: bbb.BayesianMLP([3, 16, 4]), likelihoods.Categorical),
    "convolutional classes": (convolutional, likelihoods.Categorical),
    "yes or no": (lambda: bbb.BayesianMLP([3, 8, 1]), likelihoods.Bernoulli),
    "targets": (lambda: bbb.BayesianMLP([3, 16, 2]), lambda: likelihoods.Gaussian.learned(0.3)),
    "latent noise": (horseshoe, lambda: likelihoods.Gaussian(dist.Gamma(2.0, 2.0))),
    "noise by input": (lambda: bbb.BayesianMLP([3, 8, 4]), likelihoods.HeteroscedasticGaussian),
    "convolutional targets": (convolutional, likelihoods.Gaussian),
    "counts": (lambda: bbb.BayesianMLP([3, 8, 1]), likelihoods.Poisson),
    "varied counts": (lambda: bbb.BayesianMLP([3, 8, 1]), likelihoods.NegativeBinomial),
    "heavy tails": (lambda: bbb.BayesianMLP([3, 8, 2]), lambda: likelihoods.StudentT(4.0)),
    "tied": (lambda: bbb.bayesianize(Tied()), likelihoods.Gaussian),
    "recurrent": (lambda: bbb.bayesianize(Recurrent()), likelihoods.Gaussian),
    "written by hand": (Written, likelihoods.Gaussian),
}
EXPORTED = ["classes", "convolutional targets", "tied", "written by hand"]
IN_ONNX = ["convolutional classes", "targets"]


def inputs(name, n=7):
    return torch.randn(n, 1, 8, 8) if "convolutional" in name else torch.randn(n, 3)


def trained(name):
    torch.manual_seed(1)
    network, likelihood = CASES[name]
    model = bbb.BayesianModel(network(), likelihood(), num_data=5)
    guide = bbb.AutoSoftplusNormal(model, init_rho=-1.0)
    with torch.no_grad():
        for site in guide.site_names:
            guide.loc(site).add_(0.3 * torch.randn_like(guide.loc(site)))
    return model, guide


def levels(name):
    return LEVELS if name in ("targets", "latent noise", "noise by input") else ()


@cache
def ensemble(name):
    """Model, draws, and the module of them."""
    model, guide = trained(name)
    draws = guide.sample_posterior(S)
    return model, draws, bbb.to_ensemble(model, draws, quantiles=levels(name))


@cache
def exported(name):
    return torch.export.export(ensemble(name)[2], (inputs(name),), dynamic_shapes=(BATCH,))


def assert_says(answer, prediction):
    """It predicts the numbers of `predict`, to float32's rounding."""
    expected = {name: getattr(prediction, name) for name in answer if name != "quantiles"}
    if "quantiles" in answer:
        expected["quantiles"] = torch.stack([prediction.quantile(p) for p in LEVELS], -1)
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_an_ensemble_can_be_pickled(name):
    module, x = ensemble(name)[2], inputs(name)
    again = pickle.loads(pickle.dumps(module))
    torch.testing.assert_close(again(x), module(x), rtol=0, atol=0)


@pytest.mark.parametrize("n", [1, 150])
@pytest.mark.parametrize("name", CASES)
def test_an_ensemble_says_what_predict_says_with_its_draws(name, n):
    model, draws, module = ensemble(name)
    x = inputs(name, n)
    answer = module(x)
    assert_says(answer, bbb.predict(model, draws, x))
    classes = isinstance(model.likelihood, (likelihoods.Categorical, likelihoods.Bernoulli))
    names = ["aleatoric_std", "epistemic_std", "std"]
    names = ["probs", "aleatoric", "epistemic"] if classes else ["mean", *names]
    assert list(answer) == names + ["quantiles"] * bool(levels(name))
    assert answer["epistemic" if classes else "epistemic_std"].min() > 1e-6  # draws differ


@pytest.mark.parametrize("name", ["targets", "counts", "noise by input"])
def test_the_mean_of_each_network_is_that_of_predict(name):
    model, draws, module = ensemble(name)
    x = inputs(name).requires_grad_()
    means = module.sample_means(x)
    torch.testing.assert_close(means, bbb.predict(model, draws, x.detach()).sample_means)
    (gradient,) = torch.autograd.grad(means.sum(), x)
    assert gradient.isfinite().all() and gradient.abs().max() > 0


@pytest.mark.parametrize("make", [bbb.AutoSoftplusNormal, AutoNormal])
def test_it_draws_what_predict_draws_with_the_seed(make):
    model, guide = trained("targets")
    x = inputs("targets")
    if make is AutoNormal:
        guide = AutoNormal(model)
        guide(x, torch.zeros(7, 2))
    state = torch.get_rng_state()
    module = bbb.to_ensemble(model, guide, num_samples=S, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert_says(module(x), bbb.predict(model, guide, x, num_samples=S, seed=3))


@pytest.mark.parametrize("name", CASES)
def test_it_is_an_ordinary_module_with_the_draws_as_buffers(name):
    model, draws, module = ensemble(name)
    for layer in module.modules():
        assert not any(cls.__module__.startswith("pyro.") for cls in type(layer).__mro__), layer
        assert not isinstance(layer, bbb.priors.Prior) and not layer.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    weights = module.drawn.weights()
    assert weights and all(len(value) == S for value in weights.values())
    assert not [name for name in module.state_dict() if "prior" in name]
    for site, value in draws.items():
        if site in weights and name != "latent noise":  # whose weights are products
            assert torch.equal(weights[site], value)


# --- torch.export ---


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_torch_exports_it_for_batches_of_any_size(name):
    model, draws, _ = ensemble(name)
    for n in (1, 2, 150):
        x = inputs(name, n)
        assert_says(exported(name).module()(x), bbb.predict(model, draws, x))


WITHOUT_PYRO = """
import sys
sys.modules["pyro"] = sys.modules["pyro_bbb"] = None  # importing either is an error
import torch
for path in sys.argv[1:]:
    x, expected = torch.load(path + ".pt")
    torch.testing.assert_close(torch.export.load(path).module()(x), expected)
print("same")
"""


@pytest.mark.slow
def test_a_fresh_process_without_pyro_answers_from_the_files(tmp_path):
    model, guide = trained("convolutional classes")
    mean = bbb.to_module(model, guide).requires_grad_(False)
    x = inputs("convolutional classes")
    programs = {name: (exported(name), inputs(name, 5), ensemble(name)[2]) for name in IN_ONNX}
    programs["mean"] = (torch.export.export(mean, (x,), dynamic_shapes=(BATCH,)), x[:1], mean)
    paths = [str(tmp_path / f"{i}.pt2") for i in range(len(programs))]
    for path, (program, x, module) in zip(paths, programs.values(), strict=True):
        torch.export.save(program, path)
        torch.save((x, module(x)), path + ".pt")
    command = [sys.executable, "-c", WITHOUT_PYRO, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "same", done.stderr


# --- ONNX ---


def in_onnx(module, x, path):
    """A function of x that ONNX Runtime computes."""
    torch.onnx.export(module, (x,), path, dynamo=True, dynamic_shapes=(BATCH,), verbose=False)
    session = onnxruntime.InferenceSession(path)
    (onnx_input,) = session.get_inputs()
    return lambda x: [torch.tensor(y) for y in session.run(None, {onnx_input.name: x.numpy()})]


from_exporters = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.slow
@from_exporters
@pytest.mark.parametrize("name", IN_ONNX)
def test_onnx_runtime_says_the_same_for_batches_of_any_size(name, tmp_path):
    model, draws, module = ensemble(name)
    run = in_onnx(module, inputs(name), tmp_path / "ensemble.onnx")
    for n in (1, 2, 150):
        x = inputs(name, n)
        answer = dict(zip(module(x), run(x), strict=True))
        assert_says(answer, bbb.predict(model, draws, x))


@pytest.mark.slow
@from_exporters
@pytest.mark.parametrize("name", ["classes", "convolutional targets"])
def test_onnx_runtime_computes_the_mean_network(name, tmp_path):
    model, guide = trained(name)
    run = in_onnx(bbb.to_module(model, guide), inputs(name), tmp_path / "mean.onnx")
    for n in (1, 2, 150):
        x = inputs(name, n)
        (output,) = run(x)
        prediction = bbb.predict_mean(model, guide, x)
        if name == "classes":
            torch.testing.assert_close(output.softmax(-1), prediction.probs, rtol=1e-5, atol=1e-5)
        else:
            torch.testing.assert_close(output, prediction.mean, rtol=1e-5, atol=1e-5)


# --- one module for all threads, and for torch's compiler ---


@pytest.mark.parametrize("name", ["classes", "targets", "recurrent", "written by hand", "tied"])
def test_calls_in_threads_do_not_see_each_others_weights(name):
    """Four threads run one module at once, without a lock."""
    _, _, module = ensemble(name)
    batches = [inputs(name, n) for n in (1, 3, 5, 7)]
    alone = [module(x) for x in batches]
    failures, interval = [], sys.getswitchinterval()

    def run(x, expected):
        for _ in range(10):
            answer = module(x)
            if not all(torch.equal(answer[key], expected[key]) for key in expected):
                failures.append(len(x))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(batches, alone, strict=True)]
    sys.setswitchinterval(1e-5)
    with GLOBAL_LOCK:  # of a training in another thread, for which nobody waits
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads) and failures == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("name", ["classes", "targets", "written by hand"])
def test_torch_compiles_and_exports_it_as_one_graph(name):
    _, _, module = ensemble(name)
    x = inputs(name)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    strict = torch.export.export(module, (x,), dynamic_shapes=(BATCH,), strict=True).module()
    for run in (compiled, strict):
        answer = run(x)
        for key, expected in module(x).items():
            torch.testing.assert_close(answer[key], expected, rtol=1e-5, atol=1e-6)
