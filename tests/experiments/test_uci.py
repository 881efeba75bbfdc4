# SPDX-License-Identifier: Apache-2.0
"""The protocol of `experiments/uci_regression.py`: scaling, units, errors of means, resuming."""

import dataclasses
import json

import numpy as np
import pyro.distributions as dist
import pytest
import scipy.stats
import torch

import pyro_bbb as bbb


@pytest.fixture
def parts(load):
    return load("_helpers.regression_tables")


@pytest.fixture
def experiment(load):
    return load("uci_regression")


@pytest.fixture
def report(load):
    return load("uci_regression")


@pytest.fixture
def quick(experiment, monkeypatch):
    """Splits cost nothing: their scores are their number."""
    done = []

    def scored(task):
        done.append((task.name, task.split))
        scores = {"rmse": float(task.split), "log_likelihood": -1.0, "quantiles": [0.5]}
        return scores | {"seconds": 0.1}

    monkeypatch.setattr(experiment, "run_task", scored)
    return done


def write(folder, name="table", **changes):
    rng = np.random.default_rng(0)
    rows = np.stack([rng.permutation(10) for _ in range(3)])
    arrays = {
        "X": rng.normal(size=(10, 2)),
        "y": rng.normal(size=10),
        "train_index": rows[:, 2:],
        "test_index": rows[:, :2],
    } | changes
    path = folder / name / "data.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


# --- one split ---


def test_densities_and_moments_are_those_of_the_mixture_in_the_targets_unit(parts):
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(5, 4, 3, generator=generator)  # draws, rows, members
    scale = torch.rand(3, generator=generator) + 0.1
    train = torch.tensor([[970.0], [971.0], [975.0]], dtype=torch.float64)
    _, of_y = bbb.data.standardize(train)
    y = torch.tensor([969.0, 972.0, 973.5, 980.0], dtype=torch.float64)
    standardised = bbb.RegressionPrediction(dist.Normal(loc, scale.expand(5, 4, 3)))
    prediction = parts.unscaled(standardised, of_y)

    mean, std = (np.array(x.item()) for x in (of_y.mean, of_y.scale))
    assert (mean, std) == (pytest.approx(972.0), pytest.approx(np.std([970.0, 971.0, 975.0])))
    centre = mean + std * loc.double().permute(0, 2, 1).reshape(15, 4).numpy()
    width = std * scale.double().repeat(5)[:, None].numpy()
    mixture = scipy.stats.norm(centre, width)
    np.testing.assert_allclose(prediction.log_prob(y), np.log(mixture.pdf(y).mean(0)), rtol=1e-12)
    np.testing.assert_allclose(prediction.mean.squeeze(1), centre.mean(0), rtol=1e-12)

    scores = parts.score(prediction, y)
    assert scores["rmse"] == pytest.approx(np.sqrt(((centre.mean(0) - y.numpy()) ** 2).mean()))
    assert scores["log_likelihood"] == pytest.approx(np.log(mixture.pdf(y).mean(0)).mean())
    np.testing.assert_allclose(scores["quantiles"], mixture.cdf(y).mean(0), atol=5.1e-6)
    # the density of the standardised targets, minus ln s
    z = (y - of_y.mean) / of_y.scale
    inner = scipy.stats.norm(loc.permute(0, 2, 1).reshape(15, 4), scale.repeat(5)[:, None])
    np.testing.assert_allclose(
        prediction.log_prob(y), np.log(inner.pdf(z).mean(0)) - np.log(std), rtol=1e-5
    )


