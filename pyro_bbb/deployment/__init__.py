# SPDX-License-Identifier: Apache-2.0
"""Plain torch modules out of a posterior: the mean network, and an ensemble of draws.

``_mean_network.py`` has `to_module` and the copy of a network without Pyro, ``_ensemble.py``
`to_ensemble`. A new form of export is one module here.

Imports the packages up to `prediction`.
"""

from pyro_bbb.deployment._ensemble import DrawnEnsemble, to_ensemble
from pyro_bbb.deployment._mean_network import sparse_where_faster, to_module

__all__ = ["DrawnEnsemble", "sparse_where_faster", "to_ensemble", "to_module"]
