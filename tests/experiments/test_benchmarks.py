# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run, compute what they say, and compare contenders that do the same work."""

import dataclasses
import gc
import importlib
import itertools
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from pyro import poutine

import pyro_bbb as bbb

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Modules of the benchmarks by name, imported as when the file is run."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def methods(load):
    return load("_parts.methods")


@pytest.fixture
def timing(load):
    return load("_parts.timing")


@pytest.fixture
def work(methods):
    return methods.Work(hidden=5, batch=4)


# --- the whole commands ---


@pytest.fixture
def without_the_suites_objects():
    """Keep what the suite has loaded out of the benchmarks' many collections of garbage."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("without_the_suites_objects")
def test_smoke_run_leaves_record_and_picture(load, tmp_path, capsys):
    run = load("run")
    results = run.main(run.Config(smoke=True, threads=1, output=tmp_path))

    written = json.loads((tmp_path / "benchmarks.json").read_text())
    assert written == json.loads(json.dumps(results, default=str))
    assert {c["suite"] for c in written["comparisons"]} == set(run.TIMED)
    for comparison in written["comparisons"]:
        for name, times in comparison["contenders"].items():
            first, third = times["quartiles_ms"]
            assert 0 < first <= times["median_ms"] <= third, name
        assert comparison["contenders"][comparison["floor"]]["ratio"] == 1
    assert written["training_memory"]["deterministic"]["tensors_ratio"] == 1
    assert {"machine", "versions", "commit", "seconds"} <= set(written)
    assert (tmp_path / "benchmarks.png").read_bytes().startswith(b"\x89PNG")

    printed = capsys.readouterr().out
    for comparison in written["comparisons"]:
        assert f"{comparison['suite']}: {comparison['title']}" in printed
        assert set(comparison["absent"].values()) <= {"not installed"}  # what is installed runs
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, of transformers
def test_large_networks_are_compared(load, tmp_path, capsys):
    large = load("large")
    settings = {"networks": ("vit",), "batch": 1, "rounds": 1, "smoke": True}
    results = large.main(large.Config(output=tmp_path, **settings))
    assert json.loads((tmp_path / "large.json").read_text()) == json.loads(json.dumps(results))
    of_vit = results["networks"]["vit"]
    assert of_vit["ratios"].keys() == large.FLOORS.keys()
    assert all(entry["tensors"] > 0 for entry in of_vit["memory"].values())
    assert "| vit | 10 draws | one pass |" in capsys.readouterr().out


# --- the same work for everyone ---


def test_contenders_train_equally_many_numbers(methods, work):
    weights = 784 * 5 + 5 + 5 * 5 + 5 + 5 * 10 + 10
    faster = dataclasses.replace(work, lr=1e-2, draws=2)
    for name, (_, package) in methods.METHODS.items():
        trainer = methods.started(name, faster)
        if isinstance(trainer, str):
            assert package is not None and trainer == "not installed", f"{name}: {trainer}"
            continue
        expected = weights if name == "deterministic" else 2 * weights
        assert trainer.num_parameters == expected, name

        before = {key: value.detach().clone() for key, value in trainer.module.named_parameters()}
        trainer.take(1, lambda step: step())
        trained = dict(trainer.module.named_parameters())
        if name.startswith("blitz"):  # registers a copy of each, which gets no gradient
            trained = {key: value for key, value in trained.items() if "sampler" in key}
        assert trained
        assert all(not value.equal(before[key]) for key, value in trained.items()), name


@pytest.mark.parametrize("draws", [1, 3])
def test_plain_pytorch_and_ours_have_one_loss(methods, work, draws, monkeypatch):
    """Losses agree for the same means, scales and noise, in float64, to rounding."""
    torch.set_default_dtype(torch.float64)
    x, y = work.data()
    kl_weight = len(x) / methods.NUM_DATA
    model, guide = methods.guided(work)
    plain = methods.PlainMLP(work.sizes)
    with torch.no_grad():  # large scales, so that no term of the loss is small
        for site in guide.site_names:
            layer, param = site.removeprefix("network.").split(".")
            mu, rho = (getattr(plain, layer).get_parameter(f"{param}_{p}") for p in ("mu", "rho"))
            rho += 3.0
            guide.get_parameter(f"locs.{site}").copy_(mu)
            guide.get_parameter(f"rhos.{site}").copy_(rho)

    losses, noise = [], []
    for _ in range(draws):
        guide_trace = poutine.trace(guide).get_trace(x, y, kl_weight)
        model_trace = poutine.trace(poutine.replay(model, guide_trace)).get_trace(x, y, kl_weight)
        losses.append(guide_trace.log_prob_sum() - model_trace.log_prob_sum())
        for layer, param in itertools.product(["fc1", "fc2", "fc3"], ["weight", "bias"]):
            site = f"network.{layer}.{param}"
            value = guide_trace.nodes[site]["value"]
            noise.append((value - guide.loc(site)) / guide.scale(site))
    supply = iter(noise)
    monkeypatch.setattr(torch, "randn_like", lambda like: next(supply).reshape(like.shape))
    loss = plain.loss(x, y, kl_weight, draws)
    torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("estimator", ["reparam", "local_reparam"])
def test_measured_steps_are_those_of_fit(methods, work, estimator):
    """Every step goes through the meter, and together they are what `fit` does."""
    model, guide = methods.guided(work, num_data=work.batch)
    before = {name: parameter.detach().clone() for name, parameter in guide.named_parameters()}
    options = {"estimator": estimator, "num_particles": 2}
    measured, settings = [], {"lr": work.lr, "progress": False, "engine": "compiled"}
    torch.manual_seed(0)
    steps = methods.fit_steps(model, guide, work, **options)
    steps.take(3, lambda step: measured.append(step()))
    assert len(measured) == 3

    after = {name: parameter.detach().clone() for name, parameter in guide.named_parameters()}
    guide.load_state_dict(before)
    torch.manual_seed(0)
    bbb.fit(model, guide, work.data(), epochs=3, **settings, **options)
    for name, parameter in guide.named_parameters():
        assert parameter.equal(after[name]) and not parameter.equal(before[name]), name


# --- statistics ---


class Clock:
    """Time that passes only when something runs."""

    now = 0.0

    def __call__(self):
        return self.now

    def turns(self, timing, seconds, log=None, name=None):
        def run():
            self.now += seconds
            if log is not None:
                log.append(name)

        return lambda count: timing.timed(timing.repeated(run), count, clock=self)


def test_turns_rotate_and_the_first_runs_are_not_counted(timing):
    clock, log = Clock(), []
    turns = {name: clock.turns(timing, s, log, name) for name, s in (("a", 1.0), ("b", 3.0))}
    rounds = timing.interleave(turns, min_rounds=3, warmup=2, burst=2, unseen=1, clock=clock)
    assert rounds == {"a": [[1.0, 1.0]] * 3, "b": [[3.0, 3.0]] * 3}
    assert "".join(log) == "aabb" + "aaabbb" + "bbbaaa" + "aaabbb"
    times = timing.interleave({"a": clock.turns(timing, 1.0)}, seconds=4.5, warmup=0, clock=clock)
    assert len(times["a"]) == 5  # rounds begin until the time has passed


def test_ratios_are_taken_within_rounds(timing):
    """A machine that slows down by ten between rounds changes no ratio."""
    rounds = {"floor": [[1.0, 1.0], [10.0, 10.0]], "other": [[2.0, 4.0], [30.0, 30.0]]}
    comparison = timing.Comparison("steps", "title", "floor", rounds)
    assert comparison.ratios("other") == [3.0, 3.0] and comparison.ratio("other") == 3.0
    assert comparison.ratio("floor", "other") == pytest.approx(1 / 3)
    assert comparison.times("other") == [2e3, 4e3, 30e3, 30e3]
    assert timing.interquartile([2.0]) == (2.0, 2.0)
    assert timing.interquartile([1.0, 2.0, 3.0]) == (1.5, 2.5)


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

    peak = memory.tensor_peak(run, "cpu")
    assert 4 * 5000 <= peak < 4 * 5000 + 100  # and the numbers 0 and 1 themselves


def test_aims_say_what_was_reached(load, methods, timing):
    report = load("_parts.report")
    rounds = {methods.FLOOR: [[1.0]], methods.OURS: [[2.5]], methods.PLAIN: [[4.0]]}
    results = report.Results(load("_parts.budget").SMOKE)
    results.comparisons.append(
        timing.Comparison("steps", "width 8, batch 128", methods.FLOOR, rounds)
    )
    verdicts = {(aim.limit, aim.value): aim.verdict for aim in report.aims(results)}
    assert verdicts == {
        (0.5, 0.625): "not reached",
        (3.0, 2.5): "reached",
        (1.0, None): "not measured",
    }


@pytest.mark.slow
def test_a_contender_trains_in_a_process_of_its_own(methods, timing, work):
    makes = {"here": partial(methods.training, methods.FLOOR), "gone": broken, "pid": own_process}
    with timing.Methods(makes, threads=1) as processes:
        jobs = {"a": ("here", work), "b": ("here", dataclasses.replace(work, batch=3))}
        rounds, absent = processes.compare(jobs | {"c": ("gone", 1)}, burst=4)
        assert absent == {"c": "not installed"} and rounds.keys() == {"a", "b"}
        assert all(len(turn) == 4 and min(turn) > 0 for (turn,) in rounds.values())
        with pytest.raises(ZeroDivisionError):
            processes.compare({"d": ("pid", os.getpid())})


def broken(job):
    return "not installed"


def own_process(pid):
    return lambda count, meter: 1 / 0 if os.getpid() != pid else None


# --- scaling ---


def test_the_model_of_one_worker_is_the_line_and_a_ring_the_textbooks(load):
    scaling = load("scaling")
    config = scaling.Config(batch_size=10, latency=1e-3, bandwidth=4e3)
    measured = {"1 x 1": {"steps": {"10": 0.3, "20": 0.5}}, "2 x 1": {"floats": 1000}}
    fitted = scaling.model(config, measured)
    assert fitted["fixed"] == pytest.approx(0.1) and fitted["per_example"] == pytest.approx(0.02)
    rows = {row["workers"]: row for row in fitted["rows"]}
    assert rows[1]["weak"] == pytest.approx(0.3) and rows[1]["strong"] == pytest.approx(0.5)
    assert rows[2]["sum"] == pytest.approx(2 * (1e-3 + 2000 / 4e3))  # two messages of the half
    assert rows[8]["sent_bytes"] == pytest.approx(14 / 8 * 4000)
    assert rows[8]["strong"] == pytest.approx(0.1 + 0.02 * 20 / 8 + rows[8]["sum"])


def test_the_scaling_benchmark_runs(load):
    """One process runs here; two are started by other tests."""
    worker = load("_parts.ddp_worker")
    record = worker.main(worker.Task(batch_sizes=[4, 8], width=3, steps=2, epochs=1, threads=1))
    assert set(record["steps"]) == {"4", "8"} and min(record["steps"].values()) > 0
