# SPDX-License-Identifier: Apache-2.0
"""`save(compressed=True)`: rounded as the posterior allows, small, and never trusted when read."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch.distributions import Normal, kl_divergence

import pyro_bbb as bbb
from pyro_bbb.persistence import LoadError
from pyro_bbb.persistence.archive import read, write
from tests._support.guide_names import ANY_MODEL
from tests.persistence.test_save_load import X, assert_same, assert_same_state, converted, trained

LABELS = torch.arange(len(X)) % 2
WEIGHT = "network.fc1.weight"


def pruned(fraction=0.6, sizes=(3, 40, 2), dtype=torch.float32):
    """A model and its guide, of scattered means and scales."""
    torch.manual_seed(0)
    network = bbb.BayesianMLP(list(sizes), prior="learned_scale_mixture")
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=len(X)).to(dtype)
    guide = bbb.AutoSoftplusNormal(model)
    with torch.no_grad():
        for loc, rho in zip(guide.locs.parameters(), guide.rhos.parameters(), strict=True):
            rho.copy_(-4 + 0.3 * torch.randn_like(rho))
            loc.copy_(0.2 * torch.randn_like(loc))
    return model, bbb.prune(guide, fraction) if fraction else guide


def compressed(path, model, guide):
    bbb.save(path, model, guide, compressed=True)
    return bbb.load(path)


def file_of(path):
    (file,) = path.glob("tensors-*.safetensors.zlib")
    return file


def num_bytes(path):
    return sum(file.stat().st_size for file in path.iterdir())


# --- what is rounded, and how far ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_move_by_half_a_standard_deviation_and_cost_a_24th_nat(tmp_path, dtype):
    model, guide = pruned(0, (99, 500, 2), dtype)
    with torch.no_grad():
        for name in guide.site_names:  # means evenly over 200 standard deviations
            loc, scale = guide.loc(name), guide.scale(name)
            loc.copy_(torch.linspace(-100, 100, loc.numel(), dtype=dtype).view_as(loc) * scale)
    _, new = compressed(tmp_path, model, guide)
    before, after = ((g.loc(WEIGHT).double(), g.scale(WEIGHT).double()) for g in (guide, new))
    assert new.loc(WEIGHT).dtype == dtype
    assert ((after[0] - before[0]).abs() <= 0.5001 * after[1]).all()
    assert ((after[1] / before[1]).log().abs() <= 1 / 32 + 1e-6).all()
    same_scale = kl_divergence(Normal(after[0], after[1]), Normal(before[0], after[1]))
    assert same_scale.mean().item() == pytest.approx(1 / 24, rel=0.01)
    of_scale = kl_divergence(Normal(before[0], after[1]), Normal(*before))
    assert of_scale.max() < 0.001


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fraction", [0, 0.6, 1])
def test_what_was_compressed_once_is_compressed_to_the_same_file(tmp_path, fraction, dtype):
    model, guide = pruned(fraction, dtype=dtype)
    first = compressed(tmp_path / "1", model, guide)
    second = compressed(tmp_path / "2", *first)
    assert file_of(tmp_path / "1").name == file_of(tmp_path / "2").name
    assert_same(first, second, X.to(dtype))


def test_all_but_the_guides_numbers_stays_exact(tmp_path):
    prior = {"*bias": "horseshoe", "*": "learned_normal"}
    likelihood = bbb.likelihoods.Gaussian(dist.HalfCauchy(0.7))
    model, guide = trained(converted(prior), likelihood)
    loaded = compressed(tmp_path, model, guide)
    assert_same_state(model, loaded.model)
    assert repr(model) == repr(loaded.model)


@pytest.mark.filterwarnings("ignore:BatchNorm's running statistics")
@pytest.mark.parametrize("guide", sorted({*ANY_MODEL} - {"softplus_normal"}))
def test_other_guides_are_compressed_without_loss(tmp_path, guide):
    pair = trained(converted(), guide=guide)
    assert_same(pair, compressed(tmp_path, *pair))


def test_each_member_of_an_ensemble_is_rounded(tmp_path):
    model, _ = pruned()
    guide = bbb.guides.ensemble(model, 2, "softplus_normal")
    _, new = compressed(tmp_path, model, guide)
    for member, rounded in zip(guide.members, new.members, strict=True):
        for name in member.site_names:
            levels = rounded.loc(name) / rounded.scale(name)
            assert (levels - levels.round()).abs().max() < 1e-4
            assert (rounded.loc(name) - member.loc(name)).abs().max() <= rounded.scale(name).max()


@pytest.mark.parametrize(
    ("loc", "rho"), [(math.nan, -3.0), (math.inf, -3.0), (0.5, math.nan), (0.5, -60.0)]
)
def test_numbers_that_integers_do_not_hold_stay_exact(tmp_path, loc, rho):
    model, guide = pruned(0)
    guide.loc(WEIGHT)[0, 0] = loc
    guide.get_parameter(f"rhos.{WEIGHT}").detach()[0, 0] = rho
    _, new = compressed(tmp_path, model, guide)
    for name in (f"locs.{WEIGHT}", f"rhos.{WEIGHT}"):
        before, after = guide.get_parameter(name), new.get_parameter(name)
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


# --- what the loaded guide can do ---


def test_a_pruned_guide_stays_pruned_trains_and_is_exported(tmp_path):
    model, guide = pruned()
    new_model, new = compressed(tmp_path, model, guide)
    module = bbb.to_module(new_model, new)
    assert torch.equal(module[0].weight, new.loc(WEIGHT))
    bbb.fit(new_model, new, (X, LABELS), epochs=2, batch_size=2, progress=False)
    for name, unpruned in guide.unpruned.items():
        assert torch.equal(new.unpruned[name], unpruned) and not unpruned.all()
        assert (new.loc(name)[~unpruned] == 0).all() and (new.scale(name)[~unpruned] == 0).all()
    more = bbb.prune(new, 0.9)
    left = sum(mask.sum() for mask in more.unpruned.values())
    total = sum(mask.numel() for mask in more.unpruned.values())
    assert left == total - round(0.9 * total)


def test_a_68th_of_the_weights_takes_a_50th_of_the_bytes(tmp_path):
    model, guide = pruned(1 - 1 / 68, (784, 300, 100, 10))
    compressed(tmp_path, model, guide)
    assert num_bytes(tmp_path) < 4 * 266_610 / 50


def test_weights_of_before_bayesianize_take_no_room(tmp_path):
    network = bbb.bayesianize(torch.nn.Linear(784, 300))
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=9)
    guide = bbb.prune(bbb.AutoSoftplusNormal(model), 1 - 1 / 68)
    _, loaded = compressed(tmp_path, model, guide)
    assert num_bytes(tmp_path) < 4 * 784 * 300 / 50
    assert loaded.unpruned["network.weight"].equal(guide.unpruned["network.weight"])


# --- damaged and forged files ---


def test_forged_tensors_give_the_clear_error(tmp_path):
    bbb.save(tmp_path, *pruned(), compressed=True)
    spec, tensors = read(tmp_path, "model")
    loc, rho = f"guide.locs.{WEIGHT}", f"guide.rhos.{WEIGHT}"
    levels, of_rho = tensors[loc], tensors[rho]
    assert not levels.is_floating_point() and levels.numel() < of_rho.numel()
    for changes, message in [
        ({loc: levels[:-1]}, r"fc1.weight must have \d+ values, got \[\d+\]"),
        ({loc: levels[:1]}, r"fc1.weight must have \d+ values, got \[1\]"),
        ({loc: levels[None]}, r"fc1.weight must have \d+ values, got \[1, "),
        ({rho: of_rho.float()}, "does not build: TypeError"),
        ({rho: of_rho[:, :2].contiguous()}, "values"),
        ({rho: of_rho.flatten()}, r"tensor .*fc1.weight has shape \[120\]"),
    ]:
        write(tmp_path, "model", spec, {**tensors, **changes}, deflated=True)
        with pytest.raises(LoadError, match=message):
            bbb.load(tmp_path)
    for quantized in ({}, {loc: "int8"}, {rho: "float32"}, {"x": "float32"}, 7, {loc: 1}):
        write(tmp_path, "model", {**spec, "quantized": quantized}, tensors, deflated=True)
        with pytest.raises(LoadError, match=str(tmp_path)):
            bbb.load(tmp_path)
    write(tmp_path, "model", spec, tensors, deflated=True)
    bbb.load(tmp_path)
