# SPDX-License-Identifier: Apache-2.0
"""Out-of-distribution scores by other libraries' densities and neighbours, and laws of refusal."""

import math

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.covariance import ledoit_wolf as sklearn_ledoit_wolf
from sklearn.neighbors import NearestNeighbors
from torch import nn

import pyro_bbb as bbb
from pyro_bbb.evaluation._out_of_distribution import SCORES, ledoit_wolf

SIGMAS = 5  # two-sided false-alarm rate of each Monte Carlo comparison: 6e-7
OF_CLASSES = ["energy", "max_logit", "entropy", "mutual_information"]


def classes(n=600, d=5, c=3, seed=0):
    """Rows of c Normals of different covariances, and their labels, in double precision."""
    maps = torch.randn(c, d, d, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + seed)
    y = torch.randint(c, (n,), generator=generator)
    noise = torch.randn(n, d, 1, dtype=torch.double, generator=generator)
    return (maps[y] @ noise).squeeze(-1) + 2 * y.unsqueeze(1), y


def head(d=5, c=3):
    """A network whose features are its inputs."""
    torch.manual_seed(0)
    return nn.Linear(d, c).double()


def bayesian(likelihood=None, sizes=(5, 8, 3), seed=0):
    """A model in double precision, and draws of its weights."""
    torch.manual_seed(seed)
    network = bbb.BayesianMLP(list(sizes), prior=dist.Normal(0.0, 1.0))
    model = bbb.BayesianModel(network, likelihood or bbb.likelihoods.Categorical(), num_data=600)
    shapes = model.double().latent_shapes().items()
    return model, {name: torch.randn(4, *shape, dtype=torch.double) for name, shape in shapes}


@pytest.mark.parametrize("n", [5, 40, 3000])
def test_covariance_is_that_of_scikit_learn(n):
    x = classes(n)[0] @ torch.randn(5, 20, dtype=torch.double)
    expected, _ = sklearn_ledoit_wolf(x.numpy(), assume_centered=True)
    np.testing.assert_allclose(ledoit_wolf(x).numpy(), expected, rtol=1e-10, atol=1e-10)


def oracle(score, x, y, new, logits):
    """A score in numpy, scipy and scikit-learn, of features that are the inputs."""
    classes = [x[y == c] for c in range(3)]
    means = [rows.mean(0) for rows in classes]

    def covariance(rows):
        return sklearn_ledoit_wolf(rows, assume_centered=True)[0]

    def squares(sigma, mean):
        return np.einsum("ni,ij,nj->n", new - mean, np.linalg.inv(sigma), new - mean)

    within = covariance(np.concatenate([r - m for r, m in zip(classes, means, strict=True)]))
    nearest = -np.min([squares(within, mean) for mean in means], 0)
    if score == "mahalanobis":
        return nearest
    if score == "relative_mahalanobis":
        return nearest + squares(covariance(x - x.mean(0)), x.mean(0))
    if score == "ddu":
        joint = [
            np.log(len(r) / len(x)) + multivariate_normal(m, covariance(r - m)).logpdf(new)
            for r, m in zip(classes, means, strict=True)
        ]
        return logsumexp(joint, axis=0)
    if score == "knn":
        unit = [a / np.linalg.norm(a, axis=1, keepdims=True) for a in (x, new)]
        return -NearestNeighbors(n_neighbors=2).fit(unit[0]).kneighbors(unit[1])[0][:, -1]
    return {"energy": logsumexp(logits, axis=1), "max_logit": logits.max(1)}[score]


