# SPDX-License-Identifier: Apache-2.0
"""The commands on tables: ``pyro-bbb train``, ``predict``, ``evaluate`` and ``prune``."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from polars import selectors as cs

from pyro_bbb import guides, pruning
from pyro_bbb._utils.files import replacing
from pyro_bbb.apps.column_encoding import targets
from pyro_bbb.apps.command_line import (
    PARQUET,
    BadInput,
    Evaluate,
    Predict,
    Prune,
    Reading,
    Task,
    Train,
)
from pyro_bbb.apps.csv_format import column
from pyro_bbb.apps.table_model import ESTIMATORS, About, Estimator, Model
from pyro_bbb.apps.table_scores import by_row, cautions, score, text_of, with_refusal
from pyro_bbb.training import UndertrainedWarning

_FEWEST_HOLDOUT = 10  # with fewer, the scores would say nothing
_DIGITS = 6  # of the numbers written, far more than the samples make certain


def train(options: Train) -> dict[str, Any]:
    """Read a table, train, score on the rows held out, and save."""
    table = options.table
    inputs, y, task = table.inputs, table.y, table.task
    training, held_out = _split(options, y, task)
    estimator = _fit(options, task, inputs[training], y[training])
    numbers = len(estimator.columns_.is_number)
    options.say(f"{len(inputs)} rows; {inputs.width} columns become {numbers} numbers")
    about = About(
        target=options.target,
        task=task,
        missing=options.missing,
        level=options.level,
        answered=options.answered,
        rows=len(training),
        held_out=len(held_out),
        decimal=table.decimal,
        missing_values=options.missing_values,
        dates=table.dates,
    )
    scored = held_out if len(held_out) else training
    model = Model(estimator, about)
    model = model.described(verdict=model.verdict(inputs[training], y[training], options.seed))
    model = with_refusal(model, by_row(model, inputs[scored], model.indices(y[scored])))
    model.save(options.out)
    about, interrupted = model.about, estimator.history_.interrupted
    if interrupted:
        options.say("interrupted: what was learned until then is saved")
    scored_rows = f"{len(held_out)} rows held out" if len(held_out) else "the rows of training"
    options.say(f"{estimator.posterior_}\n{about.verdict}")
    options.say(f"scores on {scored_rows}:\n{text_of(about.scores)}")
    options.say(f"saved as {options.out}")
    names = ("task", "target", "rows", "held_out", "scores", "uncertainty", "threshold", "verdict")
    result = {"model": str(options.out), **{name: getattr(about, name) for name in names}}
    return result | {"warnings": cautions(about.scores), "interrupted": interrupted}


def predict(options: Predict) -> dict[str, Any]:
    """Write the predictions for a table."""
    model = Model.load(options.model)
    table = model.read(options, truth=False)
    if options.keep is None:
        copied = model.left_out(table)
    else:
        copied = [column(table, name, "--keep").name for name in options.keep]
    inputs = model.inputs(table, options.say)
    answers = pl.concat([model.answers(p) for p in model.predict(inputs, options.shows_progress)])
    if used := set(copied) & set(answers.columns):
        hint = "choose the columns to copy by --keep, or rename them"
        raise BadInput(f"columns {sorted(used)} of the table are those of predictions, too: {hint}")
    answers = answers.with_columns(cs.float().round_sig_figs(_DIGITS))
    _write(pl.concat([table.select(copied), answers], how="horizontal"), options.out)
    refused = int(answers["refused"].sum())
    target = model.about.target
    options.say(f"{len(answers)} predictions of {target!r}, {refused} of them refused")
    options.say(f"written to {options.out}")
    return {"predictions": str(options.out), "rows": len(answers), "refused": refused}


def evaluate(options: Evaluate) -> dict[str, Any]:
    """Score a model on a table whose targets are known."""
    model = Model.load(options.model)
    rows = by_row(model, *read_labelled(model, options), options.shows_progress)
    scores = score(rows, model)
    options.say(f"scores on the {len(rows['y'])} rows of {options.data}:\n{text_of(scores)}")
    result = {"model": str(options.model), "rows": len(rows["y"])}
    return result | {"scores": scores, "warnings": cautions(scores)}


def prune(options: Prune) -> dict[str, Any]:
    """Prune a model, choose its threshold again, score it, and save it."""
    model = Model.load(options.model)
    try:
        guide = pruning.prune(model.estimator.posterior_.guide, options.fraction)
    except TypeError as error:
        raise BadInput(
            f"{options.model} has no mean and scale for each weight, which pruning needs: train it "
            "with --inference variational, without --ensemble"
        ) from error
    except ValueError as error:
        raise BadInput(str(error)) from error
    estimator = copy.copy(model.estimator)
    estimator.posterior_ = replace(model.estimator.posterior_, guide=guide)
    pruned = replace(model.described(pruned=options.fraction, verdict=""), estimator=estimator)
    ratios = pruning.signal_to_noise(guide).values()
    total, left = sum(x.numel() for x in ratios), sum(int((x > 0).sum()) for x in ratios)
    options.say(f"{left} of {total} weights are left")
    data = read_labelled(model, options)
    before = score(by_row(model, *data, options.shows_progress), model)
    rows = by_row(pruned, *data, options.shows_progress)
    pruned = with_refusal(pruned.described(held_out=len(rows["y"])), rows)
    about = pruned.about
    for words, scores in (("before", before), ("after", about.scores)):
        options.say(f"{words}:\n{text_of(scores)}")
    pruned.save(options.out)
    options.say(f"saved as {options.out}")
    result = {"model": str(options.out), "weights": total, "left": left, "before": before}
    chosen = {"uncertainty": about.uncertainty, "threshold": about.threshold}
    return result | {"after": about.scores} | chosen


def read_labelled(model: Model, options: Reading) -> tuple[pl.DataFrame, NDArray[Any]]:
    """Return the file's rows as the estimator takes them, and their numbers or class indices."""
    table = model.read(options, truth=True)
    target = column(table, model.about.target, "the target")
    truth = model.indices(targets(target, model.about.task))
    return model.inputs(table, options.say), truth


