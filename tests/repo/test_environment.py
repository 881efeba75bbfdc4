"""environment.yml and pyproject.toml ask for the same packages with the same bounds."""

import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {
    "torch": "pytorch",
    "matplotlib": "matplotlib-base",
    "playwright": "playwright-python",
}  # others are called the same
# extras of packages that conda-forge does not have, or not beside the others
PIP_ONLY = {"benchmarks", "peers", "comparison"}


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def parsed(lines):
    requirements = [Requirement(line) for line in lines]
    bounds = {canonicalize_name(r.name): str(r.specifier) for r in requirements}
    assert len(bounds) == len(requirements), "a package is listed twice"
    return bounds


def from_pyproject(without=frozenset()):
    """Package to bounds: the library's dependencies and its extras, by their conda names."""
    declared = project()
    extras = declared["optional-dependencies"].items()
    lines = declared["dependencies"] + sum((e for name, e in extras if name not in without), [])
    own = [line for line in lines if Requirement(line).name == declared["name"]]
    bounds = parsed(line for line in lines if line not in own)
    bounds["python"] = declared["requires-python"]
    return {CONDA_NAMES.get(name, name): bound for name, bound in bounds.items()}


def from_environment():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    bounds = parsed(environment["dependencies"])
    assert bounds.pop("pip") == ""  # installs the project itself
    return bounds


def test_both_files_agree():
    assert from_environment() == from_pyproject(without=PIP_ONLY)


def test_every_bound_is_a_lower_bound():
    for name, bound in from_pyproject().items():
        assert bound.startswith(">=") and "," not in bound, f"{name}{bound}"


def test_dev_contains_the_experiments():
    extras = project()["optional-dependencies"]
    assert "pyro-bbb[experiments]" in extras["dev"]
