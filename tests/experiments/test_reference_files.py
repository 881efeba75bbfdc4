# SPDX-License-Identifier: Apache-2.0
"""The command that makes the reference posteriors."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pyro import poutine
from safetensors import safe_open

import pyro_bbb as bbb
from pyro_bbb.data import REFERENCES, references

FROM_FILES = {"airfoil", "boston", "energy", "wine", "yacht"}  # of the UCI repository
MADE_HERE = [name for name in REFERENCES if name not in FROM_FILES]


@pytest.mark.parametrize("name", MADE_HERE)
def test_files_are_those_of_the_command_with_its_default_settings(load, name):
    experiment = load("references")
    posed, expected, _ = experiment.problem(name)
    stored = bbb.data.reference(name)
    assert stored.digest == replace(posed, functions=stored.functions).digest
    assert stored.diagnostics["settings"] == experiment.settings(experiment.Config())
    assert stored.diagnostics["divergences"] <= 10
    assert max(stored.diagnostics["r_hat"].values()) < 1.02
    for field in ("text", "source", "prior", "likelihood", "activation"):
        assert getattr(stored, field) == expected[field]


def test_a_file_of_the_same_settings_is_not_sampled_again(load, tmp_path, monkeypatch):
    experiment = load("references")
    ran, config = [], experiment.Config(chains=2, chain_length=8, saved=4)

    def fake(posed, config):
        ran.append(posed.name)
        shape = config.chains, config.chain_length, len(posed.probes)
        functions = torch.randn(shape, dtype=torch.float64)
        return functions, {"sampler": "numpyro 0", "divergences": 0, "gradients_per_draw": 1.0}

    monkeypatch.setitem(experiment.SAMPLERS, "numpyro", fake)
    path = tmp_path / "counts.safetensors"
    first = experiment.make("counts", config, path)
    again = experiment.make("counts", config, path)
    assert ran == ["counts"] and first.functions.equal(again.functions)
    experiment.make("counts", replace(config, seed=1), path)
    assert ran == ["counts"] * 2


@pytest.mark.parametrize("name", MADE_HERE)
def test_both_programs_of_a_problem_have_one_density(load, name):
    numpyro = pytest.importorskip("numpyro")
    numpyro.enable_x64()
    experiment = load("references")
    posed, *_ = experiment.problem(name)
    x, y, probes = (values.double() for values in (posed.x, posed.y, posed.probes))
    with pyro_default_dtype(torch.float64):
        trace = poutine.trace(posed.make_model()).get_trace(x, y)
    sites = {k.removeprefix("network."): trace.nodes[k]["value"] for k in trace.stochastic_nodes}
    sites = {k: w.T if k.endswith(".weight") else w for k, w in sites.items() if k != "data"}
    sites |= {f"likelihood.{i}": sites.get("likelihood.scale") for i in range(2)}
    sites = {k: w.numpy() for k, w in sites.items() if w is not None}
    data = tuple(values.numpy() for values in (x, y, probes))
    model = experiment.numpyro_model(posed)
    actual, _ = numpyro.infer.util.log_density(model, data, {}, sites)
    assert float(actual) == pytest.approx(float(trace.log_prob_sum()), rel=1e-9)


@contextmanager
def pyro_default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def test_the_page_has_the_diagnostics_of_the_files(load):
    records = {}
    for name in REFERENCES:
        with safe_open(references.FOLDER / f"{name}.safetensors", "pt") as file:
            records[name] = json.loads(file.metadata()["record"])["diagnostics"]
    page = (Path(__file__).parents[2] / "docs" / "fidelity.md").read_text("utf-8")
    assert str(load("_helpers.fidelity").nuts_table(records)) in page