def _split(
    options: Train, y: NDArray[Any], task: Task
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return rows for training, and rows held out, none of them the only one of its class."""
    order = np.random.default_rng(options.seed).permutation(len(y))
    held_out = round(options.held_out * len(y))
    if task == "classification":  # the first row of each class is trained on
        first = np.unique(y[order], return_index=True)[1]
        order = np.concatenate([order[first], np.delete(order, first)])
        held_out = min(held_out, len(order) - len(first))
    count = len(y) - held_out if held_out >= _FEWEST_HOLDOUT else len(y)
    return order[:count], order[count:]


def _fit(options: Train, task: Task, inputs: pl.DataFrame, y: NDArray[Any]) -> Estimator:
    names = ("prior", "inference", "noise", "guide", "temperature")
    chosen = {name: x for name in names if (x := getattr(options, name)) is not None}
    if {"guide", "temperature"} & chosen.keys() or options.ensemble:
        chosen.setdefault("inference", "variational")
    if options.ensemble:
        member = options.guide or "delta"
        chosen["guide"] = partial(guides.ensemble, size=options.ensemble, guide=member)
    make: Any = ESTIMATORS[task]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UndertrainedWarning)  # the verdict reports it
            estimator: Estimator = make(
                hidden_sizes=list(options.hidden),
                epochs=options.epochs,
                seconds=options.seconds,
                categorical_features=inputs.select(cs.string()).columns,
                random_state=options.seed,
                progress=options.shows_progress,
                **chosen,
            ).fit(inputs, y)
    except (ValueError, TypeError) as error:  # an option, or targets that do not fit the noise
        raise BadInput(str(error)) from error
    if options.ensemble:
        estimator.guide = "ensemble"  # a function cannot be saved; its members are
    return estimator


def _write(table: pl.DataFrame, path: Path) -> None:
    """Write a table atomically, as Parquet or CSV by the ending."""
    save = table.write_parquet if path.suffix in PARQUET else table.write_csv
    with replacing(path) as temporary:
        save(temporary)
