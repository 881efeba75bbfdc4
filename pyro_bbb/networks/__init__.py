# SPDX-License-Identifier: Apache-2.0
"""Bayesian layers and neural networks, and the conversion of any torch module.

A new layer or network is a class in ``_layers.py``. ``_bayesianize.py`` converts any network,
recurrent ones too, ``_select.py`` reads the argument ``where``, and ``_adapters.py`` adds low-rank
adapters.

Imports the packages up to `priors`.
"""

from pyro_bbb.networks._adapters import Adapted, adapt, merge_adapters
from pyro_bbb.networks._adapters import copy_sharing as copy_sharing
from pyro_bbb.networks._bayesianize import Converted, bayesianize, mix_in
from pyro_bbb.networks._layers import BayesianConv2d, BayesianLeNet5, BayesianLinear, BayesianMLP
from pyro_bbb.networks._layers import Offset as Offset
from pyro_bbb.networks._layers import PaddingMode as PaddingMode

__all__ = [
    "Adapted",
    "BayesianConv2d",
    "BayesianLeNet5",
    "BayesianLinear",
    "BayesianMLP",
    "Converted",
    "adapt",
    "bayesianize",
    "merge_adapters",
    "mix_in",
]
