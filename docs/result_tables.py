# SPDX-License-Identifier: Apache-2.0
"""Tables of the documentation that the records of ``docs/results`` determine.

    python docs/result_tables.py

writes them into the pages, between ``<!-- table: NAME -->`` and ``<!-- end -->``. A new table is a
function here and its line in `PAGES`; a run's row of results is a line of `FIGURES`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "experiments"), str(ROOT / "benchmarks")]

import adapters  # noqa: E402
import compression  # noqa: E402
import continual  # noqa: E402
import gap_splits  # noqa: E402
import large  # noqa: E402
import ood  # noqa: E402
import paper_mnist  # noqa: E402
import paper_pruning  # noqa: E402
import posterior_fidelity  # noqa: E402
import posteriors  # noqa: E402
import residual  # noqa: E402
import shift  # noqa: E402
import tables  # noqa: E402
import uci_regression  # noqa: E402
import wheel_bandit  # noqa: E402
from _helpers.tables import Table, at, cell, table  # noqa: E402
from active_learning import labels_table  # noqa: E402

Rows: TypeAlias = list[list[str]]  # cells of the table on the page
RESULTS = ROOT / "docs" / "results"

FASHION = "Fashion-MNIST, 784-400-400-10, ensemble"
SINE = "Sine, epistemic sd off the data over that on them"
MNIST = "MNIST, 784-400-400-10, mean network"
SKIPPED = "Normal prior, layer skipped"
LENET, GARMENTS = "MNIST, LeNet-5, 50 draws", "Fashion-MNIST, LeNet-5, 50 draws"
MUSHROOMS = "Mushroom bandit (5 seeds), regret after 5,000"
AT, END = "regret at 5,000", "regret at 50,000"
CURVE = "The paper's Figure 5, true values beyond the data in the central 90 % (%)"
BEYOND = "interquartile range there"
BBB = "Bayes by Backprop"
LABELS = "MNIST, labels for 95 % right (5 seeds)"

# label, published figure, run, keys of the figure in its record (~ for a dot), factor, decimals
FIGURES: list[tuple[str, str, str, str, float, int]] = [
    (f"{FASHION}: accuracy (%)", "87.65", "fashion_mnist", "400-400.ensemble.accuracy", 100, 2),
    ("NLL (nats)", "–", "fashion_mnist", "400-400.ensemble.nll", 1, 3),
    ("ECE (%)", "–", "fashion_mnist", "400-400.ensemble.ece", 100, 2),
    ("AUROC against MNIST (%)", "–", "fashion_mnist", "400-400.digits.entropy", 100, 1),
    (f"{SINE}: fixed mixture", "–", "sine_regression", "fixed mixture.ratio", 1, 1),
    ("learned mixture", "–", "sine_regression", "learned mixture.ratio", 1, 1),
    ("trainable location", "–", "sine_regression", "trainable location.ratio", 1, 1),
    (
        *(f"{MNIST}: accuracy (%), Normal prior", "97.75", "mnist_mlp"),
        *("Normal prior.mean_network.accuracy", 100, 2),
    ),
    (
        *("accuracy (%), mixture prior", "–", "mnist_mlp"),
        *("mixture prior.mean_network.accuracy", 100, 2),
    ),
    ("75 % of the weights removed (%)", "–", "mnist_mlp", "mixture prior.pruning.0~75", 100, 2),
    ("95 % removed (%)", "–", "mnist_mlp", "mixture prior.pruning.0~95", 100, 2),
    (f"{SKIPPED}, 75 % removed (%)", "96.02", "mnist_mlp", f"{SKIPPED}.pruning.0~75", 100, 2),
    (f"{SKIPPED}, 95 % removed (%)", "72.59", "mnist_mlp", f"{SKIPPED}.pruning.0~95", 100, 2),
    (f"{LENET}: accuracy (%)", "98.5", "lenet5_mnist", "test.accuracy", 100, 2),
    ("NLL (nats)", "0.048", "lenet5_mnist", "test.nll", 1, 4),
    ("ECE (%)", "1.0", "lenet5_mnist", "test.ece", 100, 2),
    ("AUROC against noise (%)", "–", "lenet5_mnist", "foreign.Gaussian noise.entropy", 100, 1),
    (f"{GARMENTS}: accuracy (%)", "89.5", "lenet5_fashion", "test.accuracy", 100, 2),
    ("NLL (nats)", "0.292", "lenet5_fashion", "test.nll", 1, 3),
    ("ECE (%)", "1.1", "lenet5_fashion", "test.ece", 100, 2),
    (f"{MUSHROOMS}: Bayes by Backprop", "–", "mushroom_bandit", f"{BBB}.{AT}", 1, 0),
    ("greedy, plain network", "–", "mushroom_bandit", f"greedy.{AT}", 1, 0),
    ("after 50,000: Bayes by Backprop", "–", "mushroom_bandit", f"{BBB}.{END}", 1, 0),
    ("after 50,000: greedy, plain network", "–", "mushroom_bandit", f"greedy.{END}", 1, 0),
    ("after 50,000: 1 % at random", "–", "mushroom_bandit", f"1 % greedy.{END}", 1, 0),
    ("after 50,000: 5 % at random", "–", "mushroom_bandit", f"5 % greedy.{END}", 1, 0),
    (f"{CURVE}: Bayes by Backprop", "–", "paper_regression", f"{BBB}.coverage.90.off", 100, 1),
    ("plain network", "–", "paper_regression", "plain network.coverage.90.off", 100, 1),
    (f"{BEYOND}: Bayes by Backprop", "–", "paper_regression", f"{BBB}.interquartile.off", 1, 3),
    ("plain network", "–", "paper_regression", "plain network.interquartile.off", 1, 3),
    (f"{LABELS}: BALD", "–", "active_learning", "BALD.labels_at.95", 1, 0),
    ("highest entropy", "–", "active_learning", "entropy.labels_at.95", 1, 0),
    ("at random", "–", "active_learning", "random.labels_at.95", 1, 0),
]
UNCERTAINTY_BASELINES = "[uncertainty-baselines](https://github.com/google/uncertainty-baselines)"
TUNED_DROPOUT = "[tuned dropout](https://github.com/yaringal/DropoutUncertaintyExps)"
HEADLINES = {  # of the README: label; run and keys of `FIGURES`; source of the published figure
    "Fashion-MNIST, 784-400-400-10: accuracy (%)": (
        *("fashion_mnist", "400-400.ensemble.accuracy"),
        "[Rajkumar 2018](https://www.nitarshan.com/bayes-by-backprop)",
    ),
    "MNIST, LeNet-5: NLL (nats)": ("lenet5_mnist", "test.nll", UNCERTAINTY_BASELINES),
    "MNIST, LeNet-5: calibration error, ECE (%)": (
        *("lenet5_mnist", "test.ece", UNCERTAINTY_BASELINES),
    ),
    "MNIST, 95 % of the weights removed: accuracy (%)": (
        *("mnist_mlp", "mixture prior.pruning.0~95"),
        "[MXNet tutorial](https://github.com/zackchase/mxnet-the-straight-dope)",
    ),
}


def record(name: str) -> dict[str, Any]:
    """Read a record of ``docs/results``; without it one that has no figures."""
    path = RESULTS / f"{name}.json"
    empty: dict[str, Any] = {"mean": {}, "seeds": [0]}
    content: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else empty
    return content


# --- the README, results/index.md and the lab book ---


def published() -> Table:
    """Return published figures, their recipes here, and ours."""
    rows = []
    for label, known, run, keys, factor, digits in FIGURES:
        cells = (cell(record(f"{run}_{p}"), keys, factor, digits) for p in ("published", "ours"))
        script = {"lenet5_fashion": "lenet5_mnist.py --dataset fashion_mnist"}.get(run, f"{run}.py")
        rows.append((label, known, *cells, minutes_of_seed(run, keys), f"`{script}`"))
    columns = ("published", "its recipe here", "ours", "time", "experiment")
    return Table(("figure on test data, mean ± sd of 3 seeds", *columns), rows)


def minutes_of_seed(run: str, keys: str) -> str:
    """Minutes of one seed of a run that has the figure."""
    figures = record(f"{run}_ours")
    seconds = figures.get("seconds", 0) / len(figures["seeds"])
    return "–" if cell(figures, keys, 1, 0) == "–" else f"{seconds / 60:.0f} min"


def headline_rows() -> list[tuple[str, str, str, str]]:
    """Return label, published figure with its source, ours and our record's name."""
    known = {figure[2:4]: figure for figure in FIGURES}
    rows = []
    for label, (run, keys, source) in HEADLINES.items():
        _, theirs, _, _, factor, digits = known[run, keys]
        theirs = "72.59" if run == "mnist_mlp" else theirs  # of the network without a layer
        ours = cell(record(f"{run}_ours"), keys, factor, digits)
        rows.append((label, f"{theirs}, {source}", ours, f"{run}_ours"))
    ten = record("posteriors_ensembles")["problems"]["fashion_ensemble10"]["ivon10"]["mean"]["nll"]
    ((_, theirs, _),) = posteriors.PROBLEMS["fashion_ensemble10"].published.values()
    label = "Fashion-MNIST, ten LeNet-5, one run: NLL (nats)"
    published_nll = f"{theirs:.3f}, {UNCERTAINTY_BASELINES}"
    rows.append((label, published_nll, f"{ten:.3f}", "posteriors_ensembles"))
    wide = record("paper_mnist_ours")["methods"][paper_mnist.MIXTURE]["1200"]
    paper = paper_mnist.PUBLISHED[paper_mnist.MIXTURE][1200]
    source = "[Blundell et al. 2015](https://arxiv.org/abs/1505.05424)"
    label = "MNIST, 1,200 units, scale mixture: error (%)"
    ours = cell(wide, "error", 100, 2)
    rows.append((label, f"{paper:.2f}, {source}", ours, "paper_mnist_ours"))
    tables = record("uci_regression_ours")
    for name in ("energy", "yacht"):
        figures = uci_regression.rows_of(name, tables[name], "log_likelihood")
        *_, dropout, ours = map(uci_regression.shown, figures.values())
        label = f"UCI {name}, 20 splits: log-likelihood (nats)"
        rows.append((label, f"{dropout}, {TUNED_DROPOUT}", ours, "uci_regression_ours"))
    return rows


