"""Data flow one way: who may import whom, and what importing the library must not do."""

import ast
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "pyro_bbb"
EXPERIMENTS = ROOT / "experiments"

# Module -> (modules next upstream, third-party packages). A module may import whatever is upstream
# of it, so that `networks`, which follows `priors`, may import `distributions` too.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    "_version": (set(), set()),
    "_checks": (set(), {"torch"}),
    "_exclusive": (set(), set()),
    "_pyro": ({"_checks", "_exclusive"}, {"pyro", "torch"}),
    "_event": (set(), {"pyro", "torch"}),
    "_softplus": ({"_memory"}, {"torch"}),
    "_memory": (set(), {"torch", "numpy"}),
    "_plates": (set(), {"pyro", "torch"}),
    "_blocks": (set(), {"torch"}),
    "_whole": ({"_memory"}, {"torch"}),
    "_shared": ({"_whole", "_blocks"}, {"torch"}),
    "_log_sums": ({"_event"}, {"torch"}),
    "_draw": ({"_event", "_log_sums", "_softplus", "_shared"}, {"torch"}),
    "_log_mixture": ({"_blocks", "_event", "_log_sums", "_memory"}, {"torch"}),
    "_mixture": ({"_log_mixture", "_checks"}, {"pyro", "torch"}),
    "_squares": ({"_event"}, {"torch"}),
    "_normals": ({"_draw", "_softplus", "_squares"}, {"pyro", "torch"}),
    "_held": ({"_memory"}, {"pyro", "torch"}),
    "_kept": ({"_normals", "_whole"}, {"pyro", "torch"}),
    "_beside": ({"_normals", "_held", "_kept"}, {"pyro", "torch"}),
    "_divergences": ({"_normals", "_memory"}, {"pyro", "torch"}),
    "_copies": ({"_mixture", "_normals"}, {"torch"}),
    "distributions": ({"_divergences", "_copies", "_softplus"}, set()),
    "_families": ({"_event"}, {"pyro", "torch", "scipy"}),
    "_prior": ({"distributions", "_pyro"}, {"pyro", "torch"}),
    "_learned": ({"_prior"}, {"pyro", "torch"}),
    "_hierarchical": ({"_prior"}, {"pyro", "torch"}),
    "_from_guide": ({"_prior"}, {"pyro", "torch"}),
    "priors": ({"_learned", "_hierarchical", "_from_guide"}, {"pyro", "torch"}),
    "networks": ({"priors"}, {"pyro", "torch"}),
    "_where": ({"priors"}, {"torch"}),
    "conversion": ({"priors", "_where", "_pyro"}, {"pyro", "torch"}),
    "likelihoods": ({"_families", "priors"}, {"pyro", "torch"}),
    "models": ({"networks", "likelihoods", "_plates"}, {"pyro", "torch"}),
    "_latents": ({"_checks"}, {"pyro", "torch"}),
    "_guide": ({"_latents", "_pyro"}, {"pyro", "torch"}),
    "_softplus_normal": (
        {"distributions", "_beside", "_guide", "_plates", "_softplus"},
        {"pyro", "torch"},
    ),
    "_stock": ({"_guide"}, {"pyro", "torch"}),
    "_joint": ({"_stock"}, {"pyro", "torch"}),
    "_laplace": ({"_joint"}, {"pyro", "torch"}),
    "_ensemble": ({"_laplace"}, {"pyro", "torch"}),
    "guides": ({"_softplus_normal", "_ensemble"}, set()),
    "_schedules": ({"_checks"}, {"torch"}),
    "objectives": ({"_pyro", "_beside", "_plates", "_schedules"}, {"pyro", "torch"}),
    "_files": (set(), set()),
    "_image_sets": ({"_files"}, {"torch", "torchvision", "numpy"}),
    "_tables": ({"_files"}, {"torch", "numpy"}),
    "data": ({"_checks", "_image_sets", "_tables"}, {"torch", "numpy"}),
    "history": ({"objectives"}, set()),
    "optim": ({"objectives"}, {"pyro", "torch"}),
    "_draws": ({"distributions", "_held", "_pyro"}, {"pyro", "torch"}),
    "_deviation": ({"_memory"}, {"torch"}),
    "estimators": ({"_draws", "_deviation"}, {"pyro", "torch"}),
    "_processes": (set(), {"torch"}),
    "_batches": ({"data", "models", "_processes"}, {"torch"}),
    "_fit_checks": ({"models", "estimators", "guides", "_batches"}, {"pyro", "torch"}),
    "_unread": ({"optim"}, {"torch"}),
    "_captured": ({"_unread", "guides", "history"}, {"pyro", "torch"}),
    "_guarded": ({"history"}, {"pyro", "torch"}),
    "_programs": ({"models", "guides"}, {"torch"}),
    "_vectorised": ({"models", "guides"}, {"pyro", "torch"}),
    "_interrupts": (set(), set()),
    "_frozen": (set(), {"torch"}),
    "_rates": (set(), set()),
    "_steps": ({"_interrupts", "_processes", "history", "optim"}, {"pyro", "torch"}),
    "_engine": ({"_captured", "_guarded", "_steps"}, {"pyro"}),
    "_loop": ({"_batches", "_interrupts", "history"}, {"torch"}),
    "_packed": ({"_archive"}, {"torch"}),
    "_fingerprint": ({"_archive", "_batches", "_version", "optim"}, {"torch"}),
    "_archive_for_all": ({"_archive", "_processes"}, {"torch", "safetensors"}),
    "_checkpoint": (
        {"_archive_for_all", "_fingerprint", "_loop", "_packed", "_state", "guides"},
        {"pyro", "torch"},
    ),
    "training": (
        {
            "_fit_checks",
            "_engine",
            "_programs",
            "_checkpoint",
            "_rates",
            "_exclusive",
            "_frozen",
            "_vectorised",
            "pruning",
            "estimators",
        },
        {"pyro", "torch", "tqdm"},
    ),
    "summaries": ({"likelihoods"}, {"torch"}),
    "_per_draw": ({"models"}, {"pyro", "torch"}),
    "_unvalued": ({"_softplus_normal"}, {"torch"}),
    "_per_input": ({"_per_draw", "_unvalued"}, {"torch"}),
    "_dense": ({"models", "conversion", "_unvalued"}, {"pyro", "torch"}),
    "prediction": (
        {"_per_draw", "_per_input", "_dense", "_processes", "summaries"},
        {"pyro", "torch"},
    ),
    "chains": ({"models", "data"}, {"pyro", "torch", "arviz"}),
    "_recording": (set(), {"torch"}),
    "_potential": ({"models", "_recording"}, {"pyro", "torch"}),
    "_nuts": ({"_potential"}, {"pyro", "torch"}),
    "_starts": ({"_potential", "prediction", "_latents"}, {"pyro", "torch"}),
    "mcmc": ({"_nuts", "_starts", "chains"}, {"torch", "numpy", "tqdm"}),
    "bandits": ({"models", "estimators", "_programs", "_exclusive"}, {"pyro", "torch"}),
    "metrics": (set(), {"torch", "torchmetrics"}),
    "pruning": ({"_kept"}, {"pyro", "torch"}),
    "_plain": ({"priors"}, {"pyro", "torch"}),
    "export": ({"models", "_plain"}, {"torch"}),
    "deployment": ({"_plain", "prediction"}, {"pyro", "torch"}),
    "_archive": (set(), {"torch", "safetensors"}),
    "_spec": ({"_archive"}, set()),
    "_state": ({"_archive"}, {"torch"}),
    "_values": ({"_mixture"}, {"pyro", "torch"}),
    "_layers": (set(), {"torch"}),
    "_kinds": ({"_layers", "networks", "likelihoods"}, {"torch"}),
    "_blueprint": ({"_kinds", "_values", "conversion"}, {"pyro", "torch"}),
    "_guide_record": ({"guides"}, {"pyro", "torch"}),
    "persistence": (
        {"models", "_blueprint", "_guide_record", "_spec", "_state", "_version"},
        {"pyro", "torch"},
    ),
    "_scaling": (set(), {"numpy"}),
    "_recipe": ({"estimators", "guides", "likelihoods", "objectives"}, {"pyro", "torch"}),
    "_learner": ({"_recipe", "networks", "prediction", "training"}, {"torch"}),
    "_units": ({"_scaling", "summaries"}, {"torch"}),
    "_estimator": ({"_learner", "_scaling", "persistence"}, {"torch", "numpy", "sklearn"}),
    "_regressor": ({"_estimator", "_units"}, {"torch", "numpy", "sklearn"}),
    "_classifier": ({"_estimator", "_units"}, {"torch", "numpy", "sklearn"}),
    "sklearn": ({"_regressor", "_classifier"}, set()),
    "cli": (
        {"sklearn", "metrics", "plots", "pruning", "play"},
        {"torch", "numpy", "matplotlib", "sklearn", "polars", "tyro", "jinja2", "tqdm"},
    ),
    "play": (
        {"training", "prediction", "pruning", "persistence", "data", "_colours"},
        {"pyro", "torch", "numpy", "PIL", "sklearn", "nicegui"},
    ),
    "__main__": ({"cli"}, set()),
    "_colours": (set(), set()),
    "_arrays": (set(), {"torch", "numpy"}),
    "_plots_answers": (
        {"summaries", "metrics", "_colours", "_arrays"},
        {"torch", "numpy", "matplotlib"},
    ),
    "_plots_bands": (
        {"summaries", "_colours", "_checks", "_arrays"},
        {"torch", "numpy", "matplotlib"},
    ),
    "_plots_weights": (
        {"guides", "_colours", "_checks", "_arrays"},
        {"torch", "numpy", "matplotlib"},
    ),
    "plots": (
        {"history", "_colours", "_plots_answers", "_plots_bands", "_plots_weights"},
        {"torch", "matplotlib"},
    ),
}
# For scikit-learn and the shell; nothing in the library imports them
FRONT = {"_estimator", "_regressor", "_classifier", "sklearn", "cli", "play", "__main__"}
MODULES = sorted(
    {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")}
)


def upstream(module: str) -> set[str]:
    """Every module that ``module`` may import."""
    if module == "__init__":
        return {module for module in TABLE if "plots" not in module} - FRONT
    nearest = TABLE[module][0]
    return nearest.union(*(upstream(other) for other in nearest))


def imported_names(source: str, package: str) -> set[str]:
    """Dotted names that a file of ``package`` imports, at any depth, lazily or for types only."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def split_imports(source: str, package: str = "pyro_bbb") -> tuple[set[str], set[str]]:
    """Modules of pyro_bbb, and third-party packages, that a file of ``package`` imports."""
    internal, foreign = set(), set()
    for name in imported_names(source, package):
        top, *rest = name.split(".")
        if top == "pyro_bbb":
            internal.add(rest[0] if rest else "__init__")
        elif top not in sys.stdlib_module_names:
            foreign.add(top)
    return internal, foreign


def files_of(module: str) -> list[Path]:
    return [PACKAGE / f"{module}.py", *(PACKAGE / module).rglob("*.py")]


# --- the reader of imports itself ---


@pytest.mark.parametrize(
    ("source", "internal", "foreign"),
    [
        ("import os, torch.nn as nn", set(), {"torch"}),
        ("from pyro_bbb import data\nfrom pyro_bbb.priors import Prior", {"data", "priors"}, set()),
        ("from . import data\nfrom .priors import Prior", {"data", "priors"}, set()),
        ("import pyro_bbb.models", {"models"}, set()),
        ("import pyro_bbb", {"__init__"}, set()),
        ("def f():\n    from matplotlib import pyplot", set(), {"matplotlib"}),
        ("from pyro.infer import SVI", set(), {"pyro"}),
    ],
)
def test_imports_are_found(source, internal, foreign):
    assert split_imports(source) == (internal, foreign)


def test_relative_imports_of_a_folder_are_resolved():
    source = "from ..priors import Prior\nfrom .step import step"
    assert split_imports(source, "pyro_bbb.training") == ({"priors", "training"}, set())


# --- the table ---


def test_the_table_has_no_cycle_and_keeps_the_forbidden_pairs_apart():
    assert all(module not in upstream(module) for module in TABLE)  # a cycle recurses for ever
    assert "priors" not in upstream("guides")
    assert upstream("metrics") == set()
    assert upstream("data") == {"_checks", "_files", "_image_sets", "_tables"}
    assert not any("pyro" in TABLE[module][1] for module in ("metrics", "data", *upstream("data")))
    drawing = {module for module in TABLE if "matplotlib" in TABLE[module][1]}
    assert drawing == {module for module in TABLE if "plots" in module} | {"cli"}
    others = {*TABLE, "__init__"} - drawing - FRONT
    assert not any((drawing | FRONT) & upstream(module) for module in others)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_is_upstream(module):
    assert module == "__init__" or module in TABLE, f"{module} is missing from the table"
    allowed = set() if module == "__init__" else TABLE[module][1]
    for path in filter(Path.exists, files_of(module)):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        internal, foreign = split_imports(path.read_text(), package)
        assert internal - {module} <= upstream(module), f"{path.name} imports against the flow"
        assert foreign <= allowed, f"{path.name} imports a package that is not its own"


# --- experiments ---


def sibling_imports(source: str, siblings: set[str]) -> set[str]:
    """Experiments that a file beside them imports, as ``experiments.x``, ``.x`` or plain ``x``."""
    found = set()
    for name in imported_names(source, "experiments"):
        parts = name.removeprefix("experiments.").split(".")
        found |= {parts[0]} & siblings
    return found


def test_experiments_share_only_helpers():
    paths = sorted(EXPERIMENTS.glob("*.py"))
    experiments = {path.stem for path in paths if not path.stem.startswith("_")}
    assert experiments
    for path in paths:
        source = path.read_text()
        others = sibling_imports(source, experiments - {path.stem})
        assert not others, f"{path.name} imports the experiment {others}; share a _helper"
        assert not sibling_imports(source, {"tests"}), f"{path.name} imports tests"


def test_imports_of_another_experiment_are_found():
    for source in ("import sine", "from experiments.sine import f", "from . import sine"):
        assert sibling_imports(source, {"sine"}) == {"sine"}
    assert sibling_imports("from experiments._common import f", {"sine"}) == set()


# --- importing the library ---

IMPORT = """
import random, sys
import numpy, pyro, torch
def state():
    return dict(
        torch=torch.get_rng_state().tolist(),
        numpy=numpy.random.get_state()[1].tolist(),
        random=random.getstate(),
        dtype=torch.get_default_dtype(),
        threads=torch.get_num_threads(),
        grad=torch.is_grad_enabled(),
        validation=torch.distributions.Distribution._validate_args,
        params=list(pyro.get_param_store()),
        pyro={name: value for name, value in pyro.settings.get().items() if name in known},
    )
known = set(pyro.settings.get())
before = state()
import pyro_bbb
assert pyro_bbb.__file__, "pyro_bbb has no __init__.py"
changed = [name for name, value in state().items() if value != before[name]]
assert not changed, f"importing pyro_bbb changed {changed}"
for name in ("matplotlib", "sklearn", "pandas", "polars", "tyro"):
    assert name not in sys.modules, f"importing pyro_bbb imported {name}"
"""


def test_importing_the_library_has_no_side_effect():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