@pytest.mark.parametrize("score", [*SCORES[:6]])
def test_scores_are_those_of_other_libraries(score):
    data, (new, _), network = classes(2400), classes(50, seed=1), head()
    detector = bbb.ood(network, None, data, score=score)
    (x, y), _ = bbb.data.split(*data, fraction=0.1, seed=0)  # 2160 rows: the second neighbour
    expected = oracle(score, x.numpy(), y.numpy(), new.numpy(), network(new).detach().numpy())
    np.testing.assert_allclose(detector.score_samples(new).numpy(), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("score", SCORES)
def test_scores_of_a_posterior_are_means_over_its_draws(score):
    (x, y), (new, _), (model, draws) = classes(), classes(50, seed=1), bayesian()
    scores = bbb.ood(model, draws, (x, y), score=score).score_samples(new)
    if score in ("entropy", "mutual_information"):
        prediction = bbb.predict(model, draws, new, estimator="reparam")
        name = {"entropy": "entropy", "mutual_information": "epistemic"}[score]
        expected = -getattr(prediction, name)
    else:
        single = [{name: v[s : s + 1] for name, v in draws.items()} for s in range(4)]
        detectors = [bbb.ood(model, draw, (x, y), score=score) for draw in single]
        expected = torch.stack([d.score_samples(new) for d in detectors]).mean(0)
    torch.testing.assert_close(scores, expected, rtol=1e-10, atol=1e-12)


def test_a_network_has_the_scores_of_the_posterior_that_is_a_point():
    (x, y), (new, _), (model, _) = classes(), classes(50, seed=1), bayesian()
    guide = bbb.guides.make("delta", model, init_loc="he")
    network = bbb.to_module(model, guide)
    for score in SCORES[:-1]:
        of_guide = bbb.ood(model, guide, (x, y), score=score, num_samples=2)
        of_network = bbb.ood(network, None, (x, y), score=score)
        torch.testing.assert_close(of_guide.score_samples(new), of_network.score_samples(new))


# --- laws ---


def test_mahalanobis_is_invariant_under_linear_maps_of_the_features():
    """Exactly under rotation, scaling and shift; the shrinkage of others vanishes as 1 / n."""
    (x, y), (new, _) = classes(20_000), classes(50, seed=1)
    general = torch.randn(5, 5, dtype=torch.double, generator=torch.Generator().manual_seed(2))
    rotation, _ = torch.linalg.qr(general)
    expected = bbb.ood(head(), None, (x, y), score="mahalanobis").score_samples(new)
    for matrix, tolerance in ((3 * rotation, 1e-9), (general, 0.02)):
        detector = bbb.ood(head(), None, (x @ matrix + 1, y), score="mahalanobis")
        scores = detector.score_samples(new @ matrix + 1)
        torch.testing.assert_close(scores, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("score", ["mahalanobis", "knn"])
def test_as_many_rows_like_the_training_data_are_refused_as_the_fraction_says(score):
    n, m, fraction = 1000, 20_000, 0.1  # k / (n + 1) of the law, given the k-th of n held-out rows
    detector = bbb.ood(head(), None, classes(2 * n), score=score, fraction=fraction, held_out=0.5)
    refused = (detector.predict(classes(m, seed=1)[0]) == -1).double().mean().item()
    error = math.sqrt(fraction * (1 - fraction) * (1 / n + 1 / m))
    assert refused == pytest.approx(math.floor((n + 1) * fraction) / (n + 1), abs=SIGMAS * error)


@pytest.mark.parametrize("score", SCORES[:4])
def test_rows_far_from_all_others_are_refused(score):
    data, network = classes(), nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    detector = bbb.ood(network, None, data, score=score, layer="")
    far = 100 * torch.randn(20, 5, dtype=torch.double) * torch.tensor([1, -1, 1, -1, 1.0])
    scores = detector.score_samples(far)
    assert score in ("knn", "relative_mahalanobis") or (detector.predict(far) == -1).all()
    assert scores.shape == (20,) and scores.isfinite().all()


def test_targets_without_classes_are_one_class():
    (x, _), (new, _), network = classes(), classes(50, seed=1), head(c=1)
    detector = bbb.ood(network, None, (x, x[:, :1]), score="ddu")
    (x, _), _ = bbb.data.split(x, x, fraction=0.1, seed=0)
    sigma, _ = sklearn_ledoit_wolf((x - x.mean(0)).numpy(), assume_centered=True)
    expected = multivariate_normal(x.mean(0).numpy(), sigma).logpdf(new.numpy())
    np.testing.assert_allclose(detector.score_samples(new).numpy(), expected, rtol=1e-9)
    for score in (*OF_CLASSES, "relative_mahalanobis"):
        with pytest.raises(ValueError, match="without classes"):
            bbb.ood(network, None, (x, x[:, :1]), score=score)


def test_one_output_of_two_classes_has_their_logits():
    (x, y), (model, draws) = classes(c=2), bayesian(bbb.likelihoods.Bernoulli(), (5, 8, 1))
    detector = bbb.ood(model, draws, (x, y.double().unsqueeze(1)), score="entropy")
    expected = bbb.predict(model, draws, x, estimator="reparam").entropy
    torch.testing.assert_close(detector.score_samples(x), -expected)


# --- features ---


def test_features_of_several_layers_are_moments_of_their_channels(tmp_path):
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 2)
    network = nn.Sequential(*layers)
    x, y = torch.randn(200, 1, 4, 4), torch.arange(200) % 2
    detector = bbb.ood(network, None, (x, y), score="mahalanobis", layer=["0", "3"])
    maps = layers[0](x)
    features = torch.cat([maps.mean((2, 3)), maps.std((2, 3), correction=0), network[:4](x)], 1)
    flat = bbb.ood(nn.Identity(), None, (features.detach(), y), score="mahalanobis", layer="")
    torch.testing.assert_close(detector.score_samples(x), flat.score_samples(features.detach()))
    detector.save(tmp_path / "detector")
    again = bbb.Detector.load(tmp_path / "detector", network)
    torch.testing.assert_close(again.score_samples(x), detector.score_samples(x))


def test_features_are_the_input_of_a_layer_before_others_change_it():
    layers = nn.Flatten(), nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 6), nn.Linear(6, 2)
    network = nn.Sequential(*layers)
    x, y = torch.randn(400, 1, 2, 2), torch.arange(400) % 2
    for layer, features in (
        ("", x.flatten(1)),
        ("2", network[:2](x)),
        ("3", network[:3](x)),
        (None, network[:4](x)),
    ):
        detector = bbb.ood(network, None, (x, y), score="mahalanobis", layer=layer)
        plain = nn.Linear(features.shape[1], 2)
        expected = bbb.ood(plain, None, (features.detach(), y), score="mahalanobis")
        torch.testing.assert_close(detector.score_samples(x), expected.score_samples(features))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


