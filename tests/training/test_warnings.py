# SPDX-License-Identifier: Apache-2.0
"""Hits and false alarms of `fit`'s warnings on twenty bad and twenty good trainings."""

import math
import re
import warnings

import pytest
import torch
from pyro.distributions import Normal
from sklearn import datasets
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import pyro_bbb as bbb
from pyro_bbb.training.objectives import NonFiniteError


class Stream(IterableDataset):
    """Pairs of rows, of unknown number."""

    def __init__(self, x, y):
        self.pairs = list(zip(x, y, strict=True))

    def __iter__(self):
        return iter(self.pairs)


def table(name, raw):
    """Return inputs and targets of a bundled table, by default standardised, and the outputs."""
    if name == "friedman":
        arrays = datasets.make_friedman1(300, random_state=0, noise=1.0)
    else:
        arrays = getattr(datasets, f"load_{name}")(return_X_y=True)
    x, y = map(torch.as_tensor, arrays)
    x = x.float() / 16 if name == "digits" else x.float()
    x = x if "x" in raw or name == "digits" else bbb.data.standardize(x)[0]
    if name not in ("friedman", "diabetes"):
        return x, y.long(), len(y.unique())
    y = y.float()[:, None]
    return x, y if "y" in raw else bbb.data.standardize(y)[0], 1


def told(name, seed, *, raw="", stream=False, wrong=1.0, bias=None, temperature=1.0, **options):
    """Train a network of 20 hidden units for some 400 steps; return its warnings, or the error."""
    x, y, outputs = table(name, raw)
    prior, hidden = options.pop("prior", None), options.pop("hidden", [20])
    torch.manual_seed(seed)
    network = bbb.BayesianMLP(
        [x.shape[1], *hidden, outputs],
        activation=options.pop("activation", nn.ReLU),
        prior=Normal(0.0, 1.0) if prior is None else prior,
    )
    gaussian, classes = bbb.likelihoods.Gaussian.learned, bbb.likelihoods.Categorical
    likelihood = gaussian() if outputs == 1 else classes()
    model = bbb.BayesianModel(network, likelihood, num_data=round(wrong * len(x)))
    guide = bbb.guides.make(options.pop("guide", "softplus_normal"), model)
    if bias is not None:  # of all hidden units
        with torch.no_grad():
            next(p for n, p in guide.named_parameters() if n.endswith("fc1.bias")).fill_(bias)
    steps = options.pop("steps", 400)
    options = {"epochs": math.ceil(steps / math.ceil(len(x) / 64)), "batch_size": 64} | options
    schedule = bbb.KLSchedule(temperature=temperature)
    data = DataLoader(Stream(x, y), batch_size=64) if stream else (x, y)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            bbb.fit(model, guide, data, kl_schedule=schedule, progress=False, seed=seed, **options)
        except (ValueError, NonFiniteError) as error:
            return str(error)
    return " ".join(str(each.message) for each in said)


WIDE = Normal(0.0, 10.0)
MIXTURE = bbb.ScaleMixtureNormal(0.5, 1.0, 0.1)
BAD = {  # what names the cause; table and options
    "undertrained": (
        "train longer|too short",
        ("digits", {"epochs": 3}),
        ("wine", {"lr": 1e-3}),
        ("diabetes", {"epochs": 20, "optimizer": "ivon", "lr": 1e-3}),
    ),
    "num_data": (
        "num_data must be",
        ("wine", {"wrong": 10}),
        ("friedman", {"stream": True, "wrong": 10, "epochs": 5}),
    ),
    "lr": (
        "lower (lr|learning rate)",
        ("digits", {"lr": 1.0}),
        ("diabetes", {"lr": 10.0}),
        ("wine", {"lr": 10.0, "optimizer": "ivon", "steps": 200}),
    ),
    "dead": (
        "kill its units",
        ("digits", {"bias": -10.0}),  # whose KL is small: as if collapsed to the prior
        ("diabetes", {"bias": -10.0}),
        ("friedman", {"bias": -30.0}),
    ),
    "unscaled": (
        "(x has|targets have) mean",
        ("wine", {"raw": "x"}),
        ("breast_cancer", {"raw": "x", "guide": "low_rank"}),
        ("diabetes", {"raw": "y"}),
    ),
    "prior": (
        "narrower prior",
        ("wine", {"prior": WIDE, "steps": 600}),
        ("diabetes", {"prior": WIDE, "hidden": [20, 20], "steps": 600}),
        ("friedman", {"prior": Normal(0.0, 30.0), "steps": 600}),
    ),
    "cold": (
        "too cold",
        ("diabetes", {"temperature": 1e-3}),
        ("friedman", {"temperature": 1e-2}),
        ("breast_cancer", {"temperature": 1e-3}),  # fits the rows seen as well as possible
    ),
}
GOOD = [
    ("digits", {}),
    ("digits", {"temperature": 0.1, "hidden": [50, 50], "prior": MIXTURE}),
    ("digits", {"temperature": 0.1, "optimizer": "ivon"}),
    ("digits", {"estimator": "local_reparam"}),
    ("digits", {"guide": "rank1_ensemble"}),
    ("wine", {}),
    ("wine", {"activation": nn.Tanh}),
    ("wine", {"temperature": 0.1}),
    ("wine", {"guide": "delta"}),
    ("breast_cancer", {}),
    ("breast_cancer", {"prior": "fan_in_normal", "optimizer": "ivon"}),
    ("breast_cancer", {"guide": "normal"}),
    ("iris", {}),
    ("iris", {"guide": "low_rank", "prior": "fan_in_normal", "steps": 800}),
    ("diabetes", {}),
    ("diabetes", {"activation": nn.Tanh, "prior": "fan_in_normal"}),
    ("diabetes", {"temperature": 0.5}),
    ("diabetes", {"guide": "swag"}),
    ("friedman", {"prior": "fan_in_normal"}),
    ("friedman", {"optimizer": "ivon", "temperature": 0.5}),
]


@pytest.mark.slow
def test_bad_trainings_are_told_by_their_cause_and_good_ones_are_not():
    """Measured: 18 of 20 causes named, and none of a good training."""
    hits = {
        kind: sum(bool(re.search(cause, told(name, i, **options))) for i, (name, options) in cases)
        for kind, (cause, *trainings) in BAD.items()
        for cases in [enumerate(trainings)]
    }
    alarms = [text for i, (name, options) in enumerate(GOOD) if (text := told(name, i, **options))]
    assert min(hits.values()) >= 2 and sum(hits.values()) >= 17, hits
    assert not alarms
