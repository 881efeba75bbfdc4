# SPDX-License-Identifier: Apache-2.0
"""The estimators with default settings on many tables, with other methods that give uncertainty.

    python experiments/tables.py --data-root FOLDER [--tables airfoil yacht-gap] [--methods NGBoost]

FOLDER (by default ``$PYRO_BBB_DATA``) has ``airfoil/airfoil.csv``, ``uci/NAME/data.npz`` and
``mushroom/agaricus-lepiota.data``; the other tables come with scikit-learn or are made up. Gap
splits test the middle third of the rows by a feature, tail splits the lowest and the highest sixth
(Foong et al. 2019, arXiv:1906.11537). Inputs go to all methods alike, and no setting was chosen by
test rows. Packages of rivals: ``pip install --group comparison``.

Every figure is a file: ours depend on the source of the library and are made again when it has
changed; those of the other methods stay until ``--fresh METHOD`` asks for new ones. The report has
every method whose figures are there.
"""

import hashlib
import io
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import sklearn.datasets as bundled
import torch
import tyro
from _helpers import tables as tabulate
from _helpers.regression_tables import find_tables
from _helpers.rivals import CLASSIFIERS, LEVELS, REGRESSORS, Answer, Array, Method, Split
from _helpers.run import DataSettings, Run, check_names, chosen, read_json
from _helpers.tables import Table, over_splits
from scipy import stats
from sklearn.metrics import average_precision_score
from sklearn.model_selection import train_test_split
from threadpoolctl import threadpool_limits
from torch import Tensor

import pyro_bbb as bbb
from pyro_bbb import metrics
from pyro_bbb.sklearn import BayesianClassifier, BayesianRegressor

LEAST_PROBABILITY = 1e-6  # to which probabilities of labels are raised before the logarithm
SMALL, LARGE = 2000, 5000  # training rows: of small tables, and beyond which splits are fewer
BUDGETS = {  # most training rows of the tables, most processor seconds of a fit, on average
    "up to 2,000 rows, 10 s": (SMALL, 10.0),
    "all tables, 60 s": (math.inf, 60.0),
}
SUMMARY = (
    "Scores of test rows, means over splits, with default settings. NLL in nats and CRPS are of "
    "each method's predictive density (a Normal for methods with a mean and a standard deviation), "
    "of a mixture of Normals in closed form; coverage and mean width are of central intervals. "
    f"Probabilities of classes below {LEAST_PROBABILITY:g} count as that. Seconds of one core are "
    "of fitting and predicting. Differences from ours are over the same splits, with 95 % "
    "intervals by Student's t. Ranks: the methods that need, on average over the tables, at most "
    "the seconds named; one that fails on a table is last there. Limits of training rows, drawn at "
    "random: Gaussian process 1,000 (500 for classes), bde 2,000, NGBoost 10,000; bde has one "
    "split. Held out to set a standard deviation, a conformal interval or the end of a training: a "
    "tenth of the training rows, at least ten."
)


@dataclass(frozen=True)
class Config(DataSettings):
    """Settings of one run."""

    tables: tuple[str, ...] = ()
    """Names of the tables; by default all."""
    methods: tuple[str, ...] = ()
    """Names of the methods to run; by default all that are installed."""
    splits: int = 3
    """Number of splits of each table, from the first; a third of it beyond 5,000 training rows."""
    fresh: tuple[str, ...] = ()
    """Names of methods whose figures are made again."""


# --- tables ---


def random_split(x: Array, y: Array, seed: int, test_size: float = 0.2, **options: Any) -> Split:
    """Return a random split; with ``stratify`` every class has its share of both parts."""
    x, x_test, y, y_test = train_test_split(x, y, test_size=test_size, random_state=seed, **options)
    return Split(x, y, x_test, y_test)


def sorted_split(x: Array, y: Array, feature: int, *, tails: bool) -> Split:
    """Return the split that tests the middle third by a feature, or the outer two sixths."""
    sixths = np.array_split(x[:, feature].argsort(kind="stable"), 6)
    tested = (0, 5) if tails else (2, 3)
    test = np.concatenate([sixths[k] for k in tested])
    rows = np.concatenate([sixths[k] for k in range(6) if k not in tested])
    return Split(x[rows], y[rows], x[test], y[test])


