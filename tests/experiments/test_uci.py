# SPDX-License-Identifier: Apache-2.0
"""The protocol of `experiments/uci_regression.py`: scaling, units, errors of means, resuming."""

import dataclasses
import json
import math

import numpy as np
import pyro.distributions as dist
import pytest
import scipy.stats
import torch

import pyro_bbb as bbb


@pytest.fixture
def parts(load):
    return load("_helpers.uci")


@pytest.fixture
def experiment(load):
    return load("uci_regression")


@pytest.fixture
def report(load):
    return load("_helpers.uci_report")


@pytest.fixture
def quick(load, monkeypatch):
    """Splits cost nothing: their scores are their number."""
    done = []

    def scored(task):
        done.append((task.name, task.split))
        return {"rmse": float(task.split), "log_likelihood": -1.0, "quantiles": [0.5]}

    monkeypatch.setattr(load("_helpers.uci"), "run_task", scored)
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


def test_columns_are_standardised_by_the_train_part_alone(parts):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 4)) * [1e-6, 1.0, 1e6, 1.0] + [0.97, 0.0, 1e9, 5.0]
    new = x[:3] + 1.0
    scaling = parts.Scaling.of(torch.tensor(x))
    expected = (new - x.mean(0)) / x.std(0)
    np.testing.assert_allclose(scaling(torch.tensor(new)), expected, rtol=1e-6)
    assert scaling(torch.tensor(x)).dtype == torch.float32
    torch.testing.assert_close(scaling(torch.tensor(x)).mean(0), torch.zeros(4), atol=1e-6, rtol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.998, -288.16, 1e12])
def test_a_column_without_spread_becomes_0_whatever_it_is_elsewhere(parts, value):
    scaling = parts.Scaling.of(torch.full((333, 1), value, dtype=torch.float64))
    elsewhere = torch.tensor([[value], [value + 1e6]], dtype=torch.float64)
    assert scaling(elsewhere).tolist() == [[0.0], [0.0]]


def test_densities_and_moments_are_those_of_the_mixture_in_the_targets_unit(parts):
    generator = torch.Generator().manual_seed(0)
    loc = torch.randn(5, 4, 3, generator=generator)  # draws, rows, members
    scale = torch.rand(3, generator=generator) + 0.1
    of_y = parts.Scaling.of(torch.tensor([[970.0], [971.0], [975.0]], dtype=torch.float64))
    y = torch.tensor([969.0, 972.0, 973.5, 980.0], dtype=torch.float64)
    standardised = bbb.RegressionPrediction(dist.Normal(loc, scale.expand(5, 4, 3)))
    prediction = parts.unscaled(standardised, of_y)

    mean, std = (np.array(part.item()) for part in (of_y.mean, of_y.std))
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
    z = (y - of_y.mean) / of_y.std
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
    for row, found in enumerate(outputs.T):  # means of all members, then their raw scales
        member = row % 2
        own = slice(4 * member, 4 * member + 4)
        h = torch.relu(x @ hidden.weight[own].T + hidden.bias[own])
        torch.testing.assert_close(found, h @ output.weight[row] + output.bias[row])


def test_members_of_unequal_noise_have_each_their_own(parts, experiment):
    """Means come first: a member's likelihood takes its mean and its scale."""
    recipe = dataclasses.replace(experiment.RECIPES["heteroscedastic"], members=2)
    model, _ = parts.model_and_guide(recipe, 1, 3, 10)
    outputs = torch.tensor([[1.0, 2.0, 0.0, 5.0]])
    found = model.likelihood.arguments(outputs)
    assert found["loc"].tolist() == [[1.0, 2.0]]
    torch.testing.assert_close(found["scale"], torch.log1p(torch.tensor([[0.0, 5.0]]).exp()))


def test_dropout_predicts_by_masks_and_the_noise_of_each(parts, experiment):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator)
    changes = {"least_epochs": 1, "least_steps": 20, "draws": 400, "dropout": 0.5}
    recipe = dataclasses.replace(experiment.RECIPES["dropout"], **changes)
    model, guide = parts.train(recipe, (x, x[:, 0]), units=1, seed=0)
    found = parts.predict(recipe, model, guide, x, seed=0)
    network = bbb.to_module(model, guide)
    dropped = network[-1].bias  # a mean and a raw scale, without the one unit
    kept = 2 * network(x) - dropped  # a unit that is kept counts twice
    noise = torch.nn.functional.softplus
    means, scales = found.components.loc[..., 0], found.components.scale[..., 0]
    there = (means - kept[:, 0]).abs() < (means - dropped[0]).abs()
    expected = torch.where(there[..., None], kept, dropped)
    torch.testing.assert_close(means, expected[..., 0])
    torch.testing.assert_close(scales, noise(expected[..., 1]))
    active = (kept - dropped).abs()[:, 0] > 0.01
    assert active.any() and there[:, active].any(0).all() and (~there[:, active]).any(0).all()


