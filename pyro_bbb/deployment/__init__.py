# SPDX-License-Identifier: Apache-2.0
"""Plain torch modules out of a posterior: the mean network, and an ensemble of draws.

Imports the rooms up to `prediction`. A new form of export is one module here; ``_strip_pyro.py``
copies a network without Pyro.
"""

from pyro_bbb.deployment._ensemble import DrawnEnsemble, to_ensemble
from pyro_bbb.deployment._mean_network import sparse_where_faster, to_module

__all__ = ["DrawnEnsemble", "sparse_where_faster", "to_ensemble", "to_module"]
