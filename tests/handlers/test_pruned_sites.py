# SPDX-License-Identifier: Apache-2.0
"""What pruning has left is trained as each of its weights would be by itself."""

import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch.autograd import gradcheck

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb._handlers import flat_site
from pyro_bbb._handlers.pruned_sites import UnprunedEntries, mask_pruned, unpruned_entries
from pyro_bbb._ops.flat import gathered, spread
from pyro_bbb.distributions import PrunedNormal
from pyro_bbb.distributions.pruned import FlatPrunedNormal, PrunedEvent
from pyro_bbb.estimators import ESTIMATORS
from pyro_bbb.training.objectives import recorded_elbo
from tests._support.flat_site_cases import COUNT, FC1, Seen, assert_alike, data, model_of

pytestmark = pytest.mark.usefixtures("double", "unvalidated")


def make(prior=None, likelihood=None, fraction=0.6):
    model = model_of(prior, likelihood)
    return model, bbb.prune(bbb.AutoSoftplusNormal(model, init_rho=-2.0), fraction)


# --- entries and tensors ---


def masks():
    shapes = (4, 3), (4,), (2, 4), (2,)
    found = [torch.rand(shape) < 0.5 for shape in shapes]
    found[3][:] = False  # of one tensor nothing is left
    return dict(zip("abcd", found, strict=True))


def test_entries_are_those_where_the_mask_is_true():
    unpruned = UnprunedEntries(masks())
    tensors = [torch.randn(mask.shape) for mask in unpruned.masks.values()]
    entries = gathered(tensors, list(unpruned.indices.values()))
    expected = [x[mask] for x, mask in zip(tensors, unpruned.masks.values(), strict=True)]
    assert torch.equal(entries, torch.cat(expected))


@pytest.mark.parametrize("lead", [(), (3,), (3, 1)])
def test_tensors_hold_them_there_and_zeros_elsewhere(lead):
    unpruned = UnprunedEntries(masks())
    like = list(unpruned.masks.values())
    vector = torch.randn(*lead, sum(int(mask.sum()) for mask in like))
    parts = vector.split([int(mask.sum()) for mask in like], -1)
    tensors = spread(vector, list(unpruned.indices.values()), like)
    for x, mask, part in zip(tensors, like, parts, strict=True):
        assert x.shape == (*lead, *mask.shape)
        assert torch.equal(x[..., mask], part) and not x[..., ~mask].any()


def test_their_derivatives():
    unpruned = UnprunedEntries(masks())
    indices, like = list(unpruned.indices.values()), list(unpruned.masks.values())
    tensors = [torch.randn(mask.shape, requires_grad=True) for mask in like]
    assert gradcheck(lambda *x: gathered(x, indices), tensors)
    vector = torch.randn(2, 1, sum(map(len, indices)), requires_grad=True)
    assert gradcheck(lambda x: spread(x, indices, like), vector)


# --- distributions ---


def test_a_normal_whose_draw_is_known_is_a_pruned_one():
    loc, rho = torch.randn(3, 4), torch.randn(3, 4).where(torch.rand(3, 4) < 0.5, -torch.inf)
    value = torch.randn(3, 4).where(rho.isfinite(), 0.0)

    def noise():
        return [(value - loc) / torch.nn.functional.softplus(rho)]

    q, expected = FlatPrunedNormal(loc, rho, value, noise), PrunedNormal(loc, rho)
    assert q.rsample() is value and q.remembers(value)
    again = q.rsample()
    assert not torch.equal(again, value) and not again[rho.isinf()].any()
    assert not q.remembers(again)
    for name in ("loc", "rho", "scale", "unpruned"):
        assert torch.equal(getattr(q, name), getattr(expected, name))
    torch.testing.assert_close(q.log_prob(again), expected.log_prob(again))
    torch.testing.assert_close(q.to_event(2).log_prob(value), expected.log_prob(value).sum())


def test_of_an_event_those_count_that_are_kept():
    unpruned = torch.rand(3, 4) < 0.5
    event = bbb.ScaleMixtureNormal(0.3, 1.2, 0.05).expand([3, 4]).to_event(2)
    value = torch.randn(2, 1, 3, 4)
    for found in (
        PrunedEvent(event, unpruned).expand([2, 1]),
        PrunedEvent(event.expand([2, 1]), unpruned),
    ):
        assert found.event is not event and found.unpruned is unpruned
        expected = event.base_dist.log_prob(value).where(unpruned, 0.0).sum((-2, -1))
        torch.testing.assert_close(found.log_prob(value), expected)


# --- the objective ---