def test_members_start_apart_and_have_a_noise_each(parts, experiment):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, generator=generator)
    recipe = dataclasses.replace(
        experiment.RECIPES["ours"], members=3, least_epochs=1, least_steps=20, draws=4
    )
    model, guide = parts.train(recipe, (x, x[:, 0]), units=6, seed=0)
    loc, scale = guide.loc("network.0.weight"), model.likelihood.scale
    assert loc.shape == (18, 2) and len(loc.unique(dim=0)) == 18
    assert scale.shape == (3,) and len(scale.unique()) == 3 and (scale != 1).all()
    again, _ = parts.train(recipe, (x, x[:, 0]), units=6, seed=0)
    assert again.likelihood.scale.equal(scale)


def task(parts, experiment, path, **changes):
    recipe = dataclasses.replace(
        experiment.RECIPES["published"], least_epochs=1, units=3, units_of_large=5, draws=3
    )
    given = {"split": 1, "part": "test", "recipe": recipe, "seed": 0}
    return parts.Task("table", str(path), **given | changes)


@pytest.mark.parametrize("part", ["test", "validation"])
def test_scores_are_of_rows_that_are_not_trained_on(parts, experiment, tmp_path, monkeypatch, part):
    y = np.arange(10.0) ** 2
    path = write(tmp_path, y=y, X=np.stack([y, -y], 1))  # a row's input says which it is
    of_one, seen = parts.Scaling.of, {}
    monkeypatch.setattr(parts.Scaling, "of", lambda v: seen.setdefault(v.shape[1], of_one(v)))
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

    table, scaling = bbb.data.read_uci(path), seen[2]

    def rows(x):
        return set(
            (x.double() * scaling.std + scaling.mean)[:, 0].abs().sqrt().round().int().tolist()
        )

    own, test = (set(index[1].tolist()) for index in (table.train_index, table.test_index))
    trained, scored = rows(seen["trained"]), rows(seen["scored"])
    if part == "test":
        assert trained == own and scored == test
    else:  # a fifth of eight
        assert trained | scored == own and not trained & scored and len(scored) == 2
    kept = torch.tensor(sorted(float(y[row]) for row in trained), dtype=torch.float64)
    assert scaling.mean[0].item() == pytest.approx(kept.mean().item())
    assert len(scores["quantiles"]) == 2


def test_large_tables_get_more_units(parts, experiment, tmp_path, monkeypatch):
    path = write(tmp_path)
    monkeypatch.setattr(parts, "LARGE", 9)
    seen = []

    def train(recipe, data, units, seed):
        seen.append(units)
        raise KeyboardInterrupt

    monkeypatch.setattr(parts, "train", train)
    with pytest.raises(KeyboardInterrupt):
        parts.run_task(task(parts, experiment, path))
    assert seen == [5]


def test_targets_that_do_not_vary_are_refused(parts, experiment, tmp_path):
    path = write(tmp_path, y=np.full(10, 3.0))
    with pytest.raises(ValueError, match="y of .* must vary, got one value in split 1"):
        parts.run_task(task(parts, experiment, path))


def test_splits_have_seeds_of_their_own(parts, experiment, tmp_path):
    path = write(tmp_path)
    tasks = [task(parts, experiment, path, split=k, seed=s) for k in range(3) for s in range(2)]
    tasks.append(dataclasses.replace(tasks[0], name="other"))
    assert len({each.own_seed for each in tasks}) == 7


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
    assert set(results) - {"table"} == set(load("_helpers.uci").RESERVED)
    first = run(experiment, tmp_path, tmp_path / "one", splits=1)
    assert first["table"]["rmse"] == {"mean": 0.0, "standard_error": None}


def test_what_is_done_is_not_done_again(load, experiment, quick, tmp_path, monkeypatch):
    write(tmp_path)
    write(tmp_path, "other", X=np.random.default_rng(2).normal(size=(10, 3)))
    options = {"datasets": ("table", "other"), "output": tmp_path / "out"}
    parts = load("_helpers.uci")
    scored, left = parts.run_task, iter(range(4))

    def interrupted(task):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return scored(task)

    monkeypatch.setattr(parts, "run_task", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path, **options)
    assert len(quick) == 4 and {name for name, _ in quick[:3]} == {"other"}  # the larger one first
    monkeypatch.setattr(parts, "run_task", scored)
    results = run(experiment, tmp_path, **options)
    assert len(quick) == len(set(quick)) == 6
    assert results["table"]["splits"] == results["other"]["splits"] == 3
    assert run(experiment, tmp_path, **options)["table"] == results["table"] and len(quick) == 6


