# SPDX-License-Identifier: Apache-2.0
"""Cells, clock and figure of `experiments/posteriors.py`."""

from dataclasses import replace

import pytest
import torch

NAMES = ["map", "dropout", "laplace_last", "swag", "sghmc", "vbll", "ivon4", "bbb_normal_reparam"]


@pytest.fixture
def training(load):
    return load("_helpers.posteriors")


def task_of(training, problem, data, folder):
    return training.Task(
        problem=problem,
        data=data,
        valid=data,
        seed=0,
        folder=folder,
        clock=training.Clock(folder / "seconds.json"),
        engine="eager",
        epochs=1,
    )


def test_clock_adds_up_over_interruptions_and_does_not_end_a_training(training, tmp_path):
    path = tmp_path / "seconds.json"
    first = training.Clock(path)
    assert first.note(object()) is None, "a callback that returns true ends the training"
    before = first.seconds
    second = training.Clock(path)
    assert 0 < second.before <= before
    sum(range(1_000_000))
    second.note()
    assert training.Clock(path).before > second.before


def test_a_model_has_a_prior_of_its_own(load, training, tmp_path):
    methods = load("_helpers.posteriors")
    data = torch.rand(20, 1, 28, 28), torch.arange(20) % 10
    task_of(training, methods.PROBLEMS["fashion_mlp"], data, tmp_path).model(methods.FAN_IN)
    assert not methods.FAN_IN.by_fan_in, "checkpoints would depend on what ran before"


def test_a_network_of_an_ensemble_is_one_trained_alone_from_a_seed_of_its_own(
    load, training, tmp_path
):
    methods = load("_helpers.posteriors")
    problem = replace(methods.PROBLEMS["fashion_mlp"], network=training.tiny)
    data = torch.rand(20, 1, 28, 28), torch.arange(20) % 10
    task = task_of(training, problem, data, tmp_path / "ensemble")
    _, draws = training.ensemble_of(3, methods.BY_IVON(temperature=0.3))(task)
    for i in range(3):
        alone = replace(task, seed=1000 * (i + 1), folder=tmp_path / str(i))
        _, guide = methods.BY_IVON(temperature=0.3)(alone)
        torch.manual_seed(alone.seed)
        for name, value in guide.sample_posterior(1).items():
            assert torch.equal(draws[name][i : i + 1], value)
            assert not torch.equal(draws[name][i], draws[name][i - 1]), "two are one network"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_training_is_there_at_once_from_its_folder(load, training, tmp_path, name):
    method = load("_helpers.posteriors").METHODS[name]
    problem = load("_helpers.posteriors").PROBLEMS["fashion_mlp"]
    problem = replace(problem, network=training.tiny)
    torch.manual_seed(0)
    data, states, probs = (torch.rand(600, 1, 28, 28), torch.arange(600) % 10), [], []
    for _ in range(2):
        task = task_of(training, problem, data, tmp_path)
        posterior = method.train(task)
        states.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")})
        probs.append(method.prediction(posterior, data[0][:50], seed=0).probs)
    assert states[0] and states[0] == states[1], "it was trained again"
    assert torch.equal(*probs)
