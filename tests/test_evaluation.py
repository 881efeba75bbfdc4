# SPDX-License-Identifier: Apache-2.0
"""`evaluate` gives the scores that calls of the metrics by hand give, and tables of them."""

from functools import partial

import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure
from torch.utils.data import TensorDataset

import pyro_bbb as bbb
from pyro_bbb import metrics
from pyro_bbb.prediction import ClassificationPrediction

DRAWS = {"num_samples": 7, "seed": 3}


def posterior(likelihood, sizes):
    torch.manual_seed(0)
    network = bbb.BayesianMLP(sizes, prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, likelihood, num_data=40)
    return model, bbb.AutoSoftplusNormal(model, init_rho=-1.0)


@pytest.fixture(scope="module")
def images():
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(40, 1, 8, 8, generator=generator)
    return x, torch.arange(40) % 3, torch.rand(25, 1, 8, 8, generator=generator)


@pytest.fixture(scope="module")
def of_images(images):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    model = bbb.BayesianModel(bbb.bayesianize(plain), bbb.likelihoods.Categorical(), num_data=40)
    return model, bbb.AutoSoftplusNormal(model, init_rho=-1.0)


def refusal_p(loss, uncertainty):
    """Return the p-value of refusing the 2 most uncertain of 40 examples."""
    refused = torch.zeros(40).bool()
    refused[uncertainty.argsort(descending=True)[:2]] = True
    return metrics.refusal_p_value(loss, refused)


def area(loss, uncertainty):
    """Mean RMSE of the 1, 2, ... most certain examples, by a loop."""
    ordered = loss.double()[uncertainty.argsort()]
    return sum(float(ordered[: i + 1].mean().sqrt()) for i in range(len(ordered))) / len(ordered)


def test_scores_of_classes_are_those_of_the_metrics(images, of_images):
    x, y, noise = images
    darker = 0.5 * x
    shift = {"darker": (darker, y), "fog": 2}
    evaluation = bbb.evaluate(*of_images, (x, y), ood={"noise": noise}, shift=shift, **DRAWS)
    assert list(evaluation.scores) == ["test", "darker", "fog", "noise"]
    ask = partial(bbb.predict, *of_images, **DRAWS)
    shown = {"test": x, "darker": darker, "fog": bbb.data.corrupt(x, "fog", 2)}
    for name, prediction in {name: ask(inputs) for name, inputs in shown.items()}.items():
        assert evaluation.scores[name] == {
            "accuracy": metrics.accuracy(prediction.probs, y),
            "base_rate": 14 / 40,
            "recall": float(metrics.recall(prediction.probs, y).min()),
            "auroc": metrics.macro_auroc(prediction.probs, y),
            "nll": pytest.approx(metrics.nll(prediction.probs, y), rel=1e-6),
            "brier": metrics.brier(prediction.probs, y),
            "ece": metrics.ece(prediction.probs, y),
            "aurc": metrics.area_under_risk_coverage(prediction.confidence, prediction.label == y),
            "aurc_epistemic": metrics.area_under_risk_coverage(
                -prediction.epistemic, prediction.label == y
            ),
            "refusal_p": refusal_p((prediction.label != y).double(), -prediction.confidence),
            "entropy": float(prediction.entropy.double().mean()),
            "epistemic": float(prediction.epistemic.double().mean()),
        }
    test, outside = ask(x), ask(noise)
    assert evaluation.scores["noise"] == {
        "entropy": float(outside.entropy.double().mean()),
        "epistemic": float(outside.epistemic.double().mean()),
        "auroc_entropy": metrics.auroc(outside.entropy, test.entropy),
        "auroc_epistemic": metrics.auroc(outside.epistemic, test.epistemic),
    }
    assert torch.equal(evaluation.predictions["test"].probs, test.probs)
    assert torch.equal(evaluation.recall, metrics.recall(test.probs, y))
    assert torch.equal(evaluation.predictions["noise"].probs, outside.probs)


