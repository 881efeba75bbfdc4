# SPDX-License-Identifier: Apache-2.0
"""Descriptions with one value of another type and a hash that fits: LoadError, or a model."""

import numpy as np
import polars as pl
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import LoadError, likelihoods
from pyro_bbb.apps import main
from pyro_bbb.apps.command_line import BadInput
from pyro_bbb.apps.table_model import Model
from pyro_bbb.sklearn import BayesianClassifier
from tests._support.forged import forgeries

X = torch.linspace(-1.0, 1.0, 24).reshape(12, 2)
Y = X.sum(1, keepdim=True)


def mixed(guide="softplus_normal", likelihood=None, **options):
    """A model whose description has every kind of entry."""
    torch.manual_seed(0)
    layers = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.2), nn.LeakyReLU(0.1)
    prior = {"*bias": "horseshoe", "0*": "learned_scale_mixture", "*": dist.StudentT(3.0, 0.0, 1.0)}
    network = bbb.bayesianize(nn.Sequential(*layers, nn.Linear(3, 1)), prior)
    likelihood = likelihood or likelihoods.Gaussian(dist.HalfCauchy(0.7))
    model = bbb.BayesianModel(network, likelihood, num_data=12)
    return model, bbb.guides.make(guide, model, **options)


def adapted():
    torch.manual_seed(0)
    network = bbb.adapt(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), rank=1)
    model = bbb.BayesianModel(network, likelihoods.Gaussian(0.5), num_data=12)
    return model, bbb.AutoSoftplusNormal(model)


def predicted(loaded):
    model, guide = loaded
    bbb.predict(model, guide, X, num_samples=2, seed=0).log_prob(Y)


def saved(*parts, compressed=False, **options):
    def write(folder):
        bbb.save(folder, *parts, compressed=compressed)
        return folder / "spec.json", lambda: predicted(bbb.load(folder, **options))

    return write


def of_chains():
    model = mixed(likelihood=likelihoods.Gaussian(0.5))[0]
    options = {"num_samples": 2, "warmup_steps": 1, "thin": 1, "lr": 1e-4, "seed": 0}
    return model, bbb.run_sgmcmc(model, (X, Y), num_chains=2, progress=False, **options)


def trained(folder):
    def train():
        run = {"epochs": 2, "batch_size": 6, "lr": 0.01, "seed": 0, "progress": False}
        bbb.fit(*mixed(), (X, Y), checkpoint=folder, callbacks=[lambda end: end.epoch == 0], **run)

    train()
    return folder / "spec.json", train


def sampled(folder):
    options = {"num_samples": 2, "warmup_steps": 1, "thin": 1, "batch_size": 6, "seed": 0}

    def sample():
        model = mixed(likelihood=likelihoods.Gaussian(0.5))[0]
        bbb.run_sgmcmc(model, (X, Y), checkpoint=folder, lr=1e-3, progress=False, **options)

    sample()
    return folder / "spec.json", sample


def calibrated(folder):
    model, guide = mixed()
    made = bbb.conformal(lambda x: bbb.predict(model, guide, x, seed=0), (X, Y), 0.5)
    made.save(folder / "sets.json")
    return folder / "sets.json", lambda: bbb.ConformalPredictor.load(
        folder / "sets.json", made.predict_fn
    ).interval(X)


def detecting(folder):
    network = torch.nn.Linear(3, 2)
    train = torch.randn(40, 3), torch.arange(40) % 2
    bbb.ood(network, None, train, score="knn", fraction=0.2).save(folder)
    return folder / "spec.json", lambda: bbb.Detector.load(folder, network)


def estimated(folder):
    fitted = BayesianClassifier(hidden_sizes=(3,), epochs=1, random_state=0)
    fitted.fit(X.numpy(), np.array(["a", "b"] * 6)).save(folder)
    return folder / "spec.json", lambda: BayesianClassifier.load(folder).predict(X.numpy())


def tabled(folder):
    table = pl.DataFrame({"x": X[:, 0].numpy(), "t": ["a", "b", None] * 4, "y": Y[:, 0].numpy()})
    table.write_csv(folder / "t.csv")
    words = ["train", str(folder / "t.csv"), "--target", "y", "--epochs", "1", "--quiet"]
    assert main([*words, "--missing", "fill", "--out", str(folder / "m")]) == 0
    rows = table.drop("y")

    def load():
        try:
            model = Model.load(folder / "m")
        except BadInput as error:
            raise LoadError(str(error)) from error
        for prediction in model.predict(model.inputs(rows, lambda line: None)):
            model.answers(prediction)

    return folder / "m" / "spec.json", load


CASES = {
    "model": saved(*mixed()),
    "compressed": saved(*mixed(), compressed=True),
    "ensemble": saved(*mixed("ensemble", size=2)),
    "adapters": saved(*adapted(), network=adapted()[0].network),
    "checkpoint": trained,
    "chains": saved(*of_chains()),
    "checkpoint of chains": sampled,
    "conformal": calibrated,
    "detector": detecting,
    "classifier": estimated,
    "table": tabled,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_a_value_of_another_type_gives_the_clear_error_or_a_model(tmp_path, name):
    folder = tmp_path / "saved"
    folder.mkdir()
    path, load = CASES[name](folder)
    refused = 0
    stride = (
        29 if name in ("model", "adapters", "conformal", "detector") else 199
    )  # all take minutes
    for number, where in enumerate(forgeries(path)):
        if number % stride and not (name == "classifier" and "parameters" in where):
            continue
        try:
            load()
        except ValueError as error:
            other_run = where[0] == "run"  # is an error that names the difference
            assert isinstance(error, LoadError) or other_run, where
            assert str(tmp_path) in str(error)
            refused += 1
    assert refused > 0
    load()
