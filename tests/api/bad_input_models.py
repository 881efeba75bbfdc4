# SPDX-License-Identifier: Apache-2.0
"""Bad input to what a model is made of: distributions, priors, networks, likelihoods, guides."""

import math

import pyro.distributions as dist
import torch
from pyro.nn import PyroModule
from torch import nn
from torch.distributions import Normal as TorchNormal

import pyro_bbb as bbb
from pyro_bbb import guides, likelihoods, priors
from tests._support.bad_input import left, no_counts, row

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


TORCH = {  # networks called directly are torch's
    "why": "torch says which dtype and device a module takes; fit and predict check both before",
    "words": ("without values", "bool", "complex", "double", "half", "integers"),
}
PYRO = {  # a model called directly is a Pyro program
    "why": "Pyro validates the distributions of a program that runs by itself",
    "words": ("NaN", "infinite", "minus infinite"),
}
OUTPUTS = {"outputs: *": "a network's, which BayesianModel.check names"}


def lenet_input():
    return torch.zeros(2, 1, 28, 28)


DISTRIBUTIONS = [
    row(
        "ScaleMixtureNormal",
        lambda: {"pi": 0.5, "sigma1": 1.0, "sigma2": 0.1},
        ("pi", 1.5, r"pi must be in \[0, 1\], got 1.5"),
        ("pi", torch.tensor([0.5, NAN]), "pi must .* got nan"),
        ("sigma1", True, "sigma1 must be a number or a tensor, got True"),
        ("sigma1", 0.0, "sigma1 must be positive and finite, got 0"),
        ("sigma2", -0.5, "sigma2 must be positive and finite, got -0.5"),
        (
            {"pi": torch.full((2,), 0.5), "sigma1": torch.ones(3)},
            r"pi, sigma1 and sigma2 must broadcast.*\[2\].*\[3\]",
        ),
        ("sigma2", torch.tensor(1j), "sigma2 must be .*complex"),
        fine=[
            {"pi": 0.0},
            {"pi": 1.0},
            {"pi": torch.full((2, 1), 0.5), "sigma1": torch.ones(3)},
            {"sigma1": 1, "sigma2": torch.tensor([1, 2])},
            {"sigma1": torch.ones(0)},
        ],
    ),
    row(
        "ScaleMixtureNormal.log_prob",
        lambda: {"self": bbb.ScaleMixtureNormal(0.5, 1.0, 0.1), "value": X},
        skip={"value: without values": "torch takes scalars on the CPU beside any device"},
    ),
    row(
        "ScaleMixtureNormal.cdf",
        lambda: {"self": bbb.ScaleMixtureNormal(0.5, 1.0, 0.1), "value": X},
        skip={"value: without values": "torch takes scalars on the CPU beside any device"},
    ),
    row(
        "ScaleMixtureNormal.sample",
        lambda: {"self": bbb.ScaleMixtureNormal(0.5, 1.0, 0.1), "sample_shape": (2,)},
        fine=[{"sample_shape": (0,)}],
        aka={"sample_shape": "sample_shape"},
        skip={"sample_shape: *": "torch.Size says what a shape is, as for every distribution"},
    ),
]