def uci(name: str, config: Config, *, by_feature: str = "") -> list[Split]:
    """Return the stored splits of a UCI table, or its gap or tail splits."""
    data = bbb.data.read_uci(find_tables(config.data_root, (name,))[name], dtype=torch.float64)
    x, y = data.x.numpy(), data.y.numpy()
    if by_feature:
        features = [k for k in range(x.shape[1]) if len(np.unique(x[:, k])) > 2]
        tails = by_feature == "tail"
        return [sorted_split(x, y, k, tails=tails) for k in features[: config.splits]]
    pairs = list(zip(data.train_index, data.test_index, strict=True))[: config.splits]
    return [Split(x[train], y[train], x[test], y[test]) for train, test in pairs]


def airfoil(config: Config) -> list[Split]:
    """Random splits, the targets in standard deviations of the training part."""
    root = config.data_root or os.environ.get("PYRO_BBB_DATA", "")
    table = np.loadtxt(Path(root) / "airfoil" / "airfoil.csv", delimiter=",", skiprows=1)
    splits = [random_split(table[:, :-1], table[:, -1], seed) for seed in range(config.splits)]
    scaled = [(split, split.y.mean(), split.y.std()) for split in splits]
    return [s._replace(y=(s.y - m) / sd, y_test=(s.y_test - m) / sd) for s, m, sd in scaled]


def mushrooms(config: Config) -> list[Split]:
    """Random splits with 1,000 rows to learn from."""
    x, y = (values.double().numpy() for values in bbb.data.load_mushrooms(root=config.data_root))
    options = {"train_size": 1000, "test_size": 2000, "stratify": y}
    return [random_split(x, y.astype(int), seed, **options) for seed in range(config.splits)]


def packaged(load: Callable[..., Any], classes: bool, config: Config) -> list[Split]:
    """Random splits of a table that comes with scikit-learn."""
    x, y = load(return_X_y=True)
    options = {"stratify": y} if classes else {}
    return [random_split(x, y, seed, **options) for seed in range(config.splits)]


def simulated(draw: Callable[[int, int], tuple[Array, Array]], rows: int, config: Config) -> Any:
    """Rows drawn for each split, and 2,000 for its test."""
    parts = [draw(rows + 2000, seed) for seed in range(config.splits)]
    return [Split(x[:rows], y[:rows], x[rows:], y[rows:]) for x, y in parts]


def friedman(
    noise: Callable[[Any, Array, Array], Array], rows: int, seed: int
) -> tuple[Array, Array]:
    """Return ten inputs and a noisy function of Friedman's first one, whose mean is 14, sd 5."""
    x, mean = bundled.make_friedman1(rows, random_state=seed)
    return x, noise(np.random.default_rng(seed), x, mean)


