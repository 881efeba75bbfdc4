# SPDX-License-Identifier: Apache-2.0
"""Bad input to what is done with a model: data, training, prediction, pruning, chains, files."""

import atexit
import math
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.infer import RenyiELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import pyro_bbb as bbb
from pyro_bbb import guides, likelihoods
from pyro_bbb.distributions import observation as families
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction
from tests._support.bad_input import left, no_counts, row

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


def derived():
    class Derived(bbb.BayesianModel):
        """What is not saved: its code may need more than a network and a likelihood."""

    return Derived(classifier().network, likelihoods.Categorical(), num_data=4)


def of_labels(make=bbb.AutoSoftplusNormal):
    """A classifier and its guide, by the names of arguments."""
    torch.manual_seed(1)
    model = classifier()
    return {"model": model, "guide": make(model)}


def normed():
    """Return a classifier with batch normalisation and its guide, by the names of arguments."""
    network = bbb.bayesianize(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    model = bbb.BayesianModel(network, likelihoods.Categorical(), num_data=4)
    return {"model": model, "guide": bbb.AutoSoftplusNormal(model)}


def of_wide():
    """A classifier whose draws differ by more than rounding: an AUROC is of ranks."""
    return of_labels(lambda model: bbb.AutoSoftplusNormal(model, init_rho=-1.0))


def of_posterior():
    """Return the same with the names of `check`."""
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
    """Return a guide of a longer network with the model's first layer."""
    return of_another(bbb.BayesianMLP([3, 2, 2]))


def of_adapters():
    """Return a classifier with a trained adapter and its guide, by the names of arguments."""
    torch.manual_seed(1)
    network = bbb.adapt(nn.Sequential(nn.Linear(3, 2)), 1)
    network[0].lora_B.data = torch.tensor([[5.0], [-5.0]])
    model = bbb.BayesianModel(network, likelihoods.Categorical(), num_data=4)
    return {"model": model, "guide": bbb.AutoSoftplusNormal(model)}


class Speaker(nn.Module):
    """A network that generates as Hugging Face's do."""

    generation_config = SimpleNamespace(num_beams=1)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.head = nn.Linear(2, 5)

    def forward(self, tokens):
        return SimpleNamespace(logits=self.head(self.embed(tokens)))

    def generate(self, tokens):
        return torch.cat([tokens, self(tokens).logits[:, -1:].argmax(-1)], 1)


def of_words():
    """Return a network of words and its guide, by the names of arguments."""
    network = bbb.bayesianize(Speaker(), where="head")
    model = bbb.BayesianModel(network, likelihoods.Categorical(), num_data=4)
    return {"model": model, "guide": bbb.AutoSoftplusNormal(model)}


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


PAIRS = [
    ("data", {"x": X, "labels": LABELS}, "must be a pair.* got dict; .*collate_fn"),
    ("data", (X * NAN, LABELS), "x must be finite"),
    ("data", (X[:0], LABELS[:0]), "x must have at least one example"),
    ("data", (X, LABELS[:3]), "equally many rows, got 4 and 3"),
    ("data", (X, LABELS, LABELS), r"data must be a pair \(x, y\), got 3 parts"),
    ("data", (X.tolist(), LABELS), "x must be a tensor or a numeric numpy array"),
    ("data", (np.array(["a"] * 4), LABELS), "x must be a tensor or a numeric numpy"),
    ("data", (np.array([None] * 4), LABELS), "x must be a tensor or a numeric"),
    ("data", (X, None), "y must be a tensor or a numeric numpy array, got NoneType"),
    ("data", Stream(), "data must be a map-style Dataset"),
    ("data", Items("abcd"), r"data must have pairs \(x, y\) as items, got Items of"),
    ("data", Items([{"x": X[0]}]), "data must have pairs"),
    ("data", Items([(X[0], LABELS[0], LABELS[0])]), "data must be a pair.*3 parts"),
    ("data", (X, LABELS[:0]), r"y must have at least one example.*shape \[0\]"),
    ("data", (X, LABELS[0]), r"y must have at least one example.*shape \[\]"),
    ("data", X, "data must be a pair.*got Tensor"),
    ("data", Items([]), "data must not be empty"),
]
FORMS = [
    {"data": (X.T.contiguous().T, LABELS)},
    {"data": [frozen(X.numpy()), frozen(LABELS.numpy())]},
    {"data": TensorDataset(X.double(), LABELS)},
    {"data": (X * 1e6, LABELS)},
]
NOT_OURS = [
    ("data", (X[:, :2], LABELS), r"expected x of shape \[batch, 3\]"),
    ("data", (X, LABELS + 1), r"y must hold labels in \[0, 1\]"),
    ("data", (X, LABELS.float()), "y must hold integer class labels"),
    ("data", (X.to(torch.cfloat), LABELS), "does not fit the network"),
    ("data", (X[:3], LABELS[:3]), "num_data of the model is 4, but data has 3"),
    ("data", (X[:1], LABELS[:1]), "num_data of the model is 4, but data has 1"),
]
WEIGHTS = [
    ("sample_weight", [1.0, 1.0, 1.0], "sample_weight must"),
    ("sample_weight", torch.ones(()), r"sample_weight .* \[4\], .* \[\]"),
    ("sample_weight", torch.ones(4, 1), r"sample_weight .* got \[4, 1\]"),
    ("sample_weight", torch.tensor([1.0, 1.0, -2.0, 1.0]), "sample_weight must be finite"),
    ("sample_weight", torch.tensor([NAN, 1, 1, 1]), "sample_weight .* row 0"),
]
NO_FILE = {
    "also": (FileNotFoundError,),
    "skip": {"root: None": "would begin a download"},
    "fails": True,
}
DATA = [
    row(
        "data.as_tensors",
        lambda: {"data": (X, LABELS)},
        *PAIRS,
        ("device", "nowhere", "device"),
        ("data", DataLoader(TensorDataset(X)), "must be a pair.*got DataLoader"),
        fine=[*FORMS, {"data": (X[:1], LABELS[:1])}],
    ),
    row(
        "data.Minibatches",
        lambda: {"x": X, "y": LABELS, "batch_size": 2},
        ("x", X[:3], "equally many rows, got 3 and 4"),
        ({"x": X[:0], "y": LABELS[:0]}, "x must have at least one example"),
        ("y", LABELS.to("meta"), "x and y must be on one device"),
        *no_counts("batch_size"),
        ("generator", 3, "generator must be a torch.Generator"),
        aka={"x": r"\b[xy]\b", "y": r"\b[xy]\b"},
        fine=[{"batch_size": 99}],
    ),
    row(
        "data.standardize",
        lambda: {"values": X},
        ("values", X[:0], "values must be finite rows"),
        ("values", X.to(torch.cfloat), "values must be real"),
        ("values", X.tolist(), "values must be a tensor or a numeric numpy array"),
    ),
    row(
        "data.split",
        lambda: {"x": X, "y": LABELS, "fraction": 0.5, "seed": 0},
        ("fraction", 1.0, r"fraction must be in \(0, 1\), got 1"),
        ("fraction", 0.99, "fraction=0.99 of 4 examples leaves one part empty"),
        ("fraction", 0.01, "fraction=0.01 of 4 examples leaves one part empty"),
        ({"x": X[:1], "y": LABELS[:1]}, "leaves one part empty"),
        ("x", X[:3], "equally many rows"),
        aka={"x": r"\b[xy]\b", "y": r"\b[xy]\b"},
        skip={"*: without values": "rows are taken on any device"},
    ),
    row(
        "data.rotate",
        lambda: {"images": IMAGES, "degrees": 30.0},
        ("degrees", NAN, "degrees must be finite"),
        ("images", IMAGES[0], r"images must be floating \[n, channels"),
    ),
    row(
        "data.translate",
        lambda: {"images": IMAGES, "pixels": 3},
        ("pixels", 0.5, "pixels must be an integer"),
        ("images", (255 * IMAGES).byte(), "images must be floating"),
    ),
    row(
        "data.corrupt",
        lambda: {"images": IMAGES, "name": "fog", "severity": 3, "seed": 0},
        ("name", "rain", "name must be one of"),
        ("severity", 6, "severity must be 1, 2, 3, 4 or 5, got 6"),
        ("images", 255 * IMAGES, r"images must be in \[0, 1\], got 0 to"),
        ("images", IMAGES.tolist(), "images must be a tensor"),
        ("seed", "0", "seed must be an integer"),
    ),
    row(
        "data.k_center",
        lambda: {"x": X, "size": 2, "seed": 0},
        ("size", 5000, "size must be at most"),
        ("x", torch.arange(9), "x must be floating"),
        ("x", X / 0, "x must be finite"),
        ("x", torch.tensor(1.0), r"x must be finite examples \[n, ...\]"),
        ("seed", 0.5, "seed must be an integer"),
    ),
    row(
        "data.load_images",
        lambda: {"name": "mnist", "root": "no such folder"},
        **NO_FILE,
    ),
    row(
        "data.load_uci",
        lambda: {"name": "yacht", "root": "no such folder"},
        ("name", "../yacht", "name must be the name of a folder"),
        **NO_FILE,
    ),
    row(
        "data.read_uci",
        lambda: {"path": "no such file", "dtype": torch.float64},
        ("dtype", torch.int64, "dtype must be a floating torch.dtype"),
        also=(FileNotFoundError,),
        fails=True,
    ),
    row(
        "data.load_mushrooms",
        lambda: {"root": "no such folder"},
        ("root", "elsewhere", "set PYRO_BBB_DATA"),
        **NO_FILE,
    ),
    row(
        "data.UCIData.split",
        lambda: {
            "self": bbb.data.UCIData(X, TARGETS[:, 0], torch.tensor([[0, 1]]), torch.tensor([[2]])),
            "number": 0,
        },
        ("number", 1, r"number must be in \[0, 0\], got 1"),
    ),
    row(
        "data.reference",
        lambda: {"name": "yacht", "root": "no such folder"},
        ("name", "yachts", "name must be one of"),
        **NO_FILE,
    ),
    row(
        "data.Reference.compare",
        lambda: {"self": bbb.data.reference("sine"), "functions": torch.zeros(2, 64)},
        ("functions", torch.zeros(2, 9), r"finite, \[draws, 64, 1\], got \[2, 9\]"),
        ("functions", torch.full((2, 64), NAN), "functions must be finite"),
        ("functions", [[0.0] * 64], "functions must be a tensor"),
        fine=[{"functions": np.zeros((2, 64))}],
    ),
]

TRAINING = [
    row(
        "negative_elbo",
        lambda: {
            **of_labels(),
            "num_particles": 1,
            "estimator": "reparam",
            "loss": "trace",
            "temperature": 1.0,
            "reduction": "sum",
        },
        ("num_particles", 0, "num_particles must be .* got 0"),
        ("temperature", -1.0, "temperature must be a non-negative number, got -1"),
        ("reduction", "none", "reduction must be one of"),
        ("estimator", "score", "estimator must be one of"),
        ("guide", AutoNormal(classifier()), "guide must have parameters, which an optimiser"),
        ("guide", lambda *_: None, "guide must be a torch.nn.Module, got"),
        fine=[{"reduction": "mean"}, {"temperature": 0.0}],
    ),
    row(
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
        *PAIRS[:3],
        *NOT_OURS,
        *WEIGHTS,
        ("sample_weight", torch.zeros(4), "sample_weight must be positive"),
        ("patience", 3, "patience needs validation, the data"),
        (
            {"validation": (X, LABELS), "patience": 0},
            "patience must be an integer of at least 1, got 0",
        ),
        ("validation", (X[:, :2], LABELS), r"expected x of shape \[batch, 3\]"),
        ("validation", (X, LABELS + 1), r"y must hold labels in \[0, 1\]"),
        ("validation", (X * NAN, LABELS), "x must be finite"),
        ("validation", X, "data must be a pair"),
        ("validation", DataLoader(TensorDataset(X[:0], LABELS[:0])), "validation must hold"),
        ("sample_weight", True, "sample_weight must be a tensor or"),
        (
            {
                "data": DataLoader(TensorDataset(X, LABELS), batch_size=4),
                "sample_weight": torch.ones(4),
            },
            "sample_weight must be True for a DataLoader",
        ),
        (
            {"data": DataLoader(TensorDataset(X, LABELS)), "sample_weight": True},
            r"data must give batches \(x, y, weight\)",
        ),
        ("data", DataLoader(TensorDataset(X, LABELS, LABELS)), "got 3 parts; weights of the"),
        ("accumulate", 0, "accumulate must be .* got 0"),
        ("epochs", 0, "epochs must be an integer of at least 1, got 0"),
        ("num_particles", 0, "num_particles must be .* got 0"),
        ("lr", 0.0, "lr must be positive and finite, got 0"),
        ("batch_size", 0, "batch_size must be an integer of at least 1, got 0"),
        ("autocast", torch.float16, "autocast must be .* loss scaling"),
        ("autocast", "bfloat16", "autocast must be"),
        ("cuda_graph", True, "cuda_graph"),
        ("device", "nowhere", "device 'nowhere' is not available"),
        ("device", "meta", "device must hold values"),
        ("checkpoint", 3, "checkpoint must"),
        (
            "optimizer",
            torch.optim.Adam([torch.zeros(1, requires_grad=True)]),
            "optimizer must be a torch optimiser class",
        ),
        ("optimizer", "adam", "optimizer must be"),
        ("callbacks", [3], "callbacks must"),
        ("kl_schedule", lambda i, m: -1.0, "weights of at least 0"),
        ("kl_schedule", lambda i, m: "all", "kl_schedule must"),
        ("lr_schedule", lambda done: -1.0, "lr must be .* -0.01"),
        ("lr_schedule", lambda done: NAN, "lr must be .* nan"),
        ("data", DataLoader(TensorDataset(X[:0], LABELS[:0])), "data"),
        ("data", (X, LABELS[:, None]), r"expected y of shape \[n\], got \[4, 1\]"),
        ("loss", RenyiELBO(), "loss must be Trace_ELBO or TraceMeanField_ELBO"),
        ("guide", of_other_names(), "guide must have a posterior"),
        ("guide", of_more(), "guide must draw latents of the model only"),
        fine=[
            *FORMS,
            {"data": DataLoader(TensorDataset(X, LABELS), batch_size=3)},
            {"batch_size": 99},
            {"batch_size": 1},
            {"sample_weight": torch.tensor([1.0, 0.0, 2.0, 0.5])},
            {"validation": (X.double(), LABELS), "patience": 1},
            {"sample_weight": np.array([1, 0, 2, 3])},
            {"accumulate": 9},
            {"autocast": torch.bfloat16},
        ],
        also=(bbb.NonFiniteError,),
        changes=("model", "guide"),
    ),
    row(
        "KLSchedule",
        lambda: {
            "base": "uniform",
            "temperature": 1.0,
            "warmup_epochs": 1.0,
            "initial_temperature": 2.0,
            "cooling_epochs": 1.0,
        },
        ("base", "linear", "kl_schedule must be one of"),
        ("temperature", 0.0, "temperature must be positive and finite, got 0"),
        ("warmup_epochs", -1.0, "warmup_epochs must be .* -1"),
        ("initial_temperature", 0.0, "initial_temperature must be positive"),
        ("cooling_epochs", math.inf, "cooling_epochs must be .* inf"),
        ("initial_temperature", None, "must be given together"),
        aka={"base": "kl_schedule"},
    ),
    row(
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
    row(
        "JointOptim",
        lambda: {"optim_constructor": torch.optim.Adam, "optim_args": {"lr": 0.1}},
        ("clip_args", {"clip_value": 1.0}, "clip_args may hold clip_norm only"),
        ("clip_args", {"clip_norm": -1.0}, "clip_norm must be .* -1"),
        ("clip_args", {"clip_norm": "1"}, "clip_norm must be .* '1'"),
        skip=left("optim_args", "an object", why="any mapping"),
    ),
    row(
        "JointOptim.set_lr",
        lambda: {"self": bbb.JointOptim(torch.optim.Adam, {"lr": 0.1}), "lr": 0.1},
        changes=("self",),
    ),
    row(
        "JointOptim.set_state",
        lambda: {"self": optimiser(), "state_dict": optimiser().get_state()},
        ("self", bbb.JointOptim(torch.optim.Adam, {"lr": 0.1}), "give JointOptim its"),
        also=(RuntimeError,),
        changes=("self",),
    ),
]


def optimiser():
    parameters = {"w": nn.Parameter(torch.zeros(2))}
    return bbb.JointOptim(torch.optim.Adam, {"lr": 0.1}, parameters=parameters)


INPUTS = [
    ("x", X[:, :2], r"expected x of shape \[batch, 3\]"),
    ("x", X[:0], "x must hold at least one input"),
    ("x", X * NAN, "x must be finite"),
    ("x", X.tolist(), "x must be a tensor or a numeric numpy array, got list"),
    ("guide", AutoNormal(classifier()), "guide must be trained before"),
    ("guide", {"network.fc1.bias": torch.zeros(3, 2)}, "lack.*weight"),
    ("guide", {}, "guide must hold equally many draws"),
    ("guide", {"network.fc1.bias": 3.0}, "guide must hold tensors"),
    ("guide", {**draws(), "network.fc1.bias": torch.ones(3, 1)}, "guide must hold draws"),
    ("guide", {**draws(), "network.fc1.weight": torch.ones(3, 2, 5)}, r"guide must hold"),
]
PREDICTION = [
    row(
        "optim.IVON",
        lambda: {"hess_init": 1.0, "beta1": 0.9, "beta2": 0.999},
        ("hess_init", 0.0, "hess_init must be .*positive.*, got 0"),
        ("beta1", 1.0, "beta1 must be .*, got 1.0"),
        ("beta2", -0.1, "beta2 must be .*, got -0.1"),
        fine=[{"hess_init": None, "beta2": None}],
    ),
    row(
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
        *INPUTS,
        ("linearized", "logit", "linearized must be False, T"),
        ("linearized", True, "linearized draws no weights: estimator"),
        (
            {"linearized": True, "estimator": None, "guide": guides.Flow(classifier())},
            "linearized needs a Normal guide, .*got Flow",
        ),
        ("guide", guides.Laplace(classifier()), "guide is still a point"),
        *no_counts("num_samples", "batch_size"),
        ("estimator", "flipout", "estimator must be one of"),
        ("seed", "0", "seed must be an integer, got '0'"),
        ("seed", 2**70, "seed must be"),
        fine=[{"guide": draws()}, {"batch_size": 1}, {"num_samples": 1}, {"x": X.double()}],
        also=(RuntimeError,),
    ),
    row(
        "generate",
        lambda: {**of_words(), "input_ids": torch.ones(1, 3).long(), "num_samples": 2, "seed": 0},
        ({"model": of_labels()["model"]}, "must have a Hugging Face network .*got BayesianMLP"),
        ({"cache": None}, "cache must be left out"),
        *no_counts("num_samples"),
        ("seed", "0", "seed must be an integer, got '0'"),
        fine=[{"num_samples": 1}],
        skip=left("input_ids", "*", why="the network says which tokens it takes"),
    ),
    row(
        "predict local_reparam",
        lambda: {**of_labels(), "x": X, "num_samples": 3, "estimator": "local_reparam"},
        ("guide", draws(), "guide must be an AutoSoftplusNormal"),
        aka={"x": r"\bx\b|not one row per input"},
    ),
    row(
        "predict_mean",
        lambda: {**of_labels(), "x": X, "batch_size": 2},
        *INPUTS,
        *no_counts("batch_size"),
        also=(RuntimeError,),
    ),
    row(
        "batchnorm_draws",
        lambda: {**normed(), "x": X, "num_samples": 3, "batch_size": 4, "seed": 0},
        *INPUTS[1:4],
        ("x", X[:, :2], r"x of shape \[4, 2\]"),
        (of_labels(), "model must have BatchNorm layers in training mode, it has none"),
        ("batch_size", 1, "x must give passes of two rows or more"),
        *no_counts("num_samples", "batch_size"),
        ("seed", "0", "seed must be an integer, got '0'"),
        also=(RuntimeError,),
    ),
]

NO_MEANS = [
    ("guide", of_labels(guides.Flow)["guide"], "guide must be an AutoSoft.*got Flow"),
    ("guide", AutoNormal(classifier()), "AutoSoftplusNormal, got AutoNormal"),
    ("guide", nn.ReLU(), "guide must be an AutoSoftplusNormal, got ReLU"),
]
AFTER = [
    row(
        "prune",
        lambda: {"guide": of_labels()["guide"], "fraction": 0.5},
        ("fraction", 1.5, r"fraction must be in \[0, 1\], got 1.5"),
        ("fraction", True, "fraction must be a number, got True"),
        ("fraction", None, "either fraction or threshold, got fraction=None"),
        ("threshold", 0.2, "either fraction or threshold, got fraction=0.5 and threshold=0.2"),
        ("units", "all", "units must be a bool, got str"),
        ("x", X, "x must be None without units=True"),
        *NO_MEANS,
        fine=[
            {"fraction": 1.0},
            {"fraction": 0},
            {"fraction": None, "threshold": 0.2},
            {"fraction": None, "threshold": 0},
        ],
    ),
    row("signal_to_noise", lambda: {"guide": of_labels()["guide"]}, *NO_MEANS),
    row(
        "to_module",
        of_labels,
        ("guide", of_labels(guides.Flow)["guide"], "no closed form"),
        ("guide", nn.ReLU(), "guide must have medians without inputs, got ReLU"),
        ("guide", of_other_names(), "guide lacks the latents"),
    ),
    row(
        "to_ensemble",
        lambda: {**of_labels(), "num_samples": 3, "seed": 0},
        ("num_samples", 0, "num_samples must be .* got 0"),
        ("guide", lambda x: x, "guide must be an autoguide"),
        ("guide", of_other_names(), "lacks? the latents?"),
        ("seed", "0", "seed must be an integer, got '0'"),
        ("quantiles", (0.5,), "quantiles must be left out"),
        ("quantiles", (1.0,), r"quantiles must be in \(0, 1\), got 1.0"),
        fine=[{"guide": draws()}, {"num_samples": 1}],
    ),
    row(
        "deployment.sparse_where_faster",
        lambda: {"module": nn.Linear(3, 2), "x": X},
        skip=left(
            "x",
            *("without values", "bool", "complex", "double", "half", "integers"),
            *("a single number", "one dimension more, last"),
            why="torch says which dtype, device and shape a module takes",
        ),
    ),
    row(
        "bandits.ThompsonAgent",
        lambda: {**of_rewards(), "memory": 8, "batch_size": 2, "num_batches": 2},
        ("model", nn.ReLU(), "model must be a BayesianModel, got ReLU"),
        ("guide", nn.ReLU(), "guide must have its parameters already"),
        ("guide", lambda x: x, "guide must be a Module"),
        ("num_actions", 0, "num_actions must be an integer of at least 1"),
        ("memory", 0, "memory must be an integer of at least 1, got 0"),
        ("batch_size", 0, "batch_size must be an integer of at least 1"),
        ("num_samples", 0, "num_samples must be an integer of at least 1, got 0"),
        ("epsilon", 1.5, r"epsilon must be in \[0, 1\], got 1.5"),
        ("temperature", -1.0, "temperature must be a non-negative number"),
        ("lr", 0.0, "lr must be positive and finite, got 0.0"),
        ("estimator", "best", "estimator must be one of"),
        ("weigh_by", "mass", r"weigh_by must be one of \['seen', 'memory'\]"),
        fine=[{"epsilon": torch.tensor([0.0, 1.0])}, {"weigh_by": "seen"}],
    ),
    row(
        "bandits.ThompsonAgent.act",
        lambda: {"self": an_agent(), "contexts": X},
        ("contexts", X[:, :2], "contexts must fit the network when encoded"),
    ),
    row(
        "bandits.ThompsonAgent.values",
        lambda: {"self": an_agent(), "contexts": X},
        ("contexts", X[:, :2], "contexts must fit the network when encoded"),
    ),
    row(
        "bandits.ThompsonAgent.observe",
        lambda: {
            "self": an_agent(),
            "contexts": X,
            "actions": LABELS,
            "rewards": TARGETS[:, 0].clone(),
        },
        ("actions", LABELS[:3], "must go together, got contexts .4, 3."),
        ("rewards", TARGETS, "must go together"),
        ("actions", LABELS + 1, r"actions must be integers .int64."),
        ("rewards", TARGETS[:, 0] * NAN, "rewards must be finite real numbers"),
        ("contexts", X[:, :2], "contexts must fit the network when encoded"),
        changes=("self",),
    ),
    row("bandits.ThompsonAgent.learn", lambda: {"self": an_agent()}, fails=True, changes=("self",)),
    row(
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
        ("features", lambda x: x, "features must be a Module"),
        ("features", nn.ReLU(), "features must have parameters to learn"),
        ("num_actions", 0, "num_actions must be an integer of at least 1"),
        ("noise_scale", 0.0, "noise_scale must be positive and finite"),
        ("learn_growth", -0.1, "learn_growth must be a non-negative number"),
        ("optimizer", "adam", "optimizer must be a function"),
    ),
    row(
        "bandits.LastLayerAgent.act",
        lambda: {"self": a_last_layer(), "contexts": X},
        ("contexts", X[:, :2], "contexts must fit the network"),
        ("self", a_last_layer(num_features=3), r"contexts must give features of shape \[4"),
    ),
    row(
        "bandits.LastLayerAgent.values",
        lambda: {"self": a_last_layer(), "contexts": X},
        ("contexts", X[:, :2], "contexts must fit the network"),
    ),
    row(
        "bandits.LastLayerAgent.observe",
        lambda: {
            "self": a_last_layer(),
            "contexts": X,
            "actions": LABELS,
            "rewards": TARGETS[:, 0].clone(),
        },
        ("actions", LABELS[:3], "must go together, got contexts .4, 3."),
        ("rewards", TARGETS, "must go together"),
        (
            {"actions": LABELS[:, None], "rewards": TARGETS},
            r"actions must have shape \[n\], got \[4, 1\]",
        ),
        ("actions", LABELS + 1, r"actions must be integers .int64."),
        ("rewards", TARGETS[:, 0] * NAN, "rewards must be finite real numbers"),
        changes=("self",),
    ),
    row(
        "bandits.LastLayerAgent.learn",
        lambda: {"self": a_last_layer()},
        fails=True,
        changes=("self",),
    ),
    row(
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
        *WEIGHTS,
        ("data", (X[:2], TARGETS[:2]), "num_data of the model is 4"),
        ("data", (X[:, :2], TARGETS), "expected x of shape"),
        ("data", (X, X), "expected y of shape"),
        ("sampler", "hmc", "sampler must be one of"),
        ("sampler", "sgld", "momentum needs sampler='sghmc'"),
        ("momentum", 1.0, r"momentum must be in \[0, 1\), got 1"),
        ("preconditioner", "adam", "preconditioner must be one of"),
        ("lr", 0.0, "lr must be positive"),
        ("temperature", -1.0, "temperature must be a non-negative"),
        ("warmup_steps", -1, "warmup_steps must be an integer of at least 0"),
        *no_counts("num_samples", "thin", "cycles", "num_chains", "batch_size"),
        *no_counts("checkpoint_every"),
        ("cycles", 3, "num_samples must be a multiple of cycles=3, got"),
        ("seed", "0", "seed must be an integer"),
        ("device", "nowhere", "device 'nowhere' is not available"),
        ("checkpoint", 3, "checkpoint must be a path, got 3"),
        ("init", "zero", "init_loc must be 'he' where it is a name"),
        ("init", 1e30, "init must be a point of positive density"),
        also=(bbb.DivergedError,),
    ),
    row(
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
        *WEIGHTS,
        ("data", (X[:2], TARGETS[:2]), "num_data of the model is 4"),
        ("data", (X[:, :2], TARGETS), "expected x of shape"),
        ("sampler", "sgld", "sampler must be one of"),
        ("batch_size", 2, "batch_size needs sampler='sghmc', got 2 with 'mclmc'"),
        ("seconds", 0.0, "seconds must be positive"),
        ("probes", X[:, :2], "expected x of shape"),
        *no_counts("num_samples", "num_chains", "max_steps", "checkpoint_every"),
        ("seed", "0", "seed must be an integer"),
        ("device", "nowhere", "device 'nowhere' is not available"),
        ("checkpoint", 3, "checkpoint must be a path, got 3"),
        ("init", "zero", "init_loc must be 'he' where it is a name"),
        also=(bbb.DivergedError,),
    ),
    row(
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
        ("data", (X * NAN, TARGETS), "x must be finite"),
        ("data", (X, TARGETS[:3]), "equally many rows, got 4 and 3"),
        ("data", (X[:2], TARGETS[:2]), "num_data of the model is 4"),
        ("data", (X[:, :2], TARGETS), "expected x of shape"),
        ("data", (X, X), "expected y of shape"),
        *WEIGHTS,
        *no_counts("num_samples", "warmup_steps", "num_chains", "num_workers"),
        *no_counts("max_tree_depth"),
        ("target_accept_prob", 1.0, "target_accept_prob must be in"),
        ("seed", -1, "seed must not be negative, got -1"),
        ("init", "zero", "init_loc must be 'he' where it is a name"),
        ("init", [], "init_loc must be a number"),
        ("init", {"fc1.weight": torch.ones(2, 4)}, r"must have shape \[1, 3\], got \[2, 4\]"),
        (
            {"model": latent_noise(), "init": {"likelihood.scale": torch.tensor(-1.0)}},
            "value of 'likelihood.scale' must be finite and inside its",
        ),
        ("init", NAN, "init"),
        ("init", 1e30, "init must be a point of positive density"),
        ("init", {"fc7.bias": torch.zeros(1)}, "names .*fc7"),
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


def saved_adapter():
    """A folder with an adapter as peft reads it."""
    bbb.peft.save(folder() / "adapter", **of_adapters())
    return str(folder() / "adapter")


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


@cache
def detector():
    torch.manual_seed(0)
    data = X.repeat(10, 1), LABELS.repeat(10)
    return bbb.ood(nn.Linear(3, 3), None, data, score="mahalanobis", fraction=0.2)


def saved_detector():
    detector().save(folder() / "detector")
    return str(folder() / "detector")


def as_labels(x):
    return ClassificationPrediction(torch.stack([x, x.flip(1)]).log_softmax(-1))


def as_targets(x):
    return RegressionPrediction(families.Normal(torch.stack([x, x + 1])[..., :1], 1.0, False))


NO_PREDICTION = [
    ("predict_fn", 3, "predict_fn must be a function"),
    ("predict_fn", lambda x: x, "predict_fn must return a Prediction"),
]
NO_PAIR = [
    ("data", X, "data must be a pair"),
    ("data", (X, LABELS[:2]), "x and y must have equally many rows, got 4 and 2"),
    ("data", (X, TARGETS), "expected y of integer type"),
    ("data", (X, LABELS + 3), r"labels in \[0, 2\]"),
    (
        {"data": (X, X[:, :2]), "predict_fn": as_targets},
        r"expected y of shape \[n, 1\]",
    ),
    ("data", TensorDataset(X), "data|pair"),
]
A_PATH = {
    "also": (OSError,),
    "skip": left("path", *("unknown", "empty", "bytes"), why="names of files"),
}
OF_EACH_INPUT = ClassificationPrediction(torch.zeros(2, 4, 3).log_softmax(-1), sampler="outputs")
NO_COMMON_DRAWS = [
    ("size", 5, "size must be at most the 4 inputs of prediction, got 5"),
    ("prediction", OF_EACH_INPUT, "prediction must be .* of the weights"),
    ("prediction", as_targets(X), "prediction must be a ClassificationPrediction"),
    ("prediction", as_labels(X * NAN), "prediction must have no NaN"),
    (
        "prediction",
        ClassificationPrediction(torch.zeros(2, 4, 5, 3).log_softmax(-1)),
        "prediction must be of one label for each input",
    ),
]
OUT_OF_DISTRIBUTION = [
    row(
        "ood",
        lambda: {
            **dict(zip(("model", "posterior"), of_labels().values(), strict=True)),
            "train": (X.repeat(10, 1), LABELS.repeat(10)),
            "score": "mahalanobis",
            "num_samples": 2,
            "fraction": 0.2,
            "held_out": 0.2,
            "batch_size": 3,
            "seed": 0,
        },
        ("model", lambda x: x, "model must be a Module"),
        ("posterior", None, "got NoneType for a BayesianModel"),
        ({"model": nn.Linear(3, 3)}, "posterior must be None .* for a Linear"),
        ("train", X, r"data must be a pair \(x, y\)"),
        ("train", (X, LABELS), "needs 4 held-out rows or more, held_out leaves 1"),
        ("score", "best", "score must be one of"),
        ("layer", "fc9", "layer must be one of"),
        ("layer", 3, "layer must be a path, several paths or None, got 3"),
        ("fraction", 0.0, r"fraction must be in \(0, 1\), got 0"),
        ("held_out", 1.0, r"held_out must be in \(0, 1\), got 1"),
        ("num_samples", 0, "num_samples must be an integer of at least 1"),
        fine=[{"score": "knn"}, {"model": nn.Linear(3, 3), "posterior": None}, {"layer": ""}],
        aka={
            "posterior": "guide|posterior",
            "train": "data|train",
            "held_out": "fraction|held_out",
        },
    ),
    *[
        row(
            f"Detector.{name}",
            lambda: {"self": detector(), "x": X, "batch_size": 3},
            ("x", X[:, :2], r"expected x of shape|does not fit"),
            ("x", X * NAN, "x must be finite"),
            ("batch_size", 0, "batch_size must be an integer of at least 1"),
        )
        for name in ("score_samples", "predict")
    ],
    row(
        "Detector.save",
        lambda: {"self": detector(), "path": str(folder() / "new_detector")},
        ("path", 3, "path must be a path"),
        **A_PATH,
    ),
    row(
        "Detector.load",
        lambda: {"path": saved_detector(), "model": detector().model},
        ("path", 3, "path must be a path"),
        ("path", str(folder() / "none"), "none"),
        ("model", nn.Linear(3, 3), "model must have the parameters of the saved detector's"),
        **A_PATH,
    ),
]
CALIBRATED = [
    row(
        "batch_bald",
        lambda: {"prediction": as_labels(X), "size": 2, "num_configurations": 4, "seed": 0},
        *NO_COMMON_DRAWS,
        ("seed", 0.5, "seed must be an integer"),
        ("num_configurations", 0, "num_configurations must be an integer of at"),
    ),
    row("diverse_bald", lambda: {"prediction": as_labels(X), "size": 2}, *NO_COMMON_DRAWS),
    row(
        "conformal",
        lambda: {"predict_fn": as_labels, "data": (X, LABELS), "level": 0.5, "seed": 1},
        *NO_PREDICTION,
        *NO_PAIR,
        ("level", 0.9, "data must hold at least 9 examples for level 0.9, got 4"),
        ("level", 1.0, r"level must be in \(0, 1\), got 1.0"),
        ("score", "best", r"score must be one of \['adaptive', 'randomized'\]"),
        (
            {"score": "adaptive", "predict_fn": as_targets, "data": (X, TARGETS)},
            r"score must be one of \['standardized'\]",
        ),
        fine=[
            {"data": TensorDataset(X, LABELS)},
            {"score": "randomized"},
            {"score": "randomized", "seed": -1},
            {"predict_fn": as_targets, "data": (X, TARGETS[:, 0])},
        ],
    ),
    row(
        "ConformalPredictor.label_set",
        lambda: {"self": sets(), "x": X, "seed": 0},
        ("self", intervals(), "self must be calibrated.*take interval"),
        ("self", replace(sets(), predict_fn=as_targets), "classes"),
        ("x", X[None], r"predict_fn must give targets of shape \[\]"),
        skip={"x: *": "what predict_fn takes"},
    ),
    row(
        "ConformalPredictor.interval",
        lambda: {"self": intervals(), "x": X},
        ("self", sets(), "self must be calibrated.*take label_set"),
        ("self", replace(intervals(), predict_fn=as_labels), "real"),
        (
            "self",
            replace(intervals(), threshold=torch.ones(2, dtype=torch.double)),
            r"predict_fn must give targets of shape \[2\] as in the calibration, got \[1\]",
        ),
        skip={"x: *": "what predict_fn takes"},
    ),
    row(
        "temperature_scaling",
        lambda: {"predict_fn": as_labels, "data": (X, LABELS)},
        *NO_PREDICTION,
        *NO_PAIR,
        fine=[{"predict_fn": as_targets, "data": (X, TARGETS)}],
    ),
    row(
        "ConformalPredictor.save",
        lambda: {"self": sets(), "path": str(folder() / "sets.json")},
        ("path", 3, "path must be a path"),
        ("path", "/", "must name a file"),
        **A_PATH,
    ),
    row(
        "ConformalPredictor.load",
        lambda: {"path": saved_record(sets), "predict_fn": as_labels},
        ("path", 3, "path must be a path"),
        ("path", str(folder() / "none"), "none"),
        ("path", saved_record(scaled), "format' must be 'pyro_bbb.conformal'"),
        ("path", __file__, "JSON"),
        **A_PATH,
    ),
    row(
        "TemperatureScaled.save",
        lambda: {"self": scaled(), "path": str(folder() / "temperature.json")},
        ("path", 3, "path must be a path"),
        ("path", "/", "must name a file"),
        **A_PATH,
    ),
    row(
        "TemperatureScaled.load",
        lambda: {"path": saved_record(scaled), "predict_fn": as_labels},
        ("path", 3, "path must be a path"),
        ("path", str(folder() / "none"), "none"),
        ("path", saved_record(sets), "format' must be 'pyro_bbb.temperature'"),
        **A_PATH,
    ),
]


def shown():
    return bbb.Evaluation.of(as_labels, (X, LABELS))


TEST_DATA = [  # as `evaluate` names what others call data
    ("test", X, "data must be a pair"),
    ("test", (X, LABELS[:2]), "x and y must have equally many rows, got 4 and 2"),
    ("test", (X, TARGETS), "expected y of integer type"),
]
NAMED = [
    (
        {"ood": {"dark": X}, "shift": {"dark": (X, LABELS)}},
        "ood and shift must have different names",
    ),
    ("ood", {"test": X}, "ood and shift must have different names, and none"),
    ("shift", [(X, LABELS)], "shift must be a Mapping, got list"),
    ("shift", {"dark": X}, "data must be a pair"),
    ("shift", {"dark": 3}, "images|name must be one of"),
    ("shift", {"fog": 3}, "images must|expected images"),
]
EVALUATED = [
    row(
        "evaluate",
        lambda: {**of_wide(), "test": (X, LABELS), "ood": 10 * X, "num_samples": 2, "seed": 0},
        *TEST_DATA,
        *NAMED,
        *no_counts("num_samples"),
        ("ood", X[:, :2], r"x must|expected x"),
        ("detectors", "knn", "detectors must be a Detector, got str"),
        ({"detectors": 3}, r"detectors must be a list of Detectors, got int: write \[detector\]"),
        fine=[{"test": TensorDataset(X, LABELS)}, {"ood": None}],
        aka={"ood": r"\bx\b|\binput", "test": r"\bdata\b|\bx\b|\by\b"},
    ),
    row(
        "check",
        lambda: {**of_posterior(), "data": (X, LABELS), "num_samples": 100, "seconds": 0.0},
        ("data", (X[:3], LABELS[:3]), "data must hold all .* training rows, got 3"),
        ("num_samples", 99, "num_samples must be .*100"),
        ("seconds", -1.0, "seconds must be"),
        fine=[{"probes": 9 * X}],
        aka={"posterior": r"\bguide\b"},
        skip={
            f"seconds: {size}": "samples chains"
            for size in ("tiny", "huge", "numpy", "numpy, single")
        },
    ),
    row(
        "Verdict.plot",
        lambda: {"self": bbb.Verdict((), (), {"on the data": X}, {}), "figure": Figure()},
        ("figure", Figure().subplots(), "figure must be a Figure, got Axes"),
    ),
    row(
        "Evaluation.of",
        lambda: {"predict_fn": as_labels, "test": (X, LABELS)},
        *NO_PREDICTION,
        *TEST_DATA,
        *NAMED,
        fine=[
            {"predict_fn": as_targets, "test": (X, TARGETS)},
            {"ood": X},
            {"shift": {"dark": (X / 2, LABELS)}},
        ],
        aka={"test": r"\bdata\b|\bx\b|\by\b"},
    ),
    row(
        "Evaluation.plot",
        lambda: {"self": shown(), "figure": Figure()},
        ("figure", Figure().subplots(), "figure must be a Figure, got Axes"),
    ),
    row(
        "compare",
        lambda: {"evaluations": {"first": shown(), "second": shown()}},
        ("evaluations", {}, "evaluations must hold at least one evaluation"),
        ("evaluations", [shown()], "evaluations must be a Mapping, got list"),
        ("evaluations", {"first": shown().scores}, r"evaluations\['first'\] must be a"),
    ),
]

FILES = [
    row(
        "save",
        lambda: {"path": str(folder() / "new"), **of_labels(), "metadata": {"epochs": 3}},
        ("metadata", {"loss": NAN}, "metadata must be of JSON's types, and finite"),
        ("metadata", {"loss": X}, "metadata must be of JSON's types"),
        ("model", classifier().network, "model must be a BayesianModel, got BayesianMLP"),
        ("model", derived(), "model must be a BayesianModel, got Derived"),
        ("compressed", 1, "compressed must be a bool, got int"),
        ("guide", of_other_names(), "guide must have the model's lat"),
        ("guide", AutoNormal(classifier()), "guide must be one of .*AutoNormal"),
        ("path", __file__, "File exists"),
        ("path", 3, "path must be"),
        also=(OSError,),
        skip=left("path", *("unknown", "empty", "bytes"), why="names of folders"),
    ),
    row(
        "load",
        lambda: {"path": str(saved()), "device": "cpu"},
        ("path", str(folder() / "none"), "none"),
        ("path", 3, "path must be"),
        ("network", nn.Linear(3, 2), "network must have random weights"),
        ("network", bbb.BayesianMLP([3, 5]), "the network expects"),
        ("likelihood", "gaussian", "likelihood must be a Likelihood, got str"),
        ("dtype", torch.int64, "dtype must be a floating torch.dtype"),
        ("device", "nowhere", "device 'nowhere' is not available"),
        also=(FileNotFoundError,),
    ),
    row(
        "peft.load",
        lambda: {"path": saved_adapter(), "network": nn.Sequential(nn.Linear(3, 2))},
        ("network", nn.Linear(3, 2), r"network must have the adapter's layers, but lacks \['0'\]"),
        (
            "network",
            nn.Sequential(nn.Linear(4, 2)),
            r"got 0.lora_A of shape \[1, 3\], expected shape \[1, 4\]",
        ),
        also=(FileNotFoundError,),
    ),
    row(
        "peft.save",
        lambda: {
            **of_adapters(),
            "path": str(folder() / "written"),
            "num_samples": 2,
            "seed": 0,
        },
        ({"guide": of_other_names(), "num_samples": None}, "guide lacks the latents"),
        ({**of_labels(), "num_samples": None}, "must have adapters"),
        ("num_samples", 0, "num_samples must be an integer of at least 1, got 0"),
        fine=[{"num_samples": None}],
        skip=left("path", *("unknown", "empty", "bytes"), why="names of folders"),
    ),
    row(
        "peft.training_free",
        lambda: {
            **of_adapters(),
            "data": (X, bbb.predict_mean(**of_adapters(), x=X).label),
            "tolerance": 0.01,
            "num_samples": 20,
            "batch_size": 2,
            "seed": 0,
        },
        ({**of_labels()}, "model must have adapters"),
        ("guide", guides.Delta(of_adapters()["model"]), "must be a AutoSoftplusNormal, got Delta"),
        ("tolerance", 0.0, "tolerance must be positive and finite, got 0"),
        *no_counts("num_samples", "batch_size"),
        changes=("model", "guide"),
        half_made=True,
    ),
]

ROWS = [
    *DATA,
    *TRAINING,
    *PREDICTION,
    *AFTER,
    *OUT_OF_DISTRIBUTION,
    *CALIBRATED,
    *EVALUATED,
    *FILES,
]
