"""The tables of docs/performance.md are those of the committed benchmark run."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "performance.md").read_text()
RECORD = json.loads((ROOT / "docs" / "results" / "benchmarks.json").read_text())


def table(head, rows):
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def aims():
    rows = [
        [aim["what"], f"{aim['value']:.2f}", f"{aim['limit']:g}", aim["verdict"]]
        for aim in RECORD["aims"]
        if aim["value"] is not None
    ]
    return table(["", "measured", "at most", ""], rows)


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


@pytest.mark.parametrize("part", [aims, steps, predict, cuda_graph])
def test_a_table_is_that_of_the_run(part):
    assert f"<!-- {part.__name__} -->\n{part()}\n<!-- end -->" in DOCUMENT


def test_the_record_is_of_a_whole_run():
    assert not RECORD["config"]["quick"] and not RECORD["config"]["smoke"]
    assert {each["suite"] for each in RECORD["comparisons"]} == {"steps", "epoch", "predict"}
    assert RECORD["training_memory"] and RECORD["prediction_memory"]
