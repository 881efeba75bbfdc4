# SPDX-License-Identifier: Apache-2.0
"""Bad input to what is made of predictions: their uncertainty, scores, chains and pictures."""

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure

import pyro_bbb as bbb
from pyro_bbb import likelihoods
from pyro_bbb.distributions import observation as families
from pyro_bbb.prediction import ClassificationPrediction, RegressionPrediction
from pyro_bbb.training.history import Record
from tests._support.bad_input import Row, by_name, judge_all

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
    Row(
        "ClassificationPrediction.refuse",
        lambda: {"self": classes(), "threshold": 0.5},
        bad={
            "above 1": ({"threshold": 1.5}, r"threshold must be in \[0, 1\], got 1.5"),
            "below 0": ({"threshold": -0.5}, r"threshold must be in \[0, 1\], got -0.5"),
            "NaN": ({"threshold": NAN}, r"threshold must be in \[0, 1\], got nan"),
        },
        fine={"0": {"threshold": 0}, "1": {"threshold": 1}},
    ),
    Row(
        "ClassificationPrediction.log_prob",
        lambda: {"self": classes(), "y": LABELS},
        bad={
            "label 3": ({"y": LABELS + 1}, r"labels in \[0, 2\], got 1 to 3"),
            "label -1": ({"y": LABELS - 1}, r"labels in \[0, 2\], got -1 to 1"),
            "one-hot": ({"y": torch.eye(4, 3).long()}, r"shape \[4\], got torch.int64 \[4, 3\]"),
            "floats": ({"y": LABELS.float()}, "integer"),
            "broadcast": ({"y": LABELS[:1]}, r"shape \[4\], got torch.int64 \[1\]"),
            "a column": ({"y": LABELS[:, None]}, r"shape \[4\], got torch.int64 \[4, 1\]"),
        },
    ),
    Row(
        "RegressionPrediction.log_prob",
        lambda: {"self": numbers(), "y": TARGETS},
        bad={
            "broadcast": ({"y": TARGETS.expand(4, 4)}, r"expected y of shape \[n, 1\]"),
            "rows": ({"y": TARGETS[:2]}, "expected y of 4 rows, got 2"),
        },
        fine={"flat": {"y": TARGETS[:, 0]}, "huge": {"y": TARGETS * 1e30}},
    ),
    Row(
        "RegressionPrediction.rescaled",
        lambda: {"self": numbers(), "mean": 1.0, "scale": 2.0},
        bad={
            "negative": ({"scale": -1.0}, "scale must be positive"),
            "zero": ({"scale": 0.0}, "scale must be positive"),
            "NaN": ({"mean": math.nan}, "mean must be finite"),
            "text": ({"mean": "1"}, "mean must be"),
        },
        fine={"by target": {"mean": torch.zeros(1), "scale": torch.ones(1)}},
    ),
    Row("RegressionPrediction.cdf", lambda: {"self": numbers(), "value": TARGETS}),
    *[
        Row(
            f"RegressionPrediction.{name} {kind}",
            lambda make=make, argument=argument: {"self": make(), argument: 0.9},
            bad={
                "1": ({argument: 1.0}, rf"{argument} must be in \(0, 1\), got 1"),
                "0": ({argument: 0}, rf"{argument} must be in \(0, 1\), got 0"),
                "above 1": ({argument: 95}, rf"{argument} must be in \(0, 1\), got 95"),
                "NaN": ({argument: NAN}, rf"{argument} must be in \(0, 1\), got nan"),
            },
        )
        for name, argument in (("quantile", "probability"), ("interval", "level"))
        for kind, make in {
            "of normals": numbers,
            "of counts": counts,
            "of points": lambda: numbers(1e-38),
            "of huge scale": lambda: numbers(1e38),
        }.items()
    ],
]

