# SPDX-License-Identifier: Apache-2.0
"""Bayesian layers and networks, and the conversion of any torch module.

Imports the rooms up to `priors`. A new layer is a class in ``_layers.py``; a layer type that
`bayesianize` should convert goes into ``_bayesianize.py``.
"""

from pyro_bbb.networks._adapt import adapt
from pyro_bbb.networks._adapt import copy_sharing as copy_sharing
from pyro_bbb.networks._adapted_layers import Adapted, merge_adapters
from pyro_bbb.networks._architectures import BayesianLeNet5, BayesianMLP
from pyro_bbb.networks._architectures import Offset as Offset
from pyro_bbb.networks._bayesianize import Converted, bayesianize, mix_in
from pyro_bbb.networks._layers import BayesianConv2d, BayesianLinear
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
