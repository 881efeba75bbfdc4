# SPDX-License-Identifier: Apache-2.0
"""Bad input to what is made of predictions: their uncertainty, scores, chains and pictures."""

import math
from dataclasses import replace

import numpy as np
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb.distributions import observation as families
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction
from pyro_bbb.training.history import Record
from tests._support.bad_input import row

NAN, INF = math.nan, math.inf
PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.25, 0.5, 0.25]])
LABELS = torch.tensor([0, 1, 1, 2])
SCORES = torch.tensor([0.9, 0.1, 0.4, 0.4])
RIGHT = torch.tensor([True, False, True, True])
MEANS = torch.tensor([[0.5], [1.5], [-0.5], [0.0]])
TARGETS = torch.tensor([[0.4], [1.0], [-0.5], [0.3]])


def guide():
    torch.manual_seed(1)
    network = bbb.BayesianMLP([3, 2], prior=dist.Normal(0.0, 1.0))
    return bbb.AutoSoftplusNormal(bbb.BayesianModel(network, likelihoods.Categorical(), num_data=4))


def classes():
    return ClassificationPrediction(torch.stack([PROBS, PROBS.flip(1)]).log())


def numbers(scale=1.0):
    return RegressionPrediction(families.Normal(torch.stack([MEANS, MEANS + 1]), scale, False))


def counts():
    return RegressionPrediction(families.LogRatePoisson(torch.stack([MEANS, MEANS + 1])))


SUMMARIES = [
    row(
        "ClassificationPrediction.refuse",
        lambda: {"self": classes(), "threshold": 0.5},
        ("threshold", 1.5, r"threshold must be in \[0, 1\], got 1.5"),
        fine=[{"threshold": 0}, {"threshold": 1}],
    ),
    row(
        "ClassificationPrediction.log_prob",
        lambda: {"self": classes(), "y": LABELS},
        ("y", LABELS + 1, r"labels in \[0, 2\], got 1 to 3"),
        ("y", torch.eye(4, 3).long(), r"shape \[4\], got torch.int64 \[4, 3\]"),
        ("y", LABELS.float(), "integer"),
    ),
    row(
        "RegressionPrediction.log_prob",
        lambda: {"self": numbers(), "y": TARGETS},
        ("y", TARGETS.expand(4, 4), r"expected y of shape \[n, 1\]"),
        ("y", TARGETS[:2], "expected y of 4 rows, got 2"),
        fine=[{"y": TARGETS[:, 0]}, {"y": TARGETS * 1e30}],
    ),
    row(
        "RegressionPrediction.rescaled",
        lambda: {"self": numbers(), "mean": 1.0, "scale": 2.0},
        ("scale", -1.0, "scale must be positive"),
        ("mean", math.nan, "mean must be finite"),
        ("mean", "1", "mean must be"),
        fine=[{"mean": torch.zeros(1), "scale": torch.ones(1)}],
    ),
    row("RegressionPrediction.cdf", lambda: {"self": numbers(), "value": TARGETS}),
    *[
        row(
            f"RegressionPrediction.{name} {words}",
            lambda make=make, argument=argument: {"self": make(), argument: 0.9},
            (argument, 1.0, rf"{argument} must be in \(0, 1\), got 1"),
            (argument, 0, rf"{argument} must be in \(0, 1\), got 0"),
            (argument, 95, rf"{argument} must be in \(0, 1\), got 95"),
            (argument, NAN, rf"{argument} must be in \(0, 1\), got nan"),
        )
        for name, argument in (("quantile", "probability"), ("interval", "level"))
        for words, make in {
            "of normals": numbers,
            "of counts": counts,
            "of points": lambda: numbers(1e-38),
            "of huge scale": lambda: numbers(1e38),
        }.items()
    ],
]

