# SPDX-License-Identifier: Apache-2.0
"""The numbers that the page on choosing repeats are those of the records they come from."""

import json
import re
from pathlib import Path
from statistics import median

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "guide" / "choose.md").read_text(encoding="utf-8")
POSTERIORS = {  # the page's names, and those of `experiments/posteriors.py`
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


def test_the_table_of_pruned_networks_has_the_record():
    found = json.loads((DOCS / "results/mnist_mlp_ours.json").read_text())["mean"]["mixture prior"]
    page = (DOCS / "guide/pruning_and_deploying.md").read_text()
    for removed in ("0.75", "0.95", "0.98"):
        sizes = found["exported"][removed]
        cells = [f"{100 * float(removed):.0f}", f"{100 * found['pruning'][removed]:.2f}"]
        cells += [f"{sizes[key]:.2f}" for key in ("size", "latency_one", "latency_thousand")]
        assert f"| {' | '.join(cells)} |" in page


def test_guides_off_the_data_and_their_seconds():
    problems = json.loads((DOCS / "results/posterior_fidelity.json").read_text())["problems"]
    rows = table("guides")
    assert len(rows) == 9
    for name, *numbers, _ in rows:
        key = {"delta": "delta (MAP)"}.get(name, name.removeprefix("no guide: "))
        found = [problem["guides"][key] for problem in problems.values()]
        found = [guide for guide in found if "failed" not in guide]
        distances = [guide["off"]["function"] for guide in found]
        ratios = [guide["off"]["sd_ratio"] for guide in found]
        values = (median(distances), max(distances), min(ratios), max(ratios))
        seconds = median(guide["seconds"] for guide in found)
        assert numbers == [*(f"{value:.2f}" for value in values), f"{seconds:.0f}"], name


def test_what_each_posterior_is_worth_and_costs():
    found = json.loads((DOCS / "results/posteriors.json").read_text())["problems"]["fashion_mlp"]
    rows = table("posteriors")
    assert [method for method, *_ in rows] == list(POSTERIORS)
    for method, *numbers, _ in rows:
        mean = found[POSTERIORS[method]]["mean"]
        costs = [f"{mean[key]:.1f}" for key in ("training", "prediction")]
        assert numbers == [f"{mean['nll']:.3f}", f"{100 * mean['ood']['epistemic']:.1f}", *costs]


def test_the_time_of_a_step_by_each_estimator():
    comparisons = json.loads((DOCS / "results/benchmarks.json").read_text())["comparisons"]
    title = "gradient estimators of pyro_bbb, width 400"
    (steps,) = (each["contenders"] for each in comparisons if each["title"] == title)
    rows = table("estimators")
    assert len(rows) == 4
    for name, number, _ in rows:
        name = name.strip('"')
        key = "pyro_bbb (mixture)" if name == "reparam" else f"pyro_bbb, {name}"
        assert number == f"{steps[key]['ratio']:.1f}", name


def table(name: str) -> list[list[str]]:
    """The cells of a marked table's rows below its head, without backticks."""
    (marked,) = re.findall(rf"<!-- {name} -->\n(.*?)<!-- end -->", PAGE, flags=re.DOTALL)
    rows = [line.strip("|").split("|") for line in marked.splitlines()[2:]]
    return [[cell.replace("`", "").strip() for cell in row] for row in rows]