COMPARED = "on test data, mean ± sd of 3 seeds; UCI: ± standard error", "published, by", "ours"


def headlines() -> Table:
    """Return the README's choice, each published figure with its source."""
    return Table(COMPARED, [row[:3] for row in headline_rows()])


def headlines_with_runs() -> Table:
    """Return the same and learning in sequence, with commands and records."""
    rows = headline_rows()
    source = "[Nguyen et al. 2018](https://arxiv.org/abs/1710.10628)"
    published = 100 * continual.PROTOCOLS["permuted"].published["VCL"]
    ours = cell(record("continual")["protocols"]["permuted"]["vcl"], "accuracy", 100, 2)
    label = "Permuted MNIST, ten tasks by VCL, no coreset: accuracy (%)"
    rows.append((label, f"{published:.1f}, {source}", ours, "continual"))
    cells = [
        (
            *cells,
            f"[{ours}]({name}.json)",
            f"`python {command(name, len(record(name).get('seeds', [0])))}`",
        )
        for *cells, ours, name in rows
    ]
    return Table((*COMPARED, "command"), cells)


def methods_for_tables() -> Table:
    """Return mean ranks over all tables of numbers and of classes, a row for each method."""
    groups = (tables.rank_table(*group) for group in record("tables")["ranks"].items())
    regression, classes = (table for table in groups if "all tables" in table.columns[0])
    found = {row[0]: (*row[1:3], "–", "–") for row in regression.rows}
    for name, *ranks in classes.rows:
        ours = name if name != "BayesianClassifier" else "BayesianRegressor"
        found[ours] = (*found.get(ours, ("–", "–"))[:2], *ranks[:2])
    names = {"BayesianRegressor": "`BayesianRegressor()`, `BayesianClassifier()`"}
    columns = ("mean rank", "numbers: NLL", "CRPS", "classes: NLL", "Brier")
    return Table(columns, [(names.get(name, name), *ranks) for name, ranks in found.items()])