def test_scores_of_real_targets_are_those_of_the_metrics():
    model, guide = posterior(bbb.likelihoods.Gaussian(0.5), [2, 8, 2])
    x, y = torch.randn(2, 40, 2, generator=torch.Generator().manual_seed(1))
    scores = bbb.evaluate(model, guide, TensorDataset(x, y), ood=5 * x, **DRAWS).scores
    test, outside = (bbb.predict(model, guide, inputs, **DRAWS) for inputs in (x, 5 * x))
    loss, std, epistemic = (
        v.mean(1) for v in ((test.mean - y).double().square(), test.std, test.epistemic_std)
    )
    assert scores["test"] == {
        "aurc_std": pytest.approx(area(loss, std), rel=1e-12),
        "aurc_epistemic_std": pytest.approx(area(loss, epistemic), rel=1e-12),
        "refusal_p": refusal_p(loss, std),
        "rmse": metrics.rmse(test.mean, y),
        "nll": -float(test.log_prob(y).double().mean()),
        "coverage_50": metrics.coverage(*test.interval(0.5), y),
        "coverage_90": metrics.coverage(*test.interval(0.9), y),
        "coverage_95": metrics.coverage(*test.interval(0.95), y),
        "std": float(test.std.mean(1).double().mean()),
        "epistemic_std": float(test.epistemic_std.mean(1).double().mean()),
    }
    auroc = metrics.auroc(outside.epistemic_std.mean(1), test.epistemic_std.mean(1))
    assert scores["out of distribution"]["auroc_epistemic_std"] == auroc > 0.5


def test_several_labels_of_an_input_are_scored_one_by_one():
    logits, y = torch.randn(5, 6, 4, 3), torch.arange(24).reshape(6, 4) % 3
    several = ClassificationPrediction(logits.log_softmax(-1))
    flat = ClassificationPrediction(logits.flatten(1, 2).log_softmax(-1))
    x = torch.zeros(6, 1)
    evaluation = bbb.Evaluation.of(lambda _: several, (x, y), ood=x)
    assert evaluation.scores["test"] == pytest.approx(
        bbb.Evaluation.of(lambda _: flat, (torch.zeros(24, 1), y.flatten())).scores["test"]
    )
    assert evaluation.scores["out of distribution"]["auroc_entropy"] == 0.5
    evaluation.plot()


def test_one_class_has_no_auroc_and_real_targets_no_recall():
    sure = ClassificationPrediction(torch.tensor([0.9, 0.1]).log().expand(1, 3, 2))
    evaluation = bbb.Evaluation.of(lambda _: sure, (torch.zeros(3, 1), torch.zeros(3).long()))
    assert "auroc" not in evaluation.scores["test"] and evaluation.scores["test"]["recall"] == 1
    assert evaluation.recall[0] == 1 and evaluation.recall[1].isnan()
    model, guide = posterior(bbb.likelihoods.Gaussian(0.5), [2, 1])
    with pytest.raises(TypeError, match="must be a ClassificationPrediction"):
        _ = bbb.evaluate(model, guide, (torch.randn(9, 2), torch.randn(9)), **DRAWS).recall


def test_a_function_of_ones_own_is_scored(images, of_images):
    x, y, noise = images
    ask = partial(bbb.predict, *of_images, **DRAWS)
    assert bbb.Evaluation.of(ask, (x, y), ood=noise) == bbb.evaluate(
        *of_images, (x, y), ood=noise, **DRAWS
    )
    hot = bbb.Evaluation.of(bbb.TemperatureScaled(ask, 5.0), (x, y)).scores["test"]
    assert hot["entropy"] > bbb.evaluate(*of_images, (x, y), **DRAWS).scores["test"]["entropy"]


# --- tables and pictures ---


