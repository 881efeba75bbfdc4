# SPDX-License-Identifier: Apache-2.0
"""The program ``pyro-bbb``: train on a table, predict, evaluate, prune, report, and `play`'s page.

Imports any other package. ``command_line.py`` has the options of each command; a command is a
function of that name in the module that its options name. ``pip install "pyro-bbb[cli]"`` installs
what the commands on tables need, ``pyro-bbb[play]`` what all of them need, and
``pyro-bbb COMMAND --help`` lists the options.
"""

import sys

from pyro_bbb._utils.extras import MissingExtra, extra

try:
    with extra("play" if "play" in sys.argv[1:2] else "cli"):
        from pyro_bbb.apps.command_line import main
except MissingExtra as _error:
    raise SystemExit(str(_error)) from _error

__all__ = ["main"]
