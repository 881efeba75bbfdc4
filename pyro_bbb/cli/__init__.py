"""The command line, ``pyro-bbb``: train on a table, predict, evaluate, prune, report.

``pip install "pyro-bbb[cli]"`` installs what it needs; ``pyro-bbb --help`` and
``pyro-bbb COMMAND --help`` say what there is.
"""

from pyro_bbb.cli.app import main

__all__ = ["main"]
