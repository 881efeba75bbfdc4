# SPDX-License-Identifier: Apache-2.0
"""Guides, histories and predictions show themselves as tables in notebooks."""

import pyro
import pytest
import torch
from pyro.distributions import Normal
from torch.distributions import kl_divergence

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


def test_a_guide_shows_its_moments_and_the_kl_of_each_latent():
    _, guide = posterior(Normal(0.0, 2.0))
    shown = rows(guide._repr_markdown_())
    assert [row[0] for row in shown] == [f"`{name}`" for name in guide.site_names]
    for name, (_, _, loc, scale, sd, kl) in zip(guide.site_names, shown, strict=True):
        q = Normal(guide.loc(name), guide.scale(name))
        assert float(loc) == pytest.approx(q.loc.square().mean().sqrt().item(), rel=5e-3)
        assert float(scale) == pytest.approx(q.scale.median().item(), rel=5e-3)
        assert float(sd) == 2.0
        expected = kl_divergence(q, Normal(0.0, 2.0)).mean().item()
        assert float(kl) == pytest.approx(expected, rel=5e-3)


def test_without_closed_form_the_kl_is_that_of_one_draw():
    prior = bbb.ScaleMixtureNormal(0.5, 1.0, 0.1)
    _, guide = posterior(prior)
    name, state = guide.site_names[0], torch.get_rng_state()
    kl = float(rows(guide._repr_markdown_())[0][-1])
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(0)
    w = guide.sample_posterior(1)[name][0]
    q = Normal(guide.loc(name), guide.scale(name))
    expected = (q.log_prob(w) - prior.log_prob(w)).mean().item()
    assert kl == pytest.approx(expected, rel=5e-3)


def test_removed_weights_are_left_out():
    _, guide = posterior(Normal(0.0, 1.0))
    pruned = bbb.prune(guide, 0.5)
    for name, (_, shape, _, scale, *kl) in zip(
        guide.site_names, rows(pruned._repr_markdown_()), strict=True
    ):
        left = pruned.unpruned[name]
        assert shape.startswith(f"{left.sum()} of ") and kl == ["", ""]
        if left.any():
            assert float(scale) == pytest.approx(guide.scale(name)[left].median().item(), rel=5e-3)
        else:
            assert scale == ""


def test_a_plain_pyro_model_has_no_prior_in_the_table():
    def model():
        pyro.sample("w", Normal(torch.zeros(3), 1.0).to_event(1))

    guide = bbb.AutoSoftplusNormal(model)
    assert guide._repr_markdown_() == repr(guide)  # has no latents yet
    guide()
    ((name, shape, *_, sd, kl),) = rows(guide._repr_markdown_())
    assert (name, shape, sd, kl) == ("`w`", "3", "", "")


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
