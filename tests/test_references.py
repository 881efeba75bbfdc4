# SPDX-License-Identifier: Apache-2.0
"""Reference posteriors: what their files hold, and distances to them."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance

import pyro_bbb as bbb
from pyro_bbb import metrics
from pyro_bbb.data import REFERENCES, references

FROM_FILES = {"airfoil", "boston", "energy", "wine", "yacht"}  # of the UCI repository
ROOT = os.environ.get("PYRO_BBB_DATA")
KEYS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
HERE = [name for name in REFERENCES if ROOT or name not in FROM_FILES]


def draws(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- what the files hold ---


@pytest.mark.parametrize("name", HERE)
def test_data_probes_and_model_are_those_that_nuts_was_given(name):
    reference = bbb.data.reference(name)
    assert reference.functions.shape == (2000, 64, 1) and reference.functions.dtype == torch.float16
    model = reference.make_model()
    model.check(reference.x, reference.y)
    model.check(reference.probes)
    assert reference.on_data.sum() == 32
    off = reference.probes[~reference.on_data]
    assert not any((reference.x == probe).all(1).any() for probe in off)


@pytest.mark.parametrize("name", HERE)
def test_halves_of_the_chains_are_as_near_as_their_draws_allow(name):
    reference = bbb.data.reference(name)
    first, second = reference.functions.unflatten(0, (2, -1))
    half = dataclasses.replace(reference, functions=second)
    same = {"function": 0.0, "sd_ratio": 1.0}
    assert half.compare(second) == {"on": same, "off": same}
    ess = metrics.ess(reference.functions[..., 0].double().unflatten(0, (8, -1))).min()
    for distances in half.compare(first).values():
        # means of halves of n effective draws differ by sqrt(4 / n) sd: four of these
        assert distances["function"] < 4 * (4 / ess) ** 0.5
        assert 0.85 < distances["sd_ratio"] < 1.15


# --- loading ---


def test_rows_that_are_not_there_are_asked_for(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"set PYRO_BBB_DATA=ROOT .*ROOT/airfoil/airfoil.csv"
    ):
        bbb.data.reference("airfoil", root=tmp_path)


def test_other_rows_and_damaged_draws_are_refused(tmp_path, monkeypatch):
    (tmp_path / "airfoil").mkdir()
    rows = np.random.default_rng(0).random((1503, 6))
    path = tmp_path / "airfoil" / "airfoil.csv"
    np.savetxt(path, rows, delimiter=",", header="names", comments="")
    with pytest.raises(RuntimeError, match="airfoil: data, model and draws have the digest"):
        bbb.data.reference("airfoil", root=tmp_path)
    content = bytearray((references.FOLDER / "sine.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "sine.safetensors").write_bytes(content)
    monkeypatch.setattr(references, "FOLDER", tmp_path)
    with pytest.raises(RuntimeError, match=r"sine: .* replace .*sine.safetensors"):
        bbb.data.reference("sine")


# --- distances ---


def test_distances_are_those_of_scipy():
    reference = bbb.data.reference("sine")
    gold = reference.functions[..., 0].double()
    wider = gold[:700] * 1.3 + draws(700, 64)
    apart = reference.compare(wider)
    for name, at in {"on": reference.on_data, "off": ~reference.on_data}.items():
        pairs = zip(wider[:, at].T.numpy(), gold[:, at].T.numpy(), strict=True)
        expected = np.mean([wasserstein_distance(u, v) for u, v in pairs])
        spread = float(gold[:, at].std(0).mean())
        assert apart[name]["function"] == pytest.approx(expected / spread, rel=1e-9)
        assert apart[name]["sd_ratio"] == pytest.approx(float(wider[:, at].std(0).mean() / spread))
    assert reference.distance(wider) == apart["off"]["function"]


@pytest.mark.parametrize("name", ["sine", "digits", "counts"])
def test_predictions_are_compared_by_output_probability_or_log_rate(name):
    reference = bbb.data.reference(name)
    model = reference.make_model()
    weights = bbb.AutoSoftplusNormal(model).sample_posterior(3)
    prediction = bbb.predict(model, weights, reference.probes, num_samples=3, seed=0)
    w1, b1, w2, b2 = (weights[f"network.{key}"] for key in KEYS)
    h = (reference.probes @ w1.mT + b1[:, None]).tanh()
    outputs = (h @ w2.mT + b2[:, None])[..., 0].detach()
    expected = outputs.sigmoid() if name == "digits" else outputs
    actual = reference.as_draws(prediction)
    torch.testing.assert_close(actual, expected.double(), rtol=1e-4, atol=1e-5)
