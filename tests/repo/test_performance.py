# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/performance.md are those of the committed benchmark run."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "performance.md").read_text()
LOG = (ROOT / "docs" / "development" / "performance_log.md").read_text()
RECORD = json.loads((ROOT / "docs" / "results" / "benchmarks.json").read_text())
LARGE = json.loads((ROOT / "docs" / "results" / "large.json").read_text())


def table(head, rows):
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def test_large_networks_have_the_record(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    shown = importlib.import_module("large").table(LARGE["networks"])
    assert f"<!-- large -->\n{shown}\n<!-- end -->" in DOCUMENT
    for found in LARGE["networks"].values():
        ratios = found["ratios"]
        assert ratios["adapt"]["memory"] <= 1.15 and ratios["adapt"]["time"] <= 1.3
        assert ratios["all weights, bayesianize"]["memory"] <= 3.5
        assert ratios["all weights, IVON"]["memory"] <= 2.2
    passes = LARGE["networks"]["vit"]["ratios"]["10 draws"]["time"]
    assert passes <= 3
    guide = (ROOT / "docs" / "guide" / "large_networks.md").read_text("utf-8")
    assert f"ten draws take as long as {passes:.1f} passes" in " ".join(guide.split())


def aims():
    rows = [
        [aim["what"], f"{aim['value']:.2f}", f"{aim['limit']:g}", aim["verdict"]]
        for aim in RECORD["aims"]
        if aim["value"] is not None
    ]
    return table(["", "measured", "at most", ""], rows)


def of_suite(suite, ending=""):
    found = [each for each in RECORD["comparisons"] if each["suite"] == suite]
    return [each for each in found if each["title"].endswith(ending)]


def small(threads):
    """Microseconds of a step of each method, a column per network."""
    found = of_suite("small", f", {threads}")
    names = list(dict.fromkeys(name for each in found for name in each["contenders"]))
    times = [[1e3 * each["contenders"][name]["median_ms"] for each in found] for name in names]
    rows = [
        [name, *(f"{time:,.0f}" for time in of_one)]
        for name, of_one in zip(names, times, strict=True)
    ]
    heads = (each["title"].removesuffix(f", {threads}") for each in found)
    return table(["microseconds per step", *heads], rows)


def small1():
    return small("1 thread")


def small2():
    return small("2 threads")


def seconds(found):
    """Seconds of each method, a column per comparison."""
    names = list(dict.fromkeys(name for each in found for name in each["contenders"]))
    columns = [[each["contenders"].get(name) for each in found] for name in names]
    rows = [
        [name, *("–" if x is None else f"{x['median_ms'] / 1e3:.2f}" for x in of_one)]
        for name, of_one in zip(names, columns, strict=True)
    ]
    return table(["seconds", *(each["title"] for each in found)], rows)


def cold():
    return seconds(of_suite("small", ", compilation counted"))


def tables():
    return seconds(of_suite("tables"))


def ratios(titles, floor):
    """Medians of the floor in ms and of all others as multiples of it, a column per comparison."""
    found = [each for each in RECORD["comparisons"] if each["title"] in titles]
    names = list(dict.fromkeys(name for each in found for name in each["contenders"]))
    rows = []
    for name in names:
        columns = (each["contenders"].get(name) for each in found)
        key, form = ("median_ms", "{:.3g} ms") if name == floor else ("ratio", "{:.2f}")
        rows.append([name, *("–" if c is None else form.format(c[key]) for c in columns)])
    return table(["", *(each["title"] for each in found)], rows)


def steps():
    return ratios([f"width {width}, batch 128" for width in (400, 800, 1200)], "deterministic")


def predict():
    titles = [each["title"] for each in RECORD["comparisons"] if each["suite"] == "predict"]
    return ratios(titles, "100 deterministic passes")


def cuda_graph():
    """Milliseconds per step on a GPU, and the ratio to the ordinary network's."""
    record = json.loads((ROOT / "docs" / "results" / "cuda_graph.json").read_text())
    rows = [
        [name, *(f"{row[name]:.3f} ({row[name] / row['ordinary']:.2f})" for row in widths)]
        for widths in [list(record["milliseconds_per_step"].values())]
        for name in widths[0]
    ]
    heads = (f"width {width}: ms (ratio)" for width in record["milliseconds_per_step"])
    return table([record["device"], *heads], rows)


@pytest.mark.parametrize("part", [small1, small2, cold, tables, steps, predict, cuda_graph, aims])
def test_a_table_is_that_of_the_run(part):
    page = LOG if part is aims else DOCUMENT
    assert f"<!-- {part.__name__} -->\n{part()}\n<!-- end -->" in page


def test_the_record_is_of_a_whole_run():
    assert not RECORD["config"]["quick"] and not RECORD["config"]["smoke"]
    suites = {"small", "tables", "steps", "epoch", "predict"}
    assert {each["suite"] for each in RECORD["comparisons"]} == suites
    assert RECORD["training_memory"] and RECORD["prediction_memory"]
