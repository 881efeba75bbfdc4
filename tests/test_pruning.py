# SPDX-License-Identifier: Apache-2.0
"""What pruning removes, in which order, and that it stays removed."""

import numpy as np
import pyro.distributions as dist
import pytest
import scipy.stats
import torch
from torch import nn
from torch.distributions import kl_divergence

import pyro_bbb as bbb


def softplus(rho):
    return np.logaddexp(0, rho)


def make(likelihood=None, **options):
    """A guide with 4·6 + 6 + 6·3 + 3 = 51 weights, of scattered means and scales."""
    network = bbb.BayesianMLP([4, 6, 3])
    model = bbb.BayesianModel(network, likelihood or bbb.likelihoods.Categorical(), num_data=9)
    guide = bbb.AutoSoftplusNormal(model, **options)
    with torch.no_grad():
        for name, parameter in guide.named_parameters():
            parameter.copy_(torch.randn_like(parameter) - (3 if name.startswith("rhos") else 0))
    return model, guide


def removed(guide):
    """Names and positions of the weights that are exactly 0 with scale exactly 0."""
    return {
        (name, i)
        for name in guide.site_names
        for i, (loc, scale) in enumerate(
            zip(guide.loc(name).flatten(), guide.scale(name).flatten(), strict=True)
        )
        if loc == 0 and scale == 0
    }


def ratios_by_hand(guide):
    parameters = {name: value.detach().numpy() for name, value in guide.named_parameters()}
    return {
        name.removeprefix("locs."): np.abs(loc) / softplus(parameters["rhos" + name[4:]])
        for name, loc in parameters.items()
        if name.startswith("locs.")
    }


def test_signal_to_noise_by_hand():
    _, guide = make()
    ratios = bbb.signal_to_noise(guide)
    assert list(ratios) == guide.site_names and len(ratios) == 4
    for name, expected in ratios_by_hand(guide).items():
        np.testing.assert_allclose(ratios[name], expected, rtol=1e-5)
    assert not any(ratio.requires_grad for ratio in ratios.values())


@pytest.mark.parametrize("fraction", [0, 0.1, 0.75, 1])
def test_removes_exactly_the_lowest_ratios_of_all_layers_together(fraction):
    _, guide = make()
    ranked = sorted(
        (ratio, name, i)
        for name, ratios in ratios_by_hand(guide).items()
        for i, ratio in enumerate(ratios.flatten())
    )
    count = round(fraction * 51)
    pruned = bbb.prune(guide, fraction)
    assert removed(pruned) == {(name, i) for _, name, i in ranked[:count]}
    if count > 5:
        names = {name for name, _ in removed(pruned)}
        assert names == set(guide.site_names)  # biases and every layer among them
    ratios = torch.cat([ratio.flatten() for ratio in bbb.signal_to_noise(pruned).values()])
    assert (ratios == 0).sum() == count and not ratios.isnan().any()


@pytest.mark.parametrize("threshold", [0.0, 0.22, 3.0, 1e9])
def test_a_threshold_removes_the_ratios_below_it(threshold):
    _, guide = make()
    below = {
        (name, i)
        for name, ratios in ratios_by_hand(guide).items()
        for i, ratio in enumerate(ratios.flatten())
        if ratio < threshold
    }
    pruned = bbb.prune(guide, threshold=threshold)
    assert removed(pruned) == below
    assert removed(bbb.prune(pruned, threshold=threshold / 2)) == below


def test_the_rest_and_the_original_stay_as_they_are():
    _, guide = make()
    before = {name: value.clone() for name, value in guide.named_parameters()}
    pruned = bbb.prune(guide, 0.5)
    for name, value in guide.named_parameters():
        assert torch.equal(value, before[name])
    gone = removed(pruned)
    for name in guide.site_names:
        for of in ("loc", "scale"):
            was, now = (getattr(g, of)(name).flatten() for g in (guide, pruned))
            assert all(was[i] == now[i] for i in range(len(was)) if (name, i) not in gone)
    assert not removed(guide)
    with torch.no_grad():
        pruned.loc("network.fc1.weight").fill_(7.0)
    assert torch.equal(guide.loc("network.fc1.weight"), before["locs.network.fc1.weight"])


def test_what_a_larger_fraction_removes_contains_what_a_smaller_does():
    _, guide = make()
    with torch.no_grad():  # ratios of fc1 are tied
        guide.get_parameter("locs.network.fc1.weight").fill_(1.0)
        guide.get_parameter("rhos.network.fc1.weight").fill_(-2.0)
    sets = [removed(bbb.prune(guide, k / 51)) for k in range(52)]
    assert [len(entries) for entries in sets] == list(range(52))
    assert all(small < large for small, large in zip(sets, sets[1:], strict=False))