def linear(rows: int, seed: int) -> tuple[Array, Array]:
    """Eight inputs of which half count, with noise of sd 1."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 8))
    return x, x @ [2.0, -1.0, 0.5, 0.25, 0, 0, 0, 0] + rng.normal(size=rows)


def classes(rows: int, test_size: float, config: Config, **options: Any) -> list[Split]:
    """One made-up table of 20 inputs in random splits."""
    x, y = bundled.make_classification(rows, random_state=0, **options)
    return [random_split(x, y, seed, test_size, stratify=y) for seed in range(config.splits)]


FRIEDMAN: dict[str, Callable[[Any, Array, Array], Array]] = {
    "skewed": lambda rng, x, f: np.exp((f - 14) / 5 + 0.2 * rng.normal(size=len(f))),
    "noise-by-input": lambda rng, x, f: f + 0.3 * np.exp(2.5 * x[:, 5]) * rng.normal(size=len(f)),
    "heavy-tails": lambda rng, x, f: f + rng.standard_t(3, size=len(f)),
    "counts": lambda rng, x, f: rng.poisson(np.exp(f / 10)).astype(float),
}
NORMAL = partial(friedman, lambda rng, x, f: f + rng.normal(size=len(f)))
UCI = ("bostonHousing", "energy", "naval-propulsion-plant", "wine-quality-red", "yacht")
SORTED = ("bostonHousing", "energy", "yacht")
OTHERS = {
    "friedman2": lambda n, seed: bundled.make_friedman2(n, noise=125.0, random_state=seed),
    "friedman3": lambda n, seed: bundled.make_friedman3(n, noise=0.1, random_state=seed),
    **{name: partial(friedman, noise) for name, noise in FRIEDMAN.items()},
    "linear": linear,
}
RARE = {"weights": [0.98], "n_informative": 5, "flip_y": 0.01}
THREE = {"n_classes": 3, "n_informative": 8, "flip_y": 0.05}
REGRESSION: dict[str, Callable[[Config], list[Split]]] = {
    "airfoil": airfoil,
    **{name: partial(uci, name) for name in UCI},
    **{f"{name}-gap": partial(uci, name, by_feature="gap") for name in SORTED},
    **{f"{name}-tail": partial(uci, name, by_feature="tail") for name in SORTED},
    "diabetes": partial(packaged, bundled.load_diabetes, False),
    **{f"friedman1-{n}": partial(simulated, NORMAL, n) for n in (50, 200, 1000, 10_000, 100_000)},
    **{name: partial(simulated, draw, 1000) for name, draw in OTHERS.items()},
}
CLASSIFICATION: dict[str, Callable[[Config], list[Split]]] = {
    name.removeprefix("load_"): partial(packaged, getattr(bundled, name), True)
    for name in ("load_breast_cancer", "load_wine", "load_digits", "load_iris")
} | {
    "imbalanced": partial(classes, 10_000, 0.5, **RARE),
    "mushrooms": mushrooms,
    "three-classes": partial(classes, 12_000, 1 / 6, **THREE),
}


def made_up(kind: str, config: Config) -> list[Split]:
    """Two small splits for a smoke test, of targets or of two classes."""
    splits = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(70, 3))
        y = x[:, 0] ** 2 + x[:, 1] + 0.1 * rng.normal(size=70)
        y = y if kind == "regression" else (y > y.mean()).astype(int)
        splits.append(Split(x[:50], y[:50], x[50:], y[50:]))
    return splits


# --- methods: ours first ---


def fit_ours(split: Split, seed: int, **options: Any) -> Answer:
    """Return the estimator as it comes."""
    regressor = BayesianRegressor(random_state=seed, **options).fit(split.x, split.y)
    interval = partial(regressor.predict_interval, split.x_test)
    return Answer(regressor.posterior_predictive(split.x_test), interval)


def fit_our_classifier(split: Split, seed: int, **options: Any) -> Array:
    """Return the estimator as it comes."""
    classifier = BayesianClassifier(random_state=seed, **options).fit(split.x, split.y)
    return classifier.predict_proba(split.x_test)


HARDLY: dict[str, Any] = {"inference": "variational", "epochs": 2, "num_samples": 20}
OURS = {
    "BayesianRegressor": Method(fit_ours, brief=HARDLY),
    "ours, variational": Method(partial(fit_ours, inference="variational"), brief=HARDLY),
}
OUR_CLASSIFIER = {"BayesianClassifier": Method(fit_our_classifier, brief=HARDLY)}
OWN = (*OURS, *OUR_CLASSIFIER)


@dataclass(frozen=True)
class Kind:
    """Tables of targets or of classes, their methods, and the scores by which these are ranked."""

    tables: dict[str, Callable[[Config], list[Split]]]
    methods: dict[str, Method]
    ranked: tuple[str, ...]

    @property
    def ours(self) -> str:
        """The method with which the others are compared."""
        return next(iter(self.methods))


KINDS = {
    "regression": Kind(REGRESSION, OURS | REGRESSORS, ("nll", "crps", "rmse")),
    "classification": Kind(CLASSIFICATION, OUR_CLASSIFIER | CLASSIFIERS, ("nll", "brier", "error")),
}

# --- scores ---


def crps(prediction: Any, y: Tensor, rows: int = 50) -> float:
    r"""Return the mean continuous ranked probability score of targets ``[n]``.

    A mixture of Normals has it in closed form (Grimit et al. 2006): with
    $A(\mu, \sigma^2) = E|N(\mu, \sigma^2)|$ it is
    $\tfrac1S \sum_i A(y - \mu_i, \sigma_i^2)
    - \tfrac1{2S^2} \sum_{ij} A(\mu_i - \mu_j, \sigma_i^2 + \sigma_j^2)$.
    For other families $\int (F(z) - [z \ge y])^2 dz$ is a sum over 2,000 steps.
    """
    components = prediction.components
    if not isinstance(components, torch.distributions.Normal):
        return crps_by_steps(prediction, y)
    total = 0.0
    locs, scales = (p[..., 0].double() for p in (components.loc, components.scale))
    for loc, scale, target in zip(
        locs.split(rows, 1), scales.split(rows, 1), y.double().split(rows), strict=True
    ):
        spread = absolute_mean(loc[:, None] - loc, torch.hypot(scale[:, None], scale))
        score = absolute_mean(target - loc, scale).mean(0) - 0.5 * spread.mean((0, 1))
        total += float(score.sum())
    return total / len(y)


def absolute_mean(loc: Tensor, scale: Tensor) -> Tensor:
    """Return the mean of the absolute value of a Normal."""
    z = loc / scale
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    return loc * torch.erf(z / math.sqrt(2)) + 2 * scale * density


def crps_by_steps(prediction: Any, y: Tensor, steps: int = 2000) -> float:
    """Return the mean CRPS by midpoints between the 0.02 % and 99.98 % quantiles and the target."""
    ends = [prediction.quantile(p)[:, 0].double() for p in (2e-4, 1 - 2e-4)]
    low, high = torch.minimum(ends[0], y), torch.maximum(ends[1], y)
    score = torch.zeros_like(low)
    for k in range(steps):
        z = low + (high - low) * (k + 0.5) / steps
        score += (prediction.cdf(z[:, None])[:, 0] - (z >= y).double()).square()
    return float((score * (high - low) / steps).mean())


def score_regression(answer: Answer, y: Array) -> dict[str, float]:
    """Return NLL (nats) and CRPS of the density, RMSE, coverage and mean width of intervals."""
    prediction, targets = answer.prediction, torch.from_numpy(y).double()
    scores = {
        "nll": -float(prediction.log_prob(targets).mean()),
        "crps": crps(prediction, targets),
        "rmse": float((prediction.mean[:, 0].double() - targets).square().mean().sqrt()),
    }
    for level in LEVELS:
        low, high = (np.ravel(end) for end in (answer.interval or prediction.interval)(level))
        scores[f"coverage_{level:.0%}"] = float(np.mean((low <= y) & (y <= high)))
        scores[f"width_{level:.0%}"] = float(np.mean(high - low))
    return scores


def score_classes(probs: Array, y: Array) -> dict[str, float]:
    """Return NLL (nats), Brier score, error, ECE and, for two classes, average precision."""
    raised = np.maximum(probs, LEAST_PROBABILITY)
    p, labels = torch.from_numpy(raised / raised.sum(1, keepdims=True)), torch.from_numpy(y)
    scores = {
        "nll": metrics.nll(p, labels),
        "brier": metrics.brier(p, labels),
        "error": 1 - metrics.accuracy(p, labels),
        "ece": metrics.ece(p, labels),
    }
    if probs.shape[1] == 2:
        scores["average_precision"] = float(average_precision_score(y, probs[:, 1]))
    return scores


def evaluate(method: Method, split: Split, seed: int, smoke: bool) -> dict[str, Any]:
    """Fit a method on one core and score its predictions; ``{"failed": ...}`` if it fails."""
    options, silence = (method.brief or {}) if smoke else {}, io.StringIO()
    score = score_regression if split.y.dtype.kind == "f" else score_classes
    for module in method.packages:
        import_module(module)
    began = time.process_time()
    try:
        with threadpool_limits(1), warnings.catch_warnings(), redirect_stderr(silence):
            warnings.simplefilter("ignore")
            with redirect_stdout(silence):
                answer = method.fit(split, seed, **options)
            seconds = time.process_time() - began
            scores = score(answer, split.y_test)
        if not all(map(math.isfinite, scores.values())):
            raise ValueError(f"scores must be finite, got {scores}")
    except Exception as error:
        if smoke:
            raise
        return {"failed": f"{type(error).__name__}: {error}"}
    return scores | {"seconds": seconds}


# --- the report ---


def digest(parts: Iterable[bytes]) -> str:
    """Return the first eight digits of the SHA-256 of some bytes."""
    content = hashlib.sha256()
    for part in parts:
        content.update(part)
    return content.hexdigest()[:8]


def summary(records: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard error over splits of each score, and its differences from ours.

    A difference has the half-width of its 95 % interval by Student's t.
    """
    failed = [record["failed"] for record in records if "failed" in record]
    if failed:
        return {"failed": failed[0]}
    scores: dict[str, Any] = {}
    for name in records[0]:
        scores[name] = over_splits([record[name] for record in records])
        pairs = list(zip(records, ours, strict=False))
        if pairs and not any("failed" in record for record in ours):
            gap = over_splits([theirs[name] - own[name] for theirs, own in pairs])
            error, freedom = gap["standard_error"], len(pairs) - 1
            width = None if error is None else float(stats.t.ppf(0.975, freedom)) * error
            scores[name] |= {"difference": gap["mean"], "half_width": width}
    return scores