def posteriors_in_short() -> Table:
    """Return likelihood, detection and cost of the posteriors of one network."""
    found = record("posteriors")["problems"]["fashion_mlp"]
    scores = posteriors.table(posteriors.PROBLEMS["fashion_mlp"], found)
    detection = posteriors.ood_table(posteriors.PROBLEMS["fashion_mlp"], found)
    chosen = [scores.columns.index(name) for name in ("NLL (nats)", "training", "prediction")]
    epistemic = {row[0]: row[detection.columns.index("epistemic")] for row in detection.rows}
    rows = []
    for row in scores.rows:
        nll, *costs = (row[k] for k in chosen)
        rows.append((row[0], nll, epistemic[row[0]], *costs))
    columns = (scores.columns[0], "NLL (nats)", "AUROC of digits (%)", "training", "prediction")
    return Table(columns, rows)


CPU, GPU = "2 cores of a shared AMD EPYC server", "NVIDIA H200"
MACHINES = {None: CPU, "cpu": CPU, "cuda": GPU}  # by the record's device, else as it says
COMMANDS = {  # where it is not `experiments/NAME.py --preset PRESET --repeats SEEDS`
    "active_learning_batches": (
        "experiments/active_learning.py --preset batches --rules BALD BatchBALD random --repeats 6"
    ),
    "benchmarks": "benchmarks/run.py",
    "compression": "experiments/compression.py --methods log_uniform units magnitude",
    "continual": (
        "experiments/continual.py --protocols permuted split split_fashion split_one_head "
        "--methods vcl vcl_random vcl_k_center laplace kronecker fine_tuning joint"
    ),
    "cuda_graph": "benchmarks/cuda_graph.py",
    "gap_splits": (
        "experiments/gap_splits.py --datasets bostonHousing energy wine-quality-red yacht"
    ),
    "large": "benchmarks/large.py",
    "scaling": "benchmarks/scaling.py",
    "posteriors": "experiments/posteriors.py --problems fashion_mlp",
    "posteriors_ensembles": (
        "experiments/posteriors.py --problems mnist_ensemble10 fashion_ensemble10 --seeds 1"
    ),
    "posteriors_lenet5": "experiments/posteriors.py --problems mnist_lenet5",
    "residual": (
        "experiments/residual.py --seeds 1 --short-seeds 5 "
        '--problems "Fashion-MNIST, residual" "Fashion-MNIST, attention"'
    ),
    "shift_fashion": "experiments/shift.py --problems fashion_mlp --images 1000",
    "shift_lenet5": "experiments/shift.py --problems mnist_lenet5 --images 1000",
    "lenet5_fashion_ivon": (
        "experiments/lenet5_mnist.py --preset ivon --dataset fashion_mnist --repeats 3"
    ),
    **{
        f"uci_regression_{preset}": f"experiments/uci_regression.py --preset {preset}"
        for preset in ("dropout", "ensemble5", "ensemble10", "heteroscedastic", "single", "vbll")
    },
    "lenet5_fashion_ours": "experiments/lenet5_mnist.py --dataset fashion_mnist --repeats 3",
    "ood": (
        "experiments/ood.py --seeds 1 --networks 'residual, outliers' '784-400-400-10, MAP' "
        "'784-400-400-10, ensemble of 5' '784-400-400-10, BBB, normal, reparam' "
        "'784-400-400-10, last layer, prior of functions' 'LeNet-5, MAP'"
    ),
    "paper_mnist_ours": "experiments/paper_mnist.py --repeats 3 --device cuda",
    "paper_mnist_published": "experiments/paper_mnist.py --preset published --device cuda",
    "paper_pruning": "experiments/paper_pruning.py --seeds 1",
    "paper_pruning_ours": "experiments/paper_pruning.py --ways once steps --seeds 1 --device cuda",
}
WITHOUT_SEEDS = "uci_regression", "mushroom_bandit", "active_learning"


