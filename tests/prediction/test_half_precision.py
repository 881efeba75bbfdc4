# SPDX-License-Identifier: Apache-2.0
"""Networks in half precision: probabilities, moments and scores are in single precision."""

import contextlib

import pytest
import torch

import pyro_bbb as bbb

X = torch.linspace(-1, 1, 30).reshape(10, 3)
HALVES = [torch.bfloat16, torch.float16]
WAYS = {
    "weights": lambda m, g, x: bbb.predict(m, g, x, num_samples=4),
    "outputs": lambda m, g, x: bbb.predict(m, g, x, num_samples=4, estimator="local_reparam"),
    "linearized": lambda m, g, x: bbb.predict(m, g, x, num_samples=4, linearized=True),
    "mean": bbb.predict_mean,
}


def make(likelihood, outputs, dtype):
    torch.manual_seed(0)
    model = bbb.BayesianModel(bbb.BayesianMLP([3, 8, outputs]), likelihood, 10).to(dtype)
    return model, bbb.AutoSoftplusNormal(model, init_loc="he")


def require_probabilities(probs):
    assert probs.dtype == torch.float32
    assert (probs.sum(-1) - 1).abs().max() < 1e-6  # 50 roundings of numbers around 0.02


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_probabilities_of_many_classes_sum_to_1(dtype, autocast):
    model, guide = make(bbb.likelihoods.Categorical(), 50, torch.float32 if autocast else dtype)
    x = X if autocast else X.to(dtype)
    context = torch.autocast("cpu", dtype=dtype) if autocast else contextlib.nullcontext()
    with context:
        for way in WAYS.values():
            prediction = way(model, guide, x)
            require_probabilities(prediction.probs)
            assert prediction.entropy.dtype == prediction.epistemic.dtype == torch.float32
        answer = bbb.to_ensemble(model, guide, num_samples=4)(x)
    require_probabilities(answer["probs"])
    assert {value.dtype for value in answer.values()} == {torch.float32}
    assert bbb.metrics.nll(answer["probs"], torch.arange(10)) > 0
    module = bbb.to_module(model, guide)
    assert {p.dtype for p in module.parameters()} == {torch.float32 if autocast else dtype}
    assert autocast or module(x).dtype == dtype


@pytest.mark.parametrize("name", ["Gaussian", "HeteroscedasticGaussian", "Poisson", "Bernoulli"])
@pytest.mark.parametrize("dtype", HALVES)
def test_moments_and_losses_are_in_single_precision(dtype, name):
    outputs = 2 if name == "HeteroscedasticGaussian" else 1
    model, guide = make(getattr(bbb.likelihoods, name)(), outputs, dtype)
    for way in WAYS.values():
        prediction = way(model, guide, X.to(dtype))
        value = prediction.probs if name == "Bernoulli" else prediction.std
        assert value.dtype == torch.float32
    assert {v.dtype for v in bbb.to_ensemble(model, guide)(X.to(dtype)).values()} == {torch.float32}
    trace = bbb.predict(model, guide, X.to(dtype), num_samples=2)
    assert trace.log_prob(torch.zeros(10, dtype=torch.long)).dtype == torch.float32
