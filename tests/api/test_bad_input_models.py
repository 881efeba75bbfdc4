# SPDX-License-Identifier: Apache-2.0
"""Bad input to what a model is made of: distributions, priors, networks, likelihoods, guides."""

import math

import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule
from torch import nn
from torch.distributions import Normal as TorchNormal

import pyro_bbb as bbb
from pyro_bbb import guides, likelihoods, priors
from tests._support.bad_input import Row, by_name, judge_all, left, no_counts

NAN, INF = math.nan, math.inf
X = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, 0.3], [0.1, 0.2, -0.4], [2.0, 1.0, 1.0]])
LABELS = torch.tensor([0, 1, 1, 0])
TARGETS = torch.tensor([[0.5], [1.5], [-0.5], [0.0]])


def network():
    return bbb.BayesianMLP([3, 2], prior=dist.Normal(0.0, 1.0))


def classifier():
    return bbb.BayesianModel(network(), likelihoods.Categorical(), num_data=4)


def guide(model=None, **options):
    torch.manual_seed(1)
    return bbb.AutoSoftplusNormal(model or classifier(), **options)


class Box(PyroModule):
    """A place for weights."""


TORCH = {  # networks called by themselves are torch's
    "why": "torch says which dtype and device a module takes; fit and predict check both before",
    "words": ("without values", "bool", "complex", "double", "half", "integers"),
}
PYRO = {  # a model called by itself is a Pyro program
    "why": "Pyro validates the distributions of a program that runs by itself",
    "words": ("NaN", "infinite", "minus infinite"),
}
OUTPUTS = {"outputs: *": "a network's, which BayesianModel.check names"}


def lenet_input():
    return torch.zeros(2, 1, 28, 28)


DISTRIBUTIONS = [
    Row(
        "ScaleMixtureNormal",
        lambda: {"pi": 0.5, "sigma1": 1.0, "sigma2": 0.1},
        bad={
            "pi above 1": ({"pi": 1.5}, r"pi must be in \[0, 1\], got 1.5"),
            "pi below 0": ({"pi": -0.1}, r"pi must be in \[0, 1\], got -0.1"),
            "pi NaN inside": ({"pi": torch.tensor([0.5, NAN])}, "pi must .* got nan"),
            "pi 2 inside": ({"pi": torch.tensor([0.5, 2.0])}, r"pi must be in \[0, 1\], got 2"),
            "sigma1 True": ({"sigma1": True}, "sigma1 must be a number or a tensor, got True"),
            "sigma1 zero": ({"sigma1": 0.0}, "sigma1 must be positive and finite, got 0"),
            "sigma2 negative": ({"sigma2": -0.5}, "sigma2 must be positive and finite, got -0.5"),
            "sigma1 infinite": ({"sigma1": INF}, "sigma1 must be positive and finite, got inf"),
            "shapes": (
                {"pi": torch.full((2,), 0.5), "sigma1": torch.ones(3)},
                r"pi, sigma1 and sigma2 must broadcast.*\[2\].*\[3\]",
            ),
            "complex sigma2": ({"sigma2": torch.tensor(1j)}, "sigma2 must be .*complex"),
        },
        fine={
            "pi 0": {"pi": 0.0},
            "pi 1": {"pi": 1.0},
            "tensors": {"pi": torch.full((2, 1), 0.5), "sigma1": torch.ones(3)},
            "integers": {"sigma1": 1, "sigma2": torch.tensor([1, 2])},
            "no weights": {"sigma1": torch.ones(0)},
        },
    ),
    Row(
        "ScaleMixtureNormal.log_prob",
        lambda: {"self": bbb.ScaleMixtureNormal(0.5, 1.0, 0.1), "value": X},
        skip={"value: without values": "torch takes scalars on the CPU beside any device"},
    ),
    Row(
        "ScaleMixtureNormal.cdf",
        lambda: {"self": bbb.ScaleMixtureNormal(0.5, 1.0, 0.1), "value": X},
        skip={"value: without values": "torch takes scalars on the CPU beside any device"},
    ),
    Row(
        "ScaleMixtureNormal.sample",
        lambda: {"self": bbb.ScaleMixtureNormal(0.5, 1.0, 0.1), "sample_shape": (2,)},
        fine={"no draws": {"sample_shape": (0,)}},
        aka={"sample_shape": "sample_shape"},
        skip={"sample_shape: *": "torch.Size says what a shape is, as for every distribution"},
    ),
]

