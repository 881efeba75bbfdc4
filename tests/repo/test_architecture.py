# SPDX-License-Identifier: Apache-2.0
"""The limits of the packages: what is on top, what is private, and what importing it must not do.

Contracts of import-linter in ``pyproject.toml`` hold that packages import only lower layers.
"""

import ast
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pyro_bbb"
EXPERIMENTS = ROOT / "experiments"

MOST_ENTRIES = 25  # on top of the package
LICENCE = "# SPDX-License-Identifier: Apache-2.0"  # of pyproject.toml
FILES = ("pyro_bbb", "experiments", "examples", "benchmarks", "tests")  # with code
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in MODULES} - {PACKAGE})


def is_old_path(path):
    """Whether a module holds but the names that moved out of it."""
    doc = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    return (doc or "").startswith("Moved to `")


def private_of_others(path):
    """Private modules of other packages that a file of the library imports."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    for name in imported_names(path.read_text("utf-8"), package):
        first, *inner = name.split(".")[1:] or [""]
        same = package == f"pyro_bbb.{first}" or package.startswith(f"pyro_bbb.{first}.")
        foreign = name.startswith("pyro_bbb.") and not same
        if foreign and any(p.startswith("_") and not p.endswith("__") for p in inner):
            yield name


# --- packages ---


def test_a_reader_sees_few_entries_on_top():
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    old = {path.stem for path in PACKAGE.glob("*.py") if is_old_path(path)}
    assert len(entries - old - {"__init__", "__main__", "__pycache__"}) <= MOST_ENTRIES


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_package_says_what_it_is_for(folder):
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8")))
    assert doc and doc.count(".") >= 2, "what is inside, what it imports, where to add one"
    assert "Imports" in doc


def test_every_file_names_its_licence():
    files = [path for folder in FILES for path in sorted((ROOT / folder).rglob("*.py"))]
    first = {path.name: path.read_text("utf-8").partition("\n")[0] for path in files}
    assert len(files) > 300
    assert {name: line for name, line in first.items() if line and line != LICENCE} == {}


def test_a_private_module_is_imported_by_its_own_package_alone():
    imports = {path.name: sorted(private_of_others(path)) for path in MODULES}
    assert not {name: names for name, names in imports.items() if names}


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


# --- experiments ---


def sibling_imports(source: str, siblings: set[str]) -> set[str]:
    """Experiments that a file next to them imports, as ``experiments.x``, ``.x`` or plain ``x``."""
    imported = set()
    for name in imported_names(source, "experiments"):
        path = name.removeprefix("experiments.").split(".")
        imported |= {path[0]} & siblings
    return imported


def test_experiments_share_only_helpers():
    paths = sorted(EXPERIMENTS.rglob("*.py"))
    experiments = {path.stem for path in paths if path.parent == EXPERIMENTS}
    assert experiments
    for path in paths:
        source = path.read_text()
        imported = sibling_imports(source, experiments - {path.stem})
        assert not imported, f"{path.name} imports the experiment {imported}; share a helper"
        assert not sibling_imports(source, {"tests"}), f"{path.name} imports tests"


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
"""

# Packages that take long to import, or that an extra installs; `plots` imports the first two.
HEAVY = {
    *("matplotlib", "PIL", "scipy", "sklearn", "torchvision", "pandas", "polars", "tyro", "jinja2"),
    *("arviz", "nicegui", "onnx", "onnxruntime", "onnxscript", "transformers"),
}
USE = """
import sys, pyro
before = set(sys.modules)  # of torch and Pyro
import pyro_bbb
for name in set(pyro_bbb.__all__) - {"plots"}:
    getattr(pyro_bbb, name)
print(*sorted({name.partition(".")[0] for name in sys.modules.keys() - before}))
"""


def test_importing_the_library_has_no_side_effect():
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""


def test_importing_the_names_of_the_library_loads_no_heavy_package():
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "safetensors" in loaded  # each package is loaded at the first use of a name of it
    assert not loaded & HEAVY
