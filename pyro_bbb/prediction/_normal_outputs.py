# SPDX-License-Identifier: Apache-2.0
r"""Predictions by Normal outputs: of the network's tangent at the guide's means, or a last layer.

With the tangent of ``guides/linearization.py`` an input's outputs are $f \sim N(m, v)$; with a
`LastLayer` the network is its own tangent. Normal noise of a known or learned scale $s$ leaves the
predictive distribution Normal, $N(m, v + s^2)$, without sampling error. Otherwise the outputs of
each input are drawn, or for classes the probit approximation
$\mathrm{softmax}(m / \sqrt{1 + \pi v / 8})$ replaces the draws, elementwise in the outputs (MacKay
1992, "The Evidence Framework Applied to Classification Networks").
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from pyro_bbb._utils.inputs import Rows
from pyro_bbb.guides.linearization import output_moments
from pyro_bbb.latents import declared_names, role_of
from pyro_bbb.likelihoods import Categorical, Gaussian
from pyro_bbb.models import BayesianModel
from pyro_bbb.prediction._draws import ALL, Part
from pyro_bbb.prediction._output_samples import arguments_of

PROBIT = "probit"
STDS = ("function_std", "noise_std")  # of a GaussianPrediction


def is_gaussian(model: BayesianModel) -> bool:
    """Return whether the noise is Normal, and its scale neither a latent nor an output."""
    likelihood = model.likelihood
    gaussian = isinstance(likelihood, Gaussian) and likelihood.is_standard
    return gaussian and not declared_names(likelihood)


def per_normal_output(
    model: BayesianModel, guide: Any, x: Rows, num_samples: int, rows: int, probit: bool
) -> Iterator[Part]:
    """Yield the likelihood's arguments ``[s, n, ...]``, or the moments of a `GaussianPrediction`.

    Raises:
        TypeError: the guide is not Normal.
        ValueError: ``probit`` for a likelihood that is not categorical.
    """
    if probit and type(model.likelihood) is not Categorical:
        name = type(model.likelihood).__name__
        raise ValueError(f"linearized='probit' needs a Categorical likelihood, got {name}")
    begin = 0
    for inputs in x.split(rows):
        outputs = output_moments(model, guide, inputs)
        mean, variance = outputs.mean, outputs.variance
        if is_gaussian(model):
            noise = model.likelihood.arguments(mean)["scale"].expand_as(mean)
            std = variance.sqrt()
            moments = {"loc": mean, "scale": torch.hypot(std, noise)}
            moments |= zip(STDS, (std, noise), strict=True)
            arguments = {name: value.unsqueeze(0) for name, value in moments.items()}
        elif probit:
            arguments = {"logits": (mean / (1 + math.pi / 8 * variance).sqrt()).unsqueeze(0)}
        else:
            drawn = outputs.draw(num_samples)
            names = [name for name in guide.site_names if role_of(name) == "likelihood"]
            latents = guide.sample_posterior(num_samples) if names else {}
            arguments = arguments_of(model, drawn, {name: latents[name] for name in names})
        yield ALL, slice(begin, begin + len(inputs)), arguments
        begin += len(inputs)
