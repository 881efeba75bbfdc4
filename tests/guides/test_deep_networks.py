# SPDX-License-Identifier: Apache-2.0
"""Deep networks whose outputs are scales: draws of the prior underflow to a scale of 0."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.likelihoods import HeteroscedasticGaussian, Likelihood


class Softplus(Likelihood):
    """Normal noise of one's own, by a softplus."""

    family = dist.Normal

    def arguments(self, outputs):
        loc, raw = outputs.chunk(2, -1)
        return {"loc": loc, "scale": F.softplus(raw)}


class Gamma(Likelihood):
    """Positive targets."""

    family = dist.Gamma

    def arguments(self, outputs):
        concentration, rate = F.softplus(outputs).chunk(2, -1)
        return {"concentration": concentration, "rate": rate}


LIKELIHOODS = (HeteroscedasticGaussian, Softplus, Gamma)
PRIORS = ("normal", "laplace", "student_t", "fan_in_normal", "scale_mixture", "horseshoe")
GUIDES = list(bbb.guides.GUIDES)
SIZES = [5, 16, 16, 16, 16, 16, 16, 2]


def deep(likelihood, prior, guide, seed):
    torch.manual_seed(seed)
    if guide == "vbll":  # its only random layer is the last
        pairs = zip(SIZES[:-2], SIZES[1:-1], strict=True)
        layers = [layer for sizes in pairs for layer in (nn.Linear(*sizes), nn.ReLU())]
        trunk = nn.Sequential(*layers, nn.Linear(16, 2))
        network = bbb.bayesianize(
            trunk, where=["12"], **({} if prior is None else {"prior": prior})
        )
    else:
        network = bbb.BayesianMLP(SIZES, **({} if prior is None else {"prior": prior}))
    return bbb.BayesianModel(network, likelihood(), num_data=8)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("guide", GUIDES)
def test_the_first_step_is_finite(guide, likelihood):
    x, y = torch.randn(8, 5), torch.rand(8, 1)
    cycled = PRIORS[(GUIDES.index(guide) + LIKELIHOODS.index(likelihood)) % len(PRIORS)]
    for seed, prior in ((0, None), (1, None), (2, "normal" if guide == "vbll" else cycled)):
        model = deep(likelihood, prior, guide, seed)
        made = bbb.guides.make(guide, model)
        made(x, y, 1.0)  # the first run, with validation as Pyro has it
        options = {"loss": "trace"} if guide == "vbll" else {}
        loss = bbb.negative_elbo(model, made, **options)(x, y)
        loss.backward()
        assert math.isfinite(loss.item())
        gradients = [p.grad for p in made.parameters() if p.grad is not None]
        assert gradients and all(gradient.isfinite().all() for gradient in gradients)


def test_chains_begin_at_draws_of_the_prior_that_have_a_density():
    model = deep(HeteroscedasticGaussian, None, "delta", 0)
    data = torch.randn(8, 5), torch.rand(8, 1)
    options = {"num_chains": 6, "num_samples": 1, "init": "prior", "seed": 0, "progress": False}
    chains = bbb.run_sgmcmc(model, data, lr=1e-6, warmup_steps=0, thin=1, **options)
    assert chains.log_density.isfinite().all()
    chains = bbb.run_nuts(model, data, warmup_steps=1, max_tree_depth=1, **options)
    assert chains.log_density.isfinite().all()


def test_a_model_without_density_anywhere_is_refused_by_chains():
    class Impossible(Softplus):
        def arguments(self, outputs):
            return super().arguments(outputs) | {"scale": 0 * outputs[:, :1]}

    model = deep(Impossible, None, "delta", 0)
    data = torch.randn(8, 5), torch.rand(8, 1)
    with pytest.raises(ValueError, match="init must be a point of positive density"):
        bbb.run_sgmcmc(model, data, init="prior", seed=0, progress=False)