def command(name: str, seeds: int) -> str:
    """Return the command that made a record."""
    if name in COMMANDS:
        return COMMANDS[name]
    experiment, _, preset = name.rpartition("_")
    if preset not in ("ours", "published"):
        return f"experiments/{name}.py"
    words = [f"experiments/{experiment}.py"]
    words += ["--preset published"] if preset == "published" else []
    words += [f"--repeats {seeds}"] if seeds > 1 and experiment not in WITHOUT_SEEDS else []
    return " ".join(words)


def runs() -> Table:
    """Every record with its command, time and machine."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        run = record(path.stem)
        seconds = run.get("processor_seconds", run.get("seconds"))
        seconds = sum(seconds.values()) if isinstance(seconds, dict) else seconds
        cells = (
            f"[{path.stem}](../results/{path.name})",
            f"`python {command(path.stem, len(run.get('seeds', [0])))}`",
            "–" if seconds is None else f"{seconds / 60:.0f}",
            MACHINES.get(run.get("device"), run.get("device")),
        )
        rows.append(cells)
    return Table(("record", "command", "minutes", "machine"), rows)


def reproduction() -> Table:
    """Return the paper's networks by the settings of a public reproduction."""
    rows = []
    for method, widths in record("paper_mnist_published")["methods"].items():
        wide, bayesian = widths["1200"], method in (paper_mnist.GAUSSIAN, paper_mnist.MIXTURE)
        scales = " / ".join(cell(entry, "median_scale", 1, 4) for entry in widths.values())
        cells = [cell(entry, "error", 100, 2) for entry in widths.values()]
        cells += [cell(wide, "draws_error", 100, 2) if bayesian else "–"]
        cells += [cell(wide, "nll", 1, 4), cell(wide, "auroc", 100, 1), scales if bayesian else "–"]
        rows.append((method, *cells))
    columns = ("error at 400 (%)", "800", "1,200", "single draws, 1,200", "NLL, 1,200 (nats)")
    more = ("AUROC, 1,200 (%)", "median sd, 400 / 800 / 1,200")
    return Table(("published settings", *columns, *more), rows)


