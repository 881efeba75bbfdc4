# SPDX-License-Identifier: Apache-2.0
r"""Predictions of Normal outputs, by the network's tangent at the guide's means.

See `pyro_bbb.guides.tangent`; with a last layer alone the network is its own tangent.

Its outputs are Normal. With Normal noise of a known or learned scale the predictive distribution is
Normal, too, without sampling error. Else the outputs of each input are drawn, or for classes the
probit approximation $\mathrm{softmax}(f / \sqrt{1 + \pi v / 8})$ stands for the draws, elementwise
with the outputs' variances v (MacKay 1992, "The Evidence Framework Applied to Classification
Networks").
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_bbb._utils.inputs import Rows
from pyro_bbb._utils.locking import cached_property
from pyro_bbb.guides.tangent import OutputMoments, output_moments
from pyro_bbb.likelihoods import Categorical, Gaussian
from pyro_bbb.models import BayesianModel
from pyro_bbb.prediction._moment_tensor import is_of_likelihood
from pyro_bbb.prediction._output_samples import arguments_of
from pyro_bbb.prediction._regression import RegressionPrediction
from pyro_bbb.prediction._weight_samples import ALL, Part

PROBIT = "probit"
STDS = ("function_std", "noise_std")  # of a GaussianPrediction


@dataclass(frozen=True, repr=False, kw_only=True)
class GaussianPrediction(RegressionPrediction):
    """A Normal predictive distribution: of a function that is Normal, with Normal noise.

    Args:
        components: the predictive distribution, batch shape ``[1, n, d]``.
        sampler: ``"linearized"``, or ``"outputs"`` of a `LastLayer`.
        function_std: standard deviation of the function, ``[n, d]``.
        noise_std: standard deviation of the noise, ``[n, d]``.
    """

    function_std: Tensor
    noise_std: Tensor

    @cached_property
    def aleatoric_std(self) -> Tensor:
        """Standard deviation of the noise, ``[n, d]``."""
        return self.noise_std

    @cached_property
    def epistemic_std(self) -> Tensor:
        """Standard deviation of the function, ``[n, d]``."""
        return self.function_std

    def rescaled(self, mean: Tensor | float, scale: Tensor | float) -> GaussianPrediction:
        """As for `RegressionPrediction`."""
        moved = super().rescaled(mean, scale).components
        factor = (moved.scale / self.components.scale)[0]
        stds = {"function_std": factor * self.function_std, "noise_std": factor * self.noise_std}
        return replace(self, components=moved, **stds)


def is_gaussian(model: BayesianModel) -> bool:
    """Tell whether the noise is Normal, of a scale that is no latent and no output."""
    likelihood, names = model.likelihood, model.latent_shapes()
    gaussian = isinstance(likelihood, Gaussian) and likelihood.is_standard
    return gaussian and "likelihood.scale" not in names


def per_normal_output(
    model: BayesianModel, guide: Any, x: Rows, num_samples: int, rows: int, probit: bool
) -> Iterator[Part]:
    """The likelihood's arguments ``[s, n, ...]``, or the moments of a `GaussianPrediction`.

    Args:
        model: the model.
        guide: a Normal guide.
        x: inputs.
        num_samples: number of draws, for other likelihoods than Normal ones.
        rows: inputs of one pass.
        probit: whether the probit approximation stands for the draws.

    Raises:
        TypeError: the guide is no Normal.
        ValueError: probit for a likelihood that is not categorical.
    """
    if probit and type(model.likelihood) is not Categorical:
        name = type(model.likelihood).__name__
        raise ValueError(f"linearized='probit' needs a Categorical likelihood, got {name}")
    begin = 0
    for part in x.split(rows):
        outputs = output_moments(model, guide, part)
        if is_gaussian(model):
            arguments = _moments(model, outputs)
        elif probit:
            scaled = outputs.mean / (1 + math.pi / 8 * outputs.variance).sqrt()
            arguments = {"logits": scaled.unsqueeze(0)}
        else:
            arguments = _drawn(model, guide, outputs.draw(num_samples))
        yield ALL, slice(begin, begin + len(part)), arguments
        begin += len(part)


def _moments(model: BayesianModel, outputs: OutputMoments) -> dict[str, Tensor]:
    mean, noise = outputs.mean, model.likelihood.arguments(outputs.mean)["scale"]
    stds = dict(zip(STDS, (outputs.variance.sqrt(), noise.expand_as(mean)), strict=True))
    found = stds | {"loc": mean, "scale": torch.hypot(*stds.values())}
    return {name: value.unsqueeze(0) for name, value in found.items()}


def _drawn(model: BayesianModel, guide: Any, outputs: Tensor) -> dict[str, Tensor]:
    """The likelihood's arguments for drawn outputs ``[s, n, ...]``, its latents drawn beside."""
    own = [name for name in guide.site_names if is_of_likelihood(name)]
    drawn = guide.sample_posterior(len(outputs)) if own else {}
    return arguments_of(model, outputs, {name: drawn[name] for name in own})
