# SPDX-License-Identifier: Apache-2.0
"""The command line, ``pyro-bbb``: train on a table, predict, evaluate, prune, report.

Imports every room. A new command is its options in ``options.py`` and ``run`` in a module of the
same name in ``commands``; a score that `evaluate` prints gets its name in ``metrics.py``.

``pip install "pyro-bbb[cli]"`` installs what it needs; ``pyro-bbb --help`` and
``pyro-bbb COMMAND --help`` list the commands and their options.
"""

from pyro_bbb._utils.extras import MissingExtra, extra

try:
    with extra("cli"):
        from pyro_bbb.cli.entry_point import main
except MissingExtra as error:
    raise SystemExit(str(error)) from error

__all__ = ["main"]
