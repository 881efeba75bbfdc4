# SPDX-License-Identifier: Apache-2.0
"""Packages that an extra of pyro-bbb installs."""

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtra(ImportError):
    """A package is not installed; the message names the extra that installs it."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import packages that the extra of this name installs."""
    try:
        yield
    except ModuleNotFoundError as error:
        if str(error.name).startswith("pyro_bbb"):
            raise
        raise MissingExtra(
            f'{error.name} is not installed: pip install "pyro-bbb[{name}]"'
        ) from error
