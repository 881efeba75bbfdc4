# SPDX-License-Identifier: Apache-2.0
"""Networks of several inputs, against the same network that reads them from one tensor."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import pyro_bbb as bbb

N = 60


class WideAndDeep(nn.Module):
    """Takes two tensors."""

    def __init__(self):
        super().__init__()
        self.wide = bbb.BayesianLinear(2, 8)
        self.deep = bbb.BayesianLinear(3, 8)
        self.last = bbb.BayesianLinear(8, 1)

    def forward(self, wide, deep):
        return self.last(torch.tanh(self.wide(wide) + self.deep(deep)))


class InOneTensor(WideAndDeep):
    """Takes both as the columns of one tensor."""

    def forward(self, x):
        return super().forward(*x.split((2, 3), dim=1))


class Examples(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x
        inputs = {k: v[i] for k, v in x.items()} if isinstance(x, dict) else [v[i] for v in x]
        return inputs, self.y[i]


def data():
    torch.manual_seed(1)
    wide, deep = torch.randn(N, 2), torch.randn(N, 3)
    return wide, deep, (wide[:, :1] + deep[:, :1]).sin()


FORMS = {
    "a tuple": lambda wide, deep: (wide, deep),
    "a list of arrays": lambda wide, deep: [wide.numpy(), deep.numpy()],
    "a dict": lambda wide, deep: {"deep": deep, "wide": wide},
}
every_form = pytest.mark.parametrize("form", FORMS)


def new(network, guide="softplus_normal"):
    torch.manual_seed(2)
    model = bbb.BayesianModel(network(), bbb.likelihoods.Gaussian(0.1), num_data=N)
    return model, bbb.guides.make(guide, model)


def trained(network, x, y, **options):
    model, guide = new(network)
    settings = {"epochs": 3, "batch_size": 16, "seed": 0, "progress": False, **options}
    return model, guide, bbb.fit(model, guide, (x, y), **settings)


@every_form
def test_training_and_prediction_equal_those_from_one_tensor(form):
    wide, deep, y = data()
    both = torch.cat([wide, deep], 1)
    x = FORMS[form](wide, deep)
    model, guide, history = trained(WideAndDeep, x, y)
    *expected, known = trained(InOneTensor, both, y)
    torch.testing.assert_close(history.steps.loss, known.steps.loss)
    for options in ({"batch_size": 7}, {"num_samples": 3}):
        ours = bbb.predict(model, guide, x, seed=0, **options)
        torch.testing.assert_close(ours.mean, bbb.predict(*expected, both, seed=0, **options).mean)
    ours = bbb.predict_mean(model, guide, x).mean
    torch.testing.assert_close(ours, bbb.predict_mean(*expected, both).mean)


@pytest.mark.parametrize("options", [{"num_particles": 3}, {"estimator": "flipout"}], ids=str)
def test_every_estimator_takes_them(options):
    wide, deep, y = data()
    _, _, history = trained(WideAndDeep, (wide, deep), y, **options)
    _, _, known = trained(InOneTensor, torch.cat([wide, deep], 1), y, **options)
    torch.testing.assert_close(history.steps.loss, known.steps.loss)


@pytest.mark.parametrize("form", ["a tuple", "a dict"])
def test_datasets_and_loaders_of_several_inputs_are_read(form):
    wide, deep, y = data()
    x = FORMS[form](wide, deep)
    examples = Examples(x, y)
    model, guide, known = trained(WideAndDeep, x, y)
    again, new_guide = new(WideAndDeep)
    settings = {"epochs": 3, "seed": 0, "progress": False}
    history = bbb.fit(again, new_guide, examples, batch_size=16, **settings)
    torch.testing.assert_close(history.steps.loss, known.steps.loss)
    expected = bbb.predict(model, guide, x, num_samples=5, seed=0, estimator="reparam").mean
    for source in (examples, DataLoader(examples, batch_size=16)):
        mean = bbb.predict(again, new_guide, source, num_samples=5, seed=0).mean
        torch.testing.assert_close(mean, expected)
    loader = DataLoader(examples, batch_size=16, shuffle=True)
    assert len(bbb.fit(again, new_guide, loader, **settings).steps) == 12


def test_exported_networks_take_them_as_arguments():
    wide, deep, y = data()
    model, guide, _ = trained(WideAndDeep, (wide, deep), y)
    expected = bbb.predict_mean(model, guide, (wide, deep)).mean
    torch.testing.assert_close(bbb.to_module(model, guide)(wide, deep), expected)
    ensemble = bbb.to_ensemble(model, guide, num_samples=5, seed=0)
    expected = bbb.predict(model, guide, (wide, deep), num_samples=5, seed=0).mean
    torch.testing.assert_close(ensemble(wide, deep)["mean"], expected)


def test_nuts_and_laplace_take_them():
    wide, deep, y = data()
    both = torch.cat([wide, deep], 1)
    means = []
    for network, x in ((WideAndDeep, (wide, deep)), (InOneTensor, both)):
        model, _ = new(network)
        options = {"num_samples": 2, "warmup_steps": 2, "seed": 0, "progress": False}
        chains = bbb.run_nuts(model, (x, y), **options)
        guide = bbb.guides.make("laplace", model)
        bbb.fit(model, guide, (x, y), epochs=1, seed=0, progress=False)
        means.append([bbb.predict(model, q, x, seed=0).mean for q in (chains, guide)])
    for actual, expected in zip(*means, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda w, d: (w, d[:5]), ValueError, r"equally many rows, x\[0\] has 60, x\[1\] has 5"),
        (lambda w, d: (), ValueError, "x must hold at least one tensor"),
        (lambda w, d: {"wide": w, "deep": "d"}, TypeError, r"x\['deep'\] must be a tensor"),
        (lambda w, d: (w, d / 0), ValueError, r"x\[1\] must be finite"),
        (lambda w, d: (d, w), ValueError, r"x\[0\] of shape \[60, 3\]"),
        (lambda w, d: {"wide": w}, TypeError, "deep"),
        (lambda w, d: [[1.0, 2.0]], TypeError, "x must be a tensor or .* got list"),
    ],
)
def test_what_does_not_fit_is_named(change, error, words):
    wide, deep, y = data()
    model, guide = new(WideAndDeep)
    x = change(wide, deep)
    with pytest.raises(error, match=words):
        bbb.predict(model, guide, x)
    with pytest.raises(error, match=words):
        bbb.fit(model, guide, (x, y), epochs=1, progress=False)