PRIORS = [
    Row("priors.FanInNormal", lambda: {"gain": 1.0}, bad={"0": ({"gain": 0.0}, "gain .* got 0")}),
    Row("priors.LearnedNormal", lambda: {"scale": 1.0}, bad={"0": ({"scale": 0}, "scale .* 0")}),
    Row(
        "priors.LearnedScaleMixture",
        lambda: {"pi": 0.5, "sigma1": 1.0, "sigma2": 0.1},
        bad={
            "pi 0": ({"pi": 0.0}, r"pi must be in \(0, 1\), got 0"),
            "pi 1": ({"pi": 1}, r"pi must be in \(0, 1\), got 1"),
            "sigma1 below 0": ({"sigma1": -1.0}, "sigma1 must be positive and finite, got -1"),
            "sigma2 infinite": ({"sigma2": INF}, "sigma2 must be positive and finite, got inf"),
        },
    ),
    Row(
        "priors.HierarchicalNormal",
        lambda: {"scale": dist.HalfNormal(torch.tensor(1.0)), "per": "unit"},
        bad={
            "both": ({"variance": dist.Gamma(1.0, 1.0)}, "scale or of variance, not of both"),
            "any sign": ({"scale": dist.Normal(0.0, 1.0)}, "scale must .* positive values"),
            "not scalar": ({"scale": dist.HalfNormal(torch.ones(2))}, "scale must be a scalar"),
            "a number": ({"scale": 1.0}, "scale must be a distribution, got 1.0"),
            "torch's": (
                {"scale": torch.distributions.HalfNormal(1.0)},
                "must be a distribution of pyro.distributions",
            ),
        },
    ),
    Row(
        "priors.Independent",
        lambda: {"distribution": dist.Normal(0.0, 1.0)},
        bad={
            "an event": (
                {"distribution": dist.Normal(torch.zeros(3), 1.0).to_event(1)},
                r"prior must be .*single weights.*\[3\]",
            ),
            "torch's": ({"distribution": TorchNormal(0.0, 1.0)}, "of pyro.distributions"),
        },
        aka={"distribution": "prior must be"},
    ),
    Row(
        "priors.Function",
        lambda: {"function": lambda module, name, shape: dist.Normal(0.0, 1.0)},
    ),
    Row(
        "priors.ByName",
        lambda: {"patterns": {"*": dist.Normal(0.0, 1.0)}},
        bad={
            "empty": ({"patterns": {}}, "must not be an empty dict"),
            "a number inside": ({"patterns": {"*": 3}}, "prior must be .* got 3"),
            "no text": ({"patterns": {3: dist.Normal(0.0, 1.0)}}, "must be strings, got 3"),
        },
    ),
    Row(
        "priors.as_prior",
        lambda: {"prior": "normal"},
        bad={
            "a number": ({"prior": 1.0}, "prior must be a distribution.* got 1.0"),
            "a class": ({"prior": dist.Normal}, "prior must be a distribution"),
            "a dict of numbers": ({"prior": {"*": 1.0}}, "prior must be a distribution"),
        },
        fine={"None": {"prior": None}},
        skip={"prior: None": "the default prior"},
    ),
    Row("priors.make", lambda: {"name": "normal", "scale": 1.0, "loc": 0.0}, aka={"name": "prior"}),
    Row("priors.make laplace", lambda: {"name": "laplace", "scale": 1.0}, aka={"name": "prior"}),
    Row(
        "priors.make student_t",
        lambda: {"name": "student_t", "df": 3.0, "scale": 1.0},
        aka={"name": "prior"},
    ),
    Row(
        "priors.make scale_mixture",
        lambda: {"name": "scale_mixture", "pi": 0.5, "sigma1": 1.0, "sigma2": 0.1},
        aka={"name": "prior"},
    ),
    Row(
        "priors.make horseshoe",
        lambda: {"name": "horseshoe", "scale": 1.0, "per": "unit"},
        aka={"name": "prior"},
    ),
    Row(
        "priors.make inverse_gamma",
        lambda: {"name": "inverse_gamma", "concentration": 1.0, "rate": 1.0, "per": "unit"},
        aka={"name": "prior"},
    ),
    Row(
        "priors.declare",
        lambda: {"module": Box(), "prior": priors.default_prior(), "weight": (2, 3)},
        bad={
            "does not expand": (
                {"prior": priors.Independent(dist.Normal(torch.zeros(5), 1.0))},
                r"'weight' must expand to shape \[2, 3\]",
            ),
            "no pattern": ({"prior": priors.ByName({"bias": "normal"})}, "no pattern for 'weight'"),
            "negative size": ({"weight": (-2, 3)}, r"weight must .* \(-2, 3\)"),
        },
        changes=("module", "prior"),
        half_made=True,
    ),
    Row(
        "priors.from_guide",
        lambda: {"guide": guide()},
        bad={
            "pruned": ({"guide": bbb.prune(guide(), 0.5)}, "guide must have .*positive scales"),
            "no prior": ({"default": 3}, "prior must be a distribution"),
            "never run": (
                {"guide": bbb.AutoSoftplusNormal(lambda x: None)},
                "guide has no latents yet",
            ),
        },
        also=(RuntimeError,),
    ),
]

