# SPDX-License-Identifier: Apache-2.0
"""Minibatches that a sampler chooses, and those of one row under batch normalisation."""

import math
import warnings
from itertools import cycle

import pyro
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import pyro_bbb as bbb
from pyro_bbb import likelihoods

N = 40
generator = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=generator)
Y = X[:, 0].sign().add(1).div(2).long()
PAIRS = TensorDataset(X, Y)


def make(num_data=N, layers=None, **options):
    pyro.set_rng_seed(0)
    network = bbb.bayesianize(layers) if layers else bbb.BayesianMLP([3, 8, 2])
    model = bbb.BayesianModel(network, likelihoods.Categorical(), num_data=num_data)
    return model, bbb.AutoSoftplusNormal(model, **options)


def fit(pair, data, **options):
    options = {"epochs": 2, "batch_size": 16, "seed": 0, "progress": False, **options}
    return bbb.fit(*pair, data, **options)


class Indices:
    """A sampler, or a batch sampler, of the user's."""

    def __init__(self, *indices):
        self.indices = indices

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return ((X[i % N], Y[i % N]) for i in range(self.rows))


class SizedStream(Stream):
    def __len__(self):
        return self.rows


def loader(**options):
    return DataLoader(PAIRS, **{"batch_size": 16, **options})


def batches(*sampler):
    """A loader with a batch sampler."""
    made = sampler[0] if len(sampler) == 1 else BatchSampler(*sampler)
    return DataLoader(PAIRS, batch_sampler=made)


SUBSET = tuple(range(5, 15))
# --- the loader, the right numbers of data, the examples that an epoch has ---
LOADERS = {
    "all": (loader, {N}, N),
    "few weighted": (lambda: loader(sampler=WeightedRandomSampler(torch.ones(N), 10)), {N, 10}, 10),
    "bootstrap": (
        lambda: loader(sampler=RandomSampler(PAIRS, replacement=True, num_samples=90)),
        {N, 90},
        90,
    ),
    "subset": (lambda: loader(sampler=SubsetRandomSampler(SUBSET)), {10}, 10),
    "whole batches of a subset": (lambda: batches(SubsetRandomSampler(SUBSET), 4, True), {10}, 8),
    "indices of batches": (
        lambda: loader(
            batch_size=None, sampler=BatchSampler(SubsetRandomSampler(SUBSET), 4, False)
        ),
        {10},
        10,
    ),
    "a list of batches": (lambda: batches([[0, 1, 2], [3, 4]]), {5}, 5),
    "a sampler that repeats": (lambda: loader(sampler=Indices(*range(N), *range(N))), {N, 80}, 80),
    "a shard": (lambda: loader(sampler=DistributedSampler(PAIRS, 2, 0)), {N, 20}, 20),
    "a sized stream": (lambda: DataLoader(SizedStream(30), 16), {30}, 30),
}


FIXED = ["all", "subset", "a list of batches", "a sampler that repeats"]


@pytest.mark.parametrize(
    ("name", "schedule"), list(zip(LOADERS, cycle(["uniform", "blundell"]), strict=False))
)
def test_the_kl_has_its_weight_and_the_record_its_scale_for_every_sampler(name, schedule):
    """The network's weights stay, so the loss of an epoch is that of what the loader yields."""
    make_loader, allowed, seen = LOADERS[name]
    for num_data in allowed:
        model, guide = make(num_data, init_rho=-20.0)
        data = make_loader()
        nll = -sum(bbb.predict_mean(model, guide, x).log_prob(y).sum().item() for x, y in data)
        options = {"lr": 1e-12, "seed": None, "epochs": 1, "kl_schedule": schedule}
        history = fit((model, guide), data, **options)
        assert math.fsum(history.steps.kl_weight) == pytest.approx(seen / num_data)
        assert history.kl_weight == pytest.approx([1.0])
        assert history.nll == pytest.approx([math.fsum(history.steps.nll) * num_data / seen])
        if name in FIXED:
            assert history.nll == pytest.approx([nll * num_data / seen], rel=1e-4)


@pytest.mark.parametrize("name", LOADERS)
def test_num_data_that_contradicts_a_sampler_is_refused_by_the_samplers_name(name):
    make_loader, allowed, _ = LOADERS[name]
    data = make_loader()
    for wrong in {N, 10, 17} - allowed:
        with pytest.raises(ValueError, match=f"num_data of the model is {wrong}, .*") as error:
            fit(make(wrong), data)
        assert str(error.value).endswith(" or ".join(map(str, sorted(allowed))))
    if name == "subset":
        with pytest.raises(ValueError, match="yields 10 examples per epoch by its SubsetRandom"):
            fit(make(N), data)


UNCOUNTED = {
    "batches of one's own": (lambda: batches(Indices(range(8), range(8, 10))), 10),
    "a stream": (lambda: DataLoader(Stream(10), 8), 10),
}


@pytest.mark.parametrize("name", UNCOUNTED)
def test_the_first_epoch_counts_what_cannot_be_counted_before(name):
    make_loader, seen = UNCOUNTED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(make(seen), make_loader())
    with pytest.warns(
        UserWarning, match=f"is {N}, but the first epoch of data has {seen}"
    ) as caught:
        history = fit(make(N), make_loader())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert history.kl_weight == pytest.approx([1.0, 1.0])


# --- batch normalisation ---


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


@pytest.mark.parametrize(("engine", "schedule"), [("eager", "uniform"), ("compiled", "blundell")])
def test_a_last_row_alone_joins_the_minibatch_before(engine, schedule):
    data, options = (X[:33], Y[:33]), {"engine": engine, "kl_schedule": schedule, "epochs": 3}
    history = fit(make(33, normalised()), data, **options)
    assert len(history.steps) == 2 * 3
    weights = [16 / 33, 17 / 33] if schedule == "uniform" else [2 / 3, 1 / 3]
    assert history.steps.kl_weight == pytest.approx(weights * 3)
    assert history.kl_weight == pytest.approx([1.0] * 3)
    plain = fit(make(33), data, **options)
    assert len(plain.steps) == 3 * 3


def test_a_frozen_normalisation_keeps_a_minibatch_of_one_row():
    model, guide = make(33, normalised())
    model.network[1].eval()
    assert len(fit((model, guide), (X[:33], Y[:33])).steps) == 3 * 2


ALONE = {
    "one row of data": (1, (X[:1], Y[:1]), {}),
    "a loader": (33, DataLoader(TensorDataset(X[:33], Y[:33]), 16), {}),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_row_that_can_join_no_other_is_refused_with_the_remedy(name):
    n, data, options = ALONE[name]
    with pytest.raises(ValueError, match=r"two rows or more .*drop_last=True.*\.eval\(\)"):
        fit(make(n, normalised()), data, **options)