ABSENT = "not measured yet"
UCI_METHODS = {
    "dropout": "MC dropout",
    "ensemble5": "ensemble of 5",
    "ensemble10": "ensemble of 10",
    "vbll": "variational last layer, constant noise",
    "ours": "eight posteriors, constant noise (ours)",
    "single": "one posterior",
    "heteroscedastic": "eight posteriors",
}


def uci_methods() -> Table:
    """NLL of all presets on the UCI tables."""
    presets = UCI_METHODS.items()
    return uci_regression.methods_table({v: record(f"uci_regression_{k}") for k, v in presets})


def uci_scores(score: str) -> Table:
    """Return scores on the UCI tables next to published ones."""
    tables = record("uci_regression_ours")
    return uci_regression.score_table(
        {name: tables[name] for name in uci_regression.PUBLISHED}, score
    )


def estimators() -> str:
    """Tabulate the estimators' scores on many tables, or say that there is no record."""
    found = record("tables")
    return str(tables.overview(found["tables"], found["rows"])) if "tables" in found else ABSENT


def ranks() -> str:
    """Tabulate mean ranks over tables, or say that there is no record."""
    groups = record("tables").get("ranks", {})
    return "\n\n".join(str(tables.rank_table(*group)) for group in groups.items()) or ABSENT


def of_problem(run: str, problem: str, make: Callable[..., Table]) -> Table:
    """Tabulate a problem's scores."""
    return make(posteriors.PROBLEMS[problem], record(run)["problems"][problem])


def shifted(run: str, make: Callable[..., Table]) -> Table:
    """Tabulate scores under shift."""
    ((name, found),) = record(run)["problems"].items()
    return make(name, found) if make is shift.shifted_table else make(found)


# --- performance.md and its log, scaling.md ---


def comparisons(suite: str, ending: str = "") -> dict[str, dict[str, Any]]:
    """Contenders of a suite's benchmarks, by their titles."""
    found = [x for x in record("benchmarks")["comparisons"] if x["suite"] == suite]
    return {x["title"]: x["contenders"] for x in found if x["title"].endswith(ending)}


def timed(
    heading: str,
    found: Mapping[str, dict[str, Any]],
    form: Callable[[str, dict[str, Any]], str],
    ending: str = "",
) -> Table:
    """Write a row for each contender, a column for each benchmark."""
    names = list(dict.fromkeys(name for contenders in found.values() for name in contenders))
    rows = [
        (name, *(form(name, c[name]) if name in c else "–" for c in found.values()))
        for name in names
    ]
    return Table((heading, *(title.removesuffix(ending) for title in found)), rows)


def small(ending: str) -> Table:
    """Microseconds of a step of small networks."""
    form = lambda name, x: f"{1e3 * x['median_ms']:,.0f}"  # noqa: E731
    return timed("microseconds per step", comparisons("small", ending), form, ending)


def seconds(suite: str, ending: str = "") -> Table:
    """Seconds of whole trainings."""
    form = lambda name, x: f"{x['median_ms'] / 1e3:.2f}"  # noqa: E731
    return timed("seconds", comparisons(suite, ending), form)


