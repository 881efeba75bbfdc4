"""The command line, ``pyro-bbb``: train on a table, predict, evaluate, prune, report.

Imports every room. A new command is one module in ``commands`` and its entry in
``entry_point.py``; a score that `evaluate` prints gets its name in ``metrics.py``.

``pip install "pyro-bbb[cli]"`` installs what it needs; ``pyro-bbb --help`` and
``pyro-bbb COMMAND --help`` list the commands and their options.
"""

from pyro_bbb.cli.entry_point import main

__all__ = ["main"]
