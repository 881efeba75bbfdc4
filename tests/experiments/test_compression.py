# SPDX-License-Identifier: Apache-2.0
"""The experiment on compression removes as many weights as it says, for good."""

import copy
import dataclasses

import pytest
import torch


@pytest.fixture
def compression(load):
    return load("compression")


@pytest.fixture
def problem(compression):
    lengths = {"start": 1, "all": 1, "ramp": 2, "last": 1}
    return dataclasses.replace(compression.PROBLEMS["lenet300_mnist"], factor=20, **lengths)


def test_magnitude_pruning_keeps_the_largest_weights_and_their_rewound_ones(compression, problem):
    config = compression.Config(smoke=True)
    start, early = compression.started(config, problem, 0)
    data = compression.load(config, problem)["train"]
    states = compression.by_magnitude(problem, start, early, data)
    dense, *_, pruned, rewound = (copy.deepcopy(network) for network, _ in states)
    assert all(map(torch.equal, dense.parameters(), start.parameters()))
    masks = [
        torch.cat([weight.flatten() != 0 for weight in network.parameters() if weight.dim() > 1])
        for network in (pruned, rewound)
    ]
    biases = sum(weight.numel() for weight in start.parameters() if weight.dim() == 1)
    left = int(masks[0].sum()) + biases  # two weights of one magnitude stay together
    assert 0 <= left - round(compression.size(start) / 20) <= 1
    assert masks[0].equal(masks[1])


@pytest.mark.parametrize("method", ["log_uniform", "units"])
def test_a_posterior_ends_with_the_weights_of_its_factor(compression, problem, method):
    config = compression.Config(smoke=True)
    start, _ = compression.started(config, problem, 0)
    data = compression.load(config, problem)["train"]
    method = compression.METHODS[method]
    *_, (_, guide) = compression.by_posterior(problem, method, start, data, 0)
    left = sum(int((guide.scale(name) > 0).sum()) for name in guide.weight_names)
    assert 0.9 < left * 20 / compression.size(start) <= 1.001