def ratios(suite: str, floor: str, titles: Sequence[str] = ()) -> Table:
    """Medians of the floor in ms, and of all others as multiples of it."""
    found = {k: v for k, v in comparisons(suite).items() if not titles or k in titles}
    form = lambda name, x: (  # noqa: E731
        f"{x['median_ms']:.3g} ms" if name == floor else f"{x['ratio']:.2f}"
    )
    return timed("", found, form)


def cuda_graph() -> Table:
    """Milliseconds per step on a GPU, and the ratio to the ordinary network's."""
    content = record("cuda_graph")
    widths = content["milliseconds_per_step"]
    rows = [
        (name, *(f"{row[name]:.3f} ({row[name] / row['ordinary']:.2f})" for row in widths.values()))
        for name in next(iter(widths.values()))
    ]
    return Table((content["device"], *(f"width {width}: ms (ratio)" for width in widths)), rows)


def aims() -> Table:
    """Aims of the benchmarks."""
    rows = [
        (aim["what"], f"{aim['value']:.2f}", f"{aim['limit']:g}", aim["verdict"])
        for aim in record("benchmarks")["aims"]
        if aim["value"] is not None
    ]
    return Table(("", "measured", "at most", ""), rows)


LAYOUTS = {"1 x 1": "1 with 1", "1 x 2": "1 with 2", "2 x 1": "2 with 1"}


def step_seconds(layout: str, batch_size: int) -> float:
    """Seconds of a step of a layout of processes and threads."""
    found: float = record("scaling")["measured"][layout]["steps"][str(batch_size)]
    return found


def strong() -> Table:
    """Strong scaling: one batch over the processes."""
    b = 2 * record("scaling")["config"]["batch_size"]
    one = step_seconds("1 x 1", b)
    rows = [
        (name, str(b), f"{1e3 * step_seconds(key, b):.1f}", f"{one / step_seconds(key, b):.2f}")
        for key, name in LAYOUTS.items()
    ]
    return Table(("processes with threads", "examples per step", "ms per step", "speed-up"), rows)


def weak() -> str:
    """Weak scaling: one batch for each process."""
    b = record("scaling")["config"]["batch_size"]
    sizes = {"1 x 1": b, "2 x 1": 2 * b}
    rows = [
        (
            LAYOUTS[k],
            str(n),
            f"{1e3 * step_seconds(k, n):.1f}",
            f"{n / step_seconds(k, n) / 1e3:.1f}",
        )
        for k, n in sizes.items()
    ]
    efficiency = step_seconds("1 x 1", b) / step_seconds("2 x 1", 2 * b)
    columns = ("processes with threads", "examples per step", "ms per step", "1,000 examples per s")
    return f"{Table(columns, rows)}\n\nEfficiency of weak scaling: {100 * efficiency:.0f} %."


def between() -> Table:
    """Communication of a step."""
    found = record("scaling")["measured"]["2 x 1"]
    rows = [
        ("numbers that are added up", f"{found['floats']:,}"),
        ("bytes per step and process, by the formula", f"{4 * found['floats']:,}"),
        ("bytes per step and process, measured", f"{found['bytes_per_step'] / 2:,.0f}"),
        ("ms of that sum, alone", f"{1e3 * found['sum_seconds']:.2f}"),
        ("ms of the sum of one number", f"{1e3 * found['smallest_sum_seconds']:.2f}"),
    ]
    return Table(("between two processes", ""), rows)


def line() -> str:
    """Return the line of a step's seconds."""
    fixed, per_example = (record("scaling")["model"][name] for name in ("fixed", "per_example"))
    numbers = f"$a$ = {1e3 * fixed:.1f} ms, $c$ = {1e3 * per_example:.3f} ms"
    return f"{numbers}: a step's fixed work is that on {fixed / per_example:.0f} examples."


def scaling_model() -> Table:
    """Scaling to more workers, by the model."""
    content = record("scaling")
    b, model = content["config"]["batch_size"], content["model"]
    one, large_step = model["rows"][0], model["fixed"] + 16 * b * model["per_example"]
    rows = [
        (
            f"{row['workers']:,}",
            f"{1e3 * row['sum']:.1f}",
            f"{1e3 * row['weak']:.1f}",
            f"{100 * one['weak'] / row['weak']:.0f}",
            f"{row['workers'] * b / row['weak'] / 1e3:,.0f}",
            f"{100 * large_step / (large_step + row['sum']):.0f}",
            f"{1e3 * row['strong']:.1f}",
            f"{one['strong'] / row['strong']:.2f}",
        )
        for row in model["rows"]
    ]
    columns = (
        *("workers", "ms of the sum", f"weak, {b} each: ms per step", "efficiency (%)"),
        *("1,000 examples per s", f"weak, {16 * b:,} each: efficiency (%)"),
        *(f"strong, {2 * b} in all: ms per step", "speed-up"),
    )
    return Table(columns, rows)


