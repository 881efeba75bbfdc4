# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, compute what they say, and compare contenders that do the same work."""

import dataclasses
import importlib
import itertools
import json
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
import tyro
from pyro import poutine
from torch import nn

import pyro_bbb as bbb

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Modules of the benchmarks by name, imported as when the file is run."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def work(load):
    return load("_parts.tasks").Work(hidden=5, batch=4)


@pytest.fixture
def contenders(load):
    return load("_parts.methods").METHODS


def excused(name, reason):
    """Whether a contender may be missing: a library that is installed runs, except for TyXe."""
    known = reason in ("not installed", "predict takes no estimator", "for classes only")
    return known or name.startswith("TyXe")


# --- the whole command ---


@pytest.mark.slow
def test_smoke_run_leaves_record_and_picture(load, tmp_path, capsys):
    run = load("run")
    results = run.main(run.Config(smoke=True, threads=1, output=tmp_path))

    written = json.loads((tmp_path / "benchmarks.json").read_text())
    assert written == json.loads(json.dumps(results, default=str))
    assert {each["suite"] for each in written["comparisons"]} == {
        "small",
        "guides",
        "tables",
        "steps",
        "epoch",
        "predict",
    }
    for comparison in written["comparisons"]:
        for name, found in comparison["contenders"].items():
            first, third = found["quartiles_ms"]
            assert 0 < first <= found["median_ms"] <= third, name
        assert comparison["contenders"][comparison["floor"]]["ratio"] == 1
    assert written["training_memory"]["deterministic"]["tensors_ratio"] == 1
    assert {"machine", "versions", "commit", "seconds"} <= set(written)
    assert written["machine"]["threads"] == 1 and written["versions"]["torch"]
    assert (tmp_path / "benchmarks.png").read_bytes().startswith(b"\x89PNG")

    printed = capsys.readouterr().out
    for comparison in written["comparisons"]:
        assert f"{comparison['suite']}: {comparison['title']}" in printed
        for name, reason in comparison["absent"].items():
            assert f"- {name}: {reason}" in printed
            assert excused(name, reason), f"{name}: {reason}"
    measured = [aim for aim in written["aims"] if aim["value"] is not None]
    assert len(measured) >= 7
    for aim in measured:
        assert aim["verdict"] == ("reached" if aim["value"] <= aim["limit"] else "not reached")
        assert aim["what"] in printed


def test_the_program_of_the_captured_step_runs_without_a_gpu(load, tmp_path):
    cuda_graph = load("cuda_graph")
    config = cuda_graph.Config(
        widths=(6,), examples=256, epochs=2, device="cpu", output=tmp_path / "out"
    )
    content = cuda_graph.main(config)
    assert content == json.loads((tmp_path / "out" / "cuda_graph.json").read_text())
    row = content["milliseconds_per_step"]["6"]
    assert row.keys() == {"scale mixture", "Gaussian", "ordinary"}
    assert all(value > 0 for value in row.values())


def test_every_option_has_help(load, capsys):
    run = load("run")
    with pytest.raises(SystemExit):
        tyro.cli(run.Config, args=["--help"])
    text = capsys.readouterr().out
    assert all(f"--{field.name}" in text for field in dataclasses.fields(run.Config))


@pytest.mark.slow
def test_one_suite_alone(load, tmp_path):
    run = load("run")
    results = run.main(run.Config(only=("epoch",), smoke=True, threads=1, output=tmp_path))
    assert {each["suite"] for each in results["comparisons"]} == {"epoch"}
    assert not results["training_memory"] and set(results["seconds"]) == {"epoch"}


# --- the same work for everyone ---


def test_contenders_train_equally_many_numbers(contenders, work):
    weights = 784 * 5 + 5 + 5 * 5 + 5 + 5 * 10 + 10
    for name, method in contenders.items():
        trainer = method.prepare(work)
        if isinstance(trainer, str):
            assert method.package is not None and excused(name, trainer), f"{name}: {trainer}"
            continue
        expected = weights if name == "deterministic" else 2 * weights
        assert trainer.num_parameters == expected, name


