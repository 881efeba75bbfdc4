# SPDX-License-Identifier: Apache-2.0
"""Scores of `uci_regression` over splits, and their tables."""

import math
import statistics
from typing import Any, TypeAlias

import numpy as np

from _helpers.repeats import over_splits
from _helpers.run import Table

Figure: TypeAlias = tuple[float, float | None]  # mean and standard error
METHODS = ("VI", "PBP", "tuned dropout")
OURS = "this run"
SCORES = {"rmse": "RMSE", "log_likelihood": "log-likelihood"}
LEVELS = (0.5, 0.8, 0.9, 0.95)

# VI (Graves 2011) and PBP as Gal and Ghahramani (2016, "Dropout as a Bayesian Approximation") print
# them; tuned dropout: grid search of 2018, https://github.com/yaringal/DropoutUncertaintyExps
PUBLISHED: dict[str, dict[str, tuple[Figure, Figure, Figure]]] = {
    "bostonHousing": {
        "rmse": ((4.32, 0.29), (3.01, 0.18), (2.90, 0.18)),
        "log_likelihood": ((-2.90, 0.07), (-2.57, 0.09), (-2.40, 0.04)),
    },
    "energy": {
        "rmse": ((2.65, 0.08), (1.80, 0.05), (0.54, 0.06)),
        "log_likelihood": ((-2.39, 0.03), (-2.04, 0.02), (-1.21, 0.01)),
    },
    "naval-propulsion-plant": {
        "rmse": ((0.01, None), (0.01, None), (0.00, None)),
        "log_likelihood": ((3.73, 0.12), (3.73, 0.01), (4.45, 0.00)),
    },
    "wine-quality-red": {
        "rmse": ((0.65, 0.01), (0.64, 0.01), (0.62, 0.01)),
        "log_likelihood": ((-0.98, 0.01), (-0.97, 0.01), (-0.93, 0.01)),
    },
    "yacht": {
        "rmse": ((6.89, 0.67), (1.02, 0.05), (0.67, 0.05)),
        "log_likelihood": ((-3.43, 0.16), (-1.63, 0.02), (-1.25, 0.01)),
    },
}

# the best of each column in uncertainty-baselines, by MC dropout, ensembles and refined VI, on
# other splits: https://github.com/google/uncertainty-baselines, baselines/uci
BEST_NLL = {
    "bostonHousing": 2.40,
    "energy": 0.61,
    "naval-propulsion-plant": -6.33,
    "wine-quality-red": 0.93,
    "yacht": 0.73,
}


def quantiles_of(scores: list[dict[str, Any]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Predicted probabilities of a target at most the true one, of all splits' rows."""
    return np.concatenate([split["quantiles"] for split in scores])


def coverage(quantiles: np.ndarray[Any, np.dtype[np.float64]], level: float) -> float:
    """Compute the coverage of the central interval of this level."""
    return float((np.abs(2 * quantiles - 1) <= level).mean())


def summary_of(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the scores of one table for ``metrics.json``."""
    columns = {key: [split[key] for split in scores] for key in SCORES}
    covered = {f"{level:.0%}": coverage(quantiles_of(scores), level) for level in LEVELS}
    return {
        **{key: over_splits(values) for key, values in columns.items()},
        "coverage": covered,
        "splits": len(scores),
        "per_split": columns,
        "seconds_per_split": statistics.fmean(split["seconds"] for split in scores),
    }


def rows_of(name: str, summary: dict[str, Any], score: str) -> dict[str, Figure]:
    """A table's figures by method, the published ones where there are any."""
    ours = summary[score]["mean"], summary[score]["standard_error"]
    published = PUBLISHED.get(name, {}).get(score, ())
    return dict(zip(METHODS, published, strict=False)) | {OURS: ours}


def shown(figure: Figure) -> str:
    """Mean and standard error to the latter's first digit, with two decimals at least."""
    mean, error = figure
    if not error:
        return f"{mean:.2f}" if abs(mean) >= 0.1 or not mean else f"{mean:.2g}"
    digits = max(2, -math.floor(math.log10(error)))
    return f"{mean:.{digits}f} ± {error:.{digits}f}"


def score_table(summaries: dict[str, Any], score: str) -> Table:
    """One row per table, one column per method."""
    columns = (f"{SCORES[score]}, mean ± standard error", *METHODS, OURS)
    rows = []
    for name, summary in summaries.items():
        figures = rows_of(name, summary, score)
        cells = (shown(figures[method]) if method in figures else "–" for method in columns[1:])
        rows.append((name, *cells))
    return Table(columns, rows)


def methods_table(runs: dict[str, dict[str, Any]]) -> Table:
    """NLL of several runs by their names, one column for each table, and the best published."""
    rows = []
    for label, run in runs.items():
        found = (run[name]["log_likelihood"] for name in BEST_NLL)
        rows.append((label, *(shown((-each["mean"], each["standard_error"])) for each in found)))
    rows.append(("best published, other splits", *map("{:.2f}".format, BEST_NLL.values())))
    return Table(("NLL (nats)", *BEST_NLL), rows)


def coverage_table(summaries: dict[str, Any]) -> Table:
    """Tabulate the coverage of central intervals in per cent."""
    levels = [f"{level:.0%}" for level in LEVELS]
    rows = [(n, *(f"{100 * s['coverage'][k]:.1f}" for k in levels)) for n, s in summaries.items()]
    return Table(("coverage (%) of intervals", *levels), rows)


def comparison(summaries: dict[str, Any]) -> str:
    """Count the published figures that this run reaches or exceeds."""
    won, near, total = 0, 0, 0
    for name in summaries.keys() & PUBLISHED.keys():
        for score, sign in (("rmse", -1), ("log_likelihood", 1)):
            vi, pbp, dropout = (f for f in PUBLISHED[name][score])
            ours = summaries[name][score]["mean"]
            won += all(sign * (ours - theirs[0]) > 0 for theirs in (vi, pbp))
            # two decimals are published; half of the last one is for rounding in binary
            near += sign * (round(ours, 2) - dropout[0]) > -(dropout[1] or 0.0) - 0.005
            total += 1
    if not total:
        return "No figures are published for these tables here."
    return (
        f"Better than VI and than PBP in {won} of {total} figures; better than tuned dropout, or "
        f"within its standard error, in {near} of {total}."
    )
