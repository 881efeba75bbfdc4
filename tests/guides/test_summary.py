# SPDX-License-Identifier: Apache-2.0
"""Guides, histories and predictions show themselves as tables in notebooks."""

import pyro
import pytest
import torch
from pyro.distributions import Normal

import pyro_bbb as bbb


def posterior(prior):
    torch.manual_seed(0)
    network = bbb.BayesianMLP([4, 3, 2], prior=prior)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=20)
    return model, bbb.AutoSoftplusNormal(model, init_rho=-1.0)


def rows(markdown):
    """The cells of a table's body."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_guide_shows_its_moments():
    _, guide = posterior(Normal(0.0, 2.0))
    shown = rows(guide._repr_markdown_())
    assert [row[0] for row in shown] == [f"`{name}`" for name in guide.site_names]
    for name, (_, _, loc, scale) in zip(guide.site_names, shown, strict=True):
        assert float(loc) == pytest.approx(guide.loc(name).square().mean().sqrt().item(), rel=5e-3)
        assert float(scale) == pytest.approx(guide.scale(name).median().item(), rel=5e-3)


def test_removed_weights_are_left_out():
    _, guide = posterior(Normal(0.0, 1.0))
    pruned = bbb.prune(guide, 0.5)
    shown = rows(pruned._repr_markdown_())
    for name, (*_, scale) in zip(guide.site_names, shown, strict=True):
        expected = guide.scale(name)[pruned.unpruned[name]].median().item()
        assert float(scale) == pytest.approx(expected, rel=5e-3, nan_ok=True)


def test_a_guide_without_latents_shows_its_name():
    guide = bbb.AutoSoftplusNormal(
        lambda: pyro.sample("w", Normal(torch.zeros(3), 1.0).to_event(1))
    )
    assert guide._repr_markdown_() == repr(guide)
    guide()
    ((name, shape, *_),) = rows(guide._repr_markdown_())
    assert (name, shape) == ("`w`", "3")


def test_a_history_shows_five_epochs():
    model, guide = posterior(Normal(0.0, 1.0))
    data = torch.randn(20, 4), torch.arange(20) % 2
    history = bbb.fit(model, guide, data, epochs=9, progress=False)
    shown = rows(history._repr_markdown_())
    assert [row[0] for row in shown] == ["1", "3", "5", "7", "9"]
    assert float(shown[-1][1]) == pytest.approx(history.neg_elbo_per_example[-1], rel=1e-3)
    assert repr(history) in history._repr_markdown_()
    assert rows(bbb.History()._repr_markdown_()) == []


def test_predictions_show_five_inputs():
    model, guide = posterior(Normal(0.0, 1.0))
    prediction = bbb.predict(model, guide, torch.randn(7, 4), seed=0)
    *shown, last = rows(prediction._repr_markdown_())
    assert [row[0] for row in shown] == [*"01234"] and last[0] == "..."
    for row, label, entropy in zip(shown, prediction.label, prediction.entropy, strict=False):
        assert int(row[1]) == label and float(row[3]) == pytest.approx(entropy.item(), rel=1e-3)


def test_real_predictions_show_each_target():
    components = Normal(torch.randn(3, 2, 2), 0.5)
    shown = rows(bbb.RegressionPrediction(components)._repr_markdown_())
    assert [row[0] for row in shown] == ["0, 0", "0, 1", "1, 0", "1, 1"]
    assert [float(row[3]) for row in shown] == [0.5] * 4