def test_lenet5_has_the_same_parameters_for_everyone(load, contenders, work):
    lenet5 = dataclasses.replace(work, architecture="lenet5")
    floor, *bayesian = load("_parts.methods").IMAGES
    weights = contenders[floor].prepare(lenet5).num_parameters
    assert weights == 545_546
    for name in bayesian:
        trainer = contenders[name].prepare(lenet5)
        assert isinstance(trainer, str) or trainer.num_parameters == 2 * weights, name


@pytest.mark.parametrize("draws", [1, 3])
def test_plain_pytorch_and_ours_have_one_loss(load, work, draws, monkeypatch):
    """With the same means, scales and noise, in float64, to rounding."""
    torch.set_default_dtype(torch.float64)
    x, y = work.data()
    kl_weight = len(x) / load("_parts.tasks").NUM_DATA
    model, guide = load("_parts.pyro_methods").guided(work)
    plain = load("_parts.baselines").PlainMLP(work.sizes)
    with torch.no_grad():  # large scales, so that no term of the loss is small
        for site in guide.site_names:
            layer, kind = site.removeprefix("network.").split(".")
            mu, rho = (getattr(plain, layer).get_parameter(f"{kind}_{p}") for p in ("mu", "rho"))
            rho += 3.0
            guide.get_parameter(f"locs.{site}").copy_(mu)
            guide.get_parameter(f"rhos.{site}").copy_(rho)

    losses, noise = [], []
    for _ in range(draws):
        guide_trace = poutine.trace(guide).get_trace(x, y, kl_weight)
        model_trace = poutine.trace(poutine.replay(model, guide_trace)).get_trace(x, y, kl_weight)
        losses.append(guide_trace.log_prob_sum() - model_trace.log_prob_sum())
        for layer, kind in itertools.product(["fc1", "fc2", "fc3"], ["weight", "bias"]):
            site = f"network.{layer}.{kind}"
            value = guide_trace.nodes[site]["value"]
            noise.append((value - guide.loc(site)) / guide.scale(site))
    supply = iter(noise)
    monkeypatch.setattr(torch, "randn_like", lambda like: next(supply).reshape(like.shape))
    loss = plain.loss(x, y, kl_weight, draws)
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("estimator", ["reparam", "local_reparam", "flipout", "stl"])
def test_measured_steps_are_those_of_fit(load, work, estimator):
    """Every step goes through the meter, and together they are what `fit` does."""
    model, guide = load("_parts.pyro_methods").guided(work, num_data=work.batch)
    before = {name: parameter.detach().clone() for name, parameter in guide.named_parameters()}
    options = {"estimator": estimator, "num_particles": 2}
    measured, rest = [], {"lr": work.lr, "progress": False, "engine": "compiled"}
    torch.manual_seed(0)
    steps = load("_parts.pyro_methods").fit_steps(model, guide, work, **options)
    steps.take(3, lambda step: measured.append(step()))
    assert len(measured) == 3

    after = {name: parameter.detach().clone() for name, parameter in guide.named_parameters()}
    guide.load_state_dict(before)
    torch.manual_seed(0)
    bbb.fit(model, guide, work.data(), epochs=3, **rest, **options)
    for name, parameter in guide.named_parameters():
        assert parameter.equal(after[name]) and not parameter.equal(before[name]), name


def test_every_contender_trains(contenders, work):
    faster = dataclasses.replace(work, lr=1e-2, draws=2)
    for name, method in contenders.items():
        trainer = method.prepare(faster)
        if isinstance(trainer, str):
            continue
        before = {key: value.detach().clone() for key, value in trainer.module.named_parameters()}
        trainer.take(1, lambda step: step())
        trained = dict(trainer.module.named_parameters())
        if name.startswith("blitz"):  # registers a copy of each, which gets no gradient
            trained = {key: value for key, value in trained.items() if "sampler" in key}
        assert trained
        assert all(not value.equal(before[key]) for key, value in trained.items()), name


def test_two_stock_guides_do_not_share_parameters(load, work):
    stock = load("_parts.pyro_methods").stock("mixture")
    trainers = [stock(work), stock(dataclasses.replace(work, hidden=6))]
    for trainer in trainers:
        trainer.take(1, lambda step: step())
    assert len({trainer.num_parameters for trainer in trainers}) == 2