@pytest.mark.parametrize("noise", ["constant", "by input"])
def test_networks_side_by_side_do_not_see_each_other(parts, experiment, noise):
    torch.manual_seed(0)
    recipe = dataclasses.replace(experiment.RECIPES["ours"], noise=noise, members=2)
    network = parts.grouped_network(recipe, 3, 4)
    hidden, output = network[0], network[-1]
    torch.nn.init.normal_(output.weight), torch.nn.init.normal_(output.bias)
    x = torch.randn(5, 3)
    outputs = network(x)
    assert outputs.shape == (5, 4 if noise == "by input" else 2)
    for row, predicted in enumerate(outputs.T):  # means of all members, then their raw scales
        member = row % 2
        own = slice(4 * member, 4 * member + 4)
        h = torch.relu(x @ hidden.weight[own].T + hidden.bias[own])
        torch.testing.assert_close(predicted, h @ output.weight[row] + output.bias[row])


def test_dropout_predicts_by_masks_and_the_noise_of_each(parts, experiment):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator)
    changes = {"least_epochs": 1, "least_steps": 20, "draws": 400, "dropout": 0.5}
    recipe = dataclasses.replace(experiment.RECIPES["dropout"], **changes)
    model, guide = parts.train(recipe, (x, x[:, 0]), units=1, seed=0)
    prediction = parts.predict(recipe, model, guide, x, seed=0)
    network = bbb.to_module(model, guide)
    dropped = network[-1].bias  # a mean and a raw scale, without the one unit
    kept = 2 * network(x) - dropped  # a unit that is kept counts twice
    noise = torch.nn.functional.softplus
    means, scales = prediction.components.loc[..., 0], prediction.components.scale[..., 0]
    there = (means - kept[:, 0]).abs() < (means - dropped[0]).abs()
    expected = torch.where(there[..., None], kept, dropped)
    torch.testing.assert_close(means, expected[..., 0])
    torch.testing.assert_close(scales, noise(expected[..., 1]))
    active = (kept - dropped).abs()[:, 0] > 0.01
    assert active.any() and there[:, active].any(0).all() and (~there[:, active]).any(0).all()


def task(parts, experiment, path, **changes):
    recipe = dataclasses.replace(
        experiment.RECIPES["published"], least_epochs=1, units=3, units_of_large=5, draws=3
    )
    defaults = {"split": 1, "part": "test", "recipe": recipe, "seed": 0}
    return parts.Task("table", str(path), **defaults | changes)


@pytest.mark.parametrize("part", ["test", "validation"])
def test_scores_are_of_rows_that_are_not_trained_on(parts, experiment, tmp_path, monkeypatch, part):
    y = np.arange(10.0) ** 2
    path = write(tmp_path, y=y, X=np.stack([y, -y], 1))  # a row's input is its number
    seen = {}
    train, predict = parts.train, bbb.predict

    def watched(recipe, data, *args):
        seen["trained"] = data[0]
        return train(recipe, data, *args)

    def watched_too(model, guide, x, **options):
        seen["scored"] = x
        return predict(model, guide, x, **options)

    monkeypatch.setattr(parts, "train", watched)
    monkeypatch.setattr(bbb, "predict", watched_too)
    scores = parts.run_task(task(parts, experiment, path, part=part))

    table = bbb.data.read_uci(path, dtype=torch.float64)
    (x, _), (x_test, _) = table.split(1)
    inner = bbb.data.split(x, x, fraction=0.2, seed=task(parts, experiment, path).own_seed)
    kept = x if part == "test" else inner[0][0]
    _, scaling = bbb.data.standardize(kept)

    def rows(x):
        return set(
            (x.double() * scaling.scale + scaling.mean)[:, 0].abs().sqrt().round().int().tolist()
        )

    own, test = (set(index[1].tolist()) for index in (table.train_index, table.test_index))
    trained, scored = rows(seen["trained"]), rows(seen["scored"])
    if part == "test":
        assert trained == own and scored == test
    else:  # a fifth of eight
        assert trained | scored == own and not trained & scored and len(scored) == 2
    assert len(scores["quantiles"]) == 2


# --- the whole run ---


def run(experiment, root, output, **options):
    options = {"data_root": root, "datasets": ("table",), "output": output} | options
    return experiment.main(experiment.Config(**options))