# --- the guides, whose first and last columns are written by hand ---

POSTERIORS = {  # names on the page, and those of `experiments/posteriors.py`
    "delta": "map",
    "laplace, last layer": "laplace_last",
    "vbll": "vbll",
    "laplace, Kronecker": "laplace_kron",
    "run_sgmcmc": "sghmc",
    "swag": "swag",
    "rank1_ensemble": "rank1",
    "softplus_normal, IVON": "ivon",
    "MC dropout": "dropout",
    "softplus_normal": "bbb_normal_reparam",
    "with local_reparam": "bbb_normal_local_reparam",
    "ensemble of delta": "ensemble",
}


@dataclass(frozen=True)
class ByRow:
    """A page's table whose middle columns are filled, given the first cell without backticks."""

    cells: Callable[[str], Sequence[str]]

    def __call__(self, rows: Rows) -> Table:
        """Fill the table's rows."""
        head, _, *others = rows
        filled = [(x[0], *self.cells(x[0].replace("`", "")), x[-1]) for x in others]
        return Table(head, filled)


def of_posterior(name: str) -> Sequence[str]:
    """Scores and costs of a posterior."""
    mean = record("posteriors")["problems"]["fashion_mlp"][POSTERIORS[name]]["mean"]
    costs = (f"{mean[key]:.1f}" for key in ("training", "prediction"))
    return f"{mean['nll']:.3f}", f"{100 * mean['ood']['epistemic']:.1f}", *costs


def of_guide(name: str) -> Sequence[str]:
    """Distances from NUTS off the data, and seconds, over the reference posteriors."""
    key = {"delta": "delta (MAP)"}.get(name, name.removeprefix("no guide: "))
    problems = record("posterior_fidelity")["problems"].values()
    found = [problem["guides"][key] for problem in problems]
    found = [guide for guide in found if "failed" not in guide]
    distances = [guide["off"]["function"] for guide in found]
    spreads = [guide["off"]["sd_ratio"] for guide in found]
    values = (median(distances), max(distances), min(spreads), max(spreads))
    return *(f"{x:.2f}" for x in values), f"{median(guide['seconds'] for guide in found):.0f}"


def of_estimator(name: str) -> Sequence[str]:
    """Time of a step by an estimator."""
    key = name.strip('"')
    key = "pyro_bbb (mixture)" if key == "reparam" else f"pyro_bbb, {key}"
    (steps,) = (
        x["contenders"]
        for x in record("benchmarks")["comparisons"]
        if x["title"] == "gradient estimators of pyro_bbb, width 400"
    )
    return (f"{steps[key]['ratio']:.1f}",)


def compressed() -> Table:
    """Return scores, sizes and speed of compressed posteriors of digits."""
    summaries = {}
    for name in ("lenet300_mnist", "lenet5_mnist"):
        title = compression.PROBLEMS[name].title.removesuffix(", MNIST")
        for method, summary in record("compression")["problems"][name].items():
            if compression.METHODS[method].prior is not None:
                last = max(summary["mean"]["states"], key=int)
                label = f"{title}, {compression.METHODS[method].label}"
                summaries[label] = at(summary, "states", last)
    names = ("factor", "error (%)", "NLL (nats)", "file, times smaller", "1,000 images")
    columns = [column for column in compression.COLUMNS if column[0] in names]
    return table("MNIST", summaries, columns)


def pruned() -> Table:
    """Table 2 of the paper, by all ways."""
    first = record("paper_pruning_ours")["errors"]
    ways = {name: {"mean": errors} for name, errors in first.items()}
    return paper_pruning.errors_table(ways | record("paper_pruning")["errors"])