NETWORKS = [
    Row(
        "BayesianLinear",
        lambda: {"in_features": 3, "out_features": 2, "prior": "normal"},
        bad={
            "prior of a row": (
                {"prior": dist.Normal(torch.zeros(5), 1.0)},
                r"'weight' must expand to shape \[2, 3\]",
            ),
            "callable of numbers": ({"prior": lambda m, n, s: 3}, "prior must return a distr"),
            **no_counts("in_features", "out_features"),
        },
    ),
    Row(
        "BayesianConv2d",
        lambda: {
            "in_channels": 2,
            "out_channels": 4,
            "kernel_size": 3,
            "stride": 1,
            "dilation": 1,
            "groups": 2,
            "padding_mode": "zeros",
        },
        bad={
            **no_counts("in_channels", "out_channels", "groups"),
            "groups": ({"groups": 3}, "groups must divide .*, got 2 and 4 by 3"),
            "kernel 0": ({"kernel_size": 0}, "kernel_size must .* 0"),
            "kernel below 0": ({"kernel_size": (3, -1)}, "kernel_size must .* -1"),
            "stride 0": ({"stride": 0}, "stride must .* 0"),
            "padding": ({"padding": "wide"}, "padding .*wide"),
            "padding below 0": ({"padding": -1}, "padding must .* -1"),
        },
        fine={"a pair": {"kernel_size": (3, 5)}, "same": {"padding": "same"}},
    ),
    Row(
        "BayesianMLP",
        lambda: {"sizes": [3, 4, 2]},
        bad={
            "one": ({"sizes": [3]}, "sizes must list inputs and outputs at least"),
            "none": ({"sizes": []}, "sizes must list inputs and outputs at least"),
            "zero": ({"sizes": [3, 0, 2]}, r"sizes\[1\] must be an integer of at least 1, got 0"),
            "text": ({"sizes": ["3", "2"]}, r"sizes\[0\] must be an integer"),
            "floats": ({"sizes": [3.0, 2.0]}, r"sizes\[0\] must be an integer"),
            "negative": ({"sizes": [3, 4, -1]}, r"sizes\[2\] must be an integer of at least 1"),
            "an activation made": ({"activation": nn.ReLU()}, "activation must .*nn.ReLU"),
            "no activation": ({"activation": "relu"}, "activation must .*'relu'"),
            "no pattern": ({"prior": {"fc1.*": "normal"}}, "no pattern for 'fc2"),
        },
        fine={"a tuple": {"sizes": (3, 2)}, "one each": {"sizes": [1, 1]}},
    ),
    Row("BayesianLeNet5", lambda: {"num_classes": 10}, bad=no_counts("num_classes")),
    Row(
        "BayesianMLP.forward",
        lambda: {"self": network(), "x": X},
        bad={
            "columns": ({"x": X[:, :2]}, r"x of shape \[batch, 3\], got \[4, 2\]"),
            "one example": ({"x": X[0]}, r"x of shape \[batch, 3\], got \[3\]"),
            "a sequence": ({"x": torch.ones(7, 3, 4)}, r"x of shape \[batch, 3\], got \[7, 3, 4"),
        },
        fine={"empty": {"x": X[:0]}},
        skip=left("x", *TORCH["words"], why=TORCH["why"]),
    ),
    Row(
        "BayesianLeNet5.forward",
        lambda: {"self": bbb.BayesianLeNet5(), "x": lenet_input()},
        bad={
            words: ({"x": torch.zeros(shape)}, r"expected x of shape \[batch, 1, 28, 28\], got \[")
            for words, shape in {
                "flat": (2, 784),
                "one image": (28, 28),
                "no channel": (3, 28, 28),
                "three channels": (3, 3, 28, 28),
                "padded": (3, 1, 32, 32),
            }.items()
        },
        skip=left("x", *TORCH["words"], why=TORCH["why"]),
    ),
    Row(
        "bayesianize",
        lambda: {"module": nn.Linear(3, 2), "prior": "normal"},
        bad={
            "where selects nothing": ({"where": "conv*"}, "where='conv.*' has no trainable"),
            "where is a number": ({"where": 3}, "where must be"),
            "where is a list of numbers": ({"where": [3]}, "where must be a name pattern"),
            "where is another type": ({"where": int}, "where must be a name pattern"),
            "where is a set": ({"where": {"0"}}, "where must be a name pattern"),
            "where is empty": ({"where": []}, "where must not be empty"),
            "lazy": ({"module": nn.LazyLinear(2)}, "no shape yet"),
            "complex": ({"module": nn.Linear(2, 2, dtype=torch.cfloat)}, "it is complex"),
            "frozen": ({"module": nn.Linear(2, 2).requires_grad_(False)}, "no trainable"),
            "no parameters": ({"module": nn.ReLU()}, "no trainable parameters to convert"),
            "a norm": ({"module": nn.BatchNorm1d(3)}, "no trainable parameters to convert"),
            "a class": ({"module": nn.Linear}, "module must be a torch.nn.Module, got"),
        },
        fine={"a scalar": {"module": nn.PReLU()}},
    ),
    Row(
        "adapt",
        lambda: {
            "module": nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)),
            "rank": 1,
            "where": "0",
            "alpha": 1.0,
            "random": "A",
            "trainable": "1",
        },
        bad={
            "where selects nothing": ({"where": "conv*"}, "where='conv.*' has no layers to adapt"),
            "where is a number": ({"where": 3}, "where must be"),
            "trainable selects nothing": ({"trainable": "2"}, "trainable='2' has no trainable"),
            "another factor": ({"random": "B"}, "random must be one of"),
            "no rank": ({"rank": 0}, "rank must be an integer of at least 1, got 0"),
            "alpha 0": ({"alpha": 0.0}, "alpha must be positive and finite, got 0"),
            "what is trainable": ({"where": "1"}, "'1' cannot be adapted: trainable has it"),
            "a recurrent layer": (
                {"module": nn.LSTM(3, 3), "where": nn.LSTM, "trainable": None},
                "it is a LSTM",
            ),
            "no layers": ({"module": nn.ReLU(), "trainable": None}, "has no layers to adapt"),
            "a class": ({"module": nn.Linear}, "module must be a torch.nn.Module, got"),
        },
        fine={
            "frozen": {
                "module": nn.Linear(3, 2).requires_grad_(False),
                "where": None,
                "trainable": None,
            }
        },
    ),
    Row("networks.merge_adapters", lambda: {"network": nn.Linear(3, 2)}, changes={"network"}),
]

