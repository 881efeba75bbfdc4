# SPDX-License-Identifier: Apache-2.0
"""``pyro-bbb report``: what a model is and how good, as one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from pyro_bbb._utils.files import replacing
from pyro_bbb._utils.version import __version__
from pyro_bbb.cli.commands.evaluate import judged
from pyro_bbb.cli.console import Console
from pyro_bbb.cli.figures import Picture, of_answers, of_weights
from pyro_bbb.cli.metrics import CLASS_COLUMNS, SCORE_NAMES, cautions, class_rows, refusal, score
from pyro_bbb.cli.model import About, Model, posterior_in_words
from pyro_bbb.cli.options import Report

_LEAST_CERTAIN = 10  # rows that are listed


@dataclass(frozen=True)
class Section:
    """A part of the page: words, a table, pictures."""

    heading: str
    text: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    pictures: Sequence[Picture] = ()


def run(options: Report, console: Console) -> dict[str, Any]:
    """Loads, predicts, draws, writes."""
    model = Model.load(options.model)
    scores, sections = model.about.scores, [_of_training(model.about)]
    if options.data is not None:
        rows = judged(model, options, options.data, console)
        scores = score(rows, model)
        sections = _of_rows(model, rows, scores, options.data.name) + sections
    sections.append(_of_columns(model))
    number = model.about.held_out or model.about.rows if options.data is None else len(rows["y"])
    warnings = [f"{words}." for words in cautions(scores)]
    verdict = [words for words in _verdict(model.about, scores, number) if words not in warnings]
    page = _page(model.about, sections, options.model.name, verdict, warnings)
    with replacing(options.out) as part:
        part.write_text(page, encoding="utf-8")
    console.print(f"written to {options.out}")
    return {"report": str(options.out), "scores": scores}


def _of_rows(
    model: Model, rows: dict[str, Tensor], scores: dict[str, Any], name: str
) -> list[Section]:
    number = len(rows["y"])
    text = f"Of the {number} rows of {name}, none of which need to have been in training."
    pictures = of_answers(model, rows)
    sections = [Section(f"Scores on {name}", text, *_table(scores), pictures=pictures)]
    if "classes" in scores:
        text = "Rows of each class, and how many are predicted as it; all, and those answered."
        sections.append(Section("Classes", text, CLASS_COLUMNS, class_rows(scores)))
    return [*sections, _least_certain(model, rows)]


def _of_training(about: About) -> Section:
    held_out = f"{about.held_out} rows that were held out from training"
    text = f"On {held_out if about.held_out else 'the rows of training'}; it learned from "
    return Section("Scores when trained", f"{text}{about.rows} rows.", *_table(about.scores))


def _of_columns(model: Model) -> Section:
    about = model.about
    rows = [
        (
            each.name,
            "number" if each.values is None else "text",
            "" if each.values is None else ", ".join(each.values),
            "yes" if each.gaps else "no",
        )
        for each in about.columns
    ]
    sites = model.estimator.posterior_.model.latent_shapes()
    weights = sum(shape.numel() for name, shape in sites.items() if name.startswith("network."))
    pruned = f", {about.pruned:.0%} of them removed" if about.pruned else ""
    text = f"The network has {weights} weights{pruned}, their {posterior_in_words(model)}. "
    text += "It takes these columns."
    headings = ("column", "kind", "values", "some missing")
    return Section("Network and columns", text, headings, rows, of_weights(model))


def _least_certain(model: Model, rows: dict[str, Tensor]) -> Section:
    """The rows of which the model is least certain."""
    about, table = model.about, []
    for row in rows[about.uncertainty].argsort(descending=True)[:_LEAST_CERTAIN].tolist():
        uncertainty = float(rows[about.uncertainty][row])
        refused = "refused" if uncertainty > about.threshold else ""
        table.append((str(row + 1), *_answer(model, rows, row), f"{uncertainty:.3g}", refused))
    headings = ("row", "predicted", "true", f"{about.uncertainty} uncertainty", "")
    text = "Look at these rows first: a slip in the table, or a case seen too rarely."
    return Section("The least certain answers", text, headings, table)


def _answer(model: Model, rows: dict[str, Tensor], row: int) -> tuple[str, str]:
    """Predicted and true value of a row."""
    if "probs" not in rows:
        return f"{float(rows['mean'][row]):.5g}", f"{float(rows['y'][row]):.5g}"
    classes = model.estimator.classes_
    return str(classes[int(rows["probs"][row].argmax())]), str(classes[int(rows["y"][row])])


def _table(scores: dict[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    return ("score", "value"), [
        (name, f"{scores[key]:.4g}") for key, name in SCORE_NAMES.items() if key in scores
    ]


def _verdict(about: About, scores: dict[str, Any], number: int) -> list[str]:
    """Say how good the predictions are, whom they fail, and whether they know it."""
    if "accuracy" in scores:
        quality = (
            f"The predicted {about.target!r} is right in {scores['accuracy']:.1%} of {number} rows"
        )
        if "classes" in scores:  # not stored by earlier versions
            quality += f"; always the commonest class would be in {scores['base_rate']:.1%}. "
            quality += _worst(scores["classes"])
        sets = _compared(scores["set_coverage"], about.level, number, "small")
        certainty = f"Its sets of classes hold the true one {sets}"
    else:
        explained = f", {scores['r2']:.0%} of the variance explained" if "r2" in scores else ""
        quality = (
            f"The RMSE of {about.target!r} is {scores['rmse']:.4g} on {number} rows{explained}"
        )
        intervals = _compared(scores["coverage"], about.level, number, "narrow", "wide")
        certainty = f"Its intervals hold the true value {intervals}"
    return [f"{quality}.", f"{refusal(scores)}.", certainty]


def _worst(classes: dict[str, dict[str, int]]) -> str:
    """The class of which the smallest fraction of rows is answered and right."""
    present = [item for item in classes.items() if item[1]["rows"]]
    label, counts = min(present, key=lambda item: item[1]["answered_right"] / item[1]["rows"])
    rows, right, answered, answered_right = counts.values()
    return (
        f"Of the {rows} rows of {label!r} it would be right in {right} ({right / rows:.0%}); it "
        f"answers {answered} and is right in {answered_right}"
    )


def _compared(coverage: float, level: float, number: int, less: str, more: str = "") -> str:
    """Coverage against its level, within two standard errors of a binomial proportion."""
    found = f"in {coverage:.1%} of rows, where {level:.0%} is intended: "
    if abs(coverage - level) <= 2 * (level * (1 - level) / number) ** 0.5:
        return f"{found}that agrees."
    if coverage > level and not more:
        return f"{found}a set has one class at least."
    return f"{found}they are too {less if coverage < level else more}."


def _page(
    about: About, sections: list[Section], name: str, verdict: list[str], warnings: list[str]
) -> str:
    jinja = Environment(
        loader=PackageLoader("pyro_bbb.cli.commands", "."),
        autoescape=True,
        undefined=StrictUndefined,
    )
    summary = (
        f"A Bayesian neural network for the {about.task} of {about.target!r}. Each answer says "
        "how uncertain it is by the noise of the data (aleatoric) and by what more data could "
        "teach (epistemic), and is refused where it is less certain than almost all before."
    )
    return jinja.get_template("report.html").render(
        title=f"{name}: predicting {about.target}",
        verdict=verdict,
        warnings=warnings,
        summary=summary,
        sections=sections,
        footer=f"Made by pyro_bbb {__version__}.",
    )
