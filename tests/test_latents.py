# SPDX-License-Identifier: Apache-2.0
"""Latents: one vector of all latent variables, and its way to their values and back."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_bbb.latents import Latents, role_of


def model():
    pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    pyro.sample("w_prior_scale", dist.HalfCauchy(1.0).expand([2]).to_event(1))
    pyro.sample("p", dist.Dirichlet(torch.ones(4)))
    pyro.sample("likelihood.scale", dist.Gamma(2.0, 1.0))


@pytest.fixture
def sites():
    torch.manual_seed(0)
    return dict(poutine.trace(model).get_trace().iter_stochastic_nodes())


@pytest.fixture
def latents(sites):
    return Latents.of_sites(sites)


def test_slices_follow_the_models_order_and_cover_the_vector(latents):
    assert list(latents) == ["w", "w_prior_scale", "p", "likelihood.scale"]
    bounds = [(where.start, where.stop) for where in latents.slices.values()]
    assert bounds == [(0, 6), (6, 8), (8, 11), (11, 12)]  # a simplex of four has three dimensions
    assert latents.size == 12


def test_values_return_from_the_vector(latents, sites):
    values = {name: site["value"] for name, site in sites.items()}
    z = latents.unconstrain(values)
    for name, value in latents.constrain(z).items():
        assert torch.allclose(value, values[name], atol=1e-6), name
    assert torch.equal(latents.ravel(latents.unravel(z)), z)


def test_a_batch_of_vectors_gives_batches_of_values(latents):
    z = torch.randn(5, 7, latents.size)
    batched = latents.constrain(z)
    assert batched["w"].shape == (5, 7, 2, 3) and batched["p"].shape == (5, 7, 4)
    single = latents.constrain(z[3, 2])
    for name, values in batched.items():
        assert torch.allclose(values[3, 2], single[name])


def test_the_volume_is_that_of_the_jacobian(latents):
    z = torch.randn(latents.size, dtype=torch.float64)
    values = latents.constrain(z)
    # ln |det| of each bijection by autograd; of the simplex in its first three coordinates
    expected = torch.zeros((), dtype=torch.float64)
    for name, latent in latents.items():
        piece = latents.unravel(z)[name]
        jacobian = torch.func.jacrev(latent.constrain)(piece)
        size = piece.numel()
        expected += jacobian.reshape(-1, size)[:size].det().abs().log()
    assert torch.allclose(latents.log_abs_det(z, values), expected)
    assert torch.allclose(latents.log_abs_det(latents.unravel(z), values), expected)


def test_a_range_has_a_layout_from_zero(latents):
    within = latents.within(slice(6, 11))
    assert list(within) == ["w_prior_scale", "p"] and within.size == 5
    z = torch.randn(latents.size)
    assert torch.equal(within.constrain(z[6:11])["p"], latents.constrain(z)["p"])


def test_roles(latents):
    names = {role: [x.name for x in latents.of_role(role)] for role in ("weight", "prior")}
    assert names == {"weight": ["w", "p"], "prior": ["w_prior_scale"]}
    assert role_of("network.fc1.lora_B") == "adapter" != role_of("network.fc1.lora_A")
    assert role_of("network.likelihood.weight") == "weight"


@pytest.mark.parametrize("name", ["missing", "shape", "support"])
def test_values_that_do_not_fit_are_refused(latents, sites, name):
    values = {name: site["value"] for name, site in sites.items()}
    wrong = {
        "missing": ("no value for the latent 'p'", None),
        "shape": (r"value of 'p' must have shape \[4\], got \[3\]", torch.ones(3) / 3),
        "support": (
            "value of 'p' must be finite and inside its support",
            torch.tensor([1.0, 0, 0, 0]),
        ),
    }
    message, value = wrong[name]
    values |= {"p": value}
    with pytest.raises(ValueError, match=message):
        latents.unconstrain({k: x for k, x in values.items() if x is not None})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_the_same_layout(latents, copied):
    assert copied(latents).slices == latents.slices