PRIORS = [
    row("priors.FanInNormal", lambda: {"gain": 1.0}, ("gain", 0.0, "gain .* got 0")),
    row(
        "priors.FunctionNormal",
        lambda: {
            "scale": 2.0,
            "context": ("warped", "clouds"),
            "num_points": 8,
            "weight": 1.0,
            "noise": 0.1,
            "kernel": None,
        },
        ("context", "digits", "context must be one of"),
        ("context", (), "got none"),
        ("context", torch.zeros(0, 3), "context must be finite"),
        ("kernel", 1.0, "kernel must be a function"),
        ("noise", -1.0, "noise .* got -1"),
    ),
    row("priors.LearnedNormal", lambda: {"scale": 1.0}, ("scale", 0, "scale .* 0")),
    row(
        "priors.LearnedScaleMixture",
        lambda: {"pi": 0.5, "sigma1": 1.0, "sigma2": 0.1},
        ("pi", 0.0, r"pi must be in \(0, 1\), got 0"),
        ("sigma1", -1.0, "sigma1 must be positive and finite, got -1"),
        ("sigma2", INF, "sigma2 must be positive and finite, got inf"),
    ),
    row(
        "priors.HierarchicalNormal",
        lambda: {"scale": dist.HalfNormal(torch.tensor(1.0)), "per": "unit"},
        ("variance", dist.Gamma(1.0, 1.0), "scale or of variance, not of both"),
        ("scale", dist.Normal(0.0, 1.0), "scale must .* positive values"),
        ("scale", dist.HalfNormal(torch.ones(2)), "scale must be a scalar"),
        ("scale", 1.0, "scale must be a distribution, got 1.0"),
        ("scale", torch.distributions.HalfNormal(1.0), "must be a distribution of pyro"),
    ),
    row("priors.NormalJeffreys", lambda: {"per": "unit"}),
    row(
        "priors.Independent",
        lambda: {"distribution": dist.Normal(0.0, 1.0)},
        ("distribution", dist.Normal(torch.zeros(3), 1.0).to_event(1), r"prior must be"),
        ("distribution", TorchNormal(0.0, 1.0), "of pyro.distributions"),
        aka={"distribution": "prior must be"},
    ),
    row("priors.Function", lambda: {"function": lambda module, name, shape: dist.Normal(0.0, 1.0)}),
    row(
        "priors.ByName",
        lambda: {"patterns": {"*": dist.Normal(0.0, 1.0)}},
        ("patterns", {}, "must not be an empty dict"),
        ("patterns", {"*": 3}, "prior must be .* got 3"),
        ("patterns", {3: dist.Normal(0.0, 1.0)}, "must be strings, got 3"),
    ),
    row(
        "priors.as_prior",
        lambda: {"prior": "normal"},
        ("prior", 1.0, "prior must be a distribution.* got 1.0"),
        fine=[{"prior": None}],
        skip={"prior: None": "the default prior"},
    ),
    *[
        row(
            f"priors.make {name}",
            lambda name=name, options=options: {"name": name, **options},
            aka={"name": "prior"},
        )
        for name, options in {
            "normal": {"scale": 1.0, "loc": 0.0},
            "laplace": {"scale": 1.0},
            "student_t": {"df": 3.0, "scale": 1.0},
            "log_uniform": {},
            "normal_jeffreys": {"per": "input"},
            "scale_mixture": {"pi": 0.5, "sigma1": 1.0, "sigma2": 0.1},
            "horseshoe": {"scale": 1.0, "per": "unit"},
            "inverse_gamma": {"concentration": 1.0, "rate": 1.0, "per": "unit"},
        }.items()
    ],
    row(
        "priors.declare",
        lambda: {"module": Box(), "prior": priors.default_prior(), "weight": (2, 3)},
        ("prior", priors.Independent(dist.Normal(torch.zeros(5), 1.0)), r"'weight' must"),
        ("prior", priors.ByName({"bias": "normal"}), "no pattern for 'weight'"),
        ("weight", (-2, 3), r"weight must .* \(-2, 3\)"),
        changes=("module", "prior"),
        half_made=True,
    ),
    row(
        "priors.from_guide",
        lambda: {"guide": guide()},
        ("guide", bbb.prune(guide(), 0.5), "guide must have .*positive scales"),
        ("default", 3, "prior must be a distribution"),
        ("guide", bbb.AutoSoftplusNormal(lambda x: None), "guide has no latents yet"),
        also=(RuntimeError,),
    ),
]

