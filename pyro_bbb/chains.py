# SPDX-License-Identifier: Apache-2.0
"""Moved to `pyro_bbb.mcmc`; this name stays until the first release."""

from pyro_bbb.mcmc import Chains as Chains
