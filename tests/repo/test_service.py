# SPDX-License-Identifier: Apache-2.0
"""The example of a web service: what it answers, and what it refuses."""

import asyncio
import importlib.util
import json
import re
import sys
import tracemalloc
from functools import cache
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import likelihoods

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "service"
IMAGES = [1, 4, 4]


@cache
def script(name):
    """A file of the example as a module."""
    spec = importlib.util.spec_from_file_location(f"service_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pair(network, likelihood):
    torch.manual_seed(1)
    model = bbb.BayesianModel(network, likelihood, num_data=5)
    return model, bbb.AutoSoftplusNormal(model, init_rho=-1.0)


@pytest.fixture(scope="module")
def of_images(tmp_path_factory):
    """A folder with a convolutional classifier, its model and its guide."""
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    model, guide = pair(bbb.bayesianize(network), likelihoods.Categorical())
    folder = tmp_path_factory.mktemp("images")
    metadata = {"input_shape": IMAGES, "labels": ["cat", "dog", "fox"]}
    bbb.save(folder, model, guide, metadata=metadata)
    return folder, model, guide


@pytest.fixture(scope="module")
def of_targets(tmp_path_factory):
    model, guide = pair(bbb.BayesianMLP([3, 8, 2]), likelihoods.Gaussian(0.5))
    folder = tmp_path_factory.mktemp("targets")
    bbb.save(folder, model, guide, metadata={"input_shape": [3]})
    return folder, model, guide


class Client:
    """Asks an application without a socket."""

    def __init__(self, app):
        self.transport = httpx.ASGITransport(app=app)

    def get(self, path):
        return asyncio.run(self.request("GET", path))

    def post(self, path, **body):
        return asyncio.run(self.request("POST", path, **body))

    async def request(self, method, path, **body):
        async with httpx.AsyncClient(transport=self.transport, base_url="http://test") as client:
            return await client.request(method, path, **body)


def client(folder, **settings):
    app = script("app")
    return Client(app.create_app(app.Settings(folder, num_samples=20, **settings)))


def ask(service, x):
    answer = service.post("/predict", json={"inputs": x.flatten(1).tolist()})
    assert answer.status_code == 200, answer.text
    return answer.json()["answers"]


def column(answers, name):
    return torch.tensor([answer[name] for answer in answers])


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_batch_of_images_gets_predicts_answers(of_images):
    folder, model, guide = of_images
    x = torch.randn(6, *IMAGES)
    expected = bbb.predict(model, guide, x, num_samples=20, seed=0)
    threshold = expected.confidence.median().item()
    answers = ask(client(folder, threshold=threshold + 1e-6), x)
    assert_equal(column(answers, "probabilities"), expected.probs)
    assert_equal(column(answers, "aleatoric"), expected.aleatoric)
    assert_equal(column(answers, "epistemic"), expected.epistemic)
    assert column(answers, "prediction").equal(expected.label)
    assert column(answers, "refused").equal(expected.refuse(threshold + 1e-6))
    assert 0 < column(answers, "refused").sum() < 6
    assert [answer["label"] for answer in answers] == [
        ["cat", "dog", "fox"][label] for label in expected.label
    ]


def test_a_batch_for_targets_gets_predicts_answers(of_targets):
    folder, model, guide = of_targets
    x = torch.randn(6, 3)
    expected = bbb.predict(model, guide, x, num_samples=20, seed=0)
    limit = expected.std.amax(-1).median().item() + 1e-6
    answers = ask(client(folder, threshold=limit), x)
    assert_equal(column(answers, "prediction"), expected.mean)
    assert_equal(column(answers, "std"), expected.std)
    assert_equal(column(answers, "aleatoric"), expected.aleatoric_std)
    assert_equal(column(answers, "epistemic"), expected.epistemic_std)
    assert_equal(column(answers, "interval"), torch.stack(expected.interval(0.9), -1))
    assert column(answers, "refused").equal((expected.std >= limit).any(-1))
    assert 0 < column(answers, "refused").sum() < 6


def test_counts_have_no_interval(tmp_path):
    model, guide = pair(bbb.BayesianMLP([3, 1]), likelihoods.Poisson())
    bbb.save(tmp_path, model, guide, metadata={"input_shape": [3]})
    (answer,) = ask(client(tmp_path), torch.zeros(1, 3))
    assert answer["interval"] is None and answer["prediction"][0] > 0


ROW = "[0.1, 0.2, 0.3]"
BAD = {
    "no JSON": ("{", "JSON"),
    "nothing": ("{}", "required"),
    "no inputs": ('{"inputs": []}', "at least 1"),
    "a number": ('{"inputs": 3}', "list"),
    "a short row": (f'{{"inputs": [{ROW}, [1.0]]}}', "input 1: expected 3 numbers, .* got 1"),
    "nested": (f'{{"inputs": [[{ROW}]]}}', "number"),
    "text": ('{"inputs": [["1", 2, 3]]}', "number"),
    "null": ('{"inputs": [[null, 2, 3]]}', "number"),
    "a truth value": ('{"inputs": [[true, 2, 3]]}', "number"),
    "NaN": ('{"inputs": [[NaN, 2, 3]]}', "finite"),
    "infinity": ('{"inputs": [[Infinity, 2, 3]]}', "finite"),
    "too large for float32": ('{"inputs": [[1e39, 2, 3]]}', "finite as torch.float32"),
    "an answer that overflows": ('{"inputs": [[3e38, 3e38, 3e38]]}', "the answer is not finite"),
    "too many rows": (f'{{"inputs": [{", ".join([ROW] * 9)}]}}', "at most 8 inputs, got 9"),
    "another field": (f'{{"inputs": [{ROW}], "seed": 1}}', "not permitted"),
}


@pytest.fixture(scope="module")
def small(of_targets):
    return client(of_targets[0], max_rows=8, max_bytes=300)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_422_with_the_reason(name, small):
    body, reason = BAD[name]
    answer = small.post("/predict", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert re.search(reason, json.dumps(answer.json())), answer.text


HOSTILE = {  # many values where few belong
    "numbers for rows": '{"inputs": [' + "0," * 300_000 + "0]}",
    "texts for numbers": '{"inputs": [[' + '"",' * 300_000 + "0]]}",
    "texts in many rows": '{"inputs": [' + '["",0,0],' * 100_000 + "[0,0,0]]}",
    "fields": "{" + ",".join(f'"f{i}": 0' for i in range(80_000)) + "}",
    "a long name": '{"' + "x" * 1_000_000 + '": 0}',
}


@pytest.mark.parametrize("max_rows", [8, 10**6])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_of_many_errors_is_answered_by_one_in_little_memory(of_targets, name, max_rows):
    service = client(of_targets[0], max_rows=max_rows)
    body, headers = HOSTILE[name], {"content-type": "application/json"}
    tracemalloc.start()
    try:
        answer = service.post("/predict", content=body, headers=headers)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.status_code == 422 and len(answer.content) < 1000
    assert len(answer.json()["detail"]) == 1
    assert peak < 60e6  # JSON itself takes up to 15 bytes for each of the body; an error a kilobyte


def test_a_body_too_large_or_of_unknown_length_is_not_read(small):
    body = json.dumps({"inputs": [[0.0, 0.0, 0.0]] * 100})
    assert small.post("/predict", content=body).status_code == 413

    async def parts():
        yield body.encode()

    assert small.post("/predict", content=parts()).status_code == 411


def test_settings_come_from_the_environment(monkeypatch, of_images):
    app = script("app")
    with pytest.raises(KeyError, match="PYRO_BBB_MODEL"):
        app.Settings.from_environment()
    monkeypatch.setenv("PYRO_BBB_MODEL", str(of_images[0]))
    monkeypatch.setenv("PYRO_BBB_THRESHOLD", "0.7")
    monkeypatch.setenv("PYRO_BBB_NUM_SAMPLES", "3")
    assert app.Settings.from_environment() == app.Settings(of_images[0], 0.7, num_samples=3)
    assert Client(app.create_app()).get("/health").json()["num_samples"] == 3


def test_a_save_without_the_shape_of_its_inputs_is_an_error(tmp_path):
    bbb.save(tmp_path, *pair(bbb.BayesianMLP([3, 1]), likelihoods.Gaussian()))
    with pytest.raises(ValueError, match="input_shape"):
        client(tmp_path)


@pytest.mark.slow
def test_the_digits_are_trained_and_served(tmp_path):
    script("train").train(tmp_path, epochs=1)
    (answer,) = ask(client(tmp_path), torch.zeros(1, 64))
    assert len(answer["probabilities"]) == 10 and answer["label"] == str(answer["prediction"])