NETWORKS = [
    row(
        "BayesianLinear",
        lambda: {"in_features": 3, "out_features": 2, "prior": "normal"},
        ("prior", dist.Normal(torch.zeros(5), 1.0), r"'weight' must expand to shape \[2, 3\]"),
        ("prior", lambda m, n, s: 3, "prior must return a distribution for 'weight', got 3"),
        ("prior", lambda m, n, s: TorchNormal(0.0, 1.0), "pyro.distributions, got torch"),
        ("prior", lambda m, n, s: dist.Normal(torch.zeros(5), 1.0), "'weight' must expand"),
        ("prior", "gauss", r"prior must be one of \['fan_in_normal', .*'student_t'\].*'gauss'"),
        *no_counts("in_features", "out_features"),
    ),
    row(
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
        *no_counts("in_channels", "out_channels", "groups"),
        ("groups", 3, "groups must divide .*, got 2 and 4 by 3"),
        ("kernel_size", 0, "kernel_size must .* 0"),
        ("stride", 0, "stride must .* 0"),
        ("padding", "wide", "padding .*wide"),
        ("padding", -1, "padding must .* -1"),
        fine=[{"kernel_size": (3, 5)}, {"padding": "same"}],
    ),
    row(
        "BayesianMLP",
        lambda: {"sizes": [3, 4, 2]},
        ("sizes", [3], "sizes must list inputs and outputs at least"),
        ("sizes", [3, 0, 2], r"sizes\[1\] must be an integer of at least 1, got 0"),
        ("sizes", ["3", "2"], r"sizes\[0\] must be an integer"),
        ("sizes", [3, 4, -1], r"sizes\[2\] must be an integer of at least 1"),
        ("activation", nn.ReLU(), "activation must .*nn.ReLU"),
        ("activation", "relu", "activation must .*'relu'"),
        ("prior", {"fc1.*": "normal"}, "no pattern for 'fc2"),
        fine=[{"sizes": (3, 2)}, {"sizes": [1, 1]}],
    ),
    row("BayesianLeNet5", lambda: {"num_classes": 10}, *no_counts("num_classes")),
    row(
        "BayesianMLP.forward",
        lambda: {"self": network(), "x": X},
        ("x", X[:, :2], r"x of shape \[batch, 3\], got \[4, 2\]"),
        fine=[{"x": X[:0]}],
        skip=left("x", *TORCH["words"], why=TORCH["why"]),
    ),
    row(
        "BayesianLeNet5.forward",
        lambda: {"self": bbb.BayesianLeNet5(), "x": lenet_input()},
        *[
            ("x", torch.zeros(shape), r"expected x of shape \[batch, 1, 28, 28\], got \[")
            for shape in ((2, 784), (3, 28, 28), (3, 3, 28, 28), (3, 1, 32, 32))
        ],
        skip=left("x", *TORCH["words"], why=TORCH["why"]),
    ),
    row(
        "bayesianize",
        lambda: {"module": nn.Linear(3, 2), "prior": "normal"},
        ("where", "conv*", "where='conv.*' has no trainable"),
        ("where", 3, "where must be"),
        ("where", [3], "where must be a name pattern"),
        ("where", [], "where must not be empty"),
        ("module", nn.LazyLinear(2), "no shape yet"),
        ("module", nn.Linear(2, 2, dtype=torch.cfloat), "it is complex"),
        ("module", nn.Linear(2, 2).requires_grad_(False), "no trainable"),
        ("module", nn.ReLU(), "no trainable parameters to convert"),
        ("module", nn.Linear, "module must be a torch.nn.Module, got"),
        fine=[{"module": nn.PReLU()}],
    ),
    row(
        "adapt",
        lambda: {
            "module": nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)),
            "rank": 1,
            "where": "0",
            "alpha": 1.0,
            "random": "A",
            "trainable": "1",
        },
        ("where", "conv*", "where='conv.*' has no layers to adapt"),
        ("where", 3, "where must be"),
        ("trainable", "2", "trainable='2' has no trainable"),
        ("random", "B", "random must be one of"),
        ("rank", 0, "rank must be an integer of at least 1, got 0"),
        ("alpha", 0.0, "alpha must be positive and finite, got 0"),
        ("where", "1", "'1' cannot be adapted: trainable has it"),
        ({"module": nn.LSTM(3, 3), "where": nn.LSTM, "trainable": None}, "it is a LSTM"),
        ({"module": nn.ReLU(), "trainable": None}, "has no layers to adapt"),
        ("module", nn.Linear, "module must be a torch.nn.Module, got"),
        fine=[{"module": nn.Linear(3, 2).requires_grad_(False), "where": None, "trainable": None}],
    ),
    row("networks.merge_adapters", lambda: {"network": nn.Linear(3, 2)}, changes={"network"}),
]

