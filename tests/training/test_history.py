# SPDX-License-Identifier: Apache-2.0
"""The record of training: identities between its series, step by step and epoch by epoch."""

import json
import math
from dataclasses import fields

import pyro.distributions as dist
import pytest
import torch

import pyro_bbb as bbb
from pyro_bbb.training.history import History, Record
from pyro_bbb.training.objectives import LossParts

SERIES = [field.name for field in fields(Record)]


pytestmark = pytest.mark.usefixtures("double")


def run(**options):
    network = bbb.BayesianMLP([3, 4, 1], prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(), num_data=10)
    data = torch.randn(10, 3), torch.randn(10)
    options = {"epochs": 3, "batch_size": 4, "seed": 0, "progress": False, **options}
    return bbb.fit(model, bbb.AutoSoftplusNormal(model, init_rho=-1.0), data, **options)


SCHEDULES = ["uniform", "blundell", lambda i, m: i / 10, lambda i, m: 0.0]


@pytest.mark.parametrize("loss", ["trace", "mean_field"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=["uniform", "blundell", "function", "zero"])
def test_the_loss_is_made_of_its_parts(schedule, loss):
    history = run(kl_schedule=schedule, loss=loss, num_particles=3, batch_size=1)
    for record in (history, history.steps):
        for i, value in enumerate(record.loss):
            assert value == pytest.approx(
                record.kl_weight[i] * record.kl[i] + record.nll[i], rel=1e-12
            )
            kl = record.log_guide[i] - record.log_prior[i]
            assert record.kl[i] == pytest.approx(kl, rel=1e-12)


def test_the_record_is_as_long_as_the_training():
    history = run(epochs=5)
    assert len(history) == 5
    assert len(history.steps) == 5 * 3
    assert [len(getattr(history, name)) for name in SERIES] == [5] * 7
    assert [len(getattr(history.steps, name)) for name in SERIES] == [15] * 7
    assert len(history.seconds) == 5 and all(second > 0 for second in history.seconds)
    assert history.steps.kl_weight == pytest.approx([0.4, 0.4, 0.2] * 5)
    assert history.kl_weight == pytest.approx([1.0] * 5)


def test_an_epoch_is_made_of_its_steps():
    history = run(epochs=3)
    for epoch in range(3):
        steps = slice(3 * epoch, 3 * epoch + 3)
        for name in ("loss", "nll", "kl_weight"):
            total = math.fsum(getattr(history.steps, name)[steps])
            assert getattr(history, name)[epoch] == pytest.approx(total, rel=1e-14)
        for name in ("kl", "log_prior", "log_guide"):
            values, weights = getattr(history.steps, name)[steps], (0.4, 0.4, 0.2)
            mean = sum(w * v for w, v in zip(weights, values, strict=True))
            assert getattr(history, name)[epoch] == pytest.approx(mean, rel=1e-12)


def test_it_goes_through_json():
    history = run()
    loaded = json.loads(json.dumps(history.as_dict()))
    assert loaded["loss"] == history.loss
    assert loaded["steps"]["kl"] == history.steps.kl
    about_run = {"seconds", "steps", "skipped", "interrupted", "num_data"}
    baselines = {"baseline_per_example", "baseline_nll_per_example"}
    assert set(loaded) == {*SERIES, *about_run, *baselines, "validation_loss", "best_epoch"}


def test_the_printed_form_is_one_line():
    history = History()
    assert repr(history) == "History(0 epochs, 0 steps, 0 s)"
    for loss in (20_000.0, 5_812.3):
        history.steps.append(LossParts(loss, 1.0, 0.0, 1.0, loss - 1, 1.0), lr=0.1)
        history.close_epoch(1, seconds=1.6)
    history.skipped.append(3)
    expected = "2 epochs, 2 steps, neg. ELBO 2e+04 -> 5812, 3.2 s, 1 skipped"
    assert repr(history) == f"History({expected})"
    assert repr(history.steps) == "Record(2 steps, neg. ELBO 2e+04 -> 5812)"
