# SPDX-License-Identifier: Apache-2.0
"""Bad input to what is done with a model: data, training, prediction, pruning, chains, files."""

import atexit
import math
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import guides, likelihoods
from pyro_bbb.distributions import observation as families
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction
from tests._support.bad_input import Row, by_name, judge_all, left, no_counts

NAN, INF = math.nan, math.inf
X = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, 0.3], [0.1, 0.2, -0.4], [2.0, 1.0, 1.0]])
LABELS = torch.tensor([0, 1, 1, 0])
TARGETS = torch.tensor([[0.5], [1.5], [-0.5], [0.0]])
IMAGES = torch.arange(18.0).view(2, 1, 3, 3) / 18


def classifier():
    network = bbb.BayesianMLP([3, 2], prior=dist.Normal(0.0, 1.0))
    return bbb.BayesianModel(network, likelihoods.Categorical(), num_data=4)


def regressor():
    network = bbb.BayesianMLP([3, 1], prior=dist.Normal(0.0, 1.0))
    return bbb.BayesianModel(network, likelihoods.Gaussian(), num_data=4)


class Branching(bbb.BayesianMLP):
    """Cannot be recorded, which takes longer than the few steps of a chain here."""

    def forward(self, x):
        h = super().forward(x)
        return h if h.sum() > 0 else -2 * h


def branching():
    network = Branching([3, 1], prior=dist.Normal(0.0, 1.0))
    return bbb.BayesianModel(network, likelihoods.Gaussian(), num_data=4)


def latent_noise():
    network = bbb.BayesianMLP([3, 1])
    return bbb.BayesianModel(network, likelihoods.Gaussian(dist.LogNormal(0.0, 1.0)), num_data=4)


def of_labels(make=bbb.AutoSoftplusNormal):
    """A classifier and its guide, by the names of arguments."""
    torch.manual_seed(1)
    model = classifier()
    return {"model": model, "guide": make(model)}


def of_wide():
    """A classifier whose draws differ by more than rounding: an AUROC is of ranks."""
    return of_labels(lambda model: bbb.AutoSoftplusNormal(model, init_rho=-1.0))


def of_posterior():
    """The same, as `check` names it."""
    wide = of_wide()
    return {"model": wide["model"], "posterior": wide["guide"]}


def of_rewards():
    """What an agent of two actions needs; its network sees the action in the first input."""
    torch.manual_seed(1)
    model = regressor()
    return {
        "model": model,
        "guide": bbb.AutoSoftplusNormal(model),
        "encode": lambda contexts, action: contexts + action,
        "num_actions": 2,
    }


def an_agent():
    return bbb.bandits.ThompsonAgent(**of_rewards(), memory=8, batch_size=2, num_batches=2)


def a_last_layer(num_features=2):
    torch.manual_seed(1)
    return bbb.bandits.LastLayerAgent(nn.Linear(3, 2), 2, num_features, num_batches=1)


def of_another(network):
    """A guide for another model."""
    return bbb.AutoSoftplusNormal(bbb.BayesianModel(network, likelihoods.Categorical(), num_data=4))


def of_other_names():
    return of_another(bbb.bayesianize(nn.Linear(3, 2)))


def of_more():
    """Its first layer is that of the model."""
    return of_another(bbb.BayesianMLP([3, 2, 2]))


def draws(count=3):
    return {
        "network.fc1.weight": torch.ones(count, 2, 3),
        "network.fc1.bias": torch.zeros(count, 2),
    }


class Stream(IterableDataset):
    """Examples one after the other."""

    def __iter__(self):
        return zip(X, LABELS, strict=True)


