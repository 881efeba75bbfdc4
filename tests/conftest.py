# SPDX-License-Identifier: Apache-2.0
"""What every test starts from: one seed, an empty parameter store, float32."""

import os
from pathlib import Path

import pyro
import pytest
import torch

torch.set_num_threads(1)  # nets this small gain nothing from more, and lose on a busy machine

# For an absent device torch.manual_seed formats a traceback, which takes 2 ms, and keeps it.
for device in (torch.cuda, torch.mtia, torch.xpu):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None

# Tests of which many share one costly set-up come first, so that one of two processes has them all.
FIRST = ("test_play_page.py", "test_notebooks.py", "test_distributed.py")
BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in FIRST)


@pytest.fixture(autouse=True)
def fresh_state():
    dtype = torch.get_default_dtype()
    pyro.set_rng_seed(0)  # torch, numpy and random
    pyro.clear_param_store()
    yield
    torch.set_default_dtype(dtype)
    pyro.clear_param_store()


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def unvalidated():
    with pyro.validation_enabled(False):
        yield


@pytest.fixture
def real_root():
    """Folder of the real MNIST and Fashion-MNIST; tests of them are skipped without it."""
    root = Path(os.environ.get("PYRO_BBB_DATA") or BESIDE)
    if not (root / "MNIST").is_dir():
        pytest.skip("PYRO_BBB_DATA names no folder with MNIST")
    return root
