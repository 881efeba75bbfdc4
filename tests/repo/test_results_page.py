# SPDX-License-Identifier: Apache-2.0
"""docs/results.md lists every committed run, as its record has it."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDS = sorted((ROOT / "docs" / "results").glob("*.json"))
PAGE = (ROOT / "docs" / "results.md").read_text()

CPU, GPU = "2 cores of a shared AMD EPYC server", "NVIDIA H200"
MACHINES = {None: CPU, "cpu": CPU, "cuda": GPU}  # by the record's device, else as it says
COMMANDS = {  # where it is not `experiments/NAME.py --preset PRESET --repeats SEEDS`
    "active_learning_batches": (
        "experiments/active_learning.py --preset batches --rules BALD BatchBALD random --repeats 6"
    ),
    "benchmarks": "benchmarks/run.py",
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
    "shift_fashion": "experiments/shift.py --problems fashion_mlp --images 1000",
    "shift_lenet5": "experiments/shift.py --problems mnist_lenet5 --images 1000",
    "posterior_fidelity": "experiments/posterior_fidelity.py --page docs/fidelity.md",
    "lenet5_fashion_ivon": (
        "experiments/lenet5_mnist.py --preset ivon --dataset fashion_mnist --repeats 3 --compared 0"
    ),
    **{
        f"uci_regression_{preset}": f"experiments/uci_regression.py --preset {preset}"
        for preset in ("dropout", "ensemble5", "ensemble10", "heteroscedastic", "single", "vbll")
    },
    "lenet5_fashion_ours": "experiments/lenet5_mnist.py --dataset fashion_mnist --repeats 3",
    "mushroom_bandit_published": "experiments/mushroom_bandit.py --pieces A B C D E",
    "paper_mnist_ours": "experiments/paper_mnist.py --repeats 3 --device cuda",
    "paper_mnist_published": "experiments/paper_mnist.py --preset published --device cuda",
    "paper_pruning_ours": "experiments/paper_pruning.py --device cuda",
}
WITHOUT_SEEDS = "uci_regression", "mushroom_bandit", "active_learning", "sklearn_comparison"


def command(name, seeds):
    if name in COMMANDS:
        return COMMANDS[name]
    experiment, _, preset = name.rpartition("_")
    if preset not in ("ours", "published"):
        return f"experiments/{name}.py"
    words = [f"experiments/{experiment}.py"]
    words += ["--preset published"] if preset == "published" else []
    words += [f"--repeats {seeds}"] if seeds > 1 and experiment not in WITHOUT_SEEDS else []
    return " ".join(words)


def minutes(seconds):
    total = sum(seconds.values()) if isinstance(seconds, dict) else seconds
    return "–" if total is None else f"{total / 60:.0f}"


def row(path):
    record = json.loads(path.read_text())
    name, seeds = path.stem, len(record.get("seeds", [0]))
    cells = (
        f"[{name}](results/{path.name})",
        f"`python {command(name, seeds)}`",
        minutes(record.get("seconds")),
        MACHINES.get(record.get("device"), record.get("device")),
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_run_is_listed(path):
    assert row(path) in PAGE


def test_nothing_else_is():
    listed = [line for line in PAGE.splitlines() if line.startswith("| [")]
    assert sorted(listed) == sorted(map(row, RECORDS))
