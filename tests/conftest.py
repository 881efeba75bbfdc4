"""What every test starts from: one seed, an empty parameter store, float32."""

import pyro
import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_state():
    dtype = torch.get_default_dtype()
    pyro.set_rng_seed(0)  # torch, numpy and random
    pyro.clear_param_store()
    yield
    torch.set_default_dtype(dtype)
    pyro.clear_param_store()
