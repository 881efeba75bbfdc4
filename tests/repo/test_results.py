# SPDX-License-Identifier: Apache-2.0
"""The results of README and results page are those of the committed runs, in docs/results."""

import importlib
import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
README, PAGE = ((ROOT / name).read_text() for name in ("README.md", "docs/results.md"))

FASHION = "Fashion-MNIST, 784-400-400-10, ensemble"
SINE = "Sine, epistemic sd off the data over that on them"
MNIST = "MNIST, 784-400-400-10, mean network"
SKIPPED = "Normal prior, layer skipped"
LENET = "MNIST, LeNet-5, 50 draws"
MUSHROOMS = "Mushroom bandit (5 seeds), regret after 5,000"
AT, END = "regret at 5,000", "regret at 50,000"
GARMENTS = "Fashion-MNIST, LeNet-5, 50 draws"
CURVE = "The paper's Figure 5, true values beyond the data in the central 90 % (%)"
BEYOND = "interquartile range there"
BBB = "Bayes by Backprop"
LABELS = "MNIST, labels for 95 % right (5 seeds)"

# what it is, the published figure, run, where in its figures, factor, decimals
FIGURES = [
    (f"{FASHION}: accuracy (%)", "87.65", "fashion_mnist", "400-400.ensemble.accuracy", 100, 2),
    ("NLL (nats)", "–", "fashion_mnist", "400-400.ensemble.nll", 1, 3),
    ("ECE (%)", "–", "fashion_mnist", "400-400.ensemble.ece", 100, 2),
    ("AUROC against MNIST (%)", "–", "fashion_mnist", "400-400.digits.entropy", 100, 1),
    (f"{SINE}: fixed mixture", "–", "sine_regression", "fixed mixture.ratio", 1, 1),
    ("learned mixture", "–", "sine_regression", "learned mixture.ratio", 1, 1),
    ("trainable location", "–", "sine_regression", "trainable location.ratio", 1, 1),
    (
        f"{MNIST}: accuracy (%), Normal prior",
        "97.75",
        "mnist_mlp",
        "Normal prior.mean_network.accuracy",
        100,
        2,
    ),
    (
        "accuracy (%), mixture prior",
        "–",
        "mnist_mlp",
        "mixture prior.mean_network.accuracy",
        100,
        2,
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
COMMANDS = {"lenet5_fashion": "lenet5_mnist.py --dataset fashion_mnist"}


@pytest.fixture
def shown(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module("_helpers.repeats").shown


def read(run):
    path = RESULTS / f"{run}.json"
    figures = json.loads(path.read_text()) if path.exists() else {"mean": {}, "seeds": [0] * 3}
    assert len(figures["seeds"]) >= 3
    return figures


def keys(where):
    return [key.replace("~", ".") for key in where.split(".")]


def has(figures, where):
    """Whether a run has a figure."""
    found = figures["mean"]
    for key in keys(where):
        if key not in found:
            return False
        found = found[key]
    return True


def cell(shown, run, where, factor, digits):
    """One figure of a run as the table has it, a dash where the run has none."""
    figures = read(run)
    if not has(figures, where):
        return "–"
    return shown(figures, *keys(where), factor=factor, digits=digits)


def minutes(run, where):
    """Of one seed of the run that has the figure."""
    figures = read(run)
    seconds = figures.get("seconds", 0) / len(figures["seeds"])
    return f"{seconds / 60:.0f} min" if has(figures, where) else "–"


def row(shown, figure):
    what, published, run, where, factor, digits = figure
    recipes = ("published", "ours")
    cells = (cell(shown, f"{run}_{recipe}", where, factor, digits) for recipe in recipes)
    command = COMMANDS.get(run, f"{run}.py")
    return (
        "| "
        + " | ".join([what, published, *cells, minutes(f"{run}_ours", where), f"`{command}`"])
        + " |"
    )


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure[2]} {figure[3]}")
def test_the_table_has_what_the_runs_found(figure, shown):
    assert row(shown, figure) in PAGE


HEADLINES = [  # of the README: run, where in its figures, factor, decimals
    ("Fashion-MNIST, 784-400-400-10: accuracy (%)", "fashion_mnist", "400-400.ensemble.accuracy"),
    ("the same, AUROC of MNIST's digits (%)", "fashion_mnist", "400-400.digits.entropy"),
    ("MNIST, LeNet-5: NLL (nats)", "lenet5_mnist", "test.nll"),
    ("MNIST, LeNet-5: calibration error, ECE (%)", "lenet5_mnist", "test.ece"),
    ("Fashion-MNIST, LeNet-5: calibration error, ECE (%)", "lenet5_fashion", "test.ece"),
    (
        "MNIST, 95 % of the weights removed: accuracy (%)",
        "mnist_mlp",
        "mixture prior.pruning.0~95",
    ),
]


@pytest.mark.parametrize(("what", "run", "where"), HEADLINES)
def test_a_headline_has_what_the_run_found(what, run, where, shown):
    ((factor, digits),) = {each[4:] for each in FIGURES if each[2:4] == (run, where)}
    published = re.search(rf"^\| {re.escape(what)} \| (\S+) \|", README, flags=re.MULTILINE)[1]
    ours, time = cell(shown, f"{run}_ours", where, factor, digits), minutes(f"{run}_ours", where)
    assert f"| {what} | {published} | {ours} | {time} |" in README
    told = {each[1] for each in FIGURES if each[2] == run}
    assert published in told


def test_the_other_headlines_have_what_the_runs_found(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    report, uci, mnist = map(
        importlib.import_module,
        ("_helpers.posterior_report", "_helpers.uci_report", "paper_mnist"),
    )
    ten = json.loads((RESULTS / "posteriors_ensembles.json").read_text())["problems"]
    nll = ten["fashion_ensemble10"]["ivon10"]["mean"]["nll"]
    ((_, theirs, _),) = report.PROBLEMS["fashion_ensemble10"].published.values()
    assert f"ten LeNet-5, one run: NLL (nats) | {theirs:.3f} | {nll:.3f} |" in README
    methods = json.loads((RESULTS / "paper_mnist_ours.json").read_text())["methods"]
    error = mnist.cell(methods[mnist.MIXTURE]["1200"], "error")
    assert f"scale mixture: error (%) | 1.32 | {error} |" in README
    tables = json.loads((RESULTS / "uci_regression_ours.json").read_text())
    for name in ("energy", "yacht"):
        *_, dropout, ours = map(
            uci.shown, uci.rows_of(name, tables[name], "log_likelihood").values()
        )
        assert f"| UCI {name}, 20 splits: log-likelihood (nats) | {dropout} | {ours} |" in README


def test_every_committed_run_is_of_a_listed_experiment():
    runs = {path.stem.rpartition("_")[0] for path in RESULTS.glob("*_*.json")}
    others = {
        "cuda",
        "gap",
        "laplace",
        "posterior",
        "posteriors",
        "shift",
        "sklearn",
        "uci_regression",
        "wheel",
        "paper_mnist",
        "paper_pruning",
    }
    assert runs - others == {figure[2] for figure in FIGURES}


def test_the_posteriors_have_what_the_runs_found(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    report = importlib.import_module("_helpers.posterior_report")
    page = (ROOT / "docs" / "results.md").read_text()
    best = {"posteriors": ["ivon", "rank1"], "posteriors_lenet5": ["ivon", "dropout"]}
    for record, methods in best.items():
        ((name, found),) = json.loads((RESULTS / f"{record}.json").read_text())["problems"].items()
        for table in (report.table, report.ood_table):
            assert str(table(report.PROBLEMS[name], found)) in page
        nll = {method: each["mean"]["nll"] for method, each in found.items()}
        assert sorted(nll, key=nll.__getitem__)[:2] == methods
        if record == "posteriors_lenet5":
            continue
        digits = {method: each["mean"]["ood"] for method, each in found.items()}
        assert max(digits, key=lambda method: digits[method]["epistemic"]) == "laplace_kron"
        variational = [m for m in digits if m.startswith(("bbb", "vbll", "ivon", "rank1"))]
        assert digits["map"]["entropy"] > max(digits[m]["entropy"] for m in variational)


def test_ten_posteriors_are_ahead_of_ten_networks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    report = importlib.import_module("_helpers.posterior_report")
    page = (ROOT / "docs" / "results.md").read_text()
    record = json.loads((RESULTS / "posteriors_ensembles.json").read_text())
    for name, found in record["problems"].items():
        assert str(report.table(report.PROBLEMS[name], found)) in page
        ten, posteriors = (found[method]["mean"] for method in ("ensemble10", "ivon10"))
        assert posteriors["nll"] < ten["nll"]
        assert posteriors["accuracy"] > ten["accuracy"]
        assert posteriors["ood"]["entropy"] > ten["ood"]["entropy"]


@pytest.mark.parametrize(
    ("record", "better", "scores"),
    [
        ("shift_fashion", ("ivon_warm", "ivon_warm3", "dropout", "laplace_kron"), ("ece", "brier")),
        ("shift_lenet5", ("ivon_warm", "rank1"), ("ece",)),
        ("shift_lenet5", ("ivon_warm3",), ("ece", "brier", "nll")),
    ],
)
def test_the_shift_has_what_the_run_found(monkeypatch, record, better, scores):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    report = importlib.import_module("_helpers.shift_report")
    ((name, found),) = json.loads((RESULTS / f"{record}.json").read_text())["problems"].items()
    assert str(report.shifted_table(name, found)) in PAGE
    assert str(report.confidence_table(found)) in PAGE
    if "rotated" in found["map"]["mean"]:
        assert str(report.moved_table(found)) in PAGE
    shifted = {method: each["mean"]["shifted"] for method, each in found.items()}
    for method in better:
        for score in scores:
            assert shifted[method][score] < shifted["ensemble"][score]
    for each in found.values():
        confidence = [of["confidence"] for of in each["mean"]["severity"].values()]
        assert confidence == sorted(confidence, reverse=True)


def test_confidence_rises_again_on_turned_digits_and_hardly_on_moved_ones():
    record = json.loads((RESULTS / "shift_lenet5.json").read_text())
    risen = set()
    for method, each in record["problems"]["mnist_lenet5"].items():
        turned, moved = (
            [of["confidence"] for of in each["mean"][kind].values()]
            for kind in ("rotation", "translation")
        )
        fallen = turned[: turned.index(min(turned)) + 1]
        assert 15 * (len(fallen) - 1) in (60, 75)
        assert fallen == sorted(fallen, reverse=True)
        assert 0.75 < turned[-1] < 0.91
        rise = max(later - before for before, later in itertools.pairwise(moved))
        assert rise < 0.0065
        risen |= {method} if rise > 0 else set()
    assert risen == {"ivon", "ivon4", "rank1", "sghmc"}


def test_the_sequences_have_what_the_run_found(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    report = importlib.import_module("_helpers.continual_report")
    protocols = importlib.import_module("_helpers.continual_tasks").PROTOCOLS
    record = json.loads((RESULTS / "continual.json").read_text())["protocols"]
    for name, found in record.items():
        assert str(report.table(name, found)) in PAGE
    permuted, published = record["permuted"], protocols["permuted"].published
    assert permuted["vcl"]["mean"]["accuracy"] > published["VCL"]
    ahead = [seed["accuracy"] for seed in permuted["vcl_random"]["seeds"]]
    assert min(ahead) > published["VCL, random coreset of 200"]
    assert min(seed["accuracy"] for seed in permuted["kronecker"]["seeds"]) > 0.94
    split, published = record["split"], protocols["split"].published
    reached = statistics.fmean(seed["accuracy"] for seed in split["vcl"]["seeds"])
    assert reached > max(0.985, published["mean field, Swaroop et al."])
    assert min(seed["accuracy"] for seed in split["kronecker"]["seeds"]) > published["SI"]
    used = [
        [sum(level > 0 for level in levels) / len(levels) for levels in seed["snr"]]
        for seed in permuted["vcl"]["seeds"]
    ]
    means = [statistics.fmean(after) for after in zip(*used, strict=True)]
    assert [round(100 * means[i]) for i in (0, 3, 6, 9)] == [15, 56, 75, 86]


def test_the_labels_have_what_the_run_found(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    script = importlib.import_module("active_learning")
    record = json.loads((RESULTS / "active_learning_batches.json").read_text())
    assert str(script.labels_table(record, ("BALD", "BatchBALD", "random"))) in PAGE
    assert len(record["seeds"]) == 6
    for rule in ("BALD", "BatchBALD"):
        labels = [run[rule]["labels_at"]["95"] for run in record["seeds"].values()]
        assert statistics.median(labels) < 195  # Kirsch et al. (2019)
        assert all(run[rule]["reached"]["95"] for run in record["seeds"].values())


def test_the_adapted_networks_have_what_the_run_found(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    report = importlib.import_module("_helpers.adapter_report")
    tasks = json.loads((RESULTS / "adapters.json").read_text())["tasks"]
    for name, found in tasks.items():
        assert str(report.table(name, found)) in PAGE
        means = {method: each["mean"] for method, each in found.items()}
        for score in ("nll", "ece"):
            assert means["bayes"][score] < means["map"][score]
        assert means["bayes_short"]["nll"] < means["map"]["nll"]
        ahead = means["bayes_short"]["nll"] < means["ensemble"]["nll"]
        assert ahead == (name in ("mnist_hundredth", "decimal", "decimal_tenth"))
        assert means["bayes_short"]["training"] < means["ensemble"]["training"] / 2


UCI_METHODS = {
    "dropout": "MC dropout",
    "ensemble5": "ensemble of 5",
    "ensemble10": "ensemble of 10",
    "vbll": "variational last layer, constant noise",
    "ours": "eight posteriors, constant noise (ours)",
    "single": "one posterior",
    "heteroscedastic": "eight posteriors",
}


def test_the_uci_methods_have_what_the_runs_found(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    report = importlib.import_module("_helpers.uci_report")
    runs = {
        label: json.loads((RESULTS / f"uci_regression_{preset}.json").read_text())
        for preset, label in UCI_METHODS.items()
    }
    assert str(report.methods_table(runs)) in (ROOT / "docs" / "results.md").read_text()


@pytest.mark.parametrize("score", ["rmse", "log_likelihood"])
def test_the_uci_tables_have_what_the_runs_found(monkeypatch, score):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    uci = importlib.import_module("_helpers.uci_report")
    run = json.loads((RESULTS / "uci_regression_ours.json").read_text())
    for name in uci.PUBLISHED:
        assert run[name]["splits"] == 20
        cells = map(uci.shown, uci.rows_of(name, run[name], score).values())
        assert f"| {name} | {' | '.join(cells)} |" in PAGE


def test_the_wheel_bandit_has_what_the_runs_found(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    wheel = importlib.import_module("wheel_bandit")
    found = json.loads((RESULTS / "wheel_bandit.json").read_text())["agents"]
    assert str(wheel.table(found, wheel.DELTAS)) in PAGE
    regret = {
        agent: [by_delta[str(d)]["mean"]["regret"] for d in wheel.DELTAS]
        for agent, by_delta in found.items()
    }
    published = wheel.PUBLISHED["published: NeuralLinear"]
    for agent in ("last layer", "BBB"):
        assert all(ours < theirs for ours, theirs in zip(regret[agent], published, strict=True))
