# SPDX-License-Identifier: Apache-2.0
"""Moved to `pyro_bbb.training.objectives`; this name stays until the first release."""

from pyro_bbb.training.objectives import *  # noqa: F403
from pyro_bbb.training.objectives import __all__ as __all__
