# SPDX-License-Identifier: Apache-2.0
"""Moved to `pyro_bbb.training.optim`; this name stays until the first release."""

from pyro_bbb.training.optim import IVON, JointOptim, make_optim
from pyro_bbb.training.optim import Optimizer as Optimizer

__all__ = ["IVON", "JointOptim", "make_optim"]