PROBABILITIES = {
    "no rows": ({"probs": PROBS[:0], "y": LABELS[:0]}, "probs must not be empty"),
    "rows differ": ({"y": LABELS[:2]}, r"expected y of shape \[4\] to match probs, got \[2\]"),
    "logits": ({"probs": PROBS.log()}, "probs must be non-negative with rows summing to 1"),
    "no sum": ({"probs": PROBS * 2}, "probs must be non-negative with rows summing to 1"),
    "draws": ({"probs": PROBS.expand(2, 4, 3)}, r"expected y of shape \[2, 4\] to match probs"),
    "label 3": ({"y": LABELS + 1}, "y must hold labels in 0 .. 2"),
    "label -1": ({"y": LABELS - 1}, r"labels in 0 \.\. 2, got labels in -1 \.\. 1"),
    "NaN": ({"probs": PROBS * NAN}, "probs must not have NaN, got one at element 0"),
    "below 0": ({"probs": PROBS + torch.tensor([0.5, -0.5, 0.0])}, "row 0 has minimum -0.3"),
    "words": ({"probs": np.array(["a"] * 4)}, "probs must be a tensor.*got ndarray"),
    "integers": ({"probs": PROBS.long()}, "probs must be a floating tensor.*int64"),
    "one row": ({"probs": PROBS[0]}, r"probs of shape \[n, classes\], got \[3\]"),
    "a list": ({"y": LABELS.tolist()}, "y must be a tensor of integer labels .*got list"),
    "floats": ({"y": LABELS.float()}, "y must be.*integer labels .*got dtype torch.float32"),
    "flags": ({"y": LABELS.bool()}, "y must be.*integer labels .*got dtype torch.bool"),
    "a column": ({"y": LABELS[:, None]}, r"y of shape \[4\].*got \[4, 1\]"),
}
ONE = {
    "a single row": {"probs": PROBS[:1], "y": LABELS[:1]},
    "numpy": {"probs": PROBS.numpy(), "y": LABELS.numpy()},
}
DRAWS = torch.linspace(0, 40, 16).sin().reshape(2, 8)
ANY_DEVICE = "scores are computed on the CPU from any device; of this one torch says: no data"
PAIRED = {"probs": r"\bprobs\b|\by\b", "y": r"\by\b"}
METRICS = [
    *[
        Row(
            f"metrics.{name}",
            lambda: {"probs": PROBS, "y": LABELS},
            bad=PROBABILITIES,
            fine=ONE,
            aka=PAIRED,
            skip={"*: without values": ANY_DEVICE},
        )
        for name in ("accuracy", "nll", "brier", "recall")
    ],
    Row(
        "metrics.macro_auroc",
        lambda: {"probs": PROBS, "y": LABELS},
        bad={**PROBABILITIES, "one class": ({"y": 0 * LABELS + 1}, "two classes.*got only 1")},
        fine={"numpy": ONE["numpy"]},
        aka=PAIRED,
        skip={"*: without values": ANY_DEVICE},
    ),
    Row(
        "metrics.ece",
        lambda: {"probs": PROBS, "y": LABELS, "bins": 5},
        bad={**PROBABILITIES, "no bins": ({"bins": 0}, "bins must be at least 1, got 0")},
        fine=ONE,
        aka=PAIRED,
        skip={"*: without values": ANY_DEVICE},
    ),
    Row(
        "metrics.auroc",
        lambda: {"positive_scores": SCORES, "negative_scores": SCORES},
        bad={
            "none": ({"positive_scores": SCORES[:0]}, "positive_scores must not be empty"),
            "no negative": ({"negative_scores": SCORES[:0]}, "negative_scores must not be empty"),
            "NaN": ({"positive_scores": SCORES * NAN}, "must not have NaN.*element 0"),
            "a column": ({"positive_scores": SCORES[:, None]}, r"positive_scores of shape \[n\]"),
            "a list": ({"positive_scores": [1.0]}, "positive_scores must be a tensor.*got list"),
        },
        fine={"infinite": {"positive_scores": SCORES / 0}},
        skip={"*: without values": ANY_DEVICE},
    ),
    Row(
        "metrics.refusal_p_value",
        lambda: {"loss": SCORES, "refused": RIGHT},
        bad={
            "labels": ({"refused": LABELS}, "refused must be a bool tensor"),
            "rows differ": ({"refused": RIGHT[:2]}, r"same shape, got \[2\] and \[4\]"),
            "NaN": ({"loss": SCORES * NAN}, "loss must not have NaN"),
            "infinite": ({"loss": SCORES / 0}, "loss must be finite"),
            "a column": ({"loss": SCORES[:, None]}, r"expected loss of shape \[n\]"),
            "none": ({"loss": SCORES[:0], "refused": RIGHT[:0]}, "loss must not be empty"),
        },
        fine={"numpy": {"loss": SCORES.numpy(), "refused": RIGHT.numpy()}},
        skip={"*: without values": ANY_DEVICE},
    ),
    *[
        Row(
            f"metrics.{name}",
            lambda: {"confidence": SCORES, "correct": RIGHT},
            bad={
                "labels": ({"correct": LABELS}, "correct must be a bool tensor"),
                "rows differ": ({"correct": RIGHT[:2]}, r"same shape, got \[2\] and \[4\]"),
                "NaN": ({"confidence": SCORES * NAN}, "confidence must not have NaN"),
                "none": (
                    {"confidence": SCORES[:0], "correct": RIGHT[:0]},
                    "confidence must not be empty",
                ),
            },
            fine={
                "a single row": {"confidence": SCORES[:1], "correct": RIGHT[:1]},
                "numpy": {"confidence": SCORES.numpy(), "correct": RIGHT.numpy()},
            },
            skip={"*: without values": ANY_DEVICE},
        )
        for name in ("risk_coverage", "area_under_risk_coverage")
    ],
    *[
        Row(
            f"metrics.{name}",
            lambda: {"values": DRAWS},
            bad={
                "three draws": ({"values": DRAWS[:, :3]}, "at least 4 draws per chain, got 3"),
                "one dimension": ({"values": DRAWS[0]}, r"values \[chains, draws, ...\].*\[8\]"),
                "flags": ({"values": DRAWS > 0}, "values must be a tensor of real numbers"),
                words: bad,
            },
            fine={"numpy": {"values": DRAWS.numpy()}, "NaN": {"values": DRAWS * NAN}},
            skip={"*: without values": ANY_DEVICE},
        )
        for name, words, bad in (
            ("r_hat", "one chain", ({"values": DRAWS[:1]}, "must be of 2 chains, got 1")),
            ("ess", "unknown", ({"kind": "head"}, "kind must be one of")),
        )
    ],
    Row(
        "metrics.pareto_k",
        lambda: {"log_weights": DRAWS[0]},
        bad={
            "infinite": ({"log_weights": DRAWS[0] + INF}, "log_weights must be below inf"),
            "a matrix": ({"log_weights": DRAWS}, r"log_weights of shape \[n\]"),
        },
        fine={"numpy": {"log_weights": DRAWS[0].numpy()}},
        skip={"*: without values": ANY_DEVICE},
    ),
    Row(
        "metrics.rmse",
        lambda: {"mean": MEANS, "y": TARGETS},
        bad={
            "broadcast": ({"y": TARGETS[:, 0]}, r"same shape, got \[4, 1\] and \[4\]"),
            "NaN": ({"y": TARGETS * NAN}, "y must not have NaN"),
            "infinite": ({"mean": MEANS + INF}, "mean must be finite"),
            "none": ({"mean": MEANS[:0], "y": TARGETS[:0]}, "mean must not be empty"),
            "words": ({"mean": np.array(["a"] * 4)}, "mean must be a tensor, got ndarray"),
        },
        fine={"numpy": {"mean": MEANS.numpy(), "y": TARGETS.numpy()}},
        skip={"*: without values": ANY_DEVICE},
    ),
    Row(
        "metrics.coverage",
        lambda: {"lower": MEANS - 1, "upper": MEANS + 1, "y": TARGETS},
        bad={
            "crossed": ({"lower": MEANS + 2}, "upper must not be below lower"),
            "broadcast": ({"upper": MEANS[:, 0] + 1}, "upper and y must have the same"),
            "NaN": ({"upper": MEANS * NAN}, "upper must not have NaN"),
        },
        aka={"lower": "lower|upper"},
        fine={"infinite": {"lower": MEANS - INF, "upper": MEANS + INF}},
        skip={"*: without values": ANY_DEVICE},
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
    Row(
        "Chains.ess",
        lambda: {"self": chains(), "kind": "bulk"},
        bad={"3 draws": ({"self": chains(2, 3)}, "at least 4 draws per chain, got 3")},
    ),
    Row(
        "Chains.r_hat",
        lambda: {"self": chains()},
        bad={
            "one chain": ({"self": chains(1)}, "must be of 2 chains, got 1"),
            "3 draws": ({"self": chains(2, 3)}, "at least 4 draws per chain, got 3"),
        },
    ),
    Row(
        "Chains.thin",
        lambda: {"self": chains(), "num_samples": 2},
        bad={"none": ({"num_samples": 0}, "num_samples must be an integer of at least 1")},
    ),
    Row("Chains.to", lambda: {"self": chains(), "device": "cpu", "dtype": torch.float64}),
    Row(
        "Chains.to_arviz",
        lambda: {"self": chains()},
        bad={
            "no data": ({"model": guide().model}, "model and data must be given together"),
            "no model": ({"data": (MEANS, TARGETS)}, "model and data must be given together"),
            "a model of text": ({"model": "bnn", "data": (MEANS, TARGETS)}, "model must be a"),
        },
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
    Row(
        "plots.loss_parts",
        lambda: {"ax": axes(), "history": history(), "unit": "epoch"},
        bad={"empty": ({"history": Record()}, "history must")},
        skip={"unit: *": "any text", **NO_AXES},
    ),
    *[
        Row(
            f"plots.{name}",
            lambda: {"ax": axes(), "guide": guide()},
            bad={
                "unknown": ({"sites": ["fc9"]}, "no latent named"),
                "none": ({"sites": []}, "site"),
            },
            also=(KeyError,),
            skip=NO_AXES,
        )
        for name in ("weight_locs", "weight_scales")
    ],
    Row(
        "plots.weight_density",
        lambda: {"ax": axes(), "guide": guide(), "name": "network.fc1.bias", "index": 0},
        bad={
            "beyond": (
                {"index": 7},
                r"index must be the place of one number of shape \[2\], got 7",
            ),
            "too few": ({"name": "network.fc1.weight"}, r"index must .* \[2, 3\], got 0"),
            "pruned": ({"guide": bbb.prune(guide(), 1.0)}, "scale 0"),
        },
        also=(KeyError,),
        skip=NO_AXES,
    ),
    Row(
        "plots.prior_density",
        lambda: {"ax": axes(), "distribution": dist.Normal(0.0, 1.0)},
        bad={
            "no moments": ({"distribution": dist.Cauchy(0.0, 1.0)}, "distribution must"),
            "not scalar": ({"distribution": dist.Normal(torch.zeros(2), 1.0)}, "distribution must"),
        },
        skip=NO_AXES,
    ),
    Row(
        "ClassificationPrediction.plot",
        lambda: {"self": classes(), "index": 0, "ax": axes()},
        bad={"beyond": ({"index": 4}, "index must be")},
        skip=NO_AXES,
    ),
    Row(
        "RegressionPrediction.plot",
        lambda: {"self": numbers(), "x": MEANS[:, 0], "ax": axes()},
        bad={"rows differ": ({"x": MEANS[:3, 0]}, "x must have 4 rows")},
        skip=NO_AXES,
    ),
    Row(
        "plots.axes",
        lambda: {"ax": axes()},
        bad={"a figure": ({"ax": Figure()}, "ax must be a Axes, got Figure")},
    ),
    Row(
        "plots.image",
        lambda: {"ax": axes(), "x": torch.zeros(4, 4)},
        bad={
            f"shape {shape}": ({"x": torch.zeros(shape)}, "expected x of shape")
            for shape in ((5,), (3, 8, 8), (), (2, 1, 8, 8))
        },
        skip=NO_AXES,
    ),
    *[
        Row(
            f"plots.{name}",
            lambda: {"ax": axes(), "prediction": classes(), "index": 0},
            bad={
                "beyond": (
                    {"index": 4},
                    r"index must be the place of one number of shape \[4\], got 4",
                )
            },
            skip=NO_AXES,
        )
        for name in ("votes", "class_probabilities")
    ],
    Row(
        "plots.risk_coverage",
        lambda: {"ax": axes(), "answers": {"ours": classes()}, "y": LABELS, "minimum": 0.1},
        bad={
            "above 1": ({"minimum": 1.5}, r"minimum must be in \[0, 1\], got 1.5"),
            "rows differ": ({"y": LABELS[:2]}, "y must have the shape of"),
            "none": ({"answers": {}}, "answers must"),
        },
        skip=NO_AXES,
    ),
    Row(
        "plots.regression_band",
        lambda: {"ax": axes(), "x": MEANS, "prediction": numbers(), "truth": TARGETS},
        bad={"rows differ": ({"x": MEANS[:2]}, "x must have 4 rows, got")},
        skip=NO_AXES,
    ),
    Row(
        "plots.function_band",
        lambda: {"ax": axes(), "x": MEANS, "functions": MEANS[:, 0].expand(3, 4), "level": 0.9},
        bad={
            "0": ({"level": 0.0}, r"level must be in \(0, 1\), got 0"),
            "1": ({"level": 1.0}, r"level must be in \(0, 1\), got 1"),
            "rows differ": ({"x": MEANS[:2]}, "x must have 4 rows, got"),
        },
        aka={"functions": "functions|x", "x": "x"},
        skip=NO_AXES,
    ),
    Row(
        "plots.coverage",
        lambda: {"ax": axes(), "pit": SCORES},
        bad={
            "none": ({"pit": SCORES[:0]}, r"pit must hold numbers in \[0, 1\].* shape \[0\]"),
            "above 1": ({"pit": SCORES + 0.5}, r"pit must hold numbers in \[0, 1\]"),
            "NaN": ({"pit": SCORES * NAN}, r"pit must hold numbers in \[0, 1\]"),
        },
        skip=NO_AXES,
    ),
    Row(
        "plots.pruning_curve",
        lambda: {"ax": axes(), "fractions": [0.0, 0.5], "accuracies": [0.9, 0.8]},
        bad={"lengths differ": ({"fractions": [0.5]}, "fractions and accuracies")},
        aka={"fractions": "fractions", "accuracies": "accuracies"},
        skip=NO_AXES,
    ),
    Row(
        "plots.snr_density_and_cdf",
        lambda: {"ax": axes(), "snr": bbb.signal_to_noise(guide())},
        bad={
            "empty": ({"snr": {}}, "snr must"),
            "all pruned": ({"snr": {"fc1.weight": torch.zeros(3)}}, "snr must"),
        },
        skip=NO_AXES,
    ),
    Row(
        "plots.reliability",
        lambda: {"ax": axes(), "probs": PROBS, "y": LABELS, "bins": 5},
        bad={"logits": PROBABILITIES["logits"], "no bins": ({"bins": 0}, "bins must be .* got 0")},
        fine=ONE,
        aka=PAIRED,
        skip=NO_AXES,
    ),
    Row(
        "plots.entropy_histogram",
        lambda: {"ax": axes(), "inside": SCORES, "outside": SCORES, "bins": 5},
        bad={
            "none": ({"inside": SCORES[:0]}, "inside must"),
            "no bins": ({"bins": 0}, "bins must"),
        },
        skip=NO_AXES,
    ),
]

ROWS = [*SUMMARIES, *METRICS, *CHAINS, *PLOTS]


@pytest.mark.parametrize("row", by_name(ROWS))
def test_bad_input(row):
    judge_all(row)
