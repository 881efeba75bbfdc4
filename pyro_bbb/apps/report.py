# SPDX-License-Identifier: Apache-2.0
"""``pyro-bbb report``: a model and its scores as one page that needs no other file."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from pyro_bbb import plots, pruning
from pyro_bbb._utils.colors import BLACK, BLUE, SKY, VERMILLION
from pyro_bbb._utils.files import replacing
from pyro_bbb._utils.version import __version__
from pyro_bbb.apps.command_line import Report
from pyro_bbb.apps.table_commands import read_labelled
from pyro_bbb.apps.table_model import About, Model
from pyro_bbb.apps.table_scores import (
    CLASS_COLUMNS,
    SCORE_NAMES,
    by_row,
    cautions,
    class_rows,
    refusal,
    risk_coverage,
    score,
    verdict,
)

_LEAST_CERTAIN = 10  # rows that are listed
_MOST_COPIED = 3  # columns, such as identifiers, that name them
_MOST = 400  # rows whose interval is drawn


@dataclass(frozen=True)
class Section:
    """A section of the page: words, a table, pictures as captions and base64 of a PNG."""

    heading: str
    text: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    pictures: Sequence[tuple[str, str]] = ()


def report(options: Report) -> dict[str, Any]:
    """Score a model on a table, if there is one, and write the page."""
    model = Model.load(options.model)
    about, scores = model.about, model.about.scores
    scored = f"{about.held_out} rows that were held out from" if about.held_out else "the rows of"
    text = f"On {scored} training; it learned from {about.rows} rows."
    sections = [Section("Scores when trained", text, *_table(scores)), _network(model)]
    if options.data is not None:
        rows = by_row(model, *read_labelled(model, options), options.shows_progress)
        scores = score(rows, model)
        sections = [*_scored(model, rows, scores, options), *sections]
    warnings, refused = cautions(scores), refusal(scores)
    loader = PackageLoader("pyro_bbb.apps", ".")
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    page = jinja.get_template("report.html").render(
        title=f"{options.model.name}: predicting {about.target}",
        verdict=[
            verdict(scores, about.level),
            *[f"{refused}."] * (refused not in warnings),
            *[about.verdict] * bool(about.verdict),
        ],
        warnings=warnings,
        about=about,
        sections=sections,
        version=__version__,
    )
    with replacing(options.out) as temporary:
        temporary.write_text(page, encoding="utf-8")
    options.say(f"written to {options.out}")
    return {"report": str(options.out), "scores": scores}


def _scored(
    model: Model, rows: dict[str, Tensor], scores: dict[str, Any], options: Report
) -> Iterator[Section]:
    """Yield sections on the scores, the classes, the least certain answers."""
    about, uncertainty, file = model.about, rows[model.about.uncertainty], options.file
    name, cells = file.path.name, file.table.drop(about.target)
    copied = [x for x in model.left_out(cells) if cells[x].n_unique() > 1][:_MOST_COPIED]
    text = f"Of the {len(rows['y'])} rows of {name}, none of which need to have been in training."
    pictures = list(_pictures(about, rows))
    yield Section(f"Scores on {name}", text, *_table(scores), pictures=pictures)
    if "classes" in scores:
        text = "Rows of each class, and how many are predicted as it; all, and those answered."
        yield Section("Classes", text, CLASS_COLUMNS, class_rows(scores))
    table = []
    for row in uncertainty.argsort(descending=True)[:_LEAST_CERTAIN].tolist():
        if "probs" in rows:
            classes = model.estimator.classes_
            indices = int(rows["probs"][row].argmax()), int(rows["y"][row])
            answer = [str(classes[index]) for index in indices]
        else:
            answer = [f"{float(rows[name][row]):.5g}" for name in ("mean", "y")]
        refused = "refused" if uncertainty[row] > about.threshold else ""
        identity = options.place(row), *(str(cells[x][row]) for x in copied)
        table.append((*identity, *answer, f"{float(uncertainty[row]):.3g}", refused))
    headings = ("row", *copied, "predicted", "true", f"{about.uncertainty} uncertainty", "")
    text = "Look at these rows first: a slip in the table, or a case seen too rarely."
    yield Section("The least certain answers", text, headings, table)


def _network(model: Model) -> Section:
    about, posterior = model.about, model.estimator.posterior_
    rows = [
        (name, "text" if values else "number", ", ".join(values or ()), "yes" if gap else "no")
        for (name, values), gap in zip(
            model.columns.items(), model.estimator.columns_.gaps, strict=True
        )
    ]
    words = f"The model is the {posterior}."
    if weights := posterior.num_weights:
        pruned = f", {about.pruned:.0%} of them removed" if about.pruned else ""
        words = f"The network has {weights} weights{pruned}, their {posterior}."
    pictures = []
    if getattr(posterior.guide, "is_factorised", False):
        ratios = pruning.signal_to_noise(posterior.guide)
        caption = "Means of the weights over their standard deviations; pruning begins on the left."
        pictures = [_draw(lambda ax: plots.snr_density_and_cdf(ax, ratios), "Weights", caption)]
    headings = ("column", "kind", "values", "some missing")
    text = f"{words} It takes these columns."
    return Section("Network and columns", text, headings, rows, pictures)


def _table(scores: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    return ("score", "value"), [
        (name, f"{scores[key]:.4g}") for key, name in SCORE_NAMES.items() if key in scores
    ]


def _pictures(about: About, rows: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Draw predictions against true targets, calibration, and the gain of refusal."""
    if "probs" in rows:
        yield _draw(
            lambda ax: plots.reliability(ax, rows["probs"], rows["y"]),
            "Reliability diagram",
            "Accuracy of the predictions of each confidence, with 95 % intervals.",
        )
    else:
        yield _draw(
            lambda ax: _predicted_and_true(ax, rows, about),
            "Predicted and true",
            f"Means with {about.level:.0%} intervals (of at most {_MOST} rows). Orange: refused.",
        )
        yield _draw(
            lambda ax: plots.coverage(ax, rows["pit"]),
            "Coverage of the intervals",
            "Fraction of true targets inside central intervals of each level. On the diagonal "
            "intervals are calibrated, below it too narrow.",
        )
    yield _draw(
        lambda ax: _refusal_curve(ax, rows, about),
        "Risk-coverage",
        "Error of the rows answered, as the least certain ones are refused. A curve that does not "
        "fall below the dotted line, the error of all rows, gains nothing by refusal. Dashed: the "
        "fraction that is answered.",
    )


