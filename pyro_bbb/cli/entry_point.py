# SPDX-License-Identifier: Apache-2.0
"""The commands by name, and what becomes of errors.

Exit codes: 0 all went well; 1 an error that is no fault of the input; 2 a wrong option or bad data;
130 interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import tyro

from pyro_bbb._utils.extras import MissingExtra
from pyro_bbb._utils.version import __version__
from pyro_bbb.cli.console import Console
from pyro_bbb.cli.errors import BadInput
from pyro_bbb.cli.options import COMMANDS

DESCRIPTION = """Bayesian neural networks for tables: predictions that say how certain they are.

pyro-bbb --version prints the version.

Shell completion: pyro-bbb --tyro-write-completion bash FILE (or zsh, tcsh), then source FILE."""
BAD_INPUT, INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: those after the program's name; by default of this process.

    Returns:
        The exit code.

    Raises:
        SystemExit: the arguments do not parse (code 2), or ask for help (code 0).
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["--version"]:
        print(f"pyro-bbb {__version__}")
        return 0
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="pyro-bbb",
        description=DESCRIPTION,
        args=words,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    console = Console(command.json, command.quiet)
    try:
        result = command.run(console)
    except (BadInput, MissingExtra) as error:
        print(f"error: {error}", file=sys.stderr)
        if command.json:
            print(json.dumps({"error": str(error)}))
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    console.result(result)
    return INTERRUPTED if result.get("interrupted") else 0
