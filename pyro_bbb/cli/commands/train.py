# SPDX-License-Identifier: Apache-2.0
"""``pyro-bbb train``: a network from a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pyro_bbb.cli.console import Console
from pyro_bbb.cli.encoding import Column, date_form, encode, identifies_rows, learn, with_dates
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.metrics import by_row, cautions, described, with_refusal
from pyro_bbb.cli.model import About, Estimator, Model, posterior_in_words
from pyro_bbb.cli.options import Task, Train
from pyro_bbb.cli.table_io import column, listed, read
from pyro_bbb.cli.tasks import recognise, require_classes, targets
from pyro_bbb.sklearn import BayesianClassifier, BayesianRegressor

_FEWEST = 4  # rows to learn from
_FEWEST_HOLDOUT = 10  # with fewer, the scores would say nothing


def run(options: Train, console: Console) -> dict[str, Any]:
    """Reads, trains, scores, saves."""
    table, decimal = _read(options, console)
    y, task = _target(options, table, console)
    table, dates = _features(options, table, console)
    columns, inputs = _inputs(options, table, dates, console)
    train, held_out = _split(options, y, task)
    estimator = _fit(options, task, inputs[train], y[train], console)
    about = About(
        target=options.target,
        task=task,
        columns=columns,
        missing=options.missing,
        level=options.level,
        answered=options.answered,
        rows=len(train),
        held_out=len(held_out),
        decimal=decimal,
        missing_values=options.missing_values,
        dates=dates,
    )
    judged = held_out if len(held_out) else train
    model = Model(estimator, about)
    rows = by_row(model.ask(inputs[judged]), model.indices(y[judged]))
    model = with_refusal(model, rows)
    model.save(options.out)
    return _report(options, model, console)


def _read(options: Train, console: Console) -> tuple[pl.DataFrame, str | None]:
    kinds = dict.fromkeys((*options.drop, *options.keep), "any")
    targets = {"regression": "number", "classification": "any", None: "target"}
    kinds[options.target] = targets[options.task]
    missing = options.missing_values
    return read(options.data, options, console.print, kinds, "feature", missing=missing)


def _target(options: Train, table: pl.DataFrame, console: Console) -> tuple[NDArray[Any], Task]:
    target = column(table, options.target, "--target")
    task, why = recognise(target)
    if options.task is None:
        console.print(f"{options.target!r} makes this a {task}: {why} (--task says otherwise)")
    task = options.task or task
    y = targets(target, task)
    if task == "classification":
        require_classes(y, options.target)
    return y, task


def _features(
    options: Train, table: pl.DataFrame, console: Console
) -> tuple[pl.DataFrame, dict[str, str]]:
    """The columns to learn from, and the forms of the dates among them."""
    for option in ("drop", "keep"):
        for name in getattr(options, option):
            column(table, name, f"--{option}")
    table = table.drop(options.target, *options.drop)
    others = table.drop(options.keep, strict=False)
    dates = {each.name: form for each in others if (form := date_form(each, options.dates))}
    names = [each.name for each in others.drop(dates) if identifies_rows(each)]
    if names:
        console.print(f"left out, as they number or name the rows: {listed(names)} (--keep NAME)")
    if dates and not options.dates:
        console.print(f"left out, as they are dates: {listed(list(dates))} (--dates takes them)")
        return table.drop(names, dates), {}
    return table.drop(names), dates


def _inputs(
    options: Train, table: pl.DataFrame, dates: dict[str, str], console: Console
) -> tuple[list[Column], NDArray[Any]]:
    table = with_dates(table, dates).drop(dates)
    columns, constant = learn(table, options.missing)
    if constant:
        console.print(f"left out, as they have one value only: {listed(constant)}")
    inputs = encode(columns, table, options.missing)
    console.print(f"{len(inputs)} rows; {len(columns)} columns become {inputs.shape[1]} numbers")
    return columns, inputs


def _split(
    options: Train, y: NDArray[Any], task: Task
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows for training, and rows held out, none of them the only one of its class."""
    order = np.random.default_rng(options.seed).permutation(len(y))
    wanted = round(options.held_out * len(y))
    if task == "classification":  # the first of each class comes first
        first = np.unique(y[order], return_index=True)[1]
        order = np.concatenate([order[first], np.delete(order, first)])
        wanted = min(wanted, len(order) - len(first))
    if len(y) < _FEWEST:
        raise BadInput(f"{options.data} has {len(y)} rows, fewer than the {_FEWEST} to learn from")
    count = len(y) - wanted if wanted >= _FEWEST_HOLDOUT else len(y)
    return order[:count], order[count:]


def _fit(
    options: Train, task: Task, inputs: NDArray[Any], y: NDArray[Any], console: Console
) -> Estimator:
    arguments: dict[str, Any] = {
        "hidden_sizes": list(options.hidden),
        "epochs": options.epochs,
        "seconds": options.seconds,
        "random_state": options.seed,
        "progress": console.shows_progress,
    }
    for name in ("prior", "inference"):
        if (value := getattr(options, name)) is not None:
            arguments[name] = value
    if options.noise is not None:
        if task == "classification":
            raise BadInput("--noise is an option of regressions, this is a classification")
        arguments["noise"] = options.noise
    make: Any = BayesianRegressor if task == "regression" else BayesianClassifier
    try:
        estimator: Estimator = make(**arguments).fit(inputs, y)
    except (ValueError, TypeError) as error:  # an option, or targets that do not fit the noise
        raise BadInput(str(error)) from error
    return estimator


def _report(options: Train, model: Model, console: Console) -> dict[str, Any]:
    about = model.about
    interrupted = model.estimator.history_.interrupted
    if interrupted:
        console.print("interrupted: what was learned until then is saved")
    console.print(posterior_in_words(model))
    judged = f"{about.held_out} rows held out" if about.held_out else "the rows of training"
    console.print(f"scores on {judged}:")
    console.print(described(about.scores))
    console.print(f"saved as {options.out}")
    return {
        "model": str(options.out),
        "task": about.task,
        "target": about.target,
        "rows": about.rows,
        "held_out": about.held_out,
        "scores": about.scores,
        "warnings": cautions(about.scores),
        "uncertainty": about.uncertainty,
        "threshold": about.threshold,
        "interrupted": interrupted,
    }