MERGED = {
    "mixture": lambda: make(),
    "Normal": lambda: make(dist.Normal(0.1, 0.7)),
    "all removed": lambda: make(fraction=1),
}
APART = {
    "by layer": lambda: make({"fc1.*": dist.Normal(0.0, 1.0), "*": dist.Normal(0.0, 0.5)}),
    "learned mixture": lambda: make(bbb.priors.LearnedScaleMixture()),
    "Laplace": lambda: make(dist.Laplace(0.0, 1.0)),
    "latent noise": lambda: make(likelihood=likelihoods.Gaussian(dist.LogNormal(0.0, 1.0))),
}
DRAWS = {"one": (1, False), "one after another": (3, False), "at once": (3, True)}


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", MERGED)
def test_what_is_left_is_one_site(name, estimator, draws):
    model, guide = MERGED[name]()
    num_particles, vectorize = DRAWS[draws]
    elbo = Seen(num_particles=num_particles, vectorize_particles=vectorize, max_plate_nesting=1)
    elbo.particles, elbo.unpruned = [], unpruned_entries(guide)
    count = sum(int(mask.sum()) for mask in guide.unpruned.values())
    assert count == (0 if name == "all removed" else COUNT - round(0.6 * COUNT))
    with ESTIMATORS[estimator]():
        elbo.loss_and_grads(mask_pruned(model, elbo.unpruned), guide, *data())
    for trace in elbo.traces:
        latent = [name for name in trace.stochastic_nodes if name != "obs"]
        assert latent == [FC1] and len(trace.nodes[FC1]["members"]) == 4
        assert trace.nodes[FC1]["value"].shape[-1] == count


@pytest.mark.parametrize("of", ["all", "others"])
def test_under_a_prior_of_others_each_weight_is_a_site(of):
    model, guide = make()
    others = UnprunedEntries({name: ~mask for name, mask in guide.unpruned.items()})
    elbo = Seen(max_plate_nesting=1)
    elbo.particles, elbo.unpruned = [], unpruned_entries(guide)
    elbo.loss_and_grads(model if of == "all" else mask_pruned(model, others), guide, *data())
    for trace in elbo.traces:
        latent = [name for name in trace.stochastic_nodes if name != "obs"]
        assert len(latent) == 4 and not any("members" in x for x in trace.nodes.values())


def as_each_tensor_would(guide):
    """The noise that each tensor would draw by itself, of which the removed ones' is unused."""

    def draw(noise):
        lead = noise.vector.shape[:-1]
        drawn = [torch.randn(*lead, *mask.shape)[..., mask] for mask in guide.unpruned.values()]
        noise.vector.copy_(torch.cat(drawn, -1))

    return draw


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("kind", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("name", [*MERGED, *APART])
def test_loss_and_gradients_are_those_of_pyros_own_objective(name, kind, draws, monkeypatch):
    num_particles, vectorize = DRAWS[draws]
    options = {"vectorize_particles": vectorize, "max_plate_nesting": 1}
    own = kind(num_particles=num_particles, **options)

    def parts(objective):
        model, guide = {**MERGED, **APART}[name]()
        monkeypatch.setattr(flat_site, "draw_noise", as_each_tensor_would(guide))
        objective.unpruned = unpruned_entries(guide)
        return mask_pruned(model, objective.unpruned), model, guide

    ours = recorded_elbo(kind, num_particles, vectorize=vectorize)
    assert_alike((ours, own), parts, real="noise" in name)


@pytest.mark.parametrize("name", ["by layer", "mixture"])
def test_the_noise_is_what_scores_a_draw(name, monkeypatch):
    """In single precision a draw of so small a scale has lost the noise, of which ln q is made."""
    torch.set_default_dtype(torch.float32)
    model, guide = {**MERGED, **APART}[name]()
    for rho in guide.rhos.parameters():
        rho.data[rho > -torch.inf] = -17.0
    for loc in guide.locs.parameters():
        loc.data[loc != 0] = 0.7
    found = []
    for unpruned in (unpruned_entries(guide), None):
        monkeypatch.setattr(flat_site, "draw_noise", as_each_tensor_would(guide))
        elbo, program = (
            recorded_elbo(None, 1),
            mask_pruned(model, unpruned or unpruned_entries(guide)),
        )
        elbo.unpruned = unpruned
        torch.manual_seed(1)
        elbo.loss_and_grads(program, guide, *data())
        gradients = [p.grad for p in guide.parameters()]
        guide.zero_grad()
        found.append((torch.tensor(elbo.take_parts().log_guide), *gradients))
    for ours, by_each in zip(*found, strict=True):
        torch.testing.assert_close(ours, by_each, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_particles", [1, 3])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_estimators_know_what_is_left(estimator, num_particles):
    model, guide = make()
    before = {name: guide.loc(name).clone() for name in guide.site_names}
    x, y, _ = data()
    options = {"estimator": estimator, "num_particles": num_particles, "lr": 0.1, "epochs": 2}
    history = bbb.fit(model, guide, (x, y), progress=False, **options)
    assert torch.tensor(history.loss).isfinite().all()
    for name, mask in guide.unpruned.items():
        loc, scale = guide.loc(name), guide.scale(name)
        assert not loc[~mask].any() and not scale[~mask].any()
        assert (loc != before[name])[mask].all() and (scale > 0)[mask].all()
