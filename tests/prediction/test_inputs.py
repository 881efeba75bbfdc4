# SPDX-License-Identifier: Apache-2.0
"""What `predict` and `fit` take as inputs, and what a network may return."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import likelihoods

X = torch.randn(41, 4, generator=torch.Generator().manual_seed(0))
NUMBERS = torch.randn(41, 1, generator=torch.Generator().manual_seed(1))
FAMILIES = {
    "classes": (likelihoods.Categorical, torch.arange(41) % 3, 3),
    "known noise": (lambda: likelihoods.Gaussian(0.5), NUMBERS, 1),
    "noise by input": (likelihoods.HeteroscedasticGaussian, NUMBERS, 2),
}
SOURCES = {
    "dataset": lambda y: TensorDataset(X, y),
    "loader": lambda y: DataLoader(TensorDataset(X, y), batch_size=10),
    "loader without targets": lambda y: DataLoader(X, batch_size=7),
    "array in double precision": lambda y: X.double().numpy(),
    "tensor in double precision": lambda y: X.double(),
}


def trained(family, data=None, network=None):
    likelihood, y, outputs = FAMILIES[family]
    torch.manual_seed(0)
    network = network or bbb.BayesianMLP([4, 8, outputs])
    model = bbb.BayesianModel(network, likelihood(), num_data=41)
    guide = bbb.AutoSoftplusNormal(model)
    history = bbb.fit(model, guide, data or (X, y), epochs=1, seed=0, progress=False)
    return model, guide, history


def numbers(prediction):
    probs = getattr(prediction, "sample_probs", None)
    return torch.cat([prediction.mean, prediction.std]) if probs is None else probs


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", FAMILIES)
def test_predictions_are_those_of_a_tensor(family, source):
    """Batches share their draws, so only rounding differs."""
    model, guide, _ = trained(family)
    inputs = SOURCES[source](FAMILIES[family][1])
    for predict in (
        lambda x: bbb.predict(model, guide, x, num_samples=5, seed=0),
        lambda x: bbb.predict_mean(model, guide, x),
    ):
        torch.testing.assert_close(numbers(predict(inputs)), numbers(predict(X)))


@pytest.mark.parametrize("source", ["tensor", "array", "loader"])
def test_numbers_too_large_for_the_networks_precision_are_named_by_row(source):
    large = X.double()
    large[7, 2] = 1e200
    y, message = NUMBERS, r"x has 1e\+200 in row 7, too large for torch.float32"
    inputs = {"tensor": large, "array": large.numpy(), "loader": DataLoader(large, batch_size=41)}
    model, guide, _ = trained("known noise")
    for function in (bbb.predict, bbb.predict_mean):
        with pytest.raises(ValueError, match=message):
            function(model, guide, inputs[source])
    pairs = (inputs[source], y.numpy() if source == "array" else y)
    data = DataLoader(TensorDataset(large, y), batch_size=41) if source == "loader" else pairs
    with pytest.raises(ValueError, match=message):
        bbb.fit(model, guide, data, epochs=1, progress=False)
    with pytest.raises(ValueError, match=r"numbers in the range of torch.float32, got 1e\+200"):
        bbb.fit(model, guide, (X, y.double() * 0 + 1e200), epochs=1, progress=False)
    with pytest.raises(ValueError, match="scale must be finite in torch.float32"):
        bbb.predict(model, guide, X, num_samples=2).rescaled(0.0, y.double().mean() * 0 + 1e200)


class WithLogits(nn.Module):
    """Outputs as Hugging Face's models have them."""

    def __init__(self):
        super().__init__()
        self.inner = bbb.BayesianMLP([4, 8, 3])

    def forward(self, x):
        return SimpleNamespace(logits=self.inner(x), loss=None)


def test_the_logits_of_an_output_are_taken():
    """Outputs are those of the network inside, to the bit."""
    plain = trained("classes", network=bbb.BayesianMLP([4, 8, 3]))
    wrapped = trained("classes", network=WithLogits())
    assert wrapped[2].loss == plain[2].loss
    predictions = [bbb.predict(*run[:2], X, num_samples=3, seed=0) for run in (plain, wrapped)]
    assert torch.equal(*map(numbers, predictions))


@pytest.mark.parametrize(
    ("guide", "hint"),
    [
        (bbb.AutoSoftplusNormal, r"did you mean AutoSoftplusNormal\(model\)\?"),
        (None, r"got a BayesianModel: did you mean AutoSoftplusNormal\(model\)\?"),
    ],
)
def test_what_is_no_guide_is_refused_with_a_hint(guide, hint):
    model, _, _ = trained("classes")
    guide = model if guide is None else guide
    with pytest.raises(TypeError, match=hint):
        bbb.predict(model, guide, X)
    with pytest.raises(TypeError, match=hint):
        bbb.fit(model, guide, (X, FAMILIES["classes"][1]), epochs=1)


def test_integers_that_do_not_fit_get_a_hint_and_the_shape_of_all_inputs():
    model, guide, _ = trained("classes")
    with pytest.raises(ValueError, match=r"x of shape \[41, 4\] and torch.uint8 .* x\.float\(\)"):
        bbb.predict(model, guide, X.to(torch.uint8))
