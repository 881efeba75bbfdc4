# SPDX-License-Identifier: Apache-2.0
"""The pins with which ``make test-lowest`` runs the suite."""

import tomllib

from packaging.requirements import Requirement

from tests._support.min_versions import PYPROJECT, lowest_python, pins

DECLARED = {
    "project": {
        "name": "ours",
        "requires-python": ">=3.11",
        "dependencies": ["a>=1.2"],
        "optional-dependencies": {"more": ["b-c>=3"], "all": ["ours[more]"]},
    },
    "dependency-groups": {
        "dev": [{"include-group": "docs"}, "d>=0.4.1"],
        "docs": ["e>=2"],
        "benchmarks": ["f>=5"],
    },
}


def test_bounds_become_pins():
    assert pins(DECLARED) == ["a==1.2", "b-c==3", "e==2", "d==0.4.1"]
    assert lowest_python(DECLARED["project"]) == (3, 11)


def test_every_package_that_the_suite_needs_is_pinned_once():
    requirements = [Requirement(line) for line in pins(tomllib.loads(PYPROJECT.read_text()))]
    names = [requirement.name for requirement in requirements]
    assert {"torch", "safetensors", "arviz", "scikit-learn", "pytest"} <= set(names)
    assert len(set(names)) == len(names)
    for requirement in requirements:
        assert [specifier.operator for specifier in requirement.specifier] == ["=="]