def test_metrics_are_means_over_the_splits_and_how_sure_they_are(load, experiment, quick, tmp_path):
    write(tmp_path)
    results = run(experiment, tmp_path, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "metrics.json").read_text()) == results
    expected = scipy.stats.sem([0.0, 1.0, 2.0])
    assert results["table"]["rmse"] == {"mean": 1.0, "standard_error": pytest.approx(expected)}
    assert results["table"]["log_likelihood"] == {"mean": -1.0, "standard_error": 0.0}
    assert results["table"]["splits"] == 3
    assert set(results) - {"table"} == set(load("_helpers.regression_tables").RESERVED)
    first = run(experiment, tmp_path, tmp_path / "one", splits=1)
    assert first["table"]["rmse"] == {"mean": 0.0, "standard_error": None}


def test_what_is_done_is_not_done_again(experiment, quick, tmp_path, monkeypatch):
    write(tmp_path)
    write(tmp_path, "other", X=np.random.default_rng(2).normal(size=(10, 3)))
    options = {"datasets": ("table", "other"), "output": tmp_path / "out"}
    scored, left = experiment.run_task, iter(range(4))

    def interrupted(task):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return scored(task)

    monkeypatch.setattr(experiment, "run_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path, **options)
    assert len(quick) == 4 and {name for name, _ in quick[:3]} == {"other"}  # the larger one first
    monkeypatch.setattr(experiment, "run_task", scored)
    results = run(experiment, tmp_path, **options)
    assert len(quick) == len(set(quick)) == 6
    assert results["table"]["splits"] == results["other"]["splits"] == 3
    assert run(experiment, tmp_path, **options)["table"] == results["table"] and len(quick) == 6


@pytest.mark.parametrize("below", [".", "uci"])
def test_tables_are_found_in_either_layout(experiment, tmp_path, monkeypatch, below):
    paths = {name: write(tmp_path / below, name) for name in ("b", "a")}
    assert experiment.find_tables(tmp_path, ()) == paths
    assert list(experiment.find_tables(tmp_path, ("b", "a"))) == ["b", "a"]
    monkeypatch.setenv("PYRO_BBB_DATA", str(tmp_path))
    assert experiment.find_tables(None, ("a",)) == {"a": paths["a"]}


def test_what_is_not_there_is_named(experiment, tmp_path, monkeypatch):
    monkeypatch.delenv("PYRO_BBB_DATA", raising=False)
    find = experiment.find_tables
    for root in (None, tmp_path / "absent", tmp_path):
        with pytest.raises(FileNotFoundError, match="a folder with NAME/data.*there are none"):
            find(root, ())
    write(tmp_path, "b")
    with pytest.raises(FileNotFoundError, match="there are b, got c"):
        find(tmp_path, ("c",))
    write(tmp_path, "seed")
    with pytest.raises(ValueError, match="datasets must not be called"):
        find(tmp_path, ("seed",))


def test_a_broken_table_stops_the_run_before_the_first_split(experiment, quick, tmp_path):
    write(tmp_path)
    write(tmp_path, "broken", y=np.zeros(4))
    with pytest.raises(ValueError, match="X and y of .*broken.* equally many rows, got 10 and 4"):
        run(experiment, tmp_path, tmp_path / "out", datasets=("table", "broken"))
    assert not quick


# --- compared with published scores ---


# --- gap splits ---


def test_a_gap_is_the_middle_third_of_a_feature(load):
    gaps = load("gap_splits")
    x, y = torch.randn(10, 3), torch.arange(10)
    (x_train, y_train), (x_test, y_test) = gaps.gap_split(x, y, 1)
    assert sorted(torch.cat([y_train, y_test]).tolist()) == list(range(10))
    assert torch.equal(x[y_train], x_train) and torch.equal(x[y_test], x_test)
    low, high = x_test[:, 1].min(), x_test[:, 1].max()
    assert (x_train[:, 1] < low).sum() == 4 and (x_train[:, 1] > high).sum() == 3
