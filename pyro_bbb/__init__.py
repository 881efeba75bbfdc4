# SPDX-License-Identifier: Apache-2.0
"""Bayesian neural networks by variational inference on Pyro.

Four nouns, each replaceable alone (network, prior, likelihood, guide); the verbs are functions.

The names are in ``__init__.pyi``. Each package is imported at the first use of one of its
names, so that ``pyro-bbb --help`` and a service import only what they use.
"""

from lazy_loader import attach_stub

_OLD_PATHS = {"optim"}

__getattr__, __dir__, _names = attach_stub(__name__, __file__)
__all__ = sorted(set(_names) - _OLD_PATHS - {"__version__"})
