# SPDX-License-Identifier: Apache-2.0
"""A posterior outside this library: plain torch modules, and adapters of `peft`.

``_plain_modules.py`` makes the mean network and the ensemble of draws, copies without Pyro.
``peft.py`` reads and writes adapters.

Imports the packages up to `prediction`.
"""

from pyro_bbb.deployment import peft
from pyro_bbb.deployment._plain_modules import (
    DrawnEnsemble,
    sparse_where_faster,
    to_ensemble,
    to_module,
)

__all__ = ["DrawnEnsemble", "peft", "sparse_where_faster", "to_ensemble", "to_module"]