LOGITS = ("probs", PROBS.log(), "probs must be non-negative with rows summing to 1")
PROBABILITIES = [
    LOGITS,
    ({"probs": PROBS[:0], "y": LABELS[:0]}, "probs must not be empty"),
    ("y", LABELS[:2], r"expected y of shape \[4\] to match probs, got \[2\]"),
    ("probs", PROBS.log(), "probs must be non-negative with rows summing to 1"),
    ("probs", PROBS.expand(2, 4, 3), r"expected y of shape \[2, 4\] to match probs"),
    ("y", LABELS + 1, "y must hold labels in 0 .. 2"),
    ("y", LABELS - 1, r"labels in 0 \.\. 2, got labels in -1 \.\. 1"),
    ("probs", PROBS * NAN, "probs must not have NaN, got one at element 0"),
    ("probs", PROBS + torch.tensor([0.5, -0.5, 0.0]), "row 0 has minimum -0.3"),
    ("probs", np.array(["a"] * 4), "probs must be a tensor.*got ndarray"),
    ("probs", PROBS.long(), "probs must be a floating tensor.*int64"),
    ("probs", PROBS[0], r"probs of shape \[n, classes\], got \[3\]"),
    ("y", LABELS.tolist(), "y must be a tensor of integer labels .*got list"),
    ("y", LABELS.float(), "y must be.*integer labels .*got dtype torch.float32"),
    ("y", LABELS[:, None], r"y of shape \[4\].*got \[4, 1\]"),
]
ONE = [{"probs": PROBS[:1], "y": LABELS[:1]}]
DRAWS = torch.linspace(0, 40, 16).sin().reshape(2, 8)
ANY_DEVICE = "scores are computed on the CPU from any device; of this one torch says: no data"
PAIRED = {"probs": r"\bprobs\b|\by\b", "y": r"\by\b"}
METRICS = [
    *[
        row(
            f"metrics.{name}",
            lambda: {"probs": PROBS, "y": LABELS},
            *PROBABILITIES,
            fine=ONE,
            aka=PAIRED,
        )
        for name in ("accuracy", "nll", "brier", "recall")
    ],
    row(
        "metrics.macro_auroc",
        lambda: {"probs": PROBS, "y": LABELS},
        *PROBABILITIES,
        ("y", 0 * LABELS + 1, "two classes.*got only 1"),
        aka=PAIRED,
    ),
    row(
        "metrics.ece",
        lambda: {"probs": PROBS, "y": LABELS, "bins": 5},
        *PROBABILITIES,
        ("bins", 0, "bins must be an integer of at least 1, got 0"),
        fine=ONE,
        aka=PAIRED,
    ),
    row(
        "metrics.auroc",
        lambda: {"positive_scores": SCORES, "negative_scores": SCORES},
        ("positive_scores", SCORES[:0], "positive_scores must not be empty"),
        ("negative_scores", SCORES[:0], "negative_scores must not be empty"),
        ("positive_scores", SCORES * NAN, "must not have NaN.*element 0"),
        ("positive_scores", SCORES[:, None], r"positive_scores of shape \[n\]"),
        ("positive_scores", [1.0], "positive_scores must be a tensor.*got list"),
        fine=[{"positive_scores": SCORES / 0}],
    ),
    row(
        "metrics.refusal_p_value",
        lambda: {"loss": SCORES, "refused": RIGHT},
        ("refused", LABELS, "refused must be a bool tensor"),
        ("refused", RIGHT[:2], r"same shape, got \[2\] and \[4\]"),
        ("loss", SCORES * NAN, "loss must not have NaN"),
        ("loss", SCORES / 0, "loss must be finite"),
        ("loss", SCORES[:, None], r"expected loss of shape \[n\]"),
        ({"loss": SCORES[:0], "refused": RIGHT[:0]}, "loss must not be empty"),
        fine=[{"loss": SCORES.numpy(), "refused": RIGHT.numpy()}],
    ),
    *[
        row(
            f"metrics.{name}",
            lambda: {"confidence": SCORES, "correct": RIGHT},
            ("correct", LABELS, "correct must be a bool tensor"),
            ("correct", RIGHT[:2], r"same shape, got \[2\] and \[4\]"),
            ("confidence", SCORES * NAN, "confidence must not have NaN"),
            ({"confidence": SCORES[:0], "correct": RIGHT[:0]}, "confidence must not be empty"),
            fine=[{"confidence": SCORES[:1], "correct": RIGHT[:1]}],
        )
        for name in ("risk_coverage", "area_under_risk_coverage")
    ],
    *[
        row(
            f"metrics.{name}",
            lambda: {"values": DRAWS},
            ("values", DRAWS[:, :3], "at least 4 draws per chain, got 3"),
            ("values", DRAWS[0], r"values \[chains, draws, ...\].*\[8\]"),
            ("values", DRAWS > 0, "values must be a tensor of real numbers"),
            bad,
            fine=[{"values": DRAWS * NAN}],
        )
        for name, words, bad in (
            ("r_hat", "one chain", ({"values": DRAWS[:1]}, "must be of 2 chains, got 1")),
            ("ess", "unknown", ({"kind": "head"}, "kind must be one of")),
        )
    ],
    row(
        "metrics.pareto_k",
        lambda: {"log_weights": DRAWS[0]},
        ("log_weights", DRAWS[0] + INF, "log_weights must be below inf"),
        ("log_weights", DRAWS, r"log_weights of shape \[n\]"),
        fine=[{"log_weights": DRAWS[0].numpy()}],
    ),
    row(
        "metrics.rmse",
        lambda: {"mean": MEANS, "y": TARGETS},
        ("y", TARGETS[:, 0], r"same shape, got \[4, 1\] and \[4\]"),
        ("y", TARGETS * NAN, "y must not have NaN"),
        ("mean", MEANS + INF, "mean must be finite"),
        ({"mean": MEANS[:0], "y": TARGETS[:0]}, "mean must not be empty"),
        ("mean", np.array(["a"] * 4), "mean must be a tensor.*got ndarray"),
        fine=[{"mean": MEANS.numpy(), "y": TARGETS.numpy()}],
    ),
    row(
        "metrics.coverage",
        lambda: {"lower": MEANS - 1, "upper": MEANS + 1, "y": TARGETS},
        ("lower", MEANS + 2, "upper must not be below lower"),
        ("upper", MEANS[:, 0] + 1, "upper and y must have the same"),
        ("upper", MEANS * NAN, "upper must not have NaN"),
        aka={"lower": "lower|upper"},
        fine=[{"lower": MEANS - INF, "upper": MEANS + INF}],
    ),
]