@pytest.mark.parametrize("change", ["recipe", "seed", "part", "data"])
def test_splits_of_another_run_are_done_anew(experiment, quick, tmp_path, change):
    write(tmp_path)
    run(experiment, tmp_path, tmp_path / "out")
    options = {
        "recipe": {"preset": "published"},
        "seed": {"seed": 1},
        "part": {"part": "validation"},
        "data": {},
    }[change]
    if change == "data":
        write(tmp_path, y=np.arange(10.0))
    run(experiment, tmp_path, tmp_path / "out", **options)
    assert len(quick) == 6
    moved = tmp_path / "elsewhere"
    write(moved, y=np.arange(10.0)) if change == "data" else write(moved)
    run(experiment, moved, tmp_path / "out", **options)
    assert len(quick) == 6  # of the same content in another folder


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
    for root in (None, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError, match="data_root must be a folder with NAME/data"):
            find(root, ())
    with pytest.raises(FileNotFoundError, match="data_root must have NAME/data.npz, got .* any"):
        find(tmp_path, ())
    write(tmp_path, "b")
    with pytest.raises(FileNotFoundError, match=r"no c/data\.npz in .* \(there are b\)"):
        find(tmp_path, ("c",))
    for name in ("seed", "../b"):
        with pytest.raises(ValueError, match="datasets must be names of folders"):
            find(tmp_path, (name,))


def test_a_broken_table_stops_the_run_before_the_first_split(experiment, quick, tmp_path):
    write(tmp_path)
    write(tmp_path, "broken", y=np.zeros(4))
    with pytest.raises(ValueError, match="X and y of .*broken.* equally many rows, got 10 and 4"):
        run(experiment, tmp_path, tmp_path / "out", datasets=("table", "broken"))
    assert not quick
    with pytest.raises(ValueError, match="splits must be at least 1, got 0"):
        run(experiment, tmp_path, tmp_path / "out", splits=0)


# --- beside what is published ---


def test_published_figures_are_compared_strictly(experiment):
    def summaries(rmse, log_likelihood):
        figures = {"rmse": rmse, "log_likelihood": log_likelihood}
        return {"yacht": {k: {"mean": v, "standard_error": 0.1} for k, v in figures.items()}}

    def found(*figures):
        return [
            int(n) for n in experiment.report.comparison(summaries(*figures)).split() if n.isdigit()
        ]

    assert found(1.01, -1.62) == [2, 2, 0]
    assert found(1.03, -1.64) == [0, 2, 0]  # better than VI is not enough
    assert found(0.719, -1.259) == [2, 2, 2]
    assert found(0.73, -1.27) == [2, 2, 0]
    assert "No figures" in experiment.report.comparison({"mine": {}})


def test_a_table_without_published_figures_has_ours_alone(report):
    summary = {k: {"mean": 1.0, "standard_error": 0.1} for k in ("rmse", "log_likelihood")}
    assert report.rows_of("mine", summary, "rmse") == {report.OURS: (1.0, 0.1)}


def test_coverage_counts_central_intervals(experiment, report):
    quantiles = np.array([0.01, 0.1, 0.3, 0.5, 0.96])
    for level, share in ((0.1, 0.2), (0.5, 0.4), (0.85, 0.6), (0.95, 0.8), (0.99, 1.0)):
        assert report.coverage(quantiles, level) == pytest.approx(share), level


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        ((2.9034, 0.1812), "2.90 ± 0.18"),
        ((0.000512, 0.0000123), "0.00051 ± 0.00001"),
        ((1.02, 0.05), "1.02 ± 0.05"),
        ((0.01, None), "0.01"),
        ((0.0, None), "0.00"),
        ((4.45, 0.0), "4.45"),
    ],
)
def test_figures_show_the_first_digit_of_their_error(experiment, report, figure, text):
    assert report.shown(figure) == text


@pytest.mark.slow
def test_processes_of_their_own_do_the_same(experiment, tmp_path):
    write(tmp_path)
    options = {"smoke": True, "preset": "published"}
    alone = run(experiment, tmp_path, tmp_path / "one", **options)
    apart = run(experiment, tmp_path, tmp_path / "two", workers=2, **options)
    assert alone["table"]["per_split"] == apart["table"]["per_split"]
    assert math.isfinite(alone["table"]["rmse"]["mean"]) and alone["table"]["splits"] == 2


# --- gap splits ---


def test_a_gap_is_the_middle_third_of_a_feature(load):
    gaps = load("gap_splits")
    x, y = torch.randn(10, 3), torch.arange(10)
    (x_train, y_train), (x_test, y_test) = gaps.gap_split(x, y, 1)
    assert sorted(torch.cat([y_train, y_test]).tolist()) == list(range(10))
    assert torch.equal(x[y_train], x_train) and torch.equal(x[y_test], x_test)
    low, high = x_test[:, 1].min(), x_test[:, 1].max()
    assert (x_train[:, 1] < low).sum() == 4 and (x_train[:, 1] > high).sum() == 3
