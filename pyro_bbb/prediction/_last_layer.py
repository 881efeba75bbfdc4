"""Outputs of a network with a variational last layer, drawn in one pass of the trunk.

Given the trunk's features the outputs are Normal, exactly, with the means of the network at the
mean weights. Inputs are independent of one another, as in `_output_samples`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_bbb._handlers.param_store import own_store
from pyro_bbb._handlers.substitute import substituted
from pyro_bbb._utils.inputs import Rows, run_network
from pyro_bbb.guides import LastLayer
from pyro_bbb.models import BayesianModel
from pyro_bbb.prediction._output_samples import arguments_of
from pyro_bbb.prediction._weight_samples import Draws, Part


def per_input_of_head(
    model: BayesianModel, guide: LastLayer, x: Rows, num_samples: int, rows: int
) -> Iterator[Part]:
    """The likelihood's arguments for every draw and input, each ``[s, n, ...]``, ``rows`` at once.

    Raises:
        ValueError: the network's outputs are not the head's.
    """
    means, every = guide.median(), slice(0, num_samples)
    for i in range(0, len(x), rows):
        mean, variance = _moments(model, guide, means, x[i : i + rows])
        noise = torch.randn(num_samples, *mean.shape, dtype=mean.dtype, device=mean.device)
        outputs = torch.addcmul(mean, variance.sqrt(), noise, out=noise)
        yield every, slice(i, i + len(mean)), arguments_of(model, outputs, {})


def _moments(
    model: BayesianModel, guide: LastLayer, means: Draws, x: Rows
) -> tuple[Tensor, Tensor]:
    """Means and variances of the outputs, ``[n, out]``."""
    with own_store(guide), substituted(model, means), guide.observed_head() as variance:
        outputs = run_network(model.network, x)
        return getattr(outputs, "logits", outputs), variance()