NO_SCALE = {
    "0": ({"scale": 0.0}, "scale must be positive and finite, got 0"),
    "negative": ({"scale": -1.0}, "scale must be positive and finite, got -1"),
    "infinite": ({"scale": INF}, "scale must be positive and finite, got inf"),
    "a flag": ({"scale": True}, "scale must be a number"),
    "a parameter": ({"scale": nn.Parameter}, "scale must be a number"),
}
LIKELIHOODS = [
    Row(
        "likelihoods.Gaussian",
        lambda: {"scale": 1.0},
        bad={
            **NO_SCALE,
            "tensor with 0": ({"scale": torch.tensor([1.0, 0.0])}, "scale must be positive"),
            "any sign": ({"scale": dist.Normal(0.0, 1.0)}, "prior on positive values"),
            "torch's": ({"scale": torch.distributions.HalfNormal(1.0)}, "pyro.distributions"),
        },
    ),
    Row(
        "likelihoods.Gaussian.learned",
        lambda: {"init": 1.0},
        bad={
            "0": ({"init": 0.0}, "init must be positive and finite, got 0"),
            "infinite": ({"init": INF}, "init must be positive and finite, got inf"),
            "tensor with 0": ({"init": torch.tensor([1.0, 0.0])}, "init must be positive"),
            "a flag": ({"init": True}, "init must be a number"),
            "a distribution": ({"init": dist.HalfNormal(1.0)}, "init must be a number"),
        },
    ),
    Row(
        "likelihoods.StudentT",
        lambda: {"df": 3.0, "scale": 1.0},
        bad={
            **NO_SCALE,
            "df 0": ({"df": 0.0}, "df must be positive and finite, got 0"),
            "df infinite": ({"df": INF}, "df must be positive and finite, got inf"),
        },
    ),
    *(
        Row(
            f"likelihoods.{name}",
            lambda: {"missing": "ignore"},
            bad={"another": ({"missing": "drop"}, "missing must be one of")},
        )
        for name in ("Bernoulli", "HeteroscedasticGaussian", "Poisson")
    ),
    Row(
        "likelihoods.NegativeBinomial",
        lambda: {"total_count": 1.0, "missing": "ignore"},
        bad={
            "0": ({"total_count": 0.0}, "total_count must be positive and finite, got 0"),
            "any sign": ({"total_count": dist.Normal(0.0, 1.0)}, "prior on positive values"),
        },
    ),
    Row(
        "likelihoods.Categorical",
        lambda: {"ignore_index": -100},
        bad={"a float": ({"ignore_index": -1.0}, "ignore_index must be an integer, got -1.0")},
        fine={"none": {"ignore_index": None}},
    ),
    Row(
        "likelihoods.Categorical.check",
        lambda: {"self": likelihoods.Categorical(), "outputs": X, "y": LABELS},
        bad={
            "label 3": ({"y": torch.tensor([0, 1, 2, 3])}, r"labels in \[0, 2\], got 3"),
            "label -1": ({"y": torch.tensor([0, 1, 2, -1])}, r"labels in \[0, 2\], got -1"),
            "floats": ({"y": torch.zeros(4)}, "y must hold integer class labels, .*float32"),
            "flags": ({"y": LABELS.bool()}, "y must hold integer class labels, .*bool"),
            "complex": ({"y": LABELS + 1j}, "y must hold integer class labels, .*complex64"),
            "one-hot": ({"y": torch.eye(4, 3).long()}, r"expected y of shape \[n\], got \[4, 3\]"),
            "outputs [n]": ({"outputs": X[:, 0]}, r"outputs of shape \[batch, classes\]"),
            "none": ({"y": LABELS[:0]}, "y must"),
        },
        skip=OUTPUTS,
    ),
    Row(
        "likelihoods.Bernoulli.check",
        lambda: {"self": likelihoods.Bernoulli(), "outputs": X[:, :1], "y": TARGETS.sign().abs()},
        bad={
            "2": ({"y": LABELS + 1}, "y must hold 0 and 1 only, got 2"),
            "half": ({"y": torch.full((4,), 0.5)}, "y must hold 0 and 1 only, got 0.5"),
            "NaN": ({"y": torch.full((4,), NAN)}, "y must hold finite real numbers, got nan"),
        },
        skip=OUTPUTS,
    ),
    Row(
        "likelihoods.Gaussian.check",
        lambda: {"self": likelihoods.Gaussian(), "outputs": X[:, :1], "y": TARGETS},
        bad={
            "broadcast": ({"outputs": X, "y": TARGETS}, r"expected y of shape \[n, 3\]"),
            "NaN": ({"y": torch.full((4, 1), NAN)}, "y must hold finite real numbers, got nan"),
            "a scale of another shape": (
                {"self": likelihoods.Gaussian(torch.ones(5))},
                r"scale to broadcast to outputs of shape \[4, 1\]",
            ),
        },
        skip=OUTPUTS,
    ),
    Row(
        "likelihoods.HeteroscedasticGaussian.check",
        lambda: {
            "self": likelihoods.HeteroscedasticGaussian(),
            "outputs": X[:, :2],
            "y": TARGETS,
        },
        bad={"odd": ({"outputs": X}, "expected an even number of outputs, got 3")},
        skip=OUTPUTS,
    ),
    Row(
        "likelihoods.Poisson.check",
        lambda: {"self": likelihoods.Poisson(), "outputs": X[:, :1], "y": LABELS.float()},
        bad={
            "half": ({"y": torch.full((4,), 0.5)}, "y must hold counts 0, 1, 2, ..., got 0.5"),
            "negative": ({"y": -torch.ones(4)}, "y must hold counts .* got -1"),
            "a negative integer": ({"y": -LABELS}, "y must hold counts .* got -1"),
            "infinite": ({"y": torch.full((4,), INF)}, "y must hold finite real numbers, got inf"),
        },
        skip=OUTPUTS,
    ),
    Row(
        "likelihoods.NegativeBinomial.learned",
        lambda: {"init": 1.0},
        bad={"0": ({"init": 0.0}, "init must be positive and finite, got 0")},
    ),
    Row(
        "likelihoods.NegativeBinomial.check",
        lambda: {
            "self": likelihoods.NegativeBinomial(1.0),
            "outputs": X[:, :1],
            "y": LABELS.float(),
        },
        bad={"half": ({"y": torch.full((4,), 0.5)}, "y must hold counts 0, 1, 2, ..., got 0.5")},
        skip=OUTPUTS,
    ),
    Row(
        "likelihoods.StudentT.check",
        lambda: {"self": likelihoods.StudentT(3.0), "outputs": X[:, :1], "y": TARGETS},
        bad={"infinite": ({"y": TARGETS / 0}, "y must hold finite real numbers, got inf")},
        skip=OUTPUTS,
    ),
    Row(
        "BayesianModel",
        lambda: {"network": network(), "likelihood": likelihoods.Categorical(), "num_data": 4},
        bad={
            "no Pyro": (
                {"network": nn.Linear(3, 2)},
                "network must have random weights",
            ),
            "a class": ({"likelihood": likelihoods.Categorical}, "likelihood must be"),
            "no likelihood": ({"likelihood": PyroModule()}, "must be a pyro_bbb.likelihoods one"),
            "no data": ({"num_data": 0}, "num_data must be an integer of .* 1, got 0"),
            "less than none": ({"num_data": -3}, "num_data must be an integer of .* 1, got -3"),
            "half a row": ({"num_data": 1.5}, "num_data must be an integer of .*, got 1.5"),
            "a flag": ({"num_data": True}, "num_data must be an integer of .*, got True"),
            "a tensor": ({"num_data": torch.tensor(5)}, "num_data must be an integer of .*, got"),
        },
    ),
    Row(
        "BayesianModel.__call__",
        lambda: {"self": classifier(), "x": X, "y": LABELS, "kl_weight": 0.5},
        bad={
            "kl_weight below 0": ({"kl_weight": -0.5}, "kl_weight must be .* got -0.5"),
            "kl_weight NaN": ({"kl_weight": NAN}, "kl_weight must be .* got nan"),
            "a tensor below 0": ({"kl_weight": torch.tensor(-1.0)}, "kl_weight must be .* got"),
            "a tensor of NaN": ({"kl_weight": torch.tensor(NAN)}, "kl_weight must be .* got"),
            "columns": ({"x": X[:, :2]}, r"x of shape \[batch, 3\]"),
            "one row for all": ({"x": X[:1]}, "expected y of 1 rows as x has, got 4"),
            "one target for all": ({"y": LABELS[:1]}, "expected y of 4 rows as x has, got 1"),
            "floats": ({"y": LABELS.float()}, "y must hold integer class labels"),
        },
        fine={"kl_weight 0": {"kl_weight": 0}, "no y": {"y": None}},
        aka={"x": r"\bx\b|expected y of shape"},
        skip={
            **left("x", *TORCH["words"], why=TORCH["why"]),
            **left("x", *PYRO["words"], why=PYRO["why"]),
            "y: without values": TORCH["why"],
            "y: None": "draws the observations",
        },
    ),
    Row(
        "BayesianModel.check",
        lambda: {"self": classifier(), "x": X, "y": LABELS},
        bad={"x": ({"x": X[:, :2]}, "expected x of shape"), "y": ({"y": LABELS + 5}, "labels in")},
        aka={"x": r"\bx\b|expected y of shape"},
    ),
    Row(
        "BayesianModel.predictive",
        lambda: {"self": classifier(), "x": X},
        skip=left("x", *TORCH["words"], why=TORCH["why"]),
    ),
]


