# SPDX-License-Identifier: Apache-2.0
"""pyproject.toml, uv.lock, environment.yml and conda's recipe have the same packages and bounds."""

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pyro_bbb import __version__

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {
    "torch": "pytorch",
    "matplotlib": "matplotlib-base",
    "build": "python-build",
    "playwright": "playwright-python",
}  # others are called the same
# groups of packages that conda-forge does not have, or not with the others
PIP_ONLY = {"benchmarks", "peers", "comparison"}
EXTRAS = {"apps": "play"}  # of packages that are not called as their extra


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def project():
    return pyproject()["project"]


GROUPS = pyproject()["dependency-groups"].keys()


def parsed(lines):
    requirements = [Requirement(line) for line in lines]
    bounds = {canonicalize_name(r.name): str(r.specifier) for r in requirements}
    assert len(bounds) == len(requirements), "a package is listed twice"
    return bounds


def from_pyproject(extras=True, groups=frozenset()):
    """Package to bounds, by conda's names: dependencies of the library, its extras and groups."""
    declared = project()
    written = pyproject()["dependency-groups"]
    lines = [line for name in groups for line in written[name] if isinstance(line, str)]
    lines += declared["dependencies"]
    if extras:
        lines = sum(declared["optional-dependencies"].values(), lines)
    own = [line for line in lines if Requirement(line).name == declared["name"]]
    bounds = parsed(line for line in lines if line not in own)
    bounds["python"] = declared["requires-python"]
    return {CONDA_NAMES.get(name, name): bound for name, bound in bounds.items()}


def from_environment():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    bounds = parsed(environment["dependencies"])
    assert bounds.pop("pip") == ""  # installs the project itself
    return bounds


def recipe():
    """The recipe, with the values of its context in their positions."""
    text = (ROOT / "recipe" / "recipe.yaml").read_text()
    for name, value in yaml.safe_load(text)["context"].items():
        text = text.replace(f"${{{{ {name} }}}}", str(value))
    return yaml.safe_load(text)


def test_the_environment_has_the_library_its_extras_and_groups():
    assert from_environment() == from_pyproject(groups=GROUPS - PIP_ONLY)


def test_the_recipe_has_the_library_alone():
    written = recipe()
    assert parsed(written["requirements"]["run"]) == from_pyproject(extras=False)
    _, _, setuptools = written["requirements"]["host"]
    assert [Requirement(setuptools)] == [*map(Requirement, pyproject()["build-system"]["requires"])]
    scripts = [f"{name} = {target}" for name, target in project()["scripts"].items()]
    assert written["build"]["python"]["entry_points"] == scripts


def test_the_lock_file_is_of_these_requirements():
    packages = tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))["package"]
    (own,) = (package for package in packages if package["name"] == project()["name"])
    metadata = own["metadata"]
    bounds = {
        required["name"]: required["specifier"]
        for required in sum(metadata["requires-dev"].values(), metadata["requires-dist"])
        if required["name"] != own["name"]
    }
    expected = from_pyproject(groups=GROUPS)
    del expected["python"]
    assert {CONDA_NAMES.get(name, name): bound for name, bound in bounds.items()} == expected
    others = [package["source"] for package in packages if package != own]
    assert all(source == {"registry": "https://pypi.org/simple"} for source in others)


def test_all_files_say_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == recipe()["package"]["version"] == __version__


def test_every_bound_is_a_lower_bound():
    for name, bound in from_pyproject(groups=GROUPS).items():
        assert bound.startswith(">=") and "," not in bound, f"{name}{bound}"


# --- what the library imports ---


def requirements(extra=None):
    """Packages of the library and, with those that it names, of an extra of it."""
    declared = project()
    lines = declared["optional-dependencies"][extra] if extra else declared["dependencies"]
    for requirement in map(Requirement, lines):
        if requirement.name != declared["name"]:
            yield canonicalize_name(requirement.name)
        for nested in requirement.extras:
            yield from requirements(nested)


def imported(files):
    """Packages outside the standard library that files of the library import, anywhere."""
    for path in ROOT.glob(f"pyro_bbb/{files}"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            yield from (name.partition(".")[0] for name in names)


def test_the_library_or_a_packages_extra_installs_what_it_imports():
    folders = (path.parent.name for path in (ROOT / "pyro_bbb").glob("*/__init__.py"))
    names = packages_distributions()
    for files in ["*.py", *(f"{name}/**/*.py" for name in sorted(folders))]:
        extra = EXTRAS.get(files.partition("/")[0], files.partition("/")[0])
        known = extra in project()["optional-dependencies"]
        installed = {*requirements(), *requirements(extra if known else None)}
        for package in set(imported(files)) - sys.stdlib_module_names - {"pyro_bbb"}:
            owners = {canonicalize_name(name) for name in names[package]}
            assert owners & installed, f"pyro_bbb/{files} imports {package}"
