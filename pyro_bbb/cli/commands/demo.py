# SPDX-License-Identifier: Apache-2.0
"""``pyro-bbb demo``: every step on two small tables, to see what comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from sklearn.datasets import load_digits

from pyro_bbb.cli.console import Console
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.options import Command, Demo, Predict, Report, Train
from pyro_bbb.cli.table_io import write

RECIPES: dict[str, dict[str, Any]] = {"digits": {"hidden": (200, 200), "epochs": 80}, "sine": {}}
_TESTED = 4  # every so many rows go to the test


def run(options: Demo, console: Console) -> dict[str, Any]:
    """Writes both tables, and runs the commands on them."""
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out must be a folder, got {options.out}: {error}") from error
    rng = np.random.default_rng(options.seed)
    tables = {"digits": (digits(rng), "digit"), "sine": (sine(rng), "y")}
    return {
        name: _steps(options, name, *parts, target, console)
        for name, (parts, target) in tables.items()
    }


def _steps(
    options: Demo,
    name: str,
    train: pl.DataFrame,
    test: pl.DataFrame,
    out_of_distribution: pl.DataFrame,
    target: str,
    console: Console,
) -> dict[str, Any]:
    """Trains, predicts and reports on one table."""
    paths = {
        part: options.out / f"{name}-{part}.csv"
        for part in ("train", "test", "out_of_distribution")
    }
    for path, table in zip(paths.values(), (train, test, out_of_distribution), strict=True):
        write(table, path)
    model, page = options.out / f"{name}-model", options.out / f"{name}-report.html"
    answers = {
        p: options.out / f"{name}-{p}-predictions.csv" for p in ("test", "out_of_distribution")
    }
    recipe = RECIPES[name] | ({"epochs": options.epochs} if options.epochs else {})
    steps: list[Command] = [
        Train(data=paths["train"], target=target, out=model, seed=options.seed, **recipe),
        *(Predict(model=model, data=paths[p], out=out) for p, out in answers.items()),
        Report(model=model, data=paths["test"], out=page),
    ]
    words = [
        f"train {paths['train']} --target {target} --out {model}{_words(recipe)}",
        *(f"predict {model} {paths[p]} --out {out}" for p, out in answers.items()),
        f"report {model} {paths['test']} --out {page}",
    ]
    results = []
    for step, line in zip(steps, words, strict=True):
        console.print(f"\n$ pyro-bbb {line}")
        results.append(step.run(console))
    fractions = [each["refused"] / each["rows"] for each in results[1:3]]
    console.print(
        "refused, as less certain than 95% of the rows held out: "
        f"{fractions[0]:.0%} in distribution, {fractions[1]:.0%} out of distribution"
    )
    return {
        "scores": results[3]["scores"],
        "refused": dict(zip(answers, fractions, strict=True)),
        "report": str(page),
    }


def digits(rng: np.random.Generator) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Scikit-learn's 8x8 digits to train and to test, and test digits with shuffled pixels."""
    pixels, labels = load_digits(return_X_y=True)
    names = [f"pixel{i}" for i in range(pixels.shape[1])]
    order = rng.permutation(len(labels))
    table = pl.DataFrame(pixels[order], schema=names).with_columns(digit=labels[order])
    tested = pl.int_range(pl.len()) % _TESTED == 0
    test = table.filter(tested)
    shuffled = rng.permuted(test.select(names).to_numpy(), axis=1)
    return table.filter(~tested), test, pl.DataFrame(shuffled, schema=names)


def sine(rng: np.random.Generator) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """A noisy sine to train and to test, and places far outside."""

    def noisy(count: int) -> pl.DataFrame:
        x = rng.uniform(-0.5, 0.5, count)
        return pl.DataFrame({"x": x, "y": 10 * np.sin(2 * np.pi * x) + rng.normal(size=count)})

    return noisy(300), noisy(100), pl.DataFrame({"x": rng.choice([-1, 1], 100) * 1.5})


def _words(recipe: dict[str, Any]) -> str:
    """Return options as they are written in a shell."""
    values = {k: " ".join(map(str, v)) if isinstance(v, tuple) else v for k, v in recipe.items()}
    return "".join(f" --{name} {value}" for name, value in values.items())
