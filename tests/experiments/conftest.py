# SPDX-License-Identifier: Apache-2.0
"""Experiments and their helpers as modules."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def load(monkeypatch):
    """Import a module of the experiments by its name, as when a file of them is run."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "experiments")
    return importlib.import_module