def test_converted_networks_of_images_in_single_precision():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    network = bbb.bayesianize(nn.Sequential(*layers), where="4")
    model = bbb.BayesianModel(network, bbb.likelihoods.Categorical(), num_data=300)
    guide = bbb.guides.make("vbll", model)
    x, y = torch.randn(300, 1, 4, 4), torch.arange(300) % 2
    for score in SCORES:
        detector = bbb.ood(model, guide, (x, y), score=score, num_samples=3, batch_size=64)
        scores = detector.score_samples(-x[:7])
        same = detector.score_samples(-x[:7].numpy(), batch_size=2)
        torch.testing.assert_close(scores, same, rtol=1e-4, atol=1e-5)


def test_a_fit_is_a_function_of_its_seed_and_leaves_the_random_state_alone():
    data, (model, _) = classes(), bayesian()
    guide = bbb.AutoSoftplusNormal(model, init_rho=0.0)
    state = torch.get_rng_state()
    first, second, third = (bbb.ood(model, guide, data, seed=seed) for seed in (0, 0, 1))
    assert first.threshold == second.threshold != third.threshold
    assert torch.equal(torch.get_rng_state(), state)


# --- errors and files ---


def test_what_cannot_be_fitted_is_an_error():
    x, y = classes()
    with pytest.raises(ValueError, match="vary within class 1, got equal ones"):
        bbb.ood(head(), None, (x.masked_fill((y == 1)[:, None], 0.0), y), score="ddu")
    with pytest.raises(ValueError, match=r"x of shape \[7, 4\] does not fit the network"):
        bbb.ood(head(), None, (x, y)).score_samples(x[:7, :4])
    with pytest.raises(ValueError, match="train must have two classes or more"):
        bbb.ood(head(), None, (x, torch.full_like(y, 3)), score="relative_mahalanobis")
    with pytest.raises(ValueError, match="layer must be a path, .* without linear layers"):
        bbb.ood(nn.Tanh(), None, (x, y))
    far = x.index_fill(0, torch.tensor(2), 1.7e308)
    network = head()
    nn.init.ones_(network.weight)
    with pytest.raises(ValueError, match="row 2 of x: the network's features is inf"):
        bbb.ood(network, None, (x, y), score="energy").score_samples(far)


@pytest.mark.parametrize("score", SCORES)
def test_saved_detectors_score_to_the_bit(tmp_path, score):
    data, (new, _), (model, draws) = classes(), classes(50, seed=1), bayesian()
    detector = bbb.ood(model, draws, data, score=score, layer="fc2")
    detector.save(tmp_path / "detector")
    loaded = bbb.Detector.load(tmp_path / "detector", model)
    assert torch.equal(loaded.score_samples(new), detector.score_samples(new))
    assert torch.equal(loaded.predict(new), detector.predict(new))
    assert repr(loaded) == repr(detector)


def test_a_saved_detector_is_of_one_network(tmp_path):
    bbb.ood(head(), None, classes()).save(tmp_path / "detector")
    bbb.save(tmp_path / "model", model := bayesian()[0], bbb.AutoSoftplusNormal(model))
    assert bbb.Detector.load(tmp_path / "detector", head()).score == "ddu"
    other = head()
    nn.init.zeros_(other.bias)
    for folder, network in (("detector", other), ("model", head())):
        with pytest.raises(bbb.LoadError):
            bbb.Detector.load(tmp_path / folder, network)
    bbb.ood(*bayesian(), classes()).save(tmp_path / "detector")  # a model without parameters
    wider = bbb.BayesianModel(bbb.BayesianMLP([5, 99, 3]), bbb.likelihoods.Categorical(), 600)
    with pytest.raises(bbb.LoadError, match="must have the weights of the saved detector's"):
        bbb.Detector.load(tmp_path / "detector", wider)
