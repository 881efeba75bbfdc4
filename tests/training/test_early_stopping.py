# SPDX-License-Identifier: Apache-2.0
"""Validation leaves a training as it is; with patience its best epoch is what remains."""

import signal

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_bbb as bbb

N = 20
GENERATOR = torch.Generator().manual_seed(0)
X, X_NEW = torch.randn(N, 4, generator=GENERATOR), torch.randn(60, 4, generator=GENERATOR)
Y, Y_NEW = (x[:, 0] + 0.5 * torch.randn(len(x), generator=GENERATOR) for x in (X, X_NEW))
NEW = (X_NEW, Y_NEW)
GUIDES = ["laplace", "swag", "ensemble", "vbll"]
OVERFIT = {"epochs": 40, "lr": 0.05, "lr_schedule": "constant", "batch_size": N}


def trained(guide="softplus_normal", data=(X, Y), norm=False, **options):
    """Model, guide, their tensors and the record."""
    torch.manual_seed(1)
    layers = [nn.Linear(4, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.Tanh()]
    network = bbb.bayesianize(
        nn.Sequential(*layers, nn.Linear(16, 1)),
        prior=dist.Normal(0.0, 1.0),
        where=str(len(layers)) if guide == "vbll" else None,
    )
    model = bbb.BayesianModel(network, bbb.likelihoods.Gaussian(0.1), num_data=N)
    guide = AutoNormal(model) if guide == "stock" else bbb.guides.make(guide, model)
    how = {"epochs": 4, "batch_size": 8, "progress": False, "seed": 0, "lr": 0.01} | options
    history = bbb.fit(model, guide, data, **how)
    return model, guide, tensors(model, guide), history


def tensors(*modules):
    return [x.detach().clone() for module in modules for x in module.state_dict().values()]


def equal(first, second):
    return all(map(torch.equal, first, second))


def snapshots(seen):
    """A callback that adds the tensors after each epoch."""
    return lambda end: seen.append(tensors(end.model, end.guide))


@pytest.mark.parametrize(
    ("guide", "form"),
    [
        *(("softplus_normal", form) for form in ("tensors", "loader")),
        *((guide, "tensors") for guide in ("stock", *GUIDES)),
    ],
)
@pytest.mark.filterwarnings("ignore::pyro_bbb.guides.LinearizationWarning")
def test_validation_moves_nothing(guide, form):
    rows = TensorDataset(*NEW)
    validation = {
        "tensors": NEW,
        "loader": DataLoader(rows, batch_size=25, shuffle=True),
    }[form]
    data = (X, Y) if form == "tensors" else DataLoader(TensorDataset(X, Y), 8, shuffle=True)
    *_, expected, record = trained(guide, data)
    *_, actual, history = trained(guide, data, validation=validation)
    assert equal(actual, expected)
    assert history.steps.loss == record.steps.loss
    assert len(history.validation_loss) == 4 and record.validation_loss == []
    assert history.best_epoch is None


def test_the_loss_is_the_negative_log_predictive_density():
    seen = []

    def callback(end):
        prediction = bbb.predict(end.model, end.guide, X_NEW, num_samples=10, seed=0)
        seen.append((-prediction.log_prob(Y_NEW).mean().item(), end.history.validation_loss[-1]))

    trained(validation=NEW, callbacks=[callback])
    for expected, actual in seen:
        assert actual == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "compiled"},
        {"optimizer": "ivon", "lr": 0.3},
        {"norm": True, "lr": 0.2},
    ],
    ids=str,
)
def test_patience_ends_the_training_and_the_best_epoch_remains(options):
    seen = []
    how = OVERFIT | {"validation": NEW, "patience": 3, "callbacks": [snapshots(seen)]} | options
    *_, state, history = trained(**how)
    losses, best = history.validation_loss, history.best_epoch
    assert best == losses.index(min(losses)) and len(losses) == best + 4 < 40
    assert equal(state, seen[best]) and not equal(state, seen[-1])
    assert (
        history.loss == trained(**how | {"validation": None, "patience": None})[3].loss[: best + 4]
    )
    assert f"after epoch {best + 1}" in repr(history) and "validation" in history._repr_markdown_()
    assert f"{losses[0]:.4g}" in history._repr_markdown_()


@pytest.mark.filterwarnings("ignore::pyro_bbb.guides.LinearizationWarning")
def test_laplace_is_approximated_at_the_best_epoch():
    seen = []
    how = OVERFIT | {"callbacks": [lambda end: seen.append(end.guide.loc.detach().clone())]}
    model, guide, state, history = trained("laplace", validation=NEW, patience=3, **how)
    assert torch.equal(guide.loc, seen[history.best_epoch])
    guide.approximate((X, Y))
    for x, expected in zip(tensors(model, guide), state, strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-6)


class PowerCut(Exception):
    """Ends a run."""


def test_a_run_resumes_to_the_bit(tmp_path):
    how = OVERFIT | {"validation": NEW, "patience": 3}
    *_, expected, record = trained(**how)
    cut = record.best_epoch + 2

    def power_cut(end):
        if end.epoch == cut:
            raise PowerCut

    with pytest.raises(PowerCut):
        trained(**how, checkpoint=tmp_path, callbacks=[power_cut])
    with pytest.raises(ValueError, match="validation"):
        trained(**how | {"validation": (X_NEW, -Y_NEW)}, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="patience"):
        trained(**how | {"patience": 4}, checkpoint=tmp_path)
    for _ in range(2):  # resumed, then finished
        *_, actual, history = trained(**how, checkpoint=tmp_path)
        assert equal(actual, expected)
        assert history.validation_loss == record.validation_loss
        assert history.best_epoch == record.best_epoch


def test_ctrl_c_leaves_the_best_epoch_and_a_checkpoint_of_the_latest(tmp_path):
    seen = []
    how = OVERFIT | {"validation": NEW, "patience": 30, "epochs": 20}

    def interrupt(end):
        seen.append(tensors(end.model, end.guide))
        if end.epoch == 14 and len(seen) == 15:
            signal.raise_signal(signal.SIGINT)

    *_, state, history = trained(**how, callbacks=[interrupt], checkpoint=tmp_path)
    assert history.interrupted and history.best_epoch < 14
    assert equal(state, seen[history.best_epoch])
    assert equal(trained(**how, checkpoint=tmp_path)[2], trained(**how)[2])


def test_bar_and_plot_have_the_validation(capfd):
    *_, history = trained(**OVERFIT, validation=NEW, patience=3, progress=True)
    assert f"validation={history.validation_loss[-1]:.4g}" in capfd.readouterr().err
    (line,) = (x for x in history.plot().lines if "validation" in x.get_label())
    assert line.get_ydata().tolist() == [N * nats for nats in history.validation_loss]
    assert line.get_markevery() == [history.best_epoch]