def chains(number=2, draws=4):
    shape = (number, draws)
    by_chain = {"network.fc1.bias": torch.randn(*shape, 2)}
    return bbb.Chains(
        by_chain,
        torch.zeros(shape),
        torch.zeros(shape, dtype=torch.bool),
        torch.ones(shape),
        torch.ones(shape, dtype=torch.long),
        torch.ones(number),
        1.0,
    )


CHAINS = [
    row(
        "Chains.ess",
        lambda: {"self": chains(), "kind": "bulk"},
        ("self", chains(2, 3), "at least 4 draws per chain, got 3"),
    ),
    row(
        "Chains.r_hat",
        lambda: {"self": chains()},
        ("self", chains(1), "must be of 2 chains, got 1"),
        ("self", chains(2, 3), "at least 4 draws per chain, got 3"),
    ),
    row(
        "Chains.thin",
        lambda: {"self": chains(), "num_samples": 2},
        ("num_samples", 0, "num_samples must be an integer of at least 1"),
    ),
    row("Chains.to", lambda: {"self": chains(), "device": "cpu", "dtype": torch.float64}),
    row(
        "Chains.to_arviz",
        lambda: {"self": chains()},
        ("model", guide().model, "model and data must be given together"),
        ("data", (MEANS, TARGETS), "model and data must be given together"),
        ({"model": "bnn", "data": (MEANS, TARGETS)}, "model must be a"),
    ),
]


def axes():
    return Figure().subplots()


def history():
    return Record(*[[2.0, 1.0]] * 7)