def test_pruning_again_counts_what_is_gone():
    _, guide = make()
    half = bbb.prune(guide, 0.5)
    assert removed(bbb.prune(half, 0.75)) == removed(bbb.prune(guide, 0.75))
    for fraction in (0.5, 0.3, 0):
        assert removed(bbb.prune(half, fraction)) == removed(half)


def test_removed_weights_are_exactly_zero_in_every_draw():
    model, guide = make()
    pruned = bbb.prune(guide, 0.75)
    gone = removed(pruned)
    x = torch.randn(5, 4)
    latents = [pruned(x), pruned.median(), pruned.quantiles([0.01, 0.99])]
    for draws in (pruned.sample_posterior(20), *latents):
        for name in guide.site_names:
            values = draws[name].reshape(-1, guide.loc(name).numel())
            zero = {(name, i) for i in range(values.shape[1]) if (values[:, i] == 0).all()}
            assert zero == {item for item in gone if item[0] == name}
    emptied = bbb.predict(model, bbb.prune(guide, 1), x, num_samples=4)
    torch.testing.assert_close(emptied.sample_probs, torch.full((4, 5, 3), 1 / 3))


def test_removed_weights_stay_removed_in_training():
    model, guide = make()
    pruned = bbb.prune(guide, 0.5)
    gone, x, y = removed(pruned), torch.randn(9, 4), torch.arange(9) % 3
    before = pruned.loc("network.fc2.weight").clone()
    bbb.fit(model, pruned, (x, y), epochs=3, batch_size=4, lr=0.1, progress=False)
    assert removed(pruned) == gone
    moved = (pruned.loc("network.fc2.weight") != before).flatten()
    assert {("network.fc2.weight", i) for i in range(18) if not moved[i]} == {
        item for item in gone if item[0] == "network.fc2.weight"
    }


class Shrinking(bbb.priors.Prior):
    """N(0, s^2) for every weight, with a trained s."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, module, name, shape):
        return dist.Normal(0.0, self.log_scale.exp()).expand(shape).to_event(len(shape))


@pytest.mark.parametrize(("loss", "num_particles"), [("trace", 3), ("mean_field", 1)])
def test_removed_weights_do_not_teach_a_learned_prior(loss, num_particles):
    """A prior that counted the 30 removed weights in 33 would learn a scale of .3 s.

    The best scale is the root of the mean of mu^2 + sigma^2 over the weights that are left.
    """
    prior = Shrinking()
    network = bbb.BayesianMLP([10, 3], prior=prior)
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=9)
    guide = bbb.AutoSoftplusNormal(model, init_loc=2.0)
    pruned = guide.without({"network.fc1.weight": torch.ones(3, 10, dtype=torch.bool)})
    assert list(pruned.unpruned) == guide.site_names and guide.unpruned == {}
    for parameter in pruned.parameters():
        parameter.requires_grad_(False)  # the prior alone is trained
    data = torch.randn(9, 10), torch.arange(9) % 3
    options = {"epochs": 20, "optimizer": torch.optim.SGD, "lr": 0.1, "progress": False}
    history = bbb.fit(model, pruned, data, loss=loss, num_particles=num_particles, **options)
    assert prior.log_scale.exp().item() == pytest.approx(2.0, rel=0.02)
    if loss == "trace":
        log_priors = torch.tensor(history.log_prior[-10:])
        expected = 3 * scipy.stats.norm(0, 2).logpdf(2)
        assert log_priors.mean().item() == pytest.approx(expected, abs=0.05)
    else:
        q, p = dist.Normal(2.0, softplus(-5.0)), dist.Normal(0.0, 2.0)
        expected = 3 * kl_divergence(q, p).item()
        assert history.kl[-1] == pytest.approx(expected, rel=1e-3)


def test_the_noise_is_no_weight():
    _, guide = make(bbb.likelihoods.Gaussian(dist.Gamma(2.0, 2.0)))
    assert "likelihood.scale" in guide.site_names
    assert "likelihood.scale" not in bbb.signal_to_noise(guide)
    pruned = bbb.prune(guide, 1)
    assert len(removed(pruned)) == 51
    for of in ("loc", "scale"):
        assert getattr(pruned, of)("likelihood.scale") == getattr(guide, of)("likelihood.scale")
    assert len(pruned.sample_posterior(5)["likelihood.scale"].unique()) == 5


def test_a_latent_that_cannot_be_0_is_not_removed():
    likelihood = bbb.likelihoods.Gaussian(dist.LogNormal(0.0, 1.0))
    model = bbb.BayesianModel(bbb.BayesianMLP([2, 1]), likelihood, num_data=5)
    guide = bbb.AutoSoftplusNormal(model)
    (name,) = set(guide.site_names) - set(guide.weight_names)
    with pytest.raises(ValueError, match="removed must hold latents of real values, got"):
        guide.without({name: torch.ones((), dtype=torch.bool)})