def mean_ranks(
    tables: Mapping[str, dict[str, Any]], scores: Sequence[str], budget: float
) -> dict[str, Any]:
    """Mean ranks over tables, by score, of the methods on all tables and within the budget.

    They are by our score plus the paired difference, and a method that fails on a table is last
    there. Two methods differ where their mean ranks are further apart than Nemenyi's critical
    difference at 5 % (Demsar 2006). The result is empty for a single method.
    """
    labels = []
    for label in next(iter(tables.values())):
        of_label = [summaries.get(label, {}) for summaries in tables.values()]
        seconds = [figures["seconds"]["mean"] for figures in of_label if "seconds" in figures]
        if all(of_label) and seconds and fmean(seconds) <= budget:
            labels.append(label)
    if len(labels) < 2:
        return {}
    means: dict[str, Any] = {}
    for score in scores:
        values = [
            [value_of(summaries[label], next(iter(summaries.values())), score) for label in labels]
            for summaries in tables.values()
        ]
        ranks = stats.rankdata(values, axis=1).mean(0).tolist()
        means[score] = dict(sorted(zip(labels, ranks, strict=True), key=lambda pair: pair[1]))
    k, number = len(labels), len(tables)
    quantile = float(stats.studentized_range.ppf(0.95, k, np.inf)) / math.sqrt(2)
    difference = quantile * math.sqrt(k * (k + 1) / (6 * number))
    return {"mean_ranks": means, "critical_difference": difference, "tables": number}


