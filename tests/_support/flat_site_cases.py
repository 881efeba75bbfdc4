# SPDX-License-Identifier: Apache-2.0
"""What the tests of weights that lie side by side have in common: a model, data, comparisons."""

import pyro
import pytest
import torch

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb.training import objectives

SIZES = [5, 7, 3]
FC1 = "network.fc1.weight"
COUNT = 5 * 7 + 7 + 7 * 3 + 3


def model_of(prior=None, likelihood=None):
    """By default a classifier under the scale mixture."""
    network = bbb.BayesianMLP(SIZES, prior=prior or bbb.ScaleMixtureNormal(0.3, 1.2, 0.05))
    return bbb.BayesianModel(network, likelihood or likelihoods.Categorical(), num_data=20)


def data(real=False):
    """Inputs, labels or real targets, and the weight of the KL."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20, SIZES[0], generator=generator)
    y = torch.randint(0, SIZES[-1], (20,), generator=generator)
    return x, torch.randn(20, SIZES[-1], generator=generator) if real else y, 0.2


class Seen(objectives.RecordedTraceELBO):
    """Remembers the traces."""

    def _get_trace(self, *args):
        self.traces = super()._get_trace(*args)
        return self.traces


def assert_alike(objectives, parts, real=False):
    """Two objectives have the same loss and gradients.

    Args:
        objectives: these.
        parts: makes what is run as the model, the model and the guide for one of them.
        real: whether targets are real.
    """
    found = []
    for objective in objectives:
        pyro.set_rng_seed(0)
        program, model, guide = parts(objective)
        torch.manual_seed(1)
        loss = objective.loss_and_grads(program, guide, *data(real))
        parameters = {**dict(guide.named_parameters()), **dict(model.named_parameters())}
        found.append((loss, {key: p.grad for key, p in parameters.items()}))
    (loss, gradients), (expected, others) = found
    assert loss == pytest.approx(expected, rel=1e-12)
    for key, gradient in others.items():
        torch.testing.assert_close(gradients[key], gradient, rtol=1e-10, atol=1e-10)