WIDTHS = [f"width {width}, batch 128" for width in (400, 800, 1200)]
PAPER = record("paper_mnist_ours")["methods"]
PAGES: dict[str, dict[str, Callable[..., Table | str]]] = {
    "README.md": {"headlines": headlines},
    "docs/results/index.md": {
        "published": headlines_with_runs,
        "methods for tables": methods_for_tables,
        "posteriors": posteriors_in_short,
    },
    "docs/development/lab_book.md": {
        "published": published,
        "runs": runs,
        "paper errors": lambda: paper_mnist.error_table(PAPER, paper_mnist.Config()),
        "paper scores": lambda: paper_mnist.calibration_table(PAPER),
        "reproduction": reproduction,
        "paper pruning": pruned,
        "wheel": lambda: wheel_bandit.table(record("wheel_bandit")["agents"]),
        **{
            f"{problem}{kind}": partial(of_problem, run, problem, make)
            for run, problem in (
                ("posteriors", "fashion_mlp"),
                ("posteriors_lenet5", "mnist_lenet5"),
                ("posteriors_ensembles", "mnist_ensemble10"),
                ("posteriors_ensembles", "fashion_ensemble10"),
            )
            for kind, make in (("", posteriors.table), (" ood", posteriors.ood_table))
            if not (kind and run == "posteriors_ensembles")
        },
        **{
            f"{run} {make.__name__}": partial(shifted, run, make)
            for run in ("shift_fashion", "shift_lenet5")
            for make in (
                shift.shifted_table,
                shift.confidence_table,
                shift.moved_table,
            )
            if run == "shift_lenet5" or make is not shift.moved_table
        },
        **{
            f"continual {name}": partial(continual.table, name, found)
            for name, found in record("continual")["protocols"].items()
        },
        **{
            f"adapters {name}": partial(adapters.table, name, found)
            for name, found in record("adapters")["tasks"].items()
        },
        **{
            table.columns[0]: partial(str, table)
            for experiment in (ood, compression)
            for table in experiment.tables(record(experiment.__name__))
        },
        "rmse": partial(uci_scores, "rmse"),
        "log-likelihood": partial(uci_scores, "log_likelihood"),
        "uci methods": uci_methods,
        "tables": estimators,
        "table ranks": ranks,
        "labels": lambda: labels_table(
            record("active_learning_batches"), ("BALD", "BatchBALD", "random")
        ),
    },
    "docs/fidelity.md": {
        **{
            name: partial(str, table)
            for name, table in posterior_fidelity.tables(
                record("posterior_fidelity")["problems"]
            ).items()
        },
        "gap": lambda: gap_splits.gap_table(record("gap_splits")["tables"]),
    },
    "docs/performance.md": {
        "small1": partial(small, ", 1 thread"),
        "small2": partial(small, ", 2 threads"),
        "cold": partial(seconds, "small", ", compilation counted"),
        "tables": partial(seconds, "tables"),
        "steps": partial(ratios, "steps", "deterministic", WIDTHS),
        "predict": partial(ratios, "predict", "100 deterministic passes"),
        "cuda_graph": cuda_graph,
        "large": lambda: large.table(record("large")["networks"]),
    },
    "docs/development/performance_log.md": {"aims": aims},
    "docs/scaling.md": {
        "strong": strong,
        "weak": weak,
        "between": between,
        "line": line,
        "model": scaling_model,
    },
    "docs/guide/choose.md": {
        "posteriors": ByRow(of_posterior),
        "guides": ByRow(of_guide),
        "estimators": ByRow(of_estimator),
    },
    "docs/guide/pruning_and_deploying.md": {"compressed": compressed},
    "docs/guide/residual_networks.md": {
        table.columns[0]: partial(str, table) for table in residual.tables(record("residual"))
    },
}


def filled(page: str) -> str:
    """Return the text of a page with its tables as the records have them.

    A table whose rule is short keeps its head, and has cells without padding.
    """
    text = (ROOT / page).read_text("utf-8")
    for name, make in PAGES[page].items():
        mark = f"<!-- (?:table: )?{re.escape(name)} -->\n"
        ((before, old, after),) = re.findall(f"({mark})(.*?)(\n<!-- end -->)", text, re.S)
        lines = old.splitlines()
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        new = make(rows) if isinstance(make, ByRow) else make()
        if isinstance(new, Table) and set(rows[1]) <= {"---", "---:"}:
            new = "\n".join([*lines[:2], *(f"| {' | '.join(row)} |" for row in new.rows)])
        text = text.replace(f"{before}{old}{after}", f"{before}{new}{after}")
    return text


if __name__ == "__main__":
    for page in PAGES:
        (ROOT / page).write_text(filled(page), "utf-8")