def _draw(function: Callable[[Axes], object], title: str, caption: str) -> tuple[str, str]:
    with plots.style():
        figure = Figure(figsize=(5.2, 3.7))
        ax = figure.subplots()
        function(ax)
        ax.set_title(title)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
    return caption, base64.b64encode(buffer.getvalue()).decode("ascii")


def _predicted_and_true(ax: Axes, rows: dict[str, Tensor], about: About) -> None:
    """Draw means and intervals over the truth, refused rows in orange."""
    shown = np.random.default_rng(0).permutation(len(rows["y"]))[:_MOST]
    y, mean, lower, upper, uncertainty = (
        rows[name].numpy()[shown] for name in ("y", "mean", "lower", "upper", about.uncertainty)
    )
    refused = uncertainty > about.threshold
    ax.vlines(y, lower, upper, color=SKY, linewidth=0.7)
    for which, colour in ((~refused, BLUE), (refused, VERMILLION)):
        ax.plot(y[which], mean[which], "o", color=colour, markersize=2.5)
    ax.axline((float(y.mean()), float(y.mean())), slope=1, color=BLACK, lw=0.8, ls=":")
    ax.set(xlabel="true", ylabel="predicted")


def _refusal_curve(ax: Axes, rows: dict[str, Tensor], about: About) -> None:
    """Draw error rate or RMSE of the rows answered over their fraction, and the threshold."""
    coverage, risk = risk_coverage(rows, about.uncertainty)
    answered = (rows[about.uncertainty] <= about.threshold).double().mean()
    ax.plot(coverage, risk, color=BLUE)
    ax.axhline(float(risk[-1]), color=BLACK, linewidth=0.8, linestyle=":")
    ax.axvline(float(answered), color=VERMILLION, linewidth=0.8, linestyle="--")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if classes := "probs" in rows:
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlim=(0.0, 1.0), ylim=(0.0, None), xlabel="rows answered, the most certain first")
    ax.set_ylabel(f"{'error rate' if classes else 'RMSE'} of the rows answered")