def tiny():
    """A model of few latents that has seen its data."""
    return bbb.BayesianModel(
        bbb.BayesianMLP([3, 1], prior=dist.Normal(0.0, 1.0)), likelihoods.Gaussian(), num_data=4
    )


def deeper():
    return bbb.BayesianModel(bbb.BayesianMLP([3, 4, 2]), likelihoods.Categorical(), num_data=4)


def laplace():
    return guides.Laplace(tiny())


def swag(iterates=2):
    made = guides.SWAG(tiny(), rank=2)
    for _ in range(iterates):
        made.collect()
    return made


def averaged():
    made = swag()
    made.approximate([])
    return made


INIT_LOC = {
    "init_loc unknown": ({"init_loc": "normal"}, "init_loc must be 'he'"),
    "init_loc NaN": ({"init_loc": NAN}, "init_loc must be finite, got nan"),
    "init_loc of no latent": ({"init_loc": {"fc9.weight": X}}, "init_loc names .*fc9.weight"),
    "init_loc of another shape": (
        {"init_loc": {"fc1.weight": torch.zeros(7, 7)}},
        r"init_loc of 'network.fc1.weight' must have shape",
    ),
    "init_loc of NaN": (
        {"init_loc": {"fc1.bias": torch.full((2,), NAN)}},
        "init_loc of 'network.fc1.bias' must be finite",
    ),
    "init_loc of text": (
        {"init_loc": {"fc1.bias": "zero"}},
        r"init_loc\['fc1.bias'\] must be a tensor",
    ),
    "init_loc a function of text": ({"init_loc": lambda site: "zero"}, "init_loc of .* must be a"),
    "init_loc another network": ({"init_loc": nn.ReLU()}, "init_loc must have parameters named"),
    "init_loc an object": ({"init_loc": object()}, "init_loc must be a number"),
}