def value_of(scores: dict[str, Any], ours: dict[str, Any], score: str) -> float:
    """Return a method's mean score in terms of all splits of ours."""
    if "failed" in scores:
        return math.inf
    if "difference" not in scores[score] or "failed" in ours:
        return float(scores[score]["mean"])
    return float(ours[score]["mean"] + scores[score]["difference"])


def score_table(name: str, summaries: dict[str, Any]) -> Table:
    """Tabulate one table: a row for each method."""
    first = next((s for s in summaries.values() if "failed" not in s), {})

    def cell(score: str, scores: dict[str, Any]) -> str:
        if "failed" in scores:
            return "failed"
        return f"{scores[score]['mean']:.3g}" if score in scores else "–"

    def gap(score: str, scores: dict[str, Any]) -> str:
        figures = scores.get(score, {})
        if "difference" not in figures or scores is first:
            return "–"
        width = figures["half_width"]
        return f"{figures['difference']:+.2g}" + (f" ± {width:.2g}" if width is not None else "")

    columns: list[Any] = []
    for score in first:
        columns.append((HEADINGS.get(score, score.replace("_", " ")), partial(cell, score)))
        if score in ("nll", "crps", "brier"):
            columns.append((f"{HEADINGS[score]} - ours", partial(gap, score)))
    return tabulate.table(name, summaries, columns)


HEADINGS = {"nll": "NLL", "crps": "CRPS", "rmse": "RMSE", "brier": "Brier", "ece": "ECE"}


def rank_table(heading: str, ranks: dict[str, Any]) -> Table:
    """Tabulate the mean ranks of one group of tables, in the order of the first score."""
    scores = list(ranks["mean_ranks"])
    labels = ranks["mean_ranks"][scores[0]]
    rows = [[k, *(f"{ranks['mean_ranks'][s][k]:.2f}" for s in scores)] for k in labels]
    return Table((heading, *(HEADINGS.get(score, score) for score in scores)), rows)


def overview(tables: Mapping[str, dict[str, Any]], rows: Mapping[str, int]) -> Table:
    """Tabulate our scores on every table beside the lowest of the other methods."""
    lines = []
    for table, scores in tables.items():
        label, own = next(iter(scores.items()))
        if label not in OWN or "failed" in own:
            continue
        cells = [f"{rows[table]:,}"]
        second = "crps" if "crps" in own else "brier"
        for score in ("nll", second):
            others = {k: value_of(x, own, score) for k, x in scores.items() if k not in OWN}
            best = min(others, key=lambda k: others[k], default="–")
            cells += [f"{own[score]['mean']:.3g}"]
            cells += [f"{others[best]:.3g}, {best}" if others else "–"]
        coverage = own.get("coverage_90%")
        cells += [f"{100 * coverage['mean']:.1f}" if coverage else "–"]
        lines.append([table, *cells, f"{own['seconds']['mean']:.1f}"])
    columns = ("rows", "NLL", "best other", "CRPS or Brier", "best other", "90 % cover (%)", "s")
    return Table(("ours with default settings", *columns), lines)