def test_missing_and_broken_packages_are_named(load):
    prepare = load("_parts.tasks").prepare
    assert prepare("no-such-distribution", lambda: 1) == "not installed"
    assert prepare("torch", lambda: 1) == 1
    reason = prepare("torch", lambda: [][0])
    assert reason == "does not run: IndexError: list index out of range"
    with pytest.raises(IndexError):
        prepare(None, lambda: [][0])


def test_parameters_registered_twice_count_once(load):
    shared = nn.Linear(3, 2)
    module = nn.ModuleList([shared, nn.Linear(3, 2)])
    module[1].weight = nn.Parameter(shared.weight)  # another object with the same memory
    assert load("_parts.tasks").Trainer(None, module).num_parameters == 3 * 2 + 2 + 2


# --- statistics ---


class Clock:
    """Time that passes only when something runs."""

    now = 0.0

    def __call__(self):
        return self.now

    def running(self, seconds, log=None, name=None):
        def run():
            self.now += seconds
            if log is not None:
                log.append(name)

        return run


@pytest.mark.slow
def test_turns_rotate_and_the_first_runs_are_not_counted(load):
    timing, clock, log = load("_parts.timing"), Clock(), []
    actions = {
        name: timing.Action(
            timing.timed(timing.repeated(clock.running(seconds, log, name)), clock=clock),
            burst=2,
            unseen=1,
        )
        for name, seconds in (("a", 1.0), ("b", 3.0))
    }
    rounds = timing.interleave(actions, seconds=0, min_rounds=3, warmup=2, clock=clock)
    assert rounds == {"a": [[1.0, 1.0]] * 3, "b": [[3.0, 3.0]] * 3}
    assert "".join(log) == "aabb" + "aaabbb" + "bbbaaa" + "aaabbb"


@pytest.mark.slow
def test_rounds_begin_until_the_time_has_passed(load):
    timing, clock = load("_parts.timing"), Clock()
    actions = {"a": timing.Action(timing.timed(timing.repeated(clock.running(1.0))))}
    options = {"min_rounds": 2, "warmup": 0, "clock": clock}
    assert len(timing.interleave(actions, seconds=4.5, **options)["a"]) == 5


def test_ratios_are_taken_within_rounds(load):
    """A machine that slows down by ten between rounds changes no ratio."""
    rounds = {"floor": [[1.0, 1.0], [10.0, 10.0]], "other": [[2.0, 4.0], [30.0, 30.0]]}
    comparison = load("_parts.timing").Comparison("steps", "title", "floor", rounds)
    assert comparison.ratios("other") == [3.0, 3.0] and comparison.ratio("other") == 3.0
    assert comparison.ratio("floor", "other") == pytest.approx(1 / 3)
    assert comparison.times("other") == [2e3, 4e3, 30e3, 30e3]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_quartiles_are_numpys(load, count):
    values = np.random.default_rng(count).exponential(size=count).tolist()
    found = load("_parts.timing").interquartile(values)
    assert found == pytest.approx(tuple(np.quantile(values, [0.25, 0.75])))
    assert found[0] <= median(values) <= found[1]


def test_collection_is_off_while_timing_and_back_afterwards(load):
    timing, gc, states = load("_parts.timing"), importlib.import_module("gc"), []
    action = timing.Action(timing.timed(timing.repeated(lambda: states.append(gc.isenabled()))))
    assert gc.isenabled()
    timing.interleave({"a": action}, seconds=0, min_rounds=2, warmup=1)
    assert gc.isenabled() and states == [False] * 3


def test_peak_of_tensors_is_what_was_held_at_once(load):
    memory, allocated = load("_parts.memory"), []

    def run():
        allocated.append(torch.zeros(1000))
        del (before := [torch.zeros(50_000)])[:]  # a peak too early to count
        with torch.profiler.record_function(memory.STEADY):
            first = torch.zeros(2000)
            second = first + 1
            del first
            allocated.append(torch.zeros(500))
            del second
        assert not before

    peak, left = memory.tensor_peak(run, "cpu")
    assert left == 4 * (1000 + 500)
    assert 4 * 5000 <= peak < 4 * 5000 + 100  # and the numbers 0 and 1 themselves


