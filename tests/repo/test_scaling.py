# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/scaling.md are those of the committed run, and its model is what it says."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "scaling.md").read_text()
RECORD = json.loads((ROOT / "docs" / "results" / "scaling.json").read_text())
LAYOUTS = {"1 x 1": "1 with 1", "1 x 2": "1 with 2", "2 x 1": "2 with 1"}


def table(head, rows):
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def seconds(layout, batch_size):
    return RECORD["measured"][layout]["steps"][str(batch_size)]


def strong():
    b = 2 * RECORD["config"]["batch_size"]
    one = seconds("1 x 1", b)
    rows = [
        [name, str(b), f"{1e3 * seconds(key, b):.1f}", f"{one / seconds(key, b):.2f}"]
        for key, name in LAYOUTS.items()
    ]
    return table(["processes with threads", "examples per step", "ms per step", "speed-up"], rows)


def weak():
    b = RECORD["config"]["batch_size"]
    rows = [
        [LAYOUTS[key], str(n), f"{1e3 * seconds(key, n):.1f}", f"{n / seconds(key, n) / 1e3:.1f}"]
        for key, n in (("1 x 1", b), ("2 x 1", 2 * b))
    ]
    efficiency = seconds("1 x 1", b) / seconds("2 x 1", 2 * b)
    head = ["processes with threads", "examples per step", "ms per step", "1,000 examples per s"]
    return f"{table(head, rows)}\n\nEfficiency of weak scaling: {100 * efficiency:.0f} %."


def between():
    found = RECORD["measured"]["2 x 1"]
    volume = 4 * found["floats"]
    rows = [
        ["numbers that are added up", f"{found['floats']:,}"],
        ["bytes per step and process, by the formula", f"{volume:,}"],
        ["bytes per step and process, measured", f"{found['bytes_per_step'] / 2:,.0f}"],
        ["ms of that sum, alone", f"{1e3 * found['sum_seconds']:.2f}"],
        ["ms of the sum of one number", f"{1e3 * found['smallest_sum_seconds']:.2f}"],
    ]
    return table(["between two processes", ""], rows)


def line():
    fixed, per_example = (RECORD["model"][name] for name in ("fixed", "per_example"))
    numbers = f"$a$ = {1e3 * fixed:.1f} ms, $c$ = {1e3 * per_example:.3f} ms"
    return f"{numbers}: a step's fixed work is that on {fixed / per_example:.0f} examples."


def model():
    b, rows = RECORD["config"]["batch_size"], []
    one = RECORD["model"]["rows"][0]
    for row in RECORD["model"]["rows"]:
        weak, strong, workers = row["weak"], row["strong"], row["workers"]
        large = RECORD["model"]["fixed"] + 16 * b * RECORD["model"]["per_example"]
        rows.append(
            [
                f"{workers:,}",
                f"{1e3 * row['sum']:.1f}",
                f"{1e3 * weak:.1f}",
                f"{100 * one['weak'] / weak:.0f}",
                f"{workers * b / weak / 1e3:,.0f}",
                f"{100 * large / (large + row['sum']):.0f}",
                f"{1e3 * strong:.1f}",
                f"{one['strong'] / strong:.2f}",
            ]
        )
    head = [
        *("workers", "ms of the sum", f"weak, {b} each: ms per step", "efficiency (%)"),
        *("1,000 examples per s", f"weak, {16 * b:,} each: efficiency (%)"),
        *(f"strong, {2 * b} in all: ms per step", "speed-up"),
    ]
    return table(head, rows)


@pytest.mark.parametrize("part", [strong, weak, between, line, model])
def test_a_table_is_that_of_the_run(part):
    assert f"<!-- {part.__name__} -->\n{part()}\n<!-- end -->" in DOCUMENT


def test_the_record_is_of_a_whole_run_and_counts_what_the_formula_says():
    assert not RECORD["config"]["smoke"]
    found = RECORD["measured"]["2 x 1"]
    assert found["bytes_per_step"] / 2 == pytest.approx(4 * found["floats"], rel=0.02)


def test_the_model_of_one_worker_is_the_line_and_a_ring_the_textbooks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    scaling = importlib.import_module("scaling")
    config = scaling.Config(batch_size=10, latency=1e-3, bandwidth=4e3)
    measured = {"1 x 1": {"steps": {"10": 0.3, "20": 0.5}}, "2 x 1": {"floats": 1000}}
    found = scaling.model(config, measured)
    assert found["fixed"] == pytest.approx(0.1) and found["per_example"] == pytest.approx(0.02)
    rows = {row["workers"]: row for row in found["rows"]}
    assert rows[1]["weak"] == pytest.approx(0.3) and rows[1]["strong"] == pytest.approx(0.5)
    assert rows[2]["sum"] == pytest.approx(2 * (1e-3 + 2000 / 4e3))  # two messages of the half
    assert rows[8]["sent_bytes"] == pytest.approx(14 / 8 * 4000)
    assert rows[8]["strong"] == pytest.approx(0.1 + 0.02 * 20 / 8 + rows[8]["sum"])


def test_the_benchmark_runs(monkeypatch, tmp_path):
    """By one process; two are started by other tests."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    worker = importlib.import_module("_parts.ddp_worker")
    found = worker.main(worker.Task(batch_sizes=[4, 8], width=3, steps=2, epochs=1, threads=1))
    assert set(found["steps"]) == {"4", "8"} and min(found["steps"].values()) > 0