@cache
def library() -> str:
    """Return a digest of the library's source, on which our figures depend."""
    paths = sorted(Path(bbb.__file__).parent.rglob("*.py"))
    return digest(path.read_bytes() for path in paths)


def name_of_job(table: str, label: str, number: int, split: Split, config: Config) -> str:
    """Return the name of a figure's file: by the split's rows, the seed, and ours by the source."""
    rows = digest(np.ascontiguousarray(array).tobytes() for array in split)
    version = f"-{library()}" if label in OWN else ""
    return f"{label.replace(' ', '_')}/{table}-{number}-{rows}-{config.seed}{version}"


def runnable(kinds: Iterable[Kind], config: Config) -> set[str]:
    """Return the wanted methods whose packages are installed; print what others need."""
    methods = {label: method for kind in kinds for label, method in kind.methods.items()}
    labels = set(chosen(methods, config.methods))
    for label in sorted(labels):
        absent = [name for module, name in methods[label].packages.items() if not find_spec(module)]
        if absent:
            print(f"{label} is left out: pip install {' '.join(absent)}")
        if absent or (config.smoke and methods[label].brief is None):
            labels.remove(label)
    return labels


def main(config: Config) -> dict[str, Any]:
    """Run the methods that are not done, then report all whose figures are there."""
    kinds = KINDS
    if config.smoke:
        kinds = {
            k: replace(x, tables={f"{k}-made-up": partial(made_up, k)}) for k, x in kinds.items()
        }
    check_names("--tables", config.tables, (name for x in kinds.values() for name in x.tables))
    known = [label for kind in kinds.values() for label in kind.methods]
    check_names("--methods", config.methods, known)
    check_names("--fresh", config.fresh, known)
    run, labels = Run(config), runnable(kinds.values(), config)
    folder = config.output / ("figures-smoke" if config.smoke else "figures")
    figures: dict[tuple[str, str], list[str]] = {}  # names of files by table and method
    rows, jobs = {}, []
    for kind in kinds.values():
        for table in chosen(kind.tables, config.tables):
            splits = kind.tables[table](config)
            rows[table] = len(splits[0].y)
            splits = splits[: max(1, config.splits // 3)] if rows[table] > LARGE else splits
            for label, method in kind.methods.items():
                for number, split in enumerate(splits[: method.splits]):
                    name = name_of_job(table, label, number, split, config)
                    figures.setdefault((table, label), []).append(name)
                    if label in labels:
                        call = partial(evaluate, method, split, config.seed + number, config.smoke)
                        jobs.append((number, rows[table] > LARGE, name, call))
                        if label in config.fresh:
                            (folder / f"{name}.json").unlink(missing_ok=True)
    jobs.sort(key=lambda job: job[:2])  # first splits first, and large tables after small ones
    run.spread({name: call for _, _, name, call in jobs}, folder=folder)

    def read(table: str, label: str) -> list[dict[str, Any]]:
        paths = [folder / f"{name}.json" for name in figures[table, label]]
        return [read_json(path) for path in paths] if all(path.exists() for path in paths) else []

    tables, ranks, seconds = {}, {}, 0.0
    for title, kind in kinds.items():
        results = {}
        for table in chosen(kind.tables, config.tables):
            records = {label: read(table, label) for label in kind.methods}
            seconds += sum(
                record.get("seconds", 0.0) for scored in records.values() for record in scored
            )
            results[table] = {k: summary(r, records[kind.ours]) for k, r in records.items() if r}
        tables |= {table: scores for table, scores in results.items() if scores}
        for group, (most, budget) in BUDGETS.items():
            members = {t: scores for t, scores in results.items() if rows[t] <= most and scores}
            if members and (ranked := mean_ranks(members, kind.ranked, budget)):
                ranks[f"{title}, {group}"] = ranked
    shown = [overview(tables, rows)]
    for heading, ranked in ranks.items():
        difference = f"critical difference {ranked['critical_difference']:.2f} (Nemenyi, 5 %)"
        shown.append(rank_table(f"{heading}; {difference}", ranked))
    shown += [score_table(table, scores) for table, scores in tables.items()]
    sizes = {table: rows[table] for table in tables}
    metrics = {"tables": tables, "ranks": ranks, "rows": sizes, "splits": config.splits}
    metrics["processor_seconds"] = seconds
    return run.report(__doc__, metrics, shown, remark=SUMMARY)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