def test_an_evaluation_prints_as_a_table(images, of_images):
    x, y, noise = images
    evaluation = bbb.evaluate(*of_images, (x, y), ood={"a|b": noise}, **DRAWS)
    head, test, outside = str(evaluation).splitlines()
    names = "accuracy  base rate  lowest recall  AUROC  NLL  Brier  ECE  AURC  AURC epistemic"
    names += "  refusal p  entropy  epistemic  AUROC entropy  AUROC epistemic"
    assert head.split() == names.split()
    scores = evaluation.scores["test"]
    assert test.split()[:3] == ["test", f"{scores['accuracy']:.1%}", f"{scores['base_rate']:.1%}"]
    assert len(head) == len(outside)
    markdown = evaluation._repr_markdown_().splitlines()
    assert markdown[1] == "| --- |" + " ---: |" * 14
    assert markdown[3].startswith("| a\\|b |  |  |")
    assert repr(evaluation) == "Evaluation(test, a|b)"


def test_detectors_have_an_auroc_each(images, of_images):
    x, y, noise = images
    fits = (bbb.ood(*of_images, (x, y), score=score, held_out=0.5) for score in ("knn", "energy"))
    detectors = list(fits)
    evaluation = bbb.evaluate(*of_images, (x, y), ood=noise, detectors=detectors, **DRAWS)
    for detector in detectors:
        outside, inside = -detector.score_samples(noise), -detector.score_samples(x)
        scores = evaluation.scores["out of distribution"]
        assert scores[f"auroc_{detector.score}"] == metrics.auroc(outside, inside)
    assert str(evaluation).splitlines()[0].endswith("AUROC knn  AUROC energy")
    assert str(evaluation) == str(
        evaluation.of(
            partial(bbb.predict, *of_images, **DRAWS), (x, y), ood=noise, detectors=detectors
        )
    )
    with pytest.raises(ValueError, match=r"different scores, got \['knn', 'knn'\]"):
        bbb.evaluate(*of_images, (x, y), ood=noise, detectors=[detectors[0]] * 2)
    with pytest.raises(ValueError, match="detectors must be left out without ood"):
        bbb.evaluate(*of_images, (x, y), detectors=detectors)


def test_a_comparison_has_a_column_for_each_model(images, of_images):
    x, y, noise = images
    first = bbb.evaluate(*of_images, (x, y), **DRAWS)
    second = bbb.evaluate(*of_images, (x, y), ood=noise, **DRAWS)
    table = bbb.compare({"first": first, "second": second})
    assert table.scores == {"first": first.scores, "second": second.scores}
    lines = str(table).splitlines()
    accuracy = f"{first.scores['test']['accuracy']:.1%}"
    assert lines[0].split() == ["first", "second"]
    assert lines[1].split() == ["test", "accuracy", accuracy, accuracy]
    area = f"{second.scores['out of distribution']['auroc_entropy']:.1%}"
    assert lines[-2].split() == ["AUROC", "entropy", area]
    assert len(lines) == 1 + 12 + 4
    markdown = table._repr_markdown_().splitlines()
    assert markdown[:2] == ["|  |  | first | second |", "| --- | --- | ---: | ---: |"]
    assert repr(table) == "Comparison(first, second)"


def test_the_picture_has_the_calibration_and_histograms_of_the_uncertainty(images, of_images):
    x, y, noise = images
    figure = bbb.evaluate(*of_images, (x, y), **DRAWS).plot()
    assert [ax.get_xlabel() for ax in figure.axes] == ["confidence"]
    own = Figure()
    assert bbb.evaluate(*of_images, (x, y), ood=noise, **DRAWS).plot(own) is own
    assert [ax.get_xlabel() for ax in own.axes] == ["confidence", "predictive entropy (nats)"]
    model, guide = posterior(bbb.likelihoods.Gaussian(0.5), [2, 1])
    x, y = torch.randn(40, 2), torch.randn(40)
    axes = bbb.evaluate(model, guide, (x, y), ood=3 * x, **DRAWS).plot().axes
    labels = [ax.get_xlabel() for ax in axes]
    assert labels == ["level of the interval", "predictive standard deviation"]
