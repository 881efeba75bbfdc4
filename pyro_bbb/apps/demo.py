# SPDX-License-Identifier: Apache-2.0
"""``pyro-bbb demo``: every step on two small tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from sklearn.datasets import load_digits

from pyro_bbb.apps.bad_input import BadInput
from pyro_bbb.apps.command_line import Command, Console, Demo, Predict, Report, Train
from pyro_bbb.apps.csv_format import write_table

RECIPES: dict[str, dict[str, Any]] = {"digits": {"hidden": (200, 200), "epochs": 80}, "sine": {}}
_TESTED = 4  # every fourth row is a test row


def demo(options: Demo, console: Console) -> dict[str, Any]:
    """Write both tables, and run the commands on them."""
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out must be a folder, got {options.out}: {error}") from error
    rng = np.random.default_rng(options.seed)
    digit_tables, sine_tables = digits(rng), sine(rng)
    return {
        "digits": _run(options, "digits", "digit", digit_tables, console),
        "sine": _run(options, "sine", "y", sine_tables, console),
    }


def _run(
    options: Demo, name: str, target: str, tables: dict[str, pl.DataFrame], console: Console
) -> dict[str, Any]:
    """Train, predict and report on one table."""
    for key, table in tables.items():
        write_table(table, options.out / f"{name}-{key}.csv")
    data = {key: options.out / f"{name}-{key}.csv" for key in tables}
    model, page = options.out / f"{name}-model", options.out / f"{name}-report.html"
    recipe = RECIPES[name] | ({"epochs": options.epochs} if options.epochs else {})
    words = "".join(f" --{key} {value}" for key, value in recipe.items())
    words = words.replace("(", "").replace(")", "").replace(",", "")
    steps: list[tuple[str, Command]] = [
        (
            f"train {data['train']} --target {target} --out {model}{words}",
            Train(data=data["train"], target=target, out=model, seed=options.seed, **recipe),
        )
    ]
    for key in ("test", "out_of_distribution"):
        out = options.out / f"{name}-{key}-predictions.csv"
        words = f"predict {model} {data[key]} --out {out}"
        steps.append((words, Predict(model=model, data=data[key], out=out)))
    words = f"report {model} {data['test']} --out {page}"
    steps.append((words, Report(model=model, data=data["test"], out=page)))
    results = []
    for line, step in steps:
        console.print(f"\n$ pyro-bbb {line}")
        results.append(step.run(console))
    test, far = (result["refused"] / result["rows"] for result in results[1:3])
    console.print(
        "refused, as less certain than 95% of the rows held out: "
        f"{test:.0%} in distribution, {far:.0%} out of distribution"
    )
    refused = {"test": test, "out_of_distribution": far}
    return {"scores": results[3]["scores"], "refused": refused, "report": str(page)}


def digits(rng: np.random.Generator) -> dict[str, pl.DataFrame]:
    """Return scikit-learn's 8x8 digits, and test digits with shuffled pixels."""
    pixels, labels = load_digits(return_X_y=True)
    names = [f"pixel{i}" for i in range(pixels.shape[1])]
    order = rng.permutation(len(labels))
    table = pl.DataFrame(pixels[order], schema=names).with_columns(digit=labels[order])
    tested = pl.int_range(pl.len()) % _TESTED == 0
    test = table.filter(tested)
    shuffled = pl.DataFrame(rng.permuted(test.select(names).to_numpy(), axis=1), schema=names)
    return {"train": table.filter(~tested), "test": test, "out_of_distribution": shuffled}


def sine(rng: np.random.Generator) -> dict[str, pl.DataFrame]:
    """Return a noisy sine to train and to test, and places far outside."""

    def noisy(count: int) -> pl.DataFrame:
        x = rng.uniform(-0.5, 0.5, count)
        return pl.DataFrame({"x": x, "y": 10 * np.sin(2 * np.pi * x) + rng.normal(size=count)})

    far = pl.DataFrame({"x": rng.choice([-1, 1], 100) * 1.5})
    return {"train": noisy(300), "test": noisy(100), "out_of_distribution": far}