class Items(Dataset):
    """Items that are no pairs, or none."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def frozen(array):
    array = array.copy()
    array.setflags(write=False)
    return array


PAIRS = {
    "a dict": ({"data": {"x": X, "labels": LABELS}}, "must be a pair.* got dict; .*collate_fn"),
    "x NaN": ({"data": (X * NAN, LABELS)}, "x must be finite"),
    "x infinite": ({"data": (X / 0, LABELS)}, "x must be finite"),
    "no rows": ({"data": (X[:0], LABELS[:0])}, "x must have at least one example"),
    "scalars": ({"data": (X[0, 0], LABELS[0])}, "x must have at least one example"),
    "rows differ": ({"data": (X, LABELS[:3])}, "equally many rows, got 4 and 3"),
    "three parts": ({"data": (X, LABELS, LABELS)}, r"data must be a pair \(x, y\), got 3 parts"),
    "one part": ({"data": (X,)}, r"data must be a pair \(x, y\), got 1 parts"),
    "lists": ({"data": (X.tolist(), LABELS)}, "x must be a tensor or a numeric numpy array"),
    "words": ({"data": (np.array(["a"] * 4), LABELS)}, "x must be a tensor or a numeric numpy"),
    "objects": ({"data": (np.array([None] * 4), LABELS)}, "x must be a tensor or a numeric"),
    "None": ({"data": (X, None)}, "y must be a tensor or a numeric numpy array, got NoneType"),
    "a stream": ({"data": Stream()}, "data must be a map-style Dataset"),
    "no pairs": ({"data": Items("abcd")}, r"data must have pairs \(x, y\) as items, got Items of"),
    "items without y": ({"data": Items(X)}, r"data must have pairs \(x, y\) as items"),
    "items as dicts": ({"data": Items([{"x": X[0]}])}, "data must have pairs"),
    "items of three": (
        {"data": Items([(X[0], LABELS[0], LABELS[0])])},
        "data must be a pair.*3 parts",
    ),
    "a TensorDataset of three": (
        {"data": TensorDataset(X, LABELS, LABELS)},
        "data must be a pair.*3 parts",
    ),
    "no targets": ({"data": (X, LABELS[:0])}, r"y must have at least one example.*shape \[0\]"),
    "one target": ({"data": (X, LABELS[0])}, r"y must have at least one example.*shape \[\]"),
    "x alone": ({"data": X}, "data must be a pair.*got Tensor"),
    "an empty Dataset": ({"data": Items([])}, "data must not be empty"),
}
FORMS = {
    "numpy": {"data": (X.numpy(), LABELS.numpy())},
    "numpy, read-only": {"data": (frozen(X.numpy()), frozen(LABELS.numpy()))},
    "not contiguous": {"data": (X.T.contiguous().T, LABELS)},
    "with gradient": {"data": (X.clone().requires_grad_(), LABELS)},
    "a list": {"data": [X, LABELS]},
    "a TensorDataset": {"data": TensorDataset(X, LABELS)},
    "huge": {"data": (X * 1e6, LABELS)},
    "tiny": {"data": (X * 1e-30, LABELS)},
    "double": {"data": (X.double(), LABELS)},
}
NOT_OURS = {
    "columns": ({"data": (X[:, :2], LABELS)}, r"expected x of shape \[batch, 3\]"),
    "labels": ({"data": (X, LABELS + 1)}, r"y must hold labels in \[0, 1\]"),
    "no labels": ({"data": (X, LABELS.float())}, "y must hold integer class labels"),
    "complex": ({"data": (X.to(torch.cfloat), LABELS)}, "does not fit the network"),
    "num_data": ({"data": (X[:3], LABELS[:3])}, "num_data of the model is 4, but data has 3"),
    "a single row": ({"data": (X[:1], LABELS[:1])}, "num_data of the model is 4, but data has 1"),
}
WEIGHTS = {  # of four rows
    "weights of three rows": ({"sample_weight": [1.0, 1.0, 1.0]}, "sample_weight must"),
    "one weight for all": ({"sample_weight": torch.ones(())}, r"sample_weight .* \[4\], .* \[\]"),
    "weights as a column": ({"sample_weight": torch.ones(4, 1)}, r"sample_weight .* got \[4, 1\]"),
    "a weight below 0": (
        {"sample_weight": torch.tensor([1.0, 1.0, -2.0, 1.0])},
        "sample_weight must be finite and at least 0, got -2.0 in row 2",
    ),
    "a weight NaN": ({"sample_weight": torch.tensor([NAN, 1, 1, 1])}, "sample_weight .* row 0"),
    "complex weights": ({"sample_weight": torch.ones(4, dtype=torch.cfloat)}, "sample_weight"),
}
DATA = [
    Row(
        "data.as_tensors",
        lambda: {"data": (X, LABELS)},
        bad={
            **PAIRS,
            "no device": ({"device": "nowhere"}, "device"),
            "a loader": ({"data": DataLoader(TensorDataset(X))}, "must be a pair.*got DataLoader"),
        },
        fine={**FORMS, "a single row": {"data": (X[:1], LABELS[:1])}},
    ),
    Row(
        "data.Minibatches",
        lambda: {"x": X, "y": LABELS, "batch_size": 2},
        bad={
            "rows differ": ({"x": X[:3]}, "equally many rows, got 3 and 4"),
            "no rows": ({"x": X[:0], "y": LABELS[:0]}, "x must have at least one example"),
            "devices": ({"y": LABELS.to("meta")}, "x and y must be on one device"),
            **no_counts("batch_size"),
            "a seed": ({"generator": 3}, "generator must be a torch.Generator"),
        },
        aka={"x": r"\b[xy]\b", "y": r"\b[xy]\b"},
        fine={"more than there are": {"batch_size": 99}},
    ),
    Row(
        "data.standardize",
        lambda: {"values": X},
        bad={
            "no rows": ({"values": X[:0]}, "values must be finite rows"),
            "a number": ({"values": X[0, 0]}, "values must be finite rows"),
            "NaN": ({"values": X * NAN}, "values must be finite rows"),
            "complex": ({"values": X.to(torch.cfloat)}, "values must be real"),
            "lists": ({"values": X.tolist()}, "values must be a tensor or a numeric numpy array"),
        },
        fine={"numpy": {"values": X.numpy()}, "integers": {"values": LABELS}},
    ),
    Row(
        "data.split",
        lambda: {"x": X, "y": LABELS, "fraction": 0.5, "seed": 0},
        bad={
            "all": ({"fraction": 1.0}, r"fraction must be in \(0, 1\), got 1"),
            "none": ({"fraction": 0.0}, r"fraction must be in \(0, 1\), got 0"),
            "above 1": ({"fraction": 1.5}, r"fraction must be in \(0, 1\), got 1.5"),
            "below 0": ({"fraction": -0.1}, r"fraction must be in \(0, 1\), got -0.1"),
            "too large": ({"fraction": 0.99}, "fraction=0.99 of 4 examples leaves one part empty"),
            "too small": ({"fraction": 0.01}, "fraction=0.01 of 4 examples leaves one part empty"),
            "a single row": ({"x": X[:1], "y": LABELS[:1]}, "leaves one part empty"),
            "rows differ": ({"x": X[:3]}, "equally many rows"),
        },
        fine={"numpy": {"x": X.numpy(), "y": LABELS.numpy()}},
        aka={"x": r"\b[xy]\b", "y": r"\b[xy]\b"},
        skip={
            **left("x", "without values", why="rows are taken on any device"),
            **left("y", "without values", why="rows are taken on any device"),
        },
    ),
    Row(
        "data.rotate",
        lambda: {"images": IMAGES, "degrees": 30.0},
        bad={
            "NaN": ({"degrees": NAN}, "degrees must be finite"),
            "three dimensions": ({"images": IMAGES[0]}, r"images must be floating \[n, channels"),
        },
    ),
    Row(
        "data.translate",
        lambda: {"images": IMAGES, "pixels": 3},
        bad={
            "half": ({"pixels": 0.5}, "pixels must be an integer"),
            "bytes": ({"images": (255 * IMAGES).byte()}, "images must be floating"),
        },
    ),
    Row(
        "data.corrupt",
        lambda: {"images": IMAGES, "name": "fog", "severity": 3, "seed": 0},
        bad={
            "unknown": ({"name": "rain"}, "name must be one of"),
            "too strong": ({"severity": 6}, "severity must be 1, 2, 3, 4 or 5, got 6"),
            "in between": ({"severity": 1.5}, "severity must be 1, 2, 3, 4 or 5, got 1.5"),
            "True": ({"severity": True}, "severity must be 1, 2, 3, 4 or 5, got True"),
            "bytes of images": ({"images": 255 * IMAGES}, r"images must be in \[0, 1\], got 0 to"),
            "NaN": ({"images": NAN * IMAGES}, r"images must be in \[0, 1\], got nan"),
            "no tensor": ({"images": IMAGES.tolist()}, "images must be a tensor"),
            "seed": ({"seed": "0"}, "seed must be an integer"),
        },
        fine={"numpy": {"images": IMAGES.numpy()}},
    ),
    Row(
        "data.k_center",
        lambda: {"x": X, "size": 2, "seed": 0},
        bad={
            "too many": ({"size": 5000}, "size must be at most"),
            "integers": ({"x": torch.arange(9)}, "x must be floating"),
            "infinity": ({"x": X / 0}, "x must be finite"),
            "a number": ({"x": torch.tensor(1.0)}, r"x must be finite examples \[n, ...\]"),
            "seed": ({"seed": 0.5}, "seed must be an integer"),
        },
    ),
    Row(
        "data.load_images",
        lambda: {"name": "mnist", "root": "no such folder"},
        also=(FileNotFoundError,),
        skip={"root: None": "would begin a download"},
        fails=True,
    ),
    Row(
        "data.load_uci",
        lambda: {"name": "yacht", "root": "no such folder"},
        bad={
            "a path": ({"name": "../yacht"}, "name must be the name of a folder"),
            "empty": ({"name": ""}, "name must be the name of a folder"),
        },
        also=(FileNotFoundError,),
        skip={"root: None": "would begin a download"},
        fails=True,
    ),
    Row(
        "data.read_uci",
        lambda: {"path": "no such file", "dtype": torch.float64},
        bad={"whole numbers": ({"dtype": torch.int64}, "dtype must be a floating torch.dtype")},
        also=(FileNotFoundError,),
        fails=True,
    ),
    Row(
        "data.load_mushrooms",
        lambda: {"root": "no such folder"},
        bad={"no folder": ({"root": "elsewhere"}, "set PYRO_BBB_DATA")},
        also=(FileNotFoundError,),
        skip={"root: None": "would begin a download"},
        fails=True,
    ),
    Row(
        "data.UCIData.split",
        lambda: {
            "self": bbb.data.UCIData(X, TARGETS[:, 0], torch.tensor([[0, 1]]), torch.tensor([[2]])),
            "number": 0,
        },
        bad={"1": ({"number": 1}, r"number must be in \[0, 0\], got 1")},
    ),
    Row(
        "data.reference",
        lambda: {"name": "yacht", "root": "no such folder"},
        bad={"unknown": ({"name": "yachts"}, "name must be one of")},
        also=(FileNotFoundError,),
        skip={"root: None": "would begin a download"},
        fails=True,
    ),
    Row(
        "data.Reference.compare",
        lambda: {"self": bbb.data.reference("sine"), "functions": torch.zeros(2, 64)},
        bad={
            "probes": ({"functions": torch.zeros(2, 9)}, r"finite, \[draws, 64, 1\], got \[2, 9\]"),
            "NaN": ({"functions": torch.full((2, 64), NAN)}, "functions must be finite"),
            "list": ({"functions": [[0.0] * 64]}, "functions must be a tensor"),
        },
        fine={"numpy": {"functions": np.zeros((2, 64))}},
    ),
]

TRAINING = [
    Row(
        "negative_elbo",
        lambda: {
            **of_labels(),
            "num_particles": 1,
            "estimator": "reparam",
            "loss": "trace",
            "temperature": 1.0,
            "reduction": "sum",
        },
        bad={
            "no particles": ({"num_particles": 0}, "num_particles must be .* got 0"),
            "below 0": ({"temperature": -1.0}, "temperature must be a non-negative number, got -1"),
            "another reduction": ({"reduction": "none"}, "reduction must be one of"),
            "another estimator": ({"estimator": "score"}, "estimator must be one of"),
            "a guide without parameters": (
                {"guide": AutoNormal(classifier())},
                "guide must have parameters, which an optimiser takes",
            ),
            "a function": ({"guide": lambda *_: None}, "guide must be a torch.nn.Module, got"),
        },
        fine={"mean": {"reduction": "mean"}, "cold": {"temperature": 0.0}},
    ),
    Row(
        "fit",
        lambda: {
            **of_labels(),
            "data": (X, LABELS),
            "epochs": 1,
            "batch_size": 2,
            "lr": 0.01,
            "lr_schedule": "cosine",
            "num_particles": 1,
            "kl_schedule": "uniform",
            "estimator": "reparam",
            "loss": "trace",
            "nonfinite": "raise",
            "accumulate": 1,
            "progress": False,
            "seed": 0,
        },
        bad={
            **PAIRS,
            **NOT_OURS,
            **WEIGHTS,
            "weights of 0": ({"sample_weight": torch.zeros(4)}, "sample_weight must be positive"),
            "patience without data": ({"patience": 3}, "patience needs validation, the data"),
            "no patience": (
                {"validation": (X, LABELS), "patience": 0},
                "patience must be an integer of at least 1, got 0",
            ),
            "validation of other columns": (
                {"validation": (X[:, :2], LABELS)},
                r"expected x of shape \[batch, 3\]",
            ),
            "validation of other labels": (
                {"validation": (X, LABELS + 1)},
                r"y must hold labels in \[0, 1\]",
            ),
            "validation NaN": ({"validation": (X * NAN, LABELS)}, "x must be finite"),
            "validation of x alone": ({"validation": X}, "data must be a pair"),
            "an empty validation": (
                {"validation": DataLoader(TensorDataset(X[:0], LABELS[:0]))},
                "validation must hold at least one minibatch",
            ),
            "True for tensors": ({"sample_weight": True}, "sample_weight must be a tensor or"),
            "weights for a loader": (
                {
                    "data": DataLoader(TensorDataset(X, LABELS), batch_size=4),
                    "sample_weight": torch.ones(4),
                },
                "sample_weight must be True for a DataLoader",
            ),
            "a loader of pairs": (
                {"data": DataLoader(TensorDataset(X, LABELS)), "sample_weight": True},
                r"data must give batches \(x, y, weight\)",
            ),
            "a loader of three": (
                {"data": DataLoader(TensorDataset(X, LABELS, LABELS))},
                "got 3 parts; weights of the examples go into sample_weight",
            ),
            "no minibatch to a step": ({"accumulate": 0}, "accumulate must be .* got 0"),
            "no epochs": ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
            "negative epochs": ({"epochs": -3}, "epochs must be an integer of at least 1, got -3"),
            "no particles": ({"num_particles": 0}, "num_particles must be .* got 0"),
            "lr 0": ({"lr": 0.0}, "lr must be a positive number, got 0"),
            "no batch": ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
            "autocast half": ({"autocast": torch.float16}, "autocast must be torch.bfloat16"),
            "autocast text": ({"autocast": "bfloat16"}, "autocast must be"),
            "no GPU": ({"cuda_graph": True}, "cuda_graph"),
            "no device": ({"device": "nowhere"}, "device 'nowhere' is not available"),
            "a device without values": ({"device": "meta"}, "device must hold values"),
            "a checkpoint of a number": ({"checkpoint": 3}, "checkpoint must"),
            "an optimiser": (
                {"optimizer": torch.optim.Adam([torch.zeros(1, requires_grad=True)])},
                "optimizer must be a torch optimiser class",
            ),
            "no optimiser": ({"optimizer": "adam"}, "optimizer must be"),
            "a callback": ({"callbacks": [3]}, "callbacks must"),
            "no callbacks": ({"callbacks": 3}, "callbacks must"),
            "a schedule below 0": ({"kl_schedule": lambda i, m: -1.0}, "weights of at least 0"),
            "a schedule of text": ({"kl_schedule": lambda i, m: "all"}, "kl_schedule must"),
            "a rate below 0": ({"lr_schedule": lambda done: -1.0}, "lr must be .* -0.01"),
            "a rate NaN": ({"lr_schedule": lambda done: NAN}, "lr must be .* nan"),
            "an empty loader": ({"data": DataLoader(TensorDataset(X[:0], LABELS[:0]))}, "data"),
            "another model's guide": ({"guide": of_other_names()}, "guide must have a posterior"),
            "a larger model's guide": (
                {"guide": of_more()},
                "guide must draw latents of the model only",
            ),
            "a guide of nothing": ({"guide": lambda *args: None}, "guide must have a posterior"),
        },
        fine={
            **FORMS,
            "a loader": {"data": DataLoader(TensorDataset(X, LABELS), batch_size=3)},
            "one batch": {"batch_size": 99},
            "a batch of one": {"batch_size": 1},
            "weights": {"sample_weight": torch.tensor([1.0, 0.0, 2.0, 0.5])},
            "validation": {"validation": (X.double(), LABELS), "patience": 1},
            "weights of integers": {"sample_weight": np.array([1, 0, 2, 3])},
            "more than there are to a step": {"accumulate": 9},
            "autocast": {"autocast": torch.bfloat16},
        },
        also=(bbb.NonFiniteError,),
        changes=("model", "guide"),
    ),
    Row(
        "KLSchedule",
        lambda: {
            "base": "uniform",
            "temperature": 1.0,
            "warmup_epochs": 1.0,
            "initial_temperature": 2.0,
            "cooling_epochs": 1.0,
        },
        bad={
            "unknown": ({"base": "linear"}, "kl_schedule must be one of"),
            "cold": ({"temperature": 0.0}, "temperature must be positive and finite, got 0"),
            "backwards": ({"warmup_epochs": -1.0}, "warmup_epochs must be .* -1"),
            "no heat": ({"initial_temperature": 0.0}, "initial_temperature must be positive"),
            "no end": ({"cooling_epochs": math.inf}, "cooling_epochs must be .* inf"),
            "cooling from nowhere": ({"initial_temperature": None}, "must be given together"),
        },
        aka={"base": "kl_schedule"},
    ),
    Row(
        "KLSchedule.weight",
        lambda: {
            "self": bbb.KLSchedule(),
            "batch": 1,
            "num_batches": 4,
            "batch_size": 2,
            "num_data": 8,
            "epoch": 0,
        },
    ),
    Row(
        "JointOptim",
        lambda: {"optim_constructor": torch.optim.Adam, "optim_args": {"lr": 0.1}},
        bad={
            "clip_value": ({"clip_args": {"clip_value": 1.0}}, "clip_args may hold clip_norm only"),
            "clip below 0": ({"clip_args": {"clip_norm": -1.0}}, "clip_norm must be .* -1"),
            "clip text": ({"clip_args": {"clip_norm": "1"}}, "clip_norm must be .* '1'"),
        },
        skip=left("optim_args", "an object", why="any mapping"),
    ),
    Row(
        "JointOptim.set_lr",
        lambda: {"self": bbb.JointOptim(torch.optim.Adam, {"lr": 0.1}), "lr": 0.1},
        changes=("self",),
    ),
    Row(
        "JointOptim.set_state",
        lambda: {"self": optimiser(), "state_dict": optimiser().get_state()},
        bad={
            "empty": (
                {"self": bbb.JointOptim(torch.optim.Adam, {"lr": 0.1})},
                "give JointOptim its parameters before its state",
            )
        },
        also=(RuntimeError,),
        changes=("self",),
    ),
]


def optimiser():
    parameters = {"w": nn.Parameter(torch.zeros(2))}
    return bbb.JointOptim(torch.optim.Adam, {"lr": 0.1}, parameters=parameters)


INPUTS = {
    "columns": ({"x": X[:, :2]}, r"expected x of shape \[batch, 3\]"),
    "no rows": ({"x": X[:0]}, "x must hold at least one input"),
    "NaN": ({"x": X * NAN}, "x must be finite"),
    "infinite": ({"x": -X / 0}, "x must be finite"),
    "lists": ({"x": X.tolist()}, "x must be a tensor or a numeric numpy array, got list"),
    "a number": ({"x": X[0, 0]}, "x must hold at least one input"),
    "a guide that never ran": ({"guide": AutoNormal(classifier())}, "guide must be trained before"),
    "no draws of a site": ({"guide": {"network.fc1.bias": torch.zeros(3, 2)}}, "lack.*weight"),
    "no draws": ({"guide": {}}, "guide must hold equally many draws"),
    "0 draws": ({"guide": draws(0)}, "guide must hold equally many draws"),
    "draws of two counts": (
        {"guide": {**draws(), "network.fc1.bias": torch.zeros(2, 2)}},
        "guide must hold equally many draws",
    ),
    "draws of numbers": ({"guide": {"network.fc1.bias": 3.0}}, "guide must hold tensors"),
    "one draw's number": ({"guide": {"a": X[0, 0]}}, "guide must hold equally many draws"),
    "draws that broadcast": (
        {"guide": {**draws(), "network.fc1.bias": torch.ones(3, 1)}},
        "guide must hold draws of 'network.fc1.bias'",
    ),
    "draws of another shape": (
        {"guide": {**draws(), "network.fc1.weight": torch.ones(3, 2, 5)}},
        r"guide must hold draws of 'network.fc1.weight' of shape \[2, 3\], got \[2, 5\]",
    ),
}
PREDICTION = [
    Row(
        "optim.IVON",
        lambda: {"hess_init": 1.0, "beta1": 0.9, "beta2": 0.999},
        bad={
            "hess_init": ({"hess_init": 0.0}, "hess_init must be .*positive.*, got 0"),
            "beta1": ({"beta1": 1.0}, "beta1 must be .*, got 1.0"),
            "beta2": ({"beta2": -0.1}, "beta2 must be .*, got -0.1"),
        },
        fine={"defaults": {"hess_init": None, "beta2": None}},
    ),
    Row(
        "predict",
        lambda: {
            **of_labels(),
            "x": X,
            "num_samples": 3,
            "batch_size": 2,
            "seed": 0,
            "estimator": "reparam",
            "linearized": False,
        },
        bad={
            **INPUTS,
            "linearized by another name": ({"linearized": "logit"}, "linearized must be False, T"),
            "linearized draws": ({"linearized": True}, "linearized draws no weights: estimator"),
            "linearized flow": (
                {"linearized": True, "estimator": None, "guide": guides.Flow(classifier())},
                "linearized needs a Normal guide, .*got Flow",
            ),
            "a point": ({"guide": guides.Laplace(classifier())}, "guide is still a point"),
            **no_counts("num_samples", "batch_size"),
            "flipout": ({"estimator": "flipout"}, "estimator must be one of"),
            "seed of text": ({"seed": "0"}, "seed must be an integer, got '0'"),
            "a seed of many bits": ({"seed": 2**70}, "seed must be"),
        },
        fine={
            "draws": {"guide": draws()},
            "a batch of one": {"batch_size": 1},
            "one draw": {"num_samples": 1},
            "double": {"x": X.double()},
            "numpy": {"x": X.numpy()},
        },
        also=(RuntimeError,),
    ),
    Row(
        "predict local_reparam",
        lambda: {**of_labels(), "x": X, "num_samples": 3, "estimator": "local_reparam"},
        bad={"draws": ({"guide": draws()}, "guide must be an AutoSoftplusNormal")},
        aka={"x": r"\bx\b|not one row per input"},
    ),
    Row(
        "predict_mean",
        lambda: {**of_labels(), "x": X, "batch_size": 2},
        bad={**INPUTS, **no_counts("batch_size")},
        also=(RuntimeError,),
    ),
]

NO_MEANS = {
    "a flow": ({"guide": of_labels(guides.Flow)["guide"]}, "guide must be an AutoSoft.*got Flow"),
    "a stock guide": ({"guide": AutoNormal(classifier())}, "AutoSoftplusNormal, got AutoNormal"),
    "a module": ({"guide": nn.ReLU()}, "guide must be an AutoSoftplusNormal, got ReLU"),
}
AFTER = [
    Row(
        "prune",
        lambda: {"guide": of_labels()["guide"], "fraction": 0.5},
        bad={
            "more than all": ({"fraction": 1.5}, r"fraction must be in \[0, 1\], got 1.5"),
            "less than none": ({"fraction": -0.1}, r"fraction must be in \[0, 1\], got -0.1"),
            "NaN": ({"fraction": NAN}, r"fraction must be in \[0, 1\], got nan"),
            "a flag": ({"fraction": True}, "fraction must be a number, got True"),
            "a tensor": ({"fraction": torch.tensor(0.5)}, "fraction must be a number, got"),
            **NO_MEANS,
        },
        fine={"all": {"fraction": 1.0}, "none": {"fraction": 0}},
    ),
    Row("signal_to_noise", lambda: {"guide": of_labels()["guide"]}, bad=NO_MEANS),
    Row(
        "to_module",
        of_labels,
        bad={
            "a flow": ({"guide": of_labels(guides.Flow)["guide"]}, "no closed form"),
            "a module": ({"guide": nn.ReLU()}, "guide must have medians without inputs, got ReLU"),
            "draws": ({"guide": draws()}, "guide must have medians without inputs, got dict"),
            "another model's": ({"guide": of_other_names()}, "guide lacks the latents"),
        },
    ),
    Row(
        "to_ensemble",
        lambda: {**of_labels(), "num_samples": 3, "seed": 0},
        bad={
            "no draws": ({"num_samples": 0}, "num_samples must be .* got 0"),
            "a guide function": ({"guide": lambda x: x}, "guide must be an autoguide"),
            "a module": ({"guide": nn.ReLU()}, "guide must be an autoguide, .* got ReLU"),
            "another model's": ({"guide": of_other_names()}, "lacks? the latents?"),
            "seed of text": ({"seed": "0"}, "seed must be an integer, got '0'"),
            "quantiles of classes": ({"quantiles": (0.5,)}, "quantiles must be left out"),
            "quantile 1": ({"quantiles": (1.0,)}, r"quantiles must be in \(0, 1\), got 1.0"),
        },
        fine={"given draws": {"guide": draws()}, "one draw": {"num_samples": 1}},
    ),
    Row(
        "deployment.sparse_where_faster",
        lambda: {"module": nn.Linear(3, 2), "x": X},
        skip=left(
            "x",
            *("without values", "bool", "complex", "double", "half", "integers"),
            *("a single number", "one dimension more, last"),
            why="torch says which dtype, device and shape a module takes",
        ),
    ),
    Row(
        "bandits.ThompsonAgent",
        lambda: {**of_rewards(), "memory": 8, "batch_size": 2, "num_batches": 2},
        bad={
            "no model": ({"model": nn.ReLU()}, "model must be a BayesianModel, got ReLU"),
            "no parameters": ({"guide": nn.ReLU()}, "guide must have its parameters already"),
            "a guide function": ({"guide": lambda x: x}, "guide must be a Module"),
            "no action": ({"num_actions": 0}, "num_actions must be an integer of at least 1"),
            "no memory": ({"memory": 0}, "memory must be an integer of at least 1, got 0"),
            "empty batches": ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
            "no draw": ({"num_samples": 0}, "num_samples must be an integer of at least 1, got 0"),
            "epsilon above 1": ({"epsilon": 1.5}, r"epsilon must be in \[0, 1\], got 1.5"),
            "epsilons": ({"epsilon": torch.tensor([0.5, NAN])}, r"epsilon must be in \[0, 1\]"),
            "colder": ({"temperature": -1.0}, "temperature must be a non-negative number"),
            "standing": ({"lr": 0.0}, "lr must be positive and finite, got 0.0"),
            "estimator": ({"estimator": "best"}, "estimator must be one of"),
            "weighing": ({"weigh_by": "mass"}, r"weigh_by must be one of \['seen', 'memory'\]"),
        },
        fine={"epsilons": {"epsilon": torch.tensor([0.0, 1.0])}, "by seen": {"weigh_by": "seen"}},
    ),
    Row(
        "bandits.ThompsonAgent.act",
        lambda: {"self": an_agent(), "contexts": X},
        bad={"columns": ({"contexts": X[:, :2]}, "contexts must fit the network when encoded")},
    ),
    Row(
        "bandits.ThompsonAgent.values",
        lambda: {"self": an_agent(), "contexts": X},
        bad={"columns": ({"contexts": X[:, :2]}, "contexts must fit the network when encoded")},
    ),
    Row(
        "bandits.ThompsonAgent.observe",
        lambda: {
            "self": an_agent(),
            "contexts": X,
            "actions": LABELS,
            "rewards": TARGETS[:, 0].clone(),
        },
        bad={
            "rows differ": ({"actions": LABELS[:3]}, "must go together, got contexts .4, 3."),
            "shapes differ": ({"rewards": TARGETS}, "must go together"),
            "another action": ({"actions": LABELS + 1}, r"actions must be integers .int64."),
            "no number": ({"actions": LABELS.float()}, r"actions must be integers .int64."),
            "NaN": ({"rewards": TARGETS[:, 0] * NAN}, "rewards must be finite real numbers"),
            "columns": ({"contexts": X[:, :2]}, "contexts must fit the network when encoded"),
        },
        changes=("self",),
    ),
    Row(
        "bandits.ThompsonAgent.learn",
        lambda: {"self": an_agent()},
        fails=True,
        changes=("self",),
    ),
    Row(
        "bandits.LastLayerAgent",
        lambda: {
            "features": nn.Linear(3, 2),
            "num_actions": 2,
            "num_features": 2,
            "memory": 8,
            "learn_every": 3,
            "learn_growth": 0.5,
            "num_batches": 1,
            "batch_size": 2,
        },
        bad={
            "no module": ({"features": lambda x: x}, "features must be a Module"),
            "no parameters": ({"features": nn.ReLU()}, "features must have parameters to learn"),
            "no action": ({"num_actions": 0}, "num_actions must be an integer of at least 1"),
            "no noise": ({"noise_scale": 0.0}, "noise_scale must be positive and finite"),
            "growth": ({"learn_growth": -0.1}, "learn_growth must be a non-negative number"),
            "optimizer": ({"optimizer": "adam"}, "optimizer must be a function"),
        },
    ),
    Row(
        "bandits.LastLayerAgent.act",
        lambda: {"self": a_last_layer(), "contexts": X},
        bad={
            "columns": ({"contexts": X[:, :2]}, "contexts must fit the network"),
            "features": (
                {"self": a_last_layer(num_features=3)},
                r"contexts must give features of shape \[4, 3\], got \[4, 2\]",
            ),
        },
    ),
    Row(
        "bandits.LastLayerAgent.values",
        lambda: {"self": a_last_layer(), "contexts": X},
        bad={"columns": ({"contexts": X[:, :2]}, "contexts must fit the network")},
    ),
    Row(
        "bandits.LastLayerAgent.observe",
        lambda: {
            "self": a_last_layer(),
            "contexts": X,
            "actions": LABELS,
            "rewards": TARGETS[:, 0].clone(),
        },
        bad={
            "rows differ": ({"actions": LABELS[:3]}, "must go together, got contexts .4, 3."),
            "shapes differ": ({"rewards": TARGETS}, "must go together"),
            "two agents": (
                {"actions": LABELS[:, None], "rewards": TARGETS},
                r"actions must have shape \[n\], got \[4, 1\]",
            ),
            "another action": ({"actions": LABELS + 1}, r"actions must be integers .int64."),
            "NaN": ({"rewards": TARGETS[:, 0] * NAN}, "rewards must be finite real numbers"),
        },
        changes=("self",),
    ),
    Row(
        "bandits.LastLayerAgent.learn",
        lambda: {"self": a_last_layer()},
        fails=True,
        changes=("self",),
    ),
    Row(
        "run_sgmcmc",
        lambda: {
            "model": branching(),
            "data": (X, TARGETS),
            "sampler": "sghmc",
            "lr": 0.01,
            "num_samples": 2,
            "warmup_steps": 1,
            "thin": 1,
            "cycles": 1,
            "num_chains": 1,
            "batch_size": 2,
            "momentum": 0.5,
            "preconditioner": "rmsprop",
            "temperature": 1.0,
            "checkpoint_every": 2,
            "seed": 0,
            "progress": False,
        },
        bad={
            **WEIGHTS,
            "num_data": ({"data": (X[:2], TARGETS[:2])}, "num_data of the model is 4"),
            "columns": ({"data": (X[:, :2], TARGETS)}, "expected x of shape"),
            "targets": ({"data": (X, X)}, "expected y of shape"),
            "sampler": ({"sampler": "hmc"}, "sampler must be one of"),
            "momentum of sgld": ({"sampler": "sgld"}, "momentum needs sampler='sghmc'"),
            "momentum 1": ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1"),
            "momentum below 0": ({"momentum": -0.1}, r"momentum must be in \[0, 1\)"),
            "preconditioner": ({"preconditioner": "adam"}, "preconditioner must be one of"),
            "lr 0": ({"lr": 0.0}, "lr must be positive"),
            "temperature": ({"temperature": -1.0}, "temperature must be a non-negative"),
            "warm-up": ({"warmup_steps": -1}, "warmup_steps must be an integer of at least 0"),
            **no_counts("num_samples", "thin", "cycles", "num_chains", "batch_size"),
            **no_counts("checkpoint_every"),
            "samples by cycle": ({"cycles": 3}, "num_samples must be a multiple of cycles=3, got"),
            "seed": ({"seed": "0"}, "seed must be an integer"),
            "device": ({"device": "nowhere"}, "device 'nowhere' is not available"),
            "checkpoint": ({"checkpoint": 3}, "checkpoint must be a path, got 3"),
            "init": ({"init": "zero"}, "init_loc must be 'he' where it is a name"),
            "init huge": ({"init": 1e30}, "init must be a point of positive density"),
        },
        also=(bbb.DivergedError,),
    ),
    Row(
        "sample",
        lambda: {
            "model": branching(),
            "data": (X, TARGETS),
            "sampler": "mclmc",
            "num_chains": 2,
            "num_samples": 32,
            "max_steps": 50,
            "seed": 0,
            "progress": False,
        },
        bad={
            **WEIGHTS,
            "num_data": ({"data": (X[:2], TARGETS[:2])}, "num_data of the model is 4"),
            "columns": ({"data": (X[:, :2], TARGETS)}, "expected x of shape"),
            "sampler": ({"sampler": "sgld"}, "sampler must be one of"),
            "batches": ({"batch_size": 2}, "batch_size needs sampler='sghmc', got 2 with 'mclmc'"),
            "seconds": ({"seconds": 0.0}, "seconds must be positive"),
            "probes": ({"probes": X[:, :2]}, "expected x of shape"),
            **no_counts("num_samples", "num_chains", "max_steps", "checkpoint_every"),
            "seed": ({"seed": "0"}, "seed must be an integer"),
            "device": ({"device": "nowhere"}, "device 'nowhere' is not available"),
            "checkpoint": ({"checkpoint": 3}, "checkpoint must be a path, got 3"),
            "init": ({"init": "zero"}, "init_loc must be 'he' where it is a name"),
        },
        also=(bbb.DivergedError,),
    ),
    Row(
        "run_nuts",
        lambda: {
            "model": branching(),
            "data": (X, TARGETS),
            "num_samples": 2,
            "warmup_steps": 1,
            "num_chains": 1,
            "num_workers": 1,
            "target_accept_prob": 0.8,
            "max_tree_depth": 1,
            "seed": 0,
            "progress": False,
        },
        bad={
            **{
                words: (
                    {
                        "data": tuple(TARGETS if part is LABELS else part for part in pair["data"])
                        if isinstance(pair["data"], tuple)
                        else pair["data"]
                    },
                    message,
                )
                for words, (pair, message) in PAIRS.items()
            },
            "num_data": ({"data": (X[:2], TARGETS[:2])}, "num_data of the model is 4"),
            "columns": ({"data": (X[:, :2], TARGETS)}, "expected x of shape"),
            "targets": ({"data": (X, X)}, "expected y of shape"),
            **WEIGHTS,
            **no_counts("num_samples", "warmup_steps", "num_chains", "num_workers"),
            **no_counts("max_tree_depth"),
            "accepts all": ({"target_accept_prob": 1.0}, "target_accept_prob must be in"),
            "accepts none": ({"target_accept_prob": 0.0}, "target_accept_prob must be in"),
            "seed below 0": ({"seed": -1}, "seed must not be negative, got -1"),
            "init": ({"init": "zero"}, "init_loc must be 'he' where it is a name"),
            "init a list": ({"init": []}, "init_loc must be a number"),
            "init of another shape": (
                {"init": {"fc1.weight": torch.ones(2, 4)}},
                r"must have shape \[1, 3\], got \[2, 4\]",
            ),
            "init outside the support": (
                {"model": latent_noise(), "init": {"likelihood.scale": torch.tensor(-1.0)}},
                "value of 'likelihood.scale' must be inside its support",
            ),
            "init NaN": ({"init": NAN}, "init"),
            "init huge": ({"init": 1e30}, "init must be a point of positive density"),
            "init unknown": ({"init": {"fc7.bias": torch.zeros(1)}}, "names .*fc7"),
        },
    ),
]


@cache
def folder():
    """A folder that is removed when the tests are over."""
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)


@cache
def saved():
    """A folder with a saved model."""
    bbb.save(folder() / "saved", **of_labels())
    return folder() / "saved"


def saved_record(make):
    """A file of a calibrated predictive."""
    path = folder() / f"{make.__name__}.json"
    make().save(path)
    return str(path)


def scaled():
    return bbb.TemperatureScaled(as_labels, 2.0)


def sets():
    return bbb.conformal(as_labels, (X, LABELS), 0.5)


def intervals():
    return bbb.conformal(as_targets, (X, TARGETS), 0.5)


def as_labels(x):
    return ClassificationPrediction(torch.stack([x, x.flip(1)]).log_softmax(-1))


def as_targets(x):
    return RegressionPrediction(families.Normal(torch.stack([x, x + 1])[..., :1], 1.0, False))


NO_PREDICTION = {
    "no function": ({"predict_fn": 3}, "predict_fn must be a function"),
    "of no prediction": ({"predict_fn": lambda x: x}, "predict_fn must return a Prediction"),
}
NO_PAIR = {
    "x alone": ({"data": X}, "data must be a pair"),
    "rows": ({"data": (X, LABELS[:2])}, "x and y must have equally many rows, got 4 and 2"),
    "no labels": ({"data": (X, TARGETS)}, "expected y of integer type"),
    "too many classes": ({"data": (X, LABELS + 3)}, r"labels in \[0, 2\]"),
    "real targets of two dimensions": (
        {"data": (X, X[:, :2]), "predict_fn": as_targets},
        r"expected y of shape \[n, 1\]",
    ),
    "a Dataset without targets": ({"data": TensorDataset(X)}, "data|pair"),
}
A_PATH = {
    "also": (OSError,),
    "skip": left("path", *("unknown", "empty", "bytes"), why="names of files"),
}
OF_EACH_INPUT = ClassificationPrediction(torch.zeros(2, 4, 3).log_softmax(-1), sampler="outputs")
NO_COMMON_DRAWS = {
    "too many": ({"size": 5}, "size must be at most the 4 inputs of prediction, got 5"),
    "draws of each input": ({"prediction": OF_EACH_INPUT}, "prediction must be .* of the weights"),
    "targets": ({"prediction": as_targets(X)}, "prediction must be a ClassificationPrediction"),
    "NaN": ({"prediction": as_labels(X * NAN)}, "prediction must have no NaN"),
    "parts": (
        {"prediction": ClassificationPrediction(torch.zeros(2, 4, 5, 3).log_softmax(-1))},
        "prediction must be of one label for each input",
    ),
}
CALIBRATED = [
    Row(
        "batch_bald",
        lambda: {"prediction": as_labels(X), "size": 2, "num_configurations": 4, "seed": 0},
        bad={
            **NO_COMMON_DRAWS,
            "seed": ({"seed": 0.5}, "seed must be an integer"),
            "none": ({"num_configurations": 0}, "num_configurations must be an integer of at"),
        },
    ),
    Row(
        "diverse_bald",
        lambda: {"prediction": as_labels(X), "size": 2},
        bad=NO_COMMON_DRAWS,
    ),
    Row(
        "conformal",
        lambda: {"predict_fn": as_labels, "data": (X, LABELS), "level": 0.5, "seed": 1},
        bad={
            **NO_PREDICTION,
            **NO_PAIR,
            "few": ({"level": 0.9}, "data must hold at least 9 examples for level 0.9, got 4"),
            "level 1": ({"level": 1.0}, r"level must be in \(0, 1\), got 1.0"),
            "score": ({"score": "best"}, r"score must be one of \['adaptive', 'randomized'\]"),
            "score of targets": (
                {"score": "adaptive", "predict_fn": as_targets, "data": (X, TARGETS)},
                r"score must be one of \['standardized'\]",
            ),
        },
        fine={
            "arrays": {"data": (X.numpy(), LABELS.numpy()), "predict_fn": lambda x: as_labels(X)},
            "a Dataset": {"data": TensorDataset(X, LABELS)},
            "randomized": {"score": "randomized"},
            "negative seed": {"score": "randomized", "seed": -1},
            "flat targets": {"predict_fn": as_targets, "data": (X, TARGETS[:, 0])},
        },
    ),
    Row(
        "ConformalPredictor.label_set",
        lambda: {"self": sets(), "x": X, "seed": 0},
        bad={
            "of targets": ({"self": intervals()}, "self must be calibrated.*take interval"),
            "another prediction": ({"self": replace(sets(), predict_fn=as_targets)}, "classes"),
            "parts": ({"x": X[None]}, r"predict_fn must give targets of shape \[\]"),
        },
        skip={"x: *": "what predict_fn takes"},
    ),
    Row(
        "ConformalPredictor.interval",
        lambda: {"self": intervals(), "x": X},
        bad={
            "of classes": ({"self": sets()}, "self must be calibrated.*take label_set"),
            "another prediction": ({"self": replace(intervals(), predict_fn=as_labels)}, "real"),
            "more targets": (
                {"self": replace(intervals(), threshold=torch.ones(2, dtype=torch.double))},
                r"predict_fn must give targets of shape \[2\] as in the calibration, got \[1\]",
            ),
        },
        skip={"x: *": "what predict_fn takes"},
    ),
    Row(
        "temperature_scaling",
        lambda: {"predict_fn": as_labels, "data": (X, LABELS)},
        bad={**NO_PREDICTION, **NO_PAIR},
        fine={"targets": {"predict_fn": as_targets, "data": (X, TARGETS)}},
    ),
    Row(
        "ConformalPredictor.save",
        lambda: {"self": sets(), "path": str(folder() / "sets.json")},
        bad={
            "a number": ({"path": 3}, "path must be a path"),
            "a root": ({"path": "/"}, "must name a file"),
        },
        **A_PATH,
    ),
    Row(
        "ConformalPredictor.load",
        lambda: {"path": saved_record(sets), "predict_fn": as_labels},
        bad={
            "a number": ({"path": 3}, "path must be a path"),
            "nothing there": ({"path": str(folder() / "none")}, "none"),
            "a temperature": (
                {"path": saved_record(scaled)},
                "format' must be 'pyro_bbb.conformal'",
            ),
            "no JSON": ({"path": __file__}, "JSON"),
        },
        **A_PATH,
    ),
    Row(
        "TemperatureScaled.save",
        lambda: {"self": scaled(), "path": str(folder() / "temperature.json")},
        bad={
            "a number": ({"path": 3}, "path must be a path"),
            "a root": ({"path": "/"}, "must name a file"),
        },
        **A_PATH,
    ),
    Row(
        "TemperatureScaled.load",
        lambda: {"path": saved_record(scaled), "predict_fn": as_labels},
        bad={
            "a number": ({"path": 3}, "path must be a path"),
            "nothing there": ({"path": str(folder() / "none")}, "none"),
            "sets": ({"path": saved_record(sets)}, "format' must be 'pyro_bbb.temperature'"),
        },
        **A_PATH,
    ),
]


def shown():
    return bbb.Evaluation.of(as_labels, (X, LABELS))


TEST_DATA = {  # as `evaluate` names what others call data
    words: ({{"data": "test"}.get(name, name): value for name, value in replaced.items()}, error)
    for words, (replaced, error) in NO_PAIR.items()
}
NAMED = {
    "a name twice": (
        {"ood": {"dark": X}, "shift": {"dark": (X, LABELS)}},
        "ood and shift must have different names",
    ),
    "the name test": ({"ood": {"test": X}}, "ood and shift must have different names, and none"),
    "shift in a list": ({"shift": [(X, LABELS)]}, "shift must be a Mapping, got list"),
    "shift without labels": ({"shift": {"dark": X}}, "data must be a pair"),
    "no such corruption": ({"shift": {"dark": 3}}, "images|name must be one of"),
    "no images": ({"shift": {"fog": 3}}, "images must|expected images"),
}
EVALUATED = [
    Row(
        "evaluate",
        lambda: {**of_wide(), "test": (X, LABELS), "ood": 10 * X, "num_samples": 2, "seed": 0},
        bad={
            **{words: TEST_DATA[words] for words in ("x alone", "rows", "no labels")},
            **NAMED,
            **no_counts("num_samples"),
            "other inputs": ({"ood": X[:, :2]}, r"x must|expected x"),
        },
        fine={"a Dataset": {"test": TensorDataset(X, LABELS)}, "no ood": {"ood": None}},
        aka={"ood": r"\bx\b|\binput", "test": r"\bdata\b|\bx\b|\by\b"},
    ),
    Row(
        "check",
        lambda: {**of_posterior(), "data": (X, LABELS), "num_samples": 100, "seconds": 0.0},
        bad={
            "rows": ({"data": (X[:3], LABELS[:3])}, "data must hold all .* training rows, got 3"),
            "few": ({"num_samples": 99}, "num_samples must be .*100"),
            "time": ({"seconds": -1.0}, "seconds must be"),
        },
        fine={"probes": {"probes": 9 * X}},
        aka={"posterior": r"\bguide\b"},
        skip={
            f"seconds: {size}": "samples chains"
            for size in ("tiny", "huge", "numpy", "numpy, single")
        },
    ),
    Row(
        "Verdict.plot",
        lambda: {"self": bbb.Verdict((), (), {"on the data": X}, {}), "figure": Figure()},
        bad={"axes": ({"figure": Figure().subplots()}, "figure must be a Figure, got Axes")},
    ),
    Row(
        "Evaluation.of",
        lambda: {"predict_fn": as_labels, "test": (X, LABELS)},
        bad={**NO_PREDICTION, **TEST_DATA, **NAMED},
        fine={
            "targets": {"predict_fn": as_targets, "test": (X, TARGETS)},
            "ood": {"ood": X},
            "shift": {"shift": {"dark": (X / 2, LABELS)}},
        },
        aka={"test": r"\bdata\b|\bx\b|\by\b"},
    ),
    Row(
        "Evaluation.plot",
        lambda: {"self": shown(), "figure": Figure()},
        bad={"axes": ({"figure": Figure().subplots()}, "figure must be a Figure, got Axes")},
    ),
    Row(
        "compare",
        lambda: {"evaluations": {"first": shown(), "second": shown()}},
        bad={
            "none": ({"evaluations": {}}, "evaluations must hold at least one evaluation"),
            "a list": ({"evaluations": [shown()]}, "evaluations must be a Mapping, got list"),
            "scores": (
                {"evaluations": {"first": shown().scores}},
                r"evaluations\['first'\] must be a Evaluation, got dict",
            ),
        },
    ),
]

FILES = [
    Row(
        "save",
        lambda: {"path": str(folder() / "new"), **of_labels(), "metadata": {"epochs": 3}},
        bad={
            "NaN": ({"metadata": {"loss": NAN}}, r"metadata\['loss'\] must be finite"),
            "a tensor": ({"metadata": {"loss": X}}, r"metadata\['loss'\] must be of JSON's types"),
            "keys": ({"metadata": {3: "three"}}, "metadata must have strings as keys, got 3"),
            "another model's guide": (
                {"guide": of_other_names()},
                "guide must have the model's lat",
            ),
            "a file there": ({"path": __file__}, "File exists"),
            "a number": ({"path": 3}, "path must be"),
        },
        also=(OSError,),
        skip=left("path", *("unknown", "empty", "bytes"), why="names of folders"),
    ),
    Row(
        "load",
        lambda: {"path": str(saved()), "device": "cpu"},
        bad={
            "nothing there": ({"path": str(folder() / "none")}, "none"),
            "a number": ({"path": 3}, "path must be"),
            "a network": (
                {"network": nn.Linear(3, 2)},
                "network must have random weights",
            ),
            "another network": ({"network": bbb.BayesianMLP([3, 5])}, "the network expects"),
            "a likelihood": (
                {"likelihood": "gaussian"},
                "likelihood must be a Likelihood, got str",
            ),
            "dtype of integers": ({"dtype": torch.int64}, "dtype must be a floating torch.dtype"),
            "dtype of text": ({"dtype": "float32"}, "dtype must be a floating torch.dtype"),
            "no device": ({"device": "nowhere"}, "device 'nowhere' is not available"),
        },
        also=(FileNotFoundError,),
    ),
]

ROWS = [*DATA, *TRAINING, *PREDICTION, *AFTER, *CALIBRATED, *EVALUATED, *FILES]


@pytest.mark.parametrize("row", by_name(ROWS))
def test_bad_input(row):
    judge_all(row)