NO_SCALE = [
    ("scale", 0.0, "scale must be positive and finite, got 0"),
    ("scale", True, "scale must be a number"),
]
LIKELIHOODS = [
    row(
        "likelihoods.Gaussian",
        lambda: {"scale": 1.0},
        *NO_SCALE,
        ("scale", torch.tensor([1.0, 0.0]), "scale must be positive"),
        ("scale", dist.Normal(0.0, 1.0), "prior on positive values"),
        ("scale", torch.distributions.HalfNormal(1.0), "pyro.distributions"),
    ),
    row(
        "likelihoods.Gaussian.learned",
        lambda: {"init": 1.0},
        ("init", 0.0, "init must be positive and finite, got 0"),
        ("init", torch.tensor([1.0, 0.0]), "init must be positive"),
        ("init", True, "init must be a number"),
    ),
    row(
        "likelihoods.StudentT",
        lambda: {"df": 3.0, "scale": 1.0},
        *NO_SCALE,
        ("df", 0.0, "df must be positive and finite, got 0"),
    ),
    *(
        row(
            f"likelihoods.{name}",
            lambda: {"missing": "ignore"},
            ("missing", "drop", "missing must be one of"),
        )
        for name in ("Bernoulli", "HeteroscedasticGaussian", "Poisson")
    ),
    row(
        "likelihoods.NegativeBinomial",
        lambda: {"total_count": 1.0, "missing": "ignore"},
        ("total_count", 0.0, "total_count must be positive and finite, got 0"),
        ("total_count", dist.Normal(0.0, 1.0), "prior on positive values"),
    ),
    row(
        "likelihoods.Categorical",
        lambda: {"ignore_index": -100},
        ("ignore_index", -1.0, "ignore_index must be an integer, got -1.0"),
        fine=[{"ignore_index": None}],
    ),
    row(
        "likelihoods.Categorical.check",
        lambda: {"self": likelihoods.Categorical(), "outputs": X, "y": LABELS},
        ("y", torch.tensor([0, 1, 2, 3]), r"labels in \[0, 2\], got 3"),
        ("y", torch.tensor([0, 1, 2, -1]), r"labels in \[0, 2\], got -1"),
        ("y", torch.zeros(4), "y must hold integer class labels, .*float32"),
        ("y", LABELS.bool(), "y must hold integer class labels, .*bool"),
        ("y", LABELS + 1j, "y must hold integer class labels, .*complex64"),
        ("y", torch.eye(4, 3).long(), r"expected y of shape \[n\], got \[4, 3\]"),
        ("outputs", X[:, 0], r"outputs of shape \[batch, classes\]"),
        ("y", LABELS[:0], "y must"),
        skip=OUTPUTS,
    ),
    row(
        "likelihoods.Bernoulli.check",
        lambda: {"self": likelihoods.Bernoulli(), "outputs": X[:, :1], "y": TARGETS.sign().abs()},
        ("y", LABELS + 1, "y must hold 0 and 1 only, got 2"),
        skip=OUTPUTS,
    ),
    row(
        "likelihoods.Gaussian.check",
        lambda: {"self": likelihoods.Gaussian(), "outputs": X[:, :1], "y": TARGETS},
        ({"outputs": X, "y": TARGETS}, r"expected y of shape \[n, 3\]"),
        ("y", torch.full((4, 1), NAN), "y must hold finite real numbers, got nan"),
        ("self", likelihoods.Gaussian(torch.ones(5)), r"scale to broadcast to outputs of"),
        skip=OUTPUTS,
    ),
    row(
        "likelihoods.HeteroscedasticGaussian.check",
        lambda: {"self": likelihoods.HeteroscedasticGaussian(), "outputs": X[:, :2], "y": TARGETS},
        ("outputs", X, "expected an even number of outputs, got 3"),
        skip=OUTPUTS,
    ),
    row(
        "likelihoods.Poisson.check",
        lambda: {"self": likelihoods.Poisson(), "outputs": X[:, :1], "y": LABELS.float()},
        ("y", torch.full((4,), 0.5), "y must hold counts 0, 1, 2, ..., got 0.5"),
        ("y", -torch.ones(4), "y must hold counts .* got -1"),
        ("y", torch.full((4,), INF), "y must hold finite real numbers, got inf"),
        skip=OUTPUTS,
    ),
    row(
        "likelihoods.NegativeBinomial.learned",
        lambda: {"init": 1.0},
        ("init", 0.0, "init must be positive and finite, got 0"),
    ),
    row(
        "likelihoods.NegativeBinomial.check",
        lambda: {
            "self": likelihoods.NegativeBinomial(1.0),
            "outputs": X[:, :1],
            "y": LABELS.float(),
        },
        ("y", torch.full((4,), 0.5), "y must hold counts 0, 1, 2, ..., got 0.5"),
        skip=OUTPUTS,
    ),
    row(
        "likelihoods.StudentT.check",
        lambda: {"self": likelihoods.StudentT(3.0), "outputs": X[:, :1], "y": TARGETS},
        ("y", TARGETS / 0, "y must hold finite real numbers, got inf"),
        skip=OUTPUTS,
    ),
    row(
        "BayesianModel",
        lambda: {"network": network(), "likelihood": likelihoods.Categorical(), "num_data": 4},
        ("network", nn.Linear(3, 2), "network must have random weights"),
        ("likelihood", likelihoods.Categorical, "likelihood must be"),
        ("likelihood", PyroModule(), "must be a pyro_bbb.likelihoods one"),
        *no_counts("num_data"),
    ),
    row(
        "BayesianModel.__call__",
        lambda: {"self": classifier(), "x": X, "y": LABELS, "kl_weight": 0.5},
        ("kl_weight", -0.5, "kl_weight must be .* got -0.5"),
        ("x", X[:, :2], r"x of shape \[batch, 3\]"),
        ("x", X[:1], "expected y of 1 rows as x has, got 4"),
        ("y", LABELS[:1], "expected y of 4 rows as x has, got 1"),
        ("y", LABELS.float(), "y must hold integer class labels"),
        fine=[{"kl_weight": 0}, {"y": None}],
        aka={"x": r"\bx\b|expected y of shape"},
        skip={
            **left("x", *TORCH["words"], why=TORCH["why"]),
            **left("x", *PYRO["words"], why=PYRO["why"]),
            "y: without values": TORCH["why"],
            "y: None": "draws the observations",
        },
    ),
    row(
        "BayesianModel.check",
        lambda: {"self": classifier(), "x": X, "y": LABELS},
        ("x", X[:, :2], "expected x of shape"),
        ("y", LABELS + 5, "labels in"),
        aka={"x": r"\bx\b|expected y of shape"},
    ),
    row(
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


INIT_LOC = [
    ("init_loc", "normal", "init_loc must be 'he'"),
    ("init_loc", NAN, "init_loc must be finite, got nan"),
    ("init_loc", {"fc9.weight": X}, "init_loc names .*fc9.weight"),
    ("init_loc", {"fc1.weight": torch.zeros(7, 7)}, r"init_loc of 'network.fc1.weight'"),
    ("init_loc", {"fc1.bias": torch.full((2,), NAN)}, "init_loc of 'network.fc1.bias'"),
    ("init_loc", {"fc1.bias": "zero"}, r"init_loc\['fc1.bias'\] must be a tensor"),
    ("init_loc", lambda site: "zero", "init_loc of .* must be a"),
    ("init_loc", nn.ReLU(), "init_loc must have parameters named"),
    ("init_loc", object(), "init_loc must be a number"),
]

GUIDES = [
    row("AutoSoftplusNormal", lambda: {"model": classifier(), "init_rho": -3.0}, *INIT_LOC),
    row("guides.Normal", lambda: {"model": classifier(), "init_scale": 0.1}, *INIT_LOC),
    row("guides.Delta", lambda: {"model": classifier()}, *INIT_LOC),
    row("guides.FullRank", lambda: {"model": classifier(), "init_scale": 0.1}, *INIT_LOC),
    row(
        "guides.LowRank",
        lambda: {"model": classifier(), "init_scale": 0.1, "rank": 2},
        ("rank", 0, "rank must be an integer of at least 1, got 0"),
    ),
    row(
        "guides.Flow",
        lambda: {"model": classifier(), "init_scale": 0.1, "hidden_dim": 8, "num_transforms": 1},
        ("hidden_dim", 2, "hidden_dim must be at least the number of lat"),
    ),
    row(
        "guides.Laplace",
        lambda: {
            "model": classifier(),
            "structure": "full",
            "curvature": "ggn",
            "optimize_prior": False,
        },
        *INIT_LOC,
        ("structure", "block", "structure must be one of .*got 'block'"),
        ("curvature", "fisher", "curvature must be one of .*got 'fisher'"),
        (
            {"structure": "diag", "curvature": "hessian"},
            "curvature='hessian' has structure='full' and no optimize_prior",
        ),
        ("optimize_prior", "yes", "optimize_prior must be one of"),
        ("optimize_prior", 1, "optimize_prior must be a bool"),
        ("optimize_prior", "layer", "optimize_prior='layer' has structure='kron' or 'diag'"),
    ),
    row("guides.Laplace.unconstrained_normal", lambda: {"self": approximated()}),
    row(
        "guides.SWAG",
        lambda: {"model": classifier(), "rank": 5, "start": 0.5, "every": 3},
        *INIT_LOC,
        ("rank", 1, "rank must be an integer of at least 2, got 1"),
        ("start", 1.0, r"start must be in \[0, 1\), got 1.0"),
        ("every", 0, "every must be an integer of at least 1, got 0"),
        ("model", print, "model must be a BayesianModel, got builtin_fun"),
    ),
    row(
        "guides.SWAG.plan",
        lambda: {"self": swag(), "num_steps": 100, "epoch_steps": 10},
        ("num_steps", 1, "SWAG with start=0.5, .* would collect 1 iterates"),
    ),
    row(
        "guides.SWAG.approximate",
        lambda: {"self": swag(), "data": (X, TARGETS)},
        ("data", 3, "data must be a pair"),
        ("self", swag(1), "two iterates or more make .* 1 were collected"),
        skip={"data: *": "a network without BatchNorm does not run on them"},
        also=(RuntimeError,),
        changes=("self",),
    ),
    row(
        "guides.LastLayer",
        lambda: {"model": classifier(), "head": "fc1", "init_scale": 0.1, "covariance": "shared"},
        *INIT_LOC,
        ({"model": deeper(), "head": None}, "vbll needs one Bayesian layer"),
        ("head", "fc2", "head must be one of the Bayesian layers .'fc1'."),
    ),
    row(
        "guides.Rank1Ensemble",
        lambda: {
            "model": classifier(),
            "size": 2,
            "init": "signs",
            "spread": 0.1,
            "init_scale": 0.1,
            "prior_scale": 0.5,
        },
        *INIT_LOC,
        ("size", 0, "size must be an integer of at least 1, got 0"),
        ("init", "ones", "init must be one of .*'normal'.*got 'ones'"),
        ("spread", -0.1, "spread must be a non-negative number, got -0.1"),
        ("init_scale", 0.0, "init_scale must be positive and finite, got 0"),
        ("prior_scale", 0.0, "prior_scale must be positive and finite, got 0"),
        fine=[{"size": 1, "spread": 0.0}],
    ),
    row(
        "guides.Rank1Ensemble.member",
        lambda: {"self": guides.Rank1Ensemble(classifier(), size=2), "number": 1},
        ("number", 2, "number must be below 2, of the members, got 2"),
        ("number", -1, "number must be an integer of at least 0, got -1"),
    ),
    row(
        "guides.Ensemble",
        lambda: {"model": classifier(), "make_member": guides.Delta, "size": 2},
        ("make_member", lambda model: 3, "member must be one of pyro_bbb.guides, got 3"),
    ),
    row(
        "guides.ensemble",
        lambda: {"model": classifier(), "size": 2, "guide": "delta"},
        ("init_loc", 0.0, "init_loc must give each member"),
        aka={"guide": "name must be|guide"},
    ),
    row("guides.make", lambda: {"name": "softplus_normal", "model": classifier()}, *INIT_LOC),
    row(
        "guides.Ensemble.add",
        lambda: {"self": guides.ensemble(classifier(), 2), "member": guides.Delta(classifier())},
        changes=("self",),
    ),
    row(
        "AutoSoftplusNormal.loc",
        lambda: {"self": guide(), "name": "network.fc1.weight"},
        aka={"name": "no latent named"},
        also=(KeyError,),
    ),
    row(
        "AutoSoftplusNormal.scale",
        lambda: {"self": guide(), "name": "network.fc1.weight"},
        aka={"name": "no latent named"},
        also=(KeyError,),
    ),
    row(
        "AutoSoftplusNormal.without",
        lambda: {"self": guide(), "removed": {"network.fc1.bias": torch.tensor([True, False])}},
        ("removed", {"network.fc1.bias": torch.tensor([True])}, r"removed\['network.fc1"),
        ("removed", {"network.fc1.bias": torch.tensor([0, 1])}, r"removed\['network.fc1"),
        ("removed", {"fc9": torch.tensor([True])}, "no latent named 'fc9'"),
        also=(KeyError,),
    ),
    *[
        row(
            f"{name}.sample_posterior",
            lambda make=make: {"self": make(), "num_samples": 3},
            ("num_samples", 0, "num_samples must be .* got 0"),
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
        row(
            f"{name}.quantiles",
            lambda make=make: {"self": make(), "quantiles": [0.1, 0.9]},
            ("quantiles", [0.0, 0.5], r"quantiles must be in \(0, 1\), got 0"),
            ("quantiles", ["half"], r"quantiles must be .* 'half'"),
            ("quantiles", 0.5, "quantiles must be .* 0.5"),
            ("quantiles", [], "quantiles must"),
            fine=[{"quantiles": torch.tensor([0.1, 0.9])}],
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
    row(
        "guides.Laplace.sample_posterior",
        lambda: {"self": approximated(), "num_samples": 3},
        ("self", laplace(), "guide is still a point"),
        also=(RuntimeError,),
    ),
    row(
        "guides.Laplace.quantiles",
        lambda: {"self": approximated(), "quantiles": [0.1, 0.9]},
        ("self", laplace(), "guide is still a point"),
        also=(RuntimeError,),
    ),
    row(
        "guides.Laplace.approximate",
        lambda: {"self": laplace(), "data": (X, TARGETS)},
        ("data", (X[:0], TARGETS[:0]), "data must hold at least one example"),
        ("data", (X, TARGETS[:2]), "data .*rows|data"),
        ("data", (X[:, :2], TARGETS), "expected x of shape"),
        changes=("self",),
    ),
]


def approximated():
    done = laplace()
    done.approximate((X, TARGETS))
    return done


ROWS = [*DISTRIBUTIONS, *PRIORS, *NETWORKS, *LIKELIHOODS, *GUIDES]
