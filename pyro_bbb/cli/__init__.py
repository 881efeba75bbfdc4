"""The command line, ``pyro-bbb``: train on a table, predict, evaluate, prune, report.

Imports every room. A new command is one module in ``commands`` and its entry in
``entry_point.py``; a score that `evaluate` prints gets its name in ``metrics.py``.

``pip install "pyro-bbb[cli]"`` installs what it needs; ``pyro-bbb --help`` and
``pyro-bbb COMMAND --help`` list the commands and their options.
"""

try:
    from pyro_bbb.cli.entry_point import main
except ModuleNotFoundError as error:
    if str(error.name).startswith("pyro_bbb"):
        raise
    raise SystemExit(f'pyro-bbb needs {error.name}: pip install "pyro-bbb[cli]"') from error

__all__ = ["main"]
