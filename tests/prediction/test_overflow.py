# SPDX-License-Identifier: Apache-2.0
"""Finite inputs at which a network overflows are errors that name the row, never sure answers."""

import math

import pytest
import torch
from torch import nn

import pyro_bbb as bbb
from pyro_bbb import likelihoods

LIKELIHOODS = {
    "categorical": (likelihoods.Categorical(), 2),
    "gaussian": (likelihoods.Gaussian(0.3), 1),
    "heteroscedastic": (likelihoods.HeteroscedasticGaussian(), 2),
    "poisson": (likelihoods.Poisson(), 1),
}
GOOD = torch.linspace(-1, 1, 12).reshape(4, 3)
BAD = GOOD.clone()
BAD[2] = torch.tensor([3.4e38, -3.4e38, 3.4e38])
ROW_2 = r"^row 2 of x: the network's \w+ is (nan|inf|-inf|0), expected finite numbers; the"


def make(name):
    torch.manual_seed(0)
    likelihood, outputs = LIKELIHOODS[name]
    model = bbb.BayesianModel(bbb.BayesianMLP([3, 8, outputs]), likelihood, 4)
    return model, bbb.AutoSoftplusNormal(model, init_loc="he")


def in_batches(x):
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=3)


DOORS = {
    "predict": lambda m, g: bbb.predict(m, g, BAD, num_samples=5),
    "one row": lambda m, g: bbb.predict(m, g, BAD[2:3], num_samples=5),
    "a loader": lambda m, g: bbb.predict(m, g, in_batches(BAD), num_samples=5),
    "an array": lambda m, g: bbb.predict(m, g, BAD.numpy(), num_samples=5),
    "local_reparam": lambda m, g: bbb.predict(m, g, BAD, num_samples=5, estimator="local_reparam"),
    "linearized": lambda m, g: bbb.predict(m, g, BAD, num_samples=5, linearized=True),
    "draws": lambda m, g: bbb.predict(m, g.sample_posterior(5), BAD),
    "predict_mean": lambda m, g: bbb.predict_mean(m, g, BAD),
    "to_ensemble": lambda m, g: bbb.to_ensemble(m, g, num_samples=5)(BAD),
    "evaluate": lambda m, g: bbb.evaluate(m, g, (GOOD, targets(m)), ood=BAD, num_samples=5),
}


def targets(model):
    classes = isinstance(model.likelihood, likelihoods.Categorical)
    return torch.tensor([0, 1, 1, 0]) if classes else torch.tensor([0.0, 1.0, 1.0, 0.0])[:, None]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_each_door_names_the_row(name, door):
    model, guide = make(name)
    message = ROW_2.replace("row 2", "row 0") if door == "one row" else ROW_2
    with pytest.raises(ValueError, match=message) as error:
        DOORS[door](model, guide)
    assert len(str(error.value)) < 300


class Logits(nn.Module):
    """The inputs as outputs, and a random summand of 0."""

    def __init__(self):
        super().__init__()
        self.summand = bbb.BayesianLinear(2, 2)

    def forward(self, x):
        return torch.where(x > 100, math.inf, torch.where(x < -100, -math.inf, x))


def given_logits(*rows, likelihood):
    model = bbb.BayesianModel(Logits(), likelihood, 2)
    return bbb.predict(model, bbb.AutoSoftplusNormal(model), torch.tensor(rows), num_samples=2)


@pytest.mark.parametrize("row", [(1e3, 0.0), (1e3, -1e3), (1e3, 1e3), (-1e3, -1e3)])
def test_infinite_logits_are_refused(row):
    for likelihood in (likelihoods.Categorical(), likelihoods.Bernoulli()):
        with pytest.raises(
            ValueError, match="^row 1 of x and 1 more: the .* sample_log_probs is nan"
        ):
            given_logits((0.0, 0.0), row, row, likelihood=likelihood)


def test_a_class_that_is_masked_by_minus_infinity_has_probability_0():
    prediction = given_logits((0.0, -1e3), (1.0, 1.0), likelihood=likelihoods.Categorical())
    assert prediction.probs[0].tolist() == [1.0, 0.0]
    assert prediction.epistemic.abs().max() < 1e-6


def test_probabilities_of_nan_are_always_refused():
    log_probs = torch.tensor([[[math.nan, math.nan], [0.0, -math.inf]]])
    prediction = bbb.ClassificationPrediction(log_probs)
    for threshold in (0.0, 0.5, 0.99):
        assert prediction.refuse(threshold).tolist() == [True, False]
    assert prediction.epistemic.isnan().tolist() == [True, False]
    with pytest.raises(ValueError, match="without NaN, got one at row 0"):
        bbb.Evaluation.of(lambda x: prediction, (GOOD[:2], torch.tensor([0, 0])))


@pytest.mark.parametrize("name", ["categorical", "gaussian"])
def test_an_exported_ensemble_is_never_sure(name):
    model, guide = make(name)
    ensemble = bbb.to_ensemble(model, guide, num_samples=3)
    exported = torch.export.export(ensemble, (GOOD,)).module()
    answer = exported(BAD)
    for name in ("probs", "aleatoric", "epistemic") if "probs" in answer else ("std",):
        assert not answer[name][2].isfinite().any()
        assert answer[name][[0, 1, 3]].isfinite().all()