GUIDES = [
    Row("AutoSoftplusNormal", lambda: {"model": classifier(), "init_rho": -3.0}, bad=INIT_LOC),
    Row("guides.Normal", lambda: {"model": classifier(), "init_scale": 0.1}, bad=INIT_LOC),
    Row("guides.Delta", lambda: {"model": classifier()}, bad=INIT_LOC),
    Row("guides.FullRank", lambda: {"model": classifier(), "init_scale": 0.1}, bad=INIT_LOC),
    Row(
        "guides.LowRank",
        lambda: {"model": classifier(), "init_scale": 0.1, "rank": 2},
        bad={"rank 0": ({"rank": 0}, "rank must be an integer of at least 1, got 0")},
    ),
    Row(
        "guides.Flow",
        lambda: {"model": classifier(), "init_scale": 0.1, "hidden_dim": 8, "num_transforms": 1},
        bad={"too narrow": ({"hidden_dim": 2}, "hidden_dim must be at least the number of lat")},
    ),
    Row(
        "guides.Laplace",
        lambda: {
            "model": classifier(),
            "structure": "full",
            "curvature": "ggn",
            "optimize_prior": False,
        },
        bad={
            **INIT_LOC,
            "structure": ({"structure": "block"}, "structure must be one of .*got 'block'"),
            "curvature": ({"curvature": "fisher"}, "curvature must be one of .*got 'fisher'"),
            "exact diag": (
                {"structure": "diag", "curvature": "hessian"},
                "curvature='hessian' has structure='full' and no optimize_prior",
            ),
            "optimize_prior": ({"optimize_prior": "yes"}, "optimize_prior must be a bool"),
        },
    ),
    Row("guides.Laplace.unconstrained_normal", lambda: {"self": approximated()}),
    Row(
        "guides.SWAG",
        lambda: {"model": classifier(), "rank": 5, "start": 0.5, "every": 3},
        bad={
            **INIT_LOC,
            "rank 1": ({"rank": 1}, "rank must be an integer of at least 2, got 1"),
            "start 1": ({"start": 1.0}, r"start must be in \[0, 1\), got 1.0"),
            "start below 0": ({"start": -0.1}, r"start must be in \[0, 1\), got -0.1"),
            "every 0": ({"every": 0}, "every must be an integer of at least 1, got 0"),
            "another model": ({"model": print}, "model must be a BayesianModel, got builtin_fun"),
        },
    ),
    Row(
        "guides.SWAG.plan",
        lambda: {"self": swag(), "num_steps": 100, "epoch_steps": 10},
        bad={"too short": ({"num_steps": 1}, "SWAG with start=0.5, .* would collect 1 iterates")},
    ),
    Row(
        "guides.SWAG.approximate",
        lambda: {"self": swag(), "data": (X, TARGETS)},
        bad={
            "no data": ({"data": 3}, "data must be a pair"),
            "one iterate": ({"self": swag(1)}, "two iterates or more make .* 1 were collected"),
        },
        skip={"data: *": "a network without BatchNorm does not run on them"},
        also=(RuntimeError,),
        changes=("self",),
    ),
    Row(
        "guides.LastLayer",
        lambda: {"model": classifier(), "head": "fc1", "init_scale": 0.1, "covariance": "shared"},
        bad=INIT_LOC
        | {
            "two layers": ({"model": deeper(), "head": None}, "vbll needs one Bayesian layer"),
            "no such layer": ({"head": "fc2"}, "head must be one of the Bayesian layers .'fc1'."),
        },
    ),
    Row(
        "guides.Rank1Ensemble",
        lambda: {
            "model": classifier(),
            "size": 2,
            "init": "signs",
            "spread": 0.1,
            "init_scale": 0.1,
            "prior_scale": 0.5,
        },
        bad=INIT_LOC
        | {
            "no members": ({"size": 0}, "size must be an integer of at least 1, got 0"),
            "init": ({"init": "ones"}, "init must be one of .*'normal'.*got 'ones'"),
            "spread": ({"spread": -0.1}, "spread must be a non-negative number, got -0.1"),
            "scale": ({"init_scale": 0.0}, "init_scale must be positive and finite, got 0"),
            "prior": ({"prior_scale": 0.0}, "prior_scale must be positive and finite, got 0"),
        },
        fine={"one": {"size": 1, "spread": 0.0}},
    ),
    Row(
        "guides.Rank1Ensemble.member",
        lambda: {"self": guides.Rank1Ensemble(classifier(), size=2), "number": 1},
        bad={
            "none such": ({"number": 2}, "number must be below 2, of the members, got 2"),
            "negative": ({"number": -1}, "number must be an integer of at least 0, got -1"),
        },
    ),
    Row(
        "guides.Ensemble",
        lambda: {"model": classifier(), "make_member": guides.Delta, "size": 2},
        bad={
            "no guides": (
                {"make_member": lambda model: 3},
                "member must be one of pyro_bbb.guides, got 3",
            )
        },
    ),
    Row(
        "guides.ensemble",
        lambda: {"model": classifier(), "size": 2, "guide": "delta"},
        bad={"alike": ({"init_loc": 0.0}, "init_loc must give each member")},
        aka={"guide": "name must be|guide"},
    ),
    Row("guides.make", lambda: {"name": "softplus_normal", "model": classifier()}, bad=INIT_LOC),
    Row(
        "guides.Ensemble.add",
        lambda: {"self": guides.ensemble(classifier(), 2), "member": guides.Delta(classifier())},
        changes=("self",),
    ),
    Row(
        "AutoSoftplusNormal.loc",
        lambda: {"self": guide(), "name": "network.fc1.weight"},
        aka={"name": "no latent named"},
        also=(KeyError,),
    ),
    Row(
        "AutoSoftplusNormal.scale",
        lambda: {"self": guide(), "name": "network.fc1.weight"},
        aka={"name": "no latent named"},
        also=(KeyError,),
    ),
    Row(
        "AutoSoftplusNormal.without",
        lambda: {
            "self": guide(),
            "removed": {"network.fc1.bias": torch.tensor([True, False])},
        },
        bad={
            "shape": (
                {"removed": {"network.fc1.bias": torch.tensor([True])}},
                r"removed\['network.fc1.bias'\] must be a bool tensor of shape \[2\]",
            ),
            "dtype": (
                {"removed": {"network.fc1.bias": torch.tensor([0, 1])}},
                r"removed\['network.fc1.bias'\] must be a bool tensor",
            ),
            "name": ({"removed": {"fc9": torch.tensor([True])}}, "no latent named 'fc9'"),
        },
        also=(KeyError,),
    ),
    *[
        Row(
            f"{name}.sample_posterior",
            lambda make=make: {"self": make(), "num_samples": 3},
            bad={"none": ({"num_samples": 0}, "num_samples must be .* got 0")},
        )
        for name, make in {
            "AutoSoftplusNormal": guide,
            "guides.Normal": lambda: guides.Normal(classifier()),
            "guides.Delta": lambda: guides.Delta(classifier()),
            "guides.LowRank": lambda: guides.LowRank(classifier()),
            "guides.FullRank": lambda: guides.FullRank(classifier()),
            "guides.Flow": lambda: guides.Flow(classifier()),
            "guides.LastLayer": lambda: guides.LastLayer(classifier()),
            "guides.SWAG": averaged,
            "guides.Ensemble": lambda: guides.ensemble(classifier(), 2),
            "guides.Rank1Ensemble": lambda: guides.Rank1Ensemble(classifier(), size=2),
        }.items()
    ],
    *[
        Row(
            f"{name}.quantiles",
            lambda make=make: {"self": make(), "quantiles": [0.1, 0.9]},
            bad={
                "0": ({"quantiles": [0.0, 0.5]}, r"quantiles must be in \(0, 1\), got 0"),
                "above 1": ({"quantiles": [1.5]}, r"quantiles must be in \(0, 1\), got 1.5"),
                "NaN": ({"quantiles": [NAN]}, r"quantiles must be in \(0, 1\), got nan"),
                "text": ({"quantiles": ["half"]}, r"quantiles must be .* 'half'"),
                "one number": ({"quantiles": 0.5}, "quantiles must be .* 0.5"),
                "none": ({"quantiles": []}, "quantiles must"),
            },
            fine={"a tensor": {"quantiles": torch.tensor([0.1, 0.9])}},
        )
        for name, make in {
            "AutoSoftplusNormal": guide,
            "guides.Normal": lambda: guides.Normal(classifier()),
            "guides.Delta": lambda: guides.Delta(classifier()),
            "guides.LowRank": lambda: guides.LowRank(classifier()),
            "guides.FullRank": lambda: guides.FullRank(classifier()),
            "guides.LastLayer": lambda: guides.LastLayer(classifier()),
            "guides.SWAG": averaged,
        }.items()
    ],
    Row(
        "guides.Laplace.sample_posterior",
        lambda: {"self": approximated(), "num_samples": 3},
        bad={"a point": ({"self": laplace()}, "guide is still a point")},
        also=(RuntimeError,),
    ),
    Row(
        "guides.Laplace.quantiles",
        lambda: {"self": approximated(), "quantiles": [0.1, 0.9]},
        bad={"a point": ({"self": laplace()}, "guide is still a point")},
        also=(RuntimeError,),
    ),
    Row(
        "guides.Laplace.approximate",
        lambda: {"self": laplace(), "data": (X, TARGETS)},
        bad={
            "empty": ({"data": (X[:0], TARGETS[:0])}, "data must hold at least one example"),
            "no batches": ({"data": []}, "data must hold at least one example"),
            "rows": ({"data": (X, TARGETS[:2])}, "data .*rows|data"),
            "columns": ({"data": (X[:, :2], TARGETS)}, "expected x of shape"),
        },
        changes=("self",),
    ),
]


def approximated():
    done = laplace()
    done.approximate((X, TARGETS))
    return done


ROWS = [*DISTRIBUTIONS, *PRIORS, *NETWORKS, *LIKELIHOODS, *GUIDES]


@pytest.mark.parametrize("row", by_name(ROWS))
def test_bad_input(row):
    judge_all(row)
