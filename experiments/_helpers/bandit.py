# SPDX-License-Identifier: Apache-2.0
"""Networks of several bandit agents as one.

The weights of A networks are one tensor; each row of inputs holds one input for each of them. The
ELBO is a sum over the agents and Adam is elementwise, so they learn as if each
were alone, in one step instead of A.
"""

import itertools
import math
from collections.abc import Iterable

import torch
from pyro.nn import PyroModule
from torch import Tensor

from pyro_bbb import priors


class StackedMLP(PyroModule):
    """Fully connected ReLU networks of one shape, with inputs ``[rows, agents, in]``.

    All weights of an agent are one row of the random variable ``weights`` ``[agents, weights]``:
    few operations, as the time goes to launching them. Outputs are ``[rows, agents]``.
    """

    def __init__(self, agents: int, sizes: list[int], prior: priors.PriorLike) -> None:
        super().__init__()
        self.agents, self.layers = agents, list(itertools.pairwise(sizes))
        self.lengths = [length for n, m in self.layers for length in (n * m, m)]
        priors.declare(self, priors.as_prior(prior), weights=(agents, sum(self.lengths)))

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs of every agent's network for its own inputs."""
        x = x.transpose(0, 1)  # [agents, rows, in]
        blocks = self.weights.split(self.lengths, 1)
        for number, (n, m) in enumerate(self.layers):
            kernel, bias = blocks[2 * number : 2 * number + 2]
            x = x.relu() if number else x
            x = torch.baddbmm(bias.unsqueeze(1), x, kernel.view(-1, n, m))
        return x.squeeze(2).t()

    def he(self, seeds: list[int]) -> Tensor:
        """Return initial weights ``[agents, weights]``: kernels from N(0, 2 / n_in), biases 0."""
        spread = he_scales(self.layers, of_biases=0.0)
        sources = [torch.Generator().manual_seed(seed) for seed in seeds]
        noise = torch.stack([torch.randn(len(spread), generator=source) for source in sources])
        return torch.tensor(spread) * noise


def he_scales(layers: Iterable[tuple[int, int]], of_biases: float) -> list[float]:
    """Scales of all weights, kernels' being sqrt(2 / inputs), by the layers' inputs and units."""
    return [
        scale
        for inputs, units in layers
        for scale in [math.sqrt(2 / inputs)] * (inputs * units) + [of_biases] * units
    ]
