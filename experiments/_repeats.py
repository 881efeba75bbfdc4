"""The same run with several seeds, and its figures' mean and standard deviation."""

import statistics
from collections.abc import Callable
from typing import Any

import pyro_bbb as bbb
from pyro_bbb import metrics


def repeat(one: Callable[[int], dict[str, Any]], seed: int, repeats: int) -> dict[str, Any]:
    """Runs ``one(seed)`` for consecutive seeds.

    Returns:
        ``seeds``: the figures by seed; ``mean`` and, of two or more, ``sd``: of every number, in
        the same nested dicts.
    """
    runs = {str(s): one(s) for s in range(seed, seed + repeats)}
    records = list(runs.values())
    summary = {"seeds": runs, "mean": over(statistics.fmean, records)}
    return summary | ({"sd": over(statistics.stdev, records)} if repeats > 1 else {})


def shown(summary: dict[str, Any], *keys: str, factor: float = 100, digits: int = 2) -> str:
    """A figure of `repeat`'s summary for a table, as ``"97.80 ± 0.11"``: mean and, if known, sd.

    Args:
        summary: what `repeat` returned.
        *keys: where in the nested dicts the figure is.
        factor: what to multiply by; 100 turns shares into per cent.
        digits: decimals.
    """
    figures = [summary[kind] for kind in ("mean", "sd") if kind in summary]
    for key in keys:
        figures = [figure[key] for figure in figures]
    return " ± ".join(f"{factor * figure:.{digits}f}" for figure in figures)


def over(function: Callable[[list[float]], float], records: list[Any]) -> Any:
    """A function of each number's values in records of one structure; other entries are dropped."""
    first = records[0]
    if isinstance(first, dict):
        parts = {key: over(function, [record[key] for record in records]) for key in first}
        return {key: part for key, part in parts.items() if part is not None}
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return function([float(record) for record in records])
    return None


def scores(prediction: bbb.ClassificationPrediction, y: Any) -> dict[str, float]:
    """Accuracy and ECE in [0, 1], NLL in nats per example."""
    return {
        "accuracy": metrics.accuracy(prediction.probs, y),
        "nll": metrics.nll(prediction.probs, y),
        "ece": metrics.ece(prediction.probs, y),
    }
