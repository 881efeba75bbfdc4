# SPDX-License-Identifier: Apache-2.0
"""What must be imported before a save can be read."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_load_knows_every_class_without_further_imports():
    """The library imports its parts at first use; `load` alone registers all that saves name."""
    code = """if True:
        from pyro_bbb import load
        from pyro_bbb._utils.saving import SAVED_CLASSES
        known = set(SAVED_CLASSES)
        import importlib
        packages = "networks priors likelihoods guides models estimators training"
        for name in packages.split():
            importlib.import_module(f"pyro_bbb.{name}")
        print(len(known), sorted(set(SAVED_CLASSES) - known))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    number, *missing = done.stdout.split(maxsplit=1)
    assert int(number) >= 18 and missing == ["[]\n"]
