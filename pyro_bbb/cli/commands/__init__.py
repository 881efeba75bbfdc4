# SPDX-License-Identifier: Apache-2.0
"""The commands of ``pyro-bbb``, one module each.

Imports the modules of `cli` and the rooms of the library. A new command is one module here,
with ``run``, and its options in ``cli/options.py``.
"""

from lazy_loader import attach

_COMMANDS = {"demo", "evaluate", "play", "predict", "prune", "report", "train"}

__getattr__, __dir__, __all__ = attach(__name__, submodules=_COMMANDS)