def test_aims_say_what_was_reached(load):
    results, timing = load("_parts.results"), load("_parts.timing")
    names = load("_parts.methods")
    rounds = {names.FLOOR: [[1.0]], names.OURS: [[2.5]], names.PLAIN: [[4.0]]}
    title = "width 8, batch 128"
    found = results.Results(load("_parts.budget").SMOKE)
    found.comparisons.append(timing.Comparison("steps", title, names.FLOOR, rounds))
    verdicts = {(aim.limit, aim.value): aim.verdict for aim in results.aims(found)}
    assert verdicts == {
        (0.5, 0.625): "not reached",
        (3.0, 2.5): "reached",
        (1.0, None): "not measured",
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, of transformers
def test_large_networks_are_compared(load, tmp_path, capsys):
    large = load("large")
    settings = {"networks": ("vit",), "batch": 1, "rounds": 1, "smoke": True}
    found = large.main(large.Config(output=tmp_path, **settings))
    assert json.loads((tmp_path / "large.json").read_text()) == json.loads(json.dumps(found))
    of_vit = found["networks"]["vit"]
    assert of_vit["ratios"].keys() == large.FLOORS.keys()
    assert all(each["tensors"] > 0 for each in of_vit["memory"].values())
    assert "| vit | 10 draws | one pass |" in capsys.readouterr().out


# --- processes of their own ---


@pytest.mark.slow
def test_a_contender_trains_in_a_process_of_its_own(load, work):
    start_workers, contenders = load("_parts.isolated_workers"), load("_parts.methods")
    makes = {contenders.FLOOR: partial(contenders.training, contenders.FLOOR)}
    with start_workers.start_workers(makes, one_process=False) as workers:
        worker, other = workers[contenders.FLOOR], dataclasses.replace(work, batch=3)
        assert worker.prepare([work, other]) is None
        for each in (work, other):
            times = worker.take(each, 4)
            assert len(times) == 4 and all(0 < seconds < 60 for seconds in times)
        assert worker.prepare([work]) is None
        with pytest.raises(RuntimeError, match="process of a method failed"):
            worker.take(other, 1)  # is not prepared any more


def test_a_contender_that_is_missing_says_so_in_its_seat(load, work, monkeypatch):
    start_workers, contenders = load("_parts.isolated_workers"), load("_parts.methods")
    missing = dataclasses.replace(contenders.METHODS[contenders.FLOOR], package="no-such")
    monkeypatch.setitem(contenders.METHODS, "missing", missing)
    makes = {"missing": partial(contenders.training, "missing")}
    with start_workers.start_workers(makes, one_process=True) as workers:
        assert workers["missing"].prepare([work]) == "not installed"


# --- scaling ---


def test_the_model_of_one_worker_is_the_line_and_a_ring_the_textbooks(load):
    scaling = load("scaling")
    config = scaling.Config(batch_size=10, latency=1e-3, bandwidth=4e3)
    measured = {"1 x 1": {"steps": {"10": 0.3, "20": 0.5}}, "2 x 1": {"floats": 1000}}
    found = scaling.model(config, measured)
    assert found["fixed"] == pytest.approx(0.1) and found["per_example"] == pytest.approx(0.02)
    rows = {row["workers"]: row for row in found["rows"]}
    assert rows[1]["weak"] == pytest.approx(0.3) and rows[1]["strong"] == pytest.approx(0.5)
    assert rows[2]["sum"] == pytest.approx(2 * (1e-3 + 2000 / 4e3))  # two messages of the half
    assert rows[8]["sent_bytes"] == pytest.approx(14 / 8 * 4000)
    assert rows[8]["strong"] == pytest.approx(0.1 + 0.02 * 20 / 8 + rows[8]["sum"])


def test_the_scaling_benchmark_runs(load):
    """By one process; two are started by other tests."""
    worker = load("_parts.ddp_worker")
    found = worker.main(worker.Task(batch_sizes=[4, 8], width=3, steps=2, epochs=1, threads=1))
    assert set(found["steps"]) == {"4", "8"} and min(found["steps"].values()) > 0