NO_AXES = {
    "ax: *": "it is matplotlib's, which says what it has not",
    "*: without values": ANY_DEVICE,
    **dict.fromkeys(
        ("*: NaN", "*: infinite", "*: minus infinite", "*: huge", "*: complex"),
        "numpy and matplotlib warn of what cannot be drawn",
    ),
}
PLOTS = [
    row(
        "plots.loss_parts",
        lambda: {"ax": axes(), "history": history(), "unit": "epoch"},
        ("history", Record(), "history must"),
        skip={"unit: *": "any text"},
    ),
    *[
        row(
            f"plots.{name}",
            lambda: {"ax": axes(), "guide": guide()},
            ("sites", ["fc9"], "no latent named"),
            ("sites", [], "site"),
            also=(KeyError,),
        )
        for name in ("weight_locs", "weight_scales")
    ],
    row(
        "plots.weight_density",
        lambda: {"ax": axes(), "guide": guide(), "name": "network.fc1.bias", "index": 0},
        ("index", 7, r"index must be the place of one number of shape \[2\], got 7"),
        ("name", "network.fc1.weight", r"index must .* \[2, 3\], got 0"),
        ("guide", bbb.prune(guide(), 1.0), "scale 0"),
        also=(KeyError,),
    ),
    row(
        "plots.prior_density",
        lambda: {"ax": axes(), "distribution": dist.Normal(0.0, 1.0)},
        ("distribution", dist.Cauchy(0.0, 1.0), "distribution must"),
    ),
    row(
        "ClassificationPrediction.plot",
        lambda: {"self": classes(), "index": 0, "ax": axes()},
        ("index", 4, "index must be"),
    ),
    row(
        "RegressionPrediction.plot",
        lambda: {"self": numbers(), "x": MEANS[:, 0], "ax": axes()},
        ("x", MEANS[:3, 0], "x must have 4 rows"),
    ),
    row("plots.axes", lambda: {"ax": axes()}, ("ax", Figure(), "ax must be a Axes, got Figure")),
    row(
        "plots.image",
        lambda: {"ax": axes(), "x": torch.zeros(4, 4)},
        *[
            ("x", torch.zeros(shape), "expected x of shape")
            for shape in ((5,), (3, 8, 8), (), (2, 1, 8, 8))
        ],
    ),
    *[
        row(
            f"plots.{name}",
            lambda: {"ax": axes(), "prediction": classes(), "index": 0},
            ("index", 4, r"index must be the place of one number of shape \[4\], got 4"),
        )
        for name in ("votes", "class_probabilities")
    ],
    row(
        "plots.risk_coverage",
        lambda: {"ax": axes(), "answers": {"ours": classes()}, "y": LABELS, "minimum": 0.1},
        ("minimum", 1.5, r"minimum must be in \[0, 1\], got 1.5"),
        ("y", LABELS[:2], "y must have the shape of"),
        ("answers", {}, "answers must"),
    ),
    row(
        "plots.regression_band",
        lambda: {"ax": axes(), "x": MEANS, "prediction": numbers(), "truth": TARGETS},
        ("x", MEANS[:2], "x must have 4 rows, got"),
    ),
    row(
        "plots.function_band",
        lambda: {"ax": axes(), "x": MEANS, "functions": MEANS[:, 0].expand(3, 4), "level": 0.9},
        ("level", 0.0, r"level must be in \(0, 1\), got 0"),
        ("x", MEANS[:2], "x must have 4 rows, got"),
        aka={"functions": "functions|x", "x": "x"},
    ),
    row(
        "plots.coverage",
        lambda: {"ax": axes(), "pit": SCORES},
        ("pit", SCORES[:0], r"pit must hold numbers in \[0, 1\].* shape \[0\]"),
        ("pit", SCORES + 0.5, r"pit must hold numbers in \[0, 1\]"),
    ),
    row(
        "plots.pruning_curve",
        lambda: {"ax": axes(), "fractions": [0.0, 0.5], "accuracies": [0.9, 0.8]},
        ("fractions", [0.5], "fractions and accuracies"),
        aka={"fractions": "fractions", "accuracies": "accuracies"},
    ),
    row(
        "plots.snr_density_and_cdf",
        lambda: {"ax": axes(), "snr": bbb.signal_to_noise(guide())},
        ("snr", {}, "snr must"),
    ),
    row(
        "plots.reliability",
        lambda: {"ax": axes(), "probs": PROBS, "y": LABELS, "bins": 5},
        LOGITS,
        ("bins", 0, "bins must be .* got 0"),
        fine=ONE,
        aka=PAIRED,
    ),
    row(
        "plots.entropy_histogram",
        lambda: {"ax": axes(), "inside": SCORES, "outside": SCORES, "bins": 5},
        ("inside", SCORES[:0], "inside must"),
        ("bins", 0, "bins must"),
    ),
]

ROWS = [
    *SUMMARIES,
    *CHAINS,
    *(replace(r, skip={"*: without values": ANY_DEVICE}) for r in METRICS),
    *(replace(r, skip={**NO_AXES, **r.skip}) for r in PLOTS),
]
