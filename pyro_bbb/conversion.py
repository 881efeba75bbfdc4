# SPDX-License-Identifier: Apache-2.0
"""Moved to `pyro_bbb.networks`; this name stays until the first release."""

from pyro_bbb.networks import Converted, bayesianize, mix_in

__all__ = ["Converted", "bayesianize", "mix_in"]
